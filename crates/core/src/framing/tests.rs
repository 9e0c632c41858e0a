use alloc::boxed::Box;
use alloc::vec::Vec;

use proptest::prelude::*;

use super::*;
use crate::Batch;

fn encoded(framing: &impl Framing, payloads: &[Vec<u8>]) -> Vec<u8> {
    let mut batch = Box::new(Batch::new());
    for payload in payloads {
        framing.encode(Payload::Bytes(payload), &mut Outbox::new(&mut batch, true)).unwrap();
    }
    batch.pieces().flatten().copied().collect()
}

/// Decodes all of `wire`, showing the framing one more piece at a time.
fn decoded(framing: &impl Framing, wire: &[u8], cuts: &[usize]) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    let (mut start, mut scanned) = (0, 0);
    let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (wire.len() + 1)).chain([wire.len()]).collect();
    ends.sort_unstable();
    for end in ends {
        loop {
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

fn any_length() -> impl Strategy<Value = LengthPrefix> {
    (prop::sample::select(&[1u8, 2, 4, 8]), any::<bool>()).prop_map(|(width, little)| {
        LengthPrefix::bytes(width).order(if little { ByteOrder::Little } else { ByteOrder::Big })
    })
}

proptest! {
    #[test]
    fn any_split_gives_the_same_length_frames(
        framing in any_length(),
        payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..20),
        cuts in prop::collection::vec(any::<usize>(), 0..30),
    ) {
        let wire = encoded(&framing, &payloads);
        prop_assert_eq!(decoded(&framing, &wire, &cuts), payloads);
    }

    #[test]
    fn any_split_gives_the_same_lines(
        crlf in any::<bool>(),
        payloads in prop::collection::vec("[ -~]{0,100}", 0..20),
        cuts in prop::collection::vec(any::<usize>(), 0..30),
    ) {
        let framing = if crlf { Lines::crlf() } else { Lines::default() };
        let payloads: Vec<Vec<u8>> = payloads.into_iter().map(|line| line.into_bytes()).collect();
        let wire = encoded(&framing, &payloads);
        prop_assert_eq!(decoded(&framing, &wire, &cuts), payloads);
    }

    #[test]
    fn raw_frames_joined_are_the_stream(
        bytes in prop::collection::vec(any::<u8>(), 0..500),
        cuts in prop::collection::vec(any::<usize>(), 0..30),
    ) {
        prop_assert_eq!(decoded(&Raw, &bytes, &cuts).concat(), bytes);
    }

    #[test]
    fn garbage_never_panics_and_never_reads_beyond(
        framing in any_length(),
        bytes in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        for found in [framing.decode(&bytes, 0), Lines::default().decode(&bytes, 0), Raw.decode(&bytes, 0)] {
            if let Ok(Decode::Frame { skip, len, consumed }) = found {
                prop_assert!(skip + len <= consumed && consumed <= bytes.len() && consumed > 0);
            }
        }
    }
}

#[test]
fn a_length_near_the_end_of_the_address_space_does_not_overflow() {
    for byte in [0xFF, 0x7F] {
        let mut bytes = [0xFF; 9];
        bytes[0] = byte;
        let found = LengthPrefix::bytes(8).decode(&bytes, 0).unwrap();
        assert!(matches!(found, Decode::More(more) if more > 1 << 60), "{found:?}");
    }
}

#[test]
fn a_payload_longer_than_its_prefix_is_refused_and_nothing_is_written() {
    let mut batch = Box::new(Batch::new());
    let payload = [0; 256];
    let refused = LengthPrefix::bytes(1).encode(Payload::Bytes(&payload), &mut Outbox::new(&mut batch, true));
    assert!(refused.is_err() && batch.is_empty());
}

#[test]
fn only_large_frames_that_fill_their_buffer_are_lent() {
    use ringserve_buf::Lease;
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
