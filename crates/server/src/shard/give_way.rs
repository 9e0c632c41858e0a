//! When a shard gives its CPU away before it sleeps: while it talks with others, unless that takes long.

use std::time::Duration;

use ringserve_core::Time;

/// A turn from which the CPU was away for longer was one beside busy processes.
const PATIENCE: Duration = Duration::from_millis(1);

/// For how long it is kept then.
const REST: Duration = Duration::from_millis(100);

/// Whether the CPU is given away, and how long that took.
#[derive(Debug, Default)]
pub(super) struct Way {
    /// It is, behind this turn, if nothing came.
    pub(super) is_given: bool,
    /// When the turn began behind which it was given away last, until the next turn.
    given: Option<Time>,
    /// It is kept until then.
    kept_until: Time,
}

impl Way {
    /// True if it may be given away.
    pub(super) fn is_free(&self, now: Time) -> bool {
        now >= self.kept_until
    }

    /// It is given away, in a turn that began then.
    pub(super) fn begin(&mut self, turn: Time) {
        self.given = Some(turn);
    }

    /// The next turn begins.
    #[inline]
    pub(super) fn end(&mut self, now: Time) {
        if let Some(given) = self.given.take()
            && now - given > PATIENCE
        {
            self.kept_until = now + REST;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_is_kept_for_a_while_after_it_was_away_for_long() {
        let (mut way, at) = (Way::default(), |micros| Time::ZERO + Duration::from_micros(micros));
        assert!(way.is_free(at(0)));
        way.begin(at(0));
        way.end(at(1000));
        assert!(way.is_free(at(1000)));
        way.begin(at(2000));
        way.end(at(3001));
        assert!(!way.is_free(at(3001)) && !way.is_free(at(103_000)) && way.is_free(at(103_001)));
        // A long turn behind which it was not given away says nothing.
        way.end(at(900_000));
        assert!(way.is_free(at(900_000)));
    }
}
