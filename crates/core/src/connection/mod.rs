//! One connection: its state, bytes that are no frame yet, and what user code shares with the state
//! machine.
// May use: bytes, driver, framing, limits, proxy, reasons, tables, time.
// Begin with: `conn.rs`, then `outlet/`.

mod account;
mod conn;
mod deadlines;
mod inbox;
mod line;
mod observer;
mod outlet;
mod pages;
mod remote_gate;
mod reservation;
mod shared;
mod shared_payload;
mod stack;
mod transport;

pub use account::Account;
pub(crate) use conn::{
    Conn, Due, Flight, Input, Intake, NO_HANDLER, OpenState, Own, QueueFlags, SlowPathFlags, State, Write,
    describe,
};
pub(crate) use inbox::{Found, Inbox, NoMemory, Uncut, cut, cut_whole, not_whole};
pub use inbox::{FrameReader, ReadError};
pub use observer::Observer;
pub use outlet::{ConnHead, ConnShared, Outlet, PeerWords, SocketFacts};
pub use pages::Page;
pub use remote_gate::RemoteGate;
pub use reservation::{NoMemoryLeft, Reservation};
pub(crate) use shared::Memory;
pub use shared::{LaneShared, ShardShared};
pub use shared_payload::SharedPayload;
pub use stack::{Stack, facts_as};
pub use transport::{Transport, TransportConn, TransportError, TransportEvent};
