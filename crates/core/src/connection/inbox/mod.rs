//! Bytes that were received and are not frames yet.
//!
//! ```text
//!   partial            rest              full              backlog           newest
//!   ├──────────────┼─────────────────┼────────────────┼───────────────┤
//!   start of one     a lease that was   leases that       copied while the
//!   frame, copied    being cut          fill a buffer,    service was busy
//!                                       copies before
//!                                       such a one
//! ```
//!
//! A connection that waits for its peer between two frames has no inbox at all. Frames that lie
//! within one lease are handed out without a copy; a frame that spans leases is put together in
//! `partial` and copied once. Of a large one only the start is copied: the driver has `partial`
//! then, and receives the rest straight into it.
// May use: no other room.
// Begin with: `Inbox`; `cut.rs` finds the frames.

mod cut;
mod frame_reader;

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::mem;

use ringserve_buf::{Block, Blocks, Lease, try_box};

use crate::Frame;
use crate::framing::{Cut, FrameError, FramingState, TypedFraming};
use crate::time::Stamp;

pub(crate) use cut::{Found, Uncut, cut, cut_whole, not_whole};
use cut::{UNSOUND, cut_at, is_sound, more};
pub use frame_reader::{FrameReader, ReadError};

/// Bytes added to an unfinished frame before the next look at it, if the framing cannot tell how
/// many are missing. Bytes that turn out to belong to the next frame are given back, so this bounds
/// what is copied in vain.
const STEP_BYTES: usize = 1024;

/// The least room made for a receive straight into a frame: as much as one receive buffer brings.
const ROOM_BYTES_MIN: usize = 16 * 1024;

/// The most bytes of one receive straight into a frame: as much as a turn takes from a driver, so
/// that one peer does not hold up others.
const INTO_BYTES_MAX: usize = 1 << 20;

/// Received bytes of a connection that are not frames yet.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    partial: Block,
    /// Bytes of `partial` that the framing has seen.
    scanned: usize,
    /// At least this many bytes are missing from the frame in `partial`; 0 once all of them came
    /// straight into it, and no framing has looked since.
    missing: usize,
    /// Bytes of memory of `partial`, and how many are filled, while the driver has it to receive
    /// into.
    away: Option<(usize, usize)>,
    /// Some pieces of a frame were handed out, but not the last one.
    in_pieces: bool,
    /// The connection's channel waits for the rest of a record, and holds this many bytes of it.
    record: Option<usize>,
    rest: Lease,
    /// Leases that came while the service was busy, and copies of smaller ones that came before
    /// such a lease. A lease that fills half of its buffer or more pins about as much as a copy
    /// would take.
    full: VecDeque<Lease>,
    full_bytes: usize,
    /// Bytes that they pin.
    full_pinned: usize,
    /// A copy of the bytes after them.
    backlog: Block,
    /// The time when the peer's window for enough of `partial` began; the next field counts the
    /// bytes since.
    pub(crate) window_began: Stamp,
    window_bytes: usize,
    /// The time when `partial` began.
    pub(crate) partial_began: Stamp,
    /// Set if the peer sent too fast: the time since which it waits, and for how many steps.
    pub(crate) resumes: Option<(Stamp, u32)>,
}

/// The system has no memory for bytes that arrived.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NoMemory;

/// True if a lease pins about as much as it shows.
fn fills_buffer(lease: &Lease) -> bool {
    lease.is_pooled() && lease.len() >= lease.pinned_bytes() / 2
}

fn append(to: &mut Vec<u8>, bytes: &[u8]) -> Result<(), NoMemory> {
    to.try_reserve(bytes.len()).map_err(|_| NoMemory)?;
    to.extend_from_slice(bytes);
    Ok(())
}

impl Inbox {
    /// An empty inbox, whose copies lie in `blocks`: large frames, and bytes that have to wait.
    pub(crate) fn new(blocks: &Blocks) -> Inbox {
        Inbox { partial: blocks.block(), backlog: blocks.block(), ..Inbox::default() }
    }

    /// True if nothing is left, so that the inbox itself need not be kept.
    pub(crate) fn is_empty(&self) -> bool {
        !self.has_begun() && self.nothing_waits()
    }

    /// True if a frame began and did not end, and nothing else is there.
    pub(crate) fn is_mid_frame(&self) -> bool {
        self.has_begun() && self.nothing_waits() && !self.is_ripe()
    }

    /// True if the frame that was begun is all there is.
    fn nothing_waits(&self) -> bool {
        self.rest.is_empty() && self.full.is_empty() && self.backlog.is_empty()
    }

    /// True if a frame or a record began and did not end: bytes of it are there, or were handed out
    /// in pieces.
    pub(crate) fn has_begun(&self) -> bool {
        self.in_pieces || self.record.is_some() || self.has_partial()
    }

    /// True if a record began and did not end.
    pub(crate) fn is_mid_record(&self) -> bool {
        self.record.is_some()
    }

    /// Notes that the channel holds `held` bytes of an unfinished record, and that `came` bytes
    /// arrived since the last look, of which nothing was handed on. True if nothing had begun
    /// before.
    pub(crate) fn note_record(&mut self, held: usize, came: usize, now: Stamp) -> bool {
        let begins = !self.has_begun();
        if begins {
            self.begin_window(now);
            self.partial_began = now;
        }
        self.record = Some(held);
        self.window_bytes += came;
        begins
    }

    /// Notes the end of the record.
    pub(crate) fn end_record(&mut self) {
        self.record = None;
    }

    /// Bytes that were not looked at yet.
    pub(crate) fn waiting_bytes(&self) -> usize {
        let ripe = if self.is_ripe() { self.partial.len() } else { 0 };
        ripe + self.rest.len() + self.full_bytes + self.backlog.len()
    }

    /// True if the bytes that were missing are there, and the framing has not looked at them.
    #[inline]
    pub(crate) fn is_ripe(&self) -> bool {
        self.missing == 0 && !self.partial.is_empty()
    }

    /// True while the driver has the start of the frame, to receive into.
    #[inline]
    pub(crate) fn is_away(&self) -> bool {
        self.away.is_some()
    }

    /// Bytes of its block while that is with the driver.
    pub(crate) fn away_bytes(&self) -> usize {
        self.away.map_or(0, |(held, _)| held)
    }

    /// Bytes of memory this inbox holds.
    pub(crate) fn held_bytes(&self) -> usize {
        let away = self.away_bytes() + self.record.unwrap_or(0);
        let received = self.full_pinned + self.backlog.held_bytes() + self.rest.pinned_bytes();
        self.partial.held_bytes() + away + received
    }

    /// Adds bytes after all others. They are copied, unless they lie on the heap and nothing is
    /// before them, or `keeps` says that there are enough buffers, and they fill half of one or
    /// more.
    pub(crate) fn put(&mut self, lease: Lease, keeps: bool) -> Result<(), NoMemory> {
        if !lease.is_pooled() && self.nothing_waits() {
            self.rest = lease;
            return Ok(());
        }
        if keeps && fills_buffer(&lease) {
            if !self.backlog.is_empty() {
                let copied = self.backlog.take().into_lease().ok_or(NoMemory)?;
                self.keep(copied)?;
            }
            return self.keep(lease);
        }
        self.copy(&lease)
    }

    /// Bytes of receive buffers that are kept as they are.
    pub(crate) fn kept_bytes(&self) -> usize {
        self.full.iter().filter(|lease| lease.is_pooled()).map(|lease| lease.len()).sum()
    }

    fn keep(&mut self, lease: Lease) -> Result<(), NoMemory> {
        self.full.try_reserve(1).map_err(|_| NoMemory)?;
        self.full_bytes += lease.len();
        self.full_pinned += lease.pinned_bytes();
        self.full.push_back(lease);
        Ok(())
    }

    /// Copies bytes after all others. As much again may follow them.
    fn copy(&mut self, bytes: &[u8]) -> Result<(), NoMemory> {
        self.backlog.put(bytes, self.backlog.len().max(bytes.len())).then_some(()).ok_or(NoMemory)
    }

    /// Adds bytes after all others, contiguous with those of earlier calls of this method. For
    /// bytes that come before frames.
    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<&[u8], NoMemory> {
        debug_assert!(!self.has_begun() && self.rest.is_empty(), "bytes of frames are there");
        self.copy(bytes)?;
        Ok(&self.backlog)
    }

    /// Puts back the rest of a lease that was being cut, before all bytes except `partial`.
    pub(crate) fn put_back(&mut self, lease: Lease) -> Result<(), NoMemory> {
        debug_assert!(self.rest.is_empty(), "a lease is cut before the next one is taken");
        if lease.is_empty() {
            return Ok(());
        }
        self.rest = if lease.is_pooled() {
            let mut copy = Vec::new();
            append(&mut copy, &lease)?;
            Lease::try_from_vec(copy).ok_or(NoMemory)?
        } else {
            lease
        };
        Ok(())
    }

    /// Takes the next bytes to look at.
    pub(crate) fn take(&mut self) -> Result<Lease, NoMemory> {
        if !self.rest.is_empty() {
            return Ok(mem::take(&mut self.rest));
        }
        if let Some(lease) = self.full.pop_front() {
            self.full_bytes -= lease.len();
            self.full_pinned -= lease.pinned_bytes();
            return Ok(lease);
        }
        self.backlog.take().into_lease().ok_or(NoMemory)
    }

    /// True if bytes of a frame are there that was begun.
    pub(crate) fn has_partial(&self) -> bool {
        !self.partial.is_empty() || self.is_away()
    }

    /// Bytes of the frame that was begun.
    pub(crate) fn partial_bytes(&self) -> usize {
        self.away.map_or(self.partial.len(), |(_, filled)| filled)
    }

    /// Bytes that are missing from the frame that was begun, as far as is known. `None` if they
    /// cannot be received straight into it: there is no such frame, or bytes follow it already.
    pub(crate) fn lacks(&self) -> Option<usize> {
        let first = !self.partial.is_empty() && self.nothing_waits();
        (first && self.missing > 0).then_some(self.missing)
    }

    /// Hands out the start of the frame for the driver to receive into, with room for some of what
    /// it [lacks](Inbox::lacks): as much as is there already, or one receive buffer; and how many
    /// bytes may come.
    pub(crate) fn send_away(&mut self) -> Result<(Box<Block>, usize), NoMemory> {
        if !self.partial.make_room(self.missing.min(ROOM_BYTES_MIN), self.missing) {
            return Err(NoMemory);
        }
        let away = (self.partial.held_bytes(), self.partial.len());
        let most = self.partial.room().min(self.missing).min(INTO_BYTES_MAX);
        let block = try_box(self.partial.take()).ok_or(NoMemory)?;
        self.away = Some(away);
        Ok((block, most))
    }

    /// Takes the start of the frame back, with `bytes` more.
    pub(crate) fn come_back(&mut self, mut block: Block, bytes: usize) {
        debug_assert!(self.is_away() && self.partial.is_empty(), "a block came back that was not away");
        self.away = None;
        mem::swap(&mut self.partial, &mut block);
        self.missing -= bytes.min(self.missing);
        self.window_bytes += bytes;
    }

    /// Begins a frame with the bytes that [`cut`](cut()) answered [`Found::More`] for.
    pub(crate) fn begin(&mut self, bytes: &[u8], missing: usize, now: Stamp) -> Result<(), NoMemory> {
        debug_assert!(self.partial.is_empty());
        match self.in_pieces {
            true => self.window_bytes += bytes.len(),
            false => _ = self.begin_window(now),
        }
        self.partial_began = now;
        if !self.partial.put(bytes, bytes.len().saturating_add(missing)) {
            return Err(NoMemory);
        }
        self.scanned = bytes.len();
        self.missing = missing;
        Ok(())
    }

    /// Notes that a piece of `bytes` bytes was handed out, of a frame that goes on.
    pub(crate) fn note_piece(&mut self, bytes: usize, now: Stamp) {
        if !self.in_pieces {
            self.in_pieces = true;
            self.begin_window(now);
        }
        self.window_bytes += bytes;
    }

    /// Notes that a frame was handed out whole, or its last piece. True if it was a last piece.
    pub(crate) fn end_pieces(&mut self) -> bool {
        mem::take(&mut self.in_pieces)
    }

    /// Gives back the bytes of the frame that was begun, with those after it: `lease`, or what is
    /// the next to be taken. They are then looked at from the start.
    pub(crate) fn unbegin(&mut self, lease: Lease) -> Result<Lease, NoMemory> {
        let behind = if lease.is_empty() { mem::take(&mut self.rest) } else { lease };
        let mut bytes = self.partial.take();
        (self.scanned, self.missing) = (0, 0);
        if !bytes.put(&behind, behind.len()) {
            return Err(NoMemory);
        }
        bytes.into_lease().ok_or(NoMemory)
    }

    /// Starts the peer's time for enough bytes. Returns how many came in the time before.
    pub(crate) fn begin_window(&mut self, now: Stamp) -> usize {
        self.window_began = now;
        mem::take(&mut self.window_bytes)
    }

    /// Adds to the frame that was begun from the front of `lease`, until it is whole or the lease
    /// is empty.
    pub(crate) fn finish<F: TypedFraming>(
        &mut self,
        framing: &F,
        state: &FramingState<F::State>,
        lease: &mut Lease,
        frame_bytes_max: usize,
    ) -> Found<F::Head> {
        if self.is_ripe() {
            match self.check_ripe(framing, state, frame_bytes_max) {
                Found::More(_) => {}
                found => return found,
            }
        }
        while !lease.is_empty() {
            let before = self.partial.len();
            // The limit may have been lowered since the frame was begun.
            let Some(room) = frame_bytes_max.checked_sub(before).filter(|room| *room > 0) else {
                let bytes = before.saturating_add(self.missing);
                return Found::Bad(FrameError::TooLarge { bytes, max: frame_bytes_max });
            };
            let step = self.missing.max(STEP_BYTES).min(lease.len()).min(room);
            // If it is not known how much is missing: room for as much again.
            let expected = if step > self.missing { before } else { self.missing };
            if !self.partial.put(&lease[..step], expected) {
                return Found::NoMemory;
            }
            self.window_bytes += step;
            if step < self.missing {
                self.missing -= step;
                lease.advance(step);
                continue;
            }
            let seen = self.partial.len();
            // A frame that ends within bytes that the framing had passed over before is as unsound
            // as one outside. A piece may end there: what came since may belong to the next one.
            let ends_soundly =
                |skip, len, consumed, least| is_sound(skip, len, consumed, seen) && consumed >= least;
            match cut_at(framing, state, &self.partial, self.scanned) {
                Ok(Cut::Frame { skip, len, consumed, head })
                    if ends_soundly(skip, len, consumed, before + 1) =>
                {
                    lease.advance(consumed - before);
                    let wire = self.take_partial(consumed);
                    return wire
                        .map_or(Found::NoMemory, |wire| Found::Frame(Frame::sound(wire, skip, len, head)));
                }
                Ok(Cut::Piece { skip, len, consumed, head }) if ends_soundly(skip, len, consumed, before) => {
                    lease.advance(consumed - before);
                    // They are counted with the piece.
                    self.window_bytes = self.window_bytes.saturating_sub(seen);
                    let wire = self.take_partial(consumed);
                    return wire
                        .map_or(Found::NoMemory, |wire| Found::Piece(Frame::sound(wire, skip, len, head)));
                }
                Ok(Cut::Frame { .. } | Cut::Piece { .. }) => return Found::Bad(UNSOUND),
                Ok(Cut::More(missing)) => {
                    lease.advance(step);
                    match more(seen, missing, frame_bytes_max) {
                        Found::More(missing) => self.missing = missing,
                        bad => return bad,
                    }
                    self.scanned = seen;
                }
                Err(error) => return Found::Bad(error),
            }
        }
        Found::More(self.missing)
    }

    /// Looks at the frame that was begun, after the missing bytes came straight into it.
    #[cold]
    fn check_ripe<F: TypedFraming>(
        &mut self,
        framing: &F,
        state: &FramingState<F::State>,
        frame_bytes_max: usize,
    ) -> Found<F::Head> {
        let seen = self.partial.len();
        if seen > frame_bytes_max {
            // The limit was lowered since.
            return Found::Bad(FrameError::TooLarge { bytes: seen, max: frame_bytes_max });
        }
        // A framing that ends it before the missing bytes is as unsound as one that ends it after
        // them.
        let sound = |skip, len, consumed| is_sound(skip, len, consumed, seen) && consumed == seen;
        let (skip, len, head, goes_on) = match cut_at(framing, state, &self.partial, self.scanned) {
            Ok(Cut::Frame { skip, len, consumed, head }) if sound(skip, len, consumed) => {
                (skip, len, head, false)
            }
            Ok(Cut::Piece { skip, len, consumed, head }) if sound(skip, len, consumed) => {
                (skip, len, head, true)
            }
            Ok(Cut::Frame { .. } | Cut::Piece { .. }) => return Found::Bad(UNSOUND),
            Ok(Cut::More(missing)) => {
                self.scanned = seen;
                let found = more(seen, missing, frame_bytes_max);
                if let Found::More(missing) = found {
                    self.missing = missing;
                }
                return found;
            }
            Err(error) => return Found::Bad(error),
        };
        if goes_on {
            // They are counted with the piece.
            self.window_bytes = self.window_bytes.saturating_sub(seen);
        }
        match self.take_partial(seen) {
            None => Found::NoMemory,
            Some(wire) if goes_on => Found::Piece(Frame::sound(wire, skip, len, head)),
            Some(wire) => Found::Frame(Frame::sound(wire, skip, len, head)),
        }
    }

    /// The frame that was begun, of `bytes` bytes. `None` if the system has no memory for it.
    fn take_partial(&mut self, bytes: usize) -> Option<Lease> {
        self.partial.truncate(bytes);
        (self.scanned, self.missing) = (0, 0);
        self.partial.take().into_lease()
    }
}

#[cfg(test)]
mod tests {
    use super::cut::cut;
    use super::*;
    use crate::framing::{DotState, DotStuffed, Framing, LengthPrefix, Lines};
    use proptest::prelude::*;
    use ringserve_buf::{Pool, PoolConfig};

    /// Runs pieces through an inbox as a shard does, and counts frames that were copied.
    fn run(
        framing: &impl Framing,
        pieces: &[&[u8]],
        max: usize,
    ) -> Result<(Vec<Vec<u8>>, usize), FrameError> {
        let (mut inbox, state) = (Inbox::default(), FramingState::new(()));
        let (mut frames, mut copied) = (Vec::new(), 0);
        for piece in pieces {
            let mut lease = Lease::copy_of(piece);
            let range = lease.as_ptr_range();
            while !lease.is_empty() {
                let found = if inbox.has_partial() {
                    inbox.finish(framing, &state, &mut lease, max)
                } else {
                    cut(framing, &state, &mut lease, max)
                };
                match found {
                    Found::Frame(frame) => {
                        copied += usize::from(!range.contains(&frame.wire().as_ptr()));
                        frames.push(frame.to_vec());
                    }
                    Found::More(missing) if !inbox.has_partial() => {
                        inbox.begin(&lease, missing, Stamp::default()).unwrap();
                        lease = Lease::empty();
                    }
                    Found::More(_) => assert!(lease.is_empty()),
                    Found::Bad(error) => return Err(error),
                    Found::Piece(_) | Found::NoMemory => unreachable!(),
                }
            }
        }
        Ok((frames, copied))
    }

    #[test]
    fn only_the_frame_that_spans_two_leases_is_copied() {
        let (frames, copied) = run(&Lines::default(), &[b"a\nbb\ncc", b"c\ndddd\ne\n"], 100).unwrap();
        assert_eq!(frames, [&b"a"[..], b"bb", b"ccc", b"dddd", b"e"]);
        assert_eq!(copied, 1);
    }

    #[test]
    fn a_frame_may_be_as_large_as_the_limit_and_not_a_byte_larger() {
        let framing = LengthPrefix::bytes(4);
        let fits = [&[0, 0, 0, 96][..], &[7; 96]].concat();
        assert_eq!(run(&framing, &[&fits], 100).unwrap().0, [[7; 96]]);
        let over = [&[0, 0, 0, 97][..], &[7; 97]].concat();
        assert_eq!(run(&framing, &[&over], 100), Err(FrameError::TooLarge { bytes: 101, max: 100 }));
        let claims = FrameError::TooLarge { bytes: usize::MAX, max: 100 };
        assert_eq!(run(&LengthPrefix::bytes(8), &[&[0xFF; 8]], 100), Err(claims));
        let line = [b'x'; 101];
        assert!(run(&Lines::default(), &[&line[..60], &line[60..]], 100).is_err());
    }

    #[test]
    fn a_limit_lowered_below_what_was_begun_is_too_large() {
        for max in [99, 100] {
            let (mut inbox, state) = (Inbox::default(), FramingState::new(()));
            inbox.begin(&[b'x'; 100], 1, Stamp::default()).unwrap();
            let found = inbox.finish(&Lines::default(), &state, &mut Lease::copy_of(b"y\n"), max);
            let Found::Bad(FrameError::TooLarge { bytes: 101, max: of }) = found else { panic!("{found:?}") };
            assert_eq!(of, max);
        }
    }

    #[test]
    fn leases_that_fill_a_buffer_wait_without_a_copy() {
        let config = PoolConfig { buffer_bytes: 64, buffers_max: 8, poison: true };
        let (_pool, mut side) = Pool::new(config).unwrap();
        let mut received = |byte: u8, len: usize| {
            let id = side.lend().unwrap();
            side.spare(id)[..len].fill(byte);
            side.received(id, len).freeze()
        };
        let mut inbox = Inbox::default();
        let first = received(b'1', 64);
        let place = first.as_ptr();
        inbox.put(first, true).unwrap();
        inbox.put(received(b'2', 32), true).unwrap();
        assert_eq!((inbox.waiting_bytes(), inbox.held_bytes()), (96, 128));
        // Those that fill less are copied, and together. A lease that fills a buffer waits after
        // the copy.
        inbox.put(received(b'3', 31), true).unwrap();
        inbox.put(received(b'3', 1), true).unwrap();
        inbox.put(received(b'4', 64), true).unwrap();
        inbox.put(received(b'5', 1), true).unwrap();
        assert_eq!((inbox.waiting_bytes(), inbox.kept_bytes()), (193, 160));
        let taken = inbox.take().unwrap();
        assert_eq!((taken.as_ptr(), taken.len()), (place, 64));
        assert_eq!(&*inbox.take().unwrap(), &[b'2'; 32]);
        assert_eq!(*inbox.take().unwrap(), [b'3'; 32]);
        let taken = inbox.take().unwrap();
        assert_eq!((&*taken, taken.is_pooled()), (&[b'4'; 64][..], true));
        assert_eq!(&*inbox.take().unwrap(), b"5");
        assert!(inbox.is_empty() && inbox.held_bytes() == 0);
        inbox.put(received(b'5', 64), false).unwrap();
        assert!(!inbox.take().unwrap().is_pooled(), "kept a buffer while they are short");
    }

    #[test]
    fn text_is_whole_where_its_ends_of_lines_are_cut() {
        for sent in ["..\r\n.\r\n", "\r\n..\r\n.\r\n", ".\r\r\n.\r\n", "\r\r\n..a\r\n.\r\n"] {
            let text = &sent[..sent.len() - 3].replace("\r\n.", "\r\n");
            let text = text.strip_prefix('.').unwrap_or(text);
            let (mut inbox, state) = (Inbox::default(), FramingState::new(DotState::TEXT));
            let (mut found, mut is_over) = (Vec::new(), false);
            for byte in sent.bytes() {
                let mut lease = Lease::copy_of(&[byte]);
                while !lease.is_empty() {
                    let begun = inbox.has_partial();
                    let framing = DotStuffed::new(Lines::crlf());
                    match if begun {
                        inbox.finish(&framing, &state, &mut lease, 100)
                    } else {
                        cut(&framing, &state, &mut lease, 100)
                    } {
                        Found::Piece(piece) => found.extend_from_slice(&piece),
                        Found::Frame(_) => is_over = true,
                        Found::More(missing) if !begun => {
                            inbox.begin(&lease, missing, Stamp::default()).unwrap();
                            lease = Lease::empty();
                        }
                        Found::More(_) => assert!(lease.is_empty()),
                        other => panic!("{sent:?}: {other:?}"),
                    }
                }
            }
            assert_eq!((found.as_slice(), is_over), (text.as_bytes(), true), "{sent:?}");
        }
    }

    proptest! {
        #[test]
        fn any_pieces_give_the_same_frames(
            lens in prop::collection::vec(0usize..3000, 1..12),
            cuts in prop::collection::vec(any::<usize>(), 0..20),
            lines in any::<bool>(),
        ) {
            let mut wire = Vec::new();
            let mut expected = Vec::new();
            for (n, len) in lens.iter().enumerate() {
                let payload = vec_of(*len, b'a' + n as u8);
                if lines {
                    wire.extend_from_slice(&payload);
                    wire.push(b'\n');
                } else {
                    wire.extend_from_slice(&(*len as u16).to_be_bytes());
                    wire.extend_from_slice(&payload);
                }
                expected.push(payload);
            }
            let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (wire.len() + 1)).collect();
            ends.push(wire.len());
            ends.sort_unstable();
            let mut pieces = Vec::new();
            let mut start = 0;
            for end in ends {
                pieces.push(&wire[start..end]);
                start = end;
            }
            let (frames, copied) = if lines {
                run(&Lines::default(), &pieces, 4000).unwrap()
            } else {
                run(&LengthPrefix::bytes(2), &pieces, 4000).unwrap()
            };
            prop_assert_eq!(frames, expected);
            prop_assert!(copied < pieces.len(), "each cut lets at most one frame span");
        }
    }

    fn vec_of(len: usize, byte: u8) -> Vec<u8> {
        core::iter::repeat_n(byte, len).collect()
    }
}
