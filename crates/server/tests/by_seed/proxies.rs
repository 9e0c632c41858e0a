//! A proxy by seed: upstreams that answer, stall, reset and are kept, by readers of all sorts,
//! where memory and places are short, until the server drains or aborts. Debug builds check every
//! account of a shard at the end of each turn.

use std::cell::{Cell, RefCell};
use std::future::{Future, pending, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use ringserve_server::limits::ServerLimits;
use ringserve_server::testing::{ClientResult, ClientStream, Faults, Net, Sim};
use ringserve_server::{CloseReason, Cx, Frame, Limits, Server, Service, Shard, Stream, stream};

const UPSTREAM: ([u8; 4], u16) = ([10, 0, 0, 2], 9000);
const NO_UPSTREAM: ([u8; 4], u16) = ([10, 0, 0, 2], 9999);

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Polls with a waker that is not the task's, as the sets of futures do.
async fn behind_another_waker<F: Future>(future: F) -> F::Output {
    struct Through(Waker);
    impl Wake for Through {
        fn wake(self: Arc<Self>) {
            self.0.wake_by_ref();
        }
    }
    let mut future = pin!(future);
    poll_fn(|task| {
        let waker = Waker::from(Arc::new(Through(task.waker().clone())));
        future.as_mut().poll(&mut Context::from_waker(&waker))
    })
    .await
}

struct Bomb;

impl Wake for Bomb {
    fn wake(self: Arc<Self>) {
        panic!("planted: a waker");
    }
}

/// Does something else with an upstream for each piece that comes. `readers` are tasks that read
/// one and have not met its end.
async fn serve(mut client: Stream, kept: Rc<RefCell<Vec<Stream>>>, readers: Rc<Cell<u32>>) -> io::Result<()> {
    let shard: Shard = client.shard().clone();
    let draw = |below: u64| shard.random() % below;
    let connect = || shard.connect(SocketAddr::from(UPSTREAM));
    while let Some(bytes) = client.read_frame().await? {
        match draw(8) {
            // Attempts that fail, or are given up.
            0 => {
                let _ = shard.timeout(millis(draw(30)), connect()).await;
                let _ = shard.connect(SocketAddr::from(NO_UPSTREAM)).await;
                let mut given_up = pin!(connect());
                let _ = poll_fn(|task| Poll::Ready(given_up.as_mut().poll(task))).await;
                shard.sleep(millis(draw(2) * draw(100))).await;
            }
            // More than fits, and answers that are not read for a while.
            1 => {
                let mut upstream = connect().await?;
                for _ in 0..draw(20) {
                    upstream.queue(vec![1; draw(20_000) as usize]);
                    behind_another_waker(upstream.ready()).await?;
                }
                shard.sleep(millis(draw(3000))).await;
                for _ in 0..draw(4) {
                    behind_another_waker(upstream.read_frame()).await?;
                    shard.sleep(millis(draw(300))).await;
                }
            }
            // A pool.
            2 => {
                let upstream = connect().await?;
                upstream.queue(vec![2; draw(100_000) as usize]);
                kept.borrow_mut().push(upstream);
                if draw(3) == 0 {
                    let old = kept.borrow_mut().swap_remove(0);
                    drop(old);
                }
            }
            // Half closed.
            3 => {
                let mut upstream = connect().await?;
                upstream.queue(bytes);
                upstream.end_writing();
                while let Some(answer) = upstream.read_frame().await? {
                    client.queue(answer);
                }
            }
            4 => {
                let _upstream = connect().await?;
                if draw(8) == 0 {
                    panic!("planted: in a stream");
                }
            }
            // A task of the shard that reads to the end.
            5 => {
                let (shard, readers) = (shard.clone(), readers.clone());
                shard.clone().spawn(async move {
                    let Ok(mut upstream) = shard.connect(SocketAddr::from(UPSTREAM)).await else { return };
                    readers.set(readers.get() + 1);
                    upstream.queue(&[5; 5000]);
                    while let Ok(Some(_)) = upstream.read_frame().await {}
                    readers.set(readers.get() - 1);
                });
            }
            6 => {
                let mut upstream = connect().await?;
                upstream.queue(bytes);
                let _ = upstream.poll_read_frame(&mut Context::from_waker(&Waker::from(Arc::new(Bomb))));
                let handle = upstream.handle();
                shard.sleep(millis(draw(200))).await;
                if draw(2) == 0 {
                    handle.abort();
                }
            }
            _ => {
                client.queue(vec![7; draw(60_000) as usize]);
                client.ready().await?;
            }
        }
    }
    Ok(())
}

async fn upstream(mut stream: ClientStream, kind: u64, bytes: u64) {
    match kind {
        0 => stream.reset(),
        1 => {
            let _ = stream.send(vec![9; bytes as usize]).await;
            let _ = stream.closed().await;
        }
        // It never reads.
        2 => pending().await,
        _ => {
            while let Ok(bytes) = stream.some().await {
                if bytes.is_empty() || stream.send(&bytes).await.is_err() {
                    return;
                }
            }
        }
    }
}

/// A client, whatever comes back.
async fn ask(net: &Net, addr: SocketAddr, rounds: u64, bytes: usize) -> ClientResult {
    let draw = |below: u64| net.random() % below;
    net.sleep(millis(draw(4000))).await;
    let Ok(mut me) = net.connect(addr).await else { return Ok(()) };
    for _ in 0..rounds {
        if me.send(vec![b'x'; bytes]).await.is_err() {
            return Ok(());
        }
        let _ = net.timeout(millis(draw(500)), me.some()).await;
    }
    if draw(2) == 0 {
        let _ = me.finish();
    }
    let _ = net.timeout(millis(draw(9000)), me.closed()).await;
    Ok(())
}

#[test]
fn proxy_ends_each_upstream_once_whatever_happens_to_them() {
    let seeds = if cfg!(debug_assertions) { 50 } else { 1000 };
    let [opened, at_the_end, for_memory, shut_down] = [(); 4].map(|()| Rc::new(Cell::new(0)));
    let counts = [&opened, &at_the_end, &for_memory, &shut_down].map(Rc::clone);
    let planted = |message: &str| message.contains("planted");
    Sim::seeds(seeds).faults(Faults::all()).allow_panics(planted).run(move |sim| {
        let draw = |below: u64| sim.random() % below;
        let held = [64 << 10, 128 << 10, 1 << 20][draw(3) as usize];
        let server_limits =
            ServerLimits::default().connections_max(2 + draw(8) as usize).upstreams_max(1 + draw(8) as usize);
        let limits = Limits::default()
            .outbox_bytes_max(held / 2)
            .outbox_bytes_high(held / 8)
            .outbox_bytes_low(held / 16)
            .inbox_bytes_high(16 << 10)
            .frame_bytes_max(16 << 10)
            .linger_timeout(millis(2000));
        let server_limits = server_limits
            .held_bytes_max(held)
            .connect_timeout(millis(3000))
            .drain_delay(millis(draw(2) * draw(3000)))
            .drain_timeout(millis(1000 + draw(10_000)));
        sim.expect_losses();
        sim.background("upstream", async |net| {
            let mut listener = net.listen(SocketAddr::from(UPSTREAM))?;
            loop {
                let stream = listener.accept().await;
                net.spawn(upstream(stream, net.random() % 5, net.random() % 100_000));
            }
        });
        let server = Server::bind("10.0.0.1:7000").shards(1 + draw(3) as usize);
        let server = server.limits(limits).server_limits(server_limits);
        let readers: Rc<Cell<u32>> = Rc::default();
        let of_shards = readers.clone();
        let server = sim.start(server, move |_shard| {
            let (kept, readers) = (Rc::default(), of_shards.clone());
            stream(move |client: Stream| serve(client, Rc::clone(&kept), readers.clone()))
        });
        let server = server.expect("it starts");
        for n in 0..8 + draw(8) {
            let (addr, rounds, bytes) = (server.addr(), draw(12), 1 + draw(30_000) as usize);
            sim.client(format!("c{n}"), async move |net| ask(&net, addr, rounds, bytes).await);
        }
        sim.run_for(millis(draw(9000)));
        let before = server.stats();
        match draw(3) {
            0 => server.abort(),
            _ => server.drain(),
        }
        assert!(sim.run_until(millis(25_000), || server.is_done()), "the server ends in time");
        let stats = server.stats();
        let upstreams = &stats.upstreams.counters;
        assert_eq!((stats.connections, stats.upstreams.connections), (0, 0));
        assert_eq!(readers.get(), 0, "each reader hears of the end");
        assert_eq!((stats.counters.opened, upstreams.opened), (stats.counters.closed, upstreams.closed));
        let closed_for = |reason| stats.counters.closed_for(reason) + upstreams.closed_for(reason);
        let seen = [
            upstreams.opened,
            before.upstreams.connections as u64,
            closed_for(CloseReason::MemoryLimit),
            upstreams.closed_for(CloseReason::Shutdown),
        ];
        counts.iter().zip(seen).for_each(|(count, seen)| count.set(count.get() + seen));
    });
    for (what, count) in [
        ("made", opened),
        ("there at the end", at_the_end),
        ("out of memory", for_memory),
        ("shut down", shut_down),
    ] {
        assert!(count.get() > seeds / 4, "{what}: {}", count.get());
    }
}

const PIECES: usize = 20;

/// Writes to an upstream that sent FIN at once, piece by piece, while the server drains.
async fn write_on(client: Stream) -> io::Result<()> {
    let mut upstream = client.shard().connect(SocketAddr::from(UPSTREAM)).await?;
    assert!(upstream.read_frame().await?.is_none(), "it says nothing");
    for _ in 0..PIECES {
        client.shard().sleep(millis(50)).await;
        upstream.write_all(&[7; 1000]).await?;
    }
    upstream.end_writing();
    client.queue(b"done");
    Ok(())
}

#[test]
fn upstream_that_ended_its_half_takes_every_byte() {
    Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
        let heard: Rc<Cell<usize>> = Rc::default();
        let of_upstream = heard.clone();
        sim.background("upstream", async move |net| {
            let mut listener = net.listen(SocketAddr::from(UPSTREAM))?;
            loop {
                let (mut stream, heard) = (listener.accept().await, of_upstream.clone());
                net.spawn(async move {
                    let _ = stream.finish();
                    heard.set(heard.get() + stream.closed().await.map_or(0, |bytes| bytes.len()));
                });
            }
        });
        let server = sim.start(Server::bind("10.0.0.1:7000"), |_shard| stream(write_on)).expect("it starts");
        let addr = server.addr();
        sim.client("one", async move |net: Net| -> ClientResult {
            // By then the upstream listens.
            net.sleep(millis(1000)).await;
            let mut me = net.connect(addr).await?;
            assert_eq!(me.closed().await?, b"done");
            Ok(())
        });
        sim.run_for(millis(1500));
        server.drain();
        sim.run_until_done();
        let all = || heard.get() == 1000 * PIECES;
        assert!(sim.run_until(millis(10_000), all), "it hears {} bytes", heard.get());
    });
}

/// Hears from a call that an upstream ended.
struct Asks;

impl Service for Asks {
    type Session = ();
    type Error = io::Error;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> io::Result<()> {
        let mut upstream = cx.shard().connect(SocketAddr::from(UPSTREAM)).await?;
        assert!(upstream.read_frame().await?.is_none(), "it says nothing");
        cx.reply(frame);
        Ok(())
    }
}

#[test]
fn end_of_an_upstream_is_heard_in_a_service_of_frames() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        sim.background("upstream", async |net| {
            let mut listener = net.listen(SocketAddr::from(UPSTREAM))?;
            loop {
                let mut stream = listener.accept().await;
                net.spawn(async move {
                    let _ = stream.finish();
                    let _ = stream.closed().await;
                });
            }
        });
        let addr = sim.serve(Server::bind("10.0.0.1:7000"), |_shard| Asks);
        sim.client("one", async move |net: Net| -> ClientResult {
            // By then the upstream listens.
            net.sleep(millis(1000)).await;
            let mut me = net.connect(addr).await?;
            me.send("x").await?;
            assert_eq!(me.exactly(1).await?, b"x");
            Ok(())
        });
        sim.run_until_done();
    });
}
