//! Shutting down and closing.

use std::net::Shutdown;
use std::time::Duration;

use ringserve_core::{CloseHow, Completion, ConnId};

use super::Epoll;
use crate::shared::report::log;

impl Epoll {
    pub(super) fn shutdown(&mut self, id: ConnId) {
        let Some(port) = self.ports.find(id) else { return Self::unknown(id, "shutdown") };
        if let Some(socket) = &port.socket {
            self.stats.calls += 1;
            // Fails only if the connection is gone, which counts as done.
            if let Err(error) = socket.shutdown(Shutdown::Write) {
                log::trace!(%id, %error, "shutdown of a connection that is gone");
            }
        }
        self.ready.push_back(Completion::ShutDown { id });
    }

    /// Closing takes the socket out of the epoll too, since no other descriptor refers to it.
    pub(super) fn close(&mut self, id: ConnId, how: CloseHow) {
        let Some(port) = self.ports.find(id) else { return Self::unknown(id, "close") };
        let idle = !port.receiving && port.batch.is_none();
        debug_assert!(idle, "close of {id} with an operation in flight: {port:?}");
        if let Some(socket) = port.socket.take() {
            if how == CloseHow::Abort {
                self.stats.calls += 1;
                if let Err(error) = socket.set_linger(Some(Duration::ZERO)) {
                    log::debug!(%id, %error, "a connection closes with FIN instead of RST");
                }
            }
            self.stats.calls += 1;
            drop(socket);
        }
        self.ports.close(id.slot());
        self.ready.push_back(Completion::Closed { id });
    }
}
