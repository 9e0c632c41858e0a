//! The connections of a listener, and which of them makes room for a newcomer.
//!
//! | connection | makes room |
//! |---|---|
//! | has asked nothing yet | first, the oldest |
//! | was answered, and asks nothing | then, that which has been so for longest |
//! | waits for its answer, or listens to events | never: of these there are few |
//!
//! So no number of connections that say nothing keeps a probe out. What stays is bounded otherwise:
//! requests of one address at once, and listeners to events of all.

use std::cell::{Cell, RefCell};
use std::net::IpAddr;
use std::rc::Rc;

use ringserve_core::Time;

use crate::stream::byte_stream::Stream;
use crate::stream::fate::Fate;

/// The connections of a listener.
pub(super) struct Guests<C = Fate> {
    /// The number of connections from which on one makes room for each further one.
    room: usize,
    present: RefCell<Vec<Rc<Guest<C>>>>,
}

/// One of them.
pub(super) struct Guest<C = Fate> {
    connection: C,
    /// `None` at a Unix socket.
    address: Option<IpAddr>,
    has_asked: Cell<bool>,
    /// When it came, or its last answer was given.
    quiet_since: Cell<Time>,
    /// Requests that are being answered.
    asking: Cell<usize>,
    /// Those of them that are no probes.
    counted: Cell<usize>,
    is_sent_away: Cell<bool>,
}

/// A connection that can be ended.
pub(super) trait Ends {
    /// Resets it: one that says nothing would not notice an orderly end either, and keep its place
    /// for longer.
    fn end(&self);
}

impl Ends for Fate {
    fn end(&self) {
        self.abort();
    }
}

impl Guests {
    /// Takes in a connection, for as long as the result lives.
    pub(super) fn welcome(self: &Rc<Self>, stream: &Stream, now: Time) -> Stay {
        let address = stream.peer().addr().map(|addr| addr.ip().to_canonical());
        self.enter(stream.fate(), address, now)
    }
}

impl<C: Ends> Guests<C> {
    pub(super) fn new(room: usize) -> Guests<C> {
        Guests { room, present: RefCell::default() }
    }

    fn enter(self: &Rc<Self>, connection: C, address: Option<IpAddr>, now: Time) -> Stay<C> {
        let guest = Rc::new(Guest {
            connection,
            address,
            has_asked: Cell::new(false),
            quiet_since: Cell::new(now),
            asking: Cell::new(0),
            counted: Cell::new(0),
            is_sent_away: Cell::new(false),
        });
        let mut present = self.present.borrow_mut();
        let stays = |guest: &&Rc<Guest<C>>| !guest.is_sent_away.get();
        if present.iter().filter(stays).count() >= self.room {
            let quiet = present.iter().filter(stays).filter(|guest| guest.asking.get() == 0);
            if let Some(goes) = quiet.min_by_key(|guest| (guest.has_asked.get(), guest.quiet_since.get())) {
                goes.is_sent_away.set(true);
                goes.connection.end();
            }
        }
        present.push(guest.clone());
        Stay { guests: self.clone(), guest }
    }

    /// Requests of this address that are being answered, without probes.
    pub(super) fn asking_from(&self, address: Option<IpAddr>) -> usize {
        let present = self.present.borrow();
        present.iter().filter(|guest| guest.address == address).map(|guest| guest.counted.get()).sum()
    }
}

impl<C> Guest<C> {
    pub(super) fn address(&self) -> Option<IpAddr> {
        self.address
    }

    /// A request came, which is answered once the result is informed of it or dropped, at this time
    /// of a clock. Until the drop it counts for its address, unless it is a probe.
    pub(super) fn asks(self: &Rc<Self>, is_probe: bool, now: impl Fn() -> Time + 'static) -> Asking
    where
        C: 'static,
    {
        self.has_asked.set(true);
        self.asking.set(self.asking.get() + 1);
        let counted = usize::from(!is_probe);
        self.counted.set(self.counted.get() + counted);
        let (guest, of_address) = (self.clone(), self.clone());
        let answered = move || {
            guest.asking.set(guest.asking.get() - 1);
            guest.quiet_since.set(now());
        };
        let leaves = move || of_address.counted.set(of_address.counted.get() - counted);
        Asking { answered: Some(Box::new(answered)), leaves: Some(Box::new(leaves)) }
    }
}

/// A request that is being answered, until its drop at the latest.
pub(super) struct Asking {
    answered: Option<Box<dyn FnOnce()>>,
    /// It counts no more for its address.
    leaves: Option<Box<dyn FnOnce()>>,
}

impl Asking {
    /// The answer is there, and its connection may make room from now on.
    pub(super) fn is_answered(&mut self) {
        if let Some(answered) = self.answered.take() {
            answered();
        }
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        self.is_answered();
        if let Some(leaves) = self.leaves.take() {
            leaves();
        }
    }
}

/// A connection that is there, until its drop.
pub(super) struct Stay<C = Fate> {
    guests: Rc<Guests<C>>,
    guest: Rc<Guest<C>>,
}

impl<C> Stay<C> {
    pub(super) fn guest(&self) -> &Rc<Guest<C>> {
        &self.guest
    }

    /// True if it had to make room.
    pub(super) fn is_sent_away(&self) -> bool {
        self.guest.is_sent_away.get()
    }
}

impl<C> Drop for Stay<C> {
    fn drop(&mut self) {
        self.guests.present.borrow_mut().retain(|guest| !Rc::ptr_eq(guest, &self.guest));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A connection of this number, which writes itself down as it is ended.
    struct Noted(usize, Rc<RefCell<Vec<usize>>>);

    impl Ends for Noted {
        fn end(&self) {
            self.1.borrow_mut().push(self.0);
        }
    }

    fn at(second: u64) -> Time {
        Time::from_nanos(second * 1_000_000_000)
    }

    struct Case {
        guests: Rc<Guests<Noted>>,
        ended: Rc<RefCell<Vec<usize>>>,
        stays: Vec<Option<Stay<Noted>>>,
    }

    impl Case {
        fn new(room: usize) -> Case {
            Case { guests: Rc::new(Guests::new(room)), ended: Rc::default(), stays: Vec::new() }
        }

        /// The next connection comes, at the second of its number.
        fn comes(&mut self) {
            let number = self.stays.len();
            let address = Some([127, 0, 0, number as u8 % 2 + 1].into());
            let noted = Noted(number, self.ended.clone());
            self.stays.push(Some(self.guests.enter(noted, address, at(number as u64))));
        }

        fn asks(&self, number: usize) -> Asking {
            self.stays[number].as_ref().unwrap().guest().asks(false, || at(100))
        }

        fn ended(&self) -> Vec<usize> {
            self.ended.take()
        }
    }

    #[test]
    fn silent_ones_go_first_and_the_oldest_of_them() {
        let mut case = Case::new(3);
        (0..3).for_each(|_| case.comes());
        assert!(case.ended().is_empty(), "there is room");
        let asking = case.asks(0);
        case.comes();
        assert_eq!(case.ended(), [1]);
        case.comes();
        assert_eq!(case.ended(), [2], "one that was ended counts no more");
        drop(asking);
        case.comes();
        assert_eq!(case.ended(), [3], "the first one has asked");
        (0..3).for_each(|_| drop(case.asks(4)));
        drop(case.asks(5));
        case.comes();
        case.comes();
        assert_eq!(
            case.ended(),
            [0, 6],
            "it was answered as early as the others, and a silent one is there then"
        );
    }

    #[test]
    fn requests_that_are_answered_are_never_cut() {
        let mut case = Case::new(2);
        let asking: Vec<Asking> = (0..2)
            .map(|number| {
                case.comes();
                case.asks(number)
            })
            .collect();
        case.comes();
        assert!(case.ended().is_empty(), "it is one more than there is room for");
        case.comes();
        assert_eq!(case.ended(), [2]);
        drop(asking);
        case.stays[0] = None;
        case.comes();
        assert_eq!(case.ended(), [3]);
    }

    #[test]
    fn answer_that_is_not_read_keeps_no_place() {
        let mut case = Case::new(1);
        case.comes();
        let mut asking = case.asks(0);
        asking.is_answered();
        case.comes();
        assert_eq!(case.ended(), [0]);
        let one = Some([127, 0, 0, 1].into());
        assert_eq!(case.guests.asking_from(one), 1, "its memory is in use");
        drop(asking);
        assert_eq!(case.guests.asking_from(one), 0);
    }

    #[test]
    fn requests_of_an_address_are_counted_without_probes() {
        let mut case = Case::new(10);
        (0..4).for_each(|_| case.comes());
        let (one, other) = (Some([127, 0, 0, 1].into()), Some([127, 0, 0, 2].into()));
        let asking = [case.asks(0), case.asks(2), case.asks(3)];
        let probe = case.stays[0].as_ref().unwrap().guest().asks(true, || at(0));
        assert_eq!((case.guests.asking_from(one), case.guests.asking_from(other)), (2, 1));
        drop((asking, probe));
        assert_eq!((case.guests.asking_from(one), case.guests.asking_from(other)), (0, 0));
    }
}
