//! The one place from which a shard can be watched.

use core::net::SocketAddr;
use core::time::Duration;

use crate::{CloseReason, ConnId, LaneId, Outlet, Time};

/// Receives the events of a shard as they happen. `()` ignores them and costs nothing.
#[allow(unused_variables)]
pub trait Observer {
    /// A connection was adopted, or made.
    fn opened(&mut self, now: Time, lane: LaneId, id: ConnId, peer: Option<SocketAddr>) {}
    /// The PROXY header of a connection was read: it belongs to `peer`, and came by the proxy
    /// `via`. `peer` is `None` for a connection of the proxy itself, or if the header gives no
    /// address.
    fn proxied(
        &mut self,
        now: Time,
        lane: LaneId,
        id: ConnId,
        peer: Option<SocketAddr>,
        via: Option<SocketAddr>,
    ) {
    }
    /// A connection's first frame went to the service, `after` the time at which its peer could
    /// send one: when it was accepted or made, or when its PROXY header, its handshake and its
    /// `open` were done. In steps of 17 ms.
    fn first_frame(&mut self, lane: LaneId, after: Duration) {}
    /// A frame of `bytes` bytes on the wire goes to the service.
    fn frame(&mut self, now: Time, outlet: &Outlet, bytes: usize) {}
    /// `bytes` bytes of replies go to the kernel.
    fn sending(&mut self, now: Time, id: ConnId, bytes: usize) {}
    /// A send that something waited for was taken, or a part of it, after this time: since it
    /// began, or since the peer last took a part of it. In steps of 17 ms, and never for less.
    fn send_stalled(&mut self, lane: LaneId, time: Duration) {}
    /// Receiving was paused, or resumed.
    fn paused(&mut self, now: Time, id: ConnId, paused: bool) {}
    /// The shard holds `held` bytes, more than
    /// [`ServerLimits::held_bytes_max`](crate::ServerLimits::held_bytes_max): this connection,
    /// which has held `bytes` of them for more than a moment, is closed for that.
    fn over_held_bytes_max(&mut self, now: Time, lane: LaneId, id: ConnId, bytes: usize, held: usize) {}
    /// The connection ended: no more frames, no more replies. Its account, if it has one, is
    /// complete.
    fn ended(&mut self, now: Time, lane: LaneId, outlet: &Outlet, reason: CloseReason) {}
    /// Accepting was paused by a limit, or resumed: at one listener, or at all of the shard's.
    fn accept_paused(&mut self, now: Time, listener: Option<u16>, paused: bool) {}
    /// Makes a call of the shard's to a connection's [`TransportConn`](crate::TransportConn), which
    /// is others' code. `None` if it panicked, and the panic was caught and reported. By default no
    /// panic is caught.
    #[inline]
    fn guard<T>(&self, id: ConnId, call: impl FnOnce() -> T) -> Option<T> {
        Some(call())
    }
}

impl Observer for () {}
