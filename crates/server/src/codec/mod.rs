//! Services over the codecs of [`tokio_util::codec`], so that codecs which exist can be used as they are. With the
//! feature `codec`, which is off by default.
//!
//! A [`CodecService`] says which codec and what happens to an item; [`WithCodec`] makes a [`Service`] of it. The
//! server keeps its default framing, [`Raw`](ringserve_core::framing::Raw): the codec finds the boundaries.
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
//! Received bytes are copied once, into the `BytesMut` that a decoder takes from, and encoded replies once, into
//! the outbox: nothing is lent. What the codec itself copies and allocates comes on top, as a `String` for each
//! line above. A framing of this crate, or [one's own](ringserve_core::framing::Framing), does without all that.
//!
//! A connection that waits between two items holds no buffer, but the codec.
//!
//! # What is bounded, and what ends a connection
//!
//! Bytes that are not an item yet are bounded by [`WithCodec::bytes_max`], and count towards
//! [`ServerLimits::held_bytes_max`](crate::limits::ServerLimits::held_bytes_max) from 4 KiB on. A codec that makes room for what a peer claims, as
//! `LengthDelimitedCodec` does, allocates before the bound can act: set the codec's own limit too.
//!
//! An error of the decoder, or too many bytes, goes to [`CodecService::malformed`] for last words, then the
//! connection is closed for [`CloseReason::HandlerError`]: for the server the codec is part of the service.
//!
//! When the peer has sent FIN and its items are answered, `Decoder::decode_eof` is called until it has no further item: a last line
//! without its end is an item of `LinesCodec`. An error of it goes to [`CodecService::malformed`] as
//! [`CodecError::Unfinished`]. What is left is dropped, and [`CodecService::close`] hears of [`CloseReason::PeerClosedMidFrame`].
//! A drain does not wait for that.
//!
//! # Around it
//!
//! [`middleware`](crate::middleware) around a [`WithCodec`] sees calls for what is received together, and one without a byte at the
//! peer's end.
//!
//! For time limits whatever arrives is a frame: the first byte ends [`Limits::first_frame_timeout`], and each one starts
//! [`Limits::idle_timeout`] again.
//!
//! Between two items of one piece of input replies are given time to leave, so that what
//! [`Limits`] say about outboxes holds for items too.

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

use self::handle::Place;
pub use self::handle::{CodecHandle, CodecPushError};
use self::spare::Spare;
use crate::closed::{Closed, Failure};
use crate::cx::Cx;
use crate::opening::{Opening, Refusal, Session, by_default};
use crate::service::Service;

/// The start of an item is copied out of the shard's buffer up to this size, and waits in a block of its own: that is
/// cheap, and the buffer, which is larger as a rule, serves others.
const SMALL_BYTES_MAX: usize = 4 * 1024;

/// What a server does with the items of a codec. Like [`Service`], of which each method is explained there.
pub trait CodecService: Sized + 'static {
    /// Makes items of bytes, and bytes of items. Each connection has its own.
    type Codec: Decoder<Error: fmt::Display> + 'static;

    /// State of one connection.
    type Session: Session;

    /// Why a call failed. The connection is closed after its queued replies, and the error is logged once.
    type Error: fmt::Display;

    /// Whether each connection has an account, whose frames are what is received together. As [`Service::ACCOUNTS`].
    const ACCOUNTS: bool = false;

    /// A codec for one connection. It is asked for when the first bytes come or the first reply is made.
    fn codec(&self) -> Self::Codec;

    /// A connection was accepted. By default its session is made by `Default`; one that is not `Default` is made here.
    ///
    /// # Errors
    /// A [`Refusal`] closes it.
    fn open(&self, opening: &CodecOpening<'_, Self>) -> impl Future<Output = Result<Self::Session, Refusal>> {
        const {
            assert!(
                Self::Session::DEFAULT.is_some(),
                "a session without `Default` is made by `CodecService::open`: write that method"
            );
        }
        let _ = opening;
        ready(by_default())
    }

    /// An item arrived. The next one of the same connection is handed over when this future is done. Items that were
    /// received before the connection was told to end are dropped.
    ///
    /// With [`Limits::calls_in_flight_max`](crate::Limits::calls_in_flight_max) above 1, bytes that arrive while this future waits go on
    /// to the decoder, and their items are handed over meanwhile, with those that were left of earlier bytes: in their order, as many at
    /// once as that limit. What a later item replies then may overtake what an earlier one does, so that peers have to tell replies
    /// apart by what is in them, as by ids. Items that arrived in one piece wait for each other until more bytes come.
    ///
    /// # Errors
    /// Closes this connection after its queued replies.
    fn call(
        &self,
        cx: &CodecCx<'_, Self>,
        item: <Self::Codec as Decoder>::Item,
    ) -> impl Future<Output = Result<(), Self::Error>>;

    /// The peer sent what is no item. Last words may be written; then the connection is closed.
    fn malformed(&self, cx: &CodecCx<'_, Self>, error: &CodecError<<Self::Codec as Decoder>::Error>) {
        let _ = (cx, error);
    }

    /// A call fails. Last words may be written, after which the connection is closed.
    fn failed(&self, cx: &CodecCx<'_, Self>, failure: &Failure<'_, Self::Error>) {
        let _ = (cx, failure);
    }

    /// The server begins to shut down.
    fn draining(&self, cx: &CodecCx<'_, Self>) {
        let _ = cx;
    }

    /// The peer was silent for [`Limits::heartbeat_interval`]: what this queues asks it for a sign of life.
    fn heartbeat(&self, cx: &CodecCx<'_, Self>) {
        let _ = cx;
    }

    /// The peer sent its last byte, every item was handed over, and the connection is [held open](Cx::hold_open): it is for the
    /// service to close it.
    fn input_ended(&self, cx: &CodecCx<'_, Self>) {
        cx.close();
    }

    /// The connection ended. If the peer ended it in the middle of an item the reason is
    /// [`CloseReason::PeerClosedMidFrame`], which counters and log, who know no items, show as `peer_closed`.
    fn close(&self, closed: &Closed<'_, Self::Session>) {
        let _ = closed;
    }
}

/// Why bytes are not an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CodecError<E> {
    /// More bytes than [`WithCodec::bytes_max`] wait to become an item.
    TooLarge {
        /// Bytes that wait.
        bytes: usize,
        /// The limit.
        max: usize,
    },
    /// The decoder refused them.
    Malformed(E),
    /// The peer ended, and the decoder refused what it left.
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

impl<E: fmt::Debug + fmt::Display> std::error::Error for CodecError<E> {}

/// Why a call of [`WithCodec`] failed. `E` is the error of the [`CodecService`], `D` that of the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WithCodecError<E, D> {
    /// The service failed.
    Service(E),
    /// The peer sent what is no item.
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

/// A [`Service`] made of a [`CodecService`]. See the [module](self).
pub struct WithCodec<S> {
    service: S,
    bytes_max: usize,
    /// For what is received.
    spare_in: Spare,
    /// For what is encoded.
    spare_out: Rc<Spare>,
}

impl<S: CodecService> WithCodec<S> {
    /// With at most as many bytes for an item as [`Limits::frame_bytes_max`] has by default, 1 MiB.
    pub fn new(service: S) -> WithCodec<S> {
        WithCodec {
            service,
            bytes_max: Limits::default().frame_bytes_max,
            spare_in: Spare::default(),
            spare_out: Rc::default(),
        }
    }

    /// The most bytes of a connection that wait to become an item. A connection can make the server hold this much,
    /// and up to twice as much memory. What is received together, a buffer as a rule, comes on top for a moment.
    ///
    /// # Panics
    /// If it is 0: then nothing could ever wait.
    pub fn bytes_max(self, bytes_max: usize) -> WithCodec<S> {
        assert!(bytes_max > 0, "bytes_max is 0; it must be at least 1");
        WithCodec { bytes_max, ..self }
    }

    /// The next item of what was received. If there is none, the buffer goes back to the shard, unless much waits
    /// in it.
    fn next(&self, state: &CodecSession<S>, ended: bool) -> Decoded<S::Codec> {
        let mut bytes = state.bytes.borrow_mut();
        let found = state.with_codec(&self.service, |codec| match ended {
            false => codec.decode(&mut bytes).map_err(CodecError::Malformed),
            true => codec.decode_eof(&mut bytes).map_err(CodecError::Unfinished),
        })?;
        if found.is_none() && bytes.len() > self.bytes_max {
            return Err(CodecError::TooLarge { bytes: bytes.len(), max: self.bytes_max });
        }
        if found.is_none() && bytes.len() <= SMALL_BYTES_MAX {
            let rest = BytesMut::from(&bytes[..]);
            self.spare_in.keep(std::mem::replace(&mut bytes, rest));
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

    async fn open(&self, opening: &Opening<'_>) -> Result<CodecSession<S>, Refusal> {
        opening.head().hear_end();
        let opening = CodecOpening { opening, with: self, codec: Place::default() };
        let user = self.service.open(&opening).await?;
        Ok(CodecSession::new(user, opening.codec))
    }

    async fn call(&self, cx: &Cx<'_, CodecSession<S>>, frame: Frame) -> Result<(), Self::Error> {
        let state = cx.session();
        // It comes for the end of the input: there is no other one without a byte.
        let ended = frame.wire().is_empty();
        if !ended {
            state.take_in(&frame, &self.spare_in);
        }
        // A call that waits pins no receive buffer.
        drop(frame);
        let cx = &CodecCx { cx, with: self };
        loop {
            match self.next(state, ended) {
                Ok(Some(item)) => self.service.call(cx, item).await.map_err(WithCodecError::Service)?,
                Ok(None) => {
                    state.count_held(cx.head());
                    return Ok(());
                }
                // The connection ends for that anyway.
                Err(error @ CodecError::Unfinished(_)) => {
                    self.service.malformed(cx, &error);
                    return Ok(());
                }
                Err(error) => {
                    self.service.malformed(cx, &error);
                    return Err(WithCodecError::Codec(error));
                }
            }
            if cx.head().is_ending() {
                // What was received with the item at hand is not for the service any more.
                state.bytes.borrow_mut().clear();
                return Ok(());
            }
            cx.ready().await;
        }
    }

    fn failed(&self, cx: &Cx<'_, CodecSession<S>>, failure: &Failure<'_, Self::Error>) {
        let failure = match failure {
            Failure::Error(WithCodecError::Service(error)) => Failure::Error(error),
            // The service heard of it, as malformed.
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

    fn close(&self, closed: &Closed<'_, CodecSession<S>>) {
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

/// What [`WithCodec`] keeps for a connection: the codec, what is not an item yet, and the user's session.
pub struct CodecSession<S: CodecService> {
    user: S::Session,
    codec: Place<S::Codec>,
    /// Received and not decoded. Between two calls in a block of its own, or none.
    bytes: RefCell<BytesMut>,
    /// What the shard was told that is held here.
    counted_bytes: Cell<usize>,
}

impl<S: CodecService> CodecSession<S> {
    fn new(user: S::Session, codec: Place<S::Codec>) -> CodecSession<S> {
        CodecSession { user, codec, bytes: RefCell::default(), counted_bytes: Cell::new(0) }
    }

    fn with_codec<R>(&self, service: &S, work: impl FnOnce(&mut S::Codec) -> R) -> R {
        self.codec.with(|| service.codec(), work)
    }

    /// Tells the shard what waits here, unless it is little.
    fn count_held(&self, head: &ConnHead) {
        let bytes = self.bytes.borrow();
        let held = if bytes.len() <= SMALL_BYTES_MAX { 0 } else { bytes.capacity() };
        if self.counted_bytes.replace(held) != held {
            head.set_service_bytes(held);
        }
    }

    /// Adds received bytes to those that wait.
    fn take_in(&self, received: &[u8], spare: &Spare) {
        let mut bytes = self.bytes.borrow_mut();
        if bytes.len() <= SMALL_BYTES_MAX {
            let mut room = spare.take(bytes.len() + received.len());
            room.extend_from_slice(&bytes);
            *bytes = room;
        }
        bytes.extend_from_slice(received);
    }
}

impl<S: CodecService> Session for CodecSession<S> {}

impl<S: CodecService> fmt::Debug for CodecSession<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CodecSession").finish_non_exhaustive()
    }
}

/// The connection a call is for: a [`Cx`] whose replies are items, with everything else a `Cx` has.
///
/// Items are pushed from elsewhere on the shard through [`item_handle`](CodecCx::item_handle). What is pushed through
/// [`handle`](Cx::handle) is not encoded: push the encoded bytes.
pub struct CodecCx<'a, S: CodecService> {
    cx: &'a Cx<'a, CodecSession<S>>,
    with: &'a WithCodec<S>,
}

impl<'a, S: CodecService> CodecCx<'a, S> {
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

    /// Reaches the connection's codec, to change how it goes on.
    ///
    /// # Panics
    /// If `work` uses the codec of this connection in another way, as [`reply`](CodecCx::reply) does.
    pub fn with_codec<R>(&self, work: impl FnOnce(&mut S::Codec) -> R) -> R {
        self.cx.session().with_codec(&self.with.service, work)
    }

    /// A handle that pushes items from elsewhere on this shard. The first one for a connection allocates.
    pub fn item_handle(&self) -> CodecHandle<S::Codec> {
        let codec = self.cx.session().codec.share(|| self.with.service.codec());
        CodecHandle::new(self.cx.local_handle(), codec, self.with.spare_out.clone())
    }

    /// The connection's state.
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

/// A connection that was accepted: an [`Opening`] whose replies are items, with everything else an `Opening` has.
pub struct CodecOpening<'a, S: CodecService> {
    opening: &'a Opening<'a>,
    with: &'a WithCodec<S>,
    /// The connection's, once it was asked for.
    codec: Place<S::Codec>,
}

impl<S: CodecService> CodecOpening<'_, S> {
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

    /// Reaches the connection's codec, to change how it begins.
    ///
    /// # Panics
    /// If `work` uses the codec of this connection in another way, as [`reply`](CodecOpening::reply) does.
    pub fn with_codec<R>(&self, work: impl FnOnce(&mut S::Codec) -> R) -> R {
        self.codec.with(|| self.with.service.codec(), work)
    }
}

impl<'a, S: CodecService> Deref for CodecOpening<'a, S> {
    type Target = Opening<'a>;

    fn deref(&self) -> &Opening<'a> {
        self.opening
    }
}

impl<S: CodecService> fmt::Debug for CodecOpening<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CodecOpening").field(self.opening).finish()
    }
}
