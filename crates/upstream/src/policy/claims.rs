//! The claims of the guide's page on balancing, by seed: shards that choose, backends that serve,
//! fail or are slow, as discrete events.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::SECOND;
use super::alias::Alias;
use super::budget::Budget;
use super::ewma::Ewma;
use super::keep_alive::KeepAlive;
use super::p2c::{by_weight, load, lower_of_two};

/// Random numbers by SplitMix.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn exp(&mut self, mean: u64) -> u64 {
        let unit = ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        (-unit.ln() * mean as f64) as u64
    }
}

const MS: u64 = 1_000_000;
const SHARDS: usize = 4;
const WORKERS: usize = 8;
const PENALTY: u64 = 5 * SECOND;

#[derive(Clone, Copy, PartialEq)]
enum First {
    Even,
    TenTimesSlower,
    FailsAtOnce,
}

/// The knowledge of a shard about a backend.
#[derive(Clone, Copy)]
struct Known {
    ewma: Ewma,
    in_flight: u32,
    others: u32,
}

enum Event {
    Arrives,
    Done(Request),
}

#[derive(Clone, Copy)]
struct Request {
    shard: usize,
    backend: usize,
    begun: u64,
    failed: bool,
}

struct Outcome {
    times: Vec<u64>,
    failed: usize,
    served: Vec<u64>,
}

struct World {
    weights: Vec<f64>,
    first: First,
    rng: Rng,
    known: Vec<Vec<Known>>,
    looked: Vec<u64>,
    busy: Vec<usize>,
    queues: Vec<VecDeque<Request>>,
    events: BinaryHeap<Reverse<(u64, usize)>>,
    what: Vec<Option<Event>>,
    outcome: Outcome,
}

impl World {
    fn new(weights: &[f64], first: First, seed: u64) -> World {
        let count = weights.len();
        let known = Known { ewma: Ewma::NEW, in_flight: 0, others: 0 };
        World {
            weights: weights.to_vec(),
            first,
            rng: Rng(seed),
            known: vec![vec![known; count]; SHARDS],
            looked: vec![0; SHARDS],
            busy: vec![0; count],
            queues: vec![VecDeque::new(); count],
            events: BinaryHeap::new(),
            what: Vec::new(),
            outcome: Outcome { times: Vec::new(), failed: 0, served: vec![0; count] },
        }
    }

    fn at(&mut self, time: u64, event: Event) {
        self.what.push(Some(event));
        self.events.push(Reverse((time, self.what.len() - 1)));
    }

    /// Totals are known as they were up to a millisecond ago.
    fn look(&mut self, shard: usize, now: u64) {
        if now - self.looked[shard] < MS {
            return;
        }
        self.looked[shard] = now;
        for backend in 0..self.weights.len() {
            let total: u32 = self.known.iter().map(|known| known[backend].in_flight).sum();
            let known = &mut self.known[shard][backend];
            known.others = total - known.in_flight;
        }
    }

    fn choose(&mut self, shard: usize, now: u64) -> usize {
        self.look(shard, now);
        let (known, weights) = (&self.known[shard], &self.weights);
        let mean = weights.iter().sum::<f64>() / weights.len() as f64;
        let load = |backend: usize| {
            let Known { ewma, in_flight, others } = known[backend];
            load(ewma.read(now).unwrap_or(5e6), in_flight + others, weights[backend] / mean)
        };
        if weights.iter().all(|weight| *weight == weights[0]) {
            return lower_of_two(weights.len(), self.rng.next(), load);
        }
        let table = Alias::new(weights);
        by_weight(&table, weights.len(), || self.rng.next(), load)
    }

    fn begin(&mut self, request: Request, now: u64) {
        self.busy[request.backend] += 1;
        let slow = self.first == First::TenTimesSlower && request.backend == 0;
        let time = self.rng.exp(if slow { 50 * MS } else { 5 * MS });
        self.at(now + time, Event::Done(request));
    }

    fn arrives(&mut self, now: u64) {
        let shard = self.rng.next() as usize % SHARDS;
        let backend = self.choose(shard, now);
        self.known[shard][backend].in_flight += 1;
        self.outcome.served[backend] += 1;
        let failed = self.first == First::FailsAtOnce && backend == 0;
        let request = Request { shard, backend, begun: now, failed };
        if failed {
            self.at(now + MS / 5, Event::Done(request));
        } else if self.busy[backend] < WORKERS {
            self.begin(request, now);
        } else {
            self.queues[backend].push_back(request);
        }
    }

    fn done(&mut self, request: Request, now: u64) {
        let Request { shard, backend, begun, failed } = request;
        let known = &mut self.known[shard][backend];
        known.in_flight -= 1;
        known.ewma.sample(now, if failed { PENALTY } else { now - begun });
        if failed {
            self.outcome.failed += 1;
            return;
        }
        self.outcome.times.push(now - begun);
        self.busy[backend] -= 1;
        if let Some(next) = self.queues[backend].pop_front() {
            self.begin(next, now);
        }
    }
}

/// Requests that arrive at this share of what equal backends could serve.
fn run(weights: &[f64], first: First, share: f64, requests: usize, seed: u64) -> Outcome {
    let mut world = World::new(weights, first, seed);
    let gap = 5.0 * MS as f64 / (share * (weights.len() * WORKERS) as f64);
    world.at(0, Event::Arrives);
    let mut arrived = 0;
    while let Some(Reverse((now, index))) = world.events.pop() {
        match world.what[index].take() {
            Some(Event::Arrives) => {
                arrived += 1;
                world.arrives(now);
                if arrived < requests {
                    let next = now + world.rng.exp(gap as u64);
                    world.at(next, Event::Arrives);
                }
            }
            Some(Event::Done(request)) => world.done(request, now),
            None => {}
        }
    }
    world.outcome.times.sort_unstable();
    world.outcome
}

fn p99(outcome: &Outcome) -> f64 {
    outcome.times[outcome.times.len() / 100 * 99] as f64
}

const REQUESTS: usize = 40_000;

#[test]
fn slow_backend_of_ten_moves_the_99th_percentile_little() {
    for seed in 0..3 {
        let even = p99(&run(&[1.0; 10], First::Even, 0.6, REQUESTS, seed));
        let slow = p99(&run(&[1.0; 10], First::TenTimesSlower, 0.6, REQUESTS, seed));
        assert!(slow <= 1.15 * even, "seed {seed}: {slow} of {even}");
    }
}

#[test]
fn backend_that_fails_at_once_gets_almost_nothing() {
    for seed in 0..5 {
        let outcome = run(&[1.0; 10], First::FailsAtOnce, 0.6, REQUESTS, seed);
        assert!(outcome.failed <= REQUESTS / 1000, "seed {seed}: {} of {REQUESTS}", outcome.failed);
    }
}

#[test]
fn weights_are_shares_while_all_is_idle() {
    for seed in 0..3 {
        let outcome = run(&[9.0, 1.0], First::Even, 0.05, REQUESTS, seed);
        let share = outcome.served[0] as f64 / REQUESTS as f64;
        assert!((0.88..0.92).contains(&share), "seed {seed}: {share}");
    }
}

#[test]
fn heavy_backend_that_fails_at_once_costs_a_hundredth() {
    for seed in 0..3 {
        let outcome = run(&[9.0, 1.0], First::FailsAtOnce, 0.1, REQUESTS, seed);
        let share = outcome.failed as f64 / REQUESTS as f64;
        assert!(share <= 0.012, "seed {seed}: {share}");
    }
}

#[test]
fn outage_after_a_quiet_hour_is_not_multiplied() {
    for per_second in [100, 1000, 5000] {
        let (mut budget, begun) = (Budget::new(20, 10), 3600 * SECOND);
        let (mut retries, mut worst) = (0, 0);
        for second in 0..10 {
            let mut now_retries = 0;
            for n in 0..per_second {
                let now = begun + second * SECOND + n * SECOND / per_second;
                budget.add(now, 1);
                // Each is asked again up to twice.
                now_retries += (0..2).filter(|_| budget.take(now)).count() as u64;
            }
            (retries, worst) = (retries + now_retries, worst.max(now_retries));
        }
        let (requests, floor) = (10 * per_second, 10 * 10 + 10);
        assert!(retries <= requests / 5 + floor, "{retries} of {requests}");
        assert!(worst <= 2 * per_second / 5 + 20, "{worst} of {per_second}");
    }
}

#[test]
fn learned_time_of_a_backend_loses_no_request() {
    for (seed, round_trip) in [(1, MS), (2, 40 * MS), (3, MS), (4, 40 * MS)] {
        let (mut rng, mut learned) = (Rng(seed), KeepAlive::default());
        let (mut lost, mut lost_late, mut taught, mut now) = (0, 0, 0, 0);
        for _ in 0..200_000 {
            let gap = rng.exp(5 * SECOND);
            now += gap;
            let ended = 5 * SECOND + round_trip / 2;
            if gap >= learned.lent_until() {
                // Not lent, and its end is heard.
                if gap > ended {
                    learned.ended_after(ended, now);
                }
            } else if gap > ended {
                learned.ended_after(ended, now);
                taught += 1;
            } else if gap + round_trip / 2 > 5 * SECOND {
                // It leaves before the end is heard, and arrives behind it.
                lost += 1;
                lost_late += u32::from(taught >= 3);
            }
        }
        assert_eq!(lost_late, 0, "seed {seed}: {lost} lost");
    }
}
