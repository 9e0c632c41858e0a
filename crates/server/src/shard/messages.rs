//! Messages between shards.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::handle::Shard;
use super::inbox::RemoteShard;

/// Messages that may wait for one shard, unless [`Mesh::with_capacity`] says otherwise: enough for a burst of a
/// millisecond from dozens of shards, and 64 K messages of a few words are a few MiB.
const CAPACITY: usize = 65_536;

/// Messages that a shard handles in a turn; the rest is for the next one, after the driver was asked for news.
const MESSAGES_IN_A_TURN: usize = 1024;

/// A way from any thread to the shards of a server, for services that keep a part of their state on each.
///
/// Made before the server starts, cloned into its factory, where each shard [registers](Mesh::register) with what it does
/// with a message. Messages from one sender to one shard arrive in order. A message costs a lock held for a few
/// instructions, and a wake-up only if the shard sleeps.
///
/// ```no_run
/// use std::{cell::Cell, convert::Infallible, rc::Rc};
/// use ringserve::{Cx, Frame, Server, Service, sync::Mesh, framing::Lines};
///
/// /// Counts lines over all shards on shard 0.
/// struct Count { shards: Mesh<u64> }
///
/// impl Service for Count {
///     type Session = ();
///     type Error = Infallible;
///     async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
///         let _ = self.shards.send(0, 1);
///         cx.reply(line);
///         Ok(())
///     }
/// }
///
/// # fn main() -> Result<(), ringserve::Error> {
/// let shards = Mesh::new();
/// Server::bind("127.0.0.1:7000").framing(Lines::default()).serve(move |shard| {
///     let total = Rc::new(Cell::new(0));
///     shards.register(shard, move |more: u64| total.set(total.get() + more));
///     Count { shards: shards.clone() }
/// })
/// # }
/// ```
pub struct Mesh<M> {
    inner: Arc<Inner<M>>,
}

struct Inner<M> {
    capacity: usize,
    /// A place for each shard, which it fills when it registers.
    members: OnceLock<Box<[Place<M>]>>,
}

type Place<M> = OnceLock<Arc<Member<M>>>;

struct Member<M> {
    mailbox: Mutex<Mailbox<M>>,
    remote: Arc<RemoteShard>,
}

struct Mailbox<M> {
    messages: VecDeque<M>,
    closed: bool,
}

impl<M> Member<M> {
    fn mailbox(&self) -> MutexGuard<'_, Mailbox<M>> {
        self.mailbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<M: Send + 'static> Mesh<M> {
    /// With room for 65 536 messages to each shard.
    pub fn new() -> Mesh<M> {
        Mesh::with_capacity(CAPACITY)
    }

    /// With room for `messages` messages to each shard, at least 1. Memory is taken as messages wait, not before.
    pub fn with_capacity(messages: usize) -> Mesh<M> {
        Mesh { inner: Arc::new(Inner { capacity: messages.max(1), members: OnceLock::new() }) }
    }

    /// On a shard's thread, in the server's factory: from now on `handle` is called there for each message. The server
    /// accepts connections once every shard's factory has returned, so a service always finds the others there.
    ///
    /// A panic in `handle` is logged, and the next message is handled.
    ///
    /// # Panics
    /// If this shard registered already, or a server with another number of shards uses this value.
    pub fn register(&self, shard: &Shard, mut handle: impl FnMut(M) + 'static) {
        let members =
            self.inner.members.get_or_init(|| (0..shard.count()).map(|_| OnceLock::new()).collect());
        assert_eq!(members.len(), shard.count(), "one Mesh belongs to one server");
        let mailbox = Mutex::new(Mailbox { messages: VecDeque::new(), closed: false });
        let member = Arc::new(Member { mailbox, remote: shard.remote().clone() });
        let registered = members[shard.index()].set(member.clone()).is_ok();
        assert!(registered, "shard {} registered before", shard.index());
        let open = Open(member);
        let mut taken = VecDeque::new();
        shard.add_mailbox(Box::new(move || {
            for _ in 0..MESSAGES_IN_A_TURN {
                // What the last turn left over, also by a panic, comes before what was left here since.
                if taken.is_empty() {
                    std::mem::swap(&mut taken, &mut open.0.mailbox().messages);
                }
                let Some(message) = taken.pop_front() else { return false };
                handle(message);
            }
            true
        }));
    }

    /// Leaves a message for a shard, from any thread. It never waits.
    ///
    /// # Errors
    /// The message comes back: [`SendError::Full`] if too many wait there, [`SendError::Gone`] if the shard ended or
    /// there is none of that number.
    pub fn send(&self, to: usize, message: M) -> Result<(), SendError<M>> {
        let members = self.inner.members.get();
        let Some(member) = members.and_then(|members| members.get(to)?.get()) else {
            return Err(SendError::Gone(message));
        };
        let mut mailbox = member.mailbox();
        if mailbox.closed {
            return Err(SendError::Gone(message));
        }
        if mailbox.messages.len() >= self.inner.capacity {
            return Err(SendError::Full(message));
        }
        mailbox.messages.push_back(message);
        let first = mailbox.messages.len() == 1;
        drop(mailbox);
        // The sender of the first one has told the shard, or is about to.
        if first {
            member.remote.announce_messages();
        }
        Ok(())
    }

    /// How many shards there are; 0 before the first one registered.
    pub fn count(&self) -> usize {
        self.inner.members.get().map_or(0, |members| members.len())
    }
}

/// Closes the mailbox when the shard ends.
struct Open<M>(Arc<Member<M>>);

impl<M> Drop for Open<M> {
    fn drop(&mut self) {
        let mut mailbox = self.0.mailbox();
        mailbox.closed = true;
        let left = std::mem::take(&mut mailbox.messages);
        drop(mailbox);
        drop(left);
    }
}

impl<M: Send + 'static> Default for Mesh<M> {
    fn default() -> Self {
        Mesh::new()
    }
}

impl<M> Clone for Mesh<M> {
    fn clone(&self) -> Self {
        Mesh { inner: self.inner.clone() }
    }
}

impl<M> fmt::Debug for Mesh<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mesh").field("capacity", &self.inner.capacity).finish_non_exhaustive()
    }
}

/// Why a message was not left for a shard. It comes back inside.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum SendError<M> {
    /// Too many messages wait there.
    Full(M),
    /// The shard ended, or there is none of that number.
    Gone(M),
}

impl<M> SendError<M> {
    /// The message.
    pub fn into_message(self) -> M {
        match self {
            SendError::Full(message) | SendError::Gone(message) => message,
        }
    }
}

impl<M> fmt::Debug for SendError<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SendError::Full(_) => "Full(..)",
            SendError::Gone(_) => "Gone(..)",
        })
    }
}

impl<M> fmt::Display for SendError<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SendError::Full(_) => "too many messages wait for the shard",
            SendError::Gone(_) => "the shard ended, or there is none of that number",
        })
    }
}

impl<M> std::error::Error for SendError<M> {}
