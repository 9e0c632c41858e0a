//! Accepting: multishot, with limits that end it and sockets that stay queued.

use std::time::Duration;

use ringserve_core::{ConnId, Socket};
use ringserve_drivers::kernel::{F_MORE, Kind, RawCqe};

use super::State;
use crate::faults::{Arm, Fault};
use crate::sock::{Place, Sock, excuse};

impl State {
    pub(super) fn arm_accept(&mut self, number: u16) {
        let adopted = self.plan.adopted;
        let listener = &mut self.listeners[usize::from(number)];
        assert!(!listener.gone, "an accept on a listener that is closed");
        listener.neglected = None;
        // It checks the queue first.
        listener.owes = adopted && !listener.backlog.is_empty();
        listener.took_one = false;
        self.ring.arm_accept(number);
    }

    pub(super) fn is_accepting(&self, number: u16) -> bool {
        self.ring.accepts[usize::from(number)].is_some()
    }

    /// Ends an accept that a cancel found.
    pub(super) fn stop_accept(&mut self, number: u16) {
        if self.strikes(Fault::CancelRace) {
            self.accept_some(number, 1);
        }
        if self.is_accepting(number) {
            self.end_accept(number, libc::ECANCELED);
        }
    }

    /// Posts the last completion.
    fn end_accept(&mut self, number: u16, errno: i32) {
        self.ring.accepts[usize::from(number)] = None;
        let lies = errno == libc::ECANCELED && self.strikes(Fault::AcceptLies);
        let arm = match errno {
            libc::ECANCELED if lies => Arm::AcceptCanceledMore,
            libc::ECANCELED => Arm::AcceptCanceled,
            libc::EMFILE => Arm::AcceptNoDescriptor,
            libc::ENFILE => Arm::AcceptNoFile,
            libc::ECONNABORTED => Arm::AcceptAborted,
            libc::EINTR => Arm::AcceptInterrupted,
            _ => Arm::AcceptError,
        };
        let flags = if lies { F_MORE } else { 0 };
        self.post(RawCqe::new(Kind::Accept.with(u64::from(number)), -errno, flags), arm);
    }

    pub(super) fn work_accepts(&mut self) {
        for number in 0..self.plan.listeners {
            let index = usize::from(number);
            let Some(cancels) = &mut self.ring.accepts[index] else { continue };
            if cancels.check() {
                self.end_accept(number, libc::ECANCELED);
                continue;
            }
            if self.listeners[index].backlog.is_empty() {
                continue;
            }
            let errors = [
                (Fault::AcceptNoDescriptor, libc::EMFILE),
                (Fault::AcceptNoFile, libc::ENFILE),
                (Fault::AcceptInterrupted, libc::EINTR),
                (Fault::AcceptBroken, libc::ENOMEM),
                (Fault::AcceptLies, libc::ECANCELED),
                (Fault::AcceptAborted, libc::ECONNABORTED),
            ];
            let struck = errors.into_iter().find(|(fault, _)| self.strikes(*fault));
            match struck {
                Some((Fault::AcceptAborted, errno)) => {
                    // This connection was reset before it was accepted, and is gone.
                    if let Some(tag) = self.next_in_backlog(index) {
                        self.drop_socket(tag);
                    }
                    self.end_accept(number, errno);
                }
                Some((_, errno)) => self.end_accept(number, errno),
                None => self.accept_some(number, 8),
            }
        }
    }

    fn accept_some(&mut self, number: u16, count: usize) {
        let index = usize::from(number);
        for _ in 0..count {
            if self.listeners[index].backlog.is_empty() {
                return;
            }
            if self.descriptors.count() >= self.plan.descriptors {
                return self.end_accept(number, libc::EMFILE);
            }
            let Some(tag) = self.next_in_backlog(index) else { return };
            let fd = self.open_descriptor(tag);
            let last =
                self.plan.adopted || self.ring.completions.is_full() || self.strikes(Fault::AcceptEnds);
            let (flags, arm) = if last { (0, Arm::AcceptedLast) } else { (F_MORE, Arm::AcceptedMore) };
            self.post(RawCqe::new(Kind::Accept.with(u64::from(number)), fd, flags), arm);
            if last {
                self.ring.accepts[index] = None;
                return;
            }
        }
    }

    /// Notes that the driver asks for the owner of the listener when it is about to close it, or
    /// that a pause ended its accept. A connection for which it was woken before counts if it still
    /// accepts: after a pause it takes one at once.
    pub(super) fn begin_to_leave(&mut self, number: u16) {
        let accepts = self.is_accepting(number);
        let comes = |sock: &Sock| {
            sock.place == Place::Nowhere && sock.listener == number && !sock.upstream && !sock.peer.finished
        };
        // A connection that arrives at that very moment.
        if self.plan.adopted
            && accepts
            && let Some(tag) = self.socks.iter().position(comes)
        {
            self.connect(tag);
        }
        let listener = &mut self.listeners[usize::from(number)];
        listener.owes &= accepts;
        if listener.owes {
            self.cover.fault(Fault::WokenForOne);
        }
    }

    /// Stops new connections. Those whose handshake had begun may still arrive within the time
    /// returned.
    pub(super) fn turn_newcomers_away(&mut self, number: u16) -> Duration {
        assert!(!self.plan.adopted, "newcomers are turned away from an adopted listener");
        let strikes = self.strikes(Fault::NewcomersLate);
        let late = if strikes { self.rng.range(1, self.plan.late_max) } else { 0 };
        let until = self.now + late;
        let listener = &mut self.listeners[usize::from(number)];
        assert_eq!(listener.closing, None, "listener {number} turns newcomers away twice");
        listener.closing = Some(until);
        if !strikes {
            self.close_doors(number);
        }
        Duration::from_nanos(late)
    }

    /// Refuses connects from here on, including those that found the backlog full and are tried
    /// again.
    fn close_doors(&mut self, number: u16) {
        let listener = &mut self.listeners[usize::from(number)];
        listener.closed = true;
        for tag in std::mem::take(&mut listener.refused) {
            self.kick(tag);
        }
    }

    pub(super) fn take_queued(&mut self, number: u16) -> Result<i32, i32> {
        let index = usize::from(number);
        let listener = &self.listeners[index];
        let closes = listener.closing.is_some() || self.plan.adopted;
        assert!(closes && !listener.gone, "a queue is taken from without need");
        assert!(!self.is_accepting(number), "a queue is taken from under an accept");
        if listener.backlog.is_empty() {
            if listener.closing.is_some_and(|until| until <= self.now) {
                self.close_doors(number);
            }
            return Err(libc::EAGAIN);
        }
        let starved =
            self.strikes(Fault::TakeNoDescriptor) || self.descriptors.count() >= self.plan.descriptors;
        self.listeners[index].starved = starved;
        if starved {
            return Err(self.rng.pick(&[libc::EMFILE, libc::ENFILE, libc::ENOMEM]));
        }
        let Some(tag) = self.next_in_backlog(index) else { return Err(libc::EAGAIN) };
        if self.strikes(Fault::TakeAborted) {
            self.drop_socket(tag);
            return Err(libc::ECONNABORTED);
        }
        self.cover.fault(Fault::QueueTaken);
        if self.plan.adopted {
            let took = std::mem::replace(&mut self.listeners[index].took_one, true);
            assert!(!took, "more than one connection is taken from an adopted queue");
        }
        Ok(self.open_descriptor(tag))
    }

    /// Closes a listener and resets the connections in its backlog, which may be left only for lack
    /// of descriptors.
    pub(super) fn close_listener(&mut self, number: u16) {
        let index = usize::from(number);
        assert!(!self.is_accepting(number), "a listener is closed under its accept, and goes on listening");
        let listener = &mut self.listeners[index];
        let late = listener.closing.is_none_or(|until| until > self.now);
        if self.plan.adopted {
            assert!(!listener.gone, "a listener is closed twice");
            let forgets = listener.owes && !listener.starved && !listener.backlog.is_empty();
            assert!(!forgets, "a connection for which no other owner is woken is left in an adopted queue");
            listener.gone = true;
            return self.leave_queue(index);
        }
        assert!(!late && !listener.gone, "a listener is closed too early, or twice");
        assert!(listener.starved || listener.backlog.is_empty(), "a listener is closed with its queue");
        listener.gone = true;
        self.reset_backlog(index);
    }

    /// Leaves queued and later connections to another process.
    fn leave_queue(&mut self, index: usize) {
        let listener = &mut self.listeners[index];
        let (queued, refused) =
            (std::mem::take(&mut listener.backlog), std::mem::take(&mut listener.refused));
        if !queued.is_empty() {
            self.cover.fault(Fault::QueueLeft);
        }
        for tag in queued {
            self.socks[tag].place = Place::Nowhere;
            self.socks[tag].peer.finished = true;
        }
        for tag in refused {
            self.kick(tag);
        }
    }

    fn next_in_backlog(&mut self, index: usize) -> Option<usize> {
        let tag = self.listeners[index].backlog.pop_front()?;
        self.listeners[index].owes = false;
        if let Some(refused) = self.listeners[index].refused.pop_front() {
            self.kick(refused);
        }
        Some(tag)
    }

    pub(super) fn open_descriptor(&mut self, tag: usize) -> i32 {
        self.socks[tag].place = Place::Descriptor;
        self.descriptors.open(tag)
    }

    /// The connection of a descriptor.
    pub fn descriptor(&self, fd: i32) -> usize {
        self.descriptors.get(fd)
    }

    pub(super) fn close_descriptor(&mut self, fd: i32) {
        let tag = self.descriptors.take(fd);
        self.drop_socket(tag);
    }

    /// Gives an accepted socket to another shard's file table, so that the descriptor is free.
    pub fn take_passed(&mut self, socket: Socket) -> usize {
        self.descriptors.take(socket.0 as i32)
    }

    /// Closes a socket that another shard did not take.
    pub fn close_passed(&mut self, socket: Socket) {
        self.close_descriptor(socket.0 as i32);
    }

    /// Closes a connection of another shard.
    pub fn drop_passed(&mut self, tag: usize) {
        self.drop_socket(tag);
    }

    pub(super) fn install(&mut self, id: ConnId, fd: i32) {
        let tag = self.descriptors.take(fd);
        if self.strikes(Fault::InstallFails) {
            self.socks[tag].excuses |= excuse::NOT_INSTALLED | excuse::SYSTEM;
            self.drop_socket(tag);
            return self
                .post(RawCqe::new(Kind::Install.with(id.bits()), -libc::ENOMEM, 0), Arm::InstallError);
        }
        if id.generation() > 0 {
            self.cover.fault(Fault::Reuse);
        }
        self.socks[tag].place = Place::Table;
        self.ring.files.install(id, tag);
    }
}
