//! What is queued for one peer.

use crate::{Batch, Frame};

/// Frames below this are copied: copying 16 x 64 bytes costs 15 % less than lending them, and 4 KiB is where
/// a copy starts to show beside a send.
const LEND_BYTES_MIN: usize = 4096;

/// A lease pins its whole buffer, so a frame is lent only if it covers at least this part of it.
const LEND_SHARE_MIN: usize = 4;

/// The bytes waiting for a connection's next send; a framing writes into it.
pub struct Outbox<'a> {
    batch: &'a mut Batch,
    /// False when receive memory is short: then nothing is lent.
    lend: bool,
}

impl<'a> Outbox<'a> {
    /// Writes to the end of `batch`, lending large frames if `lend`.
    #[inline]
    pub fn new(batch: &'a mut Batch, lend: bool) -> Outbox<'a> {
        Outbox { batch, lend }
    }

    /// Appends a copy of `bytes`.
    #[inline]
    pub fn put(&mut self, bytes: &[u8]) {
        self.batch.put(bytes);
    }

    /// Appends a payload: copied when small, lent when it is a frame of 4 KiB or more that covers at least a
    /// quarter of its receive buffer.
    #[inline(always)]
    pub fn payload(&mut self, payload: Payload<'_>) {
        let bytes = payload.bytes();
        if bytes.len() < LEND_BYTES_MIN {
            self.batch.put(bytes);
        } else {
            self.large(payload);
        }
    }

    /// The same with `end`, of a few bytes, behind it.
    #[inline(always)]
    pub(crate) fn payload_and(&mut self, payload: Payload<'_>, end: &[u8]) {
        let bytes = payload.bytes();
        if bytes.len() < LEND_BYTES_MIN {
            self.batch.put_two(bytes, end);
        } else {
            self.large(payload);
            self.batch.put(end);
        }
    }

    #[cold]
    fn large(&mut self, payload: Payload<'_>) {
        let lease = match payload {
            Payload::Frame(frame) => frame.into_lease(),
            Payload::Bytes(bytes) => return self.batch.put(bytes),
        };
        if self.lend && lease.len() * LEND_SHARE_MIN >= lease.pinned_bytes() {
            self.batch.lend(lease);
        } else {
            self.batch.put(&lease);
        }
    }
}

/// What a reply says: bytes to copy, or a frame that may be lent.
#[derive(Debug)]
pub enum Payload<'a> {
    /// Bytes that are copied.
    Bytes(&'a [u8]),
    /// A received frame. Its payload is copied when small and lent when large.
    Frame(Frame),
}

impl Payload<'_> {
    /// Bytes of payload.
    #[inline]
    pub fn len(&self) -> usize {
        self.bytes().len()
    }

    /// True if there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The payload.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        match self {
            Payload::Bytes(bytes) => bytes,
            Payload::Frame(frame) => frame,
        }
    }
}

impl<H> From<Frame<H>> for Payload<'_> {
    #[inline]
    fn from(frame: Frame<H>) -> Self {
        Payload::Frame(frame.into_parts().0)
    }
}

impl<'a, T: AsRef<[u8]> + ?Sized> From<&'a T> for Payload<'a> {
    #[inline]
    fn from(bytes: &'a T) -> Self {
        Payload::Bytes(bytes.as_ref())
    }
}
