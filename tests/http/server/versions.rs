//! The protocol of a connection, and the service that it reaches.

use super::*;

#[test]
fn both_protocols_are_told_by_their_first_bytes() {
    let rig = Rig::start(HttpOptions::default());
    let mut client = rig.client();
    client.write(&GET.repeat(20));
    (0..20).for_each(|_| assert_eq!(read_answer(&mut client).1, b"HTTP/1.1"));
    // A head that begins like the preface, and arrives in two pieces, of which the first is checked
    // alone.
    let mut slow = rig.client();
    rig.takes_in(&mut slow, b"PRI * HT");
    slow.write(b"TP/1.1\r\nhost: x\r\n\r\n");
    assert_eq!(read_answer(&mut slow).1, b"HTTP/1.1");
    rig.with_http2(async |mut sender| {
        for _ in 0..20 {
            assert_eq!(ask(&mut sender, "/").await, "HTTP/2.0");
        }
    });
    let mut slow = rig.client();
    for piece in frames::PREFACE.chunks(7) {
        rig.takes_in(&mut slow, piece);
    }
    // SETTINGS, with the number of streams.
    slow.write(b"\0\0\0\x04\0\0\0\0\0");
    let head = slow.read(9);
    assert_eq!((head[3], &head[5..]), (4, &[0; 4][..]));
    drop((client, slow));
    ringserve_tests::finish(rig.running);
}

#[test]
fn one_protocol_alone_can_be_spoken() {
    let rig = Rig::start(HttpOptions::default().versions(HttpVersions::Http2));
    let mut client = rig.client();
    client.write(GET);
    assert_eq!(client.end(), End::Fin);
    watch::closed_for(&rig.running, BAD, 1);
    rig.with_http2(async |mut sender| assert_eq!(ask(&mut sender, "/").await, "HTTP/2.0"));
    ringserve_tests::finish(rig.running);
    let rig = Rig::start(HttpOptions::default().versions(HttpVersions::Http1));
    let mut client = rig.client();
    client.write(frames::PREFACE);
    client.end_after_all();
    watch::closed_for(&rig.running, BAD, 1);
    let mut client = rig.client();
    client.write(GET);
    assert_eq!(read_answer(&mut client).1, b"HTTP/1.1");
    drop(client);
    ringserve_tests::finish(rig.running);
}

#[test]
fn a_shard_has_one_service_and_a_connection_can_have_its_own() {
    let server = On::default().server(no_time_limits());
    let running = server.start(|shard| {
        let http = Http::new(shard, &HttpOptions::default().date(false))?;
        let requests = Rc::new(Cell::new(0));
        Ok::<_, LimitError>(stream(async move |stream: Stream| {
            let (peer, requests) = (stream.peer(), requests.clone());
            let answer = move |_: Request<Incoming>| {
                requests.set(requests.get() + 1);
                ready(Ok::<_, BoxError>(Response::new(format!("{peer} {}", requests.get()))))
            };
            http.serve(stream, service_fn(answer)).await
        }))
    });
    let running = running.expect("the server starts");
    let mut clients: Vec<Client> = (0..3).map(|_| Client::connect(running.local_addrs()[0])).collect();
    for (n, client) in clients.iter_mut().enumerate() {
        client.write(GET);
        let (head, body) = read_answer(client);
        assert_eq!(String::from_utf8(body).unwrap(), format!("{} {}", client.local_addr(), n + 1));
        assert!(!head.contains("date:"), "{head}");
    }
    drop(clients);
    ringserve_tests::finish(running);
}

#[test]
fn options_out_of_range_are_refused_at_the_start() {
    let defaults = HttpOptions::default;
    for (name, options) in [
        ("header_bytes_max", defaults().header_bytes_max(65 << 10)),
        ("buffer_bytes_max", defaults().buffer_bytes_max(8191).header_bytes_max(1)),
        ("buffer_bytes_max", defaults().buffer_bytes_max(100)),
        ("rate_window", defaults().rate_window(Duration::from_millis(9))),
        ("response_timeout", defaults().response_timeout(Duration::ZERO)),
        ("body_bytes_per_second_min", defaults().body_bytes_per_second_min(usize::MAX)),
    ] {
        let service = move |_: &ringserve::Shard| {
            http(service_fn(|_| ready(Ok::<_, BoxError>(Response::new(String::new())))))
                .options(options.clone())
        };
        let error = On::default().server(no_time_limits()).start(service).err();
        let error = error.expect("it is refused").to_string();
        assert!(error.contains(&format!("{name} is ")), "{error}");
    }
}

#[test]
fn options_out_of_range_are_an_error_of_http_by_hand() {
    let server = On::default().server(no_time_limits()).start(|shard| {
        let http = Http::new(shard, &HttpOptions::default().buffer_bytes_max(100))?;
        Ok::<_, LimitError>(stream(async move |stream: Stream| {
            let answer = |_: Request<Incoming>| ready(Ok::<_, BoxError>(Response::new(String::new())));
            http.serve(stream, service_fn(answer)).await
        }))
    });
    let error = server.expect_err("it is refused").to_string();
    assert!(error.contains("buffer_bytes_max is 100"), "{error}");
}

#[test]
fn requests_without_one_valid_host_are_refused() {
    let rig = Rig::start(HttpOptions::default());
    let ask = |request: String| {
        let mut client = rig.client();
        client.write(request.as_bytes());
        let (head, _) = read_answer(&mut client);
        (head, client)
    };
    for (version, hosts) in [
        ("1.1", ""),
        ("1.1", "host: a\r\nHost: a\r\n"),
        ("1.1", "host: a/b\r\n"),
        ("1.1", "host: user@a\r\n"),
        ("1.0", "host: a\r\nhost: b\r\n"),
        ("1.0", "host: a b\r\n"),
    ] {
        let (head, mut client) = ask(format!("GET /gate HTTP/{version}\r\n{hosts}\r\n"));
        assert!(head.starts_with(&format!("HTTP/{version} 400 ")), "{hosts:?}: {head}");
        assert_eq!(client.end(), End::Fin, "{hosts:?}");
    }
    assert_eq!(rig.handlers.dropped.load(SeqCst), 0);
    for (version, hosts) in [
        ("1.0", ""),
        ("1.1", "host:\r\n"),
        ("1.1", "host: example.org:80\r\n"),
        ("1.1", "host: [::1]:80\r\n"),
    ] {
        let (head, _client) = ask(format!("GET / HTTP/{version}\r\n{hosts}\r\n"));
        assert!(head.starts_with(&format!("HTTP/{version} 200 ")), "{hosts:?}: {head}");
    }
    ringserve_tests::finish(rig.running);
}
