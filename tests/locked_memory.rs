//! Servers of a user without privileges who may lock little memory: each runs, on whatever driver, or says what is
//! missing and what to do; none panics.
//!
//! Each case is a process of its own, and a user of its own where this one may make itself so: the kernel counts locked
//! memory for each user. Where it does not count the memory of rings (before Linux 6.14) all of them run on io_uring.

mod common;

use std::sync::Arc;
use std::thread;

use common::child::{Process, is_child};
use common::{Actor, Client, On, finish, no_time_limits, pattern};
use ringserve::framing::LengthPrefix;
use rustix::process::{Resource, Rlimit, Uid, getpid, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities, set_thread_res_uid};

/// Nothing; what fits the ring of the trial alone; the default before Linux 5.16; what fits one shard.
const LIMITS: [u64; 4] = [0, 16 << 10, 64 << 10, 256 << 10];

/// The child: does without privileges and memory as its input says, starts a server, and tells what became of it.
#[test]
#[ignore = "the child process of the other tests here, which start it; alone: echo '65536 auto 1' | RINGSERVE_TEST_CHILD=1 cargo test --test locked_memory child_starts -- --exact --ignored --nocapture"]
fn child_starts() {
    if !is_child() {
        return;
    }
    let words = std::io::stdin().lines().next().unwrap().unwrap();
    let [limit, driver, shards] = words.split(' ').collect::<Vec<_>>()[..] else { panic!("{words:?}") };
    let (limit, driver, shards) = (limit.parse().ok(), driver.parse().unwrap(), shards.parse().unwrap());
    setrlimit(Resource::Memlock, Rlimit { current: limit, maximum: limit }).unwrap();
    drop_privileges();
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stdout).init();
    let server = On { driver, ..On::default() }.server(no_time_limits()).shards(shards);
    let shared = Arc::default();
    let started = server.framing(LengthPrefix::default()).start(move |_| Actor::new(Arc::clone(&shared)));
    let running = match started {
        Ok(running) => running,
        Err(error) => return println!("\nrefused: {error}"),
    };
    let mut clients: Vec<Client> = (0..20).map(|_| Client::connect(running.local_addrs()[0])).collect();
    for (n, client) in clients.iter_mut().enumerate() {
        let payload = [&b"e"[..], &pattern(n * 4_001)].concat();
        assert!(client.ask(&payload) == payload, "an echo of {} bytes", payload.len());
    }
    drop(clients);
    finish(running);
    println!("\nserved");
}

/// Makes the calling thread, and those it starts, one of a user without privileges.
fn drop_privileges() {
    let user = Uid::from_raw(1 << 20 | getpid().as_raw_nonzero().get().unsigned_abs());
    if set_thread_res_uid(user, user, user).is_ok() {
        return;
    }
    // This user may not become another, or there is no other.
    let mut sets = capabilities(None).unwrap();
    sets.effective.remove(CapabilitySet::IPC_LOCK);
    sets.permitted.remove(CapabilitySet::IPC_LOCK);
    set_capabilities(None, sets).expect("privileges can be given up");
}

/// What became of a server: its log, then the error if there was one.
struct Found {
    log: String,
    refused: Option<String>,
}

impl Found {
    fn of(limit: u64, driver: &str, shards: usize) -> Found {
        // The operator's wish would decide for a server that may choose.
        let mut process = Process::start_as("child_starts", |child| child.env_remove("RINGSERVE_DRIVER"));
        process.say(&format!("{limit} {driver} {shards}"));
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

    /// Whatever it says of locked memory, it names the limit and the fix.
    #[track_caller]
    fn is_clear(&self, limit: u64) {
        let reason = match &self.refused {
            Some(error) => error,
            None if self.log.contains("driver: io_uring") => return,
            None => {
                self.log.lines().find(|line| line.contains("driver: epoll")).expect("a reason in the log")
            }
        };
        let names = |part: &str| assert!(reason.contains(part), "{part} is missing in: {reason}");
        names("no memory for ");
        names(&format!("RLIMIT_MEMLOCK is {limit} bytes"));
        names("`ulimit -l`");
    }
}

#[test]
fn where_no_memory_can_be_locked_a_server_that_may_choose_serves() {
    let found = Found::of(0, "auto", 2);
    assert_eq!(found.refused, None, "{}", found.log);
    found.is_clear(0);
}

#[test]
fn where_little_memory_can_be_locked_a_server_serves_or_says_why() {
    for_each_limit(|limit| {
        for (driver, shards) in [("auto", 1), ("auto", 2), ("io_uring", 1), ("io_uring", 2)] {
            Found::of(limit, driver, shards).is_clear(limit);
        }
    });
}

#[test]
fn where_too_little_memory_can_be_locked_a_server_that_may_choose_serves() {
    for_each_limit(|limit| assert_eq!(Found::of(limit, "auto", 2).refused, None, "with {limit} bytes"));
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
fn a_user_without_privileges_who_may_lock_enough_is_served_on_either_driver() {
    for driver in ["auto", "epoll"] {
        let found = Found::of(4 << 20, driver, 2);
        assert_eq!(found.refused, None, "{driver}: {}", found.log);
    }
}
