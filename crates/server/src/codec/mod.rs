//! Services over the codecs of [`tokio_util::codec`], so that existing codecs can be used as they
//! are; with the feature `tokio`, which is off by default.
//!
//! A [`CodecService`] names the codec and handles items; [`WithCodec`] makes a [`Service`] of it.
//! The server keeps its default framing, [`Raw`](ringserve_core::framing::Raw): the codec finds the
//! boundaries.
//!
//! ```no_run
//! use ringserve::Server;
//! use ringserve::codec::{CodecCx, CodecService, WithCodec};
//! use tokio_util::codec::{LinesCodec, LinesCodecError};
//!
//! struct Echo;
//!
//! impl CodecService for Echo {
//!     type Codec = LinesCodec;
//!     type Session = ();
//!     type Error = LinesCodecError;
//!
//!     fn codec(&self) -> LinesCodec {
//!         LinesCodec::new_with_max_length(8192)
//!     }
//!
//!     async fn call(&self, cx: &CodecCx<'_, Self>, line: String) -> Result<(), LinesCodecError> {
//!         cx.reply(line)
//!     }
//! }
//!
//! # fn main() -> Result<(), ringserve::Error> {
//! Server::bind("127.0.0.1:7000").serve(|_shard| WithCodec::new(Echo))
//! # }
//! ```
//!
//! # What it costs
//!
//! Received bytes are copied once, into the `BytesMut` that a decoder takes from, and encoded
//! replies once, into the outbox. Copies and allocations of the codec itself come on top, such as a
//! `String` for each line above. A framing of this crate, or [your
//! own](ringserve_core::framing::Framing), avoids all of that.
//!
//! A connection between two items holds no buffer, only its codec.
//!
//! # What is bounded, and what ends a connection
//!
//! Bytes that are not an item yet are bounded by [`WithCodec::bytes_max`]. They count towards
//! [`ServerLimits::held_bytes_max`](crate::limits::ServerLimits::held_bytes_max) if they take more
//! than 256 bytes, and so do received bytes behind the item whose call waits, and a buffer of which
//! such an item is a part. A codec that allocates what a peer claims, as `LengthDelimitedCodec`
//! does, allocates before this bound can act: set the codec's own limit too.
//!
//! A decoder's error, or too many bytes, goes to [`CodecService::malformed`], which may send a last
//! message. Then the connection is closed with [`CloseReason::HandlerError`], since for the server
//! the codec is part of the service.
//!
//! After the peer's FIN, when its items are answered, `Decoder::decode_eof` is called until it
//! returns no further item: a last line without its end is an item of `LinesCodec`. Its error goes
//! to [`CodecService::malformed`] as [`CodecError::Unfinished`], remaining bytes are dropped, and
//! [`CodecService::close`] gets [`CloseReason::PeerClosedMidFrame`]. A drain does not wait for
//! that.
//!
//! # Around it
//!
//! [`middleware`](crate::middleware) around a [`WithCodec`] sees a call for each piece of received
//! bytes, and a call without a byte for the peer's FIN. Where calls may wait in it, as in
//! [`ConcurrencyLimit`](crate::middleware::ConcurrencyLimit), the pieces of a connection would lose
//! their order: a server with [`Limits::calls_in_flight_max`] above 1 refuses it at the start. A
//! middleware of your own says so by [`Service::PIECES`] and [`Service::REORDERS`].
//!
//! For time limits each piece of received bytes is a frame: the first byte ends
//! [`Limits::first_frame_timeout`], and each piece starts [`Limits::idle_timeout`] again.
//!
//! Between two items of one piece replies get time to leave, so that [`Limits`] on outboxes hold
//! for items too.

mod counted;
mod handle;
mod spare;
#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::{Future, ready};
use std::ops::Deref;
use std::rc::Rc;

use bytes::BytesMut;
use ringserve_core::{CloseReason, ConnHead, Frame, Limits};

pub use tokio_util::codec::{Decoder, Encoder};

use self::counted::Counted;
use self::handle::Place;
pub use self::handle::{CodecHandle, CodecPushError};
use self::spare::Spare;
use crate::overload::{Load, Shed};
use crate::shard::face::closed::{CloseCx, Failure};
use crate::shard::face::cx::Cx;
use crate::shard::face::opening::{OpenCx, Refusal, Session, by_default};
use crate::shard::face::service::Service;

/// The start of an item is copied out of the shard's buffer up to this size and waits in a separate
/// block. That is cheap, and frees the buffer, which is usually larger, for others.
const SMALL_BYTES_MAX: usize = 4 * 1024;

/// Waiting bytes in a block of this size at most count in no bound: to count them would take as
/// much again.
const UNCOUNTED_MAX: usize = 256;

/// Handles the items of a codec. As [`Service`], whose docs explain each method.
pub trait CodecService: Sized + 'static {
    /// The codec. Each connection has its own.
    type Codec: Decoder<Error: fmt::Display> + 'static;

    /// State of one connection.
    type Session: Session;

    /// Why a call failed. The connection is closed after its queued replies, and the error is
    /// logged once.
    type Error: fmt::Display;

    /// Keeps an account of each connection, in which each piece of received bytes is a frame. As
    /// [`Service::ACCOUNTS`].
    const ACCOUNTS: bool = false;

    /// Makes the codec of one connection, when the first bytes arrive or the first reply is made.
    fn codec(&self) -> Self::Codec;

    /// Makes the session of a connection that was accepted, by default through `Default`; a session
    /// that is not `Default` is made here.
    ///
    /// # Errors
    /// A [`Refusal`] closes the connection.
    fn open(&self, opening: &CodecOpenCx<'_, Self>) -> impl Future<Output = Result<Self::Session, Refusal>> {
        const {
            assert!(
                Self::Session::DEFAULT.is_some(),
                "a session without `Default` is made by `CodecService::open`: write that method"
            );
        }
        let _ = opening;
        ready(by_default())
    }

    /// Handles one item. The connection's next item is handed over when this future is done. Items
    /// received before an order to close are dropped.
    ///
    /// With [`Limits::calls_in_flight_max`](crate::Limits::calls_in_flight_max) above 1, bytes that
    /// arrive while this future is pending go on to the decoder, and their items are handed over
    /// behind those that are left of earlier bytes: calls begin in the order of their items, up to
    /// that limit at once. Replies to later items may overtake those to earlier ones, so peers must
    /// tell replies apart by their content, such as an id. Items that arrived in one piece wait for
    /// each other until more bytes come.
    ///
    /// # Errors
    /// An error closes this connection after its queued replies.
    fn call(
        &self,
        cx: &CodecCx<'_, Self>,
        item: <Self::Codec as Decoder>::Item,
    ) -> impl Future<Output = Result<(), Self::Error>>;

    /// The shard is asked for more than it can do, and this item is one of the share to shed, as
    /// with [`Service::shed`]: answer it here, or have it [served](Shed::Serve) all the same. By
    /// default each item is served.
    ///
    /// ```
    /// use ringserve::codec::{CodecCx, CodecService};
    /// use ringserve::overload::{Load, Shed};
    /// use tokio_util::codec::{LinesCodec, LinesCodecError};
    ///
    /// struct Echo;
    ///
    /// impl CodecService for Echo {
    ///     type Codec = LinesCodec;
    ///     type Session = ();
    ///     type Error = LinesCodecError;
    ///
    ///     fn codec(&self) -> LinesCodec {
    ///         LinesCodec::new_with_max_length(8192)
    ///     }
    ///
    ///     async fn call(&self, cx: &CodecCx<'_, Self>, line: String) -> Result<(), LinesCodecError> {
    ///         cx.reply(line)
    ///     }
    ///
    ///     fn shed(&self, cx: &CodecCx<'_, Self>, line: &String, _load: Load) -> Shed {
    ///         if line == "PING" || cx.reply("-BUSY").is_err() {
    ///             return Shed::Serve;
    ///         }
    ///         Shed::Answered
    ///     }
    /// }
    /// ```
    fn shed(&self, cx: &CodecCx<'_, Self>, item: &<Self::Codec as Decoder>::Item, load: Load) -> Shed {
        let _ = (cx, item, load);
        Shed::Serve
    }

    /// The peer sent bytes that are no item. Last words may be queued; then the connection is
    /// closed.
    fn malformed(&self, cx: &CodecCx<'_, Self>, error: &CodecError<<Self::Codec as Decoder>::Error>) {
        let _ = (cx, error);
    }

    /// A call failed. Last words may be queued; then the connection is closed.
    fn failed(&self, cx: &CodecCx<'_, Self>, failure: &Failure<'_, Self::Error>) {
        let _ = (cx, failure);
    }

    /// The server begins to shut down.
    fn draining(&self, cx: &CodecCx<'_, Self>) {
        let _ = cx;
    }

    /// The peer was silent for [`Limits::heartbeat_interval`]: queue a question for a sign of life
    /// here.
    fn heartbeat(&self, cx: &CodecCx<'_, Self>) {
        let _ = cx;
    }

    /// The peer sent FIN, every item was handed over, and the connection is [held
    /// open](Cx::hold_open): the service closes it, now or later.
    fn input_ended(&self, cx: &CodecCx<'_, Self>) {
        cx.close();
    }

    /// The connection ended. If the peer ended it in the middle of an item, the reason is
    /// [`CloseReason::PeerClosedMidFrame`]; counters and log, which do not see items, show it as
    /// `peer_closed`.
    fn close(&self, closed: &CloseCx<'_, Self::Session>) {
        let _ = closed;
    }
}

/// The reason why bytes are not an item.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CodecError<E> {
    /// More bytes than [`WithCodec::bytes_max`] wait for the rest of their item.
    TooLarge {
        /// Bytes that wait.
        bytes: usize,
        /// The limit.
        max: usize,
    },
    /// The decoder refused them.
    Malformed(E),
    /// The peer sent FIN, and the decoder refused the remaining bytes.
    Unfinished(E),
}

impl<E: fmt::Display> fmt::Display for CodecError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CodecError::TooLarge { bytes, max } => {
                write!(f, "{bytes} bytes are no whole item, and bytes_max of the service is {max}")
            }
            CodecError::Malformed(error) => write!(f, "malformed item: {error}"),
            CodecError::Unfinished(error) => write!(f, "unfinished item: {error}"),
        }
    }
}

ringserve_buf::debug_is_display!(CodecError<E>, [E: fmt::Display]);

impl<E: fmt::Debug + fmt::Display> std::error::Error for CodecError<E> {}

/// The reason why a call of [`WithCodec`] failed. `E` is the error of the [`CodecService`], `D`
/// that of the decoder.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum WithCodecError<E, D> {
    /// The service failed.
    Service(E),
    /// The peer sent bytes that are no item.
    Codec(CodecError<D>),
}

impl<E: fmt::Display, D: fmt::Display> fmt::Display for WithCodecError<E, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WithCodecError::Service(error) => error.fmt(f),
            WithCodecError::Codec(error) => error.fmt(f),
        }
    }
}

ringserve_buf::debug_is_display!(WithCodecError<E, D>, [E: fmt::Display, D: fmt::Display]);

/// A [`Service`] made of a [`CodecService`]. See the [module](self).
pub struct WithCodec<S> {
    service: S,
    bytes_max: usize,
    /// Spare buffers for received bytes.
    spare_in: Spare,
    /// Spare buffers for encoded replies.
    spare_out: Rc<Spare>,
}

impl<S: CodecService> WithCodec<S> {
    /// Makes a service of a codec service, with [`bytes_max`](WithCodec::bytes_max) at 1 MiB, the
    /// default of [`Limits::frame_bytes_max`].
    pub fn new(service: S) -> WithCodec<S> {
        WithCodec {
            service,
            bytes_max: Limits::default().frame_bytes_max,
            spare_in: Spare::default(),
            spare_out: Rc::default(),
        }
    }

    /// Sets the most bytes of a connection that wait to become an item. A peer can make the server
    /// hold this much, and up to twice as much memory. A received piece, usually a buffer, comes on
    /// top for a moment.
    ///
    /// # Panics
    /// If `bytes_max` is 0, since no item could ever wait.
    pub fn bytes_max(self, bytes_max: usize) -> WithCodec<S> {
        assert!(bytes_max > 0, "bytes_max is 0; it must be at least 1");
        WithCodec { bytes_max, ..self }
    }

    /// True if the service answered an item without a call.
    #[cold]
    fn sheds(&self, cx: &CodecCx<'_, S>, item: &<S::Codec as Decoder>::Item, load: Load) -> bool {
        let is_answered = self.service.shed(cx, item, load) == Shed::Answered;
        if is_answered {
            cx.head().count_shed();
            cx.shard().note_shed();
        }
        is_answered
    }

    /// Drops what was received, as the connection ends.
    fn drop_rest(&self, cx: &CodecCx<'_, S>) {
        let state = cx.cx.session();
        state.bytes.borrow_mut().clear();
        state.leave_buffer(&self.spare_in);
        state.count_held(cx.head());
    }

    /// The next item of received bytes. If there is none, the buffer goes back to the shard, unless
    /// many bytes wait in it.
    fn next(&self, state: &CodecSession<S>, ended: bool) -> Decoded<S::Codec> {
        let mut bytes = state.bytes.borrow_mut();
        let found = state.with_codec(&self.service, |codec| match ended {
            false => codec.decode(&mut bytes).map_err(CodecError::Malformed),
            true => codec.decode_eof(&mut bytes).map_err(CodecError::Unfinished),
        })?;
        if found.is_none() && bytes.len() > self.bytes_max {
            return Err(CodecError::TooLarge { bytes: bytes.len(), max: self.bytes_max });
        }
        let is_small = bytes.len() <= SMALL_BYTES_MAX;
        drop(bytes);
        if found.is_none() && is_small {
            state.leave_buffer(&self.spare_in);
        }
        Ok(found)
    }
}

/// An item, if it is whole.
type Decoded<C> = Result<Option<<C as Decoder>::Item>, CodecError<<C as Decoder>::Error>>;

impl<S: CodecService> Service for WithCodec<S> {
    type Session = CodecSession<S>;
    type Error = WithCodecError<S::Error, <S::Codec as Decoder>::Error>;

    const ACCOUNTS: bool = S::ACCOUNTS;
    const PIECES: bool = true;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<CodecSession<S>, Refusal> {
        opening.head().hear_end();
        let opening = CodecOpenCx { opening, with: self, codec: Place::default() };
        let user = self.service.open(&opening).await?;
        Ok(CodecSession::new(user, opening.codec))
    }

    async fn call(&self, cx: &Cx<'_, CodecSession<S>>, frame: Frame) -> Result<(), Self::Error> {
        let state = cx.session();
        // An empty frame marks the end of the input; no other frame is empty.
        let ended = frame.wire().is_empty();
        if !ended {
            state.take_in(&frame, &self.spare_in);
        }
        // A pending call pins no receive buffer.
        drop(frame);
        let cx = &CodecCx { cx, with: self };
        loop {
            match self.next(state, ended) {
                Ok(Some(item)) => match cx.shard().sheds() {
                    Some(load) if self.sheds(cx, &item, load) => {}
                    _ => {
                        if let Err(error) = Counted::new(self.service.call(cx, item), cx).await {
                            self.drop_rest(cx);
                            return Err(WithCodecError::Service(error));
                        }
                    }
                },
                Ok(None) => {
                    state.count_held(cx.head());
                    return Ok(());
                }
                // The connection ends for that reason anyway.
                Err(error @ CodecError::Unfinished(_)) => {
                    self.service.malformed(cx, &error);
                    return Ok(());
                }
                Err(error) => {
                    self.service.malformed(cx, &error);
                    self.drop_rest(cx);
                    return Err(WithCodecError::Codec(error));
                }
            }
            if cx.head().is_ending() {
                // Bytes received behind the item at hand are no longer for the service.
                self.drop_rest(cx);
                return Ok(());
            }
            if !cx.is_ready() {
                Counted::new(cx.ready(), cx).await;
            }
        }
    }

    fn failed(&self, cx: &Cx<'_, CodecSession<S>>, failure: &Failure<'_, Self::Error>) {
        let failure = match failure {
            Failure::Error(WithCodecError::Service(error)) => Failure::Error(error),
            // The service was informed by `malformed`.
            Failure::Error(WithCodecError::Codec(_)) => return,
            Failure::TimedOut => Failure::TimedOut,
            Failure::Panicked(message) => Failure::Panicked(message),
        };
        self.service.failed(&CodecCx { cx, with: self }, &failure);
    }

    fn draining(&self, cx: &Cx<'_, CodecSession<S>>) {
        self.service.draining(&CodecCx { cx, with: self });
    }

    fn heartbeat(&self, cx: &Cx<'_, CodecSession<S>>) {
        self.service.heartbeat(&CodecCx { cx, with: self });
    }

    fn input_ended(&self, cx: &Cx<'_, CodecSession<S>>) {
        self.service.input_ended(&CodecCx { cx, with: self });
    }

    fn close(&self, closed: &CloseCx<'_, CodecSession<S>>) {
        let state = closed.session();
        let unfinished = closed.reason() == CloseReason::PeerClosed && !state.bytes.borrow().is_empty();
        let reason = if unfinished { CloseReason::PeerClosedMidFrame } else { closed.reason() };
        self.service.close(&closed.with(&state.user, reason));
    }
}

impl<S: fmt::Debug> fmt::Debug for WithCodec<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WithCodec").field(&self.service).finish()
    }
}

/// State of [`WithCodec`] for a connection: the codec, bytes that are not an item yet, and the
/// user's session.
pub struct CodecSession<S: CodecService> {
    user: S::Session,
    codec: Place<S::Codec>,
    /// Bytes that were received and not decoded. Between two calls in a separate block, or none.
    bytes: RefCell<BytesMut>,
    /// The size of the buffer in which they lie.
    room: Cell<usize>,
    /// The sizes of buffers that were left behind, and that items of calls which wait still use.
    pinned: Cell<usize>,
    /// Bytes that the shard counts as held here.
    counted_bytes: Cell<usize>,
}

impl<S: CodecService> CodecSession<S> {
    fn new(user: S::Session, codec: Place<S::Codec>) -> CodecSession<S> {
        CodecSession {
            user,
            codec,
            bytes: RefCell::default(),
            room: Cell::new(0),
            pinned: Cell::new(0),
            counted_bytes: Cell::new(0),
        }
    }

    fn with_codec<R>(&self, service: &S, work: impl FnOnce(&mut S::Codec) -> R) -> R {
        self.codec.with(|| service.codec(), work)
    }

    /// Counts the memory of waiting bytes as held, unless it is hardly any.
    fn count_held(&self, head: &ConnHead) {
        let held = self.room.get() + self.pinned.get();
        let held = if held <= UNCOUNTED_MAX { 0 } else { held };
        if self.counted_bytes.replace(held) != held {
            head.set_service_bytes(held);
        }
    }

    /// Leaves the buffer of received bytes to others where little of it is used: the rest gets a
    /// separate block. Returns the size of the buffer if items still use it.
    fn leave_buffer(&self, spare: &Spare) -> usize {
        let (mut bytes, room) = (self.bytes.borrow_mut(), self.room.get());
        let is_fit = room <= UNCOUNTED_MAX.max(bytes.len() * 2);
        if room == 0 || (is_fit && !bytes.is_empty()) {
            return 0;
        }
        let rest = BytesMut::from(&bytes[..]);
        self.room.set(rest.capacity());
        match spare.keep(std::mem::replace(&mut bytes, rest), room) {
            true => 0,
            false => room,
        }
    }

    /// Appends received bytes to those that wait.
    fn take_in(&self, received: &[u8], spare: &Spare) {
        let mut bytes = self.bytes.borrow_mut();
        if bytes.len() <= SMALL_BYTES_MAX {
            let mut room = spare.take(bytes.len() + received.len());
            room.extend_from_slice(&bytes);
            *bytes = room;
            self.room.set(0);
        }
        bytes.extend_from_slice(received);
        self.room.set(self.room.get().max(bytes.capacity()));
    }
}

impl<S: CodecService> Session for CodecSession<S> {}

impl<S: CodecService> fmt::Debug for CodecSession<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CodecSession").finish_non_exhaustive()
    }
}

/// The connection of a call: a [`Cx`] whose replies are items.
///
/// Push items from other code on the shard through [`item_handle`](CodecCx::item_handle). Bytes
/// pushed through [`handle`](Cx::handle) are not encoded: encode them first.
pub struct CodecCx<'a, S: CodecService> {
    cx: &'a Cx<'a, CodecSession<S>>,
    with: &'a WithCodec<S>,
}

impl<'a, S: CodecService> CodecCx<'a, S> {
    /// Has what is behind the item at hand take no more memory than it has to, and counts it.
    /// Returns the size of its buffer if the item pins that, which then counts until it is
    /// [released](CodecCx::release).
    #[cold]
    fn leave_behind(&self) -> usize {
        let state = self.cx.session();
        let pinned = state.leave_buffer(&self.with.spare_in);
        state.pinned.set(state.pinned.get() + pinned);
        state.count_held(self.head());
        pinned
    }

    /// The call is over whose item pinned a buffer of `bytes`.
    #[cold]
    fn release(&self, bytes: usize) {
        let pinned = &self.cx.session().pinned;
        pinned.set(pinned.get() - bytes);
    }

    /// Queues one item, encoded by the connection's codec.
    ///
    /// # Errors
    /// The encoder's. Nothing is queued then.
    pub fn reply<I>(&self, item: I) -> Result<(), <S::Codec as Encoder<I>>::Error>
    where
        S::Codec: Encoder<I>,
    {
        let encode = |bytes: &mut BytesMut| self.with_codec(|codec| codec.encode(item, bytes));
        self.with.spare_out.encoded(encode, |bytes| self.cx.head().write(bytes))
    }

    /// Uses the connection's codec, to change how it goes on.
    ///
    /// # Panics
    /// If `work` uses the codec of this connection in another way, as [`reply`](CodecCx::reply)
    /// does.
    pub fn with_codec<R>(&self, work: impl FnOnce(&mut S::Codec) -> R) -> R {
        self.cx.session().with_codec(&self.with.service, work)
    }

    /// A handle that pushes items from other code on this shard. The first one of a connection
    /// allocates.
    pub fn item_handle(&self) -> CodecHandle<S::Codec> {
        let codec = self.cx.session().codec.share(|| self.with.service.codec());
        CodecHandle::new(self.cx.local_handle(), codec, self.with.spare_out.clone())
    }

    /// The session of the connection.
    pub fn session(&self) -> &'a S::Session {
        &self.cx.session().user
    }
}

impl<'a, S: CodecService> Deref for CodecCx<'a, S> {
    type Target = Cx<'a, CodecSession<S>>;

    fn deref(&self) -> &Cx<'a, CodecSession<S>> {
        self.cx
    }
}

impl<S: CodecService> fmt::Debug for CodecCx<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CodecCx").field(self.cx).finish()
    }
}

/// A connection that was accepted: an [`OpenCx`] whose replies are items.
#[doc(alias = "CodecOpening")]
pub struct CodecOpenCx<'a, S: CodecService> {
    opening: &'a OpenCx<'a>,
    with: &'a WithCodec<S>,
    /// The connection's codec, once it was made.
    codec: Place<S::Codec>,
}

impl<S: CodecService> CodecOpenCx<'_, S> {
    /// Queues one item, encoded by the connection's codec.
    ///
    /// # Errors
    /// The encoder's. Nothing is queued then.
    pub fn reply<I>(&self, item: I) -> Result<(), <S::Codec as Encoder<I>>::Error>
    where
        S::Codec: Encoder<I>,
    {
        let encode = |bytes: &mut BytesMut| self.with_codec(|codec| codec.encode(item, bytes));
        self.with.spare_out.encoded(encode, |bytes| self.opening.write(bytes))
    }

    /// Uses the connection's codec, to change how it begins.
    ///
    /// # Panics
    /// If `work` uses the codec of this connection in another way, as [`reply`](CodecOpenCx::reply)
    /// does.
    pub fn with_codec<R>(&self, work: impl FnOnce(&mut S::Codec) -> R) -> R {
        self.codec.with(|| self.with.service.codec(), work)
    }
}

impl<'a, S: CodecService> Deref for CodecOpenCx<'a, S> {
    type Target = OpenCx<'a>;

    fn deref(&self) -> &OpenCx<'a> {
        self.opening
    }
}

impl<S: CodecService> fmt::Debug for CodecOpenCx<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CodecOpening").field(self.opening).finish()
    }
}
