//! A server: its configuration, its start, its handles while it runs, and its end.

pub(crate) mod builder;
pub(crate) mod config;
mod control;
pub(crate) mod driven;
pub(crate) mod driver;
pub(crate) mod endpoint;
mod fit;
mod inspecting;
mod launch;
pub(crate) mod listen;
pub(crate) mod running;
pub(crate) mod runtime;
pub(crate) mod serves;
pub(crate) mod several;
mod signals;
pub(crate) mod start;
#[cfg(feature = "testing")]
pub(crate) mod stepped;
mod until;
