//! The topics of one shard: what it has, in `state.rs`, and here the letters by which shards, tasks
//! and a bridge change it. A home numbers the messages of its topics, and other shards with members
//! get copies.

pub(crate) mod state;

use std::cell::{OnceCell, RefCell};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::future::poll_fn;
use std::panic::{self, AssertUnwindSafe};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use ringserve_server::Shard;
use ringserve_server::sync::{AskError, Reply};
use ringserve_server::task::Pages;
use ringserve_server::time::Time;

use crate::bridge::{BridgeNews, BridgedTopics, Home, Link, NumberedMessage, message};
use crate::form::Cursor;
use crate::members::Member;
use crate::options::{PublishError, Since, Slow, SubscribeError, TopicOptions};
use crate::shared::{Answer, Letter, Shared};
use crate::slab::Slab;
use crate::topic::{Entry, GapLetter, Topic, TopicCounts, TopicNews};
use state::{Room, State};

/// The interval of looks at topics that are not used, and at messages that are too old.
const SWEEP: Duration = Duration::from_secs(1);

/// The time in which a bridge has to say what it knows of a topic.
const JOIN_WITHIN: Duration = Duration::from_secs(5);

/// The topics of one shard.
pub(crate) struct Node {
    pub(crate) shard: Shard,
    pub(crate) shared: Arc<Shared>,
    pub(crate) state: RefCell<State>,
    pages: RefCell<Option<Pages>>,
    /// The bridge at work, where this is its shard.
    link: OnceCell<Rc<dyn Link>>,
}

/// Keeps a topic from being forgotten while a subscription to it begins.
pub(crate) struct Pending<'a> {
    node: &'a Node,
    pub(crate) topic: u32,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if let Some(topic) = self.node.state.borrow_mut().topics.get_mut(self.topic) {
            topic.pending -= 1;
        }
    }
}

impl Node {
    pub(crate) fn new(shard: &Shard, shared: &Arc<Shared>) -> Rc<Node> {
        let state = State {
            names: HashMap::default(),
            topics: Slab::default(),
            connections: Slab::default(),
            active: VecDeque::new(),
            due: VecDeque::new(),
            waiting: Vec::new(),
            visited: None,
            waker: None,
            slows: vec![Slow::Skip, Slow::Latest, Slow::Queue],
            sweep_left: 0,
            log_bytes: 0,
            evicted: 0,
            looked: 0,
            left: Vec::new(),
            uncounted: Vec::new(),
            is_bridged: shared.bridge().is_some(),
            is_numbered: shared.is_numbered(),
            behind: BTreeSet::new(),
            owed: HashMap::default(),
            forgotten: TopicCounts::default(),
            joins: 0,
            joins_since: Time::ZERO,
        };
        let node = Rc::new(Node {
            shard: shard.clone(),
            shared: shared.clone(),
            state: RefCell::new(state),
            pages: RefCell::new(None),
            link: OnceCell::new(),
        });
        let paged = node.clone();
        let pages = shard.pages(move |page| {
            let now = paged.shard.now();
            let deliver = || paged.state.borrow_mut().page(page, now, paged.shared.forms());
            let delivered = panic::catch_unwind(AssertUnwindSafe(deliver));
            if delivered.is_err() {
                paged.state.borrow_mut().step_over();
                paged.ask_page();
            }
            paged.leave();
            paged.set_counts();
            delivered.unwrap_or_else(|panic| panic::resume_unwind(panic))
        });
        node.pages.replace(Some(pages));
        shard.spawn_named("room of members", node.clone().go_on_with_members());
        shard.spawn_named("sweep of topics", node.clone().sweep());
        if let Some(bridge) = shared.bridge().filter(|_| shard.index() == 0) {
            let home: Rc<dyn Home> = node.clone();
            let (home, bridge_state) = (Rc::downgrade(&home), shared.bridge_state.clone());
            let topics = BridgedTopics::new(home, bridge_state, shared.options.history);
            let _ = node.link.set(bridge.start(shard, topics));
        }
        node
    }

    pub(crate) fn options(&self) -> &TopicOptions {
        &self.shared.options
    }

    fn ask_page(&self) {
        if let Some(pages) = &*self.pages.borrow() {
            pages.ask();
        }
    }

    /// Tells the homes of forgotten topics, or the bridge, that there is no member here.
    fn leave(&self) {
        let state = &mut *self.state.borrow_mut();
        let names = &state.names;
        state.left.retain(|name| {
            let is_back = names.contains_key(name);
            if let Some(link) = self.link.get() {
                if !is_back {
                    link.leave(name);
                }
                return false;
            }
            let letter = Letter::Leave { topic: name.clone() };
            // A home that is full gets it later.
            !is_back && self.shared.send(self.home_of(name), letter) == Err(PublishError::Full)
        });
    }

    /// Says to the bridge how many members the topics have that were just swept.
    fn set_counts(&self) {
        let state = &mut *self.state.borrow_mut();
        let swept = state.uncounted.drain(..);
        let Some(link) = self.link.get() else { return };
        for topic in swept.filter_map(|number| state.topics.get(number)) {
            link.set_count(&topic.name, topic.count.load(Ordering::Relaxed));
        }
    }

    /// Is woken by outboxes that have room again.
    async fn go_on_with_members(self: Rc<Node>) {
        poll_fn(|task| {
            let state = &mut *self.state.borrow_mut();
            state.waker = Some(task.waker().clone());
            let State { waiting, connections, due, .. } = state;
            let was_due = due.len();
            // Each is woken by its own room: the others stay as they are.
            waiting.retain(|number| {
                let found = connections.get_mut(*number).filter(|found| found.room == Room::Waits);
                let Some(connection) = found else { return false };
                let is_ready = connection.handle.is_ready();
                if is_ready {
                    connection.room = Room::Due;
                    due.push_back(*number);
                }
                !is_ready
            });
            if due.len() > was_due {
                self.ask_page();
            }
            Poll::<()>::Pending
        })
        .await;
    }

    async fn sweep(self: Rc<Node>) {
        loop {
            self.shard.sleep(SWEEP).await;
            let state = &mut *self.state.borrow_mut();
            self.catch_up(state);
            if state.topics.len() > 0 || !state.left.is_empty() {
                state.sweep_left = state.topics.end();
                self.ask_page();
            }
        }
    }

    /// Sends what they lack to the shards that had no room for it.
    fn catch_up(&self, state: &mut State) {
        let topics = &state.topics;
        state.behind.retain(|(number, shard)| {
            let topic = topics.get(*number).filter(|topic| topic.shards.contains(shard));
            topic.is_some_and(|topic| {
                let letter = Letter::Joined { topic: topic.name.clone(), known: topic.known() };
                self.shared.send(*shard, letter) == Err(PublishError::Full)
            })
        });
    }

    /// The shard that numbers a topic.
    pub(crate) fn home_of(&self, name: &str) -> usize {
        self.shared.home_of(name, self.shard.count())
    }

    /// Publishes on this shard.
    pub(crate) fn publish(&self, name: &str, key: &[u8], payload: Bytes) -> Result<(), PublishError> {
        self.shared.check(name, key, &payload)?;
        if let Some(link) = self.link.get() {
            return self.publish_bridged(&**link, name, key, payload);
        }
        let state = &mut *self.state.borrow_mut();
        let known =
            state.names.get(name).copied().and_then(|number| Some((number, state.topics.get(number)?)));
        match known {
            Some((number, topic)) if topic.is_home => self.number(state, number, key.into(), payload),
            None if self.home_of(name) == self.shard.index() => {
                if self.options().history.is_kept {
                    let number = self.add_topic(state, name).ok_or(PublishError::Full)?;
                    self.number(state, number, key.into(), payload);
                }
                // Else there is no member.
            }
            known => {
                let topic = known.map_or_else(|| name.into(), |(_, topic)| topic.name.clone());
                return self
                    .shared
                    .send(self.home_of(name), Letter::Publish { topic, key: key.into(), payload });
            }
        }
        Ok(())
    }

    /// Publishes on the shard of a bridge.
    fn publish_bridged(
        &self,
        link: &dyn Link,
        name: &str,
        key: &[u8],
        payload: Bytes,
    ) -> Result<(), PublishError> {
        link.publish(message(name, key, &payload))?;
        if !self.shared.is_numbered() {
            let state = &mut *self.state.borrow_mut();
            self.published(state, name, key.into(), payload)?;
        }
        Ok(())
    }

    fn take_in(&self, state: &mut State, number: u32, entry: Arc<Entry>) {
        let Some(topic) = state.topics.get_mut(number) else { return };
        let before = topic.log.bytes();
        topic.take_in(entry, &mut state.active, number);
        state.log_bytes = state.log_bytes + topic.log.bytes() - before;
        if topic.is_active {
            self.ask_page();
        }
        state.evict(number, self.options().log_bytes_max);
    }

    /// Takes in what this shard lacks of what the home of a topic has.
    fn catch_up_with(&self, state: &mut State, number: u32, known: TopicNews) {
        let TopicNews { epoch, last, gaps, head, entries, .. } = known;
        let Some(here) = state.topics.get(number).map(|topic| topic.log.head()) else { return };
        let is_kept = !entries.is_empty();
        for entry in entries.into_iter().filter(|entry| entry.seq >= here) {
            self.take_entry(state, number, entry);
        }
        self.take_gap(state, number, GapLetter { epoch, floor: last, gaps });
        if is_kept || here >= head {
            return;
        }
        // The home does not have them any longer.
        if let Some(topic) = state.topics.get_mut(number).filter(|topic| topic.epoch == epoch) {
            let before = topic.log.bytes();
            topic.skip_to(head, last, &mut state.active, number);
            state.log_bytes = state.log_bytes + topic.log.bytes() - before;
            self.ask_page();
        }
    }

    /// Takes in a message from the home of a topic.
    fn take_entry(&self, state: &mut State, number: u32, entry: Arc<Entry>) {
        let Cursor { epoch, seq } = entry.cursor;
        // The letter that said so may have found no room.
        self.take_gap(state, number, GapLetter { epoch, floor: seq - 1, gaps: entry.gaps });
        let topic = state.topics.get(number);
        if topic.is_some_and(|topic| topic.is_joined && topic.epoch == epoch) {
            self.take_in(state, number, entry);
        }
    }

    /// Adds a topic, if the shard has room for it.
    fn add_topic(&self, state: &mut State, name: &str) -> Option<u32> {
        if state.topics.len() >= self.options().topics_max && !state.make_room() {
            return None;
        }
        let name: Arc<str> = name.into();
        let is_home = self.home_of(&name) == self.shard.index();
        let epoch = (is_home && !state.is_numbered).then(|| self.shard.random());
        let topic = Topic::new(name.clone(), self.options().history, is_home, epoch);
        let number = state.topics.add(topic);
        if let Some(link) = self.link.get() {
            link.join(&name);
        }
        state.names.insert(name, number);
        Some(number)
    }

    /// Carries out what another shard, or a thread, asks for.
    pub(crate) fn handle(self: &Rc<Node>, from: Option<usize>, letter: Letter, reply: Reply<Answer>) {
        match (letter, self.link.get()) {
            (Letter::PublishAcked { topic, key, payload }, Some(link)) if self.shared.is_numbered() => {
                let acked = link.publish_acked(message(&topic, &key, &payload));
                self.shard.spawn(async move { reply.answer(Answer::Published(acked.await)) });
            }
            (Letter::Count { topic, is_of_all_nodes: true }, Some(link)) => {
                let counted = link.count(&topic);
                let here = self.answer(from, Letter::Count { topic, is_of_all_nodes: false });
                self.shard.spawn(async move {
                    let others = counted.await.unwrap_or(0);
                    reply.answer(if let Answer::Count(here) = here {
                        Answer::Count(here.saturating_add(others))
                    } else {
                        here
                    });
                });
            }
            (Letter::Await { topic, cursor }, Some(link)) => {
                link.compare(&topic);
                let awaited = self.clone().await_at_home(topic, cursor);
                self.shard.spawn(async move { reply.answer(awaited.await) });
            }
            (letter, _) => reply.answer(self.answer(from, letter)),
        }
    }

    fn answer(&self, from: Option<usize>, letter: Letter) -> Answer {
        if let (Letter::Publish { topic, key, payload }, Some(link)) = (&letter, self.link.get()) {
            let published = self.publish_bridged(&**link, topic, key, payload.clone());
            return self.count_refused(&mut self.state.borrow_mut(), published);
        }
        let state = &mut *self.state.borrow_mut();
        let find = |state: &State, topic: &str| state.names.get(topic).copied();
        match letter {
            Letter::Publish { topic, key, payload } => {
                let published = self.published(state, &topic, key, payload);
                return self.count_refused(state, published);
            }
            Letter::PublishAcked { topic, key, payload } => {
                let forwarded = self.link.get().map(|link| link.publish(message(&topic, &key, &payload)));
                let published = forwarded.unwrap_or(Ok(()));
                return Answer::Published(
                    published.and_then(|()| self.published(state, &topic, key, payload)),
                );
            }
            Letter::Join { topic } => {
                return from.map_or(Answer::Full, |from| self.join_from(state, &topic, from));
            }
            Letter::Leave { topic } => {
                if let Some(topic) = find(state, &topic).and_then(|number| state.topics.get_mut(number)) {
                    topic.shards.retain(|shard| Some(*shard) != from);
                }
            }
            Letter::Joined { topic, known } => {
                let Some(number) = find(state, &topic) else { return Answer::Done };
                let Some(topic) = state.topics.get_mut(number) else { return Answer::Done };
                if topic.is_joined {
                    self.catch_up_with(state, number, known);
                } else {
                    topic.joined(known);
                    state.log_bytes += topic.log.bytes();
                    state.evict(number, self.options().log_bytes_max);
                }
            }
            Letter::Gap { topic, gap } => {
                if let Some(number) = find(state, &topic) {
                    self.take_gap(state, number, gap);
                }
            }
            Letter::Entry { topic, entry } => {
                if let Some(number) = find(state, &topic) {
                    self.take_entry(state, number, entry);
                }
            }
            question => return answer(state, question),
        }
        Answer::Done
    }

    fn take_gap(&self, state: &mut State, number: u32, gap: GapLetter) {
        let Some(topic) = state.topics.get_mut(number).filter(|topic| topic.is_joined) else { return };
        // Where all members have a report due, none is of a number.
        if gap.gaps > topic.gaps {
            state.owed.retain(|(_, of), _| *of != number);
        }
        let before = topic.log.bytes();
        topic.gap(gap, &mut state.active, number);
        state.log_bytes = state.log_bytes + topic.log.bytes() - before;
        if topic.is_active {
            self.ask_page();
        }
    }

    /// Counts a message that found no room, whose publisher does not learn of it.
    fn count_refused(&self, state: &mut State, published: Result<(), PublishError>) -> Answer {
        state.forgotten.refused += u64::from(published == Err(PublishError::Full));
        published.map_or(Answer::Full, |()| Answer::Done)
    }

    fn published(
        &self,
        state: &mut State,
        topic: &str,
        key: Box<[u8]>,
        payload: Bytes,
    ) -> Result<(), PublishError> {
        let number = match state.names.get(topic) {
            Some(number) => *number,
            None if !self.options().history.is_kept => return Ok(()),
            None => match self.add_topic(state, topic) {
                Some(number) => number,
                None => return Err(PublishError::Full),
            },
        };
        self.number(state, number, key, payload);
        Ok(())
    }

    /// Another shard has a member of a topic whose home this is.
    fn join_from(&self, state: &mut State, name: &str, from: usize) -> Answer {
        let known = state.names.get(name).copied();
        let Some(topic) =
            known.or_else(|| self.add_topic(state, name)).and_then(|number| state.topics.get_mut(number))
        else {
            return Answer::Full;
        };
        // Without a word of its bridge it knows nothing yet, and says it when it does.
        let joined =
            topic.is_joined.then(|| Letter::Joined { topic: topic.name.clone(), known: topic.known() });
        if joined.is_some_and(|joined| self.shared.send(from, joined).is_err()) {
            return Answer::Full;
        }
        if !topic.shards.contains(&from) {
            topic.shards.push(from);
        }
        Answer::Done
    }

    /// Waits until this shard knows a topic.
    pub(crate) async fn join(&self, name: &str) -> Result<Pending<'_>, SubscribeError> {
        let pending = {
            let state = &mut *self.state.borrow_mut();
            let known = state.names.get(name).copied();
            let number = known.or_else(|| self.add_topic(state, name)).ok_or(SubscribeError::Full)?;
            if let Some(topic) = state.topics.get_mut(number) {
                topic.pending += 1;
                topic.idle_looks = 0;
            }
            Pending { node: self, topic: number }
        };
        if self.is_joined(&pending) {
            return Ok(pending);
        }
        if is_down(&self.shared) {
            return Err(SubscribeError::Disconnected);
        }
        if self.home_of(name) != self.shard.index() {
            match self.shared.ask(self.home_of(name), Letter::Join { topic: name.into() }).await {
                Ok(Answer::Done) => {}
                Ok(_) | Err(AskError::Full) => return Err(SubscribeError::Full),
                Err(_) => return Err(SubscribeError::Gone),
            }
        }
        // What the home sent before its answer may lie behind other letters, and a bridge asks its
        // broker first.
        let joined = self.await_topic(&pending, |topic| topic.is_joined);
        match self.shard.timeout(JOIN_WITHIN, joined).await {
            Ok(()) => Ok(pending),
            Err(_) => Err(SubscribeError::Disconnected),
        }
    }

    /// Waits until a topic is as it should be, or is gone.
    async fn await_topic(&self, pending: &Pending<'_>, is_so: impl Fn(&Topic) -> bool) {
        poll_fn(|task| {
            let mut state = self.state.borrow_mut();
            let topic = state.topics.get_mut(pending.topic).filter(|topic| !is_so(topic));
            let Some(topic) = topic else { return Poll::Ready(()) };
            topic.wakers.push(task.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Waits for the message of a cursor that another node gave out before it came here.
    pub(crate) async fn await_cursor(
        &self,
        pending: &Pending<'_>,
        name: &str,
        since: Since,
    ) -> Result<(), SubscribeError> {
        let Since::Cursor(cursor) = since else { return Ok(()) };
        let is_here = |topic: &Topic| topic.has_seen(cursor);
        let known = self.state.borrow().topics.get(pending.topic).is_none_or(is_here);
        if known || !self.shared.is_numbered() {
            return Ok(());
        }
        match self.shared.ask(self.home_of(name), Letter::Await { topic: name.into(), cursor }).await {
            Ok(Answer::Done) => {
                let awaited = self.await_topic(pending, is_here);
                let awaited = self.shard.timeout(JOIN_WITHIN, awaited).await;
                awaited.map_err(|_| SubscribeError::Disconnected)
            }
            Ok(Answer::Missing) => Ok(()),
            Ok(_) => Err(SubscribeError::Disconnected),
            Err(AskError::Full) => Err(SubscribeError::Full),
            Err(_) => Err(SubscribeError::Gone),
        }
    }

    /// At home: waits until a message is there, or the bridge has said twice that there is none.
    async fn await_at_home(self: Rc<Node>, name: Arc<str>, cursor: Cursor) -> Answer {
        let mut begun = None;
        let awaited = poll_fn(|task| {
            let state = &mut *self.state.borrow_mut();
            let number = state.names.get(&name).copied();
            let Some(topic) = number.and_then(|number| state.topics.get_mut(number)) else {
                return Poll::Ready(Answer::Full);
            };
            let begun = *begun.get_or_insert(topic.fills);
            if topic.has_seen(cursor) {
                return Poll::Ready(Answer::Done);
            }
            if topic.fills > begun + 1 {
                return Poll::Ready(Answer::Missing);
            }
            topic.wakers.push(task.waker().clone());
            Poll::Pending
        });
        self.shard.timeout(JOIN_WITHIN, awaited).await.unwrap_or(Answer::Full)
    }

    fn is_joined(&self, pending: &Pending<'_>) -> bool {
        self.state.borrow().topics.get(pending.topic).is_some_and(|topic| topic.is_joined)
    }

    /// Counts a subscription.
    pub(crate) fn take_join(&self) -> Result<(), SubscribeError> {
        let (state, now) = (&mut *self.state.borrow_mut(), self.shard.now());
        if now - state.joins_since >= Duration::from_secs(1) {
            (state.joins, state.joins_since) = (0, now);
        }
        if state.joins >= self.options().joins_max {
            return Err(SubscribeError::TooFast);
        }
        state.joins += 1;
        Ok(())
    }

    /// Makes a connection a member of a topic that this shard knows.
    pub(crate) fn add_member(
        &self,
        of: u32,
        topic: u32,
        since: Since,
        slow: Slow,
    ) -> Result<Cursor, SubscribeError> {
        let state = &mut *self.state.borrow_mut();
        let slow = state.number_of(slow)?;
        let (Some(connection), Some(found)) = (state.connections.get_mut(of), state.topics.get_mut(topic))
        else {
            return Err(SubscribeError::Gone);
        };
        if connection.topics.iter().any(|(known, _)| *known == topic) {
            return Err(SubscribeError::Subscribed);
        }
        if connection.topics.len() >= usize::from(self.options().connection_topics_max) {
            return Err(SubscribeError::TooManyTopics);
        }
        let (next, is_gap) = begin(found, since, self.shared.is_numbered());
        // What was gone before it came is reported to it. From there on its policy holds.
        let missed = found.log.first().saturating_sub(next);
        let mut member = Member::new(of, connection.topics.len() as u16, slow, next + missed);
        member.set_owes_gap(is_gap || missed > 0);
        if missed > 0 {
            state.owed.insert((of, topic), missed);
        }
        let place = found.members.add(member);
        // Lists are short, and most of them never grow again.
        connection.topics.reserve_exact(1);
        connection.topics.push((topic, place as u32));
        found.came();
        if is_gap || missed > 0 || next < found.log.head() {
            found.members.set_lags(place, true);
            if connection.room == Room::Free {
                connection.room = Room::Due;
                state.due.push_back(of);
            }
            self.ask_page();
        }
        Ok(match missed {
            0 => found.cursor_before(next),
            // Numbers without holes: the messages that it gets the report of are behind it.
            _ => Cursor { epoch: found.epoch, seq: next - 1 },
        })
    }

    /// Numbers a message, and has all shards with members take it in.
    fn number(&self, state: &mut State, number: u32, key: Box<[u8]>, payload: Bytes) {
        if let Some(topic) = state.topics.get(number) {
            let entry = topic.entry(topic.last + 1, key, payload, self.shard.now());
            self.spread(state, number, entry);
        }
    }

    /// Has all shards with members take a message in.
    fn spread(&self, state: &mut State, number: u32, entry: Arc<Entry>) {
        let Some(Topic { name, shards, .. }) = state.topics.get_mut(number) else { return };
        shards.retain(|shard| {
            let letter = Letter::Entry { topic: name.clone(), entry: entry.clone() };
            let sent = self.shared.send(*shard, letter);
            // It sees by the numbers of the next one that it missed something, if one follows soon.
            if sent == Err(PublishError::Full) {
                state.behind.insert((number, *shard));
            }
            // One that ended has no members.
            sent != Err(PublishError::Gone)
        });
        self.take_in(state, number, entry);
    }
}

/// The home of all topics, as a bridge sees it.
impl Home for Node {
    fn take(&self, name: &str, news: BridgeNews) {
        let state = &mut *self.state.borrow_mut();
        let known = state.names.get(name).copied();
        if let BridgeNews::Receive(key, payload) = news {
            // Without room for the topic it has no member.
            let published = self.published(state, name, key, payload);
            self.count_refused(state, published);
            return;
        }
        let Some((number, topic)) = known.and_then(|number| Some((number, state.topics.get_mut(number)?)))
        else {
            return;
        };
        let (last, is_joined, epoch) = (topic.last, topic.is_joined, topic.epoch);
        match news {
            BridgeNews::Receive(..) => {}
            BridgeNews::Lost => self.spread_gap(state, number, self.shard.random(), last),
            BridgeNews::Gap { epoch, floor } => self.spread_gap(state, number, epoch, floor),
            BridgeNews::Deliver(message) if is_joined && message.seq > last => {
                self.spread_numbered(state, number, message);
            }
            BridgeNews::Deliver(_) => {}
            BridgeNews::Fill(fill) => {
                if is_joined && (epoch != fill.epoch || fill.floor > last) {
                    self.spread_gap(state, number, fill.epoch, fill.floor);
                } else if !is_joined {
                    topic.begin(fill.epoch, fill.floor);
                }
                for message in fill.messages {
                    if state.topics.get(number).is_some_and(|topic| message.seq > topic.last) {
                        self.spread_numbered(state, number, message);
                    }
                }
                self.spread_joined(state, number, is_joined);
                if let Some(topic) = state.topics.get_mut(number) {
                    topic.fills += 1;
                    topic.wake_all();
                }
            }
        }
    }
}

impl Node {
    fn spread_numbered(&self, state: &mut State, number: u32, message: NumberedMessage) {
        if let Some(topic) = state.topics.get(number) {
            let NumberedMessage { seq, key, payload } = message;
            let entry = topic.entry(seq, key, payload, self.shard.now());
            self.spread(state, number, entry);
        }
    }

    /// Has all shards with members report a gap.
    fn spread_gap(&self, state: &mut State, number: u32, epoch: u64, floor: u64) {
        let Some(topic) = state.topics.get(number).filter(|topic| topic.is_joined) else { return };
        let gap = GapLetter { epoch, floor, gaps: topic.gaps + 1 };
        for shard in &topic.shards {
            let letter = Letter::Gap { topic: topic.name.clone(), gap };
            // It sees it by the next message, if one follows soon.
            if self.shared.send(*shard, letter) == Err(PublishError::Full) {
                state.behind.insert((number, *shard));
            }
        }
        self.take_gap(state, number, gap);
    }

    /// Has those that wait for a topic know that its bridge has said what there is.
    fn spread_joined(&self, state: &mut State, number: u32, was_joined: bool) {
        let Some(topic) = state.topics.get_mut(number).filter(|_| !was_joined) else { return };
        topic.is_joined = true;
        for shard in &topic.shards {
            // One that is full asks again with its next member.
            let _ =
                self.shared.send(*shard, Letter::Joined { topic: topic.name.clone(), known: topic.known() });
        }
        topic.wake_all();
    }
}

/// True if a bridge that numbers has no way to its broker.
fn is_down(shared: &Shared) -> bool {
    shared.is_numbered() && !shared.bridge_state.is_up()
}

/// Answers a question about this shard.
fn answer(state: &State, question: Letter) -> Answer {
    let find = |topic: &str| state.names.get(topic).and_then(|number| state.topics.get(*number));
    match question {
        Letter::Count { topic, .. } => {
            Answer::Count(find(&topic).map_or(0, |topic| topic.count.load(Ordering::Relaxed)))
        }
        Letter::History { topic, most } => {
            let log = find(&topic).into_iter().flat_map(|topic| topic.log.iter());
            let all = log.map(|stored| (stored.entry.cursor, stored.entry.payload.clone()));
            let mut all: Vec<_> = all.collect();
            Answer::History(all.split_off(all.len().saturating_sub(most)))
        }
        Letter::Members { topic, from, most } => Answer::Members(state.members(&topic, from, most)),
        _ => Answer::Done,
    }
}

/// The number of the first message that a subscription brings, and whether what was before it is
/// not known.
pub(crate) fn begin(topic: &Topic, since: Since, is_numbered: bool) -> (u64, bool) {
    let (first, head) = (topic.log.first(), topic.log.head());
    match since {
        Since::Newest => (head, false),
        Since::Retained => (first.max(head - 1), false),
        Since::Cursor(cursor) if cursor.epoch == topic.epoch && cursor.seq <= topic.last => {
            match cursor.seq >= topic.log.floor() {
                true => (topic.log.behind(cursor.seq), false),
                // Numbers without holes say how many fell off.
                false if !is_numbered => (cursor.seq + 1, false),
                false => (first, true),
            }
        }
        Since::Cursor(_) => (head, true),
    }
}
