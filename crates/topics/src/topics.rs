//! The API: the topics of a server, those of a shard, and a connection's part.

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use ringserve_server::sync::AskError;
use ringserve_server::{LocalHandle, Shard};

use crate::bridge::Bridge;
use crate::form::{Cursor, Form};
use crate::name::is_name;
use crate::node::Node;
use crate::node::state::{Connection, Room};
use crate::options::{PublishError, Since, Slow, SubscribeError, TopicOptions};
use crate::reader::TopicReader;
use crate::shared::{Answer, Letter, Shared};
use crate::topic::TopicCounts;

/// Members that one question about them names at most.
const MEMBERS_MAX: usize = 1000;

/// The topics of a server: made before it starts, cloned into its factory, and used from any
/// thread.
///
/// Each topic has a home among the shards, which numbers its messages; so all members see one
/// order. A clone costs a reference count.
#[derive(Clone)]
pub struct Topics {
    shared: Arc<Shared>,
}

/// A [`Form`] that was added to a server's topics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormId(u8);

impl Topics {
    /// Topics within these bounds.
    pub fn new(options: TopicOptions) -> Topics {
        Topics { shared: Arc::new(Shared::new(options)) }
    }

    /// Adds a form in which members get messages, before the server starts.
    ///
    /// # Panics
    /// If there are 8 already, or a shard [registered](Topics::register).
    pub fn form(&self, form: impl Form) -> FormId {
        FormId(self.shared.add_form(Arc::new(form)))
    }

    /// Connects these topics with those of other nodes, before the server starts: they are the same
    /// topics then. The first shard is the home of all.
    ///
    /// # Panics
    /// If there is a bridge already, or a shard [registered](Topics::register).
    pub fn bridge(&self, bridge: impl Bridge) {
        self.shared.set_bridge(Box::new(bridge));
    }

    /// Registers a shard, in the factory of a server: from now on it has members. Services of one
    /// shard share the result by [`Shard::shared_rc`].
    ///
    /// # Panics
    /// If this shard registered already, or a server with another number of shards uses this value.
    pub fn register(&self, shard: &Shard) -> ShardTopics {
        let node = Node::new(shard, &self.shared);
        let handler = node.clone();
        self.shared.register(shard, move |from, letter, reply| handler.handle(from, letter, reply));
        ShardTopics { node }
    }

    /// Publishes a message, from any thread. It never waits: the home of the topic numbers it in a
    /// moment. Messages of one thread come in their order. On a shard [`ShardTopics::publish`]
    /// costs less.
    ///
    /// # Errors
    /// A [`PublishError`] says why no member gets it.
    pub fn publish(&self, topic: &str, payload: impl Into<Bytes>) -> Result<(), PublishError> {
        self.publish_keyed(topic, "", payload)
    }

    /// Publishes a message under a key, of which members that read slowly may want the newest alone
    /// ([`Slow::Latest`]).
    ///
    /// # Errors
    /// As [`publish`](Topics::publish).
    pub fn publish_keyed(
        &self,
        topic: &str,
        key: impl AsRef<[u8]>,
        payload: impl Into<Bytes>,
    ) -> Result<(), PublishError> {
        let (key, payload) = (key.as_ref(), payload.into());
        self.shared.check(topic, key, &payload)?;
        let shards = self.shared.shards();
        if shards == 0 {
            return Err(PublishError::Gone);
        }
        let letter = Letter::Publish { topic: topic.into(), key: key.into(), payload };
        self.shared.send(self.shared.home_of(topic, shards), letter)
    }
}

/// The topics of a server on one of its shards. Clones share them.
#[derive(Clone)]
pub struct ShardTopics {
    node: Rc<Node>,
}

impl ShardTopics {
    /// Makes a connection a subscriber, without a topic yet, which gets messages in this form. It
    /// keeps some 100 bytes for it. Its topics end with the result, as when the session that holds
    /// it is dropped.
    ///
    /// # Panics
    /// If the form was added to other topics.
    pub fn subscriber(&self, handle: LocalHandle, form: FormId) -> Subscriber {
        assert!(usize::from(form.0) < self.node.shared.forms().len(), "a form of other topics");
        let connection =
            Connection { handle, form: form.0, room: Room::Free, shown: None, topics: Vec::new() };
        let number = self.node.state.borrow_mut().connections.add(connection);
        Subscriber { node: self.node.clone(), number }
    }

    /// Begins to read a topic in a task, in this form.
    ///
    /// # Errors
    /// As [`Subscriber::subscribe`].
    pub async fn reader(
        &self,
        topic: &str,
        form: FormId,
        since: Since,
    ) -> Result<TopicReader, SubscribeError> {
        if !is_name(topic) {
            return Err(SubscribeError::Name);
        }
        TopicReader::begin(&self.node, topic, form.0, since).await
    }

    /// Publishes a message, as [`Topics::publish`]. Members of this shard get it with the end of
    /// the turn if the home of the topic is this shard.
    ///
    /// # Errors
    /// A [`PublishError`] says why no member gets it.
    pub fn publish(&self, topic: &str, payload: impl Into<Bytes>) -> Result<(), PublishError> {
        self.node.publish(topic, b"", payload.into())
    }

    /// As [`Topics::publish_keyed`].
    ///
    /// # Errors
    /// As [`publish`](ShardTopics::publish).
    pub fn publish_keyed(
        &self,
        topic: &str,
        key: impl AsRef<[u8]>,
        payload: impl Into<Bytes>,
    ) -> Result<(), PublishError> {
        self.node.publish(topic, key.as_ref(), payload.into())
    }

    /// Publishes a message, and waits until it is kept: until its topic has a place for it, or,
    /// with a [bridge](crate::bridge) that numbers, until the broker has said that it keeps it.
    ///
    /// # Errors
    /// A [`PublishError`] says why it may not be kept.
    pub async fn publish_acked(
        &self,
        topic: &str,
        key: impl AsRef<[u8]>,
        payload: impl Into<Bytes>,
    ) -> Result<(), PublishError> {
        let (key, payload) = (key.as_ref(), payload.into());
        self.node.shared.check(topic, key, &payload)?;
        let letter = Letter::PublishAcked { topic: topic.into(), key: key.into(), payload };
        match self.node.shared.ask(self.node.home_of(topic), letter).await {
            Ok(Answer::Published(result)) => result,
            Ok(_) | Err(AskError::Full) => Err(PublishError::Full),
            Err(_) => Err(PublishError::Gone),
        }
    }

    /// The number of a topic's members on all nodes of a [bridge](crate::bridge), as it was some
    /// seconds ago; without one as [`count`](ShardTopics::count).
    ///
    /// # Errors
    /// Those of a question to another shard.
    pub async fn count_on_all_nodes(&self, topic: &str) -> Result<usize, AskError> {
        let question = Letter::Count { topic: topic.into(), is_of_all_nodes: true };
        let answer = self.node.shared.ask(self.node.home_of(topic), question).await?;
        Ok(if let Answer::Count(count) = answer { count } else { 0 })
    }

    /// The number of a topic's members on all shards, as it was a moment ago.
    ///
    /// # Errors
    /// Those of a question to another shard.
    pub async fn count(&self, topic: &str) -> Result<usize, AskError> {
        let known = {
            let state = self.node.state.borrow();
            let found = state.names.get(topic).and_then(|number| state.topics.get(*number));
            found.filter(|topic| topic.is_joined).map(|topic| topic.count.load(Ordering::Relaxed))
        };
        match known {
            Some(count) => Ok(count),
            None => {
                let question = Letter::Count { topic: topic.into(), is_of_all_nodes: false };
                let asked = self.node.shared.ask(self.node.home_of(topic), question);
                Ok(if let Answer::Count(count) = asked.await? { count } else { 0 })
            }
        }
    }

    /// Members of a topic on the shard of that number, by what they are
    /// [shown](Subscriber::set_shown) as: those from the `from`th on, at most 1000, connections
    /// before [readers](TopicReader). Members without a name are left out.
    ///
    /// # Errors
    /// Those of a question to another shard.
    pub async fn members(&self, topic: &str, shard: usize, from: usize) -> Result<Vec<Arc<str>>, AskError> {
        let question = Letter::Members { topic: topic.into(), from, most: MEMBERS_MAX };
        let answer = self.node.shared.ask(shard, question).await?;
        Ok(if let Answer::Members(members) = answer { members } else { Vec::new() })
    }

    /// The newest messages of a topic that are kept, at most `most` of them, the oldest first.
    ///
    /// # Errors
    /// Those of a question to another shard.
    pub async fn history(&self, topic: &str, most: usize) -> Result<Vec<(Cursor, Bytes)>, AskError> {
        let question = Letter::History { topic: topic.into(), most };
        let answer = self.node.shared.ask(self.node.home_of(topic), question).await?;
        Ok(if let Answer::History(messages) = answer { messages } else { Vec::new() })
    }

    /// Figures of the topics of this shard: the 50 with the most deliveries, and the sum of all
    /// others, named `other`, with what topics counted that the shard knows no longer.
    pub fn figures(&self) -> Vec<TopicFigures> {
        let state = self.node.state.borrow();
        let each = state.topics.iter().map(|topic| TopicFigures {
            members: topic.members.len() + topic.feeds.len(),
            lagging: topic.members.lagging(),
            log_bytes: topic.log.bytes(),
            ..TopicFigures::of_counts(topic.name.clone(), topic.moved)
        });
        figures(each, state.forgotten)
    }

    /// The shard.
    pub fn shard(&self) -> &Shard {
        &self.node.shard
    }
}

/// Topics that have their own figures.
const FIGURES_MAX: usize = 50;

fn figures(all: impl Iterator<Item = TopicFigures>, forgotten: TopicCounts) -> Vec<TopicFigures> {
    let mut all: Vec<_> = all.collect();
    all.sort_by(|one, other| other.deliveries.cmp(&one.deliveries).then_with(|| one.topic.cmp(&other.topic)));
    let rest = all.split_off(all.len().min(FIGURES_MAX));
    if !rest.is_empty() || forgotten != TopicCounts::default() {
        let other = TopicFigures::of_counts("other".into(), forgotten);
        all.push(rest.into_iter().fold(other, TopicFigures::plus));
    }
    all
}

/// Figures of a topic on a shard, since the shard knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TopicFigures {
    /// Its name.
    pub topic: Arc<str>,
    /// Members, readers among them.
    pub members: usize,
    /// Members whose outbox is full.
    pub lagging: usize,
    /// Bytes of its log, each message counted with 128 more.
    pub log_bytes: usize,
    /// Messages that came.
    pub messages: u64,
    /// Messages from other shards and threads that found no room for their topic
    /// ([`TopicOptions::topics_max`]), in the row `other` alone.
    pub refused: u64,
    /// Bytes of the messages that came.
    pub bytes: u64,
    /// Messages that members got.
    pub deliveries: u64,
    /// Messages that members did not get, since they fell off the log.
    pub skipped: u64,
    /// Messages that members did not get, since they have no frame in the framing of their service,
    /// or the form panicked.
    pub unframed: u64,
    /// Members that were reset for reading slowly.
    pub cut: u64,
}

impl TopicFigures {
    fn of_counts(topic: Arc<str>, counts: TopicCounts) -> TopicFigures {
        let TopicCounts { messages, refused, bytes, deliveries, skipped, unframed, cut } = counts;
        TopicFigures {
            topic,
            members: 0,
            lagging: 0,
            log_bytes: 0,
            messages,
            refused,
            bytes,
            deliveries,
            skipped,
            unframed,
            cut,
        }
    }

    /// The sum, under the name of the first.
    fn plus(self, more: TopicFigures) -> TopicFigures {
        TopicFigures {
            topic: self.topic,
            members: self.members + more.members,
            lagging: self.lagging + more.lagging,
            log_bytes: self.log_bytes + more.log_bytes,
            messages: self.messages + more.messages,
            refused: self.refused + more.refused,
            bytes: self.bytes + more.bytes,
            deliveries: self.deliveries + more.deliveries,
            skipped: self.skipped + more.skipped,
            unframed: self.unframed + more.unframed,
            cut: self.cut + more.cut,
        }
    }
}

/// A connection's part: the topics of which it is a member. Its drop, as with the session that
/// holds it, ends them.
pub struct Subscriber {
    node: Rc<Node>,
    number: u32,
}

impl Subscriber {
    /// Makes the connection a member of a topic. It is one when the future is done, which waits
    /// only where the shard has no other member of a topic whose home is another shard. Returns the
    /// place behind which its messages begin.
    ///
    /// A service checks who may be a member of what before it calls this: the first member makes
    /// the topic.
    ///
    /// # Errors
    /// A [`SubscribeError`] says why it is none.
    pub async fn subscribe(&self, topic: &str, since: Since, slow: Slow) -> Result<Cursor, SubscribeError> {
        if !is_name(topic) {
            return Err(SubscribeError::Name);
        }
        self.node.take_join()?;
        let pending = self.node.join(topic).await?;
        self.node.await_cursor(&pending, topic, since).await?;
        self.node.add_member(self.number, pending.topic, since, slow)
    }

    /// Ends the membership of a topic. False if there is none. What is queued for the connection
    /// still leaves.
    pub fn unsubscribe(&self, topic: &str) -> bool {
        let state = &mut *self.node.state.borrow_mut();
        let Some(number) = state.names.get(topic).copied() else { return false };
        let topics = state.connections.get(self.number).map(|connection| &connection.topics);
        let place = topics.and_then(|topics| topics.iter().position(|(of, _)| *of == number));
        if let Some(place) = place {
            state.remove_member(self.number, place);
        }
        place.is_some()
    }

    /// Ends all memberships.
    pub fn unsubscribe_all(&self) {
        let state = &mut *self.node.state.borrow_mut();
        while let Some(last) =
            state.connections.get(self.number).and_then(|own| own.topics.len().checked_sub(1))
        {
            state.remove_member(self.number, last);
        }
    }

    /// The names of its topics, in no order.
    pub fn topics(&self) -> Vec<Arc<str>> {
        let state = self.node.state.borrow();
        let own = state.connections.get(self.number).into_iter().flat_map(|connection| &connection.topics);
        own.filter_map(|(number, _)| state.topics.get(*number)).map(|topic| topic.name.clone()).collect()
    }

    /// The number of its topics.
    pub fn count(&self) -> usize {
        self.node.state.borrow().connections.get(self.number).map_or(0, |connection| connection.topics.len())
    }

    /// Sets the name that others see of this member where they ask for
    /// [members](ShardTopics::members). The service decides; by default it is not listed.
    pub fn set_shown(&self, shown: Option<Arc<str>>) {
        if let Some(connection) = self.node.state.borrow_mut().connections.get_mut(self.number) {
            connection.shown = shown;
        }
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        self.unsubscribe_all();
        self.node.state.borrow_mut().connections.remove(self.number);
    }
}

impl fmt::Debug for Topics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Topics").field("options", &self.shared.options).finish_non_exhaustive()
    }
}

impl fmt::Debug for ShardTopics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let topics = self.node.state.borrow().topics.len();
        f.debug_struct("ShardTopics").field("topics", &topics).finish_non_exhaustive()
    }
}

impl fmt::Debug for Subscriber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscriber").field("count", &self.count()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_name_fifty_topics_and_sum_the_rest() {
        let of = |n: u64| TopicFigures {
            topic: format!("t{n}").into(),
            members: 1,
            lagging: 0,
            log_bytes: 0,
            messages: 1,
            refused: 0,
            bytes: n,
            deliveries: n,
            skipped: 0,
            unframed: 0,
            cut: 0,
        };
        let some = figures((0..50).map(of), TopicCounts::default());
        assert_eq!((some.len(), &*some[0].topic), (50, "t49"));
        let all = figures((0..100_000).map(of), TopicCounts::default());
        assert_eq!((all.len(), &*all[0].topic, &*all[50].topic), (51, "t99999", "other"));
        assert_eq!((all[50].members, all[50].bytes), (99_950, (0..99_950).sum()));
        let forgotten = TopicCounts { cut: 2, ..TopicCounts::default() };
        let with_forgotten = figures((0..2).map(of), forgotten);
        assert_eq!((with_forgotten.len(), &*with_forgotten[2].topic, with_forgotten[2].cut), (3, "other", 2));
    }
}
