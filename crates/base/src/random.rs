//! Chance for services: a generator for each shard, seeded by the system, or by the seed of a
//! simulation.

use std::cell::Cell;
use std::hash::{BuildHasher, RandomState};

/// SplitMix64: one word of state, every number as likely as any other, and each of them once in
/// 2^64.
#[derive(Clone, Debug)]
pub struct Random {
    state: Cell<u64>,
}

/// The golden ratio, as SplitMix64 steps.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

impl Random {
    /// A seed that is another one in each process and each call.
    pub fn system_seed() -> u64 {
        RandomState::new().hash_one(STEP)
    }

    /// Numbers that depend on `seed` and `shard` alone. Shards of one seed have nothing in common.
    pub fn of_shard(seed: u64, shard: usize) -> Random {
        Random { state: Cell::new(mix(seed.wrapping_add(STEP)) ^ mix(shard as u64)) }
    }

    /// The next number.
    #[inline]
    pub fn next(&self) -> u64 {
        let state = self.state.get().wrapping_add(STEP);
        self.state.set(state);
        mix(state)
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(seed: u64, shard: usize) -> Vec<u64> {
        let random = Random::of_shard(seed, shard);
        (0..4).map(|_| random.next()).collect()
    }

    #[test]
    fn seed_and_shard_decide_every_number() {
        assert_eq!(first(7, 0), first(7, 0));
        assert_ne!(first(7, 0), first(7, 1));
        assert_ne!(first(7, 0), first(8, 0));
        assert_ne!(Random::system_seed(), Random::system_seed());
    }

    #[test]
    fn bits_are_set_half_of_the_time() {
        let random = Random::of_shard(1, 0);
        let ones: u32 = (0..10_000).map(|_| random.next().count_ones()).sum();
        assert!((315_000..325_000).contains(&ones), "{ones} of 640000");
    }
}
