//! Calls of services: the lane of one, and the calls that wait.
//!
//! It uses `state` and what that uses. `service_lane.rs` is the place to begin.

pub(crate) mod opens;
pub(crate) mod running_calls;
pub(crate) mod service_lane;
