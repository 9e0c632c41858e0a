//! A shard: what its users hold of it, the loop, and what that loop consists of.
//!
//! Each room uses those before it alone: [`wakes`], [`remote`], [`tasks`], [`face`], [`state`],
//! [`admit`], [`calls`], [`messages`], [`running`]. A turn, in `running/turns.rs`, is the place to
//! begin.

mod admit;
pub(crate) mod calls;
pub(crate) mod face;
pub(crate) mod messages;
pub(crate) mod remote;
pub(crate) mod running;
pub(crate) mod state;
pub(crate) mod tasks;
pub(crate) mod wakes;

/// The state machine below services and upstreams.
pub(crate) type Core = ringserve_core::Shard<crate::log::LogObserver>;
