//! When a shard gives its CPU away before it sleeps: while it talks with others, unless that takes
//! long.

use std::time::Duration;

use ringserve_core::Time;

/// The CPU was away for longer: other processes are busy on it.
const PATIENCE: Duration = Duration::from_millis(1);

/// For how long it is kept then.
const REST: Duration = Duration::from_millis(100);

/// Whether the CPU is given away.
#[derive(Debug, Default)]
pub(crate) struct YieldPolicy {
    /// Yields after this turn if no completion arrived.
    pub(crate) is_given: bool,
    /// It is kept until then.
    kept_until: Time,
}

impl YieldPolicy {
    /// A shard that talks with others takes one more turn before it sleeps, unless the CPU is kept
    /// now. True if so.
    pub(crate) fn gives(&mut self, now: Time) -> bool {
        self.is_given = now >= self.kept_until;
        self.is_given
    }

    /// It was given away, and the shard has it again.
    pub(crate) fn took(&mut self, began: Time, ended: Time) {
        if ended - began > PATIENCE {
            self.kept_until = ended + REST;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_is_kept_for_a_while_after_it_was_away_for_long() {
        let (mut way, at) = (YieldPolicy::default(), |micros| Time::ZERO + Duration::from_micros(micros));
        way.took(at(0), at(1000));
        assert!(way.gives(at(1000)) && way.is_given);
        way.took(at(2000), at(3001));
        assert!(!way.gives(at(103_000)) && !way.is_given && way.gives(at(103_001)));
    }
}
