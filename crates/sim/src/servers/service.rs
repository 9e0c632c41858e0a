//! The service of the whole servers: it does what each request asks for, then replies with the
//! request's number.

use std::cell::{Cell, RefCell};
use std::future::{pending, poll_fn};
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use ringserve_server::framing::{
    Decode, EncodeError, FrameError, Framing, Lines, Outbox, Payload, encode_to_vec,
};
use ringserve_server::limits::ConnLimits;
use ringserve_server::net::Destination;
use ringserve_server::sync::{AskError, SendError};
use ringserve_server::task::JoinError;
use ringserve_server::time::Sleep;
use ringserve_server::{
    CloseCx, ConnHandle, Cx, Failure, Frame, OpenCx, PushError, Refusal, ServerControl, Service, Shard,
    Stream,
};

use super::cover::Cover;
use super::inspected::{Known, Registry};
use super::layered::check_facts;
use super::meshes::{Deal, Meshes, Order, Question, push_on};
use super::plan::{OUTCOME_WITHIN, Plan, Verb};
use super::proxied::check_peer;

/// The address of an upstream, and one where nothing listens.
pub const UPSTREAM: ([u8; 4], u16) = ([10, 2, 0, 1], 9000);
pub const NO_UPSTREAM: ([u8; 4], u16) = ([10, 2, 0, 2], 9000);

/// A name with both addresses.
pub const NAME: (&str, u16) = ("upstream", 9000);

/// Bytes of a reply to [`Verb::Big`] in addition to the number, in all.
pub const BIG_BYTES: usize = 40_000;
const BIG_PIECE: usize = 1000;

/// Bytes that a slow reader of an upstream requests: fewer than may wait unread on both sides.
const UPSTREAM_BYTES: usize = 8000;

/// Tasks of a large crowd: more than a turn polls, which is 4096 and some.
const CROWD_MAX: usize = 10_000;

/// One in this many crowds is large.
const CROWDS_ONCE_IN: u64 = 64;

/// Time for which an upstream is unused: longer than any limit on accepted connections that a seed
/// draws.
pub const POOLED: Duration = Duration::from_secs(600);

/// Messages that are more than a shard handles in a turn, which is 1024; and one in how many
/// messages comes after them.
const MESSAGES: usize = 2000;
const MESSAGES_ONCE_IN: u64 = 64;

/// One in this many messages comes after another one that panics.
const BAD_MESSAGE_ONCE_IN: u64 = 8;

/// One in this many replies comes twice with the canary.
const CANARY_ONCE_IN: u64 = 500;

/// The word at which the planted framing panics.
const BAD_WORD: &[u8] = b"!panic";

/// State shared by the shards' values of one service of a server.
#[derive(Clone)]
pub struct Common {
    /// It is the second service of two.
    pub is_second: bool,
    pub meshes: Meshes,
    /// Connections for which `open` was called.
    pub opened: Arc<AtomicU64>,
    /// Connections of both services that were admitted.
    registry: Registry,
    /// Controls of the server, by shard.
    pub controls: Arc<Mutex<Vec<ServerControl>>>,
}

impl Common {
    pub fn new(is_second: bool, plan: &Plan) -> Common {
        let meshes = Meshes::new(plan.mailbox);
        let (opened, controls) = Default::default();
        Common { is_second, meshes, opened, registry: Registry::default(), controls }
    }

    /// The state of a second service of the same server.
    pub fn beside(&self, plan: &Plan) -> Common {
        Common { registry: self.registry.clone(), ..Common::new(true, plan) }
    }

    /// Checks at the end that all charges for peers were returned.
    pub fn check_admission(&self, plan: &Plan, cover: &Cover) {
        if let Some(control) = self.controls.lock().unwrap_or_else(PoisonError::into_inner).pop() {
            let stats = control.admission_stats();
            assert_eq!((stats.connections, stats.prefixes), (0, 0), "connections count that ended");
            cover.add("did", "admission of a whole server", u64::from(plan.admission.is_some()));
        }
    }
}

pub struct Model {
    common: Common,
    plan: Plan,
    shard: Shard,
    /// The last number that was sent to another shard.
    sent: Cell<u64>,
    cover: Cover,
    kept: RefCell<Option<Frame>>,
    sleeps: RefCell<Vec<Pin<Box<Sleep>>>>,
}

#[derive(Default)]
pub struct Session {
    known: Known,
    tasks: Alive,
    panics_in_close: Cell<bool>,
    panics_in_drop: Cell<bool>,
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.panics_in_drop.get() && !std::thread::panicking() {
            panic!("planted: the drop of a session panics");
        }
    }
}

impl Model {
    pub fn new(shard: &Shard, common: &Common, cover: &Cover, plan: &Plan) -> Model {
        common.meshes.register(shard, cover);
        if !common.is_second {
            common.registry.begin(shard, plan.inspects, cover);
        }
        let (kept, sleeps) = (RefCell::default(), RefCell::default());
        Model {
            common: common.clone(),
            plan: plan.clone(),
            shard: shard.clone(),
            sent: Cell::new(0),
            cover: cover.clone(),
            kept,
            sleeps,
        }
    }

    /// The upstream, by its address or by a name that is resolved outside the shard.
    fn upstream(&self, time: Duration) -> Destination {
        match time.as_millis() % 3 {
            0 => {
                self.cover.count("did", "upstream by its name");
                NAME.into()
            }
            _ => SocketAddr::from(UPSTREAM).into(),
        }
    }

    fn one_in(&self, count: u64) -> bool {
        count > 0 && self.shard.random().is_multiple_of(count)
    }

    fn any_shard(&self) -> usize {
        (self.shard.random() % self.shard.count() as u64) as usize
    }

    fn question(&self, deals: &[Deal], time: Duration) -> Question {
        let deal = deals[(self.shard.random() % deals.len() as u64) as usize];
        Question { number: self.shard.random() >> 1, from: self.shard.index(), deal, time }
    }

    /// Asks any shards, several times at once.
    async fn ask(&self, time: Duration) {
        let mut asked = Vec::new();
        for _ in 0..1 + self.shard.random() % 16 {
            let (to, question) = (self.any_shard(), self.question(Deal::ALL, time));
            asked.push((to, question, self.common.meshes.questions.ask(to, question)));
        }
        for (to, question, asked) in asked {
            if question.deal == Deal::Keep || self.one_in(8) {
                match self.shard.timeout(time, asked).await {
                    Ok(outcome) => self.check_outcome(to, question, outcome).await,
                    Err(_) => self.cover.count("ask", "given up"),
                }
                continue;
            }
            let outcome = self.shard.timeout(OUTCOME_WITHIN, asked).await;
            let outcome = outcome.unwrap_or_else(|_| panic!("a question {:?} has no outcome", question.deal));
            self.check_outcome(to, question, outcome).await;
        }
    }

    async fn check_outcome(&self, to: usize, question: Question, outcome: Result<u64, AskError>) {
        let deal = question.deal;
        match outcome {
            Ok(answer) => {
                assert!(deal.answers(), "an answer to a question {deal:?}");
                assert_eq!(answer, 2 * question.number, "the answer to another question");
                self.cover.count("ask", "answered");
            }
            Err(AskError::Full) => {
                self.cover.count("ask", "no room");
                assert!(self.plan.mailbox < 1000, "a large mailbox is full");
            }
            Err(error) => {
                let name = if error == AskError::Gone { "Gone" } else { "Unanswered" };
                self.cover.count("ask", format!("{name} after {deal:?}"));
                if error == AskError::Gone || deal.answers() {
                    let ended = self.common.meshes.questions.ask(to, question).await;
                    assert_eq!(ended, Err(AskError::Gone), "a shard that lives gives no answer");
                }
            }
        }
    }

    /// Asks all shards, and accepts whatever they answer.
    async fn ask_all(&self, time: Duration) {
        let question = self.question(&[Deal::Answer, Deal::AnswerLater], time);
        let asked = self.common.meshes.questions.ask_all(|_| question);
        let outcomes = self.shard.timeout(OUTCOME_WITHIN, asked).await.expect("each question has an outcome");
        assert_eq!(outcomes.len(), self.shard.count(), "one outcome for each shard");
        for (to, outcome) in outcomes.into_iter().enumerate() {
            self.check_outcome(to, question, outcome).await;
        }
    }

    /// Sends numbers that grow to any shards, and gives up waiting for room now and then.
    async fn send(&self) {
        let mut sendings = Vec::new();
        for _ in 0..1 + self.shard.random() % 16 {
            self.sent.set(self.sent.get() + 1);
            sendings.push(self.common.meshes.numbers.send(self.any_shard(), self.sent.get()));
        }
        for sending in sendings {
            let limit = if self.one_in(8) { Duration::ZERO } else { OUTCOME_WITHIN };
            match self.shard.timeout(limit, sending).await {
                Ok(Ok(())) => self.cover.count("send", "had room"),
                Ok(Err(SendError::Gone(_))) => self.cover.count("send", "to a shard that ended"),
                Ok(Err(error)) => panic!("{error}"),
                Err(_) => {
                    assert!(limit < OUTCOME_WITHIN, "a message waits for room for ever");
                    self.cover.count("send", "given up");
                }
            }
        }
    }

    /// Makes some shard push to a connection, at times after messages that delay it.
    fn ask_for_push(&self, handle: ConnHandle, text: String) {
        let to = self.any_shard();
        if self.one_in(MESSAGES_ONCE_IN) {
            (0..MESSAGES).for_each(|_| drop(self.common.meshes.orders.try_send(to, Order::default())));
        }
        if self.one_in(BAD_MESSAGE_ONCE_IN) {
            let _ = self.common.meshes.orders.try_send(to, Order::Panic);
        }
        let _ = self.common.meshes.orders.try_send(to, Order::Push(handle, text));
    }

    /// Keeps an upstream, and checks after a long time whether it is still there.
    fn keep_upstream(&self, mut stream: Stream) {
        let (shard, cover, holds) = (self.shard.clone(), self.cover.clone(), self.plan.keeps_upstreams);
        self.shard.spawn(async move {
            shard.sleep(POOLED).await;
            let kept = exchange(&shard, &mut stream, 4, Duration::ZERO).await;
            cover.count("upstream", if matches!(kept, Ok(true)) { "kept" } else { "not kept" });
            let excused = !holds || shard.is_draining();
            assert!(
                excused || matches!(kept, Ok(true)),
                "an upstream that is asked nothing is gone: {kept:?}"
            );
        });
    }
}

/// A waker that panics.
struct BadWaker;

impl Wake for BadWaker {
    fn wake(self: Arc<Self>) {
        panic!("planted: a waker panics");
    }
}

/// `10..60` of `a10..60 padding`.
fn number_of(request: &[u8]) -> &str {
    let end = request[1..].iter().position(|byte| !byte.is_ascii_digit()).map_or(request.len(), |at| at + 1);
    std::str::from_utf8(&request[1..end]).expect("digits")
}

/// Tasks of a connection that live.
#[derive(Clone, Default)]
struct Alive(Rc<Cell<u32>>);

/// One of them.
struct Lives(Alive);

impl Alive {
    fn one_more(&self) -> Lives {
        self.0.set(self.0.get() + 1);
        Lives(self.clone())
    }
}

impl Drop for Lives {
    fn drop(&mut self) {
        self.0.0.set(self.0.0.get() - 1);
    }
}

/// Tasks that wait until all of them are woken together.
#[derive(Default)]
struct Crowd {
    is_open: Cell<bool>,
    left: Cell<usize>,
    waiting: RefCell<Vec<Waker>>,
    caller: Cell<Option<Waker>>,
}

impl Crowd {
    /// Makes that many tasks come and go.
    async fn run(shard: &Shard, tasks: usize) {
        let crowd = Rc::new(Crowd { left: Cell::new(tasks), ..Crowd::default() });
        for _ in 0..tasks {
            let crowd = crowd.clone();
            shard.spawn(async move {
                poll_fn(|task| crowd.enter(task)).await;
                crowd.left.set(crowd.left.get() - 1);
                if let Some(caller) = crowd.caller.take() {
                    caller.wake();
                }
            });
        }
        shard.sleep(Duration::from_millis(1)).await;
        crowd.is_open.set(true);
        crowd.waiting.take().into_iter().for_each(Waker::wake);
        poll_fn(|task| match crowd.left.get() {
            0 => Poll::Ready(()),
            _ => {
                crowd.caller.set(Some(task.waker().clone()));
                Poll::Pending
            }
        })
        .await;
    }

    fn enter(&self, task: &Context<'_>) -> Poll<()> {
        if self.is_open.get() {
            return Poll::Ready(());
        }
        self.waiting.borrow_mut().push(task.waker().clone());
        Poll::Pending
    }
}

/// Sends that many bytes to an upstream and takes them back, with a pause before each piece.
async fn ask_upstream(shard: &Shard, to: Destination, len: usize, pause: Duration) -> std::io::Result<bool> {
    let mut stream = shard.connect(to).await?;
    exchange(shard, &mut stream, len, pause).await
}

/// Sends that many bytes and takes them back. False if the upstream ends before.
async fn exchange(shard: &Shard, stream: &mut Stream, len: usize, pause: Duration) -> std::io::Result<bool> {
    stream.write_all(&vec![b'u'; len]).await?;
    let mut heard = 0;
    while heard < len {
        if !pause.is_zero() {
            shard.sleep(pause).await;
        }
        match stream.read_frame().await? {
            Some(bytes) => heard += bytes.len(),
            None => return Ok(false),
        }
    }
    Ok(true)
}

/// An `open` that waits, and is done or dropped.
struct Waits<'a> {
    cover: &'a Cover,
    is_done: bool,
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.cover.count("did", if self.is_done { "open that waits" } else { "open that is dropped" });
    }
}

impl Service for Model {
    type Session = Session;
    type Error = &'static str;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<Session, Refusal> {
        self.common.opened.fetch_add(1, Ordering::Relaxed);
        if self.one_in(self.plan.open_waits) {
            let mut waits = Waits { cover: &self.cover, is_done: false };
            if self.plan.limits.open_timeout.is_some() && self.one_in(4) {
                pending::<()>().await;
            }
            opening.sleep(Duration::from_micros(self.shard.random() % 2_000_000)).await;
            waits.is_done = true;
        }
        if self.one_in(self.plan.open_panics) {
            panic!("planted: open panics");
        }
        if self.one_in(self.plan.refuses) {
            self.cover.count("did", "refusal");
            return Err(Refusal::new("planted"));
        }
        let mut session = Session::default();
        session.known = self.common.registry.opened(&self.shard, opening.id());
        Ok(session)
    }

    async fn call(&self, cx: &Cx<'_, Session>, frame: Frame) -> Result<(), &'static str> {
        let number = number_of(&frame).to_owned();
        let is_second = self.plan.is_second(number.parse().expect("a number"));
        assert!(is_second == self.common.is_second, "request {number} came to the other service");
        let is_proxied = self.plan.proxied && !self.common.is_second;
        check_peer(&cx.peer(), number.parse().expect("a number"), is_proxied, &self.cover);
        check_facts(cx.transport_info(), number.parse().expect("a number"), &self.plan, &self.cover);
        let Some(verb) = Verb::of(frame[0]) else { return Err("an unknown verb") };
        let time = Duration::from_micros(self.shard.random() % 2_000_000);
        // A slow reader finds several pieces there.
        let (len, pause) = if time.as_micros().is_multiple_of(2) {
            (4, Duration::ZERO)
        } else {
            (UPSTREAM_BYTES, time / 100)
        };
        if self.one_in(16) {
            // The same values as before, read in another way.
            self.cover.count("did", "limits of one connection");
            cx.set_limits(&ConnLimits::default().frame_bytes_max(1 << 20)).expect("they are in range");
        }
        match verb {
            Verb::Echo => {}
            Verb::Sleep => {
                let (before, time) = (self.shard.now(), time);
                cx.sleep(time).await;
                assert!(self.shard.now() - before >= time, "a sleep ends early");
                if time.as_millis().is_multiple_of(3) {
                    let sum = self.shard.spawn_blocking(move || time.as_micros() + 1).await;
                    assert_eq!(sum, Ok(time.as_micros() + 1), "threads and queue are not full");
                    self.cover.count("did", "call that blocks");
                }
            }
            Verb::Timeout => {
                let before = self.shard.now();
                assert!(cx.timeout(time, pending::<()>()).await.is_err());
                assert!(self.shard.now() - before >= time, "a time limit is over early");
            }
            Verb::Spawn if time.as_micros().is_multiple_of(2) => {
                // Before the reply to this frame exists, and to a connection whose frames are being
                // passed on.
                let (handle, text) = (cx.handle(), format!("+{number}"));
                self.cover.count("did", "push by a call");
                push_on(|| handle.push(text.clone()), || handle.ready()).await;
            }
            Verb::Spawn => {
                let (handle, shard, cover) = (cx.local_handle(), self.shard.clone(), self.cover.clone());
                let text = format!("+{number}");
                cx.spawn(async move {
                    shard.sleep(time).await;
                    cover.count("did", "push by a task");
                    push_on(|| handle.push(text.as_str()), || handle.ready()).await;
                });
            }
            Verb::Own => {
                let (lives, shard) = (cx.session().tasks.one_more(), self.shard.clone());
                let spawned = cx.spawn_on_connection(async move {
                    let _lives = lives;
                    shard.sleep(time).await;
                    time
                });
                match (spawned, self.shard.random() % 3) {
                    (Ok(task), 0) => assert_eq!(task.await, Ok(time), "a task of a connection that lives"),
                    (Ok(task), 1) => {
                        task.abort();
                        assert_eq!(task.await, Err(JoinError::Aborted));
                    }
                    (Ok(_detached), _) => {}
                    (Err(error), _) => self.cover.count("did", error),
                }
            }
            Verb::Watch => {
                let to = (self.shard.random() % self.shard.count() as u64) as usize;
                let _ = self.common.meshes.orders.try_send(to, Order::Watch(cx.handle()));
            }
            Verb::Mesh => {
                self.ask_for_push(cx.handle(), format!("+{number}"));
            }
            Verb::Upstream => match ask_upstream(&self.shard, self.upstream(time), len, pause).await {
                Ok(true) => self.cover.count("did", "word from an upstream"),
                Ok(false) => self.cover.count("did", "upstream that ends early"),
                Err(error) => self.cover.count("upstream", error.kind()),
            },
            Verb::NoUpstream => {
                let refused =
                    ask_upstream(&self.shard, SocketAddr::from(NO_UPSTREAM).into(), len, pause).await;
                self.cover.count("upstream", refused.expect_err("nothing listens there").kind());
            }
            Verb::GiveUp => {
                // At once, before the shard checks, or a moment later.
                let time = if time.as_micros().is_multiple_of(2) { Duration::ZERO } else { time / 1000 };
                let attempt = self.shard.connect(self.upstream(time));
                let given_up = self.shard.timeout(time, attempt).await.is_err();
                self.cover.count("upstream", if given_up { "given up" } else { "in time" });
            }
            Verb::Pool => match self.shard.connect(SocketAddr::from(UPSTREAM)).await {
                Ok(stream) => self.keep_upstream(stream),
                Err(error) => self.cover.count("upstream", error.kind()),
            },
            Verb::Crowd => {
                let is_large = self.one_in(CROWDS_ONCE_IN);
                Crowd::run(&self.shard, if is_large { CROWD_MAX } else { 8 }).await;
                self.cover.count("crowd", if is_large { "beyond a turn" } else { "small" });
            }
            Verb::Big => {
                for _ in 0..BIG_BYTES / BIG_PIECE {
                    cx.ready().await;
                    cx.reply(&[b'.'; BIG_PIECE][..]);
                }
            }
            Verb::Keep => {
                let before = self.kept.replace(Some(frame.clone()));
                drop(before);
            }
            Verb::Ask => self.ask(time).await,
            Verb::AskAll => self.ask_all(time).await,
            Verb::Send => self.send().await,
            Verb::BadWaker => {
                let mut sleep = Box::pin(self.shard.sleep(time));
                let waker = Waker::from(Arc::new(BadWaker));
                if sleep.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
                    self.sleeps.borrow_mut().push(sleep);
                }
            }
            Verb::Abort => cx.abort(),
            Verb::Fail => return Err("planted"),
            Verb::PanicInCall => panic!("planted: a call panics"),
            Verb::PanicAfterWait => {
                cx.sleep(time).await;
                panic!("planted: a call that waited panics");
            }
            Verb::PanicInEncode => {
                cx.reply(BAD_WORD);
                return Ok(());
            }
            Verb::PanicInDecode => return Ok(()),
            Verb::PanicInPush => {
                let word = std::str::from_utf8(BAD_WORD).expect("text");
                self.ask_for_push(cx.handle(), word.to_owned());
                return Ok(());
            }
            Verb::PanicInClose => cx.session().panics_in_close.set(true),
            Verb::PanicInDrop => cx.session().panics_in_drop.set(true),
            Verb::Close => {}
        }
        self.cover.count("call", format!("{verb:?}"));
        cx.reply(format!("={number}").as_str());
        if self.plan.canary && self.one_in(CANARY_ONCE_IN) {
            cx.reply(format!("={number}").as_str());
        }
        if matches!(verb, Verb::Close | Verb::PanicInClose | Verb::PanicInDrop) {
            cx.close();
            let late = (cx.handle().push("late"), cx.local_handle().push("late"));
            assert!(
                matches!(late, (Err(PushError::Gone), Err(PushError::Gone))),
                "a push behind the end: {late:?}"
            );
        }
        Ok(())
    }

    fn failed(&self, cx: &Cx<'_, Session>, failure: &Failure<'_, &'static str>) {
        let kind = match failure {
            Failure::Error(_) => "error",
            Failure::TimedOut => "time limit",
            _ => "panic",
        };
        self.cover.count("failed", kind);
        // Clients expect that a panic resets them.
        if kind != "panic" && self.one_in(2) {
            cx.reply("?");
        }
    }

    fn draining(&self, cx: &Cx<'_, Session>) {
        self.cover.count("did", "word of a drain");
        cx.reply("?");
    }

    fn heartbeat(&self, cx: &Cx<'_, Session>) {
        self.cover.count("did", "heartbeat");
        cx.reply("?");
    }

    fn close(&self, closed: &CloseCx<'_, Session>) {
        self.cover.count("close", closed.reason());
        closed.session().known.end();
        assert_eq!(closed.session().tasks.0.get(), 0, "tasks of a connection that ended live");
        if closed.session().panics_in_close.get() {
            panic!("planted: close panics");
        }
    }
}

/// Lines, by a framing that panics at a word.
#[derive(Clone)]
pub struct Planted(pub Lines);

impl Framing for Planted {
    fn decode(&self, bytes: &[u8], scanned: usize) -> Result<Decode, FrameError> {
        assert!(!bytes.starts_with(BAD_WORD), "planted: decode panics");
        self.0.decode(bytes, scanned)
    }

    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        let bad = payload.bytes() == BAD_WORD;
        if bad {
            out.put(b"half a frame");
        }
        assert!(!bad, "planted: encode panics");
        self.0.encode(payload, out)
    }
}

/// The request that a client sends.
pub fn request(framing: &impl Framing, verb: Verb, number: u32, padding: usize) -> Vec<u8> {
    if verb == Verb::PanicInDecode {
        return BAD_WORD.to_vec();
    }
    let payload = format!("{}{number} {}", verb.word(), "x".repeat(padding)).into_bytes();
    encode_to_vec(framing, &payload).expect("a request has a frame")
}
