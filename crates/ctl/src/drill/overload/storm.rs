//! The storm: requests at a fixed rate, whatever happens, at several times the rate that the server
//! can serve.
//!
//! A request's time counts from when it was due, even if its connection accepted no bytes then.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use super::peer::{percentile, run_local};
use super::rows::Bar;
use super::server::MARK;
use crate::client::Failure;
use crate::drill::options::OverloadOptions;

const CONNECTIONS: usize = 100;

/// Time of the closed loop (one request after each answer), which follows half a second that is
/// not measured, and of the server's rest after it: a shorter drill takes less.
const CLOSED_MAX: f64 = 2.5;
const RESTS_MAX: f64 = 3.0;

/// One request in this many is marked, and has to be served whatever the load is.
const MARKED_ONE_IN: u64 = 10;

/// The bars: the share of the capacity that the server still serves, the time in milliseconds, and
/// the share of marked requests.
const GOODPUT_MIN: f64 = 0.9;
const P99_MAX: f64 = 15.0;
pub(super) const MARKED_MIN: f64 = 0.999;

/// The result of the storm.
#[derive(Clone, Debug, Default)]
pub(super) struct Outcome {
    /// Requests per second that the server answers if it is sent no more than that.
    most: f64,
    /// Rates in the storm: due, served, and answered as busy.
    asked: f64,
    served: f64,
    busy: f64,
    /// Quantiles of the requests that were served, in milliseconds.
    p50: f64,
    p99: f64,
    /// Share of the marked requests that were due which were served within the drill.
    pub(super) marked_served: f64,
}

impl Outcome {
    pub(super) fn goodput_bars(&self) -> Vec<Bar> {
        let goodput = if self.most > 0.0 { self.served / self.most } else { 0.0 };
        let mut bars = vec![Bar::at_least("goodput", "", goodput, GOODPUT_MIN)];
        if self.served > 0.0 {
            bars.push(Bar::at_most("p99", "ms", self.p99, P99_MAX));
        }
        bars
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Outcome { most, asked, served, busy, p50, .. } = self;
        write!(
            f,
            "most {most:.0}/s; asked for {asked:.0}/s, served {served:.0}/s, busy {busy:.0}/s; p50 {p50:.1} ms"
        )
    }
}

/// A request in flight: when it was due, and whether it is marked.
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
    /// Milliseconds of the requests that were served.
    times: Vec<f64>,
}

impl Counts {
    /// True if a request was due in the measured time.
    fn counts(&self, due: Instant) -> bool {
        self.from.is_some_and(|from| due >= from) && self.until.is_none_or(|until| due < until)
    }

    fn answered(&mut self, (due, is_marked): Due, is_served: bool) {
        if !self.counts(due) {
            return;
        }
        if is_served {
            self.times.push(due.elapsed().as_secs_f64() * 1e3);
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
    if is_marked {
        conn.out.push(MARK);
    }
    conn.out.extend_from_slice(b"work\n");
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

    /// Writes the requests that are due, each millisecond, until then.
    async fn run(&self, until: Instant, mut each: impl FnMut(Instant)) {
        let mut ticks = tokio::time::interval(Duration::from_millis(1));
        while Instant::now() < until {
            ticks.tick().await;
            each(Instant::now());
            self.conns.iter().for_each(|(writer, conn)| write_out(writer, conn));
        }
    }
}

/// Requests per second that are answered if each connection sends one after the other.
async fn most(addr: SocketAddr, options: &OverloadOptions) -> Result<f64, Failure> {
    let measured = options.seconds.min(CLOSED_MAX);
    let storm = Storm::connect(addr, true).await?;
    let now = Instant::now();
    storm.conns.iter().for_each(|(_, conn)| push(conn, now, false));
    let from = now + Duration::from_millis(500);
    storm.counts.borrow_mut().from = Some(from);
    storm.run(from + Duration::from_secs_f64(measured), |_| {}).await;
    let answered = storm.counts.borrow().times.len() as f64;
    Ok(answered / measured)
}

async fn storm(addr: SocketAddr, rate: f64, options: &OverloadOptions) -> Result<Outcome, Failure> {
    let storm = Storm::connect(addr, false).await?;
    let begun = Instant::now();
    let from = begun + Duration::from_secs_f64(options.settle);
    let until = from + Duration::from_secs_f64(options.seconds);
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
                // A prime other than the number of connections, so that each has marked requests.
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
    // Answers in flight have time to arrive.
    storm.run(until + Duration::from_secs(1), |_| {}).await;
    let mut counts = storm.counts.borrow_mut();
    let seconds = options.seconds;
    Ok(Outcome {
        asked: counts.due as f64 / seconds,
        served: counts.times.len() as f64 / seconds,
        busy: counts.busy as f64 / seconds,
        p50: percentile(&mut counts.times, 0.5),
        p99: percentile(&mut counts.times, 0.99),
        marked_served: counts.marked_served as f64 / counts.marked_due.max(1) as f64,
        ..Outcome::default()
    })
}

/// Measures the server's capacity, and sends `times` as much.
pub(super) fn run(addr: SocketAddr, options: &OverloadOptions) -> Result<Outcome, Failure> {
    run_local(async {
        let most = most(addr, options).await?;
        // The overload stage of a server that was fully loaded ends.
        tokio::time::sleep(Duration::from_secs_f64(options.settle.min(RESTS_MAX))).await;
        let storm = storm(addr, most * options.times, options).await?;
        Ok(Outcome { most, ..storm })
    })
}
