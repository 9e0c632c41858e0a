//! One ring: its queues, its buffer ring, its file table, and the enter that submits, posts and waits.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::task;
use std::time::{Duration, Instant};

use ringserve_buf::KernelSide;
use ringserve_core::{Address, Batch, CloseHow, ConnId};
use ringserve_drivers::kernel::{Kernel, Kind, RawCqe, RawOp, SentQuietly};
use ringserve_drivers::{UringConfig, Waker};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::connection::Side;
use crate::faults::{Fault, Faults};
use crate::state::{Shared, State, UNCONNECTED};

/// A completion that was not reaped yet, and the bytes it brings.
pub(crate) struct Posted {
    cqe: RawCqe,
    bytes: Vec<u8>,
}

/// A place of the file table.
#[derive(Clone, Copy)]
pub(crate) struct File {
    pub(crate) id: ConnId,
    pub(crate) connection: u32,
    pub(crate) side: Side,
}

/// A send that waits for room.
pub(crate) struct Sending {
    pub(crate) file: File,
    pub(crate) batch: Box<Batch>,
    /// Bytes that left.
    pub(crate) sent: usize,
}

/// The lower half of a shard's driver on a [`Network`](crate::Network).
pub struct MemoryKernel {
    pub(crate) shared: Arc<Shared>,
    started: Instant,
    pub(crate) ring: i32,
    pub(crate) faults: Faults,
    /// Cancels in a row that did not find what lives.
    pub(crate) missed: u8,
    pub(crate) buffer_bytes: usize,
    /// Wakes the shard.
    waker: Waker,
    /// Rings when something changes in the network.
    bell: Waker,
    submissions_max: usize,
    buffers_max: usize,
    pub(crate) incremental: bool,
    submissions: VecDeque<RawOp>,
    /// Entries they take.
    submissions_used: usize,
    completions: VecDeque<Posted>,
    /// Sends that fitted, and have no completion.
    pub(crate) quiet: VecDeque<SentQuietly>,
    /// Provided buffers, and how many bytes of the first are used.
    pub(crate) buffers: VecDeque<u16>,
    pub(crate) head_filled: usize,
    /// Listeners of the network, and whether an accept is armed on each.
    pub(crate) listeners: Vec<(usize, bool)>,
    pub(crate) files: HashMap<u32, File>,
    pub(crate) receives: Vec<File>,
    pub(crate) sends: Vec<Sending>,
    /// Connects in flight, and where to.
    pub(crate) connects: Vec<(ConnId, SocketAddr)>,
    pub(crate) wake_armed: bool,
    /// Something is ready, and left for the next enter.
    pub(crate) left_over: bool,
}

impl MemoryKernel {
    pub(crate) fn new(
        shared: Arc<Shared>,
        faults: Option<u64>,
        shard: usize,
        config: &UringConfig,
    ) -> io::Result<MemoryKernel> {
        let bell = Waker::new()?;
        let (ring, listeners) = shared.lock().add_ring(shard, bell.clone());
        Ok(MemoryKernel {
            shared,
            started: Instant::now(),
            ring,
            faults: Faults::new(faults, shard),
            missed: 0,
            buffer_bytes: config.pool.buffer_bytes,
            waker: Waker::new()?,
            bell,
            submissions_max: config.submission_entries as usize,
            buffers_max: usize::from(config.buffer_ring_entries()),
            incremental: config.incremental,
            submissions: VecDeque::new(),
            submissions_used: 0,
            completions: VecDeque::new(),
            quiet: VecDeque::new(),
            buffers: VecDeque::new(),
            head_filled: 0,
            listeners: listeners.into_iter().map(|listener| (listener, false)).collect(),
            files: HashMap::new(),
            receives: Vec::new(),
            sends: Vec::new(),
            connects: Vec::new(),
            wake_armed: false,
            left_over: false,
        })
    }

    pub(crate) fn post(&mut self, cqe: RawCqe) {
        self.post_with(cqe, Vec::new());
    }

    pub(crate) fn post_with(&mut self, cqe: RawCqe, bytes: Vec<u8>) {
        self.completions.push_back(Posted { cqe, bytes });
    }

    fn entries_of(op: &RawOp) -> usize {
        match op {
            RawOp::Install { .. } | RawOp::Close { how: CloseHow::Abort, .. } => 2,
            _ => 1,
        }
    }

    /// Carries out what was submitted and posts what is ready.
    fn step(&mut self) {
        if is_readable(&self.bell) {
            take_count(&self.bell);
            self.bell.seen();
        }
        let shared = self.shared.clone();
        let mut state = shared.lock();
        while let Some(op) = self.submissions.pop_front() {
            self.carry_out(op, &mut state);
        }
        self.submissions_used = 0;
        if self.wake_armed && is_readable(&self.waker) {
            take_count(&self.waker);
            self.wake_armed = false;
            self.post(RawCqe::new(Kind::Wake.with(0), 8, 0));
        }
        self.left_over = false;
        self.progress(&mut state);
        self.tell_others(&mut state);
        drop(state);
        shared.tell_clients();
    }

    /// Tells the rings at the other ends of connections what changed.
    fn tell_others(&mut self, state: &mut State) {
        for file in self.files.values().filter(|file| file.connection != UNCONNECTED) {
            let connection = state.connection(file.connection);
            if !connection.take_changed(file.side) {
                continue;
            }
            match connection.rings[file.side.other() as usize] {
                Some(ring) if ring == self.ring => self.left_over = true,
                Some(ring) => state.tell(ring),
                None => {}
            }
        }
    }

    /// Sleeps until something changes; false if the deadline is over.
    fn wait(&self, deadline: Option<Instant>) -> bool {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            return false;
        }
        let timeout = left.map(|left| Timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        });
        let mut both = [PollFd::new(&self.bell, PollFlags::IN), PollFd::new(&self.waker, PollFlags::IN)];
        let until = if self.wake_armed { 2 } else { 1 };
        // Interrupted or not: the shard looks.
        let _ = poll(&mut both[..until], timeout.as_ref());
        true
    }
}

fn is_readable(waker: &Waker) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(waker, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
}

/// Empties its counter, which is not zero.
fn take_count(waker: &Waker) {
    let _ = rustix::io::read(waker, &mut [0u8; 8]);
}

impl Kernel for MemoryKernel {
    type Descriptor = OwnedFd;

    fn submit(&mut self, op: RawOp) -> Result<(), RawOp> {
        let used = self.submissions_used + Self::entries_of(&op);
        if used > self.submissions_max {
            return Err(op);
        }
        self.submissions_used = used;
        self.submissions.push_back(op);
        Ok(())
    }

    fn queued(&mut self) -> usize {
        self.submissions_used
    }

    fn provide(&mut self, side: &mut KernelSide, buffer: u16) {
        assert!(side.is_lent(buffer), "buffer {buffer} is provided but not lent");
        assert!(!self.buffers.contains(&buffer), "buffer {buffer} is provided twice");
        assert!(self.buffers.len() < self.buffers_max, "the buffer ring is overrun");
        self.buffers.push_back(buffer);
    }

    fn renew_buffer_ring(&mut self) -> bool {
        assert!(self.receives.is_empty(), "the buffer ring is replaced while a receive is armed");
        self.buffers.clear();
        self.head_filled = 0;
        true
    }

    fn is_incremental(&self) -> bool {
        self.incremental
    }

    fn buffer_ring_entries(&self) -> usize {
        self.buffers_max
    }

    fn enter(&mut self, wait_for: u32, timeout: Option<Duration>) -> Result<(), i32> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            self.step();
            if self.completions.len() >= wait_for as usize {
                return Ok(());
            }
            if self.faults.strike(Fault::Interrupted) {
                return Err(libc::EINTR);
            }
            if !self.left_over && !self.wait(deadline) {
                return Err(libc::ETIME);
            }
        }
    }

    fn reap(&mut self, side: &mut KernelSide) -> Option<RawCqe> {
        let Posted { cqe, bytes } = self.completions.pop_front()?;
        if let Some(buffer) = cqe.buffer() {
            side.spare(buffer)[..bytes.len()].copy_from_slice(&bytes);
        }
        if let Some(Kind::Wake) = Kind::of(cqe.user_data) {
            self.waker.seen();
        }
        Some(cqe)
    }

    fn reap_quiet(&mut self) -> Option<SentQuietly> {
        if self.completions.is_empty() { self.quiet.pop_front() } else { None }
    }

    fn has_completions(&mut self) -> bool {
        !self.completions.is_empty()
    }

    fn has_quiet(&mut self) -> bool {
        !self.quiet.is_empty()
    }

    fn has_task_work(&mut self) -> bool {
        self.left_over || is_readable(&self.bell) || self.wake_armed && is_readable(&self.waker)
    }

    fn is_overflowing(&mut self) -> bool {
        false
    }

    fn peer_of(&mut self, fd: i32) -> Option<SocketAddr> {
        let mut state = self.shared.lock();
        let number = state.descriptor(fd);
        let connection = state.connection(number);
        (!connection.is_reset()).then(|| connection.addrs().0)
    }

    fn turn_newcomers_away(&mut self, listener: u16) -> Duration {
        let (listener, _) = self.listeners[usize::from(listener)];
        let late = self.faults.strike(Fault::NewcomersLate);
        self.shared.lock().listener(listener).closed |= !late;
        if late { Duration::from_millis(5) } else { Duration::ZERO }
    }

    fn take_queued(&mut self, listener: u16) -> Result<i32, i32> {
        let (listener, armed) = self.listeners[usize::from(listener)];
        assert!(!armed, "a queue is taken from under an accept");
        let mut state = self.shared.lock();
        if state.listener(listener).backlog.is_empty() {
            return Err(libc::EAGAIN);
        }
        if self.faults.strike(Fault::TakeNoDescriptor) {
            return Err(libc::EMFILE);
        }
        let number = state.listener(listener).backlog.pop_front().ok_or(libc::EAGAIN)?;
        Ok(state.open_descriptor(self.ring, number))
    }

    fn close_listener(&mut self, listener: u16) {
        let (listener, armed) = self.listeners[usize::from(listener)];
        assert!(!armed, "a listener is closed under its accept");
        self.shared.lock().close_listener(listener);
        self.shared.tell_clients();
    }

    fn now(&mut self) -> Duration {
        self.started.elapsed()
    }

    fn open_socket(&mut self, address: &Address) -> Result<i32, i32> {
        if address.as_ip().is_none() {
            return Err(libc::EAFNOSUPPORT);
        }
        Ok(self.shared.lock().open_socket(self.ring))
    }

    fn waker(&self) -> task::Waker {
        self.waker.to_task()
    }

    /// The descriptor only stands for the socket; if it is closed on the way, the connection goes when its number is used
    /// again.
    fn hand_over(&mut self, fd: i32) -> Option<OwnedFd> {
        let stand_in = eventfd(0, EventfdFlags::CLOEXEC).ok()?;
        let mut state = self.shared.lock();
        let number = state.take_descriptor(fd);
        state.pass(stand_in.as_raw_fd(), number);
        Some(stand_in)
    }

    fn take_over(&mut self, stand_in: OwnedFd) -> i32 {
        // The number is this one's until the end of this function.
        self.shared.lock().take_passed(self.ring, stand_in.as_raw_fd())
    }

    fn finish(&mut self, side: &mut KernelSide) -> bool {
        self.submissions.clear();
        self.connects.clear();
        self.completions.clear();
        self.quiet.clear();
        self.receives.clear();
        self.sends.clear();
        self.buffers.clear();
        let mut state = self.shared.lock();
        for (_, file) in self.files.drain() {
            state.close(file.connection, file.side, false);
        }
        state.close_ring(self.ring);
        drop(state);
        self.shared.tell_clients();
        for buffer in 0..side.pool().buffers_max() as u16 {
            if side.is_lent(buffer) {
                side.take_back(buffer);
            }
        }
        true
    }
}
