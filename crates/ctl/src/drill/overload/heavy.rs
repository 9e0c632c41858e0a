//! Peers that make the server hold memory, up to its limit: some read nothing, some send halves of
//! frames.

use std::cell::Cell;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::spawn_local;
use tokio::time::{Instant, interval, sleep, timeout_at};

use super::peer::{ATTACKER, connect, echo, of_client, percentile, run_local};
use super::process::Process;
use super::rows::{Bar, Outcome, Row};
use super::server::PEAK_MAX_MIB;
use crate::client::Failure;

/// Peers that ask for a MiB each and read nothing: together more than the 64 MiB that the shard may
/// hold.
const READERS: usize = 96;

/// The most that the kernel holds for a peer that does not read.
const WINDOW: u32 = 4096;

/// Peers that ask for a MiB each at the same moment: twenty times what the shard may hold.
const AT_ONCE: usize = 1500;

/// Peers that send this much of a frame, and no end of it.
const HALVES: usize = 200;
const HALF: usize = 48 << 10;

/// Peers that do nothing wrong, and how often each asks.
const INNOCENT: usize = 100;
const ASKS_EVERY: Duration = Duration::from_millis(50);

/// Time after the end in which a request has to be answered.
const ANSWERED_WITHIN: Duration = Duration::from_secs(10);

/// Pause between two peers that read nothing, at first. Memory counts once it is held for 50 ms, so
/// that a burst which is sent at once closes none; where hundreds of MiB come and go within that
/// time, peers whose memory stays are closed for them, though it is less.
const APART: Duration = Duration::from_millis(10);

/// Pause before a peer that was closed connects again.
const AGAIN: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Count {
    /// Connections that the server closed.
    halves: Cell<u64>,
    innocent: Cell<u64>,
    /// Requests.
    asked: Cell<u64>,
    times: Cell<Vec<f64>>,
}

fn add(to: &Cell<u64>) {
    to.set(to.get() + 1);
}

/// Attacks for some time.
pub(super) fn run(name: &str, process: &mut Process, time: Duration) -> Result<Outcome, Failure> {
    let addr = process.addr();
    let (count, mut times) = run_local(async {
        let count = Rc::new(Count::default());
        let until = Instant::now() + time;
        let innocent: Vec<_> =
            (0..INNOCENT).map(|number| spawn_local(innocent(number, addr, until, count.clone()))).collect();
        let mut attackers = Vec::new();
        attackers.extend((0..HALVES).map(|_| spawn_local(half(addr, count.clone()))));
        attackers.extend((0..READERS).map(|number| spawn_local(reader(number, addr))));
        for one in innocent {
            one.await.map_err(|error| Failure(format!("a client of the drill ended: {error}")))?;
        }
        attackers.iter().for_each(|attacker| attacker.abort());
        let times = count.times.take();
        Ok((count, times))
    })?;
    let told = process.told()?;
    let others = count.halves.get() + count.innocent.get();
    let readers = told.closed_for_memory.saturating_sub(others);
    let bars = vec![
        Bar::at_most("innocent closed", "", count.innocent.get() as f64, 0.0),
        Bar::at_least("readers of nothing closed", "", readers as f64, 1.0),
        Bar::at_most("lighter ones closed", "", count.halves.get() as f64, 0.0),
    ];
    let (p50, p99) = (percentile(&mut times, 0.5), percentile(&mut times, 0.99));
    let reasons: Vec<String> = told.closed.iter().map(|(why, count)| format!("{why} {count}")).collect();
    let why = format!(
        "{} requests of {INNOCENT} innocent peers; p50 {p50:.1} ms, p99 {p99:.1} ms; closed: {}",
        count.asked.get(),
        reasons.join(", ")
    );
    Ok(Outcome::of(Row::Memory, name, bars, why))
}

/// Makes many peers ask at the same moment, in addition to those that do nothing wrong.
pub(super) fn burst(name: &str, process: &mut Process, time: Duration) -> Result<Outcome, Failure> {
    let addr = process.addr();
    let count = run_local(async {
        let count = Rc::new(Count::default());
        let mut peers = Vec::new();
        for _ in 0..AT_ONCE {
            peers.push(reads_nothing(addr).await?);
        }
        let until = Instant::now() + time;
        let innocent: Vec<_> =
            (0..INNOCENT).map(|number| spawn_local(innocent(number, addr, until, count.clone()))).collect();
        sleep(ASKS_EVERY).await;
        for peer in &mut peers {
            // One may have been closed already.
            let _sent = peer.try_write(b"heavy\n");
        }
        for one in innocent {
            one.await.map_err(|error| Failure(format!("a client of the drill ended: {error}")))?;
        }
        Ok(count)
    })?;
    let told = process.told()?;
    let bars = vec![
        Bar::at_most("the most memory", "MiB", told.peak_mib, PEAK_MAX_MIB),
        Bar::at_most("innocent closed", "", count.innocent.get() as f64, 0.0),
        Bar::at_least("closed for memory", "", told.closed_for_memory as f64, 1.0),
    ];
    let why = format!("{} requests of {INNOCENT} innocent peers", count.asked.get());
    Ok(Outcome::of(Row::Burst, name, bars, why))
}

/// Asks and is answered, until the time is over.
async fn innocent(number: usize, addr: SocketAddr, until: Instant, count: Rc<Count>) {
    let Ok(mut stream) = connect(of_client(number), addr).await else {
        return add(&count.innocent);
    };
    let mut ticks = interval(ASKS_EVERY);
    loop {
        let due = ticks.tick().await;
        if due >= until {
            return;
        }
        add(&count.asked);
        match timeout_at(until + ANSWERED_WITHIN, echo(&mut stream)).await {
            Ok(Ok(())) => {
                let mut times = count.times.take();
                times.push(due.elapsed().as_secs_f64() * 1e3);
                count.times.set(times);
            }
            // Closed, or never answered: to a peer it is the same.
            _ => return add(&count.innocent),
        }
    }
}

/// Connects again and again with half of a frame.
async fn half(addr: SocketAddr, count: Rc<Count>) {
    loop {
        if send_half(addr).await.is_ok() {
            add(&count.halves);
        }
        sleep(AGAIN).await;
    }
}

/// Sends half of a frame, and waits until the server closes the connection.
async fn send_half(addr: SocketAddr) -> io::Result<()> {
    let mut stream = connect(ATTACKER, addr).await?;
    let _sent = stream.write_all(&[b'e'; HALF]).await;
    let _ended = stream.read(&mut [0]).await;
    Ok(())
}

/// Connects again and again, and reads nothing.
async fn reader(number: usize, addr: SocketAddr) {
    sleep(APART * number as u32).await;
    loop {
        if let Ok(stream) = ask_for_much(addr).await {
            // A reset is an error of the socket, which needs no read.
            let _reset = stream.ready(Interest::ERROR).await;
        }
        sleep(AGAIN).await;
    }
}

async fn ask_for_much(addr: SocketAddr) -> io::Result<TcpStream> {
    let mut stream = reads_nothing(addr).await?;
    stream.write_all(b"heavy\n").await?;
    Ok(stream)
}

/// A peer for which the kernel holds little.
async fn reads_nothing(addr: SocketAddr) -> io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(WINDOW)?;
    socket.bind(SocketAddr::new(ATTACKER, 0))?;
    socket.connect(addr).await
}
