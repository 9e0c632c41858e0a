use std::any::Any;
use std::borrow::Cow;
use std::cell::{OnceCell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ringserve_admission::internals::{KeyTaker, UsedKeyRates};
use ringserve_base::clock::Clock;
use ringserve_base::guard::{Panicked, guard};
use ringserve_base::random::Random;
use ringserve_core::ShardShared;
use ringserve_core::{ConnHead, Page, Time};

use super::pages::{PageSources, Pages};
use crate::blocking::{Blocking, Pool, submit};
use crate::shard::tasks::attempts::Requests;
use crate::shard::tasks::draining::Draining;
#[cfg(feature = "http")]
use crate::shard::tasks::draining::Moment;
use crate::shard::tasks::ends::{ServiceEnded, ServiceEnds, UnknownService};
use crate::shard::tasks::join::{JoinHandle, SpawnError};
use crate::shard::tasks::spawned::{LocalTasks, ResetsOnPanic};
use crate::shard::tasks::started::{Start, Started};
use crate::shard::tasks::task::boxed;
use crate::shard::wakes::awaited::Awaited;
use crate::shard::wakes::flag::Flag;
use crate::shard::wakes::inbox::ShardRemote;

use crate::overload::pace::Pace;
use crate::overload::{Load, LoadNow};
use crate::shard::remote::control::ServerControl;
use crate::shard::wakes::timers::{Interval, Sleep, Timeout, Timers};

/// A shard as the code on its own thread sees it: its factory, and handlers by way of
/// [`Cx::shard`](crate::Cx::shard). Clones are handles on the same shard.
#[derive(Clone)]
pub struct Shard {
    inner: Rc<Inner>,
    /// The service that has this handle; the first one where that does not matter.
    #[cfg_attr(not(feature = "http"), allow(dead_code, reason = "connections of HTTP ask for it"))]
    service: u8,
}

/// Handles messages that other shards left, as many as a turn has room for. True if there are more.
pub(crate) type ReadMailbox = Box<dyn FnMut() -> bool>;

struct Inner {
    index: usize,
    server: ServerControl,
    tasks: LocalTasks,
    timers: Timers,
    random: Random,
    pace: Pace,
    remote: Arc<ShardRemote>,
    mailboxes: RefCell<Vec<ReadMailbox>>,
    start: Start,
    draining: Flag,
    ends: ServiceEnds,
    /// State that its connections share, once there is a state machine.
    core: OnceCell<Rc<ShardShared>>,
    upstreams: Requests,
    awaited: Awaited,
    pages: Rc<PageSources>,
    /// Shared values, one of each type.
    shared: RefCell<Vec<Rc<dyn Any>>>,
}

impl Shard {
    pub(crate) fn new(
        index: usize,
        remote: Arc<ShardRemote>,
        server: ServerControl,
        clock: Clock,
        random: Random,
        ends: ServiceEnds,
    ) -> Shard {
        let timers = Timers::new(clock);
        let inner = Inner {
            index,
            server,
            tasks: LocalTasks::new(index, remote.clone(), timers.clone()),
            timers,
            random,
            pace: Pace::default(),
            remote,
            mailboxes: RefCell::default(),
            start: Start::default(),
            draining: Flag::default(),
            ends,
            core: OnceCell::default(),
            upstreams: Requests::default(),
            awaited: Awaited::default(),
            pages: Rc::default(),
            shared: RefCell::default(),
        };
        Shard { inner: Rc::new(inner), service: 0 }
    }

    /// A handle of the service with this number, of at most
    /// [`SERVICES_MAX`](super::many::SERVICES_MAX).
    pub(crate) fn of_service(&self, service: usize) -> Shard {
        Shard { inner: self.inner.clone(), service: service as u8 }
    }

    /// The number of this shard, from 0.
    pub fn index(&self) -> usize {
        self.inner.index
    }

    /// The number of the server's shards.
    pub fn count(&self) -> usize {
        self.inner.server.remotes().len()
    }

    /// The server of this shard: its figures, and its end. In a factory it is there already; the
    /// figures begin once every shard is ready.
    ///
    /// ```
    /// # use ringserve::Shard;
    /// fn connections(shard: &Shard) -> usize {
    ///     shard.server().stats().connections // the last figures there are: a shard is never made to wait
    /// }
    /// ```
    pub fn server(&self) -> &ServerControl {
        &self.inner.server
    }

    /// The value of type `T` that this shard keeps for all its services: `make` makes it at the
    /// first request. So the services of a shard share state without a lock, in whatever order
    /// their factories are called. Another shard has another value; one of each type is kept until
    /// the end of the shard.
    ///
    /// It is searched for among the values of other types, so a factory should request it and a
    /// call should not. A value that closures inside it need too is made by
    /// [`shared_rc`](Shard::shared_rc).
    ///
    /// ```no_run
    /// use std::cell::Cell;
    /// use std::rc::Rc;
    ///
    /// use ringserve::listen::tcp;
    /// use ringserve::{Cx, Frame, Server, Service, framing::Lines};
    ///
    /// #[derive(Default)]
    /// struct Heard(Cell<u64>);
    ///
    /// struct Listener(Rc<Heard>);
    ///
    /// impl Service for Listener {
    ///     type Session = ();
    ///     type Error = std::convert::Infallible;
    ///
    ///     async fn call(&self, _cx: &Cx<'_, ()>, _line: Frame) -> Result<(), Self::Error> {
    ///         self.0.0.set(self.0.0.get() + 1);
    ///         Ok(())
    ///     }
    /// }
    ///
    /// struct Teller(Rc<Heard>);
    ///
    /// impl Service for Teller {
    ///     type Session = ();
    ///     type Error = std::convert::Infallible;
    ///
    ///     async fn call(&self, cx: &Cx<'_, ()>, _line: Frame) -> Result<(), Self::Error> {
    ///         cx.reply(format!("{} lines on this shard", self.0.0.get()));
    ///         Ok(())
    ///     }
    /// }
    ///
    /// # fn main() -> Result<(), ringserve::Error> {
    /// Server::new()
    ///     .service(tcp("0.0.0.0:7000").framing(Lines::default()), |shard| Listener(shard.shared(Heard::default)))
    ///     .service(tcp("127.0.0.1:7001").framing(Lines::default()), |shard| Teller(shard.shared(Heard::default)))
    ///     .serve()
    /// # }
    /// ```
    pub fn shared<T: 'static>(&self, make: impl FnOnce() -> T) -> Rc<T> {
        self.shared_rc(|| Rc::new(make()))
    }

    /// As [`shared`](Shard::shared), for a value that closures inside it need as well: `make` gives
    /// the [`Rc`] that it made for them.
    ///
    /// ```no_run
    /// use std::cell::Cell;
    /// use std::rc::Rc;
    ///
    /// use ringserve::{Shard, sync::Mesh};
    ///
    /// /// Counts what all shards tell it.
    /// struct Hub {
    ///     heard: Cell<u64>,
    ///     counts: Mesh<u64>,
    /// }
    ///
    /// impl Hub {
    ///     fn new(shard: &Shard, counts: &Mesh<u64>) -> Rc<Hub> {
    ///         let hub = Rc::new(Hub { heard: Cell::new(0), counts: counts.clone() });
    ///         let own = hub.clone();
    ///         counts.register(shard, move |_from, count| own.heard.set(own.heard.get() + count));
    ///         hub
    ///     }
    /// }
    ///
    /// /// The same one for each service of the shard.
    /// fn hub(shard: &Shard, counts: &Mesh<u64>) -> Rc<Hub> {
    ///     shard.shared_rc(|| Hub::new(shard, counts))
    /// }
    /// # let _ = |hub: Rc<Hub>| hub.counts.clone();
    /// ```
    pub fn shared_rc<T: 'static>(&self, make: impl FnOnce() -> Rc<T>) -> Rc<T> {
        let known = || self.inner.shared.borrow().iter().find_map(|value| value.clone().downcast().ok());
        known().unwrap_or_else(|| {
            // It is user code, which may ask for others: nothing is borrowed meanwhile.
            let value = make();
            known().unwrap_or_else(|| {
                self.inner.shared.borrow_mut().push(value.clone());
                value
            })
        })
    }

    /// Runs a future on this shard until it is done or the shard ends. It need not be `Send`, and
    /// can share `Rc`s with the service. A panic in it ends it alone, and is logged.
    ///
    /// The handle gives its output, and aborts it. Dropping the handle detaches the task, which
    /// goes on. [`Cx::spawn_on_connection`](crate::Cx::spawn_on_connection) spawns one that ends
    /// with a connection.
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
        self.join(None, future)
    }

    /// As [`spawn`](Shard::spawn), for a task that is called `name` in the line that is logged if
    /// it panics.
    pub fn spawn_named<T: 'static>(
        &self,
        name: impl Into<Cow<'static, str>>,
        future: impl Future<Output = T> + 'static,
    ) -> JoinHandle<T> {
        self.join(Some(name.into()), future)
    }

    /// As [`Cx::spawn_on_connection`](crate::Cx::spawn_on_connection).
    pub(crate) fn spawn_on<T: 'static>(
        &self,
        shared: &ConnHead,
        future: impl Future<Output = T> + 'static,
    ) -> Result<JoinHandle<T>, SpawnError> {
        if shared.is_gone() {
            return Err(SpawnError::Gone);
        }
        let tasks = &self.inner.tasks;
        let (id, tasks_max) = (shared.id(), shared.lane().connection_tasks_max());
        let resets = ResetsOnPanic::new(shared.clone(), tasks.clone());
        let future = boxed(None, async move {
            let _resets = resets;
            future.await
        });
        let recorded = tasks.spawn_owned(id, tasks_max, future).ok_or(SpawnError::Full)?;
        Ok(JoinHandle::new(tasks.clone(), recorded))
    }

    fn join<T: 'static>(
        &self,
        name: Option<Cow<'static, str>>,
        future: impl Future<Output = T> + 'static,
    ) -> JoinHandle<T> {
        let tasks = &self.inner.tasks;
        JoinHandle::new(tasks.clone(), tasks.spawn_recorded(boxed(name, future)))
    }

    /// Runs a function that blocks, such as a query of SQLite or the read of a file, on a thread
    /// apart from the shards, and waits for what it returns.
    ///
    /// The threads belong to the server: at most
    /// [`ServerLimits::blocking_threads_max`](crate::limits::ServerLimits::blocking_threads_max)
    /// for all shards together. None is started before it is needed, and one that was idle for 10 s
    /// ends. Functions beyond wait in a queue of at most
    /// [`ServerLimits::blocking_queue_max`](crate::limits::ServerLimits::blocking_queue_max), first
    /// in, first out. A call costs two allocations.
    ///
    /// The function is handed over at once, also if the future is never awaited. Dropping the
    /// future, as a call does whose connection ends, stops nothing: the function runs to its end,
    /// or waits for its turn, and what it returns is dropped on its thread. At the end of the
    /// server functions that still wait are dropped, and those that run have 5 s; then their
    /// threads are left alone, which the log says.
    ///
    /// Inside a runtime of tokio's ([`Server::runtime`](crate::Server::runtime)) the functions run
    /// on these threads too, where nothing of tokio's is. `tokio::task::spawn_blocking` works there
    /// as well, with threads for each shard and no bound on what waits.
    ///
    /// In a simulation the function runs on the test's thread, after a virtual time that the seed
    /// draws.
    ///
    /// ```
    /// use ringserve::{Cx, Frame, Service};
    ///
    /// struct Files;
    ///
    /// impl Service for Files {
    ///     type Session = ();
    ///     type Error = Box<dyn std::error::Error>;
    ///
    ///     async fn call(&self, cx: &Cx<'_, ()>, path: Frame) -> Result<(), Self::Error> {
    ///         let path = String::from_utf8(path.to_vec())?;
    ///         let content = cx.shard().spawn_blocking(|| std::fs::read(path)).await??;
    ///         cx.reply(&content[..]);
    ///         Ok(())
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    /// [`BlockingError`](crate::task::BlockingError): at once if the queue is full, and later if
    /// the function panicked.
    pub fn spawn_blocking<T: Send + 'static>(
        &self,
        function: impl FnOnce() -> T + Send + 'static,
    ) -> Blocking<T> {
        submit(&**self.blocking(), function, None)
    }

    /// Adds a source of work that no peer asks for and that is too much for a turn: messages for
    /// many connections, a scan, a replica that catches up. Whenever it has something to do,
    /// [ask](Pages::ask) for a page: at the end of a turn, after all calls and tasks, `source` does
    /// as much as the page takes, and returns whether it has more to do. What it queues leaves with
    /// that turn, and then the driver is polled. So a ping waits for at most one page of each turn.
    ///
    /// The pages of a turn have 128 steps together, which sources share: first come, first served,
    /// each an equal share of what is left. They have an eighth of that in a turn that brought as
    /// much as one may, and less after turns of more than 6 ms. A source without work costs a turn
    /// nothing; each costs some 30 bytes and its closure until the end of the shard. A panic is
    /// logged, and the source is asked again when it asks.
    ///
    /// ```
    /// use std::cell::RefCell;
    /// use std::rc::Rc;
    /// use ringserve::{Shard, framing::SharedPayload, handle::LocalHandle, task::Pages};
    ///
    /// /// Says goodbye to any number of connections.
    /// fn farewell(shard: &Shard, all: Rc<RefCell<Vec<LocalHandle>>>) -> Pages {
    ///     let goodbye = SharedPayload::new("goodbye");
    ///     shard.pages(move |page| {
    ///         let mut left = all.borrow_mut();
    ///         while !left.is_empty() && page.take(goodbye.payload().len()) {
    ///             left.pop().map(|handle| handle.push_shared(&goodbye));
    ///         }
    ///         !left.is_empty()
    ///     })
    /// }
    /// ```
    pub fn pages(&self, source: impl FnMut(&mut Page) -> bool + 'static) -> Pages {
        self.inner.pages.add(Box::new(source))
    }

    pub(crate) fn page_sources(&self) -> &PageSources {
        &self.inner.pages
    }

    pub(crate) fn blocking(&self) -> &Arc<dyn Pool> {
        self.inner.server.blocking()
    }

    pub(crate) fn upstream_requests(&self) -> &Requests {
        &self.inner.upstreams
    }

    /// The time now on the clock of this server's shards, which all of them share. It costs a look
    /// at the system's clock, 20 ns or so.
    ///
    /// A service that measures or expires by this clock runs in a simulation too, where time jumps;
    /// one that asks [`std::time::Instant`] does not.
    ///
    /// ```
    /// # use ringserve::{Shard, time::Time};
    /// # use std::time::Duration;
    /// fn is_stale(shard: &Shard, written: Time) -> bool {
    ///     shard.now() - written > Duration::from_secs(60)
    /// }
    /// ```
    pub fn now(&self) -> Time {
        self.inner.timers.now()
    }

    /// The demand on this shard in relation to its capacity.
    pub fn load(&self) -> Load {
        self.inner.remote.load.get().load()
    }

    /// The load, for the share of all questions that is to be shed now. Which of them were is
    /// [noted](Shard::note_shed).
    #[inline]
    pub(crate) fn sheds(&self) -> Option<Load> {
        let now = self.inner.remote.load.get();
        (now.sheds() && self.draws(now)).then(|| now.load())
    }

    /// True for the share of all frames that is to be shed under a load.
    #[cold]
    pub(crate) fn draws(&self, load: LoadNow) -> bool {
        self.inner.pace.draws(load, self.random())
    }

    /// A frame, or a request, was shed for which that was so.
    #[cold]
    pub(crate) fn note_shed(&self) {
        self.inner.pace.note_shed();
    }

    /// Decides what is shed.
    pub(crate) fn pace(&self) -> &Pace {
        &self.inner.pace
    }

    /// A random number, of which all 64 bits are as likely set as not. It costs some nanoseconds
    /// and no system call. Not for keys and other secrets: who sees one number can tell the next.
    ///
    /// Each shard has its own numbers. In a simulation the seed decides them.
    pub fn random(&self) -> u64 {
        self.inner.random.next()
    }

    /// Sleeps for at least `time`; may overshoot by about 1 ms.
    pub fn sleep(&self, time: Duration) -> Sleep {
        self.inner.timers.sleep(time)
    }

    /// Ticks each `period`: the first time at once, then at whole periods after that.
    ///
    /// Ticks that were missed are skipped, and do not move later ones. A period below 1 ms
    /// counts as 1 ms: timers are no finer.
    ///
    /// ```
    /// # use ringserve::Shard;
    /// # use std::time::Duration;
    /// fn report_each_minute(shard: &Shard) {
    ///     let mut minutes = shard.interval(Duration::from_secs(60));
    ///     shard.spawn(async move {
    ///         loop {
    ///             let at = minutes.tick().await;
    ///             tracing::info!("alive for {} min", at.as_millis() / 60_000);
    ///         }
    ///     });
    /// }
    /// ```
    pub fn interval(&self, period: Duration) -> Interval {
        self.inner.timers.interval(period)
    }

    /// Runs a future for `time` at most, and drops it then. One that does not wait costs no timer
    /// and no look at the clock.
    ///
    /// # Errors
    /// [`Elapsed`](crate::time::Elapsed) if the time was over first.
    #[inline]
    pub fn timeout<F: Future>(&self, time: Duration, future: F) -> Timeout<'_, F> {
        Timeout::new(&self.inner.timers, time, future)
    }

    /// Waits until all services of all shards are there, and peers are let in; at once if they are.
    /// For a task that a factory spawns and that speaks to other shards: it runs as soon as the
    /// factories returned, while [futures](crate::from_future()) of theirs may still read files.
    /// What it asks through a [`Mesh`](crate::sync::Mesh) before is handled by a shard whose
    /// service is not there.
    ///
    /// ```no_run
    /// # use ringserve::factory::from_future;
    /// # use ringserve::{Cx, Frame, Server, Service, Shard, framing::Lines, sync::Mesh};
    /// # struct Store;
    /// # impl Service for Store {
    /// #     type Session = ();
    /// #     type Error = std::convert::Infallible;
    /// #     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
    /// #         cx.reply(frame);
    /// #         Ok(())
    /// #     }
    /// # }
    /// # async fn read_log(shard: Shard) -> std::io::Result<Store> { Ok(Store) }
    /// /// Tells all shards each second, the first time when the last of them has read its log.
    /// fn tick(shard: &Shard, ticks: &Mesh<()>) {
    ///     let (shard, ticks) = (shard.clone(), ticks.clone());
    ///     shard.clone().spawn(async move {
    ///         shard.started().await?;
    ///         let mut seconds = shard.interval(std::time::Duration::from_secs(1));
    ///         loop {
    ///             seconds.tick().await;
    ///             ticks.ask_all(|_shard| ()).await;
    ///         }
    /// #       #[allow(unreachable_code)]
    /// #       Ok::<(), ringserve::sync::NotStarted>(())
    ///     });
    /// }
    ///
    /// # fn main() -> Result<(), ringserve::Error> {
    /// let ticks = Mesh::default();
    /// Server::bind("127.0.0.1:7000").framing(Lines::default()).serve(move |shard| {
    ///     ticks.register(shard, |_from, ()| ());
    ///     tick(shard, &ticks);
    ///     from_future(read_log(shard.clone()))
    /// })
    /// # }
    /// ```
    ///
    /// A service's own future must not await this: it is one of those that are waited for.
    ///
    /// # Errors
    /// [`NotStarted`](crate::sync::NotStarted) where a factory of another shard fails, or a future
    /// of one, and where the server is stopped before. The task is dropped then, as all are at the
    /// end of a shard.
    pub fn started(&self) -> Started {
        self.inner.start.wait()
    }

    /// The start is over: the server serves, or ends. Wakes the tasks that waited for this, of
    /// which a waker may panic.
    pub(crate) fn end_start(&self, is_there: bool) -> Result<(), Panicked> {
        self.inner.start.end(is_there)
    }

    /// True from the order to shut down on, also while the server goes on as before for
    /// [`ServerLimits::drain_delay`](crate::limits::ServerLimits::drain_delay): the answer for a
    /// readiness probe.
    pub fn is_draining(&self) -> bool {
        self.inner.draining.has_begun()
    }

    /// Waits for the order to shut down; returns at once if it was given already, also while the
    /// server goes on as before for
    /// [`ServerLimits::drain_delay`](crate::limits::ServerLimits::drain_delay). For tasks that have
    /// to say goodbye; a connection has [`Stream::draining`](crate::Stream::draining). A drain
    /// waits for what is owed, up to
    /// [`ServerLimits::drain_timeout`](crate::limits::ServerLimits::drain_timeout).
    pub fn draining(&self) -> Draining {
        Draining::of(&self.inner.draining)
    }

    /// Waits until no connection of the service with this [name](crate::listen::Endpoints::name) is
    /// left on any shard, in the drain of the server: from then on it gets none. For tasks that
    /// have to outlive its clients, such as a stream of what they wrote to a replica. It does not
    /// return before the order to shut down, and returns at the latest when
    /// [`ServerLimits::drain_timeout`](crate::limits::ServerLimits::drain_timeout) resets what is
    /// left. In a connection of that service itself it waits until then.
    ///
    /// ```no_run
    /// use std::time::Duration;
    ///
    /// use ringserve::listen::tcp;
    /// use ringserve::{Cx, Frame, Server, Service, Shard, Stream, framing::Lines, stream};
    /// # struct Store;
    /// # impl Service for Store {
    /// #     type Session = ();
    /// #     type Error = std::convert::Infallible;
    /// #     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
    /// #         cx.reply(frame);
    /// #         Ok(())
    /// #     }
    /// # }
    /// # async fn send_what_is_new(stream: &mut Stream) -> std::io::Result<()> { Ok(()) }
    ///
    /// /// A replica follows, and has the last record of the last client.
    /// async fn replicate(shard: Shard, mut stream: Stream) -> Result<(), Box<dyn std::error::Error>> {
    ///     let mut no_clients = shard.service_ended("clients")?;
    ///     while shard.timeout(Duration::from_millis(20), &mut no_clients).await.is_err() {
    ///         send_what_is_new(&mut stream).await?;
    ///     }
    ///     send_what_is_new(&mut stream).await?;
    ///     Ok(())
    /// }
    ///
    /// # fn main() -> Result<(), ringserve::Error> {
    /// let clients = tcp("0.0.0.0:7000").framing(Lines::default()).name("clients");
    /// let replica = tcp("10.0.0.1:7001").name("replica");
    /// Server::new()
    ///     .service(clients, |_shard| Store)
    ///     .service(replica, |shard| {
    ///         let shard = shard.clone();
    ///         stream(move |stream| replicate(shard.clone(), stream))
    ///     })
    ///     .serve()
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`UnknownService`](crate::sync::UnknownService) if no service has this name, at once: in a
    /// factory it ends the start.
    pub fn service_ended(&self, name: &str) -> Result<ServiceEnded, UnknownService> {
        self.inner.ends.wait(name)
    }

    /// Waits until the connections of the service are ended by the drain of the server; at once if
    /// they are. That is after
    /// [`ServerLimits::drain_delay`](crate::limits::ServerLimits::drain_delay), in which they are
    /// served as before, and after the [services](crate::listen::Endpoints::drains_after) that come
    /// first. For what serves connections, such as a pool to other servers.
    pub fn stopping(&self) -> Draining {
        Draining::of(self.inner.ends.leaving(self.service.into()))
    }

    /// True once [`stopping`](Shard::stopping) has nothing to wait for.
    pub fn is_stopping(&self) -> bool {
        self.inner.ends.leaving(self.service.into()).has_begun()
    }

    /// The moment at which connections that end by themselves do so, after the
    /// [order](Shard::stopping).
    #[cfg(feature = "http")]
    pub(crate) fn moment(&self) -> Moment {
        self.inner.ends.moment()
    }

    /// The services in the drain.
    pub(crate) fn ends(&self) -> &ServiceEnds {
        &self.inner.ends
    }

    pub(crate) fn set_core(&self, core: &Rc<ShardShared>) {
        let _ = self.inner.core.set(core.clone());
        self.inner.pages.begin(core);
    }

    /// True if what peers sent and took while the shard was away may wait in the kernel: no limit
    /// on what they do is judged meanwhile.
    #[cfg(feature = "http")]
    pub(crate) fn is_behind(&self) -> bool {
        self.inner.core.get().is_some_and(|core| core.is_behind())
    }

    /// Wakes the tasks that waited for this, of which a waker may panic.
    pub(crate) fn set_draining(&self) -> Result<(), Panicked> {
        self.inner.draining.begin()
    }

    pub(crate) fn remote(&self) -> &Arc<ShardRemote> {
        &self.inner.remote
    }

    pub(crate) fn tasks(&self) -> &LocalTasks {
        &self.inner.tasks
    }

    pub(crate) fn awaited(&self) -> &Awaited {
        &self.inner.awaited
    }

    pub(crate) fn timers(&self) -> &Timers {
        &self.inner.timers
    }

    pub(crate) fn add_mailbox(&self, mailbox: ReadMailbox) {
        self.inner.mailboxes.borrow_mut().push(mailbox);
    }

    /// Has messages handled. True if there are more. If a handler panicked, there may be; the other
    /// mailboxes were read.
    pub(crate) fn read_mailboxes(&self) -> Result<bool, Panicked> {
        let mut mailboxes = std::mem::take(&mut *self.inner.mailboxes.borrow_mut());
        let mut left = Ok(false);
        for read in &mut mailboxes {
            left = match (left, guard(read)) {
                (Ok(left), Ok(more)) => Ok(left | more),
                (Err(panicked), _) | (_, Err(panicked)) => Err(panicked),
            };
        }
        let mut new = self.inner.mailboxes.borrow_mut();
        mailboxes.append(&mut new);
        *new = mailboxes;
        left
    }

    /// Drops what may hold this handle, so that nothing outlives the shard.
    pub(crate) fn end(&self) {
        let _ = self.end_start(false);
        let mailboxes = std::mem::take(&mut *self.inner.mailboxes.borrow_mut());
        let _ = guard(move || drop(mailboxes));
        self.inner.tasks.clear();
        self.inner.awaited.clear();
        self.inner.pages.clear();
        for value in self.inner.shared.take() {
            let _ = guard(move || drop(value));
        }
    }
}

impl KeyTaker for Shard {
    fn now(&self) -> Time {
        Shard::now(self)
    }

    fn is_simulated(&self) -> bool {
        self.inner.timers.clock().is_simulated()
    }

    fn random_seed(&self) -> u64 {
        self.random()
    }

    fn used_rates(&self) -> &UsedKeyRates {
        self.inner.server.key_rates()
    }
}

impl fmt::Debug for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shard").field("index", &self.index()).field("count", &self.count()).finish()
    }
}
