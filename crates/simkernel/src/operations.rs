//! Carrying out what was submitted.

use ringserve_core::{Batch, CloseHow, ConnId};
use ringserve_drivers::kernel::{Kind, RawCqe, RawOp, SendMode, SentQuietly};

use crate::connection::Side;
use crate::faults::Fault;
use crate::kernel::{File, SimKernel};
use crate::progress::write;
use crate::ring::Sending;
use crate::state::{State, UNCONNECTED};

impl SimKernel {
    pub(crate) fn carry_out(&mut self, op: RawOp, state: &mut State) {
        let user_data = op.user_data();
        let done = |res: i32| RawCqe::new(user_data, res, 0);
        match op {
            RawOp::Accept { listener } => self.ring.arm_accept(listener),
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
                    Some(file) => self.ring.connects.add(id, file, addr),
                    None => self.post(done(-libc::EBADF)),
                }
            }
            RawOp::Receive { id } => {
                if !self.ring.arm_receive(id, ()) {
                    self.post(done(-libc::EBADF));
                }
            }
            RawOp::Probe { id } => {
                let found = match self.ring.files.get(id) {
                    Some(file) => state.connection(file.connection).peek(file.side, &mut [0]),
                    None => Err(libc::EBADF),
                };
                self.post(done(found.map_or_else(|errno| -errno, |bytes| bytes as i32)));
            }
            RawOp::Send { id, batch, mode } => self.send(id, batch, mode, state),
            RawOp::Shutdown { id } => {
                assert!(self.ring.sends.find(id).is_none(), "{id} is shut down under its send");
                let shut = match self.ring.files.get(id) {
                    Some(file) => state.connection(file.connection).shut_down(file.side),
                    None => Err(libc::EBADF),
                };
                self.post(done(shut.map_or_else(|errno| -errno, |()| 0)));
            }
            RawOp::ShutdownInput { id } => {
                if let Some(index) = self.ring.receives.find(id) {
                    self.end_receive(index, 0);
                }
                let known = self.ring.files.get(id).is_some();
                self.post(done(if known { 0 } else { -libc::EBADF }));
            }
            RawOp::Close { id, how } => {
                let Some(file) = self.ring.close(id) else { return self.post(done(-libc::EBADF)) };
                state.close(file.connection, file.side, how == CloseHow::Abort);
                self.post(done(0));
            }
            RawOp::CancelAccept { .. }
            | RawOp::CancelConnect { .. }
            | RawOp::CancelReceive { .. }
            | RawOp::CancelSend { .. } => self.cancel(op, state),
            RawOp::ReadWake => self.ring.arm_wake(),
        }
    }

    fn cancel(&mut self, op: RawOp, state: &mut State) {
        let user_data = op.user_data();
        let answer = |res: i32| RawCqe::new(user_data, res, 0);
        if let Some(cancels) = self.ring.cancelled(user_data)
            && cancels.may_miss()
            && self.faults.strike(Fault::CancelMisses)
        {
            cancels.missed += 1;
            return self.post(answer(-libc::ENOENT));
        }
        let gone = |kernel: &mut SimKernel| kernel.post(answer(-libc::ENOENT));
        match op {
            RawOp::CancelAccept { listener } => {
                if self.ring.accepts[usize::from(listener)].is_none() {
                    return gone(self);
                }
                self.post(answer(0));
                self.end_accept(listener, -libc::ECANCELED);
            }
            RawOp::CancelConnect { id } => {
                let Some(index) = self.ring.connects.find(id) else { return gone(self) };
                self.ring.connects.remove(index);
                self.post(answer(0));
                self.post(RawCqe::new(Kind::Connect.with(id.bits()), -libc::ECANCELED, 0));
            }
            RawOp::CancelReceive { id } => {
                if let Some(index) = self.ring.receives.find(id)
                    && self.faults.strike(Fault::CancelRace)
                {
                    self.receive(index, state);
                }
                let Some(index) = self.ring.receives.find(id) else { return gone(self) };
                self.post(answer(0));
                self.end_receive(index, libc::ECANCELED);
            }
            RawOp::CancelSend { id } => {
                if let Some(index) = self.ring.sends.find(id)
                    && self.faults.strike(Fault::CancelRace)
                {
                    self.send_rest(index, state);
                }
                let Some(index) = self.ring.sends.find(id) else { return gone(self) };
                self.post(answer(0));
                self.end_send(index, libc::ECANCELED);
            }
            _ => unreachable!("it is a cancel"),
        }
    }

    fn send(&mut self, id: ConnId, batch: Box<Batch>, mode: SendMode, state: &mut State) {
        let Some(file) = self.ring.begin_send(id, &batch) else {
            return self.post_sent(id, -libc::EBADF, batch);
        };
        if mode == SendMode::All {
            // It gets its bytes with the others that wait, in this enter.
            return self.ring.sends.add(id, file, Sending { batch, sent: 0 });
        }
        if self.faults.strike(Fault::NoRoom) {
            return self.post_sent(id, -libc::EAGAIN, batch);
        }
        let len = batch.len();
        match write(state.connection(file.connection), file.side, &batch, 0, &mut self.faults) {
            Ok(sent) if sent == len && mode == SendMode::TryQuietly => {
                self.ring.completions.post_quietly(SentQuietly { id, bytes: sent as i32, batch });
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
