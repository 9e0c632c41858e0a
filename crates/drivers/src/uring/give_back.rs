//! Buffers in the ring are the kernel's until a receive fills them. So those that a burst of
//! traffic put there would stay permanently, 64 MiB by default. A quiet shard takes them back:
//!
//! ```text
//!   receives are stopped ──▶ rest: none is armed ──▶ none in flight: new, empty ring ──▶ armed again
//! ```

use std::time::Duration;

use ringserve_core::GivesBack;

use super::Uring;
use super::kernel::Kernel;
use super::table::{ReceiveState, Stop};

/// The longest wait of new connections' receives for those being stopped. A cancel takes
/// microseconds, one that missed 10 ms more.
const REST: Duration = Duration::from_millis(100);

/// Progress of taking the buffers back.
#[derive(Clone, Copy)]
pub(super) enum Rest {
    No,
    /// No receive is armed before this time, or before none is in flight.
    Until(Duration),
    /// The result, which was not reported yet.
    Over(GivesBack),
}

impl<K: Kernel> Uring<K> {
    pub(super) fn take_buffers_back(&mut self) -> GivesBack {
        if let Rest::No = self.rest {
            if self.buffers.in_ring == 0 {
                return GivesBack::Done;
            }
            if self.ports.iter().any(|port| port.has_receive() && port.receive_stop == Stop::No) {
                return GivesBack::Refused;
            }
            self.rest = Rest::Until(self.kernel.now() + REST);
        }
        if self.rests() {
            return GivesBack::Waits;
        }
        match std::mem::replace(&mut self.rest, Rest::No) {
            Rest::Over(came_to) => came_to,
            Rest::No | Rest::Until(_) => GivesBack::Refused,
        }
    }

    /// True while no receive may be armed. Ends the rest once none is in flight, or its time is
    /// over.
    #[inline]
    pub(super) fn rests(&mut self) -> bool {
        let Rest::Until(until) = self.rest else { return false };
        let in_flight = self.ports.iter().any(|port| port.has_receive());
        if in_flight && self.kernel.now() < until {
            return true;
        }
        let renewed = !in_flight && self.kernel.renew_buffer_ring();
        if renewed {
            self.buffers.take_back(&mut self.side);
        }
        self.rest = Rest::Over(if renewed { GivesBack::Done } else { GivesBack::Refused });
        false
    }

    pub(super) fn rest_due_in(&mut self) -> Option<Duration> {
        match self.rest {
            Rest::No => None,
            Rest::Until(until) => Some(until.saturating_sub(self.kernel.now())),
            // The caller asks in its next turn.
            Rest::Over(_) => Some(Duration::ZERO),
        }
    }

    pub(super) fn is_resting(&self) -> bool {
        matches!(self.rest, Rest::Until(_))
    }

    /// True if the list of parked receives has one that can be armed.
    pub(super) fn can_arm_parked(&self) -> bool {
        self.ports.parked() > 0 && self.buffers.in_ring > 0 && !self.is_resting()
    }
}

impl super::table::Port {
    /// True if the kernel may have a receive of this connection, or will.
    fn has_receive(&self) -> bool {
        matches!(self.receiving, ReceiveState::Armed | ReceiveState::Doubtful)
    }
}
