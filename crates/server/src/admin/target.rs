//! The server that an endpoint shows, from the endpoint's start to its end.

use std::sync::OnceLock;

use ringserve_base::machine::files::MachineFiles;
use ringserve_base::machine::read_of;

use crate::funnel::MachineFigures;
use crate::server::running::Facts;
use crate::shard::remote::control::ServerControl;

/// The server: none while its factories are pending.
#[derive(Default)]
pub(super) struct Target {
    running: OnceLock<Running>,
}

/// A server that serves, or did.
pub(super) struct Running {
    pub(super) control: ServerControl,
    pub(super) facts: Facts,
    /// The machine, with files that are open since the server began: reports are asked for most
    /// when descriptors are used up.
    pub(super) machine: MachineFiles,
    /// The machine's counts of then.
    pub(super) before: MachineFigures,
}

impl Target {
    pub(super) fn begins(&self, control: ServerControl, facts: Facts) {
        // There is one start.
        let machine = MachineFiles::here().keeping();
        let before = MachineFigures::of(&read_of(&machine));
        let _ = self.running.set(Running { control, facts, machine, before });
    }

    pub(super) fn running(&self) -> Option<&Running> {
        self.running.get()
    }
}
