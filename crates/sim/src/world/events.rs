//! Events of the shard for the service: connections that come and end, heartbeats, sockets for
//! another shard.

use std::net::SocketAddr;
use std::task::Waker;

use ringserve_core::{
    AcceptEnd, Completion, ConnHead, ConnId, ConnShared, EndedConn, Lane, LaneId, Page, RefusedBy, Socket,
};

use super::watched::Watched;
use super::{Above, Batch, Core, Opening};
use crate::faults::Fault;
use crate::kernel::address_of;
use crate::service::{self, Session};

/// The name of every `open` that waits, and bytes that it holds.
const OPEN: u32 = u32::MAX - 1;
const OPEN_BYTES: usize = 300;

impl Lane<Watched> for Above {
    fn begin(&mut self, core: &mut Core) {
        self.apply_orders(core);
        self.look_for_cuts(core);
        self.read_letters(core);
        self.looks = true;
    }

    fn on_completion(&mut self, core: &mut Core, completion: &Completion) {
        self.check_last(core);
        self.tally_completion(core, completion);
        self.note(completion);
        match completion {
            Completion::Sent { id, .. } => self.sent = Some(*id),
            Completion::Closed { .. } => self.freed_turn = self.turn,
            Completion::AcceptEnded { end: AcceptEnd::Closed, .. } => self.listeners_closed += 1,
            _ => {}
        }
    }

    fn accepted(&mut self, core: &mut Core, socket: Socket, peer: Option<SocketAddr>, _listener: u16) {
        self.happened(core);
        let tag = self.state.borrow().descriptor(socket.0 as i32);
        assert!(peer.is_none_or(|peer| peer == address_of(tag)), "a socket with another's address");
        self.accept(core, socket, tag);
    }

    fn hand_off(&mut self, core: &mut Core, socket: Socket, peer: Option<SocketAddr>, listener: u16) {
        self.happened(core);
        let state = &mut *self.state.borrow_mut();
        let tag = state.descriptor(socket.0 as i32);
        assert!(peer.is_none_or(|peer| peer == address_of(tag)), "a socket with another's address");
        assert_eq!(listener, state.socks[tag].listener, "a socket with another's listener");
        assert!(self.stopped_turn >= self.turn, "a shard that closed its listeners passes on");
        let room = core.slots_left() > 0 && self.freed_turn != self.turn;
        assert!(!room, "there is room, and a socket is passed on");
        self.protocol.passed_on(socket);
        let other = self.other_shard.as_mut().expect("there is no other shard");
        other.take(state, socket, listener);
    }

    fn connected(&mut self, core: &mut Core, id: ConnId) {
        self.happened(core);
        let Some(shared) = core.shared(id).map(session_of) else {
            panic!("{id} is connected, and has no session")
        };
        let tag = shared.body().tag;
        self.open(core, id, tag);
    }

    fn frames(&mut self, frames: &mut Batch<'_>) {
        assert_ne!(self.gone, Some(frames.id()), "a connection is gone, and has frames");
        self.happened(frames.shard());
        self.call_for_each_frame(frames);
    }

    fn heartbeat(&mut self, core: &mut Core, id: ConnId) {
        self.happened(core);
        let Some(shared) = core.shared(id).map(session_of) else { return };
        let state = &mut *self.state.borrow_mut();
        state.log(|| format!("heartbeat of {id}, connection {}", shared.body().tag));
        let (limits, sock) = (&state.plan.limits, &mut state.socks[shared.body().tag]);
        assert!(sock.opened && sock.ended.is_none(), "{id} is not open, and is to give a sign of life");
        assert!(!sock.fin_asked, "{id} cannot say anything any more, and is to give a sign of life");
        sock.clocks.beat(limits, self.now.as_nanos());
        service::heartbeat(state, &shared);
    }

    fn input_ended(&mut self, core: &mut Core, id: ConnId) {
        self.happened(core);
        let Some(shared) = core.shared(id).map(session_of) else { return };
        let state = &mut *self.state.borrow_mut();
        let sock = &state.socks[shared.body().tag];
        assert!(
            sock.held && !sock.input_end_notified,
            "{id} is not held open, or was told of its end before"
        );
        assert!(sock.fin_read && sock.arrived == sock.read, "{id}: its peer may still send");
        assert!(sock.waiting.is_empty() && !state.has_frame(sock), "{id}: a frame is not answered");
        state.socks[shared.body().tag].input_end_notified = true;
        match service::input_ended(state, &shared) {
            Some(0) => service::close_held(state, &shared),
            Some(at) => self.closings.push((at, id)),
            None => {}
        }
    }

    fn wake(&mut self, core: &mut Core, _id: ConnId, waker: Waker) {
        self.happened(core);
        waker.wake();
    }

    fn ended(&mut self, core: &mut Core, ended: EndedConn) {
        self.happened(core);
        let EndedConn { id, lane, shared, reason, opened, call } = ended;
        let shared = session_of(&shared);
        self.tally_ended(lane, reason);
        let state = &mut *self.state.borrow_mut();
        let opening = self.openings.iter().position(|opening| opening.id == id);
        assert_eq!(opening.is_some(), !opened && call == Some(OPEN), "{id}: an open that waits ends with it");
        if let Some(at) = opening {
            state.cover.fault(Fault::OpenDropped);
            self.openings.swap_remove(at);
        }
        let call = call.filter(|_| opened);
        let dropped = call.map_or(Vec::new(), |first| self.tasks.cancel(first));
        assert!(dropped.iter().all(|(_, parked)| parked.id == id), "another's handler");
        if dropped.len() > 1 {
            state.cover.fault(Fault::HandlersDropped);
        }
        let sock = &mut state.socks[shared.body().tag];
        assert_eq!(lane == self.lane, sock.upstream, "{id} ended on another lane");
        let dropped: Vec<_> = dropped.into_iter().map(|(task, _)| task).collect();
        let waiting: Vec<_> = sock.waiting.iter().rev().copied().collect();
        assert_eq!(dropped, waiting, "{id}: of its parked handlers others are dropped");
        assert_eq!(opened, sock.opened, "opened, or not");
        service::close(state, &shared, reason, self.now.as_nanos());
        let sock = &mut state.socks[shared.body().tag];
        sock.waiting.clear();
        sock.calls_full = false;
        self.live.retain(|(known, _)| *known != id);
        self.old.push(id);
    }

    fn page(&mut self, core: &mut Core, source: u32, page: &mut Page) -> bool {
        self.happened(core);
        self.push_page(source, page)
    }

    fn attend(&mut self, core: &mut Core) {
        self.check_last(core);
        self.run_openings(core);
        self.run_tasks(core);
        self.close_held(core);
        self.user_code(core);
        if let Some(id) = self.gone {
            core.run_frames(id, self);
            self.gone = None;
        }
        // Like the shard: not again before the driver is done with it.
        let rests = self.state.borrow().rests;
        self.gives_back_now = !rests && self.gives_back > 0 && self.turn.is_multiple_of(self.gives_back);
        if self.gives_back_now {
            // Parked receives are tried once more, whether or not there is a buffer.
            self.state.borrow_mut().dry_in_a_row = 0;
            core.give_back();
        }
    }
}

impl Above {
    /// Handles a request of the shard.
    fn happened(&mut self, core: &Core) {
        self.moved = true;
        self.check_sent(core);
    }

    /// Checks that the effects of the last completion are done.
    fn check_last(&mut self, core: &Core) {
        self.check_sent(core);
        if std::mem::take(&mut self.looks) {
            self.look();
        }
    }

    /// Checks that the shard was informed of a send that is over.
    fn check_sent(&mut self, core: &Core) {
        self.check_relieved(core);
        if let Some(sent) = self.sent.take() {
            self.look_after(sent);
        }
    }

    fn accept(&mut self, core: &mut Core, socket: Socket, tag: usize) {
        let state = self.state.clone();
        let mut state = state.borrow_mut();
        let (unusual, listener) = (state.plan.unusual, state.socks[tag].listener);
        if state.rng.chance(unusual / 8) {
            state.cover.fault(Fault::AdmitRefuses);
            self.freed_turn = self.turn;
            return core.refuse(socket, listener, RefusedBy::Admit);
        }
        let Some(id) = core.admit::<Session>(socket, Some(address_of(tag)), listener) else {
            let deadline = state.drain_deadline.unwrap_or(u64::MAX);
            assert!(state.aborted || self.now.as_nanos() >= deadline, "there is memory");
            return;
        };
        if self.stopped_turn != u64::MAX {
            state.cover.fault(Fault::AdmittedLate);
        }
        let session = Session { tag, ..Session::default() };
        assert!(
            core.shared(id).is_some_and(|head| head.fill(session).is_ok()),
            "a new connection has no session"
        );
        drop(state);
        self.tally(LaneId::FIRST).opened += 1;
        self.open(core, id, tag);
    }

    /// Opens a connection.
    fn open(&mut self, core: &mut Core, id: ConnId, tag: usize) {
        let state = self.state.clone();
        let mut state = state.borrow_mut();
        assert!(
            core.connections(LaneId::FIRST) <= state.plan.connections_max,
            "more connections than there may be"
        );
        let Some(shared) = core.shared(id).map(session_of) else {
            panic!("an admitted connection has a session")
        };
        let sock = &mut state.socks[tag];
        sock.opened_at = self.now.as_nanos();
        sock.accepted_at = sock.opened_at;
        (sock.active_at, sock.used_at) = (self.now.as_nanos(), self.now.as_nanos());
        sock.taken_at = self.now.as_nanos();
        sock.clocks.start(self.now.as_nanos());
        self.live.push((id, shared.clone()));
        let accepts = service::open(&mut state, &shared);
        self.may_begin_deadline(&mut state, &shared);
        let Some(due) = state.open_waits_until(tag) else {
            drop(state);
            return self.opened(core, id, tag, accepts);
        };
        state.cover.fault(Fault::OpenWaits);
        drop(state);
        let bytes = core.open_parked(id, OPEN, OPEN_BYTES);
        self.openings.push(Opening { id, tag, due, accepts, bytes });
    }

    /// Ends an `open`.
    fn opened(&mut self, core: &mut Core, id: ConnId, tag: usize, accepts: bool) {
        if accepts {
            self.state.borrow_mut().socks[tag].opened = true;
            core.opened(id);
        } else {
            core.refused(id, RefusedBy::Open);
        }
    }

    /// Continues each `open` whose time has come.
    fn run_openings(&mut self, core: &mut Core) {
        while let Some(at) = self.openings.iter().position(|opening| opening.due <= self.now.as_nanos()) {
            let Opening { id, tag, accepts, bytes, .. } = self.openings.swap_remove(at);
            self.moved = true;
            let now = self.now.as_nanos();
            self.state.borrow_mut().socks[tag].let_in(now);
            core.open_done(id, OPEN, bytes);
            self.opened(core, id, tag, accepts);
            core.run_frames(id, self);
            core.dispatch(self);
        }
    }
}

/// The service's state of a connection: all lanes of the world have sessions of one type.
pub(super) fn session_of(shared: &ConnHead) -> ConnShared<Session> {
    shared.downcast_ref().cloned().expect("every session is of one type")
}
