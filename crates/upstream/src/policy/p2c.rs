//! The power of two choices: of two random backends that with the lower load.

use super::alias::Alias;
use super::below;

/// Nanoseconds below which backends are equally quick.
const QUICK: f64 = 1000.0;

/// The load of a backend: the time that a request more would take there, if it took the average and
/// waited for those in flight. `weight` is its part of the mean weight.
pub(crate) fn load(average: f64, in_flight: u32, weight: f64) -> f64 {
    average.max(QUICK) * (f64::from(in_flight) / weight.max(0.01) + 1.0)
}

/// A choice among `count` backends by the load of two of them.
pub(crate) fn lower_of_two(count: usize, random: u64, load: impl Fn(usize) -> f64) -> usize {
    if count < 2 {
        return 0;
    }
    let first = below(count, (random >> 32) as u32);
    let mut second = below(count - 1, random as u32);
    second += usize::from(second >= first);
    if load(second) < load(first) { second } else { first }
}

/// Times that a second backend is drawn by weight until it is another one than the first. Then that
/// has most of the weight, and any other one will do.
const DRAWS: u32 = 4;

/// The load of the second one has to be below this part of the first one's to take over.
const TAKES_OVER_BELOW: f64 = 0.2;

/// A choice among `count` backends by weight. The first backend is drawn by weight; a second one
/// takes over where the load of the first is several times its own. So shares follow the weights
/// while all is well, and a backend that fails or stalls loses its share.
///
/// Loads are not divided by weights: of two idle backends with 9:1 the heavy one would get 98 % and
/// not 90 %.
pub(crate) fn by_weight(
    table: &Alias,
    count: usize,
    mut random: impl FnMut() -> u64,
    load: impl Fn(usize) -> f64,
) -> usize {
    let first = table.draw(random());
    if count < 2 {
        return first;
    }
    let drawn = (0..DRAWS).map(|_| table.draw(random())).find(|second| *second != first);
    let second = drawn.unwrap_or_else(|| (first + 1 + below(count - 1, random() as u32)) % count);
    if load(second) < TAKES_OVER_BELOW * load(first) { second } else { first }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn one_of_the_two_with_less_load_is_chosen(count in 1usize..50, random: u64, worst: usize) {
            let worst = worst % count;
            let chosen = lower_of_two(count, random, |index| if index == worst { 9.0 } else { 1.0 });
            prop_assert!(chosen < count && (count == 1 || chosen != worst));
        }
    }
}
