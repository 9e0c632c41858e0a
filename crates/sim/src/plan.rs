//! The draws of a seed before it begins: sizes, limits, rates of faults.

use std::time::Duration;

use ringserve_core::{Budget, IdleActivity, Limits, ReadRateAction, ServerLimits};

use crate::bytes::AnyFraming;
use crate::faults::Rates;
use crate::rng::Rng;

/// Nanoseconds in a millisecond.
pub const MS: u64 = 1_000_000;

/// Bytes of a flooded outbox. Others hold a few times 4 KiB at most, less than a quarter of
/// `FLOODED`.
pub const FLOOD: usize = 48 << 10;

/// The most bytes that all flooded connections may hold.
const FLOODED: usize = 3 * FLOOD;

/// Never, as a time.
pub const NEVER: u64 = u64::MAX;

/// The latest time at which a shard's clock starts: 146 years, a quarter of what it counts.
const CLOCK_MAX: u64 = 1 << 62;

/// The draws of a seed before it runs.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The limits of the server.
    pub server_limits: ServerLimits,
    /// The limits of accepted connections.
    pub limits: Limits,
    /// The limits of connections to upstreams.
    pub upstream_limits: Limits,
    /// True if the shard may reach its memory limit.
    pub tight_memory: bool,
    /// Half of the accepted peers get [`FLOOD`] bytes per frame, so that memory is full before any
    /// of it has been held for long.
    pub floods: bool,
    /// Slots of the shard and of the file table.
    pub connections_max: usize,
    /// One in this many opens waits; 0 for none.
    pub open_waits: u64,
    /// One in this many opens has a deadline; 0 for none.
    pub deadlines: u64,
    /// Listeners.
    pub listeners: u16,
    /// The listeners are adopted: they stay with their queues.
    pub adopted: bool,
    /// Connections each listener's backlog holds.
    pub backlog: usize,
    /// Receive buffers.
    pub buffers: usize,
    /// Frames are copied out of them before they are passed on.
    pub copies_frames: bool,
    /// Entries of the buffer ring.
    pub ring_entries: usize,
    /// Entries of the submission queue.
    pub submissions: usize,
    /// Entries of the completion queue.
    pub completions: usize,
    /// Descriptors the process may have open at once.
    pub descriptors: usize,
    /// Bytes that a socket buffer holds: towards the server, towards the peer.
    pub socket_bytes: (usize, usize),
    /// The framing.
    pub framing: AnyFraming,
    /// Connections over the whole run.
    pub peers: usize,
    /// The most frames of one peer.
    pub frames_max: usize,
    /// The most bytes of a payload.
    pub payload_max: usize,
    /// The most nanoseconds between two actions of a peer.
    pub gap_max: u64,
    /// Sends that nothing depends on may be reported late, as the real shard allows.
    pub defers: bool,
    /// Time for which the driver waits for more after a turn with several connections.
    pub coalesce: Duration,
    /// The most nanoseconds by which a completion is late.
    pub late_max: u64,
    /// The rates of faults.
    pub rates: Rates,
    /// Handlers that do something unusual, in 65536.
    pub unusual: u16,
    /// Most waiting calls wait for long, and every other peer leaves up to this many nanoseconds
    /// between two actions.
    pub dawdles: Option<u64>,
    /// Peers that do something unusual, in 8.
    pub odd_peers: u64,
    /// Connections that the service holds open after the peer's FIN, in 65536.
    pub holds: u16,
    /// Replies at which the framing panics, in 65536; 0 with a framing that ships.
    pub encode_panics: u16,
    /// Pushes of other threads, in 65536 turns.
    pub pushes: u16,
    /// Sources of work that is done a page at a time.
    pub page_sources: u64,
    /// Another shard, and the resources that it shares with this one.
    pub other_shard: Option<OtherShard>,
    /// Peers that are upstreams: the server connects to them.
    pub upstreams: usize,
    /// Peers that send half a frame and then next to nothing, in 16.
    pub crawlers: u64,
    /// The shard's clock at the start, in nanoseconds.
    pub clock_start: u64,
    /// Quiet times, without a connection, in 65536 turns: the shard's clock jumps ahead by hours to
    /// months.
    pub quiet_times: u16,
    /// Turns after which the shard is ordered to drain, if it was not before.
    pub turns: u64,
    /// A completion is lost, if the shard is aborted.
    pub loses_completion: bool,
    /// Nanoseconds after that until it is aborted; `None` if it is not.
    pub abort_after: Option<u64>,
    /// One turn's budget.
    pub budget: Budget,
    /// Calls of a turn and the smallest batch of a connection, if they are fewer than the shipped
    /// values.
    pub calls: Option<(u32, u32)>,
    /// Missing bytes from which on a frame is received straight into its block, if they are fewer
    /// than the shipped value.
    pub large_from: Option<usize>,
    /// Turns between two checks of the parts' invariants.
    pub check_every: u64,
}

/// Another shard of the same server.
#[derive(Clone, Copy, Debug)]
pub struct OtherShard {
    /// Its slots.
    pub connections_max: usize,
    /// Connections of both together.
    pub quota: usize,
    /// The most nanoseconds that it keeps a connection.
    pub keeps_max: u64,
    /// The most nanoseconds until it finds a connection that was passed to it.
    pub letter_max: u64,
}

impl OtherShard {
    fn draw(rng: &mut Rng, connections_max: usize) -> OtherShard {
        let slots = rng.range(1, 4) as usize;
        let quota = if rng.one_in(2) { connections_max + slots } else { rng.spread(1, 24) as usize };
        OtherShard {
            connections_max: slots,
            quota,
            keeps_max: rng.spread(MS, 1000 * MS),
            letter_max: rng.spread(MS, 400 * MS),
        }
    }
}

impl Plan {
    /// The limits of an upstream, or of an accepted connection.
    pub fn limits_of(&self, is_upstream: bool) -> &Limits {
        if is_upstream { &self.upstream_limits } else { &self.limits }
    }

    /// The most connections to upstreams at once: fewer than there are upstreams.
    pub fn upstreams_max(&self) -> usize {
        self.upstreams.div_ceil(2)
    }

    /// The most connections, of either kind.
    pub fn slots(&self) -> usize {
        self.connections_max + self.upstreams_max()
    }

    /// Draws the plan of a seed, with at most `turns` turns before it drains.
    pub fn draw(rng: &mut Rng, turns: u64) -> Plan {
        let framing = AnyFraming::draw(rng);
        // Only frames of 4 KiB and more are lent.
        let large = rng.one_in(6);
        let buffer_bytes = if large { rng.pick(&[8192, 16_384]) } else { rng.spread(64, 4096) as usize };
        // With very few, receives are parked most of the time.
        let buffers = if rng.one_in(5) { rng.range(2, 4) } else { rng.spread(2, 64) } as usize;
        let (shortest, longest) = if large { (6000, 16_000) } else { (8, 1500) };
        let payload_max = (rng.spread(shortest, longest) as usize).min(framing.payload_max());
        let passes_on = rng.one_in(3);
        let connections_max =
            if passes_on || rng.one_in(3) { rng.range(1, 6) } else { rng.range(4, 40) } as usize;
        let ring_entries = buffers.next_power_of_two() >> rng.below(2).min(buffers.ilog2() as u64);
        let tight_memory = rng.one_in(6);
        let sizes = draw_sizes(rng, framing, payload_max, buffer_bytes, buffers, tight_memory);
        let slow = rng.one_in(4);
        let other_shard = passes_on.then(|| OtherShard::draw(rng, connections_max));
        // Early, so that much is in progress.
        let short = rng.one_in(if passes_on { 3 } else { 8 });
        let (server_limits, limits) = draw_times(rng, slow, sizes);
        // From a copy, so that other draws of a seed stay the same.
        let floods = tight_memory && Rng::new(rng.clone().below(1 << 32) ^ 0x666C_6F6F).one_in(2);
        let (server_limits, limits) = match floods {
            true => (
                server_limits.held_bytes_max(FLOODED),
                limits.outbox_bytes_high(FLOOD).outbox_bytes_max(2 * FLOOD),
            ),
            false => (server_limits, limits),
        };
        server_limits.check().expect("limits are drawn in their ranges");
        server_limits.check_service(&limits).expect("limits are drawn so that they hold together");
        // From a copy, so that other draws of a seed stay the same.
        let upstream_limits = draw_upstreams(&mut Rng::new(rng.clone().below(1 << 32)), &limits);
        upstream_limits.check().expect("those of upstreams too");
        // The call that began last must not postpone the end of the first one, so they begin far
        // apart.
        let limit = limits.handler_timeout.filter(|_| limits.calls_in_flight_max > 2);
        let dawdles = limit.map(|limit| limit.as_nanos() as u64 / 4);
        // A connection that is held open and waits for such calls is sent more than may be held,
        // also in a drain.
        let held = dawdles.is_some() && rng.one_in(2);
        // From a copy too.
        let opens = &mut Rng::new(rng.clone().below(1 << 32) ^ 0x6F70_656E);
        let open_waits = opens.pick(&[0, 0, 0, 0, 1, 6]);
        let open_timeout = opens.one_in(2).then(|| Duration::from_millis(opens.spread(20, 400)));
        let limits = limits.open_timeout(open_timeout);
        let limits = draw_paces(&mut Rng::new(rng.clone().below(1 << 32) ^ 0x7061_6365), limits);
        // From a copy too.
        let deadlines = Rng::new(rng.clone().below(1 << 32) ^ 0x6465_6164).pick(&[0, 0, 0, 0, 0, 0, 2, 8]);
        // From a copy too.
        let adopted = Rng::new(rng.clone().below(1 << 32) ^ 0x6164_6F70).one_in(6);
        // From a copy too.
        let large_frames = &mut Rng::new(rng.clone().below(1 << 32) ^ 0x6C61_7267);
        let large_from = large_frames.one_in(2).then(|| large_frames.spread(1, 1000) as usize);
        // From a copy too.
        let coalescing = &mut Rng::new(rng.clone().below(1 << 32) ^ 0x636F_616C);
        let coalesces = coalescing.one_in(3);
        // From a copy too.
        let page_sources = Rng::new(rng.clone().below(1 << 32) ^ 0x7061_6765).pick(&[0, 0, 1, 4]);
        let small_budget = rng.one_in(4);
        let peers = rng.spread(if passes_on { 16 } else { 1 }, 60) as usize;
        Plan {
            large_from,
            page_sources,
            tight_memory,
            floods,
            other_shard,
            connections_max,
            listeners: if rng.one_in(4) { 2 } else { 1 },
            adopted,
            backlog: rng.spread(1, 32) as usize,
            buffers,
            copies_frames: rng.one_in(4),
            ring_entries: ring_entries.max(1),
            submissions: rng.spread(2, 128) as usize,
            completions: rng.spread(4, 256) as usize,
            descriptors: if rng.one_in(5) { rng.range(1, 6) as usize } else { 1000 },
            socket_bytes: (
                rng.spread(if large { 8192 } else { 64 }, if large { 32_768 } else { 8192 }) as usize,
                rng.spread(64, 8192) as usize,
            ),
            framing,
            peers,
            upstreams: if rng.one_in(3) { rng.range(1, peers as u64) as usize } else { 0 },
            frames_max: rng.spread(1, 60) as usize,
            payload_max,
            gap_max: rng.spread(50_000, 40 * MS),
            defers: rng.one_in(2),
            coalesce: Duration::from_nanos(if coalesces { coalescing.spread(1000, MS) } else { 0 }),
            late_max: rng.spread(MS, 200 * MS),
            rates: Rates::draw(rng),
            unusual: match rng.below(5) {
                0 => 0,
                // Several calls wait at once only if many do.
                1 | 2 if limits.calls_in_flight_max > 1 => rng.spread(8192, 32_000) as u16,
                _ => rng.spread(256, 20_000) as u16,
            },
            dawdles,
            odd_peers: rng.below(7),
            holds: if held || rng.one_in(3) { rng.spread(2048, 32_768) as u16 } else { 0 },
            encode_panics: if rng.one_in(4) { rng.spread(16, 1024) as u16 } else { 0 },
            pushes: if rng.one_in(2) { rng.spread(256, 16_384) as u16 } else { 0 },
            crawlers: if slow { rng.range(1, 8) } else { 0 },
            clock_start: draw_clock(rng),
            quiet_times: if rng.one_in(2) { rng.spread(256, 16_384) as u16 } else { 0 },
            turns: if short || held { rng.spread(5, turns.max(6)) } else { turns },
            loses_completion: rng.one_in(4),
            open_waits,
            deadlines,
            abort_after: rng.one_in(3).then(|| rng.spread(0, 400 * MS)),
            budget: Budget {
                completions: if small_budget { rng.spread(1, 16) as usize } else { 256 },
                bytes: if rng.one_in(8) { rng.spread(64, 4096) as usize } else { 1 << 20 },
            },
            calls: rng.one_in(3).then(|| (rng.spread(1, 64) as u32, rng.range(1, 4) as u32)),
            check_every: rng.pick(&[4, 8, 16]),
            server_limits,
            limits,
            upstream_limits,
        }
    }
}

/// Draws the start of the shard's clock: zero, some time before a counter of its steps wraps or
/// takes one more bit, or anywhere. A step of connections' limits is 2^24 ns, one of handlers'
/// sleeps 2^20 ns; counters have 31, 32 or 64 bits.
fn draw_clock(rng: &mut Rng) -> u64 {
    let wrap = match rng.below(8) {
        0 | 1 => return 0,
        2 => return rng.spread(1, CLOCK_MAX),
        3 => 1 << 52,
        4 => 1 << 55,
        5 => rng.range(1, 100) << 56,
        _ => 1 << 56,
    };
    wrap - rng.spread(MS, 4000 * MS)
}

/// Draws sizes; no time limit is set.
fn draw_sizes(
    rng: &mut Rng,
    framing: AnyFraming,
    payload_max: usize,
    buffer_bytes: usize,
    buffers: usize,
    tight_memory: bool,
) -> (ServerLimits, Limits) {
    let frame_bytes_max = payload_max + framing.head() + 2 + rng.below(64) as usize;
    let outbox_bytes_high = rng.spread(64, 16_384) as usize;
    let outbox_bytes_max = outbox_bytes_high * rng.pick(&[1, 4, 64]);
    let inbox_bytes_high = rng.spread(16, 2048) as usize;
    let outbox_bytes_low = rng.below(outbox_bytes_high as u64 + 1) as usize;
    let needed = outbox_bytes_max.max(frame_bytes_max).max(inbox_bytes_high);
    let server = ServerLimits::default()
        .connections_max(1 << 20)
        .held_bytes_max(if tight_memory { needed.max(rng.pick(&[1, 8192, 16_384])) } else { 1 << 30 })
        .receive_bytes_max(buffers * buffer_bytes)
        .receive_buffer_bytes(buffer_bytes);
    let limits = Limits::default()
        .frame_bytes_max(frame_bytes_max)
        .outbox_bytes_high(outbox_bytes_high)
        .outbox_bytes_low(outbox_bytes_low)
        .outbox_bytes_max(outbox_bytes_max)
        .inbox_bytes_high(inbox_bytes_high)
        .calls_in_flight_max(if rng.one_in(3) { 1 } else { rng.range(2, 4) as u16 });
    (server, limits)
}

/// Draws times. A `slow` seed gives half received frames the time over which their limit is
/// measured.
fn draw_times(rng: &mut Rng, slow: bool, (server, sizes): (ServerLimits, Limits)) -> (ServerLimits, Limits) {
    let time = |rng: &mut Rng, low: u64, high: u64| Duration::from_nanos(rng.spread(low * MS, high * MS));
    let maybe = |rng: &mut Rng, low, high| rng.below(3).min(1).eq(&1).then(|| time(rng, low, high));
    let longest = if slow { 40_000 } else { 4000 };
    let idle = maybe(rng, if slow { 4000 } else { 60 }, longest);
    let heartbeat = rng.one_in(3).then(|| time(rng, 20, 1500));
    let limits = sizes
        .first_frame_timeout(if slow { maybe(rng, 4000, longest) } else { maybe(rng, 60, 2000) })
        .idle_timeout(idle)
        // From a copy, so that other draws of a seed stay the same.
        .idle_counts(match rng.clone().below(6) {
            0 | 1 => IdleActivity::Received,
            2 => IdleActivity::Sent,
            _ => IdleActivity::Either,
        })
        .write_stall_timeout(if slow && rng.one_in(2) {
            maybe(rng, 40, 25_000)
        } else {
            maybe(rng, 40, 1000)
        })
        .write_bytes_per_second_min(match rng.below(4) {
            0 | 1 => 0,
            2 => 240,
            _ => rng.spread(500, 100_000) as usize,
        })
        .read_bytes_per_second_min(match slow {
            true => rng.spread(20, 400) as usize,
            false => rng.pick(&[0, 1, 240]),
        });
    // Half of them are shorter than a handshake may take.
    let soon = rng.one_in(2).then(|| time(rng, 20, 120));
    let server = server.connect_timeout(soon.or(maybe(rng, 40, 1000)));
    let limits = limits
        .handler_timeout(rng.one_in(2).then(|| time(rng, 20, if slow { 15_000 } else { 1000 })))
        .heartbeat_interval(heartbeat.map(|heartbeat| heartbeat.min(idle.unwrap_or(heartbeat))))
        .heartbeats_missed_max(rng.range(1, 3) as u8);
    let server = server.drain_timeout(time(rng, 40, 2000)).drain_delay(if rng.one_in(4) {
        time(rng, 1, 500)
    } else {
        Duration::ZERO
    });
    let spread = match rng.below(3) {
        0 => None,
        1 => Some(Duration::ZERO),
        _ => Some(time(rng, 1, 2000).min(server.drain_timeout)),
    };
    let server = server.drain_spread(spread);
    (server, limits.linger_timeout(time(rng, 20, 300)))
}

/// Draws the rate limits of accepted peers: rarely a limit, of frames, bytes or both.
fn draw_paces(rng: &mut Rng, limits: Limits) -> Limits {
    if !rng.one_in(6) {
        return limits;
    }
    let which = rng.below(3);
    let least = limits.read_bytes_per_second_min.max(64) as u64;
    limits
        .read_frames_per_second_max(if which != 1 { rng.spread(4, 4000) as u32 } else { 0 })
        .read_bytes_per_second_max(if which != 0 {
            rng.spread(least, 1_000_000.max(least)) as usize
        } else {
            0
        })
        .when_read_too_fast(if rng.one_in(4) { ReadRateAction::Close } else { ReadRateAction::HoldBack })
}

/// Draws the limits of connections to upstreams: in every third seed those of accepted ones, else
/// with other times and numbers of calls.
fn draw_upstreams(rng: &mut Rng, limits: &Limits) -> Limits {
    if rng.one_in(3) {
        return limits.clone();
    }
    let other = |limit: Option<Duration>, ends: bool, else_after: Duration| match limit {
        Some(_) if ends => None,
        Some(limit) => Some(2 * limit),
        None => Some(else_after),
    };
    // An idle time is no shorter than the time before a heartbeat, nor than half a frame may take
    // if that is long.
    let idle = Duration::from_millis(4000).max(limits.heartbeat_interval.unwrap_or_default());
    limits
        .clone()
        .idle_timeout(other(limits.idle_timeout, rng.one_in(2), idle))
        .first_frame_timeout(other(limits.first_frame_timeout, rng.one_in(2), idle))
        .calls_in_flight_max(if limits.calls_in_flight_max == 1 { 2 } else { 1 })
}
