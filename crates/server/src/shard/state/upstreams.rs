//! A shard's connections to upstreams: a lane of its state machine, apart from that of the service.
//!
//! ```text
//!   Shard::connect ──▶ Requests ──▶ core.connect ──▶ Op::Connect
//!                                                        │
//!   Stream ◀── Attempt ◀──── Lane::connected ◀── Completion::Connected
//!      │
//!      └─ reads: as with an accepted stream, the task that reads is polled in the completion
//! ```
//!
//! They have separate limits and counters, and share everything else: slots, timers, the bound on a
//! turn's work and on what is held.

use std::collections::HashMap;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;

use ringserve_base::guard::{guard, wake};
use ringserve_core::framing::{Framing, Raw};
use ringserve_core::{CloseReason, ConnId, ConnShared, EndedConn, Frames, LaneId, Limits, Next, ParkOutcome};

use crate::log::LogObserver;
use crate::shard::Core;
use crate::shard::face::handle::Shard;
use crate::shard::tasks::attempts::Attempt;
use crate::shard::tasks::session::StreamSession;
use crate::shard::wakes::inbox::TaskWaker;
use crate::stats::UpstreamStats;

/// Set in the number of a woken task if it says that an upstream's bytes were read. The rest is the
/// connection's slot.
pub(crate) const UPSTREAM: u32 = 1 << 30;

/// Adds the lane, for at most `max` connections. `limits` are those of accepted ones.
pub(crate) fn add_upstreams(core: &mut Core, limits: &Limits, max: usize) -> LaneId {
    // An upstream is silent for as long as it is asked nothing, and answers when it can.
    let limits = limits
        .clone()
        .first_frame_timeout(None)
        .idle_timeout(None)
        .handler_timeout(None)
        .heartbeat_interval(None)
        .read_bytes_per_second_min(0)
        .read_frames_per_second_max(0)
        .read_bytes_per_second_max(0)
        .calls_in_flight_max(1);
    core.add_outbound(limits, max, Rc::new(Raw).encoding())
}

/// The lane of a shard's connections to upstreams: attempts, and the readers of streams.
pub(crate) struct UpstreamLane {
    lane: LaneId,
    shard: Shard,
    attempts: HashMap<ConnId, Rc<Attempt>>,
    /// By slot: code that goes on after everything was read.
    readers: HashMap<u32, Reader>,
}

struct Reader {
    wake: Arc<TaskWaker>,
    waker: Waker,
    /// Bytes that the state machine counts for an unread lease.
    parked: ParkOutcome,
}

impl UpstreamLane {
    pub(crate) fn new(lane: LaneId, shard: &Shard) -> UpstreamLane {
        UpstreamLane { lane, shard: shard.clone(), attempts: HashMap::new(), readers: HashMap::new() }
    }

    pub(crate) fn lane(&self) -> LaneId {
        self.lane
    }

    /// True if the connection is one to an upstream.
    pub(crate) fn owns(&self, core: &Core, id: ConnId) -> bool {
        core.lane_of(id) == Some(self.lane)
    }

    pub(crate) fn report(&self, core: &Core) -> UpstreamStats {
        UpstreamStats { counters: core.counters(self.lane), connections: core.connections(self.lane) }
    }

    /// Begins requested connects, and gives up attempts that no future waits for.
    #[cold]
    pub(crate) fn serve(&mut self, core: &mut Core) {
        let (asked, given_up) = self.shard.upstream_requests().take();
        for id in given_up {
            core.abort(id, CloseReason::Aborted);
        }
        for attempt in asked {
            let Some(address) = attempt.address() else { continue };
            match core.connect(self.lane, address, StreamSession::default()) {
                Some(id) => {
                    attempt.begun(id);
                    self.attempts.insert(id, attempt);
                }
                None => attempt.done(Err(self.no_room(core))),
            }
        }
    }

    fn no_room(&self, core: &Core) -> io::Error {
        match core.connections_left(self.lane) {
            0 => io::Error::new(
                io::ErrorKind::ResourceBusy,
                format!(
                    "the shard has {} connections to upstreams; ServerLimits::upstreams_max allows no more",
                    core.connections(self.lane)
                ),
            ),
            _ => io::Error::new(io::ErrorKind::ConnectionAborted, "the server shuts down"),
        }
    }

    pub(crate) fn connected(&mut self, core: &mut Core, id: ConnId) {
        match self.attempts.get(&id).and_then(|attempt| attempt.transport()) {
            Some(transport) => {
                // Nothing has changed where the transport panics.
                if let Err(panicked) = guard(|| core.begin_handshake_by(id, &*transport)) {
                    self.shard.tasks().transport_panicked(&panicked);
                    core.abort(id, CloseReason::HandlerPanicked);
                }
            }
            None => self.secured(core, id),
        }
    }

    /// Connected, with its transport ready.
    pub(crate) fn secured(&mut self, core: &mut Core, id: ConnId) {
        let Some(shared) = session_of(core, id) else { return };
        shared.hold_open();
        shared.read_on();
        core.opened(id);
        if let Some(attempt) = self.attempts.remove(&id) {
            attempt.done(Ok(shared));
        }
    }

    /// Hands received bytes to the reader, piece by piece, until the reader is not done with one.
    pub(crate) fn frames(&mut self, frames: &mut Frames<'_, LogObserver>) {
        let id = frames.id();
        let Some(shared) = frames.shared().downcast_ref::<StreamSession>() else { return };
        let session = shared.body();
        while let Next::Frame(frame) = frames.next_frame(&Raw) {
            session.put(frame.into_lease());
            if !self.run_reader(frames.shard(), id, session) {
                return;
            }
            if session.has_unread() {
                session.spill();
                session.wake_when_read(self.reader(id.slot()));
                let parked = frames.park(id.slot(), 0);
                if let Some(reader) = self.readers.get_mut(&id.slot()) {
                    reader.parked = parked;
                }
            }
        }
    }

    /// The bytes of a slot's connection were read.
    pub(crate) fn read(&mut self, core: &mut Core, slot: u32) -> Option<ConnId> {
        let reader = self.readers.get(&slot)?;
        reader.wake.taken();
        let id = core.id_at(slot).filter(|id| self.owns(core, *id))?;
        // The slot may be another's by now.
        if session_of(core, id)?.body().has_unread() {
            return None;
        }
        core.call_done(id, slot, reader.parked, None);
        Some(id)
    }

    /// Runs the reader. Its waker is user code: if that panics, the reader is not woken, and the
    /// connection ends.
    fn run_reader(&mut self, core: &mut Core, id: ConnId, session: &StreamSession) -> bool {
        let tasks = self.shard.tasks();
        let woken = guard(|| session.run_reader(tasks)).is_ok();
        if !woken {
            core.abort(id, CloseReason::HandlerPanicked);
        }
        woken
    }

    /// The waker that calls [`read`](UpstreamLane::read) for a slot.
    fn reader(&mut self, slot: u32) -> Waker {
        let reader = self.readers.entry(slot).or_insert_with(|| {
            let wake = TaskWaker::new(self.shard.remote(), slot | UPSTREAM);
            let waker = wake.waker();
            Reader { wake, waker, parked: ParkOutcome::default() }
        });
        reader.wake.taken();
        reader.waker.clone()
    }

    pub(crate) fn input_ended(&mut self, core: &mut Core, id: ConnId) {
        let Some(shared) = session_of(core, id) else { return };
        if core.was_cut_off(id) {
            shared.body().cut_off();
        }
        shared.body().end_input();
        self.run_reader(core, id, shared.body());
    }

    pub(crate) fn wake(&mut self, core: &mut Core, id: ConnId, waker: Waker) {
        if wake(waker).is_err() {
            core.abort(id, CloseReason::HandlerPanicked);
        }
    }

    pub(crate) fn ended(&mut self, core: &mut Core, ended: EndedConn) {
        let EndedConn { id, shared, reason, .. } = ended;
        self.readers.remove(&id.slot());
        let Some(session) = shared.downcast_ref::<StreamSession>().map(ConnShared::body) else { return };
        match self.attempts.remove(&id) {
            Some(attempt) => attempt.done(Err(why_not(session, reason))),
            None => {
                session.set_ended(reason);
                self.run_reader(core, id, session);
                // The last owner may be user code.
                let _ = guard(move || drop(shared));
            }
        }
    }
}

fn session_of(core: &Core, id: ConnId) -> Option<ConnShared<StreamSession>> {
    core.shared(id)?.downcast_ref().cloned()
}

/// Why a connection could not be made.
fn why_not(session: &StreamSession, reason: CloseReason) -> io::Error {
    // The upstream ended it before its first byte: no fault of this host.
    if reason == CloseReason::PeerClosed {
        return io::Error::new(io::ErrorKind::UnexpectedEof, reason.name());
    }
    match session.end(reason) {
        Err(error) => error,
        Ok(()) => io::Error::new(io::ErrorKind::ConnectionAborted, reason.name()),
    }
}
