//! The events of a run: a running hash of all of them, and, if they are kept, a line for each.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt::{self, Write as _};
use std::net::SocketAddr;
use std::time::Duration;

use ringserve_base::clock::VirtualTime;

/// Events that are kept: those of the end, and some before.
const KEPT: usize = 4000;

/// Lines of a report.
const SHOWN: usize = 40;

/// The last events of a run, for printing them after a failure.
pub(crate) struct Trace {
    time: VirtualTime,
    hash: Cell<u64>,
    keeps: Keeps,
    events: RefCell<VecDeque<Event>>,
    /// The connection that the run is about at the moment, by its client's address.
    subject: Cell<Option<SocketAddr>>,
    /// The first rule that was broken.
    broken: RefCell<Option<String>>,
}

/// The kept events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keeps {
    /// Their hash.
    Hash,
    /// The last ones.
    Events,
    /// All, on the screen.
    Prints,
}

/// The place of an event.
#[derive(Clone)]
pub(crate) enum TracePlace {
    /// In the test, or to the world.
    World,
    Client(std::rc::Rc<str>),
    Shard(usize),
}

struct Event {
    at: Duration,
    place: TracePlace,
    connection: Option<SocketAddr>,
    what: String,
}

impl Trace {
    pub(crate) fn new(time: VirtualTime, keeps: Keeps) -> Trace {
        Trace {
            time,
            hash: Cell::new(0),
            keeps,
            events: RefCell::default(),
            subject: Cell::new(None),
            broken: RefCell::default(),
        }
    }

    /// Takes numbers into the hash.
    pub(crate) fn hash(&self, words: &[u64]) {
        let mut hash = self.hash.get();
        for word in words {
            hash = (hash ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23);
        }
        self.hash.set(hash);
    }

    pub(crate) fn hash_so_far(&self) -> u64 {
        self.hash.get()
    }

    /// An event, whose text is made where it is kept.
    pub(crate) fn event(
        &self,
        place: &TracePlace,
        connection: Option<SocketAddr>,
        what: impl FnOnce() -> String,
    ) {
        if self.keeps != Keeps::Hash {
            self.keep(place, connection, what());
        }
    }

    fn keep(&self, place: &TracePlace, connection: Option<SocketAddr>, what: String) {
        let event = Event { at: self.time.now(), place: place.clone(), connection, what };
        if self.keeps == Keeps::Prints {
            println!("{event}");
        }
        let mut events = self.events.borrow_mut();
        if events.len() == KEPT {
            events.pop_front();
        }
        events.push_back(event);
    }

    /// Later events are about this connection.
    pub(crate) fn set_subject(&self, connection: Option<SocketAddr>) {
        self.subject.set(connection);
    }

    pub(crate) fn subject(&self) -> Option<SocketAddr> {
        self.subject.get()
    }

    /// A rule was broken. The first one counts.
    pub(crate) fn broke(&self, rule: impl FnOnce() -> String) {
        self.broken.borrow_mut().get_or_insert_with(rule);
    }

    pub(crate) fn take_broken(&self) -> Option<String> {
        self.broken.borrow_mut().take()
    }

    /// The last events of the connection that the run was about, and of what is no connection's; or
    /// of all.
    pub(crate) fn chart(&self) -> String {
        let (events, subject) = (self.events.borrow(), self.subject.get());
        let concerns =
            |event: &&Event| subject.is_none() || event.connection.is_none() || event.connection == subject;
        let mut last: Vec<&Event> = events.iter().rev().filter(concerns).take(SHOWN).collect();
        last.reverse();
        let mut text = String::new();
        if let Some(subject) = subject {
            let _ = writeln!(text, "the last events of the connection of {subject}:");
        } else if !last.is_empty() {
            let _ = writeln!(text, "the last events:");
        }
        for event in last {
            let _ = writeln!(text, "{event}");
        }
        text
    }
}

/// Time, then three columns: the world, clients, shards.
impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>15.6} s  ", self.at.as_secs_f64())?;
        match &self.place {
            TracePlace::World => write!(f, "{}", self.what)?,
            TracePlace::Client(name) => write!(f, "  {name:<10} {}", self.what)?,
            TracePlace::Shard(shard) => write!(f, "{:>34} {shard}: {}", "│ shard", self.what)?,
        }
        match self.connection {
            Some(connection) => write!(f, "  ({connection})"),
            None => Ok(()),
        }
    }
}
