//! Shutting down and closing.

use ringserve_core::{CloseHow, Completion, ConnId};

use super::table::{Life, Receiving, Sending};
use super::{Sink, Uring};
use crate::seam::{Kernel, RawCqe, RawOp};

impl<K: Kernel> Uring<K> {
    pub(super) fn shutdown(&mut self, id: ConnId) {
        match self.ports.find(id) {
            Some(port) if port.life == Life::Open => {
                port.life = Life::ShutsDown;
                self.queue.push_back(RawOp::Shutdown { id });
            }
            _ => Self::unknown(id, "shutdown"),
        }
    }

    pub(super) fn on_shutdown(&mut self, cqe: RawCqe, sink: &mut Sink<'_>) {
        let id = cqe.id();
        let Some(port) = self.ports.find(id).filter(|port| port.life == Life::ShutsDown) else {
            return self.stale(cqe);
        };
        port.life = Life::Open;
        sink.push(Completion::ShutDown { id });
    }

    pub(super) fn close(&mut self, id: ConnId, how: CloseHow) {
        let Some(port) = self.ports.find(id) else { return Self::unknown(id, "close") };
        let idle = port.receiving == Receiving::No && port.sending == Sending::No;
        debug_assert!(idle && port.life == Life::Open, "close of {id} with an operation in flight: {port:?}");
        port.life = Life::Closes;
        self.queue.push_back(RawOp::Close { id, how });
    }

    /// An error says that the slot was empty already: the socket could not be installed in it.
    pub(super) fn on_close(&mut self, cqe: RawCqe, sink: &mut Sink<'_>) {
        let id = cqe.id();
        if !self.ports.find(id).is_some_and(|port| port.life == Life::Closes) {
            return self.stale(cqe);
        }
        self.ports.close(id);
        sink.push(Completion::Closed { id });
    }
}
