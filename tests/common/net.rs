//! The network a server is on: this machine's, or a simulated one in memory.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ringserve::framing::{Framing, Raw};
use ringserve::{Error, IntoService, Peer, Server, ServerHandle, Shard};
use ringserve_core::Socket;
use ringserve_drivers::{Uring, UringConfig, Waker};
use ringserve_server::internals::{Drivers, start_on};
use ringserve_sim::memory::{MemoryKernel, MemoryStream, Network};
use rustix::net::{RecvFlags, recv};
use socket2::{Domain, SockRef, Type};

use super::SOON;

/// What little a client with a small window takes that it did not read.
const SMALL_WINDOW: usize = 4096;

/// Where a server is found.
#[derive(Clone, Debug)]
pub enum Net {
    /// On this machine.
    Local,
    Simulated(Network),
}

impl Net {
    pub fn connect(&self, addr: SocketAddr) -> io::Result<Stream> {
        match self {
            Net::Local => TcpStream::connect_timeout(&addr, SOON).map(Stream::Tcp),
            Net::Simulated(network) => network.connect(addr).map(Stream::Memory),
        }
    }

    /// As above, with a kernel that takes little that was not read.
    pub fn connect_with_small_window(&self, addr: SocketAddr) -> io::Result<Stream> {
        match self {
            Net::Local => {
                let socket = socket2::Socket::new(Domain::for_address(addr), Type::STREAM, None)?;
                socket.set_recv_buffer_size(SMALL_WINDOW)?;
                socket.connect(&addr.into())?;
                Ok(socket.into())
            }
            Net::Simulated(network) => network.connect_with_window(addr, SMALL_WINDOW).map(Stream::Memory),
        }
    }
}

/// The drivers of a server on a simulated network: the real bookkeeping over a simulated kernel.
struct Simulated(Network);

impl Drivers for Simulated {
    type Driver = Uring<MemoryKernel>;

    fn listen(&self, addr: SocketAddr, shards: usize) -> io::Result<SocketAddr> {
        self.0.listen(addr, shards)
    }

    fn make(&self, shard: usize, config: &UringConfig) -> io::Result<Self::Driver> {
        self.0.driver(shard, config)
    }

    fn waker(driver: &Self::Driver) -> Waker {
        driver.kernel().waker()
    }

    fn hand_over(driver: &mut Self::Driver, socket: Socket) -> Option<OwnedFd> {
        driver.kernel().hand_over(socket)
    }

    fn take_over(driver: &mut Self::Driver, socket: OwnedFd) -> Socket {
        driver.kernel().take_over(socket)
    }
}

/// A server to be, and the network it will be on.
pub struct Host<F = Raw> {
    server: Server<F>,
    pub net: Net,
}

impl<F> From<Server<F>> for Host<F> {
    fn from(server: Server<F>) -> Host<F> {
        Host { server, net: Net::Local }
    }
}

impl<F: Framing + Clone + Send> Host<F> {
    pub fn on(server: Server<F>, net: Net) -> Host<F> {
        Host { server, net }
    }

    pub fn framing<G: Framing + Clone + Send>(self, framing: G) -> Host<G> {
        Host { server: self.server.framing(framing), net: self.net }
    }

    pub fn shards(self, shards: usize) -> Host<F> {
        Host { server: self.server.shards(shards), ..self }
    }

    pub fn admit(self, admit: impl Fn(&Peer) -> bool + Send + Sync + 'static) -> Host<F> {
        Host { server: self.server.admit(admit), ..self }
    }

    pub fn start<Make: IntoService<F>>(
        self,
        factory: impl Fn(&Shard) -> Make + Send + Sync + 'static,
    ) -> Result<ServerHandle, Error> {
        match self.net {
            Net::Local => self.server.start(factory),
            Net::Simulated(network) => start_on(self.server, Simulated(network), factory),
        }
    }
}

/// A client's end of a connection, with the calls of a [`TcpStream`].
#[derive(Debug)]
pub enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
    Memory(MemoryStream),
}

impl From<socket2::Socket> for Stream {
    fn from(socket: socket2::Socket) -> Stream {
        Stream::Tcp(socket.into())
    }
}

impl From<UnixStream> for Stream {
    fn from(stream: UnixStream) -> Stream {
        Stream::Unix(stream)
    }
}

impl Stream {
    /// The socket, for what only one of this machine has.
    #[track_caller]
    pub fn socket(&self) -> &TcpStream {
        match self {
            Stream::Tcp(stream) => stream,
            Stream::Unix(_) => panic!("a Unix socket is none of TCP"),
            Stream::Memory(_) => panic!("a simulated connection has no socket"),
        }
    }

    pub fn try_clone(&self) -> io::Result<Stream> {
        match self {
            Stream::Tcp(stream) => stream.try_clone().map(Stream::Tcp),
            Stream::Unix(stream) => stream.try_clone().map(Stream::Unix),
            Stream::Memory(stream) => Ok(Stream::Memory(stream.clone())),
        }
    }

    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match self {
            Stream::Tcp(stream) => stream.local_addr(),
            Stream::Unix(_) => Err(io::ErrorKind::AddrNotAvailable.into()),
            Stream::Memory(stream) => Ok(stream.local_addr()),
        }
    }

    pub fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.set_nodelay(nodelay),
            // Nothing is ever delayed there.
            Stream::Unix(_) | Stream::Memory(_) => Ok(()),
        }
    }

    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => return stream.set_read_timeout(timeout),
            Stream::Unix(stream) => return stream.set_read_timeout(timeout),
            Stream::Memory(stream) => stream.set_read_timeout(timeout),
        }
        Ok(())
    }

    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => return stream.set_write_timeout(timeout),
            Stream::Unix(stream) => return stream.set_write_timeout(timeout),
            Stream::Memory(stream) => stream.set_write_timeout(timeout),
        }
        Ok(())
    }

    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => return stream.set_nonblocking(nonblocking),
            Stream::Unix(stream) => return stream.set_nonblocking(nonblocking),
            Stream::Memory(stream) => stream.set_nonblocking(nonblocking),
        }
        Ok(())
    }

    /// The close will be a reset.
    pub fn reset_on_close(&self) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => return SockRef::from(stream).set_linger(Some(Duration::ZERO)),
            Stream::Unix(_) => panic!("a Unix socket is never reset"),
            Stream::Memory(stream) => stream.set_reset_on_close(true),
        }
        Ok(())
    }

    pub fn peek(&self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.peek(into),
            Stream::Unix(stream) => Ok(recv(stream, into, RecvFlags::PEEK)?.0),
            Stream::Memory(stream) => stream.peek(into),
        }
    }

    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.shutdown(how),
            Stream::Unix(stream) => stream.shutdown(how),
            Stream::Memory(stream) => stream.shutdown(how),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.read(into),
            Stream::Unix(stream) => stream.read(into),
            Stream::Memory(stream) => stream.read(into),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.write(bytes),
            Stream::Unix(stream) => stream.write(bytes),
            Stream::Memory(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
