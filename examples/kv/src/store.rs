//! The keys of one shard, with their values and their ends.
//!
//! They lie next to each other, so a position names a key until one before it goes: then the last one moves into the gap. That is
//! what SCAN walks over, from the end to the start.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};
use std::rc::Rc;

use foldhash::SharedSeed;
use foldhash::quality::SeedableRandomState;
use indexmap::IndexMap;
use ringserve::framing::{Kept, Parts};
use ringserve::resp::hash_tag;
use ringserve::sync::Notify;

/// The end of a key that has none.
pub const NEVER: u64 = u64::MAX;

/// Hashes keys, the same way on all shards, and in a way that clients do not know: they must not put all keys into one place.
pub type Keyer = SeedableRandomState;

/// One that the system draws: what the standard library hashes by has keys from it.
pub fn random_keyer() -> Keyer {
    let random = || RandomState::new().hash_one(());
    SeedableRandomState::with_seed(random(), Box::leak(Box::new(SharedSeed::from_u64(random()))))
}

struct Entry {
    value: Kept,
    /// In milliseconds since 1970.
    end: u64,
}

/// Keys and values of one shard, and when they end.
pub struct Store {
    keys: IndexMap<Box<[u8]>, Entry, Keyer>,
    /// The ends of keys that have one, and where these are.
    ends: BTreeSet<(u64, u32)>,
    /// Told when a key comes to be the next one that ends.
    pub sooner: Rc<Notify>,
    /// Milliseconds since 1970.
    clock: Box<dyn Fn() -> u64>,
    /// This shard, and how many there are.
    pub place: (usize, usize),
    /// Bytes a value may grow to: no longer than what a request could bring.
    pub value_bytes_max: usize,
}

impl Store {
    pub fn new(
        keyer: Keyer,
        clock: impl Fn() -> u64 + 'static,
        place: (usize, usize),
        value_bytes_max: usize,
    ) -> Store {
        let (keys, clock) = (IndexMap::with_hasher(keyer), Box::new(clock));
        Store { keys, ends: BTreeSet::new(), sooner: Rc::default(), clock, place, value_bytes_max }
    }

    pub fn now(&self) -> u64 {
        (self.clock)()
    }

    /// Which shard owns a key. Bits that tables do not look at decide.
    #[inline]
    pub fn owner(&self, key: &[u8]) -> usize {
        if self.place.1 == 1 {
            return 0;
        }
        let hash = self.keys.hasher().hash_one(hash_tag(key)) << 16;
        ((u128::from(hash) * self.place.1 as u128) >> 64) as usize
    }

    /// Looks for a key. One whose time is over is removed.
    #[inline]
    pub fn find(&mut self, key: &[u8]) -> Option<usize> {
        let (at, _, entry) = self.keys.get_full(key)?;
        if entry.end != NEVER && entry.end <= self.now() {
            self.remove(at);
            return None;
        }
        Some(at)
    }

    #[inline]
    pub fn value(&self, at: usize) -> &Kept {
        &self.keys[at].value
    }

    /// The value of a key, empty if it is not there.
    pub fn value_of(&mut self, key: &[u8]) -> &[u8] {
        self.find(key).map_or(&[], |at| self.value(at))
    }

    /// When the key there ends, or [`NEVER`].
    pub fn end(&self, at: usize) -> u64 {
        self.keys[at].end
    }

    #[inline]
    pub fn set_end(&mut self, at: usize, end: u64) {
        let old = std::mem::replace(&mut self.keys[at].end, end);
        if old != NEVER {
            self.ends.remove(&(old, at as u32));
        }
        if end != NEVER {
            if self.ends.first().is_none_or(|(first, _)| end < *first) {
                self.sooner.notify_one();
            }
            self.ends.insert((end, at as u32));
        }
    }

    /// Changes a value in place. A new key is empty before, and never ends.
    #[inline]
    pub fn change<R>(&mut self, key: &[u8], change: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        let at = match self.find(key) {
            Some(at) => at,
            None => self.insert(key, Kept::default()),
        };
        change(self.keys[at].value.to_mut())
    }

    /// Gives a key an argument as its value, and another end if one is told. A new key without one never ends.
    #[inline]
    pub fn put(&mut self, key: &[u8], args: Parts<'_>, n: usize, end: Option<u64>) {
        let at = match self.find(key) {
            None => self.insert(key, args.keep(n)),
            Some(at) => {
                self.keys[at].value.replace(args, n);
                at
            }
        };
        if let Some(end) = end {
            self.set_end(at, end);
        }
    }

    /// Adds a key that is not there.
    fn insert(&mut self, key: &[u8], value: Kept) -> usize {
        self.keys.insert_full(key.into(), Entry { value, end: NEVER }).0
    }

    /// Removes the key there. The last one moves to its place.
    pub fn remove(&mut self, at: usize) {
        let last = self.keys.len() - 1;
        let end = self.end(last);
        self.set_end(at, NEVER);
        self.set_end(last, NEVER);
        self.keys.swap_remove_index(at);
        if at != last {
            self.set_end(at, end);
        }
    }

    /// True if the key was there.
    pub fn delete(&mut self, key: &[u8]) -> bool {
        self.find(key).map(|at| self.remove(at)).is_some()
    }

    pub fn clear(&mut self) {
        (self.keys, self.ends) = (IndexMap::with_hasher(self.keys.hasher().clone()), BTreeSet::new());
    }

    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Removes keys whose time is over, that many at most, and tells when the next one ends.
    pub fn expire(&mut self, max: usize) -> Option<u64> {
        let now = self.now();
        for _ in 0..max {
            let Some(&(_, at)) = self.ends.first().filter(|(end, _)| *end <= now) else { break };
            self.remove(at as usize);
        }
        self.ends.first().map(|(end, _)| *end)
    }

    /// Keys whose time is not over from one position to another.
    pub fn keys(&self, from: usize, to: usize) -> impl DoubleEndedIterator<Item = &[u8]> {
        let now = if self.ends.is_empty() { 0 } else { self.now() };
        let entries = self.keys.get_range(from..to.min(self.keys.len())).into_iter().flatten();
        entries.filter(move |(_, entry)| entry.end > now).map(|(key, _)| &**key)
    }
}

#[cfg(test)]
#[path = "tests/store.rs"]
mod tests;
