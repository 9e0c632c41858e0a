//! Connecting.

use ringserve_core::{Address, Completion, ConnId};

use super::kernel::{Kernel, RawCqe, RawOp};
use super::table::Life;
use super::{Sink, Uring};

impl<K: Kernel> Uring<K> {
    pub(super) fn connect(&mut self, id: ConnId, address: Box<Address>) {
        assert!(id.slot() < self.connections_max, "slot {} is beyond connections_max", id.slot());
        if !self.ports.open(id) {
            return Self::unknown(id, "connect");
        }
        self.stats.calls += 1;
        match self.kernel.open_socket(&address) {
            Ok(fd) => {
                if let Some(port) = self.ports.find(id) {
                    port.life = Life::Connecting;
                }
                self.queue.push(RawOp::Install { id, fd });
                self.queue.push(RawOp::Connect { id, address });
            }
            // The slot stays empty until it is closed.
            Err(errno) => self.ready.push_back(Completion::Connected { id, result: Err(errno) }),
        }
    }

    pub(super) fn connect_stop(&mut self, id: ConnId) {
        match self.ports.find(id) {
            Some(port) if port.life == Life::Connecting => {
                port.life = Life::StopsConnecting;
                self.queue.push(RawOp::CancelConnect { id });
            }
            Some(_) => {}
            None => Self::unknown(id, "stop of a connect"),
        }
    }

    /// Prepares the cancel of a connect, which is pointless once the connect ended.
    pub(super) fn prepare_cancel_connect(&mut self, id: ConnId) -> Option<RawOp> {
        let port = self.ports.find(id)?;
        (port.life == Life::StopsConnecting).then_some(RawOp::CancelConnect { id })
    }

    pub(super) fn on_connect(&mut self, cqe: RawCqe, sink: &mut Sink<'_>) {
        let id = cqe.id();
        let connects = |life| matches!(life, Life::Connecting | Life::StopsConnecting);
        let Some(port) = self.ports.find(id).filter(|port| connects(port.life)) else {
            return self.stale(cqe);
        };
        port.life = Life::Open;
        let result = if cqe.res < 0 { Err(-cqe.res) } else { Ok(()) };
        self.emit(Completion::Connected { id, result }, sink);
    }
}
