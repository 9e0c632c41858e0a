//! State that all shards of a server share, and the letters between them.

use std::hash::BuildHasher;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use bytes::Bytes;
use ringserve_server::Shard;
use ringserve_server::sync::{Ask, Mesh, SendError};

use crate::form::{Cursor, Form};
use crate::name::is_name;
use crate::options::{PublishError, TopicOptions};
use crate::topic::{Entry, FORMS_MAX};

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
        epoch: u64,
        head: u64,
        entries: Vec<Arc<Entry>>,
        count: Arc<AtomicUsize>,
    },
    Entry {
        topic: Arc<str>,
        entry: Arc<Entry>,
    },
    /// To its home: how many members it has.
    Count {
        topic: Arc<str>,
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
}

impl Shared {
    pub(crate) fn new(options: TopicOptions) -> Shared {
        let mesh = Mesh::with_capacity(LETTERS_MAX);
        let (forms, added, hash) = Default::default();
        Shared { options, forms, added, mesh, hash }
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
        handle: impl FnMut(Option<usize>, Letter) -> Answer + 'static,
    ) {
        let freeze = || self.added.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.forms.get_or_init(freeze);
        self.mesh.register(shard, handle);
    }

    /// The number of shards; 0 before the first one registered.
    pub(crate) fn shards(&self) -> usize {
        self.mesh.count()
    }

    pub(crate) fn forms(&self) -> &[Arc<dyn Form>] {
        self.forms.get().map_or(&[], |forms| forms)
    }

    /// The shard that numbers a topic.
    pub(crate) fn home_of(&self, name: &str, shards: usize) -> usize {
        (self.hash.hash_one(name) % shards.max(1) as u64) as usize
    }

    pub(crate) fn check(&self, name: &str, key: &[u8], payload: &Bytes) -> Result<(), PublishError> {
        if !is_name(name) {
            return Err(PublishError::Name);
        }
        if payload.len() + key.len() > self.options.message_bytes_max {
            return Err(PublishError::TooLarge);
        }
        Ok(())
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
