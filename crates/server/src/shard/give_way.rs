//! When a shard gives its CPU away before it sleeps: while it talks with others, unless that takes long.

use std::time::Duration;

use ringserve_core::{Driver, Time};

use super::state::ShardLane;

/// The CPU was away for longer: other processes are busy on it.
const PATIENCE: Duration = Duration::from_millis(1);

/// For how long it is kept then.
const REST: Duration = Duration::from_millis(100);

/// Whether the CPU is given away.
#[derive(Debug, Default)]
pub(super) struct Way {
    /// It is, behind this turn, if nothing came.
    pub(super) is_given: bool,
    /// It is kept until then.
    kept_until: Time,
}

impl Way {
    /// It was given away, and the shard has it again.
    pub(super) fn took(&mut self, began: Time, ended: Time) {
        if ended - began > PATIENCE {
            self.kept_until = ended + REST;
        }
    }
}

impl<D: Driver, V> ShardLane<D, V> {
    /// True if the shard, which asked others something or read messages, takes one more turn before it sleeps: not if it is alone,
    /// or hosted by a runtime, whose tasks would wait too.
    #[cold]
    #[inline(never)]
    pub(super) fn gives_way(&mut self) -> bool {
        self.remote.forget_questions();
        let gives = self.common.now >= self.way.kept_until && !self.remote.is_hosted();
        self.way.is_given = gives && self.common.shard.count() > 1;
        self.way.is_given
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_is_kept_for_a_while_after_it_was_away_for_long() {
        let (mut way, at) = (Way::default(), |micros| Time::ZERO + Duration::from_micros(micros));
        way.took(at(0), at(1000));
        assert_eq!(way.kept_until, Time::ZERO);
        way.took(at(2000), at(3001));
        assert_eq!(way.kept_until, at(103_001));
    }
}
