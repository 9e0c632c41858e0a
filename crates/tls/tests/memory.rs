//! What a connection costs while nothing happens. The only test of its process: it counts what is allocated.

#[path = "channels/pair.rs"]
#[allow(dead_code)]
mod pair;

use std::alloc::System;
use std::sync::Arc;

use pair::{Authority, Pair, client_config, listener_of};
use ringserve_tls::Tls;
use ringserve_tls::rustls::version::{TLS12, TLS13};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

fn allocated() -> isize {
    let stats = ALLOCATOR.stats();
    // Bytes of `realloc` are counted apart.
    stats.bytes_allocated as isize - stats.bytes_deallocated as isize
}

/// Bytes that go with the channel.
fn bytes_of(pair: Pair) -> isize {
    let Pair { channel, .. } = pair;
    let before = allocated();
    drop(channel);
    before - allocated()
}

fn server() -> Tls {
    Tls::server()
}

#[test]
fn idle_connection_takes_less_than_4_kib_and_does_not_grow() {
    bytes_by("rustls 0.23", Tls::server(), 4096);
    #[cfg(feature = "next-ring")]
    bytes_by("rustls 0.24", Tls::server().next(), 3482);
}

fn bytes_by(rustls: &str, tls: Tls, most: isize) {
    let authority = Authority::new("authority");
    let listener = listener_of(tls, &authority);
    for (version, name) in [(&TLS12, "1.2"), (&TLS13, "1.3")] {
        let connect = || {
            let config = Arc::new(client_config(&authority, &[version], None));
            Pair::new(&listener, &config, "localhost").connected()
        };
        // What is made at the first use of a library is not counted.
        drop(connect());
        let idle = bytes_of(connect());
        let mut busy = connect();
        busy.say(&[1; 16 * 1024]);
        busy.reply_bytes(&[2; 16 * 1024]);
        let busy = bytes_of(busy);
        eprintln!("{rustls}, TLS {name}: {idle} bytes idle, {busy} after a frame of 16 KiB each way");
        assert!(idle <= most, "{idle} bytes");
        // The queue of a block that came in, which rustls keeps.
        assert!(busy <= idle + 192, "{idle} bytes grew to {busy}");
    }
}
