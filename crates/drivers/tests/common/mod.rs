//! A driver on a listener of its own, and bounded waits for completions.

#![allow(dead_code, reason = "each test file uses a part")]

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use ringserve_buf::{LeaseMut, PoolConfig};
use ringserve_core::{
    Batch, Budget, CloseHow, Completion, ConnId, Driver, Op, ReceiveEnd, SendEnd, Socket, Wait,
};
use ringserve_drivers::{Listener, SystemKernel, Uring, UringConfig};

/// Nothing here takes longer than milliseconds; a test that hangs fails after this.
pub const PATIENCE: Duration = Duration::from_secs(10);

pub struct Rig {
    pub ring: Uring<SystemKernel>,
    pub address: SocketAddr,
    pub events: VecDeque<Completion>,
    out: Vec<Completion>,
    generation: u64,
    pub budget: Budget,
}

pub fn small() -> UringConfig {
    UringConfig {
        submission_entries: 64,
        completion_entries: 256,
        connections: 512,
        pool: PoolConfig { buffer_bytes: 4096, buffers_max: 128, poison: true },
        ..UringConfig::default()
    }
}

impl Rig {
    pub fn new(config: &UringConfig) -> Rig {
        Rig::over(config, TcpListener::bind("127.0.0.1:0").unwrap())
    }

    pub fn over(config: &UringConfig, listener: TcpListener) -> Rig {
        let address = listener.local_addr().unwrap();
        let ring = Uring::new(config, vec![Listener::own(listener)]).unwrap();
        let (events, out) = (VecDeque::new(), Vec::new());
        Rig { ring, address, events, out, generation: 0, budget: Budget::default() }
    }

    /// One that accepts already.
    pub fn accepting(config: &UringConfig) -> Rig {
        let mut rig = Rig::new(config);
        rig.ring.submit(Op::Accept { listener: 0 });
        rig
    }

    pub fn turn(&mut self, wait: Wait) {
        let before = self.ring.stats().enters;
        self.ring.turn(wait, self.budget, &mut self.out).unwrap();
        assert!(self.ring.stats().enters - before <= 1, "more than one enter in a turn");
        self.events.extend(self.out.drain(..));
    }

    /// Takes turns for `time`, each as long as possible, and counts them. An earlier wait's timer may end one of them.
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

    pub fn adopt(&mut self, slot: u32, socket: Socket) -> ConnId {
        self.generation += 1;
        let id = ConnId::new(slot, self.generation);
        self.ring.submit(Op::Adopt { id, socket });
        id
    }

    /// A client and its connection, not receiving yet.
    pub fn connect(&mut self, slot: u32) -> (TcpStream, ConnId) {
        let client = TcpStream::connect(self.address).unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        client.set_write_timeout(Some(PATIENCE)).unwrap();
        let (socket, peer) = self.accepted();
        assert_eq!(peer, client.local_addr().unwrap());
        (client, self.adopt(slot, socket))
    }

    pub fn received(&mut self, id: ConnId) -> LeaseMut {
        self.wait_for("Received", |event| match event {
            Completion::Received { id: of, lease } if *of == id => Some(std::mem::take(lease)),
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
        let mut batch = Box::new(Batch::new());
        batch.put(bytes);
        self.ring.submit(Op::Send { id, batch });
    }

    /// How it ended and how many bytes were left.
    pub fn sent(&mut self, id: ConnId) -> (SendEnd, usize) {
        self.wait_for("Sent", |event| match event {
            Completion::Sent { id: of, end, batch } if *of == id => Some((*end, batch.len())),
            _ => None,
        })
    }

    pub fn close(&mut self, id: ConnId, how: CloseHow) {
        self.ring.submit(Op::Close { id, how });
        self.wait_for("Closed", |event| {
            matches!(event, Completion::Closed { id: of } if *of == id).then_some(())
        });
    }

    /// Nothing is with the kernel but free buffers, and nothing odd was seen.
    pub fn settled(&self) {
        let counts = self.ring.pool().counts();
        assert_eq!(counts.leased, 0, "{counts:?}");
        self.ring.pool().invariants();
        self.ring.invariants();
        assert_eq!(self.ring.anomalies(), Default::default());
    }
}
