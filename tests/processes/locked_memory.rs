//! Servers of an unprivileged user who may lock little memory: each runs, on some driver, or
//! reports the limit and the fix; none panics.
//!
//! Each case is a child process, of another user if this one may switch: the kernel counts locked
//! memory per user. If it does not count the memory of rings (before Linux 6.14) all of them run on
//! io_uring.

use std::sync::Arc;
use std::thread;

use ringserve::framing::LengthPrefix;
use ringserve_tests::child::{Outcome, is_child};
use ringserve_tests::{On, Puppet, no_time_limits, order, pattern};
use rustix::process::{Resource, Rlimit, Uid, getpid, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities, set_thread_res_uid};

/// Nothing; enough for the ring of the trial alone; the default before Linux 5.16; enough for one
/// shard.
const LIMITS: [u64; 4] = [0, 16 << 10, 64 << 10, 256 << 10];

/// The child: drops privileges and memory as its input orders, starts a server, and reports the
/// result.
#[test]
#[ignore = "the child process of the other tests here, which start it; alone: echo '65536 auto 1' | RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test processes locked_memory::child_starts -- --exact --ignored --nocapture"]
fn child_starts() {
    if !is_child() {
        return;
    }
    let words = std::io::stdin().lines().next().unwrap().unwrap();
    let [limit, driver, shards] = words.split(' ').collect::<Vec<_>>()[..] else { panic!("{words:?}") };
    let (limit, driver, shards) =
        (limit.parse().ok(), driver.parse().unwrap(), shards.parse::<usize>().unwrap());
    setrlimit(Resource::Memlock, Rlimit { current: limit, maximum: limit }).unwrap();
    drop_privileges();
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stdout).init();
    let server = On { driver, ..On::default() }.server(no_time_limits()).shards(shards);
    let shared = Arc::default();
    let started = server.framing(LengthPrefix::default()).start(move |_| Puppet::new(Arc::clone(&shared)));
    Outcome::tell(started, |n, client| {
        let payload = order::echo(pattern(n * 4_001));
        assert!(client.ask(&payload) == payload, "an echo of {} bytes", payload.len());
    });
}

/// Gives the calling thread, and those it starts, an unprivileged user.
fn drop_privileges() {
    let user = Uid::from_raw(1 << 20 | getpid().as_raw_nonzero().get().unsigned_abs());
    if set_thread_res_uid(user, user, user).is_ok() {
        return;
    }
    // This user may not switch to another, or there is no other.
    let mut sets = capabilities(None).unwrap();
    sets.effective.remove(CapabilitySet::IPC_LOCK);
    sets.permitted.remove(CapabilitySet::IPC_LOCK);
    set_capabilities(None, sets).expect("privileges can be given up");
}

/// The result of a server that may lock `limit` bytes.
fn outcome(limit: u64, driver: &str, shards: usize) -> Outcome {
    Outcome::of(child_starts, &format!("{limit} {driver} {shards}"))
}

/// Checks that any message about locked memory names the limit and the fix.
#[track_caller]
fn is_clear(outcome: &Outcome, limit: u64) {
    let reason = match &outcome.refused {
        Some(error) => error,
        None if outcome.log.contains("driver: io_uring") => return,
        None => outcome.log.lines().find(|line| line.contains("driver: epoll")).expect("a reason in the log"),
    };
    let names = |part: &str| assert!(reason.contains(part), "{part} is missing in: {reason}");
    names("no memory for ");
    names(&format!("RLIMIT_MEMLOCK is {limit} bytes"));
    names("`ulimit -l`");
}

#[test]
fn server_that_may_choose_serves_without_locked_memory() {
    let found = outcome(0, "auto", 2);
    assert_eq!(found.refused, None, "{}", found.log);
    is_clear(&found, 0);
}

#[test]
fn server_with_little_locked_memory_serves_or_says_why() {
    for_each_limit(|limit| {
        for (driver, shards) in [("auto", 1), ("auto", 2), ("io_uring", 1), ("io_uring", 2)] {
            is_clear(&outcome(limit, driver, shards), limit);
        }
    });
}

#[test]
fn server_that_may_choose_serves_with_too_little_locked_memory() {
    for_each_limit(|limit| assert_eq!(outcome(limit, "auto", 2).refused, None, "with {limit} bytes"));
}

fn for_each_limit(case: impl Fn(u64) + Sync) {
    thread::scope(|scope| {
        for limit in LIMITS {
            let case = &case;
            scope.spawn(move || case(limit));
        }
    });
}

#[test]
fn user_who_may_lock_enough_is_served_on_either_driver() {
    for driver in ["auto", "epoll"] {
        let found = outcome(4 << 20, driver, 2);
        assert_eq!(found.refused, None, "{driver}: {}", found.log);
    }
}
