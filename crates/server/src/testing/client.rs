//! Clients of a simulation.

use std::cell::Cell;
use std::error::Error;
use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use ringserve_simkernel::{Socket, SocketListener};

use super::tasks::{Code, WaitsFor};
use super::world::World;
use crate::trace::TracePlace;
use crate::watched_service::shown;

/// The result of a client: an error says why it gave up.
pub type ClientResult = Result<(), Box<dyn Error>>;

/// The network, clock and randomness of one client. Clones belong to the same client.
#[derive(Clone)]
pub struct Net {
    world: Rc<World>,
    name: Rc<str>,
    host: IpAddr,
    waits_for: Rc<Cell<WaitsFor>>,
}

impl Net {
    /// The code of a client as a task of the world.
    pub(crate) fn run<C>(world: &Rc<World>, name: &str, host: IpAddr, counts: bool, is_client: bool, code: C)
    where
        C: AsyncFnOnce(Net) -> ClientResult + 'static,
    {
        let name: Rc<str> = name.into();
        let of = world.clone();
        world.spawn(name.clone(), counts, is_client, move |waits_for| -> Code {
            let net = Net { world: of, name, host, waits_for };
            Box::pin(async move { code(net).await.map_err(|error| error.to_string()) })
        });
    }

    /// Connects to an address. It takes the time that the network takes: faults delay it, and a
    /// partition holds it back.
    ///
    /// # Errors
    /// `ConnectionRefused` if no server listens there.
    pub async fn connect(&self, addr: impl ToSocketAddrs) -> io::Result<ClientStream> {
        let to = first(addr)?;
        let mut socket = self.world.network.socket(self.host, to);
        self.waits_for.set(WaitsFor::Of("a connect to", Some(to)));
        let connected = poll_fn(|task| socket.poll_connect(task)).await;
        let local = socket.local_addr();
        self.event(local, || match &connected {
            Ok(()) => format!("connects to {to}"),
            Err(error) => format!("cannot connect to {to}: {error}"),
        });
        connected?;
        Ok(self.stream(socket))
    }

    /// Listens, as an upstream of the servers under test. Port 0 finds a free one.
    ///
    /// # Errors
    /// `AddrInUse`.
    pub fn listen(&self, addr: impl ToSocketAddrs) -> io::Result<ClientListener> {
        let listener = self.world.network.socket_listener(first(addr)?)?;
        Ok(ClientListener { listener, net: self.clone() })
    }

    /// Runs more code of this client, beside the caller. The run does not wait for its end.
    pub fn spawn(&self, code: impl Future<Output = ()> + 'static) {
        Net::run(&self.world, &self.name, self.host, false, false, async move |_| {
            code.await;
            Ok(())
        });
    }

    /// Sleeps in virtual time.
    pub fn sleep(&self, time: Duration) -> ClientSleep {
        ClientSleep { net: self.clone(), until: self.now().saturating_add(time), timer: None }
    }

    /// Runs a future for at most `time`, then drops it.
    ///
    /// # Errors
    /// `TimedOut`.
    pub async fn timeout<F: Future>(&self, time: Duration, future: F) -> io::Result<F::Output> {
        let mut future = std::pin::pin!(future);
        let mut sleep = self.sleep(time);
        poll_fn(|task| {
            if let Poll::Ready(done) = future.as_mut().poll(task) {
                return Poll::Ready(Ok(done));
            }
            ready!(Pin::new(&mut sleep).poll(task));
            Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
        })
        .await
    }

    /// The virtual time since the start of the run.
    pub fn now(&self) -> Duration {
        self.world.now()
    }

    /// A random number, decided by the seed.
    pub fn random(&self) -> u64 {
        self.world.random()
    }

    /// The address of the client's host.
    pub fn host(&self) -> IpAddr {
        self.host
    }

    /// Writes a line into the trace of the run.
    pub fn note(&self, what: impl fmt::Display) {
        self.event(None, || what.to_string());
    }

    fn stream(&self, socket: Socket) -> ClientStream {
        // The address that servers see, whichever side connected.
        let shown_as = socket.local_addr();
        ClientStream {
            socket: Some(socket),
            net: self.clone(),
            unread: Vec::new(),
            shown_as,
            is_ended: Cell::new(false),
        }
    }

    fn event(&self, connection: Option<SocketAddr>, what: impl FnOnce() -> String) {
        self.world.trace.set_subject(connection);
        self.world.trace.event(&TracePlace::Client(self.name.clone()), connection, what);
    }
}

impl fmt::Debug for Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Net({}, {})", self.name, self.host)
    }
}

fn first(addr: impl ToSocketAddrs) -> io::Result<SocketAddr> {
    addr.to_socket_addrs()?.next().ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

/// Sleeps in virtual time. Made by [`Net::sleep`].
#[must_use = "a future does nothing until it is awaited"]
pub struct ClientSleep {
    net: Net,
    until: Duration,
    timer: Option<(Duration, u64)>,
}

impl Future for ClientSleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<()> {
        let world = self.net.world.clone();
        if let Some(timer) = self.timer.take() {
            world.clear_timer(timer);
        }
        if world.now() >= self.until {
            return Poll::Ready(());
        }
        self.net.waits_for.set(WaitsFor::Until(self.until));
        self.timer = Some(world.set_timer(self.until, task.waker().clone()));
        Poll::Pending
    }
}

impl Drop for ClientSleep {
    fn drop(&mut self) {
        if let Some(timer) = self.timer.take() {
            self.net.world.clear_timer(timer);
        }
    }
}

impl fmt::Debug for ClientSleep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClientSleep(until {:?})", self.until)
    }
}

/// A listener of a client. Made by [`Net::listen`].
#[derive(Debug)]
pub struct ClientListener {
    listener: SocketListener,
    net: Net,
}

impl ClientListener {
    /// The next connection.
    pub async fn accept(&mut self) -> ClientStream {
        self.net.waits_for.set(WaitsFor::Of("a connection to", Some(self.local_addr())));
        let socket = poll_fn(|task| self.listener.poll_accept(task)).await;
        self.net.event(socket.peer_addr(), || "accepts".to_owned());
        self.net.stream(socket)
    }

    /// The address of the listener, with the real port.
    pub fn local_addr(&self) -> SocketAddr {
        self.listener.local_addr()
    }
}

/// A client's connection. Its drop closes it: with FIN, or with a reset if received bytes were not
/// read.
///
/// With the feature `tokio` it is tokio's `AsyncRead` and `AsyncWrite`.
pub struct ClientStream {
    /// Until it is closed.
    socket: Option<Socket>,
    net: Net,
    /// Bytes that were received and not returned.
    unread: Vec<u8>,
    shown_as: Option<SocketAddr>,
    /// The end was returned.
    is_ended: Cell<bool>,
}

/// The most bytes of one read.
const READ_BYTES: usize = 4 << 10;

impl ClientStream {
    /// Sends all bytes; waits while the peer reads too slowly.
    ///
    /// # Errors
    /// `ConnectionReset` or `BrokenPipe` if the connection is gone.
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        let mut bytes = bytes.as_ref();
        self.event(|| format!("sends {}", shown(bytes)));
        while !bytes.is_empty() {
            let sent = poll_fn(|task| self.poll_send(task, bytes)).await?;
            bytes = &bytes[sent..];
        }
        Ok(())
    }

    /// Reads a line up to the next `\n`, and returns it without `\n` and `\r\n`. `None` at the end
    /// of the stream.
    ///
    /// # Errors
    /// `UnexpectedEof` if the stream ends within a line, `InvalidData` if it is no UTF-8, or
    /// `ConnectionReset`.
    pub async fn line(&mut self) -> io::Result<Option<String>> {
        let mut looked_at = 0;
        loop {
            if let Some(at) = self.unread[looked_at..].iter().position(|byte| *byte == b'\n') {
                let mut line: Vec<u8> = self.unread.drain(..=looked_at + at).collect();
                line.truncate(line.len() - 1);
                if line.ends_with(b"\r") {
                    line.truncate(line.len() - 1);
                }
                self.event(|| format!("reads {}", shown(&line)));
                let line = String::from_utf8(line);
                return line.map(Some).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error));
            }
            looked_at = self.unread.len();
            if self.fill("a line on the connection of").await? == 0 {
                return if self.unread.is_empty() {
                    Ok(None)
                } else {
                    Err(io::ErrorKind::UnexpectedEof.into())
                };
            }
        }
    }

    /// Reads exactly `len` bytes.
    ///
    /// # Errors
    /// `UnexpectedEof` if the stream ends before, or `ConnectionReset`.
    pub async fn exactly(&mut self, len: usize) -> io::Result<Vec<u8>> {
        while self.unread.len() < len {
            if self.fill("bytes on the connection of").await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        let bytes: Vec<u8> = self.unread.drain(..len).collect();
        self.event(|| format!("reads {}", shown(&bytes)));
        Ok(bytes)
    }

    /// Reads the bytes that are there, and waits if there are none. Empty at the end of the stream.
    ///
    /// # Errors
    /// `ConnectionReset`.
    pub async fn some(&mut self) -> io::Result<Vec<u8>> {
        if self.unread.is_empty() {
            self.fill("bytes on the connection of").await?;
        }
        let bytes = std::mem::take(&mut self.unread);
        self.event(|| format!("reads {}", shown(&bytes)));
        Ok(bytes)
    }

    /// Waits until the peer sends FIN, and returns all bytes before it.
    ///
    /// # Errors
    /// `ConnectionReset`: the peer, a fault or the test reset the connection.
    pub async fn closed(&mut self) -> io::Result<Vec<u8>> {
        while self.fill("the end of the connection of").await? > 0 {}
        Ok(std::mem::take(&mut self.unread))
    }

    /// Sends FIN. Reading goes on.
    ///
    /// # Errors
    /// `NotConnected` after a reset.
    pub fn finish(&mut self) -> io::Result<()> {
        self.event(|| "sends FIN".to_owned());
        self.socket()?.shutdown()
    }

    /// Closes the connection with a reset. Bytes that the peer did not take by then are lost.
    pub fn reset(mut self) {
        self.event(|| "resets".to_owned());
        if let Some(socket) = self.socket.take() {
            socket.reset();
        }
    }

    /// Holds back everything on this connection, in both directions, until it is
    /// [released](ClientStream::release).
    pub fn hold(&self) {
        self.with_connection(|network, connection| network.hold(connection));
    }

    /// Ends a [hold](ClientStream::hold): held bytes arrive.
    pub fn release(&self) {
        self.with_connection(|network, connection| network.release(connection));
    }

    /// The client's address, which the server knows as the peer's.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.socket.as_ref()?.local_addr()
    }

    /// The server's address.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.socket.as_ref()?.peer_addr()
    }

    fn with_connection(
        &self,
        act: impl FnOnce(&ringserve_simkernel::Network, ringserve_simkernel::ConnectionId),
    ) {
        if let Some(connection) = self.socket.as_ref().and_then(Socket::connection) {
            act(&self.net.world.network, connection);
        }
    }

    fn socket(&mut self) -> io::Result<&mut Socket> {
        self.socket.as_mut().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Reads received bytes; 0 at the end.
    async fn fill(&mut self, what: &'static str) -> io::Result<usize> {
        self.net.waits_for.set(WaitsFor::Of(what, self.shown_as));
        poll_fn(|task| {
            let mut bytes = [0; READ_BYTES];
            let len = ready!(self.poll_fill(task, &mut bytes))?;
            self.unread.extend_from_slice(&bytes[..len]);
            Poll::Ready(Ok(len))
        })
        .await
    }

    fn poll_fill(&mut self, task: &mut Context<'_>, into: &mut [u8]) -> Poll<io::Result<usize>> {
        let read = ready!(self.socket()?.poll_read(task, into));
        if !matches!(read, Ok(1..)) && !self.is_ended.replace(true) {
            self.event(|| match &read {
                Ok(_) => "finds FIN".to_owned(),
                Err(error) => format!("finds {error}"),
            });
        }
        self.net.world.trace.set_subject(self.shown_as);
        Poll::Ready(read)
    }

    fn poll_send(&mut self, task: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let sent = self.socket()?.poll_write(task, bytes);
        if sent.is_pending()
            && let Some(name) = self.shown_as
        {
            self.net.waits_for.set(WaitsFor::Of("room to send on the connection of", Some(name)));
        }
        sent
    }

    fn event(&self, what: impl FnOnce() -> String) {
        self.net.event(self.shown_as, what);
    }
}

impl Drop for ClientStream {
    fn drop(&mut self) {
        if let Some(socket) = self.socket.take() {
            self.event(|| "closes".to_owned());
            drop(socket);
        }
    }
}

impl fmt::Debug for ClientStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.socket {
            Some(socket) => write!(f, "ClientStream({socket:?})"),
            None => f.write_str("ClientStream(closed)"),
        }
    }
}

#[cfg(feature = "tokio")]
impl tokio::io::AsyncRead for ClientStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
        buffer: &mut tokio::io::ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.unread.is_empty() {
            let len = ready!(self.poll_fill(task, buffer.initialize_unfilled()))?;
            buffer.advance(len);
        } else {
            let len = buffer.remaining().min(self.unread.len());
            buffer.put_slice(&self.unread[..len]);
            self.unread.drain(..len);
        }
        Poll::Ready(Ok(()))
    }
}

#[cfg(feature = "tokio")]
impl tokio::io::AsyncWrite for ClientStream {
    fn poll_write(mut self: Pin<&mut Self>, task: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_send(task, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.finish())
    }
}
