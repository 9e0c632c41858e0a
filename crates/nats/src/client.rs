//! The client that a program calls.

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use ringserve_server::Shard;

use crate::connection::stay_connected;
use crate::error::NatsError;
use crate::options::NatsOptions;
use crate::protocol::message::Message;
use crate::protocol::outgoing::Outgoing;
use crate::protocol::subject::{LINE_BYTES_MAX, is_pattern, is_subject};
use crate::state::{NatsStats, State};
use crate::subscription::Subscription;

/// A connection to NATS on one shard. Clones are the same one; it ends with the last of them and of
/// its subscriptions.
///
/// It is one connection whatever goes over it. A server with many shards that publishes little
/// keeps it on one of them, and asks there by [`Mesh`](ringserve_server::sync::Mesh).
#[derive(Clone)]
pub struct Nats {
    state: Rc<State>,
}

impl Nats {
    /// Begins to connect, and returns at once. It connects again whenever the connection is lost,
    /// until it is dropped: to each server in turn, after a random time that grows up to
    /// [`NatsOptions::reconnect_max`].
    pub fn connect(shard: &Shard, options: NatsOptions) -> Nats {
        let state = Rc::new(State::new(shard, options));
        let task = shard.spawn_named("nats", stay_connected(Rc::downgrade(&state)));
        *state.task.borrow_mut() = Some(task);
        Nats { state }
    }

    /// Publishes a message: queues it for the connection, or keeps it for the next one. Nothing
    /// says whether it arrives; JetStream does, by the answer to a [request](Nats::request).
    ///
    /// # Errors
    /// [`Full`](NatsError::Full), [`TooLarge`](NatsError::TooLarge),
    /// [`BadSubject`](NatsError::BadSubject).
    pub fn publish<P: AsRef<[u8]> + ?Sized>(&self, subject: &str, payload: &P) -> Result<(), NatsError> {
        self.state.publish(&Outgoing::new(subject, payload), None)
    }

    /// Publishes a message with headers, or with a subject for answers, as
    /// [`publish`](Nats::publish) does.
    ///
    /// # Errors
    /// Those of [`publish`](Nats::publish), [`BadHeader`](NatsError::BadHeader) and
    /// [`NoHeaders`](NatsError::NoHeaders).
    pub fn publish_message(&self, message: &Outgoing<'_>) -> Result<(), NatsError> {
        self.state.publish(message, None)
    }

    /// Answers a message. A message whose sender waits for none is left alone.
    ///
    /// # Errors
    /// Those of [`publish`](Nats::publish).
    pub fn respond<P: AsRef<[u8]> + ?Sized>(&self, to: &Message, payload: &P) -> Result<(), NatsError> {
        to.reply().map_or(Ok(()), |subject| self.publish(subject, payload))
    }

    /// Asks, and waits for the first answer. Put a time limit around it ([`Shard::timeout`]): a
    /// service may never answer.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use ringserve::Shard;
    /// use ringserve_nats::Nats;
    ///
    /// async fn user(shard: &Shard, nats: &Nats) -> Result<Vec<u8>, Box<dyn std::error::Error>> {
    ///     let answer = shard.timeout(Duration::from_secs(1), nats.request("users.get", "42")).await??;
    ///     Ok(answer.payload().to_vec())
    /// }
    /// ```
    ///
    /// # Errors
    /// [`Disconnected`](NatsError::Disconnected) without a connection, and if it is lost before the
    /// answer: it is not asked twice. [`NoResponders`](NatsError::NoResponders) at once if no
    /// service listens. Those of [`publish`](Nats::publish).
    pub async fn request<P: AsRef<[u8]> + ?Sized>(
        &self,
        subject: &str,
        payload: &P,
    ) -> Result<Message, NatsError> {
        self.request_message(&Outgoing::new(subject, payload)).await
    }

    /// Asks by a message with headers, as [`request`](Nats::request) does.
    ///
    /// # Errors
    /// Those of [`request`](Nats::request) and [`publish_message`](Nats::publish_message).
    pub async fn request_message(&self, message: &Outgoing<'_>) -> Result<Message, NatsError> {
        let question = Question { number: self.state.ask(message)?, state: &self.state };
        poll_fn(|task| self.state.poll_answer(question.number, task)).await
    }

    /// Subscribes to a subject, in which `*` may stand for a token and `>` for the last ones.
    ///
    /// # Errors
    /// [`BadSubject`](NatsError::BadSubject).
    pub fn subscribe(&self, subject: &str) -> Result<Subscription, NatsError> {
        match is_pattern(subject) {
            true => Ok(Subscription::new(self.state.clone(), subject, None)),
            false => Err(NatsError::BadSubject),
        }
    }

    /// Subscribes as a member of a group, of which one member gets each message.
    ///
    /// # Errors
    /// [`BadSubject`](NatsError::BadSubject), also if `group` is no name.
    pub fn queue_subscribe(&self, subject: &str, group: &str) -> Result<Subscription, NatsError> {
        let fits =
            is_pattern(subject) && is_subject(group) && subject.len() + group.len() < LINE_BYTES_MAX / 2;
        match fits {
            true => Ok(Subscription::new(self.state.clone(), subject, Some(group))),
            false => Err(NatsError::BadSubject),
        }
    }

    /// A subject that no other client has, for several answers to one message: subscribe to it, and
    /// name it in [`Outgoing::reply`].
    pub fn new_inbox(&self) -> String {
        format!("{}.s.{}", self.state.inbox(), self.state.next_number())
    }

    /// Waits until the server has taken everything that was sent before.
    ///
    /// # Errors
    /// [`Disconnected`](NatsError::Disconnected) without a connection, and if it is lost meanwhile.
    pub async fn flush(&self) -> Result<(), NatsError> {
        let ping = self.state.ping().ok_or(NatsError::Disconnected)?;
        poll_fn(|task| self.state.poll_pong(ping, task)).await
    }

    /// Waits for a connection; at once while there is one.
    pub fn connected(&self) -> Connected<'_> {
        Connected { state: &self.state }
    }

    /// True while there is a connection whose server has let this client in.
    pub fn is_connected(&self) -> bool {
        self.state.is_connected()
    }

    /// The largest message, headers included: 1 MiB before the first connection.
    pub fn payload_bytes_max(&self) -> usize {
        self.state.payload_bytes_max.get()
    }

    /// The counts of this client.
    pub fn stats(&self) -> NatsStats {
        self.state.stats()
    }
}

impl fmt::Debug for Nats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nats").field("is_connected", &self.is_connected()).finish_non_exhaustive()
    }
}

/// Waits for a connection. Made by [`Nats::connected`].
#[must_use = "a future does nothing until it is awaited"]
pub struct Connected<'a> {
    state: &'a Rc<State>,
}

impl Future for Connected<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<()> {
        self.state.poll_connected(task)
    }
}

impl fmt::Debug for Connected<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Connected")
    }
}

/// A request that is under way. Its drop forgets the answer.
struct Question<'a> {
    state: &'a State,
    number: u64,
}

impl Drop for Question<'_> {
    fn drop(&mut self) {
        self.state.forget(self.number);
    }
}
