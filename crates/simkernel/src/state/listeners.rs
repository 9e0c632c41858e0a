//! The listening sockets of a network: their owners, their queues, and the rings that wait at a
//! shared queue.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::task::Waker;

/// Connections that wait to be accepted: the default of Linux.
const BACKLOG: usize = 4096;

/// The acceptor at a listening socket.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// A shard whose ring is not created.
    Shard(usize),
    Ring(i32),
    Client,
    /// The network, like a service manager: rings adopt it.
    Network,
}

/// The rings that wait at a queue which they share. For each connection one is woken, in the order
/// in which they came, and a ring reads the queue only then.
#[derive(Default)]
struct RingQueue {
    rings: VecDeque<i32>,
    /// The waiters that may read the queue.
    woken: BTreeSet<i32>,
}

/// A listening socket: one for each shard.
pub(crate) struct Listener {
    addr: SocketAddr,
    owner: Owner,
    /// The listener whose queue it shares.
    adopts: Option<usize>,
    waiting: RingQueue,
    /// Connections that wait to be accepted.
    backlog: VecDeque<u32>,
    pub(crate) closed: bool,
    /// The waker of a client that waits to accept.
    pub(crate) waker: Option<Waker>,
}

impl Listener {
    fn new(addr: SocketAddr, owner: Owner, adopts: Option<usize>) -> Listener {
        let (waiting, backlog) = (RingQueue::default(), VecDeque::new());
        Listener { addr, owner, adopts, waiting, backlog, closed: false, waker: None }
    }

    pub(super) fn has_room(&self) -> bool {
        self.backlog.len() < BACKLOG
    }

    /// The ring that alone accepts here.
    pub(super) fn ring(&self) -> Option<i32> {
        if let Owner::Ring(ring) = self.owner { Some(ring) } else { None }
    }

    /// Puts a connection into the queue. Returns the ring that is woken, of those that share the
    /// queue.
    pub(super) fn queue(&mut self, number: u32) -> Option<i32> {
        self.backlog.push_back(number);
        let woken = self.waiting.rings.pop_front();
        self.waiting.woken.extend(woken);
        woken
    }
}

/// Listeners by number, which is never used twice.
#[derive(Default)]
pub(crate) struct Listeners {
    all: Vec<Listener>,
    ports_listened: u16,
}

impl Listeners {
    /// Listens once for each shard; port 0 finds a free one.
    pub(super) fn listen(&mut self, addr: SocketAddr, shards: usize) -> io::Result<SocketAddr> {
        self.listen_as(addr, (0..shards).map(Owner::Shard))
    }

    /// Listens for a client; returns the listener's number and its address.
    pub(crate) fn listen_client(&mut self, addr: SocketAddr) -> io::Result<(usize, SocketAddr)> {
        let addr = self.listen_as(addr, [Owner::Client])?;
        Ok((self.all.len() - 1, addr))
    }

    fn listen_as(
        &mut self,
        mut addr: SocketAddr,
        owners: impl IntoIterator<Item = Owner>,
    ) -> io::Result<SocketAddr> {
        if addr.port() == 0 {
            self.ports_listened += 1;
            addr.set_port(self.ports_listened);
        }
        if self.all.iter().any(|listener| listener.addr == addr && !listener.closed) {
            return Err(io::Error::from_raw_os_error(libc::EADDRINUSE));
        }
        self.all.extend(owners.into_iter().map(|owner| Listener::new(addr, owner, None)));
        Ok(addr)
    }

    /// Adopts a listener for each shard, and creates it if it is not there.
    pub(super) fn adopt(&mut self, addr: SocketAddr, shards: usize) -> io::Result<()> {
        let is_adopted = |listener: &Listener| listener.addr == addr && listener.owner == Owner::Network;
        let adopts = match self.all.iter().position(is_adopted) {
            Some(adopts) => adopts,
            None => {
                self.listen_as(addr, [Owner::Network])?;
                self.all.len() - 1
            }
        };
        let listener = |shard| Listener::new(addr, Owner::Shard(shard), Some(adopts));
        self.all.extend((0..shards).map(listener));
        Ok(())
    }

    /// The open listeners of shards whose rings are not created.
    pub(super) fn unclaimed(&self) -> Vec<usize> {
        self.numbers(|listener| matches!(listener.owner, Owner::Shard(_)) && !listener.closed)
    }

    /// Assigns the open listeners of a shard to its ring.
    pub(super) fn claim(&mut self, shard: usize, ring: i32) -> Vec<usize> {
        let own = self.numbers(|listener| listener.owner == Owner::Shard(shard) && !listener.closed);
        own.iter().for_each(|n| self.all[*n].owner = Owner::Ring(ring));
        own
    }

    pub(super) fn of_ring(&self, ring: i32) -> Vec<usize> {
        self.numbers(|listener| listener.owner == Owner::Ring(ring))
    }

    fn numbers(&self, is_meant: impl Fn(&Listener) -> bool) -> Vec<usize> {
        (0..self.all.len()).filter(|n| is_meant(&self.all[*n])).collect()
    }

    /// The listeners that a peer of this address may reach, each with its own queue.
    pub(super) fn at(&mut self, addr: SocketAddr) -> impl Iterator<Item = &mut Listener> {
        let reaches = move |listener: &&mut Listener| {
            listener.addr == addr && !listener.closed && listener.adopts.is_none()
        };
        self.all.iter_mut().filter(reaches)
    }

    pub(crate) fn get_mut(&mut self, listener: usize) -> &mut Listener {
        &mut self.all[listener]
    }

    /// The host of a listener.
    pub(super) fn host(&self, listener: usize) -> IpAddr {
        self.all[listener].addr.ip()
    }

    /// The listener that owns the queue.
    fn queue_of(&mut self, listener: usize) -> &mut Listener {
        let of = self.all[listener].adopts.unwrap_or(listener);
        &mut self.all[of]
    }

    pub(crate) fn is_adopted(&self, listener: usize) -> bool {
        self.all[listener].adopts.is_some()
    }

    pub(crate) fn has_queued(&mut self, listener: usize) -> bool {
        !self.queue_of(listener).backlog.is_empty()
    }

    /// Takes a connection out of a listener's queue.
    pub(super) fn take_queued(&mut self, listener: usize) -> Option<u32> {
        self.queue_of(listener).backlog.pop_front()
    }

    /// Notes that a ring's accept waits at a queue that it shares with others.
    pub(crate) fn begin_to_wait(&mut self, listener: usize, ring: i32) {
        self.queue_of(listener).waiting.woken.insert(ring);
    }

    /// True if a ring that was woken finds a connection; otherwise it waits for the next one.
    pub(crate) fn finds_queued(&mut self, listener: usize, ring: i32) -> bool {
        let Listener { backlog, waiting, .. } = self.queue_of(listener);
        let woken = waiting.woken.remove(&ring);
        if woken && backlog.is_empty() {
            waiting.rings.push_back(ring);
        }
        woken && !backlog.is_empty()
    }

    /// Ends the wait of a ring. No other ring is woken in its place.
    pub(crate) fn end_wait(&mut self, listener: usize, ring: i32) {
        let waiting = &mut self.queue_of(listener).waiting;
        waiting.woken.remove(&ring);
        waiting.rings.retain(|other| *other != ring);
    }

    /// Closes a listening socket. Returns the connections of its queue, or `None` for one that was
    /// adopted: the queue stays.
    pub(super) fn close(&mut self, listener: usize) -> Option<VecDeque<u32>> {
        self.all[listener].closed = true;
        match (self.is_adopted(listener), self.all[listener].ring()) {
            (true, Some(ring)) => {
                self.end_wait(listener, ring);
                None
            }
            _ => Some(std::mem::take(&mut self.all[listener].backlog)),
        }
    }

    /// True for a connection in a queue that the network holds for a later server.
    pub(super) fn holds(&self, number: u32) -> bool {
        self.all.iter().any(|listener| listener.owner == Owner::Network && listener.backlog.contains(&number))
    }

    /// Addresses of open listeners, except those that the network holds.
    pub(super) fn open(&self) -> impl Iterator<Item = SocketAddr> {
        let open = self.all.iter().filter(|listener| listener.owner != Owner::Network && !listener.closed);
        open.map(|listener| listener.addr)
    }
}

#[cfg(test)]
impl Listeners {
    /// True if all listeners belong to clients.
    pub(super) fn are_clients(&self) -> bool {
        self.all.iter().all(|listener| listener.closed || listener.owner == Owner::Client)
    }
}
