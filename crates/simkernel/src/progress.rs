//! Readiness: connections to accept, bytes to receive, room to send.

use ringserve_core::ConnId;
use ringserve_drivers::kernel::{F_MORE, Kind, RawCqe};

use crate::adversary::HostileEvent;
use crate::connection::{Connection, File, Side};
use crate::faults::{Fault, Injector};
use crate::kernel::SimKernel;
use crate::ring::{Cancels, Operation, Ring, SendProgress, find};
use crate::state::State;

/// Completions of one receive in a row, as in Linux: then it is the others' turn.
const IN_A_ROW: usize = 32;

impl SimKernel {
    /// Posts everything that is ready.
    pub(crate) fn progress(&mut self, state: &mut State) {
        let Ring { receives, sends, .. } = &mut self.ring;
        if !receives.is_empty() && self.faults.strike(Fault::Reorder) {
            let first = self.faults.below(receives.len());
            receives.rotate_left(first);
        }
        if !sends.is_empty() && self.faults.strike(Fault::Reorder) {
            let first = self.faults.below(sends.len());
            sends.rotate_left(first);
        }
        if self.faults.is_opposed() {
            self.end_cancelled(state);
        }
        self.connect(state);
        for listener in 0..self.listeners.len() {
            self.accept(listener as u16, state);
        }
        // Backwards, so that an ended send moves only those that were checked.
        for index in (0..self.ring.sends.len()).rev() {
            self.send_rest(index, state);
        }
        // In the order in which they were armed, so that none is always the last to find a buffer.
        let mut index = 0;
        while let Some(receive) = self.ring.receives.get(index) {
            index += usize::from(if receive.of { self.receive(index, state) } else { self.wait_on(index) });
        }
        self.left_over |= self.faults.is_opposed() && self.ring.is_ending_something();
    }

    /// Handles a receive without input. True if it is still armed.
    fn wait_on(&mut self, index: usize) -> bool {
        if !self.ring.buffers.is_empty() || !self.faults.is_opposed() {
            return true;
        }
        let id = self.ring.receives[index].id;
        if self.ring.block_of(id).is_some() || !self.faults.meets(HostileEvent::NoBufferEarly) {
            return true;
        }
        self.end_receive(id, libc::ENOBUFS)
    }

    /// Ends operations that had to end by themselves after their cancel.
    fn end_cancelled(&mut self, state: &mut State) {
        if !self.ring.is_ending_something() {
            return;
        }
        for listener in 0..self.listeners.len() {
            if self.ring.accepts[listener].as_mut().is_some_and(Cancels::check) {
                self.cancel_accept(listener as u16, state);
            }
        }
        let ended = |cancels: &mut Cancels, id| cancels.check().then_some(id);
        let connects = self.ring.connects.iter_mut();
        let connects: Vec<ConnId> = connects.filter_map(|of| ended(&mut of.cancels, of.id)).collect();
        connects.into_iter().for_each(|id| self.cancel_connect(id));
        let sends = self.ring.sends.iter_mut();
        let sends: Vec<ConnId> = sends.filter_map(|of| ended(&mut of.cancels, of.id)).collect();
        sends.into_iter().for_each(|id| self.end_send(id, libc::ECANCELED));
        let receives = self.ring.receives.iter_mut();
        let receives: Vec<ConnId> = receives.filter_map(|of| ended(&mut of.cancels, of.id)).collect();
        for id in receives {
            self.end_receive(id, libc::ECANCELED);
        }
    }

    /// Makes connections, each as soon as there is a place in the backlog.
    fn connect(&mut self, state: &mut State) {
        let mut index = 0;
        while let Some(Operation { id, file, of: addr, .. }) = self.ring.connects.get(index) {
            let (id, file, addr) = (*id, *file, *addr);
            let delayed = self.faults.strike(Fault::Delay);
            let made = if delayed { Err(libc::EAGAIN) } else { state.connect_ring(self.number, addr) };
            let res = match made {
                Err(libc::EAGAIN) => {
                    self.left_over |= delayed;
                    index += 1;
                    continue;
                }
                Err(errno) => -errno,
                Ok(connection) => {
                    self.ring.files.take(id);
                    self.ring.files.install(id, File { connection, ..file });
                    0
                }
            };
            self.ring.connects.remove(index);
            self.post(RawCqe::new(Kind::Connect.with(id.bits()), res, 0));
        }
    }

    fn accept(&mut self, index: u16, state: &mut State) {
        let listener = self.listeners[usize::from(index)];
        if self.ring.accepts[usize::from(index)].is_none() {
            return;
        }
        let is_shared = state.listeners.is_adopted(listener);
        if is_shared && !state.listeners.finds_queued(listener, self.number) {
            return;
        }
        while state.listeners.has_queued(listener) {
            let lost = [
                (Fault::AcceptNoDescriptor, libc::EMFILE),
                (Fault::AcceptNoFile, libc::ENFILE),
                (Fault::AcceptAborted, libc::ECONNABORTED),
            ];
            if let Some((_, errno)) = lost.into_iter().find(|(fault, _)| self.faults.strike(*fault)) {
                if errno == libc::ECONNABORTED
                    && let Some(number) = state.take_queued(listener)
                {
                    state.close(number, Side::Server, true);
                }
                return self.end_accept(index, -errno);
            }
            let kept = [
                (HostileEvent::AcceptInterrupted, libc::EINTR),
                (HostileEvent::AcceptNoMemory, libc::ENOMEM),
                (HostileEvent::AcceptCanceledMore, libc::ECANCELED),
            ];
            if let Some((event, errno)) = kept.into_iter().find(|(event, _)| self.faults.meets(*event)) {
                let flags = if event == HostileEvent::AcceptCanceledMore { F_MORE } else { 0 };
                self.ring.accepts[usize::from(index)] = None;
                return self.post(RawCqe::new(Kind::Accept.with(index.into()), -errno, flags));
            }
            let Some(number) = state.take_queued(listener) else { return };
            let fd = state.open_descriptor(self.number, number);
            let is_full = self.ring.completions.is_full();
            if is_shared || is_full || self.faults.strike(Fault::AcceptEnds) {
                return self.end_accept(index, fd);
            }
            self.post(RawCqe::new(Kind::Accept.with(index.into()), fd, F_MORE));
        }
    }

    /// Posts the last completion of an accept.
    pub(crate) fn end_accept(&mut self, listener: u16, res: i32) {
        self.ring.accepts[usize::from(listener)] = None;
        self.post(RawCqe::new(Kind::Accept.with(listener.into()), res, 0));
    }

    /// Receives available bytes. True if the receive is still armed.
    pub(crate) fn receive(&mut self, index: usize, state: &mut State) -> bool {
        let Operation { id, file, .. } = self.ring.receives[index];
        let File { connection, side } = file;
        let connection = state.connection(connection);
        for _ in 0..IN_A_ROW {
            if !connection.is_readable(side) {
                self.ring.receives[index].of = false;
                return true;
            }
            if self.faults.strike(Fault::Delay) {
                break;
            }
            if let Some(errno) = self.hostile_end() {
                return self.end_receive(id, errno);
            }
            if let Some((block, most)) = self.ring.block_of(id) {
                let most = connection.unread(side).min(*most);
                let short = self.faults.strike(Fault::ReceiveInterrupted);
                let len = self.faults.shorten(Fault::ReceiveShort, most);
                let read =
                    if short { Err(libc::EINTR) } else { connection.read(side, block.spare(len.max(1))) };
                self.touched.push(file);
                let bytes = block.spare(read.unwrap_or_default()).to_vec();
                let kind = self.ring.end_receive(index);
                let res = read.map_or_else(|errno| -errno, |len| len as i32);
                self.shared.note_bytes(&[self.number as u64, kind.with(id.bits()), res as u64], &bytes);
                if !self.ring.completions.post(RawCqe::new(kind.with(id.bits()), res, 0), Vec::new()) {
                    self.faults.met(HostileEvent::Overflow);
                }
                return false;
            }
            // The buffer is chosen before the kernel knows whether there is input.
            if self.ring.buffers.is_empty() || self.faults.strike(Fault::NoBuffers) {
                return self.end_receive(id, libc::ENOBUFS);
            }
            if self.faults.strike(Fault::ReceiveInterrupted) {
                return self.end_receive(id, libc::EINTR);
            }
            let most = connection.unread(side).min(self.ring.buffers.room());
            let mut bytes = vec![0; self.faults.shorten(Fault::ReceiveShort, most)];
            self.touched.push(self.ring.receives[index].file);
            match connection.read(side, &mut bytes) {
                Ok(0) => return self.end_receive(id, 0),
                Err(errno) => return self.end_receive(id, errno),
                Ok(_) => {}
            }
            let ends = self.faults.strike(Fault::ReceiveEnds)
                || self.ring.completions.is_full()
                || self.ring.is_single(id);
            let flags = self.ring.buffers.select() | if ends { 0 } else { F_MORE };
            let cqe = RawCqe::new(Kind::Receive.with(id.bits()), bytes.len() as i32, flags);
            self.post_with(cqe, bytes);
            if ends {
                self.ring.end_receive(index);
                return false;
            }
        }
        self.left_over = true;
        true
    }

    /// Posts the last completion of a receive, without bytes, if it is armed. Returns false: it is
    /// no longer armed.
    pub(crate) fn end_receive(&mut self, id: ConnId, errno: i32) -> bool {
        if let Some(index) = find(&self.ring.receives, id) {
            let is_cancelled = self.ring.receives[index].cancels.found;
            let kind = self.ring.end_receive(index);
            let flags = if kind == Kind::Receive { self.hostile_flags(errno, is_cancelled) } else { 0 };
            self.post(RawCqe::new(kind.with(id.bits()), -errno, flags));
        }
        false
    }

    /// The error by which a receive ends without a cause, if this one does.
    fn hostile_end(&mut self) -> Option<i32> {
        let ends =
            [(HostileEvent::ReceiveCanceled, libc::ECANCELED), (HostileEvent::ReceiveFails, libc::ENOMEM)];
        ends.into_iter().find(|(event, _)| self.faults.meets(*event)).map(|(_, errno)| errno)
    }

    /// The flags of the last completion of a receive, which brings no bytes.
    fn hostile_flags(&mut self, errno: i32, is_cancelled: bool) -> u32 {
        let lie = if is_cancelled { HostileEvent::CanceledMore } else { HostileEvent::ReceiveCanceledMore };
        let more = if errno == libc::ECANCELED && self.faults.meets(lie) { F_MORE } else { 0 };
        let selects = errno != libc::ENOBUFS && !self.ring.buffers.is_empty();
        let buffer = selects && self.faults.meets(HostileEvent::BufferInError);
        more | if buffer { self.ring.buffers.select() } else { 0 }
    }

    /// Sends as many bytes as there is room for.
    pub(crate) fn send_rest(&mut self, index: usize, state: &mut State) {
        self.touch(self.ring.sends[index].file);
        let Operation { id, file, of: send, .. } = &mut self.ring.sends[index];
        let id = *id;
        let connection = state.connection(file.connection);
        while send.sent < send.batch.len() {
            if send.sent > 0 && self.faults.meets(HostileEvent::SendInterrupted) {
                return self.end_send(id, libc::EINTR);
            }
            match write(connection, file.side, send, &mut self.faults) {
                Ok(more) => send.sent += more,
                Err(libc::EAGAIN) => return,
                Err(errno) => return self.end_send(id, errno),
            }
        }
        self.end_send(id, 0);
    }

    /// Posts the completion of a send that waited, if there is one: the bytes sent, or else the
    /// error.
    pub(crate) fn end_send(&mut self, id: ConnId, errno: i32) {
        let Some(index) = find(&self.ring.sends, id) else { return };
        let SendProgress { batch, sent } = self.ring.sends.swap_remove(index).of;
        let res = if sent > 0 { sent as i32 } else { -errno };
        self.post_sent(id, res, batch);
    }
}

/// Writes the next bytes of a send, as many as there is room for. An error only if nothing was
/// written.
pub(crate) fn write(
    connection: &mut Connection,
    side: Side,
    send: &SendProgress,
    faults: &mut Injector,
) -> Result<usize, i32> {
    let len = faults.shorten(Fault::SendShort, send.batch.len() - send.sent);
    let mut written = 0;
    for piece in send.next_pieces(len).filter(|piece| !piece.is_empty()) {
        match connection.write(side, piece) {
            Ok(len) => {
                written += len;
                if len < piece.len() {
                    break;
                }
            }
            Err(errno) if written == 0 => return Err(errno),
            Err(_) => break,
        }
    }
    Ok(written)
}
