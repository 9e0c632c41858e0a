//! The driver's state of each connection, and the queue of those parked for lack of buffers.

use ringserve_core::{CloseHow, ConnId};

use crate::shared::table::{Entry, NONE, Place, Table};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReceiveState {
    /// The receive was not requested, or ended.
    No,
    /// The receive is with the kernel, or queued for it.
    Armed,
    /// The receive waits for buffers, and is in the list of those that do.
    Parked,
    /// The receive ended for the core. No completion reported that, so the kernel may still have
    /// it.
    Doubtful,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SendState {
    /// No send was requested, or it ended.
    No,
    /// The send is with the kernel, or queued to be tried there.
    Submitted,
    /// The bytes that did not fit at once are in the driver's own queue.
    Rests,
}

/// Whether the receive in flight has to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// It does not.
    No,
    /// It is being cancelled, to be armed again: it does not report what a probe found.
    Restarts,
    /// A stop was requested.
    Stops,
}

/// The state of the socket as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// A connect is in flight.
    Connecting,
    /// A stop of the connect was requested, and it has not ended.
    StopsConnecting,
    /// None of the others.
    Open,
    /// A shutdown is in flight.
    ShutsDown,
    /// The input is being shut down, so that the receive ends.
    EndsInput,
    /// The socket is closed this way once the input is shut down and, where the receive is
    /// doubtful, once a further cancel found nothing, so that the kernel is known to have none.
    Clears(CloseHow),
    /// A close is in flight.
    Closes,
}

/// One connection. All fields have their defaults while its place is vacant.
#[derive(Debug)]
pub(super) struct Port {
    /// In the list while it is parked.
    place: Place,
    pub(super) receiving: ReceiveState,
    pub(super) sending: SendState,
    pub(super) receive_stop: Stop,
    /// True exactly when a stop of the send in flight was requested and it has not ended.
    pub(super) send_stop: bool,
    pub(super) life: Life,
    /// Flags that the next received bytes clear, and the kind of the receive.
    unheard: u8,
    /// Cancels of receives that have not completed.
    pub(super) receive_cancels: u8,
    /// Number of them in a row that did not find it.
    pub(super) receive_misses: u8,
}

impl Default for Port {
    fn default() -> Port {
        Port {
            place: Place::default(),
            receiving: ReceiveState::No,
            sending: SendState::No,
            receive_stop: Stop::No,
            send_stop: false,
            life: Life::Open,
            unheard: Port::RECEIVED_NOTHING,
            receive_cancels: 0,
            receive_misses: 0,
        }
    }
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
    /// No bytes came since the connection was taken out of the list of parked ones.
    const RECEIVED_NOTHING: u8 = 1;
    /// The receive has not reported what a probe found.
    const DOUBTED: u8 = 2;
    /// The receive ends with the first bytes.
    const ONCE: u8 = 4;
    /// The receive goes into a block.
    const INTO: u8 = 8;

    /// True if a cancel has to show that the kernel has no receive of the connection.
    pub(super) fn is_clearing(&self) -> bool {
        self.receiving == ReceiveState::Doubtful && matches!(self.life, Life::Clears(_))
    }

    /// Notes that the receive brought bytes.
    #[inline]
    pub(super) fn hears(&mut self) {
        self.unheard &= Port::ONCE | Port::INTO;
    }

    /// Sets the kind of the receive that begins.
    pub(super) fn receives(&mut self, once: bool, into: bool) {
        self.unheard &= !(Port::ONCE | Port::INTO);
        self.unheard |= if once { Port::ONCE } else { 0 } | if into { Port::INTO } else { 0 };
    }

    pub(super) fn is_once(&self) -> bool {
        self.unheard & Port::ONCE != 0
    }

    pub(super) fn is_into(&self) -> bool {
        self.unheard & Port::INTO != 0
    }

    /// Notes that a probe found something that the receive should report.
    pub(super) fn doubt(&mut self) {
        self.unheard |= Port::DOUBTED;
    }

    pub(super) fn is_doubted(&self) -> bool {
        self.unheard & Port::DOUBTED != 0
    }

    /// Notes that the receive ended, or is about to: there is nothing to doubt, and nothing to
    /// restart.
    pub(super) fn believe(&mut self) {
        self.unheard &= !Port::DOUBTED;
        self.receive_misses = 0;
        if self.receive_stop == Stop::Restarts {
            self.receive_stop = Stop::No;
        }
    }
}

/// All connections, by slot, with a list of those parked.
pub(super) struct Ports {
    table: Table<Port>,
    /// The last of those at the head of the list that got nothing when they were armed: one that
    /// was armed before them took every buffer. They come before it next time. Otherwise
    /// connections that are armed together would stay together each time the list goes round, and
    /// the first of them would get everything for as long as it has bytes.
    passed_over: u32,
    parked: usize,
}

impl Ports {
    pub(super) fn new() -> Ports {
        Ports { table: Table::new(), passed_over: NONE, parked: 0 }
    }

    /// The connection, if the slot is this id's.
    #[inline]
    pub(super) fn find(&mut self, id: ConnId) -> Option<&mut Port> {
        self.table.find(id)
    }

    /// Assigns the slot to this id; false if another connection still has it.
    pub(super) fn open(&mut self, id: ConnId) -> bool {
        self.table.open(id).is_some()
    }

    /// Frees the slot.
    pub(super) fn close(&mut self, id: ConnId) {
        self.unpark(id);
        if self.find(id).is_some() {
            self.table.close(id.slot());
        }
    }

    /// Every slot that was ever used, including vacant ones.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Port> {
        self.table.iter()
    }

    /// The number of parked receives.
    #[inline]
    pub(super) fn parked(&self) -> usize {
        self.parked
    }

    /// Adds a connection after the last parked one or, if it got nothing since it was armed, before
    /// all that did.
    pub(super) fn park(&mut self, id: ConnId) {
        let Some(port) = self.find(id) else { return };
        debug_assert_ne!(port.receiving, ReceiveState::Parked, "{id} is parked already");
        port.receiving = ReceiveState::Parked;
        let received_any = port.unheard & Port::RECEIVED_NOTHING == 0;
        port.unheard |= Port::RECEIVED_NOTHING;
        let before = if received_any { self.table.last() } else { self.passed_over };
        if !received_any {
            self.passed_over = id.slot();
        }
        self.table.insert(before, id.slot());
        self.parked += 1;
    }

    /// Takes a connection out of the list, if it is there.
    pub(super) fn unpark(&mut self, id: ConnId) {
        let Some(port) = self.find(id) else { return };
        if port.receiving != ReceiveState::Parked {
            return;
        }
        port.receiving = ReceiveState::No;
        let before = port.place.before();
        if self.passed_over == id.slot() {
            self.passed_over = before;
        }
        self.table.remove(id.slot());
        self.parked -= 1;
    }

    /// Takes the connection that has been parked longest.
    pub(super) fn unpark_first(&mut self) -> Option<ConnId> {
        let id = self.table.at(self.table.first())?.place.id();
        self.unpark(id);
        Some(id)
    }

    /// Walks the list of parked connections and panics if it is not what the flags say.
    pub(super) fn invariants(&self) {
        // Only the first chunk, since debug builds check after every turn.
        for port in self.table.iter().take(256) {
            assert!(port.sending != SendState::No || !port.send_stop, "a stop outlived its send: {port:?}");
        }
        let (mut count, mut passed_over) = (0, self.passed_over == NONE);
        for (slot, port) in self.table.listed() {
            assert_eq!(port.receiving, ReceiveState::Parked, "slot {slot} is in the list but not parked");
            passed_over |= slot == self.passed_over;
            count += 1;
        }
        assert_eq!(count, self.parked, "the list of parked connections");
        assert!(passed_over, "slot {} is not in the list of parked connections", self.passed_over);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parked_connections_leave_in_order_and_from_the_middle() {
        let mut ports = Ports::new();
        let ids: Vec<ConnId> = (0..5).map(|n| ConnId::new(n * 300, u64::from(n))).collect();
        for id in &ids {
            assert!(ports.open(*id));
            ports.park(*id);
            ports.invariants();
        }
        for middle_first_last in [2, 0, 4] {
            ports.unpark(ids[middle_first_last]);
            ports.invariants();
        }
        ports.park(ids[0]);
        ports.close(ids[3]);
        ports.invariants();
        assert_eq!(ports.unpark_first(), Some(ids[1]));
        assert_eq!(ports.unpark_first(), Some(ids[0]));
        assert_eq!((ports.unpark_first(), ports.parked()), (None, 0));
        ports.invariants();
    }

    #[test]
    fn receive_that_got_nothing_is_before_all_that_did() {
        let mut ports = Ports::new();
        let ids: Vec<ConnId> = (0..6).map(|n| ConnId::new(n, u64::from(n))).collect();
        let park = |ports: &mut Ports, slot: usize, received_any: bool| {
            if received_any {
                ports.find(ids[slot]).unwrap().hears();
            }
            ports.park(ids[slot]);
            ports.invariants();
        };
        ids.iter().for_each(|id| assert!(ports.open(*id)));
        for (slot, received_any) in [(0, true), (1, false), (2, true), (3, false)] {
            park(&mut ports, slot, received_any);
        }
        assert_eq!(ports.unpark_first(), Some(ids[1]));
        park(&mut ports, 1, true);
        park(&mut ports, 4, false);
        // The last of those that got nothing leaves from the middle.
        ports.unpark(ids[4]);
        park(&mut ports, 5, false);
        let order: Vec<_> = std::iter::from_fn(|| ports.unpark_first()).collect();
        assert_eq!(order, [3, 5, 0, 2, 1].map(|slot| ids[slot]));
        ports.invariants();
    }

    #[test]
    fn a_port_is_small_and_knows_its_generation() {
        assert!(size_of::<Port>() <= 24, "{}", size_of::<Port>());
        let mut ports = Ports::new();
        let (old, new) = (ConnId::new(7, 1), ConnId::new(7, 2));
        assert!(ports.open(old) && !ports.open(new));
        ports.close(old);
        assert!(ports.find(old).is_none() && ports.open(new) && ports.find(old).is_none());
    }
}
