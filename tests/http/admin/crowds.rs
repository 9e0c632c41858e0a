//! Crowds of clients at the endpoint, which must not keep a probe out.

use std::io::Read;
use std::net::{SocketAddr, TcpStream};

use ringserve::admin::Admin;
use ringserve::net::Address;
use ringserve_tests::http::read_answer;
use ringserve_tests::{Client, SOON, eventually};

use super::{Answer, LOCAL, ask, endpoint, exchange, get, lab, post};

/// Connections for which the endpoint has room, and more than it accepts at all.
const ROOM: usize = 32;
const CROWD: usize = 200;

const LISTENERS: usize = 12;

fn listens(addr: SocketAddr) -> Client {
    let mut client = Client::connect(addr);
    client.write(b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n");
    client
}

/// True once the endpoint ended the connection.
fn is_ended(stream: &mut TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    match stream.read(&mut [0; 1024]) {
        Ok(read) => read == 0,
        Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
    }
}

#[test]
fn silent_connections_make_room_for_probes() {
    let lab = lab(LOCAL);
    let addr = endpoint(&lab.running);
    // The first one has asked, and sends nothing more.
    let mut asked = Client::connect(addr);
    asked.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n");
    assert!(read_answer(&mut asked).0.starts_with("HTTP/1.1 200"));
    let mut silent: Vec<TcpStream> = (0..CROWD).map(|_| TcpStream::connect(addr).unwrap()).collect();
    // Half a request does not count.
    std::io::Write::write_all(&mut silent[CROWD - 1], b"GET /healthz HT").unwrap();
    for _ in 0..2 * ROOM {
        assert_eq!((get(addr, "/healthz").status, get(addr, "/readyz").status), (200, 200));
        silent.push(TcpStream::connect(addr).unwrap());
    }
    eventually("the oldest are gone", SOON, || silent[..CROWD].iter_mut().all(is_ended));
    // One that was answered ranks after those that send nothing.
    asked.write(b"GET /readyz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    assert_eq!(Answer::of(&asked.read_to_end().0).status, 200);
    assert!(silent.iter_mut().map(is_ended).filter(|ended| !ended).count() <= ROOM);
    drop(silent);
    lab.finish();
}

#[test]
fn listeners_are_bounded_and_keep_no_probe_out() {
    let lab = lab(LOCAL);
    let addr = endpoint(&lab.running);
    let mut listeners: Vec<Client> = (0..LISTENERS)
        .map(|_| {
            let mut client = listens(addr);
            // It is accepted once it receives something.
            client.read(12);
            client
        })
        .collect();
    let refused = exchange(addr, "GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n");
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("5")));
    assert!(refused.text().contains("12 requests of this address"), "{}", refused.text());
    assert_eq!(get(addr, "/report.json").status, 503);
    // Those that are refused, and silent ones, do not end a listener.
    let silent: Vec<TcpStream> = (0..CROWD).map(|_| TcpStream::connect(addr).unwrap()).collect();
    for _ in 0..ROOM {
        assert_eq!((get(addr, "/healthz").status, get(addr, "/readyz").status), (200, 200));
    }
    listeners.iter_mut().for_each(|client| _ = client.read(64));
    drop((listeners, silent));
    eventually("the listeners are gone", SOON, || get(addr, "/report.json").status == 200);
    lab.finish();
}

#[test]
fn probes_have_a_listener_of_their_own() {
    let lab = lab(Admin::new(LOCAL).token("correct-horse-battery").probes("0.0.0.0:0"));
    let probes = lab.running.probes_address().and_then(Address::as_ip).expect("an IP address");
    let probes = SocketAddr::from(([127, 0, 0, 1], probes.port()));
    let admin = endpoint(&lab.running);
    assert_ne!(probes.port(), admin.port());
    for path in ["/healthz", "/readyz"] {
        assert_eq!((get(probes, path).status, get(admin, path).status), (200, 200), "{path}");
        // With any host name that a balancer uses.
        let named = format!("GET {path} HTTP/1.1\r\nhost: pod-7.example\r\nconnection: close\r\n\r\n");
        assert_eq!((exchange(probes, &named).status, exchange(admin, &named).status), (200, 200), "{path}");
        assert_eq!(post(probes, path, "").status, 405);
    }
    let token = ["authorization: Bearer correct-horse-battery", "x-ringserve: 1"];
    for (method, path) in [
        ("GET", "/"),
        ("GET", "/report.json"),
        ("GET", "/metrics"),
        ("GET", "/events"),
        ("POST", "/drain"),
        ("GET", "/nothing"),
    ] {
        assert_eq!(ask(probes, method, path, &token, "").status, 404, "{path}");
    }
    assert!(!lab.running.control().is_draining());
    // A crowd at one of them does not affect the other.
    let crowd: Vec<TcpStream> = (0..CROWD).map(|_| TcpStream::connect(admin).unwrap()).collect();
    assert_eq!(get(probes, "/healthz").status, 200);
    let other: Vec<TcpStream> = (0..CROWD).map(|_| TcpStream::connect(probes).unwrap()).collect();
    assert_eq!((get(probes, "/healthz").status, get(admin, "/healthz").status), (200, 200));
    drop((crowd, other));
    lab.finish();
}
