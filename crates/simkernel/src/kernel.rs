//! One ring of a network: the enter that submits, posts and waits.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::task;
use std::time::{Duration, Instant};

use ringserve_buf::{Block, KernelSide};
use ringserve_core::{Address, ConnId, PeerCredentials};
use ringserve_drivers::UringConfig;
use ringserve_drivers::kernel::{Kernel, Kind, RawCqe, RawOp, SentQuietly};
use rustix::event::Timespec;

use crate::adversary::HostileEvent;
use crate::alarm::{self, Alarm};
use crate::connection::{File, Side};
use crate::faults::{Fault, Injector};
use crate::ring::{Completions, PostedCompletion, Ring, Sizes};
use crate::shared::Shared;
use crate::state::{Sleep, State};

/// The longest delay of a late completion, in nanoseconds.
const LATE_MAX: u64 = 5_000_000;

/// The lower half of a shard's driver on a [`Network`](crate::Network).
pub struct SimKernel {
    pub(crate) shared: Arc<Shared>,
    started: Instant,
    /// Its number in the network.
    pub(crate) number: i32,
    pub(crate) faults: Injector,
    /// Completions carry the bytes that they bring, receives a flag for possible input, connects
    /// their address.
    pub(crate) ring: Ring<File, Vec<u8>, bool, SocketAddr>,
    /// Files on which this enter wrote, read or sent FIN.
    pub(crate) touched: Vec<File>,
    /// Wakes the shard.
    waker: Alarm,
    /// Raised when something changes in the network.
    bell: Alarm,
    /// In virtual time, the end of the current wait, which a quiet send does not end.
    waits_until: Option<Option<Duration>>,
    /// In virtual time, the current wait for several completions: their number, and its end. Until
    /// then none is seen.
    waits_for_more: Option<(usize, Duration)>,
    /// Listeners of the network.
    pub(crate) listeners: Vec<usize>,
    /// Something is ready, and postponed to the next enter.
    pub(crate) left_over: bool,
    /// Late completions, each with its time.
    late: Vec<(Duration, RawCqe)>,
}

impl SimKernel {
    pub(crate) fn new(shared: Arc<Shared>, shard: usize, config: &UringConfig) -> io::Result<SimKernel> {
        let (bell, waker) = (Alarm::new(shared.stepped)?, Alarm::new(shared.stepped)?);
        let (number, listeners) = shared.lock().add_ring(shard, bell.clone());
        let faults = Injector::new(shared.plan.clone(), number as u64);
        // Its completion queue is unbounded.
        let wanted = [config.submission_entries as usize, usize::MAX, config.buffer_ring_entries().into()];
        let [submissions, completions, buffers] = shared.plan.adversary.entries(wanted);
        let ring = Ring::new(Sizes {
            submissions,
            completions,
            buffers,
            buffer_bytes: config.pool.buffer_bytes,
            slots: config.connections as usize,
            listeners: listeners.len(),
        });
        Ok(SimKernel {
            shared,
            started: Instant::now(),
            number,
            faults,
            ring,
            touched: Vec::new(),
            waker,
            bell,
            waits_until: None,
            waits_for_more: None,
            listeners,
            left_over: false,
            late: Vec::new(),
        })
    }

    pub(crate) fn post(&mut self, cqe: RawCqe) {
        self.post_with(cqe, Vec::new());
    }

    pub(crate) fn post_with(&mut self, cqe: RawCqe, bytes: Vec<u8>) {
        let words = [self.number as u64, cqe.user_data, cqe.res as u64, cqe.flags.into()];
        self.shared.note_bytes(&words, &bytes);
        if !self.ring.completions.post(cqe, bytes) {
            self.faults.met(HostileEvent::Overflow);
        }
    }

    /// Posts a completion now, or later if the adversary causes this event.
    pub(crate) fn post_or_late(&mut self, cqe: RawCqe, event: HostileEvent, state: &State) {
        if !self.faults.meets(event) {
            return self.post(cqe);
        }
        let delay = Duration::from_nanos(self.faults.hostile_spread(10_000, LATE_MAX));
        self.late.push((state.now() + delay, cqe));
    }

    /// Posts late answers to cancels of this kind in this slot: those for one connection come in
    /// order.
    pub(crate) fn answer_late_cancels(&mut self, user_data: u64) {
        let (kind, slot) = (Kind::of(user_data), ConnId::from_bits(user_data).slot());
        let is_one = |late: &RawCqe| Kind::of(late.user_data) == kind && late.id().slot() == slot;
        while let Some(index) = self.late.iter().position(|(_, late)| is_one(late)) {
            let (_, cqe) = self.late.remove(index);
            self.post(cqe);
        }
    }

    /// Posts late completions that are due.
    fn post_due(&mut self, now: Duration) {
        while let Some(index) = self.late.iter().position(|(due, _)| *due <= now) {
            let (_, cqe) = self.late.remove(index);
            self.post(cqe);
        }
    }

    /// Carries out submitted operations and posts completions that are ready.
    fn step(&mut self) {
        if self.bell.is_raised() {
            self.bell.take();
            self.bell.seen();
        }
        let shared = self.shared.clone();
        let mut state = shared.lock();
        for file in state.take_news(self.number) {
            self.look_again(file);
        }
        self.ring.completions.flush();
        self.post_due(state.now());
        self.submit_all(&mut state);
        if self.ring.wake_armed && self.waker.is_raised() {
            self.waker.take();
            self.ring.wake_armed = false;
            self.post(RawCqe::new(Kind::Wake.with(0), 8, 0));
        }
        self.left_over = false;
        self.progress(&mut state);
        self.notify_others(&mut state);
        self.ring.completions.flush();
        drop(state);
        shared.notify_clients();
    }

    /// Carries out the submitted operations, or a part of them.
    fn submit_all(&mut self, state: &mut State) {
        let count = self.ring.submissions.len();
        let is_partial = count > 1 && self.faults.meets(HostileEvent::EnterPartial);
        let count = if is_partial { self.faults.hostile_spread(1, count as u64 - 1) as usize } else { count };
        for _ in 0..count {
            let Some(op) = self.ring.submissions.pop() else { break };
            self.carry_out(op, state);
        }
    }

    /// Notes that there may be input for the receive of this end.
    fn look_again(&mut self, file: File) {
        if let Some(receive) = self.ring.receives.iter_mut().find(|receive| receive.file == file) {
            receive.of = true;
        }
    }

    /// Notes that this end wrote, read or sent FIN: the other one is notified at the end of this
    /// enter. A write may have found a reset.
    pub(crate) fn touch(&mut self, file: File) {
        self.touched.push(file);
        self.look_again(file);
    }

    /// Notifies the other ends of connections of changes.
    fn notify_others(&mut self, state: &mut State) {
        for file in self.touched.drain(..) {
            if let Some(ring) = state.notify_of_change(file) {
                self.left_over |= ring == self.number;
            }
        }
    }

    /// Sleeps until something changes; false if the deadline has passed.
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
        alarm::wait(&both[..if self.ring.wake_armed { 2 } else { 1 }], timeout.as_ref());
        true
    }

    /// Enters in virtual time, without waiting: the scheduler handles the wait.
    fn enter_stepped(&mut self, wait_for: u32, timeout: Option<Duration>) -> Result<(), i32> {
        let broken = self.shared.lock().broken(self.number);
        if broken != 0 {
            return Err(broken);
        }
        if self.faults.strike(Fault::RingBreaks) {
            self.shared.lock().break_ring(self.number, libc::EBADF);
            return Err(libc::EBADF);
        }
        if let Some(errno) = self.refusal() {
            self.waits_until = None;
            self.shared.lock().set_sleep(self.number, Sleep { until: None, alarm: None });
            return Err(errno);
        }
        let wait_for = (wait_for as usize).min(self.ring.sizes().completions);
        let now = self.now();
        let is_over = self.waits_until.flatten().is_some_and(|until| until <= now);
        self.step();
        if wait_for > 1
            && let Some(timeout) = timeout
        {
            self.waits_for_more = Some((wait_for, now.saturating_add(timeout)));
        }
        let posted = self.ring.completions.ready.len();
        let is_cut = !self.ring.submissions.is_empty() || !self.ring.completions.overflow.is_empty();
        self.waits_for_more.take_if(|(many, until)| posted >= *many || *until <= now || is_cut);
        let (until, result) = match () {
            () if is_cut => (None, Ok(())),
            () if self.waits_for_more.is_some() => {
                (Some(self.waits_for_more.map(|(_, until)| until)), Err(libc::ETIME))
            }
            () if self.ring.completions.ready.len() >= wait_for => (None, Ok(())),
            () if self.left_over || self.faults.strike(Fault::EnterInterrupted) => (None, Err(libc::EINTR)),
            // Completions that the previous wait held back are reported now.
            () if is_over && !self.ring.completions.quiet.is_empty() => (None, Err(libc::ETIME)),
            () => (Some(timeout.map(|timeout| now.saturating_add(timeout))), Err(libc::ETIME)),
        };
        self.waits_until = until;
        let alarm = self.ring.wake_armed.then(|| self.waker.clone());
        // Late completions come in the middle of a wait.
        let due = self.late.iter().map(|(due, _)| *due).min();
        let until = until.map(|end| end.into_iter().chain(due).min());
        self.shared.lock().set_sleep(self.number, Sleep { until, alarm });
        result
    }

    /// The error of an enter that does nothing, if this is one.
    fn refusal(&mut self) -> Option<i32> {
        let overflows = !self.ring.completions.overflow.is_empty();
        if overflows && self.faults.meets(HostileEvent::EnterBusy) {
            return Some(libc::EBUSY);
        }
        if self.ring.submissions.is_empty() {
            return None;
        }
        let refusals =
            [(HostileEvent::EnterAgain, libc::EAGAIN), (HostileEvent::EnterNoMemory, libc::ENOMEM)];
        refusals.into_iter().find(|(event, _)| self.faults.meets(*event)).map(|(_, errno)| errno)
    }

    /// The number of the ring in its network.
    pub fn ring(&self) -> RingId {
        RingId(self.number)
    }
}

/// A ring of a [`Network`](crate::Network).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RingId(pub(crate) i32);

impl Kernel for SimKernel {
    type Descriptor = OwnedFd;

    fn submit(&mut self, op: RawOp) -> Result<(), RawOp> {
        self.ring.submissions.push(op).inspect_err(|_| self.faults.met(HostileEvent::QueueFull))
    }

    fn queued(&mut self) -> usize {
        self.ring.submissions.entries()
    }

    fn provide(&mut self, side: &mut KernelSide, buffer: u16) {
        self.ring.buffers.provide(side, buffer);
    }

    fn renew_buffer_ring(&mut self) -> bool {
        self.ring.check_renewable();
        self.ring.buffers.clear();
        true
    }

    fn buffer_ring_entries(&self) -> usize {
        self.ring.sizes().buffers
    }

    fn enter(&mut self, wait_for: u32, timeout: Option<Duration>) -> Result<(), i32> {
        if self.shared.stepped {
            return self.enter_stepped(wait_for, timeout);
        }
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            self.step();
            if self.ring.completions.ready.len() >= wait_for as usize {
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
        if self.waits_for_more.is_some() {
            return None;
        }
        let PostedCompletion { cqe, note: bytes } = self.ring.completions.ready.pop_front()?;
        if let Some(buffer) = cqe.buffer() {
            side.spare(buffer)[..bytes.len()].copy_from_slice(&bytes);
        }
        if let Some(Kind::Wake) = Kind::of(cqe.user_data) {
            self.waker.seen();
        }
        Some(cqe)
    }

    fn take_block(&mut self, id: ConnId) -> Option<(Box<Block>, usize)> {
        self.ring.take_block(id)
    }

    fn reap_quiet(&mut self) -> Option<SentQuietly> {
        let sent = if self.has_quiet() { self.ring.completions.pop_quiet() } else { None }?;
        self.shared.note(&[self.number as u64, sent.id.bits(), sent.bytes as u64]);
        Some(sent)
    }

    fn has_completions(&mut self) -> bool {
        !self.ring.completions.ready.is_empty() && self.waits_for_more.is_none()
    }

    fn has_quiet(&mut self) -> bool {
        let Completions { quiet, overflow, .. } = &self.ring.completions;
        !quiet.is_empty() && overflow.is_empty() && self.waits_until.is_none()
    }

    fn has_task_work(&mut self) -> bool {
        let is_due = !self.late.is_empty() && {
            let now = self.now();
            self.late.iter().any(|(due, _)| *due <= now)
        };
        self.left_over
            || is_due
            || self.waits_for_more.is_some()
            || self.bell.is_raised()
            || self.ring.wake_armed && self.waker.is_raised()
    }

    fn is_overflowing(&mut self) -> bool {
        !self.ring.completions.overflow.is_empty()
    }

    fn peer_of(&mut self, fd: i32) -> Option<SocketAddr> {
        let mut state = self.shared.lock();
        let number = state.descriptor(fd);
        let connection = state.connection(number);
        (!connection.is_reset(Side::Server)).then(|| connection.addrs().0)
    }

    fn local_of(&mut self, fd: i32) -> Option<SocketAddr> {
        let mut state = self.shared.lock();
        let number = state.descriptor(fd);
        Some(state.connection(number).addrs().1)
    }

    fn credentials_of(&mut self, fd: i32) -> Option<PeerCredentials> {
        let mut state = self.shared.lock();
        let number = state.descriptor(fd);
        let host = state.connection(number).addrs().0.ip();
        state.credentials.get(&host).copied()
    }

    fn is_adopted(&self, listener: u16) -> bool {
        self.shared.lock().listeners.is_adopted(self.listeners[usize::from(listener)])
    }

    fn turn_newcomers_away(&mut self, listener: u16) -> Duration {
        let listener = self.listeners[usize::from(listener)];
        let late = self.faults.strike(Fault::NewcomersLate);
        self.shared.lock().listeners.get_mut(listener).closed |= !late;
        if late { Duration::from_millis(5) } else { Duration::ZERO }
    }

    fn take_queued(&mut self, listener: u16) -> Result<i32, i32> {
        let armed = self.ring.accepts[usize::from(listener)].is_some();
        assert!(!armed, "a queue is taken from under an accept");
        let listener = self.listeners[usize::from(listener)];
        let mut state = self.shared.lock();
        if !state.listeners.has_queued(listener) {
            return Err(libc::EAGAIN);
        }
        if self.faults.strike(Fault::TakeNoDescriptor) {
            return Err(libc::EMFILE);
        }
        let number = state.take_queued(listener).ok_or(libc::EAGAIN)?;
        if self.faults.meets(HostileEvent::TakeAborted) {
            state.close(number, Side::Server, true);
            return Err(libc::ECONNABORTED);
        }
        Ok(state.open_descriptor(self.number, number))
    }

    fn close_listener(&mut self, listener: u16) {
        let armed = self.ring.accepts[usize::from(listener)].is_some();
        assert!(!armed, "a listener is closed under its accept");
        self.shared.lock().close_listener(self.listeners[usize::from(listener)]);
        self.shared.notify_clients();
    }

    fn now(&mut self) -> Duration {
        if self.shared.stepped { self.shared.lock().now() } else { self.started.elapsed() }
    }

    fn open_socket(&mut self, address: &Address) -> Result<i32, i32> {
        if address.as_ip().is_none() {
            return Err(libc::EAFNOSUPPORT);
        }
        if self.faults.meets(HostileEvent::SocketFails) {
            return Err(libc::EMFILE);
        }
        Ok(self.shared.lock().open_socket(self.number))
    }

    fn waker(&self) -> task::Waker {
        self.waker.to_task()
    }

    /// Returns a descriptor that only represents the socket, which is closed after it.
    fn hand_over(&mut self, fd: i32) -> Option<OwnedFd> {
        let (stand_in, descriptor) = io::pipe().ok()?;
        let descriptor = OwnedFd::from(descriptor);
        let mut state = self.shared.lock();
        let number = state.take_descriptor(fd);
        state.pass(descriptor.as_raw_fd(), stand_in, number);
        Some(descriptor)
    }

    fn take_over(&mut self, stand_in: OwnedFd) -> i32 {
        // The number belongs to this ring until the end of this function.
        self.shared.lock().take_passed(self.number, stand_in.as_raw_fd())
    }

    fn finish(&mut self, side: &mut KernelSide) -> bool {
        let mut held = self.ring.held();
        let leased = side.pool().leased();
        held.extend((leased > 0).then(|| format!("{leased} leased buffers")));
        let mut state = self.shared.lock();
        state.left.extend(held.iter().map(|held| format!("ring {} ended with {held}", self.number)));
        self.ring.files.iter().for_each(|(_, file)| state.close(file.connection, file.side, false));
        state.close_ring(self.number);
        drop(state);
        self.shared.notify_clients();
        self.ring.finish(side);
        self.late.clear();
        true
    }
}
