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

use ringserve_core::{Address, ConnLimits, ConnShared, Transport, TransportConn};

use super::byte_stream::Stream;
use super::proxy_header::ProxyHeader;
use crate::blocking::{Blocking, resolve};
use crate::shard::face::guarded_transport::GuardedTransport;
use crate::shard::face::handle::Shard;
use crate::shard::tasks::attempts::{Attempt, Progress};
use crate::shard::tasks::session::StreamSession;
use crate::shard::wakes::timers::Sleep;

/// The time after which the next address of a name is tried beside those that have not answered
/// (RFC 8305).
const NEXT_AFTER: Duration = Duration::from_millis(250);

impl Shard {
    /// Connects to an upstream, over the shard's own driver. The connection is a
    /// [`Stream`](crate::Stream) like an accepted one, and its drop closes it. The attempt and its
    /// time begin at the first poll of the future.
    ///
    /// A [`Destination`] is an IP address with a port, a name with a port such as
    /// `"db.internal:5432"`, or a Unix socket ([`Address::unix`], or `"unix:/run/db.sock"`). A name
    /// is resolved by `getaddrinfo` on a thread apart from the shards
    /// ([`spawn_blocking`](Shard::spawn_blocking)), for each connection, without a cache other than
    /// the system's. Its addresses are tried in the order of the look-up, IPv6 and IPv4 in turn:
    /// the next one where one fails, or after 250 ms beside it, and the first connection is taken.
    /// Until then each attempt counts as an upstream.
    /// [`ServerLimits::connect_timeout`](crate::limits::ServerLimits::connect_timeout) bounds all
    /// of this together. A look-up that is given up runs to its end on its thread.
    ///
    /// Socket options are those of
    /// [`Server::upstream_sockets`](crate::Server::upstream_sockets). Of the
    /// [`Limits`](crate::Limits) those on outboxes, `inbox_bytes_high`, `write_stall_timeout`,
    /// `write_bytes_per_second_min` and `linger_timeout` hold for each upstream, with separate
    /// counters, and `held_bytes_max` for all connections of the shard together. An upstream may be
    /// silent without a limit, unless [`Connecting::limits`] sets one.
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
    /// [header](Connecting::proxy_header), [limits](Connecting::limits) or a
    /// [transport](Connecting::transport) were set after the first poll, or the limits contradict.
    /// For a name, the error has the name and the address that was tried last.
    pub fn connect(&self, to: impl Into<Destination>) -> Connecting {
        let stage = Stage::Asked(to.into().0);
        Connecting { stage, shard: self.clone(), header: Box::default(), limits: None, transport: None }
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
    /// Its own limits; usually none.
    limits: Option<Box<ConnLimits>>,
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

    /// Gives the connection separate limits once it is made, such as an idle timeout or a deadline:
    /// by default an upstream may be silent for ever. Set them before the first poll; afterwards
    /// the future fails with `InvalidInput`, as it does for limits that contradict those of the
    /// server.
    pub fn limits(mut self, limits: ConnLimits) -> Connecting {
        self.limits = Some(Box::new(limits));
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
    /// `connect_timeout` covers the handshake too, and a handshake that fails leads to the next
    /// address.
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
        let Connecting { stage, shard, header, limits, .. } = this;
        let connected = match stage {
            Stage::Asked(_) | Stage::Late => {
                let why = "the settings of a Connecting come before its first poll";
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidInput, why)));
            }
            Stage::Address(attempting) => attempting.poll(task),
            Stage::Name(named) => named.poll(task, shard),
            Stage::Unclear(text) => return Poll::Ready(Err(unclear(text))),
        };
        connected.map(|connected| {
            let shared = connected?;
            let is_refused = limits.take().and_then(|limits| shared.set_limits(&limits).err());
            // A header before a transport is sent by the transport.
            if !header.is_empty() {
                shared.write(header);
            }
            let stream = Stream::new(shared, shard.clone());
            match is_refused {
                Some(error) => Err(io::Error::new(io::ErrorKind::InvalidInput, error)),
                None => Ok(stream),
            }
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

    fn poll(&self, task: &mut Context<'_>) -> Poll<io::Result<ConnShared<StreamSession>>> {
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
    step: Step,
    /// The end of the time for all steps.
    sleep: Option<Sleep>,
    transport: Option<Rc<dyn Transport>>,
}

enum Step {
    Resolving(Blocking<io::Result<Vec<SocketAddr>>>),
    Trying(Attempts),
}

/// The attempts at the addresses of a name.
struct Attempts {
    /// Those under way, the first one first.
    all: Vec<(SocketAddr, Attempting)>,
    rest: vec::IntoIter<SocketAddr>,
    /// When the next one begins, if none of these ended.
    next: Option<Sleep>,
    /// The last one that failed.
    failed: Option<(SocketAddr, io::Error)>,
}

impl Attempts {
    /// Begins the next one, if there is any.
    fn begin_next(&mut self, shard: &Shard, transport: Option<&Rc<dyn Transport>>) {
        let Some(addr) = self.rest.next() else {
            self.next = None;
            return;
        };
        self.all.push((addr, Attempting::begin(addr.into(), shard, transport.cloned())));
        self.next = (self.rest.len() > 0).then(|| shard.sleep(NEXT_AFTER));
    }

    /// Returns the first connection, or once all attempts failed nothing.
    fn poll(
        &mut self,
        task: &mut Context<'_>,
        shard: &Shard,
        transport: Option<&Rc<dyn Transport>>,
    ) -> Poll<Option<ConnShared<StreamSession>>> {
        loop {
            let mut place = 0;
            while let Some((addr, attempting)) = self.all.get(place) {
                match attempting.poll(task) {
                    Poll::Ready(Ok(shared)) => return Poll::Ready(Some(shared)),
                    Poll::Ready(Err(error)) => {
                        self.failed = Some((*addr, error));
                        self.all.remove(place);
                        self.begin_next(shard, transport);
                    }
                    Poll::Pending => place += 1,
                }
            }
            if self.all.is_empty() {
                return Poll::Ready(None);
            }
            if !is_over(&mut self.next, task) {
                return Poll::Pending;
            }
            self.begin_next(shard, transport);
        }
    }
}

/// The addresses with their families in turn, beginning with that of the first one.
fn interleaved(addrs: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let count = addrs.len();
    let is_ipv6 = addrs.first().is_some_and(SocketAddr::is_ipv6);
    let (first, second): (Vec<_>, Vec<_>) = addrs.into_iter().partition(|addr| addr.is_ipv6() == is_ipv6);
    let (mut first, mut second, mut all) = (first.into_iter(), second.into_iter(), Vec::new());
    while all.len() < count {
        all.extend(first.next());
        all.extend(second.next());
    }
    all
}

impl Named {
    fn begin(name: Name, shard: &Shard, transport: Option<Rc<dyn Transport>>) -> Named {
        let sleep = shard.upstream_requests().connect_timeout().map(|time| shard.sleep(time));
        let step = Step::Resolving(resolve(shard.blocking(), &name.host, name.port));
        Named { name, step, sleep, transport }
    }

    fn poll(&mut self, task: &mut Context<'_>, shard: &Shard) -> Poll<io::Result<ConnShared<StreamSession>>> {
        loop {
            match &mut self.step {
                Step::Resolving(lookup) => {
                    let found = match Pin::new(lookup).poll(task) {
                        Poll::Ready(Ok(found)) => found,
                        Poll::Ready(Err(error)) => Err(io::Error::new(io::ErrorKind::ResourceBusy, error)),
                        Poll::Pending if is_over(&mut self.sleep, task) => Err(timed_out()),
                        Poll::Pending => return Poll::Pending,
                    };
                    let addrs = match found {
                        Ok(addrs) => interleaved(addrs).into_iter(),
                        Err(error) => return Poll::Ready(Err(failed(&self.name, "does not resolve", error))),
                    };
                    if addrs.len() == 0 {
                        return Poll::Ready(Err(failed(&self.name, "does not resolve", no_address())));
                    }
                    let mut attempts = Attempts { all: Vec::new(), rest: addrs, next: None, failed: None };
                    attempts.begin_next(shard, self.transport.as_ref());
                    self.step = Step::Trying(attempts);
                }
                Step::Trying(attempts) => {
                    match attempts.poll(task, shard, self.transport.as_ref()) {
                        Poll::Ready(Some(shared)) => return Poll::Ready(Ok(shared)),
                        Poll::Pending if !is_over(&mut self.sleep, task) => return Poll::Pending,
                        Poll::Ready(None) | Poll::Pending => {}
                    }
                    let late = attempts.all.pop().map(|(addr, _)| (addr, timed_out()));
                    let Some((addr, error)) = late.or_else(|| attempts.failed.take()) else {
                        return Poll::Ready(Err(timed_out()));
                    };
                    return Poll::Ready(Err(failed(&self.name, &format!("at {addr}"), error)));
                }
            }
        }
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

/// True if a time is over.
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
    io::Error::new(io::ErrorKind::TimedOut, "ServerLimits::connect_timeout is over")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_tried_in_turn() {
        let addr = |text: &&str| text.parse().unwrap();
        let order = |addrs: &[&str]| -> Vec<String> {
            interleaved(addrs.iter().map(addr).collect()).iter().map(SocketAddr::to_string).collect()
        };
        assert_eq!(
            order(&["[::1]:1", "[::2]:1", "[::3]:1", "1.1.1.1:1"]),
            ["[::1]:1", "1.1.1.1:1", "[::2]:1", "[::3]:1"]
        );
        assert_eq!(order(&["1.1.1.1:1", "[::1]:1"]), ["1.1.1.1:1", "[::1]:1"]);
        assert!(order(&[]).is_empty());
    }
}
