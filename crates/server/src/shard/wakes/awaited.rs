//! Waits for a shard's connections, of tasks anywhere: for room in an outbox, or for the end.
//!
//! A handle leaves a letter for the shard, and the shard keeps it here. So a connection that
//! nothing awaits has no byte for it, and what a turn does to connections takes no lock.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Wake, Waker};

use ringserve_core::{ConnId, Outlet};

use super::notice::{Notices, Notify};

/// The awaited event of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AwaitedEvent {
    /// Room in its outbox, or its end.
    Ready,
    /// Its end.
    Closed,
}

/// By the slots of connections, those that are awaited.
#[derive(Default)]
pub(crate) struct Awaited {
    connections: RefCell<BTreeMap<u32, Waiting>>,
}

/// The waiters of one connection.
#[derive(Default)]
struct Waiting {
    ready: Arc<Room>,
    closed: Notices,
}

/// The waiters for room, as a waker. Its lock is taken where a task begins to wait, and once there
/// is room.
#[derive(Default)]
struct Room(Mutex<Notices>);

impl Wake for Room {
    fn wake(self: Arc<Self>) {
        let notices = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        drop(notices);
    }
}

impl Awaited {
    /// Keeps `notify` until that has happened to a connection. It is given at once if no connection
    /// of that name is left.
    pub(crate) fn wait(&self, outlet: Option<&Outlet>, until: AwaitedEvent, notify: Notify) {
        let Some(outlet) = outlet else { return };
        if until == AwaitedEvent::Ready && (outlet.is_gone() || !outlet.is_full()) {
            return;
        }
        let mut connections = self.connections.borrow_mut();
        let waiting = connections.entry(outlet.id().slot()).or_default();
        match until {
            AwaitedEvent::Closed => waiting.closed.push(notify),
            AwaitedEvent::Ready => {
                let room = waiting.ready.clone();
                drop(connections);
                room.0.lock().unwrap_or_else(PoisonError::into_inner).push(notify);
                outlet.wake_when_ready(&Waker::from(room));
            }
        }
    }

    /// A connection ended.
    pub(crate) fn ended(&self, id: ConnId) {
        let waiting = self.connections.borrow_mut().remove(&id.slot());
        if let Some(waiting) = waiting {
            waiting.ready.wake();
        }
    }

    /// The shard ended.
    pub(crate) fn clear(&self) {
        for waiting in self.connections.take().into_values() {
            waiting.ready.wake();
        }
    }
}
