//! What the shard wants done: connections that come and end, heartbeats, sockets for another shard.

use std::net::SocketAddr;

use ringserve_core::{ConnId, Event, Socket};

use super::World;
use crate::faults::Fault;
use crate::kernel::address_of;
use crate::service::{self, Session};

impl World {
    pub(super) fn work_off(&mut self) {
        while let Some(event) = self.core.next_event() {
            self.moved = true;
            match event {
                Event::Frames(id) => self.run_frames(id),
                Event::Accepted { socket, peer, .. } => {
                    let tag = self.state.borrow().descriptor(socket.0 as i32);
                    assert!(
                        peer.is_none_or(|peer| peer == address_of(tag)),
                        "a socket with another's address"
                    );
                    self.accept(socket, peer.map(|_| tag).unwrap_or(tag));
                }
                Event::Wake(_, waker) => waker.wake(),
                Event::Connected(id) => self.connected(id),
                Event::Heartbeat(id) => self.heartbeat(id),
                Event::InputEnded(id) => self.input_ended(id),
                Event::Elsewhere { socket, peer, listener } => self.pass_on(socket, peer, listener),
                Event::Ended { id, block, reason, opened, handler } => {
                    let state = &mut *self.state.borrow_mut();
                    let dropped = handler.map_or(Vec::new(), |first| self.tasks.cancel(first));
                    assert!(dropped.iter().all(|(_, parked)| parked.id == id), "another's handler");
                    if dropped.len() > 1 {
                        state.cover.fault(Fault::HandlersDropped);
                    }
                    let sock = &mut state.socks[block.session.tag];
                    let dropped: Vec<_> = dropped.into_iter().map(|(task, _)| task).collect();
                    let waiting: Vec<_> = sock.waiting.iter().rev().copied().collect();
                    assert_eq!(dropped, waiting, "{id}: of its parked handlers others are dropped");
                    assert_eq!(opened, sock.opened, "opened, or not");
                    service::close(state, &block, reason, self.now.as_nanos());
                    let sock = &mut state.socks[block.session.tag];
                    sock.waiting.clear();
                    sock.calls_full = false;
                    self.live.retain(|(known, _)| *known != id);
                    self.old.push(id);
                }
            }
        }
    }

    fn accept(&mut self, socket: Socket, tag: usize) {
        let state = self.state.clone();
        let mut state = state.borrow_mut();
        let unusual = state.plan.unusual;
        if state.rng.chance(unusual / 8) {
            state.cover.fault(Fault::AdmitRefuses);
            self.freed_turn = self.turn;
            return self.core.refuse(socket);
        }
        let listener = state.socks[tag].listener;
        let session = Session { tag, ..Session::default() };
        let id = self.core.admit(socket, Some(address_of(tag)), listener, session);
        let Some(id) = id else {
            let deadline = state.drain_deadline.unwrap_or(u64::MAX);
            assert!(state.forced || self.now.as_nanos() >= deadline, "there is memory");
            return;
        };
        if self.stopped_turn != u64::MAX {
            state.cover.fault(Fault::AdmittedLate);
        }
        drop(state);
        self.open(id, tag);
    }

    /// A connection is there.
    fn open(&mut self, id: ConnId, tag: usize) {
        let state = self.state.clone();
        let mut state = state.borrow_mut();
        assert!(self.core.connections() <= state.plan.connections_max, "more connections than there may be");
        let Some(block) = self.core.block(id).cloned() else { panic!("an admitted connection has a block") };
        let sock = &mut state.socks[tag];
        sock.opened_at = self.now.as_nanos();
        sock.active_at = self.now.as_nanos();
        sock.taken_at = self.now.as_nanos();
        sock.clocks.start(self.now.as_nanos());
        self.live.push((id, block.clone()));
        if service::open(&mut state, &block) {
            state.socks[tag].opened = true;
            self.core.opened(id);
        } else {
            self.core.refused(id);
        }
    }

    fn connected(&mut self, id: ConnId) {
        let Some(block) = self.core.block(id) else { panic!("{id} is connected, and has no block") };
        let tag = block.session.tag;
        self.open(id, tag);
    }

    fn heartbeat(&mut self, id: ConnId) {
        let Some(block) = self.core.block(id) else { return };
        let state = &mut *self.state.borrow_mut();
        state.log(|| format!("heartbeat of {id}, connection {}", block.session.tag));
        let (limits, sock) = (&state.plan.limits, &mut state.socks[block.session.tag]);
        assert!(sock.opened && sock.ended.is_none(), "{id} is not open, and is to give a sign of life");
        assert!(!sock.fin_asked, "{id} cannot say anything any more, and is to give a sign of life");
        sock.clocks.beat(limits, self.now.as_nanos());
        service::heartbeat(state, block);
    }

    fn input_ended(&mut self, id: ConnId) {
        let Some(block) = self.core.block(id) else { return };
        let state = &mut *self.state.borrow_mut();
        let sock = &state.socks[block.session.tag];
        assert!(sock.held && !sock.input_end_told, "{id} is not held open, or was told of its end before");
        assert!(sock.fin_read && sock.arrived == sock.read, "{id}: its peer may still send");
        assert!(sock.waiting.is_empty() && !state.has_frame(sock), "{id}: a frame is not answered");
        state.socks[block.session.tag].input_end_told = true;
        match service::input_ended(state, block) {
            Some(0) => service::close_held(state, block),
            Some(at) => self.closings.push((at, id)),
            None => {}
        }
    }

    fn pass_on(&mut self, socket: Socket, peer: Option<SocketAddr>, listener: u16) {
        let state = &mut *self.state.borrow_mut();
        let tag = state.descriptor(socket.0 as i32);
        assert!(peer.is_none_or(|peer| peer == address_of(tag)), "a socket with another's address");
        assert_eq!(listener, state.socks[tag].listener, "a socket with another's listener");
        assert!(self.stopped_turn >= self.turn, "a shard that closed its listeners passes on");
        let room = self.core.slots_left() > 0 && self.freed_turn != self.turn;
        assert!(!room, "there is room, and a socket is passed on");
        self.protocol.passed_on(socket);
        let elsewhere = self.elsewhere.as_mut().expect("there is no other shard");
        elsewhere.take(state, socket, listener);
    }
}
