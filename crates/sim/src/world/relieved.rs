//! Who goes when memory is tight: those that hold most, and no others.

use super::{Above, Core};
use crate::faults::Fault;

/// Below that the shard does not compare what connections hold.
const LISTED: usize = 4096;

/// Steps after which what is held is listed at the latest: three until it counts, and three where it was seen before that.
const SETTLED: u32 = 8;

/// Bytes in powers of two, from where they are compared.
fn class(bytes: usize) -> u32 {
    if bytes < LISTED { 0 } else { bytes.ilog2() }
}

impl Above {
    /// No connection closes for want of memory while a heavier one stays, nor while there is enough.
    pub(super) fn check_relieved(&mut self, core: &Core) {
        let relieved = core.observer().relieved.take();
        let Some(least) = relieved.iter().map(|(_, bytes, _)| *bytes).min() else { return };
        let state = &mut *self.state.borrow_mut();
        let fault = if class(least) > 0 { Fault::HeavyGoes } else { Fault::LightGoes };
        state.cover.fault(fault);
        for (id, shared) in self.live.iter().filter(|(id, _)| core.shared(*id).is_some()) {
            let outbox = shared.outbox_bytes();
            let holds = core.held_bytes_of(*id, SETTLED);
            // Several small sends that wait are not listed.
            let holds = if outbox >= LISTED { holds } else { holds.saturating_sub(outbox) };
            assert!(
                class(holds) <= class(least),
                "{id} holds {holds} bytes, {outbox} of them in its outbox, and stays; of {relieved:?} one goes"
            );
        }
        let most = state.plan.server_limits.held_bytes_max;
        assert!(
            relieved.iter().all(|(_, _, held)| *held > most),
            "of {most} bytes there are some: {relieved:?}"
        );
    }
}
