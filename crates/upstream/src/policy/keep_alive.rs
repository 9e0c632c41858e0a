//! How long a backend keeps a connection that nothing happens on, learned from when it ended some.

use super::SECOND;

/// Ends that have to agree.
const AGREE: usize = 3;

/// Ends that are remembered.
const REMEMBERED: usize = 8;

/// Shorter ones are no timer of a server, but restarts.
const SHORTEST: u64 = SECOND / 100;

/// The times after which a backend ended idle connections.
///
/// Three within a tenth of each other are a timer. The ends of a restart come all at once, of connections that were idle for
/// different times, and agree by chance at most.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeepAlive {
    ends: [u64; REMEMBERED],
    count: usize,
    learned: Option<u64>,
}

impl KeepAlive {
    /// Notes that a connection was ended which was idle for this long.
    pub(crate) fn ended_after(&mut self, idle: u64) {
        if idle < SHORTEST {
            return;
        }
        self.ends[self.count % REMEMBERED] = idle;
        self.count += 1;
        let known = &self.ends[..self.count.min(REMEMBERED)];
        let agreeing = known.iter().filter(|other| is_near(**other, idle)).count();
        if agreeing >= AGREE {
            self.learned = known.iter().filter(|other| is_near(**other, idle)).min().copied();
        }
    }

    /// Nanoseconds after which an idle connection is lent no more: nine tenths of what was learned, so that a request does not meet
    /// the end on its way.
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
        for idle in [5_000, 5_050] {
            learned.ended_after(idle * 1_000_000);
        }
        assert_eq!(learned.lent_until(), u64::MAX);
        learned.ended_after(5_010 * 1_000_000);
        assert_eq!(learned.lent_until(), 4_500 * 1_000_000);
        // A server that was set up again with another time.
        for _ in 0..3 {
            learned.ended_after(75 * SECOND);
        }
        assert_eq!(learned.lent_until(), 75 * SECOND / 10 * 9);
    }

    proptest! {
        #[test]
        fn ends_that_disagree_teach_nothing(first in SHORTEST..SECOND, count in 1usize..30) {
            let mut learned = KeepAlive::default();
            for n in 0..count as u32 {
                // Each a quarter longer than the one before, and again from the first.
                learned.ended_after(first * 5u64.pow(n % 8) / 4u64.pow(n % 8));
            }
            prop_assert_eq!(learned.lent_until(), u64::MAX);
        }
    }
}
