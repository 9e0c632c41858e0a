//! Clients that take long for one frame, in virtual time: on a listener of WebSocket, and inside
//! HTTP.

use std::convert::Infallible;
use std::io;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use ringserve::testing::{ClientStream, Faults, Net, Sim, SimServer};
use ringserve::websocket::{Message, Messages, WebSocket, WsCx, upgrade};
use ringserve::{CloseReason, Limits, Server, http, ws};
use ringserve_tests::http::frames::{PREFACE, SETTINGS, frame};
use ringserve_websocket::frame::{DecodeOutcome, Header, Opcode, put_masked};

use crate::client::request;

const ADDR: &str = "10.0.0.1:7000";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Listener,
    Http1,
    Http2,
}

struct Echo;

impl WebSocket for Echo {
    type Session = ();
    type Error = Infallible;

    async fn message(&self, cx: &WsCx<'_, ()>, message: Message) -> Result<(), Infallible> {
        cx.send(message);
        Ok(())
    }
}

async fn answer(request: Request<Incoming>) -> Result<Response<String>, Infallible> {
    Ok(upgrade(request, async |mut socket| {
        while let Ok(Some(message)) = socket.next().await {
            _ = socket.send(message).await;
        }
    }))
}

/// A client's connection, as bytes of WebSocket.
struct Peer {
    me: ClientStream,
    kind: Kind,
    came: Vec<u8>,
}

impl Peer {
    async fn connect(net: &Net, kind: Kind) -> io::Result<Peer> {
        let mut peer = Peer { me: net.connect(ADDR).await?, kind, came: Vec::new() };
        if kind != Kind::Http2 {
            peer.me.send(request("/")).await?;
            while peer.me.line().await?.is_some_and(|line| !line.is_empty()) {}
            return Ok(peer);
        }
        // CONNECT of websocket, as its fields are written without a table.
        let mut head =
            [&[2, 7][..], b"CONNECT", &[0, 9], b":protocol", &[9], b"websocket", &[0x86, 0x84]].concat();
        head.extend([&[1, 1][..], b"x", &[0, 21], b"sec-websocket-version", &[2], b"13"].concat());
        peer.me.send([PREFACE, SETTINGS, &frame(1, 4, 1, &head)].concat()).await?;
        Ok(peer)
    }

    async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self.kind {
            Kind::Http2 => self.me.send(frame(0, 0, 1, bytes)).await,
            _ => self.me.send(bytes).await,
        }
    }

    /// The next frame of WebSocket.
    async fn next(&mut self) -> io::Result<(Opcode, usize)> {
        loop {
            if let Ok(DecodeOutcome::Header(header, size)) = Header::decode(&self.came)
                && let end = size + header.len as usize
                && self.came.len() >= end
            {
                self.came.drain(..end);
                return Ok((header.opcode, end - size));
            }
            if self.kind != Kind::Http2 {
                let some = self.me.some().await?;
                self.came.extend(some);
                continue;
            }
            let head = self.me.exactly(9).await?;
            let len = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
            let payload = self.me.exactly(len).await?;
            assert_ne!(head[3], 3, "the stream was reset");
            if head[3] == 0 {
                self.came.extend(payload);
            }
        }
    }
}

/// A server that pings a client which is silent for 30 s.
fn start(sim: &Sim, kind: Kind) -> SimServer {
    let limits = Limits::default().heartbeat_interval(Duration::from_secs(30)).first_frame_timeout(None);
    let running = match kind {
        Kind::Listener => {
            let server = Server::bind(ADDR).websocket().framing(Messages::default()).limits(limits);
            sim.start(server.shards(1), |_shard| ws(Echo))
        }
        _ => sim.start(Server::bind(ADDR).shards(1), |_shard| http(service_fn(answer))),
    };
    running.expect("the server starts")
}

#[test]
fn client_that_takes_long_for_one_frame_is_alive() {
    const PIECE: usize = 3000;
    const PIECES: usize = 20;
    for kind in [Kind::Listener, Kind::Http1, Kind::Http2] {
        Sim::seeds(5).faults(Faults::none()).run(move |sim| {
            let running = start(sim, kind);
            sim.client("slow", async move |net| {
                let mut peer = Peer::connect(&net, kind).await?;
                let mut wire = Vec::new();
                put_masked(true, 0, Opcode::Binary, &[b'x'; PIECE * PIECES], [1, 2, 3, 4], &mut wire);
                // A ping cannot be answered within a frame.
                for piece in wire.chunks(PIECE) {
                    peer.send(piece).await?;
                    net.sleep(Duration::from_secs(5 + net.random() % 6)).await;
                }
                loop {
                    match peer.next().await? {
                        (Opcode::Ping, 0) => {}
                        (kind, len) => {
                            assert_eq!((kind, len), (Opcode::Binary, PIECE * PIECES));
                            return Ok(());
                        }
                    }
                }
            });
            sim.run_until_done();
            let counters = running.stats().counters;
            assert_eq!(counters.closed_for(CloseReason::HeartbeatLost), 0, "{kind:?}");
            assert_eq!(counters.closed_for(CloseReason::Aborted), 0, "{kind:?}");
        });
    }
}

#[test]
fn client_that_spoke_while_the_shard_stood_still_is_alive() {
    // More than a turn takes in.
    const CLIENTS: usize = 400;
    for kind in [Kind::Listener, Kind::Http1, Kind::Http2] {
        Sim::seeds(2).faults(Faults::none()).run(move |sim| {
            let running = start(sim, kind);
            for n in 0..CLIENTS {
                sim.client(format!("{n}"), async move |net| {
                    let mut peer = Peer::connect(&net, kind).await?;
                    assert_eq!(peer.next().await?, (Opcode::Ping, 0));
                    net.sleep(Duration::from_secs(5)).await;
                    let mut wire = Vec::new();
                    put_masked(true, 0, Opcode::Pong, b"", [1, 2, 3, 4], &mut wire);
                    put_masked(true, 0, Opcode::Binary, b"here", [1, 2, 3, 4], &mut wire);
                    peer.send(&wire).await?;
                    // It may be asked once more.
                    while peer.next().await? != (Opcode::Binary, 4) {}
                    Ok(())
                });
            }
            sim.run_for(Duration::from_secs(32));
            running.stall(0, Duration::from_secs(100));
            sim.run_until_done();
        });
    }
}
