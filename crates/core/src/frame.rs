//! One received frame.

use core::fmt;
use core::ops::Deref;

use bytes::Bytes;
use ringserve_buf::Lease;

/// A frame as it was received: an owned lease that derefs to the payload.
///
/// It may be kept across awaits and in the session, but does not leave its core (`!Send`); what has to leave
/// is copied, with [`to_bytes`](Frame::to_bytes). While it lives it pins the receive buffer it lies in.
#[derive(Clone, Default)]
pub struct Frame {
    wire: Lease,
    skip: u32,
    len: u32,
}

impl Frame {
    /// A frame whose payload is `len` bytes of `wire` after the first `skip`.
    ///
    /// # Panics
    /// If they lie outside.
    #[inline]
    pub fn new(wire: Lease, skip: usize, len: usize) -> Frame {
        assert!(skip.checked_add(len).is_some_and(|end| end <= wire.len()), "payload outside of the frame");
        Frame { wire, skip: skip as u32, len: len as u32 }
    }

    /// The same, of a payload that was seen to lie inside.
    #[inline]
    pub(crate) fn sound(wire: Lease, skip: usize, len: usize) -> Frame {
        debug_assert!(skip + len <= wire.len());
        Frame { wire, skip: skip as u32, len: len as u32 }
    }

    /// All bytes of the frame, with what the framing put around the payload.
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

impl Deref for Frame {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.wire[self.skip as usize..(self.skip + self.len) as usize]
    }
}

impl AsRef<[u8]> for Frame {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Frame({:?})", Bytes::copy_from_slice(&self[..self.len().min(64)]))
    }
}
