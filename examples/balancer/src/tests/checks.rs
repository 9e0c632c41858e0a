//! Checks, PROXY headers, and the state by HTTP.

use ringserve::limits::ServerLimits;

use super::*;

/// When upstream 0 was seen to be this, within a minute.
fn seconds_until(sim: &Sim, running: &Running, is_down: bool) -> u64 {
    let begun = sim.now();
    assert!(sim.run_until(60 * SECOND, || running.is_down(0) == is_down), "it never is");
    (sim.now() - begun).as_secs()
}

#[test]
fn upstream_is_down_after_three_checks_and_up_after_two() {
    Sim::seeds(20).run(|sim| {
        let (echoing, running) = starts(sim, &["--check-interval", "4"]);
        sim.run_for(5 * SECOND);
        echoing[0].mode.set(Mode::Refuses);
        // The next check comes within 4 s, and two more after it.
        let fell = seconds_until(sim, &running, true);
        assert!((8..=12).contains(&fell), "after {fell} s");
        echoing[0].mode.set(Mode::Echoes);
        let rose = seconds_until(sim, &running, false);
        assert!((4..=8).contains(&rose), "after {rose} s");
        assert!(!running.is_down(1) && !running.is_down(2));
        // Single failures are none, however many.
        for _ in 0..4 {
            echoing[0].mode.set(Mode::Refuses);
            sim.run_for(5 * SECOND);
            echoing[0].mode.set(Mode::Echoes);
            assert!(!sim.run_until(10 * SECOND, || running.is_down(0)));
        }
    });
}

#[test]
fn upstream_that_comes_back_gets_clients_again() {
    Sim::seeds(10).faults(Faults::harmless()).run(|sim| {
        let (echoing, running) = starts(sim, &[]);
        let addr = running.addr();
        echoing[0].mode.set(Mode::Refuses);
        let begun = sim.now();
        assert!(sim.run_until(300 * SECOND, || running.is_down(0)));
        let known = sim.now() - begun;
        for (name, wait) in [("during", Duration::ZERO), ("after", 100 * SECOND)] {
            for n in 0..6 {
                sim.client(format!("{name}{n}"), async move |net| {
                    net.sleep(wait).await;
                    let mut me = net.connect(addr).await?;
                    for _ in 0..5 {
                        echoes(&mut me).await?;
                        net.sleep(10 * SECOND).await;
                    }
                    Ok(())
                });
            }
        }
        sim.run_for(30 * SECOND);
        assert_eq!(running.connections(), [0, 3, 3], "down since {known:?}");
        assert_eq!(running.balancer.upstream.stats().retries, 0, "one that is down is not tried");
        echoing[0].mode.set(Mode::Echoes);
        sim.run_for(100 * SECOND);
        assert_eq!(running.connections(), [2, 2, 2]);
        sim.run_until_done();
    });
}

#[test]
fn silent_upstream_is_down_where_an_answer_is_expected() {
    Sim::seeds(20).run(|sim| {
        let (echoing, asking) = starts(sim, &["--check-send", "are you well", "--check-expect", "you well"]);
        sim.run_for(20 * SECOND);
        assert!((0..3).all(|number| !asking.is_down(number)), "they echo");
        echoing[0].mode.set(Mode::Silent);
        sim.run_for(20 * SECOND);
        assert_eq!([0, 1, 2].map(|number| asking.is_down(number)), [true, false, false]);
    });
    Sim::seeds(5).run(|sim| {
        let (_echoes, asking) = starts(sim, &["--check-send", "are you ill", "--check-expect", "well"]);
        sim.run_for(20 * SECOND);
        assert!((0..3).all(|number| asking.is_down(number)), "another answer");
    });
}

#[test]
fn shard_without_room_for_a_check_holds_no_upstream_down() {
    Sim::seeds(20).run(|sim| {
        let _echoes = ADDRS.map(|addr| Echo::start(sim, addr));
        let upstreams = ADDRS.iter().flat_map(|addr| ["--upstream", *addr]);
        let args = ["balancer", "--listen", "10.0.0.1:7000", "--status", "10.0.0.1:9000"];
        let args = Args::try_parse_from(args.into_iter().chain(upstreams)).unwrap();
        let balancer = Arc::new(Balancer::new(args).unwrap());
        let limits = ServerLimits::default().upstreams_max(4);
        let server = server(&balancer).unwrap().server_limits(limits).shards(1);
        let addr = sim.start_several(server).unwrap().addr();
        let stay = Rc::new(Cell::new(0));
        for n in 0..4 {
            let stay = stay.clone();
            sim.client(format!("c{n}"), async move |net| {
                // A check may have the last place for a moment.
                loop {
                    net.sleep(SECOND).await;
                    let mut me = net.connect(addr).await?;
                    if echoes(&mut me).await.is_ok() {
                        stay.set(stay.get() + 1);
                        net.sleep(100 * SECOND).await;
                        return Ok(());
                    }
                }
            });
        }
        assert!(sim.run_until(60 * SECOND, || stay.get() == 4), "all have a place");
        sim.run_for(40 * SECOND);
        let down: Vec<_> =
            balancer.upstream.stats().backends.iter().map(|backend| backend.health == Health::Down).collect();
        assert_eq!(down, [false; 3]);
        sim.run_until_done();
    });
}

#[test]
fn time_in_which_the_balancer_stands_still_is_no_upstreams() {
    Sim::seeds(30).run(|sim| {
        let (_echoes, running) = starts(sim, &["--check-send", "are you well", "--check-expect", "you well"]);
        let shards = 1 + sim.seed() as usize % 4;
        for _ in 0..20 {
            // In the middle of a check, as likely as not.
            sim.run_for(Duration::from_micros(1_900_000 + sim.random() % 200_000));
            (0..shards).for_each(|shard| running.server.stall(shard, 10 * SECOND));
            sim.run_for(10 * SECOND);
            assert!((0..3).all(|number| !running.is_down(number)), "they echo");
        }
    });
}

#[test]
fn name_without_an_address_is_down_until_it_has_one() {
    Sim::seeds(20).run(|sim| {
        let echoing = Echo::start(sim, ADDRS[0]);
        let options = ["--upstream", "late.example:80", "--upstream", "never.example:80"];
        let given = ["balancer", "--listen", "10.0.0.1:7000", "--status", "10.0.0.1:9000"];
        let args = Args::try_parse_from(given.into_iter().chain(options)).unwrap();
        let unknown = |_: &str| Err(std::io::Error::other("no such name"));
        let balancer = Arc::new(Balancer::with_names(args, unknown).unwrap());
        let down = |balancer: &Balancer| {
            let backends = balancer.upstream.stats().backends;
            [0, 1].map(|n| backends[n].health == Health::Down)
        };
        assert_eq!(down(&balancer), [true; 2]);
        let addr = sim.start_several(server(&balancer).unwrap().shards(2)).unwrap().addr();
        sim.run_for(20 * SECOND);
        assert_eq!(down(&balancer), [true; 2]);
        sim.name("late.example", ["10.0.0.11".parse().unwrap()]);
        assert!(sim.run_until(60 * SECOND, || down(&balancer) == [false, true]), "it is found");
        sim.client("me", async move |net| {
            let mut me = net.connect(addr).await?;
            echoes(&mut me).await?;
            Ok(())
        });
        sim.run_until_done();
        assert!(echoing.lines.borrow().is_empty());
    });
}

#[test]
fn upstreams_hear_by_the_proxy_protocol_who_the_client_is() {
    Sim::seeds(20).run(|sim| {
        let echoing = Echo::start(sim, ADDRS[0]);
        echoing.reads_line.set(true);
        let options = ["--upstream", ADDRS[0], "--send-proxy", "1", "--trust", "10.128.0.0/16"];
        let addr = Running::start(sim, &options).addr();
        sim.client("proxy", async move |net| {
            let mut me = net.connect(addr).await?;
            me.send("PROXY TCP4 192.0.2.1 198.51.100.7 5678 443\r\nhello").await?;
            assert_eq!(me.exactly(5).await?, b"hello");
            Ok(())
        });
        sim.run_until_done();
        sim.run_for(5 * SECOND);
        let lines = echoing.lines.borrow();
        assert!(lines.iter().any(|line| line == "PROXY TCP4 192.0.2.1 198.51.100.7 5678 443"), "{lines:?}");
        assert!(lines.iter().any(|line| line == "PROXY UNKNOWN"), "of a check: {lines:?}");
    });
}

/// The answer to a request: the status, and the body.
async fn asks(net: &Net, request: &str) -> std::io::Result<(String, String)> {
    asks_for(net, request, "10.0.0.1:9000").await
}

/// The same of a request that calls the balancer by this name.
async fn asks_for(net: &Net, request: &str, host: &str) -> std::io::Result<(String, String)> {
    let mut me = net.connect("10.0.0.1:9000").await?;
    me.send(format!("{request} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n")).await?;
    let answer = String::from_utf8(me.closed().await?).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    Ok((head.split(' ').nth(1).unwrap().to_owned(), body.to_owned()))
}

#[test]
fn state_is_told_by_http_and_changed_from_this_host_alone() {
    Sim::seeds(10).run(|sim| {
        let (echoing, running) = starts(sim, &["--status-name", "lb.internal"]);
        let addr = running.addr();
        echoing[2].mode.set(Mode::Refuses);
        sim.run_for(20 * SECOND);
        running.balancer.upstream.drain(ADDRS[1]);
        let drained = running.clone();
        sim.client("c", async move |net| {
            let mut me = net.connect(addr).await?;
            echoes(&mut me).await?;
            let (status, text) = asks(&net, "GET /").await?;
            let wanted = "10.0.0.11:80 up: 1 connections of 1, 0 failed, 0 broken, 0 bytes there and 0 back\n\
                10.0.0.12:80 up, drained: 0 connections of 0, 0 failed, 0 broken, 0 bytes there and 0 back\n\
                10.0.0.13:80 down: 0 connections of 0, 0 failed, 0 broken, 0 bytes there and 0 back\n\
                0 retries, 0 clients refused\n";
            assert_eq!((&*status, &*text), ("200", wanted));
            let (status, text) = asks(&net, "GET /json").await?;
            let state: serde_json::Value = serde_json::from_str(&text)?;
            let upstream = &state["upstreams"][1];
            assert_eq!(
                (&*status, &upstream["name"], &upstream["drained"]),
                ("200", &"10.0.0.12:80".into(), &true.into())
            );
            assert_eq!((&state["retries"], &state["upstreams"][2]["down"]), (&0.into(), &true.into()));
            // A page of another site, whose name was made to resolve to the balancer.
            for (host, wanted) in [
                ("evil.example", "403"),
                ("10.0.0.1.evil.example:9000", "403"),
                ("localhost@evil.example", "400"),
                ("", "403"),
                ("LOCALHOST:1", "200"),
                ("[::1]:9000", "200"),
                ("lb.internal:9000", "200"),
            ] {
                assert_eq!(asks_for(&net, "GET /json", host).await?.0, wanted, "{host}");
                assert_eq!(asks_for(&net, "GET /", host).await?.0, wanted, "{host}");
            }
            // It is another host's.
            for (request, wanted) in [
                ("POST /drain/10.0.0.11:80", "403"),
                ("POST /undrain/10.0.0.12:80", "403"),
                ("POST /drain/10.0.0.14:80", "404"),
                ("POST /", "404"),
                ("GET /drain/10.0.0.11:80", "404"),
                ("GET /other", "404"),
            ] {
                assert_eq!(asks(&net, request).await?.0, wanted, "{request}");
            }
            assert!(!drained.upstream(0).is_drained && drained.upstream(1).is_drained);
            Ok(())
        });
        sim.run_until_done();
    });
}

/// The first frames of HTTP/2 of a client that asks for `/`: the preface, SETTINGS, and HEADERS
/// that end their stream.
fn asks_by_http2(host: &str) -> Vec<u8> {
    let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    let fields = [&[0x82, 0x86, 0x84, 0x41, host.len() as u8], host.as_bytes()].concat();
    let headers = [0, 0, fields.len() as u8, 1, 5, 0, 0, 0, 1];
    [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &settings, &headers, &fields].concat()
}

#[test]
fn state_is_told_by_http_2_under_the_name_in_its_uri() {
    Sim::seeds(10).run(|sim| {
        let (_echoing, _running) = starts(sim, &[]);
        // 200 is a field of HPACK's table, and 403 a literal behind a name there.
        for (host, status) in [("10.0.0.1:9000", 0x88), ("evil.example", 0x48)] {
            sim.client(host, async move |net| {
                let mut me = net.connect("10.0.0.1:9000").await?;
                me.send(asks_by_http2(host)).await?;
                let (mut head, mut body) = (Vec::new(), Vec::new());
                loop {
                    let frame = me.exactly(9).await?;
                    let payload = me.exactly(usize::from(frame[1]) << 8 | usize::from(frame[2])).await?;
                    match frame[3] {
                        0 => body.extend(payload),
                        1 => head.extend(payload),
                        _ => continue,
                    }
                    if frame[4] & 1 == 1 {
                        break;
                    }
                }
                assert_eq!(head.first(), Some(&status), "{host}: {head:x?}");
                let text = String::from_utf8(body)?;
                assert_eq!(text.contains("10.0.0.11:80 up"), host != "evil.example", "{text}");
                Ok(())
            });
        }
        sim.run_until_done();
    });
}
