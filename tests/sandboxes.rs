//! Sandboxes that refuse system calls other than those of io_uring: the server does without them, or says which one it was.
//!
//! Each case is a process apart, since a seccomp filter stays.

mod common;

use std::sync::Arc;

use common::child::{Process, is_child};
use common::{Actor, Client, On, finish, no_time_limits};
use ringserve::framing::LengthPrefix;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

/// The child: forbids calls as its input says, starts a server, and tells what became of it.
#[test]
#[ignore = "the child process of the other tests here, which start it; alone: echo 'epoll own 288:38' | RINGSERVE_TEST_CHILD=1 cargo test --test sandboxes child_starts -- --exact --ignored --nocapture"]
fn child_starts() {
    if !is_child() {
        return;
    }
    let line = std::io::stdin().lines().next().unwrap().unwrap();
    let mut words = line.split(' ');
    let driver = words.next().unwrap().parse().unwrap();
    let host = words.next().unwrap().parse().unwrap();
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stdout).init();
    for word in words {
        let (call, errno) = word.split_once(':').unwrap();
        forbid(call.parse().unwrap(), errno.parse().unwrap());
    }
    let server = On { driver, ..On::default() }.server(no_time_limits()).runtime(host);
    let shared = Arc::default();
    let started = server.framing(LengthPrefix::default()).start(move |_| Actor::new(Arc::clone(&shared)));
    let running = match started {
        Ok(running) => running,
        Err(error) => return println!("\nrefused: {error}"),
    };
    let mut clients: Vec<_> = (0..20).map(|_| Client::connect(running.local_addrs()[0])).collect();
    clients.iter_mut().for_each(|client| assert_eq!(client.ask("eserved"), b"eserved"));
    drop(clients);
    finish(running);
    println!("\nserved");
}

/// Makes a system call fail with this error on the calling thread and those it starts, for good.
fn forbid(call: i64, errno: u32) {
    let filter = SeccompFilter::new(
        [(call, Vec::new())].into(),
        SeccompAction::Allow,
        SeccompAction::Errno(errno),
        std::env::consts::ARCH.try_into().expect("an architecture that seccomp knows"),
    );
    let program: BpfProgram = filter.unwrap().try_into().unwrap();
    seccompiler::apply_filter(&program).expect("every process may filter itself");
}

/// What became of a server: its log, then the error if there was one.
struct Found {
    log: String,
    refused: Option<String>,
}

impl Found {
    fn of(driver: &str, host: &str, blocked: &[(i64, Errno)]) -> Found {
        // The operator's wish would decide for a server that may choose.
        let mut process = Process::start_as("child_starts", |child| child.env_remove("RINGSERVE_DRIVER"));
        let blocked = blocked.iter().map(|(call, errno)| format!(" {call}:{}", errno.raw_os_error()));
        process.say(&format!("{driver} {host}{}", blocked.collect::<String>()));
        let mut log = String::new();
        loop {
            let line = process.line_after("");
            if line == "served" {
                return Found { log, refused: None };
            }
            if let Some(error) = line.strip_prefix("refused: ") {
                return Found { log, refused: Some(error.to_owned()) };
            }
            log.push_str(&line);
            log.push('\n');
        }
    }

    #[track_caller]
    fn served(&self) {
        assert_eq!(self.refused, None, "{}", self.log);
    }

    /// It did not start, and the reason has all of this.
    #[track_caller]
    fn refused_for(&self, parts: &[&str]) {
        let error = self.refused.as_ref().expect("it does not start");
        for part in parts {
            assert!(error.contains(part), "{part} is missing in: {error}");
        }
    }
}

const REFUSALS: [Errno; 2] = [Errno::PERM, Errno::NOSYS];

/// The call by which an epoll instance is waited at; not every architecture has the older one.
#[cfg(target_arch = "x86_64")]
const EPOLL_WAIT: i64 = libc::SYS_epoll_wait;
#[cfg(not(target_arch = "x86_64"))]
const EPOLL_WAIT: i64 = libc::SYS_epoll_pwait;

#[test]
fn epoll_serves_without_accept4_and_epoll_pwait2() {
    for errno in REFUSALS {
        let blocked = [(libc::SYS_accept4, errno), (libc::SYS_epoll_pwait2, errno)];
        Found::of("epoll", "own", &blocked).served();
    }
}

#[test]
fn io_uring_serves_without_accept4() {
    Found::of("io_uring", "own", &[(libc::SYS_accept4, Errno::NOSYS)]).served();
}

#[cfg(target_arch = "x86_64")]
#[test]
fn epoll_that_cannot_accept_is_refused_with_the_call() {
    for errno in REFUSALS {
        let found = Found::of("epoll", "own", &[(libc::SYS_accept4, errno), (libc::SYS_accept, errno)]);
        found.refused_for(&["epoll cannot be used", "accept is refused", "seccomp", "accept4"]);
    }
}

#[test]
fn epoll_that_cannot_be_waited_at_is_refused_with_the_call() {
    for errno in REFUSALS {
        let found = Found::of("epoll", "own", &[(EPOLL_WAIT, errno)]);
        found.refused_for(&["epoll cannot be used", "epoll_wait is refused", "seccomp"]);
    }
    let found = Found::of("epoll", "own", &[(libc::SYS_epoll_create1, Errno::PERM)]);
    found.refused_for(&["epoll cannot be used", "epoll_create1 is refused", "seccomp"]);
}

#[test]
fn where_neither_driver_works_both_reasons_are_told() {
    let blocked = [(libc::SYS_io_uring_setup, Errno::PERM), (EPOLL_WAIT, Errno::PERM)];
    let found = Found::of("auto", "own", &blocked);
    found.refused_for(&["io_uring_setup is blocked", "epoll_wait is refused", "seccomp"]);
}

#[test]
fn a_limit_that_may_not_be_asked_for_is_read_elsewhere() {
    let limit = getrlimit(Resource::Nofile).current.expect("a machine with a limit");
    for driver in ["epoll", "auto"] {
        let found = Found::of(driver, "own", &[(libc::SYS_prlimit64, Errno::PERM)]);
        found.served();
        let names = |text: &str| assert!(found.log.contains(text), "{text} is missing in: {}", found.log);
        if driver == "epoll" {
            names(&format!("RLIMIT_NOFILE, {limit}, bounds them"));
        }
    }
}

#[test]
fn a_refused_socket_option_is_named_with_its_level() {
    for errno in REFUSALS {
        let found = Found::of("auto", "own", &[(libc::SYS_setsockopt, errno)]);
        found.refused_for(&["setsockopt(SOL_SOCKET, SO_REUSEADDR)", "seccomp", "allow setsockopt"]);
        let error = found.refused.unwrap();
        assert!(!error.contains("CAP_NET_BIND_SERVICE"), "{error}");
    }
}

#[cfg(feature = "runtime-tokio-uring")]
#[test]
fn tokio_uring_without_io_uring_is_refused_with_what_blocks_it() {
    for errno in REFUSALS {
        let found = Found::of("epoll", "tokio-uring", &[(libc::SYS_io_uring_setup, errno)]);
        found.refused_for(&["tokio-uring", "io_uring_setup is", "seccomp", "allow io_uring_setup"]);
        let found = Found::of("epoll", "tokio-uring", &[(libc::SYS_io_uring_enter, errno)]);
        found.refused_for(&["tokio-uring", "io_uring_enter is", "seccomp"]);
    }
}
