//! The choice of a connection for a question, and further tries.

use std::cell::{Cell, RefCell};
use std::error::Error;
use std::fmt;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ringserve_server::framing::Framing;
use ringserve_server::net::{Framed, is_local_failure};
use ringserve_server::{Frame, Shard, Stream};

use super::keeper;
use super::line::{Ages, Id, Line, Over};
use super::slots::{End, Fate, Matcher};
use crate::backend::Counts;
use crate::clients::hedged::{Visits, hedged};
use crate::clients::request::Request;
use crate::connect::connect_counted;
use crate::error::UpstreamError;
use crate::health;
use crate::names;
use crate::policy::backoff;
use crate::policy::keep_alive::KeepAlive;
use crate::policy::part_of;
use crate::pool::nanos;
use crate::upstream::Upstream;
use crate::view::{Choice, Member, Part, View};

/// Connections on which a question was not sent because they had ended, until it counts as lost.
const UNSENT_MAX: u32 = 8;

/// Questions on each connection of a backend before another one is made.
const SATURATED: usize = 32;

/// Questions on a connection, with those that were given up, unless it is set.
const IN_FLIGHT_MAX: usize = 1024;

/// Connections of a shard to a backend, unless it is set.
const CONNECTIONS_MAX: usize = 4;

/// Exchanges what a protocol wants first on a new connection.
type Setup<F> = dyn for<'c> Fn(&'c mut Framed<F>) -> Pin<Box<dyn Future<Output = io::Result<()>> + 'c>>;

/// Makes a question of an id and a payload.
pub(crate) type Write = Rc<dyn Fn(u64, &[u8]) -> Vec<u8>>;

/// The connections to a backend.
pub(crate) struct Lines<F: Framing> {
    all: RefCell<Vec<Rc<Line<F>>>>,
    /// The attempt that calls wait for.
    attempt: RefCell<Option<Rc<Attempt>>>,
    learned: RefCell<KeepAlive>,
}

impl<F: Framing> Part for Lines<F> {
    fn leaves(&self) {
        self.all.borrow().iter().for_each(|line| line.retire());
    }

    fn connections(&self) -> (u64, u64) {
        let all = self.all.borrow();
        let idle = all.iter().filter(|line| line.in_flight() == 0).count();
        (all.len() as u64, idle as u64)
    }
}

/// An attempt to connect, for all calls that wait for it.
#[derive(Default)]
struct Attempt {
    result: RefCell<Option<Result<(), Arc<io::Error>>>>,
    wakers: RefCell<Vec<Waker>>,
    is_blamed: Cell<bool>,
}

impl Attempt {
    fn poll(&self, task: &mut Context<'_>) -> Poll<Result<(), Arc<io::Error>>> {
        if let Some(result) = &*self.result.borrow() {
            return Poll::Ready(result.clone());
        }
        let waker = task.waker().clone();
        let mut wakers = self.wakers.borrow_mut();
        if !wakers.iter().any(|known| known.will_wake(&waker)) {
            wakers.push(waker);
        }
        Poll::Pending
    }

    fn end(&self, result: Result<(), Arc<io::Error>>) {
        *self.result.borrow_mut() = Some(result);
        let wakers = self.wakers.take();
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// The error of an attempt, for one of several calls.
struct SharedError(Arc<io::Error>);

impl fmt::Display for SharedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

ringserve_buf::debug_is_display!(SharedError);

impl Error for SharedError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&*self.0)
    }
}

/// A client whose calls share connections.
pub(crate) struct Asker<F: Framing + Clone> {
    view: Rc<View<Lines<F>>>,
    framing: F,
    make_matching: Box<dyn Fn() -> Matcher>,
    id: Id,
    write: Write,
    pub(crate) frame_bytes_max: Cell<Option<usize>>,
    pub(crate) in_flight_max: Cell<usize>,
    pub(crate) connections_max: Cell<usize>,
    setup: RefCell<Option<Rc<Setup<F>>>>,
}

impl<F: Framing + Clone> Asker<F> {
    pub(crate) fn new(
        upstream: &Upstream,
        shard: &Shard,
        framing: F,
        make_matching: impl Fn() -> Matcher + 'static,
        id: Id,
        write: Write,
    ) -> Rc<Asker<F>> {
        let make_part =
            || Lines { all: RefCell::default(), attempt: RefCell::default(), learned: RefCell::default() };
        let view = Rc::new(View::new(upstream, shard, make_part));
        health::begin(upstream, shard, &view);
        names::begin(upstream, shard, &view);
        keeper::begin(&view, Lines::look);
        Rc::new(Asker {
            view,
            framing,
            make_matching: Box::new(make_matching),
            id,
            write,
            frame_bytes_max: Cell::default(),
            in_flight_max: Cell::new(IN_FLIGHT_MAX),
            connections_max: Cell::new(CONNECTIONS_MAX),
            setup: RefCell::default(),
        })
    }

    pub(crate) fn upstream(&self) -> &Upstream {
        &self.view.upstream
    }

    pub(crate) fn set_setup(&self, setup: impl AsyncFn(&mut Framed<F>) -> io::Result<()> + 'static) {
        let setup = Rc::new(setup);
        *self.setup.borrow_mut() = Some(Rc::new(move |connection| {
            let setup = setup.clone();
            Box::pin(async move { setup(connection).await })
        }));
    }

    /// Asks, with all tries.
    pub(crate) async fn ask(self: &Rc<Asker<F>>, request: Request<'_>) -> Result<Frame, UpstreamError> {
        let view = &self.view;
        view.count_request();
        let time = request.timeout.unwrap_or(view.upstream.settings().answer_timeout);
        let until = view.now().saturating_add(nanos(time));
        view.is_resolved(until).await;
        let Some(delay) = view.hedge_delay().filter(|_| request.is_idempotent) else {
            return self.ask_by(request, Tries::new(request.key), (time, until)).await;
        };
        let visited = Rc::new(Visits::default());
        let tries = Tries { visited: Some(visited.clone()), ..Tries::new(request.key) };
        let first = self.ask_by(request, tries, (time, until));
        let second = async {
            let tries = Tries { tried: visited.all(), is_beside: true, ..Tries::new(request.key) };
            self.ask_by(request, tries, (time, until)).await
        };
        hedged(view, delay, first, second).await
    }

    /// Asks within a time, until it is over, with all tries.
    async fn ask_by(
        self: &Rc<Asker<F>>,
        request: Request<'_>,
        mut tries: Tries<F>,
        (time, until): (Duration, u64),
    ) -> Result<Frame, UpstreamError> {
        let view = &self.view;
        let mut is_retry = false;
        loop {
            let Some(mut choice) = tries.choose(view) else {
                if !tries.is_beside {
                    view.upstream.state().count_refused();
                }
                return Err(tries.last.unwrap_or(UpstreamError::NoBackend));
            };
            if std::mem::replace(&mut is_retry, true) {
                view.upstream.state().count_retry();
            }
            if let Some(visited) = &tries.visited {
                visited.add(choice.member());
            }
            let left = Duration::from_nanos(until.saturating_sub(choice.begun()));
            let tried = view.shard.timeout(left, self.attempt(&choice, request.payload, until)).await;
            let tried = tried.unwrap_or(Err(Broken::TimedOut));
            let broken = match tried {
                Ok(answer) => {
                    choice.succeeded();
                    return Ok(answer);
                }
                Err(broken) => broken,
            };
            let is_to_blame = until.saturating_sub(choice.begun()) >= nanos(time) / 2;
            match broken.is_failure(is_to_blame) {
                true => choice.failed(),
                false => choice.says_nothing(),
            }
            broken.count(&choice);
            let wait = tries.next(view, choice.member(), broken, request.is_idempotent)?;
            drop(choice);
            if wait > 0 {
                view.shard.sleep(Duration::from_nanos(wait)).await;
            }
        }
    }

    async fn attempt(
        self: &Rc<Asker<F>>,
        choice: &Choice<Lines<F>>,
        payload: &[u8],
        until: u64,
    ) -> Result<Frame, Broken> {
        let line = self.line(choice.member()).await?;
        let asked_at = self.view.now();
        let place = line.ask(|id| (self.write)(id, payload)).map_err(Broken::Unfit)?;
        let mut asked = Question { line, place, asked_at, until, is_over: false };
        match poll_fn(|task| asked.line.poll(asked.place, task)).await {
            Fate::Answered(answer) => {
                asked.is_over = true;
                Ok(answer)
            }
            Fate::Ended(end) => {
                asked.is_over = true;
                let is_stale = asked.line.is_unproven();
                let may_blame = end == End::Malformed || (end == End::Lost && !is_stale);
                Err(Broken::Ended { end, is_stale, is_failure: may_blame && asked.line.is_first_blamed() })
            }
            Fate::Awaited(_) => Err(Broken::Ended { end: End::Aborted, is_stale: false, is_failure: false }),
        }
    }

    /// The connection to a backend with the fewest questions, or a new one.
    async fn line(self: &Rc<Asker<F>>, member: &Rc<Member<Lines<F>>>) -> Result<Rc<Line<F>>, Broken> {
        // An attempt whose connection others have filled meanwhile is followed by another one.
        for _ in 0..=self.connections_max.get() {
            if let Some(line) = self.usable(member) {
                return Ok(line);
            }
            let attempt = self.begin_attempt(member).ok_or(Broken::Full)?;
            poll_fn(|task| attempt.poll(task)).await.map_err(|error| {
                let is_first = !attempt.is_blamed.replace(true);
                Broken::NotConnected { error, is_first }
            })?;
        }
        Err(Broken::Full)
    }

    fn usable(self: &Rc<Asker<F>>, member: &Rc<Member<Lines<F>>>) -> Option<Rc<Line<F>>> {
        let (now, lines) = (self.view.now(), &member.part);
        let lent_until = lines.learned.borrow().lent_until();
        let most = self.in_flight_max.get();
        // A connection that is idle for longer is about to be ended by the backend.
        let is_fresh = |line: &Rc<Line<F>>| line.idle(now).is_none_or(|idle| idle < lent_until);
        let all = lines.all.borrow();
        let free = all.iter().filter(|line| line.has_room(most) && is_fresh(line));
        let line = free.min_by_key(|line| line.in_flight()).cloned();
        drop(all);
        if line.as_ref().is_some_and(|line| line.in_flight() >= SATURATED) {
            // For later questions: this one need not wait.
            let _ = self.begin_attempt(member);
        }
        line
    }

    /// Connects, if there is room for another connection and no attempt is under way.
    fn begin_attempt(self: &Rc<Asker<F>>, member: &Rc<Member<Lines<F>>>) -> Option<Rc<Attempt>> {
        let lines = &member.part;
        if let Some(attempt) = &*lines.attempt.borrow() {
            return Some(attempt.clone());
        }
        if lines.counted() >= self.connections_max.get() && !lines.retire_stalest(self.view.now()) {
            return None;
        }
        let attempt = Rc::new(Attempt::default());
        *lines.attempt.borrow_mut() = Some(attempt.clone());
        let (this, connecting) =
            (self.clone(), AttemptGuard { member: member.clone(), attempt: attempt.clone() });
        self.view.shard.spawn(async move {
            let connected = this.connect(&connecting.member).await;
            let connected = connected.map(|framed| this.add(&connecting.member, framed));
            connecting.end(connected);
        });
        Some(attempt)
    }

    async fn connect(&self, member: &Member<Lines<F>>) -> io::Result<Framed<F>> {
        let (framing, bytes_max) = (self.framing.clone(), self.frame_bytes_max.get());
        let setup = self.setup.borrow().clone();
        let set_up = async move |stream: Stream| {
            let mut framed = stream.framed(framing);
            if let Some(bytes) = bytes_max {
                framed = framed.frame_bytes_max(bytes);
            }
            if let Some(setup) = setup {
                setup(&mut framed).await?;
            }
            Ok(framed)
        };
        let settings = self.view.upstream.settings();
        connect_counted(&self.view.shard, settings, &member.state, None, set_up).await
    }

    fn add(&self, member: &Rc<Member<Lines<F>>>, framed: Framed<F>) {
        let (view, settings) = (&self.view, self.view.upstream.settings());
        let age = nanos(settings.pool.age_max);
        // Those made together do not end together.
        let age = (age / 10 * 9).saturating_add(part_of(age / 5, view.shard.random()));
        let ages = Ages {
            answer: nanos(settings.answer_timeout),
            idle: nanos(settings.pool.idle_timeout),
            old_at: view.now().saturating_add(age),
        };
        let (weak, on) = (Rc::downgrade(member), view.shard.clone());
        let line = Line::begin(
            &view.shard,
            &member.state,
            framed,
            (self.make_matching)(),
            self.id.clone(),
            ages,
            move |line, over| {
                let Some(member) = weak.upgrade() else { return };
                member.part.all.borrow_mut().retain(|other| !Rc::ptr_eq(other, line));
                member.part.ended(over, on.now().as_nanos(), &member.state.counts);
            },
        );
        if member.state.is_gone.load(Relaxed) || line.is_over() {
            return line.retire();
        }
        member.part.all.borrow_mut().push(line);
    }
}

impl<F: Framing> Lines<F> {
    /// Connections that take further questions.
    fn counted(&self) -> usize {
        self.all.borrow().iter().filter(|line| line.has_room(usize::MAX)).count()
    }

    /// Makes room for another connection, where one is idle for longer than it may be to be lent.
    /// False if there is none.
    fn retire_stalest(&self, now: u64) -> bool {
        let lent_until = self.learned.borrow().lent_until();
        let all = self.all.borrow();
        let idle = all.iter().filter(|line| line.has_room(usize::MAX));
        let idle = idle.filter_map(|line| Some((line.idle(now)?, line)));
        let stalest = idle.filter(|(idle, _)| *idle >= lent_until).max_by_key(|(idle, _)| *idle);
        stalest.map(|(_, line)| line.retire()).is_some()
    }

    /// Notes how long idle connections are kept.
    fn look(&self, now: u64) {
        for line in self.all.borrow().iter() {
            if let Some(idle) = line.idle(now) {
                self.learned.borrow_mut().is_kept_for(idle);
            }
        }
    }

    fn ended(&self, over: Over, now: u64, counts: &Counts) {
        if over.is_stray {
            Counts::add(&counts.stray, 1);
        }
        if let Some(idle) = over.idle {
            self.learned.borrow_mut().ended_after(idle, now);
        }
    }
}

/// The connections end with their client, behind the answers that are under way.
impl<F: Framing + Clone> Drop for Asker<F> {
    fn drop(&mut self) {
        for member in self.view.members() {
            member.part.leaves();
        }
    }
}

/// An attempt under way. Its drop ends it: what makes a connection is user code, and may panic.
struct AttemptGuard<F: Framing> {
    member: Rc<Member<Lines<F>>>,
    attempt: Rc<Attempt>,
}

impl<F: Framing> AttemptGuard<F> {
    fn end(&self, connected: io::Result<()>) {
        let is_over = self.attempt.result.borrow().is_some();
        if !is_over {
            self.member.part.attempt.take();
            self.attempt.end(connected.map_err(Arc::new));
        }
    }
}

impl<F: Framing> Drop for AttemptGuard<F> {
    fn drop(&mut self) {
        self.end(Err(io::Error::other("what sets a connection up panicked")));
    }
}

/// A question under way. Its drop gives it up.
struct Question<F: Framing> {
    line: Rc<Line<F>>,
    place: u32,
    asked_at: u64,
    until: u64,
    is_over: bool,
}

impl<F: Framing> Drop for Question<F> {
    fn drop(&mut self) {
        if !self.is_over {
            self.line.abandon(self.place, self.asked_at, self.until);
        }
    }
}

/// Why a try led to no answer.
enum Broken {
    NotConnected {
        error: Arc<io::Error>,
        /// It is the first call that learns of it.
        is_first: bool,
    },
    /// All connections have as many questions as they may.
    Full,
    /// The question has no frame.
    Unfit(io::Error),
    TimedOut,
    Ended {
        end: End,
        /// The connection may have been ended before the question came.
        is_stale: bool,
        is_failure: bool,
    },
}

impl Broken {
    /// Whether it counts against the backend: what happened once counts once, whatever calls it
    /// ended.
    fn is_failure(&self, is_to_blame: bool) -> bool {
        match self {
            Broken::NotConnected { error, is_first } => *is_first && !is_local_failure(error),
            Broken::TimedOut => is_to_blame,
            Broken::Ended { is_failure, .. } => *is_failure,
            Broken::Full | Broken::Unfit(_) => false,
        }
    }

    fn count<F: Framing>(&self, choice: &Choice<Lines<F>>) {
        let counts = &choice.state().counts;
        match self {
            Broken::Ended { end: End::Unsent, .. } => Counts::add(&counts.unsent, 1),
            Broken::Ended { end: End::Lost | End::Aborted, .. } => Counts::add(&counts.lost, 1),
            _ => {}
        }
    }
}

/// The tries of a question.
struct Tries<F: Framing> {
    /// Whose backend is asked, where it may be.
    key: Option<u64>,
    tried: Vec<Rc<Member<Lines<F>>>>,
    /// The backends where the question is or was, for a second one beside it; this is one.
    visited: Option<Rc<Visits<Lines<F>>>>,
    is_beside: bool,
    /// A backend where a connection was dead that had been used before: another one may do, if no
    /// other backend is left.
    stale: Option<Rc<Member<Lines<F>>>>,
    /// Those that may have reached a backend.
    sent: u32,
    unsent: u32,
    last: Option<UpstreamError>,
}

impl<F: Framing> Tries<F> {
    fn new(key: Option<u64>) -> Tries<F> {
        Tries {
            key,
            tried: Vec::new(),
            visited: None,
            is_beside: false,
            stale: None,
            sent: 0,
            unsent: 0,
            last: None,
        }
    }

    /// A backend where this question was not, or else the one whose connection was dead.
    fn choose(&mut self, view: &Rc<View<Lines<F>>>) -> Option<Choice<Lines<F>>> {
        let choice = match self.key {
            Some(key) => view.choose_by_key(view.now(), key, &self.tried, None),
            None => view.choose(&self.tried, None),
        };
        if choice.is_some() {
            return choice;
        }
        let stale = self.stale.take()?;
        self.tried.retain(|member| !Rc::ptr_eq(member, &stale));
        view.choose(&self.tried, None)
    }

    /// Decides whether there is another try, and after how many nanoseconds.
    fn next(
        &mut self,
        view: &View<Lines<F>>,
        member: &Rc<Member<Lines<F>>>,
        broken: Broken,
        is_idempotent: bool,
    ) -> Result<u64, UpstreamError> {
        let is_stale = matches!(broken, Broken::Ended { is_stale: true, .. });
        let error = match broken {
            Broken::NotConnected { error, .. } => {
                let is_ours = is_local_failure(&error);
                let error = UpstreamError::Failed(io::Error::new(error.kind(), SharedError(error)));
                if is_ours {
                    return Err(error);
                }
                return self.elsewhere(member, error);
            }
            Broken::Full => return self.elsewhere(member, UpstreamError::Full),
            Broken::Unfit(error) => return Err(UpstreamError::Failed(error)),
            Broken::TimedOut => return Err(UpstreamError::TimedOut),
            Broken::Ended { end: End::Unsent, .. } => {
                self.unsent += 1;
                return if self.unsent > UNSENT_MAX { Err(UpstreamError::Lost) } else { Ok(0) };
            }
            Broken::Ended { end: End::Malformed, .. } => {
                let why = "the backend sent what is no answer to a question";
                UpstreamError::Failed(io::Error::new(io::ErrorKind::InvalidData, why))
            }
            Broken::Ended { .. } => UpstreamError::Lost,
        };
        self.sent += 1;
        let may = is_idempotent && self.sent < view.upstream.settings().retry.tries_max;
        if !may || !view.upstream.state().may_retry(view.now()) {
            return Err(error);
        }
        self.stale = is_stale.then(|| member.clone());
        self.tried.push(member.clone());
        self.last = Some(error);
        Ok(backoff::before_try(self.sent, view.shard.random()))
    }

    /// Goes on at another backend, free of charge: nothing was sent.
    fn elsewhere(
        &mut self,
        member: &Rc<Member<Lines<F>>>,
        error: UpstreamError,
    ) -> Result<u64, UpstreamError> {
        self.tried.push(member.clone());
        self.last = Some(error);
        Ok(0)
    }
}
