//! Names of connections: slot and generation.

use core::fmt;

/// The name of a connection of one shard: its slot and the number of the slot's earlier uses.
///
/// It is 60 bits wide, so that a driver has 4 bits left of a 64-bit `user_data` for the kind of
/// operation. A slot that is reused 100 000 times a second repeats a generation after a week; a
/// stale completion cannot live that long, since a slot is freed only after its last operation
/// completed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnId(u64);

impl ConnId {
    /// Bits of a slot number: 16 million connections on one shard.
    pub const SLOT_BITS: u32 = 24;
    /// Bits of a generation.
    pub const GENERATION_BITS: u32 = 36;
    /// The most slots a shard can have.
    pub const SLOTS_MAX: u32 = 1 << Self::SLOT_BITS;

    /// Puts an id together. Bits that do not fit are cut off the generation; a slot must fit.
    ///
    /// # Panics
    /// If `slot` is not below [`SLOTS_MAX`](Self::SLOTS_MAX).
    #[inline]
    pub fn new(slot: u32, generation: u64) -> ConnId {
        assert!(slot < Self::SLOTS_MAX, "slot out of range");
        let generation = generation & ((1 << Self::GENERATION_BITS) - 1);
        ConnId(u64::from(slot) | generation << Self::SLOT_BITS)
    }

    /// The slot, which is also the connection's place in a driver's tables.
    #[inline]
    pub fn slot(self) -> u32 {
        self.0 as u32 & (Self::SLOTS_MAX - 1)
    }

    /// The number of the slot's earlier uses.
    #[inline]
    pub fn generation(self) -> u64 {
        self.0 >> Self::SLOT_BITS
    }

    /// The name of the slot's next use.
    #[inline]
    pub(crate) fn next_generation(self) -> ConnId {
        ConnId::new(self.slot(), self.generation() + 1)
    }

    /// Slot and generation as 60 bits.
    #[inline]
    pub fn bits(self) -> u64 {
        self.0
    }

    /// The id with these bits; the upper 4 are dropped.
    #[inline]
    pub fn from_bits(bits: u64) -> ConnId {
        ConnId(bits & ((1 << (Self::SLOT_BITS + Self::GENERATION_BITS)) - 1))
    }
}

impl fmt::Debug for ConnId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.slot(), self.generation())
    }
}

impl fmt::Display for ConnId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A lane of a shard: connections of one kind, such as those of a service, or those to upstreams.
/// Lanes are numbered in the order in which they were added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneId(u8);

impl LaneId {
    /// The lane that a shard has from the start.
    pub const FIRST: LaneId = LaneId(0);

    /// The lane with a number, counted from 0.
    pub const fn nth(number: u8) -> LaneId {
        LaneId(number)
    }

    /// The number of the lane, as an index.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    #[inline]
    pub(crate) const fn number(self) -> u8 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slot_and_generation_survive_the_packing() {
        let id = ConnId::new(ConnId::SLOTS_MAX - 1, (1 << 36) + 7);
        assert_eq!((id.slot(), id.generation()), (ConnId::SLOTS_MAX - 1, 7));
        assert_eq!(ConnId::from_bits(id.bits() | 0xF << 60), id);
    }
}
