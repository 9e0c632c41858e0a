//! A server over drivers of the caller's, for tests of this workspace.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringserve_base::clock::Clock;
use ringserve_core::framing::TypedFraming;
use ringserve_core::{Address, Driver, ServerLimits};
use ringserve_drivers::UringConfig;

use super::builder::Server;
use super::config::checked::CheckLimits;
use super::config::driver_config::DriverChoice;
use super::config::given::ServerConfig;
use super::config::shared::{ShardSeed, SharedConfig};
use super::launch::{RunShard, give_up, launch};
use super::listen::addr::Bind;
use super::listen::sockets::Listening;
use super::running::ServerHandle;
use super::runtime::Runtime;
use super::serves::{Serves, SpentFactories};
use super::several::MultiService;
use super::start::Prepared;
use crate::blocking::Pool;
use crate::blocking::threads::Threads;
use crate::error::Error;
use crate::shard::face::handle::Shard;
use crate::shard::face::service::IntoService;
use crate::shard::running::starting::StartWait;

/// The sockets on which a server listens, and the drivers of its shards.
pub trait Drivers: Send + Sync + 'static {
    /// One shard's.
    type Driver: Driver<Descriptor = OwnedFd>;

    /// Listens, once for each shard, and returns the address with its port.
    ///
    /// # Errors
    /// The server does not start then.
    fn listen(&self, addr: SocketAddr, shards: usize) -> io::Result<SocketAddr>;

    /// As [`listen`](Drivers::listen), where a socket was adopted that has this address. Of the
    /// socket nothing else is used.
    ///
    /// # Errors
    /// The server does not start then.
    fn adopt(&self, _addr: SocketAddr, _shards: usize) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Makes a driver on its shard's thread. It accepts at all addresses, in the order in which
    /// they were listened at. `config` is what an io_uring driver of this server would have.
    ///
    /// # Errors
    /// The server does not start then.
    fn make(&self, shard: usize, config: &UringConfig) -> io::Result<Self::Driver>;
}

/// As [`Server::start`], over these drivers and with one shard by default. Settings of the server's
/// own driver, of sockets, of pinning and of its runtime are ignored.
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
    F: TypedFraming + Clone + Send,
    Make: IntoService<F>,
{
    start_prepared_on(server.with(factory), drivers)
}

/// The same for a server of several services.
///
/// # Errors
/// Those of [`start_on`].
pub fn start_several_on<D: Drivers>(server: Server<MultiService>, drivers: D) -> Result<ServerHandle, Error> {
    start_prepared_on(server.prepared(), drivers)
}

fn start_prepared_on<D, S>(prepared: Prepared<S>, drivers: D) -> Result<ServerHandle, Error>
where
    D: Drivers,
    S: Serves + Send + 'static,
{
    let Prepared { config, serves, .. } = prepared;
    let (ring, listening, shared) = shared(
        config,
        &|number, limits| serves.check_limits(number, limits),
        &|addr, is_adopted, shards| match is_adopted {
            true => drivers.adopt(addr, shards).map(|()| addr),
            false => drivers.listen(addr, shards),
        },
        u64::MAX,
        |limits| (Clock::start(), Arc::new(Threads::new(limits))),
    )?;
    let drivers = Arc::new(drivers);
    let no_sockets = (0..shared.checked.shards).map(|_| Vec::new()).collect();
    let of_shard = || -> RunShard {
        let (serves, kept) = (serves.again(), SpentFactories::new(serves.again()));
        let (drivers, ring) = (drivers.clone(), ring.clone());
        Box::new(move |seed: ShardSeed, start| {
            let _kept = kept;
            match drivers.make(seed.index, &ring) {
                Ok(driver) => seed.run_on(serves, driver, start),
                Err(error) => give_up(&start, Error::Broken { shard: seed.index, error }),
            }
        })
    };
    let launched = launch(&shared, (StartWait::new(), None), no_sockets, &[], &of_shard)?;
    Ok(ServerHandle::new(listening, launched).keeping(SpentFactories::new(serves)))
}

/// Listens at an address, or adopts the socket that has it, on this number of shards. Returns the
/// address with its port.
pub(super) type ListenBy<'a> = &'a dyn Fn(SocketAddr, bool, usize) -> io::Result<SocketAddr>;

/// The configuration of a server that listens by `listen`, and what an io_uring driver of it would
/// have. `surroundings` are its clock and its pool for calls that block.
pub(super) fn shared(
    config: ServerConfig,
    framings: CheckLimits<'_>,
    listen: ListenBy<'_>,
    descriptors: u64,
    surroundings: impl FnOnce(&ServerLimits) -> (Clock, Arc<dyn Pool>),
) -> Result<(UringConfig, Listening, Arc<SharedConfig>), Error> {
    let mut checked = config.check(framings, 1)?;
    checked.given.runtime = Runtime::Own;
    let (ring, driver) = DriverChoice { checked: &checked, descriptors, left_alone: 0 }.driven();
    let failed = |addr: &Address, error| Error::Listen { addr: addr.clone(), error };
    let place = |bind: &Bind| match bind.addr.as_ip() {
        Some(ip) => Ok((ip, bind.adopted.is_some())),
        None => Err(failed(&bind.addr, io::ErrorKind::Unsupported.into())),
    };
    // All are looked at before the first is listened at: nothing would close that one.
    let places = checked.binds().map(place).collect::<Result<Vec<_>, Error>>()?;
    let listen = |&(ip, is_adopted): &(SocketAddr, bool)| {
        let listened = listen(ip, is_adopted, checked.shards);
        listened.map(Address::Ip).map_err(|error| failed(&Address::Ip(ip), error))
    };
    let addrs = places.iter().map(listen).collect::<Result<_, Error>>()?;
    let adopted = places.iter().map(|(_, is_adopted)| *is_adopted).collect();
    let listening = Listening::new(addrs, adopted, Vec::new(), Vec::new());
    let no_sockets: Vec<_> = (0..checked.shards).map(|_| Vec::new()).collect();
    let surroundings = surroundings(&checked.server_limits);
    let shared = checked.share(driver, (&listening, &no_sockets), surroundings, None);
    Ok((ring, listening, shared))
}
