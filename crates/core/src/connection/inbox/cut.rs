//! Frames cut off the front of received bytes, without a copy.
//!
//! A framing reports where a frame lies; its answer is accepted only if the frame is within the
//! bytes that it was shown.

use ringserve_buf::Lease;

use crate::Frame;
use crate::framing::{Cut, FrameError, FramingState, TypedFraming};

/// The result of a look at received bytes.
#[derive(Debug)]
pub(crate) enum Found<H = ()> {
    /// A frame, cut off the front.
    Frame(Frame<H>),
    /// A piece of a frame that goes on, cut off the front.
    Piece(Frame<H>),
    /// No whole frame, and at least this many bytes are missing.
    More(usize),
    Bad(FrameError),
    NoMemory,
}

/// Asks a framing to look for a frame. Changes that it makes to the connection's state are kept
/// only with a frame.
#[inline(always)]
pub(crate) fn cut_at<F: TypedFraming>(
    framing: &F,
    state: &FramingState<F::State>,
    bytes: &[u8],
    scanned: usize,
) -> Result<Cut<F::Head>, FrameError> {
    let mut next = state.get();
    let found = framing.cut(&mut next, bytes, scanned);
    if let Ok(Cut::Frame { .. } | Cut::Piece { .. }) = found {
        state.set(next);
    }
    found
}

/// The answer of a framing that found no whole frame, or bytes that can never become one.
pub(crate) type Uncut<H> = Result<Cut<H>, FrameError>;

/// Cuts a frame off the front of `lease`, without copying.
#[inline(always)]
pub(crate) fn cut<F: TypedFraming>(
    framing: &F,
    state: &FramingState<F::State>,
    lease: &mut Lease,
    frame_bytes_max: usize,
) -> Found<F::Head> {
    match cut_whole(framing, state, lease, frame_bytes_max) {
        Ok(frame) => Found::Frame(frame),
        Err(uncut) => not_whole(uncut, lease, frame_bytes_max),
    }
}

/// Cuts a whole frame off the front of `lease`. Otherwise returns the framing's answer, for
/// [`not_whole`].
#[inline(always)]
pub(crate) fn cut_whole<F: TypedFraming>(
    framing: &F,
    state: &FramingState<F::State>,
    lease: &mut Lease,
    frame_bytes_max: usize,
) -> Result<Frame<F::Head>, Uncut<F::Head>> {
    let seen = lease.len().min(frame_bytes_max);
    match cut_at(framing, state, &lease[..seen], 0) {
        Ok(Cut::Frame { skip, len, consumed, head }) if is_sound(skip, len, consumed, seen) => {
            Ok(Frame::sound(lease.split_to(consumed), skip, len, head))
        }
        other => Err(other),
    }
}

/// The result of [`cut_whole`] where it is not a frame in the same lease: a piece of one is cut
/// off.
#[cold]
pub(crate) fn not_whole<H>(uncut: Uncut<H>, lease: &mut Lease, frame_bytes_max: usize) -> Found<H> {
    let seen = lease.len().min(frame_bytes_max);
    match uncut {
        Ok(Cut::Piece { skip, len, consumed, head }) if is_sound(skip, len, consumed, seen) => {
            Found::Piece(Frame::sound(lease.split_to(consumed), skip, len, head))
        }
        Ok(Cut::Frame { .. } | Cut::Piece { .. }) => Found::Bad(UNSOUND),
        Ok(Cut::More(missing)) => more(seen, missing, frame_bytes_max),
        Err(error) => Found::Bad(error),
    }
}

/// The error of a framing with an impossible answer: it would loop, or read bytes beyond its own.
pub(crate) const UNSOUND: FrameError =
    FrameError::Malformed("the framing named a frame outside of the bytes it was given");

#[inline]
pub(crate) fn is_sound(skip: usize, len: usize, consumed: usize, seen: usize) -> bool {
    consumed > 0 && consumed <= seen && skip.checked_add(len).is_some_and(|end| end <= consumed)
}

/// The result for a frame of which `have` bytes have arrived and `missing` have not.
pub(crate) fn more<H>(have: usize, missing: usize, max: usize) -> Found<H> {
    let missing = missing.max(1);
    if missing > max.saturating_sub(have) {
        return Found::Bad(FrameError::TooLarge { bytes: have.saturating_add(missing), max });
    }
    Found::More(missing)
}
