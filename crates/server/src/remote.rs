//! What reaches a shard from other threads: wakers and orders.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Wake, Waker};
use std::time::Instant;

use bytes::Bytes;
use ringserve_core::{ConnId, Reach};

use crate::running::ShardReport;

/// The shard looks at `woken` and `order` in this turn.
const AWAKE: u8 = 0;
/// It waits in the kernel: a wake-up has to reach it there.
const ASLEEP: u8 = 1;
/// Something came since it last looked.
const NOTIFIED: u8 = 2;

thread_local! {
    /// On a shard's thread: other shards to be woken at the end of its turn, by way of its driver.
    static COLLECTED: RefCell<Option<Vec<ringserve_ring::Waker>>> = const { RefCell::new(None) };
}

/// Wake-ups from this thread wait for [`collected_wakes`] from now on.
pub(crate) fn collect_wakes() {
    COLLECTED.set(Some(Vec::new()));
}

/// Calls `wake` for each shard to be woken.
pub(crate) fn collected_wakes(mut wake: impl FnMut(ringserve_ring::Waker)) {
    COLLECTED.with_borrow_mut(|list| list.iter_mut().flat_map(|list| list.drain(..)).for_each(&mut wake));
}

/// Wake-ups from this thread go out at once again.
pub(crate) fn wake_collected() {
    COLLECTED.take().into_iter().flatten().for_each(|waker| waker.wake());
}

/// What a shard was told to do. Later ones replace earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Order {
    Serve = 0,
    Drain = 1,
    Force = 2,
}

/// What other threads want of a shard.
pub(crate) enum Mail {
    /// One frame for a connection.
    Push { id: ConnId, reach: Arc<Reach>, payload: Bytes },
    /// The end of a connection, after what is queued.
    Close { id: ConnId },
    /// The end of a connection, at once.
    Abort { id: ConnId },
    /// A socket for which another shard had no room.
    Socket { socket: OwnedFd, peer: Option<SocketAddr>, listener: u16 },
}

impl Mail {
    /// What a push counts as on its way: the entry too, so that empty ones are bounded as well.
    pub(crate) fn bytes_of(payload: &Bytes) -> usize {
        payload.len() + size_of::<Mail>()
    }
}

/// What came for a shard since it last looked.
#[derive(Default)]
pub(crate) struct Post {
    /// Tasks to poll.
    pub(crate) woken: Vec<u32>,
    pub(crate) mail: Vec<Mail>,
    /// The shard ended: nobody will look any more.
    closed: bool,
}

/// A shard as other threads see it.
pub(crate) struct Remote {
    state: AtomicU8,
    order: AtomicU8,
    post: Mutex<Post>,
    /// A mailbox of [`Shards`](crate::Shards) has messages.
    messages: AtomicBool,
    /// Connections the shard's table has room for.
    room: AtomicUsize,
    driver: OnceLock<ringserve_ring::Waker>,
    /// Wakes the shard instead of its driver, where that does not block.
    #[cfg(feature = "host-tokio")]
    host: Mutex<Option<Waker>>,
    report_wanted: AtomicBool,
    reports: Mutex<Reports>,
    reported: Condvar,
}

/// Reports asked for and answered, both counted.
#[derive(Default)]
struct Reports {
    asked: u64,
    answered: u64,
    last: Option<ShardReport>,
}

impl Remote {
    pub(crate) fn new() -> Arc<Remote> {
        Arc::new(Remote {
            state: AtomicU8::new(AWAKE),
            order: AtomicU8::new(Order::Serve as u8),
            post: Mutex::default(),
            messages: AtomicBool::new(false),
            room: AtomicUsize::new(0),
            driver: OnceLock::new(),
            #[cfg(feature = "host-tokio")]
            host: Mutex::default(),
            report_wanted: AtomicBool::new(false),
            reports: Mutex::default(),
            reported: Condvar::new(),
        })
    }

    pub(crate) fn set_driver(&self, waker: ringserve_ring::Waker) {
        let _ = self.driver.set(waker);
    }

    /// Tells the shard something, unless it was told more already.
    pub(crate) fn order(&self, order: Order) {
        self.order.fetch_max(order as u8, Ordering::SeqCst);
        self.notify();
    }

    pub(crate) fn ordered(&self) -> Order {
        match self.order.load(Ordering::SeqCst) {
            0 => Order::Serve,
            1 => Order::Drain,
            _ => Order::Force,
        }
    }

    /// Asks for a report, and returns the number by which [`wait_report`](Remote::wait_report) knows it.
    pub(crate) fn ask_report(&self) -> u64 {
        let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        reports.asked += 1;
        let number = reports.asked;
        drop(reports);
        self.report_wanted.store(true, Ordering::SeqCst);
        self.notify();
        number
    }

    /// A report made after that number was asked for, if it comes before the deadline.
    pub(crate) fn wait_report(&self, number: u64, deadline: Instant) -> Option<ShardReport> {
        let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        while reports.answered < number {
            let left = deadline.checked_duration_since(Instant::now())?;
            reports = self.reported.wait_timeout(reports, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        reports.last.clone()
    }

    /// On the shard: the number of the last report asked for, if one was since the last call.
    pub(crate) fn report_wanted(&self) -> Option<u64> {
        if !self.report_wanted.load(Ordering::Relaxed) {
            return None;
        }
        self.report_wanted.store(false, Ordering::SeqCst);
        Some(self.reports.lock().unwrap_or_else(PoisonError::into_inner).asked)
    }

    /// Answers everybody up to that number.
    pub(crate) fn report(&self, number: u64, report: ShardReport) {
        let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        reports.answered = number;
        reports.last = Some(report);
        self.reported.notify_all();
    }

    /// On the shard, when user code did something outside of a turn, which only a hosted shard's can.
    #[inline]
    pub(crate) fn wake_if_asleep(&self) {
        // It is this thread that falls asleep.
        if self.state.load(Ordering::Relaxed) == ASLEEP {
            self.notify();
        }
    }

    /// What [`wake_if_asleep`](Remote::wake_if_asleep) does, as a waker.
    #[cfg(feature = "host-tokio")]
    pub(crate) fn outside(self: &Arc<Remote>) -> Waker {
        Waker::from(Arc::new(Outside(self.clone())))
    }

    /// From now on this one wakes the shard.
    #[cfg(feature = "host-tokio")]
    pub(crate) fn set_host(&self, waker: &Waker) {
        let mut host = self.host.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *host {
            Some(host) => host.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
    }

    /// True if that is so, and it was woken.
    #[cfg(feature = "host-tokio")]
    fn wake_host(&self) -> bool {
        let host = self.host.lock().unwrap_or_else(PoisonError::into_inner).clone();
        host.map(Waker::wake).is_some()
    }

    /// On the shard's own thread this finds the shard awake and costs no system call, unless it is hosted.
    fn notify(&self) {
        if self.state.swap(NOTIFIED, Ordering::SeqCst) != ASLEEP {
            return;
        }
        #[cfg(feature = "host-tokio")]
        if self.wake_host() {
            return;
        }
        if let Some(driver) = self.driver.get() {
            let later = COLLECTED
                .with_borrow_mut(|list| list.as_mut().map(|list| list.push(driver.clone())).is_some());
            if !later {
                driver.wake();
            }
        }
    }

    /// True if the shard may wait: nothing came since [`wake_up`](Remote::wake_up).
    pub(crate) fn fall_asleep(&self) -> bool {
        self.state.compare_exchange(AWAKE, ASLEEP, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Swaps the tasks that were woken since the last call with `woken`, which must be empty. Whatever else came is left
    /// for [`wake_up`](Remote::wake_up), and keeps the shard awake until then; `order` is the last one it knows of.
    pub(crate) fn take_woken(&self, woken: &mut Vec<u32>, order: Order) {
        if self.state.load(Ordering::Relaxed) != NOTIFIED {
            return;
        }
        // What was written before the notice is seen from here on.
        self.state.swap(AWAKE, Ordering::SeqCst);
        let mut here = self.post();
        std::mem::swap(&mut here.woken, woken);
        let mail = !here.mail.is_empty();
        drop(here);
        if mail || self.messages.load(Ordering::SeqCst) || self.ordered() != order {
            self.state.store(NOTIFIED, Ordering::SeqCst);
        }
    }

    /// Swaps what came since the last call with `post`, which must be empty. What comes after is noticed by
    /// [`fall_asleep`](Remote::fall_asleep).
    pub(crate) fn wake_up(&self, post: &mut Post) {
        if self.state.swap(AWAKE, Ordering::SeqCst) == NOTIFIED {
            let mut here = self.post();
            std::mem::swap(&mut here.woken, &mut post.woken);
            std::mem::swap(&mut here.mail, &mut post.mail);
        }
    }

    fn post(&self) -> MutexGuard<'_, Post> {
        self.post.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves mail for the shard. It comes back if the shard ended.
    pub(crate) fn send(&self, mail: Mail) -> Result<(), Mail> {
        let mut post = self.post();
        if post.closed {
            return Err(mail);
        }
        post.mail.push(mail);
        drop(post);
        self.notify();
        Ok(())
    }

    /// The shard ended. What was left for it is dropped.
    pub(crate) fn close(&self) {
        let mut post = self.post();
        post.closed = true;
        let left = std::mem::take(&mut post.mail);
        drop(post);
        drop(left);
    }

    /// A mailbox of the shard has messages.
    pub(crate) fn announce_messages(&self) {
        self.messages.store(true, Ordering::SeqCst);
        self.notify();
    }

    /// On the shard: true if messages were announced since the last call.
    pub(crate) fn take_messages(&self) -> bool {
        self.messages.load(Ordering::Relaxed) && self.messages.swap(false, Ordering::SeqCst)
    }

    /// On the shard: how many connections its table has room for.
    pub(crate) fn set_room(&self, room: usize) {
        if self.room.load(Ordering::Relaxed) != room {
            self.room.store(room, Ordering::Relaxed);
        }
    }

    pub(crate) fn room(&self) -> usize {
        self.room.load(Ordering::Relaxed)
    }

    /// Another shard passes a connection on to this one; until it looks, there is room for one less.
    pub(crate) fn take_room(&self) {
        let _ = self.room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |room| room.checked_sub(1));
    }
}

/// See [`Remote::outside`].
#[cfg(feature = "host-tokio")]
struct Outside(Arc<Remote>);

#[cfg(feature = "host-tokio")]
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
    remote: Arc<Remote>,
    task: u32,
    /// True while the task is on the list.
    queued: AtomicBool,
}

impl TaskWaker {
    pub(crate) fn new(remote: &Arc<Remote>, task: u32) -> Arc<TaskWaker> {
        Arc::new(TaskWaker { remote: remote.clone(), task, queued: AtomicBool::new(false) })
    }

    /// The task is about to be polled: wakes from now on count again.
    pub(crate) fn taken(&self) {
        self.queued.store(false, Ordering::SeqCst);
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
        if !self.queued.swap(true, Ordering::SeqCst) {
            self.remote.post().woken.push(self.task);
            self.remote.notify();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_before_sleeping_keeps_the_shard_awake_and_is_listed_once() {
        let remote = Remote::new();
        let task = TaskWaker::new(&remote, 7);
        let waker = task.waker();
        waker.wake_by_ref();
        waker.wake_by_ref();
        assert!(!remote.fall_asleep());
        let mut post = Post::default();
        remote.wake_up(&mut post);
        assert_eq!(post.woken, [7]);
        task.taken();
        assert!(remote.fall_asleep());
    }

    #[test]
    fn taking_tasks_alone_leaves_the_rest_to_be_found() {
        let remote = Remote::new();
        let (task, mut woken) = (TaskWaker::new(&remote, 7), Vec::new());
        task.waker().wake();
        remote.take_woken(&mut woken, Order::Serve);
        assert_eq!(woken, [7]);
        assert!(remote.fall_asleep(), "nothing else came");
        remote.wake_up(&mut Post::default());
        for what in [
            |remote: &Remote| drop(remote.send(Mail::Close { id: ConnId::new(1, 1) })),
            Remote::announce_messages,
        ] {
            what(&remote);
            remote.take_woken(&mut Vec::new(), Order::Serve);
            assert!(!remote.fall_asleep(), "the next turn looks");
            let mut post = Post::default();
            remote.wake_up(&mut post);
            remote.take_messages();
        }
        remote.order(Order::Drain);
        remote.take_woken(&mut Vec::new(), Order::Serve);
        assert!(!remote.fall_asleep());
    }

    #[test]
    fn an_order_is_never_taken_back() {
        let remote = Remote::new();
        remote.order(Order::Force);
        remote.order(Order::Drain);
        assert_eq!(remote.ordered(), Order::Force);
    }
}
