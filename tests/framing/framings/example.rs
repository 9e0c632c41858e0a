//! `examples/custom_framing.rs` and the guide that explains it.

use ringserve::framing::{Decode, Framing, LengthPrefix, encode_to_vec};
use ringserve::{CloseReason, ServerHandle};

use super::custom_framing::{ACK, Frames, HEADER_BYTES, Header, Http2Frames, PAYLOAD_BYTES_MAX, PING};
use ringserve_tests::client::End;
use ringserve_tests::{self, Client, no_time_limits, pattern};

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    [&Header { length: payload.len(), kind, flags, stream }.bytes()[..], payload].concat()
}

#[track_caller]
fn served(test: impl Fn(&ServerHandle)) {
    for driver in super::drivers() {
        let running = super::start(driver, Http2Frames, no_time_limits(), || Frames);
        test(&running);
        ringserve_tests::finish(running);
    }
}

#[test]
fn a_ping_is_acknowledged_and_its_acknowledgement_is_not() {
    served(|running| {
        let mut client = Client::connect(running.local_addrs()[0]);
        // A reserved bit is ignored, and unset in the answer.
        client.write(b"\0\0\x08\x06\0\x80\0\0\0pingpong");
        assert_eq!(client.read(17), b"\0\0\x08\x06\x01\0\0\0\0pingpong");
        client.write(&frame(PING, ACK, 0, b"pingpong"));
        client.write(&frame(PING, 0, 0, b"_second_"));
        assert_eq!(client.read(17), frame(PING, ACK, 0, b"_second_"), "nothing came between");
    });
}

#[test]
fn other_frames_come_back() {
    served(|running| {
        let mut client = Client::connect(running.local_addrs()[0]);
        let all = [0, 1, 1000, PAYLOAD_BYTES_MAX].map(|len| frame(0, 1, 0x7FFF_FFFF, &pattern(len))).concat();
        client.write(&all);
        assert!(client.read(all.len()) == all);
        for byte in &frame(4, 0, 0, b"one by one") {
            client.write(&[*byte]);
        }
        assert_eq!(client.read(19), frame(4, 0, 0, b"one by one"));
        client.finish_writing();
        assert_eq!(client.end(), End::Fin);
    });
}

#[test]
fn half_a_frame_is_noticed() {
    let running = super::start(Default::default(), Http2Frames, no_time_limits(), || Frames);
    let mut client = Client::connect(running.local_addrs()[0]);
    client.write(&frame(0, 0, 1, b"whole"));
    client.read(HEADER_BYTES + 5);
    client.write(&frame(0, 0, 1, b"cut off")[..12]);
    client.finish_writing();
    assert_eq!(client.end(), End::Fin);
    assert_eq!(ringserve_tests::finish(running).counters.closed_for(CloseReason::PeerClosedMidFrame), 1);
}

#[test]
fn the_framing_is_the_one_that_ships_but_for_its_limit() {
    let shipped = LengthPrefix::bytes(3).adjust(6).keep_header(true);
    let wire = frame(1, 2, 3, b"payload");
    for end in 3..=wire.len() {
        // The one that ships asks for the length first, and then for all of the rest.
        let found = Http2Frames.decode(&wire[..end], 0);
        assert!(found == shipped.decode(&wire[..end], 0) || (end < 9 && found == Ok(Decode::More(9 - end))));
    }
    for wrong in [&wire[..wire.len() - 1], &wire[..4], &wire.repeat(2)] {
        assert!(encode_to_vec(&Http2Frames, wrong).is_err());
    }
    assert_eq!(encode_to_vec(&Http2Frames, &wire), Ok(wire));
    let claim = |length| Header { length, kind: 0, flags: 0, stream: 0 }.bytes();
    let whole = Decode::More(PAYLOAD_BYTES_MAX);
    assert_eq!(Http2Frames.decode(&claim(PAYLOAD_BYTES_MAX), 0), Ok(whole));
    assert!(Http2Frames.decode(&claim(PAYLOAD_BYTES_MAX + 1), 0).is_err());
}

#[test]
fn the_guide_shows_the_example_as_it_is() {
    let guide = include_str!("../../../docs/guide/framing.md");
    let example = include_str!("../../../examples/custom_framing.rs");
    let shown: Vec<&str> = guide
        .split("```rust,ignore\n")
        .skip(1)
        .map(|rest| rest.split_once("```").expect("a block ends").0)
        .collect();
    assert_eq!(shown.len(), 4);
    for block in shown {
        assert!(example.contains(block), "not in the example:\n{block}");
    }
}
