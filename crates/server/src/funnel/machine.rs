//! The stages that are the machine's: handshakes in the kernel, and what is below all of a server.

use std::time::Duration;

use ringserve_report::{Stage, StageName, State};

use super::{Figure, FunnelFigures, MachineFigures, STARVED, Seen, calm, millis, seconds};

/// The share of time that a control group may take from a process before it is the cause of what
/// peers feel.
const THROTTLED: f64 = 0.1;

/// The share from which on it is worth a sentence.
const SOMETIMES_THROTTLED: f64 = 0.005;

pub(super) fn syn_queue(seen: &Seen<'_>) -> Stage {
    let dropped = seen.grew(|now| now.machine.handshakes_dropped);
    let cookies = seen.grew(|now| now.machine.cookies);
    let stage = Stage {
        lost_total: seen.now.machine.handshakes_dropped,
        lost_recently: dropped,
        ..calm(StageName::SynQueue, "handshakes")
    };
    if dropped > 0 {
        let why = format!(
            "{dropped} first packets were dropped {}, since the queue of handshakes was full and \
             net.ipv4.tcp_syncookies is 0: sysctl -w net.ipv4.tcp_syncookies=1, or raise \
             net.ipv4.tcp_max_syn_backlog",
            seen.recently()
        );
        return Stage { state: State::Lost, why, ..stage };
    }
    if cookies > 0 {
        let why = format!(
            "{cookies} handshakes were made by cookies {}, without options of TCP, since their queue was full: a \
             flood, or raise the backlog and net.ipv4.tcp_max_syn_backlog",
            seen.recently()
        );
        return Stage { state: State::Warn, why, ..stage };
    }
    stage
}

/// The time for which the control group kept the process from running, as a share.
fn throttled(seen: &Seen<'_>) -> f64 {
    let time = |figures: &FunnelFigures| figures.machine.throttled;
    let time = time(seen.now).saturating_sub(time(seen.before));
    // Of a process with several threads it is the sum of all, of which one is enough to be felt.
    time.as_secs_f64() / seen.window().as_secs_f64().max(0.001)
}

pub(super) fn is_throttled(seen: &Seen<'_>) -> bool {
    throttled(seen) >= THROTTLED
}

pub(super) fn machine(seen: &Seen<'_>) -> Stage {
    let MachineFigures { descriptors, descriptors_max, conntrack_drops, softnet_drops, device_drops, .. } =
        seen.now.machine;
    let stage = Stage {
        now: descriptors,
        capacity: descriptors_max,
        lost_total: conntrack_drops + softnet_drops.min(device_drops),
        lost_recently: seen.grew(|now| now.machine.conntrack_drops) + packets_dropped(seen),
        ..calm(StageName::Machine, "descriptors")
    };
    // The first of the worst.
    let found = [conntrack(seen), quota(seen), memory(seen), starved(seen), packets(seen), files(seen)];
    let found = found.into_iter().flatten().min_by_key(|(state, ..)| *state != State::Lost);
    match found {
        Some((state, why, figure)) => figure.on(Stage { state, why, ..stage }),
        None => stage,
    }
}

/// With the figure that the sentence is about.
type Found = Option<(State, String, Figure)>;

fn conntrack(seen: &Seen<'_>) -> Found {
    let dropped = seen.grew(|now| now.machine.conntrack_drops);
    let (count, max) = seen.now.machine.conntrack.unwrap_or_default();
    let figure = Figure { now: count, capacity: Some(max), unit: "tracked" };
    let fix = format!(
        "sysctl -w net.netfilter.nf_conntrack_max={}, or a NOTRACK rule for the port",
        max.max(count).max(1) * 2
    );
    if dropped > 0 || (max > 0 && count * 100 >= max * 95) {
        let drops = match dropped {
            0 => "drops packets of others beyond".to_owned(),
            _ => format!("dropped {dropped} packets {}", seen.recently()),
        };
        let why = format!("the kernel tracks {count} connections of {max} (nf_conntrack) and {drops}: {fix}");
        return Some((State::Lost, why, figure));
    }
    let is_near = max > 0 && count * 100 >= max * 80;
    is_near.then(|| {
        (
            State::Warn,
            format!("the kernel tracks {count} connections of {max}, and drops packets beyond: {fix}"),
            figure,
        )
    })
}

fn quota(seen: &Seen<'_>) -> Found {
    let share = throttled(seen);
    if share < SOMETIMES_THROTTLED {
        return None;
    }
    let cpus = seen.now.machine.quota.map_or_else(String::new, |cpus| format!(" of {cpus:.2} CPUs"));
    let time = Duration::from_secs_f64(share * seen.window().as_secs_f64());
    let fewer = if seen.now.shards.len() > 1 { ", or run fewer shards" } else { "" };
    let why = format!(
        "the control group's quota{cpus} kept threads from running for {} {}: raise cpu.max{fewer}",
        seconds(time),
        seen.recently()
    );
    let figure = Figure { now: millis(time), capacity: Some(millis(seen.window())), unit: "ms held back" };
    Some((if share >= THROTTLED { State::Lost } else { State::Warn }, why, figure))
}

fn memory(seen: &Seen<'_>) -> Found {
    let (used, pressure) = seen.now.machine.tcp_bytes?;
    let is = |share: u64| pressure > 0 && used * 100 >= pressure * share;
    let figure = Figure { now: used, capacity: Some(pressure), unit: "bytes" };
    let fix = "raise net.ipv4.tcp_mem, or bound the buffers of sockets (TCP_NOTSENT_LOWAT, SocketOptions)";
    if is(100) {
        let why =
            format!("sockets of TCP hold {used} bytes, and from {pressure} on the kernel prunes them: {fix}");
        return Some((State::Lost, why, figure));
    }
    is(70).then(|| {
        (
            State::Warn,
            format!(
                "sockets of TCP hold {used} bytes of {pressure}, from which on the kernel prunes them: {fix}"
            ),
            figure,
        )
    })
}

fn starved(seen: &Seen<'_>) -> Found {
    let shards = (0..).zip(&seen.now.shards).map(|(number, shard)| (number, shard.robbed()));
    let (number, share): (usize, f64) = shards.max_by(|(_, one), (_, other)| one.total_cmp(other))?;
    if share < STARVED {
        return None;
    }
    let why = format!(
        "shard {number} could have run for {:.0} % of the last second, and others had its CPU: stop or move them, or \
         give the shards CPUs to themselves (Server::pin)",
        share * 100.0
    );
    let figure = Figure { now: (share * 100.0) as u64, capacity: Some(100), unit: "% starved" };
    Some((if share >= 2.0 * STARVED { State::Lost } else { State::Warn }, why, figure))
}

/// Packets of this namespace that were dropped before they came to a socket. The queues of CPUs are
/// those of all namespaces, and each drop there is counted at its device too, which is one
/// namespace's; but devices drop for other reasons as well.
fn packets_dropped(seen: &Seen<'_>) -> u64 {
    seen.grew(|now| now.machine.softnet_drops).min(seen.grew(|now| now.machine.device_drops))
}

fn packets(seen: &Seen<'_>) -> Found {
    let dropped = packets_dropped(seen);
    let why = || {
        format!(
            "{dropped} packets were dropped before they came to a socket {}: raise net.core.netdev_max_backlog, or \
             spread interrupts over the CPUs",
            seen.recently()
        )
    };
    (dropped > 0)
        .then(|| (State::Warn, why(), Figure { now: dropped, capacity: None, unit: "packets dropped" }))
}

fn files(seen: &Seen<'_>) -> Found {
    let MachineFigures { descriptors, descriptors_max, .. } = seen.now.machine;
    let max = descriptors_max.filter(|max| descriptors * 10 >= max * 9)?;
    let why = format!(
        "{descriptors} of {max} descriptors are open: raise RLIMIT_NOFILE (ulimit -n, LimitNOFILE= in systemd)"
    );
    Some((State::Warn, why, Figure { now: descriptors, capacity: Some(max), unit: "descriptors" }))
}
