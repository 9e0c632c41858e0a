//! A shard for other threads: requests to it, its order, and its last report.

use std::cell::Cell;
use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Wake, Waker};
use std::time::Duration;

use bytes::Bytes;
use ringserve_base::clock::Deadline;
use ringserve_base::guard::guard;
use ringserve_base::thread_times::ThreadTimes;
use ringserve_core::{ConnId, RemoteGate, Time};

use super::awaited::AwaitedEvent;
use super::notice::Notify;
use super::wake::{Attention, InboxContents, Queued, ShardInbox, ShardSleep, WakeNeed};
use crate::inspect::Walk;
use crate::overload::SharedLoad;
use crate::snapshot::Snapshot;
use crate::stats::{ServiceNames, ShardStats};
use crate::watch::alarm::Alarm;
use crate::watch::board::Watch;
use crate::watch::state::State;

/// The number of a shard, with an identity that no shard of another server has.
type ThisShard = (usize, *const ShardRemote);

thread_local! {
    /// The shard that this thread is.
    static THIS_SHARD: Cell<Option<ThisShard>> = const { Cell::new(None) };
}

/// Makes this thread a shard's from now on.
pub(crate) fn enter_shard(index: usize, remote: &Arc<ShardRemote>) {
    THIS_SHARD.set(Some((index, Arc::as_ptr(remote))));
}

/// Makes this thread no shard's again.
#[cfg(feature = "testing")]
pub(crate) fn leave_shard() {
    THIS_SHARD.set(None);
}

/// The shard that this thread is, of any server: it must not be blocked.
#[inline]
pub(crate) fn this_shard() -> Option<ThisShard> {
    // Gone in a destructor of another thread-local, which no shard runs in its turns.
    THIS_SHARD.try_with(Cell::get).unwrap_or(None)
}

/// An observer that is called when a shard ends.
pub(crate) trait OnEnd: Send + Sync {
    /// Called after the shard ended, or if it will never run. On its thread, where user code may
    /// still follow.
    fn shard_ended(&self);
}

/// The order to a shard. Later ones replace earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Command {
    Serve = 0,
    Drain = 1,
    Abort = 2,
}

/// A request of another thread to a shard.
pub(crate) enum ShardRequest {
    /// One frame for a connection, or bytes as they are.
    Push { id: ConnId, gate: Arc<RemoteGate>, payload: Bytes, is_framed: bool },
    /// The end of a connection, after its queued replies.
    Close { id: ConnId },
    /// The end of a connection, at once.
    Abort { id: ConnId },
    /// A task waits for something of a connection.
    Await { id: ConnId, until: AwaitedEvent, notify: Notify },
    /// A socket for which another shard had no room.
    Socket { socket: OwnedFd, peer: Option<SocketAddr>, listener: u16 },
    /// The next page of an inspection.
    Inspect(Box<Walk>),
    /// The limits on memory changed.
    Memory { held_bytes_max: usize, receive_bytes_max: usize },
}

impl ShardRequest {
    /// Bytes that a push counts as on its way: the entry too, so that empty pushes are bounded as
    /// well.
    pub(crate) fn bytes_of(payload: &Bytes) -> usize {
        payload.len() + size_of::<ShardRequest>()
    }
}

/// Requests to a shard since its last turn began.
pub(crate) type Delivery = InboxContents<ShardRequest>;

/// Watches calls to a shard.
#[cfg(feature = "testing")]
pub(crate) type OnCall = Arc<dyn Fn() + Send + Sync>;

/// A shard as other threads see it.
pub(crate) struct ShardRemote {
    inbox: ShardInbox<ShardRequest>,
    command: AtomicU8,
    /// Connections the shard's table has room for.
    room: AtomicUsize,
    driver: OnceLock<Waker>,
    runtime: RuntimeWaker,
    calls: CallObserver,
    reports: Mutex<Reports>,
    reported: Condvar,
    /// Set when the shard is made.
    snapshot: OnceLock<Arc<Snapshot>>,
    /// The system's number of the shard's thread; 0 before its start and after its end, and in a
    /// simulation.
    thread: AtomicU32,
    /// The file in which the kernel counts the thread's times, from the first question for them on.
    times: OnceLock<File>,
    /// The demand on it, as the watchdog sees it.
    pub(crate) load: SharedLoad,
    /// The shard asked others something, which was not forgotten.
    has_asked: AtomicBool,
    /// It runs inside a runtime, whose tasks run between its turns.
    is_hosted: AtomicBool,
    /// Set once there is a watchdog.
    watch: OnceLock<Arc<Watch>>,
    /// `None` once the shard ended.
    on_end: Mutex<Option<Vec<Arc<dyn OnEnd>>>>,
    /// The services as bits that have no connection left on it, in a drain; all of them once it
    /// ended.
    ended_services: AtomicU32,
}

/// The runtime inside which a shard runs, if there is one: it wakes the shard instead of the
/// driver, which does not block then.
#[derive(Default)]
struct RuntimeWaker {
    #[cfg(feature = "runtime-tokio")]
    waker: Mutex<Option<Waker>>,
}

/// The observer of each call, on the thread that makes it: a simulation, in which one thread makes
/// them all.
#[derive(Default)]
struct CallObserver {
    #[cfg(feature = "testing")]
    on_call: OnceLock<OnCall>,
}

impl CallObserver {
    #[cfg(feature = "testing")]
    fn called(&self) {
        if let Some(on_call) = self.on_call.get() {
            on_call();
        }
    }

    #[cfg(not(feature = "testing"))]
    #[inline]
    fn called(&self) {}
}

/// Reports asked for and answered, both counted.
#[derive(Default)]
struct Reports {
    asked: u64,
    answered: u64,
    last: ShardStats,
    /// The shard ended without a last report: no other one comes.
    ended: bool,
}

impl ShardRemote {
    pub(crate) fn new() -> Arc<ShardRemote> {
        Arc::new(ShardRemote {
            inbox: ShardInbox::new(),
            command: AtomicU8::new(Command::Serve as u8),
            room: AtomicUsize::new(0),
            driver: OnceLock::new(),
            runtime: RuntimeWaker::default(),
            calls: CallObserver::default(),
            reports: Mutex::default(),
            reported: Condvar::new(),
            snapshot: OnceLock::new(),
            thread: AtomicU32::new(0),
            ended_services: AtomicU32::new(0),
            times: OnceLock::new(),
            load: SharedLoad::default(),
            has_asked: AtomicBool::new(false),
            is_hosted: AtomicBool::new(false),
            watch: OnceLock::new(),
            on_end: Mutex::new(Some(Vec::new())),
        })
    }

    /// Sets the observer of each call.
    #[cfg(feature = "testing")]
    pub(crate) fn set_on_call(&self, on_call: OnCall) {
        let _ = self.calls.on_call.set(on_call);
    }

    pub(crate) fn set_driver(&self, waker: Waker) {
        let _ = self.driver.set(waker);
    }

    /// Gives the shard an order, unless it has a stronger one already.
    pub(crate) fn command(&self, command: Command) {
        self.command.fetch_max(command as u8, Ordering::SeqCst);
        self.call(Attention::COMMAND);
    }

    /// Makes the shard take a turn, since another one has news.
    pub(crate) fn look_again(&self) {
        self.call(Attention::COMMAND);
    }

    /// Notes, on the shard, that these services have no connection left here, and will have none.
    /// True if that is new.
    pub(crate) fn services_end(&self, services: u32) -> bool {
        let before = self.ended_services.fetch_or(services, Ordering::SeqCst);
        before | services != before
    }

    /// The services that have no connection left here.
    pub(crate) fn ended_services(&self) -> u32 {
        self.ended_services.load(Ordering::SeqCst)
    }

    pub(crate) fn last_command(&self) -> Command {
        match self.command.load(Ordering::SeqCst) {
            0 => Command::Serve,
            1 => Command::Drain,
            _ => Command::Abort,
        }
    }

    /// The place, on the shard, where it publishes its figures, which are those of services with
    /// these names.
    pub(crate) fn publishes(&self, names: &ServiceNames) -> &Arc<Snapshot> {
        self.snapshot.get_or_init(|| Arc::new(Snapshot::new(names.clone())))
    }

    /// The figures that the shard published last, if it was made. A shard that ended may have made
    /// a later report.
    pub(crate) fn snapshot(&self) -> Option<&Snapshot> {
        self.snapshot.get().map(|snapshot| &**snapshot)
    }

    /// Sets, on the shard's thread, its number as it begins, and 0 as it ends.
    pub(crate) fn set_thread(&self, thread: u32) {
        self.thread.store(thread, Ordering::Relaxed);
    }

    /// The number of the shard's thread, while it runs.
    pub(crate) fn thread(&self) -> Option<u32> {
        Some(self.thread.load(Ordering::Relaxed)).filter(|thread| *thread != 0)
    }

    /// The state of the shard: whether it waits, and when its turn began.
    pub(crate) fn state(&self) -> State {
        // Read before the turn: a shard that is seen awake stored its turn before.
        let sleep = self.inbox.sleep();
        let Some(last) = self.snapshot().and_then(Snapshot::last_turn) else {
            return State::Waits(Time::ZERO);
        };
        match sleep {
            ShardSleep::Awake => State::Turn(last),
            ShardSleep::Called if self.is_hosted() => State::Called(last),
            ShardSleep::Asleep | ShardSleep::Called => State::Waits(last),
        }
    }

    /// True if it is in a turn of this length, or more.
    pub(crate) fn is_in_turn_for(&self, time: Duration, now: Time) -> bool {
        matches!(self.state(), State::Turn(began) if now - began >= time)
    }

    /// Sets the watchdog that is woken from now on.
    pub(crate) fn set_watch(&self, watch: &Arc<Watch>) {
        let _ = self.watch.set(watch.clone());
    }

    /// The times of the shard's thread, while it runs. `None` where the kernel does not count them.
    pub(crate) fn times(&self) -> Option<ThreadTimes> {
        let thread = self.thread()?;
        let file = match self.times.get() {
            Some(file) => file,
            // One that cannot be opened now may be later, as when the process has descriptors
            // again.
            None => {
                let file = ThreadTimes::file(thread)?;
                self.times.get_or_init(|| file)
            }
        };
        ThreadTimes::read(file)
    }

    /// True if a watchdog may rest as far as this shard goes: the shard waits and wakes it then, or
    /// its thread ended. A shard that did not begin its first turn wakes no watchdog.
    pub(crate) fn lets_watchdog_rest(&self) -> bool {
        self.inbox.watch() || self.thread().is_none()
    }

    /// The alarm of the watchdog, if there is one.
    pub(crate) fn alarm(&self) -> Option<&Alarm> {
        self.watch.get()?.alarm()
    }

    /// On a shard inside a runtime, before its first turn.
    #[cfg(feature = "runtime-tokio")]
    pub(crate) fn set_hosted(&self) {
        self.is_hosted.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_hosted(&self) -> bool {
        self.is_hosted.load(Ordering::Relaxed)
    }

    /// The figures that the shard published last, and its last ones once it ended. It is not asked.
    pub(crate) fn published(&self) -> ShardStats {
        let reports = self.reports();
        if reports.answered == u64::MAX {
            return reports.last.clone();
        }
        let ended = reports.ended;
        drop(reports);
        let stats = self.snapshot().map(Snapshot::read).unwrap_or_default();
        ShardStats { stale: ended, ..stats }
    }

    /// True if there are figures of it.
    #[cfg(feature = "admin")]
    pub(crate) fn has_published(&self) -> bool {
        self.snapshot().is_some_and(|snapshot| snapshot.publication() > 0)
    }

    /// Asks for a report, and returns the number by which
    /// [`latest_report`](ShardRemote::latest_report) knows it.
    pub(crate) fn ask_report(&self) -> u64 {
        let mut reports = self.reports();
        reports.asked += 1;
        let number = reports.asked;
        drop(reports);
        self.call(Attention::REPORT);
        number
    }

    /// A report made after that number was asked for, if it comes before the deadline; else what
    /// the shard [published](ShardRemote::published) last, marked as stale. A shard's own thread
    /// does not wait for it.
    pub(crate) fn latest_report(&self, number: u64, deadline: Deadline) -> ShardStats {
        let waits = this_shard().is_none();
        let reports = deadline.wait_while(&self.reported, self.reports(), |reports| {
            waits && reports.answered < number && !reports.ended
        });
        if reports.answered >= number {
            return reports.last.clone();
        }
        drop(reports);
        ShardStats { stale: true, ..self.published() }
    }

    /// Answers, on the shard, all that asked so far.
    pub(crate) fn report(&self, report: ShardStats) {
        let mut reports = self.reports();
        reports.answered = reports.asked;
        reports.last = report;
        self.reported.notify_all();
    }

    /// Leaves, on the shard, the last report for callers that still wait and later ones.
    pub(crate) fn last_report(&self, report: ShardStats) {
        let mut reports = self.reports();
        reports.answered = u64::MAX;
        reports.last = report;
        self.reported.notify_all();
    }

    fn reports(&self) -> MutexGuard<'_, Reports> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls the shard, on its thread, after user code did something outside of a turn, which only
    /// a hosted shard's can.
    #[cfg(feature = "runtime-tokio")]
    #[inline]
    pub(crate) fn wake_if_asleep(&self) {
        // It is this thread that falls asleep.
        if self.inbox.is_asleep() {
            self.call(Attention::TOUCHED);
        }
    }

    /// A waker that does the same as [`wake_if_asleep`](ShardRemote::wake_if_asleep).
    #[cfg(feature = "runtime-tokio")]
    pub(crate) fn outside(self: &Arc<ShardRemote>) -> Waker {
        Waker::from(Arc::new(Outside(self.clone())))
    }

    /// Sets the host that wakes the shard from now on.
    #[cfg(feature = "runtime-tokio")]
    pub(crate) fn set_host(&self, waker: &Waker) {
        let mut host = self.runtime.waker.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *host {
            Some(host) => host.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
    }

    /// Wakes the host if there is one. True if it was woken.
    #[cfg(feature = "runtime-tokio")]
    fn wake_host(&self) -> bool {
        let host = self.runtime.waker.lock().unwrap_or_else(PoisonError::into_inner).clone();
        // A task of the runtime may keep the shard from leaving its wait.
        if host.is_some()
            && self.inbox.take_watched()
            && let Some(alarm) = self.alarm()
        {
            alarm.ring();
        }
        host.map(Waker::wake).is_some()
    }

    /// Without a runtime there is no host.
    #[cfg(not(feature = "runtime-tokio"))]
    #[inline]
    fn wake_host(&self) -> bool {
        let RuntimeWaker {} = self.runtime;
        false
    }

    /// On the shard's own thread this finds the shard awake and costs no system call, unless it is
    /// hosted.
    fn call(&self, what: Attention) {
        self.rouse(self.inbox.call(what));
    }

    fn rouse(&self, called: WakeNeed) {
        self.calls.called();
        if called == WakeNeed::Awake {
            return;
        }
        if self.wake_host() {
            return;
        }
        if let Some(driver) = self.driver.get() {
            driver.wake_by_ref();
        }
    }

    /// True if the shard may wait: nothing came since [`begin_turn`](ShardRemote::begin_turn).
    pub(crate) fn fall_asleep(&self) -> bool {
        self.inbox.fall_asleep()
    }

    /// On the shard, within its turn: all that it did is published.
    pub(crate) fn all_published(&self) {
        self.inbox.published();
    }

    /// Adds the tasks that were woken since the turn began to `woken`.
    ///
    /// True if any were, or were spawned.
    #[inline]
    pub(crate) fn take_woken(&self, woken: &mut Vec<u32>) -> bool {
        self.inbox.take_tasks(woken)
    }

    /// Adds the letters that came since the turn began to `letters`.
    pub(crate) fn take_letters(&self, letters: &mut Vec<ShardRequest>) {
        self.inbox.take_letters(letters);
    }

    /// On the shard: true if one of `what` was asked for since the turn began. It is not taken.
    #[inline]
    pub(crate) fn has(&self, what: Attention) -> bool {
        self.inbox.has(what)
    }

    /// Notes, on the shard, that it asked shards something.
    pub(crate) fn note_question(&self) {
        self.has_asked.store(true, Ordering::Relaxed);
    }

    /// True, on the shard, if it asked shards something that was not
    /// [forgotten](ShardRemote::forget_questions).
    #[inline]
    pub(crate) fn has_asked(&self) -> bool {
        self.has_asked.load(Ordering::Relaxed)
    }

    /// Forgets, on the shard, that it asked shards something.
    pub(crate) fn forget_questions(&self) {
        self.has_asked.store(false, Ordering::Relaxed);
    }

    /// On the shard: true if that was asked for since the turn began.
    #[inline]
    pub(crate) fn take(&self, what: Attention) -> bool {
        self.inbox.take(what)
    }

    /// Announces that a task of the shard was spawned.
    pub(crate) fn announce_task(&self) {
        self.call(Attention::TASKS);
    }

    /// Announces that user code of the shard asked for something of its upstreams.
    pub(crate) fn announce_upstreams(&self) {
        self.call(Attention::UPSTREAMS);
    }

    /// On the shard: what came since the last turn began. What was brought is added to `post`.
    #[inline]
    pub(crate) fn begin_turn(&self, delivery: &mut Delivery) -> Attention {
        self.inbox.begin_turn(delivery)
    }

    /// Leaves mail for the shard. It comes back if the shard ended.
    pub(crate) fn send(&self, letter: ShardRequest) -> Result<(), ShardRequest> {
        self.inbox.send(letter).map(|called| self.rouse(called))
    }

    /// Registers an observer of the end, which is called at once if the shard ended already.
    pub(crate) fn tell_end(&self, to: Arc<dyn OnEnd>) {
        if let Some(all) = &mut *self.on_end() {
            return all.push(to);
        }
        to.shard_ended();
    }

    fn on_end(&self) -> MutexGuard<'_, Option<Vec<Arc<dyn OnEnd>>>> {
        self.on_end.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the inbox of a shard that ended, and drops everything that was left in it.
    pub(crate) fn close(&self) {
        self.set_room(0);
        self.services_end(u32::MAX);
        if let Some(snapshot) = self.snapshot() {
            snapshot.end();
        }
        for letter in self.inbox.close() {
            // The owner of a payload's bytes may be user code.
            let _ = guard(move || drop(letter));
        }
        let told = self.on_end().take();
        for told in told.into_iter().flatten() {
            told.shard_ended();
        }
        self.reports().ended = true;
        self.reported.notify_all();
    }

    /// Announces that a mailbox of the shard has messages.
    pub(crate) fn announce_messages(&self) {
        self.call(Attention::MESSAGES);
    }

    /// Sets, on the shard, the number of connections its table has room for.
    pub(crate) fn set_room(&self, room: usize) {
        if self.room.load(Ordering::Relaxed) != room {
            self.room.store(room, Ordering::Relaxed);
        }
    }

    pub(crate) fn room(&self) -> usize {
        self.room.load(Ordering::Relaxed)
    }

    /// Takes room for a connection that another shard passes on to this one, until this one sets
    /// its room again.
    pub(crate) fn take_room(&self) {
        let _ = self.room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |room| room.checked_sub(1));
    }
}

/// See [`ShardRemote::outside`].
#[cfg(feature = "runtime-tokio")]
struct Outside(Arc<ShardRemote>);

#[cfg(feature = "runtime-tokio")]
impl Wake for Outside {
    fn wake(self: Arc<Self>) {
        self.0.wake_if_asleep();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.wake_if_asleep();
    }
}

/// Wakes one task of a shard.
pub(crate) struct TaskWaker {
    remote: Arc<ShardRemote>,
    task: u32,
    queued: Queued,
}

impl TaskWaker {
    pub(crate) fn new(remote: &Arc<ShardRemote>, task: u32) -> Arc<TaskWaker> {
        Arc::new(TaskWaker { remote: remote.clone(), task, queued: Queued::new() })
    }

    /// Counts wakes again from now on, since the task is about to be polled.
    pub(crate) fn taken(&self) {
        self.queued.taken();
    }

    pub(crate) fn waker(self: &Arc<Self>) -> Waker {
        Waker::from(self.clone())
    }
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.queued.list() {
            self.remote.rouse(self.remote.inbox.wake_task(self.task));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_woken_twice_is_listed_once_and_keeps_the_shard_awake() {
        let (remote, mut delivery) = (ShardRemote::new(), Delivery::default());
        let task = TaskWaker::new(&remote, 7);
        let waker = task.waker();
        waker.wake_by_ref();
        waker.wake_by_ref();
        assert!(!remote.fall_asleep());
        assert!(remote.begin_turn(&mut delivery).has(Attention::TASKS));
        assert_eq!(delivery.tasks, [7]);
        task.taken();
        assert!(remote.fall_asleep());
    }

    #[test]
    fn taking_tasks_leaves_everything_else_to_the_next_turn() {
        let (remote, mut woken) = (ShardRemote::new(), Vec::new());
        TaskWaker::new(&remote, 7).waker().wake();
        remote.take_woken(&mut woken);
        assert_eq!(woken, [7]);
        assert!(remote.fall_asleep(), "nothing else came");
        remote.begin_turn(&mut Delivery::default());
        for (call, what) in [
            (
                (|remote: &ShardRemote| drop(remote.send(ShardRequest::Close { id: ConnId::new(1, 1) })))
                    as fn(&ShardRemote),
                Attention::LETTERS,
            ),
            (ShardRemote::announce_messages, Attention::MESSAGES),
            (|remote| remote.command(Command::Drain), Attention::COMMAND),
            (|remote| _ = remote.ask_report(), Attention::REPORT),
        ] {
            call(&remote);
            remote.take_woken(&mut Vec::new());
            assert!(!remote.fall_asleep(), "the next turn looks");
            assert!(remote.begin_turn(&mut Delivery::default()).has(what));
        }
    }

    #[test]
    fn watchdog_rests_while_a_shard_waits_and_once_it_ended() {
        let remote = ShardRemote::new();
        remote.set_thread(7);
        assert!(!remote.lets_watchdog_rest(), "it has not begun its first turn, and wakes no watchdog");
        assert!(remote.fall_asleep());
        assert!(remote.lets_watchdog_rest(), "it waits");
        remote.begin_turn(&mut Delivery::default());
        assert!(!remote.lets_watchdog_rest(), "it works");
        remote.set_thread(0);
        assert!(remote.lets_watchdog_rest(), "it ended");
    }

    #[cfg(feature = "admin")]
    #[test]
    fn shard_that_has_published_nothing_has_no_figures() {
        let remote = ShardRemote::new();
        assert!(!remote.has_published());
        let snapshot = remote.publishes(&ServiceNames::new([("service".into(), 1)])).clone();
        assert!(!remote.has_published());
        drop(snapshot.publish());
        assert!(remote.has_published());
    }

    #[test]
    fn an_order_is_never_taken_back() {
        let remote = ShardRemote::new();
        remote.command(Command::Abort);
        remote.command(Command::Drain);
        assert_eq!(remote.last_command(), Command::Abort);
    }
}
