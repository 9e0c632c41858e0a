//! Reasons why connections end, and the side that is responsible.

use core::fmt;

use crate::framing::FrameError;
use crate::proxy::HeaderError;

/// The side that ended a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ClosedBy {
    /// The peer.
    Peer,
    /// The code of the user.
    Service,
    /// A limit or the shutdown of this server.
    Server,
    /// A server that this server connected to.
    Upstream,
    /// The kernel.
    System,
}

/// The kind of a [`CloseReason`]: why a connection ended, while [`ClosedBy`] is who ended it.
///
/// A program counts or reacts by kind, since later versions add reasons within these kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CloseKind {
    /// The peer ended the connection, in order or by a reset.
    Peer,
    /// The service ended it: by its choice, by an error or a panic, or because an upstream failed.
    Service,
    /// A limit on time or rates was exceeded.
    Limit,
    /// Memory ran out: a full outbox, or a shard at its limit.
    Overload,
    /// Bytes of the peer broke the protocol: framing, PROXY header, TLS, the upgrade to WebSocket.
    Protocol,
    /// The system reported an error, on this connection or on one to an upstream.
    Io,
    /// The server shut down.
    Shutdown,
}

/// The reason why a connection ended. Every connection has exactly one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CloseReason {
    /// The peer sent FIN between two frames and got all replies.
    PeerClosed,
    /// The peer sent FIN in the middle of a frame.
    PeerClosedMidFrame,
    /// The peer, or the network between, reset the connection.
    PeerReset,
    /// The peer sent bytes that are not a frame, or a frame that is too large.
    BadFrame(FrameError),
    /// The peer sent no whole frame within
    /// [`Limits::first_frame_timeout`](crate::Limits::first_frame_timeout).
    FirstFrameTimeout,
    /// Nothing was sent or received for [`Limits::idle_timeout`](crate::Limits::idle_timeout).
    IdleTimeout,
    /// The peer took no byte for
    /// [`Limits::write_stall_timeout`](crate::Limits::write_stall_timeout).
    WriteStallTimeout,
    /// The peer took replies more slowly than
    /// [`Limits::write_bytes_per_second_min`](crate::Limits::write_bytes_per_second_min).
    WriteTooSlow,
    /// The peer sent a frame more slowly than
    /// [`Limits::read_bytes_per_second_min`](crate::Limits::read_bytes_per_second_min).
    ReadTooSlow,
    /// The peer answered none of
    /// [`Limits::heartbeats_missed_max`](crate::Limits::heartbeats_missed_max) heartbeats.
    HeartbeatLost,
    /// A call was pending for longer than
    /// [`Limits::handler_timeout`](crate::Limits::handler_timeout).
    HandlerTimeout,
    /// [`Service::open`] was pending for longer than
    /// [`Limits::open_timeout`](crate::Limits::open_timeout).
    ///
    /// [`Service::open`]: https://docs.rs/ringserve/latest/ringserve/trait.Service.html
    OpenTimeout,
    /// The listener expects a PROXY header, and the source is in no network whose headers are
    /// trusted.
    ProxyUntrusted,
    /// The first bytes of a trusted source are not a PROXY header.
    ProxyBadHeader(HeaderError),
    /// The PROXY header was not whole within
    /// [`Limits::proxy_header_timeout`](crate::Limits::proxy_header_timeout), or
    /// [`Limits::handshake_timeout`](crate::Limits::handshake_timeout).
    ProxyTimeout,
    /// The peer sent FIN before the first byte of a PROXY header, as load balancers do to check
    /// whether the port is open.
    ProxyNoHeader,
    /// The service closed the connection, after its replies.
    Closed,
    /// The service aborted the connection.
    Aborted,
    /// [`Service::open`] refused the connection.
    ///
    /// [`Service::open`]: https://docs.rs/ringserve/latest/ringserve/trait.Service.html
    Refused,
    /// A handler returned an error.
    HandlerError,
    /// The service closed the connection because an upstream that it needed refused, stalled or
    /// broke.
    UpstreamFailed,
    /// A connection to an upstream could not be made: an `errno`.
    ConnectFailed(i32),
    /// A connection to an upstream was not made within
    /// [`ServerLimits::connect_timeout`](crate::ServerLimits::connect_timeout).
    ConnectTimeout,
    /// A handler or other user code panicked.
    HandlerPanicked,
    /// A reply could not be framed.
    ReplyNotFramed,
    /// The service queued more than [`Limits::outbox_bytes_max`](crate::Limits::outbox_bytes_max).
    OutboxFull,
    /// The shard held more than
    /// [`ServerLimits::held_bytes_max`](crate::ServerLimits::held_bytes_max) and this connection
    /// was among those that held most, or the system had no memory for it.
    MemoryLimit,
    /// The server shut down, after the replies.
    Shutdown,
    /// The server shut down and the connection was not done within
    /// [`ServerLimits::drain_timeout`](crate::ServerLimits::drain_timeout).
    DrainTimeout,
    /// The server was aborted.
    ServerAborted,
    /// The kernel reported an error: its `errno`.
    System(i32),
    /// The handshake of a transport was not done within
    /// [`Limits::handshake_timeout`](crate::Limits::handshake_timeout).
    HandshakeTimeout,
    /// The handshake of TLS failed, with the alert that was sent to the peer.
    TlsHandshakeFailed(u8),
    /// The peer sent bytes that are not a record of TLS, or a record that was altered on its way.
    TlsBadRecord,
    /// The peer sent a fatal alert of TLS.
    TlsAlertReceived(u8),
    /// The peer sent FIN without a `close_notify`, although that is required.
    TlsTruncated,
    /// The first bytes of the peer were not a WebSocket request. The HTTP status of the answer.
    UpgradeRefused(u16),
    /// The peer sent faster than
    /// [`Limits::read_frames_per_second_max`](crate::Limits::read_frames_per_second_max) or
    /// [`Limits::read_bytes_per_second_max`](crate::Limits::read_bytes_per_second_max), and
    /// [`Limits::when_read_too_fast`](crate::Limits::when_read_too_fast) is to close.
    ReadTooFast,
    /// The service gave the connection a [deadline](crate::ConnLimits::deadline), which passed.
    DeadlinePassed,
}

impl CloseReason {
    pub(crate) const COUNT: usize = 39;

    /// Why the connection ended, in one of seven kinds. [`closed_by`](CloseReason::closed_by) is
    /// who ended it.
    ///
    /// ```
    /// use ringserve_core::{CloseKind, CloseReason};
    ///
    /// assert_eq!(CloseReason::IdleTimeout.kind(), CloseKind::Limit);
    /// ```
    pub fn kind(self) -> CloseKind {
        use CloseReason::*;
        match self {
            PeerClosed | PeerClosedMidFrame | PeerReset => CloseKind::Peer,
            BadFrame(_)
            | ProxyUntrusted
            | ProxyBadHeader(_)
            | ProxyNoHeader
            | TlsHandshakeFailed(_)
            | TlsBadRecord
            | TlsAlertReceived(_)
            | TlsTruncated
            | UpgradeRefused(_) => CloseKind::Protocol,
            FirstFrameTimeout | IdleTimeout | WriteStallTimeout | WriteTooSlow | ReadTooSlow
            | ReadTooFast | HeartbeatLost | HandlerTimeout | OpenTimeout | ProxyTimeout
            | HandshakeTimeout | ConnectTimeout | DeadlinePassed => CloseKind::Limit,
            OutboxFull | MemoryLimit => CloseKind::Overload,
            Closed | Aborted | Refused | HandlerError | HandlerPanicked | ReplyNotFramed | UpstreamFailed => {
                CloseKind::Service
            }
            ConnectFailed(_) | System(_) => CloseKind::Io,
            Shutdown | DrainTimeout | ServerAborted => CloseKind::Shutdown,
        }
    }

    /// The side that ended the connection. [`kind`](CloseReason::kind) is why.
    pub fn closed_by(self) -> ClosedBy {
        use CloseReason::*;
        match self {
            PeerClosed
            | PeerClosedMidFrame
            | PeerReset
            | BadFrame(_)
            | ProxyBadHeader(_)
            | ProxyNoHeader
            | TlsHandshakeFailed(_)
            | TlsBadRecord
            | TlsAlertReceived(_)
            | TlsTruncated
            | UpgradeRefused(_) => ClosedBy::Peer,
            FirstFrameTimeout | IdleTimeout | WriteStallTimeout | WriteTooSlow | ReadTooSlow
            | ReadTooFast | HeartbeatLost | ProxyUntrusted | ProxyTimeout | HandshakeTimeout
            | MemoryLimit | Shutdown | DrainTimeout | ServerAborted | DeadlinePassed => ClosedBy::Server,
            UpstreamFailed | ConnectFailed(_) | ConnectTimeout => ClosedBy::Upstream,
            Closed | Aborted | Refused | HandlerError | HandlerTimeout | OpenTimeout | HandlerPanicked
            | ReplyNotFramed | OutboxFull => ClosedBy::Service,
            System(_) => ClosedBy::System,
        }
    }

    /// A short name, for counters and logs.
    pub fn name(self) -> &'static str {
        NAMES[self.index()]
    }

    /// The place of this reason in an array of all reasons.
    #[doc(hidden)]
    pub fn index(self) -> usize {
        use CloseReason::*;
        match self {
            PeerClosed => 0,
            PeerClosedMidFrame => 1,
            PeerReset => 2,
            BadFrame(_) => 3,
            FirstFrameTimeout => 4,
            IdleTimeout => 5,
            WriteStallTimeout => 6,
            Closed => 7,
            Aborted => 8,
            Refused => 9,
            HandlerError => 10,
            HandlerPanicked => 11,
            ReplyNotFramed => 12,
            OutboxFull => 13,
            MemoryLimit => 14,
            Shutdown => 15,
            DrainTimeout => 16,
            ServerAborted => 17,
            System(_) => 18,
            ReadTooSlow => 19,
            HeartbeatLost => 20,
            HandlerTimeout => 21,
            UpstreamFailed => 22,
            ConnectFailed(_) => 23,
            ConnectTimeout => 24,
            WriteTooSlow => 25,
            OpenTimeout => 26,
            ProxyUntrusted => 27,
            ProxyBadHeader(_) => 28,
            ProxyTimeout => 29,
            ProxyNoHeader => 30,
            HandshakeTimeout => 31,
            TlsHandshakeFailed(_) => 32,
            TlsBadRecord => 33,
            TlsAlertReceived(_) => 34,
            TlsTruncated => 35,
            UpgradeRefused(_) => 36,
            ReadTooFast => 37,
            DeadlinePassed => 38,
        }
    }

    /// The reason for an `errno` on the socket.
    pub(crate) fn of_errno(errno: i32) -> CloseReason {
        // ECONNRESET, EPIPE, ETIMEDOUT, ECONNABORTED, EHOSTUNREACH: the same numbers on every Linux
        // except alpha, mips and sparc, where they are named by number instead.
        match errno {
            104 | 32 | 110 | 103 | 113 => CloseReason::PeerReset,
            other => CloseReason::System(other),
        }
    }
}

/// One of each, by [`CloseReason::index`]. Values inside do not matter.
pub(crate) const EACH: [CloseReason; CloseReason::COUNT] = {
    use CloseReason::*;
    [
        PeerClosed,
        PeerClosedMidFrame,
        PeerReset,
        BadFrame(FrameError::VarintOverflow),
        FirstFrameTimeout,
        IdleTimeout,
        WriteStallTimeout,
        Closed,
        Aborted,
        Refused,
        HandlerError,
        HandlerPanicked,
        ReplyNotFramed,
        OutboxFull,
        MemoryLimit,
        Shutdown,
        DrainTimeout,
        ServerAborted,
        System(0),
        ReadTooSlow,
        HeartbeatLost,
        HandlerTimeout,
        UpstreamFailed,
        ConnectFailed(0),
        ConnectTimeout,
        WriteTooSlow,
        OpenTimeout,
        ProxyUntrusted,
        ProxyBadHeader(HeaderError::NotProxy),
        ProxyTimeout,
        ProxyNoHeader,
        HandshakeTimeout,
        TlsHandshakeFailed(0),
        TlsBadRecord,
        TlsAlertReceived(0),
        TlsTruncated,
        UpgradeRefused(0),
        ReadTooFast,
        DeadlinePassed,
    ]
};

/// Names, by [`CloseReason::index`].
pub(crate) const NAMES: [&str; CloseReason::COUNT] = [
    "peer_closed",
    "peer_closed_mid_frame",
    "peer_reset",
    "bad_frame",
    "first_frame_timeout",
    "idle_timeout",
    "write_stall_timeout",
    "closed",
    "aborted",
    "refused",
    "handler_error",
    "handler_panicked",
    "reply_not_framed",
    "outbox_full",
    "memory_limit",
    "shutdown",
    "drain_timeout",
    "server_aborted",
    "system",
    "read_too_slow",
    "heartbeat_lost",
    "handler_timeout",
    "upstream_failed",
    "connect_failed",
    "connect_timeout",
    "write_too_slow",
    "open_timeout",
    "proxy_untrusted",
    "proxy_bad_header",
    "proxy_timeout",
    "proxy_no_header",
    "handshake_timeout",
    "tls_handshake_failed",
    "tls_bad_record",
    "tls_alert_received",
    "tls_truncated",
    "upgrade_refused",
    "read_too_fast",
    "deadline_passed",
];

impl fmt::Display for CloseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CloseReason::BadFrame(error) => write!(f, "bad_frame ({error})"),
            CloseReason::ProxyBadHeader(error) => write!(f, "proxy_bad_header ({error})"),
            CloseReason::TlsHandshakeFailed(alert) => write!(f, "tls_handshake_failed (alert {alert})"),
            CloseReason::TlsAlertReceived(alert) => write!(f, "tls_alert_received (alert {alert})"),
            CloseReason::UpgradeRefused(status) => write!(f, "upgrade_refused (status {status})"),
            CloseReason::System(errno) => write!(f, "system (errno {errno})"),
            CloseReason::ConnectFailed(errno) => write!(f, "connect_failed (errno {errno})"),
            other => f.write_str(other.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_stands_at_its_index() {
        for (index, reason) in EACH.iter().enumerate() {
            assert_eq!(reason.index(), index, "{reason}");
        }
    }
}
