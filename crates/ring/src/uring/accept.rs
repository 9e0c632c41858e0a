//! Accepting, and turning what was accepted into connections.

use ringserve_core::{AcceptEnd, Completion, ConnId, Socket};

use super::{Sink, Uring};
use crate::seam::{F_MORE, Kernel, RawCqe, RawOp};

/// A listener's accept.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Listening {
    /// True exactly while an accept is with the kernel, or queued for it.
    armed: bool,
    /// True exactly when it was told to stop and has not ended.
    stop: bool,
}

impl<K: Kernel> Uring<K> {
    pub(super) fn accept(&mut self, listener: u16) {
        let index = usize::from(listener);
        if self.listeners.len() <= index {
            self.listeners.resize(index + 1, Listening::default());
        }
        debug_assert!(!self.listeners[index].armed, "listener {listener} accepts already");
        self.listeners[index] = Listening { armed: true, stop: false };
        self.queue.push_back(RawOp::Accept { listener });
    }

    pub(super) fn accept_stop(&mut self, listener: u16) {
        if let Some(listening) = self.listeners.get_mut(usize::from(listener))
            && listening.armed
            && !listening.stop
        {
            listening.stop = true;
            self.queue.push_back(RawOp::CancelAccept { listener });
        }
    }

    pub(super) fn adopt(&mut self, id: ConnId, socket: Socket) {
        assert!(id.slot() < self.connections_max, "slot {} is beyond connections_max", id.slot());
        if !self.ports.open(id) {
            // Closing it is all that can be done without mixing up two connections.
            self.queue.push_back(RawOp::CloseFd { fd: socket.0 as i32 });
            return Self::unknown(id, "adopt");
        }
        self.queue.push_back(RawOp::Install { id, fd: socket.0 as i32 });
    }

    #[cold]
    pub(super) fn on_install_failed(&mut self, cqe: RawCqe) {
        tracing::warn!(id = %cqe.id(), errno = -cqe.res, "a socket could not enter the ring's file table");
        self.anomalies.installs_failed += 1;
    }

    pub(super) fn on_accept(&mut self, cqe: RawCqe, sink: &mut Sink<'_>) {
        let listener = cqe.user_data as u16;
        let index = usize::from(listener);
        if !self.listeners.get(index).is_some_and(|listening| listening.armed) {
            if cqe.res >= 0 {
                self.queue.push_back(RawOp::CloseFd { fd: cqe.res });
            }
            return self.stale(cqe);
        }
        if cqe.res >= 0 {
            self.stats.calls += 1;
            let peer = self.kernel.peer_of(cqe.res);
            sink.push(Completion::Accepted { listener, socket: Socket(cqe.res as u64), peer });
            if cqe.flags & F_MORE != 0 {
                return;
            }
        }
        self.anomalies.more_flag += u64::from(cqe.flags & F_MORE != 0);
        let end = match -cqe.res {
            // Ended by itself, or one connection was gone before it was accepted (accept(2) lists these).
            _ if cqe.res >= 0 => None,
            libc::ECONNABORTED | libc::EINTR | libc::EAGAIN | libc::EPROTO => None,
            libc::ENETDOWN | libc::ENETUNREACH | libc::EHOSTDOWN | libc::EHOSTUNREACH | libc::ENONET => None,
            libc::ECANCELED => None,
            libc::EMFILE => Some(AcceptEnd::Descriptors),
            libc::ENFILE => Some(AcceptEnd::SystemFiles),
            errno => Some(AcceptEnd::Error(errno)),
        };
        let end = end.or(self.listeners[index].stop.then_some(AcceptEnd::Stopped));
        match end {
            None => self.queue.push_back(RawOp::Accept { listener }),
            Some(end) => {
                self.listeners[index] = Listening::default();
                sink.push(Completion::AcceptEnded { listener, end });
            }
        }
    }
}
