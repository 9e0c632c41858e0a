//! rustls 0.24, of which there are previews alone.

mod connection;
mod server;

pub(crate) use server::{Next, server};
