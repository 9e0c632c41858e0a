//! Requests, answers and fields that are passed on.

use ringserve::http::hyper::StatusCode;
use ringserve::testing::Faults;

use super::*;

#[test]
fn requests_reach_backends_and_answers_come_back() {
    Sim::seeds(20).run(|sim| {
        let backend = Backend::start(sim, ADDRS[0], says_its_target);
        start(sim, &all_to(&upstream(1)));
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            for path in ["/", "/a?b=c", "/d%20e", "/x/../f"] {
                let answer = ask(&mut me, get(path)).await?;
                let sent = if path == "/x/../f" { "/f" } else { path };
                assert_eq!((answer.status, answer.text().as_str()), (200, sent));
            }
            assert_eq!(ask(&mut me, post("/p", "hello")).await?.text(), "/p");
            assert_eq!((backend.last().body.as_slice(), backend.accepted.get()), (&b"hello"[..], 1));
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn fields_of_a_connection_end_at_the_gateway() {
    Sim::seeds(5).run(|sim| {
        let backend = Backend::start(sim, ADDRS[0], |_, _| {
            let fields = "connection: x-mine\r\nx-mine: 1\r\nkeep-alive: timeout=5\r\nx-yours: 1\r\n";
            Act::Send(format!("HTTP/1.1 200 OK\r\n{fields}content-length: 0\r\n\r\n"))
        });
        start(sim, &all_to(&upstream(1)));
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            let fields = "connection: x-secret, x-forwarded-for, via, x-request-id\r\nx-secret: 1\r\nte: gzip\r\n\
                          keep-alive: 1\r\nproxy-authorization: x\r\nx_forwarded_for: 6.6.6.6\r\n\
                          x-forwarded-for: 6.6.6.6\r\nforwarded: for=6.6.6.6\r\nexpect: 100-continue\r\n";
            let answer = ask(&mut me, format!("GET / HTTP/1.1\r\nhost: a.b\r\n{fields}\r\n")).await?;
            assert_eq!((answer.field("x-mine"), answer.field("keep-alive")), (None, None));
            assert_eq!(answer.field("x-yours"), Some("1"));
            let seen = backend.last();
            let of_connection =
                ["connection", "x-secret", "te", "keep-alive", "proxy-authorization", "x_forwarded_for", "forwarded"];
            for name in of_connection {
                assert_eq!(seen.field(name), None, "{name}");
            }
            let me = me.local_addr().expect("an address").ip().to_string();
            assert_eq!(seen.field("x-forwarded-for"), Some(me.as_str()));
            assert_eq!(seen.field("x-forwarded-proto"), Some("http"));
            assert_eq!(seen.field("x-forwarded-host"), Some("a.b"));
            assert_eq!(seen.field("x-forwarded-port"), Some("80"));
            assert_eq!(seen.field("via"), Some("1.1 ringserve"));
            assert_eq!(seen.field("host"), Some("a.b"));
            assert_eq!(seen.field("x-request-id").map(str::len), Some(32));
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn bodies_of_unknown_length_are_streamed_both_ways() {
    Sim::seeds(20).run(|sim| {
        let backend = Backend::start(sim, ADDRS[0], |seen, _| {
            let body = String::from_utf8_lossy(&seen.body).into_owned();
            let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n";
            let tail = Act::Send(format!("{:x}\r\n{body}\r\n0\r\nx-sum: 7\r\n\r\n", body.len()));
            Act::Pause(format!("{head}3\r\nhi \r\n"), 2 * SECOND, Box::new(tail))
        });
        start(sim, &all_to(&upstream(1)));
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            for method in ["POST", "GET"] {
                let fields = "host: a.b\r\nte: trailers\r\ntransfer-encoding: chunked\r\n\r\n";
                me.send(format!("{method} / HTTP/1.1\r\n{fields}4\r\nabcd\r\n")).await?;
                net.sleep(SECOND).await;
                let answer = ask(&mut me, "2\r\nef\r\n0\r\n\r\n").await?;
                assert!(answer.body.is_whole);
                assert_eq!(
                    (answer.text().as_str(), answer.body.trailers.as_slice()),
                    ("hi abcdef", &["x-sum: 7".to_owned()][..])
                );
                let seen = backend.last();
                assert_eq!((seen.field("te"), seen.field("connection")), (Some("trailers"), Some("te")));
                assert_eq!(
                    (seen.field("transfer-encoding"), seen.field("content-length")),
                    (Some("chunked"), None)
                );
            }
            assert_eq!(backend.accepted.get(), 1);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn answers_of_every_kind_keep_the_connection_in_step() {
    Sim::seeds(10).faults(Faults::none()).run(|sim| {
        let backend = Backend::start(sim, ADDRS[0], |seen, _| {
            let target = seen.head[0].split(' ').nth(1).expect("a target").to_owned();
            Act::Send(match target.as_str() {
                "/head" => "HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n".into(),
                "/none" => "HTTP/1.1 204 No Content\r\n\r\n".into(),
                "/same" => "HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n".into(),
                "/early" => format!("HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n{}", ok("late")),
                _ => ok("plain"),
            })
        });
        start(sim, &all_to(&upstream(1)));
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            me.send("HEAD /head HTTP/1.1\r\nhost: a.b\r\n\r\n").await?;
            let lines = head(&mut me).await?.expect("a head");
            assert!(lines.contains(&"content-length: 1000".to_owned()), "{lines:?}");
            for (path, status, text) in
                [("/none", 204, ""), ("/same", 304, ""), ("/early", 200, "late"), ("/", 200, "plain")]
            {
                let answer = ask(&mut me, get(path)).await?;
                assert_eq!((answer.status, answer.text().as_str()), (status, text), "{path}");
            }
            assert_eq!(backend.accepted.get(), 1);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn slow_reader_holds_its_upstream_back() {
    Sim::seeds(5).faults(Faults::none()).run(|sim| {
        let large = 8 << 20;
        let backend = Backend::start(sim, ADDRS[0], move |_, _| Act::Send(ok(&"x".repeat(large))));
        start(sim, &all_to(&upstream(1)));
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            me.send(get("/")).await?;
            me.hold();
            net.sleep(5 * SECOND).await;
            me.release();
            let lines = head(&mut me).await?.expect("a head");
            assert_eq!(lines[0], "HTTP/1.1 200 OK");
            assert_eq!(me.exactly(large).await?.len(), large);
            Ok(())
        });
        sim.run_for(4 * SECOND);
        assert_eq!(
            (backend.requests(), backend.sent.get()),
            (1, 0),
            "all was read for a reader that reads nothing"
        );
        sim.run_until_done();
    });
}

#[test]
fn paths_and_fields_are_rewritten_as_routes_say() {
    Sim::seeds(3).run(|sim| {
        let backend = Backend::start(sim, ADDRS[0], |_, _| {
            Act::Send("HTTP/1.1 200 OK\r\nserver: x\r\ncontent-length: 0\r\n\r\n".into())
        });
        let edits = ringserve_gateway::FieldEdits::default;
        let route = Route::to(&upstream(1))
            .strip_prefix("/v1")
            .add_prefix("/api")
            .host("inner".parse().unwrap())
            .request_fields(edits().set("x-env", "live").unwrap().remove("x-debug").unwrap())
            .response_fields(edits().remove("server").unwrap().add("x-by", "us").unwrap());
        start(sim, &routes([("a.b/v1/*", route)]));
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            let answer = ask(
                &mut me,
                "GET /v1/u/%2e/x?q=1 HTTP/1.1\r\nhost: A.b:80\r\nx-debug: 1\r\nx-env: test\r\n\r\n",
            )
            .await?;
            assert_eq!((answer.field("server"), answer.field("x-by")), (None, Some("us")));
            let seen = backend.last();
            assert_eq!(seen.head[0], "GET /api/u/x?q=1 HTTP/1.1");
            assert_eq!((seen.field("host"), seen.field("x-env")), (Some("inner"), Some("live")));
            assert_eq!((seen.field("x-debug"), seen.field("x-forwarded-host")), (None, Some("A.b:80")));
            assert_eq!(ask(&mut me, "GET /v1 HTTP/1.1\r\nhost: c.d\r\n\r\n").await?.status, 404);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn answers_and_redirects_need_no_upstream() {
    Sim::seeds(3).run(|sim| {
        let plain = "text/plain".parse().unwrap();
        let moved = Route::redirect(StatusCode::FOUND, "/elsewhere".parse().unwrap());
        start(
            sim,
            &routes([
                ("/ping", Route::respond(StatusCode::OK, plain, "pong")),
                ("/old", moved),
                ("/*", Route::redirect_to_https()),
            ]),
        );
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            assert_eq!(ask(&mut me, get("/ping")).await?.text(), "pong");
            let answer = ask(&mut me, get("/old")).await?;
            assert_eq!((answer.status, answer.field("location")), (302, Some("/elsewhere")));
            let answer = ask(&mut me, "GET /a/./b?c HTTP/1.1\r\nhost: a.b:80\r\n\r\n").await?;
            assert_eq!((answer.status, answer.field("location")), (308, Some("https://a.b/a/b?c")));
            Ok(())
        });
        sim.run_until_done();
    });
}
