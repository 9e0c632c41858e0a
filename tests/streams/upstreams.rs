//! Connections to upstreams that need a real kernel: those that never answer, Unix sockets,
//! options, memory.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use ringserve::net::Address;
use ringserve::{CloseReason, ServerHandle, Shard, Stream, stream};
use ringserve_tests::Bounds;
use ringserve_tests::client::End;
use ringserve_tests::{On, SOON, Streams, alone, no_time_limits, pattern, watch};
use socket2::{Domain, SockAddr, SockRef, Socket, Type};

/// A server whose shard runs one task at its start.
#[track_caller]
fn with_task<F>(limits: Bounds, task: impl Fn(Shard) -> F + Send + Sync + 'static) -> ServerHandle
where
    F: Future<Output = ()> + 'static,
{
    let server = On::default().server(limits);
    let started = server.start(move |shard| {
        shard.spawn(task(shard.clone()));
        stream(async |_stream: Stream| {})
    });
    started.expect("the server starts")
}

fn told<T>() -> (Arc<SyncSender<T>>, Receiver<T>) {
    let (sender, receiver) = sync_channel(100);
    (Arc::new(sender), receiver)
}

#[track_caller]
fn hear<T>(receiver: &Receiver<T>) -> T {
    receiver.recv_timeout(SOON).expect("the task says so")
}

/// A file that is deleted with the test.
struct Path(PathBuf);

impl Path {
    fn new(name: &str) -> Path {
        Path(std::env::temp_dir().join(format!("ringserve-upstreams-{}-{name}", std::process::id())))
    }
}

impl Drop for Path {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A Unix listener whose backlog is full, and the peers that fill it.
fn full_queue(path: &Path) -> (Socket, Vec<Socket>, Address) {
    let listener = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
    let addr = SockAddr::unix(&path.0).unwrap();
    listener.bind(&addr).unwrap();
    listener.listen(1).unwrap();
    let connect = || {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        socket.set_nonblocking(true).unwrap();
        socket.connect(&addr).map(|()| socket)
    };
    let fillers = (0..8).map_while(|_| connect().ok()).collect();
    assert_eq!(connect().unwrap_err().kind(), ErrorKind::WouldBlock);
    (listener, fillers, Address::unix(path.0.to_str().unwrap()))
}

/// A listener whose backlog is full, so that the kernel answers no other peer, and the peers that
/// fill it.
fn unanswering() -> (Socket, Vec<Socket>, SocketAddr) {
    let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    listener.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
    listener.listen(0).unwrap();
    let addr = listener.local_addr().unwrap().as_socket().unwrap();
    let fillers = (0..8).map(|_| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_nonblocking(true).unwrap();
        let _ = socket.connect(&addr.into());
        socket
    });
    let fillers = fillers.collect();
    (listener, fillers, addr)
}

#[test]
fn an_upstream_that_never_answers_is_given_up_after_the_limit() {
    let (_listener, _fillers, addr) = unanswering();
    is_given_up_after_the_limit(addr.into());
}

#[test]
fn unix_socket_with_a_full_queue_is_given_up_after_the_limit() {
    let path = Path::new("given-up");
    let (_listener, _fillers, addr) = full_queue(&path);
    is_given_up_after_the_limit(addr);
}

#[track_caller]
fn is_given_up_after_the_limit(addr: Address) {
    let (tell, told) = told();
    let limits = no_time_limits().connect_timeout(Duration::from_millis(100));
    let running = with_task(limits, move |shard| {
        let (tell, addr) = (tell.clone(), addr.clone());
        async move {
            let error = shard.connect(addr).await.unwrap_err();
            tell.send((error.kind(), error.to_string())).unwrap();
        }
    });
    assert_eq!(hear(&told), (ErrorKind::TimedOut, "connect_timeout".to_owned()));
    watch::upstreams_closed_for(&running, CloseReason::ConnectTimeout, 1);
    watch::holds_upstreams(&running, 0);
    watch::finish(running);
}

#[test]
fn unix_socket_with_a_full_queue_is_waited_for() {
    let path = Path::new("waited-for");
    let (listener, fillers, addr) = full_queue(&path);
    let (tell, told) = told();
    let running = with_task(no_time_limits(), move |shard| {
        let (tell, addr) = (tell.clone(), addr.clone());
        async move {
            for _ in 0..8 {
                let (tell, addr, here) = (tell.clone(), addr.clone(), shard.clone());
                shard.spawn(async move {
                    let heard = async {
                        let mut upstream = here.connect(addr).await?;
                        Ok::<_, std::io::Error>(upstream.read_frame().await?.map(|frame| frame.to_vec()))
                    };
                    tell.send(heard.await.map_err(|error| error.to_string())).unwrap();
                });
            }
        }
    });
    watch::holds_upstreams(&running, 8);
    let accepted: Vec<Socket> = (0..fillers.len() + 8).map(|_| listener.accept().unwrap().0).collect();
    accepted.iter().for_each(|mut upstream| drop(upstream.write(b"hello")));
    (0..8).for_each(|_| assert_eq!(hear(&told), Ok(Some(b"hello".to_vec()))));
    watch::finish(running);
}

#[test]
fn an_attempt_is_given_up_by_dropping_it_and_by_a_shutdown() {
    let (_listener, _fillers, addr) = unanswering();
    are_given_up(addr.into());
}

#[test]
fn attempt_at_a_full_queue_is_dropped_or_ends_at_a_shutdown() {
    let path = Path::new("dropped");
    let (_listener, _fillers, addr) = full_queue(&path);
    are_given_up(addr);
}

#[track_caller]
fn are_given_up(addr: Address) {
    let (tell, told) = told();
    let limits = no_time_limits().connect_timeout(None);
    let running = with_task(limits, move |shard| {
        let (tell, addr) = (tell.clone(), addr.clone());
        async move {
            let given_up = shard.timeout(Duration::from_millis(50), shard.connect(addr.clone())).await;
            assert!(given_up.is_err());
            tell.send(()).unwrap();
            let _ = shard.connect(addr).await;
        }
    });
    hear(&told);
    watch::upstreams_closed_for(&running, CloseReason::Aborted, 1);
    watch::holds_upstreams(&running, 1);
    let report = watch::finish(running);
    assert_eq!(report.upstreams.counters.closed_for(CloseReason::Shutdown), 1);
}

#[test]
fn unix_sockets_are_upstreams_too() {
    let dir = std::env::temp_dir().join(format!("ringserve-upstreams-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join("upstream.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let (tell, told) = told();
    let missing = dir.join("missing.sock");
    let address = path.to_str().unwrap().to_owned();
    let running = with_task(no_time_limits(), move |shard| {
        let (tell, address, missing) = (tell.clone(), address.clone(), missing.to_str().unwrap().to_owned());
        async move {
            for wrong in [missing, format!("/{}", "x".repeat(200))] {
                let error = shard.connect(Address::unix(wrong)).await.unwrap_err();
                tell.send(error.kind().to_string()).unwrap();
            }
            let mut upstream = shard.connect(Address::unix(&address)).await.unwrap();
            upstream.write_all(&pattern(100_000)).await.unwrap();
            let answer = upstream.read_frame().await.unwrap().expect("an answer");
            tell.send(String::from_utf8(answer.to_vec()).unwrap()).unwrap();
        }
    });
    assert_eq!([hear(&told), hear(&told)], ["entity not found", "invalid filename"]);
    let (mut upstream, _) = listener.accept().unwrap();
    let mut bytes = vec![0; 100_000];
    upstream.read_exact(&mut bytes).unwrap();
    assert!(bytes == pattern(100_000));
    upstream.write_all(b"seen").unwrap();
    assert_eq!(hear(&told), "seen");
    assert_eq!(upstream.read(&mut [0]).unwrap(), 0);
    drop(upstream);
    watch::holds_upstreams(&running, 0);
    watch::finish(running);
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn an_upstreams_socket_has_the_options_of_accepted_ones() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    let running = with_task(no_time_limits(), move |shard| async move {
        let mut upstream = shard.connect(to).await.unwrap();
        upstream.queue(b"x".as_slice());
        let _ = upstream.read_frame().await;
    });
    let (mut peer, _) = listener.accept().unwrap();
    peer.set_read_timeout(Some(SOON)).unwrap();
    peer.read_exact(&mut [0]).unwrap();
    let timers = || proc_net_tcp(peer.peer_addr().unwrap(), to);
    // 01 until the byte is acknowledged.
    ringserve_tests::eventually("its timer is that of keep-alive", SOON, || timers().starts_with("02:"));
    drop(peer);
    watch::finish(running);
}

/// The column `tr:tm->when` of a socket of this machine: 02 is a keep-alive timer.
fn proc_net_tcp(local: SocketAddr, remote: SocketAddr) -> String {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    // Others may have had the same port here, with other peers, a moment ago.
    let ports = [local, remote].map(|addr| format!(":{:04X}", addr.port()));
    let row = table.lines().skip(1).find(|row| {
        let columns: Vec<&str> = row.split_whitespace().collect();
        ports.iter().zip(&columns[1..]).all(|(port, column)| column.ends_with(port))
    });
    row.expect("the socket is there").split_whitespace().nth(5).unwrap().to_owned()
}

#[test]
fn a_connection_that_is_refused_leaves_no_descriptor() {
    if !alone(a_connection_that_is_refused_leaves_no_descriptor) {
        return;
    }
    let no_server = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (tell, told) = told();
    let running = with_task(no_time_limits(), move |shard| {
        let tell = tell.clone();
        async move {
            for n in 0..500 {
                let error = shard.connect(no_server).await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
                if n == 20 || n == 499 {
                    // A closed connection is gone by the end of the next turn.
                    shard.sleep(Duration::from_millis(5)).await;
                    tell.send(ringserve_tests::descriptors()).unwrap();
                }
            }
        }
    });
    let (before, after) = (hear(&told), hear(&told));
    assert!(after <= before + 8, "{before} descriptors before, {after} after 500 attempts");
    watch::finish(running);
}

/// An upstream may have bytes and FIN ready before the server looks.
#[test]
fn bytes_that_come_with_the_connection_are_read() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    let (tell, told) = told();
    let running = with_task(no_time_limits(), move |shard| {
        let tell = tell.clone();
        async move {
            let mut upstream = shard.connect(to).await.unwrap();
            shard.sleep(Duration::from_millis(20)).await;
            let mut all = Vec::new();
            while let Some(frame) = upstream.read_frame().await.unwrap() {
                all.extend_from_slice(&frame);
            }
            tell.send(all).unwrap();
        }
    });
    let (mut peer, _): (TcpStream, _) = listener.accept().unwrap();
    SockRef::from(&peer).set_tcp_nodelay(true).unwrap();
    peer.write_all(&pattern(200_000)).unwrap();
    drop(peer);
    assert!(hear(&told) == pattern(200_000));
    watch::finish(running);
}

/// Accepts one connection and never reads from it; returns its address.
fn never_reads() -> (SocketAddr, std::thread::JoinHandle<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    (addr, std::thread::spawn(move || listener.accept().unwrap().0))
}

#[test]
fn upstream_in_a_drain_has_the_time_of_accepted_connections() {
    let (addr, upstream) = never_reads();
    let drain = Duration::from_secs(3);
    let proxy = Streams::start(no_time_limits().drain_timeout(drain), move |_| {
        async move |mut client: Stream| {
            let upstream = client.shard().connect(addr).await?;
            while let Some(bytes) = client.read_frame().await? {
                upstream.queue(bytes);
                upstream.ready().await?;
            }
            std::io::Result::Ok(())
        }
    });
    let mut client = proxy.client();
    client.write_until_stuck(&vec![7; 64 << 20], Duration::from_millis(500));
    let started = Instant::now();
    proxy.running.shutdown();
    assert_eq!(client.end(), End::Reset);
    let report = ringserve_tests::watch::ended(proxy.running);
    assert_eq!(report.upstreams.counters.closed_for(CloseReason::DrainTimeout), 1);
    assert!(started.elapsed() < 2 * drain, "its time began when the server's did: {:?}", started.elapsed());
    drop(upstream);
}

#[test]
fn an_upstream_that_is_asked_for_after_an_abort_is_reset_too() {
    let (addr, upstream) = never_reads();
    let server = Streams::start(no_time_limits(), move |shard| {
        let own = shard.clone();
        shard.spawn(async move {
            own.draining().await;
            if let Ok(upstream) = own.connect(addr).await {
                let _kept = upstream;
                std::future::pending::<()>().await;
            }
        });
        async move |_: Stream| {}
    });
    let client = server.client();
    server.holds(1);
    server.running.abort();
    let report = ringserve_tests::watch::ended(server.running);
    assert_eq!(
        report.upstreams.counters.closed_for(CloseReason::Shutdown),
        0,
        "{:?}",
        report.upstreams.counters
    );
    drop(client);
    let _ = TcpStream::connect(addr);
    upstream.join().unwrap();
}
