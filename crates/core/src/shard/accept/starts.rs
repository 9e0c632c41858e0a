//! Connections of one listener whose PROXY header or handshake is awaited, by age: which of them
//! ends if there are many.
//!
//! Below half of the limit each has [`handshake_timeout`](crate::Limits::handshake_timeout). From
//! there on the time falls, to [`LEAST`] at the limit. At the limit one ends for each new
//! connection: the oldest that brought no byte and is older than [`SILENT`], else the oldest that
//! is older than `LEAST`.

use alloc::collections::VecDeque;
use core::time::Duration;

use crate::shard::QUEUE_KEPT;
use crate::shard::timers::FEW;
use crate::{ConnId, Time};

/// The least age of one that brought no byte and makes room: with a round trip of half a second the
/// peer has sent something by then.
const SILENT: Duration = Duration::from_secs(1);

/// The least age of one that brought some, and the time of all at the limit: a packet that was lost
/// twice has arrived by then.
const LEAST: Duration = Duration::from_secs(3);

/// The full time if there is no limit.
const WITHOUT_LIMIT: Duration = Duration::from_secs(10);

/// The number of turns in a row that may all have left something in the kernel, after which
/// everything that was there before them was looked at: thousands of completions.
const MANY: u32 = 256;

/// The time up to which peers' bytes were looked at. A peer whose bytes wait in the kernel, because
/// the shard was away or is busy, is not silent.
#[derive(Default)]
pub(in crate::shard) struct LookBound {
    until: Time,
    /// The last turn, and whether it left nothing in the kernel.
    turn: Time,
    is_all: bool,
    /// The number of turns in a row that may have left something, and the first of them.
    row: u32,
    row_from: Time,
}

impl LookBound {
    /// Notes that a turn begins that brings `completions`, after one that was looked at.
    pub(in crate::shard) fn turn_begins(&mut self, now: Time, completions: usize) {
        if self.is_all || self.row == 0 {
            self.row_from = self.turn;
        }
        self.row += 1;
        if self.is_all || self.row == MANY {
            (self.until, self.row) = (self.row_from, 0);
        }
        (self.turn, self.is_all) = (now, completions < FEW);
    }

    pub(super) fn until(&self) -> Time {
        self.until
    }
}

/// The stage of a connection that was begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// It is open, or gone.
    Over,
    /// Its peer brought no byte.
    Silent,
    /// It brought some.
    Heard,
    /// The next step is the shard's.
    Works,
}

/// A connection that began. One whose header is complete, and which begins with a handshake, has
/// another place for that: from there on its peer is expected to send again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Begun {
    pub(super) id: ConnId,
    /// True if it began with a header, false for a handshake.
    pub(super) is_header: bool,
    since: Time,
}

impl Begun {
    pub(super) fn new(id: ConnId, is_header: bool, now: Time) -> Begun {
        Begun { id, is_header, since: now }
    }
}

/// The most connections that wait for the shard and are skipped in favour of a later one: the shard
/// handles them in the order in which they came.
const PASSED_OVER: usize = 64;

/// The starts of a listener.
#[derive(Default)]
pub(in crate::shard) struct Starts {
    count: usize,
    /// Those that had brought no byte when they were last looked at, the oldest first. Some are
    /// over, or have brought some by now.
    silent: VecDeque<Begun>,
    /// Those that had brought some, the oldest first: each that is older than the first silent one.
    /// Some are over.
    heard: VecDeque<Begun>,
}

impl Starts {
    /// The number of starts.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Counts one. False if the system has no memory for the note: then it has no place by age.
    pub(super) fn begin(&mut self, begun: Begun, stage: impl Fn(&Begun) -> Stage) -> bool {
        self.count += 1;
        if self.silent.len() + self.heard.len() > 2 * self.count + QUEUE_KEPT {
            for queue in [&mut self.silent, &mut self.heard] {
                queue.retain(|begun| stage(begun) != Stage::Over);
            }
        }
        let has_room = self.silent.try_reserve(1).is_ok();
        if has_room {
            self.silent.push_back(begun);
        }
        has_room
    }

    /// Notes that one is over.
    pub(super) fn end(&mut self) {
        self.count -= 1;
        if self.count == 0 {
            for queue in [&mut self.silent, &mut self.heard] {
                queue.clear();
                queue.shrink_to(QUEUE_KEPT);
            }
        }
    }

    /// True from half of the limit on.
    pub(super) fn is_crowd(&self, max: usize) -> bool {
        self.count * 2 >= max.max(2)
    }

    /// The time that each has; `whole` if there are few.
    fn time(&self, max: usize, whole: Option<Duration>) -> Duration {
        let whole = whole.unwrap_or(WITHOUT_LIMIT);
        let beyond = (self.count * 2).saturating_sub(max).min(max);
        whole - whole.saturating_sub(LEAST) * beyond as u32 / max as u32
    }

    /// The first of both queues that does not wait for the shard, after those that are over were
    /// removed and those that brought bytes changed queues.
    fn firsts(&mut self, stage: impl Fn(&Begun) -> Stage) -> [Option<Begun>; 2] {
        let mut silent = None;
        while let Some(&begun) = self.silent.front() {
            let is = stage(&begun);
            if is == Stage::Silent {
                silent = Some(begun);
                break;
            }
            self.silent.pop_front();
            // Without memory it has no place, and ends by its own limit.
            if is != Stage::Over && self.heard.try_reserve(1).is_ok() {
                self.heard.push_back(begun);
            }
        }
        let mut at = 0;
        while let Some(begun) = self.heard.get(at).filter(|_| at <= PASSED_OVER) {
            match stage(begun) {
                Stage::Over => drop(self.heard.remove(at)),
                Stage::Works => at += 1,
                Stage::Silent | Stage::Heard => return [silent, Some(*begun)],
            }
        }
        [silent, None]
    }

    /// The one that ends for a new connection at the limit, if there is one, given that everything
    /// that came until `then` was looked at.
    pub(super) fn first_to_go(&mut self, then: Time, stage: impl Fn(&Begun) -> Stage) -> Option<ConnId> {
        let [silent, heard] = self.firsts(stage);
        let goes = |first: Option<Begun>, age: Duration| first.filter(|begun| begun.since + age <= then);
        goes(silent, SILENT).or_else(|| goes(heard, LEAST)).map(|begun| begun.id)
    }

    /// One that had its time, if there is a crowd, given that everything that came until `then` was
    /// looked at.
    pub(super) fn out_of_time(
        &mut self,
        then: Time,
        max: usize,
        whole: Option<Duration>,
        stage: impl Fn(&Begun) -> Stage,
    ) -> Option<ConnId> {
        if !self.is_crowd(max) {
            return None;
        }
        let time = self.time(max, whole);
        let firsts = self.firsts(stage).into_iter().flatten();
        let mut over = firsts.filter(|begun| begun.since + time <= then);
        over.next().map(|begun| begun.id)
    }

    /// The next time at which one has to end, if there is a crowd; or, while new connections may
    /// wait for a place, at which one may.
    pub(super) fn next(&self, max: usize, whole: Option<Duration>, one_waits: bool) -> Option<Time> {
        if !one_waits && !self.is_crowd(max) {
            return None;
        }
        let time = self.time(max, whole);
        let [silent, heard] = if one_waits { [SILENT.min(time), LEAST.min(time)] } else { [time, time] };
        let next = |queue: &VecDeque<Begun>, age| queue.front().map(|begun| begun.since + age);
        [next(&self.silent, silent), next(&self.heard, heard)].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: Option<Duration> = Some(Duration::from_secs(10));

    fn at(seconds: u64) -> Time {
        Time::ZERO + Duration::from_secs(seconds)
    }

    fn id(number: u32) -> ConnId {
        ConnId::new(number, 1)
    }

    /// Starts of one a second, the first at zero.
    fn begun(count: u32) -> Starts {
        let mut starts = Starts::default();
        for number in 0..count {
            assert!(starts.begin(Begun::new(id(number), false, at(number.into())), |_| Stage::Silent));
        }
        starts
    }

    #[test]
    fn silent_ones_go_first_though_others_are_older() {
        let mut starts = begun(6);
        let stage = |of: &Begun| match of.id.slot() {
            0 => Stage::Heard,
            1 => Stage::Over,
            3 => Stage::Silent,
            _ => Stage::Heard,
        };
        assert_eq!(starts.first_to_go(at(6), stage), Some(id(3)));
        assert_eq!(starts.first_to_go(at(6), |_| Stage::Heard), Some(id(0)));
        assert_eq!(
            starts.first_to_go(at(6), |of| if of.id == id(0) { Stage::Over } else { Stage::Heard }),
            Some(id(2))
        );
    }

    #[test]
    fn young_ones_and_those_that_wait_for_the_shard_stay() {
        let half = Duration::from_millis(500);
        let mut starts = begun(1);
        assert_eq!(starts.first_to_go(Time::ZERO + half, |_| Stage::Silent), None);
        assert_eq!(starts.next(1, WHOLE, true), Some(at(1)));
        assert_eq!(starts.first_to_go(at(1), |_| Stage::Silent), Some(id(0)));
        assert_eq!(starts.first_to_go(at(2), |_| Stage::Heard), None);
        assert_eq!(starts.next(1, WHOLE, true), Some(at(3)));
        assert_eq!(starts.first_to_go(at(9), |_| Stage::Works), None);
        assert_eq!(starts.first_to_go(at(3), |_| Stage::Heard), Some(id(0)));
    }

    #[test]
    fn one_behind_those_that_wait_for_the_shard_makes_room() {
        let works =
            |below: u32| move |of: &Begun| if of.id.slot() < below { Stage::Works } else { Stage::Heard };
        let mut starts = begun(100);
        assert_eq!(starts.first_to_go(at(9), works(1)), Some(id(1)));
        assert_eq!(starts.out_of_time(at(9), 100, WHOLE, works(2)), Some(id(2)));
        assert_eq!(starts.first_to_go(at(99), works(PASSED_OVER as u32)), Some(id(PASSED_OVER as u32)));
        assert_eq!(starts.first_to_go(at(99), works(PASSED_OVER as u32 + 1)), None);
        // Starts that are over cost no look.
        let over = |of: &Begun| match of.id.slot() {
            0 => Stage::Works,
            1..90 => Stage::Over,
            _ => Stage::Heard,
        };
        assert_eq!(starts.first_to_go(at(99), over), Some(id(90)));
    }

    #[test]
    fn time_falls_from_half_of_the_limit_on() {
        let mut starts = begun(3);
        assert_eq!((starts.is_crowd(8), starts.next(8, WHOLE, false)), (false, None));
        starts.begin(Begun::new(id(3), false, at(3)), |_| Stage::Silent);
        for (count, seconds) in [(4, 10.0), (5, 8.25), (6, 6.5), (8, 3.0), (9, 3.0)] {
            starts.count = count;
            let time = Duration::from_secs_f64(seconds);
            assert_eq!(
                (starts.time(8, WHOLE), starts.next(8, WHOLE, false)),
                (time, Some(Time::ZERO + time))
            );
        }
        assert_eq!(starts.out_of_time(at(2), 8, WHOLE, |_| Stage::Silent), None);
        assert_eq!(starts.out_of_time(at(3), 8, WHOLE, |_| Stage::Silent), Some(id(0)));
        assert_eq!(starts.out_of_time(at(3), 8, WHOLE, |_| Stage::Heard), Some(id(0)));
        assert_eq!(starts.out_of_time(at(9), 8, WHOLE, |_| Stage::Works), None);
        let short = Some(Duration::from_secs(2));
        assert_eq!((starts.time(8, short), starts.time(8, None)), (Duration::from_secs(2), LEAST));
    }

    #[test]
    fn what_came_was_looked_at_once_a_turn_brought_little() {
        let mut looked = LookBound::default();
        looked.turn_begins(at(1), 3);
        assert_eq!(looked.until(), Time::ZERO);
        looked.turn_begins(at(9), 300);
        assert_eq!(looked.until(), at(1), "the shard was away meanwhile");
        for turn in 0..MANY as u64 {
            assert_eq!(looked.until(), at(1));
            looked.turn_begins(at(10 + turn), 300);
        }
        assert_eq!(looked.until(), at(9));
        looked.turn_begins(at(900), 0);
        looked.turn_begins(at(901), 300);
        assert_eq!(looked.until(), at(900));
    }

    #[test]
    fn those_that_are_over_do_not_pile_up_behind_one_that_stays() {
        let mut starts = Starts::default();
        for number in 0..100_000 {
            assert!(starts.begin(Begun::new(id(number), false, at(1)), |of| if of.id == id(0) {
                Stage::Heard
            } else {
                Stage::Over
            }));
            if number > 0 {
                starts.end();
            }
        }
        assert!(starts.silent.len() <= QUEUE_KEPT + 8, "{}", starts.silent.len());
        starts.end();
        assert_eq!((starts.silent.len(), starts.heard.len()), (0, 0));
    }
}
