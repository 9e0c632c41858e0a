//! Rare events of a kernel or a network, drawn at random.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::adversary::{Adversary, EventCounts, HostileEvent};
use crate::rng::Rng;

macro_rules! faults {
    ($($(#[doc = $doc:literal])+ $name:ident $once_in:literal $harmless:literal,)*) => {
        /// A rare event of a kernel or a network.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        #[repr(usize)]
        pub enum Fault { $($(#[doc = $doc])+ $name,)* }

        impl Fault {
            /// Each fault once.
            pub const ALL: &[Fault] = &[$(Fault::$name),*];

            /// [`Faults::all`] affects one occasion in this many; 0 for none.
            const ONCE_IN: [u32; Fault::ALL.len()] = [$($once_in),*];

            /// The faults that cost no connection and no shard.
            const HARMLESS: [bool; Fault::ALL.len()] = [$($harmless),*];
        }
    };
}

// Frequent enough that every case meets several, and rare enough that most operations after a fault
// succeed. There are few cancels in a case.
faults! {
    /// An enter that would wait is interrupted (`EINTR`).
    EnterInterrupted 16 true,
    /// A multishot accept ends with a connection.
    AcceptEnds 8 true,
    /// A multishot receive ends with bytes, though more are there.
    ReceiveEnds 8 true,
    /// A receive brings fewer bytes than it could.
    ReceiveShort 4 true,
    /// A receive ends as if there were no buffers (`ENOBUFS`).
    NoBuffers 16 true,
    /// A receive ends without a cause (`EINTR`).
    ReceiveInterrupted 16 true,
    /// A send takes fewer bytes than it could.
    SendShort 4 true,
    /// A send that is not to wait finds no room (`EAGAIN`).
    NoRoom 16 true,
    /// The operation to be cancelled makes progress just before.
    CancelRace 2 true,
    /// Connections arrive though new ones are turned away.
    NewcomersLate 2 true,
    /// There is no descriptor for a connection in a listener's queue (`EMFILE`).
    TakeNoDescriptor 4 true,
    /// A cancel misses an operation that lives (`ENOENT`).
    CancelMisses 2 true,
    /// A completion is postponed to the next enter.
    Delay 8 true,
    /// Completions of different connections come in another order.
    Reorder 4 true,
    /// Bytes, FIN, a reset or a handshake arrive later: in virtual time only.
    Latency 4 true,
    /// A shard does not run for a while, as on a busy machine; drawn where shards are stepped in
    /// virtual time.
    ShardStalls 1024 true,
    /// An accept ends for lack of a descriptor (`EMFILE`).
    AcceptNoDescriptor 32 false,
    /// An accept ends because the system has too many files (`ENFILE`).
    AcceptNoFile 32 false,
    /// An accept ends because the peer left before (`ECONNABORTED`); the peer finds a reset.
    AcceptAborted 64 false,
    /// A connection breaks in the middle of a write: both ends find a reset. In virtual time only.
    ConnectionResets 512 false,
    /// An enter fails (`EBADF`), and so does every later one: the shard ends. [`Faults::all`]
    /// leaves it out.
    RingBreaks 0 false,
}

/// The rate of each [`Fault`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Faults {
    /// One occasion in this many is affected; 0 for none.
    once_in: [u32; Fault::ALL.len()],
    latency_max: Duration,
}

/// The latency between continents.
const LATENCY_MAX: Duration = Duration::from_millis(300);

impl Faults {
    /// No faults.
    pub fn none() -> Faults {
        Faults { once_in: [0; Fault::ALL.len()], latency_max: LATENCY_MAX }
    }

    /// Faults that a client or a service cannot tell from a slow network: short receives and sends,
    /// multishots that end, cancels that miss, delays. No connection is lost.
    pub fn harmless() -> Faults {
        let mut faults = Faults::all();
        for fault in Fault::ALL {
            if !Fault::HARMLESS[*fault as usize] {
                faults.once_in[*fault as usize] = 0;
            }
        }
        faults
    }

    /// All faults except [`Fault::RingBreaks`], which ends a shard and has to be requested.
    pub fn all() -> Faults {
        Faults { once_in: Fault::ONCE_IN, ..Faults::none() }
    }

    /// Sets this fault to one of `once_in` occasions, or to none with 0.
    pub fn with(mut self, fault: Fault, once_in: u32) -> Faults {
        self.once_in[fault as usize] = once_in;
        self
    }

    /// Removes this fault.
    pub fn without(self, fault: Fault) -> Faults {
        self.with(fault, 0)
    }

    /// Sets the most that [`Fault::Latency`] takes; 300 ms by default.
    pub fn latency_max(mut self, time: Duration) -> Faults {
        self.latency_max = time;
        self
    }

    /// One occasion in this many is affected by this fault; 0 for none.
    pub fn once_in(&self, fault: Fault) -> u32 {
        self.once_in[fault as usize]
    }

    /// Draws the mix of one seed: each fault is switched off, or occurs as often as here, or up to
    /// 8 times less or more often. A fault that is off here stays off. One seed in 16 has no
    /// faults.
    pub fn drawn(mut self, seed: u64) -> Faults {
        let mut rng = Rng::new(seed);
        let none = rng.one_in(16);
        let on = rng.range(2, 7);
        for once_in in self.once_in.iter_mut().filter(|once_in| **once_in > 0) {
            let (less, more) = (rng.spread(1, 8) as u32, rng.spread(1, 8) as u32);
            let off = none || rng.below(8) >= on;
            // One in one would make progress impossible.
            *once_in = if off { 0 } else { once_in.saturating_mul(less).div_ceil(more).max(2) };
        }
        self
    }
}

impl Default for Faults {
    fn default() -> Faults {
        Faults::none()
    }
}

/// Occurrences of each fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultCounts([u64; Fault::ALL.len()]);

impl FaultCounts {
    /// Occurrences of this fault.
    pub fn of(&self, fault: Fault) -> u64 {
        self.0[fault as usize]
    }

    /// Occurrences of all faults.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

impl fmt::Display for FaultCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for fault in Fault::ALL.iter().filter(|fault| self.of(**fault) > 0) {
            writeln!(f, "{:>8} {fault:?}", self.of(*fault))?;
        }
        Ok(())
    }
}

/// Draws for a network's rings and connections.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) faults: Faults,
    pub(crate) seed: u64,
    pub(crate) adversary: Adversary,
    struck: [AtomicU64; Fault::ALL.len()],
    pub(crate) occurred: EventCounts,
}

impl Plan {
    pub(crate) fn new(faults: Faults, seed: u64) -> Plan {
        Plan::against(Adversary::default(), faults, seed)
    }

    pub(crate) fn against(adversary: Adversary, faults: Faults, seed: u64) -> Plan {
        Plan { faults, seed, adversary, struck: Default::default(), occurred: EventCounts::default() }
    }

    pub(crate) fn has_faults(&self) -> bool {
        self.faults.once_in.iter().any(|once_in| *once_in > 0)
    }

    pub(crate) fn injected(&self) -> FaultCounts {
        FaultCounts(std::array::from_fn(|index| self.struck[index].load(Ordering::Relaxed)))
    }
}

/// Draws faults for one ring or one connection.
#[derive(Debug)]
pub(crate) struct Injector {
    plan: Arc<Plan>,
    rng: Rng,
    /// The draws of the adversary, which are independent of all others.
    hostile: Rng,
}

impl Injector {
    /// Creates an injector. `salt` distinguishes those of one network.
    pub(crate) fn new(plan: Arc<Plan>, salt: u64) -> Injector {
        let rng = Rng::new(plan.seed.wrapping_add(salt));
        let hostile = Rng::new(plan.seed.wrapping_add(salt) ^ 0x686F_7374_696C_6521);
        Injector { plan, rng, hostile }
    }

    /// True if the adversary causes this event now.
    pub(crate) fn meets(&mut self, event: HostileEvent) -> bool {
        let occurs = self.plan.adversary.takes(event, &mut self.hostile);
        if occurs {
            self.plan.occurred.count(event);
        }
        occurs
    }

    /// Counts an event that occurred because of its causes.
    pub(crate) fn met(&self, event: HostileEvent) {
        self.plan.occurred.count(event);
    }

    /// True if there is an adversary.
    pub(crate) fn is_opposed(&self) -> bool {
        !self.plan.adversary.is_idle()
    }

    /// A number from `low` to `high` that the adversary draws, each power of two as likely as any
    /// other.
    pub(crate) fn hostile_spread(&mut self, low: u64, high: u64) -> u64 {
        self.hostile.spread(low, high)
    }

    /// True if this fault occurs now.
    pub(crate) fn strike(&mut self, fault: Fault) -> bool {
        let once_in = self.plan.faults.once_in[fault as usize];
        let strikes = once_in > 0 && self.rng.one_in(once_in.into());
        if strikes {
            self.plan.struck[fault as usize].fetch_add(1, Ordering::Relaxed);
        }
        strikes
    }

    /// `len`, or a length from 1 to it if this fault occurs.
    pub(crate) fn shorten(&mut self, fault: Fault, len: usize) -> usize {
        if len <= 1 || !self.strike(fault) {
            return len;
        }
        self.rng.range(1, len as u64) as usize
    }

    /// Delay of an arrival.
    pub(crate) fn latency(&mut self) -> Duration {
        if !self.strike(Fault::Latency) {
            return Duration::ZERO;
        }
        let most = self.plan.faults.latency_max.as_nanos() as u64;
        Duration::from_nanos(self.rng.spread(most.min(10_000), most))
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.rng.below(bound as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn injector(faults: Faults) -> Injector {
        Injector::new(Arc::new(Plan::new(faults, 1)), 0)
    }

    #[test]
    fn faults_strike_as_often_as_they_are_told_to() {
        for fault in [Fault::SendShort, Fault::Delay, Fault::EnterInterrupted] {
            let once_in = u64::from(Faults::all().once_in(fault));
            for (faults, expected) in [(Faults::none(), 0..1), (Faults::all(), 500..2000)] {
                let mut injector = injector(faults);
                let struck = (0..1000).filter(|_| injector.strike(fault)).count() as u64;
                assert!(expected.contains(&(struck * once_in)), "{fault:?}");
                assert_eq!(injector.plan.injected().of(fault), struck);
            }
        }
        let mut injector = injector(Faults::all());
        let lens: Vec<usize> = (0..1000).map(|_| injector.shorten(Fault::SendShort, 5)).collect();
        assert!((1..=5).all(|len| lens.contains(&len)) && lens.iter().all(|len| (1..=5).contains(len)));
    }

    #[test]
    fn seed_draws_which_faults_are_on() {
        let drawn = |seed| Faults::all().drawn(seed);
        assert_eq!(drawn(7), drawn(7));
        let on = |fault| (0..100).filter(|seed| drawn(*seed).once_in(fault) > 0).count();
        assert!((20..80).contains(&on(Fault::SendShort)), "{}", on(Fault::SendShort));
        assert_eq!(on(Fault::RingBreaks), 0, "what is off stays off");
    }
}
