//! Rare but legal behaviour of an io_uring interface, drawn at random: completions that lie, come
//! late, or end operations that no cancel was for.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::rng::Rng;

macro_rules! events {
    ($($(#[doc = $doc:literal])+ $name:ident $once_in:literal $harmless:literal,)*) => {
        /// A hostile completion, or an enter that does less than it was asked for.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        #[repr(usize)]
        pub enum HostileEvent { $($(#[doc = $doc])+ $name,)* }

        impl HostileEvent {
            /// Each event once.
            pub const ALL: &[HostileEvent] = &[$(HostileEvent::$name),*];

            /// An adversary causes one in this many occasions.
            const ONCE_IN: [u32; HostileEvent::ALL.len()] = [$($once_in),*];

            /// The events that cost no connection.
            const HARMLESS: [bool; HostileEvent::ALL.len()] = [$($harmless),*];
        }
    };
}

events! {
    /// A receive ends with `ECANCELED`, uncalled for.
    ReceiveCanceled 32 true,
    /// The same, with a flag that announces more completions.
    ReceiveCanceledMore 32 true,
    /// An error or the end of a stream carries a buffer.
    BufferInError 4 true,
    /// A receive ends with `ENOBUFS` on an empty buffer ring, with nothing to read: the adversary
    /// makes the ring small.
    NoBufferEarly 8 true,
    /// `ECANCELED` after a cancel, with a flag that announces more completions of the receive.
    CanceledMore 4 true,
    /// The answer to a cancel that found nothing comes turns later.
    CancelAnswerLate 2 true,
    /// The answer to a cancel comes after the end of the cancelled operation.
    CancelAnswerBehind 2 true,
    /// A cancel answers `EALREADY`: its operation ends by itself, some checks later.
    CancelAlready 3 true,
    /// A close or a shutdown completes turns later.
    CloseLate 8 true,
    /// A send ends with `EINTR`, or short if some of it was sent.
    SendInterrupted 32 true,
    /// A send ends with `ENOBUFS`.
    SendNoBuffers 32 true,
    /// An accept ends with `EINTR`.
    AcceptInterrupted 16 true,
    /// An accept ends with `ECANCELED`, with a flag that announces more completions.
    AcceptCanceledMore 16 true,
    /// An accept ends with `ENOMEM`.
    AcceptNoMemory 32 true,
    /// A receive does not notice that its input was shut down.
    InputEndUnheard 2 true,
    /// An enter ends with `EBUSY` while the completion queue overflows.
    EnterBusy 4 true,
    /// An enter ends with `EAGAIN`, nothing submitted.
    EnterAgain 64 true,
    /// An enter ends with `ENOMEM`, nothing submitted.
    EnterNoMemory 64 true,
    /// An enter submits a part.
    EnterPartial 16 true,
    /// The completion queue overflows: the adversary makes it small.
    Overflow 2 true,
    /// The submission queue is full: the adversary makes it small.
    QueueFull 2 true,
    /// A receive fails (`ENOMEM`).
    ReceiveFails 512 false,
    /// A send fails (`EIO`).
    SendFails 512 false,
    /// The file table refuses a socket (`ENOMEM`).
    InstallFails 32 false,
    /// There is no socket for an upstream (`EMFILE`).
    SocketFails 16 false,
    /// A queued connection is gone when it is taken (`ECONNABORTED`).
    TakeAborted 4 false,
}

/// The rate of each [`HostileEvent`], in virtual time. By default none occurs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Adversary {
    /// One occasion in this many is used; 0 for none.
    once_in: [u32; HostileEvent::ALL.len()],
    /// The most entries of the submission queue, of the completion queue and of the buffer ring; 0
    /// for the driver's choice.
    entries_max: [usize; 3],
}

impl Adversary {
    /// Draws the mix of one seed, including the events that cost a connection if it `breaks`. Each
    /// event is switched off, or occurs up to 4 times more or less often than by default. One seed
    /// in 8 has none.
    pub fn drawn(seed: u64, breaks: bool) -> Adversary {
        let mut rng = Rng::new(seed ^ 0x6164_7665_7273_6172);
        let mut adversary = Adversary::default();
        if rng.one_in(8) {
            return adversary;
        }
        let on = rng.range(2, 7);
        for event in HostileEvent::ALL {
            let (less, more) = (rng.spread(1, 4) as u32, rng.spread(1, 4) as u32);
            let off = rng.below(8) >= on || !(breaks || HostileEvent::HARMLESS[*event as usize]);
            // One in one would make progress impossible.
            let once_in = (HostileEvent::ONCE_IN[*event as usize] * less).div_ceil(more).max(2);
            adversary.once_in[*event as usize] = if off { 0 } else { once_in };
        }
        // Installing a connection takes two entries.
        let small = [
            (HostileEvent::QueueFull, rng.spread(2, 32)),
            (HostileEvent::Overflow, rng.spread(4, 64)),
            (HostileEvent::NoBufferEarly, rng.spread(1, 8)),
        ];
        adversary.entries_max =
            small.map(|(event, most)| if adversary.once_in[event as usize] > 0 { most as usize } else { 0 });
        adversary
    }

    /// True if it may cost a connection.
    pub fn breaks(&self) -> bool {
        let harmless = HostileEvent::HARMLESS.iter();
        self.once_in.iter().zip(harmless).any(|(once_in, harmless)| *once_in > 0 && !harmless)
    }

    /// Entries of the submission queue, of the completion queue and of the buffer ring, if the
    /// driver asks for `wanted`.
    pub(crate) fn entries(&self, wanted: [usize; 3]) -> [usize; 3] {
        std::array::from_fn(|of| match self.entries_max[of] {
            0 => wanted[of],
            most => wanted[of].min(most),
        })
    }

    /// True if an enter may submit fewer entries than the driver has.
    pub fn holds_back(&self) -> bool {
        use HostileEvent::{EnterAgain, EnterBusy, EnterNoMemory, EnterPartial, QueueFull};
        let events = [EnterAgain, EnterBusy, EnterNoMemory, EnterPartial, QueueFull];
        events.into_iter().any(|event| self.once_in[event as usize] > 0)
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.once_in.iter().all(|once_in| *once_in == 0)
    }

    /// True if this event occurs now.
    pub(crate) fn takes(&self, event: HostileEvent, rng: &mut Rng) -> bool {
        let once_in = self.once_in[event as usize];
        once_in > 0 && rng.one_in(once_in.into())
    }
}

/// Occurrences of each event.
#[derive(Debug, Default)]
pub(crate) struct EventCounts([AtomicU64; HostileEvent::ALL.len()]);

impl EventCounts {
    pub(crate) fn count(&self, event: HostileEvent) {
        self.0[event as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn of(&self, event: HostileEvent) -> u64 {
        self.0[event as usize].load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_draws_what_an_adversary_does() {
        let all = |breaks| (0..200).map(move |seed| Adversary::drawn(seed, breaks));
        assert_eq!(Adversary::drawn(7, true), Adversary::drawn(7, true));
        for event in HostileEvent::ALL {
            let on = |breaks| all(breaks).filter(|of| of.once_in[*event as usize] > 0).count();
            assert!((40..180).contains(&on(true)), "{event:?}: {}", on(true));
            assert_eq!(on(false) > 0, HostileEvent::HARMLESS[*event as usize], "{event:?}");
        }
        assert!(all(false).all(|of| !of.breaks()) && all(true).any(|of| of.breaks()));
        assert!(all(true).any(|of| of.is_idle()) && Adversary::default().is_idle());
    }

    #[test]
    fn queues_are_small_where_they_are_to_overflow() {
        let wanted = [512, usize::MAX, 4096];
        assert_eq!(Adversary::default().entries(wanted), wanted);
        for adversary in (0..200).map(|seed| Adversary::drawn(seed, false)) {
            let [submissions, completions, buffers] = adversary.entries(wanted);
            let is_on = |event: HostileEvent| adversary.once_in[event as usize] > 0;
            assert_eq!(is_on(HostileEvent::QueueFull), (2..=32).contains(&submissions));
            assert_eq!(is_on(HostileEvent::Overflow), (4..=64).contains(&completions));
            assert_eq!(is_on(HostileEvent::NoBufferEarly), (1..=8).contains(&buffers));
        }
    }
}
