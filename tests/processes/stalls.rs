//! Shards that are stalled, on the real kernel and on both drivers: what is told of them, how soon, and of what nothing is told.
//!
//! Each test has a process to itself, since what others compute would be a cause. The campaign is ignored:
//! `cargo test --release -p ringserve-tests --test processes stalls::causes_drawn_blind -- --ignored --nocapture`;
//! `RINGSERVE_SEED` is its seed.

use std::convert::Infallible;
use std::fmt::Debug;
use std::fs;
use std::hint::spin_loop;
use std::io::{BufRead, BufReader, Read, Write, pipe};
use std::net::TcpStream;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ringserve::framing::Lines;
use ringserve::limits::Stalls;
use ringserve::stats::{Stall, StallCause, StalledWork};
use ringserve::sync::Mesh;
use ringserve::{
    Closed, Cx, Driver, Frame, Limits, Opening, Refusal, Runtime, Server, ServerHandle, Service, Shard,
};
use ringserve_tests::child::{Process, is_child};
use ringserve_tests::{Random, SOON, alone, eventually, on_epoll};
use rustix::process::{Signal, setpriority_process, setsid};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tokio::sync::watch;

/// The bar: a stall is told this long after it began.
const TOLD_WITHIN: Duration = Duration::from_millis(60);

/// A stall of a test: longer than it takes to be told on a machine that does other things as well.
const LONG: Duration = Duration::from_millis(400);

/// Something that a handler must not do, for a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Misdeed {
    Sleep,
    Lock,
    Compute,
    Read,
    /// Computes where two other threads have the same CPU.
    Starve,
}

impl Misdeed {
    const ALL: [Misdeed; 5] =
        [Misdeed::Sleep, Misdeed::Lock, Misdeed::Compute, Misdeed::Read, Misdeed::Starve];

    /// What is to be told of it, if the shard could have run for `waited` meanwhile, and ran for `ran`.
    fn cause(self, ran: Duration, waited: Duration) -> StallCause {
        match self {
            Misdeed::Sleep => StallCause::Sleep,
            Misdeed::Lock => StallCause::Lock,
            // It was starved, by others than the test's.
            Misdeed::Compute if waited > ran => StallCause::Starved,
            Misdeed::Compute => StallCause::Cpu,
            Misdeed::Read => StallCause::Read,
            Misdeed::Starve => StallCause::Starved,
        }
    }

    fn act(self, time: Duration) {
        match self {
            Misdeed::Sleep => thread::sleep(time),
            Misdeed::Lock => lock(time),
            Misdeed::Compute => compute(time),
            Misdeed::Read => read(time),
            Misdeed::Starve => starve(time),
        }
    }
}

impl FromStr for Misdeed {
    type Err = ();

    fn from_str(name: &str) -> Result<Misdeed, ()> {
        Misdeed::ALL.into_iter().find(|misdeed| format!("{misdeed:?}") == name).ok_or(())
    }
}

/// Waits for a lock that another thread holds for this long.
fn lock(time: Duration) {
    let held = Arc::new(Mutex::new(()));
    let (tell, locked) = channel();
    let holds = held.clone();
    thread::spawn(move || {
        let _held = holds.lock().unwrap();
        tell.send(()).unwrap();
        thread::sleep(time);
    });
    locked.recv().unwrap();
    drop(held.lock().unwrap());
}

fn compute(time: Duration) {
    let began = Instant::now();
    while began.elapsed() < time {
        spin_loop();
    }
}

/// Reads from a pipe into which nothing comes for this long.
fn read(time: Duration) {
    let (mut from, mut to) = pipe().unwrap();
    thread::spawn(move || {
        thread::sleep(time);
        to.write_all(b"x").unwrap();
    });
    from.read_exact(&mut [0]).unwrap();
}

/// Computes on a CPU that two other threads want, too.
fn starve(time: Duration) {
    let all = sched_getaffinity(None).unwrap();
    let first = (0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).unwrap();
    let on_first = move || {
        let mut one = CpuSet::new();
        one.set(first);
        sched_setaffinity(None, &one).unwrap();
    };
    let others: Vec<_> = (0..2)
        .map(|_| {
            thread::spawn(move || {
                on_first();
                compute(time);
            })
        })
        .collect();
    on_first();
    compute(time);
    sched_setaffinity(None, &all).unwrap();
    others.into_iter().for_each(|other| other.join().unwrap());
}

/// Which method of the service is to misbehave next.
#[derive(Default)]
struct Plan {
    next: Mutex<Option<(StalledWork, Misdeed, Duration)>>,
    /// When a handler began to misbehave, in nanoseconds since the start of the plan's clock.
    began: Mutex<Option<Instant>>,
    misdeeds: AtomicU64,
}

impl Plan {
    fn misbehave(&self, misdeed: Misdeed, time: Duration) {
        *self.began.lock().unwrap() = Some(Instant::now());
        self.misdeeds.fetch_add(1, SeqCst);
        misdeed.act(time);
    }

    /// Does what is planned here.
    fn pass(&self, here: StalledWork) {
        let mut next = self.next.lock().unwrap();
        let planned = next.take_if(|(work, _, _)| *work == here);
        drop(next);
        if let Some((_, misdeed, time)) = planned {
            self.misbehave(misdeed, time);
        }
    }

    fn plan(&self, work: StalledWork, misdeed: Misdeed) {
        *self.next.lock().unwrap() = Some((work, misdeed, LONG));
    }
}

/// Answers each line `NAME MILLISECONDS` after it did that.
struct Naughty {
    plan: Arc<Plan>,
    mesh: Mesh<u64>,
}

impl Naughty {
    fn new(plan: &Arc<Plan>, mesh: &Mesh<u64>, shard: &Shard) -> Naughty {
        let planned = plan.clone();
        mesh.register(shard, move |_, _| planned.pass(StalledWork::Message));
        Naughty { plan: plan.clone(), mesh: mesh.clone() }
    }
}

impl Service for Naughty {
    type Session = ();
    type Error = Infallible;

    async fn open(&self, _: &Opening<'_>) -> Result<(), Refusal> {
        self.plan.pass(StalledWork::Open);
        Ok(())
    }

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        let line = String::from_utf8_lossy(&line).into_owned();
        let mut words = line.split(' ');
        match words.next().unwrap_or_default() {
            "message" => drop(self.mesh.try_send(0, 1)),
            "later" => {
                cx.sleep(Duration::from_millis(2)).await;
                self.plan.pass(StalledWork::Call);
            }
            "task" => {
                let plan = self.plan.clone();
                drop(cx.shard().spawn(async move { plan.pass(StalledWork::Task) }));
            }
            name => {
                if let Ok(misdeed) = name.parse::<Misdeed>() {
                    let time = words.next().and_then(|time| time.parse().ok()).unwrap_or_default();
                    self.plan.misbehave(misdeed, Duration::from_millis(time));
                }
            }
        }
        cx.reply(line.as_bytes());
        Ok(())
    }

    fn heartbeat(&self, _: &Cx<'_, ()>) {
        self.plan.pass(StalledWork::Heartbeat);
    }

    fn close(&self, _: &Closed<'_, ()>) {
        self.plan.pass(StalledWork::Close);
    }
}

/// A server of one shard whose service misbehaves.
struct Lab {
    running: ServerHandle,
    plan: Arc<Plan>,
}

impl Lab {
    fn on(driver: Driver, change: impl FnOnce(Server<Lines>) -> Server<Lines>) -> Lab {
        let (plan, mesh) = (Arc::new(Plan::default()), Mesh::new());
        let (planned, admits) = (plan.clone(), plan.clone());
        let server =
            Server::bind("127.0.0.1:0").shards(1).pin(false).driver(driver).framing(Lines::default());
        let server = server.admit(move |_| {
            admits.pass(StalledWork::Admit);
            true
        });
        let running = change(server).start(move |shard| Naughty::new(&planned, &mesh, shard)).unwrap();
        Lab { running, plan }
    }

    fn peer(&self) -> Peer {
        let stream = TcpStream::connect(self.running.local_addrs()[0]).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        Peer { lines: BufReader::new(stream.try_clone().unwrap()), stream }
    }

    /// How long the shard ran, and could have run without a CPU.
    fn times(&self) -> (Duration, Duration) {
        let times = self.running.control().shard_times();
        (times[0].cpu, times[0].cpu_wait)
    }

    fn since(&self, before: (Duration, Duration)) -> (Duration, Duration) {
        let now = self.times();
        (now.0 - before.0, now.1 - before.1)
    }

    fn stalls(&self) -> Vec<Stall> {
        self.running.control().stalls()
    }

    /// The stall that follows those that there were, and how long after its handler began it was told.
    #[track_caller]
    fn next(&self, before: usize) -> (Stall, Duration) {
        let mut found = None;
        eventually("a stall is told", SOON, || {
            found = self.stalls().get(before).cloned();
            found.is_some()
        });
        let began = self.plan.began.lock().unwrap().expect("a handler misbehaves");
        (found.unwrap(), began.elapsed())
    }

    /// The last stall, which is over.
    #[track_caller]
    fn over(&self) -> Stall {
        eventually("the stall is over", SOON, || self.stalls().last().is_some_and(|stall| !stall.ongoing));
        self.stalls().pop().unwrap()
    }
}

struct Peer {
    stream: TcpStream,
    lines: BufReader<TcpStream>,
}

impl Peer {
    fn say(&mut self, line: impl AsRef<str>) {
        self.stream.write_all(format!("{}\n", line.as_ref()).as_bytes()).unwrap();
    }

    #[track_caller]
    fn hear(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line
    }

    fn addr(&self) -> String {
        self.stream.local_addr().unwrap().to_string()
    }
}

/// What a test measures is not what others of the machine compute, where this user may come before them.
fn first_in_line() {
    let _ = setpriority_process(None, -20);
    // The scheduler weighs sessions first.
    let _ = setsid();
    let _ = fs::write("/proc/self/autogroup", "-20");
}

/// The driver that the environment decides, or both.
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
            // The last look before its end and the first one behind it are a period apart.
            assert!(stall.lasted >= LONG && stall.lasted < 2 * LONG, "{stall}");
        }
        assert_eq!(lab.stalls().len(), Misdeed::ALL.len(), "{:?}", lab.stalls());
        lab.running.shutdown();
        lab.running.wait().unwrap();
    }
}

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
        // What makes the work happen, at a peer that is there or comes for it.
        let cases: [(StalledWork, bool, fn(&mut Peer)); 7] = [
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

/// How often the threads of watchdogs of this process were put to sleep.
fn watchdog_sleeps() -> u64 {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path());
    let watchdogs = tasks.filter(|task| {
        fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == "ringserve-watch")
    });
    let sleeps = watchdogs.map(|task| {
        let status = fs::read_to_string(task.join("status")).unwrap();
        let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    });
    sleeps.sum()
}

/// Waits until it does not wake for some time.
#[track_caller]
fn watchdog_rests() {
    let mut before = watchdog_sleeps();
    eventually("the watchdog rests", SOON, || {
        thread::sleep(Duration::from_millis(150));
        std::mem::replace(&mut before, watchdog_sleeps()) == before
    });
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
        let before = watchdog_sleeps();
        thread::sleep(Duration::from_secs(5));
        // The wheel of time limits may turn once in that time, and what it did be published: each costs it three looks.
        let woke = watchdog_sleeps() - before;
        assert!(woke <= 6, "{driver:?}: it woke {woke} times in 5 s");
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
        // High enough that no scheduler makes one.
        let lab =
            Lab::on(*driver, |server| server.stalls(Stalls::default().over(Duration::from_millis(100))));
        let control = lab.running.control();
        let mut peers: Vec<Peer> = (0..10).map(|_| lab.peer()).collect();
        for _ in 0..40 {
            peers.iter_mut().for_each(|peer| peer.say("Compute 1"));
            peers.iter_mut().for_each(|peer| _ = peer.hear());
        }
        lab.running.shutdown();
        thread::sleep(Duration::from_millis(300));
        drop(peers);
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
    let lab = Lab::on(drivers()[0], |server| server.stalls(Stalls::off()));
    assert_eq!(watchdog_sleeps(), 0);
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
    // Half of the time, in pieces that are no stalls.
    let until = Instant::now() + Duration::from_secs(3);
    while Instant::now() < until {
        peer.say("Compute 10");
        peer.hear();
        thread::sleep(Duration::from_millis(10));
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
        // A call that is over is not what keeps the shard.
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
    // One that computes is told once something waits for the shard.
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

/// The child: a server that tells its address, and its stalls to the log.
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

/// Tells the child its driver.
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
        let line = process.line_after("WARN ringserve_server::watchdog::thread: ");
        assert!(line.starts_with("shard 0 stalled for "), "{line}");
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
        for round in 0..10 {
            // In the middle of a turn, in most rounds.
            peer.say("Compute 12");
            thread::sleep(Duration::from_millis(round));
            process.signal(Signal::STOP);
            thread::sleep(Duration::from_millis(150));
            process.signal(Signal::CONT);
            peer.hear();
        }
        process.say("");
        let told: usize = process.line_after("stalls: ").parse().unwrap();
        // Beside others that compute, one turn may take 25 ms.
        assert!(told <= 1, "{driver:?}: {told} of 10 stops are told as stalls");
    }
}

/// Draws causes, without telling the watchdog, and counts what it says: `STALLS` of each, from idle and under load.
#[test]
#[ignore = "a minute, and it wants two CPUs that are idle: cargo test --release -p ringserve-tests --test processes stalls::causes_drawn_blind -- --ignored --nocapture"]
fn causes_drawn_blind() {
    first_in_line();
    let seed = std::env::var("RINGSERVE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let mut random = Random::new(seed);
    for driver in drivers() {
        let lab = Lab::on(*driver, all_the_same);
        let mut peer = lab.peer();
        let (mut right, mut wrong) = (0, Vec::new());
        for number in 0..50 {
            let misdeed = Misdeed::ALL[random.below(5) as usize];
            let time = 60 + random.below(200);
            let before = lab.times();
            thread::sleep(Duration::from_millis(random.below(60)));
            peer.say(format!("{misdeed:?} {time}"));
            peer.hear();
            eventually("the stall is over", SOON, || {
                let stalls = lab.stalls();
                // The last 64 are kept, so all of these.
                stalls.len() == number + 1 && !stalls[number].ongoing
            });
            let stall = lab.stalls().pop().unwrap();
            let (ran, waited) = lab.since(before);
            match stall.cause == misdeed.cause(ran, waited) {
                true => right += 1,
                false => wrong.push((misdeed, stall.to_string())),
            }
        }
        println!("{driver}: {right} of 50 causes are right; seed {seed}");
        tell_all(&wrong);
        drop(peer);
        lab.running.abort();
        lab.running.wait().unwrap();
        let lab = Lab::on(*driver, all_the_same);
        let mut peer = lab.peer();
        let mut after = Vec::new();
        for number in 0..100u64 {
            if number.is_multiple_of(10) {
                watchdog_rests();
            }
            thread::sleep(Duration::from_millis(random.below(40)));
            let known = lab.running.control().stalls().iter().filter(|stall| stall.ongoing).count();
            assert_eq!(known, 0);
            *lab.plan.began.lock().unwrap() = None;
            peer.say("Sleep 150");
            let mut told = None;
            eventually("a stall is told", SOON, || {
                let began = *lab.plan.began.lock().unwrap();
                told = began
                    .filter(|_| lab.stalls().iter().any(|stall| stall.ongoing))
                    .map(|began| began.elapsed());
                told.is_some()
            });
            after.extend(told);
            peer.hear();
            lab.over();
        }
        after.sort();
        let in_time = after.iter().filter(|after| **after <= TOLD_WITHIN).count();
        println!(
            "{driver}: {in_time} of 100 told within {TOLD_WITHIN:?}; median {:?}, longest {:?}",
            after[50], after[99]
        );
        lab.running.abort();
        lab.running.wait().unwrap();
        assert!(
            wrong.is_empty() && in_time == 100,
            "{} causes are wrong, {in_time} of 100 in time",
            wrong.len()
        );
    }
}

fn tell_all(all: &[impl Debug]) {
    all.iter().for_each(|one| println!("  {one:?}"));
}
