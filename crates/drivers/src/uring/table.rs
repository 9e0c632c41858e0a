//! What the driver knows of each connection, and the queue of those parked for want of buffers.

use ringserve_core::{CloseHow, ConnId};

use ringserve_core::internals::Chunked;

/// No connection: no id has bits above the 60th.
const VACANT: u64 = u64::MAX;

/// No slot: slots have 24 bits.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Receiving {
    /// Not asked for, or ended.
    No,
    /// With the kernel, or queued for it.
    Armed,
    /// Waits for buffers, and is in the list of those that do.
    Parked,
    /// Ended as far as the core knows. No completion said so, so the kernel may still have it.
    Doubtful,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sending {
    /// Not asked for, or ended.
    No,
    /// In the driver's own queue.
    Queued,
    /// With the kernel.
    Submitted,
}

/// Whether the receive in flight is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// It is not.
    No,
    /// It is being cancelled, to be armed again: it does not tell what a probe found.
    Restarts,
    /// It was told to.
    Stops,
}

/// What happens to the socket as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// A connect is in flight.
    Connecting,
    /// ... and was told to stop.
    StopsConnecting,
    /// None of the others.
    Open,
    /// A shutdown is in flight.
    ShutsDown,
    /// The input is being shut down, so that the receive ends.
    EndsInput,
    /// It is to be closed so, once the input is shut down; and where the receive is doubtful, once a further cancel found
    /// nothing, so that the kernel is known to have none.
    Clears(CloseHow),
    /// A close is in flight.
    Closes,
}

/// One connection. Everything but `id` and the links is at rest while `id` is vacant.
#[derive(Debug)]
pub(super) struct Port {
    id: u64,
    pub(super) receiving: Receiving,
    pub(super) sending: Sending,
    pub(super) receive_stop: Stop,
    /// True exactly when the send in flight was told to stop and has not ended.
    pub(super) send_stop: bool,
    pub(super) life: Life,
    /// What the receive has not brought: bits that the next bytes clear, all of them.
    unheard: u8,
    /// Cancels of receives that have not completed.
    pub(super) receive_cancels: u8,
    /// How many of them in a row did not find it.
    pub(super) receive_misses: u8,
    /// Neighbours in the list of parked connections; `NONE` at its ends and outside of it.
    parked_before: u32,
    parked_after: u32,
}

impl Default for Port {
    fn default() -> Port {
        Port {
            id: VACANT,
            receiving: Receiving::No,
            sending: Sending::No,
            receive_stop: Stop::No,
            send_stop: false,
            life: Life::Open,
            unheard: Port::UNFED,
            receive_cancels: 0,
            receive_misses: 0,
            parked_before: NONE,
            parked_after: NONE,
        }
    }
}

impl Port {
    /// No bytes since it was taken out of the list of parked ones.
    const UNFED: u8 = 1;
    /// Nothing of what a probe found.
    const DOUBTED: u8 = 2;

    /// A cancel is to find that the kernel has no receive of it.
    pub(super) fn is_clearing(&self) -> bool {
        self.receiving == Receiving::Doubtful && matches!(self.life, Life::Clears(_))
    }

    /// The receive brought bytes.
    #[inline]
    pub(super) fn hears(&mut self) {
        self.unheard = 0;
    }

    /// A probe found what the receive should tell.
    pub(super) fn doubt(&mut self) {
        self.unheard |= Port::DOUBTED;
    }

    pub(super) fn is_doubted(&self) -> bool {
        self.unheard & Port::DOUBTED != 0
    }

    /// The receive ended, or is about to: there is nothing to doubt, and nothing to restart.
    pub(super) fn believe(&mut self) {
        self.unheard &= !Port::DOUBTED;
        self.receive_misses = 0;
        if self.receive_stop == Stop::Restarts {
            self.receive_stop = Stop::No;
        }
    }
}

/// All connections, by slot.
pub(super) struct Ports {
    table: Chunked<Port>,
    /// First and last of the list of parked connections.
    first: u32,
    last: u32,
    /// The last of those at its head that got nothing when they were armed: one that was armed before them took every
    /// buffer. They come before it next time. Otherwise those who are armed together would stay together each time
    /// the list goes round, and the first of them would get everything for as long as it has bytes.
    passed_over: u32,
    parked: usize,
}

impl Ports {
    pub(super) fn new() -> Ports {
        Ports { table: Chunked::new(), first: NONE, last: NONE, passed_over: NONE, parked: 0 }
    }

    /// The connection, if the slot is this id's.
    #[inline]
    pub(super) fn find(&mut self, id: ConnId) -> Option<&mut Port> {
        self.table.get_mut(id.slot()).filter(|port| port.id == id.bits())
    }

    /// Makes the slot this id's; false if it is another's still.
    pub(super) fn open(&mut self, id: ConnId) -> bool {
        let port = self.table.entry(id.slot()).expect("memory for 256 connections");
        let vacant = port.id == VACANT;
        if vacant {
            port.id = id.bits();
        }
        vacant
    }

    /// Frees the slot.
    pub(super) fn close(&mut self, id: ConnId) {
        self.unpark(id);
        if let Some(port) = self.find(id) {
            *port = Port::default();
        }
    }

    /// Every slot that was ever used, vacant ones too.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Port> {
        self.table.iter()
    }

    /// How many are parked.
    #[inline]
    pub(super) fn parked(&self) -> usize {
        self.parked
    }

    /// Puts a connection behind the last parked one; if it got nothing since it was armed, before all that did.
    pub(super) fn park(&mut self, id: ConnId) {
        let (first, last, passed_over) = (self.first, self.last, self.passed_over);
        let after_passed_over = self.table.get(passed_over).map_or(first, |port| port.parked_after);
        let Some(port) = self.find(id) else { return };
        debug_assert_ne!(port.receiving, Receiving::Parked, "{id} is parked already");
        port.receiving = Receiving::Parked;
        let fed = port.unheard & Port::UNFED == 0;
        port.unheard |= Port::UNFED;
        let (before, after) = if fed { (last, NONE) } else { (passed_over, after_passed_over) };
        (port.parked_before, port.parked_after) = (before, after);
        if !fed {
            self.passed_over = id.slot();
        }
        self.link(before, id.slot());
        match self.table.get_mut(after) {
            Some(next) => next.parked_before = id.slot(),
            None => self.last = id.slot(),
        }
        self.parked += 1;
    }

    /// Takes a connection out of the list, if it is there.
    pub(super) fn unpark(&mut self, id: ConnId) {
        let Some(port) = self.find(id) else { return };
        if port.receiving != Receiving::Parked {
            return;
        }
        port.receiving = Receiving::No;
        let (before, after) = (port.parked_before, port.parked_after);
        (port.parked_before, port.parked_after) = (NONE, NONE);
        if self.passed_over == id.slot() {
            self.passed_over = before;
        }
        self.link(before, after);
        match self.table.get_mut(after) {
            Some(next) => next.parked_before = before,
            None => self.last = before,
        }
        self.parked -= 1;
    }

    /// Takes the connection that was parked first.
    pub(super) fn unpark_first(&mut self) -> Option<ConnId> {
        let id = ConnId::from_bits(self.table.get(self.first)?.id);
        self.unpark(id);
        Some(id)
    }

    /// Makes `after` follow `before`; `NONE` is the end of the list.
    fn link(&mut self, before: u32, after: u32) {
        match self.table.get_mut(before) {
            Some(port) => port.parked_after = after,
            None => self.first = after,
        }
    }

    /// Walks the list of parked connections and panics if it is not what the flags say.
    pub(super) fn invariants(&self) {
        let (mut slot, mut before, mut count) = (self.first, NONE, 0);
        let mut passed_over = self.passed_over == NONE;
        while let Some(port) = self.table.get(slot) {
            assert_eq!(port.receiving, Receiving::Parked, "slot {slot} is in the list but not parked");
            assert_eq!(port.parked_before, before, "slot {slot} has the wrong neighbour");
            assert_ne!(port.id, VACANT, "slot {slot} is parked and vacant");
            passed_over |= slot == self.passed_over;
            count += 1;
            assert!(count <= self.parked, "the list of parked connections has a loop");
            (before, slot) = (slot, port.parked_after);
        }
        assert_eq!((before, count), (self.last, self.parked), "the list of parked connections");
        assert!(passed_over, "slot {} is not in the list of parked connections", self.passed_over);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parked_connections_leave_first_in_first_out_and_from_the_middle() {
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
    fn who_got_nothing_is_before_all_who_did_and_behind_others_who_did_not() {
        let mut ports = Ports::new();
        let ids: Vec<ConnId> = (0..6).map(|n| ConnId::new(n, u64::from(n))).collect();
        let park = |ports: &mut Ports, slot: usize, fed: bool| {
            if fed {
                ports.find(ids[slot]).unwrap().hears();
            }
            ports.park(ids[slot]);
            ports.invariants();
        };
        ids.iter().for_each(|id| assert!(ports.open(*id)));
        for (slot, fed) in [(0, true), (1, false), (2, true), (3, false)] {
            park(&mut ports, slot, fed);
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
