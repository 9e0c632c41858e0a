//! The layer between a socket and the framing of its connections: encryption, or another one that
//! changes bytes.
//!
//! A listener has a [`Transport`] or none; each of its connections has a [`TransportConn`] then. A
//! channel makes no system calls: received bytes go in, plain bytes and bytes to send come out. It
//! should read no clock except in its handshake, as TLS does for the dates of certificates.
//! Connections without a channel pay nothing for the feature.
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

/// State that the connections of a listener have in common. One value per shard.
pub trait Transport: 'static {
    /// Begins a connection. Bytes to send before the peer sends any are appended to `out`. `None`
    /// if the system has no memory for a channel.
    fn begin(&self, out: &mut Vec<u8>) -> Option<Box<dyn TransportConn>>;
}

/// One connection's state of a [`Transport`].
///
/// Bytes that methods append to `out` are sent in the order in which they were appended, also after
/// a fault.
#[doc(alias = "Channel")]
pub trait TransportConn: 'static {
    /// Takes bytes from the front of `wire`, up to the end of one record, and returns the result.
    /// It is called again until it answers [`More`](TransportEvent::More), which it does only once
    /// `wire` is empty: the channel keeps the start of an unfinished record. With an empty `wire`
    /// it goes on with what it keeps. Bytes that come while [`work`](TransportConn::work) is
    /// awaited are passed in as usual, and answered with [`Work`](TransportEvent::Work) again.
    fn decode(&mut self, wire: &mut LeaseMut, out: &mut Vec<u8>) -> TransportEvent;

    /// Does the step for which [`decode`](TransportConn::decode) answered
    /// [`Work`](TransportEvent::Work). It is called between turns, for at most one connection at a
    /// time, when the shard has time for a step that costs as much as hundreds of frames.
    fn work(&mut self, out: &mut Vec<u8>) -> TransportEvent;

    /// Puts into `plain`, [before](Batch::prepend) all else, what a peer needs to read it, and
    /// returns true if the batch can be sent as it is then, without a copy. Called before
    /// [`encode`](TransportConn::encode), which is called if the answer is false; `plain` is not
    /// changed then, unless that helps `encode`. By default it is false.
    fn encode_in_place(&mut self, plain: &mut Batch) -> bool {
        let _ = plain;
        false
    }

    /// Notes that nothing was sent for a second or more, so that what is
    /// [sealed](TransportConn::encode) next, at once, is the start of an answer.
    fn on_send_pause(&mut self) {}

    /// Appends `plain`, sealed, to `out`. Called once for each send, and never again for the same
    /// bytes.
    ///
    /// # Errors
    /// If nothing more can be sent. The connection is closed with the fault's reason, once `out`
    /// was sent.
    fn encode(&mut self, plain: &Batch, out: &mut Vec<u8>) -> Result<(), TransportError>;

    /// Appends bytes that it sends by itself, once it has answered
    /// [`Speaks`](TransportEvent::Speaks) or [asks](TransportConn::on_heartbeat), and nothing is in
    /// flight. So a message that becomes due several times is sent once, however slowly the peer
    /// takes it.
    fn write_control(&mut self, out: &mut Vec<u8>) {
        let _ = out;
    }

    /// Returns true if the channel will ask the peer, which was silent for
    /// [`Limits::heartbeat_interval`](crate::Limits::heartbeat_interval), for a sign of life in the
    /// [call](TransportConn::write_control) that follows. By default the service is asked to do so.
    fn on_heartbeat(&mut self) -> bool {
        false
    }

    /// Notes the reason for which the connection ends. Called before
    /// [`finish`](TransportConn::finish), which may send it to the peer; not called if only writing
    /// ends.
    fn on_close(&mut self, reason: CloseReason) {
        let _ = reason;
    }

    /// Appends the message that nothing more will come. Called once at most, after all replies, and
    /// only for a channel that was [`Ready`](TransportEvent::Ready) and has answered no fault.
    fn finish(&mut self, out: &mut Vec<u8>);

    /// Bytes of memory that grow with what the peer sends: of an unfinished record or handshake
    /// message. They count as held by the connection. The fixed cost of each channel does not.
    fn held_bytes(&self) -> usize;

    /// Bytes of memory that the peer's handshake occupies as long as the connection lasts, such as
    /// the fields of a long request, beyond the fixed cost of each channel: they count as held by
    /// the connection. Asked for once, when it is [`Ready`](TransportEvent::Ready). To count them
    /// takes about 60 bytes, so fewer than that are best left out. By default there are none.
    fn kept_bytes(&self) -> usize {
        0
    }

    /// True if a record began and has not ended, so that a peer that ends now has been cut off.
    fn is_mid_record(&self) -> bool;

    /// True if [`decode`](TransportConn::decode) would answer [`More`](TransportEvent::More) to an
    /// empty `wire`, with nothing [held](TransportConn::held_bytes) and [no unfinished
    /// record](TransportConn::is_mid_record): it need not be called then. By default it is called.
    fn wants_more(&self) -> bool {
        false
    }

    /// The reason if the end of the input is a fault: the peer sent FIN after a whole record, or
    /// [announced](TransportEvent::Closed) that nothing more would come, but had to announce it and
    /// did not, or was in the middle of something.
    fn eof_error(&self) -> Option<CloseReason> {
        None
    }

    /// Facts from the handshake, once it is [`Ready`](TransportEvent::Ready): a service may ask for
    /// them by their type. Asked for once, and kept as long as the connection.
    fn info(&self) -> Option<Rc<dyn Any>> {
        None
    }

    /// Facts made only when a service asks, if [`info`](TransportConn::info) has none, so that a
    /// connection whose service never asks has no memory for them. Called whenever a service asks,
    /// and once more before the channel is dropped; the answer should be the same each time. `None`
    /// before it is [`Ready`](TransportEvent::Ready). A panic counts as the service's.
    fn info_on_demand(&self) -> Option<Rc<dyn Any>> {
        None
    }
}

/// The result of [`TransportConn::decode`].
#[derive(Debug)]
#[doc(alias = "Unsealed")]
pub enum TransportEvent {
    /// Bytes for the framing. Only after [`Ready`](TransportEvent::Ready).
    Plain(LeaseMut),
    /// Nothing yet: more must come.
    More,
    /// The handshake is done: now the service is asked. Occurs once.
    Ready,
    /// [`TransportConn::work`] must be called. The content of `wire` was taken.
    Work,
    /// [`TransportConn::write_control`] must be called as soon as nothing is in flight. Only after
    /// [`Ready`](TransportEvent::Ready). Decoding goes on meanwhile.
    Speaks,
    /// The peer announced that nothing more will come. The rest of `wire` is ignored.
    Closed,
    /// The peer broke the rules: the connection is closed once `out` was sent.
    Fault(TransportError),
}

/// The reason why a [`TransportConn`] cannot go on. The message for the peer is in `out`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[doc(alias = "Fault")]
pub struct TransportError(pub CloseReason);

/// The channels of a shard's connections, by slot. Without memory until there is one.
#[derive(Default)]
pub(crate) struct ChannelTable {
    entries: RefCell<Chunked<Cell<Option<Entry>>>>,
}

/// A channel, and the connection to which it belongs.
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

    /// Any channel, from the slot `from` on, with the next slot.
    pub(crate) fn take_any(&self, from: u32) -> Option<(u32, Box<dyn TransportConn>)> {
        let entries = self.entries.borrow();
        // At most `SLOTS_MAX`.
        let mut slots = from..entries.len() as u32;
        slots.find_map(|slot| Some((slot + 1, entries.get(slot)?.take()?.1)))
    }

    /// Calls a connection's channel, if it is there. It stays there if the call panics.
    #[inline]
    pub(crate) fn ask<T>(&self, id: ConnId, call: impl FnOnce(&mut dyn TransportConn) -> T) -> Option<T> {
        // Borrowed during the call, which may look for others, and makes no room for any.
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

    /// The number of connections with a channel.
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

/// A channel that is taken out for a call, until it is put back.
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

/// Facts from the handshakes of a lane's connections, by slot. Holds no memory until there are
/// some.
#[derive(Default)]
pub(crate) struct Facts {
    entries: RefCell<Chunked<Option<Fact>>>,
}

/// The facts of a connection, and its id.
type Fact = (ConnId, Rc<dyn Any>);

impl Facts {
    /// Keeps facts of a connection. False if the system has no memory for them.
    pub(crate) fn keep(&self, id: ConnId, facts: Rc<dyn Any>) -> bool {
        let mut entries = self.entries.borrow_mut();
        let Some(entry) = entries.entry(id.slot()) else { return false };
        let before = entry.replace((id, facts));
        drop(entries);
        // Its drop runs others' code.
        drop(before);
        true
    }

    pub(crate) fn of(&self, id: ConnId) -> Option<Rc<dyn Any>> {
        let entries = self.entries.borrow();
        let (of, facts) = entries.get(id.slot())?.as_ref()?;
        (*of == id).then(|| facts.clone())
    }

    /// Forgets a connection that is gone.
    pub(crate) fn forget(&self, id: ConnId) {
        let mut entries = self.entries.borrow_mut();
        let is_its = |entry: &mut Fact| entry.0 == id;
        let gone = entries.get_mut(id.slot()).and_then(|entry| entry.take_if(is_its));
        drop(entries);
        drop(gone);
    }
}
