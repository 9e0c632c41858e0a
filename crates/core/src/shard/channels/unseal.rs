//! Received bytes of a connection with a channel, on their way to the service.
//!
//! All received bytes are unsealed as they come. Plain bytes take the path that received ones take
//! elsewhere: to the service, or to the inbox if it takes none now. So budgets, limits and pauses
//! are the same, and only the start of a record belongs to the channel. It is noted in the inbox,
//! where it counts as held, and starts the peer's time for enough of it as the start of a frame
//! does.
//!
//! Records that decode to far more than came, such as compressed ones, are the exception: the bytes
//! after them are put off to steps like those of handshakes, some in each turn, and none while the
//! inbox is full.

use alloc::vec::Vec;

use ringserve_buf::{LeaseMut, try_box};

use super::PANICKED;
use crate::connection::{Conn, Inbox, Input, OpenState, SlowPathFlags, TransportError, TransportEvent};
use crate::shard::Shard;
use crate::shard::turn::Lane;
use crate::{CloseReason, ConnId, Observer, TransportConn};

/// Plain bytes beyond the received ones that one look at a channel may bring, not counting the last
/// record: about as long as a step of a handshake takes, for records that expand a thousandfold.
const GROWS_MAX: usize = 256 * 1024;

impl<O: Observer> Shard<O> {
    /// Handles received bytes of a connection with a channel.
    #[inline(never)]
    pub(in crate::shard) fn unseal(
        &mut self,
        id: ConnId,
        wire: LeaseMut,
        lane: &mut (impl Lane<O> + ?Sized),
    ) {
        let is_common = |conn: &Conn| conn.takes_frames() && conn.is_sealed_alone() && conn.inbox.is_none();
        if self.conns.get(id).is_some_and(is_common) && self.channels.has_said_nothing(id) {
            return self.unseal_whole(id, wire, lane);
        }
        self.came_early(id, wire.len());
        if self.channels.is_put_off(id) {
            return self.put_off(id, wire);
        }
        let came = wire.len();
        self.go_on(id, wire, came, None, lane);
    }

    /// Handles the common case: a whole record, with nothing before it, and nothing after it.
    fn unseal_whole(&mut self, id: ConnId, mut wire: LeaseMut, lane: &mut (impl Lane<O> + ?Sized)) {
        let (came, mut out) = (wire.len(), Vec::new());
        let answered = self.call_channel_out(id, &mut out, |channel, out| {
            let unsealed = channel.decode(&mut wire, out);
            (unsealed, wire.is_empty() && channel.wants_more())
        });
        let unsealed = match answered {
            Some((TransportEvent::Plain(plain), true)) if out.is_empty() && !plain.is_empty() => {
                let Some(conn) = self.conns.get(id) else { return };
                let is_plain = !conn.input_ended() && !conn.paused && self.drain.is_none();
                self.begin_batch();
                return self.hand_out_aside(id, plain.freeze(), is_plain, lane);
            }
            answered => answered.map_or(TransportEvent::Fault(PANICKED), |(unsealed, _)| unsealed),
        };
        self.note_out(id, out);
        self.go_on(id, wire, came, Some(unsealed), lane);
    }

    /// Keeps received bytes until the connection's next step, after those kept already.
    #[cold]
    fn put_off(&mut self, id: ConnId, wire: LeaseMut) {
        let before = self.channels.later_bytes(id);
        let kept = self.channels.put_later(id, &wire);
        drop(wire);
        self.shared.hold(self.channels.later_bytes(id) - before);
        let Some(later) = kept else { return self.abort(id, CloseReason::MemoryLimit) };
        let Some(conn) = self.conns.get(id) else { return };
        let is_much = later >= self.lanes[conn.lane].limits.inbox_bytes_high;
        // While the inbox is full the step is requested once all of that was looked at.
        if !(conn.paused && conn.waiting_bytes() > 0) {
            self.want_step(id);
        }
        if is_much {
            self.pause(id);
        }
        self.check_held(id);
    }

    /// Goes on with bytes that were put off.
    #[cold]
    pub(super) fn take_later(&mut self, id: ConnId, later: Vec<u8>, lane: &mut (impl Lane<O> + ?Sized)) {
        self.shared.release(later.capacity());
        match LeaseMut::try_from_vec(later) {
            Some(wire) => {
                let came = wire.len();
                self.go_on(id, wire, came, None, lane);
            }
            None => self.abort(id, CloseReason::MemoryLimit),
        }
    }

    /// Makes a channel take all of `wire`, after its earlier answer, if there is one. `came` bytes
    /// are new, with those that it took then.
    pub(super) fn go_on(
        &mut self,
        id: ConnId,
        wire: LeaseMut,
        came: usize,
        answered: Option<TransportEvent>,
        lane: &mut (impl Lane<O> + ?Sized),
    ) {
        if let Some(conn) = self.conns.get_mut(id) {
            // Its bytes are not over before it reports so, although FIN may have come.
            conn.aside.unseal(true);
        }
        let left = self.unseal_all(id, wire, came, answered, lane);
        let Some(conn) = self.conns.get_mut(id) else { return };
        conn.aside.unseal(false);
        let Some(came) = left else { return };
        self.note_record(id, came);
        self.check_handshake(id);
        if self.conns.get(id).is_some_and(|conn| conn.takes_frames() && conn.waiting_bytes() == 0) {
            self.out_of_bytes(id);
        }
    }

    /// Takes all plain bytes that a channel has. Returns how many bytes came of a record that did
    /// not end, unless the connection is over.
    fn unseal_all(
        &mut self,
        id: ConnId,
        mut wire: LeaseMut,
        mut came: usize,
        mut answered: Option<TransportEvent>,
        lane: &mut (impl Lane<O> + ?Sized),
    ) -> Option<usize> {
        let most = came + GROWS_MAX;
        let (mut has_batch, mut said) = (false, 0);
        loop {
            // A frame that was handed out may have ended the connection. The bytes after it are
            // dropped.
            let goes_on = |conn: &Conn| conn.is_open() && !conn.is_cut();
            if !self.conns.get(id).is_some_and(goes_on) {
                return None;
            }
            let is_heard = |conn: &&Conn| conn.has_channel() && !conn.aside.says(SlowPathFlags::CLOSED);
            let is_ready = self.conns.get(id).filter(is_heard)?.opened != OpenState::Handshake;
            if said > most
                && !(wire.is_empty()
                    && self.call_channel(id, |channel| channel.held_bytes()).is_none_or(|held| held == 0))
            {
                self.put_off(id, wire);
                break Some(came);
            }
            let unsealed = answered.take().unwrap_or_else(|| {
                let mut out = Vec::new();
                let unsealed =
                    self.call_channel_out(id, &mut out, |channel, out| channel.decode(&mut wire, out));
                self.note_out(id, out);
                unsealed.unwrap_or(TransportEvent::Fault(PANICKED))
            });
            // It may have appended too much.
            if !self.conns.get(id).is_some_and(goes_on) {
                return None;
            }
            match unsealed {
                TransportEvent::Plain(plain) => {
                    debug_assert!(is_ready, "plain bytes of {id} before its handshake is done");
                    (came, said) = (0, said + plain.len());
                    self.record_ended(id);
                    if !plain.is_empty() {
                        self.take_plain(id, plain, &mut has_batch, lane);
                    }
                }
                TransportEvent::More => {
                    debug_assert!(wire.is_empty(), "the channel of {id} leaves bytes and wants more");
                    break Some(came);
                }
                TransportEvent::Ready => {
                    self.ready(id, lane);
                    has_batch = false;
                }
                TransportEvent::Work => {
                    self.want_step(id);
                    break Some(came);
                }
                TransportEvent::Speaks => self.will_speak(id),
                TransportEvent::Closed => {
                    self.input_closed(id);
                    break Some(came);
                }
                TransportEvent::Fault(TransportError(reason)) => {
                    self.fault(id, reason);
                    return None;
                }
            }
        }
    }

    /// Hands plain bytes out, or keeps them.
    fn take_plain(
        &mut self,
        id: ConnId,
        plain: LeaseMut,
        has_batch: &mut bool,
        lane: &mut (impl Lane<O> + ?Sized),
    ) {
        let Some(conn) = self.conns.get(id) else { return };
        if !conn.takes_frames() || conn.waiting_bytes() > 0 {
            return self.hold(id, plain.freeze(), false);
        }
        let is_plain = conn.inbox.is_none() && !conn.input_ended() && !conn.paused && self.drain.is_none();
        if !core::mem::replace(has_batch, true) {
            // One batch for all records that came together.
            self.begin_batch();
        }
        self.hand_out_aside(id, plain.freeze(), is_plain, lane);
    }

    /// Handles the peer's message that nothing more will come. FIN is still awaited, so that bytes
    /// before it do not turn a close into a reset.
    #[cold]
    fn input_closed(&mut self, id: ConnId) {
        if let Some(conn) = self.conns.get_mut(id) {
            conn.aside.note(SlowPathFlags::CLOSED, true);
            conn.input = conn.input.max(Input::Closed);
        }
    }

    /// Handles the peer's FIN. If it cut the connection off, the service is not called for the end
    /// of the input.
    #[cold]
    pub(in crate::shard) fn sealed_input_ended(&mut self, id: ConnId) {
        if self.cut_off(id).is_some()
            && let Some(shared) = self.shared(id)
        {
            shared.end_heard();
        }
    }

    /// Notes how much of a record the channel keeps, if it waits for the rest. `came` bytes of it
    /// came since the last look.
    fn note_record(&mut self, id: ConnId, came: usize) {
        let Some(conn) = self.conns.get(id).filter(|conn| conn.is_open() && conn.has_channel()) else {
            return;
        };
        let is_closed = conn.aside.says(SlowPathFlags::CLOSED);
        let look = |channel: &mut dyn TransportConn| {
            let held = channel.held_bytes();
            (held > 0 || channel.is_mid_record()).then_some(held)
        };
        let held = if is_closed { None } else { self.call_channel(id, look).flatten() };
        let Some(held) = held else { return self.record_ended(id) };
        let Some(conn) = self.conns.get_mut(id) else { return };
        if conn.inbox.is_none() {
            conn.inbox = try_box(Inbox::new(&self.blocks));
        }
        let Some(inbox) = &mut conn.inbox else { return self.abort(id, CloseReason::MemoryLimit) };
        self.shared.release(inbox.held_bytes());
        let begins = inbox.note_record(held, came, self.stamp);
        self.shared.hold(inbox.held_bytes());
        if begins {
            self.arm(id);
        }
        self.check_held(id);
    }

    /// Notes that no record is unfinished.
    fn record_ended(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        let Some(inbox) = conn.inbox.as_mut().filter(|inbox| inbox.is_mid_record()) else { return };
        self.shared.release(inbox.held_bytes());
        inbox.end_record();
        self.shared.hold(inbox.held_bytes());
        conn.inbox.take_if(|inbox| inbox.is_empty());
    }
}
