//! WebSocket clients on a shard: `websocket::connect`, against servers of this crate and against
//! bytes by hand.

use std::convert::Infallible;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use ringserve::listen::{endpoints, tcp};
use ringserve::tls::{Pem, Tls, TlsClient};
use ringserve::websocket::{
    ClientRequest, Message, Messages, Socket, WebSocket, WebSocketOptions, WsCx, connect,
};
use ringserve::{Server, ServerHandle, Shard, http, ws};
use ringserve_tests::http::read_answer;
use ringserve_tests::{Client, On, SOON, no_time_limits, pattern};
use ringserve_websocket::frame::{DecodeOutcome, Header, Opcode};
use ringserve_websocket::upgrade::accept_key;

/// Short, since tests wait until it is over.
const BRIEF: Duration = Duration::from_millis(50);
const MESSAGE_BYTES_MAX: usize = 100_000;

/// Sends messages back, and one that is too long for `long`.
struct Echo;

impl WebSocket for Echo {
    type Session = ();
    type Error = Infallible;

    async fn message(&self, cx: &WsCx<'_, ()>, message: Message) -> Result<(), Infallible> {
        match message.as_text() {
            Some("long") => cx.send(&[b'x'; MESSAGE_BYTES_MAX + 1][..]),
            _ => cx.send(message),
        }
        Ok(())
    }
}

/// A plain and a TLS listener of [`Echo`], and a client that trusts the second.
fn backend() -> (ServerHandle, TlsClient) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let tls =
        Tls::server().certificate(Pem::from(made.cert.pem()), Pem::from(made.signing_key.serialize_pem()));
    let options = || WebSocketOptions::new().protocols(["b"]);
    let both = endpoints((
        tcp("127.0.0.1:0").websocket_with(options()),
        tcp("127.0.0.1:0").tls(tls).websocket_with(options()),
    ));
    let bounds = no_time_limits();
    let server = Server::new().shards(1).pin(false).server_limits(bounds.server);
    let server = server.service(both.framing(Messages::text()).limits(bounds.service), |_shard| ws(Echo));
    (server.start().expect("it starts"), Tls::client(made.cert.pem().into()).unwrap())
}

/// The actions of a client, with the result as text. `/talk/ADDR`, `/tls/ADDR`, `/long/ADDR` and
/// `/listen/ADDR`.
async fn run(
    shard: Shard,
    path: String,
    tls: Option<TlsClient>,
) -> Result<String, Box<dyn std::error::Error>> {
    let (what, addr) = path[1..].split_once('/').ok_or("a path has two parts")?;
    let mut connecting = shard.connect(addr.parse::<SocketAddr>()?);
    if what == "tls" {
        connecting = connecting.transport(tls.ok_or("no TLS")?.to("localhost")?);
    }
    let request = ClientRequest::new("localhost", "/echo?x=1")
        .protocols(["a", "b"])
        .message_bytes_max(MESSAGE_BYTES_MAX)
        .timeout(if what == "listen" { 4 * BRIEF } else { SOON })
        .ping_interval(BRIEF);
    let mut socket = connect(connecting.await?, &request).await?;
    let info = format!("{} {:?}", socket.info().target(), socket.info().protocol());
    match what {
        "listen" => {
            let message = socket.next().await?.map(|message| message.as_bytes().to_vec());
            return Ok(format!("{info} {message:?} {:?}", socket.info().peer_code()));
        }
        "long" => {
            socket.send("long").await?;
            let error = socket.next().await.err().ok_or("it is refused")?;
            return Ok(format!("{:?} {error}", error.code()));
        }
        _ => {}
    }
    talk(&mut socket).await?;
    socket.close(4000, "bye").await?;
    Ok(info)
}

async fn talk(socket: &mut Socket) -> Result<(), Box<dyn std::error::Error>> {
    for len in [0, 1, 125, 126, 70_000, MESSAGE_BYTES_MAX] {
        let sent = pattern(len);
        socket.send(&sent).await?;
        let back = socket.next().await?.ok_or("it comes back")?;
        assert!(back.as_text().is_none() && back.as_bytes() == sent, "{len}");
        socket.send("grün").await?;
        assert_eq!(socket.next().await?.ok_or("it comes back")?.as_text(), Some("grün"));
    }
    Ok(())
}

fn start(tls: Option<TlsClient>) -> ServerHandle {
    let running = On::default().server(no_time_limits()).start(move |shard| {
        let (shard, tls) = (shard.clone(), tls.clone());
        http(service_fn(move |request: Request<Incoming>| {
            let (shard, tls, path) = (shard.clone(), tls.clone(), request.uri().path().to_owned());
            async move {
                let said = run(shard, path, tls).await.unwrap_or_else(|error| format!("failed: {error}"));
                Ok::<_, Infallible>(Response::new(said))
            }
        }))
    });
    running.expect("the server starts")
}

fn asks(running: &ServerHandle, what: &str, addr: SocketAddr) -> String {
    let mut client = Client::connect(running.local_addrs()[0]);
    client.write(format!("GET /{what}/{addr} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes());
    String::from_utf8(read_answer(&mut client).1).unwrap()
}

#[test]
fn messages_pass_both_ways_plain_and_over_tls() {
    let (backend, tls) = backend();
    let running = start(Some(tls));
    let addrs = backend.local_addrs();
    assert_eq!(asks(&running, "talk", addrs[0]), "/echo?x=1 Some(\"b\")");
    assert_eq!(asks(&running, "tls", addrs[1]), "/echo?x=1 Some(\"b\")");
    let said = asks(&running, "long", addrs[0]);
    assert!(said.starts_with("Some(1009) "), "{said}");
    ringserve_tests::finish(running);
    ringserve_tests::finish(backend);
}

/// A server for one connection that sends the answer of `answer` to the received key, continues
/// with `then`, and returns the bytes that it received after the request.
fn by_hand(
    answer: impl FnOnce(&str) -> String + Send + 'static,
    then: Vec<u8>,
) -> (SocketAddr, Receiver<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let (tells, heard) = channel();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        let head = read_head(&mut stream);
        let key = head.lines().find_map(|line| line.strip_prefix("Sec-WebSocket-Key: ")).unwrap();
        let accept = String::from_utf8(accept_key(key.as_bytes()).to_vec()).unwrap();
        stream.write_all(&[answer(&accept).as_bytes(), &then].concat()).unwrap();
        let mut rest = Vec::new();
        _ = stream.read_to_end(&mut rest);
        _ = tells.send(rest);
    });
    (addr, heard)
}

fn read_head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        head.extend(byte);
    }
    String::from_utf8(head).unwrap()
}

fn switches(accept: &str, more: &str) -> String {
    format!(
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Accept: {accept}\r\n{more}\r\n"
    )
}

/// The frames of a client: opcodes and payloads, all of which were masked.
fn frames(mut bytes: &[u8]) -> Vec<(Opcode, Vec<u8>)> {
    let mut frames = Vec::new();
    while let Ok(DecodeOutcome::Header(header, size)) = Header::decode(bytes) {
        let mask = header.mask.expect("a client masks what it sends");
        let mut payload = bytes[size..size + header.len as usize].to_vec();
        ringserve_websocket::mask::apply(&mut payload, mask);
        bytes = &bytes[size + payload.len()..];
        frames.push((header.opcode, payload));
    }
    frames
}

#[test]
fn answer_and_frames_of_a_server_are_held_to_the_rules() {
    let running = start(None);
    let failed = |answer: fn(&str) -> String| asks(&running, "listen", by_hand(answer, Vec::new()).0);
    assert!(failed(|_| switches("s3pPLMBiTxaQ9kYGzzhZRbK+xOo=", "")).contains("Sec-WebSocket-Accept"));
    assert!(failed(|accept| switches(accept, "Sec-WebSocket-Protocol: c\r\n")).contains("a protocol"));
    assert!(failed(|_| "HTTP/1.1 401 Unauthorized\r\n\r\n".into()).contains("refuses WebSocket with 401"));
    assert!(failed(|_| "nothing of HTTP\r\n\r\n".into()).contains("no answer of HTTP/1.1"));
    assert!(failed(|_| String::new()).contains("did not answer in time"));

    // The first message, and a ping, come with the answer; the server closes.
    let then = b"\x89\x02hi\x01\x02he\x80\x03llo\x88\x02\x03\xe9".to_vec();
    let (addr, heard) = by_hand(|accept| switches(accept, "sec-websocket-protocol: a\r\n"), then);
    let said = asks(&running, "listen", addr);
    assert_eq!(said, format!("/echo?x=1 Some(\"a\") Some({:?}) None", b"hello"));
    let sent = frames(&heard.recv_timeout(SOON).unwrap());
    assert_eq!(sent.last(), Some(&(Opcode::Close, vec![0x03, 0xe8])), "{sent:?}");
    // A frame that is masked, and one of an extension.
    for then in [&b"\x81\x82\x01\x02\x03\x04hi"[..], b"\xc1\x02hi"] {
        let (addr, heard) = by_hand(|accept| switches(accept, ""), then.to_vec());
        let said = asks(&running, "listen", addr);
        assert!(said.starts_with("failed: "), "{said}");
        assert_eq!(frames(&heard.recv_timeout(SOON).unwrap()), [(Opcode::Close, vec![0x03, 0xea])]);
    }
    // A server that sends nothing is pinged, and then given up.
    let (addr, heard) = by_hand(|accept| switches(accept, ""), Vec::new());
    let said = asks(&running, "listen", addr);
    assert!(said.contains("answered no ping"), "{said}");
    assert_eq!(frames(&heard.recv_timeout(SOON).unwrap()), [(Opcode::Ping, vec![])]);
    ringserve_tests::finish(running);
}
