//! The start of a server, from the first shard's thread to the last service: the progress of each
//! shard's factories, the futures that the start waits for, and the events that end the wait.
//!
//! ```text
//!            the factories of all          the services of all
//!            shards returned               shards are there
//!   CloseCx ──────────────────────▶ Open ──────────────────────▶ Serving
//!     │                        futures of factories                ▲
//!     └── no service has to be waited for ─────────────────────────┘
//! ```
//!
//! A failure and the order to stop open the gate as well: each shard then finds that it has to end.

use std::any::Any;
use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use ringserve_base::clock::{Clock, Deadline};
use ringserve_base::lines::warn;
use ringserve_core::Time;
use ringserve_drivers::guarded;

use crate::error::Error;

/// A start that takes longer is explained in the log, once: by then an operator looks there.
const EXPLAINED_AFTER: Duration = Duration::from_secs(10);

/// The most services and shards that the line names. Further ones are counted.
const EXPLAINED_MAX: usize = 8;

/// A wait that outlasts any start.
const LONG: Duration = Duration::from_secs(3600);

/// A future that ends a start early, if the program gave one.
pub(crate) type StartAbort<'a> = Option<Pin<&'a mut dyn Future<Output = ()>>>;

/// The wait for all shards.
pub(crate) struct StartWait {
    shared: Arc<Shared>,
    /// Set once the shards are known.
    terms: Option<Terms>,
    explained: bool,
}

/// The terms of a start.
struct Terms {
    clock: Clock,
    begun: Time,
    timeout: Option<Duration>,
    /// The names of the services, in their order.
    names: Vec<String>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    shards: Vec<Progress>,
    gate: Gate,
    /// The first error.
    failed: Option<Error>,
    /// True if a shard reported something new.
    is_new: bool,
}

/// The progress of the start. Shards are held back at first, so that the first future finds every
/// factory done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Gate {
    /// Factories are being called.
    #[default]
    Closed,
    /// Some services are pending.
    Open,
    /// All services are there.
    Serving,
}

/// The progress of one shard. Services are bits.
#[derive(Default)]
struct Progress {
    stage: Stage,
    called: u32,
    made: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    /// The shard's factories are being called.
    #[default]
    Calls,
    /// The factories returned, and some services are pending.
    Waits,
    /// All services of the shard are there.
    Ready,
    /// The shard has no services, and its thread ends.
    Failed,
}

/// One shard's side of the start.
#[derive(Clone)]
pub(crate) struct ShardStart {
    shard: usize,
    shared: Arc<Shared>,
}

/// Ends the wait from another thread.
pub(crate) struct Interrupter {
    shared: Arc<Shared>,
}

/// The next step of the start.
#[derive(Debug)]
pub(crate) enum StartState {
    /// All services are there. True if shards waited for that in their loops, from which they are
    /// to be woken.
    Ready(bool),
    /// The start failed.
    Failed(Error),
    /// Nothing to do until that time has passed, or something changed.
    Waits(Option<Duration>),
}

/// The failure of a start.
pub(crate) struct Ended {
    pub(crate) error: Error,
    /// By shard: true if its thread ends after the order to. A factory that blocks may never
    /// return.
    pub(crate) heard: Vec<bool>,
    /// The program's own future panicked.
    pub(crate) panic: Option<Box<dyn Any + Send>>,
}

impl StartWait {
    pub(crate) fn new() -> StartWait {
        StartWait { shared: Arc::default(), terms: None, explained: false }
    }

    /// Begins the start of shards with services of these names.
    pub(crate) fn begin(
        &mut self,
        shards: usize,
        clock: Clock,
        timeout: Option<Duration>,
        names: Vec<String>,
    ) {
        self.shared.state().shards.resize_with(shards, Progress::default);
        let begun = clock.now();
        self.terms = Some(Terms { clock, begun, timeout, names });
    }

    pub(crate) fn of_shard(&self, shard: usize) -> ShardStart {
        ShardStart { shard, shared: self.shared.clone() }
    }

    pub(crate) fn interrupter(&self) -> Interrupter {
        Interrupter { shared: self.shared.clone() }
    }

    /// The next step now. Not to be called again after a failure.
    pub(crate) fn poll_start(&mut self) -> StartState {
        let mut state = self.shared.state();
        let all = |state: &State, is: fn(Stage) -> bool| state.shards.iter().all(|shard| is(shard.stage));
        if state.failed.is_none() && all(&state, |stage| stage == Stage::Ready) {
            let waited = state.gate == Gate::Open;
            self.shared.set_gate(&mut state, Gate::Serving);
            return StartState::Ready(waited);
        }
        let (mut next, mut waits_for) = (None, None);
        if state.failed.is_none()
            && let Some(terms) = &self.terms
        {
            let passed = terms.clock.now() - terms.begun;
            if terms.timeout.is_some_and(|timeout| passed >= timeout) {
                state.failed = Some(terms.timed_out(&state));
            } else if !self.explained && passed >= EXPLAINED_AFTER {
                self.explained = true;
                waits_for = Some(terms.waits_for(&state));
            }
            let explained = (!self.explained).then_some(EXPLAINED_AFTER);
            next = terms.timeout.into_iter().chain(explained).min().map(|time| time.saturating_sub(passed));
        }
        if let Some(error) = state.failed.take() {
            return StartState::Failed(error);
        }
        if state.gate == Gate::Closed && all(&state, |stage| stage != Stage::Calls) {
            self.shared.set_gate(&mut state, Gate::Open);
        }
        drop(state);
        if let Some(waits_for) = waits_for {
            // A subscriber may wake the future that ends the start, which takes the lock.
            guarded(|| warn!("still starting after {EXPLAINED_AFTER:?}: waiting for {waits_for}"));
        }
        StartState::Waits(next)
    }

    /// Releases the shards that are held back after a failed start: every shard has the order to
    /// end.
    pub(crate) fn give_up(&self) {
        self.shared.set_gate(&mut self.shared.state(), Gate::Open);
    }

    /// The pending factories, as text.
    #[cfg(feature = "testing")]
    pub(crate) fn waits_for(&self) -> String {
        self.terms.as_ref().map_or_else(String::new, |terms| terms.waits_for(&self.shared.state()))
    }

    /// Waits until every shard is ready; polls `until` meanwhile, once only futures are pending.
    /// True if shards wait in their loops, from which they are to be woken.
    ///
    /// # Errors
    /// The error of the first shard that fails, [`Error::StartTimeout`], or [`Error::Interrupted`].
    pub(crate) fn wait(&mut self, mut until: StartAbort<'_>) -> Result<bool, Box<Ended>> {
        let waker = Waker::from(self.shared.clone());
        let mut panic = None;
        loop {
            let next = match self.poll_start() {
                StartState::Ready(waited) => return Ok(waited),
                StartState::Failed(error) => {
                    let state = self.shared.state();
                    let heard = state.shards.iter().map(|shard| shard.stage != Stage::Calls).collect();
                    return Err(Box::new(Ended { error, heard, panic }));
                }
                StartState::Waits(next) => next,
            };
            if self.shared.state().gate == Gate::Open
                && let Some(until) = &mut until
            {
                let mut task = Context::from_waker(&waker);
                match catch_unwind(AssertUnwindSafe(|| until.as_mut().poll(&mut task))) {
                    Ok(Poll::Pending) => {}
                    Ok(Poll::Ready(())) => self.shared.fail(Error::Interrupted),
                    Err(payload) => {
                        panic = Some(payload);
                        self.shared.fail(Error::Interrupted);
                    }
                }
            }
            let (state, deadline) = (self.shared.state(), Deadline::within(next.unwrap_or(LONG)));
            let mut state = deadline.wait_while(&self.shared.changed, state, |state| !state.is_new);
            state.is_new = false;
        }
    }
}

impl Terms {
    /// Each pending service with its shard; of a shard that still calls factories, the one that is
    /// being called. As long as a shard calls factories, the futures of others are held back.
    fn waiting<'a>(&'a self, state: &'a State) -> impl Iterator<Item = (usize, Option<&'a String>)> {
        state.shards.iter().enumerate().flat_map(|(shard, progress)| {
            let not_made = match progress.stage {
                Stage::Waits if state.gate != Gate::Closed => progress.called & !progress.made,
                Stage::Calls => progress.called.checked_ilog2().map_or(0, |last| 1 << last),
                Stage::Waits | Stage::Ready | Stage::Failed => 0,
            };
            let services = self.names.iter().enumerate().filter(move |(n, _)| not_made >> n & 1 == 1);
            // A shard makes its driver before its first factory.
            let none = (progress.stage == Stage::Calls && not_made == 0).then_some((shard, None));
            services.map(move |(_, name)| (shard, Some(name))).chain(none)
        })
    }

    fn waits_for(&self, state: &State) -> String {
        let mut text = String::new();
        for (n, (shard, name)) in self.waiting(state).enumerate().take(EXPLAINED_MAX) {
            let comma = if n > 0 { ", " } else { "" };
            let _ = match name {
                Some(name) => write!(text, "{comma}the factory of {name} on shard {shard}"),
                None => write!(text, "{comma}shard {shard}"),
            };
        }
        let rest = self.waiting(state).skip(EXPLAINED_MAX).count();
        if rest > 0 {
            let _ = write!(text, " and {rest} more");
        }
        text
    }

    fn timed_out(&self, state: &State) -> Error {
        let (shard, name) = self.waiting(state).next().unwrap_or_default();
        let time = self.timeout.unwrap_or_default();
        Error::StartTimeout { shard, time }.of_service(name.filter(|_| self.names.len() > 1))
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn notify(&self, state: &mut State) {
        state.is_new = true;
        self.changed.notify_all();
    }

    fn set_gate(&self, state: &mut State, gate: Gate) {
        state.gate = state.gate.max(gate);
        self.changed.notify_all();
    }

    /// Fails the start, unless it ended before.
    fn fail(&self, error: Error) {
        let mut state = self.state();
        if state.gate != Gate::Serving && state.failed.is_none() {
            state.failed = Some(error);
        }
        self.notify(&mut state);
    }
}

/// As the waker of what may end a start.
impl Wake for Shared {
    fn wake(self: Arc<Self>) {
        self.notify(&mut self.state());
    }
}

impl ShardStart {
    fn progress(&self, set: impl FnOnce(&mut Progress)) {
        let mut state = self.shared.state();
        if let Some(progress) = state.shards.get_mut(self.shard) {
            set(progress);
        }
        self.shared.notify(&mut state);
    }

    /// The factory of this service is being called.
    pub(crate) fn calls(&self, service: usize) {
        self.progress(|progress| progress.called |= 1 << service);
    }

    /// This service is there.
    pub(crate) fn made(&self, service: usize) {
        self.progress(|progress| progress.made |= 1 << service);
    }

    /// The factories returned, and some services are pending.
    pub(crate) fn waits(&self) {
        self.progress(|progress| progress.stage = Stage::Waits);
    }

    /// All services are there.
    pub(crate) fn succeeded(&self) {
        self.progress(|progress| progress.stage = Stage::Ready);
    }

    /// The shard ends. Does nothing if every shard was ready before.
    pub(crate) fn failed(&self, error: Error) {
        self.progress(|progress| progress.stage = Stage::Failed);
        self.shared.fail(error);
    }

    /// The shard ends because one of its factories panicked.
    pub(crate) fn panicked(&self) {
        // It goes on through the shard's task, which logs its message.
        let message = "its message is in the log".to_owned();
        self.failed(Error::FactoryPanicked { shard: self.shard, message });
    }

    /// Holds the shard back until the factories of all shards returned, or the start failed.
    pub(crate) fn pass(&self) -> Gate {
        let mut state = self.shared.state();
        while state.gate == Gate::Closed {
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.gate
    }

    /// All services of all shards are there.
    pub(crate) fn is_over(&self) -> bool {
        self.shared.state().gate == Gate::Serving
    }
}

impl Interrupter {
    /// Interrupts the start, unless every shard is ready.
    pub(crate) fn interrupt(&self) {
        self.shared.fail(Error::Interrupted);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;

    /// A subscriber that wakes what may end a start, with each line.
    struct Wakes(Waker);

    impl Subscriber for Wakes {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, _: &Event<'_>) {
            self.0.wake_by_ref();
        }

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a look that hangs is to fail the test")]
    fn line_about_a_long_start_may_wake_what_ends_it() {
        let (says, hears) = mpsc::channel();
        thread::spawn(move || {
            let mut starting = StartWait::new();
            starting.begin(1, Clock::of_age(2 * EXPLAINED_AFTER), None, vec!["chat".to_owned()]);
            starting.terms.as_mut().unwrap().begun = Time::from_nanos(0);
            let wakes = Wakes(Waker::from(starting.shared.clone()));
            let look = tracing::subscriber::with_default(wakes, || starting.poll_start());
            let is_new = starting.shared.state().is_new;
            says.send((format!("{look:?}"), is_new)).unwrap();
        });
        let heard = hears.recv_timeout(Duration::from_secs(60)).expect("the look at the start returns");
        assert_eq!(heard, ("Waits(None)".to_owned(), true));
    }
}
