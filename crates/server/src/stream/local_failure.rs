//! Failures to connect that say nothing of the other side.

use std::io::{self, ErrorKind};

/// True if an attempt to connect, or a connection to an upstream, failed for want of something of
/// this process or host: descriptors, ports, memory, a place among
/// [`ServerLimits::upstreams_max`](crate::limits::ServerLimits::upstreams_max), a thread for a
/// look-up, or since the server ends. It says nothing of the upstream, so health checks and counts
/// of failures leave it out.
///
/// An upstream that is named, and at which several addresses were tried, is judged by the last one.
///
/// ```
/// use std::io::{Error, ErrorKind};
///
/// use ringserve::net::is_local_failure;
///
/// assert!(is_local_failure(&ErrorKind::AddrNotAvailable.into())); // no port is left
/// assert!(!is_local_failure(&ErrorKind::ConnectionRefused.into()));
/// ```
pub fn is_local_failure(error: &io::Error) -> bool {
    // Not `EAGAIN`: that is a Unix socket of the other side with a full queue.
    const OURS: [i32; 6] =
        [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM, libc::EADDRNOTAVAIL, libc::EADDRINUSE];
    if let Some(errno) = error.raw_os_error() {
        return OURS.contains(&errno);
    }
    use ErrorKind::{AddrInUse, AddrNotAvailable, ConnectionAborted, OutOfMemory, ResourceBusy};
    matches!(error.kind(), AddrInUse | AddrNotAvailable | ConnectionAborted | OutOfMemory | ResourceBusy)
        || error.get_ref().and_then(|inner| inner.source()?.downcast_ref()).is_some_and(is_local_failure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_this_host_are_told_from_those_of_others() {
        for errno in [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM, libc::EADDRNOTAVAIL] {
            assert!(is_local_failure(&io::Error::from_raw_os_error(errno)), "{errno}");
        }
        for errno in [libc::ECONNREFUSED, libc::ETIMEDOUT, libc::EHOSTUNREACH, libc::ECONNRESET, libc::EAGAIN]
        {
            assert!(!is_local_failure(&io::Error::from_raw_os_error(errno)), "{errno}");
        }
        for (kind, is_ours) in [
            (ErrorKind::ResourceBusy, true),
            (ErrorKind::OutOfMemory, true),
            (ErrorKind::TimedOut, false),
            (ErrorKind::NotFound, false),
            (ErrorKind::InvalidData, false),
            (ErrorKind::UnexpectedEof, false),
        ] {
            assert_eq!(is_local_failure(&io::Error::new(kind, "why")), is_ours, "{kind}");
        }
    }
}
