//! State that all shards of a server share, and the letters between them.

use std::hash::BuildHasher;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use bytes::Bytes;
use ringserve_server::Shard;
use ringserve_server::sync::{Ask, Mesh, Reply, SendError};

use crate::bridge::{Bridge, BridgeState};
use crate::form::{Cursor, Form};
use crate::name::is_name;
use crate::options::{PublishError, TopicOptions};
use crate::topic::{Entry, FORMS_MAX, GapLetter, TopicNews};

/// Messages that may wait for a shard.
const LETTERS_MAX: usize = 16_384;

/// A message between shards.
pub(crate) enum Letter {
    /// To the home of a topic: a message.
    Publish {
        topic: Arc<str>,
        key: Box<[u8]>,
        payload: Bytes,
    },
    /// To its home: this shard has a member, or has none any longer.
    Join {
        topic: Arc<str>,
    },
    Leave {
        topic: Arc<str>,
    },
    /// From its home: what is there, before each message that follows.
    Joined {
        topic: Arc<str>,
        known: TopicNews,
    },
    /// From its home: messages are missing.
    Gap {
        topic: Arc<str>,
        gap: GapLetter,
    },
    Entry {
        topic: Arc<str>,
        entry: Arc<Entry>,
    },
    /// To its home: a message, which is kept before the answer.
    PublishAcked {
        topic: Arc<str>,
        key: Box<[u8]>,
        payload: Bytes,
    },
    /// To its home: a client knows this message, which is not here.
    Await {
        topic: Arc<str>,
        cursor: Cursor,
    },
    /// To its home: how many members it has, on this node or on all.
    Count {
        topic: Arc<str>,
        is_of_all_nodes: bool,
    },
    /// To its home: the newest messages that are kept.
    History {
        topic: Arc<str>,
        most: usize,
    },
    /// The members of this shard that are shown, from this one on.
    Members {
        topic: Arc<str>,
        from: usize,
        most: usize,
    },
}

/// The answer to a letter that is a question.
#[derive(Debug)]
pub(crate) enum Answer {
    Done,
    Full,
    /// The broker does not have it.
    Missing,
    Published(Result<(), PublishError>),
    Count(usize),
    Members(Vec<Arc<str>>),
    History(Vec<(Cursor, Bytes)>),
}

/// State that all shards share.
pub(crate) struct Shared {
    pub(crate) options: TopicOptions,
    forms: OnceLock<Vec<Arc<dyn Form>>>,
    added: Mutex<Vec<Arc<dyn Form>>>,
    mesh: Mesh<Letter, Answer>,
    hash: foldhash::fast::FixedState,
    bridge: OnceLock<Box<dyn Bridge>>,
    pub(crate) bridge_state: Arc<BridgeState>,
}

impl Shared {
    pub(crate) fn new(options: TopicOptions) -> Shared {
        let mesh = Mesh::with_capacity(LETTERS_MAX);
        let (forms, added, hash, bridge, bridge_state) = Default::default();
        Shared { options, forms, added, mesh, hash, bridge, bridge_state }
    }

    /// Sets the bridge of all topics.
    ///
    /// # Panics
    /// If there is one, or a shard registered.
    pub(crate) fn set_bridge(&self, bridge: Box<dyn Bridge>) {
        assert!(self.forms.get().is_none(), "a bridge is set before the server starts");
        assert!(self.bridge.set(bridge).is_ok(), "topics have one bridge");
    }

    pub(crate) fn bridge(&self) -> Option<&dyn Bridge> {
        self.bridge.get().map(|bridge| &**bridge)
    }

    /// True if a bridge gives messages their numbers.
    pub(crate) fn is_numbered(&self) -> bool {
        self.bridge().is_some_and(Bridge::numbers)
    }

    /// Adds a form. Returns its number.
    ///
    /// # Panics
    /// If there are as many already as may be, or a shard registered.
    pub(crate) fn add_form(&self, form: Arc<dyn Form>) -> u8 {
        assert!(self.forms.get().is_none(), "forms are added before the server starts");
        let mut added = self.added.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(added.len() < FORMS_MAX, "at most {FORMS_MAX} forms");
        added.push(form);
        added.len() as u8 - 1
    }

    /// Registers a shard, whose letters `handle` carries out.
    pub(crate) fn register(
        &self,
        shard: &Shard,
        handle: impl FnMut(Option<usize>, Letter, Reply<Answer>) + 'static,
    ) {
        let freeze = || self.added.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.forms.get_or_init(freeze);
        self.mesh.register_with_reply(shard, handle);
    }

    /// The number of shards; 0 before the first one registered.
    pub(crate) fn shards(&self) -> usize {
        self.mesh.count()
    }

    pub(crate) fn forms(&self) -> &[Arc<dyn Form>] {
        self.forms.get().map_or(&[], |forms| forms)
    }

    /// The shard that numbers a topic. That of a bridge is the first one.
    pub(crate) fn home_of(&self, name: &str, shards: usize) -> usize {
        if self.bridge.get().is_some() {
            return 0;
        }
        (self.hash.hash_one(name) % shards.max(1) as u64) as usize
    }

    pub(crate) fn check(&self, name: &str, key: &[u8], payload: &Bytes) -> Result<(), PublishError> {
        if !is_name(name) {
            return Err(PublishError::Name);
        }
        if payload.len() + key.len() > self.options.message_bytes_max {
            return Err(PublishError::TooLarge);
        }
        if self.bridge.get().is_some() {
            self.check_bridge(name, key, payload)?;
        }
        Ok(())
    }

    #[cold]
    fn check_bridge(&self, name: &str, key: &[u8], payload: &Bytes) -> Result<(), PublishError> {
        // As many bytes as a key has when each of them is escaped.
        if !self.bridge_state.takes(name.len() + 3 * key.len() + payload.len()) {
            return Err(PublishError::TooLarge);
        }
        match self.is_numbered() && !self.bridge_state.is_up() {
            true => Err(PublishError::Disconnected),
            false => Ok(()),
        }
    }

    pub(crate) fn send(&self, to: usize, letter: Letter) -> Result<(), PublishError> {
        self.mesh.try_send(to, letter).map_err(|error| match error {
            SendError::Full(_) => PublishError::Full,
            SendError::Gone(_) => PublishError::Gone,
        })
    }

    pub(crate) fn ask(&self, to: usize, letter: Letter) -> Ask<Answer> {
        self.mesh.ask(to, letter)
    }
}
