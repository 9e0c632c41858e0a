//! Questions to other shards, and their answers.
//!
//! ```text
//!   Mesh::ask ──▶ slot of the asker ──▶ letter with its ticket ──▶ mailbox of the other shard
//!                     ▲    │                                              │ is handled
//!   Ask::poll ────────┘    ▼                                              ▼
//!      ▲                settled ◀── the asker's turn reads ◀── Reply: answered, or dropped
//!      └──── woken ◀───────┘
//! ```
//!
//! * An answer is not a message: its slot was taken when the question was asked, so no mailbox can
//!   be too full for it.
//! * Several answers between two turns of the asker are one wake-up, one lock and one swap there.
//! * A ticket names slot and serial. When an [`Ask`] is dropped its slot serves the next one, and
//!   the late answer is dropped where it arrives.
//! * A shard that ends says so to all askers, after its answers. So each question ends, even if
//!   user code leaked it there.

use std::fmt;
use std::num::NonZeroU64;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};

use ringserve_base::guard::{discard, guard, wake};

use crate::shard::wakes::inbox::ShardRemote;

/// The most unused slots that are kept. The memory of a burst above it is given back.
const SPARE_MAX: usize = 1024;

/// The name of a question among those of its asker.
#[derive(Clone, Copy)]
pub(crate) struct Ticket {
    slot: u32,
    /// Unique among the questions of the asker.
    serial: NonZeroU64,
}

/// News for an asker.
enum News<A> {
    /// The end of one question.
    Outcome(Ticket, Result<A, AskError>),
    /// A shard ended and gives no more answers.
    Ended(u32),
}

/// The questions of one shard, or of all threads that are no shard.
pub(crate) struct Asker<A> {
    /// Mostly used by the shard's own thread.
    slots: Mutex<Slots<A>>,
    /// `None` for threads that are no shard: their news are settled by the thread that brings them.
    shard: OnceLock<Arc<ShardRemote>>,
    /// Written by all shards that answer.
    news: Apart<Mutex<Newsbox<A>>>,
}

/// Kept on cache lines apart from data of a single thread.
#[repr(align(64))]
struct Apart<T>(T);

struct Newsbox<A> {
    news: Vec<News<A>>,
    closed: bool,
}

/// The room in which a shard reads its news.
pub(crate) struct NewsReader<A> {
    news: Vec<News<A>>,
    late: Vec<Result<A, AskError>>,
}

impl<A> Default for NewsReader<A> {
    fn default() -> NewsReader<A> {
        NewsReader { news: Vec::new(), late: Vec::new() }
    }
}

impl<A> Asker<A> {
    pub(crate) fn new() -> Asker<A> {
        Asker {
            slots: Mutex::new(Slots { all: Vec::new(), free: Vec::new(), asked: 0, closed: false }),
            shard: OnceLock::new(),
            news: Apart(Mutex::new(Newsbox { news: Vec::new(), closed: false })),
        }
    }

    /// Lets this shard read the news in its turns from now on.
    pub(crate) fn belongs_to(&self, shard: Arc<ShardRemote>) {
        let _ = self.shard.set(shard);
    }

    /// Takes a slot for a question to a shard. `None` if the asker ended.
    pub(crate) fn begin(&self, to: u32) -> Option<Ticket> {
        let ticket = self.slots().begin(to)?;
        if let Some(shard) = self.shard.get() {
            shard.note_question();
        }
        Some(ticket)
    }

    /// Frees the slot of a question that was not sent.
    pub(crate) fn give_up(&self, ticket: Ticket) {
        let state = self.slots().release(ticket);
        drop(state);
    }

    /// Ends one question, from any thread.
    pub(crate) fn bring(&self, ticket: Ticket, outcome: Result<A, AskError>) {
        self.notify(News::Outcome(ticket, outcome));
    }

    /// Notes that a shard ended, from any thread.
    pub(crate) fn shard_ended(&self, shard: u32) {
        self.notify(News::Ended(shard));
    }

    fn notify(&self, news: News<A>) {
        let Some(shard) = self.shard.get() else {
            let (mut woken, mut late) = (Vec::new(), Vec::new());
            self.slots().hear(news, &mut woken, &mut late);
            // Both are user code, and this may be the drop of a reply while another panic unwinds.
            let _ = guard(move || drop(late));
            let _ = guard(|| wake_all(&mut woken));
            return;
        };
        let mut newsbox = self.newsbox();
        if newsbox.closed {
            drop(newsbox);
            // The value is user code.
            return drop(news);
        }
        newsbox.news.push(news);
        let first = newsbox.news.len() == 1;
        drop(newsbox);
        // The thread that brought the first news has called the shard, or is about to.
        if first {
            shard.announce_messages();
        }
    }

    /// Settles the questions with news, on the shard. Their wakers are added to `woken`.
    pub(crate) fn read(&self, brought: &mut NewsReader<A>, woken: &mut Vec<Waker>) {
        let mut newsbox = self.newsbox();
        if newsbox.news.is_empty() {
            return;
        }
        std::mem::swap(&mut newsbox.news, &mut brought.news);
        drop(newsbox);
        let mut slots = self.slots();
        for news in brought.news.drain(..) {
            slots.hear(news, woken, &mut brought.late);
        }
        drop(slots);
        for answer in brought.late.drain(..) {
            let _ = guard(move || drop(answer));
        }
    }

    /// Ends the asker with its shard: pending questions get no answer.
    pub(crate) fn close(&self) {
        let mut newsbox = self.newsbox();
        newsbox.closed = true;
        let news = std::mem::take(&mut newsbox.news);
        drop(newsbox);
        let mut woken = Vec::new();
        let mut slots = self.slots();
        slots.closed = true;
        slots.lose(|_| true, &mut woken);
        drop(slots);
        for news in news {
            let _ = guard(move || drop(news));
        }
        for waker in woken {
            let _ = wake(waker);
        }
    }

    fn poll(
        &self,
        ticket: Ticket,
        mut clone: Option<Waker>,
        task: &Context<'_>,
    ) -> Poll<Result<A, AskError>> {
        loop {
            let mut slots = self.slots();
            match slots.state(ticket) {
                State::Waits(Some(known)) if known.will_wake(task.waker()) => return Poll::Pending,
                // Cloning and dropping a waker is user code: nothing is locked meanwhile.
                State::Waits(known) => match clone.take() {
                    None => {
                        drop(slots);
                        clone = Some(task.waker().clone());
                    }
                    new => {
                        let old = std::mem::replace(known, new);
                        drop(slots);
                        discard(old);
                        return Poll::Pending;
                    }
                },
                State::Done(_) => {
                    let state = slots.release(ticket);
                    drop(slots);
                    discard(clone);
                    let State::Done(outcome) = state else { unreachable!("it is done") };
                    return Poll::Ready(outcome);
                }
                State::Free => unreachable!("a slot is in use as long as its Ask waits"),
            }
        }
    }

    fn slots(&self) -> MutexGuard<'_, Slots<A>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn newsbox(&self) -> MutexGuard<'_, Newsbox<A>> {
        self.news.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Wakes all of them, even if one panics.
///
/// # Panics
/// With the message of the first panic, after all were woken.
pub(crate) fn wake_all(wakers: &mut Vec<Waker>) {
    let mut panicked = None;
    for waker in wakers.drain(..) {
        if let Err(said) = wake(waker) {
            panicked.get_or_insert(said);
        }
    }
    if let Some(said) = panicked {
        // The panic hook has seen it.
        std::panic::resume_unwind(Box::new(said.to_string()));
    }
}

struct Slots<A> {
    all: Vec<Slot<A>>,
    /// The last slot freed is the first taken.
    free: Vec<u32>,
    /// The number of questions so far.
    asked: u64,
    /// The asker ended.
    closed: bool,
}

struct Slot<A> {
    serial: NonZeroU64,
    /// The shard that was asked.
    to: u32,
    state: State<A>,
}

enum State<A> {
    Free,
    Waits(Option<Waker>),
    Done(Result<A, AskError>),
}

impl<A> Slots<A> {
    fn begin(&mut self, to: u32) -> Option<Ticket> {
        if self.closed {
            return None;
        }
        self.asked += 1;
        let serial = NonZeroU64::new(self.asked)?;
        let new = Slot { serial, to, state: State::Waits(None) };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.all[slot as usize] = new;
                slot
            }
            None => {
                self.all.push(new);
                self.all.len() as u32 - 1
            }
        };
        Some(Ticket { slot, serial })
    }

    fn hear(&mut self, news: News<A>, woken: &mut Vec<Waker>, late: &mut Vec<Result<A, AskError>>) {
        match news {
            News::Outcome(ticket, outcome) => match self.all.get_mut(ticket.slot as usize) {
                Some(Slot { serial, state: state @ State::Waits(_), .. }) if *serial == ticket.serial => {
                    if let State::Waits(Some(waker)) = std::mem::replace(state, State::Done(outcome)) {
                        woken.push(waker);
                    }
                }
                _ => late.push(outcome),
            },
            News::Ended(shard) => self.lose(|to| to == shard, woken),
        }
    }

    /// Fails the questions to these shards, which give no more answers.
    fn lose(&mut self, ended: impl Fn(u32) -> bool, woken: &mut Vec<Waker>) {
        for slot in self.all.iter_mut().filter(|slot| ended(slot.to)) {
            if let State::Waits(waker) = &mut slot.state {
                woken.extend(waker.take());
                slot.state = State::Done(Err(AskError::Unanswered));
            }
        }
    }

    fn state(&mut self, ticket: Ticket) -> &mut State<A> {
        let slot = &mut self.all[ticket.slot as usize];
        debug_assert_eq!(slot.serial, ticket.serial, "the slot of an Ask is its own");
        &mut slot.state
    }

    /// Frees a slot. The caller drops its former state when nothing is locked.
    fn release(&mut self, ticket: Ticket) -> State<A> {
        let state = std::mem::replace(self.state(ticket), State::Free);
        self.free.push(ticket.slot);
        if self.free.len() == self.all.len() && self.all.len() > SPARE_MAX {
            (self.all, self.free) = (Vec::new(), Vec::new());
        }
        state
    }
}

/// Waits for the answer of another shard: [`Mesh::ask`](crate::sync::Mesh::ask). It may be moved to
/// another thread.
///
/// Its drop gives up the answer: the message is handled all the same.
///
/// # Panics
/// If it is polled after it returned the answer.
#[must_use = "the answer is dropped if it is not awaited"]
pub struct Ask<A> {
    state: AskState<A>,
}

enum AskState<A> {
    Failed(AskError),
    Waits { asker: Arc<Asker<A>>, ticket: Ticket, is_polled: bool },
    Over,
}

impl<A> Ask<A> {
    pub(crate) fn failed(error: AskError) -> Ask<A> {
        Ask { state: AskState::Failed(error) }
    }

    pub(crate) fn waits(asker: Arc<Asker<A>>, ticket: Ticket) -> Ask<A> {
        Ask { state: AskState::Waits { asker, ticket, is_polled: false } }
    }
}

impl<A> Future for Ask<A> {
    type Output = Result<A, AskError>;

    fn poll(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Result<A, AskError>> {
        let outcome = match &mut self.state {
            AskState::Failed(error) => Poll::Ready(Err(*error)),
            AskState::Waits { asker, ticket, is_polled } => {
                // Mostly the first poll has to wait, and the second one finds the answer.
                let clone = (!std::mem::replace(is_polled, true)).then(|| task.waker().clone());
                asker.poll(*ticket, clone, task)
            }
            AskState::Over => panic!("an Ask is polled after it gave the answer"),
        };
        if outcome.is_ready() {
            self.state = AskState::Over;
        }
        outcome
    }
}

impl<A> Drop for Ask<A> {
    fn drop(&mut self) {
        if let AskState::Waits { asker, ticket, .. } = &self.state {
            asker.give_up(*ticket);
        }
    }
}

impl<A> fmt::Debug for Ask<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ask").finish_non_exhaustive()
    }
}

/// Waits for the answers of all shards, in order: [`Mesh::ask_all`](crate::sync::Mesh::ask_all).
#[must_use = "the answers are dropped if it is not awaited"]
#[doc(alias = "OnAll")]
pub struct AskAll<A> {
    asks: Vec<Ask<A>>,
    answers: Vec<Result<A, AskError>>,
}

impl<A> AskAll<A> {
    pub(crate) fn new(asks: Vec<Ask<A>>) -> AskAll<A> {
        AskAll { answers: Vec::with_capacity(asks.len()), asks }
    }
}

// No answer is pinned: it is moved out of its slot.
impl<A> Unpin for AskAll<A> {}

impl<A> Future for AskAll<A> {
    type Output = Vec<Result<A, AskError>>;

    fn poll(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Vec<Result<A, AskError>>> {
        let AskAll { asks, answers } = &mut *self;
        while let Some(ask) = asks.get_mut(answers.len()) {
            match Pin::new(ask).poll(task) {
                Poll::Ready(answer) => answers.push(answer),
                Poll::Pending => return Poll::Pending,
            }
        }
        asks.clear();
        Poll::Ready(std::mem::take(answers))
    }
}

impl<A> fmt::Debug for AskAll<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OnAll({} of {})", self.answers.len(), self.asks.len())
    }
}

/// The way back of a question, from the shard that handles it or from any other thread.
///
/// The answer may come at any time. A reply that is dropped without an answer ends the question
/// with [`AskError::Unanswered`]. A message without a question has a reply too, whose answer goes
/// nowhere.
pub struct Reply<A> {
    /// Each shard has a copy, so that no other shard writes its count of references.
    askers: Arc<[Arc<Asker<A>>]>,
    from: u32,
    /// `None` once it is answered, and for a message without a question.
    ticket: Option<Ticket>,
}

impl<A> Reply<A> {
    pub(crate) fn new(askers: Arc<[Arc<Asker<A>>]>, from: u32, ticket: Option<Ticket>) -> Reply<A> {
        Reply { askers, from, ticket }
    }

    /// Answers. If the question was given up meanwhile, the answer is dropped.
    pub fn answer(mut self, answer: A) {
        if let Some(ticket) = self.ticket.take() {
            self.askers[self.from as usize].bring(ticket, Ok(answer));
        }
    }
}

impl<A> Drop for Reply<A> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.askers[self.from as usize].bring(ticket, Err(AskError::Unanswered));
        }
    }
}

impl<A> fmt::Debug for Reply<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reply").finish_non_exhaustive()
    }
}

/// The reason why a question has no answer.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AskError {
    /// Too many messages wait for the shard. The question was not handled.
    Full,
    /// The shard had ended, or no shard has that number. The question was not handled.
    Gone,
    /// The shard dropped the question or the reply, panicked, or ended; or the asking shard ended.
    /// The question may have been handled.
    Unanswered,
    /// There was no memory for a large answer, which was asked for by a scatter. The question was
    /// not handled.
    NoMemory,
}

impl fmt::Display for AskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AskError::Full => "too many messages wait for the shard",
            AskError::Gone => "the shard ended, or no shard has that number",
            AskError::Unanswered => "the shard took the question and gave no answer",
            AskError::NoMemory => "memory is used up",
        })
    }
}

ringserve_buf::debug_is_display!(AskError);

impl std::error::Error for AskError {}

#[cfg(test)]
mod tests {
    use ringserve_base::guard::wakers::bomb;

    use super::*;
    use crate::shard::wakes::wake::Attention;

    fn poll(ask: &mut Ask<u32>, waker: &Waker) -> Poll<Result<u32, AskError>> {
        Pin::new(ask).poll(&mut Context::from_waker(waker))
    }

    fn asker() -> (Arc<Asker<u32>>, Arc<ShardRemote>) {
        let (asker, remote) = (Arc::new(Asker::new()), ShardRemote::new());
        asker.belongs_to(remote.clone());
        (asker, remote)
    }

    fn ask(asker: &Arc<Asker<u32>>, to: u32) -> (Ask<u32>, Ticket) {
        let ticket = asker.begin(to).expect("the asker lives");
        (Ask::waits(asker.clone(), ticket), ticket)
    }

    fn read(asker: &Asker<u32>) -> usize {
        let (mut brought, mut woken) = (NewsReader::default(), Vec::new());
        asker.read(&mut brought, &mut woken);
        woken.len()
    }

    #[test]
    fn many_answers_are_one_call_of_the_asker() {
        let (asker, remote) = asker();
        let mut asked: Vec<_> = (0..3).map(|_| ask(&asker, 1)).collect();
        for (ask, _) in &mut asked[..2] {
            assert!(poll(ask, Waker::noop()).is_pending());
        }
        assert!(remote.fall_asleep());
        asked.iter().for_each(|(_, ticket)| asker.bring(*ticket, Ok(7)));
        assert!(remote.begin_turn(&mut Default::default()).has(Attention::MESSAGES));
        assert!(remote.fall_asleep(), "no later one called");
        assert_eq!(read(&asker), 2, "those that were polled are woken");
        for (ask, _) in &mut asked {
            assert_eq!(poll(ask, Waker::noop()), Poll::Ready(Ok(7)));
        }
    }

    #[test]
    fn late_answer_is_for_no_other_question() {
        let (asker, _remote) = asker();
        let (given_up, late) = ask(&asker, 1);
        drop(given_up);
        let (mut next, ticket) = ask(&asker, 1);
        assert_eq!(ticket.slot, late.slot);
        asker.bring(late, Ok(1));
        read(&asker);
        assert!(poll(&mut next, Waker::noop()).is_pending());
        asker.bring(ticket, Ok(2));
        read(&asker);
        assert_eq!(poll(&mut next, Waker::noop()), Poll::Ready(Ok(2)));
    }

    #[test]
    fn end_of_a_shard_ends_its_questions_behind_its_answers() {
        let (asker, _remote) = asker();
        let (mut answered, ticket) = ask(&asker, 1);
        let ((mut lost, _), (mut other, _)) = (ask(&asker, 1), ask(&asker, 2));
        asker.bring(ticket, Ok(5));
        asker.shard_ended(1);
        read(&asker);
        assert_eq!(poll(&mut answered, Waker::noop()), Poll::Ready(Ok(5)));
        assert_eq!(poll(&mut lost, Waker::noop()), Poll::Ready(Err(AskError::Unanswered)));
        assert!(poll(&mut other, Waker::noop()).is_pending());
        asker.close();
        assert_eq!(poll(&mut other, Waker::noop()), Poll::Ready(Err(AskError::Unanswered)));
        assert!(asker.begin(2).is_none());
    }

    #[test]
    fn slots_of_a_burst_are_given_back() {
        let (asker, _remote) = asker();
        let mut burst: Vec<_> = (0..SPARE_MAX + 1).map(|_| ask(&asker, 1)).collect();
        let (_, old) = burst[0];
        burst.clear();
        assert_eq!(asker.slots().all.capacity(), 0);
        let (mut new, _) = ask(&asker, 1);
        asker.bring(old, Ok(1));
        read(&asker);
        assert!(poll(&mut new, Waker::noop()).is_pending());
    }

    #[test]
    fn waker_that_panics_keeps_no_other_from_being_woken() {
        let remote = ShardRemote::new();
        let task = crate::shard::wakes::inbox::TaskWaker::new(&remote, 7);
        let mut wakers = vec![bomb(), task.waker()];
        assert!(guard(|| wake_all(&mut wakers)).is_err());
        assert!(!remote.fall_asleep(), "the second one was woken");
    }
}
