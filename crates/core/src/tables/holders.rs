//! Connections that hold much memory, in a list for each power of two of it.
//!
//! ```text
//!   lists    4 KiB and more    8 KiB and more    16 KiB and more   ..
//!                 │                  │                  │
//!                 ▼                  ▼                  ▼
//!               7 ⇄ 12            (empty)               3          rings of slot numbers, the oldest first
//! ```
//!
//! A connection is listed when it grows, and stays where it is when it shrinks: a reply that is
//! sent moves nothing. So a list may have connections that hold less by now, and none that holds
//! more. The search for the heaviest one moves such connections down, each once for each time it
//! grew.

use super::chunked::Chunked;

/// Connections that hold less than 2 to the power of this are not listed: small replies and idle
/// connections cost no entry, and a million of them below it hold 4 GiB at most.
const LISTED_LOG2: u32 = 12;

/// The fewest bytes for which a connection is listed.
pub(crate) const LISTED_BYTES: usize = 1 << LISTED_LOG2;

const LISTS: usize = usize::BITS as usize;

const NONE: u32 = u32::MAX;

/// The list in which a connection is; 0 is none.
pub(crate) type Class = u8;

/// The list for `bytes` bytes.
pub(crate) fn class_of(bytes: usize) -> Class {
    if bytes < LISTED_BYTES { 0 } else { bytes.ilog2() as Class }
}

#[derive(Debug)]
struct Node {
    prev: u32,
    next: u32,
    class: Class,
    /// Bytes of the connection's calls that wait.
    call_bytes: usize,
    /// Memory of the connection's batches beyond the bytes that they have to send: of the one in
    /// flight, and of the one after it. Limits on an outbox keep both below 4 GiB.
    rooms: [u32; 2],
    /// Bytes of an ended connection that the driver still has: the batch that was in flight, and
    /// the block of a large frame.
    returning: [u32; 2],
}

/// The batch of a connection to which room belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RoomOf {
    /// The one in flight.
    Flight,
    /// The one after it.
    Pending,
}

/// Memory of an ended connection that the driver gives back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReturnedItem {
    /// The batch that was in flight.
    Batch,
    /// The block into which it received.
    Block,
}

impl Default for Node {
    fn default() -> Node {
        Node { prev: NONE, next: NONE, class: 0, call_bytes: 0, rooms: [0; 2], returning: [0; 2] }
    }
}

/// The lists of connections that hold much. A connection is identified by the index of its slot.
/// Holds no memory until one is listed.
#[derive(Debug)]
pub(crate) struct Holders {
    nodes: Chunked<Node>,
    heads: [u32; LISTS],
    /// Bit n is set exactly when list n has a connection.
    occupied: u64,
}

impl Holders {
    pub(crate) fn new() -> Holders {
        Holders { nodes: Chunked::new(), heads: [NONE; LISTS], occupied: 0 }
    }

    /// Bytes of the calls of one connection that wait.
    pub(crate) fn call_bytes_of(&self, index: u32) -> usize {
        self.nodes.get(index).map_or(0, |node| node.call_bytes)
    }

    /// Notes that a call begins to wait. False if the system has no memory to count it; then it is
    /// not counted.
    pub(crate) fn add_call(&mut self, index: u32, bytes: usize) -> bool {
        if !self.nodes.grow_to(index) {
            return false;
        }
        let Some(node) = self.nodes.get_mut(index) else { return false };
        node.call_bytes += bytes;
        true
    }

    /// Notes that a call that waited is done.
    pub(crate) fn remove_call(&mut self, index: u32, bytes: usize) {
        let Some(node) = self.nodes.get_mut(index) else { return };
        debug_assert!(bytes <= node.call_bytes, "more is given back than was taken");
        node.call_bytes -= bytes;
    }

    /// Memory of a connection's batches beyond the bytes that they have to send.
    pub(crate) fn room_of(&self, index: u32) -> usize {
        self.nodes.get(index).map_or(0, |node| node.rooms.iter().map(|room| *room as usize).sum())
    }

    /// Memory of the batch in flight beyond the bytes that it has to send.
    pub(crate) fn room_in_flight(&self, index: u32) -> usize {
        self.nodes.get(index).map_or(0, |node| node.rooms[RoomOf::Flight as usize] as usize)
    }

    /// Notes such memory of one batch. Returns what was noted before, and what is noted now: 0 if
    /// the system has no memory for the note.
    pub(crate) fn set_room(&mut self, index: u32, of: RoomOf, bytes: usize) -> (usize, usize) {
        if bytes > 0 && !self.nodes.grow_to(index) {
            return (0, 0);
        }
        let Some(node) = self.nodes.get_mut(index) else { return (0, 0) };
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        (core::mem::replace(&mut node.rooms[of as usize], bytes) as usize, bytes as usize)
    }

    /// Notes what the driver will give back of a connection that ends. Returns how much is noted: 0
    /// if the system has no memory for that.
    pub(crate) fn returns(&mut self, index: u32, what: ReturnedItem, bytes: usize) -> usize {
        if bytes == 0 || !self.nodes.grow_to(index) {
            return 0;
        }
        let Some(node) = self.nodes.get_mut(index) else { return 0 };
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        debug_assert_eq!(node.returning[what as usize], 0, "two of a kind are on their way back");
        node.returning[what as usize] = bytes;
        bytes as usize
    }

    /// Notes that the driver gave it back. Returns how much was noted.
    pub(crate) fn returned(&mut self, index: u32, what: ReturnedItem) -> usize {
        self.nodes
            .get_mut(index)
            .map_or(0, |node| core::mem::take(&mut node.returning[what as usize]) as usize)
    }

    /// Bytes of one connection that are on their way back.
    pub(crate) fn returning(&self, index: u32) -> usize {
        self.nodes.get(index).map_or(0, |node| node.returning.iter().map(|bytes| *bytes as usize).sum())
    }

    /// The list that a connection is in.
    pub(crate) fn class(&self, index: u32) -> Class {
        self.nodes.get(index).map_or(0, |node| node.class)
    }

    /// Puts a connection into the list for `bytes`, as the youngest there unless it is there
    /// already. False if the system has no memory for that.
    pub(crate) fn list(&mut self, index: u32, bytes: usize) -> bool {
        let class = class_of(bytes);
        if class == self.class(index) {
            return true;
        }
        if class > 0 && !self.nodes.grow_to(index) {
            return false;
        }
        self.unlist(index);
        if class > 0 {
            self.link(index, class);
        }
        true
    }

    /// Forgets a connection that ended: it is in no list, and its calls and batches hold nothing.
    /// Returns how much they held.
    pub(crate) fn forget(&mut self, index: u32) -> usize {
        self.unlist(index);
        let room = self.room_of(index);
        let Some(node) = self.nodes.get_mut(index) else { return 0 };
        node.rooms = [0; 2];
        room + core::mem::take(&mut node.call_bytes)
    }

    /// The oldest one of the heaviest list that has any. It may hold less by now.
    pub(crate) fn heaviest(&self) -> Option<u32> {
        let class = self.occupied.checked_ilog2()?;
        Some(self.heads[class as usize])
    }

    /// The connection after a listed one in its list, if that is not the last there.
    pub(crate) fn behind(&self, index: u32) -> Option<u32> {
        let node = self.nodes.get(index)?;
        (node.next != self.heads[usize::from(node.class)]).then_some(node.next)
    }

    /// The oldest one of the heaviest list below `class` that has any.
    pub(crate) fn heaviest_below(&self, class: Class) -> Option<u32> {
        let class = (self.occupied & ((1 << class) - 1)).checked_ilog2()?;
        Some(self.heads[class as usize])
    }

    fn link(&mut self, index: u32, class: Class) {
        let head = self.heads[usize::from(class)];
        let (prev, next) = match self.nodes.get_mut(head) {
            Some(first) => (core::mem::replace(&mut first.prev, index), head),
            None => (index, index),
        };
        if head == NONE {
            self.heads[usize::from(class)] = index;
            self.occupied |= 1 << class;
        }
        if let Some(last) = self.nodes.get_mut(prev) {
            last.next = index;
        }
        if let Some(node) = self.nodes.get_mut(index) {
            (node.prev, node.next, node.class) = (prev, next, class);
        }
    }

    fn unlist(&mut self, index: u32) {
        let Some(node) = self.nodes.get_mut(index).filter(|node| node.class > 0) else { return };
        let (prev, next) = (node.prev, node.next);
        let class = usize::from(core::mem::take(&mut node.class));
        if next == index {
            self.heads[class] = NONE;
            self.occupied &= !(1 << class);
            return;
        }
        if self.heads[class] == index {
            self.heads[class] = next;
        }
        if let Some(node) = self.nodes.get_mut(prev) {
            node.next = next;
        }
        if let Some(node) = self.nodes.get_mut(next) {
            node.prev = prev;
        }
    }

    /// Panics if a list is broken. Returns how many connections are listed.
    pub(crate) fn invariants(&self) -> usize {
        let mut listed = 0;
        for (class, head) in self.heads.iter().enumerate() {
            assert_eq!(*head != NONE, self.occupied >> class & 1 == 1, "list {class}");
            let mut at = *head;
            while at != NONE {
                let node = self.nodes.get(at).expect("who is listed has a node");
                assert_eq!(usize::from(node.class), class, "slot {at} is in another's list");
                let next = self.nodes.get(node.next).expect("a ring has no end");
                assert_eq!(next.prev, at, "a ring is the same both ways");
                listed += 1;
                assert!(listed <= self.nodes.len(), "a list runs in a circle without its head");
                at = if node.next == *head { NONE } else { node.next };
            }
        }
        listed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn lists_say_what_a_table_would(steps in prop::collection::vec((0..300u32, 0..20u32, any::<bool>()), 0..400)) {
            let mut holders = Holders::new();
            // Slot, class, and the time when it came into that list.
            let mut model: Vec<(u32, Class, usize)> = Vec::new();
            for (n, (index, log2, ends)) in steps.into_iter().enumerate() {
                let class = if ends { 0 } else { class_of(1 << log2) };
                if ends {
                    holders.forget(index);
                } else {
                    prop_assert!(holders.list(index, 1 << log2));
                }
                if model.iter().all(|entry| (entry.0, entry.1) != (index, class)) {
                    model.retain(|entry| entry.0 != index);
                    if class > 0 {
                        model.push((index, class, n));
                    }
                }
                prop_assert_eq!(holders.invariants(), model.len());
                let most = model.iter().map(|entry| entry.1).max();
                let oldest = model.iter().filter(|entry| Some(entry.1) == most).min_by_key(|entry| entry.2);
                prop_assert_eq!(holders.heaviest(), oldest.map(|entry| entry.0));
            }
        }
    }

    #[test]
    fn calls_are_counted_for_each_connection() {
        let mut holders = Holders::new();
        assert!(holders.add_call(3, 400) && holders.add_call(3, 500) && holders.add_call(700, 1));
        holders.remove_call(3, 400);
        assert_eq!((holders.call_bytes_of(3), holders.call_bytes_of(700)), (500, 1));
        assert_eq!((holders.forget(3), holders.forget(5000)), (500, 0));
        assert_eq!(holders.call_bytes_of(3), 0);
    }
}
