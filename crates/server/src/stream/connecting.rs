//! From a wish to be connected to an upstream to its stream.

use std::fmt;
use std::io;
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;
use std::vec;

use ringserve_core::{Address, Channel, ConnShared, Time, Transport};

use super::byte_stream::Stream;
use super::proxy_header::ProxyHeader;
use crate::shard::attempts::{Attempt, Progress};
use crate::shard::blocking::{Blocking, resolve};
use crate::shard::guarded_transport::GuardedTransport;
use crate::shard::handle::Shard;
use crate::shard::session::Session;
use crate::shard::timers::Sleep;

/// The least time that one of several addresses of a name gets, where so much is left: a SYN that is lost is sent again after a
/// second.
const ATTEMPT_MIN: Duration = Duration::from_secs(2);

impl Shard {
    /// Connects to an upstream, over the shard's own driver. The connection is a [`Stream`](crate::Stream) like an accepted one, and
    /// dropping it closes it. The attempt begins, and its time, when the future is polled first.
    ///
    /// A [`Destination`] is an IP address with a port, a name with a port as `"db.internal:5432"`, or a Unix socket
    /// ([`Address::unix`], or `"unix:/run/db.sock"`). A name is resolved by `getaddrinfo` on a thread beside the shards
    /// ([`spawn_blocking`](Shard::spawn_blocking)), for each connection: nothing is remembered but what the system remembers. Its addresses are
    /// tried one after the other. [`ServerLimits::connect_timeout`](crate::limits::ServerLimits::connect_timeout) is for all of this together:
    /// each address gets an equal part of what is left, and 2 s where there is so much. A lookup that is given up runs to its end on its thread.
    ///
    /// Socket options are those of accepted connections ([`SocketOptions`](crate::net::SocketOptions)). Of the
    /// [`Limits`](crate::Limits) those of outboxes, `inbox_bytes_high`, `write_stall_timeout`, `write_bytes_per_second_min` and `linger_timeout` hold for each, with
    /// counters of their own, and `held_bytes_max` for all connections of the shard together; there is no limit on how long an
    /// upstream may be silent.
    ///
    /// When the server shuts down, connections to upstreams stay until the last accepted one is closed; then what is queued
    /// for them leaves, and they are closed.
    ///
    /// ```no_run
    /// use std::net::SocketAddr;
    /// use ringserve::net::copy_bidirectional;
    /// use ringserve::{Server, Stream, stream};
    ///
    /// # fn main() -> Result<(), ringserve::Error> {
    /// let upstream: SocketAddr = ([127, 0, 0, 1], 8000).into();
    /// Server::bind("127.0.0.1:7000").serve(move |_shard| {
    ///     stream(async move |mut client: Stream| {
    ///         let mut upstream = client.shard().connect(upstream).await?;
    ///         copy_bidirectional(&mut client, &mut upstream).await.map_err(|broken| broken.error)
    ///     })
    /// })
    /// # }
    /// ```
    ///
    /// # Errors
    /// The kernel's, as `ConnectionRefused`; `TimedOut` after [`ServerLimits::connect_timeout`](crate::limits::ServerLimits::connect_timeout); `ResourceBusy` if
    /// the shard has [`ServerLimits::upstreams_max`](crate::limits::ServerLimits::upstreams_max) of them, or no thread is free to resolve a name; `InvalidInput` for a
    /// text without a port, or where the future was polled before it was told of a [header](Connecting::proxy_header) or a
    /// [transport](Connecting::transport). Where a name was given the error names it, and the address that was tried last.
    pub fn connect(&self, to: impl Into<Destination>) -> Connecting {
        let stage = Stage::Asked(to.into().0);
        Connecting { stage, shard: self.clone(), header: Box::default(), transport: None }
    }
}

/// Where [`Shard::connect`] connects to: an [`Address`], or a name with a port.
///
/// ```
/// use std::net::SocketAddr;
/// use ringserve::net::{Address, Destination};
///
/// let _ = Destination::from("db.internal:5432");
/// let _ = Destination::from(("db.internal", 5432));
/// let _ = Destination::from("[::1]:5432");
/// let _ = Destination::from("unix:/run/db.sock");
/// let _ = Destination::from(Address::unix("/run/db.sock"));
/// let _ = Destination::from(SocketAddr::from(([127, 0, 0, 1], 5432)));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Destination(Place);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Place {
    Address(Address),
    Name(Name),
    /// A text that is neither.
    Unclear(Box<str>),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Name {
    host: Box<str>,
    port: u16,
}

impl From<Address> for Destination {
    fn from(address: Address) -> Destination {
        Destination(Place::Address(address))
    }
}

impl From<SocketAddr> for Destination {
    fn from(addr: SocketAddr) -> Destination {
        Destination(Place::Address(addr.into()))
    }
}

impl From<(&str, u16)> for Destination {
    fn from((host, port): (&str, u16)) -> Destination {
        match host.parse::<IpAddr>() {
            Ok(ip) => SocketAddr::new(ip, port).into(),
            Err(_) => Destination(Place::Name(Name { host: host.into(), port })),
        }
    }
}

impl From<&str> for Destination {
    fn from(text: &str) -> Destination {
        if let Some(path) = text.strip_prefix("unix:") {
            return Address::unix(path).into();
        }
        if let Ok(addr) = text.parse::<SocketAddr>() {
            return addr.into();
        }
        let name =
            text.rsplit_once(':').filter(|(host, _)| !host.is_empty() && !host.contains([':', '/', ' ']));
        match name.and_then(|(host, port)| Some((host, port.parse().ok()?))) {
            Some((host, port)) => Destination(Place::Name(Name { host: host.into(), port })),
            None => Destination(Place::Unclear(text.into())),
        }
    }
}

impl From<String> for Destination {
    fn from(text: String) -> Destination {
        text.as_str().into()
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Place::Address(address) => address.fmt(f),
            Place::Name(name) => name.fmt(f),
            Place::Unclear(text) => f.write_str(text),
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// Waits for a connection to an upstream. See [`Shard::connect`]. Dropping it gives the attempt up.
#[must_use = "a future does nothing until it is awaited"]
pub struct Connecting {
    stage: Stage,
    shard: Shard,
    /// What the connection begins with; mostly nothing.
    header: Box<[u8]>,
    /// What stands between the socket and the stream, if that is something.
    transport: Option<Rc<dyn Transport>>,
}

impl Connecting {
    /// Has the connection begin with a header that tells the upstream who the client is. For a connection that serves one
    /// client, not for one of a pool. It is said before the first poll: behind that the future fails with `InvalidInput`.
    pub fn proxy_header(mut self, header: ProxyHeader) -> Connecting {
        self.header = header.encode(self.shard.server().listeners()).into();
        self.told()
    }

    /// Has the stream stand on a [transport](crate::transport), of which the connection has the end of a client. The stream is there once
    /// its handshake is done, which comes behind the [header](Connecting::proxy_header). It is said before the first poll: behind that the
    /// future fails with `InvalidInput`, and no stream without the transport comes of it.
    ///
    /// The handshake may take [`Limits::handshake_timeout`](crate::Limits::handshake_timeout). To an IP address or a Unix socket that
    /// begins once it is connected, beside [`ServerLimits::connect_timeout`](crate::limits::ServerLimits::connect_timeout). To a name
    /// `connect_timeout` is for the handshake too: the part of it that an address gets ends the attempt at that address, and a handshake
    /// that fails leads to the next address.
    ///
    /// # Errors
    /// Where the handshake fails: `InvalidData` if one of the two breaks its rules or refuses the other
    /// ([`TlsHandshakeFailed`](crate::CloseReason::TlsHandshakeFailed), [`TlsBadRecord`](crate::CloseReason::TlsBadRecord),
    /// [`TlsAlertReceived`](crate::CloseReason::TlsAlertReceived)); `TimedOut` when its time is over; `ConnectionReset` if the upstream
    /// resets the connection; `UnexpectedEof` if it ends that within the handshake; `ConnectionAborted` if it ends that before it said
    /// anything or says too much, if the transport panics, and if the shard has no memory for it or ends. An error of the system is itself.
    pub fn transport(mut self, transport: Rc<dyn Transport>) -> Connecting {
        self.transport = Some(transport);
        self.told()
    }

    /// What was begun without it is given up.
    fn told(mut self) -> Connecting {
        if !matches!(self.stage, Stage::Asked(_)) {
            self.stage = Stage::Late;
        }
        self
    }

    /// The first poll.
    #[cold]
    fn begin(&mut self) {
        let header = &mut self.header;
        let behind = self.transport.take().map(|transport| -> Rc<dyn Transport> {
            let transport = GuardedTransport::new(transport, &self.shard);
            Rc::new(Behind { header: mem::take(header), transport })
        });
        self.stage = match mem::replace(&mut self.stage, Stage::Late) {
            Stage::Asked(Place::Address(address)) => {
                Stage::Address(Attempting::begin(address, &self.shard, behind))
            }
            Stage::Asked(Place::Name(name)) => Stage::Name(Box::new(Named::begin(name, &self.shard, behind))),
            Stage::Asked(Place::Unclear(text)) => Stage::Unclear(text),
            begun => begun,
        };
    }
}

/// A transport behind a header that is none of its bytes.
struct Behind {
    header: Box<[u8]>,
    transport: GuardedTransport,
}

impl Transport for Behind {
    fn begin(&self, out: &mut Vec<u8>) -> Option<Box<dyn Channel>> {
        out.extend_from_slice(&self.header);
        self.transport.begin(out)
    }
}

enum Stage {
    /// It was not polled yet.
    Asked(Place),
    Address(Attempting),
    Name(Box<Named>),
    Unclear(Box<str>),
    /// It was told how to connect once it was polled.
    Late,
}

impl Future for Connecting {
    type Output = io::Result<Stream>;

    fn poll(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<io::Result<Stream>> {
        let this = self.get_mut();
        if matches!(this.stage, Stage::Asked(_)) {
            this.begin();
        }
        let Connecting { stage, shard, header, .. } = this;
        let connected = match stage {
            Stage::Asked(_) | Stage::Late => {
                let why = "Connecting::proxy_header and Connecting::transport come before the first poll";
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidInput, why)));
            }
            Stage::Address(attempting) => attempting.poll(task),
            Stage::Name(named) => named.poll(task, shard),
            Stage::Unclear(text) => {
                let why = format!("{text:?} is no address; write NAME:PORT, IP:PORT or unix:PATH");
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidInput, why)));
            }
        };
        connected.map_ok(|shared| {
            // One before a transport is said by that.
            if !header.is_empty() {
                shared.write(header);
            }
            Stream::new(shared, shard.clone())
        })
    }
}

impl fmt::Debug for Connecting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Connecting")
    }
}

/// The attempt to connect to one address.
struct Attempting {
    attempt: Rc<Attempt>,
    shard: Shard,
}

impl Attempting {
    fn begin(address: Address, shard: &Shard, transport: Option<Rc<dyn Transport>>) -> Attempting {
        let attempt = Rc::new(Attempt::new(address, transport));
        shard.upstream_requests().ask(attempt.clone());
        shard.remote().announce_upstreams();
        Attempting { attempt, shard: shard.clone() }
    }

    fn poll(&self, task: &mut Context<'_>) -> Poll<io::Result<ConnShared<Session>>> {
        match self.attempt.progress.take() {
            Progress::Done(result) => Poll::Ready(result),
            other => {
                self.attempt.progress.set(other);
                self.attempt.waker.set(Some(task.waker().clone()));
                Poll::Pending
            }
        }
    }
}

impl Drop for Attempting {
    fn drop(&mut self) {
        match self.attempt.progress.take() {
            Progress::Connecting(id) => {
                self.shard.upstream_requests().give_up(id);
                self.shard.remote().announce_upstreams();
            }
            // No task will ever read or write it.
            Progress::Done(Ok(shared)) => shared.close(),
            _ => {}
        }
    }
}

/// The way from a name to a connection.
struct Named {
    name: Name,
    /// How long all of it may take, and until when.
    time: Option<(Duration, Time)>,
    step: Step,
    /// Until when this step may take.
    sleep: Option<Sleep>,
    transport: Option<Rc<dyn Transport>>,
}

enum Step {
    Resolving(Blocking<io::Result<Vec<SocketAddr>>>),
    Trying { attempting: Attempting, addr: SocketAddr, rest: vec::IntoIter<SocketAddr> },
}

impl Named {
    fn begin(name: Name, shard: &Shard, transport: Option<Rc<dyn Transport>>) -> Named {
        let time = shard.upstream_requests().connect_timeout().map(|time| (time, shard.now() + time));
        let sleep = time.map(|(time, _)| shard.sleep(time));
        let step = Step::Resolving(resolve(shard.blocking(), &name.host, name.port));
        Named { name, time, step, sleep, transport }
    }

    fn poll(&mut self, task: &mut Context<'_>, shard: &Shard) -> Poll<io::Result<ConnShared<Session>>> {
        loop {
            match &mut self.step {
                Step::Resolving(lookup) => {
                    let found = match Pin::new(lookup).poll(task) {
                        Poll::Ready(Ok(found)) => found,
                        Poll::Ready(Err(error)) => Err(io::Error::new(io::ErrorKind::ResourceBusy, error)),
                        Poll::Pending if is_over(&mut self.sleep, task) => Err(timed_out()),
                        Poll::Pending => return Poll::Pending,
                    };
                    let mut addrs = match found {
                        Ok(addrs) => addrs.into_iter(),
                        Err(error) => {
                            return Poll::Ready(Err(self.failed(error.kind(), "does not resolve", &error)));
                        }
                    };
                    let Some(first) = addrs.next() else {
                        let why = "it has no address";
                        return Poll::Ready(Err(self.failed(
                            io::ErrorKind::NotFound,
                            "does not resolve",
                            &why,
                        )));
                    };
                    self.attempt(shard, first, addrs);
                }
                Step::Trying { attempting, addr, rest } => {
                    let error = match attempting.poll(task) {
                        Poll::Ready(Ok(shared)) => return Poll::Ready(Ok(shared)),
                        Poll::Ready(Err(error)) => error,
                        Poll::Pending if is_over(&mut self.sleep, task) => timed_out(),
                        Poll::Pending => return Poll::Pending,
                    };
                    let next = rest.next().filter(|_| self.time.is_none_or(|(_, until)| shard.now() < until));
                    let Some(next) = next else {
                        let what = format!("at {addr}");
                        return Poll::Ready(Err(self.failed(error.kind(), &what, &error)));
                    };
                    let rest = mem::take(rest);
                    self.attempt(shard, next, rest);
                }
            }
        }
    }

    /// Tries an address, which may take its part of the time that is left.
    fn attempt(&mut self, shard: &Shard, addr: SocketAddr, rest: vec::IntoIter<SocketAddr>) {
        self.sleep = self.time.map(|(_, until)| {
            let left = until - shard.now();
            let part = left / u32::try_from(rest.len() + 1).unwrap_or(u32::MAX);
            shard.sleep(part.max(ATTEMPT_MIN).min(left))
        });
        let attempting = Attempting::begin(addr.into(), shard, self.transport.clone());
        self.step = Step::Trying { attempting, addr, rest };
    }

    fn failed(&self, kind: io::ErrorKind, what: &str, why: &dyn fmt::Display) -> io::Error {
        io::Error::new(kind, format!("{} {what}: {why}", self.name))
    }
}

/// True if the time of a step is over.
fn is_over(sleep: &mut Option<Sleep>, task: &mut Context<'_>) -> bool {
    sleep.as_mut().is_some_and(|sleep| Pin::new(sleep).poll(task).is_ready())
}

fn timed_out() -> io::Error {
    io::Error::new(
        io::ErrorKind::TimedOut,
        "ServerLimits::connect_timeout, or the part of it for one of several addresses, is over",
    )
}
