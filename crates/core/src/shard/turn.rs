//! One turn of a shard: the loop that servers run, the simulator steps and the fuzzer drives.
//!
//! ```text
//! loop {
//!     shard.turn(now, &mut completions, &mut lane)
//!         begin        time limits, accepting again, what was left over; then Lane::begin
//!         completions  each one changes a connection; Lane::frames for the bytes it brought
//!         Lane::attend calls and tasks that were woken
//!         Lane::page   a part of work that no peer asked for, such as messages for many
//!         end          all replies of the turn leave together
//!     for op in shard.take_ops(): driver.submit(op)
//!     driver.turn(shard.wait(), ..)
//! }
//! ```
//!
//! An [`Event`] is queued for everything that happens to a connection, and the [`Lane`] gets it
//! once the state machine is consistent: before the next completion is looked at. So user code may
//! call the shard from each of its hooks.

use alloc::vec::{Drain, Vec};
use core::net::SocketAddr;
use core::task::Waker;
use core::time::Duration;

use ringserve_buf::Lease;

use super::frames::Frames;
use super::{QUEUE_KEPT, Shard};
use crate::connection::{ConnHead, QueueFlags};
use crate::time::Stamp;
use crate::{Budget, CloseReason, Completion, ConnId, LaneId, Observer, Op, Page, Socket, Time, Wait};

/// The code above a shard: a service, its upstreams, a simulated service.
///
/// A hook may call any method of the shard. It must not panic; a lane catches the panics of user
/// code.
#[allow(unused_variables)]
pub trait Lane<O: Observer = ()> {
    /// The next completion of the turn, for observers.
    #[inline]
    fn on_completion(&mut self, shard: &mut Shard<O>, completion: &Completion) {}

    /// A turn begins: limits that ran out were carried out, and no completion was handled yet.
    #[inline]
    fn begin(&mut self, shard: &mut Shard<O>) {}

    /// A peer wants to connect. Answer with [`Shard::admit`], then with [`Shard::opened`],
    /// [`Shard::refused`] or [`Shard::open_parked`]; or with [`Shard::refuse`].
    fn accepted(&mut self, shard: &mut Shard<O>, socket: Socket, peer: Option<SocketAddr>, listener: u16);

    /// The table of this shard is full and that of another is not: pass the socket on to that
    /// shard. Called only after [`Shard::set_others_have_room`].
    fn hand_off(&mut self, shard: &mut Shard<O>, socket: Socket, peer: Option<SocketAddr>, listener: u16);

    /// The [awaited](Shard::await_header) PROXY header of a connection was read. Answer as to
    /// [`accepted`](Lane::accepted) after [`Shard::admit`], or with [`Shard::begin_handshake`]. The
    /// peer of its outlet is the client from now on.
    fn proxied(&mut self, shard: &mut Shard<O>, id: ConnId) {
        shard.opened(id);
    }

    /// The handshake that [began](Shard::begin_handshake) for a connection is done. Answer as to
    /// [`accepted`](Lane::accepted) after [`Shard::admit`].
    /// [`Outlet::transport_info`](crate::Outlet::transport_info) has its facts.
    fn secured(&mut self, shard: &mut Shard<O>, id: ConnId) {
        shard.opened(id);
    }

    /// A connection to an upstream is there. Answer with [`Shard::opened`] or [`Shard::finish`].
    fn connected(&mut self, shard: &mut Shard<O>, id: ConnId);

    /// A connection may have frames. Take them with [`Frames::next_frame`] until it returns
    /// [`Next::Nothing`](super::Next::Nothing) or [`Next::Bad`](super::Next::Bad), or end the
    /// connection.
    fn frames(&mut self, frames: &mut Frames<'_, O>);

    /// The peer sent nothing for [`Limits::heartbeat_interval`](crate::Limits::heartbeat_interval).
    /// Ask for a sign of life.
    fn heartbeat(&mut self, shard: &mut Shard<O>, id: ConnId);

    /// A call of the connection was pending for longer than
    /// [`Limits::handler_timeout`](crate::Limits::handler_timeout). Queue last words, then
    /// [`Shard::finish`] it.
    fn timed_out(&mut self, shard: &mut Shard<O>, id: ConnId) {
        shard.finish(id, CloseReason::HandlerTimeout);
    }

    /// The shard drains, and the connection, which was `opened`, is cut later. Called once for each
    /// connection.
    fn draining(&mut self, shard: &mut Shard<O>, id: ConnId) {}

    /// The peer sent FIN, every frame was handed out, and the service holds the connection open
    /// ([`Outlet::hold_open`](crate::Outlet::hold_open)).
    fn input_ended(&mut self, shard: &mut Shard<O>, id: ConnId);

    /// Wake a task that waited for room in the connection's outbox, or for its end. The waker is
    /// user code; if it panics, the task was not woken, and the connection has to be aborted.
    fn wake(&mut self, shard: &mut Shard<O>, id: ConnId, waker: Waker);

    /// A connection ended. Drop its pending calls, or its `open`, then call `close` of the service
    /// if the connection was `opened`, then drop the block.
    fn ended(&mut self, shard: &mut Shard<O>, ended: EndedConn);

    /// Every completion was looked at. Resume woken tasks: replies that are queued now leave with
    /// this turn.
    #[inline]
    fn attend(&mut self, shard: &mut Shard<O>) {}

    /// The turn has room for a page of a source that [asked](crate::ShardShared::ask_page) for one.
    /// Do as much as `page` takes, and return whether more is left, for which the shard takes
    /// another turn at once.
    fn page(&mut self, shard: &mut Shard<O>, source: u32, page: &mut Page) -> bool {
        false
    }
}

/// A connection that ended, for [`Lane::ended`].
#[derive(Debug)]
pub struct EndedConn {
    /// The connection, whose id is no longer valid for calls from user code.
    pub id: ConnId,
    /// Its lane.
    pub lane: LaneId,
    /// Outlet and session.
    pub shared: ConnHead,
    /// The reason.
    pub reason: CloseReason,
    /// True if the service accepted it in `open`.
    pub opened: bool,
    /// The first of its pending calls, or its pending `open` if it was not `opened`.
    pub call: Option<u32>,
}

/// An event for the lane.
#[derive(Debug)]
pub(crate) enum Event {
    Accepted {
        socket: Socket,
        peer: Option<SocketAddr>,
        listener: u16,
    },
    HandOff {
        socket: Socket,
        peer: Option<SocketAddr>,
        listener: u16,
    },
    Connected(ConnId),
    Frames(ConnId),
    /// Make this many steps of handshakes.
    Steps(u32),
    Heartbeat(ConnId),
    TimedOut(ConnId),
    Draining(ConnId),
    InputEnded(ConnId),
    Wake(ConnId, Waker),
    Ended(EndedConn),
}

/// Calls the lane for a batch. By reference, since a batch that is moved behind an indirect call is
/// copied.
#[inline(always)]
pub(super) fn hand_out<O: Observer>(frames: &mut Frames<'_, O>, lane: &mut (impl Lane<O> + ?Sized)) {
    lane.frames(frames);
    frames.end();
}

impl<O: Observer> Shard<O> {
    /// Takes in completions and dispatches their events to the lane. `now` must not go back. The
    /// first turn starts accepting.
    #[inline]
    pub fn turn(&mut self, now: Time, completions: &mut Vec<Completion>, lane: &mut (impl Lane<O> + ?Sized)) {
        self.begin(now, completions.len(), lane);
        let mut left = completions.drain(..);
        // The completion stays in its place: taking it out first would copy it once more.
        while let Some(completion) = left.as_slice().first() {
            lane.on_completion(self, completion);
            let Some(completion) = left.next() else { break };
            self.complete(completion, lane);
        }
        // Everything was moved out, so nothing is left to drop. Without this line only
        // whole-program optimization removes the call that would do so.
        core::mem::forget(left);
        self.end(lane);
    }

    /// The first part of a [`turn`](Shard::turn), for a shard whose completions come one by one:
    /// `completions` of them.
    #[inline]
    pub fn begin(&mut self, now: Time, completions: usize, lane: &mut (impl Lane<O> + ?Sized)) {
        self.begin_turn(now, completions);
        lane.begin(self);
        self.dispatch(lane);
    }

    /// The second part of a [`turn`](Shard::turn), for one completion.
    #[inline]
    pub fn complete(&mut self, completion: Completion, lane: &mut (impl Lane<O> + ?Sized)) {
        match completion {
            Completion::Received { id, lease } => self.received(id, lease, lane),
            Completion::Sent { id, batch, end } => self.sent(id, batch, end),
            other => self.changed(other),
        }
        self.dispatch(lane);
    }

    /// The last part of a [`turn`](Shard::turn).
    #[inline]
    pub fn end(&mut self, lane: &mut (impl Lane<O> + ?Sized)) {
        lane.attend(self);
        self.dispatch(lane);
        if self.shared.has_asked() {
            self.give_pages(lane);
        }
        self.end_turn();
        self.dispatch(lane);
    }

    /// Dispatches events to the lane, in their order.
    #[inline]
    pub fn dispatch(&mut self, lane: &mut (impl Lane<O> + ?Sized)) {
        if !self.events.is_empty() {
            self.dispatch_all(lane);
        }
    }

    #[inline(never)]
    fn dispatch_all(&mut self, lane: &mut (impl Lane<O> + ?Sized)) {
        while let Some(event) = self.events.pop_front() {
            match event {
                Event::Frames(id) => self.run_frames(id, lane),
                Event::Steps(steps) => self.run_steps(steps, lane),
                Event::Accepted { socket, peer, listener } => lane.accepted(self, socket, peer, listener),
                Event::HandOff { socket, peer, listener } => lane.hand_off(self, socket, peer, listener),
                Event::Connected(id) => lane.connected(self, id),
                Event::Heartbeat(id) => lane.heartbeat(self, id),
                Event::TimedOut(id) => {
                    lane.timed_out(self, id);
                    // Its last words may still be in flight, and need a time limit.
                    self.arm(id);
                }
                Event::Draining(id) => lane.draining(self, id),
                Event::InputEnded(id) => lane.input_ended(self, id),
                Event::Wake(id, waker) => lane.wake(self, id, waker),
                Event::Ended(ended) => lane.ended(self, ended),
            }
        }
    }

    /// Gives a connection a batch of frames, after [`call_done`](Shard::call_done) for example.
    pub fn run_frames(&mut self, id: ConnId, lane: &mut (impl Lane<O> + ?Sized)) {
        self.begin_batch();
        self.hand_out_aside(id, Lease::empty(), false, lane);
    }

    /// Calls the lane for a batch, away from the shortest path: another place with the lane's part
    /// compiled in would keep it from being inlined in either. `plain` is as in [`Frames::new`].
    #[inline(never)]
    pub(super) fn hand_out_aside(
        &mut self,
        id: ConnId,
        lease: Lease,
        plain: bool,
        lane: &mut (impl Lane<O> + ?Sized),
    ) {
        let Some(conn) = self.conns.get(id) else { return };
        let Some(shared) = conn.shared.clone() else { return };
        let (of, is_first) = (conn.lane, !conn.frame_seen);
        let plain = plain && !conn.is_metered();
        hand_out(&mut Frames::new(self, id, of, &shared, lease, plain, is_first), lane);
    }

    /// Begins a connection's batch of frames. It gets none if the turn brought much, or if more is
    /// held than may be: calls of other connections would add memory, and only the end of the turn
    /// sends and frees some.
    #[inline]
    pub(super) fn begin_batch(&mut self) {
        match self.holds_off() {
            false => self.work.begin_batch(),
            true => self.work.refuse_batch(),
        }
    }

    #[inline]
    pub(super) fn begin_turn(&mut self, now: Time, completions: usize) {
        debug_assert!(now >= self.now, "time went back");
        let received = core::mem::take(&mut self.received);
        let gap_nanos = now.as_nanos().saturating_sub(self.now.as_nanos());
        (self.now, self.stamp) = (now, Stamp::at(now));
        let has_more = completions >= Budget::default().completions;
        let is_calm =
            self.later == 0 && received < Budget::default().bytes && !self.lateness.is_asked(gap_nanos);
        if is_calm && !self.begins_aside && !has_more {
            self.begin_work(completions);
        } else {
            self.begin_aside(Duration::from_nanos(gap_nanos), completions, received);
        }
        self.check_accepting();
    }

    /// The begin of each turn.
    #[inline(always)]
    fn begin_work(&mut self, completions: usize) {
        self.short_of_buffers = self.pool.leased() >= self.short_from;
        self.shared.set_lend(!self.short_of_buffers);
        if self.wheel.is_due(self.now) {
            self.fire_timers();
        }
        self.work.begin_turn(self.later + completions);
        self.held_before = self.shared.memory();
    }

    /// Begins a turn that has more to do, `gap` after the one before, which brought `received`
    /// bytes.
    #[cold]
    #[inline(never)]
    fn begin_aside(&mut self, gap: Duration, completions: usize, received: usize) {
        let Budget { completions: most, bytes } = Budget::default();
        let has_more = completions >= most;
        let had_more = core::mem::replace(&mut self.had_more, has_more);
        let had_pages = core::mem::take(&mut self.has_pages);
        if self.later > 0 || had_more || had_pages || received >= bytes {
            // The driver had no reason to wait: all of the time went by in the turn before.
            self.work.fit(gap);
        }
        if self.lateness.is_asked(gap.as_nanos() as u64) {
            self.step_lateness(gap, completions, received >= bytes);
        }
        self.begin_work(completions);
        if self.later > 0 {
            // The bytes of this turn are not known yet: those of the one before tell whether the
            // driver has more.
            self.take_up(completions, has_more || received >= bytes);
        }
        if self.drain.is_some() {
            self.step_drain(completions);
        }
        if self.accepting.has_starts() {
            self.accepting.looked_at_starts(self.now, completions);
        }
        self.begins_aside = has_more || self.drain.is_some() || self.accepting.has_starts();
    }

    /// Gives waiting connections their batches, and handshakes their steps, in a turn that brings
    /// `completions`; `crowded` is true if the driver has more.
    #[cold]
    #[inline(never)]
    fn take_up(&mut self, completions: usize, crowded: bool) {
        self.runnable.append(&mut self.served);
        let steps = self.channels.steps(completions > 0 || !self.runnable.is_empty());
        let batches = self.work.batches(crowded).min(self.runnable.len());
        self.later -= batches;
        for id in self.runnable.drain(..batches) {
            if let Some(conn) = self.conns.get_mut(id) {
                conn.queued.leave(QueueFlags::RUNNABLE);
                self.events.push_back(Event::Frames(id));
            }
        }
        if self.runnable.is_empty() {
            self.runnable.shrink_to(QUEUE_KEPT);
            self.served.shrink_to(QUEUE_KEPT);
        }
        self.events.extend(steps.map(Event::Steps));
    }

    /// Takes in a completion of a rare kind.
    #[inline(never)]
    fn changed(&mut self, completion: Completion) {
        match completion {
            Completion::Received { .. } | Completion::Sent { .. } => {
                debug_assert!(false, "frames and replies have another way");
            }
            Completion::Accepted { listener, socket, peer } => self.accepted(listener, socket, peer),
            Completion::AcceptEnded { listener, end } => self.accept_ended(listener, end),
            Completion::Connected { id, result } => self.connected(id, result),
            Completion::ReceiveEnded { id, end } => self.receive_ended(id, end),
            Completion::Filled { id, block, bytes, end } => self.filled(id, *block, bytes, end),
            Completion::ShutDown { id } => self.shut_down(id),
            Completion::Closed { id } => self.closed(id),
        }
    }

    /// The size of a turn that no earlier long turn has cut.
    pub const WHOLE_TURN: u32 = super::work::WHOLE;

    /// The size of the last turn, as a part of [`WHOLE_TURN`](Shard::WHOLE_TURN): a half, a quarter
    /// and so on, if turns before it were long.
    #[inline]
    pub fn turn_part(&self) -> u32 {
        self.work.part()
    }

    /// True if the last turn left work to the next one because long turns before had cut it.
    pub fn cuts_turns(&self) -> bool {
        self.later > 0 && self.turn_part() < Self::WHOLE_TURN
    }

    /// Ends a turn: carries out requests of user code since the last one, and sends queued bytes.
    #[inline]
    pub(super) fn end_turn(&mut self) {
        if self.drain.is_some() {
            self.close_outbound();
        }
        self.settle_held();
        self.flush();
        if cfg!(debug_assertions) {
            self.invariants();
        }
    }

    /// Takes the operations for the driver, in order.
    #[inline]
    pub fn take_ops(&mut self) -> Drain<'_, Op> {
        self.ops.drain(..)
    }

    /// True if something waits for the end of a send of this turn: then the driver's next wait must
    /// end with it. Otherwise the driver may report the send with the next other completion
    /// ([`Driver::defer_sent`]).
    ///
    /// [`Driver::defer_sent`]: crate::Driver::defer_sent
    #[inline]
    pub fn take_send_awaited(&mut self) -> bool {
        core::mem::take(&mut self.send_awaited)
    }

    /// The longest wait of the driver.
    #[inline]
    pub fn wait(&self) -> Wait {
        match self.next_turn() {
            None => Wait::Forever,
            Some(next) if next <= self.now => Wait::No,
            Some(next) => Wait::For(next - self.now),
        }
    }

    /// The time of the next turn if nothing happens, which may be now.
    pub fn next_turn(&self) -> Option<Time> {
        Some(self.next_turn_or_never()).filter(|next| *next != Time::NEVER)
    }

    /// As [`next_turn`](Shard::next_turn), with [`Time::NEVER`] in the place of `None`: comparing
    /// with it costs less than checking whether there is a time.
    #[inline]
    pub fn next_turn_or_never(&self) -> Time {
        if (self.later | self.events.len() | self.grew.len()) > 0 || self.shared.has_dirty() {
            return self.now;
        }
        let next = self.wheel.next_or_never();
        let looks = self.shared.has_asked() || self.lateness.watches();
        match looks || self.drain.is_some() || self.accepting.is_timed() {
            false => next,
            true => self.next_beside(next),
        }
    }

    /// The earliest of these times: `next`, which is that of the limits; the next step of a drain;
    /// the next try to accept; the next look at the calls that wait for memory; and a wake-up that
    /// shows that the shard was not away.
    #[cold]
    #[inline(never)]
    fn next_beside(&self, mut next: Time) -> Time {
        for at in [self.line_look(), self.lateness.wakes_at(self.now)].into_iter().flatten() {
            next = next.min(at);
        }
        if !self.shared.pages().is_empty() {
            return self.now;
        }
        if let Some(at) = self.accepting.next_check(self.now) {
            next = next.min(at);
        }
        if let Some(drain) = &self.drain {
            let at = if drain.looks() { Some(self.now) } else { drain.next() };
            next = next.min(at.unwrap_or(Time::NEVER));
        }
        next
    }
}
