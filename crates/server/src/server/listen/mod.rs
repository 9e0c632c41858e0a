//! Listening sockets: the addresses of a server, and a socket for each shard and address.

pub(crate) mod addr;
mod adopted;
mod ip;
pub(crate) mod sockets;
pub(crate) mod tls;
pub(crate) mod transport;
mod unix;
pub(crate) mod websocket;
