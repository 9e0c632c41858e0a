//! WebSocket inside an HTTP service, over both versions.

use std::cell::Cell;
use std::convert::Infallible;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::{Bytes, Incoming};
use hyper::ext::Protocol;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, Version};
use hyper_util::rt::TokioIo;
use ringserve::http::HttpOptions;
use ringserve::websocket::{
    Deflate, Extension, Message, PerMessageDeflate, Socket, Upgrades, WebSocketOptions,
};
use ringserve::{CloseReason, ServerHandle, http};
use ringserve_tests::client::End;
use ringserve_tests::http::{Bodies, Sender, read_answer, with_http2};
use ringserve_tests::{Bounds, Client, On, SOON, eventually, no_time_limits, pattern, watch};
use ringserve_websocket::frame::{DecodeOutcome, Header, Opcode, put_masked};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tungstenite::protocol::CloseFrame;
use tungstenite::protocol::frame::coding::CloseCode;
use tungstenite::{Error, Message as Sent, WebSocket};

/// Short, since tests wait until it is over.
const BRIEF: Duration = Duration::from_millis(200);
const MESSAGE_BYTES_MAX: usize = 1 << 20;

const ASK: &str = "GET /echo HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\
    sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n";

/// Counts of handlers that run, and the result of the last one.
#[derive(Default)]
struct Handlers {
    inside: AtomicUsize,
    ended: AtomicUsize,
    failed: AtomicUsize,
}

struct Inside(Arc<Handlers>);

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, SeqCst);
    }
}

async fn echo(mut socket: Socket, handlers: Arc<Handlers>) {
    handlers.inside.fetch_add(1, SeqCst);
    let inside = Inside(handlers);
    loop {
        match socket.next().await {
            Ok(Some(Message::Text(text))) if *text == *"close" => {
                _ = socket.close(4000, "as it was told").await;
                return;
            }
            Ok(Some(Message::Text(text))) if *text == *"panic" => panic!("planted: a handler that panics"),
            Ok(Some(Message::Text(text))) if *text == *"return" => return,
            Ok(Some(message)) => {
                if socket.send(message).await.is_err() {
                    inside.0.failed.fetch_add(1, SeqCst);
                    return;
                }
            }
            Ok(None) => {
                inside.0.ended.fetch_add(1, SeqCst);
                return;
            }
            Err(_) => {
                inside.0.failed.fetch_add(1, SeqCst);
                return;
            }
        }
    }
}

/// Opens a socket for `/echo`; `/lost` answers 200 to the request of one, `/never` does not answer,
/// others report their version.
async fn answer(
    request: Request<Incoming>,
    upgrades: Upgrades,
    handlers: Arc<Handlers>,
) -> Result<Response<String>, hyper::Error> {
    let path = request.uri().path().to_owned();
    Ok(match &*path {
        "/echo" => upgrades.upgrade(request, async move |socket| echo(socket, handlers).await),
        "/lost" => {
            let inside = Inside(handlers.clone());
            handlers.inside.fetch_add(1, SeqCst);
            _ = upgrades.upgrade::<_, String, _>(request, async move |_socket| drop(inside));
            Response::new("lost".into())
        }
        "/never" => std::future::pending().await,
        _ => Response::new(format!("{:?}", request.version())),
    })
}

struct Rig {
    running: ServerHandle,
    handlers: Arc<Handlers>,
}

impl Rig {
    fn start(options: HttpOptions) -> Rig {
        Rig::start_with(no_time_limits(), options, None)
    }

    fn start_with(limits: Bounds, options: HttpOptions, ping: Option<Duration>) -> Rig {
        let handlers = Arc::new(Handlers::default());
        let shared = handlers.clone();
        let running = On::default().server(limits).start(move |_| {
            let (shared, sockets) = (shared.clone(), WebSocketOptions::new().deflate(Deflate::default()));
            let sockets = sockets.message_bytes_max(MESSAGE_BYTES_MAX).origins(["https://example.org"]);
            let upgrades = Upgrades::new(&sockets).ping_interval(ping).write_stall_timeout(BRIEF);
            http(service_fn(move |request| answer(request, upgrades.clone(), shared.clone())))
                .options(options.clone())
        });
        Rig { running: running.expect("the server starts"), handlers }
    }

    fn addr(&self) -> SocketAddr {
        self.running.local_addrs()[0]
    }

    fn socket(&self) -> WebSocket<TcpStream> {
        let stream = TcpStream::connect(self.addr()).expect("the server accepts");
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream.set_write_timeout(Some(SOON)).unwrap();
        tungstenite::client(format!("ws://{}/echo", self.addr()), stream).expect("it lets the client in").0
    }

    /// Opens an HTTP/1.1 connection that is accepted, by hand.
    fn raw(&self) -> Client {
        let mut client = Client::connect(self.addr());
        client.write(ASK.as_bytes());
        assert!(read_head(&mut client).starts_with("HTTP/1.1 101 "));
        client
    }

    fn handlers_come_to(&self, inside: usize, ended: usize, failed: usize) {
        eventually("the handlers end", SOON, || {
            let Handlers { inside: i, ended: e, failed: f } = &*self.handlers;
            (i.load(SeqCst), e.load(SeqCst), f.load(SeqCst)) == (inside, ended, failed)
        });
    }
}

fn read_head(client: &mut Client) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.extend(client.read(1));
    }
    String::from_utf8(head).unwrap()
}

fn masked(fin: bool, opcode: Opcode, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    put_masked(fin, 0, opcode, payload, [1, 2, 3, 4], &mut bytes);
    bytes
}

/// The code of the close frame that ends the server's bytes, and whether FIN follows.
fn close_code(client: &mut Client) -> u16 {
    let (bytes, end) = client.read_to_end();
    assert_eq!((bytes[0], end), (0x88, End::Fin), "{bytes:x?}");
    u16::from_be_bytes([bytes[2], bytes[3]])
}

#[test]
fn messages_come_back_over_http_1() {
    let rig = Rig::start(HttpOptions::default());
    let mut socket = rig.socket();
    for message in [
        Sent::text("hello"),
        Sent::text(""),
        Sent::binary(pattern(300)),
        Sent::binary(pattern(MESSAGE_BYTES_MAX)),
    ] {
        socket.send(message.clone()).unwrap();
        assert!(socket.read().unwrap() == message);
    }
    socket.send(Sent::Ping(Bytes::from_static(b"there?"))).unwrap();
    assert_eq!(socket.read().unwrap(), Sent::Pong(Bytes::from_static(b"there?")));
    // HTTP requests continue at the same time.
    let mut client = Client::connect(rig.addr());
    client.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n");
    assert_eq!(read_answer(&mut client).1, b"HTTP/1.1");
    let frame = CloseFrame { code: CloseCode::Library(4321), reason: "done".into() };
    socket.close(Some(frame)).unwrap();
    match socket.read().unwrap() {
        Sent::Close(Some(frame)) => assert_eq!(u16::from(frame.code), 4321),
        other => panic!("{other:?}"),
    }
    assert!(matches!(socket.read(), Err(Error::ConnectionClosed)));
    drop(client);
    rig.handlers_come_to(0, 1, 0);
    let report = ringserve_tests::finish(rig.running);
    assert_eq!(report.counters.closed_for(CloseReason::HandlerError), 0, "{:?}", report.counters);
}

#[test]
fn frames_behind_the_request_are_not_lost() {
    let rig = Rig::start(HttpOptions::default());
    let mut client = Client::connect(rig.addr());
    let early = [masked(false, Opcode::Text, b"he"), masked(true, Opcode::Continuation, b"llo")].concat();
    client.write(&[ASK.as_bytes(), &early[..9]].concat());
    assert!(read_head(&mut client).starts_with("HTTP/1.1 101 "));
    client.write(&early[9..]);
    assert_eq!(client.read(7), b"\x81\x05hello");
}

#[test]
fn requests_that_ask_for_none_or_from_elsewhere_are_answered() {
    let rig = Rig::start(HttpOptions::default());
    let mut client = Client::connect(rig.addr());
    for (request, status) in [
        ("GET /echo HTTP/1.1\r\nhost: x\r\n\r\n".to_owned(), "426"),
        (ASK.replace(": 13", ": 8"), "426"),
        (ASK.replace("sec-websocket-key", "key"), "400"),
        (ASK.replace("GET", "POST"), "426"),
        (ASK.replace("\r\n\r\n", "\r\norigin: https://elsewhere.example\r\n\r\n"), "403"),
    ] {
        client.write(request.as_bytes());
        let (head, _) = read_answer(&mut client);
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{request}{head}");
    }
    client.write(ASK.replace("\r\n\r\n", "\r\norigin: https://example.org\r\n\r\n").as_bytes());
    assert!(read_head(&mut client).starts_with("HTTP/1.1 101 "));
}

#[test]
fn answer_that_is_no_upgrade_drops_the_handler() {
    let rig = Rig::start(HttpOptions::default());
    let mut client = Client::connect(rig.addr());
    client.write(ASK.replace("/echo", "/lost").as_bytes());
    assert_eq!(read_answer(&mut client).1, b"lost");
    rig.handlers_come_to(0, 0, 0);
    client.write(ASK.as_bytes());
    assert!(read_head(&mut client).starts_with("HTTP/1.1 101 "));
    client.write(&masked(true, Opcode::Text, b"hello"));
    assert_eq!(client.read(7), b"\x81\x05hello");
}

#[test]
fn client_that_breaks_the_rules_is_told_the_code() {
    let rig = Rig::start(HttpOptions::default());
    let large = Header { fin: true, rsv: 0, opcode: Opcode::Binary, len: 1 << 40, mask: Some([0; 4]) };
    let sent: [(&[u8], u16); 4] = [
        (b"\x81\x05hello", 1002),
        (&masked(true, Opcode::Continuation, b""), 1002),
        (&masked(true, Opcode::Text, b"\xff"), 1007),
        (&large.encode(), 1009),
    ];
    for (bytes, code) in sent {
        let mut client = rig.raw();
        client.write(bytes);
        assert_eq!(close_code(&mut client), code, "{bytes:x?}");
    }
    rig.handlers_come_to(0, 0, 4);
    // A client that vanishes is no fault of the server.
    drop(rig.raw());
    rig.handlers_come_to(0, 0, 5);
    let report = ringserve_tests::finish(rig.running);
    assert_eq!(report.counters.closed_for(CloseReason::HandlerError), 0, "{:?}", report.counters);
}

#[test]
fn compressed_messages_go_both_ways_and_no_bomb_comes_in() {
    use ringserve::websocket::{Extension, PerMessageDeflate};
    let rig = Rig::start(HttpOptions::default());
    let mut deflate = PerMessageDeflate::new(Deflate::default());
    let text = "compressed ".repeat(1000);
    let offer = ASK.replace("\r\n\r\n", "\r\nsec-websocket-extensions: permessage-deflate\r\n\r\n");
    let connect = || {
        let mut client = Client::connect(rig.addr());
        client.write(offer.as_bytes());
        let head = read_head(&mut client);
        assert!(head.contains("permessage-deflate; server_no_context_takeover"), "{head}");
        client
    };
    let mut send = |client: &mut Client, message: &[u8]| {
        let mut bytes = Vec::new();
        put_masked(true, 4, Opcode::Text, deflate.compress(message).unwrap(), [5; 4], &mut bytes);
        client.write(&bytes);
    };
    let mut client = connect();
    send(&mut client, text.as_bytes());
    let header = client.read(4);
    assert_eq!(header[..2], [0xc1, 126], "{header:x?}");
    let compressed = client.read(usize::from(u16::from_be_bytes([header[2], header[3]])));
    let mut back = Vec::new();
    PerMessageDeflate::new(Deflate::default()).inflate(&compressed, text.len(), &mut back).unwrap();
    assert!(back == text.as_bytes());
    send(&mut client, &vec![b'0'; MESSAGE_BYTES_MAX + 1]);
    assert_eq!(close_code(&mut client), 1009);
}

#[test]
fn server_closes_by_code_and_by_end_or_panic_of_the_handler() {
    let rig = Rig::start(HttpOptions::default());
    for (said, code) in [("close", 4000), ("return", 1000)] {
        let mut client = rig.raw();
        client.write(&masked(true, Opcode::Text, said.as_bytes()));
        let close = client.read(4);
        assert_eq!((close[0], u16::from_be_bytes([close[2], close[3]])), (0x88, code));
        client.read(usize::from(close[1]) - 2);
        client.write(&masked(true, Opcode::Close, &close[2..]));
        assert_eq!(client.end(), End::Fin);
    }
    let mut client = rig.raw();
    client.write(&masked(true, Opcode::Text, b"panic"));
    client.read_to_end();
    watch::closed_for(&rig.running, CloseReason::HandlerPanicked, 1);
    rig.handlers_come_to(0, 0, 0);
}

#[test]
fn a_drain_tells_clients_and_waits_for_their_close() {
    let rig = Rig::start(HttpOptions::default());
    let (mut socket, mut raw) = (rig.socket(), rig.raw());
    rig.handlers_come_to(2, 0, 0);
    rig.running.shutdown();
    match socket.read().unwrap() {
        Sent::Close(Some(frame)) => assert_eq!(frame.code, CloseCode::Away),
        other => panic!("{other:?}"),
    }
    assert!(matches!(socket.read(), Err(Error::ConnectionClosed)));
    assert_eq!(raw.read(4), b"\x88\x02\x03\xe9");
    // Later bytes are dropped.
    raw.write(&masked(true, Opcode::Text, b"hello"));
    assert!(raw.is_silent());
    raw.write(&masked(true, Opcode::Close, b"\x03\xe9"));
    assert_eq!(raw.end(), End::Fin);
    rig.handlers_come_to(0, 2, 0);
    drop((socket, raw));
    ringserve_tests::finish(rig.running);
}

#[test]
fn silent_clients_are_pinged_and_those_that_stay_silent_end() {
    let rig = Rig::start_with(no_time_limits(), HttpOptions::default(), Some(BRIEF));
    let mut client = rig.raw();
    for _ in 0..3 {
        assert_eq!(client.read(2), b"\x89\x00");
        client.write(&masked(true, Opcode::Pong, b""));
    }
    assert_eq!(client.read(2), b"\x89\x00");
    assert_eq!(client.end(), End::Reset);
    rig.handlers_come_to(0, 0, 1);
}

#[test]
fn bounds_of_requests_do_not_end_sockets() {
    let brief = HttpOptions::default().request_timeout(BRIEF).response_timeout(BRIEF).rate_window(BRIEF);
    let rig = Rig::start(brief.http2_idle_timeout(BRIEF));
    let mut client = rig.raw();
    with_http2(rig.addr(), async |mut sender: Sender| {
        let mut stream = open(&mut sender).await;
        // Requests that began after the sockets exceed these limits.
        for _ in 0..3 {
            let body = http_body_util::Empty::new().map_err(|never| match never {}).boxed();
            let request =
                Request::get("http://example.org/never").version(Version::HTTP_2).body(body).unwrap();
            let answer = sender.send_request(request).await.unwrap();
            assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
        }
        stream.write_all(&masked(true, Opcode::Text, b"hello")).await.unwrap();
        let mut back = [0; 7];
        stream.read_exact(&mut back).await.unwrap();
        assert_eq!(&back, b"\x81\x05hello");
    });
    client.write(&masked(true, Opcode::Text, b"hello"));
    assert_eq!(client.read(7), b"\x81\x05hello");
}

type Stream = TokioIo<hyper::upgrade::Upgraded>;

fn connect(version: &str) -> Request<Bodies> {
    let body = http_body_util::Empty::new().map_err(|never| match never {}).boxed();
    let request = Request::builder().method(Method::CONNECT).uri("http://example.org/echo");
    let request = request.header("sec-websocket-version", version).version(Version::HTTP_2);
    request.extension(Protocol::from_static("websocket")).body(body).unwrap()
}

/// Opens a socket on an HTTP/2 stream.
async fn open(sender: &mut Sender) -> Stream {
    let answer = sender.send_request(connect("13")).await.unwrap();
    assert_eq!(answer.status(), StatusCode::OK);
    assert!(!answer.headers().contains_key("sec-websocket-accept"), "{answer:?}");
    TokioIo::new(hyper::upgrade::on(answer).await.unwrap())
}

/// The next frame of the server.
async fn read_frame(stream: &mut Stream) -> (Header, Vec<u8>) {
    let mut head = Vec::new();
    loop {
        match Header::decode(&head).unwrap() {
            DecodeOutcome::Needs(all) => {
                let from = head.len();
                head.resize(all, 0);
                stream.read_exact(&mut head[from..]).await.unwrap();
            }
            DecodeOutcome::Header(header, _) => {
                let mut payload = vec![0; header.len as usize];
                stream.read_exact(&mut payload).await.unwrap();
                return (header, payload);
            }
        }
    }
}

#[test]
fn messages_come_back_over_streams_of_http_2() {
    let rig = Rig::start(HttpOptions::default());
    with_http2(rig.addr(), async |mut sender: Sender| {
        let mut streams = Vec::new();
        for _ in 0..3 {
            streams.push(open(&mut sender).await);
        }
        for message in [&b"hello"[..], &pattern(300), &pattern(MESSAGE_BYTES_MAX)] {
            for stream in &mut streams {
                stream.write_all(&masked(true, Opcode::Binary, message)).await.unwrap();
            }
            for stream in &mut streams {
                let (header, payload) = read_frame(stream).await;
                assert!(header == Header::whole(Opcode::Binary, message.len() as u64) && payload == message);
            }
        }
        // Requests continue at the same time, and one of another WebSocket version is refused.
        let refused = sender.send_request(connect("8")).await.unwrap();
        assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
        let mut closed = streams.remove(0);
        closed.write_all(&masked(true, Opcode::Close, b"\x0f\xa1")).await.unwrap();
        let (header, payload) = read_frame(&mut closed).await;
        assert_eq!((header.opcode, &payload[..]), (Opcode::Close, &b"\x0f\xa1"[..]));
        assert_eq!(closed.read(&mut [0; 8]).await.unwrap(), 0);
        closed.shutdown().await.unwrap();
        rig.handlers_come_to(2, 1, 0);
    });
    rig.handlers_come_to(0, 1, 2);
    ringserve_tests::finish(rig.running);
}

#[test]
fn a_drain_tells_sockets_on_streams_of_http_2() {
    let rig = Rig::start(HttpOptions::default());
    with_http2(rig.addr(), async |mut sender: Sender| {
        let mut stream = open(&mut sender).await;
        rig.running.shutdown();
        let (header, payload) = read_frame(&mut stream).await;
        assert_eq!((header.opcode, &payload[..]), (Opcode::Close, &b"\x03\xe9"[..]));
        stream.write_all(&masked(true, Opcode::Close, b"\x03\xe9")).await.unwrap();
        assert_eq!(stream.read(&mut [0; 8]).await.unwrap(), 0);
        stream.shutdown().await.unwrap();
    });
    rig.handlers_come_to(0, 1, 0);
    ringserve_tests::finish(rig.running);
}

#[test]
fn socket_on_a_stream_of_http_2_that_is_not_read_ends() {
    let rig = Rig::start(HttpOptions::default());
    with_http2(rig.addr(), async |mut sender: Sender| {
        let mut stream = open(&mut sender).await;
        let message = masked(true, Opcode::Binary, &pattern(MESSAGE_BYTES_MAX));
        // More than the windows, and than the other buffers hold.
        for _ in 0..20 {
            if stream.write_all(&message).await.is_err() {
                break;
            }
        }
        eventually("the handler gives up", SOON, || rig.handlers.failed.load(SeqCst) == 1);
        // The stream is reset, even if some of it was not taken: so the connection ends, once the
        // client has no more requests.
    });
}

/// Sends more than the server may hold.
async fn pushes(request: Request<Incoming>) -> Result<Response<String>, hyper::Error> {
    Ok(ringserve::websocket::upgrade(request, async |mut socket: Socket| {
        _ = socket.send(vec![0u8; LARGE]).await;
        _ = socket.next().await;
    }))
}

const LARGE: usize = 8 << 20;

#[test]
fn message_that_a_client_does_not_take_counts_as_held() {
    let limits = no_time_limits()
        .frame_bytes_max(64 << 10)
        .outbox_bytes_high(64 << 10)
        .outbox_bytes_low(16 << 10)
        .outbox_bytes_max(256 << 10)
        .inbox_bytes_high(64 << 10)
        .held_bytes_max(LARGE / 2);
    let running =
        On::default().server(limits).start(|_| http(service_fn(pushes))).expect("the server starts");
    let mut client = Client::with_small_window(running.local_addrs()[0]);
    client.write(ASK.as_bytes());
    watch::closed_for(&running, CloseReason::MemoryLimit, 1);
    drop(client);
    ringserve_tests::finish(running);
}

/// Makes both sockets of a shard note, for each message, how often other tasks had their turn until
/// then.
async fn notes(
    request: Request<Incoming>,
    upgrades: Upgrades,
    noted: Arc<Mutex<Vec<usize>>>,
) -> Result<Response<String>, hyper::Error> {
    #[derive(Default)]
    struct Rounds(Cell<usize>, Cell<bool>);
    Ok(upgrades.upgrade(request, async move |mut socket| {
        let (shard, rounds) = (socket.shard().clone(), socket.shard().shared(Rounds::default));
        while let Ok(Some(message)) = socket.next().await {
            assert_eq!(message.as_bytes().len(), MESSAGE_BYTES_MAX);
            noted.lock().unwrap().push(rounds.0.get());
            if !rounds.1.replace(true) {
                let rounds = rounds.clone();
                shard.spawn(async move {
                    rounds.0.set(rounds.0.get() + 1);
                    rounds.1.set(false);
                });
            }
        }
    }))
}

#[test]
fn sockets_that_inflate_let_others_of_the_shard_have_their_turn() {
    const MESSAGES: usize = 16;
    let noted = Arc::new(Mutex::new(Vec::new()));
    let shared = noted.clone();
    let running = On::default().server(no_time_limits()).start(move |_| {
        let sockets = WebSocketOptions::new().deflate(Deflate::default());
        let upgrades = Upgrades::new(&sockets.message_bytes_max(MESSAGE_BYTES_MAX));
        let noted = shared.clone();
        http(service_fn(move |request| notes(request, upgrades.clone(), noted.clone())))
    });
    let running = running.expect("the server starts");
    let mut deflate = PerMessageDeflate::new(Deflate::default());
    let compressed = deflate.compress(&[b'x'; MESSAGE_BYTES_MAX]).unwrap();
    let mut wire = Vec::new();
    (0..MESSAGES).for_each(|_| put_masked(true, 4, Opcode::Text, compressed, [1, 2, 3, 4], &mut wire));
    let ask = ASK.replace("\r\n\r\n", "\r\nsec-websocket-extensions: permessage-deflate\r\n\r\n");
    let mut clients = [(); 2].map(|()| Client::connect(running.local_addrs()[0]));
    for client in &mut clients {
        client.write(ask.as_bytes());
        assert!(read_head(client).contains("permessage-deflate"));
    }
    for client in &mut clients {
        client.write(&wire);
    }
    eventually("all are inflated", SOON, || noted.lock().unwrap().len() == 2 * MESSAGES);
    let mut noted = noted.lock().unwrap().clone();
    noted.sort_unstable();
    assert!(noted.is_sorted_by(|one, next| one < next), "more than one in a row: {noted:?}");
    drop(clients);
    ringserve_tests::finish(running);
}

#[test]
fn target_of_a_request_counts_as_held_while_its_socket_lasts() {
    const TARGET_BYTES: usize = 6000;
    let little = no_time_limits().frame_bytes_max(16 << 10).inbox_bytes_high(16 << 10);
    let little = little.outbox_bytes_high(16 << 10).outbox_bytes_low(4 << 10).outbox_bytes_max(16 << 10);
    let running = On::default().server(little.held_bytes_max(20 * TARGET_BYTES)).start(|_| {
        http(service_fn(async |request| {
            Ok::<Response<String>, Infallible>(ringserve::websocket::upgrade(
                request,
                async |mut socket: Socket| {
                    _ = socket.next().await;
                },
            ))
        }))
    });
    let running = running.expect("the server starts");
    let ask = ASK.replace("/echo", &format!("/{}", "x".repeat(TARGET_BYTES - 1)));
    let clients: Vec<Client> = (0..30)
        .map(|_| {
            let mut client = Client::connect(running.local_addrs()[0]);
            client.write(ask.as_bytes());
            client
        })
        .collect();
    eventually("some go", SOON, || running.stats().counters.closed_for(CloseReason::MemoryLimit) >= 30 - 20);
    drop(clients);
    watch::holds(&running, 0);
    // The memory that they held is free again.
    let clients: Vec<Client> = (0..15)
        .map(|_| {
            let mut client = Client::connect(running.local_addrs()[0]);
            client.write(ask.as_bytes());
            assert!(read_head(&mut client).starts_with("HTTP/1.1 101 "));
            client
        })
        .collect();
    watch::holds(&running, 15);
    drop(clients);
    ringserve_tests::finish(running);
}
