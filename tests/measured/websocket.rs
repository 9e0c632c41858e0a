//! Cost of WebSocket: memory of idle connections, and allocations of messages.
//!
//! The allocator counts for the whole process, so each test has one to itself, and its clients
//! allocate nothing while it is counted.

use std::convert::Infallible;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use ringserve::framing::Lines;
use ringserve::websocket::{Message, Messages, WebSocket, WsCx};
use ringserve::{Cx, Frame, ServerHandle, Service, ws};
use ringserve_tests::{On, SOON, alone, no_time_limits, watch};
use ringserve_websocket::frame::{Opcode, put_masked};
use stats_alloc::Region;

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
        cx.send(message);
        Ok(())
    }
}

const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
    Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n";

fn connect(addr: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.write_all(REQUEST).unwrap();
    let mut answer = [0; 129];
    stream.read_exact(&mut answer).unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 101 ") && answer.ends_with(b"\r\n\r\n"));
    stream
}

fn messages() -> ServerHandle {
    let server = On::default().server(no_time_limits().unwatched()).websocket().framing(Messages::default());
    server.start(|_shard| ws(Echo)).expect("the server starts")
}

/// Two chunks of the tables by slot.
const CONNECTIONS: usize = 512;

/// Bytes that each connection takes, once it has sent a message and got it back, in three crowds.
///
/// An allocation that a server makes once is counted in the crowd of that time, so the least is a
/// connection's own.
fn bytes_each(connect: impl Fn() -> TcpStream, wire: &[u8], reply: &[u8]) -> [isize; 3] {
    let mut streams = Vec::with_capacity(3 * CONNECTIONS + 1);
    let mut heard = vec![0; reply.len()];
    let mut ask = || {
        let mut stream = connect();
        stream.write_all(wire).unwrap();
        stream.read_exact(&mut heard).unwrap();
        assert_eq!(heard, reply);
        streams.push(stream);
    };
    // The tables of which the first connection needs a chunk.
    ask();
    [(); 3].map(|()| {
        let region = Region::new(crate::ALLOCATOR);
        (0..CONNECTIONS).for_each(|_| ask());
        let change = region.change();
        (change.bytes_allocated as isize - change.bytes_deallocated as isize) / CONNECTIONS as isize
    })
}

#[test]
fn an_idle_connection_takes_300_bytes_or_less() {
    if !alone(an_idle_connection_takes_300_bytes_or_less) {
        return;
    }
    let plain = On::default().server(no_time_limits().unwatched()).framing(Lines::default());
    let plain = plain.start(|_shard| Echo).expect("the server starts");
    let addr = plain.local_addrs()[0];
    let without = bytes_each(|| TcpStream::connect(addr).unwrap(), b"hello\n", b"hello\n");
    let server = messages();
    let addr = server.local_addrs()[0];
    let mut wire = Vec::new();
    put_masked(true, 0, Opcode::Text, b"hello", [1, 2, 3, 4], &mut wire);
    let with = bytes_each(|| connect(addr), &wire, b"\x81\x05hello");
    println!("{without:?} bytes for a connection without WebSocket, {with:?} with it");
    let least = with.iter().min().unwrap();
    assert!(*least <= BYTES_MAX, "{without:?} bytes without WebSocket, {with:?} with it");
    ringserve_tests::finish(plain);
    ringserve_tests::finish(server);
}

/// In addition to the memory of every connection: the channel, of 32 bytes, and its place in two
/// tables, of 24 and 8.
const BYTES_MAX: isize = 300;

#[test]
fn a_message_allocates_nothing_and_a_large_one_is_lent() {
    if !alone(a_message_allocates_nothing_and_a_large_one_is_lent) {
        return;
    }
    let server = messages();
    let mut stream = connect(server.local_addrs()[0]);
    // Each arrived in one buffer; from 4 KiB on the reply is the received buffer.
    for (len, together) in [(0, 1), (20, 1), (64, 16), (3000, 1), (8000, 1)] {
        let mut wire = Vec::new();
        for _ in 0..together {
            put_masked(true, 0, Opcode::Binary, &vec![7; len], [1, 2, 3, 4], &mut wire);
        }
        let header = if len < 126 { 2 } else { 4 };
        let mut heard = vec![0; together * (header + len)];
        let mut ask = |count: usize| {
            for _ in 0..count {
                stream.write_all(&wire).unwrap();
                stream.read_exact(&mut heard).unwrap();
            }
        };
        ask(200);
        let passes = [(); 3].map(|()| {
            let region = Region::new(crate::ALLOCATOR);
            ask(500);
            let change = region.change();
            change.allocations + change.reallocations
        });
        println!("{together} of {len} bytes: {passes:?} allocations in 500 rounds");
        assert!(passes.contains(&0), "{together} of {len} bytes: {passes:?} allocations");
    }
    drop(stream);
    watch::holds(&server, 0);
    ringserve_tests::finish(server);
}
