//! The work of a shard, in words that the watchdog reads while the shard is blocked.
//!
//! ```text
//!   work    4 bits: which code, none for a call      60 bits: the connection, or NO_CONNECTION
//!   peer    as `PeerWords`; behind the first word what was there before, unless that tells of IPv6
//!   frame   bytes of the frame, 0 if none is known
//! ```
//!
//! They are stored one by one before user code runs, and never in the middle of it: of a shard that
//! is stalled in one piece of work they belong together. Of one that has much work in one turn a
//! reader may take the peer of one and the frame of the next.

use std::sync::atomic::{AtomicU64, Ordering};

use ringserve_core::{Address, ConnId, PeerWords};

use crate::stats::StalledWork;

const ID_BITS: u32 = ConnId::SLOT_BITS + ConnId::GENERATION_BITS;

/// An id that no connection has: there is no such slot.
const NO_CONNECTION: u64 = (1 << ID_BITS) - 1;

/// The shard's own code works. All bits, which one instruction stores.
const OWN: u64 = u64::MAX;

/// A shard's own.
pub(crate) struct WorkWords {
    work: AtomicU64,
    frame: AtomicU64,
    peer: [AtomicU64; 3],
}

impl Default for WorkWords {
    fn default() -> WorkWords {
        WorkWords { work: AtomicU64::new(OWN), frame: AtomicU64::new(0), peer: Default::default() }
    }
}

/// The meaning of the words.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Working {
    pub(crate) work: StalledWork,
    pub(crate) connection: Option<ConnId>,
    pub(crate) peer: Option<Address>,
    pub(crate) frame_bytes: Option<usize>,
    /// Usually differs if the shard works on something else.
    pub(crate) mark: u64,
}

impl WorkWords {
    /// The work that follows is the shard's own.
    #[inline]
    pub(crate) fn end(&self) {
        self.work.store(OWN, Ordering::Relaxed);
    }

    /// The shard works on no connection from now on.
    #[inline]
    pub(crate) fn on(&self, work: StalledWork) {
        self.work.store(work.number() << ID_BITS | NO_CONNECTION, Ordering::Relaxed);
    }

    /// The shard works on a connection from now on.
    #[inline]
    pub(crate) fn on_connection(&self, work: StalledWork, id: ConnId, peer: PeerWords) {
        // First: words of the peer that are not needed are not loaded either where nothing was
        // stored before.
        self.for_peer(peer);
        self.work.store(work.number() << ID_BITS | id.bits(), Ordering::Relaxed);
        self.frame.store(0, Ordering::Relaxed);
    }

    /// The shard works on a connection whose peer is not at hand.
    #[inline]
    pub(crate) fn on_connection_alone(&self, work: StalledWork, id: ConnId) {
        self.work.store(work.number() << ID_BITS | id.bits(), Ordering::Relaxed);
        self.for_peer(PeerWords::default());
    }

    /// The shard works on a peer that is no connection yet.
    pub(crate) fn on_peer(&self, work: StalledWork, peer: PeerWords) {
        self.on(work);
        self.frame.store(0, Ordering::Relaxed);
        self.for_peer(peer);
    }

    #[inline]
    fn for_peer(&self, peer: PeerWords) {
        let PeerWords([first, high, low]) = peer;
        let [to_first, to_high, to_low] = &self.peer;
        if peer.is_long() {
            to_high.store(high, Ordering::Relaxed);
            to_low.store(low, Ordering::Relaxed);
        }
        to_first.store(first, Ordering::Relaxed);
    }

    /// The call is for a frame of this length.
    #[inline]
    pub(crate) fn on_frame(&self, bytes: usize) {
        self.frame.store(bytes as u64, Ordering::Relaxed);
    }

    /// For the watchdog.
    pub(crate) fn read(&self) -> Working {
        let [work, frame] = [&self.work, &self.frame].map(|word| word.load(Ordering::Relaxed));
        let peer = PeerWords([0, 1, 2].map(|word| self.peer[word].load(Ordering::Relaxed)));
        let (number, id) = (work >> ID_BITS, work & NO_CONNECTION);
        let work_is = StalledWork::of_number(number);
        let has_id = id != NO_CONNECTION && work_is != StalledWork::Framework;
        let connection = has_id.then(|| ConnId::from_bits(id));
        let has_peer = connection.is_some() || work_is == StalledWork::Admit;
        Working {
            work: work_is,
            connection,
            peer: Option::from(peer).filter(|_| has_peer).map(Address::Ip),
            frame_bytes: (frame > 0 && work_is == StalledWork::Call).then_some(frame as usize),
            mark: work.wrapping_mul(31).wrapping_add(frame),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    fn peer(text: &str) -> PeerWords {
        Some(text.parse().unwrap()).into()
    }

    #[test]
    fn what_was_stored_is_read() {
        let words = WorkWords::default();
        let own = |words: &WorkWords| {
            let working = words.read();
            assert_eq!(
                (working.work, working.connection, working.peer),
                (StalledWork::Framework, None, None)
            );
        };
        own(&words);
        words.on(StalledWork::Task);
        words.end();
        own(&words);
        for peer in ["10.1.2.3:5511", "[2001:db8::7]:65535", "[fe80::1%7]:1", "255.255.255.255:65535"] {
            let (id, peer): (_, SocketAddr) = (ConnId::new(17, (1 << 36) - 1), peer.parse().unwrap());
            words.on_connection(StalledWork::Call, id, Some(peer).into());
            assert_eq!(words.read().frame_bytes, None, "not that of the connection before");
            words.on_frame(212);
            let working = words.read();
            assert_eq!((working.work, working.connection), (StalledWork::Call, Some(id)));
            assert_eq!((working.peer, working.frame_bytes), (Some(Address::Ip(peer)), Some(212)));
        }
    }

    #[test]
    fn peer_without_an_address_is_not_that_of_the_connection_before() {
        let words = WorkWords::default();
        words.on_connection(StalledWork::Call, ConnId::new(1, 1), peer("10.1.2.3:5511"));
        words.on_frame(212);
        words.on_connection(StalledWork::Close, ConnId::new(2, 1), None.into());
        let working = words.read();
        assert_eq!((working.work, working.peer, working.frame_bytes), (StalledWork::Close, None, None));
        words.on_peer(StalledWork::Admit, peer("10.1.2.4:1"));
        let working = words.read();
        assert_eq!((working.connection, working.peer.unwrap().to_string()), (None, "10.1.2.4:1".to_owned()));
        words.on(StalledWork::Task);
        assert_eq!(words.read().peer, None, "a task has none");
    }
}
