//! The bridge as a program configures it.

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use ringserve_nats::{Nats, NatsOptions};
use ringserve_server::Shard;
use ringserve_topics::bridge::{Bridge, BridgedTopics, Link};
use ringserve_topics::is_name;

use crate::live::Live;
use crate::names::Names;
use crate::stats::{BridgeMonitor, Counters};
use crate::stream::{Storage, Stream};

/// A bridge of topics to other nodes, by NATS, for
/// [`Topics::bridge`](ringserve_topics::Topics::bridge).
pub struct NatsBridge {
    options: NatsOptions,
    names: Names,
    storage: Option<Storage>,
    counters: Arc<Counters>,
}

impl NatsBridge {
    /// A bridge that forwards messages, and keeps none: each comes at most once, in the order of
    /// its publisher. Members of this node get those of their node at once. Where messages of
    /// others may be missing, members get the report of a gap.
    ///
    /// `namespace` is the first token of all subjects, the same on all nodes.
    ///
    /// # Panics
    /// If `namespace` is no [name](ringserve_topics::is_name) of one token.
    pub fn live(options: NatsOptions, namespace: &str) -> NatsBridge {
        assert!(is_name(namespace) && !namespace.contains('.'), "{namespace:?} is no token");
        // What this node publishes, its members have already.
        let options = options.echo(false);
        NatsBridge { options, names: Names::new(namespace), storage: None, counters: Arc::default() }
    }

    /// A bridge over a stream of JetStream, which numbers all messages and keeps those that the
    /// [`History`](ringserve_topics::History) of the topics says: the last ones of each topic, for
    /// its time. All nodes deliver one order, under equal cursors, and what the stream has taken
    /// alone.
    ///
    /// The stream has the name of the namespace. Where there is none it is made, on file and
    /// without replicas unless [`in_memory`](NatsBridge::in_memory) and
    /// [`replicas`](NatsBridge::replicas) say more; one that is there stays as it is, and has to
    /// have `allow_direct` and the `republish` of [Subjects](crate#subjects).
    ///
    /// Each message waits for the stream before any member gets it.
    /// [`publish`](ringserve_topics::ShardTopics::publish) does not say whether it did;
    /// [`publish_acked`](ringserve_topics::ShardTopics::publish_acked) does.
    ///
    /// # Panics
    /// As [`live`](NatsBridge::live).
    pub fn stream(options: NatsOptions, namespace: &str) -> NatsBridge {
        let storage = Some(Storage { is_in_memory: false, replicas: 1 });
        NatsBridge { storage, ..NatsBridge::live(options, namespace) }
    }

    /// Makes the stream in the memory of NATS: its messages end with it.
    pub fn in_memory(self) -> NatsBridge {
        let storage = self.storage.map(|storage| Storage { is_in_memory: true, ..storage });
        NatsBridge { storage, ..self }
    }

    /// Makes the stream on this many servers of NATS, 1 to 5.
    ///
    /// # Panics
    /// If it is another number.
    pub fn replicas(self, replicas: u8) -> NatsBridge {
        assert!((1..=5).contains(&replicas), "JetStream has 1 to 5 replicas");
        let storage = self.storage.map(|storage| Storage { replicas, ..storage });
        NatsBridge { storage, ..self }
    }

    /// Reads the figures of this bridge once it is given away.
    pub fn monitor(&self) -> BridgeMonitor {
        BridgeMonitor { counters: self.counters.clone() }
    }
}

impl Bridge for NatsBridge {
    fn numbers(&self) -> bool {
        self.storage.is_some()
    }

    fn start(&self, shard: &Shard, topics: BridgedTopics) -> Rc<dyn Link> {
        let nats = Nats::connect(shard, self.options.clone());
        let (names, counters) = (self.names.clone(), self.counters.clone());
        match self.storage {
            None => Live::start(shard, nats, names, topics, counters),
            Some(storage) => Stream::start(shard, nats, names, topics, counters, storage),
        }
    }
}

impl fmt::Debug for NatsBridge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsBridge").field("options", &self.options).finish_non_exhaustive()
    }
}
