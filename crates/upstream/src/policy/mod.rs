//! Decisions as pure functions: of numbers, a time in nanoseconds, and random numbers that the
//! caller draws.
//!
//! Nothing here knows a shard, an atomic or a clock, so the claims of the guide are tested here in
//! milliseconds, by seed.

pub(crate) mod alias;
pub(crate) mod backoff;
pub(crate) mod budget;
pub(crate) mod ewma;
pub(crate) mod failures;
pub(crate) mod hedge;
pub(crate) mod keep_alive;
pub(crate) mod levels;
pub(crate) mod maglev;
pub(crate) mod p2c;
pub(crate) mod slow_start;
pub(crate) mod subset;

#[cfg(test)]
mod claims;

/// Nanoseconds of a second.
pub(crate) const SECOND: u64 = 1_000_000_000;

/// A number of `0..count`, of which each is as likely as the others but for one part in 2^32.
pub(crate) fn below(count: usize, random: u32) -> usize {
    ((u64::from(random) * count as u64) >> 32) as usize
}

/// A number of `0..all`.
pub(crate) fn part_of(all: u64, random: u64) -> u64 {
    ((u128::from(random) * u128::from(all)) >> 64) as u64
}
