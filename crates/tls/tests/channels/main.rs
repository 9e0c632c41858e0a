//! Channels of a server against a client of rustls', in memory.

mod clients;
mod ends;
mod names;
mod pair;
mod records;
mod replacing;
mod sessions;
mod upstream;
