//! Execution of submitted operations.

use ringserve_core::{Batch, CloseHow, ConnId};
use ringserve_drivers::kernel::{Kind, RawCqe, RawOp, SendMode, SentQuietly};

use crate::adversary::HostileEvent;
use crate::connection::{File, Side};
use crate::faults::Fault;
use crate::kernel::SimKernel;
use crate::progress::write;
use crate::ring::{Operation, SendProgress, find};
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
            RawOp::Install { id, fd } => self.install(id, fd, state),
            RawOp::CloseFd { fd } => {
                let number = state.take_descriptor(fd);
                state.close(number, Side::Server, false);
            }
            RawOp::Connect { id, address } => match self.ring.files.get(id) {
                Some(file) => {
                    // The connection is made together with ready ones, in this enter.
                    let addr = address.as_ip().expect("its socket was made for an IP address");
                    self.ring.connects.push(Operation::new(id, file, addr));
                }
                None => self.answer(user_data, Err(libc::EBADF)),
            },
            RawOp::Receive { id } => {
                let armed = self.ring.arm_receive(id, true);
                self.answer_unless(armed, user_data);
            }
            RawOp::ReceiveOnce { id } => {
                let armed = self.ring.arm_single(id, true, None);
                self.answer_unless(armed, user_data);
            }
            RawOp::ReceiveInto { id, block, most } => {
                let armed = self.ring.arm_single(id, true, Some((block, most as usize)));
                self.answer_unless(armed, user_data);
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
                self.answer_or_late(user_data, shut.map(|()| 0), HostileEvent::CloseLate, state);
            }
            RawOp::ShutdownInput { id } => {
                if !self.faults.meets(HostileEvent::InputEndUnheard) {
                    self.end_receive(id, 0);
                }
                self.answer(user_data, self.ring.files.get(id).map(|_| 0).ok_or(libc::EBADF));
            }
            RawOp::Close { id, how } => {
                let file = self.ring.close(id).ok_or(libc::EBADF);
                let close = |file: File| state.close(file.connection, file.side, how == CloseHow::Abort);
                let closed = file.map(close).map(|()| 0);
                self.answer_or_late(user_data, closed, HostileEvent::CloseLate, state);
            }
            RawOp::CancelAccept { .. }
            | RawOp::CancelConnect { .. }
            | RawOp::CancelReceive { .. }
            | RawOp::CancelSend { .. } => self.cancel(&op, state),
            RawOp::ReadWake => self.ring.arm_wake(),
        }
    }

    fn install(&mut self, id: ConnId, fd: i32, state: &mut State) {
        let connection = state.take_descriptor(fd);
        if self.faults.meets(HostileEvent::InstallFails) {
            state.close(connection, Side::Server, false);
            return self.answer(Kind::Install.with(id.bits()), Err(libc::ENOMEM));
        }
        let side = if connection == UNCONNECTED { Side::Client } else { Side::Server };
        self.ring.files.install(id, File { connection, side });
    }

    /// Completes a receive of a connection that is not there.
    fn answer_unless(&mut self, is_armed: bool, user_data: u64) {
        if !is_armed {
            self.answer(user_data, Err(libc::EBADF));
        }
    }

    /// Posts the only completion of an operation that is done at once.
    fn answer(&mut self, user_data: u64, result: Result<i32, i32>) {
        self.post(RawCqe::new(user_data, result.unwrap_or_else(|errno| -errno), 0));
    }

    /// Does the same, or later if the adversary causes this event.
    fn answer_or_late(
        &mut self,
        user_data: u64,
        result: Result<i32, i32>,
        event: HostileEvent,
        state: &State,
    ) {
        self.post_or_late(RawCqe::new(user_data, result.unwrap_or_else(|errno| -errno), 0), event, state);
    }

    fn cancel(&mut self, op: &RawOp, state: &mut State) {
        let user_data = op.user_data();
        self.answer_late_cancels(user_data);
        if let Some(cancels) = self.ring.cancelled(user_data)
            && cancels.may_miss()
            && self.faults.strike(Fault::CancelMisses)
        {
            cancels.missed += 1;
            return self.answer(user_data, Err(libc::ENOENT));
        }
        if self.ring.cancelled(user_data).is_some() && self.faults.meets(HostileEvent::CancelAlready) {
            let looks = self.faults.hostile_spread(1, 4) as u8;
            if let Some(cancels) = self.ring.cancelled(user_data) {
                (cancels.found, cancels.checks_left) = (true, looks);
            }
            return self.answer(user_data, Err(libc::EALREADY));
        }
        // The operation to cancel may make progress just before.
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
        let Some(cancels) = self.ring.cancelled(user_data) else {
            let late = HostileEvent::CancelAnswerLate;
            return self.answer_or_late(user_data, Err(libc::ENOENT), late, state);
        };
        cancels.found = true;
        let is_behind = self.faults.meets(HostileEvent::CancelAnswerBehind);
        if !is_behind {
            self.answer(user_data, Ok(0));
        }
        self.end_by_cancel(op, state);
        if is_behind {
            self.answer(user_data, Ok(0));
        }
    }

    /// Ends the operation that a cancel found.
    fn end_by_cancel(&mut self, op: &RawOp, state: &mut State) {
        match op {
            RawOp::CancelAccept { listener } => self.cancel_accept(*listener, state),
            RawOp::CancelConnect { id } => self.cancel_connect(*id),
            RawOp::CancelReceive { id } => drop(self.end_receive(*id, libc::ECANCELED)),
            RawOp::CancelSend { id } => self.end_send(*id, libc::ECANCELED),
            other => unreachable!("{other:?} is no cancel"),
        }
    }

    /// Ends an accept, which no longer waits for the queue of an adopted listener.
    pub(crate) fn cancel_accept(&mut self, listener: u16, state: &mut State) {
        let queue = self.listeners[usize::from(listener)];
        if state.listeners.is_adopted(queue) {
            state.listeners.end_wait(queue, self.number);
        }
        self.end_accept(listener, -libc::ECANCELED);
    }

    pub(crate) fn cancel_connect(&mut self, id: ConnId) {
        self.ring.connects.retain(|connect| connect.id != id);
        self.answer(Kind::Connect.with(id.bits()), Err(libc::ECANCELED));
    }

    fn send(&mut self, id: ConnId, batch: Box<Batch>, mode: SendMode, state: &mut State) {
        let Some(file) = self.ring.begin_send(id, &batch) else {
            return self.post_sent(id, -libc::EBADF, batch);
        };
        let failures = [
            (HostileEvent::SendInterrupted, libc::EINTR),
            (HostileEvent::SendNoBuffers, libc::ENOBUFS),
            (HostileEvent::SendFails, libc::EIO),
        ];
        let is_reset = state.connection(file.connection).is_reset(file.side);
        let failure = failures.into_iter().find(|(event, _)| !is_reset && self.faults.meets(*event));
        if let Some((_, errno)) = failure {
            return self.post_sent(id, -errno, batch);
        }
        if mode == SendMode::All {
            // It sends its bytes together with the others that wait, in this enter.
            return self.ring.sends.push(Operation::new(id, file, SendProgress { batch, sent: 0 }));
        }
        if self.faults.strike(Fault::NoRoom) {
            return self.post_sent(id, -libc::EAGAIN, batch);
        }
        let send = SendProgress { batch, sent: 0 };
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

    /// Posts the completion of a send.
    pub(crate) fn post_sent(&mut self, id: ConnId, res: i32, batch: Box<Batch>) {
        let mut cqe = RawCqe::new(Kind::Send.with(id.bits()), res, 0);
        cqe.batch = Some(batch);
        self.post(cqe);
    }
}
