//! Sending: what fits at once, then the rest.
//!
//! A send is first tried without waiting, which completes within the enter that submits it. Only
//! the rest that did not fit is sent again, with the kernel waiting for room until all of it left.

use ringserve_core::{Batch, Completion, ConnId, SendEnd};

use super::kernel::{Kernel, Kind, RawCqe, RawOp, SendMode};
use super::table::SendState;
use super::{Sink, Uring};

impl<K: Kernel> Uring<K> {
    #[inline(always)]
    pub(super) fn send(&mut self, id: ConnId, batch: Box<Batch>) {
        match self.ports.find(id) {
            Some(port) if port.sending == SendState::No && !batch.is_empty() => {
                port.sending = SendState::Submitted;
                self.queue.push(RawOp::Send { id, batch, mode: SendMode::Try });
            }
            _ => self.send_nothing(id, batch),
        }
    }

    #[cold]
    fn send_nothing(&mut self, id: ConnId, batch: Box<Batch>) {
        match self.ports.find(id) {
            Some(port) if port.sending == SendState::No => {
                self.ready.push_back(Completion::Sent { id, batch, end: SendEnd::Done });
            }
            _ => {
                self.ready.push_back(Completion::Sent { id, batch, end: SendEnd::Error(libc::EBADF) });
                Self::unknown(id, "send");
            }
        }
    }

    pub(super) fn send_stop(&mut self, id: ConnId) {
        let Some(port) = self.ports.find(id) else { return Self::unknown(id, "stop of a send") };
        if port.sending != SendState::No && !port.send_stop {
            (port.send_stop, self.stops_sends) = (true, true);
            self.queue.push(RawOp::CancelSend { id });
        }
    }

    /// The mode in which a send is first tried.
    #[inline]
    pub(super) fn first_mode(&self) -> SendMode {
        if self.quiet { SendMode::TryQuietly } else { SendMode::Try }
    }

    /// Passes the send to the kernel now, unless it was stopped before.
    #[cold]
    pub(super) fn prepare_send(&mut self, id: ConnId, batch: Box<Batch>, mode: SendMode) -> Option<RawOp> {
        let Some(port) = self.ports.find(id) else {
            self.ready.push_back(Completion::Sent { id, batch, end: SendEnd::Error(libc::EBADF) });
            return None;
        };
        if port.send_stop {
            (port.sending, port.send_stop) = (SendState::No, false);
            self.ready.push_back(Completion::Sent { id, batch, end: SendEnd::Stopped });
            return None;
        }
        port.sending = SendState::Submitted;
        let mode = if mode == SendMode::All { mode } else { self.first_mode() };
        Some(RawOp::Send { id, batch, mode })
    }

    /// Prepares the cancel of a send, which is pointless once the send ended, and wrong once there
    /// is a new one.
    pub(super) fn prepare_cancel_send(&mut self, id: ConnId) -> Option<RawOp> {
        let port = self.ports.find(id)?;
        (port.sending == SendState::Submitted && port.send_stop).then_some(RawOp::CancelSend { id })
    }

    #[inline]
    pub(super) fn on_send(&mut self, mut cqe: RawCqe, sink: &mut Sink<'_>) {
        let Some(batch) = cqe.batch.take() else { return self.stale(cqe) };
        self.sent(cqe.id(), cqe.res, batch, sink);
    }

    /// Handles the end of a send: with `res` bytes sent, or a negative `errno`.
    #[inline(always)]
    pub(super) fn sent(&mut self, id: ConnId, res: i32, mut batch: Box<Batch>, sink: &mut Sink<'_>) {
        let Some(port) = self.ports.find(id).filter(|port| port.sending == SendState::Submitted) else {
            return self.stale(RawCqe::new(Kind::Send.with(id.bits()), res, 0));
        };
        if res > 0 {
            batch.advance(res as usize);
        }
        if !batch.is_empty() {
            return self.sent_in_part(id, res, batch, sink);
        }
        (port.sending, port.send_stop) = (SendState::No, false);
        sink.push_first(Completion::Sent { id, batch, end: SendEnd::Done });
    }

    /// Handles a send that left bytes unsent.
    #[cold]
    fn sent_in_part(&mut self, id: ConnId, res: i32, batch: Box<Batch>, sink: &mut Sink<'_>) {
        let Some(port) = self.ports.find(id) else { return };
        let end = match -res {
            0 => SendEnd::Error(libc::EPIPE),
            _ if res > 0 && !port.send_stop => return self.send_rest(id, batch),
            libc::EAGAIN | libc::EINTR | libc::ENOBUFS if !port.send_stop => {
                return self.send_rest(id, batch);
            }
            libc::EAGAIN | libc::EINTR | libc::ENOBUFS | libc::ECANCELED if port.send_stop => {
                SendEnd::Stopped
            }
            _ if res > 0 => SendEnd::Stopped,
            errno => SendEnd::Error(errno),
        };
        (port.sending, port.send_stop) = (SendState::No, false);
        self.emit(Completion::Sent { id, batch, end }, sink);
    }

    fn send_rest(&mut self, id: ConnId, batch: Box<Batch>) {
        if let Some(port) = self.ports.find(id) {
            port.sending = SendState::Rests;
        }
        self.stats.sends_short += 1;
        self.queue.push(RawOp::Send { id, batch, mode: SendMode::All });
    }
}
