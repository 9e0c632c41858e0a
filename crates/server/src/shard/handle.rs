use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::attempts::Requests;
use super::clock::Clock;
use super::draining::{DrainFlag, Draining};
use super::inbox::RemoteShard;
use super::random::Random;
use super::spawned::LocalTasks;
use ringserve_core::Time;

use super::timers::{Sleep, Timeout, Timers};
use crate::guard::{Panicked, guard};
use crate::server::running::ServerControl;

/// A shard as the code on its own thread sees it: its factory, and handlers by way of
/// [`Cx::shard`](crate::Cx::shard). Clones are handles on the same shard.
#[derive(Clone)]
pub struct Shard {
    inner: Rc<Inner>,
}

/// Handles messages that other shards left, as many as a turn has room for. True if there are more.
pub(crate) type ReadMailbox = Box<dyn FnMut() -> bool>;

struct Inner {
    index: usize,
    server: ServerControl,
    tasks: LocalTasks,
    timers: Timers,
    random: Random,
    remote: Arc<RemoteShard>,
    mailboxes: RefCell<Vec<ReadMailbox>>,
    draining: DrainFlag,
    /// Its [`drain_delay`](crate::limits::ServerLimits::drain_delay) is over.
    stopping: DrainFlag,
    upstreams: Requests,
}

impl Shard {
    pub(crate) fn new(
        index: usize,
        remote: Arc<RemoteShard>,
        server: ServerControl,
        clock: Clock,
        random: Random,
    ) -> Shard {
        let timers = Timers::new(clock);
        let inner = Inner {
            index,
            server,
            tasks: LocalTasks::new(index, remote.clone(), timers.clone()),
            timers,
            random,
            remote,
            mailboxes: RefCell::default(),
            draining: DrainFlag::default(),
            stopping: DrainFlag::default(),
            upstreams: Requests::default(),
        };
        Shard { inner: Rc::new(inner) }
    }

    /// Which shard this is, from 0.
    pub fn index(&self) -> usize {
        self.inner.index
    }

    /// How many shards the server has.
    pub fn count(&self) -> usize {
        self.inner.server.remotes().len()
    }

    /// The server of this shard: its figures, and its end. In a factory it is there already; the figures begin once every shard
    /// is ready.
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

    /// Runs a future on this shard until it is done or the shard ends. It need not be `Send`, and can share
    /// `Rc`s with the service. A panic in it ends it alone.
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        let _named = self.inner.tasks.spawn(Box::pin(future));
    }

    pub(crate) fn upstream_requests(&self) -> &Requests {
        &self.inner.upstreams
    }

    /// The time now on the clock of this server's shards, which all of them share. It costs a look at the system's
    /// clock, 20 ns or so.
    ///
    /// A service that measures or expires by this clock runs in a simulation too, where time jumps; one that asks
    /// [`std::time::Instant`] does not.
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

    /// A random number, of which all 64 bits are as likely set as not. It costs some nanoseconds and no system call. Not for
    /// keys and other secrets: who sees one number can tell the next.
    ///
    /// Each shard has numbers of its own. In a simulation the seed decides them.
    pub fn random(&self) -> u64 {
        self.inner.random.next()
    }

    /// Sleeps for at least `time`; may overshoot by about 1 ms.
    pub fn sleep(&self, time: Duration) -> Sleep {
        self.inner.timers.sleep(time)
    }

    /// Runs a future for `time` at most, and drops it then. One that does not wait costs no timer and no look at the
    /// clock.
    ///
    /// # Errors
    /// [`Elapsed`](crate::time::Elapsed) if the time was over first.
    #[inline]
    pub fn timeout<F: Future>(&self, time: Duration, future: F) -> Timeout<'_, F> {
        Timeout::new(&self.inner.timers, time, future)
    }

    /// True once the server was told to shut down, also while it goes on as before for
    /// [`ServerLimits::drain_delay`](crate::limits::ServerLimits::drain_delay): what a readiness probe should answer by.
    pub fn is_draining(&self) -> bool {
        self.inner.draining.has_begun()
    }

    /// Waits until the server is told to shut down; at once if it was already, also while it goes on as before for
    /// [`ServerLimits::drain_delay`](crate::limits::ServerLimits::drain_delay). For tasks and [streams](crate::Stream) that have to
    /// say goodbye: a drain waits for what is owed, up to [`ServerLimits::drain_timeout`](crate::limits::ServerLimits::drain_timeout).
    pub fn draining(&self) -> Draining {
        self.inner.draining.wait()
    }

    /// Waits until the drain delay is over: until then connections are served as before.
    #[cfg(feature = "http")]
    pub(crate) fn stopping(&self) -> Draining {
        self.inner.stopping.wait()
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.inner.stopping.has_begun()
    }

    /// Wakes the tasks that waited for this, of which a waker may panic.
    pub(crate) fn set_stopping(&self) -> Result<(), Panicked> {
        self.inner.stopping.begin()
    }

    /// Wakes the tasks that waited for this, of which a waker may panic.
    pub(crate) fn set_draining(&self) -> Result<(), Panicked> {
        self.inner.draining.begin()
    }

    pub(crate) fn remote(&self) -> &Arc<RemoteShard> {
        &self.inner.remote
    }

    pub(crate) fn tasks(&self) -> &LocalTasks {
        &self.inner.tasks
    }

    pub(crate) fn timers(&self) -> &Timers {
        &self.inner.timers
    }

    pub(crate) fn add_mailbox(&self, mailbox: ReadMailbox) {
        self.inner.mailboxes.borrow_mut().push(mailbox);
    }

    /// Has messages handled. True if there are more. If a handler panicked, there may be.
    pub(crate) fn read_mailboxes(&self) -> Result<bool, Panicked> {
        let mut mailboxes = std::mem::take(&mut *self.inner.mailboxes.borrow_mut());
        let left = guard(|| mailboxes.iter_mut().fold(false, |left, read| left | read()));
        let mut new = self.inner.mailboxes.borrow_mut();
        mailboxes.append(&mut new);
        *new = mailboxes;
        left
    }

    /// Drops what may hold this handle, so that nothing outlives the shard.
    pub(crate) fn end(&self) {
        let mailboxes = std::mem::take(&mut *self.inner.mailboxes.borrow_mut());
        let _ = guard(move || drop(mailboxes));
        self.inner.tasks.clear();
    }
}

impl fmt::Debug for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shard").field("index", &self.index()).field("count", &self.count()).finish()
    }
}
