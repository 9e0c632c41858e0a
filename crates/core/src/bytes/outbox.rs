//! Bytes queued for one peer.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem;

use bytes::{BufMut, Bytes};
use ringserve_buf::{Lease, ReplyWriter};

use super::batch::LENT_MAX;
use crate::{Batch, Frame};

/// Frames below this are copied: copying 16 x 64 bytes costs 15 % less than lending them, and 4 KiB
/// is where a copy starts to show beside a send.
pub(crate) const LEND_BYTES_MIN: usize = 4096;

/// A lease pins its whole buffer, so a frame is lent only if it covers at least this part of it.
const LEND_SHARE_MIN: usize = 4;

/// Owned bytes below this size are copied: measured on both drivers, a lease and a gathered send
/// cost as much as a copy of 16 to 32 KiB.
pub const OWNED_BYTES_MIN: usize = 32 * 1024;

/// The bytes that wait for a connection's next send; a framing writes into it.
pub struct Outbox<'a> {
    pub(crate) batch: &'a mut Batch,
    /// False when receive memory is short: then nothing is lent.
    lend: bool,
}

impl<'a> Outbox<'a> {
    /// Writes to the end of `batch`, lending large frames if `lend`.
    #[inline]
    pub fn new(batch: &'a mut Batch, lend: bool) -> Outbox<'a> {
        Outbox { batch, lend }
    }

    /// Bytes waiting.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.batch.len()
    }

    /// Appends a copy of `bytes`.
    #[inline]
    pub fn put(&mut self, bytes: &[u8]) {
        self.batch.put(bytes);
    }

    /// Appends copies of both.
    #[inline(always)]
    pub(crate) fn put_two(&mut self, bytes: &[u8], end: &[u8]) {
        self.batch.put_two(bytes, end);
    }

    /// Appends a payload. It is copied when small, and lent when it is a frame of 4 KiB or more
    /// that covers at least a quarter of its receive buffer, or owned bytes of 32 KiB or more.
    #[inline(always)]
    pub fn payload(&mut self, payload: Payload<'_>) {
        let bytes = payload.bytes();
        if bytes.len() < LEND_BYTES_MIN {
            self.batch.put(bytes);
        } else {
            self.large(payload);
        }
    }

    /// Appends a payload followed by `end`, a few bytes.
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

    /// Appends bytes that others share.
    pub(crate) fn shared(&mut self, bytes: &Bytes) {
        if bytes.len() < OWNED_BYTES_MIN {
            self.batch.put(bytes);
        } else {
            self.lend_owned(bytes.clone().into());
        }
    }

    /// Appends owned bytes without copying them; they are kept until they are sent.
    fn lend_owned(&mut self, owned: OwnedPayload) {
        if self.batch.lent.len() == LENT_MAX {
            return self.batch.put(owned.bytes());
        }
        match owned.into_lease(self.batch.release) {
            Some(lease) => self.batch.lend(lease),
            None => self.batch.refused = true,
        }
    }

    #[cold]
    fn large(&mut self, payload: Payload<'_>) {
        match payload {
            Payload::Bytes(bytes) => self.batch.put(bytes),
            Payload::Frame(frame) => match lendable(frame, self.lend) {
                Ok(lease) => self.batch.lend(lease),
                Err(lease) => self.batch.put(&lease),
            },
            Payload::Owned(owned) if owned.bytes().len() < OWNED_BYTES_MIN => self.batch.put(owned.bytes()),
            Payload::Owned(owned) => self.lend_owned(owned),
        }
    }
}

/// The lease of a frame, if the frame is worth the buffer that it pins.
fn lendable(frame: Frame, lend: bool) -> Result<Lease, Lease> {
    let lease = frame.into_lease();
    let is_lent =
        lend && lease.len() >= LEND_BYTES_MIN && lease.len() * LEND_SHARE_MIN >= lease.pinned_bytes();
    if is_lent { Ok(lease) } else { Err(lease) }
}

/// The content of a reply: bytes to copy, or bytes that may be sent without a copy.
#[derive(Debug)]
pub enum Payload<'a> {
    /// Bytes that are copied.
    Bytes(&'a [u8]),
    /// A received frame. Its payload is copied when small and lent when large.
    Frame(Frame),
    /// Bytes that are copied when few, and otherwise kept until they are sent.
    Owned(OwnedPayload),
}

/// Bytes that a [`Payload`] owns, alone or shared.
#[derive(Debug)]
pub struct OwnedPayload(Owner);

#[derive(Debug)]
enum Owner {
    Bytes(Bytes),
    Vec(Vec<u8>),
    Arc(Arc<[u8]>),
}

impl OwnedPayload {
    /// The bytes.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        match &self.0 {
            Owner::Bytes(bytes) => bytes,
            Owner::Vec(bytes) => bytes,
            Owner::Arc(bytes) => bytes,
        }
    }

    /// A lease on the bytes. `None` if the system has no memory for the lease, or if there are 4
    /// GiB or more of them, which no limit lets into an outbox.
    pub(crate) fn into_lease(self, release: fn(Bytes)) -> Option<Lease> {
        u32::try_from(self.bytes().len()).ok()?;
        match self.0 {
            Owner::Bytes(bytes) => Lease::try_from_owner(SharedOwner { bytes, release }),
            Owner::Vec(bytes) => Lease::try_from_vec(bytes),
            Owner::Arc(bytes) => Lease::try_from_owner(bytes),
        }
    }
}

/// Shared bytes, whose owner is dropped with `release`.
struct SharedOwner {
    bytes: Bytes,
    release: fn(Bytes),
}

impl AsRef<[u8]> for SharedOwner {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for SharedOwner {
    fn drop(&mut self) {
        (self.release)(mem::take(&mut self.bytes));
    }
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
            Payload::Owned(owned) => owned.bytes(),
        }
    }

    /// Writes the payload as a part of a reply, as [`Outbox::payload`] does.
    #[inline]
    pub(crate) fn write_to(self, out: &mut ReplyWriter<'_>, lend: bool) {
        match self {
            Payload::Bytes(bytes) => out.put_slice(bytes),
            payload => payload.write_kept_to(out, lend),
        }
    }

    fn write_kept_to(self, out: &mut ReplyWriter<'_>, lend: bool) {
        match self {
            Payload::Bytes(bytes) => out.put_slice(bytes),
            Payload::Frame(frame) => match lendable(frame, lend) {
                Ok(lease) => out.lend(lease),
                Err(lease) => out.put_slice(&lease),
            },
            Payload::Owned(OwnedPayload(Owner::Bytes(bytes))) => out.put_owned(bytes),
            Payload::Owned(owned) if owned.bytes().len() < OWNED_BYTES_MIN => out.put_slice(owned.bytes()),
            Payload::Owned(OwnedPayload(Owner::Vec(bytes))) => out.put_owned(bytes),
            Payload::Owned(OwnedPayload(Owner::Arc(bytes))) => out.put_owned(Bytes::from_owner(bytes)),
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

impl From<Bytes> for Payload<'_> {
    #[inline]
    fn from(bytes: Bytes) -> Self {
        Payload::Owned(bytes.into())
    }
}

impl From<Bytes> for OwnedPayload {
    #[inline]
    fn from(bytes: Bytes) -> Self {
        OwnedPayload(Owner::Bytes(bytes))
    }
}

impl From<Vec<u8>> for Payload<'_> {
    #[inline]
    fn from(bytes: Vec<u8>) -> Self {
        Payload::Owned(OwnedPayload(Owner::Vec(bytes)))
    }
}

impl From<Box<[u8]>> for Payload<'_> {
    fn from(bytes: Box<[u8]>) -> Self {
        bytes.into_vec().into()
    }
}

impl From<String> for Payload<'_> {
    #[inline]
    fn from(text: String) -> Self {
        text.into_bytes().into()
    }
}

impl From<Arc<[u8]>> for Payload<'_> {
    #[inline]
    fn from(bytes: Arc<[u8]>) -> Self {
        Payload::Owned(OwnedPayload(Owner::Arc(bytes)))
    }
}
