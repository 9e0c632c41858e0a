//! The drill: plants causes of trouble, and checks whether the first red stage of the funnel is the
//! planted one.
//!
//! ```text
//!   drill ──starts──▶ drill-server, prepared for its cause ◀──load── drill
//!     ├──reads /report.json, 5 times a second, until a stage is red──┘
//!     └──with --hold: a browser's address, which relays to the server's endpoint
//! ```
//!
//! Each server is a process, which ends with its case. Cases that need a network with other
//! settings run in a namespace; causes that a user may not plant are reported and left out.

pub mod causes;
mod left;
mod load;
pub mod options;
pub mod overload;
mod relay;
mod server;

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use ringserve_report::{Report, Stage, StageName, State};
use serde::{Deserialize, Serialize};

use self::options::DrillOptions;
use crate::client::{Endpoint, Failure, Place};
use crate::text::{plain, table};
use causes::Cause;
use left::Left;
use relay::Relay;
pub use server::serve;

/// Pause between two reports, which are made at most five times a second.
const EACH: Duration = Duration::from_millis(200);

/// Time limit for a server to start, and to be calm.
const STARTS_WITHIN: Duration = Duration::from_secs(10);

/// The share of a second in which others had a CPU that a shard wanted, from which on the machine
/// is too busy for a verdict.
const BUSY: f64 = 0.3;

/// Attempts at a case on a busy machine.
const TRIES: usize = 3;

/// The result for a cause.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct Outcome {
    cause: String,
    expected: String,
    /// The first red stage.
    found: Option<String>,
    /// Time from the first act of a peer to the first report with a red stage.
    seconds: Option<f64>,
    /// The sentence of that stage.
    why: String,
    /// Whether other programs had the CPUs of the server meanwhile.
    busy: bool,
    /// The reason why it was not planted.
    left_out: Option<String>,
}

impl Outcome {
    fn of(cause: Cause) -> Outcome {
        Outcome { cause: cause.to_string(), expected: cause.stage().to_string(), ..Outcome::default() }
    }

    fn left_out(cause: Cause, why: impl Into<String>) -> Outcome {
        Outcome { left_out: Some(why.into()), ..Outcome::of(cause) }
    }

    fn is_right(&self) -> bool {
        let word =
            Cause::ALL.iter().find(|cause| cause.name() == self.cause).map_or("", |cause| cause.word());
        self.left_out.is_some() || self.found.as_ref() == Some(&self.expected) && self.why.contains(word)
    }

    fn row(&self) -> Vec<String> {
        let verdict = match (&self.left_out, self.is_right()) {
            (Some(_), _) => "left out",
            (None, true) => "ok",
            (None, false) => "WRONG",
        };
        vec![
            self.cause.clone(),
            self.expected.clone(),
            self.found
                .clone()
                .unwrap_or_else(|| if self.left_out.is_some() { "" } else { "none" }.to_owned()),
            self.seconds.map_or_else(String::new, |seconds| format!("{seconds:.1}")),
            verdict.to_owned(),
            plain(self.left_out.as_ref().unwrap_or(&self.why)).chars().take(100).collect(),
        ]
    }
}

/// Plants all requested causes, prints the result of each, and returns 1 if one was not named.
pub fn run(options: &DrillOptions, json: bool) -> Result<u8, Failure> {
    left::remove_at_signals()?;
    let causes = if options.only.is_empty() { Cause::ALL.to_vec() } else { options.only.clone() };
    let within = Duration::from_secs_f64(options.within);
    let hold = Duration::from_secs_f64(options.hold);
    let relay = (!hold.is_zero() && options.alone.is_none()).then(Relay::start).transpose()?;
    let mut outcomes = Vec::new();
    for cause in causes {
        if !json {
            eprintln!("{cause}: {} has to be red within {within:?}", cause.stage());
        }
        if let Some(relay) = &relay {
            eprintln!("its page: {}, until {hold:?} after it is", relay.url());
        }
        let once = || {
            if let Some(admin) = &options.alone {
                return drilled(cause, within, hold, admin);
            }
            let folder = Folder::new(cause)?;
            let admin = folder.0.join("admin.sock");
            if let Some(relay) = &relay {
                relay.lead_to(&admin);
            }
            match cause.needs_network() {
                true => in_network(cause, options, &folder.0, &admin),
                false => drilled(cause, within, hold, &admin),
            }
        };
        let mut outcome = once()?;
        for _ in 1..TRIES {
            // Load from other programs is a cause too, and was not planted.
            if outcome.is_right() || !outcome.busy {
                break;
            }
            outcome = once()?;
        }
        outcomes.push(outcome);
    }
    if json {
        let text = serde_json::to_string_pretty(&outcomes).map_err(|error| Failure(error.to_string()))?;
        println!("{text}");
    } else {
        let rows: Vec<_> = outcomes.iter().map(Outcome::row).collect();
        print!("{}", table(&["cause", "expected", "first red", "seconds ", "", "why"], &rows));
        let planted = outcomes.iter().filter(|outcome| outcome.left_out.is_none());
        let named = planted.clone().filter(|outcome| outcome.is_right()).count();
        println!("{named} of {} causes named", planted.count());
        if outcomes.iter().any(|outcome| outcome.busy && !outcome.is_right()) {
            println!("other programs have the CPUs of this machine: repeat the drill where it is quiet");
        }
    }
    Ok(u8::from(!outcomes.iter().all(Outcome::is_right)))
}

/// The commands that create a network in which the firewall tracks, and has little room: the
/// process that is run sees its limit in a file that is mounted over the kernel's, since that one
/// belongs to the whole machine.
const NETWORK: &str = "ip link set lo up && mount --make-rprivate / && \
    mount --bind \"$1\" /proc/sys/net/netfilter/nf_conntrack_max && \
    iptables -A INPUT -m conntrack --ctstate NEW -j ACCEPT && shift && exec \"$@\"";

/// Runs one case in a network namespace, as another process of this program.
fn in_network(cause: Cause, options: &DrillOptions, folder: &Path, admin: &Path) -> Result<Outcome, Failure> {
    let limit = folder.join("nf_conntrack_max");
    fs::write(&limit, format!("{}\n", load::TRACKED_MAX))?;
    let shell = |program: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["-n", "-m", "sh", "-c", NETWORK, "sh"]).arg(&limit).args(program);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        command
    };
    let tried = shell(&["true"]).stderr(Stdio::piped()).output();
    match tried {
        Ok(done) if done.status.success() => {}
        Ok(done) => {
            let why = String::from_utf8_lossy(&done.stderr);
            let why = why.lines().next().unwrap_or("unshare failed");
            return Ok(Outcome::left_out(cause, format!("no network for it can be made here: {why}")));
        }
        Err(error) => return Ok(Outcome::left_out(cause, format!("unshare cannot be run: {error}"))),
    }
    let program = std::env::current_exe()?;
    let program = program.to_string_lossy();
    let (name, admin) = (cause.to_string(), admin.to_string_lossy());
    let (within, hold) = (options.within.to_string(), options.hold.to_string());
    let arguments = [&*program, "--json", "drill", "--alone", &admin, "--only", &name];
    let arguments = [&arguments[..], &["--within", &within, "--hold", &hold]].concat();
    let alone = shell(&arguments).stderr(Stdio::inherit()).spawn()?;
    let kept = Left::Process(alone.id());
    left::add(kept.clone());
    let done = alone.wait_with_output();
    left::take(&kept);
    let done = done?;
    let outcomes: Vec<Outcome> = serde_json::from_slice(&done.stdout)
        .map_err(|error| Failure(format!("the drill in a network printed nothing readable ({error})")))?;
    outcomes.into_iter().next().ok_or_else(|| Failure("the drill in a network printed nothing".to_owned()))
}

/// A directory that is removed with all its content.
struct Folder(PathBuf);

impl Folder {
    fn new(cause: Cause) -> Result<Folder, Failure> {
        let path = std::env::temp_dir().join(format!("ringserve-drill-{}-{cause}", std::process::id()));
        left::add(Left::Folder(path.clone()));
        let folder = Folder(path);
        fs::create_dir_all(&folder.0)?;
        Ok(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
        left::take(&Left::Folder(self.0.clone()));
    }
}

/// A control group for the process of a server.
struct Group(PathBuf);

/// A file of a control group with its value, in the second version and in the first.
type Setting = [(&'static str, &'static str); 2];

/// A fifth of a CPU.
const QUOTA: Setting = [("cpu.max", "20000 100000"), ("cpu.cfs_quota_us", "20000")];

/// Precedence over all others: a server among other programs would be starved as well, and that is
/// another cause.
const FIRST: Setting = [("cpu.weight", "10000"), ("cpu.shares", "262144")];

impl Group {
    /// Creates a group in whichever version of control groups has the controller.
    fn new(setting: Setting) -> Result<Group, String> {
        let name = format!("ringserve-drill-{}", std::process::id());
        let mut failed = "there are no control groups for CPU time".to_owned();
        for (root, (file, value)) in ["/sys/fs/cgroup", "/sys/fs/cgroup/cpu"].into_iter().zip(setting) {
            if !Path::new(root).join("cgroup.procs").exists() {
                continue;
            }
            let group = Group(Path::new(root).join(&name));
            left::add(Left::Group(group.0.clone()));
            match fs::create_dir(&group.0).and_then(|()| fs::write(group.0.join(file), value)) {
                Ok(()) => return Ok(group),
                Err(error) => failed = format!("no control group can be made in {root}: {error}"),
            }
        }
        Err(failed)
    }

    fn take(&self, server: &Server) -> Result<(), Failure> {
        Ok(fs::write(self.0.join("cgroup.procs"), server.0.id().to_string())?)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Its process was waited for.
        let _ = fs::remove_dir(&self.0);
        left::take(&Left::Group(self.0.clone()));
    }
}

/// The process of a server, killed at the end of its case.
struct Server(Child);

impl Server {
    /// Starts it, and waits for its address.
    fn start(cause: Cause, admin: &Path) -> Result<(Server, SocketAddr), Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("drill-server").arg(cause.name()).arg(admin);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        left::add(Left::Process(child.id()));
        let output = child.stdout.take();
        let server = Server(child);
        let (tell, told) = channel();
        // A read has no time limit; this thread ends with the process.
        thread::spawn(move || {
            let mut line = String::new();
            let read = output.map(|output| BufReader::new(output).read_line(&mut line));
            let _ = tell.send(read.is_some_and(|read| read.is_ok()).then_some(line));
        });
        let line = told.recv_timeout(STARTS_WITHIN).ok().flatten().unwrap_or_default();
        let addr =
            line.trim().parse().map_err(|_| Failure(format!("the server for {cause} does not start")))?;
        Ok((server, addr))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        // Before the process is waited for: its number may belong to another afterwards.
        left::take(&Left::Process(self.0.id()));
        let _ = self.0.wait();
    }
}

/// Runs one case.
fn drilled(cause: Cause, within: Duration, hold: Duration, admin: &Path) -> Result<Outcome, Failure> {
    let group = match cause {
        Cause::Quota => match Group::new(QUOTA) {
            Ok(group) => Some(group),
            Err(why) => return Ok(Outcome::left_out(cause, why)),
        },
        Cause::Cpu => Group::new(FIRST).ok(),
        _ => None,
    };
    let (server, addr) = Server::start(cause, admin)?;
    if let Some(group) = &group {
        group.take(&server)?;
    }
    let endpoint = Endpoint::new(Place::Unix(admin.display().to_string()), None);
    if let Some(red) = before(&endpoint)? {
        let why = format!("red before anything was planted: {}", red.why);
        return Ok(Outcome { found: Some(red.name.to_string()), why, busy: true, ..Outcome::of(cause) });
    }
    let mut busy = false;
    let stop = AtomicBool::new(false);
    let red = thread::scope(|scope| {
        let begun = Instant::now();
        scope.spawn(|| load::load(cause, addr, &stop));
        let red = first_red(&endpoint, begun, within, &mut busy);
        if matches!(red, Ok(Some(_))) {
            thread::sleep(hold);
        }
        stop.store(true, Ordering::Relaxed);
        // The load's waits end with the server.
        drop(server);
        red
    })?;
    drop(group);
    let outcome = Outcome { busy, ..Outcome::of(cause) };
    Ok(match red {
        Some((stage, after)) => Outcome {
            found: Some(stage.name.to_string()),
            seconds: Some(after.as_secs_f64()),
            why: stage.why,
            ..outcome
        },
        None => Outcome { why: format!("no stage is red after {within:?}"), ..outcome },
    })
}

/// The stage that is red at first, if it stays so: the server has just started.
fn before(endpoint: &Endpoint) -> Result<Option<Stage>, Failure> {
    let deadline = Instant::now() + STARTS_WITHIN;
    loop {
        let red = red_of(&endpoint.get_json("/report.json")?, &mut false);
        if red.is_none() || Instant::now() >= deadline {
            return Ok(red);
        }
        thread::sleep(EACH);
    }
}

/// The first red stage, except one that reports only that other programs have the CPUs.
fn red_of(report: &Report, busy: &mut bool) -> Option<Stage> {
    let is_starved = report.shards.iter().any(|shard| shard.starved >= BUSY);
    *busy |= is_starved;
    let red = report.cause().filter(|stage| stage.state == State::Lost)?;
    let is_noise = is_starved && red.name == StageName::Machine && red.why.contains("others had its CPU");
    (!is_noise).then(|| red.clone())
}

fn first_red(
    endpoint: &Endpoint,
    begun: Instant,
    within: Duration,
    busy: &mut bool,
) -> Result<Option<(Stage, Duration)>, Failure> {
    while begun.elapsed() < within {
        // A request that fails is followed by another: few descriptors may keep the endpoint from
        // accepting for a moment.
        match endpoint.get_json("/report.json").map(|report| red_of(&report, busy)) {
            Ok(Some(red)) => return Ok(Some((red, begun.elapsed()))),
            Ok(None) => {}
            Err(failure) if begun.elapsed() + EACH >= within => return Err(failure),
            Err(_) => {}
        }
        thread::sleep(EACH);
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use ringserve_report::ShardReport;

    use super::*;

    #[test]
    fn other_programs_on_the_machine_are_no_cause() {
        let stage = |name, why: &str| Stage { name, state: State::Lost, why: why.into(), ..Stage::default() };
        let starved = |starved| ShardReport { starved, ..ShardReport::default() };
        let report =
            |stage, share| Report { funnel: vec![stage], shards: vec![starved(share)], ..Report::default() };
        let others = stage(StageName::Machine, "shard 0 could have run, and others had its CPU");
        let mut busy = false;
        assert_eq!(red_of(&report(others.clone(), 0.7), &mut busy), None);
        assert!(busy);
        let quota = stage(StageName::Machine, "the control group's quota of 0.2 CPUs");
        assert_eq!(red_of(&report(quota.clone(), 0.7), &mut false), Some(quota));
        let handler = stage(StageName::Handler, "shard 0 is blocked");
        assert_eq!(red_of(&report(handler.clone(), 0.7), &mut false), Some(handler));
        assert_eq!(
            red_of(
                &Report { funnel: vec![Stage { state: State::Warn, ..others }], ..Report::default() },
                &mut false
            ),
            None
        );
    }

    #[test]
    fn outcome_is_right_by_its_first_red_stage() {
        let found = Some("handler".to_owned());
        let why = "a call waits for a lock".to_owned();
        let named = Outcome { found: found.clone(), seconds: Some(1.26), why, ..Outcome::of(Cause::Lock) };
        assert!(named.is_right());
        assert!(!Outcome { why: "a call computes".into(), found, ..Outcome::of(Cause::Lock) }.is_right());
        assert_eq!(named.row()[..5], ["lock", "handler", "handler", "1.3", "ok"].map(String::from));
        let (found, why) = (Some("table".into()), "no slot for a lock".into());
        let other = Outcome { found, why, ..Outcome::of(Cause::Lock) };
        assert_eq!((other.is_right(), &*other.row()[4]), (false, "WRONG"));
        let none = Outcome::of(Cause::Lock);
        assert_eq!((none.is_right(), &*none.row()[2]), (false, "none"));
        let left_out = Outcome::left_out(Cause::Quota, "no control group");
        assert_eq!(
            (left_out.is_right(), &*left_out.row()[4], &*left_out.row()[5]),
            (true, "left out", "no control group")
        );
    }
}
