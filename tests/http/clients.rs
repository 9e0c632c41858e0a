//! The facts that a request has about its connection.

use std::convert::Infallible;
use std::future::ready;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

use hyper::Request;
use hyper::Response;
use hyper::body::Incoming;
use hyper::service::service_fn;
use ringserve::http::{ClientInfo, HttpOptions};
use ringserve::listen::{ProxyProtocol, endpoints, tcp};
use ringserve::tls::rustls::pki_types::pem::PemObject;
use ringserve::tls::rustls::pki_types::{CertificateDer, ServerName};
use ringserve::tls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use ringserve::tls::{Pem, Tls};
use ringserve::{Server, http};
use ringserve_tests::http::{Sender, read_answer, with_http2};
use ringserve_tests::{Client, no_time_limits};

const GET: &[u8] = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";

/// The answer of a service that may run on any thread, like those of axum.
fn who(request: &Request<Incoming>) -> String {
    let Some(client) = request.extensions().get::<ClientInfo>() else { return "nothing is known".into() };
    let client = std::thread::scope(|scope| scope.spawn(|| client.clone()).join().unwrap());
    let (peer, tlvs) = (client.peer(), client.tlvs());
    let name = client.tls().map(|tls| (tls.server_name().map(str::to_owned), tls.version()));
    format!("{peer} via {:?}, {:?}, {name:?}, shard {}", peer.via(), tlvs, client.shard())
}

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

fn asks_over_tls(config: &Arc<ClientConfig>, addr: SocketAddr) -> String {
    let name = ServerName::try_from("localhost").unwrap();
    let connection = ClientConnection::new(config.clone(), name).unwrap();
    let mut stream = StreamOwned::new(connection, TcpStream::connect(addr).unwrap());
    stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    std::io::Read::read_to_string(&mut stream, &mut answer).unwrap();
    answer.split_once("\r\n\r\n").unwrap().1.to_owned()
}

#[test]
fn request_carries_what_is_known_of_its_connection() {
    let (tls, config) = tls();
    let local = "127.0.0.1:0";
    let trusted = ProxyProtocol::from(["127.0.0.0/8"]).keep_tlvs();
    let all = endpoints((tcp(local), tcp(local).proxy_protocol(trusted), tcp(local).tls(tls)));
    let bounds = no_time_limits();
    let server = Server::new().shards(1).pin(false).server_limits(bounds.server).service(
        all.limits(bounds.service),
        |_shard| {
            let answer =
                |request: Request<Incoming>| ready(Ok::<_, Infallible>(Response::new(who(&request))));
            http(service_fn(answer)).options(HttpOptions::default())
        },
    );
    let running = server.start().expect("it starts");
    let addrs = running.local_addrs();

    let mut client = Client::connect(addrs[0]);
    for _ in 0..2 {
        client.write(GET);
        let (_, body) = read_answer(&mut client);
        let wanted = format!("{} via None, None, None, shard 0", client.local_addr());
        assert_eq!(String::from_utf8(body).unwrap(), wanted);
    }
    with_http2(addrs[0], async |mut sender: Sender| {
        use http_body_util::BodyExt;
        let body = http_body_util::Empty::new().map_err(|never| match never {}).boxed();
        let answer = sender.send_request(Request::get("http://x/").body(body).unwrap()).await.unwrap();
        let said = answer.into_body().collect().await.unwrap().to_bytes();
        assert!(
            said.starts_with(b"127.0.0.1:") && said.ends_with(b" via None, None, None, shard 0"),
            "{said:?}"
        );
    });

    // Version 2, TCP over IPv4, with a field of AWS.
    let mut proxy = Client::connect(addrs[1]);
    let mut header = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x12".to_vec();
    header.extend([192, 0, 2, 1, 198, 51, 100, 1, 0x10, 0, 0, 80]);
    header.extend([0xea, 0, 3, b'v', b'p', b'c']);
    proxy.write(&[&header, GET].concat());
    let (_, body) = read_answer(&mut proxy);
    let wanted = format!(
        "192.0.2.1:4096 via Some({}), Some({{234: [118, 112, 99]}}), None, shard 0",
        proxy.local_addr()
    );
    assert_eq!(String::from_utf8(body).unwrap(), wanted);

    let said = asks_over_tls(&config, addrs[2]);
    assert!(said.ends_with("via None, None, Some((Some(\"localhost\"), \"TLSv1_3\")), shard 0"), "{said}");
    drop((client, proxy));
    ringserve_tests::finish(running);
}
