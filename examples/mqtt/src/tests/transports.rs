//! The ways to the broker, by real sockets: whatever lies between, its clients meet.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::{env, fs, process};

use ringserve::tls::rustls::crypto::ring::default_provider;
use ringserve::tls::rustls::pki_types::{CertificateDer, ServerName, pem::PemObject};
use ringserve::tls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use tungstenite::{ClientRequestBuilder, Message, WebSocket, client};

use super::*;

const SOON: Duration = Duration::from_secs(20);

/// A client's end of one of the ways.
trait Way {
    fn says(&mut self, packet: Vec<u8>);

    /// The next packet is this.
    fn hears(&mut self, packet: &[u8]);
}

struct Bytes<S>(S);

impl<S: Read + Write> Way for Bytes<S> {
    fn says(&mut self, packet: Vec<u8>) {
        self.0.write_all(&packet).unwrap();
    }

    fn hears(&mut self, packet: &[u8]) {
        let mut heard = vec![0; packet.len()];
        self.0.read_exact(&mut heard).unwrap();
        assert_eq!(heard, packet);
    }
}

impl<S: Read + Write> Way for WebSocket<S> {
    fn says(&mut self, packet: Vec<u8>) {
        self.send(Message::binary(packet)).unwrap();
    }

    fn hears(&mut self, packet: &[u8]) {
        assert_eq!(self.read().unwrap().into_data(), packet);
    }
}

fn websocket<S: Read + Write + 'static>(stream: S) -> Box<dyn Way> {
    let request = ClientRequestBuilder::new("ws://localhost/".parse().unwrap()).with_sub_protocol("mqtt");
    Box::new(client(request, stream).unwrap().0)
}

fn plain(addr: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream
}

#[test]
fn clients_meet_by_tcp_websocket_and_both_over_tls() {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let of = |end: &str| env::temp_dir().join(format!("ringserve-mqtt-{}.{end}", process::id()));
    let (cert, key) = (of("cert.pem"), of("key.pem"));
    fs::write(&cert, made.cert.pem()).unwrap();
    fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let mut options = vec!["mqtt", "--cert", cert.to_str().unwrap(), "--key", key.to_str().unwrap()];
    options.extend(["--listen", "--ws", "--tls", "--wss"].into_iter().flat_map(|way| [way, "127.0.0.1:0"]));
    let server = Args::parse_from(options).server().unwrap().shards(3).start().unwrap();

    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(made.cert.pem().as_bytes()).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let config = Arc::new(config);
    let over_tls = |addr| {
        let name = ServerName::try_from("localhost").unwrap();
        StreamOwned::new(ClientConnection::new(config.clone(), name).unwrap(), plain(addr))
    };
    let [tcp, ws, tls, wss] = *server.local_addrs() else { panic!("{:?}", server.local_addrs()) };
    let mut ways: [Box<dyn Way>; 4] = [
        Box::new(Bytes(plain(tcp))),
        websocket(plain(ws)),
        Box::new(Bytes(over_tls(tls))),
        websocket(over_tls(wss)),
    ];
    for (n, way) in ways.iter_mut().enumerate() {
        way.says(Hello::new(4, &format!("client-{n}")).bytes());
        way.hears(&[0x20, 2, 0, 0]);
        way.says(packet(0x82, &[&[0, 7][..], &text("#"), &[0]].concat()));
        way.hears(&[0x90, 3, 0, 7, 0]);
    }
    for n in 0..ways.len() {
        let message = packet(0x30, &[text("a"), format!("from {n}").into_bytes()].concat());
        ways[n].says(message.clone());
        ways.iter_mut().for_each(|way| way.hears(&message));
    }
    server.shutdown();
    server.wait().unwrap();
    for file in [cert, key] {
        fs::remove_file(file).unwrap();
    }
}

#[test]
fn tls_without_a_certificate_is_refused() {
    for (options, expected) in [
        (&["mqtt", "--tls", "127.0.0.1:0"][..], "--cert <FILE>"),
        (&["mqtt", "--wss", "127.0.0.1:0", "--cert", "cert.pem"], "--key <FILE>"),
    ] {
        let error = Args::try_parse_from(options).err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let missing = ["mqtt", "--tls", "127.0.0.1:0", "--cert", "none.pem", "--key", "none.pem"];
    let error = Args::parse_from(missing).server().err().unwrap().to_string();
    assert!(error.contains("none.pem"), "{error}");
}
