//! `serve` in a child process: the first signal drains, the second one aborts.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ringserve::framing::LengthPrefix;
use ringserve_tests::child::{Process, is_child};
use ringserve_tests::client::{End, frame};
use ringserve_tests::{Client, On, Puppet, SOON, eventually, no_time_limits, order};
use rustix::process::{Pid, Signal, kill_process};

/// The child: a puppet on a port of the kernel's choice, whose gate never opens; the log tells where.
#[test]
#[ignore = "the child process of the other tests here, which start it; alone: RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test processes signals::child_serves -- --exact --ignored --nocapture"]
fn child_serves() {
    if !is_child() {
        return;
    }
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stdout).init();
    let limits = no_time_limits().drain_timeout(Duration::from_secs(60));
    let server = On::default().server(limits).framing(LengthPrefix::default());
    let ended = server.serve(|_| Puppet::new(Default::default()));
    println!("\nserve returned {ended:?}");
}

/// The child: its factory waits for ever.
#[test]
#[ignore = "the child process of `sigterm_ends_a_server_whose_factory_waits`; alone: RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test processes signals::child_waits_in_its_factory -- --exact --ignored --nocapture"]
fn child_waits_in_its_factory() {
    if !is_child() {
        return;
    }
    let server = On::default().server(no_time_limits()).shards(2).framing(LengthPrefix::default());
    let ended = server.serve(|shard| {
        if shard.index() == 1 {
            println!("\nthe factory waits");
            loop {
                std::thread::park();
            }
        }
        Puppet::new(Default::default())
    });
    println!("\nserve returned {ended:?}");
}

/// The child: it serves twice, the second time in vain, and stays.
#[test]
#[ignore = "the child process of `signals_do_after_serve_what_they_did_before`; alone: RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test processes signals::child_outlives_serve -- --exact --ignored --nocapture"]
fn child_outlives_serve() {
    if !is_child() {
        return;
    }
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stdout).init();
    let server = || On::default().server(no_time_limits()).framing(LengthPrefix::default());
    let ended = server().serve(|_| Puppet::new(Default::default()));
    println!("\nserve returned {ended:?}");
    let failed =
        server().serve(|_| -> Result<Puppet, std::io::Error> { Err(std::io::Error::other("no service")) });
    println!("\nserve failed with {failed:?}");
    loop {
        std::thread::park();
    }
}

#[test]
fn sigterm_ends_a_server_whose_factory_waits() {
    let mut process = Process::start(child_waits_in_its_factory);
    process.line_after("the factory waits");
    process.signal(Signal::TERM);
    assert_eq!(process.line_after("serve returned "), "Ok(())");
    eventually("the process ends", SOON, || process.child.try_wait().unwrap().is_some());
    assert!(process.child.wait().unwrap().success());
}

#[test]
fn signals_do_after_serve_what_they_did_before() {
    for signal in [Signal::INT, Signal::TERM] {
        let mut process = Process::start(child_outlives_serve);
        process.line_after("listening on ");
        process.line_after("an idle connection costs");
        process.signal(Signal::TERM);
        assert_eq!(process.line_after("serve returned "), "Ok(())");
        assert!(process.line_after("serve failed with ").contains("no service"));
        process.signal(signal);
        eventually("the process ends", SOON, || process.child.try_wait().unwrap().is_some());
        assert_eq!(process.child.wait().unwrap().signal(), Some(signal.as_raw()));
    }
}

struct Served {
    process: Process,
    addr: std::net::SocketAddr,
}

impl Served {
    fn start() -> Served {
        let mut process = Process::start(child_serves);
        let addr = process.line_after("listening on ");
        let addr = addr.split_whitespace().next().unwrap().parse().unwrap();
        Served { process, addr }
    }

    fn client(&self) -> Client {
        Client::connect(self.addr)
    }

    #[track_caller]
    fn exits_in_order(mut self, connections: usize) {
        // What it did is the last line of the log.
        let did = self.process.line_after("stopped after ");
        assert!(
            did.starts_with(&format!("{connections} connections (")) && did.contains(" frames, "),
            "{did}"
        );
        assert_eq!(self.process.line_after("serve returned "), "Ok(())");
        eventually("the process ends", SOON, || self.process.child.try_wait().unwrap().is_some());
        assert!(self.process.child.wait().unwrap().success());
    }
}

fn drains_then_forces(signal: Signal) {
    let served = Served::start();
    let mut waits = served.client();
    waits.write(&[frame(order::echo("1")), frame(order::gate(""))].concat());
    assert_eq!(waits.recv(), order::echo("1"));
    let mut quiet = served.client();
    quiet.echoes("");
    served.process.signal(signal);
    // The first one drains: quiet connections are closed, and what is asked is waited for.
    assert_eq!(quiet.end(), End::Fin);
    drop(quiet);
    assert!(waits.is_silent());
    served.process.signal(signal);
    assert_eq!(waits.end(), End::Reset);
    served.exits_in_order(2);
}

#[test]
fn sigterm_drains_and_a_second_one_forces() {
    drains_then_forces(Signal::TERM);
}

#[test]
fn sigint_drains_and_a_second_one_forces() {
    drains_then_forces(Signal::INT);
}

#[test]
fn one_sigterm_is_enough_where_nothing_is_owed() {
    let served = Served::start();
    let mut clients: Vec<Client> = (0..20).map(|_| served.client()).collect();
    clients.iter_mut().for_each(|client| client.echoes(""));
    let started = Instant::now();
    served.process.signal(Signal::TERM);
    for mut client in clients {
        assert_eq!(client.end(), End::Fin);
    }
    served.exits_in_order(20);
    assert!(started.elapsed() < Duration::from_secs(30), "long before the drain limit");
}

#[test]
fn a_second_instance_names_the_process_that_holds_the_port() {
    let served = Served::start();
    let again = On::default().server_at(&served.addr.to_string(), no_time_limits());
    let text = again.start(|_| Puppet::new(Default::default())).unwrap_err().to_string();
    let holder = format!("in use by process {} (", served.process.child.id());
    assert!(text.contains(&holder), "{text}");
    served.process.signal(Signal::TERM);
    served.exits_in_order(0);
}

#[test]
fn a_killed_server_can_be_started_again_at_once() {
    let mut served = Served::start();
    let mut clients: Vec<Client> = (0..200).map(|_| served.client()).collect();
    clients.iter_mut().for_each(|client| client.echoes(""));
    served.process.signal(Signal::KILL);
    served.process.child.wait().unwrap();
    let server = On::default().server_at(&served.addr.to_string(), no_time_limits());
    let lab = ringserve_tests::Lab::of(server.framing(LengthPrefix::default()));
    lab.client().echoes("alive");
    lab.finish();
}

#[test]
fn server_whose_log_is_not_read_any_more_ends_as_well() {
    let mut child = Command::new(ringserve_tests::examples::build("echo"))
        .args(["--listen", "127.0.0.1:0", "--shards", "1"])
        .env("RUST_LOG", "debug")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stderr.take());
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let (mut addr, last) = (None, "an idle connection costs ");
    let mut lines = lines.map(Result::unwrap).inspect(|line| {
        let rest = line.split_once("listening on ").map(|(_, rest)| rest.split(' ').next().unwrap());
        addr = rest.map(|rest| rest.parse::<std::net::SocketAddr>().unwrap()).or(addr);
    });
    assert!(lines.any(|line| line.contains(last)), "the last line of the start");
    drop(lines);
    // Each connection is a line, or two.
    for _ in 0..3 {
        let mut client = Client::connect(addr.unwrap());
        client.write(b"hello\n");
        assert_eq!(client.read(6), b"hello\n");
    }
    // With this, no thread reads either.
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let mut status = None;
    let started = Instant::now();
    while status.is_none() && started.elapsed() < SOON {
        std::thread::park_timeout(Duration::from_millis(1));
        status = child.try_wait().unwrap();
    }
    let _ = child.kill();
    let _ = child.wait();
    assert!(status.is_some_and(|status| status.success()), "{status:?}");
}
