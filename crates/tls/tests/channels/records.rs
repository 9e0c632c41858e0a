//! Bytes through a channel, however they are cut.

use std::sync::Arc;

use proptest::prelude::*;
use ringserve_buf::Lease;
use ringserve_core::{Batch, CloseReason};
use ringserve_tls::TlsListener;
use ringserve_tls::rustls::crypto::cipher::OutboundPlainMessage;
use ringserve_tls::rustls::version::{TLS12, TLS13};
use ringserve_tls::rustls::{ClientConnection, ConnectionTrafficSecrets, ContentType, ProtocolVersion};

use crate::pair::{Authority, Pair, client_config, listener};

#[test]
fn both_versions_carry_bytes_with_keys_of_both_kinds() {
    let authority = Authority::new("authority");
    for cert in [authority.ecdsa(&["localhost"]), authority.rsa(&["localhost"])] {
        let (chain, key) = cert.pems();
        let listener = TlsListener::new(crate::server().certificate(chain, key)).unwrap();
        for (version, name) in [(&TLS12, "TLSv1_2"), (&TLS13, "TLSv1_3")] {
            let config = Arc::new(client_config(&authority, &[version], None));
            let mut pair = Pair::new(&listener, &config, "localhost").connected();
            pair.say(b"hello");
            assert_eq!(pair.seen.plain, b"hello");
            pair.reply_bytes(b"welcome");
            assert_eq!(pair.heard, b"welcome");
            let info = pair.info();
            assert_eq!((info.version(), info.server_name()), (name, Some("localhost")));
            assert!(!info.is_resumed() && info.alpn().is_none() && info.identity().is_none());
            // The hello and the client's Finished; in version 1.2 its key comes with the latter.
            assert_eq!(pair.seen.steps, 2);
        }
    }
}

/// Bytes of the records in `sealed`.
fn records_of(mut sealed: &[u8]) -> Vec<usize> {
    let mut records = Vec::new();
    while let [_, _, _, high, low, rest @ ..] = sealed {
        let body = usize::from(u16::from_be_bytes([*high, *low]));
        records.push(body);
        sealed = &rest[body..];
    }
    records
}

#[test]
fn answer_begins_with_small_records_after_a_rest() {
    let authority = Authority::new("authority");
    let (chain, key) = authority.ecdsa(&["localhost"]).pems();
    let tls = crate::server().certificate(chain, key);
    let config = Arc::new(client_config(&authority, &[&TLS13], None));
    for (listener, small) in [
        (TlsListener::new(tls.clone()).unwrap(), 4096),
        (TlsListener::new(tls.clone().record_bytes(1000)).unwrap(), 1000),
        (TlsListener::new(tls.clone().record_bytes(16 * 1024)).unwrap(), 16 * 1024 - 24),
    ] {
        let mut pair = Pair::new(&listener, &config, "localhost").connected();
        let mut batches = [Batch::new(), Batch::new()];
        batches[0].put(&[1; 60_000]);
        for piece in 0..600_u32 {
            match piece % 2 {
                0 => batches[1].put(&[1; 100]),
                _ => batches[1].lend(Lease::copy_of(&[1; 100])),
            }
        }
        for batch in &batches {
            let sealed = |pair: &mut Pair| {
                pair.channel.encode(batch, &mut pair.out).unwrap();
                let records = records_of(&pair.out);
                pair.hear();
                records
            };
            for _ in 0..2 {
                pair.channel.on_send_pause();
                let records = sealed(&mut pair);
                let start = 16_usize.div_ceil(small / 1000);
                assert!(records[..start].iter().all(|record| *record <= small + 24 + 17), "{records:?}");
                assert!(records[start + 1] > 16_000, "{records:?}");
                assert!(sealed(&mut pair)[0] > 16_000);
            }
        }
        assert_eq!(pair.heard.len(), 8 * 60_000);
    }
    for bytes in [511, 16 * 1024 + 1] {
        let error = TlsListener::new(tls.clone().record_bytes(bytes)).unwrap_err();
        assert_eq!(error.to_string(), format!("Tls::record_bytes is {bytes}; it must be 512 to 16384"));
    }
}

#[test]
fn large_frames_go_both_ways_and_leave_no_memory() {
    let authority = Authority::new("authority");
    let listener = listener(&authority);
    for version in [&TLS12, &TLS13] {
        let config = Arc::new(client_config(&authority, &[version], None));
        let mut pair = Pair::new(&listener, &config, "localhost").connected();
        let plain: Vec<u8> = (0..300_000u32).map(|n| (n / 7) as u8).collect();
        pair.splits = vec![16 * 1024; 100];
        pair.say(&plain);
        assert!(pair.seen.plain == plain);
        let mut batch = Batch::new();
        batch.put(b"copied");
        batch.lend(Lease::copy_of(&plain[..70_000]));
        batch.put(b"and");
        batch.lend(Lease::copy_of(&plain[70_000..]));
        pair.channel.encode(&batch, &mut pair.out).unwrap();
        // Four of 4 KiB, then 16 KiB per record, or 24 bytes less: none is cut at the end of a
        // piece.
        assert!(pair.out.len() <= batch.len() + 29 * (4 + batch.len().div_ceil(16 * 1024 - 24)));
        pair.hear();
        assert!(pair.heard == [b"copied", &plain[..70_000], b"and", &plain[70_000..]].concat());
        assert_eq!((pair.channel.held_bytes(), pair.channel.is_mid_record()), (0, false));
    }
}

#[test]
fn first_bytes_may_come_with_the_end_of_the_handshake() {
    let authority = Authority::new("authority");
    let listener = listener(&authority);
    for version in [&TLS12, &TLS13] {
        let config = Arc::new(client_config(&authority, &[version], None));
        let mut pair = Pair::new(&listener, &config, "localhost");
        // Written before there are keys: rustls sends it right after its Finished.
        pair.client.set_buffer_limit(None);
        std::io::Write::write_all(&mut pair.client.writer(), &[7; 200_000]).unwrap();
        pair.exchange();
        assert_eq!((pair.seen.ready, pair.seen.plain.len()), (1, 200_000));
        pair.say(b"more");
        assert_eq!(&pair.seen.plain[200_000..], b"more");
        assert_eq!(pair.channel.held_bytes(), 0);
    }
}

#[test]
fn reply_to_what_came_with_the_handshake_follows_the_tickets() {
    let authority = Authority::new("authority");
    let listener = listener(&authority);
    for version in [&TLS12, &TLS13] {
        let config = Arc::new(client_config(&authority, &[version], None));
        let mut pair = Pair::new(&listener, &config, "localhost");
        std::io::Write::write_all(&mut pair.client.writer(), b"hello").unwrap();
        while pair.seen.ready == 0 {
            let bytes = pair.client_bytes();
            pair.feed(&bytes);
            if pair.seen.ready == 0 {
                pair.hear();
            }
        }
        // Nothing was received or sent in between.
        let mut batch = Batch::new();
        batch.put(b"welcome");
        pair.channel.encode(&batch, &mut pair.out).unwrap();
        pair.channel.finish(&mut pair.out);
        pair.hear();
        pair.exchange();
        assert_eq!((&pair.heard[..], &pair.client_error), (&b"welcome"[..], &None));
    }
}

#[test]
fn partial_record_takes_memory_as_its_bytes_come() {
    let authority = Authority::new("authority");
    let listener = listener(&authority);
    let config = Arc::new(client_config(&authority, &[&TLS13], None));
    let mut pair = Pair::new(&listener, &config, "localhost").connected();
    std::io::Write::write_all(&mut pair.client.writer(), &[7; 16 * 1024]).unwrap();
    let record = pair.client_bytes();
    for at in 0..record.len() {
        assert!(
            pair.channel.held_bytes() <= (2 * at).min(record.len()),
            "{} at {at}",
            pair.channel.held_bytes()
        );
        assert_eq!(pair.channel.is_mid_record(), at > 0);
        pair.feed(&record[at..at + 1]);
    }
    assert_eq!(pair.seen.plain, [7; 16 * 1024]);
    assert_eq!((pair.channel.held_bytes(), pair.channel.is_mid_record()), (0, false));
}

#[test]
fn key_updates_of_the_peer_are_answered_with_the_next_bytes() {
    let authority = Authority::new("authority");
    let listener = listener(&authority);
    let config = Arc::new(client_config(&authority, &[&TLS13], None));
    let mut pair = Pair::new(&listener, &config, "localhost").connected();
    for round in 0..40 {
        pair.client.refresh_traffic_keys().unwrap();
        pair.say(&[round]);
        pair.reply_bytes(&[round]);
    }
    assert_eq!(pair.seen.plain, pair.heard);
    assert_eq!(pair.heard.len(), 40);
}

#[test]
fn flood_of_key_updates_ends_the_connection() {
    let authority = Authority::new("authority");
    let listener = listener(&authority);
    let config = Arc::new(client_config(&authority, &[&TLS13], None));
    let mut pair = Pair::new(&listener, &config, "localhost").connected();
    let mut rounds = 0;
    while pair.seen.fault.is_none() {
        pair.client.refresh_traffic_keys().unwrap();
        pair.exchange();
        assert!(pair.out.len() < 100);
        rounds += 1;
        assert!(rounds < 100, "nothing bounds them");
    }
    assert_eq!(pair.seen.fault, Some(CloseReason::TlsBadRecord));
}

#[test]
fn message_behind_the_handshake_that_never_ends_is_bounded() {
    let authority = Authority::new("authority");
    let listener = listener(&authority);
    let mut config = client_config(&authority, &[&TLS13], None);
    config.enable_secret_extraction = true;
    let config = Arc::new(config);
    // Padded to the size of a record, or as small as possible.
    for padding in [16 * 1024 - 2, 0] {
        let mut pair = Pair::new(&listener, &config, "localhost").connected();
        let other = ClientConnection::new(config.clone(), "localhost".try_into().unwrap()).unwrap();
        let client = std::mem::replace(&mut pair.client, other);
        let suite = client.negotiated_cipher_suite().unwrap().tls13().unwrap();
        let (mut number, secrets) = client.dangerous_extract_secrets().unwrap().tx;
        let (ConnectionTrafficSecrets::Aes128Gcm { key, iv }
        | ConnectionTrafficSecrets::Aes256Gcm { key, iv }
        | ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv }) = secrets
        else {
            panic!("a cipher that is not known")
        };
        let mut cipher = suite.aead_alg.encrypter(key, iv);
        // A message of 65 535 bytes, one byte per record. The bytes after the type of a record are
        // its padding.
        let message = [&[4, 0, 0xff, 0xff][..], &[0; 0xffff]].concat();
        let mut most = 0;
        for byte in message {
            let inner = [&[byte, 22][..], &vec![0; padding]].concat();
            let plain = OutboundPlainMessage {
                typ: ContentType::Unknown(0),
                version: ProtocolVersion::TLSv1_3,
                payload: inner[..].into(),
            };
            let record = cipher.encrypt(plain, number).unwrap().encode();
            number += 1;
            pair.feed(&record);
            most = most.max(pair.channel.held_bytes());
            if pair.seen.fault.is_some() {
                break;
            }
            assert!(most <= 128 * 1024, "nothing bounds it");
        }
        assert_eq!((&pair.seen.fault, pair.channel.held_bytes()), (&Some(CloseReason::TlsBadRecord), 0));
        assert!(most > 0 && pair.seen.plain.is_empty());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn splits_do_not_matter(
        splits in prop::collection::vec(prop_oneof![1usize..8, 1usize..600, 1usize..20_000], 1..400),
        sizes in prop::collection::vec(0usize..40_000, 1..5),
        modern in any::<bool>(),
        fragment in prop::option::of(32usize..2000),
    ) {
        let authority = Authority::new("authority");
        let listener = listener(&authority);
        let mut config = client_config(&authority, &[if modern { &TLS13 } else { &TLS12 }], None);
        config.max_fragment_size = fragment;
        let mut pair = Pair::new(&listener, &Arc::new(config), "localhost");
        pair.splits = splits;
        let mut pair = pair.connected();
        let mut said = Vec::new();
        for (n, size) in sizes.into_iter().enumerate() {
            let plain = vec![n as u8; size];
            pair.say(&plain);
            said.extend(plain);
        }
        prop_assert!(pair.seen.plain == said);
        prop_assert_eq!((pair.channel.held_bytes(), pair.channel.is_mid_record()), (0, false));
        pair.reply_bytes(&said);
        prop_assert!(pair.heard == said);
    }

    #[test]
    fn bytes_of_any_sort_are_refused_or_waited_for(bytes in prop::collection::vec(any::<u8>(), 0..3000), at in 0usize..3) {
        let authority = Authority::new("authority");
        let listener = listener(&authority);
        let config = Arc::new(client_config(&authority, &[&TLS13], None));
        let mut pair = Pair::new(&listener, &config, "localhost");
        match at {
            0 => {}
            1 => {
                let hello = pair.client_bytes();
                pair.feed(&hello);
            }
            _ => pair.exchange(),
        }
        let ready = pair.seen.ready;
        for chunk in bytes.chunks(97) {
            pair.feed(chunk);
        }
        prop_assert_eq!(pair.seen.ready, ready);
        prop_assert_eq!(&pair.seen.plain, b"");
        prop_assert!(pair.channel.held_bytes() <= 64 * 1024);
    }
}
