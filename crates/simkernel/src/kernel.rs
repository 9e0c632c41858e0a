//! One ring: its queues, its buffer ring, its file table, and the enter that submits, posts and waits.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::task;
use std::time::{Duration, Instant};

use ringserve_buf::KernelSide;
use ringserve_core::{Address, Batch, CloseHow, ConnId};
use ringserve_drivers::UringConfig;
use ringserve_drivers::kernel::{Kernel, Kind, RawCqe, RawOp, SentQuietly};
use rustix::event::Timespec;

use crate::alarm::{self, Alarm};
use crate::connection::Side;
use crate::faults::{Fault, Injector};
use crate::state::{Shared, Sleep, State, UNCONNECTED};

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
pub struct SimKernel {
    pub(crate) shared: Arc<Shared>,
    started: Instant,
    pub(crate) ring: i32,
    pub(crate) faults: Injector,
    /// Cancels in a row that did not find what lives.
    pub(crate) missed: u8,
    pub(crate) buffer_bytes: usize,
    /// Wakes the shard.
    waker: Alarm,
    /// Raised when something changes in the network.
    bell: Alarm,
    submissions_max: usize,
    buffers_max: usize,
    pub(crate) incremental: bool,
    submissions: VecDeque<RawOp>,
    /// Entries they take.
    submissions_used: usize,
    completions: VecDeque<Posted>,
    /// Sends that fitted, and have no completion.
    pub(crate) quiet: VecDeque<SentQuietly>,
    /// In virtual time, the end of the wait that goes on, which a quiet send does not end.
    waits_until: Option<Option<Duration>>,
    /// Provided buffers, and how many bytes of the first are used.
    pub(crate) buffers: VecDeque<u16>,
    pub(crate) head_filled: usize,
    /// Listeners of the network, and whether an accept is armed on each.
    pub(crate) listeners: Vec<(usize, bool)>,
    pub(crate) files: BTreeMap<u32, File>,
    pub(crate) receives: Vec<File>,
    pub(crate) sends: Vec<Sending>,
    /// Connects in flight, and where to.
    pub(crate) connects: Vec<(ConnId, SocketAddr)>,
    pub(crate) wake_armed: bool,
    /// Something is ready, and left for the next enter.
    pub(crate) left_over: bool,
}

impl SimKernel {
    pub(crate) fn new(shared: Arc<Shared>, shard: usize, config: &UringConfig) -> io::Result<SimKernel> {
        let (bell, waker) = (Alarm::new(shared.stepped)?, Alarm::new(shared.stepped)?);
        let (ring, listeners) = shared.lock().add_ring(shard, bell.clone());
        let faults = Injector::new(shared.plan.clone(), ring as u64);
        Ok(SimKernel {
            shared,
            started: Instant::now(),
            ring,
            faults,
            missed: 0,
            buffer_bytes: config.pool.buffer_bytes,
            waker,
            bell,
            submissions_max: config.submission_entries as usize,
            buffers_max: usize::from(config.buffer_ring_entries()),
            incremental: config.incremental,
            submissions: VecDeque::new(),
            submissions_used: 0,
            completions: VecDeque::new(),
            quiet: VecDeque::new(),
            waits_until: None,
            buffers: VecDeque::new(),
            head_filled: 0,
            listeners: listeners.into_iter().map(|listener| (listener, false)).collect(),
            files: BTreeMap::new(),
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
        let words = [self.ring as u64, cqe.user_data, cqe.res as u64, cqe.flags.into()];
        self.shared.note_bytes(&words, &bytes);
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
        if self.bell.is_raised() {
            self.bell.take();
            self.bell.seen();
        }
        let shared = self.shared.clone();
        let mut state = shared.lock();
        while let Some(op) = self.submissions.pop_front() {
            self.carry_out(op, &mut state);
        }
        self.submissions_used = 0;
        if self.wake_armed && self.waker.is_raised() {
            self.waker.take();
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
                None => state.tell_of(file.connection, file.side.other()),
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
        let both = [&self.bell, &self.waker];
        alarm::wait(&both[..if self.wake_armed { 2 } else { 1 }], timeout.as_ref());
        true
    }

    /// The enter in virtual time, which does not wait: what it would wait for is left for the scheduler.
    fn enter_stepped(&mut self, wait_for: u32, timeout: Option<Duration>) -> Result<(), i32> {
        let broken = self.shared.lock().broken(self.ring);
        if broken != 0 {
            return Err(broken);
        }
        if self.faults.strike(Fault::RingBreaks) {
            self.shared.lock().break_ring(self.ring, libc::EBADF);
            return Err(libc::EBADF);
        }
        let now = self.now();
        let is_over = self.waits_until.flatten().is_some_and(|until| until <= now);
        self.step();
        let (until, result) = match () {
            () if self.completions.len() >= wait_for as usize => (None, Ok(())),
            () if self.left_over || self.faults.strike(Fault::EnterInterrupted) => (None, Err(libc::EINTR)),
            // What the wait before this one held back is told now.
            () if is_over && !self.quiet.is_empty() => (None, Err(libc::ETIME)),
            () => (Some(timeout.map(|timeout| now.saturating_add(timeout))), Err(libc::ETIME)),
        };
        self.waits_until = until;
        let alarm = self.wake_armed.then(|| self.waker.clone());
        self.shared.lock().set_sleep(self.ring, Sleep { until, alarm });
        result
    }

    /// Which ring of its network it is.
    pub fn ring(&self) -> RingId {
        RingId(self.ring)
    }

    /// What is held now, by the slots of connections and by operations.
    fn held(&self, side: &KernelSide) -> Vec<String> {
        let name = format!("ring {} ended with", self.ring);
        let of = |what: &str, ids: Vec<ConnId>| {
            let line = format!("{name} {what} of {ids:?}");
            (!ids.is_empty()).then_some(line)
        };
        let accepts = self.listeners.iter().filter(|(_, armed)| *armed).count();
        let leased = side.pool().leased();
        [
            of("the descriptors", self.files.values().map(|file| file.id).collect()),
            of("receives", self.receives.iter().map(|file| file.id).collect()),
            of("sends", self.sends.iter().map(|send| send.file.id).collect()),
            of("connects", self.connects.iter().map(|(id, _)| *id).collect()),
            (accepts > 0).then(|| format!("{name} {accepts} accepts in flight")),
            (leased > 0).then(|| format!("{name} {leased} leased buffers")),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

/// A ring of a [`Network`](crate::Network).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RingId(pub(crate) i32);

impl Kernel for SimKernel {
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
        if self.shared.stepped {
            return self.enter_stepped(wait_for, timeout);
        }
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            self.step();
            if self.completions.len() >= wait_for as usize {
                return Ok(());
            }
            if self.faults.strike(Fault::EnterInterrupted) {
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
        let sent =
            if self.completions.is_empty() && self.has_quiet() { self.quiet.pop_front() } else { None }?;
        self.shared.note(&[self.ring as u64, sent.id.bits(), sent.bytes as u64]);
        Some(sent)
    }

    fn has_completions(&mut self) -> bool {
        !self.completions.is_empty()
    }

    fn has_quiet(&mut self) -> bool {
        !self.quiet.is_empty() && self.waits_until.is_none()
    }

    fn has_task_work(&mut self) -> bool {
        self.left_over || self.bell.is_raised() || self.wake_armed && self.waker.is_raised()
    }

    fn is_overflowing(&mut self) -> bool {
        false
    }

    fn peer_of(&mut self, fd: i32) -> Option<SocketAddr> {
        let mut state = self.shared.lock();
        let number = state.descriptor(fd);
        let connection = state.connection(number);
        (!connection.is_reset(Side::Server)).then(|| connection.addrs().0)
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
        let number = state.take_queued(listener).ok_or(libc::EAGAIN)?;
        Ok(state.open_descriptor(self.ring, number))
    }

    fn close_listener(&mut self, listener: u16) {
        let (listener, armed) = self.listeners[usize::from(listener)];
        assert!(!armed, "a listener is closed under its accept");
        self.shared.lock().close_listener(listener);
        self.shared.tell_clients();
    }

    fn now(&mut self) -> Duration {
        if self.shared.stepped { self.shared.lock().now() } else { self.started.elapsed() }
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

    /// The descriptor only stands for the socket, which is closed after it.
    fn hand_over(&mut self, fd: i32) -> Option<OwnedFd> {
        let (stand_in, descriptor) = io::pipe().ok()?;
        let descriptor = OwnedFd::from(descriptor);
        let mut state = self.shared.lock();
        let number = state.take_descriptor(fd);
        state.pass(descriptor.as_raw_fd(), stand_in, number);
        Some(descriptor)
    }

    fn take_over(&mut self, stand_in: OwnedFd) -> i32 {
        // The number is this one's until the end of this function.
        self.shared.lock().take_passed(self.ring, stand_in.as_raw_fd())
    }

    fn finish(&mut self, side: &mut KernelSide) -> bool {
        let held = self.held(side);
        self.submissions.clear();
        self.connects.clear();
        self.completions.clear();
        self.quiet.clear();
        self.receives.clear();
        self.sends.clear();
        self.buffers.clear();
        let mut state = self.shared.lock();
        for file in std::mem::take(&mut self.files).into_values() {
            state.close(file.connection, file.side, false);
        }
        state.left.extend(held);
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
