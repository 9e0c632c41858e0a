//! The driver's side: operations taken, completions delivered.

use ringserve_buf::LeaseMut;
use ringserve_core::{AcceptEnd, Completion, ConnId, Op, ReceiveEnd, SendEnd, Socket};

use super::{Model, Rig};
use crate::wire::{Talk, Wire};

/// The state of a listening socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Listening {
    /// It listens until it is stopped.
    Open,
    /// Queued connections may come, then the end.
    Stopping,
    /// The end came.
    Closed,
}

/// The result of a connect that was stopped.
pub const ECANCELED: i32 = 125;

impl Rig {
    /// Takes the operations of the turn.
    pub(super) fn hand_over(&mut self) {
        let awaited = self.shard.take_send_awaited();
        let ops: Vec<Op> = self.shard.take_ops().collect();
        let mut unawaited = Vec::new();
        for op in ops {
            if let Op::Send { id, .. } = &op
                && !awaited
            {
                unawaited.push(*id);
            }
            self.model.submit(op);
        }
        self.model.check(&self.shard, &unawaited);
    }

    /// Delivers a completion.
    fn complete(&mut self, completion: Completion) {
        self.model.completions += 1;
        self.shard.complete(completion, &mut self.model);
    }

    /// Connects a peer, if a listener accepts.
    pub fn accept(&mut self, listener: u16) {
        if self.model.accepts[usize::from(listener)].armed {
            let socket = self.model.connect();
            self.complete(Completion::Accepted { listener, socket, peer: None });
        }
    }

    /// Accepts a connection that another shard passes on.
    pub fn accept_elsewhere(&mut self, listener: u16) {
        if self.model.plan.others && !self.shard.is_done() {
            self.model.came += 1;
            let socket = self.model.connect();
            self.shard.take_handed_off(listener, socket, None);
            self.shard.dispatch(&mut self.model);
        }
    }

    /// Ends accepting: with this end, or as requested.
    pub fn end_accept(&mut self, listener: u16, end: Option<AcceptEnd>) {
        let accept = &mut self.model.accepts[usize::from(listener)];
        if accept.armed && (accept.stopping || end.is_some()) {
            accept.end(self.model.turn);
            let listening = &mut self.model.listening[usize::from(listener)];
            let end = match listening {
                Listening::Open => end.unwrap_or(AcceptEnd::Stopped),
                Listening::Stopping | Listening::Closed => AcceptEnd::Closed,
            };
            if end == AcceptEnd::Closed {
                *listening = Listening::Closed;
            }
            self.complete(Completion::AcceptEnded { listener, end });
        }
    }

    /// Delivers at most `bytes_max` bytes of a peer, as one receive does. False if that is not
    /// possible now.
    pub fn deliver(&mut self, wire: usize, bytes_max: usize) -> bool {
        let Some(wire) = self.model.wires.get_mut(wire) else { return false };
        if !wire.receive.armed || wire.unread.is_empty() || bytes_max == 0 {
            return false;
        }
        if let Some((mut block, most)) = wire.into.take() {
            let count = bytes_max.min(wire.unread.len()).min(most);
            let bytes: Vec<u8> = wire.unread.drain(..count).collect();
            block.spare(count).copy_from_slice(&bytes);
            block.advance(count);
            wire.receive.end(self.model.turn);
            let (id, peer) = (wire.id, wire.peer);
            self.hear(id, peer, &bytes);
            self.complete(Completion::Filled { id, block, bytes: count, end: ReceiveEnd::Stopped });
            return true;
        }
        let Some(buffer) = self.model.side.lend() else { return false };
        let spare = self.model.side.spare(buffer);
        let count = bytes_max.min(wire.unread.len()).min(spare.len());
        let bytes: Vec<u8> = wire.unread.drain(..count).collect();
        spare[..count].copy_from_slice(&bytes);
        let lease = self.model.side.received(buffer, count);
        let (id, peer) = (wire.id, wire.peer);
        self.receive(id, peer, &bytes, lease);
        true
    }

    /// Delivers all bytes of a peer as one block of the heap.
    pub fn deliver_copy(&mut self, wire: usize) {
        let Some(wire) = self.model.wires.get_mut(wire) else { return };
        if wire.receive.armed && wire.into.is_none() && !wire.unread.is_empty() {
            let bytes: Vec<u8> = wire.unread.drain(..).collect();
            let (id, peer) = (wire.id, wire.peer);
            self.receive(id, peer, &bytes, LeaseMut::try_copy_of(&bytes).unwrap());
        }
    }

    fn receive(&mut self, id: ConnId, peer: usize, bytes: &[u8], lease: LeaseMut) {
        self.hear(id, peer, bytes);
        let turn = self.model.turn;
        let wire = self.model.wires.iter_mut().find(|wire| wire.id == id);
        let ends = wire.filter(|wire| wire.once).map(|wire| wire.receive.end(turn)).is_some();
        self.complete(Completion::Received { id, lease });
        if ends {
            self.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Stopped });
        }
    }

    /// Delivers bytes of a peer to the shard.
    fn hear(&mut self, id: ConnId, peer: usize, bytes: &[u8]) {
        let talk = &mut self.model.talks[peer];
        if self.shard.is_cut(id) {
            self.model.thrown_away += bytes.len();
        } else {
            talk.received.extend_from_slice(bytes);
        }
        if self.model.live.get(&id).is_some_and(|shared| !shared.is_gone()) {
            talk.heard = self.model.now;
        }
    }

    /// Ends receiving: with this end, after all bytes of the peer, or as requested.
    pub fn end_receive(&mut self, index: usize, end: Option<ReceiveEnd>) {
        if end == Some(ReceiveEnd::Eof) {
            while self.deliver(index, usize::MAX) {}
        }
        let Some(wire) = self.model.wires.get_mut(index) else { return };
        let kept = end == Some(ReceiveEnd::Eof) && !wire.unread.is_empty();
        if wire.receive.armed && !kept && (wire.receive.stopping || end.is_some()) {
            wire.receive.end(self.model.turn);
            wire.read_over |= end.is_some();
            let (id, end) = (wire.id, end.unwrap_or(ReceiveEnd::Stopped));
            let over = match wire.into.take() {
                Some((block, _)) => Completion::Filled { id, block, bytes: 0, end },
                None => Completion::ReceiveEnded { id, end },
            };
            self.complete(over);
        }
    }

    /// Takes at most `bytes_max` bytes of the send in flight, as the kernel does. The last byte is
    /// left, so that it does not end.
    pub fn take_bytes(&mut self, wire: usize, bytes_max: usize) {
        let Some(wire) = self.model.wires.get_mut(wire) else { return };
        if let Some(batch) = &mut wire.batch {
            let count = bytes_max.min(batch.len() - 1);
            batch.advance(count);
            batch.invariants();
            self.model.talks[wire.peer].taken += count;
            self.model.talks[wire.peer].check_batch(batch);
        }
    }

    /// Ends the send in flight.
    pub fn end_send(&mut self, wire: usize, end: SendEnd) {
        let Some(wire) = self.model.wires.get_mut(wire) else { return };
        if end == SendEnd::Stopped && !wire.send.stopping {
            return;
        }
        let Some(mut batch) = wire.batch.take() else { return };
        if end == SendEnd::Done {
            self.model.talks[wire.peer].taken += batch.len();
            batch.advance(batch.len());
        }
        wire.send.end(self.model.turn);
        let id = wire.id;
        self.complete(Completion::Sent { id, batch, end });
    }

    /// Ends a connect.
    pub fn end_connect(&mut self, wire: usize, result: Result<(), i32>) {
        let Some(wire) = self.model.wires.get_mut(wire) else { return };
        if wire.connect.armed && (wire.connect.stopping || result != Err(ECANCELED)) {
            wire.connect.end(self.model.turn);
            let id = wire.id;
            self.complete(Completion::Connected { id, result });
        }
    }

    /// Completes a shutdown.
    pub fn end_shutdown(&mut self, wire: usize) {
        let Some(wire) = self.model.wires.get_mut(wire) else { return };
        if std::mem::take(&mut wire.shutdown) {
            let id = wire.id;
            self.complete(Completion::ShutDown { id });
        }
    }

    /// Completes a close.
    pub fn end_close(&mut self, wire: usize) {
        if self.model.wires.get(wire).is_some_and(|wire| wire.close.is_some()) {
            let wire = self.model.wires.remove(wire);
            self.complete(Completion::Closed { id: wire.id });
        }
    }

    /// Completes all operations. If peers are `cooperative`, they take every byte, and close when
    /// the server did. False if there was nothing to do.
    pub fn answer_all(&mut self, cooperative: bool) -> bool {
        let before = self.model.completions;
        for listener in 0..self.model.plan.listeners {
            self.end_accept(listener, None);
        }
        for wire in (0..self.model.wires.len()).rev() {
            let shut = self.model.wires[wire].shutdown;
            self.end_connect(wire, Err(ECANCELED));
            if cooperative {
                self.end_connect(wire, Ok(()));
                self.end_send(wire, SendEnd::Done);
            }
            self.end_send(wire, SendEnd::Stopped);
            self.end_receive(wire, None);
            self.end_shutdown(wire);
            if cooperative && shut {
                self.end_receive(wire, Some(ReceiveEnd::Eof));
            }
            self.end_close(wire);
        }
        self.model.completions > before
    }
}

impl Model {
    fn submit(&mut self, op: Op) {
        let turn = self.turn;
        match op {
            Op::Accept { listener } => {
                assert_eq!(self.listening[usize::from(listener)], Listening::Open, "accept at {listener}");
                self.accepts[usize::from(listener)].start("accept");
            }
            Op::AcceptStop { listener } => self.accepts[usize::from(listener)].stop(turn, "accept"),
            Op::StopListening { listener } => {
                let listening = &mut self.listening[usize::from(listener)];
                assert_eq!(*listening, Listening::Open, "listener {listener} is closed twice");
                *listening = Listening::Stopping;
                let accept = &mut self.accepts[usize::from(listener)];
                (accept.armed, accept.stopping) = (true, true);
            }
            Op::Refuse { socket } => self.socket_leaves(socket),
            Op::Adopt { id, socket } => {
                self.socket_leaves(socket);
                let taken = self.wires.iter().any(|wire| wire.id.slot() == id.slot());
                assert!(!taken, "{id} is adopted in a slot that is taken");
                self.wires.push(Wire::new(id, socket.0 as usize));
            }
            Op::Connect { id, .. } => {
                let taken = self.wires.iter().any(|wire| wire.id.slot() == id.slot());
                assert!(!taken, "{id} connects in a slot that is taken");
                // It may have ended already.
                let mut wire = Wire::new(id, self.upstreams[&id]);
                wire.connect.start("connect");
                self.wires.push(wire);
            }
            Op::ConnectStop { id }
            | Op::Receive { id }
            | Op::ReceiveOnce { id, .. }
            | Op::ReceiveInto { id, .. }
            | Op::ReceiveStop { id }
            | Op::ShutdownInput { id }
            | Op::Probe { id }
            | Op::Send { id, .. }
            | Op::SendStop { id }
            | Op::Shutdown { id }
            | Op::Close { id, .. } => {
                let Some(wire) = self.wires.iter_mut().find(|wire| wire.id == id) else {
                    panic!("{op:?} for a name that is not adopted")
                };
                if let Op::Send { batch, .. } = &op {
                    batch.invariants();
                    self.talks[wire.peer].check_batch(batch);
                }
                wire.submit(op, turn);
            }
        }
    }

    pub(super) fn socket_leaves(&mut self, socket: Socket) {
        let place = self.sockets.iter().position(|known| *known == socket.0);
        self.sockets.swap_remove(place.expect("a socket that was not accepted, or left already"));
    }

    fn connect(&mut self) -> Socket {
        let socket = Socket(self.talks.len() as u64);
        self.talks.push(Talk::default());
        self.sockets.push(socket.0);
        socket
    }
}
