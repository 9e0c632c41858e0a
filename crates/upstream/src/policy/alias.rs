//! Draws by weight in constant time, by the alias method of Walker and Vose.

use super::below;

/// A table over backends with weights.
#[derive(Clone, Debug)]
pub(crate) struct Alias {
    /// For each place the part of 2^32 that is its own, and the backend that the rest is of.
    places: Vec<(u64, usize)>,
}

impl Alias {
    /// A table of at least one weight. Where all are 0 each counts as 1.
    pub(crate) fn new(weights: &[f64]) -> Alias {
        let sum: f64 = weights.iter().sum();
        let count = weights.len() as f64;
        let mut shares: Vec<f64> =
            weights.iter().map(|weight| if sum > 0.0 { weight * count / sum } else { 1.0 }).collect();
        let mut places = vec![(1 << 32, 0); weights.len()];
        let (mut small, mut large): (Vec<usize>, Vec<usize>) =
            (0..weights.len()).partition(|index| shares[*index] < 1.0);
        while let (Some(less), Some(&more)) = (small.last().copied(), large.last()) {
            small.pop();
            places[less] = ((shares[less] * (1u64 << 32) as f64) as u64, more);
            shares[more] -= 1.0 - shares[less];
            if shares[more] < 1.0 {
                large.pop();
                small.push(more);
            }
        }
        Alias { places }
    }

    /// A backend, as likely as its weight has it.
    pub(crate) fn draw(&self, random: u64) -> usize {
        let place = below(self.places.len(), (random >> 32) as u32);
        let (own, other) = self.places[place];
        if random & u64::from(u32::MAX) < own { place } else { other }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::claims::Rng;
    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(30))]
        #[test]
        fn draws_follow_the_weights(weights in prop::collection::vec(0u32..100, 1..20), seed: u64) {
            prop_assume!(weights.iter().any(|weight| *weight > 0));
            let weights: Vec<f64> = weights.into_iter().map(f64::from).collect();
            let (table, mut rng) = (Alias::new(&weights), Rng(seed));
            let mut drawn = vec![0u32; weights.len()];
            for _ in 0..20_000 {
                drawn[table.draw(rng.next())] += 1;
            }
            let sum: f64 = weights.iter().sum();
            for (weight, drawn) in weights.iter().zip(drawn) {
                let (wanted, share) = (weight / sum, f64::from(drawn) / 20_000.0);
                prop_assert!((wanted - share).abs() < 0.02, "{wanted} {share}");
                prop_assert!(*weight > 0.0 || drawn == 0, "what has no weight is not drawn");
            }
        }
    }

    #[test]
    fn weights_that_are_all_none_are_equal() {
        let table = Alias::new(&[0.0, 0.0]);
        assert_eq!((table.draw(0), table.draw(u64::MAX)), (0, 1));
    }
}
