//! `serve` in a child process: the first signal drains, the second one aborts, and the process ends
//! whatever blocks a shard.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ringserve::factory::from_future;
use ringserve::framing::LengthPrefix;
use ringserve_tests::child::{Process, is_child};
use ringserve_tests::client::{End, frame};
use ringserve_tests::{Client, On, Puppet, SOON, eventually, no_time_limits, order};
use rustix::process::{Pid, Signal, kill_process};

/// The child: a puppet on a port of the kernel's choice, whose gate never opens; the log has the
/// address.
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

/// The child: calls that block hold their shard for as long as the test takes.
#[test]
#[ignore = "the child process of the other tests here, which start it; alone: RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test processes signals::child_is_blocked -- --exact --ignored --nocapture"]
fn child_is_blocked() {
    if !is_child() {
        return;
    }
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stdout).init();
    let limits = no_time_limits().drain_timeout(Duration::from_millis(1200));
    let server = On::default().server(limits).shards(2).framing(LengthPrefix::default());
    let ended = server.serve(|_| Puppet::new(Default::default()));
    println!("\nserve returned {ended:?}");
}

/// The child: the start fails on one shard, and the other one does not end.
#[test]
#[ignore = "the child process of `signal_during_a_start_that_fails_ends_the_process`; alone: RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test processes signals::child_fails_to_start -- --exact --ignored --nocapture"]
fn child_fails_to_start() {
    if !is_child() {
        return;
    }
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stdout).init();
    let server = On::default().server(no_time_limits()).shards(2).framing(LengthPrefix::default());
    let blocks = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let ended = server.serve(move |shard| {
        let (shard, blocks) = (shard.clone(), blocks.clone());
        from_future(async move {
            if shard.index() == 1 {
                blocks.store(true, Ordering::SeqCst);
                loop {
                    std::thread::park();
                }
            }
            while !blocks.load(Ordering::SeqCst) {
                shard.sleep(Duration::from_millis(1)).await;
            }
            println!("\nthe start fails");
            Err::<Puppet, _>(std::io::Error::other("no service"))
        })
    });
    println!("\nserve returned {ended:?}");
}

/// The child: its factory waits without end.
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
        Served::of(Process::start(child_serves))
    }

    fn of(mut process: Process) -> Served {
        let addr = process.line_after("listening on ");
        let addr = addr.split_whitespace().next().unwrap().parse().unwrap();
        Served { process, addr }
    }

    fn client(&self) -> Client {
        Client::connect(self.addr)
    }

    #[track_caller]
    fn exits_in_order(mut self, connections: usize) {
        // The result is the last line of the log.
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
    // The first one drains: idle connections are closed, and pending calls are waited for.
    assert_eq!(quiet.end(), End::Fin);
    drop(quiet);
    assert!(waits.is_silent());
    // After the time within which two SIGTERMs are one.
    waits.hears_nothing_for(Duration::from_millis(300));
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

/// In the way of GNU `timeout`.
#[test]
fn two_sigterms_at_once_are_one() {
    let served = Served::start();
    let mut waits = served.client();
    waits.write(&[frame(order::echo("1")), frame(order::gate(""))].concat());
    assert_eq!(waits.recv(), order::echo("1"));
    let mut quiet = served.client();
    quiet.echoes("");
    served.process.signal(Signal::TERM);
    served.process.signal(Signal::TERM);
    assert_eq!(quiet.end(), End::Fin);
    waits.hears_nothing_for(Duration::from_millis(300));
    served.process.signal(Signal::INT);
    assert_eq!(waits.end(), End::Reset);
    drop(quiet);
    served.exits_in_order(2);
}

#[test]
fn signals_without_a_meaning_are_told_and_end_nothing() {
    let mut setsid = Command::new("setsid");
    setsid.arg(std::env::current_exe().unwrap());
    let mut served = Served::of(Process::start_by(child_serves, &mut setsid));
    let mut client = served.client();
    for (signal, line) in [
        (Signal::HUP, "SIGHUP: certificates are read again"),
        (Signal::USR1, "SIGUSR1: nothing is done for it"),
        (Signal::USR2, "SIGUSR2: nothing is done for it"),
    ] {
        served.process.signal(signal);
        served.process.line_after(line);
        client.echoes("still here");
    }
    served.process.signal(Signal::TERM);
    assert_eq!(client.end(), End::Fin);
    served.exits_in_order(1);
}

impl Served {
    /// One of two shards is blocked. A client of the other one, and those of the blocked one.
    fn blocked() -> (Served, Client, Vec<Client>) {
        let mut served = Served::of(Process::start(child_is_blocked));
        let mut blocker = served.client();
        blocker.send(order::block());
        let mut unheard = vec![blocker];
        loop {
            let mut client = served.client();
            client.send(order::echo(""));
            client.stream.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
            let is_answered = client.stream.peek(&mut [0]).is_ok();
            client.stream.set_read_timeout(Some(SOON)).unwrap();
            if is_answered {
                assert_eq!(client.recv(), order::echo(""));
                // By then the start is over too: it listens a moment before.
                served.process.line_after(" stalled for ");
                return (served, client, unheard);
            }
            unheard.push(client);
        }
    }

    #[track_caller]
    fn ends_with_status_1(mut self) {
        eventually("the process ends", SOON, || self.process.child.try_wait().unwrap().is_some());
        assert_eq!(self.process.child.wait().unwrap().code(), Some(1));
    }
}

#[test]
fn second_signal_ends_the_process_of_a_blocked_shard() {
    for (first, second) in [(Signal::TERM, Signal::INT), (Signal::INT, Signal::INT)] {
        let (mut served, _client, _unheard) = Served::blocked();
        served.process.signal(first);
        served.process.line_after("accepting no more");
        served.process.signal(second);
        served.process.line_after("the server did not end in time: the process ends");
        served.ends_with_status_1();
    }
}

#[test]
fn blocked_shard_is_named_and_ends_with_its_process() {
    let (mut served, mut client, _unheard) = Served::blocked();
    served.process.signal(Signal::TERM);
    assert_eq!(client.end(), End::Fin);
    eventually("newcomers are refused", SOON, || std::net::TcpStream::connect(served.addr).is_err());
    assert!(served.process.child.try_wait().unwrap().is_none(), "by the end of the process alone");
    let stall = served.process.line_after("the server cannot end: ");
    assert!(stall.contains("a call for 127.0.0.1:"), "{stall}");
    served.process.line_after("the process ends");
    served.ends_with_status_1();
}

#[test]
fn signal_during_a_start_that_fails_ends_the_process() {
    for again in [false, true] {
        let mut process = Process::start(child_fails_to_start);
        process.line_after("the start fails");
        let tasks = format!("/proc/{}/task", process.child.id());
        // Its thread ends once it has reported the failure.
        eventually("the first shard failed", SOON, || {
            let tasks = std::fs::read_dir(&tasks).unwrap().filter_map(Result::ok);
            let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
            names.into_iter().all(|name| name.trim() != "ringserve-0")
        });
        process.signal(Signal::TERM);
        process.line_after("SIGTERM: stopped before it was ready");
        if again {
            process.signal(Signal::INT);
        }
        eventually("the process ends", SOON, || process.child.try_wait().unwrap().is_some());
        let status = process.child.wait().unwrap();
        let (by, code) = if again { (None, Some(1)) } else { (Some(Signal::TERM.as_raw()), None) };
        assert_eq!((status.signal(), status.code()), (by, code));
    }
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
    // After this, no thread reads either.
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
