//! The types that programs write and hold on a shard: services, their contexts and handles.
//!
//! It uses all rooms of a shard but those that run it. `service.rs` is the place to begin.

pub(crate) mod closed;
pub(crate) mod conn_handle;
mod conn_methods;
pub(crate) mod cx;
pub(crate) mod guarded_transport;
pub(crate) mod handle;
pub(crate) mod opening;
pub(crate) mod pages;
pub(crate) mod reserve;
pub(crate) mod service;
