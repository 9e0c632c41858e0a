//! The server that an endpoint shows, from the endpoint's start to its end.

use std::sync::OnceLock;

use crate::funnel::MachineFigures;
use crate::host;
use crate::server::control::ServerControl;
use crate::server::running::Facts;

/// The server: none while its factories are pending.
#[derive(Default)]
pub(super) struct Target {
    running: OnceLock<Running>,
}

/// A server that serves, or did.
pub(super) struct Running {
    pub(super) control: ServerControl,
    pub(super) facts: Facts,
    /// What the machine had counted when the server began.
    pub(super) before: MachineFigures,
}

impl Target {
    pub(super) fn begins(&self, control: ServerControl, facts: Facts) {
        // There is one start.
        let before = MachineFigures::of(&host::read());
        let _ = self.running.set(Running { control, facts, before });
    }

    pub(super) fn running(&self) -> Option<&Running> {
        self.running.get()
    }
}
