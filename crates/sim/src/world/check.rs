//! Conditions after every turn, and at the end.

use ringserve_core::{CloseReason, Completion, ConnStats, Driver, LaneId, Wait};

use super::{Above, Core, Outcome};
use crate::bytes::AnyFraming;
use crate::sock::excuse;

/// Turns within which a draining shard must be done, whatever its peers do: the drain limit is at
/// most 2 s, a turn takes 0.1 ms and more, and peers run out of bytes long before.
const DRAIN_TURNS_MAX: u64 = 60_000;

/// Turns in a row that neither wait nor lead to anything. The submission queue may be full, a
/// cancel may take its time, the timer wheel may wake without need; all that is over soon.
const IDLE_TURNS_MAX: u32 = 100;

/// The same while a call is held off until the driver gave memory back, for which a shard does not
/// sleep: a late completion takes up to 200 ms.
const HELD_OFF_TURNS_MAX: u32 = 10_000;

impl Above {
    /// Checks that a turn that did not wait and led to nothing is not followed by many like it.
    pub(super) fn check_busy(&mut self, before: u64, brought: bool) {
        let most = if std::mem::take(&mut self.held_off) { HELD_OFF_TURNS_MAX } else { IDLE_TURNS_MAX };
        let state = self.state.borrow();
        if brought || self.moved || state.cut_short || state.now > before {
            self.idle_turns = 0;
            return;
        }
        self.idle_turns += 1;
        assert!(self.idle_turns < most, "the shard spins with nothing to do");
    }

    /// Checks the conditions after every turn.
    pub(super) fn check(&mut self, core: &Core) {
        let limits = self.state.borrow().plan.limits.clone();
        for (id, shared) in &self.live {
            let bytes = shared.outbox_bytes();
            assert!(bytes <= limits.outbox_bytes_max, "{id} has {bytes} bytes in its outbox");
            let state = self.state.borrow();
            let sock = &state.socks[shared.body().tag];
            assert!(!sock.may(excuse::PANICKED), "{id} goes on after user code panicked");
            let owes = !sock.waiting.is_empty() || state.has_frame(sock) || bytes > 0;
            let stays = owes || !sock.opened || shared.is_gone() || core.is_runnable(*id);
            assert!(!sock.cut || stays, "{id} is cut, is owed nothing, and stays open");
            let whole = !matches!(state.plan.framing, AnyFraming::Raw);
            let partial = if whole { limits.frame_bytes_max } else { 0 };
            let kept = sock.arrived - sock.handed;
            let ending =
                sock.excuses & (excuse::GARBAGE | excuse::CLOSED | excuse::FAILED | excuse::REFUSED) != 0;
            assert!(
                kept < limits.inbox_bytes_high + partial
                    || ending
                    || sock.cut
                    || shared.is_gone()
                    || !self.protocol.is_receiving(*id),
                "{id} holds {kept} bytes of input and receives more"
            );
        }
        self.check_pages();
        self.check_connections(core);
        self.check_upstreams_go(core);
        let late = self.now >= self.resets_at && !self.live.is_empty();
        assert!(!late, "connections outlive the limit of the drain: {:?}", self.live);
        if let Some(turn) = self.drained_at {
            assert!(self.turn - turn < DRAIN_TURNS_MAX, "the shard drains for ever");
        }
        let every = self.state.borrow().plan.check_every;
        if self.turn.is_multiple_of(every) {
            self.check_all(core);
        }
    }

    pub(super) fn check_all(&mut self, core: &Core) {
        core.check();
        self.driver.invariants();
        self.pool.invariants();
        let mut state = self.state.borrow_mut();
        self.pushes.check(&state, &self.live);
        assert_eq!(self.pool.counts().with_kernel, state.buffers_held(), "buffers with the kernel");
        state.check_limits(self.now.as_nanos());
        if !state.plan.tight_memory {
            assert_eq!(self.counters(core).closed_for(CloseReason::MemoryLimit), 0, "there was memory");
        }
    }

    /// The counters of both lanes.
    fn counters(&self, core: &Core) -> ConnStats {
        let mut sum = core.counters(LaneId::FIRST);
        sum += &core.counters(self.lane);
        sum
    }

    /// Ends the shard and checks that all resources are returned.
    pub(super) fn end(mut self, core: Core, mut completions: Vec<Completion>) -> Outcome {
        let budget = self.state.borrow().plan.budget;
        self.pushes.end(&mut self.state.borrow_mut());
        if let Some(other) = &mut self.other_shard {
            other.end(&mut self.state.borrow_mut(), self.now, self.ahead);
        }
        for _ in 0..64 {
            self.state.borrow_mut().pass(1_000_000);
            let turned = self.driver.turn(Wait::No, budget, &mut completions);
            assert_eq!(turned, Ok(()), "the driver gave up");
        }
        assert!(completions.is_empty(), "completions after the end: {completions:?}");
        self.check_all(&core);
        self.protocol.check_rest();
        assert!(self.live.is_empty(), "a connection did not end");
        assert!(self.tasks.is_empty() && self.openings.is_empty(), "a handler is left, or an open");
        assert_eq!(self.driver.anomalies().stale, 0, "stale completions");
        let counts = self.pool.counts();
        assert_eq!(counts.leased, 0, "receive buffers leaked: {counts:?}");
        let left = usize::from(self.lost.is_some());
        assert_eq!((core.all_connections(), core.left_behind()), (left, left), "slots are taken");
        let counters = self.counters(&core);
        let closed: u64 = counters.reasons().map(|(_, count)| count).sum();
        assert_eq!((counters.opened, counters.closed), (closed, closed), "each connection ends once");
        for lane in [LaneId::FIRST, self.lane] {
            self.check_counters(&core, lane);
        }
        let mut state = self.state.borrow_mut();
        state.check_rest();
        state.close_listeners();
        state.check_peers();
        state.cover.shard(&counters);
        state.cover.turns += self.turn;
        let (cover, hash) = (state.cover.clone(), state.hash);
        drop(state);
        drop(self.driver);
        drop(core);
        let counts = self.pool.counts();
        assert_eq!(counts.free, counts.total, "receive buffers are lost: {counts:?}");
        self.pool.invariants();
        Outcome { cover, hash }
    }
}
