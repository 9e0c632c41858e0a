//! Sizes of the epoll driver.

use std::time::Duration;

use ringserve_buf::PoolConfig;
use ringserve_core::ConnId;

use crate::shared::connect::BeforeConnect;
use crate::shared::report::SetupError;

/// Sizes of one shard's epoll driver.
#[derive(Clone, Debug)]
pub struct EpollConfig {
    /// Connections at most, 1 to 2^24; slots are below this. Each costs a descriptor of the process, so
    /// `RLIMIT_NOFILE`, shared by all shards, is the other bound. Memory is taken as they come: 48 bytes each.
    pub connections: u32,
    /// Receive memory. A connection uses a buffer only while there are bytes in it.
    pub pool: PoolConfig,
    /// Tells the peer's address of each accepted connection. Accepting brings it anyway. On by default.
    pub peer_addresses: bool,
    /// Behind a turn that brought bytes of several connections, how long the next one sleeps before it looks for events; what
    /// comes then is late by as much. 0 by default. From the first such sleep on the thread has a timer slack of 1 ns, which
    /// threads that it starts inherit, since the usual 50 µs would be slept on top.
    pub coalesce: Duration,
    /// Prepares a socket before it connects.
    pub before_connect: BeforeConnect,
}

impl Default for EpollConfig {
    /// 16384 connections, as with io_uring.
    fn default() -> EpollConfig {
        EpollConfig {
            connections: 16 * 1024,
            pool: PoolConfig::default(),
            peer_addresses: true,
            coalesce: Duration::ZERO,
            before_connect: BeforeConnect::default(),
        }
    }
}

impl EpollConfig {
    /// Checks every bound that does not depend on the system. Those of the pool are checked when it is made.
    ///
    /// # Errors
    /// Names the value out of range, and the range.
    pub fn check(&self) -> Result<(), SetupError> {
        let (value, min, max) = (self.connections, 1, ConnId::SLOTS_MAX);
        if !(min..=max).contains(&value) {
            return Err(SetupError::OutOfRange { name: "connections", value, min, max });
        }
        Ok(())
    }
}
