//! Deadlines that the service gives connections, restarts and removes. Drawn from copies, so that
//! other draws of a seed stay the same.

use std::time::Duration;

use ringserve_core::{ConnLimits, ConnShared};

use super::Above;
use crate::faults::Fault;
use crate::kernel::State;
use crate::plan::MS;
use crate::rng::Rng;
use crate::service::Session;

/// Distinguishes these draws from others of a copy.
const SALT: u64 = 0x6465_6164;

impl Above {
    /// Draws a deadline for a connection that opens.
    pub(super) fn may_begin_deadline(&self, state: &mut State, shared: &ConnShared<Session>) {
        let (tag, of) = (shared.body().tag, state.plan.deadlines);
        let mut rng = Rng::new(state.rng.clone().below(1 << 32) ^ tag as u64 ^ SALT);
        if of > 0 && !state.socks[tag].upstream && rng.one_in(of) {
            self.begin_deadline(state, shared, &mut rng);
        }
    }

    /// Draws a change of the deadline in a call of a connection that may have one.
    pub(super) fn may_change_deadline(&self, state: &mut State, shared: &ConnShared<Session>) {
        let tag = shared.body().tag;
        let mut rng = Rng::new(state.rng.clone().below(1 << 32) ^ tag as u64 ^ SALT);
        if state.plan.deadlines == 0 || state.socks[tag].upstream || shared.is_gone() || !rng.one_in(8) {
            return;
        }
        match rng.below(4) {
            0 => self.begin_deadline(state, shared, &mut rng),
            1 => {
                state.cover.fault(Fault::DeadlineTaken);
                shared.set_limits(&ConnLimits::default().deadline(None)).expect("nothing is out of range");
                state.socks[tag].deadline = None;
            }
            _ => {
                // The service's own deadlines, which change nothing.
                state.cover.fault(Fault::DeadlineLeft);
                let own = ConnLimits::default().handler_timeout(state.plan.limits.handler_timeout);
                shared.set_limits(&own).expect("they are in range");
            }
        }
    }

    fn begin_deadline(&self, state: &mut State, shared: &ConnShared<Session>, rng: &mut Rng) {
        state.cover.fault(Fault::DeadlineSet);
        let time = rng.spread(20 * MS, 4000 * MS);
        shared
            .set_limits(&ConnLimits::default().deadline(Duration::from_nanos(time)))
            .expect("it is in range");
        state.socks[shared.body().tag].deadline = Some(self.now.as_nanos() + time);
    }
}
