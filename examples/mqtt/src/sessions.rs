//! One shard: the sessions whose home it is, wherever their clients are connected, and how a
//! message comes to all of them.
//!
//! ```text
//!   PUBLISH ─────────────────────────────▶ every shard ──▶ the sessions at home there ──▶ their connections
//!      └─ retained ─▶ shard of the topic ──────┘
//!   SUBSCRIBE, PUBACK, .. ──▶ shard of the client id, the home of its session
//! ```
//!
//! A session never moves, so none is lost on the way. A retained message goes to all shards from
//! the one that its topic's hash says: they hear of it in one order and all keep the same, whatever
//! becomes of its publisher meanwhile.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::{ops::Bound, rc::Rc, sync::Arc, time::Duration};

use clap::Args;
use ringserve::handle::PushError;
use ringserve::limits::{Capacity, Reservation};
use ringserve::sync::{Mesh, Notify, Reply, SendFuture};
use ringserve::task::{JoinHandle, yield_now};
use ringserve::time::Time;
use ringserve::topics::{Filters, is_filter};
use ringserve::{ConnHandle, Shard};

use crate::packet::{Connect, DUP, EXPIRY_MAX, Goodbye, Publication, QOS_1, Read, Reason};

/// Bytes that a retained message counts for at least, so that a subscriber of all topics has few
/// enough of them looked at.
const RETAINED_BYTES_MIN: usize = 4096;
/// Retained messages that are looked at before others are served.
const LOOKED_AT_ONCE: usize = 256;
/// Bytes that a level of a filter counts for.
const LEVEL_BYTES: usize = 256;

/// Options of a subscription, beside the QoS in the lowest two bits.
const NO_LOCAL: u8 = 4;
const RETAIN_AS_PUBLISHED: u8 = 8;

/// The bounds of what a shard keeps.
#[derive(Args, Clone)]
pub struct Bounds {
    /// Sessions of a shard at most, of clients that are connected or were.
    #[arg(long, default_value_t = 100_000, value_name = "N")]
    sessions_max: usize,
    /// Bytes of filters and of messages that wait for a client at most, each message with 128 more.
    #[arg(long, default_value_t = 1 << 20, value_name = "BYTES")]
    session_bytes_max: usize,
    /// The same of all sessions of a shard.
    #[arg(long, default_value_t = 256 << 20, value_name = "BYTES")]
    sessions_bytes_max: usize,
    /// Bytes of retained messages at most, each counted as 4 KiB at least. Every shard has its
    /// part, for its topics.
    #[arg(long, default_value_t = 64 << 20, value_name = "BYTES")]
    retained_bytes_max: usize,
}

/// A task that a shard carries out for another one, or for itself.
pub type Job = Box<dyn FnOnce(&Rc<Node>, Reply<Answer>) + Send>;

/// The code for a filter, or 0.
pub type Answer = Read<u8>;

pub type Session = RefCell<State>;

/// The state of a client at its home shard, connected or not.
#[derive(Default)]
pub struct State {
    connection: Option<ConnHandle>,
    /// Its last CONNECT.
    client: Arc<Connect>,
    /// The connection has no room. A task goes on once it has.
    is_stalled: bool,
    filters: BTreeMap<Arc<str>, Reservation>,
    /// Messages in their order: first those that were sent on this connection and are not
    /// acknowledged, then those that wait.
    messages: VecDeque<Kept>,
    sent: usize,
    last_id: u16,
    /// The message that is published if the client is lost.
    will: Option<Publication>,
    /// For filters and for messages.
    room: Capacity,
    /// The time for which it outlives its connection.
    expiry: Duration,
    timer: Option<JoinHandle<()>>,
}

/// A message for a client. One of QoS 1 is kept until it is acknowledged.
struct Kept {
    publication: Arc<Publication>,
    flags: u8,
    /// 0 until it is sent with QoS 1, on this connection or an earlier one.
    id: u16,
    _room: Reservation,
}

/// A session, and the options of its subscription.
type Subscriber = (Rc<Session>, u8);

/// A task for the session of a connection, which its CONNECT names, unless another connection has
/// it by then.
pub fn job(client: &Arc<Connect>, job: impl FnOnce(&Rc<Node>, &Rc<Session>) -> u8 + Send + 'static) -> Job {
    let client = client.clone();
    Box::new(move |node, reply| {
        let own = node.session_of(&client);
        reply.answer(own.map(|session| job(node, &session)).ok_or(Reason::TakenOver));
    })
}

/// SUBSCRIBE with one filter. It is answered when the retained messages that it asks for are on
/// their way.
pub fn subscription(client: &Arc<Connect>, filter: Arc<str>, options: u8) -> Job {
    let client = client.clone();
    Box::new(move |node, reply| {
        let Some(session) = node.session_of(&client) else { return reply.answer(Err(Reason::TakenOver)) };
        let (code, is_told) = node.subscribe(&session, &filter, options);
        if !is_told {
            return reply.answer(Ok(code));
        }
        let here = node.clone();
        node.shard.spawn(async move {
            here.tell_retained(&session, &filter, options).await;
            reply.answer(Ok(code));
        });
    })
}

pub struct Node {
    pub shard: Shard,
    mesh: Mesh<Job, Answer>,
    bounds: Bounds,
    sessions: RefCell<BTreeMap<Arc<str>, Rc<Session>>>,
    /// The filters of these sessions, by client id.
    filters: RefCell<Filters<Arc<str>, Subscriber>>,
    /// For all that these sessions keep.
    room: Capacity,
    /// The last retained message of each topic. Every shard has all of them, and they share the
    /// memory of the messages.
    retained: RefCell<BTreeMap<Arc<str>, Arc<Publication>>>,
    /// Bytes of those whose topics fall to this shard.
    retained_bytes: Cell<usize>,
    /// When those that have an end come to it, and what tells that one comes to be the next.
    ends: RefCell<BTreeSet<(Time, Arc<str>)>>,
    sooner: Notify,
}

impl Node {
    pub fn new(shard: &Shard, mesh: &Mesh<Job, Answer>, bounds: &Bounds) -> Rc<Node> {
        let (sessions, filters, retained, retained_bytes, ends, sooner) = Default::default();
        let (shard, mesh, bounds) = (shard.clone(), mesh.clone(), bounds.clone());
        let room = Capacity::new(bounds.sessions_bytes_max);
        let node =
            Node { shard, mesh, bounds, sessions, filters, room, retained, retained_bytes, ends, sooner };
        let node = Rc::new(node);
        node.shard.spawn(node.clone().expire());
        let here = node.clone();
        node.mesh.register_with_reply(&node.shard, move |_from, job, reply| job(&here, reply));
        node
    }

    /// Sends a job to the shard of a client id, or of a topic.
    pub fn tell(&self, name: &str, job: Job) -> SendFuture<Job> {
        self.mesh.send(self.mesh.shard_of(name), job)
    }

    /// The same, with an answer.
    pub async fn ask(&self, name: &str, job: Job) -> Answer {
        let answer = self.mesh.ask_waiting(self.mesh.shard_of(name), job).await;
        answer.unwrap_or(Err(Reason::ServerBusy))
    }

    /// Brings a message to all shards: each of them has it, or has it in its mailbox, when this
    /// returns.
    ///
    /// # Errors
    /// If it is to be retained, and there is no room for it. No shard has it then.
    pub async fn publish(self: &Rc<Self>, mut publication: Publication) -> Read<()> {
        publication.expires = publication.lifetime.map(|lifetime| self.shard.now() + lifetime);
        let (topic, publication) = (publication.topic.clone(), Arc::new(publication));
        if publication.retain {
            return self.ask(&topic, Box::new(|node, reply| node.retain(publication, reply))).await.map(drop);
        }
        self.fan_out(publication).await;
        Ok(())
    }

    /// The session of a connection, unless another connection has it by then.
    fn session_of(&self, client: &Arc<Connect>) -> Option<Rc<Session>> {
        let session = self.sessions.borrow().get(&client.id).cloned();
        session.filter(|session| Arc::ptr_eq(&session.borrow().client, client))
    }

    /// Removes retained messages as their time comes.
    async fn expire(self: Rc<Self>) {
        loop {
            let now = self.shard.now();
            let mut next = None;
            for _ in 0..LOOKED_AT_ONCE {
                next = self.ends.borrow().first().cloned();
                let Some((_, topic)) = next.take_if(|(end, _)| *end <= now) else { break };
                let kept = self.forget(&topic);
                if self.mesh.shard_of(&*topic) == self.shard.index() {
                    let bytes = kept.map_or(0, |kept| retained_bytes(&kept));
                    self.retained_bytes.set(self.retained_bytes.get() - bytes);
                }
            }
            match next {
                // No timer lasts longer than a day.
                Some((end, _)) => {
                    let left = (end - self.shard.now()).min(EXPIRY_MAX);
                    let _ = self.shard.timeout(left, self.sooner.notified()).await;
                }
                None if self.ends.borrow().is_empty() => self.sooner.notified().await,
                None => yield_now().await,
            }
        }
    }

    /// Removes the retained message of a topic.
    fn forget(&self, topic: &Arc<str>) -> Option<Arc<Publication>> {
        let kept = self.retained.borrow_mut().remove(topic)?;
        if let Some(end) = kept.expires {
            self.ends.borrow_mut().remove(&(end, topic.clone()));
        }
        Some(kept)
    }

    /// Retains a message in the place of an earlier one.
    fn remember(&self, publication: &Arc<Publication>) {
        let topic = &publication.topic;
        self.forget(topic);
        self.retained.borrow_mut().insert(topic.clone(), publication.clone());
        if let Some(end) = publication.expires {
            let mut ends = self.ends.borrow_mut();
            if ends.first().is_none_or(|(first, _)| end < *first) {
                self.sooner.notify_one();
            }
            ends.insert((end, topic.clone()));
        }
    }

    fn retain(self: &Rc<Self>, publication: Arc<Publication>, reply: Reply<Answer>) {
        let before = self.retained.borrow().get(&publication.topic).map_or(0, |kept| retained_bytes(kept));
        let after = if publication.payload.is_empty() { 0 } else { retained_bytes(&publication) };
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

    /// The message has its place in the order of each shard when this returns, and room there once
    /// the future is done.
    fn fan_out(self: &Rc<Self>, publication: Arc<Publication>) -> impl Future<Output = ()> + use<> {
        let sent = self.mesh.send_to_others(|_shard| {
            let publication = publication.clone();
            Box::new(move |node, _reply| node.route(&publication))
        });
        self.route(&publication);
        sent
    }

    /// Hands a message to the sessions at home here.
    fn route(self: &Rc<Self>, publication: &Arc<Publication>) {
        let Publication { topic, retain, payload, from, .. } = &**publication;
        if *retain && payload.is_empty() {
            self.forget(topic);
        } else if *retain {
            self.remember(publication);
        }
        self.filters.borrow().matching(topic, |id, (session, options)| {
            if options & NO_LOCAL == 0 || id != from {
                let is_retained = options & RETAIN_AS_PUBLISHED != 0 && *retain;
                self.keep(session, publication, *options, is_retained);
            }
        });
    }

    /// Gives a session to a connection, which is sent its CONNACK before all else.
    pub fn attach(self: &Rc<Self>, connection: ConnHandle, client: Arc<Connect>) -> Answer {
        let old = self.sessions.borrow().get(&client.id).cloned();
        if old.is_none() && self.sessions.borrow().len() >= self.bounds.sessions_max {
            return Err(Reason::QuotaExceeded);
        }
        let kept = old.filter(|session| self.take_over(session, client.is_clean));
        // The connection was sent nothing before, so there is room.
        let _gone = connection.push_raw(client.answer(kept.is_some()));
        let session = kept.unwrap_or_else(|| {
            let room = self.room.within(self.bounds.session_bytes_max);
            Rc::new(RefCell::new(State { room, ..State::default() }))
        });
        self.sessions.borrow_mut().insert(client.id.clone(), session.clone());
        let mut state = session.borrow_mut();
        (state.will, state.expiry) = (client.will.clone(), client.expiry);
        (state.connection, state.client, state.is_stalled) = (Some(connection), client, false);
        drop(state);
        self.send_waiting(&session);
        Ok(0)
    }

    /// Ends what a session has of its last connection, for the next one. False if the session ends
    /// with it.
    fn take_over(self: &Rc<Self>, session: &Session, is_clean: bool) -> bool {
        let mut state = session.borrow_mut();
        state.timer.take().inspect(JoinHandle::abort);
        if let Some(connection) = state.connection.take() {
            let _full_or_gone = connection.push_raw(state.client.goodbye(Reason::TakenOver));
            connection.close();
        }
        // What the client did not acknowledge is sent again, in order.
        state.sent = 0;
        let goes_on = !is_clean && !state.expiry.is_zero();
        drop(state);
        self.publish_will(session);
        if !goes_on {
            self.end(session);
        }
        goes_on
    }

    /// Returns the code, and whether the client gets retained messages.
    fn subscribe(&self, session: &Rc<Session>, filter: &Arc<str>, options: u8) -> (u8, bool) {
        if filter.starts_with("$share/") {
            return (Reason::SharedNotSupported as u8, false);
        }
        if !is_filter(filter) {
            return (Reason::FilterInvalid as u8, false);
        }
        let mut state = session.borrow_mut();
        let old = state.filters.remove(filter);
        let is_new = old.is_none();
        let Some(taken) = old.or_else(|| state.room.take(filter_bytes(filter))) else {
            return (Reason::QuotaExceeded as u8, false);
        };
        state.filters.insert(filter.clone(), taken);
        self.filters.borrow_mut().insert(filter, state.client.id.clone(), (session.clone(), options));
        // Retained messages are asked for always, with a new filter, or never.
        (granted(options), matches!((options >> 4, is_new), (0, _) | (1, true)))
    }

    /// Queues the retained messages that a filter matches for a client, in parts, between which
    /// others are served. Ends with the subscription.
    async fn tell_retained(self: &Rc<Self>, session: &Rc<Session>, filter: &Arc<str>, options: u8) {
        let prefix = filter.split(['+', '#']).next().unwrap_or_default();
        // "a/#" matches "a" too.
        let prefix = if filter.ends_with("/#") { prefix.trim_end_matches('/') } else { prefix };
        let mut wanted = Filters::default();
        wanted.insert(filter, (), ());
        let mut from = Bound::Included(Arc::<str>::from(prefix));
        loop {
            let part: Vec<Arc<Publication>> = {
                let retained = self.retained.borrow();
                let behind = retained.range::<Arc<str>, _>((from.as_ref(), Bound::Unbounded));
                let ours = behind.take_while(|(topic, _)| topic.starts_with(prefix));
                ours.take(LOOKED_AT_ONCE).map(|(_, publication)| publication.clone()).collect()
            };
            let Some(last) = part.last() else { return };
            from = Bound::Excluded(last.topic.clone());
            let is_last = part.len() < LOOKED_AT_ONCE;
            for publication in part {
                let mut is_wanted = false;
                wanted.matching(&publication.topic, |(), ()| is_wanted = true);
                if is_wanted {
                    self.keep(session, &publication, options, true);
                }
            }
            if is_last {
                return;
            }
            yield_now().await;
            if !session.borrow().filters.contains_key(filter) {
                return;
            }
        }
    }

    pub fn unsubscribe(&self, session: &Session, filter: &str) -> u8 {
        let mut state = session.borrow_mut();
        if state.filters.remove(filter).is_none() {
            // "No subscription existed" is a success.
            return 0x11;
        }
        self.filters.borrow_mut().remove(filter, &state.client.id);
        0
    }

    pub fn acknowledged(self: &Rc<Self>, session: &Rc<Session>, id: u16) -> u8 {
        let mut state = session.borrow_mut();
        let place = state.messages.iter().take(state.sent).position(|kept| kept.id == id);
        if let Some(place) = place {
            state.messages.remove(place);
            state.sent -= 1;
        }
        drop(state);
        self.send_waiting(session);
        0
    }

    /// The connection ended.
    pub fn closed(self: &Rc<Self>, session: &Rc<Session>, goodbye: Goodbye) -> u8 {
        session.borrow_mut().will.take_if(|_| goodbye.drops_will);
        self.publish_will(session);
        let (node, ends, mut state) = (self.clone(), session.clone(), session.borrow_mut());
        state.connection = None;
        state.expiry = goodbye.expiry.unwrap_or(state.expiry).min(EXPIRY_MAX);
        let expired = self.shard.sleep(state.expiry);
        state.timer = Some(self.shard.spawn(async move {
            expired.await;
            node.end(&ends);
        }));
        0
    }

    fn publish_will(self: &Rc<Self>, session: &Session) {
        if let Some(will) = session.borrow_mut().will.take() {
            let node = self.clone();
            self.shard.spawn(async move { node.publish(will).await });
        }
    }

    fn end(&self, session: &Session) {
        let State { client, filters, .. } = session.take();
        self.sessions.borrow_mut().remove(&client.id);
        filters.keys().for_each(|filter| self.filters.borrow_mut().remove(filter, &client.id));
    }

    /// Has a message wait for a client, and sends it if that may be. Without room it is dropped,
    /// and so it is with QoS 0 where the client is not connected.
    fn keep(self: &Rc<Self>, to: &Rc<Session>, message: &Arc<Publication>, options: u8, retain: bool) {
        let mut state = to.borrow_mut();
        let qos = message.qos.min(granted(options));
        let is_heard = qos > 0 || state.connection.is_some();
        if let Some(_room) = state.room.take(message.bytes()).filter(|_| is_heard) {
            let flags = qos << 1 | u8::from(retain);
            state.messages.push_back(Kept { publication: message.clone(), flags, id: 0, _room });
            drop(state);
            self.send_waiting(to);
        }
    }

    /// Sends what waits, as far as the connection has room and the client takes more before it
    /// acknowledges.
    fn send_waiting(self: &Rc<Self>, session: &Rc<Session>) {
        let state = &mut *session.borrow_mut();
        while let (Some(connection), Some(next)) = (&state.connection, state.messages.get(state.sent)) {
            let (client, mut id, is_answered) = (&state.client, next.id, next.flags & QOS_1 != 0);
            if state.is_stalled || is_answered && state.sent as u32 >= client.receive_max {
                return;
            }
            while is_answered && id == 0 {
                state.last_id = state.last_id.wrapping_add(1);
                let is_taken = state.messages.range(..state.sent).any(|kept| kept.id == state.last_id);
                id = if is_taken { 0 } else { state.last_id };
            }
            let left = next.publication.expires.map(|at| at - self.shard.now());
            let flags = if next.id > 0 { next.flags | DUP } else { next.flags };
            let packet = next.publication.packet(client.is_five, flags, id, left);
            let fits = left != Some(Duration::ZERO) && packet.len() <= client.packet_max as usize;
            if fits && connection.push_raw(packet) == Err(PushError::Full) {
                state.is_stalled = true;
                let (node, session, connection) = (self.clone(), session.clone(), connection.clone());
                self.shard.spawn(async move {
                    connection.ready().await;
                    session.borrow_mut().is_stalled = false;
                    node.send_waiting(&session);
                });
                return;
            }
            if fits && is_answered {
                state.messages[state.sent].id = id;
                state.sent += 1;
            } else {
                state.messages.remove(state.sent);
            }
        }
    }
}

/// The bytes that a retained message counts for.
fn retained_bytes(publication: &Publication) -> usize {
    publication.bytes().max(RETAINED_BYTES_MIN)
}

/// The bytes that a filter counts for where it is kept.
fn filter_bytes(filter: &str) -> usize {
    filter.len() + LEVEL_BYTES * filter.split('/').count()
}

/// The QoS of a subscription: a client that asks for QoS 2 is granted QoS 1.
fn granted(options: u8) -> u8 {
    (options & 3).min(1)
}
