//! The doctor: what of the machine, of the limits of the process and of the program's build stands
//! in a server's way.
//!
//! `Server::doctor` examines before a start, `ServerControl::doctor` a server that runs, with what
//! it went through. A start writes findings to the log that are [`Warn`](Severity::Warn) or worse,
//! one line each. A [`Finding`] has the value, what is needed with its formula, what happens
//! otherwise, and the command: there is no advice without a number behind it. A check that could
//! not look says that, too: it is no pass ([`NotChecked`](Severity::NotChecked)).
//!
//! Many checks ask for numbers that only the program or its operator knows: say them by
//! [`Workload`].
//!
//! ```
//! # mod ringserve {
//! #     pub use ringserve_base::doctor;
//! # }
//! use ringserve::doctor::Workload;
//!
//! let expected = Workload::default().connections(1000).accepts_per_second(500);
//! assert_eq!("connections=1000,accepts=500".parse(), Ok(expected));
//! ```

mod advice;
mod capacity;
mod case;
mod cpu;
mod limits;
mod network;
mod program;
#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

#[doc(hidden)]
pub use capacity::CONNECTION_BYTES;
use case::{Case, Texts};
#[doc(hidden)]
pub use case::{Lived, Rings, Setup};
#[doc(hidden)]
pub use network::migrates;
use ringserve_core::Time;
use ringserve_drivers::guarded;

use crate::clock::Deadline;
use crate::lines::{error, warn};
use crate::machine::files::{FileRefusal, MachineFiles};
use crate::machine::{MachineStats, read_of};

/// The severity of a [`Finding`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Severity {
    /// Good to know. Sound machines have some of these.
    Info,
    /// The check could not look: a file is refused, or `/proc` is not there. So it is no pass. The
    /// finding has the file and the reason.
    NotChecked,
    /// It costs something: latency, CPU time, or connections under load.
    Warn,
    /// The server will not do what is expected of it.
    Error,
}

/// The certainty of a [`Finding`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Certainty {
    /// It was tried, or the kernel counted it.
    Seen,
    /// It follows from values that were read, by a rule of the kernel.
    Computed,
    /// It follows from what is expected, or from figures that were measured elsewhere.
    Estimated,
}

/// A problem that the doctor found. Its text is one line with all parts.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// The name of the check, such as `descriptors`: one of [`checks`].
    pub check: &'static str,
    /// Its severity.
    pub severity: Severity,
    /// The subject, such as `RLIMIT_NOFILE`.
    pub what: String,
    /// Its value.
    pub value: String,
    /// The value that is needed, with the formula.
    pub needed: String,
    /// The consequence of leaving it as it is.
    pub otherwise: String,
    /// The command, or what to change in the program.
    pub fix: String,
    /// Its certainty.
    pub certainty: Certainty,
}

/// The workload that is expected of a server. Checks for which a number is missing are left out.
///
/// Its text form has the fields with a comma between: `connections=1000000,accepts=20000`. The
/// other names are `stall` and `round_trip` in milliseconds, `session` in bytes, and `upstreams`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[doc(alias = "Expected")]
pub struct Workload {
    /// Connections at once. Default: `ServerLimits::connections_max` if the
    /// program sets that.
    pub connections: Option<u64>,
    /// New connections in a second, in the worst second. Default: not known.
    pub accepts_per_second: Option<u64>,
    /// For how long a shard may be busy with something else while connections wait in its accept
    /// queue. Default: the longest stall that was seen, or 100 ms.
    pub longest_stall: Option<Duration>,
    /// The time between a peer's first packet and its third, for 99 of 100 peers. Default 200 ms.
    pub round_trip: Duration,
    /// Bytes that the service keeps for a connection. Default 0.
    pub session_bytes: u64,
    /// Connections that the server makes to one address of another server. Default 0.
    pub upstreams: u64,
}

impl Default for Workload {
    fn default() -> Workload {
        Workload {
            connections: None,
            accepts_per_second: None,
            longest_stall: None,
            round_trip: Duration::from_millis(200),
            session_bytes: 0,
            upstreams: 0,
        }
    }
}

impl Workload {
    ringserve_core::setters! {
        values { round_trip: Duration, session_bytes: u64, upstreams: u64, }
        options { connections: u64, accepts_per_second: u64, longest_stall: Duration, }
    }
}

/// As it is read.
impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Workload { connections, accepts_per_second, longest_stall, round_trip, session_bytes, upstreams } =
            self;
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let default = Workload::default();
        let parts = [
            ("connections", *connections),
            ("accepts", *accepts_per_second),
            ("stall", longest_stall.map(millis)),
            ("round_trip", (*round_trip != default.round_trip).then_some(millis(*round_trip))),
            ("session", (*session_bytes != default.session_bytes).then_some(*session_bytes)),
            ("upstreams", (*upstreams != default.upstreams).then_some(*upstreams)),
        ];
        let mut comma = "";
        for (name, number) in parts.into_iter().filter_map(|(name, number)| Some((name, number?))) {
            write!(f, "{comma}{name}={number}")?;
            comma = ",";
        }
        Ok(())
    }
}

impl FromStr for Workload {
    type Err = String;

    fn from_str(text: &str) -> Result<Workload, String> {
        let mut expected = Workload::default();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            // The text may be a peer's, and is repeated.
            let said: String = part.chars().take(60).collect();
            let number = value.trim().replace('_', "").parse().ok().filter(|number: &u64| *number <= 1 << 40);
            let number = number.ok_or_else(|| {
                format!("{said:?} is no name with a number; write it as in connections=1000000,accepts=20000")
            })?;
            match name.trim() {
                "connections" => expected.connections = Some(number),
                "accepts" | "accepts_per_second" => expected.accepts_per_second = Some(number),
                "stall" => expected.longest_stall = Some(Duration::from_millis(number)),
                "round_trip" => expected.round_trip = Duration::from_millis(number),
                "session" => expected.session_bytes = number,
                "upstreams" => expected.upstreams = number,
                _ => {
                    return Err(format!(
                        "{said:?} cannot be expected; there are connections, accepts, stall, round_trip, session and \
                         upstreams"
                    ));
                }
            }
        }
        Ok(expected)
    }
}

impl Severity {
    /// `info`, `not_checked`, `warn` or `error`.
    pub fn as_str(self) -> &'static str {
        match self {
            Severity::Info => "info",
            Severity::NotChecked => "not_checked",
            Severity::Warn => "warn",
            Severity::Error => "error",
        }
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl Certainty {
    /// `seen`, `computed` or `estimated`.
    pub fn as_str(self) -> &'static str {
        match self {
            Certainty::Seen => "seen",
            Certainty::Computed => "computed",
            Certainty::Estimated => "estimated",
        }
    }
}

impl fmt::Display for Certainty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// As `RLIMIT_NOFILE is 20000, needed: 501088 (..); otherwise ..; do: ..`, or `descriptors was not
/// checked: ..`.
impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.severity == Severity::NotChecked {
            return write!(
                f,
                "{} was not checked: {} is {}; do: {}",
                self.check, self.what, self.value, self.fix
            );
        }
        write!(f, "{} is {}", self.what, self.value)?;
        if !self.needed.is_empty() {
            write!(f, ", needed: {}", self.needed)?;
        }
        write!(f, "; otherwise {}; do: {} ({})", self.otherwise, self.fix, self.certainty)
    }
}

/// A check, which adds its findings about a case.
type Look = fn(&Case<'_>, &mut Vec<Finding>);

/// A check.
struct Check {
    name: &'static str,
    /// When a start leaves it out.
    at_start: AtStart,
    look: Look,
    /// Files that were read before it, by how their paths begin: those of [`MachineStats`].
    files: &'static [&'static str],
}

/// Whether the start of a server makes a check.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AtStart {
    Made,
    /// Another line of the start says the same.
    Said,
    /// It judges by what goes on, and a start tells little of that.
    TooEarly,
}

const fn check(name: &'static str, at_start: AtStart, look: Look) -> Check {
    Check { name, at_start, look, files: &[] }
}

/// One that judges by what these files said.
const fn check_of(
    name: &'static str,
    at_start: AtStart,
    look: Look,
    files: &'static [&'static str],
) -> Check {
    Check { name, at_start, look, files }
}

const CPU_GROUP: &[&str] = &["/proc/self/cgroup", "/sys/fs/cgroup/"];

/// All checks. A finding has the name of the check that made it.
const CHECKS: &[Check] = &[
    // The line of the driver says why it is epoll.
    check("io_uring", AtStart::Said, limits::io_uring),
    check("descriptors", AtStart::Made, limits::descriptors),
    // The start tries the rings of all shards.
    check("locked_memory", AtStart::Said, limits::locked_memory),
    check("accept_queue", AtStart::Made, network::accept_queue),
    check_of("syn_backlog", AtStart::Made, network::syn_backlog, &["/proc/net/netstat"]),
    check_of("conntrack", AtStart::Made, network::conntrack, &["/proc/sys/net/netfilter/"]),
    check_of(
        "tcp_memory",
        AtStart::Made,
        capacity::tcp_memory,
        &["/proc/net/sockstat", "/proc/sys/net/ipv4/tcp_mem"],
    ),
    check("socket_memory", AtStart::Made, capacity::socket_memory),
    check("memory", AtStart::Made, capacity::memory),
    check_of(
        "orphans",
        AtStart::Made,
        capacity::orphans,
        &["/proc/net/sockstat", "/proc/sys/net/ipv4/tcp_max_orphans"],
    ),
    check_of(
        "time_wait",
        AtStart::Made,
        capacity::time_wait,
        &["/proc/net/sockstat", "/proc/sys/net/ipv4/tcp_max_tw_buckets"],
    ),
    // A warning of the socket options.
    check("tcp_migrate_req", AtStart::Said, network::migrate),
    check_of("packets", AtStart::TooEarly, network::packets, &["/proc/net/softnet_stat", "/proc/net/dev"]),
    check("receive_queues", AtStart::Made, network::receive_queues),
    check("local_ports", AtStart::Made, network::local_ports),
    check("keep_alive", AtStart::Made, network::keep_alive),
    check("clock", AtStart::Made, cpu::clock),
    check_of("cpu_quota", AtStart::Made, cpu::quota, CPU_GROUP),
    check_of("cpu_throttled", AtStart::TooEarly, cpu::throttled, CPU_GROUP),
    check_of("cpu_steal", AtStart::TooEarly, cpu::steal, &["/proc/stat"]),
    check_of("cpu_pressure", AtStart::TooEarly, cpu::pressure, &["/proc/pressure/cpu"]),
    check("numa", AtStart::Made, cpu::numa),
    check("build", AtStart::Made, program::build),
    check("diagnosis", AtStart::Made, program::diagnosis),
    check("advice", AtStart::Made, advice::outdated),
];

/// The names of all checks.
pub fn checks() -> impl ExactSizeIterator<Item = &'static str> {
    CHECKS.iter().map(|check| check.name)
}

/// For how long a doctor without an earlier look watches what grows.
const WATCHED: Duration = Duration::from_millis(200);

/// Examines a server that does not run yet, for two tenths of a second.
#[doc(hidden)]
pub fn examine(setup: &Setup, expected: &Workload) -> Vec<Finding> {
    let machine = MachineFiles::here().noting();
    let before = read_of(&machine);
    let watched = Deadline::within(WATCHED);
    watched.pauses(WATCHED);
    diagnose(&Case::new(&machine, setup, expected).since(before))
}

/// The doctor's notes on a server.
#[doc(hidden)]
pub struct Record {
    setup: Setup,
    past: Mutex<Past>,
}

impl Record {
    /// Examines a server that starts, and writes findings to the log that are warnings or worse.
    pub fn begin(setup: Setup) -> Record {
        let (machine, expected) = (MachineFiles::here().noting(), Workload::default());
        let case = Case::new(&machine, &setup, &expected);
        tell(&case);
        let past = Mutex::new(Past::new(case.host));
        Record { setup, past }
    }

    /// Examines the server at work, at this time of its clock.
    pub fn examine(&self, expected: &Workload, lived: Lived, now: Time) -> Vec<Finding> {
        let machine = MachineFiles::here().noting();
        let case = Case::new(&machine, &self.setup, expected).of_server(lived);
        let before = self.past.lock().unwrap_or_else(PoisonError::into_inner).before(now, &case.host);
        diagnose(&case.since(before))
    }
}

/// Two looks at the machine are kept at most this often. Several may ask, one right after the
/// other, and what grew a moment ago is of interest to each of them.
const LOOKS_EVERY: Duration = Duration::from_secs(60);

/// Earlier looks at the machine, to see what grows. What grew once and rests since is no finding
/// for ever.
struct Past {
    /// The figures to compare with.
    older: MachineStats,
    newer: MachineStats,
    newer_at: Time,
}

impl Past {
    /// At the start of a server.
    fn new(host: MachineStats) -> Past {
        Past { older: host.clone(), newer: host, newer_at: Time::ZERO }
    }

    /// The figures to compare this look with: those of one that is [`LOOKS_EVERY`] old at least, or
    /// of the start.
    fn before(&mut self, now: Time, host: &MachineStats) -> MachineStats {
        // A process without descriptors reads nothing, with which nothing can be compared.
        if now - self.newer_at >= LOOKS_EVERY && host.cpu.is_some() {
            self.older = std::mem::replace(&mut self.newer, host.clone());
            self.newer_at = now;
        }
        self.older.clone()
    }
}

/// All findings, the worst first.
fn diagnose(case: &Case<'_>) -> Vec<Finding> {
    made(case, |_| true)
}

fn made(case: &Case<'_>, is_made: impl Fn(&Check) -> bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    CHECKS.iter().filter(|check| is_made(check)).for_each(|check| check.make(case, &mut findings));
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    findings
}

impl Check {
    /// Looks, and says so where it could not and found nothing for that.
    fn make(&self, case: &Case<'_>, found: &mut Vec<Finding>) {
        let before = found.len();
        case.machine.take_refused();
        (self.look)(case, found);
        let mut refused = case.machine.take_refused();
        let read_before = case.host_refused.iter();
        let is_its = |refusal: &&FileRefusal| self.files.iter().any(|file| refusal.path.starts_with(file));
        refused.extend(read_before.filter(is_its).cloned());
        if found.len() > before {
            return;
        }
        let Some(FileRefusal { path, why }) = refused.first() else { return };
        let mut others: Vec<&str> =
            refused.iter().map(|other| &*other.path).filter(|other| other != path).collect();
        others.sort_unstable();
        others.dedup();
        let more = if others.is_empty() { String::new() } else { format!(", and {} more", others.len()) };
        let texts = Texts {
            what: format!("{path}{more}"),
            value: format!("not readable: {why}"),
            needed: "a look at it".into(),
            otherwise: "what this check would find is not known".into(),
            fix: match why.ends_with("is not mounted") {
                true => format!("mount it, or let the container have it: {why}"),
                false => "let the server's user read it, or free what it lacks".into(),
            },
        };
        found.push(texts.of(self.name, Severity::NotChecked, Certainty::Seen));
    }
}

/// Lines that a start writes at most.
const LINES_MAX: usize = 8;

fn tell(case: &Case<'_>) {
    let findings = made(case, |check| check.at_start == AtStart::Made);
    let told = findings.iter().filter(|finding| finding.severity >= Severity::Warn);
    for finding in told.clone().take(LINES_MAX) {
        guarded(|| match finding.severity {
            Severity::Error => error!("doctor: {finding}"),
            _ => warn!("doctor: {finding}"),
        });
    }
    let missing: Vec<&Finding> =
        findings.iter().filter(|finding| finding.severity == Severity::NotChecked).collect();
    if let Some(first) = missing.first() {
        let names: Vec<&str> = missing.iter().map(|finding| finding.check).collect();
        let (names, what, value) = (names.join(", "), &first.what, &first.value);
        guarded(|| warn!("doctor: not checked: {names}: {what} is {value}"));
    }
    let rest = told.skip(LINES_MAX).count();
    if rest > 0 {
        guarded(|| warn!("doctor: {rest} more findings: see Server::doctor, or `ringserve-ctl doctor`"));
    }
}
