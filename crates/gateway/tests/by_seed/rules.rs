//! Who may use a route, and how much.

use ringserve::http::hyper::service::service_fn;
use ringserve::http::hyper::{Method, Response, StatusCode};
use ringserve_gateway::RateKey;

use super::*;

#[test]
fn body_is_bounded_whether_its_length_is_said_or_not() {
    Sim::seeds(10).run(|sim| {
        let backend = Backend::start(sim, ADDRS[0], says_its_target);
        start(sim, &routes([("/*", Route::to(&upstream(1)).body_bytes_max(5))]));
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            assert_eq!(ask(&mut me, post("/a", "12345")).await?.status, 200);
            assert_eq!(ask(&mut me, post("/a", "123456")).await?.status, 413);
            assert_eq!(backend.requests(), 1);
            let mut me = net.connect(FRONT).await?;
            let chunked =
                "POST /a HTTP/1.1\r\nhost: a.b\r\ntransfer-encoding: chunked\r\n\r\n6\r\n123456\r\n0\r\n\r\n";
            assert_eq!(ask(&mut me, chunked).await?.status, 413);
            assert!(backend.seen.borrow()[1..].iter().all(|seen| !seen.is_whole));
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn rates_are_those_of_clients_behind_trusted_proxies() {
    Sim::seeds(5).run(|sim| {
        Backend::start(sim, ADDRS[0], says_its_target);
        let route = Route::to(&upstream(1)).rate(RateKey::Address, 1, 2).expect("a rate");
        start_with(sim, &routes([("/*", route)]), |gateway| {
            gateway.trusted(["10.0.0.0/8".parse().expect("a network")])
        });
        sim.client("proxy", async move |net| {
            let mut me = net.connect(FRONT).await?;
            let of =
                |client: &str| format!("GET /a HTTP/1.1\r\nhost: a.b\r\nx-forwarded-for: {client}\r\n\r\n");
            for status in [200, 200, 429] {
                assert_eq!(ask(&mut me, of("192.0.2.1")).await?.status, status);
            }
            assert_eq!(ask(&mut me, of("192.0.2.2")).await?.status, 200);
            let answer = ask(&mut me, of("192.0.2.1")).await?;
            assert_eq!(answer.field("retry-after"), Some("1"));
            net.sleep(2 * SECOND).await;
            assert_eq!(ask(&mut me, of("192.0.2.1")).await?.status, 200);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn networks_passwords_and_methods_are_asked_for() {
    Sim::seeds(3).run(|sim| {
        let backend = Backend::start(sim, ADDRS[0], says_its_target);
        let web = upstream(1);
        let routes = routes([
            ("/far", Route::to(&web).allow(["192.0.2.0/24".parse().unwrap()])),
            ("/near", Route::to(&web).allow(["10.0.0.0/8".parse().unwrap()])),
            ("/secret", Route::to(&web).basic_auth("secrets", [("me", "word")])),
            ("/posts", Route::to(&web).methods([Method::POST])),
        ]);
        start(sim, &routes);
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            assert_eq!(ask(&mut me, get("/far")).await?.status, 403);
            assert_eq!(ask(&mut me, get("/near")).await?.status, 200);
            let answer = ask(&mut me, get("/secret")).await?;
            assert_eq!(answer.field("www-authenticate"), Some("Basic realm=\"secrets\", charset=\"UTF-8\""));
            assert_eq!((answer.status, backend.requests()), (401, 1));
            let shown = "GET /secret HTTP/1.1\r\nhost: a.b\r\nauthorization: Basic bWU6d29yZA==\r\n\r\n";
            assert_eq!(ask(&mut me, shown).await?.status, 200);
            assert_eq!(ask(&mut me, get("/posts")).await?.status, 404);
            assert_eq!(ask(&mut me, post("/posts", "")).await?.status, 200);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn upstream_that_is_asked_first_decides_and_names_the_client() {
    Sim::seeds(5).run(|sim| {
        let backend = Backend::start(sim, ADDRS[0], says_its_target);
        let guard = Backend::start(sim, ADDRS[1], |seen, _| {
            Act::Send(match seen.field("authorization") {
                Some("good") => "HTTP/1.1 204 No\r\nx-user: ann\r\n\r\n".into(),
                _ => "HTTP/1.1 401 No\r\nx-why: no\r\ncontent-length: 2\r\n\r\nno".into(),
            })
        });
        let auth = HttpUpstream::new(Upstream::new("auth", [ADDRS[1]]));
        let route = Route::to(&upstream(1)).forward_auth(&auth, "/verify", ["x-user".parse().unwrap()]);
        start(sim, &routes([("/*", route)]));
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            let shows = |what: &str| {
                let fields = format!("authorization: {what}\r\nx-user: root\r\ncontent-length: 3");
                format!("POST /a?b HTTP/1.1\r\nhost: a.b\r\n{fields}\r\n\r\nabc")
            };
            assert_eq!(ask(&mut me, shows("good")).await?.text(), "/a?b");
            assert_eq!(backend.last().field("x-user"), Some("ann"));
            assert_eq!(backend.last().body, b"abc");
            let question = guard.last();
            assert_eq!(question.head[0], "GET /verify HTTP/1.1");
            assert_eq!(question.field("x-forwarded-method"), Some("POST"));
            assert_eq!(question.field("x-forwarded-uri"), Some("/a?b"));
            assert_eq!((question.field("x-user"), question.field("content-length")), (None, None));
            let answer = ask(&mut me, shows("bad")).await?;
            assert_eq!(
                (answer.status, answer.field("x-why"), answer.text().as_str()),
                (401, Some("no"), "no")
            );
            assert_eq!(backend.requests(), 1);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn question_names_the_client_and_not_its_lies() {
    Sim::seeds(3).run(|sim| {
        Backend::start(sim, ADDRS[0], says_its_target);
        let guard = Backend::start(sim, ADDRS[1], |seen, _| {
            Act::Send(match seen.field("authorization") {
                Some(_) => "HTTP/1.1 204 No\r\n\r\n".into(),
                None => "HTTP/1.1 403 No\r\ncontent-length: 0\r\n\r\n".into(),
            })
        });
        let auth = HttpUpstream::new(Upstream::new("auth", [ADDRS[1]]));
        let guarded = |route: Route| route.forward_auth(&auth, "/verify", []);
        let routes = routes([
            ("/web", guarded(Route::to(&upstream(1)))),
            ("/fixed", guarded(Route::respond(StatusCode::OK, "text/plain".parse().unwrap(), "fixed"))),
            ("/rest", guarded(Route::fallback())),
        ]);
        start_with(sim, &routes, |gateway| {
            gateway.fallback(service_fn(async |request| {
                let _request: ringserve::http::hyper::Request<ringserve::http::hyper::body::Incoming> =
                    request;
                Ok::<_, std::convert::Infallible>(Response::new("rest".to_owned()))
            }))
        });
        sim.client("one", async move |net| {
            let lies = "x-forwarded-for: 10.9.9.9\r\nx-forwarded-proto: https\r\n\
                        forwarded: for=10.9.9.9\r\nx-real-ip: 10.9.9.9\r\nx-forwarded-user: root\r\n\
                        connection: x-hop\r\nx-hop: 1\r\nx_user: root\r\n";
            for path in ["/web", "/fixed", "/rest"] {
                let mut me = net.connect(FRONT).await?;
                let request = |more: &str| format!("GET {path} HTTP/1.1\r\nhost: a.b\r\n{more}{lies}\r\n");
                assert_eq!(ask(&mut me, request("")).await?.status, 403, "{path}");
                assert_eq!(ask(&mut me, request("authorization: x\r\n")).await?.status, 200, "{path}");
                let question = guard.last();
                assert!(question.field("x-forwarded-for").is_some_and(|ip| !ip.contains("10.9.9.9")));
                assert_eq!(question.field("x-forwarded-proto"), Some("http"));
                assert_eq!(question.field("x-forwarded-uri"), Some(path));
                for name in ["forwarded", "x-real-ip", "x-forwarded-user", "x-hop", "x_user", "connection"] {
                    assert_eq!(question.field(name), None, "{path}: {name}");
                }
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn rate_by_a_field_counts_what_the_upstream_reads() {
    Sim::seeds(3).run(|sim| {
        Backend::start(sim, ADDRS[0], says_its_target);
        let key = RateKey::Field("x-tenant".parse().unwrap());
        let route = Route::to(&upstream(1)).rate(key, 1, 2).expect("a rate");
        start(sim, &routes([("/*", route)]));
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            let of = |tenant: &str| {
                format!("GET /a HTTP/1.1\r\nhost: a.b\r\nconnection: x-tenant\r\nx-tenant: {tenant}\r\n\r\n")
            };
            for (tenant, status) in [("a", 200), ("b", 200), ("c", 429)] {
                assert_eq!(ask(&mut me, of(tenant)).await?.status, status, "{tenant}");
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn route_has_as_many_requests_as_it_may() {
    Sim::seeds(5).run(|sim| {
        Backend::start(sim, ADDRS[0], |_, _| Act::After(2 * SECOND, Box::new(Act::Send(ok("done")))));
        start(sim, &routes([("/*", Route::to(&upstream(1)).requests_max(1))]));
        sim.client("one", async move |net| {
            let (mut me, mut other) = (net.connect(FRONT).await?, net.connect(FRONT).await?);
            me.send(get("/")).await?;
            net.sleep(SECOND).await;
            assert_eq!(ask(&mut other, get("/")).await?.status, 503);
            assert_eq!(answer(&mut me).await?.text(), "done");
            assert_eq!(ask(&mut other, get("/")).await?.text(), "done");
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn rest_goes_to_the_fallback_in_one_form() {
    Sim::seeds(3).run(|sim| {
        let routes = routes([("/a", Route::fallback())]);
        start_with(sim, &routes, |gateway| {
            gateway.fallback(service_fn(async |request| {
                let request: ringserve::http::hyper::Request<ringserve::http::hyper::body::Incoming> =
                    request;
                Ok::<_, std::convert::Infallible>(Response::new(request.uri().to_string()))
            }))
        });
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            for (path, sent) in
                [("/a", "/a"), ("/b/%2e%2e/c?d", "/c?d"), ("/x/../a?%2e", "/a?%2e"), ("/b", "/b")]
            {
                assert_eq!(ask(&mut me, get(path)).await?.text(), sent);
            }
            for path in ["/b//c", "/b%2fc", "/x/..;/a"] {
                assert_eq!(ask(&mut me, get(path)).await?.status, 400, "{path}");
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn rules_of_a_route_hold_before_the_fallback() {
    Sim::seeds(3).run(|sim| {
        let known = Route::fallback().basic_auth("x", [("a", "b:c")]);
        let denied = Route::fallback().deny(["0.0.0.0/0".parse().unwrap()]);
        let busy = Route::fallback().requests_max(0);
        start_with(sim, &routes([("/known", known), ("/denied", denied), ("/busy", busy)]), |gateway| {
            gateway.fallback(service_fn(async |_request| {
                let _request: ringserve::http::hyper::Request<ringserve::http::hyper::body::Incoming> =
                    _request;
                Ok::<_, std::convert::Infallible>(Response::new("rest".to_owned()))
            }))
        });
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            let shown = "GET /known HTTP/1.1\r\nhost: a.b\r\nauthorization: Basic YTpiOmM=\r\n\r\n";
            assert_eq!(ask(&mut me, shown).await?.text(), "rest");
            for (path, status) in [("/known", 401), ("/denied", 403), ("/busy", 503)] {
                assert_eq!(ask(&mut me, get(path)).await?.status, status, "{path}");
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn way_of_a_question_ends_where_it_says() {
    Sim::seeds(3).run(|sim| {
        let backend = Backend::start(sim, ADDRS[0], says_its_target);
        start(sim, &all_to(&upstream(1)));
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            let asks =
                |left: u32| format!("OPTIONS /a HTTP/1.1\r\nhost: a.b\r\nmax-forwards: {left}\r\n\r\n");
            assert_eq!((ask(&mut me, asks(0)).await?.status, backend.requests()), (200, 0));
            assert_eq!(ask(&mut me, asks(3)).await?.text(), "/a");
            assert_eq!(backend.last().field("max-forwards"), Some("2"));
            assert_eq!(ask(&mut me, "TRACE /a HTTP/1.1\r\nhost: a.b\r\n\r\n").await?.status, 405);
            Ok(())
        });
        sim.run_until_done();
    });
}
