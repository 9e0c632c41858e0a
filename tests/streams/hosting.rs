//! Shards inside runtimes of tokio's, with things that need one.

#[path = "../../benches/support/echo.rs"]
mod echo;

use std::convert::Infallible;
use std::future::{pending, poll_fn};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::task::Poll;
use std::time::{Duration, Instant};

use self::echo::Echo;
use ringserve::framing::{LengthPrefix, Lines};
use ringserve::net::copy_bidirectional;
use ringserve::server::{Driver, Runtime};
use ringserve::{CloseReason, Cx, Frame, Server, ServerHandle, Service, Shard, Stream, stream};
use ringserve_tests::Bounds;
use ringserve_tests::client::End;
use ringserve_tests::{Client, On, SOON, eventually, no_time_limits, pattern, watch};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{mpsc, oneshot};

/// Every way to be hosted, on the driver that the environment selects.
const HOSTS: &[Runtime] = &[
    Runtime::Tokio,
    #[cfg(feature = "runtime-tokio-uring")]
    Runtime::TokioUring,
];

fn server(host: Runtime, limits: Bounds) -> Server {
    On::default().server(limits).runtime(host)
}

/// Runs a test for every host available here.
#[track_caller]
fn on_each(test: impl Fn(Runtime)) {
    for host in HOSTS {
        eprintln!("on {host}");
        test(*host);
    }
}

fn client(running: &ServerHandle) -> Client {
    Client::connect(running.local_addrs()[0])
}

/// Answers each line in a way that needs a runtime.
struct Ways {
    upstream: SocketAddr,
    counter: mpsc::UnboundedSender<oneshot::Sender<u64>>,
}

impl Ways {
    fn new(upstream: SocketAddr) -> Ways {
        let (counter, mut asked) = mpsc::unbounded_channel::<oneshot::Sender<u64>>();
        // In the factory there is a runtime too.
        tokio::task::spawn_local(async move {
            let mut count = 0;
            while let Some(answer) = asked.recv().await {
                count += 1;
                let _ = answer.send(count);
            }
        });
        Ways { upstream, counter }
    }
}

impl Service for Ways {
    type Session = ();
    type Error = std::io::Error;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
        match &*frame {
            b"timeout" => {
                let timed_out = tokio::time::timeout(Duration::from_millis(20), pending::<()>()).await;
                assert!(timed_out.is_err());
            }
            b"channel" => {
                let (answer, answered) = oneshot::channel();
                self.counter.send(answer).expect("the counter counts");
                let count = answered.await.expect("it answers");
                assert!(count > 0);
            }
            b"local" => {
                let text = Rc::new("local");
                let shared = text.clone();
                tokio::task::spawn_local(async move {
                    tokio::task::yield_now().await;
                    drop(shared);
                })
                .await
                .expect("it is done");
                assert_eq!(Rc::strong_count(&text), 1);
            }
            b"blocking" => {
                let thread =
                    tokio::task::spawn_blocking(|| std::thread::current().id()).await.expect("it is done");
                assert_ne!(thread, std::thread::current().id());
            }
            b"socket" => {
                let mut upstream = tokio::net::TcpStream::connect(self.upstream).await?;
                upstream.write_all(b"ping\n").await?;
                let mut pong = [0; 5];
                upstream.read_exact(&mut pong).await?;
                assert_eq!(&pong, b"ping\n");
            }
            #[cfg(feature = "runtime-tokio-uring")]
            b"file" => {
                let file = ringserve::tokio_uring::fs::File::open("/proc/self/stat").await?;
                let (read, _) = file.read_at(vec![0; 100], 0).await;
                assert!(read? > 0);
                file.close().await?;
            }
            b"shard" => cx.sleep(Duration::from_millis(5)).await,
            _ => {}
        }
        cx.reply(frame);
        Ok(())
    }
}

#[test]
fn tokio_works_in_handlers() {
    let upstream = On::default().server(no_time_limits()).framing(Lines::default()).start(|_| Echo).unwrap();
    let to = upstream.local_addrs()[0];
    on_each(|host| {
        let running = server(host, no_time_limits()).framing(Lines::default()).start(move |_| Ways::new(to));
        let running = running.unwrap();
        let mut client = client(&running);
        for _ in 0..3 {
            for way in ["echo", "timeout", "channel", "local", "blocking", "socket", "shard"] {
                client.write(format!("{way}\n").as_bytes());
                assert_eq!(client.read(way.len() + 1), format!("{way}\n").as_bytes());
            }
        }
        drop(client);
        watch::finish(running);
    });
    watch::finish(upstream);
}

/// Each of many connections asks again as soon as it is answered, in ways that wake the shard from
/// everywhere. A lost wake-up leaves one of them without an answer.
#[test]
fn no_wake_up_is_lost_among_a_thousand_connections() {
    const CONNECTIONS: usize = 1000;
    const ASKS: usize = 20;
    let upstream = On::default().server(no_time_limits()).framing(Lines::default()).start(|_| Echo).unwrap();
    let to = upstream.local_addrs()[0];
    on_each(|host| {
        let running = server(host, no_time_limits()).framing(Lines::default()).start(move |_| Ways::new(to));
        let running = running.unwrap();
        let mut clients: Vec<Client> = (0..CONNECTIONS).map(|_| client(&running)).collect();
        for round in 0..ASKS {
            for (n, client) in clients.iter_mut().enumerate() {
                // Most are answered at once, so that turns are full; others come back later, one by
                // one.
                let ways: &[u8] = match (n + round) % 10 {
                    0 => b"channel\n",
                    1 => b"local\n",
                    2 => b"timeout\n",
                    3 => b"shard\n",
                    _ => b"echo\n",
                };
                client.write(ways);
            }
            for (n, client) in clients.iter_mut().enumerate() {
                let len = match (n + round) % 10 {
                    0 | 2 => 8,
                    1 | 3 => 6,
                    _ => 5,
                };
                client.read(len);
            }
        }
        drop(clients);
        watch::finish(running);
    });
    watch::finish(upstream);
}

/// Waits until this thread has nothing to do, so that its shard sleeps. Another thread looks, and
/// its message wakes only this task.
async fn until_the_thread_sleeps() {
    let status = format!("/proc/self/task/{}/stat", rustix::thread::gettid().as_raw_nonzero());
    let (tell, told) = oneshot::channel();
    let looks = std::thread::spawn(move || {
        eventually("the thread sleeps", SOON, || {
            let status = std::fs::read_to_string(&status).expect("the thread is there");
            status.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('S'))
        });
        tell.send(()).expect("the task waits");
    });
    told.await.expect("the thread sleeps within the bound");
    looks.join().expect("it looked");
}

/// Tasks of tokio's that hold connections: only their actions inform the shard, which sleeps.
#[test]
fn tasks_of_the_runtime_reach_a_shard_that_sleeps() {
    on_each(|host| {
        let upstream =
            On::default().server(no_time_limits()).framing(LengthPrefix::default()).start(|_| Echo);
        let upstream = upstream.unwrap();
        let to = upstream.local_addrs()[0];
        let running = server(host, no_time_limits()).start(move |_shard| {
            stream(async move |mut stream: Stream| {
                let done = tokio::task::spawn_local(async move {
                    let mut byte = [0; 1];
                    while stream.read(&mut byte).await? > 0 {
                        until_the_thread_sleeps().await;
                        match byte[0] {
                            b'w' => AsyncWriteExt::write_all(&mut stream, b"written").await?,
                            b's' => {
                                stream.shard().sleep(Duration::from_millis(5)).await;
                                stream.queue(b"slept".as_slice());
                            }
                            b't' => {
                                let (tell, told) = oneshot::channel();
                                stream.shard().spawn(async move { tell.send(()).unwrap() });
                                told.await.unwrap();
                                stream.queue(b"spawned".as_slice());
                            }
                            b'u' => {
                                let upstream = stream.shard().connect(to).await?;
                                upstream.queue([0, 0, 0, 4, b'p', b'i', b'n', b'g'].as_slice());
                                let mut upstream = upstream;
                                let pong = upstream.read_frame().await?.expect("an answer");
                                stream.queue(&pong[4..]);
                            }
                            b'c' => stream.end_writing(),
                            _ => return Err(ErrorKind::InvalidInput.into()),
                        }
                    }
                    std::io::Result::Ok(())
                });
                done.await.expect("it does not panic")
            })
        });
        let running = running.unwrap();
        let mut client = client(&running);
        // Each takes a few milliseconds. If something does not wake the shard, its own timers do
        // after a second.
        let started = Instant::now();
        for (ask, answer) in [
            ("w", "written"),
            ("s", "slept"),
            ("s", "slept"),
            ("s", "slept"),
            ("t", "spawned"),
            ("u", "ping"),
        ]
        .repeat(20)
        {
            client.write(ask.as_bytes());
            assert_eq!(client.read(answer.len()), answer.as_bytes(), "{ask}");
        }
        assert!(started.elapsed() < Duration::from_secs(15), "120 answers took {:?}", started.elapsed());
        client.write(b"c");
        assert_eq!(client.end(), End::Fin);
        drop(client);
        watch::finish(running);
        watch::finish(upstream);
    });
}

/// Keeps every frame but a ping in a task of the runtime, until it is ordered to let go.
struct Keeper {
    keep: mpsc::UnboundedSender<Frame>,
}

impl Keeper {
    fn new(mut release: mpsc::UnboundedReceiver<()>) -> Keeper {
        let (keep, mut kept) = mpsc::unbounded_channel();
        tokio::task::spawn_local(async move {
            let mut frames: Vec<Frame> = Vec::new();
            loop {
                tokio::select! {
                    // A frame that was answered before the release is one of them.
                    biased;
                    frame = kept.recv() => match frame {
                        Some(frame) => frames.push(frame),
                        None => return,
                    },
                    Some(()) = release.recv() => frames.clear(),
                }
            }
        });
        Keeper { keep }
    }
}

impl Service for Keeper {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        if &*frame == b"ping" {
            cx.reply(frame);
        } else {
            cx.reply(b"kept".as_slice());
            let _ = self.keep.send(frame);
        }
        Ok(())
    }
}

#[test]
fn buffer_given_back_by_a_task_wakes_a_receive() {
    const BUFFERS: usize = 4;
    on_each(|host| {
        let limits = no_time_limits().receive_buffer_bytes(4096).receive_bytes_max(BUFFERS * 4096);
        let (release, released) = mpsc::unbounded_channel();
        let released = std::sync::Mutex::new(Some(released));
        let server = server(host, limits).framing(LengthPrefix::default());
        let running = server
            .start(move |_| Keeper::new(released.lock().unwrap().take().expect("there is one shard")))
            .unwrap();
        for round in 1..=3 {
            // Each frame fills most of a buffer, so it is lent, and pins it.
            let mut keepers: Vec<Client> = (0..BUFFERS).map(|_| client(&running)).collect();
            for keeper in &mut keepers {
                assert_eq!(keeper.ask("x".repeat(3000)), b"kept");
            }
            // Arming a receive without a buffer may park it, before anything is sent.
            let before = running.stats_now().shards[0].driver.receives_parked;
            let mut waiting = client(&running);
            waiting.write(b"\0\0\0\x04ping");
            eventually("the receive waits for a buffer", SOON, || {
                running.stats_now().shards[0].driver.receives_parked > before
            });
            // Nothing else happens on the shard from here on.
            release.send(()).unwrap();
            assert_eq!(waiting.read(8), b"\0\0\0\x04ping", "round {round}");
        }
        watch::finish(running);
    });
}

#[cfg(feature = "runtime-tokio-uring")]
#[test]
fn files_of_tokio_uring_are_read_in_handlers() {
    struct Files;
    impl Service for Files {
        type Session = ();
        type Error = std::io::Error;
        async fn call(&self, cx: &Cx<'_, ()>, name: Frame) -> Result<(), Self::Error> {
            let name = std::str::from_utf8(&name).map_err(std::io::Error::other)?.to_owned();
            let file = ringserve::tokio_uring::fs::File::open(name).await?;
            let (read, bytes) = file.read_at(vec![0; 64 << 10], 0).await;
            cx.write(&bytes[..read?]);
            file.close().await?;
            cx.close();
            Ok(())
        }
    }
    let path = std::env::temp_dir().join(format!("ringserve-hosting-{}", std::process::id()));
    std::fs::write(&path, pattern(50_000)).unwrap();
    let running =
        server(Runtime::TokioUring, no_time_limits()).framing(Lines::default()).start(|_| Files).unwrap();
    for _ in 0..10 {
        let mut client = client(&running);
        client.write(format!("{}\n", path.display()).as_bytes());
        assert!(client.read(50_000) == pattern(50_000));
        assert_eq!(client.end(), End::Fin);
    }
    let mut client = client(&running);
    client.write(b"/nowhere\n");
    assert_eq!(client.end(), End::Fin);
    drop(client);
    watch::closed_for(&running, CloseReason::HandlerError, 1);
    watch::finish(running);
    std::fs::remove_file(path).unwrap();
}

/// tokio-uring submits only when its runtime has nothing else to do, which a busy shard must allow.
#[test]
fn a_busy_shard_lets_the_runtime_go_on() {
    on_each(|host| {
        let turns = Arc::new(AtomicU64::new(0));
        let counted = turns.clone();
        let running = server(host, no_time_limits()).framing(Lines::default()).start(move |shard: &Shard| {
            let counted = counted.clone();
            // It requests another turn in each turn, for ever.
            shard.spawn(async move {
                poll_fn::<(), _>(|task| {
                    counted.fetch_add(1, SeqCst);
                    task.waker().wake_by_ref();
                    Poll::Pending
                })
                .await;
            });
            Ways::new(([127, 0, 0, 1], 1).into())
        });
        let running = running.unwrap();
        let mut client = client(&running);
        let file = (host.to_string() == "tokio-uring").then_some("file");
        for way in ["timeout", "local", "blocking", "channel"].into_iter().chain(file) {
            client.write(format!("{way}\n").as_bytes());
            assert_eq!(client.read(way.len() + 1), format!("{way}\n").as_bytes());
        }
        let before = turns.load(SeqCst);
        eventually("it turns", SOON, || turns.load(SeqCst) > before + 100);
        drop(client);
        running.abort();
        watch::ended(running);
    });
}

/// Its answer comes after a while in which nothing happens.
struct Pauses;

impl Service for Pauses {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        cx.sleep(Duration::from_millis(300)).await;
        cx.reply(frame);
        Ok(())
    }
}

#[test]
fn a_hosted_shard_that_has_nothing_to_do_does_nothing() {
    on_each(|host| {
        let running = server(host, no_time_limits()).framing(Lines::default()).start(|_| Pauses).unwrap();
        let mut client = client(&running);
        let before = running.stats_now().shards[0].driver.turns;
        client.write(b"hello\n");
        client.read(6);
        let turns = running.stats_now().shards[0].driver.turns - before;
        assert!(turns < 20, "{turns} turns for one answer");
        drop(client);
        watch::finish(running);
    });
}

#[test]
fn limits_drain_and_pushes_hold_on_a_host() {
    on_each(|host| {
        let limits = no_time_limits().idle_timeout(Duration::from_millis(100));
        let running =
            server(host, limits).framing(Lines::default()).start(|_| Ways::new(([127, 0, 0, 1], 1).into()));
        let running = running.unwrap();
        let mut idle = client(&running);
        assert_eq!(idle.end(), End::Fin);
        watch::closed_for(&running, CloseReason::IdleTimeout, 1);
        let mut client = client(&running);
        client.write(b"timeout\ntimeout\ntimeout\n");
        client.read(8);
        running.shutdown();
        assert_eq!(client.read(16), b"timeout\ntimeout\n");
        assert_eq!(client.end(), End::Fin);
        watch::ended(running);
    });
}

#[test]
fn several_shards_are_hosted_each_by_a_runtime_of_its_own() {
    on_each(|host| {
        let running = server(host, no_time_limits())
            .shards(3)
            .framing(Lines::default())
            .start(|_| Ways::new(([127, 0, 0, 1], 1).into()));
        let running = running.unwrap();
        let mut clients: Vec<Client> = (0..30).map(|_| client(&running)).collect();
        for client in &mut clients {
            client.write(b"timeout\nchannel\nlocal\n");
        }
        for client in &mut clients {
            assert_eq!(client.read(22), b"timeout\nchannel\nlocal\n");
        }
        drop(clients);
        let report = watch::finish(running);
        assert_eq!(report.shards.len(), 3);
    });
}

#[test]
fn a_proxy_copies_on_a_host() {
    let upstream =
        On::default().server(no_time_limits()).framing(LengthPrefix::default()).start(|_| Echo).unwrap();
    let to = upstream.local_addrs()[0];
    on_each(|host| {
        let running = server(host, no_time_limits()).start(move |_| {
            stream(async move |mut client: Stream| {
                let mut upstream = client.shard().connect(to).await?;
                copy_bidirectional(&mut client, &mut upstream).await.map(drop).map_err(|broken| broken.error)
            })
        });
        let running = running.unwrap();
        let mut client = client(&running);
        for len in [1, 1000, 500_000] {
            assert!(client.ask(pattern(len)) == pattern(len));
        }
        drop(client);
        watch::finish(running);
    });
    watch::finish(upstream);
}

#[test]
fn a_factory_that_fails_on_a_host_is_reported() {
    on_each(|host| {
        let failed = server(host, no_time_limits()).start(|_| Err::<Echo, _>("planted: no service"));
        let error = failed.expect_err("it does not start").to_string();
        assert_eq!(error, "no service for shard 0: planted: no service");
    });
}

#[test]
fn a_port_is_free_once_a_hosted_server_has_ended() {
    on_each(|host| {
        let running = server(host, no_time_limits()).framing(Lines::default()).start(|_| {
            // A future that never ends must not keep the runtime, or the thread.
            tokio::task::spawn_local(pending::<()>());
            tokio::task::spawn(pending::<()>());
            Echo
        });
        let running = running.unwrap();
        let addr = running.local_addrs()[0];
        watch::finish(running);
        TcpListener::bind(addr).expect("no listener is left");
    });
}

#[test]
fn hosts_are_for_both_drivers() {
    for driver in [Driver::Epoll, Driver::Auto] {
        let server = Server::bind("127.0.0.1:0").shards(1).pin(false).driver(driver).runtime(Runtime::Tokio);
        let running = server.framing(Lines::default()).start(|_| Echo).unwrap();
        let mut client = client(&running);
        client.write(b"hello\n");
        assert_eq!(client.read(6), b"hello\n");
        drop(client);
        watch::finish(running);
    }
}
