//! The time for which a backend keeps an idle connection, learned from when it ended some.

use super::SECOND;

/// Ends that have to agree.
const AGREE: usize = 3;

/// Ends that are remembered.
const REMEMBERED: usize = 8;

/// Shorter ones are no timer of a server, but restarts.
const SHORTEST: u64 = SECOND / 100;

/// Ends that come closer together than this are those of a restart, or of connections that became
/// idle together: they count once.
const APART: u64 = SECOND / 10;

/// The times after which a backend ended idle connections.
///
/// Three within a tenth of each other are a timer, if they came apart. A connection that is kept
/// for longer shows that it was none.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeepAlive {
    ends: [u64; REMEMBERED],
    count: usize,
    /// When the last one that counted came.
    at: Option<u64>,
    learned: Option<u64>,
}

impl KeepAlive {
    /// Notes that a connection was ended at `now` which was idle for this long.
    pub(crate) fn ended_after(&mut self, idle: u64, now: u64) {
        if idle < SHORTEST || self.at.is_some_and(|at| now.saturating_sub(at) < APART) {
            return;
        }
        self.at = Some(now);
        self.ends[self.count % REMEMBERED] = idle;
        self.count += 1;
        let known = &self.ends[..self.count.min(REMEMBERED)];
        let agreeing = known.iter().filter(|other| is_near(**other, idle)).count();
        if agreeing >= AGREE {
            self.learned = known.iter().filter(|other| is_near(**other, idle)).min().copied();
        }
    }

    /// Notes that a connection is idle for this long and was not ended.
    pub(crate) fn is_kept_for(&mut self, idle: u64) {
        if self.learned.is_some_and(|learned| idle > learned + learned / 4) {
            *self = KeepAlive::default();
        }
    }

    /// Nanoseconds after which an idle connection is lent no more: nine tenths of what was learned,
    /// so that a request does not meet the end on its way.
    pub(crate) fn lent_until(&self) -> u64 {
        self.learned.map_or(u64::MAX, |learned| learned / 10 * 9)
    }
}

fn is_near(a: u64, b: u64) -> bool {
    a.abs_diff(b) <= a.min(b) / 10
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn three_ends_that_agree_are_a_timer() {
        let mut learned = KeepAlive::default();
        for (idle, now) in [(5_000, 1), (5_050, 2)] {
            learned.ended_after(idle * 1_000_000, now * SECOND);
        }
        assert_eq!(learned.lent_until(), u64::MAX);
        learned.ended_after(5_010 * 1_000_000, 3 * SECOND);
        assert_eq!(learned.lent_until(), 4_500 * 1_000_000);
        // A server that was set up again with another time.
        for now in 4..7 {
            learned.ended_after(75 * SECOND, now * SECOND);
        }
        assert_eq!(learned.lent_until(), 75 * SECOND / 10 * 9);
    }

    #[test]
    fn restart_teaches_nothing() {
        let mut learned = KeepAlive::default();
        for n in 0..16 {
            learned.ended_after(SECOND / 5 + n, SECOND + n * 1_000_000);
        }
        assert_eq!(learned.lent_until(), u64::MAX);
    }

    #[test]
    fn connection_kept_for_longer_shows_that_there_is_no_timer() {
        let mut learned = KeepAlive::default();
        for now in 1..4 {
            learned.ended_after(SECOND, now * SECOND);
        }
        learned.is_kept_for(SECOND + SECOND / 5);
        assert_eq!(learned.lent_until(), SECOND / 10 * 9);
        learned.is_kept_for(SECOND + SECOND / 3);
        assert_eq!(learned.lent_until(), u64::MAX);
    }

    proptest! {
        #[test]
        fn ends_that_disagree_teach_nothing(first in SHORTEST..SECOND, count in 1usize..30) {
            let mut learned = KeepAlive::default();
            for n in 0..count as u32 {
                // Each a quarter longer than the one before, and again from the first.
                learned.ended_after(first * 5u64.pow(n % 8) / 4u64.pow(n % 8), u64::from(n) * SECOND);
            }
            prop_assert_eq!(learned.lent_until(), u64::MAX);
        }
    }
}
