//! A server over drivers of the caller's, for tests of this workspace.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringserve_core::framing::Framing;
use ringserve_core::{Address, Driver};
use ringserve_drivers::UringConfig;

use super::builder::Server;
use super::driver::Wanted;
use super::error::Error;
use super::launch::give_up;
use super::listen::sockets::Listening;
use super::plan::{OneShard, Plan};
use super::running::ServerHandle;
use super::runtime::Runtime;
use super::starting::Starting;
use crate::service::IntoService;
use crate::shard::blocking::threads::Threads;
use crate::shard::clock::Clock;
use crate::shard::handle::Shard;
use crate::shard::random::Random;

/// Where a server listens, and how each of its shards makes its driver.
pub trait Drivers: Send + Sync + 'static {
    /// One shard's.
    type Driver: Driver<Descriptor = OwnedFd>;

    /// Listens, once for each shard, and returns the address with its port.
    ///
    /// # Errors
    /// The server does not start then.
    fn listen(&self, addr: SocketAddr, shards: usize) -> io::Result<SocketAddr>;

    /// Makes a driver on its shard's thread. It accepts at all addresses, in the order in which they were listened at.
    /// `config` is what an io_uring driver of this server would have.
    ///
    /// # Errors
    /// The server does not start then.
    fn make(&self, shard: usize, config: &UringConfig) -> io::Result<Self::Driver>;
}

/// As [`Server::start`], over these drivers and with one shard by default. What the server was told of its driver, of
/// sockets, of pinning and of its runtime is ignored.
///
/// # Errors
/// Those of [`Server::start`], and the drivers'.
pub fn start_on<D, F, Make>(
    server: Server<F>,
    drivers: D,
    factory: impl Fn(&Shard) -> Make + Send + Sync + 'static,
) -> Result<ServerHandle, Error>
where
    D: Drivers,
    F: Framing + Clone + Send,
    Make: IntoService<F>,
{
    let (config, listening, plan) =
        planned(server, &|addr, shards| drivers.listen(addr, shards), u64::MAX, factory)?;
    let blocking = plan.blocking.clone();
    let (drivers, listeners) = (Arc::new(drivers), listening.addrs.len() as u16);
    let no_sockets = (0..plan.shards).map(|_| Vec::new()).collect();
    let launched = plan.launch(Starting::new(), no_sockets, &[], move |shard: OneShard<_, _>, ready| {
        match drivers.make(shard.index, &config) {
            Ok(driver) => shard.run_on(driver, listeners, ready),
            Err(error) => give_up(ready, Error::Broken { shard: shard.index, error }),
        }
    });
    let (remotes, threads) = launched?;
    Ok(ServerHandle::new(listening, remotes, threads, blocking))
}

/// The plan of a server that listens by `listen`, and what an io_uring driver of it would have.
pub(super) fn planned<F, Factory, Make>(
    mut server: Server<F>,
    listen: &dyn Fn(SocketAddr, usize) -> io::Result<SocketAddr>,
    descriptors: u64,
    factory: Factory,
) -> Result<(UringConfig, Listening, Plan<F, Factory>), Error>
where
    F: Framing + Clone + Send,
    Factory: Fn(&Shard) -> Make,
    Make: IntoService<F>,
{
    let (addrs, shards) = server.check::<Make>(|| 1)?;
    let wanted = Wanted {
        driver: server.driver,
        incremental: server.incremental,
        shards,
        descriptors,
        limits: &server.server_limits,
        sockets: &server.sockets,
    };
    let (config, chosen) = wanted.driven();
    let listen = |addr: &Address| match addr {
        Address::Ip(ip) => listen(*ip, shards).map(Address::Ip),
        _ => Err(io::ErrorKind::Unsupported.into()),
    };
    let listen = |addr| listen(&addr).map_err(|error| Error::Listen { addr, error });
    let addrs = addrs.into_iter().map(listen).collect::<Result<_, Error>>()?;
    let blocking = Arc::new(Threads::new(&server.server_limits));
    let plan = Plan {
        framing: server.framing,
        server_limits: server.server_limits,
        limits: server.limits,
        chosen,
        admit: server.admit,
        asks: server.sockets.asks(),
        runtime: Runtime::Own,
        factory: Arc::new(factory),
        shards,
        clock: Clock::start(),
        seed: Random::system_seed(),
        blocking,
    };
    Ok((config, Listening::new(addrs, Vec::new(), Vec::new()), plan))
}
