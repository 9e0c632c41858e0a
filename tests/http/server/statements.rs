//! Requirements of HTTP/1.1 on a server, request by request: `STANDARD.md` next to these tests has
//! the sections.

use super::*;

/// The status of the answer to these bytes; `None` if the connection ends without one.
fn status(rig: &Rig, request: &[u8]) -> Option<u16> {
    let mut client = rig.client();
    client.write(request);
    client.finish_writing();
    let (bytes, _end) = client.read_to_end();
    let text = String::from_utf8_lossy(&bytes);
    text.strip_prefix("HTTP/1.").and_then(|rest| rest.get(2..5)).and_then(|status| status.parse().ok())
}

#[test]
fn requests_are_read_as_the_standard_writes_them() {
    let rig = Rig::start(HttpOptions::default());
    for (what, request) in [
        ("as most are", "GET / HTTP/1.1\r\nhost: x\r\n\r\n"),
        ("empty lines before it", "\r\n\r\nGET / HTTP/1.1\r\nhost: x\r\n\r\n"),
        ("absolute form", "GET http://other.example:80/ HTTP/1.1\r\nhost: x\r\n\r\n"),
        ("a query", "GET /?a=/b?c HTTP/1.1\r\nhost: x\r\n\r\n"),
        ("names of fields in any case", "GET / HTTP/1.1\r\nHOST: x\r\n\r\n"),
        ("no space, spaces and tabs around a value", "GET / HTTP/1.1\r\nhost:x\r\na: \t b \t \r\n\r\n"),
        ("an empty value", "GET / HTTP/1.1\r\nhost: x\r\na:\r\n\r\n"),
        ("bytes beyond ASCII in a value", "GET / HTTP/1.1\r\nhost: x\r\na: \u{e4}\r\n\r\n"),
        ("HTTP/1.0 without a host", "GET / HTTP/1.0\r\n\r\n"),
        ("a body of no bytes", "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"),
        (
            "the same length twice",
            "POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\nx",
        ),
        (
            "chunks with extensions",
            "POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1;a=b\r\nx\r\n0\r\n\r\n",
        ),
        (
            "chunks with zeros before",
            "POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: Chunked\r\n\r\n0001\r\nx\r\n00\r\n\r\n",
        ),
        (
            "trailers",
            "POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\na: b\r\n\r\n",
        ),
    ] {
        assert_eq!(status(&rig, request.as_bytes()), Some(200), "{what}");
    }
    ringserve_tests::finish(rig.running);
}

#[test]
fn requests_that_break_a_rule_are_refused() {
    let rig = Rig::start(HttpOptions::default());
    for (what, request) in [
        ("space before the colon", "GET / HTTP/1.1\r\nhost : x\r\n\r\n"),
        ("a field that is folded", "GET / HTTP/1.1\r\nhost: x\r\na: b\r\n c\r\n\r\n"),
        ("a field without a colon", "GET / HTTP/1.1\r\nhost: x\r\nabc\r\n\r\n"),
        ("a name that is no token", "GET / HTTP/1.1\r\nhost: x\r\na(b: c\r\n\r\n"),
        ("NUL in a value", "GET / HTTP/1.1\r\nhost: x\r\na: b\0c\r\n\r\n"),
        ("CR in a value", "GET / HTTP/1.1\r\nhost: x\r\na: b\rc\r\n\r\n"),
        ("a space in the target", "GET /a b HTTP/1.1\r\nhost: x\r\n\r\n"),
        ("no target", "GET HTTP/1.1\r\nhost: x\r\n\r\n"),
        ("a method that is no token", "G(T / HTTP/1.1\r\nhost: x\r\n\r\n"),
        ("another protocol", "GET / HTTX/1.1\r\nhost: x\r\n\r\n"),
        ("another version", "GET / HTTP/2.1\r\nhost: x\r\n\r\n"),
        ("a length with a sign", "POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: +1\r\n\r\nx"),
        ("a length below 0", "POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\nx"),
        ("a length that is no number", "POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 1a\r\n\r\nx"),
        (
            "a length beyond 64 bits",
            "POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 18446744073709551616\r\n\r\nx",
        ),
        ("two lengths", "POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nx"),
        (
            "a coding that is not chunked last",
            "POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked, gzip\r\n\r\n",
        ),
        ("a coding without chunked", "POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n"),
    ] {
        assert_eq!(status(&rig, request.as_bytes()), Some(400), "{what}");
    }
    for (what, chunks) in [
        ("a size that is no number", "g\r\nx\r\n0\r\n\r\n"),
        ("a size beyond 64 bits", "10000000000000000\r\nx\r\n0\r\n\r\n"),
        ("no end behind a chunk", "1\r\nxy\r\n0\r\n\r\n"),
        ("an extension with a LF", "1;a\nb\r\nx\r\n0\r\n\r\n"),
    ] {
        let request =
            format!("POST /limited HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n{chunks}");
        assert_ne!(status(&rig, request.as_bytes()), Some(200), "{what}");
    }
    ringserve_tests::finish(rig.running);
}

#[test]
fn connection_stays_as_its_version_and_its_peer_say() {
    let rig = Rig::start(HttpOptions::default());
    for (request, stays) in [
        ("GET / HTTP/1.1\r\nhost: x\r\n\r\n", true),
        ("GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", false),
        ("GET / HTTP/1.1\r\nhost: x\r\nconnection: Foo, Close\r\n\r\n", false),
        ("GET / HTTP/1.0\r\n\r\n", false),
        ("GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n", true),
    ] {
        let mut client = rig.client();
        client.write(request.as_bytes());
        let (head, _) = read_answer(&mut client);
        let lower = head.to_ascii_lowercase();
        if stays {
            assert!(!lower.contains("connection: close"), "{request}: {head}");
            client.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n");
            assert!(read_answer(&mut client).0.contains(" 200 "), "{request}");
        } else {
            assert_eq!(client.end(), End::Fin, "{request}");
        }
        // The time of writing, as RFC 9110, 5.6.7, requires: "date: Sun, 06 Nov 1994 08:49:37 GMT".
        let date = lower.lines().find_map(|line| line.strip_prefix("date: ")).expect("a date");
        assert!(date.len() == 29 && date.ends_with(" gmt") && &date[3..5] == ", ", "{date}");
    }
    ringserve_tests::finish(rig.running);
}
