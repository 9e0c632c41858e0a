//! Listeners to which proxies connect, on both drivers.

use std::convert::Infallible;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::thread;

use ringserve::framing::Lines;
use ringserve::listen::{ProxyProtocol, endpoints, tcp, unix};
use ringserve::net::SocketOptions;
use ringserve::server::Driver;
use ringserve::{CloseReason, Cx, Frame, Peer, Server, ServerHandle, Service, Stream, stream};
use ringserve_tests::watch::closed_for;
use ringserve_tests::{SOON, on_epoll};

const LINE: &str = "PROXY TCP4 192.0.2.1 198.51.100.7 56324 443\r\n";

/// Replies with the peer that it sees, and is not aware of proxies.
struct Who;

fn text(peer: &Peer) -> String {
    let via = peer.via().map_or("-".to_owned(), |via| via.ip().to_string());
    format!("{} via {via}", peer.addr().map_or("-".to_owned(), |addr| addr.to_string()))
}

impl Service for Who {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, _line: Frame) -> Result<(), Infallible> {
        cx.reply(text(&cx.peer()).as_str());
        Ok(())
    }
}

fn drivers() -> Vec<Driver> {
    if on_epoll() { vec![Driver::Epoll] } else { vec![Driver::IoUring, Driver::Epoll] }
}

fn any_port() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

fn connect(addr: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream
}

/// Sends bytes and takes a line.
fn ask(stream: impl Read + Write, sent: impl AsRef<[u8]>) -> String {
    let (mut stream, mut line) = (BufReader::new(stream), String::new());
    stream.get_mut().write_all(sent.as_ref()).unwrap();
    stream.read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

fn end(mut stream: TcpStream) -> io::Result<Vec<u8>> {
    let mut heard = Vec::new();
    stream.read_to_end(&mut heard).map(|_| heard)
}

fn behind(driver: Driver, protocol: ProxyProtocol) -> ServerHandle {
    let server = Server::bind(any_port()).shards(1).pin(false).driver(driver);
    server.framing(Lines::default()).proxy_protocol(protocol).start(|_| Who).unwrap()
}

#[test]
fn one_service_serves_clients_proxies_and_a_unix_socket() {
    for driver in drivers() {
        let path = std::env::temp_dir().join(format!("ringserve-proxied-{}-{driver}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let trusted = ProxyProtocol::from(["127.0.0.0/8"]);
        let all = (
            tcp(any_port()),
            tcp(any_port()).proxy_protocol(trusted),
            unix(&path).proxy_protocol(ProxyProtocol::default()),
        );
        // The addresses of proxies are needed all the same: they decide who is trusted.
        let server = Server::new().shards(2).pin(false).driver(driver);
        let sockets = SocketOptions::default().peer_address(false);
        let service = endpoints(all).framing(Lines::default()).sockets(sockets);
        let running = server.service(service, |_| Who).start().unwrap();
        let [direct, proxied] = running.local_addrs()[..] else { panic!("two of TCP") };
        for _ in 0..20 {
            let stream = connect(direct);
            let own = stream.local_addr().unwrap();
            assert_eq!(ask(&stream, "\n"), format!("{own} via -"));
            assert_eq!(ask(connect(proxied), format!("{LINE}\n")), "192.0.2.1:56324 via 127.0.0.1");
            let stream = UnixStream::connect(&path).unwrap();
            assert_eq!(ask(&stream, format!("{LINE}\n")), "192.0.2.1:56324 via -");
        }
        running.shutdown();
        assert_eq!(running.wait().unwrap().connections, 0);
    }
}

#[test]
fn header_comes_in_segments_of_one_byte() {
    for driver in drivers() {
        let running = behind(driver, ProxyProtocol::from(["127.0.0.1"]));
        let mut stream = connect(running.local_addrs()[0]);
        stream.set_nodelay(true).unwrap();
        for byte in LINE.as_bytes() {
            stream.write_all(&[*byte]).unwrap();
            thread::yield_now();
        }
        assert_eq!(ask(&stream, "\n"), "192.0.2.1:56324 via 127.0.0.1");
        running.shutdown();
        running.wait().unwrap();
    }
}

#[test]
fn stranger_to_a_listener_of_proxies_is_turned_away() {
    for driver in drivers() {
        let running = behind(driver, ProxyProtocol::from(["127.0.0.0/8"]));
        let addr = running.local_addrs()[0];
        let mut loud = connect(addr);
        loud.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        assert_eq!(end(loud).unwrap(), b"");
        let silent = connect(addr);
        silent.shutdown(Shutdown::Write).unwrap();
        assert_eq!(end(silent).unwrap(), b"");
        let error = ringserve::listen::HeaderError::NotProxy;
        closed_for(&running, CloseReason::ProxyBadHeader(error), 1);
        closed_for(&running, CloseReason::ProxyNoHeader, 1);
        running.shutdown();
        running.wait().unwrap();

        let running = behind(driver, ProxyProtocol::from(["10.0.0.0/8"]));
        let stranger = connect(running.local_addrs()[0]);
        assert_eq!(end(stranger).unwrap_err().kind(), ErrorKind::ConnectionReset);
        closed_for(&running, CloseReason::ProxyUntrusted, 1);
        running.shutdown();
        running.wait().unwrap();
    }
}

#[test]
fn streams_are_behind_proxies_too() {
    for driver in drivers() {
        let server = Server::bind(any_port()).shards(1).pin(false).driver(driver);
        let running = server.proxy_protocol(ProxyProtocol::from(["127.0.0.1"])).start(|_| {
            stream(async |mut client: Stream| {
                while client.read_frame().await?.is_some() {
                    client.queue(format!("{}\n", text(&client.peer())));
                }
                io::Result::Ok(())
            })
        });
        let running = running.unwrap();
        let stream = connect(running.local_addrs()[0]);
        assert_eq!(ask(stream, format!("{LINE}hello")), "192.0.2.1:56324 via 127.0.0.1");
        running.shutdown();
        running.wait().unwrap();
    }
}
