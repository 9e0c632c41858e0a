//! The kernel half of the io_uring driver: entries, memory, system calls. All `unsafe` of this
//! crate is here, but for single calls in `shared` (socket options, limits of the process, its
//! allocator, the clock).
//!
//! The invariants that make it sound, on which each `SAFETY` comment below relies:
//!
//! 1. A batch is owned by [`SystemKernel::sends`] from before its entry is pushed until its
//!    completion was reaped, and is not touched in between; if a completion never comes it is
//!    leaked.
//! 2. Headers, iovecs, addresses and descriptor arrays live in [`Staging`], at least until their
//!    entry is consumed.
//! 3. Receive buffers are lent (see [`KernelSide`]) from before they are provided until the kernel
//!    named them as used up in a completion, or until no receive is in flight and the buffer ring
//!    is unregistered. The bookkeeping half ends a loan only through a completion reaped here, or
//!    after `renew_buffer_ring`; only this crate can make it do so.
//! 4. The word the wake-up read writes to, and the byte that all probes write to, are boxed, read
//!    by no code here, and freed only when nothing is in flight.
//! 5. The time that entries of the timeout operation name is boxed, and read by the kernel in the
//!    call that consumes them alone.
//! 6. A block is owned by [`SystemKernel::blocks`] from before its entry is pushed until its
//!    completion, which no other operation shares its name with, was reaped, and is not touched in
//!    between; its memory stays where it is. If a completion never comes it is leaked.
//! 7. A descriptor in [`DescriptorSet`] is open and has no other owner; it leaves the set when a
//!    close of it is pushed.

mod buffer_ring;
mod encode;
mod enter;
mod owned;
pub(super) mod probe;
mod setup;
mod teardown;

use std::cell::UnsafeCell;
use std::collections::{HashMap, VecDeque};
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd};
use std::task;
use std::time::Duration;

use io_uring::IoUring;
use io_uring::squeue::Entry;
use io_uring::types::Timespec;
use ringserve_buf::{Block, KernelSide, Pool};
use ringserve_core::{Address, Batch, CloseHow, ConnId, PeerCredentials};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use socket2::SockRef;

use crate::shared::accept::{self, Listener};
use crate::shared::connect::{BeforeConnect, to_kernel};
use crate::shared::report::SetupError;
use crate::shared::report::log;
use crate::shared::socket_options::peer_credentials;
use crate::shared::wait::{self, Timer, Waker};
use crate::uring::Uring;
use crate::uring::UringConfig;
use crate::uring::kernel::{Kernel, Kind, RawCqe, RawOp, SendMode, SentQuietly};
use buffer_ring::BufferRing;
use encode::{On, Staging};
use enter::Quiet;
use owned::DescriptorSet;
use ringserve_core::internals::Chunked;
use setup::{GROUPS, Mode};

/// The kernel this process runs on.
pub struct SystemKernel {
    /// First, so that it is closed before what follows is freed.
    ring: IoUring,
    mode: Mode,
    timer: Timer,
    /// The time of the timeout operation, for entries that are not consumed.
    timeout: Box<Timespec>,
    buffers: BufferRing,
    /// The buffer group that receives use.
    group: u16,
    staging: Staging,
    /// Batches with the kernel, by slot.
    sends: Chunked<Option<Box<Batch>>>,
    /// Blocks with the kernel, and how many bytes of each it may write at most, by slot.
    blocks: HashMap<u64, (Box<Block>, usize)>,
    /// The block of the completion that was reaped last.
    block: Option<(ConnId, Box<Block>, usize)>,
    /// Quiet sends that were pushed and are not known to have ended, in the order of their places.
    quiet: VecDeque<Quiet>,
    /// Entries pushed since the start, and those of them that were consumed; both wrap around.
    pushed: u32,
    consumed: u32,
    /// Operations that will post a completion.
    in_flight: usize,
    /// `None` once it is closed.
    listeners: Vec<Option<ListenerSocket>>,
    /// Descriptors accepted and not installed yet.
    owned: DescriptorSet,
    /// Descriptors of connections by slot, plus one, where they are not in the ring's table.
    plain: Option<Chunked<i32>>,
    before_connect: BeforeConnect,
    waker: Waker,
    wake_count: Box<UnsafeCell<u64>>,
    peeked: Box<UnsafeCell<u8>>,
}

/// A listening socket.
struct ListenerSocket {
    listener: Listener,
    /// Each accept takes one connection, by request or because other rings accept from the same
    /// queue. There a connection wakes the first ring that waits, and a multishot accept always
    /// stays first: measured, one of four rings got all. So the next accept queues after those of
    /// the other rings.
    one_by_one: bool,
}

impl ListenerSocket {
    fn new(listener: Listener) -> ListenerSocket {
        let one_by_one = listener.is_one_by_one();
        ListenerSocket { listener, one_by_one }
    }
}

impl Uring<SystemKernel> {
    /// Creates a ring, which belongs to this thread, for connections from `listeners`, which are
    /// numbered in order. A listener that was not adopted may be blocking or non-blocking.
    ///
    /// Locks about 64 bytes for each submission entry, 16 for each completion entry and each
    /// buffer, and uses 8 for each connection; receive memory is taken later, as it is needed.
    ///
    /// # Errors
    /// Names the cause and the fix.
    pub fn new(config: &UringConfig, listeners: Vec<Listener>) -> Result<Uring<SystemKernel>, SetupError> {
        config.check()?;
        let (_, side) = Pool::new(config.pool)?;
        let kernel = SystemKernel::new(config, listeners)?;
        let mut driver = Uring::with_kernel(kernel, side, config.connections).coalescing(config.coalesce);
        driver.peer_addresses = config.peer_addresses;
        Ok(driver)
    }

    /// Describes the ring's features in a line for the log.
    pub fn describe(&self) -> String {
        self.kernel().describe()
    }
}

impl SystemKernel {
    fn new(config: &UringConfig, listeners: Vec<Listener>) -> Result<SystemKernel, SetupError> {
        let setup::ReadyRing { buffers, ring, mode } = setup::make(config)?;
        let waker = Waker::new().map_err(|error| SetupError::from_call("the wake-up descriptor", error))?;
        Ok(SystemKernel {
            staging: Staging::new(ring.params().sq_entries() as usize),
            ring,
            mode,
            timer: Timer::default(),
            timeout: Box::new(Timespec::new()),
            buffers,
            group: GROUPS[0],
            sends: Chunked::new(),
            blocks: HashMap::new(),
            block: None,
            quiet: VecDeque::new(),
            pushed: 0,
            consumed: 0,
            in_flight: 0,
            listeners: listeners.into_iter().map(|listener| Some(ListenerSocket::new(listener))).collect(),
            owned: DescriptorSet::new(),
            plain: config.plain_descriptors.then(Chunked::new),
            before_connect: config.before_connect.clone(),
            waker,
            wake_count: Box::new(UnsafeCell::new(0)),
            peeked: Box::new(UnsafeCell::new(0)),
        })
    }

    fn describe(&self) -> String {
        let params = self.ring.params();
        let mut text = format!("io_uring, queues {}/{}", params.sq_entries(), params.cq_entries());
        let modes = [
            (self.mode.defer_taskrun, "DEFER_TASKRUN", "COOP_TASKRUN"),
            (self.mode.no_sqarray, "NO_SQARRAY", ""),
            (self.mode.no_iowait, "NO_IOWAIT", ""),
            (self.plain.is_none(), "direct descriptors", "plain descriptors"),
            (self.mode.restricted, "restricted", ""),
        ];
        for (on, yes, no) in modes {
            let word = if on { yes } else { no };
            if !word.is_empty() {
                let _ = write!(text, ", {word}");
            }
        }
        text
    }

    fn listening(&self, listener: u16) -> Option<&ListenerSocket> {
        self.listeners.get(usize::from(listener))?.as_ref()
    }

    /// The place of the next entry in the submission queue.
    fn place(&self) -> usize {
        self.pushed as usize & (self.ring.params().sq_entries() as usize - 1)
    }

    fn room(&mut self) -> usize {
        let queue = self.ring.submission();
        queue.capacity() - queue.len()
    }

    /// Pushes an entry. The queue has room, and the entry's pointers stay valid as long as the
    /// invariants say.
    #[inline]
    fn push(&mut self, entry: Entry, user_data: u64) {
        let entry = entry.user_data(user_data);
        // SAFETY: each constructor in `encode` names what its pointers need; `submit` with what it
        // calls, `is_bound` and `finish_all` give it, by invariants 1, 2, 4, 5 and 6 of this
        // module.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        assert!(pushed.is_ok(), "the submission queue had room");
        self.pushed = self.pushed.wrapping_add(1);
    }

    /// Pushes an entry that will post a completion.
    #[inline]
    fn push_awaited(&mut self, entry: Entry, user_data: u64) {
        self.push(entry, user_data);
        self.in_flight += 1;
    }

    #[inline]
    fn on(&self, id: ConnId) -> On {
        match &self.plain {
            None => On { number: id.slot() as i32, fixed: true },
            Some(plain) => On { number: plain.get(id.slot()).map_or(-1, |fd| fd - 1), fixed: false },
        }
    }

    fn install(&mut self, id: ConnId, fd: i32) {
        assert!(self.owned.remove(fd), "descriptor {fd} is not this driver's to adopt");
        if let Some(plain) = &mut self.plain {
            let old = plain.entry(id.slot()).map(|place| std::mem::replace(place, fd + 1));
            assert_eq!(old, Some(0), "slot {} is adopted twice, or there is no memory for it", id.slot());
            return;
        }
        let place = self.place();
        let pointer = self.staging.descriptor(place, fd);
        self.push(encode::install(id.slot(), pointer), Kind::Install.with(id.bits()));
        self.push(encode::quietly(encode::close_descriptor(fd)), Kind::Ignored.with(0));
    }

    fn connect(&mut self, id: ConnId, address: &Address) {
        // The address was checked when the socket was created.
        let Ok(address) = to_kernel(address) else { panic!("{address} is no address") };
        let entry = encode::connect(self.on(id), address, &mut self.staging);
        self.push_awaited(entry, Kind::Connect.with(id.bits()));
    }

    fn close(&mut self, id: ConnId, how: CloseHow) {
        if how == CloseHow::Abort {
            self.push(encode::reset_on_close(self.on(id)), Kind::Ignored.with(0));
        }
        let entry = match &mut self.plain {
            None => encode::close_slot(id.slot()),
            Some(plain) => encode::close_descriptor(plain.get_mut(id.slot()).map_or(0, std::mem::take) - 1),
        };
        self.push_awaited(entry, Kind::Close.with(id.bits()));
    }

    #[cold]
    fn receive_into(&mut self, id: ConnId, mut block: Box<Block>, most: usize) {
        let entry = encode::receive_into(self.on(id), block.spare(most));
        if let Some(old) = self.blocks.insert(id.bits(), (block, most)) {
            // Not dropped: the kernel may still write there.
            std::mem::forget(old);
            panic!("two receives in flight on {id}");
        }
        self.push_awaited(entry, Kind::ReceiveInto.with(id.bits()));
    }

    fn send(&mut self, id: ConnId, batch: Box<Batch>, mode: SendMode) {
        let (on, place) = (self.on(id), self.place());
        let (entry, bytes) = encode::send(on, &batch, mode, &mut self.staging, place);
        let old = self.sends.entry(id.slot()).expect("memory for 256 sends").replace(batch);
        if let Some(old) = old {
            // Not dropped: the kernel may still read it.
            std::mem::forget(old);
            panic!("two sends in flight on {id}");
        }
        self.push_awaited(entry, Kind::Send.with(id.bits()));
        if mode == SendMode::TryQuietly {
            self.quiet.push_back(Quiet { id, bytes, after: self.pushed });
        }
    }
}

impl Kernel for SystemKernel {
    type Descriptor = OwnedFd;

    fn submit(&mut self, op: RawOp) -> Result<(), RawOp> {
        let needs = match &op {
            RawOp::Install { .. } if self.plain.is_none() => 2,
            RawOp::Close { how: CloseHow::Abort, .. } => 2,
            _ => 1,
        };
        if self.room() < needs {
            return Err(op);
        }
        let user_data = op.user_data();
        match op {
            RawOp::Receive { id } => self.push_awaited(encode::receive(self.on(id), self.group), user_data),
            RawOp::ReceiveOnce { id } => {
                self.push_awaited(encode::receive_once(self.on(id), self.group), user_data);
            }
            RawOp::ReceiveInto { id, block, most } => self.receive_into(id, block, most as usize),
            RawOp::Probe { id } => self.push_awaited(encode::peek(self.on(id), self.peeked.get()), user_data),
            RawOp::Send { id, batch, mode } => self.send(id, batch, mode),
            RawOp::Accept { listener } => {
                let entry = match self.listening(listener) {
                    Some(ListenerSocket { listener, one_by_one }) => {
                        let encode = if *one_by_one { encode::accept_one } else { encode::accept };
                        encode(listener.as_fd().as_raw_fd())
                    }
                    None => encode::accept(-1),
                };
                self.push_awaited(entry, user_data);
            }
            RawOp::Install { id, fd } => self.install(id, fd),
            RawOp::CloseFd { fd } => {
                assert!(self.owned.remove(fd), "descriptor {fd} is not this driver's to close");
                self.push(encode::quietly(encode::close_descriptor(fd)), user_data);
            }
            RawOp::Connect { id, address } => self.connect(id, &address),
            RawOp::CancelConnect { id } => {
                self.push_awaited(encode::cancel(Kind::Connect.with(id.bits())), user_data);
            }
            RawOp::Shutdown { id } => {
                self.push_awaited(encode::shutdown(self.on(id), libc::SHUT_WR), user_data);
            }
            RawOp::ShutdownInput { id } => {
                self.push_awaited(encode::shutdown(self.on(id), libc::SHUT_RD), user_data);
            }
            RawOp::Close { id, how } => self.close(id, how),
            RawOp::CancelAccept { listener } => {
                self.push_awaited(encode::cancel(Kind::Accept.with(u64::from(listener))), user_data);
            }
            RawOp::CancelReceive { id } => {
                let into = !self.blocks.is_empty() && self.blocks.contains_key(&id.bits());
                let kind = if into { Kind::ReceiveInto } else { Kind::Receive };
                self.push_awaited(encode::cancel(kind.with(id.bits())), user_data);
            }
            RawOp::CancelSend { id } => {
                self.push_awaited(encode::cancel(Kind::Send.with(id.bits())), user_data);
            }
            RawOp::ReadWake => {
                let word = self.wake_count.get().cast();
                self.push_awaited(encode::read_wake(self.waker.raw(), word), user_data);
            }
        }
        Ok(())
    }

    fn queued(&mut self) -> usize {
        self.ring.submission().len()
    }

    fn provide(&mut self, side: &mut KernelSide, buffer: u16) {
        self.buffers.provide(side, buffer);
    }

    fn renew_buffer_ring(&mut self) -> bool {
        match setup::renew(&self.ring, &self.buffers, self.group) {
            Ok((buffers, group)) => {
                (self.buffers, self.group) = (buffers, group);
                true
            }
            Err(error) => {
                log::debug!(%error, "the buffer ring could not be replaced; its memory stays");
                false
            }
        }
    }

    fn buffer_ring_entries(&self) -> usize {
        usize::from(self.buffers.entries())
    }

    fn enter(&mut self, wait_for: u32, timeout: Option<Duration>) -> Result<(), i32> {
        self.enter_kernel(wait_for, timeout)
    }

    #[inline(always)]
    fn reap(&mut self, _side: &mut KernelSide) -> Option<RawCqe> {
        self.next_completion()
    }

    fn take_block(&mut self, id: ConnId) -> Option<(Box<Block>, usize)> {
        let (of, block, most) = self.block.take()?;
        (of == id).then_some((block, most))
    }

    #[inline]
    fn reap_quiet(&mut self) -> Option<SentQuietly> {
        self.next_quiet()
    }

    fn has_completions(&mut self) -> bool {
        !self.ring.completion().is_empty()
    }

    fn has_quiet(&mut self) -> bool {
        self.quiet_is_done()
    }

    fn has_task_work(&mut self) -> bool {
        self.ring.submission().taskrun()
    }

    fn is_overflowing(&mut self) -> bool {
        self.ring.submission().cq_overflow()
    }

    fn peer_of(&mut self, fd: i32) -> Option<SocketAddr> {
        self.owned.borrow(fd, |socket| socket2::SockRef::from(&socket).peer_addr().ok())??.as_socket()
    }

    fn local_of(&mut self, fd: i32) -> Option<SocketAddr> {
        self.owned.borrow(fd, |socket| SockRef::from(&socket).local_addr().ok())??.as_socket()
    }

    fn credentials_of(&mut self, fd: i32) -> Option<PeerCredentials> {
        self.owned.borrow(fd, |socket| peer_credentials(socket))?
    }

    fn drop_filter(&mut self, listener: u16, fd: i32) -> bool {
        let is_inherited = |listening: &ListenerSocket| listening.listener.filter().is_inherited();
        let has_filter = self.listening(listener).is_some_and(is_inherited);
        if has_filter {
            // The socket has no filter if it was accepted before the first one was set, or after
            // the last one was removed.
            self.owned.borrow(fd, |socket| _ = SockRef::from(&socket).detach_filter());
        }
        has_filter
    }

    fn is_adopted(&self, listener: u16) -> bool {
        self.listening(listener).is_some_and(|listening| listening.listener.is_adopted())
    }

    fn turn_newcomers_away(&mut self, listener: u16) -> Duration {
        let Some(ListenerSocket { listener: socket, .. }) = self.listening(listener) else {
            return Duration::ZERO;
        };
        accept::turn_newcomers_away(socket.socket(), socket.filter()).unwrap_or_else(|error| {
            // A call that takes from its queue might block.
            log::warn!(listener, %error, "a listener is closed before its queue is empty");
            self.close_listener(listener);
            Duration::ZERO
        })
    }

    fn take_queued(&mut self, listener: u16) -> Result<i32, i32> {
        let Some(ListenerSocket { listener, .. }) = self.listening(listener) else { return Err(libc::EBADF) };
        let fd = accept::take(SockRef::from(listener))?.into_raw_fd();
        self.owned.insert(fd);
        Ok(fd)
    }

    fn close_listener(&mut self, listener: u16) {
        if let Some(listener) = self.listeners.get_mut(usize::from(listener)) {
            *listener = None;
        }
    }

    fn now(&mut self) -> Duration {
        wait::now()
    }

    fn open_socket(&mut self, address: &Address) -> Result<i32, i32> {
        to_kernel(address)?;
        let fd = self.before_connect.open_socket(address)?.into_raw_fd();
        self.owned.insert(fd);
        Ok(fd)
    }

    fn waker(&self) -> task::Waker {
        self.waker.to_task()
    }

    fn hand_over(&mut self, fd: i32) -> Option<OwnedFd> {
        self.owned.take(fd)
    }

    fn take_over(&mut self, socket: OwnedFd) -> i32 {
        let fd = socket.into_raw_fd();
        self.owned.insert(fd);
        fd
    }

    /// Registers an eventfd of the ring: polling the ring itself does not show deferred work
    /// (`DEFER_TASKRUN`).
    fn readiness(&mut self) -> Result<OwnedFd, i32> {
        let eventfd =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(Errno::raw_os_error)?;
        // The ring itself holds it from here on.
        let registered = self.ring.submitter().register_eventfd(eventfd.as_raw_fd());
        registered.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
        Ok(eventfd)
    }

    fn rouse_in(&mut self, time: Duration) {
        self.is_bound(time);
    }

    fn finish(&mut self, side: &mut KernelSide) -> bool {
        self.finish_all(side)
    }
}
