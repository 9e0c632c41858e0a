//! Ranges of addresses, in which an address is found by a few looks.
//!
//! Ranges that do not touch each other are one sorted list of bounds: where each begins, and where
//! what follows it does. An address is in a range if the last bound up to it is the begin of one,
//! which is each second bound. That bound is looked for as in a B-tree, whose levels are arrays:
//!
//! ```text
//!   level 0            every 256th bound
//!   level 1     every 16th             ..            blocks of 16: as many as a cache line has of IPv4
//!   level 2  all  ..       ..       ..       ..
//! ```
//!
//! A hundred thousand networks have five levels, of which all but the last one fit into a CPU's
//! cache. Addresses that peers choose, and networks that all lie together, change nothing about
//! that.

use ipnet::IpNet;

/// Addresses from the first to the last one, in the lowest bits.
pub(super) type Range = (u128, u128);

/// The addresses of a network.
pub(super) fn range(network: &IpNet) -> Range {
    match network {
        IpNet::V4(network) => (u32::from(network.network()).into(), u32::from(network.broadcast()).into()),
        IpNet::V6(network) => (network.network().into(), network.broadcast().into()),
    }
}

/// Ranges in their order that do not touch each other.
pub(super) fn merged(mut ranges: Vec<Range>) -> Vec<Range> {
    ranges.sort_unstable();
    let mut merged: Vec<Range> = Vec::new();
    for (first, last) in ranges {
        match merged.last_mut() {
            Some((_, end)) if first <= end.saturating_add(1) => *end = last.max(*end),
            _ => merged.push((first, last)),
        }
    }
    merged
}

/// Bounds of a block.
const BLOCK: usize = 16;

/// On a cache line, or on several.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Block<T>([T; BLOCK]);

/// Every bound, or every sixteenth of the next level.
struct Level<T> {
    blocks: Box<[Block<T>]>,
    /// Bounds in it. The last block is filled up with the greatest address, which is after all of
    /// them or equal to the last.
    len: usize,
}

/// Ranges of addresses of one family.
pub(super) struct Ranges<T> {
    /// Those with fewer bounds first; none without a range.
    levels: Vec<Level<T>>,
}

impl<T> Default for Ranges<T> {
    fn default() -> Ranges<T> {
        Ranges { levels: Vec::new() }
    }
}

impl<T: Copy + Ord + From<u8> + TryFrom<u128> + std::ops::Not<Output = T>> Ranges<T> {
    /// Of ranges in any order.
    pub(super) fn new(ranges: impl Iterator<Item = Range>) -> Ranges<T> {
        let ends = |(first, last): Range| [Some(first), last.checked_add(1)];
        // Nothing follows the last address.
        let bound = |bound: Option<u128>| bound.and_then(|bound| T::try_from(bound).ok());
        let mut bounds: Vec<T> =
            merged(ranges.collect()).into_iter().flat_map(ends).filter_map(bound).collect();
        let mut levels = Vec::new();
        while !bounds.is_empty() {
            let block = |bounds: &[T]| {
                let mut block = Block([!T::from(0); BLOCK]);
                block.0[..bounds.len()].copy_from_slice(bounds);
                block
            };
            let blocks: Box<[_]> = bounds.chunks(BLOCK).map(block).collect();
            let len = bounds.len();
            bounds =
                if blocks.len() > 1 { blocks.iter().map(|block| block.0[0]).collect() } else { Vec::new() };
            levels.push(Level { blocks, len });
        }
        levels.reverse();
        Ranges { levels }
    }

    /// True for an address of one of them.
    #[inline]
    pub(super) fn contains(&self, address: T) -> bool {
        let mut bound = None;
        for Level { blocks, len } in &self.levels {
            let block = bound.unwrap_or(0);
            let up_to = blocks[block].0.iter().filter(|bound| **bound <= address).count();
            // Before the first of all.
            let Some(last) = (block * BLOCK + up_to).min(*len).checked_sub(1) else { return false };
            bound = Some(last);
        }
        bound.is_some_and(|bound| bound % 2 == 0)
    }

    /// Bytes that they take.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.levels.iter().map(|level| size_of_val(&*level.blocks)).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Ranges of all sizes, also beside each other, inside each other and at the end.
    fn of_u16() -> impl Strategy<Value = Vec<Range>> {
        let near = prop_oneof![any::<u16>(), (0..64u16).prop_map(|n| u16::MAX - n), 0..64u16];
        let range = (near, prop_oneof![Just(0), 0..3u16, 0..300u16]);
        let range = range.prop_map(|(first, more)| (first.into(), first.saturating_add(more).into()));
        prop_oneof![
            9 => prop::collection::vec(range.clone(), 0..40),
            1 => prop::collection::vec(range, 1000..3000),
        ]
    }

    proptest! {
        // Each looks for 65 536 addresses.
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn ranges_have_what_a_search_finds(ranges in of_u16()) {
            let found: Ranges<u16> = Ranges::new(ranges.iter().copied());
            let mut is_in = vec![false; 1 << 16];
            ranges.iter().for_each(|&(first, last)| is_in[first as usize..=last as usize].fill(true));
            for (address, is_in) in is_in.into_iter().enumerate() {
                prop_assert_eq!(found.contains(address as u16), is_in, "{}", address);
            }
        }
    }

    #[test]
    fn range_of_everything_and_ranges_at_the_ends_are_found() {
        let all: Ranges<u32> = Ranges::new([(0, u32::MAX.into())].into_iter());
        assert!(all.contains(0) && all.contains(7) && all.contains(u32::MAX));
        let all: Ranges<u128> = Ranges::new([(0, u128::MAX)].into_iter());
        assert!(all.contains(0) && all.contains(u128::MAX));
        let ends: Ranges<u128> = Ranges::new([(u128::MAX, u128::MAX), (0, 0)].into_iter());
        assert!(
            ends.contains(0)
                && ends.contains(u128::MAX)
                && !ends.contains(1)
                && !ends.contains(u128::MAX - 1)
        );
        let none: Ranges<u32> = Ranges::new(std::iter::empty());
        assert!(!none.contains(0) && !none.contains(u32::MAX));
    }

    #[test]
    fn level_that_is_full_has_no_address_behind_it() {
        // The last bound of a full block, and of several, is the end of a range, or there is none.
        for count in [7, 8, 9, 127, 128, 129, 2047, 2048, 2049] {
            let ranges: Ranges<u32> = Ranges::new((0..count).map(|n| (4 * n, 4 * n + 1)));
            let last = 4 * count as u32 - 3;
            assert!(
                ranges.contains(last) && !ranges.contains(last + 1) && !ranges.contains(u32::MAX),
                "{count}"
            );
            let end = u128::from(u32::MAX);
            let ranges: Ranges<u32> = Ranges::new((0..count).map(|n| (end - 4 * n, end - 4 * n)));
            assert!(
                ranges.contains(u32::MAX) && !ranges.contains(u32::MAX - 1) && !ranges.contains(0),
                "{count}"
            );
        }
    }

    #[test]
    fn memory_of_a_range_is_what_the_docs_say() {
        let v4: Ranges<u32> = Ranges::new((0..100_000).map(|n| (n << 12, n << 12)));
        let v6: Ranges<u128> = Ranges::new((0..100_000).map(|n| (n << 64, n << 64)));
        let each = |bytes: usize, network: usize| bytes.div_ceil(100_000) + network;
        assert_eq!(each(v4.bytes(), size_of::<ipnet::Ipv4Net>()), 14);
        assert_eq!(each(v6.bytes(), size_of::<ipnet::Ipv6Net>()), 52);
    }
}
