//! The scheduler: shards and clients on one thread, on one simulated network, by one clock that
//! jumps.
//!
//! ```text
//!            ┌── a shard whose ring has something, or whose wait is over ──▶ one round of its loop
//!   draw one ┤
//!            └── a task of a client that was woken ──▶ polled
//!   nothing to draw ──▶ the clock jumps to the next time anything waits for
//! ```

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Wake, Waker};
use std::thread;
use std::time::Duration;

use ringserve_base::clock::VirtualTime;
use ringserve_base::guard::message_of;
use ringserve_core::ServerLimits;
use ringserve_simkernel::rng::Rng;
use ringserve_simkernel::{Adversary, Fault, Faults, Network};

use super::blocking::{Names, SimPool};
use super::panics;
use super::tasks::{Code, Task, TaskWaker, WaitsFor, Woken};
use crate::blocking::Pool;
use crate::server::running::ShardDeath;
use crate::server::stepped::SteppedServer;
use crate::shard::running::starting::StartState;
use crate::shard::wakes::inbox::{Command, OnCall};
use crate::trace::{Trace, TracePlace};

/// The longest that a shard does not run.
const STALL_MAX: Duration = Duration::from_secs(2);

/// Rounds of a shard between two looks at its limits.
const LOOKS_EVERY: u64 = 16;

/// One run: its servers, clients, network and clock, and what happens next.
pub(crate) struct World {
    pub(crate) seed: u64,
    pub(crate) network: Network,
    pub(crate) time: VirtualTime,
    pub(crate) trace: Rc<Trace>,
    /// Something was done, or may go wrong, that ends clients with an error.
    pub(crate) is_disturbed: Cell<bool>,
    broke_drivers: Cell<bool>,
    /// A shard may have given up what its driver did not end in time, since neither ran.
    gives_up: Cell<bool>,
    rng: RefCell<Rng>,
    /// The time of a shard's round.
    round_takes: Duration,
    stalls_once_in: u32,
    servers: RefCell<Vec<Server>>,
    tasks: RefCell<Vec<Task>>,
    woken: Arc<Woken>,
    timers: RefCell<BTreeMap<(Duration, u64), Waker>>,
    timers_set: Cell<u64>,
    pub(crate) names: Arc<Names>,
    /// The pools in which functions that block run, of each server.
    pools: RefCell<Vec<Arc<SimPool>>>,
    /// Clients whose end the run waits for.
    clients_left: Cell<usize>,
    steps: Cell<u64>,
    steps_max: u64,
    allowed: Rc<dyn Fn(&str) -> bool>,
}

struct Server {
    server: SteppedServer,
    /// Until when each shard does not run.
    stalled: Vec<Duration>,
    /// The time that each shard was on a CPU once it is done with what it does, and when that is.
    ran: Vec<(Duration, Duration)>,
    /// When its loads are looked at next.
    looks_at: Option<Duration>,
}

/// The interval at which loads are looked at, as by a watchdog.
const LOOKS: Duration = Duration::from_millis(25);

thread_local! {
    /// The time for which the step of the shard computed so far.
    static COMPUTED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// In a simulation, lets the shard that calls this compute for `time`: its next action happens when
/// that has passed, and others go on meanwhile. Its load
/// ([`SimServer::follow_load`](crate::testing::SimServer::follow_load)) follows from that.
/// Elsewhere it does nothing.
///
/// ```
/// use std::time::Duration;
///
/// use ringserve::testing::compute;
/// use ringserve::{Cx, Frame, Service};
///
/// struct Hash;
///
/// impl Service for Hash {
///     type Session = ();
///     type Error = std::convert::Infallible;
///
///     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
///         if cfg!(test) {
///             compute(Duration::from_micros(200));
///         }
///         cx.reply(frame);
///         Ok(())
///     }
/// }
/// ```
pub fn compute(time: Duration) {
    COMPUTED.set(COMPUTED.get().saturating_add(time));
}

/// The result of [`World::run`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ran {
    /// The awaited event came.
    Over,
    /// The time is over.
    TimeIsUp,
    /// Nothing more can happen.
    Stuck,
}

/// The value that unwinds from the depths of a test whose seed failed.
pub(crate) struct SeedFailed(pub(crate) String);

/// The draws of a seed in the world.
pub(crate) struct WorldDraws {
    pub(crate) seed: u64,
    pub(crate) faults: Faults,
    pub(crate) adversary: Adversary,
    pub(crate) steps_max: u64,
    pub(crate) allowed: Rc<dyn Fn(&str) -> bool>,
}

impl World {
    pub(crate) fn new(settings: WorldDraws, time: VirtualTime, trace: Trace) -> World {
        let WorldDraws { seed, faults, adversary, steps_max, allowed } = settings;
        let mut rng = Rng::new(seed ^ 0x7465_7374_696E_6721);
        // Half of all seeds have turns that take time, as real ones do.
        let round_takes = if rng.one_in(2) { rng.spread(100, 1_000_000) } else { 0 };
        let is_disturbed = cost_connections(&faults) || adversary.breaks();
        World {
            seed,
            network: Network::stepped_against(adversary, seed, faults.clone()),
            time,
            trace: Rc::new(trace),
            is_disturbed: Cell::new(is_disturbed),
            broke_drivers: Cell::new(false),
            gives_up: Cell::new(false),
            rng: RefCell::new(rng),
            round_takes: Duration::from_nanos(round_takes),
            stalls_once_in: faults.once_in(Fault::ShardStalls),
            servers: RefCell::default(),
            tasks: RefCell::default(),
            woken: Arc::new(Woken {
                tasks: Mutex::default(),
                thread: thread::current().id(),
                from_outside: AtomicBool::new(false),
            }),
            timers: RefCell::default(),
            timers_set: Cell::new(0),
            names: Arc::default(),
            pools: RefCell::default(),
            clients_left: Cell::new(0),
            steps: Cell::new(0),
            steps_max,
            allowed,
        }
    }

    pub(crate) fn now(&self) -> Duration {
        self.time.now()
    }

    /// A number from the seed.
    pub(crate) fn random(&self) -> u64 {
        let mut rng = self.rng.borrow_mut();
        rng.below(1 << 32) << 32 | rng.below(1 << 32)
    }

    /// Ends the seed here.
    pub(crate) fn fail(&self, what: String) -> ! {
        resume_unwind(Box::new(SeedFailed(what)))
    }

    pub(crate) fn event(&self, what: impl FnOnce() -> String) {
        self.trace.event(&TracePlace::World, None, what);
    }

    // Servers.

    /// Notes whether another thread calls a shard.
    pub(crate) fn watches_callers(&self) -> OnCall {
        let woken = self.woken.clone();
        Arc::new(move || woken.seen())
    }

    pub(crate) fn add_pool(&self, seed: u64, limits: &ServerLimits) -> Arc<dyn Pool> {
        let pool = Arc::new(SimPool::new(seed, self.time.clone(), self.names.clone(), limits));
        self.pools.borrow_mut().push(pool.clone());
        pool
    }

    pub(crate) fn add_server(&self, server: SteppedServer) -> usize {
        let mut servers = self.servers.borrow_mut();
        let stalled = vec![Duration::ZERO; server.count()];
        let ran = vec![(Duration::ZERO, Duration::ZERO); server.count()];
        servers.push(Server { server, stalled, ran, looks_at: None });
        servers.len() - 1
    }

    /// The progress of a server's start.
    pub(crate) fn check_start(&self, server: usize) -> StartState {
        self.servers.borrow_mut()[server].server.poll_start()
    }

    pub(crate) fn servers(&self) -> usize {
        self.servers.borrow().len()
    }

    pub(crate) fn with_server<T>(&self, server: usize, look: impl FnOnce(&SteppedServer) -> T) -> T {
        look(&self.servers.borrow()[server].server)
    }

    /// Looks at the loads of a server from now on.
    pub(crate) fn follow_load(&self, server: usize) {
        let one = &mut self.servers.borrow_mut()[server];
        one.server.follow_load();
        one.looks_at = Some(self.now() + LOOKS);
    }

    /// Looks at the loads that are due.
    fn look_at_loads(&self) {
        let now = self.now();
        for (number, one) in self.servers.borrow_mut().iter_mut().enumerate() {
            if one.looks_at.is_none_or(|at| at > now) {
                continue;
            }
            let before = one.server.load();
            let so_far = one.ran.iter().map(|(ran, until)| *ran - until.saturating_sub(now));
            let rests = one.server.look(&so_far.collect::<Vec<_>>());
            one.looks_at = (!rests).then(|| now + LOOKS);
            let load = one.server.load();
            if load != before {
                self.trace.hash(&[5, number as u64, load as u64]);
                self.event(|| format!("the load of server {number} is {load}"));
            }
        }
    }

    /// Keeps a shard from running until then.
    pub(crate) fn stall(&self, server: usize, shard: usize, time: Duration) {
        self.rests(time);
        self.servers.borrow_mut()[server].stalled[shard] = self.now() + time;
    }

    /// Its ring answers with an error from now on, which ends the shard.
    pub(crate) fn break_driver(&self, server: usize, shard: usize) {
        /// EIO: as good as any.
        const ERRNO: i32 = 5;
        self.is_disturbed.set(true);
        self.broke_drivers.set(true);
        let ring = self.with_server(server, |server| server.ring(shard));
        self.network.break_ring(ring, ERRNO);
    }

    pub(crate) fn command(&self, server: usize, command: Command) {
        self.is_disturbed.set(true);
        self.event(|| format!("server {server} is told: {command:?}"));
        self.trace.hash(&[3, server as u64, command as u64]);
        self.servers.borrow()[server].server.command(command);
    }

    /// Neither shards nor their drivers run for `time`. A shard that ends waits 5 s for its driver,
    /// by the clock.
    pub(crate) fn rests(&self, time: Duration) {
        const GIVES_UP_AFTER: Duration = Duration::from_secs(5);
        self.gives_up.set(self.gives_up.get() || time >= GIVES_UP_AFTER);
    }

    /// A ring may have ended in the middle of things: its driver broke, or did not run, as it was
    /// meant to.
    pub(crate) fn may_leave_behind(&self) -> bool {
        self.gives_up.get() || self.has_broken_driver()
    }

    fn has_broken_driver(&self) -> bool {
        self.broke_drivers.get() || self.network.injected().of(Fault::RingBreaks) > 0
    }

    pub(crate) fn all_shards_ended(&self) -> bool {
        self.servers.borrow().iter().all(|one| one.server.is_done())
    }

    // Clients.

    /// Runs a task. If it hangs, its name and what it waits for are reported.
    pub(crate) fn spawn(
        &self,
        name: Rc<str>,
        counts: bool,
        is_client: bool,
        code: impl FnOnce(Rc<Cell<WaitsFor>>) -> Code,
    ) {
        let waits_for = Rc::new(Cell::new(WaitsFor::Something));
        let code = code(waits_for.clone());
        self.add_task(name, (counts, is_client), code, waits_for);
    }

    fn add_task(
        &self,
        name: Rc<str>,
        (counts, is_client): (bool, bool),
        code: Code,
        waits_for: Rc<Cell<WaitsFor>>,
    ) {
        let mut tasks = self.tasks.borrow_mut();
        let task = tasks.len() as u32;
        self.clients_left.set(self.clients_left.get() + usize::from(counts));
        let waker =
            Arc::new(TaskWaker { woken: self.woken.clone(), task, is_listed: AtomicBool::new(false) });
        waker.wake_by_ref();
        let (is_done, failed) = (false, false);
        tasks.push(Task { name, code: Some(code), waker, counts, is_client, is_done, failed, waits_for });
    }

    /// Has `waker` woken at a time. Returns by what to [clear](World::clear_timer) it.
    pub(crate) fn set_timer(&self, at: Duration, waker: Waker) -> (Duration, u64) {
        self.timers_set.set(self.timers_set.get() + 1);
        let key = (at, self.timers_set.get());
        self.timers.borrow_mut().insert(key, waker);
        key
    }

    pub(crate) fn clear_timer(&self, key: (Duration, u64)) {
        self.timers.borrow_mut().remove(&key);
    }

    pub(crate) fn all_clients_done(&self) -> bool {
        self.clients_left.get() == 0
    }

    /// The clients of the test, and how many of them came to a good end.
    pub(crate) fn clients(&self) -> (u64, u64) {
        let tasks = self.tasks.borrow();
        let clients = tasks.iter().filter(|task| task.is_client);
        let good = clients.clone().filter(|task| task.is_done && !task.failed).count();
        (clients.count() as u64, good as u64)
    }

    /// The clients that wait, and their reasons.
    pub(crate) fn waiting(&self) -> String {
        let mut text = String::new();
        for task in self.tasks.borrow().iter().filter(|task| task.counts && !task.is_done) {
            text += &format!("\n  client {} waits for {}", task.name, task.waits_for.get());
        }
        for (server, one) in self.servers.borrow().iter().enumerate() {
            for shard in (0..one.server.count()).filter(|shard| one.server.end(*shard).is_none()) {
                let stats = one.server.shard_stats(shard);
                let (connections, upstreams) = (stats.connections, stats.upstreams.connections);
                text += &format!(
                    "\n  shard {shard} of server {server} runs, with {connections} connections and {upstreams} to upstreams"
                );
            }
        }
        text
    }

    /// Drops all clients, wherever they are.
    pub(crate) fn drop_clients(&self) {
        let codes: Vec<Option<Code>> =
            self.tasks.borrow_mut().iter_mut().map(|task| task.code.take()).collect();
        drop(codes);
        self.timers.borrow_mut().clear();
    }

    pub(crate) fn drop_servers(&self) {
        // Functions that run when a server ends go on.
        self.run_blocking(Duration::MAX);
        let servers = std::mem::take(&mut *self.servers.borrow_mut());
        drop(servers);
    }

    // Steps.

    /// Steps until it is over, or the time is, or nothing more can happen.
    pub(crate) fn run(&self, until: Option<Duration>, over: impl Fn(&World) -> bool) -> Ran {
        loop {
            if over(self) {
                return Ran::Over;
            }
            if self.step() {
                continue;
            }
            match (self.next_at(), until) {
                (Some(at), Some(until)) if at > until => {
                    self.jump(until);
                    return Ran::TimeIsUp;
                }
                (Some(at), _) => self.jump(at),
                (None, Some(until)) => {
                    self.jump(until);
                    return Ran::TimeIsUp;
                }
                (None, None) => return Ran::Stuck,
            }
        }
    }

    /// Has one shard or one task, drawn by the seed, go on. False if none can.
    fn step(&self) -> bool {
        let now = self.now();
        let mut due = [(0, 0); 16];
        let mut count = 0;
        for (server, one) in self.servers.borrow().iter().enumerate() {
            for shard in 0..one.server.count() {
                if count < due.len() && one.is_due(shard, now, &self.network) {
                    due[count] = (server, shard);
                    count += 1;
                }
            }
        }
        let woken = self.woken.tasks.lock().unwrap_or_else(PoisonError::into_inner).len();
        if count + woken == 0 {
            return false;
        }
        if self.woken.from_outside.load(Ordering::Relaxed) {
            self.fail(
                "a thread of the program woke something: threads and runtimes are not simulated, since they run whenever they do. \
                 Run what they do in a task of the shard, or test it apart"
                    .to_owned(),
            );
        }
        self.steps.set(self.steps.get() + 1);
        if self.steps.get() > self.steps_max {
            let (steps, waiting) = (self.steps_max, self.waiting());
            self.fail(format!("the run does not end: {steps} steps, {now:?} of virtual time{waiting}"));
        }
        // A crowd of clients does not starve the shards.
        let shards_turn = count > 0
            && (woken == 0 || self.rng.borrow_mut().below((count + woken.min(8)) as u64) < count as u64);
        if shards_turn {
            let drawn = self.rng.borrow_mut().below(count as u64) as usize;
            let (server, shard) = due[drawn];
            self.step_shard(server, shard);
        } else {
            let drawn = self.rng.borrow_mut().below(woken as u64) as usize;
            let task = self.woken.tasks.lock().unwrap_or_else(PoisonError::into_inner).swap_remove(drawn);
            self.poll(task as usize);
        }
        true
    }

    fn step_shard(&self, server: usize, shard: usize) {
        self.trace.hash(&[1, server as u64, shard as u64]);
        let mut servers = self.servers.borrow_mut();
        let one = &mut servers[server];
        COMPUTED.set(Duration::ZERO);
        self.time.set_ran(one.ran[shard].0);
        let end = one.server.step(shard).map(|end| {
            end.as_ref().err().map(|death| match death {
                ShardDeath::Driver(errno) => Ok(*errno),
                ShardDeath::Panicked(message) => Err(message.clone()),
            })
        });
        let broken = match &end {
            None if self.steps.get().is_multiple_of(LOOKS_EVERY) => one.server.check(shard),
            None => Ok(()),
            Some(Some(Err(message))) => Err(format!("the loop of shard {shard} panicked: {message}")),
            Some(Some(Ok(errno))) if !self.has_broken_driver() => {
                Err(format!("the driver of shard {shard} broke with errno {errno}"))
            }
            Some(_) if self.may_leave_behind() => one.server.check_report(shard),
            Some(_) => one.server.check_end(shard),
        };
        let computed = COMPUTED.take();
        let until = self.now() + computed + self.round_takes;
        one.ran[shard] = (one.ran[shard].0 + computed + self.round_takes, until);
        one.stalled[shard] = one.stalled[shard].max(self.now() + computed);
        if one.server.follows_load() && one.looks_at.is_none() {
            one.looks_at = Some(self.now() + LOOKS);
        }
        if self.stalls_once_in > 0 && end.is_none() {
            let mut rng = self.rng.borrow_mut();
            if rng.one_in(self.stalls_once_in.into()) {
                let time = Duration::from_nanos(rng.spread(1_000_000, STALL_MAX.as_nanos() as u64));
                one.stalled[shard] = self.now() + time;
                self.event(|| format!("shard {shard} of server {server} does not run for {time:?}"));
            }
        }
        drop(servers);
        // A shard that ends drops what others passed to it.
        self.network.close_lost();
        if let Some(end) = end {
            self.event(|| match end {
                None => format!("shard {shard} of server {server} ended"),
                Some(_) => format!("shard {shard} of server {server} died"),
            });
        }
        self.check_panics("the service");
        let broken = broken.err().or_else(|| self.trace.take_broken());
        if let Some(broken) = broken {
            self.fail(broken);
        }
        self.trace.set_subject(None);
        if !self.round_takes.is_zero() {
            self.jump(self.now() + self.round_takes);
        }
    }

    fn poll(&self, number: usize) {
        self.trace.hash(&[2, number as u64]);
        let mut tasks = self.tasks.borrow_mut();
        let task = &mut tasks[number];
        task.waker.is_listed.store(false, Ordering::Relaxed);
        let (Some(mut code), waker) = (task.code.take(), Waker::from(task.waker.clone())) else { return };
        let name = task.name.clone();
        drop(tasks);
        let polled = catch_unwind(AssertUnwindSafe(|| code.as_mut().poll(&mut Context::from_waker(&waker))));
        let done = match polled {
            Ok(std::task::Poll::Pending) => {
                self.tasks.borrow_mut()[number].code = Some(code);
                return;
            }
            Ok(std::task::Poll::Ready(done)) => done,
            Err(panic) if panic.is::<SeedFailed>() => resume_unwind(panic),
            Err(panic) => {
                let message = panics::take().pop().unwrap_or_else(|| message_of(panic));
                self.fail(format!("client {name} panicked: {message}"));
            }
        };
        // What it holds is dropped here, as a part of it.
        drop(code);
        self.trace.event(&TracePlace::Client(name), self.trace.subject(), || match &done {
            Ok(()) => "is done".to_owned(),
            Err(error) => format!("gives up: {error}"),
        });
        let task = &mut self.tasks.borrow_mut()[number];
        task.is_done = true;
        self.clients_left.set(self.clients_left.get() - usize::from(task.counts));
        task.failed = done.is_err();
        if let Err(error) = done
            && task.is_client
            && !self.is_disturbed.get()
        {
            let what = format!(
                "client {} ended with an error, though nothing cost a connection: {error}",
                task.name
            );
            self.fail(what);
        }
    }

    /// Fails if user code panicked, unless the test expects it.
    pub(crate) fn check_panics(&self, place: &str) {
        let said = panics::take();
        if let Some(said) = said.into_iter().find(|said| !(self.allowed)(said)) {
            self.fail(format!("{place} panicked: {said}"));
        }
    }

    /// The next time at which something happens by itself.
    fn next_at(&self) -> Option<Duration> {
        let timer = self.timers.borrow().first_key_value().map(|((at, _), _)| *at);
        let blocking = self.pools.borrow().iter().filter_map(|pool| pool.next_at()).min();
        let mut next = [timer, blocking, self.network.next_event_at()].into_iter().flatten().min();
        for one in self.servers.borrow().iter() {
            next = [next, one.looks_at].into_iter().flatten().min();
            for shard in 0..one.server.count() {
                if let Some(at) = one.next_at(shard, &self.network) {
                    next = Some(next.map_or(at, |next| next.min(at)));
                }
            }
        }
        next
    }

    /// Sets the clock, which wakes what waited for that.
    pub(crate) fn jump(&self, to: Duration) {
        let to = to.max(self.now());
        self.time.set(to);
        self.network.set_now(to);
        let due = |timers: &mut BTreeMap<(Duration, u64), Waker>| {
            let first = timers.first_entry().filter(|first| first.key().0 <= to)?;
            Some(first.remove())
        };
        while let Some(waker) = {
            let mut timers = self.timers.borrow_mut();
            due(&mut timers)
        } {
            waker.wake();
        }
        self.look_at_loads();
        self.run_blocking(to);
    }

    /// Runs the functions that end until then.
    fn run_blocking(&self, until: Duration) {
        let pools = self.pools.borrow().clone();
        for (number, pool) in pools.iter().enumerate() {
            while pool.run_next(until) {
                self.trace.hash(&[4, number as u64]);
                self.event(|| "a blocking call ends".to_owned());
                self.check_panics("a blocking call");
            }
        }
    }

    /// The number that two runs of a seed share.
    pub(crate) fn hash(&self) -> u64 {
        self.trace.hash(&[self.network.event_hash(), self.steps.get(), self.now().as_nanos() as u64]);
        self.trace.hash_so_far()
    }

    pub(crate) fn steps(&self) -> u64 {
        self.steps.get()
    }
}

impl Server {
    fn is_due(&self, shard: usize, now: Duration, network: &Network) -> bool {
        self.server.end(shard).is_none()
            && self.stalled[shard] <= now
            && network.wakes_at(self.server.ring(shard)).is_some_and(|at| at <= now)
    }

    fn next_at(&self, shard: usize, network: &Network) -> Option<Duration> {
        if self.server.end(shard).is_some() {
            return None;
        }
        network.wakes_at(self.server.ring(shard)).map(|at| at.max(self.stalled[shard]))
    }
}

/// Whether these faults cost connections, so that a client may end with an error.
fn cost_connections(faults: &Faults) -> bool {
    let harmless = Faults::harmless();
    Fault::ALL.iter().any(|fault| faults.once_in(*fault) > 0 && harmless.once_in(*fault) == 0)
}
