//! A shard that ends by itself: the cause is logged, the others drain, `wait` returns the error.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::Waker;

use ringserve::framing::LengthPrefix;
use ringserve::{Error, Server, ServerHandle};
use ringserve_buf::{Pool, PoolConfig};
use ringserve_core::{Budget, Completion, Driver, DriverStats, Op, Socket, Wait};
use ringserve_drivers::{BeforeConnect, Epoll, EpollConfig, Listener, SystemKernel, Uring, UringConfig};
use ringserve_server::internals::{Drivers, start_on};
use ringserve_tests::Bounded;
use ringserve_tests::client::End;
use ringserve_tests::{
    Client, Logged, Puppet, SOON, Shared, alone, eventually, no_time_limits, on_epoll, order,
};
use tracing_subscriber::filter::LevelFilter;

/// A driver that breaks, or panics, in the first turn after it is ordered to.
struct Fragile<D> {
    driver: D,
    told: Option<Arc<Told>>,
}

#[derive(Default)]
struct Told {
    breaks: AtomicBool,
    panics: AtomicBool,
}

impl<D: Driver> Driver for Fragile<D> {
    type Descriptor = D::Descriptor;

    fn submit(&mut self, op: Op) {
        self.driver.submit(op);
    }

    fn turn(&mut self, wait: Wait, budget: Budget, completions: &mut Vec<Completion>) -> Result<(), i32> {
        self.driver.turn(wait, budget, completions)?;
        if let Some(told) = &self.told {
            assert!(!told.panics.load(SeqCst), "the driver's own panic");
            if told.breaks.load(SeqCst) {
                return Err(rustix::io::Errno::IO.raw_os_error());
            }
        }
        Ok(())
    }

    fn pool(&self) -> &Pool {
        self.driver.pool()
    }

    fn stats(&self) -> DriverStats {
        self.driver.stats()
    }

    fn connections_max(&self) -> usize {
        self.driver.connections_max()
    }

    fn waker(&self) -> Waker {
        self.driver.waker()
    }

    fn hand_over(&mut self, socket: Socket) -> Option<D::Descriptor> {
        self.driver.hand_over(socket)
    }

    fn take_over(&mut self, descriptor: D::Descriptor) -> Socket {
        self.driver.take_over(descriptor)
    }

    fn readiness(&mut self) -> Result<D::Descriptor, i32> {
        self.driver.readiness()
    }

    fn begin(&mut self) -> Result<bool, i32> {
        self.driver.begin()
    }
}

/// Real drivers on separate listeners, of which that of shard 1 is fragile.
struct Listeners {
    sockets: Mutex<Vec<Listener>>,
    told: Arc<Told>,
}

impl Listeners {
    fn new(told: &Arc<Told>) -> Listeners {
        Listeners { sockets: Mutex::default(), told: told.clone() }
    }

    fn take(&self) -> Vec<Listener> {
        vec![self.sockets.lock().unwrap().pop().expect("one for each shard")]
    }

    fn told(&self, shard: usize) -> Option<Arc<Told>> {
        (shard == 1).then(|| self.told.clone())
    }

    fn listen(&self, addr: SocketAddr, shards: usize) -> io::Result<SocketAddr> {
        let mut local = addr;
        for _ in 0..shards {
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
            socket.set_reuse_port(true)?;
            socket.bind(&local.into())?;
            socket.listen(128)?;
            local = socket.local_addr()?.as_socket().expect("an address of IP");
            self.sockets.lock().unwrap().push(Listener::own(socket));
        }
        Ok(local)
    }
}

struct OnUring(Listeners);

impl Drivers for OnUring {
    type Driver = Fragile<Uring<SystemKernel>>;

    fn listen(&self, addr: SocketAddr, shards: usize) -> io::Result<SocketAddr> {
        self.0.listen(addr, shards)
    }

    fn make(&self, shard: usize, config: &UringConfig) -> io::Result<Self::Driver> {
        let config = UringConfig { connections: 1000, ..config.clone() };
        let driver = Uring::new(&config, self.0.take()).map_err(io::Error::other)?;
        Ok(Fragile { driver, told: self.0.told(shard) })
    }
}

struct OnEpoll(Listeners);

impl Drivers for OnEpoll {
    type Driver = Fragile<Epoll>;

    fn listen(&self, addr: SocketAddr, shards: usize) -> io::Result<SocketAddr> {
        self.0.listen(addr, shards)
    }

    fn make(&self, shard: usize, _config: &UringConfig) -> io::Result<Self::Driver> {
        let pool = PoolConfig { buffer_bytes: 16 << 10, buffers_max: 1024, poison: false };
        let before_connect = BeforeConnect::default();
        let config = EpollConfig { connections: 1000, pool, before_connect, ..EpollConfig::default() };
        let driver = Epoll::new(&config, self.0.take()).map_err(io::Error::other)?;
        Ok(Fragile { driver, told: self.0.told(shard) })
    }
}

fn start(told: &Arc<Told>, shared: &Arc<Shared>) -> ServerHandle {
    let server =
        Server::bind("127.0.0.1:0").shards(3).bounded(no_time_limits()).framing(LengthPrefix::default());
    let for_shards = shared.clone();
    let factory = move |_: &ringserve::Shard| Puppet::new(for_shards.clone());
    let listeners = Listeners::new(told);
    let started = match on_epoll() {
        true => start_on(server, OnEpoll(listeners), factory),
        false => start_on(server, OnUring(listeners), factory),
    };
    started.expect("the server starts")
}

/// Shard 1 ends in the way that `tell` orders. Returns the result of `wait`.
fn dies(logged: &Logged, tell: impl Fn(&Told)) -> Error {
    let (told, shared) = (Arc::new(Told::default()), Arc::new(Shared::default()));
    let running = start(&told, &shared);
    let addr = running.local_addrs()[0];
    let mut clients: [Vec<Client>; 3] = [(); 3].map(|()| Vec::new());
    while clients.iter().any(|clients| clients.len() < 3) {
        let mut client = Client::connect(addr);
        let shard: usize = client.ask_text(order::shard()).parse().unwrap();
        clients[shard].push(client);
    }
    let [mut on_0, mut on_1, mut on_2] = clients;
    on_0[0].send(order::gate("waits"));
    eventually("the call waits", SOON, || shared.gate.came() == 1);
    tell(&told);
    on_1[0].send(order::echo(""));
    // Its own connections are gone, and the others drain: idle ones are closed, owed replies are
    // sent.
    on_1.iter_mut().for_each(|client| _ = client.end_after_all());
    on_2.iter_mut().for_each(|client| assert_eq!(client.end(), End::Fin));
    on_0[1..].iter_mut().for_each(|client| assert_eq!(client.end(), End::Fin));
    eventually("the cause is logged", SOON, || {
        logged.text().contains("the other shards drain and the server ends")
    });
    let report = running.stats_now();
    assert_eq!(report.shards.len(), 3);
    shared.gate.open();
    assert_eq!(on_0[0].recv(), order::gate("waits"));
    assert_eq!(on_0[0].end(), End::Fin);
    drop((on_0, on_1, on_2));
    running.wait().expect_err("a shard ended by itself")
}

#[test]
fn a_shard_that_dies_is_logged_and_the_others_drain() {
    if !alone(a_shard_that_dies_is_logged_and_the_others_drain) {
        return;
    }
    let logged = Logged::from(LevelFilter::ERROR);
    let broken = dies(&logged, |told| told.breaks.store(true, SeqCst));
    assert!(matches!(broken, Error::Broken { shard: 1, .. }), "{broken}");
    let text = logged.take();
    assert!(text.contains("the driver of shard 1 broke: Input/output error"), "{text}");
    let panicked = dies(&logged, |told| told.panics.store(true, SeqCst));
    assert!(
        matches!(&panicked, Error::ShardPanicked { shard: 1, message } if message.contains("the driver's own panic")),
        "{panicked}"
    );
    let text = logged.text();
    assert!(text.contains("shard 1 panicked outside of user code: the driver's own panic"), "{text}");
}
