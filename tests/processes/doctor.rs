//! The doctor on machines with real faults: in a network with other settings, with low limits, in a
//! sandbox.

use std::fs;
use std::time::{Duration, Instant};

use ringserve::doctor::{Workload, checks};
use ringserve::framing::LengthPrefix;
use ringserve::limits::ServerLimits;
use ringserve::net::SocketOptions;
use ringserve::{Limits, Server};
use ringserve_tests::child::{Process, is_child};
use ringserve_tests::{Puppet, SOON, eventually, on_epoll};
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

/// Descriptors that a child may have.
const DESCRIPTORS: u64 = 512;

fn low(resource: Resource, limit: u64) {
    setrlimit(resource, Rlimit { current: Some(limit), maximum: Some(limit) }).unwrap();
}

/// Plants in this process the fault that the parent's word names.
fn plant(word: &str) {
    let set = |file: &str, value: &str| fs::write(format!("/proc/sys/net/{file}"), value).unwrap();
    match word {
        "network" => {
            set("core/somaxconn", "8");
            set("ipv4/tcp_max_syn_backlog", "16");
            set("ipv4/tcp_syncookies", "0");
            set("ipv4/tcp_migrate_req", "0");
            set("ipv4/ip_local_port_range", "40000 40099");
            set("ipv4/tcp_max_tw_buckets", "1000");
        }
        "descriptors" => low(Resource::Nofile, DESCRIPTORS),
        "memory" => low(Resource::As, 3 << 30),
        "memlock" => {
            low(Resource::Memlock, 256 << 10);
            let mut sets = capabilities(None).unwrap();
            sets.effective.remove(CapabilitySet::IPC_LOCK);
            sets.permitted.remove(CapabilitySet::IPC_LOCK);
            set_capabilities(None, sets).unwrap();
        }
        "sandbox" => {
            let filter = SeccompFilter::new(
                [(libc::SYS_io_uring_setup, Vec::new())].into(),
                SeccompAction::Allow,
                SeccompAction::Errno(libc::EPERM as u32),
                std::env::consts::ARCH.try_into().expect("an architecture that seccomp knows"),
            );
            let program: BpfProgram = filter.unwrap().try_into().unwrap();
            seccompiler::apply_filter(&program).unwrap();
        }
        other => panic!("{other} cannot be planted"),
    }
}

fn server() -> Server {
    let sockets = SocketOptions::default().keep_alive(None);
    let limits = Limits::default().idle_timeout(None);
    Server::bind("127.0.0.1:0").shards(2).share_port(true).sockets(sockets).limits(limits)
}

/// The child: plants the faults of its input, and reports the doctor's findings, or the log of a
/// start.
#[test]
#[ignore = "the child process of the other tests here, which start it; alone: echo 'memory' | RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test processes doctor::child_is_examined -- --exact --ignored --nocapture"]
fn child_is_examined() {
    if !is_child() {
        return;
    }
    let line = std::io::stdin().lines().next().unwrap().unwrap();
    let (words, starts) = match line.strip_suffix(" start") {
        Some(words) => (words, true),
        None => (&*line, false),
    };
    words.split(' ').filter(|word| !word.is_empty()).for_each(plant);
    if starts {
        tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stdout).init();
        let limits = ServerLimits::default().connections_max(4_000_000);
        let running = server().framing(LengthPrefix::default()).server_limits(limits);
        let running = running.start(|_| Puppet::new(Default::default())).unwrap();
        let findings = running.control().doctor();
        running.abort();
        running.wait().unwrap();
        println!("\nfinding descriptors {}", findings.iter().any(|finding| finding.check == "descriptors"));
    } else {
        let expected = Workload::default().connections(1_000_000).accepts_per_second(20_000).upstreams(1000);
        for finding in server().doctor_for(&expected) {
            println!("\nfinding {} {} {finding}", finding.check, finding.severity);
        }
    }
    println!("\nfinding done");
}

/// The findings with this fault: the checks with their severities.
fn found(mut process: Process, words: &str) -> Vec<String> {
    process.say(words);
    let mut found = Vec::new();
    loop {
        let line = process.line_after("finding ");
        if line == "done" {
            break;
        }
        let mut parts = line.split(' ');
        found.push(format!("{} {}", parts.next().unwrap(), parts.next().unwrap()));
    }
    eventually("the process ends", SOON, || process.child.try_wait().unwrap().is_some());
    found
}

#[track_caller]
fn names(found: &[String], planted: &[&str]) {
    for cause in planted {
        assert!(found.iter().any(|found| found == cause), "{cause} is planted, and found are {found:?}");
    }
}

#[test]
fn planted_settings_of_the_network_are_named() {
    let Some(process) = Process::start_in_own_network(child_is_examined) else {
        return eprintln!("not tested: there can be no network namespace");
    };
    let found = found(process, "network");
    names(
        &found,
        &[
            "accept_queue warn",
            "syn_backlog warn",
            "tcp_migrate_req warn",
            "local_ports warn",
            "time_wait info",
        ],
    );
}

#[test]
fn planted_limits_of_the_process_are_named() {
    let found = found(Process::start(child_is_examined), "descriptors memory");
    names(&found, &["descriptors error", "memory error", "keep_alive warn"]);
}

#[test]
fn planted_sandbox_and_low_locked_memory_are_named() {
    if on_epoll() {
        return eprintln!("not tested: a server that was told to use epoll lacks nothing without io_uring");
    }
    names(&found(Process::start(child_is_examined), "sandbox"), &["io_uring warn"]);
    let found = found(Process::start(child_is_examined), "memlock");
    // Where the kernel counts the memory of rings, the trial may fail already.
    let is_named = |found: &&String| matches!(&***found, "locked_memory error" | "io_uring warn");
    assert!(found.iter().any(|line| is_named(&line)), "{found:?}");
}

#[test]
fn start_says_each_thing_once() {
    let Some(mut process) = Process::start_in_own_network(child_is_examined) else {
        return eprintln!("not tested: there can be no network namespace");
    };
    process.say("network descriptors start");
    let mut log = Vec::new();
    loop {
        let line = process.line_after("");
        if line == "finding done" {
            break;
        }
        log.push(line);
    }
    let count = |words: &str| log.iter().filter(|line| line.contains(words)).count();
    assert_eq!(count("tcp_migrate_req is off"), 1, "the warning of the option: {log:#?}");
    assert_eq!(count("tcp_migrate_req"), 1, "and no finding beside it: {log:#?}");
    assert_eq!(count("listen backlog 4096 was cut to 8"), 1, "{log:#?}");
    assert_eq!(count("ERROR ringserve_base::doctor: doctor: RLIMIT_NOFILE is 512"), 1, "{log:#?}");
    assert_eq!(count("doctor: SocketOptions::keep_alive is off"), 1, "{log:#?}");
    assert!(count("doctor: ") <= 9, "{log:#?}");
    assert_eq!(count("finding descriptors true"), 1, "the server at work is examined too: {log:#?}");
    eventually("the process ends", SOON, || process.child.try_wait().unwrap().is_some());
}

#[test]
fn examination_takes_less_than_half_a_second() {
    let server = server();
    let time = || {
        let begun = Instant::now();
        server.doctor();
        begun.elapsed()
    };
    // On a machine that is busy with other tests the best of several counts.
    let best = (0..5).map(|_| time()).min().unwrap();
    assert!(best < Duration::from_millis(500), "{best:?}");
    assert!(checks().len() >= 20);
}
