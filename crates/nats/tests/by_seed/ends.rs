//! Servers that end, and connections that are made again.

use ringserve::testing::Faults;
use ringserve_nats::{Event, NatsError, Outgoing};

use super::*;

#[test]
fn client_goes_to_a_server_that_info_named() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let peers = [Peer::start(sim, ADDRS[0]), Peer::start(sim, ADDRS[1])];
        *peers[0].script.info.borrow_mut() = format!(",\"connect_urls\":[\"{}\",\"{}\"]", ADDRS[0], ADDRS[1]);
        let [first, second] = peers.clone();
        run(sim, options(), async move |_, nats| {
            let mut news = nats.subscribe("news").unwrap();
            nats.connected().await;
            first.script.is_down.set(true);
            first.cut(true);
            assert!(matches!(news.next().await, Some(Event::Gap)));
            nats.connected().await;
            nats.flush().await.unwrap();
            second.publish("news", "1");
            assert!(matches!(news.next().await, Some(Event::Message(_))));
        });
        assert_eq!((peers[0].connections(), peers[1].accepted()), (0, 1));
    });
}

#[test]
fn server_that_is_about_to_end_is_left_with_its_answers() {
    Sim::seeds(30).faults(Faults::harmless()).run(|sim| {
        let peers = [Peer::start(sim, ADDRS[0]), Peer::start(sim, ADDRS[1])];
        *peers[0].script.info.borrow_mut() = format!(",\"connect_urls\":[\"{}\"]", ADDRS[1]);
        *peers[0].answers.borrow_mut() = Some(Box::new(|_, _| vec![(SECOND, "late".to_owned())]));
        let [first, second] = peers.clone();
        run(sim, options(), async move |shard, nats| {
            let mut news = nats.subscribe("news").unwrap();
            nats.connected().await;
            nats.flush().await.unwrap();
            let asking = nats.clone();
            let asked = shard.spawn(async move { asking.request("ask.it", "").await });
            shard.sleep(SECOND / 2).await;
            first.say(first.info().replace("}", ",\"ldm\":true}"));
            first.publish("news", "1");
            assert!(matches!(news.next().await, Some(Event::Message(_))));
            assert_eq!(asked.await.unwrap().unwrap().payload(), b"late");
            assert!(matches!(news.next().await, Some(Event::Gap)));
            nats.connected().await;
            nats.flush().await.unwrap();
            second.publish("news", "2");
            assert!(matches!(news.next().await, Some(Event::Message(_))));
            assert_eq!((nats.stats().connects, nats.stats().disconnects), (2, 1));
        });
        assert_eq!((peers[0].accepted(), peers[1].accepted()), (1, 1));
    });
}

#[test]
fn only_server_that_is_about_to_end_is_kept_to_its_end() {
    Sim::seeds(5).faults(Faults::harmless()).run(|sim| {
        let peer = Peer::start(sim, ADDRS[0]);
        let server = peer.clone();
        run(sim, options(), async move |shard, nats| {
            nats.connected().await;
            server.say("INFO {\"ldm\":true}\r\n");
            shard.sleep(10 * SECOND).await;
            nats.flush().await.unwrap();
        });
        assert_eq!(peer.accepted(), 1);
    });
}

#[test]
fn refused_client_tries_again_ever_more_rarely() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let peer = Peer::start(sim, ADDRS[0]);
        *peer.script.refuses.borrow_mut() = Some("Authorization Violation");
        let server = peer.clone();
        run(sim, options().user_password("ann", "wrong"), async move |shard, nats| {
            let mut news = nats.subscribe("news").unwrap();
            assert_eq!(nats.flush().await, Err(NatsError::Disconnected));
            shard.sleep(120 * SECOND).await;
            assert!(!nats.is_connected() && news.try_next().is_none(), "no connection is lost that was none");
            let stats = nats.stats();
            assert_eq!((stats.connects, stats.disconnects), (0, 0));
            // Half of 5 s on average, behind some short waits.
            assert!((25..130).contains(&stats.connects_failed), "{} attempts", stats.connects_failed);
            *server.script.refuses.borrow_mut() = None;
            nats.connected().await;
        });
        assert!(peer.heard.connects.borrow()[0].contains(r#""user":"ann","pass":"wrong""#));
    });
}

#[test]
fn silent_server_is_left() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let peer = Peer::start(sim, ADDRS[0]);
        let server = peer.clone();
        run(sim, options().ping_interval(10 * SECOND), async move |shard, nats| {
            let mut news = nats.subscribe("news").unwrap();
            nats.connected().await;
            // Answers to its PINGs keep it.
            shard.sleep(200 * SECOND).await;
            assert_eq!(nats.stats().disconnects, 0);
            server.script.is_silent.set(true);
            let (begun, flushing) = (shard.now(), nats.clone());
            let flushed = shard.spawn(async move { flushing.flush().await });
            assert!(matches!(news.next().await, Some(Event::Gap)));
            let took = shard.now() - begun;
            assert!((20 * SECOND..41 * SECOND).contains(&took), "{took:?}");
            assert_eq!(flushed.await.unwrap(), Err(NatsError::Disconnected));
            // One that says nothing at all is given up in the handshake.
            shard.sleep(60 * SECOND).await;
            assert!((5..13).contains(&nats.stats().connects_failed), "{:?}", nats.stats());
            server.script.is_silent.set(false);
            nats.connected().await;
        });
    });
}

#[test]
fn connection_ends_with_the_last_handle() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let peer = Peer::start(sim, ADDRS[0]);
        run(sim, options(), async move |_, nats| {
            nats.connected().await;
            let news = nats.subscribe("news").unwrap();
            nats.publish("log", "bye").unwrap();
            drop(nats);
            drop(news);
        });
        assert!(sim.run_until(SECOND, || peer.connections() == 0), "the connection stays");
        assert_eq!(peer.heard.published.borrow().len(), 1, "what was queued leaves");
        sim.run_for(60 * SECOND);
        assert_eq!(peer.accepted(), 1);
    });
}

#[test]
fn connect_says_what_the_options_say() {
    Sim::seeds(1).run(|sim| {
        let peer = Peer::start(sim, ADDRS[0]);
        let options = options().echo(false).name("a \"b\"").token("secret");
        run(sim, options, async |_, nats| nats.connected().await);
        let connect = peer.heard.connects.borrow()[0].clone();
        for field in [
            r#""echo":false"#,
            r#""name":"a \"b\"""#,
            r#""auth_token":"secret""#,
            r#""headers":true"#,
            r#""no_responders":true"#,
            r#""protocol":1"#,
        ] {
            assert!(connect.contains(field), "{field} in {connect}");
        }
    });
}

#[test]
fn flush_waits_for_what_was_sent_before() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let peer = Peer::start(sim, ADDRS[0]);
        let server = peer.clone();
        run(sim, options(), async move |_, nats| {
            nats.connected().await;
            for n in 0..50u32 {
                nats.publish("log", &n.to_string()).unwrap();
            }
            nats.flush().await.unwrap();
            assert_eq!(server.heard.published.borrow().len(), 50);
        });
    });
}

#[test]
fn kept_headers_are_not_for_a_server_without() {
    Sim::seeds(10).faults(Faults::harmless()).run(|sim| {
        let peer = Peer::start(sim, ADDRS[0]);
        peer.script.has_no_headers.set(true);
        run(sim, options(), async move |_, nats| {
            nats.publish("log", "1").unwrap();
            nats.publish_message(&Outgoing::new("log", "2").header("a", "b")).unwrap();
            nats.publish("log", "3").unwrap();
            nats.connected().await;
            nats.flush().await.unwrap();
            let stats = nats.stats();
            assert_eq!((stats.connects, stats.no_headers, stats.errors), (1, 1, 0));
        });
        let heard = peer.heard.published.borrow();
        assert_eq!(heard.iter().map(|(_, _, payload)| &payload[..]).collect::<Vec<_>>(), ["1", "3"]);
    });
}
