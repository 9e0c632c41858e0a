//! WebSocket above TLS: `wss`.

use std::convert::Infallible;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

use ringserve::framing::Lines;
use ringserve::listen::{endpoints, tcp};
use ringserve::tls::rustls::pki_types::pem::PemObject;
use ringserve::tls::rustls::pki_types::{CertificateDer, ServerName};
use ringserve::tls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use ringserve::tls::{Pem, Tls};
use ringserve::websocket::{Message, Messages, WebSocket, WsCx};
use ringserve::{CloseReason, Cx, Frame, Server, Service, ws};
use ringserve_tests::watch::closed_for;
use ringserve_websocket::frame::{Opcode, put_masked};

use crate::client::{above, any_port, drivers, server, shut_down, tcp_to};
use crate::floods::{are_answered, inflates};

type Theirs = tungstenite::Message;

/// TLS of a server, and a client that trusts it.
fn tls() -> (Tls, Arc<ClientConfig>) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(made.cert.pem().as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(ringserve::tls::rustls::crypto::ring::default_provider());
    let client = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let tls =
        Tls::server().certificate(Pem::from(made.cert.pem()), Pem::from(made.signing_key.serialize_pem()));
    (tls, Arc::new(client))
}

fn connect(config: &Arc<ClientConfig>, addr: SocketAddr) -> StreamOwned<ClientConnection, TcpStream> {
    let name = ServerName::try_from("localhost").unwrap();
    StreamOwned::new(ClientConnection::new(config.clone(), name).unwrap(), tcp_to(addr))
}

/// Reports the facts of both layers.
struct Who;

impl Service for Who {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        if *frame == *b"who" {
            let name = cx.tls().map(|tls| tls.server_name().unwrap_or("-").to_owned());
            cx.reply(
                format!("{:?} {:?}", name, cx.websocket().map(|info| info.target().to_owned())).as_str(),
            );
        } else {
            cx.reply(frame);
        }
        Ok(())
    }
}

impl WebSocket for Who {
    type Session = ();
    type Error = Infallible;

    async fn message(&self, cx: &WsCx<'_, ()>, message: Message) -> Result<(), Infallible> {
        cx.send(message);
        Ok(())
    }
}

#[test]
fn a_service_is_reached_by_wss_and_knows_of_both_layers() {
    for driver in drivers() {
        let (tls, config) = tls();
        // In either order.
        let both = endpoints((
            tcp(any_port()).tls(tls.clone()).websocket(),
            tcp(any_port()).websocket().tls(tls.clone()),
            tcp(any_port()).tls(tls),
        ));
        let server = Server::new().service(both.framing(Lines::default()), |_shard| Who);
        let server = server.driver(driver).shards(1).start().unwrap();
        for addr in &server.local_addrs()[..2] {
            let mut socket = above(connect(&config, *addr));
            socket.send(Theirs::text("who\n")).unwrap();
            assert_eq!(socket.read().unwrap(), Theirs::binary("Some(\"localhost\") Some(\"/\")\n"));
            let long = "x".repeat(300_000);
            socket.send(Theirs::text(format!("{long}\n"))).unwrap();
            assert!(socket.read().unwrap() == Theirs::binary(format!("{long}\n")));
            socket.send(Theirs::Ping("there?".into())).unwrap();
            assert_eq!(socket.read().unwrap(), Theirs::Pong("there?".into()));
            socket.close(None).unwrap();
            while socket.read().is_ok() {}
        }
        let mut plain = connect(&config, server.local_addrs()[2]);
        plain.write_all(b"who\n").unwrap();
        let mut heard = vec![0; 23];
        plain.read_exact(&mut heard).unwrap();
        assert_eq!(heard, b"Some(\"localhost\") None\n");
        drop(plain);
        // Bytes that are no request get an HTTP answer, and the end of TLS after it.
        let mut stream = connect(&config, server.local_addrs()[0]);
        stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 426 "), "{answer}");
        drop(stream);
        closed_for(&server, CloseReason::UpgradeRefused(426), 1);
        // The request and the first message come with the end of the handshake of TLS.
        let mut stream = connect(&config, server.local_addrs()[0]);
        let mut wire = crate::client::request("/early").into_bytes();
        put_masked(true, 0, Opcode::Text, b"who\n", [9; 4], &mut wire);
        stream.write_all(&wire).unwrap();
        let mut heard = Vec::new();
        while !heard.ends_with(b"\"/early\")\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            heard.extend(byte);
        }
        // A broken rule above ends the layer below, in order.
        stream.write_all(b"\x82\x02hi").unwrap();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).unwrap();
        assert_eq!(rest, b"\x88\x02\x03\xea");
        drop(stream);
        shut_down(server);
    }
}

#[test]
fn messages_of_every_size_come_back_by_wss() {
    for driver in drivers() {
        let (tls, config) = tls();
        let server = server(driver).websocket().tls(tls).framing(Messages::default());
        let server = server.start(|_shard| ws(Who)).unwrap();
        let mut socket = above(connect(&config, server.local_addrs()[0]));
        for size in [0, 1, 125, 126, 16_384, 65_536, 1 << 20] {
            let bytes: Vec<u8> = (0..size).map(|n| (n * 31 / 7) as u8).collect();
            socket.send(Theirs::binary(bytes.clone())).unwrap();
            assert!(socket.read().unwrap() == Theirs::binary(bytes), "{size}");
        }
        server.shutdown();
        let Theirs::Close(Some(ended)) = socket.read().unwrap() else { panic!("it is told") };
        assert_eq!(u16::from(ended.code), 1001);
        while socket.read().is_ok() {}
        drop(socket);
        shut_down(server);
    }
}

#[test]
fn messages_that_inflate_wait_as_they_came_by_wss() {
    for driver in drivers() {
        let (tls, config) = tls();
        let server = inflates(server(driver).tls(tls));
        are_answered(connect(&config, server.local_addrs()[0]));
        shut_down(server);
    }
}

#[test]
fn a_message_that_tls_ends_in_the_middle_is_cut_off() {
    for driver in drivers() {
        let (tls, config) = tls();
        let server = server(driver).websocket().tls(tls).framing(Messages::default());
        let server = server.start(|_shard| ws(Who)).unwrap();
        let wire = crate::client::frame(false, Opcode::Text, b"begun");
        for sent in [&wire[..], &wire[..3]] {
            let mut stream = connect(&config, server.local_addrs()[0]);
            stream.write_all(crate::client::request("/").as_bytes()).unwrap();
            stream.write_all(sent).unwrap();
            stream.conn.send_close_notify();
            stream.flush().unwrap();
            let mut heard = Vec::new();
            stream.read_to_end(&mut heard).unwrap();
            assert!(heard.ends_with(b"\r\n\r\n\x88\x02\x03\xea"), "{heard:x?}");
        }
        closed_for(&server, CloseReason::PeerClosedMidFrame, 2);
        shut_down(server);
    }
}
