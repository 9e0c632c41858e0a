//! The lock-step measurement: every server in interleaved rounds, CPU per request by the
//! scheduler's own count.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use crate::child::Child;
use crate::load::{self, Measured, Target};
use crate::process;
use crate::schedstat::Schedstat;
use crate::steps::{Load, Shape, check_echo};
use crate::table::{Table, first_quartile, median, spread};

/// The plan of a measurement.
pub(crate) struct Plan {
    /// Numbers of connections, each a separate measurement.
    pub(crate) connections: Vec<usize>,
    /// The messages of each connection in a step.
    pub(crate) shape: Shape,
    /// Rounds, in each of which every server is measured once.
    pub(crate) rounds: usize,
    /// The CPU that generator and servers share.
    pub(crate) cpu: usize,
    /// The end of a round.
    pub(crate) round_end: RoundEnd,
    /// The servers; ratios are to the first.
    pub(crate) servers: Vec<Target>,
}

/// The end of the measured part of a round.
#[derive(Clone, Copy)]
pub(crate) enum RoundEnd {
    /// After the step in which this time has passed.
    After(Duration),
    /// After this many steps, or `STEPS_TIME_MAX`.
    Steps(u64),
}

/// The longest round, even when steps are counted: no loop here is unbounded.
const STEPS_TIME_MAX: Duration = Duration::from_secs(60);

/// Share of a round's length that is run before it is measured.
const WARM_UP_PART: u32 = 5;

/// The fewest steps of warm-up, for rounds that are counted in steps.
const WARM_UP_STEPS: u64 = 10;

/// The result of one server in one round.
struct Sample {
    /// Microseconds of CPU for a request.
    cpu_us: f64,
    /// Times that the server was put on the CPU for a step; near 1 when the batches are fixed.
    runs: f64,
    requests_per_second: f64,
}

/// Number of resamples of the rounds for a bound.
const RESAMPLES: usize = 2000;

/// Measures and prints the table.
pub(crate) fn run(plan: &Plan) -> io::Result<()> {
    if let Some(&most) = plan.connections.iter().max() {
        process::enough_files("--connections", most)?;
    }
    process::pin_to(plan.cpu)?;
    process::set_batch_policy()?;

    let first = plan.servers[0].name();
    let ratio_to = format!("to {first}");
    let mut table = Table::new(&[
        "connections",
        "server",
        "CPU µs/request",
        "min..max",
        &ratio_to,
        "of quartiles",
        "95 %",
        "runs/step",
    ]);
    for &connections in &plan.connections {
        let samples = measure_all(plan, connections)?;
        for (server, of_server) in plan.servers.iter().zip(&samples) {
            let cpu: Vec<f64> = of_server.iter().map(|sample| sample.cpu_us).collect();
            let runs: Vec<f64> = of_server.iter().map(|sample| sample.runs).collect();
            // Round by round, which cancels anything that slowed a whole round.
            let ratios: Vec<f64> = of_server
                .iter()
                .zip(&samples[0])
                .map(|(sample, yardstick)| sample.cpu_us / yardstick.cpu_us)
                .collect();
            let (least, most) = spread(&cpu).unwrap_or_default();
            let yardstick: Vec<f64> = samples[0].iter().map(|sample| sample.cpu_us).collect();
            table.row(vec![
                connections.to_string(),
                server.name(),
                format!("{:.3}", median(&cpu).unwrap_or_default()),
                format!("{least:.3}..{most:.3}"),
                format!("{:.3}", median(&ratios).unwrap_or_default()),
                format!("{:.3}", quartile_ratio(&cpu, &yardstick)),
                format!("{:.3}", quartile_ratio_bound(&cpu, &yardstick)),
                format!("{:.2}", median(&runs).unwrap_or_default()),
            ]);
        }
    }
    print!("{}", table.render());
    Ok(())
}

/// Cost of a server in the machine's quiet moments, as a ratio to the yardstick in its own.
fn quartile_ratio(cpu: &[f64], yardstick: &[f64]) -> f64 {
    let quartile = |values| first_quartile(values).unwrap_or_default();
    quartile(cpu) / quartile(yardstick)
}

/// The value that [`quartile_ratio`] stays below with a confidence of 95 %, by resampling the
/// rounds.
fn quartile_ratio_bound(cpu: &[f64], yardstick: &[f64]) -> f64 {
    let mut shuffler = Shuffler::default();
    let mut ratios: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            let rounds: Vec<usize> = cpu.iter().map(|_| shuffler.below(cpu.len())).collect();
            let drawn = |values: &[f64]| rounds.iter().map(|round| values[*round]).collect::<Vec<f64>>();
            quartile_ratio(&drawn(cpu), &drawn(yardstick))
        })
        .collect();
    ratios.sort_by(f64::total_cmp);
    ratios[RESAMPLES * 95 / 100]
}

/// Runs all rounds with `connections` connections. The result is by server, then by round.
fn measure_all(plan: &Plan, connections: usize) -> io::Result<Vec<Vec<Sample>>> {
    let mut children = Vec::new();
    for server in &plan.servers {
        let Some(child) = server.start(plan.cpu, true)? else { return Err(not_started()) };
        check_echo(child.address, plan.shape).map_err(|error| named(server, &error))?;
        children.push(child);
    }
    let mut samples: Vec<Vec<Sample>> = children.iter().map(|_| Vec::new()).collect();
    let mut order: Vec<usize> = (0..children.len()).collect();
    let mut shuffler = Shuffler::default();
    for round in 0..plan.rounds {
        eprint!("\r{connections} connections, round {} of {} ", round + 1, plan.rounds);
        shuffler.shuffle(&mut order);
        for &at in &order {
            let sample = measure(&children[at], connections, plan.shape, plan.round_end)
                .map_err(|error| named(&plan.servers[at], &error))?;
            samples[at].push(sample);
        }
    }
    eprintln!();
    Ok(samples)
}

fn not_started() -> io::Error {
    io::Error::other("lock step is for servers that it starts")
}

/// Starts one server and measures it once, on the server's CPU.
pub(crate) fn measure_target(plan: &load::Plan, target: &Target) -> io::Result<Measured> {
    let measured = || {
        process::pin_to(plan.server_cpu)?;
        // Processes that this thread starts inherit it.
        process::set_batch_policy()?;
        let Some(child) = target.start(plan.server_cpu, true)? else {
            return Err(not_started());
        };
        check_echo(child.address, plan.shape)?;
        measure(&child, plan.connections, plan.shape, RoundEnd::After(plan.measured))
    };
    // On another thread, since it stays on that CPU.
    let sample = thread::scope(|scope| scope.spawn(measured).join())
        .map_err(|_| io::Error::other("the generator panicked"))??;
    Ok(Measured {
        server: target.name(),
        connections: plan.connections,
        bytes: plan.shape.bytes,
        pipeline: plan.shape.pipeline,
        rate: None,
        requests_per_second: sample.requests_per_second,
        cpu_us: Some(sample.cpu_us),
        system_calls: None,
        context_switches: None,
        server_busy: None,
        generator_busy: None,
        p50_us: None,
        p99_us: None,
        p999_us: None,
        max_us: None,
        newcomers_per_second: None,
        newcomers_p99_us: None,
        generator_bound: false,
    })
}

/// One server, one round: connects, warms up, measures.
fn measure(child: &Child, connections: usize, shape: Shape, round_end: RoundEnd) -> io::Result<Sample> {
    let mut load = Load::connect(child.address, connections, shape)?;
    let (time, steps) = match round_end {
        RoundEnd::After(time) => (time, u64::MAX),
        RoundEnd::Steps(steps) => (STEPS_TIME_MAX, steps),
    };
    run_steps(&mut load, time / WARM_UP_PART, (steps / u64::from(WARM_UP_PART)).max(WARM_UP_STEPS))?;

    let (before, start) = (Schedstat::of_process(child.pid())?, Instant::now());
    let steps = run_steps(&mut load, time, steps)?;
    let (spent, took) = (Schedstat::of_process(child.pid())?.since(before), start.elapsed());

    let requests = steps as f64 * load.step_requests() as f64;
    drop(load);
    wait_until_idle(child)?;
    Ok(Sample {
        cpu_us: spent.cpu_ns as f64 / requests / 1000.0,
        runs: spent.runs as f64 / steps as f64,
        requests_per_second: requests / took.as_secs_f64(),
    })
}

/// Runs steps until `time` has passed or `steps_max` are done. Returns how many.
fn run_steps(load: &mut Load, time: Duration, steps_max: u64) -> io::Result<u64> {
    let start = Instant::now();
    let mut steps = 0;
    while steps < steps_max {
        load.step()?;
        steps += 1;
        if start.elapsed() >= time {
            break;
        }
    }
    Ok(steps)
}

/// Waits, for a second at most, until the server has closed what the generator has closed: it must
/// not work while the next one is measured.
fn wait_until_idle(child: &Child) -> io::Result<()> {
    let mut last = Schedstat::of_process(child.pid())?;
    for _ in 0..100 {
        thread::sleep(Duration::from_millis(10));
        let now = Schedstat::of_process(child.pid())?;
        if now == last {
            break;
        }
        last = now;
    }
    Ok(())
}

/// Adds the server to `error`.
fn named(server: &Target, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", server.name()))
}

/// Shuffles the order of the servers in a round, in the same way at every run.
pub(crate) struct Shuffler {
    state: u64,
}

impl Default for Shuffler {
    fn default() -> Self {
        // Any number but zero.
        Self { state: 0x9e37_79b9_7f4a_7c15 }
    }
}

impl Shuffler {
    pub(crate) fn shuffle(&mut self, items: &mut [usize]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }

    /// A number below `end`.
    fn below(&mut self, end: usize) -> usize {
        // xorshift64; its slight bias towards small remainders does not matter here.
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state % end as u64) as usize
    }
}
