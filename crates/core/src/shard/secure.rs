//! Connections with a channel between socket and framing: which have one, their handshakes, and their ends.
//!
//! ```text
//!   admit ──▶ begin_handshake ──▶ unseal, step .. ──▶ ready: Lane::secured ──▶ opened, open_parked, refused
//!                                   │      ▲
//!                                   └ Work ┘ at the start of a turn, some in each
//! ```
//!
//! What a connection's channel needs lies in a table by slot, so that other connections have no byte for it. Whether there is an
//! entry, a bit tells that the short ways of bytes and replies look at anyway.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::rc::Rc;
use alloc::vec::Vec;

use ringserve_buf::{LeaseMut, try_box};

use super::turn::Lane;
use super::{QUEUE_KEPT, Shard};
use crate::chunked::Chunked;
use crate::conn::{Conn, Opened, Queued, describe};
use crate::framing::FrameError;
use crate::holders::LISTED_BYTES;
use crate::{Channel, CloseReason, ConnId, Observer, Transport};

/// Bytes that a peer may send before its handshake is done: a chain of client certificates is a few KiB.
const HANDSHAKE_BYTES_MAX: usize = 64 * 1024;

/// Steps of handshakes in a turn that has other things to do, and in one that has not. One costs as much as hundreds of frames, so
/// a turn with one is about twice as long as without; eight are 2 ms.
const STEPS_BESIDE_OTHERS: u32 = 1;
const STEPS_ALONE: u32 = 8;

/// A connection's channel.
pub(super) struct Sealed {
    pub channel: Box<dyn Channel>,
    /// What is in no send yet. Without room where nothing is.
    pub out: Vec<u8>,
    /// Bytes of `out` that are counted as held.
    pub counted: usize,
    /// What came behind records that said far more than they took. While it is there the channel says nothing before its next step.
    pub later: Option<Box<Later>>,
    /// Bytes received before it was ready.
    came: usize,
    /// It has something to say once nothing is in flight.
    pub speaks: bool,
    /// The handshake is done.
    pub is_ready: bool,
    /// Nothing is to be sealed any more: it said its last word.
    pub is_finished: bool,
    /// The peer said that nothing more will come.
    pub is_closed: bool,
}

/// Received bytes that are looked at later.
#[derive(Default)]
pub(super) struct Later {
    pub bytes: Vec<u8>,
}

impl Sealed {
    /// Bytes of memory that what is looked at later takes.
    pub(super) fn later_bytes(&self) -> usize {
        self.later.as_ref().map_or(0, |later| later.bytes.capacity())
    }
}

/// All channels of a shard, and where they come from.
pub(super) struct Channels {
    /// By listener.
    transports: Vec<Option<Rc<dyn Transport>>>,
    /// By slot. Without memory until there is one.
    table: Chunked<Option<Box<Sealed>>>,
    /// Connections of which a step waits, in the order in which they get one. Those that ended meanwhile are among them.
    working: VecDeque<ConnId>,
    steps_beside_others: u32,
    steps_alone: u32,
}

impl Channels {
    pub(super) fn new() -> Channels {
        Channels {
            transports: Vec::new(),
            table: Chunked::new(),
            working: VecDeque::new(),
            steps_beside_others: STEPS_BESIDE_OTHERS,
            steps_alone: STEPS_ALONE,
        }
    }

    /// The transport of a listener, if it has one.
    pub(super) fn transport(&self, listener: u16) -> Option<&Rc<dyn Transport>> {
        self.transports.get(usize::from(listener))?.as_ref()
    }

    #[inline]
    pub(super) fn get(&self, id: ConnId) -> Option<&Sealed> {
        self.table.get(id.slot())?.as_deref()
    }

    #[inline]
    pub(super) fn get_mut(&mut self, id: ConnId) -> Option<&mut Sealed> {
        self.table.get_mut(id.slot())?.as_deref_mut()
    }

    /// Bytes that are sealed and in no send yet.
    pub(super) fn out_bytes(&self, id: ConnId) -> usize {
        self.get(id).map_or(0, |sealed| sealed.out.len())
    }

    /// Bytes that came and are looked at later.
    pub(super) fn later_bytes(&self, id: ConnId) -> usize {
        self.get(id).map_or(0, Sealed::later_bytes)
    }

    /// True if a channel is not to say what it has before its next step.
    #[inline]
    pub(super) fn is_put_off(&self, id: ConnId) -> bool {
        self.get(id).is_some_and(|sealed| sealed.later.is_some())
    }

    /// Places in the queue of those that wait for a step.
    pub(super) fn queue_len(&self) -> usize {
        self.working.len()
    }

    /// How many steps a turn may make, if one waits.
    pub(super) fn steps(&self, beside_others: bool) -> Option<u32> {
        let steps = if beside_others { self.steps_beside_others } else { self.steps_alone };
        (!self.working.is_empty()).then_some(steps)
    }

    /// Slots for which there is memory.
    #[cfg(test)]
    pub(super) fn room(&self) -> usize {
        self.table.len()
    }

    /// How many connections have a channel.
    pub(super) fn count(&self) -> usize {
        self.table.iter().flatten().count()
    }
}

impl<O: Observer> Shard<O> {
    /// Puts a transport between the sockets of a listener and the framing of its connections. Before the first turn.
    pub fn secure(&mut self, listener: u16, transport: Rc<dyn Transport>) {
        let listener = usize::from(listener);
        let transports = &mut self.channels.transports;
        if transports.len() <= listener {
            transports.resize_with(listener + 1, || None);
        }
        transports[listener] = Some(transport);
    }

    /// Bounds the steps of handshakes that a turn makes: `beside_others` where completions came or frames wait, `alone` where
    /// nothing else did. Both at least 1; by default 1 and 8.
    pub fn bound_handshakes(&mut self, beside_others: u32, alone: u32) {
        self.channels.steps_beside_others = beside_others.max(1);
        self.channels.steps_alone = alone.max(1);
    }

    /// Begins the handshake of a connection that was [admitted](Shard::admit), behind its PROXY header if one is expected.
    /// [`Lane::secured`] says that it is done, [`Lane::ended`] that it will not be. False if the listener has no
    /// [transport](Shard::secure): then the service is asked at once. [`Transport::begin`] is called before anything changes, so a
    /// connection for which that panics is as it was.
    pub fn begin_handshake(&mut self, id: ConnId) -> bool {
        let Some(conn) = self.conns.get(id).filter(|conn| conn.is_open()) else { return true };
        let Some(listener) = conn.outlet().map(|outlet| outlet.listener()) else { return true };
        let Some(transport) = self.channels.transport(listener).cloned() else { return false };
        self.begin_handshake_by(id, &*transport);
        true
    }

    /// The same by a transport that is not a listener's, for a connection that the server makes.
    pub fn begin_handshake_by(&mut self, id: ConnId, transport: &dyn Transport) {
        let Some(conn) = self.conns.get_mut(id).filter(|conn| conn.is_open()) else { return };
        let mut out = Vec::new();
        let sealed = transport.begin(&mut out).and_then(|channel| {
            try_box(Sealed {
                channel,
                out,
                counted: 0,
                later: None,
                came: 0,
                speaks: false,
                is_ready: false,
                is_finished: false,
                is_closed: false,
            })
        });
        let (Some(sealed), Some(entry)) = (sealed, self.channels.table.entry(id.slot())) else {
            self.abort(id, CloseReason::MemoryLimit);
            return;
        };
        *entry = Some(sealed);
        conn.aside.seal();
        conn.opened = Opened::Handshake;
        self.lanes[conn.lane].counters.handshakes_started += 1;
        // Those that the server makes have a separate bound.
        if !self.lanes[conn.lane].is_outbound {
            self.accepting.starting += 1;
        }
        if self.is_full_of_starts() {
            self.sync_accept();
        }
        self.note_out(id);
        self.sync_receive(id);
        self.arm(id);
    }

    /// Counts what a connection's channel appended, which leaves with this turn.
    pub(super) fn note_out(&mut self, id: ConnId) {
        let Some(sealed) = self.channels.get_mut(id) else { return };
        if sealed.is_finished {
            // FIN is on its way, or the last word behind which nothing may follow.
            sealed.out.truncate(sealed.counted);
        }
        let len = sealed.out.len();
        let more = len - sealed.counted;
        if more == 0 {
            return;
        }
        sealed.counted = len;
        self.shared.hold(more);
        let Some(conn) = self.conns.get(id) else { return };
        if len > self.lanes[conn.lane].limits.outbox_bytes_max {
            // The peer has it answer on and on, and takes nothing.
            return self.abort(id, CloseReason::OutboxFull);
        }
        if let Some(outlet) = conn.outlet() {
            outlet.mark_dirty();
        }
        if len >= LISTED_BYTES {
            self.watch(id);
        }
    }

    /// A connection's channel has something to say once nothing is in flight.
    pub(super) fn will_speak(&mut self, id: ConnId) {
        let Some(sealed) = self.channels.get_mut(id).filter(|sealed| !sealed.is_finished) else { return };
        debug_assert!(sealed.is_ready, "the channel of {id} speaks before its handshake is done");
        sealed.speaks = true;
        if let Some(outlet) = self.conns.get(id).and_then(|conn| conn.outlet()) {
            outlet.mark_dirty();
        }
    }

    /// The peer was silent for long. True if its channel asks it for a sign of life.
    pub(super) fn channel_asks(&mut self, id: ConnId) -> bool {
        let is_open = |sealed: &&mut Sealed| sealed.is_ready && !sealed.is_finished;
        if !self.channels.get_mut(id).filter(is_open).is_some_and(|sealed| sealed.channel.asks()) {
            return false;
        }
        self.will_speak(id);
        true
    }

    /// Bytes came of a connection whose handshake is not done.
    pub(super) fn came_early(&mut self, id: ConnId, bytes: usize) {
        if let Some(sealed) = self.channels.get_mut(id).filter(|sealed| !sealed.is_ready) {
            sealed.came += bytes;
        }
    }

    /// A step of a connection's handshake is to be made.
    pub(super) fn want_step(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id).filter(|conn| !conn.queued.is_in(Queued::WORKING)) else {
            return;
        };
        if self.channels.working.try_reserve(1).is_err() {
            return self.abort(id, CloseReason::MemoryLimit);
        }
        conn.queued.enter(Queued::WORKING);
        self.lanes[conn.lane].counters.handshakes_waiting += 1;
        self.channels.working.push_back(id);
        self.later += 1;
    }

    /// Makes steps of handshakes that wait, as many as the turn has time for.
    #[cold]
    pub(super) fn run_steps(&mut self, mut steps: u32, lane: &mut (impl Lane<O> + ?Sized)) {
        while steps > 0
            && let Some(id) = self.channels.working.pop_front()
        {
            self.later -= 1;
            if !self.leave_steps(id) {
                continue;
            }
            let is_open = self.conns.get(id).is_some_and(Conn::is_open);
            let Some(sealed) = self.channels.get_mut(id).filter(|_| is_open) else { continue };
            steps -= 1;
            if let Some(later) = sealed.later.take() {
                self.take_later(id, *later, lane);
                continue;
            }
            let unsealed = sealed.channel.work(&mut sealed.out);
            self.note_out(id);
            self.go_on(id, LeaseMut::empty(), Some(unsealed), lane);
        }
        if self.channels.working.is_empty() {
            self.channels.working.shrink_to(QUEUE_KEPT);
        }
    }

    /// No step of the connection waits any more. True if one did.
    fn leave_steps(&mut self, id: ConnId) -> bool {
        let waits = |conn: &&mut Conn| conn.queued.is_in(Queued::WORKING);
        let Some(conn) = self.conns.get_mut(id).filter(waits) else { return false };
        conn.queued.leave(Queued::WORKING);
        self.lanes[conn.lane].counters.handshakes_waiting -= 1;
        true
    }

    /// The handshake is done: the lane is asked.
    #[cold]
    pub(super) fn ready(&mut self, id: ConnId, lane: &mut (impl Lane<O> + ?Sized)) {
        let Some(conn) = self.conns.get_mut(id).filter(|conn| conn.opened == Opened::Handshake) else {
            debug_assert!(false, "the handshake of {id} is done twice");
            return;
        };
        conn.opened = Opened::No;
        conn.since = self.stamp;
        let lane_id = conn.lane;
        self.lanes[lane_id].counters.handshakes_done += 1;
        let Some(shared) = conn.shared.clone() else { return };
        let facts = self.channels.get_mut(id).and_then(|sealed| {
            sealed.is_ready = true;
            sealed.channel.facts()
        });
        self.start_over(lane_id);
        if facts.is_some_and(|facts| !shared.keep_facts(facts)) {
            return self.abort(id, CloseReason::MemoryLimit);
        }
        lane.secured(self, id);
        // The goodbye of a drain comes before the first frame.
        self.dispatch(lane);
    }

    /// A connection in the middle of its handshake, of which nothing is to be looked at now: ends it if it cannot be done.
    pub(super) fn check_handshake(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get(id).filter(|conn| conn.opened == Opened::Handshake) else { return };
        let came = self.channels.get(id).map_or(0, |sealed| sealed.came);
        let waits = conn.queued.is_in(Queued::WORKING);
        if came > HANDSHAKE_BYTES_MAX && waits {
            // It may have begun to speak behind its last flight, and is received from once the step was made.
            return self.pause(id);
        }
        if came > HANDSHAKE_BYTES_MAX {
            let error = FrameError::TooLarge { bytes: came, max: HANDSHAKE_BYTES_MAX };
            return self.finish(id, CloseReason::BadFrame(error));
        }
        // What it sent before FIN may be the rest.
        if conn.input_ended && !waits {
            let reason = if came == 0 { CloseReason::PeerClosed } else { CloseReason::PeerClosedMidFrame };
            self.finish(id, reason);
        }
    }

    /// The peer broke the rules of the channel: what tells it so leaves, and nothing behind that.
    #[cold]
    pub(super) fn fault(&mut self, id: ConnId, reason: CloseReason) {
        if let Some(sealed) = self.channels.get_mut(id) {
            sealed.is_finished = true;
        }
        if let Some(shared) = self.shared(id) {
            shared.drop_pending();
        }
        self.finish(id, reason);
    }

    /// True if the input of a connection ended, and its channel was told of no end before.
    pub fn was_cut_off(&self, id: ConnId) -> bool {
        self.channels.get(id).is_some_and(|sealed| !sealed.is_closed)
    }

    /// Why a connection whose peer sent FIN was cut off by that, if it was.
    pub(super) fn cut_off(&self, id: ConnId) -> Option<CloseReason> {
        let conn = self.conns.get(id).filter(|conn| conn.has_channel())?;
        let sealed = self.channels.get(id).filter(|sealed| sealed.later.is_none())?;
        match !sealed.is_closed && conn.inbox.as_ref().is_some_and(|inbox| inbox.is_mid_record()) {
            true => Some(CloseReason::PeerClosedMidFrame),
            false => sealed.channel.cut_off(),
        }
    }

    /// The service is done with a connection that has a channel, and nothing more is sent.
    #[cold]
    pub(super) fn drop_channel(&mut self, id: ConnId, reason: CloseReason) {
        self.leave_steps(id);
        let Some(entry) = self.channels.table.get_mut(id.slot()) else { return };
        let Some(sealed) = entry.take() else { return };
        self.shared.release(sealed.counted + sealed.later_bytes());
        if !sealed.is_ready
            && let Some(conn) = self.conns.get(id)
        {
            let counters = &mut self.lanes[conn.lane].counters;
            match reason {
                CloseReason::HandshakeTimeout => counters.handshakes_timed_out += 1,
                _ => counters.handshakes_failed += 1,
            }
        }
    }

    /// Panics if a connection that has a channel contradicts it. Returns the bytes that are sealed and in no send.
    pub(super) fn check_channel(&self, id: ConnId, conn: &Conn) -> usize {
        let text = || describe(id, conn);
        let sealed = self.channels.get(id).unwrap_or_else(|| panic!("no channel: {}", text()));
        assert_eq!(sealed.counted, sealed.out.len(), "sealed bytes are not counted: {}", text());
        assert_eq!(conn.opened == Opened::Handshake, !sealed.is_ready, "{}", text());
        let says = !sealed.out.is_empty() || (sealed.speaks && !sealed.is_finished);
        let leaves = !says || conn.send.is_on() || self.shared.has_dirty();
        assert!(leaves, "sealed bytes wait for nothing: {}", text());
        assert!(conn.bulk == 0, "records are received into a frame: {}", text());
        let waits = conn.queued.is_in(Queued::WORKING);
        assert!(!waits || self.channels.working.contains(&id), "its step does not come: {}", text());
        let looks = conn.is_open() && !conn.is_cut() && conn.takes_frames() && conn.waiting_bytes() == 0;
        assert!(sealed.later.is_none() || waits || !looks, "what it has waits for nothing: {}", text());
        sealed.counted + sealed.later_bytes()
    }

    /// Panics unless `channels` connections have a channel, and `working` of their steps wait.
    pub(super) fn check_channels(&self, channels: usize, working: u64) {
        assert_eq!(channels, self.channels.count(), "channels of connections that ended");
        let waiting: u64 = self.lanes.iter().map(|lane| lane.counters.handshakes_waiting).sum();
        assert_eq!(working, waiting, "steps that wait");
        for lane in self.lanes.iter() {
            let of = &lane.counters;
            let over = of.handshakes_done + of.handshakes_failed + of.handshakes_timed_out;
            assert!(over <= of.handshakes_started, "more handshakes ended than began");
        }
    }
}
