//! `cores`: the same work on one, two, four and eight shards, and the gain from each of them.

mod report;
mod works;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::child::Child;
use crate::generator;
use crate::process;
use crate::schedstat::Schedstat;
use crate::steps::check_echo;
use works::{Server, Starts};
pub(crate) use works::{WORKS, Work};

/// Load before each measurement.
const WARM_UP: Duration = Duration::from_millis(500);

/// Start, check, connections and end of a server.
const AROUND: Duration = Duration::from_secs(2);

/// Above this share of its CPUs a generator has no time left.
const BUSY_MAX: f64 = 0.95;

/// The plan of a measurement.
pub(crate) struct Plan {
    /// CPUs of the servers, the first shards' first.
    pub(crate) servers: Vec<usize>,
    /// CPUs of the generator.
    pub(crate) generator: Vec<usize>,
    pub(crate) shards: Vec<usize>,
    pub(crate) works: Vec<&'static Work>,
    /// Connections per shard.
    pub(crate) connections: usize,
    pub(crate) measured: Duration,
    pub(crate) rounds: usize,
    pub(crate) programs: PathBuf,
    pub(crate) out: PathBuf,
}

/// One server with one number of shards, in one round.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Measured {
    work: &'static str,
    server: &'static str,
    shards: usize,
    round: usize,
    connections: usize,
    requests_per_second: f64,
    /// CPU time of the server for a request, in microseconds.
    cpu_us: f64,
    /// The server's share of its CPUs, and that of the generator's busiest thread.
    server_busy: f64,
    generator_busy: f64,
    /// CPU time of the busiest thread, divided by the mean of as many as there are shards.
    skew: f64,
    p50_us: f64,
    p99_us: f64,
}

impl Measured {
    fn is_generator_bound(&self) -> bool {
        self.generator_busy > BUSY_MAX && self.server_busy < BUSY_MAX
    }
}

/// CPUs for the servers and for the generator: half of them each, and one of each core, if the
/// kernel reports siblings.
pub(crate) fn split_cpus() -> io::Result<(Vec<usize>, Vec<usize>)> {
    let cpus = process::allowed_cpus()?;
    if cpus.len() < 2 {
        return Err(io::Error::other("two CPUs are needed, one of them for the generator"));
    }
    let core_of = |cpu: &usize| {
        let file = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        fs::read_to_string(file).unwrap_or_else(|_| cpu.to_string())
    };
    let mut cores: Vec<(String, Vec<usize>)> = Vec::new();
    for cpu in cpus {
        let core = core_of(&cpu);
        match cores.iter_mut().find(|(name, _)| *name == core) {
            Some((_, threads)) => threads.push(cpu),
            None => cores.push((core, vec![cpu])),
        }
    }
    Ok(split(cores.into_iter().map(|(_, threads)| threads).collect()))
}

/// Takes first one thread of each core, then the others; the servers get the first half.
fn split(cores: Vec<Vec<usize>>) -> (Vec<usize>, Vec<usize>) {
    let most = cores.iter().map(Vec::len).max().unwrap_or_default();
    let of_turn = |turn: usize| cores.iter().filter_map(move |threads| threads.get(turn).copied());
    let mut all: Vec<usize> = (0..most).flat_map(of_turn).collect();
    let generator = all.split_off(all.len() / 2);
    (all, generator)
}

/// Measures everything in all rounds, and prints and writes the results.
pub(crate) fn run(plan: &Plan) -> io::Result<()> {
    let entrants = plan.works.iter().flat_map(|work| work.servers.iter().map(move |server| (*work, server)));
    let (entrants, missing): (Vec<_>, Vec<_>) =
        entrants.partition(|(_, server)| server.is_there(&plan.programs));
    for (work, server) in missing {
        eprintln!(
            "{}: {} is left out, since it is not in {}",
            work.name,
            server.name,
            plan.programs.display()
        );
    }
    let each = plan.measured + WARM_UP + AROUND;
    let all = each * (entrants.len() * plan.shards.len() * plan.rounds) as u32;
    eprintln!(
        "servers on CPUs {:?}, generator on {:?}; about {} s",
        plan.servers,
        plan.generator,
        all.as_secs() + 1
    );
    let (mut rows, mut failed) = (Vec::new(), Vec::new());
    for round in 0..plan.rounds {
        for (work, server) in &entrants {
            for shards in &plan.shards {
                eprint!(
                    "\rround {} of {}: {} {} {shards}      ",
                    round + 1,
                    plan.rounds,
                    work.name,
                    server.name
                );
                match measure(plan, work, server, *shards, round) {
                    Ok(one) => rows.push(one),
                    Err(error) => {
                        let why = format!("{} {} with {shards} shards: {error}", work.name, server.name);
                        eprintln!("\r{why}");
                        failed.push(why);
                    }
                }
            }
        }
    }
    eprintln!();
    if rows.is_empty() {
        return Err(io::Error::other("nothing could be measured"));
    }
    print!("{}", report::render(&rows));
    fs::write(&plan.out, report::json(plan, &rows, &failed)?)?;
    eprintln!("written to {}", plan.out.display());
    Ok(())
}

fn measure(plan: &Plan, work: &Work, server: &Server, shards: usize, round: usize) -> io::Result<Measured> {
    // A child inherits the CPUs of the thread that starts it.
    process::run_on(&plan.servers[..shards])?;
    let started = start(server, shards, &plan.programs);
    let mut everywhere = plan.servers.clone();
    everywhere.extend(&plan.generator);
    process::run_on(&everywhere)?;
    let child = started?;
    let connections = plan.connections * shards;
    if matches!(server.starts, Starts::Kv(_)) {
        works::fill_kv(child.address, connections)?;
    }
    check_echo(child.address, work.shape)?;
    let generated = generator::Plan {
        address: child.address,
        connections,
        shape: work.shape,
        pace: work.pace,
        firehose: false,
        newcomers: None,
        cpus: plan.generator.clone(),
    };
    let (outcome, (threads, requests, time)) = generator::run(&generated, WARM_UP, |running| {
        let (before, from, began) =
            (Schedstat::of_each_thread(child.pid())?, running.answered(), Instant::now());
        running.go_on(plan.measured);
        let (requests, time) = (running.answered() - from, began.elapsed());
        Ok((used_since(&before, &Schedstat::of_each_thread(child.pid())?), requests, time))
    })?;
    if requests == 0 {
        return Err(io::Error::other("no reply came while it was measured"));
    }
    let cpu_ns: u64 = threads.iter().sum();
    let at = |quantile| outcome.latency.value_at_quantile(quantile) as f64 / 1000.0;
    Ok(Measured {
        work: work.name,
        server: server.name,
        shards,
        round,
        connections,
        requests_per_second: requests as f64 / time.as_secs_f64(),
        cpu_us: cpu_ns as f64 / 1000.0 / requests as f64,
        server_busy: cpu_ns as f64 / time.as_nanos() as f64 / shards as f64,
        generator_busy: outcome.busy,
        skew: skew(threads, shards),
        p50_us: at(0.5),
        p99_us: at(0.99),
    })
}

fn start(server: &Server, shards: usize, programs: &Path) -> io::Result<Child> {
    match server.starts {
        Starts::Own(name) => Child::start_sized(name, None, shards),
        Starts::Rival(mode) => Child::start_program(server.name, &programs.join(server.name), mode, None),
        Starts::Kv(driver) => Child::start_kv(&programs.join(works::KV), driver, shards),
    }
}

/// CPU time of each thread between two readings, in nanoseconds.
fn used_since(
    before: &[(std::ffi::OsString, String, Schedstat)],
    after: &[(std::ffi::OsString, String, Schedstat)],
) -> Vec<u64> {
    let earlier = |number| before.iter().find(|(one, ..)| one == number).map_or(0, |(.., stat)| stat.cpu_ns);
    after.iter().map(|(number, _, stat)| stat.cpu_ns.saturating_sub(earlier(number))).collect()
}

/// The busiest of the `shards` busiest threads, divided by their mean.
fn skew(mut threads: Vec<u64>, shards: usize) -> f64 {
    threads.sort_unstable_by(|one, other| other.cmp(one));
    threads.truncate(shards);
    let sum: u64 = threads.iter().sum();
    threads.first().map_or(1.0, |busiest| *busiest as f64 * shards as f64 / sum.max(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::{skew, split};

    #[test]
    fn servers_get_one_thread_of_each_core() {
        assert_eq!(
            split(vec![vec![0, 4], vec![1, 5], vec![2, 6], vec![3, 7]]),
            (vec![0, 1, 2, 3], vec![4, 5, 6, 7])
        );
        assert_eq!(split(vec![vec![0], vec![1], vec![2], vec![3]]), (vec![0, 1], vec![2, 3]));
        assert_eq!(split(vec![vec![0], vec![1], vec![2]]), (vec![0], vec![1, 2]));
    }

    #[test]
    fn skew_looks_at_as_many_threads_as_there_are_shards() {
        assert_eq!(skew(vec![1, 30, 10, 0], 2), 1.5);
        assert_eq!(skew(vec![7], 2), 2.0);
        assert_eq!(skew(vec![5, 5, 5, 5], 4), 1.0);
    }
}
