//! A service that follows the orders in its frames: [`order`](crate::order) makes them.
//!
//! Asked for a sign of life it sends `beat`, informed of the end of the input it sends `ended`, and
//! continues.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::future::{pending, poll_fn};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Poll, Waker};
use std::time::Duration;

use ringserve::framing::FrameError;
use ringserve::handle::{LocalHandle, PushError};
use ringserve::service::{CloseCx, Failure, OpenCx, Refusal};
use ringserve::{CloseReason, ConnHandle, Cx, Frame, Service};

use crate::order::Order;

/// A part of the pattern's period.
const STREAM_PIECE: usize = crate::PERIOD / 4;

/// State shared by the test and its service.
#[derive(Default)]
pub struct Shared {
    pub gate: Gate,
    pub doors: Doors,
    pub block: Block,
    /// Handles that [`order::reach`](crate::order::reach) gave away.
    pub handles: Mutex<HashMap<Vec<u8>, ConnHandle>>,
    pub heartbeats: AtomicU64,
    pub inputs_ended: AtomicU64,
    /// Open connections, and the most at once.
    pub open_now: AtomicU64,
    pub open_most: AtomicU64,
    pub opened: AtomicU64,
    pub closed: AtomicU64,
    pub malformed: AtomicU64,
    /// Calls that were dropped while they waited, and opens.
    pub dropped: AtomicU64,
    pub reasons: Mutex<Vec<CloseReason>>,
    pub peers: Mutex<Vec<Option<std::net::SocketAddr>>>,
    /// The most bytes an outbox held.
    pub outbox_most: AtomicUsize,
    /// Whether `open` sends a greeting to the next connection.
    pub greet: AtomicBool,
    pub waits_in_open: AtomicBool,
    /// Whether a message is sent to a connection whose call fails, and at the start of a drain.
    pub last_words: AtomicBool,
    pub goodbye: AtomicBool,
    pub refuse: AtomicBool,
    pub panic_in_open: AtomicBool,
    pub panic_in_close: AtomicBool,
    pub panic_in_malformed: AtomicBool,
}

pub struct Puppet {
    pub shared: Arc<Shared>,
    names: RefCell<HashMap<Vec<u8>, LocalHandle>>,
}

impl Puppet {
    pub fn new(shared: Arc<Shared>) -> Puppet {
        Puppet { shared, names: RefCell::default() }
    }
}

#[derive(Default)]
pub struct Session {
    kept: RefCell<Vec<Frame>>,
    panics: Cell<Option<Tripwire>>,
}

impl Shared {
    /// The handle that was given away under a name.
    #[track_caller]
    pub fn handle(&self, name: &str) -> ConnHandle {
        self.handles.lock().unwrap().get(name.as_bytes()).expect("it was given away").clone()
    }
}

/// Panics when dropped.
pub struct Tripwire;

impl Drop for Tripwire {
    fn drop(&mut self) {
        panic!("planted: a drop that panics");
    }
}

pub struct Failed {
    _drops: Option<Tripwire>,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("planted: a call that fails")
    }
}

/// Keeps the first notes: a test with more connections checks counters, and memory.
fn note<T>(notes: &Mutex<Vec<T>>, what: T) {
    let mut notes = notes.lock().unwrap();
    if notes.len() < 1000 {
        notes.push(what);
    }
}

/// Counts calls that end without being done.
struct Unfinished<'a>(&'a AtomicU64, bool);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if self.1 {
            self.0.fetch_add(1, SeqCst);
        }
    }
}

impl Service for Puppet {
    type Session = Session;
    type Error = Failed;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<Session, Refusal> {
        if self.shared.panic_in_open.swap(false, SeqCst) {
            panic!("planted: open panics");
        }
        if self.shared.waits_in_open.load(SeqCst) {
            opening.reply(b"wait");
            self.pass().await;
        }
        if self.shared.refuse.load(SeqCst) {
            opening.reply(b"no");
            return Err(Refusal::new("planted"));
        }
        if self.shared.greet.load(SeqCst) {
            opening.reply(b"hello");
        }
        note(&self.shared.peers, opening.peer().addr());
        self.shared.opened.fetch_add(1, SeqCst);
        let now = self.shared.open_now.fetch_add(1, SeqCst) + 1;
        self.shared.open_most.fetch_max(now, SeqCst);
        Ok(Session::default())
    }

    async fn call(&self, cx: &Cx<'_, Session>, frame: Frame) -> Result<(), Failed> {
        let (what, rest) = Order::of(&frame);
        match what {
            Order::Echo => cx.reply(frame),
            Order::Reply => cx.reply(crate::pattern(number(rest))),
            Order::Replies => {
                let (count, size) = split(rest, b',');
                let reply = crate::pattern(number(size));
                (0..number(count)).for_each(|_| cx.reply(&reply));
            }
            Order::Stream => {
                let (len, base) = (number(rest), crate::pattern(crate::PERIOD));
                for start in (0..len).step_by(STREAM_PIECE) {
                    let piece = STREAM_PIECE.min(len - start);
                    cx.write(&base[start % crate::PERIOD..][..piece]);
                    self.shared.outbox_most.fetch_max(cx.outbox_bytes(), SeqCst);
                    cx.ready().await;
                }
            }
            Order::Gate => {
                self.pass().await;
                cx.reply(frame);
            }
            Order::ThreadWakes => {
                wait_for_a_thread().await;
                cx.reply(frame);
            }
            Order::WakesItself => {
                poll_fn(|task| {
                    task.waker().wake_by_ref();
                    Poll::Ready(())
                })
                .await;
                cx.reply(frame);
            }
            Order::Keep => {
                cx.reply(frame.len().to_string().as_bytes());
                cx.session().kept.borrow_mut().push(frame);
            }
            Order::Close => {
                cx.reply(b"bye");
                cx.close();
            }
            Order::Abort => cx.abort(),
            Order::Fail => return Err(Failed { _drops: None }),
            Order::FailLate => {
                self.pass().await;
                return Err(Failed { _drops: None });
            }
            Order::Panic => panic!("planted: call panics"),
            Order::PanicLate => {
                self.pass().await;
                panic!("planted: call panics after it waited");
            }
            Order::FailWithPanic => {
                self.pass().await;
                return Err(Failed { _drops: Some(Tripwire) });
            }
            Order::PanicInDrop => {
                cx.session().panics.set(Some(Tripwire));
                cx.reply(b"armed");
            }
            Order::WaitWithPanic => {
                let _tripwire = Tripwire;
                self.shared.gate.arrived();
                pending().await
            }
            Order::Sleep => {
                cx.sleep(millis(split(rest, b',').0)).await;
                cx.reply(frame);
            }
            Order::InTime => {
                if cx.timeout(Duration::from_secs(3600), async { cx.reply(frame) }).await.is_err() {
                    cx.reply(b"elapsed");
                }
            }
            Order::TimeOut => {
                let unfinished = Unfinished(&self.shared.dropped, true);
                let never = async move {
                    let _unfinished = unfinished;
                    pending::<()>().await
                };
                assert!(cx.timeout(millis(rest), never).await.is_err());
                cx.reply(b"elapsed");
            }
            Order::Door => {
                let mut unfinished = Unfinished(&self.shared.dropped, true);
                self.shared.doors.pass(rest).await;
                unfinished.1 = false;
                cx.reply(frame);
            }
            Order::ReplyThenGate => {
                cx.reply(crate::pattern(number(rest)));
                self.pass().await;
            }
            Order::HoldOpen => {
                cx.hold_open();
                cx.reply(b"held");
            }
            Order::Reach => {
                self.shared.handles.lock().unwrap().insert(rest.to_vec(), cx.handle());
                cx.reply(b"reached");
            }
            Order::PushThrough => {
                let (name, text) = split(rest, b':');
                let handle = self.shared.handles.lock().unwrap().get(name).cloned();
                cx.reply(answer(handle.expect("it was given away").push(text.to_vec())));
            }
            Order::Draining => cx.reply(if cx.shard().is_draining() { &b"draining"[..] } else { b"serving" }),
            Order::Shard => cx.reply(cx.shard().index().to_string().as_bytes()),
            Order::Block => {
                self.shared.block.wait();
                cx.reply(frame);
            }
            _ => self.reach_others(cx, what, rest),
        }
        Ok(())
    }

    fn heartbeat(&self, cx: &Cx<'_, Session>) {
        self.shared.heartbeats.fetch_add(1, SeqCst);
        cx.reply(b"beat");
    }

    fn input_ended(&self, cx: &Cx<'_, Session>) {
        self.shared.inputs_ended.fetch_add(1, SeqCst);
        cx.reply(b"ended");
    }

    fn malformed(&self, cx: &Cx<'_, Session>, _error: &FrameError) {
        self.shared.malformed.fetch_add(1, SeqCst);
        if self.shared.panic_in_malformed.swap(false, SeqCst) {
            panic!("planted: malformed panics");
        }
        cx.reply(b"malformed");
    }

    fn failed(&self, cx: &Cx<'_, Session>, failure: &Failure<'_, Failed>) {
        if self.shared.last_words.load(SeqCst) {
            cx.reply(failure.to_string().as_bytes());
        }
    }

    fn draining(&self, cx: &Cx<'_, Session>) {
        if self.shared.goodbye.load(SeqCst) {
            cx.reply(b"goodbye");
        }
    }

    fn close(&self, closed: &CloseCx<'_, Session>) {
        self.shared.closed.fetch_add(1, SeqCst);
        self.shared.open_now.fetch_sub(1, SeqCst);
        note(&self.shared.reasons, closed.reason());
        closed.session().kept.borrow_mut().clear();
        if self.shared.panic_in_close.swap(false, SeqCst) {
            panic!("planted: close panics");
        }
    }
}

impl Puppet {
    async fn pass(&self) {
        let mut unfinished = Unfinished(&self.shared.dropped, true);
        self.shared.gate.pass().await;
        unfinished.1 = false;
    }

    fn reach_others(&self, cx: &Cx<'_, Session>, what: Order, rest: &[u8]) {
        let mut names = self.names.borrow_mut();
        let (name, text) = split(rest, b':');
        let Some(handle) = names.get(name) else {
            assert_eq!(what, Order::Name, "no connection is called that");
            names.insert(name.to_vec(), cx.local_handle());
            return cx.reply(b"named");
        };
        let handle = handle.clone();
        drop(names);
        match what {
            Order::PushTo => cx.reply(answer(handle.push(text))),
            Order::CloseNamed => {
                handle.close();
                cx.reply(b"closed");
            }
            Order::IsGone => cx.reply(if handle.is_gone() { &b"gone"[..] } else { b"lives" }),
            what => unreachable!("{what:?} is for no other connection"),
        }
    }
}

/// A gate that holds calls back until the test opens it.
#[derive(Default)]
pub struct Gate {
    open: AtomicBool,
    arrived: AtomicU64,
    wakers: Mutex<Vec<Waker>>,
}

impl Gate {
    pub fn open(&self) {
        self.open.store(true, SeqCst);
        self.wake_all();
    }

    pub fn close(&self) {
        self.open.store(false, SeqCst);
    }

    /// Wakes every call that ever waited here since the last time, also those that are done.
    pub fn wake_all(&self) {
        for waker in self.wakers.lock().unwrap().drain(..) {
            waker.wake();
        }
    }

    /// Calls that came to the gate and found it closed.
    pub fn came(&self) -> u64 {
        self.arrived.load(SeqCst)
    }

    fn arrived(&self) {
        self.arrived.fetch_add(1, SeqCst);
    }

    pub async fn pass(&self) {
        let mut first = true;
        poll_fn(|task| {
            if self.open.load(SeqCst) {
                return Poll::Ready(());
            }
            self.wakers.lock().unwrap().push(task.waker().clone());
            if std::mem::take(&mut first) {
                self.arrived();
            }
            // It may have been opened in between.
            if self.open.load(SeqCst) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await
    }
}

/// Holds each call back until the test lets its name go.
#[derive(Default)]
pub struct Doors {
    came: AtomicU64,
    open: Mutex<HashSet<Vec<u8>>>,
    wakers: Mutex<HashMap<Vec<u8>, Waker>>,
}

impl Doors {
    /// Lets the call of that name go, once, whether it came already or not.
    pub fn open(&self, name: &str) {
        self.open.lock().unwrap().insert(name.into());
        let waker = self.wakers.lock().unwrap().remove(name.as_bytes());
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Calls that came.
    pub fn came(&self) -> u64 {
        self.came.load(SeqCst)
    }

    async fn pass(&self, name: &[u8]) {
        let mut first = true;
        poll_fn(|task| {
            // Registered first, so that no opening is missed.
            self.wakers.lock().unwrap().insert(name.to_vec(), task.waker().clone());
            let mut open = self.open.lock().unwrap();
            if open.remove(name) {
                return Poll::Ready(());
            }
            if std::mem::take(&mut first) {
                self.came.fetch_add(1, SeqCst);
            }
            Poll::Pending
        })
        .await
    }
}

/// Blocks threads until the test lets them go.
#[derive(Default)]
pub struct Block {
    came: AtomicU64,
    ended: Mutex<bool>,
    end: Condvar,
}

impl Block {
    pub fn wait(&self) {
        self.came.fetch_add(1, SeqCst);
        let ended = self.ended.lock().unwrap();
        // Bounded, so that a test that fails also ends.
        drop(self.end.wait_timeout_while(ended, 2 * crate::SOON, |ended| !*ended).unwrap());
    }

    /// Threads that came.
    pub fn came(&self) -> u64 {
        self.came.load(SeqCst)
    }

    pub fn end(&self) {
        *self.ended.lock().unwrap() = true;
        self.end.notify_all();
    }

    /// Makes threads that come from now on wait again.
    pub fn begin_again(&self) {
        *self.ended.lock().unwrap() = false;
    }
}

fn answer(pushed: Result<(), PushError>) -> &'static [u8] {
    match pushed {
        Ok(()) => b"ok",
        Err(PushError::Full) => b"full",
        Err(PushError::Gone) => b"gone",
        Err(PushError::Unframed) => b"unframed",
    }
}

fn millis(text: &[u8]) -> Duration {
    Duration::from_millis(number(text) as u64)
}

async fn wait_for_a_thread() {
    let done = Arc::new(AtomicBool::new(false));
    let mut started = false;
    poll_fn(|task| {
        if done.load(SeqCst) {
            return Poll::Ready(());
        }
        if !std::mem::replace(&mut started, true) {
            let (done, waker) = (done.clone(), task.waker().clone());
            std::thread::spawn(move || {
                done.store(true, SeqCst);
                waker.wake();
            });
        }
        Poll::Pending
    })
    .await
}

fn number(text: &[u8]) -> usize {
    std::str::from_utf8(text).ok().and_then(|text| text.parse().ok()).expect("a number")
}

fn split(text: &[u8], at: u8) -> (&[u8], &[u8]) {
    match text.iter().position(|byte| *byte == at) {
        Some(cut) => (&text[..cut], &text[cut + 1..]),
        None => (text, &[]),
    }
}
