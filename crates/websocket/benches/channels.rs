//! Cost of a WebSocket channel and of a reader, in memory and on one thread: time of the fastest
//! run, and instructions under callgrind:
//!
//! ```sh
//! cargo bench -p ringserve-websocket
//! valgrind --tool=callgrind target/release/deps/channels-* CASE ROUNDS
//! ```

use std::hint::black_box;
use std::time::{Duration, Instant};

use ringserve_buf::{Lease, LeaseMut};
use ringserve_core::{Batch, Transport, TransportConn, TransportEvent};
use ringserve_websocket::frame::{Header, Opcode, put_masked};
use ringserve_websocket::reader::Reader;
use ringserve_websocket::{WebSocketOptions, WebSocketTransport, mask, utf8};

/// Runs, of which the fastest counts.
const RUNS: usize = 15;

const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
    Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n";

/// Each with its rounds, and bytes of payload in one.
const CASES: &[(&str, usize, usize)] = &[
    ("open_20", 20_000, 20),
    ("open_16_of_64", 20_000, 16 * 64),
    ("open_4096", 20_000, 4096),
    ("open_4096_cut", 20_000, 4096),
    ("read_20", 20_000, 20),
    ("read_4096", 20_000, 4096),
    ("read_4096_cut", 20_000, 4096),
    ("wrap_64", 100_000, 64),
    ("wrap_16384_lent", 100_000, 16_384),
    ("copy_64", 100_000, 64),
    ("copy_16384_lent", 20_000, 16_384),
    ("unmask_and_check_16384", 20_000, 16_384),
    ("nothing", 1, 0),
];

fn main() {
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--bench");
    if let (Some(case), Some(Ok(rounds))) = (args.next(), args.next().map(|rounds| rounds.parse())) {
        run(&case, rounds);
        return;
    }
    for (case, rounds, bytes) in &CASES[..CASES.len() - 1] {
        let fastest = (0..RUNS).map(|_| run(case, *rounds)).min().unwrap_or_default();
        let nanos = fastest.as_nanos() as f64 / *rounds as f64;
        println!("{case:24} {nanos:9.1} ns  {:7.2} GB/s", *bytes as f64 / nanos);
    }
}

/// The thread's time for the rounds of a case.
fn run(case: &str, rounds: usize) -> Duration {
    match case {
        "open_20" => open(&[&frames(1, 20)], rounds),
        "open_16_of_64" => open(&[&frames(16, 64)], rounds),
        "open_4096" => open(&[&frames(1, 4096)], rounds),
        "open_4096_cut" => open(&cut(&frames(1, 4096)), rounds),
        "read_20" => read(&[&frames(1, 20)], rounds),
        "read_4096" => read(&[&frames(1, 4096)], rounds),
        "read_4096_cut" => read(&cut(&frames(1, 4096)), rounds),
        "wrap_64" => send(false, &[7; 64], false, rounds),
        "wrap_16384_lent" => send(false, &[7; 16_384], true, rounds),
        "copy_64" => send(true, &[7; 64], false, rounds),
        "copy_16384_lent" => send(true, &[7; 16_384], true, rounds),
        "unmask_and_check_16384" => unmask(rounds),
        _ => Duration::ZERO,
    }
}

fn frames(count: usize, len: usize) -> Vec<u8> {
    let mut wire = Vec::new();
    (0..count).for_each(|_| put_masked(true, 0, Opcode::Text, &vec![b'x'; len], [1, 2, 3, 4], &mut wire));
    wire
}

/// Cuts the bytes as segments of a network do.
fn cut(wire: &[u8]) -> Vec<&[u8]> {
    wire.chunks(1448).collect()
}

fn channel() -> Box<dyn TransportConn> {
    let transport = WebSocketTransport::messages(&WebSocketOptions::new());
    let mut channel = transport.begin(&mut Vec::new()).expect("memory");
    let mut wire = LeaseMut::try_copy_of(REQUEST).expect("memory");
    assert!(matches!(channel.decode(&mut wire, &mut Vec::new()), TransportEvent::Ready));
    channel
}

/// Passes received bytes on. Each round copies them, as receiving would.
fn open(pieces: &[&[u8]], rounds: usize) -> Duration {
    let (mut channel, mut out) = (channel(), Vec::new());
    let begun = Instant::now();
    for _ in 0..rounds {
        for piece in pieces {
            let mut wire = LeaseMut::try_copy_of(black_box(piece)).expect("memory");
            while let TransportEvent::Plain(plain) = channel.decode(&mut wire, &mut out) {
                black_box(plain);
            }
        }
    }
    begun.elapsed()
}

/// Reads the same by a connection inside HTTP, whose messages are put together.
fn read(pieces: &[&[u8]], rounds: usize) -> Duration {
    let mut reader = Reader::new(1 << 20, false);
    let begun = Instant::now();
    for _ in 0..rounds {
        for piece in pieces {
            let mut bytes = black_box(*piece);
            while let Some(received) = reader.take(&mut bytes, None).expect("messages") {
                black_box(received);
            }
        }
    }
    begun.elapsed()
}

/// Sends a reply after a header: in place, or `copied` as other channels seal.
fn send(copied: bool, payload: &[u8], lent: bool, rounds: usize) -> Duration {
    let transport = WebSocketTransport::stream(&WebSocketOptions::new());
    let mut channel = transport.begin(&mut Vec::new()).expect("memory");
    let mut wire = LeaseMut::try_copy_of(REQUEST).expect("memory");
    assert!(matches!(channel.decode(&mut wire, &mut Vec::new()), TransportEvent::Ready));
    let (mut batch, mut out, lease) = (Batch::new(), Vec::with_capacity(32_768), Lease::copy_of(payload));
    let begun = Instant::now();
    for _ in 0..rounds {
        batch.clear();
        if lent {
            batch.lend(lease.clone())
        } else {
            batch.put(payload)
        }
        if copied {
            out.clear();
            out.extend_from_slice(&Header::whole(Opcode::Binary, batch.len() as u64).encode());
            batch.pieces().for_each(|piece| out.extend_from_slice(piece));
            black_box(&out);
        } else {
            assert!(channel.encode_in_place(&mut batch));
            black_box(&batch);
        }
    }
    begun.elapsed()
}

fn unmask(rounds: usize) -> Duration {
    let mut bytes = vec![b'x'; 16_384];
    let begun = Instant::now();
    for _ in 0..rounds {
        // Uses a mask that leaves it text.
        mask::apply(black_box(&mut bytes), black_box([0, 0, 0, 0]));
        assert!(utf8::is_text(black_box(&bytes)));
    }
    begun.elapsed()
}
