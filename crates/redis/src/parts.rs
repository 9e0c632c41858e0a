//! FrameFields of a message by their places, and parts that are kept.

use std::fmt;
use std::ops::Deref;

use ringserve_server::Frame;

/// The size from which a part that fills its own block is kept in that block.
const KEPT_BYTES_MIN: usize = 16 << 10;

/// Bytes between two parts, such as the length of the second one, that are copied along.
const BETWEEN_BYTES_MAX: usize = 16;

/// Begin and end of a part.
pub type Span = (u32, u32);

/// The parts of a message: the arguments of a request, the fields of a record. A framing that finds
/// them while it looks for the end of a frame may hand them over as spans in the
/// [head](ringserve_server::framing::TypedFraming::Head); this reads them.
///
/// ```
/// use ringserve::framing::FrameFields;
///
/// let parts = FrameFields::new(b"set greeting hello", &[(0, 3), (4, 12), (13, 18)]);
/// assert_eq!((parts.len(), parts.get(1)), (3, b"greeting".as_slice()));
/// assert_eq!(parts.from(1).collect::<Vec<_>>(), [b"greeting".as_slice(), b"hello"]);
/// assert_eq!(parts.get(7), b"");
/// ```
#[derive(Clone, Copy)]
#[doc(alias = "Parts")]
pub struct FrameFields<'a> {
    bytes: &'a [u8],
    spans: &'a [Span],
    /// The frame whose payload `bytes` is, if it is one.
    frame: Option<&'a Frame>,
}

impl<'a> FrameFields<'a> {
    /// The parts at `spans` in `bytes`. [`get`](FrameFields::get) panics for a span outside of
    /// `bytes`.
    #[inline]
    pub fn new(bytes: &'a [u8], spans: &'a [Span]) -> FrameFields<'a> {
        FrameFields { bytes, spans, frame: None }
    }

    /// The parts at `spans` in the payload of a frame, which can be [kept](FrameFields::keep)
    /// without a copy.
    #[inline]
    pub fn of_frame(frame: &'a Frame, spans: &'a [Span]) -> FrameFields<'a> {
        FrameFields { bytes: frame, spans, frame: Some(frame) }
    }

    /// Other parts of the same message.
    #[inline]
    pub fn with_spans<'b>(self, spans: &'b [Span]) -> FrameFields<'b>
    where
        'a: 'b,
    {
        FrameFields { spans, ..self }
    }

    /// The number of parts.
    #[inline]
    pub fn len(&self) -> usize {
        self.spans.len()
    }

    /// True if there are no parts.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// The places of the parts.
    #[inline]
    pub fn spans(&self) -> &'a [Span] {
        self.spans
    }

    /// Part `n`, empty if there is none.
    #[inline]
    pub fn get(&self, n: usize) -> &'a [u8] {
        let (from, to) = self.spans.get(n).copied().unwrap_or_default();
        &self.bytes[from as usize..to as usize]
    }

    /// The parts from `n` on.
    pub fn from(self, n: usize) -> impl ExactSizeIterator<Item = &'a [u8]> {
        (n.min(self.len())..self.len()).map(move |n| self.get(n))
    }

    /// Part `n` in lower case, to compare or to print. Bytes that are not UTF-8 are replaced.
    pub fn word(&self, n: usize) -> String {
        String::from_utf8_lossy(self.get(n)).to_ascii_lowercase()
    }

    /// Appends copies of all parts to `bytes`, and their places there to `spans`. Where nearly all
    /// bytes from the first part to the last one are theirs, they are copied in one go.
    #[inline]
    pub(crate) fn copy_to(&self, bytes: &mut Vec<u8>, spans: &mut Vec<Span>) {
        let (Some(&(from, _)), Some(&(_, to))) = (self.spans.first(), self.spans.last()) else { return };
        let before = bytes.len() as u32;
        let (mut at, mut between, mut are_in_order) = (from, 0, true);
        for &(from, to) in self.spans {
            are_in_order &= at <= from && from <= to;
            between += from.wrapping_sub(at) as usize;
            at = to;
        }
        if are_in_order
            && let Some(all) = self.bytes.get(from as usize..to as usize)
            && between <= BETWEEN_BYTES_MAX * self.len()
        {
            bytes.extend_from_slice(all);
            spans.extend(self.spans.iter().map(|span| (before + span.0 - from, before + span.1 - from)));
            return;
        }
        for part in self.from(0) {
            let from = bytes.len() as u32;
            bytes.extend_from_slice(part);
            spans.push((from, bytes.len() as u32));
        }
    }

    /// Keeps part `n` for longer than its frame lives.
    #[inline]
    pub fn keep(&self, n: usize) -> OwnedField {
        let bytes = self.get(n);
        if let Some(frame) = self.frame.filter(|_| bytes.len() >= KEPT_BYTES_MIN) {
            let lease = frame.clone().into_lease();
            if !lease.is_pooled() && lease.pinned_bytes() <= bytes.len() + bytes.len() / 4 {
                return OwnedField(Held::Block(Frame::new(lease, self.spans[n].0 as usize, bytes.len())));
            }
        }
        OwnedField(Held::Copy(bytes.to_vec()))
    }
}

impl fmt::Debug for FrameFields<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.from(0).map(<[u8]>::escape_ascii)).finish()
    }
}

/// Bytes that outlive their frame, such as the value of a key: a copy, or the block in which they
/// were received, so that a large value is never copied.
///
/// A block is kept from 16 KiB on if it is not a receive buffer and at most a quarter larger than
/// the part in it. A frame that is larger than a receive buffer has such a block.
///
/// ```
/// use ringserve::framing::{OwnedField, FrameFields};
///
/// let mut value: OwnedField = FrameFields::new(b"hello", &[(0, 5)]).keep(0);
/// value.to_mut().extend_from_slice(b" there");
/// assert_eq!(*value, *b"hello there");
/// ```
#[doc(alias = "Kept")]
pub struct OwnedField(Held);

enum Held {
    Copy(Vec<u8>),
    Block(Frame),
}

impl OwnedField {
    /// Takes part `n` in place of the old bytes. A copy goes into the old memory if that is not
    /// much too large.
    #[inline]
    pub fn replace(&mut self, parts: FrameFields<'_>, n: usize) {
        let bytes = parts.get(n);
        match &mut self.0 {
            Held::Copy(own)
                if bytes.len() < KEPT_BYTES_MIN
                    && (own.capacity() / 4..=own.capacity()).contains(&bytes.len()) =>
            {
                own.clear();
                own.extend_from_slice(bytes);
            }
            _ => *self = parts.keep(n),
        }
    }

    /// The bytes, to be changed. Bytes in a block are copied out first.
    #[inline]
    pub fn to_mut(&mut self) -> &mut Vec<u8> {
        if let Held::Block(frame) = &self.0 {
            self.0 = Held::Copy(frame.to_vec());
        }
        match &mut self.0 {
            Held::Copy(bytes) => bytes,
            Held::Block(_) => unreachable!("it was copied"),
        }
    }

    /// The block of the bytes, to be [lent](ringserve_server::ReplyWriter::lend).
    #[inline]
    pub fn block(&self) -> Option<&Frame> {
        match &self.0 {
            Held::Copy(_) => None,
            Held::Block(frame) => Some(frame),
        }
    }
}

impl Default for OwnedField {
    fn default() -> OwnedField {
        OwnedField(Held::Copy(Vec::new()))
    }
}

impl Deref for OwnedField {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match &self.0 {
            Held::Copy(bytes) => bytes,
            Held::Block(frame) => frame,
        }
    }
}

impl AsRef<[u8]> for OwnedField {
    #[inline]
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for OwnedField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kept({} bytes)", self.len())
    }
}

#[cfg(test)]
mod tests {
    use ringserve_buf::Lease;

    use super::*;

    #[test]
    fn copied_parts_are_the_same_and_little_else_goes_along() {
        let bytes: Vec<u8> = (0..200).collect();
        for (spans, copied) in [
            (vec![], 0),
            (vec![(3, 7)], 4),
            (vec![(3, 7), (9, 9), (20, 90)], 87),
            (vec![(0, 0), (150, 160)], 10),
            (vec![(90, 95), (3, 7), (40, 41)], 10),
            (vec![(3, 90), (7, 9)], 89),
        ] {
            let parts = FrameFields::new(&bytes, &spans);
            let (mut to, mut places) = (b"before".to_vec(), vec![(0, 6)]);
            parts.copy_to(&mut to, &mut places);
            let copy = FrameFields::new(&to, &places[1..]);
            assert_eq!((copy.len(), to.len() - 6), (parts.len(), copied), "{spans:?}");
            assert!(copy.from(0).eq(parts.from(0)), "{spans:?}");
        }
    }

    #[test]
    #[should_panic = "out of range"]
    fn part_outside_of_its_bytes_is_copied_from_no_others() {
        let (mut bytes, mut spans) = (b"others".to_vec(), Vec::new());
        FrameFields::new(b"own", &[(0, 5)]).copy_to(&mut bytes, &mut spans);
    }

    #[test]
    fn large_part_stays_in_its_block_unless_that_is_much_larger() {
        let block = |bytes: usize| Frame::new(Lease::copy_of(&vec![b'x'; bytes]), 0, bytes);
        let (frame, len) = (block(20_000), 19_900);
        let spans = [(100, 100 + len), (0, 10), (0, 15_000)];
        let parts = FrameFields::of_frame(&frame, &spans);
        assert!(parts.keep(0).block().is_some_and(|kept| kept.len() == len as usize));
        assert!(parts.keep(1).block().is_none(), "small");
        assert!(parts.keep(2).block().is_none(), "below 16 KiB");
        assert!(FrameFields::new(&frame, &spans).keep(0).block().is_none(), "of no frame");
        let frame = block(40_000);
        assert!(FrameFields::of_frame(&frame, &[(0, 20_000)]).keep(0).block().is_none(), "half of its block");
    }

    #[test]
    fn replaced_bytes_take_the_memory_of_the_last_ones_if_it_fits() {
        let parts = FrameFields::new(&[b'x'; 1000], &[(0, 1000), (0, 300), (0, 20)]);
        let mut kept = parts.keep(0);
        let memory = kept.as_ptr();
        kept.replace(parts, 1);
        assert_eq!((kept.as_ptr(), kept.len()), (memory, 300));
        kept.replace(parts, 2);
        assert_eq!((kept.len(), kept.to_mut().capacity()), (20, 20), "1000 bytes are not kept for 20");
    }

    #[test]
    fn block_that_changes_is_copied_before() {
        let frame = Frame::new(Lease::copy_of(&[b'x'; 20_000]), 0, 20_000);
        let mut kept = FrameFields::of_frame(&frame, &[(0, 20_000)]).keep(0);
        kept.to_mut()[0] = b'y';
        assert_eq!((kept[0], frame[0]), (b'y', b'x'));
    }
}
