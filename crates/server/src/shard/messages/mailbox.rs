//! The mailbox of a shard: letters that wait to be handled, and after them those whose senders
//! wait for room.
//!
//! ```text
//!                room                            taken in a turn
//!   try_send ─────────▶ letters, up to capacity ────────────────▶ handled
//!   send     ──┐            ▲
//!       no room└▶ waiting ──┘ as letters are taken, in order, a batch at a time; then the sender is woken
//! ```
//!
//! While a letter waits for room no other one overtakes it, so letters of one sender keep their
//! order. A waiting letter belongs to its sender: dropping the [`SendFuture`] takes it back.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use ringserve_base::guard::discard;

use super::asks::Ticket;
use crate::shard::wakes::inbox::ShardRemote;

/// Letters that get room at once: they are moved under the lock, in 20 µs or so, and each wakes a
/// sender.
const ADMITTED_AT_ONCE: usize = 256;

/// A message on its way.
pub(crate) struct Envelope<M> {
    pub(crate) message: M,
    /// The shard that sent it; the number of shards for all other threads.
    pub(crate) from: u32,
    /// `None` if it was not asked.
    pub(crate) ticket: Option<Ticket>,
}

/// Messages for one shard.
pub(crate) struct Mailbox<M> {
    capacity: usize,
    remote: Arc<ShardRemote>,
    inside: Mutex<Inside<M>>,
}

struct Inside<M> {
    letters: VecDeque<Envelope<M>>,
    /// By number, in order.
    waiting: BTreeMap<u64, Waiting<M>>,
    /// The number of messages that waited so far.
    waited: u64,
    closed: bool,
}

struct Waiting<M> {
    letter: Envelope<M>,
    waker: Option<Waker>,
}

/// The content of a mailbox when it was closed.
pub(crate) struct MailboxRemains<M> {
    pub(crate) letters: VecDeque<Envelope<M>>,
    /// The senders that waited for room.
    pub(crate) senders: Vec<Waker>,
}

impl<M> Mailbox<M> {
    pub(crate) fn new(capacity: usize, remote: Arc<ShardRemote>) -> Mailbox<M> {
        let inside = Inside { letters: VecDeque::new(), waiting: BTreeMap::new(), waited: 0, closed: false };
        Mailbox { capacity, remote, inside: Mutex::new(inside) }
    }

    /// The shard of this mailbox.
    pub(crate) fn remote(&self) -> &Arc<ShardRemote> {
        &self.remote
    }

    /// From any thread: leaves a letter if there is room, and no other one waits for it.
    pub(crate) fn put(&self, letter: Envelope<M>) -> Result<(), SendError<Envelope<M>>> {
        let inside = self.inside();
        if inside.closed {
            return Err(SendError::Gone(letter));
        }
        if !inside.has_room(self.capacity) {
            return Err(SendError::Full(letter));
        }
        self.leave(inside, letter);
        Ok(())
    }

    /// From any thread: leaves a letter, or has it wait for room.
    pub(crate) fn send(self: &Arc<Self>, letter: Envelope<M>) -> SendFuture<M> {
        let mut inside = self.inside();
        if inside.closed {
            return SendFuture::done(Err(SendError::Gone(letter.message)));
        }
        if inside.has_room(self.capacity) {
            self.leave(inside, letter);
            return SendFuture::done(Ok(()));
        }
        inside.waited += 1;
        let number = inside.waited;
        inside.waiting.insert(number, Waiting { letter, waker: None });
        SendFuture { state: SendingState::Waits(self.clone(), number) }
    }

    fn leave(&self, mut inside: MutexGuard<'_, Inside<M>>, letter: Envelope<M>) {
        inside.letters.push_back(letter);
        let first = inside.letters.len() == 1;
        drop(inside);
        // The sender of the first one has called the shard, or is about to.
        if first {
            self.remote.announce_messages();
        }
    }

    /// On the shard: takes all letters that wait to be handled, and lets the next ones in, whose
    /// senders are added to `woken`.
    pub(crate) fn take(&self, taken: &mut VecDeque<Envelope<M>>, woken: &mut Vec<Waker>) {
        debug_assert!(taken.is_empty(), "what was taken before is handled first");
        let mut inside = self.inside();
        std::mem::swap(taken, &mut inside.letters);
        for _ in 0..ADMITTED_AT_ONCE.min(self.capacity) {
            let Some((_, waiting)) = inside.waiting.pop_first() else { break };
            inside.letters.push_back(waiting.letter);
            woken.extend(waiting.waker);
        }
    }

    /// The shard ended. Letters that wait for room are for their senders to take back.
    pub(crate) fn close(&self) -> MailboxRemains<M> {
        let mut inside = self.inside();
        inside.closed = true;
        let senders = inside.waiting.values_mut().filter_map(|waiting| waiting.waker.take()).collect();
        MailboxRemains { letters: std::mem::take(&mut inside.letters), senders }
    }

    fn inside(&self) -> MutexGuard<'_, Inside<M>> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<M> Inside<M> {
    fn has_room(&self, capacity: usize) -> bool {
        self.letters.len() < capacity && self.waiting.is_empty()
    }
}

/// Waits until a message has room in the mailbox of its shard:
/// [`Mesh::send`](crate::sync::Mesh::send). It may be moved to another thread.
///
/// Dropping it takes the message back, unless it had room already.
///
/// # Panics
/// If it is polled after it was done.
#[must_use = "a message that has no room yet is taken back if it is not awaited"]
#[doc(alias = "Sending")]
pub struct SendFuture<M> {
    state: SendingState<M>,
}

enum SendingState<M> {
    Done(Option<Result<(), SendError<M>>>),
    Waits(Arc<Mailbox<M>>, u64),
}

impl<M> SendFuture<M> {
    pub(crate) fn done(result: Result<(), SendError<M>>) -> SendFuture<M> {
        SendFuture { state: SendingState::Done(Some(result)) }
    }
}

// No message is pinned: it is moved into the mailbox and back.
impl<M> Unpin for SendFuture<M> {}

impl<M> Future for SendFuture<M> {
    type Output = Result<(), SendError<M>>;

    fn poll(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Result<(), SendError<M>>> {
        let (mailbox, number) = match &mut self.state {
            SendingState::Done(result) => {
                return Poll::Ready(result.take().expect("a Sending is not polled after it was done"));
            }
            SendingState::Waits(mailbox, number) => (mailbox, *number),
        };
        // Cloning and dropping a waker is user code: nothing is locked meanwhile.
        let new = task.waker().clone();
        let mut inside = mailbox.inside();
        let is_closed = inside.closed;
        let result = match inside.waiting.get_mut(&number) {
            // It had room.
            None => Ok(()),
            Some(waiting) if !is_closed => {
                let old = waiting.waker.replace(new);
                drop(inside);
                discard(old);
                return Poll::Pending;
            }
            Some(_) => match inside.waiting.remove(&number) {
                Some(waiting) => Err(SendError::Gone(waiting.letter.message)),
                None => Ok(()),
            },
        };
        drop(inside);
        discard(Some(new));
        self.state = SendingState::Done(None);
        Poll::Ready(result)
    }
}

impl<M> Drop for SendFuture<M> {
    fn drop(&mut self) {
        if let SendingState::Waits(mailbox, number) = &self.state {
            let waiting = mailbox.inside().waiting.remove(number);
            drop(waiting);
        }
    }
}

impl<M> fmt::Debug for SendFuture<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sending").finish_non_exhaustive()
    }
}

/// Why a message was not left for a shard. It comes back inside.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum SendError<M> {
    /// Too many messages wait there, or wait for room there.
    Full(M),
    /// The shard ended, or no shard has that number.
    Gone(M),
}

impl<M> SendError<M> {
    /// The message.
    pub fn into_message(self) -> M {
        match self {
            SendError::Full(message) | SendError::Gone(message) => message,
        }
    }

    pub(crate) fn map<T>(self, message: impl FnOnce(M) -> T) -> SendError<T> {
        match self {
            SendError::Full(from) => SendError::Full(message(from)),
            SendError::Gone(from) => SendError::Gone(message(from)),
        }
    }
}

impl<M> fmt::Display for SendError<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SendError::Full(_) => "too many messages wait for the shard",
            SendError::Gone(_) => "the shard ended, or no shard has that number",
        })
    }
}

ringserve_buf::debug_is_display!(SendError<M>, [M]);

impl<M> std::error::Error for SendError<M> {}
