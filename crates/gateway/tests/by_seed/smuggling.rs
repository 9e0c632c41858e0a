//! Requests and answers with two readings: none of them reaches a backend, or a client, as another
//! number of messages.

use ringserve::testing::Faults;

use super::*;

/// Sends a request, and returns the status of the first answer, 0 for none.
fn status_of(request: &'static [u8]) -> (u16, Vec<Seen>) {
    let found = Rc::new(Cell::new(0));
    let seen = Rc::new(RefCell::new(Vec::new()));
    let (of_client, of_backend) = (found.clone(), seen.clone());
    Sim::seeds(1).faults(Faults::none()).run(move |sim| {
        let backend = Backend::start(sim, ADDRS[0], says_its_target);
        start(sim, &all_to(&upstream(1)));
        let (found, all) = (of_client.clone(), of_backend.clone());
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            me.send(request).await?;
            if let Ok(Ok(answer)) = net.timeout(5 * SECOND, answer(&mut me)).await {
                found.set(answer.status);
            }
            net.sleep(SECOND).await;
            all.replace(backend.seen.borrow().clone());
            Ok(())
        });
        sim.run_until_done();
    });
    (found.get(), seen.take())
}

#[test]
fn messages_with_two_lengths_are_one_or_none() {
    let cases: [(&'static [u8], u16); 14] = [
        (b"POST / HTTP/1.1\r\nhost: a.b\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef", 400),
        (b"POST / HTTP/1.1\r\nhost: a.b\r\ncontent-length: 5, 6\r\n\r\nabcdef", 400),
        (b"POST / HTTP/1.1\r\nhost: a.b\r\ncontent-length: +5\r\n\r\nabcde", 400),
        (b"POST / HTTP/1.1\r\nhost: a.b\r\ncontent-length: 0x5\r\n\r\nabcde", 400),
        (b"POST / HTTP/1.1\r\nhost: a.b\r\ntransfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a.b\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nhost: a.b\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a.b\r\ntransfer-encoding : chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a.b\r\nx: y\r\n transfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\nhost: a.b\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a.b\r\nhost: c.d\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET http://c.d/ HTTP/1.1\r\nhost: a.b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a.b\r\nconnection: content-length\r\ncontent-length: 0\r\n\r\n", 400),
    ];
    for (request, status) in cases {
        let (found, seen) = status_of(request);
        let text = String::from_utf8_lossy(request);
        assert_eq!((found, seen.len()), (status, 0), "{text}");
    }
}

#[test]
fn length_beside_chunks_is_the_chunks_alone() {
    let (_, seen) = status_of(
        b"POST /a HTTP/1.1\r\nhost: a.b\r\ncontent-length: 48\r\ntransfer-encoding: chunked\r\n\r\n\
          0\r\n\r\nGET /smuggled HTTP/1.1\r\nhost: a.b\r\n\r\n",
    );
    for seen in &seen {
        assert_eq!((seen.field("content-length"), seen.body.len()), (None, 0), "{seen:?}");
    }
    // What stands behind the chunks is a request of the client's own, on its own connection, and
    // checked as one.
    assert!(seen.len() <= 2);
}

#[test]
fn chunks_that_are_none_are_no_body() {
    for chunks in
        ["zz\r\nabc\r\n0\r\n\r\n", "3\nabc\r\n0\r\n\r\n", "3\r\nabcd\r\n0\r\n\r\n", "fffffffffffffffff\r\n"]
    {
        let request = format!("POST /a HTTP/1.1\r\nhost: a.b\r\ntransfer-encoding: chunked\r\n\r\n{chunks}");
        let (status, seen) = status_of(request.leak().as_bytes());
        assert_ne!(status, 200, "{chunks}");
        assert!(seen.iter().all(|seen| !seen.is_whole), "{chunks}: {seen:?}");
    }
}

#[test]
fn ambiguous_paths_reach_no_backend() {
    for path in ["//admin", "/a%2fadmin", "/a%2Fb", "/a%5cb", "/a\\b", "/%00", "/a/..;/%2f", "/a%zz"] {
        let request = format!("GET {path} HTTP/1.1\r\nhost: a.b\r\n\r\n");
        let (status, seen) = status_of(request.leak().as_bytes());
        assert_eq!((status, seen.len()), (400, 0), "{path}");
    }
}

#[test]
fn guarded_path_is_guarded_however_it_is_written() {
    Sim::seeds(1).faults(Faults::none()).run(|sim| {
        let backend = Backend::start(sim, ADDRS[0], says_its_target);
        let web = upstream(1);
        let guarded = Route::to(&web).basic_auth("x", [("a", "b")]);
        start(
            sim,
            &routes([
                ("/admin/*", guarded),
                ("/raw/*", Route::to(&web).raw_paths()),
                ("/*", Route::to(&web)),
            ]),
        );
        sim.client("one", async move |net| {
            let paths = [
                "/admin",
                "/admin/",
                "/x/../admin",
                "/%61dmin/x",
                "/./admin",
                "/x/%2e%2e/admin",
                "/raw/%2e%2e/admin/",
            ];
            for path in paths {
                let mut me = net.connect(FRONT).await?;
                let status = ask(&mut me, get(path)).await?.status;
                assert_eq!(status, 401, "{path}");
            }
            assert_eq!(backend.requests(), 0);
            let mut me = net.connect(FRONT).await?;
            assert_eq!(ask(&mut me, get("/raw/a%2fb//c")).await?.text(), "/raw/a%2fb//c");
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn answers_with_two_lengths_are_502() {
    for head in [
        "content-length: 5\r\ncontent-length: 6",
        "content-length: 5, 6",
        "content-length: x",
        "transfer-encoding: gzip",
        "transfer-encoding: gzip, chunked",
        "x: y\r\n z: folded\r\ncontent-length: 0",
    ] {
        Sim::seeds(1).faults(Faults::none()).run(|sim| {
            Backend::start(sim, ADDRS[0], move |_, _| {
                Act::SendAndEnd(format!("HTTP/1.1 200 OK\r\n{head}\r\n\r\nabcdef"))
            });
            start(sim, &all_to(&upstream(1)));
            sim.client("one", async move |net| {
                let mut me = net.connect(FRONT).await?;
                let answer = ask(&mut me, post("/", "x")).await?;
                assert_eq!(answer.status, 502, "{head}: {answer:?}");
                Ok(())
            });
            sim.run_until_done();
        });
    }
}
