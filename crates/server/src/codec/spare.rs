//! Buffers that the connections of a shard use in turns.

use std::cell::Cell;

use bytes::BytesMut;

/// A new buffer has as much room as one receive fills by default.
const ROOM_BYTES: usize = 16 * 1024;

/// A buffer that is kept for the next use has at most this much, as a shard's batches do.
pub(super) const KEPT_BYTES_MAX: usize = 64 * 1024;

/// A buffer of a shard, while no connection uses it.
#[derive(Default)]
pub(super) struct Spare(Cell<BytesMut>);

impl Spare {
    /// An empty buffer with room for `bytes` bytes.
    #[inline]
    pub(super) fn take(&self, bytes: usize) -> BytesMut {
        let (mut buffer, room) = (self.0.take(), bytes.max(ROOM_BYTES));
        if buffer.capacity() >= room || buffer.try_reclaim(room) {
            buffer
        } else {
            BytesMut::with_capacity(room)
        }
    }

    /// Keeps a buffer of `room` bytes, unless it grew large. False if parts of it are still used by
    /// items.
    pub(super) fn keep(&self, mut buffer: BytesMut, room: usize) -> bool {
        buffer.clear();
        // Its capacity says what is left behind the parts that were split off; this asks for the
        // whole.
        let is_whole = buffer.try_reclaim(room);
        if is_whole && room >= ROOM_BYTES && !buffer.try_reclaim(KEPT_BYTES_MAX + 1) {
            self.0.set(buffer);
        }
        is_whole
    }

    /// Hands what `encode` wrote to `write`.
    #[inline]
    pub(super) fn encoded<T, E>(
        &self,
        encode: impl FnOnce(&mut BytesMut) -> Result<(), E>,
        write: impl FnOnce(&[u8]) -> T,
    ) -> Result<T, E> {
        let mut bytes = self.take(0);
        let written = encode(&mut bytes).map(|()| write(&bytes));
        // An encoder appends: what it may have split off is asked for only if little is left.
        if (ROOM_BYTES..=KEPT_BYTES_MAX).contains(&bytes.capacity()) {
            bytes.clear();
            self.0.set(bytes);
        } else {
            self.keep(bytes, ROOM_BYTES);
        }
        written
    }
}
