//! An upstream: its backends, its rules, and what all shards of the process share of both.

use std::fmt;
use std::io;
use std::rc::Rc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::ArcSwap;
use ringserve_server::limits::ConnLimits;
use ringserve_server::stats::{UpstreamFigures, UpstreamSource};
use ringserve_server::transport::Transport;
use tracing::{info, warn};

use crate::backend::{Backend, BackendState, Health};
use crate::check::Check;
use crate::discover::Discover;
use crate::locked;
use crate::policy::SECOND;
use crate::policy::budget::Budget;
use crate::policy::failures::{self, Window, ejected_for, may_eject};
use crate::settings::{Balance, Hedge, PoolLimits, Retry, SendProxy, Settings};
use crate::stats::{BackendStats, UpstreamStats};

/// A backend that worked for this long starts with the first ejection again.
const EJECTIONS_FORGOTTEN_AFTER: u64 = 5 * 60 * 1_000_000_000;

/// A group of equal servers with one set of rules: which of them is asked, how long, how often, and
/// what takes one out.
///
/// It is made once, before the server, and is `Clone`, `Send` and `Sync`. Each shard makes a client
/// from it in its factory, such as [`exclusive`](Upstream::exclusive) or
/// [`relay`](Upstream::relay). Shards share the health of the backends, the ejections and the
/// budget of retries; connections stay on their shard. Clones share all that too, whatever settings
/// they were given.
///
/// It serves one server at a time: those that run at once need one each, since their clocks differ.
/// A server that starts after another one ended may use the same, and its ejected backends are
/// tried at once.
///
/// It costs about 500 bytes for each backend, and as much again for each shard that asks it.
#[derive(Clone)]
pub struct Upstream {
    settings: Arc<Settings>,
    state: Arc<State>,
}

/// State of an upstream that all shards share.
pub(crate) struct State {
    name: Box<str>,
    backends: ArcSwap<Vec<Arc<BackendState>>>,
    /// Changed with everything that decides who may be asked.
    version: AtomicU64,
    /// Held while one of these changes: so half of the backends stay, however many shards see
    /// failures at once.
    changes: Mutex<()>,
    budget: Mutex<Budget>,
    /// The budget of second questions, beside that of repeated ones.
    hedge_budget: Mutex<Budget>,
    hedges: AtomicU64,
    retries: AtomicU64,
    refused: AtomicU64,
    panics: AtomicU64,
    panic_told: AtomicU64,
    /// A number of this process; 0 until the first client draws it.
    pub(crate) seed: AtomicU64,
    /// Clients of shards, and the newest time at which one of them reported its share, by the clock
    /// of its server.
    views: AtomicUsize,
    pub(crate) newest: AtomicU64,
    /// A shard runs the source of the backends.
    pub(crate) is_discovering: AtomicBool,
    /// Answers of the source, and times that it failed.
    pub(crate) lookups: AtomicU64,
    lookups_failed: AtomicU64,
    /// The source failed, for which there is a line already.
    is_lost: AtomicBool,
    /// As many backends as an answer had that was refused, for which there is a line already.
    short_of: AtomicUsize,
    /// Shards with a task that checks backends.
    pub(crate) checkers: AtomicUsize,
}

impl Upstream {
    /// An upstream of these backends, with the default rules. `name` is what logs and figures call
    /// it.
    ///
    /// ```
    /// use ringserve::upstream::{Backend, Upstream};
    ///
    /// let equal = Upstream::new("web", ["10.0.0.11:80", "10.0.0.12:80"]);
    /// let unequal = Upstream::new("web", [Backend::new("10.0.0.11:80").weight(9), Backend::new("10.0.0.12:80")]);
    /// # let _ = (equal, unequal);
    /// ```
    pub fn new<B: Into<Backend>>(name: &str, backends: impl IntoIterator<Item = B>) -> Upstream {
        let settings = Settings::default();
        let budget = settings.retry.budget();
        let state = State {
            name: name.into(),
            backends: ArcSwap::default(),
            version: AtomicU64::new(1),
            changes: Mutex::default(),
            budget: Mutex::new(budget),
            hedge_budget: Mutex::new(Hedge::default().budget()),
            hedges: AtomicU64::default(),
            retries: AtomicU64::default(),
            refused: AtomicU64::default(),
            panics: AtomicU64::default(),
            panic_told: AtomicU64::default(),
            seed: AtomicU64::default(),
            views: AtomicUsize::default(),
            newest: AtomicU64::default(),
            is_discovering: AtomicBool::default(),
            lookups: AtomicU64::default(),
            lookups_failed: AtomicU64::default(),
            is_lost: AtomicBool::default(),
            short_of: AtomicUsize::new(usize::MAX),
            checkers: AtomicUsize::default(),
        };
        let upstream = Upstream { settings: Arc::new(settings), state: Arc::new(state) };
        upstream.set_backends(backends);
        upstream
    }

    /// An upstream whose backends come from a source. See [`names`](Upstream::names) and
    /// [`file`](Upstream::file) for some.
    pub fn discover(name: &str, source: impl Discover) -> Upstream {
        let none: [Backend; 0] = [];
        Upstream::new(name, none).with(|settings| settings.source = Some(Arc::new(source)))
    }

    /// The fewest backends that an answer of the [source](Upstream::discover) may have; one with
    /// fewer changes nothing. 1 by default, and at least.
    pub fn min_backends(self, backends: usize) -> Upstream {
        self.with(|settings| settings.min_backends = backends.max(1))
    }

    fn with(mut self, change: impl FnOnce(&mut Settings)) -> Upstream {
        change(Arc::make_mut(&mut self.settings));
        self
    }

    /// Sets the choice of a backend. [`Balance::PeakEwma`] by default.
    pub fn balance(self, balance: Balance) -> Upstream {
        self.with(|settings| settings.balance = balance)
    }

    /// Bounds on the connections of a shard.
    pub fn pool(self, limits: PoolLimits) -> Upstream {
        self.with(|settings| settings.pool = limits)
    }

    /// Checks each backend. Without it a backend is asked until requests fail.
    pub fn check(self, check: Check) -> Upstream {
        self.with(|settings| settings.check = Some(check))
    }

    /// Sets the rules for sending a request again, with their budget.
    pub fn retry(self, retry: Retry) -> Upstream {
        *locked(&self.state.budget) = retry.budget();
        self.with(|settings| settings.retry = retry)
    }

    /// Asks a second backend, where the first one takes longer than most answers did, and takes the
    /// first answer: for [idempotent](crate::Request::idempotent) questions of
    /// [`exclusive`](Upstream::exclusive), [`pipelined`](Upstream::pipelined) and
    /// [`multiplexed`](Upstream::multiplexed) clients. The other call is dropped, which closes the
    /// connection of an exclusive client. Off by default: it costs backends up to 5 % more
    /// requests.
    pub fn hedge(self, hedge: Hedge) -> Upstream {
        *locked(&self.state.hedge_budget) = hedge.budget();
        self.with(|settings| settings.hedge = Some(hedge))
    }

    /// Sets the time of a request with all its tries, unless it has its own. 10 s by default.
    pub fn answer_timeout(self, time: Duration) -> Upstream {
        self.with(|settings| settings.answer_timeout = time)
    }

    /// Sets the time until a connection is usable, with the look-up of a name and TLS. 2 s by
    /// default;
    /// [`ServerLimits::connect_timeout`](ringserve_server::limits::ServerLimits::connect_timeout)
    /// holds too.
    pub fn connect_timeout(self, time: Duration) -> Upstream {
        self.with(|settings| settings.connect_timeout = time)
    }

    /// Puts a backend that fails out of the choice, for 5 s at first: after 5 failures in a row, or
    /// when less than 80 % of at least 20 requests of the last 10 s succeeded. On by default. Never
    /// more than half of the backends are out for this, and never the only one. Then one request
    /// tries it: if that succeeds the backend is back, with its share in steps over 30 s.
    pub fn ejection(self, is_on: bool) -> Upstream {
        self.with(|settings| settings.ejection = is_on)
    }

    /// The percentage of backends below which all but the drained ones are asked, whatever their
    /// checks and failures say: what few are left would drown. 50 by default; 0 is off.
    pub fn panic_below(self, percent: u32) -> Upstream {
        self.with(|settings| settings.panic_below = percent.min(100))
    }

    /// Limits of each connection, such as an idle timeout of a relay: by default a backend may be
    /// silent for ever. Limits that contradict those of the server are the error of each
    /// connection.
    pub fn connection_limits(self, limits: ConnLimits) -> Upstream {
        self.with(|settings| settings.connection_limits = Some(limits))
    }

    /// The zone of this process. Backends of the [same zone](Backend::zone) are asked before the
    /// others of their [priority](Backend::priority), as those of a lower number are. Without it
    /// zones are ignored.
    pub fn zone(self, zone: &str) -> Upstream {
        self.with(|settings| settings.zone = Some(zone.into()))
    }

    /// Has each shard ask a part of the backends where there are more than 32: twice as many as a
    /// shard's equal share, and 16 at least. So connections do not multiply with shards. Where none
    /// of them may be asked, it asks the others. On by default; relays, [`Balance::Least`] and
    /// requests with a key ask all.
    pub fn subset(self, is_on: bool) -> Upstream {
        self.with(|settings| settings.has_subset = is_on)
    }

    /// Begins each connection with a PROXY header: of the client for a [relay](Upstream::relay),
    /// else one that says that the connection is this server's.
    pub fn send_proxy(self, version: SendProxy) -> Upstream {
        self.with(|settings| settings.send_proxy = Some(version))
    }

    /// Puts a transport below each connection, such as that of a `TlsClient`, which `make` makes
    /// for a backend.
    ///
    /// ```no_run
    /// # use std::io;
    /// # use ringserve::tls::{Pem, Tls};
    /// # use ringserve::upstream::Upstream;
    /// # fn upstream() -> Result<Upstream, Box<dyn std::error::Error>> {
    /// let tls = Tls::client(Pem::file("authority.pem")?)?;
    /// Ok(Upstream::new("web", ["one.internal:443", "two.internal:443"])
    ///     .transport(move |backend| Ok(tls.to(backend.host()).map_err(io::Error::other)?)))
    /// # }
    /// ```
    pub fn transport(
        self,
        make: impl Fn(&Backend) -> io::Result<Rc<dyn Transport>> + Send + Sync + 'static,
    ) -> Upstream {
        self.with(|settings| settings.transport = Some(Arc::new(make)))
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.state.name
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    pub(crate) fn state(&self) -> &Arc<State> {
        &self.state
    }

    /// Replaces the backends, from any thread. One that stays keeps what is known of it, also where
    /// its weight changes. One that is left out gets no further request: its idle connections are
    /// closed, and what is in flight ends by itself. Of several with one destination the first one
    /// counts.
    pub fn set_backends<B: Into<Backend>>(&self, backends: impl IntoIterator<Item = B>) {
        let _held = locked(&self.state.changes);
        let old = self.state.backends.load();
        let is_same = |backend: &Backend, known: &BackendState| {
            known.backend.destination() == backend.destination()
                && known.backend.host() == backend.host()
                && known.backend.given_zone() == backend.given_zone()
        };
        let mut all: Vec<Arc<BackendState>> = Vec::new();
        for backend in backends.into_iter().map(Into::into) {
            if all.iter().any(|other| other.backend.destination() == backend.destination()) {
                continue;
            }
            match old.iter().find(|known| is_same(&backend, known)) {
                Some(known) => {
                    known.weight.store(backend.given_weight(), Relaxed);
                    known.priority.store(backend.given_priority(), Relaxed);
                    all.push(known.clone());
                }
                None => all.push(Arc::new(BackendState::new(backend))),
            }
        }
        for gone in old.iter().filter(|known| !all.iter().any(|other| Arc::ptr_eq(other, known))) {
            gone.is_gone.store(true, Relaxed);
        }
        self.state.backends.store(Arc::new(all));
        self.state.changed();
    }

    /// The source found these, or failed. An error, or too few of them, changes nothing, and has a
    /// line once.
    pub(crate) fn found(&self, backends: io::Result<Vec<Backend>>) {
        let state = &self.state;
        let backends = match backends {
            Ok(backends) => backends,
            Err(error) => {
                state.lookups_failed.fetch_add(1, Relaxed);
                if !state.is_lost.swap(true, Relaxed) {
                    warn!(
                        "upstream {}: its backends are not found, and those known stay: {error}",
                        self.name()
                    );
                }
                return;
            }
        };
        let (count, least) = (backends.len(), self.settings.min_backends);
        if count < least {
            state.lookups_failed.fetch_add(1, Relaxed);
            if state.short_of.swap(count, Relaxed) != count {
                warn!(
                    "upstream {}: {count} backends were found, of at least {least}: those known stay",
                    self.name()
                );
            }
            return;
        }
        state.short_of.store(usize::MAX, Relaxed);
        state.lookups.fetch_add(1, Relaxed);
        if state.is_lost.swap(false, Relaxed) {
            info!("upstream {}: its backends are found again", self.name());
        }
        if !state.has(&backends) {
            info!("upstream {}: {count} backends", self.name());
            self.set_backends(backends);
        }
    }

    /// True while the source of the backends has not answered yet, and has not failed.
    pub(crate) fn is_unresolved(&self) -> bool {
        let state = &self.state;
        let is_unanswered = state.lookups.load(Relaxed) == 0 && state.lookups_failed.load(Relaxed) == 0;
        self.settings.source.is_some() && is_unanswered
    }

    /// Takes a backend out of the choice, by its [name](Backend::name): what is in flight there
    /// ends by itself. False if there is none with this name.
    pub fn drain(&self, backend: &str) -> bool {
        self.set_drained(backend, true)
    }

    /// The reverse of [`drain`](Upstream::drain).
    pub fn undrain(&self, backend: &str) -> bool {
        self.set_drained(backend, false)
    }

    fn set_drained(&self, name: &str, is_drained: bool) -> bool {
        let _held = locked(&self.state.changes);
        let found = self.state.backends().iter().find(|state| state.backend.name() == name).cloned();
        if let Some(state) = &found {
            state.is_drained.store(is_drained, Relaxed);
            self.state.changed();
        }
        found.is_some()
    }

    /// Takes a backend that does not resolve or answer out of the choice until its checks find it:
    /// for the start, where what is known is better than nothing. False if there is none with this
    /// name.
    pub fn mark_down(&self, backend: &str) -> bool {
        let _held = locked(&self.state.changes);
        let found = self.state.backends().iter().find(|state| state.backend.name() == backend).cloned();
        if let Some(state) = &found {
            state.set_health(Health::Down);
            self.state.changed();
        }
        found.is_some()
    }

    /// The backends, and counts since the start. Shards report requests in flight and successes
    /// about once a millisecond while requests come, and else once a second.
    pub fn stats(&self) -> UpstreamStats {
        let backends = self.state.backends();
        UpstreamStats {
            backends: backends.iter().map(|state| BackendStats::of(state)).collect(),
            retries: self.state.retries.load(Relaxed),
            hedges: self.state.hedges.load(Relaxed),
            refused: self.state.refused.load(Relaxed),
            panics: self.state.panics.load(Relaxed),
            lookups: self.state.lookups.load(Relaxed),
            lookups_failed: self.state.lookups_failed.load(Relaxed),
        }
    }
}

impl UpstreamSource for Upstream {
    fn figures(&self) -> UpstreamFigures {
        self.stats().figures(self.name())
    }
}

impl fmt::Debug for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let backends = self.state.backends();
        let names: Vec<&str> = backends.iter().map(|state| state.backend.name()).collect();
        f.debug_struct("Upstream").field("name", &self.name()).field("backends", &names).finish()
    }
}

impl State {
    pub(crate) fn backends(&self) -> Arc<Vec<Arc<BackendState>>> {
        self.backends.load_full()
    }

    pub(crate) fn version(&self) -> u64 {
        self.version.load(Acquire)
    }

    /// True if these are the backends, in any order.
    fn has(&self, backends: &[Backend]) -> bool {
        let known = self.backends.load();
        let is_known = |backend: &Backend| {
            known.iter().any(|state| {
                state.backend.destination() == backend.destination()
                    && state.backend.host() == backend.host()
                    && state.backend.given_zone() == backend.given_zone()
                    && state.weight.load(Relaxed) == backend.given_weight()
                    && state.priority.load(Relaxed) == backend.given_priority()
            })
        };
        let is_given = |state: &Arc<BackendState>| {
            backends.iter().any(|backend| backend.destination() == state.backend.destination())
        };
        backends.iter().all(is_known) && known.iter().all(is_given)
    }

    /// A client was made, at this time of its server. What an earlier server noted by its own
    /// clock, which began earlier, is forgotten.
    pub(crate) fn is_viewed(&self, now: u64) {
        let held = locked(&self.changes);
        let others = self.views.fetch_add(1, Relaxed);
        let newest = self.newest.load(Relaxed);
        if now >= newest {
            return;
        }
        if others == 0 {
            for state in self.backends().iter() {
                state.forgets_times();
            }
            locked(&self.budget).forgets_times();
            locked(&self.hedge_budget).forgets_times();
            self.panic_told.store(0, Relaxed);
            self.newest.store(now, Relaxed);
            self.changed();
            return;
        }
        drop(held);
        if newest - now > SECOND {
            warn!(
                "upstream {}: two servers use it at once, and their clocks differ: make one for each",
                self.name
            );
        }
    }

    /// A client was dropped.
    pub(crate) fn is_left(&self) {
        self.views.fetch_sub(1, Relaxed);
    }

    fn changed(&self) {
        // Behind what changed, so that a shard that sees the number sees that.
        self.version.fetch_add(1, Release);
    }

    pub(crate) fn add_requests(&self, now: u64, requests: u64) {
        locked(&self.budget).add(now, requests);
        locked(&self.hedge_budget).add(now, requests);
    }

    /// True if a second question is within its budget. It is counted.
    pub(crate) fn may_hedge(&self, now: u64) -> bool {
        let may = locked(&self.hedge_budget).take(now);
        self.hedges.fetch_add(u64::from(may), Relaxed);
        may
    }

    /// True if another try is within the budget.
    pub(crate) fn may_retry(&self, now: u64) -> bool {
        locked(&self.budget).take(now)
    }

    pub(crate) fn count_retry(&self) {
        self.retries.fetch_add(1, Relaxed);
    }

    pub(crate) fn count_refused(&self) {
        self.refused.fetch_add(1, Relaxed);
    }

    /// Fewer backends are left than may be. Said once a minute.
    pub(crate) fn panics(&self, now: u64, usable: usize, count: usize) {
        self.panics.fetch_add(1, Relaxed);
        let told = self.panic_told.load(Relaxed);
        let is_due = told == 0 || now.saturating_sub(told) > 60 * 1_000_000_000;
        if is_due && self.panic_told.compare_exchange(told, now.max(1), Relaxed, Relaxed).is_ok() {
            warn!("upstream {}: {usable} of {count} backends are left, so all are asked", self.name);
        }
    }

    /// Notes what a check found, where that changes the health.
    pub(crate) fn set_health(&self, of: &BackendState, health: Health, now: u64, why: &dyn fmt::Display) {
        let before = {
            let _held = locked(&self.changes);
            let before = of.health();
            of.set_health(health);
            if before == Health::Down {
                of.returns(now);
            }
            self.changed();
            before
        };
        // A line may take its time: nothing is held.
        let name = of.backend.name();
        match health {
            Health::Down => warn!("upstream {}: {name} is down: {why}", self.name),
            _ if before == Health::Down => info!("upstream {}: {name} is up", self.name),
            _ => {}
        }
    }

    /// Notes that a request failed which says something of the backend. Ejects the backend if that
    /// is enough.
    pub(crate) fn failed(&self, of: &BackendState, now: u64, random: u64) {
        of.counts.failures.fetch_add(1, Relaxed);
        // What was in flight when it was ejected is over and done with.
        if of.ejected_until.load(Relaxed) != 0 {
            return;
        }
        let in_a_row = of.in_a_row.fetch_add(1, Relaxed) + 1;
        let is_bad = {
            let mut window = locked(&of.window);
            window.add(now, 0, 1);
            window.is_bad()
        };
        if in_a_row < failures::IN_A_ROW && !is_bad {
            return;
        }
        let held = locked(&self.changes);
        let time = self.may_be_ejected(of).then(|| {
            if now.saturating_sub(of.returned_at.load(Relaxed)) > EJECTIONS_FORGOTTEN_AFTER {
                of.ejections.store(0, Relaxed);
            }
            // Else what was counted before would eject it again after its first success.
            of.in_a_row.store(0, Relaxed);
            *locked(&of.window) = Window::default();
            self.eject(of, now, random)
        });
        drop(held);
        if let Some(time) = time {
            self.tell_ejected(of, time);
        }
    }

    fn may_be_ejected(&self, of: &BackendState) -> bool {
        let backends = self.backends();
        let askable = || backends.iter().filter(|other| other.is_askable());
        let ejected = askable().filter(|other| other.ejected_until.load(Relaxed) != 0).count();
        let is_in = !of.is_gone.load(Relaxed) && of.ejected_until.load(Relaxed) == 0;
        is_in && may_eject(ejected, askable().count())
    }

    /// Returns for how many nanoseconds.
    fn eject(&self, of: &BackendState, now: u64, random: u64) -> u64 {
        let times = of.ejections.fetch_add(1, Relaxed) + 1;
        let time = ejected_for(times, random);
        of.ejected_until.store(now + time, Relaxed);
        self.changed();
        time
    }

    fn tell_ejected(&self, of: &BackendState, time: u64) {
        let (name, time) = (of.backend.name(), Duration::from_millis(time / 1_000_000));
        warn!("upstream {}: {name} fails, and is not asked for {time:?}", self.name);
    }

    /// Ends the trial of an ejected backend: it is back, or out for longer. `None` if the request
    /// said nothing of it.
    pub(crate) fn tried(&self, of: &BackendState, works: Option<bool>, now: u64, random: u64) {
        let held = locked(&self.changes);
        of.is_tried.store(false, Relaxed);
        let time = match works {
            None => None,
            // Another shard found meanwhile that it is back.
            Some(false) if of.ejected_until.load(Relaxed) == 0 => None,
            Some(false) => {
                of.counts.failures.fetch_add(1, Relaxed);
                Some(self.eject(of, now, random))
            }
            Some(true) => {
                of.ejected_until.store(0, Relaxed);
                of.returns(now);
                None
            }
        };
        self.changed();
        drop(held);
        match (works, time) {
            (_, Some(time)) => self.tell_ejected(of, time),
            (Some(true), _) => info!("upstream {}: {} works again", self.name, of.backend.name()),
            _ => {}
        }
    }
}
