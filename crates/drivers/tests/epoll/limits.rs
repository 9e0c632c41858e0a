//! Waiting and waking, what a request costs, and the limits of the process.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use ringserve_core::{AcceptEnd, Budget, CloseHow, Completion, Driver, Op, Wait};
use ringserve_drivers::{Epoll, EpollConfig, SetupError};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::common::{EpollRig as Rig, batch_of, small_epoll};

#[test]
fn an_idle_turn_returns_at_its_time_after_one_call() {
    let mut rig = Rig::accepting(&small_epoll(4096, 64));
    let (_client, _id) = rig.connect_receiving(0);
    rig.calm();
    for rest in [Duration::from_millis(40), Duration::from_micros(10), Duration::from_nanos(1)] {
        let (started, before) = (Instant::now(), rig.driver.stats());
        assert_eq!(rig.turn(Wait::For(rest)), 0);
        let after = rig.driver.stats();
        assert!(started.elapsed() >= rest, "back after {:?} of {rest:?}", started.elapsed());
        assert_eq!((after.enters, after.calls), (before.enters + 1, before.calls));
    }
}

#[test]
fn sockets_without_an_answer_are_few_and_the_rest_stays_queued() {
    let mut rig = Rig::accepting(&small_epoll(4096, 64));
    let addr = rig.address;
    let clients: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(addr).unwrap()).collect();
    let mut sockets = Vec::new();
    let mut accepts = |rig: &mut Rig| {
        let mut out = Vec::new();
        rig.driver.turn(Wait::For(Duration::from_millis(20)), Budget::default(), &mut out).unwrap();
        for completion in out {
            let Completion::Accepted { socket, .. } = completion else { panic!("{completion:?}") };
            sockets.push(socket);
        }
        std::mem::take(&mut sockets)
    };
    let mut first = accepts(&mut rig);
    assert!((1..=32).contains(&first.len()), "{} descriptors are taken", first.len());
    let before = rig.driver.stats();
    first.extend(accepts(&mut rig));
    assert!(
        first.len() <= 32 && rig.driver.stats().enters <= before.enters + 1,
        "and it waits for an answer"
    );
    let mut all = 0;
    while all < clients.len() {
        all += first.len();
        first.drain(..).for_each(|socket| rig.driver.submit(Op::Refuse { socket }));
        first = accepts(&mut rig);
        assert!(!first.is_empty() || all == clients.len(), "{all} of {} came", clients.len());
    }
}

#[test]
fn a_waker_ends_the_turn_from_another_thread_and_is_seen_once() {
    let mut rig = Rig::accepting(&small_epoll(4096, 64));
    let waker = rig.driver.waker();
    for _ in 0..3 {
        let waker = waker.clone();
        let thread = thread::spawn(move || waker.wake());
        assert_eq!(rig.turn_woken(), 0);
        thread.join().unwrap();
        let rest = Duration::from_millis(20);
        let started = Instant::now();
        rig.turn(Wait::For(rest));
        assert!(started.elapsed() >= rest, "woken twice by one wake");
    }
    waker.wake_by_ref();
    waker.wake_by_ref();
    rig.turn_woken();
}

#[test]
fn request_costs_one_receive_one_send_and_at_most_one_wait() {
    for defer in [false, true] {
        let mut rig = Rig::accepting(&small_epoll(4096, 64));
        let (mut client, id) = rig.connect_receiving(0);
        rig.calm();
        let before = rig.driver.stats();
        let requests = 1000;
        for n in 0..requests {
            client.write_all(&[n as u8; 64]).unwrap();
            let lease = rig.received_now(id);
            rig.driver.submit(Op::Send { id, batch: batch_of(&lease) });
            if defer {
                rig.driver.defer_sent();
            } else {
                rig.sent(id);
            }
            client.read_exact(&mut [0; 64]).unwrap();
        }
        let after = rig.driver.stats();
        assert_eq!(after.calls - before.calls, 2 * requests, "receives and sends");
        assert!(after.enters - before.enters <= requests, "{} waits", after.enters - before.enters);
        let turns = if defer { requests } else { 2 * requests };
        assert_eq!(after.turns - before.turns, turns);
    }
}

impl Rig {
    /// The bytes the next turns bring, without a turn that brings nothing.
    fn received_now(&mut self, id: ringserve_core::ConnId) -> ringserve_buf::LeaseMut {
        loop {
            assert!(self.turn_woken() > 0, "a turn for nothing");
            for event in std::mem::take(&mut self.events) {
                match event {
                    Completion::Received { id: of, lease } => {
                        assert_eq!(of, id);
                        return lease;
                    }
                    Completion::Sent { .. } => {}
                    other => panic!("{other:?}"),
                }
            }
        }
    }
}

#[test]
fn deferred_answers_come_when_the_wait_ends_or_with_others() {
    let mut rig = Rig::accepting(&small_epoll(4096, 64));
    let (_client, id) = rig.connect_receiving(0);
    rig.calm();
    rig.send(id, b"x");
    rig.driver.defer_sent();
    let started = Instant::now();
    let rest = Duration::from_millis(20);
    assert_eq!(rig.turn(Wait::For(rest)), 1, "the answer comes with the end of the wait");
    assert!(started.elapsed() >= rest);
    rig.sent(id);
    rig.send(id, b"x");
    rig.driver.submit(Op::ReceiveStop { id });
    rig.driver.defer_sent();
    assert_eq!(rig.turn_woken(), 2, "another answer ends the wait");
    rig.events.clear();
    rig.send(id, b"x");
    rig.driver.defer_sent();
    assert_eq!(rig.turn(Wait::No), 1);
    rig.events.clear();
    rig.send(id, b"x");
    assert_eq!(rig.turn_woken(), 1, "it held for one turn");
}

#[test]
fn connections_wake_no_shard_while_accepting_is_stopped() {
    let mut rig = Rig::accepting(&small_epoll(4096, 64));
    rig.calm();
    rig.driver.submit(Op::AcceptStop { listener: 0 });
    assert_eq!(rig.accept_ended(), AcceptEnd::Stopped);
    let clients: Vec<TcpStream> = (0..5).map(|_| TcpStream::connect(rig.address).unwrap()).collect();
    let (started, rest) = (Instant::now(), Duration::from_millis(20));
    assert_eq!(rig.turn(Wait::For(rest)), 0);
    assert!(started.elapsed() >= rest, "woken by connections that are not accepted");
    rig.driver.submit(Op::Accept { listener: 0 });
    for (slot, client) in clients.iter().enumerate() {
        rig.take(slot as u32, client);
    }
    rig.calm();
    rig.settled();
}

#[test]
fn accepting_keeps_to_the_budget_and_loses_no_peer() {
    let mut rig = Rig::accepting(&small_epoll(4096, 64));
    rig.budget.completions = 2;
    let clients: Vec<TcpStream> = (0..7).map(|_| TcpStream::connect(rig.address).unwrap()).collect();
    for (slot, client) in clients.iter().enumerate() {
        rig.take(slot as u32, client);
    }
    rig.calm();
    rig.settled();
}

/// The limit is the process's, so this test runs itself once more in a separate process.
#[test]
fn queued_connection_survives_the_limit_of_descriptors() {
    const CHILD: &str = "RINGSERVE_EPOLL_DESCRIPTORS";
    if std::env::var_os(CHILD).is_none() {
        let name = "limits::queued_connection_survives_the_limit_of_descriptors";
        let mut child = Command::new(std::env::current_exe().unwrap());
        let output = child.args([name, "--exact", "--nocapture"]).env(CHILD, "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
        assert!(text.contains("1 passed"), "{text}");
        return;
    }
    let mut rig = Rig::accepting(&small_epoll(4096, 64));
    let (_first, id) = rig.connect(0);
    rig.calm();
    let limit = getrlimit(Resource::Nofile);
    let next = rustix::io::dup(std::io::stdin()).unwrap();
    let number = std::os::fd::AsRawFd::as_raw_fd(&next) as u64;
    drop(next);
    // The client gets the last one.
    setrlimit(Resource::Nofile, Rlimit { current: Some(number + 1), maximum: limit.maximum }).unwrap();
    let mut client = TcpStream::connect(rig.address).unwrap();
    assert_eq!(rig.accept_ended(), AcceptEnd::Descriptors);
    let (started, rest) = (Instant::now(), Duration::from_millis(20));
    assert_eq!(rig.turn(Wait::For(rest)), 0);
    assert!(started.elapsed() >= rest, "spins at the limit");
    rig.driver.submit(Op::Accept { listener: 0 });
    assert_eq!(rig.accept_ended(), AcceptEnd::Descriptors, "it is still there");
    setrlimit(Resource::Nofile, limit).unwrap();
    rig.driver.submit(Op::Accept { listener: 0 });
    let second = rig.take(1, &client);
    rig.close(second, CloseHow::Orderly);
    assert_eq!(client.read(&mut [0; 4]).unwrap(), 0);
    rig.close(id, CloseHow::Orderly);
    rig.settled();
}

#[test]
fn values_out_of_range_are_refused_with_their_name() {
    let config = EpollConfig { connections: 0, ..EpollConfig::default() };
    let error = Epoll::new(&config, Vec::new()).err().unwrap();
    assert!(matches!(error, SetupError::OutOfRange { name: "connections", value: 0, .. }), "{error}");
    assert_eq!(Epoll::new(&EpollConfig::default(), Vec::new()).unwrap().connections_max(), 16 * 1024);
}
