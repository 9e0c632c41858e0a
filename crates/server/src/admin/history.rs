//! The recent past of a server: samples, one a second, of the last ten.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use ringserve_core::{ConnStats, Time};

use crate::funnel::FunnelFigures;
use crate::stats::ServerStats;

/// The time over which a report looks for what is recent.
const WINDOW: Duration = Duration::from_secs(10);

/// Rates are of this time at least: figures of shards are up to 100 ms old.
const RATE_OVER: Duration = Duration::from_millis(500);

/// A server at one moment.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    pub(super) at: Time,
    pub(super) figures: FunnelFigures,
    /// The sums of all shards.
    pub(super) counters: ConnStats,
    /// Frames of each service.
    pub(super) frames: Vec<u64>,
    pub(super) turns: u64,
    pub(super) system_calls: u64,
}

impl Sample {
    pub(super) fn new(at: Time, figures: FunnelFigures, stats: &ServerStats) -> Sample {
        let drivers = || stats.shards.iter().map(|shard| &shard.driver);
        Sample {
            at,
            figures,
            counters: stats.counters.clone(),
            frames: stats.services.iter().map(|service| service.counters.frames).collect(),
            turns: drivers().map(|driver| driver.turns).sum(),
            system_calls: drivers().map(|driver| driver.enters + driver.calls).sum(),
        }
    }
}

/// The samples of the last ten seconds, the oldest first.
#[derive(Debug, Default)]
pub(super) struct History {
    samples: VecDeque<Rc<Sample>>,
}

impl History {
    /// Keeps a sample, and forgets those that are too old: the oldest that stays is the last that
    /// is as old as the window.
    pub(super) fn push(&mut self, sample: Sample) {
        let is_out = |oldest: &Rc<Sample>| sample.at - oldest.at >= WINDOW;
        while self.samples.get(1).is_some_and(is_out) {
            self.samples.pop_front();
        }
        self.samples.push_back(Rc::new(sample));
    }

    /// The sample to which what happened recently is compared; the one that is given if there is
    /// none.
    pub(super) fn before(&self, now: &Sample) -> Rc<Sample> {
        self.samples.front().cloned().unwrap_or_else(|| Rc::new(now.clone()))
    }

    /// The sample to which rates are compared.
    pub(super) fn second_ago(&self, now: &Sample) -> Rc<Sample> {
        let is_old = |sample: &&Rc<Sample>| now.at - sample.at >= RATE_OVER;
        self.samples.iter().rev().find(is_old).cloned().unwrap_or_else(|| self.before(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(millis: u64) -> Sample {
        Sample { at: Time::from_nanos(millis * 1_000_000), ..Sample::default() }
    }

    #[test]
    fn window_is_ten_seconds_and_rates_are_of_the_last_one() {
        let mut history = History::default();
        let now = sample(5);
        assert_eq!((history.before(&now).at, history.second_ago(&now).at), (now.at, now.at));
        (0..60).for_each(|second| history.push(sample(second * 1000)));
        let millis = |sample: Rc<Sample>| sample.at.as_millis();
        assert_eq!(millis(history.before(&sample(59_100))), 49_000);
        assert_eq!(millis(history.second_ago(&sample(59_100))), 58_000);
        assert_eq!(millis(history.second_ago(&sample(59_600))), 59_000);
        assert_eq!(history.samples.len(), 11);
    }

    #[test]
    fn gap_leaves_one_sample_before_it() {
        let mut history = History::default();
        [0, 1000, 2000, 90_000].into_iter().for_each(|at| history.push(sample(at)));
        assert_eq!(history.before(&sample(90_500)).at.as_millis(), 2000);
    }
}
