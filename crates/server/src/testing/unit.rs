//! Single calls of a service, without a visible network.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::marker::PhantomData;
use std::net::{IpAddr, Ipv4Addr};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ringserve_base::clock::VirtualTime;
use ringserve_base::guard::message_of;
use ringserve_buf::Lease;
use ringserve_core::framing::{Cut, EncodeError, FrameError, Payload, TypedFraming};
use ringserve_core::{CloseReason, Frame, Limits, Outbox};
use ringserve_simkernel::{Adversary, Faults, Socket};

use super::panics;
use super::sim::Sim;
use super::world::{Ran, SeedFailed, World, WorldDraws};
use crate::overload::{Load, Shed};
use crate::server::builder::Server;
use crate::shard::face::closed::{CloseCx, Failure};
use crate::shard::face::cx::Cx;
use crate::shard::face::handle::Shard;
use crate::shard::face::opening::{OpenCx, Refusal};
use crate::shard::face::service::{FactoryError, FactoryOutput, IntoService, Service};
use crate::trace::{Keeps, Trace};

/// A frame with these bytes as its payload: for tests of code that takes frames.
///
/// ```
/// let frame = ringserve::testing::frame(b"hello");
/// assert_eq!(&frame[..], b"hello");
/// ```
pub fn frame(payload: impl AsRef<[u8]>) -> Frame {
    let payload = payload.as_ref();
    Frame::new(Lease::copy_of(payload), 0, payload.len())
}

/// A connection to a service, whose calls are made one at a time, for plain unit tests.
///
/// A call may wait: for [`Cx::sleep`](crate::Cx::sleep), whose time passes at once, for tasks that
/// it spawns, for anything on its shard.
///
/// ```
/// use ringserve::testing::TestConn;
/// # use ringserve::{Cx, Frame, Service};
/// # struct Echo;
/// # impl Service for Echo {
/// #     type Session = ();
/// #     type Error = std::convert::Infallible;
/// #     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
/// #         cx.reply(frame);
/// #         Ok(())
/// #     }
/// # }
///
/// let mut conn = TestConn::open(|_shard| Echo);
/// let called = conn.call("hello");
/// assert_eq!(called.result, Ok(()));
/// assert_eq!(called.replies, [b"hello"]);
/// assert!(!conn.is_closed());
/// ```
///
/// Open a service of frames with a head `H` by [`with_heads`](crate::with_heads), and make its
/// calls by [`call_with_head`](TestConn::call_with_head).
pub struct TestConn<S: Service<H>, H: Default + 'static = ()> {
    world: Rc<World>,
    socket: Option<Socket>,
    seen: Rc<Seen<S, H>>,
    received: Vec<u8>,
}

/// The outcome of a call.
#[derive(Debug)]
#[non_exhaustive]
pub struct CallOutcome<E> {
    /// The result that the call returned.
    pub result: Result<(), E>,
    /// Each [`reply`](crate::Cx::reply) since the last call, and [written](crate::Cx::write) bytes:
    /// those between two replies are one element.
    pub replies: Vec<Vec<u8>>,
}

/// The results of a service's methods.
struct Seen<S: Service<H>, H> {
    /// `None` while `open` is pending.
    opened: Cell<Option<bool>>,
    /// The head of the frame on its way.
    head: Cell<H>,
    result: RefCell<Option<Result<(), S::Error>>>,
    closed: Cell<Option<CloseReason>>,
}

impl<S: Service<H>, H: Default + 'static> TestConn<S, H> {
    /// Opens a connection to the service that the factory makes. A pending [`open`](Service::open)
    /// is awaited; it is dropped at [`Limits::open_timeout`].
    ///
    /// # Panics
    /// If the factory fails, or the service panics.
    pub fn open<Make>(factory: impl Fn(&Shard) -> Make + 'static) -> TestConn<S, H>
    where
        Make: IntoService<Replies<H>, Service = S>,
    {
        /// The first port of any server.
        const ADDR: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 0, 0, 1), 7000);
        let time = VirtualTime::start();
        let trace = Trace::new(time.clone(), Keeps::Events);
        let settings = WorldDraws {
            seed: 0,
            faults: Faults::none(),
            adversary: Adversary::default(),
            steps_max: 1_000_000,
            allowed: Rc::new(|_| false),
        };
        let world = Rc::new(World::new(settings, time, trace));
        let seen = Rc::new(Seen {
            opened: Cell::new(None),
            head: Cell::default(),
            result: RefCell::new(None),
            closed: Cell::new(None),
        });
        let recorded = seen.clone();
        let mut conn = TestConn { world: world.clone(), socket: None, seen, received: Vec::new() };
        conn.guarded(|conn| {
            let sim = Sim::new(conn.world.clone(), Duration::ZERO);
            let factory = move |shard: &Shard| Record { made: factory(shard), seen: recorded.clone() };
            let addr = sim.serve(Server::bind(ADDR).framing(Replies::<H>(PhantomData)), factory);
            let mut socket = conn.world.network.socket(IpAddr::V4(Ipv4Addr::new(10, 128, 0, 0)), addr);
            let connected = socket.poll_connect(&mut Context::from_waker(Waker::noop()));
            assert!(matches!(connected, Poll::Ready(Ok(()))), "nothing is in the way");
            conn.socket = Some(socket);
            let seen = conn.seen.clone();
            conn.world.run(None, |_| seen.opened.get().is_some());
            conn.run_due();
        });
        conn
    }

    /// Hands a frame to the service and waits until its call is done.
    ///
    /// # Panics
    /// If the service panics, the connection is closed already, or the call is pending and nothing
    /// more can happen.
    pub fn call(&mut self, frame: impl AsRef<[u8]>) -> CallOutcome<S::Error> {
        self.call_with_head(frame, H::default())
    }

    /// Hands a frame with a head to the service, as [`call`](TestConn::call).
    ///
    /// ```
    /// use ringserve::testing::TestConn;
    /// use ringserve::{Cx, Frame, Service, service::with_heads};
    ///
    /// struct Repeat;
    ///
    /// impl Service<u8> for Repeat {
    ///     type Session = ();
    ///     type Error = std::convert::Infallible;
    ///
    ///     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame<u8>) -> Result<(), Self::Error> {
    ///         cx.reply(frame.repeat(usize::from(*frame.head())));
    ///         Ok(())
    ///     }
    /// }
    ///
    /// let mut conn = TestConn::open(|_shard| with_heads(Repeat));
    /// assert_eq!(conn.call_with_head("ab", 3).replies, [b"ababab"]);
    /// ```
    ///
    /// # Panics
    /// As [`call`](TestConn::call).
    pub fn call_with_head(&mut self, frame: impl AsRef<[u8]>, head: H) -> CallOutcome<S::Error> {
        self.guarded(|conn| {
            assert!(!conn.is_closed(), "the connection is closed");
            conn.seen.head.set(head);
            let payload = frame.as_ref();
            let mut bytes = (payload.len() as u32).to_be_bytes().to_vec();
            bytes.extend_from_slice(payload);
            let mut bytes = &bytes[..];
            while !bytes.is_empty() {
                let Some(socket) = &mut conn.socket else { break };
                match socket.poll_write(&mut Context::from_waker(Waker::noop()), bytes) {
                    Poll::Ready(Ok(sent)) => bytes = &bytes[sent..],
                    Poll::Ready(Err(error)) => panic!("the connection is gone: {error}"),
                    Poll::Pending => {}
                }
                conn.run_due();
            }
            let seen = conn.seen.clone();
            let over = |_: &World| seen.result.borrow().is_some() || seen.closed.get().is_some();
            let ran = conn.world.run(None, over);
            let result = conn.seen.result.borrow_mut().take();
            match (ran, result) {
                (Ran::Over, Some(result)) => {
                    conn.run_due();
                    CallOutcome { result, replies: conn.replies() }
                }
                (Ran::Over, None) => {
                    panic!("the call was dropped: {}", conn.close_reason().expect("it is closed"))
                }
                _ => panic!("the call waits, and nothing can happen any more"),
            }
        })
    }

    /// Sets the shard's load from now on, as if it were asked for more than it can do: from
    /// [`Load::Shedding`] on each frame goes to [`Service::shed`] first. A frame that is answered
    /// there is a call that succeeded.
    ///
    /// ```
    /// use ringserve::overload::{Load, Shed};
    /// use ringserve::testing::TestConn;
    /// use ringserve::{Cx, Frame, Service};
    ///
    /// struct Store;
    ///
    /// impl Service for Store {
    ///     type Session = ();
    ///     type Error = std::convert::Infallible;
    ///
    ///     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
    ///         cx.reply(frame);
    ///         Ok(())
    ///     }
    ///
    ///     fn shed(&self, cx: &Cx<'_, ()>, _: &Frame, load: Load) -> Shed {
    ///         cx.reply(load.as_str());
    ///         Shed::Answered
    ///     }
    /// }
    ///
    /// let mut conn = TestConn::open(|_shard| Store);
    /// conn.set_load(Load::Busy);
    /// assert_eq!(conn.call("get").replies, [b"get"]);
    /// conn.set_load(Load::Shedding);
    /// assert_eq!(conn.call("get").replies, [b"shedding"]);
    /// ```
    pub fn set_load(&mut self, load: Load) {
        self.world.with_server(0, |server| server.set_load(load, 1.0));
    }

    /// Replies since the last call of this: those of [`open`](Service::open), of tasks, of other
    /// connections.
    pub fn replies(&mut self) -> Vec<Vec<u8>> {
        let mut bytes = [0; 4096];
        while let Some(socket) = &mut self.socket {
            match socket.poll_read(&mut Context::from_waker(Waker::noop()), &mut bytes) {
                Poll::Ready(Ok(len @ 1..)) => self.received.extend_from_slice(&bytes[..len]),
                _ => break,
            }
        }
        split(&std::mem::take(&mut self.received))
    }

    /// Lets virtual time pass.
    ///
    /// # Panics
    /// If the service panics.
    pub fn pass(&mut self, time: Duration) {
        self.guarded(|conn| {
            let until = conn.world.now().saturating_add(time);
            conn.world.run(Some(until), |_| false);
        });
    }

    /// True if the service, or a limit, closed the connection.
    pub fn is_closed(&self) -> bool {
        self.seen.closed.get().is_some() || self.seen.opened.get() == Some(false)
    }

    /// The reason of the close; `None` while the connection is open, and if [`open`](Service::open)
    /// refused it or was dropped.
    pub fn close_reason(&self) -> Option<CloseReason> {
        self.seen.closed.get()
    }

    /// Runs everything that is due now.
    fn run_due(&self) {
        let now = self.world.now();
        self.world.run(Some(now), |_| false);
    }

    /// Turns a panic of the service into one of the test.
    fn guarded<T>(&mut self, act: impl FnOnce(&mut Self) -> T) -> T {
        let kept = panics::PanicRecorder::begin();
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| act(self)));
        let said = panics::take().pop();
        drop(kept);
        match done {
            Ok(done) => done,
            Err(panic) => match panic.downcast::<SeedFailed>() {
                Ok(failed) => panic!("{}", failed.0),
                Err(panic) => panic!("{}", said.unwrap_or_else(|| message_of(panic))),
            },
        }
    }
}

impl<S: Service<H>, H: Default + 'static> Drop for TestConn<S, H> {
    fn drop(&mut self) {
        drop(self.socket.take());
        // Panics of the service at its end are no longer of interest.
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.world.drop_servers()));
    }
}

impl<S: Service<H>, H: Default + 'static> fmt::Debug for TestConn<S, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestConn").field("closed", &self.seen.closed.get()).finish_non_exhaustive()
    }
}

/// The bytes before each reply, which no service writes by chance.
const MARK: [u8; 8] = [0xF7, 0x1C, 0xE2, 0x93, 0x0B, 0xD8, 0x65, 0xAA];

/// The framing below a [`TestConn`]: it tells each reply from written bytes. Frames that are sent
/// have no head; the head is put to each frame before the service sees it.
#[doc(hidden)]
pub struct Replies<H>(PhantomData<fn() -> H>);

impl<H> Clone for Replies<H> {
    fn clone(&self) -> Self {
        Replies(PhantomData)
    }
}

impl<H: Default + 'static> TypedFraming for Replies<H> {
    type State = ();
    type Head = H;

    fn cut(&self, _: &mut (), bytes: &[u8], _scanned: usize) -> Result<Cut<H>, FrameError> {
        let Some(len) = bytes.first_chunk::<4>() else { return Ok(Cut::More(4 - bytes.len())) };
        let consumed = 4 + u32::from_be_bytes(*len) as usize;
        match consumed.checked_sub(bytes.len()) {
            None | Some(0) => Ok(Cut::Frame { skip: 4, len: consumed - 4, consumed, head: H::default() }),
            Some(missing) => Ok(Cut::More(missing)),
        }
    }

    fn write(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        out.put(&MARK);
        out.put(&(payload.len() as u32).to_be_bytes());
        out.payload(payload);
        Ok(())
    }
}

/// The written bytes of a service, reply by reply.
fn split(mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut replies = Vec::new();
    while !bytes.is_empty() {
        let marked = bytes.windows(MARK.len()).position(|window| window == MARK);
        let (written, rest) = bytes.split_at(marked.unwrap_or(bytes.len()));
        if !written.is_empty() {
            replies.push(written.to_vec());
        }
        let Some(rest) = rest.get(MARK.len()..) else { break };
        let Some((len, rest)) = rest.split_first_chunk::<4>() else { break };
        let len = (u32::from_be_bytes(*len) as usize).min(rest.len());
        replies.push(rest[..len].to_vec());
        bytes = &rest[len..];
    }
    replies
}

/// The factory's result for a [`TestConn`].
struct Record<M, S: Service<H>, H> {
    made: M,
    seen: Rc<Seen<S, H>>,
}

impl<S, M, H> IntoService<Replies<H>> for Record<M, S, H>
where
    S: Service<H>,
    M: IntoService<Replies<H>, Service = S>,
    H: Default + 'static,
{
    type Service = Recorded<S, H>;

    fn into_service(self, shard: &Shard) -> Result<FactoryOutput<Recorded<S, H>>, FactoryError> {
        self.made.into_service(shard)?.map(|made| Ok(Recorded { service: made?, seen: self.seen }))
    }

    fn adjust(limits: &mut Limits) {
        M::adjust(limits);
    }

    fn protocols() -> &'static [&'static str] {
        M::protocols()
    }
}

/// A service that records the results of its calls.
struct Recorded<S: Service<H>, H> {
    service: S,
    seen: Rc<Seen<S, H>>,
}

/// The result of `open`, also if it was dropped.
struct OpenAnswer<'a> {
    seen: &'a Cell<Option<bool>>,
    is_open: bool,
}

impl Drop for OpenAnswer<'_> {
    fn drop(&mut self) {
        self.seen.set(Some(self.is_open));
    }
}

impl<S: Service<H>, H: Default + 'static> Service<H> for Recorded<S, H> {
    type Session = S::Session;
    type Error = &'static str;

    const ACCOUNTS: bool = S::ACCOUNTS;
    const PIECES: bool = S::PIECES;
    const REORDERS: bool = S::REORDERS;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<S::Session, Refusal> {
        let mut answer = OpenAnswer { seen: &self.seen.opened, is_open: false };
        let opened = self.service.open(opening).await;
        answer.is_open = opened.is_ok();
        opened
    }

    async fn call(&self, cx: &Cx<'_, S::Session>, frame: Frame<H>) -> Result<(), &'static str> {
        let (frame, _none) = frame.into_parts();
        let result = self.service.call(cx, frame.with_head(self.seen.head.take())).await;
        let failed = result.is_err();
        self.seen.result.replace(Some(result));
        if failed { Err("the call failed") } else { Ok(()) }
    }

    fn shed(&self, cx: &Cx<'_, S::Session>, frame: &Frame<H>, load: Load) -> Shed {
        let known = self::frame(&**frame).with_head(self.seen.head.take());
        let shed = self.service.shed(cx, &known, load);
        match shed {
            Shed::Serve => self.seen.head.set(known.into_parts().1),
            Shed::Answered => _ = self.seen.result.replace(Some(Ok(()))),
        }
        shed
    }

    fn malformed(&self, cx: &Cx<'_, S::Session>, error: &FrameError) {
        self.service.malformed(cx, error);
    }

    fn failed(&self, cx: &Cx<'_, S::Session>, failure: &Failure<'_, &'static str>) {
        let result = self.seen.result.borrow();
        match (failure, &*result) {
            (Failure::Error(_), Some(Err(error))) => self.service.failed(cx, &Failure::Error(error)),
            (Failure::Error(_), _) => {}
            (Failure::TimedOut, _) => self.service.failed(cx, &Failure::TimedOut),
            (Failure::Panicked(message), _) => self.service.failed(cx, &Failure::Panicked(message)),
        }
    }

    fn draining(&self, cx: &Cx<'_, S::Session>) {
        self.service.draining(cx);
    }

    fn heartbeat(&self, cx: &Cx<'_, S::Session>) {
        self.service.heartbeat(cx);
    }

    fn input_ended(&self, cx: &Cx<'_, S::Session>) {
        self.service.input_ended(cx);
    }

    fn close(&self, closed: &CloseCx<'_, S::Session>) {
        self.seen.closed.set(Some(closed.reason()));
        self.service.close(closed);
    }
}
