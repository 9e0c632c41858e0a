//! Bounds of a server's topics, and the options of a subscription.

use std::fmt;
use std::time::Duration;

use crate::form::Cursor;
use crate::log::History;

/// The bounds of topics. All but `history` are for each shard.
///
/// ```
/// use ringserve::topics::{History, TopicOptions};
///
/// let options = TopicOptions::new(History::last(1024)).topics_max(10_000).connection_topics_max(16);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct TopicOptions {
    pub(crate) history: History,
    pub(crate) topics_max: usize,
    pub(crate) connection_topics_max: u16,
    pub(crate) log_bytes_max: usize,
    pub(crate) message_bytes_max: usize,
    pub(crate) joins_max: u32,
}

impl TopicOptions {
    /// Topics with this much history, within the bounds that the other methods name.
    pub fn new(history: History) -> TopicOptions {
        TopicOptions {
            history,
            topics_max: 100_000,
            connection_topics_max: 64,
            log_bytes_max: 64 << 20,
            message_bytes_max: 256 << 10,
            joins_max: 10_000,
        }
    }

    /// Topics that a shard knows, those of which it has a member and those that are numbered on it:
    /// 100 000. One takes some 400 bytes beside its log and its members. Beyond it a new topic
    /// takes the place of one without a member, whose history goes: of 64 that are looked at, the
    /// one whose last message is oldest. So where strangers may publish to names that they choose,
    /// they drive out the history of topics without a member.
    pub fn topics_max(self, topics: usize) -> TopicOptions {
        TopicOptions { topics_max: topics, ..self }
    }

    /// Topics of a connection: 64. Each takes 24 bytes.
    pub fn connection_topics_max(self, topics: u16) -> TopicOptions {
        TopicOptions { connection_topics_max: topics, ..self }
    }

    /// Bytes of all messages that the logs of a shard keep, each counted with 128 more: 64 MiB.
    /// Beyond it messages go, those of the topic that gets a new one first. The newest message of a
    /// topic goes last.
    pub fn log_bytes_max(self, bytes: usize) -> TopicOptions {
        TopicOptions { log_bytes_max: bytes, ..self }
    }

    /// Bytes of a message and its key: 256 KiB. Choose it so that the framing of each service has a
    /// frame for what its [`Form`](crate::Form) makes of such a message: a length of two bytes ends
    /// at 64 KiB. Members do not get a message without a frame, and
    /// [`TopicFigures::unframed`](crate::TopicFigures::unframed) counts it.
    pub fn message_bytes_max(self, bytes: usize) -> TopicOptions {
        TopicOptions { message_bytes_max: bytes, ..self }
    }

    /// Subscriptions that begin within a second: 10 000.
    pub fn joins_per_second_max(self, joins: u32) -> TopicOptions {
        TopicOptions { joins_max: joins, ..self }
    }
}

/// The place where a subscription begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Since {
    /// With the next message.
    Newest,
    /// With the newest message that is kept, if there is one.
    Retained,
    /// Behind the message that the client saw last. What is not kept of the messages since then is
    /// reported as a [`Gap`](crate::Gap), whatever the policy of the subscription.
    Cursor(Cursor),
}

/// The policy while a member reads so slowly that its outbox is full. It costs no memory but the
/// log in any case.
///
/// A member gets messages at the end of turns, so it may also lack what falls off the log within
/// one turn: where more is published at once than [`History`] keeps, the policy holds for members
/// that read fast too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Slow {
    /// It goes on where it was; what falls off the log meanwhile is skipped, and reported as
    /// [`Gap::Missed`](crate::Gap::Missed).
    Skip,
    /// It goes on with the newest message of each key, as far as the log has them, and nothing is
    /// reported. Messages without a key are those of one key.
    Latest,
    /// It is reset, with the reason `aborted`, once it is more than `behind` messages behind, or
    /// the oldest that it lacks is older than that when the next one comes.
    Cut {
        /// Messages.
        behind: u64,
        /// Age of a message.
        within: Duration,
    },
    /// It goes on where it was, and is reset, with the reason `aborted`, once a message falls off
    /// the log that it has not got.
    Queue,
}

/// The reason why a connection became no member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SubscribeError {
    /// The topic has [no name](crate::is_name).
    Name,
    /// It is a member already.
    Subscribed,
    /// The connection is a member of [`TopicOptions::connection_topics_max`] topics.
    TooManyTopics,
    /// A shard has [`TopicOptions::topics_max`] topics, or too much to do. Try again later.
    Full,
    /// More than [`TopicOptions::joins_per_second_max`] in this second. Try again in the next one.
    TooFast,
    /// The shard that numbers the topic has ended, or the connection.
    Gone,
    /// A [bridge](crate::bridge) that numbers has no way to its broker, or no answer in time. Try
    /// again later.
    Disconnected,
}

impl fmt::Display for SubscribeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SubscribeError::Name => "no name of a topic",
            SubscribeError::Subscribed => "subscribed already",
            SubscribeError::TooManyTopics => "too many topics of a connection",
            SubscribeError::Full => "a shard has no room for another topic",
            SubscribeError::TooFast => "too many subscriptions in a second",
            SubscribeError::Gone => "the shard of the topic has ended",
            SubscribeError::Disconnected => "there is no way to other nodes",
        })
    }
}

impl std::error::Error for SubscribeError {}

/// The reason why a message was not published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PublishError {
    /// The topic has [no name](crate::is_name).
    Name,
    /// It has more than [`TopicOptions::message_bytes_max`] bytes, or more than a
    /// [bridge](crate::bridge) takes.
    TooLarge,
    /// The shard that numbers the topic has too many messages waiting, or no room for another
    /// topic: try again later. Other shards and threads do not learn of the latter, and
    /// [`TopicFigures::refused`](crate::TopicFigures::refused) counts it.
    Full,
    /// The home has ended, or has not begun.
    Gone,
    /// A [bridge](crate::bridge) that numbers has no way to its broker, or no answer in time: what
    /// was published may be kept.
    Disconnected,
}

impl fmt::Display for PublishError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PublishError::Name => "no name of a topic",
            PublishError::TooLarge => "the message is too large",
            PublishError::Full => "the shard of the topic is full",
            PublishError::Gone => "the shard of the topic has ended",
            PublishError::Disconnected => "there is no way to other nodes",
        })
    }
}

impl std::error::Error for PublishError {}
