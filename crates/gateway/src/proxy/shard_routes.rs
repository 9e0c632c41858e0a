//! The routes as a shard uses them: with its clients of their upstreams.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use ringserve_server::Shard;

use crate::client::exchange::HttpClient;
use crate::table::routes::{RouteIndex, Routes};
use crate::target::HttpUpstream;

/// The routes of a shard, replaced when those of all shards are.
pub(super) struct ShardRoutes {
    routes: Routes,
    current: RefCell<Rc<Snapshot>>,
}

/// The routes of one version, which a request keeps to its end.
pub(super) struct Snapshot {
    version: u64,
    pub(super) table: Arc<RouteIndex>,
    /// Requests of each route that the shard has.
    pub(super) in_flight: Vec<Rc<Cell<usize>>>,
    clients: HashMap<usize, HttpClient>,
}

impl ShardRoutes {
    pub(super) fn new(routes: &Routes, shard: &Shard) -> ShardRoutes {
        let current = Snapshot::new(routes, shard, &HashMap::new());
        ShardRoutes { routes: routes.clone(), current: RefCell::new(Rc::new(current)) }
    }

    pub(super) fn current(&self, shard: &Shard) -> Rc<Snapshot> {
        let current = self.current.borrow().clone();
        if current.version == self.routes.version() {
            return current;
        }
        let new = Rc::new(Snapshot::new(&self.routes, shard, &current.clients));
        let old = self.current.replace(new.clone());
        drop(old);
        new
    }
}

impl Snapshot {
    /// Clients of upstreams that stay are kept, with their connections.
    fn new(routes: &Routes, shard: &Shard, old: &HashMap<usize, HttpClient>) -> Snapshot {
        // The version first: a table that comes between the two is read again.
        let (version, table) = (routes.version(), routes.table());
        let mut clients: HashMap<usize, HttpClient> = HashMap::new();
        for upstream in table.routes().flat_map(|route| route.upstreams()) {
            let key = upstream.key();
            let made = || old.get(&key).cloned().unwrap_or_else(|| HttpClient::new(upstream, shard));
            clients.entry(key).or_insert_with(made);
        }
        let in_flight = (0..table.len()).map(|_| Rc::default()).collect();
        Snapshot { version, table, in_flight, clients }
    }

    pub(super) fn client(&self, upstream: &HttpUpstream) -> Option<&HttpClient> {
        self.clients.get(&upstream.key())
    }
}
