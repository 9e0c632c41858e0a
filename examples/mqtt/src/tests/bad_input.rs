//! Packets that break the protocol, and the answers.

use super::*;

/// A CONNECT of version 5 or 3.1.1, and nothing unusual in it.
fn connect(version: u8) -> Vec<u8> {
    Hello::new(version, "bad").bytes()
}

/// The answer of a broker to these bytes, up to the end of the connection.
fn answer_to(bytes: Vec<u8>) -> Vec<u8> {
    let answered = Rc::new(RefCell::new(Vec::new()));
    let answer = answered.clone();
    Sim::seeds(1).run(move |sim| {
        let addr = starts(sim, &[]).addr();
        let (bytes, answer) = (bytes.clone(), answer.clone());
        sim.client("bad", async move |net| {
            let mut stream = net.connect(addr).await?;
            stream.send(&bytes).await?;
            *answer.borrow_mut() = stream.closed().await?;
            Ok(())
        });
        sim.run_until_done();
    });
    answered.take()
}

#[test]
fn first_packet_that_is_no_connect_has_no_answer() {
    for bytes in [
        &b"\xC0\0"[..],
        b"\x30\x03\0\x01a",
        b"\x82\x06\0\x01\0\x01a\0",
        b"\xE0\0",
        // Lengths of five bytes, and of more bytes than they need.
        b"\x10\xFF\xFF\xFF\xFF\x01",
        b"\x10\x80\0",
        // Larger than the largest.
        b"\x10\xFF\xFF\xFF\x7F",
        // No name of a protocol that is known; flags; a text that is cut.
        b"\x10\x0C\0\x04HTTP\x04\x02\0\0\0\0",
        b"\x11\x0C\0\x04MQTT\x04\x02\0\0\0\0",
        b"\x10\x08\0\x04MQTT\0\0",
        b"\x10\x03\0\x04M",
        b"GET / HTTP/1.1\r\n\r\n",
    ] {
        let expected = if bytes[..2] == [0x10, 8] { &[0x20, 2, 0, 1][..] } else { b"" };
        assert_eq!(answer_to(bytes.to_vec()), expected, "{bytes:?}");
    }
}

/// A CONNECT with these flags and what follows the keep-alive, in a version.
fn connect_of(name: &str, version: u8, flags: u8, rest: &[u8]) -> Vec<u8> {
    packet(0x10, &[&text(name)[..], &[version, flags, 0, 0], rest].concat())
}

#[test]
fn connect_that_is_wrong_is_refused_with_its_code() {
    for (what, bytes, expected) in [
        ("version 3", connect_of("MQIsdp", 3, 2, &text("x")), vec![0x20, 2, 0, 1]),
        ("version 6", connect_of("MQTT", 6, 2, &text("x")), vec![0x20, 2, 0, 1]),
        ("no id for a session that is kept", connect_of("MQTT", 4, 0, &text("")), vec![0x20, 2, 0, 2]),
        ("long id", connect_of("MQTT", 4, 2, &text("x".repeat(257))), vec![0x20, 2, 0, 2]),
        ("will of QoS 2", connect_of("MQTT", 4, 0x16, b"\0\x01x\0\x01t\0\0"), vec![0x20, 2, 0, 5]),
        ("reserved flag", connect_of("MQTT", 4, 3, &text("x")), vec![]),
        ("bytes behind it", connect_of("MQTT", 4, 2, b"\0\x01xyz"), vec![]),
        ("invalid UTF-8", connect_of("MQTT", 4, 2, &text(b"\xFF\xFE")), vec![]),
        ("NUL", connect_of("MQTT", 4, 2, &text(b"a\0b")), vec![]),
        ("reserved flag of 5", connect_of("MQTT", 5, 3, b"\0\0\x01x"), vec![0x20, 3, 0, 0x81, 0]),
        ("QoS of no will", connect_of("MQTT", 5, 0xA, b"\0\0\x01x"), vec![0x20, 3, 0, 0x81, 0]),
        (
            "will of QoS 2 in 5",
            connect_of("MQTT", 5, 0x16, b"\0\0\x01x\0\0\x01t\0\0"),
            vec![0x20, 3, 0, 0x9B, 0],
        ),
        (
            "will with a wildcard",
            connect_of("MQTT", 5, 6, b"\0\0\x01x\0\0\x01#\0\0"),
            vec![0x20, 3, 0, 0x90, 0],
        ),
        ("authentication", connect_of("MQTT", 5, 2, b"\x04\x15\0\x01x\0\x01x"), vec![0x20, 3, 0, 0x8C, 0]),
        (
            "authentication data",
            connect_of("MQTT", 5, 2, b"\x04\x16\0\x01x\0\x01x"),
            vec![0x20, 3, 0, 0x8C, 0],
        ),
        (
            "a request that is no flag",
            connect_of("MQTT", 5, 2, b"\x02\x19\x02\0\x01x"),
            vec![0x20, 3, 0, 0x82, 0],
        ),
        (
            "a problem that is no flag",
            connect_of("MQTT", 5, 2, b"\x02\x17\x02\0\x01x"),
            vec![0x20, 3, 0, 0x82, 0],
        ),
        ("a password alone", connect_of("MQTT", 4, 0x42, b"\0\x01x\0\x01p"), vec![]),
        (
            "will that is answered to a filter",
            connect_of("MQTT", 5, 6, b"\0\0\x01x\x04\x08\0\x01#\0\x01t\0\0"),
            vec![0x20, 3, 0, 0x82, 0],
        ),
        ("receive maximum 0", connect_of("MQTT", 5, 2, b"\x03\x21\0\0\0\x01x"), vec![0x20, 3, 0, 0x82, 0]),
        ("largest packet 0", connect_of("MQTT", 5, 2, b"\x05\x27\0\0\0\0\0\x01x"), vec![0x20, 3, 0, 0x82, 0]),
        (
            "a property twice",
            connect_of("MQTT", 5, 2, b"\x06\x21\0\x01\x21\0\x01\0\x01x"),
            vec![0x20, 3, 0, 0x82, 0],
        ),
        ("a property of PUBLISH", connect_of("MQTT", 5, 2, b"\x02\x01\0\0\x01x"), vec![0x20, 3, 0, 0x82, 0]),
        (
            "properties that are cut",
            connect_of("MQTT", 5, 2, b"\x02\x21\0\0\x01x"),
            vec![0x20, 3, 0, 0x81, 0],
        ),
        (
            "invalid UTF-8 in 5",
            connect_of("MQTT", 5, 2, &[&[0][..], &text(b"\xFF")].concat()),
            vec![0x20, 3, 0, 0x81, 0],
        ),
    ] {
        assert_eq!(answer_to(bytes), expected, "{what}");
    }
}

#[test]
fn packet_that_is_wrong_ends_the_connection_with_its_code() {
    let publish = |kind: u8, topic: &[u8], rest: &[u8]| packet(kind, &[&text(topic)[..], rest].concat());
    for (what, bytes, code) in [
        ("second CONNECT", connect(5), 0x82),
        ("packet of a server", vec![0x20, 0], 0x82),
        ("AUTH", vec![0xF0, 0], 0x82),
        ("PUBREL", vec![0x62, 2, 0, 1], 0x82),
        ("type 0", vec![0, 0], 0x82),
        ("flags of SUBSCRIBE", vec![0x80, 0], 0x82),
        ("flags of PINGREQ", vec![0xC1, 0], 0x82),
        ("length of five bytes", vec![0x30, 0xFF, 0xFF, 0xFF, 0xFF], 0x81),
        ("length of more bytes than it needs", vec![0xC0, 0x80, 0], 0x81),
        ("too large", vec![0x30, 0xFF, 0xFF, 0xFF, 0x7F], 0x95),
        ("a little too large", packet(0x30, &vec![b'a'; 256 << 10]), 0x95),
        ("QoS 2", publish(0x34, b"t", b"\0\x01\0x"), 0x9B),
        ("QoS 3", publish(0x36, b"t", b"\0\x01\0x"), 0x81),
        ("DUP with QoS 0", publish(0x38, b"t", b"\0x"), 0x81),
        ("packet id 0", publish(0x32, b"t", b"\0\0\0x"), 0x82),
        ("no packet id", publish(0x32, b"t", b""), 0x81),
        ("topic with +", publish(0x30, b"a/+", b"\0x"), 0x90),
        ("topic with #", publish(0x30, b"#", b"\0x"), 0x90),
        ("empty topic", publish(0x30, b"", b"\0x"), 0x90),
        ("topic alias", publish(0x30, b"", b"\x03\x23\0\x01x"), 0x94),
        ("format that is no flag", publish(0x30, b"t", b"\x02\x01\x02x"), 0x82),
        ("answer to a filter", publish(0x30, b"t", b"\x05\x08\0\x02a#x"), 0x82),
        ("user property that is no UTF-8", publish(0x30, b"t", b"\x07\x26\0\x01k\0\x01\xFFx"), 0x81),
        ("topic is no UTF-8", publish(0x30, b"a\xC0\xAF", b"\0x"), 0x81),
        ("topic with a surrogate", publish(0x30, b"\xED\xA0\x80", b"\0x"), 0x81),
        ("topic with NUL", publish(0x30, b"a\0", b"\0x"), 0x81),
        ("topic that is cut", packet(0x30, b"\0\x09abc"), 0x81),
        ("properties that are cut", publish(0x30, b"t", b"\x09"), 0x81),
        ("property of CONNECT", publish(0x30, b"t", b"\x03\x21\0\x01x"), 0x82),
        ("id of a subscription", publish(0x30, b"t", b"\x02\x0B\x01x"), 0xA1),
        ("SUBSCRIBE to nothing", packet(0x82, b"\0\x01\0"), 0x81),
        ("SUBSCRIBE with id 0", packet(0x82, b"\0\0\0\0\x01a\0"), 0x82),
        ("SUBSCRIBE without options", packet(0x82, b"\0\x01\0\0\x01a"), 0x81),
        ("SUBSCRIBE with QoS 3", packet(0x82, b"\0\x01\0\0\x01a\x03"), 0x81),
        ("SUBSCRIBE with reserved options", packet(0x82, b"\0\x01\0\0\x01a\x40"), 0x81),
        ("SUBSCRIBE with retain handling 3", packet(0x82, b"\0\x01\0\0\x01a\x30"), 0x81),
        ("SUBSCRIBE with an id", packet(0x82, b"\0\x01\x02\x0B\x01\0\x01a\0"), 0xA1),
        ("SUBSCRIBE whose filter is no UTF-8", packet(0x82, b"\0\x01\0\0\x01\xFF\0"), 0x81),
        ("SUBSCRIBE whose second filter is no UTF-8", packet(0x82, b"\0\x01\0\0\x01a\0\0\x01\xFF\0"), 0x81),
        ("UNSUBSCRIBE from nothing", packet(0xA2, b"\0\x01\0"), 0x81),
        ("PUBACK without an id", packet(0x40, b""), 0x81),
        ("bytes behind DISCONNECT", packet(0xE0, b"\0\0x"), 0x81),
        ("bytes behind PINGREQ", packet(0xC0, b"x"), 0x81),
        ("bytes behind PUBACK", packet(0x40, b"\0\x01\0\0x"), 0x81),
    ] {
        let answer = answer_to([connect(5), bytes.clone()].concat());
        let (_connack, answer) = answer.split_at(usize::from(answer[1]) + 2);
        assert_eq!((answer[0], usize::from(answer[1]) + 2, answer[2]), (0xE0, answer.len(), code), "{what}");
        // 3.1.1 has no code: the connection ends.
        let sound = ["properties that are cut", "property of CONNECT", "id of a subscription"];
        let sound =
            [&sound[..], &["format that is no flag", "answer to a filter", "user property that is no UTF-8"]];
        let is_sound = sound.concat().contains(&what);
        if !is_sound && !what.starts_with("SUBSCRIBE") {
            assert_eq!(answer_to([connect(4), bytes].concat()), [0x20, 2, 0, 0], "{what}");
        }
    }
}

/// Bytes that belong to a packet in version 5 lie after the end of one in 3.1.1.
#[test]
fn codes_and_properties_of_version_5_are_too_much_for_version_3() {
    for (what, bytes) in [
        ("PUBACK with a code", packet(0x40, b"\0\x01\0")),
        ("PUBACK with properties", packet(0x40, b"\0\x01\x10\x09\x1F\0\x01a\x26\0\0\0\0")),
        ("DISCONNECT with a code", packet(0xE0, b"\0")),
    ] {
        let then_pings =
            |version| answer_to([connect(version), bytes.clone(), vec![0xC0, 0, 0xE0, 0]].concat());
        assert_eq!(then_pings(4), [0x20, 2, 0, 0], "{what}");
        let answer = then_pings(5);
        let pong = answer.ends_with(&[0xD0, 0]);
        assert!(bytes[0] == 0xE0 || pong, "{what}: {answer:?}");
        assert!(!answer.windows(2).any(|two| two == [0xE0, 0x12]), "{what}: {answer:?}");
    }
}

#[test]
fn filters_are_granted_or_refused_one_by_one() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        sim.client("all", async move |net| {
            let deep = ["a"; 129].join("/");
            let filters =
                [("a", 2), ("a/#/b", 0), ("$share/g/a", 1), ("", 0), ("b+", 1), ("+/b", 0), (&*deep, 1)];
            let (mut me, _) = Hello::new(5, "five").connects(&net, addr).await?;
            assert_eq!(me.subscribes(&filters).await?, [1, 0x8F, 0x9E, 0x8F, 0x8F, 0, 0x8F]);
            let (mut me, _) = Hello::new(4, "three").connects(&net, addr).await?;
            assert_eq!(me.subscribes(&filters).await?, [1, 0x80, 0x80, 0x80, 0x80, 0, 0x80]);
            assert_eq!(me.unsubscribes("a").await?, Vec::<u8>::new());
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn client_without_an_id_is_told_one() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        sim.client("all", async move |net| {
            let mut ids = Vec::new();
            for _ in 0..5 {
                let mut stream = net.connect(addr).await?;
                stream.send(Hello::new(5, "").kept().bytes()).await?;
                let head = stream.exactly(2).await?;
                let body = stream.exactly(head[1].into()).await?;
                // Maximum QoS, largest packet, and how long the session lasts.
                let said = [0x24, 1, 0x29, 0, 0x2A, 0, 0x27, 0, 4, 0, 0, 0x11, 0, 0, 0x0E, 0x10, 0x12];
                assert_eq!(body[3..3 + said.len()], said);
                ids.push(body[3 + said.len() + 2..].to_vec());
            }
            ids.sort();
            ids.dedup();
            assert_eq!(ids.len(), 5, "{ids:?}");
            let (mut me, _) = Hello::new(4, "").connects(&net, addr).await?;
            me.pings().await?;
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn broken_packets_harm_the_connection_that_sends_them_alone() {
    Sim::seeds(40).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        let done = Steps::default();
        for n in 0..3 {
            let done = done.clone();
            sim.client(format!("bad{n}"), async move |net| {
                for _ in 0..10 {
                    let version = [4, 5][net.random() as usize % 2];
                    let hello = Hello::new(version, &format!("bad{n}")).kept().will(8, "will", "lost");
                    let mut packets = [
                        hello.bytes(),
                        packet(0x82, b"\0\x01\0\0\x03a/+\x01\0\x01#\x02"),
                        packet(0x82, b"\0\x02\0\x01#\x01"),
                        packet(0x33, b"\0\x03a/b\0\x03\x0C\x26\0\x01k\0\x01v\x02\0\0\0\x09text"),
                        packet(0x31, b"\0\x03a/c\0"),
                        packet(0xA2, b"\0\x04\0\0\x01#"),
                        packet(0x40, b"\0\x01"),
                        packet(0xE0, b"\x04\x05\x11\0\0\0\x05"),
                    ];
                    for _ in 0..net.random() % 4 {
                        let which = net.random() as usize % packets.len();
                        let packet = &mut packets[which];
                        let at = net.random() as usize % packet.len();
                        match net.random() % 4 {
                            0 => packet[at] = net.random() as u8,
                            1 => packet[at] ^= 1 << (net.random() % 8),
                            2 => packet.truncate(at + 1),
                            _ => packet.insert(at, net.random() as u8),
                        }
                    }
                    let mut stream = net.connect(addr).await?;
                    // The server may have closed it by then.
                    let _ = stream.send(packets.concat()).await;
                    let _ = net.timeout(Duration::from_millis(net.random() % 3000), stream.closed()).await;
                }
                done.done();
                Ok(())
            });
        }
        sim.client("good", async move |net| {
            let (mut me, _) = Hello::new(5, "good").connects(&net, addr).await?;
            assert_eq!(me.subscribes(&[("good", 1)]).await?, [1]);
            while done.0.get() < 3 {
                assert_eq!(me.publishes(2, "good", "x").await?, 0);
                assert_eq!(me.hears().await?.payload, "x");
                net.sleep(SECOND).await;
            }
            Ok(())
        });
        sim.run_until_done();
    });
}
