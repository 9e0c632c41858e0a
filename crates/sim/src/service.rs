//! The service: echoes, answers otherwise, parks, keeps, fails, streams, pushes.
//!
//! It also writes its replies into the connection's `owed`, unless the connection is gone by then.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};

use ringserve_core::{CloseReason, ConnId, ConnShared, Frame, Payload};

use crate::bytes::{self, AnyFraming, PAYLOAD_MAX};
use crate::faults::Fault;
use crate::kernel::State;
use crate::pace::Pace;
use crate::plan::{FLOOD, MS};
use crate::sock::excuse;

/// State that the service keeps for a connection.
#[derive(Debug, Default)]
pub struct Session {
    /// The number of the connection.
    pub tag: usize,
    /// Frames that are kept, and the times until which they are.
    pub kept: RefCell<Vec<(u64, Frame)>>,
    /// Replies so far.
    pub replies: Cell<usize>,
}

/// The result of a call.
#[derive(Debug)]
pub enum Called {
    /// It is done.
    Done,
    /// It failed.
    Failed,
    /// It panicked.
    Panicked,
    /// It goes on later.
    Parked(Parked),
}

/// A call that waits.
#[derive(Debug)]
pub struct Parked {
    /// The connection.
    pub id: ConnId,
    shared: ConnShared<Session>,
    /// The end of the frame of the call in the peer's bytes.
    at: usize,
    /// Time at which it continues, unless it waits for room.
    pub due: u64,
    frame: Option<Frame>,
    /// Pieces left to stream.
    pieces: u32,
    /// Waits until the outbox has room.
    pub wants_room: Option<Arc<Flag>>,
}

/// Set when there is room in an outbox.
#[derive(Debug, Default)]
pub struct Flag(AtomicBool);

impl Flag {
    /// True once it was set.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Wake for Flag {
    fn wake(self: Arc<Flag>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// False once no more bytes are accepted for sending.
fn takes_replies(state: &State, shared: &ConnShared<Session>) -> bool {
    !shared.is_gone() && !state.socks[shared.body().tag].writing_ended
}

/// Replies with a frame of the service's own, or raw bytes.
pub fn say(state: &mut State, shared: &ConnShared<Session>, len: usize) {
    if !takes_replies(state, shared) {
        return;
    }
    if !state.rng.one_in(8) {
        return push(state, shared, len);
    }
    write(state, shared, len);
    charge(state, shared);
}

/// Fills an outbox.
fn flood(state: &mut State, shared: &ConnShared<Session>) {
    while takes_replies(state, shared) && shared.outbox_bytes() < FLOOD {
        write(state, shared, PAYLOAD_MAX);
    }
    charge(state, shared);
}

/// Sends raw bytes of the service's own.
fn write(state: &mut State, shared: &ConnShared<Session>, len: usize) {
    let payload = own_payload(shared.body(), len);
    state.socks[shared.body().tag].owed.extend_from_slice(payload);
    shared.write(payload);
}

/// The next bytes that the service sends by itself.
fn own_payload(session: &Session, len: usize) -> &'static [u8] {
    let number = session.replies.get();
    session.replies.set(number + 1);
    bytes::payload(session.tag, 1000 + number, len)
}

/// Replies with a frame that another thread pushed.
pub fn push(state: &mut State, shared: &ConnShared<Session>, len: usize) {
    let (outlet, session) = (&**shared, shared.body());
    if !takes_replies(state, shared) {
        return;
    }
    let payload = own_payload(session, len);
    if state.rng.chance(state.plan.encode_panics) {
        state.cover.fault(Fault::EncodePanics);
        state.socks[session.tag].excuses |= excuse::PANICKED;
        let bytes = state.rng.below(64) as usize;
        return bytes::panic_in_encode(bytes, || outlet.reply(Payload::Bytes(payload)));
    }
    state.socks[session.tag].owe(state.plan.framing, payload);
    outlet.reply(Payload::Bytes(payload));
    charge(state, shared);
}

fn echo(state: &mut State, shared: &ConnShared<Session>, frame: Frame) {
    if !takes_replies(state, shared) {
        return;
    }
    if frame.len() >= 4096 && frame.pinned_bytes() <= 4 * frame.len() {
        state.cover.fault(Fault::Lent);
    }
    state.socks[shared.body().tag].owe(state.plan.framing, &frame);
    shared.reply(frame.into());
    charge(state, shared);
}

/// Notes that a connection whose outbox is over its limit may be closed for that.
fn charge(state: &mut State, shared: &ConnShared<Session>) {
    if shared.outbox_bytes() > state.plan.limits.outbox_bytes_max {
        state.socks[shared.body().tag].excuses |= excuse::FULL;
    }
}

/// Opens a connection. True if it is accepted.
pub fn open(state: &mut State, shared: &ConnShared<Session>) -> bool {
    if state.rng.chance(state.plan.holds) {
        state.cover.fault(Fault::HeldOpen);
        state.socks[shared.body().tag].held = true;
        shared.hold_open();
    }
    if !state.rng.chance(state.plan.unusual) {
        return true;
    }
    if state.rng.one_in(2) {
        state.cover.fault(Fault::OpenGreets);
        let len = state.rng.spread(1, state.plan.payload_max as u64) as usize;
        say(state, shared, len);
    }
    if state.rng.one_in(3) {
        state.cover.fault(Fault::OpenRefuses);
        state.socks[shared.body().tag].excuses |= excuse::REFUSED;
        return false;
    }
    true
}

/// Sends a rejection message to a peer that broke the framing.
pub fn malformed(state: &mut State, shared: &ConnShared<Session>) {
    if state.rng.one_in(2) {
        say(state, shared, 5);
    }
}

/// Sends a request to the peer when the shard asks whether it is alive.
pub fn heartbeat(state: &mut State, shared: &ConnShared<Session>) {
    if state.rng.one_in(8) {
        return state.cover.fault(Fault::HeartbeatUnsaid);
    }
    state.cover.fault(Fault::HeartbeatAsked);
    say(state, shared, 4.min(state.plan.payload_max));
    let sock = &mut state.socks[shared.body().tag];
    sock.pings.push_back(sock.owed.len());
}

/// Notes that the peer of a connection that is held open has sent its last byte. Returns the time
/// of the close, if any.
pub fn input_ended(state: &mut State, shared: &ConnShared<Session>) -> Option<u64> {
    state.cover.fault(Fault::InputEndTold);
    match state.rng.below(8) {
        0 => {
            state.cover.fault(Fault::HeldForgotten);
            None
        }
        1 | 2 => {
            say(state, shared, 3.min(state.plan.payload_max));
            Some(0)
        }
        _ => Some(state.now + state.rng.spread(1000, 200 * MS)),
    }
}

/// Closes a connection that the service held open.
pub fn close_held(state: &mut State, shared: &ConnShared<Session>) {
    state.cover.fault(Fault::HeldClosed);
    if state.rng.one_in(2) {
        say(state, shared, 2.min(state.plan.payload_max));
    }
    state.socks[shared.body().tag].excuses |= excuse::CLOSED;
    shared.close();
}

/// Checks a frame that is passed to the service: it must be the next one, whole, of this
/// connection.
pub fn check_frame(state: &mut State, tag: usize, frame: &Frame) {
    let framing = state.plan.framing;
    let sock = &mut state.socks[tag];
    assert!(sock.opened, "connection {tag}: a frame before open");
    assert!(sock.ended.is_none(), "connection {tag}: a frame after the end");
    let most = usize::from(state.plan.limits_of(sock.upstream).calls_in_flight_max);
    assert!(sock.waiting.len() < most, "connection {tag}: a frame while {most} handlers are parked");
    if let AnyFraming::Raw = framing {
        let expected = sock.wire.get(sock.handed..sock.handed + frame.len());
        assert!(expected == Some(&**frame), "connection {tag}: wrong bytes at {}", sock.handed);
        sock.handed += frame.len();
        while sock.frames.get(sock.seen).is_some_and(|next| next.end <= sock.handed) {
            sock.seen += 1;
        }
    } else {
        let Some(next) = sock.frames.get(sock.seen) else {
            panic!("connection {tag}: a frame that was never sent: {frame:?}");
        };
        let payload = &sock.wire[next.payload..next.payload_end];
        assert!(payload == &**frame, "connection {tag}: frame {} is wrong: {frame:?}", sock.seen);
        let wire = &sock.wire[sock.handed..next.end];
        assert!(wire == frame.wire(), "connection {tag}: frame {} is wrong on the wire", sock.seen);
        sock.handed = next.end;
        sock.seen += 1;
    }
    assert!(sock.handed <= sock.arrived, "connection {tag}: bytes that did not arrive");
    let limits = state.plan.limits_of(sock.upstream);
    if Pace::limits(limits) {
        // No rate applies once the shard drains.
        let early = sock.pace.is_early(limits, state.now) && state.drain_deadline.is_none();
        assert!(!early, "connection {tag}: a frame beyond its rate: {:?} at {}", sock.pace, state.now);
        sock.pace.pay(limits, frame.wire().len(), state.now);
    }
}

/// Notes that a call is done: its peer may send more.
fn done(state: &mut State, tag: usize) {
    let sock = &mut state.socks[tag];
    sock.done = sock.done.max(sock.seen.saturating_sub(sock.waiting.len()));
    state.kick(tag);
}

/// Calls the service with a frame.
pub fn call(state: &mut State, id: ConnId, shared: &ConnShared<Session>, frame: Frame) -> Called {
    let tag = shared.body().tag;
    check_frame(state, tag, &frame);
    if !state.rng.chance(state.plan.unusual) {
        answer(state, shared, frame);
        done(state, tag);
        return Called::Done;
    }
    let called = unusual(state, id, shared, frame);
    if let Called::Done = called {
        done(state, tag);
    }
    called
}

/// The behaviour of most calls.
fn answer(state: &mut State, shared: &ConnShared<Session>, frame: Frame) {
    let tag = shared.body().tag;
    if state.plan.floods && tag.is_multiple_of(2) && !state.socks[tag].upstream {
        return flood(state, shared);
    }
    match state.rng.below(8) {
        0 => {}
        1 => {
            let len = state.rng.spread(1, state.plan.payload_max as u64) as usize;
            say(state, shared, len);
        }
        _ => echo(state, shared, frame),
    }
}

fn unusual(state: &mut State, id: ConnId, shared: &ConnShared<Session>, frame: Frame) -> Called {
    let tag = shared.body().tag;
    let at = state.socks[tag].handed;
    let mut parked =
        Parked { id, shared: shared.clone(), at, due: 0, frame: None, pieces: 0, wants_room: None };
    match state.rng.below(20) {
        0..=6 => {
            state.cover.fault(Fault::HandlerParks);
            let lingers = if state.plan.dawdles.is_some() { 48 } else { 4 };
            let (least, most) = match state.rng.below(64) {
                kind if kind < lingers => {
                    state.cover.fault(Fault::HandlerLingers);
                    (20 * MS, 20_000 * MS)
                }
                kind if kind < lingers + 8 => (1000, 400 * MS),
                _ => (1000, 8 * MS),
            };
            parked.due = state.now + state.rng.spread(least, most);
            if state.plan.calls.is_some() {
                // Many of them at once.
                parked.due = parked.due.next_multiple_of(16 * MS);
            }
            parked.frame = Some(frame);
            return Called::Parked(parked);
        }
        7..=9 => {
            state.cover.fault(Fault::HandlerHolds);
            let until = state.now + state.rng.spread(1000, 100 * MS);
            shared.body().kept.borrow_mut().push((until, frame));
            state.alarm = state.alarm.min(until);
        }
        10..=12 => {
            state.cover.fault(Fault::HandlerStreams);
            parked.pieces = state.rng.range(2, 12) as u32;
            return go_on(state, parked);
        }
        13 => {
            state.cover.fault(Fault::HandlerCloses);
            answer(state, shared, frame);
            if state.rng.one_in(4) {
                state.socks[tag].excuses |= excuse::CLOSED | excuse::UPSTREAM;
                shared.upstream_failed();
            } else {
                state.socks[tag].excuses |= excuse::CLOSED;
                shared.close();
            }
        }
        14 => {
            state.cover.fault(Fault::HandlerAborts);
            answer(state, shared, frame);
            state.socks[tag].excuses |= excuse::ABORTED;
            shared.abort();
        }
        15 => {
            state.cover.fault(Fault::HandlerFails);
            answer(state, shared, frame);
            state.socks[tag].excuses |= excuse::FAILED;
            return Called::Failed;
        }
        16 => {
            state.cover.fault(Fault::HandlerPanics);
            answer(state, shared, frame);
            state.socks[tag].excuses |= excuse::PANICKED;
            return Called::Panicked;
        }
        17 if matches!(state.plan.framing, AnyFraming::Length(1, _)) => {
            state.cover.fault(Fault::HandlerUnframed);
            state.socks[tag].excuses |= excuse::UNFRAMED;
            shared.reply(Payload::Bytes(bytes::payload(tag, 0, 256)));
        }
        18 => {
            state.cover.fault(Fault::HandlerEndsWriting);
            answer(state, shared, frame);
            shared.end_writing();
            state.socks[tag].writing_ended = true;
        }
        _ => answer(state, shared, frame),
    }
    Called::Done
}

/// Continues a call that waited.
pub fn resume(state: &mut State, parked: Parked) -> Called {
    let tag = parked.shared.body().tag;
    let called = if parked.pieces > 0 {
        go_on(state, parked)
    } else {
        let Parked { shared, frame, at, .. } = parked;
        let frame = frame.unwrap_or_default();
        let wire = &state.socks[tag].wire[at - frame.wire().len()..at];
        assert!(wire == frame.wire(), "connection {tag}: a frame changed while its handler waited");
        answer(state, &shared, frame);
        match state.rng.below(24) {
            0 => {
                state.cover.fault(Fault::HandlerFails);
                state.socks[tag].excuses |= excuse::FAILED;
                Called::Failed
            }
            1 => {
                state.cover.fault(Fault::HandlerPanics);
                state.socks[tag].excuses |= excuse::PANICKED;
                Called::Panicked
            }
            _ => Called::Done,
        }
    };
    if let Called::Done = called {
        done(state, tag);
    }
    called
}

/// Streams pieces until the outbox is full, then waits for room.
fn go_on(state: &mut State, mut parked: Parked) -> Called {
    let len = (state.plan.limits.outbox_bytes_high / 2).clamp(1, state.plan.payload_max).min(PAYLOAD_MAX);
    while parked.pieces > 0 {
        let outlet = &*parked.shared;
        if outlet.is_full() && !outlet.is_gone() {
            if state.socks[parked.shared.body().tag].wants_room > 0 {
                // The last waker is woken, and no other: one call of a connection can wait for
                // room.
                parked.due = state.now + MS;
                return Called::Parked(parked);
            }
            let flag = Arc::new(Flag::default());
            outlet.wake_when_ready(&Waker::from(flag.clone()));
            parked.wants_room = Some(flag);
            return Called::Parked(parked);
        }
        parked.pieces -= 1;
        say(state, &parked.shared, len);
    }
    Called::Done
}

/// Notes that the connection ended.
pub fn close(state: &mut State, shared: &ConnShared<Session>, reason: CloseReason, now: u64) {
    let tag = shared.body().tag;
    assert!(state.socks[tag].ended.is_none(), "connection {tag} ended twice");
    state.check_reason(tag, reason, now);
    state.log(|| format!("connection {tag} ended: {reason}"));
    state.socks[tag].ended = Some((now, reason));
    shared.body().kept.borrow_mut().clear();
}
