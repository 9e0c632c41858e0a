//! The keys of one shard, with their values and their ends.
//!
//! ```text
//!   table: hash ──▶ position        entries: ┌ key, value, hash, end ┬ ... ┬ ... ┐
//!                                             0                       1     2
//! ```
//!
//! Entries lie next to each other, so a position names a key until one before it goes: then the last one moves into the
//! gap. That is what SCAN and the sweep walk over, from the end to the start.

use std::cell::Cell;
use std::hash::{BuildHasher, Hasher, RandomState};

use foldhash::SharedSeed;
use foldhash::quality::FoldHasher;
use hashbrown::HashTable;

use crate::clock::Clock;

/// The end of a key that has none.
pub const NEVER: u64 = u64::MAX;

/// Entries looked at for each new key, while any key has an end. Memory grows only by new keys, so they pay: when 4
/// are looked at for one that comes, at most about a quarter of all are over and not gone yet.
const SWEPT_PER_INSERT: usize = 4;

/// A value that shrank gives memory back once it would use less than a quarter of it, and this much is at stake.
const SHRINK_BYTES_MIN: usize = 1024;

/// Hashes keys. It is made once and cloned for each shard, so that all agree who owns a key.
///
/// Clients choose the keys, and must not be able to put all of them into one place. So the hash is seeded by the
/// system at random, and nothing that a client sees depends on it: SCAN and KEYS go by position. The standard
/// library's hash would be proof even against one who learned hashes, for 120 instructions more in each request.
#[derive(Clone, Copy)]
pub struct Keyer {
    seed: u64,
    seeds: &'static SharedSeed,
}

impl Default for Keyer {
    fn default() -> Keyer {
        // What the standard library makes of nothing, with keys from the system.
        let random = || RandomState::new().build_hasher().finish();
        Keyer::of(random(), random())
    }
}

impl Keyer {
    /// One that these two numbers decide.
    pub fn of(seed: u64, seeds: u64) -> Keyer {
        Keyer { seed, seeds: Box::leak(Box::new(SharedSeed::from_u64(seeds))) }
    }

    /// A key ready to be looked for.
    #[inline]
    pub fn key<'a>(&self, bytes: &'a [u8]) -> Key<'a> {
        let mut hasher = FoldHasher::with_seed(self.seed, self.seeds);
        hasher.write(bytes);
        Key { bytes, hash: hasher.finish() }
    }
}

/// A key and its hash.
#[derive(Clone, Copy)]
pub struct Key<'a> {
    bytes: &'a [u8],
    hash: u64,
}

impl Key<'_> {
    /// Which of `shards` owns it. Bits that the table of the owner does not look at decide.
    #[inline]
    pub fn owner(&self, shards: usize) -> usize {
        ((u128::from(self.hash << 16) * shards as u128) >> 64) as usize
    }
}

/// The time of one request, in milliseconds since the shard began. The clock is read when it is first asked for, so a
/// request that meets no end of a key does not read it.
pub struct Moment<'a> {
    clock: &'a Clock,
    read: Cell<u64>,
}

impl Moment<'_> {
    /// Now, on that clock.
    #[inline]
    pub fn now(clock: &Clock) -> Moment<'_> {
        Moment { clock, read: Cell::new(NEVER) }
    }

    /// A time for tests.
    #[cfg(test)]
    pub fn at(millis: u64) -> Moment<'static> {
        Moment { clock: &Clock::Stopped, read: Cell::new(millis) }
    }

    /// Milliseconds.
    pub fn millis(&self) -> u64 {
        if self.read.get() == NEVER {
            self.read.set(self.clock.elapsed().as_millis() as u64);
        }
        self.read.get()
    }

    /// Milliseconds since 1970, as the system's clock tells them now. Ends are not kept in them, so that setting
    /// that clock moves no end.
    pub fn unix_millis(&self) -> i64 {
        self.clock.unix_millis(self.millis())
    }
}

struct Entry {
    key: Box<[u8]>,
    value: Vec<u8>,
    hash: u64,
    /// In milliseconds of [`Moment`].
    end: u64,
}

/// Keys and values of one shard, and when they end.
#[derive(Default)]
pub struct Store {
    table: HashTable<u32>,
    entries: Vec<Entry>,
    /// Entries that have an end.
    ending: usize,
    /// The sweep looks at the entry before this one next.
    swept: usize,
    /// Keys that came to their end so far.
    expired: u64,
}

/// Where a key is. Valid until the store is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position(usize);

impl Store {
    /// Looks for a key. One whose time is over is removed.
    #[inline]
    pub fn find(&mut self, key: Key<'_>, now: &Moment<'_>) -> Option<Position> {
        let at = *self.table.find(key.hash, |at| &*self.entries[*at as usize].key == key.bytes)? as usize;
        if self.entries[at].end != NEVER && self.entries[at].end <= now.millis() {
            self.expire(at);
            return None;
        }
        Some(Position(at))
    }

    /// The value there.
    #[inline]
    pub fn value(&self, at: Position) -> &[u8] {
        &self.entries[at.0].value
    }

    /// The value there, to be changed.
    #[inline]
    pub fn value_mut(&mut self, at: Position) -> &mut Vec<u8> {
        &mut self.entries[at.0].value
    }

    /// When the key there ends, or [`NEVER`].
    #[inline]
    pub fn end(&self, at: Position) -> u64 {
        self.entries[at.0].end
    }

    /// Sets when the key there ends.
    #[inline]
    pub fn set_end(&mut self, at: Position, end: u64) {
        let old = std::mem::replace(&mut self.entries[at.0].end, end);
        self.ending = self.ending - usize::from(old != NEVER) + usize::from(end != NEVER);
    }

    /// Gives the key there another value. Its end stays.
    #[inline]
    pub fn replace(&mut self, at: Position, value: &[u8]) {
        let old = &mut self.entries[at.0].value;
        if old.capacity() >= SHRINK_BYTES_MIN && old.capacity() / 4 > value.len() {
            *old = value.to_vec();
        } else {
            old.clear();
            old.extend_from_slice(value);
        }
    }

    /// Adds a key that is not there.
    ///
    /// # Panics
    /// At 4 billion keys.
    pub fn insert(&mut self, key: Key<'_>, value: &[u8], end: u64, now: &Moment<'_>) {
        if self.ending > 0 {
            self.sweep(now);
        }
        let at = u32::try_from(self.entries.len()).expect("a shard holds 4 billion keys at most");
        let entries = &self.entries;
        self.table.insert_unique(key.hash, at, |at| entries[*at as usize].hash);
        self.entries.push(Entry { key: key.bytes.into(), value: value.to_vec(), hash: key.hash, end });
        self.ending += usize::from(end != NEVER);
    }

    /// Removes the key there.
    pub fn remove(&mut self, at: Position) {
        let last = self.entries.len() - 1;
        self.set_end(at, NEVER);
        let removed = self.entries.swap_remove(at.0);
        if let Ok(found) = self.table.find_entry(removed.hash, |found| *found as usize == at.0) {
            found.remove();
        }
        if let Some(moved) = self.entries.get(at.0)
            && let Some(position) = self.table.find_mut(moved.hash, |position| *position as usize == last)
        {
            *position = at.0 as u32;
        }
    }

    /// Removes all keys.
    pub fn clear(&mut self) {
        *self = Store { expired: self.expired, ..Store::default() };
    }

    /// Keys, with those that are over and were not come across yet.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Keys that have an end.
    pub fn ending(&self) -> usize {
        self.ending
    }

    /// Keys that came to their end so far.
    pub fn expired(&self) -> u64 {
        self.expired
    }

    /// All keys that are not over.
    pub fn keys(&self, now: &Moment<'_>) -> impl Iterator<Item = &[u8]> {
        self.entries.iter().filter(|entry| !entry.is_over(now)).map(|entry| &*entry.key)
    }

    /// A part of all keys: the next `count` before `cursor`, and the cursor to go on with, which is 0 at the end as it
    /// is at the start. A key that is there from the first call to the last is seen at least once, since a
    /// key only ever moves to a lower position, and keys are seen from the highest to the lowest.
    pub fn scan(
        &self,
        cursor: usize,
        count: usize,
        now: &Moment<'_>,
    ) -> (usize, impl Iterator<Item = &[u8]>) {
        let top = if cursor == 0 { self.entries.len() } else { cursor.min(self.entries.len()) };
        let next = top.saturating_sub(count);
        let seen = self.entries[next..top].iter().rev();
        (next, seen.filter(|entry| !entry.is_over(now)).map(|entry| &*entry.key))
    }

    fn sweep(&mut self, now: &Moment<'_>) {
        for _ in 0..SWEPT_PER_INSERT.min(self.entries.len()) {
            if self.swept == 0 || self.swept > self.entries.len() {
                self.swept = self.entries.len();
            }
            self.swept -= 1;
            if self.entries[self.swept].is_over(now) {
                self.expire(self.swept);
            }
        }
    }

    fn expire(&mut self, at: usize) {
        self.expired += 1;
        self.remove(Position(at));
    }

    /// Panics if the parts disagree.
    #[cfg(test)]
    pub fn invariants(&self) {
        assert_eq!(self.table.len(), self.entries.len());
        assert_eq!(self.ending, self.entries.iter().filter(|entry| entry.end != NEVER).count());
        for (at, entry) in self.entries.iter().enumerate() {
            let found = self.table.find(entry.hash, |found| *found as usize == at);
            assert!(found.is_some(), "entry {at} is not in the table");
        }
    }
}

impl Entry {
    #[inline]
    fn is_over(&self, now: &Moment<'_>) -> bool {
        self.end != NEVER && self.end <= now.millis()
    }
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
