//! Taking a connection out of a listener's queue, also where `accept4` is refused.

use std::io;

use socket2::{SockAddr, Socket};

/// Takes a connection, which is close-on-exec, and does not block if it is to be `nonblocking`.
///
/// # Errors
/// Those of `accept(2)`.
pub(crate) fn accept(listener: &Socket, nonblocking: bool) -> io::Result<(Socket, SockAddr)> {
    let flags = libc::SOCK_CLOEXEC | if nonblocking { libc::SOCK_NONBLOCK } else { 0 };
    match listener.accept4(flags) {
        // Not in the kernel, or hidden by a sandbox.
        Err(error) if is_refused(&error) => {
            let (socket, peer) = listener.accept_raw()?;
            socket.set_cloexec(true)?;
            socket.set_nonblocking(nonblocking)?;
            Ok((socket, peer))
        }
        accepted => accepted,
    }
}

/// True if an error is that of a system call that is filtered, or not there.
pub(crate) fn is_refused(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM | libc::EACCES))
}
