//! Services without messages: the payloads are their stream of bytes.

use std::convert::Infallible;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use ringserve::framing::Lines;
use ringserve::listen::{ProxyProtocol, endpoints, tcp};
use ringserve::service::{OpenCx, Refusal};
use ringserve::websocket::{Accept, Reject, WebSocketOptions};
use ringserve::{CloseReason, Cx, Frame, Limits, Server, Service, Stream, stream};
use ringserve_tests::watch::closed_for;
use ringserve_websocket::frame::Opcode;
use tungstenite::Message;

use crate::client::{
    ByHand, any_port, connect, connect_for, drivers, frame, server, shut_down, tcp_to, unbounded,
};

/// Sends each line back, and the facts of its connection.
struct Echo;

impl Service for Echo {
    type Session = String;
    type Error = Infallible;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<String, Refusal> {
        let Some(info) = opening.websocket() else { return Ok("plain".to_owned()) };
        let user = info.data::<u32>().map_or(0, |user| *user);
        Ok(format!("{} {} {user}", info.target(), info.protocol().unwrap_or("-")))
    }

    async fn call(&self, cx: &Cx<'_, String>, frame: Frame) -> Result<(), Infallible> {
        match &*frame {
            b"who" => cx.reply(cx.session().as_str()),
            b"path" => cx.reply(cx.websocket().map_or("", |_| "there")),
            _ => cx.reply(frame),
        }
        Ok(())
    }
}

#[test]
fn one_service_is_reached_with_and_without_websocket() {
    for driver in drivers() {
        let proxied = tcp(any_port()).proxy_protocol(ProxyProtocol::from(["127.0.0.0/8"])).websocket();
        let all = endpoints((tcp(any_port()), tcp(any_port()).websocket(), proxied));
        let server = Server::new().service(all.framing(Lines::default()), |_shard| Echo);
        let server = server.driver(driver).shards(2).start().unwrap();
        let [plain, websocket, proxied] = *server.local_addrs() else { panic!("three listeners") };
        let mut stream = TcpStream::connect(plain).unwrap();
        stream.write_all(b"who\n").unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        assert_eq!(line, "plain\n");
        let mut socket = connect(websocket);
        socket.send(Message::text("who\n")).unwrap();
        assert_eq!(socket.read().unwrap(), Message::binary("/ - 0\n"));
        // A line in pieces, of either kind; several lines in one message are answered by one
        // message.
        socket.send(Message::text("hel")).unwrap();
        socket.send(Message::binary("lo\nand\n")).unwrap();
        socket.send(Message::binary("")).unwrap();
        assert_eq!(socket.read().unwrap(), Message::binary("hello\nand\n"));
        let long = "x".repeat(300_000);
        socket.send(Message::text(format!("{long}\n"))).unwrap();
        assert_eq!(socket.read().unwrap().len(), 300_001);
        let mut stream = tcp_to(proxied);
        stream.write_all(b"PROXY TCP4 192.0.2.1 198.51.100.7 56324 80\r\n").unwrap();
        let mut by_hand = ByHand { stream };
        by_hand.upgrade("/behind");
        by_hand.send(true, Opcode::Text, b"who\n");
        assert_eq!(by_hand.recv(), (Opcode::Binary, b"/behind - 0\n".to_vec()));
        shut_down(server);
    }
}

#[test]
fn requests_are_looked_at_and_their_facts_reach_the_service() {
    let options =
        WebSocketOptions::new().text().protocols(["lines"]).origins(["https://example.org"]).upgrade(
            |upgrade| match upgrade.query() {
                Some(user) => match user.parse::<u32>() {
                    Ok(user) => Ok(Accept::new().data(user)),
                    Err(_) => panic!("planted: {user}"),
                },
                None => Err(Reject::new(401).header("WWW-Authenticate", "Bearer")),
            },
        );
    for driver in drivers() {
        let server = server(driver).websocket_with(options.clone()).framing(Lines::default());
        let server = server.start(|_shard| Echo).unwrap();
        let addr = server.local_addrs()[0];
        let request = tungstenite::http::Request::builder()
            .uri(format!("ws://{addr}/chat?7"))
            .header("Host", "localhost")
            .header("Origin", "https://example.org")
            .header("Upgrade", "websocket")
            .header("Connection", "Upgrade")
            .header("Sec-WebSocket-Key", tungstenite::handshake::client::generate_key())
            .header("Sec-WebSocket-Version", "13")
            .header("Sec-WebSocket-Protocol", "other, lines");
        let mut socket = connect_for(addr, request.body(()).unwrap());
        socket.send(Message::text("who\npath\n")).unwrap();
        assert_eq!(socket.read().unwrap(), Message::text("/chat?7 lines 7\nthere\n"));
        drop(socket);
        for (asked, told) in
            [("GET / HTTP/1.1\r\nHost: a\r\n\r\n", 426), ("GET /", 0), (&*crate::client::request("/"), 401)]
        {
            let mut stream = tcp_to(addr);
            stream.write_all(asked.as_bytes()).unwrap();
            if told == 0 {
                stream.shutdown(std::net::Shutdown::Write).unwrap();
            }
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            let expected = if told == 0 { String::new() } else { format!("HTTP/1.1 {told} ") };
            assert!(answer.starts_with(&expected) && (told > 0 || answer.is_empty()), "{answer}");
        }
        // The code that checks requests panics: one connection ends by that.
        let mut stream = tcp_to(addr);
        stream.write_all(crate::client::request("/?planted").as_bytes()).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert_eq!(answer, b"");
        closed_for(&server, CloseReason::UpgradeRefused(426), 1);
        closed_for(&server, CloseReason::PeerClosedMidFrame, 1);
        closed_for(&server, CloseReason::Refused, 1);
        closed_for(&server, CloseReason::HandlerPanicked, 1);
        server.shutdown();
        server.wait().unwrap();
    }
}

async fn echo(mut stream: Stream) -> io::Result<()> {
    while let Some(frame) = stream.read_frame().await? {
        stream.ready().await?;
        stream.queue(frame);
    }
    Ok(())
}

#[test]
fn stream_carries_megabytes_both_ways() {
    for driver in drivers() {
        let options = WebSocketOptions::new().message_bytes_max(8 << 20);
        let server = server(driver).websocket_with(options).start(|_shard| stream(echo)).unwrap();
        let mut socket = unbounded(server.local_addrs()[0]);
        let sent: Vec<u8> = (0..3_000_000u32).map(|n| (n / 251) as u8).collect();
        let mut heard = Vec::new();
        for (at, piece) in sent.chunks(700_000).enumerate() {
            socket.send(Message::binary(piece.to_vec())).unwrap();
            while heard.len() < (at * 700_000 + piece.len()) {
                match socket.read().unwrap() {
                    Message::Binary(bytes) => heard.extend_from_slice(&bytes),
                    other => panic!("{other:?}"),
                }
            }
        }
        assert!(heard == sent);
        socket.close(None).unwrap();
        while socket.read().is_ok() {}
        drop(socket);
        closed_for(&server, CloseReason::PeerClosed, 1);
        shut_down(server);
    }
}

#[test]
fn a_frame_that_is_too_large_for_the_service_is_told_by_1009() {
    for driver in drivers() {
        let server = server(driver).websocket().framing(Lines::default());
        let server = server.limits(Limits::default().frame_bytes_max(100)).start(|_shard| Echo).unwrap();
        let mut by_hand = ByHand::connect(server.local_addrs()[0]);
        // The end of the message is not awaited.
        by_hand.stream.write_all(&frame(true, Opcode::Binary, &[b'x'; 400])[..200]).unwrap();
        assert_eq!(by_hand.closed_with(), 1009);
        drop(by_hand);
        shut_down(server);
    }
}
