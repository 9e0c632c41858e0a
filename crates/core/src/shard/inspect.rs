//! Connections as they appear from outside. Nothing is kept for this purpose except the time at
//! which each began, in the word of its slot.

use core::fmt;
use core::net::SocketAddr;
use core::time::Duration;

use super::Shard;
use crate::connection::{Conn, OpenState, Outlet, State};
use crate::{Account, ConnId, LaneId, Observer, Stamp};

/// The stage of a connection, and what it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ConnState {
    /// A connection to an upstream that is being made.
    Connecting,
    /// Its PROXY header or its handshake is awaited.
    Starting,
    /// Its `open` waits.
    Opening,
    /// No call waits: its next frame is awaited.
    Open,
    /// A call waits.
    Calling,
    /// Receiving is paused, because more bytes came than were looked at.
    Paused,
    /// No frame is handed out, because the peer does not take the bytes in the outbox.
    HeldBack,
    /// No frame is handed out, because the peer sent faster than it may.
    TooFast,
    /// Its end was requested, and the bytes in the outbox are being sent.
    Draining,
}

impl ConnState {
    /// Its name, such as `held_back`.
    pub fn as_str(self) -> &'static str {
        match self {
            ConnState::Connecting => "connecting",
            ConnState::Starting => "starting",
            ConnState::Opening => "opening",
            ConnState::Open => "open",
            ConnState::Calling => "calling",
            ConnState::Paused => "paused",
            ConnState::HeldBack => "held_back",
            ConnState::TooFast => "too_fast",
            ConnState::Draining => "draining",
        }
    }
}

impl fmt::Display for ConnState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A connection that has not ended, as it looks now. Times are in steps of 17 ms, and none is
/// longer than 2.28 years.
#[derive(Clone, Copy, Debug)]
pub struct ConnView {
    /// Its lane.
    pub lane: LaneId,
    /// Its listener.
    pub listener: u16,
    /// The peer's address, if it has one.
    pub peer: Option<SocketAddr>,
    /// Time since it was adopted, or began to be made.
    pub age: Duration,
    /// Time since bytes came, or a call was done.
    pub idle: Duration,
    /// Bytes queued or with the kernel.
    pub outbox_bytes: usize,
    /// Its stage.
    pub state: ConnState,
    /// Calls that wait; its `open` is one.
    pub calls: u16,
    /// The time for which the oldest of them has waited.
    pub oldest_call: Option<Duration>,
    /// Its counts, if they are kept.
    pub account: Option<Account>,
}

/// The figure by which connections are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnFigure {
    /// Bytes in the outbox.
    Outbox,
    /// Time since bytes came.
    Idle,
    /// Bytes that came, 0 if they are not counted.
    BytesIn,
    /// Time since it was adopted.
    Age,
    /// Time for which its oldest call has waited, 0 without one.
    OldestCall,
}

/// Figures of a connection that has not ended, to compare and to add up.
#[derive(Clone, Copy, Debug)]
pub struct ConnFigures {
    /// Its name.
    pub id: ConnId,
    /// The figure that was asked for.
    pub value: u64,
    /// Bytes queued or with the kernel.
    pub outbox_bytes: usize,
    /// No frame is handed out, because the peer does not take the bytes in the outbox.
    pub is_held_back: bool,
    /// Calls that wait; its `open` is one.
    pub calls: u16,
}

impl<O: Observer> Shard<O> {
    /// Slots that may be taken are below this number.
    pub fn slots_used(&self) -> u32 {
        self.conns.used()
    }

    /// A figure of the connection in a slot, with those that are added up: `None` if it has none
    /// that has not ended and, if `calling` is requested, if no call of it waits.
    #[inline]
    pub fn figures_at(&self, slot: u32, figure: ConnFigure, calling: bool) -> Option<ConnFigures> {
        let id = self.conns.id_at(slot)?;
        let conn = self.conns.get(id)?;
        if calling && !conn.has_handler() {
            return None;
        }
        let outlet = conn.outlet()?;
        let value = match figure {
            ConnFigure::Outbox => outlet.outbox_bytes() as u64,
            ConnFigure::Idle => self.millis_since(conn.active_at),
            ConnFigure::BytesIn => outlet.account(self.now).map_or(0, |account| account.bytes_received),
            ConnFigure::Age => self.millis_since(self.began(id)),
            ConnFigure::OldestCall if conn.has_handler() => self.millis_since(conn.since),
            ConnFigure::OldestCall => 0,
        };
        let outbox_bytes = outlet.outbox_bytes();
        // Nothing holds back a peer whose outbox is empty.
        let is_held_back = outbox_bytes > 0 && state_of(conn, outlet) == ConnState::HeldBack;
        Some(ConnFigures { id, value, outbox_bytes, is_held_back, calls: conn.calls })
    }

    /// The time at which a connection was adopted, or began to be made.
    fn began(&self, id: ConnId) -> Stamp {
        self.conns.word(id).map_or(self.stamp, Stamp::from_bits)
    }

    fn millis_since(&self, stamp: Stamp) -> u64 {
        stamp.age(self.stamp).as_millis() as u64
    }

    /// A connection as it is now, until it ends.
    pub fn view(&self, id: ConnId) -> Option<ConnView> {
        let conn = self.conns.get(id)?;
        let outlet = conn.outlet()?;
        Some(ConnView {
            lane: conn.lane,
            listener: outlet.listener(),
            peer: outlet.peer(),
            age: self.began(id).age(self.stamp),
            idle: conn.active_at.age(self.stamp),
            outbox_bytes: outlet.outbox_bytes(),
            state: state_of(conn, outlet),
            calls: conn.calls,
            oldest_call: conn.has_handler().then(|| conn.since.age(self.stamp)),
            account: outlet.account(self.now),
        })
    }
}

fn state_of(conn: &Conn, outlet: &Outlet) -> ConnState {
    if conn.state != State::Open {
        return ConnState::Draining;
    }
    if conn.connect.is_on() {
        return ConnState::Connecting;
    }
    match conn.opened {
        OpenState::Header | OpenState::Handshake => ConnState::Starting,
        OpenState::No | OpenState::LastWords | OpenState::Waits => ConnState::Opening,
        OpenState::Yes if conn.is_held_back() || outlet.holds_back() => ConnState::HeldBack,
        OpenState::Yes if conn.is_too_fast() => ConnState::TooFast,
        OpenState::Yes if conn.paused => ConnState::Paused,
        OpenState::Yes if conn.has_handler() => ConnState::Calling,
        OpenState::Yes => ConnState::Open,
    }
}
