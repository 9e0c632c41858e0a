//! Subscribers of one shard, which its own code publishes to at once, and queues for those that
//! read slowly.
//!
//! ```text
//!   publish ──▶ one message to each shard ──▶ Listeners of the shard ▶ each subscriber, encoded once
//!               (Mesh, or a Scatter)              topic: subscribers       └─▶ or its queue, until it has read
//! ```
//!
//! Each shard has its [`Listeners`], with its own subscribers alone. A message is published to all
//! shards through a [`Mesh`](ringserve_server::sync::Mesh) or a `Scatter`, once to each, and
//! encoded once on each for all subscribers there. Messages of one connection reach a subscriber in
//! order and without gaps: messages that a peer reads too slowly wait, and a connection with too
//! many of them is reset, with the reason `aborted`; those that waited are dropped. Replies and
//! pushes of the service's own do not wait behind them, so they may overtake messages, also those
//! of a topic that was unsubscribed meanwhile. A drain does not wait for what waits here.
//!
//! ```no_run
//! use std::convert::Infallible;
//!
//! use ringserve::framing::Lines;
//! use ringserve::sync::Mesh;
//! use ringserve::topics::listeners::{Listeners, LocalSubscriber};
//! use ringserve::{Cx, Frame, Server, Service, service::{OpenCx, Refusal, Session}};
//!
//! struct News { topics: Listeners<String>, published: Mesh<(String, String)> }
//!
//! struct Reader(LocalSubscriber<String>);
//! impl Session for Reader {}
//!
//! impl Service for News {
//!     type Session = Reader;
//!     type Error = Infallible;
//!
//!     async fn open(&self, opening: &OpenCx<'_>) -> Result<Reader, Refusal> {
//!         Ok(Reader(self.topics.subscriber(opening.local_handle(), ())))
//!     }
//!
//!     async fn call(&self, cx: &Cx<'_, Reader>, line: Frame) -> Result<(), Infallible> {
//!         let line = String::from_utf8_lossy(&line).into_owned();
//!         match line.split_once(' ') {
//!             // A topic alone subscribes to it; text behind it is published.
//!             None => drop(cx.session().0.subscribe(line)),
//!             Some((topic, text)) => {
//!                 self.published.ask_all(|_shard| (topic.to_owned(), text.to_owned())).await;
//!             }
//!         }
//!         Ok(())
//!     }
//! }
//!
//! # fn main() -> Result<(), ringserve::Error> {
//! let published = Mesh::<(String, String)>::new();
//! Server::bind("127.0.0.1:7000").framing(Lines::default()).serve(move |shard| {
//!     let topics = Listeners::new(shard, 1 << 20);
//!     let here = topics.clone();
//!     published.register(shard, move |_from, (topic, text)| {
//!         here.publish(&topic, |()| text.clone());
//!     });
//!     News { topics, published: published.clone() }
//! })
//! # }
//! ```

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::ops::RangeBounds;
use std::rc::Rc;

use bytes::Bytes;
use ringserve_server::{LocalHandle, PushError, Shard, SharedPayload};

/// Bytes that a waiting message counts for in addition to its own.
const MESSAGE_BYTES: usize = 64;

/// The subscribers of one shard, by topic. Clones share them.
///
/// A topic `T` costs memory while it has a subscriber, and a clone of it for each; behind an [`Rc`]
/// its name is there once. `F` is the form in which a subscriber gets messages, where there are
/// several: a version of a protocol, a language.
pub struct Listeners<T, F = ()>(Rc<Shared<T, F>>);

struct Shared<T, F> {
    shard: Shard,
    waiting_bytes_max: usize,
    topics: RefCell<BTreeMap<T, OfTopic<T, F>>>,
}

/// The subscribers of a topic.
type OfTopic<T, F> = Vec<Rc<Listener<T, F>>>;

/// A connection with its subscriptions. Its drop, as with the session that holds it, ends them.
pub struct LocalSubscriber<T: Ord, F = ()> {
    listener: Rc<Listener<T, F>>,
    shared: Rc<Shared<T, F>>,
}

struct Listener<T, F> {
    handle: LocalHandle,
    /// The topics of this subscriber, each with its place among the topic's listeners.
    hears: RefCell<BTreeMap<T, usize>>,
    form: Cell<F>,
    /// Messages that wait until the peer has read earlier ones, with the bytes that they count for.
    waiting: RefCell<VecDeque<Rc<SharedPayload>>>,
    waiting_bytes: Cell<usize>,
}

impl<T: Ord + Clone + 'static, F: Copy + PartialEq + 'static> Listeners<T, F> {
    /// The topics of a shard, without a subscriber. Up to `waiting_bytes_max` bytes of messages,
    /// each counted with 64 more, may wait for a slow peer in addition to its outbox; above that
    /// its connection is reset. Waiting messages are shared by all subscribers.
    pub fn new(shard: &Shard, waiting_bytes_max: usize) -> Listeners<T, F> {
        Listeners(Rc::new(Shared { shard: shard.clone(), waiting_bytes_max, topics: RefCell::default() }))
    }

    /// Makes a connection a subscriber, in this form, without a topic yet.
    pub fn subscriber(&self, handle: LocalHandle, form: F) -> LocalSubscriber<T, F> {
        let (hears, waiting, waiting_bytes) = Default::default();
        let listener = Rc::new(Listener { handle, hears, form: Cell::new(form), waiting, waiting_bytes });
        LocalSubscriber { listener, shared: self.0.clone() }
    }

    /// Sends a message to the subscribers of a topic on this shard, and returns their number.
    /// `message` makes it once for each form.
    ///
    /// # Panics
    /// If `message` subscribes or unsubscribes.
    pub fn publish<M: Into<Bytes>>(&self, topic: &T, mut message: impl FnMut(F) -> M) -> usize {
        self.publish_where(topic..=topic, |_| true, |_, form| message(form))
    }

    /// Sends a message to the subscribers of all topics in a range that `wanted` selects, for
    /// topics that are patterns. A subscriber of several of them gets a message for each.
    ///
    /// # Panics
    /// As [`publish`](Listeners::publish).
    pub fn publish_where<'a, M: Into<Bytes>>(
        &self,
        range: impl RangeBounds<&'a T>,
        is_wanted: impl Fn(&T) -> bool,
        mut message: impl FnMut(&T, F) -> M,
    ) -> usize
    where
        T: 'a,
    {
        let (topics, mut notified) = (self.0.topics.borrow(), 0);
        let range = (range.start_bound().cloned(), range.end_bound().cloned());
        for (topic, listeners) in topics.range(range).filter(|(topic, _)| is_wanted(topic)) {
            let mut made: Vec<(F, Rc<SharedPayload>)> = Vec::new();
            for listener in listeners {
                let form = listener.form.get();
                let at = made.iter().position(|(of, _)| *of == form).unwrap_or_else(|| {
                    made.push((form, Rc::new(SharedPayload::new(message(topic, form)))));
                    made.len() - 1
                });
                listener.send(&made[at].1, &self.0.shard, self.0.waiting_bytes_max);
            }
            notified += listeners.len();
        }
        notified
    }
}

impl<T: Ord + Clone, F: Copy> LocalSubscriber<T, F> {
    /// The form in which this subscriber gets messages.
    #[inline]
    pub fn form(&self) -> F {
        self.listener.form.get()
    }

    /// Changes the form of further messages.
    pub fn set_form(&self, form: F) {
        self.listener.form.set(form);
    }

    /// Subscribes to a topic. False if it was subscribed already.
    pub fn subscribe(&self, topic: T) -> bool {
        let mut hears = self.listener.hears.borrow_mut();
        if hears.contains_key(&topic) {
            return false;
        }
        let mut topics = self.shared.topics.borrow_mut();
        // A clone of the one that is there: a topic behind a counted pointer is in memory once,
        // whatever the number of subscribers.
        let topic = topics.get_key_value(&topic).map_or(topic, |(known, _)| known.clone());
        let listeners = topics.entry(topic.clone()).or_default();
        hears.insert(topic, listeners.len());
        listeners.push(self.listener.clone());
        true
    }

    /// Unsubscribes from a topic. False if it was not subscribed.
    pub fn unsubscribe(&self, topic: &T) -> bool {
        let place = self.listener.hears.borrow_mut().remove(topic);
        if let Some(place) = place {
            self.shared.forget(topic, place);
        }
        place.is_some()
    }

    /// Unsubscribes from all topics.
    pub fn unsubscribe_all(&self) {
        self.shared.forget_all(&self.listener);
    }

    /// The number of topics.
    #[inline]
    pub fn count(&self) -> usize {
        self.listener.hears.borrow().len()
    }

    /// The topics, in their order.
    pub fn topics(&self) -> Vec<T> {
        self.listener.hears.borrow().keys().cloned().collect()
    }
}

impl<T: Ord, F> Shared<T, F> {
    /// Removes the listener at `place` of a topic; the last listener takes the place.
    fn forget(&self, topic: &T, place: usize) {
        let mut topics = self.topics.borrow_mut();
        let Some(listeners) = topics.get_mut(topic) else { return };
        listeners.swap_remove(place);
        if let Some(moved) = listeners.get(place)
            && let Some(at) = moved.hears.borrow_mut().get_mut(topic)
        {
            *at = place;
        }
        if listeners.is_empty() {
            topics.remove(topic);
        }
    }

    fn forget_all(&self, listener: &Listener<T, F>) {
        let hears = listener.hears.take();
        hears.iter().for_each(|(topic, place)| self.forget(topic, *place));
    }
}

fn waiting_bytes(message: &SharedPayload) -> usize {
    message.payload().len() + MESSAGE_BYTES
}

impl<T: 'static, F: 'static> Listener<T, F> {
    /// Sends a message behind those that wait already.
    fn send(self: &Rc<Self>, message: &Rc<SharedPayload>, shard: &Shard, waiting_bytes_max: usize) {
        let mut waiting = self.waiting.borrow_mut();
        if waiting.is_empty() && self.handle.push_shared(message) != Err(PushError::Full) {
            return;
        }
        self.waiting_bytes.set(self.waiting_bytes.get() + waiting_bytes(message));
        if self.waiting_bytes.get() > waiting_bytes_max {
            waiting.clear();
            return self.handle.abort();
        }
        waiting.push_back(message.clone());
        if waiting.len() == 1 {
            shard.spawn(self.clone().catch_up());
        }
    }

    /// Sends waiting messages as the peer reads.
    async fn catch_up(self: Rc<Self>) {
        while !self.waiting.borrow().is_empty() {
            self.handle.ready().await;
            let Some(message) = self.waiting.borrow_mut().pop_front() else { return };
            self.waiting_bytes.set(self.waiting_bytes.get() - waiting_bytes(&message));
            let _ = self.handle.push_shared(&message);
        }
    }
}

impl<T: Ord, F> Drop for LocalSubscriber<T, F> {
    fn drop(&mut self) {
        self.shared.forget_all(&self.listener);
    }
}

impl<T, F> Clone for Listeners<T, F> {
    fn clone(&self) -> Listeners<T, F> {
        Listeners(self.0.clone())
    }
}

impl<T, F> fmt::Debug for Listeners<T, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listeners").field("topics", &self.0.topics.borrow().len()).finish_non_exhaustive()
    }
}

impl<T: Ord, F> fmt::Debug for LocalSubscriber<T, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalSubscriber")
            .field("hears", &self.listener.hears.borrow().len())
            .finish_non_exhaustive()
    }
}
