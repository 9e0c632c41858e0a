//! What becomes ready: connections to accept, bytes to receive, room to send.

use ringserve_core::Batch;
use ringserve_drivers::kernel::{BUFFER_SHIFT, F_BUF_MORE, F_BUFFER, F_MORE, Kind, RawCqe};

use crate::connection::{Connection, Side};
use crate::faults::{Fault, Injector};
use crate::kernel::{File, SimKernel};
use crate::state::State;

/// Completions of one receive in one go, as in Linux: then it is the others' turn.
const IN_A_ROW: usize = 32;

impl SimKernel {
    /// Posts what is ready.
    pub(crate) fn progress(&mut self, state: &mut State) {
        if !self.receives.is_empty() && self.faults.strike(Fault::Reorder) {
            let first = self.faults.below(self.receives.len());
            self.receives.rotate_left(first);
        }
        if !self.sends.is_empty() && self.faults.strike(Fault::Reorder) {
            let first = self.faults.below(self.sends.len());
            self.sends.rotate_left(first);
        }
        self.connect(state);
        for listener in 0..self.listeners.len() {
            self.accept(listener, state);
        }
        // Backwards, so that one that ends moves only what was looked at.
        for index in (0..self.sends.len()).rev() {
            self.send_rest(index, state);
        }
        // In the order in which they were armed, so that none is always the last to find a buffer.
        let mut index = 0;
        while index < self.receives.len() {
            index += usize::from(self.receive(index, state));
        }
    }

    /// Connects, each as soon as there is a place in the backlog.
    fn connect(&mut self, state: &mut State) {
        for (id, addr) in std::mem::take(&mut self.connects) {
            let delayed = self.faults.strike(Fault::Delay);
            let made = if delayed { Err(libc::EAGAIN) } else { state.connect_ring(self.ring, addr) };
            let res = match made {
                Err(libc::EAGAIN) => {
                    self.connects.push((id, addr));
                    self.left_over |= delayed;
                    continue;
                }
                Err(errno) => -errno,
                Ok(number) => {
                    let file = self.files.get_mut(&id.slot()).expect("its socket is installed");
                    file.connection = number;
                    0
                }
            };
            self.post(RawCqe::new(Kind::Connect.with(id.bits()), res, 0));
        }
    }

    fn accept(&mut self, index: usize, state: &mut State) {
        let (listener, armed) = self.listeners[index];
        let user_data = Kind::Accept.with(index as u64);
        if !armed {
            return;
        }
        while !state.listener(listener).backlog.is_empty() {
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
                self.listeners[index].1 = false;
                return self.post(RawCqe::new(user_data, -errno, 0));
            }
            let Some(number) = state.take_queued(listener) else { return };
            let fd = state.open_descriptor(self.ring, number);
            if self.faults.strike(Fault::AcceptEnds) {
                self.listeners[index].1 = false;
                return self.post(RawCqe::new(user_data, fd, 0));
            }
            self.post(RawCqe::new(user_data, fd, F_MORE));
        }
    }

    /// Receives what is there. True if the receive is still armed.
    pub(crate) fn receive(&mut self, index: usize, state: &mut State) -> bool {
        let side = self.receives[index].side;
        let connection = state.connection(self.receives[index].connection);
        for _ in 0..IN_A_ROW {
            if !connection.is_readable(side) {
                return true;
            }
            if self.faults.strike(Fault::Delay) {
                break;
            }
            // The buffer is chosen before anybody looks what there is to receive.
            if self.buffers.is_empty() || self.faults.strike(Fault::NoBuffers) {
                return self.end_receive(index, libc::ENOBUFS);
            }
            if self.faults.strike(Fault::ReceiveInterrupted) {
                return self.end_receive(index, libc::EINTR);
            }
            let unread = connection.unread(side);
            let room = self.buffer_bytes - self.head_filled;
            let mut bytes = vec![0; self.faults.shorten(Fault::ReceiveShort, unread.min(room))];
            match connection.read(side, &mut bytes) {
                Ok(0) => return self.end_receive(index, 0),
                Err(errno) => return self.end_receive(index, errno),
                Ok(_) => {}
            }
            let ends = self.faults.strike(Fault::ReceiveEnds);
            self.post_received(self.receives[index], bytes, ends);
            if ends {
                self.receives.remove(index);
                return false;
            }
        }
        self.left_over = true;
        true
    }

    /// A completion with bytes, in the buffer that is first in the ring.
    fn post_received(&mut self, file: File, bytes: Vec<u8>, ends: bool) {
        let buffer = self.buffers[0];
        let mut flags = F_BUFFER | u32::from(buffer) << BUFFER_SHIFT;
        self.head_filled += bytes.len();
        if self.incremental && self.head_filled < self.buffer_bytes {
            flags |= F_BUF_MORE;
        } else {
            self.buffers.pop_front();
            self.head_filled = 0;
        }
        if !ends {
            flags |= F_MORE;
        }
        let user_data = Kind::Receive.with(file.id.bits());
        self.post_with(RawCqe::new(user_data, bytes.len() as i32, flags), bytes);
    }

    /// The last completion of a receive, without bytes. False: it is not armed any more.
    pub(crate) fn end_receive(&mut self, index: usize, errno: i32) -> bool {
        let file = self.receives.remove(index);
        self.post(RawCqe::new(Kind::Receive.with(file.id.bits()), -errno, 0));
        false
    }

    /// Sends what there is room for.
    pub(crate) fn send_rest(&mut self, index: usize, state: &mut State) {
        let send = &mut self.sends[index];
        let connection = state.connection(send.file.connection);
        while send.sent < send.batch.len() {
            match write(connection, send.file.side, &send.batch, send.sent, &mut self.faults) {
                Ok(more) => send.sent += more,
                Err(libc::EAGAIN) => return,
                Err(errno) => return self.end_send(index, errno),
            }
        }
        self.end_send(index, 0);
    }

    /// The completion of a send that waited: what left, or else the error.
    pub(crate) fn end_send(&mut self, index: usize, errno: i32) {
        let send = self.sends.swap_remove(index);
        let res = if send.sent > 0 { send.sent as i32 } else { -errno };
        self.post_sent(send.file.id, res, send.batch);
    }
}

/// Writes what there is room for, from this byte of the batch on. An error only if nothing was written.
pub(crate) fn write(
    connection: &mut Connection,
    side: Side,
    batch: &Batch,
    from: usize,
    faults: &mut Injector,
) -> Result<usize, i32> {
    let (mut skip, mut left) = (from, faults.shorten(Fault::SendShort, batch.len() - from));
    let mut written = 0;
    for piece in batch.pieces() {
        let skipped = skip.min(piece.len());
        skip -= skipped;
        let piece = &piece[skipped..];
        let piece = &piece[..piece.len().min(left)];
        if piece.is_empty() {
            continue;
        }
        match connection.write(side, piece) {
            Ok(len) => {
                written += len;
                left -= len;
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
