//! A server without the program's limits in a control group of 24 MiB: its defaults follow that,
//! and a storm does not get it killed.
//!
//! Needs a file system of control groups to which this user may write; without one the test reports
//! that and checks nothing.

use std::fs;
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use ringserve::Server;
use ringserve::framing::LengthPrefix;
use ringserve::limits::ServerLimits;
use ringserve_tests::child::{Process, is_child};
use ringserve_tests::client::frame;
use ringserve_tests::{Client, Puppet, SOON, eventually, order};

const LIMIT: usize = 24 << 20;

/// The child: waits for a line, then serves until its input ends.
#[test]
#[ignore = "the child process of the other test here, which starts it; alone: RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test processes small_memory::child_serves -- --exact --ignored --nocapture"]
fn child_serves() {
    if !is_child() {
        return;
    }
    let mut lines = std::io::stdin().lines();
    lines.next();
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stdout).init();
    let shared = std::sync::Arc::default();
    let server = Server::bind("127.0.0.1:0").shards(2).pin(false).framing(LengthPrefix::default());
    let running = server.start(move |_| Puppet::new(std::sync::Arc::clone(&shared))).unwrap();
    println!("\naddress {}", running.local_addrs()[0]);
    for _ in lines {
        println!("\nconnections {}", running.stats_now().connections);
    }
}

/// The child: waits for the number of its shards, then serves with limits of the program until its
/// input ends.
#[test]
#[ignore = "the child process of the other tests here, which start it; alone: RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test processes small_memory::child_serves_with_limits -- --exact --ignored --nocapture"]
fn child_serves_with_limits() {
    if !is_child() {
        return;
    }
    let mut lines = std::io::stdin().lines();
    let shards: usize = lines.next().unwrap().unwrap().parse().unwrap();
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stdout).init();
    let limits = ServerLimits::default().held_bytes_max(64 << 20).receive_bytes_max(8 << 20);
    let server = Server::bind("127.0.0.1:0").shards(shards).pin(false).server_limits(limits);
    let shared = std::sync::Arc::default();
    let started =
        server.framing(LengthPrefix::default()).start(move |_| Puppet::new(std::sync::Arc::clone(&shared)));
    match started {
        Ok(running) => {
            println!("\naddress {}", running.local_addrs()[0]);
            lines.for_each(drop);
        }
        Err(error) => println!("\nrefused: {error}"),
    }
}

/// A control group for one process, of either version; removed once that has ended.
struct Group(PathBuf);

impl Group {
    fn with_limit(bytes: usize) -> Result<Group, String> {
        let name = format!("ringserve-test-{}-{}", std::process::id(), bytes >> 20);
        let (mut why, limit) = (String::new(), bytes.to_string());
        for (root, file) in [
            ("/sys/fs/cgroup", "memory.max"),
            ("/sys/fs/cgroup/unified", "memory.max"),
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ] {
            let group = Group(Path::new(root).join(&name));
            let made = fs::create_dir(&group.0).and_then(|()| {
                // The kernel creates its files: elsewhere it is an ordinary directory.
                fs::OpenOptions::new().write(true).open(group.0.join(file))?.write_all(limit.as_bytes())?;
                // Swap would hide excess memory.
                let _ = fs::write(group.0.join("memory.swap.max"), "0");
                Ok(())
            });
            match made {
                Ok(()) => return Ok(group),
                Err(error) => why = format!("{why} {}: {error};", group.0.display()),
            }
        }
        Err(why)
    }

    fn allows(&self, bytes: usize) {
        for file in ["memory.max", "memory.limit_in_bytes"] {
            // A plain write would create the file of the other version.
            if self.0.join(file).exists() {
                fs::write(self.0.join(file), bytes.to_string()).unwrap();
            }
        }
    }

    fn takes(&self, process: u32) {
        fs::write(self.0.join("cgroup.procs"), process.to_string()).unwrap();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// A server of `shards` shards, with limits of the program, in a control group of `bytes` bytes.
fn with_limits_in(bytes: usize, shards: usize) -> Option<(Group, Process)> {
    let group =
        Group::with_limit(bytes).inspect_err(|why| eprintln!("NOT TESTED: no control group:{why}")).ok()?;
    let mut server = Process::start(child_serves_with_limits);
    group.takes(server.child.id());
    server.say(&shards.to_string());
    Some((group, server))
}

#[test]
fn limits_of_a_program_follow_its_control_group() {
    let Some((group, mut server)) = with_limits_in(64 << 20, 2) else { return };
    let said = server.line_after("memory: the process may use ");
    assert!(
        said.starts_with("64 MiB (memory.") && said.contains("limits of the program are lowered"),
        "{said}"
    );
    // An eighth of 56 MiB, and a sixteenth.
    assert!(said.contains("held_bytes_max 7340032 and receive_bytes_max 3670016 of each shard"), "{said}");
    Client::connect(server.line_after("address ").parse().unwrap()).echoes("alive");
    for (megabytes, expected) in [
        (400, "held_bytes_max is 67108864 and receive_bytes_max 8388608"),
        (48, "held_bytes_max is 5242880 and receive_bytes_max 2621440"),
    ] {
        group.allows(megabytes << 20);
        let said = server.line_after("memory: the process may use ");
        assert!(said.starts_with(&format!("{megabytes} MiB (memory.")) && said.contains(expected), "{said}");
    }
}

#[test]
fn server_whose_least_limits_do_not_fit_is_refused() {
    let Some((_group, mut server)) = with_limits_in(30 << 20, 64) else { return };
    let said = server.line_after("refused: ");
    assert!(
        said.starts_with("64 shards need 32 MiB at least, and the process may use 30 MiB (memory."),
        "{said}"
    );
}

fn ended(server: &mut Process) -> Option<ExitStatus> {
    server.child.try_wait().unwrap()
}

/// Peers that request much and read nothing, and peers that send half of a large frame. Those over
/// a limit are closed.
fn storm(addr: SocketAddr) -> Vec<Client> {
    let burst = frame(order::reply(65_536)).repeat(8);
    let half = frame(order::echo_of(200 << 10))[..150 << 10].to_vec();
    (0..600)
        .map(|n| {
            let mut client = Client::with_small_window(addr);
            let _ = client.stream.write_all(if n % 4 == 0 { &half } else { &burst });
            client
        })
        .collect()
}

#[test]
fn a_server_with_default_limits_lives_in_a_small_control_group() {
    let group = match Group::with_limit(LIMIT) {
        Ok(group) => group,
        Err(why) => {
            return eprintln!("NOT TESTED: no control group can be made here:{why} run it as root");
        }
    };
    let mut server = Process::start(child_serves);
    group.takes(server.child.id());
    server.say("begin");
    let memory = server.line_after("memory: the process may use ");
    assert!(memory.starts_with("24 MiB (memory."), "{memory}");
    assert!(memory.contains("of the control group /ringserve-test-"), "{memory}");
    assert!(memory.contains("connections_max 819, receive_bytes_max 1048576"), "{memory}");
    let addr = server.line_after("address ").parse().unwrap();
    for _ in 0..3 {
        let held = storm(addr);
        assert_eq!(ended(&mut server), None, "the kernel killed it");
        drop(held);
        eventually("the storm is over", SOON, || {
            assert_eq!(ended(&mut server), None, "the kernel killed it");
            server.say("how many?");
            server.line_after("connections ") == "0"
        });
        Client::connect(addr).echoes("alive");
    }
    drop(server);
    // Its memory may be accounted for a moment longer.
    eventually("the group is empty", SOON, || fs::remove_dir(&group.0).is_ok());
}
