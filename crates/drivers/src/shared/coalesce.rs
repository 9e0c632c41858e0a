//! Whether a shard waits for more completions before it takes those that are there, like a network
//! card that coalesces interrupts.
//!
//! A turn costs a system call, and each turn in which a connection has replies costs a send of it.
//! If many connections send a little each, one turn takes what came within some microseconds,
//! instead of many small ones. A single connection gains nothing, so the shard waits for more only
//! if several had bytes since the last wait.

use std::time::Duration;

use ringserve_core::{Completion, ConnId};

/// The choice of a driver, and the bytes that came since its last wait.
#[derive(Debug, Default)]
pub(crate) struct Coalesce {
    /// Time to wait for more; zero if the shard does not.
    wait: Duration,
    /// A connection that had bytes.
    heard: Option<ConnId>,
    /// Other connections had bytes too.
    several: bool,
}

impl Coalesce {
    pub(crate) fn new(wait: Duration) -> Coalesce {
        Coalesce { wait, ..Coalesce::default() }
    }

    /// Takes note of the completions of a turn.
    #[inline]
    pub(crate) fn brought(&mut self, completions: &[Completion]) {
        if !self.wait.is_zero() && !self.several {
            self.look(completions);
        }
    }

    fn look(&mut self, completions: &[Completion]) {
        let mut from = completions.iter().filter_map(|completion| match completion {
            Completion::Received { id, .. } | Completion::Filled { id, .. } => Some(*id),
            _ => None,
        });
        self.heard = self.heard.or_else(|| from.next());
        self.several = from.any(|id| Some(id) != self.heard);
    }

    /// Begins a wait that may last this long; `None` without a bound. Returns how long it lasts
    /// whatever comes meanwhile; zero if the first completion ends it.
    #[inline]
    pub(crate) fn begin_wait(&mut self, longest: Option<Duration>) -> Duration {
        self.heard = None;
        match (std::mem::take(&mut self.several), longest) {
            (false, _) => Duration::ZERO,
            (true, Some(longest)) => longest.min(self.wait),
            (true, None) => self.wait,
        }
    }
}

#[cfg(test)]
mod tests {
    use ringserve_buf::Block;
    use ringserve_core::ReceiveEnd;

    use super::*;

    const WAIT: Duration = Duration::from_micros(50);

    fn filled(slot: u32) -> Completion {
        let id = ConnId::new(slot, 1);
        Completion::Filled { id, block: Box::<Block>::default(), bytes: 1, end: ReceiveEnd::Stopped }
    }

    fn closed(slot: u32) -> Completion {
        Completion::Closed { id: ConnId::new(slot, 1) }
    }

    #[test]
    fn bytes_of_two_connections_are_waited_behind_and_nothing_else() {
        let mut coalesce = Coalesce::new(WAIT);
        for (brought, waits) in [
            (vec![], false),
            (vec![filled(1), filled(2)], true),
            (vec![filled(1), filled(1)], false),
            (vec![closed(1), closed(2), filled(2)], false),
            (vec![filled(1), closed(2), filled(1), filled(3)], true),
            (vec![], false),
        ] {
            coalesce.brought(&brought);
            assert_eq!(coalesce.begin_wait(None) == WAIT, waits, "behind {brought:?}");
        }
    }

    #[test]
    fn turns_without_a_wait_between_them_count_together() {
        let mut coalesce = Coalesce::new(WAIT);
        coalesce.brought(&[filled(1)]);
        coalesce.brought(&[]);
        coalesce.brought(&[filled(2)]);
        coalesce.brought(&[]);
        assert_eq!([coalesce.begin_wait(None), coalesce.begin_wait(None)], [WAIT, Duration::ZERO]);
        coalesce.brought(&[filled(1)]);
        assert_eq!(coalesce.begin_wait(None), Duration::ZERO);
        coalesce.brought(&[filled(2)]);
        assert_eq!(coalesce.begin_wait(None), Duration::ZERO, "a wait was between them");
    }

    #[test]
    fn it_waits_no_longer_than_the_shard_may() {
        for (longest, waits) in [(WAIT / 2, WAIT / 2), (WAIT, WAIT), (WAIT * 2, WAIT)] {
            let mut coalesce = Coalesce::new(WAIT);
            coalesce.brought(&[filled(1), filled(2)]);
            assert_eq!(coalesce.begin_wait(Some(longest)), waits);
        }
    }

    #[test]
    fn unasked_it_never_waits() {
        let mut coalesce = Coalesce::new(Duration::ZERO);
        coalesce.brought(&[filled(1), filled(2)]);
        assert_eq!(coalesce.begin_wait(None), Duration::ZERO);
    }
}
