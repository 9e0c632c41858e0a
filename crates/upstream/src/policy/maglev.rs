//! Which backend a key belongs to, by Maglev's table: all are found in constant time, and few keys
//! move where a backend leaves.

/// Sizes of tables, all prime, so that the steps of each backend reach every place.
const SIZES: [usize; 5] = [251, 1021, 4093, 16381, 65521];

/// Places for each backend, at least: shares are even within about a hundredth of all.
const PLACES: usize = 100;

/// A table of places, each of one backend.
#[derive(Clone, Debug)]
pub(crate) struct Maglev {
    places: Vec<u32>,
}

impl Maglev {
    /// A table of backends, by index, each with the hash of its name and its weight. `None` without
    /// any.
    pub(crate) fn new(backends: &[(u32, u64, f64)]) -> Option<Maglev> {
        if backends.is_empty() {
            return None;
        }
        let wanted = backends.len() * PLACES;
        let size = SIZES.into_iter().find(|size| *size >= wanted).unwrap_or(SIZES[SIZES.len() - 1]);
        let heaviest = backends.iter().map(|(.., weight)| *weight).fold(f64::MIN_POSITIVE, f64::max);
        let mut places = vec![u32::MAX; size];
        // The place that each backend wants next, and how many it may have so far.
        let mut wants: Vec<(usize, usize, f64)> = backends
            .iter()
            .map(|(_, name, _)| (*name as usize % size, mix(*name) as usize % (size - 1) + 1, 0.0))
            .collect();
        let mut left = size;
        while left > 0 {
            for ((index, _, weight), (next, step, credit)) in backends.iter().zip(&mut wants) {
                *credit += weight / heaviest;
                if *credit < 1.0 || left == 0 {
                    continue;
                }
                *credit -= 1.0;
                while places[*next] != u32::MAX {
                    *next = (*next + *step) % size;
                }
                places[*next] = *index;
                left -= 1;
            }
        }
        Some(Maglev { places })
    }

    /// The backend of a key, and where that may not be asked another one for each further attempt.
    pub(crate) fn at(&self, key: u64, attempt: u32) -> usize {
        let key = if attempt == 0 { key } else { mix(key.wrapping_add(u64::from(attempt))) };
        self.places[(key % self.places.len() as u64) as usize] as usize
    }
}

/// A hash of bytes, the same in each process.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    let fnv = bytes.iter().fold(0xCBF2_9CE4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01B3)
    });
    mix(fnv)
}

/// Spreads what differs over all bits.
fn mix(number: u64) -> u64 {
    let z = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn table(count: u32, weight: impl Fn(u32) -> f64) -> Vec<(u32, u64, f64)> {
        (0..count)
            .map(|index| (index, hash(format!("10.0.0.{index}:80").as_bytes()), weight(index)))
            .collect()
    }

    fn shares(table: &Maglev, count: u32) -> Vec<f64> {
        let mut keys = vec![0; count as usize];
        (0..20_000u32).for_each(|key| keys[table.at(hash(&key.to_be_bytes()), 0)] += 1);
        keys.iter().map(|keys| f64::from(*keys) / 20_000.0).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20))]
        #[test]
        fn keys_are_shared_by_weight(weights in prop::collection::vec(1u32..10, 1..30)) {
            let count = weights.len() as u32;
            let table = Maglev::new(&table(count, |index| f64::from(weights[index as usize]))).unwrap();
            let sum = f64::from(weights.iter().sum::<u32>());
            for (share, weight) in shares(&table, count).iter().zip(&weights) {
                prop_assert!((share - f64::from(*weight) / sum).abs() < 0.025, "{share} of {weight} in {sum}");
            }
        }

        #[test]
        fn few_keys_move_if_a_backend_leaves(count in 2u32..60, gone: u32) {
            let all = table(count, |_| 1.0);
            let before = Maglev::new(&all).unwrap();
            let gone = gone % count;
            let left: Vec<_> = all.iter().copied().filter(|(index, ..)| *index != gone).collect();
            let after = Maglev::new(&left).unwrap();
            let keys = 5000u32;
            let moved = (0..keys)
                .map(|key| hash(&key.to_be_bytes()))
                .filter(|key| before.at(*key, 0) != gone as usize && before.at(*key, 0) != after.at(*key, 0))
                .count();
            // Tables of another size move all: that is at 2, 10, 40, 163 backends.
            let grew = (count as usize * PLACES).min(65521);
            prop_assume!(SIZES.iter().all(|size| !(grew > *size && grew - PLACES <= *size)));
            prop_assert!(moved < keys as usize / 5, "{moved} of {keys} moved");
        }
    }

    #[test]
    fn further_attempts_reach_the_others() {
        let table = Maglev::new(&table(3, |_| 1.0)).unwrap();
        for key in 0..100u64 {
            let mut reached: Vec<usize> =
                (0..32).map(|attempt| table.at(hash(&key.to_be_bytes()), attempt)).collect();
            reached.sort_unstable();
            reached.dedup();
            assert_eq!(reached, [0, 1, 2]);
        }
        assert!(Maglev::new(&[]).is_none());
    }
}
