//! What shards ask each other, and what they answer.

use ringserve::sync::{Mesh, SendError};

use crate::about::Figures;
use crate::pending::WayBack;
use crate::reply::Protocol;
use crate::session::ClientLine;

/// What shards ask each other. At most one message for each shard is under way for a connection, since one call of it is.
pub enum Message {
    /// Work on a request about keys.
    Work {
        /// What to do.
        work: Work,
        /// Where the reply goes.
        back: WayBack<Answer>,
    },
    /// Tell the figures of the shard, for INFO.
    Figures(WayBack<Figures>),
    /// Tell the connections of the shard, for CLIENT LIST.
    Clients(WayBack<Vec<ClientLine>>),
}

/// A request about keys of one shard.
#[derive(Debug, PartialEq, Eq)]
pub struct Work {
    /// In array form.
    pub request: Vec<u8>,
    /// What the client understands.
    pub protocol: Protocol,
    /// Keys of MGET that were answered before.
    pub skip: usize,
}

/// The reply of one shard to a request.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    /// The reply, or a part of it.
    pub bytes: Vec<u8>,
    /// What to ask for the next part.
    pub rest: Option<Work>,
}

/// Takes messages to other shards.
pub trait Post {
    /// Sends a message without waiting.
    ///
    /// # Errors
    /// If it could not be sent, with the message.
    fn send(&self, to: usize, message: Message) -> Result<(), SendError<Message>>;
}

impl Post for Mesh<Message> {
    fn send(&self, to: usize, message: Message) -> Result<(), SendError<Message>> {
        Mesh::send(self, to, message)
    }
}

/// Why a shard gave no answer. Each is a reply to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unanswered {
    /// Too many messages wait there: the request was not worked on.
    Full(usize),
    /// It had ended before: the request was not worked on.
    Ended(usize),
    /// It ended or panicked meanwhile: the request may have been worked on.
    Lost(usize),
}

impl Unanswered {
    /// The error that the client gets.
    pub fn reply(self) -> Vec<u8> {
        let text = match self {
            Unanswered::Full(shard) => format!("-TRYAGAIN shard {shard} has too many requests waiting\r\n"),
            Unanswered::Ended(shard) => format!("-ERR shard {shard} has ended\r\n"),
            Unanswered::Lost(shard) => format!("-ERR shard {shard} gave no answer\r\n"),
        };
        text.into_bytes()
    }
}

impl Answer {
    /// The error of a shard that gave none.
    pub fn unanswered(why: Unanswered) -> Answer {
        Answer { bytes: why.reply(), rest: None }
    }
}
