//! Memory: of the process, of sockets, and of sockets that outlive their process.

use super::case::{Case, Texts, percent, size};
use super::{Certainty, Finding, Severity};
use crate::memory::usable_memory_of;

/// Memory of the process for an idle connection, as `ringserve-bench idle` measured it on io_uring:
/// the figure of docs/PERFORMANCE.md, and of whatever else names one.
pub const CONNECTION_BYTES: u64 = 251;

/// Memory of the kernel for an idle connection: its socket, without received or unsent bytes.
const SOCKET_BYTES: u64 = 3800;

/// Memory of a send buffer in addition to its unsent bytes: a reader that stalled held 142 KiB
/// where 16 KiB of them were allowed.
const IN_FLIGHT_BYTES: u64 = 126 << 10;

/// Above this part of the mark for pressure the kernel is about to press.
const PRESSURE_MAX: f64 = 0.7;

/// The memory that sockets hold, against the marks of the kernel.
pub(super) fn tcp_memory(case: &Case<'_>, found: &mut Vec<Finding>) {
    let Some(memory) = &case.host.tcp_memory else { return };
    if (memory.now as f64) < memory.pressure as f64 * PRESSURE_MAX {
        return;
    }
    let share = percent(memory.now as f64 / memory.pressure.max(1) as f64);
    let (pressure, now) = (size(memory.pressure), size(memory.now));
    let pages = memory.now / 4096 * 2;
    let texts = Texts {
        what: "memory of TCP sockets".into(),
        value: format!("{now}, {share} of the mark for pressure"),
        needed: format!("less than {} of {pressure} (net.ipv4.tcp_mem)", percent(PRESSURE_MAX)),
        otherwise: "the kernel prunes received bytes, shrinks windows and aborts connections".into(),
        fix: format!(
            "find the peers that do not read (`ringserve-ctl connections --by outbox`); if the load is right, `sysctl -w \
             net.ipv4.tcp_mem=\"{pages} {} {}\"`",
            pages + pages / 3,
            pages * 2
        ),
    };
    found.push(texts.of("tcp_memory", Severity::Error, Certainty::Seen));
}

/// The size to which send buffers may grow, if no peer reads.
pub(super) fn socket_memory(case: &Case<'_>, found: &mut Vec<Finding>) {
    let Some(connections) = case.connections() else { return };
    let Some(usable) = usable_memory_of(case.machine) else { return };
    let autotuned = case.machine.numbers("/proc/sys/net/ipv4/tcp_wmem").get(2).copied();
    let bound = case.setup.unsent_bytes_max.map(|bytes| bytes + IN_FLIGHT_BYTES);
    let (each, rule, is_bounded) = match (bound, autotuned) {
        (Some(bound), Some(autotuned)) if autotuned < bound => (autotuned, "net.ipv4.tcp_wmem", true),
        (Some(bound), _) => (bound, "SocketOptions::not_sent_bytes_max and what is on its way", true),
        (None, Some(autotuned)) => (autotuned, "net.ipv4.tcp_wmem", false),
        (None, None) => return,
    };
    let most = connections.saturating_mul(each);
    if most <= usable.bytes {
        return;
    }
    let texts = Texts {
        what: "memory of send buffers, if no peer reads,".into(),
        value: format!("up to {}", size(most)),
        needed: format!("{} connections × {} ({rule}) within {usable}", connections, size(each)),
        otherwise: "peers that do not read fill the kernel's memory up to net.ipv4.tcp_mem, and it presses the connections of \
                    all others"
            .into(),
        fix: match is_bounded {
            true => "nothing, if few peers stall at once; else a lower SocketOptions::not_sent_bytes_max".into(),
            false => "SocketOptions::not_sent_bytes_max(128 << 10), which is the default".into(),
        },
    };
    // With its own bound the server has done what it can.
    let severity = if is_bounded { Severity::Info } else { Severity::Warn };
    found.push(texts.of("socket_memory", severity, Certainty::Computed));
}

/// Whether idle connections fit.
pub(super) fn memory(case: &Case<'_>, found: &mut Vec<Finding>) {
    let Some(connections) = case.connections() else { return };
    let Some(usable) = usable_memory_of(case.machine) else { return };
    // Those that are there have their memory already.
    let more = connections.saturating_sub(case.lived.as_ref().map_or(0, |lived| lived.connections));
    let session = case.expected.session_bytes;
    let each = CONNECTION_BYTES + SOCKET_BYTES + session;
    let needed = more.saturating_mul(each).saturating_mul(6) / 5;
    if needed <= usable.bytes {
        return;
    }
    let texts = Texts {
        what: "memory".into(),
        value: usable.to_string(),
        needed: format!(
            "{} = {more} connections × ({CONNECTION_BYTES} + session {session} + socket {SOCKET_BYTES} bytes) × 1.2",
            size(needed)
        ),
        otherwise: "the kernel kills the process, or its control group reclaims memory at each accept".into(),
        fix: format!(
            "memory.max of at least {}, or ServerLimits::connections_max({})",
            size(needed),
            usable.bytes / each * 5 / 6
        ),
    };
    found.push(texts.of("memory", Severity::Error, Certainty::Estimated));
}

/// Sockets without a process, after a drain that closes all connections.
pub(super) fn orphans(case: &Case<'_>, found: &mut Vec<Finding>) {
    let (Some(connections), Some(orphans)) = (case.connections(), &case.host.orphans) else { return };
    if orphans.now.saturating_add(connections) <= orphans.max {
        return;
    }
    let texts = Texts {
        what: "net.ipv4.tcp_max_orphans".into(),
        value: format!("{}, of which {} are taken", orphans.max, orphans.now),
        needed: format!("{} = {connections} connections that a drain closes at once + {}", orphans.now.saturating_add(connections), orphans.now),
        otherwise: "the kernel resets the connections beyond it at a drain, with replies that their peers did not receive yet".into(),
        fix: format!("`sysctl -w net.ipv4.tcp_max_orphans={}`", power_of_two(orphans.now.saturating_add(connections))),
    };
    found.push(texts.of("orphans", Severity::Warn, Certainty::Computed));
}

/// Sockets in TIME_WAIT, where the server closes first.
pub(super) fn time_wait(case: &Case<'_>, found: &mut Vec<Finding>) {
    let (Some(connections), Some(waiting)) = (case.connections(), &case.host.time_wait) else { return };
    if waiting.now.saturating_add(connections) <= waiting.max {
        return;
    }
    let texts = Texts {
        what: "net.ipv4.tcp_max_tw_buckets".into(),
        value: format!("{}, of which {} are taken", waiting.max, waiting.now),
        needed: format!("{} = {connections} connections that a drain closes at once + {}", waiting.now.saturating_add(connections), waiting.now),
        otherwise: "connections beyond it have no TIME_WAIT, so a late packet of theirs is answered by a reset, which harms few \
                    peers"
            .into(),
        fix: format!("`sysctl -w net.ipv4.tcp_max_tw_buckets={}`", power_of_two(waiting.now.saturating_add(connections))),
    };
    found.push(texts.of("time_wait", Severity::Info, Certainty::Computed));
}

fn power_of_two(count: u64) -> u64 {
    count.checked_next_power_of_two().unwrap_or(count)
}
