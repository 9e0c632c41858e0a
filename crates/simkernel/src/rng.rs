//! Random numbers, from a seed.

/// A small generator (xorshift with a multiplier); good enough to draw faults, and the same
/// everywhere.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Creates a generator whose numbers depend on the seed alone.
    pub fn new(seed: u64) -> Rng {
        // One round of splitmix64, so that neighbouring seeds have nothing in common.
        let mut z = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        Rng((z ^ z >> 31) | 1)
    }

    #[inline]
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// A number below `bound`, which is not 0. Beyond 2^32 not every number occurs.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next() >> 32) * u128::from(bound)) >> 32) as u64
    }

    /// A number from `low` to `high`, both included.
    #[inline]
    pub fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// Like [`range`](Rng::range), but each power of two is as likely as any other.
    pub fn spread(&mut self, low: u64, high: u64) -> u64 {
        let (from, to) = (u64::from(low.max(1).ilog2()), u64::from(high.max(1).ilog2()));
        let power = self.range(from, to);
        let top = (1u64 << (power + 1)).min(high + 1);
        let bottom = (1u64 << power).max(low.max(1)).min(top - 1);
        let drawn = bottom + self.below(top - bottom);
        if low == 0 && power == 0 && self.one_in(2) { 0 } else { drawn }
    }

    /// True once in `count` times.
    #[inline]
    pub fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    /// True with a chance of `rate` in 65536. Draws nothing when the rate is 0.
    #[inline]
    pub fn chance(&mut self, rate: u16) -> bool {
        rate > 0 && self.next() >> 48 < u64::from(rate)
    }

    /// One of these.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}
