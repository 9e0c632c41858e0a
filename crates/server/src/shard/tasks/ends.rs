//! The progress of the drain of each service of a server, as a shard knows it.
//!
//! ```text
//!   each shard     its part of a service has ended ──▶ a bit of its word, which all shards read
//!   each shard     the bit is set in all words     ──▶ tasks that wait are woken, services that wait drain
//! ```

use std::cell::Cell;
use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use ringserve_base::guard::Panicked;

use super::draining::Moment;
use crate::shard::wakes::flag::{Flag, FlagWait};
use crate::stats::ServiceNames;

/// The services of a shard in the drain of the server.
pub(crate) struct ServiceEnds {
    names: ServiceNames,
    /// For each service, those as bits whose end it waits for.
    after: Box<[u32]>,
    services: Box<[End]>,
    moment: Cell<Moment>,
}

#[derive(Default)]
struct End {
    /// Its connections have their moments.
    leaving: Flag,
    /// No shard has a connection of it.
    over: Flag,
}

impl ServiceEnds {
    /// Of these services; `after` has none where no service waits for another.
    pub(crate) fn new(names: ServiceNames, after: Box<[u32]>) -> ServiceEnds {
        let services = names.lanes().map(|_| End::default()).collect();
        ServiceEnds { names, after, services, moment: Cell::default() }
    }

    /// The number of services.
    pub(crate) fn count(&self) -> usize {
        self.services.len()
    }

    /// Those as bits whose end a service waits for.
    pub(crate) fn after(&self, service: usize) -> u32 {
        self.after.get(service).copied().unwrap_or_default()
    }

    /// The moment at which connections that end by themselves do so, after the order.
    #[cfg(feature = "http")]
    pub(crate) fn moment(&self) -> Moment {
        self.moment.get()
    }

    /// The state of a service's connections: whether they leave.
    pub(crate) fn leaving(&self, service: usize) -> &Flag {
        &self.services[service].leaving
    }

    /// The connections of a service have their moments from now on. Wakes the tasks that waited for
    /// it, of which a waker may panic.
    pub(crate) fn leaves(&self, service: usize, moment: Moment) -> Result<(), Panicked> {
        self.moment.set(moment);
        self.services[service].leaving.begin()
    }

    /// Takes in which services ended on all shards, as bits. Wakes the tasks that waited for it, of
    /// which a waker may panic.
    pub(crate) fn ended(&self, all: u32) -> Result<(), Panicked> {
        let is_new = |(service, end): &(usize, &End)| all >> service & 1 == 1 && !end.over.has_begun();
        let mut woken = Ok(());
        for (_, end) in self.services.iter().enumerate().filter(is_new) {
            woken = woken.and(end.over.begin());
        }
        woken
    }

    pub(crate) fn wait(&self, name: &str) -> Result<ServiceEnded, UnknownService> {
        let service = self.names.lanes().position(|(_, known)| &**known == name);
        let end = service.and_then(|service| self.services.get(service));
        let end = end.ok_or_else(|| UnknownService { name: name.to_owned(), known: self.names.list() })?;
        Ok(ServiceEnded(end.over.wait()))
    }
}

/// Waits until no connection of a service is left. See
/// [`Shard::service_ended`](crate::Shard::service_ended).
#[must_use = "a future does nothing until it is awaited"]
pub struct ServiceEnded(FlagWait);

impl Future for ServiceEnded {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<()> {
        Pin::new(&mut self.0).poll(task)
    }
}

impl fmt::Debug for ServiceEnded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ServiceEnded({})", self.0.is_over())
    }
}

/// The server has no service of this name.
#[derive(Clone, PartialEq, Eq)]
pub struct UnknownService {
    name: String,
    known: String,
}

impl fmt::Display for UnknownService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no service has the name {}; there are {}", self.name, self.known)
    }
}

ringserve_buf::debug_is_display!(UnknownService);

impl Error for UnknownService {}
