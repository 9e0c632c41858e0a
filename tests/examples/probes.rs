//! Default requests of health checks of balancers and supervisors are answered at each port that
//! reports the health of a server.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};

use ringserve_tests::examples::Example;
use ringserve_tests::{Client, SOON, eventually};

/// Requests as they go over the wire.
const PROBES: &[(&str, &str)] = &[
    ("haproxy, httpchk before 2.2", "OPTIONS / HTTP/1.0\r\n\r\n"),
    ("haproxy, httpchk", "OPTIONS / HTTP/1.0\r\ncontent-length: 0\r\n\r\n"),
    (
        "kubernetes",
        "GET /healthz HTTP/1.1\r\nHost: 10.42.0.7:9000\r\nUser-Agent: kube-probe/1.30\r\nAccept: */*\r\n\
         Connection: close\r\n\r\n",
    ),
    (
        "consul",
        "GET /healthz HTTP/1.1\r\nHost: chat.service.consul:9000\r\nUser-Agent: Consul Health Check\r\n\
         Accept: text/plain, text/*, */*\r\nAccept-Encoding: gzip\r\nConnection: close\r\n\r\n",
    ),
    (
        "curl",
        "GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:9000\r\nUser-Agent: curl/8.5.0\r\nAccept: */*\r\n\
         Connection: close\r\n\r\n",
    ),
    (
        "curl --head",
        "HEAD /healthz HTTP/1.1\r\nHost: localhost:9000\r\nUser-Agent: curl/8.5.0\r\nAccept: */*\r\n\
         Connection: close\r\n\r\n",
    ),
    (
        "curl of the root",
        "GET / HTTP/1.1\r\nHost: 127.0.0.1:9000\r\nUser-Agent: curl/8.5.0\r\nAccept: */*\r\nConnection: close\r\n\r\n",
    ),
    (
        "curl --http1.0 of the root",
        "GET / HTTP/1.0\r\nHost: localhost\r\nUser-Agent: curl/8.5.0\r\nAccept: */*\r\n\r\n",
    ),
];

fn status(addr: SocketAddr, request: &str) -> String {
    let mut client = Client::connect(addr);
    client.write(request.as_bytes());
    let (bytes, _end) = client.read_to_end();
    let text = String::from_utf8_lossy(&bytes);
    text.split(' ').nth(1).unwrap_or_default().to_owned()
}

#[test]
fn each_port_for_probes_answers_what_they_send() {
    let upstream = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let upstream = upstream.local_addr().unwrap().to_string();
    for (name, options) in [
        ("admin", &["--admin"][..]),
        ("chat", &["--http"]),
        ("balancer", &["--upstream", &upstream, "--status"]),
    ] {
        let place = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
        let (place_text, options) = (place.to_string(), options.to_vec());
        let options = [&options[..], &[&place_text]].concat();
        let example = Example::start(name, &options);
        for (probe, request) in PROBES {
            // An endpoint says that it is starting for a moment.
            eventually(&format!("{name} answers {probe}"), SOON, || status(place, request) == "200");
        }
        if name == "balancer" {
            // Without a name it is no page of a browser, and with a foreign one it may be.
            assert_eq!(status(place, "GET / HTTP/1.0\r\n\r\n"), "200");
            let foreign = "GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n";
            assert_eq!(status(place, foreign), "403");
            let order = format!("POST /drain/{upstream} HTTP/1.0\r\n\r\n");
            assert_eq!(status(place, &order), "403");
        }
        assert!(example.stop().success());
    }
}
