//! Backends that fail, and what their clients learn of it.

use ringserve::testing::Faults;
use ringserve_gateway::RouteTimeouts;

use super::*;

/// Asks once, and returns the answer, or that there was none.
fn asks_once(routes: &Routes, sim: &Sim, request: String) -> Rc<RefCell<Option<io::Result<Answer>>>> {
    start(sim, routes);
    let found = Rc::new(RefCell::new(None));
    let of_client = found.clone();
    sim.client("one", async move |net| {
        let mut me = net.connect(FRONT).await?;
        *of_client.borrow_mut() = Some(ask(&mut me, request).await);
        Ok(())
    });
    sim.run_until_done();
    found
}

#[test]
fn answer_that_is_cut_anywhere_is_never_a_whole_one() {
    let whole = "HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n0123456789";
    let chunked =
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n01234\r\n5\r\n56789\r\n0\r\n\r\n";
    // To a client of HTTP/1.0 the end of an answer is that of its connection.
    let old = "GET / HTTP/1.0\r\nhost: a.b\r\n\r\n".to_owned();
    for (text, request) in [(whole, post("/", "x")), (chunked, post("/", "x")), (chunked, old)] {
        for cut in 0..text.len() {
            for resets in [false, true] {
                Sim::seeds(1).from(cut as u64).faults(Faults::none()).run(|sim| {
                    Backend::start(sim, ADDRS[0], move |_, _| {
                        let front = text[..cut].to_owned();
                        if resets { Act::SendAndReset(front) } else { Act::SendAndEnd(front) }
                    });
                    let found = asks_once(&all_to(&upstream(1)), sim, request.clone());
                    match found.borrow().as_ref().expect("it ended") {
                        Ok(answer) if answer.status == 200 => {
                            assert!(!answer.body.is_whole, "{cut}: {answer:?}");
                        }
                        Ok(answer) => assert_eq!(answer.status, 502, "{cut}"),
                        Err(_) => {}
                    }
                });
            }
        }
    }
}

#[test]
fn post_that_was_lost_is_asked_once() {
    Sim::seeds(20).run(|sim| {
        let backends: Vec<_> = ADDRS
            .iter()
            .map(|addr| Backend::start(sim, addr, |_, _| Act::SendAndEnd(String::new())))
            .collect();
        let found = asks_once(&all_to(&upstream(2)), sim, post("/", "x"));
        assert_eq!(found.borrow().as_ref().expect("it ended").as_ref().expect("an answer").status, 502);
        assert_eq!(backends.iter().map(|backend| backend.requests()).sum::<usize>(), 1);
    });
}

#[test]
fn key_of_a_post_counts_where_the_route_says_so() {
    for (has_keys, status, asked) in [(false, 502, 1), (true, 200, 2)] {
        Sim::seeds(20).run(|sim| {
            let backends = ADDRS.map(|addr| {
                Backend::start(sim, addr, move |seen, _| match seen.field("idempotency-key") {
                    Some(_) if addr == ADDRS[1] => Act::Send(ok("done")),
                    _ => Act::SendAndEnd(String::new()),
                })
            });
            let mut route = Route::to(&upstream(2)).retry_on([503]);
            if has_keys {
                route = route.idempotency_keys();
            }
            let request = "POST / HTTP/1.1\r\nhost: a.b\r\nidempotency-key: 1\r\ncontent-length: 1\r\n\r\nx";
            let found = asks_once(&routes([("/*", route)]), sim, request.into());
            let found = found.borrow();
            let answer = found.as_ref().expect("it ended").as_ref().expect("an answer");
            let requests = backends.map(|backend| backend.requests());
            // By chance the one that answers was the first.
            assert!(requests[0] == 0 || answer.status == status && requests[0] + requests[1] == asked);
        });
    }
}

#[test]
fn request_that_may_be_repeated_goes_to_another_backend() {
    Sim::seeds(20).run(|sim| {
        let dies = Backend::start(sim, ADDRS[0], |_, _| Act::SendAndEnd(String::new()));
        let lives = Backend::start(sim, ADDRS[1], says_its_target);
        start(sim, &all_to(&upstream(2)));
        let put = "PUT /a HTTP/1.1\r\nhost: a.b\r\ncontent-length: 5\r\n\r\nhello";
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            for _ in 0..5 {
                assert_eq!(ask(&mut me, put).await?.text(), "/a");
                assert_eq!(lives.last().body, b"hello");
            }
            assert_eq!(lives.requests(), 5);
            assert!(dies.seen.borrow().iter().all(|seen| seen.body == b"hello"));
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn backend_that_is_not_there_costs_no_request() {
    Sim::seeds(20).run(|sim| {
        Backend::start(sim, ADDRS[1], says_its_target);
        start(sim, &all_to(&upstream(2)));
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            for _ in 0..5 {
                assert_eq!(ask(&mut me, post("/a", "x")).await?.text(), "/a");
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn body_that_is_too_long_to_keep_is_sent_once() {
    Sim::seeds(5).faults(Faults::none()).run(|sim| {
        let backends: Vec<_> = ADDRS
            .iter()
            .map(|addr| Backend::start(sim, addr, |_, _| Act::SendAndEnd(String::new())))
            .collect();
        let body = "x".repeat(100_000);
        let put = format!("PUT /a HTTP/1.1\r\nhost: a.b\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        let found = asks_once(&all_to(&upstream(2)), sim, put);
        assert_eq!(found.borrow().as_ref().expect("it ended").as_ref().expect("an answer").status, 502);
        assert_eq!(backends.iter().map(|backend| backend.requests()).sum::<usize>(), 1);
    });
}

#[test]
fn statuses_that_a_route_names_are_asked_elsewhere() {
    Sim::seeds(10).run(|sim| {
        let busy = "HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy";
        Backend::start(sim, ADDRS[0], move |_, _| Act::Send(busy.into()));
        Backend::start(sim, ADDRS[1], says_its_target);
        let (web, both) = (upstream(2), upstream(2));
        start(sim, &routes([("/r/*", Route::to(&web).retry_on([503])), ("/*", Route::to(&both))]));
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            for _ in 0..4 {
                assert_eq!(ask(&mut me, get("/r/a")).await?.text(), "/r/a");
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn late_answers_are_504_and_late_bodies_are_cut() {
    Sim::seeds(5).faults(Faults::none()).run(|sim| {
        Backend::start(sim, ADDRS[0], |seen, _| {
            let half = "HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n01234".to_owned();
            match seen.head[0].contains("/half") {
                true => Act::Pause(half, 100 * SECOND, Box::new(Act::Send("56789".into()))),
                false => Act::After(100 * SECOND, Box::new(Act::Send(ok("late")))),
            }
        });
        let times = RouteTimeouts::default().response(3 * SECOND).body_idle(2 * SECOND);
        start(sim, &routes([("/*", Route::to(&upstream(1)).timeouts(times))]));
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            let began = net.now();
            assert_eq!(ask(&mut me, get("/")).await?.status, 504);
            let took = net.now() - began;
            assert!(took >= 3 * SECOND && took < 4 * SECOND, "{took:?}");
            let answer = ask(&mut me, get("/half")).await?;
            assert_eq!((answer.status, answer.text().as_str(), answer.body.is_whole), (200, "01234", false));
            let took = net.now() - began;
            assert!(took >= 5 * SECOND && took < 7 * SECOND, "{took:?}");
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn client_that_sends_slowly_is_not_a_late_backend() {
    Sim::seeds(5).faults(Faults::none()).run(|sim| {
        Backend::start(sim, ADDRS[0], says_its_target);
        let times = RouteTimeouts::default().response(3 * SECOND);
        start(sim, &routes([("/*", Route::to(&upstream(1)).timeouts(times))]));
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            me.send("POST /a HTTP/1.1\r\nhost: a.b\r\ncontent-length: 8\r\n\r\n").await?;
            for _ in 0..8 {
                net.sleep(2 * SECOND).await;
                me.send("x").await?;
            }
            assert_eq!(answer(&mut me).await?.text(), "/a");
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn client_that_pauses_is_not_a_late_backend() {
    Sim::seeds(3).faults(Faults::none()).run(|sim| {
        Backend::start(sim, ADDRS[0], says_its_target);
        let times = RouteTimeouts::default().response(3 * SECOND);
        let web = upstream(1);
        start(sim, &routes([("/*", Route::to(&web).timeouts(times))]));
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            let began = net.now();
            me.send("POST /a HTTP/1.1\r\nhost: a.b\r\ncontent-length: 8\r\n\r\n").await?;
            net.sleep(10 * SECOND).await;
            me.send("12345678").await?;
            assert_eq!(answer(&mut me).await?.text(), "/a");
            for _ in 0..6 {
                let mut me = net.connect(FRONT).await?;
                let late = ask(&mut me, "POST /a HTTP/1.1\r\nhost: a.b\r\ncontent-length: 8\r\n\r\n1");
                assert_eq!(late.await?.status, 408);
            }
            let took = net.now() - began;
            assert!(took >= 190 * SECOND && took < 195 * SECOND, "{took:?}");
            assert_eq!(web.upstream().stats().backends[0].failures, 0);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn time_that_a_client_chose_blames_no_backend() {
    Sim::seeds(3).faults(Faults::none()).run(|sim| {
        Backend::start(sim, ADDRS[0], |_, _| Act::After(2 * SECOND, Box::new(Act::Send(ok("late")))));
        let times = RouteTimeouts::default().request(Some(SECOND));
        let web = upstream(1);
        start(sim, &routes([("/own", Route::to(&web).timeouts(times)), ("/*", Route::to(&web))]));
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            for timeout in ["1m", "500m", "1S"] {
                for request in [get("/"), post("/", "x")] {
                    let short = request.replace("host", &format!("grpc-timeout: {timeout}\r\nhost"));
                    assert_eq!(ask(&mut me, short).await?.status, 504);
                }
            }
            assert_eq!(web.upstream().stats().backends[0].failures, 0);
            let long = get("/own").replace("host", "grpc-timeout: 1H\r\nhost");
            assert_eq!(ask(&mut me, long).await?.status, 504);
            assert_eq!(web.upstream().stats().backends[0].failures, 1);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn answer_that_has_no_better_one_is_kept() {
    Sim::seeds(5).run(|sim| {
        let busy = "HTTP/1.1 503 Busy\r\nretry-after: 7\r\ncontent-length: 4\r\n\r\nbusy";
        for addr in ADDRS {
            Backend::start(sim, addr, move |_, _| Act::Send(busy.into()));
        }
        let (one, two) = (upstream(1), upstream(2));
        start(
            sim,
            &routes([("/one", Route::to(&one).retry_on([503])), ("/*", Route::to(&two).retry_on([503]))]),
        );
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            for path in ["/one", "/two"] {
                let answer = ask(&mut me, get(path)).await?;
                assert_eq!((answer.status, answer.text().as_str()), (503, "busy"), "{path}");
                assert_eq!(answer.field("retry-after"), Some("7"));
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn time_of_an_answer_is_that_of_all_tries() {
    Sim::seeds(3).faults(Faults::none()).run(|sim| {
        for addr in ADDRS {
            Backend::start(sim, addr, |_, _| {
                Act::After(2 * SECOND, Box::new(Act::SendAndEnd(String::new())))
            });
        }
        let times = RouteTimeouts::default().response(3 * SECOND);
        start(sim, &routes([("/*", Route::to(&upstream(2)).timeouts(times))]));
        sim.client("one", async move |net| {
            let put = "PUT /a HTTP/1.1\r\nhost: a.b\r\ncontent-length: 2\r\n\r\n";
            // From the last byte of the body, and not from when it was seen to have come.
            for pause in [0, 2, 4] {
                let mut me = net.connect(FRONT).await?;
                me.send(put).await?;
                net.sleep(pause * SECOND).await;
                let began = net.now();
                assert_eq!(ask(&mut me, "xy").await?.status, 504);
                let took = net.now() - began;
                assert!(took >= 3 * SECOND && took < SECOND * 7 / 2, "{took:?}");
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn client_that_leaves_ends_its_request_and_no_half_is_a_whole() {
    Sim::seeds(20).run(|sim| {
        let backend = Backend::start(sim, ADDRS[0], says_its_target);
        start(sim, &all_to(&upstream(1)));
        sim.client("one", async move |net| {
            for fields in ["content-length: 8\r\n\r\n1234", "transfer-encoding: chunked\r\n\r\n4\r\n1234\r\n"]
            {
                let mut me = net.connect(FRONT).await?;
                me.send(format!("POST /a HTTP/1.1\r\nhost: a.b\r\n{fields}")).await?;
                net.sleep(SECOND).await;
                me.reset();
                net.sleep(SECOND).await;
                let seen = backend.last();
                assert!(!seen.is_whole && seen.body == b"1234", "{seen:?}");
            }
            let mut me = net.connect(FRONT).await?;
            assert_eq!(ask(&mut me, get("/b")).await?.text(), "/b");
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn early_answer_ends_the_connection_of_a_half_sent_request() {
    Sim::seeds(10).faults(Faults::none()).run(|sim| {
        let backend = Backend::start(sim, ADDRS[0], |_, at| Act::Send(ok(&at.to_string())));
        backend.reads_bodies.set(false);
        start(sim, &all_to(&upstream(1)));
        let of_backend = backend.clone();
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            me.send("POST /a HTTP/1.1\r\nhost: a.b\r\ncontent-length: 40\r\n\r\n").await?;
            assert_eq!(answer(&mut me).await?.text(), "0");
            let mut other = net.connect(FRONT).await?;
            of_backend.reads_bodies.set(true);
            assert_eq!(ask(&mut other, get("/b")).await?.text(), "1");
            assert_eq!(of_backend.accepted.get(), 2);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn what_no_request_asked_for_reaches_no_client() {
    Sim::seeds(20).run(|sim| {
        let backend = Backend::start(sim, ADDRS[0], |seen, _| {
            let target = seen.head[0].split(' ').nth(1).expect("a target");
            // An answer too many, in the same piece.
            Act::Send(if target == "/two" { ok("one") + &ok("stray") } else { ok(target) })
        });
        start(sim, &all_to(&upstream(1)));
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            for round in 0..5 {
                assert_eq!(ask(&mut me, get("/two")).await?.text(), "one");
                let path = format!("/{round}");
                assert_eq!(ask(&mut me, get(&path)).await?.text(), path);
            }
            assert_eq!(backend.accepted.get(), 6);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn connections_that_ended_while_idle_cost_no_request() {
    Sim::seeds(30).run(|sim| {
        let backend = Backend::start(sim, ADDRS[0], |_, at| {
            let answer = ok(&at.to_string());
            if at % 2 == 0 { Act::SendAndEnd(answer) } else { Act::Send(answer) }
        });
        start(sim, &all_to(&upstream(1)));
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            for round in 0..10 {
                let answer = ask(&mut me, post("/", "x")).await?;
                assert_eq!((answer.status, answer.text()), (200, round.to_string()));
                net.sleep(SECOND / 2).await;
            }
            assert_eq!(backend.requests(), 10);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn upstream_without_backends_is_503_and_says_when() {
    Sim::seeds(3).run(|sim| {
        let none = HttpUpstream::new(Upstream::new("none", [""; 0]));
        let found = asks_once(&all_to(&none), sim, get("/"));
        let found = found.borrow();
        let answer = found.as_ref().expect("it ended").as_ref().expect("an answer");
        assert_eq!((answer.status, answer.field("retry-after")), (503, Some("1")));
    });
}
