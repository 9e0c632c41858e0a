//! Messages, from the client and to it.

use proptest::prelude::*;
use ringserve_core::framing::{Cut, TypedFraming};
use ringserve_websocket::frame::{DecodeOutcome, Header, Opcode, put_masked};
use ringserve_websocket::{
    Extension, InflateError, Kind, Messages, WebSocketOptions, WebSocketTransport, utf8,
};

use crate::side::{MASK, Side, frame};

/// The messages that the framing cuts out of `bytes`.
fn cut(mut bytes: &[u8]) -> Vec<(Kind, Vec<u8>)> {
    let mut messages = Vec::new();
    while !bytes.is_empty() {
        let Ok(Cut::Frame { skip, len, consumed, head }) = Messages::default().cut(&mut (), bytes, 0) else {
            panic!("{} bytes are no message", bytes.len());
        };
        messages.push((head, bytes[skip..skip + len].to_vec()));
        bytes = &bytes[consumed..];
    }
    messages
}

/// A message in frames, with pings in between.
#[derive(Clone, Debug)]
struct Sent {
    kind: Kind,
    fragments: Vec<Vec<u8>>,
    pings: bool,
}

impl Sent {
    fn payload(&self) -> Vec<u8> {
        self.fragments.concat()
    }

    fn put(&self, mask: [u8; 4], wire: &mut Vec<u8>) {
        for (at, fragment) in self.fragments.iter().enumerate() {
            let opcode = if at == 0 { self.kind.opcode() } else { Opcode::Continuation };
            put_masked(at + 1 == self.fragments.len(), 0, opcode, fragment, mask, wire);
            if self.pings {
                put_masked(true, 0, Opcode::Ping, &[at as u8; 3], mask, wire);
            }
        }
    }
}

fn sent() -> impl Strategy<Value = Sent> {
    let size = prop_oneof![0..130usize, 0..700usize, 65_530..65_540usize];
    let bytes = size.prop_map(|size| (0..size).map(|at| (at * 7) as u8).collect::<Vec<u8>>());
    let text = prop_oneof![
        (0..90usize).prop_map(|count| "aé€😀".chars().cycle().take(count).collect::<String>()),
        Just("x".repeat(3000)),
    ];
    let payload = prop_oneof![
        bytes.prop_map(|bytes| (Kind::Binary, bytes)),
        text.prop_map(|text| (Kind::Text, text.into_bytes())),
    ];
    let cuts = prop::collection::vec(any::<prop::sample::Index>(), 0..4);
    (payload, cuts, any::<bool>()).prop_map(|((kind, bytes), cuts, pings)| {
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
        cuts.sort_unstable();
        let mut fragments = Vec::new();
        let mut from = 0;
        for cut in cuts.into_iter().chain([bytes.len()]) {
            fragments.push(bytes[from..cut].to_vec());
            from = cut;
        }
        Sent { kind, fragments, pings }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn messages_come_out_as_they_were_sent_however_they_are_cut(
        sent in prop::collection::vec(sent(), 1..6),
        mask in any::<[u8; 4]>(),
        pieces in prop::collection::vec(prop_oneof![1..8usize, 1..400usize, 1..40_000usize], 1..20),
    ) {
        let mut wire = Vec::new();
        sent.iter().for_each(|message| message.put(mask, &mut wire));
        for mut side in [Side::stream(), Side::messages()] {
            let (mut rest, mut pieces) = (&wire[..], pieces.iter().cycle());
            while !rest.is_empty() {
                let (piece, more) = rest.split_at((*pieces.next().unwrap()).min(rest.len()));
                side.takes(piece);
                rest = more;
            }
            prop_assert_eq!(side.fault, None);
            prop_assert_eq!(side.channel.held_bytes(), 0);
            prop_assert!(!side.channel.is_mid_record() && side.channel.eof_error().is_none());
            let has_pings = sent.iter().any(|message| message.pings);
            prop_assert_eq!(side.speaks > 0, has_pings);
            // The latest ping is answered, once.
            prop_assert_eq!(side.says().len(), if has_pings { 5 } else { 0 });
            prop_assert!(side.says().is_empty());
            let expected: Vec<_> = sent.iter().map(|message| (message.kind, message.payload())).collect();
            let is_stream = side.plain.len() == expected.iter().map(|(_, bytes)| bytes.len()).sum::<usize>();
            if is_stream {
                prop_assert_eq!(side.plain, sent.iter().flat_map(Sent::payload).collect::<Vec<u8>>());
            } else {
                prop_assert_eq!(cut(&side.plain), expected);
            }
        }
    }
}

#[test]
fn small_messages_that_came_together_are_handed_on_together() {
    let wire: Vec<u8> = (0..16u8).flat_map(|n| frame(true, Opcode::Text, &[b'a' + n; 64])).collect();
    for mut side in [Side::stream(), Side::messages()] {
        side.takes(&wire);
        assert_eq!(side.pieces, 1);
        side.takes(&[&wire[..], &frame(true, Opcode::Ping, b""), &wire[..]].concat());
        assert_eq!((side.pieces, side.speaks), (3, 1));
    }
    let mut side = Side::messages();
    side.takes(&wire);
    assert_eq!(cut(&side.plain).len(), 16);
    // Each message has the kind of its frame, whatever the one before it is.
    let mut side = Side::messages();
    let sent: Vec<(Kind, u8)> = (0..16).map(|n| [(Kind::Text, b'a'), (Kind::Binary, 0xff)][n % 2]).collect();
    let opcode = |kind| if kind == Kind::Text { Opcode::Text } else { Opcode::Binary };
    side.takes(
        &sent.iter().flat_map(|(kind, byte)| frame(true, opcode(*kind), &[*byte; 64])).collect::<Vec<u8>>(),
    );
    let found: Vec<(Kind, u8)> = cut(&side.plain).iter().map(|(kind, bytes)| (*kind, bytes[0])).collect();
    assert_eq!((found, side.pieces), (sent, 1));
    // A text that is not UTF-8 ends the connection, and those before it are passed on.
    let mut side = Side::messages();
    let bad = frame(true, Opcode::Text, b"no \xff text");
    side.takes(&[&wire[..], &bad, &wire[..]].concat());
    assert_eq!((cut(&side.plain).len(), side.violation(), side.close_code()), (16, Some(1007), Some(1007)));
}

#[test]
fn replies_leave_behind_one_header_and_as_they_are() {
    let mut side = Side::stream();
    assert_eq!(side.sends(b"a\nb\n"), b"\x82\x04a\nb\n");
    assert_eq!(side.sends(&[7; 300])[..4], [0x82, 126, 1, 44]);
    assert_eq!(side.sends(&[7; 70_000])[..10], [0x82, 127, 0, 0, 0, 0, 0, 1, 0x11, 0x70]);
    let mut side = Side::open(&WebSocketTransport::stream(&WebSocketOptions::new().text()));
    assert_eq!(side.sends(b"a\n"), b"\x81\x02a\n");
    let mut side = Side::messages();
    assert_eq!(side.sends(b"\x81\x01a\x82\x01b"), b"\x81\x01a\x82\x01b");
}

/// Doubles each byte; used by tests that compress nothing.
struct Doubles;

impl Extension for Doubles {
    fn negotiate(&self, offers: &str) -> Option<String> {
        offers.split(", ").any(|offer| offer == "x-doubles").then(|| "x-doubles".to_owned())
    }

    fn inflate(&mut self, payload: &[u8], bytes_max: usize, out: &mut Vec<u8>) -> Result<(), InflateError> {
        if payload == b"!" {
            return Err(InflateError::Malformed);
        }
        if payload.len() / 2 > bytes_max {
            return Err(InflateError::TooLarge);
        }
        out.extend(payload.iter().step_by(2));
        Ok(())
    }

    fn compress(&mut self, payload: &[u8]) -> Option<&[u8]> {
        match payload {
            b"small" => None,
            b"ab" => Some(b"aabb"),
            _ => Some(b"other"),
        }
    }
}

fn compressing(messages: bool, fields: &str) -> Side {
    let options = WebSocketOptions::new().message_bytes_max(100).extension(|| Doubles);
    let mut side = Side::new(&match messages {
        true => WebSocketTransport::messages(&options),
        false => WebSocketTransport::stream(&options),
    });
    side.takes(&crate::side::request("/", fields));
    let agreed = String::from_utf8_lossy(&side.out).contains("Sec-WebSocket-Extensions: x-doubles\r\n");
    assert_eq!(agreed, !fields.is_empty());
    side.out.clear();
    side
}

const OFFER: &str = "Sec-WebSocket-Extensions: x-doubles\r\n";

#[test]
fn compressed_messages_are_inflated_and_replies_compressed() {
    let compressed = |fin, opcode, payload: &[u8]| {
        let mut wire = Vec::new();
        put_masked(fin, if opcode == Opcode::Continuation { 0 } else { 4 }, opcode, payload, MASK, &mut wire);
        wire
    };
    for is_cut in [false, true] {
        for messages in [false, true] {
            let mut side = compressing(messages, OFFER);
            let wire = [
                compressed(true, Opcode::Binary, b"hheelllloo"),
                frame(true, Opcode::Text, b"plain"),
                compressed(false, Opcode::Text, b"ggrr\xc3"),
                frame(true, Opcode::Ping, b""),
                compressed(true, Opcode::Continuation, b"\xc3\xbc\xbc"),
            ]
            .concat();
            if is_cut {
                side.takes_each(&wire)
            } else {
                side.takes(&wire)
            }
            assert_eq!(side.fault, None);
            if messages {
                let expected: [(Kind, &[u8]); 3] =
                    [(Kind::Binary, b"hello"), (Kind::Text, b"plain"), (Kind::Text, "grü".as_bytes())];
                assert_eq!(cut(&side.plain), expected.map(|(kind, bytes)| (kind, bytes.to_vec())));
            } else {
                assert_eq!(side.plain, "helloplaingrü".as_bytes());
            }
            assert_eq!(side.channel.held_bytes(), 0);
        }
    }
    let mut side = compressing(false, OFFER);
    assert_eq!(side.sends(b"ab"), b"\xc2\x04aabb");
    assert_eq!(side.sends(b"small"), b"\x82\x05small");
    let mut side = compressing(true, OFFER);
    assert_eq!(side.sends(b"\x81\x02ab\x82\x05small\x82\x02ab"), b"\xc1\x04aabb\x82\x05small\xc2\x04aabb");
    // A client that did not ask gets none, and may send none.
    let mut side = compressing(true, "");
    assert_eq!(side.sends(b"\x81\x02ab"), b"\x81\x02ab");
    side.takes(&compressed(true, Opcode::Binary, b"aa"));
    assert_eq!((side.violation(), side.close_code()), (Some(1002), Some(1002)));
}

#[test]
fn what_inflates_to_too_much_or_to_nothing_ends_the_connection() {
    for (payload, code) in [(&[b'x'; 202][..], 1009), (b"!", 1007), (b"\xff\xff", 1007)] {
        let options = WebSocketOptions::new().message_bytes_max(100).extension(|| Doubles);
        let mut side = Side::new(&WebSocketTransport::messages(&options));
        side.takes(&crate::side::request("/", OFFER));
        side.out.clear();
        // Two frames, neither of which has too many bytes.
        let (first, second) = payload.split_at(payload.len() / 2);
        let mut wire = Vec::new();
        put_masked(false, 4, Opcode::Text, first, MASK, &mut wire);
        put_masked(true, 0, Opcode::Continuation, second, MASK, &mut wire);
        side.takes(&wire);
        assert_eq!((side.violation(), side.close_code()), (Some(code), Some(code as u16)), "{payload:?}");
        assert!(side.plain.is_empty() && side.channel.held_bytes() == 0);
    }
}

#[test]
fn message_may_have_a_longer_compressed_form() {
    let options = WebSocketOptions::new().message_bytes_max(60).extension(|| Doubles);
    for (says, code) in [(60, None), (61, Some(1009)), (80, Some(1009))] {
        for frames in [1, 2] {
            let mut side = Side::new(&WebSocketTransport::messages(&options));
            side.takes(&crate::side::request("/", OFFER));
            side.out.clear();
            let payload = vec![b'x'; 2 * says];
            let mut wire = Vec::new();
            for (at, part) in payload.chunks(payload.len() / frames).enumerate() {
                let opcode = if at == 0 { Opcode::Text } else { Opcode::Continuation };
                put_masked(at + 1 == frames, if at == 0 { 4 } else { 0 }, opcode, part, MASK, &mut wire);
            }
            if says > 70 {
                // A form that is much too long is not kept.
                wire.pop();
            }
            side.takes(&wire);
            assert_eq!(side.close_code(), code, "{says} in {frames}");
            if code.is_none() {
                assert_eq!(cut(&side.plain), [(Kind::Text, vec![b'x'; says])]);
            }
        }
    }
}

#[test]
fn headers_of_replies_are_those_of_a_server() {
    let mut side = Side::messages();
    let reply = Kind::Text.header(2);
    let wire = side.sends(&[&reply[..], b"ok"].concat());
    let Ok(DecodeOutcome::Header(header, 2)) = Header::decode(&wire) else { panic!("{wire:x?}") };
    assert_eq!(header, Header::whole(Opcode::Text, 2));
    assert!(utf8::is_text(&wire[2..]));
}
