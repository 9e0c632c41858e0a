//! The start of a server, from the first shard's thread to the last service: what each shard says of its factories, what it
//! waits for, and what ends the wait.
//!
//! ```text
//!            the factories of all          the services of all
//!            shards returned               shards are there
//!   Closed ──────────────────────▶ Open ──────────────────────▶ Serving
//!     │                        futures of factories                ▲
//!     └── no service has to be waited for ─────────────────────────┘
//! ```
//!
//! A failure and the order to stop open the gate as well: then each shard finds that it was told to end.

use std::any::Any;
use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use ringserve_core::Time;
use tracing::warn;

use super::error::Error;
use crate::log::guarded;
use crate::shard::clock::{Clock, Deadline};

/// A start that takes longer is explained in the log, once: by then an operator looks there.
const EXPLAINED_AFTER: Duration = Duration::from_secs(10);

/// Services and shards that the line names. The rest is counted.
const EXPLAINED_MAX: usize = 8;

/// Longer than any start is left without a look.
const LONG: Duration = Duration::from_secs(3600);

/// What ends a start early, where the program says so.
pub(super) type Until<'a> = Option<Pin<&'a mut dyn Future<Output = ()>>>;

/// The wait for all shards.
pub(crate) struct Starting {
    shared: Arc<Shared>,
    /// Known once the shards are.
    terms: Option<Terms>,
    explained: bool,
}

/// What a start goes by.
struct Terms {
    clock: Clock,
    begun: Time,
    timeout: Option<Duration>,
    /// Of the services, in their order.
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
    /// The first one.
    failed: Option<Error>,
    /// Something is to be looked at.
    is_new: bool,
}

/// How far the start came. Shards are held back at first, so that the first future finds every factory done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Gate {
    /// Factories are being called.
    #[default]
    Closed,
    /// Some service has to be waited for.
    Open,
    /// All services are there.
    Serving,
}

/// One shard's. Services are bits.
#[derive(Default)]
struct Progress {
    stage: Stage,
    called: u32,
    made: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    /// Its factories are being called.
    #[default]
    Calls,
    /// Its factories returned, and some of its services are not there.
    Waits,
    /// Its services are there.
    Ready,
    /// It will have none, and its thread ends.
    Failed,
}

/// One shard's side of it.
#[derive(Clone)]
pub(crate) struct ShardStart {
    shard: usize,
    shared: Arc<Shared>,
}

/// Ends the wait from another thread.
pub(super) struct Interrupter {
    shared: Arc<Shared>,
}

/// How the start goes on.
#[derive(Debug)]
pub(crate) enum Look {
    /// All services are there. True if shards waited for that in their loops, from which they are to be roused.
    Ready(bool),
    /// It ended.
    Failed(Error),
    /// It is to be looked at again after that time, or once something changed.
    Waits(Option<Duration>),
}

/// Why a start ended.
pub(super) struct Ended {
    pub(super) error: Error,
    /// By shard: true if its thread ends once it is told to. A factory that blocks may never return.
    pub(super) heard: Vec<bool>,
    /// The program's own future panicked.
    pub(super) panic: Option<Box<dyn Any + Send>>,
}

impl Starting {
    pub(crate) fn new() -> Starting {
        Starting { shared: Arc::default(), terms: None, explained: false }
    }

    /// The shards are about to be made, with services of these names.
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

    pub(super) fn interrupter(&self) -> Interrupter {
        Interrupter { shared: self.shared.clone() }
    }

    /// How it goes on now. Not to be called again once it ended.
    pub(crate) fn look(&mut self) -> Look {
        let mut state = self.shared.state();
        let all = |state: &State, is: fn(Stage) -> bool| state.shards.iter().all(|shard| is(shard.stage));
        if state.failed.is_none() && all(&state, |stage| stage == Stage::Ready) {
            let waited = state.gate == Gate::Open;
            self.shared.set_gate(&mut state, Gate::Serving);
            return Look::Ready(waited);
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
            return Look::Failed(error);
        }
        if state.gate == Gate::Closed && all(&state, |stage| stage != Stage::Calls) {
            self.shared.set_gate(&mut state, Gate::Open);
        }
        drop(state);
        if let Some(waits_for) = waits_for {
            // A subscriber may wake what ends the start, which takes the lock.
            guarded(|| warn!("still starting after {EXPLAINED_AFTER:?}: waiting for {waits_for}"));
        }
        Look::Waits(next)
    }

    /// The start failed, and every shard was told to end: those that are held back go on to do so.
    pub(crate) fn give_up(&self) {
        self.shared.set_gate(&mut self.shared.state(), Gate::Open);
    }

    /// What it waits for, as a line of text.
    #[cfg(feature = "testing")]
    pub(crate) fn waits_for(&self) -> String {
        self.terms.as_ref().map_or_else(String::new, |terms| terms.waits_for(&self.shared.state()))
    }

    /// Waits until every shard is ready, and polls `until` meanwhile once there is nothing but futures to wait for. True if shards
    /// wait in their loops, from which they are to be roused.
    ///
    /// # Errors
    /// The first shard's that fails, [`Error::StartTimeout`], or [`Error::Interrupted`].
    pub(super) fn wait(&mut self, mut until: Until<'_>) -> Result<bool, Box<Ended>> {
        let waker = Waker::from(self.shared.clone());
        let mut panic = None;
        loop {
            let next = match self.look() {
                Look::Ready(waited) => return Ok(waited),
                Look::Failed(error) => {
                    let state = self.shared.state();
                    let heard = state.shards.iter().map(|shard| shard.stage != Stage::Calls).collect();
                    return Err(Box::new(Ended { error, heard, panic }));
                }
                Look::Waits(next) => next,
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
    /// Each service that is waited for, with its shard: of a shard that calls factories the one that is called. While one does,
    /// the others' futures are held back.
    fn waiting<'a>(&'a self, state: &'a State) -> impl Iterator<Item = (usize, Option<&'a String>)> {
        state.shards.iter().enumerate().flat_map(|(shard, progress)| {
            let not_made = match progress.stage {
                Stage::Waits if state.gate != Gate::Closed => progress.called & !progress.made,
                Stage::Calls => progress.called.checked_ilog2().map_or(0, |last| 1 << last),
                Stage::Waits | Stage::Ready | Stage::Failed => 0,
            };
            let services = self.names.iter().enumerate().filter(move |(n, _)| not_made >> n & 1 == 1);
            // Before its first factory a shard makes its driver.
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

    /// Nothing happens if it ended before, one way or the other.
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

    /// The factory of this service is called now.
    pub(crate) fn calls(&self, service: usize) {
        self.progress(|progress| progress.called |= 1 << service);
    }

    /// This service is there.
    pub(crate) fn made(&self, service: usize) {
        self.progress(|progress| progress.made |= 1 << service);
    }

    /// The factories returned, and some services have to be waited for.
    pub(crate) fn waits(&self) {
        self.progress(|progress| progress.stage = Stage::Waits);
    }

    /// All services are there.
    pub(crate) fn succeeded(&self) {
        self.progress(|progress| progress.stage = Stage::Ready);
    }

    /// The shard ends. Nothing happens if every shard was ready before.
    pub(crate) fn failed(&self, error: Error) {
        self.progress(|progress| progress.stage = Stage::Failed);
        self.shared.fail(error);
    }

    /// The shard ends, since what made its services panicked.
    pub(crate) fn panicked(&self) {
        self.failed(Error::FactoryPanicked { shard: self.shard });
    }

    /// On the shard: holds it back until the factories of all shards returned, or the start failed.
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
    /// Nothing happens if every shard is ready.
    pub(super) fn interrupt(&self) {
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
            let mut starting = Starting::new();
            starting.begin(1, Clock::of_age(2 * EXPLAINED_AFTER), None, vec!["chat".to_owned()]);
            starting.terms.as_mut().unwrap().begun = Time::from_nanos(0);
            let wakes = Wakes(Waker::from(starting.shared.clone()));
            let look = tracing::subscriber::with_default(wakes, || starting.look());
            let is_new = starting.shared.state().is_new;
            says.send((format!("{look:?}"), is_new)).unwrap();
        });
        let heard = hears.recv_timeout(Duration::from_secs(60)).expect("the look at the start returns");
        assert_eq!(heard, ("Waits(None)".to_owned(), true));
    }
}
