//! Starts that succeed, and starts that fail.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::poll_fn;
use std::io::{ErrorKind, Read};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use ringserve::framing::LengthPrefix;
use ringserve::handle::LocalHandle;
use ringserve::{Cx, Error, Frame, Server, Service};
use ringserve_tests::Bounded;
use ringserve_tests::{Client, Lab, On, Puppet, SOON, eventually, finish, no_time_limits, order};

#[test]
fn a_second_instance_is_refused_with_the_name_of_the_first() {
    let lab = Lab::start(no_time_limits());
    let error = Server::bind(lab.addr()).shards(1).start(|_| Puppet::new(Default::default())).unwrap_err();
    assert!(matches!(error, Error::AddressInUse { .. }));
    let text = error.to_string();
    assert!(text.contains(&format!("is in use by process {}", std::process::id())), "{text}");
    assert!(text.contains("share_port(true)"), "{text}");
    lab.client().echoes("alive");
    lab.finish();
}

/// The end of a ring interrupts calls of the thread that created it, some time later. Rings that
/// were tried at the start are not this thread's.
#[test]
fn starting_a_server_interrupts_no_call_of_the_starting_thread() {
    for round in 0..10 {
        let lab = Lab::start(no_time_limits());
        let (mut near, _far) = UnixStream::pair().unwrap();
        near.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let read = near.read(&mut [0; 4]).map_err(|error| error.kind());
        assert_eq!(read, Err(ErrorKind::WouldBlock), "round {round}");
        lab.finish();
    }
}

#[test]
fn a_port_of_another_program_is_refused() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let started = Server::bind(other.local_addr().unwrap()).start(|_| Puppet::new(Default::default()));
    assert!(matches!(started, Err(Error::AddressInUse { .. })));
}

#[test]
fn a_shared_port_serves_while_either_instance_runs() {
    let shared = |addr: &str| {
        Lab::of(On::default().server_at(addr, no_time_limits()).share_port(true).framing(framing()))
    };
    let first = shared("127.0.0.1:0");
    let addr = first.addr();
    let second = shared(&addr.to_string());
    let both = |count: usize| (0..count).for_each(|_| Client::connect(addr).echoes(""));
    both(40);
    let served = first.stats().counters.opened;
    assert!(served > 0 && served < 40, "the kernel shares them out: {served} of 40");
    first.finish();
    both(20);
    second.finish();
}

fn framing() -> LengthPrefix {
    LengthPrefix::default()
}

#[test]
fn all_shards_share_one_port_and_all_serve() {
    let lab = Lab::of(On::default().server(no_time_limits()).shards(4).framing(framing()));
    assert_eq!(lab.running.local_addrs().len(), 1);
    let mut clients: Vec<Client> = (0..200).map(|_| lab.client()).collect();
    clients.iter_mut().for_each(|client| client.gets_back(order::thread_wakes("")));
    let report = lab.stats();
    assert_eq!((report.shards.len(), report.connections), (4, 200));
    assert!(report.shards.iter().all(|shard| shard.connections > 0), "{report:?}");
    drop(clients);
    lab.finish();
}

#[test]
fn every_address_is_served_and_peers_know_which() {
    let addrs: Vec<_> = ["127.0.0.1:0", "[::1]:0"].iter().map(|addr| addr.parse().unwrap()).collect();
    let server = Server::bind(&addrs[..]).shards(1).bounded(no_time_limits()).framing(framing());
    let lab = Lab::of(server);
    let local: Vec<_> = lab.running.local_addrs().to_vec();
    assert!(local[0].is_ipv4() && local[1].is_ipv6());
    for addr in local {
        let mut client = Client::connect(addr);
        client.echoes("");
        assert_eq!(lab.shared.peers.lock().unwrap().pop(), Some(Some(client.local_addr())));
    }
    lab.finish();
}

#[test]
fn a_factory_that_fails_on_one_shard_leaves_nothing_running() {
    let threads = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        names.filter(|name| name.trim() == "ringserve-7").count()
    };
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    // Enough shards that the last one's name is this test's alone.
    let started = On::default().server(no_time_limits()).shards(8).start(move |shard| {
        counted.fetch_add(1, SeqCst);
        if shard.index() == 7 { Err("planted: no service") } else { Ok(Puppet::new(Default::default())) }
    });
    let text = started.unwrap_err().to_string();
    assert_eq!(text, "no service for shard 7: planted: no service");
    assert_eq!(calls.load(SeqCst), 8);
    // A joined thread stays listed for a moment.
    eventually("the last shard's thread ends", SOON, || threads() == 0);
}

#[test]
fn a_factory_that_panics_is_an_error() {
    let started = On::default().server(no_time_limits()).start(|_| -> Puppet { panic!("planted: factory") });
    assert!(matches!(started, Err(Error::FactoryPanicked { shard: 0, .. })));
}

#[test]
fn an_address_that_is_none_is_named_at_the_start() {
    let started = Server::bind("no such host.invalid:1").start(|_| Puppet::new(Default::default()));
    assert!(matches!(started, Err(Error::Address(_))));
    let started = On::default().server(no_time_limits()).shards(0).start(|_| Puppet::new(Default::default()));
    assert!(matches!(started, Err(Error::Shards(0))));
}

#[test]
fn a_time_to_coalesce_out_of_range_is_named_at_the_start() {
    let start = |time| {
        let server = On::default().server(no_time_limits()).coalesce(time);
        server.start(|_| Puppet::new(Default::default()))
    };
    for wrong in [Duration::from_nanos(999), Duration::from_micros(1001), Duration::MAX] {
        let Err(Error::Coalesce(named)) = start(wrong) else { panic!("{wrong:?} is no error") };
        assert_eq!(named, wrong);
    }
    for right in [Duration::ZERO, Duration::from_micros(1), Duration::from_millis(1)] {
        let running = start(right).unwrap();
        running.shutdown();
        running.wait().unwrap();
    }
}

/// Connections put their handles and texts here; a task of the shard sends each text to all.
#[derive(Default)]
struct Room {
    members: RefCell<Vec<LocalHandle>>,
    texts: RefCell<VecDeque<Vec<u8>>>,
    waker: Cell<Option<Waker>>,
}

struct Chat(Rc<Room>);

impl Service for Chat {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        if frame.is_empty() {
            self.0.members.borrow_mut().push(cx.local_handle());
            cx.reply(b"joined");
            return Ok(());
        }
        self.0.texts.borrow_mut().push_back(frame.to_vec());
        if let Some(waker) = self.0.waker.take() {
            waker.wake();
        }
        Ok(())
    }
}

#[test]
fn task_shares_its_shards_state_and_its_panic_ends_it_alone() {
    let running = On::default().server(no_time_limits()).framing(framing()).start(|shard| {
        let room = Rc::new(Room::default());
        let for_task = room.clone();
        shard.spawn(async { panic!("planted: a task panics") });
        shard.spawn(async move {
            loop {
                let text = poll_fn(|task| match for_task.texts.borrow_mut().pop_front() {
                    Some(text) => Poll::Ready(text),
                    None => {
                        for_task.waker.set(Some(task.waker().clone()));
                        Poll::Pending
                    }
                });
                let text = text.await;
                let members = for_task.members.borrow();
                members.iter().for_each(|member| member.push(&text).expect("they live and read"));
            }
        });
        Chat(room)
    });
    let running = running.unwrap();
    let mut members: Vec<Client> = (0..10).map(|_| Client::connect(running.local_addrs()[0])).collect();
    members.iter_mut().for_each(|member| assert_eq!(member.ask(""), b"joined"));
    for n in 0..50 {
        members[n % 10].send(format!("text {n}"));
        members.iter_mut().for_each(|member| assert_eq!(member.recv(), format!("text {n}").as_bytes()));
    }
    drop(members);
    finish(running);
}

#[test]
fn start_and_stop_again_and_again_on_one_port() {
    let addr = {
        let lab = Lab::start(no_time_limits());
        let addr = lab.addr();
        lab.finish();
        addr
    };
    for _ in 0..20 {
        let lab = Lab::of(On::default().server_at(&addr.to_string(), no_time_limits()).framing(framing()));
        lab.client().echoes("");
        lab.finish();
        assert!(TcpStream::connect(addr).is_err());
    }
}

#[test]
fn a_start_that_failed_listens_no_more_though_a_factory_waits() {
    let released = Arc::new(AtomicBool::new(false));
    let addr = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let waits = released.clone();
    let server = On::default().server_at(&addr.to_string(), no_time_limits()).shards(2);
    let started = server.start(move |shard| -> Result<Puppet, std::io::Error> {
        while shard.index() == 0 && !waits.load(SeqCst) {
            std::thread::park_timeout(Duration::from_millis(1));
        }
        Err(std::io::Error::other("no service"))
    });
    assert!(matches!(started, Err(Error::Factory { .. })));
    assert!(TcpStream::connect(addr).is_err(), "connections would wait for a service that never comes");
    let lab = Lab::of(On::default().server_at(&addr.to_string(), no_time_limits()).framing(framing()));
    lab.client().echoes("");
    released.store(true, SeqCst);
    lab.finish();
}

/// Ten restarts, each new server before the old one ends, while clients come and go.
#[test]
fn restarts_on_a_shared_port_reset_no_client() {
    let shared = |addr: &str| {
        Lab::of(On::default().server_at(addr, no_time_limits()).shards(2).share_port(true).framing(framing()))
    };
    let mut lab = shared("127.0.0.1:0");
    let addr = lab.addr();
    let over = AtomicBool::new(false);
    let served = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let end = ringserve_tests::EndOf(&over);
        let clients: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    while !over.load(SeqCst) {
                        // One for each connection: a client whose first packet is dropped comes a
                        // second later.
                        let began = Instant::now();
                        let mut client = Client::connect(addr);
                        client.send(order::echo(""));
                        // A server that drains gives a new connection 30 ms, less two steps of its
                        // wheel at the worst.
                        let was_late = began.elapsed() > Duration::from_millis(10);
                        if client.is_ended() {
                            assert!(was_late, "closed before it was answered");
                            continue;
                        }
                        assert_eq!(client.recv(), order::echo(""));
                        served.fetch_add(1, SeqCst);
                    }
                })
            })
            .collect();
        for _ in 0..10 {
            let before = served.load(SeqCst);
            eventually("clients are served", SOON, || served.load(SeqCst) > before + 100);
            let old = std::mem::replace(&mut lab, shared(&addr.to_string()));
            old.finish();
        }
        drop(end);
        clients.into_iter().for_each(|client| client.join().expect("no client is reset or refused"));
    });
    eprintln!("{} connections over 10 restarts", served.load(SeqCst));
    lab.finish();
}
