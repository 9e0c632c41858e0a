//! Runs seeds of the simulator. See the crate's documentation.

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use ringserve_sim::faults::Canary;
use ringserve_sim::faults::Coverage;
use ringserve_sim::run::{Options, Violation, run};
use ringserve_sim::servers;

/// Each possible event must have occurred this often in a run of this size.
const COVERED: (u64, u64) = (100, 10_000);

/// Runs ringserve's state machine and io_uring bookkeeping over a simulated kernel with every fault
/// that a kernel may have.
///
/// Ends with 0 if every seed held, 1 at the first violation, 2 if an event never occurred.
#[derive(Parser)]
#[command(name = "ringserve-sim", version)]
struct Arguments {
    /// Number of seeds to run.
    #[arg(long, default_value_t = 10_000)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Turns of a seed before it drains, unless its peers finish earlier.
    #[arg(long, default_value_t = 2000)]
    turns: u64,
    /// Threads.
    #[arg(long, default_value_t = 1)]
    jobs: usize,
    /// Plants a bug that the run must find.
    #[arg(long, num_args = 0..=1, default_missing_value = "byte")]
    canary: Option<Canary>,
    /// Runs whole servers: several shards with the loop that ships, their services, tasks, messages
    /// and upstreams.
    #[arg(long)]
    servers: bool,
    /// With `--servers`: runs every seed twice, and compares the events.
    #[arg(long, requires = "servers")]
    twice: bool,
    /// With `--servers`: prints every event.
    #[arg(long, requires = "servers")]
    trace: bool,
    /// Prints the counts of all events, even if each occurred often enough.
    #[arg(long)]
    coverage: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.servers {
        return run_servers(&arguments);
    }
    let options = Options {
        from: arguments.from,
        seeds: arguments.seeds,
        turns: arguments.turns,
        jobs: arguments.jobs,
        canary: arguments.canary,
        progress: true,
    };
    let started = Instant::now();
    match run(&options) {
        Err(violation) => {
            report(&violation, &arguments);
            ExitCode::from(1)
        }
        Ok(cover) => {
            let time = started.elapsed().as_secs_f64();
            println!(
                "{} seeds held, {:.0} a second: {} turns, {} connections, {} frames",
                options.seeds,
                options.seeds as f64 / time,
                cover.turns,
                cover.connections,
                cover.frames
            );
            covered(&cover, &arguments)
        }
    }
}

fn run_servers(arguments: &Arguments) -> ExitCode {
    let Arguments { from, seeds, jobs, twice, trace, .. } = *arguments;
    let started = Instant::now();
    let canary = arguments.canary.is_some();
    match servers::run(&servers::Options { from, seeds, jobs, twice, trace, canary }) {
        Err(broken) => {
            println!("seed {}: {}", broken.seed, broken.what);
            println!(
                "again: cargo run --release -p ringserve-sim -- --servers --from {} --seeds 1 --trace{}",
                broken.seed,
                if canary { " --canary" } else { "" }
            );
            ExitCode::from(1)
        }
        Ok(sum) => {
            let time = started.elapsed().as_secs_f64();
            println!(
                "{seeds} seeds of whole servers held, {:.0} a second: {} steps, {:.1} days of virtual time",
                seeds as f64 / time,
                sum.steps,
                sum.time.as_secs_f64() / 86400.0
            );
            let (table, missing) = sum.table(seeds);
            if arguments.coverage {
                print!("{table}");
            }
            if seeds < servers::COVERED || missing.is_empty() {
                return ExitCode::SUCCESS;
            }
            println!("too seldom: {}", missing.join("; "));
            ExitCode::from(2)
        }
    }
}

fn report(violation: &Violation, arguments: &Arguments) {
    println!("{}", violation.trace);
    println!("seed {}: {}", violation.seed, violation.what);
    let canary = match arguments.canary {
        None => "",
        Some(Canary::Byte) => " --canary byte",
        Some(Canary::Buffer) => " --canary buffer",
    };
    println!(
        "again: cargo run --release -p ringserve-sim -- --from {} --seeds 1 --turns {}{canary}",
        violation.seed, arguments.turns
    );
}

fn covered(cover: &Coverage, arguments: &Arguments) -> ExitCode {
    let enough = |count: u64| count * COVERED.1 >= COVERED.0 * arguments.seeds;
    let mut missing = 0;
    for (kind, name, count) in cover.rows() {
        let enough = enough(count);
        missing += u64::from(!enough);
        if arguments.coverage || (!enough && arguments.seeds >= COVERED.1) {
            println!("{count:>12}  {kind}: {name}{}", if enough { "" } else { "  (too seldom)" });
        }
    }
    if arguments.seeds < COVERED.1 || missing == 0 {
        return ExitCode::SUCCESS;
    }
    println!("{missing} of them happened less than {} times in {} seeds", COVERED.0, COVERED.1);
    ExitCode::from(2)
}
