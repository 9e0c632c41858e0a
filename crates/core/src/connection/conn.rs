//! One connection's state.
//!
//! ```text
//!            finish                outbox empty              nothing in flight
//!   Open ─────────────▶ Draining ─────────────────▶ Closing ───────────────────▶ free slot
//!     │                    │                           ▲
//!     └────────────────────┴── abort, reset, error ────┘
//! ```
//!
//! * *Open*: first the PROXY header is read, if the listener expects one; then the handshake of its
//!   transport is done, if it has one. Then frames go to the service, and replies are sent. It
//!   stays open after the peer's FIN until every frame is answered. In a drain of the shard it is
//!   cut at some point: bytes that arrive from then on are thrown away, frames that were received
//!   whole are answered, and it goes on to Draining.
//! * *Draining*: no frame is handed out, queued bytes are sent, input is thrown away.
//! * *Closing*: the service is done with it (`Event::Ended`). In an orderly close FIN is sent and
//!   input is thrown away until the peer closes too or the linger limit is over; then everything in
//!   flight is stopped and awaited, the socket is closed, and only then the slot is free.

use alloc::boxed::Box;

use super::inbox::Inbox;
use super::outlet::{ConnHead, Outlet};
use crate::limits::Times;
use crate::time::{FOR_EVER, NEVER, Stamp, Timer};
use crate::{CloseReason, ConnId, LaneId, Time};

/// The stage of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Open,
    Draining,
    Closing,
}

/// The stage of one of the driver's operations: the connect, the receive, the send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flight {
    /// None is in flight.
    None,
    /// One is.
    Armed,
    /// It was asked to stop, and has not ended.
    Stopping,
}

impl Flight {
    /// True until the completion that ends it.
    #[inline]
    pub(crate) fn is_on(self) -> bool {
        self != Flight::None
    }

    /// Asks it to stop. False if it was asked already, or if none is in flight.
    #[inline]
    pub(crate) fn stop(&mut self) -> bool {
        let is_armed = *self == Flight::Armed;
        if is_armed {
            *self = Flight::Stopping;
        }
        is_armed
    }
}

/// The state of the sending half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Write {
    /// More may be sent.
    Open,
    /// FIN was asked for.
    ShuttingDown,
    /// FIN was sent.
    Shut,
}

/// The state of the receiving half.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Input {
    /// More may arrive.
    Open,
    /// The transport reported that nothing more would come. FIN is still to be received.
    Closed,
    /// The peer sent FIN, or receiving failed.
    Fin,
}

/// The treatment of received bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Intake {
    /// They are used.
    On,
    /// They are used for a moment longer: the connection was accepted after the shard had begun to
    /// drain.
    Brief,
    /// The shard drains: bytes are dropped, and the connection is closed as soon as it owes
    /// nothing.
    Cut,
}

/// Steps of 17 ms that the peer of a connection with nothing but a rejection message has to close
/// too, about 200 ms: long enough for the message to arrive, and for what the peer sent meanwhile
/// to be thrown away. A close before that would reset the connection, and destroy the message.
const LAST_WORDS_LINGER: u32 = 12;

/// The service's part in opening a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpenState {
    /// It was not called, or has refused the connection.
    No,
    /// It is not called: the connection exists for a rejection message alone.
    LastWords,
    /// It is called once the PROXY header is complete; the start of the header is kept.
    Header,
    /// It is called once the handshake of the connection's channel is done.
    Handshake,
    /// Its `open` waits: bytes are received and kept, and no frame is handed out.
    Waits,
    /// It accepted.
    Yes,
}

/// The value if no handler is parked.
pub(crate) const NO_HANDLER: u32 = u32::MAX;

/// The consequence of a limit that is exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// The peer had its time to close too.
    Linger,
    /// The send in flight had its time: how much did the peer take?
    Write,
    /// A reset may have gone unreported: the receive is looked at.
    Probe,
    /// A peer that sent too fast may send again.
    Resume,
    /// A half received frame had its window: did enough of it come?
    ReadRate,
    /// The peer was silent for `heartbeat_interval` and is asked for a sign of life.
    Heartbeat,
    Close(CloseReason),
}

impl Due {
    /// True if the limit is on how long the peer sends nothing that counts.
    pub(crate) fn is_the_peers(self) -> bool {
        use CloseReason::{FirstFrameTimeout, IdleTimeout};
        matches!(self, Due::ReadRate | Due::Close(FirstFrameTimeout | IdleTimeout))
    }

    /// True if bytes that wait in the kernel may make the consequence wrong. `is_last` is true if
    /// no more heartbeats may be missed.
    pub(crate) fn may_be_undone(self, is_last: bool) -> bool {
        match self {
            Due::Probe | Due::Resume => false,
            Due::Heartbeat => is_last,
            Due::Linger | Due::Write | Due::ReadRate | Due::Close(_) => true,
        }
    }
}

/// Steps over which the probes of connections that fell silent together are spread, by their slots:
/// a second where they are busy, 17 s otherwise. Powers of two, so that neighbours are probed one
/// after the other.
const SPREAD_BUSY: u32 = 64;
const SPREAD_IDLE: u32 = 1024;

/// Queues of the shard that a connection is in, at most once in each.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct QueueFlags(u8);

impl QueueFlags {
    /// Bytes are left for a later turn.
    pub(crate) const RUNNABLE: u8 = 1;
    /// Another look has to find out whether it holds much.
    pub(crate) const WATCHED: u8 = 2;
    /// A step of its handshake waits.
    pub(crate) const WORKING: u8 = 4;

    #[inline]
    pub(crate) fn is_in(self, queue: u8) -> bool {
        self.0 & queue != 0
    }

    pub(crate) fn enter(&mut self, queue: u8) {
        self.0 |= queue;
    }

    pub(crate) fn leave(&mut self, queue: u8) {
        self.0 &= !queue;
    }
}

/// Limits that a connection has itself.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Own(u8);

impl Own {
    /// Limits that replace its lane's.
    pub(crate) const LIMITS: u8 = 1;
    /// It ends at a deadline.
    pub(crate) const DEADLINE: u8 = 2;

    #[inline]
    pub(crate) fn has(self, what: u8) -> bool {
        self.0 & what != 0
    }

    /// Sets or clears a bit.
    pub(crate) fn note(&mut self, what: u8, holds: bool) {
        match holds {
            true => self.0 |= what,
            false => self.0 &= !what,
        }
    }
}

/// Reasons that keep a connection's bytes and replies from the short paths. In one byte, so that
/// these check once.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SlowPathFlags(u8);

impl SlowPathFlags {
    /// No frame is handed out until the outbox falls below its low mark.
    const HELD_BACK: u8 = 1;
    /// A channel stands between socket and framing.
    const SEALED: u8 = 2;
    /// It is being asked for plain bytes, and may have more.
    const UNSEALING: u8 = 4;
    /// It has its own bytes to send once nothing is in flight.
    pub(crate) const SPEAKS: u8 = 8;
    /// Nothing can be sealed any longer: it sent its closing message.
    pub(crate) const FINISHED: u8 = 16;
    /// The peer said that nothing more will come.
    pub(crate) const CLOSED: u8 = 32;
    /// The rate at which its peer sends is limited.
    pub(crate) const METERED: u8 = 64;
    /// No frame is handed out until its peer may send again.
    pub(crate) const TOO_FAST: u8 = 128;
    /// The reasons that keep its frames from the service.
    const HOLDS: u8 = SlowPathFlags::HELD_BACK | SlowPathFlags::TOO_FAST;

    pub(crate) fn hold_back(&mut self) {
        self.0 |= SlowPathFlags::HELD_BACK;
    }

    /// Frames may be handed out again. True if they were held back.
    pub(crate) fn release(&mut self) -> bool {
        let was_held_back = self.0 & SlowPathFlags::HELD_BACK != 0;
        self.0 &= !SlowPathFlags::HELD_BACK;
        was_held_back
    }

    pub(crate) fn seal(&mut self) {
        self.0 |= SlowPathFlags::SEALED;
    }

    /// True if this is noted of it, or of its channel.
    #[inline]
    pub(crate) fn says(self, what: u8) -> bool {
        self.0 & what != 0
    }

    /// Sets or clears a flag.
    pub(crate) fn note(&mut self, what: u8, holds: bool) {
        match holds {
            true => self.0 |= what,
            false => self.0 &= !what,
        }
    }

    /// Sets whether the channel is being asked for plain bytes.
    pub(crate) fn unseal(&mut self, more: bool) {
        self.note(SlowPathFlags::UNSEALING, more);
    }
}

/// The shard's state of a connection, apart from its [`ConnHead`].
pub(crate) struct Conn {
    /// The lane that it belongs to.
    pub lane: LaneId,
    /// `None` exactly when Closing: the service has it back then.
    pub shared: Option<ConnHead>,
    /// Bytes that are not frames yet, if there are any.
    pub inbox: Option<Box<Inbox>>,
    /// Why it ends: set exactly while Draining. Boxed, since most connections are not draining.
    pub reason: Option<Box<CloseReason>>,
    pub state: State,
    /// The connect of an upstream.
    pub connect: Flight,
    pub receive: Flight,
    /// Receives that still end after their first bytes, because a large frame came recently; above
    /// 0 in the middle of one.
    pub bulk: u8,
    /// The receive brought bytes since it was armed, or looked at.
    pub receive_used: bool,
    /// Receiving is held back because the inbox is full.
    pub paused: bool,
    pub input: Input,
    pub send: Flight,
    pub aside: SlowPathFlags,
    pub opened: OpenState,
    /// A whole frame arrived.
    pub frame_seen: bool,
    /// The limits that it has itself.
    pub own: Own,
    /// As many calls wait as are allowed.
    pub calls_full: bool,
    /// The service was informed that nothing more will arrive.
    pub input_end_notified: bool,
    /// Heartbeats since a byte arrived.
    pub missed_heartbeats: u8,
    /// Calls that wait.
    pub calls: u16,
    /// The queues that it is in.
    pub queued: QueueFlags,
    /// The stage of the shard's drain for this connection.
    pub intake: Intake,
    /// Closing waits for the peer's FIN.
    pub lingering: bool,
    /// Closing with RST.
    pub aborting: bool,
    pub write: Write,
    /// The close is in flight.
    pub close_sent: bool,
    /// The first of the waiting calls, as the caller names it, or [`NO_HANDLER`]. While a
    /// connection is being opened its only call is its `open`.
    pub handler: u32,
    /// The time at which the connection's timer goes off.
    pub timer: Timer,
    /// Until its first frame came: the time when it was adopted, its PROXY header was complete, its
    /// handshake was done, or a waiting `open` was done. Later, while calls wait, the time when the
    /// first of them began to wait, or when the last one was done. While its `open` waits, the time
    /// since when it does.
    pub since: Stamp,
    /// The time at which a byte arrived, or the peer was last asked for a sign of life.
    pub heard_at: Stamp,
    /// The time at which a byte came, or a handler finished.
    pub active_at: Stamp,
    /// The time at which the last send began, was looked at or ended; in Closing, when that began.
    pub send_at: Stamp,
}

impl Conn {
    pub(crate) fn new(lane: LaneId, shared: ConnHead, now: Time) -> Conn {
        let now = Stamp::at(now);
        Conn {
            lane,
            shared: Some(shared),
            inbox: None,
            reason: None,
            state: State::Open,
            connect: Flight::None,
            receive: Flight::None,
            bulk: 0,
            receive_used: false,
            paused: false,
            input: Input::Open,
            send: Flight::None,
            aside: SlowPathFlags::default(),
            opened: OpenState::No,
            frame_seen: false,
            own: Own::default(),
            calls_full: false,
            input_end_notified: false,
            missed_heartbeats: 0,
            calls: 0,
            queued: QueueFlags::default(),
            intake: Intake::On,
            lingering: false,
            aborting: false,
            write: Write::Open,
            close_sent: false,
            handler: NO_HANDLER,
            timer: Timer::UNSET,
            since: now,
            heard_at: now,
            active_at: now,
            send_at: now,
        }
    }

    /// The outlet, until Closing.
    pub(crate) fn outlet(&self) -> Option<&Outlet> {
        self.shared.as_deref()
    }

    #[inline]
    pub(crate) fn has_handler(&self) -> bool {
        self.calls > 0
    }

    /// True while its `open` waits.
    #[inline]
    pub(crate) fn is_opening(&self) -> bool {
        self.opened == OpenState::Waits
    }

    /// True until its PROXY header is there and its handshake is done, or it ends.
    #[inline]
    pub(crate) fn is_starting(&self) -> bool {
        matches!(self.opened, OpenState::Header | OpenState::Handshake)
    }

    /// True if it is held back, has a channel, or has a limit on the rate at which its peer sends.
    #[inline]
    pub(crate) fn is_aside(&self) -> bool {
        self.aside.0 != 0
    }

    /// True if no frame is handed out until the outbox falls below its low mark.
    #[inline]
    pub(crate) fn is_held_back(&self) -> bool {
        self.aside.0 & SlowPathFlags::HELD_BACK != 0
    }

    /// True if the rate at which its peer sends is limited.
    #[inline]
    pub(crate) fn is_metered(&self) -> bool {
        self.aside.says(SlowPathFlags::METERED)
    }

    /// True if no frame is handed out until its peer may send again.
    #[inline]
    pub(crate) fn is_too_fast(&self) -> bool {
        self.aside.says(SlowPathFlags::TOO_FAST)
    }

    /// True if a channel stands between socket and framing.
    #[inline]
    pub(crate) fn has_channel(&self) -> bool {
        self.aside.0 & SlowPathFlags::SEALED != 0
    }

    /// True if its channel is ready, and has not sent its closing message.
    #[inline]
    pub(crate) fn may_seal(&self) -> bool {
        self.has_channel() && self.opened != OpenState::Handshake && !self.aside.says(SlowPathFlags::FINISHED)
    }

    /// True if nothing but a channel keeps it from the short paths, and neither side's closing
    /// message was sent.
    #[inline]
    pub(crate) fn is_sealed_alone(&self) -> bool {
        self.aside.0 == SlowPathFlags::SEALED
    }

    /// True if its channel may have more plain bytes.
    #[inline]
    pub(crate) fn is_unsealing(&self) -> bool {
        self.aside.0 & SlowPathFlags::UNSEALING != 0
    }

    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.state == State::Open
    }

    /// True if the next frame may go to the service now.
    pub(crate) fn takes_frames(&self) -> bool {
        self.is_open()
            && self.opened == OpenState::Yes
            && !self.calls_full
            && !self.aside.says(SlowPathFlags::HOLDS)
    }

    /// True if the next frame may go to the service now, for a connection without a channel.
    #[inline]
    pub(crate) fn takes_frames_at_once(&self) -> bool {
        self.is_open() && self.opened == OpenState::Yes && !self.calls_full && !self.is_aside()
    }

    /// Bytes that were received and not looked at.
    #[inline]
    pub(crate) fn waiting_bytes(&self) -> usize {
        self.inbox.as_ref().map_or(0, |inbox| inbox.waiting_bytes())
    }

    /// True if nothing more will arrive except bytes that are thrown away.
    #[inline]
    pub(crate) fn input_ended(&self) -> bool {
        self.input != Input::Open
    }

    /// True if a receive would bring nothing.
    pub(crate) fn has_fin(&self) -> bool {
        self.input == Input::Fin
    }

    /// True if bytes should be received now. A channel's input may end before FIN is there, which
    /// is received too: bytes left unread at a close would make it a reset.
    pub(crate) fn wants_receive(&self) -> bool {
        !self.has_fin()
            && match self.state {
                State::Open => !matches!(self.opened, OpenState::No | OpenState::LastWords) && !self.paused,
                State::Draining => true,
                State::Closing => self.lingering,
            }
    }

    /// True if arriving bytes are thrown away because the shard drains. A connection that is held
    /// open ends when the service decides.
    pub(crate) fn is_cut(&self) -> bool {
        self.intake == Intake::Cut && !self.outlet().is_some_and(Outlet::is_held_open)
    }

    /// True if the service is to be called once more, for the end of the input.
    #[inline]
    pub(crate) fn owes_end(&self) -> bool {
        self.input_ended()
            && !self.has_handler()
            && !self.is_cut()
            && !self.inbox.as_ref().is_some_and(|inbox| inbox.is_mid_frame())
            && self.outlet().is_some_and(Outlet::hears_end)
    }

    /// True if the peer is owed nothing and owes nothing.
    pub(crate) fn is_quiet(&self) -> bool {
        (!self.has_handler() || self.is_opening())
            && !self.send.is_on()
            && self.inbox.is_none()
            && self.outlet().is_none_or(|outlet| {
                outlet.pending_bytes() == 0 && !outlet.has_requests() && !outlet.is_held_open()
            })
    }

    /// Its times, if its lane's are `times`.
    #[inline]
    pub(crate) fn times(&self, times: &Times) -> Times {
        if self.own.has(Own::LIMITS) { self.own_times().unwrap_or(*times) } else { *times }
    }

    /// Its own times, if it has set any.
    #[cold]
    pub(crate) fn own_times(&self) -> Option<Times> {
        Some(self.outlet()?.own_limits()?.times)
    }

    /// Steps from `now` until the next limit of this connection, which is in `slot`, is over,
    /// negative if that was earlier, and the consequence. `times` are its lane's.
    #[inline]
    pub(crate) fn next_limit(&self, slot: u32, times: &Times, now: Stamp) -> (i64, Due) {
        let own;
        let times = if self.own.has(Own::LIMITS) {
            own = self.times(times);
            &own
        } else {
            times
        };
        if self.state == State::Closing {
            return (self.linger_left(times, now), Due::Linger);
        }
        if self.connect.is_on() {
            let left = self.since.left(times.connect, now);
            return (left, Due::Close(CloseReason::ConnectTimeout));
        }
        let mut next = Soonest { left: FOR_EVER, due: Due::Write };
        if self.send.is_on() {
            next.left = self.send_at.left(times.write_look, now);
        }
        if self.own.has(Own::DEADLINE)
            && self.is_open()
            && let Some(outlet) = self.outlet()
        {
            let left = outlet.deadline_left(now);
            next.or(left, Due::Close(CloseReason::DeadlinePassed));
        }
        if self.is_open() && !self.frame_seen && !self.is_opening() {
            if self.is_starting() {
                return self.start_limit(times, now);
            }
            next.or(self.since.left(times.first_frame, now), Due::Close(CloseReason::FirstFrameTimeout));
        }
        // Nothing is owed while this limit runs: neither an answer, nor a look at frames that wait
        // for their rate, nor, where sent bytes count, the rest of an answer.
        let owes_nothing = !self.has_handler() && !self.is_too_fast();
        if self.is_open() && owes_nothing && !(self.send.is_on() && times.idle_counts_sent) {
            next.or(self.idle_left(times, now), Due::Close(CloseReason::IdleTimeout));
        }
        if self.is_open() && self.has_handler() {
            let (limit, reason) = match self.is_opening() {
                false => (times.handler, CloseReason::HandlerTimeout),
                true => (times.open, CloseReason::OpenTimeout),
            };
            next.or(self.since.left(limit, now), Due::Close(reason));
        }
        if let Some(inbox) = &self.inbox
            && inbox.has_begun()
            && self.takes_frames()
            && !self.input_ended()
        {
            next.or(inbox.window_began.left(times.read_window, now), Due::ReadRate);
        }
        if self.is_too_fast()
            && let Some((from, wait)) = self.inbox.as_ref().and_then(|inbox| inbox.resumes)
        {
            next.or(from.left(wait, now), Due::Resume);
        }
        // A peer that has sent FIN cannot answer, and owes no more bytes; after our own FIN nothing
        // can be asked.
        let answers = self.opened == OpenState::Yes && !self.input_ended() && self.write == Write::Open;
        if self.is_open() && answers && times.heartbeat != NEVER {
            next.or(self.heard_at.left(times.heartbeat, now), Due::Heartbeat);
        }
        // During a send, the send finds out.
        if self.receive_used && self.receive == Flight::Armed && self.is_open() && !self.send.is_on() {
            let busy = self.has_handler() || self.inbox.is_some();
            let (silence, spread) =
                if busy { (times.probe_busy, SPREAD_BUSY) } else { (times.probe_idle, SPREAD_IDLE) };
            let left = self.active_at.left(silence + slot % spread, now);
            next.or(left, Due::Probe);
        }
        (next.left, next.due)
    }

    /// Steps until a closing connection stops lingering.
    #[inline]
    fn linger_left(&self, times: &Times, now: Stamp) -> i64 {
        let linger = match self.opened {
            OpenState::LastWords => times.linger.min(LAST_WORDS_LINGER),
            _ => times.linger,
        };
        if self.lingering { self.send_at.left(linger, now) } else { FOR_EVER }
    }

    /// The limit of an awaited header or handshake.
    #[inline]
    fn start_limit(&self, times: &Times, now: Stamp) -> (i64, Due) {
        let (limit, reason) = match self.opened {
            OpenState::Header => (times.header, CloseReason::ProxyTimeout),
            _ => (times.handshake, CloseReason::HandshakeTimeout),
        };
        (self.since.left(limit, now), Due::Close(reason))
    }

    /// Steps until it was idle for too long, if nothing is owed.
    #[inline]
    fn idle_left(&self, times: &Times, now: Stamp) -> i64 {
        // The end of a call updates both.
        let from = if times.idle_counts_received { self.active_at } else { self.since };
        let left = from.left(times.idle, now);
        if times.idle_counts_sent {
            return left.max(self.send_at.left(times.idle, now));
        }
        left
    }
}

/// The limit that is over first, among those looked at.
struct Soonest {
    left: i64,
    due: Due,
}

impl Soonest {
    /// Takes this one, if it is over sooner.
    #[inline(always)]
    fn or(&mut self, left: i64, due: Due) {
        if left < self.left {
            *self = Soonest { left, due };
        }
    }
}

/// A connection's name with its state, for messages of failed checks.
pub(crate) fn describe(id: ConnId, conn: &Conn) -> alloc::string::String {
    alloc::format!(
        "connection {id}: {:?} connect {:?} receive {:?} send {:?} write {:?} handler {:?} input {:?} close_sent {}",
        conn.state,
        conn.connect,
        conn.receive,
        conn.send,
        conn.write,
        conn.handler,
        conn.input,
        conn.close_sent
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_connection_fits_its_budget() {
        // Together with 16 bytes for its timer, 24 for the driver and the allocator's overhead:
        // below 256.
        assert!(size_of::<Conn>() <= 72, "{}", size_of::<Conn>());
        assert!(size_of::<Outlet>() <= 80, "{}", size_of::<Outlet>());
    }
}
