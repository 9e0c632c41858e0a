//! User code that panics, from wherever it is called: its connection ends, the shard lives.

use std::convert::Infallible;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::task::{Context, Wake, Waker};
use std::thread;
use std::time::Duration;

use ringserve::framing::{Decode, EncodeError, FrameError, Framing, LengthPrefix, Lines, Outbox, Payload};
use ringserve::{CloseReason, Cx, Frame, ServerHandle, Service};
use ringserve_tests::Bounds;
use ringserve_tests::client::{End, frame};
use ringserve_tests::{Client, Lab, On, SOON, eventually, no_time_limits, order, watch};

const PANICKED: CloseReason = CloseReason::HandlerPanicked;

#[track_caller]
fn still_serves(lab: &Lab) {
    let mut client = lab.client();
    client.echoes("alive");
    assert_eq!(
        client.ask(order::thread_wakes("alive")),
        order::thread_wakes("alive"),
        "calls that wait are woken"
    );
}

#[test]
fn a_call_that_panics_ends_its_connection_only() {
    let lab = Lab::start(no_time_limits());
    let mut canary = lab.client();
    for n in 1..=50 {
        let mut client = lab.client();
        client.send(order::panics());
        assert_eq!(client.end(), End::Reset);
        lab.closed_for(PANICKED, n);
        canary.echoes("canary");
    }
    still_serves(&lab);
    lab.finish();
}

#[test]
fn call_that_panics_ends_the_others_of_the_same_write() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.client();
    client.write(&[frame(order::echo("1")), frame(order::panics()), frame(order::echo("2"))].concat());
    assert_eq!(client.end_after_all(), End::Reset);
    lab.closed_for(PANICKED, 1);
    still_serves(&lab);
    lab.finish();
}

#[test]
fn a_call_that_panics_after_waiting_ends_its_connection_only() {
    let lab = Lab::start(no_time_limits());
    let mut clients: Vec<Client> = (0..10).map(|_| lab.client()).collect();
    clients.iter_mut().for_each(|client| client.send(order::panic_late()));
    let mut other = lab.client();
    other.send(order::gate("other"));
    lab.parked(11);
    lab.shared.gate.open();
    clients.iter_mut().for_each(|client| assert_eq!(client.end(), End::Reset));
    assert_eq!(other.recv(), order::gate("other"));
    lab.closed_for(PANICKED, 10);
    still_serves(&lab);
    lab.finish();
}

#[test]
fn open_that_panics_ends_its_connection_and_close_is_not_called() {
    let lab = Lab::start(no_time_limits());
    lab.shared.panic_in_open.store(true, SeqCst);
    // The reset may arrive before the peer saw that it is connected.
    let end = lab.client_that_may_fail().map_or(End::Reset, |mut client| client.end());
    assert_eq!(end, End::Reset);
    lab.closed_for(PANICKED, 1);
    assert_eq!(lab.shared.closed.load(SeqCst), 0);
    still_serves(&lab);
    lab.finish();
}

#[test]
fn close_that_panics_harms_no_other_connection() {
    let lab = Lab::start(no_time_limits());
    let mut canary = lab.client();
    lab.shared.panic_in_close.store(true, SeqCst);
    drop(lab.client());
    lab.closed_for(CloseReason::PeerClosed, 1);
    canary.echoes("canary");
    still_serves(&lab);
    lab.finish();
}

#[test]
fn malformed_that_panics_ends_its_connection_only() {
    let lab = Lab::start(no_time_limits());
    let mut canary = lab.client();
    lab.shared.panic_in_malformed.store(true, SeqCst);
    let mut client = lab.client();
    client.write(&[0xFF; 4]);
    assert_eq!(client.end(), End::Reset);
    lab.closed_for(PANICKED, 1);
    canary.echoes("canary");
    still_serves(&lab);
    lab.finish();
}

#[test]
fn session_whose_drop_panics_harms_no_other_connection() {
    let lab = Lab::start(no_time_limits());
    let mut canary = lab.client();
    for _ in 0..3 {
        let mut client = lab.client();
        assert_eq!(client.ask(order::panic_in_drop()), b"armed");
        drop(client);
    }
    lab.closed_for(CloseReason::PeerClosed, 3);
    canary.echoes("canary");
    still_serves(&lab);
    lab.finish();
}

#[test]
fn dropped_call_whose_drop_panics_harms_no_other_connection() {
    let lab = Lab::start(no_time_limits());
    let mut canary = lab.client();
    let mut clients: Vec<Client> = (0..3).map(|_| lab.client()).collect();
    clients.iter_mut().for_each(|client| client.send(order::wait_with_panic()));
    lab.parked(3);
    clients.into_iter().for_each(Client::reset);
    lab.closed_for(CloseReason::PeerReset, 3);
    canary.echoes("canary");
    still_serves(&lab);
    lab.finish();
}

#[test]
fn error_whose_drop_panics_harms_no_other_connection() {
    let lab = Lab::start(no_time_limits());
    let mut canary = lab.client();
    let mut client = lab.client();
    client.send(order::fail_with_panic());
    lab.parked(1);
    lab.shared.gate.open();
    client.end_after_all();
    canary.echoes("canary");
    still_serves(&lab);
    lab.finish();
}

#[test]
fn a_panic_at_shutdown_does_not_keep_the_server() {
    let lab = Lab::start(no_time_limits());
    let mut armed = lab.client();
    assert_eq!(armed.ask(order::panic_in_drop()), b"armed");
    let mut waits = lab.client();
    waits.send(order::wait_with_panic());
    lab.parked(1);
    lab.abort();
}

/// Lines, but it panics over the byte 0xEE, in decoding or encoding.
#[derive(Clone)]
struct Touchy;

impl Framing for Touchy {
    fn decode(&self, bytes: &[u8], scanned: usize) -> Result<Decode, FrameError> {
        assert!(!bytes.contains(&0xEE), "planted: decode panics");
        Lines::default().decode(bytes, scanned)
    }

    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        if payload.bytes().starts_with(&[0]) {
            out.put(&[b'?'; 3000]);
            panic!("planted: encode panics");
        }
        Lines::default().encode(payload, out)
    }
}

fn touchy(limits: Bounds) -> Lab {
    Lab::of(On::default().server(limits).framing(Touchy))
}

#[track_caller]
fn echoes_lines(client: &mut Client) {
    client.write(&order::line(order::echo("canary")));
    assert_eq!(client.read(8), order::line(order::echo("canary")));
}

#[test]
fn framing_that_panics_at_a_frame_ends_its_connection_only() {
    let lab = touchy(no_time_limits());
    let mut canary = lab.client();
    let mut client = lab.client();
    echoes_lines(&mut client);
    client.write(&[0xEE]);
    assert_eq!(client.end(), End::Reset);
    lab.closed_for(PANICKED, 1);
    echoes_lines(&mut canary);
    lab.finish();
}

#[test]
fn framing_that_panics_within_a_frame_keeps_the_accounts() {
    let lab = touchy(no_time_limits());
    let mut canary = lab.client();
    for n in 1..=20 {
        let mut client = lab.client();
        client.write(&[b'e'; 3000]);
        eventually("the first part arrives", SOON, || lab.stats().counters.bytes_received >= n * 3000);
        client.write(&[0xEE; 3000]);
        assert_eq!(client.end(), End::Reset);
        lab.closed_for(PANICKED, n);
        // A peer that holds half a frame would now be closed because of the wrong count.
        canary.write(b"e");
        echoes_half(&mut canary);
    }
    lab.finish();
}

/// The rest of a line that began with an `e`.
#[track_caller]
fn echoes_half(client: &mut Client) {
    client.write(&[b'x'; 2000]);
    client.write(b"\n");
    assert_eq!(client.read(2002).len(), 2002);
}

/// Less than what a few panics leave behind if what they wrote is not taken back.
fn few_bytes() -> Bounds {
    no_time_limits()
        .frame_bytes_max(4 << 10)
        .outbox_bytes_low(1 << 10)
        .outbox_bytes_high(4 << 10)
        .outbox_bytes_max(8 << 10)
        .inbox_bytes_high(4 << 10)
        .held_bytes_max(16 << 10)
}

#[test]
fn encode_that_panics_in_a_call_counts_nothing() {
    let lab = touchy(few_bytes());
    let mut canary = lab.client();
    for n in 1..=20 {
        let mut client = lab.client();
        // The pattern starts with a 0.
        client.write(&order::line(order::reply(10)));
        assert_eq!(client.end(), End::Reset, "and no part of a frame before it");
        lab.closed_for(PANICKED, n);
        echoes_lines(&mut canary);
    }
    let report = lab.finish();
    assert_eq!(report.counters.closed_for(CloseReason::MemoryLimit), 0);
}

#[test]
fn encode_that_panics_over_a_push_lets_other_mail_arrive() {
    let lab = touchy(few_bytes());
    let mut canary = lab.client();
    canary.write(&order::line(order::reach("canary")));
    assert_eq!(canary.read(8), b"reached\n");
    let to_canary = lab.shared.handle("canary");
    for n in 1..=20 {
        let mut client = lab.client();
        client.write(&order::line(order::reach("it")));
        assert_eq!(client.read(8), b"reached\n");
        let handle = lab.shared.handle("it");
        thread::scope(|scope| {
            scope.spawn(|| {
                to_canary.push(&b"before"[..]).unwrap();
                handle.push(&[0][..]).unwrap();
                to_canary.push(&b"after"[..]).unwrap();
            });
        });
        assert_eq!(canary.read(13), b"before\nafter\n");
        assert_eq!(client.end(), End::Reset, "and no part of a frame before it");
        lab.closed_for(PANICKED, n);
        eventually("the handle hears of it", SOON, || handle.is_gone());
    }
    let report = lab.finish();
    assert_eq!(report.counters.closed_for(CloseReason::MemoryLimit), 0);
}

#[test]
fn encode_that_panics_over_a_local_push_ends_both_connections() {
    let lab = touchy(few_bytes());
    let mut canary = lab.client();
    for n in 1..=20 {
        let (mut named, mut pushes) = (lab.client(), lab.client());
        named.write(&order::line(order::name(n.to_string())));
        assert_eq!(named.read(6), b"named\n");
        pushes.write(&order::line(order::push_to(n.to_string(), "\0")));
        assert_eq!((named.end(), pushes.end()), (End::Reset, End::Reset));
        lab.closed_for(PANICKED, 2 * n);
        echoes_lines(&mut canary);
    }
    lab.finish();
}

#[test]
fn encode_that_panics_in_a_broadcast_ends_those_it_was_for() {
    let lab = touchy(few_bytes());
    let mut canary = lab.client();
    let mut members: Vec<Client> = (0..50).map(|_| lab.client()).collect();
    for (n, member) in members.iter_mut().enumerate() {
        member.write(&order::line(order::reach(n.to_string())));
        assert_eq!(member.read(8), b"reached\n");
    }
    (0..50).for_each(|n| lab.shared.handle(&n.to_string()).push(&[0][..]).unwrap());
    members.iter_mut().for_each(|member| assert_eq!(member.end(), End::Reset));
    lab.closed_for(PANICKED, 50);
    echoes_lines(&mut canary);
    lab.finish();
}

/// A waker that panics instead of waking.
struct Bomb;

impl Wake for Bomb {
    fn wake(self: Arc<Self>) {
        panic!("planted: a waker panics");
    }
}

/// A service whose calls wait with a waker that panics, if their first letter is upper case.
struct Waits {
    upstream: SocketAddr,
}

impl Service for Waits {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        let bombed = line[0].is_ascii_uppercase();
        match line[0].to_ascii_lowercase() {
            b's' => with_waker(bombed, cx.sleep(Duration::from_millis(10))).await,
            b'r' => {
                cx.reply(&[b'r'; 1 << 20]);
                with_waker(bombed, cx.ready()).await;
            }
            b'd' => with_waker(bombed, cx.shard().draining()).await,
            b'c' => drop(with_waker(bombed, cx.shard().connect(self.upstream)).await),
            _ => {}
        }
        cx.reply(line);
        Ok(())
    }
}

/// Polls a future once with that waker if `bombed`, and then waits for ever.
async fn with_waker<F: Future>(bombed: bool, future: F) -> F::Output {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Bomb));
    poll_fn(|task| {
        if bombed {
            future.as_mut().poll(&mut Context::from_waker(&waker))
        } else {
            future.as_mut().poll(task)
        }
    })
    .await
}

fn waits() -> ServerHandle {
    let upstream = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = upstream.local_addr().unwrap();
    thread::spawn(move || while upstream.accept().is_ok() {});
    let server = On::default().server(no_time_limits()).framing(Lines::default());
    server.start(move |_| Waits { upstream: addr }).unwrap()
}

#[track_caller]
fn answers(client: &mut Client, line: &[u8]) {
    client.write(line);
    assert_eq!(client.read(line.len()), line);
}

#[test]
fn a_waker_that_panics_when_a_sleep_ends_wakes_all_others() {
    let running = waits();
    let mut clients: Vec<Client> = (0..40).map(|_| Client::connect(running.local_addrs()[0])).collect();
    for round in 0..5 {
        // All set their timers in the same few turns.
        for (n, client) in clients.iter_mut().enumerate() {
            client.write(if n % 2 == round % 2 && n / 8 == round { b"S\n" } else { b"s\n" });
        }
        let served = clients.iter_mut().enumerate().filter(|(n, _)| n / 8 > round);
        served.for_each(|(_, client)| assert_eq!(client.read(2), b"s\n"));
    }
    let mut other = Client::connect(running.local_addrs()[0]);
    answers(&mut other, b"s\n");
    running.abort();
    running.wait().expect("no shard ended by it");
}

#[test]
fn waker_that_panics_for_room_ends_its_connection_only() {
    let running = waits();
    let mut other = Client::connect(running.local_addrs()[0]);
    for n in 1..=10 {
        let mut client = Client::with_small_window(running.local_addrs()[0]);
        client.write(b"R\n");
        assert_eq!(client.end_after_all(), End::Reset);
        watch::closed_for(&running, PANICKED, n);
        other.write(b"r\n");
        assert_eq!(other.read((1 << 20) + 3).len(), (1 << 20) + 3);
    }
    ringserve_tests::finish(running);
}

#[test]
fn a_waker_that_panics_when_a_drain_begins_wakes_all_others() {
    let running = waits();
    let mut clients: Vec<Client> = (0..20).map(|_| Client::connect(running.local_addrs()[0])).collect();
    for (n, client) in clients.iter_mut().enumerate() {
        answers(client, b"e\n");
        client.write(if n % 3 == 0 { b"D\n" } else { b"d\n" });
    }
    eventually("all wait", SOON, || running.stats_now().counters.frames == 40);
    running.shutdown();
    for (_, client) in clients.iter_mut().enumerate().filter(|(n, _)| n % 3 != 0) {
        assert_eq!(client.read(2), b"d\n");
        assert_eq!(client.end(), End::Fin);
    }
    running.abort();
    running.wait().expect("no shard ended by it");
}

#[test]
fn waker_that_panics_for_an_upstream_harms_no_other() {
    let running = waits();
    let mut other = Client::connect(running.local_addrs()[0]);
    for _ in 0..10 {
        let mut client = Client::connect(running.local_addrs()[0]);
        client.write(b"C\n");
        answers(&mut other, b"c\n");
        answers(&mut other, b"s\n");
    }
    running.abort();
    running.wait().expect("no shard ended by it");
}

#[test]
fn admit_that_panics_refuses_and_the_shard_lives() {
    static PANICS: AtomicBool = AtomicBool::new(true);
    let server = On::default().server(no_time_limits()).framing(LengthPrefix::default()).admit(|_| {
        assert!(!PANICS.swap(false, SeqCst), "planted: admit panics");
        true
    });
    let lab = Lab::of(server);
    lab.client().end_after_all();
    still_serves(&lab);
    let report = lab.finish();
    assert_eq!(report.counters.refused, 1);
}

/// Panics once more when it is dropped.
struct CarriedBomb;

impl Drop for CarriedBomb {
    fn drop(&mut self) {
        panic!("planted: what a panic carries panics too");
    }
}

/// Panics with something that panics.
struct PanicsTwice;

impl Service for PanicsTwice {
    type Session = ();
    type Error = std::convert::Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
        if &*frame == b"panic" {
            std::panic::panic_any(CarriedBomb);
        }
        cx.reply(frame);
        Ok(())
    }
}

#[test]
fn a_panic_that_carries_another_one_ends_its_connection_only() {
    let server = On::default().server(no_time_limits()).framing(LengthPrefix::default());
    let running = server.start(|_| PanicsTwice).unwrap();
    let addr = running.local_addrs()[0];
    let mut canary = Client::connect(addr);
    let mut client = Client::connect(addr);
    client.send("panic");
    assert_eq!(client.end(), End::Reset);
    assert_eq!(canary.ask("alive"), b"alive");
    drop((client, canary));
    ringserve_tests::finish(running);
}
