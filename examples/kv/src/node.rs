//! What a shard has: its connections, the replies they wait for, and its ways to other shards.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

use ringserve::sync::{Mesh, Notify};
use ringserve::time::Time;
use ringserve::{Cx, LocalHandle, Opening, Shard, SharedPayload};

use crate::queue::{Batch, Queue};
use crate::resp::{Out, Part};
use crate::store::{Keyer, Store};

/// How shards reach each other: with requests about keys, and to tell something of themselves.
#[derive(Clone)]
pub struct Ways {
    pub work: Mesh<Batch, Batch>,
    pub about: Mesh<About, Rows>,
}

pub type Listeners = RefCell<BTreeMap<Vec<u8>, Vec<Rc<Client>>>>;

/// One shard: its keys, its connections, and its ways to the others.
pub struct Node {
    pub shard: Shard,
    pub keyer: Keyer,
    pub store: RefCell<Store>,
    pub clients: RefCell<BTreeMap<u64, Rc<Client>>>,
    /// Who listens to each channel, and to each pattern.
    pub listeners: [Listeners; 2],
    pub opened: Cell<u64>,
    pub commands: Cell<u64>,
    pub started: Time,
    pub value_bytes_max: usize,
    pub ways: Ways,
    /// Queues without anything in them.
    pub spare: RefCell<Vec<Rc<Pending>>>,
}

/// A connection, as the framework keeps it.
pub struct Session {
    pub client: Rc<Client>,
    pub queue: RefCell<Option<Rc<Pending>>>,
}

impl ringserve::Session for Session {}

/// The replies that a connection waits for.
pub struct Pending {
    pub queue: RefCell<Queue>,
    /// Calls behind it, which go on one after the other when nothing is due any more.
    pub waiting: Cell<usize>,
    pub next: Notify,
}

/// What shards tell of themselves: connections with their numbers, channels and patterns with the count of who listens, figures.
#[derive(Clone, Copy)]
pub enum About {
    Clients(u64),
    Listeners(usize),
    Figures,
}

pub type Rows = Vec<(Vec<u8>, i64)>;

/// A connection.
pub struct Client {
    pub id: u64,
    pub addr: String,
    pub opened: Time,
    pub handle: LocalHandle,
    pub resp3: Cell<bool>,
    /// True while replies wait in its queue, or it listens and may not do everything.
    pub is_busy: Cell<bool>,
    /// Its name, and name and version of its library.
    pub names: RefCell<[Vec<u8>; 3]>,
    /// Channels and patterns that it listens to.
    pub listens: RefCell<[BTreeSet<Vec<u8>>; 2]>,
    /// Messages that wait until it has read others.
    pub mail: RefCell<VecDeque<Rc<SharedPayload>>>,
    pub mail_bytes: Cell<usize>,
}

impl Client {
    pub fn new(id: u64, opening: &Opening<'_>) -> Rc<Client> {
        let (resp3, is_busy, names, listens, mail, mail_bytes) = Default::default();
        let (addr, opened, handle) =
            (opening.peer().to_string(), opening.shard().now(), opening.local_handle());
        Rc::new(Client { id, addr, opened, handle, resp3, is_busy, names, listens, mail, mail_bytes })
    }

    pub fn listens(&self) -> bool {
        self.listens.borrow().iter().any(|names| !names.is_empty())
    }

    /// Nothing waits in its queue any more.
    pub fn rest(&self) {
        self.is_busy.set(self.listens() && !self.resp3.get());
    }
}

pub fn say(cx: &Cx<'_, Session>, part: Part<'_>) {
    cx.write_with(|out| out.part(part, cx.session().client.resp3.get()));
}

pub fn wrong_arguments(command: &str) -> String {
    format!("ERR wrong number of arguments for '{command}' command")
}
