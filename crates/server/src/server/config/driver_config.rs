//! The driver that was chosen for a server, and its sizes.

use std::env;

use ringserve_base::doctor::Rings;
use ringserve_buf::PoolConfig;
use ringserve_core::{Address, ConnId};
use ringserve_drivers::{
    BeforeConnect, EpollConfig, Resource, ResourceLimit, SetupError, Uring, UringConfig, probe, probe_epoll,
    try_apart,
};
use socket2::SockRef;

use super::super::driver::{Driver, VARIABLE};
use super::checked::CheckedConfig;
use crate::error::Error;

/// The settings by which each shard makes its driver, and the number of its connections.
pub(crate) struct DriverConfig {
    pub(crate) kind: DriverKind,
    reason: String,
    sizes: Sizes,
}

/// Numbers of connections.
#[derive(Clone, Copy)]
struct Sizes {
    /// Accepted connections of a shard.
    connections: usize,
    /// Upstreams of a shard, which have slots of the same table.
    upstreams: usize,
    /// Accepted connections of all shards together.
    connections_max: usize,
    /// Slots of a shard for peers of an allow list.
    reserved: usize,
}

impl Sizes {
    fn slots(self) -> u32 {
        (self.connections + self.upstreams + self.reserved) as u32
    }
}

pub(crate) enum DriverKind {
    Uring(UringConfig),
    Epoll(EpollConfig),
}

/// Chooses the driver of a server.
pub(crate) struct DriverChoice<'a> {
    pub(crate) checked: &'a CheckedConfig,
    /// The soft limit on descriptors.
    pub(crate) descriptors: u64,
    /// Those that connections must leave to others.
    pub(crate) left_alone: u64,
}

impl DriverChoice<'_> {
    pub(crate) fn choose(&self) -> Result<DriverConfig, Error> {
        match self.checked.given.driver {
            Driver::IoUring => self.uring("asked for by the program"),
            Driver::Epoll => self.epoll("asked for by the program").map_err(Error::Driver),
            Driver::Auto => match env::var(VARIABLE).as_deref() {
                Err(_) | Ok("" | "auto") => self.uring("it works here").or_else(|error| match error {
                    Error::Driver(uring) => self
                        .epoll(&format!("io_uring cannot be used: {uring}"))
                        .map_err(|epoll| Error::NoDriver { uring, epoll }),
                    other => Err(other),
                }),
                Ok("io_uring") => self.uring("asked for by RINGSERVE_DRIVER"),
                Ok("epoll") => self.epoll("asked for by RINGSERVE_DRIVER").map_err(Error::Driver),
                Ok(other) => Err(Error::NoSuchDriver(other.to_owned())),
            },
        }
    }

    fn pool(&self) -> PoolConfig {
        PoolConfig {
            buffer_bytes: self.checked.server_limits.receive_buffer_bytes,
            buffers_max: self.checked.receive_buffers_max,
            poison: false,
        }
    }

    fn uring(&self, why: &str) -> Result<DriverConfig, Error> {
        let found = probe().map_err(Error::Driver)?;
        let (config, sizes) = self.uring_config(found.direct_descriptors);
        // The trial had small queues.
        let queues = format!("queues {}/{}", config.submission_entries, config.completion_entries);
        let found = found.description.split(", ").skip(2).collect::<Vec<_>>().join(", ");
        self.try_all(&config)?;
        let reason = format!("io_uring ({why}); {queues}, {found}");
        Ok(DriverConfig { kind: DriverKind::Uring(config), reason, sizes })
    }

    /// The ring's settings for drivers of the caller, whether or not this machine has rings.
    pub(crate) fn driven(&self) -> (UringConfig, DriverConfig) {
        let (config, sizes) = self.uring_config(true);
        let kind = DriverKind::Uring(config.clone());
        (config, DriverConfig { kind, reason: "given by the program".to_owned(), sizes })
    }

    /// The settings of a shard's ring, and the numbers of connections.
    fn uring_config(&self, direct_descriptors: bool) -> (UringConfig, Sizes) {
        let sizes = if direct_descriptors { self.in_tables() } else { self.in_descriptors() };
        let config = UringConfig {
            connections: sizes.slots(),
            before_connect: self.before_connect(),
            pool: self.pool(),
            plain_descriptors: !direct_descriptors,
            coalesce: self.checked.given.coalesce,
            peer_addresses: self.checked.asks_peer_addresses(),
            ..UringConfig::default()
        };
        (config, sizes)
    }

    /// Numbers where each shard has a table. The limit on descriptors bounds its length, and an
    /// entry costs 8 bytes of kernel memory from the start. The kernel spreads connections evenly,
    /// so four times a shard's share is room enough.
    fn in_tables(&self) -> Sizes {
        let max = self.checked.server_limits.connections_max;
        let table = usize::try_from(self.descriptors).unwrap_or(usize::MAX).min(TABLE_MAX);
        let reserved = self.checked.reserved().min(table / 4);
        let table = table - reserved;
        let upstreams = self.checked.server_limits.upstreams_max.min(table / 2);
        let most = max.min(table - upstreams);
        let connections = most.min(max.div_ceil(self.checked.shards).saturating_mul(4));
        let connections_max = max.min(most.saturating_mul(self.checked.shards));
        Sizes { connections, upstreams, connections_max, reserved }
    }

    /// Numbers where each connection costs a descriptor of the process; one shard may come to hold
    /// them all.
    fn in_descriptors(&self) -> Sizes {
        let own = DESCRIPTORS_PER_SHARD * self.checked.shards as u64 + self.left_alone;
        let spare = usize::try_from(self.descriptors.saturating_sub(own)).unwrap_or(usize::MAX);
        let reserved = self.checked.reserved().min(spare / 4);
        let connections =
            self.checked.server_limits.connections_max.min(spare - reserved).clamp(1, SLOTS_MAX / 2);
        let upstreams = self.checked.server_limits.upstreams_max.min(SLOTS_MAX / 2 - reserved);
        Sizes { connections, upstreams, connections_max: connections, reserved }
    }

    /// Options for sockets that connect.
    fn before_connect(&self) -> BeforeConnect {
        let options = self.checked.upstream_sockets.clone();
        BeforeConnect::new(move |socket, address| match address {
            Address::Ip(_) => Ok(options.set_before_connect(&SockRef::from(&socket))?),
            _ => Ok(()),
        })
    }

    /// Makes the rings of all shards once where little memory may be locked, since the trial was
    /// smaller.
    fn try_all(&self, config: &UringConfig) -> Result<(), Error> {
        let enough = |limit| limit >= LOCKED_BYTES * self.checked.shards as u64;
        if ResourceLimit::of(Resource::LockedMemory).is_ok_and(|limit| limit.soft.is_none_or(enough)) {
            return Ok(());
        }
        try_apart(|| {
            let rings: Result<Vec<_>, _> =
                (0..self.checked.shards).map(|_| Uring::new(config, Vec::new())).collect();
            rings.map(drop)
        })
        .map_err(Error::Driver)
    }

    fn epoll(&self, why: &str) -> Result<DriverConfig, SetupError> {
        probe_epoll()?;
        let sizes = self.in_descriptors();
        let (connections, before_connect) = (sizes.slots(), self.before_connect());
        let (peer_addresses, coalesce) = (self.checked.asks_peer_addresses(), self.checked.given.coalesce);
        let config = EpollConfig { connections, pool: self.pool(), peer_addresses, coalesce, before_connect };
        let reason = format!(
            "epoll ({why}); each connection costs a descriptor, so RLIMIT_NOFILE, {}, bounds them",
            self.descriptors
        );
        Ok(DriverConfig { kind: DriverKind::Epoll(config), reason, sizes })
    }
}

impl DriverConfig {
    /// Accepted connections that a shard can hold. Slots of upstreams follow.
    pub(crate) fn connections(&self) -> usize {
        self.sizes.connections
    }

    /// Connections to upstreams that a shard can hold.
    pub(crate) fn upstreams(&self) -> usize {
        self.sizes.upstreams
    }

    /// Accepted connections that all shards hold together.
    pub(crate) fn connections_max(&self) -> usize {
        self.sizes.connections_max
    }

    /// `io_uring` or `epoll`.
    pub(crate) fn name(&self) -> &'static str {
        match self.kind {
            DriverKind::Uring(_) => "io_uring",
            DriverKind::Epoll(_) => "epoll",
        }
    }

    /// For the doctor.
    pub(crate) fn rings(&self) -> Rings {
        match &self.kind {
            DriverKind::Uring(config) if config.plain_descriptors => Rings::Descriptors,
            DriverKind::Uring(_) => Rings::Tables,
            DriverKind::Epoll(_) => Rings::Epoll,
        }
    }

    /// Slots of a shard in addition to those of all its connections.
    pub(crate) fn reserved(&self) -> usize {
        self.sizes.reserved
    }

    /// For the log: which driver, and why.
    pub(crate) fn reason(&self) -> &str {
        &self.reason
    }
}

/// Entries of a ring's file table at most, in Linux since 5.13 (`IORING_MAX_FIXED_FILES`).
const TABLE_MAX: usize = 1 << 20;

/// Slots of a shard at most.
const SLOTS_MAX: usize = ConnId::SLOTS_MAX as usize;

/// Memory a shard's ring locks, rounded up: about 170 KiB were seen.
const LOCKED_BYTES: u64 = 1 << 20;

/// Descriptors a shard needs in addition to its listeners: ring or epoll instance, eventfd,
/// timerfd, sockets on their way to being connections.
pub(crate) const DESCRIPTORS_PER_SHARD: u64 = 32;

#[cfg(test)]
mod tests {
    use ringserve_core::ServerLimits;

    use super::super::given::{ServerConfig, ServiceConfig};
    use super::*;
    use crate::server::listen::addr::Binds;

    fn checked(config: ServerConfig) -> CheckedConfig {
        let binds = Binds::default().ip("127.0.0.1:0");
        let services = vec![ServiceConfig { binds, ..ServiceConfig::default() }];
        ServerConfig { services, ..config }.check(&|_, _| Ok(()), 1).expect("it can be used")
    }

    fn sizes(descriptors: u64, shards: usize, limits: ServerLimits) -> Sizes {
        let (server_limits, shards) = (Some(limits), Some(shards));
        let checked = checked(ServerConfig { server_limits, shards, ..ServerConfig::default() });
        let choice = DriverChoice { checked: &checked, descriptors, left_alone: 0 };
        let (config, sizes) = choice.uring_config(true);
        assert_eq!(config.connections as usize, sizes.connections + sizes.upstreams);
        sizes
    }

    #[test]
    fn a_table_is_no_larger_than_descriptors_and_the_kernel_allow() {
        let unlimited = ServerLimits::default().connections_max(16 << 20);
        let of = |descriptors| sizes(descriptors, 1, unlimited.clone()).slots();
        assert_eq!([of(20_000), of(u64::MAX)], [20_000, 1 << 20]);
    }

    #[test]
    fn upstreams_have_their_part_of_a_table_and_half_at_most() {
        let of = |descriptors, connections_max, upstreams_max| {
            let sizes = sizes(
                descriptors,
                2,
                ServerLimits::default().connections_max(connections_max).upstreams_max(upstreams_max),
            );
            (sizes.connections, sizes.upstreams, sizes.connections_max)
        };
        assert_eq!(of(20_000, 1_000_000, 1024), (18_976, 1024, 37_952));
        assert_eq!(of(20_000, 100, 1024), (100, 1024, 100));
        assert_eq!(of(1000, 1_000_000, 1024), (500, 500, 1000));
        assert_eq!(of(1000, 1_000_000, 0), (1000, 0, 2000));
    }

    #[test]
    fn endpoint_beside_a_server_has_what_connections_leave() {
        let checked = checked(ServerConfig { shards: Some(2), ..ServerConfig::default() });
        let connections = |left_alone| {
            let choice = DriverChoice { checked: &checked, descriptors: 1000, left_alone };
            choice.in_descriptors().connections_max
        };
        assert_eq!((connections(0), connections(64)), (1000 - 2 * 32, 1000 - 2 * 32 - 64));
    }
}
