//! Checks of each connection before it begins, in the order of the cost.
//!
//! ```text
//!   allow list ▶ networks allowed or denied for a time ▶ deny list ▶ count and rate of the prefix ▶ those of all peers
//! ```

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ringserve_base::lines::{LINES_PER_SECOND, LeftOut};
use ringserve_base::lines::{info, warn};
use ringserve_core::{RefusedBy, Time};
use ringserve_drivers::guarded;

use super::lists::Networks;
use super::rates::{Over, Rate};
use super::table::{Charge, Prefix, Table};
use super::timed::{Timed, Until};
use super::total::Total;
use super::{AdmissionStats, IpList};

/// The conditions of an `Admission` for connections, for all shards.
pub struct Limiter {
    pub(super) deny: Option<IpList>,
    pub(super) allow: Option<IpList>,
    /// `None` if no prefix has a limit.
    pub(super) table: Option<Table>,
    pub(super) v6_bits: u8,
    /// All peers together.
    pub(super) total: Total,
    /// Networks that were denied or allowed for a time.
    pub(super) timed: Timed,
    /// The kernel's filter gets the networks that are denied, too.
    pub(super) filters: bool,
    /// The kernel was given networks that are denied for a time.
    pub(super) has_filtered: AtomicBool,
    /// The limits as they were set last.
    pub(super) set: Mutex<LimitsSet>,
    /// The message to connections that are refused for their number, or for the load.
    pub(super) shed_reply: Option<Arc<[u8]>>,
    pub(super) lines: Lines,
}

impl Limiter {
    /// True for a peer that gets in whatever else holds.
    #[inline]
    pub fn allows(&self, address: IpAddr) -> bool {
        self.allow.as_ref().is_some_and(|allow| allow.contains(address))
    }

    /// The same, also for a time.
    pub fn allows_now(&self, address: IpAddr, now: Time) -> bool {
        self.allows(address) || self.timed_at(address, now).is_some_and(|until| until.allows)
    }

    /// The entry that holds for an address for a time.
    #[inline]
    fn timed_at(&self, address: IpAddr, now: Time) -> Option<Until> {
        if self.timed.has_some() { self.timed.at(address, now) } else { None }
    }

    /// True if there is a rate now, of an address or of all peers.
    pub fn has_rate(&self) -> bool {
        self.total.has_rate() || self.table.as_ref().is_some_and(Table::has_rate)
    }

    /// Asks whether a connection may begin now, which is then counted if there are limits to count
    /// for.
    ///
    /// # Errors
    /// The reason for which it is refused.
    #[inline]
    pub fn let_in(&self, source: Source, now: Time) -> Result<Option<Charge>, RefusedBy> {
        self.let_in_since(source, now, now)
    }

    /// The same for a connection that came between `from` and `now`, while the shard was away.
    ///
    /// # Errors
    /// The reason for which it is refused.
    #[inline]
    pub fn let_in_since(&self, source: Source, from: Time, now: Time) -> Result<Option<Charge>, RefusedBy> {
        let prefix = match source {
            Source::Address(address) => {
                if self.allows(address) {
                    return Ok(None);
                }
                match self.timed_at(address, now) {
                    Some(Until { allows: true, .. }) => return Ok(None),
                    Some(_) => return Err(RefusedBy::DenyList),
                    None => {}
                }
                if self.deny.as_ref().is_some_and(|deny| deny.contains(address)) {
                    return Err(RefusedBy::DenyList);
                }
                Prefix::of_address(address, self.v6_bits)
            }
            Source::User(uid) => Prefix::of_user(uid),
        };
        let (from, now) = (from.as_nanos(), now.as_nanos());
        if self.total.counts() {
            return self.let_in_beside_all(prefix, from, now).map(Some);
        }
        let Some(table) = &self.table else { return Ok(None) };
        table.charge_since(prefix, from, now).map(Some).map_err(RefusedBy::from)
    }

    /// The same where all peers together have limits too. One that these refuse is not charged for.
    fn let_in_beside_all(&self, prefix: Prefix, from: u64, now: u64) -> Result<Charge, RefusedBy> {
        self.total.check(now)?;
        let charge = match &self.table {
            Some(table) => table.charge_since(prefix, from, now)?,
            None => Charge::NOWHERE,
        };
        match self.total.take(from, now) {
            Ok(()) => Ok(charge),
            Err(by) => {
                // Another shard took the last place.
                if let Some(table) = &self.table {
                    table.release(charge, now);
                }
                Err(by)
            }
        }
    }

    /// True if the kernel may drop packets for it. It stays so: its drops stay in the kernel's
    /// count.
    pub(super) fn is_filtered(&self) -> bool {
        self.filters && (self.deny.is_some() || self.has_filtered.load(Ordering::Relaxed))
    }

    /// Takes a connection back that was counted.
    #[inline]
    pub fn release(&self, charge: Charge, now: Time) {
        self.total.release();
        if let Some(table) = &self.table {
            table.release(charge, now.as_nanos());
        }
    }

    /// True if it asks for users at the other ends of Unix sockets.
    pub fn counts(&self) -> bool {
        self.table.is_some() || self.total.counts()
    }

    /// Says that a connection was refused, unless ten lines said so within the second.
    #[cold]
    pub fn report(
        &self,
        shard: usize,
        service: Option<&str>,
        peer: Option<SocketAddr>,
        by: RefusedBy,
        now: Time,
    ) {
        if let Some(left_out) = self.lines.sample(now) {
            let (peer, by) = (peer.map(tracing::field::display), by.name());
            // It does what it is there for, which is no warning.
            info!(shard, service, peer, by, left_out, "connection refused by the server's admission");
        }
    }

    /// Its figures.
    pub fn stats(&self) -> AdmissionStats {
        self.table.as_ref().map(Table::stats).unwrap_or_default()
    }

    /// Reads lists again whose files changed, and says what came of it. True if a list is another
    /// one.
    pub(super) fn refresh(&self) -> bool {
        let mut changed = false;
        for (list, is_deny) in [(&self.deny, true), (&self.allow, false)] {
            let Some(list) = list else { continue };
            let check = |networks: &Networks| if is_deny { networks.check_denied() } else { Ok(()) };
            match list.refresh(false, check) {
                Ok(false) => {}
                Ok(true) => {
                    changed = true;
                    let file = list.path().unwrap_or(std::path::Path::new("")).display();
                    guarded(|| info!(%file, networks = list.len(), "a list of networks was read again"));
                }
                Err(error) => guarded(|| warn!("the old list of networks stays: {error}")),
            }
        }
        changed
    }

    /// True if one of its lists is a file.
    pub(super) fn has_files(&self) -> bool {
        [&self.deny, &self.allow].into_iter().flatten().any(|list| list.path().is_some())
    }
}

impl fmt::Debug for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limiter")
            .field("deny", &self.deny)
            .field("allow", &self.allow)
            .finish_non_exhaustive()
    }
}

/// The limits of a [`Limiter`] as they were set last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LimitsSet {
    pub(super) per_address: Option<u32>,
    pub(super) address_rate: Option<Rate>,
    pub(super) connections_max: Option<u32>,
    pub(super) connection_rate: Option<Rate>,
}

impl From<Over> for RefusedBy {
    fn from(over: Over) -> RefusedBy {
        match over {
            Over::Count => RefusedBy::AddressCount,
            Over::Rate => RefusedBy::AddressRate,
            Over::Memory => RefusedBy::Memory,
        }
    }
}

/// The source of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    Address(IpAddr),
    /// The user at the other end of a Unix socket.
    User(u32),
}

/// Lines of the log that all shards of a server write together: the second, and how many in it.
#[derive(Default)]
pub(super) struct Lines(AtomicU64);

impl Lines {
    /// `Some` if there may be a line: the first one of a second with the number of those that were
    /// left out in the last one that had any.
    pub(super) fn sample(&self, now: Time) -> Option<LeftOut> {
        let second = (now.as_millis() / 1000) << 32;
        let begins = |lines: u64| lines >> 32 << 32 < second;
        let next = |lines: u64| if begins(lines) { second + 1 } else { lines.saturating_add(1) };
        let before = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |lines| Some(next(lines)));
        let before = before.unwrap_or_default();
        let left_out = (before as u32).saturating_sub(LINES_PER_SECOND);
        let is_allowed = next(before) as u32 <= LINES_PER_SECOND;
        is_allowed.then_some((begins(before) && left_out > 0).then_some(left_out))
    }
}
