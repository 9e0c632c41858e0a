//! The server that an endpoint shows, from the endpoint's start to its end.

use std::sync::OnceLock;

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
}

impl Target {
    pub(super) fn begins(&self, control: ServerControl, facts: Facts) {
        // There is one start.
        let _ = self.running.set(Running { control, facts });
    }

    pub(super) fn running(&self) -> Option<&Running> {
        self.running.get()
    }
}
