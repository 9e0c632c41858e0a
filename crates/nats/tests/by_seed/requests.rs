//! Questions and their answers.

use std::cell::RefCell;
use std::collections::BTreeMap;

use ringserve_nats::{NatsError, Outgoing};

use super::*;

fn answer(question: &str) -> String {
    format!("{question} is {}", question.len())
}

#[test]
fn each_answer_is_that_of_its_question_asked_once() {
    Sim::seeds(30).run(|sim| {
        let peer = Peer::start(sim, ADDRS[0]);
        peer.script.piece.set([0, 5, 40][sim.random() as usize % 3]);
        *peer.answers.borrow_mut() = Some(Box::new(|net, question| {
            let after = |most: u64| MILLI * (net.random() % most) as u32;
            match net.random() % 10 {
                0 => vec![],
                1 => vec![(after(50), answer(question)), (after(50), answer(question))],
                2 => vec![(after(3000), answer(question))],
                _ => vec![(after(30), answer(question))],
            }
        }));
        let cutter = peer.clone();
        sim.background("trouble", async move |net| {
            for _ in 0..5 {
                net.sleep(MILLI * (net.random() % 800) as u32).await;
                cutter.cut(net.random().is_multiple_of(2));
            }
            Ok(())
        });
        let results = Rc::new(RefCell::new(BTreeMap::<String, u32>::new()));
        let (count, left) = (results.clone(), Rc::new(Cell::new(20)));
        run(sim, options(), async move |shard, nats| {
            for asker in 0..20 {
                let (nats, on, count, left) = (nats.clone(), shard.clone(), count.clone(), left.clone());
                shard.spawn(async move {
                    for n in 0..20 {
                        let question = format!("{asker}.{}", n * n * n);
                        let asked = nats.request("ask.it", &question);
                        let result = match on.timeout(SECOND, asked).await {
                            Ok(Ok(message)) => {
                                assert_eq!(message.payload(), answer(&question).as_bytes());
                                "answered".to_owned()
                            }
                            Ok(Err(error)) => {
                                nats.connected().await;
                                assert_eq!(error, NatsError::Disconnected);
                                error.to_string()
                            }
                            Err(elapsed) => elapsed.to_string(),
                        };
                        *count.borrow_mut().entry(result).or_default() += 1;
                    }
                    left.set(left.get() - 1);
                });
            }
            while left.get() > 0 {
                shard.sleep(SECOND).await;
            }
        });
        assert_eq!(results.borrow().values().sum::<u32>(), 400);
        assert!(results.borrow()["answered"] > 100, "{results:?}");
        let mut heard: Vec<String> =
            peer.heard.published.borrow().iter().map(|(_, _, question)| question.clone()).collect();
        let all = heard.len();
        heard.sort();
        heard.dedup();
        assert_eq!(heard.len(), all, "a question was asked twice");
    });
}

#[test]
fn request_that_none_hears_fails_at_once() {
    Sim::seeds(10).run(|sim| {
        let peer = Peer::start(sim, ADDRS[0]);
        let server = peer.clone();
        run(sim, options(), async move |shard, nats| {
            assert_eq!(nats.request("nothing", "").await.unwrap_err(), NatsError::Disconnected);
            nats.connected().await;
            assert_eq!(nats.request("nothing", "").await.unwrap_err(), NatsError::NoResponders);
            // One that is never answered ends with its connection.
            let (asking, asks) = (nats.clone(), shard.now());
            let asked = shard.spawn(async move { asking.request("silence", "").await.map(drop) });
            shard.sleep(SECOND).await;
            server.cut(true);
            assert_eq!(asked.await.unwrap(), Err(NatsError::Disconnected));
            assert!(shard.now() - asks < 2 * SECOND);
        });
    });
}

#[test]
fn messages_that_the_server_would_refuse_are_not_sent() {
    Sim::seeds(10).run(|sim| {
        let peer = Peer::start(sim, ADDRS[0]);
        let server = peer.clone();
        run(sim, options(), async move |shard, nats| {
            // Kept under the default of a server, and larger than this one takes.
            nats.publish("log", &"x".repeat(1001)).unwrap();
            nats.publish("log", &"x".repeat(1000)).unwrap();
            nats.connected().await;
            assert_eq!((nats.stats().too_large, nats.payload_bytes_max()), (1, 1000));
            let too_large = Err(NatsError::TooLarge { bytes_max: 1000 });
            assert_eq!(nats.publish("log", &"x".repeat(1001)), too_large);
            let headed = "x".repeat(980);
            let headed = Outgoing::new("log", &headed);
            assert_eq!(nats.publish_message(&headed.clone().header("a", "b").header("c", "d")), too_large);
            nats.publish_message(&headed.header("a", "")).unwrap();
            assert_eq!(nats.publish("a b", ""), Err(NatsError::BadSubject));
            assert_eq!(nats.publish("a.*", ""), Err(NatsError::BadSubject));
            assert_eq!(nats.subscribe("a..b").unwrap_err(), NatsError::BadSubject);
            assert_eq!(nats.queue_subscribe("a", "b c").unwrap_err(), NatsError::BadSubject);
            let split = Outgoing::new("a", "").header("a", "b\r\n\r\nPUB");
            assert_eq!(nats.publish_message(&split), Err(NatsError::BadHeader));
            // The server says later that it takes less, and no headers.
            server.say("INFO {\"max_payload\":10,\"headers\":false}\r\n");
            while nats.payload_bytes_max() > 10 {
                shard.sleep(MILLI).await;
            }
            assert_eq!(
                nats.publish("log", "x".repeat(11).as_str()),
                Err(NatsError::TooLarge { bytes_max: 10 })
            );
            let headed = Outgoing::new("a", "").header("a", "");
            assert!(nats.publish_message(&headed).is_err());
            nats.flush().await.unwrap();
        });
        let heard: Vec<usize> =
            peer.heard.published.borrow().iter().map(|(_, _, payload)| payload.len()).collect();
        assert_eq!(heard, [1000, 980 + 17]);
    });
}
