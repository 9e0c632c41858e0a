use hyper::rt::ReadBuf;
use proptest::prelude::*;

use super::*;

const PREFACE: &[u8; PREFACE_BYTES as usize] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const NOW: Time = Time::ZERO;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let len = (payload.len() as u32).to_be_bytes();
    [&len[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

fn rests() -> Rests {
    let mut rests = Rests::new(1 << 20);
    rests.replayed(PREFACE);
    rests
}

/// All that is passed on of `bytes`, which come in pieces, into buffers of `room`.
fn pass(rests: &mut Rests, bytes: &[u8], piece: usize, room: usize) -> Vec<u8> {
    let mut passed = Vec::new();
    for mut piece in bytes.chunks(piece) {
        while !piece.is_empty() {
            let mut space = vec![0; room];
            let mut buf = ReadBuf::new(&mut space);
            let taken = rests.take(piece, &mut buf.unfilled(), || NOW);
            assert!(taken > 0 || !buf.filled().is_empty(), "it goes on");
            piece = &piece[taken..];
            passed.extend_from_slice(buf.filled());
        }
    }
    let mut space = [0; HEADER_BYTES];
    let mut buf = ReadBuf::new(&mut space);
    rests.give_held(&mut buf.unfilled());
    passed.extend_from_slice(buf.filled());
    passed
}

/// The bytes that leave of `bytes`, which hyper writes in pieces, where `most` are taken at once.
fn write(rests: &mut Rests, bytes: &[u8], piece: usize, most: usize) -> Vec<u8> {
    let mut left = Vec::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        let pieces: Vec<_> = rest.chunks(piece).take(8).map(IoSlice::new).collect();
        match rests.next_out(&pieces, || NOW) {
            Out::Keep(stream) => {
                rests.went(&pieces, RESET_BYTES);
                rests.keep(stream, NOW);
                rest = &rest[RESET_BYTES..];
            }
            Out::Pass(count) => {
                let count = count.min(most);
                rests.went(&pieces, count);
                left.extend_from_slice(&rest[..count]);
                rest = &rest[count..];
            }
        }
    }
    left
}

#[test]
fn reset_for_no_error_is_kept_back_until_its_time() {
    for (piece, most) in [(1000, 1000), (50, 7), (13, 1000)] {
        let mut rests = rests();
        let data = frame(DATA, 1, 3, &[b'.'; 39]);
        let reset = frame(RST_STREAM, 0, 3, &NO_ERROR.to_be_bytes());
        let other = frame(RST_STREAM, 0, 5, &CANCEL.to_be_bytes());
        // What looks like a reset within another frame is none.
        let inside = frame(DATA, 0, 7, &[&[0; 4][..], &reset, &[0; 5]].concat());
        let all = [&data[..], &inside, &reset, &other, &data].concat();
        let left = write(&mut rests, &all, piece, most);
        if piece != 13 {
            assert_eq!(left, [&data[..], &inside, &other, &data].concat(), "{piece} {most}");
            rests.pass_time(NOW + (TIME_MAX - Duration::from_nanos(1)));
            assert_eq!(rests.take_said(), b"");
            rests.pass_time(NOW + TIME_MAX);
            assert_eq!(rests.take_said(), reset);
            assert_eq!(rests.next(), Some(NOW + TOLD_TIME), "of the other stream");
            rests.pass_time(NOW + TOLD_TIME);
            assert_eq!(rests.next(), Some(NOW + TIME_MAX + TOLD_TIME));
            rests.pass_time(NOW + TIME_MAX + TOLD_TIME);
            assert_eq!(rests.next(), None);
        } else {
            assert!(left.len() >= all.len() - RESET_BYTES, "a reset in two pieces may leave at once");
        }
    }
}

#[test]
fn frames_of_the_server_stand_between_those_of_hyper() {
    let mut rests = rests();
    rests.keep(1, NOW);
    rests.went(&[IoSlice::new(&frame(DATA, 0, 3, b"half")[..11])], 11);
    rests.pass_time(NOW + TIME_MAX);
    assert_eq!(rests.take_said(), b"");
    rests.went(&[IoSlice::new(b"lf")], 2);
    assert_eq!(rests.take_said().len(), RESET_BYTES);
}

#[test]
fn frames_of_the_server_stand_behind_headers_that_are_whole() {
    for kind in [HEADERS, PUSH_PROMISE] {
        let mut rests = rests();
        rests.keep(1, NOW);
        rests.went(&[IoSlice::new(&frame(kind, END_STREAM, 3, b"large"))], usize::MAX);
        rests.pass_time(NOW + TIME_MAX);
        assert_eq!(rests.take_said(), b"");
        rests.went(&[IoSlice::new(&frame(CONTINUATION, 0, 3, b"and larger"))], usize::MAX);
        assert_eq!(rests.take_said(), b"");
        rests.went(&[IoSlice::new(&frame(CONTINUATION, END_HEADERS, 3, b"whole"))], usize::MAX);
        assert_eq!(rests.take_said().len(), RESET_BYTES);
    }
}

#[test]
fn rest_that_is_through_or_too_long_is_known() {
    let piece = frame(DATA, 0, 1, &[b'.'; 16_000]);
    let last = frame(DATA, END_STREAM, 1, b"last");
    let mut rests = rests();
    rests.keep(1, NOW);
    for _ in 0..4 {
        assert_eq!(pass(&mut rests, &piece, 5000, 9000), b"");
    }
    assert_eq!(pass(&mut rests, &last, 100, 100), b"");
    let said = rests.take_said();
    let given: Vec<u32> = said.chunks(RESET_BYTES).map(|frame| number(&frame[HEADER_BYTES..])).collect();
    assert_eq!(given.iter().sum::<u32>(), 64_004, "all of it goes back to the window");
    assert!(said.chunks(RESET_BYTES).all(|frame| frame[3] == WINDOW_UPDATE && stream_of(frame) == 0));
    assert_eq!(rests.next(), None);
    assert_eq!(pass(&mut rests, &last, 100, 100), last, "it is the peer's error");
    // Too long.
    rests.keep(1, NOW);
    let resets = |said: &[u8]| said.chunks(RESET_BYTES).filter(|frame| frame[3] == RST_STREAM).count();
    for count in 1..=5 {
        assert_eq!(pass(&mut rests, &piece, 5000, 9000), b"");
        assert_eq!(resets(&rests.take_said()), usize::from(count == 5));
    }
    // What may be on its way then, and more than that.
    for _ in 0..(1 << 20) / 16_000 {
        assert_eq!(pass(&mut rests, &piece, 5000, 9000), b"");
    }
    assert_eq!(pass(&mut rests, &piece, 5000, 9000), piece);
}

#[test]
fn peer_that_resets_its_stream_needs_no_reset() {
    let mut rests = rests();
    rests.keep(1, NOW);
    let reset = frame(RST_STREAM, 0, 1, &CANCEL.to_be_bytes());
    assert_eq!(pass(&mut rests, &reset, 3, 4), reset);
    rests.pass_time(NOW + TIME_MAX);
    assert_eq!((rests.take_said(), rests.next()), (Vec::new(), None));
}

proptest! {
    #[test]
    fn all_but_the_rests_is_passed_on_whatever_the_pieces(
        frames in prop::collection::vec((0u8..4, 0u32..4, 0usize..60), 0..12),
        kept_at in 0usize..12,
        piece in 1usize..40,
        room in 1usize..40,
    ) {
        let mut rests = rests();
        let mut expected = Vec::new();
        let mut passed = Vec::new();
        for (at, (kind, stream, len)) in frames.into_iter().enumerate() {
            if at == kept_at {
                rests.keep(1, NOW);
            }
            // HEADERS, SETTINGS and others beside DATA.
            let kind = [DATA, DATA, 4, 8][usize::from(kind)];
            let bytes = frame(kind, 0, stream, &vec![kind; len]);
            if kind != DATA || stream != 1 || at < kept_at {
                expected.extend_from_slice(&bytes);
            }
            passed.extend(pass(&mut rests, &bytes, piece, room));
        }
        prop_assert_eq!(passed, expected);
    }
}
