//! Carrying out what was submitted.

use ringserve_core::{Batch, CloseHow, ConnId};
use ringserve_drivers::kernel::{Kind, RawCqe, RawOp, SendMode, SentQuietly};

use crate::connection::Side;
use crate::faults::Fault;
use crate::kernel::{File, Sending, SimKernel};
use crate::progress::write;
use crate::state::{State, UNCONNECTED};

/// Cancels in a row that find nothing though what they are for lives.
const MISSED_MAX: u8 = 3;

impl SimKernel {
    pub(crate) fn carry_out(&mut self, op: RawOp, state: &mut State) {
        let user_data = op.user_data();
        let cancels = matches!(
            op,
            RawOp::CancelAccept { .. }
                | RawOp::CancelConnect { .. }
                | RawOp::CancelReceive { .. }
                | RawOp::CancelSend { .. }
        );
        if cancels && self.misses() {
            return self.post(RawCqe::new(user_data, -libc::ENOENT, 0));
        }
        let done = |res: i32| RawCqe::new(user_data, res, 0);
        match op {
            RawOp::Accept { listener } => {
                let (_, armed) = &mut self.listeners[usize::from(listener)];
                assert!(!*armed, "a listener has two accepts");
                *armed = true;
            }
            RawOp::Install { id, fd } => {
                let connection = state.take_descriptor(fd);
                let side = if connection == UNCONNECTED { Side::Client } else { Side::Server };
                let old = self.files.insert(id.slot(), File { id, connection, side });
                assert!(old.is_none(), "slot {} is installed twice", id.slot());
            }
            RawOp::CloseFd { fd } => {
                let number = state.take_descriptor(fd);
                state.close(number, Side::Server, false);
            }
            RawOp::Connect { id, address } => {
                // It is made with what is ready, in this enter.
                let addr = address.as_ip().expect("its socket was made for an IP address");
                self.connects.push((id, addr));
            }
            RawOp::CancelConnect { id } => {
                let Some(index) = self.connects.iter().position(|(of, _)| *of == id) else {
                    return self.post(done(-libc::ENOENT));
                };
                self.connects.remove(index);
                self.post(done(0));
                self.post(RawCqe::new(Kind::Connect.with(id.bits()), -libc::ECANCELED, 0));
            }
            RawOp::Receive { id } => {
                assert!(!self.is_receiving(id), "two receives on {id}");
                match self.file(id) {
                    Some(file) => self.receives.push(file),
                    None => self.post(done(-libc::EBADF)),
                }
            }
            RawOp::Probe { id } => {
                let found = match self.file(id) {
                    Some(file) => state.connection(file.connection).peek(file.side, &mut [0]),
                    None => Err(libc::EBADF),
                };
                self.post(done(found.map_or_else(|errno| -errno, |bytes| bytes as i32)));
            }
            RawOp::Send { id, batch, mode } => self.send(id, batch, mode, state),
            RawOp::Shutdown { id } => {
                assert!(!self.is_sending(id), "{id} is shut down under its send");
                let shut = match self.file(id) {
                    Some(file) => state.connection(file.connection).shut_down(file.side),
                    None => Err(libc::EBADF),
                };
                self.post(done(shut.map_or_else(|errno| -errno, |()| 0)));
            }
            RawOp::ShutdownInput { id } => {
                if let Some(index) = self.receives.iter().position(|file| file.id == id) {
                    self.end_receive(index, 0);
                }
                let known = self.file(id).is_some();
                self.post(done(if known { 0 } else { -libc::EBADF }));
            }
            RawOp::Close { id, how } => {
                assert!(!self.is_receiving(id), "{id} is closed under its receive");
                assert!(!self.is_sending(id), "{id} is closed under its send");
                let Some(file) = self.file(id) else { return self.post(done(-libc::EBADF)) };
                self.files.remove(&id.slot());
                state.close(file.connection, file.side, how == CloseHow::Abort);
                self.post(done(0));
            }
            RawOp::CancelAccept { listener } => {
                let (_, armed) = &mut self.listeners[usize::from(listener)];
                if !std::mem::take(armed) {
                    return self.post(done(-libc::ENOENT));
                }
                self.post(done(0));
                let accept = Kind::Accept.with(u64::from(listener));
                self.post(RawCqe::new(accept, -libc::ECANCELED, 0));
            }
            RawOp::CancelReceive { id } => {
                let position = |receives: &[File]| receives.iter().position(|file| file.id == id);
                if let Some(index) = position(&self.receives)
                    && self.faults.strike(Fault::CancelRace)
                {
                    self.receive(index, state);
                }
                let Some(index) = position(&self.receives) else {
                    return self.post(done(-libc::ENOENT));
                };
                self.post(done(0));
                self.end_receive(index, libc::ECANCELED);
            }
            RawOp::CancelSend { id } => {
                let position = |sends: &[Sending]| sends.iter().position(|send| send.file.id == id);
                if let Some(index) = position(&self.sends)
                    && self.faults.strike(Fault::CancelRace)
                {
                    self.send_rest(index, state);
                }
                let Some(index) = position(&self.sends) else {
                    return self.post(done(-libc::ENOENT));
                };
                self.post(done(0));
                self.end_send(index, libc::ECANCELED);
            }
            RawOp::ReadWake => {
                assert!(!self.wake_armed, "the wake-up is read twice");
                self.wake_armed = true;
            }
        }
    }

    /// True if a cancel finds nothing, whether or not what it is for lives. A few in a row at most.
    fn misses(&mut self) -> bool {
        let misses = self.missed < MISSED_MAX && self.faults.strike(Fault::CancelMisses);
        self.missed = if misses { self.missed + 1 } else { 0 };
        misses
    }

    /// What is in a connection's slot.
    fn file(&self, id: ConnId) -> Option<File> {
        let file = self.files.get(&id.slot()).copied()?;
        assert_eq!(file.id, id, "operation for a connection whose slot is another's");
        Some(file)
    }

    fn is_receiving(&self, id: ConnId) -> bool {
        self.receives.iter().any(|file| file.id == id)
    }

    fn is_sending(&self, id: ConnId) -> bool {
        self.sends.iter().any(|send| send.file.id == id)
    }

    fn send(&mut self, id: ConnId, batch: Box<Batch>, mode: SendMode, state: &mut State) {
        assert!(!batch.is_empty(), "an empty send");
        assert!(!self.is_sending(id), "two sends on {id}");
        let Some(file) = self.file(id) else {
            return self.post_sent(id, -libc::EBADF, batch);
        };
        if mode == SendMode::All {
            // It gets its bytes with the others that wait, in this enter.
            return self.sends.push(Sending { file, batch, sent: 0 });
        }
        if self.faults.strike(Fault::NoRoom) {
            return self.post_sent(id, -libc::EAGAIN, batch);
        }
        let len = batch.len();
        match write(state.connection(file.connection), file.side, &batch, 0, &mut self.faults) {
            Ok(sent) if sent == len && mode == SendMode::TryQuietly => {
                self.quiet.push_back(SentQuietly { id, bytes: sent as i32, batch });
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
