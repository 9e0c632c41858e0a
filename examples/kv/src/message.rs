//! What shards ask each other, and what they answer.

use ringserve::sync::{AskError, Mesh};

use crate::about::Figures;
use crate::reply::Protocol;
use crate::session::ClientLine;

/// The ways to all shards, one for each kind of question. At most one question to each shard is under way for a
/// connection, since one call of it is.
#[derive(Clone)]
pub struct Ways {
    /// Work on a request about keys.
    pub work: Mesh<Work, Answer>,
    /// Tell the figures of the shard, for INFO.
    pub figures: Mesh<(), Figures>,
    /// Tell the connections of the shard, for CLIENT LIST. This connection asks.
    pub clients: Mesh<u64, Vec<ClientLine>>,
}

impl Ways {
    /// With room for that many requests to each shard.
    pub fn with_capacity(requests: usize) -> Ways {
        Ways {
            work: Mesh::with_capacity(requests),
            figures: Mesh::with_capacity(requests),
            clients: Mesh::with_capacity(requests),
        }
    }
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

/// The reply to a client about a shard that gave no answer.
pub fn unanswered(shard: usize, why: AskError) -> Vec<u8> {
    let text = match why {
        AskError::Full => format!("-TRYAGAIN shard {shard} has too many requests waiting\r\n"),
        AskError::Gone => format!("-ERR shard {shard} has ended\r\n"),
        // The request may have been worked on.
        _ => format!("-ERR shard {shard} gave no answer\r\n"),
    };
    text.into_bytes()
}
