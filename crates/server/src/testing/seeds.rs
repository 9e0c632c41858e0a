//! Many seeds of one test: draws, checks, and the report of a failure.

use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::thread;
use std::time::Duration;

use ringserve_base::clock::VirtualTime;
use ringserve_base::guard::message_of;
use ringserve_simkernel::rng::Rng;
use ringserve_simkernel::{Adversary, FaultCounts, Faults, HostileEvent};

use super::panics;
use super::sim::Sim;
use super::world::{SeedFailed, World, WorldDraws};
use crate::trace::{Keeps, Trace};

/// The environment variable that runs one seed again, with its trace.
const VARIABLE: &str = "RINGSERVE_SEED";

/// The environment variable that sets the seeds of each test.
const COUNT_VARIABLE: &str = "RINGSERVE_SEEDS";

/// One of this many seeds is run twice, and must do the same.
const TWICE_EVERY: u64 = 100;

/// The most steps of a run: some seconds of real time, and a thousand times what most tests take.
const STEPS_MAX: u64 = 5_000_000;

const DAY: Duration = Duration::from_secs(24 * 3600);

impl Sim {
    /// A test with this many seeds, from 0 on.
    pub fn seeds(count: u64) -> Seeds {
        Seeds {
            from: 0,
            count,
            faults: Faults::none(),
            adversary: Adversary::default(),
            age: None,
            steps_max: STEPS_MAX,
            allowed: Rc::new(|_| false),
        }
    }
}

/// A test that is run with many seeds. See the [module](crate::testing).
#[must_use = "no seed runs until `run` is called"]
#[derive(Clone)]
pub struct Seeds {
    from: u64,
    count: u64,
    faults: Faults,
    adversary: Adversary,
    age: Option<Duration>,
    steps_max: u64,
    allowed: Rc<dyn Fn(&str) -> bool>,
}

/// A summary of a seed that held.
#[doc(hidden)]
#[derive(Clone, Debug)]
pub struct SeedOutcome {
    /// Equal for two runs of a seed.
    pub hash: u64,
    pub steps: u64,
    pub time: Duration,
    pub injected: FaultCounts,
    pub hostile: Vec<(HostileEvent, u64)>,
    clients: (u64, u64),
}

/// The rule that a seed broke, and the last events.
#[doc(hidden)]
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SeedFailure {
    pub what: String,
    pub chart: String,
}

impl Seeds {
    /// Sets the faults, by rate; none by default. Each seed draws its own mix of them
    /// ([`Faults::drawn`]). One seed in 16 has none.
    pub fn faults(self, faults: Faults) -> Seeds {
        Seeds { faults, ..self }
    }

    /// Sets the adversary, which is the same for all seeds; none by default. For the simulator.
    #[doc(hidden)]
    pub fn adversary(self, adversary: Adversary) -> Seeds {
        Seeds { adversary, ..self }
    }

    /// Sets the first seed; 0 by default.
    pub fn from(self, from: u64) -> Seeds {
        Seeds { from, ..self }
    }

    /// Sets the servers' clocks at the start. By default each seed draws them: zero, some time
    /// after 30 days, or a second before a timer wheel wraps.
    pub fn clock_at(self, age: Duration) -> Seeds {
        Seeds { age: Some(age), ..self }
    }

    /// Sets the most steps of a run, where a step is a round of a shard's loop or a poll of a
    /// client. A run of more steps fails as one that never ends. 5 million by default, some seconds
    /// of real time.
    pub fn steps_max(self, steps: u64) -> Seeds {
        Seeds { steps_max: steps, ..self }
    }

    /// Allows panics of user code in shards that are a part of the test: those whose message
    /// satisfies `allowed`. Any other panic fails the run.
    pub fn allow_panics(self, allowed: impl Fn(&str) -> bool + 'static) -> Seeds {
        Seeds { allowed: Rc::new(allowed), ..self }
    }

    /// Runs the test once for each seed, and each hundredth seed twice. With the environment
    /// variable `RINGSERVE_SEED` only that seed is run, and every event is printed. With
    /// `RINGSERVE_SEEDS` every test runs that many, from the same first seed on.
    ///
    /// At the end of each run the servers are [drained](Sim::finish).
    ///
    /// # Panics
    /// At the first seed that fails, with the broken rule, the last events and the command that
    /// runs the seed again.
    #[track_caller]
    pub fn run(self, test: impl Fn(&Sim)) {
        if let Some(seed) = number_of(VARIABLE) {
            return match self.run_seed(seed, Keeps::Prints, &test) {
                Ok(outcome) => {
                    println!(
                        "seed {seed} held: {} steps, {:?}\n{}",
                        outcome.steps, outcome.time, outcome.injected
                    );
                }
                Err(failure) => fail(seed, &failure),
            };
        }
        let (mut clients, mut good) = (0, 0);
        let count = number_of(COUNT_VARIABLE).unwrap_or(self.count);
        for seed in self.from..self.from.saturating_add(count) {
            match self.check(seed, &test) {
                Ok(outcome) => (clients, good) = (clients + outcome.clients.0, good + outcome.clients.1),
                Err(failure) => fail(seed, &failure),
            }
        }
        assert!(
            clients == 0 || good > 0,
            "no client of any seed came to a good end: with these faults the test shows nothing"
        );
    }

    /// Runs one seed and prints every event.
    #[doc(hidden)]
    pub fn trace(&self, seed: u64, test: &dyn Fn(&Sim)) -> Result<SeedOutcome, SeedFailure> {
        self.run_seed(seed, Keeps::Prints, test)
    }

    /// Runs one seed; each hundredth twice, and a failed seed again, to record the events before
    /// the failure.
    #[doc(hidden)]
    pub fn check(&self, seed: u64, test: &dyn Fn(&Sim)) -> Result<SeedOutcome, SeedFailure> {
        let first = match self.run_seed(seed, Keeps::Hash, test) {
            Ok(outcome) => outcome,
            Err(first) => {
                return Err(match self.run_seed(seed, Keeps::Events, test) {
                    Err(again) if again.what == first.what => again,
                    Err(again) => {
                        SeedFailure { what: format!("{}\n{}", first.what, unlike(&again.what)), ..again }
                    }
                    Ok(_) => {
                        SeedFailure { what: format!("{}\n{}", first.what, unlike("nothing failed")), ..first }
                    }
                });
            }
        };
        if seed.is_multiple_of(TWICE_EVERY) {
            let again = self.run_seed(seed, Keeps::Hash, test)?;
            if (first.hash, first.steps) != (again.hash, again.steps) {
                let differ = format!("{} steps after {} in the first run", again.steps, first.steps);
                return Err(SeedFailure { what: unlike(&differ), chart: String::new() });
            }
        }
        Ok(first)
    }

    fn run_seed(&self, seed: u64, keeps: Keeps, test: &dyn Fn(&Sim)) -> Result<SeedOutcome, SeedFailure> {
        let _kept = panics::PanicRecorder::begin();
        let time = VirtualTime::start();
        let faults = self.faults.clone().drawn(seed);
        let adversary = self.adversary.clone();
        let (steps_max, allowed) = (self.steps_max, self.allowed.clone());
        let settings = WorldDraws { seed, faults, adversary, steps_max, allowed };
        let world = Rc::new(World::new(settings, time.clone(), Trace::new(time, keeps)));
        let sim = Sim::new(world.clone(), self.age.unwrap_or_else(|| drawn_age(seed)));
        let ran = catch_unwind(AssertUnwindSafe(|| {
            test(&sim);
            sim.finish();
            close(&world);
        }));
        let Err(panic) = ran else {
            return Ok(SeedOutcome {
                hash: world.hash(),
                steps: world.steps(),
                time: world.now(),
                injected: world.network.injected(),
                hostile: HostileEvent::ALL.iter().map(|of| (*of, world.network.occurred(*of))).collect(),
                clients: world.clients(),
            });
        };
        let what = match panic.downcast::<SeedFailed>() {
            Ok(failed) => failed.0,
            Err(panic) => panics::take().pop().unwrap_or_else(|| message_of(panic)),
        };
        let chart = world.trace.chart();
        // The remaining values may panic once more.
        let _ = catch_unwind(AssertUnwindSafe(|| world.drop_clients()));
        let _ = catch_unwind(AssertUnwindSafe(|| world.drop_servers()));
        Err(SeedFailure { what, chart })
    }
}

/// Drops everything, and checks that nothing is left.
fn close(world: &World) {
    world.drop_clients();
    world.drop_servers();
    world.check_panics("a drop");
    if let Some(broken) = world.trace.take_broken() {
        world.fail(broken);
    }
    let mut leaks = world.network.leaks();
    // Frames that a service keeps are counted after the service was dropped too.
    leaks.retain(|leak| !leak.ends_with("leased buffers"));
    if world.may_leave_behind() {
        leaks.retain(|leak| !leak.starts_with("ring "));
    }
    if !leaks.is_empty() {
        world.fail(format!("something is left at the end:\n  {}", leaks.join("\n  ")));
    }
}

/// The number in an environment variable, if it is set.
#[track_caller]
fn number_of(variable: &str) -> Option<u64> {
    let text = env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text} is no number")))
}

/// The most likely cause of a difference between two runs of a seed.
fn unlike(differ: &str) -> String {
    format!(
        "a second run of the same seed did something else ({differ}): what the test or the service does depends on more \
         than the seed, most likely on the order of a hash map, on the system's clock (ask Shard::now and Net::now), on \
         other random numbers (ask Shard::random and Net::random) or on a thread"
    )
}

#[track_caller]
fn fail(seed: u64, failure: &SeedFailure) -> ! {
    let SeedFailure { what, chart } = failure;
    // The harness names a test's thread by the test.
    let name = thread::current().name().filter(|name| *name != "main").map(|name| format!(" {name}"));
    let name = name.unwrap_or_default();
    panic!("seed {seed}: {what}\n{chart}again: {VARIABLE}={seed} cargo test{name}");
}

/// The clocks of a seed at the start.
fn drawn_age(seed: u64) -> Duration {
    let mut rng = Rng::new(seed ^ 0x6167_6521);
    match rng.below(4) {
        0 | 1 => Duration::ZERO,
        2 => 30 * DAY + Duration::from_nanos(rng.below(DAY.as_nanos() as u64)),
        _ => {
            // A wheel has steps of 2^20 or 2^24 ns and levels of 64 buckets; the last one is of
            // 2.28 years, in which the steps that a connection keeps wrap.
            let wrap = rng.pick(&[20, 24]) + 6 * rng.range(2, 5) as u32;
            let wrap = if rng.one_in(8) { 56 } else { wrap };
            Duration::from_nanos(1 << wrap).saturating_sub(Duration::from_secs(1))
        }
    }
}
