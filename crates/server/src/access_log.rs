//! The access log: one line for each connection that ended.
//!
//! [`Server::access_log`](crate::Server::access_log), or
//! [`Endpoints::access_log`](crate::listen::Endpoints::access_log) for one service of several,
//! writes an event of `tracing` at level INFO with the target `ringserve::access` when a connection
//! ended. A subscriber decides where it goes, and in which format: `LogOptions::access_file` of
//! `ringserve::log` appends lines of JSON to a file.
//!
//! | field | what it is |
//! |---|---|
//! | `shard`, `id` | together the connection's name, as in every other line of the log |
//! | `service`, `listener` | the name of its service, and the number of its listener |
//! | `peer`, `via` | the peer's address, and the proxy through which it came; left out where there is none |
//! | `bytes_in`, `bytes_out` | bytes received, and those that the kernel took; what was on its way at a reset is not in them |
//! | `frames_in`, `frames_out` | frames handed to the service, and those that were queued for the peer |
//! | `seconds` | from the accept to the end |
//! | `reason`, `closed_by` | the [close reason](crate::CloseReason), and the side that it counts for |
//!
//! A service of HTTP has a log of its requests too: `http(..).access_log(true)`.
//!
//! The lines are not limited: an attack of a million short connections writes a million of them,
//! and a subscriber that blocks keeps the shard from its other connections. `ringserve::log` hands
//! lines to a thread, and drops them when it is behind. Connections that were refused before they
//! were kept for anything ([`Server::admit`](crate::Server::admit)), and those that the server
//! makes, are in no line.

use ringserve_core::{CloseReason, ConnId, Outlet, Time};
use ringserve_drivers::guarded;
use tracing::info;

/// Writes the line of a connection that ended.
#[cold]
pub(crate) fn write(shard: usize, service: &str, outlet: &Outlet, now: Time, reason: CloseReason) {
    let account = outlet.account(now).unwrap_or_default();
    let (id, listener): (ConnId, u16) = (outlet.id(), outlet.listener());
    let (peer, via) = (outlet.peer(), outlet.proxied().via);
    let closed_by = format!("{:?}", reason.closed_by()).to_lowercase();
    guarded(|| {
        info!(
            target: "ringserve::access",
            shard,
            %id,
            service,
            listener,
            peer = peer.map(display),
            via = via.map(display),
            bytes_in = account.bytes_received,
            bytes_out = account.bytes_sent,
            frames_in = account.frames_received,
            frames_out = account.frames_sent,
            seconds = account.duration.as_secs_f64(),
            reason = reason.name(),
            closed_by,
            "closed"
        );
    });
}
