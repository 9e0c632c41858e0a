//! Shutting down and closing, and their effect on the peer.

use ringserve_core::{CloseHow, ConnId};
use ringserve_drivers::kernel::{Kind, RawCqe};

use super::State;
use super::peers::sock_reset;
use crate::faults::{Arm, Fault};
use crate::sock::Place;

impl State {
    pub(super) fn shutdown(&mut self, id: ConnId) {
        let done = |res| RawCqe::new(Kind::Shutdown.with(id.bits()), res, 0);
        let Some(tag) = self.ring.files.get(id) else {
            return self.post(done(-libc::EBADF), Arm::ShutdownError);
        };
        assert!(!self.socks[tag].fin_asked, "{id} is shut down twice");
        assert!(self.socks[tag].connected, "{id} is shut down before it is connected");
        self.socks[tag].fin_asked = true;
        if self.socks[tag].reset || self.strikes(Fault::ShutdownFails) {
            return self.post(done(-libc::ENOTCONN), Arm::ShutdownError);
        }
        assert!(!self.is_sending(tag), "{id} is shut down under its send");
        self.socks[tag].server_fin = true;
        self.kick(tag);
        self.post_or_late(done(0), Arm::Shutdown, Fault::CloseLate);
    }

    /// Ends the connection's receive, if there is one.
    pub(super) fn shut_input_down(&mut self, id: ConnId) {
        let done = |res| RawCqe::new(Kind::Shutdown.with(id.bits()), res, 0);
        if self.ring.files.get(id).is_none() {
            return self.post(done(-libc::EBADF), Arm::ShutdownError);
        }
        self.end_receive_of(id);
        self.post_or_late(done(0), Arm::ShutdownInput, Fault::CloseLate);
    }

    pub(super) fn close(&mut self, id: ConnId, how: CloseHow) {
        let done = |res| RawCqe::new(Kind::Close.with(id.bits()), res, 0);
        let Some(tag) = self.ring.close(id) else {
            return self.post(done(-libc::EBADF), Arm::CloseError);
        };
        self.check_close(tag, how);
        let arm = match how {
            CloseHow::Abort => Arm::CloseAbort,
            CloseHow::Orderly if self.socks[tag].unread() > 0 => Arm::CloseUnread,
            CloseHow::Orderly => Arm::CloseOrderly,
        };
        if how == CloseHow::Abort {
            sock_reset(&mut self.socks[tag]);
        }
        self.drop_socket(tag);
        self.post_or_late(done(0), arm, Fault::CloseLate);
    }

    /// Closes the server's end: with FIN, or with RST if it left bytes unread.
    pub(super) fn drop_socket(&mut self, tag: usize) {
        let sock = &mut self.socks[tag];
        if sock.unread() > 0 {
            sock_reset(sock);
        }
        sock.server_fin = true;
        sock.server_closed = true;
        sock.peer.finished |= !sock.connected;
        sock.place = Place::Closed;
        self.kick(tag);
    }

    /// Closes the remaining listeners: connections that still wait in their backlogs are reset.
    pub fn close_listeners(&mut self) {
        for index in 0..self.listeners.len() {
            self.reset_backlog(index);
        }
    }

    pub(super) fn reset_backlog(&mut self, index: usize) {
        self.listeners[index].closed = true;
        while let Some(tag) = self.listeners[index].backlog.pop_front() {
            sock_reset(&mut self.socks[tag]);
            self.drop_socket(tag);
        }
    }
}
