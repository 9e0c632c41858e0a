//! Listening sockets that the program was handed: checks, and preparation.

use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd};

use ringserve_core::Address;
use ringserve_drivers::Listener;
use rustix::fs::fstat;
use socket2::{Domain, SockAddr, Socket, Type};

use crate::socket_options::apply::Warnings;
use crate::socket_options::check::SocketOptionError;
use crate::socket_options::options::SocketOptions;

/// A socket that listens, and that others may accept from as well.
#[derive(Debug)]
pub(crate) struct Adopted {
    socket: Socket,
    /// The same for each of its duplicates, and for no other socket while it is open.
    pub(super) inode: u64,
}

impl Adopted {
    /// Looks at a socket, and where it listens.
    ///
    /// # Errors
    /// If no server can accept from it; the text says why.
    pub(super) fn look_at(descriptor: OwnedFd) -> io::Result<(Address, Adopted)> {
        let number = descriptor.as_raw_fd();
        let socket = Socket::from(descriptor);
        let wrong = |text: String| {
            Err(io::Error::new(
                ErrorKind::InvalidInput,
                format!("descriptor {number} was adopted, but {text}"),
            ))
        };
        let (domain, kind) = match (socket.domain(), socket.r#type()) {
            (Ok(domain), Ok(kind)) => (domain, kind),
            (Err(error), _) | (_, Err(error)) if error.kind() == ErrorKind::Unsupported => {
                return wrong(format!("its kind cannot be read: {error}; allow getsockopt in the sandbox"));
            }
            (Err(error), _) | (_, Err(error)) => {
                return wrong(format!("it is no socket ({error}): adopt a TCP or Unix socket that listens"));
            }
        };
        if ![Domain::IPV4, Domain::IPV6, Domain::UNIX].contains(&domain) {
            let family = i32::from(domain);
            return wrong(format!("its address family is {family}: adopt a TCP or Unix socket that listens"));
        }
        if kind != Type::STREAM {
            let kind = match kind {
                Type::DGRAM => "of datagrams",
                Type::SEQPACKET => "of packets in sequence",
                _ => "of another kind",
            };
            return wrong(format!("it is a socket {kind} and not of a stream: adopt one of SOCK_STREAM"));
        }
        if !socket.is_listener()? {
            return wrong(
                "it does not listen: call listen(2) on it before, or set Accept=no in its systemd socket unit".to_owned(),
            );
        }
        let Some(addr) = address_of(&socket.local_addr()?) else {
            return wrong("it has no address".to_owned());
        };
        let inode = fstat(&socket)?.st_ino;
        Ok((addr, Adopted { socket, inode }))
    }

    /// A descriptor for each shard.
    ///
    /// # Errors
    /// If there are no descriptors left.
    pub(super) fn for_shards(&self, by_shard: &mut [Vec<Listener>]) -> io::Result<()> {
        // Others may take a connection that a shard was woken for.
        self.socket.set_nonblocking(true)?;
        for shard in by_shard {
            shard.push(Listener::adopted(self.socket.try_clone()?));
        }
        Ok(())
    }

    /// Sets the options that connections inherit. The listener's own options stay as its owner
    /// wants them.
    pub(super) fn set(
        &self,
        options: &SocketOptions,
        addr: &Address,
        warnings: &mut Warnings,
    ) -> Result<(), SocketOptionError> {
        options.warn_of_adopted(addr, warnings);
        match addr {
            Address::Ip(_) => options.set_on_adopted(&self.socket, warnings),
            _ => {
                options.warn_of_unix(warnings);
                Ok(())
            }
        }
    }
}

fn address_of(addr: &SockAddr) -> Option<Address> {
    if let Some(ip) = addr.as_socket() {
        return Some(Address::Ip(ip));
    }
    if let Some(name) = addr.as_abstract_namespace() {
        return Some(Address::Unix([b"\0", name].concat().into()));
    }
    let path = addr.as_pathname()?;
    Some(Address::Unix(std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str()).into()))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::os::unix::net::UnixListener;

    use super::*;

    #[track_caller]
    fn refused(descriptor: impl Into<OwnedFd>) -> String {
        let descriptor = descriptor.into();
        let name = format!("descriptor {} was adopted, but ", descriptor.as_raw_fd());
        let text = Adopted::look_at(descriptor).expect_err("it cannot be served").to_string();
        text.strip_prefix(&name).unwrap_or_else(|| panic!("{text}")).to_owned()
    }

    #[test]
    fn what_cannot_be_accepted_from_is_refused_with_its_reason() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(
            refused(file),
            "it is no socket (Socket operation on non-socket (os error 88)): adopt a TCP or Unix socket that listens"
        );
        let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
        assert_eq!(
            refused(datagrams),
            "it is a socket of datagrams and not of a stream: adopt one of SOCK_STREAM"
        );
        let packets = Socket::new(Domain::UNIX, Type::SEQPACKET, None).unwrap();
        assert!(refused(packets).starts_with("it is a socket of packets in sequence"));
        let netlink = Socket::new(Domain::from(libc_netlink()), Type::DGRAM, None).unwrap();
        assert!(refused(netlink).starts_with("its address family is 16"));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let text =
            "it does not listen: call listen(2) on it before, or set Accept=no in its systemd socket unit";
        assert_eq!(refused(client), text);
        assert_eq!(refused(Socket::new(Domain::IPV6, Type::STREAM, None).unwrap()), text);
    }

    /// `AF_NETLINK`.
    fn libc_netlink() -> i32 {
        i32::from(rustix::net::AddressFamily::NETLINK.as_raw())
    }

    #[test]
    fn address_of_an_adopted_socket_is_its_own() {
        let of = |descriptor: OwnedFd| Adopted::look_at(descriptor).unwrap().0;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        assert_eq!(of(listener.into()), Address::Ip(addr));
        let path = std::env::temp_dir().join(format!("ringserve-adopted-{}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(of(listener.into()), Address::unix(path.to_str().unwrap()));
        let name = format!("@ringserve-adopted-{}", std::process::id());
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        socket.bind(&SockAddr::unix(name.replacen('@', "\0", 1)).unwrap()).unwrap();
        socket.listen(1).unwrap();
        assert_eq!(of(socket.into()), Address::unix(&name));
    }
}
