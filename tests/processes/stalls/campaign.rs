//! The campaign, which draws causes at random and counts those that are reported correctly, and in
//! time.

use std::fmt::Debug;

use ringserve_tests::{Random, SOON, eventually};

use super::rig::{Lab, Misdeed};
use super::{TOLD_WITHIN, all_the_same, drivers, first_in_line, watchdog_rests};

/// Draws causes, of which the watchdog is not informed, and counts its reports: `STALLS` of each,
/// from idle and under load.
#[test]
#[ignore = "a minute, and it wants two CPUs that are idle: cargo test --release -p ringserve-tests --test processes stalls::campaign::causes_drawn_blind -- --ignored --nocapture"]
fn causes_drawn_blind() {
    first_in_line();
    let seed = std::env::var("RINGSERVE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let mut random = Random::new(seed);
    for driver in drivers() {
        let lab = Lab::on(*driver, all_the_same);
        let mut peer = lab.peer();
        let (mut right, mut wrong) = (0, Vec::new());
        for number in 0..50 {
            let misdeed = Misdeed::ALL[random.below(5) as usize];
            let time = 60 + random.below(200);
            let before = lab.times();
            peer.say(format!("rest {}", random.below(60)));
            peer.hear();
            peer.say(format!("{misdeed:?} {time}"));
            peer.hear();
            eventually("the stall is over", SOON, || {
                let stalls = lab.stalls();
                // The last 64 are kept, so all of these.
                stalls.len() == number + 1 && !stalls[number].ongoing
            });
            let stall = lab.stalls().pop().unwrap();
            let (ran, waited) = lab.since(before);
            match stall.cause == misdeed.cause(ran, waited) {
                true => right += 1,
                false => wrong.push((misdeed, stall.to_string())),
            }
        }
        println!("{driver}: {right} of 50 causes are right; seed {seed}");
        tell_all(&wrong);
        drop(peer);
        lab.running.abort();
        lab.running.wait().unwrap();
        let lab = Lab::on(*driver, all_the_same);
        let mut peer = lab.peer();
        let mut after = Vec::new();
        for number in 0..100u64 {
            peer.say(format!("rest {}", random.below(40)));
            peer.hear();
            if number.is_multiple_of(10) {
                watchdog_rests();
            }
            let known = lab.running.control().stalls().iter().filter(|stall| stall.ongoing).count();
            assert_eq!(known, 0);
            *lab.plan.began.lock().unwrap() = None;
            peer.say("Sleep 150");
            let mut told = None;
            eventually("a stall is told", SOON, || {
                let began = *lab.plan.began.lock().unwrap();
                told = began
                    .filter(|_| lab.stalls().iter().any(|stall| stall.ongoing))
                    .map(|began| began.elapsed());
                told.is_some()
            });
            after.extend(told);
            peer.hear();
            lab.over();
        }
        after.sort();
        let in_time = after.iter().filter(|after| **after <= TOLD_WITHIN).count();
        println!(
            "{driver}: {in_time} of 100 told within {TOLD_WITHIN:?}; median {:?}, longest {:?}",
            after[50], after[99]
        );
        lab.running.abort();
        lab.running.wait().unwrap();
        assert!(
            wrong.is_empty() && in_time == 100,
            "{} causes are wrong, {in_time} of 100 in time",
            wrong.len()
        );
    }
}

fn tell_all(all: &[impl Debug]) {
    all.iter().for_each(|one| println!("  {one:?}"));
}
