//! The end of the watchdog's wait: a timer, which the shards put off as long as all of them go on.
//!
//! ```text
//!   watchdog   look ──▶ waits for the timer ─────────────────────────────▶ goes off: look
//!   shard      a turn begins, and half of the time is over: is another one in a turn that is not short?
//!                 └─ no: sets the timer again, up to the time of the look that is due in any case
//! ```
//!
//! A look is a wake-up of a thread that has slept, which costs 20 µs and more. To set the timer
//! costs a shard one system call, and so it is the shards that work whose stalls need no look.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ringserve_core::Time;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use super::options::{LOOKS_LATE, StallOptions};

/// As `again`: no shard puts the timer off.
const NEVER: u64 = u64::MAX;

/// As `again`: the watchdog rests, and the first shard that leaves its wait sets the timer.
const RESTS: u64 = u64::MAX - 1;

/// The shortest time that ends: none at all stops the timer.
const AT_ONCE: Duration = Duration::from_nanos(1);

pub(crate) struct Alarm {
    timer: OwnedFd,
    /// For how long it is set, and put off.
    ahead: Duration,
    /// For how long it is put off at most.
    far: Duration,
    /// A turn of this length is not short.
    late: Duration,
    /// When it goes off, in nanoseconds of the server's clock. All of them were stored before the
    /// timer was set.
    due: AtomicU64,
    /// From when on a shard that begins a turn puts it off.
    again: AtomicU64,
    /// To when it is put off at most.
    until: AtomicU64,
}

impl Alarm {
    /// One that does not go off, for turns that are stalls from `over` on.
    ///
    /// # Errors
    /// The kernel's, which has no descriptor for it.
    pub(crate) fn new(over: Duration) -> io::Result<Alarm> {
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC)?;
        let [due, again, until] = [const { AtomicU64::new(NEVER) }; 3];
        let (ahead, late) = (StallOptions::looks_seldom(over), StallOptions::late(over));
        Ok(Alarm { timer, ahead, far: ahead.max(LOOKS_LATE), late, due, again, until })
    }

    fn set(&self, time: Duration) {
        let [seconds, nanos] = [time.as_secs() as i64, i64::from(time.subsec_nanos())];
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let spec = Itimerspec { it_interval: zero, it_value: Timespec { tv_sec: seconds, tv_nsec: nanos } };
        // Its times are none that are refused.
        let _ = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec);
    }

    /// For the watchdog: its next look is `time` from now, whatever the shards do.
    pub(crate) fn look_in(&self, now: Time, time: Duration) {
        self.again.store(NEVER, Ordering::SeqCst);
        self.due.store((now + time).as_nanos(), Ordering::SeqCst);
        self.set(time.max(AT_ONCE));
    }

    /// For the watchdog: its next look is as soon as a shard does not go on, and in any case once
    /// the longest time is over.
    pub(crate) fn look_late(&self, now: Time) {
        self.look_in(now, self.ahead);
        self.until.store((now + self.far).as_nanos(), Ordering::SeqCst);
        self.again.store((now + self.ahead / 2).as_nanos(), Ordering::SeqCst);
    }

    /// For the watchdog, before it marks the shards: there is no look until one of them leaves its
    /// wait.
    pub(crate) fn rest(&self) {
        self.again.store(NEVER, Ordering::SeqCst);
        self.due.store(NEVER, Ordering::SeqCst);
        self.set(Duration::ZERO);
        self.again.store(RESTS, Ordering::SeqCst);
    }

    /// For the watchdog: waits until it goes off, or for no reason.
    pub(crate) fn wait(&self) {
        let _ = rustix::io::read(&self.timer, &mut [0; 8]);
    }

    /// When it goes off.
    pub(crate) fn due(&self) -> Time {
        Time::from_nanos(self.due.load(Ordering::SeqCst))
    }

    /// It goes off now.
    pub(crate) fn ring(&self) {
        self.again.store(NEVER, Ordering::SeqCst);
        self.set(AT_ONCE);
    }

    /// On a shard that leaves its wait and finds the mark of a watchdog that rests.
    #[cold]
    pub(crate) fn begins(&self, now: Time) {
        let again = (now + self.ahead / 2).as_nanos();
        if self.again.compare_exchange(RESTS, again, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            self.until.store((now + self.far).as_nanos(), Ordering::SeqCst);
            self.put(now + self.ahead, self.ahead, again);
        }
    }

    /// On a shard whose turn begins: puts it off if it is time for that and no shard `is_late`: in
    /// a turn of that length. Returns when it is time again.
    #[cold]
    pub(crate) fn put_off(&self, now: Time, is_late: impl FnOnce(Duration) -> bool) -> Time {
        let then = now + self.ahead / 2;
        let again = self.again.load(Ordering::SeqCst);
        if now.as_nanos() < again {
            return then.min(Time::from_nanos(again));
        }
        let due = then.max(now + self.ahead).min(Time::from_nanos(self.until.load(Ordering::SeqCst)));
        // One that has gone off is left alone: if the watchdog is late, it has to find that out.
        if now < self.due() && due > self.due() && !is_late(self.late) {
            let then = then.as_nanos();
            if self.again.compare_exchange(again, then, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                self.put(due, due - now, then);
            }
        }
        then
    }

    /// On a shard that has stored `again`: sets it. The watchdog may have set it meanwhile to look
    /// sooner, and then looks at once.
    fn put(&self, due: Time, time: Duration, again: u64) {
        self.due.store(due.as_nanos(), Ordering::SeqCst);
        self.set(time);
        if self.again.load(Ordering::SeqCst) != again {
            self.set(AT_ONCE);
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::time::timerfd_gettime;

    use super::*;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// A moment, in milliseconds.
    fn at(millis: u64) -> Time {
        Time::ZERO + ms(millis)
    }

    fn alarm() -> Alarm {
        Alarm::new(ms(20)).unwrap()
    }

    fn nothing(_: Duration) -> bool {
        unreachable!("nothing is put off")
    }

    fn none_late(_: Duration) -> bool {
        false
    }

    #[test]
    fn shards_that_go_on_put_a_look_off_up_to_the_longest_time() {
        let alarm = alarm();
        alarm.look_late(at(1000));
        assert_eq!(alarm.due(), at(1028));
        assert_eq!(alarm.put_off(at(1013), nothing), at(1014), "it is not time for that");
        assert_eq!(alarm.put_off(at(1016), none_late), at(1030));
        assert_eq!(alarm.due(), at(1044));
        assert_eq!(alarm.put_off(at(1017), nothing), at(1030), "another shard did");
        for (now, due) in [(1040, 1068), (1056, 1084), (1075, 1100)] {
            alarm.put_off(at(now), none_late);
            assert_eq!(alarm.due(), at(due));
        }
        assert_eq!(alarm.put_off(at(1090), nothing), at(1104), "that look is due in any case");
        assert_eq!(alarm.due(), at(1100));
    }

    #[test]
    fn look_is_not_put_off_by_one_shard_while_another_is_late() {
        let alarm = alarm();
        alarm.look_late(at(1000));
        assert_eq!(alarm.put_off(at(1020), |late| late == ms(2)), at(1034));
        assert_eq!(alarm.due(), at(1028));
    }

    #[test]
    fn look_that_is_due_or_soon_is_not_put_off() {
        let alarm = alarm();
        alarm.look_late(at(1000));
        alarm.put_off(at(1028), nothing);
        assert_eq!(alarm.due(), at(1028), "the process was stopped, or the watchdog has no CPU");
        alarm.look_in(at(2000), ms(12));
        alarm.put_off(at(2001), nothing);
        assert_eq!(alarm.due(), at(2012));
    }

    #[test]
    fn first_shard_that_leaves_its_wait_ends_a_rest() {
        let alarm = alarm();
        alarm.look_late(at(1000));
        alarm.rest();
        assert_eq!((alarm.put_off(at(1018), nothing), alarm.due()), (at(1032), Time::NEVER));
        assert_eq!(left(&alarm), Duration::ZERO);
        alarm.begins(at(5000));
        assert_eq!(alarm.due(), at(5028));
        assert!(left(&alarm) > Duration::ZERO);
        alarm.begins(at(5020));
        assert_eq!(alarm.due(), at(5028), "the first one may be stalled");
        alarm.put_off(at(5021), none_late);
        assert_eq!(alarm.due(), at(5049));
        alarm.look_late(at(6000));
        alarm.begins(at(6001));
        assert_eq!(alarm.due(), at(6028), "it does not rest any more");
    }

    #[test]
    fn look_that_was_asked_for_meanwhile_is_made_at_once() {
        let alarm = alarm();
        alarm.look_late(at(1000));
        // Between the shard's look at the others and its setting of the timer.
        let again = alarm.again.load(Ordering::SeqCst);
        alarm.look_in(at(1030), LONG);
        alarm.put(at(1030) + LONG, LONG, again);
        assert!(left(&alarm) < LONG / 2, "{:?}", left(&alarm));
        alarm.wait();
        alarm.ring();
        alarm.wait();
    }

    /// No test lasts as long.
    const LONG: Duration = Duration::from_secs(10_000);

    /// The time until it goes off. Nothing if it has, or is not set.
    fn left(alarm: &Alarm) -> Duration {
        let left = timerfd_gettime(&alarm.timer).unwrap().it_value;
        Duration::new(left.tv_sec as u64, left.tv_nsec as u32)
    }
}
