//! The bridge that forwards: subjects of core NATS.

use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use ringserve_nats::{Event, Nats, NatsError, Outgoing, Subscription};
use ringserve_server::Shard;
use ringserve_topics::bridge::{AckFuture, BridgeMessage, BridgedTopics, CountFuture, Link};
use ringserve_topics::{PublishError, escape};
use tracing::warn;

use crate::follows::Follows;
use crate::names::{HEADER_BYTES, KEY, Names, key_of};
use crate::stats::{Counters, count};

/// The time between two looks at the connection, where NATS refuses the inbox that shows its end.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The time after which a subscription is tried again that NATS refuses.
const SUBSCRIBE_AGAIN: Duration = Duration::from_secs(30);

pub(crate) struct Live {
    shard: Shard,
    nats: Nats,
    names: Names,
    topics: BridgedTopics,
    counters: Arc<Counters>,
    follows: Follows,
    this: Weak<Live>,
}

impl Live {
    pub(crate) fn start(
        shard: &Shard,
        nats: Nats,
        names: Names,
        topics: BridgedTopics,
        counters: Arc<Counters>,
    ) -> Rc<dyn Link> {
        let live = Rc::new_cyclic(|this| Live {
            shard: shard.clone(),
            nats,
            names,
            topics,
            counters,
            follows: Follows::default(),
            this: this.clone(),
        });
        shard.spawn_named("bridge of topics", live.clone().watch());
        live
    }

    /// Says whether there is a connection.
    async fn watch(self: Rc<Live>) {
        loop {
            let Ok(mut losses) = self.nats.subscribe(&self.nats.new_inbox()) else { return };
            self.nats.connected().await;
            self.counters.is_up.store(true, Relaxed);
            self.topics.set_state(true, self.nats.payload_bytes_max().saturating_sub(HEADER_BYTES).max(1));
            let mut is_watched = true;
            while is_watched && self.nats.is_connected() {
                match losses.next().await {
                    Some(Event::Gap) => break,
                    Some(_) => {}
                    None => is_watched = false,
                }
            }
            // Without an inbox, which NATS may refuse, it looks now and then.
            while !is_watched && self.nats.is_connected() {
                self.shard.sleep(LOOK_EVERY).await;
            }
            self.counters.is_up.store(false, Relaxed);
            self.topics.set_state(false, 0);
        }
    }

    /// Receives what other nodes publish to a topic.
    async fn follow(self: Rc<Live>, topic: Arc<str>) {
        let subject = self.names.published(&topic);
        loop {
            let Ok(messages) = self.nats.subscribe(&subject) else { return };
            self.receive(&topic, messages).await;
            warn!("topics: NATS refuses {subject}, so messages of other nodes are missing");
            self.report_loss(&topic);
            self.shard.sleep(SUBSCRIBE_AGAIN).await;
        }
    }

    /// Receives messages until the subscription ends.
    async fn receive(&self, topic: &str, mut messages: Subscription) {
        let mut missed = 0;
        while let Some(event) = messages.next().await {
            if std::mem::replace(&mut missed, messages.missed()) != messages.missed() {
                self.report_loss(topic);
            }
            match event {
                Event::Message(message) => {
                    count(&self.counters.received);
                    let (key, payload) = (key_of(message.headers()), message.payload());
                    self.topics.receive(topic, &key, Bytes::copy_from_slice(payload));
                }
                Event::Gap => self.report_loss(topic),
                _ => {}
            }
        }
    }

    fn report_loss(&self, topic: &str) {
        count(&self.counters.gaps);
        self.topics.report_loss(topic);
    }
}

impl Link for Live {
    fn join(&self, topic: &Arc<str>) {
        if let Some(this) = self.this.upgrade() {
            self.follows.begin(&self.shard, topic, |_bell| this.follow(topic.clone()));
        }
    }

    fn leave(&self, topic: &str) {
        self.follows.end(topic);
    }

    fn compare(&self, _topic: &str) {}

    fn publish(&self, message: BridgeMessage<'_>) -> Result<(), PublishError> {
        match send(&self.nats, &self.names, message) {
            Ok(()) => count(&self.counters.sent),
            Err(PublishError::TooLarge) => return Err(PublishError::TooLarge),
            // The members of this node get it in any case.
            Err(_) => count(&self.counters.dropped),
        }
        Ok(())
    }

    fn publish_acked(&self, message: BridgeMessage<'_>) -> AckFuture {
        let published = self.publish(message);
        Box::pin(async move { published })
    }

    fn set_count(&self, _topic: &Arc<str>, _count: usize) {}

    fn count(&self, _topic: &str) -> CountFuture {
        Box::pin(async { None })
    }
}

/// Sends a message on its way.
pub(crate) fn send(nats: &Nats, names: &Names, message: BridgeMessage<'_>) -> Result<(), PublishError> {
    let subject = names.published(message.topic);
    let key = escape(message.key);
    let mut outgoing = Outgoing::new(&subject, message.payload);
    if !message.key.is_empty() {
        outgoing = outgoing.header(KEY, &key);
    }
    nats.publish_message(&outgoing).map_err(refused)
}

pub(crate) fn refused(error: NatsError) -> PublishError {
    match error {
        NatsError::Full => PublishError::Full,
        NatsError::TooLarge { .. } => PublishError::TooLarge,
        NatsError::BadSubject => PublishError::Name,
        _ => PublishError::Disconnected,
    }
}
