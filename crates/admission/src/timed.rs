//! Networks that are denied or allowed for a time while the server runs, by those who operate it.
//!
//! They lie beside the lists, of which a file may be read again at any moment. A look costs one
//! load where none was added since the last change that left none: networks whose time is over are
//! looked up until they are forgotten by the next change. The thread that gives the kernel its
//! filter asks each second whether they changed.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwap;
use ipnet::IpNet;
use ringserve_core::Time;

use super::lists::Networks;

/// Networks at most: by hand or by a script, each change copies all of them.
pub(super) const TIMED_MAX: usize = 10_000;

/// The rule for a network, and the time of its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Until {
    pub(super) at: Time,
    pub(super) allows: bool,
}

/// Sorted by address: a look asks for one network of each length that occurs.
#[derive(Clone, Default)]
struct Entries {
    networks: BTreeMap<IpNet, Until>,
    /// The prefix lengths that occur, in ascending order: those of IPv4, and of IPv6.
    lengths: [Vec<u8>; 2],
}

impl Entries {
    fn len(&self) -> usize {
        self.networks.len()
    }

    fn insert(&mut self, network: IpNet, until: Until) {
        self.networks.insert(network.trunc(), until);
    }

    fn remove(&mut self, network: &IpNet) -> bool {
        self.networks.remove(&network.trunc()).is_some()
    }

    /// Forgets those whose time is over.
    fn expire(&mut self, now: Time) {
        self.networks.retain(|_, until| until.at > now);
    }

    /// Notes which lengths occur, after a change.
    fn measure(&mut self) {
        let of = |is_v4: bool| {
            let networks = self.networks.keys().filter(|network| network.addr().is_ipv4() == is_v4);
            let lengths: BTreeSet<u8> = networks.map(IpNet::prefix_len).collect();
            lengths.into_iter().collect()
        };
        self.lengths = [of(true), of(false)];
    }

    /// The rules of the networks that an address is in, the largest network first.
    fn covering(&self, address: IpAddr) -> impl Iterator<Item = Until> {
        let lengths = &self.lengths[usize::from(address.is_ipv6())];
        lengths.iter().filter_map(move |bits| {
            let network = IpNet::new(address, *bits).ok()?;
            self.networks.get(&network.trunc()).copied()
        })
    }
}

/// The networks of a [`Limiter`](super::Limiter).
#[derive(Default)]
pub(super) struct Timed {
    /// There may be some.
    some: AtomicBool,
    /// The number of changes to them.
    changes: AtomicU64,
    /// Held while they are changed.
    changing: Mutex<()>,
    entries: ArcSwap<Entries>,
}

impl Timed {
    /// True if some may hold.
    #[inline]
    pub(super) fn has_some(&self) -> bool {
        self.some.load(Ordering::Relaxed)
    }

    /// The rule for an address: of several networks that cover it one that allows it counts most.
    #[cold]
    pub(super) fn at(&self, address: IpAddr, now: Time) -> Option<Until> {
        let entries = self.entries.load();
        let stronger = |found: Option<Until>, until: Until| match found {
            Some(before) if before.allows => found,
            _ => Some(until),
        };
        let covering = entries.covering(address.to_canonical());
        covering.filter(|until| until.at > now).fold(None, stronger)
    }

    /// Begins to change them: other changes wait, and looks find what was there. Those that change
    /// several take them in one order.
    pub(super) fn change(&self, now: Time) -> Change<'_> {
        let changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut entries = Entries::clone(&self.entries.load());
        entries.expire(now);
        Change { of: self, entries, _changing: changing }
    }

    /// The number of changes to them.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// All whose time is not over.
    pub(super) fn list(&self, now: Time) -> Vec<(IpNet, Until)> {
        let entries = self.entries.load();
        let held = entries.networks.iter().filter(|(_, until)| until.at > now);
        held.map(|(network, until)| (*network, *until)).collect()
    }
}

/// A change that holds once it is [kept](Change::keep), and is forgotten else.
pub(super) struct Change<'a> {
    of: &'a Timed,
    entries: Entries,
    _changing: MutexGuard<'a, ()>,
}

impl Change<'_> {
    /// Adds networks, or gives them another time.
    ///
    /// # Errors
    /// The number that there would be, if that is too many.
    pub(super) fn add(&mut self, networks: &Networks, until: Until) -> Result<(), usize> {
        networks.iter().for_each(|network| self.entries.insert(network, until));
        if self.entries.len() > TIMED_MAX { Err(self.entries.len()) } else { Ok(()) }
    }

    /// Forgets networks, each as it was said. Returns how many of them there were.
    pub(super) fn remove(&mut self, networks: &Networks) -> usize {
        networks.iter().filter(|network| self.entries.remove(network)).count()
    }

    pub(super) fn keep(mut self) {
        self.entries.measure();
        self.of.some.store(self.entries.len() > 0, Ordering::Relaxed);
        self.of.entries.store(Arc::new(self.entries));
        // Behind the entries, so that one that sees the number finds them.
        self.of.changes.fetch_add(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::IpList;

    fn at(seconds: u64) -> Time {
        Time::from_nanos(seconds * 1_000_000_000)
    }

    fn networks(text: &str) -> Arc<Networks> {
        text.parse::<IpList>().unwrap().networks()
    }

    fn add(timed: &Timed, text: &str, until: Until, now: u64) -> Result<(), usize> {
        let mut change = timed.change(at(now));
        change.add(&networks(text), until).map(|()| change.keep())
    }

    fn remove(timed: &Timed, text: &str, now: u64) -> usize {
        let mut change = timed.change(at(now));
        let removed = change.remove(&networks(text));
        change.keep();
        removed
    }

    fn allowed(timed: &Timed, address: &str, now: u64) -> Option<bool> {
        timed.at(address.parse().unwrap(), at(now)).map(|until| until.allows)
    }

    #[test]
    fn networks_hold_for_their_time_and_what_allows_is_stronger() {
        let timed = Timed::default();
        assert!(!timed.has_some());
        let deny = |seconds| Until { at: at(seconds), allows: false };
        add(&timed, "10.0.0.0/8 2001:db8::/32", deny(10), 0).unwrap();
        add(&timed, "10.1.0.0/16", Until { at: at(5), allows: true }, 0).unwrap();
        add(&timed, "10.1.2.3", deny(20), 0).unwrap();
        assert!(timed.has_some());
        for (address, now, expected) in [
            ("10.2.0.1", 9, Some(false)),
            ("::ffff:10.2.0.1", 9, Some(false)),
            ("10.2.0.1", 10, None),
            ("10.1.9.9", 4, Some(true)),
            ("10.1.2.3", 4, Some(true)),
            ("10.1.9.9", 5, Some(false)),
            ("10.1.2.3", 15, Some(false)),
            ("11.0.0.1", 0, None),
            ("2001:db8:1::7", 0, Some(false)),
            ("2001:db9::7", 0, None),
        ] {
            assert_eq!(allowed(&timed, address, now), expected, "{address} at {now}");
        }
        assert_eq!(timed.list(at(6)).len(), 3);
        assert_eq!(remove(&timed, "10.0.0.0/8 10.0.0.0/9", 6), 1);
        assert_eq!(allowed(&timed, "10.2.0.1", 6), None);
        // A change forgets those that are over.
        assert_eq!(remove(&timed, "10.9.9.9", 30), 0);
        assert!(!timed.has_some() && timed.entries.load().len() == 0);
    }

    #[test]
    fn too_many_networks_change_nothing() {
        let timed = Timed::default();
        let many: String = (0..TIMED_MAX as u32 + 1)
            .map(|n| format!("{}\n", std::net::Ipv4Addr::from(0x0a00_0000 | n)))
            .collect();
        let until = Until { at: at(10), allows: false };
        assert_eq!(add(&timed, &many, until, 0), Err(TIMED_MAX + 1));
        assert!(!timed.has_some() && timed.list(at(0)).is_empty());
    }
}
