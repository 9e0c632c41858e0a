//! What may stand between a socket and the framing of its connections: encryption, or another layer that changes bytes.
//!
//! A listener has a [`Transport`] or none; each of its connections has a [`Channel`] then. A channel calls no kernel and reads no
//! clock: received bytes go in, plain bytes and bytes to send come out. A connection without one costs nothing for there being
//! channels.
//!
//! ```text
//!   begin ──▶ open, work .. ──▶ Ready ──▶ the service's open ──▶ open, seal .. ──▶ finish
//!             the handshake                                      records          the end, announced
//! ```

use alloc::boxed::Box;
use alloc::rc::Rc;
use alloc::vec::Vec;
use core::any::Any;

use ringserve_buf::LeaseMut;

use crate::{Batch, CloseReason};

/// What the connections of a listener have in common. One value a shard.
pub trait Transport: 'static {
    /// A connection begins. What is said before the peer says anything is appended to `out`. `None` if the system has no memory for
    /// a channel.
    fn begin(&self, out: &mut Vec<u8>) -> Option<Box<dyn Channel>>;
}

/// One connection's state of a [`Transport`].
///
/// What a method appends to `out` leaves in the order in which it was appended, also behind a fault.
pub trait Channel: 'static {
    /// Takes bytes from the front of `wire`, as far as one record goes, and says what came of them. It is called again until it
    /// answers [`More`](Unsealed::More), which it does only once `wire` is empty: the start of a record is the channel's to keep.
    /// With an empty `wire` it goes on with what it keeps.
    fn open(&mut self, wire: &mut LeaseMut, out: &mut Vec<u8>) -> Unsealed;

    /// Does the step for which [`open`](Channel::open) answered [`Work`](Unsealed::Work). It is asked for between turns, at most one
    /// connection at a time, when the shard has time for a step that costs as much as hundreds of frames.
    fn work(&mut self, out: &mut Vec<u8>) -> Unsealed;

    /// Appends `plain`, sealed, to `out`. Called once for what leaves in one send, and never again for the same bytes.
    ///
    /// # Errors
    /// Where nothing more can be sent. The connection is closed with the fault's reason.
    fn seal(&mut self, plain: &Batch, out: &mut Vec<u8>) -> Result<(), Fault>;

    /// Appends what tells the peer that nothing more will come. Called once at most, behind all replies.
    fn finish(&mut self, out: &mut Vec<u8>);

    /// Bytes of memory that grow with what the peer sends: of an unfinished record or handshake message. They count as held by the
    /// connection. What each channel costs does not.
    fn held_bytes(&self) -> usize;

    /// True if a record began and has not ended, so that a peer that ends now has been cut off.
    fn is_mid_record(&self) -> bool;

    /// The peer ended its side without saying so before, behind a whole record: a reason if that is a fault. Asked once at most, and
    /// not behind [`Closed`](Unsealed::Closed).
    fn cut_off(&self) -> Option<CloseReason> {
        None
    }

    /// What the handshake found out, once it is [`Ready`](Unsealed::Ready): a service may ask for it by its type.
    fn facts(&self) -> Option<Rc<dyn Any>> {
        None
    }
}

/// What [`Channel::open`] made of received bytes.
#[derive(Debug)]
pub enum Unsealed {
    /// Bytes for the framing. Only after [`Ready`](Unsealed::Ready).
    Plain(LeaseMut),
    /// Nothing yet: more must come.
    More,
    /// The handshake is done: the service is asked. Once.
    Ready,
    /// [`Channel::work`] is to be called. What `wire` held was taken.
    Work,
    /// The peer said that nothing more will come. What `wire` still holds is ignored.
    Closed,
    /// The peer broke the rules: the connection is closed once `out` has left.
    Fault(Fault),
}

/// Why a [`Channel`] cannot go on. What tells the peer is in `out`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault(pub CloseReason);
