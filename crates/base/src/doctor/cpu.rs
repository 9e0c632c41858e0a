//! CPUs: the clock, quotas, other users of the same CPUs, and the distance of memory.

use super::case::{Case, Texts, percent};
use super::{Certainty, Finding, Severity};

/// Clock sources that need a device: each read of the time takes about a microsecond.
const SLOW_CLOCKS: &[&str] = &["acpi_pm", "hpet", "jiffies", "pit", "refined-jiffies"];

/// The share of periods in which a quota may be used up.
const THROTTLED_MAX: f64 = 0.01;

/// The share of CPU time that a hypervisor may take.
const STEAL_MAX: f64 = 0.05;

/// The share of time in which tasks may wait for a CPU.
const PRESSURE_MAX: f64 = 0.2;

/// The clock that each turn of a shard reads.
pub(super) fn clock(case: &Case<'_>, found: &mut Vec<Finding>) {
    let folder = "/sys/devices/system/clocksource/clocksource0";
    let Some(clock) = case.machine.text(&format!("{folder}/current_clocksource")) else { return };
    let clock = clock.trim();
    if !SLOW_CLOCKS.contains(&clock) {
        return;
    }
    let available = case.machine.text(&format!("{folder}/available_clocksource")).unwrap_or_default();
    let fix = match available.split_whitespace().find(|name| !SLOW_CLOCKS.contains(name)) {
        Some(fast) => format!("`echo {fast} > {folder}/current_clocksource`"),
        None => {
            "a machine with a stable tsc, or kvm-clock; `dmesg | grep -i tsc` tells why there is none".into()
        }
    };
    let texts = Texts {
        what: "the clock source".into(),
        value: clock.to_owned(),
        needed: "one that is read without a device: tsc, kvm-clock, arch_sys_counter".into(),
        otherwise: "each read of the time takes about 1 µs, once a turn and once for each timer".into(),
        fix,
    };
    found.push(texts.of("clock", Severity::Warn, Certainty::Computed));
}

/// A quota for fewer CPUs than there are shards.
pub(super) fn quota(case: &Case<'_>, found: &mut Vec<Finding>) {
    let Some(throttling) = &case.host.throttling else { return };
    let (shards, quota) = (case.shards(), throttling.quota_cpus);
    // As available_parallelism does, which rounds down and never below one.
    if shards as f64 <= quota.max(1.0) {
        return;
    }
    let texts = Texts {
        what: "the CPU quota of the control group".into(),
        value: format!("{quota:.1} CPUs"),
        needed: format!("{shards}, as many as shards"),
        otherwise: "shards together use the quota up, and all of them stand still until the next period, for up to 100 ms".into(),
        fix: format!("Server::shards({}), which is the default, or a larger cpu.max", (quota as u64).max(1)),
    };
    found.push(texts.of("cpu_quota", Severity::Warn, Certainty::Computed));
}

/// A quota that is used up.
pub(super) fn throttled(case: &Case<'_>, found: &mut Vec<Finding>) {
    let Some(now) = &case.host.throttling else { return };
    let before = case.before.as_ref().and_then(|host| host.throttling).unwrap_or_default();
    let periods = now.periods.saturating_sub(before.periods);
    let throttled = now.throttled.saturating_sub(before.throttled);
    let share = throttled as f64 / periods.max(1) as f64;
    if share <= THROTTLED_MAX {
        return;
    }
    let millis = now.throttled_time.saturating_sub(before.throttled_time).as_millis();
    let texts = Texts {
        what: "the CPU quota".into(),
        value: format!(
            "used up in {throttled} of {periods} periods ({}), and threads were held back for {millis} ms",
            percent(share)
        ),
        needed: format!("less than {} of the periods", percent(THROTTLED_MAX)),
        otherwise:
            "all shards stand still at the end of such a period, which looks like stalls without a cause"
                .into(),
        fix: "a larger cpu.max (limits.cpu of Kubernetes), or none".into(),
    };
    found.push(texts.of("cpu_throttled", Severity::Warn, Certainty::Seen));
}

/// CPU time that the hypervisor gave to others: since the last look, else since the boot.
pub(super) fn steal(case: &Case<'_>, found: &mut Vec<Finding>) {
    let Some(now) = &case.host.cpu else { return };
    let before = case.before.as_ref().and_then(|host| host.cpu).unwrap_or_default();
    let all = now.all.saturating_sub(before.all);
    let share = now.stolen.saturating_sub(before.stolen) as f64 / all.max(1) as f64;
    if share <= STEAL_MAX {
        return;
    }
    let texts = Texts {
        what: "the CPU time that the hypervisor took".into(),
        value: percent(share),
        needed: format!("less than {}", percent(STEAL_MAX)),
        otherwise: "shards stand still at any moment, and no figure of the process tells why".into(),
        fix: "a machine with CPUs to itself, or a host with fewer others".into(),
    };
    found.push(texts.of("cpu_steal", Severity::Warn, Certainty::Seen));
}

/// Tasks that wait for a CPU.
pub(super) fn pressure(case: &Case<'_>, found: &mut Vec<Finding>) {
    let Some(share) = case.host.cpu_pressure.filter(|share| *share > PRESSURE_MAX) else { return };
    let (pinned, fix) = match case.setup.pinned {
        true => (
            ", and pinned ones cannot move to a free CPU",
            "Server::pin(false), or move the other programs off the CPUs of the shards",
        ),
        false => (
            "",
            "find the other programs (`top`, `ringserve-ctl top` shows starved shards), or take fewer shards",
        ),
    };
    let texts = Texts {
        what: "the time in which some task waited for a CPU".into(),
        value: format!("{} of the last 10 s (PSI)", percent(share)),
        needed: format!("less than {}", percent(PRESSURE_MAX)),
        otherwise: format!("shards wait for their CPUs{pinned}: latency that no handler explains"),
        fix: fix.into(),
    };
    found.push(texts.of("cpu_pressure", Severity::Warn, Certainty::Seen));
}

/// Memory that is far from a CPU.
pub(super) fn numa(case: &Case<'_>, found: &mut Vec<Finding>) {
    let is_node = |name: &String| name.strip_prefix("node").is_some_and(|n| n.parse::<u32>().is_ok());
    let nodes = case.machine.names("/sys/devices/system/node").iter().filter(|name| is_node(name)).count();
    if nodes < 2 || case.setup.pinned {
        return;
    }
    let texts = Texts {
        what: "the number of NUMA nodes".into(),
        value: format!("{nodes}, and the shards are not pinned"),
        needed: "pinned shards, so that a shard and its memory stay on one node".into(),
        otherwise: "a shard that moves to another node reads its memory from afar".into(),
        fix: "Server::pin(true), with a shard for each CPU; or one process for each node, by `numactl`"
            .into(),
    };
    found.push(texts.of("numa", Severity::Info, Certainty::Computed));
}
