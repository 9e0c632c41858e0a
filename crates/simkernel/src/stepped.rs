//! A network in virtual time: its clock, its clients, the waits of its rings, and manual actions.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use ringserve_core::PeerCredentials;

use crate::faults::Plan;
use crate::{Adversary, ConnectionId, Faults, Network, RingId, Socket, SocketListener};

/// The steps of a network in virtual time. One thread steps everything on it:
///
/// 1. A ring takes a turn while [`wakes_at`](Network::wakes_at) is not after [`now`](Network::now),
///    and a client's task is polled while it is woken, in any order.
/// 2. Once neither is the case, [`set_now`](Network::set_now) jumps to the earliest of the ends of
///    all rings' waits, of [`next_event_at`](Network::next_event_at) and of the scheduler's own
///    timers.
impl Network {
    /// Creates a network in virtual time, which begins at 0, with these faults, drawn by the seed.
    pub fn stepped(seed: u64, faults: Faults) -> Network {
        Network::new(true, Plan::new(faults, seed))
    }

    /// Does the same with an adversary: completions and enters are as hostile as the interface
    /// allows.
    pub fn stepped_against(adversary: Adversary, seed: u64, faults: Faults) -> Network {
        Network::new(true, Plan::against(adversary, faults, seed))
    }

    /// The virtual time, which the kernel interface reports.
    pub fn now(&self) -> Duration {
        self.shared.lock().now()
    }

    /// Sets the virtual time, and delivers everything that is due by then.
    ///
    /// # Panics
    /// If it goes back.
    pub fn set_now(&self, now: Duration) {
        self.shared.note(&[6, now.as_nanos() as u64]);
        self.shared.lock().set_now(now);
    }

    /// The time at which something happens by itself: delayed bytes arrive, or a handshake ends.
    /// `None` while nothing is in flight, or all of it is held.
    pub fn next_event_at(&self) -> Option<Duration> {
        self.shared.lock().next_event_at()
    }

    /// The time at which a ring's driver has to take a turn: [`now`](Network::now) if something is
    /// there for it, it was woken, or its last turn brought something; else the end of the wait
    /// that its last turn asked for. `None` if it waits until something happens, and for a ring
    /// whose driver was dropped. A turn may bring nothing, for example after an interrupted wait.
    pub fn wakes_at(&self, ring: RingId) -> Option<Duration> {
        self.shared.lock().wakes_at(ring.0)
    }

    /// Creates a client's socket on the host `from`, which will connect to `to`.
    pub fn socket(&self, from: IpAddr, to: SocketAddr) -> Socket {
        Socket::connecting(self.shared.clone(), from, to)
    }

    /// Creates a listening socket of a client, for servers that connect; port 0 finds a free one.
    ///
    /// # Errors
    /// `AddrInUse`.
    pub fn socket_listener(&self, addr: SocketAddr) -> io::Result<SocketListener> {
        let (listener, addr) = self.shared.lock().listeners.listen_client(addr)?;
        Ok(SocketListener::new(self.shared.clone(), listener, addr))
    }

    /// The connections of which an end is open, each with its client's address and its server's, in
    /// the order in which they were created.
    pub fn connections(&self) -> Vec<(ConnectionId, SocketAddr, SocketAddr)> {
        let state = self.shared.lock();
        state.connections().map(|(number, (client, server))| (ConnectionId(number), client, server)).collect()
    }

    /// Gives connections from a host these credentials from now on, like those of a Unix socket.
    pub fn set_credentials(&self, host: IpAddr, credentials: PeerCredentials) {
        self.shared.lock().credentials.insert(host, credentials);
    }

    /// Stops arrivals between two hosts: connects wait, and sent bytes stay in flight.
    pub fn partition(&self, a: IpAddr, b: IpAddr) {
        self.shared.note(&[7]);
        self.shared.lock().set_partition(a, b, true);
    }

    /// Ends a partition. Messages in flight arrive.
    pub fn heal(&self, a: IpAddr, b: IpAddr) {
        self.shared.note(&[8]);
        self.shared.lock().set_partition(a, b, false);
    }

    /// Stops arrivals on a connection, in either direction.
    pub fn hold(&self, connection: ConnectionId) {
        self.shared.note(&[9, connection.0.into()]);
        self.shared.lock().set_held(connection.0, true);
    }

    /// Ends a hold. Messages in flight arrive, unless a partition stops them too.
    pub fn release(&self, connection: ConnectionId) {
        self.shared.note(&[10, connection.0.into()]);
        self.shared.lock().set_held(connection.0, false);
    }

    /// Breaks a connection between its ends: both find a reset, after everything that had arrived.
    pub fn reset(&self, connection: ConnectionId) {
        self.shared.note(&[11, connection.0.into()]);
        self.shared.lock().break_off(connection.0);
    }

    /// Closes each connection in transit between rings whose descriptor was dropped, as a kernel
    /// does at once.
    pub fn close_lost(&self) {
        self.shared.lock().close_lost();
    }

    /// Breaks a ring: its next enter and all later ones fail with `errno`, which ends its shard.
    pub fn break_ring(&self, ring: RingId, errno: i32) {
        self.shared.note(&[12, ring.0 as u64, errno as u64]);
        self.shared.lock().break_ring(ring.0, errno);
    }

    /// A running hash of everything reported to rings and clients and of all manual actions, in
    /// order: equal for two runs of the same seed that take the same steps. A run whose hash
    /// differs depends on something else, such as the order of a hash map, a clock or a thread.
    pub fn event_hash(&self) -> u64 {
        self.shared.hash()
    }
}
