//! The epoll driver: the same operations and completions where io_uring is blocked.
//!
//! ```text
//!   submit(Op) ──▶ tried at once ──▶ ready ─────────────┐
//!                        │ what does not fit            │
//!                        ▼                              ▼
//!   epoll_wait ──▶ readiness, kept in each port ──▶ turn(..): completions within the budget
//!                        │                              ▲
//!                        └──▶ queue of ports to read ───┘
//! ```
//!
//! Each connection is registered once, edge-triggered, for reading and writing. An edge only sets a
//! flag in its port; the flag is cleared by the call that finds the socket empty or full. So a
//! spurious edge costs one call and does no harm, and none can be missed.
//!
//! A request costs one receive, one send, and a share of an `epoll_wait`: a receive that does not
//! fill its buffer emptied the socket, so no further one is tried before the next edge.
//! `receive.rs` has the exceptions. In the middle of a large frame, one call receives all bytes
//! that wait, straight into the frame. Long waits are ended by a timerfd, which is set once for
//! many of them.

mod accept;
mod close;
mod config;
mod connect;
mod probe;
mod receive;
mod send;
mod table;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, OwnedFd};
use std::task;
use std::time::Duration;

use ringserve_buf::{KernelSide, Pool};
use ringserve_core::internals::canonical;
use ringserve_core::{Budget, Completion, ConnId, Driver, DriverStats, Op, PeerCredentials, Socket, Wait};
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::thread::{nanosleep, set_current_timer_slack};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use crate::shared::accept::Listener;
use crate::shared::coalesce::Coalesce;
use crate::shared::connect::BeforeConnect;
use crate::shared::report::SetupError;
use crate::shared::report::log;
use crate::shared::socket_options::peer_credentials;
use crate::shared::wait::{Bound, SET_FROM, Timer, Waker};
use accept::{AcceptedSockets, EpollListener};
use connect::QueuedConnect;
use receive::ReceiveTarget;
use table::Ports;

pub use config::EpollConfig;
pub use probe::probe_epoll;

/// Events taken by one `epoll_wait`: a thousand active connections in one call, 12 KiB of memory.
/// Further events come with the next call; the kernel takes turns between descriptors.
const EVENTS_MAX: usize = 1024;

/// Tokens: a connection's is its slot, listeners follow, timer and waker are the last.
const LISTENERS: u64 = ConnId::SLOTS_MAX as u64;
const WAKER: u64 = u64::MAX;
const TIMER: u64 = u64::MAX - 1;

/// Edge-triggered, for what there is to read, and its end.
const READABLE: EventFlags = EventFlags::ET.union(EventFlags::IN).union(EventFlags::RDHUP);

/// No event: what the list is filled with.
const NO_EVENT: Event = Event { flags: EventFlags::empty(), data: EventData::new_u64(WAKER) };

/// The epoll driver.
///
/// It belongs to the thread that made it. Each connection costs a descriptor of the process, so
/// `RLIMIT_NOFILE` bounds them; accepting ends with [`AcceptEnd::Descriptors`] there. Dropping the
/// driver closes every connection.
///
/// [`AcceptEnd::Descriptors`]: ringserve_core::AcceptEnd::Descriptors
pub struct Epoll {
    instance: OwnedFd,
    events: Box<[Event]>,
    waker: Waker,
    timer: Timer,
    /// Readable once the timer went off.
    timerfd: OwnedFd,
    side: KernelSide,
    pool: Pool,
    ports: Ports,
    /// The blocks of receives into them.
    blocks: HashMap<ConnId, ReceiveTarget>,
    /// The system refuses receives into several buffers at once.
    refuses_several: bool,
    /// The one-shot receive that has just brought bytes.
    once_over: Option<ConnId>,
    listeners: Vec<EpollListener>,
    /// Number of listeners that are being emptied before they are closed.
    emptying: usize,
    /// Connects that wait for a place in the queue of a Unix socket.
    waiting: Vec<QueuedConnect>,
    /// The listener that accepts first in the next turn, so that each gets its share of the budget.
    next_listener: usize,
    accepted: AcceptedSockets,
    /// Which of the three sources of completions is first in this turn.
    first_source: usize,
    /// Completions that wait for the next turn, in order; never received bytes.
    ready: VecDeque<Completion>,
    /// The number of completions at the end of `ready` that are sends which fitted at once since
    /// the last turn.
    sent_at_once: usize,
    /// True until the next turn if no caller waits for those sends.
    quiet: bool,
    /// True exactly when the last turn did not look for events.
    skipped: bool,
    /// True exactly when the last receive found the pool empty.
    pool_empty: bool,
    /// The last poll found as many events as it may: there may be more.
    more_events: bool,
    before_connect: BeforeConnect,
    connections_max: u32,
    /// Accepted connections come with their peer's address.
    peer_addresses: bool,
    coalesce: Coalesce,
    /// The thread's timers have no slack since it slept for more events.
    has_no_slack: bool,
    stats: DriverStats,
}

/// Rounds up, so that the end of a wait does not spin, and limits the time to what the kernel
/// accepts as a number.
fn whole_milliseconds(time: Duration) -> Timespec {
    let millis = time.as_nanos().div_ceil(1_000_000).min(i32::MAX as u128) as i64;
    Timespec { tv_sec: millis / 1000, tv_nsec: millis % 1000 * 1_000_000 }
}

/// The rest of a turn's budget.
struct Room {
    /// Length of the list of completions at which it ends.
    end: usize,
    bytes: usize,
    /// Buffers that one receive may fill, so that all connections queued at the start of the turn
    /// have their share of it and of the free buffers; 0 until it is computed.
    share: usize,
}

impl Room {
    fn is_left(&self, completions: &[Completion]) -> bool {
        completions.len() < self.end && self.bytes > 0
    }
}

impl Epoll {
    /// Creates a driver on these listeners, which [`Op::Accept`] numbers in this order. They are
    /// made non-blocking.
    ///
    /// # Errors
    /// If a value of the configuration is out of range, or there is no descriptor left.
    pub fn new(config: &EpollConfig, listeners: Vec<Listener>) -> Result<Epoll, SetupError> {
        config.check()?;
        let (pool, side) = Pool::new(config.pool)?;
        let failed = |call| move |error: Errno| SetupError::from_epoll(call, error.into());
        let instance = epoll::create(CreateFlags::CLOEXEC).map_err(failed("epoll_create1"))?;
        let waker = Waker::new().map_err(|error| SetupError::from_epoll("eventfd", error))?;
        // Each wake is an edge, so the counter need not be read.
        epoll::add(&instance, &waker, EventData::new_u64(WAKER), READABLE)
            .map_err(failed("epoll_ctl on the eventfd"))?;
        let timerfd = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC)
            .map_err(failed("timerfd_create"))?;
        // Setting the timer again makes it unreadable.
        epoll::add(&instance, &timerfd, EventData::new_u64(TIMER), READABLE)
            .map_err(failed("epoll_ctl on the timerfd"))?;
        let listeners: Result<_, io::Error> = listeners.into_iter().map(EpollListener::new).collect();
        Ok(Epoll {
            instance,
            events: vec![NO_EVENT; EVENTS_MAX].into_boxed_slice(),
            waker,
            timer: Timer::default(),
            timerfd,
            side,
            pool,
            ports: Ports::new(),
            blocks: HashMap::new(),
            refuses_several: false,
            once_over: None,
            listeners: listeners
                .map_err(|error| SetupError::from_epoll("O_NONBLOCK on a listener", error))?,
            emptying: 0,
            waiting: Vec::new(),
            next_listener: 0,
            accepted: AcceptedSockets::default(),
            first_source: 0,
            ready: VecDeque::new(),
            sent_at_once: 0,
            quiet: false,
            skipped: false,
            pool_empty: false,
            more_events: false,
            before_connect: config.before_connect.clone(),
            connections_max: config.connections,
            peer_addresses: config.peer_addresses,
            coalesce: Coalesce::new(config.coalesce),
            has_no_slack: false,
            stats: DriverStats::default(),
        })
    }

    /// Time until the driver has something to do without an event.
    #[inline]
    fn due_in(&mut self) -> Option<Duration> {
        let emptied = self.emptied_in();
        if self.waiting.is_empty() {
            return emptied;
        }
        [emptied, self.connect_in()].into_iter().flatten().min()
    }

    /// True if there is something to do before the next event. Forgets
    /// [`defer_sent`](Driver::defer_sent).
    fn has_to_do(&mut self) -> bool {
        self.pool_empty = self.pool_empty && !self.can_lend();
        let quiet = std::mem::take(&mut self.quiet);
        let awaited = self.ready.len() > if quiet { self.sent_at_once } else { 0 };
        awaited || !self.pool_empty && self.ports.has_queued() || self.can_accept() || self.more_events
    }

    /// Makes the next buffer that is freed wake the shard, if the last receive found none. Called
    /// before the shard sleeps where leases may be dropped meanwhile.
    fn wait_for_buffer(&mut self) {
        if self.pool_empty {
            self.side.wait_for_buffer();
        }
    }

    /// Looks for events, and blocks for the first one if `wait` allows it and there is nothing else
    /// to do.
    fn poll(&mut self, wait: Wait) -> Result<(), i32> {
        self.pool_empty = self.pool_empty && !self.can_lend();
        let due = self.due_in();
        let to_do = !self.pool_empty && self.ports.has_queued() || self.can_accept();
        let wait = match (wait, due) {
            (wait, None) => wait,
            (Wait::No, _) => Wait::No,
            (Wait::For(time), Some(due)) => Wait::For(time.min(due)),
            (Wait::Forever, Some(due)) => Wait::For(due),
        };
        let answers = self.ready.len() > if self.quiet { self.sent_at_once } else { 0 };
        let timeout = match wait {
            Wait::No | Wait::For(Duration::ZERO) => Some(Duration::ZERO),
            _ if to_do => Some(Duration::ZERO),
            // Answers need no event: deliver them first, as long as every other turn looks for
            // events.
            _ if answers && !self.skipped => {
                self.skipped = true;
                return Ok(());
            }
            _ if answers => Some(Duration::ZERO),
            Wait::For(time) => {
                let left = time - self.sleep_for_more(Some(time));
                if self.is_bound(left) { None } else { Some(left) }
            }
            Wait::Forever => {
                self.sleep_for_more(None);
                None
            }
        };
        self.skipped = false;
        self.stats.enters += 1;
        let timeout = timeout.map(whole_milliseconds);
        // Not the C library's function: it is a cancellation point, which costs two locked
        // operations in a process with several threads. The same holds for receives and sends.
        let count = match epoll::wait(&self.instance, &mut *self.events, timeout.as_ref()) {
            Ok(count) => count,
            Err(Errno::INTR) => return Ok(()),
            Err(errno) => return Err(errno.raw_os_error()),
        };
        for n in 0..count {
            self.on_event(self.events[n]);
        }
        self.more_events = count == EVENTS_MAX;
        Ok(())
    }

    /// Begins a wait of at most `longest`. Sleeps first if several connections had bytes, so that
    /// all events of that time are found together. Returns how long it sleeps.
    #[inline]
    fn sleep_for_more(&mut self, longest: Option<Duration>) -> Duration {
        let time = self.coalesce.begin_wait(longest);
        if !time.is_zero() {
            self.stats.calls += 1;
            if !std::mem::replace(&mut self.has_no_slack, true) {
                // If this fails, each sleep is longer, and nothing else is wrong.
                let _ = set_current_timer_slack(NonZeroU64::new(1));
            }
            let request = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
            // A signal may end it early.
            let _ = nanosleep(&request);
        }
        time
    }

    /// True if the timer ends a wait of this length.
    fn is_bound(&mut self, wait: Duration) -> bool {
        match self.timer.bound(wait, true) {
            Bound::Timer => true,
            Bound::Set { until, .. } => {
                let it_value =
                    Timespec { tv_sec: until.as_secs() as i64, tv_nsec: until.subsec_nanos().into() };
                let once = Itimerspec { it_interval: Timespec::default(), it_value };
                let set = timerfd_settime(&self.timerfd, TimerfdTimerFlags::ABSTIME, &once).is_ok();
                if !set {
                    self.timer.went_off();
                }
                set
            }
            Bound::Call => false,
        }
    }

    #[inline]
    fn on_event(&mut self, event: Event) {
        match event.data.u64() {
            slot if slot < LISTENERS => self.on_edge(slot as u32, event.flags),
            WAKER => self.waker.seen(),
            TIMER => self.timer.went_off(),
            listener => self.on_queued((listener - LISTENERS) as usize),
        }
    }

    /// Notes what an edge reports, and continues the send that waited for it.
    #[inline]
    fn on_edge(&mut self, slot: u32, event: EventFlags) {
        let Some(port) = self.ports.at(slot) else { return };
        let ended = event.intersects(EventFlags::ERR | EventFlags::HUP | EventFlags::RDHUP);
        port.goes_on |= ended;
        port.marked |= event.contains(EventFlags::PRI);
        port.writable |= event.intersects(EventFlags::OUT | EventFlags::ERR | EventFlags::HUP);
        if ended || event.contains(EventFlags::IN) {
            port.readable = true;
        }
        let connected = port.connecting && (port.writable || ended);
        let stuck = port.writable && port.batch.is_some();
        self.ports.sync_queue(slot);
        if stuck {
            self.send_rest(slot);
        } else if connected {
            self.on_connected(slot);
        }
    }

    /// Hands over what `ready` holds, within the budget.
    fn deliver(&mut self, room: &Room, completions: &mut Vec<Completion>) {
        while room.is_left(completions)
            && let Some(completion) = self.ready.pop_front()
        {
            completions.push(completion);
        }
    }

    /// Panics if the parts disagree. Linear in the number of connections with something to read.
    pub fn invariants(&self) {
        assert_eq!(self.pool.counts().with_kernel, 0, "a buffer is lent beyond a receive");
        self.ports.invariants();
    }

    /// Panics in debug builds: the id must be adopted, so anything else is a bug of the submitting
    /// shard.
    #[cold]
    fn unknown(id: ConnId, what: &str) {
        log::error!(%id, what, "operation on a connection that is not there");
        debug_assert!(false, "{what} on {id}, which is not adopted or is busy with one already");
    }
}

impl Driver for Epoll {
    type Descriptor = OwnedFd;

    fn submit(&mut self, op: Op) {
        match op {
            Op::Accept { listener } => self.accept(listener),
            Op::AcceptStop { listener } => self.accept_stop(listener),
            Op::StopListening { listener } => self.stop_listening(listener),
            Op::Adopt { id, socket } => self.adopt(id, socket),
            Op::Refuse { socket } => self.refuse(socket),
            Op::Connect { id, address } => self.connect(id, &address),
            Op::ConnectStop { id } => self.connect_stop(id),
            Op::Receive { id } => self.receive(id),
            Op::ReceiveOnce { id, several } => self.receive_once(id, several),
            Op::ReceiveInto { id, block, most } => self.receive_into(id, block, most as usize),
            Op::ReceiveStop { id } => self.receive_stop(id),
            Op::ShutdownInput { id } => self.receive_stop(id),
            // No edge is lost.
            Op::Probe { .. } => {}
            Op::Send { id, batch } => self.send(id, batch),
            Op::SendStop { id } => self.send_stop(id),
            Op::Shutdown { id } => self.shutdown(id),
            Op::Close { id, how } => self.close(id, how),
        }
    }

    fn turn(&mut self, wait: Wait, budget: Budget, completions: &mut Vec<Completion>) -> Result<(), i32> {
        self.stats.turns += 1;
        let polled = self.poll(wait);
        if !self.waiting.is_empty() {
            self.connect_again();
        }
        (self.quiet, self.sent_at_once) = (false, 0);
        polled?;
        let begin = completions.len();
        let mut room = Room { end: begin + budget.completions.max(1), bytes: budget.bytes.max(1), share: 0 };
        // The first source may use up the budget, so they take turns. All completions of one
        // operation come from one source, so their order is kept.
        self.first_source = if self.first_source == 2 { 0 } else { self.first_source + 1 };
        for source in [0, 1, 2, 0, 1].iter().skip(self.first_source).take(3) {
            match source {
                0 => self.deliver(&room, completions),
                1 => self.read(&mut room, completions),
                _ => self.take_connections(&room, completions),
            }
        }
        self.coalesce.brought(&completions[begin..]);
        if cfg!(debug_assertions) {
            self.invariants();
        }
        Ok(())
    }

    fn defer_sent(&mut self) {
        self.quiet = true;
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn stats(&self) -> DriverStats {
        self.stats
    }

    fn connections_max(&self) -> usize {
        self.connections_max as usize
    }

    fn waker(&self) -> task::Waker {
        self.waker.to_task()
    }

    fn local_of(&mut self, socket: Socket) -> Option<SocketAddr> {
        self.stats.calls += 1;
        self.accepted.find(socket)?.local_addr().ok()?.as_socket().map(canonical)
    }

    fn credentials_of(&mut self, socket: Socket) -> Option<PeerCredentials> {
        self.stats.calls += 1;
        peer_credentials(self.accepted.find(socket)?)
    }

    fn hand_over(&mut self, socket: Socket) -> Option<OwnedFd> {
        self.accepted.take(socket).map(|(socket, _)| OwnedFd::from(socket))
    }

    fn take_over(&mut self, descriptor: OwnedFd) -> Socket {
        self.stats.calls += 1;
        self.accepted.take_over(descriptor.into())
    }

    /// The epoll instance itself.
    fn readiness(&mut self) -> Result<OwnedFd, i32> {
        self.instance.as_fd().try_clone_to_owned().map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
    }

    fn begin(&mut self) -> Result<bool, i32> {
        if let Some(due) = self.due_in() {
            self.is_bound(due.max(SET_FROM));
        }
        let has_to_do = self.has_to_do();
        self.wait_for_buffer();
        Ok(has_to_do)
    }
}
