//! Stalled shards, on the real kernel and on both drivers: the reports about them, their delay, and
//! the stalls that are not reported.
//!
//! Each test has a process to itself, since other computations would be a cause. The campaign, in a
//! separate file, is ignored: `cargo test --release -p ringserve-tests --test processes
//! stalls::campaign::causes_drawn_blind -- --ignored --nocapture`; `RINGSERVE_SEED` is its seed.

mod campaign;
mod rig;

use std::fs;
use std::io::BufReader;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use ringserve::framing::Lines;
use ringserve::limits::StallOptions;
use ringserve::server::{Driver, Runtime};
use ringserve::stats::StalledWork;
use ringserve::sync::Mesh;
use ringserve::{Limits, Server};
use ringserve_tests::child::{Process, is_child};
use ringserve_tests::{SOON, alone, eventually, on_epoll};
use rustix::process::{Signal, setpriority_process, setsid};
use tokio::sync::watch;

use rig::{Lab, Misdeed, Naughty, Peer, Plan};

/// The bar: a stall is reported within this time after it began.
const TOLD_WITHIN: Duration = Duration::from_millis(60);

/// A stall of a test: longer than its report takes on a machine with other work.
const LONG: Duration = Duration::from_millis(400);

/// Gives this process precedence over others of the machine, if this user may, so that they affect
/// no measurement.
fn first_in_line() {
    let _ = setpriority_process(None, -20);
    // The scheduler weighs sessions first.
    let _ = setsid();
    let _ = fs::write("/proc/self/autogroup", "-20");
}

/// The driver that the environment selects, or both.
fn drivers() -> &'static [Driver] {
    if on_epoll() { &[Driver::Epoll] } else { &[Driver::IoUring, Driver::Epoll] }
}

fn all_the_same(server: Server<Lines>) -> Server<Lines> {
    server
}

#[test]
fn stall_is_told_with_its_cause_while_it_lasts() {
    if !alone(stall_is_told_with_its_cause_while_it_lasts) {
        return;
    }
    first_in_line();
    for driver in drivers() {
        let lab = Lab::on(*driver, all_the_same);
        let mut peer = lab.peer();
        for (number, misdeed) in Misdeed::ALL.into_iter().enumerate() {
            let line = format!("{misdeed:?} {}", LONG.as_millis());
            let before = lab.times();
            peer.say(&line);
            let (stall, _) = lab.next(number);
            assert!(stall.ongoing && stall.lasted >= Duration::from_millis(25), "{driver:?}: {stall}");
            assert_eq!((stall.shard, stall.work), (0, StalledWork::Call), "{stall}");
            assert_eq!(stall.peer.as_ref().map(ToString::to_string), Some(peer.addr()), "{stall}");
            assert_eq!(stall.frame_bytes, Some(line.len() + 1), "{stall}");
            assert_eq!((stall.queue_waiting, stall.queue_lost), (Some(0), Some(0)), "{stall}");
            peer.hear();
            let stall = lab.over();
            let (ran, waited) = lab.since(before);
            let cause = misdeed.cause(ran, waited);
            assert_eq!(stall.cause, cause, "{driver:?}, {misdeed:?}, {ran:?} and {waited:?}: {stall}");
            // The last check before its end and the next one are a period apart.
            assert!(stall.lasted >= LONG && stall.lasted < 2 * LONG, "{stall}");
        }
        assert_eq!(lab.stalls().len(), Misdeed::ALL.len(), "{:?}", lab.stalls());
        lab.running.shutdown();
        lab.running.wait().unwrap();
    }
}

/// An action of a peer.
type Act = fn(&mut Peer);

#[test]
fn stall_names_the_work_and_its_connection() {
    if !alone(stall_names_the_work_and_its_connection) {
        return;
    }
    first_in_line();
    use StalledWork::{Admit, Call, Close, Heartbeat, Message, Open, Task};
    for driver in drivers() {
        let limits = Limits::default().heartbeat_interval(Some(Duration::from_millis(150)));
        let lab = Lab::on(*driver, |server| server.limits(limits));
        // The work, whether a new peer causes it, and the action of a peer that is there.
        let cases: [(StalledWork, bool, Act); 7] = [
            (Admit, true, |_| ()),
            (Open, true, |_| ()),
            (Call, false, |peer| peer.say("later")),
            (Message, false, |peer| peer.say("message")),
            (Task, false, |peer| peer.say("task")),
            (Heartbeat, false, |_| ()),
            (Close, false, |peer| peer.stream.shutdown(std::net::Shutdown::Both).unwrap()),
        ];
        for (number, (work, comes, act)) in cases.into_iter().enumerate() {
            let mut peer = (!comes).then(|| lab.peer());
            if let Some(peer) = &mut peer {
                peer.say("hello");
                peer.hear();
            }
            lab.plan.plan(work, Misdeed::Sleep);
            let mut peer = peer.unwrap_or_else(|| lab.peer());
            act(&mut peer);
            let (stall, _) = lab.next(number);
            assert_eq!(stall.work, work, "{driver:?}: {stall}");
            let has_peer = !matches!(work, Message | Task);
            let addr = has_peer.then(|| peer.addr());
            if work != Heartbeat {
                assert_eq!(stall.peer.as_ref().map(ToString::to_string), addr, "{stall}");
            }
            assert_eq!(stall.connection.is_some(), has_peer && work != Admit, "{stall}");
            lab.over();
        }
        lab.running.abort();
        lab.running.wait().unwrap();
    }
}

#[test]
fn stall_from_idle_is_told_as_soon_as_any() {
    if !alone(stall_from_idle_is_told_as_soon_as_any) {
        return;
    }
    first_in_line();
    for driver in drivers() {
        let lab = Lab::on(*driver, all_the_same);
        let mut peer = lab.peer();
        let mut late = Vec::new();
        for number in 0..5 {
            peer.say("hello");
            peer.hear();
            watchdog_rests();
            peer.say("Sleep 200");
            let (_, after) = lab.next(number);
            late.extend((after > TOLD_WITHIN).then_some(after));
            peer.hear();
            lab.over();
        }
        // Others may have the CPUs now and then.
        assert!(late.len() <= 1, "{driver:?}: told after {late:?}");
        lab.running.abort();
        lab.running.wait().unwrap();
    }
}

/// The threads of watchdogs of this process.
fn watchdogs() -> impl Iterator<Item = PathBuf> {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path());
    tasks.filter(|task| {
        fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == "ringserve-watch")
    })
}

/// Waits until it sleeps, and no timer is set that would wake it: then nothing but a shard wakes
/// it.
#[track_caller]
fn watchdog_rests() {
    let mut before = None;
    eventually("the watchdog rests", SOON, || {
        let sleep = watchdogs().next().and_then(|task| sleep_without_a_time(&task));
        // Twice in one sleep: an expired time shows as none until the timer goes off.
        let rests = sleep.is_some() && sleep == before;
        before = sleep;
        rests
    });
}

/// The number of a thread's sleep, if it waits on a timer that is off.
fn sleep_without_a_time(task: &Path) -> Option<String> {
    let status = fs::read_to_string(task.join("status")).ok()?;
    let sleep = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches"))?;
    // The system call in which it sleeps, and the first argument.
    let call = fs::read_to_string(task.join("syscall")).ok()?;
    let descriptor = call.split_whitespace().nth(1)?.strip_prefix("0x")?;
    let descriptor = u32::from_str_radix(descriptor, 16).ok()?;
    // The remaining time, and how often it expired unread.
    let timer = fs::read_to_string(format!("/proc/self/fdinfo/{descriptor}")).ok()?;
    let timer = timer.split_once("ticks: ")?.1;
    (timer.starts_with("0\n") && timer.contains("it_value: (0, 0)")).then(|| sleep.to_owned())
}

#[test]
fn watchdog_of_an_idle_server_makes_no_wake_up() {
    if !alone(watchdog_of_an_idle_server_makes_no_wake_up) {
        return;
    }
    first_in_line();
    for driver in drivers() {
        let lab = Lab::on(*driver, all_the_same);
        let mut peers: Vec<Peer> = (0..20).map(|_| lab.peer()).collect();
        for peer in &mut peers {
            peer.say("hello");
            peer.hear();
        }
        watchdog_rests();
        assert!(lab.stalls().is_empty());
        lab.running.abort();
        lab.running.wait().unwrap();
    }
}

#[test]
fn work_drains_and_ends_are_no_stalls() {
    if !alone(work_drains_and_ends_are_no_stalls) {
        return;
    }
    first_in_line();
    for driver in drivers() {
        // High enough that no scheduler causes one.
        let lab = Lab::on(*driver, |server| {
            server.stalls(StallOptions::default().over(Duration::from_millis(100)))
        });
        let control = lab.running.control();
        let mut peers: Vec<Peer> = (0..10).map(|_| lab.peer()).collect();
        for _ in 0..40 {
            peers.iter_mut().for_each(|peer| peer.say("Compute 1"));
            peers.iter_mut().for_each(|peer| _ = peer.hear());
        }
        lab.running.shutdown();
        for peer in &mut peers {
            assert_eq!(peer.hear(), "", "the drain ends it");
        }
        lab.running.wait().unwrap();
        let stalls = control.stalls();
        assert!(stalls.is_empty(), "{driver:?}: {stalls:?}");
        assert!(control.shard_times().iter().all(|times| times.cpu.is_zero()), "its thread is gone");
    }
}

#[test]
fn server_without_a_watchdog_has_no_thread_for_it() {
    if !alone(server_without_a_watchdog_has_no_thread_for_it) {
        return;
    }
    first_in_line();
    let lab = Lab::on(drivers()[0], |server| server.stalls(StallOptions::off()));
    assert!(watchdogs().next().is_none());
    let mut peer = lab.peer();
    peer.say("Sleep 200");
    peer.hear();
    assert!(lab.stalls().is_empty());
    lab.running.abort();
    lab.running.wait().unwrap();
}

#[test]
fn shares_of_a_shard_are_those_of_its_work() {
    if !alone(shares_of_a_shard_are_those_of_its_work) {
        return;
    }
    first_in_line();
    let lab = Lab::on(drivers()[0], all_the_same);
    let control = lab.running.control();
    let mut peer = lab.peer();
    let before = control.shard_times();
    assert_eq!(before.len(), 1);
    // Half of the time, in pieces that are too short for a stall.
    let until = Instant::now() + Duration::from_secs(3);
    while Instant::now() < until {
        peer.say("Compute 10");
        peer.hear();
        peer.say("rest 10");
        peer.hear();
    }
    let after = control.shard_times();
    let (busy, cpu) = (after[0].busy, after[0].cpu - before[0].cpu);
    assert!((0.2..0.75).contains(&(busy + after[0].starved)), "{after:?}");
    assert!(cpu > Duration::from_millis(300) && cpu < Duration::from_secs(2), "{cpu:?}");
    lab.running.abort();
    lab.running.wait().unwrap();
}

#[test]
fn task_of_a_runtime_that_keeps_a_shard_waiting_is_told() {
    if !alone(task_of_a_runtime_that_keeps_a_shard_waiting_is_told) {
        return;
    }
    first_in_line();
    let (plan, mesh) = (Arc::new(Plan::default()), Mesh::<u64>::new());
    let (planned, reach) = (plan.clone(), mesh.clone());
    let (say, said) = watch::channel(0);
    let server = Server::bind("127.0.0.1:0").shards(1).pin(false);
    let running = server
        .runtime(Runtime::Tokio)
        .framing(Lines::default())
        .start(move |shard| {
            let (plan, mut said) = (planned.clone(), said.clone());
            let task = async move {
                while said.changed().await.is_ok() {
                    plan.pass(StalledWork::Runtime);
                }
            };
            tokio::task::spawn_local(task);
            Naughty::new(&planned, &mesh, shard)
        })
        .unwrap();
    let lab = Lab { running, plan };
    let mut peer = lab.peer();
    for (number, misdeed) in [Misdeed::Sleep, Misdeed::Lock].into_iter().enumerate() {
        // A call that is over does not hold the shard.
        peer.say("hello");
        peer.hear();
        watchdog_rests();
        lab.plan.plan(StalledWork::Runtime, misdeed);
        say.send(number + 1).unwrap();
        let (stall, _) = lab.next(number);
        let told = (stall.work, stall.cause, stall.connection);
        assert_eq!(told, (StalledWork::Runtime, misdeed.cause(LONG, Duration::ZERO), None), "{stall}");
        lab.over();
    }
    // A shard that computes is reported once something waits for it.
    watchdog_rests();
    lab.plan.plan(StalledWork::Runtime, Misdeed::Compute);
    say.send(7).unwrap();
    eventually("the task computes", SOON, || lab.plan.misdeeds.load(SeqCst) == 3);
    reach.try_send(0, 1).unwrap();
    let (stall, _) = lab.next(2);
    assert_eq!(stall.work, StalledWork::Runtime, "{stall}");
    lab.over();
    lab.running.abort();
    lab.running.wait().unwrap();
}

/// The child: a server that prints its address, and logs its stalls.
#[test]
#[ignore = "the child process of the other tests here, which start it; alone: RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test processes stalls::child_serves -- --exact --ignored --nocapture"]
fn child_serves() {
    if !is_child() {
        return;
    }
    first_in_line();
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stdout).init();
    let driver: Driver = std::env::var(DRIVER).unwrap().parse().unwrap();
    let lab = Lab::on(driver, all_the_same);
    println!("\nserves at {}", lab.running.local_addrs()[0]);
    let mut line = String::new();
    loop {
        line.clear();
        std::io::stdin().read_line(&mut line).unwrap();
        println!("\nstalls: {}", lab.stalls().len());
    }
}

/// Variable with the child's driver.
const DRIVER: &str = "RINGSERVE_TEST_STALLS_DRIVER";

fn child(driver: Driver) -> (Process, Peer) {
    let mut process = Process::start_as(child_serves, |command| command.env(DRIVER, driver.to_string()));
    let addr = process.line_after("serves at ");
    let stream = TcpStream::connect(addr).unwrap();
    (process, Peer { lines: BufReader::new(stream.try_clone().unwrap()), stream })
}

#[test]
fn mutex_that_is_never_released_is_in_the_log() {
    for driver in drivers() {
        let (mut process, mut peer) = child(*driver);
        peer.say("Lock 100000000");
        let mut tell = || process.line_after("WARN ringserve_server::watchdog::thread: shard 0 stalled for ");
        let first = tell();
        // A handler without a CPU does not wait yet, and is reported again.
        let line = if first.contains(" has no CPU") { tell() } else { first };
        let says = format!("ms: a call for {} (connection ", peer.addr());
        assert!(line.contains(&says) && line.contains(", frame of 15 bytes) waits for a lock"), "{line}");
        assert!(line.ends_with("; 0 connections wait in its accept queue, 0 packets lost there"), "{line}");
        process.line_after("shard 0 stalled for ");
        // The process is killed.
    }
}

#[test]
fn loop_without_an_end_is_in_the_log() {
    let (mut process, mut peer) = child(drivers()[0]);
    peer.say("Compute 100000000");
    let line = process.line_after("shard 0 stalled for ");
    assert!(line.contains("computes") || line.contains("has no CPU"), "{line}");
}

#[test]
fn process_that_was_stopped_has_no_stall() {
    for driver in drivers() {
        let (mut process, mut peer) = child(*driver);
        // A server that goes on: how long the other one is stopped is a stall here.
        let lab = Lab::on(*driver, all_the_same);
        let mut other = lab.peer();
        for round in 0..10 {
            // In the middle of a turn, in most rounds.
            peer.say("spin 18");
            other.say(format!("rest {round}"));
            other.hear();
            process.signal(Signal::STOP);
            other.say("Sleep 150");
            other.hear();
            process.signal(Signal::CONT);
            peer.hear();
        }
        eventually("each stall of the other server is reported", SOON, || lab.stalls().len() >= 10);
        lab.running.abort();
        lab.running.wait().unwrap();
        process.say("");
        let told: usize = process.line_after("stalls: ").parse().unwrap();
        // While others compute, one turn may take 25 ms.
        assert!(told <= 1, "{driver:?}: {told} of 10 stops are told as stalls");
    }
}
