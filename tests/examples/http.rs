//! The example `http`, started as its head says, and driven by curl, or by a socket where there is
//! none. `tests/clients/http` does more, with tools that are to be installed.

use std::process::Command;

use ringserve_tests::Client;
use ringserve_tests::client::End;
use ringserve_tests::examples::Example;

/// The output of curl, or `None` if it is not installed.
fn curl(args: &[&str]) -> Option<String> {
    let done =
        Command::new("curl").args(["--silent", "--show-error", "--max-time", "20"]).args(args).output();
    let done = done.ok()?;
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Some(String::from_utf8(done.stdout).unwrap())
}

#[test]
fn it_answers_curl() {
    let example = Example::start("http", &["--shards", "1"]);
    let url = |path: &str| format!("http://{}{path}", example.addr);
    // One request for each run: curl before 8.0 fails with prior knowledge on a connection that it
    // uses again.
    for version in ["--http1.1", "--http2-prior-knowledge"] {
        let Some(text) = curl(&[version, &url("/")]) else { return };
        assert_eq!(text, "hello\n");
        let ask = |path: &str, args: &[&str]| curl(&[&[version, &url(path)], args].concat()).unwrap();
        assert_eq!(ask("/json", &[]), "{\"message\":\"hello\"}\n");
        assert_eq!(ask("/echo", &["-d", "hello"]), "hello");
        assert_eq!(ask("/upload", &["-d", "hello"]), "5 bytes\n");
        assert_eq!(ask("/length", &["-d", "hello", "-H", "transfer-encoding: chunked"]), "5 bytes\n");
        assert_eq!(ask("/bytes/100000", &[]), ".".repeat(100_000));
        assert_eq!(ask("/none", &["-w", "%{http_code}"]), "404 Not Found\n404");
        let head = ask("/bytes/100000", &["--head"]);
        assert!(head.contains(" 200") && head.contains("content-length: 100000\r\n"), "{head}");
    }
    assert!(example.stop().success());
}

#[test]
fn it_speaks_both_versions_on_a_socket_and_ends() {
    let example = Example::start("http", &["--shards", "1"]);
    let mut client = Client::connect(example.addr);
    client.write(b"POST /echo HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello");
    let (bytes, end) = client.read_to_end();
    let text = String::from_utf8(bytes).unwrap();
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && text.contains("hello"), "{text}");
    assert_eq!(end, End::Fin);
    let mut client = Client::connect(example.addr);
    client.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0");
    // The first frame of a server is SETTINGS, on stream 0.
    let head = client.read(9);
    assert_eq!((head[3], &head[5..]), (4, &[0; 4][..]));
    // Else the server's end would wait for its answer to a PING.
    drop(client);
    // One that keeps its connection does not keep the server.
    let _idle = Client::connect(example.addr);
    assert!(example.stop().success());
}
