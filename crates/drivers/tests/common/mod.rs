//! A driver on its own listener, and bounded waits for completions.

#![allow(dead_code, reason = "each test file uses a part")]

pub mod busy;

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use ringserve_buf::{Block, LeaseMut, PoolConfig};
use ringserve_core::{
    AcceptEnd, Batch, Budget, CloseHow, Completion, ConnId, Driver, Op, ReceiveEnd, SendEnd, Socket, Wait,
};
use ringserve_drivers::{Epoll, EpollConfig, Listener, SystemKernel, Uring, UringConfig};

/// Bound of each wait. Nothing here takes longer than milliseconds; a test that hangs fails after
/// this.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// A driver that a rig can hold.
pub trait Tested: Driver + Sized {
    type Config;

    fn over(config: &Self::Config, listener: TcpListener) -> Self;

    /// Checks that the kernel has nothing but free buffers, and that nothing odd was seen.
    fn settled(&self, left: &VecDeque<Completion>);
}

impl Tested for Uring<SystemKernel> {
    type Config = UringConfig;

    fn over(config: &UringConfig, listener: TcpListener) -> Self {
        Uring::new(config, vec![Listener::own(listener)]).unwrap()
    }

    fn settled(&self, _: &VecDeque<Completion>) {
        self.invariants();
        assert_eq!(self.anomalies(), Default::default());
    }
}

impl Tested for Epoll {
    type Config = EpollConfig;

    fn over(config: &EpollConfig, listener: TcpListener) -> Self {
        Epoll::new(config, vec![Listener::own(listener)]).unwrap()
    }

    /// Also checks that no completion is left.
    fn settled(&self, left: &VecDeque<Completion>) {
        assert!(left.is_empty(), "{left:?}");
        assert_eq!(self.pool().counts().with_kernel, 0);
        self.invariants();
    }
}

pub struct Rig<D> {
    pub driver: D,
    pub address: SocketAddr,
    pub events: VecDeque<Completion>,
    pub budget: Budget,
    out: Vec<Completion>,
    generation: u64,
}

pub type UringRig = Rig<Uring<SystemKernel>>;
pub type EpollRig = Rig<Epoll>;

pub fn small() -> UringConfig {
    UringConfig {
        submission_entries: 64,
        completion_entries: 256,
        connections: 512,
        pool: PoolConfig { buffer_bytes: 4096, buffers_max: 128, poison: true },
        ..UringConfig::default()
    }
}

pub fn small_epoll(buffer_bytes: usize, buffers_max: usize) -> EpollConfig {
    EpollConfig {
        connections: 512,
        pool: PoolConfig { buffer_bytes, buffers_max, poison: true },
        ..EpollConfig::default()
    }
}

/// Bytes that encode their position and their connection.
pub fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|n| (n * 31 + n / 251 + seed * 101) as u8).collect()
}

pub fn batch_of(bytes: &[u8]) -> Box<Batch> {
    let mut batch = Box::new(Batch::new());
    batch.put(bytes);
    batch
}

impl<D: Tested> Rig<D> {
    pub fn new(config: &D::Config) -> Rig<D> {
        Rig::<D>::over(config, TcpListener::bind("127.0.0.1:0").unwrap())
    }

    pub fn over(config: &D::Config, listener: TcpListener) -> Rig<D> {
        let address = listener.local_addr().unwrap();
        let driver = D::over(config, listener);
        let (events, out) = (VecDeque::new(), Vec::new());
        Rig { driver, address, events, budget: Budget::default(), out, generation: 0 }
    }

    /// Creates a rig that accepts already.
    pub fn accepting(config: &D::Config) -> Rig<D> {
        let mut rig: Rig<D> = Rig::new(config);
        rig.driver.submit(Op::Accept { listener: 0 });
        rig
    }

    /// Takes one turn. Returns how many completions it brought.
    pub fn turn(&mut self, wait: Wait) -> usize {
        let before = self.driver.stats().enters;
        self.driver.turn(wait, self.budget, &mut self.out).unwrap();
        assert!(self.driver.stats().enters - before <= 1, "more than one wait in a turn");
        assert!(self.out.len() <= self.budget.completions, "beyond the budget");
        let count = self.out.len();
        self.events.extend(self.out.drain(..));
        count
    }

    /// Takes one turn that must be ended by something. Returns how many completions it brought.
    pub fn turn_woken(&mut self) -> usize {
        let started = Instant::now();
        let count = self.turn(Wait::For(PATIENCE));
        assert!(started.elapsed() < PATIENCE, "nothing ended the wait");
        count
    }

    /// Takes turns for `time`, each as long as possible, and counts them. An earlier wait's timer
    /// may end one of them.
    pub fn idle_for(&mut self, time: Duration) -> u64 {
        let end = Instant::now() + time;
        let mut turns = 0;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return turns;
            }
            self.turn(Wait::For(left));
            turns += 1;
        }
    }

    /// Turns until an event matches and returns it; the others stay.
    pub fn wait_for<T>(&mut self, what: &str, mut select: impl FnMut(&mut Completion) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let found = self.events.iter_mut().enumerate().find_map(|(n, event)| Some((n, select(event)?)));
            if let Some((n, found)) = found {
                self.events.remove(n);
                return found;
            }
            assert!(Instant::now() < deadline, "no {what}; there are {:?}", self.events);
            self.turn(Wait::For(Duration::from_millis(50)));
        }
    }

    pub fn accepted(&mut self) -> (Socket, SocketAddr) {
        self.wait_for("Accepted", |event| match event {
            Completion::Accepted { socket, peer, .. } => Some((*socket, peer.expect("a peer address"))),
            _ => None,
        })
    }

    pub fn accept_ended(&mut self) -> AcceptEnd {
        self.wait_for("AcceptEnded", |event| match event {
            Completion::AcceptEnded { end, .. } => Some(*end),
            _ => None,
        })
    }

    pub fn adopt(&mut self, slot: u32, socket: Socket) -> ConnId {
        self.generation += 1;
        let id = ConnId::new(slot, self.generation);
        self.driver.submit(Op::Adopt { id, socket });
        id
    }

    /// Makes a connected client this rig's connection, not receiving yet.
    pub fn take(&mut self, slot: u32, client: &TcpStream) -> ConnId {
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        client.set_write_timeout(Some(PATIENCE)).unwrap();
        let (socket, peer) = self.accepted();
        assert_eq!(peer, client.local_addr().unwrap());
        self.adopt(slot, socket)
    }

    /// A client and its connection, not receiving yet.
    pub fn connect(&mut self, slot: u32) -> (TcpStream, ConnId) {
        let client = TcpStream::connect(self.address).unwrap();
        let id = self.take(slot, &client);
        (client, id)
    }

    /// A client and its connection, receiving.
    pub fn connect_receiving(&mut self, slot: u32) -> (TcpStream, ConnId) {
        let (client, id) = self.connect(slot);
        self.driver.submit(Op::Receive { id });
        (client, id)
    }

    pub fn received(&mut self, id: ConnId) -> LeaseMut {
        self.wait_for("Received", |event| match event {
            Completion::Received { id: of, lease } if *of == id => Some(std::mem::take(lease)),
            Completion::ReceiveEnded { id: of, end } if *of == id => panic!("{id} ended: {end:?}"),
            _ => None,
        })
    }

    /// Receives exactly this many bytes.
    pub fn received_bytes(&mut self, id: ConnId, count: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        while bytes.len() < count {
            bytes.extend_from_slice(&self.received(id));
        }
        assert_eq!(bytes.len(), count);
        bytes
    }

    pub fn receive_ended(&mut self, id: ConnId) -> ReceiveEnd {
        self.wait_for("ReceiveEnded", |event| match event {
            Completion::ReceiveEnded { id: of, end } if *of == id => Some(*end),
            _ => None,
        })
    }

    pub fn send(&mut self, id: ConnId, bytes: &[u8]) {
        self.driver.submit(Op::Send { id, batch: batch_of(bytes) });
    }

    /// The end of the send, and how many bytes were left.
    pub fn sent(&mut self, id: ConnId) -> (SendEnd, usize) {
        self.wait_for("Sent", |event| match event {
            Completion::Sent { id: of, end, batch } if *of == id => Some((*end, batch.len())),
            _ => None,
        })
    }

    pub fn shut_down(&mut self, id: ConnId) {
        self.driver.submit(Op::Shutdown { id });
        self.wait_for("ShutDown", |event| {
            matches!(event, Completion::ShutDown { id: of } if *of == id).then_some(())
        });
    }

    pub fn close(&mut self, id: ConnId, how: CloseHow) {
        self.driver.submit(Op::Close { id, how });
        self.wait_for("Closed", |event| {
            matches!(event, Completion::Closed { id: of } if *of == id).then_some(())
        });
    }

    /// Turns until nothing more happens by itself, edges of adoption included.
    pub fn calm(&mut self) {
        while self.turn(Wait::No) > 0 {}
        self.turn(Wait::No);
    }

    /// The result of a receive into a block.
    pub fn filled(&mut self, id: ConnId) -> (Box<Block>, usize, ReceiveEnd) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let place = self.events.iter().position(|event| matches!(event, Completion::Filled { .. }));
            if let Some(Completion::Filled { id: of, block, bytes, end }) =
                place.and_then(|place| self.events.remove(place))
            {
                assert_eq!(of, id);
                return (block, bytes, end);
            }
            assert!(Instant::now() < deadline, "no Filled; there are {:?}", self.events);
            self.turn(Wait::For(Duration::from_millis(50)));
        }
    }

    /// The result of a receive into `block` of at most `most` bytes.
    pub fn fill(&mut self, id: ConnId, block: Box<Block>, most: usize) -> (Box<Block>, usize, ReceiveEnd) {
        self.driver.submit(Op::ReceiveInto { id, block, most: most as u32 });
        self.filled(id)
    }

    /// Checks that no buffer is lent, and that the driver has nothing to report.
    pub fn settled(&self) {
        let counts = self.driver.pool().counts();
        assert_eq!(counts.leased, 0, "{counts:?}");
        self.driver.pool().invariants();
        self.driver.settled(&self.events);
    }
}
