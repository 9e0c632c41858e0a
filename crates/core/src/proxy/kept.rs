//! Facts from the headers of a lane's connections.

use core::cell::RefCell;
use core::net::SocketAddr;

use super::Tlvs;
use crate::ConnId;
use crate::tables::Chunked;

/// Facts from the PROXY header of a connection, in addition to the client's address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProxyFacts {
    /// The proxy, if the connection is a client's.
    pub via: Option<SocketAddr>,
    /// The address that the client connected to.
    pub destination: Option<SocketAddr>,
}

#[derive(Debug, Default)]
struct Entry {
    /// The connection to which the other fields belong.
    id: Option<ConnId>,
    proxied: ProxyFacts,
    tlvs: Option<Tlvs>,
}

/// By slot: a connection that did not come through a proxy has no entry and no mark. Holds no
/// memory until there is one.
#[derive(Debug, Default)]
pub(crate) struct Headers {
    entries: RefCell<Chunked<Entry>>,
}

impl Headers {
    /// Keeps the facts of a connection's header, in place of its slot's former ones. False if the
    /// system has no memory for them.
    pub(crate) fn keep(&self, id: ConnId, proxied: ProxyFacts, tlvs: Option<Tlvs>) -> bool {
        let mut entries = self.entries.borrow_mut();
        let Some(entry) = entries.entry(id.slot()) else { return false };
        *entry = Entry { id: Some(id), proxied, tlvs };
        true
    }

    pub(crate) fn of(&self, id: ConnId) -> ProxyFacts {
        self.with_entry(id, |entry| entry.proxied).unwrap_or_default()
    }

    pub(crate) fn tlvs_of(&self, id: ConnId) -> Option<Tlvs> {
        self.with_entry(id, |entry| entry.tlvs.clone()).flatten()
    }

    /// Removes the facts of a connection that is gone.
    pub(crate) fn forget(&self, id: ConnId) {
        let mut entries = self.entries.borrow_mut();
        if let Some(entry) = entries.get_mut(id.slot()).filter(|entry| entry.id == Some(id)) {
            *entry = Entry::default();
        }
    }

    fn with_entry<T>(&self, id: ConnId, what: impl FnOnce(&Entry) -> T) -> Option<T> {
        let entries = self.entries.borrow();
        entries.get(id.slot()).filter(|entry| entry.id == Some(id)).map(what)
    }
}
