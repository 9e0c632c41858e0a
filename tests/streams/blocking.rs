//! Calls that block, and upstreams with names, on threads and sockets.

use std::io::{ErrorKind, Write};
use std::net::TcpListener;
use std::sync::mpsc::channel;
use std::thread;

use ringserve::limits::ServerLimits;
use ringserve::server::Driver;
use ringserve::task::BlockingError;
use ringserve::{Stream, stream};
use ringserve_tests::{Client, On, SOON, no_time_limits, watch};

#[test]
fn shard_goes_on_while_a_thread_beside_it_blocks() {
    for driver in [Driver::IoUring, Driver::Epoll] {
        let server = On { driver, ..On::default() }.server(no_time_limits());
        let server =
            server.server_limits(ServerLimits::default().blocking_threads_max(1).blocking_queue_max(0));
        let (open, gate) = channel::<()>();
        let gate = std::sync::Mutex::new(Some(gate));
        let running = server.start(move |shard| {
            let (shard, gate) = (shard.clone(), gate.lock().unwrap().take());
            let gate = std::cell::Cell::new(gate);
            stream(async move |mut stream: Stream| {
                let answer = match gate.take() {
                    Some(gate) => {
                        let waits = shard.spawn_blocking(move || {
                            gate.recv().unwrap();
                            thread::current().name().unwrap_or_default().to_owned()
                        });
                        stream.queue(b".");
                        waits.await.expect("it runs")
                    }
                    None => match shard.spawn_blocking(|| ()).await {
                        Err(BlockingError::Full) => "full".to_owned(),
                        other => panic!("{other:?}"),
                    },
                };
                stream.write_all(answer.as_bytes()).await
            })
        });
        let running = running.expect("the server starts");
        let mut waits = Client::connect(running.local_addrs()[0]);
        assert_eq!(waits.read(1), b".");
        let mut other = Client::connect(running.local_addrs()[0]);
        assert_eq!(other.read_to_end().0, b"full");
        let blocking = running.stats_now().blocking;
        // The thread may only be on its way to the first one.
        assert_eq!((blocking.threads, blocking.running + blocking.queued, blocking.refused), (1, 1, 1));
        open.send(()).unwrap();
        assert_eq!(waits.read_to_end().0, b"ringserve-blocking");
        let blocking = watch::finish(running).blocking;
        assert_eq!((blocking.threads, blocking.done), (0, 1), "threads end with the server");
    }
}

#[test]
fn upstream_is_found_by_its_name() {
    for driver in [Driver::IoUring, Driver::Epoll] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (tell, told) = channel();
        let running = On { driver, ..On::default() }.server(no_time_limits()).start(move |shard| {
            let (inside, tell) = (shard.clone(), tell.clone());
            shard.spawn(async move {
                // One of its addresses refuses, if it has two.
                let mut upstream = inside.connect(("localhost", port)).await.unwrap();
                tell.send(upstream.read_frame().await.unwrap().map(|bytes| bytes.to_vec()).ok_or(None))
                    .unwrap();
                // A name that no resolver may know (RFC 6761).
                let error = inside.connect("nowhere.invalid:1").await.unwrap_err();
                tell.send(Err(Some((error.kind(), error.to_string())))).unwrap();
            });
            stream(async |_stream: Stream| {})
        });
        let running = running.expect("the server starts");
        listener.accept().unwrap().0.write_all(b"found").unwrap();
        assert_eq!(told.recv_timeout(SOON).unwrap(), Ok(b"found".to_vec()));
        let Err(Some((kind, text))) = told.recv_timeout(SOON).unwrap() else { panic!("it resolves") };
        assert_ne!(kind, ErrorKind::TimedOut);
        assert!(text.starts_with("nowhere.invalid:1 does not resolve: "), "{text}");
        watch::finish(running);
    }
}
