//! Things that a client must not do, and ends of connections.

use ringserve_core::CloseReason;
use ringserve_websocket::frame::{Opcode, put_masked};
use ringserve_websocket::{WebSocketOptions, WebSocketTransport, close};

use crate::side::{MASK, Side, close_code, frame};

#[test]
fn what_breaks_the_rules_is_told_its_code_and_ends() {
    let fragment = |opcode, payload: &[u8]| frame(false, opcode, payload);
    let close_frame = |payload: &[u8]| frame(true, Opcode::Close, payload);
    let cases: Vec<(&str, Vec<u8>, u16)> = vec![
        ("not masked", b"\x82\x02hi".to_vec(), 1002),
        ("a reserved bit", b"\xc2\x82\x00\x00\x00\x00hi".to_vec(), 1002),
        ("a reserved opcode", b"\x83\x80\x00\x00\x00\x00".to_vec(), 1002),
        ("a ping in pieces", b"\x09\x80\x00\x00\x00\x00".to_vec(), 1002),
        ("a long ping", b"\x89\xfe\x00\x7e\x00\x00\x00\x00".to_vec(), 1002),
        ("a longer length than needed", b"\x82\xfe\x00\x05\x00\x00\x00\x00hello".to_vec(), 1002),
        ("2^63", [b"\x82\xff\x80", &[0; 11][..]].concat(), 1002),
        ("a continuation of nothing", frame(true, Opcode::Continuation, b"x"), 1002),
        (
            "a message in a message",
            [fragment(Opcode::Text, b"x"), frame(true, Opcode::Text, b"y")].concat(),
            1002,
        ),
        ("no text", frame(true, Opcode::Text, b"\xc3("), 1007),
        ("half a character", frame(true, Opcode::Text, b"gr\xc3"), 1007),
        (
            "half a character at the end of fragments",
            [fragment(Opcode::Text, b"a\xf0\x9f"), frame(true, Opcode::Continuation, b"\x98")].concat(),
            1007,
        ),
        ("half a code", close_frame(b"\x03"), 1002),
        ("a code that is none", close_frame(&1006u16.to_be_bytes()), 1002),
        ("a reason that is no text", close_frame(b"\x03\xe8\xff"), 1007),
        ("too large", frame(true, Opcode::Binary, &[0; 1001]), 1009),
        (
            "too large in fragments",
            [fragment(Opcode::Binary, &[0; 600]), frame(true, Opcode::Continuation, &[0; 401])].concat(),
            1009,
        ),
    ];
    let options = WebSocketOptions::new().message_bytes_max(1000);
    for (what, wire, code) in cases {
        for transport in [WebSocketTransport::stream(&options), WebSocketTransport::messages(&options)] {
            for is_cut in [false, true] {
                let mut side = Side::open(&transport);
                if is_cut {
                    side.takes_each(&wire)
                } else {
                    side.takes(&wire)
                }
                assert_eq!(side.violation(), Some(code.into()), "{what}");
                assert_eq!(side.close_code(), Some(code), "{what}");
                assert_eq!(side.channel.held_bytes(), 0, "{what}");
            }
        }
    }
}

#[test]
fn text_is_refused_where_bytes_alone_are_taken() {
    let bytes = frame(true, Opcode::Binary, b"hi");
    let options = WebSocketOptions::new().binary_only();
    for text in [
        frame(true, Opcode::Text, b"no"),
        frame(false, Opcode::Text, b""),
        frame(true, Opcode::Text, &[b'x'; 600]),
    ] {
        // Alone, and after messages that are taken together.
        for wire in [text.clone(), [&bytes[..], &bytes, &text].concat()] {
            for transport in [WebSocketTransport::stream(&options), WebSocketTransport::messages(&options)] {
                for is_cut in [false, true] {
                    let mut side = Side::open(&transport);
                    if is_cut {
                        side.takes_each(&wire)
                    } else {
                        side.takes(&wire)
                    }
                    assert_eq!(side.close_code(), Some(1003));
                    let taken = side.plain.windows(2).filter(|two| two == b"hi").count();
                    assert_eq!(taken, if wire.len() > text.len() { 2 } else { 0 });
                }
            }
        }
    }
    let mut side = Side::open(&WebSocketTransport::stream(&options));
    side.takes(&[frame(false, Opcode::Binary, b"h"), frame(true, Opcode::Continuation, b"i")].concat());
    assert_eq!((&*side.plain, side.fault), (&b"hi"[..], None));
}

#[test]
fn text_in_fragments_ends_at_the_fragment_that_is_none() {
    let mut side = Side::messages();
    side.takes(&frame(false, Opcode::Text, b"a\xf0\x9f"));
    assert!(side.fault.is_none() && side.channel.is_mid_record());
    side.takes(&frame(false, Opcode::Continuation, b"\xff"));
    assert_eq!(side.violation(), Some(1007));
}

#[test]
fn a_length_that_is_too_large_is_refused_before_its_payload() {
    let options = WebSocketOptions::new().message_bytes_max(1 << 20);
    let mut side = Side::open(&WebSocketTransport::messages(&options));
    side.takes(b"\x82\xff\x00\x00\x00\x00\x00\x10\x00\x01\x00\x00\x00\x00");
    assert_eq!(side.violation(), Some(1009));
    let mut side = Side::open(&WebSocketTransport::messages(&options));
    side.takes(b"\x82\xff\x00\x00\x00\x00\x00\x10\x00\x00\x00\x00\x00\x00");
    assert!(side.fault.is_none());
    assert_eq!(side.channel.eof_error(), Some(CloseReason::PeerClosedMidFrame));
}

#[test]
fn the_latest_ping_is_answered_once() {
    let mut side = Side::messages();
    for n in 0..100_000u32 {
        side.takes(&frame(true, Opcode::Ping, &n.to_be_bytes()));
    }
    assert!(side.out.is_empty(), "a ping is answered when there is room");
    assert_eq!(side.says(), [&b"\x8a\x04"[..], &99_999u32.to_be_bytes()].concat());
    assert!(side.says().is_empty());
    side.takes(&frame(true, Opcode::Pong, b"unasked"));
    assert_eq!((side.says().len(), side.speaks), (0, 100_000));
    assert!(side.channel.on_heartbeat());
    assert_eq!(side.says(), b"\x89\x00");
    assert!(side.says().is_empty() && side.channel.held_bytes() == 0);
}

#[test]
fn fragments_without_end_hold_what_a_message_may_have() {
    let mut side = Side::messages();
    side.takes(&frame(false, Opcode::Binary, b""));
    for _ in 0..100_000 {
        side.takes(&frame(false, Opcode::Continuation, b""));
    }
    assert!(side.fault.is_none() && side.channel.is_mid_record() && side.channel.held_bytes() < 64);
    let kib = frame(false, Opcode::Continuation, &[1; 1024]);
    let mut most = 0;
    for _ in 0..2000 {
        side.takes(&kib);
        most = most.max(side.channel.held_bytes());
    }
    assert_eq!(side.violation(), Some(1009));
    assert!((1 << 20..=(2 << 20) + 64).contains(&most), "{most}");
}

#[test]
fn the_peers_close_is_echoed_and_nothing_behind_it_is_heard() {
    for (payload, code) in [(&b"\x03\xe9leaving"[..], Some(1001)), (b"\x0f\xa0", Some(4000)), (b"", None)] {
        let mut side = Side::messages();
        side.takes(&[frame(true, Opcode::Close, payload), frame(true, Opcode::Text, b"more")].concat());
        assert!(side.is_closed && side.plain.is_empty());
        let info = side.info();
        assert_eq!(info.peer_code(), Some(code.unwrap_or(1005)));
        assert_eq!(info.peer_reason(), if code == Some(1001) { "leaving" } else { "" });
        assert_eq!(close_code(&side.ends(CloseReason::PeerClosed)), code);
    }
}

#[test]
fn the_code_at_the_end_is_that_of_the_service_or_of_the_reason() {
    let mut side = Side::stream();
    side.info().end_with(4001, "tired");
    side.info().end_with(4002, "");
    assert_eq!(side.ends(CloseReason::Closed), b"\x88\x07\x0f\xa1tired");
    for (reason, code) in [
        (CloseReason::Shutdown, close::GOING_AWAY),
        (CloseReason::HandlerError, close::INTERNAL_ERROR),
        (CloseReason::ReadTooSlow, close::POLICY),
    ] {
        assert_eq!(close_code(&Side::stream().ends(reason)), Some(code));
    }
    // Only writing ends.
    let (mut side, mut said) = (Side::stream(), Vec::new());
    side.channel.finish(&mut said);
    assert_eq!(close_code(&said), Some(close::NORMAL));
}

#[test]
fn a_peer_that_ends_in_a_message_is_cut_off() {
    let mut wire = Vec::new();
    put_masked(false, 0, Opcode::Text, b"abc", MASK, &mut wire);
    for mut side in [Side::stream(), Side::messages()] {
        side.takes(&wire);
        assert_eq!(side.channel.eof_error(), Some(CloseReason::PeerClosedMidFrame));
        side.takes(&frame(true, Opcode::Continuation, b""));
        assert_eq!(side.channel.eof_error(), None);
        // Also if a layer below announces the end of the input.
        for piece in [&wire[..3], &wire[3..7]] {
            side.takes(piece);
            assert_eq!(side.channel.eof_error(), Some(CloseReason::PeerClosedMidFrame));
        }
    }
}
