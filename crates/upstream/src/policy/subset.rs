//! The backends that a shard asks where there are many: a window of them, so that connections do
//! not multiply with shards.

/// Up to as many backends each shard asks all.
const ALL_UP_TO: usize = 32;

/// The fewest of more than that.
const LEAST: usize = 16;

/// The places of a shard's window in the order of all backends, as its begin and its length.
pub(crate) fn window(backends: usize, shard: usize, shards: usize) -> (usize, usize) {
    let shards = shards.max(1);
    if backends <= ALL_UP_TO {
        return (0, backends);
    }
    let length = (2 * backends / shards).clamp(LEAST, backends);
    (shard % shards * backends / shards, length)
}

/// True if the place is in a window.
pub(crate) fn holds((begin, length): (usize, usize), place: usize, backends: usize) -> bool {
    let behind = (place + backends - begin) % backends.max(1);
    behind < length
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of_place(place: usize, backends: usize, shards: usize) -> usize {
        let windows = (0..shards).map(|shard| window(backends, shard, shards));
        windows.filter(|window| holds(*window, place, backends)).count()
    }

    #[test]
    fn few_backends_are_asked_by_all_shards() {
        assert!((0..32).all(|place| of_place(place, 32, 64) == 64));
    }

    #[test]
    fn many_backends_have_two_to_three_of_64_shards() {
        assert!((0..500).all(|place| (2..=3).contains(&of_place(place, 500, 64))));
    }

    proptest! {
        #[test]
        fn each_backend_is_asked_by_a_shard(backends in 1usize..600, shards in 1usize..130) {
            let (least, most) = (0..backends).map(|place| of_place(place, backends, shards))
                .fold((usize::MAX, 0), |(least, most), count| (least.min(count), most.max(count)));
            prop_assert!(least >= 1 && most <= 2 * least + 2, "{least} to {most}");
        }
    }
}
