//! Ends of connections, and their reasons.

use std::sync::Arc;

use ringserve_core::{Batch, CloseReason, Transport};
use ringserve_tls::rustls::version::{TLS12, TLS13};
use ringserve_tls::rustls::{AlertDescription, Error};
use ringserve_tls::{TlsListener, TlsTransport};

use crate::pair::{Authority, Pair, client_config, listener};

fn pairs() -> impl Iterator<Item = Pair> {
    let authority = Authority::new("authority");
    let listener = listener(&authority);
    [&TLS12, &TLS13].into_iter().map(move |version| {
        let config = Arc::new(client_config(&authority, &[version], None));
        Pair::new(&listener, &config, "localhost")
    })
}

#[test]
fn end_is_announced_once_behind_the_replies() {
    for pair in pairs() {
        let mut pair = pair.connected();
        pair.reply_bytes(b"bye");
        pair.channel.finish(&mut pair.out);
        assert!(!pair.out.is_empty());
        pair.hear();
        assert_eq!(pair.heard, b"bye");
        assert!(pair.client.process_new_packets().unwrap().peer_has_closed());
        pair.channel.finish(&mut pair.out);
        assert!(pair.out.is_empty());
    }
}

#[test]
fn peer_may_end_its_side_and_still_hear_replies() {
    for pair in pairs() {
        let mut pair = pair.connected();
        pair.say(b"last words");
        pair.client.send_close_notify();
        let mut bytes = pair.client_bytes();
        bytes.extend_from_slice(b"whatever comes behind it");
        pair.feed(&bytes);
        assert!(pair.seen.closed && pair.seen.fault.is_none());
        assert!(!pair.channel.is_mid_record());
        pair.reply_bytes(b"an answer");
        pair.channel.finish(&mut pair.out);
        pair.hear();
        assert_eq!(pair.heard, b"an answer");
    }
}

#[test]
fn end_that_comes_with_the_handshake_is_heard_behind_it() {
    for mut pair in pairs() {
        let hello = pair.client_bytes();
        pair.feed(&hello);
        pair.hear();
        pair.client.send_close_notify();
        let finished = pair.client_bytes();
        pair.feed(&finished);
        assert_eq!((pair.seen.ready, pair.seen.closed, &pair.seen.fault), (1, true, &None));
        assert!(pair.channel.info().is_some());
        assert_eq!((pair.channel.held_bytes(), pair.channel.eof_error()), (0, None));
        pair.reply_bytes(b"an answer");
        pair.channel.finish(&mut pair.out);
        pair.hear();
        assert_eq!(pair.heard, b"an answer");
    }
}

#[test]
fn missing_close_notify_is_a_fault_only_where_it_is_required() {
    let authority = Authority::new("authority");
    for required in [false, true] {
        let (chain, key) = authority.ecdsa(&["localhost"]).pems();
        let tls = crate::server().certificate(chain, key).require_close_notify(required);
        let config = Arc::new(client_config(&authority, &[&TLS13], None));
        let mut pair = Pair::new(&TlsListener::new(tls).unwrap(), &config, "localhost");
        assert_eq!(pair.channel.eof_error(), None, "in the handshake");
        pair.exchange();
        assert_eq!(pair.channel.eof_error(), required.then_some(CloseReason::TlsTruncated));
        pair.client.send_close_notify();
        pair.exchange();
        assert_eq!(pair.channel.eof_error(), None);
    }
}

#[test]
fn damaged_record_is_answered_by_an_alert() {
    for pair in pairs() {
        let mut pair = pair.connected();
        std::io::Write::write_all(&mut pair.client.writer(), b"something").unwrap();
        let mut bytes = pair.client_bytes();
        *bytes.last_mut().unwrap() ^= 1;
        pair.feed(&bytes);
        assert_eq!(pair.seen.fault, Some(CloseReason::TlsBadRecord));
        pair.hear();
        assert_eq!(pair.client_error, Some(Error::AlertReceived(AlertDescription::BadRecordMac)));
        let mut batch = Batch::new();
        batch.put(b"too late");
        assert!(pair.channel.encode(&batch, &mut pair.out).is_err());
        pair.channel.finish(&mut pair.out);
        assert!(pair.out.is_empty(), "the alert was the last word");
    }
}

#[test]
fn oversized_record_is_refused_by_its_header() {
    for pair in pairs() {
        let mut pair = pair.connected();
        pair.feed(&[23, 3, 3, 0xff, 0xff]);
        assert_eq!(pair.seen.fault, Some(CloseReason::TlsBadRecord));
        assert!(!pair.out.is_empty());
    }
}

#[test]
fn plain_http_is_answered_by_an_alert() {
    for request in
        [&b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"[..], b"G", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
    {
        for mut pair in pairs() {
            pair.feed(request);
            if request.len() > 4 {
                assert_eq!(pair.out, [21, 3, 3, 0, 2, 2, 50], "decode_error");
                assert_eq!(pair.seen.fault, Some(CloseReason::TlsHandshakeFailed(50)));
            }
            assert_eq!(pair.seen.steps, 0, "it was worth no step");
        }
    }
}

#[test]
fn alert_of_the_peer_is_the_reason() {
    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    let listener = listener(&ours);
    for version in [&TLS12, &TLS13] {
        let config = Arc::new(client_config(&theirs, &[version], None));
        let mut pair = Pair::new(&listener, &config, "localhost");
        pair.exchange();
        assert_eq!(pair.seen.fault, Some(CloseReason::TlsAlertReceived(AlertDescription::UnknownCA.into())));
        assert_eq!(pair.seen.ready, 0);
    }
}

#[test]
fn client_without_a_common_protocol_is_told_so() {
    let authority = Authority::new("authority");
    let (chain, key) = authority.ecdsa(&["localhost"]).pems();
    let listener =
        TlsListener::new(crate::server().certificate(chain, key).alpn(["h2", "http/1.1"])).unwrap();
    let mut config = client_config(&authority, &[&TLS12, &TLS13], None);
    config.alpn_protocols = vec![b"http/1.1".to_vec(), b"h2".to_vec()];
    let pair = Pair::new(&listener, &Arc::new(config.clone()), "localhost").connected();
    assert_eq!(pair.info().alpn(), Some(&b"h2"[..]), "the server's first");
    config.alpn_protocols = vec![b"mqtt".to_vec()];
    let mut pair = Pair::new(&listener, &Arc::new(config.clone()), "localhost");
    pair.exchange();
    assert_eq!(pair.seen.fault, Some(CloseReason::TlsHandshakeFailed(120)));
    assert_eq!(pair.client_error, Some(Error::AlertReceived(AlertDescription::NoApplicationProtocol)));
    config.alpn_protocols = vec![];
    assert_eq!(Pair::new(&listener, &Arc::new(config), "localhost").connected().info().alpn(), None);
}

#[test]
fn services_that_share_a_listener_speak_their_own_protocols() {
    let authority = Authority::new("authority");
    let (chain, key) = authority.ecdsa(&["localhost"]).pems();
    let tls = crate::server().certificate(chain, key);
    let mut config = client_config(&authority, &[&TLS13], None);
    config.alpn_protocols = vec![b"h2".to_vec(), b"mqtt".to_vec()];
    let config = Arc::new(config);
    let agreed = |listener: &TlsListener, transport: &TlsTransport| {
        let mut pair = Pair::new(listener, &config, "localhost");
        pair.channel = transport.begin(&mut pair.out).unwrap();
        pair.connected().info().alpn().map(<[u8]>::to_vec)
    };
    let listener = TlsListener::new(tls.clone()).unwrap();
    let transports: [_; 3] = [&["h2"][..], &["mqtt"], &[]].map(|names| listener.transport_for(names));
    for _ in 0..2 {
        let all = transports.each_ref().map(|transport| agreed(&listener, transport));
        assert_eq!(all, [Some(b"h2".to_vec()), Some(b"mqtt".to_vec()), None]);
        listener.replace(tls.clone()).unwrap();
    }
    // The program's setting holds for all.
    listener.replace(tls.alpn(["mqtt"])).unwrap();
    let all = transports.each_ref().map(|transport| agreed(&listener, transport));
    assert_eq!(all, [(); 3].map(|()| Some(b"mqtt".to_vec())));
}

#[test]
fn handshake_without_an_end_is_bounded() {
    // A ClientHello of 1-byte records that never ends.
    for mut pair in pairs() {
        pair.feed(&[22, 3, 1, 0, 4, 1, 0, 0xff, 0xff]);
        let mut fed = 0;
        while pair.seen.fault.is_none() {
            assert!(pair.channel.held_bytes() <= 128 * 1024);
            pair.feed(&[22, 3, 1, 0, 1, 0]);
            fed += 1;
            assert!(fed < 100_000, "nothing bounds it");
        }
        assert_eq!((pair.seen.steps, pair.channel.held_bytes()), (0, 0));
        assert!(matches!(pair.seen.fault, Some(CloseReason::TlsHandshakeFailed(_))));
    }
}
