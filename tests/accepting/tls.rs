//! Listeners with TLS, on both drivers.

use std::convert::Infallible;
use std::fs::File;
use std::future::ready;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;

use ringserve::framing::Lines;
use ringserve::http::hyper::body::Incoming;
use ringserve::http::hyper::service::service_fn;
use ringserve::http::hyper::{Request, Response};
use ringserve::listen::{ProxyProtocol, endpoints, tcp};
use ringserve::server::Driver;
use ringserve::tls::rustls::pki_types::pem::PemObject;
use ringserve::tls::rustls::pki_types::{CertificateDer, ServerName};
use ringserve::tls::rustls::version::{TLS12, TLS13};
use ringserve::tls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use ringserve::tls::{Pem, Tls};
use ringserve::{CloseReason, Cx, Frame, Server, ServerHandle, Service, Stream, http, stream};
use ringserve_tests::watch::closed_for;
use ringserve_tests::{SOON, eventually, on_epoll};
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};

/// A certificate for localhost, its key, and clients that trust it.
pub(super) struct Believed {
    chain: String,
    key: String,
}

impl Believed {
    pub(super) fn new() -> Believed {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        Believed { chain: made.cert.pem(), key: made.signing_key.serialize_pem() }
    }

    pub(super) fn tls(&self) -> Tls {
        Tls::server().certificate(Pem::from(&*self.chain), Pem::from(&*self.key))
    }

    pub(super) fn client(&self) -> ClientConfig {
        self.client_of(&[&TLS12, &TLS13])
    }

    pub(super) fn client_of(
        &self,
        versions: &[&'static ringserve::tls::rustls::SupportedProtocolVersion],
    ) -> ClientConfig {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.chain.as_bytes()).unwrap()).unwrap();
        let provider = Arc::new(ringserve::tls::rustls::crypto::ring::default_provider());
        ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth()
    }
}

pub(super) type TlsStream = StreamOwned<ClientConnection, TcpStream>;

pub(super) fn connect(config: &Arc<ClientConfig>, addr: SocketAddr, header: &str) -> TlsStream {
    let mut socket = TcpStream::connect(addr).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    socket.write_all(header.as_bytes()).unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    StreamOwned::new(ClientConnection::new(config.clone(), name).unwrap(), socket)
}

pub(super) fn line(stream: &mut (impl Read + Write), sent: &str) -> String {
    stream.write_all(sent.as_bytes()).unwrap();
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

/// Replies with the facts of a connection, and is not aware of TLS otherwise.
pub(super) struct Who;

impl Service for Who {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        if *frame != *b"who" {
            cx.reply(frame);
            return Ok(());
        }
        let tls = cx.tls().map_or("plain".to_owned(), |tls| {
            format!("{} for {}", tls.version(), tls.server_name().unwrap_or("-"))
        });
        let via = cx.peer().via().map_or("directly", |_| "by a proxy");
        cx.reply(format!("{tls} {via}").as_str());
        Ok(())
    }
}

pub(super) fn drivers() -> Vec<Driver> {
    if on_epoll() { vec![Driver::Epoll] } else { vec![Driver::IoUring, Driver::Epoll] }
}

pub(super) fn any_port() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

pub(super) fn shut_down(server: ServerHandle) {
    server.shutdown();
    let stats = server.wait().unwrap();
    assert_eq!(stats.counters.opened, stats.counters.closed);
}

/// A file on a mount that does not answer: a thread that reads it waits. Here it is a pipe with
/// nothing in it.
#[test]
fn reload_that_hangs_holds_up_no_connection() {
    let believed = Believed::new();
    let file = std::env::temp_dir().join(format!("ringserve-hangs-{}.pem", std::process::id()));
    std::fs::write(&file, &believed.chain).unwrap();
    let tls = Tls::server().certificate(Pem::file(&file).unwrap(), Pem::from(&*believed.key));
    let server = Server::bind(any_port()).tls(tls).framing(Lines::default()).shards(2);
    let server = server.start(|_shard| Who).unwrap();
    let (addr, config) = (server.local_addrs()[0], Arc::new(believed.client_of(&[&TLS13])));
    let mut before = connect(&config, addr, "");
    assert_eq!(line(&mut before, "hello\n"), "hello");
    std::fs::remove_file(&file).unwrap();
    mknodat(CWD, &file, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let tls = server.tls().clone();
    let reload = std::thread::spawn(move || tls.reload());
    let mut pipe = None;
    // Without a reader it cannot be opened this way.
    eventually("the file is read", SOON, || {
        let nonblocking = OFlags::NONBLOCK.bits() as i32;
        pipe = File::options().write(true).custom_flags(nonblocking).open(&file).ok();
        pipe.is_some()
    });
    for _ in 0..4 {
        assert_eq!(line(&mut connect(&config, addr, ""), "new\n"), "new");
        assert_eq!(line(&mut before, "old\n"), "old");
    }
    // Nor a scrape, which includes the expiry of the certificate in use.
    let mut metrics = String::new();
    server.metrics().write_prometheus(&mut metrics);
    assert!(metrics.contains("ringserve_certificate_expiry_seconds{listener=\"0\",name=\"\"} "), "{metrics}");
    assert!(!reload.is_finished());
    let mut pipe = pipe.unwrap();
    pipe.write_all(b"no certificate").unwrap();
    drop(pipe);
    assert!(reload.join().unwrap().is_err());
    assert_eq!(line(&mut connect(&config, addr, ""), "the old one stays\n"), "the old one stays");
    std::fs::remove_file(&file).unwrap();
    drop(before);
    shut_down(server);
}

#[test]
fn one_service_serves_plain_tls_and_proxied_listeners() {
    let believed = Believed::new();
    for driver in drivers() {
        let plain = tcp(any_port());
        let secure = tcp(any_port()).tls(believed.tls());
        let proxied =
            tcp(any_port()).proxy_protocol(ProxyProtocol::from(["127.0.0.0/8"])).tls(believed.tls());
        let all = endpoints((plain, secure, proxied)).framing(Lines::default());
        let server = Server::new().service(all, |_shard| Who).driver(driver).shards(2).start().unwrap();
        let [plain, secure, proxied] = *server.local_addrs() else { panic!("three listeners") };
        assert_eq!(line(&mut TcpStream::connect(plain).unwrap(), "who\n"), "plain directly");
        for (version, name) in [(&TLS12, "TLSv1_2"), (&TLS13, "TLSv1_3")] {
            let config = Arc::new(believed.client_of(&[version]));
            let mut stream = connect(&config, secure, "");
            assert_eq!(line(&mut stream, "who\n"), format!("{name} for localhost directly"));
            let long = "x".repeat(300_000);
            assert!(line(&mut stream, &format!("{long}\n")) == long);
            let header = "PROXY TCP4 192.0.2.1 198.51.100.7 56324 443\r\n";
            let mut stream = connect(&config, proxied, header);
            assert_eq!(line(&mut stream, "who\n"), format!("{name} for localhost by a proxy"));
        }
        shut_down(server);
    }
}

#[test]
fn end_is_announced_to_both_sides() {
    let believed = Believed::new();
    for driver in drivers() {
        let server = Server::bind(any_port()).tls(believed.tls()).framing(Lines::default());
        let server = server.driver(driver).shards(1).start(|_shard| Who).unwrap();
        let config = Arc::new(believed.client());
        let mut stream = connect(&config, server.local_addrs()[0], "");
        assert_eq!(line(&mut stream, "hello\n"), "hello");
        stream.conn.send_close_notify();
        stream.flush().unwrap();
        // The answer is close_notify: to rustls a FIN without it is an error.
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).unwrap();
        assert_eq!(rest, b"");
        drop(stream);
        closed_for(&server, CloseReason::PeerClosed, 1);
        // A drain sends close_notify too.
        let mut stream = connect(&config, server.local_addrs()[0], "");
        assert_eq!(line(&mut stream, "hello\n"), "hello");
        server.shutdown();
        assert_eq!(stream.read_to_end(&mut rest).unwrap(), 0);
        shut_down(server);
    }
}

#[test]
fn plain_http_on_a_tls_port_hears_an_alert_and_no_reset() {
    let believed = Believed::new();
    for driver in drivers() {
        let server = Server::bind(any_port()).tls(believed.tls()).framing(Lines::default());
        let server = server.driver(driver).shards(1).start(|_shard| Who).unwrap();
        let mut socket = TcpStream::connect(server.local_addrs()[0]).unwrap();
        socket.set_read_timeout(Some(SOON)).unwrap();
        socket.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let mut heard = Vec::new();
        socket.read_to_end(&mut heard).unwrap();
        assert_eq!(heard, [21, 3, 3, 0, 2, 2, 50]);
        drop(socket);
        closed_for(&server, CloseReason::TlsHandshakeFailed(0), 1);
        shut_down(server);
    }
}

async fn echo(mut stream: Stream) -> io::Result<()> {
    assert!(stream.tls().is_some());
    while let Some(frame) = stream.read_frame().await? {
        stream.ready().await?;
        stream.queue(frame);
    }
    Ok(())
}

#[test]
fn stream_carries_megabytes_both_ways() {
    let believed = Believed::new();
    for driver in drivers() {
        let server = Server::bind(any_port()).tls(believed.tls()).driver(driver).shards(1);
        let server = server.start(|_shard| stream(echo)).unwrap();
        let mut client = connect(&Arc::new(believed.client()), server.local_addrs()[0], "");
        let sent: Vec<u8> = (0..3_000_000u32).map(|n| (n / 251) as u8).collect();
        let mut heard = vec![0; 100_000];
        for piece in sent.chunks(heard.len()) {
            client.write_all(piece).unwrap();
            client.read_exact(&mut heard[..piece.len()]).unwrap();
            assert!(heard[..piece.len()] == *piece);
        }
        drop(client);
        shut_down(server);
    }
}

#[test]
fn http_service_offers_its_protocols_itself() {
    let believed = Believed::new();
    let answer = |request: Request<Incoming>| {
        ready(Ok::<_, Infallible>(Response::new(format!("{:?}", request.version()))))
    };
    for driver in drivers() {
        let server = Server::bind(any_port()).tls(believed.tls()).driver(driver).shards(1);
        let server = server.start(move |_shard| http(service_fn(answer))).unwrap();
        for (offered, chosen) in [(&["h2", "http/1.1"][..], "h2"), (&["http/1.1"], "http/1.1")] {
            let mut config = believed.client();
            config.alpn_protocols = offered.iter().map(|name| name.as_bytes().to_vec()).collect();
            let mut stream = connect(&Arc::new(config), server.local_addrs()[0], "");
            let mut heard = [0; 64];
            if chosen == "h2" {
                stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").unwrap();
                stream.read_exact(&mut heard[..9]).unwrap();
                assert_eq!(heard[3], 4, "SETTINGS");
            } else {
                stream.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
                let mut heard = String::new();
                stream.read_to_string(&mut heard).unwrap();
                assert!(heard.starts_with("HTTP/1.1 200 OK\r\n") && heard.ends_with("HTTP/1.1"), "{heard}");
            }
            assert_eq!(stream.conn.alpn_protocol(), Some(chosen.as_bytes()));
        }
        shut_down(server);
    }
}

#[test]
fn certificate_is_replaced_while_connections_stay() {
    let (old, new) = (Believed::new(), Believed::new());
    let server = Server::bind(any_port()).tls(old.tls()).framing(Lines::default()).shards(2);
    let server = server.start(|_shard| Who).unwrap();
    let addr = server.local_addrs()[0];
    let mut before = connect(&Arc::new(old.client()), addr, "");
    assert_eq!(line(&mut before, "hello\n"), "hello");
    let crossed = Tls::server().certificate(Pem::from(&*new.chain), Pem::from(&*old.key));
    let error = server.tls().replace(crossed).unwrap_err();
    assert_eq!(error.to_string(), "is not the key of the certificate");
    assert_eq!(line(&mut connect(&Arc::new(old.client()), addr, ""), "hello\n"), "hello");
    server.tls().replace(new.tls()).unwrap();
    assert_eq!(line(&mut before, "still here\n"), "still here");
    let config = Arc::new(new.client());
    for _ in 0..8 {
        assert_eq!(line(&mut connect(&config, addr, ""), "hello\n"), "hello");
    }
    let refused = connect(&Arc::new(old.client()), addr, "").write_all(b"x").unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidData);
    drop(before);
    shut_down(server);
}

#[test]
fn server_does_not_start_with_what_cannot_be_used() {
    let start =
        |tls: Tls| Server::bind(any_port()).tls(tls).start(|_shard| stream(echo)).unwrap_err().to_string();
    assert_eq!(start(Tls::server()), "TLS: there is no certificate: give one to `Tls::certificate`");
    let several = Server::new()
        .service(tcp(any_port()).name("plain"), |_shard| stream(echo))
        .service([tcp(any_port()).tls(Tls::server())], |_shard| stream(echo));
    assert!(several.start().unwrap_err().to_string().ends_with("give one to `Tls::certificate`"));
}
