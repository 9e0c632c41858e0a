//! Connections closed when memory is tight: those that hold most, and no others.

use ringserve_core::ConnId;

use super::{Above, Core};
use crate::faults::Fault;

/// Bytes below which the shard does not compare connections.
const LISTED: usize = 4096;

/// Steps after which held bytes are listed at the latest: three until they count, and three if they
/// were seen before that.
const SETTLED: u32 = 8;

/// Bytes in powers of two, from the size at which they are compared.
fn class(bytes: usize) -> u32 {
    if bytes < LISTED { 0 } else { bytes.ilog2() }
}

/// Steps after which bytes count as held.
const COUNTED: u32 = 3;

/// The most that each connection has held for long, in powers of two.
pub(super) type Kept = Vec<(ConnId, u32)>;

impl Above {
    /// Notes at the end of a turn how many bytes connections have held for long.
    pub(super) fn note_kept(&mut self, core: &Core) {
        if !self.state.borrow().plan.floods {
            return;
        }
        self.kept.retain(|(id, _)| core.shared(*id).is_some());
        for (id, _) in &self.live {
            let now = class(core.held_bytes_of(*id, COUNTED));
            match self.kept.iter_mut().find(|(other, _)| other == id) {
                Some((_, most)) => *most = now.max(*most),
                None => self.kept.push((*id, now)),
            }
        }
    }

    /// Checks that, if hardly anything is held for long, the heaviest is closed, however short it
    /// has held its bytes, and no innocent one.
    fn check_newest(&self, core: &Core, relieved: &[(ConnId, usize, usize)]) {
        let Some((victim, bytes, held)) = relieved.last() else { return };
        let state = &mut *self.state.borrow_mut();
        // Lists are by powers of two, and those in them may have grown within this turn.
        let kept: usize = self.kept.iter().map(|(_, class)| if *class > 0 { 4 << class } else { 0 }).sum();
        if !state.plan.floods || kept > held / 4 {
            return;
        }
        state.cover.fault(Fault::NewestGoes);
        for (id, _) in self.live.iter().filter(|(id, _)| core.shared(*id).is_some()) {
            // Bytes that arrived in this step may not have been seen yet.
            let holds = core.held_bytes_of(*id, 1);
            assert!(
                class(holds) <= class(*bytes),
                "{id} holds {holds} bytes and stays; {victim} holds {bytes} and goes, where {held} are held and at most {kept} \
                 for long"
            );
        }
    }

    /// Checks that no connection is closed for lack of memory while a heavier one stays, nor while
    /// there is enough.
    pub(super) fn check_relieved(&mut self, core: &Core) {
        let relieved = core.observer().relieved.take();
        let Some(least) = relieved.iter().map(|(_, bytes, _)| *bytes).min() else { return };
        self.check_newest(core, &relieved);
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
