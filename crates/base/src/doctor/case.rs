//! The input of a check: the machine, how the server is set, what is expected of it, and what it
//! lived through.

use std::time::Duration;

use ringserve_drivers::{SetupError, probe, probe_accept};

use super::{Certainty, Finding, Severity, Workload};
use crate::machine::files::{FileRefusal, MachineFiles};
use crate::machine::{MachineStats, read_of};

/// The state of a server's rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rings {
    /// Nothing yet: the doctor tries them.
    Untried,
    /// They work, and have tables of their connections.
    Tables,
    /// They work, and each connection costs a descriptor.
    Descriptors,
    /// The server runs on epoll, or is configured to.
    Epoll,
}

/// The settings of a server that the checks compare.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The number of its shards.
    pub shards: u64,
    /// Their drivers.
    pub rings: Rings,
    /// Each shard is pinned to a CPU.
    pub pinned: bool,
    /// Another process may listen on its port.
    pub share_port: bool,
    /// The least of all listeners that are TCP's.
    pub backlog: u32,
    /// True if no listener has a queue for each shard.
    pub one_queue: bool,
    /// The most that the kernel keeps of unsent bytes, of all services; `None` if one has no bound.
    pub unsent_bytes_max: Option<u64>,
    /// Connections go to the shard of the CPU that got their first packet.
    pub incoming_cpu: bool,
    /// Something ends connections of peers that vanished.
    pub ends_silent: bool,
    /// Connections to upstreams at most.
    pub upstreams_max: u64,
    /// If the program says how many connections there may be.
    pub connections: Option<u64>,
}

/// The figures of a server since its start.
#[derive(Clone, Debug, Default)]
pub struct Lived {
    /// Connections that it has.
    pub connections: u64,
    /// Packets that its accept queues lost, with the worst of them as text.
    pub queue_lost: u64,
    /// The listener with the fullest queue.
    pub queue_worst: String,
    /// The longest turn of a shard that was reported.
    pub longest_stall: Option<Duration>,
    /// The imbalance of connections between shards, and how many came.
    pub skew: Option<f64>,
    /// Connections that were accepted since its start.
    pub opened: u64,
}

/// A trial of io_uring: true if a ring's table of connections can be used.
pub(crate) type Trial = fn() -> Result<bool, SetupError>;

/// All that the checks look at.
pub(crate) struct Case<'a> {
    pub(crate) machine: &'a MachineFiles,
    pub(crate) setup: &'a Setup,
    pub(crate) expected: &'a Workload,
    /// The machine now.
    pub(crate) host: MachineStats,
    /// The files for that which could not be looked at.
    pub(crate) host_refused: Vec<FileRefusal>,
    /// The machine at an earlier look.
    pub(crate) before: Option<MachineStats>,
    /// Of a server that runs.
    pub(crate) lived: Option<Lived>,
    /// The result of the trial of rings, if there was one.
    pub(crate) rings: Result<Rings, SetupError>,
}

impl<'a> Case<'a> {
    /// Tries rings if the setup says nothing of them.
    pub(crate) fn new(machine: &'a MachineFiles, setup: &'a Setup, expected: &'a Workload) -> Case<'a> {
        Case::tried(machine, setup, expected, || {
            let found = probe()?;
            probe_accept()?;
            Ok(found.direct_descriptors)
        })
    }

    /// The same, with another trial of rings.
    pub(crate) fn tried(
        machine: &'a MachineFiles,
        setup: &'a Setup,
        expected: &'a Workload,
        trial: Trial,
    ) -> Case<'a> {
        let rings = match setup.rings {
            Rings::Untried => trial().map(|tables| if tables { Rings::Tables } else { Rings::Descriptors }),
            known => Ok(known),
        };
        machine.take_refused();
        let host = read_of(machine);
        let host_refused = machine.take_refused();
        Case { machine, setup, expected, host, host_refused, before: None, lived: None, rings }
    }

    /// With an earlier look at the machine.
    pub(crate) fn since(self, before: MachineStats) -> Case<'a> {
        Case { before: Some(before), ..self }
    }

    /// With what the server went through.
    pub(crate) fn of_server(self, lived: Lived) -> Case<'a> {
        Case { lived: Some(lived), ..self }
    }

    /// Connections to be ready for: those expected, else those that the program says, and never
    /// less than there are.
    pub(crate) fn connections(&self) -> Option<u64> {
        let now = self.lived.as_ref().map(|lived| lived.connections).filter(|now| *now > 0);
        self.expected.connections.or(self.setup.connections).max(now)
    }

    pub(crate) fn shards(&self) -> u64 {
        self.setup.shards.max(1)
    }

    /// True where each connection costs a descriptor of the process.
    pub(crate) fn takes_descriptors(&self) -> bool {
        !matches!(self.rings, Ok(Rings::Tables | Rings::Untried))
    }

    /// True if the server has rings.
    pub(crate) fn has_rings(&self) -> bool {
        matches!(self.rings, Ok(Rings::Tables | Rings::Descriptors))
    }

    /// By how much a total of the machine grew since the earlier look; `None` without one.
    pub(crate) fn growth(&self, total: impl Fn(&MachineStats) -> u64) -> Option<u64> {
        self.before.as_ref().map(|before| total(&self.host).saturating_sub(total(before)))
    }

    /// True if this thread has a capability, by its number; threads that it starts inherit it.
    pub(crate) fn may(&self, capability: u32) -> bool {
        let set = self.machine.field("/proc/thread-self/status", "CapEff");
        let set = set.and_then(|text| u64::from_str_radix(&text, 16).ok());
        set.is_some_and(|set| set >> capability & 1 == 1)
    }

    /// The version of the kernel, such as 6.18; zeros if it cannot be read.
    pub(crate) fn kernel(&self) -> (u32, u32) {
        let text = self.machine.text("/proc/sys/kernel/osrelease").unwrap_or_default();
        let mut parts = text.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
        (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
    }
}

/// The parts of a finding that are texts.
pub(super) struct Texts {
    pub(super) what: String,
    pub(super) value: String,
    pub(super) needed: String,
    pub(super) otherwise: String,
    pub(super) fix: String,
}

impl Texts {
    pub(super) fn of(self, check: &'static str, severity: Severity, certainty: Certainty) -> Finding {
        let Texts { what, value, needed, otherwise, fix } = self;
        Finding { check, severity, what, value, needed, otherwise, fix, certainty }
    }
}

/// Bytes as people write them: `3.8 GiB`, `142 KiB`.
pub(super) fn size(bytes: u64) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.into_iter().find(|(_, bits)| bytes >> bits >= 1) {
        Some((unit, bits)) if bytes >> bits < 10 && bytes & ((1 << bits) - 1) != 0 => {
            format!("{:.1} {unit}", bytes as f64 / f64::from(1u32 << bits))
        }
        Some((unit, bits)) => format!("{} {unit}", bytes >> bits),
        None => format!("{bytes} bytes"),
    }
}

/// A share of one as percent.
pub(super) fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}
