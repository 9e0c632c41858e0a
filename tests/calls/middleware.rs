//! Services that wrap services.

use std::convert::Infallible;
use std::fmt;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ringserve::framing::{FrameError, LengthPrefix};
use ringserve::middleware::{
    CallEnd, CallObserver, Calls, ConcurrencyLimit, Observe, TimeLimit, TimeLimitError,
};
use ringserve::service::{CloseCx, IntoService, OpenCx, Refusal};
use ringserve::{CloseReason, Cx, Frame, ServerHandle, Service, Shard};
use ringserve_tests::Bounds;
use ringserve_tests::client::End;
use ringserve_tests::{Client, On, SOON, eventually, no_time_limits, watch};
use tokio::sync::Semaphore;

/// Long enough never to be over in a test.
const NEVER: Duration = Duration::from_secs(3600);

/// Notes its events. A call `wait` waits until the test lets one go, `twice` is polled twice before
/// it is done, `fail` fails, `panic` panics, `hold` holds the connection open, anything else is
/// sent back.
#[derive(Clone, Default)]
struct Inner {
    heard: Arc<Mutex<Vec<String>>>,
    gate: Arc<Gate>,
}

struct Gate {
    open: Semaphore,
    inside: AtomicUsize,
    most: AtomicUsize,
}

impl Default for Gate {
    fn default() -> Gate {
        Gate { open: Semaphore::new(0), inside: AtomicUsize::default(), most: AtomicUsize::default() }
    }
}

struct Inside<'a>(&'a Gate);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, SeqCst);
    }
}

impl Inner {
    fn hears(&self, what: impl Into<String>) {
        self.heard.lock().unwrap().push(what.into());
    }

    fn heard(&self) -> Vec<String> {
        self.heard.lock().unwrap().clone()
    }
}

#[derive(Debug, PartialEq)]
struct Failed;

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("as it was told")
    }
}

impl Service for Inner {
    type Session = ();
    type Error = Failed;

    async fn open(&self, _opening: &OpenCx<'_>) -> Result<(), Refusal> {
        self.hears("open");
        if self.heard().iter().any(|heard| heard == "call refuse") {
            return Err(Refusal::new("as it was told"));
        }
        Ok(())
    }

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Failed> {
        let text = String::from_utf8_lossy(&frame).into_owned();
        self.hears(format!("call {text}"));
        match text.split(' ').next().unwrap() {
            "wait" => {
                let inside = self.gate.inside.fetch_add(1, SeqCst) + 1;
                let _inside = Inside(&self.gate);
                self.gate.most.fetch_max(inside, SeqCst);
                self.gate.open.acquire().await.unwrap().forget();
            }
            "twice" => {
                let mut polls = 0;
                std::future::poll_fn(|task| {
                    polls += 1;
                    task.waker().wake_by_ref();
                    if polls > 2 { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
                })
                .await;
            }
            "fail" => return Err(Failed),
            "panic" => panic!("planted: a call that panics"),
            "hold" => cx.hold_open(),
            _ => {}
        }
        cx.reply(frame);
        Ok(())
    }

    fn malformed(&self, cx: &Cx<'_, ()>, _error: &FrameError) {
        self.hears("malformed");
        cx.reply(b"malformed");
    }

    fn heartbeat(&self, cx: &Cx<'_, ()>) {
        self.hears("heartbeat");
        cx.reply(b"heartbeat");
    }

    fn input_ended(&self, cx: &Cx<'_, ()>) {
        self.hears("input_ended");
        cx.reply(b"input_ended");
        cx.close();
    }

    fn close(&self, closed: &CloseCx<'_, ()>) {
        self.hears(format!("close {}", closed.reason().name()));
    }
}

fn serve<M: IntoService<LengthPrefix>>(
    limits: Bounds,
    factory: impl Fn(&Shard) -> M + Send + Sync + 'static,
) -> ServerHandle {
    On::default().server(limits).framing(LengthPrefix::default()).start(factory).expect("the server starts")
}

fn client(running: &ServerHandle) -> Client {
    Client::connect(running.local_addrs()[0])
}

/// The whole stack, and what it counts.
fn stack(limits: Bounds, max: usize, time: Duration) -> (ServerHandle, Inner, Calls) {
    let (inner, calls) = (Inner::default(), Calls::default().time_one_in(1).slower_than(Duration::ZERO));
    let (inside, counts) = (inner.clone(), calls.clone());
    let running = serve(limits, move |_| {
        let limited = ConcurrencyLimit::new(inside.clone(), max);
        Observe::new(TimeLimit::new(limited, time), counts.on_shard())
    });
    (running, inner, calls)
}

#[test]
fn every_hook_reaches_the_service_inside() {
    // Heartbeats may come at any time, and any number of them.
    let heartbeat = Some(Duration::from_millis(20));
    let limits = no_time_limits().heartbeat_interval(heartbeat).heartbeats_missed_max(255);
    let (running, inner, _) = stack(limits, 100, NEVER);
    let mut one = client(&running);
    one.send("hold");
    while one.recv() != b"hold" {}
    assert_eq!(one.recv(), b"heartbeat");
    one.finish_writing();
    while one.recv() != b"input_ended" {}
    assert_eq!(one.end_after_all(), End::Fin);
    let mut other = client(&running);
    // A length beyond every limit.
    other.write(&[0xff; 4]);
    while other.recv() != b"malformed" {}
    other.end_after_all();
    drop((one, other));
    watch::holds(&running, 0);
    let mut third = client(&running);
    third.send("refuse");
    while third.recv() != b"refuse" {}
    let mut refused = client(&running);
    assert_eq!(refused.end(), End::Fin);
    drop((third, refused));
    ringserve_tests::finish(running);
    let mut heard = inner.heard();
    heard.retain(|heard| heard != "heartbeat");
    assert_eq!(
        heard[..7],
        ["open", "call hold", "input_ended", "close peer_closed", "open", "malformed", "close bad_frame"],
        "{heard:?}"
    );
    assert_eq!(heard[7..10], ["open", "call refuse", "open"], "{heard:?}");
    assert_eq!(heard.iter().filter(|heard| heard.starts_with("close")).count(), 3, "{heard:?}");
}

#[test]
fn call_that_takes_too_long_closes_its_connection_alone() {
    let (running, inner, calls) = stack(no_time_limits(), 100, Duration::from_millis(20));
    let mut canary = client(&running);
    assert_eq!(canary.ask_text("canary"), "canary");
    let mut slow = client(&running);
    slow.send("wait");
    assert_eq!(slow.end(), End::Fin);
    assert_eq!(inner.gate.inside.load(SeqCst), 0);
    watch::closed_for(&running, CloseReason::HandlerError, 1);
    assert_eq!(canary.ask_text("canary"), "canary");
    let counts = calls.counts();
    assert_eq!((counts.begun, counts.done, counts.failed, counts.dropped), (3, 2, 1, 0), "{counts:?}");
    drop((canary, slow));
    ringserve_tests::finish(running);
}

#[test]
fn a_timeout_names_the_time_or_the_error_inside() {
    let elapsed = TimeLimitError::<Failed>::Elapsed(Duration::from_millis(1500));
    assert_eq!(elapsed.to_string(), "the call was not done within 1.5s");
    assert_eq!(TimeLimitError::Service(Failed).to_string(), "as it was told");
}

#[test]
fn calls_beyond_the_limit_wait_and_come_in_their_order() {
    let (running, inner, calls) = stack(no_time_limits(), 2, NEVER);
    let mut clients: Vec<Client> = (0..6).map(|_| client(&running)).collect();
    for (n, client) in clients.iter_mut().enumerate() {
        client.send(format!("wait {n}"));
        eventually("the call begins", SOON, || calls.counts().begun == n as u64 + 1);
    }
    assert_eq!(inner.gate.inside.load(SeqCst), 2);
    for (n, client) in clients.iter_mut().enumerate() {
        inner.gate.open.add_permits(1);
        assert_eq!(client.recv(), format!("wait {n}").as_bytes());
    }
    assert_eq!(inner.gate.most.load(SeqCst), 2);
    let mut heard = inner.heard();
    heard.retain(|heard| heard.starts_with("call"));
    assert_eq!(heard, (0..6).map(|n| format!("call wait {n}")).collect::<Vec<_>>());
    drop(clients);
    ringserve_tests::finish(running);
}

#[test]
fn calls_that_are_dropped_lose_no_permit() {
    let (running, inner, calls) = stack(no_time_limits(), 1, NEVER);
    // The first is in flight, the second and third wait for it.
    let mut clients: Vec<Client> = (0..3).map(|_| client(&running)).collect();
    for (n, client) in clients.iter_mut().enumerate() {
        client.send(format!("wait {n}"));
        eventually("the call begins", SOON, || calls.counts().begun == n as u64 + 1);
    }
    let third = clients.pop().unwrap();
    clients.pop().unwrap().reset();
    eventually("the call that waits is dropped", SOON, || calls.counts().dropped == 1);
    clients.pop().unwrap().reset();
    eventually("the call in flight is dropped", SOON, || calls.counts().dropped == 2);
    let mut third = third;
    inner.gate.open.add_permits(1);
    assert_eq!(third.recv(), b"wait 2");
    // And a call that panics gives its permit back.
    let mut panics = client(&running);
    panics.send("panic");
    assert_eq!(panics.end(), End::Reset);
    assert_eq!(third.ask_text("canary"), "canary");
    assert_eq!(inner.gate.most.load(SeqCst), 1);
    assert_eq!(calls.counts().dropped, 3);
    drop((third, panics));
    ringserve_tests::finish(running);
}

#[test]
fn calls_are_counted_by_how_they_end() {
    let (running, inner, calls) = stack(no_time_limits(), 100, NEVER);
    let mut one = client(&running);
    (0..5).for_each(|_| assert_eq!(one.ask_text("text"), "text"));
    one.send("wait");
    eventually("it waits", SOON, || calls.counts().waited == 1);
    assert_eq!(calls.counts().in_flight(), 1);
    inner.gate.open.add_permits(1);
    assert_eq!(one.recv(), b"wait");
    one.send("fail");
    assert_eq!(one.end(), End::Fin);
    watch::holds(&running, 0);
    let counts = calls.counts();
    let ends = (counts.begun, counts.done, counts.failed, counts.dropped, counts.in_flight());
    assert_eq!(ends, (7, 6, 1, 0, 0), "{counts:?}");
    assert_eq!((counts.waited, counts.slow, counts.timed), (1, 1, 7), "{counts:?}");
    assert!(counts.mean_time().unwrap() > Duration::ZERO);
    assert_eq!(calls.each(), [counts]);
    ringserve_tests::finish(running);
}

#[test]
fn only_one_in_so_many_calls_is_timed() {
    let calls = Calls::default().time_one_in(3);
    let counts = calls.clone();
    let running = serve(no_time_limits(), move |_| Observe::new(Inner::default(), counts.on_shard()));
    let mut one = client(&running);
    (0..7).for_each(|_| assert_eq!(one.ask_text("text"), "text"));
    drop(one);
    watch::holds(&running, 0);
    // The first, the fourth and the seventh.
    assert_eq!(calls.counts().timed, 3);
    ringserve_tests::finish(running);
}

/// Remembers the length of each frame, and whether it waited.
struct Lengths(Arc<Mutex<Vec<(usize, bool, String)>>>);

impl CallObserver<Inner> for Lengths {
    type Call = (usize, bool);

    fn begins(&self, _cx: &Cx<'_, ()>, frame: &Frame) -> (usize, bool) {
        (frame.len(), false)
    }

    fn waits(&self, _cx: &Cx<'_, ()>, call: &mut (usize, bool)) {
        assert!(!std::mem::replace(&mut call.1, true), "told once");
    }

    fn ends(&self, _cx: &Cx<'_, ()>, call: (usize, bool), end: CallEnd<'_, Failed>) {
        self.0.lock().unwrap().push((call.0, call.1, end.to_string()));
    }
}

#[test]
fn an_observer_of_ones_own_is_told_of_beginning_wait_and_end() {
    let (seen, inner) = (Arc::new(Mutex::default()), Inner::default());
    let (told, inside) = (seen.clone(), inner.clone());
    let running = serve(no_time_limits(), move |_| Observe::new(inside.clone(), Lengths(told.clone())));
    let mut one = client(&running);
    assert_eq!(one.ask_text("twice"), "twice");
    one.send("wait there");
    inner.gate.open.add_permits(1);
    assert_eq!(one.recv(), b"wait there");
    one.send("fail");
    one.end();
    let mut other = client(&running);
    other.send("wait");
    eventually("it waits", SOON, || inner.gate.inside.load(SeqCst) == 1);
    other.reset();
    watch::holds(&running, 0);
    let seen = seen.lock().unwrap().clone();
    let ends: Vec<(usize, &str)> = seen.iter().map(|(len, _, end)| (*len, end.as_str())).collect();
    assert_eq!(ends, [(5, "done"), (10, "done"), (4, "failed: as it was told"), (4, "dropped")]);
    // Whether the second one had to wait depends on when the test let it go.
    assert_eq!((seen[0].1, seen[2].1, seen[3].1), (true, false, true));
    ringserve_tests::finish(running);
}

#[test]
fn a_closure_is_told_of_ends() {
    let seen = Arc::new(AtomicUsize::new(0));
    let failures = seen.clone();
    let running = serve(no_time_limits(), move |_| {
        let failures = failures.clone();
        Observe::new(Inner::default(), move |_: &Cx<'_, ()>, end: CallEnd<'_, Failed>| {
            if let CallEnd::Failed(error) = end {
                assert_eq!(*error, Failed);
                failures.fetch_add(1, SeqCst);
            }
        })
    });
    let mut one = client(&running);
    assert_eq!(one.ask_text("text"), "text");
    one.send("fail");
    assert_eq!(one.end(), End::Fin);
    assert_eq!(seen.load(SeqCst), 1);
    ringserve_tests::finish(running);
}

/// A service whose error type has no value.
struct Never;

impl Service for Never {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, _cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Infallible> {
        Ok(())
    }
}

#[test]
#[should_panic = "a concurrency limit of 0 lets no call pass"]
fn a_limit_that_lets_nothing_pass_is_refused() {
    ConcurrencyLimit::new(Never, 0);
}
