//! The ten causes, and the stage of the funnel that each one has to turn red first.

use std::fmt;

use clap::ValueEnum;
use ringserve_report::StageName;

/// The planted cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Cause {
    /// An accept queue for one connection, and hundreds that arrive at once
    Backlog,
    /// A server for few connections
    Table,
    /// Few descriptors, on epoll
    Descriptors,
    /// A small table of the firewall
    Conntrack,
    /// A handler that waits for a lock
    Lock,
    /// A handler that computes
    Cpu,
    /// A control group with a fifth of a CPU
    Quota,
    /// A peer that does not read
    Reader,
    /// Slow answers, one at a time
    Slow,
    /// Receive memory for two frames
    Memory,
}

impl Cause {
    /// All of them, in the order of the funnel.
    pub const ALL: [Cause; 10] = [
        Cause::Backlog,
        Cause::Table,
        Cause::Descriptors,
        Cause::Memory,
        Cause::Lock,
        Cause::Cpu,
        Cause::Slow,
        Cause::Reader,
        Cause::Conntrack,
        Cause::Quota,
    ];

    /// The stage that has to be the first red one.
    pub fn stage(self) -> StageName {
        match self {
            Cause::Backlog => StageName::AcceptQueue,
            Cause::Table | Cause::Descriptors => StageName::Table,
            Cause::Memory => StageName::FirstFrame,
            Cause::Lock | Cause::Cpu | Cause::Slow => StageName::Handler,
            Cause::Reader => StageName::Peer,
            Cause::Conntrack | Cause::Quota => StageName::Machine,
        }
    }

    /// A word of the sentence by which the stage names the cause, where it has several causes.
    pub fn word(self) -> &'static str {
        match self {
            Cause::Conntrack => "tracks",
            Cause::Quota => "quota",
            Cause::Slow => "calls_in_flight_max",
            Cause::Lock => "lock",
            Cause::Cpu => "computes",
            Cause::Descriptors => "descriptors",
            _ => "",
        }
    }

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Cause::Backlog => "backlog",
            Cause::Table => "table",
            Cause::Descriptors => "descriptors",
            Cause::Conntrack => "conntrack",
            Cause::Lock => "lock",
            Cause::Cpu => "cpu",
            Cause::Quota => "quota",
            Cause::Reader => "reader",
            Cause::Slow => "slow",
            Cause::Memory => "memory",
        }
    }

    /// True if it is planted in a network that the drill creates.
    pub fn needs_network(self) -> bool {
        self == Cause::Conntrack
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_is_drilled_once_by_its_name() {
        assert_eq!(Cause::ALL.len(), Cause::value_variants().len());
        for cause in Cause::ALL {
            assert_eq!(Cause::from_str(cause.name(), false), Ok(cause));
            assert_eq!(Cause::ALL.iter().filter(|other| **other == cause).count(), 1);
        }
    }
}
