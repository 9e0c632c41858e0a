//! The drill of overload: a server on one CPU is asked for several times what it can do, and what it still serves is measured.
//!
//! ```text
//!   CPU 0   overload-server: one shard, calls that compute for a fixed time        with shedding, then without
//!   CPU 1   this process: 100 connections; first as fast as answers come, then at a fixed rate whatever comes
//! ```
//!
//! A request's time counts from when it was due, also where its connection took no more bytes then.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::io::{self, BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

use ringserve::framing::Lines;
use ringserve::limits::ServerLimits;
use ringserve::overload::{Load, Shed};
use ringserve::{Cx, Frame, Limits, Server, Service};
use rustix::thread::{CpuSet, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::runtime;

use crate::args::OverloadOptions;
use crate::client::Failure;
use crate::text::table;

const CONNECTIONS: usize = 100;

/// For how long as many requests are sent as are answered.
const CLOSED: Duration = Duration::from_secs(3);

/// From the begin of the storm to where measuring begins.
const SETTLES: Duration = Duration::from_secs(5);

/// One request in this many is marked, and served whatever the load is.
const MARKED_ONE_IN: u64 = 10;

/// A mark, which the service knows.
const MARK: u8 = b'!';

/// Computes for a time of its CPU, and sheds what is not marked.
struct Work {
    time: Duration,
    sheds: bool,
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

impl Service for Work {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, _line: Frame) -> Result<(), Infallible> {
        let until = cpu_time() + self.time;
        while cpu_time() < until {
            std::hint::spin_loop();
        }
        cx.reply("done");
        Ok(())
    }

    fn shed(&self, cx: &Cx<'_, ()>, line: &Frame, _load: Load) -> Shed {
        if !self.sheds || line.first() == Some(&MARK) {
            return Shed::Serve;
        }
        cx.reply("busy");
        Shed::Answered
    }
}

fn stay_on(cpu: usize) -> Result<(), Failure> {
    let mut cpus = CpuSet::new();
    cpus.set(cpu);
    sched_setaffinity(None, &cpus)
        .map_err(|error| Failure(format!("this process cannot stay on CPU {cpu}: {error}")))
}

/// Serves until its input ends.
pub fn serve(micros: u64, sheds: bool) -> Result<u8, Failure> {
    stay_on(0)?;
    let time = Duration::from_micros(micros);
    let limits = Limits::default().idle_timeout(None);
    let server = Server::bind("127.0.0.1:0").framing(Lines::default()).shards(1).limits(limits);
    let server = server.server_limits(ServerLimits::default());
    let running = server.start(move |_shard| Work { time, sheds });
    let running =
        running.map_err(|error| Failure(format!("the server of the drill does not start: {error}")))?;
    println!("{}", running.local_addrs()[0]);
    let _ended = io::stdin().read(&mut [0]);
    running.abort();
    Ok(0)
}

/// The server's process, killed at the end.
struct Process(Child);

impl Process {
    fn start(micros: u64, sheds: bool) -> Result<(Process, SocketAddr), Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["overload-server", "--micros", &micros.to_string()]);
        if sheds {
            command.arg("--sheds");
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn()?;
        let output = child.stdout.take();
        let process = Process(child);
        let mut line = String::new();
        BufReader::new(output.ok_or_else(|| Failure("the server has no output".to_owned()))?)
            .read_line(&mut line)?;
        let addr = line
            .trim()
            .parse()
            .map_err(|_| Failure("the server of the drill tells no address".to_owned()))?;
        Ok((process, addr))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What came of the storm.
#[derive(Clone, Debug, Default, Serialize)]
struct Outcome {
    sheds: bool,
    /// Requests a second that the server answers if it is sent no more than that.
    most: f64,
    /// The same of the storm: due, served, and answered as busy.
    asked: f64,
    served: f64,
    busy: f64,
    /// Of `most`.
    goodput: f64,
    /// Of those that were served, in milliseconds.
    p50: f64,
    p99: f64,
    /// Of the marked ones that were due, the share that was served within the drill.
    marked_served: f64,
}

/// A request on its way: when it was due, and whether it is marked.
type Due = (Instant, bool);

struct Conn {
    out: Vec<u8>,
    due: VecDeque<Due>,
}

#[derive(Default)]
struct Counts {
    from: Option<Instant>,
    until: Option<Instant>,
    due: u64,
    marked_due: u64,
    marked_served: u64,
    busy: u64,
    /// Microseconds of those that were served.
    times: Vec<u32>,
}

impl Counts {
    /// Counts what was due in the time that is measured.
    fn counts(&self, due: Instant) -> bool {
        self.from.is_some_and(|from| due >= from) && self.until.is_none_or(|until| due < until)
    }

    fn answered(&mut self, (due, is_marked): Due, is_served: bool) {
        if !self.counts(due) {
            return;
        }
        if is_served {
            self.times.push(due.elapsed().as_micros().min(u128::from(u32::MAX)) as u32);
            self.marked_served += u64::from(is_marked);
        } else {
            self.busy += 1;
        }
    }
}

async fn read_answers(
    reader: OwnedReadHalf,
    conn: Rc<RefCell<Conn>>,
    counts: Rc<RefCell<Counts>>,
    again: bool,
) {
    let mut bytes = vec![0; 64 << 10];
    let mut begun = 0;
    loop {
        let _ready = reader.readable().await;
        let read = match reader.try_read(&mut bytes[begun..]) {
            Ok(0) => return,
            Ok(read) => begun + read,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(_) => return,
        };
        // Each answer is four letters and the end of a line.
        let whole = read / 5 * 5;
        for answer in bytes[..whole].chunks(5) {
            let Some(due) = conn.borrow_mut().due.pop_front() else { return };
            counts.borrow_mut().answered(due, answer.starts_with(b"done"));
            if again {
                push(&conn, Instant::now(), false);
            }
        }
        bytes.copy_within(whole..read, 0);
        begun = read - whole;
    }
}

fn push(conn: &RefCell<Conn>, due: Instant, is_marked: bool) {
    let mut conn = conn.borrow_mut();
    conn.due.push_back((due, is_marked));
    conn.out.extend_from_slice(if is_marked { b"!work\n" } else { b"work\n" });
}

fn write_out(writer: &OwnedWriteHalf, conn: &RefCell<Conn>) {
    let mut conn = conn.borrow_mut();
    while !conn.out.is_empty() {
        match writer.try_write(&conn.out) {
            Ok(written) => drop(conn.out.drain(..written)),
            Err(_) => return,
        }
    }
}

struct Storm {
    conns: Vec<(OwnedWriteHalf, Rc<RefCell<Conn>>)>,
    counts: Rc<RefCell<Counts>>,
}

impl Storm {
    async fn connect(addr: SocketAddr, again: bool) -> Result<Storm, Failure> {
        let counts = Rc::new(RefCell::new(Counts::default()));
        let mut conns = Vec::new();
        for _ in 0..CONNECTIONS {
            let stream = TcpStream::connect(addr).await?;
            stream.set_nodelay(true)?;
            let (reader, writer) = stream.into_split();
            let conn = Rc::new(RefCell::new(Conn { out: Vec::new(), due: VecDeque::new() }));
            tokio::task::spawn_local(read_answers(reader, conn.clone(), counts.clone(), again));
            conns.push((writer, conn));
        }
        Ok(Storm { conns, counts })
    }

    /// Writes what is due each millisecond, until then.
    async fn run(&self, until: Instant, mut each: impl FnMut(Instant)) {
        let mut ticks = tokio::time::interval(Duration::from_millis(1));
        while Instant::now() < until {
            ticks.tick().await;
            each(Instant::now());
            self.conns.iter().for_each(|(writer, conn)| write_out(writer, conn));
        }
    }
}

/// Requests a second that are answered if each connection sends one after the other.
async fn most(addr: SocketAddr) -> Result<f64, Failure> {
    let storm = Storm::connect(addr, true).await?;
    let now = Instant::now();
    storm.conns.iter().for_each(|(_, conn)| push(conn, now, false));
    // The first half second is no measure.
    storm.counts.borrow_mut().from = Some(now + Duration::from_millis(500));
    storm.run(now + CLOSED, |_| {}).await;
    let answered = storm.counts.borrow().times.len() as f64;
    Ok(answered / (CLOSED.as_secs_f64() - 0.5))
}

async fn storm(addr: SocketAddr, rate: f64, seconds: f64) -> Result<Outcome, Failure> {
    let storm = Storm::connect(addr, false).await?;
    let begun = Instant::now();
    let (from, until) = (begun + SETTLES, begun + SETTLES + Duration::from_secs_f64(seconds));
    {
        let mut counts = storm.counts.borrow_mut();
        (counts.from, counts.until) = (Some(from), Some(until));
    }
    let mut sent = 0u64;
    storm
        .run(until, |now| {
            let total = ((now - begun).as_secs_f64() * rate) as u64;
            for n in sent..total {
                let due = begun + Duration::from_secs_f64(n as f64 / rate);
                // Another prime than the number of connections, so that each has marked ones.
                let is_marked = (n / CONNECTIONS as u64 + n).is_multiple_of(MARKED_ONE_IN);
                push(&storm.conns[n as usize % CONNECTIONS].1, due, is_marked);
                let mut counts = storm.counts.borrow_mut();
                if counts.counts(due) {
                    counts.due += 1;
                    counts.marked_due += u64::from(is_marked);
                }
            }
            sent = total;
        })
        .await;
    // What is on its way has time to come.
    storm.run(until + Duration::from_secs(1), |_| {}).await;
    let mut counts = storm.counts.borrow_mut();
    counts.times.sort_unstable();
    let at = |share: f64| {
        let place = (counts.times.len() as f64 * share) as usize;
        counts
            .times
            .get(place.min(counts.times.len().saturating_sub(1)))
            .map_or(0.0, |time| f64::from(*time) / 1000.0)
    };
    Ok(Outcome {
        asked: counts.due as f64 / seconds,
        served: counts.times.len() as f64 / seconds,
        busy: counts.busy as f64 / seconds,
        p50: at(0.5),
        p99: at(0.99),
        marked_served: counts.marked_served as f64 / counts.marked_due.max(1) as f64,
        ..Outcome::default()
    })
}

/// Runs the drill with shedding and without, and prints what came of both.
pub fn run(options: &OverloadOptions, json: bool) -> Result<u8, Failure> {
    stay_on(1)?;
    let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
    let mut outcomes = Vec::new();
    for sheds in [true, false] {
        let (_process, addr) = Process::start(options.micros, sheds)?;
        let local = tokio::task::LocalSet::new();
        let outcome = local.block_on(&runtime, async {
            let most = most(addr).await?;
            // The stage of a server that was asked for all that it can do.
            tokio::time::sleep(Duration::from_secs(3)).await;
            let storm = storm(addr, most * options.times, options.seconds).await?;
            Ok::<_, Failure>(Outcome { sheds, most, goodput: storm.served / most, ..storm })
        })?;
        outcomes.push(outcome);
    }
    if json {
        println!("{}", serde_json::to_string_pretty(&outcomes).map_err(|error| Failure(error.to_string()))?);
        return Ok(0);
    }
    let row = |of: &Outcome| {
        vec![
            if of.sheds { "sheds" } else { "sheds nothing" }.to_owned(),
            format!("{:.0}", of.most),
            format!("{:.0}", of.asked),
            format!("{:.0}", of.served),
            format!("{:.0}", of.busy),
            format!("{:.2}", of.goodput),
            format!("{:.1}", of.p50),
            format!("{:.1}", of.p99),
            format!("{:.4}", of.marked_served),
        ]
    };
    let rows: Vec<_> = outcomes.iter().map(row).collect();
    let head =
        ["", "most/s", "asked/s", "served/s", "busy/s", "goodput", "p50 ms", "p99 ms", "marked served"];
    print!("{}", table(&head, &rows));
    Ok(0)
}
