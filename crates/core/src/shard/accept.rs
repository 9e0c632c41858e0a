//! Accepting: pauses at limits, resumes when there is room.

use alloc::collections::VecDeque;
use alloc::rc::Rc;
use alloc::vec::Vec;
use core::net::SocketAddr;
use core::time::Duration;

use super::{Event, Shard};
use crate::conn::Conn;
use crate::framing::Framing;
use crate::link::{Block, Link};
use crate::{AcceptEnd, CloseReason, ConnId, Observer, Op, Socket, Time};

/// How long accepting rests after the kernel refused it: ten attempts a second find a freed descriptor soon
/// and cost nothing.
const RETRY: Duration = Duration::from_millis(100);

/// Accepting, over all listeners of the shard.
pub(super) struct Accepting {
    listeners: Vec<Listener>,
    connections_max: usize,
    /// Sockets that were on the way when the limit was reached, first in, first out.
    waiting: VecDeque<(u16, Socket, Option<SocketAddr>)>,
    /// Connections handed out as [`Event::Accepted`] and not answered yet.
    asked: usize,
    retry_at: Option<Time>,
    /// A limit holds accepting back.
    paused: bool,
}

#[derive(Clone, Copy, Default)]
struct Listener {
    armed: bool,
    stopping: bool,
}

impl Accepting {
    pub(super) fn new(listeners: u16, connections_max: usize) -> Accepting {
        Accepting {
            listeners: (0..listeners).map(|_| Listener::default()).collect(),
            connections_max,
            waiting: VecDeque::new(),
            asked: 0,
            retry_at: None,
            paused: false,
        }
    }

    pub(super) fn retry_at(&self) -> Option<Time> {
        self.retry_at
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.waiting.is_empty() && self.listeners.iter().all(|listener| !listener.armed)
    }
}

impl<S, F: Framing, O: Observer> Shard<S, F, O> {
    pub(super) fn accepted(&mut self, listener: u16, socket: Socket, peer: Option<SocketAddr>) {
        self.counters.accepted += 1;
        if self.drain.is_some() {
            self.counters.refused += 1;
            self.ops.push(Op::Refuse { socket });
        } else if self.has_room() && self.accepting.waiting.is_empty() {
            self.ask(listener, socket, peer);
        } else {
            self.counters.waited += 1;
            self.accepting.waiting.push_back((listener, socket, peer));
            self.sync_accept();
        }
    }

    fn ask(&mut self, listener: u16, socket: Socket, peer: Option<SocketAddr>) {
        self.accepting.asked += 1;
        self.events.push_back(Event::Accepted { socket, peer, listener });
    }

    fn has_room(&self) -> bool {
        self.conns.len() + self.accepting.asked < self.accepting.connections_max
    }

    /// Makes an accepted socket a connection. `None` if there is no memory for it; the socket is closed then.
    /// The next call for it is [`opened`](Shard::opened) or [`finish`](Shard::finish).
    pub fn admit(
        &mut self,
        socket: Socket,
        peer: Option<SocketAddr>,
        listener: u16,
        session: S,
    ) -> Option<ConnId> {
        self.accepting.asked -= 1;
        let (local, now) = (&self.local, self.now);
        let made = self.conns.insert_with(|id| {
            let link = Link::new(id, local.clone(), peer, listener);
            Conn::new(Rc::new(Block { link, session }), now)
        });
        let Some(id) = made else {
            self.counters.refused += 1;
            self.ops.push(Op::Refuse { socket });
            return None;
        };
        self.counters.opened += 1;
        self.observer.opened(now, id, peer);
        self.ops.push(Op::Adopt { id, socket });
        if !self.has_room() {
            self.sync_accept();
        }
        Some(id)
    }

    /// Closes an accepted socket that is not admitted.
    pub fn refuse(&mut self, socket: Socket) {
        self.accepting.asked -= 1;
        self.counters.refused += 1;
        self.ops.push(Op::Refuse { socket });
        self.serve_waiting();
    }

    /// The service accepted an admitted connection: bytes are received from now on.
    pub fn opened(&mut self, id: ConnId) {
        if let Some(conn) = self.conns.get_mut(id) {
            conn.opened = true;
        }
        self.sync_receive(id);
        self.arm(id);
    }

    pub(super) fn accept_ended(&mut self, listener: u16, end: AcceptEnd) {
        if let Some(listener) = self.accepting.listeners.get_mut(usize::from(listener)) {
            *listener = Listener::default();
        }
        if end != AcceptEnd::Stopped {
            self.accepting.retry_at = Some(self.now + RETRY);
        }
        self.sync_accept();
    }

    /// A slot is free, or a descriptor may be.
    pub(super) fn room_made(&mut self) {
        if let Some(retry_at) = &mut self.accepting.retry_at {
            *retry_at = (*retry_at).min(self.now + RETRY / 10);
        }
        self.serve_waiting();
    }

    fn serve_waiting(&mut self) {
        while self.has_room() {
            let Some((listener, socket, peer)) = self.accepting.waiting.pop_front() else { break };
            self.ask(listener, socket, peer);
        }
        self.sync_accept();
    }

    /// Arms or stops each listener as the limits say.
    pub(super) fn sync_accept(&mut self) {
        if self.accepting.retry_at.is_some_and(|at| at <= self.now) {
            self.accepting.retry_at = None;
        }
        let held =
            !self.has_room() || !self.accepting.waiting.is_empty() || self.accepting.retry_at.is_some();
        let draining = self.drain.is_some();
        if held != self.accepting.paused && !draining {
            self.accepting.paused = held;
            self.counters.accept_paused += u64::from(held);
            self.observer.accept_paused(self.now, held);
        }
        for (n, state) in self.accepting.listeners.iter_mut().enumerate() {
            let listener = n as u16;
            if held || draining {
                if state.armed && !state.stopping {
                    state.stopping = true;
                    self.ops.push(Op::AcceptStop { listener });
                }
            } else if !state.armed {
                state.armed = true;
                self.ops.push(Op::Accept { listener });
            }
        }
    }

    /// Nobody waiting becomes a connection any more.
    pub(super) fn refuse_waiting(&mut self) {
        for (_, socket, _) in self.accepting.waiting.drain(..) {
            self.counters.refused += 1;
            self.ops.push(Op::Refuse { socket });
        }
    }

    /// Closes a connection that `open` refused, after what it was told.
    pub fn refused(&mut self, id: ConnId) {
        self.counters.refused += 1;
        self.finish(id, CloseReason::Refused);
    }
}
