//! Limits that are changed while the server runs: by the program, and by the admin endpoint.
//!
//! ```text
//!   AdmissionControl ─▶ each limiter it means: checks all of them, then sets them ─▶ journal, one line of the log
//! ```

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ipnet::IpNet;
use ringserve_base::clock::Clock;
use ringserve_base::lines::info;
use ringserve_core::{AcceptRate, Time};
use ringserve_drivers::guarded;

use super::lists::Networks;
use super::rates::Rate;
use super::shard::Limiters;
use super::timed::{Change, TIMED_MAX, Until};
use super::{AdmissionError, IpList, Limiter, LimitsSet, PrefixLimits, wrong};

/// The longest time for which a network is denied or allowed: what is to stay belongs into a list.
pub const TIME_MAX: Duration = Duration::from_secs(30 * 24 * 3600);

/// Changes that are remembered.
const CHANGES_MAX: usize = 32;

/// Changes the limits of a server that runs, from any thread: `ServerControl::admission`. A change
/// holds for connections that come after it; none that is there is closed. It is gone with the
/// process; orders to an admin endpoint can be kept (`Admin::keep_admission`). A control that is
/// kept goes by the time of each call.
///
/// ```
/// use std::time::Duration;
///
/// # mod ringserve {
/// #     pub use ringserve_admission as admission;
/// # }
/// use ringserve::admission::{AdmissionControl, AdmissionError};
///
/// fn under_attack(admission: &AdmissionControl) -> Result<(), AdmissionError> {
///     admission.deny(&"192.0.2.0/24".parse().unwrap(), Duration::from_secs(600))?;
///     admission.set_per_address(Some(20))?;
///     admission.set_address_rate(Some((5, 20)))?;
///     Ok(())
/// }
/// ```
///
/// Limits that were not set at the start can be set where the [`Admission`](super::Admission) is
/// [adjustable](super::Admission::adjustable).
#[derive(Clone)]
pub struct AdmissionControl {
    /// With the number of listeners at which each holds.
    limiters: Vec<(Arc<Limiter>, usize)>,
    /// Of the server.
    listeners: usize,
    of_one_listener: bool,
    rate: Option<Arc<AcceptRate>>,
    journal: Arc<Journal>,
    clock: Clock,
}

impl AdmissionControl {
    #[doc(hidden)]
    pub fn new(
        limiters: &Limiters,
        rate: Option<Arc<AcceptRate>>,
        journal: Arc<Journal>,
        clock: Clock,
    ) -> AdmissionControl {
        AdmissionControl {
            limiters: limiters.each().map(|of| (of.clone(), limiters.listeners_of(of))).collect(),
            listeners: limiters.listeners(),
            of_one_listener: false,
            rate,
            journal,
            clock,
        }
    }

    /// Means the limits of one listener alone, by its place in `ServerControl::listeners`, and
    /// those of others that share them.
    #[doc(hidden)]
    pub fn at(self, limiters: &Limiters, listener: usize) -> AdmissionControl {
        let at = limiters.limiter_at(listener);
        let limiters = at.map(|of| (of.clone(), limiters.listeners_of(of))).into_iter().collect();
        AdmissionControl { limiters, of_one_listener: true, ..self }
    }

    /// Refuses peers of these networks for a time of 1 s to 30 days, in addition to the deny list:
    /// they are closed at once ([`RefusedBy::DenyList`](super::RefusedBy::DenyList)). Within a
    /// second the kernel's filter has them too, where there is one
    /// ([`Admission::deny`](super::Admission::deny)): their `connect` then gets no answer. A
    /// network that is already denied or allowed gets the new time. Peers of the allow list are
    /// still let in. A list that is a [file](IpList::file) is read now, on this thread, and not
    /// again. Returns at how many listeners it holds: those that have an admission.
    ///
    /// # Errors
    /// No listener has an admission, the list is empty, denies a whole family and says so once, or
    /// the time is out of range; there would be more than 10 000 such networks; or the list is a
    /// file that cannot be read. Nothing is changed then.
    pub fn deny(&self, networks: &IpList, time: Duration) -> Result<usize, AdmissionError> {
        let found = networks_of(networks)?;
        found.check_denied().map_err(AdmissionError)?;
        self.set_timed_networks(&[(found, time)], false)
    }

    /// Lets peers of these networks in for a time of 1 s to 30 days, as the allow list does: lists,
    /// counts, rates and the load do not refuse them. Two things are those of the list alone: they
    /// take tokens of [`accept_rate`](super::Admission::accept_rate) as others do, and have no
    /// slots in addition to a full table. What [the kernel filters](super::Admission::deny) gets in
    /// within a second. Returns at how many listeners it holds.
    ///
    /// # Errors
    /// As of [`deny`](AdmissionControl::deny), but for whole families.
    pub fn allow(&self, networks: &IpList, time: Duration) -> Result<usize, AdmissionError> {
        let found = networks_of(networks)?;
        self.set_timed_networks(&[(found, time)], true)
    }

    /// Denies or allows lists of networks, each for its time, as one change. Also whole families:
    /// they were denied before.
    ///
    /// # Errors
    /// As of [`allow`](AdmissionControl::allow), if that would refuse one of them.
    #[doc(hidden)]
    pub fn set_timed(&self, lists: &[(IpList, Duration)], allows: bool) -> Result<usize, AdmissionError> {
        let found = lists.iter().map(|(list, time)| Ok((networks_of(list)?, *time)));
        self.set_timed_networks(&found.collect::<Result<Vec<_>, AdmissionError>>()?, allows)
    }

    fn set_timed_networks(
        &self,
        lists: &[(Arc<Networks>, Duration)],
        allows: bool,
    ) -> Result<usize, AdmissionError> {
        self.check_some()?;
        for (networks, time) in lists {
            if networks.iter().next().is_none() {
                return wrong("there is no network in the list".to_owned());
            }
            if !(Duration::from_secs(1)..=TIME_MAX).contains(time) {
                return wrong(format!(
                    "the time is {time:?}; it must be 1 s to {} days: for longer, write the network into a list",
                    TIME_MAX.as_secs() / 86_400
                ));
            }
        }
        let now = self.clock.now();
        // Each is checked before any is kept. Limiters have one order, so that no two changes wait
        // for each other.
        let mut changes: Vec<_> =
            self.limiters.iter().map(|(limiter, _)| limiter.timed.change(now)).collect();
        for change in &mut changes {
            for (networks, time) in lists {
                change.add(networks, Until { at: now + *time, allows }).map_err(|all| {
                    AdmissionError(format!(
                        "there would be {all} networks for a time; {TIMED_MAX} is the most: use a list"
                    ))
                })?;
            }
        }
        changes.into_iter().for_each(Change::keep);
        let verb = if allows { "allowed" } else { "denied" };
        let count = self.limiters.iter().map(|(_, listeners)| listeners).sum();
        self.note(match lists {
            [(networks, time)] => format!("{} {verb} for {time:?}{}", shown(networks), self.share(count)),
            several => {
                let all: usize = several.iter().map(|(networks, _)| networks.iter().count()).sum();
                format!("{all} networks are {verb}, each for its time{}", self.share(count))
            }
        });
        Ok(count)
    }

    /// Forgets networks that were denied or allowed for a time, each as it was said. Returns how
    /// many of them there were.
    ///
    /// # Errors
    /// No listener has an admission, or a list that is a file cannot be read.
    pub fn forget(&self, networks: &IpList) -> Result<usize, AdmissionError> {
        self.check_some()?;
        let networks = networks_of(networks)?;
        let now = self.clock.now();
        let forgotten = |(limiter, _): &(Arc<Limiter>, usize)| {
            let mut change = limiter.timed.change(now);
            let count = change.remove(&networks);
            change.keep();
            count
        };
        let count = self.limiters.iter().map(forgotten).max().unwrap_or_default();
        if count > 0 {
            self.note(format!("{} is neither denied nor allowed any more", shown(&networks)));
        }
        Ok(count)
    }

    /// Sets how many connections a prefix may have at once:
    /// [`Admission::per_address`](super::Admission::per_address). `None` is no limit. Returns at
    /// how many listeners it holds: those at which it is counted.
    ///
    /// # Errors
    /// 0, or nothing is counted since there was no such limit at the start.
    pub fn set_per_address(&self, connections: Option<u32>) -> Result<usize, AdmissionError> {
        let setting = "per_address";
        self.check_count(setting, connections)?;
        let count =
            self.set_limits(setting, Limiter::counts_prefixes, |set| set.per_address = connections)?;
        self.note(format!("{setting} is {}{}", or_none(connections), self.share(count)));
        Ok(count)
    }

    /// Sets the rate of a prefix and its burst:
    /// [`Admission::address_rate`](super::Admission::address_rate). Each prefix has its whole burst
    /// then. `None` is no limit. Returns at how many listeners it holds.
    ///
    /// # Errors
    /// A number is not 1 to 1 000 000, or nothing is counted since there was no such limit at the
    /// start.
    pub fn set_address_rate(&self, rate: Option<(u32, u32)>) -> Result<usize, AdmissionError> {
        let setting = "address_rate";
        let rate = checked(setting, rate)?;
        let count = self.set_limits(setting, Limiter::counts_prefixes, |set| set.address_rate = rate)?;
        self.note(format!("{setting} is {}{}", or_none(rate), self.share(count)));
        Ok(count)
    }

    /// Sets how many connections all peers together may have:
    /// [`Admission::connections_max`](super::Admission::connections_max). Those that are there
    /// stay. `None` is no limit. Returns at how many listeners it holds.
    ///
    /// # Errors
    /// 0, or nothing is counted since there was no such limit at the start.
    pub fn set_connections_max(&self, connections: Option<u32>) -> Result<usize, AdmissionError> {
        let setting = "connections_max";
        self.check_count(setting, connections)?;
        let count = self.set_limits(setting, Limiter::counts_all, |set| set.connections_max = connections)?;
        self.note(format!("{setting} is {}{}", or_none(connections), self.share(count)));
        Ok(count)
    }

    /// Sets the rate of all peers together:
    /// [`Admission::connection_rate`](super::Admission::connection_rate). `None` is no limit.
    /// Returns at how many listeners it holds.
    ///
    /// # Errors
    /// A number is not 1 to 1 000 000, or nothing is counted since there was no such limit at the
    /// start.
    pub fn set_connection_rate(&self, rate: Option<(u32, u32)>) -> Result<usize, AdmissionError> {
        let setting = "connection_rate";
        let rate = checked(setting, rate)?;
        let count = self.set_limits(setting, Limiter::counts_all, |set| set.connection_rate = rate)?;
        self.note(format!("{setting} is {}{}", or_none(rate), self.share(count)));
        Ok(count)
    }

    /// Sets the rate of the whole server:
    /// [`Admission::accept_rate`](super::Admission::accept_rate). A shard that waits for a token of
    /// the former rate does so to the end: a second at most, or ten while the rate still rises.
    ///
    /// # Errors
    /// A number is not 1 to 1 000 000, the server had no such rate at the start, or the control is
    /// that of one listener.
    pub fn set_accept_rate(&self, per_second: u32, burst: u32) -> Result<(), AdmissionError> {
        if self.of_one_listener {
            return wrong(
                "accept_rate holds for all listeners together: set it without a listener".to_owned(),
            );
        }
        let rate = Rate { per_second, burst }.check("accept_rate").map_err(AdmissionError)?;
        let Some(shared) = &self.rate else {
            return wrong(
                "the server has no accept_rate: it can be changed where Admission::accept_rate was set at the start".to_owned(),
            );
        };
        shared.set(per_second, burst);
        self.note(format!("accept_rate is {rate}"));
        Ok(())
    }

    /// The limits as they are now, of each [`Admission`](super::Admission) that the listeners have,
    /// and the networks that are denied or allowed for a time. The server's
    /// [rate](AdmissionControl::accept_rate) is none of them.
    pub fn settings(&self) -> Vec<AdmissionSettings> {
        let now = self.clock.now();
        let of = |(limiter, _): &(Arc<Limiter>, usize)| {
            let LimitsSet { per_address, address_rate, connections_max, connection_rate } =
                limiter.limits_set();
            let pair = |rate: Option<Rate>| rate.map(|rate| (rate.per_second, rate.burst));
            let timed = |(network, until): (IpNet, Until)| TimedNetwork {
                network: network.to_string(),
                allows: until.allows,
                left: until.at - now,
            };
            AdmissionSettings {
                per_address,
                address_rate: pair(address_rate),
                connections_max,
                connection_rate: pair(connection_rate),
                connections: limiter.total.counts().then(|| limiter.total.live()),
                timed: limiter.timed.list(now).into_iter().map(timed).collect(),
            }
        };
        self.limiters.iter().map(of).collect()
    }

    /// The rate of the whole server as it was set last, and its burst:
    /// [`Admission::accept_rate`](super::Admission::accept_rate). `None` if it has none.
    pub fn accept_rate(&self) -> Option<(u32, u32)> {
        self.rate.as_ref().map(|rate| rate.get())
    }

    /// The last 32 changes, the oldest first.
    pub fn changes(&self) -> Vec<AdmissionChange> {
        self.journal.changes.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    fn check_some(&self) -> Result<(), AdmissionError> {
        match self.limiters.is_empty() {
            true => wrong(
                "the server has no admission that could be changed: start it with Server::admission(Admission::default().adjustable())"
                    .to_owned(),
            ),
            false => Ok(()),
        }
    }

    fn check_count(&self, setting: &str, count: Option<u32>) -> Result<(), AdmissionError> {
        match count {
            Some(0) => wrong(format!("{setting} is 0, which lets no peer in; set 1 at least, or none")),
            _ => Ok(()),
        }
    }

    /// Sets limits where `counts` says that they can hold. Returns at how many listeners that is.
    fn set_limits(
        &self,
        setting: &str,
        counts: impl Fn(&Limiter) -> bool,
        set: impl Fn(&mut LimitsSet),
    ) -> Result<usize, AdmissionError> {
        self.check_some()?;
        let able = || self.limiters.iter().filter(|(limiter, _)| counts(limiter));
        let count = able().map(|(_, listeners)| listeners).sum();
        if count == 0 {
            return wrong(format!(
                "{setting} cannot be changed: nothing is counted for it; set it at the start, or make the admission \
                 Admission::adjustable"
            ));
        }
        able().for_each(|(limiter, _)| limiter.set_limits(&set));
        Ok(count)
    }

    /// ` at 1 of 2 listeners`, and nothing where those are all.
    pub fn share(&self, listeners: usize) -> String {
        match self.listeners {
            all if all == listeners => String::new(),
            all => format!(" at {listeners} of {all} listeners"),
        }
    }

    fn note(&self, what: String) {
        guarded(|| info!("the admission was changed: {what}"));
        let mut changes = self.journal.changes.lock().unwrap_or_else(PoisonError::into_inner);
        if changes.len() == CHANGES_MAX {
            changes.pop_front();
        }
        changes.push_back(AdmissionChange { at: self.clock.now(), what });
    }
}

impl fmt::Debug for AdmissionControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdmissionControl").field("limiters", &self.limiters).finish_non_exhaustive()
    }
}

impl Limiter {
    fn counts_prefixes(&self) -> bool {
        self.table.is_some()
    }

    fn counts_all(&self) -> bool {
        self.total.counts()
    }

    fn limits_set(&self) -> LimitsSet {
        *self.set.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes limits, and has shards count by them.
    fn set_limits(&self, change: impl Fn(&mut LimitsSet)) {
        let mut set = self.set.lock().unwrap_or_else(PoisonError::into_inner);
        let before = *set;
        change(&mut set);
        let LimitsSet { per_address, address_rate, connections_max, connection_rate } = *set;
        if (per_address, address_rate) != (before.per_address, before.address_rate)
            && let Some(table) = &self.table
        {
            let at_once = per_address.unwrap_or(u32::MAX);
            table.set_limits(PrefixLimits { at_once, rate: address_rate.map(Rate::gcra) });
        }
        self.total.set_at_once(connections_max);
        if connection_rate != before.connection_rate {
            self.total.set_rate(connection_rate.map(Rate::gcra));
        }
    }
}

/// Changes that were made while the server runs.
#[derive(Debug, Default)]
pub struct Journal {
    changes: Mutex<VecDeque<AdmissionChange>>,
}

/// A change of the limits of a server that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AdmissionChange {
    /// When it was made, on the clock of the shards.
    pub at: Time,
    /// The setting that was changed, and its new value.
    pub what: String,
}

/// The limits of one [`Admission`](super::Admission) as they are now. Rates have connections in a
/// second, and the burst.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AdmissionSettings {
    /// Connections of a prefix at once.
    pub per_address: Option<u32>,
    /// The rate of a prefix.
    pub address_rate: Option<(u32, u32)>,
    /// Connections of all peers at once.
    pub connections_max: Option<u32>,
    /// The rate of all peers.
    pub connection_rate: Option<(u32, u32)>,
    /// Connections that count for all peers together, where they are counted: all but those of
    /// allowed networks.
    pub connections: Option<u32>,
    /// Networks that are denied or allowed for a time.
    pub timed: Vec<TimedNetwork>,
}

/// A network that is denied or allowed for a time.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TimedNetwork {
    /// The network, such as `192.0.2.0/24`.
    pub network: String,
    /// True if its peers get in, and false if they do not.
    pub allows: bool,
    /// The time for which that still holds.
    pub left: Duration,
}

/// # Errors
/// The list is a file that cannot be read.
fn networks_of(list: &IpList) -> Result<Arc<Networks>, AdmissionError> {
    list.read_networks().map_err(|error| AdmissionError(error.to_string()))
}

fn checked(setting: &str, rate: Option<(u32, u32)>) -> Result<Option<Rate>, AdmissionError> {
    let check = |(per_second, burst)| Rate { per_second, burst }.check(setting);
    rate.map(check).transpose().map_err(AdmissionError)
}

fn or_none(value: Option<impl fmt::Display>) -> String {
    value.map_or_else(|| "off".to_owned(), |value| value.to_string())
}

/// The first networks of a list.
fn shown(networks: &Networks) -> String {
    let first: Vec<String> = networks.iter().take(3).map(|network| network.to_string()).collect();
    match networks.iter().count() - first.len() {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}
