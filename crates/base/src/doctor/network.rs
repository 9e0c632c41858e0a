//! The network below the server: queues of new connections, connection tracking, packets, ports.

use std::time::Duration;

use super::case::{Case, Texts, percent};
use super::{Certainty, Finding, Severity};
use crate::machine::files::MachineFiles;

/// A stall that any server may have: a handler that computes, a scheduler that is busy.
const STALL: Duration = Duration::from_millis(100);

/// Above this part of its table connection tracking is about to drop.
const TRACKED_MAX: f64 = 0.8;

/// Above this an uneven spread is worth a word; chance alone makes 1.06 of a thousand connections.
const SKEW_MAX: f64 = 1.5;

/// With fewer connections the spread is chance.
const SKEW_FROM: u64 = 1000;

/// The kernel's queue of connections that are not accepted yet.
pub(super) fn accept_queue(case: &Case<'_>, found: &mut Vec<Finding>) {
    let somaxconn = case.machine.sysctl("net.core.somaxconn").unwrap_or(u64::MAX);
    let backlog = u64::from(case.setup.backlog);
    let capacity = backlog.min(somaxconn);
    let raise = |needed: u64| {
        let sysctl = (somaxconn < needed).then(|| format!("`sysctl -w net.core.somaxconn={needed}`"));
        let option = (backlog < needed).then(|| format!("SocketOptions::backlog({needed})"));
        let both: Vec<String> = sysctl.into_iter().chain(option).collect();
        both.join(" and ")
    };
    if let Some(lived) = case.lived.as_ref().filter(|lived| lived.queue_lost > 0) {
        let texts = Texts {
            what: "the accept queue".into(),
            value: format!(
                "{capacity} long, and lost {} packets since the start ({})",
                lived.queue_lost, lived.queue_worst
            ),
            needed: "no loss: accepts per second / shards × longest stall".into(),
            otherwise: "a peer whose first packet is lost waits a second before it repeats it".into(),
            fix: format!("end the stalls (`ringserve-ctl stalls`), or {}", raise(capacity.max(1) * 2)),
        };
        return found.push(texts.of("accept_queue", Severity::Warn, Certainty::Seen));
    }
    let Some(accepts) = case.expected.accepts_per_second else { return };
    let seen = case.lived.as_ref().and_then(|lived| lived.longest_stall);
    let stall = case.expected.longest_stall.or(seen).unwrap_or(STALL);
    let queues = if case.setup.one_queue { 1 } else { case.shards() };
    let needed = (accepts as f64 / queues as f64 * stall.as_secs_f64()).ceil() as u64;
    if needed <= capacity {
        return;
    }
    let of = if somaxconn < backlog { "net.core.somaxconn" } else { "SocketOptions::backlog" };
    let texts = Texts {
        what: "the accept queue of a shard".into(),
        value: format!("{capacity} ({of})"),
        needed: format!("{needed} = {accepts} accepts per second / {queues} queues × {stall:?} of the longest stall"),
        otherwise: "the kernel drops first packets while a shard is busy, and their peers wait a second before they repeat them"
            .into(),
        fix: raise(needed),
    };
    found.push(texts.of("accept_queue", Severity::Warn, Certainty::Computed));
}

/// Handshakes that are not over yet.
pub(super) fn syn_backlog(case: &Case<'_>, found: &mut Vec<Finding>) {
    let cookies = case.machine.sysctl("net.ipv4.tcp_syncookies");
    if let Some(sent) = case.growth(|host| host.syn_cookies_sent).filter(|sent| *sent > 0) {
        let texts = Texts {
            what: "the queue of handshakes".into(),
            value: format!("full: {sent} SYN cookies were sent since the last look"),
            needed: "none: first packets per second × round trip of a peer".into(),
            otherwise: "connections made by cookies may lose window scaling and selective acknowledgements, and a flood looks \
                        the same"
                .into(),
            fix: "a larger SocketOptions::backlog and net.core.somaxconn, which bound this queue too; a filter, if it is a flood"
                .into(),
        };
        return found.push(texts.of("syn_backlog", Severity::Warn, Certainty::Seen));
    }
    let Some(accepts) = case.expected.accepts_per_second else { return };
    let Some(backlog) = case.machine.sysctl("net.ipv4.tcp_max_syn_backlog") else { return };
    let trip = case.expected.round_trip;
    let needed = (accepts as f64 * trip.as_secs_f64()).ceil() as u64;
    let has_cookies = cookies != Some(0);
    // Without cookies the kernel drops from three quarters on.
    let room = if has_cookies { backlog } else { backlog - backlog / 4 };
    if needed <= room {
        return;
    }
    let otherwise = match has_cookies {
        true => {
            "the kernel answers by SYN cookies, and such connections may lose window scaling: options, and no peers"
        }
        false => {
            "the kernel drops first packets (net.ipv4.tcp_syncookies is 0), and their peers wait a second"
        }
    };
    let texts = Texts {
        what: "net.ipv4.tcp_max_syn_backlog".into(),
        value: backlog.to_string(),
        needed: format!("{needed} = {accepts} accepts per second × {trip:?} of a round trip"),
        otherwise: otherwise.into(),
        fix: format!(
            "`sysctl -w net.ipv4.tcp_max_syn_backlog={}`",
            (needed + needed / 3).next_power_of_two()
        ),
    };
    let severity = if has_cookies { Severity::Info } else { Severity::Warn };
    found.push(texts.of("syn_backlog", severity, Certainty::Computed));
}

/// The table of the firewall.
pub(super) fn conntrack(case: &Case<'_>, found: &mut Vec<Finding>) {
    let Some(tracked) = &case.host.conntrack else { return };
    let not_tracked = "or do not track the port: `nft add rule ip raw prerouting tcp dport PORT notrack`, and its answers in output";
    let otherwise = "the kernel drops packets of new connections, and neither side hears of it";
    if tracked.share() > TRACKED_MAX {
        let texts = Texts {
            what: "net.netfilter.nf_conntrack_max".into(),
            value: format!(
                "{}, of which {} are used ({})",
                tracked.max,
                tracked.now,
                percent(tracked.share())
            ),
            needed: format!(
                "{} = {} tracked now / {}",
                tracked.now.saturating_mul(5) / 4,
                tracked.now,
                percent(TRACKED_MAX)
            ),
            otherwise: otherwise.into(),
            fix: format!(
                "`sysctl -w net.netfilter.nf_conntrack_max={}`, {not_tracked}",
                tracked.now.saturating_mul(2)
            ),
        };
        return found.push(texts.of("conntrack", Severity::Error, Certainty::Seen));
    }
    let Some(connections) = case.connections() else { return };
    let needed = connections.saturating_mul(6) / 5;
    if needed <= tracked.max {
        return;
    }
    // The module may be there without a rule that has it track.
    let is_tracking = tracked.now > 0;
    let texts = Texts {
        what: "net.netfilter.nf_conntrack_max".into(),
        value: match is_tracking {
            true => format!("{}, with {} connections tracked now", tracked.max, tracked.now),
            false => format!("{}, and no connection is tracked now", tracked.max),
        },
        needed: format!("{needed} = {connections} connections × 1.2"),
        otherwise: match is_tracking {
            true => otherwise.into(),
            false => format!("{otherwise}, once a rule of the firewall asks for tracking"),
        },
        fix: format!("`sysctl -w net.netfilter.nf_conntrack_max={needed}`, {not_tracked}"),
    };
    let severity = if is_tracking { Severity::Error } else { Severity::Warn };
    found.push(texts.of("conntrack", severity, Certainty::Computed));
}

/// Handshakes at the end of one of two servers on a port.
pub(super) fn migrate(case: &Case<'_>, found: &mut Vec<Finding>) {
    if !case.setup.share_port || migrates(case.machine) {
        return;
    }
    // It is there from Linux 5.14 on.
    let migrates = case.machine.sysctl("net.ipv4.tcp_migrate_req");
    let texts = Texts {
        what: "net.ipv4.tcp_migrate_req".into(),
        value: migrates.map_or("not there".to_owned(), |value| value.to_string()),
        needed: "1, since the port is shared (Server::share_port)".into(),
        otherwise: "a connection whose handshake takes longer than a shutdown waits for it is reset: 50 of 3093 in four \
                    restarts"
            .into(),
        fix: match migrates {
            Some(_) => "`sysctl -w net.ipv4.tcp_migrate_req=1`".into(),
            None => "Linux 5.14".into(),
        },
    };
    found.push(texts.of("tcp_migrate_req", Severity::Warn, Certainty::Computed));
}

/// True if the kernel hands handshakes over to the other server on a port.
pub fn migrates(machine: &MachineFiles) -> bool {
    machine.sysctl("net.ipv4.tcp_migrate_req").is_some_and(|value| value != 0)
}

/// Packets that no socket saw. The queues of CPUs are those of the whole machine: a drop is this
/// server's affair if devices of its network namespace dropped some too.
pub(super) fn packets(case: &Case<'_>, found: &mut Vec<Finding>) {
    let backlog = case.machine.sysctl("net.core.netdev_max_backlog").unwrap_or(1000);
    let here = case.growth(|host| host.device_drops).unwrap_or(0);
    let dropped = case.growth(|host| host.packets_dropped).map(|dropped| dropped.min(here));
    let otherwise = "a dropped packet is repeated after 200 ms at least, and a first one after a second";
    if let Some(dropped) = dropped.filter(|dropped| *dropped > 0) {
        let texts = Texts {
            what: "net.core.netdev_max_backlog".into(),
            value: format!("{backlog}, and CPUs dropped {dropped} packets since the last look"),
            needed: "no growth of the second column of /proc/net/softnet_stat".into(),
            otherwise: otherwise.into(),
            fix: format!(
                "`sysctl -w net.core.netdev_max_backlog={}`, or spread packets over more CPUs (RSS, RPS)",
                backlog.saturating_mul(4)
            ),
        };
        return found.push(texts.of("packets", Severity::Warn, Certainty::Seen));
    }
    let squeezed = case.growth(|host| host.packets_squeezed);
    if let Some(squeezed) = squeezed.filter(|squeezed| *squeezed > 0) {
        let texts = Texts {
            what: "net.core.netdev_budget".into(),
            value: format!(
                "{}, and was used up {squeezed} times since the last look",
                case.machine.sysctl("net.core.netdev_budget").unwrap_or(300)
            ),
            needed: "no growth of the third column of /proc/net/softnet_stat".into(),
            otherwise: "packets wait for the next round, and the queue of the CPU fills".into(),
            fix: "spread packets over more CPUs (RSS, RPS), if the count of drops grows too".into(),
        };
        return found.push(texts.of("packets", Severity::Info, Certainty::Seen));
    }
    let since_boot = case.host.packets_dropped;
    if since_boot > 0 {
        let texts = Texts {
            what: "the count of packets that CPUs dropped".into(),
            value: format!("{since_boot} since the boot, and does not grow now"),
            needed: "no growth of the second column of /proc/net/softnet_stat".into(),
            otherwise: otherwise.into(),
            fix: "nothing while it rests; if it grows, `sysctl -w net.core.netdev_max_backlog=4000`".into(),
        };
        found.push(texts.of("packets", Severity::Info, Certainty::Seen));
    }
}

/// Receive queues of the network cards, where connections follow the CPU of their packets.
pub(super) fn receive_queues(case: &Case<'_>, found: &mut Vec<Finding>) {
    let shards = case.shards();
    if let Some(lived) = &case.lived
        && let Some(skew) = lived.skew.filter(|skew| *skew > SKEW_MAX && lived.opened >= SKEW_FROM)
    {
        let texts = Texts {
            what: "the spread of connections over shards".into(),
            value: format!(
                "uneven: the busiest shard got {skew:.1} times the mean of {} connections",
                lived.opened
            ),
            needed: format!("less than {SKEW_MAX}"),
            otherwise: "that shard is the bound of the server".into(),
            fix: match case.setup.incoming_cpu {
                true => "SocketOptions::incoming_cpu(false), or as many receive queues as shards".into(),
                false => {
                    "look for one peer address with most of the connections, or a balancer that keeps few"
                        .into()
                }
            },
        };
        found.push(texts.of("receive_queues", Severity::Info, Certainty::Seen));
    }
    if !case.setup.incoming_cpu || shards < 2 {
        return;
    }
    let queues_of = |card: &String| {
        let folder = format!("/sys/class/net/{card}/queues");
        let queues = case.machine.names(&folder).into_iter().filter(|name| name.starts_with("rx-"));
        // Packets of one queue may be spread by software.
        let spread = |queue: &String| {
            let mask = case.machine.text(&format!("{folder}/{queue}/rps_cpus")).unwrap_or_default();
            mask.chars().filter_map(|c| c.to_digit(16)).map(u32::count_ones).sum::<u32>().max(1)
        };
        queues.map(|queue| u64::from(spread(&queue))).sum::<u64>()
    };
    let cards = case.machine.names("/sys/class/net");
    let real = cards.iter().filter(|card| case.machine.has(&format!("/sys/class/net/{card}/device")));
    let Some((card, queues)) = real.map(|card| (card, queues_of(card))).max_by_key(|(_, queues)| *queues)
    else {
        return;
    };
    if queues >= shards {
        return;
    }
    let texts = Texts {
        what: format!("the number of CPUs that receive packets of {card}"),
        value: queues.to_string(),
        needed: format!("{shards}, one for each shard, since SocketOptions::incoming_cpu is on"),
        otherwise: "shards on the other CPUs get no connections".into(),
        fix: format!(
            "`ethtool -L {card} combined {shards}`, RPS (rps_cpus), or SocketOptions::incoming_cpu(false)"
        ),
    };
    found.push(texts.of("receive_queues", Severity::Info, Certainty::Computed));
}

/// Ports for connections that the server makes.
pub(super) fn local_ports(case: &Case<'_>, found: &mut Vec<Finding>) {
    let upstreams = case.expected.upstreams;
    let range = case.machine.numbers("/proc/sys/net/ipv4/ip_local_port_range");
    let (Some(first), Some(last)) = (range.first(), range.get(1)) else { return };
    let ports = last.saturating_add(1).saturating_sub(*first);
    if upstreams <= ports {
        return;
    }
    let reuse = case.machine.sysctl("net.ipv4.tcp_tw_reuse").unwrap_or(0);
    let waits = if reuse == 0 {
        ", and those in TIME_WAIT are not used again (net.ipv4.tcp_tw_reuse is 0)"
    } else {
        ""
    };
    let texts = Texts {
        what: "net.ipv4.ip_local_port_range".into(),
        value: format!("{first} to {last}, {ports} ports"),
        needed: format!("{upstreams} = connections to one address and port of another server{waits}"),
        otherwise: "a connect fails with EADDRNOTAVAIL".into(),
        fix: "`sysctl -w net.ipv4.ip_local_port_range=\"1024 65535\"`, or more addresses on either side (127.0.0.2 and so on in \
              tests)"
            .into(),
    };
    found.push(texts.of("local_ports", Severity::Warn, Certainty::Computed));
}

/// Peers that vanish without a word.
pub(super) fn keep_alive(case: &Case<'_>, found: &mut Vec<Finding>) {
    if case.setup.ends_silent {
        return;
    }
    let texts = Texts {
        what: "SocketOptions::keep_alive".into(),
        value: "off, as is Limits::idle_timeout".into(),
        needed: "either, so that connections of peers that vanished end".into(),
        otherwise: "they stay for ever, with their memory and their place among connections_max".into(),
        fix: "SocketOptions::keep_alive(KeepAlive::default()), which is the default, or an idle_timeout"
            .into(),
    };
    found.push(texts.of("keep_alive", Severity::Warn, Certainty::Computed));
}
