//! Sizes of the epoll driver.

use std::time::Duration;

use ringserve_buf::PoolConfig;
use ringserve_core::ConnId;

use crate::shared::connect::BeforeConnect;
use crate::shared::report::SetupError;

/// Sizes of one shard's epoll driver.
#[derive(Clone, Debug)]
pub struct EpollConfig {
    /// The most connections, 1 to 2^24; slots are below this. Each costs a descriptor of the
    /// process, so `RLIMIT_NOFILE`, shared by all shards, is the other bound. Memory grows with the
    /// connections: 48 bytes each.
    pub connections: u32,
    /// Receive memory. A connection uses a buffer only while there are bytes in it.
    pub pool: PoolConfig,
    /// Whether to report the peer's address of each accepted connection. Accepting brings it
    /// anyway. On by default.
    pub peer_addresses: bool,
    /// Sleep of a turn before it looks for events, after a turn that brought bytes of several
    /// connections. Events in that time are late by as much. 0 by default. After the first such
    /// sleep the thread has a timer slack of 1 ns, which threads that it starts inherit, since the
    /// usual 50 µs would be added to each sleep.
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
    /// Checks every bound that does not depend on the system. Those of the pool are checked when it
    /// is made.
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
