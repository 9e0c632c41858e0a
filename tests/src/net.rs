//! The network of a server: this machine's, or a simulated one in memory.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ringserve::framing::{Framing, Raw};
use ringserve::server::MultiService;
use ringserve::service::IntoService;
use ringserve::{Error, Peer, Server, ServerHandle, Shard};
use ringserve_drivers::{Uring, UringConfig};
use ringserve_server::internals::{Drivers, start_on, start_several_on};
use ringserve_simkernel::{BlockingStream as MemoryStream, Network, SimKernel as MemoryKernel};
use rustix::net::{RecvFlags, recv};
use socket2::{Domain, SockRef, Type};

use crate::SOON;

/// Unread bytes that a client with a small window holds at most.
const SMALL_WINDOW: usize = 4096;

/// The place of a server.
#[derive(Clone, Debug)]
pub enum Net {
    /// On this machine.
    Local,
    Simulated(Network),
}

impl Net {
    pub fn connect(&self, addr: SocketAddr) -> io::Result<ClientStream> {
        match self {
            Net::Local => TcpStream::connect_timeout(&addr, SOON).map(ClientStream::Tcp),
            Net::Simulated(network) => network.connect(addr).map(ClientStream::Memory),
        }
    }

    /// Does the same with a kernel that holds few unread bytes.
    pub fn connect_with_small_window(&self, addr: SocketAddr) -> io::Result<ClientStream> {
        match self {
            Net::Local => {
                let socket = socket2::Socket::new(Domain::for_address(addr), Type::STREAM, None)?;
                socket.set_recv_buffer_size(SMALL_WINDOW)?;
                socket.connect(&addr.into())?;
                Ok(socket.into())
            }
            Net::Simulated(network) => {
                network.connect_with_window(addr, SMALL_WINDOW).map(ClientStream::Memory)
            }
        }
    }

    /// Starts a server of several services there.
    pub fn start_several(&self, server: Server<MultiService>) -> Result<ServerHandle, Error> {
        match self {
            Net::Local => server.start(),
            Net::Simulated(network) => start_several_on(server, Simulated(network.clone())),
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

    fn adopt(&self, addr: SocketAddr, shards: usize) -> io::Result<()> {
        self.0.adopt(addr, shards)
    }

    fn make(&self, shard: usize, config: &UringConfig) -> io::Result<Self::Driver> {
        self.0.driver(shard, config)
    }
}

/// A server before its start, and its network.
pub struct Site<F = Raw> {
    server: Server<F>,
    pub net: Net,
}

impl<F> From<Server<F>> for Site<F> {
    fn from(server: Server<F>) -> Site<F> {
        Site { server, net: Net::Local }
    }
}

impl<F: Framing + Clone + Send> Site<F> {
    pub fn on(server: Server<F>, net: Net) -> Site<F> {
        Site { server, net }
    }

    pub fn framing<G: Framing + Clone + Send>(self, framing: G) -> Site<G> {
        Site { server: self.server.framing(framing), net: self.net }
    }

    pub fn shards(self, shards: usize) -> Site<F> {
        Site { server: self.server.shards(shards), ..self }
    }

    pub fn accounts(self, accounts: bool) -> Site<F> {
        Site { server: self.server.accounts(accounts), ..self }
    }

    pub fn admit(self, admit: impl Fn(&Peer) -> bool + Send + Sync + 'static) -> Site<F> {
        Site { server: self.server.admit(admit), ..self }
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
pub enum ClientStream {
    Tcp(TcpStream),
    Unix(UnixStream),
    Memory(MemoryStream),
}

impl From<socket2::Socket> for ClientStream {
    fn from(socket: socket2::Socket) -> ClientStream {
        ClientStream::Tcp(socket.into())
    }
}

impl From<UnixStream> for ClientStream {
    fn from(stream: UnixStream) -> ClientStream {
        ClientStream::Unix(stream)
    }
}

impl ClientStream {
    /// The socket, for calls that only a socket of this machine has.
    #[track_caller]
    pub fn socket(&self) -> &TcpStream {
        match self {
            ClientStream::Tcp(stream) => stream,
            ClientStream::Unix(_) => panic!("a Unix socket is none of TCP"),
            ClientStream::Memory(_) => panic!("a simulated connection has no socket"),
        }
    }

    pub fn try_clone(&self) -> io::Result<ClientStream> {
        match self {
            ClientStream::Tcp(stream) => stream.try_clone().map(ClientStream::Tcp),
            ClientStream::Unix(stream) => stream.try_clone().map(ClientStream::Unix),
            ClientStream::Memory(stream) => Ok(ClientStream::Memory(stream.clone())),
        }
    }

    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match self {
            ClientStream::Tcp(stream) => stream.local_addr(),
            ClientStream::Unix(_) => Err(io::ErrorKind::AddrNotAvailable.into()),
            ClientStream::Memory(stream) => Ok(stream.local_addr()),
        }
    }

    pub fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
        match self {
            ClientStream::Tcp(stream) => stream.set_nodelay(nodelay),
            // Nothing is ever delayed there.
            ClientStream::Unix(_) | ClientStream::Memory(_) => Ok(()),
        }
    }

    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match self {
            ClientStream::Tcp(stream) => return stream.set_read_timeout(timeout),
            ClientStream::Unix(stream) => return stream.set_read_timeout(timeout),
            ClientStream::Memory(stream) => stream.set_read_timeout(timeout),
        }
        Ok(())
    }

    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match self {
            ClientStream::Tcp(stream) => return stream.set_write_timeout(timeout),
            ClientStream::Unix(stream) => return stream.set_write_timeout(timeout),
            ClientStream::Memory(stream) => stream.set_write_timeout(timeout),
        }
        Ok(())
    }

    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        match self {
            ClientStream::Tcp(stream) => return stream.set_nonblocking(nonblocking),
            ClientStream::Unix(stream) => return stream.set_nonblocking(nonblocking),
            ClientStream::Memory(stream) => stream.set_nonblocking(nonblocking),
        }
        Ok(())
    }

    /// Makes the close a reset.
    pub fn reset_on_close(&self) -> io::Result<()> {
        match self {
            ClientStream::Tcp(stream) => return SockRef::from(stream).set_linger(Some(Duration::ZERO)),
            ClientStream::Unix(_) => panic!("a Unix socket is never reset"),
            ClientStream::Memory(stream) => stream.set_reset_on_close(true),
        }
        Ok(())
    }

    pub fn peek(&self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            ClientStream::Tcp(stream) => stream.peek(into),
            ClientStream::Unix(stream) => Ok(recv(stream, into, RecvFlags::PEEK)?.0),
            ClientStream::Memory(stream) => stream.peek(into),
        }
    }

    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        match self {
            ClientStream::Tcp(stream) => stream.shutdown(how),
            ClientStream::Unix(stream) => stream.shutdown(how),
            ClientStream::Memory(stream) => stream.shutdown(how),
        }
    }
}

impl Read for ClientStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            ClientStream::Tcp(stream) => stream.read(into),
            ClientStream::Unix(stream) => stream.read(into),
            ClientStream::Memory(stream) => stream.read(into),
        }
    }
}

impl Write for ClientStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            ClientStream::Tcp(stream) => stream.write(bytes),
            ClientStream::Unix(stream) => stream.write(bytes),
            ClientStream::Memory(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
