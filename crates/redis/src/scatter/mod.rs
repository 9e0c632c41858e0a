//! Pipelined requests whose answers lie on several shards: one question to each shard for all
//! pipelined requests of a connection, and replies in the order of the requests.
//!
//! ```text
//!   get a, get b, mget a c ──▶ Replies ──▶ batch to shard 0: a, a ──┐
//!                                 │   └──▶ batch to shard 1: b, c ──┤ one message each
//!                                 ▼                                 │
//!          a, b, [a c]  ◀── in order ◀── answers ◀──────────────────┘
//! ```
//!
//! * [`QuestionHandler`] handles questions and makes answers. A question is a small value with
//!   [parts](FrameFields) in bytes; an answer is bytes that are ready to be sent, frames included.
//! * Each shard makes a [`Scatter`]; the session of a connection has its [`Replies`].
//! * [`Scatter::in_turn`] begins a request when its turn has come, [`Scatter::asking`] asks what it
//!   is about.
//!
//! A batch is one message of a [`Mesh`], whatever number of questions is in it, and the batches of
//! a connection to all shards are under way at the same time. Questions to the connection's own
//! shard are answered at once unless an earlier one waits before them. Up to 4 KiB of replies that
//! are queued when the first question is asked leave with its answer, in one send. A question costs
//! no allocation once memory for as many exists; a batch costs a few.
//!
//! # What is bounded
//!
//! At most 128 KiB and one request of a connection wait before others begin: unsent questions,
//! texts, and 16 bytes for each text and each answer that is due. A question counts with its size,
//! 8 bytes, and its parts with up to 24 bytes each. While they are under way as many more may wait,
//! and go next: a pipeline of any length keeps all shards at work. The answers to the batches under
//! way have at most 96 KiB together, and one reply of each shard; the rest is asked for when these
//! are written. Replies are written as the peer takes them. What waits meanwhile counts as held by
//! the connection ([`held_bytes_max`](ringserve_server::limits::ServerLimits::held_bytes_max)), and
//! memory for each answer of 32 KiB or more is reserved before it is made
//! ([`QuestionHandler::large_bytes`]). So a connection holds at most 1 MiB beside its outbox,
//! whatever the number of shards and however slowly its peer reads, and one request and one reply
//! of each shard where these are long; the shards stay free for others.
//!
//! # What goes wrong
//!
//! A shard that is full, that ended or whose answer panicked fails only its own questions
//! ([`QuestionHandler::failed`]). A call that carries replies takes them along when it is dropped,
//! as by the time limit of a middleware: close the connection then.
//!
//! ```no_run
//! use std::cell::RefCell;
//! use std::collections::HashMap;
//! use std::convert::Infallible;
//! use std::rc::Rc;
//!
//! use ringserve::framing::{FrameFields, Lines};
//! use ringserve::scatter::{QuestionHandler, Questions, Replies, Scatter};
//! use ringserve::sync::AskError;
//! use ringserve::{Cx, Frame, Limits, Server, Service};
//!
//! /// Counts words, each on the shard that its first byte names.
//! #[derive(Default)]
//! struct Words(RefCell<HashMap<Vec<u8>, u64>>);
//!
//! impl QuestionHandler for Words {
//!     type Question = ();
//!     type Merged = Vec<u8>;
//!
//!     fn answer(&self, (): (), parts: FrameFields<'_>, out: &mut Vec<u8>) {
//!         let mut counts = self.0.borrow_mut();
//!         let count = counts.entry(parts.get(0).to_vec()).or_default();
//!         *count += 1;
//!         out.extend_from_slice(format!("{count} ").as_bytes());
//!     }
//!
//!     fn failed(&self, _shard: usize, why: AskError, out: &mut Vec<u8>) {
//!         out.extend_from_slice(format!("({why}) ").as_bytes());
//!     }
//! }
//!
//! /// Tells how often each word of a line was seen.
//! struct Count(Scatter<Words>);
//!
//! impl Service for Count {
//!     type Session = Replies<Words>;
//!     type Error = Infallible;
//!
//!     async fn call(&self, cx: &Cx<'_, Replies<Words>>, line: Frame) -> Result<(), Infallible> {
//!         let scatter = &self.0;
//!         let begin = || {
//!             let mut asking = scatter.asking(cx.session());
//!             for word in line.split(|byte| *byte == b' ').filter(|word| !word.is_empty()) {
//!                 let span = [(0, word.len() as u32)];
//!                 asking.ask(usize::from(word[0]) % scatter.shards(), (), FrameFields::new(word, &span));
//!             }
//!             asking.put(b"\n");
//!         };
//!         scatter.in_turn(cx, cx.session(), true, begin).await;
//!         Ok(())
//!     }
//! }
//!
//! # fn main() -> Result<(), ringserve::Error> {
//! let questions = Questions::new();
//! // One call carries the replies, another one may wait for its turn.
//! let limits = Limits::default().calls_in_flight_max(2);
//! Server::bind("127.0.0.1:7000").framing(Lines::default()).limits(limits).serve(move |shard| {
//!     Count(Scatter::new(shard, &questions, Rc::new(Words::default())))
//! })
//! # }
//! ```

mod batch;
mod queue;
mod turns;

use std::cell::{RefCell, RefMut};
use std::fmt;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

pub use batch::Batch;

use self::queue::Queue;
use self::turns::{Turn, Turns};
use crate::FrameFields;
use ringserve_server::limits::Reserved;
use ringserve_server::sync::{AskError, Mesh};
use ringserve_server::task::yield_now;
use ringserve_server::{Cx, HeldReplies, Shard};

/// Long replies are written in pieces of this size, and wait for the peer between them.
const PIECE_BYTES: usize = 64 << 10;
/// Replies from this size on are not copied.
const LONG_BYTES: usize = 2 * PIECE_BYTES;
/// The most queues that a shard keeps for later connections.
const SPARE_MAX: usize = 64;

/// The questions between the shards of a server: made before its start, cloned into its factory.
pub type Questions<Q> = Mesh<Box<Batch<Q>>, Box<Batch<Q>>>;

/// The rest of a request that [`Scatter::in_turn`] could not finish at once: usually nothing, else
/// a future.
#[must_use = "it does nothing unless it is awaited"]
#[doc(alias = "Rest")]
pub struct Remainder<F>(Option<Pin<Box<F>>>);

impl<F> Remainder<F> {
    /// Nothing is left to do.
    #[inline]
    pub fn none() -> Remainder<F> {
        Remainder(None)
    }
}

impl<F: Future<Output = ()>> Future for Remainder<F> {
    type Output = ();

    #[inline]
    fn poll(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<()> {
        self.0.as_mut().map_or(Poll::Ready(()), |rest| rest.as_mut().poll(task))
    }
}

impl<F> fmt::Debug for Remainder<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rest").field("is_none", &self.0.is_none()).finish()
    }
}

/// The answers of a shard.
#[doc(alias = "Answers")]
pub trait QuestionHandler: 'static {
    /// A question without its parts: a command, in a version of a protocol.
    type Question: Copy + Send + 'static;
    /// Merges several answers into one reply; [`Vec<u8>`] joins them as they are.
    type Merged: Merge;

    /// Adds the answer to `out`, behind those to others.
    fn answer(&self, question: Self::Question, parts: FrameFields<'_>, out: &mut Vec<u8>);

    /// The bytes that the answer will have, if these are many: from 32 KiB on the answer is made
    /// once there is memory for it on the shard of the connection, as by [`Cx::reserve`], and fails
    /// with [`AskError::NoMemory`] where there is none for 5 s. Called before
    /// [`answer`](QuestionHandler::answer), perhaps more than once. An answer that grew since is
    /// asked for again.
    ///
    /// 0, unless it is overridden: then long answers count as held once they are queued for a peer,
    /// and not while they are made.
    fn large_bytes(&self, _question: Self::Question, _parts: FrameFields<'_>) -> usize {
        0
    }

    /// Adds a substitute for an answer that a shard did not give. Called on the shard of the
    /// connection, once for each question.
    fn failed(&self, shard: usize, why: AskError, out: &mut Vec<u8>);
}

/// One reply made of several answers.
pub trait Merge: Default + 'static {
    /// Takes an answer, in the order of the questions.
    fn add(&mut self, answer: &[u8]);

    /// Adds the reply to `out`, once all answers were taken.
    fn write(&mut self, out: &mut Vec<u8>);
}

impl Merge for Vec<u8> {
    fn add(&mut self, answer: &[u8]) {
        self.extend_from_slice(answer);
    }

    fn write(&mut self, out: &mut Vec<u8>) {
        out.append(self);
    }
}

/// Asks all shards, on behalf of one. Clones share it.
pub struct Scatter<A: QuestionHandler> {
    inner: Rc<Inner<A>>,
}

struct Inner<A: QuestionHandler> {
    answers: Rc<A>,
    shard: Shard,
    questions: Questions<A::Question>,
    spare: RefCell<Vec<Box<Queue<A>>>>,
}

impl<A: QuestionHandler> Scatter<A> {
    /// Registers a shard, in the factory of a server: from now on it answers by `answers` the
    /// questions that others ask through `questions`.
    ///
    /// # Panics
    /// As [`Mesh::register`].
    pub fn new(shard: &Shard, questions: &Questions<A::Question>, answers: Rc<A>) -> Scatter<A> {
        let here = answers.clone();
        questions.register(shard, move |_from, mut batch| {
            batch.answer(&*here);
            batch
        });
        let (shard, questions, spare) = (shard.clone(), questions.clone(), RefCell::default());
        Scatter { inner: Rc::new(Inner { answers, shard, questions, spare }) }
    }

    /// The number of shards.
    #[inline]
    pub fn shards(&self) -> usize {
        self.inner.shard.count()
    }

    /// Begins a request in its turn: `begin` is called at once, or when all earlier replies are
    /// written. A request that only [asks](Scatter::asking), as `asks` says, also begins while such
    /// requests before it wait, so that its questions go with theirs; a request that replies by
    /// itself waits for them, and later requests wait for it. A waiting request does not begin if
    /// the connection was closed meanwhile.
    ///
    /// The call awaits the rest, which waits for the turn, or carries the replies of this request
    /// and of those that begin meanwhile. So
    /// [`Limits::calls_in_flight_max`](ringserve_server::Limits::calls_in_flight_max) has to be 2
    /// or more for pipelined requests to go together.
    #[inline]
    pub fn in_turn<S: 'static>(
        &self,
        cx: &Cx<'_, S>,
        replies: &Replies<A>,
        asks: bool,
        begin: impl FnOnce(),
    ) -> Remainder<impl Future<Output = ()>> {
        let is_idle = replies.is_idle();
        let (turn, request) = if is_idle || asks && replies.takes_questions() {
            begin();
            if !is_idle || replies.queue.borrow().is_none() {
                return Remainder(None);
            }
            // What was answered before leaves with the answers, and not by itself.
            let held = cx.hold_replies();
            (
                replies.turns.take(),
                Request::Asks(CarriedQueue { place: Some(&replies.queue), held: Some(held) }),
            )
        } else {
            (replies.turns.wait(asks), Request::Waits(begin))
        };
        let heir = Heir { turn, replies };
        Remainder(Some(Box::pin(self.finish(cx, heir, request))))
    }

    /// Does the work of a request that takes its time, such as one that
    /// [yields](ringserve_server::task::yield_now), when all earlier replies are written. Later
    /// requests wait for its end. Nothing is done if the connection was closed meanwhile.
    pub async fn alone<S: 'static>(
        &self,
        cx: &Cx<'_, S>,
        replies: &Replies<A>,
        work: impl Future<Output = ()>,
    ) {
        let turn = replies.turns.wait(false);
        turn.wait(|| false).await;
        if !cx.is_closed() {
            work.await;
        }
    }

    async fn finish<S: 'static>(
        &self,
        cx: &Cx<'_, S>,
        heir: Heir<'_, A>,
        request: Request<'_, '_, A, impl FnOnce()>,
    ) {
        let Heir { turn, replies } = &heir;
        let carried = match request {
            Request::Waits(begin) => {
                let has_turn = turn.wait(|| replies.has_room_again()).await;
                let carried = has_turn.then(|| CarriedQueue { place: Some(&replies.queue), held: None });
                if cx.is_closed() {
                    return;
                }
                let is_left_over = replies.queue.borrow().is_some();
                turn.begin();
                begin();
                // What it asks goes along, or it replied by itself.
                let Some(carried) = carried.filter(|_| replies.queue.borrow().is_some()) else {
                    let replies = heir.gives_way();
                    // No further request begins to wait while others that waited go along: else
                    // each would, one by one. Each of them had a look by then, unless its handler
                    // does something else.
                    for _ in 0..replies.turns.waiting() {
                        if !replies.turns.next_asks() || !replies.has_room_again() || cx.is_closed() {
                            break;
                        }
                        yield_now().await;
                    }
                    return;
                };
                if !is_left_over {
                    replies.turns.wake_next();
                    yield_now().await;
                }
                carried
            }
            Request::Asks(carried) => {
                // Other calls go first, so that their pipelined requests go along.
                yield_now().await;
                carried
            }
        };
        self.carry(cx, replies, carried).await;
    }

    /// Begins the reply to a request, from within the `begin` of [`in_turn`](Scatter::in_turn).
    ///
    /// # Panics
    /// If another `ReplyBuilder` of the same connection lives.
    pub fn asking<'a>(&'a self, replies: &'a Replies<A>) -> ReplyBuilder<'a, A> {
        let spare =
            || self.inner.spare.borrow_mut().pop().unwrap_or_else(|| Queue::new(self.shards()).into());
        let queue = RefMut::map(replies.queue.borrow_mut(), |queue| &mut **queue.get_or_insert_with(spare));
        ReplyBuilder { inner: &self.inner, queue }
    }

    /// Begins the reply to a request that only asks, if earlier requests of the connection wait and
    /// its questions go with theirs: it needs nothing to be awaited. Else
    /// [`in_turn`](Scatter::in_turn) begins it. This is the short way for most requests of a
    /// pipeline, whose frames need not be kept.
    ///
    /// # Panics
    /// If another `ReplyBuilder` of the same connection lives.
    #[inline]
    pub fn along<'a>(&'a self, replies: &'a Replies<A>) -> Option<ReplyBuilder<'a, A>> {
        if replies.is_idle() || replies.turns.has_waiting() {
            return None;
        }
        let queue = RefMut::filter_map(replies.queue.borrow_mut(), |queue| {
            queue.as_deref_mut().filter(|queue| queue.has_room())
        });
        Some(ReplyBuilder { inner: &self.inner, queue: queue.ok()? })
    }

    /// Asks and writes until nothing is due, or until what was under way is written and another
    /// call that asks waits: that one carries on. So no call lasts for ever, however long a
    /// pipeline is.
    async fn carry<S: 'static>(
        &self,
        cx: &Cx<'_, S>,
        replies: &Replies<A>,
        mut carried: CarriedQueue<'_, '_, A>,
    ) {
        let (inner, place) = (&*self.inner, &replies.queue);
        let queue = || RefMut::map(place.borrow_mut(), |queue| &mut **queue.as_mut().expect("it is carried"));
        let make_room = || {
            if queue().has_room_again() {
                replies.turns.wake_next();
            }
        };
        let here = inner.shard.index();
        let (mut asked, mut has_written) = (queue().asked(), false);
        while !queue().is_done() {
            if std::mem::replace(&mut has_written, true) && replies.turns.next_asks() {
                queue().keep_asked(asked);
                return carried.hand_over();
            }
            let mut reserved = self.reserve_for_next(cx, replies, &mut carried).await;
            let mut own = None;
            for (shard, batch) in queue().take() {
                match shard == here {
                    true => own = Some(batch),
                    false => asked.push((shard, batch.left(), inner.questions.ask(shard, batch))),
                }
            }
            if let Some(mut batch) = own {
                batch.answer(&*inner.answers);
                queue().answered(here, batch);
            }
            // Others ask while these are under way.
            make_room();
            for (shard, left, answer) in asked.drain(..) {
                let batch = answer.await;
                let failed = |why| Box::new(Batch::failed(&*inner.answers, left, shard, why));
                queue().answered(shard, batch.unwrap_or_else(failed));
            }
            carried.held = None;
            loop {
                let text = queue().write();
                let is_all = text.is_empty();
                // What is reserved is for the first one.
                let text = self.write(cx, replies, text, reserved.take()).await;
                queue().wrote(text);
                if is_all {
                    break;
                }
            }
            make_room();
        }
        let mut spare = inner.spare.borrow_mut();
        if let Some(mut queue) = place.take()
            && spare.len() < SPARE_MAX
        {
            queue.rest(asked);
            spare.push(queue);
        }
    }
}

impl<A: QuestionHandler> Scatter<A> {
    /// Waits for the memory of the answer that is due, if it is a large one. Of several shards'
    /// answers only that is waited for: none keeps memory from others that waits for more.
    async fn reserve_for_next<S: 'static>(
        &self,
        cx: &Cx<'_, S>,
        replies: &Replies<A>,
        carried: &mut CarriedQueue<'_, '_, A>,
    ) -> Option<Reserved> {
        let queue =
            || RefMut::map(replies.queue.borrow_mut(), |queue| &mut **queue.as_mut().expect("it is carried"));
        let (shard, bytes) = queue().wants()?;
        carried.held = None;
        let reserved = cx.reserve(bytes).await.ok();
        match &reserved {
            Some(_) => queue().wanting(shard).grant(bytes),
            None => queue().wanting(shard).refuse(&*self.inner.answers, shard),
        }
        reserved
    }

    /// Writes due replies as the peer takes them. A long one becomes the outbox's, as far as that
    /// has room, and others are copied. Returns the memory of those.
    async fn write<S: 'static>(
        &self,
        cx: &Cx<'_, S>,
        replies: &Replies<A>,
        text: Vec<u8>,
        reserved: Option<Reserved>,
    ) -> Vec<u8> {
        let left = text.len().saturating_sub(reserved.as_ref().map_or(0, Reserved::bytes));
        let limits = cx.limits();
        let room = limits.outbox_bytes_max.saturating_sub(limits.outbox_bytes_high);
        if (LONG_BYTES..=room).contains(&text.len()) {
            self.ready(cx, replies, left).await;
            cx.write(text);
            return Vec::new();
        }
        for piece in text.chunks(PIECE_BYTES) {
            self.ready(cx, replies, left).await;
            cx.write(piece);
        }
        text
    }

    /// Waits for the peer, with `text` bytes of replies in hand that do not count yet.
    async fn ready<S: 'static>(&self, cx: &Cx<'_, S>, replies: &Replies<A>, text: usize) {
        if !cx.is_ready() {
            replies.queue.borrow_mut().iter_mut().for_each(|queue| queue.hold(cx, text));
            cx.ready().await;
            replies.queue.borrow_mut().iter_mut().for_each(|queue| queue.let_go());
        }
    }
}

/// The turn of a call, which may be left replies with it. If it is dropped before it looks at them,
/// as by a time limit, it takes them along.
struct Heir<'a, A: QuestionHandler> {
    turn: Turn<'a>,
    replies: &'a Replies<A>,
}

impl<'a, A: QuestionHandler> Heir<'a, A> {
    /// Gives the turn to the next call.
    fn gives_way(self) -> &'a Replies<A> {
        self.replies
    }
}

impl<A: QuestionHandler> Drop for Heir<'_, A> {
    fn drop(&mut self) {
        if self.turn.is_unbegun()
            && let Ok(mut queue) = self.replies.queue.try_borrow_mut()
        {
            *queue = None;
        }
    }
}

/// The rest of a request.
enum Request<'a, 'b, A: QuestionHandler, F> {
    /// It began, and its questions and those of later ones are to be asked.
    Asks(CarriedQueue<'a, 'b, A>),
    /// It begins by this when it has its turn.
    Waits(F),
}

/// A queue that a call carries. If a time limit drops it before its end, it leaves nothing behind
/// for later requests to wait for, and no reply that is held.
struct CarriedQueue<'a, 'b, A: QuestionHandler> {
    place: Option<&'a RefCell<Option<Box<Queue<A>>>>>,
    held: Option<HeldReplies<'b>>,
}

impl<A: QuestionHandler> CarriedQueue<'_, '_, A> {
    /// Leaves the queue to the next call.
    fn hand_over(mut self) {
        self.place = None;
    }
}

impl<A: QuestionHandler> Drop for CarriedQueue<'_, '_, A> {
    fn drop(&mut self) {
        if let Some(Ok(mut queue)) = self.place.map(RefCell::try_borrow_mut) {
            *queue = None;
        }
    }
}

impl<A: QuestionHandler> Clone for Scatter<A> {
    fn clone(&self) -> Scatter<A> {
        Scatter { inner: self.inner.clone() }
    }
}

impl<A: QuestionHandler> fmt::Debug for Scatter<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scatter").field("shard", &self.inner.shard.index()).finish_non_exhaustive()
    }
}

/// The replies of one connection: its session, or a part of it. It takes a few words while no reply
/// is due.
pub struct Replies<A: QuestionHandler> {
    /// `None` while no reply is due.
    queue: RefCell<Option<Box<Queue<A>>>>,
    turns: Turns,
}

impl<A: QuestionHandler> Replies<A> {
    /// True if no request and no reply waits: a reply that needs no other shard can be written at
    /// once.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.turns.is_free()
    }

    /// True if a request that waited may go along with earlier ones, and others behind it.
    fn has_room_again(&self) -> bool {
        self.queue.borrow().as_ref().is_some_and(|queue| queue.has_room_again())
    }

    /// True if a request may ask while earlier ones wait.
    fn takes_questions(&self) -> bool {
        !self.turns.has_waiting() && self.queue.borrow().as_ref().is_none_or(|queue| queue.has_room())
    }
}

impl<A: QuestionHandler> Default for Replies<A> {
    fn default() -> Replies<A> {
        Replies { queue: RefCell::default(), turns: Turns::default() }
    }
}

impl<A: QuestionHandler> fmt::Debug for Replies<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replies").field("is_idle", &self.is_idle()).finish_non_exhaustive()
    }
}

/// The reply to one request, in the order of its parts.
#[doc(alias = "Asking")]
pub struct ReplyBuilder<'a, A: QuestionHandler> {
    inner: &'a Inner<A>,
    queue: RefMut<'a, Queue<A>>,
}

impl<A: QuestionHandler> ReplyBuilder<'_, A> {
    /// Adds these bytes to the reply.
    pub fn put(&mut self, bytes: &[u8]) {
        self.queue.put(bytes);
    }

    /// Adds the answer of a shard to the reply.
    ///
    /// # Panics
    /// If there is no such shard.
    pub fn ask(&mut self, shard: usize, question: A::Question, parts: FrameFields<'_>) {
        self.queue.ask(shard, question, parts, (&*self.inner.answers, self.inner.shard.index()));
    }

    /// Adds one [merged](Merge) answer to the reply, made of the next `answers` answers, which have
    /// to be asked for next.
    pub fn merge(&mut self, answers: usize) {
        self.queue.merge(answers);
    }
}

impl<A: QuestionHandler> fmt::Debug for ReplyBuilder<'_, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Asking").finish_non_exhaustive()
    }
}
