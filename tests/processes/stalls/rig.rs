//! A server of one shard whose service misbehaves as a test plans it, and its peer.

use std::convert::Infallible;
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
use ringserve::server::Driver;
use ringserve::service::{CloseCx, OpenCx, Refusal};
use ringserve::stats::{Stall, StallCause, StalledWork};
use ringserve::sync::Mesh;
use ringserve::{Cx, Frame, Server, ServerHandle, Service, Shard};
use ringserve_tests::{SOON, eventually};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

use super::LONG;

/// Something that a handler must not do, for some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Misdeed {
    Sleep,
    Lock,
    Compute,
    Read,
    /// Computes where two other threads have the same CPU.
    Starve,
}

impl Misdeed {
    pub(super) const ALL: [Misdeed; 5] =
        [Misdeed::Sleep, Misdeed::Lock, Misdeed::Compute, Misdeed::Read, Misdeed::Starve];

    /// The expected report, if the shard could have run for `waited` meanwhile, and ran for `ran`.
    pub(super) fn cause(self, ran: Duration, waited: Duration) -> StallCause {
        match self {
            Misdeed::Sleep => StallCause::Sleep,
            Misdeed::Lock => StallCause::Lock,
            // It was starved, by others than the test's threads.
            Misdeed::Compute if waited > ran => StallCause::Starved,
            Misdeed::Compute => StallCause::Cpu,
            Misdeed::Read => StallCause::Read,
            Misdeed::Starve => StallCause::Starved,
        }
    }

    pub(super) fn act(self, time: Duration) {
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

/// Computes for this long of its thread's own time, which stands still while the process is
/// stopped.
fn spin(time: Duration) {
    let own = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap();
    let began = own();
    while own() - began < time {
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

/// The method of the service that misbehaves next.
#[derive(Default)]
pub(super) struct Plan {
    next: Mutex<Option<(StalledWork, Misdeed, Duration)>>,
    /// Time at which a handler began to misbehave, in nanoseconds since the start of the plan's
    /// clock.
    pub(super) began: Mutex<Option<Instant>>,
    pub(super) misdeeds: AtomicU64,
}

impl Plan {
    pub(super) fn misbehave(&self, misdeed: Misdeed, time: Duration) {
        *self.began.lock().unwrap() = Some(Instant::now());
        self.misdeeds.fetch_add(1, SeqCst);
        misdeed.act(time);
    }

    /// Carries out the plan for this method.
    pub(super) fn pass(&self, here: StalledWork) {
        let mut next = self.next.lock().unwrap();
        let planned = next.take_if(|(work, _, _)| *work == here);
        drop(next);
        if let Some((_, misdeed, time)) = planned {
            self.misbehave(misdeed, time);
        }
    }

    pub(super) fn plan(&self, work: StalledWork, misdeed: Misdeed) {
        *self.next.lock().unwrap() = Some((work, misdeed, LONG));
    }
}

/// Answers each line `NAME MILLISECONDS` after that misdeed, `rest MILLISECONDS` after a time in
/// which the shard has nothing to do, and `spin MILLISECONDS` after that time of a CPU.
pub(super) struct Naughty {
    plan: Arc<Plan>,
    mesh: Mesh<u64>,
}

impl Naughty {
    pub(super) fn new(plan: &Arc<Plan>, mesh: &Mesh<u64>, shard: &Shard) -> Naughty {
        let planned = plan.clone();
        mesh.register(shard, move |_, _| planned.pass(StalledWork::Message));
        Naughty { plan: plan.clone(), mesh: mesh.clone() }
    }
}

impl Service for Naughty {
    type Session = ();
    type Error = Infallible;

    async fn open(&self, _: &OpenCx<'_>) -> Result<(), Refusal> {
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
                let time = words.next().and_then(|time| time.parse().ok()).unwrap_or_default();
                let time = Duration::from_millis(time);
                if name == "rest" {
                    cx.sleep(time).await;
                } else if name == "spin" {
                    spin(time);
                } else if let Ok(misdeed) = name.parse::<Misdeed>() {
                    self.plan.misbehave(misdeed, time);
                }
            }
        }
        cx.reply(line.as_bytes());
        Ok(())
    }

    fn heartbeat(&self, _: &Cx<'_, ()>) {
        self.plan.pass(StalledWork::Heartbeat);
    }

    fn close(&self, _: &CloseCx<'_, ()>) {
        self.plan.pass(StalledWork::Close);
    }
}

/// A server of one shard whose service misbehaves.
pub(super) struct Lab {
    pub(super) running: ServerHandle,
    pub(super) plan: Arc<Plan>,
}

impl Lab {
    pub(super) fn on(driver: Driver, change: impl FnOnce(Server<Lines>) -> Server<Lines>) -> Lab {
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

    pub(super) fn peer(&self) -> Peer {
        let stream = TcpStream::connect(self.running.local_addrs()[0]).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        Peer { lines: BufReader::new(stream.try_clone().unwrap()), stream }
    }

    /// Times for which the shard ran, and could have run without a CPU.
    pub(super) fn times(&self) -> (Duration, Duration) {
        let times = self.running.control().shard_times();
        (times[0].cpu, times[0].cpu_wait)
    }

    pub(super) fn since(&self, before: (Duration, Duration)) -> (Duration, Duration) {
        let now = self.times();
        (now.0 - before.0, now.1 - before.1)
    }

    pub(super) fn stalls(&self) -> Vec<Stall> {
        self.running.control().stalls()
    }

    /// The stall that follows the earlier ones, and the time from the start of its handler to its
    /// report.
    #[track_caller]
    pub(super) fn next(&self, before: usize) -> (Stall, Duration) {
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
    pub(super) fn over(&self) -> Stall {
        eventually("the stall is over", SOON, || self.stalls().last().is_some_and(|stall| !stall.ongoing));
        self.stalls().pop().unwrap()
    }
}

pub(super) struct Peer {
    pub(super) stream: TcpStream,
    pub(super) lines: BufReader<TcpStream>,
}

impl Peer {
    pub(super) fn say(&mut self, line: impl AsRef<str>) {
        self.stream.write_all(format!("{}\n", line.as_ref()).as_bytes()).unwrap();
    }

    #[track_caller]
    pub(super) fn hear(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line
    }

    pub(super) fn addr(&self) -> String {
        self.stream.local_addr().unwrap().to_string()
    }
}
