//! Properties of every framing that ships, with every option.

mod errors;
mod shapes;

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;

use bytes::{BufMut, Bytes};
use proptest::prelude::*;
use ringserve_buf::{Lease, ReplyWriter};

use super::*;
use crate::Frame;
use crate::connection::{Found, Inbox, cut};

use shapes::{Shape, any_shape};

/// A limit above every frame of these tests.
const MAX: usize = 1 << 20;

/// Decodes all of `wire`, showing the framing one more piece at a time.
fn decoded(framing: &dyn Framing, wire: &[u8], ends: &[usize]) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    let (mut start, mut scanned) = (0, 0);
    for &end in ends {
        while start < end {
            match framing.decode(&wire[start..end], scanned).unwrap() {
                Decode::More(more) => {
                    assert!(more >= 1);
                    scanned = end - start;
                    break;
                }
                Decode::Frame { skip, len, consumed } => {
                    frames.push(wire[start + skip..start + skip + len].to_vec());
                    start += consumed;
                    scanned = 0;
                    assert!(consumed >= 1 && start <= end);
                }
            }
        }
    }
    assert_eq!(start, wire.len(), "bytes are left over");
    frames
}

/// Runs pieces through an inbox as a shard does. Returns each frame, and whether it was copied.
fn received(
    framing: &impl Framing,
    pieces: &[&[u8]],
    max: usize,
) -> (Vec<(Vec<u8>, bool)>, Option<FrameError>) {
    let (mut inbox, state, mut frames) = (Inbox::default(), FramingState::new(()), Vec::new());
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
                    frames.push((frame.to_vec(), !range.contains(&frame.wire().as_ptr())));
                }
                Found::More(missing) if !inbox.has_partial() => {
                    inbox.begin(&lease, missing, Default::default()).unwrap();
                    lease = Lease::empty();
                }
                Found::More(_) => assert!(lease.is_empty()),
                Found::Bad(error) => return (frames, Some(error)),
                Found::Piece(_) | Found::NoMemory => unreachable!(),
            }
        }
    }
    (frames, None)
}

/// The ends of a stream's pieces: these places, and its own end.
fn ends_of(cuts: &[usize], len: usize) -> Vec<usize> {
    let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (len + 1)).chain([len]).collect();
    ends.sort_unstable();
    ends.dedup();
    ends
}

fn pieces_of<'a>(wire: &'a [u8], ends: &[usize]) -> Vec<&'a [u8]> {
    let starts = [0].into_iter().chain(ends.iter().copied());
    starts.zip(ends).map(|(start, &end)| &wire[start..end]).collect()
}

fn any_bodies() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let small = prop::collection::vec(any::<u8>(), 0..200);
    let large = (1000usize..5000, any::<u8>()).prop_map(|(len, byte)| alloc::vec![byte; len]);
    prop::collection::vec(prop_oneof![4 => small, 1 => large], 0..20)
}

proptest! {
    #[test]
    fn a_reply_is_written_as_defined_or_refused(shape in any_shape(), bodies in any_bodies()) {
        let framing = shape.framing();
        for body in bodies {
            match shape.payload(&body) {
                Ok(frame) => prop_assert_eq!(encode_to_vec(&framing, &frame.payload).unwrap(), frame.wire),
                Err(payload) => prop_assert!(encode_to_vec(&framing, &payload).is_err(), "{:?}", payload),
            }
        }
    }

    /// Parts that are lent among copied ones, by the framing itself and by the path of framings
    /// that copy the payload out.
    #[test]
    fn a_reply_written_in_place_is_the_encoded_one(
        shape in any_shape(),
        bodies in any_bodies(),
        cuts in prop::collection::vec(any::<usize>(), 0..4),
        lends in any::<u8>(),
    ) {
        let framing = shape.framing();
        let (mut batch, mut by_copy) = (Batch::new(), Batch::new());
        batch.put(b"before");
        let mut expected = b"before".to_vec();
        for body in bodies {
            let payload = shape.payload(&body).map_or_else(|payload| payload, |frame| frame.payload);
            let pieces = pieces_of(&payload, &ends_of(&cuts, payload.len())).into_iter().enumerate();
            let write = |out: &mut ReplyWriter<'_>| pieces.for_each(|(n, piece)| match lends >> n & 1 {
                1 => out.lend(Lease::copy_of(piece)),
                _ => out.put_slice(piece),
            });
            let before = batch.len();
            let mut place = InPlace::begin(&mut batch, framing.encoding.header_room());
            place.write(write.clone());
            prop_assert_eq!(&*place.payload(), &payload);
            let framed = framing.encoding.encode_written(&mut place);
            place.finish();
            prop_assert_eq!(framed, encode_to_vec(&framing, &payload).map(|frame| expected.extend(frame)));
            if framed.is_err() {
                batch.roll_back(before);
            }
            batch.invariants();

            let mut place = InPlace::begin(&mut by_copy, 3);
            place.write(write);
            let copied = framing.encode_written(&mut place);
            place.finish();
            prop_assert_eq!(copied, framed);
        }
        prop_assert_eq!(&batch.into_bytes(), &expected);
        by_copy.invariants();
        prop_assert_eq!(&by_copy.into_bytes(), &expected[6..]);
    }

    #[test]
    fn any_split_gives_the_same_frames(
        shape in any_shape(),
        bodies in any_bodies(),
        cuts in prop::collection::vec(any::<usize>(), 0..30),
    ) {
        let frames: Vec<_> = bodies.iter().filter_map(|body| shape.payload(body).ok()).collect();
        let wire: Vec<u8> = frames.iter().flat_map(|frame| frame.wire.clone()).collect();
        let payloads: Vec<Vec<u8>> = frames.into_iter().map(|frame| frame.payload).collect();
        let found = decoded(&shape.framing(), &wire, &ends_of(&cuts, wire.len()));
        if shape == Shape::Raw {
            prop_assert_eq!(found.concat(), payloads.concat());
        } else {
            prop_assert_eq!(found, payloads);
        }
    }

    /// Otherwise a whole frame would wait for bytes of the next one.
    #[test]
    fn the_start_of_a_frame_asks_for_no_more_than_the_frame(
        shape in any_shape(),
        body in prop_oneof![4 => prop::collection::vec(any::<u8>(), 0..6), 1 => prop::collection::vec(any::<u8>(), 300)],
    ) {
        let (frame, framing) = (shape.payload(&body), shape.framing());
        for (seen, _) in frame.iter().flat_map(|frame| frame.wire.iter().enumerate()) {
            let wire = &frame.as_ref().unwrap().wire;
            match framing.decode(&wire[..seen], 0) {
                Ok(Decode::More(more)) => prop_assert!((1..=wire.len() - seen).contains(&more), "{seen}: {more}"),
                found => prop_assert!(shape == Shape::Raw, "{seen}: {found:?}"),
            }
        }
    }

    #[test]
    fn a_frame_is_copied_exactly_when_it_spans_buffers(
        shape in any_shape(),
        bodies in any_bodies(),
        cuts in prop::collection::vec(any::<usize>(), 0..30),
    ) {
        let frames: Vec<_> = bodies.iter().filter_map(|body| shape.payload(body).ok()).collect();
        let wire: Vec<u8> = frames.iter().flat_map(|frame| frame.wire.clone()).collect();
        let ends = ends_of(&cuts, wire.len());
        let pieces = pieces_of(&wire, &ends);
        let (found, error) = received(&shape.framing(), &pieces, MAX);
        prop_assert_eq!(error, None);
        if shape == Shape::Raw {
            let expected: Vec<_> = pieces.iter().filter(|piece| !piece.is_empty()).collect();
            prop_assert_eq!(found.len(), expected.len());
            prop_assert!(found.iter().all(|(_, copied)| !copied));
            return Ok(());
        }
        let mut start = 0;
        let expected: Vec<_> = frames
            .into_iter()
            .map(|frame| {
                let end = start + frame.wire.len();
                let spans = ends.iter().any(|cut| start < *cut && *cut < end);
                start = end;
                (frame.payload, spans)
            })
            .collect();
        prop_assert_eq!(found, expected);
    }

    /// The stream below is garbage for most framings; cut or not, it ends in the same error.
    #[test]
    fn garbage_is_refused_whole_or_in_pieces_and_never_panics(
        shape in any_shape(),
        bytes in prop::collection::vec(prop_oneof![Just(b'a'), Just(b'b'), Just(b'\n'), any::<u8>()], 0..600),
        cuts in prop::collection::vec(any::<usize>(), 0..30),
        max in 1usize..700,
    ) {
        let framing = shape.framing();
        let (whole, error) = received(&framing, &[&bytes], max);
        let (cut, error_cut) = received(&framing, &pieces_of(&bytes, &ends_of(&cuts, bytes.len())), max);
        if shape != Shape::Raw {
            let payloads = |frames: Vec<(Vec<u8>, bool)>| -> Vec<Vec<u8>> {
                frames.into_iter().map(|(payload, _)| payload).collect()
            };
            prop_assert_eq!(payloads(whole), payloads(cut));
        }
        prop_assert_eq!(error.map(FrameError::name), error_cut.map(FrameError::name));
    }

    #[test]
    fn what_was_seen_before_changes_no_answer(
        shape in any_shape(),
        bytes in prop::collection::vec(prop_oneof![Just(b'a'), Just(b'b'), Just(b'\n'), any::<u8>()], 1..300),
    ) {
        let framing = shape.framing();
        let found = framing.decode(&bytes, 0);
        if let Ok(Decode::Frame { skip, len, consumed }) = found {
            prop_assert!(skip + len <= consumed && consumed <= bytes.len() && consumed > 0);
        }
        for scanned in 1..bytes.len() {
            if !matches!(framing.decode(&bytes[..scanned], 0), Ok(Decode::More(_))) {
                break;
            }
            prop_assert_eq!(framing.decode(&bytes, scanned), found);
        }
    }
}

#[test]
fn only_large_frames_that_fill_their_buffer_are_lent() {
    let lent = |frame: usize, block: usize, lend: bool| {
        let frame = Frame::new(Lease::from(Vec::from_iter((0..block).map(|_| 0))), 0, frame);
        let mut batch = Box::new(Batch::new());
        Outbox::new(&mut batch, lend).payload(Payload::Frame(frame));
        batch.held_bytes() >= block && batch.single().is_some()
    };
    assert!(lent(4096, 16384, true));
    assert!(!lent(4095, 16384, true), "too small");
    assert!(!lent(4096, 16385 * 2, true), "less than a quarter of its buffer");
    assert!(!lent(4096, 16384, false), "memory is short");
}

#[test]
fn owned_bytes_are_kept_from_a_size_on() {
    let queued = |payload: Payload<'_>| {
        let mut batch = Batch::new();
        Outbox::new(&mut batch, false).payload(payload);
        (batch.lent.len(), batch.into_bytes())
    };
    for len in [0, 1, 4095, 4096, 32767] {
        let bytes = alloc::vec![7; len];
        assert_eq!(queued(bytes.clone().into()), (0, bytes));
    }
    let bytes = alloc::vec![7; 32768];
    assert_eq!(queued(bytes.clone().into()), (1, bytes.clone()));
    assert_eq!(queued(Bytes::from(bytes.clone()).into()), (1, bytes.clone()));
    assert_eq!(queued(Arc::<[u8]>::from(&bytes[..]).into()), (1, bytes.clone()));
    assert_eq!(queued((&bytes).into()), (0, bytes), "what is lent by the caller is copied");
}
