//! Calls that block and names, by seed: the queue, panics, calls that are dropped, and upstreams
//! that have names.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ringserve_server::framing::Lines;
use ringserve_server::limits::ServerLimits;
use ringserve_server::net::{PeerCredentials, SocketOptions, copy_bidirectional};
use ringserve_server::task::BlockingError;
use ringserve_server::testing::{Faults, Sim, SimServer};
use ringserve_server::{Cx, Frame, Server, Service, Stream, stream};

const ADDR: &str = "10.0.0.1:7000";

/// Answers a line by what it orders.
#[derive(Clone, Default)]
struct Blocks {
    ran: Arc<AtomicU64>,
}

impl Service for Blocks {
    type Session = ();
    type Error = io::Error;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> io::Result<()> {
        let text = String::from_utf8_lossy(&line).into_owned();
        let ran = self.ran.clone();
        let result = match text.split_once(' ') {
            Some(("connect", to)) => return self.connect(cx, to).await,
            Some(("panic", said)) => {
                let said = said.to_owned();
                cx.shard().spawn_blocking(move || -> u64 { panic!("{said}") }).await
            }
            _ => cx.shard().spawn_blocking(move || ran.fetch_add(1, Ordering::Relaxed) + 1).await,
        };
        match result {
            Ok(_) => cx.reply(&line[..]),
            Err(error) => cx.reply(error.to_string().as_bytes()),
        }
        Ok(())
    }
}

impl Blocks {
    async fn connect(&self, cx: &Cx<'_, ()>, to: &str) -> io::Result<()> {
        match cx.shard().connect(to).await {
            Ok(mut upstream) => {
                let mut said = Vec::new();
                while let Some(bytes) = upstream.read_frame().await? {
                    said.extend_from_slice(&bytes);
                }
                cx.reply(&said[..]);
            }
            Err(error) => cx.reply(format!("{:?}: {error}", error.kind()).as_bytes()),
        }
        Ok(())
    }
}

/// A server of `service`, with these many threads and places in the queue.
fn serve(sim: &Sim, service: Blocks, shards: usize, (threads, queue): (usize, usize)) -> SimServer {
    let limits = ServerLimits::default().blocking_threads_max(threads).blocking_queue_max(queue);
    let server = Server::bind(ADDR).framing(Lines::default()).shards(shards).server_limits(limits);
    sim.start(server, move |_shard| service.clone()).expect("the server starts")
}

#[test]
fn calls_that_block_are_answered_while_their_shard_goes_on() {
    Sim::seeds(150).faults(Faults::harmless()).run(|sim| {
        let service = Blocks::default();
        let ran = service.ran.clone();
        let server = serve(sim, service, 2, (1 + sim.random() as usize % 3, 1000));
        for n in 0..6 {
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(ADDR).await?;
                for call in 0..5 {
                    let began = net.now();
                    me.send(format!("{n} {call}\n")).await?;
                    assert_eq!(me.line().await?, Some(format!("{n} {call}")));
                    assert!(net.now() > began, "it takes time");
                }
                Ok(())
            });
        }
        sim.run_until_done();
        let blocking = server.stats().blocking;
        assert_eq!((blocking.done, ran.load(Ordering::Relaxed)), (30, 30));
        assert_eq!((blocking.running, blocking.queued, blocking.refused), (0, 0, 0));
    });
}

#[test]
fn full_queue_and_panics_are_answers() {
    let seeds = Sim::seeds(300).faults(Faults::harmless());
    seeds.allow_panics(|said| said.contains("planted")).run(|sim| {
        let server = serve(sim, Blocks::default(), 1, (1, 1));
        for n in 0..5 {
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(ADDR).await?;
                me.send("panic planted\n").await?;
                let answer = me.line().await?.expect("an answer");
                let known = [BlockingError::Full, BlockingError::Panicked("planted".to_owned())];
                assert!(known.iter().any(|error| error.to_string() == answer), "{answer}");
                Ok(())
            });
        }
        sim.run_until_done();
        let blocking = server.stats().blocking;
        assert_eq!((blocking.done, blocking.panicked + blocking.refused), (0, 5));
        assert!(blocking.panicked >= 1, "the first one finds a thread");
    });
}

#[test]
fn function_runs_to_its_end_though_its_call_is_dropped() {
    Sim::seeds(100).run(|sim| {
        sim.expect_losses();
        let service = Blocks::default();
        let ran = service.ran.clone();
        let server = serve(sim, service, 1, (1, 10));
        sim.client("gone", async |net| {
            let mut me = net.connect(ADDR).await?;
            me.send("work\n").await?;
            // The frame is there, and the function is not done.
            net.sleep(Duration::from_micros(5)).await;
            me.reset();
            Ok(())
        });
        sim.run_until_done();
        sim.run_for(Duration::from_secs(10));
        let stats = server.stats();
        assert_eq!(stats.connections, 0);
        assert_eq!(ran.load(Ordering::Relaxed), stats.blocking.done);
        assert_eq!((stats.blocking.running, stats.blocking.queued), (0, 0));
    });
}

/// A client that sends one line, once upstreams listen, and checks the answer.
fn asks(sim: &Sim, line: &'static str, check: impl Fn(&str, Duration) + 'static) {
    sim.client("asks", async move |net| {
        net.sleep(Duration::from_secs(1)).await;
        let mut me = net.connect(ADDR).await?;
        let began = net.now();
        me.send(format!("{line}\n")).await?;
        let answer = me.line().await?.expect("an answer");
        check(&answer, net.now() - began);
        Ok(())
    });
}

/// An upstream that says its name to each peer.
fn upstream(sim: &Sim, addr: &'static str, says: &'static str) {
    sim.background(says, async move |net| {
        let mut listener = net.listen(addr)?;
        loop {
            let mut peer = listener.accept().await;
            peer.send(says).await?;
        }
    });
}

fn ip(last: u8) -> IpAddr {
    [10, 0, 0, last].into()
}

#[test]
fn addresses_of_a_name_are_tried_in_turn() {
    Sim::seeds(200).faults(Faults::harmless()).run(|sim| {
        serve(sim, Blocks::default(), 1, (2, 10));
        upstream(sim, "10.0.0.9:5432", "nine");
        sim.name("db", [ip(7), ip(8), ip(9)]);
        asks(sim, "connect db:5432", |answer, _| assert_eq!(answer, "nine"));
        asks(sim, "connect 10.0.0.9:5432", |answer, _| assert_eq!(answer, "nine"));
        sim.run_until_done();
        sim.name("db", [ip(7)]);
        asks(sim, "connect db:5432", |answer, _| {
            assert!(answer.starts_with("ConnectionRefused: db:5432 at 10.0.0.7:5432: "), "{answer}");
        });
        sim.run_until_done();
    });
}

#[test]
fn address_that_never_answers_holds_the_next_up_for_a_moment() {
    Sim::seeds(200).run(|sim| {
        sim.expect_losses();
        serve(sim, Blocks::default(), 1, (2, 10));
        upstream(sim, "10.0.0.8:5432", "eight");
        upstream(sim, "10.0.0.9:5432", "nine");
        sim.partition(ip(1), ip(8));
        sim.name("db", [ip(8), ip(9)]);
        asks(sim, "connect db:5432", |answer, time| {
            assert_eq!(answer, "nine");
            assert!(time >= Duration::from_millis(250) && time < Duration::from_secs(1), "{time:?}");
        });
        sim.run_until_done();
    });
}

#[test]
fn name_that_does_not_resolve_is_named_with_the_cause() {
    Sim::seeds(200).faults(Faults::harmless()).run(|sim| {
        serve(sim, Blocks::default(), 1, (1, 10));
        sim.name("empty", []);
        asks(sim, "connect nowhere:1", |answer, _| {
            assert!(answer.starts_with("NotFound: nowhere:1 does not resolve: no such name"), "{answer}");
        });
        asks(sim, "connect empty:1", |answer, _| {
            assert_eq!(answer, "NotFound: empty:1 does not resolve: it has no address");
        });
        asks(sim, "connect portless", |answer, _| {
            assert!(
                answer.starts_with("InvalidInput: \"portless\" is no address; write NAME:PORT"),
                "{answer}"
            );
        });
        sim.run_until_done();
    });
}

#[test]
fn slow_name_is_given_up_after_the_connect_timeout() {
    Sim::seeds(200).faults(Faults::harmless()).run(|sim| {
        let server = serve(sim, Blocks::default(), 1, (1, 0));
        sim.name("slow", [ip(9)]);
        sim.name_takes("slow", Duration::from_secs(60));
        asks(sim, "connect slow:1", |answer, time| {
            assert!(answer.starts_with("TimedOut: slow:1 does not resolve: "), "{answer}");
            assert!(time >= Duration::from_secs(10) && time < Duration::from_secs(20), "{time:?}");
        });
        sim.run_until_done();
        // The look-up goes on, and keeps the one thread.
        asks(sim, "connect slow:1", |answer, _| {
            assert!(
                answer.starts_with("ResourceBusy: slow:1 does not resolve: as many blocking"),
                "{answer}"
            );
        });
        sim.run_until_done();
        assert_eq!(server.stats().blocking.running, 1);
        sim.run_for(Duration::from_secs(60));
        assert_eq!((server.stats().blocking.running, server.stats().blocking.done), (0, 1));
    });
}

#[test]
fn broken_copy_counts_both_directions() {
    Sim::seeds(200).run(|sim| {
        sim.expect_losses();
        sim.background("upstream", async |net| {
            let mut listener = net.listen("10.0.0.9:9000")?;
            let mut peer = listener.accept().await;
            peer.exactly(5).await?;
            peer.send("hello, you").await?;
            net.sleep(Duration::from_secs(1)).await;
            peer.reset();
            Ok(())
        });
        sim.serve(Server::bind(ADDR), |_shard| {
            stream(async |mut client: Stream| {
                let mut upstream = client.shard().connect("10.0.0.9:9000").await?;
                let broken = copy_bidirectional(&mut client, &mut upstream).await.expect_err("a reset");
                client.queue(format!("{:?} {:?}", broken.side, broken.copied).as_bytes());
                io::Result::Ok(())
            })
        });
        sim.client("client", async |net| {
            net.sleep(Duration::from_secs(1)).await;
            let mut me = net.connect(ADDR).await?;
            me.send("hello").await?;
            let heard = me.closed().await?;
            assert_eq!(String::from_utf8_lossy(&heard), "hello, youSecond (5, 10)");
            Ok(())
        });
        sim.run_until_done();
    });
}

/// Answers with what it knows of its peer.
struct Knows;

impl Service for Knows {
    type Session = ();
    type Error = io::Error;

    async fn call(&self, cx: &Cx<'_, ()>, _line: Frame) -> io::Result<()> {
        let peer = cx.peer();
        cx.reply(format!("{:?} {:?}", peer.local_addr(), peer.credentials()).as_bytes());
        Ok(())
    }
}

#[test]
fn peers_have_the_address_they_came_to_and_credentials_given() {
    Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
        let options = SocketOptions::default().local_address(true).peer_credentials(true);
        let server = Server::bind(ADDR).framing(Lines::default()).shards(2).sockets(options);
        sim.serve(server, |_shard| Knows);
        let credentials = PeerCredentials { pid: Some(7), uid: 1000, gid: 100 };
        for known in [true, false] {
            let told = format!("Some(10.0.0.1:7000) {:?}", known.then_some(credentials));
            let host = sim.client("asks", async move |net| {
                let mut me = net.connect(ADDR).await?;
                me.send("who\n").await?;
                assert_eq!(me.line().await?, Some(told));
                Ok(())
            });
            if known {
                sim.credentials(host, credentials);
            }
        }
        sim.run_until_done();
    });
}

#[test]
fn halves_of_a_stream_read_and_write_beside_each_other() {
    Sim::seeds(100).faults(Faults::harmless()).run(|sim| {
        sim.serve(Server::bind(ADDR), |_shard| {
            stream(async |stream: Stream| {
                let shard = stream.shard().clone();
                let (mut reader, mut writer) = stream.split();
                shard.spawn(async move {
                    let _ = writer.write_all(&[7; 300_000]).await;
                });
                let mut heard = 0;
                while let Some(bytes) = reader.read_frame().await? {
                    heard += bytes.len();
                }
                assert_eq!(heard, 300_000);
                io::Result::Ok(())
            })
        });
        sim.client("client", async |net| {
            let mut me = net.connect(ADDR).await?;
            // The half that writes ends, and no time limit, and the other half goes on.
            let all = me.closed().await?;
            assert!(net.now() < Duration::from_secs(20), "{:?}", net.now());
            assert!(all.len() == 300_000 && all.iter().all(|byte| *byte == 7));
            me.send(&all).await?;
            Ok(())
        });
        sim.run_until_done();
    });
}

/// Copies both ways between a client and an upstream, of which either may be read and written by
/// tokio's traits, and checks what each got and what was counted.
#[cfg(feature = "tokio")]
#[test]
fn copies_are_whole_through_any_stream() {
    use ringserve_server::net::AnyStream;
    use std::cell::Cell;
    use std::rc::Rc;

    const THERE: usize = 50_000;
    const BACK: usize = 120_000;
    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|n| (n % 251) as u8).collect()
    }

    Sim::seeds(60).faults(Faults::harmless()).run(|sim| {
        sim.background("upstream", async |net| {
            let mut listener = net.listen("10.0.0.9:9000")?;
            let mut peer = listener.accept().await;
            assert_eq!(peer.closed().await?, pattern(THERE));
            peer.send(pattern(BACK)).await?;
            peer.finish()?;
            Ok(())
        });
        let (copied, by) = (Rc::new(Cell::new(None)), sim.random() % 4);
        let seen = copied.clone();
        sim.serve(Server::bind(ADDR), move |_shard| {
            let copied = copied.clone();
            stream(async move |mut client: Stream| {
                let mut upstream = client.shard().connect("10.0.0.9:9000").await?;
                let result = match by {
                    0 => copy_bidirectional(&mut client, &mut upstream).await,
                    1 => copy_bidirectional(&mut AnyStream(client), &mut upstream).await,
                    2 => copy_bidirectional(&mut client, &mut AnyStream(upstream)).await,
                    _ => copy_bidirectional(&mut AnyStream(client), &mut AnyStream(upstream)).await,
                };
                copied.set(Some(result.map_err(|broken| broken.error)?));
                io::Result::Ok(())
            })
        });
        sim.client("client", async |net| {
            net.sleep(Duration::from_secs(1)).await;
            let mut me = net.connect(ADDR).await?;
            me.send(pattern(THERE)).await?;
            me.finish()?;
            assert_eq!(me.closed().await?, pattern(BACK));
            Ok(())
        });
        sim.run_until_done();
        sim.run_for(Duration::from_secs(1));
        assert_eq!(seen.get(), Some((THERE as u64, BACK as u64)));
    });
}
