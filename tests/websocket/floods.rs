//! Peers that send without end, and take nothing.

use std::io::{Read, Write};
use std::thread;

use ringserve::framing::{Lines, Raw};
use ringserve::limits::ServerLimits;
use ringserve::websocket::{
    Deflate, Extension, Message, Messages, PerMessageDeflate, WebSocket, WebSocketOptions, WsCx,
};
use ringserve::{CloseReason, Cx, Frame, Limits, Server, ServerHandle, Service, ws};
use ringserve_tests::SOON;
use ringserve_tests::eventually;
use ringserve_websocket::frame::{Opcode, put_masked};

use crate::client::{ByHand, drivers, request, server, shut_down, tcp_to};

struct Echo;

impl Service for Echo {
    type Session = ();
    type Error = std::convert::Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
        cx.reply(frame);
        Ok(())
    }
}

const PINGS: u32 = 1_000_000;

#[test]
fn a_million_pings_of_a_peer_that_takes_nothing_hold_one_pong() {
    for driver in drivers() {
        let server = server(driver).websocket().framing(Lines::default()).start(|_shard| Echo).unwrap();
        let mut by_hand = ByHand::connect(server.local_addrs()[0]);
        let mut wire = Vec::new();
        for n in 0..PINGS {
            put_masked(true, 0, Opcode::Ping, &n.to_be_bytes(), [1, 2, 3, 4], &mut wire);
        }
        let received = wire.len() as u64;
        // All of it is taken, although its answers are not.
        by_hand.stream.write_all(&wire).unwrap();
        eventually("all of it was received", SOON, || server.stats().counters.bytes_received >= received);
        let mut stream = by_hand.stream.try_clone().unwrap();
        let reader = thread::spawn(move || {
            let (mut heard, mut last, mut count) = ([0; 6], None, 0);
            while last != Some(PINGS - 1) {
                stream.read_exact(&mut heard).unwrap();
                let [0x8a, 4, payload @ ..] = heard else { panic!("{heard:x?}") };
                let n = u32::from_be_bytes(payload);
                assert!(last < Some(n), "pongs are in order, each once");
                (last, count) = (Some(n), count + 1);
            }
            count
        });
        let pongs = reader.join().unwrap();
        // One pong for pings that came together, and not one for each.
        assert!((1..PINGS / 20).contains(&pongs), "{pongs} pongs");
        by_hand.send(true, Opcode::Text, b"hello\n");
        assert_eq!(by_hand.recv(), (Opcode::Binary, b"hello\n".to_vec()));
        drop(by_hand);
        shut_down(server);
    }
}

/// Takes its time for each message, and returns its length.
struct Slow;

impl WebSocket for Slow {
    type Session = ();
    type Error = std::convert::Infallible;

    async fn message(&self, cx: &WsCx<'_, ()>, message: Message) -> Result<(), Self::Error> {
        cx.sleep(std::time::Duration::from_millis(1)).await;
        cx.send(message.as_bytes().len().to_string());
        Ok(())
    }
}

const BYTES: usize = 1 << 20;
const MESSAGES: usize = 64;

/// Messages that take a few KiB each, and inflate to a MiB.
fn small() -> Vec<u8> {
    let mut deflate = PerMessageDeflate::new(Deflate::default());
    let compressed = deflate.compress(&vec![b'x'; BYTES]).unwrap();
    let mut wire = Vec::new();
    (0..MESSAGES).for_each(|_| put_masked(true, 4, Opcode::Text, compressed, [1, 2, 3, 4], &mut wire));
    wire
}

/// A server that may hold less than their inflated size together.
pub fn inflates(server: Server<Raw>) -> ServerHandle {
    let server = server.server_limits(ServerLimits::default().held_bytes_max(8 * BYTES));
    let server = server.limits(Limits::default().outbox_bytes_max(BYTES));
    let options = WebSocketOptions::new().deflate(Deflate::default());
    server.websocket_with(options).framing(Messages::default()).start(|_shard| ws(Slow)).unwrap()
}

/// Sends the messages to it, and receives an answer to each.
pub fn are_answered(mut stream: impl Read + Write) {
    let offer = "\r\nSec-WebSocket-Extensions: permessage-deflate\r\n\r\n";
    stream.write_all(request("/").replace("\r\n\r\n", offer).as_bytes()).unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        answer.extend(byte);
    }
    assert!(String::from_utf8(answer).unwrap().contains("permessage-deflate"));
    stream.write_all(&small()).unwrap();
    let mut heard = [0; 9];
    for _ in 0..MESSAGES {
        stream.read_exact(&mut heard).unwrap();
        assert_eq!(&heard, b"\x81\x071048576");
    }
}

#[test]
fn messages_that_inflate_wait_as_they_came() {
    for driver in drivers() {
        let server = inflates(server(driver));
        are_answered(tcp_to(server.local_addrs()[0]));
        shut_down(server);
    }
}

/// Waits.
struct Silent;

impl Service for Silent {
    type Session = ();
    type Error = std::convert::Infallible;

    async fn call(&self, _: &Cx<'_, ()>, _: Frame) -> Result<(), Self::Error> {
        Ok(())
    }
}

#[test]
fn target_of_a_request_counts_as_held_while_connected() {
    const TARGET_BYTES: usize = 6000;
    let limits = Limits::default().frame_bytes_max(16 << 10).inbox_bytes_high(16 << 10);
    let limits = limits.outbox_bytes_high(16 << 10).outbox_bytes_low(4 << 10).outbox_bytes_max(16 << 10);
    for driver in drivers() {
        let held = ServerLimits::default().held_bytes_max(20 * TARGET_BYTES);
        let server = server(driver).server_limits(held).limits(limits.clone()).websocket();
        let server = server.framing(Lines::default()).start(|_shard| Silent).unwrap();
        let ask = request(&format!("/{}", "x".repeat(TARGET_BYTES - 1)));
        let connect = || {
            let mut stream = tcp_to(server.local_addrs()[0]);
            stream.write_all(ask.as_bytes()).unwrap();
            stream
        };
        let of_memory = || server.stats().counters.closed_for(CloseReason::MemoryLimit);
        let streams: Vec<_> = (0..30).map(|_| connect()).collect();
        eventually("some go", SOON, || of_memory() >= 30 - 20);
        let gone = of_memory();
        drop(streams);
        eventually("all are gone", SOON, || server.stats().connections == 0);
        // The memory that they held is free again.
        let streams: Vec<_> = (0..15).map(|_| connect()).collect();
        eventually("all are let in", SOON, || server.stats().counters.handshakes_done == 30 + 15);
        eventually("all stay", SOON, || server.stats().connections == 15);
        assert_eq!(of_memory(), gone);
        drop(streams);
        shut_down(server);
    }
}
