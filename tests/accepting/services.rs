//! Several services on one server, on both drivers.

use std::convert::Infallible;
use std::future::{pending, poll_fn};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::task::Poll;
use std::thread;
use std::time::Duration;

use ringserve::framing::{LengthPrefix, Lines};
use ringserve::limits::ServerLimits;
use ringserve::listen::{endpoints, tcp, unix};
use ringserve::server::{Driver, MultiService};
use ringserve::service::StreamService;
use ringserve::{Cx, Error, Frame, Limits, Peer, Server, ServerControl, Service, Shard, stream};
use ringserve_tests::{SOON, eventually};

use crate::factories::Waits;

/// Replies with its name, the number of its calls on this shard, and the frame.
struct Named {
    name: &'static str,
    calls: std::cell::Cell<usize>,
    /// A call of `wait` waits for as long as its connection lives.
    shard: Shard,
}

impl Named {
    fn new(name: &'static str) -> impl Fn(&Shard) -> Named + Send + Sync + 'static {
        move |shard| Named { name, calls: Default::default(), shard: shard.clone() }
    }
}

impl Service for Named {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        self.calls.set(self.calls.get() + 1);
        match &frame[..] {
            b"sleep" => self.shard.sleep(Duration::from_millis(1)).await,
            b"wait" => pending().await,
            b"opened" => {
                let stats = self.shard.server().stats();
                cx.reply(
                    format!("{} {}", self.shard.server().listeners().len(), stats.shards.len()).as_str(),
                );
                return Ok(());
            }
            _ => {}
        }
        cx.reply(format!("{} {} {}", self.name, self.calls.get(), String::from_utf8_lossy(&frame)).as_str());
        Ok(())
    }
}

fn of(driver: Driver) -> Server<MultiService> {
    Server::new().shards(1).pin(false).driver(driver)
}

const BOTH: [Driver; 2] = [Driver::IoUring, Driver::Epoll];

fn any_port() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

fn path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("ringserve-services-{}-{name}", std::process::id()))
}

/// Sends a line and takes one.
fn ask(stream: impl Read + Write, text: &str) -> String {
    let (mut stream, mut line) = (BufReader::new(stream), String::new());
    stream.get_mut().write_all(format!("{text}\n").as_bytes()).unwrap();
    stream.read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

fn connect(addr: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream
}

#[test]
fn services_have_one_value_a_shard_for_all_their_listeners() {
    for driver in BOTH {
        let (file, made) = (path("value"), Arc::new(AtomicUsize::new(0)));
        let count = made.clone();
        let chat = move |shard: &Shard| {
            count.fetch_add(1, SeqCst);
            Named::new("chat")(shard)
        };
        let lines = Lines::default();
        let server = of(driver)
            .service(
                endpoints((tcp(any_port()), unix(&file), tcp(any_port()))).framing(lines).name("chat"),
                chat,
            )
            .service(tcp(any_port()).framing(LengthPrefix::bytes(1)).name("lengths"), Named::new("lengths"))
            .service(tcp(any_port()), |_shard| -> StreamService<_> {
                stream(async |mut stream: ringserve::Stream| {
                    while let Some(bytes) = stream.read_frame().await? {
                        stream.queue(bytes);
                        stream.ready().await?;
                    }
                    std::io::Result::Ok(())
                })
            });
        let running = server.start().unwrap();
        assert_eq!(running.listeners().len(), 5);
        let ips = running.local_addrs().to_vec();
        assert_eq!(ask(connect(ips[0]), "a"), "chat 1 a");
        assert_eq!(ask(connect(ips[1]), "sleep"), "chat 2 sleep");
        assert_eq!(ask(UnixStream::connect(&file).unwrap(), "c"), "chat 3 c");
        let mut lengths = connect(ips[2]);
        let mut reply = [0; 16];
        for (n, text) in ["sleep", "other"].iter().enumerate() {
            lengths.write_all(&[&[5], text.as_bytes()].concat()).unwrap();
            lengths.read_exact(&mut reply).unwrap();
            assert_eq!(reply[1..], *format!("lengths {} {text}", n + 1).as_bytes());
        }
        assert_eq!(ask(connect(ips[3]), "stream"), "stream");
        assert_eq!(made.load(SeqCst), 1);
        drop(lengths);
        eventually("all are gone", SOON, || running.stats_now().connections == 0);
        let stats = running.stats_now();
        let figures: Vec<_> =
            stats.services.iter().map(|of| (&*of.name, of.counters.opened, of.counters.frames)).collect();
        let third = ips[3].to_string();
        assert_eq!(figures, [("chat", 3, 3), ("lengths", 1, 2), (&*third, 1, 1)]);
        assert_eq!((stats.counters.opened, stats.counters.frames), (5, 6));
        assert_eq!(stats.service("lengths").unwrap().counters.accepted, 1);
        running.shutdown();
        running.wait().unwrap();
        assert!(!file.exists());
    }
}

#[test]
fn a_service_is_bounded_by_its_limits_and_admits_by_its_rule() {
    for driver in BOTH {
        let admitted = Arc::new(Mutex::new(Vec::new()));
        let seen = admitted.clone();
        let running = of(driver)
            .limits(Limits::default().frame_bytes_max(100))
            .admit(|_| false)
            .service(
                tcp(any_port()).framing(Lines::default()).limits(Limits::default()).admit(|_| true),
                Named::new("large"),
            )
            .service(
                tcp(any_port()).framing(Lines::default()).admit(move |peer: &Peer| {
                    seen.lock().unwrap().push(peer.listener());
                    true
                }),
                Named::new("small"),
            )
            .service(tcp(any_port()).framing(Lines::default()).name("none"), Named::new("none"))
            .start()
            .unwrap();
        let ips = running.local_addrs().to_vec();
        let text = "x".repeat(500);
        assert_eq!(ask(connect(ips[0]), &text), format!("large 1 {text}"));
        assert_eq!(ask(connect(ips[1]), &text), "", "the frame is too large for this one");
        assert_eq!(*admitted.lock().unwrap(), [1]);
        let mut refused = connect(ips[2]);
        assert_eq!(refused.read(&mut [0]).unwrap_or(0), 0, "it is not admitted");
        let refusals = || running.stats_now().service("none").unwrap().counters.refused;
        eventually("the refusal is counted", SOON, || refusals() == 1);
    }
}

#[test]
fn the_limit_on_connections_is_of_all_services_together() {
    for driver in BOTH {
        let running = of(driver)
            .server_limits(ServerLimits::default().connections_max(2))
            .service(tcp(any_port()).framing(Lines::default()).name("a"), Named::new("a"))
            .service(tcp(any_port()).framing(Lines::default()).name("b"), Named::new("b"))
            .start()
            .unwrap();
        let ips = running.local_addrs().to_vec();
        let (first, second) = (connect(ips[0]), connect(ips[1]));
        assert_eq!((ask(&first, "1"), ask(&second, "1")), ("a 1 1".to_owned(), "b 1 1".to_owned()));
        let third = connect(ips[1]);
        (&third).write_all(b"2\n").unwrap();
        eventually("accepting is paused", SOON, || running.stats_now().counters.accept_paused > 0);
        assert_eq!(running.stats_now().connections, 2);
        drop(first);
        let mut line = String::new();
        BufReader::new(third).read_line(&mut line).unwrap();
        assert_eq!(line, "b 2 2\n", "the place of the first service's connection is the second one's");
    }
}

#[test]
fn a_drain_ends_the_connections_and_calls_of_every_service() {
    for driver in BOTH {
        let timeout = ServerLimits::default().drain_timeout(SOON * 10);
        let running = of(driver)
            .server_limits(timeout)
            .service(tcp(any_port()).framing(Lines::default()).name("a"), Named::new("a"))
            .service(tcp(any_port()).framing(Lines::default()).name("b"), Named::new("b"))
            .start()
            .unwrap();
        let ips = running.local_addrs().to_vec();
        let clients: Vec<_> = ips.iter().map(|addr| connect(*addr)).collect();
        clients.iter().for_each(|client| drop(ask(client, "x")));
        running.shutdown();
        for mut client in &clients {
            assert_eq!(client.read(&mut [0]).unwrap(), 0, "FIN");
        }
        drop(clients);
        let stats = running.wait().unwrap();
        let closed: Vec<_> = stats.services.iter().map(|of| of.counters.closed).collect();
        assert_eq!(closed, [1, 1]);
        ips.iter().for_each(|addr| assert!(TcpStream::connect(addr).is_err(), "nothing listens any more"));
    }
}

#[test]
fn service_is_served_until_the_one_before_it_has_ended() {
    for driver in BOTH {
        let timeout = ServerLimits::default().drain_timeout(SOON * 10);
        let goes_on = Arc::new(AtomicBool::new(false));
        let (until, clients) = (goes_on.clone(), tcp(any_port()).framing(Lines::default()).name("clients"));
        let running = of(driver)
            .shards(2)
            .server_limits(timeout)
            .service(
                tcp(any_port()).framing(Lines::default()).name("replica").drains_after("clients"),
                Named::new("replica"),
            )
            .service(clients, move |_shard| Waits(until.clone()))
            .start()
            .unwrap();
        let [replica, clients] = running.local_addrs().to_vec()[..] else { panic!("there are two") };
        let replicas: Vec<_> = (0..8).map(|_| connect(replica)).collect();
        replicas.iter().for_each(|replica| drop(ask(replica, "x")));
        let mut client = connect(clients);
        client.write_all(b"x\n").unwrap();
        eventually("it is asked", SOON, || {
            running.stats_now().service("clients").unwrap().counters.frames == 1
        });
        running.shutdown();
        eventually("the listeners are closed", SOON, || TcpStream::connect(replica).is_err());
        replicas.iter().for_each(|replica| assert!(ask(replica, "y").ends_with(" y"), "it is served"));
        goes_on.store(true, SeqCst);
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "x\n");
        for mut replica in &replicas {
            assert_eq!(replica.read(&mut [0]).unwrap(), 0, "FIN");
        }
        drop((replicas, client));
        running.wait().unwrap();
    }
}

/// The error of a start that fails.
fn failure(server: Server<MultiService>) -> String {
    let error = server.start().unwrap_err();
    assert!(std::error::Error::source(&error).is_some() || matches!(error, Error::Services(_)), "{error}");
    error.to_string()
}

#[test]
fn services_that_claim_one_address_are_refused_with_both_names() {
    let addr = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let server = Server::new()
        .service(tcp(addr).name("chat"), Named::new("chat"))
        .service((tcp(any_port()), tcp(addr)), Named::new("admin"));
    let text = failure(server);
    assert!(
        text.ends_with(&format!("{addr} is given twice: to the service chat and to 127.0.0.1:0")),
        "{text}"
    );
}

#[test]
fn services_that_cannot_be_are_named() {
    let named = |name: &str| tcp(any_port()).name(name);
    assert!(failure(Server::new()).contains("there is none"));
    let twice = Server::new().service(named("a"), Named::new("a")).service(named("a"), Named::new("a"));
    assert!(failure(twice).contains("two have the name a; give"));
    let nowhere = Server::new().service(endpoints([]).name("a"), Named::new("a"));
    assert!(failure(nowhere).contains("the service a has no endpoint; give"));
    let all = (0..33).fold(Server::new(), |server, _| server.service(tcp(any_port()), Named::new("a")));
    assert!(failure(all).ends_with("there are 33; 32 is the most"));
    let limits = Limits::default().frame_bytes_max(0);
    let bad = Server::new()
        .service(named("a"), Named::new("a"))
        .service(named("b").limits(limits), Named::new("b"));
    assert!(failure(bad).starts_with("service b: limits: Limits::frame_bytes_max is 0"));
    let none = Server::new()
        .service(named("a"), Named::new("a"))
        .service(tcp("no such host.invalid:1").name("b"), Named::new("b"));
    assert!(failure(none).starts_with("service b: the address"));
    let fails = Server::new()
        .service(named("a"), Named::new("a"))
        .service(named("b"), |_| -> Result<Named, &str> { Err("planted") });
    assert_eq!(failure(fails.shards(1)), "service b: no service for shard 0: planted");
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    TcpListener::bind(any_port()).unwrap().local_addr().unwrap().port()
}

#[test]
fn one_listener_of_five_that_cannot_be_leaves_none_behind() {
    for driver in BOTH {
        let held = TcpListener::bind(any_port()).unwrap();
        let taken = held.local_addr().unwrap();
        let (file, free) = (path("five"), SocketAddr::from(([127, 0, 0, 1], free_port())));
        let no_directory = path("no directory").join("socket");
        for (last, why) in [
            (tcp(taken), format!("{taken} is in use by process")),
            (unix(&no_directory), "there is no directory".to_owned()),
        ] {
            let server = of(driver)
                .service((tcp(free), unix(&file)), Named::new("a"))
                .service(tcp(any_port()), Named::new("b"))
                .service(endpoints((tcp(any_port()), last)).name("last"), Named::new("c"));
            let text = failure(server);
            assert!(text.starts_with("service last: ") && text.contains(&why), "{text}");
            assert!(!file.exists(), "its file is removed");
            TcpListener::bind(free).expect("nothing listens there any more");
        }
    }
}

#[test]
fn a_future_that_is_done_ends_the_server() {
    for driver in BOTH {
        let (tell, told) = mpsc::channel();
        let server = of(driver)
            .service(tcp(any_port()).framing(Lines::default()).name("a"), Named::new("a"))
            .on_start(move |control| tell.send(control).unwrap());
        let stop = Arc::new(AtomicBool::new(false));
        let stops = stop.clone();
        let (waker, woken) = mpsc::channel();
        let caller = thread::current().id();
        let client = thread::spawn(move || {
            let control: ServerControl = told.recv().unwrap();
            let addr = control.listeners()[0].as_ip().unwrap();
            assert_eq!(ask(connect(addr), "x"), "a 1 x");
            assert_eq!(control.stats_now().service("a").map(|of| of.counters.frames), Some(1));
            stops.store(true, SeqCst);
            let waker: std::task::Waker = woken.recv().unwrap();
            waker.wake();
            control
        });
        let until = poll_fn(|task| {
            assert_eq!(thread::current().id(), caller);
            let _ = waker.send(task.waker().clone());
            if stop.load(SeqCst) { Poll::Ready(()) } else { Poll::Pending }
        });
        let stats = server.run_until(until).unwrap();
        assert_eq!((stats.counters.opened, stats.counters.closed), (1, 1));
        let control = client.join().unwrap();
        assert_eq!(control.stats_now().counters.closed, 1, "its figures stay");
    }
}

#[test]
fn a_server_that_ends_by_itself_does_not_wait_for_the_future() {
    for driver in BOTH {
        let control = Arc::new(Mutex::new(None::<ServerControl>));
        let (from_start, from_future) = (control.clone(), control);
        let server = Server::bind(any_port()).shards(1).driver(driver);
        let server = server.on_start(move |control| *from_start.lock().unwrap() = Some(control));
        // Shut down in another way, while the future would wait without end.
        let ends = poll_fn(|_| -> Poll<()> {
            from_future.lock().unwrap().as_ref().unwrap().shutdown();
            Poll::Pending
        });
        assert!(server.run_until(ends, Named::new("a")).is_ok());
    }
}

#[test]
fn a_future_that_panics_ends_the_server_at_once() {
    let addr = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let run =
        || Server::bind(addr).shards(1).run_until(async { panic!("planted: a future") }, Named::new("a"));
    assert!(std::panic::catch_unwind(run).is_err());
    TcpListener::bind(addr).expect("nothing listens there any more");
}

#[test]
fn a_panic_on_start_ends_the_server() {
    for driver in BOTH {
        let addr = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let server = || Server::bind(addr).driver(driver).shards(1).on_start(|_| panic!("planted: on start"));
        let start = AssertUnwindSafe(|| server().start(Named::new("a")));
        let said = catch_unwind(start).expect_err("the panic comes to the caller");
        assert_eq!(said.downcast_ref::<&str>(), Some(&"planted: on start"));
        TcpListener::bind(addr).expect("nothing listens there any more");
        // The same if the caller waits for the end of the server.
        assert!(catch_unwind(AssertUnwindSafe(|| server().serve(Named::new("a")))).is_err());
        TcpListener::bind(addr).expect("nothing listens there any more");
    }
}

#[test]
fn a_shard_has_the_handle_of_its_server() {
    for driver in BOTH {
        let server = of(driver).service((tcp(any_port()), tcp(any_port())), |shard: &Shard| {
            assert_eq!(shard.server().stats().shards.len(), 2, "also before it serves");
            Named::new("a")(shard)
        });
        let running = server.shards(2).start().unwrap();
        let mut stream = connect(running.local_addrs()[0]);
        stream.write_all(b"opened").unwrap();
        let mut reply = [0; 3];
        stream.read_exact(&mut reply).unwrap();
        assert_eq!(&reply, b"2 2");
    }
}
