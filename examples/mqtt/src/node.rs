//! One shard: the clients that are connected to it, the sessions whose home it is, and what shards tell each other.
//!
//! ```text
//!   PUBLISH ──▶ every shard ─┬─▶ its connections, with QoS 0: encoded once for all that take it in one form
//!                            └─▶ its sessions, with QoS 1: kept until acknowledged ──▶ the shard of the connection
//! ```
//!
//! A session never moves, so none is lost on the way: its home is the shard that the hash of the client id says, and all that
//! concerns it goes there in order.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use clap::{Args, value_parser};
use ringserve::sync::{AskError, Mesh, SendError};
use ringserve::{ConnId, LocalHandle, PushError, Shard};

use crate::packet::{Form, Publication, Publish, Read, Reason, Version, packet};
use crate::session::{Answer, Message, Session};
use crate::topics::{Filters, Options, Retained, Stamp};

/// Between two attempts to ask a shard that has too many questions, and between two looks at retained messages.
const PAUSE: Duration = Duration::from_millis(2);
/// The same at most, where looks find that a client still has no room: it may acknowledge nothing for ever.
const PAUSE_MAX: Duration = Duration::from_millis(256);

/// What one shard keeps at most.
#[derive(Args, Clone)]
pub struct Bounds {
    /// Bytes of a packet at most.
    #[arg(long, default_value_t = 256 << 10, value_name = "BYTES", value_parser = value_parser!(u32).range(1024..=(256 << 20)))]
    pub packet_bytes_max: u32,
    /// Sessions of each shard at most, of clients that are connected or were.
    #[arg(long, default_value_t = 100_000, value_name = "N")]
    pub sessions_max: usize,
    /// Seconds for which a session outlives its connection at most, up to a day.
    #[arg(long, default_value_t = 86_400, value_name = "SECONDS", value_parser = value_parser!(u32).range(..=86_400))]
    pub session_expiry_max: u32,
    /// Bytes of filters and of messages that wait for a client at most, each with 128 more; never less than two
    /// packets.
    #[arg(long, default_value_t = 1 << 20, value_name = "BYTES")]
    session_bytes_max: usize,
    /// Bytes of filters, of messages that wait and of wills that each shard keeps at most.
    #[arg(long, default_value_t = 256 << 20, value_name = "BYTES")]
    pub sessions_bytes_max: usize,
    /// Filters of a client at most.
    #[arg(long, default_value_t = 100, value_name = "N")]
    pub filters_max: usize,
    /// Bytes of retained messages at most, each with 128 more.
    #[arg(long, default_value_t = 64 << 20, value_name = "BYTES")]
    pub retained_bytes_max: usize,
}

impl Bounds {
    /// With room for the largest message beside filters.
    pub fn session_bytes_max(&self) -> usize {
        self.session_bytes_max.max(2 * self.packet_bytes_max as usize)
    }
}

/// A connection, from its CONNECT on.
pub struct Client {
    pub id: Arc<str>,
    pub home: usize,
    pub version: Version,
    pub handle: LocalHandle,
    pub packet_bytes_max: usize,
    /// Its session goes on for a while when the connection ends.
    pub outlives: bool,
    /// It was sent its CONNACK.
    pub is_welcome: Cell<bool>,
    pub filters: RefCell<BTreeSet<Arc<str>>>,
    /// Messages of QoS 1 that its outbox has no room for. Its session bounds them.
    waiting: RefCell<VecDeque<(Rc<Publish>, u16)>>,
    /// The ids of those that it was sent and did not acknowledge.
    sent: RefCell<VecDeque<u16>>,
    is_busy: Cell<bool>,
    /// Filters of which it is to be sent the retained messages, and the QoS of each.
    wanted: RefCell<VecDeque<(Arc<str>, u8)>>,
    /// That has begun.
    is_asking: Cell<bool>,
}

impl Client {
    /// One that is not welcome yet.
    pub fn new(
        (id, home): (Arc<str>, usize),
        version: Version,
        handle: LocalHandle,
        packet_bytes_max: usize,
        outlives: bool,
    ) -> Rc<Client> {
        let (filters, waiting, sent, wanted, is_welcome, is_asking) = Default::default();
        let is_busy = Cell::new(true);
        Rc::new(Client {
            id,
            home,
            version,
            handle,
            packet_bytes_max,
            outlives,
            is_welcome,
            filters,
            waiting,
            sent,
            is_busy,
            wanted,
            is_asking,
        })
    }

    /// Has it be sent the retained messages of these filters. True if that has to be begun.
    pub fn wants_retained(&self, filters: Vec<(Arc<str>, u8)>, filters_max: usize) -> Read<bool> {
        let mut wanted = self.wanted.borrow_mut();
        wanted.extend(filters);
        match wanted.len() {
            0 => Ok(false),
            len if len > filters_max => Err(Reason::QuotaExceeded),
            _ => Ok(!self.is_asking.replace(true)),
        }
    }

    /// Sends what waits, as the client reads.
    pub async fn catch_up(self: Rc<Client>) {
        self.is_busy.set(true);
        while let Some((publish, id)) = { self.waiting.borrow().front().cloned() } {
            self.handle.ready().await;
            if self.push(&publish, id) {
                self.waiting.borrow_mut().pop_front();
            }
        }
        self.is_busy.set(false);
    }

    /// Sends a message with QoS 1. False if there is no room for it.
    fn push(&self, publish: &Publish, id: u16) -> bool {
        let fits = publish.push(&self.handle, Some(id)) != Err(PushError::Full);
        self.sent.borrow_mut().extend(fits.then_some(id));
        fits
    }

    /// Takes an acknowledgement. False for what was not sent yet: if that counted, more and more would wait here.
    pub fn acknowledges(&self, id: u16) -> bool {
        let mut sent = self.sent.borrow_mut();
        let place = sent.iter().position(|sent| *sent == id);
        place.and_then(|place| sent.remove(place)).is_some()
    }

    /// Closes the connection, after the code that version 5 has for the reason, and its name.
    pub fn disconnect(&self, reason: Reason) {
        if self.is_welcome.get() && self.version == Version::Five {
            let name = format!("{reason:?}");
            let mut body =
                [&[reason as u8, name.len() as u8 + 3, 0x1F, 0, name.len() as u8], name.as_bytes()].concat();
            if body.len() + 2 > self.packet_bytes_max {
                body.truncate(1);
            }
            let _full_or_gone = self.handle.push_raw(packet(0xE0, &body));
        }
        self.handle.close();
    }
}

type Subscribers<K, S> = RefCell<Filters<K, (Rc<S>, Options)>>;

/// The last message that was sent, in each form.
#[derive(Default)]
struct Encoded {
    of: Arc<Publication>,
    forms: Vec<(Form, Rc<Publish>)>,
}

pub struct Node {
    pub shard: Shard,
    pub bounds: Bounds,
    mesh: Mesh<Message, Read<Answer>>,
    pub clients: RefCell<BTreeMap<ConnId, Rc<Client>>>,
    /// Filters of the clients that are connected here.
    pub filters: Subscribers<ConnId, Client>,
    pub sessions: RefCell<BTreeMap<Arc<str>, Rc<Session>>>,
    /// Those filters of sessions that take QoS 1.
    pub kept: Subscribers<Arc<str>, Session>,
    pub kept_bytes: Cell<usize>,
    pub retained: RefCell<Retained>,
    published: Cell<u64>,
    encoded: RefCell<Encoded>,
}

impl Node {
    pub fn new(shard: &Shard, mesh: &Mesh<Message, Read<Answer>>, bounds: Bounds) -> Rc<Node> {
        let (clients, filters, sessions, kept, kept_bytes, published, encoded) = Default::default();
        let retained = RefCell::new(Retained::new(bounds.retained_bytes_max));
        let (shard, mesh) = (shard.clone(), mesh.clone());
        let node = Rc::new(Node {
            shard,
            bounds,
            mesh,
            clients,
            filters,
            sessions,
            kept,
            kept_bytes,
            retained,
            published,
            encoded,
        });
        let here = node.clone();
        // Sessions hear from connections alone, which are on shards.
        node.mesh.register(&node.shard, move |from, message| here.handle(from.unwrap_or_default(), message));
        node
    }

    fn handle(self: &Rc<Self>, from: usize, message: Message) -> Read<Answer> {
        match message {
            Message::Publish(publication, stamp) => self.route(&publication, stamp),
            Message::Attach(attach) => return self.attach(from, *attach),
            Message::Subscribe(id, at, filters) => return self.subscribe(&id, (from, at), filters),
            Message::Unsubscribe(id, at, filters) => return self.unsubscribe(&id, (from, at), &filters),
            Message::Retained(id, at, filter, after) => {
                return self.send_retained(&id, (from, at), &filter, after);
            }
            Message::Acknowledged(id, at, packet) => self.acknowledged(&id, (from, at), packet),
            Message::Detach(id, at, goodbye) => self.detach(&id, (from, at), goodbye),
            Message::Deliver { connection, id, dup, retain, publication } => {
                if let Some(client) = self.client(connection) {
                    self.deliver(&client, id, &publication, (dup, retain));
                }
            }
            Message::Evict(connection) => {
                if let Some(client) = self.client(connection) {
                    client.disconnect(Reason::TakenOver);
                }
            }
        }
        Ok(Answer::default())
    }

    fn client(&self, connection: ConnId) -> Option<Rc<Client>> {
        self.clients.borrow().get(&connection).cloned()
    }

    /// Asks a shard, also this one.
    pub async fn ask(&self, shard: usize, message: Message) -> Read<Answer> {
        loop {
            match self.mesh.ask(shard, message.clone()).await {
                Ok(answer) => return answer,
                Err(AskError::Full) => self.shard.sleep(PAUSE).await,
                Err(_) => return Err(Reason::ServerBusy),
            }
        }
    }

    /// Tells a shard, once it has room.
    pub async fn tell(self: &Rc<Self>, shard: usize, message: Message) {
        if shard == self.shard.index() {
            let _done = self.handle(shard, message);
        } else {
            let _ended = self.mesh.send(shard, message).await;
        }
    }

    /// Tells a shard without waiting: for what sessions and connections bound.
    pub fn post(self: &Rc<Self>, shard: usize, message: Message) {
        if shard == self.shard.index() {
            let _done = self.handle(shard, message);
        } else {
            self.post_behind(shard, message);
        }
    }

    /// The same, behind what that shard was asked before, also if it is this one.
    pub fn post_behind(&self, shard: usize, message: Message) {
        if let Err(SendError::Full(message)) = self.mesh.try_send(shard, message) {
            self.shard.spawn(self.mesh.send(shard, message));
        }
    }

    /// Whether a message may be retained.
    pub fn has_room(&self, publication: &Publication) -> bool {
        self.retained.borrow_mut().has_room(publication, self.shard.now())
    }

    /// Brings a message to all shards. With QoS 1 each of them has it when this returns.
    pub async fn publish(self: &Rc<Self>, publication: Arc<Publication>) -> Read<()> {
        let (here, count) = (self.shard.index(), self.shard.count());
        self.published.update(|published| published + 1);
        // Retained messages alone are compared.
        let now = if publication.retain { self.shard.now() } else { Default::default() };
        let stamp = (now, self.published.get(), here);
        if publication.qos == 0 || count == 1 {
            self.route(&publication, stamp);
            for shard in (0..count).filter(|shard| *shard != here) {
                self.tell(shard, Message::Publish(publication.clone(), stamp)).await;
            }
            return Ok(());
        }
        let told = self.mesh.on_all(|_| Message::Publish(publication.clone(), stamp)).await;
        for (shard, told) in told.into_iter().enumerate() {
            if told.is_err() {
                self.ask(shard, Message::Publish(publication.clone(), stamp)).await?;
            }
        }
        Ok(())
    }

    /// Hands a message out on this shard.
    fn route(self: &Rc<Self>, publication: &Arc<Publication>, stamp: Stamp) {
        if publication.retain {
            self.retained.borrow_mut().set(stamp, publication);
        }
        let is_wanted = |id: &str, options: Options| !(options.no_local() && *id == *publication.from);
        self.filters.borrow().matching(&publication.topic, &mut |(client, options)| {
            if options.qos().min(publication.qos) == 0 && is_wanted(&client.id, *options) {
                self.send(client, publication, options.keeps_retain() && publication.retain);
            }
        });
        if publication.qos > 0 {
            self.kept.borrow().matching(&publication.topic, &mut |(session, options)| {
                if is_wanted(&session.id, *options) {
                    self.keep(session, publication, options.keeps_retain() && publication.retain);
                }
            });
        }
    }

    /// Has a client that is connected here hear what a filter matches.
    pub fn listen(&self, client: &Rc<Client>, filter: Arc<str>, options: Options) {
        self.filters.borrow_mut().insert(&filter, client.handle.id(), (client.clone(), options));
        client.filters.borrow_mut().insert(filter);
    }

    /// Sends a message with QoS 0. False if the client reads too slowly: then it is dropped.
    fn send(&self, client: &Client, publication: &Arc<Publication>, retain: bool) -> bool {
        let publish = self.encode(publication, Form { version: client.version, qos: 0, retain, dup: false });
        let fits = publish.bytes() <= client.packet_bytes_max && !publication.is_over(&self.shard);
        !fits || !client.is_welcome.get() || publish.push(&client.handle, None) != Err(PushError::Full)
    }

    /// Sends a client the retained messages of its filters, each with the QoS that it was granted, as it reads.
    pub async fn send_all_retained(self: Rc<Self>, client: Rc<Client>) {
        while let Some((filter, qos)) = { client.wanted.borrow_mut().pop_front() } {
            let mut next = Some(Bytes::new());
            while let Some(after) = next {
                client.handle.ready().await;
                next = self.retained.borrow().matching(&filter, after, |publication| {
                    publication.qos.min(qos) > 0 || self.send(&client, publication, true)
                });
                if next.is_some() {
                    self.shard.sleep(PAUSE).await;
                }
            }
            let mut pause = PAUSE;
            next = (qos > 0).then(Bytes::new);
            while let Some(after) = next {
                let (id, connection) = (client.id.clone(), client.handle.id());
                let message = Message::Retained(id, connection, filter.clone(), after.clone());
                next = self.ask(client.home, message).await.unwrap_or_default().next;
                if let Some(next) = &next {
                    pause = if *next == after { PAUSE_MAX.min(2 * pause) } else { PAUSE };
                    self.shard.sleep(pause).await;
                }
            }
        }
        client.is_asking.set(false);
    }

    /// Sends a message with QoS 1, after those that wait for room.
    fn deliver(
        self: &Rc<Self>,
        client: &Rc<Client>,
        id: u16,
        publication: &Arc<Publication>,
        (dup, retain): (bool, bool),
    ) {
        let publish = self.encode(publication, Form { version: client.version, qos: 1, retain, dup });
        if publish.bytes() > client.packet_bytes_max {
            // What a client does not take counts as taken. It is told by a message, since a session may be sending.
            let acknowledged = Message::Acknowledged(client.id.clone(), client.handle.id(), id);
            self.post_behind(client.home, acknowledged);
        } else if client.is_busy.get() || !client.push(&publish, id) {
            client.waiting.borrow_mut().push_back((publish, id));
            if !client.is_busy.replace(true) {
                self.shard.spawn(client.clone().catch_up());
            }
        }
    }

    /// A message as it is sent: made once for all clients of this shard that take it in one form.
    fn encode(&self, publication: &Arc<Publication>, form: Form) -> Rc<Publish> {
        let Encoded { of, forms } = &mut *self.encoded.borrow_mut();
        if !Arc::ptr_eq(of, publication) || publication.expires.is_some() {
            *of = publication.clone();
            forms.clear();
        }
        let known = forms.iter().find(|(of, _)| *of == form).map(|(_, publish)| publish.clone());
        known.unwrap_or_else(|| {
            let publish = Rc::new(Publish::new(publication, form, &self.shard));
            forms.push((form, publish.clone()));
            publish
        })
    }
}
