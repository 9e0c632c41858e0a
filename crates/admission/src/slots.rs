//! The entries of a stripe: a hash table of open addresses, whose entries lie in the slots
//! themselves.
//!
//! An entry is in the first free slot from its home on, which its hash says, so that a look at one
//! that memory has to be asked for costs one cache miss, or two beside each other. A table that
//! keeps a byte of each hash apart costs another one, in a part of memory that with a million
//! entries is in no near cache either. One that is removed leaves no mark: those behind it that
//! could not have its slot move up.

/// Entries for which the first slots are made.
const FIRST: usize = 12;

/// Entries that are found by their hashes, which the table asks for where it moves them.
pub(super) struct Slots<E> {
    /// A quarter is free at least, so that a search ends soon.
    slots: Vec<Option<E>>,
    len: usize,
}

impl<E> Default for Slots<E> {
    fn default() -> Slots<E> {
        Slots { slots: Vec::new(), len: 0 }
    }
}

impl<E> Slots<E> {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Entries for which there are slots.
    pub(super) fn capacity(&self) -> usize {
        self.slots.len() * 3 / 4
    }

    /// The slot at which a search for the hash begins. The stripe is chosen by other bits of it.
    #[inline]
    fn home(&self, hash: u64) -> usize {
        (((hash & u64::from(u32::MAX)) * self.slots.len() as u64) >> 32) as usize
    }

    #[inline]
    fn next(&self, at: usize) -> usize {
        if at + 1 == self.slots.len() { 0 } else { at + 1 }
    }

    /// Slots from one to another.
    fn distance(&self, from: usize, to: usize) -> usize {
        if to >= from { to - from } else { to + self.slots.len() - from }
    }

    /// The entry of this hash that it is.
    #[inline]
    pub(super) fn find(&self, hash: u64, is: impl Fn(&E) -> bool) -> Option<usize> {
        let mut at = self.home(hash);
        // None at all where there are no slots.
        while let Some(entry) = self.slots.get(at)?.as_ref() {
            if is(entry) {
                return Some(at);
            }
            at = self.next(at);
        }
        None
    }

    /// The entry at a place that was found, if none was added or removed since.
    #[inline]
    pub(super) fn at(&mut self, place: usize) -> Option<&mut E> {
        self.slots.get_mut(place)?.as_mut()
    }

    /// Adds an entry that is not there. There must be room: fewer than the capacity.
    pub(super) fn insert(&mut self, hash: u64, entry: E) {
        debug_assert!(self.len < self.capacity(), "there is no room");
        let mut at = self.home(hash);
        while self.slots[at].is_some() {
            at = self.next(at);
        }
        self.slots[at] = Some(entry);
        self.len += 1;
    }

    /// Removes the entry at a place.
    pub(super) fn remove(&mut self, place: usize, hash: impl Fn(&E) -> u64) {
        let (mut gap, mut at) = (place, place);
        self.slots[gap] = None;
        self.len -= 1;
        loop {
            at = self.next(at);
            let Some(entry) = &self.slots[at] else { return };
            // One whose home is behind the gap stays.
            if self.distance(self.home(hash(entry)), at) >= self.distance(gap, at) {
                self.slots.swap(gap, at);
                gap = at;
            }
        }
    }

    /// Keeps the entries that are to be kept.
    pub(super) fn retain(&mut self, hash: impl Fn(&E) -> u64, mut keeps: impl FnMut(&mut E) -> bool) {
        let Some(free) = self.slots.iter().position(Option::is_none) else { return };
        // From behind a free slot on: so the home of each is between that one and its place, and it
        // finds a slot no later.
        let mut at = free;
        for _ in 0..self.slots.len() {
            at = self.next(at);
            if let Some(mut entry) = self.slots[at].take() {
                self.len -= 1;
                if keeps(&mut entry) {
                    self.insert(hash(&entry), entry);
                }
            }
        }
    }

    /// Makes room for more entries than there are, of which `most` may come to be there: for a
    /// third more, unless a ninth is free, since otherwise it would be asked for again soon. False
    /// if the system has no memory for one more.
    pub(super) fn grow(&mut self, most: usize, hash: impl Fn(&E) -> u64) -> bool {
        let capacity = self.capacity();
        if capacity < most && self.len >= capacity - capacity / 9 {
            self.resize((capacity + capacity / 3).clamp(FIRST.min(most), most), hash);
        }
        self.len < self.capacity()
    }

    /// Gives back memory beyond that of this many entries, no fewer than there are.
    pub(super) fn shrink_to(&mut self, entries: usize, hash: impl Fn(&E) -> u64) {
        self.resize(entries.max(self.len), hash);
    }

    /// Stays as it is if the system has no memory for the other size.
    fn resize(&mut self, entries: usize, hash: impl Fn(&E) -> u64) {
        let mut slots = Vec::new();
        let count = entries + entries / 3 + 1;
        if slots.try_reserve_exact(count).is_err() {
            return;
        }
        slots.resize_with(count, || None);
        let before = std::mem::replace(self, Slots { slots, len: 0 });
        before.slots.into_iter().flatten().for_each(|entry| self.insert(hash(&entry), entry));
    }

    /// Bytes that they take.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Option<E>>()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    /// An action on a table.
    #[derive(Clone, Debug)]
    enum Deed {
        Add(u32),
        Remove(u32),
        /// Keeps those that this divides.
        Retain(u32),
        Shrink,
    }

    fn deeds() -> impl Strategy<Value = Vec<Deed>> {
        let deed = prop_oneof![
            60 => (0..200u32).prop_map(Deed::Add),
            40 => (0..200u32).prop_map(Deed::Remove),
            1 => (1..5u32).prop_map(Deed::Retain),
            1 => Just(Deed::Shrink),
        ];
        prop::collection::vec(deed, 1..600)
    }

    /// Few homes, so that entries lie in each other's way, some at the end of the slots.
    fn hash_of(key: u32, homes: u32) -> u64 {
        u64::from((key % homes).wrapping_mul(u32::MAX / homes.max(2) + 1).wrapping_sub(1))
    }

    proptest! {
        #[test]
        fn slots_have_what_a_map_has(deeds in deeds(), homes in 1..100u32) {
            let mut slots: Slots<(u32, usize)> = Slots::default();
            let mut map: HashMap<u32, usize> = HashMap::new();
            let hash = |entry: &(u32, usize)| hash_of(entry.0, homes);
            for (n, deed) in deeds.into_iter().enumerate() {
                let found = |slots: &Slots<_>, key: u32| slots.find(hash_of(key, homes), |(of, _)| *of == key);
                match deed {
                    Deed::Add(key) if map.contains_key(&key) => {
                        let place = found(&slots, key).unwrap();
                        slots.at(place).unwrap().1 = n;
                        map.insert(key, n);
                    }
                    Deed::Add(key) => {
                        prop_assert!(slots.grow(1000, hash) && slots.len() < slots.capacity());
                        slots.insert(hash_of(key, homes), (key, n));
                        map.insert(key, n);
                    }
                    Deed::Remove(key) => {
                        let place = found(&slots, key);
                        prop_assert_eq!(place.is_some(), map.remove(&key).is_some());
                        place.into_iter().for_each(|place| slots.remove(place, hash));
                    }
                    Deed::Retain(of) => {
                        slots.retain(hash, |(key, _)| *key % of == 0);
                        map.retain(|key, _| *key % of == 0);
                    }
                    Deed::Shrink => slots.shrink_to(0, hash),
                }
                prop_assert_eq!(slots.len(), map.len());
                for key in 0..200 {
                    let known = found(&slots, key).and_then(|place| slots.at(place).copied());
                    prop_assert_eq!(known.map(|(_, value)| value), map.get(&key).copied());
                }
            }
        }
    }

    #[test]
    fn sweep_asks_for_each_entry_once_and_for_few_hashes() {
        let mut slots: Slots<u64> = Slots::default();
        // Entries in runs, as random hashes have them.
        let hash = |key: &u64| {
            let mixed = (key ^ key >> 7).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
            (mixed ^ mixed >> 33).wrapping_mul(0xC4CE_B9FE_1A85_EC53) >> 32
        };
        for key in 0..14_336 {
            assert!(slots.grow(14_336, hash));
            slots.insert(hash(&key), key);
        }
        let (asked, hashed) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
        let counted = |key: &u64| {
            hashed.set(hashed.get() + 1);
            hash(key)
        };
        slots.retain(counted, |key| {
            asked.set(asked.get() + 1);
            *key % 8 == 0
        });
        assert_eq!((slots.len(), asked.get(), hashed.get()), (1792, 14_336, 1792));
    }

    #[test]
    fn slots_grow_by_a_third_up_to_the_most() {
        let mut slots: Slots<u32> = Slots::default();
        assert_eq!((slots.find(7, |_| true), slots.capacity()), (None, 0));
        let mut sizes = Vec::new();
        for key in 0..1000 {
            assert!(slots.grow(1000, |key| u64::from(*key)));
            slots.insert(key.into(), key);
            if sizes.last() != Some(&slots.capacity()) {
                sizes.push(slots.capacity());
            }
        }
        assert_eq!((sizes[0], sizes.last()), (FIRST, Some(&1000)), "{sizes:?}");
        assert!(sizes.windows(2).all(|two| two[1] <= two[0] + two[0] / 3 + 1), "{sizes:?}");
        let mut one: Slots<u32> = Slots::default();
        assert!(one.grow(1, |_| 0) && one.capacity() == 1);
    }
}
