//! The task that connects, reads, and connects again.
//!
//! ```text
//!   connect ──▶ INFO ──▶ CONNECT, PING ──▶ PONG: let in ──▶ SUB of all, what was kept ──▶ reads ──┐
//!      ▲                                                                                          │
//!      └──── a random part of a time that grows ◀──── gaps, requests fail ◀──── ended, ldm ◀──────┘
//! ```

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::rc::Weak;
use std::task::{Context, Poll};
use std::time::Duration;

use ringserve_server::net::{Framed, FramedReader};
use ringserve_server::time::{Sleep, Time};
use ringserve_server::{Frame, Shard, Stream};
use tracing::{info, warn};

use crate::protocol::frames::{FRAME_BYTES_MAX, NatsFrames, PAYLOAD_BYTES_MAX};
use crate::protocol::info::{Info, MAX_PAYLOAD};
use crate::protocol::message::Message;
use crate::servers::Servers;
use crate::state::State;

/// The longest wait before the first attempt after a loss.
const RECONNECT_MIN: Duration = Duration::from_millis(50);

/// A connection that lived for this long was a good one: the next wait is a short one again.
const GOOD_AFTER: Duration = Duration::from_secs(10);

/// The time for answers to what was asked before a server that is about to end is left.
const LEAVE_WITHIN: Duration = Duration::from_secs(2);

/// The time between two lines about the same failure.
const SAID_EVERY: Duration = Duration::from_secs(60);

/// PINGs without an answer, behind which the server is gone.
const PINGS_MAX: u32 = 2;

/// Why a connection is over.
enum Ended {
    /// The last handle is gone.
    Dropped,
    /// The server wants its clients elsewhere, and nothing is under way.
    Moved,
    Broken(io::Error),
}

impl From<io::Error> for Ended {
    fn from(error: io::Error) -> Ended {
        Ended::Broken(error)
    }
}

/// Connects, serves the connection to its end, and connects again, until the last handle is gone.
pub(crate) async fn stay_connected(state: Weak<State>) {
    let Some((shard, mut servers, longest)) = state.upgrade().map(|state| {
        let servers = Servers::new(&state.options.servers, || state.shard.random());
        (state.shard.clone(), servers, state.options.reconnect_max)
    }) else {
        return;
    };
    let (mut wait_max, mut said) = (RECONNECT_MIN, None);
    loop {
        let (server, begun) = (servers.next(), shard.now());
        let mut connection = Connection { state: &state, shard: &shard, servers: &mut servers };
        let ended = connection.run(&server).await;
        let Some(state) = state.upgrade() else { return };
        let was_connected = state.is_connected();
        state.disconnected();
        if !was_connected {
            state.count(|stats| stats.connects_failed += 1);
        }
        drop(state);
        match ended {
            Ended::Dropped => return,
            Ended::Moved => {
                info!("nats: {server} is about to end; its clients move to another server");
                continue;
            }
            Ended::Broken(error) => say(&mut said, shard.now(), &server, &error, was_connected),
        }
        if was_connected && shard.now() - begun >= GOOD_AFTER {
            wait_max = RECONNECT_MIN;
        }
        // A random part of it, so that a thousand clients do not come back at once.
        shard.sleep(part(wait_max.min(longest), shard.random())).await;
        wait_max = (wait_max * 2).min(longest);
    }
}

/// Says why there is no connection, the same reason at most once a minute.
fn say(said: &mut Option<(Time, String)>, now: Time, server: &str, error: &io::Error, was_connected: bool) {
    let text = error.to_string();
    if said.as_ref().is_some_and(|(at, last)| *last == text && now - *at < SAID_EVERY) {
        return;
    }
    match was_connected {
        true => warn!("nats: the connection to {server} is lost: {text}"),
        false => warn!("nats: no connection to {server}: {text}"),
    }
    *said = Some((now, text));
}

/// A random part of a time.
fn part(time: Duration, random: u64) -> Duration {
    let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    Duration::from_nanos(random % nanos.saturating_add(1))
}

struct Connection<'a> {
    /// Weak, so that the connection ends with its handles.
    state: &'a Weak<State>,
    shard: &'a Shard,
    servers: &'a mut Servers,
}

impl Connection<'_> {
    async fn run(&mut self, server: &str) -> Ended {
        let Some(time) = self.state.upgrade().map(|state| state.options.handshake_timeout) else {
            return Ended::Dropped;
        };
        let shard = self.shard;
        match shard.timeout(time, self.enter(server)).await {
            Ok(Ok(reader)) => Reading::new(self.state, shard, reader).run(self.servers).await,
            Ok(Err(ended)) => ended,
            Err(_elapsed) => Ended::Broken(io::Error::new(
                io::ErrorKind::TimedOut,
                "NatsOptions::handshake_timeout is over",
            )),
        }
    }

    /// Connects, and waits until the server has let this client in.
    async fn enter(&mut self, server: &str) -> Result<FramedReader<NatsFrames>, Ended> {
        let stream = self.connect(server).await?;
        let state = self.state.upgrade().ok_or(Ended::Dropped)?;
        // What the last server took says nothing of this one, whose INFO follows.
        let limit = state.payload_bytes_max.clone();
        let has_tls = has_tls(&state);
        drop(state);
        let mut framed = stream.framed(NatsFrames::new(limit)).frame_bytes_max(FRAME_BYTES_MAX);
        let info = Info::parse(&next(&mut framed).await?)
            .ok_or_else(|| Ended::Broken(invalid("what answers is no server of NATS")))?;
        if info.tls_required && !has_tls {
            return Err(Ended::Broken(invalid(
                "the server wants TLS, which begins here with the first byte: NatsOptions::tls, and handshake_first there",
            )));
        }
        let state = self.state.upgrade().ok_or(Ended::Dropped)?;
        self.take_info(&state, &info);
        let line = state.options.connect_line(info.nonce.as_deref(), has_tls);
        drop(state);
        framed.stream().queue(line + "PING\r\n");
        loop {
            let frame = next(&mut framed).await?;
            match &frame[..] {
                b"PONG" => break,
                b"PING" => framed.stream().queue("PONG\r\n"),
                b"+OK" => {}
                frame if frame.starts_with(b"INFO ") => {
                    let info =
                        Info::parse(frame).ok_or_else(|| Ended::Broken(invalid("INFO is malformed")))?;
                    let state = self.state.upgrade().ok_or(Ended::Dropped)?;
                    self.take_info(&state, &info);
                }
                frame if frame.starts_with(b"-ERR") => return Err(Ended::Broken(refused(frame))),
                _ => return Err(Ended::Broken(invalid("the server sends before it has let this client in"))),
            }
        }
        let state = self.state.upgrade().ok_or(Ended::Dropped)?;
        info!("nats: connected to {server} ({} {})", info.server_name, info.version);
        let (reader, writer) = framed.split();
        state.connected(writer);
        Ok(reader)
    }

    async fn connect(&self, server: &str) -> io::Result<Stream> {
        let connecting = self.shard.connect(server);
        #[cfg(feature = "tls")]
        let connecting = {
            let state = self.state.upgrade();
            match state.and_then(|state| state.options.tls.clone()) {
                Some(tls) => connecting.transport(
                    tls.to(crate::servers::host(server)).map_err(|error| invalid(&error.to_string()))?,
                ),
                None => connecting,
            }
        };
        connecting.await
    }

    fn take_info(&mut self, state: &State, info: &Info) {
        take_info(state, self.servers, info);
    }
}

fn take_info(state: &State, servers: &mut Servers, info: &Info) {
    state.payload_bytes_max.set(info.max_payload.unwrap_or(MAX_PAYLOAD).min(PAYLOAD_BYTES_MAX));
    state.takes_headers.set(info.headers);
    servers.learn(&info.connect_urls, || state.shard.random());
}

#[cfg(feature = "tls")]
fn has_tls(state: &State) -> bool {
    state.options.tls.is_some()
}

#[cfg(not(feature = "tls"))]
fn has_tls(_state: &State) -> bool {
    false
}

async fn next(framed: &mut Framed<NatsFrames>) -> io::Result<Frame> {
    match framed.next().await {
        Some(Ok(frame)) => Ok(frame),
        Some(Err(error)) => Err(error.into()),
        None => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server ended the connection")),
    }
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// An error that ends the connection, in the server's words.
fn refused(frame: &[u8]) -> io::Error {
    let words: String = String::from_utf8_lossy(frame).chars().take(256).collect();
    io::Error::new(io::ErrorKind::PermissionDenied, format!("the server says {words}"))
}

/// The reading of a connection, in one task with the PINGs.
struct Reading<'a> {
    state: &'a Weak<State>,
    shard: &'a Shard,
    reader: FramedReader<NatsFrames>,
    tick: Sleep,
    /// Something came since the last tick.
    was_heard: bool,
    pings: u32,
    leave: Leave,
}

/// The steps away from a server that is about to end.
enum Leave {
    No,
    /// When what was asked has its answers, or at that time.
    WhenQuiet(Sleep),
    /// With the answer to this PING, behind which nothing is on its way.
    Answered((u64, u64)),
}

impl<'a> Reading<'a> {
    fn new(state: &'a Weak<State>, shard: &'a Shard, reader: FramedReader<NatsFrames>) -> Reading<'a> {
        let tick = shard.sleep(Duration::ZERO);
        Reading { state, shard, reader, tick, was_heard: true, pings: 0, leave: Leave::No }
    }

    async fn run(mut self, servers: &mut Servers) -> Ended {
        poll_fn(|task| self.poll(task, servers)).await
    }

    fn poll(&mut self, task: &mut Context<'_>, servers: &mut Servers) -> Poll<Ended> {
        let Some(state) = self.state.upgrade() else { return Poll::Ready(Ended::Dropped) };
        // What came in this turn, and no more: further bytes come with a later one.
        loop {
            let frame = match self.reader.poll_next(task) {
                Poll::Ready(Some(Ok(frame))) => frame,
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Ended::Broken(error.into())),
                Poll::Ready(None) => {
                    let why = "the server ended the connection";
                    return Poll::Ready(Ended::Broken(io::Error::new(io::ErrorKind::UnexpectedEof, why)));
                }
                Poll::Pending => break,
            };
            self.was_heard = true;
            if let Err(error) = self.take(&state, servers, frame) {
                return Poll::Ready(Ended::Broken(error));
            }
        }
        if self.poll_silence(task, &state).is_ready() {
            let error = io::Error::new(io::ErrorKind::TimedOut, "the server does not answer");
            return Poll::Ready(Ended::Broken(error));
        }
        self.poll_leave(task, &state).map(|()| Ended::Moved)
    }

    /// Asks a silent server whether it is there. Ready if it is not.
    fn poll_silence(&mut self, task: &mut Context<'_>, state: &State) -> Poll<()> {
        while Pin::new(&mut self.tick).poll(task).is_ready() {
            self.tick = self.shard.sleep(state.options.ping_interval);
            if std::mem::take(&mut self.was_heard) {
                self.pings = 0;
            } else if self.pings >= PINGS_MAX {
                return Poll::Ready(());
            } else {
                self.pings += 1;
                state.ping();
            }
        }
        Poll::Pending
    }

    /// Ready once a server that is about to end can be left.
    fn poll_leave(&mut self, task: &mut Context<'_>, state: &State) -> Poll<()> {
        if let Leave::WhenQuiet(at_last) = &mut self.leave
            && (!state.has_questions() || Pin::new(at_last).poll(task).is_ready())
        {
            state.unsubscribe_all();
            self.leave = state.ping().map_or(Leave::No, Leave::Answered);
        }
        match &self.leave {
            Leave::Answered(ping) if state.is_answered(*ping) == Ok(true) => Poll::Ready(()),
            _ => Poll::Pending,
        }
    }

    fn take(&mut self, state: &State, servers: &mut Servers, frame: Frame) -> io::Result<()> {
        match frame.first() {
            Some(b'M' | b'H') => {
                let (sid, message) = Message::parse(frame)
                    .ok_or_else(|| invalid("the server sends a message that is none"))?;
                state.deliver(sid, message);
                Ok(())
            }
            _ => self.take_other(state, servers, &frame),
        }
    }

    #[cold]
    fn take_other(&mut self, state: &State, servers: &mut Servers, frame: &[u8]) -> io::Result<()> {
        match frame {
            b"PING" => state.pong(),
            b"PONG" if state.ponged() => {}
            b"PONG" => return Err(invalid("the server answers a PING that was not sent")),
            b"+OK" => {}
            _ if frame.starts_with(b"INFO ") => {
                let info = Info::parse(frame).ok_or_else(|| invalid("INFO is malformed"))?;
                take_info(state, servers, &info);
                if info.ldm && servers.has_others() && matches!(self.leave, Leave::No) {
                    self.leave = Leave::WhenQuiet(self.shard.sleep(LEAVE_WITHIN));
                }
            }
            _ if frame.starts_with(b"-ERR") => return take_error(state, frame),
            _ => return Err(invalid("the server sends no operation of NATS")),
        }
        Ok(())
    }
}

/// Takes an error of the server. Behind most the server ends the connection; permissions leave it.
fn take_error(state: &State, frame: &[u8]) -> io::Result<()> {
    state.count(|stats| stats.errors += 1);
    let words = String::from_utf8_lossy(frame);
    if let Some(of) = words.split_once("Permissions Violation for Subscription to \"") {
        let pattern = of.1.split('"').next().unwrap_or("");
        warn!("nats: the server refuses a subscription to {pattern:?}");
        state.refuse(pattern);
        return Ok(());
    }
    if words.contains("Permissions Violation") || words.contains("Invalid Subject") {
        let words: String = words.chars().take(256).collect();
        warn!("nats: the server says {words}");
        return Ok(());
    }
    Err(refused(frame))
}
