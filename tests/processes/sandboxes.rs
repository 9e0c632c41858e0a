//! Sandboxes that refuse system calls other than those of io_uring: the server does without them,
//! or reports which one it was.
//!
//! Each case is a separate process, since a seccomp filter stays.

use std::sync::Arc;

use ringserve::framing::LengthPrefix;
use ringserve_tests::child::{Outcome, is_child};
use ringserve_tests::{On, Puppet, no_time_limits};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

/// The child: forbids the calls of its input, starts a server, and reports the result.
#[test]
#[ignore = "the child process of the other tests here, which start it; alone: echo 'epoll own 288:38' | RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test processes sandboxes::child_starts -- --exact --ignored --nocapture"]
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
    let started = server.framing(LengthPrefix::default()).start(move |_| Puppet::new(Arc::clone(&shared)));
    Outcome::tell(started, |_, client| client.echoes("served"));
}

/// Makes a system call fail permanently with this error on the calling thread and those it starts.
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

/// The result of a server that starts where these calls fail.
fn outcome(driver: &str, host: &str, blocked: &[(i64, Errno)]) -> Outcome {
    let blocked = blocked.iter().map(|(call, errno)| format!(" {call}:{}", errno.raw_os_error()));
    Outcome::of(child_starts, &format!("{driver} {host}{}", blocked.collect::<String>()))
}

/// Checks that it did not start, and the reason has all of these parts.
#[track_caller]
fn refused_for(outcome: &Outcome, parts: &[&str]) {
    let error = outcome.refused.as_ref().expect("it does not start");
    for part in parts {
        assert!(error.contains(part), "{part} is missing in: {error}");
    }
}

const REFUSALS: [Errno; 2] = [Errno::PERM, Errno::NOSYS];

#[test]
fn epoll_serves_without_accept4_and_epoll_pwait2() {
    for errno in REFUSALS {
        let blocked = [(libc::SYS_accept4, errno), (libc::SYS_epoll_pwait2, errno)];
        outcome("epoll", "own", &blocked).served();
    }
}

#[test]
fn io_uring_serves_without_accept4() {
    outcome("io_uring", "own", &[(libc::SYS_accept4, Errno::NOSYS)]).served();
}

#[cfg(target_arch = "x86_64")]
#[test]
fn epoll_that_cannot_accept_is_refused_with_the_call() {
    for errno in REFUSALS {
        let found = outcome("epoll", "own", &[(libc::SYS_accept4, errno), (libc::SYS_accept, errno)]);
        refused_for(&found, &["epoll cannot be used", "accept is refused", "seccomp", "accept4"]);
    }
}

#[test]
fn epoll_that_cannot_be_waited_at_is_refused_with_the_call() {
    for errno in REFUSALS {
        let found = outcome("epoll", "own", &[(libc::SYS_epoll_pwait, errno)]);
        refused_for(&found, &["epoll cannot be used", "epoll_pwait is refused", "seccomp"]);
    }
    let found = outcome("epoll", "own", &[(libc::SYS_epoll_create1, Errno::PERM)]);
    refused_for(&found, &["epoll cannot be used", "epoll_create1 is refused", "seccomp"]);
}

#[test]
fn both_reasons_are_told_where_neither_driver_works() {
    let blocked = [(libc::SYS_io_uring_setup, Errno::PERM), (libc::SYS_epoll_pwait, Errno::PERM)];
    let found = outcome("auto", "own", &blocked);
    refused_for(&found, &["io_uring_setup is blocked", "epoll_pwait is refused", "seccomp"]);
}

#[test]
fn a_limit_that_may_not_be_asked_for_is_read_elsewhere() {
    let limit = getrlimit(Resource::Nofile).current.expect("a machine with a limit");
    for driver in ["epoll", "auto"] {
        let found = outcome(driver, "own", &[(libc::SYS_prlimit64, Errno::PERM)]);
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
        let found = outcome("auto", "own", &[(libc::SYS_setsockopt, errno)]);
        refused_for(&found, &["setsockopt(SOL_SOCKET, SO_REUSEADDR)", "seccomp", "allow setsockopt"]);
        let error = found.refused.unwrap();
        assert!(!error.contains("CAP_NET_BIND_SERVICE"), "{error}");
    }
}

#[cfg(feature = "runtime-tokio-uring")]
#[test]
fn tokio_uring_without_io_uring_is_refused_with_what_blocks_it() {
    for errno in REFUSALS {
        let found = outcome("epoll", "tokio-uring", &[(libc::SYS_io_uring_setup, errno)]);
        refused_for(&found, &["tokio-uring", "io_uring_setup is", "seccomp", "allow io_uring_setup"]);
        let found = outcome("epoll", "tokio-uring", &[(libc::SYS_io_uring_enter, errno)]);
        refused_for(&found, &["tokio-uring", "io_uring_enter is", "seccomp"]);
    }
}
