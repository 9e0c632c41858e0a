//! Shutting down and closing.

use ringserve_core::{CloseHow, Completion, ConnId};

use super::kernel::{Kernel, RawCqe, RawOp};
use super::table::{Life, Port, ReceiveState, SendState};
use super::{Sink, Uring};

impl<K: Kernel> Uring<K> {
    pub(super) fn shutdown(&mut self, id: ConnId) {
        match self.ports.find(id) {
            Some(port) if port.life == Life::Open => {
                port.life = Life::ShutsDown;
                self.queue.push(RawOp::Shutdown { id });
            }
            _ => Self::unknown(id, "shutdown"),
        }
    }

    /// Prepares the shutdown of the input, which is pointless once the receive ended.
    pub(super) fn prepare_shutdown_input(&mut self, id: ConnId) -> Option<RawOp> {
        let port = self.ports.find(id)?;
        match (port.receiving, port.life) {
            (ReceiveState::No, Life::EndsInput) => port.life = Life::Open,
            (ReceiveState::No, Life::Clears(how)) => {
                port.life = Life::Open;
                self.close(id, how);
            }
            _ => return Some(RawOp::ShutdownInput { id }),
        }
        None
    }

    pub(super) fn on_shutdown(&mut self, cqe: RawCqe, sink: &mut Sink<'_>) {
        let id = cqe.id();
        match self.ports.find(id) {
            Some(port) if port.life == Life::ShutsDown => {
                port.life = Life::Open;
                self.emit(Completion::ShutDown { id }, sink);
            }
            Some(port) if port.life == Life::EndsInput => {
                port.life = Life::Open;
                if port.receiving == ReceiveState::Armed {
                    // Its end is on the way, or the kernel no longer has it.
                    self.cancel_receive_later(id);
                }
            }
            Some(port) if port.is_clearing() => {
                port.receive_cancels = port.receive_cancels.saturating_add(1);
                self.queue.push(RawOp::CancelReceive { id });
            }
            Some(Port { life: life @ Life::Clears(_), .. }) => {
                if let Life::Clears(how) = std::mem::replace(life, Life::Open) {
                    self.close(id, how);
                }
            }
            _ => self.stale(cqe),
        }
    }

    pub(super) fn close(&mut self, id: ConnId, how: CloseHow) {
        let Some(port) = self.ports.find(id) else { return Self::unknown(id, "close") };
        if port.receiving == ReceiveState::Doubtful
            && port.life == Life::Open
            && port.sending == SendState::No
        {
            return self.clear(id, how);
        }
        if port.life == Life::EndsInput {
            // The end of the shutdown comes first.
            port.life = Life::Clears(how);
            return;
        }
        let idle = port.receiving == ReceiveState::No && port.sending == SendState::No;
        debug_assert!(idle && port.life == Life::Open, "close of {id} with an operation in flight: {port:?}");
        port.life = Life::Closes;
        self.queue.push(RawOp::Close { id, how });
    }

    /// Makes sure that the kernel has no receive of this connection: it would hold the socket, and
    /// its bytes would be attributed to the slot's next connection. Shutting the input down ends a
    /// receive that lives, with a completion before that of the shutdown: so a later cancel that
    /// finds none is right. The peer notices nothing.
    #[cold]
    fn clear(&mut self, id: ConnId, how: CloseHow) {
        if let Some(port) = self.ports.find(id) {
            port.life = Life::Clears(how);
            self.queue.push(RawOp::ShutdownInput { id });
        }
    }

    /// Handles the answer to a cancel after the input was shut down.
    #[cold]
    pub(super) fn on_cleared(&mut self, id: ConnId, res: i32) {
        let Some(port) = self.ports.find(id) else { return };
        let Life::Clears(how) = port.life else { return };
        if port.receive_cancels > 0 {
            // This answer belongs to an earlier cancel.
            return;
        }
        if res == -libc::ENOENT {
            (port.receiving, port.life) = (ReceiveState::No, Life::Open);
            return self.close(id, how);
        }
        port.receive_cancels += 1;
        self.cancel_again(RawOp::CancelReceive { id });
    }

    /// Handles the end of a close. An error means that the slot was empty: the socket could not be
    /// installed in it.
    pub(super) fn on_close(&mut self, cqe: RawCqe, sink: &mut Sink<'_>) {
        let id = cqe.id();
        if !self.ports.find(id).is_some_and(|port| port.life == Life::Closes) {
            return self.stale(cqe);
        }
        self.ports.close(id);
        self.take_failed(id);
        self.emit(Completion::Closed { id }, sink);
    }
}
