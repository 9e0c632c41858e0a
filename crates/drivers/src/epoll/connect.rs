//! Connecting.
//!
//! A connect that the kernel continues ends with an event. A connect to a Unix socket with a full
//! queue fails instead, and no event reports that there is room. It waits here, and is tried again
//! after growing pauses until it is stopped.

use std::time::Duration;

use ringserve_core::{Address, Completion, ConnId};
use socket2::{SockAddr, Socket};

use super::Epoll;
use crate::shared::connect::{errno, to_kernel};
use crate::shared::wait;

/// The first and the longest pause before a connect to a full queue is tried again. Each is twice
/// as long as the one before.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(64));

/// A connect that waits for a place in the queue of a Unix socket.
pub(super) struct QueuedConnect {
    id: ConnId,
    to: SockAddr,
    pause: Duration,
    /// Time of the next attempt, by the monotonic clock.
    due: Duration,
}

impl Epoll {
    pub(super) fn connect(&mut self, id: ConnId, address: &Address) {
        assert!(id.slot() < self.connections_max, "slot {} is beyond connections_max", id.slot());
        let is_unix = matches!(address, Address::Unix(_));
        let (socket, to, result) = match self.begin_connect(address) {
            Ok((socket, to, result)) => (Some(socket), Some(to), result),
            Err(errno) => (None, None, Err(errno)),
        };
        let Some(port) = self.ports.open(id, socket, is_unix) else { return Self::unknown(id, "connect") };
        let has_no_place = is_unix && result == Err(libc::EAGAIN);
        port.connecting = has_no_place || result == Err(libc::EINPROGRESS);
        if let Some(to) = to.filter(|_| has_no_place) {
            let (pause, due) = (PAUSES.0, wait::now() + PAUSES.0);
            return self.waiting.push(QueuedConnect { id, to, pause, due });
        }
        if port.connecting {
            port.writable = false;
        } else {
            self.ready.push_back(Completion::Connected { id, result });
        }
        self.register(id);
    }

    fn begin_connect(&mut self, address: &Address) -> Result<(Socket, SockAddr, Result<(), i32>), i32> {
        let to = to_kernel(address)?;
        self.stats.calls += 3;
        let socket = self.before_connect.open_socket(address)?;
        socket.set_nonblocking(true).map_err(|error| errno(&error))?;
        let result = socket.connect(&to).map_err(|error| errno(&error));
        Ok((socket, to, result))
    }

    /// Retries connects that wait for a place in a queue, each when it is due.
    #[cold]
    pub(super) fn connect_again(&mut self) {
        let (now, mut waiting) = (wait::now(), std::mem::take(&mut self.waiting));
        waiting.retain_mut(|one| one.due > now || self.has_no_place(one, now));
        self.waiting = waiting;
    }

    /// Retries a connect. True if it has to keep waiting.
    fn has_no_place(
        &mut self,
        QueuedConnect { id, to, pause, due }: &mut QueuedConnect,
        now: Duration,
    ) -> bool {
        let Some(port) = self.ports.find(*id).filter(|port| port.connecting) else { return false };
        let Some(socket) = &port.socket else { return false };
        self.stats.calls += 1;
        let result = socket.connect(to).map_err(|error| errno(&error));
        if result == Err(libc::EAGAIN) {
            *pause = (*pause * 2).min(PAUSES.1);
            *due = now + *pause;
            return true;
        }
        port.connecting = false;
        self.ready.push_back(Completion::Connected { id: *id, result });
        self.register(*id);
        false
    }

    /// Time until the next connect is tried again.
    #[inline]
    pub(super) fn connect_in(&self) -> Option<Duration> {
        let due = self.waiting.iter().map(|one| one.due).min()?;
        Some(due.saturating_sub(wait::now()))
    }

    pub(super) fn connect_stop(&mut self, id: ConnId) {
        let Some(port) = self.ports.find(id) else { return Self::unknown(id, "stop of a connect") };
        if std::mem::replace(&mut port.connecting, false) {
            self.waiting.retain(|one| one.id != id);
            self.ready.push_back(Completion::Connected { id, result: Err(libc::ECANCELED) });
        }
    }

    /// Handles an event of a socket whose connect is in flight.
    #[cold]
    pub(super) fn on_connected(&mut self, slot: u32) {
        let Some(port) = self.ports.at(slot) else { return };
        let (id, Some(socket)) = (port.id(), &port.socket) else { return };
        self.stats.calls += 1;
        let result = match socket.take_error() {
            Ok(None) => Ok(()),
            Ok(Some(error)) | Err(error) => Err(errno(&error)),
        };
        port.connecting = false;
        self.ready.push_back(Completion::Connected { id, result });
    }
}
