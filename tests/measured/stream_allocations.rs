//! Reading and writing a stream allocates nothing, nor does copying bytes from one to another.
//!
//! The allocator counts for the whole process, so there is one test in this file, and its client
//! allocates nothing while it is counted either.

use std::io::{Read, Write};

use ringserve::Stream;
use ringserve::framing::Lines;
use ringserve::net::copy_bidirectional;
use ringserve_tests::{Streams, alone, no_time_limits};
use stats_alloc::Region;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const WARM_UP: usize = 5_000;
const ROUNDS: usize = 8_000;

#[test]
fn a_read_and_a_write_allocate_nothing() {
    if !alone(a_read_and_a_write_allocate_nothing) {
        return;
    }
    let copies = Streams::start(no_time_limits().unwatched(), |_| {
        async |mut stream: Stream| {
            let mut buf = [0; 4096];
            loop {
                let len = stream.read(&mut buf).await.unwrap();
                if len == 0 {
                    return;
                }
                AsyncWriteExt::write_all(&mut stream, &buf[..len]).await.unwrap();
                stream.flush().await.unwrap();
            }
        }
    });
    counts("copied, 64 bytes", &copies, 64);
    counts("copied, 16 KiB", &copies, 16 << 10);
    copies.finish();
    let lends = Streams::start(no_time_limits().unwatched(), |_| {
        async |mut stream: Stream| {
            while let Some(frame) = stream.read_frame().await.unwrap() {
                stream.queue(frame);
                stream.ready().await.unwrap();
            }
        }
    });
    counts("frames, 64 bytes", &lends, 64);
    counts("frames, 16 KiB", &lends, 16 << 10);
    lends.finish();
    let upstream = Streams::start(no_time_limits().unwatched(), |_| {
        async |mut stream: Stream| {
            while let Some(frame) = stream.read_frame().await.unwrap() {
                stream.queue(frame);
            }
        }
    });
    let addr = upstream.addr();
    let proxy = Streams::start(no_time_limits().unwatched(), move |_| {
        async move |mut client: Stream| {
            let mut upstream = client.shard().connect(addr).await.unwrap();
            let _ = copy_bidirectional(&mut client, &mut upstream).await;
        }
    });
    counts("through a proxy, 64 bytes", &proxy, 64);
    counts("through a proxy, 16 KiB", &proxy, 16 << 10);
    proxy.finish();
    let asker = Streams::start(no_time_limits().unwatched(), move |_| {
        async move |mut client: Stream| {
            let upstream = client.shard().connect(addr).await.unwrap();
            let mut upstream = upstream.framed(Lines::default());
            while let Some(frame) = client.read_frame().await.unwrap() {
                upstream.send(frame).await.unwrap();
                let answer = upstream.next().await.unwrap().unwrap();
                client.queue(answer);
            }
        }
    });
    counts("framed, 64 bytes", &asker, 64);
    asker.finish();
    upstream.finish();
}

fn counts(what: &str, server: &Streams, len: usize) {
    let mut client = server.client();
    let bytes = vec![7; len];
    let mut back = vec![0; len];
    let mut echo = |rounds: usize| {
        for _ in 0..rounds {
            client.stream.write_all(&bytes).unwrap();
            client.stream.read_exact(&mut back).unwrap();
        }
    };
    echo(WARM_UP);
    let what = format!("{what}: allocations and reallocations in {ROUNDS} rounds");
    crate::a_pass_fits(
        &what,
        |made| *made == (0, 0),
        || {
            let region = Region::new(crate::ALLOCATOR);
            echo(ROUNDS);
            let change = region.change();
            (change.allocations, change.reallocations)
        },
    );
    drop(client);
    server.holds(0);
}
