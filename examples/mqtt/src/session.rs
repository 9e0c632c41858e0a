//! What the home of a client keeps of it, connected or not, and what shards tell each other.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ringserve::{ConnId, task::JoinHandle};

use crate::packet::{Publication, Will};
use crate::topics::{Options, Stamp};

/// A connection: its shard, and its name there.
pub type Place = (usize, ConnId);

/// A client, connected or not.
pub struct Session {
    pub id: Arc<str>,
    pub state: RefCell<State>,
}

#[derive(Default)]
pub struct State {
    pub connection: Option<Place>,
    pub in_flight_max: usize,
    pub filters: BTreeMap<Arc<str>, Options>,
    /// Messages that wait, those first that were sent on a connection before.
    pub waiting: VecDeque<Kept>,
    pub in_flight: VecDeque<Kept>,
    /// Of filters, and of messages that wait or are in flight.
    pub bytes: usize,
    pub will_bytes: usize,
    pub last_id: u16,
    pub expiry: Duration,
    pub will: Option<Will>,
    /// Publishes the will, then ends the session.
    pub timer: Option<JoinHandle<()>>,
}

/// A message of QoS 1 that is kept until it is acknowledged. It has an id once it was sent.
pub struct Kept {
    pub id: Option<u16>,
    pub retain: bool,
    pub publication: Arc<Publication>,
}

/// A client that connects to a session.
#[derive(Clone)]
pub struct Attach {
    pub id: Arc<str>,
    pub connection: ConnId,
    pub is_clean: bool,
    pub expiry: Duration,
    pub in_flight_max: usize,
    pub will: Option<Will>,
}

/// How a connection ended.
#[derive(Clone, Copy, Default)]
pub struct Goodbye {
    pub drops_will: bool,
    pub expiry: Option<Duration>,
}

/// What shards tell each other.
#[derive(Clone)]
pub enum Message {
    Publish(Arc<Publication>, Stamp),
    // To the home of a session, from the shard of its client:
    Attach(Box<Attach>),
    Subscribe(Arc<str>, ConnId, Vec<(Arc<str>, Options)>),
    Unsubscribe(Arc<str>, ConnId, Vec<Arc<str>>),
    /// Send retained messages that a filter matches, behind a topic.
    Retained(Arc<str>, ConnId, Arc<str>, Bytes),
    Acknowledged(Arc<str>, ConnId, u16),
    Detach(Arc<str>, ConnId, Goodbye),
    // To the shard of a client, from the home of its session:
    Deliver {
        connection: ConnId,
        id: u16,
        dup: bool,
        retain: bool,
        publication: Arc<Publication>,
    },
    /// Another connection has the session now.
    Evict(ConnId),
}

/// What a home answers; of all this what was asked for.
#[derive(Default)]
pub struct Answer {
    pub is_present: bool,
    pub filters: Vec<(Arc<str>, Options)>,
    /// The code of each filter, and whether it is new.
    pub codes: Vec<(u8, bool)>,
    /// Behind which topic there may be more retained messages.
    pub next: Option<Bytes>,
}
