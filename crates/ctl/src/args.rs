//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use ringserve::doctor::Workload;
use ringserve::server::Driver;

use crate::admission::AdmissionOptions;
use crate::client::Place;
use crate::drill::causes::Cause;
use crate::drill::options::DrillOptions;
use crate::drill::overload::rows::Row;
use crate::text;

/// The environment variable with the token.
pub const TOKEN: &str = "RINGSERVE_ADMIN_TOKEN";

/// The environment variable with the address.
const AT: &str = "RINGSERVE_ADMIN";

/// Inspects a running ringserve server through its admin endpoint (Server::admin), and examines the
/// machine without one.
#[derive(Debug, Parser)]
#[command(
    name = "ringserve-ctl",
    version,
    after_help = "\
The address is that of Server::admin: http://127.0.0.1:9000 unless --at or RINGSERVE_ADMIN says another one. Where the
endpoint has a token it is read from RINGSERVE_ADMIN_TOKEN, so that no list of processes shows it.

Exit codes: 0 done, and nothing is wrong; of `doctor` 1 for a warning and 2 for an error; of `drill` 1 if a cause was not
named or a bar was missed; 3 if the command failed.

When users say that it hangs:
  ringserve-ctl top                        the first red stage of the funnel is the cause
  ringserve-ctl stalls                     which handler held its shard up, and by what
  ringserve-ctl connections --by outbox    which peers do not read"
)]
pub struct Cli {
    /// The admin endpoint: http://HOST:PORT, HOST:PORT, unix:/PATH or unix:@NAME
    #[arg(long, global = true, value_name = "ADDRESS")]
    pub at: Option<Place>,
    /// Prints JSON, as the endpoint sends it
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// The address of the endpoint.
    ///
    /// # Errors
    /// If the variable has another value: the commands would reach another server.
    pub fn place(&self) -> Result<Place, String> {
        if let Some(place) = &self.at {
            return Ok(place.clone());
        }
        match std::env::var(AT).ok().filter(|text| !text.is_empty()) {
            Some(text) => text.parse().map_err(|error| format!("{AT}: {error}")),
            None => Ok(Place::default()),
        }
    }
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Shows the server on the screen: funnel, shards, rates, closes, largest outboxes, stalls
    Top(TopOptions),
    /// Lists connections: those that hold most, were idle longest, sent most or are oldest
    Connections(ConnectionsOptions),
    /// Closes a connection, after the replies that are queued for it
    Close {
        /// The connection, as `connections` and `top` show it
        #[arg(value_name = "ID")]
        id: String,
    },
    /// Shuts the server down: no new connections, calls are answered, then it ends
    Drain,
    /// Shows the limits on admission, or changes them while the server runs
    Admission(AdmissionOptions),
    /// Lists the last stalls of shards, and their causes
    Stalls,
    /// Examines this machine for a server that does not run yet, or with --at the process of one
    /// that does
    Doctor(DoctorOptions),
    /// Plants ten causes of trouble in servers that it starts itself, and checks whether the funnel
    /// names each; `drill overload` asks such servers for more than they can do
    Drill(DrillOptions),
    /// The server of the drill of overload
    #[command(hide = true)]
    OverloadServer {
        /// The row for which it is prepared
        #[arg(long)]
        row: Row,
        #[arg(long)]
        driver: Driver,
        /// CPU time of a call
        #[arg(long)]
        micros: u64,
        /// Whether the service sheds
        #[arg(long)]
        sheds: bool,
    },
    /// The server of a drill
    #[command(hide = true)]
    DrillServer {
        /// The cause for which it is prepared
        cause: Cause,
        /// The path of its admin endpoint
        admin: PathBuf,
    },
}

#[derive(Clone, Debug, Args)]
pub struct TopOptions {
    /// Prints one frame as text and ends
    #[arg(long)]
    pub once: bool,
    /// Seconds between two reports
    #[arg(long, default_value_t = 1.0, value_parser = text::read_seconds)]
    pub interval: f64,
    /// Columns of the frame that --once prints
    #[arg(long, default_value_t = 120, value_parser = clap::value_parser!(u16).range(60..=400))]
    pub width: u16,
    /// Lines of that frame
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u16).range(20..=400))]
    pub height: u16,
}

#[derive(Clone, Debug, Args)]
pub struct ConnectionsOptions {
    /// The sort order
    #[arg(long, value_enum, default_value_t = By::Outbox)]
    pub by: By,
    /// The most connections listed
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub limit: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum By {
    /// Bytes that wait to be sent
    Outbox,
    /// Time since bytes last went either way
    Idle,
    /// Bytes received
    BytesIn,
    /// Time since they were accepted
    Age,
    /// Wait of their oldest call
    OldestCall,
}

impl By {
    /// The name that the endpoint uses.
    pub fn as_str(self) -> &'static str {
        match self {
            By::Outbox => "outbox",
            By::Idle => "idle",
            By::BytesIn => "bytes_in",
            By::Age => "age",
            By::OldestCall => "oldest_call",
        }
    }
}

#[derive(Clone, Debug, Args)]
pub struct DoctorOptions {
    /// Expectations: connections=1000000,accepts=20000; stall and round_trip in milliseconds,
    /// session in bytes, upstreams to one address
    #[arg(long = "for", value_name = "NAME=NUMBER,..", default_value = "")]
    pub expected: Workload,
    /// Shards of the planned server; one per CPU if left out
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub shards: Option<u16>,
    /// The server will share its port with another one (Server::share_port)
    #[arg(long)]
    pub share_port: bool,
    /// Leaves out findings that are only good to know
    #[arg(long)]
    pub quiet: bool,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn options_are_read() {
        let of = |line: &str| Cli::try_parse_from(line.split_whitespace());
        let cli =
            of("ringserve-ctl connections --by bytes-in --limit 5 --at unix:/run/a.sock --json").unwrap();
        assert!(cli.json && cli.place() == Ok("unix:/run/a.sock".parse().unwrap()));
        let Command::Connections(options) = cli.command else { panic!("another command") };
        assert_eq!((options.by.as_str(), options.limit), ("bytes_in", 5));
        let cli = of("ringserve-ctl doctor --for connections=5,accepts=7 --shards 2").unwrap();
        let Command::Doctor(options) = cli.command else { panic!("another command") };
        assert_eq!(options.expected, Workload::default().connections(5).accepts_per_second(7));
    }

    #[test]
    fn wrong_options_are_refused_with_what_there_is() {
        let of = |line: &str| Cli::try_parse_from(line.split_whitespace()).unwrap_err().to_string();
        for (line, words) in [
            ("ringserve-ctl connections --by colour", "oldest-call"),
            ("ringserve-ctl connections --limit 0", "1..=1000"),
            ("ringserve-ctl doctor --for conections=5", "there are connections"),
            ("ringserve-ctl top --interval 0", "0.1 to 3600"),
            ("ringserve-ctl top --at https://a:1", "tunnel"),
            ("ringserve-ctl close", "ID"),
        ] {
            let error = of(line);
            assert!(error.contains(words), "{line}: {error}");
        }
    }
}
