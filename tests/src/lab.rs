//! A server with a [`Puppet`], and its end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use ringserve::framing::{Framing, LengthPrefix, Raw};
use ringserve::server::Driver;
use ringserve::stats::{AcceptQueueStats, ServerStats};
use ringserve::{CloseReason, Server, ServerHandle};
use ringserve_simkernel::Network;

use crate::{Bounded, Bounds};
use crate::{Client, Net, Puppet, SOON, Shared, Site, eventually, order, watch};

/// The driver and kernel of a server under test.
#[derive(Clone, Copy, Default)]
pub struct On {
    pub driver: Driver,
    pub kernel: Kernel,
}

/// The kernel below the driver.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub enum Kernel {
    /// The kernel of this machine.
    #[default]
    Real,
    /// A kernel in memory, below the bookkeeping of the io_uring driver, on a separate network.
    Simulated,
    /// The same, with rare behaviour of a kernel at times.
    SimulatedWithFaults,
}

impl On {
    /// Creates a server of one shard on a port of the kernel's choice, on this machine.
    pub fn server(self, limits: Bounds) -> Server<Raw> {
        self.server_at("127.0.0.1:0", limits)
    }

    pub fn server_at(self, addr: &str, limits: Bounds) -> Server<Raw> {
        // Limits that follow the control group take a thread whose readings allocate, and tests
        // count allocations of the process.
        let server = Server::bind(addr).shards(1).pin(false).bounded(limits).fit_limits(false);
        server.driver(self.driver)
    }

    /// Creates the same on the network of its kernel.
    pub fn site(self, limits: Bounds) -> Site<Raw> {
        self.site_at("127.0.0.1:0", limits)
    }

    pub fn site_at(self, addr: &str, limits: Bounds) -> Site<Raw> {
        let net = match self.kernel {
            Kernel::Real => Net::Local,
            Kernel::Simulated => Net::Simulated(Network::default()),
            Kernel::SimulatedWithFaults => Net::Simulated(Network::with_faults(SEED)),
        };
        Site::on(self.server_at(addr, limits), net)
    }
}

/// Seed of the faults; arbitrary. Threads make each run different, so it decides little.
const SEED: u64 = 1;

pub struct Lab {
    pub running: ServerHandle,
    pub net: Net,
    pub shared: Arc<Shared>,
}

impl Lab {
    /// Starts a server with frames of a 4-byte length.
    #[track_caller]
    pub fn start(limits: Bounds) -> Lab {
        Lab::on(On::default(), limits)
    }

    #[track_caller]
    pub fn on(on: On, limits: Bounds) -> Lab {
        Lab::of(on.site(limits).framing(LengthPrefix::default()))
    }

    #[track_caller]
    pub fn of<F: Framing + Clone + Send>(site: impl Into<Site<F>>) -> Lab {
        let site = site.into();
        let (shared, net) = (Arc::new(Shared::default()), site.net.clone());
        let for_shards = shared.clone();
        let running = site.start(move |_| Puppet::new(for_shards.clone())).expect("the server starts");
        Lab { running, net, shared }
    }

    /// Starts a server with frames of a 4-byte length, on several shards.
    #[track_caller]
    pub fn on_shards(shards: usize, limits: Bounds) -> Lab {
        Lab::of(On::default().server(limits).shards(shards).framing(LengthPrefix::default()))
    }

    pub fn addr(&self) -> SocketAddr {
        self.running.local_addrs()[0]
    }

    #[track_caller]
    pub fn client(&self) -> Client {
        Client::of(self.net.connect(self.addr()).expect("the server accepts"))
    }

    /// Connects a client whose kernel holds few unread bytes.
    #[track_caller]
    pub fn client_with_small_window(&self) -> Client {
        Client::of(self.net.connect_with_small_window(self.addr()).expect("the server accepts"))
    }

    /// Connects, if the server listens and did not reset the connection meanwhile.
    pub fn client_that_may_fail(&self) -> Option<Client> {
        self.net.connect(self.addr()).ok().map(Client::of)
    }

    pub fn accept_queues(&self) -> Vec<AcceptQueueStats> {
        self.running.accept_queues()
    }

    pub fn stats(&self) -> ServerStats {
        self.running.stats_now()
    }

    /// Waits until exactly `count` connections ended for `reason`.
    #[track_caller]
    pub fn closed_for(&self, reason: CloseReason, count: u64) {
        watch::closed_for(&self.running, reason, count);
    }

    /// Waits until the server holds `connections`.
    #[track_caller]
    pub fn holds(&self, connections: usize) {
        watch::holds(&self.running, connections);
    }

    /// Connects a client to which the test has a handle of that name.
    #[track_caller]
    pub fn reached(&self, name: &str) -> Client {
        let mut client = self.client();
        assert_eq!(client.ask(order::reach(name)), b"reached");
        client
    }

    /// Waits until `calls` reached the doors.
    #[track_caller]
    pub fn at_doors(&self, calls: u64) {
        eventually("calls come to their doors", SOON, || self.shared.doors.came() >= calls);
    }

    /// Waits until `calls` reached the gate.
    #[track_caller]
    pub fn parked(&self, calls: u64) {
        eventually("calls come to the gate", SOON, || self.shared.gate.came() >= calls);
    }

    /// Shuts down and checks that nothing is left.
    #[track_caller]
    pub fn finish(self) -> ServerStats {
        self.running.shutdown();
        self.ended()
    }

    /// Resets existing connections and checks that nothing is left.
    #[track_caller]
    pub fn abort(self) -> ServerStats {
        self.running.abort();
        self.ended()
    }

    /// Waits for the requested end, and checks that nothing is left.
    #[track_caller]
    pub fn ended(self) -> ServerStats {
        let report = watch::ended(self.running);
        let (opened, closed) = (self.shared.opened.load(SeqCst), self.shared.closed.load(SeqCst));
        assert_eq!(opened, closed, "close is called once for each successful open");
        report
    }
}
