//! Pushes from other threads: announced through a connection's [`RemoteGate`], in transit for a
//! while, delivered by name.

use std::sync::Arc;

use ringserve_core::{ConnId, ConnShared, RemoteGate};

use crate::faults::Fault;
use crate::kernel::State;
use crate::plan::MS;
use crate::service::{self, Session};

/// Handles that are kept; the oldest one is dropped first.
const HANDLES_MAX: usize = 16;

/// A handle of a connection in another thread.
#[derive(Debug)]
struct Handle {
    id: ConnId,
    gate: Arc<RemoteGate>,
    /// Bytes announced and not delivered.
    on_the_way: usize,
}

/// A push in transit.
#[derive(Debug)]
struct Letter {
    due: u64,
    id: ConnId,
    bytes: usize,
}

/// Handles of other threads, and pushes in transit.
#[derive(Debug, Default)]
pub struct Pushes {
    handles: Vec<Handle>,
    letters: Vec<Letter>,
}

type Live = [(ConnId, ConnShared<Session>)];

fn find(live: &Live, id: ConnId) -> Option<&ConnShared<Session>> {
    live.iter().find(|(known, _)| *known == id).map(|(_, shared)| shared)
}

impl Pushes {
    /// Makes a thread get a handle of a connection, or push through one. `live` are the connections
    /// that exist.
    pub fn act(&mut self, state: &mut State, live: &Live) {
        if !state.rng.chance(state.plan.pushes) {
            return;
        }
        if let Some(last) = live.len().checked_sub(1)
            && state.rng.one_in(3)
        {
            let (id, shared) = &live[state.rng.range(0, last as u64) as usize];
            if self.handles.iter().all(|handle| handle.id != *id) {
                if let Some(old) = self.handles.iter().position(|handle| handle.on_the_way == 0)
                    && self.handles.len() >= HANDLES_MAX
                {
                    self.handles.remove(old);
                }
                self.handles.push(Handle { id: *id, gate: shared.gate(), on_the_way: 0 });
            }
        }
        let Some(last) = self.handles.len().checked_sub(1) else { return };
        let handle = state.rng.range(0, last as u64) as usize;
        // A burst, so that pushes in transit count too.
        for _ in 0..state.rng.range(1, 3) {
            self.push(state, live, handle);
        }
    }

    fn push(&mut self, state: &mut State, live: &Live, handle: usize) {
        let handle = &mut self.handles[handle];
        let shared = find(live, handle.id);
        let gone = shared.is_none_or(|shared| shared.is_ending());
        assert_eq!(handle.gate.is_gone(), gone, "{}: gone, or not", handle.id);
        let Some(shared) = shared.filter(|_| !gone) else { return state.cover.fault(Fault::PushGone) };
        let bytes = state.rng.spread(1, state.plan.payload_max as u64) as usize;
        let before = handle.on_the_way + shared.outbox_bytes();
        let fits = before <= state.plan.limits.outbox_bytes_high;
        let announced = handle.gate.announce(bytes);
        assert_eq!(announced, fits, "{}: {before} bytes are there or on the way", handle.id);
        if !announced {
            return state.cover.fault(Fault::PushFull);
        }
        state.cover.fault(Fault::PushAnnounced);
        handle.on_the_way += bytes;
        let due = state.now + state.rng.spread(1000, 20 * MS);
        self.letters.push(Letter { due, id: handle.id, bytes });
    }

    /// Reads the shard's letters. True if there were some.
    pub fn deliver(&mut self, state: &mut State, live: &Live, now: u64) -> bool {
        let before = self.letters.len();
        let (due, later) =
            std::mem::take(&mut self.letters).into_iter().partition(|letter| letter.due <= now);
        self.letters = later;
        let due: Vec<Letter> = due;
        for letter in due {
            match find(live, letter.id) {
                Some(shared) => service::push(state, shared, letter.bytes),
                None => state.cover.fault(Fault::PushTooLate),
            }
            let handle = self.handles.iter_mut().find(|handle| handle.id == letter.id);
            let handle = handle.expect("a handle with something on the way is kept");
            handle.gate.arrived(letter.bytes);
            handle.on_the_way -= letter.bytes;
        }
        before > self.letters.len()
    }

    /// Time at which the next letter is due.
    pub fn next_due(&self) -> u64 {
        self.letters.iter().map(|letter| letter.due).min().unwrap_or(u64::MAX)
    }

    /// Panics unless each account equals the bytes there and in transit.
    pub fn check(&self, state: &State, live: &Live) {
        for Handle { id, gate, on_the_way } in &self.handles {
            // Its numbers have no accessor, so they are read from its text.
            let text = format!("{gate:?}");
            let way = format!(" on_the_way: {on_the_way},");
            assert!(text.contains(&way), "{id}: {on_the_way} bytes are on the way: {text}");
            let Some(shared) = find(live, *id) else {
                assert!(gate.is_gone(), "{id} ended, and is in gate");
                continue;
            };
            let bytes = shared.outbox_bytes();
            let outbox = format!(" outbox_bytes: {bytes},");
            assert!(text.contains(&outbox), "{id}: {bytes} bytes are in the outbox: {text}");
            let high = format!(" outbox_bytes_high: {} ", state.plan.limits.outbox_bytes_high);
            assert!(text.contains(&high), "{id}: {text}");
        }
    }

    /// Ends all: every connection is gone, so pushes in transit arrive nowhere, and no account has
    /// anything left.
    pub fn end(&mut self, state: &mut State) {
        self.deliver(state, &[], u64::MAX);
        assert!(self.handles.iter().all(|handle| handle.on_the_way == 0), "bytes are on the way: {self:?}");
        self.check(state, &[]);
    }
}
