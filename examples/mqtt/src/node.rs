//! One shard: what it hears from the others, and how a message comes to all of them.
//!
//! ```text
//!   PUBLISH ─────────────────────────────▶ every shard ──▶ the sessions at home there ──▶ their connections
//!      └─ retained ─▶ shard of the topic ──────┘
//!   SUBSCRIBE, PUBACK, .. ──▶ shard of the client id, the home of its session
//! ```
//!
//! A session never moves, so none is lost on the way. A retained message goes to all shards from the one that its topic's hash
//! says: they hear of it in one order and all keep the same, whatever becomes of its publisher meanwhile.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use ringserve::sync::{Mesh, Reply, Sending};
use ringserve::task::JoinHandle;
use ringserve::topics::Filters;
use ringserve::{ConnHandle, ConnId, Shard};

use crate::packet::{Connect, Publication, Read, Reason};

/// Messages that may wait for a shard, each a packet at most.
pub const MESSAGES_MAX: usize = 1024;
/// Bytes that a retained message counts for at least, so that a subscriber of all topics has few enough of them looked at.
const RETAINED_BYTES_MIN: usize = 4096;

/// Options of a subscription.
const NO_LOCAL: u8 = 4;
const RETAIN_AS_PUBLISHED: u8 = 8;

/// What a shard keeps at most.
#[derive(Args, Clone)]
pub struct Bounds {
    /// Sessions of a shard at most, of clients that are connected or were.
    #[arg(long, default_value_t = 100_000, value_name = "N")]
    pub sessions_max: usize,
    /// Bytes of filters and of messages that wait for a client at most, each message with 128 more.
    #[arg(long, default_value_t = 1 << 20, value_name = "BYTES")]
    pub session_bytes_max: usize,
    /// The same of all sessions of a shard.
    #[arg(long, default_value_t = 256 << 20, value_name = "BYTES")]
    pub sessions_bytes_max: usize,
    /// Bytes of retained messages at most, each counted as 4 KiB at least. Every shard has its part, for its topics.
    #[arg(long, default_value_t = 64 << 20, value_name = "BYTES")]
    pub retained_bytes_max: usize,
}

/// What shards tell each other.
pub enum Message {
    /// From the shard of a publisher, or of a topic: for the sessions at home here.
    Route(Arc<Publication>),
    /// To the shard of its topic: for all shards.
    Retain(Arc<Publication>),
    /// To the home of a session: a client connects to it.
    Attach(ConnHandle, Arc<Connect>),
    /// To the home of a session, from a connection.
    Session(Arc<str>, ConnId, Request),
}

pub enum Request {
    /// With the options behind the filter.
    Subscribe(Arc<str>, u8),
    Unsubscribe(Arc<str>),
    Acknowledged(u16),
    /// The connection ended.
    Closed(Goodbye),
}

/// What a client said before its connection ended: that its will is dropped, and how long the session lasts.
#[derive(Clone, Copy, Default)]
pub struct Goodbye {
    pub drops_will: bool,
    pub expiry: Option<Duration>,
}

/// The code for a filter, or 0.
pub type Answer = Read<u8>;

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

/// A session, and the options of its subscription.
pub type Subscriber = (Rc<Session>, u8);

pub struct Node {
    pub shard: Shard,
    pub mesh: Mesh<Message, Answer>,
    pub bounds: Bounds,
    pub sessions: RefCell<BTreeMap<Arc<str>, Rc<Session>>>,
    /// The filters of these sessions, by client id.
    pub filters: RefCell<Filters<Arc<str>, Subscriber>>,
    /// Bytes that these sessions keep.
    pub kept_bytes: Cell<usize>,
    pub made: RefCell<Made>,
    /// The last retained message of each topic. Every shard has all of them, and they share the memory of the messages.
    pub retained: RefCell<BTreeMap<Arc<str>, Arc<Publication>>>,
    /// Bytes of those whose topics fall to this shard.
    retained_bytes: Cell<usize>,
}

impl Node {
    pub fn new(shard: &Shard, mesh: &Mesh<Message, Answer>, bounds: &Bounds) -> Rc<Node> {
        let (shard, mesh, bounds) = (shard.clone(), mesh.clone(), bounds.clone());
        let (sessions, filters, kept_bytes, made, retained, retained_bytes) = Default::default();
        let all = Node { shard, mesh, bounds, sessions, filters, kept_bytes, made, retained, retained_bytes };
        let node = Rc::new(all);
        let here = node.clone();
        // Sessions hear from connections alone, which are on shards.
        node.mesh.register_with_reply(&node.shard, move |from, message, reply| {
            here.handle(from.unwrap_or_default(), message, reply);
        });
        node
    }

    fn handle(self: &Rc<Self>, from: usize, message: Message, reply: Reply<Answer>) {
        let mut answer = Ok(0);
        match message {
            Message::Retain(publication) => return self.retain(publication, reply),
            Message::Route(publication) => self.route(&publication),
            Message::Attach(connection, client) => answer = self.attach(connection, client),
            Message::Session(id, connection, request) => match self.session(&id, from, connection) {
                Some(session) => answer = Ok(self.serve(&session, request)),
                None => answer = Err(Reason::TakenOver),
            },
        }
        reply.answer(answer);
    }

    /// Tells the session of a connection something, without an answer.
    pub fn tell(&self, client: &Connect, connection: ConnId, request: Request) -> Sending<Message> {
        self.mesh
            .send(self.mesh.shard_of(&*client.id), Message::Session(client.id.clone(), connection, request))
    }

    /// Asks the shard of a client id, or of a topic.
    pub async fn ask(&self, name: &str, message: Message) -> Answer {
        let answer = self.mesh.ask_waiting(self.mesh.shard_of(name), message).await;
        answer.unwrap_or(Err(Reason::ServerBusy))
    }

    /// Brings a message to all shards: each of them has it, or has it in its mailbox, when this returns.
    ///
    /// # Errors
    /// If it is to be retained, and there is no room for it. No shard has it then.
    pub async fn publish(self: &Rc<Self>, mut publication: Publication) -> Read<()> {
        publication.expires = publication.lifetime.map(|lifetime| self.shard.now() + lifetime);
        let publication = Arc::new(publication);
        if publication.retain {
            let topic = publication.topic.clone();
            return self.ask(&topic, Message::Retain(publication)).await.map(drop);
        }
        self.fan_out(publication).await;
        Ok(())
    }

    fn retain(self: &Rc<Self>, publication: Arc<Publication>, reply: Reply<Answer>) {
        let bytes = |kept: &Publication| kept.bytes().max(RETAINED_BYTES_MIN);
        let before = self.retained.borrow().get(&publication.topic).map_or(0, |kept| bytes(kept));
        let after = if publication.payload.is_empty() { 0 } else { bytes(&publication) };
        let all = self.retained_bytes.get() - before + after;
        if after > before && all > self.bounds.retained_bytes_max / self.shard.count() {
            return reply.answer(Err(Reason::QuotaExceeded));
        }
        self.retained_bytes.set(all);
        let sent = self.fan_out(publication);
        // Not by the connection of the publisher, which may end on the way.
        self.shard.spawn(async move {
            sent.await;
            reply.answer(Ok(0));
        });
    }

    /// The message has its place in the order of each shard when this returns, and room there once the future is done.
    fn fan_out(self: &Rc<Self>, publication: Arc<Publication>) -> impl Future<Output = ()> + use<> {
        let (here, count) = (self.shard.index(), self.shard.count());
        let others = (0..count).filter(|shard| *shard != here);
        let sent = others.map(|shard| self.mesh.send(shard, Message::Route(publication.clone())));
        let sent: Vec<_> = sent.collect();
        self.route(&publication);
        async {
            for sending in sent {
                // A shard ends with the server.
                let _ended = sending.await;
            }
        }
    }

    /// Hands a message to the sessions at home here.
    fn route(self: &Rc<Self>, publication: &Arc<Publication>) {
        let Publication { topic, retain, payload, from, .. } = &**publication;
        if *retain && payload.is_empty() {
            self.retained.borrow_mut().remove(topic);
        } else if *retain {
            self.retained.borrow_mut().insert(topic.clone(), publication.clone());
        }
        self.filters.borrow().matching(topic, |id, (session, options)| {
            if options & NO_LOCAL == 0 || id != from {
                let is_retained = options & RETAIN_AS_PUBLISHED != 0 && *retain;
                self.keep(session, publication, *options, is_retained);
            }
        });
    }
}
