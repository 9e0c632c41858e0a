//! Carrying out what was submitted.

use ringserve_core::{Batch, CloseHow, ConnId};
use ringserve_drivers::kernel::{Kind, RawCqe, RawOp, SendMode, SentQuietly};

use crate::connection::{File, Side};
use crate::faults::Fault;
use crate::kernel::SimKernel;
use crate::progress::write;
use crate::ring::{Operation, Sending, find};
use crate::state::{State, UNCONNECTED};

impl SimKernel {
    pub(crate) fn carry_out(&mut self, op: RawOp, state: &mut State) {
        let user_data = op.user_data();
        match op {
            RawOp::Accept { listener } => {
                self.ring.arm_accept(listener);
                let listener = self.listeners[usize::from(listener)];
                if state.listeners.is_adopted(listener) {
                    state.listeners.begin_to_wait(listener, self.number);
                }
            }
            RawOp::Install { id, fd } => {
                let connection = state.take_descriptor(fd);
                let side = if connection == UNCONNECTED { Side::Client } else { Side::Server };
                self.ring.files.install(id, File { connection, side });
            }
            RawOp::CloseFd { fd } => {
                let number = state.take_descriptor(fd);
                state.close(number, Side::Server, false);
            }
            RawOp::Connect { id, address } => {
                // It is made with what is ready, in this enter.
                let addr = address.as_ip().expect("its socket was made for an IP address");
                match self.ring.files.get(id) {
                    Some(file) => self.ring.connects.push(Operation::new(id, file, addr)),
                    None => self.answer(user_data, Err(libc::EBADF)),
                }
            }
            RawOp::Receive { id } => {
                if !self.ring.arm_receive(id, true) {
                    self.answer(user_data, Err(libc::EBADF));
                }
            }
            RawOp::ReceiveOnce { id } => {
                if !self.ring.arm_single(id, true, None) {
                    self.answer(user_data, Err(libc::EBADF));
                }
            }
            RawOp::ReceiveInto { id, block, most } => {
                if !self.ring.arm_single(id, true, Some((block, most as usize))) {
                    self.answer(user_data, Err(libc::EBADF));
                }
            }
            RawOp::Probe { id } => {
                let file = self.ring.files.get(id).ok_or(libc::EBADF);
                let found = file.and_then(|file| state.connection(file.connection).peek(file.side, &mut [0]));
                self.answer(user_data, found.map(|bytes| bytes as i32));
            }
            RawOp::Send { id, batch, mode } => self.send(id, batch, mode, state),
            RawOp::Shutdown { id } => {
                assert!(find(&self.ring.sends, id).is_none(), "{id} is shut down under its send");
                let file = self.ring.files.get(id).ok_or(libc::EBADF);
                file.iter().for_each(|file| self.touch(*file));
                let shut = file.and_then(|file| state.connection(file.connection).shut_down(file.side));
                self.answer(user_data, shut.map(|()| 0));
            }
            RawOp::ShutdownInput { id } => {
                self.end_receive(id, 0);
                self.answer(user_data, self.ring.files.get(id).map(|_| 0).ok_or(libc::EBADF));
            }
            RawOp::Close { id, how } => {
                let file = self.ring.close(id).ok_or(libc::EBADF);
                let close = |file: File| state.close(file.connection, file.side, how == CloseHow::Abort);
                self.answer(user_data, file.map(close).map(|()| 0));
            }
            RawOp::CancelAccept { .. }
            | RawOp::CancelConnect { .. }
            | RawOp::CancelReceive { .. }
            | RawOp::CancelSend { .. } => self.cancel(&op, state),
            RawOp::ReadWake => self.ring.arm_wake(),
        }
    }

    /// The one completion of what is done at once.
    fn answer(&mut self, user_data: u64, result: Result<i32, i32>) {
        self.post(RawCqe::new(user_data, result.unwrap_or_else(|errno| -errno), 0));
    }

    fn cancel(&mut self, op: &RawOp, state: &mut State) {
        let user_data = op.user_data();
        if let Some(cancels) = self.ring.cancelled(user_data)
            && cancels.may_miss()
            && self.faults.strike(Fault::CancelMisses)
        {
            cancels.missed += 1;
            return self.answer(user_data, Err(libc::ENOENT));
        }
        // What it is for may go on just before.
        let races = matches!(op, RawOp::CancelReceive { .. } | RawOp::CancelSend { .. })
            && self.ring.cancelled(user_data).is_some()
            && self.faults.strike(Fault::CancelRace);
        if let RawOp::CancelReceive { id } = op
            && let Some(index) = find(&self.ring.receives, *id).filter(|_| races)
        {
            self.receive(index, state);
        }
        if let RawOp::CancelSend { id } = op
            && let Some(index) = find(&self.ring.sends, *id).filter(|_| races)
        {
            self.send_rest(index, state);
        }
        let found = self.ring.cancelled(user_data).map(|_| 0).ok_or(libc::ENOENT);
        self.answer(user_data, found);
        if found.is_err() {
            return;
        }
        match op {
            RawOp::CancelAccept { listener } => {
                let queue = self.listeners[usize::from(*listener)];
                if state.listeners.is_adopted(queue) {
                    state.listeners.end_wait(queue, self.number);
                }
                self.end_accept(*listener, -libc::ECANCELED);
            }
            RawOp::CancelConnect { id } => {
                self.ring.connects.retain(|connect| connect.id != *id);
                self.answer(Kind::Connect.with(id.bits()), Err(libc::ECANCELED));
            }
            RawOp::CancelReceive { id } => drop(self.end_receive(*id, libc::ECANCELED)),
            RawOp::CancelSend { id } => self.end_send(*id, libc::ECANCELED),
            other => unreachable!("{other:?} is no cancel"),
        }
    }

    fn send(&mut self, id: ConnId, batch: Box<Batch>, mode: SendMode, state: &mut State) {
        let Some(file) = self.ring.begin_send(id, &batch) else {
            return self.post_sent(id, -libc::EBADF, batch);
        };
        if mode == SendMode::All {
            // It gets its bytes with the others that wait, in this enter.
            return self.ring.sends.push(Operation::new(id, file, Sending { batch, sent: 0 }));
        }
        if self.faults.strike(Fault::NoRoom) {
            return self.post_sent(id, -libc::EAGAIN, batch);
        }
        let send = Sending { batch, sent: 0 };
        let written = write(state.connection(file.connection), file.side, &send, &mut self.faults);
        let batch = send.batch;
        self.touch(file);
        match written {
            Ok(sent) if sent == batch.len() && mode == SendMode::TryQuietly => {
                self.ring.completions.quiet.push_back(SentQuietly { id, bytes: sent as i32, batch });
            }
            Ok(sent) => self.post_sent(id, sent as i32, batch),
            Err(errno) => self.post_sent(id, -errno, batch),
        }
    }

    /// The completion of a send.
    pub(crate) fn post_sent(&mut self, id: ConnId, res: i32, batch: Box<Batch>) {
        let mut cqe = RawCqe::new(Kind::Send.with(id.bits()), res, 0);
        cqe.batch = Some(batch);
        self.post(cqe);
    }
}
