//! A kernel filter of a listener: a program that sees each packet to it, and drops some before
//! there is a connection.

use std::io;
use std::sync::{Arc, Weak};

use socket2::{Domain, SockFilter};

use crate::shared::accept::{FilterState, Listener, ListeningSocket};

/// Sets the filter of one TCP listener, from any thread, until its driver closes it.
#[derive(Clone, Debug)]
pub struct ListenerFilter {
    /// Weak, since a descriptor here would keep the socket listening after its driver closed it.
    socket: Weak<ListeningSocket>,
    state: Arc<FilterState>,
}

impl ListenerFilter {
    /// Returns the filter of a listener. `None` if it is no TCP socket, or was adopted: its other
    /// owners accept what this filter would drop.
    pub fn of(listener: &Listener) -> Option<ListenerFilter> {
        let is_ip = matches!(listener.socket().domain(), Ok(Domain::IPV4 | Domain::IPV6));
        (is_ip && !listener.is_adopted()).then(|| ListenerFilter {
            socket: Arc::downgrade(listener.socket()),
            state: listener.filter().clone(),
        })
    }

    /// Replaces the current program; an empty one removes it. The kernel switches between two
    /// packets. Does nothing once the listener is closed, or about to be.
    ///
    /// # Errors
    /// The kernel's: `ENOMEM` for a program that is longer than `net.core.optmem_max` allows,
    /// `EINVAL` for one that it does not accept. The previous program stays.
    pub fn set(&self, program: &[SockFilter]) -> io::Result<()> {
        // Held for this call alone: if the listener's driver closes it meanwhile, the socket is
        // closed after the call.
        let Some(socket) = self.socket.upgrade() else { return Ok(()) };
        self.state.set(&socket, program)
    }
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::time::Duration;

    use super::*;

    const KEEP: SockFilter = SockFilter::new((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, u32::MAX);
    const ALL: [SockFilter; 1] = [KEEP];
    const NONE: [SockFilter; 1] = [SockFilter::new((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, 0)];

    fn is_reached(addr: SocketAddr) -> bool {
        TcpStream::connect_timeout(&addr, Duration::from_millis(200)).is_ok()
    }

    #[test]
    fn filter_is_set_replaced_and_taken_away() {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = socket.local_addr().unwrap();
        let listener = Listener::own(socket);
        let filter = ListenerFilter::of(&listener).unwrap();
        assert!(!listener.filter().is_inherited());
        filter.set(&[]).unwrap();
        filter.set(&NONE).unwrap();
        assert!(!is_reached(addr) && listener.filter().is_inherited());
        filter.set(&ALL).unwrap();
        assert!(is_reached(addr));
        filter.set(&NONE).unwrap();
        filter.set(&[]).unwrap();
        assert!(is_reached(addr) && listener.filter().is_inherited(), "what is queued may have it");
        drop(listener);
        filter.set(&NONE).unwrap();
        assert!(!is_reached(addr), "it is closed");
    }

    #[test]
    fn listener_that_closes_keeps_its_last_filter() {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = socket.local_addr().unwrap();
        let listener = Listener::own(socket);
        let filter = ListenerFilter::of(&listener).unwrap();
        listener.filter().close(listener.socket(), &NONE).unwrap();
        filter.set(&ALL).unwrap();
        filter.set(&[]).unwrap();
        assert!(!is_reached(addr));
    }

    #[test]
    fn program_that_the_kernel_refuses_leaves_the_one_before() {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = socket.local_addr().unwrap();
        let listener = Listener::own(socket);
        let filter = ListenerFilter::of(&listener).unwrap();
        filter.set(&NONE).unwrap();
        let jump = SockFilter::new((libc::BPF_JMP | libc::BPF_JA) as u16, 0, 0, 7);
        assert_eq!(filter.set(&[jump]).unwrap_err().raw_os_error(), Some(libc::EINVAL));
        assert!(filter.set(&[KEEP; 5000]).is_err());
        assert!(!is_reached(addr));
    }

    #[test]
    fn adopted_and_unix_listeners_have_no_filter() {
        let adopted = Listener::adopted(TcpListener::bind("127.0.0.1:0").unwrap());
        assert!(ListenerFilter::of(&adopted).is_none());
        let (unix, _) = socket2::Socket::pair(Domain::UNIX, socket2::Type::STREAM, None).unwrap();
        assert!(ListenerFilter::of(&Listener::own(unix)).is_none());
    }
}
