//! Connections that the server makes: a proxy and others between a client and an upstream, which is
//! a server too.

use std::future::{pending, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::task::Poll;

use ringserve::framing::LengthPrefix;
use ringserve::net::{CopySide, copy_bidirectional};
use ringserve::stats::ServerStats;
use ringserve::{CloseReason, Cx, Frame, ServerHandle, Service, Stream, stream};

use ringserve_tests::Bounds;
use ringserve_tests::client::{End, frame};
use ringserve_tests::{Client, Lab, Net, On, SOON, Site, eventually, no_time_limits, order, pattern, watch};

/// A server between clients and `upstream`.
struct Between {
    running: ServerHandle,
    net: Net,
}

impl Between {
    #[track_caller]
    fn new(on: On, limits: Bounds, net: &Net, upstream: SocketAddr) -> Between {
        let site = Site::on(on.server(limits), net.clone());
        let running = site.start(move |_| stream(async move |client: Stream| relay(client, upstream).await));
        Between { running: running.expect("the proxy starts"), net: net.clone() }
    }

    fn addr(&self) -> SocketAddr {
        self.running.local_addrs()[0]
    }

    fn client(&self) -> Client {
        Client::of(self.net.connect(self.addr()).expect("the proxy accepts"))
    }

    fn client_with_small_window(&self) -> Client {
        Client::of(self.net.connect_with_small_window(self.addr()).expect("the proxy accepts"))
    }

    #[track_caller]
    fn finish(self) -> ServerStats {
        watch::finish(self.running)
    }
}

async fn relay(mut client: Stream, upstream: SocketAddr) -> Result<(), String> {
    let mut upstream = client.shard().connect(upstream).await.map_err(|error| {
        client.upstream_failed();
        format!("no upstream: {error}")
    })?;
    match copy_bidirectional(&mut client, &mut upstream).await {
        Ok(_) => Ok(()),
        Err(broken) => {
            if broken.side == CopySide::Second {
                client.upstream_failed();
                client.abort();
            }
            Err(broken.to_string())
        }
    }
}

/// An upstream and a proxy before it.
#[track_caller]
fn pair(on: On, limits: Bounds) -> (Lab, Between) {
    let lab = Lab::on(on, limits.clone());
    let between = Between::new(on, limits, &lab.net, lab.addr());
    (lab, between)
}

pub fn bytes_go_both_ways_through_a_proxy(on: On) {
    let (lab, proxy) = pair(on, no_time_limits());
    let mut client = proxy.client();
    for len in [0, 1, 100, 5000, 100_000] {
        let payload = order::echo(pattern(len));
        assert!(client.ask(&payload) == payload, "{len} bytes");
    }
    client.send(order::replies(100, 100_000));
    (0..100).for_each(|_| assert!(client.recv() == pattern(100_000)));
    client.send(order::close());
    assert_eq!((client.recv(), client.end()), (b"bye".to_vec(), End::Fin));
    drop(client);
    lab.closed_for(CloseReason::Closed, 1);
    lab.finish();
    let report = proxy.finish();
    let (down, up) = (&report.counters, &report.upstreams.counters);
    assert_eq!((up.opened, up.bytes_sent, up.bytes_received), (1, down.bytes_received, down.bytes_sent));
}

pub fn half_closes_pass_through(on: On) {
    let (lab, proxy) = pair(on, no_time_limits());
    let mut client = proxy.client();
    client.write(&[frame(order::replies(20, 100_000)), frame(order::echo("last"))].concat());
    client.finish_writing();
    (0..20).for_each(|_| assert!(client.recv() == pattern(100_000)));
    assert_eq!((client.recv(), client.end()), (order::echo("last"), End::Fin));
    lab.closed_for(CloseReason::PeerClosed, 1);
    lab.finish();
    proxy.finish();
}

pub fn an_upstream_that_refuses(on: On) {
    // No server listens at its port once it is gone.
    let lab = Lab::on(on, no_time_limits());
    let (net, no_server) = (lab.net.clone(), lab.addr());
    lab.finish();
    let proxy = Between::new(on, no_time_limits(), &net, no_server);
    for count in 1..=3 {
        let mut client = proxy.client();
        assert_eq!(client.end(), End::Fin);
        watch::closed_for(&proxy.running, CloseReason::UpstreamFailed, count);
        watch::upstreams_closed_for(&proxy.running, CloseReason::ConnectFailed(0), count);
    }
    proxy.finish();
}

pub fn an_upstream_that_resets(on: On) {
    let (lab, proxy) = pair(on, no_time_limits());
    let mut client = proxy.client();
    client.echoes("");
    client.send(order::abort());
    assert_eq!(client.end(), End::Reset);
    watch::closed_for(&proxy.running, CloseReason::UpstreamFailed, 1);
    watch::upstreams_closed_for(&proxy.running, CloseReason::PeerReset, 1);
    lab.finish();
    proxy.finish();
}

pub fn a_client_that_resets(on: On) {
    let (lab, proxy) = pair(on, no_time_limits());
    let mut client = proxy.client();
    client.echoes("");
    client.reset();
    watch::closed_for(&proxy.running, CloseReason::PeerReset, 1);
    lab.closed_for(CloseReason::PeerClosed, 1);
    watch::holds_upstreams(&proxy.running, 0);
    lab.finish();
    proxy.finish();
}

pub fn a_slow_reader_holds_its_upstream_back(on: On) {
    let (lab, proxy) = pair(on, no_time_limits());
    let mut client = proxy.client_with_small_window();
    // More than all sockets and outboxes on the way hold.
    client.send(order::stream(64_000_000));
    let mut before = 0;
    eventually("the upstream is held back", SOON, || {
        std::thread::park_timeout(std::time::Duration::from_millis(100));
        let now = proxy.running.stats_now().upstreams.counters.bytes_received;
        now > 0 && std::mem::replace(&mut before, now) == now
    });
    assert!(before < 32_000_000, "{before} bytes received for a client that reads nothing");
    assert!(client.read(64_000_000) == pattern(64_000_000));
    drop(client);
    lab.finish();
    proxy.finish();
}

pub fn a_slow_upstream_holds_its_client_back(on: On) {
    let (lab, proxy) = pair(on, no_time_limits());
    let mut client = proxy.client();
    // It takes no more before its gate opens, and neither does the proxy then.
    client.send(order::gate(""));
    lab.parked(1);
    let rest = frame(order::echo(pattern(60_000))).repeat(800);
    std::thread::scope(|scope| {
        let mut writer = Client::of(client.stream.try_clone().unwrap());
        scope.spawn({
            let rest = &rest;
            move || writer.write(rest)
        });
        let mut before = 0;
        eventually("the client is held back", SOON, || {
            std::thread::park_timeout(std::time::Duration::from_millis(100));
            let now = proxy.running.stats_now().counters.bytes_received;
            now > 0 && std::mem::replace(&mut before, now) == now
        });
        assert!(before < 32_000_000, "{before} bytes received for an upstream that takes nothing");
        lab.shared.gate.open();
        assert_eq!(client.recv(), order::gate(""));
        for _ in 0..800 {
            assert_eq!(client.recv().len(), 60_001);
        }
    });
    drop(client);
    lab.finish();
    proxy.finish();
}

pub fn many_at_once_and_slots_used_again(on: On) {
    let (lab, proxy) = pair(on, no_time_limits());
    for round in 0..5 {
        let mut clients: Vec<Client> = (0..40).map(|_| proxy.client()).collect();
        for (n, client) in clients.iter_mut().enumerate() {
            client.send(order::echo(format!("{round}.{n}")));
        }
        for (n, client) in clients.iter_mut().enumerate() {
            assert_eq!(client.recv(), order::echo(format!("{round}.{n}")));
        }
        drop(clients);
        watch::holds(&proxy.running, 0);
        watch::holds_upstreams(&proxy.running, 0);
    }
    lab.finish();
    assert_eq!(proxy.finish().upstreams.counters.opened, 200);
}

pub fn no_more_upstreams_than_may_be(on: On) {
    let (lab, proxy) = pair(on, no_time_limits().upstreams_max(2));
    let mut two = [proxy.client(), proxy.client()];
    two.iter_mut().for_each(|client| client.echoes(""));
    assert_eq!(proxy.client().end(), End::Fin);
    watch::closed_for(&proxy.running, CloseReason::UpstreamFailed, 1);
    let [first, mut second] = two;
    drop(first);
    watch::holds_upstreams(&proxy.running, 1);
    proxy.client().echoes("");
    second.echoes("");
    drop(second);
    lab.finish();
    assert_eq!(proxy.finish().upstreams.counters.opened, 3);
}

pub fn a_shutdown_lets_both_ends_finish(on: On) {
    let (lab, proxy) = pair(on, no_time_limits());
    let mut client = proxy.client();
    client.send(order::gate(""));
    lab.parked(1);
    proxy.running.shutdown();
    lab.shared.gate.open();
    assert_eq!(client.recv(), order::gate(""));
    client.echoes("later");
    client.finish_writing();
    assert_eq!(client.end(), End::Fin);
    let report = watch::ended(proxy.running);
    assert_eq!(report.counters.closed_for(CloseReason::DrainTimeout), 0);
    lab.closed_for(CloseReason::PeerClosed, 1);
    lab.finish();
}

/// Tasks of the shard keep connections as a pool would.
pub fn a_shutdown_does_not_wait_for_idle_upstreams(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let (net, to) = (lab.net.clone(), lab.addr());
    let site = Site::on(on.server(no_time_limits()), net);
    let running = site.start(move |shard| {
        for _ in 0..3 {
            let connecting = shard.connect(to);
            shard.spawn(async move {
                let _upstream = connecting.await.expect("the upstream accepts");
                pending::<()>().await
            });
        }
        stream(async |_stream: Stream| {})
    });
    let running = running.unwrap();
    lab.holds(3);
    let report = watch::finish(running);
    assert_eq!(report.upstreams.counters.closed_for(CloseReason::Shutdown), 3);
    lab.closed_for(CloseReason::PeerClosed, 3);
    lab.finish();
}

pub fn forced_with_upstreams(on: On) {
    let (lab, proxy) = pair(on, no_time_limits());
    let mut client = proxy.client();
    client.send(order::gate(""));
    lab.parked(1);
    proxy.running.abort();
    assert_eq!(client.end(), End::Reset);
    watch::ended(proxy.running);
    lab.holds(0);
    lab.finish();
}

/// Asks an upstream for each frame.
struct Asks {
    to: SocketAddr,
}

impl Service for Asks {
    type Session = ();
    type Error = io::Error;

    async fn call(&self, cx: &Cx<'_, ()>, question: Frame) -> Result<(), io::Error> {
        let mut upstream = cx.shard().connect(self.to).await?;
        upstream.write_all(question.wire()).await?;
        let mut answer = Vec::new();
        while answer.len() < question.wire().len() {
            let Some(piece) = upstream.read_frame().await? else {
                return Err(io::ErrorKind::UnexpectedEof.into());
            };
            answer.extend_from_slice(&piece);
        }
        cx.write(&answer);
        Ok(())
    }
}

pub fn a_service_of_frames_asks_an_upstream(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let (net, to) = (lab.net.clone(), lab.addr());
    let site = Site::on(on.server(no_time_limits()), net.clone()).framing(LengthPrefix::default());
    let running = site.start(move |_| Asks { to }).expect("the server starts");
    let mut client = Client::of(net.connect(running.local_addrs()[0]).unwrap());
    for n in 0..20 {
        let question = order::echo(pattern(n * 1000));
        assert!(client.ask(&question) == question);
    }
    drop(client);
    lab.finish();
    let report = watch::finish(running);
    assert_eq!(report.upstreams.counters.opened, 20);
}

pub fn a_thread_closes_an_upstream(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let (net, to) = (lab.net.clone(), lab.addr());
    let handle = Arc::new(Mutex::new(None));
    let site = Site::on(on.server(no_time_limits()), net);
    let given = handle.clone();
    let running = site.start(move |shard| {
        let (connecting, given) = (shard.connect(to), given.clone());
        shard.spawn(async move {
            let mut upstream = connecting.await.expect("the upstream accepts");
            upstream.queue(frame(order::echo("last")));
            *given.lock().unwrap() = Some(upstream.handle());
            while upstream.read_frame().await.is_ok_and(|frame| frame.is_some()) {}
        });
        stream(async |_stream: Stream| {})
    });
    let running = running.unwrap();
    eventually("there is a handle", SOON, || handle.lock().unwrap().is_some());
    let handle = handle.lock().unwrap().take().unwrap();
    assert!(!handle.is_gone());
    handle.close();
    assert!(handle.is_gone());
    watch::holds_upstreams(&running, 0);
    lab.closed_for(CloseReason::PeerClosed, 1);
    lab.finish();
    let sent = watch::finish(running).upstreams.counters.bytes_sent;
    assert_eq!(sent, frame(order::echo("last")).len() as u64, "what was queued left before the end");
}

pub fn an_attempt_that_is_given_up(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let (net, to) = (lab.net.clone(), lab.addr());
    let site = Site::on(on.server(no_time_limits()), net.clone());
    let running = site.start(move |_| {
        stream(async move |stream: Stream| {
            // Before the shard looks, while it is on its way, and once it is there.
            drop(stream.shard().connect(to));
            let mut connecting = Box::pin(stream.shard().connect(to));
            let mut polls = 0;
            poll_fn(|task| {
                polls += 1;
                if polls == 1 {
                    assert!(connecting.as_mut().poll(task).is_pending());
                    task.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Poll::Ready(())
            })
            .await;
            drop(connecting);
            drop(stream.shard().connect(to).await.unwrap());
        })
    });
    let running = running.unwrap();
    let mut client = Client::of(net.connect(running.local_addrs()[0]).unwrap());
    assert_eq!(client.end(), End::Fin);
    drop(client);
    let report = watch::finish(running);
    let opened = report.upstreams.counters.opened;
    assert!((1..=2).contains(&opened), "{opened} were tried");
    assert_eq!(report.upstreams.counters.closed_for(CloseReason::Closed), 1);
    lab.holds(0);
    lab.finish();
}
