//! Slots with generations.

use crate::ConnId;
use crate::chunked::Chunked;

/// No slot.
const NONE: u32 = u32::MAX;

/// A table of values named by slot and generation. A name whose slot was freed, or freed and used again, finds
/// nothing. The slot freed last is used next.
#[derive(Debug)]
pub struct Slots<T> {
    entries: Chunked<Entry<T>>,
    /// The number of the first slot.
    first: u32,
    /// Slots at indexes below this were used at least once.
    used: u32,
    free_head: u32,
    len: u32,
}

#[derive(Debug)]
struct Entry<T> {
    /// The slot's name, or the one it gets next.
    id: ConnId,
    value: Option<T>,
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
        Slots::numbered_from(0)
    }

    /// An empty table whose slots have the numbers from `first` on.
    pub fn numbered_from(first: u32) -> Slots<T> {
        Slots { entries: Chunked::new(), first, used: 0, free_head: NONE, len: 0 }
    }

    /// Where a name's slot is in this table, from 0. A number below the first one is beyond all others.
    #[inline]
    pub fn index(&self, id: ConnId) -> u32 {
        id.slot().wrapping_sub(self.first)
    }

    /// True if no slot is taken.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Slots that are taken.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Puts in what `make` makes of the new name, or `None` if there is no memory or no slot number left.
    pub fn insert_with(&mut self, make: impl FnOnce(ConnId) -> T) -> Option<ConnId> {
        let index = if self.free_head != NONE { self.free_head } else { self.used };
        if index >= ConnId::SLOTS_MAX - self.first || !self.entries.grow_to(index) {
            return None;
        }
        let entry = self.entries.get_mut(index)?;
        if index == self.used {
            entry.id = ConnId::new(self.first + index, 0);
        }
        let id = entry.id;
        entry.value = Some(make(id));
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
        let entry = self.entries.get(self.index(id))?;
        if entry.id != id {
            return None;
        }
        entry.value.as_ref()
    }

    /// The value of that name.
    #[inline]
    pub fn get_mut(&mut self, id: ConnId) -> Option<&mut T> {
        let entry = self.entries.get_mut(self.index(id))?;
        if entry.id != id {
            return None;
        }
        entry.value.as_mut()
    }

    /// Takes the value of that name out and frees its slot.
    pub fn remove(&mut self, id: ConnId) -> Option<T> {
        self.get(id)?;
        let index = self.index(id);
        let entry = self.entries.get_mut(index)?;
        let value = entry.value.take();
        entry.id = id.next_generation();
        entry.next_free = self.free_head;
        self.free_head = index;
        self.len -= 1;
        value
    }

    /// The name in the slot at an index, if it is taken.
    pub fn id_at(&self, index: u32) -> Option<ConnId> {
        let entry = self.entries.get(index)?;
        entry.value.as_ref().map(|_| entry.id)
    }

    /// Slots that may be taken are at indexes below this.
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

    #[test]
    fn a_name_of_another_table_finds_nothing() {
        let (mut here, mut there) = (Slots::numbered_from(0), Slots::numbered_from(1000));
        let (low, high) = (here.insert_with(|_| 1).unwrap(), there.insert_with(|_| 2).unwrap());
        assert_eq!((low.slot(), high.slot()), (0, 1000));
        assert_eq!((here.get(high), there.get(low)), (None, None));
        assert_eq!((here.remove(high), there.remove(low)), (None, None));
    }

    proptest! {
        #[test]
        fn slots_hold_what_a_list_would(first in 0..2u32, steps in prop::collection::vec(any::<u16>(), 0..2000)) {
            let first = first * 70_000;
            let mut slots = Slots::numbered_from(first);
            let mut model: Vec<(ConnId, u16)> = Vec::new();
            for step in steps {
                if step % 3 > 0 || model.is_empty() {
                    let id = slots.insert_with(|_| step).unwrap();
                    model.push((id, step));
                } else {
                    let (id, value) = model.swap_remove(usize::from(step) % model.len());
                    prop_assert_eq!(slots.remove(id), Some(value));
                    prop_assert_eq!(slots.get(id), None);
                }
                slots.invariants();
            }
            prop_assert_eq!(slots.len(), model.len());
            for (id, value) in model {
                prop_assert_eq!(slots.get_mut(id), Some(&mut { value }));
                prop_assert_eq!(slots.id_at(id.slot() - first), Some(id));
                prop_assert_eq!(slots.index(id), id.slot() - first);
            }
        }
    }
}
