//! State that the handles of a client and the task of its connection share.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use foldhash::fast::FixedState;
use ringserve_server::Shard;
use ringserve_server::net::FramedWriter;
use ringserve_server::task::JoinHandle;

use crate::error::NatsError;
use crate::options::NatsOptions;
use crate::protocol::frames::NatsFrames;
use crate::protocol::info::MAX_PAYLOAD;
use crate::protocol::message::Message;
use crate::protocol::outgoing::{Outgoing, write_sub, write_unsub};
use crate::queue::{Queue, QueueLimits};

/// The number of the subscription for all answers. Others begin at 1.
pub(crate) const INBOX_SID: u64 = 0;

/// Numbers that this client gave out, not ones that a peer chose: no secret is needed to spread
/// them.
type ByNumber<T> = HashMap<u64, T, FixedState>;

/// The counts of a client. See [`Nats::stats`](crate::Nats::stats).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct NatsStats {
    /// Connections that were made, with authentication.
    pub connects: u64,
    /// Attempts that led to none.
    pub connects_failed: u64,
    /// Connections that ended, and left gaps.
    pub disconnects: u64,
    /// Messages given to a connection, requests included, or kept for the next one. Those on a
    /// connection that is lost are among them, whether they arrived or not.
    pub published: u64,
    /// Messages received, answers included.
    pub received: u64,
    /// Messages that subscriptions dropped since they were read too slowly.
    pub missed: u64,
    /// Messages that were kept for the next connection, and were larger than its server takes. They
    /// are lost.
    pub too_large: u64,
    /// Messages that were kept for the next connection, and had headers, which its server does not
    /// take. They are lost.
    pub no_headers: u64,
    /// Errors that a server reported (`-ERR`).
    pub errors: u64,
}

pub(crate) struct State {
    pub(crate) shard: Shard,
    pub(crate) options: NatsOptions,
    /// The connection, once the server has let this client in.
    writer: RefCell<Option<FramedWriter<NatsFrames>>>,
    /// Messages for the next connection.
    pending: RefCell<Pending>,
    queues: RefCell<ByNumber<Rc<Queue>>>,
    asked: RefCell<ByNumber<Answer>>,
    pings: RefCell<Pings>,
    /// Tasks that wait for a connection.
    waiting: RefCell<Vec<Waker>>,
    last_number: Cell<u64>,
    pub(crate) payload_bytes_max: Rc<Cell<usize>>,
    pub(crate) takes_headers: Cell<bool>,
    pub(crate) stats: Cell<NatsStats>,
    /// The begin of the subjects of all answers.
    inbox: String,
    pub(crate) task: RefCell<Option<JoinHandle<()>>>,
}

/// Whole operations.
#[derive(Default)]
struct Pending {
    bytes: Vec<u8>,
    messages: VecDeque<PendingMessage>,
}

/// A message among them.
struct PendingMessage {
    len: usize,
    /// The part that counts for `max_payload`.
    payload_bytes: usize,
    has_headers: bool,
}

/// The messages that were kept, and that the server of the next connection does not take.
#[derive(Default)]
struct Refusals {
    too_large: u64,
    no_headers: u64,
}

enum Answer {
    Awaited(Option<Waker>),
    Here(Message),
}

/// PINGs and their answers, which come in order.
#[derive(Default)]
struct Pings {
    /// The connection: PINGs of an earlier one have no answer.
    connection: u64,
    sent: u64,
    answered: u64,
    waiting: Vec<Waker>,
}

impl State {
    pub(crate) fn new(shard: &Shard, options: NatsOptions) -> State {
        State {
            inbox: format!("_INBOX.{:016x}{:016x}", shard.random(), shard.random()),
            shard: shard.clone(),
            options,
            writer: RefCell::default(),
            pending: RefCell::default(),
            queues: RefCell::default(),
            asked: RefCell::default(),
            pings: RefCell::default(),
            waiting: RefCell::default(),
            last_number: Cell::new(INBOX_SID),
            payload_bytes_max: Rc::new(Cell::new(MAX_PAYLOAD)),
            takes_headers: Cell::new(true),
            stats: Cell::default(),
            task: RefCell::default(),
        }
    }

    /// A number that no subscription and no request had before.
    pub(crate) fn next_number(&self) -> u64 {
        self.last_number.set(self.last_number.get() + 1);
        self.last_number.get()
    }

    pub(crate) fn inbox(&self) -> &str {
        &self.inbox
    }

    pub(crate) fn count(&self, add: impl FnOnce(&mut NatsStats)) {
        let mut stats = self.stats.get();
        add(&mut stats);
        self.stats.set(stats);
    }

    /// The statistics, with what the queues counted.
    pub(crate) fn stats(&self) -> NatsStats {
        let missed: u64 = self.queues.borrow().values().map(|queue| queue.missed()).sum();
        let stats = self.stats.get();
        NatsStats { missed: stats.missed + missed, ..stats }
    }

    // What is sent

    /// Publishes, or keeps a message for the next connection. A request, which has a number, is not
    /// kept.
    pub(crate) fn publish(&self, message: &Outgoing<'_>, request: Option<u64>) -> Result<(), NatsError> {
        message.check()?;
        let bytes_max = self.payload_bytes_max.get();
        if message.payload_bytes() > bytes_max {
            return Err(NatsError::TooLarge { bytes_max });
        }
        let inbox = request.map(|number| (&*self.inbox, number));
        if let Some(writer) = &*self.writer.borrow() {
            if message.has_headers() && !self.takes_headers.get() {
                return Err(NatsError::NoHeaders);
            }
            let stream = writer.stream();
            // One message goes through whatever its size: it may be larger than the bound.
            let waiting = stream.outbox_bytes();
            if waiting > 0 && waiting + message.bytes_max() > self.options.pending_bytes_max {
                return Err(NatsError::Full);
            }
            stream.queue_with(|out| message.write(inbox, out));
        } else if request.is_some() {
            return Err(NatsError::Disconnected);
        } else {
            self.pending.borrow_mut().keep(message, self.options.pending_bytes_max)?;
        }
        self.count(|stats| stats.published += 1);
        Ok(())
    }

    /// Queues a line for the server, if there is one.
    fn say(&self, write: impl FnOnce(&mut Vec<u8>)) {
        if let Some(writer) = &*self.writer.borrow() {
            let mut line = Vec::new();
            write(&mut line);
            writer.stream().queue(line);
        }
    }

    pub(crate) fn pong(&self) {
        self.say(|out| out.extend_from_slice(b"PONG\r\n"));
    }

    // Subscriptions

    pub(crate) fn subscribe(&self, pattern: &str, group: Option<&str>) -> (u64, Rc<Queue>) {
        let limits = QueueLimits {
            messages_max: self.options.queue_messages_max,
            bytes_max: self.options.queue_bytes_max,
        };
        let (sid, queue) = (self.next_number(), Rc::new(Queue::new(pattern, group, limits)));
        self.queues.borrow_mut().insert(sid, queue.clone());
        self.say(|out| write_sub(pattern, group, sid, out));
        (sid, queue)
    }

    /// Ends a subscription with that message, counted from its first one.
    pub(crate) fn unsubscribe_after(&self, sid: u64, queue: &Queue, after: u64) {
        queue.ends_after.set(Some(after));
        match queue.left() {
            Some(0) => {
                self.unsubscribe(sid);
                queue.end(false);
            }
            // A server counts from the SUB that it has seen, which may be later than the first.
            left => self.say(|out| write_unsub(sid, left.map(|left| left + self.seen_before(queue)), out)),
        }
    }

    /// Messages that the server of this connection has sent to a subscription.
    fn seen_before(&self, queue: &Queue) -> u64 {
        queue.received() - queue.received_before.get()
    }

    pub(crate) fn unsubscribe(&self, sid: u64) {
        let removed = self.queues.borrow_mut().remove(&sid);
        if let Some(queue) = removed {
            self.count(|stats| stats.missed += queue.missed());
            self.say(|out| write_unsub(sid, None, out));
        }
    }

    /// Ends the subscriptions that a server refuses.
    pub(crate) fn refuse(&self, pattern: &str) {
        let mut refused: Vec<(u64, Rc<Queue>)> = Vec::new();
        self.queues.borrow_mut().retain(|sid, queue| {
            let is_refused = queue.pattern == pattern;
            if is_refused {
                refused.push((*sid, queue.clone()));
            }
            !is_refused
        });
        for (_, queue) in refused {
            self.count(|stats| stats.missed += queue.missed());
            queue.end(true);
        }
    }

    // What is received

    /// Gives a message to whom it is for.
    pub(crate) fn deliver(&self, sid: u64, message: Message) {
        self.count(|stats| stats.received += 1);
        if sid == INBOX_SID {
            return self.answer(message);
        }
        let queue = self.queues.borrow().get(&sid).cloned();
        // A message that was on its way when its subscription ended has no queue.
        if let Some(queue) = queue
            && queue.push(message)
        {
            // The server has ended it too.
            self.queues.borrow_mut().remove(&sid);
            self.count(|stats| stats.missed += queue.missed());
        }
    }

    fn answer(&self, message: Message) {
        let number = message.subject().strip_prefix(&*self.inbox).and_then(|rest| rest.strip_prefix('.'));
        let number = number.and_then(|digits| crate::protocol::frames::number(digits.as_bytes()));
        let waker = {
            let mut asked = self.asked.borrow_mut();
            // A further answer, or one to a request that was given up, goes nowhere.
            match number.and_then(|number| asked.get_mut(&number)) {
                Some(answer @ Answer::Awaited(_)) => match std::mem::replace(answer, Answer::Here(message)) {
                    Answer::Awaited(waker) => waker,
                    Answer::Here(_) => None,
                },
                _ => None,
            }
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    // Requests

    /// Asks, and returns the number by which the answer is fetched.
    pub(crate) fn ask(&self, message: &Outgoing<'_>) -> Result<u64, NatsError> {
        let number = self.next_number();
        self.publish(message, Some(number))?;
        self.asked.borrow_mut().insert(number, Answer::Awaited(None));
        Ok(number)
    }

    pub(crate) fn poll_answer(
        &self,
        number: u64,
        task: &mut Context<'_>,
    ) -> Poll<Result<Message, NatsError>> {
        let mut asked = self.asked.borrow_mut();
        match asked.get_mut(&number) {
            None => Poll::Ready(Err(NatsError::Disconnected)),
            Some(Answer::Awaited(waker)) => {
                let old = waker.replace(task.waker().clone());
                drop(asked);
                drop(old);
                Poll::Pending
            }
            Some(Answer::Here(_)) => match asked.remove(&number) {
                Some(Answer::Here(message)) if !message.is_no_responders() => Poll::Ready(Ok(message)),
                _ => Poll::Ready(Err(NatsError::NoResponders)),
            },
        }
    }

    pub(crate) fn forget(&self, number: u64) {
        let forgotten = self.asked.borrow_mut().remove(&number);
        drop(forgotten);
    }

    pub(crate) fn has_questions(&self) -> bool {
        !self.asked.borrow().is_empty()
    }

    // PINGs

    /// Sends a PING, and returns by what its answer is known. `None` without a connection.
    pub(crate) fn ping(&self) -> Option<(u64, u64)> {
        if !self.is_connected() {
            return None;
        }
        let mut pings = self.pings.borrow_mut();
        pings.sent += 1;
        let ping = (pings.connection, pings.sent);
        drop(pings);
        self.say(|out| out.extend_from_slice(b"PING\r\n"));
        Some(ping)
    }

    /// Counts a PONG. False for one too many.
    pub(crate) fn ponged(&self) -> bool {
        let mut pings = self.pings.borrow_mut();
        pings.answered += 1;
        let (is_asked, waiting) = (pings.answered <= pings.sent, std::mem::take(&mut pings.waiting));
        drop(pings);
        waiting.into_iter().for_each(Waker::wake);
        is_asked
    }

    /// Whether a PING was answered; an error if it never will be.
    pub(crate) fn is_answered(&self, (connection, number): (u64, u64)) -> Result<bool, NatsError> {
        let pings = self.pings.borrow();
        match pings.connection == connection {
            true => Ok(pings.answered >= number),
            false => Err(NatsError::Disconnected),
        }
    }

    pub(crate) fn poll_pong(&self, ping: (u64, u64), task: &mut Context<'_>) -> Poll<Result<(), NatsError>> {
        match self.is_answered(ping) {
            Ok(true) => Poll::Ready(Ok(())),
            Err(error) => Poll::Ready(Err(error)),
            Ok(false) => {
                let waker = task.waker().clone();
                let mut pings = self.pings.borrow_mut();
                if !pings.waiting.iter().any(|known| known.will_wake(&waker)) {
                    pings.waiting.push(waker);
                }
                Poll::Pending
            }
        }
    }

    // The connection

    pub(crate) fn is_connected(&self) -> bool {
        self.writer.borrow().is_some()
    }

    pub(crate) fn poll_connected(&self, task: &mut Context<'_>) -> Poll<()> {
        if self.is_connected() {
            return Poll::Ready(());
        }
        let waker = task.waker().clone();
        let mut waiting = self.waiting.borrow_mut();
        if !waiting.iter().any(|known| known.will_wake(&waker)) {
            waiting.push(waker);
        }
        Poll::Pending
    }

    /// Takes a connection whose server has let this client in: subscribes, and sends what was kept.
    pub(crate) fn connected(&self, writer: FramedWriter<NatsFrames>) {
        let mut out = Vec::new();
        write_sub(&format!("{}.*", self.inbox), None, INBOX_SID, &mut out);
        let mut queues: Vec<_> =
            self.queues.borrow().iter().map(|(sid, queue)| (*sid, queue.clone())).collect();
        queues.sort_unstable_by_key(|(sid, _)| *sid);
        for (sid, queue) in queues {
            write_sub(&queue.pattern, queue.group.as_deref(), sid, &mut out);
            queue.received_before.set(queue.received());
            if let Some(left) = queue.left() {
                write_unsub(sid, Some(left), &mut out);
            }
        }
        let (bytes_max, takes_headers) = (self.payload_bytes_max.get(), self.takes_headers.get());
        let dropped = self.pending.take().write(bytes_max, takes_headers, &mut out);
        writer.stream().queue(out);
        *self.writer.borrow_mut() = Some(writer);
        self.count(|stats| {
            stats.connects += 1;
            stats.too_large += dropped.too_large;
            stats.no_headers += dropped.no_headers;
        });
        let waiting = self.waiting.take();
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Ends all subscriptions of the connection at its server, before it is left.
    pub(crate) fn unsubscribe_all(&self) {
        let mut sids: Vec<u64> = self.queues.borrow().keys().copied().collect();
        sids.sort_unstable();
        self.say(|out| sids.into_iter().for_each(|sid| write_unsub(sid, None, out)));
    }

    /// Takes the requests that have no answer out, and returns who waits for them.
    fn take_unanswered(&self) -> Vec<Waker> {
        let mut wakers = Vec::new();
        self.asked.borrow_mut().retain(|_, answer| match answer {
            // It came in time.
            Answer::Here(_) => true,
            Answer::Awaited(waker) => {
                wakers.extend(waker.take());
                false
            }
        });
        wakers
    }

    /// Says to all that the connection is lost.
    pub(crate) fn disconnected(&self) {
        let Some(writer) = self.writer.take() else { return };
        drop(writer);
        self.count(|stats| stats.disconnects += 1);
        let pings =
            self.pings.replace_with(|pings| Pings { connection: pings.connection + 1, ..Pings::default() });
        let asked = self.take_unanswered();
        let queues: Vec<Rc<Queue>> = self.queues.borrow().values().cloned().collect();
        pings.waiting.into_iter().chain(asked).for_each(Waker::wake);
        queues.iter().for_each(|queue| queue.push_gap());
    }
}

impl Pending {
    fn keep(&mut self, message: &Outgoing<'_>, bytes_max: usize) -> Result<(), NatsError> {
        if self.bytes.len() + message.bytes_max() > bytes_max {
            return Err(NatsError::Full);
        }
        let before = self.bytes.len();
        message.write(None, &mut self.bytes);
        self.messages.push_back(PendingMessage {
            len: self.bytes.len() - before,
            payload_bytes: message.payload_bytes(),
            has_headers: message.has_headers(),
        });
        Ok(())
    }

    /// Writes the messages that the server takes.
    fn write(self, payload_bytes_max: usize, takes_headers: bool, out: &mut Vec<u8>) -> Refusals {
        let (mut rest, mut dropped) = (&*self.bytes, Refusals::default());
        for kept in self.messages {
            let (message, behind) = rest.split_at(kept.len);
            rest = behind;
            if kept.payload_bytes > payload_bytes_max {
                dropped.too_large += 1;
            } else if kept.has_headers && !takes_headers {
                dropped.no_headers += 1;
            } else {
                out.extend_from_slice(message);
            }
        }
        dropped
    }
}

/// The last handle is gone.
impl Drop for State {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}
