//! A shard: what its users hold of it, the loop, and what that loop consists of.

pub(crate) mod accept_queue;
pub(crate) mod asks;
pub(crate) mod attempts;
pub(crate) mod awaited;
pub(crate) mod beginning;
pub(crate) mod calls;
mod commands;
pub(crate) mod control;
pub(crate) mod draining;
pub(crate) mod ending;
pub(crate) mod ends;
mod events;
pub(crate) mod face;
pub(crate) mod flag;
mod give_back;
mod give_way;
pub(crate) mod guarded_transport;
pub(crate) mod handle;
#[cfg(feature = "runtime-tokio")]
mod hosted;
pub(crate) mod inbox;
pub(crate) mod join;
pub(crate) mod mailbox;
pub(crate) mod many;
pub(crate) mod messages;
mod meter;
pub(crate) mod notice;
mod opens;
mod passing;
mod records;
pub(crate) mod service_lane;
pub(crate) mod services;
pub(crate) mod session;
mod spare;
pub(crate) mod spawned;
pub(crate) mod started;
pub(crate) mod starting;
pub(crate) mod state;
#[cfg(feature = "testing")]
pub(crate) mod stepped;
mod sync;
mod task;
pub(crate) mod timers;
pub(crate) mod turns;
pub(crate) mod upstreams;
mod wake;

/// The state machine below services and upstreams.
pub(crate) type Core = ringserve_core::Shard<crate::log::LogObserver>;
