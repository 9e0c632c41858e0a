//! Runs of many seeds, on several threads; the first violation ends them all.

use std::cell::{Cell, RefCell};
use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, Once};
use std::time::{Duration, Instant};

use crate::faults::{Canary, Coverage};
use crate::world::{Outcome, World};

/// Options of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The first seed.
    pub from: u64,
    /// Number of seeds.
    pub seeds: u64,
    /// Turns of a seed before it drains.
    pub turns: u64,
    /// Threads.
    pub jobs: usize,
    /// The bug to plant.
    pub canary: Option<Canary>,
    /// Prints a line per second.
    pub progress: bool,
}

/// A seed that broke a rule.
#[derive(Clone, Debug)]
pub struct Violation {
    /// The seed.
    pub seed: u64,
    /// The violated rule, and the place of its check.
    pub what: String,
    /// The last lines of the trace.
    pub trace: String,
}

thread_local! {
    /// Message of this thread's last panic.
    static SAID: RefCell<String> = const { RefCell::new(String::new()) };
    /// True exactly while this thread runs a seed.
    static IN_A_SEED: Cell<bool> = const { Cell::new(false) };
}

/// Keeps panics of seeds off the terminal; they are violations, and printed as such.
fn hush() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let elsewhere = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !IN_A_SEED.get() {
                return elsewhere(info);
            }
            let place = info.location().map_or(String::new(), |place| format!(" ({place})"));
            let payload = info.payload();
            let text = payload.downcast_ref::<String>().map(String::as_str);
            let text = text.or(payload.downcast_ref::<&str>().copied()).unwrap_or("a panic");
            SAID.with(|said| *said.borrow_mut() = format!("{text}{place}"));
        }));
    });
}

/// Runs one seed.
///
/// # Errors
/// The violated rule, with a trace if `trace`.
pub fn run_seed(
    seed: u64,
    turns: u64,
    canary: Option<Canary>,
    trace: bool,
) -> Result<Outcome, Box<Violation>> {
    hush();
    let state = RefCell::new(None);
    let run = || {
        let world = World::new(seed, turns, canary, trace);
        *state.borrow_mut() = Some(world.state());
        world.run()
    };
    IN_A_SEED.set(true);
    let ended = catch_unwind(AssertUnwindSafe(run));
    IN_A_SEED.set(false);
    ended.map_err(|_| {
        let what = SAID.with(|said| said.borrow().clone());
        let mut text = String::new();
        let state = state.into_inner();
        let lines = state.as_ref().and_then(|state| state.try_borrow_mut().ok()?.trace.take());
        for line in lines.into_iter().flatten() {
            let _ = writeln!(text, "{line}");
        }
        Box::new(Violation { seed, what, trace: text })
    })
}

/// Runs all seeds, or up to the first violation, and returns the counts of all events.
///
/// # Errors
/// The violation.
pub fn run(options: &Options) -> Result<Coverage, Box<Violation>> {
    let next = AtomicU64::new(0);
    let done = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let found: Mutex<Option<Box<Violation>>> = Mutex::new(None);
    let sum = Mutex::new(Coverage::default());
    let started = Instant::now();
    let work = || {
        let mut cover = Coverage::default();
        while !stop.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= options.seeds {
                break;
            }
            match run_seed(options.from + index, options.turns, options.canary, false) {
                Ok(outcome) => cover.add(&outcome.cover),
                Err(violation) => {
                    stop.store(true, Ordering::Relaxed);
                    let mut found = found.lock().unwrap_or_else(|lock| lock.into_inner());
                    // The smallest seed, so that the answer depends less on the threads.
                    if found.as_ref().is_none_or(|old| old.seed > violation.seed) {
                        *found = Some(violation);
                    }
                }
            }
            done.fetch_add(1, Ordering::Relaxed);
        }
        sum.lock().unwrap_or_else(|lock| lock.into_inner()).add(&cover);
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..options.jobs.max(1)).map(|_| scope.spawn(work)).collect();
        let mut told = Instant::now();
        while options.progress && !threads.iter().all(|thread| thread.is_finished()) {
            std::thread::park_timeout(Duration::from_millis(20));
            if told.elapsed() >= Duration::from_secs(5) {
                told = Instant::now();
                let count = done.load(Ordering::Relaxed);
                let rate = count as f64 / started.elapsed().as_secs_f64();
                println!("{count} of {} seeds, {rate:.0} a second", options.seeds);
            }
        }
    });
    match found.into_inner().unwrap_or_else(|lock| lock.into_inner()) {
        None => Ok(sum.into_inner().unwrap_or_else(|lock| lock.into_inner())),
        Some(violation) => {
            // Run again, with the trace.
            let again = run_seed(violation.seed, options.turns, options.canary, true);
            Err(again.err().unwrap_or(violation))
        }
    }
}
