//! Routes: which requests go where, and by which rules. What all shards share; nothing here waits
//! or knows a connection.
//!
//! May use `fields` and `target`. Begin with `routes.rs`.

pub(crate) mod access;
pub(crate) mod path;
pub(crate) mod pattern;
pub(crate) mod route;
pub(crate) mod routes;
