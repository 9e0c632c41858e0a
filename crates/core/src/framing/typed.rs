//! Framings with types: a state for each connection, a head for each frame, frames in pieces.

use alloc::boxed::Box;
use alloc::rc::Rc;
use core::cell::Cell;
use core::fmt;

use super::{Decode, EncodeError, Encoding, FrameError, Framing, InPlace, Payload};
use crate::bytes::Outbox;
use crate::{LimitError, Limits};

/// The result of [`TypedFraming::cut`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut<H = ()> {
    /// No whole frame yet. See [`Decode::More`].
    More(usize),
    /// A frame, or the last piece of one.
    Frame {
        /// Bytes before the payload.
        skip: usize,
        /// Bytes of payload.
        len: usize,
        /// Bytes of the whole frame: `skip`, the payload, and bytes after it. At least 1.
        consumed: usize,
        /// Facts that the framing found, for [`Frame::head`](crate::Frame::head).
        head: H,
    },
    /// A piece of a frame that goes on. Until its last piece, which is a [`Cut::Frame`], the
    /// connection is in the middle of a frame: the peer owes bytes at
    /// [`Limits::read_bytes_per_second_min`], and its FIN is
    /// [`CloseReason::PeerClosedMidFrame`](crate::CloseReason::PeerClosedMidFrame).
    Piece {
        /// Bytes before the payload.
        skip: usize,
        /// Bytes of payload.
        len: usize,
        /// Bytes of the piece. At least 1.
        consumed: usize,
        /// Facts that the framing found.
        head: H,
    },
}

impl Decode {
    /// The same result with a head, for a framing around one without heads.
    #[inline(always)]
    pub fn with_head<H>(self, head: H) -> Cut<H> {
        match self {
            Decode::More(missing) => Cut::More(missing),
            Decode::Frame { skip, len, consumed } => Cut::Frame { skip, len, consumed, head },
        }
    }
}

/// A framing with types: a state for each connection that calls may switch, a head that is handed
/// over with each frame, frames in pieces. Every [`Framing`] is one with none of these. *A framing
/// with a state* in the guide shows an example step by step.
///
/// ```
/// use ringserve::framing::{Cut, EncodeError, FrameError, Framing, Lines, Outbox, Payload, TypedFraming};
///
/// /// Lines, and after a call has switched to it one block of that many bytes.
/// #[derive(Clone, Copy, Default)]
/// enum Next {
///     #[default]
///     Line,
///     Block(usize),
/// }
///
/// struct LinesAndBlocks;
///
/// impl TypedFraming for LinesAndBlocks {
///     type State = Next;
///     type Head = ();
///
///     fn cut(&self, next: &mut Next, bytes: &[u8], scanned: usize) -> Result<Cut, FrameError> {
///         match *next {
///             Next::Line => Ok(Lines::crlf().decode(bytes, scanned)?.with_head(())),
///             Next::Block(len) if bytes.len() < len.max(1) => Ok(Cut::More(len.max(1) - bytes.len())),
///             Next::Block(len) => {
///                 *next = Next::Line;
///                 Ok(Cut::Frame { skip: 0, len, consumed: len.max(1), head: () })
///             }
///         }
///     }
///
///     fn write(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
///         Lines::crlf().encode(payload, out)
///     }
/// }
///
/// let mut next = Next::Block(3);
/// let found = LinesAndBlocks.cut(&mut next, b"a\nbc\r\n", 0);
/// assert_eq!(found, Ok(Cut::Frame { skip: 0, len: 3, consumed: 3, head: () }));
/// assert!(matches!(next, Next::Line));
/// ```
pub trait TypedFraming: 'static {
    /// The framing's state for a connection, in the session ([`AsFramingState`]); `()` for none. A
    /// connection begins with the state that its session was made with.
    type State: Copy + 'static;

    /// The value handed over with each frame; `()` for none. A service of frames with a head is a
    /// `Service<Head>`. The default value replaces a frame that was taken, and should hold no
    /// memory.
    type Head: Default + 'static;

    /// Looks for a frame at the start of `bytes`, as [`Framing::decode`] does, by the rule in
    /// `state`. Changes of `state` are kept with a frame or a piece, and dropped otherwise.
    ///
    /// Bytes after a frame are cut when its call is done, or when it waits and others may be in
    /// flight: by the rule that the call has switched to by then.
    ///
    /// # Errors
    /// If the bytes can never become a frame.
    fn cut(
        &self,
        state: &mut Self::State,
        bytes: &[u8],
        scanned: usize,
    ) -> Result<Cut<Self::Head>, FrameError>;

    /// Writes one frame with this payload. See [`Framing::encode`].
    ///
    /// # Errors
    /// If the payload has no frame.
    fn write(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError>;

    /// Bytes left free before a payload that is written in place. See [`Framing::header_room`].
    fn room_before(&self) -> usize {
        0
    }

    /// Makes a frame of a payload that was written in place. See [`Framing::encode_written`].
    ///
    /// # Errors
    /// If the payload has no frame.
    fn write_around(&self, written: &mut InPlace<'_>) -> Result<(), EncodeError> {
        let (payload, mut out) = written.take();
        self.write(Payload::Bytes(&payload), &mut out)
    }

    /// Refuses limits with which this framing cannot work. See [`Framing::check`].
    ///
    /// # Errors
    /// The first fault found. By default there is none.
    fn check_limits(&self, limits: &Limits) -> Result<(), LimitError> {
        let _ = limits;
        Ok(())
    }

    /// The encoding of replies. See [`Framing::encoding`].
    fn reply_encoding(self: &Rc<Self>) -> Encoding
    where
        Self: Sized,
    {
        Encoding::Custom(self.clone())
    }
}

impl<F: Framing> TypedFraming for F {
    type State = ();
    type Head = ();

    #[inline(always)]
    fn cut(&self, _none: &mut (), bytes: &[u8], scanned: usize) -> Result<Cut, FrameError> {
        self.decode(bytes, scanned).map(|decoded| decoded.with_head(()))
    }

    #[inline(always)]
    fn write(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        self.encode(payload, out)
    }

    fn room_before(&self) -> usize {
        self.header_room()
    }

    fn write_around(&self, written: &mut InPlace<'_>) -> Result<(), EncodeError> {
        self.encode_written(written)
    }

    fn check_limits(&self, limits: &Limits) -> Result<(), LimitError> {
        self.check(limits)
    }

    fn reply_encoding(self: &Rc<Self>) -> Encoding {
        self.encoding()
    }
}

/// The writing half of a framing of any type: each method does what the method of [`TypedFraming`]
/// with the same name does.
#[doc(hidden)]
#[allow(missing_docs, clippy::missing_errors_doc)]
pub trait DynWriter {
    fn dyn_write(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError>;
    fn dyn_room_before(&self) -> usize;
    fn dyn_write_around(&self, written: &mut InPlace<'_>) -> Result<(), EncodeError>;
}

impl<F: TypedFraming> DynWriter for F {
    fn dyn_write(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        self.write(payload, out)
    }

    fn dyn_room_before(&self) -> usize {
        self.room_before()
    }

    fn dyn_write_around(&self, written: &mut InPlace<'_>) -> Result<(), EncodeError> {
        self.write_around(written)
    }
}

/// The state of a connection's framing, in its session.
/// [`Cx::set_framing_state`](../struct.Cx.html#method.set_framing_state) changes it.
#[derive(Default)]
pub struct FramingState<T>(Cell<T>);

impl<T: Copy> FramingState<T> {
    /// The state with which a connection begins.
    pub const fn new(state: T) -> FramingState<T> {
        FramingState(Cell::new(state))
    }

    /// The rule for the next bytes.
    #[inline]
    pub fn get(&self) -> T {
        self.0.get()
    }

    /// Sets the rule, for code that informs the connection's shard as well.
    #[doc(hidden)]
    #[inline]
    pub fn set(&self, state: T) {
        self.0.set(state);
    }
}

impl<T: Copy + fmt::Debug> fmt::Debug for FramingState<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FramingState").field(&self.get()).finish()
    }
}

/// A session that holds the state `T` of its connection's framing. Each session holds the state
/// `()`, which is none.
///
/// ```
/// use ringserve::framing::{FramingState, AsFramingState};
///
/// #[derive(Clone, Copy, Default)]
/// enum Reads {
///     #[default]
///     Commands,
///     Mail,
/// }
///
/// #[derive(Default)]
/// struct Session {
///     reads: FramingState<Reads>,
/// }
///
/// impl AsFramingState<Reads> for Session {
///     fn framing_state(&self) -> &FramingState<Reads> {
///         &self.reads
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "the session `{Self}` does not hold the state `{T}` of the framing",
    note = "give it a field of the type `FramingState<{T}>`, and `impl HoldsState<{T}> for {Self}`"
)]
#[doc(alias = "HoldsState")]
pub trait AsFramingState<T> {
    /// The place of the state.
    fn framing_state(&self) -> &FramingState<T>;
}

impl<S> AsFramingState<()> for S {
    #[inline(always)]
    fn framing_state(&self) -> &FramingState<()> {
        // A box of a zero-sized value takes no memory.
        Box::leak(Box::new(FramingState(Cell::new(()))))
    }
}
