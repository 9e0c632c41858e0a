//! The stalls of a server, for all who ask.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use ringserve_base::thread_times::ThreadTimes;
use ringserve_core::Time;

use super::alarm::Alarm;
use super::loads::LoadBoard;
use super::times::TimeSamples;
use crate::stats::{ShardTimes, Stall, StallCause};

/// Stalls that are kept, in addition to those that last: one of each shard of a large machine.
const KEPT: usize = 64;

/// Shared by a server's controls, its shards and its watchdog.
#[derive(Default)]
pub(crate) struct Watch {
    /// Set once there is a watchdog.
    alarm: OnceLock<Alarm>,
    is_over: AtomicBool,
    stalls: Mutex<VecDeque<StallRecord>>,
    /// By shard and cause.
    counts: OnceLock<Box<[[AtomicU64; StallCause::ALL.len()]]>>,
    times: Mutex<TimeSamples>,
    pub(crate) loads: LoadBoard,
}

/// A stall with the moment at which it began.
pub(crate) struct StallRecord {
    pub(crate) since: Time,
    pub(crate) stall: Stall,
}

impl Watch {
    /// A watchdog of this number of shards begins, whose looks this alarm makes.
    pub(crate) fn begin(&self, shards: usize, alarm: Alarm) {
        let _ = self.counts.set((0..shards).map(|_| Default::default()).collect());
        self.times().prepare(shards);
        let _ = self.alarm.set(alarm);
    }

    /// `None` if there is no watchdog.
    pub(crate) fn alarm(&self) -> Option<&Alarm> {
        self.alarm.get()
    }

    /// The server is over, and its watchdog too, and with them each stall that lasted until now.
    pub(crate) fn end(&self, now: Time) {
        self.is_over.store(true, Ordering::Release);
        for kept in self.kept().iter_mut().filter(|kept| kept.stall.ongoing) {
            (kept.stall.ongoing, kept.stall.lasted) = (false, now - kept.since);
        }
        if let Some(alarm) = self.alarm() {
            alarm.ring();
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    fn kept(&self) -> MutexGuard<'_, VecDeque<StallRecord>> {
        self.stalls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A stall began.
    pub(crate) fn begins(&self, since: Time, mut stall: Stall) {
        if let Some(of_shard) = self.counts.get().and_then(|counts| counts.get(stall.shard)) {
            of_shard[stall.cause.index()].fetch_add(1, Ordering::Relaxed);
        }
        let mut kept = self.kept();
        // A look may be under way when the server ends.
        stall.ongoing &= !self.is_over();
        kept.push_back(StallRecord { since, stall });
        let over = kept.iter().filter(|kept| !kept.stall.ongoing).count();
        if over >= KEPT
            && let Some(oldest) = kept.iter().position(|kept| !kept.stall.ongoing)
        {
            kept.remove(oldest);
        }
    }

    /// Changes the stall of a shard that lasts, and returns it as it is then.
    pub(crate) fn change(&self, shard: usize, change: impl FnOnce(&mut StallRecord)) -> Option<Stall> {
        let mut kept = self.kept();
        let ongoing = kept.iter_mut().rev().find(|kept| kept.stall.ongoing && kept.stall.shard == shard)?;
        change(ongoing);
        Some(ongoing.stall.clone())
    }

    /// The last ones and those that last, the oldest first.
    pub(crate) fn stalls(&self, now: Time) -> Vec<Stall> {
        let as_now = |kept: &StallRecord| {
            let ago = now - kept.since;
            let lasted = if kept.stall.ongoing { ago } else { kept.stall.lasted };
            Stall { ago, lasted, ..kept.stall.clone() }
        };
        self.kept().iter().map(as_now).collect()
    }

    /// True while a shard is at one piece of work for at least `over`.
    pub(crate) fn is_stalled(&self, shard: usize, over: Duration, now: Time) -> bool {
        let lasts =
            |kept: &StallRecord| kept.stall.ongoing && !kept.stall.several && now - kept.since >= over;
        self.kept().iter().any(|kept| kept.stall.shard == shard && lasts(kept))
    }

    /// The number of stalls, by shard and cause.
    #[cfg_attr(not(feature = "metrics"), expect(dead_code, reason = "metrics alone have them"))]
    pub(crate) fn counts(&self) -> impl Iterator<Item = (usize, StallCause, u64)> {
        let of_shards = self.counts.get().into_iter().flatten().enumerate();
        of_shards.flat_map(|(shard, counts)| {
            let count = move |cause: StallCause| counts[cause.index()].load(Ordering::Relaxed);
            StallCause::ALL.into_iter().map(move |cause| (shard, cause, count(cause)))
        })
    }

    fn times(&self) -> MutexGuard<'_, TimeSamples> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a sample of the shards' times, if there is none of this half second.
    pub(crate) fn keep_times(&self, now: Time, read: impl Iterator<Item = Option<ThreadTimes>>) {
        let mut times = self.times();
        if times.is_due(now) {
            times.keep(now, read);
        }
    }

    /// The shards slept until now.
    pub(crate) fn forget_times(&self) {
        self.times().forget();
    }

    /// The times of the shards' threads, which these are now.
    pub(crate) fn shares(&self, now: Time, read: &[Option<ThreadTimes>]) -> Vec<ShardTimes> {
        let mut times = self.times();
        let shares = times.shares(now, read);
        if times.is_due(now) {
            times.keep(now, read.iter().copied());
        }
        shares
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::StalledWork;

    fn at(seconds: u64) -> Time {
        Time::from_nanos(seconds * 1_000_000_000)
    }

    fn stall(shard: usize, ongoing: bool) -> Stall {
        Stall {
            shard,
            ago: Duration::ZERO,
            lasted: Duration::from_millis(30),
            ongoing,
            work: StalledWork::Call,
            peer: None,
            connection: None,
            frame_bytes: None,
            several: false,
            cause: StallCause::Cpu,
            waits_in: None,
            queue_waiting: None,
            queue_lost: None,
        }
    }

    #[test]
    fn last_stalls_are_kept_and_those_that_last() {
        let watch = Watch::default();
        watch.begin(2, Alarm::new(Duration::from_millis(25)).unwrap());
        watch.begins(at(1), stall(1, true));
        for second in 0..100 {
            watch.begins(at(second), stall(0, true));
            watch.change(0, |kept| (kept.stall.ongoing, kept.stall.lasted) = (false, Duration::from_secs(2)));
        }
        let stalls = watch.stalls(at(200));
        assert_eq!(stalls.len(), KEPT + 1);
        assert_eq!(
            (stalls[0].shard, stalls[0].ongoing, stalls[0].lasted),
            (1, true, Duration::from_secs(199))
        );
        let last = stalls.last().unwrap();
        assert_eq!(
            (last.ongoing, last.lasted, last.ago),
            (false, Duration::from_secs(2), Duration::from_secs(101))
        );
        let counts: Vec<_> = watch.counts().filter(|(_, _, count)| *count > 0).collect();
        assert_eq!(counts, [(0, StallCause::Cpu, 100), (1, StallCause::Cpu, 1)]);
        assert!(watch.change(0, |_| ()).is_none(), "none of it lasts");
    }

    #[test]
    fn stall_ends_with_its_server() {
        let watch = Watch::default();
        watch.begin(2, Alarm::new(Duration::from_millis(25)).unwrap());
        watch.begins(at(1), stall(0, false));
        watch.begins(at(3), stall(1, true));
        assert!(watch.is_stalled(1, Duration::from_secs(1), at(5)));
        watch.end(at(5));
        watch.begins(at(5), stall(0, true));
        let stalls: Vec<_> = watch.stalls(at(60)).iter().map(|of| (of.ongoing, of.lasted)).collect();
        assert_eq!(stalls[..2], [(false, Duration::from_millis(30)), (false, Duration::from_secs(2))]);
        assert!(!stalls[2].0);
        assert!(!watch.is_stalled(1, Duration::from_secs(1), at(60)));
    }
}
