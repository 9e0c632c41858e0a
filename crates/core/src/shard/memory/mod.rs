//! Memory that connections hold: its limit, which connections end or wait there, and what is given
//! back to the system.
// May use: receive, turn.
// Begin with: `held.rs`.

mod give_back;
mod held;
mod reserve;

pub(super) use held::{calm_bytes, count_room, set_room};
pub(super) use reserve::UNREAD;
