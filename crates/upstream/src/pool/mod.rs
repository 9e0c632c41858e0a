//! The connections of a shard to the backends of an upstream: idle ones, lent ones, and calls that
//! wait for one.
//!
//! ```text
//!   take ──▶ the newest idle one, if nothing happened on it ────────────────────────────┐
//!     │  none                                                                           ├──▶ Lent ── give_back, if clean ─┐
//!     └────▶ waits, first in first out ◀── a connection that was made, or given back ───┘                                │
//!                       ▲                                                                                                │
//!                       └── or else to the top of the idle ones, which the keeper watches ◀──────────────────────────────┘
//! ```
//!
//! A call that waits has a connection made for it, and takes whichever comes first. The keeper is a
//! task that reads on all idle connections: the end of one is known at once, and when it came
//! teaches how long the backend keeps them.

mod keeper;
mod wait;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::backend::Counts;
use crate::policy::keep_alive::KeepAlive;
use crate::policy::part_of;
use crate::settings::PoolLimits;
use crate::view::{Member, Part, View};
use wait::{Waiter, Waiting};

/// A connection that a pool may keep between two requests.
///
/// A pool reads on its idle connections, so that the end of one is known when it comes and not when
/// it is asked for.
pub trait Connection: 'static {
    /// Ready if the connection may not be used for another request: it ended, or something is left
    /// on it or came on it that belongs to no request. Pending while it is idle and open; then the
    /// last task that polled is woken once that changes.
    ///
    /// The pool polls it when it is given back, while it is idle, and before it is lent again.
    fn poll_idle(&mut self, task: &mut Context<'_>) -> Poll<IdleEvent>;
}

/// Why an idle connection may not be used again.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdleEvent {
    /// It ended, or its end was announced. How long it was idle teaches the pool how long the
    /// backend keeps connections.
    Ended,
    /// Something came that answers no request: what comes next may be the answer to another one.
    Stray,
}

/// Makes a connection to a backend.
type Connect<C> = Box<dyn Fn(Rc<Member<Pool<C>>>) -> Pin<Box<dyn Future<Output = io::Result<C>>>>>;

/// The connections of a client of a shard.
pub(crate) struct Pools<C: Connection> {
    pub(crate) view: Rc<View<Pool<C>>>,
    connect: Connect<C>,
    /// Calls that wait for a connection to any backend.
    waiting: Cell<usize>,
    /// Idle connections to all backends.
    idle: Rc<Cell<usize>>,
    /// Wakes the keeper.
    keeper: RefCell<Waker>,
    /// When the last line was written about what no question asked for.
    warned_at: Cell<u64>,
}

/// The connections to one backend.
pub(crate) struct Pool<C> {
    /// The oldest first.
    idle: RefCell<Vec<Kept<C>>>,
    waiters: RefCell<VecDeque<Rc<Waiter<C>>>>,
    open: Rc<Cell<usize>>,
    connecting: Rc<Cell<usize>>,
    learned: RefCell<KeepAlive>,
    /// Since when calls wait without one that got a connection.
    stuck_since: Cell<u64>,
    /// When the last call left the queue.
    waited_at: Cell<u64>,
}

impl<C> Pool<C> {
    pub(crate) fn new() -> Pool<C> {
        Pool {
            idle: RefCell::default(),
            waiters: RefCell::default(),
            open: Rc::default(),
            connecting: Rc::default(),
            learned: RefCell::default(),
            stuck_since: Cell::new(0),
            waited_at: Cell::new(0),
        }
    }
}

impl<C: Connection> Part for Pool<C> {
    fn leaves(&self) {
        let idle = self.idle.take();
        drop(idle);
    }

    fn connections(&self) -> (u64, u64) {
        (self.open.get() as u64, self.idle.borrow().len() as u64)
    }
}

/// A backend may send what no question asked for on every connection: the counter has all of them,
/// the log a line a second.
const WARNS_EACH: u64 = 1_000_000_000;

/// One that is counted until it is dropped.
struct Counted(Rc<Cell<usize>>);

impl Counted {
    fn new(count: &Rc<Cell<usize>>) -> Counted {
        count.set(count.get() + 1);
        Counted(count.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// A connection of a pool.
struct Kept<C> {
    connection: C,
    /// Among those of the backend. `None` once it is detached.
    open: Option<Counted>,
    /// Among the idle ones, while it is one.
    idle: Option<Counted>,
    /// When it is too old to be lent, in nanoseconds.
    old_at: u64,
    uses: u64,
    /// It was idle, so its end may cross a question.
    was_idle: bool,
    idle_since: u64,
}

/// Why there is no connection.
pub(crate) enum NotLent {
    /// Too many calls wait.
    Full,
    /// It took too long until one was free.
    TooLate,
    /// None could be made.
    Failed(io::Error),
}

/// Nanoseconds of a time, or as many as there can be.
pub(crate) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl<C: Connection> Pools<C> {
    pub(crate) fn new(view: Rc<View<Pool<C>>>, connect: Connect<C>) -> Rc<Pools<C>> {
        let keeper = RefCell::new(Waker::noop().clone());
        let (waiting, idle, warned_at) = (Cell::new(0), Rc::default(), Cell::new(0));
        let pools = Rc::new(Pools { view, connect, waiting, idle, keeper, warned_at });
        keeper::begin(&pools);
        pools
    }

    fn limits(&self) -> &PoolLimits {
        &self.view.upstream.settings().pool
    }

    /// Takes a connection to this backend; a new one, or one that was just used, if it has to be
    /// `fresh`.
    pub(crate) async fn take(
        self: &Rc<Pools<C>>,
        member: &Rc<Member<Pool<C>>>,
        fresh: bool,
    ) -> Result<Lent<C>, NotLent> {
        // Those that wait already were given what is idle, unless they want a new one.
        let idle = if fresh { None } else { self.take_idle(member, self.view.now()) };
        let kept = match idle {
            Some(lent) => return Ok(lent),
            None if self.waiting.get() >= self.limits().waiting_max => return Err(NotLent::Full),
            None if self.is_stuck(member) => return Err(NotLent::TooLate),
            None => {
                let mut waiting = Waiting::begin(self, member);
                self.connect_more(member);
                match self.view.shard.timeout(self.limits().wait_max, waiting.result()).await {
                    Ok(result) => result.map_err(NotLent::Failed)?,
                    Err(_elapsed) => return Err(NotLent::TooLate),
                }
            }
        };
        Ok(Lent { kept: Some(kept), pools: self.clone(), member: member.clone() })
    }

    /// Takes the newest idle connection to this backend, if there is one on which nothing happened.
    pub(crate) fn take_idle(self: &Rc<Pools<C>>, member: &Rc<Member<Pool<C>>>, now: u64) -> Option<Lent<C>> {
        let kept = self.pop(member, now)?;
        Some(Lent { kept: Some(kept), pools: self.clone(), member: member.clone() })
    }

    /// True if a call waits for this backend, and none that waited was given a connection for too
    /// long.
    fn is_stuck(&self, member: &Member<Pool<C>>) -> bool {
        let pool = &member.part;
        let waits = self.view.now().saturating_sub(pool.stuck_since.get());
        !pool.waiters.borrow().is_empty() && waits > nanos(self.limits().failfast_after)
    }

    /// The newest idle connection on which nothing happened.
    fn pop(&self, member: &Rc<Member<Pool<C>>>, now: u64) -> Option<Kept<C>> {
        let pool = &member.part;
        loop {
            let mut kept = pool.idle.borrow_mut().pop()?;
            let idle = now.saturating_sub(kept.idle_since);
            if idle >= pool.learned.borrow().lent_until() {
                // It stays until the backend ends it, so that learning goes on. The others are
                // older.
                pool.idle.borrow_mut().push(kept);
                return None;
            }
            let is_warm = pool.idle.borrow().len() < self.limits().warm;
            if now >= kept.old_at || idle >= nanos(self.limits().idle_timeout) && !is_warm {
                continue;
            }
            match kept.connection.poll_idle(&mut Context::from_waker(Waker::noop())) {
                Poll::Pending => {
                    kept.idle = None;
                    return Some(kept);
                }
                Poll::Ready(happened) => self.note_end(member, happened, idle),
            }
        }
    }

    /// Counts what ended an idle connection, and learns from it.
    fn note_end(&self, member: &Rc<Member<Pool<C>>>, happened: IdleEvent, idle: u64) {
        match happened {
            IdleEvent::Ended => member.part.learned.borrow_mut().ended_after(idle, self.view.now()),
            IdleEvent::Stray => {
                Counts::add(&member.state.counts.stray, 1);
                let now = self.view.now();
                if now.saturating_sub(self.warned_at.get()) < WARNS_EACH {
                    return;
                }
                self.warned_at.set(now);
                let (upstream, name) = (self.view.upstream.name(), member.state.backend.name());
                tracing::warn!("upstream {upstream}: {name} sent what no question asked for; closed");
            }
        }
    }

    /// Has connections made for calls that wait, as far as the limits go.
    fn connect_more(self: &Rc<Pools<C>>, member: &Rc<Member<Pool<C>>>) {
        let (pool, limits) = (&member.part, self.limits());
        while pool.connecting.get() < limits.connecting_max.min(pool.waiters.borrow().len()) {
            if pool.open.get() >= limits.connections_max {
                // There are idle ones while calls wait only if they are no longer lent.
                let oldest = {
                    let mut idle = pool.idle.borrow_mut();
                    (!idle.is_empty()).then(|| idle.remove(0))
                };
                let Some(oldest) = oldest else { return };
                drop(oldest);
            }
            self.connect_one(member);
        }
    }

    /// Has connections made before calls need them.
    fn warm(self: &Rc<Pools<C>>) {
        let limits = self.limits();
        let wanted = limits.warm.min(limits.idle_max).min(limits.connections_max);
        if wanted == 0 {
            return;
        }
        for member in self.view.members() {
            let (pool, is_usable) = (&member.part, self.view.is_usable(&member));
            while is_usable
                && !self.keeps_none(&member)
                && pool.open.get() < wanted
                && pool.connecting.get() < limits.connecting_max
            {
                self.connect_one(&member);
            }
        }
    }

    fn connect_one(self: &Rc<Pools<C>>, member: &Rc<Member<Pool<C>>>) {
        let pool = &member.part;
        let (open, connecting) = (Counted::new(&pool.open), Counted::new(&pool.connecting));
        let made = (self.connect)(member.clone());
        let (pools, member) = (self.clone(), member.clone());
        let attempt = Attempt { pools, member, counted: Some((open, connecting)) };
        self.view.shard.spawn(async move {
            let made = made.await;
            attempt.end(made);
        });
    }

    fn add(self: &Rc<Pools<C>>, member: &Rc<Member<Pool<C>>>, connection: C, open: Counted) {
        let now = self.view.now();
        let age = nanos(self.limits().age_max);
        // Those made together do not end together.
        let age = (age / 10 * 9).saturating_add(part_of(age / 5, self.view.shard.random()));
        self.shelve(
            member,
            Kept {
                connection,
                open: Some(open),
                idle: None,
                old_at: now.saturating_add(age),
                uses: 0,
                was_idle: false,
                idle_since: now,
            },
        );
    }

    /// Gives a connection to the call that waits for the longest, or keeps it.
    fn shelve(self: &Rc<Pools<C>>, member: &Rc<Member<Pool<C>>>, mut kept: Kept<C>) {
        let pool = &member.part;
        let waiter = pool.waiters.borrow_mut().pop_front();
        if let Some(waiter) = waiter {
            pool.stuck_since.set(self.view.now());
            return waiter.give(Ok(kept));
        }
        if self.keeps_none(member) {
            return;
        }
        // Its waker changes only when the keeper is polled.
        let keeper = self.keeper.borrow();
        let happened = kept.connection.poll_idle(&mut Context::from_waker(&keeper));
        drop(keeper);
        match happened {
            Poll::Pending => {}
            // A backend that ends each connection behind its answer teaches nothing.
            Poll::Ready(IdleEvent::Ended) if kept.uses > 0 => return,
            Poll::Ready(happened) => return self.note_end(member, happened, 0),
        }
        (kept.was_idle, kept.idle) = (true, Some(Counted::new(&self.idle)));
        let mut idle = pool.idle.borrow_mut();
        idle.push(kept);
        let oldest = (idle.len() > self.limits().idle_max).then(|| idle.remove(0));
        drop(idle);
        drop(oldest);
        self.bound_idle();
    }

    /// Closes what is idle for the longest, over the bound of all backends together.
    fn bound_idle(&self) {
        while self.idle.get() > self.limits().idle_total_max {
            let since = |member: &Member<Pool<C>>| {
                member.part.idle.borrow().first().map_or(u64::MAX, |kept| kept.idle_since)
            };
            let Some(member) = self.view.least_by(since) else { return };
            let oldest = {
                let mut idle = member.part.idle.borrow_mut();
                (!idle.is_empty()).then(|| idle.remove(0))
            };
            // None is left of those that are asked: the others are closed already.
            if oldest.is_none() {
                return;
            }
        }
    }

    /// True if connections to this backend are no longer kept.
    fn keeps_none(&self, member: &Member<Pool<C>>) -> bool {
        let state = &member.state;
        self.view.shard.is_stopping() || state.is_gone.load(Relaxed) || state.is_drained.load(Relaxed)
    }
}

/// A connection that is being made. Its drop ends the attempt: what makes a connection is user
/// code, and may panic.
struct Attempt<C: Connection> {
    pools: Rc<Pools<C>>,
    member: Rc<Member<Pool<C>>>,
    /// Among those that are open, and those that are being made.
    counted: Option<(Counted, Counted)>,
}

impl<C: Connection> Attempt<C> {
    fn end(mut self, made: io::Result<C>) {
        self.finish(made);
    }

    fn finish(&mut self, made: io::Result<C>) {
        let Some((open, connecting)) = self.counted.take() else { return };
        drop(connecting);
        let (pools, member) = (&self.pools, &self.member);
        match made {
            Ok(connection) => {
                member.part.stuck_since.set(pools.view.now());
                pools.add(member, connection, open);
            }
            Err(error) => {
                drop(open);
                let waiter = member.part.waiters.borrow_mut().pop_front();
                match waiter {
                    Some(waiter) => waiter.give(Err(error)),
                    // Those that waited gave up before it failed.
                    None => pools.view.blame(member, &error),
                }
            }
        }
        pools.connect_more(member);
    }
}

impl<C: Connection> Drop for Attempt<C> {
    fn drop(&mut self) {
        // With the shard all ends.
        if std::thread::panicking() {
            self.finish(Err(io::Error::other("what sets a connection up panicked")));
        }
    }
}

/// A connection that a call uses. Its drop closes it: only [`give_back`](Lent::give_back) keeps it.
pub(crate) struct Lent<C: Connection> {
    kept: Option<Kept<C>>,
    pools: Rc<Pools<C>>,
    member: Rc<Member<Pool<C>>>,
}

impl<C: Connection> Lent<C> {
    pub(crate) fn connection(&self) -> &C {
        &self.kept.as_ref().expect("it is there until it is given back").connection
    }

    pub(crate) fn connection_mut(&mut self) -> &mut C {
        &mut self.kept.as_mut().expect("it is there until it is given back").connection
    }

    /// True if it was there before this call.
    pub(crate) fn is_reused(&self) -> bool {
        self.kept.as_ref().is_some_and(|kept| kept.was_idle || kept.uses > 0)
    }

    /// Takes it out of the pool, whose place another connection may have.
    pub(crate) fn detach(&mut self) {
        let open = self.kept.as_mut().and_then(|kept| kept.open.take());
        drop(open);
        if !self.member.part.waiters.borrow().is_empty() {
            self.pools.connect_more(&self.member);
        }
    }

    /// Gives it back for the next call, if nothing is left on it: what is may be the answer to
    /// another question.
    pub(crate) fn give_back(mut self, now: u64) {
        let Some(mut kept) = self.kept.take().filter(|kept| kept.open.is_some()) else { return };
        let (pools, member) = (&self.pools, &self.member);
        kept.uses += 1;
        kept.idle_since = now;
        let is_over = now >= kept.old_at || kept.uses >= pools.limits().uses_max;
        if !is_over && member.part.waiters.borrow().is_empty() {
            return pools.shelve(member, kept);
        }
        match kept.connection.poll_idle(&mut Context::from_waker(Waker::noop())) {
            Poll::Pending if !is_over => pools.shelve(member, kept),
            Poll::Ready(IdleEvent::Stray) => pools.note_end(member, IdleEvent::Stray, 0),
            Poll::Ready(IdleEvent::Ended) | Poll::Pending => {}
        }
    }
}

impl<C: Connection> Drop for Lent<C> {
    fn drop(&mut self) {
        drop(self.kept.take());
        if !self.member.part.waiters.borrow().is_empty() {
            self.pools.connect_more(&self.member);
        }
    }
}
