//! Messages and gaps.

use std::cell::RefCell;

use ringserve::testing::Faults;
use ringserve_nats::Event;

use super::*;

fn number(event: &Event) -> Option<u64> {
    match event {
        Event::Message(message) => Some(std::str::from_utf8(message.payload()).unwrap().parse().unwrap()),
        _ => None,
    }
}

/// Does something bad to a server now and then, and publishes numbers in between.
fn misbehaves(sim: &Sim, peer: &Rc<Peer>, last: u64) {
    let peer = peer.clone();
    sim.background("trouble", async move |net| {
        for n in 0..last {
            net.sleep(MILLI * (net.random() % 20) as u32).await;
            match net.random() % 60 {
                0 => peer.cut(true),
                1 => peer.cut(false),
                2 => peer.say("garbage\r\n"),
                3 => peer.say("MSG news 1 10\r\nshort\r\n"),
                4 => peer.say("MSG news 1 1001\r\n"),
                5 => peer.say("PONG\r\n"),
                6 => peer.say("-ERR 'Stale Connection'\r\n"),
                7 => peer.say(peer.info()),
                8 => peer.say("+OK\r\nPING\r\n-ERR 'Invalid Subject'\r\n"),
                9 => {
                    peer.script.is_down.set(true);
                    peer.cut(true);
                    net.sleep(MILLI * (net.random() % 3000) as u32).await;
                    peer.script.is_down.set(false);
                }
                10 => peer.say("INFO {\"max_payload\":\r\n"),
                11 => peer.say("MSG news"),
                _ => {}
            }
            peer.publish("news", &n.to_string());
        }
        // From here on it behaves, and says the last number until it is heard.
        loop {
            net.sleep(SECOND).await;
            peer.publish("news", &last.to_string());
        }
    });
}

#[test]
fn messages_are_missing_at_gaps_alone() {
    Sim::seeds(40).run(|sim| {
        let (peer, last) = (Peer::start(sim, ADDRS[0]), 300);
        peer.script.piece.set([0, 5, 40][sim.random() as usize % 3]);
        misbehaves(sim, &peer, last);
        let lost = Rc::new(Cell::new(0));
        let gaps = lost.clone();
        run(sim, options(), async move |_, nats| {
            let mut news = nats.subscribe("news").unwrap();
            let (mut before, mut may_miss) = (None, true);
            loop {
                let event = news.next().await.unwrap();
                let Some(n) = number(&event) else {
                    gaps.set(gaps.get() + 1);
                    may_miss = true;
                    continue;
                };
                let expected = before.map_or(0, |before| before + 1);
                assert!(
                    n == expected || (may_miss && n > expected),
                    "{n} behind {before:?}, gap: {may_miss}"
                );
                (before, may_miss) = (Some(n), false);
                if n == last {
                    break;
                }
            }
            assert_eq!(news.missed(), 0);
            assert!(nats.stats().disconnects >= gaps.get());
        });
    });
}

#[test]
fn slow_reader_misses_the_oldest_and_counts_them() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let peer = Peer::start(sim, ADDRS[0]);
        let publisher = peer.clone();
        run(sim, options().queue_max(10, 1 << 20), async move |shard, nats| {
            let mut news = nats.subscribe("news").unwrap();
            nats.connected().await;
            nats.flush().await.unwrap();
            (0..25).for_each(|n| publisher.publish("news", &n.to_string()));
            while nats.stats().received < 25 {
                shard.sleep(MILLI).await;
            }
            assert_eq!((news.missed(), news.waiting(), nats.stats().missed), (15, 10, 15));
            for n in 15..25 {
                assert_eq!(number(&news.try_next().unwrap()), Some(n));
            }
            drop(news);
            assert_eq!(nats.stats().missed, 15);
        });
    });
}

#[test]
fn subscription_ends_with_its_last_message() {
    Sim::seeds(30).run(|sim| {
        let peer = Peer::start(sim, ADDRS[0]);
        let publisher = peer.clone();
        run(sim, options(), async move |shard, nats| {
            let mut news = nats.subscribe("news").unwrap();
            news.unsubscribe_after(7);
            for n in 0..4 {
                nats.connected().await;
                if nats.flush().await.is_err() {
                    continue;
                }
                publisher.publish("news", &n.to_string());
            }
            let mut heard = 0;
            shard.sleep(SECOND).await;
            while let Some(event) = news.try_next() {
                heard += u64::from(number(&event).is_some());
            }
            publisher.cut(true);
            while heard < 7 {
                match shard.timeout(SECOND, news.next()).await {
                    Ok(Some(event)) => heard += u64::from(number(&event).is_some()),
                    Ok(None) => panic!("it ends after {heard} messages"),
                    // Only while it is subscribed.
                    Err(_) => publisher.publish("news", "9"),
                }
            }
            assert!(matches!(news.next().await, None | Some(Event::Gap)));
            assert!(news.next().await.is_none());
        });
        sim.run_for(SECOND);
        peer.publish("news", "10");
    });
}

#[test]
fn dropped_subscription_ends_at_the_server() {
    Sim::seeds(10).faults(Faults::harmless()).run(|sim| {
        let peer = Peer::start(sim, ADDRS[0]);
        let publisher = peer.clone();
        run(sim, options(), async move |_, nats| {
            nats.connected().await;
            let (news, mut other) = (nats.subscribe("news").unwrap(), nats.subscribe("*").unwrap());
            nats.flush().await.unwrap();
            drop(news);
            publisher.publish("news", "1");
            assert_eq!(number(&other.next().await.unwrap()), Some(1));
            nats.flush().await.unwrap();
            publisher.publish("news", "2");
            assert_eq!(number(&other.next().await.unwrap()), Some(2));
            // The first one may have been on its way to both.
            assert!((2..=3).contains(&nats.stats().received));
        });
        assert_eq!(peer.heard.unsubscribed.get(), 1);
    });
}

#[test]
fn refused_subscription_ends_and_others_go_on() {
    Sim::seeds(10).faults(Faults::harmless()).run(|sim| {
        let peer = Peer::start(sim, ADDRS[0]);
        *peer.script.forbids.borrow_mut() = Some("secret");
        let publisher = peer.clone();
        run(sim, options(), async move |_, nats| {
            let (mut secret, mut news) = (nats.subscribe("secret").unwrap(), nats.subscribe("news").unwrap());
            assert!(secret.next().await.is_none() && secret.is_refused());
            nats.flush().await.unwrap();
            publisher.publish("news", "1");
            assert_eq!(number(&news.next().await.unwrap()), Some(1));
            assert_eq!((nats.stats().errors, nats.stats().disconnects), (1, 0));
        });
    });
}

#[test]
fn messages_are_kept_for_the_first_connection() {
    Sim::seeds(30).faults(Faults::harmless()).run(|sim| {
        let peer = Peer::start(sim, ADDRS[0]);
        peer.script.is_down.set(true);
        let server = peer.clone();
        run(sim, options().pending_bytes_max(4096), async move |_, nats| {
            let mut kept = 0;
            while nats.publish("log", &format!("{kept}")).is_ok() {
                kept += 1;
            }
            assert_eq!(nats.publish("log", ""), Err(ringserve_nats::NatsError::Full));
            assert!(kept > 50);
            server.script.is_down.set(false);
            nats.connected().await;
            nats.flush().await.unwrap();
            nats.publish("log", "last").unwrap();
            nats.flush().await.unwrap();
            assert_eq!(nats.stats().published, kept + 1);
        });
        let heard: Vec<String> =
            peer.heard.published.borrow().iter().map(|(_, _, payload)| payload.clone()).collect();
        let mut expected: Vec<String> = (0..heard.len() - 1).map(|n| n.to_string()).collect();
        expected.push("last".to_owned());
        assert_eq!(heard, expected);
    });
}

#[test]
fn each_message_is_published_at_most_once_and_in_order() {
    Sim::seeds(30).run(|sim| {
        let peer = Peer::start(sim, ADDRS[0]);
        misbehaves(sim, &peer, 200);
        let sent = Rc::new(RefCell::new(Vec::new()));
        let log = sent.clone();
        run(sim, options(), async move |shard, nats| {
            for n in 0..300u64 {
                if nats.publish("log", &n.to_string()).is_ok() {
                    log.borrow_mut().push(n);
                }
                shard.sleep(MILLI * (shard.random() % 20) as u32).await;
            }
            loop {
                nats.connected().await;
                if nats.flush().await.is_ok() {
                    break;
                }
            }
        });
        let heard: Vec<u64> =
            peer.heard.published.borrow().iter().map(|(_, _, payload)| payload.parse().unwrap()).collect();
        assert!(heard.is_sorted_by(|a, b| a < b), "{heard:?}");
        let sent = sent.borrow();
        assert!(heard.iter().all(|n| sent.contains(n)) && heard.len() > sent.len() / 2);
    });
}
