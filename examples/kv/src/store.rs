//! The keys of one shard, with their values and their ends.
//!
//! They lie next to each other, so a position names a key until one before it goes: then the last one moves into the gap. That is
//! what SCAN walks over, from the end to the start.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::rc::Rc;

use foldhash::SharedSeed;
use foldhash::quality::SeedableRandomState;
use indexmap::IndexMap;
use ringserve::Frame;
use ringserve::sync::Notify;

/// The end of a key that has none.
pub const NEVER: u64 = u64::MAX;
/// A value that shrank gives memory back once it would use less than a quarter of it, and this much is at stake.
const SHRINK_BYTES_MIN: usize = 1024;
/// From this size on a value that was received in a block of its own stays in it, and leaves without a copy.
const KEPT_BYTES_MIN: usize = 16 << 10;

/// Hashes keys, the same way on all shards. Clients choose the keys, and must not be able to put all of them into one place: so the
/// hash is seeded by the system at random, and nothing that a client sees depends on it.
pub type Keyer = SeedableRandomState;

/// One that these two numbers decide.
pub fn keyer_of(seed: u64, seeds: u64) -> Keyer {
    SeedableRandomState::with_seed(seed, Box::leak(Box::new(SharedSeed::from_u64(seeds))))
}

/// One that nobody can foretell.
pub fn random_keyer() -> Keyer {
    // What the standard library makes of nothing, with keys from the system.
    let random = || RandomState::new().build_hasher().finish();
    keyer_of(random(), random())
}

/// Which of `shards` owns a key. As in a cluster of Redis, keys with the same text in `{}` are together. Bits that tables do not
/// look at decide.
pub fn owner(keyer: &Keyer, key: &[u8], shards: usize) -> usize {
    if shards == 1 {
        return 0;
    }
    let tag = key.iter().position(|byte| *byte == b'{').and_then(|open| {
        let inside = &key[open + 1..];
        inside.iter().position(|byte| *byte == b'}').filter(|len| *len > 0).map(|len| &inside[..len])
    });
    ((u128::from(keyer.hash_one(tag.unwrap_or(key)) << 16) * shards as u128) >> 64) as usize
}

/// What a key holds.
#[derive(Clone)]
pub enum Value {
    Own(Vec<u8>),
    /// The block that it was received in.
    Kept(Frame),
}

impl AsRef<[u8]> for Value {
    #[inline]
    fn as_ref(&self) -> &[u8] {
        match self {
            Value::Own(bytes) => bytes,
            Value::Kept(frame) => frame,
        }
    }
}

impl Value {
    /// Bytes of a frame, if they are worth keeping the block that they lie in.
    pub fn kept(frame: &Frame, from: u32, to: u32) -> Option<Value> {
        let (from, len) = (from as usize, (to - from) as usize);
        if len < KEPT_BYTES_MIN {
            return None;
        }
        let lease = frame.clone().into_lease();
        let pays = !lease.is_pooled() && lease.pinned_bytes() <= len + len / 4;
        pays.then(|| Value::Kept(Frame::new(lease, from, len)))
    }

    fn own(&mut self) -> &mut Vec<u8> {
        if let Value::Kept(frame) = self {
            *self = Value::Own(frame.to_vec());
        }
        let Value::Own(bytes) = self else { unreachable!("it was copied") };
        bytes
    }
}

struct Entry {
    value: Value,
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
    /// Bytes of keys and values.
    bytes: usize,
    /// Keys that came to their end so far.
    expired: u64,
    /// Milliseconds since 1970.
    clock: Box<dyn Fn() -> u64>,
}

impl Store {
    /// A store without keys, by a clock that tells milliseconds since 1970.
    pub fn new(keyer: Keyer, clock: impl Fn() -> u64 + 'static) -> Store {
        let (ends, sooner, clock) = (BTreeSet::new(), Rc::default(), Box::new(clock));
        Store { keys: IndexMap::with_hasher(keyer), ends, sooner, bytes: 0, expired: 0, clock }
    }

    pub fn now(&self) -> u64 {
        (self.clock)()
    }

    /// Looks for a key. One whose time is over is removed.
    #[inline]
    pub fn find(&mut self, key: &[u8]) -> Option<usize> {
        let (at, _, entry) = self.keys.get_full(key)?;
        if entry.end != NEVER && entry.end <= self.now() {
            self.expired += 1;
            self.remove(at);
            return None;
        }
        Some(at)
    }

    #[inline]
    pub fn value(&self, at: usize) -> &Value {
        &self.keys[at].value
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

    /// Changes the value there in place.
    #[inline]
    pub fn change<R>(&mut self, at: usize, change: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        let value = &mut self.keys[at].value;
        let before = value.as_ref().len();
        let bytes = value.own();
        let result = change(bytes);
        if bytes.capacity() >= SHRINK_BYTES_MIN && bytes.capacity() / 4 > bytes.len() {
            bytes.shrink_to_fit();
        }
        self.bytes = self.bytes + bytes.len() - before;
        result
    }

    /// Gives a key this value, and another end if one is told. A new key without one never ends.
    #[inline]
    pub fn put(&mut self, key: &[u8], value: &[u8], kept: Option<Value>, end: Option<u64>) {
        match (self.find(key), kept) {
            (None, kept) => {
                self.insert(key, kept.unwrap_or_else(|| Value::Own(value.to_vec())), end.unwrap_or(NEVER));
            }
            (Some(at), kept) => {
                match kept {
                    None => self.change(at, |bytes| {
                        bytes.clear();
                        bytes.extend_from_slice(value);
                    }),
                    Some(kept) => {
                        self.bytes = self.bytes + value.len() - self.value(at).as_ref().len();
                        self.keys[at].value = kept;
                    }
                }
                if let Some(end) = end {
                    self.set_end(at, end);
                }
            }
        }
    }

    /// Adds a key that is not there.
    pub fn insert(&mut self, key: &[u8], value: Value, end: u64) -> usize {
        self.bytes += key.len() + value.as_ref().len();
        let (at, _) = self.keys.insert_full(key.into(), Entry { value, end: NEVER });
        self.set_end(at, end);
        at
    }

    /// Removes the key there. The last one moves to its place.
    pub fn remove(&mut self, at: usize) -> Option<Value> {
        let last = self.keys.len() - 1;
        let end = self.end(last);
        self.set_end(at, NEVER);
        self.set_end(last, NEVER);
        let (key, entry) = self.keys.swap_remove_index(at)?;
        if at != last {
            self.set_end(at, end);
        }
        self.bytes -= key.len() + entry.value.as_ref().len();
        Some(entry.value)
    }

    pub fn clear(&mut self) {
        (self.keys, self.ends) = (IndexMap::with_hasher(self.keys.hasher().clone()), BTreeSet::new());
        self.bytes = 0;
    }

    /// Keys, keys that have an end, keys that came to it so far, and bytes of keys and values.
    pub fn figures(&self) -> [usize; 4] {
        [self.keys.len(), self.ends.len(), self.expired as usize, self.bytes]
    }

    /// Removes keys whose time is over, that many at most, and tells when the next one ends.
    pub fn expire(&mut self, max: usize) -> Option<u64> {
        let now = self.now();
        for _ in 0..max {
            let Some(&(_, at)) = self.ends.first().filter(|(end, _)| *end <= now) else { break };
            self.expired += 1;
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

    /// Panics if the parts disagree.
    #[cfg(test)]
    pub fn invariants(&self) {
        let ends = self.keys.values().enumerate().filter(|(_, entry)| entry.end != NEVER);
        assert_eq!(self.ends, ends.map(|(at, entry)| (entry.end, at as u32)).collect());
        let bytes = self.keys.iter().map(|(key, entry)| key.len() + entry.value.as_ref().len());
        assert_eq!(self.bytes, bytes.sum());
    }
}

#[cfg(test)]
#[path = "tests/store.rs"]
mod tests;
