//! Socket options for which the other crates of the workspace have no safe call.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use ringserve_core::PeerCredentials;

/// An option of a TCP socket whose value is one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpOption {
    /// `TCP_FASTOPEN`, of a listener: the most connections that may wait for the end of their
    /// handshake after their first packet brought data.
    FastOpen,
    /// `TCP_DEFER_ACCEPT`, of a listener: seconds for which a connection without data is not
    /// accepted.
    DeferAccept,
}

impl TcpOption {
    fn name(self) -> libc::c_int {
        match self {
            TcpOption::FastOpen => libc::TCP_FASTOPEN,
            TcpOption::DeferAccept => libc::TCP_DEFER_ACCEPT,
        }
    }

    /// Sets the option.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set(self, socket: impl AsFd, value: u32) -> io::Result<()> {
        let fd = socket.as_fd();
        let value = libc::c_int::try_from(value).map_err(|_| io::ErrorKind::InvalidInput)?;
        let len = size_of_val(&value) as libc::socklen_t;
        // SAFETY: the pointer is to a value of `len` bytes that lives until the call returns, which
        // is all the kernel reads; the descriptor is borrowed, so it is open.
        let set = unsafe {
            libc::setsockopt(fd.as_raw_fd(), libc::IPPROTO_TCP, self.name(), (&raw const value).cast(), len)
        };
        if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Reads the option.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn get(self, socket: impl AsFd) -> io::Result<u32> {
        let value: libc::c_int = get(socket, libc::IPPROTO_TCP, self.name())?;
        Ok(value.unsigned_abs())
    }
}

/// The process at the other end of a connected Unix socket (`SO_PEERCRED`); for a client, the one
/// that listens. `None` if there is none, or it cannot be seen from this process namespace.
pub fn peer_process(socket: impl AsFd) -> Option<u32> {
    // The fields of `struct ucred`; 0 for a process that cannot be seen.
    let [pid, _user, _group]: [u32; 3] = get(socket, libc::SOL_SOCKET, libc::SO_PEERCRED).ok()?;
    (pid != 0).then_some(pid)
}

/// The process at the other end of a connected Unix socket, which connected or listens. `None` for
/// a socket of another kind.
pub fn peer_credentials(socket: impl AsFd) -> Option<PeerCredentials> {
    // A socket without a process at its other end has 0 for the process, and -1 for user and group.
    let [pid, uid, gid]: [u32; 3] = get(socket, libc::SOL_SOCKET, libc::SO_PEERCRED).ok()?;
    (uid != u32::MAX || gid != u32::MAX).then_some(PeerCredentials {
        pid: (pid != 0).then_some(pid),
        uid,
        gid,
    })
}

/// A value to which the kernel may write any bytes.
pub(crate) trait Plain: Copy + Default {}
impl Plain for libc::c_int {}
impl<const N: usize> Plain for [u32; N] where [u32; N]: Default {}

/// Reads an option.
///
/// # Errors
/// The kernel's error.
pub(crate) fn get<T: Plain>(socket: impl AsFd, level: libc::c_int, name: libc::c_int) -> io::Result<T> {
    let fd = socket.as_fd();
    let mut value = T::default();
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the first pointer is to a value of `len` bytes, which is all the kernel writes there,
    // and of which any are a value (`Plain`); the second one is to `len`. Both live until the call
    // returns; the descriptor is borrowed, so it is open.
    let got = unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, (&raw mut value).cast(), &raw mut len) };
    if got == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::{Domain, Socket, Type};

    #[test]
    fn what_is_set_is_read() {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        for (option, value) in [(TcpOption::FastOpen, 17), (TcpOption::DeferAccept, 7)] {
            assert_eq!(option.get(&socket).unwrap(), 0);
            option.set(&socket, value).unwrap();
            assert_eq!(option.get(&socket).unwrap(), value);
        }
    }

    #[test]
    fn the_process_at_the_other_end_is_named() {
        let (one, _other) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        assert_eq!(peer_process(&one), Some(std::process::id()));
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let credentials = PeerCredentials { pid: Some(std::process::id()), uid, gid };
        assert_eq!(peer_credentials(&one), Some(credentials));
        assert_eq!(peer_credentials(Socket::new(Domain::IPV4, Type::STREAM, None).unwrap()), None);
        assert_eq!(peer_process(Socket::new(Domain::UNIX, Type::STREAM, None).unwrap()), None);
        assert_eq!(peer_process(Socket::new(Domain::IPV4, Type::STREAM, None).unwrap()), None);
    }

    #[test]
    fn a_socket_of_another_kind_and_a_number_too_large_are_errors() {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        assert!(TcpOption::FastOpen.set(&socket, 1).is_err() && TcpOption::FastOpen.get(&socket).is_err());
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        assert!(TcpOption::DeferAccept.set(&socket, u32::MAX).is_err());
    }
}
