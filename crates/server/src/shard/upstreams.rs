//! A shard's connections to upstreams: a state machine of their own, on the shard's driver.
//!
//! ```text
//!   Shard::connect ──▶ Requests ──▶ core.connect ──▶ Op::Connect
//!                                                        │
//!   Stream ◀── Attempt ◀── Event::Connected ◀── Completion::Connected
//!      │
//!      └─ reads: as with an accepted stream, the task that reads is polled in the completion
//! ```
//!
//! They have their own names (slots behind those of accepted connections), limits and counters, so that an accepted
//! connection costs nothing for them.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;

use ringserve_buf::Pool;
use ringserve_core::framing::Raw;
use ringserve_core::{
    CloseReason, Completion, ConnId, Driver, Ended, Frames, Lane, Limits, Next, Outlet, Socket, Time,
};

use super::attempts::Attempt;
use super::handle::Shard;
use super::inbox::TaskWaker;
use super::session::Session;
use crate::guard::{guard, wake};
use crate::log::LogObserver;
use crate::stats::UpstreamStats;

/// Set in the number of a woken task if it says that an upstream's bytes were read. The rest is the slot's index.
pub(crate) const UPSTREAM: u32 = 1 << 30;

/// Their state machine.
type Core = ringserve_core::Shard<Session, Raw, LogObserver>;

/// A shard's connections to upstreams.
pub(crate) struct Upstreams {
    core: Core,
    lane: UpstreamLane,
    max: usize,
    closing: bool,
}

/// What stands above their state machine: attempts, and the readers of streams.
struct UpstreamLane {
    /// The number of the first slot.
    first: u32,
    shard: Shard,
    attempts: HashMap<ConnId, Rc<Attempt>>,
    /// By index of the slot: what goes on once everything was read.
    readers: Vec<Option<Reader>>,
}

struct Reader {
    wake: Arc<TaskWaker>,
    waker: Waker,
    /// Bytes that the state machine counts for what is not read.
    bytes: usize,
}

impl Upstreams {
    /// `limits` are those of the accepted connections; slots are `first` and up.
    pub(crate) fn new(limits: &Limits, first: u32, pool: Pool, shard: &Shard) -> Upstreams {
        let max = limits.upstreams_max;
        // An upstream is silent for as long as it is asked nothing, and answers when it can.
        let limits = limits
            .clone()
            .first_frame_timeout(None)
            .idle_timeout(None)
            .handler_timeout(None)
            .heartbeat_interval(None)
            .read_bytes_per_second_min(0)
            .calls_in_flight_max(1);
        let mut core =
            ringserve_core::Shard::new(limits, max, 0, Raw, pool, LogObserver::upstreams(shard.index()));
        core.number_from(first);
        let lane =
            UpstreamLane { first, shard: shard.clone(), attempts: HashMap::new(), readers: Vec::new() };
        Upstreams { core, lane, max, closing: false }
    }

    /// True if it is a name of an upstream's connection.
    #[inline]
    pub(crate) fn owns(&self, id: ConnId) -> bool {
        id.slot() >= self.lane.first
    }

    /// Begins a turn in which `completions` completions come, of accepted connections too.
    pub(crate) fn begin(&mut self, now: Time, completions: usize) {
        self.core.begin(now, completions, &mut self.lane);
    }

    /// True if it is about an upstream's connection.
    pub(crate) fn owns_completion(&self, completion: &Completion) -> bool {
        completion.id().is_some_and(|id| self.owns(id))
    }

    pub(crate) fn complete(&mut self, completion: Completion) {
        self.core.complete(completion, &mut self.lane);
    }

    /// Begins what was asked for, and gives up attempts that no future waits for.
    fn serve(&mut self) {
        let (asked, given_up) = self.lane.shard.upstream_requests().take();
        for id in given_up {
            self.core.abort(id, CloseReason::Aborted);
        }
        for attempt in asked {
            let Some(address) = attempt.address() else { continue };
            match self.core.connect(address, Session::default()) {
                Some(id) => {
                    attempt.begun(id);
                    self.lane.attempts.insert(id, attempt);
                }
                None => attempt.done(Err(self.no_room())),
            }
        }
    }

    fn no_room(&self) -> io::Error {
        let max = self.max;
        match self.core.slots_left() {
            0 => io::Error::new(
                io::ErrorKind::ResourceBusy,
                format!("the shard has {max} connections to upstreams; Limits::upstreams_max allows no more"),
            ),
            _ => io::Error::new(io::ErrorKind::ConnectionAborted, "the server shuts down"),
        }
    }

    /// Ends the turn, and hands operations to the driver. True if something waits for a send of it.
    pub(crate) fn end(&mut self, driver: &mut impl Driver) -> bool {
        self.serve();
        self.core.end(&mut self.lane);
        for op in self.core.take_ops() {
            driver.submit(op);
        }
        self.core.take_send_awaited()
    }

    /// Frees what is kept for the next use. See [`give_back`](ringserve_core::Shard::give_back).
    pub(crate) fn give_back(&mut self) {
        self.core.give_back();
    }

    pub(crate) fn next_turn(&self) -> Option<Time> {
        self.core.next_turn()
    }

    /// The bytes of a slot's connection were read.
    pub(crate) fn resume(&mut self, index: u32) {
        let Some(Some(reader)) = self.lane.readers.get(index as usize) else { return };
        reader.wake.taken();
        let bytes = reader.bytes;
        let Some(id) = self.core.id_at(index) else { return };
        // The slot may be another's by now.
        if self.core.shared(id).is_some_and(|shared| !shared.session.has_unread()) {
            self.core.call_done(id, index, None, bytes);
            self.core.run_frames(id, &mut self.lane);
            self.core.dispatch(&mut self.lane);
        }
    }

    /// A connection as pushes from elsewhere reach it.
    pub(crate) fn outlet(&self, id: ConnId) -> Option<&Outlet> {
        self.core.shared(id).map(|shared| &shared.outlet)
    }

    /// The server is done with every connection it accepted: what is queued leaves, and no more is connected.
    /// What is left at `deadline` is reset.
    pub(crate) fn close_all(&mut self, deadline: Time) {
        self.closing = true;
        self.core.close_all(deadline);
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing
    }

    /// See [`LaneShared::wake_when_dirty`](ringserve_core::LaneShared::wake_when_dirty).
    pub(crate) fn wake_when_dirty(&self, waker: Waker) {
        self.core.local().wake_when_dirty(waker);
    }

    /// Copies what it hands out, and lends nothing.
    pub(crate) fn copy_frames(&mut self) {
        self.core.copy_frames();
    }

    pub(crate) fn force(&mut self) {
        self.closing = true;
        self.core.force();
    }

    pub(crate) fn is_done(&self) -> bool {
        self.core.is_done()
    }

    /// Those that the driver did not end although they were aborted.
    pub(crate) fn left_behind(&self) -> usize {
        self.core.left_behind()
    }

    pub(crate) fn report(&self) -> UpstreamStats {
        UpstreamStats { counters: self.core.counters().clone(), connections: self.core.connections() }
    }
}

impl UpstreamLane {
    /// Has the reader read. Its waker is user code: if that panics, the reader is not woken, and the connection ends.
    fn run_reader(&mut self, core: &mut Core, id: ConnId, session: &Session) -> bool {
        let tasks = self.shard.tasks();
        let woken = guard(|| session.run_reader(tasks)).is_ok();
        if !woken {
            core.abort(id, CloseReason::HandlerPanicked);
        }
        woken
    }

    /// What wakes [`resume`](Upstreams::resume) for a slot.
    fn reader(&mut self, index: u32) -> Waker {
        if self.readers.len() <= index as usize {
            self.readers.resize_with(index as usize + 1, || None);
        }
        let reader = self.readers[index as usize].get_or_insert_with(|| {
            let wake = TaskWaker::new(self.shard.remote(), index | UPSTREAM);
            let waker = wake.waker();
            Reader { wake, waker, bytes: 0 }
        });
        reader.wake.taken();
        reader.waker.clone()
    }
}

impl Lane<Session, Raw, LogObserver> for UpstreamLane {
    fn connected(&mut self, core: &mut Core, id: ConnId) {
        let Some(shared) = core.shared(id).cloned() else { return };
        shared.outlet.hold_open();
        shared.outlet.read_on();
        core.opened(id);
        if let Some(attempt) = self.attempts.remove(&id) {
            attempt.done(Ok(shared));
        }
    }

    /// Hands what arrived to the reader, piece by piece, until that is not done with one.
    fn frames(&mut self, frames: &mut Frames<'_, Session, Raw, LogObserver>) {
        let (id, shared) = (frames.id(), frames.shared().clone());
        let session = &shared.session;
        while let Next::Frame(frame) = frames.next_frame() {
            session.put(frame.into_lease());
            if !self.run_reader(frames.shard(), id, session) {
                return;
            }
            if session.has_unread() {
                session.spill();
                let index = id.slot() - self.first;
                session.wake_when_read(self.reader(index));
                let parked = frames.park(index, 0);
                if let Some(Some(reader)) = self.readers.get_mut(index as usize) {
                    reader.bytes = parked.bytes;
                }
            }
        }
    }

    fn input_ended(&mut self, core: &mut Core, id: ConnId) {
        let Some(shared) = core.shared(id).cloned() else { return };
        shared.session.end_input();
        self.run_reader(core, id, &shared.session);
    }

    fn wake(&mut self, core: &mut Core, id: ConnId, waker: Waker) {
        if wake(waker).is_err() {
            core.abort(id, CloseReason::HandlerPanicked);
        }
    }

    fn ended(&mut self, core: &mut Core, ended: Ended<Session>) {
        let Ended { id, shared, reason, .. } = ended;
        match self.attempts.remove(&id) {
            Some(attempt) => attempt.done(Err(why_not(&shared.session, reason))),
            None => {
                shared.session.set_ended(reason);
                self.run_reader(core, id, &shared.session);
                // The last owner may be user code.
                let _ = guard(move || drop(shared));
            }
        }
    }

    /// Upstreams have no listener.
    fn accepted(&mut self, core: &mut Core, socket: Socket, _: Option<SocketAddr>, _: u16) {
        core.refuse(socket);
    }

    fn hand_off(&mut self, _: &mut Core, _: Socket, _: Option<SocketAddr>, _: u16) {}

    /// Upstreams have no heartbeat.
    fn heartbeat(&mut self, _: &mut Core, _: ConnId) {}
}

/// Why a connection could not be made.
fn why_not(session: &Session, reason: CloseReason) -> io::Error {
    match session.end(reason) {
        Err(error) => error,
        Ok(()) => io::Error::new(io::ErrorKind::ConnectionAborted, reason.name()),
    }
}
