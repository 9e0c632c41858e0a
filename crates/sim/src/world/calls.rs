//! Calls of the service: one for each frame, and the continuation of those that wait.

use ringserve_core::{CloseReason, ConnId, Next};

use super::events::session_of;
use super::{Above, Batch, Core};
use crate::faults::Fault;
use crate::service::{self, Called, Parked};

/// Bytes that a waiting call holds in addition to its frame: many, so that calls count if memory is
/// tight.
const CALL_BYTES: usize = 4000;

impl Above {
    /// Hands a connection's frames to the service.
    pub(super) fn call_for_each_frame(&mut self, frames: &mut Batch<'_>) {
        let id = frames.id();
        let (framing, shared) = (self.framing.clone(), session_of(frames.shared()));
        loop {
            let next = frames.next_frame(&*framing);
            self.check_relieved(frames.shard());
            match next {
                Next::Frame(frame) => {
                    let mut state = self.state.borrow_mut();
                    state.log(|| {
                        format!("frame of {} for {id}, connection {}", frame.len(), shared.body().tag)
                    });
                    assert!(
                        !shared.is_full(),
                        "{id}: a frame is handed out, and {} bytes are not taken",
                        shared.outbox_bytes()
                    );
                    let called = service::call(&mut state, id, &shared, frame);
                    self.may_change_deadline(&mut state, &shared);
                    drop(state);
                    let goes_on = match called {
                        Called::Parked(parked) => {
                            let task = self.tasks.add(parked);
                            let parked = frames.park(task, CALL_BYTES);
                            self.parked(frames.shard(), id, task, parked);
                            true
                        }
                        called => self.done(frames.shard(), id, called),
                    };
                    self.check_relieved(frames.shard());
                    if !goes_on {
                        return;
                    }
                }
                Next::Nothing => return,
                Next::Bad(error) => {
                    service::malformed(&mut self.state.borrow_mut(), &shared);
                    return frames.shard().finish(id, CloseReason::BadFrame(error));
                }
            }
        }
    }

    /// True if the next frame may follow.
    fn done(&mut self, core: &mut Core, id: ConnId, called: Called) -> bool {
        match called {
            Called::Done => return true,
            Called::Failed => core.finish(id, CloseReason::HandlerError),
            Called::Panicked => core.abort(id, CloseReason::HandlerPanicked),
            Called::Parked(_) => unreachable!("a call that waits is not done"),
        }
        false
    }

    /// Notes that the shard counts a call that waits.
    fn parked(&mut self, core: &Core, id: ConnId, task: u32, parked: ringserve_core::ParkOutcome) {
        let tag = self.block_of(id).expect("who is called is alive");
        let state = &mut *self.state.borrow_mut();
        let sock = &mut state.socks[tag];
        let wants_room = self.tasks.get(task).is_some_and(|parked| parked.wants_room.is_some());
        sock.wants_room += usize::from(wants_room);
        let next = parked.next;
        assert_eq!(next, sock.waiting.last().copied(), "{id}: another's handler, or none");
        if next.is_none() {
            sock.waiting_since = self.now.as_nanos();
        } else {
            state.cover.fault(Fault::HandlerOverlaps);
        }
        sock.waiting.push(task);
        self.tasks.list(task, parked, self.now.as_nanos());
        let limits = state.plan.limits_of(sock.upstream);
        let many = sock.waiting.len() >= usize::from(limits.calls_in_flight_max);
        sock.calls_full = core.calls_are_full(id);
        let tight = sock.calls_full && !many;
        assert!(many <= sock.calls_full || core.shared(id).is_none(), "{id}: calls beyond the most");
        if tight {
            assert!(state.plan.tight_memory, "{id}: no call may begin, and there is memory");
            state.cover.fault(Fault::CallsHeldBack);
        }
    }

    /// Resumes the handlers whose time has come.
    pub(super) fn run_tasks(&mut self, core: &mut Core) {
        for task in 0..self.tasks.len() {
            let due = match self.tasks.get(task) {
                None => false,
                Some(Parked { wants_room: Some(flag), .. }) => flag.is_set(),
                Some(parked) => parked.due <= self.now.as_nanos(),
            };
            if due && !core.take_call() {
                // It is due in the next turn too.
                self.held_off = true;
                return self.state.borrow_mut().cover.fault(Fault::TurnFull);
            }
            if due {
                self.resume(core, task);
            }
        }
    }

    fn resume(&mut self, core: &mut Core, task: u32) {
        self.moved = true;
        let mut parked = self.tasks.run(task);
        let id = parked.id;
        let tag = self.block_of(id).expect("a handler of a connection that ended");
        let shared = self.state.clone();
        let mut borrowed = shared.borrow_mut();
        let state = &mut *borrowed;
        if parked.wants_room.take().is_some() {
            state.socks[tag].wants_room -= 1;
        }
        // The service counts it as done when it is; put back if it is not.
        let place = state.socks[tag].waiting.iter().position(|waits| *waits == task);
        let place = place.expect("it waits");
        let full = state.calls_are_full(&state.socks[tag]);
        state.socks[tag].waiting.remove(place);
        let called = service::resume(state, parked);
        let sock = &mut state.socks[tag];
        if let Called::Parked(parked) = called {
            sock.wants_room += usize::from(parked.wants_room.is_some());
            sock.waiting.insert(place, task);
            return self.tasks.wait(task, parked);
        }
        if place > 0 {
            state.cover.fault(Fault::HandlerOvertakes);
        }
        sock.waiting_since =
            sock.waiting.first().map_or(self.now.as_nanos(), |first| self.tasks.since(*first));
        sock.clocks.call_done(self.now.as_nanos(), full);
        sock.touch(self.now.as_nanos());
        drop(borrowed);
        let (parked, before) = self.tasks.remove(task);
        self.state.borrow_mut().socks[tag].calls_full = false;
        core.call_done(id, task, parked, before);
        if self.done(core, id, called) {
            core.run_frames(id, self);
        }
        // Also after a failure: the end of the connection names its first call, which must not run
        // before that.
        core.dispatch(self);
    }
}
