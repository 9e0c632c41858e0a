//! A round trip over loopback, on both drivers: the time a client waits, most of it the kernel's.
//! The server's own share is measured by `ringserve-bench`.

#[path = "support/echo.rs"]
mod echo;

use std::io::{Read, Write};
use std::net::TcpStream;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ringserve::Server;
use ringserve::framing::Raw;
use ringserve::server::Driver;

use echo::Echo;

fn round_trips(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("round trip");
    for (name, driver) in [("io_uring", Driver::IoUring), ("epoll", Driver::Epoll)] {
        let server = Server::bind("127.0.0.1:0").framing(Raw).driver(driver).shards(1).pin(false);
        let running = server.start(|_| Echo).expect("the server starts");
        let mut client = TcpStream::connect(running.local_addrs()[0]).expect("it listens");
        client.set_nodelay(true).expect("a fresh socket takes options");
        for bytes in [64, 16 << 10] {
            let (message, mut reply) = (vec![b'x'; bytes], vec![0; bytes]);
            group.throughput(Throughput::Bytes(bytes as u64));
            group.bench_function(format!("{bytes} bytes on {name}"), |bencher| {
                bencher.iter(|| {
                    client.write_all(&message).expect("it reads");
                    client.read_exact(&mut reply).expect("it answers");
                });
            });
            assert_eq!(reply, message);
        }
        drop(client);
        running.shutdown();
        running.wait().expect("it ends in order");
    }
    group.finish();
}

criterion_group!(benches, round_trips);
criterion_main!(benches);
