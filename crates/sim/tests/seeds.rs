//! The simulator itself: seeds hold, canaries are found, and the same seed has the same result.

use ringserve_sim::faults::Canary;
use ringserve_sim::run::{Options, run, run_seed};

fn options(seeds: u64, canary: Option<Canary>) -> Options {
    Options { from: 0, seeds, turns: 2000, jobs: 2, canary, progress: false }
}

#[test]
fn a_few_hundred_seeds_hold() {
    if let Err(violation) = run(&options(400, None)) {
        panic!("seed {}: {}\n{}", violation.seed, violation.what, violation.trace);
    }
}

#[test]
fn a_planted_bug_is_found() {
    // The oracle that fails first depends on where the planted byte lands (a length, a tag, a
    // payload): it only matters that one fails, and only because of the plant.
    for canary in [Canary::Byte, Canary::Buffer] {
        let Err(violation) = run(&options(200, Some(canary))) else { panic!("{canary:?} went unnoticed") };
        assert!(!violation.trace.is_empty(), "a violation comes with what happened before");
        let without = run_seed(violation.seed, 2000, None, false);
        assert!(without.is_ok(), "seed {} fails without {canary:?}: {}", violation.seed, violation.what);
    }
}

#[test]
fn the_same_seed_does_the_same_thing() {
    for seed in 0..40 {
        let hash = |trace| run_seed(seed, 2000, None, trace).map(|outcome| outcome.hash).ok();
        let first = hash(false);
        assert!(first.is_some_and(|hash| hash != 0));
        assert_eq!(first, hash(true), "seed {seed}, with and without a trace");
    }
    let hashes: Vec<_> = (0..40).map(|seed| run_seed(seed, 2000, None, false).map(|o| o.hash).ok()).collect();
    assert!(hashes.windows(2).all(|two| two[0] != two[1]), "seeds differ");
}
