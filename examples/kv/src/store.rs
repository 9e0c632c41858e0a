//! The keys of one shard, with their values and their ends.
//!
//! They lie next to each other, so a position names a key until one before it goes: then the last
//! one moves into the gap. That is what KEYS and SCAN walk over, from the end to the start.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::rc::{Rc, Weak};
use std::time::Duration;

use foldhash::SharedSeed;
use foldhash::quality::SeedableRandomState;
use indexmap::IndexMap;
use ringserve::framing::{FrameFields, OwnedField};
use ringserve::resp::hash_tag;
use ringserve::sync::Notify;

/// Bytes of a value from which on memory is reserved for the answer: below them it is copied, and
/// not kept until it is sent.
pub const LARGE_BYTES: usize = 32 << 10;

/// The end of a key that has none.
pub const NEVER: u64 = u64::MAX;

/// Hashes keys, the same way on all shards, and in a way that clients do not know: they must not
/// put all keys into one place.
pub type Keyer = SeedableRandomState;

/// One that the system draws: what the standard library hashes by has keys from it.
pub fn random_keyer() -> Keyer {
    let random = || RandomState::new().hash_one(());
    SeedableRandomState::with_seed(random(), Box::leak(Box::new(SharedSeed::from_u64(random()))))
}

/// Milliseconds below which a difference of the clocks is none: what lies between a look at one and
/// a look at the other.
const CLOCK_STEP_MILLIS: u64 = 50;

struct Entry {
    value: OwnedField,
    /// By [`Store::now`].
    end: u64,
}

/// The position of a walk: keys at this position and above were seen. The store moves it as it
/// moves keys.
pub struct Place {
    pub at: usize,
    /// Keys that were seen and came to be below it.
    pub seen: HashSet<Box<[u8]>>,
}

/// Keys and values of one shard, and when they end.
pub struct Store {
    keys: IndexMap<Box<[u8]>, Entry, Keyer>,
    /// The ends of keys that have one, and where these are.
    ends: BTreeSet<(u64, u32)>,
    /// Told when a key comes to be the next one that ends.
    pub sooner: Rc<Notify>,
    clock: Box<dyn Fn() -> u64>,
    /// Time since 1970, by a clock that may be set.
    wall: Box<dyn Fn() -> Duration>,
    /// Milliseconds by which that one was ahead of the other when it was last looked at.
    ahead: i64,
    /// This shard, and how many there are.
    pub place: (usize, usize),
    /// Bytes a value may grow to: no longer than what a request could bring.
    pub value_bytes_max: usize,
    /// There was a value for whose answer memory is reserved.
    pub has_large: bool,
    /// The walks that are under way.
    walks: Vec<Weak<RefCell<Place>>>,
}

impl Store {
    pub fn new(
        keyer: Keyer,
        clock: impl Fn() -> u64 + 'static,
        wall: impl Fn() -> Duration + 'static,
        place: (usize, usize),
        value_bytes_max: usize,
    ) -> Store {
        let (keys, clock, wall) = (IndexMap::with_hasher(keyer), Box::new(clock), Box::new(wall));
        let (ends, sooner, walks) = Default::default();
        Store { keys, ends, sooner, clock, wall, ahead: 0, place, value_bytes_max, has_large: false, walks }
    }

    /// Milliseconds since 1970 as they were known at the start, and by the shard's clock from then
    /// on: no key ends sooner or later for a clock that is set.
    pub fn now(&self) -> u64 {
        (self.clock)()
    }

    /// Time since 1970, as this host knows it now.
    pub fn wall(&self) -> Duration {
        (self.wall)()
    }

    /// Milliseconds from [`now`](Store::now) to [`wall`](Store::wall), for times in requests and
    /// replies.
    pub fn ahead(&mut self) -> i64 {
        let ahead = self.wall().as_millis() as i64 - self.now() as i64;
        if ahead.abs_diff(self.ahead) >= CLOCK_STEP_MILLIS {
            self.ahead = ahead;
        }
        self.ahead
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
    pub fn value(&self, at: usize) -> &OwnedField {
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
            None => self.insert(key, OwnedField::default()),
        };
        let value = self.keys[at].value.to_mut();
        let changed = change(value);
        self.has_large |= value.len() >= LARGE_BYTES;
        changed
    }

    /// Gives a key an argument as its value, and another end if one is given. A new key without one
    /// never ends.
    #[inline]
    pub fn put(&mut self, key: &[u8], args: FrameFields<'_>, n: usize, end: Option<u64>) {
        self.has_large |= args.get(n).len() >= LARGE_BYTES;
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
    fn insert(&mut self, key: &[u8], value: OwnedField) -> usize {
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
        if !self.walks.is_empty() {
            self.move_walks(at, last);
        }
    }

    /// A walk that saw what is at `top` and above.
    pub fn walked(&mut self, top: usize) -> Rc<RefCell<Place>> {
        let place = Rc::new(RefCell::new(Place { at: top, seen: HashSet::new() }));
        self.walks.retain(|walk| walk.strong_count() > 0);
        self.walks.push(Rc::downgrade(&place));
        place
    }

    /// The key at `last` has moved to `at`.
    #[cold]
    fn move_walks(&mut self, at: usize, last: usize) {
        for walk in self.walks.iter().filter_map(Weak::upgrade) {
            let mut walk = walk.borrow_mut();
            if at < walk.at
                && walk.at <= last
                && let Some((key, _)) = self.keys.get_index(at)
            {
                walk.seen.insert(key.clone());
            }
            walk.at = walk.at.min(last);
        }
    }

    /// True if the key was there.
    pub fn delete(&mut self, key: &[u8]) -> bool {
        self.find(key).map(|at| self.remove(at)).is_some()
    }

    pub fn clear(&mut self) {
        (self.keys, self.ends) = (IndexMap::with_hasher(self.keys.hasher().clone()), BTreeSet::new());
        self.walks.iter().filter_map(Weak::upgrade).for_each(|walk| walk.borrow_mut().at = 0);
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

    /// The key at a position, if its time is not over.
    pub fn key(&self, at: usize) -> Option<&[u8]> {
        let (key, entry) = self.keys.get_index(at)?;
        (entry.end == NEVER || entry.end > self.now()).then_some(&**key)
    }
}

#[cfg(test)]
#[path = "tests/store.rs"]
mod tests;
