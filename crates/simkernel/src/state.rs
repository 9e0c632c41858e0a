//! What all ends of a network share, behind one lock.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ringserve_drivers::Waker;

use crate::connection::{Connection, Side};
use crate::rng::Rng;

/// Bytes a socket holds that its peer did not take, in each direction. Linux begins with about as much and goes up to
/// some MiB; with less, more sends are cut short.
const SOCKET_BYTES: usize = 128 << 10;

/// Connections that wait to be accepted: as Linux by default.
const BACKLOG: usize = 4096;

/// Ports of those who connect, above those of those who listen.
const EPHEMERAL: u16 = 32 << 10;

/// In place of a connection's number, for a socket that has none.
pub(crate) const UNCONNECTED: u32 = u32::MAX;

static RINGS_MADE: AtomicI32 = AtomicI32::new(0);

/// The lock, and what clients wait at.
#[derive(Default)]
pub(crate) struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A server did something that clients may wait for.
    pub(crate) fn tell_clients(&self) {
        self.changed.notify_all();
    }

    /// Waits until a server did something, at most until the deadline.
    pub(crate) fn wait<'a>(
        &self,
        state: MutexGuard<'a, State>,
        deadline: Option<Instant>,
    ) -> MutexGuard<'a, State> {
        let Some(deadline) = deadline else {
            return self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        let left = deadline.saturating_duration_since(Instant::now());
        self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
    }
}

/// A listening socket: one for each shard.
pub(crate) struct Listener {
    addr: SocketAddr,
    shard: usize,
    /// The ring that accepts here; `None` until it is made.
    ring: Option<i32>,
    /// Connections that wait to be accepted.
    pub(crate) backlog: VecDeque<u32>,
    pub(crate) closed: bool,
}

/// See the module.
#[derive(Default)]
pub(crate) struct State {
    listeners: Vec<Listener>,
    /// Rings as others see them: what tells each that something changed.
    rings: HashMap<i32, Waker>,
    connections: HashMap<u32, Connection>,
    /// Accepted connections that have no slot, by descriptor: the ring that holds it, and the connection.
    descriptors: HashMap<i32, (i32, u32)>,
    /// Connections on their way from one ring to another, by the descriptor that stands for each.
    passed: HashMap<RawFd, u32>,
    connections_made: u32,
    ports_listened: u16,
}

impl State {
    /// Listens once for each shard; port 0 finds a free one.
    pub(crate) fn listen(&mut self, mut addr: SocketAddr, shards: usize) -> io::Result<SocketAddr> {
        if addr.port() == 0 {
            self.ports_listened += 1;
            addr.set_port(self.ports_listened);
        }
        if self.listeners.iter().any(|listener| listener.addr == addr && !listener.closed) {
            return Err(io::Error::from_raw_os_error(libc::EADDRINUSE));
        }
        self.listeners.extend((0..shards).map(|shard| Listener {
            addr,
            shard,
            ring: None,
            backlog: VecDeque::new(),
            closed: false,
        }));
        Ok(addr)
    }

    /// A new ring, told by `bell`, and the listeners of its shard, which are its own from now on.
    pub(crate) fn add_ring(&mut self, shard: usize, bell: Waker) -> (i32, Vec<usize>) {
        // As with descriptors of a process, no other network has it too: a message may be meant for a ring there.
        let ring = RINGS_MADE.fetch_add(1, Ordering::Relaxed);
        self.rings.insert(ring, bell);
        let of_shard = |listener: &Listener| listener.shard == shard && listener.ring.is_none();
        let own: Vec<usize> = (0..self.listeners.len()).filter(|n| of_shard(&self.listeners[*n])).collect();
        own.iter().for_each(|n| self.listeners[*n].ring = Some(ring));
        (ring, own)
    }

    pub(crate) fn listener(&mut self, listener: usize) -> &mut Listener {
        &mut self.listeners[listener]
    }

    /// Connects to one of those who listen at `addr`, whose shard chance decides, as with `SO_REUSEPORT`: `uneven` as for
    /// peers that all come through a few addresses, when half of them meet at one shard. `EAGAIN` if too many wait there.
    pub(crate) fn connect(
        &mut self,
        addr: SocketAddr,
        window: Option<usize>,
        uneven: bool,
    ) -> Result<u32, i32> {
        let listens = |listener: &&mut Listener| listener.addr == addr && !listener.closed;
        let listening = self.listeners.iter_mut().filter(listens).count() as u64;
        if listening == 0 {
            return Err(libc::ECONNREFUSED);
        }
        let number = self.connections_made;
        let mut chance = Rng::new(number.into());
        let shard = if uneven && chance.one_in(2) { 0 } else { chance.below(listening) };
        let chosen = self.listeners.iter_mut().filter(listens).nth(shard as usize);
        let Some(listener) = chosen.filter(|listener| listener.backlog.len() < BACKLOG) else {
            return Err(libc::EAGAIN);
        };
        let ip: IpAddr = addr.ip();
        let client = SocketAddr::new(ip, EPHEMERAL + (number % u32::from(EPHEMERAL)) as u16);
        let mut connection = Connection::new(client, addr, SOCKET_BYTES, window.unwrap_or(SOCKET_BYTES));
        listener.backlog.push_back(number);
        let ring = listener.ring;
        connection.rings[Side::Server as usize] = ring;
        self.connections_made += 1;
        self.connections.insert(number, connection);
        if let Some(ring) = ring {
            self.tell(ring);
        }
        Ok(number)
    }

    /// # Panics
    /// If both ends of it are closed.
    pub(crate) fn connection(&mut self, number: u32) -> &mut Connection {
        self.connections.get_mut(&number).expect("a connection is there until both its ends are closed")
    }

    /// Something changed that this ring may want to know.
    pub(crate) fn tell(&self, ring: i32) {
        if let Some(ring) = self.rings.get(&ring) {
            ring.wake();
        }
    }

    /// As [`tell`](State::tell), for the ring that holds an end of a connection.
    pub(crate) fn tell_of(&self, number: u32, side: Side) {
        let ring = |connection: &Connection| connection.rings[side as usize];
        if let Some(ring) = self.connections.get(&number).and_then(ring) {
            self.tell(ring);
        }
    }

    /// Closes one end.
    pub(crate) fn close(&mut self, number: u32, side: Side, abort: bool) {
        if number == UNCONNECTED {
            return;
        }
        self.tell_of(number, side.other());
        let connection = self.connection(number);
        connection.close(side, abort);
        if connection.is_gone() {
            self.connections.remove(&number);
        }
    }

    /// Makes a connection a descriptor of this ring's: the lowest number that is free, so that numbers are used again
    /// at once.
    pub(crate) fn open_descriptor(&mut self, ring: i32, number: u32) -> i32 {
        self.connection(number).rings[Side::Server as usize] = Some(ring);
        self.add_descriptor(ring, number)
    }

    /// A descriptor of a socket that is not connected.
    pub(crate) fn open_socket(&mut self, ring: i32) -> i32 {
        self.add_descriptor(ring, UNCONNECTED)
    }

    fn add_descriptor(&mut self, ring: i32, number: u32) -> i32 {
        let fd = (3..).find(|fd| !self.descriptors.contains_key(fd)).expect("there are 2^31 of them");
        self.descriptors.insert(fd, (ring, number));
        fd
    }

    /// The connection behind an accepted descriptor.
    pub(crate) fn descriptor(&self, fd: i32) -> u32 {
        let (_, number) = self.descriptors.get(&fd).unwrap_or_else(|| panic!("descriptor {fd} is not open"));
        *number
    }

    pub(crate) fn take_descriptor(&mut self, fd: i32) -> u32 {
        let number = self.descriptor(fd);
        self.descriptors.remove(&fd);
        number
    }

    /// A connection leaves its ring, and `stand_in` stands for it.
    pub(crate) fn pass(&mut self, stand_in: RawFd, number: u32) {
        if let Some(lost) = self.passed.insert(stand_in, number) {
            // Its descriptor was closed on the way, or it would not be another's now.
            self.close(lost, Side::Server, false);
        }
    }

    /// Another ring takes what `stand_in` stands for.
    pub(crate) fn take_passed(&mut self, ring: i32, stand_in: RawFd) -> i32 {
        let number = self.passed.remove(&stand_in).expect("it was passed on by a ring of this network");
        self.open_descriptor(ring, number)
    }

    /// Closes a listening socket, with a reset for what waits there.
    pub(crate) fn close_listener(&mut self, listener: usize) {
        self.listeners[listener].closed = true;
        for number in std::mem::take(&mut self.listeners[listener].backlog) {
            self.close(number, Side::Server, true);
        }
    }

    /// Closes what a ring holds but its slots: listeners, with a reset for who waits there, and descriptors.
    pub(crate) fn close_ring(&mut self, ring: i32) {
        self.rings.remove(&ring);
        for index in 0..self.listeners.len() {
            if self.listeners[index].ring == Some(ring) {
                self.close_listener(index);
            }
        }
        let held: Vec<u32> =
            self.descriptors.values().filter(|held| held.0 == ring).map(|held| held.1).collect();
        self.descriptors.retain(|_, held| held.0 != ring);
        held.into_iter().for_each(|number| self.close(number, Side::Server, false));
    }
}
