//! Times to wait before another try.

use super::{SECOND, part_of};

/// Before the second try; each further one doubles it.
const FIRST: u64 = 25_000_000;

/// However often was tried.
const LONGEST: u64 = SECOND;

/// Nanoseconds until try `number` begins, where the first retry is number 1: any time up to 25 ms,
/// 50 ms and so on. That tries spread over the whole time is what keeps those of many clients
/// apart.
pub(crate) fn before_try(number: u32, random: u64) -> u64 {
    let longest = (FIRST << number.saturating_sub(1).min(16)).min(LONGEST);
    part_of(longest, random)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_double_and_have_an_end() {
        assert_eq!(before_try(1, 0), 0);
        for (number, longest) in [(1, 25), (2, 50), (3, 100), (6, 800), (7, 1000), (u32::MAX, 1000)] {
            let time = before_try(number, u64::MAX);
            assert_eq!(time.div_ceil(1_000_000), longest, "{number}");
        }
    }
}
