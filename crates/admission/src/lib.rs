//! Whom a server lets in: limits on addresses, lists of networks, and the rate of new connections.
//!
//! ```text
//!   kernel filter ─▶ accept rate ─▶ deny and allow lists ─▶ count of the prefix ─▶ rate of the prefix ─▶ admit ─▶ connection
//!      no packet        waits        └──────────────── refused, and the token of the rate given back ──────┘
//!
//!   Behind the lists come the count and the rate of the whole service or listener, where it has them.
//! ```
//!
//! [`Admission`] says how a server, or one service, lets peers in:
//!
//! ```no_run
//! use std::time::Duration;
//!
//! # mod ringserve {
//! #     pub use ringserve_admission as admission;
//! # }
//! use ringserve::admission::{Admission, IpList};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let admission = Admission::default()
//!     .per_address(200) // connections at once
//!     .address_rate(50, 200) // a second, and at once after a pause
//!     .accept_rate(20_000, 5000)
//!     .slow_start(Duration::from_secs(10))
//!     .deny(IpList::file("/etc/app/deny.txt")) // read again when it changes
//!     .allow("10.0.0.0/8".parse()?);
//! // It goes to Server::admission, or to that of a service.
//! # let _ = admission;
//! # Ok(())
//! # }
//! ```
//!
//! [`KeyRates`] bound what those send that were let in, by a key that the program names.
//!
//! All of it is off by default, and costs nothing then. [`RefusedBy`] names what refused a
//! connection, in `ConnStats::refused_by`.

#![deny(clippy::disallowed_methods)]
#![deny(clippy::too_many_lines)]

mod control;
mod kernel_filter;
mod key_rates;
mod key_stats;
mod limiter;
mod lists;
#[doc(hidden)]
pub mod proxy_protocol;
mod ranges;
mod rates;
mod shard;
mod sketch;
mod slots;
mod table;
mod timed;
mod total;
mod watch;

use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub use ringserve_core::RefusedBy;
use ringserve_core::Time;

pub use control::{AdmissionChange, AdmissionControl, AdmissionSettings, TimedNetwork};
pub use key_rates::{KeyLimits, KeyRates, RetryAfter, TakesKeys};
pub use key_stats::KeyRatesStats;
use limiter::{Limiter, LimitsSet, Lines, Source};
pub use lists::{IpList, IpListError};
use rates::{PrefixLimits, Rate, ServerRate};
pub use table::AddressKey;
use table::{Charge, TRACKED, Table};
use timed::Timed;
use total::Total;

/// Items for the server. They change without notice.
#[doc(hidden)]
pub mod internals {
    pub use crate::control::{Journal, TIME_MAX};
    pub use crate::kernel_filter::KernelFilters;
    pub use crate::key_rates::sealed::KeyTaker;
    pub use crate::key_stats::UsedKeyRates;
    pub use crate::limiter::Limiter;
    pub use crate::lists::network;
    pub use crate::proxy_protocol::Proxies;
    pub use crate::rates::ServerRate;
    pub use crate::shard::{ChargeGuard, Limiters, ShardAdmission};
    pub use crate::watch::watch;
    pub use crate::{Counted, Door, RESERVED};
}

/// Slots of each shard's connection table for peers of the allow list, in addition to those of all.
#[doc(hidden)]
pub const RESERVED: usize = 64;

/// The range of `tracked_max`.
const TRACKED_RANGE: (usize, usize) = (1024, 64 << 20);

/// The most bytes of `shed_reply`: what the kernel takes at once from a new socket, and a small
/// part of it.
const SHED_REPLY_MAX: usize = 1024;

/// The range of `ipv6_prefix`.
const V6_BITS: (u8, u8) = (32, 64);

/// Whom a server, or one of its services, lets in, and how fast. For `Server::admission` and
/// `Endpoints::admission`. Everything is off by default.
///
/// A *prefix* is what counts as one peer: an address of IPv4, also where IPv6 carries it (NAT64,
/// `64:ff9b::192.0.2.7`); the first 64 bits of one of IPv6
/// ([`ipv6_prefix`](Admission::ipv6_prefix)); and at a Unix socket the user of the process at the
/// other end. All shards count together. [`AddressKey`] is that for [`KeyRates`].
///
/// | setting | what becomes of a connection beyond it |
/// |---|---|
/// | [`deny`](Admission::deny) | its first packet is dropped by the kernel, or it is closed at once |
/// | [`per_address`](Admission::per_address), [`address_rate`](Admission::address_rate) | it is closed at once |
/// | [`connections_max`](Admission::connections_max), [`connection_rate`](Admission::connection_rate) | it is closed at once |
/// | [`accept_rate`](Admission::accept_rate) | it waits, in the kernel's queue as a rule |
/// | [`allow`](Admission::allow) | it gets in whatever the others say |
///
/// Behind a proxy lists, counts and rates of addresses apply to the client, once its header is
/// there; not to the proxy, nor to a connection for which the proxy names no client, as in its
/// health checks. What comes from a source that is not trusted is reset anyway.
///
/// With a count or a rate of addresses a connection costs 16 bytes in addition, and each prefix 32
/// to 48 while it has a connection, or its rate has not recovered:
/// [`tracked_max`](Admission::tracked_max) bounds them.
#[derive(Clone, Debug, Default)]
#[must_use = "it does nothing before a server has it"]
pub struct Admission {
    per_address: Option<u32>,
    address_rate: Option<Rate>,
    accept_rate: Option<Rate>,
    connections_max: Option<u32>,
    connection_rate: Option<Rate>,
    adjustable: bool,
    slow_start: Option<Duration>,
    deny: Option<IpList>,
    allow: Option<IpList>,
    ipv6_prefix: Option<u8>,
    tracked_max: Option<usize>,
    without_kernel_filter: bool,
    shed_reply: Option<Arc<[u8]>>,
}

impl Admission {
    /// Sets how many connections a prefix may have at once, 1 at least. Further ones are closed at
    /// once ([`RefusedBy::AddressCount`]).
    ///
    /// Whole companies, schools and mobile networks are behind one address: 100 to 1000 is prudent
    /// on the open Internet.
    pub fn per_address(self, connections: u32) -> Admission {
        Admission { per_address: Some(connections), ..self }
    }

    /// Sets how many connections a prefix may open in a second, and how many at once after a pause;
    /// each 1 to 1 000 000. In any time of `t` seconds it gets at most `burst + per_second × t`.
    /// Further ones are closed at once ([`RefusedBy::AddressRate`]), and do not count themselves.
    pub fn address_rate(self, per_second: u32, burst: u32) -> Admission {
        Admission { address_rate: Some(Rate { per_second, burst }), ..self }
    }

    /// Sets how many connections all peers together may have at once, 1 at least. Further ones are
    /// closed at once ([`RefusedBy::ConnectionCount`]), where the server's own `connections_max`
    /// lets them wait. For a service or a listener that is not to take all of the server's table.
    pub fn connections_max(self, connections: u32) -> Admission {
        Admission { connections_max: Some(connections), ..self }
    }

    /// Sets how many connections all peers together may open in a second, and how many at once
    /// after a pause; each 1 to 1 000 000. Further ones are closed at once
    /// ([`RefusedBy::ConnectionRate`]), and do not count themselves. For a service or a listener
    /// whose clients are not to hold up those of others; [`accept_rate`](Admission::accept_rate)
    /// lets them wait, and holds for the whole server.
    pub fn connection_rate(self, per_second: u32, burst: u32) -> Admission {
        Admission { connection_rate: Some(Rate { per_second, burst }), ..self }
    }

    /// Lets each of the limits be changed while the server runs, also those that are not set:
    /// `ServerControl::admission` and the admin endpoint. Connections are counted from the start
    /// on, at the cost of limits that are set. Without it limits that are set can be changed, and
    /// networks denied for a time where there is any limit or list.
    pub fn adjustable(self) -> Admission {
        Admission { adjustable: true, ..self }
    }

    /// Sets how many connections the whole server takes in a second, and how many at once after a
    /// pause; each 1 to 1 000 000. Further ones wait: no accept is armed until there is a token, so
    /// they stay in the kernel's queue, and what was on its way then holds a descriptor; with
    /// io_uring that is one connection for each listener of a shard, with epoll up to 24. What is
    /// refused for its address takes no token.
    ///
    /// With io_uring a listener then accepts one connection in a turn of its shard.
    pub fn accept_rate(self, per_second: u32, burst: u32) -> Admission {
        Admission { accept_rate: Some(Rate { per_second, burst }), ..self }
    }

    /// Lets [`accept_rate`](Admission::accept_rate) rise from a tenth to the whole of it in this
    /// time after the start, in a straight line; at most an hour. A restarted server then takes in
    /// the clients of the one before without losing any. The burst is there from the beginning. The
    /// same begins again when a shard's `Load::Full` ends, after which the new connections that had
    /// to wait come at once.
    pub fn slow_start(self, time: Duration) -> Admission {
        Admission { slow_start: Some(time), ..self }
    }

    /// Refuses peers of these networks ([`RefusedBy::DenyList`]).
    ///
    /// At TCP listeners of the server's own the widest of the networks are also given to the kernel
    /// as a filter, up to 4096 instructions: about 2000 networks of IPv4. Those that are [denied
    /// for a time](AdmissionControl::deny) come first. It drops their first packets, so that a
    /// peer's `connect` gets no answer and times out. It needs no privilege. Adopted sockets, Unix
    /// sockets and listeners behind proxies have no filter. See
    /// [`without_kernel_filter`](Admission::without_kernel_filter).
    ///
    /// A list that denies a whole family (`0.0.0.0/0`) is an error, unless it says so twice.
    pub fn deny(self, list: IpList) -> Admission {
        Admission { deny: Some(list), ..self }
    }

    /// Lets peers of these networks in, whatever the other settings say, `Server::admit` excepted:
    /// for those who operate the server. They count nowhere and take no token.
    ///
    /// At a full connection table each shard keeps 64 slots for them, beyond
    /// `connections_max`. To see who is there it then goes on accepting, until 64
    /// others wait, with epoll 24.
    pub fn allow(self, list: IpList) -> Admission {
        Admission { allow: Some(list), ..self }
    }

    /// Sets how many bits of an IPv6 address make a prefix, 32 to 64. Default 64, which is what a
    /// single customer has at least; many have 56.
    pub fn ipv6_prefix(self, bits: u8) -> Admission {
        Admission { ipv6_prefix: Some(bits), ..self }
    }

    /// Sets how many prefixes are tracked exactly, 1024 to 67 108 864. Default 917 504, of at most
    /// 30 MB. New prefixes beyond are counted in cells that several share, 4 MiB in all: such a
    /// prefix is never let in beyond its limits, and may be refused below them. A prefix with
    /// connections is tracked until they ended.
    pub fn tracked_max(self, prefixes: usize) -> Admission {
        Admission { tracked_max: Some(prefixes), ..self }
    }

    /// Leaves the [deny list](Admission::deny), and what is denied for a time, to the server alone:
    /// such peers are connected, and closed at once. A peer that is filtered by the kernel waits
    /// for an answer in vain instead.
    pub fn without_kernel_filter(self) -> Admission {
        Admission { without_kernel_filter: true, ..self }
    }

    /// Sends these bytes, as they are, to a connection that is refused for a count or a rate, of
    /// its address or of all peers together ([`connections_max`](Admission::connections_max),
    /// [`connection_rate`](Admission::connection_rate)), before it is closed: `-ERR max number of
    /// clients reached` and the like, or `http::SHED_REPLY`. 1 to 1024 bytes. They also let the
    /// server refuse new connections in that way ([`RefusedBy::Load`]) instead of letting them wait
    /// in the kernel's queue while a shard is at `Load::Refusing` for a cause that holds: until its
    /// table and memory are 5 % below what led there, and the queue no longer fills. Peers of the
    /// allow list are let in.
    ///
    /// A connection that is refused so has one small send and at most 200 ms to close too. There
    /// are 256 of them on a shard at once, and no more than a sixteenth of its table; 2000 a second
    /// on the server. Beyond that, new connections wait where the load refuses them, and are closed
    /// without a message where a count or a rate does. Nothing is sent below TLS or another
    /// transport, where such a listener refuses none for its load; a listener that speaks WebSocket
    /// sends it before its handshake, as HTTP.
    pub fn shed_reply(self, bytes: impl AsRef<[u8]>) -> Admission {
        Admission { shed_reply: Some(bytes.as_ref().into()), ..self }
    }

    /// Checks all of it, and reads the lists. `None` of the first if nothing is asked of
    /// connections, and of the second without a rate for the server. A `simulated` one is decided
    /// by the seed.
    #[doc(hidden)]
    pub fn check(
        &self,
        of_one_service: bool,
        connections_max: usize,
        (seed, simulated): (u64, bool),
    ) -> Result<(Option<Limiter>, Option<ServerRate>), AdmissionError> {
        let server_rate = ServerRate::check(self.accept_rate, self.slow_start).map_err(AdmissionError)?;
        if of_one_service && server_rate.is_some() {
            return wrong(
                "accept_rate holds for all services together: set it by Server::admission".to_owned(),
            );
        }
        let limits = self.check_limits(server_rate, connections_max)?;
        let v6_bits = self.ipv6_prefix.unwrap_or(V6_BITS.1);
        let tracked_max = self.tracked_max.unwrap_or(TRACKED);
        let by_list = |error: IpListError| AdmissionError(error.to_string());
        if let Some(deny) = &self.deny {
            deny.refresh(true, lists::Networks::check_denied).map_err(by_list)?;
        }
        if let Some(allow) = &self.allow {
            allow.refresh(true, |_| Ok(())).map_err(by_list)?;
        }
        let limits = limits.or(self.adjustable.then_some(PrefixLimits { at_once: u32::MAX, rate: None }));
        let rate = self.connection_rate.map(Rate::gcra);
        let total = Total::new(self.connections_max, rate, self.adjustable);
        if let Some(bytes) = &self.shed_reply
            && !(1..=SHED_REPLY_MAX).contains(&bytes.len())
        {
            let bytes = bytes.len();
            return wrong(format!(
                "shed_reply has {bytes} bytes; it must have 1 to {SHED_REPLY_MAX}, or leave it out"
            ));
        }
        let asks = limits.is_some()
            || total.counts()
            || self.deny.is_some()
            || self.allow.is_some()
            || self.shed_reply.is_some();
        if self.without_kernel_filter && !asks {
            return wrong(
                "without_kernel_filter is set, and nothing else that could refuse a peer; set a deny list, or leave it out"
                    .to_owned(),
            );
        }
        let limiter = asks.then(|| Limiter {
            deny: self.deny.clone(),
            allow: self.allow.clone(),
            table: limits.map(|limits| Table::new(limits, tracked_max, seed, simulated)),
            v6_bits,
            total,
            timed: Timed::default(),
            filters: !self.without_kernel_filter,
            has_filtered: AtomicBool::new(false),
            set: Mutex::new(LimitsSet {
                per_address: self.per_address,
                address_rate: self.address_rate,
                connections_max: self.connections_max,
                connection_rate: self.connection_rate,
            }),
            shed_reply: self.shed_reply.clone(),
            lines: Lines::default(),
        });
        Ok((limiter, server_rate))
    }

    fn check_limits(
        &self,
        server_rate: Option<ServerRate>,
        connections_max: usize,
    ) -> Result<Option<PrefixLimits>, AdmissionError> {
        let rate =
            self.address_rate.map(|rate| rate.check("address_rate")).transpose().map_err(AdmissionError)?;
        check_count("per_address", self.per_address, connections_max)?;
        if let (Some(rate), Some(all)) = (rate, server_rate.map(ServerRate::rate))
            && rate.per_second > all.per_second
        {
            return wrong(format!(
                "address_rate is {} a second, and accept_rate lets {} in of all addresses together, so it would never hold; \
                 lower address_rate, or raise accept_rate",
                rate.per_second, all.per_second
            ));
        }
        self.check_totals(server_rate, connections_max)?;
        let is_tracked = self.per_address.is_some() || rate.is_some() || self.adjustable;
        let (min, max) = V6_BITS;
        match self.ipv6_prefix {
            Some(bits) if !(min..=max).contains(&bits) => {
                return wrong(format!("ipv6_prefix is {bits}; it must be {min} to {max} bits"));
            }
            Some(_) if !is_tracked => return wrong(nothing_to_track("ipv6_prefix")),
            _ => {}
        }
        let (min, max) = TRACKED_RANGE;
        match self.tracked_max {
            Some(prefixes) if !(min..=max).contains(&prefixes) => {
                return wrong(format!("tracked_max is {prefixes}; it must be {min} to {max} prefixes"));
            }
            Some(_) if !is_tracked => return wrong(nothing_to_track("tracked_max")),
            _ => {}
        }
        let limits =
            PrefixLimits { at_once: self.per_address.unwrap_or(u32::MAX), rate: rate.map(Rate::gcra) };
        Ok(is_tracked.then_some(limits))
    }

    /// Checks the limits on all peers together, and those that contradict them.
    fn check_totals(
        &self,
        server_rate: Option<ServerRate>,
        connections_max: usize,
    ) -> Result<(), AdmissionError> {
        check_count("connections_max", self.connections_max, connections_max)?;
        if let (Some(of_one), Some(count)) = (self.per_address, self.connections_max)
            && of_one > count
        {
            return wrong(format!(
                "per_address is {of_one}, and connections_max lets {count} in of all addresses together, so it would never hold; \
                 lower per_address, or raise connections_max"
            ));
        }
        let Some(rate) = self.connection_rate else { return Ok(()) };
        let rate = rate.check("connection_rate").map_err(AdmissionError)?;
        let slower = [
            ("address_rate", self.address_rate, "connection_rate", Some(rate)),
            ("connection_rate", Some(rate), "accept_rate", server_rate.map(ServerRate::rate)),
        ];
        for (name, of_less, of_all, all) in slower {
            if let (Some(less), Some(all)) = (of_less, all)
                && less.per_second > all.per_second
            {
                return wrong(format!(
                    "{name} is {} a second, and {of_all} is {}, so it would never hold; lower {name}, or raise {of_all}",
                    less.per_second, all.per_second
                ));
            }
        }
        Ok(())
    }
}

/// Checks a number of connections against those of the whole server.
fn check_count(setting: &str, count: Option<u32>, connections_max: usize) -> Result<(), AdmissionError> {
    match count {
        Some(0) => wrong(format!("{setting} is 0, which lets no peer in; set 1 at least, or leave it out")),
        Some(count) if count as usize > connections_max => wrong(format!(
            "{setting} is {count}, and the server has {connections_max} connections in all, so it would never hold; \
             lower it, or raise ServerLimits::connections_max"
        )),
        _ => Ok(()),
    }
}

fn nothing_to_track(setting: &str) -> String {
    format!(
        "{setting} is set, and neither per_address nor address_rate is: set one of them, or leave {setting} out"
    )
}

fn wrong<T>(why: String) -> Result<T, AdmissionError> {
    Err(AdmissionError(why))
}

/// The reason why an [`Admission`] cannot be used: a number out of range, settings that contradict
/// each other, or a list that cannot be read. The text names the cause and the fix.
#[derive(Clone, PartialEq, Eq)]
pub struct AdmissionError(String);

impl AdmissionError {
    /// An error that says this.
    #[doc(hidden)]
    pub fn new(why: String) -> AdmissionError {
        AdmissionError(why)
    }
}

impl fmt::Display for AdmissionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

ringserve_buf::debug_is_display!(AdmissionError);

impl std::error::Error for AdmissionError {}

/// Statistics of the limits of a server, all its [`Admission`]s together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AdmissionStats {
    /// Prefixes that are tracked exactly: with a connection, or a rate that has not recovered when
    /// it was looked at last.
    pub prefixes: usize,
    /// Connections that count for their prefix: all but those of allow lists.
    pub connections: usize,
    /// Those of them that are of prefixes for which there was no room: [`Admission::tracked_max`].
    pub sketched: usize,
}

/// The limits alone, without a server, for benchmarks.
#[doc(hidden)]
#[derive(Debug)]
pub struct Door(Limiter);

/// A connection that a [`Door`] let in.
#[doc(hidden)]
#[derive(Debug)]
pub struct Counted(Option<Charge>);

impl Door {
    /// One that asks something of connections.
    ///
    /// # Errors
    /// Those of a start.
    pub fn new(admission: &Admission) -> Result<Door, AdmissionError> {
        let (limiter, _) = admission.check(false, usize::MAX, (0, true))?;
        limiter.map(Door).ok_or(AdmissionError("it asks nothing".to_owned()))
    }

    /// Asks whether a connection may begin.
    ///
    /// # Errors
    /// The reason for which it is refused.
    #[inline]
    pub fn let_in(&self, address: IpAddr, now: Time) -> Result<Counted, RefusedBy> {
        self.0.let_in(Source::Address(address), now).map(Counted)
    }

    /// A connection ended.
    #[inline]
    pub fn ended(&self, Counted(charge): Counted, now: Time) {
        if let Some(charge) = charge {
            self.0.release(charge, now);
        }
    }

    /// Its figures.
    pub fn stats(&self) -> AdmissionStats {
        self.0.stats()
    }
}

#[cfg(test)]
mod tests;
