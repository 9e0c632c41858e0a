//! A flood of connects from one address, and canaries from another.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};
use tokio::task::JoinSet;
use tokio::time::{interval, timeout};

use super::peer::{ATTACKER, connect, echo, of_client, percentile, run_local};
use super::rows::{Bar, Outcome, Row};
use crate::client::Failure;

/// Connects per second of the flood.
const RATE: f64 = 20_000.0;

/// The part of the flood that the generator has to make: with less it is no flood of that size.
const MADE_MIN: f64 = 0.95 * RATE;

/// Lifetime of a socket of the flood, so that the server accepted it.
const STAYS: Duration = Duration::from_millis(10);

/// Connects that are made at once if the generator was late. The others are dropped.
const AT_ONCE_MAX: u64 = 400;

/// Interval of canaries.
const CANARY_EVERY: Duration = Duration::from_millis(5);

/// Time from the start of the flood to the first canary.
const SETTLES: Duration = Duration::from_secs(1);

/// Time after which a canary without an answer is lost. The kernel repeats a lost first packet
/// after a second.
const LOST_AFTER: Duration = Duration::from_secs(3);

/// The bars: the share of the canaries that are served, and their time in milliseconds.
const SERVED_MIN: f64 = 0.999;
const P99_MAX: f64 = 20.0;

/// Floods a server for some time, and sends canaries meanwhile.
pub(super) fn run(name: &str, addr: SocketAddr, time: Duration) -> Result<Outcome, Failure> {
    let stop = AtomicBool::new(false);
    let (flooded, canaries) = thread::scope(|scope| {
        let flood = scope.spawn(|| flood(addr, &stop));
        thread::sleep(SETTLES);
        let canaries = run_local(canaries(addr, time));
        stop.store(true, Relaxed);
        (flood.join(), canaries)
    });
    let made = flooded.map_err(|_| Failure("the flood panicked".to_owned()))?;
    let Canaries { sent, mut times } = canaries?;
    let served = times.len() as f64 / sent.max(1) as f64;
    let (p50, p99) = (percentile(&mut times, 0.5), percentile(&mut times, 0.99));
    let bars = vec![
        Bar::at_least("connects of the flood", "/s", made, MADE_MIN),
        Bar::at_least("canaries served", "", served, SERVED_MIN),
        Bar::at_most("p99", "ms", p99, P99_MAX),
    ];
    Ok(Outcome::of(Row::Prefix, name, bars, format!("{sent} canaries; p50 {p50:.1} ms")))
}

/// Connects and resets, until `stop` is set. Returns the connects per second.
fn flood(addr: SocketAddr, stop: &AtomicBool) -> f64 {
    let begun = Instant::now();
    let (mut due, mut made) = (0, 0u64);
    let mut open = VecDeque::new();
    while !stop.load(Relaxed) {
        let now = Instant::now();
        while open.front().is_some_and(|(at, _)| now - *at >= STAYS) {
            open.pop_front();
        }
        let until = (begun.elapsed().as_secs_f64() * RATE) as u64;
        for _ in 0..(until - due).min(AT_ONCE_MAX) {
            if let Ok(socket) = attack(addr) {
                open.push_back((Instant::now(), socket));
                made += 1;
            }
        }
        due = until;
        thread::sleep(Duration::from_millis(1));
    }
    made as f64 / begun.elapsed().as_secs_f64()
}

/// Begins a connect without waiting for it. The socket is reset when it is dropped.
fn attack(addr: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM.nonblocking(), None)?;
    socket.set_linger(Some(Duration::ZERO))?;
    socket.bind(&SocketAddr::new(ATTACKER, 0).into())?;
    // The kernel completes it.
    let _in_progress = socket.connect(&addr.into());
    Ok(socket)
}

struct Canaries {
    sent: usize,
    /// Milliseconds of the canaries that were served.
    times: Vec<f64>,
}

async fn canaries(addr: SocketAddr, time: Duration) -> Result<Canaries, Failure> {
    let sent = (time.as_secs_f64() / CANARY_EVERY.as_secs_f64()).ceil() as usize;
    let mut ticks = interval(CANARY_EVERY);
    let mut on_their_way = JoinSet::new();
    for _ in 0..sent {
        // A late tick has the time at which it was due.
        let due = ticks.tick().await.into_std();
        on_their_way.spawn_local(async move {
            let served = async { echo(&mut connect(of_client(0), addr).await?).await };
            let is_served = timeout(LOST_AFTER, served).await.is_ok_and(|served| served.is_ok());
            is_served.then(|| due.elapsed().as_secs_f64() * 1e3)
        });
    }
    let mut times = Vec::new();
    while let Some(served) = on_their_way.join_next().await {
        times.extend(served.ok().flatten());
    }
    Ok(Canaries { sent, times })
}
