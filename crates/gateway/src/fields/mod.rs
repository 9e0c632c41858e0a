//! Fields of requests and answers: which are passed on, and which are of this gateway.
//!
//! May use nothing of this crate. Begin with `strip.rs`: what is of one connection alone goes
//! first, and what the gateway says itself is added after that, so that no client can strip it by
//! naming it in `connection`.

pub(crate) mod edit;
pub(crate) mod forwarded;
pub(crate) mod host;
pub(crate) mod names;
pub(crate) mod strip;
