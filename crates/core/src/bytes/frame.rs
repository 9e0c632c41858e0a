//! One received frame.

use core::fmt;
use core::ops::Deref;

use bytes::Bytes;
use ringserve_buf::Lease;

/// A received frame: an owned lease that derefs to the payload.
///
/// It may be kept across awaits and in the session, but does not leave its core (`!Send`): copy
/// bytes that have to leave, with [`to_bytes`](Frame::to_bytes). As long as it lives it pins the
/// receive buffer that it lies in.
///
/// `H` is the [head](crate::framing::TypedFraming::Head) that its framing handed over.
#[derive(Clone, Default)]
pub struct Frame<H = ()> {
    wire: Lease,
    skip: u32,
    len: u32,
    head: H,
}

impl Frame {
    /// A frame whose payload is `len` bytes of `wire` after the first `skip`.
    ///
    /// # Panics
    /// If they lie outside.
    #[inline]
    pub fn new(wire: Lease, skip: usize, len: usize) -> Frame {
        assert!(skip.checked_add(len).is_some_and(|end| end <= wire.len()), "payload outside of the frame");
        Frame { wire, skip: skip as u32, len: len as u32, head: () }
    }

    /// The same frame with a head.
    #[inline]
    pub fn with_head<H>(self, head: H) -> Frame<H> {
        Frame { wire: self.wire, skip: self.skip, len: self.len, head }
    }
}

impl<H> Frame<H> {
    /// A frame whose payload is known to lie inside.
    #[inline]
    pub(crate) fn sound(wire: Lease, skip: usize, len: usize, head: H) -> Frame<H> {
        debug_assert!(skip + len <= wire.len());
        Frame { wire, skip: skip as u32, len: len as u32, head }
    }

    /// The head of the frame.
    #[inline]
    pub fn head(&self) -> &H {
        &self.head
    }

    /// The frame and its head.
    #[inline]
    pub fn into_parts(self) -> (Frame, H) {
        (Frame { wire: self.wire, skip: self.skip, len: self.len, head: () }, self.head)
    }

    /// All bytes of the frame, with those that the framing put around the payload.
    #[inline]
    pub fn wire(&self) -> &[u8] {
        &self.wire
    }

    /// A copy of the payload that may leave the core.
    pub fn to_bytes(&self) -> Bytes {
        Bytes::copy_from_slice(self)
    }

    /// The payload as a lease.
    #[inline]
    pub fn into_lease(self) -> Lease {
        let mut lease = self.wire;
        lease.truncate((self.skip + self.len) as usize);
        lease.advance(self.skip as usize);
        lease
    }

    /// True if it lies in a receive buffer.
    #[inline]
    pub(crate) fn is_pooled(&self) -> bool {
        self.wire.is_pooled()
    }

    /// Bytes of memory the frame pins.
    #[inline]
    pub fn pinned_bytes(&self) -> usize {
        self.wire.pinned_bytes()
    }
}

impl<H> Deref for Frame<H> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // Added as words: the compiler knows that they do not wrap.
        let skip = self.skip as usize;
        &self.wire[skip..skip + self.len as usize]
    }
}

impl<H> AsRef<[u8]> for Frame<H> {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl<H> fmt::Debug for Frame<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Frame({:?})", Bytes::copy_from_slice(&self[..self.len().min(64)]))
    }
}
