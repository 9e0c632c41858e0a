//! Listeners to which proxies connect, by seed: who is seen, what is refused and when, and headers
//! to upstreams.

use std::cell::RefCell;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ringserve_server::framing::Lines;
use ringserve_server::limits::ServerLimits;
use ringserve_server::listen::{HeaderError, ProxyProtocol, endpoints, tcp};
use ringserve_server::net::{ProxyHeader, copy_bidirectional};
use ringserve_server::testing::{ClientStream, Faults, Net, Sim};
use ringserve_server::{
    CloseReason, Cx, Frame, Limits, OpenCx, Peer, Refusal, Server, Service, Stream, stream,
};

const SECOND: Duration = Duration::from_secs(1);

/// A line of version 1 with which a client is named.
const LINE: &str = "PROXY TCP4 192.0.2.1 198.51.100.7 56324 443\r\n";

/// As the service sees it.
const CLIENT: &str = "192.0.2.1:56324";

/// The networks of clients in simulations.
fn trusted() -> ProxyProtocol {
    ProxyProtocol::from(["10.128.0.0/9"])
}

fn direct() -> SocketAddr {
    ([10, 0, 0, 1], 7000).into()
}

fn proxied() -> SocketAddr {
    ([10, 0, 0, 1], 7001).into()
}

/// Says whom it sees.
#[derive(Default)]
struct Who;

fn text(peer: &Peer) -> String {
    let shown = |addr: Option<SocketAddr>| addr.map_or("-".to_owned(), |addr| addr.to_string());
    format!("{} via {} at {}", shown(peer.addr()), shown(peer.via()), shown(peer.local_addr()))
}

impl Service for Who {
    type Session = String;
    type Error = Infallible;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<String, Refusal> {
        // Frames behind the header wait meanwhile.
        if opening.shard().random().is_multiple_of(2) {
            opening.sleep(Duration::from_millis(5)).await;
        }
        Ok(text(&opening.peer()))
    }

    async fn call(&self, cx: &Cx<'_, String>, frame: Frame) -> Result<(), Infallible> {
        assert_eq!(*cx.session(), text(&cx.peer()), "the peer that was opened");
        let id = cx.tlvs().and_then(|tlvs| Some(String::from_utf8_lossy(tlvs.unique_id()?).into_owned()));
        let said = String::from_utf8_lossy(&frame).into_owned();
        cx.reply(format!("{said} {} {}", cx.session(), id.as_deref().unwrap_or("-")).as_str());
        Ok(())
    }
}

/// One service, reached directly and through proxies.
fn both(protocol: ProxyProtocol) -> Server<ringserve_server::MultiService> {
    let endpoints = endpoints((tcp(direct()), tcp(proxied()).proxy_protocol(protocol)));
    Server::new().service(endpoints.framing(Lines::default()), |_shard| Who)
}

/// A server to which proxies connect.
fn behind(limits: Limits) -> Server<Lines> {
    Server::bind(proxied()).limits(limits).framing(Lines::default()).proxy_protocol(trusted())
}

async fn send_in_pieces(
    net: &Net,
    stream: &mut ClientStream,
    bytes: impl AsRef<[u8]>,
) -> std::io::Result<()> {
    let mut bytes = bytes.as_ref();
    while !bytes.is_empty() {
        let piece = 1 + (net.random() % bytes.len() as u64) as usize;
        stream.send(&bytes[..piece]).await?;
        bytes = &bytes[piece..];
        if net.random().is_multiple_of(4) {
            net.sleep(Duration::from_millis(net.random() % 20)).await;
        }
    }
    Ok(())
}

/// A block of version 2 for IPv4.
fn block(command: u8, fields: &[u8]) -> Vec<u8> {
    let addrs = [192, 0, 2, 1, 198, 51, 100, 7, 0xDC, 0x04, 1, 0xBB];
    let len = (addrs.len() + fields.len()) as u16;
    let begin = b"\r\n\r\n\0\r\nQUIT\n";
    [&begin[..], &[command, 0x11], &len.to_be_bytes(), &addrs, fields].concat()
}

#[test]
fn one_service_sees_clients_of_both_listeners() {
    Sim::seeds(150).faults(Faults::harmless()).run(|sim| {
        let shards = 1 + sim.random() as usize % 3;
        sim.serve_several(both(trusted().keep_tlvs()).shards(shards));
        for number in 0..3 {
            sim.client(format!("direct {number}"), async |net| {
                let mut me = net.connect(direct()).await?;
                me.send("one\ntwo\n").await?;
                for word in ["one", "two"] {
                    let seen = format!("{word} {} via - at - -", me.local_addr().unwrap());
                    assert_eq!(me.line().await?, Some(seen));
                }
                Ok(())
            });
            sim.client(format!("proxied {number}"), async |net| {
                let mut me = net.connect(proxied()).await?;
                let v2 = net.random().is_multiple_of(2);
                let header = if v2 { block(0x21, b"\x05\0\x05seven") } else { LINE.into() };
                send_in_pieces(&net, &mut me, [&header[..], b"one\ntwo\n"].concat()).await?;
                let id = if v2 { "seven" } else { "-" };
                for word in ["one", "two"] {
                    let via = me.local_addr().unwrap();
                    assert_eq!(
                        me.line().await?,
                        Some(format!("{word} {CLIENT} via {via} at 198.51.100.7:443 {id}"))
                    );
                }
                Ok(())
            });
        }
        sim.run_until_done();
    });
}

/// Connects, does something and expects the end of the connection for a reason, within a time.
fn ends(
    limits: Limits,
    protocol: ProxyProtocol,
    reason: CloseReason,
    within: (Duration, Duration),
    code: impl AsyncFn(&Net, &mut ClientStream) -> std::io::Result<()> + Clone + 'static,
) {
    Sim::seeds(30).faults(Faults::harmless()).run(move |sim| {
        sim.expect_losses();
        let server = Server::bind(proxied()).limits(limits.clone()).framing(Lines::default());
        let server = sim.start(server.proxy_protocol(protocol.clone()), |_shard| Who).unwrap();
        let (code, took) = (code.clone(), Rc::new(RefCell::new(None)));
        let seen = took.clone();
        sim.client("it", async move |net| {
            let mut me = net.connect(proxied()).await?;
            let began = net.now();
            let _ = code(&net, &mut me).await;
            if let Ok(heard) = me.closed().await {
                assert_eq!(heard, b"", "a peer that is not let in is told something");
            }
            *seen.borrow_mut() = Some(net.now() - began);
            Ok(())
        });
        sim.run_until_done();
        sim.run_for(5 * SECOND);
        let counters = server.stats().counters;
        let ended: Vec<_> = counters.reasons().collect();
        assert_eq!(ended, [(reason.name(), 1)]);
        let took = took.borrow().expect("it ended");
        assert!(within.0 <= took && took <= within.1, "{took:?}");
    });
}

const AT_ONCE: (Duration, Duration) = (Duration::ZERO, Duration::from_millis(900));

#[test]
fn source_outside_of_the_networks_is_reset() {
    let protocol = ProxyProtocol::from(["10.0.0.0/9"]);
    ends(Limits::default(), protocol, CloseReason::ProxyUntrusted, AT_ONCE, async |_, me| {
        me.send(LINE).await
    });
}

#[test]
fn what_is_no_header_is_closed() {
    let of = |bytes: &'static [u8], error| {
        let reason = CloseReason::ProxyBadHeader(error);
        ends(Limits::default(), trusted(), reason, AT_ONCE, async move |net, me| {
            send_in_pieces(net, me, bytes).await
        });
    };
    of(b"GET / HTTP/1.1\r\n\r\n", HeaderError::NotProxy);
    of(b"PROXY TCP4 1.2.3.4\r\n", HeaderError::Malformed(&"a PROXY line has two addresses and two ports"));
    let wrong_sum = block(0x21, b"\x03\0\x04none").leak();
    of(wrong_sum, HeaderError::Checksum);
    let other_version = block(0x11, b"").leak();
    of(other_version, HeaderError::Malformed(&"a PROXY block of another version or command"));
}

#[test]
fn header_beyond_its_limit_is_closed() {
    let protocol = trusted().header_bytes_max(536);
    let reason = CloseReason::ProxyBadHeader(HeaderError::TooLarge { bytes: 537, max: 536 });
    let large = block(0x21, &[&b"\xEA"[..], &506u16.to_be_bytes(), &[0; 506]].concat());
    assert_eq!(large.len(), 537);
    ends(Limits::default(), protocol, reason, AT_ONCE, async move |net, me| {
        send_in_pieces(net, me, large.clone()).await
    });
}

#[test]
fn half_a_header_has_its_time_and_no_more() {
    let after = |seconds| (SECOND * seconds - Duration::from_millis(30), SECOND * seconds + SECOND);
    let reason = CloseReason::ProxyTimeout;
    ends(Limits::default(), trusted(), reason, after(5), async |_, _| Ok(()));
    let limits = Limits::default().proxy_header_timeout(Duration::from_secs(3));
    ends(limits, trusted(), reason, after(3), async |net, me| {
        for byte in &LINE.as_bytes()[..9] {
            me.send([*byte]).await?;
            net.sleep(Duration::from_millis(400)).await;
        }
        Ok(())
    });
    let limits = Limits::default().proxy_header_timeout(None).handshake_timeout(Duration::from_secs(7));
    ends(limits, trusted(), reason, after(7), async |_, me| me.send("PROXY").await);
}

#[test]
fn fin_without_a_byte_is_a_health_check() {
    ends(Limits::default(), trusted(), CloseReason::ProxyNoHeader, AT_ONCE, async |_, me| me.finish());
    let reason = CloseReason::ProxyBadHeader(HeaderError::Unfinished);
    ends(Limits::default(), trusted(), reason, AT_ONCE, async |_, me| {
        me.send("PROXY ").await?;
        me.finish()
    });
}

#[test]
fn proxy_that_speaks_for_itself_is_the_peer() {
    Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
        sim.serve(behind(Limits::default()), |_shard| Who);
        let headers = [b"PROXY UNKNOWN\r\n".to_vec(), block(0x20, b"\x05\0\x05seven")];
        for (number, header) in headers.into_iter().enumerate() {
            sim.client(format!("check {number}"), async move |net| {
                let mut me = net.connect(proxied()).await?;
                send_in_pieces(&net, &mut me, [&header[..], b"hello\n"].concat()).await?;
                let seen = format!("hello {} via - at - -", me.local_addr().unwrap());
                assert_eq!(me.line().await?, Some(seen));
                Ok(())
            });
        }
        sim.run_until_done();
    });
}

#[test]
fn program_is_asked_about_the_proxy_and_about_its_client() {
    Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
        sim.expect_losses();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let seen = asked.clone();
        let admit = move |peer: &Peer| {
            seen.lock().unwrap().push((peer.is_proxy(), peer.addr(), peer.via()));
            peer.is_proxy() || peer.addr() != CLIENT.parse().ok()
        };
        let server = sim.start(behind(Limits::default()).admit(admit), |_shard| Who).unwrap();
        let own = Rc::new(RefCell::new(None));
        let addr = own.clone();
        sim.client("proxy", async move |net| {
            let mut me = net.connect(proxied()).await?;
            *addr.borrow_mut() = me.local_addr();
            let _ = send_in_pieces(&net, &mut me, LINE).await;
            assert_eq!(me.closed().await?, b"", "the client is not admitted");
            Ok(())
        });
        sim.run_until_done();
        let own = *own.borrow();
        assert_eq!(*asked.lock().unwrap(), [(true, own, None), (false, CLIENT.parse().ok(), own)]);
        assert_eq!(server.stats().counters.closed_for(CloseReason::Refused), 1);
    });
}

#[test]
fn silent_proxies_hold_up_others_for_their_time_alone() {
    Sim::seeds(30).faults(Faults::harmless()).run(|sim| {
        let limits = ServerLimits::default().handshakes_max(3);
        let server = sim.start(behind(Limits::default()).server_limits(limits), |_shard| Who).unwrap();
        for number in 0..3 {
            sim.background(format!("silent {number}"), async |net| {
                let mut me = net.connect(proxied()).await?;
                let _ = me.closed().await;
                Ok(())
            });
        }
        sim.client("patient", async |net| {
            net.sleep(SECOND).await;
            let mut me = net.connect(proxied()).await?;
            send_in_pieces(&net, &mut me, format!("{LINE}hello\n")).await?;
            assert!(me.line().await?.is_some());
            assert!(net.now() < 8 * SECOND, "{:?}", net.now());
            Ok(())
        });
        sim.run_until_done();
        sim.run_for(10 * SECOND);
        assert_eq!(server.stats().counters.closed_for(CloseReason::ProxyTimeout), 3);
    });
}

#[test]
fn silent_proxies_hold_up_no_other_listener() {
    Sim::seeds(30).faults(Faults::harmless()).run(|sim| {
        let limits = ServerLimits::default().handshakes_max(3);
        sim.serve_several(both(trusted()).server_limits(limits));
        for number in 0..20 {
            sim.background(format!("silent {number}"), async |net| {
                let mut me = net.connect(proxied()).await?;
                let _ = me.closed().await;
                Ok(())
            });
        }
        sim.client("direct", async |net| {
            for _ in 0..10 {
                net.sleep(SECOND / 10).await;
                let began = net.now();
                let mut me = net.connect(direct()).await?;
                me.send("hello\n").await?;
                assert!(me.line().await?.is_some());
                assert!(net.now() - began < SECOND / 2, "{:?}", net.now() - began);
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn drain_closes_those_without_a_header_at_once() {
    Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
        sim.expect_losses();
        let server = sim.start(behind(Limits::default()), |_shard| Who).unwrap();
        for bytes in [0, 9] {
            sim.client(format!("{bytes} bytes"), async move |net| {
                let mut me = net.connect(proxied()).await?;
                me.send(&LINE[..bytes]).await?;
                let _ = me.closed().await;
                assert!(net.now() < 3 * SECOND, "{:?}", net.now());
                Ok(())
            });
        }
        sim.run_for(SECOND);
        server.drain();
        sim.run_until_done();
        assert_eq!(server.stats().counters.closed_for(CloseReason::Shutdown), 2);
    });
}

#[test]
fn upstream_is_told_who_the_client_is() {
    Sim::seeds(100).faults(Faults::harmless()).run(|sim| {
        let server =
            behind(Limits::default()).proxy_protocol(ProxyProtocol::from(["10.0.0.0/8"]).keep_tlvs());
        sim.serve(server, |_shard| Who);
        let version = sim.random() % 2;
        sim.serve(Server::bind(direct()), move |_shard| {
            stream(async move |mut client: Stream| {
                let header = match version {
                    0 => ProxyHeader::v1(&client.peer()),
                    _ => ProxyHeader::v2(&client.peer()).tlv(0x05, "seven"),
                };
                let mut upstream = client.shard().connect(proxied()).proxy_header(header).await?;
                copy_bidirectional(&mut client, &mut upstream).await.map_err(|broken| broken.error)
            })
        });
        sim.client("client", async move |net| {
            let mut me = net.connect(direct()).await?;
            send_in_pieces(&net, &mut me, "hello\n").await?;
            let line = me.line().await?.unwrap_or_default();
            let (seen, rest) = line.split_once(" via ").unwrap_or_default();
            assert_eq!(seen, format!("hello {}", me.local_addr().unwrap()));
            let id = if version == 0 { "-" } else { "seven" };
            assert!(rest.ends_with(&format!(" at {} {id}", direct())), "{rest}");
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn wrong_networks_are_named_at_the_start() {
    Sim::seeds(1).run(|sim| {
        let start = |protocol| {
            let server = Server::bind(proxied()).proxy_protocol(protocol);
            sim.start(server, |_shard| stream(async |_: Stream| Ok::<_, Infallible>(())))
                .unwrap_err()
                .to_string()
        };
        let error = start(ProxyProtocol::from(["10.0.0.0/8", "fd00::/129"]));
        assert!(error.contains("\"fd00::/129\" is no network"), "{error}");
        let error = start(ProxyProtocol::default());
        assert!(
            error.contains("no network is named whose PROXY headers are trusted at 10.0.0.1:7001"),
            "{error}"
        );
    });
}
