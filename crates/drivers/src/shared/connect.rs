//! Sockets for outgoing connections.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use ringserve_core::Address;
use socket2::{Domain, SockAddr, Socket, Type};

type SetUp = dyn Fn(BorrowedFd<'_>, &Address) -> io::Result<()> + Send + Sync;

/// Prepares a socket before it connects, such as by setting options.
#[derive(Clone, Default)]
pub struct BeforeConnect(Option<Arc<SetUp>>);

impl BeforeConnect {
    /// Calls `set_up` with each socket. If that fails, so does the connect.
    pub fn new(
        set_up: impl Fn(BorrowedFd<'_>, &Address) -> io::Result<()> + Send + Sync + 'static,
    ) -> BeforeConnect {
        BeforeConnect(Some(Arc::new(set_up)))
    }

    /// Opens a blocking, close-on-exec socket.
    pub(crate) fn open_socket(&self, address: &Address) -> Result<Socket, i32> {
        let domain = match address {
            Address::Ip(addr) => Domain::for_address(*addr),
            _ => Domain::UNIX,
        };
        let socket = Socket::new(domain, Type::STREAM, None).map_err(|error| errno(&error))?;
        if let Some(set_up) = &self.0 {
            set_up(socket.as_fd(), address).map_err(|error| errno(&error))?;
        }
        Ok(socket)
    }
}

impl fmt::Debug for BeforeConnect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "BeforeConnect(..)" } else { "BeforeConnect" })
    }
}

/// Converts the address for the kernel. A path that is too long is `ENAMETOOLONG`.
pub(crate) fn to_kernel(address: &Address) -> Result<SockAddr, i32> {
    match address {
        Address::Ip(addr) => Ok(SockAddr::from(*addr)),
        Address::Unix(path) => {
            use std::os::unix::ffi::OsStrExt;
            SockAddr::unix(std::ffi::OsStr::from_bytes(path)).map_err(|_| libc::ENAMETOOLONG)
        }
        _ => Err(libc::EAFNOSUPPORT),
    }
}

pub(crate) fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}
