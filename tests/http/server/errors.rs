//! Requests that are refused, answered with an error, and counted.

use super::*;

#[test]
fn oversize_is_answered_and_counted() {
    let options = HttpOptions::default().header_bytes_max(4096).headers_max(10);
    let rig = Rig::start(options);
    let mut client = rig.client();
    // A head that fits is accepted.
    client.write(format!("GET / HTTP/1.1\r\nhost: x\r\nbig: {}\r\n\r\n", "b".repeat(4000)).as_bytes());
    assert_eq!(read_answer(&mut client).1, b"HTTP/1.1");
    let big = format!("GET / HTTP/1.1\r\nhost: x\r\nbig: {}\r\n\r\n", "b".repeat(5000));
    let many = format!("GET / HTTP/1.1\r\n{}\r\n", "many: x\r\n".repeat(11));
    for (n, request) in [big, many].iter().enumerate() {
        let mut client = rig.client();
        client.write(request.as_bytes());
        let (head, _) = read_answer(&mut client);
        assert!(head.starts_with("HTTP/1.1 431 "), "{head}");
        assert_eq!(client.end(), End::Fin);
        watch::closed_for(&rig.running, BAD, n as u64 + 1);
    }
    rig.with_http2(async |mut sender| {
        let mut request = get("/");
        request.headers_mut().insert("big", "b".repeat(5000).parse().unwrap());
        assert_eq!(sender.send_request(request).await.unwrap().status(), 431);
        assert_eq!(ask(&mut sender, "/").await, "HTTP/2.0");
    });
    drop(client);
    ringserve_tests::finish(rig.running);
}

#[test]
fn nonsense_and_service_errors_are_answered_and_counted() {
    let rig = Rig::start(HttpOptions::default());
    let mut client = rig.client();
    client.write(b"nonsense\r\n\r\n");
    let (head, _) = read_answer(&mut client);
    assert!(head.starts_with("HTTP/1.1 400 "), "{head}");
    assert_eq!(client.end(), End::Fin);
    watch::closed_for(&rig.running, BAD, 1);
    let mut client = rig.client();
    client.write(b"GET /fail HTTP/1.1\r\nhost: x\r\n\r\n");
    assert_eq!(client.end(), End::Fin);
    watch::closed_for(&rig.running, CloseReason::HandlerError, 1);
    let mut client = rig.client();
    client.write(b"POST /limited HTTP/1.1\r\nhost: x\r\ncontent-length: 11\r\n\r\nhello hello");
    assert_eq!(client.end_after_all(), End::Fin);
    watch::closed_for(&rig.running, CloseReason::HandlerError, 2);
    // With HTTP/2 only that stream ends.
    rig.with_http2(async |mut sender| {
        assert!(sender.send_request(get("/fail")).await.is_err());
        assert_eq!(ask(&mut sender, "/").await, "HTTP/2.0");
    });
    // DATA that belongs to no stream.
    let mut client = rig.client();
    client.write(&[frames::PREFACE, b"\0\0\0\x04\0\0\0\0\0", b"\0\0\x01\0\0\0\0\0\0x"].concat());
    client.end_after_all();
    watch::closed_for(&rig.running, BAD, 2);
    drop(client);
    ringserve_tests::finish(rig.running);
}

#[test]
fn a_peer_that_vanishes_is_no_failure() {
    let rig = Rig::start(HttpOptions::default());
    // In the middle of a head, of a body, and while it waits; with a reset, and with FIN where that
    // does not only mean that no request follows.
    let requests: [(&[u8], bool); 4] = [
        (b"GET / HT", true),
        (b"POST /limited HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nhell", true),
        (b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n", false),
        (frames::PREFACE, true),
    ];
    for (request, ends_by_fin) in requests {
        if ends_by_fin {
            let mut client = rig.client();
            client.write(request);
            watch::holds(&rig.running, 1);
            drop(client);
            watch::holds(&rig.running, 0);
        }
        let mut client = rig.client();
        client.write(request);
        watch::holds(&rig.running, 1);
        client.reset();
        watch::holds(&rig.running, 0);
    }
    assert_eq!(rig.handlers.inside.load(SeqCst), 0, "handlers of a peer that is gone are dropped");
    let report = ringserve_tests::finish(rig.running);
    let ends = &report.counters;
    assert_eq!(ends.closed_for(CloseReason::HandlerError), 0, "{ends:?}");
    // A client that leaves with FIN also resets, if it did not read the last bytes.
    assert!(ends.closed_for(CloseReason::PeerReset) >= 3, "{ends:?}");
}
