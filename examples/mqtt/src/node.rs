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
use std::collections::BTreeMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use ringserve::sync::{AskError, Mesh, Reply};
use ringserve::{ConnHandle, ConnId, Shard};

use crate::packet::{Connect, Publication, Read, Reason};
use crate::session::Session;
use crate::topics::{Filters, Retained};

/// Messages that may wait for a shard, each a packet at most.
pub const MESSAGES_MAX: usize = 1024;
/// Between two attempts to ask a shard for which too many messages wait.
const PAUSE: Duration = Duration::from_millis(2);

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
#[derive(Clone)]
pub enum Message {
    /// From the shard of a publisher, or of a topic: for the sessions at home here.
    Route(Arc<Publication>),
    /// To the shard of its topic: for all shards.
    Retain(Arc<Publication>),
    /// To the home of a session: a client connects to it.
    Attach(ConnHandle, Box<Connect>),
    /// To the home of a session, from a connection.
    Session(Arc<str>, ConnId, Request),
}

#[derive(Clone)]
pub enum Request {
    /// With the options behind the filter.
    Subscribe(Arc<str>, u8),
    Unsubscribe(Arc<str>),
    Acknowledged(u16),
    /// The connection ended. A client that said goodbye drops its will, and may say how long the session lasts.
    Closed {
        drops_will: bool,
        expiry: Option<Duration>,
    },
}

/// The code for a filter, or 0.
pub type Answer = Read<u8>;

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
    pub retained: RefCell<Retained>,
    /// Bytes of those whose topics fall to this shard.
    retained_bytes: Cell<usize>,
}

impl Node {
    pub fn new(shard: &Shard, mesh: &Mesh<Message, Answer>, bounds: &Bounds) -> Rc<Node> {
        let (shard, mesh, bounds) = (shard.clone(), mesh.clone(), bounds.clone());
        let (sessions, filters, kept_bytes, retained, retained_bytes) = Default::default();
        let node =
            Rc::new(Node { shard, mesh, bounds, sessions, filters, kept_bytes, retained, retained_bytes });
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
            Message::Attach(connection, connect) => answer = self.attach(connection, connect),
            Message::Session(id, connection, request) => match self.session(&id, from, connection) {
                Some(session) => answer = Ok(self.serve(&session, request)),
                None => answer = Err(Reason::TakenOver),
            },
        }
        reply.answer(answer);
    }

    /// The shard of a client id, or of a topic: the same wherever it is asked for.
    pub fn home_of(&self, name: &[u8]) -> usize {
        let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(name);
        (hash % self.shard.count() as u64) as usize
    }

    /// Asks a shard, once it has room.
    pub async fn ask(&self, shard: usize, message: Message) -> Answer {
        loop {
            match self.mesh.ask(shard, message.clone()).await {
                Ok(answer) => return answer,
                Err(AskError::Full) => self.shard.sleep(PAUSE).await,
                Err(_) => return Err(Reason::ServerBusy),
            }
        }
    }

    /// Brings a message to all shards: each of them has it, or has it in its mailbox, when this returns.
    ///
    /// # Errors
    /// If it is to be retained, and there is no room for it. No shard has it then.
    pub async fn publish(self: &Rc<Self>, mut publication: Publication) -> Read<()> {
        publication.expires = publication.lifetime.map(|lifetime| self.shard.now() + lifetime);
        let publication = Arc::new(publication);
        if publication.retain {
            let first = self.home_of(&publication.topic);
            return self.ask(first, Message::Retain(publication)).await.map(drop);
        }
        self.fan_out(publication).await;
        Ok(())
    }

    fn retain(self: &Rc<Self>, publication: Arc<Publication>, reply: Reply<Answer>) {
        let (before, after) = self.retained.borrow().bytes(&publication);
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
        if publication.retain {
            self.retained.borrow_mut().set(publication);
        }
        self.filters.borrow().matching(&publication.topic, &mut |(session, options)| {
            if options & NO_LOCAL == 0 || session.borrow().id != publication.from {
                let retain = options & RETAIN_AS_PUBLISHED != 0 && publication.retain;
                self.keep(session, publication, *options, retain);
            }
        });
    }
}
