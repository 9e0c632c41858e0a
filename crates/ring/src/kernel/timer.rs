//! The end of a wait, set once for many waits.
//!
//! A time given with `io_uring_enter` sets a timer of the kernel's and clears it again, in every call: measured, half a
//! microsecond, 6 % of a turn with one request in it. The deadlines of a server are mostly far away, and move away. So
//! one timeout operation stays with the kernel until it goes off, and waits that end behind it need no time of their own.
//! It may go off when nothing is due any more, once; a wait may end early.

use std::time::Duration;

use io_uring::opcode;
use io_uring::squeue::Entry;
use io_uring::types::{TimeoutFlags, Timespec};
use rustix::time::{ClockId, clock_gettime};

/// Waits up to this long have their time in the call: an operation of their own, and the next one, would cost more.
const SHORT: Duration = Duration::from_millis(20);

pub(super) struct Timer {
    /// When the operation with the kernel goes off, on the monotonic clock.
    armed: Option<Duration>,
    /// The same for the kernel, which reads it when it consumes the entry. Not touched while `armed`.
    time: Box<Timespec>,
}

/// What ends a wait.
pub(super) enum Bound {
    /// The operation that is with the kernel, or comes to it with this entry.
    Timer(Option<Entry>),
    /// The time given in the call.
    Call,
}

impl Timer {
    pub(super) fn new() -> Timer {
        Timer { armed: None, time: Box::new(Timespec::new()) }
    }

    /// How to end a wait of this length. An entry must be pushed before the ring is entered, if there is one; there is
    /// none without `room` for it.
    pub(super) fn bound(&mut self, wait: Duration, room: bool) -> Bound {
        if wait <= SHORT {
            return Bound::Call;
        }
        let now = clock_gettime(ClockId::Monotonic);
        self.bound_at(Duration::new(now.tv_sec as u64, now.tv_nsec as u32), wait, room)
    }

    fn bound_at(&mut self, now: Duration, wait: Duration, room: bool) -> Bound {
        let until = now.saturating_add(wait);
        match self.armed {
            Some(armed) if armed <= until => Bound::Timer(None),
            None if room => {
                self.armed = Some(until);
                *self.time = Timespec::new().sec(until.as_secs()).nsec(until.subsec_nanos());
                let timeout = opcode::Timeout::new(&raw const *self.time).flags(TimeoutFlags::ABS);
                Bound::Timer(Some(timeout.build()))
            }
            _ => Bound::Call,
        }
    }

    /// The operation completed.
    pub(super) fn went_off(&mut self) {
        self.armed = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[track_caller]
    fn expect(timer: &mut Timer, now: u32, wait: u32, expected: &str) {
        let bound = match timer.bound_at(S * now, S * wait, true) {
            Bound::Timer(Some(_)) => "arms",
            Bound::Timer(None) => "waits for it",
            Bound::Call => "has its own",
        };
        assert_eq!(bound, expected, "a wait of {wait} s at {now} s");
    }

    #[test]
    fn one_operation_serves_many_waits() {
        let mut timer = Timer::new();
        expect(&mut timer, 0, 60, "arms");
        (0..60).for_each(|now| expect(&mut timer, now, 60, "waits for it"));
        expect(&mut timer, 59, 1, "waits for it");
        timer.went_off();
        expect(&mut timer, 60, 60, "arms");
    }

    #[test]
    fn a_wait_that_ends_before_the_operation_has_a_time_of_its_own() {
        let mut timer = Timer::new();
        expect(&mut timer, 0, 60, "arms");
        expect(&mut timer, 10, 49, "has its own");
        expect(&mut timer, 10, 50, "waits for it");
    }

    #[test]
    fn a_short_wait_and_one_without_room_for_an_entry_have_a_time_of_their_own() {
        let mut timer = Timer::new();
        assert!(matches!(timer.bound(SHORT, true), Bound::Call));
        assert!(matches!(timer.bound(S, false), Bound::Call));
        assert!(matches!(timer.bound(S, true), Bound::Timer(Some(_))));
    }

    #[test]
    fn a_wait_without_end_is_far_away() {
        assert!(matches!(Timer::new().bound_at(S, Duration::MAX, true), Bound::Timer(Some(_))));
    }
}
