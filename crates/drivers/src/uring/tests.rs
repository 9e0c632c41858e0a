//! The bookkeeping against a kernel that follows a script, including wrong answers.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use ringserve_buf::PoolConfig;
use ringserve_core::{AcceptEnd, Address, Batch, CloseHow, GivesBack, Socket};

use super::kernel::{BUFFER_SHIFT, F_BUFFER, F_MORE, SendMode, SentQuietly};
use super::*;

mod accept;
mod close;
mod connect;
mod give_back;
mod probes;
mod receive;
mod send;
mod turn;

/// A kernel that answers as scripted, and notes what it is asked.
struct Script {
    room: usize,
    submitted: Vec<RawOp>,
    queued: usize,
    batches: HashMap<u64, Box<Batch>>,
    blocks: HashMap<u64, (Box<Block>, usize)>,
    provided: VecDeque<u16>,
    completions: VecDeque<RawCqe>,
    overflowing: bool,
    task_work: bool,
    enters: Vec<(u32, Option<Duration>)>,
    next_enter: Result<(), i32>,
    now: Duration,
    /// The answers of any listener's queue, in order; afterwards it is empty.
    backlog: VecDeque<Result<i32, i32>>,
    /// Time in which connections may come after new ones were turned away.
    late: Duration,
    adopted: bool,
    /// Calls about listeners, in order.
    calls: Vec<String>,
}

impl Kernel for Script {
    type Descriptor = i32;

    fn open_socket(&mut self, address: &Address) -> Result<i32, i32> {
        if address.as_ip().is_some() { Ok(77) } else { Err(libc::EAFNOSUPPORT) }
    }

    fn submit(&mut self, op: RawOp) -> Result<(), RawOp> {
        if self.queued == self.room {
            return Err(op);
        }
        self.queued += 1;
        self.submitted.push(match op {
            RawOp::Send { id, batch, mode } => {
                assert!(self.batches.insert(id.bits(), batch).is_none());
                RawOp::Send { id, batch: Box::default(), mode }
            }
            RawOp::ReceiveInto { id, block, most } => {
                assert!(self.blocks.insert(id.bits(), (block, most as usize)).is_none());
                RawOp::ReceiveInto { id, block: Box::default(), most }
            }
            op => op,
        });
        Ok(())
    }

    fn queued(&mut self) -> usize {
        self.queued
    }

    fn provide(&mut self, side: &mut KernelSide, buffer: u16) {
        assert!(side.is_lent(buffer));
        self.provided.push_back(buffer);
    }

    fn renew_buffer_ring(&mut self) -> bool {
        self.calls.push("renew the buffer ring".to_owned());
        self.provided.clear();
        true
    }

    fn buffer_ring_entries(&self) -> usize {
        64
    }

    fn enter(&mut self, wait_for: u32, timeout: Option<Duration>) -> Result<(), i32> {
        self.queued = 0;
        self.enters.push((wait_for, timeout));
        std::mem::replace(&mut self.next_enter, Ok(()))
    }

    fn reap(&mut self, side: &mut KernelSide) -> Option<RawCqe> {
        let mut cqe = self.completions.pop_front()?;
        match Kind::of(cqe.user_data) {
            Some(Kind::Send) => cqe.batch = self.batches.remove(&cqe.id().bits()),
            Some(Kind::ReceiveInto) if cqe.res > 0 => {
                let (block, _) = self.blocks.get_mut(&cqe.id().bits()).unwrap();
                block.spare(cqe.res as usize).fill(cqe.id().slot() as u8);
            }
            Some(Kind::Receive) if cqe.res > 0 => {
                let buffer = cqe.buffer().unwrap();
                side.spare(buffer)[..cqe.res as usize].fill(cqe.id().slot() as u8);
            }
            _ => {}
        }
        Some(cqe)
    }

    fn take_block(&mut self, id: ConnId) -> Option<(Box<Block>, usize)> {
        self.blocks.remove(&id.bits())
    }

    fn reap_quiet(&mut self) -> Option<SentQuietly> {
        None
    }

    fn has_completions(&mut self) -> bool {
        !self.completions.is_empty()
    }

    fn has_quiet(&mut self) -> bool {
        false
    }

    fn has_task_work(&mut self) -> bool {
        self.task_work
    }

    fn is_overflowing(&mut self) -> bool {
        self.overflowing
    }

    fn peer_of(&mut self, _fd: i32) -> Option<SocketAddr> {
        None
    }

    fn is_adopted(&self, _listener: u16) -> bool {
        self.adopted
    }

    fn turn_newcomers_away(&mut self, listener: u16) -> Duration {
        assert!(!self.adopted, "newcomers of an adopted listener are turned away");
        self.calls.push(format!("turn away at {listener}"));
        self.late
    }

    fn take_queued(&mut self, listener: u16) -> Result<i32, i32> {
        self.calls.push(format!("take at {listener}"));
        self.backlog.pop_front().unwrap_or(Err(libc::EAGAIN))
    }

    fn close_listener(&mut self, listener: u16) {
        self.calls.push(format!("close {listener}"));
    }

    fn now(&mut self) -> Duration {
        self.now
    }

    fn waker(&self) -> Waker {
        Waker::noop().clone()
    }

    fn hand_over(&mut self, fd: i32) -> Option<i32> {
        Some(fd)
    }

    fn take_over(&mut self, fd: i32) -> i32 {
        fd
    }

    fn finish(&mut self, _side: &mut KernelSide) -> bool {
        true
    }
}

struct Rig {
    ring: Uring<Script>,
    out: Vec<Completion>,
}

impl Rig {
    fn new(buffers_max: usize) -> Rig {
        let config = PoolConfig { buffer_bytes: 64, buffers_max, poison: true };
        let (_, side) = Pool::new(config).unwrap();
        let kernel = Script {
            room: 1000,
            submitted: Vec::new(),
            queued: 0,
            batches: HashMap::new(),
            blocks: HashMap::new(),
            provided: VecDeque::new(),
            completions: VecDeque::new(),
            overflowing: false,
            task_work: false,
            enters: Vec::new(),
            next_enter: Ok(()),
            now: Duration::from_secs(100),
            backlog: VecDeque::new(),
            late: Duration::ZERO,
            adopted: false,
            calls: Vec::new(),
        };
        let mut rig = Rig { ring: Uring::with_kernel(kernel, side, 1000), out: Vec::new() };
        rig.turn();
        rig.ops();
        rig
    }

    fn kernel(&mut self) -> &mut Script {
        &mut self.ring.kernel
    }

    fn turn(&mut self) {
        self.ring.turn(Wait::No, Budget::default(), &mut self.out).unwrap();
    }

    /// The operations submitted since the last call.
    fn ops(&mut self) -> Vec<RawOp> {
        std::mem::take(&mut self.kernel().submitted)
    }

    fn seen(&mut self) -> Vec<String> {
        self.out
            .drain(..)
            .map(|completion| match completion {
                Completion::Received { id, lease } => {
                    assert!(lease.iter().all(|byte| *byte == id.slot() as u8));
                    format!("{id} got {}", lease.len())
                }
                Completion::ReceiveEnded { id, end } => format!("{id} {end:?}"),
                Completion::Filled { id, block, bytes, end } => {
                    format!("{id} filled {bytes} to {} {end:?}", block.len())
                }
                Completion::Sent { id, batch, end } => format!("{id} sent {end:?} left {}", batch.len()),
                Completion::Closed { id } => format!("{id} closed"),
                other => format!("{other:?}"),
            })
            .collect()
    }

    fn says(&mut self, kind: Kind, bits: u64, res: i32, flags: u32) {
        self.kernel().completions.push_back(RawCqe::new(kind.with(bits), res, flags));
    }

    /// A receive's completion with the next provided buffer.
    fn says_bytes(&mut self, id: ConnId, len: i32, flags: u32) {
        let buffer = self.kernel().provided.pop_front().unwrap();
        self.says(Kind::Receive, id.bits(), len, flags | F_BUFFER | u32::from(buffer) << BUFFER_SHIFT);
    }

    fn adopted(&mut self, slot: u32, generation: u64) -> ConnId {
        let id = ConnId::new(slot, generation);
        self.ring.submit(Op::Adopt { id, socket: Socket(9) });
        id
    }

    fn receiving(&mut self, slot: u32, generation: u64) -> ConnId {
        let id = self.adopted(slot, generation);
        self.ring.submit(Op::Receive { id });
        self.turn();
        self.ops();
        id
    }

    fn sending(&mut self, bytes: usize) -> ConnId {
        let id = self.adopted(1, 1);
        let mut batch = Box::new(Batch::new());
        batch.put(&vec![1; bytes]);
        self.ring.submit(Op::Send { id, batch });
        self.turn();
        self.ops();
        id
    }
}

/// The kernel answers this often that it does not find the operation to cancel; each time the
/// cancel comes again 10 ms later, and the driver waits no longer than that. The last answer is not
/// waited for.
#[track_caller]
fn missed(rig: &mut Rig, kind: Kind, bits: u64, times: u32) {
    for time in 0..times {
        rig.says(kind, bits, -libc::ENOENT, 0);
        rig.turn();
        if time + 1 < times {
            cancelled_again(rig, kind, bits);
        }
    }
}

/// The cancel comes again 10 ms later, once, and the driver waits no longer than that.
#[track_caller]
fn cancelled_again(rig: &mut Rig, kind: Kind, bits: u64) {
    rig.kernel().now += Duration::from_millis(4);
    rig.turn();
    assert_eq!(rig.ops().len(), 0, "too early");
    rig.kernel().enters.clear();
    rig.ring.turn(Wait::Forever, Budget::default(), &mut rig.out).unwrap();
    assert_eq!(rig.kernel().enters, [(1, Some(Duration::from_millis(6)))]);
    rig.kernel().now += Duration::from_millis(6);
    rig.turn();
    let ops: Vec<_> = rig.ops().iter().map(RawOp::user_data).collect();
    assert_eq!(ops, [kind.with(bits)]);
    rig.turn();
    assert_eq!(rig.ops().len(), 0, "once");
}
