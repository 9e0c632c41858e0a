//! Connecting to upstreams.

use std::error::Error;
use std::fmt;
use std::io;
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;
use std::vec;

use ringserve_core::{Address, ConnShared, Time, Transport, TransportConn};

use super::byte_stream::Stream;
use super::proxy_header::ProxyHeader;
use crate::blocking::{Blocking, resolve};
use crate::shard::face::guarded_transport::GuardedTransport;
use crate::shard::face::handle::Shard;
use crate::shard::tasks::attempts::{Attempt, Progress};
use crate::shard::tasks::session::Session;
use crate::shard::wakes::timers::Sleep;

/// The least time for one of several addresses of a name, while that much is left: a lost SYN is
/// repeated after a second.
const ATTEMPT_MIN: Duration = Duration::from_secs(2);

impl Shard {
    /// Connects to an upstream, over the shard's own driver. The connection is a
    /// [`Stream`](crate::Stream) like an accepted one, and its drop closes it. The attempt and its
    /// time begin at the first poll of the future.
    ///
    /// A [`Destination`] is an IP address with a port, a name with a port such as
    /// `"db.internal:5432"`, or a Unix socket ([`Address::unix`], or `"unix:/run/db.sock"`). A name
    /// is resolved by `getaddrinfo` on a thread apart from the shards
    /// ([`spawn_blocking`](Shard::spawn_blocking)), for each connection, without a cache other than
    /// the system's. Its addresses are tried one after the other.
    /// [`ServerLimits::connect_timeout`](crate::limits::ServerLimits::connect_timeout) bounds all
    /// of this together: each address gets an equal part of the remaining time, and at least 2 s
    /// while that much is left. A look-up that is given up runs to its end on its thread.
    ///
    /// Socket options are those of accepted connections
    /// ([`SocketOptions`](crate::net::SocketOptions)). Of the [`Limits`](crate::Limits) those on
    /// outboxes, `inbox_bytes_high`, `write_stall_timeout`, `write_bytes_per_second_min` and
    /// `linger_timeout` hold for each upstream, with separate counters, and `held_bytes_max` for
    /// all connections of the shard together. An upstream may be silent without a limit.
    ///
    /// When the server shuts down, connections to upstreams stay until the last accepted connection
    /// is closed; then their queued bytes leave, and they are closed.
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
    /// The kernel's error, such as `ConnectionRefused`; `TimedOut` after
    /// [`ServerLimits::connect_timeout`](crate::limits::ServerLimits::connect_timeout);
    /// `ResourceBusy` if the shard has
    /// [`ServerLimits::upstreams_max`](crate::limits::ServerLimits::upstreams_max) upstreams, or no
    /// thread is free to resolve a name; `InvalidInput` for a text without a port, or if a
    /// [header](Connecting::proxy_header) or a [transport](Connecting::transport) was set after the
    /// first poll. For a name, the error has the name and the address that was tried last.
    pub fn connect(&self, to: impl Into<Destination>) -> Connecting {
        let stage = Stage::Asked(to.into().0);
        Connecting { stage, shard: self.clone(), header: Box::default(), transport: None }
    }

    /// Resolves a name with a port to its addresses, as [`connect`](Shard::connect) does: by
    /// `getaddrinfo` on a thread apart from the shards, without a cache other than the system's. An
    /// IP address with a port is its only address. For clients that keep what they found, and
    /// connect to the addresses. In a simulation the names are those of the simulation.
    ///
    /// ```
    /// # async fn resolve(shard: &ringserve::Shard) -> std::io::Result<()> {
    /// let addresses = shard.resolve("db.internal:5432").await?;
    /// # let _ = addresses;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The error of the look-up; `NotFound` for a name without an address; `ResourceBusy` if no
    /// thread is free; `InvalidInput` for a text without a port, and for a Unix socket. The text
    /// has the name.
    pub async fn resolve(&self, name: impl Into<Destination>) -> io::Result<Vec<SocketAddr>> {
        let name = match name.into().0 {
            Place::Name(name) => name,
            Place::Address(address) => match address.as_ip() {
                Some(addr) => return Ok(vec![addr]),
                None => {
                    return Err(io::Error::new(
                        io::ErrorKind::InvalidInput,
                        "a Unix socket has no IP address",
                    ));
                }
            },
            Place::Unclear(text) => return Err(unclear(&text)),
        };
        let found = match resolve(self.blocking(), &name.host, name.port).await {
            Ok(found) => found,
            Err(error) => Err(io::Error::new(io::ErrorKind::ResourceBusy, error)),
        };
        match found {
            Ok(addrs) if addrs.is_empty() => Err(failed(&name, "does not resolve", no_address())),
            Ok(addrs) => Ok(addrs),
            Err(error) => Err(failed(&name, "does not resolve", error)),
        }
    }
}

/// The destination of [`Shard::connect`]: an [`Address`], or a name with a port.
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

/// Waits for a connection to an upstream. See [`Shard::connect`]. Its drop gives the attempt up.
#[must_use = "a future does nothing until it is awaited"]
pub struct Connecting {
    stage: Stage,
    shard: Shard,
    /// The first bytes of the connection; usually none.
    header: Box<[u8]>,
    /// The layer between the socket and the stream, if there is one.
    transport: Option<Rc<dyn Transport>>,
}

impl Connecting {
    /// Begins the connection with a header that names the client to the upstream. For a connection
    /// that serves one client, not for one of a pool. Set it before the first poll; afterwards the
    /// future fails with `InvalidInput`.
    pub fn proxy_header(mut self, header: ProxyHeader) -> Connecting {
        self.header = header.encode(self.shard.server().listeners()).into();
        self.expire_if_begun()
    }

    /// Puts a [transport](crate::transport) below the stream, with this connection as its client.
    /// The stream is returned after the handshake, which follows the
    /// [header](Connecting::proxy_header). Set it before the first poll; afterwards the future
    /// fails with `InvalidInput`, and returns no stream without the transport.
    ///
    /// The handshake may take [`Limits::handshake_timeout`](crate::Limits::handshake_timeout). To
    /// an IP address or a Unix socket that time begins at the connection, after
    /// [`ServerLimits::connect_timeout`](crate::limits::ServerLimits::connect_timeout). To a name
    /// `connect_timeout` covers the handshake too: the end of an address's part ends the attempt at
    /// that address, and a handshake that fails leads to the next address.
    ///
    /// # Errors
    /// If the handshake fails: `InvalidData` if one of the two breaks its rules or refuses the
    /// other ([`TlsHandshakeFailed`](crate::CloseReason::TlsHandshakeFailed),
    /// [`TlsBadRecord`](crate::CloseReason::TlsBadRecord),
    /// [`TlsAlertReceived`](crate::CloseReason::TlsAlertReceived)); `TimedOut` after its time;
    /// `ConnectionReset` if the upstream resets the connection; `UnexpectedEof` if the upstream
    /// ends it within the handshake, or before it sent anything; `ConnectionAborted` if the
    /// upstream sends too much, if the transport panics, and if the shard has no memory for it or
    /// ends. An error of the system is returned as it is.
    pub fn transport(mut self, transport: Rc<dyn Transport>) -> Connecting {
        self.transport = Some(transport);
        self.expire_if_begun()
    }

    /// Gives up an attempt that began without the setting.
    fn expire_if_begun(mut self) -> Connecting {
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

/// A transport after a header, which is not a part of its bytes.
struct Behind {
    header: Box<[u8]>,
    transport: GuardedTransport,
}

impl Transport for Behind {
    fn begin(&self, out: &mut Vec<u8>) -> Option<Box<dyn TransportConn>> {
        out.extend_from_slice(&self.header);
        self.transport.begin(out)
    }
}

enum Stage {
    /// Not polled yet.
    Asked(Place),
    Address(Attempting),
    Name(Box<Named>),
    Unclear(Box<str>),
    /// Set up after the first poll.
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
            Stage::Unclear(text) => return Poll::Ready(Err(unclear(text))),
        };
        connected.map_ok(|shared| {
            // A header before a transport is sent by the transport.
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
            // No task will ever read or write the stream.
            Progress::Done(Ok(shared)) => shared.close(),
            _ => {}
        }
    }
}

/// The steps from a name to a connection.
struct Named {
    name: Name,
    /// The time for all steps, and its end.
    time: Option<(Duration, Time)>,
    step: Step,
    /// The end of this step.
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
                        Err(error) => return Poll::Ready(Err(failed(&self.name, "does not resolve", error))),
                    };
                    let Some(first) = addrs.next() else {
                        return Poll::Ready(Err(failed(&self.name, "does not resolve", no_address())));
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
                        return Poll::Ready(Err(failed(&self.name, &format!("at {addr}"), error)));
                    };
                    let rest = mem::take(rest);
                    self.attempt(shard, next, rest);
                }
            }
        }
    }

    /// Tries an address, within its part of the remaining time.
    fn attempt(&mut self, shard: &Shard, addr: SocketAddr, rest: vec::IntoIter<SocketAddr>) {
        self.sleep = self.time.map(|(_, until)| {
            let left = until - shard.now();
            let part = left / u32::try_from(rest.len() + 1).unwrap_or(u32::MAX);
            shard.sleep(part.max(ATTEMPT_MIN).min(left))
        });
        let attempting = Attempting::begin(addr.into(), shard, self.transport.clone());
        self.step = Step::Trying { attempting, addr, rest };
    }
}

fn failed(name: &Name, what: &str, cause: io::Error) -> io::Error {
    io::Error::new(cause.kind(), NamedFailure { what: format!("{name} {what}"), cause })
}

/// Why a name led to no connection.
struct NamedFailure {
    what: String,
    cause: io::Error,
}

ringserve_buf::debug_is_display!(NamedFailure);

impl fmt::Display for NamedFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.cause)
    }
}

impl Error for NamedFailure {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.cause)
    }
}

/// True if the time of a step is over.
fn is_over(sleep: &mut Option<Sleep>, task: &mut Context<'_>) -> bool {
    sleep.as_mut().is_some_and(|sleep| Pin::new(sleep).poll(task).is_ready())
}

fn no_address() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "it has no address")
}

fn unclear(text: &str) -> io::Error {
    let why = format!("{text:?} is no address; write NAME:PORT, IP:PORT or unix:PATH");
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

fn timed_out() -> io::Error {
    io::Error::new(
        io::ErrorKind::TimedOut,
        "ServerLimits::connect_timeout, or the part of it for one of several addresses, is over",
    )
}
