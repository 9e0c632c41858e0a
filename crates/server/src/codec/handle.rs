//! Pushing items from other code on the shard.

use std::cell::{OnceCell, RefCell};
use std::fmt;
use std::rc::Rc;

use bytes::BytesMut;
use tokio_util::codec::Encoder;

use super::spare::Spare;
use crate::shard::face::conn_handle::{LocalHandle, PushError};

/// The codec of a connection, once it was made.
pub(super) struct Place<C> {
    codec: RefCell<Option<C>>,
    /// The codec, moved here when the first handle is made.
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

/// Pushes items to a connection from other code on its shard, encoded by the connection's codec.
/// The first handle of a connection allocates; a push does not.
///
/// Another thread pushes bytes: it encodes the item by its own codec and gives the bytes to
/// [`ConnHandle::push_raw`](crate::ConnHandle::push_raw), once for many connections. If the encoder
/// keeps state for a connection, send the item to the shard instead, through a
/// [`Mesh`](crate::sync::Mesh).
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
    /// Those of [`LocalHandle::push`], before the item is encoded, and the encoder's. Nothing is
    /// queued then.
    ///
    /// # Panics
    /// If the codec of this connection is in use, as inside
    /// [`CodecCx::with_codec`](super::CodecCx::with_codec).
    pub fn push<I>(&self, item: I) -> Result<(), CodecPushError<C::Error>>
    where
        C: Encoder<I>,
    {
        self.handle.check().map_err(CodecPushError::Push)?;
        let encode = |bytes: &mut BytesMut| self.codec.borrow_mut().encode(item, bytes);
        let push = |bytes: &[u8]| self.handle.push_raw(bytes);
        self.spare.encoded(encode, push).map_err(CodecPushError::Encoder)?.map_err(CodecPushError::Push)
    }

    /// The handle of the connection, to check whether it is gone, to wait for room or for its end.
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

/// The reason why [`CodecHandle::push`] queued nothing.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CodecPushError<E> {
    /// The connection takes no push now.
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

ringserve_buf::debug_is_display!(CodecPushError<E>, [E: fmt::Display]);

impl<E: fmt::Debug + fmt::Display> std::error::Error for CodecPushError<E> {}
