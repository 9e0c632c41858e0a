//! The end of a server after the order to stop, as a thread sees it that no shard can block.
//!
//! ```text
//!  the order ── drain_delay ─┬─ 1 s ──▶ listeners of blocked shards are shut down
//!                            └─ drain_timeout ─┬─▶ the log names what blocks a shard
//!                                              └─ 10 s ──▶ given up: `wait` returns an error, `serve` ends the process
//! ```
//!
//! The order to abort brings all of it forward.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ringserve_base::clock::{Clock, Deadline};
use ringserve_base::lines::error;
use ringserve_core::ServerLimits;
use ringserve_drivers::{Listener, ListenerEnd};

use crate::shard::wakes::inbox::ShardRemote;
use crate::watch::board::Watch;
use crate::watch::state::State;

/// The time after which a shard that took no order is blocked: new connections that would wait in
/// its queue are refused.
const BLOCKED: Duration = Duration::from_secs(1);

/// Time for the end of a drain after its limit: after 5 s a shard gives up what its driver does not
/// end.
const GIVES_UP: Duration = Duration::from_secs(10);

/// The same after an abort.
pub(crate) const ABORTS: Duration = Duration::from_secs(15);

/// The progress of a server's end.
pub(crate) struct Ending {
    remotes: Arc<[Arc<ShardRemote>]>,
    watch: Arc<Watch>,
    clock: Clock,
    state: Mutex<Progress>,
    changed: Condvar,
    /// By shard.
    listeners: Vec<Vec<ListenerEnd>>,
    drain_delay: Duration,
    drain_timeout: Duration,
}

#[derive(Debug, Default)]
struct Progress {
    /// Shards that ended.
    ended: usize,
    order: Option<Order>,
    /// The time at which the process ends if a shard took no order to abort.
    exits: Option<Deadline>,
    /// The server is no longer served.
    is_over: bool,
}

/// The consequences of the order to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Order {
    /// The times at which listeners are shut down, blocking work is reported, and the server is
    /// given up.
    steps: [Deadline; 3],
}

impl Ending {
    pub(crate) fn new(remotes: Arc<[Arc<ShardRemote>]>, watch: Arc<Watch>, clock: Clock) -> Ending {
        let ServerLimits { drain_delay, drain_timeout, .. } = ServerLimits::default();
        let (state, changed, listeners) = Default::default();
        Ending { remotes, watch, clock, state, changed, listeners, drain_delay, drain_timeout }
    }

    /// The ending with these limits and listeners, by shard.
    pub(crate) fn of(self, limits: &ServerLimits, sockets: &[Vec<Listener>]) -> Ending {
        let of_shard = |sockets: &Vec<Listener>| sockets.iter().map(ListenerEnd::of).collect();
        let listeners = sockets.iter().map(of_shard).collect();
        let ServerLimits { drain_delay, drain_timeout, .. } = *limits;
        Ending { listeners, drain_delay, drain_timeout, ..self }
    }

    fn state(&self) -> MutexGuard<'_, Progress> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut self.state());
        self.changed.notify_all();
    }

    /// Notes the order to drain.
    pub(crate) fn drains(&self) {
        let (delay, drained) = (self.drain_delay, self.drain_delay + self.drain_timeout);
        let steps = [delay + BLOCKED, drained, drained + GIVES_UP].map(Deadline::within);
        self.change(|state| _ = state.order.get_or_insert(Order { steps }));
    }

    /// Notes the order to abort.
    pub(crate) fn aborts(&self) {
        let mut steps = [BLOCKED, BLOCKED, ABORTS].map(Deadline::within);
        self.change(|state| {
            if let Some(order) = state.order {
                (0..steps.len()).for_each(|step| steps[step] = steps[step].min(order.steps[step]));
            }
            state.order = Some(Order { steps });
        });
    }

    /// Starts the time after an abort at whose end the process no longer waits for a blocked shard.
    pub(crate) fn exits(&self) {
        self.change(|state| _ = state.exits.get_or_insert(Deadline::within(BLOCKED)));
    }

    /// Counts a shard that ended.
    pub(crate) fn shard_ended(&self) {
        self.change(|state| state.ended += 1);
    }

    /// Notes that the server is no longer served.
    pub(crate) fn is_over(&self) {
        self.change(|state| state.is_over = true);
    }

    /// Waits until that many shards ended, and takes the steps above. False if they are given up.
    pub(crate) fn wait(&self, shards: usize) -> bool {
        let (mut state, mut step) = (self.state(), 0);
        loop {
            if state.ended >= shards {
                return true;
            }
            let Some(order) = state.order else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let at = order.steps[step];
            let stays = |state: &mut Progress| state.ended < shards && state.order == Some(order);
            state = at.wait_while(&self.changed, state, stays);
            if state.ended < shards && at.is_over() {
                drop(state);
                match step {
                    0 => self.shut_listeners(),
                    1 => self.tell(),
                    _ => return false,
                }
                step += 1;
                state = self.state();
            }
        }
    }

    /// Waits until the server is no longer served, or has to be ended with its process: true for
    /// the latter.
    pub(crate) fn outlasts(&self) -> bool {
        let mut state = self.state();
        loop {
            if state.is_over {
                return false;
            }
            let Some(order) = state.order else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let (exits, last) = (state.exits, order.steps[2]);
            let at = exits.map_or(last, |exits| exits.min(last));
            let stays =
                |state: &mut Progress| !state.is_over && state.order == Some(order) && state.exits == exits;
            state = at.wait_while(&self.changed, state, stays);
            if !state.is_over && at.is_over() {
                if last.is_over() || self.blocked().next().is_some() {
                    return true;
                }
                // Each shard took the order, and has its time.
                state.exits = Some(last);
            }
        }
    }

    /// The shards that took no order for some time.
    fn blocked(&self) -> impl Iterator<Item = usize> {
        let now = self.clock.now();
        let is_blocked = move |remote: &ShardRemote| match remote.state() {
            State::Turn(began) | State::Called(began) => now - began >= BLOCKED,
            State::Waits(_) => false,
        };
        let remotes = self.remotes.iter().enumerate();
        remotes
            .filter(move |(_, remote)| remote.thread().is_some() && is_blocked(remote))
            .map(|(shard, _)| shard)
    }

    fn shut_listeners(&self) {
        for shard in self.blocked() {
            self.listeners.get(shard).into_iter().flatten().for_each(ListenerEnd::shut_down);
        }
    }

    /// Logs what blocks each shard.
    fn tell(&self) {
        let stalls = self.watch.stalls(self.clock.now());
        for shard in self.blocked() {
            let stall = stalls.iter().rfind(|stall| stall.shard == shard && stall.ongoing);
            match stall {
                Some(stall) => error!("the server cannot end: {stall}"),
                None => error!("the server cannot end: a call blocks shard {shard}"),
            }
        }
    }
}
