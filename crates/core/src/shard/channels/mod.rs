//! Connections with a channel between socket and framing: which have one, their handshakes, and
//! their ends.
//!
//! ```text
//!   admit ──▶ begin_handshake ──▶ unseal, step .. ──▶ ready: Lane::secured ──▶ opened, open_parked, refused
//!                                   │      ▲
//!                                   └ Work ┘ at the start of a turn, some in each
//! ```
//!
//! Channels lie in a table by slot, which services reach too (`ChannelTable`). Bytes that a channel
//! produced and no send took lie in another one. Bits of [`SlowPathFlags`], which the short paths
//! of bytes and replies check anyway, show whether a connection has a channel, and its stage.
//!
//! Each call of a channel is [guarded](Observer::guard): one that panics is dropped, and ends its
//! connection.
// May use: turn.
// Begin with: the handshake below; `unseal.rs` and `seal.rs` are the paths in and out.

mod seal;
mod unseal;

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::rc::Rc;
use alloc::vec::Vec;

use ringserve_buf::{LeaseMut, try_box};

use super::turn::Lane;
use super::{QUEUE_KEPT, Shard};
use crate::connection::{
    Conn, OpenState, Outlet, QueueFlags, SlowPathFlags, TransportError, TransportEvent, describe,
};
use crate::framing::FrameError;
use crate::tables::{Chunked, LISTED_BYTES};
use crate::{CloseReason, ConnId, Observer, Transport, TransportConn};

/// Bytes that a peer may send before its handshake is done: a chain of client certificates is a few
/// KiB.
const HANDSHAKE_BYTES_MAX: usize = 64 * 1024;

/// Steps of handshakes in a turn that has other things to do, and in one that has not. One costs as
/// much as hundreds of frames, so a turn with one is about twice as long as without; eight are 2
/// ms.
const STEPS_BESIDE_OTHERS: u32 = 1;
const STEPS_ALONE: u32 = 8;

/// The answer of a channel that panicked.
pub(super) const PANICKED: TransportError = TransportError(CloseReason::HandlerPanicked);

/// Bytes that a channel produced, or received before it was ready. Exists only while there are any.
#[derive(Default)]
struct ChannelBuffers {
    /// Bytes that are in no send yet, and counted as held.
    out: Vec<u8>,
    /// Bytes received before it was ready.
    came: usize,
    /// Bytes after records that decoded to far more than their size. While there are any the
    /// channel decodes nothing before its next step.
    later: Option<Vec<u8>>,
    /// [`TransportConn::kept_bytes`], counted as held.
    kept: usize,
}

/// The transports of a shard's channels, and the work to be done for them.
pub(super) struct Channels {
    /// By listener.
    transports: Vec<Option<Rc<dyn Transport>>>,
    /// The buffers by slot. Without memory until there is one.
    said: Chunked<Option<Box<ChannelBuffers>>>,
    /// Connections with a waiting step, in the order in which they get one. Those that ended
    /// meanwhile are among them.
    working: VecDeque<ConnId>,
    steps_beside_others: u32,
    steps_alone: u32,
}

impl Channels {
    pub(super) fn new() -> Channels {
        Channels {
            transports: Vec::new(),
            said: Chunked::new(),
            working: VecDeque::new(),
            steps_beside_others: STEPS_BESIDE_OTHERS,
            steps_alone: STEPS_ALONE,
        }
    }

    /// The transport of a listener, if it has one.
    pub(super) fn transport(&self, listener: u16) -> Option<&Rc<dyn Transport>> {
        self.transports.get(usize::from(listener))?.as_ref()
    }

    fn said(&self, id: ConnId) -> Option<&ChannelBuffers> {
        self.said.get(id.slot())?.as_deref()
    }

    /// True if a connection has no such bytes, nor [anything put off](Channels::is_put_off).
    #[inline(never)]
    pub(super) fn has_said_nothing(&self, id: ConnId) -> bool {
        self.said(id).is_none_or(|said| said.out.is_empty() && said.later.is_none())
    }

    /// Bytes that are sealed and in no send yet.
    #[inline]
    pub(super) fn out_bytes(&self, id: ConnId) -> usize {
        self.said(id).map_or(0, |said| said.out.len())
    }

    /// Bytes received before the channel was ready.
    pub(super) fn came(&self, id: ConnId) -> usize {
        self.said(id).map_or(0, |said| said.came)
    }

    /// Changes a connection's buffers. False if the system has no memory for them.
    fn with_said(&mut self, id: ConnId, change: impl FnOnce(&mut ChannelBuffers) -> bool) -> bool {
        let Some(entry) = self.said.entry(id.slot()) else { return false };
        if entry.is_none() {
            *entry = try_box(ChannelBuffers::default());
        }
        entry.as_deref_mut().is_some_and(change)
    }

    /// Takes what is sealed and in no send yet. The rest is kept until the channel is ready.
    #[inline]
    pub(super) fn take_out(&mut self, id: ConnId) -> Vec<u8> {
        let Some(Some(said)) = self.said.get_mut(id.slot()) else { return Vec::new() };
        let out = core::mem::take(&mut said.out);
        self.tidy(id);
        out
    }

    /// Frees the memory of empty buffers.
    fn tidy(&mut self, id: ConnId) {
        if let Some(entry) = self.said.get_mut(id.slot()) {
            entry.take_if(|said| said.out.is_empty() && said.came + said.kept == 0 && said.later.is_none());
        }
    }

    /// Bytes of memory held by input that is looked at later.
    pub(super) fn later_bytes(&self, id: ConnId) -> usize {
        self.said(id).and_then(|said| said.later.as_ref()).map_or(0, Vec::capacity)
    }

    /// Bytes of memory that the handshake occupies as long as the connection lasts.
    pub(super) fn kept_bytes(&self, id: ConnId) -> usize {
        self.said(id).map_or(0, |said| said.kept)
    }

    /// True if a channel must decode nothing before its next step.
    #[inline]
    pub(super) fn is_put_off(&self, id: ConnId) -> bool {
        self.said(id).is_some_and(|said| said.later.is_some())
    }

    /// Keeps bytes that are looked at later, after those kept already. `None` if the system has no
    /// memory for them, else how many there are now.
    pub(super) fn put_later(&mut self, id: ConnId, wire: &[u8]) -> Option<usize> {
        let mut kept = None;
        self.with_said(id, |said| {
            let later = said.later.get_or_insert_default();
            if later.try_reserve(wire.len()).is_ok() {
                later.extend_from_slice(wire);
                kept = Some(later.len());
            }
            kept.is_some()
        });
        kept
    }

    /// Takes the bytes to be looked at now.
    pub(super) fn take_later(&mut self, id: ConnId) -> Option<Vec<u8>> {
        let later = self.said.get_mut(id.slot())?.as_deref_mut()?.later.take();
        self.tidy(id);
        later
    }

    /// Places in the queue of those that wait for a step.
    pub(super) fn queue_len(&self) -> usize {
        self.working.len()
    }

    /// The number of steps that a turn may make, if one waits.
    pub(super) fn steps(&self, beside_others: bool) -> Option<u32> {
        let steps = if beside_others { self.steps_beside_others } else { self.steps_alone };
        (!self.working.is_empty()).then_some(steps)
    }

    /// Slots for which there is memory.
    #[cfg(test)]
    pub(super) fn room(&self) -> usize {
        self.said.len()
    }
}

impl<O: Observer> Shard<O> {
    /// Puts a transport between the sockets of a listener and the framing of its connections.
    /// Before the first turn.
    pub fn secure(&mut self, listener: u16, transport: Rc<dyn Transport>) {
        let listener = usize::from(listener);
        let transports = &mut self.channels.transports;
        if transports.len() <= listener {
            transports.resize_with(listener + 1, || None);
        }
        transports[listener] = Some(transport);
    }

    /// Bounds the steps of handshakes that a turn makes: `beside_others` if completions came or
    /// frames wait, `alone` otherwise. Both at least 1; by default 1 and 8.
    pub fn bound_handshakes(&mut self, beside_others: u32, alone: u32) {
        self.channels.steps_beside_others = beside_others.max(1);
        self.channels.steps_alone = alone.max(1);
    }

    /// Begins the handshake of a connection that was [admitted](Shard::admit), after its PROXY
    /// header if one is expected. [`Lane::secured`] reports that it is done, [`Lane::ended`] that
    /// it will not be. False if the listener has no [transport](Shard::secure): then the service is
    /// asked at once. [`Transport::begin`] is called before anything changes, so a connection for
    /// which it panics stays as it was.
    pub fn begin_handshake(&mut self, id: ConnId) -> bool {
        let Some(conn) = self.conns.get(id).filter(|conn| conn.is_open()) else { return true };
        let Some(listener) = conn.outlet().map(|outlet| outlet.listener()) else { return true };
        let Some(transport) = self.channels.transport(listener).cloned() else { return false };
        self.begin_handshake_by(id, &*transport);
        true
    }

    /// Begins the handshake with a transport that is not a listener's, for a connection that the
    /// server makes.
    pub fn begin_handshake_by(&mut self, id: ConnId, transport: &dyn Transport) {
        if !self.conns.get(id).is_some_and(Conn::is_open) {
            return;
        }
        let mut out = Vec::new();
        let has_room = self.shared.channels().make_room(id);
        let Some(channel) = transport.begin(&mut out).filter(|_| has_room) else {
            return self.abort(id, CloseReason::MemoryLimit);
        };
        self.shared.channels().put(id, channel);
        let Some(conn) = self.conns.get_mut(id) else { return };
        conn.aside.seal();
        conn.opened = OpenState::Handshake;
        self.lanes[conn.lane].counters.handshakes_started += 1;
        let listener = conn.outlet().map(|outlet| outlet.listener());
        // Connections that the server makes have a separate bound.
        if let Some(listener) = listener.filter(|_| !self.lanes[conn.lane].is_outbound) {
            self.start_begins(id, listener, false);
        }
        self.note_out(id, out);
        self.sync_receive(id);
        self.arm(id);
    }

    /// Calls a connection's channel. `None` if it panicked, now or before: then it is dropped.
    #[inline]
    pub(super) fn call_channel<T>(
        &self,
        id: ConnId,
        call: impl FnOnce(&mut dyn TransportConn) -> T,
    ) -> Option<T> {
        let channels = self.shared.channels();
        let answer = self.observer.guard(id, || channels.ask(id, call));
        if answer.is_none() {
            self.discard(id, channels.take(id));
        }
        answer.flatten()
    }

    /// Calls a channel to append to `out`, and does not send half a record.
    #[inline]
    pub(super) fn call_channel_out<T>(
        &self,
        id: ConnId,
        out: &mut Vec<u8>,
        call: impl FnOnce(&mut dyn TransportConn, &mut Vec<u8>) -> T,
    ) -> Option<T> {
        let len = out.len();
        let answer = self.call_channel(id, |channel| call(channel, out));
        if answer.is_none() {
            out.truncate(len);
        }
        answer
    }

    fn discard(&self, id: ConnId, channel: Option<Box<dyn TransportConn>>) {
        if channel.is_some() {
            self.observer.guard(id, move || drop(channel));
        }
    }

    /// Keeps and counts bytes that a connection's channel appended, which are sent with this turn.
    pub(super) fn note_out(&mut self, id: ConnId, mut out: Vec<u8>) {
        let Some(conn) = self.conns.get(id).filter(|_| !out.is_empty()) else { return };
        if conn.aside.says(SlowPathFlags::FINISHED) {
            // FIN is on its way, or the closing message after which nothing may follow.
            return;
        }
        let more = out.len();
        let is_kept = self.channels.with_said(id, |said| {
            if said.out.is_empty() {
                said.out = out;
                return true;
            }
            let has_room = said.out.try_reserve(more).is_ok();
            if has_room {
                said.out.append(&mut out);
            }
            has_room
        });
        if !is_kept {
            return self.abort(id, CloseReason::MemoryLimit);
        }
        self.shared.hold(more);
        let len = self.channels.out_bytes(id);
        if len > self.lanes[conn.lane].limits.outbox_bytes_max {
            // The peer makes it answer again and again, and takes nothing.
            return self.abort(id, CloseReason::OutboxFull);
        }
        if let Some(outlet) = conn.outlet() {
            outlet.mark_dirty();
        }
        if len >= LISTED_BYTES {
            self.watch(id);
        }
    }

    /// Notes that a connection's channel has bytes to send once nothing is in flight.
    pub(super) fn will_speak(&mut self, id: ConnId) {
        let goes_on = |conn: &&mut Conn| conn.has_channel() && !conn.aside.says(SlowPathFlags::FINISHED);
        let Some(conn) = self.conns.get_mut(id).filter(goes_on) else { return };
        debug_assert!(
            conn.opened != OpenState::Handshake,
            "the channel of {id} speaks before its handshake is done"
        );
        conn.aside.note(SlowPathFlags::SPEAKS, true);
        if let Some(outlet) = conn.outlet() {
            outlet.mark_dirty();
        }
    }

    /// Handles a peer that was silent for long. True if its channel asks it for a sign of life.
    pub(super) fn channel_asks(&mut self, id: ConnId) -> bool {
        if !self.conns.get(id).is_some_and(Conn::may_seal)
            || !self.call_channel(id, |channel| channel.on_heartbeat()).unwrap_or(false)
        {
            return false;
        }
        self.will_speak(id);
        true
    }

    /// Counts bytes of a connection whose handshake is not done.
    pub(super) fn came_early(&mut self, id: ConnId, bytes: usize) {
        let is_early = |conn: &Conn| conn.opened == OpenState::Handshake;
        if bytes == 0 || !self.conns.get(id).is_some_and(is_early) {
            return;
        }
        let is_noted = self.channels.with_said(id, |said| {
            said.came += bytes;
            true
        });
        if !is_noted {
            self.abort(id, CloseReason::MemoryLimit);
        }
    }

    /// Queues a step of a connection's handshake.
    pub(super) fn want_step(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id).filter(|conn| !conn.queued.is_in(QueueFlags::WORKING)) else {
            return;
        };
        if self.channels.working.try_reserve(1).is_err() {
            return self.abort(id, CloseReason::MemoryLimit);
        }
        conn.queued.enter(QueueFlags::WORKING);
        self.lanes[conn.lane].counters.handshakes_waiting += 1;
        self.channels.working.push_back(id);
        self.later += 1;
    }

    /// Makes waiting steps of handshakes, as many as the turn has time for.
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
            if !is_open {
                continue;
            }
            steps -= 1;
            if let Some(later) = self.channels.take_later(id) {
                self.take_later(id, later, lane);
                continue;
            }
            let mut out = Vec::new();
            let unsealed = self.call_channel_out(id, &mut out, |channel, out| channel.work(out));
            self.note_out(id, out);
            self.go_on(
                id,
                LeaseMut::empty(),
                0,
                Some(unsealed.unwrap_or(TransportEvent::Fault(PANICKED))),
                lane,
            );
        }
        if self.channels.working.is_empty() {
            self.channels.working.shrink_to(QUEUE_KEPT);
        }
    }

    /// Removes the waiting step of a connection. True if there was one.
    fn leave_steps(&mut self, id: ConnId) -> bool {
        let waits = |conn: &&mut Conn| conn.queued.is_in(QueueFlags::WORKING);
        let Some(conn) = self.conns.get_mut(id).filter(waits) else { return false };
        conn.queued.leave(QueueFlags::WORKING);
        self.lanes[conn.lane].counters.handshakes_waiting -= 1;
        true
    }

    /// Handles the end of a handshake: the lane is asked.
    #[cold]
    pub(super) fn ready(&mut self, id: ConnId, lane: &mut (impl Lane<O> + ?Sized)) {
        let Some(conn) = self.conns.get_mut(id).filter(|conn| conn.opened == OpenState::Handshake) else {
            debug_assert!(false, "the handshake of {id} is done twice");
            return;
        };
        conn.opened = OpenState::No;
        conn.since = self.stamp;
        let lane_id = conn.lane;
        self.lanes[lane_id].counters.handshakes_done += 1;
        let Some(shared) = conn.shared.clone() else { return };
        if let Some(Some(said)) = self.channels.said.get_mut(id.slot()) {
            said.came = 0;
            self.channels.tidy(id);
        }
        let facts = self.call_channel(id, |channel| channel.info()).flatten();
        self.start_over(lane_id, shared.listener());
        if facts.is_some_and(|facts| !shared.keep_facts(facts)) {
            return self.abort(id, CloseReason::MemoryLimit);
        }
        let kept = self.call_channel(id, |channel| channel.kept_bytes()).unwrap_or(0);
        if kept > 0 && !self.note_kept(id, kept) {
            return self.abort(id, CloseReason::MemoryLimit);
        }
        lane.secured(self, id);
        // The drain's message comes before the first frame.
        self.dispatch(lane);
        if kept > 0 && self.shared(id).is_some() {
            self.check_held(id);
        }
    }

    /// Counts the memory that a handshake occupies as long as the connection lasts. False if the
    /// system has no memory for the note.
    fn note_kept(&mut self, id: ConnId, bytes: usize) -> bool {
        let is_noted = self.channels.with_said(id, |said| {
            said.kept = bytes;
            true
        });
        if is_noted {
            self.shared.hold(bytes);
        }
        is_noted
    }

    /// Checks a connection in the middle of its handshake, of which nothing can be looked at now:
    /// ends it if the handshake cannot be done.
    pub(super) fn check_handshake(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get(id).filter(|conn| conn.opened == OpenState::Handshake) else {
            return;
        };
        let came = self.channels.came(id);
        let waits = conn.queued.is_in(QueueFlags::WORKING);
        if came > HANDSHAKE_BYTES_MAX && waits {
            // The peer may have sent data after its last flight; receiving goes on once the step
            // was made.
            return self.pause(id);
        }
        if came > HANDSHAKE_BYTES_MAX {
            let error = FrameError::TooLarge { bytes: came, max: HANDSHAKE_BYTES_MAX };
            return self.finish(id, CloseReason::BadFrame(error));
        }
        // The bytes before FIN may be the rest.
        if conn.input_ended() && !waits {
            let reason = if came == 0 { CloseReason::PeerClosed } else { CloseReason::PeerClosedMidFrame };
            self.finish(id, reason);
        }
    }

    /// Handles a peer that broke the rules of the channel: the alert is sent, and nothing after it.
    #[cold]
    pub(super) fn fault(&mut self, id: ConnId, reason: CloseReason) {
        if let Some(conn) = self.conns.get_mut(id) {
            conn.aside.note(SlowPathFlags::FINISHED, true);
        }
        if let Some(shared) = self.shared(id) {
            shared.drop_pending();
        }
        self.finish(id, reason);
    }

    /// True if the input of a connection ended, and its channel received no closing message before.
    pub fn was_cut_off(&self, id: ConnId) -> bool {
        let is_cut_off = |conn: &Conn| {
            conn.has_channel() && conn.outlet().is_some() && !conn.aside.says(SlowPathFlags::CLOSED)
        };
        self.conns.get(id).is_some_and(is_cut_off)
    }

    /// The reason if the peer's FIN cut a connection off.
    pub(super) fn cut_off(&self, id: ConnId) -> Option<CloseReason> {
        let conn = self.conns.get(id).filter(|conn| conn.has_channel())?;
        if self.channels.is_put_off(id) {
            return None;
        }
        let is_closed = conn.aside.says(SlowPathFlags::CLOSED);
        match !is_closed && conn.inbox.as_ref().is_some_and(|inbox| inbox.is_mid_record()) {
            true => Some(CloseReason::PeerClosedMidFrame),
            false => self.call_channel(id, |channel| channel.eof_error()).flatten(),
        }
    }

    /// Ends a channel: the service is done with its connection, and nothing more is sent.
    #[cold]
    pub(super) fn drop_channel(&mut self, id: ConnId, outlet: &Outlet, was_early: bool, reason: CloseReason) {
        self.leave_steps(id);
        let later_bytes = self.channels.later_bytes(id);
        let said = self.channels.said.get_mut(id.slot()).and_then(Option::take);
        self.shared.release(said.map_or(0, |said| said.out.len() + said.kept) + later_bytes);
        let Some(conn) = self.conns.get(id) else { return };
        if was_early {
            let counters = &mut self.lanes[conn.lane].counters;
            match reason {
                CloseReason::HandshakeTimeout => counters.handshakes_timed_out += 1,
                _ => counters.handshakes_failed += 1,
            }
        } else if let Some(facts) = self.call_channel(id, |channel| channel.info_on_demand()).flatten() {
            outlet.keep_last_facts(facts);
        }
        self.discard(id, self.shared.channels().take(id));
    }

    /// Drops the rest of the channels if the shard ends with connections.
    pub(super) fn drop_channels(&mut self) {
        let shared = self.shared.clone();
        let mut from = 0;
        while let Some((next, channel)) = shared.channels().take_any(from) {
            // The generation of the slot does not matter here.
            self.discard(ConnId::new(next - 1, 0), Some(channel));
            from = next;
        }
    }

    /// Panics if the state of a connection contradicts its channel. Returns the bytes that are
    /// sealed and in no send.
    pub(super) fn check_channel(&self, id: ConnId, conn: &Conn) -> usize {
        let text = || describe(id, conn);
        let out_bytes = self.channels.out_bytes(id);
        let is_early = conn.opened == OpenState::Handshake;
        assert!(is_early || self.channels.came(id) == 0, "what came early is counted: {}", text());
        let says = out_bytes > 0
            || (conn.aside.says(SlowPathFlags::SPEAKS) && !conn.aside.says(SlowPathFlags::FINISHED));
        let leaves = !says || conn.send.is_on() || self.shared.has_dirty();
        assert!(leaves, "sealed bytes wait for nothing: {}", text());
        assert!(conn.bulk == 0, "records are received into a frame: {}", text());
        let waits = conn.queued.is_in(QueueFlags::WORKING);
        assert!(!waits || self.channels.working.contains(&id), "its step does not come: {}", text());
        let looks = conn.is_open() && !conn.is_cut() && conn.takes_frames() && conn.waiting_bytes() == 0;
        assert!(
            !self.channels.is_put_off(id) || waits || !looks,
            "what it has waits for nothing: {}",
            text()
        );
        out_bytes + self.channels.later_bytes(id) + self.channels.kept_bytes(id)
    }

    /// Panics unless `channels` connections have a channel, and `working` of their steps wait.
    pub(super) fn check_channels(&self, channels: usize, working: u64) {
        assert_eq!(channels, self.shared.channels().count(), "channels of connections that ended");
        let waiting: u64 = self.lanes.iter().map(|lane| lane.counters.handshakes_waiting).sum();
        assert_eq!(working, waiting, "steps that wait");
        for lane in self.lanes.iter() {
            let of = &lane.counters;
            let over = of.handshakes_done + of.handshakes_failed + of.handshakes_timed_out;
            assert!(over <= of.handshakes_started, "more handshakes ended than began");
        }
    }
}
