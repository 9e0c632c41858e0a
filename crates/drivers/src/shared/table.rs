//! The driver's state of each connection, by slot, and a list through some of them.

use ringserve_core::ConnId;
use ringserve_core::internals::Chunked;

/// No connection: no id has bits above the 60th.
const VACANT: u64 = u64::MAX;

/// No slot: slots have 24 bits.
pub(crate) const NONE: u32 = u32::MAX;

/// The owner of a slot, and its neighbours in the list.
#[derive(Debug)]
pub(crate) struct Place {
    id: u64,
    /// `NONE` at the ends of the list and outside of it.
    before: u32,
    after: u32,
}

impl Default for Place {
    fn default() -> Place {
        Place { id: VACANT, before: NONE, after: NONE }
    }
}

impl Place {
    /// The connection, where the slot is not vacant.
    pub(crate) fn id(&self) -> ConnId {
        ConnId::from_bits(self.id)
    }

    /// The slot after this one in the list.
    pub(crate) fn after(&self) -> u32 {
        self.after
    }

    /// The slot before this one in the list.
    pub(crate) fn before(&self) -> u32 {
        self.before
    }
}

/// The driver's state of a connection. The default is vacant, idle and in no list.
pub(crate) trait Entry: Default {
    fn place(&self) -> &Place;
    fn place_mut(&mut self) -> &mut Place;
}

/// All connections, by slot, and a list through some of them. The driver decides which ones are in
/// it.
pub(crate) struct Table<T> {
    entries: Chunked<T>,
    first: u32,
    last: u32,
}

impl<T: Entry> Table<T> {
    pub(crate) fn new() -> Table<T> {
        Table { entries: Chunked::new(), first: NONE, last: NONE }
    }

    /// The connection, if the slot is this id's.
    #[inline]
    pub(crate) fn find(&mut self, id: ConnId) -> Option<&mut T> {
        self.entries.get_mut(id.slot()).filter(|entry| entry.place().id == id.bits())
    }

    /// The connection in a slot, if there is one.
    #[inline]
    pub(crate) fn at(&mut self, slot: u32) -> Option<&mut T> {
        self.entries.get_mut(slot).filter(|entry| entry.place().id != VACANT)
    }

    /// Assigns the slot to this id; `None` if another connection still has it.
    pub(crate) fn open(&mut self, id: ConnId) -> Option<&mut T> {
        let entry = self.entries.entry(id.slot()).expect("memory for 256 connections");
        let place = entry.place_mut();
        if place.id != VACANT {
            return None;
        }
        place.id = id.bits();
        Some(entry)
    }

    /// Frees a slot, which is not in the list.
    pub(crate) fn close(&mut self, slot: u32) {
        if let Some(entry) = self.at(slot) {
            *entry = T::default();
        }
    }

    /// Every slot that was ever used, including vacant ones.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.entries.iter()
    }

    /// The slot at the head of the list, or `NONE`.
    #[inline]
    pub(crate) fn first(&self) -> u32 {
        self.first
    }

    /// The slot at the tail of the list, or `NONE`.
    #[inline]
    pub(crate) fn last(&self) -> u32 {
        self.last
    }

    /// Inserts a slot that was opened and is not in the list after `before`, which is; `NONE` for
    /// its head.
    #[inline]
    pub(crate) fn insert(&mut self, before: u32, slot: u32) {
        let after = match self.entries.get_mut(before) {
            Some(entry) => std::mem::replace(&mut entry.place_mut().after, slot),
            None => std::mem::replace(&mut self.first, slot),
        };
        match self.entries.get_mut(after) {
            Some(entry) => entry.place_mut().before = slot,
            None => self.last = slot,
        }
        if let Some(entry) = self.entries.get_mut(slot) {
            let place = entry.place_mut();
            (place.before, place.after) = (before, after);
        }
    }

    /// Takes a slot that is in the list out of it.
    #[inline]
    pub(crate) fn remove(&mut self, slot: u32) {
        let Some(entry) = self.entries.get_mut(slot) else { return };
        let place = entry.place_mut();
        let (before, after) = (place.before, place.after);
        (place.before, place.after) = (NONE, NONE);
        match self.entries.get_mut(before) {
            Some(entry) => entry.place_mut().after = after,
            None => self.first = after,
        }
        match self.entries.get_mut(after) {
            Some(entry) => entry.place_mut().before = before,
            None => self.last = before,
        }
    }

    /// Walks the list from its head, and panics if it is inconsistent.
    pub(crate) fn listed(&self) -> impl Iterator<Item = (u32, &T)> {
        let (mut slot, mut before, mut count) = (self.first, NONE, 0);
        std::iter::from_fn(move || {
            let Some(entry) = self.entries.get(slot) else {
                assert_eq!(before, self.last, "the tail of the list");
                return None;
            };
            let (here, place) = (slot, entry.place());
            assert_ne!(place.id, VACANT, "slot {here} is listed and vacant");
            assert_eq!(place.before, before, "slot {here} has the wrong neighbour");
            count += 1;
            assert!(count <= self.entries.len(), "the list has a loop");
            (before, slot) = (here, place.after);
            Some((here, entry))
        })
    }
}
