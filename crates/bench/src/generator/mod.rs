//! The generator: many connections on one thread for each CPU, in a closed or an open loop.
//!
//! In a closed loop each connection sends its messages together and the next ones when all replies
//! have arrived. In an open loop messages are due at fixed times, whatever happened to earlier
//! ones, and a reply's latency counts from the time at which its message was due: a server that
//! stalls for a second is charged with every message of that second, which a closed loop forgets to
//! send (coordinated omission).
//!
//! It runs on epoll, edge-triggered, with one read and one write for each batch of messages: the
//! least cost of a client. Each thread counts its own CPU time, so that a run in which the
//! generator was the bottleneck can be marked.

mod churn;
mod connection;
mod fanout;
mod firehose;
mod newcomers;

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use mio::{Events, Interest, Poll, Token};
use rustix::time::{ClockId, clock_gettime};
use socket2::{Domain, Socket, Type};

use crate::process;
use crate::steps::{Messages, Shape};
use crate::wire::{Layer, Wire};
use connection::Connection;
use firehose::Firehose;
use newcomers::Newcomers;

/// Connections from one source address; there are 28 000 ports by default.
const PER_ADDRESS: usize = 20_000;

/// Connections opened by a thread before it gives the server time to accept them: below the backlog
/// of 4096, even if several threads open theirs.
const CONNECT_BATCH: usize = 256;

/// The longest wait of a message for its reply; a server silent for longer is stuck.
const REPLY_MAX: Duration = Duration::from_secs(10);

/// Interval at which a thread without work checks whether the run is over.
const LOOK: Duration = Duration::from_millis(20);

/// Messages an open loop sends before it looks for replies.
const SENDS_MAX: u64 = 64;

/// In an open loop a thread sleeps only if nothing is due for longer than this, since epoll sleeps
/// whole milliseconds.
const SLEEP_MIN: Duration = Duration::from_millis(2);

/// Latencies from 1 ns to a minute, to three digits.
fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("the bounds are sound")
}

/// The times at which messages are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Pace {
    /// When the replies to the previous ones have arrived.
    Closed,
    /// This many per second over all connections.
    Open(f64),
    /// Once on each connection, which is then closed; this many are in progress at once.
    Churn,
    /// On one connection, and the reply is a delivery on each of the others.
    Fanout,
}

/// The plan of a load.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// The server.
    pub(crate) address: SocketAddr,
    /// Connections over all threads.
    pub(crate) connections: usize,
    /// The messages of each connection.
    pub(crate) shape: Shape,
    /// The times of messages.
    pub(crate) pace: Pace,
    /// One more connection keeps large messages moving back and forth; it is not counted.
    pub(crate) firehose: bool,
    /// Additional connections per second, each for one round trip, which is not counted.
    pub(crate) newcomers: Option<f64>,
    /// CPUs, with one thread on each.
    pub(crate) cpus: Vec<usize>,
}

/// The phase of a run.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Phase {
    WarmUp,
    Measured,
    Over,
}

/// State shared by the threads and their director.
struct Shared {
    phase: AtomicU8,
    /// Threads that failed.
    failed: AtomicU8,
    /// Messages answered, by thread.
    answered: Vec<AtomicU64>,
}

impl Shared {
    fn phase(&self) -> u8 {
        self.phase.load(Ordering::Relaxed)
    }

    fn answered(&self) -> u64 {
        self.answered.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }
}

/// Results of one thread, or of all of them.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    /// Time from sending, or from when a message was due, to the whole reply.
    pub(crate) latency: Histogram<u64>,
    /// Delay of sent messages, in an open loop.
    pub(crate) lateness: Histogram<u64>,
    /// Times of additional connections: from the connect to the reply.
    pub(crate) newcomers: Histogram<u64>,
    /// Additional connections per second.
    pub(crate) newcomers_per_second: f64,
    /// The busiest thread's share of a CPU.
    pub(crate) busy: f64,
}

impl Outcome {
    fn new() -> Outcome {
        Outcome {
            latency: histogram(),
            lateness: histogram(),
            newcomers: histogram(),
            newcomers_per_second: 0.0,
            busy: 0.0,
        }
    }
}

/// A run in progress.
pub(crate) struct Running<'a> {
    shared: &'a Shared,
}

impl Running<'_> {
    /// Messages answered since the start.
    pub(crate) fn answered(&self) -> u64 {
        self.shared.answered()
    }

    /// Sleeps, unless a thread fails. False if one did.
    pub(crate) fn go_on(&self, time: Duration) -> bool {
        let end = Instant::now() + time;
        while self.shared.failed.load(Ordering::Relaxed) == 0 {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            thread::sleep(left.min(LOOK));
        }
        false
    }
}

/// Opens the connections, warms up, and measures while `direct` runs, which decides how long that
/// is.
pub(crate) fn run<R>(
    plan: &Plan,
    warm_up: Duration,
    direct: impl FnOnce(&Running<'_>) -> io::Result<R>,
) -> io::Result<(Outcome, R)> {
    let shared = Shared {
        phase: AtomicU8::new(Phase::WarmUp as u8),
        failed: AtomicU8::new(0),
        answered: plan.cpus.iter().map(|_| AtomicU64::new(0)).collect(),
    };
    let connected = Barrier::new(plan.cpus.len() + 1);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..plan.cpus.len())
            .map(|number| {
                let (shared, connected) = (&shared, &connected);
                scope.spawn(move || {
                    let outcome = match plan.pace {
                        Pace::Churn => churn::one_thread(plan, number, shared, connected),
                        Pace::Fanout => fanout::one_thread(plan, number, shared, connected),
                        _ => one_thread(plan, number, shared, connected),
                    };
                    if outcome.is_err() {
                        shared.failed.fetch_add(1, Ordering::Relaxed);
                    }
                    outcome
                })
            })
            .collect();
        connected.wait();
        let running = Running { shared: &shared };
        running.go_on(warm_up);
        shared.phase.store(Phase::Measured as u8, Ordering::Relaxed);
        let directed = direct(&running);
        shared.phase.store(Phase::Over as u8, Ordering::Relaxed);
        let mut all = Outcome::new();
        for thread in threads {
            let one = thread.join().map_err(|_| io::Error::other("a generator thread panicked"))??;
            all.latency.add(&one.latency).map_err(io::Error::other)?;
            all.lateness.add(&one.lateness).map_err(io::Error::other)?;
            all.newcomers.add(&one.newcomers).map_err(io::Error::other)?;
            all.newcomers_per_second += one.newcomers_per_second;
            all.busy = all.busy.max(one.busy);
        }
        Ok((all, directed?))
    })
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Times are in nanoseconds since the thread's start.
struct Thread<'a> {
    plan: &'a Plan,
    connections: Vec<Connection>,
    scratch: Vec<u8>,
    messages: Messages,
    /// Number of its first connection, from which the signatures count.
    first: usize,
    started: Instant,
    outcome: Outcome,
    answered: u64,
    firehose: Option<Firehose>,
    newcomers: Option<Newcomers>,
}

fn one_thread(plan: &Plan, number: usize, shared: &Shared, connected: &Barrier) -> io::Result<Outcome> {
    let threads = plan.cpus.len();
    let share = |number: usize| plan.connections * number / threads;
    let made =
        process::pin_to(plan.cpus[number]).and_then(|()| connect_all(plan, share(number)..share(number + 1)));
    connected.wait();
    let (mut poll, connections) = made?;
    let firehose = match plan.firehose && number == 0 {
        true => Some(Firehose::connect(plan, &poll)?),
        false => None,
    };
    // Only the first thread opens them, so that they are as even as their rate.
    let newcomers = plan.newcomers.filter(|_| number == 0).map(|rate| Newcomers::new(plan, rate));
    let mut thread = Thread {
        plan,
        connections,
        scratch: vec![0; 64 << 10],
        messages: plan.shape.messages(),
        first: share(number),
        started: Instant::now(),
        outcome: Outcome::new(),
        answered: 0,
        firehose,
        newcomers,
    };
    thread.run(&mut poll, shared, &shared.answered[number])?;
    Ok(thread.outcome)
}

impl Thread<'_> {
    fn run(&mut self, poll: &mut Poll, shared: &Shared, answered: &AtomicU64) -> io::Result<()> {
        let per_thread = match self.plan.pace {
            Pace::Open(rate) => rate * self.connections.len() as f64 / self.plan.connections as f64,
            _ => 0.0,
        };
        if self.connections.is_empty() {
            return Ok(());
        }
        if self.plan.pace == Pace::Closed {
            for number in 0..self.connections.len() {
                self.send(number, self.plan.shape.pipeline as u32, self.now())?;
            }
        }
        let mut events = Events::with_capacity(1024);
        let (mut sent, mut measured) = (0u64, None);
        loop {
            match shared.phase() {
                phase if phase == Phase::Over as u8 => break,
                phase if phase == Phase::Measured as u8 && measured.is_none() => {
                    self.outcome.latency.reset();
                    self.outcome.lateness.reset();
                    self.outcome.newcomers.reset();
                    measured = Some((cpu_time(), Instant::now()));
                }
                _ => {}
            }
            let mut pause = LOOK;
            if per_thread > 0.0 {
                let now = self.now();
                let due = |sent: u64| (sent as f64 * 1e9 / per_thread) as u64;
                // Replies are received even while it is late.
                let most = sent + SENDS_MAX;
                while due(sent) <= now && sent < most {
                    let number = (sent % self.connections.len() as u64) as usize;
                    self.send(number, 1, due(sent))?;
                    let late = self.now() - due(sent);
                    self.outcome.lateness.saturating_record(late.max(1));
                    sent += 1;
                }
                pause = Duration::from_nanos(due(sent).saturating_sub(self.now())).min(LOOK);
                pause = if pause > SLEEP_MIN { pause - SLEEP_MIN / 2 } else { Duration::ZERO };
            }
            if let Some(newcomers) = &mut self.newcomers {
                pause = pause.min(newcomers.begin_due(poll)?);
            }
            match poll.poll(&mut events, Some(pause)) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                polled => polled?,
            }
            for event in &events {
                let number = event.token().0;
                if let Some(newcomers) = &mut self.newcomers
                    && newcomers.has(number)
                {
                    if let Some(took) = newcomers.go_on(number)? {
                        self.outcome.newcomers.saturating_record(took);
                    }
                    continue;
                }
                if number == firehose::TOKEN.0 {
                    self.firehose.as_mut().map_or(Ok(()), Firehose::go_on)?;
                    continue;
                }
                if event.is_readable() {
                    self.receive(number)?;
                }
                if event.is_writable() {
                    self.write(number)?;
                }
            }
            answered.store(self.answered, Ordering::Relaxed);
            self.check_silence(events.is_empty())?;
        }
        if let Some((cpu, since)) = measured {
            let time = since.elapsed().as_secs_f64();
            self.outcome.busy = (cpu_time() - cpu).as_secs_f64() / time;
            self.outcome.newcomers_per_second = self.outcome.newcomers.len() as f64 / time;
        }
        Ok(())
    }

    fn now(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    fn send(&mut self, number: usize, count: u32, at: u64) -> io::Result<()> {
        self.connections[number].queue(count, at, self.plan.shape.sent_bytes());
        self.write(number)
    }

    fn write(&mut self, number: usize) -> io::Result<()> {
        if self.connections[number].has_unsent() {
            self.messages.sign(self.first + number);
            self.connections[number].write(&self.messages)?;
        }
        Ok(())
    }

    fn receive(&mut self, number: usize) -> io::Result<()> {
        self.messages.sign(self.first + number);
        let connection = &mut self.connections[number];
        let more = connection.receive(&self.messages, &mut self.scratch)?;
        if more == 0 {
            return Ok(());
        }
        let now = self.started.elapsed().as_nanos() as u64;
        self.answered += connection.answer(self.plan.shape.reply_bytes(), |at, count| {
            self.outcome.latency.saturating_record_n(now.saturating_sub(at).max(1), count.into());
        });
        if self.plan.pace == Pace::Closed && connection.is_idle() {
            self.send(number, self.plan.shape.pipeline as u32, now)?;
        }
        Ok(())
    }

    /// Checks for an overdue reply when nothing happens.
    fn check_silence(&mut self, nothing: bool) -> io::Result<()> {
        if !nothing {
            return Ok(());
        }
        let (now, most) = (self.now(), REPLY_MAX.as_nanos() as u64);
        match self.connections.iter().position(|one| one.waits_since().is_some_and(|at| now > at + most)) {
            None => Ok(()),
            Some(number) => Err(io::Error::other(format!(
                "connection {} has no whole reply within {REPLY_MAX:?}",
                self.first + number
            ))),
        }
    }
}

fn connect_all(plan: &Plan, numbers: std::ops::Range<usize>) -> io::Result<(Poll, Vec<Connection>)> {
    let poll = Poll::new()?;
    let mut connections = Vec::with_capacity(numbers.len());
    for number in numbers {
        let mut stream = mio::net::TcpStream::from_std(connect(plan.address, number)?);
        let token = Token(connections.len());
        poll.registry().register(&mut stream, token, Interest::READABLE | Interest::WRITABLE)?;
        connections.push(Connection::new(shaken(stream, plan.shape.layer)?));
        if connections.len().is_multiple_of(CONNECT_BATCH) {
            thread::sleep(Duration::from_millis(2));
        }
    }
    Ok((poll, connections))
}

/// `stream` with its layer, after the handshake.
fn shaken(stream: mio::net::TcpStream, layer: Layer) -> io::Result<Wire<mio::net::TcpStream>> {
    let (mut wire, began) = (Wire::new(stream, layer)?, Instant::now());
    loop {
        match wire.shake_hands() {
            Ok(()) => return Ok(wire),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && began.elapsed() < REPLY_MAX => {
                thread::sleep(Duration::from_micros(100));
            }
            Err(error) => return Err(error),
        }
    }
}

/// Opens a non-blocking connection to `address`. Connections to a loopback address come from as
/// many loopback addresses as their ports need.
fn connect(address: SocketAddr, number: usize) -> io::Result<std::net::TcpStream> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    if let IpAddr::V4(ip) = address.ip()
        && ip.is_loopback()
    {
        let source = u32::from(Ipv4Addr::new(127, 0, 1, 1)) + (number / PER_ADDRESS) as u32;
        socket.bind(&SocketAddr::from((Ipv4Addr::from(source), 0)).into())?;
    }
    socket.set_tcp_nodelay(true)?;
    socket.connect_timeout(&address.into(), REPLY_MAX)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}
