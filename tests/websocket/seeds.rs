//! WebSocket by seed, in virtual time: with faults, and with slow peers.

use std::cell::Cell;
use std::convert::Infallible;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use ringserve::framing::Lines;
use ringserve::overload::{Load, Shed};
use ringserve::testing::{ClientStream, Faults, Net, Sim};
use ringserve::websocket::{Message, Messages, WebSocket, WsCx};
use ringserve::{CloseReason, Cx, Frame, Limits, Server, Service, ws};
use ringserve_websocket::frame::{DecodeOutcome, Header, Opcode, put_masked};

use crate::client::request;

const ADDR: &str = "10.0.0.1:7000";

struct Echo;

impl Service for Echo {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        cx.reply(frame);
        Ok(())
    }
}

impl WebSocket for Echo {
    type Session = ();
    type Error = Infallible;

    async fn message(&self, cx: &WsCx<'_, ()>, message: Message) -> Result<(), Infallible> {
        cx.sleep(Duration::from_millis(message.as_bytes().len() as u64 % 4)).await;
        cx.send(message);
        Ok(())
    }
}

/// Sends bytes cut anywhere, with pauses.
async fn send_in_pieces(net: &Net, me: &mut ClientStream, mut wire: &[u8]) -> io::Result<()> {
    while !wire.is_empty() {
        let most = [1, 7, 200, 20_000][(net.random() % 4) as usize];
        let (piece, rest) = wire.split_at((1 + net.random() as usize % most).min(wire.len()));
        me.send(piece).await?;
        wire = rest;
        if net.random().is_multiple_of(4) {
            net.sleep(Duration::from_millis(net.random() % 20)).await;
        }
    }
    Ok(())
}

/// The next frame of the server.
async fn recv(me: &mut ClientStream) -> io::Result<(Opcode, Vec<u8>)> {
    let mut head = me.exactly(2).await?;
    loop {
        match Header::decode(&head).expect("the server keeps the rules") {
            DecodeOutcome::Header(header, _) => {
                assert!(header.fin && header.rsv == 0 && header.mask.is_none());
                return Ok((header.opcode, me.exactly(header.len as usize).await?));
            }
            DecodeOutcome::Needs(size) => {
                let more = me.exactly(size - head.len()).await?;
                head.extend(more);
            }
        }
    }
}

async fn upgrade(net: &Net, me: &mut ClientStream) -> io::Result<()> {
    send_in_pieces(net, me, request("/").as_bytes()).await?;
    let mut is_first = true;
    while let Some(line) = me.line().await? {
        assert!(!std::mem::take(&mut is_first) || line == "HTTP/1.1 101 Switching Protocols", "{line}");
        if line.is_empty() {
            return Ok(());
        }
    }
    Err(io::ErrorKind::UnexpectedEof.into())
}

/// A message in fragments, with pings between them.
fn put_message(net: &Net, opcode: Opcode, payload: &[u8], wire: &mut Vec<u8>) -> usize {
    let mask = (net.random() as u32).to_be_bytes();
    let (mut opcode, mut rest, mut pings) = (opcode, payload, 0);
    loop {
        let cut = if net.random().is_multiple_of(3) {
            rest.len()
        } else {
            net.random() as usize % (rest.len() + 1)
        };
        let (fragment, more) = rest.split_at(cut);
        put_masked(more.is_empty(), 0, opcode, fragment, mask, wire);
        if net.random().is_multiple_of(4) {
            put_masked(true, 0, Opcode::Ping, b"ping", mask, wire);
            pings += 1;
        }
        if more.is_empty() {
            return pings;
        }
        (opcode, rest) = (Opcode::Continuation, more);
    }
}

/// One client's conversation; it ends early if a fault ends the connection.
async fn converse(net: &Net, messages: bool, done: &Cell<usize>) -> io::Result<()> {
    let mut me = net.connect(ADDR).await?;
    upgrade(net, &mut me).await?;
    let (mut pings, mut pongs) = (0, 0);
    for round in 0..8 {
        let size = [0, 1, 10, 300, 5000, 70_000][(net.random() % 6) as usize];
        let mut payload: Vec<u8> = (0..size).map(|n| b'a' + (n + round) as u8 % 26).collect();
        let opcode = if net.random().is_multiple_of(2) { Opcode::Text } else { Opcode::Binary };
        if !messages {
            payload.push(b'\n');
        }
        let mut wire = Vec::new();
        pings += put_message(net, opcode, &payload, &mut wire);
        send_in_pieces(net, &mut me, &wire).await?;
        let mut heard = Vec::new();
        // A message comes back as it was; for a stream, the replies of a turn come.
        loop {
            let (kind, bytes) = recv(&mut me).await?;
            match kind {
                Opcode::Pong => pongs += 1,
                kind => {
                    assert_eq!(kind, if messages { opcode } else { Opcode::Binary });
                    heard.extend(bytes);
                    if messages || heard.len() == payload.len() {
                        break;
                    }
                }
            }
        }
        assert!(heard == payload, "{} of {} bytes", heard.len(), payload.len());
        assert!(pongs <= pings);
        done.set(done.get() + 1);
    }
    let mut wire = Vec::new();
    put_masked(true, 0, Opcode::Close, &4000u16.to_be_bytes(), [5; 4], &mut wire);
    send_in_pieces(net, &mut me, &wire).await?;
    loop {
        match recv(&mut me).await? {
            (Opcode::Pong, _) => {}
            (Opcode::Close, code) => {
                // A drain may be quicker than the peer.
                let code = u16::from_be_bytes(*code.first_chunk().expect("a code"));
                assert!([4000, 1001].contains(&code), "{code}");
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(me.closed().await?, b"");
    Ok(())
}

fn campaign(messages: bool) -> usize {
    let done = Rc::new(Cell::new(0));
    let count = done.clone();
    Sim::seeds(60).faults(Faults::all()).run(move |sim| {
        let server = Server::bind(ADDR).websocket().shards(1 + sim.random() as usize % 2);
        match messages {
            true => sim.serve(server.framing(Messages::default()), |_shard| ws(Echo)),
            false => sim.serve(server.framing(Lines::default()), |_shard| Echo),
        };
        sim.expect_losses();
        for n in 0..4 {
            let done = count.clone();
            sim.client(format!("c{n}"), async move |net| {
                let _ = converse(&net, messages, &done).await;
                Ok(())
            });
        }
        sim.run_for(Duration::from_secs(600));
    });
    done.get()
}

#[test]
fn messages_come_back_with_all_faults() {
    let done = campaign(true);
    assert!(done > 60 * 32 / 4, "{done} messages");
}

#[test]
fn lines_in_messages_come_back_with_all_faults() {
    let done = campaign(false);
    assert!(done > 60 * 32 / 4, "{done} lines");
}

/// Checks that a peer with this behaviour ends for this reason, within this time, and receives
/// these last bytes.
fn ends<C>(reason: CloseReason, within: Duration, last: &'static [u8], peer: C)
where
    C: AsyncFn(&Net, &mut ClientStream) -> io::Result<()> + Copy + 'static,
{
    Sim::seeds(5).faults(Faults::none()).run(move |sim| {
        let limits = Limits::default().idle_timeout(None).first_frame_timeout(None);
        let server = Server::bind(ADDR).websocket().framing(Messages::default()).limits(limits);
        let server = sim.start(server, |_shard| ws(Echo)).unwrap();
        sim.client("slow", async move |net| {
            let mut me = net.connect(ADDR).await?;
            // It may be ended in the middle of what it sends.
            let _ = peer(&net, &mut me).await;
            assert_eq!(me.closed().await?, last);
            assert!(net.now() < within, "it took {:?}", net.now());
            Ok(())
        });
        sim.run_until_done();
        assert_eq!(server.stats().counters.closed_for(reason), 1);
    });
}

#[test]
fn a_request_of_a_byte_a_second_ends_at_the_handshake_limit() {
    let within = Duration::from_secs(15);
    ends(CloseReason::HandshakeTimeout, within, b"", async |net, me| {
        for byte in request("/").as_bytes() {
            me.send([*byte]).await?;
            net.sleep(Duration::from_secs(1)).await;
        }
        Ok(())
    });
}

#[test]
fn half_a_request_ends_at_the_handshake_limit() {
    let within = Duration::from_secs(15);
    ends(CloseReason::HandshakeTimeout, within, b"", async |_net, me| me.send(&request("/")[..100]).await);
}

#[test]
fn slow_fragments_and_slow_headers_are_too_slow() {
    let (within, last) = (Duration::from_secs(30), b"\x88\x02\x03\xf0");
    ends(CloseReason::ReadTooSlow, within, last, async |net, me| {
        upgrade(net, me).await?;
        for n in 0..100 {
            let mut wire = Vec::new();
            let opcode = if n == 0 { Opcode::Binary } else { Opcode::Continuation };
            put_masked(false, 0, opcode, b"x", [1; 4], &mut wire);
            me.send(&wire).await?;
            net.sleep(Duration::from_secs(1)).await;
        }
        Ok(())
    });
    ends(CloseReason::ReadTooSlow, within, last, async |net, me| {
        upgrade(net, me).await?;
        for byte in [0x82, 0xff, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 1, 1] {
            me.send([byte]).await?;
            net.sleep(Duration::from_secs(2)).await;
        }
        Ok(())
    });
    // A payload of a byte a second: the framing waits for it.
    ends(CloseReason::ReadTooSlow, within, last, async |net, me| {
        upgrade(net, me).await?;
        let mut wire = Vec::new();
        put_masked(true, 0, Opcode::Binary, &[1; 200], [1; 4], &mut wire);
        for byte in wire {
            me.send([byte]).await?;
            net.sleep(Duration::from_secs(1)).await;
        }
        Ok(())
    });
}

/// Sends each message back, or that it is busy; texts are shed.
#[derive(Clone, Default)]
struct Sheds {
    shed: Rc<Cell<u64>>,
    called: Rc<Cell<u64>>,
}

impl WebSocket for Sheds {
    type Session = ();
    type Error = Infallible;

    async fn message(&self, cx: &WsCx<'_, ()>, message: Message) -> Result<(), Infallible> {
        self.called.set(self.called.get() + 1);
        cx.send(message);
        Ok(())
    }

    fn shed(&self, cx: &WsCx<'_, ()>, message: &Message, load: Load) -> Shed {
        let Some(text) = message.as_text().filter(|_| load >= Load::Shedding) else { return Shed::Serve };
        self.shed.set(self.shed.get() + 1);
        cx.send(format!("busy {text}"));
        Shed::Answered
    }
}

#[test]
fn each_message_is_served_or_shed_once_and_in_its_order() {
    let shed = Cell::new(0);
    Sim::seeds(40).faults(Faults::harmless()).run(|sim| {
        let sheds = Sheds::default();
        let made = sheds.clone();
        let server = Server::bind(ADDR).websocket().framing(Messages::text());
        let running = sim.start(server, move |_shard| ws(made.clone())).expect("the server starts");
        for n in 0..3u8 {
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(ADDR).await?;
                upgrade(&net, &mut me).await?;
                for number in 0..20u8 {
                    let opcode = if number % 4 == 0 { Opcode::Binary } else { Opcode::Text };
                    let said = format!("{n}.{number}");
                    let mut wire = Vec::new();
                    put_masked(true, 0, opcode, said.as_bytes(), [n; 4], &mut wire);
                    send_in_pieces(&net, &mut me, &wire).await?;
                    let (kind, heard) = recv(&mut me).await?;
                    let is_busy = kind == Opcode::Text && heard == format!("busy {said}").as_bytes();
                    assert!(kind == opcode && (heard == said.as_bytes() || is_busy), "{heard:?}");
                }
                let mut wire = Vec::new();
                put_masked(true, 0, Opcode::Close, &4000u16.to_be_bytes(), [5; 4], &mut wire);
                me.send(&wire).await?;
                assert_eq!(recv(&mut me).await?.0, Opcode::Close);
                Ok(())
            });
        }
        for (load, share) in [(Load::Shedding, 0.5), (Load::Busy, 1.0), (Load::Full, 0.5), (Load::Calm, 0.0)]
        {
            running.set_load(load, share);
            sim.run_for(Duration::from_millis(sim.random() % 60));
        }
        sim.run_until_done();
        sim.finish();
        assert_eq!(running.stats().counters.frames_shed, sheds.shed.get());
        assert_eq!(sheds.shed.get() + sheds.called.get(), 60);
        shed.set(shed.get() + sheds.shed.get());
    });
    assert!(shed.get() > 100, "{}", shed.get());
}
