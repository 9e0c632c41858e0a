//! What may stand between a socket and the framing of its connections: encryption, or another layer that changes bytes.
//!
//! A listener has a [`Transport`] or none; each of its connections has a [`TransportConn`] then. A channel calls no kernel: received
//! bytes go in, plain bytes and bytes to send come out. It should read no clock but in its handshake, as TLS does for the dates of
//! certificates. A connection without one costs nothing for there being channels.
//!
//! ```text
//!   begin ──▶ open, work .. ──▶ Ready ──▶ the service's open ──▶ open, seal .. ──▶ finish
//!             the handshake                                      records          the end, announced
//! ```

use alloc::boxed::Box;
use alloc::rc::Rc;
use alloc::vec::Vec;
use core::any::Any;
use core::cell::{Cell, RefCell};

use ringserve_buf::LeaseMut;

use crate::tables::Chunked;
use crate::{Batch, CloseReason, ConnId};

/// What the connections of a listener have in common. One value a shard.
pub trait Transport: 'static {
    /// A connection begins. What is said before the peer says anything is appended to `out`. `None` if the system has no memory for
    /// a channel.
    fn begin(&self, out: &mut Vec<u8>) -> Option<Box<dyn TransportConn>>;
}

/// One connection's state of a [`Transport`].
///
/// What a method appends to `out` leaves in the order in which it was appended, also behind a fault.
#[doc(alias = "Channel")]
pub trait TransportConn: 'static {
    /// Takes bytes from the front of `wire`, as far as one record goes, and says what came of them. It is called again until it
    /// answers [`More`](TransportEvent::More), which it does only once `wire` is empty: the start of a record is the channel's to keep.
    /// With an empty `wire` it goes on with what it keeps. Bytes that come while [`work`](TransportConn::work) is awaited are handed in
    /// as ever, and answered with [`Work`](TransportEvent::Work) again.
    fn decode(&mut self, wire: &mut LeaseMut, out: &mut Vec<u8>) -> TransportEvent;

    /// Does the step for which [`decode`](TransportConn::decode) answered [`Work`](TransportEvent::Work). It is asked for between turns, at most one
    /// connection at a time, when the shard has time for a step that costs as much as hundreds of frames.
    fn work(&mut self, out: &mut Vec<u8>) -> TransportEvent;

    /// Puts into `plain`, [before](Batch::prepend) all else, what a peer needs to read it, and answers true if it leaves as it is
    /// then, without a copy. Called before [`encode`](TransportConn::encode), which is called if the answer is false; `plain` is not changed
    /// then, unless that is of avail to `encode`. By default it is false.
    fn encode_in_place(&mut self, plain: &mut Batch) -> bool {
        let _ = plain;
        false
    }

    /// Nothing was sent for a second or more, so that what is [sealed](TransportConn::encode) next, at once, is the start of an answer.
    fn on_send_pause(&mut self) {}

    /// Appends `plain`, sealed, to `out`. Called once for what leaves in one send, and never again for the same bytes.
    ///
    /// # Errors
    /// Where nothing more can be sent. The connection is closed with the fault's reason, once `out` has left.
    fn encode(&mut self, plain: &Batch, out: &mut Vec<u8>) -> Result<(), TransportError>;

    /// Appends what it has to say by itself, once it has answered [`Speaks`](TransportEvent::Speaks) or [asks](TransportConn::on_heartbeat), and
    /// nothing is in flight. So what is owed again and again is said once, however slowly the peer takes it.
    fn write_control(&mut self, out: &mut Vec<u8>) {
        let _ = out;
    }

    /// The peer was silent for [`Limits::heartbeat_interval`](crate::Limits::heartbeat_interval): true if the channel will ask for a
    /// sign of life when it [speaks](TransportConn::write_control), as it is about to. By default the service is asked to.
    fn on_heartbeat(&mut self) -> bool {
        false
    }

    /// The connection ends for this reason. Called before [`finish`](TransportConn::finish), which may tell the peer; not where only writing
    /// ends.
    fn on_close(&mut self, reason: CloseReason) {
        let _ = reason;
    }

    /// Appends what tells the peer that nothing more will come. Called once at most, behind all replies, and only of a channel
    /// that was [`Ready`](TransportEvent::Ready) and has answered no fault.
    fn finish(&mut self, out: &mut Vec<u8>);

    /// Bytes of memory that grow with what the peer sends: of an unfinished record or handshake message. They count as held by the
    /// connection. What each channel costs does not.
    fn held_bytes(&self) -> usize;

    /// Bytes of memory that the peer's handshake takes as long as the connection, as what a long request says, beyond what each
    /// channel costs: they count as held by the connection. Asked for once, when it is [`Ready`](TransportEvent::Ready). To count them takes
    /// some 60 bytes, so fewer than that are best left out. By default there are none.
    fn kept_bytes(&self) -> usize {
        0
    }

    /// True if a record began and has not ended, so that a peer that ends now has been cut off.
    fn is_mid_record(&self) -> bool;

    /// True if [`decode`](TransportConn::decode) would answer [`More`](TransportEvent::More) to an empty `wire`, with nothing
    /// [held](TransportConn::held_bytes) and [no record under way](TransportConn::is_mid_record): it need not be asked then. By default it is asked.
    fn wants_more(&self) -> bool {
        false
    }

    /// The peer sent FIN behind a whole record, or [said](TransportEvent::Closed) that nothing more would come: the reason if that is a
    /// fault, since it had to say so and did not, or was in the middle of something.
    fn eof_error(&self) -> Option<CloseReason> {
        None
    }

    /// What the handshake found out, once it is [`Ready`](TransportEvent::Ready): a service may ask for it by its type. Asked for once, and
    /// kept as long as the connection.
    fn info(&self) -> Option<Rc<dyn Any>> {
        None
    }

    /// The same where [`info`](TransportConn::info) are none, for what is made only once a service asks, so that a connection whose
    /// service never does has no memory for it. Asked for as often as services do, and once more before the channel is dropped;
    /// what is answered is best the same each time. None before it is [`Ready`](TransportEvent::Ready). A panic is one of the service.
    fn info_on_demand(&self) -> Option<Rc<dyn Any>> {
        None
    }
}

/// What [`TransportConn::decode`] made of received bytes.
#[derive(Debug)]
#[doc(alias = "Unsealed")]
pub enum TransportEvent {
    /// Bytes for the framing. Only after [`Ready`](TransportEvent::Ready).
    Plain(LeaseMut),
    /// Nothing yet: more must come.
    More,
    /// The handshake is done: the service is asked. Once.
    Ready,
    /// [`TransportConn::work`] is to be called. What `wire` held was taken.
    Work,
    /// [`TransportConn::write_control`] is to be called, as soon as nothing is in flight. Only after [`Ready`](TransportEvent::Ready). Meanwhile it goes on.
    Speaks,
    /// The peer said that nothing more will come. What `wire` still holds is ignored.
    Closed,
    /// The peer broke the rules: the connection is closed once `out` has left.
    Fault(TransportError),
}

/// Why a [`TransportConn`] cannot go on. What tells the peer is in `out`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[doc(alias = "Fault")]
pub struct TransportError(pub CloseReason);

/// The channels of a shard's connections, by slot. Without memory until there is one.
///
/// One that is called is taken out as long as that lasts, so that others' code which it calls may ask for the facts of others.
#[derive(Default)]
pub(crate) struct ChannelTable {
    entries: RefCell<Chunked<Cell<Option<Entry>>>>,
}

/// The connection that a channel is of, and the channel.
type Entry = (ConnId, Box<dyn TransportConn>);

impl ChannelTable {
    /// Makes room for a connection's channel. False if the system has no memory for it.
    pub(crate) fn make_room(&self, id: ConnId) -> bool {
        self.entries.borrow_mut().grow_to(id.slot())
    }

    /// Puts a connection's channel where there is [room](ChannelTable::make_room).
    pub(crate) fn put(&self, id: ConnId, channel: Box<dyn TransportConn>) {
        if let Some(entry) = self.entries.borrow().get(id.slot()) {
            entry.set(Some((id, channel)));
        }
    }

    #[inline]
    pub(crate) fn take(&self, id: ConnId) -> Option<Box<dyn TransportConn>> {
        let entries = self.entries.borrow();
        let place = entries.get(id.slot())?;
        match place.take() {
            Some((of, channel)) if of == id => Some(channel),
            others => {
                place.set(others);
                None
            }
        }
    }

    /// Any one, from the slot `from` on, with the next slot.
    pub(crate) fn take_any(&self, from: u32) -> Option<(u32, Box<dyn TransportConn>)> {
        let entries = self.entries.borrow();
        // At most `SLOTS_MAX`.
        let mut slots = from..entries.len() as u32;
        slots.find_map(|slot| Some((slot + 1, entries.get(slot)?.take()?.1)))
    }

    /// Calls a connection's channel, if it is there. It stays if that panics.
    #[inline]
    pub(crate) fn ask<T>(&self, id: ConnId, call: impl FnOnce(&mut dyn TransportConn) -> T) -> Option<T> {
        // Borrowed as long as the call lasts, which may look for others, and makes no room for any.
        let entries = self.entries.borrow();
        let place = entries.get(id.slot())?;
        let mut taken = BorrowedConn { place, entry: place.take() };
        match &mut taken.entry {
            Some((of, channel)) if *of == id => Some(call(&mut **channel)),
            _ => None,
        }
    }

    /// Slots for which there is memory.
    #[cfg(test)]
    pub(crate) fn room(&self) -> usize {
        self.entries.borrow().len()
    }

    /// True if a connection's channel is there.
    pub(crate) fn has(&self, id: ConnId) -> bool {
        self.ask(id, |_| ()).is_some()
    }

    /// How many connections have a channel.
    pub(crate) fn count(&self) -> usize {
        let is_some = |place: &&Cell<Option<Entry>>| {
            let entry = place.take();
            let is_some = entry.is_some();
            place.set(entry);
            is_some
        };
        self.entries.borrow().iter().filter(is_some).count()
    }
}

/// A channel that is called, until it is put back.
struct BorrowedConn<'a> {
    place: &'a Cell<Option<Entry>>,
    entry: Option<Entry>,
}

impl Drop for BorrowedConn<'_> {
    #[inline]
    fn drop(&mut self) {
        self.place.set(self.entry.take());
    }
}

/// What the handshakes of a lane's connections found out, by slot. Holds no memory until there is something.
#[derive(Default)]
pub(crate) struct Facts {
    entries: RefCell<Chunked<Option<Fact>>>,
}

/// The connection that the rest is of, and what is known of it.
type Fact = (ConnId, Rc<dyn Any>);

impl Facts {
    /// Keeps what was found out of a connection. False if the system has no memory for it.
    pub(crate) fn keep(&self, id: ConnId, facts: Rc<dyn Any>) -> bool {
        let mut entries = self.entries.borrow_mut();
        let Some(entry) = entries.entry(id.slot()) else { return false };
        let before = entry.replace((id, facts));
        drop(entries);
        // Its drop is another's code.
        drop(before);
        true
    }

    pub(crate) fn of(&self, id: ConnId) -> Option<Rc<dyn Any>> {
        let entries = self.entries.borrow();
        let (of, facts) = entries.get(id.slot())?.as_ref()?;
        (*of == id).then(|| facts.clone())
    }

    /// The connection is gone.
    pub(crate) fn forget(&self, id: ConnId) {
        let mut entries = self.entries.borrow_mut();
        let is_its = |entry: &mut Fact| entry.0 == id;
        let gone = entries.get_mut(id.slot()).and_then(|entry| entry.take_if(is_its));
        drop(entries);
        drop(gone);
    }
}
