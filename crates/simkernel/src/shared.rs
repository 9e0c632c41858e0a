//! The lock around a network's state, the waits of clients, and the hash of all events.

use std::mem;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Instant;

use crate::faults::Plan;
use crate::state::State;

/// The lock, and the condition for which clients wait.
pub(crate) struct Shared {
    /// Time is virtual, and nothing blocks.
    pub(crate) stepped: bool,
    pub(crate) plan: Arc<Plan>,
    state: Mutex<State>,
    changed: Condvar,
    /// A hash of all events, in virtual time.
    hash: AtomicU64,
}

impl Shared {
    pub(crate) fn new(stepped: bool, plan: Plan) -> Shared {
        let plan = Arc::new(plan);
        let state = Mutex::new(State::new(stepped, plan.clone()));
        Shared { stepped, plan, state, changed: Condvar::new(), hash: AtomicU64::new(0) }
    }

    pub(crate) fn lock(&self) -> StateGuard<'_> {
        StateGuard { state: Some(self.state.lock().unwrap_or_else(PoisonError::into_inner)) }
    }

    /// Notifies clients of an action of a server for which they may wait.
    pub(crate) fn notify_clients(&self) {
        self.changed.notify_all();
    }

    /// Waits for an action of a server, until the deadline.
    pub(crate) fn wait<'a>(&self, mut locked: StateGuard<'a>, deadline: Option<Instant>) -> StateGuard<'a> {
        let state = locked.state.take().expect("it is taken by wait and drop alone");
        let state = match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
            None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(left) => self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
        };
        StateGuard { state: Some(state) }
    }

    /// Adds an event to the hash.
    pub(crate) fn note(&self, words: &[u64]) {
        if self.stepped {
            let mix =
                |hash: u64, word: &u64| (hash.rotate_left(5) ^ word).wrapping_mul(0x517C_C1B7_2722_0A95);
            let hash = words.iter().fold(self.hash.load(Ordering::Relaxed), mix);
            self.hash.store(hash, Ordering::Relaxed);
        }
    }

    /// Does [`note`](Shared::note), with bytes.
    pub(crate) fn note_bytes(&self, words: &[u64], bytes: &[u8]) {
        if self.stepped {
            self.note(words);
            let (whole, rest) = bytes.as_chunks();
            whole.iter().for_each(|word| self.note(&[u64::from_le_bytes(*word)]));
            rest.iter().for_each(|byte| self.note(&[u64::from(*byte)]));
        }
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash.load(Ordering::Relaxed)
    }
}

/// The state under its lock. Wakers are called once the lock is free: they may drop a socket.
pub(crate) struct StateGuard<'a> {
    state: Option<MutexGuard<'a, State>>,
}

impl Deref for StateGuard<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        self.state.as_ref().expect("it is taken by wait and drop alone")
    }
}

impl DerefMut for StateGuard<'_> {
    fn deref_mut(&mut self) -> &mut State {
        self.state.as_mut().expect("it is taken by wait and drop alone")
    }
}

impl Drop for StateGuard<'_> {
    fn drop(&mut self) {
        let Some(mut state) = self.state.take() else { return };
        let wakes = mem::take(&mut state.wakes);
        drop(state);
        wakes.into_iter().for_each(Waker::wake);
    }
}
