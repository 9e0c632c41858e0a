//! Counts questions that are lost since their backend ended an idle connection.
//!
//!     cargo run --release -p ringserve-upstream --example stale -- ended 1000000
//!     cargo run --release -p ringserve-upstream --example stale -- kept 100000 1000 40
//!
//! `ended`: the backend ends each connection behind its answer, and the next question on the same
//! pool comes 5 ms later, so none may be lost where the backend runs within that time. `kept`: it
//! ends connections that are idle for 1000 ms, the third argument, behind a relay that delays all
//! by 40 ms, the fourth one, in each direction; questions come after up to twice the idle time.
//! Those of the first minute, in which that time is learned, are counted apart.

use std::cell::Cell;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::mpsc;
use std::time::Duration;

use ringserve::framing::Lines;
use ringserve::net::{Address, ReadHalf, WriteHalf};
use ringserve::upstream::{Exclusive, PoolLimits, Request, Upstream, UpstreamError};
use ringserve::{Cx, Frame, Limits, Server, ServerHandle, Service, Shard, Stream, stream};

/// Tasks that ask, each one question after the other.
const ASKERS: u64 = 200;

/// Time for learning.
const LEARNS: Duration = Duration::from_secs(60);

/// Answers, and ends the connection then if it is to.
struct Backend {
    ends: bool,
}

impl Service for Backend {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        cx.reply(line);
        if self.ends {
            cx.close();
        }
        Ok(())
    }
}

struct Idle;

impl Service for Idle {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, _cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Infallible> {
        Ok(())
    }
}

fn addr(server: &ServerHandle) -> Option<SocketAddr> {
    server.listeners().first().and_then(Address::as_ip)
}

/// Passes bytes and their end on, each after a time.
async fn delays(mut from: ReadHalf, to: WriteHalf, shard: Shard, time: Duration) {
    while let Ok(Some(frame)) = from.read_frame().await {
        let bytes = frame.to_vec();
        shard.sleep(time).await;
        to.queue(&bytes);
    }
    shard.sleep(time).await;
}

/// Passes bytes on both ways with a delay.
async fn relay(client: Stream, to: SocketAddr, time: Duration) -> io::Result<()> {
    let shard = client.shard().clone();
    let backend = shard.connect(to).await?;
    let ((from_client, to_client), (from_backend, to_backend)) = (client.split(), backend.split());
    let there = shard.spawn(delays(from_client, to_backend, shard.clone(), time));
    delays(from_backend, to_client, shard, time).await;
    drop(there);
    Ok(())
}

/// Counts of the askers.
#[derive(Default)]
struct Counts {
    left: Cell<u64>,
    asking: Cell<u64>,
    lost: Cell<u64>,
    lost_at_first: Cell<u64>,
    /// Had no connection, or no answer in time.
    failed: Cell<u64>,
}

async fn asks(client: Exclusive<Lines>, shard: Shard, counts: Rc<Counts>, pause: (bool, Duration)) {
    let begun = shard.now();
    while counts.left.get() > 0 {
        let number = counts.left.get();
        counts.left.set(number - 1);
        if let Err(error) = client.ask(Request::new(&number.to_string())).await {
            let count = match error {
                UpstreamError::Lost if shard.now() - begun < LEARNS => &counts.lost_at_first,
                UpstreamError::Lost => &counts.lost,
                _ => &counts.failed,
            };
            count.set(count.get() + 1);
        }
        let (is_fixed, time) = pause;
        let nanos =
            if is_fixed { time.as_nanos() as u64 } else { shard.random() % (2 * time.as_nanos() as u64) };
        shard.sleep(Duration::from_nanos(nanos)).await;
    }
    counts.asking.set(counts.asking.get() - 1);
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |place: usize, by_default: u64| args.get(place).map_or(Ok(by_default), |text| text.parse());
    let ends = args.first().is_none_or(|mode| mode == "ended");
    let (questions, kept) = (number(1, 100_000)?, Duration::from_millis(number(2, 1000)?));
    let delay = Duration::from_millis(number(3, 0)?);
    let limits = Limits::default().idle_timeout(kept);
    let backend = Server::bind("127.0.0.1:0").framing(Lines::default()).limits(limits).shards(1);
    let backend = backend.start(move |_| Backend { ends })?;
    let mut to = addr(&backend).ok_or("it listens")?;
    let relays = if delay.is_zero() {
        None
    } else {
        let server = Server::bind("127.0.0.1:0").shards(1);
        let server = server.start(move |_| stream(async move |client| relay(client, to, delay).await))?;
        to = addr(&server).ok_or("it listens")?;
        Some(server)
    };
    // All may wait for a connection at once.
    let pool = PoolLimits::default().connections_max(400).idle_max(400).waiting_max(ASKERS as usize);
    let upstream = Upstream::new("stale", [to]).pool(pool);
    let (done, result) = mpsc::channel();
    let asked = upstream.clone();
    let front = Server::bind("127.0.0.1:0").framing(Lines::default()).shards(1).start(move |shard| {
        let counts = Rc::new(Counts::default());
        counts.left.set(questions);
        counts.asking.set(ASKERS);
        let client = asked.exclusive(shard, Lines::default());
        let pause = if ends { (true, Duration::from_millis(5)) } else { (false, kept) };
        for _ in 0..ASKERS {
            let client = if ends { asked.exclusive(shard, Lines::default()) } else { client.clone() };
            shard.spawn(asks(client, shard.clone(), counts.clone(), pause));
        }
        let (on, done) = (shard.clone(), done.clone());
        shard.spawn(async move {
            while counts.asking.get() > 0 {
                on.sleep(Duration::from_millis(100)).await;
            }
            // The figures of the pool are reported each second.
            on.sleep(Duration::from_secs(2)).await;
            let _ = done.send([counts.lost_at_first.get(), counts.lost.get(), counts.failed.get()]);
        });
        Idle
    })?;
    let [at_first, lost, failed] = result.recv()?;
    let stats = &upstream.stats().backends[0];
    println!(
        "{questions} questions: {at_first} lost in the first minute, {lost} later, {failed} failed; \
         {} connects, {} taken back unsent, {} lost behind their leaving",
        stats.connects, stats.unsent, stats.lost
    );
    for server in [Some(front), relays, Some(backend)].into_iter().flatten() {
        server.abort();
        server.wait()?;
    }
    Ok(())
}
