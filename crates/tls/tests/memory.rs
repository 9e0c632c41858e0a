//! Memory of an idle connection. The only test of its process: it counts allocations.

#[path = "channels/pair.rs"]
#[allow(dead_code)]
mod pair;

use std::alloc::System;
use std::io::Write;
use std::sync::Arc;

use pair::{Authority, Pair, client_config, listener_of};
use ringserve_buf::LeaseMut;
use ringserve_core::{Batch, TransportEvent};
use ringserve_tls::Tls;
use ringserve_tls::rustls::version::{TLS12, TLS13};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

fn allocated() -> isize {
    let stats = ALLOCATOR.stats();
    // Bytes of `realloc` are counted separately.
    stats.bytes_allocated as isize - stats.bytes_deallocated as isize
}

/// Bytes that are freed with the channel.
fn bytes_of(pair: Pair) -> isize {
    let Pair { channel, .. } = pair;
    let before = allocated();
    drop(channel);
    before - allocated()
}

fn server() -> Tls {
    Tls::server()
}

/// Allocations of a message that comes in one record and goes back in one.
fn made_for_a_message(pair: &mut Pair) -> usize {
    let (mut batch, mut out) = (Batch::new(), Vec::new());
    let mut made = 0;
    // Buffers that have room after the first ones are reused.
    for _ in 0..4 {
        pair.client.writer().write_all(&[7; 64]).unwrap();
        let mut wire = LeaseMut::try_copy_of(&pair.client_bytes()).unwrap();
        let before = ALLOCATOR.stats();
        while let TransportEvent::Plain(plain) = pair.channel.decode(&mut wire, &mut out) {
            batch.put(&plain);
        }
        pair.channel.encode(&batch, &mut out).unwrap();
        let change = ALLOCATOR.stats() - before;
        made = change.allocations + change.reallocations;
        assert_eq!(batch.len(), 64);
        batch.clear();
        out.clear();
    }
    made
}

#[test]
fn connection_takes_4_kib_and_messages_what_rustls_allocates() {
    // The received plaintext, and the record to be sent: rustls returns both in blocks.
    costs_by("rustls 0.23", Tls::server(), 4096, 2);
}

fn costs_by(rustls: &str, tls: Tls, most: isize, allocations: usize) {
    let authority = Authority::new("authority");
    let listener = listener_of(tls, &authority);
    for (version, name) in [(&TLS12, "1.2"), (&TLS13, "1.3")] {
        let connect = || {
            let config = Arc::new(client_config(&authority, &[version], None));
            Pair::new(&listener, &config, "localhost").connected()
        };
        // Allocations at the first use of a library are not counted.
        drop(connect());
        let idle = bytes_of(connect());
        let mut busy = connect();
        busy.say(&[1; 16 * 1024]);
        busy.reply_bytes(&[2; 16 * 1024]);
        let made = made_for_a_message(&mut busy);
        let busy = bytes_of(busy);
        eprintln!("{rustls}, TLS {name}: {idle} bytes idle, {busy} after a frame of 16 KiB each way");
        assert!(idle <= most, "{idle} bytes");
        assert_eq!(made, allocations, "for a message of 64 bytes");
        // The queue of a received block, which rustls keeps.
        assert!(busy <= idle + 192, "{idle} bytes grew to {busy}");
    }
}
