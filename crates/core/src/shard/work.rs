//! The amount of user code in a turn, and the order in which connections get it.
//!
//! A turn that handled everything would keep later peers waiting for all of it: 500 peers that fill
//! their buffers with empty lines are 30 million calls. So a turn has a bound, and a connection
//! gets a batch of frames at a time. Remaining frames wait in a queue behind all earlier ones, and
//! are taken up first in the next turn; in between the driver is asked for news. A connection with
//! one frame then waits for at most one batch of each of the others.
//!
//! Calls are cheap or not, which no shard knows before. So a turn that took long halves the bound
//! and the least batch for the next one, and a short turn doubles them again.

use core::time::Duration;

/// Calls of a turn: frames handed out, resumed calls and tasks. Later ones wait for the next turn.
/// It is as much as a driver brings in a turn if each of its 256 completions is 16 pipelined
/// requests: 0.6 ms of the cheapest calls. Calls of 5 µs would be 20 ms, and have a quarter of it.
const CALLS_IN_A_TURN: u32 = 4096;

/// Frames in a row for one connection while many want some: the usual depth of a pipeline, which is
/// then not torn apart. 500 peers that send without end delay a frame by 2000 calls of 5 µs, since
/// long turns leave a quarter of it.
const BATCH_MIN: u32 = 16;

/// Beyond this time a turn was long: the next one has half of the calls.
const LONG_TURN: Duration = Duration::from_millis(6);

/// Below this time a turn was short: the next one has twice the calls, if it had less than all.
/// Twice a short turn is not long.
const SHORT_TURN: Duration = Duration::from_micros(1500);

/// The most times that calls and batches are halved: down to 256 calls a turn, which is one for
/// each completion, and single frames.
const HALVED_MAX: u32 = 4;

/// A turn that nothing halved, in parts of which each halved one has some.
pub(super) const WHOLE: u32 = 1 << HALVED_MAX;

/// Frames in a row for a single connection. A thousand calls of 25 ns are 25 µs.
const BATCH_MAX: u32 = 1024;

/// The part of a turn's calls reserved for resumed calls and tasks: peers that send without end
/// take all others.
const PART_OF_TASKS: u32 = 8;

/// The part of a turn for waiting connections while the driver has more news than it may bring in a
/// turn, since connections in that news have had no batch yet. Receives of peers that send too much
/// are paused as the queue is emptied, so it ends.
const PART_WHILE_CROWDED: u32 = 16;

/// Steps of all pages of a turn. A step is a delivery as a rule, which leads to a send and its
/// completion, so that these are half of what the driver brings in a turn.
const PAGE_STEPS: u32 = 128;

/// The part of them for a turn that brought as many completions as one may, or has no more than
/// that part of its calls left: those who ask go first.
const PART_OF_PAGES: u32 = 8;

/// The bounds of a turn.
#[derive(Clone, Copy)]
struct Bounds {
    calls_max: u32,
    tasks_max: u32,
    batch_min: u32,
    page_steps: u32,
    /// These bounds as a part of [`WHOLE`].
    part: u32,
}

impl Bounds {
    /// Halved so often.
    fn halved(self, times: u32) -> Bounds {
        let least = |most: u32| (most >> times).max(1);
        Bounds {
            calls_max: least(self.calls_max),
            tasks_max: least(self.tasks_max),
            batch_min: least(self.batch_min),
            page_steps: least(self.page_steps),
            part: self.part >> times,
        }
    }
}

/// The rest of the turn.
pub(super) struct Work {
    /// Those of a turn that nothing halved.
    whole: Bounds,
    /// The times that the bounds are halved, for long turns.
    halved: u32,
    bounds: Bounds,
    calls_left: u32,
    /// Calls that no frame takes.
    tasks_left: u32,
    /// Frames that a connection may get in this turn.
    batch: u32,
    /// Frames granted to the connection at hand, and the rest of them.
    granted: u32,
    frames_left: u32,
}

impl Default for Work {
    fn default() -> Work {
        Work::bounded(CALLS_IN_A_TURN, BATCH_MIN)
    }
}

impl Work {
    /// Other bounds, of at least 1.
    pub(super) fn bounded(calls_max: u32, batch_min: u32) -> Work {
        let tasks_max = calls_max.div_ceil(PART_OF_TASKS);
        let page_steps = calls_max.min(PAGE_STEPS);
        let whole = Bounds { calls_max, tasks_max, batch_min, page_steps, part: WHOLE };
        Work {
            whole,
            halved: 0,
            bounds: whole,
            calls_left: 0,
            tasks_left: 0,
            batch: 0,
            granted: 0,
            frames_left: 0,
        }
    }

    /// Fits the next turn's work to the time that the last one `took`, where another one followed
    /// without a wait.
    #[cold]
    pub(super) fn fit(&mut self, took: Duration) {
        if took > LONG_TURN {
            self.halved = (self.halved + 1).min(HALVED_MAX);
        } else if took < SHORT_TURN {
            self.halved = self.halved.saturating_sub(1);
        }
        self.bounds = self.whole.halved(self.halved);
    }

    /// The part of [`WHOLE`] that the turn may do.
    #[inline]
    pub(super) fn part(&self) -> u32 {
        self.bounds.part
    }

    /// Begins a turn in which at most `connections` want frames.
    #[inline]
    pub(super) fn begin_turn(&mut self, connections: usize) {
        let Bounds { calls_max, tasks_max, batch_min, .. } = self.bounds;
        // Few connections need no division.
        self.batch = if connections * BATCH_MAX as usize <= calls_max as usize {
            BATCH_MAX
        } else {
            (calls_max / connections.min(calls_max as usize) as u32).clamp(batch_min, BATCH_MAX)
        };
        (self.calls_left, self.frames_left) = (calls_max, 0);
        self.tasks_left = tasks_max;
    }

    /// The number of waiting connections that get a batch now, if each uses all of it. `crowded` is
    /// true if the driver has more news than it brought.
    pub(super) fn batches(&self, crowded: bool) -> usize {
        let calls = if crowded { self.calls_left / PART_WHILE_CROWDED } else { self.calls_left };
        calls.div_ceil(self.batch).max(1) as usize
    }

    /// Begins the batch of a connection. The rest of the batch before is for others.
    #[inline]
    pub(super) fn begin_batch(&mut self) {
        let calls = self.calls_left + self.frames_left;
        self.granted = self.batch.min(calls);
        (self.frames_left, self.calls_left) = (self.granted, calls - self.granted);
    }

    /// Gives the connection at hand nothing in this turn.
    #[cold]
    pub(super) fn refuse_batch(&mut self) {
        self.calls_left += self.frames_left;
        (self.granted, self.frames_left) = (0, 0);
    }

    /// True if the connection at hand found no room in the turn.
    pub(super) fn is_full(&self) -> bool {
        self.granted == 0
    }

    /// Frames that the connection with the batch may still get.
    #[inline]
    pub(super) fn frames_left(&self) -> u32 {
        self.frames_left
    }

    /// Ends the batch, with this number of frames not taken.
    #[inline]
    pub(super) fn end_batch(&mut self, left: u32) {
        self.frames_left = left;
    }

    /// Steps of the pages of this turn, at least 1. `is_crowded` is true if the driver may have
    /// more news than it brought.
    pub(super) fn page_steps(&self, is_crowded: bool) -> u32 {
        let calls_left = self.calls_left + self.frames_left;
        let is_busy = is_crowded || calls_left <= self.bounds.calls_max / PART_OF_PAGES;
        let part = if is_busy { PART_OF_PAGES } else { 1 };
        (self.bounds.page_steps / part).max(1)
    }

    /// True if the turn has room for another call that is no frame, which then counts. It ends the
    /// batch.
    #[inline]
    pub(super) fn take_call(&mut self) -> bool {
        let calls = self.calls_left + self.frames_left;
        (self.frames_left, self.calls_left) = (0, calls.saturating_sub(1));
        let tasks = self.tasks_left;
        if calls == 0 {
            self.tasks_left = tasks.saturating_sub(1);
        }
        calls + tasks > 0
    }
}
