//! The input of the funnel: figures of one moment, as plain numbers.

use ringserve_base::machine::MachineStats;
use std::time::Duration;

use crate::stats::StallCause;

/// Figures of a server at one moment. Those that are called totals never fall.
#[derive(Clone, Debug, Default)]
pub(crate) struct FunnelFigures {
    /// When, on the server's clock.
    pub(crate) at: Duration,
    pub(crate) connections: u64,
    /// The most that there may be, after descriptors were counted.
    pub(crate) connections_max: u64,
    /// The most that the program's limit allows.
    pub(crate) connections_wanted: u64,
    /// Connections that were accepted and wait for a place.
    pub(crate) newcomers: u64,
    /// Connections that found the table full, in total.
    pub(crate) waited: u64,
    /// Times that accepting stopped at a limit, in total.
    pub(crate) accept_paused: u64,
    /// Connections that were opened, in total.
    pub(crate) opened: u64,
    /// In an order that stays.
    pub(crate) queues: Vec<QueueFigures>,
    pub(crate) shards: Vec<ShardFigures>,
    pub(crate) closed: ClosedFigures,
    /// Receive buffers with bytes that are not taken yet, of all shards.
    pub(crate) buffers: u64,
    /// The most that there may be.
    pub(crate) buffers_max: u64,
    /// Some shard has all that it may have.
    pub(crate) buffers_full: bool,
    /// Times that a receive found no buffer, in total.
    pub(crate) receives_parked: u64,
    /// Calls that wait, as far as shards were asked for them.
    pub(crate) waiting: WaitingFigures,
    /// Outboxes, as far as shards were asked for them.
    pub(crate) outboxes: OutboxFigures,
    pub(crate) machine: MachineFigures,
}

/// One accept queue.
#[derive(Clone, Debug, Default)]
pub(crate) struct QueueFigures {
    pub(crate) listener: String,
    /// `None` if all shards accept from it.
    pub(crate) shard: Option<usize>,
    pub(crate) waiting: u64,
    pub(crate) capacity: u64,
    /// Packets that were dropped, in total.
    pub(crate) lost: u64,
}

/// One shard.
#[derive(Clone, Debug, Default)]
pub(crate) struct ShardFigures {
    /// The share of the last second for which it ran.
    pub(crate) busy: f64,
    /// The share for which it could have run, and had no CPU: a quota was used up, or others had
    /// it.
    pub(crate) starved: f64,
    /// The part of `starved` that is the quota's: [`FunnelFigures::share_throttling`].
    pub(crate) throttled: f64,
    /// The stall that lasts, or the last one that ended within the window.
    pub(crate) stall: Option<StallFigures>,
}

impl ShardFigures {
    /// The share for which it could have run, and others had the CPU.
    pub(crate) fn robbed(&self) -> f64 {
        (self.starved - self.throttled).max(0.0)
    }
}

impl FunnelFigures {
    /// Finds the quota's part of what shards waited for a CPU, from what the control group was held
    /// back since `before`, about the time of which the shares are. The group counts a sum over all
    /// CPUs, of which each shard has the part that it has of all waiting, and no more than it
    /// waited.
    pub(crate) fn share_throttling(&mut self, before: &FunnelFigures) {
        let window = self.at.saturating_sub(before.at).as_secs_f64();
        let held_back = self.machine.throttled.saturating_sub(before.machine.throttled).as_secs_f64();
        let starved: f64 = self.shards.iter().map(|shard| shard.starved).sum();
        if window <= 0.0 || starved <= 0.0 {
            return;
        }
        let part = (held_back / window / starved).min(1.0);
        self.shards.iter_mut().for_each(|shard| shard.throttled = shard.starved * part);
    }
}

/// A shard that did not go on.
#[derive(Clone, Debug)]
pub(crate) struct StallFigures {
    pub(crate) ongoing: bool,
    pub(crate) lasted: Duration,
    pub(crate) cause: StallCause,
    /// Its work, as text: `a call for 10.1.2.3:5511`.
    pub(crate) work: String,
    /// The function of the kernel in which its thread waits.
    pub(crate) waits_in: Option<String>,
}

/// Connections that ended, in total.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClosedFigures {
    /// No first frame, no handshake or no PROXY header came in time.
    pub(crate) first_frame: u64,
    /// A call took longer than its limit.
    pub(crate) handler_timeout: u64,
    pub(crate) panicked: u64,
    /// The service queued more than `outbox_bytes_max`.
    pub(crate) outbox_full: u64,
    /// The shard held more than `held_bytes_max`.
    pub(crate) memory: u64,
    /// The peer did not read, or too slowly.
    pub(crate) peer: u64,
}

/// Calls that wait.
#[derive(Clone, Debug, Default)]
pub(crate) struct WaitingFigures {
    pub(crate) calls: u64,
    /// The time that the oldest has waited.
    pub(crate) oldest: Duration,
    /// The peer of the oldest.
    pub(crate) peer: String,
    /// More of that peer's bytes wait than are received for it.
    pub(crate) paused: bool,
    /// The limit of calls for each connection of its service.
    pub(crate) in_flight_max: u64,
    /// The limit of its service.
    pub(crate) timeout: Option<Duration>,
}

/// Outboxes.
#[derive(Clone, Debug, Default)]
pub(crate) struct OutboxFigures {
    /// Bytes in all of them.
    pub(crate) bytes: u64,
    /// Connections whose frames are held back, since their peers do not read.
    pub(crate) held_back: u64,
    /// The largest of them.
    pub(crate) largest: u64,
    /// The limit of its service.
    pub(crate) largest_max: u64,
    /// Its peer.
    pub(crate) peer: String,
    /// The time for which that peer has been silent.
    pub(crate) idle: Duration,
    /// The limit of its service.
    pub(crate) stall_timeout: Option<Duration>,
}

/// The machine. `None` for what it does not tell.
#[derive(Clone, Debug, Default)]
pub(crate) struct MachineFigures {
    pub(crate) descriptors: u64,
    pub(crate) descriptors_max: Option<u64>,
    /// Connections that the kernel tracks, and the most that it tracks.
    pub(crate) conntrack: Option<(u64, u64)>,
    /// Packets that it dropped since its table was full, in total.
    pub(crate) conntrack_drops: u64,
    /// Time for which the control group kept the process from running, in total.
    pub(crate) throttled: Duration,
    /// CPUs that the control group allows.
    pub(crate) quota: Option<f64>,
    /// First packets that were dropped as the queue of handshakes was full, in total.
    pub(crate) handshakes_dropped: u64,
    /// Handshakes that were made by cookies, since the queue was full, in total.
    pub(crate) cookies: u64,
    /// Bytes of memory that TCP holds, and those from which on the kernel presses it to hold less.
    pub(crate) tcp_bytes: Option<(u64, u64)>,
    /// Packets of the whole machine dropped before they came to a socket, in total.
    pub(crate) softnet_drops: u64,
    /// Packets dropped at devices of this network namespace, in total.
    pub(crate) device_drops: u64,
}

impl MachineFigures {
    /// The machine's figures of now.
    pub(crate) fn of(host: &MachineStats) -> MachineFigures {
        MachineFigures {
            descriptors: host.descriptors.map_or(0, |used| used.now),
            descriptors_max: host.descriptors.map(|used| used.max),
            conntrack: host.conntrack.map(|tracked| (tracked.now, tracked.max)),
            conntrack_drops: host.conntrack_drops,
            throttled: host.throttling.map_or(Duration::ZERO, |of| of.throttled_time),
            quota: host.throttling.map(|of| of.quota_cpus),
            handshakes_dropped: host.handshakes_dropped,
            cookies: host.syn_cookies_sent,
            tcp_bytes: host.tcp_memory.map(|memory| (memory.now, memory.pressure)),
            softnet_drops: host.packets_dropped,
            device_drops: host.device_drops,
        }
    }

    /// With what was counted since then: the machine counts since its own start.
    pub(crate) fn since(self, before: &MachineFigures) -> MachineFigures {
        MachineFigures {
            conntrack_drops: self.conntrack_drops.saturating_sub(before.conntrack_drops),
            handshakes_dropped: self.handshakes_dropped.saturating_sub(before.handshakes_dropped),
            cookies: self.cookies.saturating_sub(before.cookies),
            softnet_drops: self.softnet_drops.saturating_sub(before.softnet_drops),
            device_drops: self.device_drops.saturating_sub(before.device_drops),
            ..self
        }
    }
}
