//! A frame on the fast path allocates nothing.
//!
//! The allocator counts for the whole process, so there is one test in this file, and its client
//! allocates nothing while it is counted either.

use std::io::{Read, Write};

use ringserve::Server;
use ringserve::framing::{Framing, LengthPrefix, Lines, Raw};
use ringserve::server::Runtime;
use ringserve_tests::{Client, Lab, On, alone, no_time_limits, order};
use stats_alloc::Region;

const WARM_UP: usize = 1_000;
const FRAMES: usize = 8_000;

#[test]
fn a_frame_allocates_nothing() {
    if !alone(a_frame_allocates_nothing) {
        return;
    }
    // A payload that has the same bytes in every framing except for its ends.
    let payload = [b'e'; 60];
    let line = [&payload[..], b"\n"].concat();
    let length = ringserve_tests::client::frame(payload);
    counts("raw", Raw, &payload, 1);
    counts("lines", Lines::default(), &line, 1);
    counts("lengths", LengthPrefix::default(), &length, 1);
    counts("raw, 16 KiB", Raw, &[b'e'; 16 << 10], 1);
    counts("lines, pipelined", Lines::default(), &line, 16);
    counts("lengths, pipelined", LengthPrefix::default(), &length, 16);
    counts(
        "a deadline that is not needed",
        LengthPrefix::default(),
        &ringserve_tests::client::frame(order::in_time("text")),
        1,
    );
    counts(
        "lengths, large and lent",
        LengthPrefix::default(),
        &ringserve_tests::client::frame(order::echo_of(8_000)),
        1,
    );
    let hosts = [
        Runtime::Tokio,
        #[cfg(feature = "runtime-tokio-uring")]
        Runtime::TokioUring,
    ];
    for host in hosts {
        let server = || {
            On::default().server(no_time_limits().unwatched()).runtime(host).framing(LengthPrefix::default())
        };
        counts_of(&format!("on {host}"), server(), &length, 1);
        counts_of(&format!("on {host}, pipelined"), server(), &length, 16);
    }
}

fn counts<F: Framing + Clone + Send>(what: &str, framing: F, frame: &[u8], pipelined: usize) {
    counts_of(what, On::default().server(no_time_limits().unwatched()).framing(framing), frame, pipelined);
}

fn counts_of<F: Framing + Clone + Send>(what: &str, server: Server<F>, frame: &[u8], pipelined: usize) {
    let lab = Lab::of(server);
    let mut client = lab.client();
    let wire = frame.repeat(pipelined);
    let mut back = vec![0; wire.len()];
    echo(&mut client, &wire, &mut back, WARM_UP);
    let what = format!("{what}: allocations and reallocations in {FRAMES} frames");
    crate::a_pass_fits(
        &what,
        |made| *made == (0, 0),
        || {
            let region = Region::new(crate::ALLOCATOR);
            echo(&mut client, &wire, &mut back, FRAMES / pipelined);
            let change = region.change();
            (change.allocations, change.reallocations)
        },
    );
    assert_eq!(back, wire);
    drop(client);
    lab.finish();
}

fn echo(client: &mut Client, wire: &[u8], back: &mut [u8], rounds: usize) {
    for _ in 0..rounds {
        client.stream.write_all(wire).unwrap();
        client.stream.read_exact(back).unwrap();
    }
}
