//! Levels of backends: those of the first one are asked while enough of them may be, and of the
//! next one the rest.

/// A level is enough for all requests while this times the part of it that may be asked is at least
/// 1: five of seven.
const OVER: f64 = 1.4;

/// The part of all requests that each level gets, of its backends that may be asked and all of its
/// backends. The parts add up to 1, unless no level has any.
pub(crate) fn parts(levels: &[(usize, usize)]) -> Vec<f64> {
    let mut left = 1.0;
    let mut parts: Vec<f64> = levels
        .iter()
        .map(|level| {
            let part = covers(*level).min(left);
            left -= part;
            part
        })
        .collect();
    let sum = 1.0 - left;
    if sum > 0.0 {
        parts.iter_mut().for_each(|part| *part /= sum);
    }
    parts
}

/// True if the levels together are enough for all requests.
pub(crate) fn are_enough(levels: &[(usize, usize)]) -> bool {
    // Sums of sevenths.
    levels.iter().map(|level| covers(*level)).sum::<f64>() > 0.999_999
}

fn covers((usable, all): (usize, usize)) -> f64 {
    (OVER * usable as f64 / all.max(1) as f64).min(1.0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn next_level_gets_what_the_first_one_cannot_take() {
        let near = |levels: &[(usize, usize)], wanted: &[f64]| {
            let parts = parts(levels);
            parts.iter().zip(wanted).all(|(part, wanted)| (part - wanted).abs() < 0.001)
        };
        assert!(near(&[(5, 7), (3, 3)], &[1.0, 0.0]));
        assert!(near(&[(1, 2), (3, 3)], &[0.7, 0.3]));
        assert!(near(&[(0, 2), (1, 3), (2, 2)], &[0.0, 0.467, 0.533]));
        // Too few in all: each level gets more than it should.
        assert!(near(&[(1, 4), (1, 4)], &[0.5, 0.5]));
        assert!(near(&[(0, 2), (0, 0)], &[0.0, 0.0]));
        assert!(are_enough(&[(0, 3), (1, 1)]) && !are_enough(&[(1, 4), (1, 4)]));
    }

    proptest! {
        #[test]
        fn parts_are_all_of_it(levels in prop::collection::vec((0usize..10, 0usize..10), 1..6)) {
            let levels: Vec<_> = levels.into_iter().map(|(usable, more)| (usable, usable + more)).collect();
            let (parts, has_any) = (parts(&levels), levels.iter().any(|(usable, _)| *usable > 0));
            let sum: f64 = parts.iter().sum();
            let wanted = if has_any { 1.0 } else { 0.0 };
            prop_assert!((sum - wanted).abs() < 1e-9, "{parts:?}");
            for (part, (usable, _)) in parts.iter().zip(&levels) {
                prop_assert!(*usable > 0 || *part == 0.0);
            }
        }
    }
}
