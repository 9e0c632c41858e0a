//! Slots with generations.

use super::chunked::Chunked;
use crate::ConnId;

/// No slot.
const NONE: u32 = u32::MAX;

/// A table of values named by slot and generation. A name whose slot was freed, or freed and used
/// again, finds nothing. The slot freed last is used next.
#[derive(Debug)]
pub struct Slots<T> {
    entries: Chunked<Entry<T>>,
    /// Slots below this number were used at least once.
    used: u32,
    free_head: u32,
    len: u32,
}

#[derive(Debug)]
struct Entry<T> {
    /// The slot's name, or the one it gets next.
    id: ConnId,
    value: Option<T>,
    /// For a free slot the next free one; for a taken one a word of its owner's.
    next_free: u32,
}

impl<T> Default for Entry<T> {
    fn default() -> Entry<T> {
        Entry { id: ConnId::from_bits(0), value: None, next_free: NONE }
    }
}

impl<T> Default for Slots<T> {
    fn default() -> Slots<T> {
        Slots::new()
    }
}

impl<T> Slots<T> {
    /// An empty table, which holds no memory.
    pub fn new() -> Slots<T> {
        Slots { entries: Chunked::new(), used: 0, free_head: NONE, len: 0 }
    }

    /// True if no slot is taken.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Slots that are taken.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Inserts the value that `make` makes for the new name. `None` if there is no memory or no
    /// slot number left.
    pub fn insert_with(&mut self, make: impl FnOnce(ConnId) -> T) -> Option<ConnId> {
        self.try_insert_with(|id| Some(make(id)))
    }

    /// Inserts as [`insert_with`](Slots::insert_with), if `make` makes a value: `None` if it does
    /// not, too.
    pub fn try_insert_with(&mut self, make: impl FnOnce(ConnId) -> Option<T>) -> Option<ConnId> {
        let index = if self.free_head != NONE { self.free_head } else { self.used };
        if index >= ConnId::SLOTS_MAX || !self.entries.grow_to(index) {
            return None;
        }
        let entry = self.entries.get_mut(index)?;
        if index == self.used {
            entry.id = ConnId::new(index, 0);
        }
        let id = entry.id;
        entry.value = Some(make(id)?);
        if index == self.used {
            self.used += 1;
        } else {
            self.free_head = entry.next_free;
        }
        self.len += 1;
        Some(id)
    }

    /// The value of that name.
    #[inline]
    pub fn get(&self, id: ConnId) -> Option<&T> {
        let entry = self.entries.get(id.slot())?;
        if entry.id != id {
            return None;
        }
        entry.value.as_ref()
    }

    /// The value of that name.
    #[inline]
    pub fn get_mut(&mut self, id: ConnId) -> Option<&mut T> {
        let entry = self.entries.get_mut(id.slot())?;
        if entry.id != id {
            return None;
        }
        entry.value.as_mut()
    }

    /// Takes the value of that name out and frees its slot.
    pub fn remove(&mut self, id: ConnId) -> Option<T> {
        self.get(id)?;
        let index = id.slot();
        let entry = self.entries.get_mut(index)?;
        let value = entry.value.take();
        entry.id = id.next_generation();
        entry.next_free = self.free_head;
        self.free_head = index;
        self.len -= 1;
        value
    }

    /// The word kept for that name next to its value: an arbitrary one until it is
    /// [set](Slots::set_word).
    #[inline]
    pub fn word(&self, id: ConnId) -> Option<u32> {
        let entry = self.entries.get(id.slot())?;
        (entry.id == id && entry.value.is_some()).then_some(entry.next_free)
    }

    /// Keeps a word next to the value of that name, where a free slot has its link: it costs no
    /// memory.
    pub fn set_word(&mut self, id: ConnId, word: u32) {
        if let Some(entry) =
            self.entries.get_mut(id.slot()).filter(|entry| entry.id == id && entry.value.is_some())
        {
            entry.next_free = word;
        }
    }

    /// The name in a slot, if that is taken.
    pub fn id_at(&self, slot: u32) -> Option<ConnId> {
        let entry = self.entries.get(slot)?;
        entry.value.as_ref().map(|_| entry.id)
    }

    /// Slots that may be taken are below this number.
    pub fn used(&self) -> u32 {
        self.used
    }

    /// Panics if a slot is lost or in two places.
    pub fn invariants(&self) {
        let mut free = 0;
        let mut slot = self.free_head;
        while slot != NONE {
            let entry = self.entries.get(slot).expect("a free slot is in the table");
            assert!(entry.value.is_none(), "slot {slot} is free and taken");
            free += 1;
            assert!(free <= self.used, "the free list has a loop");
            slot = entry.next_free;
        }
        assert_eq!(free + self.len, self.used, "a slot is lost");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    #[test]
    fn an_old_name_finds_nothing_after_its_slot_was_used_again() {
        let mut slots = Slots::new();
        let old = slots.insert_with(|_| 1).unwrap();
        assert_eq!(slots.remove(old), Some(1));
        let new = slots.insert_with(|_| 2).unwrap();
        assert_eq!(old.slot(), new.slot());
        assert_eq!(slots.remove(old), None);
        assert_eq!((slots.get(old), slots.get(new)), (None, Some(&2)));
    }

    proptest! {
        #[test]
        fn slots_hold_what_a_list_would(steps in prop::collection::vec(any::<u16>(), 0..2000)) {
            let mut slots = Slots::new();
            let mut model: Vec<(ConnId, u16)> = Vec::new();
            for step in steps {
                if step % 3 > 0 || model.is_empty() {
                    let id = slots.insert_with(|_| step).unwrap();
                    slots.set_word(id, u32::from(step) + 7);
                    model.push((id, step));
                } else {
                    let (id, value) = model.swap_remove(usize::from(step) % model.len());
                    prop_assert_eq!(slots.remove(id), Some(value));
                    prop_assert_eq!((slots.get(id), slots.word(id)), (None, None));
                    slots.set_word(id, 0);
                }
                slots.invariants();
            }
            prop_assert_eq!(slots.len(), model.len());
            for (id, value) in model {
                prop_assert_eq!(slots.get_mut(id), Some(&mut { value }));
                prop_assert_eq!(slots.id_at(id.slot()), Some(id));
                prop_assert_eq!(slots.word(id), Some(u32::from(value) + 7));
            }
        }
    }
}
