//! Crowds that begin handshakes and do not end them, on both drivers: open connections continue,
//! and memory is bounded.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

use ringserve::framing::Lines;
use ringserve::limits::ServerLimits;
use ringserve::tls::rustls::ClientConnection;
use ringserve::tls::rustls::pki_types::ServerName;
use ringserve::{CloseReason, Server, ServerHandle};
use ringserve_tests::{Random, SOON, alone, eventually, status_kib};

use super::tls::{Believed, Who, any_port, connect, drivers, line, shut_down};

/// Peers of a crowd: fewer than may wait to be accepted, and several times as many as may be in a
/// handshake.
const CROWD: usize = 2000;
const HANDSHAKES_MAX: usize = 500;

/// Memory that a handshake may take.
const HANDSHAKE_KIB: u64 = 20;

/// The server's result with a crowd.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// They wait, until their peers close.
    Waits,
    /// Each is refused for its bytes.
    Refused,
}

/// A ClientHello.
fn hello(believed: &Believed) -> Vec<u8> {
    let name = ServerName::try_from("localhost").unwrap();
    let mut client = ClientConnection::new(Arc::new(believed.client()), name).unwrap();
    let mut hello = Vec::new();
    client.write_tls(&mut hello).unwrap();
    hello
}

/// Makes a crowd send the bytes of `says`, in `parts` parts, while another connection talks.
fn flood(parts: usize, fate: Fate, says: impl Fn(&Believed, usize) -> Vec<u8>) {
    let believed = Believed::new();
    for driver in drivers() {
        let limits = ServerLimits::default().handshakes_max(HANDSHAKES_MAX);
        let server = Server::bind(any_port()).tls(believed.tls()).framing(Lines::default());
        let server = server.driver(driver).shards(1).server_limits(limits).start(|_shard| Who).unwrap();
        let addr = server.local_addrs()[0];
        let config = Arc::new(believed.client());
        let mut neighbour = connect(&config, addr, "");
        assert_eq!(line(&mut neighbour, "before\n"), "before");
        let said: Vec<_> = (0..CROWD).map(|number| says(&believed, number)).collect();
        let before = status_kib("RssAnon");
        let crowd = gather(addr, parts, &said, || {
            assert_eq!(line(&mut neighbour, "meanwhile\n"), "meanwhile");
            in_bounds(&server, before);
        });
        match fate {
            Fate::Waits => eventually("as many as may are in a handshake", SOON, || {
                in_bounds(&server, before);
                assert_eq!(line(&mut neighbour, "while they wait\n"), "while they wait");
                handshakes(&server) == HANDSHAKES_MAX as u64
            }),
            Fate::Refused => eventually("all are refused", SOON, || {
                in_bounds(&server, before);
                assert_eq!(line(&mut neighbour, "while they end\n"), "while they end");
                let failed = server.stats().counters.closed_for(CloseReason::TlsHandshakeFailed(0));
                failed == CROWD as u64
            }),
        }
        drop(crowd);
        // A peer after the crowd is served.
        let mut next = connect(&config, addr, "");
        assert_eq!(line(&mut next, "who\n"), "TLSv1_3 for localhost directly");
        assert_eq!(line(&mut neighbour, "after\n"), "after");
        drop((next, neighbour));
        shut_down(server);
    }
}

fn gather(addr: SocketAddr, parts: usize, said: &[Vec<u8>], mut meanwhile: impl FnMut()) -> Vec<TcpStream> {
    let connect = |_: &Vec<u8>| {
        let socket = TcpStream::connect(addr).unwrap();
        socket.set_write_timeout(Some(SOON)).unwrap();
        socket
    };
    let mut crowd: Vec<TcpStream> = said.iter().map(connect).collect();
    for part in 0..parts {
        for (number, (socket, said)) in crowd.iter_mut().zip(said).enumerate() {
            let size = said.len().div_ceil(parts);
            let piece = &said[(part * size).min(said.len())..((part + 1) * size).min(said.len())];
            // A connection that was already refused may fail here.
            let _ = socket.write_all(piece);
            if number % 200 == 0 {
                meanwhile();
            }
        }
    }
    crowd
}

fn handshakes(server: &ServerHandle) -> u64 {
    let counters = server.stats().counters;
    counters.handshakes_started
        - counters.handshakes_done
        - counters.handshakes_failed
        - counters.handshakes_timed_out
}

#[track_caller]
fn in_bounds(server: &ServerHandle, before: u64) {
    let (under_way, grown) = (handshakes(server), status_kib("RssAnon").saturating_sub(before));
    assert!(under_way <= HANDSHAKES_MAX as u64, "{under_way} handshakes: {:?}", server.stats().counters);
    assert!(grown <= HANDSHAKES_MAX as u64 * HANDSHAKE_KIB, "{grown} KiB");
}

#[test]
fn crowd_of_client_hellos_holds_nothing_up() {
    if alone(crowd_of_client_hellos_holds_nothing_up) {
        flood(1, Fate::Waits, |believed, _| hello(believed));
    }
}

#[test]
fn crowd_with_half_a_client_hello_holds_nothing_up() {
    if alone(crowd_with_half_a_client_hello_holds_nothing_up) {
        flood(1, Fate::Waits, |believed, _| {
            let mut hello = hello(believed);
            hello.truncate(hello.len() / 2);
            hello
        });
    }
}

#[test]
fn crowd_that_says_a_byte_at_a_time_holds_nothing_up() {
    if alone(crowd_that_says_a_byte_at_a_time_holds_nothing_up) {
        flood(20, Fate::Waits, |believed, _| hello(believed)[..20].to_vec());
    }
}

#[test]
fn crowd_of_random_bytes_is_refused() {
    if alone(crowd_of_random_bytes_is_refused) {
        flood(1, Fate::Refused, |_, number| {
            let mut random = Random::new(number as u64);
            let bytes = (0..2000).map(|_| random.draw() as u8);
            // A type that no record has: with others some would wait for the rest of a record.
            [0xff].into_iter().chain(bytes).collect()
        });
    }
}

#[test]
fn crowd_of_plain_http_is_refused() {
    if alone(crowd_of_plain_http_is_refused) {
        flood(1, Fate::Refused, |_, _| b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n".to_vec());
    }
}
