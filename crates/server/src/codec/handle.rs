//! Items from elsewhere on the shard.

use std::cell::{OnceCell, RefCell};
use std::fmt;
use std::rc::Rc;

use bytes::BytesMut;
use tokio_util::codec::Encoder;

use super::spare::Spare;
use crate::handle::{LocalHandle, PushError};

/// The codec of a connection, once it was asked for.
pub(super) struct Place<C> {
    codec: RefCell<Option<C>>,
    /// It moved here when the first handle was made.
    shared: OnceCell<Rc<RefCell<C>>>,
}

impl<C> Default for Place<C> {
    fn default() -> Place<C> {
        Place { codec: RefCell::default(), shared: OnceCell::new() }
    }
}

impl<C> Place<C> {
    #[inline]
    pub(super) fn with<R>(&self, make: impl FnOnce() -> C, work: impl FnOnce(&mut C) -> R) -> R {
        match self.shared.get() {
            Some(shared) => work(&mut shared.borrow_mut()),
            None => work(self.codec.borrow_mut().get_or_insert_with(make)),
        }
    }

    pub(super) fn share(&self, make: impl FnOnce() -> C) -> Rc<RefCell<C>> {
        let share = || Rc::new(RefCell::new(self.codec.take().unwrap_or_else(make)));
        self.shared.get_or_init(share).clone()
    }
}

/// Pushes items to a connection from elsewhere on its shard, encoded by its codec. The first one for a connection allocates, and
/// a push does not.
///
/// Another thread pushes bytes: it encodes the item by its own codec and gives the bytes to
/// [`ConnHandle::push_raw`](crate::ConnHandle::push_raw), once for many connections. A codec whose encoder keeps state for a
/// connection is reached by sending the item to the shard, as through a [`Mesh`](crate::sync::Mesh).
pub struct CodecHandle<C> {
    handle: LocalHandle,
    codec: Rc<RefCell<C>>,
    spare: Rc<Spare>,
}

impl<C> CodecHandle<C> {
    pub(super) fn new(handle: LocalHandle, codec: Rc<RefCell<C>>, spare: Rc<Spare>) -> CodecHandle<C> {
        CodecHandle { handle, codec, spare }
    }

    /// Queues one item.
    ///
    /// # Errors
    /// Those of [`LocalHandle::push`], where the item was not encoded, and the encoder's, where nothing is queued.
    ///
    /// # Panics
    /// If it is called while the codec of this connection is used, as in [`CodecCx::with_codec`](super::CodecCx::with_codec).
    pub fn push<I>(&self, item: I) -> Result<(), CodecPushError<C::Error>>
    where
        C: Encoder<I>,
    {
        self.handle.check().map_err(CodecPushError::Push)?;
        let encode = |bytes: &mut BytesMut| self.codec.borrow_mut().encode(item, bytes);
        let push = |bytes: &[u8]| self.handle.push_raw(bytes);
        self.spare.encoded(encode, push).map_err(CodecPushError::Encoder)?.map_err(CodecPushError::Push)
    }

    /// The handle for everything else: whether the connection is gone, waiting for room, its end.
    pub fn connection(&self) -> &LocalHandle {
        &self.handle
    }
}

impl<C> Clone for CodecHandle<C> {
    fn clone(&self) -> CodecHandle<C> {
        CodecHandle::new(self.handle.clone(), self.codec.clone(), self.spare.clone())
    }
}

impl<C> fmt::Debug for CodecHandle<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CodecHandle").field(&self.handle).finish()
    }
}

/// Why [`CodecHandle::push`] queued nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CodecPushError<E> {
    /// The connection takes no push.
    Push(PushError),
    /// The encoder refused the item.
    Encoder(E),
}

impl<E: fmt::Display> fmt::Display for CodecPushError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CodecPushError::Push(error) => error.fmt(f),
            CodecPushError::Encoder(error) => error.fmt(f),
        }
    }
}

impl<E: fmt::Debug + fmt::Display> std::error::Error for CodecPushError<E> {}
