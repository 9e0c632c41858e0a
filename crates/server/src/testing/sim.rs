//! The world of a test: servers, clients, time, and faults by hand.

use std::cell::Cell;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use ringserve_base::clock::Clock;
use ringserve_core::framing::{Encoding, TypedFraming};
use ringserve_core::{LimitError, Limits, PeerCredentials, ServerLimits};

use super::client::{ClientResult, Net};
use super::world::{Ran, World};
use crate::error::Error;
use crate::overload::Load;
use crate::server::builder::Server;
use crate::server::serves::{AllOf, MadeOf, Serves};
use crate::server::several::MultiService;
use crate::server::start::Prepared;
use crate::server::stepped::SteppedServer;
use crate::shard::face::handle::Shard;
use crate::shard::face::service::IntoService;
use crate::shard::running::starting::{ShardStart, StartState};
use crate::shard::state::services::Services;
use crate::shard::wakes::inbox::Command;
use crate::stats::{ServerStats, ServiceNames};
use crate::watched_service::Watches;

/// The most virtual time for clients and servers to come to their end.
const ENDS_WITHIN: Duration = Duration::from_secs(400 * 24 * 3600);

/// One run: a network, a clock, servers and clients, all on the test's thread. See the
/// [module](crate::testing).
pub struct Sim {
    world: Rc<World>,
    /// The servers' clocks at the start.
    age: Duration,
    clients: Cell<u32>,
}

impl Sim {
    pub(crate) fn new(world: Rc<World>, age: Duration) -> Sim {
        Sim { world, age, clients: Cell::new(0) }
    }

    /// Starts a server, with one shard unless it says how many, and returns the first address at
    /// which it listens.
    ///
    /// Driver, socket options and pinning of the server have no effect. Unix sockets and
    /// [runtimes](crate::Server::runtime) are not simulated.
    ///
    /// # Panics
    /// If the server does not start. [`start`](Sim::start) returns the error.
    #[track_caller]
    pub fn serve<F, Make>(&self, server: Server<F>, factory: impl Fn(&Shard) -> Make + 'static) -> SocketAddr
    where
        F: TypedFraming + Clone + Send,
        Make: IntoService<F>,
    {
        match self.start(server, factory) {
            Ok(server) => server.addr(),
            Err(error) => panic!("the server does not start: {error}"),
        }
    }

    /// Starts a server as [`serve`](Sim::serve), and returns a handle of it.
    ///
    /// # Errors
    /// Those of [`Server::start`](crate::Server::start).
    pub fn start<F, Make>(
        &self,
        server: Server<F>,
        factory: impl Fn(&Shard) -> Make + 'static,
    ) -> Result<SimServer, Error>
    where
        F: TypedFraming + Clone + Send,
        Make: IntoService<F>,
    {
        let watches = self.watches();
        self.start_prepared(server.with(move |shard: &Shard| watches.over(factory(shard))))
    }

    /// Starts a server of [several services](crate::Server::new), as [`serve`](Sim::serve). Returns
    /// its addresses, in the order of the endpoints.
    ///
    /// # Panics
    /// If the server does not start. [`start_several`](Sim::start_several) returns the error.
    #[track_caller]
    pub fn serve_several(&self, server: Server<MultiService>) -> Vec<SocketAddr> {
        match self.start_several(server) {
            Ok(server) => server.addrs,
            Err(error) => panic!("the server does not start: {error}"),
        }
    }

    /// Starts a server of several services as [`serve_several`](Sim::serve_several), and returns a
    /// handle of it.
    ///
    /// # Errors
    /// Those of [`Server::start`](crate::Server::start).
    pub fn start_several(&self, server: Server<MultiService>) -> Result<SimServer, Error> {
        let Prepared { config, hooks, serves } = server.prepared();
        let serves = AllWatched { all: serves, watches: self.watches() };
        self.start_prepared(Prepared { config, hooks, serves })
    }

    fn watches(&self) -> Watches {
        Watches { trace: self.world.trace.clone() }
    }

    fn start_prepared<S: Serves + 'static>(&self, server: Prepared<S>) -> Result<SimServer, Error> {
        let world = &self.world;
        let number = world.servers() as u64;
        let clock = Clock::Simulated { time: world.time.clone(), age: self.age };
        let seed = world.seed ^ number << 48;
        let pool = |limits: &ServerLimits| world.add_pool(seed, limits);
        let on_call = world.watches_callers();
        self.begun(SteppedServer::start(server, &world.network, (clock, seed), &pool, &on_call))
    }

    /// A server whose factories were called.
    fn begun(&self, server: Result<SteppedServer, Error>) -> Result<SimServer, Error> {
        let world = &self.world;
        world.check_panics("a factory");
        let server = server?;
        let (addrs, names, shards) = (server.addrs.clone(), server.names.clone(), server.count());
        let number = world.add_server(server);
        if let Err(error) = self.wait_for_start(number) {
            world.event(|| format!("server {number} does not start: {error}"));
            self.run_until_or_fail("a shard of a start that failed still runs", |world| {
                world.with_server(number, SteppedServer::is_done)
            });
            return Err(error);
        }
        world.event(|| format!("server {number} listens at {addrs:?} with {shards} shards"));
        Ok(SimServer { world: world.clone(), number, addrs, names })
    }

    /// Lets time pass while factories wait.
    fn wait_for_start(&self, number: usize) -> Result<(), Error> {
        let world = &self.world;
        loop {
            let next = match world.check_start(number) {
                StartState::Ready(_) => return Ok(()),
                StartState::Failed(error) => return Err(error),
                StartState::Waits(next) => next.map(|next| world.now().saturating_add(next)),
            };
            // A step may have changed something.
            let one_more = Cell::new(true);
            if world.run(next, |_| !one_more.replace(false)) == Ran::Stuck {
                let waits_for = world.with_server(number, SteppedServer::waits_for);
                world.fail(format!("nothing can happen any more, and a server waits for {waits_for}"));
            }
        }
    }

    /// Starts a client, on a host with its own address, which is returned. It runs beside the
    /// servers and all other clients; the run waits for its end.
    ///
    /// A client that panics fails the run. A client that returns an error fails it too, unless the
    /// run has faults that cost connections, or the test did something by hand that does.
    pub fn client<C>(&self, name: impl AsRef<str>, code: C) -> IpAddr
    where
        C: AsyncFnOnce(Net) -> ClientResult + 'static,
    {
        self.add_client(name.as_ref(), true, code)
    }

    /// Starts a client that may run forever, such as an upstream; otherwise as
    /// [`client`](Sim::client). It is dropped at the end.
    pub fn background<C>(&self, name: impl AsRef<str>, code: C) -> IpAddr
    where
        C: AsyncFnOnce(Net) -> ClientResult + 'static,
    {
        self.add_client(name.as_ref(), false, code)
    }

    fn add_client<C>(&self, name: &str, counts: bool, code: C) -> IpAddr
    where
        C: AsyncFnOnce(Net) -> ClientResult + 'static,
    {
        let number = self.clients.get();
        self.clients.set(number + 1);
        let [_, high, middle, low] = number.to_be_bytes();
        let host = IpAddr::V4(Ipv4Addr::new(10, 128 | high, middle, low));
        Net::run(&self.world, name, host, counts, counts, code);
        host
    }

    /// Gives later connections from a host, as [`client`](Sim::client) returns it, the credentials
    /// of a process, as those of a Unix socket have
    /// ([`Peer::credentials`](crate::Peer::credentials)). A server sees them if
    /// [`SocketOptions::peer_credentials`](crate::net::SocketOptions::peer_credentials) is on.
    pub fn credentials(&self, host: IpAddr, credentials: PeerCredentials) {
        self.world.event(|| format!("{host} has {credentials:?}"));
        self.world.network.set_credentials(host, credentials);
    }

    /// Gives a name addresses, to which [`Shard::connect`](crate::Shard::connect) then connects; an
    /// empty list resolves to nothing. A name that the test does not give does not resolve. The
    /// latest call counts.
    ///
    /// ```
    /// # ringserve::testing::Sim::seeds(1).run(|sim| {
    /// let host = sim.background("database", async |net| {
    ///     let mut listener = net.listen("10.0.0.9:5432")?;
    ///     loop {
    ///         let mut client = listener.accept().await;
    ///         client.send("hello\n").await?;
    ///     }
    /// });
    /// # let _ = host;
    /// sim.name("db", ["10.0.0.9".parse().unwrap()]);
    /// # });
    /// ```
    pub fn name(&self, name: &str, addrs: impl IntoIterator<Item = IpAddr>) {
        let addrs: Vec<IpAddr> = addrs.into_iter().collect();
        self.world.event(|| format!("{name} has the addresses {addrs:?}"));
        self.world.names.set(name, Some(addrs));
    }

    /// Removes a name, so that it does not resolve.
    pub fn forget_name(&self, name: &str) {
        self.world.event(|| format!("{name} is forgotten"));
        self.world.names.set(name, None);
    }

    /// Makes each later look-up of a name, known or not, take that long, instead of a time that the
    /// seed draws.
    pub fn name_takes(&self, name: &str, time: Duration) {
        self.world.names.set_takes(name, time);
    }

    /// Lets `time` pass.
    pub fn run_for(&self, time: Duration) {
        let until = self.world.now().saturating_add(time);
        self.world.run(Some(until), |_| false);
    }

    /// Lets time pass until every client has ended. Fails if a client waits and nothing more can
    /// happen.
    pub fn run_until_done(&self) {
        self.run_until_or_fail("a client still waits", World::all_clients_done);
    }

    /// Lets at most `time` pass, until `over` returns true. True if it did.
    pub fn run_until(&self, time: Duration, over: impl Fn() -> bool) -> bool {
        let until = self.world.now().saturating_add(time);
        self.world.run(Some(until), |_| over()) == Ran::Over
    }

    fn run_until_or_fail(&self, otherwise: &str, over: impl Fn(&World) -> bool) {
        let until = self.world.now().saturating_add(ENDS_WITHIN);
        // The wait has no end, so that a world in which nothing can happen differs from a long
        // wait.
        let ran = self.world.run(None, |world| world.now() > until || over(world));
        let why = match ran {
            Ran::Over if self.world.now() > until => {
                format!("after {ENDS_WITHIN:?} of virtual time {otherwise}")
            }
            Ran::Over | Ran::TimeIsUp => return,
            Ran::Stuck => format!(
                "nothing can happen any more, and {otherwise} (threads and runtimes of the program are not simulated)"
            ),
        };
        let waiting = self.world.waiting();
        self.world.fail(format!("{why}:{waiting}"));
    }

    /// Begins to shut all servers down, as SIGTERM does. Returns at once.
    pub fn drain(&self) {
        self.command(Command::Drain);
    }

    /// Stops all servers at once, with resets. Returns at once.
    pub fn abort(&self) {
        self.command(Command::Abort);
    }

    fn command(&self, command: Command) {
        for server in 0..self.world.servers() {
            self.world.command(server, command);
        }
    }

    /// Shuts all servers down and lets time pass until all shards and clients have ended. The end
    /// of the test does this too.
    pub fn finish(&self) {
        self.drain();
        self.run_until_or_fail("a shard still runs", World::all_shards_ended);
        self.run_until_or_fail("a client still waits", World::all_clients_done);
    }

    /// The virtual time since the start of the run.
    pub fn now(&self) -> Duration {
        self.world.now()
    }

    /// The seed of this run.
    pub fn seed(&self) -> u64 {
        self.world.seed
    }

    /// A random number, decided by the seed.
    pub fn random(&self) -> u64 {
        self.world.random()
    }

    /// Stops the world for `time`, as a machine that sleeps: nothing runs, and then the clock is
    /// `time` later.
    pub fn suspend(&self, time: Duration) {
        self.world.event(|| format!("the machine sleeps for {time:?}"));
        self.world.rests(time);
        self.world.jump(self.world.now().saturating_add(time));
    }

    /// Holds back everything between two hosts, until they are [healed](Sim::heal). Connections
    /// live on.
    pub fn partition(&self, a: IpAddr, b: IpAddr) {
        self.world.event(|| format!("{a} and {b} are parted"));
        self.world.is_disturbed.set(true);
        self.world.network.partition(a, b);
    }

    /// Ends a partition. Held bytes arrive.
    pub fn heal(&self, a: IpAddr, b: IpAddr) {
        self.world.event(|| format!("{a} and {b} are healed"));
        self.world.network.heal(a, b);
    }

    /// Breaks all connections from or to a host, as a middlebox that restarts does: both ends find
    /// a reset.
    pub fn reset(&self, host: IpAddr) {
        self.world.event(|| format!("the connections of {host} break"));
        self.world.is_disturbed.set(true);
        for (connection, client, server) in self.world.network.connections() {
            if client.ip() == host || server.ip() == host {
                self.world.network.reset(connection);
            }
        }
    }

    /// Lets clients end with an error from here on, because the test costs connections, as limits
    /// that bite do.
    pub fn expect_losses(&self) {
        self.world.is_disturbed.set(true);
    }

    /// Writes a line into the trace of the run.
    pub fn note(&self, what: impl fmt::Display) {
        self.world.event(|| what.to_string());
    }
}

impl fmt::Debug for Sim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sim(seed {}, at {:?})", self.world.seed, self.world.now())
    }
}

/// All services of a server under watch.
struct AllWatched {
    all: AllOf,
    watches: Watches,
}

impl Serves for AllWatched {
    fn again(&self) -> Self {
        AllWatched { all: self.all.again(), watches: self.watches.clone() }
    }

    fn check_limits(&self, service: usize, limits: &Limits) -> Result<(), LimitError> {
        self.all.check_limits(service, limits)
    }

    fn make(
        self,
        shard: Shard,
        start: &ShardStart,
    ) -> Result<(MadeOf<impl Services + use<>>, Vec<Encoding>), Error> {
        self.all.make_by(|hosted, number| hosted.make_watched(&shard, (start, number), &self.watches))
    }
}

/// A server that runs in a simulation. Dropping it does nothing: the end of the test stops the
/// server.
#[derive(Clone)]
pub struct SimServer {
    world: Rc<World>,
    number: usize,
    addrs: Vec<SocketAddr>,
    names: ServiceNames,
}

impl SimServer {
    /// The first address of the server.
    pub fn addr(&self) -> SocketAddr {
        self.addrs[0]
    }

    /// The addresses of the server, with the real ports.
    pub fn local_addrs(&self) -> &[SocketAddr] {
        &self.addrs
    }

    /// The first address of the service with this [name](crate::listen::Endpoints::name): the one
    /// that is tested, wherever its endpoint stands among those of the server.
    ///
    /// ```
    /// use ringserve::listen::tcp;
    /// use ringserve::{Cx, Frame, Server, Service, framing::Lines, testing::Sim};
    /// # struct Echo;
    /// # impl Service for Echo {
    /// #     type Session = ();
    /// #     type Error = std::convert::Infallible;
    /// #     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
    /// #         cx.reply(frame);
    /// #         Ok(())
    /// #     }
    /// # }
    ///
    /// Sim::seeds(1).run(|sim| {
    ///     let lines = |addr: &str| tcp(addr.to_owned()).framing(Lines::default());
    ///     let server = Server::new()
    ///         .service(lines("10.0.0.1:7001").name("admin"), |_shard| Echo)
    ///         .service(lines("10.0.0.1:7000").name("chat"), |_shard| Echo);
    ///     let server = sim.start_several(server).expect("it starts");
    ///     let chat = server.addr_of("chat");
    ///     assert_eq!(chat.port(), 7000);
    /// });
    /// ```
    ///
    /// # Panics
    /// If no service has this name.
    #[track_caller]
    pub fn addr_of(&self, service: &str) -> SocketAddr {
        self.addrs_of(service)[0]
    }

    /// The addresses of the service with this name, in the order of its endpoints.
    ///
    /// # Panics
    /// If no service has this name.
    #[track_caller]
    pub fn addrs_of(&self, service: &str) -> &[SocketAddr] {
        let Some(listeners) = self.names.listeners(service) else {
            panic!("no service has the name {service}; there are {}", self.names.list());
        };
        &self.addrs[listeners]
    }

    /// Figures of the server: totals since its start, and its present state.
    pub fn stats(&self) -> ServerStats {
        self.world.with_server(self.number, SteppedServer::stats)
    }

    /// Begins to shut the server down, as SIGTERM does. Returns at once.
    pub fn drain(&self) {
        self.world.command(self.number, Command::Drain);
    }

    /// Stops the server at once, with resets. Returns at once.
    pub fn abort(&self) {
        self.world.command(self.number, Command::Abort);
    }

    /// True once every shard ended.
    pub fn is_done(&self) -> bool {
        self.world.with_server(self.number, SteppedServer::is_done)
    }

    /// Keeps a shard from running for `time`, as a busy machine does.
    ///
    /// # Panics
    /// If there is no such shard.
    pub fn stall(&self, shard: usize, time: Duration) {
        self.world.event(|| format!("shard {shard} does not run for {time:?}"));
        self.world.stall(self.number, shard, time);
    }

    /// Has all shards of the server be asked for more than they can do, as a [`Load`] and the share
    /// of frames for which [`Service::shed`](crate::Service::shed) is asked, from 0 to 1. No
    /// watchdog runs in a simulation, unless the test [asks for it](SimServer::follow_load).
    pub fn set_load(&self, load: Load, share: f64) {
        self.world.event(|| format!("the load is {load}, and {share} of the frames are to be shed"));
        self.world.with_server(self.number, |server| server.set_load(load, share));
    }

    /// Lets the load of each shard follow from now on, as by its watchdog each 25 ms of virtual
    /// time: from its table, what its connections hold, whether accepting is paused, and how long
    /// it [computes](super::compute), without which work takes no time. The queues of listeners are
    /// not looked at.
    pub fn follow_load(&self) {
        self.world.follow_load(self.number);
    }

    /// The load of the shard that is asked for most.
    pub fn load(&self) -> Load {
        self.world.with_server(self.number, SteppedServer::load)
    }

    /// Breaks a shard's driver: the shard ends, and the others drain.
    ///
    /// # Panics
    /// If there is no such shard.
    pub fn break_driver(&self, shard: usize) {
        self.world.event(|| format!("the driver of shard {shard} breaks"));
        self.world.break_driver(self.number, shard);
    }
}

impl fmt::Debug for SimServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimServer({:?})", self.addrs)
    }
}
