//! The return of a shard's memory: once it is quiet, and needs less than half of what it needed
//! since the last time.
//!
//! ```text
//!   grown ──▶ less is needed ──▶ a pause later: quiet? ──▶ ring ──▶ chunks, a few in a turn ──▶ heap
//!                   ▲                   │ no
//!                   └───────────────────┘
//! ```
//!
//! A steady load never pays: while much is moved nothing is given back, and where the memory is
//! needed again soon the pause doubles.

use std::time::Duration;

use ringserve_core::{GivesBack, Time};

/// The time for which less must have been needed, at first and at most. Short enough for those who
/// look after a storm, long compared with the milliseconds that the return takes.
const PAUSE: Duration = Duration::from_secs(2);
const PAUSE_MAX: Duration = Duration::from_secs(64);

/// A shard that moves less than this in a second is quiet: a chunk of receive memory.
const QUIET_BYTES: u64 = 1 << 20;

/// Lower values are not worth the work: together about a megabyte.
const CONNECTIONS: usize = 256;
const HELD_BYTES: usize = 1 << 20;
const BUFFERS: usize = ringserve_buf::CHUNK_BUFFERS;

/// The number of times that the ring's buffers are requested again while receives are armed that
/// cannot be stopped.
const TRIES: u32 = 5;

/// The present needs of a shard.
#[derive(Clone, Copy, Default)]
pub(crate) struct InUse {
    pub connections: usize,
    /// In outboxes and inboxes.
    pub held_bytes: usize,
    /// Receive buffers, and those of them that no frame pins.
    pub buffers: usize,
    pub idle_buffers: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing is given back.
    None,
    /// The driver takes buffers back.
    Ring,
    /// The pool's free chunks go.
    Chunks,
}

/// The needs of a shard, and its progress in giving back what it no longer needs.
pub(crate) struct Spare {
    /// The most since memory was given back.
    most: InUse,
    /// Idle buffers that stayed then.
    stayed: usize,
    /// The time of the next check whether the shard is quiet, and what it had moved when that was
    /// set.
    look_at: Time,
    moved: u64,
    pause: Duration,
    /// When memory was given back last.
    last: Time,
    step: Step,
    /// A check is set, or memory is being given back.
    active: bool,
    /// Sizes at the last note.
    sizes: usize,
    /// Each turn concerns it: it is active, or waits for less to be needed.
    attends: bool,
    /// The driver waits for receives to end, and brings the next turn.
    waits: bool,
    refused: bool,
    tries: u32,
}

impl Spare {
    pub(crate) fn new() -> Spare {
        Spare {
            most: InUse::default(),
            stayed: BUFFERS,
            look_at: Time::NEVER,
            moved: 0,
            pause: PAUSE,
            last: Time::ZERO,
            step: Step::None,
            active: false,
            sizes: 0,
            attends: false,
            waits: false,
            refused: false,
            tries: 0,
        }
    }

    /// In each turn: true if there is something to [note](Spare::note) or to do. `megabytes` are
    /// those held.
    #[inline]
    pub(crate) fn is_concerned(&self, connections: usize, buffers: usize, megabytes: usize) -> bool {
        self.attends || sizes(connections, buffers, megabytes) != self.sizes
    }

    /// The needs at the end of a turn, with the bytes that were moved since the start.
    pub(crate) fn note(&mut self, now: Time, needs: InUse, moved: u64) {
        self.sizes = sizes(needs.connections, needs.buffers, needs.held_bytes >> 20);
        self.most.connections = self.most.connections.max(needs.connections);
        self.most.held_bytes = self.most.held_bytes.max(needs.held_bytes);
        if !self.active && self.is_worth_it(needs) {
            self.check_later(now, moved);
        }
        let grown = self.most.connections >= CONNECTIONS || self.most.held_bytes >= HELD_BYTES;
        // Buffers that frames pin now may be idle later, without a change of sizes.
        self.attends = self.active || grown || needs.buffers > self.stayed;
    }

    /// Postpones the check by a pause.
    pub(crate) fn check_later(&mut self, now: Time, moved: u64) {
        (self.look_at, self.moved, self.active) = (now + self.pause, moved, true);
    }

    fn is_worth_it(&self, needs: InUse) -> bool {
        self.most.connections >= CONNECTIONS && needs.connections <= self.most.connections / 2
            || self.most.held_bytes >= HELD_BYTES && needs.held_bytes <= self.most.held_bytes / 2
            || needs.idle_buffers > self.stayed
    }

    /// True if a check is set, or memory is being given back.
    #[inline]
    pub(crate) fn is_active(&self) -> bool {
        self.active
    }

    /// When it has something to do by itself.
    pub(crate) fn next(&self) -> Option<Time> {
        (self.look_at != Time::NEVER).then_some(self.look_at)
    }

    pub(crate) fn is_due(&self, now: Time) -> bool {
        now >= self.look_at
    }

    /// True if the next step is not to wait for anything.
    pub(crate) fn has_to_do(&self) -> bool {
        self.step != Step::None && !self.waits
    }

    pub(crate) fn step(&self) -> Step {
        self.step
    }

    /// Once it is due. True if the shard is quiet: then it begins.
    pub(crate) fn begins(&mut self, now: Time, needs: InUse, moved: u64) -> bool {
        (self.look_at, self.active) = (Time::NEVER, false);
        if !self.is_worth_it(needs) {
            return false;
        }
        if moved - self.moved > QUIET_BYTES * self.pause.as_secs() {
            self.check_later(now, moved);
            return false;
        }
        (self.moved, self.active) = (moved, true);
        let soon = self.last > Time::ZERO && now - self.last < 4 * self.pause;
        self.pause = if soon { (2 * self.pause).min(PAUSE_MAX) } else { PAUSE };
        self.last = now;
        (self.most, self.step) = (needs, Step::Ring);
        true
    }

    /// The driver's answer.
    pub(crate) fn ring(&mut self, came_to: GivesBack) {
        self.waits = came_to == GivesBack::Waits;
        if !self.waits {
            self.refused = came_to == GivesBack::Refused;
            self.step = Step::Chunks;
        }
    }

    /// No free chunk is left.
    pub(crate) fn done(&mut self, now: Time, needs: InUse, moved: u64) {
        (self.step, self.active) = (Step::None, false);
        self.tries = if self.refused { self.tries + 1 } else { 0 };
        if self.refused && self.tries < TRIES {
            return self.check_later(now, moved);
        }
        self.tries = 0;
        // What came meanwhile has buffers that will not stay.
        self.stayed = if moved == self.moved { needs.idle_buffers.max(BUFFERS) } else { BUFFERS };
    }
}

/// Differs where one of them does.
#[inline]
fn sizes(connections: usize, buffers: usize, megabytes: usize) -> usize {
    connections ^ buffers << 24 ^ megabytes << 40
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn at(seconds: u64) -> Time {
        Time::from_nanos(seconds * 1_000_000_000)
    }

    fn of(connections: usize, held_bytes: usize, idle_buffers: usize) -> InUse {
        InUse { connections, held_bytes, buffers: idle_buffers, idle_buffers }
    }

    /// The former needs, and the needs from then on.
    fn begins(most: InUse, now: InUse, moved: u64) -> bool {
        let mut spare = Spare::new();
        spare.note(at(1), most, 0);
        spare.note(at(2), now, 0);
        spare.next().is_some_and(|next| spare.is_due(next) && spare.begins(next, now, moved))
    }

    #[test]
    fn quiet_shard_that_needs_less_than_half_gives_memory_back() {
        let nothing = of(0, 0, 64);
        for most in [of(256, 0, 64), of(0, MIB as usize, 64), of(9000, 5 << 20, 4096)] {
            assert!(begins(most, nothing, MIB), "quiet");
            assert!(!begins(most, nothing, 3 * MIB), "busy");
            assert!(!begins(most, of(most.connections, most.held_bytes, 64), 0), "still needed");
        }
        assert!(begins(nothing, of(0, 0, 65), 0), "buffers that no frame pins");
        assert!(!begins(of(255, 1 << 19, 64), nothing, 0), "too little");
    }

    #[test]
    fn a_load_that_comes_and_goes_doubles_the_pause() {
        let (mut spare, mut now, mut pauses) = (Spare::new(), at(1), Vec::new());
        for _ in 0..8 {
            spare.note(now, of(1000, 0, 64), 0);
            spare.note(now, of(0, 0, 64), 0);
            let next = spare.next().expect("less is needed");
            pauses.push((next - now).as_secs());
            now = next;
            assert!(spare.begins(now, of(0, 0, 64), 0));
            spare.ring(GivesBack::Waits);
            assert_eq!(spare.step(), Step::Ring);
            spare.ring(GivesBack::Done);
            spare.done(now, of(0, 0, 64), 0);
            assert_eq!((spare.step(), spare.next()), (Step::None, None));
        }
        assert_eq!(pauses, [2, 2, 4, 8, 16, 32, 64, 64]);
        now = now + Duration::from_secs(1000);
        spare.note(now, of(1000, 0, 64), 0);
        spare.note(now, of(0, 0, 64), 0);
        assert!(spare.begins(spare.next().unwrap(), of(0, 0, 64), 0));
        assert_eq!(spare.pause, PAUSE, "after a long rest it is short again");
    }

    #[test]
    fn memory_that_stays_taken_is_asked_for_a_few_times_only() {
        let (mut spare, much) = (Spare::new(), of(0, 0, 4096));
        spare.note(at(1), much, 0);
        let mut tries = 0;
        while let Some(next) = spare.next() {
            assert!(spare.begins(next, much, 0));
            spare.ring(GivesBack::Refused);
            spare.done(next, much, 0);
            spare.note(next, much, 0);
            tries += 1;
        }
        assert_eq!(tries, TRIES);
        spare.note(at(9999), of(0, 0, 4097), 0);
        assert!(spare.next().is_some(), "more than stayed");
    }
}
