//! The driver's state of each connection, and the queue of those that have something to read.

use ringserve_core::{Batch, ConnId};
use socket2::Socket;

use crate::shared::table::{Entry, NONE, Place, Table};

/// One connection. All fields have their defaults while its place is vacant.
#[derive(Debug, Default)]
pub(super) struct Port {
    /// In the list while it is queued.
    place: Place,
    /// The send in flight.
    pub(super) batch: Option<Box<Batch>>,
    /// `None` while vacant, and if no socket could be created to connect with.
    pub(super) socket: Option<Socket>,
    /// The `errno` with which its registration failed; 0 if it is registered.
    pub(super) unregistered: u16,
    /// The `errno` of a send that failed; 0 if none did. The socket reports an error once: a later
    /// receive finds an end that looks like the peer's.
    pub(super) failed: u16,
    /// A connect is in flight.
    pub(super) connecting: bool,
    /// A receive is in flight.
    pub(super) receiving: bool,
    /// The receive ends with the first bytes.
    pub(super) once: bool,
    /// The receive may fill several buffers at once.
    pub(super) several: bool,
    /// The last receive filled a buffer: the next one has several.
    pub(super) full: bool,
    /// False only if the socket was found empty and there was no edge since.
    pub(super) readable: bool,
    /// False only if the socket was found full and there was no edge since.
    pub(super) writable: bool,
    /// The peer's end or an error was announced, or a message ended a receive before its buffer was
    /// full: receive until the end is found or the socket is empty, since there is no further edge.
    pub(super) goes_on: bool,
    /// A mark of urgent data was announced. A receive ends there, and may once even report that the
    /// socket is empty.
    pub(super) marked: bool,
    /// The socket is a Unix socket: a receive ends after each message that came with descriptors or
    /// credentials.
    pub(super) is_unix: bool,
    /// True exactly while the port is in the queue: when it is receiving and readable.
    queued: bool,
    /// The receive found the pool empty. Such ports are at the head of the queue.
    parked: bool,
}

impl Entry for Port {
    #[inline]
    fn place(&self) -> &Place {
        &self.place
    }

    #[inline]
    fn place_mut(&mut self) -> &mut Place {
        &mut self.place
    }
}

impl Port {
    pub(super) fn id(&self) -> ConnId {
        self.place.id()
    }
}

/// All connections, by slot, with a queue of those to read from, first in, first out.
pub(super) struct Ports {
    table: Table<Port>,
}

impl Ports {
    pub(super) fn new() -> Ports {
        Ports { table: Table::new() }
    }

    /// The connection, if the slot is this id's.
    #[inline]
    pub(super) fn find(&mut self, id: ConnId) -> Option<&mut Port> {
        self.table.find(id)
    }

    /// The connection in a slot, if there is one.
    #[inline]
    pub(super) fn at(&mut self, slot: u32) -> Option<&mut Port> {
        self.table.at(slot)
    }

    /// Assigns the slot to this id; `None` if another connection still has it, and the socket is
    /// closed.
    pub(super) fn open(&mut self, id: ConnId, socket: Option<Socket>, is_unix: bool) -> Option<&mut Port> {
        let port = self.table.open(id)?;
        (port.socket, port.writable, port.is_unix) = (socket, true, is_unix);
        Some(port)
    }

    /// Frees the slot.
    pub(super) fn close(&mut self, slot: u32) {
        self.leave(slot);
        self.table.close(slot);
    }

    /// True if there is something to read.
    #[inline]
    pub(super) fn has_queued(&self) -> bool {
        self.table.first() != NONE
    }

    /// The head of the queue.
    #[inline]
    pub(super) fn front(&mut self) -> Option<&mut Port> {
        self.table.at(self.table.first())
    }

    /// Length of the queue, counted up to `most`.
    pub(super) fn queued_up_to(&mut self, most: usize) -> usize {
        let (mut slot, mut count) = (self.table.first(), 0);
        while count < most
            && let Some(port) = self.table.at(slot)
        {
            slot = port.place.after();
            count += 1;
        }
        count
    }

    /// Puts the port into the queue or takes it out, as its flags say. Call it after changing them.
    #[inline]
    pub(super) fn sync_queue(&mut self, slot: u32) {
        let Some(port) = self.at(slot) else { return };
        let wanted = port.receiving && port.readable;
        if wanted != port.queued {
            if wanted { self.enter(slot) } else { self.leave(slot) }
        }
    }

    /// Makes the head of the queue its tail.
    #[inline]
    pub(super) fn rotate(&mut self) {
        let slot = self.table.first();
        if slot != self.table.last() {
            self.leave(slot);
            self.enter(slot);
        } else if let Some(port) = self.front() {
            port.parked = false;
        }
    }

    /// Marks all in the queue as parked. Returns how many were not.
    pub(super) fn park_all(&mut self) -> u64 {
        let (mut slot, mut count) = (self.table.last(), 0);
        while let Some(port) = self.table.at(slot) {
            if std::mem::replace(&mut port.parked, true) {
                break;
            }
            slot = port.place.before();
            count += 1;
        }
        count
    }

    #[inline]
    fn enter(&mut self, slot: u32) {
        let Some(port) = self.at(slot) else { return };
        port.queued = true;
        self.table.insert(self.table.last(), slot);
    }

    /// Takes the port out of the queue, if it is there.
    #[inline]
    pub(super) fn leave(&mut self, slot: u32) {
        let Some(port) = self.at(slot) else { return };
        if port.queued {
            (port.queued, port.parked) = (false, false);
            self.table.remove(slot);
        }
    }

    /// Walks the queue and panics if it is not what the flags say.
    pub(super) fn invariants(&self) {
        let mut parked = true;
        for (slot, port) in self.table.listed() {
            assert!(port.queued && port.receiving && port.readable, "slot {slot} is queued: {port:?}");
            assert!(parked || !port.parked, "slot {slot} is parked behind one that is not");
            parked = port.parked;
        }
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
            let port = ports.open(*id, Some(socket()), false).unwrap();
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
        assert!(ports.open(old, Some(socket()), false).is_some());
        assert!(ports.open(new, Some(socket()), false).is_none());
        ports.close(7);
        assert!(ports.find(old).is_none() && ports.at(7).is_none());
        assert!(ports.open(new, Some(socket()), true).is_some() && ports.find(old).is_none());
    }
}
