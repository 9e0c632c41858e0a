//! Servers whose listeners have a transport, by seed: services and streams that do not notice it,
//! ends that are marked, peers that break the rules, and the time at which each of them is refused.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use ringserve_server::framing::{LengthPrefix, Lines};
use ringserve_server::limits::ServerLimits;
use ringserve_server::listen::{ProxyProtocol, endpoints, tcp};
use ringserve_server::net::{ProxyHeader, copy_bidirectional};
use ringserve_server::testing::{Faults, Net, Sim};
use ringserve_server::{
    CloseReason, Cx, Error, Frame, Limits, OpenCx, Peer, Refusal, Server, Service, Stream, stream,
};
use ringserve_sim::toy::{Alive, Facts, PeerStream, Permits, Pieces, Toy};

const SECOND: Duration = Duration::from_secs(1);

/// A line of the PROXY protocol with which a client is named.
const LINE: &str = "PROXY TCP4 192.0.2.1 198.51.100.7 56324 443\r\n";

fn plain() -> SocketAddr {
    ([10, 0, 0, 1], 7000).into()
}

fn layered() -> SocketAddr {
    ([10, 0, 0, 1], 7001).into()
}

/// The transport of a server with any behaviour.
fn toy(sim: &Sim, alive: &Alive) -> impl Fn() -> Toy + Send + Sync + use<> {
    let permits = Permits::ALL[sim.random() as usize % Permits::ALL.len()];
    let (bytes, updates) = (1 + sim.random() as usize % 4096, sim.random() % 9);
    let toy = Toy::server().permits(permits).record_bytes(bytes).updates_every(updates).counted(alive);
    move || toy.clone()
}

/// Connects through the transport, in pieces of any size.
async fn connect(net: &Net, name: &str) -> io::Result<PeerStream> {
    let stream = net.connect(layered()).await?;
    let toy = Toy::client(name, net.random()).updates_every(net.random() % 9);
    let pieces = Pieces::ALL[net.random() as usize % Pieces::ALL.len()];
    Ok(PeerStream::layered(net, stream, &toy, pieces))
}

/// Replies with the name that it sees.
struct Who;

fn name_of(facts: Option<Rc<Facts>>) -> String {
    facts.map_or("-".to_owned(), |facts| String::from_utf8_lossy(&facts.name).into_owned())
}

impl Service for Who {
    type Session = String;
    type Error = Infallible;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<String, Refusal> {
        assert!(opening.transport_info::<String>().is_none(), "facts of another type");
        let name = name_of(opening.transport_info());
        // Frames after the handshake wait meanwhile.
        if opening.shard().random().is_multiple_of(2) {
            opening.sleep(Duration::from_millis(5)).await;
        }
        opening.reply(format!("hello {name}").as_str());
        if name == "refused" { Err(Refusal::new("refused")) } else { Ok(name) }
    }

    async fn call(&self, cx: &Cx<'_, String>, frame: Frame) -> Result<(), Infallible> {
        assert_eq!(*cx.session(), name_of(cx.transport_info()), "the facts that were opened");
        let said = String::from_utf8_lossy(&frame).into_owned();
        if said == "wait" {
            cx.sleep(SECOND / 10).await;
        }
        cx.reply(format!("{said} {}", cx.session()).as_str());
        if said == "bye" {
            cx.close();
        }
        Ok(())
    }
}

fn server(toy: impl Fn() -> Toy + Send + Sync + 'static) -> Server<Lines> {
    Server::bind(layered()).transport(toy).framing(Lines::default())
}

#[test]
fn one_service_serves_listeners_with_and_without_one() {
    Sim::seeds(300).faults(Faults::harmless()).run(|sim| {
        let alive = Alive::default();
        let shards = 1 + sim.random() as usize % 3;
        let both = endpoints((tcp(plain()), tcp(layered()).transport(toy(sim, &alive))));
        let server = Server::new().service(both.framing(Lines::default()), |_shard| Who);
        sim.serve_several(server.shards(shards));
        for number in 0..3 {
            sim.client(format!("plain {number}"), async |net| {
                let mut me = net.connect(plain()).await?;
                me.send("one\ntwo\n").await?;
                for said in ["hello -", "one -", "two -"] {
                    assert_eq!(me.line().await?.as_deref(), Some(said));
                }
                Ok(())
            });
            sim.client(format!("layered {number}"), async move |net| {
                let name = format!("peer {number}");
                let mut me = connect(&net, &name).await?;
                for word in ["wait", "one", "two"] {
                    me.send(format!("{word}\n")).await?;
                }
                for word in ["hello", "wait", "one", "two"] {
                    assert_eq!(me.line().await?, Some(format!("{word} {name}")));
                }
                match net.random() % 2 {
                    0 => me.finish().await?,
                    _ => {
                        me.send("bye\n").await?;
                        assert_eq!(me.line().await?, Some(format!("bye {name}")));
                    }
                }
                assert_eq!(me.closed().await?, b"");
                assert!(me.saw_mark());
                Ok(())
            });
        }
        sim.run_until_done();
        sim.finish();
        assert_eq!(alive.count(), 0);
    });
}

#[test]
fn proxy_is_asked_about_and_then_its_client() {
    Sim::seeds(100).faults(Faults::harmless()).run(|sim| {
        sim.expect_losses();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let seen = asked.clone();
        let admit = move |peer: &Peer| {
            seen.lock().unwrap().push(peer.is_proxy());
            true
        };
        let server = server(toy(sim, &Alive::default())).admit(admit);
        let server = server.proxy_protocol(ProxyProtocol::from(["10.128.0.0/9"]));
        let server = sim.start(server, |_shard| Who).unwrap();
        for name in ["welcome", "refused"] {
            sim.client(name, async move |net| {
                let mut me = connect(&net, name).await?;
                me.begins_with(LINE.as_bytes());
                me.send("one\n").await?;
                assert_eq!(me.line().await?, Some(format!("hello {name}")));
                if name == "refused" {
                    assert_eq!(me.closed().await?, b"", "it was refused");
                    return Ok(());
                }
                assert_eq!(me.line().await?, Some(format!("one {name}")));
                me.finish().await?;
                me.closed().await?;
                Ok(())
            });
        }
        sim.run_until_done();
        sim.run_for(SECOND);
        let mut asked = std::mem::take(&mut *asked.lock().unwrap());
        asked.sort_unstable();
        assert_eq!(asked, [false, false, true, true]);
        assert_eq!(server.stats().counters.closed_for(CloseReason::Refused), 1);
    });
}

#[test]
fn large_frames_come_and_go_whole() {
    struct Echo;
    impl Service for Echo {
        type Session = ();
        type Error = Infallible;
        async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
            cx.reply(frame);
            Ok(())
        }
    }
    Sim::seeds(30).faults(Faults::harmless()).run(|sim| {
        let toy = toy(sim, &Alive::default());
        let server = Server::bind(layered()).transport(toy).framing(LengthPrefix::bytes(4));
        sim.serve(server.limits(Limits::default().frame_bytes_max(1 << 20)), |_shard| Echo);
        sim.client("large", async |net| {
            let mut me = connect(&net, "large").await?;
            for _ in 0..3 {
                let len = 1 + net.random() as usize % 300_000;
                let frame: Vec<u8> = (0..len).map(|at| (at * 7) as u8).collect();
                let bytes = [&(len as u32).to_be_bytes()[..], &frame].concat();
                me.send(&bytes).await?;
                assert!(me.exactly(bytes.len()).await? == bytes, "a large frame comes back");
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

/// Connects, acts and expects the end of the connection for a reason, within a time. `alerts` if
/// the peer is informed.
fn ends(
    limits: Limits,
    reason: &'static str,
    alerts: bool,
    within: (Duration, Duration),
    code: impl AsyncFn(&Net, &mut PeerStream) -> io::Result<()> + Clone + 'static,
) {
    Sim::seeds(40).faults(Faults::harmless()).run(move |sim| {
        sim.expect_losses();
        let alive = Alive::default();
        let server = sim.start(server(toy(sim, &alive)).limits(limits.clone()), |_shard| Who).unwrap();
        let (code, took) = (code.clone(), Rc::new(RefCell::new(None)));
        let seen = took.clone();
        sim.client("it", async move |net| {
            let mut me = connect(&net, "it").await?;
            let began = net.now();
            code(&net, &mut me).await?;
            me.bytes_to_the_end().await?;
            assert_eq!(me.was_alerted(), alerts, "the peer is told");
            *seen.borrow_mut() = Some(net.now() - began);
            Ok(())
        });
        sim.run_until_done();
        sim.run_for(5 * SECOND);
        let counters = server.stats().counters;
        let ended: Vec<_> = counters.reasons().collect();
        assert_eq!(ended, [(reason, 1)]);
        let took = took.borrow().expect("it ended");
        assert!(within.0 <= took && took <= within.1, "{took:?}");
        assert_eq!(alive.count(), 0);
    });
}

const AT_ONCE: (Duration, Duration) = (Duration::ZERO, Duration::from_millis(3900));

#[test]
fn what_is_no_handshake_is_told_and_closed() {
    ends(Limits::default(), "tls_handshake_failed", true, AT_ONCE, async |_, me| {
        me.send_instead(b"GET / HTTP/1.1\r\n\r\n").await
    });
}

#[test]
fn record_that_was_altered_is_told_and_closed() {
    ends(Limits::default(), "tls_bad_record", true, AT_ONCE, async |net, me| {
        me.send("one\n").await?;
        assert_eq!(me.line().await?.as_deref(), Some("hello it"));
        let mut record = me.sealed(b"two\n");
        let at = 3 + net.random() as usize % (record.len() - 3);
        record[at] ^= 1;
        me.send_raw(&record).await
    });
}

#[test]
fn silent_peer_has_its_time_and_no_more() {
    let after = |seconds| (SECOND * seconds - Duration::from_millis(30), SECOND * seconds + SECOND);
    ends(Limits::default(), "handshake_timeout", false, after(10), async |_, _| Ok(()));
    let limits = Limits::default().handshake_timeout(Duration::from_secs(7));
    ends(limits, "handshake_timeout", false, after(7), async |net, me| {
        me.send_start(9).await?;
        net.sleep(4 * SECOND).await;
        me.send_raw(b"").await
    });
}

#[test]
fn peer_that_is_cut_off_is_named_by_where() {
    ends(Limits::default(), "peer_closed", false, AT_ONCE, async |_, me| {
        me.send("one\n").await?;
        me.cut_off()
    });
    ends(Limits::default(), "peer_closed_mid_frame", false, AT_ONCE, async |_, me| {
        me.send("on").await?;
        me.cut_off()
    });
    ends(Limits::default(), "peer_closed_mid_frame", false, AT_ONCE, async |net, me| {
        me.send("one\n").await?;
        let record = me.sealed(b"two\n");
        let len = 1 + net.random() as usize % (record.len() - 1);
        me.send_raw(&record[..len]).await?;
        me.cut_off()
    });
}

/// Collects the results of a stream of the server.
async fn read_all(mut stream: Stream, heard: Rc<RefCell<Vec<String>>>) {
    let mut bytes = Vec::new();
    let end = loop {
        match stream.read_frame().await {
            Ok(Some(more)) => bytes.extend_from_slice(&more),
            Ok(None) => break "the end".to_owned(),
            Err(error) => break error.kind().to_string(),
        }
    };
    heard.borrow_mut().push(format!("{} then {end}", String::from_utf8_lossy(&bytes)));
}

#[test]
fn stream_hears_of_the_end_and_of_a_record_that_was_cut() {
    for (said, end) in [("mark", "the end"), ("", "the end"), ("start", "unexpected end of file")] {
        Sim::seeds(60).faults(Faults::harmless()).run(move |sim| {
            let heard = Rc::new(RefCell::new(Vec::new()));
            let tell = heard.clone();
            let server = Server::bind(layered()).transport(toy(sim, &Alive::default()));
            sim.serve(server, move |_shard| {
                let tell = tell.clone();
                stream(async move |stream: Stream| {
                    assert_eq!(name_of(stream.transport_info()), "it");
                    read_all(stream, tell.clone()).await
                })
            });
            sim.client("it", async move |net| {
                let mut me = connect(&net, "it").await?;
                me.send("hello").await?;
                match said {
                    "mark" => me.finish().await?,
                    "start" => {
                        let record = me.sealed(b"more");
                        me.send_raw(&record[..3]).await?;
                        me.cut_off()?;
                    }
                    _ => me.cut_off()?,
                }
                assert_eq!(me.closed().await?, b"");
                Ok(())
            });
            sim.run_until_done();
            sim.run_for(SECOND);
            assert_eq!(*heard.borrow(), [format!("hello then {end}")]);
        });
    }
}

#[test]
fn end_of_what_is_written_is_marked_and_reading_goes_on() {
    Sim::seeds(100).faults(Faults::harmless()).run(|sim| {
        let heard = Rc::new(RefCell::new(Vec::new()));
        let tell = heard.clone();
        let server = Server::bind(layered()).transport(toy(sim, &Alive::default()));
        sim.serve(server, move |_shard| {
            let tell = tell.clone();
            stream(async move |stream: Stream| {
                stream.queue(b"all of it");
                stream.end_writing();
                read_all(stream, tell.clone()).await
            })
        });
        sim.client("it", async move |net| {
            let mut me = connect(&net, "it").await?;
            assert_eq!(me.closed().await?, b"all of it");
            assert!(me.saw_mark());
            net.sleep(SECOND).await;
            me.send("late").await?;
            me.finish().await?;
            Ok(())
        });
        sim.run_until_done();
        sim.run_for(SECOND);
        assert_eq!(*heard.borrow(), ["late then the end"]);
    });
}

#[test]
fn crowd_of_handshakes_is_let_in_one_by_one() {
    Sim::seeds(30).faults(Faults::harmless()).run(|sim| {
        let (alive, done) = (Alive::default(), Rc::new(Cell::new(0)));
        let limits = ServerLimits::default().handshakes_max(3);
        let server = server(toy(sim, &alive)).server_limits(limits);
        let server = sim.start(server, |_shard| Who).unwrap();
        for number in 0..20 {
            let done = done.clone();
            sim.client(format!("{number}"), async move |net| {
                let mut me = connect(&net, "x").await?;
                me.send("one\n").await?;
                assert_eq!(me.line().await?.as_deref(), Some("hello x"));
                done.set(done.get() + 1);
                match net.random() % 3 {
                    0 => me.reset(),
                    1 => me.finish().await?,
                    _ => {}
                }
                Ok(())
            });
            // Some give up while they wait.
            sim.background(format!("gives up {number}"), async |net| {
                let mut me = connect(&net, "y").await?;
                me.send_start(40).await?;
                net.sleep(Duration::from_micros(net.random() % 3000)).await;
                if net.random().is_multiple_of(2) {
                    me.reset();
                }
                Ok(())
            });
        }
        sim.run_until_done();
        assert_eq!(done.get(), 20);
        sim.run_for(20 * SECOND);
        assert_eq!((server.stats().connections, alive.count()), (0, 0));
    });
}

#[test]
fn transport_that_cannot_be_made_ends_the_start() {
    Sim::seeds(1).allow_panics(|said| said.starts_with("planted")).run(|sim| {
        let server = server(|| panic!("planted: no transport"));
        let error = sim.start(server, |_shard| Who).unwrap_err();
        assert!(matches!(error, Error::FactoryPanicked { shard: 0, .. }), "{error}");
    });
}

#[test]
fn upstream_is_reached_through_a_transport() {
    Sim::seeds(100).faults(Faults::harmless()).run(|sim| {
        let (here, there) = (Alive::default(), Alive::default());
        let says_who = sim.random().is_multiple_of(2);
        let upstream = server(toy(sim, &there));
        let upstream =
            if says_who { upstream.proxy_protocol(ProxyProtocol::from(["10.0.0.0/8"])) } else { upstream };
        sim.serve(upstream, |_shard| Who);
        let alive = here.clone();
        sim.serve(Server::bind(plain()), move |_shard| {
            let alive = alive.clone();
            stream(async move |mut client: Stream| {
                let toy = Toy::client("proxy", client.shard().random()).updates_every(3).counted(&alive);
                let mut connecting = client.shard().connect(layered()).transport(Rc::new(toy));
                if says_who {
                    connecting = connecting.proxy_header(ProxyHeader::v2(&client.peer()));
                }
                let mut upstream = connecting.await?;
                assert!(upstream.transport_info::<Facts>().is_none(), "the client learned nothing");
                copy_bidirectional(&mut client, &mut upstream).await.map_err(|broken| broken.error)
            })
        });
        for number in 0..3 {
            sim.client(format!("{number}"), async move |net| {
                let mut me = net.connect(plain()).await?;
                me.send("one\ntwo\n").await?;
                for said in ["hello proxy", "one proxy", "two proxy"] {
                    assert_eq!(me.line().await?.as_deref(), Some(said));
                }
                me.finish()?;
                assert_eq!(me.closed().await?, b"");
                Ok(())
            });
        }
        sim.run_until_done();
        sim.finish();
        assert_eq!((here.count(), there.count()), (0, 0));
    });
}

#[test]
fn upstream_without_its_end_of_a_transport_is_no_stream() {
    Sim::seeds(60).faults(Faults::harmless()).run(|sim| {
        sim.expect_losses();
        let kinds = [
            io::ErrorKind::TimedOut,
            io::ErrorKind::InvalidData,
            io::ErrorKind::ConnectionReset,
            io::ErrorKind::UnexpectedEof,
        ];
        let kind = kinds[sim.random() as usize % kinds.len()];
        let begins_its_answer = sim.random() % 2 == 0;
        let is_silent = kind == io::ErrorKind::TimedOut;
        sim.background("upstream", async move |net| {
            let mut me = net.listen(layered())?.accept().await;
            // It has the client's first flight.
            me.some().await?;
            match kind {
                io::ErrorKind::InvalidData => me.send("220 mail.example.org\r\n").await?,
                io::ErrorKind::ConnectionReset => {
                    me.reset();
                    return Ok(());
                }
                io::ErrorKind::UnexpectedEof => {
                    if begins_its_answer {
                        me.send(b"\xa2").await?;
                    }
                    me.finish()?;
                }
                _ => {}
            }
            me.closed().await?;
            Ok(())
        });
        // Until it listens.
        sim.run_for(SECOND / 1000);
        let found = Rc::new(Cell::new(None));
        let tell = found.clone();
        sim.serve(Server::bind(plain()), move |_shard| {
            let tell = tell.clone();
            stream(async move |client: Stream| {
                let toy = Toy::client("proxy", 7);
                let error = client.shard().connect(layered()).transport(Rc::new(toy)).await.err();
                tell.set(error.map(|error| error.kind()));
            })
        });
        sim.client("it", async move |net| {
            let mut me = net.connect(plain()).await?;
            me.closed().await?;
            assert_eq!(net.now() >= 10 * SECOND, is_silent, "{:?}", net.now());
            Ok(())
        });
        sim.run_until_done();
        assert_eq!(found.get(), Some(kind));
    });
}

#[test]
fn upstream_waits_for_a_poll_and_takes_no_transport_behind() {
    Sim::seeds(60).faults(Faults::harmless()).run(|sim| {
        let is_polled = sim.random().is_multiple_of(2);
        let has_header = sim.random().is_multiple_of(2);
        let upstream = server(toy(sim, &Alive::default()));
        let upstream =
            if has_header { upstream.proxy_protocol(ProxyProtocol::from(["10.0.0.0/8"])) } else { upstream };
        let upstream = sim.start(upstream, |_shard| Who).unwrap();
        let told = Rc::new(RefCell::new(None));
        let tell = told.clone();
        sim.serve(Server::bind(plain()), move |_shard| {
            let tell = tell.clone();
            stream(async move |client: Stream| {
                let shard = client.shard().clone();
                let mut connecting = shard.connect(layered());
                if is_polled {
                    let polled =
                        std::future::poll_fn(|task| Poll::Ready(Pin::new(&mut connecting).poll(task)));
                    assert!(polled.await.is_pending());
                }
                // Time for all of it.
                shard.sleep(SECOND).await;
                if has_header {
                    connecting = connecting.proxy_header(ProxyHeader::v2(&client.peer()));
                }
                let made = connecting.transport(Rc::new(Toy::client("proxy", 7))).await;
                let said = match made {
                    Ok(mut upstream) => {
                        upstream.write_all(b"one\n").await.unwrap();
                        let mut said = Vec::new();
                        while said.len() < "hello proxy\none proxy\n".len() {
                            let more = upstream.read_frame().await.unwrap();
                            said.extend_from_slice(&more.expect("the server answers"));
                        }
                        Ok(String::from_utf8(said).unwrap())
                    }
                    Err(error) => Err(error.kind()),
                };
                *tell.borrow_mut() = Some(said);
            })
        });
        sim.client("it", async move |net| {
            net.connect(plain()).await?.closed().await?;
            Ok(())
        });
        sim.run_until_done();
        sim.run_for(SECOND);
        let said = told.take().expect("the attempt is over");
        match is_polled {
            true => assert_eq!(said, Err(io::ErrorKind::InvalidInput)),
            false => assert_eq!(said.as_deref(), Ok("hello proxy\none proxy\n")),
        }
        let done = upstream.stats().counters.handshakes_done;
        assert_eq!(done, u64::from(!is_polled));
    });
}
