//! The state machine of one core.
//!
//! The caller owns a driver, a clock and the user's code, and goes round like this:
//!
//! ```text
//! loop {
//!     shard.begin_turn(now, completions)          time limits, accepting again, what was left over
//!     for each completion: shard.complete(it)
//!         while let Some(event) = shard.next_event()
//!             Accepted → admit or refuse; then opened or finish
//!             Connected → opened or finish
//!             Wake     → wake it
//!             Frames   → while let Next::Frame = shard.next_frame(id): call the service
//!             Ended    → drop the parked handler, call the service's close
//!     shard.end_turn()                            all replies of the turn leave together
//!     for op in shard.take_ops(): driver.submit(op)
//!     driver.turn(shard.wait())
//! }
//! ```

mod accept;
mod check;
mod close;
mod connect;
mod drain;
mod give_back;
mod held;
mod receive;
mod send;
#[cfg(test)]
mod tests;
mod timers;
mod work;

use alloc::collections::VecDeque;
use alloc::rc::Rc;
use alloc::vec::Vec;
use core::net::SocketAddr;
use core::task::Waker;

use ringserve_buf::{Lease, Pool};

use crate::conn::{Conn, NO_HANDLER, Queued, Times};
use crate::framing::{FrameError, Framing};
use crate::holders::Holders;
use crate::link::{Block, Local};
use crate::slots::Slots;
use crate::stamp::Stamp;
use crate::wheel::Wheel;
use crate::{
    Budget, CloseReason, Completion, ConnId, Counters, Frame, Limits, Observer, Op, Socket, Time, Wait,
};

use accept::Accepting;
pub use accept::Quota;
use drain::Drain;
use work::Work;

/// Connections for which a queue keeps room once it is empty, however long a crowd made it: 8 to 16 KiB.
const QUEUE_KEPT: usize = 1024;

/// What the caller has to do.
#[derive(Debug)]
pub enum Event<S> {
    /// A peer wants to connect: answer with [`Shard::admit`] or [`Shard::refuse`].
    Accepted {
        /// The socket.
        socket: Socket,
        /// The peer's address, if it has one.
        peer: Option<SocketAddr>,
        /// Where it was accepted.
        listener: u16,
    },
    /// A connection that the server made is there: answer with [`Shard::opened`] or [`Shard::finish`].
    Connected(ConnId),
    /// There may be frames: call [`Shard::next_frame`] until it has none.
    Frames(ConnId),
    /// The peer sent nothing for [`Limits::heartbeat`]: let the service ask for a sign of life.
    Heartbeat(ConnId),
    /// The peer sent its last byte, every frame was handed out, and the service holds the connection open
    /// ([`Link::hold_open`](crate::Link::hold_open)): tell it.
    InputEnded(ConnId),
    /// This shard's table is full, another one's is not: pass the socket on to it. Comes only after
    /// [`Shard::set_room_elsewhere`].
    Elsewhere {
        /// The socket.
        socket: Socket,
        /// The peer's address, if it has one.
        peer: Option<SocketAddr>,
        /// Where it was accepted.
        listener: u16,
    },
    /// A task waited for room in the connection's outbox, or for its end: wake it. The waker is user code; if it panics,
    /// the task was not woken, and the connection is to be aborted.
    Wake(ConnId, Waker),
    /// The service is done with a connection: drop its waiting calls, then tell the service if it was
    /// `opened`, then drop the block.
    Ended {
        /// The connection, whose name is not valid any more for calls from user code.
        id: ConnId,
        /// Link and session.
        block: Rc<Block<S>>,
        /// Why.
        reason: CloseReason,
        /// True if the service accepted it in `open`.
        opened: bool,
        /// The first of the calls that wait, if there is one.
        handler: Option<u32>,
    },
}

/// What [`Shard::next_frame`] found.
#[derive(Debug)]
pub enum Next<S> {
    /// A frame for the service, with the connection it came from.
    Frame(Frame, Rc<Block<S>>),
    /// Nothing, for now.
    Nothing,
    /// The peer broke the framing: let the service say its last words, then call [`Shard::finish`].
    Bad(FrameError, Rc<Block<S>>),
}

/// What [`Shard::handler_parked`] answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parked {
    /// The connection's former first call, behind which the caller lists this one.
    pub next: Option<u32>,
    /// Bytes that were counted for the call, which [`Shard::handler_done`] takes back.
    pub bytes: usize,
}

/// The connections of one core. See the module's text for the order of calls.
pub struct Shard<S, F: Framing, O: Observer = ()> {
    limits: Limits,
    times: Times,
    framing: Rc<F>,
    observer: O,
    local: Rc<Local>,
    pool: Pool,
    conns: Slots<Conn<S>>,
    wheel: Wheel,
    now: Time,
    ops: Vec<Op>,
    /// Something depends on a send of this turn.
    send_awaited: bool,
    /// Bytes arrived since the turn began.
    has_received: bool,
    /// Bytes received before the last turn began.
    received: u64,
    events: VecDeque<Event<S>>,
    /// The event of the completion at hand, if it is [`Event::Frames`]: by far the most frequent one.
    has_frames: Option<ConnId>,
    /// What the completion at hand brought and is not cut yet, and whose it is. Empty between completions.
    current: Lease,
    current_id: Option<ConnId>,
    work: Work,
    /// Frames at hand lie on the heap, or receive memory is short: what each pins is looked at.
    weighs_frames: bool,
    /// Bytes on the heap that the frame handed out last pins, and that nothing else counts. Only if it was looked at.
    frame_bytes: usize,
    /// Connections with bytes left over for a later turn, in the order in which they get one.
    runnable: VecDeque<ConnId>,
    /// Those of them that had a batch in this turn: they come after all that had none.
    served: VecDeque<ConnId>,
    /// Memory in inboxes.
    inbox_bytes: usize,
    holders: Holders,
    /// Bytes held beyond which a turn hands out no frame.
    held_in_turn_max: usize,
    /// Connections that came to hold much, each once, and when: that counts once it has been there for a moment.
    watched: VecDeque<(ConnId, Stamp)>,
    /// Receive memory is short: frames are copied, nothing is lent.
    short_of_buffers: bool,
    /// ... always, since the driver's buffers must not be kept.
    copy_always: bool,
    accepting: Accepting,
    drain: Option<Drain>,
    counters: Counters,
    /// Kept for its room.
    scratch: Vec<ConnId>,
    fired: Vec<u32>,
}

impl<S, F: Framing, O: Observer> Shard<S, F, O> {
    /// A shard with `listeners` listeners that holds at most `connections_max` connections. The limits must
    /// have been checked.
    pub fn new(
        limits: Limits,
        connections_max: usize,
        listeners: u16,
        framing: F,
        pool: Pool,
        observer: O,
    ) -> Shard<S, F, O> {
        let framing = Rc::new(framing);
        let local = Rc::new(Local::new(framing.encoding(), &limits));
        Shard {
            accepting: Accepting::new(listeners, connections_max),
            framing,
            observer,
            local,
            pool,
            conns: Slots::new(),
            wheel: Wheel::new(),
            now: Time::ZERO,
            ops: Vec::new(),
            send_awaited: false,
            has_received: false,
            received: 0,
            events: VecDeque::new(),
            has_frames: None,
            current: Lease::empty(),
            current_id: None,
            work: Work::default(),
            weighs_frames: false,
            frame_bytes: 0,
            runnable: VecDeque::new(),
            served: VecDeque::new(),
            inbox_bytes: 0,
            holders: Holders::new(),
            held_in_turn_max: usize::MAX,
            watched: VecDeque::new(),
            short_of_buffers: false,
            copy_always: false,
            drain: None,
            counters: Counters::default(),
            scratch: Vec::new(),
            fired: Vec::new(),
            times: Times::new(&limits),
            limits,
        }
    }

    /// Copies every frame before it is handed out, and lends none: for drivers whose buffers must not be kept.
    pub fn copy_frames(&mut self) {
        self.copy_always = true;
    }

    /// Bounds a turn to `calls` calls, and the smallest batch of a connection's frames to `batch`; both at least 1. By default
    /// 4096 and 16. For simulations, where few frames must fill a turn.
    pub fn bound_turn(&mut self, calls: u32, batch: u32) {
        self.work = Work::bounded(calls, batch);
    }

    /// Begins a turn at `now`, which must not go back, and in which `completions` completions are to come: carries out time
    /// limits, goes on with what the last turn left over. The first call starts accepting.
    pub fn begin_turn(&mut self, now: Time, completions: usize) {
        debug_assert!(now >= self.now, "time went back");
        self.now = now;
        let pinned = self.pool.counts().leased * self.limits.receive_buffer_bytes;
        self.short_of_buffers = self.copy_always || pinned * 2 > self.limits.receive_bytes_max;
        self.local.set_lend(!self.short_of_buffers);
        self.fire_timers();
        let received = self.counters.bytes_received - self.received;
        self.received = self.counters.bytes_received;
        self.work.begin_turn(self.runnable.len() + self.served.len() + completions);
        // Where the turn before could not relieve, nothing would ever go on.
        let relieved = self.held_bytes() <= self.limits.held_bytes_max;
        self.held_in_turn_max = if relieved { self.limits.held_bytes_max } else { usize::MAX };
        if self.is_runnable_left() {
            let Budget { completions: most, bytes } = Budget::default();
            // By what the turn before received: this one's is not known yet.
            self.take_up(completions >= most || received >= bytes as u64);
        }
        if self.drain.is_some() {
            self.step_drain();
        }
        self.look_at_accepting();
    }

    /// Gives connections that waited their batches. `crowded` is true if the driver has more news than it brought.
    #[cold]
    fn take_up(&mut self, crowded: bool) {
        self.runnable.append(&mut self.served);
        for id in self.runnable.drain(..self.work.batches(crowded).min(self.runnable.len())) {
            if let Some(conn) = self.conns.get_mut(id) {
                conn.queued.leave(Queued::RUNNABLE);
                self.events.push_back(Event::Frames(id));
            }
        }
        if self.runnable.is_empty() {
            self.runnable.shrink_to(QUEUE_KEPT);
            self.served.shrink_to(QUEUE_KEPT);
        }
    }

    fn is_runnable_left(&self) -> bool {
        !self.runnable.is_empty() || !self.served.is_empty()
    }

    /// Takes in what the driver reported.
    #[inline]
    pub fn complete(&mut self, completion: Completion) {
        match completion {
            Completion::Accepted { listener, socket, peer } => self.accepted(listener, socket, peer),
            Completion::AcceptEnded { listener, end } => self.accept_ended(listener, end),
            Completion::Connected { id, result } => self.connected(id, result),
            Completion::Received { id, lease } => self.received(id, lease),
            Completion::ReceiveEnded { id, end } => self.receive_ended(id, end),
            Completion::Sent { id, batch, end } => self.sent(id, batch, end),
            Completion::ShutDown { id } => self.shut_down(id),
            Completion::Closed { id } => self.closed(id),
        }
    }

    /// The next thing to do, in the order in which things happened.
    #[inline]
    pub fn next_event(&mut self) -> Option<Event<S>> {
        if let Some(id) = self.take_frames() {
            return Some(Event::Frames(id));
        }
        let event = self.events.pop_front()?;
        if let Event::Frames(_) = event {
            self.begin_batch();
        }
        Some(event)
    }

    /// What [`next_event`](Shard::next_event) would answer, if that is [`Event::Frames`] for the completion at hand:
    /// a short cut for the most frequent case.
    #[inline]
    pub fn take_frames(&mut self) -> Option<ConnId> {
        let id = self.has_frames.take()?;
        self.begin_batch();
        Some(id)
    }

    /// True if [`next_event`](Shard::next_event) has something.
    #[inline]
    pub fn has_events(&self) -> bool {
        self.has_frames.is_some() || !self.events.is_empty()
    }

    /// Ends a turn: carries out what user code asked for since the last one, and sends what is queued.
    pub fn end_turn(&mut self) {
        self.settle_held();
        self.flush();
        if cfg!(debug_assertions) {
            self.invariants();
        }
    }

    /// Takes the operations for the driver, in order.
    pub fn take_ops(&mut self) -> impl Iterator<Item = Op> {
        self.ops.drain(..)
    }

    /// True if a send of this turn has something waiting for its end: then the driver's next wait must end with it.
    /// Otherwise it may report the send with the next other completion ([`Driver::defer_sent`]).
    ///
    /// [`Driver::defer_sent`]: crate::Driver::defer_sent
    pub fn take_send_awaited(&mut self) -> bool {
        core::mem::take(&mut self.send_awaited)
    }

    /// How long the driver may wait for something to happen.
    pub fn wait(&self) -> Wait {
        let busy = self.is_runnable_left() || !self.events.is_empty() || self.local.has_dirty();
        if busy || self.drain.as_ref().is_some_and(Drain::looks) {
            return Wait::No;
        }
        let drain = self.drain.as_ref().and_then(Drain::next);
        let times = [self.wheel.next(), self.accepting.retry_at(self.now), drain];
        match times.into_iter().flatten().min() {
            Some(next) if next <= self.now => Wait::No,
            Some(next) => Wait::For(next - self.now),
            None => Wait::Forever,
        }
    }

    /// A call waits, with the frame handed out last, and holds `bytes` of memory beside that. Once as many do as may
    /// ([`Limits::calls_in_flight_max`]), or memory is tight, no frame is handed out until
    /// [`handler_done`](Shard::handler_done). `handler` is what the caller calls it. [`Event::Ended`] brings the first one
    /// back.
    pub fn handler_parked(&mut self, id: ConnId, handler: u32, bytes: usize) -> Parked {
        let mut bytes = bytes + if self.weighs_frames { self.frame_bytes } else { 0 };
        let index = self.conns.index(id);
        let Some(conn) = self.conns.get_mut(id) else { return Parked { next: None, bytes: 0 } };
        let next = conn.has_handler().then_some(conn.handler);
        if next.is_none() {
            conn.since = Stamp::at(self.now);
        }
        conn.handler = handler;
        conn.calls += 1;
        conn.calls_full = conn.calls >= self.limits.calls_in_flight_max;
        self.arm(id);
        // A connection that ended during the call, or just now, holds nothing.
        if self.block(id).is_none() {
            bytes = 0;
        } else if !self.holders.add_call(index, bytes) {
            bytes = 0;
            self.abort(id, CloseReason::MemoryLimit);
        } else {
            self.check_held(id);
        }
        if self.is_tight()
            && let Some(conn) = self.conns.get_mut(id)
        {
            conn.calls_full = true;
        }
        Parked { next, bytes }
    }

    /// A call that waited is done: call [`next_frame`](Shard::next_frame) again. `next` is the one listed behind
    /// it, which is the first one now if this was; `bytes` is what [`handler_parked`](Shard::handler_parked) answered.
    pub fn handler_done(&mut self, id: ConnId, handler: u32, next: Option<u32>, bytes: usize) {
        self.begin_batch();
        let now = Stamp::at(self.now);
        let index = self.conns.index(id);
        let Some(conn) = self.conns.get_mut(id).filter(|conn| conn.has_handler()) else { return };
        self.holders.remove_call(index, bytes);
        if conn.handler == handler {
            conn.handler = next.unwrap_or(NO_HANDLER);
        }
        conn.calls -= 1;
        conn.calls_full = false;
        (conn.since, conn.active_at) = (now, now);
        if let Some(inbox) = &mut conn.inbox {
            inbox.begin_window(now);
        }
        self.arm(id);
    }

    /// Begins a connection's batch of frames. It has none where the turn brought more than may be held: what calls of other
    /// connections add would come on top, and only the end of the turn relieves.
    #[inline]
    fn begin_batch(&mut self) {
        match self.held_bytes() > self.held_in_turn_max {
            false => self.work.begin_batch(),
            true => self.work.refuse_batch(),
        }
    }

    /// True if the turn has room for another call beside frames: one that waited, or a task. It counts; what finds no room
    /// is for the next turn, which must come without a wait.
    #[inline]
    pub fn take_call(&mut self) -> bool {
        self.work.take_call()
    }

    /// True if bytes of the connection wait for room in a later turn.
    pub fn is_runnable(&self, id: ConnId) -> bool {
        self.conns.get(id).is_some_and(|conn| conn.queued.is_in(Queued::RUNNABLE))
    }

    /// True if no other call of a connection may begin before one that waits is done.
    pub fn calls_are_full(&self, id: ConnId) -> bool {
        self.conns.get(id).is_some_and(|conn| conn.calls_full)
    }

    /// A connection's link and session, until it ended.
    pub fn block(&self, id: ConnId) -> Option<&Rc<Block<S>>> {
        self.conns.get(id)?.block.as_ref()
    }

    /// What the shard's connections share.
    pub fn local(&self) -> &Rc<Local> {
        &self.local
    }

    /// What was counted so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Connections that exist, closing ones included.
    pub fn connections(&self) -> usize {
        self.conns.len()
    }

    /// The watcher.
    pub fn observer(&self) -> &O {
        &self.observer
    }
}

pub(crate) fn expect_conn<S>(conns: &mut Slots<Conn<S>>, id: ConnId) -> Option<&mut Conn<S>> {
    let found = conns.get_mut(id);
    debug_assert!(found.is_some(), "a completion for {id}, which is free: it was freed too early");
    found
}
