//! State that all ends of a network share: listeners, connections, rings, descriptors, time.

mod delivery;
mod listeners;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{self, PipeReader};
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use ringserve_core::PeerCredentials;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::alarm::Alarm;
use crate::connection::{Agenda, Connection, Direction, File, Side};
use crate::faults::{Injector, Plan};
use crate::ring::Descriptors;
use crate::rng::Rng;

use listeners::Listeners;

/// Bytes that a socket holds which its peer has not received, in each direction. Linux begins with
/// about as many and goes up to some MiB; with fewer, more sends are cut short.
const SOCKET_BYTES: usize = 128 << 10;

/// Ports of connecting sockets, above those of listening ones.
const EPHEMERAL: u16 = 32 << 10;

/// The connection's number of a socket that has no connection.
pub(crate) const UNCONNECTED: u32 = u32::MAX;

/// A time that never comes.
pub(crate) const NEVER: Duration = Duration::MAX;

/// Salts of fault draws, in addition to the numbers of rings: each connection's, and the
/// handshakes'.
const CONNECTIONS_DRAW: u64 = 1 << 32;
const HANDSHAKES_DRAW: u64 = 1 << 48;

/// A ring as the other ends see it.
struct Ring {
    /// Raised when something changes in the network.
    bell: Alarm,
    /// The connections on which it was, if it was on one of the ring's.
    news: Vec<File>,
    /// The address from which it connects.
    from: IpAddr,
    sleep: Sleep,
    /// The error of its next enter; 0 for none.
    broken: i32,
}

/// The wait of a ring in virtual time, after its last enter.
#[derive(Clone, Default)]
pub(crate) struct Sleep {
    /// The end of the wait; `None` for a ring that does not wait.
    pub(crate) until: Option<Option<Duration>>,
    /// The flag that a remote wake raises, if it ends the wait.
    pub(crate) alarm: Option<Alarm>,
}

/// A connection in transit from one ring to another.
struct PassedConn {
    number: u32,
    /// Ends when the descriptor that represents the connection is closed.
    stand_in: PipeReader,
}

/// Connections by number, counted from 0 and never used twice. Each operation on one looks it up.
#[derive(Default)]
struct Connections {
    /// From `first` on; closed ones are `None`.
    all: VecDeque<Option<Connection>>,
    first: u32,
}

impl Connections {
    /// Adds a connection under the next number.
    fn push(&mut self, connection: Connection) {
        self.all.push_back(Some(connection));
    }

    fn get_mut(&mut self, number: u32) -> Option<&mut Connection> {
        self.all.get_mut(number.checked_sub(self.first)? as usize)?.as_mut()
    }

    fn remove(&mut self, number: u32) {
        if let Some(place) = self.all.get_mut((number - self.first) as usize) {
            *place = None;
        }
        while let Some(None) = self.all.front() {
            self.all.pop_front();
            self.first += 1;
        }
    }

    fn iter(&self) -> impl Iterator<Item = (u32, &Connection)> {
        (self.first..).zip(&self.all).filter_map(|(number, connection)| Some((number, connection.as_ref()?)))
    }
}

/// Listeners, connections, rings and descriptors of a network, and its time.
pub(crate) struct State {
    plan: Arc<Plan>,
    pub(crate) listeners: Listeners,
    rings: BTreeMap<i32, Ring>,
    connections: Connections,
    /// Accepted connections that have no slot: the ring that holds each, and the connection.
    descriptors: Descriptors<(i32, u32)>,
    /// Connections in transit, by the descriptor that represents each.
    passed: BTreeMap<RawFd, PassedConn>,
    rings_made: i32,
    connections_made: u32,
    /// Rings whose connect waits for a place in a backlog, or for the end of a partition.
    connecting: BTreeSet<i32>,
    /// Clients that connect, by the time of their next attempt.
    clients_connecting: BTreeMap<Duration, Vec<Waker>>,
    agenda: Agenda,
    stepped: bool,
    /// Virtual time.
    now: Duration,
    handshakes: Injector,
    /// Pairs of hosts between which nothing arrives, the lower address first.
    partitions: BTreeSet<(IpAddr, IpAddr)>,
    /// The processes on hosts, as credentials of Unix sockets.
    pub(crate) credentials: BTreeMap<IpAddr, PeerCredentials>,
    /// Connections held manually.
    held: BTreeSet<u32>,
    /// Wakers to be called when the lock is free.
    pub(crate) wakes: Vec<Waker>,
    /// The remains of rings that ended.
    pub(crate) left: Vec<String>,
}

impl State {
    pub(crate) fn new(stepped: bool, plan: Arc<Plan>) -> State {
        State {
            handshakes: Injector::new(plan.clone(), HANDSHAKES_DRAW),
            plan,
            listeners: Listeners::default(),
            rings: BTreeMap::new(),
            connections: Connections::default(),
            descriptors: Descriptors::default(),
            passed: BTreeMap::new(),
            rings_made: 0,
            connections_made: 0,
            connecting: BTreeSet::new(),
            clients_connecting: BTreeMap::new(),
            agenda: Agenda::default(),
            stepped,
            now: Duration::ZERO,
            partitions: BTreeSet::new(),
            credentials: BTreeMap::new(),
            held: BTreeSet::new(),
            wakes: Vec::new(),
            left: Vec::new(),
        }
    }

    /// Listens once for each shard; port 0 finds a free one. A server that cannot listen at one of
    /// its addresses does not start, and those at which it listened before are released.
    pub(crate) fn listen(&mut self, addr: SocketAddr, shards: usize) -> io::Result<SocketAddr> {
        self.listeners.listen(addr, shards).inspect_err(|_| self.close_unclaimed())
    }

    /// Adopts a listener for each shard, and creates it if it is not there. Fails like
    /// [`listen`](State::listen).
    pub(crate) fn adopt(&mut self, addr: SocketAddr, shards: usize) -> io::Result<()> {
        self.listeners.adopt(addr, shards).inspect_err(|_| self.close_unclaimed())
    }

    /// Closes the listeners of shards whose rings are not created, and never will be.
    fn close_unclaimed(&mut self) {
        for listener in self.listeners.unclaimed() {
            self.close_listener(listener);
        }
    }

    /// Adds a ring, which `bell` notifies, and returns the listeners of its shard, which belong to
    /// it from now on.
    pub(crate) fn add_ring(&mut self, shard: usize, bell: Alarm) -> (i32, Vec<usize>) {
        let ring = self.rings_made;
        self.rings_made += 1;
        let own = self.listeners.claim(shard, ring);
        let from = own.first().map_or(IpAddr::from([127, 0, 0, 1]), |n| self.listeners.host(*n));
        self.rings.insert(ring, Ring { bell, news: Vec::new(), from, sleep: Sleep::default(), broken: 0 });
        (ring, own)
    }

    /// Takes a connection out of a listener's queue, and notifies those who wait for the place.
    pub(crate) fn take_queued(&mut self, listener: usize) -> Option<u32> {
        let number = self.listeners.take_queued(listener)?;
        self.retry_connects();
        Some(number)
    }

    /// Wakes those that wait to connect.
    fn retry_connects(&mut self) {
        for ring in mem::take(&mut self.connecting) {
            self.notify(ring);
        }
        self.wakes.extend(mem::take(&mut self.clients_connecting).into_values().flatten());
    }

    /// Does [`connect`](State::connect), for a ring, which is notified when to try again.
    pub(crate) fn connect_ring(&mut self, ring: i32, addr: SocketAddr) -> Result<u32, i32> {
        let from = self.rings[&ring].from;
        let from = if self.stepped { from } else { addr.ip() };
        let connected = self.connect(from, addr, None, false);
        match connected {
            Ok(number) => self.connection(number).rings[Side::Client as usize] = Some(ring),
            Err(libc::EAGAIN) => drop(self.connecting.insert(ring)),
            Err(_) => {}
        }
        connected
    }

    /// Makes a client retry a connect, at this time or when something changes: [`NEVER`] for the
    /// latter alone.
    pub(crate) fn connect_later(&mut self, at: Duration, waker: &Waker) {
        let wakers = self.clients_connecting.entry(at).or_default();
        if !wakers.iter().any(|old| old.will_wake(waker)) {
            wakers.push(waker.clone());
        }
    }

    /// Duration of a handshake.
    pub(crate) fn handshake(&mut self) -> Duration {
        self.handshakes.latency()
    }

    /// Connects to one of the listeners at `addr`, whose shard is drawn, as with `SO_REUSEPORT`:
    /// `uneven` as for peers that all come through a few addresses, when half of them reach one
    /// shard. `EAGAIN` if too many wait there, or nothing arrives there.
    pub(crate) fn connect(
        &mut self,
        from: IpAddr,
        addr: SocketAddr,
        window: Option<usize>,
        uneven: bool,
    ) -> Result<u32, i32> {
        if self.is_parted(from, addr.ip()) {
            return Err(libc::EAGAIN);
        }
        let listening = self.listeners.at(addr).count() as u64;
        if listening == 0 {
            return Err(libc::ECONNREFUSED);
        }
        let number = self.connections_made;
        let mut chance = Rng::new(self.plan.seed.wrapping_add(number.into()));
        let shard = if uneven && chance.one_in(2) { 0 } else { chance.below(listening) };
        let chosen = self.listeners.at(addr).nth(shard as usize);
        let Some(listener) = chosen.filter(|listener| listener.has_room()) else {
            return Err(libc::EAGAIN);
        };
        let client = SocketAddr::new(from, EPHEMERAL + (number % u32::from(EPHEMERAL)) as u16);
        let mut connection = Connection::new(client, addr, SOCKET_BYTES, window.unwrap_or(SOCKET_BYTES));
        if self.stepped {
            let draws = Injector::new(self.plan.clone(), CONNECTIONS_DRAW + u64::from(number));
            connection = connection.paced(number, self.agenda.clone(), draws);
        }
        let (owner, woken) = (listener.ring(), listener.queue(number));
        self.wakes.extend(listener.waker.take());
        self.connections_made += 1;
        connection.rings[Side::Server as usize] = owner;
        for ring in owner.into_iter().chain(woken) {
            self.notify(ring);
        }
        self.connections.push(connection);
        Ok(number)
    }

    /// # Panics
    /// If both ends of it are closed.
    pub(crate) fn connection(&mut self, number: u32) -> &mut Connection {
        let connection = self.connections.get_mut(number);
        let connection = connection.expect("a connection is there until both its ends are closed");
        connection.set_now(self.now);
        connection
    }

    /// Notifies a ring of a change.
    pub(crate) fn notify(&self, ring: i32) {
        if let Some(ring) = self.rings.get(&ring) {
            ring.bell.raise();
        }
    }

    /// Does [`notify`](State::notify) for the ring or the client that holds an end of a connection.
    /// Returns the ring.
    pub(crate) fn notify_end(&mut self, number: u32, side: Side) -> Option<i32> {
        let connection = self.connections.get_mut(number)?;
        let holder = connection.rings[side as usize];
        match holder.and_then(|ring| self.rings.get_mut(&ring)) {
            Some(ring) => {
                ring.news.push(File { connection: number, side });
                ring.bell.raise();
            }
            None => self.wakes.extend(connection.take_wakers(side)),
        }
        holder
    }

    /// Notifies the other end, if this one changed something. Returns its ring.
    pub(crate) fn notify_of_change(&mut self, file: File) -> Option<i32> {
        let changed = self.connections.get_mut(file.connection)?.take_changed(file.side);
        if changed { self.notify_end(file.connection, file.side.other()) } else { None }
    }

    /// Takes the ends of this ring at which something changed.
    pub(crate) fn take_news(&mut self, ring: i32) -> Vec<File> {
        self.rings.get_mut(&ring).map_or_else(Vec::new, |ring| mem::take(&mut ring.news))
    }

    /// Sets the waker of a client's task for changes at its end of a connection.
    pub(crate) fn wait(&mut self, number: u32, side: Side, direction: Direction, waker: &Waker) {
        self.connection(number).wait(side, direction, waker);
    }

    /// Closes one end.
    pub(crate) fn close(&mut self, number: u32, side: Side, abort: bool) {
        if number == UNCONNECTED {
            return;
        }
        self.notify_end(number, side.other());
        let connection = self.connection(number);
        connection.close(side, abort);
        if connection.is_gone() {
            self.connections.remove(number);
            self.held.remove(&number);
        }
    }

    /// Makes a connection a descriptor of this ring.
    pub(crate) fn open_descriptor(&mut self, ring: i32, number: u32) -> i32 {
        self.connection(number).rings[Side::Server as usize] = Some(ring);
        self.descriptors.open((ring, number))
    }

    /// Opens a descriptor of a socket that is not connected.
    pub(crate) fn open_socket(&mut self, ring: i32) -> i32 {
        self.descriptors.open((ring, UNCONNECTED))
    }

    /// The connection of an accepted descriptor.
    pub(crate) fn descriptor(&self, fd: i32) -> u32 {
        self.descriptors.get(fd).1
    }

    pub(crate) fn take_descriptor(&mut self, fd: i32) -> u32 {
        self.descriptors.take(fd).1
    }

    /// Takes a connection from its ring; `stand_in` represents it.
    pub(crate) fn pass(&mut self, descriptor: RawFd, stand_in: PipeReader, number: u32) {
        self.close_lost();
        self.passed.insert(descriptor, PassedConn { number, stand_in });
    }

    /// Closes connections in transit whose descriptor was closed.
    pub(crate) fn close_lost(&mut self) {
        if self.passed.is_empty() {
            return;
        }
        let is_lost = |passed: &PassedConn| {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            let mut ended = [PollFd::new(&passed.stand_in, PollFlags::empty())];
            poll(&mut ended, Some(&now)).is_ok_and(|ended| ended > 0)
        };
        let lost: Vec<RawFd> =
            self.passed.iter().filter(|(_, passed)| is_lost(passed)).map(|(fd, _)| *fd).collect();
        for fd in lost {
            if let Some(passed) = self.passed.remove(&fd) {
                self.close(passed.number, Side::Server, false);
            }
        }
    }

    /// Gives another ring the connection that `stand_in` represents.
    pub(crate) fn take_passed(&mut self, ring: i32, stand_in: RawFd) -> i32 {
        let passed = self.passed.remove(&stand_in).expect("it was passed on by a ring of this network");
        self.open_descriptor(ring, passed.number)
    }

    /// Closes a listening socket, with a reset for queued connections. The queue of an adopted one
    /// stays.
    pub(crate) fn close_listener(&mut self, listener: usize) {
        let Some(queued) = self.listeners.close(listener) else { return };
        self.retry_connects();
        for number in queued {
            self.close(number, Side::Server, true);
        }
    }

    /// Closes all that a ring holds except its slots: listeners, with a reset for queued
    /// connections, and descriptors.
    pub(crate) fn close_ring(&mut self, ring: i32) {
        self.rings.remove(&ring);
        for listener in self.listeners.of_ring(ring) {
            self.close_listener(listener);
        }
        for (_, number) in self.descriptors.take_if(|held| held.0 == ring) {
            self.close(number, Side::Server, false);
        }
    }

    /// Stores the wait of a ring.
    pub(crate) fn set_sleep(&mut self, ring: i32, sleep: Sleep) {
        if let Some(ring) = self.rings.get_mut(&ring) {
            ring.sleep = sleep;
        }
    }

    /// The time at which a ring has something to do: now, a later time, or `None` while nothing
    /// happens.
    pub(crate) fn wakes_at(&self, ring: i32) -> Option<Duration> {
        let ring = self.rings.get(&ring)?;
        let raised = ring.bell.is_raised() || ring.sleep.alarm.as_ref().is_some_and(Alarm::is_raised);
        match ring.sleep.until {
            Some(until) if !raised && ring.broken == 0 => until.map(|until| until.max(self.now)),
            _ => Some(self.now),
        }
    }

    pub(crate) fn break_ring(&mut self, ring: i32, errno: i32) {
        if let Some(ring) = self.rings.get_mut(&ring) {
            ring.broken = errno;
        }
    }

    /// The error of this ring's enter; 0 for none.
    pub(crate) fn broken(&self, ring: i32) -> i32 {
        self.rings.get(&ring).map_or(0, |ring| ring.broken)
    }

    pub(crate) fn now(&self) -> Duration {
        self.now
    }

    /// Each connection, with its client's address and its server's.
    pub(crate) fn connections(&self) -> impl Iterator<Item = (u32, (SocketAddr, SocketAddr))> {
        self.connections.iter().map(|(number, connection)| (number, connection.addrs()))
    }

    /// Everything that is open.
    pub(crate) fn open(&self) -> Vec<String> {
        let mut open = self.left.clone();
        open.extend(self.rings.keys().map(|ring| format!("ring {ring} is there")));
        // Listeners that the network holds, and connections that wait there, are for a later
        // server.
        open.extend(self.listeners.open().map(|addr| format!("a listener at {addr} is open")));
        open.extend(
            self.passed
                .values()
                .map(|passed| format!("connection {} was passed on and is held by no ring", passed.number)),
        );
        for (number, connection) in self.connections.iter() {
            let (client, server) = connection.addrs();
            for (side, name) in [(Side::Client, "client's"), (Side::Server, "server's")] {
                let is_held = side == Side::Server && self.listeners.holds(number);
                if !connection.is_closed(side) && !is_held {
                    let end = format!("the {name} end of connection {number}");
                    open.push(format!("{end}, from {client} to {server}, is open"));
                }
            }
        }
        open
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faults::{Fault, Faults};

    #[test]
    fn failed_adoption_frees_what_was_listened_at_before() {
        let mut state = State::new(true, Arc::new(Plan::new(Faults::none(), 1)));
        let (first, taken) = (([10, 0, 0, 1], 7000).into(), ([10, 0, 0, 1], 7001).into());
        state.listeners.listen_client(taken).unwrap();
        for _ in 0..2 {
            state.listen(first, 2).expect("the address is free");
            assert_eq!(state.adopt(taken, 2).unwrap_err().raw_os_error(), Some(libc::EADDRINUSE));
        }
        assert!(state.listeners.are_clients());
    }

    #[test]
    fn quiet_connections_are_not_on_the_agenda() {
        let plan = Plan::new(Faults::none().with(Fault::Latency, 1), 1);
        let mut state = State::new(true, Arc::new(plan));
        let addr = state.listen(([10, 0, 0, 1], 7000).into(), 1).unwrap();
        for _ in 0..1000 {
            state.connect([10, 0, 0, 2].into(), addr, None, false).unwrap();
        }
        assert_eq!(state.next_event_at(), None);
        for number in [7, 500, 7] {
            state.connection(number).write(Side::Client, b"hello").unwrap();
        }
        assert!(state.agenda.lock().len() <= 3, "each write is on it at most once");
        while let Some(at) = state.next_event_at() {
            assert!(at > state.now());
            state.set_now(at);
        }
        assert_eq!([7, 500].map(|number| state.connection(number).unread(Side::Server)), [10, 5]);
        assert!(state.agenda.lock().is_empty());
    }
}
