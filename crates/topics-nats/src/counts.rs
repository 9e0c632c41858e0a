//! Members of topics on all nodes: each node says what it has, and says it again while it lives.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use ringserve_nats::{Event, Nats, Outgoing};
use ringserve_server::Shard;
use ringserve_server::time::Time;
use serde_json::json;

use crate::names::{Names, stream_facts};

/// The time for which a count stands, and after which it is said again.
const LIFE: &str = "15s";
const RENEW_EVERY: Duration = Duration::from_secs(5);

/// The time for an answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// Nodes that are counted.
const NODES_MAX: usize = 1024;

pub(crate) struct Counts {
    shard: Shard,
    nats: Nats,
    names: Names,
    node: Box<str>,
    is_there: Cell<bool>,
    /// The count that was sent for each topic, and when.
    said: RefCell<HashMap<Arc<str>, (usize, Time), foldhash::fast::RandomState>>,
}

impl Counts {
    pub(crate) fn new(shard: &Shard, nats: Nats, names: Names) -> Counts {
        let node = format!("{:016x}", shard.random()).into();
        let (is_there, said) = Default::default();
        Counts { shard: shard.clone(), nats, names, node, is_there, said }
    }

    /// Looks whether their stream is there, and makes it if not.
    pub(crate) async fn look(&self) {
        if self.is_there.get() && self.has_stream("INFO", "{}").await {
            return;
        }
        let config = self.names.counts_config().to_string();
        self.is_there.set(self.has_stream("CREATE", &config).await);
    }

    async fn has_stream(&self, order: &str, question: &str) -> bool {
        let subject = format!("$JS.API.STREAM.{order}.{}", self.names.counts());
        let answer = self.shard.timeout(ANSWER_WITHIN, self.nats.request(&subject, question)).await;
        answer.ok().and_then(Result::ok).is_some_and(|answer| stream_facts(answer.payload(), None).is_ok())
    }

    /// Says how many members of a topic this node has, where that is news.
    pub(crate) fn set(&self, topic: &Arc<str>, count: usize) {
        if !self.is_there.get() || !self.nats.is_connected() {
            return;
        }
        let now = self.shard.now();
        let before = self.said.borrow().get(topic).copied();
        let is_news =
            before.map_or(count > 0, |(said, at)| said != count || (count > 0 && now - at >= RENEW_EVERY));
        if is_news && self.say(topic, count) {
            self.said.borrow_mut().insert(topic.clone(), (count, now));
        }
    }

    fn say(&self, topic: &str, count: usize) -> bool {
        let (subject, count) = (self.names.count(topic, &self.node), count.to_string());
        self.nats.publish_message(&Outgoing::new(&subject, &count).header("Nats-TTL", LIFE)).is_ok()
    }

    pub(crate) fn leave(&self, topic: &str) {
        if let Some((said, _)) = self.said.borrow_mut().remove(topic)
            && said > 0
        {
            self.say(topic, 0);
        }
    }

    /// The members of a topic on other nodes. `None` if they do not say.
    pub(crate) fn of_others(&self, topic: &str) -> impl Future<Output = Option<usize>> + use<> {
        let (nats, shard, inbox) = (self.nats.clone(), self.shard.clone(), self.nats.new_inbox());
        let own = self.names.count(topic, &self.node);
        let question =
            json!({ "multi_last": [self.names.count(topic, "*")], "batch": NODES_MAX }).to_string();
        let to = format!("$JS.API.DIRECT.GET.{}", self.names.counts());
        let is_there = self.is_there.get() && nats.is_connected();
        async move {
            let mut answers = nats.subscribe(&inbox).ok().filter(|_| is_there)?;
            nats.publish_message(&Outgoing::new(&to, &question).reply(&inbox)).ok()?;
            let mut sum: usize = 0;
            for _ in 0..=NODES_MAX {
                let Some(Event::Message(answer)) = shard.timeout(ANSWER_WITHIN, answers.next()).await.ok()?
                else {
                    return None;
                };
                match answer.headers().status().map(|status| status.code) {
                    Some(204 | 404) => return Some(sum),
                    Some(_) => return None,
                    None => {}
                }
                if answer.headers().get("Nats-Subject")? != own {
                    let count = std::str::from_utf8(answer.payload()).ok()?;
                    sum = sum.saturating_add(count.parse().ok()?);
                }
            }
            // More than were asked for is no answer.
            None
        }
    }
}
