//! Counters of a shard.

use core::ops::AddAssign;

use super::reason::{EACH, NAMES};
use crate::{CloseReason, RefusedBy};

/// Counters of a shard since its start. They never fall.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnStats {
    /// Connections that the kernel accepted for this shard.
    pub accepted: u64,
    /// Connections that were refused: [`refused_by`](ConnStats::refused_by) has the causes.
    pub refused: u64,
    /// Connections that waited because of `connections_max`, because of the server's rate, or
    /// because the server refuses under load and had no room for a rejection message. Each counts
    /// once.
    pub waited: u64,
    /// Connections that this shard accepted and handed to another one: its own table was full, or,
    /// at a Unix socket, it had more than the other one.
    pub handed_off: u64,
    /// Times accepting stopped because of a limit: connections, descriptors, system files; or at
    /// one listener, where as many connections began as
    /// [`handshakes_max`](crate::ServerLimits::handshakes_max) allows and none could be reset, or
    /// its accept failed.
    pub accept_paused: u64,
    /// Times accepting waited for the server's rate of new connections.
    pub accept_held: u64,
    /// Connections that were opened.
    pub opened: u64,
    /// Connections that ended.
    pub closed: u64,
    /// Frames handed to the service.
    pub frames: u64,
    /// Bytes received.
    pub bytes_received: u64,
    /// Bytes that the kernel accepted for sending.
    pub bytes_sent: u64,
    /// Send operations.
    pub sends: u64,
    /// Times receiving was paused because a connection held too much.
    pub receives_paused: u64,
    /// Times a connection's frames were held back because its peer sent faster than it may:
    /// [`Limits::read_frames_per_second_max`](crate::Limits::read_frames_per_second_max).
    pub reads_held: u64,
    /// Frames copied because receive memory was short, or because they would have pinned much more
    /// than their own bytes for a call.
    pub frames_copied: u64,
    /// Frames of [`frames`](ConnStats::frames) that were shed: the service answered them without a
    /// call, because its shard was overloaded. For services over codecs these are items, for HTTP
    /// requests, and for streams whatever they report themselves.
    pub frames_shed: u64,
    /// Calls that did not end at once, and waited. Frames that are neither among these nor among
    /// the shed ones are calls that ended at once.
    pub calls_waited: u64,
    /// Handshakes of transports that began. Each is then done, failed, or took longer than
    /// [`Limits::handshake_timeout`](crate::Limits::handshake_timeout).
    pub handshakes_started: u64,
    /// Handshakes that were completed.
    pub handshakes_done: u64,
    /// Handshakes that failed.
    pub handshakes_failed: u64,
    /// Handshakes that took longer than
    /// [`Limits::handshake_timeout`](crate::Limits::handshake_timeout).
    pub handshakes_timed_out: u64,
    /// Handshakes with a step that waits now. The only value here that can fall.
    pub handshakes_waiting: u64,
    /// Connections that were refused, by cause.
    pub(crate) refused_by_cause: [u64; RefusedBy::ALL.len()],
    /// Connections that ended, by [`CloseReason::index`].
    pub(crate) closed_by_reason: ByReason,
}

/// A count for each reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ByReason(pub [u64; CloseReason::COUNT]);

impl Default for ByReason {
    fn default() -> ByReason {
        ByReason([0; CloseReason::COUNT])
    }
}

impl ConnStats {
    /// Connections that ended for this reason. An error inside the reason does not matter.
    pub fn closed_for(&self, reason: CloseReason) -> u64 {
        self.closed_by_reason.0[reason.index()]
    }

    /// Connections that were refused for this cause. Those of all causes together are
    /// [`refused`](ConnStats::refused).
    pub fn refused_by(&self, by: RefusedBy) -> u64 {
        self.refused_by_cause[by as usize]
    }

    pub(crate) fn refuse(&mut self, by: RefusedBy) {
        self.refused += 1;
        self.refused_by_cause[by as usize] += 1;
    }

    /// The reasons that occurred, each with its number of connections.
    pub fn reasons(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        NAMES.into_iter().zip(self.closed_by_reason.0).filter(|(_, count)| *count > 0)
    }

    /// One of each reason, with the number of connections that ended for it.
    #[doc(hidden)]
    pub fn each_reason(&self) -> impl Iterator<Item = (CloseReason, u64)> + '_ {
        EACH.into_iter().zip(self.closed_by_reason.0)
    }

    /// Calls `visit` with each count, always in the same order: for code that keeps them as
    /// numbers.
    #[doc(hidden)]
    pub fn each_count(&mut self, visit: impl FnMut(&mut u64)) {
        let ConnStats {
            accepted,
            refused,
            waited,
            handed_off,
            accept_paused,
            accept_held,
            opened,
            closed,
            frames,
            bytes_received,
            bytes_sent,
            sends,
            receives_paused,
            reads_held,
            frames_copied,
            frames_shed,
            calls_waited,
            handshakes_started,
            handshakes_done,
            handshakes_failed,
            handshakes_timed_out,
            handshakes_waiting,
            refused_by_cause,
            closed_by_reason: ByReason(by_reason),
        } = self;
        let counts = [
            accepted,
            refused,
            waited,
            handed_off,
            accept_paused,
            accept_held,
            opened,
            closed,
            frames,
            bytes_received,
            bytes_sent,
            sends,
            receives_paused,
            reads_held,
            frames_copied,
            frames_shed,
            calls_waited,
            handshakes_started,
            handshakes_done,
            handshakes_failed,
            handshakes_timed_out,
            handshakes_waiting,
        ];
        counts.into_iter().chain(refused_by_cause).chain(by_reason).for_each(visit);
    }
}

impl AddAssign<&ConnStats> for ConnStats {
    fn add_assign(&mut self, other: &ConnStats) {
        self.accepted += other.accepted;
        self.refused += other.refused;
        self.waited += other.waited;
        self.handed_off += other.handed_off;
        self.accept_paused += other.accept_paused;
        self.accept_held += other.accept_held;
        self.opened += other.opened;
        self.closed += other.closed;
        self.frames += other.frames;
        self.bytes_received += other.bytes_received;
        self.bytes_sent += other.bytes_sent;
        self.sends += other.sends;
        self.receives_paused += other.receives_paused;
        self.reads_held += other.reads_held;
        self.frames_copied += other.frames_copied;
        self.frames_shed += other.frames_shed;
        self.calls_waited += other.calls_waited;
        self.handshakes_started += other.handshakes_started;
        self.handshakes_done += other.handshakes_done;
        self.handshakes_failed += other.handshakes_failed;
        self.handshakes_timed_out += other.handshakes_timed_out;
        self.handshakes_waiting += other.handshakes_waiting;
        for (sum, more) in self.refused_by_cause.iter_mut().zip(other.refused_by_cause) {
            *sum += more;
        }
        for (sum, more) in self.closed_by_reason.0.iter_mut().zip(other.closed_by_reason.0) {
            *sum += more;
        }
    }
}
