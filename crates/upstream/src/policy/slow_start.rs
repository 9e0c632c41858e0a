//! The weight of a backend that came back: a part at first, so that it is warm before it has its
//! full share.

use super::SECOND;

/// Until a backend has its whole weight.
const LASTS: u64 = 30 * SECOND;

/// Steps of the weight on the way. Each of them makes a new table.
const STEPS: u64 = 10;

/// The part of its weight that a backend has `since` nanoseconds after it came back, and when that
/// changes; `None` once it is whole.
pub(crate) fn part(since: u64) -> Option<(f64, u64)> {
    let step = since / (LASTS / STEPS);
    (step < STEPS).then(|| ((step + 1) as f64 / STEPS as f64, (step + 1) * (LASTS / STEPS) - since))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weight_rises_in_steps_to_all_of_it() {
        assert_eq!(part(0), Some((0.1, 3 * SECOND)));
        assert_eq!(part(4 * SECOND), Some((0.2, 2 * SECOND)));
        assert_eq!(part(29 * SECOND), Some((1.0, SECOND)));
        assert_eq!(part(30 * SECOND), None);
    }
}
