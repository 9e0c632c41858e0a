//! Options of `compare`.

use std::io;
use std::path::PathBuf;

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::measuring::Measuring;
use super::{refused, rivals};
use crate::compare::{Entrant, Plan, WORKS, find_work};
use crate::load::Target;
use crate::process;
use crate::servers::find;

/// Compare all servers at all work, and write a report.
///
/// Takes the product on both drivers, the bare loops, and the rivals that are built: --build builds
/// them, and missing ones are named and left out. Each server is started again for each
/// measurement, proves that it echoes correctly, and runs on one CPU while the generator has others
/// (in lock step they share one). Rounds are interleaved and their order shuffled. The duration is
/// printed at the start; with --works and --servers it is shorter.
///
/// Prints the report, and writes it as report.md, with report.json and a chart for each piece of
/// work.
#[derive(Args)]
pub(crate) struct CompareOptions {
    /// Work [default: all].
    #[arg(long, value_delimiter = ',', value_parser = PossibleValuesParser::new(WORKS.iter().map(|work| work.name)))]
    works: Vec<String>,
    /// Servers, by their names in the report [default: all].
    #[arg(long, value_delimiter = ',')]
    servers: Vec<String>,
    /// Directory of the rivals.
    #[arg(long, default_value = "target/rivals")]
    rivals: PathBuf,
    /// Build the rivals first, with scripts/rivals: a quarter of an hour the first time. From the
    /// root of the repository.
    #[arg(long)]
    build: bool,
    #[command(flatten)]
    measuring: Measuring,
    /// Directory for the report.
    #[arg(long, default_value = "target/compare")]
    out: PathBuf,
}

impl CompareOptions {
    pub(crate) fn plan(self) -> io::Result<Plan> {
        self.measuring.check()?;
        process::raise_open_files()?;
        if self.build {
            rivals::build(&self.rivals)?;
        }
        let works = match self.works.is_empty() {
            true => WORKS.iter().collect(),
            false => self.works.iter().filter_map(|name| find_work(name)).collect(),
        };
        let mut servers = own();
        servers.extend(self.rivals());
        if let Some(name) = self.servers.iter().find(|name| !servers.iter().any(|one| one.name == **name)) {
            let known: Vec<&str> = servers.iter().map(|one| one.name.as_str()).collect();
            return Err(refused(format!("--servers {name}: there are {}", known.join(", "))));
        }
        if !self.servers.is_empty() {
            servers.retain(|one| self.servers.contains(&one.name));
        }
        Ok(Plan {
            works,
            servers,
            measured: self.measuring.time(),
            rounds: self.measuring.rounds,
            server_cpu: self.measuring.server_cpu,
            cpus: self.measuring.cpus,
            out: self.out,
        })
    }

    /// The rivals that are built.
    fn rivals(&self) -> Vec<Entrant> {
        rivals::built(&self.rivals)
            .map(|(name, path)| {
                let mode = |mode| Some(Target::Program { name: name.clone(), path: path.clone(), mode });
                // A form that batches lines echoes raw bytes like the other.
                let raw = if name == "tokio-batched" { None } else { mode("raw") };
                let lines = if name == "ringline-direct" { None } else { mode("lines") };
                let awaits = if name == "tokio" { find("tokio-awaits").map(Target::Known) } else { None };
                Entrant { name: name.clone(), raw, lines, awaits, floor: false }
            })
            .collect()
    }
}

/// The product and the bare loops.
fn own() -> Vec<Entrant> {
    let target = |name: &str| find(name).map(Target::Known);
    let product = |name: &str| Entrant {
        name: name.to_owned(),
        raw: target(name),
        lines: target(&format!("{name}-lines")),
        awaits: target(&format!("{name}-awaits")),
        floor: false,
    };
    let floor = |name: &str| Entrant {
        name: name.to_owned(),
        raw: target(name),
        lines: None,
        awaits: None,
        floor: true,
    };
    vec![product("ringserve"), product("ringserve-epoll"), floor("limit-uring"), floor("limit-epoll")]
}
