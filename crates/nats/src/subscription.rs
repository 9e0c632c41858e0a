//! Subscriptions, which a program reads.

use std::fmt;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll};

use crate::queue::{Event, Queue};
use crate::state::State;

/// Messages of a subject. Made by [`Nats::subscribe`](crate::Nats::subscribe); its drop ends the
/// subscription at the server.
///
/// Messages wait in it, at most as many as
/// [`NatsOptions::queue_max`](crate::NatsOptions::queue_max) says. It keeps the connection.
#[must_use = "its drop ends the subscription"]
pub struct Subscription {
    state: Rc<State>,
    sid: u64,
    queue: Rc<Queue>,
}

impl Subscription {
    pub(crate) fn new(state: Rc<State>, pattern: &str, group: Option<&str>) -> Subscription {
        let (sid, queue) = state.subscribe(pattern, group);
        Subscription { state, sid, queue }
    }

    /// The next message, or the next gap. `None` behind the last message of
    /// [`unsubscribe_after`](Subscription::unsubscribe_after), and if the server
    /// [refuses](Subscription::is_refused) the subscription. Dropping the future loses nothing.
    ///
    /// ```
    /// use ringserve_nats::{Event, Nats, NatsError};
    ///
    /// async fn print(nats: &Nats) -> Result<(), NatsError> {
    ///     let mut room = nats.subscribe("room.>")?;
    ///     while let Some(event) = room.next().await {
    ///         match event {
    ///             Event::Message(message) => println!("{}: {} bytes", message.subject(), message.payload().len()),
    ///             Event::Gap => println!("messages may be missing"),
    ///             _ => {}
    ///         }
    ///     }
    ///     Ok(())
    /// }
    /// ```
    pub async fn next(&mut self) -> Option<Event> {
        poll_fn(|task| self.poll_next(task)).await
    }

    /// Polls for what [`next`](Subscription::next) returns. The task that polled last is woken.
    pub fn poll_next(&mut self, task: &mut Context<'_>) -> Poll<Option<Event>> {
        self.queue.poll_next(task)
    }

    /// Returns the next event that is there, without waiting.
    pub fn try_next(&mut self) -> Option<Event> {
        self.queue.take()
    }

    /// Messages and gaps that wait to be read.
    pub fn waiting(&self) -> usize {
        self.queue.waiting()
    }

    /// Messages that were dropped here since they were read too slowly: the oldest ones.
    pub fn missed(&self) -> u64 {
        self.queue.missed()
    }

    /// Ends the subscription with the message of that number, counted from its first one. Messages
    /// that are here already stay.
    pub fn unsubscribe_after(&self, messages: u64) {
        self.state.unsubscribe_after(self.sid, &self.queue, messages);
    }

    /// True if the server does not let this client subscribe to the subject. The log has its words.
    pub fn is_refused(&self) -> bool {
        self.queue.is_refused()
    }

    /// The subject, with its wildcards.
    pub fn subject(&self) -> &str {
        &self.queue.pattern
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.state.unsubscribe(self.sid);
    }
}

impl fmt::Debug for Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscription")
            .field("subject", &self.subject())
            .field("waiting", &self.waiting())
            .field("missed", &self.missed())
            .finish()
    }
}
