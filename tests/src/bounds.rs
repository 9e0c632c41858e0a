//! Limits of a server under test and of its one service, set in one chain, and whether a watchdog
//! observes it.

use std::time::Duration;

use ringserve::limits::{IdleActivity, ServerLimits, StallOptions};
use ringserve::{Limits, Server};

/// Both kinds of limits, and the options of stalls.
#[derive(Clone, Debug, Default)]
pub struct Bounds {
    pub service: Limits,
    pub server: ServerLimits,
    pub stalls: StallOptions,
}

impl Bounds {
    /// Disables the watchdog: it allocates for each stall, and a loaded machine causes some.
    #[must_use]
    pub fn unwatched(mut self) -> Bounds {
        self.stalls = StallOptions::off();
        self
    }
}

impl From<Limits> for Bounds {
    fn from(service: Limits) -> Bounds {
        Bounds { service, ..Bounds::default() }
    }
}

/// A server that accepts both kinds of limits together.
pub trait Bounded {
    fn bounded(self, bounds: impl Into<Bounds>) -> Self;
}

impl<F: ringserve::framing::Framing + Clone + Send> Bounded for Server<F> {
    fn bounded(self, bounds: impl Into<Bounds>) -> Server<F> {
        let Bounds { service, server, stalls } = bounds.into();
        self.limits(service).server_limits(server).stalls(stalls)
    }
}

macro_rules! setters {
    ($($part:ident { $($name:ident: $type:ty,)* } options { $($option:ident,)* })*) => {
        impl Bounds {
            $($(
                #[must_use]
                pub fn $name(mut self, value: $type) -> Bounds {
                    self.$part = self.$part.$name(value);
                    self
                }
            )*
            $(
                #[must_use]
                pub fn $option(mut self, time: impl Into<Option<Duration>>) -> Bounds {
                    self.$part = self.$part.$option(time);
                    self
                }
            )*)*
        }
    };
}

setters! {
    service {
        frame_bytes_max: usize,
        outbox_bytes_high: usize,
        outbox_bytes_low: usize,
        outbox_bytes_max: usize,
        inbox_bytes_high: usize,
        idle_counts: IdleActivity,
        write_bytes_per_second_min: usize,
        read_bytes_per_second_min: usize,
        heartbeats_missed_max: u8,
        calls_in_flight_max: u16, connection_tasks_max: u16,
        linger_timeout: Duration,
    } options {
        first_frame_timeout, idle_timeout, write_stall_timeout, handler_timeout, open_timeout, proxy_header_timeout,
        handshake_timeout, heartbeat_interval,
    }
    server {
        connections_max: usize,
        handshakes_max: usize,
        held_bytes_max: usize,
        receive_bytes_max: usize,
        receive_buffer_bytes: usize,
        upstreams_max: usize,
        drain_timeout: Duration,
        drain_delay: Duration,
    } options {
        connect_timeout, drain_spread,
    }
}
