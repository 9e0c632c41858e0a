//! What the driver knows of each connection, and the queue of those that have something to read.

use ringserve_core::{Batch, ConnId};
use socket2::Socket;

use ringserve_core::internals::Chunked;

/// No connection: no id has bits above the 60th.
const VACANT: u64 = u64::MAX;

/// No slot: slots have 24 bits.
const NONE: u32 = u32::MAX;

/// One connection. Everything is at rest while `id` is vacant.
#[derive(Debug)]
pub(super) struct Port {
    id: u64,
    /// The send in flight.
    pub(super) batch: Option<Box<Batch>>,
    /// `None` while vacant, and if no socket could be made to connect with.
    pub(super) socket: Option<Socket>,
    /// Neighbours in the queue; `NONE` at its ends and outside of it.
    before: u32,
    after: u32,
    /// Why it could not be registered, as an `errno`; 0 if it is.
    pub(super) unregistered: u16,
    /// The `errno` of a send that failed; 0 if none did. The socket tells an error once: a receive after it finds an end
    /// that looks like the peer's.
    pub(super) failed: u16,
    /// A connect is in flight.
    pub(super) connecting: bool,
    /// A receive is in flight.
    pub(super) receiving: bool,
    /// False only if the socket was found empty and there was no edge since.
    pub(super) readable: bool,
    /// False only if the socket was found full and there was no edge since.
    pub(super) writable: bool,
    /// The peer's end or an error was announced: receive until it is found, there is no further edge.
    pub(super) hung_up: bool,
    /// True exactly while it is in the queue: when it is receiving and readable.
    queued: bool,
    /// It found the pool empty. Such ports are at the head of the queue.
    parked: bool,
}

impl Default for Port {
    fn default() -> Port {
        Port {
            id: VACANT,
            batch: None,
            socket: None,
            before: NONE,
            after: NONE,
            unregistered: 0,
            failed: 0,
            connecting: false,
            receiving: false,
            readable: false,
            writable: false,
            hung_up: false,
            queued: false,
            parked: false,
        }
    }
}

impl Port {
    pub(super) fn id(&self) -> ConnId {
        ConnId::from_bits(self.id)
    }
}

/// All connections, by slot.
pub(super) struct Ports {
    table: Chunked<Port>,
    /// Head and tail of the queue, first in, first out.
    first: u32,
    last: u32,
}

impl Ports {
    pub(super) fn new() -> Ports {
        Ports { table: Chunked::new(), first: NONE, last: NONE }
    }

    /// The connection, if the slot is this id's.
    #[inline]
    pub(super) fn find(&mut self, id: ConnId) -> Option<&mut Port> {
        self.table.get_mut(id.slot()).filter(|port| port.id == id.bits())
    }

    /// The connection in a slot, if there is one.
    #[inline]
    pub(super) fn at(&mut self, slot: u32) -> Option<&mut Port> {
        self.table.get_mut(slot).filter(|port| port.id != VACANT)
    }

    /// Makes the slot this id's; `None` if it is another's still, and the socket is closed.
    pub(super) fn open(&mut self, id: ConnId, socket: Option<Socket>) -> Option<&mut Port> {
        let port = self.table.entry(id.slot()).expect("memory for 256 connections");
        if port.id != VACANT {
            return None;
        }
        *port = Port { id: id.bits(), socket, writable: true, ..Port::default() };
        Some(port)
    }

    /// Frees the slot.
    pub(super) fn close(&mut self, slot: u32) {
        self.leave(slot);
        if let Some(port) = self.at(slot) {
            *port = Port::default();
        }
    }

    /// True if there is something to read.
    #[inline]
    pub(super) fn has_queued(&self) -> bool {
        self.first != NONE
    }

    /// The head of the queue.
    #[inline]
    pub(super) fn front(&mut self) -> Option<&mut Port> {
        self.table.get_mut(self.first)
    }

    /// Puts the port into the queue or takes it out, as its flags say. Call it after changing them.
    #[inline]
    pub(super) fn sync_queue(&mut self, slot: u32) {
        let Some(port) = self.at(slot) else { return };
        let wanted = port.receiving && port.readable;
        if wanted && !port.queued {
            self.enter(slot);
        } else if !wanted {
            self.leave(slot);
        }
    }

    /// Makes the head of the queue its tail.
    #[inline]
    pub(super) fn rotate(&mut self) {
        if self.first != self.last {
            let slot = self.first;
            self.leave(slot);
            self.enter(slot);
        } else if let Some(port) = self.front() {
            port.parked = false;
        }
    }

    /// Marks all in the queue as parked. Returns how many were not.
    pub(super) fn park_all(&mut self) -> u64 {
        let (mut slot, mut count) = (self.last, 0);
        while let Some(port) = self.table.get_mut(slot) {
            if std::mem::replace(&mut port.parked, true) {
                break;
            }
            slot = port.before;
            count += 1;
        }
        count
    }

    fn enter(&mut self, slot: u32) {
        let last = self.last;
        let Some(port) = self.table.get_mut(slot) else { return };
        port.queued = true;
        (port.before, port.after) = (last, NONE);
        self.link(last, slot);
        self.last = slot;
    }

    fn leave(&mut self, slot: u32) {
        let Some(port) = self.table.get_mut(slot) else { return };
        if !port.queued {
            return;
        }
        (port.queued, port.parked) = (false, false);
        let (before, after) = (port.before, port.after);
        (port.before, port.after) = (NONE, NONE);
        self.link(before, after);
        match self.table.get_mut(after) {
            Some(next) => next.before = before,
            None => self.last = before,
        }
    }

    /// Makes `after` follow `before`; `NONE` is the end of the queue.
    fn link(&mut self, before: u32, after: u32) {
        match self.table.get_mut(before) {
            Some(port) => port.after = after,
            None => self.first = after,
        }
    }

    /// Walks the queue and panics if it is not what the flags say.
    pub(super) fn invariants(&self) {
        let (mut slot, mut before, mut parked) = (self.first, NONE, true);
        while let Some(port) = self.table.get(slot) {
            assert!(port.queued && port.receiving && port.readable, "slot {slot} is queued: {port:?}");
            assert_ne!(port.id, VACANT, "slot {slot} is queued and vacant");
            assert_eq!(port.before, before, "slot {slot} has the wrong neighbour");
            assert!(parked || !port.parked, "slot {slot} is parked behind one that is not");
            (before, slot, parked) = (slot, port.after, port.parked);
        }
        assert_eq!(before, self.last, "the tail of the queue");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn socket() -> Socket {
        Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap()
    }

    fn queued(ports: &mut Ports, count: u32) -> Vec<ConnId> {
        let ids: Vec<ConnId> = (0..count).map(|n| ConnId::new(n * 300, u64::from(n))).collect();
        for id in &ids {
            let port = ports.open(*id, Some(socket())).unwrap();
            (port.receiving, port.readable) = (true, true);
            ports.sync_queue(id.slot());
            ports.invariants();
        }
        ids
    }

    fn drain(ports: &mut Ports) -> Vec<ConnId> {
        let mut order = Vec::new();
        while let Some(port) = ports.front() {
            port.readable = false;
            order.push(port.id());
            ports.sync_queue(order[order.len() - 1].slot());
            ports.invariants();
        }
        order
    }

    #[test]
    fn the_queue_is_first_in_first_out_and_can_be_left_anywhere() {
        let mut ports = Ports::new();
        let ids = queued(&mut ports, 6);
        for middle_first_last in [2, 0, 5] {
            ports.close(ids[middle_first_last].slot());
            ports.invariants();
        }
        ports.rotate();
        ports.invariants();
        assert_eq!(drain(&mut ports), [ids[3], ids[4], ids[1]]);
        assert!(!ports.has_queued());
    }

    #[test]
    fn parking_counts_each_one_once_until_it_was_served() {
        let mut ports = Ports::new();
        queued(&mut ports, 3);
        assert_eq!((ports.park_all(), ports.park_all()), (3, 0));
        ports.rotate();
        ports.invariants();
        assert_eq!((ports.park_all(), ports.park_all()), (1, 0));
        drain(&mut ports);
        assert_eq!(ports.park_all(), 0);
    }

    #[test]
    fn a_port_is_small_and_knows_its_generation() {
        assert!(size_of::<Port>() <= 48, "{}", size_of::<Port>());
        let mut ports = Ports::new();
        let (old, new) = (ConnId::new(7, 1), ConnId::new(7, 2));
        assert!(ports.open(old, Some(socket())).is_some() && ports.open(new, Some(socket())).is_none());
        ports.close(7);
        assert!(ports.find(old).is_none() && ports.at(7).is_none());
        assert!(ports.open(new, Some(socket())).is_some() && ports.find(old).is_none());
    }
}
