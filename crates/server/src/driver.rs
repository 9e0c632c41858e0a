//! Which driver a server runs on.

use std::env;
use std::fmt;
use std::str::FromStr;

use ringserve_buf::PoolConfig;
use ringserve_core::Limits;
use ringserve_ring::{EpollConfig, Uring, UringConfig, probe};

use crate::error::Error;

/// The environment variable by which an operator decides where the program leaves it to [`Driver::Auto`].
const VARIABLE: &str = "RINGSERVE_DRIVER";

/// Which driver a server runs on. Services cannot tell them apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Driver {
    /// io_uring where it works, found out by trying, else epoll. The environment variable `RINGSERVE_DRIVER` set to
    /// `io_uring` or `epoll` decides instead.
    #[default]
    Auto,
    /// io_uring, or the server does not start and says why.
    IoUring,
    /// epoll, for hosts that block io_uring. There each connection costs a descriptor, so `RLIMIT_NOFILE` bounds
    /// them.
    Epoll,
}

impl FromStr for Driver {
    type Err = String;

    fn from_str(name: &str) -> Result<Driver, String> {
        match name {
            "auto" => Ok(Driver::Auto),
            "io_uring" => Ok(Driver::IoUring),
            "epoll" => Ok(Driver::Epoll),
            other => Err(format!("{other} is no driver; choose auto, io_uring or epoll")),
        }
    }
}

impl fmt::Display for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Driver::Auto => "auto",
            Driver::IoUring => "io_uring",
            Driver::Epoll => "epoll",
        })
    }
}

/// The driver that was chosen, and how each shard makes its own.
#[derive(Clone)]
pub(crate) struct Chosen {
    pub(crate) kind: ChosenKind,
    reason: String,
    connections_max: usize,
}

#[derive(Clone)]
pub(crate) enum ChosenKind {
    Uring(UringConfig),
    Epoll(EpollConfig),
}

/// What the choice depends on.
pub(crate) struct Wanted<'a> {
    pub(crate) driver: Driver,
    pub(crate) incremental: bool,
    pub(crate) shards: usize,
    /// The soft limit on descriptors.
    pub(crate) descriptors: u64,
    pub(crate) limits: &'a Limits,
}

impl Wanted<'_> {
    pub(crate) fn choose(&self) -> Result<Chosen, Error> {
        match self.driver {
            Driver::IoUring => self.uring("asked for by the program"),
            Driver::Epoll => Ok(self.epoll("asked for by the program")),
            Driver::Auto => match env::var(VARIABLE).as_deref() {
                Err(_) | Ok("" | "auto") => self.uring("it works here").or_else(|error| match error {
                    Error::Driver(why) => Ok(self.epoll(&format!("io_uring cannot be used: {why}"))),
                    other => Err(other),
                }),
                Ok("io_uring") => self.uring("asked for by RINGSERVE_DRIVER"),
                Ok("epoll") => Ok(self.epoll("asked for by RINGSERVE_DRIVER")),
                Ok(other) => Err(Error::NoSuchDriver(other.to_owned())),
            },
        }
    }

    fn pool(&self) -> PoolConfig {
        PoolConfig {
            buffer_bytes: self.limits.receive_buffer_bytes,
            buffers_max: self.limits.receive_buffers_max(),
            poison: false,
        }
    }

    fn uring(&self, why: &str) -> Result<Chosen, Error> {
        let found = probe().map_err(Error::Driver)?;
        let (config, connections_max) = self.uring_config(found.direct_descriptors);
        // It was tried with small queues.
        let queues = format!("queues {}/{}", config.submission_entries, config.completion_entries);
        let found = found.description.split(", ").skip(2).collect::<Vec<_>>().join(", ");
        self.try_all(&config)?;
        let reason = format!("io_uring ({why}); {queues}, {found}");
        Ok(Chosen { kind: ChosenKind::Uring(config), reason, connections_max })
    }

    /// For drivers of the caller's: what a ring would have, whether or not there are rings here.
    pub(crate) fn driven(&self) -> (UringConfig, Chosen) {
        let (config, connections_max) = self.uring_config(true);
        let kind = ChosenKind::Uring(config.clone());
        (config, Chosen { kind, reason: "given by the program".to_owned(), connections_max })
    }

    /// A shard's ring, and how many connections all shards hold together.
    fn uring_config(&self, direct_descriptors: bool) -> (UringConfig, usize) {
        let max = self.limits.connections_max;
        // A table may be as large as the limit, and costs 8 bytes of kernel memory an entry from the start. The kernel
        // spreads connections evenly, so four times a shard's share is room enough.
        let mut connections = max.min(usize::try_from(self.descriptors).unwrap_or(usize::MAX)).min(TABLE_MAX);
        let mut connections_max = max.min(connections.saturating_mul(self.shards));
        if direct_descriptors {
            connections = connections.min(max.div_ceil(self.shards).saturating_mul(4));
        } else {
            connections = self.spare_descriptors();
            connections_max = connections;
        }
        let config = UringConfig {
            connections: connections as u32,
            pool: self.pool(),
            plain_descriptors: !direct_descriptors,
            incremental: self.incremental,
            ..UringConfig::default()
        };
        (config, connections_max)
    }

    /// Where little memory may be locked, makes the rings of all shards once: what was tried was smaller.
    fn try_all(&self, config: &UringConfig) -> Result<(), Error> {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
        if limit.is_none_or(|limit| limit >= LOCKED_BYTES * self.shards as u64) {
            return Ok(());
        }
        let rings: Result<Vec<_>, _> = (0..self.shards).map(|_| Uring::new(config, Vec::new())).collect();
        rings.map(drop).map_err(Error::Driver)
    }

    fn epoll(&self, why: &str) -> Chosen {
        let connections = self.spare_descriptors();
        let config = EpollConfig { connections: connections as u32, pool: self.pool() };
        let reason = format!(
            "epoll ({why}); each connection costs a descriptor, so RLIMIT_NOFILE, {}, bounds them",
            self.descriptors
        );
        Chosen { kind: ChosenKind::Epoll(config), reason, connections_max: connections }
    }

    /// Connections of the process where each costs a descriptor; one shard may come to hold them all.
    fn spare_descriptors(&self) -> usize {
        let own = DESCRIPTORS_PER_SHARD * self.shards as u64;
        let spare = usize::try_from(self.descriptors.saturating_sub(own)).unwrap_or(usize::MAX);
        self.limits.connections_max.min(spare).max(1)
    }
}

impl Chosen {
    /// Connections a shard can hold.
    pub(crate) fn connections(&self) -> usize {
        match &self.kind {
            ChosenKind::Uring(config) => config.connections as usize,
            ChosenKind::Epoll(config) => config.connections as usize,
        }
    }

    /// Connections all shards hold together.
    pub(crate) fn connections_max(&self) -> usize {
        self.connections_max
    }

    /// For the log: which driver, and why.
    pub(crate) fn reason(&self) -> &str {
        &self.reason
    }
}

/// Entries of a ring's file table at most, in Linux since 5.13 (`IORING_MAX_FIXED_FILES`).
const TABLE_MAX: usize = 1 << 20;

/// Memory a shard's ring locks, rounded up: about 170 KiB were seen.
const LOCKED_BYTES: u64 = 1 << 20;

/// Descriptors a shard needs beside its listeners: ring or epoll instance, eventfd, timerfd, sockets on their way
/// to being connections.
pub(crate) const DESCRIPTORS_PER_SHARD: u64 = 32;
