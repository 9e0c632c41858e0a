//! A kernel that follows a script, below the bookkeeping of the io_uring driver: every round brings
//! the same frame on some connections, and the next one begins once all its replies were sent. It
//! makes no system call except those that wake another shard.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::task;
use std::thread;
use std::time::Duration;

use ringserve_buf::{KernelSide, Pool};
use ringserve_core::{Address, ConnId};
use ringserve_drivers::kernel::{
    BUFFER_SHIFT, F_BUFFER, F_MORE, Kernel, Kind, RawCqe, RawOp, SendMode, SentQuietly,
};
use ringserve_drivers::{Uring, UringConfig, Waker};
use ringserve_server::internals::Drivers;
use rustix::event::{PollFd, PollFlags, poll};

/// The script. The first shard receives, and reports when all rounds are over.
#[derive(Clone)]
pub struct Script {
    /// Connections of each shard.
    pub connections: u64,
    /// The listener at which they come.
    pub listener: u64,
    pub shards: u64,
    /// The bytes that each connection of the first shard receives in a round.
    pub frame: Vec<u8>,
    /// Sends of a round, on all shards.
    pub sends: u64,
    pub rounds: u64,
    pub over: SyncSender<()>,
}

/// The drivers of a server that follows a script.
pub struct Scripted {
    script: Script,
    shared: Arc<Shared>,
}

struct Shared {
    armed: AtomicU64,
    sent: AtomicU64,
    /// Wakes the first shard when another one made progress.
    bell: Waker,
}

impl Scripted {
    pub fn new(script: Script) -> io::Result<Scripted> {
        let (armed, sent) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Scripted { script, shared: Arc::new(Shared { armed, sent, bell: Waker::new()? }) })
    }
}

impl Drivers for Scripted {
    type Driver = Uring<ScriptedKernel>;

    fn listen(&self, addr: SocketAddr, _: usize) -> io::Result<SocketAddr> {
        Ok(addr)
    }

    fn make(&self, shard: usize, config: &UringConfig) -> io::Result<Uring<ScriptedKernel>> {
        let (_, side) = Pool::new(config.pool).map_err(io::Error::other)?;
        let kernel = ScriptedKernel {
            script: self.script.clone(),
            shared: self.shared.clone(),
            receives: shard == 0,
            waker: Waker::new()?,
            wake_armed: false,
            rounds: 0,
            submissions: Vec::new(),
            completions: VecDeque::new(),
            quiet: VecDeque::new(),
            buffers: VecDeque::new(),
            buffers_max: config.buffer_ring_entries().into(),
            receiving: Vec::new(),
            starved: Vec::new(),
        };
        Ok(Uring::with_kernel(kernel, side, config.connections))
    }
}

pub struct ScriptedKernel {
    script: Script,
    shared: Arc<Shared>,
    /// True on the first shard.
    receives: bool,
    waker: Waker,
    wake_armed: bool,
    /// Rounds that began.
    rounds: u64,
    submissions: Vec<RawOp>,
    completions: VecDeque<RawCqe>,
    quiet: VecDeque<SentQuietly>,
    buffers: VecDeque<u16>,
    buffers_max: usize,
    receiving: Vec<ConnId>,
    /// Connections whose frame waits for a buffer.
    starved: Vec<ConnId>,
}

impl ScriptedKernel {
    fn carry_out(&mut self, op: RawOp) {
        let user_data = op.user_data();
        match op {
            RawOp::Accept { .. } if user_data != Kind::Accept.with(self.script.listener) => {}
            RawOp::Accept { .. } => {
                let accepted =
                    (0..self.script.connections).map(|n| RawCqe::new(user_data, n as i32 + 3, F_MORE));
                self.completions.extend(accepted);
            }
            RawOp::Receive { id } => {
                self.receiving.push(id);
                self.shared.armed.fetch_add(1, Ordering::AcqRel);
                if let Some(found) = self.starved.iter().position(|starved| *starved == id) {
                    self.starved.swap_remove(found);
                    self.bring(self.receiving.len() - 1);
                }
            }
            RawOp::Send { id, batch, mode } => {
                let bytes = batch.len() as i32;
                if mode == SendMode::TryQuietly {
                    self.quiet.push_back(SentQuietly { id, bytes, batch });
                } else {
                    self.completions
                        .push_back(RawCqe { batch: Some(batch), ..RawCqe::new(user_data, bytes, 0) });
                }
                self.shared.sent.fetch_add(1, Ordering::AcqRel);
            }
            RawOp::ReadWake => self.wake_armed = true,
            RawOp::Install { .. } => {}
            other => unreachable!("the script has no {other:?}"),
        }
    }

    /// Brings the next frames, if all replies to the last ones were sent.
    fn begin_round(&mut self) {
        let Script { connections, shards, sends, .. } = self.script;
        let all_armed = self.shared.armed.load(Ordering::Acquire) == connections * shards;
        if !all_armed || self.shared.sent.load(Ordering::Acquire) != self.rounds * sends {
            return;
        }
        if self.rounds == self.script.rounds {
            let _ = self.script.over.send(());
            loop {
                thread::park();
            }
        }
        self.rounds += 1;
        for index in (0..self.receiving.len()).rev() {
            self.bring(index);
        }
    }

    /// Brings a frame. If there is no buffer the receive ends, and the frame comes once there is a
    /// new one.
    fn bring(&mut self, index: usize) {
        let id = self.receiving[index];
        let user_data = Kind::Receive.with(id.bits());
        let cqe = match self.buffers.pop_front() {
            Some(buffer) => {
                let flags = F_MORE | F_BUFFER | u32::from(buffer) << BUFFER_SHIFT;
                RawCqe::new(user_data, self.script.frame.len() as i32, flags)
            }
            None => {
                self.receiving.swap_remove(index);
                self.shared.armed.fetch_sub(1, Ordering::AcqRel);
                self.starved.push(id);
                RawCqe::new(user_data, -libc::ENOBUFS, 0)
            }
        };
        self.completions.push_back(cqe);
    }

    /// Waits for another thread: one that wakes the shard, or another shard that made progress.
    fn wait(&mut self) {
        if !self.receives {
            self.shared.bell.wake();
        }
        let own = PollFd::new(&self.waker, PollFlags::IN);
        let mut both = [own, PollFd::new(&self.shared.bell, PollFlags::IN)];
        let watched = if self.receives { &mut both[..] } else { &mut both[..1] };
        poll(watched, None).expect("both descriptors are open");
        let [is_called, is_told] = both.map(|fd| fd.revents().contains(PollFlags::IN));
        if is_called && self.wake_armed {
            empty(&self.waker);
            self.wake_armed = false;
            self.completions.push_back(RawCqe::new(Kind::Wake.with(0), 8, 0));
        }
        if is_told {
            empty(&self.shared.bell);
            self.shared.bell.seen();
        }
    }
}

fn empty(waker: &Waker) {
    rustix::io::read(waker, &mut [0; 8]).expect("an eventfd that is readable can be read");
}

impl Kernel for ScriptedKernel {
    type Descriptor = OwnedFd;

    fn submit(&mut self, op: RawOp) -> Result<(), RawOp> {
        self.submissions.push(op);
        Ok(())
    }

    fn queued(&mut self) -> usize {
        self.submissions.len()
    }

    fn provide(&mut self, _: &mut KernelSide, buffer: u16) {
        self.buffers.push_back(buffer);
    }

    fn buffer_ring_entries(&self) -> usize {
        self.buffers_max
    }

    fn renew_buffer_ring(&mut self) -> bool {
        false
    }

    fn enter(&mut self, wait_for: u32, _: Option<Duration>) -> Result<(), i32> {
        let mut submissions = std::mem::take(&mut self.submissions);
        submissions.drain(..).for_each(|op| self.carry_out(op));
        self.submissions = submissions;
        while wait_for > 0 && self.completions.is_empty() {
            if self.receives {
                self.begin_round();
            }
            if self.completions.is_empty() {
                self.wait();
            }
        }
        Ok(())
    }

    fn reap(&mut self, side: &mut KernelSide) -> Option<RawCqe> {
        let cqe = self.completions.pop_front()?;
        if let Some(buffer) = cqe.buffer() {
            side.spare(buffer)[..self.script.frame.len()].copy_from_slice(&self.script.frame);
        }
        if let Some(Kind::Wake) = Kind::of(cqe.user_data) {
            self.waker.seen();
        }
        Some(cqe)
    }

    fn reap_quiet(&mut self) -> Option<SentQuietly> {
        self.quiet.pop_front()
    }

    fn has_completions(&mut self) -> bool {
        !self.completions.is_empty()
    }

    fn has_quiet(&mut self) -> bool {
        !self.quiet.is_empty()
    }

    fn has_task_work(&mut self) -> bool {
        false
    }

    fn is_overflowing(&mut self) -> bool {
        false
    }

    fn peer_of(&mut self, _: i32) -> Option<SocketAddr> {
        None
    }

    fn turn_newcomers_away(&mut self, _: u16) -> Duration {
        Duration::ZERO
    }

    fn take_queued(&mut self, _: u16) -> Result<i32, i32> {
        Err(libc::EAGAIN)
    }

    fn close_listener(&mut self, _: u16) {}

    fn now(&mut self) -> Duration {
        Duration::from_micros(self.rounds)
    }

    fn open_socket(&mut self, _: &Address) -> Result<i32, i32> {
        Err(libc::EAFNOSUPPORT)
    }

    fn waker(&self) -> task::Waker {
        self.waker.to_task()
    }

    fn hand_over(&mut self, _: i32) -> Option<OwnedFd> {
        None
    }

    fn take_over(&mut self, _: OwnedFd) -> i32 {
        unreachable!("no shard is full, so none hands a connection over")
    }

    fn finish(&mut self, _: &mut KernelSide) -> bool {
        true
    }
}
