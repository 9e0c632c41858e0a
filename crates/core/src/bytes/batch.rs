//! The bytes of one send.

use alloc::vec::Vec;
use core::fmt;

use bytes::Bytes;
use ringserve_buf::Lease;

use crate::tables::LISTED_BYTES;
use crate::time::Stamp;

/// The most leases in one batch, not counting a prefix that is put before it: with the copied bytes
/// between them about 130 pieces at most, far below the kernel's 1024. Whatever follows is copied.
pub(crate) const LENT_MAX: usize = 64;

/// At most this many copied bytes are moved for a [prefix](Batch::prepend): from 4 KiB on a copy
/// becomes noticeable next to a send, and a second piece costs as much.
const MOVED_BYTES_MAX: usize = 4096;

/// The most bytes that wait for what follows them: an arbitrary number, a few dozen short replies.
pub(crate) const HELD_BYTES_MAX: usize = 4096;

/// A recycled batch keeps at most this much room for copied bytes: one receive buffer's worth of
/// replies.
pub(crate) const KEPT_BYTES_MAX: usize = 64 * 1024;

/// From this size on, memory of a batch beyond the bytes left to send is counted: the amount from
/// which connections are compared.
const ROOM_BYTES_MIN: usize = LISTED_BYTES;

/// Bytes on their way to one peer, in order: copied ones in one block, and leases lent in between.
///
/// A batch is moved into its [`Op::Send`](crate::Op::Send) and comes back in its completion,
/// advanced by what was sent. While an operation holds it no other code can touch its memory.
///
/// ```
/// use ringserve_buf::Lease;
/// use ringserve_core::Batch;
///
/// let mut batch = Batch::new();
/// batch.put(b"5:");
/// batch.lend(Lease::copy_of(b"hello"));
/// batch.put(b",");
/// batch.advance(3);
/// let pieces: Vec<&[u8]> = batch.pieces().collect();
/// assert_eq!(pieces, [&b"ello"[..], b","]);
/// ```
pub struct Batch {
    pub(crate) copied: Vec<u8>,
    /// Each lease leaves right before the copied byte at its position. Positions never fall.
    pub(crate) lent: Vec<(usize, Lease)>,
    /// Bytes of all leases.
    lent_bytes: usize,
    /// Bytes from the start that left already, and those that have not.
    sent: usize,
    left: usize,
    /// The time since which the peer has taken none of it, once it was looked at in flight.
    pub(crate) untaken_since: Option<Stamp>,
    /// Results of the looks before that of its limits, which are part of that one.
    pub(crate) early: Option<EarlyLooks>,
    /// The system had no memory for the last append.
    pub(crate) refused: bool,
    /// The number of its connection's guards that hold it: more follows in a moment, in the same
    /// send.
    pub(crate) holds: u16,
    /// The last look at it in flight found that the peer had taken none of it since the one before.
    pub(crate) is_untaken: bool,
    /// Its memory beyond the bytes left to send is counted as held.
    pub(crate) room_counts: bool,
    /// Drops owned bytes that left: their owner is user code, which may panic.
    pub(crate) release: fn(Bytes),
}

/// Results of the looks at a send before that of its limits.
#[derive(Clone, Copy)]
pub(crate) struct EarlyLooks {
    /// The time of the look before them, and when the peer had last taken something by then.
    pub(crate) looked_at: Stamp,
    pub(crate) untaken_since: Stamp,
    /// Bytes that the peer took since.
    pub(crate) bytes: usize,
}

impl Batch {
    /// An empty batch, which holds no memory.
    pub const fn new() -> Batch {
        Batch {
            copied: Vec::new(),
            lent: Vec::new(),
            lent_bytes: 0,
            sent: 0,
            left: 0,
            untaken_since: None,
            early: None,
            refused: false,
            holds: 0,
            is_untaken: false,
            room_counts: false,
            release: drop,
        }
    }

    /// An empty batch whose owned bytes are dropped with `release`.
    pub(crate) const fn releasing(release: fn(Bytes)) -> Batch {
        let mut batch = Batch::new();
        batch.release = release;
        batch
    }

    /// Appends a copy of `bytes`. Where the system has no memory for it nothing is appended, and
    /// the batch [is refused](Batch::is_refused).
    #[inline(always)]
    pub fn put(&mut self, bytes: &[u8]) {
        if bytes.len() > self.copied.capacity() - self.copied.len() {
            return self.put_growing(bytes);
        }
        self.copied.extend_from_slice(bytes);
        self.left += bytes.len();
    }

    /// Appends copies of both.
    #[inline(always)]
    pub(crate) fn put_two(&mut self, bytes: &[u8], end: &[u8]) {
        let room = self.copied.capacity() - self.copied.len();
        let both = bytes.len() + end.len();
        if both > room {
            self.put_growing(bytes);
            return self.put_growing(end);
        }
        self.copied.extend_from_slice(bytes);
        self.copied.extend_from_slice(end);
        self.left += both;
    }

    #[cold]
    #[inline(never)]
    fn put_growing(&mut self, bytes: &[u8]) {
        match self.copied.try_reserve(bytes.len()) {
            Ok(()) => {
                self.copied.extend_from_slice(bytes);
                self.left += bytes.len();
            }
            Err(_) => self.refused = true,
        }
    }

    /// True if the system had no memory for an append: the batch is incomplete and must not be
    /// sent.
    #[inline]
    pub fn is_refused(&self) -> bool {
        self.refused
    }

    /// Appends `lease` without copying it; it stays pinned until it is sent.
    pub fn lend(&mut self, lease: Lease) {
        if lease.is_empty() {
            return;
        }
        if self.lent.len() == LENT_MAX {
            return self.put(&lease);
        }
        if self.lent.try_reserve(1).is_err() {
            self.refused = true;
            return;
        }
        self.lent_bytes += lease.len();
        self.left += lease.len();
        self.lent.push((self.copied.len(), lease));
    }

    /// Counts again after a write that went around it. Only for a batch of which nothing was sent.
    pub(crate) fn recount(&mut self) {
        debug_assert_eq!(self.sent, 0, "bytes left meanwhile");
        self.lent_bytes = self.lent.iter().map(|(_, lease)| lease.len()).sum();
        self.left = self.copied.len() + self.lent_bytes;
    }

    /// Puts a copy of `bytes` before all others. If few bytes were copied so far they are moved for
    /// it, so that all of them stay in one piece. If the system has no memory nothing changes, and
    /// the batch [is refused](Batch::is_refused). Only for a batch of which nothing was sent.
    pub fn prepend(&mut self, bytes: &[u8]) {
        debug_assert_eq!(self.sent, 0, "what was sent is before it");
        let (more, len) = (bytes.len(), self.copied.len());
        if more == 0 {
            return;
        }
        if len > MOVED_BYTES_MAX {
            let lease = Lease::try_copy_of(bytes).filter(|_| self.lent.try_reserve(1).is_ok());
            let Some(lease) = lease else { return self.refused = true };
            self.lent.insert(0, (0, lease));
            self.lent_bytes += more;
        } else if self.copied.try_reserve(more).is_ok() {
            self.copied.resize(len + more, 0);
            self.copied.copy_within(..len, more);
            self.copied[..more].copy_from_slice(bytes);
            for (position, _) in &mut self.lent {
                *position += more;
            }
        } else {
            return self.refused = true;
        }
        self.left += more;
    }

    /// The bytes that have not left yet.
    #[inline]
    pub fn len(&self) -> usize {
        self.left
    }

    /// True if it waits for more bytes while a guard holds it.
    pub(crate) fn is_short(&self) -> bool {
        self.left <= HELD_BYTES_MAX
    }

    /// True if nothing is left to send.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of memory held: the room of the copied block and what the leases pin.
    pub fn held_bytes(&self) -> usize {
        self.copied.capacity() + self.lent.iter().map(|(_, lease)| lease.pinned_bytes()).sum::<usize>()
    }

    /// Counts `bytes` as sent.
    ///
    /// # Panics
    /// If fewer are left.
    #[inline]
    pub fn advance(&mut self, bytes: usize) {
        assert!(bytes <= self.len(), "batch of {} bytes advanced by {bytes}", self.len());
        self.sent += bytes;
        self.left -= bytes;
    }

    /// The bytes left, if they lie in one piece: the usual case, worth a plain send.
    #[inline]
    pub fn single(&self) -> Option<&[u8]> {
        if self.lent.is_empty() {
            return Some(&self.copied[self.sent..]);
        }
        let mut pieces = self.pieces();
        let first = pieces.next().unwrap_or_default();
        pieces.next().is_none().then_some(first)
    }

    /// The bytes left, piece by piece, none of them empty.
    pub fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        let mut copied_from = 0;
        let mut skip = self.sent;
        let between = self.lent.iter().flat_map(move |(position, lease)| {
            let copied = &self.copied[copied_from..*position];
            copied_from = *position;
            [copied, &**lease]
        });
        let tail = self.lent.last().map_or(0, |(position, _)| *position);
        between.chain([&self.copied[tail..]]).filter_map(move |piece| {
            let cut = skip.min(piece.len());
            skip -= cut;
            (cut < piece.len()).then(|| &piece[cut..])
        })
    }

    /// Takes back what was put and lent since [`len`](Batch::len) was `len`. Only for a batch of
    /// which nothing was sent.
    #[cold]
    pub(crate) fn roll_back(&mut self, len: usize) {
        self.recount();
        self.refused = false;
        while self.len() > len {
            let tail = self.lent.last().map_or(0, |(position, _)| *position);
            let over = (self.len() - len).min(self.copied.len() - tail);
            self.copied.truncate(self.copied.len() - over);
            self.left -= over;
            if self.len() > len
                && let Some((_, lease)) = self.lent.pop()
            {
                self.lent_bytes -= lease.len();
                self.left -= lease.len();
            }
        }
    }

    /// Empties the batch for the next use: leases are dropped. True if its block of copied bytes is
    /// larger than 64 KiB.
    #[inline]
    pub fn clear(&mut self) -> bool {
        self.copied.clear();
        if !self.lent.is_empty() {
            self.drop_lent();
        }
        (self.sent, self.left) = (0, 0);
        (self.untaken_since, self.early) = (None, None);
        (self.refused, self.holds, self.is_untaken, self.room_counts) = (false, 0, false, false);
        self.copied.capacity() > KEPT_BYTES_MAX
    }

    #[cold]
    fn drop_lent(&mut self) {
        self.lent_bytes = 0;
        self.lent.clear();
    }

    /// All of it, copied together if parts are lent.
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        if self.lent.is_empty() && self.sent == 0 {
            return self.copied;
        }
        self.pieces().flatten().copied().collect()
    }

    /// Frees a large block of which little is used: the peer may leave it unread, and only what is
    /// queued counts as held.
    #[cold]
    pub(crate) fn trim(&mut self) {
        if self.copied.len() < self.copied.capacity() / 4 {
            self.copied.shrink_to(KEPT_BYTES_MAX);
        }
    }

    /// True if it has bytes that are neither copied nor a received frame's in its buffer: a
    /// task may wait for their drop.
    pub(crate) fn owns(&self) -> bool {
        self.lent.iter().any(|(_, lease)| !lease.is_pooled())
    }

    /// True if it may have much memory beyond the bytes left to send, and none of them was sent.
    /// Blocks of 64 KiB are among the few that are kept for the next send: such a block counts once
    /// a look finds it in flight.
    #[inline]
    pub(crate) fn may_have_room(&self) -> bool {
        self.copied.capacity() > KEPT_BYTES_MAX
    }

    /// Memory beyond the bytes left to send: the growth of its block, and what was sent already. 0
    /// below 4 KiB. What is lent counts by its bytes: the rest of a block in which a frame was
    /// received was in most cases never touched.
    pub(crate) fn room_beyond(&self) -> usize {
        let room = (self.copied.capacity() + self.lent_bytes).saturating_sub(self.left);
        if room < ROOM_BYTES_MIN { 0 } else { room }
    }

    /// Bytes of room for copied bytes.
    pub(crate) fn room(&self) -> usize {
        self.copied.capacity()
    }

    /// Panics if the parts disagree.
    pub fn invariants(&self) {
        assert!(self.lent.is_sorted_by_key(|(position, _)| *position));
        assert!(self.lent.iter().all(|(position, _)| *position <= self.copied.len()));
        assert_eq!(self.lent_bytes, self.lent.iter().map(|(_, lease)| lease.len()).sum::<usize>());
        assert_eq!(self.left, self.copied.len() + self.lent_bytes - self.sent);
        assert_eq!(self.pieces().map(<[u8]>::len).sum::<usize>(), self.len());
    }
}

impl Default for Batch {
    fn default() -> Batch {
        Batch::new()
    }
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Batch({} bytes left, {} leases)", self.len(), self.lent.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_are_what_was_put_and_lent_less_what_was_sent(
            parts in prop::collection::vec((any::<bool>(), prop::collection::vec(any::<u8>(), 0..20)), 0..90),
            sent in 0.0..=1.0f64,
        ) {
            let mut batch = Batch::new();
            let mut expected = Vec::new();
            for (lend, bytes) in &parts {
                if *lend { batch.lend(Lease::copy_of(bytes)) } else { batch.put(bytes) }
                expected.extend_from_slice(bytes);
            }
            let cut = (expected.len() as f64 * sent) as usize;
            batch.advance(cut);
            batch.invariants();
            let left: Vec<u8> = batch.pieces().flatten().copied().collect();
            prop_assert_eq!(&left[..], &expected[cut..]);
            if let Some(single) = batch.single() {
                prop_assert_eq!(single, &expected[cut..]);
            }
        }

        #[test]
        fn what_is_rolled_back_leaves_what_was_there_before(
            parts in prop::collection::vec((any::<bool>(), prop::collection::vec(any::<u8>(), 0..20)), 0..90),
            keep in 0.0..=1.0f64,
        ) {
            let mut batch = Batch::new();
            let (mut kept, mut expected) = (0, Vec::new());
            for (n, (lend, bytes)) in parts.iter().enumerate() {
                if *lend { batch.lend(Lease::copy_of(bytes)) } else { batch.put(bytes) }
                if n < (parts.len() as f64 * keep) as usize {
                    expected.extend_from_slice(bytes);
                    kept = batch.len();
                }
            }
            batch.roll_back(kept);
            batch.invariants();
            let left: Vec<u8> = batch.pieces().flatten().copied().collect();
            prop_assert_eq!(left, expected);
        }

        #[test]
        fn what_is_put_before_a_batch_leaves_first(
            parts in prop::collection::vec((any::<bool>(), prop::collection::vec(any::<u8>(), 0..400)), 0..70),
            before in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..3),
            sent in 0.0..=1.0f64,
        ) {
            let mut batch = Batch::new();
            let mut expected = Vec::new();
            for (lend, bytes) in &parts {
                if *lend { batch.lend(Lease::copy_of(bytes)) } else { batch.put(bytes) }
                expected.extend_from_slice(bytes);
            }
            for bytes in &before {
                batch.prepend(bytes);
                expected.splice(0..0, bytes.iter().copied());
            }
            batch.invariants();
            let cut = (expected.len() as f64 * sent) as usize;
            batch.advance(cut);
            batch.invariants();
            let left: Vec<u8> = batch.pieces().flatten().copied().collect();
            prop_assert_eq!(&left[..], &expected[cut..]);
        }
    }

    #[test]
    fn a_cleared_batch_says_whether_its_room_is_large() {
        let mut batch = Batch::new();
        batch.put(&[0; 100]);
        batch.lend(Lease::copy_of(b"x"));
        assert!(!batch.clear());
        batch.put(&[0; 200_000]);
        assert!(batch.clear() && batch.is_empty());
    }
}
