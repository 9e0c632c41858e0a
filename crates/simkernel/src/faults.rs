//! What a kernel may do at any time and seldom does, drawn by chance.

use crate::rng::Rng;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// An enter that would wait is interrupted.
    Interrupted,
    /// A multishot accept ends with a connection.
    AcceptEnds,
    /// A multishot receive ends with bytes, and more are there.
    ReceiveEnds,
    /// A receive brings fewer bytes than it could.
    ReceiveShort,
    /// A receive ends as if there were no buffers.
    NoBuffers,
    /// A receive ends without a reason.
    ReceiveInterrupted,
    /// A send takes fewer bytes than it could.
    SendShort,
    /// A send that is not to wait finds no room.
    NoRoom,
    /// What is to be cancelled goes on just before.
    CancelRace,
    /// Connections come though newcomers are turned away.
    NewcomersLate,
    /// There is no descriptor for a queued connection.
    TakeNoDescriptor,
    /// A cancel does not find what is to be cancelled, which lives.
    CancelMisses,
    /// Bytes to receive are left for the next enter.
    Delay,
}

impl Fault {
    /// The number of times of which it strikes one: often enough that every case meets several, and seldom enough that most of what
    /// follows a fault goes well.
    fn once_in(self) -> u64 {
        match self {
            // There are few cancels in a case.
            Fault::CancelRace | Fault::CancelMisses | Fault::NewcomersLate => 2,
            Fault::ReceiveShort | Fault::SendShort | Fault::TakeNoDescriptor => 4,
            Fault::AcceptEnds | Fault::ReceiveEnds | Fault::Delay => 8,
            Fault::Interrupted | Fault::NoBuffers | Fault::ReceiveInterrupted | Fault::NoRoom => 16,
        }
    }
}

/// Draws them; none without a seed.
pub(crate) struct Faults(Option<Rng>);

impl Faults {
    /// Those of one shard of a server.
    pub(crate) fn new(seed: Option<u64>, shard: usize) -> Faults {
        Faults(seed.map(|seed| Rng::new(seed.wrapping_add(shard as u64))))
    }

    /// True if this one strikes now.
    pub(crate) fn strike(&mut self, fault: Fault) -> bool {
        self.0.as_mut().is_some_and(|rng| rng.one_in(fault.once_in()))
    }

    /// `len`, or something between 1 and it if this one strikes.
    pub(crate) fn shorten(&mut self, fault: Fault, len: usize) -> usize {
        if len <= 1 || !self.strike(fault) {
            return len;
        }
        self.0.as_mut().map_or(len, |rng| rng.range(1, len as u64) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_seed_nothing_strikes_and_with_one_everything_does() {
        let strikes = |seed, fault| {
            let mut faults = Faults::new(seed, 0);
            (0..1000).filter(|_| faults.strike(fault)).count() as u64
        };
        for fault in [Fault::SendShort, Fault::Delay, Fault::Interrupted] {
            assert_eq!(strikes(None, fault), 0);
            assert!((500..2000).contains(&(strikes(Some(1), fault) * fault.once_in())), "{fault:?}");
        }
        let mut faults = Faults::new(Some(1), 0);
        let lens: Vec<usize> = (0..1000).map(|_| faults.shorten(Fault::SendShort, 5)).collect();
        assert!((1..=5).all(|len| lens.contains(&len)) && lens.iter().all(|len| (1..=5).contains(len)));
    }
}
