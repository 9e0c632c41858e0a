//! Servers where io_uring is blocked: epoll serves instead and the log has the reason, and a server
//! that demands io_uring gets the cause and the fix as an error. Under the profile of `deploy/`,
//! which allows io_uring, rings serve.
//!
//! Each case is a separate process, since a seccomp filter stays. The sysctl cases hold for the
//! whole system, so they run only with `RINGSERVE_TEST_SYSCTL=1`, as root, and not together with
//! other tests: `RINGSERVE_TEST_SYSCTL=1 cargo test -p ringserve-tests --test processes blocked::`.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringserve::server::Driver;
use ringserve_tests::client::{End, frame, frames};
use ringserve_tests::{Lab, On, no_time_limits, order, pattern};
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use serde::Deserialize;
use serde_json::{Value, json};

/// Names what the process has to block; its presence makes the process the child.
const BLOCK: &str = "RINGSERVE_TEST_BLOCK";

/// Begins the line with the result of the server that demands io_uring; before it is the log of the
/// other one.
const DEMANDED: &str = "demanded: ";

/// The numbers of the three calls, which are the same on every architecture.
const SETUP: i64 = 425;
const ENTER: i64 = 426;
const REGISTER: i64 = 427;

const READV: i64 = if cfg!(target_arch = "x86_64") { 19 } else { 65 };

const SYSCTL: &str = "/proc/sys/kernel/io_uring_disabled";

/// Sysctl cases must not run at the same time as others.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn server_runs_on_io_uring_where_nothing_is_blocked() {
    let _alone = alone();
    let found = child("nothing");
    assert!(found.log.contains("driver: io_uring (it works here)"), "{found:?}");
    assert_eq!(found.demanded, "started");
}

#[test]
fn setup_forbidden_as_docker_does() {
    let found = without(SETUP, Errno::PERM);
    found.names(&["io_uring_setup is blocked", "seccomp", "allow io_uring_setup"]);
}

#[test]
fn setup_hidden_or_not_in_the_kernel() {
    let found = without(SETUP, Errno::NOSYS);
    found.names(&[
        "io_uring_setup is not there",
        "seccomp",
        "allow io_uring_setup",
        "the kernel has no io_uring",
    ]);
}

#[test]
fn rings_can_be_made_but_not_entered() {
    for errno in [Errno::PERM, Errno::NOSYS] {
        without(ENTER, errno).names(&["io_uring_enter is", "seccomp", "allow io_uring_setup"]);
    }
}

#[test]
fn rings_can_be_made_but_nothing_registered() {
    for errno in [Errno::PERM, Errno::NOSYS] {
        without(REGISTER, errno).names(&["file table is", "seccomp", "io_uring_register in it"]);
    }
}

/// Receives into several buffers at once use `readv` if it is allowed.
#[test]
fn epoll_serves_where_its_receives_of_several_are_refused() {
    let _alone = alone();
    for errno in [Errno::PERM, Errno::NOSYS, Errno::ACCESS] {
        let errno = errno.raw_os_error();
        child(&format!("{SETUP} {errno}, {READV} {errno}")).on_epoll();
    }
}

#[test]
fn profile_of_deploy_allows_io_uring() {
    let _alone = alone();
    let found = child("profile");
    assert!(found.log.contains("driver: io_uring (it works here)"), "{found:?}");
    assert_eq!(found.demanded, "started");
}

#[test]
fn profile_without_its_ring_calls_leaves_epoll() {
    let _alone = alone();
    let found = child("profile without rings");
    found.on_epoll();
    found.names(&["io_uring_setup is blocked", "seccomp", "allow io_uring_setup"]);
}

#[test]
fn switched_off_by_sysctl() {
    if std::env::var_os("RINGSERVE_TEST_SYSCTL").is_none_or(|wish| wish != "1") {
        println!("skipped: it switches io_uring off for the whole system; RINGSERVE_TEST_SYSCTL=1 runs it");
        return;
    }
    let _alone = alone();
    let _restored = Sysctl(fs::read_to_string(SYSCTL).expect("Linux 6.6 or later"));
    Sysctl::set("1");
    let found = child("privileges");
    found.on_epoll();
    found.names(&["kernel.io_uring_disabled is 1", "set it to 0", "kernel.io_uring_group"]);
    // Privileged processes may still use it.
    assert!(child("nothing").log.contains("driver: io_uring (it works here)"));
    Sysctl::set("2");
    let found = child("nothing");
    found.on_epoll();
    found.names(&["kernel.io_uring_disabled is 2", "sysctl kernel.io_uring_disabled=0"]);
}

/// The sysctl's previous value, which is written back when this is dropped.
struct Sysctl(String);

impl Sysctl {
    fn set(value: &str) {
        fs::write(SYSCTL, value).expect("RINGSERVE_TEST_SYSCTL=1 needs root");
    }
}

impl Drop for Sysctl {
    fn drop(&mut self) {
        Sysctl::set(&self.0);
    }
}

/// Results of a process.
#[derive(Debug)]
struct Found {
    /// The log of a server that may choose its driver.
    log: String,
    /// The error of a server that demands io_uring.
    demanded: String,
}

impl Found {
    /// Checks that the server chose epoll, and logged its reason in one line.
    #[track_caller]
    fn on_epoll(&self) {
        let lines: Vec<&str> = self.log.lines().filter(|line| line.contains("io_uring")).collect();
        let [line] = lines.as_slice() else { panic!("one line about io_uring, not {lines:?}") };
        assert!(line.contains("driver: epoll (io_uring cannot be used: "), "{line}");
        assert!(line.contains(&self.demanded), "the same reason: {line}, and {}", self.demanded);
        assert!(line.contains("RLIMIT_NOFILE"), "what else is different on epoll: {line}");
    }

    /// Checks that the reason has all of these parts.
    #[track_caller]
    fn names(&self, parts: &[&str]) {
        for part in parts {
            assert!(self.demanded.contains(part), "{part} is missing in: {}", self.demanded);
        }
    }
}

#[track_caller]
fn without(call: i64, errno: Errno) -> Found {
    let _alone = alone();
    let found = child(&format!("{call} {}", errno.raw_os_error()));
    found.on_epoll();
    found
}

/// Runs [`a_server_in_a_process_where_something_is_blocked`] in a child process.
#[track_caller]
fn child(block: &str) -> Found {
    let done = Command::new(std::env::current_exe().unwrap())
        .args([
            "blocked::a_server_in_a_process_where_something_is_blocked",
            "--exact",
            "--ignored",
            "--nocapture",
        ])
        .env(BLOCK, block)
        // It would decide for the server that may choose.
        .env_remove("RINGSERVE_DRIVER")
        .output()
        .expect("the test binary runs again");
    let text = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{block}: {text}\n{}", String::from_utf8_lossy(&done.stderr));
    let (log, rest) = text.split_once(DEMANDED).expect("it got that far");
    Found { log: log.to_owned(), demanded: rest.lines().next().unwrap_or_default().to_owned() }
}

#[test]
#[ignore = "the child process of the other tests here, which start it; alone: RINGSERVE_TEST_BLOCK='425 1' cargo test -p ringserve-tests --test processes blocked::a_server_in_a_process_where_something_is_blocked -- --exact --ignored --nocapture"]
fn a_server_in_a_process_where_something_is_blocked() {
    let Ok(block) = std::env::var(BLOCK) else { return };
    match block.as_str() {
        "nothing" => {}
        "privileges" => drop_privileges(),
        "profile" => confine(&profile()),
        "profile without rings" => {
            let mut profile = profile();
            profile.retain(|rule| !rule.names.iter().any(|name| name.starts_with("io_uring")));
            confine(&profile);
        }
        calls => {
            for call in calls.split(", ") {
                let (call, errno) = call.split_once(' ').unwrap();
                forbid(call.parse().unwrap(), errno.parse().unwrap());
            }
        }
    }
    tracing_subscriber::fmt().with_ansi(false).init();
    serves();
    match start_demanded() {
        Ok(()) => println!("{DEMANDED}started"),
        Err(error) => println!("{DEMANDED}{error}"),
    }
}

fn start_demanded() -> Result<(), ringserve::Error> {
    let server = On { driver: Driver::IoUring, ..On::default() }.server(no_time_limits());
    let shared = Arc::default();
    let running = server.start(move |_| ringserve_tests::Puppet::new(Arc::clone(&shared)))?;
    running.shutdown();
    running.wait().map(|_| ())
}

/// Checks that a server that may choose answers: small and large, one after another and all at
/// once, to the last.
#[track_caller]
fn serves() {
    let lab = Lab::on(On::default(), no_time_limits());
    let mut clients: Vec<_> = (0..50).map(|_| lab.client()).collect();
    for (n, client) in clients.iter_mut().enumerate() {
        let payload = order::echo(pattern(n * 4_001));
        assert!(client.ask(&payload) == payload, "an echo of {} bytes", payload.len());
    }
    for client in &mut clients {
        client.write(&frame(order::echo("hello")).repeat(100));
        client.finish_writing();
    }
    for mut client in clients {
        let (wire, end) = client.read_to_end();
        assert_eq!((frames(&wire).len(), end), (100, End::Fin));
    }
    lab.finish();
}

/// Makes a system call fail permanently with this error on the calling thread and those it starts.
fn forbid(call: i64, errno: i32) {
    let filter = SeccompFilter::new(
        [(call, Vec::new())].into(),
        SeccompAction::Allow,
        SeccompAction::Errno(errno as u32),
        std::env::consts::ARCH.try_into().expect("an architecture that seccomp knows"),
    );
    let program: BpfProgram = filter.unwrap().try_into().unwrap();
    seccompiler::apply_filter(&program).expect("every process may filter itself");
}

/// A rule of a profile as container runtimes read it.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Rule {
    names: Vec<String>,
    action: String,
    #[serde(default)]
    errno_ret: u32,
    #[serde(default)]
    args: Vec<Arg>,
}

/// The condition on an argument of the call: `value` has the bits that are compared with
/// `value_two`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Arg {
    index: u8,
    value: u64,
    value_two: u64,
    op: String,
}

fn profile() -> Vec<Rule> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Profile {
        default_action: String,
        default_errno_ret: u32,
        syscalls: Vec<Rule>,
    }
    let text = include_str!("../../deploy/seccomp.json");
    let profile: Profile = serde_json::from_str(text).expect("a profile");
    assert_eq!((&*profile.default_action, profile.default_errno_ret), ("SCMP_ACT_ERRNO", 1));
    profile.syscalls
}

/// Loads a profile permanently on the calling thread and those it starts. Of filters with different
/// errors the one that was loaded last decides, so the rules that name an error follow those that
/// allow.
fn confine(profile: &[Rule]) {
    let (mut allowed, mut errors) = (Vec::new(), BTreeMap::<u32, Vec<Value>>::new());
    for rule in profile {
        let args: Vec<Value> = rule.args.iter().map(condition).collect();
        for name in rule.names.iter().filter(|name| is_known(name)) {
            let call = match &args[..] {
                [] => json!({ "syscall": name }),
                args => json!({ "syscall": name, "args": args }),
            };
            match &*rule.action {
                "SCMP_ACT_ALLOW" => allowed.push(call),
                "SCMP_ACT_ERRNO" => errors.entry(rule.errno_ret).or_default().push(call),
                other => panic!("the action {other}"),
            }
        }
    }
    assert!(allowed.len() > 100, "the calls of this architecture are known");
    load(&json!({ "errno": 1 }), &json!("allow"), allowed);
    for (errno, calls) in errors {
        load(&json!("allow"), &json!({ "errno": errno }), calls);
    }
}

fn condition(arg: &Arg) -> Value {
    assert_eq!(arg.op, "SCMP_CMP_MASKED_EQ");
    json!({ "index": arg.index, "type": "qword", "op": { "masked_eq": arg.value }, "val": arg.value_two })
}

/// False for a call that another architecture has.
fn is_known(name: &str) -> bool {
    compiled(&json!("allow"), &json!({ "errno": 1 }), vec![json!({ "syscall": name })]).is_ok()
}

fn compiled(
    otherwise: &Value,
    matching: &Value,
    calls: Vec<Value>,
) -> Result<BpfProgram, seccompiler::Error> {
    let filter =
        json!({ "all": { "mismatch_action": otherwise, "match_action": matching, "filter": calls } });
    let arch = std::env::consts::ARCH.try_into().expect("an architecture that seccomp knows");
    let mut programs = seccompiler::compile_from_json(filter.to_string().as_bytes(), arch)?;
    Ok(programs.remove("all").expect("the filter that was named"))
}

fn load(otherwise: &Value, matching: &Value, calls: Vec<Value>) {
    let program = compiled(otherwise, matching, calls).expect("a filter");
    seccompiler::apply_filter(&program).expect("every process may filter itself");
}

/// Gives the calling thread, and those it starts, an unprivileged user, as far as io_uring is
/// concerned.
fn drop_privileges() {
    let mut sets = capabilities(None).unwrap();
    sets.effective.remove(CapabilitySet::SYS_ADMIN);
    sets.permitted.remove(CapabilitySet::SYS_ADMIN);
    set_capabilities(None, sets).expect("privileges can be given up");
}
