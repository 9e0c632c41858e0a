//! io_uring, and the limits of the process.

use ringserve_drivers::SetupError;

use super::case::{Case, Rings, Texts, size};
use super::{Certainty, Finding, Severity};
use crate::machine;

/// Memory that a ring locks: 41 rings took 8 MiB.
const RING_LOCKED_BYTES: u64 = 200 << 10;

/// Descriptors of a shard in addition to connections: its ring or epoll instance, eventfd, timerfd,
/// listeners, sockets on their way.
const SHARD_DESCRIPTORS: u64 = 64;

/// Entries of a ring's table at most (`IORING_MAX_FIXED_FILES`).
const TABLE_MAX: u64 = 1 << 20;

/// `CAP_IPC_LOCK`: no limit on locked memory.
const IPC_LOCK: u32 = 14;

/// Whether rings work, as tried.
pub(super) fn io_uring(case: &Case<'_>, found: &mut Vec<Finding>) {
    let (major, minor) = case.kernel();
    let needed = "set-up, a file table, a buffer ring, accept, receive, send and close, each done once for trial; Linux 6.0, \
                  best from 6.13";
    match &case.rings {
        Err(error) => {
            let fix = match error {
                SetupError::Disabled(_) => "sysctl -w kernel.io_uring_disabled=0",
                SetupError::Blocked { .. } => {
                    "allow io_uring_setup, io_uring_enter and io_uring_register in the seccomp profile of the container"
                }
                SetupError::Memory { .. } => "raise RLIMIT_MEMLOCK: `ulimit -l`, LimitMEMLOCK= in systemd",
                SetupError::Descriptors { .. } => "raise RLIMIT_NOFILE: `ulimit -n`, LimitNOFILE= in systemd",
                SetupError::TooOld { .. } => "a newer kernel",
                _ => "see the reason",
            };
            let texts = Texts {
                what: "io_uring".into(),
                value: format!("not usable: {error}"),
                needed: needed.into(),
                otherwise: "the server runs on epoll, with more system calls for each request, and a descriptor for each \
                            connection"
                    .into(),
                fix: fix.into(),
            };
            found.push(texts.of("io_uring", Severity::Warn, Certainty::Seen));
        }
        Ok(Rings::Descriptors) => {
            let texts = Texts {
                what: "io_uring's table of connections".into(),
                value: format!("not usable on Linux {major}.{minor}: a close waits for older receives"),
                needed: "Linux 6.13".into(),
                otherwise: "each connection costs a descriptor of the process".into(),
                fix: "a newer kernel, where descriptors are scarce".into(),
            };
            found.push(texts.of("io_uring", Severity::Info, Certainty::Seen));
        }
        Ok(_) => {}
    }
}

/// Whether descriptors suffice for the connections.
pub(super) fn descriptors(case: &Case<'_>, found: &mut Vec<Finding>) {
    // The server raises the soft limit to the hard one.
    let Some((_, limit)) = machine::limits(case.machine, "Max open files") else { return };
    let Some(connections) = case.connections() else { return };
    let (shards, upstreams) = (case.shards(), case.setup.upstreams_max);
    let is_each_one = case.takes_descriptors();
    let (needed, formula) = if is_each_one {
        let needed = connections + SHARD_DESCRIPTORS * shards;
        (needed, format!("{connections} connections + {SHARD_DESCRIPTORS} × {shards} shards"))
    } else {
        let share = connections.div_ceil(shards);
        let formula = format!(
            "{connections} connections / {shards} shards + {upstreams} upstreams + {SHARD_DESCRIPTORS}, for the table of each \
             ring"
        );
        (share + upstreams + SHARD_DESCRIPTORS, formula)
    };
    let most = if is_each_one { u64::MAX } else { TABLE_MAX };
    if needed <= limit.min(most) {
        return;
    }
    let raise = raise_descriptors(case, needed.min(most));
    let room = limit.min(most).saturating_sub(upstreams + SHARD_DESCRIPTORS);
    let fix = if is_each_one || room == 0 {
        raise
    } else {
        let enough = connections.div_ceil(room);
        let shards = format!("take {enough} shards (Server::shards), which do with {limit}");
        if needed > most { shards } else { format!("{raise}; or {shards}") }
    };
    let texts = Texts {
        what: "RLIMIT_NOFILE".into(),
        value: limit.to_string(),
        needed: format!("{needed} = {formula}"),
        otherwise: "accepting pauses when descriptors are used up, and further peers wait in the accept queue until that is full \
                    and drops them"
            .into(),
        fix,
    };
    found.push(texts.of("descriptors", Severity::Error, Certainty::Computed));
}

/// The hard limit cannot exceed `fs.nr_open`.
fn raise_descriptors(case: &Case<'_>, needed: u64) -> String {
    let raise = format!("LimitNOFILE={needed} in systemd, `--ulimit nofile={needed}` in docker");
    match case.machine.sysctl("fs.nr_open") {
        Some(most) if most < needed => format!("`sysctl -w fs.nr_open={needed}`, then {raise}"),
        _ => raise,
    }
}

/// Whether rings may lock the memory that they take.
pub(super) fn locked_memory(case: &Case<'_>, found: &mut Vec<Finding>) {
    if case.may(IPC_LOCK) || !case.has_rings() || case.setup.rings != Rings::Untried {
        // No limit, no rings, or those of all shards are made already.
        return;
    }
    let Some(limit) = machine::soft_limit(case.machine, "Max locked memory") else { return };
    let shards = case.shards();
    let needed = shards * RING_LOCKED_BYTES;
    if needed <= limit {
        return;
    }
    let would_do = limit / RING_LOCKED_BYTES;
    let fewer = if would_do > 0 { format!(", or {would_do} shards") } else { String::new() };
    let texts = Texts {
        what: "RLIMIT_MEMLOCK".into(),
        value: size(limit),
        needed: format!("{} = {shards} shards × {}", size(needed), size(RING_LOCKED_BYTES)),
        otherwise:
            "the rings of the last shards cannot be made, and the server runs on epoll or does not start"
                .into(),
        fix: format!("`ulimit -l {}`, LimitMEMLOCK={needed} in systemd{fewer}", needed.div_ceil(1024)),
    };
    found.push(texts.of("locked_memory", Severity::Error, Certainty::Estimated));
}
