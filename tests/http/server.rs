//! HTTP servers, by `http(..)`.

mod ends;
mod errors;
mod slow;
mod statements;
mod streams;
mod versions;

use std::cell::Cell;
use std::future::{pending, ready};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Empty, Full, Limited};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response, Version};
use ringserve::framing::FrameError;
use ringserve::http::{Http, HttpOptions, HttpVersions};
use ringserve::limits::LimitError;
use ringserve::{CloseReason, ServerHandle, Stream, http, stream};
use ringserve_tests::Bounds;
use ringserve_tests::client::End;
use ringserve_tests::http::{Bodies, Sender, frames, read_answer, with_http2};
use ringserve_tests::{Client, On, SOON, eventually, no_time_limits, watch};
use tokio::sync::Semaphore;

/// The bytes are not HTTP; the counters do not know the details.
const BAD: CloseReason = CloseReason::BadFrame(FrameError::VarintOverflow);

const GET: &[u8] = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
/// Far more than the outbox and both kernels take of an answer at once.
const LARGE: usize = 12 << 20;
/// Short, since tests wait until it is over.
const BRIEF: Duration = Duration::from_millis(50);

/// State shared by the handlers and the test.
#[derive(Default)]
struct Handlers {
    inside: AtomicUsize,
    most: AtomicUsize,
    dropped: AtomicUsize,
}

struct Inside(Arc<Handlers>);

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, SeqCst);
        self.0.dropped.fetch_add(1, SeqCst);
    }
}

struct Rig {
    running: ServerHandle,
    handlers: Arc<Handlers>,
    gate: Arc<Semaphore>,
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

impl Rig {
    fn start(options: HttpOptions) -> Rig {
        Rig::start_with(no_time_limits(), options)
    }

    fn start_with(limits: Bounds, options: HttpOptions) -> Rig {
        let (handlers, gate) = (Arc::new(Handlers::default()), Arc::new(Semaphore::new(0)));
        let (shared, open) = (handlers.clone(), gate.clone());
        let running = On::default().server(limits).start(move |_| {
            let (shared, open) = (shared.clone(), open.clone());
            http(service_fn(move |request| answer(request, shared.clone(), open.clone())))
                .options(options.clone())
        });
        Rig { running: running.expect("the server starts"), handlers, gate }
    }

    fn client(&self) -> Client {
        Client::connect(self.running.local_addrs()[0])
    }

    fn with_http2<F: Future<Output = ()>>(&self, test: impl FnOnce(Sender) -> F) {
        with_http2(self.running.local_addrs()[0], test);
    }

    /// Sends bytes, and waits until the server has received at least as many more: others may
    /// arrive at the same time.
    fn takes_in(&self, client: &mut Client, bytes: &[u8]) {
        let before = self.running.stats_now().counters.bytes_received;
        client.write(bytes);
        eventually("the bytes arrive", SOON, || {
            self.running.stats_now().counters.bytes_received >= before + bytes.len() as u64
        });
    }

    fn waits_inside(&self, count: usize) {
        eventually("handlers wait", SOON, || self.handlers.inside.load(SeqCst) == count);
    }
}

/// Answers `/` with its version; `/gate` waits until the test opens it, `/never` without end,
/// `/fail` fails, `/limited` accepts ten bytes, `/large` sends [`LARGE`] bytes, `/pieces` as many
/// in pieces, `/counted` fewer, `/echo` sends the body back, `/read` reads all and then waits like
/// `/gate`.
async fn answer(
    request: Request<Incoming>,
    handlers: Arc<Handlers>,
    gate: Arc<Semaphore>,
) -> Result<Response<Bodies>, BoxError> {
    let mut answer = Bytes::from(format!("{:?}", request.version()));
    let inside = handlers.inside.fetch_add(1, SeqCst) + 1;
    handlers.most.fetch_max(inside, SeqCst);
    let _inside = Inside(handlers);
    match request.uri().path() {
        "/gate" => gate.acquire().await?.forget(),
        "/never" => pending().await,
        "/fail" => return Err("as it was told".into()),
        "/limited" => _ = Limited::new(request.into_body(), 10).collect().await?,
        "/echo" => return Ok(Response::new(request.into_body().boxed())),
        path @ ("/pieces" | "/counted") => {
            let count = path == "/counted";
            let pieces = Pieces(if count { COUNTED } else { LARGE } / PIECE).map_frame(move |piece| {
                MADE.fetch_add(count.into(), SeqCst);
                piece
            });
            return Ok(Response::new(pieces.map_err(|never| match never {}).boxed()));
        }
        "/read" => {
            request.into_body().collect().await?;
            gate.acquire().await?.forget();
        }
        "/large" => answer = vec![b'.'; LARGE].into(),
        _ => {}
    }
    Ok(Response::new(Full::new(answer).map_err(|never| match never {}).boxed()))
}

const PIECE: usize = 16 << 10;

/// A body that arrives in pieces of one size.
struct Pieces(usize);

/// Bytes of `/counted`, and the pieces of it that were made.
const COUNTED: usize = 1 << 20;
static MADE: AtomicUsize = AtomicUsize::new(0);

impl Body for Pieces {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _task: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let left = self.0;
        self.0 = left.saturating_sub(1);
        Poll::Ready((left > 0).then(|| Ok(Frame::data(Bytes::from_static(&[b'.'; PIECE])))))
    }
}

fn get(path: &str) -> Request<Bodies> {
    let body = Empty::new().map_err(|never| match never {}).boxed();
    Request::get(format!("http://x{path}")).body(body).unwrap()
}

async fn ask(sender: &mut Sender, path: &str) -> Bytes {
    let answer = sender.send_request(get(path)).await.unwrap();
    assert_eq!(answer.version(), Version::HTTP_2);
    answer.into_body().collect().await.unwrap().to_bytes()
}

/// Options that measure a rate over a short time.
fn brief_window() -> HttpOptions {
    HttpOptions::default().rate_window(BRIEF)
}

/// The stream of the next RST_STREAM.
fn reset_stream(client: &mut Client) -> u32 {
    loop {
        let (kind, _, stream, _) = frames::next(client);
        if kind == 3 {
            return stream;
        }
    }
}

/// The stream of the next HEADERS.
fn answered_stream(client: &mut Client) -> u32 {
    loop {
        let (kind, _, stream, _) = frames::next(client);
        if kind == 1 {
            return stream;
        }
    }
}

/// Sends `bytes` again and again, with a pause after each time, until the server ends the
/// connection or does not within a bound. Returns the bytes that the server sent.
fn drip(client: &mut Client, bytes: &[u8], pause: Duration) -> (Vec<u8>, End) {
    let mut writer = client.stream.try_clone().unwrap();
    let bound = Instant::now() + SOON;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // The pause is the attack.
            while std::io::Write::write_all(&mut writer, bytes).is_ok() && Instant::now() < bound {
                std::thread::park_timeout(pause);
            }
        });
        let all = client.read_to_end();
        assert!(Instant::now() < bound, "the server ends a connection that drips");
        all
    })
}
