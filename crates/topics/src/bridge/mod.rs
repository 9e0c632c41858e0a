//! The way to other nodes: what a bridge gets, and what it gives.
//!
//! ```text
//!   publish on any shard ──▶ shard of the bridge ──▶ Link::publish ──▶ broker
//!   members of all shards ◀── log of the topic ◀── BridgedTopics ◀──── other nodes' messages, gaps
//! ```
//!
//! A bridge runs on the first shard, which is the home of all topics then. There are two kinds.
//! One that only forwards has messages of this node delivered at once, and gives those of others as
//! they come ([`BridgedTopics::receive`]). One that [numbers](Bridge::numbers) has an order of its
//! own, which all nodes share: a message is published to it alone, and comes back with its number
//! ([`BridgedTopics::deliver`]). So cursors are equal on all nodes.

use std::fmt;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use bytes::Bytes;
use ringserve_server::Shard;

use crate::log::History;
use crate::options::PublishError;

/// A means to reach other nodes, given to [`Topics::bridge`](crate::Topics::bridge).
pub trait Bridge: Send + Sync + 'static {
    /// True if messages get their numbers by the bridge, in one order for all nodes. False if it
    /// only forwards them.
    fn numbers(&self) -> bool;

    /// Starts it on the first shard of the server. It has no connection yet, so it says so by
    /// [`BridgedTopics::set_state`] once it has one.
    fn start(&self, shard: &Shard, topics: BridgedTopics) -> Rc<dyn Link>;
}

/// A message on its way to other nodes.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct BridgeMessage<'a> {
    /// The name of the topic.
    pub topic: &'a str,
    /// The key that it is published under; empty without one.
    pub key: &'a [u8],
    /// The message.
    pub payload: &'a Bytes,
}

pub(crate) fn message<'a>(topic: &'a str, key: &'a [u8], payload: &'a Bytes) -> BridgeMessage<'a> {
    BridgeMessage { topic, key, payload }
}

/// The result of a publish that waits until the message is kept.
pub type AckFuture = Pin<Box<dyn Future<Output = Result<(), PublishError>>>>;

/// The number of a topic's members on all other nodes; nothing where the bridge does not know it.
pub type CountFuture = Pin<Box<dyn Future<Output = Option<usize>>>>;

/// A bridge at work, on the first shard. Its methods are called while topics are in use, so they
/// call no method of [`BridgedTopics`]: they queue, and tasks of the bridge do the rest.
pub trait Link {
    /// Begins to follow a topic, which has a member on this node, or a log. A bridge that numbers
    /// answers by [`BridgedTopics::fill`]; until then the topic has no member. One that was
    /// followed already begins again.
    fn join(&self, topic: &Arc<str>);

    /// Ends to follow a topic.
    fn leave(&self, topic: &str);

    /// Compares a topic with the broker soon: a client knows of a message that is not here. A
    /// bridge that numbers answers by [`BridgedTopics::fill`], this time and some moments later
    /// again.
    fn compare(&self, topic: &str);

    /// Sends a message on its way, without waiting.
    ///
    /// # Errors
    /// The message goes nowhere, and is not delivered on this node either.
    fn publish(&self, message: BridgeMessage<'_>) -> Result<(), PublishError>;

    /// Publishes a message, and waits until it is kept. A bridge that only forwards keeps nothing.
    fn publish_acked(&self, message: BridgeMessage<'_>) -> AckFuture;

    /// Reports to the other nodes that this one has `count` members of a topic. It is called once a
    /// second for each topic that is followed.
    fn set_count(&self, topic: &Arc<str>, count: usize);

    /// Counts the members of a topic on all other nodes.
    fn count(&self, topic: &str) -> CountFuture;
}

/// A topic as a bridge that numbers knows it.
#[derive(Debug)]
pub struct Fill {
    /// The life of the order: another one where numbers began again.
    pub epoch: u64,
    /// All messages behind this number are in `messages`; earlier ones may be missing.
    pub floor: u64,
    /// The newest messages, the oldest first.
    pub messages: Vec<NumberedMessage>,
}

/// A message with its number in the order of a bridge.
#[derive(Clone, Debug)]
pub struct NumberedMessage {
    /// Its number, which grows within a topic and has holes.
    pub seq: u64,
    /// The key that it was published under.
    pub key: Box<[u8]>,
    /// The message.
    pub payload: Bytes,
}

/// News of a bridge for the home of all topics.
#[derive(Debug)]
pub(crate) enum BridgeNews {
    Receive(Box<[u8]>, Bytes),
    Lost,
    Fill(Fill),
    Deliver(NumberedMessage),
    Gap { epoch: u64, floor: u64 },
}

/// The home of all topics, which takes in what a bridge says.
pub(crate) trait Home {
    fn take(&self, topic: &str, news: BridgeNews);
}

/// The state of a bridge that all shards see.
#[derive(Debug, Default)]
pub(crate) struct BridgeState {
    is_up: AtomicBool,
    message_bytes_max: AtomicUsize,
}

impl BridgeState {
    pub(crate) fn is_up(&self) -> bool {
        self.is_up.load(Ordering::Acquire)
    }

    /// True if the broker takes a message of this size, as far as that is known.
    pub(crate) fn takes(&self, bytes: usize) -> bool {
        let most = self.message_bytes_max.load(Ordering::Relaxed);
        most == 0 || bytes <= most
    }
}

/// The topics of this node, for its bridge. Clones are the same ones. Calls for topics that are not
/// followed do nothing.
#[derive(Clone)]
pub struct BridgedTopics {
    home: Weak<dyn Home>,
    state: Arc<BridgeState>,
    history: History,
}

impl BridgedTopics {
    pub(crate) fn new(home: Weak<dyn Home>, state: Arc<BridgeState>, history: History) -> BridgedTopics {
        BridgedTopics { home, state, history }
    }

    /// The history that these topics have, which a bridge that keeps messages should have too.
    pub fn history(&self) -> History {
        self.history
    }

    /// Says whether there is a way to the other nodes, and the largest message in bytes, with its
    /// name and key, that it takes. Without a way a bridge that numbers has no messages published
    /// and no members added.
    pub fn set_state(&self, is_up: bool, message_bytes_max: usize) {
        self.state.message_bytes_max.store(message_bytes_max, Ordering::Relaxed);
        self.state.is_up.store(is_up, Ordering::Release);
    }

    /// Takes in a message of another node, from a bridge that only forwards.
    pub fn receive(&self, topic: &str, key: &[u8], payload: Bytes) {
        self.take(topic, BridgeNews::Receive(key.into(), payload));
    }

    /// Reports to the members of a topic that messages of other nodes may be missing here, from a
    /// bridge that only forwards. Cursors of before are none of this topic's any longer.
    pub fn report_loss(&self, topic: &str) {
        self.take(topic, BridgeNews::Lost);
    }

    /// Says what a bridge that numbers knows of a topic, once it follows it.
    pub fn fill(&self, topic: &str, fill: Fill) {
        self.take(topic, BridgeNews::Fill(fill));
    }

    /// Delivers the next message of a topic, from a bridge that numbers. Its number is larger than
    /// those before.
    pub fn deliver(&self, topic: &str, message: NumberedMessage) {
        self.take(topic, BridgeNews::Deliver(message));
    }

    /// Reports to the members of a topic that messages are missing up to number `floor`, from a
    /// bridge that numbers. In another epoch, earlier cursors are none of this topic's any longer.
    pub fn report_gap(&self, topic: &str, epoch: u64, floor: u64) {
        self.take(topic, BridgeNews::Gap { epoch, floor });
    }

    fn take(&self, topic: &str, news: BridgeNews) {
        if let Some(home) = self.home.upgrade() {
            home.take(topic, news);
        }
    }
}

impl fmt::Debug for BridgedTopics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BridgedTopics").field("state", &self.state).finish_non_exhaustive()
    }
}
