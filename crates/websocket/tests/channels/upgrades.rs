//! Starts of connections.

use std::sync::Arc;

use ringserve_core::CloseReason;
use ringserve_websocket::frame::Opcode;
use ringserve_websocket::{Accept, Reject, WebSocketOptions, WebSocketTransport};

use crate::side::{Side, frame, request};

fn answer(side: &Side) -> String {
    String::from_utf8(side.out.clone()).unwrap()
}

#[test]
fn a_request_is_answered_however_it_comes() {
    let transport = WebSocketTransport::stream(&WebSocketOptions::new());
    let head = request("/chat?room=1", "");
    let wire = [&head[..], &frame(true, Opcode::Binary, b"early")].concat();
    for cut in 0..=wire.len() {
        let mut side = Side::new(&transport);
        side.takes(&wire[..cut]);
        assert_eq!(side.is_ready, cut >= head.len());
        // In the head, or in the header of the frame.
        let is_mid = (1..head.len()).contains(&cut) || (head.len() + 1..head.len() + 6).contains(&cut);
        assert_eq!(side.channel.is_mid_record(), is_mid, "{cut}");
        side.takes(&wire[cut..]);
        assert!(side.is_ready && side.fault.is_none());
        assert_eq!(side.plain, b"early");
        assert!(answer(&side).starts_with("HTTP/1.1 101 "));
        assert!(answer(&side).ends_with("Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"));
        let info = side.info();
        assert_eq!((info.path(), info.query(), info.protocol()), ("/chat", Some("room=1"), None));
        assert_eq!(side.channel.held_bytes(), 0);
    }
    let mut side = Side::new(&transport);
    side.takes_each(&wire);
    assert_eq!((&side.plain[..], side.pieces), (&b"early"[..], 5));
}

#[test]
fn requests_that_say_the_same_end_apart() {
    let options = WebSocketOptions::new().protocols(["chat"]).upgrade(|upgrade| {
        Ok(upgrade.query().map_or_else(Accept::new, |name| Accept::new().data(name.to_owned())))
    });
    let transport = WebSocketTransport::messages(&options);
    let open = |target: &str, fields: &str| {
        let mut side = Side::new(&transport);
        side.takes(&request(target, fields));
        assert!(side.is_ready);
        side
    };
    let first = open("/a", "");
    let mut second = open("/a", "");
    let chat = open("/a", "Sec-WebSocket-Protocol: chat\r\n");
    // More requests than are remembered.
    let others = ["/b", "/", "/c", "/d", "/e"].map(|target| open(target, ""));
    let ann = open("/a?ann", "");
    let bob = open("/a?bob", "");
    let again = open("/a", "");
    first.info().end_with(4001, "go");
    second.takes(&frame(true, Opcode::Close, &[&4002u16.to_be_bytes()[..], b"bye"].concat()));
    assert_eq!((second.info().peer_code(), second.info().peer_reason()), (Some(4002), "bye".to_owned()));
    for side in [&first, &chat, &ann, &bob, &again].into_iter().chain(&others) {
        assert_eq!(side.info().peer_code(), None, "{:?}", side.info());
    }
    let targets = others.each_ref().map(|side| side.info().target().to_owned());
    assert_eq!(targets, ["/b", "/", "/c", "/d", "/e"]);
    let protocols = [&first, &chat, &again].map(|side| side.info().protocol().map(str::to_owned));
    assert_eq!(protocols, [None, Some("chat".to_owned()), None]);
    let kept = [&first, &ann, &bob].map(|side| side.info().data::<String>().map(|name| name.to_string()));
    assert_eq!(kept, [None, Some("ann".to_owned()), Some("bob".to_owned())]);
    let code = |side: &mut Side| side.ends(CloseReason::Closed)[2..4].to_vec();
    let codes =
        [first, second, chat, again].map(|mut side| u16::from_be_bytes(code(&mut side).try_into().unwrap()));
    assert_eq!(codes, [4001, 4002, 1000, 1000]);
}

#[test]
fn kept_value_goes_with_its_connection() {
    let value = Arc::new(());
    let kept = value.clone();
    let options = WebSocketOptions::new().upgrade(move |_| Ok(Accept::new().data(kept.clone())));
    let transport = WebSocketTransport::stream(&options);
    let sides = [Side::open(&transport), Side::open(&transport)];
    assert!(Arc::strong_count(&value) >= 4);
    drop(sides);
    assert_eq!(Arc::strong_count(&value), 2, "the test and the closure have it");
}

#[test]
fn what_is_no_request_is_answered_with_http_and_ends() {
    let transport = WebSocketTransport::stream(&WebSocketOptions::new());
    let long = [b"GET / HTTP/1.1\r\nx: ", &[b'x'; 17 << 10][..]].concat();
    for (wire, status) in [
        (&b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"[..], 426),
        (b"POST / HTTP/1.1\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (&long, 431),
    ] {
        for is_cut in [false, true] {
            let mut side = Side::new(&transport);
            if is_cut {
                side.takes_each(wire)
            } else {
                side.takes(wire)
            }
            assert_eq!(side.fault, Some(CloseReason::UpgradeRefused(status)));
            let answer = answer(&side);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
            assert!(answer.contains("\r\nConnection: close\r\n"), "{answer}");
            assert_eq!(answer.contains("\r\nUpgrade: websocket\r\n"), status == 426);
            assert!(side.channel.info_on_demand().is_none() && side.channel.held_bytes() == 0);
        }
    }
}

#[test]
fn the_program_decides_about_a_request() {
    let options =
        WebSocketOptions::new().origins(["https://example.org"]).protocols(["b", "a"]).upgrade(|upgrade| {
            match (upgrade.path(), upgrade.cookie("user")) {
                ("/", Some(user)) => Ok(Accept::new().data(user.to_owned()).header("X-Seen", "1")),
                ("/old", _) => Ok(Accept::new().protocol("old")),
                _ => Err(Reject::new(401).text("who are you?")),
            }
        });
    let transport = WebSocketTransport::messages(&options);
    let asks = |target: &str, fields: &str| {
        let mut side = Side::new(&transport);
        side.takes(&request(target, fields));
        side
    };
    let side =
        asks("/", "Cookie: user=ann\r\nOrigin: https://example.org\r\nSec-WebSocket-Protocol: a, b\r\n");
    assert_eq!(side.info().protocol(), Some("b"));
    assert_eq!(side.info().data::<String>().as_deref().map(|user| &**user), Some("ann"));
    assert!(side.info().data::<u32>().is_none());
    assert!(answer(&side).contains("\r\nSec-WebSocket-Protocol: b\r\nX-Seen: 1\r\n\r\n"));
    // The chosen protocol is sent only if the client offered it.
    assert_eq!(asks("/old", "").info().protocol(), None);
    assert_eq!(asks("/old", "Sec-WebSocket-Protocol: old\r\n").info().protocol(), Some("old"));
    for (target, fields, status) in [
        ("/", "", 401),
        ("/", "Cookie: user=ann\r\nOrigin: https://evil.example\r\n", 403),
        ("/", "Cookie: user=ann\r\nOrigin: null\r\n", 403),
    ] {
        let side = asks(target, fields);
        assert_eq!(side.fault, Some(CloseReason::Refused), "{fields}");
        assert!(answer(&side).starts_with(&format!("HTTP/1.1 {status} ")), "{}", answer(&side));
    }
}
