//! Echo servers of one ring each, clients as futures, and a scheduler that steps both in virtual
//! time.

use std::collections::BTreeSet;
use std::future::{Future, poll_fn};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use ringserve_core::{
    AcceptEnd, Batch, Budget, CloseHow, Completion, ConnId, Driver, Op, ReceiveEnd, SendEnd, Wait,
};
use ringserve_drivers::{Uring, UringConfig};
use ringserve_simkernel::rng::Rng;
use ringserve_simkernel::{Network, RingId, SimKernel, Socket};

pub const SERVER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
pub const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));

/// A connection of an echo server: its operations in flight.
struct Conn {
    id: ConnId,
    receiving: bool,
    stopping: bool,
    waiting: Batch,
    sending: bool,
    ended: Option<CloseHow>,
}

/// One ring with the real bookkeeping, and an echo above it, written in operations.
pub struct Echo {
    pub driver: Uring<SimKernel>,
    pub ring: RingId,
    out: Vec<Completion>,
    conns: Vec<Conn>,
    free: BTreeSet<u32>,
    made: u64,
    pub accepted: usize,
    accepting: bool,
    pub ended: bool,
    pub wait: Wait,
}

impl Echo {
    pub fn new(network: &Network, shard: usize) -> Echo {
        let config = UringConfig { connections: 64, ..UringConfig::default() };
        let mut driver = network.driver(shard, &config).unwrap();
        let ring = driver.kernel().ring();
        driver.submit(Op::Accept { listener: 0 });
        Echo {
            driver,
            ring,
            out: Vec::new(),
            conns: Vec::new(),
            free: (0..64).collect(),
            made: 0,
            accepted: 0,
            accepting: true,
            ended: false,
            wait: Wait::Forever,
        }
    }

    pub fn turn(&mut self) -> Result<(), i32> {
        if !self.accepting && !self.ended {
            self.accepting = true;
            self.driver.submit(Op::Accept { listener: 0 });
        }
        self.driver.turn(self.wait, Budget::default(), &mut self.out)?;
        for completion in std::mem::take(&mut self.out) {
            self.complete(completion);
        }
        Ok(())
    }

    /// Closes the listener, which ends the server once all connections ended.
    pub fn stop(&mut self) {
        self.ended = true;
        self.driver.submit(Op::StopListening { listener: 0 });
    }

    pub fn is_done(&self) -> bool {
        self.ended && !self.accepting && self.conns.is_empty()
    }

    fn complete(&mut self, completion: Completion) {
        match completion {
            Completion::Accepted { socket, .. } => {
                let slot = self.free.pop_first().unwrap();
                self.made += 1;
                let id = ConnId::new(slot, self.made);
                self.driver.submit(Op::Adopt { id, socket });
                self.driver.submit(Op::Receive { id });
                self.accepted += 1;
                self.conns.push(Conn {
                    id,
                    receiving: true,
                    stopping: false,
                    waiting: Batch::new(),
                    sending: false,
                    ended: None,
                });
            }
            Completion::AcceptEnded { end, .. } => {
                self.accepting = self.ended && end != AcceptEnd::Closed;
            }
            Completion::Received { id, lease } => {
                let conn = self.conn(id);
                conn.waiting.put(&lease);
                drop(lease);
                self.flush(id);
            }
            Completion::ReceiveEnded { id, end } => {
                let conn = self.conn(id);
                conn.receiving = false;
                let how = if end == ReceiveEnd::Eof { CloseHow::Orderly } else { CloseHow::Abort };
                conn.ended.get_or_insert(how);
                self.flush(id);
            }
            Completion::Sent { id, end, .. } => {
                let conn = self.conn(id);
                conn.sending = false;
                if end != SendEnd::Done {
                    conn.waiting = Batch::new();
                    conn.ended = Some(CloseHow::Abort);
                }
                self.flush(id);
            }
            Completion::Closed { id } => {
                self.conns.retain(|conn| conn.id != id);
                self.free.insert(id.slot());
            }
            other => panic!("{other:?}"),
        }
    }

    fn conn(&mut self, id: ConnId) -> &mut Conn {
        self.conns.iter_mut().find(|conn| conn.id == id).unwrap()
    }

    fn flush(&mut self, id: ConnId) {
        let conn = self.conn(id);
        if conn.sending {
            return;
        }
        if !conn.waiting.is_empty() && conn.ended != Some(CloseHow::Abort) {
            conn.sending = true;
            let batch = Box::new(std::mem::take(&mut conn.waiting));
            return self.driver.submit(Op::Send { id, batch });
        }
        match (conn.ended, conn.receiving) {
            (Some(how), false) => self.driver.submit(Op::Close { id, how }),
            (Some(_), true) if !conn.stopping => {
                conn.stopping = true;
                self.driver.submit(Op::ShutdownInput { id });
            }
            _ => {}
        }
    }
}

struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A client's future, and whether it has to be polled.
struct Task {
    future: Pin<Box<dyn Future<Output = ()>>>,
    woken: Arc<Flag>,
}

/// Steps rings and clients in an order that the seed draws.
pub struct Scheduler {
    pub network: Network,
    pub servers: Vec<Echo>,
    tasks: Vec<Task>,
    rng: Rng,
}

impl Scheduler {
    pub fn new(network: Network, shards: usize, seed: u64) -> (Scheduler, SocketAddr) {
        let addr = network.listen(SocketAddr::new(SERVER, 7000), shards).unwrap();
        let servers = (0..shards).map(|shard| Echo::new(&network, shard)).collect();
        (Scheduler { network, servers, tasks: Vec::new(), rng: Rng::new(seed) }, addr)
    }

    pub fn spawn(&mut self, client: impl Future<Output = ()> + 'static) {
        self.tasks.push(Task { future: Box::pin(client), woken: Arc::new(Flag(AtomicBool::new(true))) });
    }

    /// True while a client's future is not done.
    pub fn has_tasks(&self) -> bool {
        !self.tasks.is_empty()
    }

    /// Steps what is ready, once; false if nothing is.
    pub fn step(&mut self) -> bool {
        let now = self.network.now();
        let is_ready = |server: &Echo| self.network.wakes_at(server.ring).is_some_and(|at| at <= now);
        let mut ready: Vec<usize> = (0..self.servers.len()).filter(|n| is_ready(&self.servers[*n])).collect();
        let shards = self.servers.len();
        let woken = |task: &Task| task.woken.0.load(Ordering::Relaxed);
        ready.extend((0..self.tasks.len()).filter(|n| woken(&self.tasks[*n])).map(|n| shards + n));
        if ready.is_empty() {
            return false;
        }
        let chosen = self.rng.pick(&ready);
        if chosen < shards {
            self.servers[chosen].turn().unwrap();
            return true;
        }
        let task = &mut self.tasks[chosen - shards];
        task.woken.0.store(false, Ordering::Relaxed);
        let waker = Waker::from(task.woken.clone());
        if task.future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
            self.tasks.remove(chosen - shards);
        }
        true
    }

    /// Steps until nothing is ready.
    #[track_caller]
    pub fn settle(&mut self) {
        for _ in 0..100_000 {
            if !self.step() {
                return;
            }
        }
        panic!("it never ends");
    }

    /// Steps until nothing is ready and nothing happens by itself.
    #[track_caller]
    pub fn run(&mut self) {
        for _ in 0..100_000 {
            self.settle();
            let waits = self.servers.iter().filter_map(|server| self.network.wakes_at(server.ring));
            let Some(next) = waits.chain(self.network.next_event_at()).min() else { return };
            self.network.set_now(next);
        }
        panic!("it never ends");
    }

    /// Closes the listeners, waits until all connections ended, and checks that nothing is left.
    #[track_caller]
    pub fn finish(mut self) -> Network {
        self.servers.iter_mut().for_each(|server| {
            server.stop();
            server.turn().unwrap();
        });
        self.run();
        assert!(!self.has_tasks(), "a client still waits");
        assert!(self.servers.iter().all(Echo::is_done), "a connection is there");
        drop(self.servers);
        assert_eq!(self.network.leaks(), Vec::<String>::new());
        self.network
    }
}

/// Connects, and waits for the connection.
pub async fn connect(network: &Network, addr: SocketAddr) -> io::Result<Socket> {
    let mut socket = network.socket(CLIENT, addr);
    poll_fn(|cx| socket.poll_connect(cx)).await?;
    Ok(socket)
}

pub async fn write_all(socket: &mut Socket, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let len = poll_fn(|cx| socket.poll_write(cx, bytes)).await?;
        bytes = &bytes[len..];
    }
    Ok(())
}

pub async fn read(socket: &mut Socket, most: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; most];
    let len = poll_fn(|cx| socket.poll_read(cx, &mut bytes)).await?;
    bytes.truncate(len);
    Ok(bytes)
}

pub async fn read_exactly(socket: &mut Socket, len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    while bytes.len() < len {
        let more = read(socket, len - bytes.len()).await?;
        if more.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        bytes.extend(more);
    }
    Ok(bytes)
}

pub const MS: Duration = Duration::from_millis(1);
