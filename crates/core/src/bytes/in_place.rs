//! Payloads that are written where they are sent from, and then framed.

use alloc::borrow::Cow;
use alloc::vec::Vec;

use bytes::Bytes;
use ringserve_buf::{ReplyWriter, Tail};

use super::batch::LENT_MAX;
use super::outbox::{OWNED_BYTES_MIN, Outbox, OwnedPayload};
use crate::Batch;

/// The most room for a header: an arbitrary number. A longer header is written too, and moves the
/// payload.
const HEADER_ROOM_MAX: usize = 32;

/// A payload that user code wrote at the end of an outbox, of which
/// [`Framing::encode_written`](crate::framing::Framing::encode_written) makes a frame. Before it
/// there is room for a header, which is written last, since it may hold the length.
#[derive(Debug)]
pub struct InPlace<'a> {
    batch: &'a mut Batch,
    /// The start of the header among the copied bytes.
    from: usize,
    /// The first lease of the payload.
    lent_from: usize,
    /// Bytes of header, or of room for it.
    header: usize,
    payload_len: usize,
    is_headed: bool,
}

/// The result of user code that writes a reply: nothing, or a `Result`. With an error nothing is
/// sent.
#[doc(alias = "Written")]
pub trait WriteResult {
    /// The result if nothing is written because the connection takes no more bytes.
    fn unsent() -> Self;

    /// False if nothing is to be sent.
    fn is_written(&self) -> bool;
}

impl WriteResult for () {
    fn unsent() {}

    fn is_written(&self) -> bool {
        true
    }
}

impl<E> WriteResult for Result<(), E> {
    fn unsent() -> Result<(), E> {
        Ok(())
    }

    fn is_written(&self) -> bool {
        self.is_ok()
    }
}

impl<'a> InPlace<'a> {
    /// Leaves `room` bytes for a header at the end of `batch`.
    #[inline]
    pub(crate) fn begin(batch: &'a mut Batch, room: usize) -> InPlace<'a> {
        let (from, lent_from) = (batch.copied.len(), batch.lent.len());
        match room {
            0 => {}
            // A branch for most headers, so that the compiler knows how much it writes.
            4 => batch.put(&[0; 4]),
            _ => batch.put(&[0; HEADER_ROOM_MAX][..room.min(HEADER_ROOM_MAX)]),
        }
        let header = batch.copied.len() - from;
        InPlace { batch, from, lent_from, header, payload_len: 0, is_headed: false }
    }

    /// Calls `write` to write the payload.
    pub(crate) fn write<R>(&mut self, write: impl FnOnce(&mut ReplyWriter<'_>) -> R) -> R {
        let before = self.batch.len();
        let Batch { copied, lent, refused, release, .. } = &mut *self.batch;
        let release = *release;
        let lend = move |bytes: Bytes| match bytes.len() {
            ..OWNED_BYTES_MIN => Err(bytes),
            _ => Ok(OwnedPayload::from(bytes).into_lease(release)),
        };
        let tail = Tail { copied, lent, refused, lent_max: LENT_MAX, lend: &lend };
        let result = write(&mut ReplyWriter::new(tail));
        self.batch.recount();
        self.payload_len = self.batch.len() - before;
        result
    }

    /// Bytes of payload.
    pub fn payload_len(&self) -> usize {
        self.payload_len
    }

    /// The payload: in its place, or a copy if a part of it is sent without one.
    pub fn payload(&self) -> Cow<'_, [u8]> {
        let mut from = self.from + self.header;
        let copied = &self.batch.copied;
        let lent = &self.batch.lent[self.lent_from..];
        if lent.is_empty() {
            return Cow::Borrowed(&copied[from..from + self.payload_len]);
        }
        let mut whole = Vec::with_capacity(self.payload_len);
        for (position, lease) in lent {
            whole.extend_from_slice(&copied[from..*position]);
            whole.extend_from_slice(lease);
            from = *position;
        }
        let rest = self.payload_len - whole.len();
        whole.extend_from_slice(&copied[from..from + rest]);
        Cow::Owned(whole)
    }

    /// Writes the bytes before the payload: into the room that was left for them, or by moving the
    /// payload.
    #[inline]
    pub fn set_header(&mut self, header: &[u8]) {
        self.is_headed = true;
        let (old, new) = (self.header, header.len());
        if old != new && !self.move_payload(new) {
            return;
        }
        self.batch.copied[self.from..self.from + new].copy_from_slice(header);
    }

    #[cold]
    fn move_payload(&mut self, header: usize) -> bool {
        let (begins, copied) = (self.from + self.header, &mut self.batch.copied);
        let len = copied.len();
        let moved = len - self.header + header;
        if copied.try_reserve(moved.saturating_sub(len)).is_err() {
            self.batch.refused = true;
            return false;
        }
        copied.resize(moved.max(len), 0);
        copied.copy_within(begins..len, self.from + header);
        copied.truncate(moved);
        for (position, _) in &mut self.batch.lent[self.lent_from..] {
            *position = *position - self.header + header;
        }
        self.header = header;
        self.batch.recount();
        true
    }

    /// Appends bytes after the payload.
    pub fn put_end(&mut self, bytes: &[u8]) {
        self.batch.put(bytes);
    }

    /// Takes the payload away, so that nothing of the frame is written, and returns the outbox to
    /// write it by copying.
    pub fn take(&mut self) -> (Vec<u8>, Outbox<'_>) {
        let payload = self.payload().into_owned();
        self.batch.copied.truncate(self.from);
        self.batch.lent.truncate(self.lent_from);
        self.batch.recount();
        (self.header, self.payload_len, self.is_headed) = (0, 0, true);
        (payload, Outbox::new(self.batch, false))
    }

    /// Removes unused room for a header.
    pub(crate) fn finish(mut self) {
        if !self.is_headed && self.header > 0 {
            self.set_header(b"");
        }
    }
}
