//! Time limits in steps of the wheel, of a lane or of one connection.

use core::time::Duration;

use crate::time::{NEVER, steps_for};
use crate::{IdleActivity, Limits};

/// [`Limits`] in steps of the wheel, [`NEVER`] for those that are off.
#[derive(Clone, Copy)]
pub(crate) struct Times {
    pub first_frame: u32,
    pub idle: u32,
    /// True if bytes that the peer takes keep a connection from being idle.
    pub idle_counts_sent: bool,
    /// True if bytes that the peer sends do.
    pub idle_counts_received: bool,
    /// Steps between two looks at what the peer took of a send.
    pub write_look: u32,
    pub linger: u32,
    pub handler: u32,
    pub open: u32,
    /// Steps until the PROXY header must be complete.
    pub header: u32,
    /// Steps until the handshake must be done.
    pub handshake: u32,
    pub heartbeat: u32,
    pub read_window: u32,
    pub probe_busy: u32,
    pub probe_idle: u32,
    pub connect: u32,
}

impl Times {
    /// `connect` is the time to make a connection.
    pub(crate) fn new(limits: &Limits, connect: Option<Duration>) -> Times {
        let steps = |limit: Option<Duration>| limit.map_or(NEVER, steps_for);
        Times {
            first_frame: steps(limits.first_frame_timeout),
            idle: steps(limits.idle_timeout),
            idle_counts_sent: limits.idle_counts != IdleActivity::Received,
            idle_counts_received: limits.idle_counts != IdleActivity::Sent,
            write_look: write_look(limits),
            linger: steps_for(limits.linger_timeout),
            handler: steps(limits.handler_timeout),
            open: steps(limits.open_timeout),
            header: steps(limits.proxy_header_timeout).min(steps(limits.handshake_timeout)),
            handshake: steps(limits.handshake_timeout),
            heartbeat: steps(limits.heartbeat_interval),
            read_window: steps((limits.read_bytes_per_second_min > 0).then_some(RATE_WINDOW)),
            probe_busy: steps_for(PROBE_BUSY),
            probe_idle: steps_for(PROBE_IDLE),
            connect: steps(connect),
        }
    }
}

/// Steps between two looks at a send. A look comes when the peer's time to take a byte is over, and
/// in between often enough to know the rate for each [`RATE_WINDOW`]: an equal part of that time,
/// so that its end is among the looks.
fn write_look(limits: &Limits) -> u32 {
    let Some(stalled) = limits.write_stall_timeout else {
        return if limits.write_bytes_per_second_min > 0 { steps_for(RATE_WINDOW) } else { NEVER };
    };
    let looks = match limits.write_bytes_per_second_min {
        0 => 1,
        _ => steps_for(stalled).div_ceil(steps_for(RATE_WINDOW)).max(1),
    };
    steps_for(stalled).div_ceil(looks)
}

/// A reset that arrives while a multishot receive is delivering data may go unreported: Linux
/// (6.18) looks again after the data only if more bytes or a FIN wait. So a receive that brought
/// bytes is looked at, once, when nothing came after them for this long: a second if a parked
/// handler or half a frame holds up the idle limit or more memory than an idle connection has, a
/// minute otherwise.
const PROBE_BUSY: Duration = Duration::from_secs(1);
const PROBE_IDLE: Duration = Duration::from_secs(60);

/// The time over which [`Limits::read_bytes_per_second_min`] is measured, and the longest for
/// [`Limits::write_bytes_per_second_min`]: long enough for a lost packet to be sent again a few
/// times (TCP tries after 1, 3 and 7 seconds).
pub(crate) const RATE_WINDOW: Duration = Duration::from_secs(10);
