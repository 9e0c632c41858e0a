//! Messages between shards.

use std::collections::VecDeque;
use std::fmt;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher, Hash};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};

use ringserve_base::guard::{guard, wake};

use super::asks::{Ask, AskAll, AskError, Asker, NewsReader, Reply, wake_all};
use super::mailbox::{Envelope, Mailbox, SendError, SendFuture};
use crate::shard::face::handle::Shard;
use crate::shard::wakes::inbox::{OnEnd, this_shard};

/// The most messages that wait for one shard, unless [`Mesh::with_capacity`] says otherwise: enough
/// for a burst of a millisecond from dozens of shards, and 64 K messages of a few words are a few
/// MiB.
const CAPACITY: usize = 65_536;

/// The most messages that a shard handles in a turn; the rest waits for the next turn, after the
/// driver brought its news.
const MESSAGES_IN_A_TURN: usize = 1024;

/// A way from any thread to the shards of a server, for services that keep a part of their state on
/// each: messages `M`, and answers `A` to questions.
///
/// Make it before the server starts and clone it into the factory, where each shard
/// [registers](Mesh::register) a handler. Messages from one sender to one shard arrive in order. A
/// message costs a lock held for a few instructions, and a wake-up only if the shard sleeps.
///
/// | method | is the message handled? | without room |
/// |---|---|---|
/// | [`ask`](Mesh::ask), [`ask_all`](Mesh::ask_all) | its answer says so | [`AskError::Full`] |
/// | [`ask_waiting`](Mesh::ask_waiting) | its answer says so | waits |
/// | [`send`](Mesh::send) | unknown | waits |
/// | [`try_send`](Mesh::try_send) | unknown | [`SendError::Full`] |
///
/// ```no_run
/// use std::{cell::RefCell, collections::HashMap, rc::Rc};
/// use ringserve::{Cx, Frame, Server, Service, framing::Lines, sync::{AskError, Mesh}};
///
/// /// Counts equal lines over all shards, each on the shard that its hash names.
/// struct Count { counts: Mesh<String, u64> }
///
/// impl Service for Count {
///     type Session = ();
///     type Error = AskError;
///     async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), AskError> {
///         let line = String::from_utf8_lossy(&line).into_owned();
///         let count = self.counts.ask(self.counts.shard_of(&line), line).await?;
///         cx.reply(count.to_string().as_str());
///         Ok(())
///     }
/// }
///
/// # fn main() -> Result<(), ringserve::Error> {
/// let counts = Mesh::new();
/// Server::bind("127.0.0.1:7000").framing(Lines::default()).serve(move |shard| {
///     let mut lines = HashMap::<String, u64>::new();
///     counts.register(shard, move |_from, line| {
///         let count = lines.entry(line).or_default();
///         *count += 1;
///         *count
///     });
///     Count { counts: counts.clone() }
/// })
/// # }
/// ```
///
/// A question costs no allocation once as many were under way before. The mailbox of the asked
/// shard bounds questions, and from there on the callers that wait for an answer: each holds a slot
/// of some words and of the size of `A`.
pub struct Mesh<M, A = ()> {
    inner: Arc<Inner<M, A>>,
}

struct Inner<M, A> {
    capacity: usize,
    shards: OnceLock<Members<M, A>>,
}

struct Members<M, A> {
    /// A place for each shard, filled when it registers.
    members: Box<[Place<M, A>]>,
    /// The asker of each shard, and last that of all other threads.
    askers: Box<[Arc<Asker<A>>]>,
}

type Place<M, A> = OnceLock<Arc<Member<M, A>>>;

/// A shard of all.
type Found<'a, M, A> = (&'a Members<M, A>, &'a Member<M, A>);

struct Member<M, A> {
    index: u32,
    mailbox: Arc<Mailbox<M>>,
    /// The askers of the mesh, in a copy for this shard.
    askers: Arc<[Arc<Asker<A>>]>,
}

impl<M, A> Member<M, A> {
    fn asker(&self) -> &Arc<Asker<A>> {
        &self.askers[self.index as usize]
    }
}

impl<M: Send + 'static, A: Send + 'static> Mesh<M, A> {
    /// Makes a mesh with room for 65 536 messages to each shard.
    pub fn new() -> Mesh<M, A> {
        Mesh::with_capacity(CAPACITY)
    }

    /// Makes a mesh with room for `messages` messages to each shard, at least 1. Memory is taken as
    /// messages wait, not before. As many more may be in the hands of the shard that handles them.
    pub fn with_capacity(messages: usize) -> Mesh<M, A> {
        Mesh { inner: Arc::new(Inner { capacity: messages.max(1), shards: OnceLock::new() }) }
    }

    /// Registers this shard, in the server's factory: from now on `handle` is called on its thread
    /// for each message, with the shard that sent it, or `None` for another thread. Its result is
    /// the answer, if the message was a [question](Mesh::ask). The server accepts connections after
    /// every shard's factory returned, so a service always finds all shards registered.
    ///
    /// A panic in `handle` is logged, the question ends with [`AskError::Unanswered`], and the next
    /// message is handled.
    ///
    /// # Panics
    /// If this shard registered already, or a server with another number of shards uses this value.
    pub fn register(&self, shard: &Shard, mut handle: impl FnMut(Option<usize>, M) -> A + 'static) {
        self.register_with_reply(shard, move |from, message, reply| reply.answer(handle(from, message)));
    }

    /// Registers this shard with answers that take their time: the [`Reply`] may be kept, and given
    /// to a task.
    ///
    /// ```
    /// use ringserve::{Shard, sync::Mesh};
    /// # use std::time::Duration;
    /// fn join(mesh: &Mesh<u64, u64>, shard: &Shard) {
    ///     let here = shard.clone();
    ///     mesh.register_with_reply(shard, move |_from, number, reply| {
    ///         let shard = here.clone();
    ///         here.spawn(async move {
    ///             shard.sleep(Duration::from_millis(10)).await;
    ///             reply.answer(2 * number);
    ///         });
    ///     });
    /// }
    /// ```
    ///
    /// # Panics
    /// As [`register`](Mesh::register).
    pub fn register_with_reply(
        &self,
        shard: &Shard,
        mut handle: impl FnMut(Option<usize>, M, Reply<A>) + 'static,
    ) {
        let (index, count) = (shard.index(), shard.count());
        let shards = self.inner.shards.get_or_init(|| Members {
            members: (0..count).map(|_| OnceLock::new()).collect(),
            askers: (0..=count).map(|_| Arc::new(Asker::new())).collect(),
        });
        assert_eq!(shards.members.len(), count, "one Mesh belongs to one server");
        let remote = shard.remote();
        let member = Arc::new(Member {
            index: index as u32,
            mailbox: Arc::new(Mailbox::new(self.inner.capacity, remote.clone())),
            askers: shards.askers.iter().cloned().collect(),
        });
        let registered = shards.members[index].set(member.clone()).is_ok();
        assert!(registered, "shard {index} registered before");
        member.asker().belongs_to(remote.clone());
        remote.tell_end(member.clone());
        let (mut taken, mut brought, mut woken) = (VecDeque::new(), NewsReader::default(), Vec::new());
        shard.add_mailbox(Box::new(move || {
            member.asker().read(&mut brought, &mut woken);
            wake_all(&mut woken);
            for _ in 0..MESSAGES_IN_A_TURN {
                // Messages left over by the last turn, also by a panic, come before later ones.
                if taken.is_empty() {
                    member.mailbox.take(&mut taken, &mut woken);
                    wake_all(&mut woken);
                }
                let Some(Envelope { message, from, ticket }) = taken.pop_front() else { return false };
                let reply = Reply::new(member.askers.clone(), from, ticket);
                let from = from as usize;
                handle((from < count).then_some(from), message, reply);
            }
            true
        }));
    }

    /// Asks a shard, which may be this one, and waits for its answer. From any thread, with any
    /// number of questions at once.
    ///
    /// The question is on its way when this returns, so several can be asked before the first
    /// answer is awaited.
    ///
    /// # Errors
    /// The [`AskError`] says why there is no answer. One or the other always comes, as long as the
    /// asked shard keeps the question or its [`Reply`] no longer than it lives.
    pub fn ask(&self, to: usize, message: M) -> Ask<A> {
        let Some((shards, member)) = self.member(to) else { return Ask::failed(AskError::Gone) };
        let from = shards.this_one();
        let asker = &shards.askers[from];
        let Some(ticket) = asker.begin(to as u32) else { return Ask::failed(AskError::Gone) };
        let letter = Envelope { message, from: from as u32, ticket: Some(ticket) };
        match member.mailbox.put(letter) {
            Ok(()) => Ask::waits(asker.clone(), ticket),
            Err(error) => {
                asker.give_up(ticket);
                Ask::failed(match error {
                    SendError::Full(_) => AskError::Full,
                    SendError::Gone(_) => AskError::Gone,
                })
            }
        }
    }

    /// Asks a shard as [`ask`](Mesh::ask) does, and waits for room as [`send`](Mesh::send) does if
    /// too many messages wait there. The place of the question in the order is taken when this
    /// returns.
    ///
    /// # Errors
    /// As [`ask`](Mesh::ask), without [`AskError::Full`].
    pub fn ask_waiting(
        &self,
        to: usize,
        message: M,
    ) -> impl Future<Output = Result<A, AskError>> + use<M, A> {
        let begun = self.member(to).and_then(|(shards, member)| {
            let from = shards.this_one();
            let asker = &shards.askers[from];
            let ticket = asker.begin(to as u32)?;
            let letter = Envelope { message, from: from as u32, ticket: Some(ticket) };
            Some((member.mailbox.send(letter), Ask::waits(asker.clone(), ticket)))
        });
        async move {
            let (sending, answer) = begun.ok_or(AskError::Gone)?;
            sending.await.map_err(|_| AskError::Gone)?;
            answer.await
        }
    }

    /// Asks all shards, this one too, and waits for their answers: one for each shard, in order,
    /// with errors in their places. `message` makes the question for the shard of that number;
    /// share a large one in an [`Arc`].
    ///
    /// The questions are on their way when this returns.
    #[doc(alias = "on_all")]
    pub fn ask_all(&self, mut message: impl FnMut(usize) -> M) -> AskAll<A> {
        AskAll::new((0..self.count()).map(|to| self.ask(to, message(to))).collect())
    }

    /// Sends a message to a shard, from any thread, and waits for room if too many wait there. Its
    /// place in the order is taken when this returns; it has room when the future is done. Room
    /// goes to the first sender that waits.
    ///
    /// # Errors
    /// The message comes back: [`SendError::Gone`] if the shard ended or no shard has that number.
    pub fn send(&self, to: usize, message: M) -> SendFuture<M> {
        match self.member(to) {
            Some((shards, member)) => {
                let from = shards.this_one() as u32;
                member.mailbox.send(Envelope { message, from, ticket: None })
            }
            None => SendFuture::done(Err(SendError::Gone(message))),
        }
    }

    /// Sends a message to each shard but this one, as [`send`](Mesh::send) does: `message` makes it
    /// for the shard of that number. From a thread that is no shard it goes to all. Each has its
    /// place in the order when this returns, and room when the future is done. Shards that ended
    /// are passed over.
    ///
    /// For one that every shard is to have, share it in an [`Arc`], and take it in here beside the
    /// call: here it is there at once.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use ringserve::sync::Mesh;
    /// # async fn publish(mesh: &Mesh<Arc<str>>, take_in: impl Fn(&str), text: Arc<str>) {
    /// let sent = mesh.send_to_others(|_shard| text.clone());
    /// take_in(&text);
    /// sent.await;
    /// # }
    /// ```
    pub fn send_to_others(&self, mut message: impl FnMut(usize) -> M) -> SendToOthers<M> {
        let this_one = self.inner.shards.get().map(Members::this_one);
        let others = (0..self.count()).filter(|to| Some(*to) != this_one);
        SendToOthers { sent: others.map(|to| self.send(to, message(to))).collect() }
    }

    /// Sends a message to a shard, from any thread, without waiting.
    ///
    /// # Errors
    /// The message comes back: [`SendError::Full`] if too many wait there, or other senders wait
    /// for room; [`SendError::Gone`] if the shard ended or no shard has that number.
    pub fn try_send(&self, to: usize, message: M) -> Result<(), SendError<M>> {
        let Some((shards, member)) = self.member(to) else { return Err(SendError::Gone(message)) };
        let from = shards.this_one() as u32;
        let put = member.mailbox.put(Envelope { message, from, ticket: None });
        put.map_err(|error| error.map(|letter| letter.message))
    }

    /// The shard to which a key falls: the same on every shard and thread of this build of the
    /// program. All keys spread evenly, but the hash has no secret: a peer that chooses its keys
    /// can have all of them fall to one shard. 0 before the first shard registered.
    ///
    /// It is for memory alone, and not for names of files or anything else that outlives the
    /// process: another number of shards, another version of Rust or of ringserve may give another
    /// shard. Store data under a hash of your own, with a fixed number of parts, and give each
    /// shard some of the parts.
    pub fn shard_of(&self, key: &(impl Hash + ?Sized)) -> usize {
        let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(key);
        (hash % self.count().max(1) as u64) as usize
    }

    /// The number of shards; 0 before the first one registered.
    pub fn count(&self) -> usize {
        self.inner.shards.get().map_or(0, |shards| shards.members.len())
    }

    fn member(&self, shard: usize) -> Option<Found<'_, M, A>> {
        let shards = self.inner.shards.get()?;
        Some((shards, shards.members.get(shard)?.get()?))
    }
}

/// The future of [`Mesh::send_to_others`]: done once each shard has room for its message, or ended.
/// Dropping it takes back the messages without room.
#[must_use = "messages without room are taken back if it is dropped"]
#[doc(alias = "SendingToOthers")]
pub struct SendToOthers<M> {
    sent: Vec<SendFuture<M>>,
}

impl<M> Future for SendToOthers<M> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<()> {
        self.sent.retain_mut(|sending| Pin::new(sending).poll(task).is_pending());
        if self.sent.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl<M> fmt::Debug for SendToOthers<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SendingToOthers({} wait)", self.sent.len())
    }
}

impl<M, A> Members<M, A> {
    /// The index of this thread's shard, or one behind the last for a thread that is no shard of
    /// this server.
    fn this_one(&self) -> usize {
        let here = this_shard().filter(|(index, remote)| {
            let member = self.members.get(*index).and_then(OnceLock::get);
            member.is_some_and(|member| std::ptr::eq(Arc::as_ptr(member.mailbox.remote()), *remote))
        });
        here.map_or(self.members.len(), |(index, _)| index)
    }
}

impl<M: Send, A: Send> OnEnd for Member<M, A> {
    fn shard_ended(&self) {
        let left = self.mailbox.close();
        // No question comes from here on, and earlier ones get no other answer.
        for asker in self.askers.iter() {
            let _ = guard(|| asker.shard_ended(self.index));
        }
        self.asker().close();
        for letter in left.letters {
            let _ = guard(move || drop(letter));
        }
        left.senders.into_iter().for_each(|waker: Waker| drop(wake(waker)));
    }
}

impl<M: Send + 'static, A: Send + 'static> Default for Mesh<M, A> {
    fn default() -> Self {
        Mesh::new()
    }
}

impl<M, A> Clone for Mesh<M, A> {
    fn clone(&self) -> Self {
        Mesh { inner: self.inner.clone() }
    }
}

impl<M, A> fmt::Debug for Mesh<M, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mesh").field("capacity", &self.inner.capacity).finish_non_exhaustive()
    }
}
