//! The bridge that numbers: a stream of JetStream, which republishes what it takes.
//!
//! ```text
//!   first member ─▶ SUB live ─▶ fetch all that is kept ─▶ fill ─▶ live messages, each behind the one it names
//!                                   ▲                                 │
//!                                   └──── fetch what follows ◀────────┘ one is missing, a loss, now and then
//! ```

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use ringserve_nats::{Event, Message, Nats, NatsError, Outgoing, Subscription};
use ringserve_server::Shard;
use ringserve_server::time::Time;
use ringserve_topics::bridge::{
    AckFuture, BridgeMessage, BridgedTopics, CountFuture, Fill, Link, NumberedMessage,
};
use ringserve_topics::{PublishError, escape};
use serde_json::{Value, json};
use tracing::{info, warn};

use crate::counts::Counts;
use crate::follows::{Bell, Follows, Turns};
use crate::live::{refused, send};
use crate::names::{
    HEADER_BYTES, KEY, Names, StreamError, StreamFacts, epoch_behind, numbered, stream_facts,
};
use crate::stats::{Counters, count};

/// The time for an answer of JetStream.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// The time between two looks at the stream, and after one that failed.
const LOOK_EVERY: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// The time after which a topic is compared with the stream again: soon after it was, since a
/// cluster of NATS takes a moment to know who listens, and then now and then.
const COMPARE_SOON: Duration = Duration::from_secs(1);
const COMPARE_EVERY: Duration = Duration::from_secs(30);

/// The time for a publish that is kept, with what it takes to connect again.
const ACK_WITHIN: Duration = Duration::from_secs(5);

/// Messages and bytes of one answer, and topics that ask at a time.
const BATCH: usize = 256;
const BATCH_BYTES: usize = 4 << 20;
const TURNS: usize = 32;

/// Bytes that a message counts for in a history in addition to its own.
const ENTRY_BYTES: usize = 128;

/// The place of a stream that is made.
#[derive(Clone, Copy)]
pub(crate) struct Storage {
    pub(crate) is_in_memory: bool,
    pub(crate) replicas: u8,
}

/// The stream as it is known.
struct Found {
    facts: StreamFacts,
    /// Grows with each connection, and each other stream.
    generation: u64,
}

/// The life of the stream, whose numbers grow. It ends with the stream, or when a server of NATS
/// comes back without the newest messages, as after a loss of power.
#[derive(Clone, Copy)]
struct Life {
    /// The epoch by the time when the stream was made.
    made: u64,
    /// The epoch in cursors.
    epoch: u64,
    /// The number behind which it began; 0 for that of a whole stream.
    floor: u64,
    /// The newest number that is known.
    last: u64,
}

pub(crate) struct Stream {
    shard: Shard,
    nats: Nats,
    names: Names,
    topics: BridgedTopics,
    counters: Arc<Counters>,
    storage: Storage,
    follows: Follows,
    turns: Turns,
    found: RefCell<Option<Found>>,
    generations: Cell<u64>,
    life: Cell<Option<Life>>,
    counts: Counts,
    this: Weak<Stream>,
}

/// The place up to which a topic is delivered.
#[derive(Clone, Copy)]
struct Known {
    epoch: u64,
    last: u64,
    /// When that was the end of the topic.
    at: Time,
    /// Live messages since then may be missing.
    was_away: bool,
}

impl Stream {
    pub(crate) fn start(
        shard: &Shard,
        nats: Nats,
        names: Names,
        topics: BridgedTopics,
        counters: Arc<Counters>,
        storage: Storage,
    ) -> Rc<dyn Link> {
        let stream = Rc::new_cyclic(|this| Stream {
            shard: shard.clone(),
            counts: Counts::new(shard, nats.clone(), names.clone()),
            nats,
            names,
            topics,
            counters,
            storage,
            follows: Follows::default(),
            turns: Turns::new(TURNS),
            found: RefCell::default(),
            generations: Cell::new(0),
            life: Cell::default(),
            this: this.clone(),
        });
        shard.spawn_named("bridge of topics", stream.clone().watch());
        stream
    }

    // The stream

    /// Looks after the connection and the stream.
    async fn watch(self: Rc<Stream>) {
        let subscribe = || self.nats.subscribe(&self.nats.new_inbox());
        let Ok(mut losses) = subscribe() else { return };
        let mut said = None;
        loop {
            self.nats.connected().await;
            let wait = match self.look().await {
                Ok(facts) => {
                    said = None;
                    self.found(facts);
                    LOOK_EVERY
                }
                Err(why) => {
                    self.lost();
                    if said.as_ref() != Some(&why) {
                        warn!("topics: the stream {} is not to be had: {why}", self.names.stream());
                    }
                    said = Some(why);
                    LOOK_AGAIN
                }
            };
            match self.shard.timeout(wait, losses.next()).await {
                Ok(Some(Event::Gap)) => self.lost(),
                Ok(None) => {
                    // NATS refuses the inbox, which shows losses before the next look does.
                    self.shard.sleep(wait).await;
                    let Ok(next) = subscribe() else { return };
                    losses = next;
                }
                _ => {}
            }
        }
    }

    /// The facts about the stream, which is made if it is missing.
    async fn look(&self) -> Result<StreamFacts, String> {
        let (name, dest) = (self.names.stream(), self.names.live(">"));
        let found = match self.facts().await? {
            Err(StreamError::Missing) => {
                let history = self.topics.history();
                let Storage { is_in_memory, replicas } = self.storage;
                let config = self.names.config(history.entries(), history.age(), is_in_memory, replicas);
                let made = self.ask(&format!("$JS.API.STREAM.CREATE.{name}"), &config).await?;
                stream_facts(made.payload(), Some(&dest))
            }
            found => found,
        };
        self.counts.look().await;
        found.map_err(|refused| match refused {
            StreamError::Missing => "it is missing".into(),
            StreamError::Other(why) => why,
        })
    }

    /// Asks for the facts of the stream, with the epoch of its life.
    async fn facts(&self) -> Result<Result<StreamFacts, StreamError>, String> {
        let before = self.life.get();
        let info = self.ask(&format!("$JS.API.STREAM.INFO.{}", self.names.stream()), &json!({})).await?;
        let facts = stream_facts(info.payload(), Some(&self.names.live(">")));
        Ok(facts.map(|facts| StreamFacts { epoch: self.live_on(before, &facts), ..facts }))
    }

    /// The epoch of the stream with these facts, for which was asked in the life `before`.
    fn live_on(&self, before: Option<Life>, facts: &StreamFacts) -> u64 {
        let life = match self.life.get() {
            Some(life) if life.made == facts.epoch => {
                // What came while it was asked may be newer than the answer.
                // Nor does an answer of the life before say anything of this one.
                let before = before.filter(|before| before.epoch == life.epoch);
                if before.is_some_and(|before| facts.last < before.last) {
                    warn!("topics: the stream {} lost its newest messages", self.names.stream());
                    let epoch = epoch_behind(life.epoch, facts.last);
                    Life { epoch, floor: facts.last, last: facts.last, ..life }
                } else {
                    Life { last: before.map_or(0, |_| facts.last).max(life.last), ..life }
                }
            }
            _ => Life { made: facts.epoch, epoch: facts.epoch, floor: 0, last: facts.last },
        };
        self.life.set(Some(life));
        life.epoch
    }

    /// Notes the number of a message that the stream took in the life of this epoch.
    fn note_last(&self, epoch: u64, last: u64) {
        if let Some(life) = self.life.get().filter(|life| life.epoch == epoch && life.last < last) {
            self.life.set(Some(Life { last, ..life }));
        }
    }

    async fn ask(&self, subject: &str, question: &Value) -> Result<Message, String> {
        let question = question.to_string();
        match self.shard.timeout(ANSWER_WITHIN, self.nats.request(subject, &question)).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(NatsError::NoResponders)) => Err("NATS runs without JetStream".into()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("JetStream does not answer".into()),
        }
    }

    fn found(&self, facts: StreamFacts) {
        let known = self.found.borrow().as_ref().map(|found| (found.facts.epoch, found.generation));
        let generation = match known {
            Some((epoch, generation)) if epoch == facts.epoch => generation,
            _ => {
                self.generations.set(self.generations.get() + 1);
                self.generations.get()
            }
        };
        self.found.replace(Some(Found { facts, generation }));
        self.topics.set_state(true, self.nats.payload_bytes_max().saturating_sub(HEADER_BYTES).max(1));
        if known.is_none_or(|(_, before)| before != generation) {
            info!("topics: connected to the stream {}", self.names.stream());
            self.counters.is_up.store(true, Relaxed);
            self.follows.wake_all();
        }
    }

    fn lost(&self) {
        self.found.replace(None);
        self.counters.is_up.store(false, Relaxed);
        self.topics.set_state(false, 0);
    }

    fn generation(&self) -> Option<u64> {
        self.found.borrow().as_ref().map(|found| found.generation)
    }

    // A topic

    /// Delivers a topic, from the first member on until it is left.
    async fn follow(self: Rc<Stream>, topic: Arc<str>, bell: Rc<Bell>) {
        let subscribe = || self.nats.subscribe(&self.names.live(&topic));
        let (mut known, mut compared, mut subscribed, mut of) = (None::<Known>, None, None, None);
        let Ok(mut live) = subscribe() else { return };
        loop {
            let (generation, epoch) = poll_fn(|task| {
                bell.has_rung(task);
                let found = self.found.borrow();
                found
                    .as_ref()
                    .map_or(Poll::Pending, |found| Poll::Ready((found.generation, found.facts.epoch)))
            })
            .await;
            if subscribed.replace(epoch) != Some(epoch) {
                // What waits in the one before may be of another stream.
                let Ok(next) = subscribe() else { return };
                live = next;
            }
            if of.replace(generation) != Some(generation) {
                known = known.map(|known| Known { was_away: true, ..known });
            }
            let missed = live.missed();
            match self.catch_up(&topic, known).await {
                Some(caught) => known = Some(caught),
                None => {
                    known = known.map(|known| Known { was_away: true, ..known });
                    self.shard.sleep(LOOK_AGAIN).await;
                    continue;
                }
            }
            let Some(caught) = &mut known else { continue };
            let wait = if compared == Some(generation) { COMPARE_EVERY } else { COMPARE_SOON };
            compared = Some(generation);
            let mut wait = self.shard.sleep(wait);
            caught.was_away = poll_fn(|task| {
                let has_rung = bell.has_rung(task);
                if has_rung {
                    // And soon again.
                    compared = None;
                }
                if self.generation() != Some(generation) || live.missed() != missed {
                    return Poll::Ready(true);
                }
                if has_rung || std::pin::Pin::new(&mut wait).poll(task).is_ready() {
                    return Poll::Ready(false);
                }
                self.poll_live(task, &topic, &mut live, caught).map(|()| true)
            })
            .await;
            if live.is_refused() {
                self.shard.sleep(LOOK_EVERY).await;
                subscribed = None;
            }
        }
    }

    /// Delivers live messages. Ready where one before them is missing.
    fn poll_live(
        &self,
        task: &mut Context<'_>,
        topic: &str,
        live: &mut Subscription,
        known: &mut Known,
    ) -> Poll<()> {
        let subject = self.names.published(topic);
        loop {
            let message = match live.poll_next(task) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Event::Message(message))) => message,
                Poll::Ready(_) => return Poll::Ready(()),
            };
            let Some((message, before)) = numbered(&message, &subject) else {
                count(&self.counters.malformed);
                continue;
            };
            if message.seq <= known.last {
                continue;
            }
            if before > known.last {
                return Poll::Ready(());
            }
            (known.last, known.at) = (message.seq, self.shard.now());
            self.note_last(known.epoch, known.last);
            count(&self.counters.received);
            self.topics.deliver(topic, message);
        }
    }

    /// Delivers what the stream has behind what is known. `None` if that failed.
    async fn catch_up(&self, topic: &str, known: Option<Known>) -> Option<Known> {
        let _turn = self.turns.take().await;
        count(&self.counters.catch_ups);
        let epoch = self.found.borrow().as_ref()?.facts.epoch;
        let before = known.filter(|known| known.epoch == epoch);
        // Where the numbers went back, members have what was there before.
        let begin =
            known.and(self.life.get()).filter(|life| life.epoch == epoch).map_or(0, |life| life.floor);
        let (last, at) = before.map_or((begin, self.shard.now()), |known| (known.last, known.at));
        let begun = self.shard.now();
        let fetched = self.fetch_all(topic, last + 1).await?;
        // Asked behind it: what had gone by then is missing for sure.
        let facts = self.facts().await.ok()?.ok()?;
        if facts.epoch != epoch {
            self.found(facts);
            return None;
        }
        let mut floor = fetched.floor.max(last);
        if facts.entries.is_some_and(|entries| fetched.count as u64 >= entries) {
            floor = fetched.messages.front().map_or(floor, |first| first.seq - 1).max(floor);
        }
        // Messages go by their age, or for others: what went while this was not looking is not
        // known.
        let may_have_gone = facts.has_bound || facts.age.is_some_and(|age| begun - at >= age);
        let was_away = before.is_none_or(|known| known.was_away && may_have_gone);
        if was_away && facts.first > 0 {
            floor = floor.max(facts.first - 1);
        }
        let last = fetched.messages.back().map_or(floor, |message| message.seq);
        self.note_last(epoch, last);
        count_many(&self.counters.received, fetched.messages.len());
        if before.is_some_and(|known| floor > known.last) || (known.is_some() && before.is_none()) {
            count(&self.counters.gaps);
        }
        self.topics.fill(topic, Fill { epoch, floor, messages: fetched.messages.into() });
        Some(Known { epoch, last, at: begun, was_away: false })
    }

    /// All messages of a topic from this number on, as far as the history of topics goes.
    async fn fetch_all(&self, topic: &str, from: u64) -> Option<Batch> {
        let mut all = Batch::default();
        let (mut from, history) = (from, self.topics.history());
        loop {
            let has_more = self.fetch(topic, from, &mut all).await?;
            from = all.messages.back().map_or(from, |last| last.seq + 1);
            all.keep(history.entries(), history.bytes());
            if !has_more {
                return Some(all);
            }
        }
    }

    /// One answer of the stream. True if there is more.
    async fn fetch(&self, topic: &str, from: u64, into: &mut Batch) -> Option<bool> {
        if !self.nats.is_connected() {
            return None;
        }
        let (subject, inbox) = (self.names.published(topic), self.nats.new_inbox());
        let mut answers = self.nats.subscribe(&inbox).ok()?;
        let question = json!({
            "seq": from, "next_by_subj": subject, "batch": BATCH, "max_bytes": BATCH_BYTES,
        });
        let (to, question) = (format!("$JS.API.DIRECT.GET.{}", self.names.stream()), question.to_string());
        self.nats.publish_message(&Outgoing::new(&to, &question).reply(&inbox)).ok()?;
        let mut least = from;
        for _ in 0..=BATCH {
            let Some(Event::Message(answer)) =
                self.shard.timeout(ANSWER_WITHIN, answers.next()).await.ok().flatten()
            else {
                return None;
            };
            if let Some(status) = answer.headers().status() {
                let code = status.code;
                let pending = answer.headers().get("Nats-Num-Pending").and_then(|of| of.parse::<u64>().ok());
                return match code {
                    204 => Some(pending.unwrap_or(0) > 0 && least > from),
                    404 => Some(false),
                    _ => None,
                };
            }
            let Some((message, _)) = numbered(&answer, &subject).filter(|(message, _)| message.seq >= least)
            else {
                // An answer that is none says nothing of what it should have been.
                count(&self.counters.malformed);
                return None;
            };
            least = message.seq + 1;
            into.count += 1;
            into.bytes += bytes_of(&message);
            into.messages.push_back(message);
        }
        None
    }

    /// Publishes until the stream says that it has the message. The number of the message makes its
    /// repeat harmless.
    async fn publish_until(
        self: Rc<Stream>,
        topic: Box<str>,
        key: Box<[u8]>,
        payload: Bytes,
    ) -> Result<(), PublishError> {
        let (subject, key) =
            (self.names.published(&topic), if key.is_empty() { None } else { Some(escape(key)) });
        let id = format!("{:016x}{:016x}", self.shard.random(), self.shard.random());
        loop {
            let mut message = Outgoing::new(&subject, &payload).header("Nats-Msg-Id", &id);
            if let Some(key) = &key {
                message = message.header(KEY, key);
            }
            let asked = self.shard.timeout(ANSWER_WITHIN, self.nats.request_message(&message)).await;
            match asked {
                Ok(Ok(answer)) => return acked(&answer, self.names.stream()),
                Ok(Err(NatsError::Disconnected)) => self.nats.connected().await,
                Ok(Err(error)) => return Err(refused(error)),
                Err(_) => {}
            }
        }
    }
}

/// Messages of a topic, and what is known of those before.
#[derive(Default)]
struct Batch {
    messages: VecDeque<NumberedMessage>,
    bytes: usize,
    count: usize,
    /// The number up to which messages were left out, since more are not kept.
    floor: u64,
}

/// Bytes that a history counts for a message.
fn bytes_of(message: &NumberedMessage) -> usize {
    message.payload.len() + message.key.len() + ENTRY_BYTES
}

impl Batch {
    /// Leaves out the oldest messages until this number and these bytes are left, or one message.
    fn keep(&mut self, entries: usize, bytes: usize) {
        while self.messages.len() > 1
            && (self.messages.len() > entries || self.bytes > bytes)
            && let Some(gone) = self.messages.pop_front()
        {
            self.bytes -= bytes_of(&gone);
            self.floor = gone.seq;
        }
    }
}

fn count_many(counter: &std::sync::atomic::AtomicU64, many: usize) {
    counter.fetch_add(many as u64, Relaxed);
}

/// Reads whether a stream has taken a message.
fn acked(answer: &Message, stream: &str) -> Result<(), PublishError> {
    let answer: Value = serde_json::from_slice(answer.payload()).unwrap_or_default();
    match answer["stream"] == stream && answer["seq"].as_u64().is_some_and(|seq| seq > 0) {
        true => Ok(()),
        false => Err(PublishError::Disconnected),
    }
}

impl Link for Stream {
    fn join(&self, topic: &Arc<str>) {
        if let Some(this) = self.this.upgrade() {
            self.follows.begin(&self.shard, topic, |bell| this.follow(topic.clone(), bell));
        }
    }

    fn leave(&self, topic: &str) {
        self.follows.end(topic);
        self.counts.leave(topic);
    }

    fn compare(&self, topic: &str) {
        self.follows.ring(topic);
    }

    fn publish(&self, message: BridgeMessage<'_>) -> Result<(), PublishError> {
        send(&self.nats, &self.names, message)?;
        count(&self.counters.sent);
        Ok(())
    }

    fn publish_acked(&self, message: BridgeMessage<'_>) -> AckFuture {
        let Some(this) = self.this.upgrade() else { return Box::pin(async { Err(PublishError::Gone) }) };
        let (topic, key, payload) = (message.topic.into(), message.key.into(), message.payload.clone());
        count(&self.counters.sent);
        Box::pin(async move {
            let shard = this.shard.clone();
            let published = this.publish_until(topic, key, payload);
            shard.timeout(ACK_WITHIN, published).await.unwrap_or(Err(PublishError::Disconnected))
        })
    }

    fn set_count(&self, topic: &Arc<str>, count: usize) {
        self.counts.set(topic, count);
    }

    fn count(&self, topic: &str) -> CountFuture {
        Box::pin(self.counts.of_others(topic))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_keeps_the_newest_within_its_bounds() {
        let message = |seq, bytes| NumberedMessage { seq, key: [7].into(), payload: vec![0; bytes].into() };
        let batch = |sizes: &[usize]| {
            let mut batch = Batch::default();
            for (seq, bytes) in (1..).zip(sizes) {
                batch.bytes += bytes_of(&message(seq, *bytes));
                batch.messages.push_back(message(seq, *bytes));
            }
            batch
        };
        let kept = |sizes: &[usize], entries, bytes| {
            let mut batch = batch(sizes);
            batch.keep(entries, bytes);
            let left: usize = batch.messages.iter().map(bytes_of).sum();
            assert_eq!(batch.bytes, left);
            (batch.floor, batch.messages.len())
        };
        assert_eq!(kept(&[1, 2, 3], 3, 1 << 20), (0, 3));
        assert_eq!(kept(&[1, 2, 3], 2, 1 << 20), (1, 2));
        assert_eq!(kept(&[900, 1, 1], 3, 1000), (1, 2), "bytes are a bound");
        assert_eq!(kept(&[1, 1, 5000], 3, 1000), (2, 1), "the newest stays");
        assert_eq!(kept(&[], 0, 0), (0, 0));
    }
}
