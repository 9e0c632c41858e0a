//! The busy time of the shards' threads: as the kernel counts it, now and a second ago.

use std::collections::VecDeque;
use std::time::Duration;

use ringserve_base::thread_times::ThreadTimes;
use ringserve_core::Time;

use crate::stats::ShardTimes;

/// The least distance between samples that are kept.
const KEPT_EVERY: Duration = Duration::from_millis(500);

/// The time over which shares are taken.
pub(crate) const OVER: Duration = Duration::from_secs(1);

/// The times of all shards, at a moment. `None` for a shard without a thread.
type Sample = (Time, Vec<Option<ThreadTimes>>);

/// The last samples, the newest last.
pub(crate) struct TimeSamples {
    kept: VecDeque<Sample>,
    /// Memory of samples that are no longer needed: the watchdog of a server that works allocates
    /// nothing.
    spare: Vec<Vec<Option<ThreadTimes>>>,
}

/// Samples that there are at once, at most.
const SAMPLES: usize = 4;

impl Default for TimeSamples {
    fn default() -> TimeSamples {
        TimeSamples { kept: VecDeque::with_capacity(SAMPLES), spare: Vec::with_capacity(SAMPLES) }
    }
}

impl TimeSamples {
    /// Takes memory for the samples of this number of shards.
    pub(crate) fn prepare(&mut self, shards: usize) {
        self.spare.resize_with(SAMPLES, || Vec::with_capacity(shards));
    }

    /// True if there is to be a sample now.
    pub(crate) fn is_due(&self, now: Time) -> bool {
        self.kept.back().is_none_or(|(at, _)| now >= *at + KEPT_EVERY)
    }

    /// Takes one in.
    pub(crate) fn keep(&mut self, now: Time, times: impl IntoIterator<Item = Option<ThreadTimes>>) {
        let mut kept = self.spare.pop().unwrap_or_default();
        kept.extend(times);
        self.kept.push_back((now, kept));
        // One behind the second is enough.
        while self.kept.get(1).is_some_and(|(at, _)| now >= *at + OVER) {
            self.drop_oldest();
        }
    }

    fn drop_oldest(&mut self) {
        if let Some((_, mut times)) = self.kept.pop_front() {
            times.clear();
            self.spare.push(times);
        }
    }

    /// All shards slept until now: what was before says nothing of the last second.
    pub(crate) fn forget(&mut self) {
        while !self.kept.is_empty() {
            self.drop_oldest();
        }
    }

    /// The times of all shards, with their shares since the sample of a second ago.
    pub(crate) fn shares(&self, now: Time, times: &[Option<ThreadTimes>]) -> Vec<ShardTimes> {
        let is_old = |(at, _): &&Sample| now >= *at + OVER;
        let from = self.kept.iter().rev().find(is_old).or(self.kept.front());
        let each = times.iter().enumerate().map(|(shard, times)| {
            let ThreadTimes { ran, waited } = times.unwrap_or_default();
            let before = from.and_then(|(at, all)| Some((*at, (*all.get(shard)?)?)));
            let share = |time: Duration, before: Duration, at: Time| {
                // Where less is known, the shards slept before.
                let wall = (now - at).max(OVER).as_secs_f64();
                (time.saturating_sub(before).as_secs_f64() / wall).min(1.0)
            };
            let (busy, starved) = before.map_or((0.0, 0.0), |(at, before)| {
                (share(ran, before.ran, at), share(waited, before.waited, at))
            });
            ShardTimes { shard, cpu: ran, cpu_wait: waited, busy, starved }
        });
        each.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Time {
        Time::from_nanos(millis * 1_000_000)
    }

    fn times(ran: u64, waited: u64) -> Vec<Option<ThreadTimes>> {
        vec![Some(ThreadTimes { ran: Duration::from_millis(ran), waited: Duration::from_millis(waited) })]
    }

    #[test]
    fn shares_are_those_of_the_last_second() {
        let mut kept = TimeSamples::default();
        kept.keep(at(0), times(0, 0));
        assert!(!kept.is_due(at(499)) && kept.is_due(at(500)));
        for (now, ran, waited) in [(500, 100, 0), (1000, 200, 0), (1500, 700, 0), (2000, 900, 0)] {
            kept.keep(at(now), times(ran, waited));
        }
        let [shard] = kept.shares(at(2250), &times(950, 250))[..] else { panic!("one shard") };
        assert_eq!((shard.cpu, shard.cpu_wait), (Duration::from_millis(950), Duration::from_millis(250)));
        assert!((shard.busy - 0.6).abs() < 1e-9, "750 of 1250 ms: {shard:?}");
        assert!((shard.starved - 0.2).abs() < 1e-9, "{shard:?}");
        assert!(kept.kept.len() <= 3, "{} are kept", kept.kept.len());
    }

    #[test]
    fn shares_of_the_first_second_are_those_of_what_is_known() {
        let mut kept = TimeSamples::default();
        assert_eq!(kept.shares(at(100), &times(50, 0))[0].busy, 0.0);
        kept.keep(at(100), times(50, 0));
        assert_eq!(kept.shares(at(100), &times(50, 0))[0].busy, 0.0, "in no time");
        assert!((kept.shares(at(200), &times(100, 0))[0].busy - 0.05).abs() < 1e-9, "50 ms of a second");
        kept.forget();
        assert!(kept.is_due(at(200)));
    }

    #[test]
    fn shard_without_a_thread_has_no_times() {
        let mut kept = TimeSamples::default();
        kept.keep(at(0), vec![None]);
        assert_eq!(kept.shares(at(1000), &[None]), [ShardTimes::default()]);
        assert_eq!(kept.shares(at(1000), &times(500, 0))[0].busy, 0.0, "it began since");
    }
}
