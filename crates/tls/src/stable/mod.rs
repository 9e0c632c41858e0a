//! rustls 0.23: its unbuffered connections, and its configuration.

mod connection;
mod server;

pub(crate) use server::{Stable, server};
