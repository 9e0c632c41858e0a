//! The tunnel that `hyper::upgrade::on` gives the service of a request of HTTP/1.1 that is answered
//! with 101, or 2xx to CONNECT: the bytes of the connection from then on.
//!
//! hyper wants what it gives to be `Send`, and a stream of a shard is not. So the service has one
//! end of two buffers, which it may take to any thread, and the connection's task carries bytes
//! between them and the stream:
//!
//! ```text
//!   service ── Upgraded ── Pipe ── what came  ◀── carry ◀── Stream, as long as there is room
//!                               ── what leaves ──▶ carry ──▶ Stream, as long as its outbox has room
//! ```
//!
//! hyper makes an `Upgraded` for its own connections alone, so one of those is held over each pipe:
//! it reads a request that is written down [here](SEED), and answers it once the true one was
//! answered. Only a request that asks for an upgrade has one.

use std::cell::RefCell;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::{Buf, Bytes, BytesMut};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::upgrade::OnUpgrade;
use hyper::{Request, Response, StatusCode};
use ringserve_base::guard::wake;

use crate::stream::byte_stream::Stream;

/// Bytes that one direction holds at most in addition to the connection's own buffers. Arbitrary: a
/// few receive buffers.
const HELD_MAX: usize = 64 << 10;

/// The step to which the bytes held for a tunnel are rounded up, so that short messages rarely
/// change the account of the shard.
const HELD_STEP: usize = 4096;

/// The memory of a seed: hyper has two buffers of 8 KiB for its connection over a pipe.
pub(super) const SEED_BYTES: usize = 18 << 10;

/// The request that hyper's connection over a pipe reads.
const SEED: &[u8] = b"GET / HTTP/1.1\r\nhost:\r\nconnection: upgrade\r\nupgrade: bytes\r\n\r\n";

/// The two buffers of a tunnel.
#[derive(Default)]
struct Tunnel {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Bytes of hyper's connection over the pipe go nowhere until it is open.
    is_open: bool,
    came: BytesMut,
    leaves: BytesMut,
    /// Why nothing more comes; `None` for the peer's FIN.
    ended: Option<Option<io::ErrorKind>>,
    /// The stream is broken: nothing more can be written.
    is_broken: bool,
    /// The service writes nothing more; and the peer has received that end.
    says_end: bool,
    said_end: bool,
    /// The service has given its end away.
    is_dropped: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
    carrier: Option<Waker>,
}

impl Tunnel {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes are carried from now on, beginning with what hyper had read. Returns who waits to
    /// read.
    fn open(&self, read: &[u8]) -> Option<Waker> {
        let mut state = self.state();
        state.is_open = true;
        state.came.extend_from_slice(read);
        state.reader.take()
    }

    /// The connection ended.
    fn end(&self) {
        let mut state = self.state();
        state.ended.get_or_insert(Some(io::ErrorKind::ConnectionAborted));
        state.is_broken = true;
        let wakers = [state.reader.take(), state.writer.take()];
        drop(state);
        wake_all(wakers);
    }
}

/// Wakers are user code: nothing is locked when they are called.
fn wake_all(wakers: [Option<Waker>; 2]) {
    wakers.into_iter().flatten().for_each(|waker| _ = wake(waker));
}

/// The service's end.
struct Pipe {
    tunnel: Arc<Tunnel>,
    seed: &'static [u8],
}

impl Read for Pipe {
    fn poll_read(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
        mut buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.seed.is_empty() {
            let (front, rest) = self.seed.split_at(self.seed.len().min(buf.remaining()));
            buf.put_slice(front);
            self.seed = rest;
            return Poll::Ready(Ok(()));
        }
        let mut state = self.tunnel.state();
        if state.came.is_empty() {
            return match state.ended {
                None => {
                    state.reader = Some(task.waker().clone());
                    Poll::Pending
                }
                Some(None) => Poll::Ready(Ok(())),
                Some(Some(kind)) => Poll::Ready(Err(kind.into())),
            };
        }
        let len = state.came.len().min(buf.remaining());
        buf.put_slice(&state.came[..len]);
        state.came.advance(len);
        if state.came.is_empty() {
            state.came = BytesMut::new();
        }
        let carrier = state.carrier.take();
        drop(state);
        wake_all([carrier, None]);
        Poll::Ready(Ok(()))
    }
}

impl Write for Pipe {
    fn poll_write(self: Pin<&mut Self>, task: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut state = self.tunnel.state();
        if !state.is_open {
            return Poll::Ready(Ok(bytes.len()));
        }
        if state.is_broken || state.says_end {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let len = bytes.len().min(HELD_MAX - state.leaves.len());
        if len == 0 && !bytes.is_empty() {
            state.writer = Some(task.waker().clone());
            return Poll::Pending;
        }
        state.leaves.extend_from_slice(&bytes[..len]);
        let carrier = state.carrier.take();
        drop(state);
        wake_all([carrier, None]);
        Poll::Ready(Ok(len))
    }

    /// Ready at once: what was written leaves without it.
    fn poll_flush(self: Pin<&mut Self>, _task: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _task: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = self.tunnel.state();
        if state.is_open {
            state.says_end = true;
            let carrier = state.carrier.take();
            drop(state);
            wake_all([carrier, None]);
        }
        Poll::Ready(Ok(()))
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        let mut state = self.tunnel.state();
        state.is_dropped = true;
        let carrier = state.carrier.take();
        drop(state);
        wake_all([carrier, None]);
    }
}

/// A tunnel that begins once its request is answered so. Dropped before, the service's `OnUpgrade`
/// fails.
pub(super) struct Seed {
    /// hyper's connection over the pipe.
    connection: Pin<Box<dyn Future<Output = hyper::Result<()>>>>,
    answers: Rc<RefCell<Answers>>,
    tunnel: Arc<Tunnel>,
}

#[derive(Default)]
struct Answers {
    now: bool,
    upgrade: Option<OnUpgrade>,
}

impl Seed {
    /// Lets the service of `request`, to which hyper promised an upgrade that it cannot give, wait
    /// for this one.
    pub(super) fn plant<B>(request: &mut Request<B>) -> Option<Seed> {
        request.extensions().get::<OnUpgrade>()?;
        let tunnel = Arc::new(Tunnel::default());
        let answers = Rc::new(RefCell::new(Answers::default()));
        let pipe = Pipe { tunnel: tunnel.clone(), seed: SEED };
        let asked = answers.clone();
        let service = service_fn(move |mut seed| {
            asked.borrow_mut().upgrade = Some(hyper::upgrade::on(&mut seed));
            answer(asked.clone())
        });
        // As small as may be. It has no date, which would ask for the time.
        let mut builder = http1::Builder::new();
        builder.max_buf_size(8 << 10).auto_date_header(false);
        let mut connection = Box::pin(builder.serve_connection(pipe, service).with_upgrades());
        _ = connection.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        let upgrade = answers.borrow_mut().upgrade.take()?;
        request.extensions_mut().insert(upgrade);
        Some(Seed { connection, answers, tunnel })
    }

    /// Carries bytes between the service and `stream`, of which hyper had `read` some, until the
    /// service has dropped its end and all of what it wrote was taken, or the connection ended.
    pub(super) async fn carry(mut self, stream: Stream, read: Bytes) {
        self.answers.borrow_mut().now = true;
        _ = self.connection.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        // What hyper made of it is the service's now, if that still wants it.
        drop(self.connection);
        let carrier = Carrier { tunnel: self.tunnel, stream };
        wake_all([carrier.tunnel.open(&read), None]);
        drop(read);
        let mut held = 0;
        poll_fn(|task| carrier.poll(task, &mut held)).await;
    }
}

/// The answer of hyper's connection over a pipe, once the true one was given.
async fn answer(answers: Rc<RefCell<Answers>>) -> Result<Response<String>, Infallible> {
    poll_fn(|_| if answers.borrow().now { Poll::Ready(()) } else { Poll::Pending }).await;
    let mut response = Response::new(String::new());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    Ok(response)
}

/// The shard's end.
struct Carrier {
    tunnel: Arc<Tunnel>,
    stream: Stream,
}

impl Carrier {
    /// Ready when nothing is left to be carried.
    fn poll(&self, task: &mut Context<'_>, held: &mut usize) -> Poll<()> {
        let mut state = self.tunnel.state();
        if !state.carrier.as_ref().is_some_and(|known| known.will_wake(task.waker())) {
            state.carrier = Some(task.waker().clone());
        }
        let writes = self.poll_leaves(&mut state, task);
        let reads = if state.is_dropped { None } else { self.poll_came(&mut state, task) };
        let is_over = state.is_broken || (state.is_dropped && state.leaves.is_empty());
        let bytes = (state.came.len() + state.leaves.len()).next_multiple_of(HELD_STEP);
        drop(state);
        if bytes != std::mem::replace(held, bytes) {
            self.stream.fate().set_held(bytes);
        }
        wake_all([writes, reads]);
        if is_over { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Gives the connection what leaves, and returns who may write more.
    fn poll_leaves(&self, state: &mut State, task: &mut Context<'_>) -> Option<Waker> {
        while !state.leaves.is_empty() {
            match self.stream.poll_put(task, &state.leaves) {
                Poll::Ready(Ok(bytes)) => state.leaves.advance(bytes),
                Poll::Ready(Err(error)) => {
                    state.is_broken = true;
                    state.ended.get_or_insert(Some(error.kind()));
                    return state.writer.take();
                }
                Poll::Pending => break,
            }
        }
        if state.leaves.is_empty() {
            state.leaves = BytesMut::new();
            if state.says_end && !std::mem::replace(&mut state.said_end, true) {
                self.stream.end_writing();
            }
        }
        if state.leaves.len() <= HELD_MAX / 2 { state.writer.take() } else { None }
    }

    /// Takes what came, and returns who may read it.
    fn poll_came(&self, state: &mut State, task: &mut Context<'_>) -> Option<Waker> {
        while state.ended.is_none() && state.came.len() < HELD_MAX {
            let mut is_end = false;
            let polled = self.stream.poll_peek(task, |bytes| {
                is_end = bytes.is_empty();
                let len = bytes.len().min(HELD_MAX - state.came.len());
                state.came.extend_from_slice(&bytes[..len]);
                len
            });
            match polled {
                Poll::Ready(Ok(())) if is_end => state.ended = Some(None),
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) => {
                    state.ended = Some(Some(error.kind()));
                    state.is_broken = true;
                }
                Poll::Pending => break,
            }
        }
        if state.ended.is_some() || !state.came.is_empty() { state.reader.take() } else { None }
    }
}

impl Drop for Carrier {
    fn drop(&mut self) {
        self.tunnel.end();
    }
}
