//! A shard between a driver that keeps the contract and a service that does anything, with a model of both.
//!
//! What is checked, beside the shard's own invariants after every turn:
//!
//! * frames: each one is the next in the bytes its peer sent, and within the limit;
//! * replies: each send carries exactly the bytes the service said next, and an orderly end left none behind;
//! * the driver's contract: one receive, one send, one shutdown in flight; a stop once, for what is in flight;
//!   a close for what is idle; nothing for a name that is not adopted;
//! * the caller's contract: one end for each connection, with the calls that it left waiting, and none where the
//!   peer's end or a drain had to wait for them;
//! * the pool: no buffer lost or in two places; none leased at the end;
//! * nothing stands still: no reply waits without a send, no frame without a reason, no handler for room that
//!   is there; a drain ends.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ringserve_buf::{KernelSide, Lease, Pool, PoolConfig};
use ringserve_core::{
    AcceptEnd, Block, CloseReason, Completion, ConnId, Event, Frame, Limits, Next, Op, Quota, Reach,
    ReceiveEnd, SendEnd, Shard, Socket, Time, Wait,
};

use crate::framings::{Checked, Kind, Start};
use crate::service::{Called, Flag, Task};
use crate::wire::{Flight, Talk, Wire};

/// Turns in a row, without a completion and without time passing, for which a shard may refuse to sleep. Each takes
/// 1024 frames off every connection, and inputs are shorter than that.
const BUSY_TURNS_MAX: u32 = 50;

/// Turns within which a drain hands out a frame, sends a byte or is over. Each lets the shard sleep until its next
/// time limit.
const DRAIN_TURNS_MAX: u32 = 500;

/// Longer than any time limit in use; a shard that waits for its driver alone sleeps as long as it likes.
const NAP_MAX: Duration = Duration::from_secs(60);

/// Time limits go off this much late at most: two steps of the shard's wheel.
const LATE_MAX: Duration = Duration::from_millis(34);

/// Connections at most over this shard and those it shares them with: fewer than it may hold at most.
const QUOTA: usize = 3;

/// How a run is set up.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The framing.
    pub kind: Kind,
    /// The limits; they pass their check.
    pub limits: Limits,
    /// Buffers in the pool.
    pub buffers: usize,
    /// Several receives share a buffer.
    pub incremental: bool,
    /// Frames are copied out of their buffers.
    pub copy_frames: bool,
    /// Connections at most.
    pub connections_max: usize,
    /// Listeners.
    pub listeners: u16,
    /// Handlers only echo.
    pub echo_only: bool,
    /// The service holds connections open beyond the peer's end.
    pub hold_open: bool,
    /// There are other shards, with which connections are shared.
    pub others: bool,
}

/// The user's state of a connection.
#[derive(Debug, Default)]
pub struct Session {
    /// Which peer it is.
    pub peer: usize,
    /// Frames that are kept.
    pub kept: RefCell<Vec<Frame>>,
    /// Set when the outbox has room again, for all calls that wait for that.
    pub room: RefCell<Option<Arc<Flag>>>,
    /// The service ended its side of the stream.
    pub writing_ended: Cell<bool>,
    /// The service reads on while its outbox is full.
    pub reads_on: Cell<bool>,
    /// What other threads know of it, if they do.
    pub reach: RefCell<Option<Arc<Reach>>>,
}

/// A connection as the service has it.
pub type Conn = Rc<Block<Session>>;

/// See the module.
pub struct Rig {
    /// How it is set up.
    pub plan: Plan,
    /// Under test.
    pub shard: Shard<Session, Checked>,
    /// Receive memory.
    pub pool: Pool,
    /// Adopted and not closed, in that order.
    pub wires: Vec<Wire>,
    /// Every peer that was ever accepted, by its socket's number.
    pub talks: Vec<Talk>,
    /// Connections that did not end.
    pub live: BTreeMap<ConnId, Conn>,
    /// Every name there ever was.
    names: BTreeSet<ConnId>,
    /// Connections that ended and the service still names.
    pub old: Vec<Conn>,
    /// Handlers that are parked, by the number the shard knows them by.
    pub tasks: Vec<Option<Task>>,
    /// How the service answers the next connections.
    pub opening: u8,
    /// Frames handed to the service.
    pub frames: u64,
    /// How connections ended, in order.
    pub ends: Vec<(usize, CloseReason)>,
    accepts: Vec<Flight>,
    /// Accepted sockets that were neither adopted nor refused.
    sockets: Vec<u64>,
    /// Sockets that came from other shards, and that went there.
    came: u64,
    went: u64,
    quota: Arc<Quota>,
    side: KernelSide,
    /// The buffer that receives share.
    shared_buffer: Option<u16>,
    turn: u64,
    now: Time,
    order: Order,
    /// Completions delivered.
    completions: u64,
}

/// What the shard is told at the start of the next turn.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Order {
    /// Nothing.
    Serve,
    /// To drain.
    Drain,
    /// To stop at once.
    Force,
}

impl Rig {
    /// A shard in its first turn, which accepts.
    pub fn new(plan: Plan) -> Rig {
        assert_eq!(plan.limits.check(), Ok(()));
        let config = PoolConfig {
            buffer_bytes: plan.limits.receive_buffer_bytes,
            buffers_max: plan.buffers,
            poison: true,
        };
        let (pool, side) = Pool::new(config).expect("sizes are within their ranges");
        let framing = Checked { kind: plan.kind, frame_bytes_max: plan.limits.frame_bytes_max };
        let (limits, max) = (plan.limits.clone(), plan.connections_max);
        let mut shard = Shard::new(limits, max, plan.listeners, framing, pool.clone(), ());
        if plan.copy_frames {
            shard.copy_frames();
        }
        let quota = Arc::new(Quota::new(QUOTA));
        if plan.others {
            shard.share_quota(quota.clone());
        }
        shard.begin_turn(Time::ZERO);
        Rig {
            accepts: (0..plan.listeners).map(|_| Flight::default()).collect(),
            plan,
            shard,
            pool,
            wires: Vec::new(),
            talks: Vec::new(),
            live: BTreeMap::new(),
            names: BTreeSet::new(),
            old: Vec::new(),
            tasks: Vec::new(),
            opening: 0,
            frames: 0,
            ends: Vec::new(),
            sockets: Vec::new(),
            came: 0,
            went: 0,
            quota,
            side,
            shared_buffer: None,
            turn: 1,
            now: Time::ZERO,
            order: Order::Serve,
            completions: 0,
        }
    }

    /// Ends the turn, checks, and begins the next one after `pause`.
    pub fn next_turn(&mut self, pause: Duration) {
        self.shard.end_turn();
        self.work_off();
        self.hand_over();
        self.turn += 1;
        self.now = self.now + pause;
        // The others have room for a while, and none for as long.
        self.shard.set_room_elsewhere(self.plan.others && self.turn % 16 < 8);
        self.shard.begin_turn(self.now);
        match std::mem::replace(&mut self.order, Order::Serve) {
            Order::Serve => {}
            Order::Drain => self.shard.drain(),
            Order::Force => self.shard.force(),
        }
        self.work_off();
    }

    /// Sleeps as long as the shard allows if nothing happens, at most [`NAP_MAX`], and begins the next turn.
    pub fn sleep(&mut self) {
        let mut busy = 0;
        loop {
            self.next_turn(Duration::ZERO);
            match self.shard.wait() {
                Wait::For(pause) => {
                    assert!(!pause.is_zero(), "a sleep of no time");
                    return self.next_turn(pause.min(NAP_MAX));
                }
                Wait::Forever => return,
                Wait::No => busy += 1,
            }
            assert!(busy <= BUSY_TURNS_MAX, "the shard does not sleep, and does nothing");
        }
    }

    /// The next turn begins with this.
    pub fn order(&mut self, order: Order) {
        self.order = self.order.max(order);
    }

    /// Drains, and checks that nothing is left. Peers and handlers that cooperate finish what they began.
    pub fn finish(mut self, cooperative: bool) {
        self.order(Order::Drain);
        let (mut turns, mut before) = (0, self.progress());
        while !self.shard.is_done() {
            let progress = self.progress();
            turns = if progress > before { 0 } else { turns + 1 };
            before = progress;
            assert!(turns <= DRAIN_TURNS_MAX, "the drain does not end: {:?}", self.wires);
            self.next_turn(Duration::ZERO);
            if !self.answer_all(cooperative) {
                self.sleep();
            }
            if cooperative {
                for task in 0..self.tasks.len() {
                    self.resume(task, Called::Done);
                }
            }
        }
        self.shard.end_turn();
        self.work_off();
        self.hand_over();
        assert!(self.wires.is_empty() && self.sockets.is_empty() && self.live.is_empty());
        assert!(self.accepts.iter().all(|accept| !accept.armed), "an accept did not end");
        assert!(self.tasks.iter().all(Option::is_none), "a parked handler is forgotten");
        let counters = self.shard.counters().clone();
        assert_eq!((counters.opened, counters.frames), (self.ends.len() as u64, self.frames));
        assert_eq!(counters.closed, self.ends.len() as u64);
        assert_eq!(counters.closed, counters.reasons().map(|(_, count)| count).sum::<u64>());
        assert_eq!((counters.accepted + self.came, counters.passed_on), (self.talks.len() as u64, self.went));
        let received: usize = self.talks.iter().map(|talk| talk.received.len()).sum();
        assert_eq!(counters.bytes_received, received as u64);
        let quota = format!("{:?}", self.quota);
        assert!(quota.contains("used: 0,"), "some is not given back: {quota}");
        self.old.clear();
        drop(self.shard);
        if let Some(buffer) = self.shared_buffer.take() {
            self.side.take_back(buffer);
        }
        self.pool.invariants();
        let counts = self.pool.counts();
        assert_eq!((counts.leased, counts.with_kernel), (0, 0), "a buffer is not given back");
    }

    /// Frames handed out and bytes taken. Peers and the service have only so many of them.
    fn progress(&self) -> u64 {
        self.frames + self.talks.iter().map(|talk| talk.taken as u64).sum::<u64>()
    }

    /// The driver takes the operations of the turn.
    fn hand_over(&mut self) {
        let awaited = self.shard.take_send_awaited();
        let ops: Vec<Op> = self.shard.take_ops().collect();
        let mut unawaited = Vec::new();
        for op in ops {
            if let Op::Send { id, .. } = &op
                && !awaited
            {
                unawaited.push(*id);
            }
            self.submit(op);
        }
        self.check(&unawaited);
    }

    fn submit(&mut self, op: Op) {
        let turn = self.turn;
        match op {
            Op::Accept { listener } => self.accepts[usize::from(listener)].start("accept"),
            Op::AcceptStop { listener } => self.accepts[usize::from(listener)].stop(turn, "accept"),
            Op::Refuse { socket } => self.socket_leaves(socket),
            Op::Adopt { id, socket } => {
                self.socket_leaves(socket);
                let taken = self.wires.iter().any(|wire| wire.id.slot() == id.slot());
                assert!(!taken, "{id} is adopted in a slot that is taken");
                self.wires.push(Wire::new(id, socket.0 as usize));
            }
            Op::Receive { id }
            | Op::ReceiveStop { id }
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

    fn socket_leaves(&mut self, socket: Socket) {
        let place = self.sockets.iter().position(|known| *known == socket.0);
        self.sockets.swap_remove(place.expect("a socket that was not accepted, or left already"));
    }

    /// Delivers a completion, and works off what it leads to.
    fn complete(&mut self, completion: Completion) {
        self.completions += 1;
        self.shard.complete(completion);
        if let Some(id) = self.shard.take_frames() {
            self.run_frames(id);
        }
        if self.shard.has_events() {
            self.work_off();
        }
    }

    /// A peer connects, if a listener accepts.
    pub fn accept(&mut self, listener: u16) {
        if self.accepts[usize::from(listener)].armed {
            let socket = self.connect();
            self.complete(Completion::Accepted { listener, socket, peer: None });
        }
    }

    /// Another shard passes a connection on.
    pub fn accept_elsewhere(&mut self, listener: u16) {
        if self.plan.others && !self.shard.is_done() {
            self.came += 1;
            let socket = self.connect();
            self.shard.accepted_elsewhere(listener, socket, None);
            self.work_off();
        }
    }

    fn connect(&mut self) -> Socket {
        let socket = Socket(self.talks.len() as u64);
        self.talks.push(Talk::default());
        self.sockets.push(socket.0);
        socket
    }

    /// Accepting ends: with this, or as it was told to.
    pub fn end_accept(&mut self, listener: u16, end: Option<AcceptEnd>) {
        let accept = &mut self.accepts[usize::from(listener)];
        if accept.armed && (accept.stopping || end.is_some()) {
            accept.end(self.turn);
            self.complete(Completion::AcceptEnded { listener, end: end.unwrap_or(AcceptEnd::Stopped) });
        }
    }

    /// Delivers at most so many bytes of what a peer sent, as one receive does. False if that cannot be now.
    pub fn deliver(&mut self, wire: usize, bytes_max: usize) -> bool {
        let Some(wire) = self.wires.get_mut(wire) else { return false };
        if !wire.receive.armed || wire.unread.is_empty() || bytes_max == 0 {
            return false;
        }
        let Some(buffer) = self.shared_buffer.take().or_else(|| self.side.lend()) else { return false };
        let spare = self.side.spare(buffer);
        let count = bytes_max.min(wire.unread.len()).min(spare.len());
        let last = !self.plan.incremental || count == spare.len();
        let bytes: Vec<u8> = wire.unread.drain(..count).collect();
        spare[..count].copy_from_slice(&bytes);
        let lease = self.side.received(buffer, count, last);
        if !last {
            self.shared_buffer = Some(buffer);
        }
        let (id, peer) = (wire.id, wire.peer);
        self.receive(id, peer, &bytes, lease);
        true
    }

    /// Delivers all that a peer sent as one block of the heap.
    pub fn deliver_copy(&mut self, wire: usize) {
        let Some(wire) = self.wires.get_mut(wire) else { return };
        if wire.receive.armed && !wire.unread.is_empty() {
            let bytes: Vec<u8> = wire.unread.drain(..).collect();
            let (id, peer) = (wire.id, wire.peer);
            self.receive(id, peer, &bytes, Lease::copy_of(&bytes));
        }
    }

    fn receive(&mut self, id: ConnId, peer: usize, bytes: &[u8], lease: Lease) {
        let talk = &mut self.talks[peer];
        talk.received.extend_from_slice(bytes);
        if self.live.get(&id).is_some_and(|block| !block.link.is_gone()) {
            talk.heard = self.now;
        }
        self.complete(Completion::Received { id, lease });
    }

    /// Receiving ends: with this, after all that the peer sent, or as it was told to.
    pub fn end_receive(&mut self, index: usize, end: Option<ReceiveEnd>) {
        if end == Some(ReceiveEnd::Eof) {
            while self.deliver(index, usize::MAX) {}
        }
        let Some(wire) = self.wires.get_mut(index) else { return };
        let kept = end == Some(ReceiveEnd::Eof) && !wire.unread.is_empty();
        if wire.receive.armed && !kept && (wire.receive.stopping || end.is_some()) {
            wire.receive.end(self.turn);
            wire.read_over |= end.is_some();
            let id = wire.id;
            self.complete(Completion::ReceiveEnded { id, end: end.unwrap_or(ReceiveEnd::Stopped) });
        }
    }

    /// The kernel takes at most so many bytes of the send in flight. The last one is left, so that it does not end.
    pub fn take_bytes(&mut self, wire: usize, bytes_max: usize) {
        let Some(wire) = self.wires.get_mut(wire) else { return };
        if let Some(batch) = &mut wire.batch {
            let count = bytes_max.min(batch.len() - 1);
            batch.advance(count);
            batch.invariants();
            self.talks[wire.peer].taken += count;
            self.talks[wire.peer].check_batch(batch);
        }
    }

    /// The send in flight ends.
    pub fn end_send(&mut self, wire: usize, end: SendEnd) {
        let Some(wire) = self.wires.get_mut(wire) else { return };
        if end == SendEnd::Stopped && !wire.send.stopping {
            return;
        }
        let Some(mut batch) = wire.batch.take() else { return };
        if end == SendEnd::Done {
            self.talks[wire.peer].taken += batch.len();
            batch.advance(batch.len());
        }
        wire.send.end(self.turn);
        let id = wire.id;
        self.complete(Completion::Sent { id, batch, end });
    }

    /// A shutdown is carried out.
    pub fn end_shutdown(&mut self, wire: usize) {
        let Some(wire) = self.wires.get_mut(wire) else { return };
        if std::mem::take(&mut wire.shutdown) {
            let id = wire.id;
            self.complete(Completion::ShutDown { id });
        }
    }

    /// A close is carried out.
    pub fn end_close(&mut self, wire: usize) {
        if self.wires.get(wire).is_some_and(|wire| wire.close.is_some()) {
            let wire = self.wires.remove(wire);
            self.complete(Completion::Closed { id: wire.id });
        }
    }

    /// The driver does all it was told to. Where peers cooperate they take every byte, and close when the server did.
    /// False if there was nothing to do.
    pub fn answer_all(&mut self, cooperative: bool) -> bool {
        let before = self.completions;
        for listener in 0..self.plan.listeners {
            self.end_accept(listener, None);
        }
        for wire in (0..self.wires.len()).rev() {
            let shut = self.wires[wire].shutdown;
            if cooperative {
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
        self.completions > before
    }

    fn work_off(&mut self) {
        while let Some(event) = self.shard.next_event() {
            match event {
                Event::Frames(id) => self.run_frames(id),
                Event::Accepted { socket, .. } => self.answer_accepted(socket),
                Event::Heartbeat(id) => self.beat(id),
                Event::InputEnded(id) => self.input_ended(id),
                Event::Elsewhere { socket, .. } => {
                    assert!(self.plan.others);
                    self.socket_leaves(socket);
                    self.went += 1;
                }
                Event::Ended { id, block, reason, opened, handler } => {
                    self.ended(id, block, reason, opened, handler);
                }
            }
        }
    }

    fn answer_accepted(&mut self, socket: Socket) {
        let peer = socket.0 as usize;
        let opening = std::mem::take(&mut self.opening);
        if opening == 1 {
            return self.shard.refuse(socket);
        }
        let session = Session { peer, ..Session::default() };
        let id = self.shard.admit(socket, None, 0, session).expect("there is memory");
        assert!(self.shard.connections() <= self.plan.connections_max, "more connections than there may be");
        let block = self.shard.block(id).cloned().expect("an admitted connection has a block");
        assert!(self.names.insert(id), "a name is used twice");
        self.talks[peer].heard = self.now;
        if self.plan.hold_open {
            block.link.hold_open();
        }
        if !peer.is_multiple_of(2) {
            block.session.reach.replace(Some(block.link.reach()));
        }
        self.live.insert(id, block.clone());
        if opening & 4 != 0 {
            self.reply(&block, b"welcome");
        }
        match opening & 3 {
            2 => self.shard.refused(id),
            3 => self.shard.abort(id, CloseReason::HandlerPanicked),
            _ => {
                self.talks[peer].opened = true;
                self.shard.opened(id);
            }
        }
    }

    /// The service asks for a sign of life.
    fn beat(&mut self, id: ConnId) {
        assert!(self.plan.limits.heartbeat.is_some());
        let Some(block) = self.live.get(&id).cloned() else { return };
        assert!(!block.link.is_full(), "a heartbeat on top of a full outbox");
        self.reply(&block, b"are you there?");
    }

    /// The service hears of the end of a peer whose connection it holds open, and closes every other one.
    fn input_ended(&mut self, id: ConnId) {
        let Some(block) = self.live.get(&id).cloned() else { return };
        let (kind, peer) = (self.plan.kind, block.session.peer);
        let talk = &mut self.talks[peer];
        assert!(self.plan.hold_open && !talk.input_end_told, "told of the end twice");
        assert!(!matches!(talk.next(kind, usize::MAX), Start::Frame(..)), "told of the end before a frame");
        talk.input_end_told = true;
        self.reply(&block, b"that was all");
        if peer.is_multiple_of(2) {
            block.link.close();
        }
    }

    /// Calls of a connection that wait.
    fn calls<'a>(&'a self, block: &'a Conn) -> impl Iterator<Item = &'a Task> {
        self.tasks.iter().flatten().filter(|task| Rc::ptr_eq(&task.block, block))
    }

    /// Hands frames of one connection to the service, until there is none or a call waits.
    pub fn run_frames(&mut self, id: ConnId) {
        loop {
            match self.shard.next_frame(id) {
                Next::Nothing => return,
                Next::Bad(error, block) => {
                    let (kind, max) = (self.plan.kind, self.plan.limits.frame_bytes_max);
                    let talk = &mut self.talks[block.session.peer];
                    let next = talk.next(kind, max);
                    assert!(matches!(next, Start::TooLarge | Start::Bad), "{next:?} is refused");
                    talk.bad = true;
                    self.reply(&block, b"too large");
                    return self.shard.finish(id, CloseReason::BadFrame(error));
                }
                Next::Frame(frame, block) => {
                    self.check_frame(&frame, &block);
                    let called = self.call(&block, frame);
                    if !self.settle(id, called) {
                        return;
                    }
                }
            }
        }
    }

    fn check_frame(&mut self, frame: &Frame, block: &Conn) {
        self.frames += 1;
        let (kind, max) = (self.plan.kind, self.plan.limits.frame_bytes_max);
        let may = !block.link.is_full() || block.session.reads_on.get();
        assert!(may, "a frame is handed out although the outbox is full");
        let more = self.calls(block).count() < self.plan.limits.calls_in_flight_max.into();
        assert!(more, "a frame is handed out while as many calls wait as may");
        let talk = &mut self.talks[block.session.peer];
        assert!(talk.opened && talk.ended.is_none() && !talk.bad, "a frame of a connection that takes none");
        let wire = frame.wire();
        assert!(
            wire.len() <= max && talk.received[talk.cut..].starts_with(wire),
            "another's frame, or too much"
        );
        match talk.next(kind, max) {
            _ if kind == Kind::Raw => assert!(!wire.is_empty() && **frame == *wire),
            Start::Frame(payload, consumed) => assert_eq!((&**frame, wire.len()), (payload, consumed)),
            other => panic!("{other:?} is handed out as a frame"),
        }
        talk.cut += wire.len();
    }

    /// True if the next frame may follow.
    fn settle(&mut self, id: ConnId, called: Called) -> bool {
        match called {
            Called::Done => return true,
            Called::Failed => self.shard.finish(id, CloseReason::HandlerError),
            Called::Panicked => self.shard.abort(id, CloseReason::HandlerPanicked),
            Called::Parked(mut task) => {
                let free = self.tasks.iter().position(Option::is_none).unwrap_or(self.tasks.len());
                if free == self.tasks.len() {
                    self.tasks.push(None);
                }
                let block = task.block.clone();
                let next = self.shard.handler_parked(id, free as u32);
                assert_eq!(next.is_some(), self.calls(&block).next().is_some(), "calls before this one");
                if next.is_none() {
                    self.talks[block.session.peer].waits_since = self.now;
                }
                task.next = next;
                self.tasks[free] = Some(*task);
                return true;
            }
        }
        let gone = self.shard.block(id).is_none_or(|block| block.link.is_gone());
        assert!(gone, "{id} is finished, and takes replies");
        false
    }

    /// A parked handler goes on, and ends like this unless it parks again.
    pub fn resume(&mut self, index: usize, end: Called) {
        let Some(mut task) = self.tasks.get_mut(index).and_then(Option::take) else { return };
        let id = task.block.link.id();
        if !self.go_on(&mut task) {
            self.tasks[index] = Some(task);
            return;
        }
        if let Some(before) = self.tasks.iter_mut().flatten().find(|other| other.next == Some(index as u32)) {
            before.next = task.next;
        }
        self.talks[task.block.session.peer].waits_since = self.now;
        let next = task.next;
        drop(task);
        self.shard.handler_done(id, index as u32, next);
        if self.settle(id, end) {
            self.run_frames(id);
        }
        self.work_off();
    }

    fn ended(&mut self, id: ConnId, block: Conn, reason: CloseReason, opened: bool, handler: Option<u32>) {
        assert!(self.live.remove(&id).is_some(), "{id} ended twice");
        assert!(block.link.is_gone());
        let (kind, limits) = (self.plan.kind, &self.plan.limits);
        let mut left = handler;
        while let Some(index) = left {
            let task = self.tasks[index as usize].take().expect("a call that waits");
            assert!(Rc::ptr_eq(&task.block, &block), "another connection's call");
            left = task.next;
        }
        assert!(self.calls(&block).next().is_none(), "{id} ended, and a call of it goes on");
        let talk = &mut self.talks[block.session.peer];
        talk.ended = Some(self.now);
        assert!(block.session.reach.borrow().as_ref().is_none_or(|reach| reach.is_gone()));
        assert_eq!(opened, talk.opened);
        let rest = talk.received.len() - talk.cut;
        use CloseReason::*;
        let all_sent = match reason {
            PeerClosed if talk.input_end_told => true,
            PeerClosed => {
                assert!(rest == 0 && handler.is_none(), "frames are left, or a call waits");
                true
            }
            PeerClosedMidFrame => {
                assert!(rest > 0 && talk.next(kind, limits.frame_bytes_max) == Start::Part);
                assert!(handler.is_none(), "a call waits");
                true
            }
            Shutdown => {
                assert!(handler.is_none(), "a call waits");
                true
            }
            ReadTooSlow => {
                assert!(limits.read_bytes_per_second_min > 0 && rest > 0);
                true
            }
            HeartbeatLost => {
                let silence = limits.heartbeat.unwrap() * limits.heartbeats_missed_max.into();
                assert!(self.now >= talk.heard + silence, "a peer that spoke is given up");
                true
            }
            HandlerTimeout => {
                assert!(limits.handler.is_some());
                true
            }
            BadFrame(_) => {
                assert!(talk.bad);
                true
            }
            FirstFrameTimeout => {
                assert!(limits.first_frame.is_some());
                true
            }
            IdleTimeout => {
                assert!(limits.idle.is_some());
                true
            }
            WriteStalled => {
                assert!(limits.write_stalled.is_some());
                false
            }
            Closed | Refused | HandlerError | ReplyNotFramed => true,
            _ => false,
        };
        assert!(!all_sent || talk.taken == talk.owed.len(), "ended as {reason}, and a reply is left");
        block.session.kept.borrow_mut().clear();
        self.ends.push((block.session.peer, reason));
        if self.old.len() < 4 {
            self.old.push(block);
        }
    }

    /// What must hold after every turn. The driver may keep the end of `unawaited` sends to itself until something
    /// else happens.
    fn check(&self, unawaited: &[ConnId]) {
        self.shard.check();
        self.pool.invariants();
        self.check_closing();
        if self.shard.wait() == Wait::No {
            return;
        }
        let draining = self.shard.local().is_draining();
        assert!(unawaited.is_empty() || !draining, "a drain waits for every send");
        let max = if self.plan.others { QUOTA } else { usize::MAX };
        let full = self.wires.len() >= self.plan.connections_max.min(max);
        assert!(self.sockets.is_empty() || full || draining, "a socket waits although there is room");
        let limits = &self.plan.limits;
        for (id, block) in &self.live {
            let talk = &self.talks[block.session.peer];
            let wire = self.wires.iter().find(|wire| wire.id == *id).expect("a live connection is adopted");
            // The end of the send will wake the shard.
            let send = wire.send.armed && !unawaited.contains(id);
            let in_flight = wire.batch.as_ref().map_or(0, |batch| batch.len());
            let queued = talk.owed.len() - talk.taken - in_flight;
            assert!(queued == 0 || send, "{id}: replies wait, and nothing is sent");
            assert!(send || !block.link.is_gone(), "{id}: it is finished, and waits for nothing");
            let half_closed = block.session.writing_ended.get() && !wire.send.armed;
            assert!(!half_closed || wire.shut, "{id}: everything left, and no FIN follows");
            let mut calls = 0;
            for task in self.calls(block) {
                calls += 1;
                let room = task.room.as_ref().is_none_or(|flag| flag.is_set());
                assert!(send || room, "{id}: a handler waits for room that is there");
            }
            // Until the driver stopped a send that stalls, no other limit counts; and of several that are over, one
            // counts in each step.
            let limited = calls > 0 && !block.link.is_gone() && !wire.send.stopping;
            if let Some(limit) = limits.handler.filter(|_| limited) {
                let late = self.now > talk.waits_since + limit + LATE_MAX;
                let wakes = matches!(self.shard.wait(), Wait::For(pause) if pause < LATE_MAX);
                assert!(!late || wakes, "{id}: a call waits for longer than it may");
            }
            if let Some(reach) = &*block.session.reach.borrow() {
                let room = !block.link.is_full();
                assert_eq!((reach.is_gone(), reach.announce(0)), (block.link.is_gone(), room));
                assert!(send || room, "{id}: other threads wait for room, and nothing makes it");
            }
            let frame = talk.opened && matches!(talk.next(self.plan.kind, usize::MAX), Start::Frame(..));
            let held = calls >= limits.calls_in_flight_max.into() || send || talk.bad;
            assert!(held || !frame, "{id}: a frame waits for nothing");
            let receives = wire.receive.armed || wire.read_over || !talk.opened;
            assert!(held || receives, "{id}: nobody listens to the peer");
        }
    }

    /// Connections that are over do not stay.
    fn check_closing(&self) {
        for wire in &self.wires {
            let Some(ended) = self.talks[wire.peer].ended else { continue };
            let over = self.now > ended + self.plan.limits.linger + LATE_MAX;
            assert!(!over || wire.is_ending(), "a connection that is over stays: {wire:?}");
        }
    }

    /// Tells a handler when there is room.
    pub fn await_room(&self, block: &Conn) -> Option<Arc<Flag>> {
        let link = &block.link;
        (link.is_full() && !link.is_gone()).then(|| {
            // Only the waker given last is woken.
            let mut room = block.session.room.borrow_mut();
            let flag = room.take_if(|flag| !flag.is_set()).unwrap_or_default();
            link.wake_when_ready(&flag.clone().into());
            room.insert(flag).clone()
        })
    }
}
