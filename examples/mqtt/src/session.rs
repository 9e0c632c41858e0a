//! What the home of a session keeps of it.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ringserve::ConnHandle;
use ringserve::task::JoinHandle;

use crate::packet::{Connect, Publication};

pub type Session = RefCell<State>;

/// What the home of a client keeps of it, connected or not.
#[derive(Default)]
pub struct State {
    pub id: Arc<str>,
    pub connection: Option<(ConnHandle, Arc<Connect>)>,
    /// The connection has no room. A task goes on once it has.
    pub is_stalled: bool,
    pub filters: BTreeSet<Arc<str>>,
    /// Messages that wait, those first that were sent on a connection before.
    pub waiting: VecDeque<Kept>,
    pub in_flight: VecDeque<Kept>,
    /// What is published if the client is lost.
    pub will: Option<Publication>,
    /// Of filters and of messages.
    pub bytes: usize,
    pub last_id: u16,
    /// How long it outlives its connection, and the task that ends it then.
    pub expiry: Duration,
    pub timer: Option<JoinHandle<()>>,
}

/// A message for a client. One of QoS 1 is kept until it is acknowledged.
pub struct Kept {
    pub publication: Arc<Publication>,
    pub flags: u8,
    /// 0 until it is sent with QoS 1.
    pub id: u16,
}

/// The packets that were made last, by version and flags, each with its message, id and time left: clients that are sent the
/// same share it.
pub type Made = BTreeMap<(bool, u8), (Arc<Publication>, u16, Option<Duration>, Bytes)>;
