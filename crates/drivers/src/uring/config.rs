//! Sizes and choices of the io_uring driver.

use std::time::Duration;

use ringserve_buf::PoolConfig;
use ringserve_core::ConnId;

use crate::shared::connect::BeforeConnect;
use crate::shared::report::SetupError;

/// Sizes and choices of one shard's ring.
#[derive(Clone, Debug)]
pub struct UringConfig {
    /// Entries of the submission queue, 8 to 32768, rounded up to a power of two; 64 bytes each.
    /// Operations that do not fit wait for the next turn. 512 by default: with one enter per turn
    /// more were never used in trials.
    pub submission_entries: u32,
    /// Entries of the completion queue, at least as many as above and at most 65536, rounded up to
    /// a power of two; 16 bytes each. 4096 by default; it should be no less than
    /// `pool.buffers_max`, since each filled buffer is a completion. An overflow loses nothing, but
    /// multishots end and are armed again.
    pub completion_entries: u32,
    /// The most connections: entries of the ring's own file table, 8 bytes each. It may be as large
    /// as the soft `RLIMIT_NOFILE`; a connection costs no descriptor.
    pub connections: u32,
    /// Receive memory.
    pub pool: PoolConfig,
    /// Whether to restrict the ring to the operations the driver uses, so that code that takes over
    /// the process cannot use it for others. Ignored with a line in the debug log where the kernel
    /// refuses.
    pub restrict: bool,
    /// Whether to keep connections as ordinary descriptors instead of in the ring's own table. Then
    /// they are bound by `RLIMIT_NOFILE` of the whole process. Needed before Linux 6.13: there the
    /// close of a table's entry waits for every older operation on the table, so one idle
    /// connection's receive holds back the FIN of all others (liburing#1192).
    /// [`probe`](crate::probe()) finds out.
    pub plain_descriptors: bool,
    /// Whether to ask for the peer's address of each accepted connection, which is a separate
    /// system call here. On by default.
    pub peer_addresses: bool,
    /// Wait of a turn for more completions, after a turn that brought bytes of several connections.
    /// Completions in that time are late by as much. 0 by default: the first completion ends the
    /// wait. 256 completions end it early.
    pub coalesce: Duration,
    /// Prepares a socket before it connects.
    pub before_connect: BeforeConnect,
}

impl Default for UringConfig {
    fn default() -> UringConfig {
        UringConfig {
            submission_entries: 512,
            completion_entries: 4096,
            connections: 16 * 1024,
            pool: PoolConfig::default(),
            restrict: true,
            plain_descriptors: false,
            peer_addresses: true,
            coalesce: Duration::ZERO,
            before_connect: BeforeConnect::default(),
        }
    }
}

impl UringConfig {
    /// Checks every bound that does not depend on the system.
    ///
    /// # Errors
    /// Names the first value out of range, and the range.
    pub fn check(&self) -> Result<(), SetupError> {
        let out = |name, value, min, max| Err(SetupError::OutOfRange { name, value, min, max });
        if !(8..=32768).contains(&self.submission_entries) {
            return out("submission_entries", self.submission_entries, 8, 32768);
        }
        if !(self.submission_entries..=65536).contains(&self.completion_entries) {
            return out("completion_entries", self.completion_entries, self.submission_entries, 65536);
        }
        if !(1..=ConnId::SLOTS_MAX).contains(&self.connections) {
            return out("connections", self.connections, 1, ConnId::SLOTS_MAX);
        }
        Ok(())
    }

    /// Entries of the buffer ring: all buffers, up to 4096, which at 16 KiB is 64 MiB in flight at
    /// once.
    pub fn buffer_ring_entries(&self) -> u16 {
        self.pool.buffers_max.clamp(1, 4096).next_power_of_two() as u16
    }
}
