//! A WebSocket inside HTTP: a connection of HTTP/1.1 that was upgraded, or a stream of HTTP/2; or
//! that of a client.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use hyper::rt::{Read, ReadBuf, Write};
use hyper::upgrade::Upgraded;
use ringserve_core::Frame;
use ringserve_websocket::frame::{Header, Opcode, Violation, put_masked};
use ringserve_websocket::reader::{ReadError, Reader, ReceivedEvent};
use ringserve_websocket::{Extension, Kind, WebSocketInfo, close};

use super::leaving::Leave;
use super::masks::Masks;
use super::runtime::PUT_OFF;
use super::upgrade::Hold;
use crate::message::{Message, Outgoing};
use crate::shard::face::handle::Shard;
use crate::shard::wakes::timers::Sleep;
use crate::stream::byte_stream::Stream;
use crate::stream::fate::Fate;

/// Bytes read of a stream of HTTP/2 at once. Arbitrary: a frame of HTTP/2 has up to 16 KiB.
const READ_BYTES: usize = 8 << 10;

/// Bytes given to hyper at once. It copies them.
const WRITE_BYTES: usize = 32 << 10;

/// The step to which the bytes held for a socket are rounded up, so that a message in small pieces
/// rarely changes the account.
const HELD_STEP: usize = 4096;

/// Bytes that the sockets of a shard inflate before its other tasks have their turn, but for the
/// last message: as on a listener of WebSocket. A client may send a thousandth of what it says.
const INFLATED_BYTES_MAX: usize = 256 << 10;

/// Time for the client's close frame once the server's has left.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// The times that hold for a socket in addition to the limits of messages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    /// Silence after which the client is pinged; as long again, and it is gone.
    pub(super) ping: Option<Duration>,
    /// Time in which a client of HTTP/2 has to take something of what is sent. With HTTP/1.1 the
    /// connection's limits hold.
    pub(super) write_stall: Duration,
}

/// The compressor and decompressor of a shard.
pub(super) type Shared = Rc<RefCell<Box<dyn Extension>>>;

/// The bytes that the sockets of a shard inflated since its other tasks had their turn.
#[derive(Debug, Default)]
struct Inflated {
    bytes: Cell<usize>,
    /// A task counts from 0 again after those that are there.
    is_over: Cell<bool>,
}

impl Inflated {
    /// Ready if a message may be inflated. Else the task is woken, and has its turn after others.
    fn poll_room(self: &Rc<Inflated>, shard: &Shard, task: &Context<'_>) -> Poll<()> {
        if self.bytes.get() < INFLATED_BYTES_MAX {
            return Poll::Ready(());
        }
        if !self.is_over.replace(true) {
            let inflated = self.clone();
            shard.spawn(async move {
                inflated.bytes.set(0);
                inflated.is_over.set(false);
            });
        }
        task.waker().wake_by_ref();
        Poll::Pending
    }
}

/// A WebSocket inside HTTP, as the handler given to [`upgrade`](crate::websocket::upgrade()) holds
/// it, or that of a client, as [`connect`](crate::websocket::connect()) makes it.
///
/// Pings are answered, and silent peers pinged, while [`next`](Socket::next) is awaited. All of its
/// futures may be dropped before their end, as by a `select`: nothing is lost, and a message that
/// was begun is sent to its end by the next call. Dropped, it closes with the code 1000 without
/// waiting for the peer; where the handler panics, with 1011.
pub struct Socket {
    io: Io,
    reader: Reader,
    /// `None` if the connection does not compress.
    extension: Option<Shared>,
    inflated: Rc<Inflated>,
    info: Rc<WebSocketInfo>,
    shard: Shard,
    state: State,
    /// Frames that were begun, and how much of them left.
    out: Vec<u8>,
    left: usize,
    /// The payload of the latest ping, if it is to be answered.
    ping: Option<Vec<u8>>,
    /// A client ends when its owner says so, and not with the server.
    leave: Option<Leave>,
    /// Of a client.
    masks: Option<Masks>,
    times: Times,
    /// Goes off where the client was silent.
    silence: Option<Sleep>,
    /// Bytes came since it was set: any, also of a message that takes long.
    heard: bool,
    pinged: bool,
    /// Goes off where nothing leaves, or no close frame comes.
    patience: Option<Sleep>,
}

enum Io {
    Http1 { stream: Stream, fate: Fate, read: Bytes, held: usize },
    Http2 { stream: Box<Upgraded>, hold: Hold, read: Bytes, held: usize },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    /// The server's close frame was queued, and the client's has not come.
    Closing,
    /// Both are there, and the server's has to leave.
    Leaving,
    Closed,
}

/// An event of the client, or the end of its bytes.
enum Came {
    Received(ReceivedEvent),
    End,
}

impl Socket {
    pub(super) fn over_http1(stream: Stream, read: Bytes, parts: Parts) -> Socket {
        let fate = stream.fate();
        Socket::new(Io::Http1 { fate, stream, read, held: 0 }, parts)
    }

    pub(super) fn over_http2(stream: Upgraded, hold: Hold, parts: Parts) -> Socket {
        Socket::new(Io::Http2 { stream: Box::new(stream), hold, read: Bytes::new(), held: 0 }, parts)
    }

    fn new(io: Io, parts: Parts) -> Socket {
        let Parts { shard, info, extension, message_bytes_max, times, masks } = parts;
        let reader = match masks {
            Some(_) => Reader::of_server(message_bytes_max),
            None => Reader::new(message_bytes_max, extension.is_some()),
        };
        Socket {
            io,
            reader,
            extension,
            inflated: shard.shared(Inflated::default),
            info: Rc::new(info),
            state: State::Open,
            out: Vec::new(),
            left: 0,
            ping: None,
            leave: masks.is_none().then(|| Leave::new(&shard, false)),
            masks,
            silence: times.ping.map(|time| shard.sleep(time)),
            heard: false,
            pinged: false,
            patience: None,
            times,
            shard,
        }
    }

    /// The facts of the request, and those of the client's close frame once it came.
    pub fn info(&self) -> &WebSocketInfo {
        &self.info
    }

    /// The shard this runs on: to sleep, to spawn.
    pub fn shard(&self) -> &Shard {
        &self.shard
    }

    /// The next message. `None` once both sides have said that nothing more comes, since the client
    /// closed, [`close`](Socket::close) was called, or the server drains: then the client gets the
    /// code 1001.
    ///
    /// # Errors
    /// If the client broke the rules, for which it gets a close code; if it left without a close
    /// frame; if it answered no ping. Then there is nothing more.
    pub async fn next(&mut self) -> Result<Option<Message>, SocketError> {
        poll_fn(|task| self.poll_next(task)).await
    }

    /// Sends a message, and waits while too much of earlier ones has not left: with HTTP/1.1 above
    /// [`Limits::outbox_bytes_high`](crate::Limits::outbox_bytes_high), with HTTP/2 until the
    /// client's window is open. Dropped while it waits, the message is not sent.
    ///
    /// # Errors
    /// If the connection ended or is closing, or the client of HTTP/2 took nothing for too long.
    pub async fn send<'p>(&mut self, message: impl Into<Outgoing<'p>>) -> Result<(), SocketError> {
        poll_fn(|task| self.poll_room(task)).await?;
        let (kind, payload) = message.into().into_parts();
        self.put(kind, payload.bytes());
        // What does not leave now does with what comes next.
        let left = poll_fn(|task| Poll::Ready(self.poll_out(task))).await;
        match left {
            Poll::Ready(left) => left,
            Poll::Pending => Ok(()),
        }
    }

    /// Closes with a code and a reason, and waits for the client to do so too, up to 5 s. Messages
    /// that still come are dropped.
    ///
    /// # Panics
    /// If no close frame may carry the code
    /// ([`close::is_valid`](crate::websocket::close::is_valid)), or the reason is longer than 123
    /// bytes.
    ///
    /// # Errors
    /// As [`next`](Socket::next).
    pub async fn close(mut self, code: u16, reason: &str) -> Result<(), SocketError> {
        assert!(close::is_valid(code), "no close frame may carry the code {code}");
        assert!(reason.len() <= close::REASON_BYTES_MAX, "the reason of a close frame has at most 123 bytes");
        self.begin_close(code, reason);
        self.next().await.map(|none| debug_assert!(none.is_none(), "messages are dropped while it closes"))
    }

    fn poll_next(&mut self, task: &mut Context<'_>) -> Poll<Result<Option<Message>, SocketError>> {
        loop {
            if self.state == State::Open
                && let Some(leave) = &mut self.leave
                && leave.poll(task).is_ready()
            {
                self.begin_close(close::GOING_AWAY, "");
            }
            if self.out.is_empty()
                && self.state == State::Open
                && let Some(said) = self.ping.take()
            {
                self.put_frame(Opcode::Pong, &said);
            }
            let sent = self.poll_out(task)?;
            match self.state {
                State::Closed => return Poll::Ready(Ok(None)),
                State::Leaving => {
                    ready!(sent);
                    ready!(self.poll_end(task));
                    self.state = State::Closed;
                    return Poll::Ready(Ok(None));
                }
                State::Open | State::Closing => {}
            }
            if sent.is_ready() && self.ping.is_some() && self.state == State::Open {
                continue;
            }
            if self.extension.is_some() {
                ready!(self.inflated.poll_room(&self.shard, task));
            }
            let Poll::Ready(came) = self.poll_read(task)? else {
                ready!(self.poll_silence(task))?;
                continue;
            };
            match came {
                Came::Received(ReceivedEvent::Message(kind, payload)) => {
                    if self.state == State::Open {
                        return Poll::Ready(Ok(Some(received(kind, payload))));
                    }
                }
                // One pong at most waits, for the latest ping.
                Came::Received(ReceivedEvent::Ping(said)) => self.ping = Some(said),
                Came::Received(ReceivedEvent::Pong) => {}
                Came::Received(ReceivedEvent::Close(said)) => {
                    let said = said.as_ref().map(|(code, reason)| (*code, &**reason));
                    self.info.peer_closed(said);
                    if self.state == State::Open {
                        self.put_close(said.map(|(code, _)| code), "");
                    }
                    self.state = State::Leaving;
                }
                Came::End if self.state == State::Closing => {
                    self.state = State::Closed;
                }
                Came::End => {
                    self.state = State::Closed;
                    return Poll::Ready(Err(SocketError::io(io::ErrorKind::UnexpectedEof.into())));
                }
            }
        }
    }

    /// Ends a stream of HTTP/2 in both directions: one that the client has not ended would be
    /// reset. Ready at once with HTTP/1.1.
    fn poll_end(&mut self, task: &mut Context<'_>) -> Poll<()> {
        let Io::Http2 { stream, .. } = &mut self.io else { return Poll::Ready(()) };
        let shard = &self.shard;
        let patience = self.patience.get_or_insert_with(|| shard.sleep(CLOSE_TIMEOUT));
        // Ready once the end has left; that is not waited for.
        _ = Pin::new(&mut **stream).poll_shutdown(task);
        if Pin::new(patience).poll(task).is_ready() {
            return Poll::Ready(());
        }
        loop {
            let mut space = [const { MaybeUninit::uninit() }; READ_BYTES];
            let mut space = ReadBuf::uninit(&mut space);
            let read = ready!(Pin::new(&mut **stream).poll_read(task, space.unfilled()));
            if read.is_err() || space.filled().is_empty() {
                return Poll::Ready(());
            }
        }
    }

    /// Looks at the time, with nothing to read. Ready where there is something to do.
    fn poll_silence(&mut self, task: &mut Context<'_>) -> Poll<Result<(), SocketError>> {
        if self.state == State::Closing {
            let patience = self.patience.get_or_insert_with(|| self.shard.sleep(CLOSE_TIMEOUT));
            ready!(Pin::new(patience).poll(task));
            self.state = State::Closed;
            return Poll::Ready(Ok(()));
        }
        let (Some(silence), Some(time)) = (&mut self.silence, self.times.ping) else { return Poll::Pending };
        ready!(Pin::new(silence).poll(task));
        if self.shard.is_behind() {
            // Its bytes may be there.
            self.silence = Some(self.shard.sleep(PUT_OFF));
            return Poll::Ready(Ok(()));
        }
        self.silence = Some(self.shard.sleep(time));
        if std::mem::take(&mut self.heard) {
            self.pinged = false;
        } else if self.pinged {
            self.state = State::Closed;
            self.abort();
            return Poll::Ready(Err(SocketError::io(io::ErrorKind::TimedOut.into())));
        } else if self.out.is_empty() {
            self.pinged = true;
            self.put_frame(Opcode::Ping, &[]);
        }
        Poll::Ready(Ok(()))
    }

    /// Waits until a message can be put after all others.
    fn poll_room(&mut self, task: &mut Context<'_>) -> Poll<Result<(), SocketError>> {
        if self.state != State::Open {
            return Poll::Ready(Err(SocketError::io(io::ErrorKind::BrokenPipe.into())));
        }
        ready!(self.poll_out(task))?;
        match &self.io {
            Io::Http1 { stream, .. } => stream.poll_room(task).map_ok(|_| ()).map_err(SocketError::io),
            Io::Http2 { .. } => Poll::Ready(Ok(())),
        }
    }

    /// Begins a message.
    fn put(&mut self, kind: Kind, payload: &[u8]) {
        if let Some(extension) = &self.extension {
            let mut extension = extension.borrow_mut();
            if let Some(compressed) = extension.compress(payload) {
                let header = Header { rsv: 4, ..Header::whole(kind.opcode(), compressed.len() as u64) };
                return put(&mut self.out, &header, compressed);
            }
        }
        self.put_frame(kind.opcode(), payload);
    }

    /// A whole frame, of any opcode.
    fn put_frame(&mut self, opcode: Opcode, payload: &[u8]) {
        match &mut self.masks {
            Some(masks) => put_masked(true, 0, opcode, payload, masks.next(), &mut self.out),
            None => put(&mut self.out, &Header::whole(opcode, payload.len() as u64), payload),
        }
    }

    fn put_close(&mut self, code: Option<u16>, reason: &str) {
        let mut frame = Vec::new();
        close::write(code, reason, &mut frame);
        // Behind the two bytes of its header.
        self.put_frame(Opcode::Close, &frame[2..]);
    }

    /// Queues the own close frame, as the last one.
    fn begin_close(&mut self, code: u16, reason: &str) {
        if self.state == State::Open {
            self.put_close(Some(code), reason);
            self.state = State::Closing;
        }
    }

    /// Gives the connection what was begun. Ready when it has all of that.
    fn poll_out(&mut self, task: &mut Context<'_>) -> Poll<Result<(), SocketError>> {
        let given = self.poll_give(task);
        self.count();
        given
    }

    fn poll_give(&mut self, task: &mut Context<'_>) -> Poll<Result<(), SocketError>> {
        while self.left < self.out.len() {
            let rest = &self.out[self.left..];
            let written = match &mut self.io {
                Io::Http1 { stream, .. } => stream.poll_put(task, rest),
                Io::Http2 { stream, .. } => {
                    Pin::new(&mut **stream).poll_write(task, &rest[..rest.len().min(WRITE_BYTES)])
                }
            };
            match written {
                Poll::Ready(Ok(bytes)) => {
                    self.left += bytes;
                    if self.state != State::Closing {
                        self.patience = None;
                    }
                }
                Poll::Ready(Err(error)) => return Poll::Ready(Err(self.fail(error))),
                Poll::Pending => {
                    if matches!(self.io, Io::Http2 { .. }) {
                        let shard = &self.shard;
                        let patience =
                            self.patience.get_or_insert_with(|| shard.sleep(self.times.write_stall));
                        if Pin::new(patience).poll(task).is_ready() {
                            self.abort();
                            return Poll::Ready(Err(self.fail(io::ErrorKind::TimedOut.into())));
                        }
                    }
                    return Poll::Pending;
                }
            }
        }
        // A long message leaves nothing allocated behind.
        if self.out.capacity() > WRITE_BYTES {
            self.out = Vec::new();
        }
        self.out.clear();
        self.left = 0;
        Poll::Ready(Ok(()))
    }

    fn poll_read(&mut self, task: &mut Context<'_>) -> Poll<Result<Came, SocketError>> {
        let Socket { io, reader, extension, heard, .. } = self;
        let mut extension = extension.as_ref().map(|extension| extension.borrow_mut());
        let mut take = |bytes: &mut &[u8]| {
            let extension = extension.as_mut().map(|extension| &mut ***extension as &mut dyn Extension);
            reader.take(bytes, extension)
        };
        let came = loop {
            let taken = match io {
                Io::Http1 { read, .. } | Io::Http2 { read, .. } if !read.is_empty() => {
                    let mut rest = &read[..];
                    let taken = take(&mut rest);
                    // What is left is not moved: there may be a thousand frames in it.
                    let left = rest.len();
                    *read = if left == 0 { Bytes::new() } else { read.split_off(read.len() - left) };
                    taken
                }
                Io::Http1 { stream, .. } => {
                    let mut taken = Ok(None);
                    let mut ended = false;
                    let polled = stream.poll_peek(task, |bytes| {
                        let mut rest = bytes;
                        ended = bytes.is_empty();
                        *heard = true;
                        taken = take(&mut rest);
                        bytes.len() - rest.len()
                    });
                    match polled {
                        Poll::Pending => break Poll::Pending,
                        Poll::Ready(Err(error)) => break Poll::Ready(Err(Ended::Io(error))),
                        Poll::Ready(Ok(())) if ended => break Poll::Ready(Ok(Came::End)),
                        Poll::Ready(Ok(())) => taken,
                    }
                }
                Io::Http2 { stream, hold, read, .. } => {
                    let mut space = [const { MaybeUninit::uninit() }; READ_BYTES];
                    let mut space = ReadBuf::uninit(&mut space);
                    match Pin::new(&mut **stream).poll_read(task, space.unfilled()) {
                        Poll::Pending => {
                            hold.all_read();
                            break Poll::Pending;
                        }
                        Poll::Ready(Err(error)) => break Poll::Ready(Err(Ended::Io(error))),
                        Poll::Ready(Ok(())) => {}
                    }
                    *heard = true;
                    let mut rest = space.filled();
                    if rest.is_empty() {
                        break Poll::Ready(Ok(Came::End));
                    }
                    let taken = take(&mut rest);
                    *read = Bytes::copy_from_slice(rest);
                    taken
                }
            };
            match taken {
                Ok(None) => {}
                Ok(Some(received)) => break Poll::Ready(Ok(Came::Received(received))),
                Err(error) => break Poll::Ready(Err(Ended::Read(error))),
            }
        };
        drop(extension);
        self.inflated.bytes.set(self.inflated.bytes.get() + self.reader.take_inflated());
        self.count();
        came.map_err(|ended| self.ended(ended))
    }

    fn ended(&mut self, ended: Ended) -> SocketError {
        match ended {
            Ended::Io(error) => self.fail(error),
            Ended::Read(ReadError::NoMemory) => {
                self.end_with(close::INTERNAL_ERROR);
                SocketError::io(io::ErrorKind::OutOfMemory.into())
            }
            Ended::Read(ReadError::Violation(violation)) => {
                self.end_with(violation.code);
                SocketError { cause: Cause::Violation(violation) }
            }
        }
    }

    /// Counts what is held of a message that has not come to its end, of those that have not left,
    /// and of the request.
    fn count(&mut self) {
        let leaving = if self.out.is_empty() { 0 } else { self.out.capacity() };
        let messages = (self.reader.held_bytes() + leaving).next_multiple_of(HELD_STEP);
        let bytes = messages + self.info.target().len();
        match &mut self.io {
            Io::Http1 { fate, held, .. } if *held != bytes => {
                *held = bytes;
                fate.set_held(bytes);
            }
            Io::Http2 { hold, held, .. } if *held != bytes => {
                *held = bytes;
                hold.set(bytes);
            }
            _ => {}
        }
    }

    /// The connection ended.
    fn fail(&mut self, error: io::Error) -> SocketError {
        self.state = State::Closed;
        SocketError::io(error)
    }

    /// Nothing more is read. The close frame leaves as far as there is room.
    fn end_with(&mut self, code: u16) {
        self.begin_close(code, "");
        self.push_out();
        self.state = State::Closed;
    }

    /// Gives the connection what was begun, without waiting.
    fn push_out(&mut self) {
        let rest = &self.out[self.left.min(self.out.len())..];
        match &mut self.io {
            // Less than a message, which has to leave whole for the close frame behind it.
            Io::Http1 { stream, .. } if !rest.is_empty() => stream.queue(rest),
            Io::Http1 { .. } => {}
            Io::Http2 { .. } => _ = self.poll_out(&mut Context::from_waker(Waker::noop())),
        }
        self.out.clear();
        self.left = 0;
    }

    fn abort(&mut self) {
        match &self.io {
            Io::Http1 { stream, .. } => stream.abort(),
            Io::Http2 { hold, .. } => hold.reset(),
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let code = if std::thread::panicking() { close::INTERNAL_ERROR } else { close::NORMAL };
        match self.state {
            State::Open => self.end_with(code),
            State::Closing | State::Leaving => self.push_out(),
            State::Closed => {}
        }
    }
}

impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Socket").field("info", &self.info).field("state", &self.state).finish_non_exhaustive()
    }
}

/// The parts of a socket in addition to its bytes.
pub(super) struct Parts {
    pub(super) shard: Shard,
    pub(super) info: WebSocketInfo,
    pub(super) extension: Option<Shared>,
    pub(super) message_bytes_max: usize,
    pub(super) times: Times,
    /// Of a client.
    pub(super) masks: Option<Masks>,
}

fn received(kind: Kind, payload: Vec<u8>) -> Message {
    let len = payload.len();
    Message::new(Frame::new(payload.into(), 0, len).with_head(kind))
}

fn put(out: &mut Vec<u8>, header: &Header, payload: &[u8]) {
    out.extend_from_slice(&header.encode());
    out.extend_from_slice(payload);
}

enum Ended {
    Io(io::Error),
    Read(ReadError),
}

/// Why a [`Socket`] has nothing more.
pub struct SocketError {
    cause: Cause,
}

#[derive(Debug)]
enum Cause {
    Violation(Violation),
    Io(io::Error),
}

impl SocketError {
    fn io(error: io::Error) -> SocketError {
        SocketError { cause: Cause::Io(error) }
    }

    /// The code that the peer got for what it did wrong, if it did. Else the connection ended.
    pub fn code(&self) -> Option<u16> {
        match &self.cause {
            Cause::Violation(violation) => Some(violation.code),
            Cause::Io(_) => None,
        }
    }
}

impl fmt::Display for SocketError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.cause {
            Cause::Violation(violation) => violation.fmt(f),
            Cause::Io(error) => match error.kind() {
                io::ErrorKind::UnexpectedEof => f.write_str("the peer left without a close frame"),
                io::ErrorKind::TimedOut => {
                    f.write_str("the peer answered no ping, or took nothing for too long")
                }
                io::ErrorKind::BrokenPipe => f.write_str("the connection is closed"),
                _ => error.fmt(f),
            },
        }
    }
}

ringserve_buf::debug_is_display!(SocketError);

impl std::error::Error for SocketError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.cause {
            Cause::Violation(violation) => Some(violation),
            Cause::Io(error) => Some(error),
        }
    }
}
