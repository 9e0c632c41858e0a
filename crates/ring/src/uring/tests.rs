//! The bookkeeping against a kernel that follows a script, lies included.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use ringserve_buf::{Counts, PoolConfig};
use ringserve_core::{AcceptEnd, Address, Batch, CloseHow, GivesBack, Socket};

use super::*;
use crate::seam::{BUFFER_SHIFT, F_BUF_MORE, F_BUFFER, F_MORE, SendMode, SentQuietly};

mod probes;

/// Says what it is told to, and notes what it is asked.
struct Script {
    room: usize,
    submitted: Vec<RawOp>,
    queued: usize,
    batches: HashMap<u64, Box<Batch>>,
    provided: VecDeque<u16>,
    completions: VecDeque<RawCqe>,
    overflowing: bool,
    task_work: bool,
    enters: Vec<(u32, Option<Duration>)>,
    next_enter: Result<(), i32>,
    now: Duration,
    /// What the queue of any listener answers, in order; then it is empty.
    backlog: VecDeque<Result<i32, i32>>,
    /// How long connections may come after newcomers were turned away.
    late: Duration,
    /// Calls about listeners, in order.
    calls: Vec<String>,
}

impl Kernel for Script {
    fn open_socket(&mut self, address: &Address) -> Result<i32, i32> {
        if address.ip().is_some() { Ok(77) } else { Err(libc::EAFNOSUPPORT) }
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
            Some(Kind::Receive) if cqe.res > 0 => {
                let buffer = cqe.buffer().unwrap();
                side.spare(buffer)[..cqe.res as usize].fill(cqe.id().slot() as u8);
            }
            _ => {}
        }
        Some(cqe)
    }

    fn reap_quiet(&mut self) -> Option<SentQuietly> {
        None
    }

    fn has_completions(&mut self) -> bool {
        !self.completions.is_empty()
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

    fn turn_newcomers_away(&mut self, listener: u16) -> Duration {
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
            provided: VecDeque::new(),
            completions: VecDeque::new(),
            overflowing: false,
            task_work: false,
            enters: Vec::new(),
            next_enter: Ok(()),
            now: Duration::from_secs(100),
            backlog: VecDeque::new(),
            late: Duration::ZERO,
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

    /// What was submitted since the last call.
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

fn connecting(rig: &mut Rig, address: Address) -> ConnId {
    let id = ConnId::new(5, 1);
    rig.ring.submit(Op::Connect { id, address: Box::new(address) });
    rig.turn();
    id
}

fn local() -> Address {
    SocketAddr::from(([127, 0, 0, 1], 80)).into()
}

#[test]
fn a_connect_is_a_new_socket_in_the_table_and_then_a_connect() {
    let mut rig = Rig::new(8);
    let id = connecting(&mut rig, local());
    match &rig.ops()[..] {
        [RawOp::Install { id: installed, fd: 77 }, RawOp::Connect { id: connected, address }] => {
            assert_eq!((*installed, *connected, &**address), (id, id, &local()));
        }
        other => panic!("{other:?}"),
    }
    rig.says(Kind::Connect, id.bits(), 0, 0);
    rig.turn();
    assert_eq!(rig.seen(), [format!("Connected {{ id: {id}, result: Ok(()) }}")]);
    rig.ring.submit(Op::Receive { id });
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::Receive { .. }]));
}

#[test]
fn a_connect_that_is_stopped_ends_once() {
    let mut rig = Rig::new(8);
    let id = connecting(&mut rig, local());
    rig.ops();
    rig.ring.submit(Op::ConnectStop { id });
    rig.ring.submit(Op::ConnectStop { id });
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::CancelConnect { .. }]), "cancelled once");
    rig.says(Kind::CancelConnect, id.bits(), 0, 0);
    rig.says(Kind::Connect, id.bits(), -libc::ECANCELED, 0);
    rig.turn();
    assert_eq!(rig.seen(), [format!("Connected {{ id: {id}, result: Err({}) }}", libc::ECANCELED)]);
    // It is over: there is nothing to stop.
    rig.ring.submit(Op::ConnectStop { id });
    rig.ring.submit(Op::Close { id, how: CloseHow::Abort });
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::Close { .. }]));
    rig.says(Kind::Close, id.bits(), 0, 0);
    rig.turn();
    assert_eq!(rig.seen(), [format!("{id} closed")]);
    rig.says(Kind::Connect, id.bits(), 0, 0);
    rig.turn();
    assert_eq!((rig.seen().len(), rig.ring.anomalies().stale), (0, 1));
}

#[test]
fn a_socket_that_cannot_be_made_ends_the_connect_and_its_slot_is_closed_as_any() {
    let mut rig = Rig::new(8);
    let id = connecting(&mut rig, Address::unix("/nowhere"));
    assert!(rig.ops().is_empty());
    rig.turn();
    assert_eq!(rig.seen(), [format!("Connected {{ id: {id}, result: Err({}) }}", libc::EAFNOSUPPORT)]);
    rig.ring.submit(Op::Close { id, how: CloseHow::Abort });
    rig.says(Kind::Close, id.bits(), -libc::EBADF, 0);
    rig.turn();
    assert_eq!(rig.seen(), [format!("{id} closed")]);
}

#[test]
fn a_cancelled_receive_ends_once_though_its_completion_says_more() {
    let mut rig = Rig::new(8);
    let id = rig.receiving(1, 1);
    rig.ring.submit(Op::ReceiveStop { id });
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::CancelReceive { .. }]));
    rig.says_bytes(id, 5, F_MORE);
    rig.says(Kind::CancelReceive, id.bits(), 0, 0);
    rig.says(Kind::Receive, id.bits(), -libc::ECANCELED, F_MORE);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 got 5", "1.1 Stopped"]);
    assert_eq!(rig.ring.anomalies(), Anomalies { more_flag: 1, ..Anomalies::default() });
    rig.ring.submit(Op::Close { id, how: CloseHow::Orderly });
    rig.turn();
    rig.says(Kind::Close, id.bits(), 0, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 closed"]);
}

#[test]
fn a_receive_that_ended_by_itself_is_armed_again() {
    let mut rig = Rig::new(8);
    let id = rig.receiving(1, 1);
    for (res, flags) in [(-libc::ECANCELED, F_MORE), (-libc::EINTR, 0)] {
        rig.says(Kind::Receive, id.bits(), res, flags);
        rig.turn();
        rig.turn();
        assert!(matches!(rig.ops()[..], [RawOp::Receive { .. }]));
    }
    rig.says_bytes(id, 7, 0);
    rig.turn();
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::Receive { .. }]));
    assert_eq!(rig.seen(), ["1.1 got 7"]);
}

#[test]
fn a_stop_that_meets_the_end_of_the_stream_answers_once() {
    let mut rig = Rig::new(8);
    for (generation, natural) in [(1, 0), (2, -libc::ECONNRESET), (3, -libc::ENOBUFS)] {
        let id = rig.receiving(1, generation);
        rig.says(Kind::Receive, id.bits(), natural, 0);
        rig.ring.submit(Op::ReceiveStop { id });
        rig.says(Kind::CancelReceive, id.bits(), -libc::ENOENT, 0);
        rig.turn();
        let seen = rig.seen();
        assert_eq!(seen.len(), 1, "{seen:?}");
        rig.ring.submit(Op::Close { id, how: CloseHow::Orderly });
        rig.turn();
        rig.says(Kind::Close, id.bits(), 0, 0);
        rig.turn();
        assert_eq!(rig.seen().len(), 1);
    }
    assert_eq!(rig.ring.anomalies(), Anomalies::default());
}

#[test]
fn a_receive_that_ended_in_silence_is_found_by_its_stop() {
    let mut rig = Rig::new(8);
    let id = rig.receiving(1, 1);
    rig.ring.submit(Op::ReceiveStop { id });
    rig.turn();
    rig.ops();
    missed(&mut rig, Kind::CancelReceive, id.bits(), 5);
    assert_eq!(rig.seen(), ["1.1 Stopped"]);
    assert_eq!(rig.ring.anomalies().silent_ends, 1);
}

/// The kernel answers that often that it does not find what is to be cancelled; each time the cancel comes again 10 ms
/// later, and the driver waits no longer than that. The last answer is not waited for.
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

#[test]
fn a_cancel_that_misses_a_send_is_made_again_until_the_send_ends() {
    let mut rig = Rig::new(8);
    let id = rig.sending(10);
    rig.ring.submit(Op::SendStop { id });
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::CancelSend { .. }]));
    for errno in [libc::ENOENT, libc::EALREADY, libc::ENOENT] {
        rig.says(Kind::CancelSend, id.bits(), -errno, 0);
        rig.turn();
        cancelled_again(&mut rig, Kind::CancelSend, id.bits());
    }
    rig.says(Kind::CancelSend, id.bits(), 0, 0);
    rig.says(Kind::Send, id.bits(), 4, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 sent Stopped left 6"]);
    rig.kernel().now += Duration::from_secs(1);
    rig.turn();
    assert_eq!((rig.ops().len(), rig.ring.stats().cancels_missed), (0, 3));
}

#[test]
fn a_cancel_that_missed_a_send_is_not_made_once_the_send_ended() {
    let mut rig = Rig::new(8);
    let id = rig.sending(10);
    rig.ring.submit(Op::SendStop { id });
    rig.turn();
    rig.ops();
    rig.says(Kind::CancelSend, id.bits(), -libc::ENOENT, 0);
    rig.says(Kind::Send, id.bits(), 10, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 sent Done left 0"]);
    let mut batch = Box::new(Batch::new());
    batch.put(b"next");
    rig.ring.submit(Op::Send { id, batch });
    rig.kernel().now += Duration::from_secs(1);
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::Send { .. }]), "the next send is left alone");
}

#[test]
fn a_cancel_that_misses_an_accept_is_made_again_until_the_accept_ends() {
    let mut rig = Rig::new(8);
    rig.ring.submit(Op::Accept { listener: 2 });
    rig.turn();
    rig.ring.submit(Op::AcceptStop { listener: 2 });
    rig.turn();
    rig.ops();
    missed(&mut rig, Kind::CancelAccept, 2, 20);
    cancelled_again(&mut rig, Kind::CancelAccept, 2);
    rig.says(Kind::CancelAccept, 2, 0, 0);
    rig.says(Kind::Accept, 2, -libc::ECANCELED, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["AcceptEnded { listener: 2, end: Stopped }"]);
}

#[test]
fn a_cancel_that_misses_a_connect_is_made_again_until_the_connect_ends() {
    let mut rig = Rig::new(8);
    let id = connecting(&mut rig, local());
    rig.ring.submit(Op::ConnectStop { id });
    rig.turn();
    rig.ops();
    missed(&mut rig, Kind::CancelConnect, id.bits(), 20);
    cancelled_again(&mut rig, Kind::CancelConnect, id.bits());
    rig.says(Kind::Connect, id.bits(), -libc::ECANCELED, 0);
    rig.says(Kind::CancelConnect, id.bits(), -libc::ENOENT, 0);
    rig.turn();
    assert_eq!(rig.seen().len(), 1);
    rig.kernel().now += Duration::from_secs(1);
    rig.turn();
    assert!(rig.ops().is_empty());
}

#[test]
fn a_receive_that_a_cancel_missed_is_still_the_connections() {
    let mut rig = Rig::new(8);
    let id = rig.receiving(1, 1);
    rig.ring.submit(Op::ReceiveStop { id });
    rig.turn();
    rig.ops();
    missed(&mut rig, Kind::CancelReceive, id.bits(), 4);
    cancelled_again(&mut rig, Kind::CancelReceive, id.bits());
    assert!(rig.seen().is_empty(), "it may live");
    rig.says_bytes(id, 3, F_MORE);
    rig.says(Kind::Receive, id.bits(), -libc::ECANCELED, 0);
    rig.says(Kind::CancelReceive, id.bits(), 0, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 got 3", "1.1 Stopped"]);
    assert_eq!(rig.ring.anomalies(), Anomalies::default());
}

/// One whose receive was never found.
fn doubtful(rig: &mut Rig) -> ConnId {
    let id = rig.receiving(1, 1);
    rig.ring.submit(Op::ReceiveStop { id });
    rig.turn();
    rig.ops();
    missed(rig, Kind::CancelReceive, id.bits(), 5);
    assert_eq!(rig.seen(), ["1.1 Stopped"]);
    id
}

#[test]
fn a_receive_that_was_never_found_is_proven_gone_before_its_slot_is_free() {
    let mut rig = Rig::new(8);
    let id = doubtful(&mut rig);
    rig.ring.submit(Op::Close { id, how: CloseHow::Abort });
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::ShutdownInput { .. }]), "before anything is closed");
    // It lived after all: what it brings goes to no connection.
    rig.says_bytes(id, 3, F_MORE);
    rig.says(Kind::Receive, id.bits(), 0, 0);
    rig.says(Kind::Shutdown, id.bits(), 0, 0);
    rig.turn();
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::CancelReceive { .. }]));
    // Anything but "not found" proves nothing.
    rig.says(Kind::CancelReceive, id.bits(), 0, 0);
    rig.turn();
    cancelled_again(&mut rig, Kind::CancelReceive, id.bits());
    rig.says(Kind::CancelReceive, id.bits(), -libc::ENOENT, 0);
    rig.turn();
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::Close { how: CloseHow::Abort, .. }]));
    rig.says(Kind::Close, id.bits(), 0, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 closed"]);
    assert_eq!((rig.ring.anomalies().late_ends, rig.ring.anomalies().stale), (2, 0));
    assert_eq!(rig.ring.pool().counts().leased, 0);
}

/// What the proof stands on, of the kernel this runs on: a receive that is armed has ended when the shutdown is reaped.
#[test]
fn a_shutdown_of_the_input_ends_the_receive_first() {
    let config = crate::UringConfig {
        connections: 4,
        pool: PoolConfig { buffer_bytes: 64, buffers_max: 64, poison: true },
        ..crate::UringConfig::default()
    };
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut ring = Uring::new(&config, Vec::new()).unwrap();
    for round in 0..100u64 {
        let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = ring.take_over(listener.accept().unwrap().0.into());
        let id = ConnId::new(1, round);
        ring.submit(Op::Adopt { id, socket });
        ring.submit(Op::Receive { id });
        ring.turn(Wait::No, Budget::default(), &mut Vec::new()).unwrap();
        if round % 2 == 1 {
            std::io::Write::write_all(&mut &client, &[7; 200]).unwrap();
        }
        assert!(ring.kernel.submit(RawOp::ShutdownInput { id }).is_ok());
        let mut ends = Vec::new();
        while !ends.contains(&Kind::Shutdown) {
            ring.kernel.enter(1, Some(Duration::from_secs(10))).unwrap();
            while let Some(cqe) = ring.kernel.reap(&mut ring.side) {
                let lease = ring.buffers.arrived(&mut ring.side, &cqe);
                if cqe.flags & F_MORE == 0 {
                    ends.extend(Kind::of(cqe.user_data));
                }
                drop(lease);
            }
        }
        assert_eq!(ends, [Kind::Receive, Kind::Shutdown], "round {round}");
        assert!(ring.kernel.submit(RawOp::Close { id, how: CloseHow::Abort }).is_ok());
        ring.kernel.enter(1, None).unwrap();
        assert_eq!(ring.kernel.reap(&mut ring.side).map(|cqe| cqe.res), Some(0));
        ring.ports.close(id);
    }
}

#[test]
fn a_connection_whose_receive_was_never_found_receives_no_more() {
    let mut rig = Rig::new(8);
    let id = doubtful(&mut rig);
    rig.ring.submit(Op::Receive { id });
    rig.turn();
    assert!(rig.ops().is_empty(), "a second receive could not be told from the first");
    assert_eq!(rig.seen(), [format!("1.1 Error({})", libc::EIO)]);
}

#[test]
fn the_answer_to_an_earlier_stop_does_not_end_a_later_receive() {
    let mut rig = Rig::new(8);
    let id = rig.receiving(1, 1);
    // The end is reaped before the stop's own answer, which still has to come.
    rig.ring.submit(Op::ReceiveStop { id });
    rig.turn();
    rig.says(Kind::Receive, id.bits(), -libc::ECANCELED, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 Stopped"]);
    rig.ring.submit(Op::Receive { id });
    rig.ring.submit(Op::ReceiveStop { id });
    rig.turn();
    rig.says(Kind::CancelReceive, id.bits(), -libc::ENOENT, 0);
    rig.turn();
    assert_eq!(rig.seen(), [""; 0], "the second receive is still in flight");
    rig.ops();
    rig.kernel().now += Duration::from_secs(1);
    rig.turn();
    assert!(rig.ops().is_empty(), "its own cancel is not answered yet");
    rig.says(Kind::CancelReceive, id.bits(), 0, 0);
    rig.says(Kind::Receive, id.bits(), -libc::ECANCELED, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 Stopped"]);
}

#[test]
fn receives_without_a_buffer_are_parked_in_order_and_armed_as_buffers_come_back() {
    let mut rig = Rig::new(2);
    let ids: Vec<ConnId> = (0..5).map(|slot| rig.receiving(slot, 1)).collect();
    rig.says_bytes(ids[0], 64, F_MORE);
    rig.says_bytes(ids[0], 64, F_MORE);
    for id in &ids {
        rig.says(Kind::Receive, id.bits(), -libc::ENOBUFS, 0);
    }
    rig.turn();
    assert_eq!(rig.ring.stats().receives_parked, 5);
    rig.turn();
    rig.turn();
    assert!(rig.ops().is_empty(), "there is no buffer to arm any with");
    rig.out.pop();
    rig.turn();
    // The first one took all there was, so the others come before it.
    assert!(matches!(rig.ops()[..], [RawOp::Receive { id }] if id == ids[1]));
    // One buffer is there and nobody used it: the next one must not wait for that.
    rig.ring.turn(Wait::Forever, Budget::default(), &mut rig.out).unwrap();
    assert_eq!(rig.kernel().enters.last(), Some(&(0, None)), "it does not block");
    assert!(matches!(rig.ops()[..], [RawOp::Receive { id }] if id == ids[2]));
    rig.out.clear();
    // A parked one that is stopped ends at once and leaves the list.
    rig.ring.submit(Op::ReceiveStop { id: ids[3] });
    rig.turn();
    assert_eq!(rig.seen(), ["3.1 Stopped"]);
    let armed: Vec<_> = rig.ops().iter().map(RawOp::user_data).collect();
    assert_eq!(armed, [ids[4], ids[0]].map(|id| Kind::Receive.with(id.bits())));
    rig.ring.turn(Wait::Forever, Budget::default(), &mut rig.out).unwrap();
    assert_eq!(rig.kernel().enters.last(), Some(&(1, None)), "now it blocks");
}

#[test]
fn every_buffer_comes_back_once_whatever_its_completion_says() {
    let mut rig = Rig::new(4);
    let id = rig.receiving(1, 1);
    let with_kernel = rig.ring.pool().counts().with_kernel;
    rig.says_bytes(id, -libc::ECONNRESET, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 Error(104)"]);
    // Late: there is no receive any more.
    rig.says_bytes(id, 10, F_MORE);
    rig.says_bytes(ConnId::new(1, 9), 10, 0);
    rig.says(Kind::Receive, ConnId::new(900, 1).bits(), -libc::ECANCELED, 0);
    rig.turn();
    assert_eq!(rig.seen(), [""; 0]);
    assert_eq!(rig.ring.anomalies().stale, 3);
    rig.turn();
    let counts = rig.ring.pool().counts();
    assert_eq!((counts.with_kernel, counts.leased), (with_kernel, 0));
    rig.ring.pool().invariants();
}

#[test]
fn bytes_for_a_slots_former_connection_do_not_reach_the_new_one() {
    let mut rig = Rig::new(4);
    let old = rig.receiving(1, 1);
    rig.says(Kind::Receive, old.bits(), 0, 0);
    rig.turn();
    rig.ring.submit(Op::Close { id: old, how: CloseHow::Orderly });
    rig.turn();
    rig.says(Kind::Close, old.bits(), 0, 0);
    rig.turn();
    rig.seen();
    let new = rig.receiving(1, 2);
    rig.says_bytes(old, 10, F_MORE);
    rig.says_bytes(new, 3, F_MORE);
    rig.turn();
    assert_eq!(rig.seen(), ["1.2 got 3"]);
    assert_eq!(rig.ring.anomalies().stale, 1);
}

#[test]
fn an_incremental_buffer_stays_with_the_kernel_until_it_says_so() {
    let mut rig = Rig::new(1);
    let id = rig.receiving(7, 1);
    let buffer = rig.kernel().provided.pop_front().unwrap();
    let flags = F_MORE | F_BUFFER | u32::from(buffer) << BUFFER_SHIFT;
    for (len, more) in [(10, F_BUF_MORE), (20, F_BUF_MORE), (30, 0)] {
        rig.says(Kind::Receive, id.bits(), len, flags | more);
        rig.turn();
        let with_kernel = usize::from(more != 0);
        let counts = Counts { total: 1, free: 0, with_kernel, leased: 1 - with_kernel };
        assert_eq!(rig.ring.pool().counts(), counts);
    }
    assert_eq!(rig.seen(), ["7.1 got 10", "7.1 got 20", "7.1 got 30"]);
    rig.turn();
    assert_eq!(rig.kernel().provided.len(), 1);
}

#[test]
fn what_did_not_fit_is_sent_again_with_patience() {
    let mut rig = Rig::new(4);
    let id = rig.sending(100);
    for (res, left) in [(30, 70), (-libc::EAGAIN, 70), (69, 1)] {
        rig.says(Kind::Send, id.bits(), res, 0);
        rig.turn();
        rig.turn();
        assert!(matches!(rig.ops()[..], [RawOp::Send { mode: SendMode::All, .. }]));
        assert_eq!(rig.kernel().batches[&id.bits()].len(), left);
    }
    rig.says(Kind::Send, id.bits(), 1, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 sent Done left 0"]);
}

#[test]
fn a_send_that_moves_nothing_is_an_error_and_not_a_loop() {
    let mut rig = Rig::new(4);
    let id = rig.sending(100);
    rig.says(Kind::Send, id.bits(), 0, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 sent Error(32) left 100"]);
}

#[test]
fn a_stopped_send_answers_once_wherever_it_is() {
    for (res, expected) in [
        (40, "1.1 sent Stopped left 60"),
        (100, "1.1 sent Done left 0"),
        (-libc::EAGAIN, "1.1 sent Stopped left 100"),
        (-libc::ECANCELED, "1.1 sent Stopped left 100"),
        (-libc::EPIPE, "1.1 sent Error(32) left 100"),
    ] {
        // Submitted.
        let mut rig = Rig::new(4);
        let id = rig.sending(100);
        rig.ring.submit(Op::SendStop { id });
        rig.says(Kind::Send, id.bits(), res, 0);
        rig.turn();
        assert!(matches!(rig.ops()[..], [RawOp::CancelSend { .. }]));
        assert_eq!(rig.seen(), [expected]);
    }
    // Its rest is still in the driver's queue.
    let mut rig = Rig::new(4);
    let id = rig.sending(100);
    rig.says(Kind::Send, id.bits(), 40, 0);
    rig.turn();
    rig.ring.submit(Op::SendStop { id });
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 sent Stopped left 60"]);
    assert!(rig.ops().is_empty(), "neither the rest nor a cancel is submitted");
}

#[test]
fn a_full_submission_queue_keeps_the_order_and_does_not_block() {
    let mut rig = Rig::new(4);
    rig.kernel().room = 2;
    for slot in 0..4 {
        rig.adopted(slot, 1);
        rig.ring.submit(Op::Shutdown { id: ConnId::new(slot, 1) });
    }
    let mut submitted = Vec::new();
    for _ in 0..4 {
        rig.ring.turn(Wait::Forever, Budget::default(), &mut rig.out).unwrap();
        let blocked = rig.kernel().enters.last().unwrap().0 > 0;
        submitted.extend(rig.ops());
        assert_eq!(blocked, submitted.len() == 8, "it blocks only when all is submitted");
    }
    let expected: Vec<u64> = (0..4)
        .map(|slot| ConnId::new(slot, 1).bits())
        .flat_map(|bits| [Kind::Install.with(bits), Kind::Shutdown.with(bits)])
        .collect();
    assert_eq!(submitted.iter().map(RawOp::user_data).collect::<Vec<_>>(), expected);
    assert_eq!(rig.ring.stats().submissions_delayed, 6 + 4 + 2);
}

#[test]
fn a_turn_enters_only_for_a_reason_and_blocks_only_for_nothing_else() {
    let mut rig = Rig::new(4);
    let id = rig.receiving(1, 1);
    let enters = |rig: &mut Rig| std::mem::take(&mut rig.kernel().enters);
    enters(&mut rig);
    rig.turn();
    assert_eq!(enters(&mut rig), [], "nothing to do");
    rig.kernel().task_work = true;
    rig.turn();
    assert_eq!(enters(&mut rig), [(0, None)], "there is work to be done");
    rig.kernel().task_work = false;
    rig.says_bytes(id, 1, F_MORE);
    rig.ring.turn(Wait::Forever, Budget::default(), &mut rig.out).unwrap();
    assert_eq!(enters(&mut rig), [], "a completion was there already");
    let time = Duration::from_millis(5);
    rig.ring.turn(Wait::For(time), Budget::default(), &mut rig.out).unwrap();
    assert_eq!(enters(&mut rig), [(1, Some(time))]);
    rig.ring.turn(Wait::For(Duration::ZERO), Budget::default(), &mut rig.out).unwrap();
    assert_eq!(enters(&mut rig), []);
}

#[test]
fn an_overflow_counts_once_and_is_flushed() {
    let mut rig = Rig::new(4);
    rig.kernel().enters.clear();
    rig.kernel().overflowing = true;
    rig.turn();
    rig.turn();
    assert_eq!(rig.kernel().enters, [(0, None), (0, None)]);
    rig.kernel().overflowing = false;
    rig.turn();
    rig.kernel().overflowing = true;
    rig.turn();
    assert_eq!(rig.ring.stats().overflows, 2);
}

#[test]
fn an_interrupted_enter_is_no_failure_and_a_broken_one_is() {
    let mut rig = Rig::new(4);
    for errno in [libc::EINTR, libc::ETIME, libc::EBUSY, libc::EAGAIN] {
        rig.kernel().next_enter = Err(errno);
        rig.ring.turn(Wait::Forever, Budget::default(), &mut rig.out).unwrap();
    }
    rig.kernel().next_enter = Err(libc::EBADR);
    let turned = rig.ring.turn(Wait::Forever, Budget::default(), &mut rig.out);
    assert_eq!(turned, Err(libc::EBADR));
}

#[test]
fn accepting_goes_on_unless_there_is_a_reason_to_stop() {
    let mut rig = Rig::new(4);
    rig.ring.submit(Op::Accept { listener: 2 });
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::Accept { listener: 2 }]));
    for (res, flags) in [(7, 0), (-libc::ECONNABORTED, 0), (-libc::EINTR, 0), (-libc::ECANCELED, F_MORE)] {
        rig.says(Kind::Accept, 2, res, flags);
        rig.turn();
        rig.turn();
        assert!(matches!(rig.ops()[..], [RawOp::Accept { listener: 2 }]), "{res}");
    }
    assert_eq!(rig.out.drain(..).count(), 1);
    for (errno, expected) in [
        (libc::EMFILE, AcceptEnd::Descriptors),
        (libc::ENFILE, AcceptEnd::SystemFiles),
        (libc::ENOMEM, AcceptEnd::Error(libc::ENOMEM)),
    ] {
        rig.says(Kind::Accept, 2, -errno, 0);
        rig.turn();
        let [Completion::AcceptEnded { end, .. }] = rig.out[..] else { panic!("{:?}", rig.out) };
        assert_eq!(end, expected);
        rig.out.clear();
        rig.ring.submit(Op::Accept { listener: 2 });
        rig.turn();
        rig.ops();
    }
    // A socket that was accepted meanwhile is delivered, then the stop is answered.
    rig.ring.submit(Op::AcceptStop { listener: 2 });
    rig.says(Kind::Accept, 2, 8, F_MORE);
    rig.says(Kind::Accept, 2, -libc::ECANCELED, 0);
    rig.turn();
    let [Completion::Accepted { .. }, Completion::AcceptEnded { end, .. }] = rig.out[..] else {
        panic!("{:?}", rig.out)
    };
    assert_eq!(end, AcceptEnd::Stopped);
    // A socket nobody waits for is closed.
    rig.says(Kind::Accept, 2, 9, F_MORE);
    rig.ops();
    rig.turn();
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::CloseFd { fd: 9 }]));
}

fn is_closed(completion: &Completion) -> bool {
    matches!(completion, Completion::AcceptEnded { listener: 2, end: AcceptEnd::Closed })
}

#[test]
fn a_listener_is_closed_once_its_accept_ended_and_its_queue_is_empty() {
    let mut rig = Rig::new(4);
    rig.ring.submit(Op::Accept { listener: 2 });
    rig.turn();
    rig.ops();
    rig.kernel().backlog.extend([Ok(11), Err(libc::ECONNABORTED), Ok(12)]);
    rig.ring.submit(Op::StopListening { listener: 2 });
    assert_eq!(std::mem::take(&mut rig.kernel().calls), ["turn away at 2"], "before anything is submitted");
    // The answer to the cancel comes first, and says nothing of the accept.
    rig.says(Kind::CancelAccept, 2, 0, 0);
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::CancelAccept { listener: 2 }]));
    assert!(rig.out.is_empty() && rig.kernel().calls.is_empty(), "an accept is in flight");
    rig.says(Kind::Accept, 2, 10, F_MORE);
    rig.says(Kind::Accept, 2, -libc::ECANCELED, 0);
    rig.turn();
    rig.turn();
    let [first @ .., end] = &rig.out[..] else { panic!("nothing came") };
    let sockets: Vec<_> = first
        .iter()
        .map(|completion| match completion {
            Completion::Accepted { listener: 2, socket, .. } => socket.0,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(sockets, [10, 11, 12]);
    assert!(is_closed(end), "{end:?}");
    assert_eq!(rig.kernel().calls.last().unwrap(), "close 2");
    assert!(rig.ops().is_empty(), "nothing is armed again");
}

#[test]
fn an_accept_that_ends_by_itself_while_listening_stops_is_not_armed_again() {
    for res in [7, -libc::EMFILE, -libc::EINTR, -libc::EINVAL] {
        let mut rig = Rig::new(4);
        rig.ring.submit(Op::Accept { listener: 2 });
        rig.turn();
        rig.ring.submit(Op::AcceptStop { listener: 2 });
        rig.ring.submit(Op::StopListening { listener: 2 });
        rig.turn();
        rig.ops();
        rig.says(Kind::Accept, 2, res, 0);
        rig.turn();
        rig.turn();
        assert!(rig.ops().is_empty(), "{res}");
        assert!(is_closed(rig.out.last().unwrap()), "{res}: {:?}", rig.out);
        assert_eq!(rig.out.len(), 1 + usize::from(res > 0), "{res}: {:?}", rig.out);
    }
}

#[test]
fn a_queue_is_emptied_within_the_budget_and_a_quarter_of_it_a_turn() {
    let mut rig = Rig::new(4);
    rig.kernel().backlog.extend((0..100).map(|n| Ok(20 + n)));
    rig.ring.submit(Op::StopListening { listener: 2 });
    rig.kernel().enters.clear();
    let budget = Budget { completions: 10, ..Budget::default() };
    rig.ring.turn(Wait::Forever, budget, &mut rig.out).unwrap();
    assert_eq!(rig.out.len(), 10);
    assert!(rig.kernel().enters.is_empty(), "it does not wait");
    rig.turn();
    assert_eq!(rig.out.len(), 10 + 64);
    rig.turn();
    assert_eq!(rig.out.len(), 100 + 1);
}

#[test]
fn a_queue_is_looked_at_until_handshakes_had_their_time() {
    let mut rig = Rig::new(4);
    rig.kernel().late = Duration::from_millis(25);
    rig.ring.submit(Op::StopListening { listener: 2 });
    let mut waits = Vec::new();
    rig.turn();
    while !rig.out.last().is_some_and(is_closed) {
        rig.ring.turn(Wait::Forever, Budget::default(), &mut rig.out).unwrap();
        let (_, timeout) = rig.kernel().enters.pop().expect("it waits");
        waits.push(timeout.expect("not for ever").as_millis());
        if waits.len() == 2 {
            rig.kernel().backlog.push_back(Ok(9));
        }
        rig.kernel().now += timeout.unwrap();
        rig.turn();
    }
    assert_eq!(waits, [10, 10, 5]);
    assert_eq!(rig.out.len(), 2, "{:?}", rig.out);
}

#[test]
fn without_descriptors_a_queue_is_asked_every_ten_milliseconds_for_a_second() {
    let mut rig = Rig::new(4);
    rig.kernel().backlog.extend([Err(libc::EMFILE); 1000]);
    rig.ring.submit(Op::StopListening { listener: 2 });
    rig.turn();
    rig.kernel().calls.clear();
    let mut waits = 0;
    while rig.out.is_empty() {
        rig.ring.turn(Wait::Forever, Budget::default(), &mut rig.out).unwrap();
        let (wait_for, timeout) = rig.kernel().enters.pop().expect("it waits");
        assert_eq!((wait_for, timeout), (1, Some(Duration::from_millis(10))), "no longer, and not for ever");
        rig.kernel().now += Duration::from_millis(10);
        rig.turn();
        waits += 1;
    }
    assert_eq!(waits, 100);
    assert!(is_closed(&rig.out[0]));
    assert_eq!(rig.kernel().calls.iter().filter(|call| *call == "take at 2").count(), 100);
}

#[test]
fn queue_that_never_ends_is_closed_after_seconds() {
    let mut rig = Rig::new(4);
    rig.ring.submit(Op::StopListening { listener: 2 });
    let mut turns = 0;
    while !rig.out.last().is_some_and(is_closed) {
        assert!(turns < 100, "the listener stays");
        rig.kernel().backlog.extend([Ok(9); 64]);
        rig.kernel().now += Duration::from_millis(100);
        rig.turn();
        turns += 1;
    }
    assert_eq!((turns, rig.out.len()), (30, 29 * 64 + 1));
}

#[test]
fn a_buffer_given_back_while_the_shard_sleeps_wakes_it_if_a_receive_waits() {
    #[derive(Default)]
    struct Wakes(std::sync::atomic::AtomicUsize);
    impl std::task::Wake for Wakes {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
    }
    let wakes = std::sync::Arc::new(Wakes::default());
    let count = || wakes.0.load(std::sync::atomic::Ordering::Relaxed);
    let mut rig = Rig::new(1);
    rig.ring.pool().wake_when_freed(wakes.clone().into());
    let (first, second) = (rig.receiving(1, 1), rig.receiving(2, 1));
    rig.says_bytes(first, 3, F_MORE);
    rig.turn();
    rig.ring.wait_for_buffer();
    rig.out.clear();
    assert_eq!(count(), 0, "no receive waits");
    rig.turn();
    rig.says_bytes(first, 3, F_MORE);
    rig.says(Kind::Receive, second.bits(), -libc::ENOBUFS, 0);
    rig.turn();
    rig.ring.submit_queued(Wait::No).unwrap();
    rig.ring.wait_for_buffer();
    assert_eq!(count(), 0);
    rig.ops();
    rig.out.clear();
    assert_eq!(count(), 1);
    rig.ring.submit_queued(Wait::No).unwrap();
    assert!(matches!(rig.ops()[..], [RawOp::Receive { id }] if id == second));
}

/// Panics at every line, as `tracing_subscriber` does once nothing reads what it writes.
struct Panicking;

impl tracing::Subscriber for Panicking {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        LINES.set(LINES.get() + 1);
        panic!("no line can be written: {event:?}");
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

thread_local! {
    static LINES: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

#[test]
fn a_subscriber_that_panics_ends_no_turn() {
    tracing::subscriber::with_default(Panicking, || {
        let mut rig = Rig::new(8);
        let (id, gone) = (rig.receiving(1, 1), ConnId::new(3, 9));
        rig.says(Kind::Install, id.bits(), -libc::ENOMEM, 0);
        rig.says(Kind::Ignored, 0, -libc::EBADF, 0);
        // For connections and operations that are not there, with buffers that must go back.
        rig.says_bytes(gone, 5, F_MORE);
        rig.says(Kind::Accept, 2, 9, F_MORE);
        rig.says(Kind::Close, gone.bits(), 0, 0);
        rig.says_bytes(id, 3, F_MORE);
        rig.kernel().backlog.push_back(Err(libc::EIO));
        rig.ring.submit(Op::StopListening { listener: 2 });
        rig.turn();
        assert_eq!(rig.seen(), ["AcceptEnded { listener: 2, end: Closed }", "1.1 got 3"]);
        let anomalies = rig.ring.anomalies();
        assert_eq!((anomalies.stale, anomalies.installs_failed), (3, 1));
        assert_eq!(rig.ring.pool().counts().leased, 0);
        rig.turn();
        assert!(matches!(rig.ops()[..], [RawOp::CloseFd { fd: 9 }]), "what the lines were about is done");
        rig.ring.invariants();
    });
    // tracing may have noted while other tests ran that no subscriber wants a line: 6 when this test runs alone.
    assert!(LINES.get() > 0, "the subscriber was asked");
}

#[test]
fn a_wake_ends_the_turn_and_the_next_one_is_armed() {
    let mut rig = Rig::new(4);
    rig.says(Kind::Wake, 0, 8, 0);
    rig.turn();
    assert!(rig.out.is_empty());
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::ReadWake]));
}

#[test]
fn the_ring_gets_more_buffers_when_it_ran_dry_and_fewer_after_a_quiet_time() {
    let mut rig = Rig::new(1000);
    let id = rig.receiving(1, 1);
    assert_eq!(rig.kernel().provided.len(), 32);
    rig.says(Kind::Receive, id.bits(), -libc::ENOBUFS, 0);
    rig.says_bytes(id, 1, F_MORE);
    rig.kernel().completions.swap(0, 1);
    rig.turn();
    rig.turn();
    assert_eq!(rig.kernel().provided.len(), 64);
    // The ring has 64 entries, and no more go in.
    rig.says(Kind::Receive, id.bits(), -libc::ENOBUFS, 0);
    rig.says_bytes(id, 1, F_MORE);
    rig.kernel().completions.swap(0, 1);
    rig.turn();
    rig.turn();
    assert_eq!(rig.kernel().provided.len(), 64);
    for _ in 0..1 << 15 {
        rig.turn();
    }
    for _ in 0..64 {
        rig.says_bytes(id, 1, F_MORE);
        rig.turn();
        rig.out.clear();
    }
    rig.turn();
    assert_eq!(rig.kernel().provided.len(), 32);
}

#[test]
fn the_buffer_ring_is_replaced_once_no_receive_is_in_flight() {
    let mut rig = Rig::new(64);
    let ids = [rig.receiving(1, 1), rig.receiving(2, 1)];
    assert_eq!(rig.ring.give_back(), GivesBack::Refused, "receives are armed");
    ids.iter().for_each(|id| rig.ring.submit(Op::ReceiveStop { id: *id }));
    assert_eq!(rig.ring.give_back(), GivesBack::Waits);
    let newcomer = rig.adopted(3, 1);
    rig.ring.submit(Op::Receive { id: newcomer });
    for id in ids {
        rig.turn();
        let arms = |op: &RawOp| matches!(op, RawOp::Receive { .. });
        assert!(!rig.ops().iter().any(arms), "nothing is armed meanwhile");
        assert!(rig.kernel().calls.is_empty());
        rig.says_bytes(id, 5, F_MORE);
        rig.says(Kind::Receive, id.bits(), -libc::ECANCELED, 0);
        rig.says(Kind::CancelReceive, id.bits(), 0, 0);
    }
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 got 5", "1.1 Stopped", "2.1 got 5", "2.1 Stopped"]);
    rig.turn();
    assert_eq!(rig.kernel().calls, ["renew the buffer ring"]);
    let ops: Vec<_> = rig.ops().iter().map(RawOp::user_data).collect();
    assert_eq!(ops, [Kind::Receive.with(newcomer.bits())]);
    assert_eq!((rig.ring.give_back(), rig.ring.pool().counts().with_kernel), (GivesBack::Done, 32));
    rig.ring.invariants();
}

#[test]
fn a_receive_that_does_not_end_keeps_others_for_a_tenth_of_a_second() {
    let mut rig = Rig::new(64);
    let id = rig.receiving(1, 1);
    rig.ring.submit(Op::ReceiveStop { id });
    assert_eq!(rig.ring.give_back(), GivesBack::Waits);
    let newcomer = rig.adopted(2, 1);
    rig.ring.submit(Op::Receive { id: newcomer });
    rig.turn();
    rig.ops();
    rig.kernel().enters.clear();
    rig.kernel().now += Duration::from_millis(60);
    rig.ring.turn(Wait::Forever, Budget::default(), &mut rig.out).unwrap();
    assert_eq!(rig.kernel().enters, [(1, Some(Duration::from_millis(40)))], "it waits no longer");
    rig.kernel().now += Duration::from_millis(40);
    rig.turn();
    let ops: Vec<_> = rig.ops().iter().map(RawOp::user_data).collect();
    assert_eq!(ops, [Kind::Receive.with(newcomer.bits())]);
    assert!(rig.kernel().calls.is_empty(), "the ring is not replaced");
    assert_eq!(rig.ring.give_back(), GivesBack::Refused);
}

#[test]
fn only_sends_of_a_deferred_turn_are_quiet() {
    let mut rig = Rig::new(4);
    for (deferred, expected) in [(true, SendMode::TryQuietly), (false, SendMode::Try)] {
        let id = rig.adopted(u32::from(deferred), 1);
        let mut batch = Box::new(Batch::new());
        batch.put(b"x");
        rig.ring.submit(Op::Send { id, batch });
        if deferred {
            rig.ring.defer_sent();
        }
        rig.turn();
        assert!(matches!(rig.ops()[..], [_, RawOp::Send { mode, .. }] if mode == expected));
    }
}
