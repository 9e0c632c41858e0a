//! Frames cut out of received bytes apart from the state machine, for clients.

use ringserve_buf::Lease;

use super::cut::{Found, cut};
use super::{Inbox, NoMemory};
use crate::Frame;
use crate::framing::{FrameError, Framing, FramingState};
use crate::time::Stamp;

/// Cuts frames off received bytes, by the same rules as a shard: a frame that lies in one lease is
/// not copied, and one that spans leases is copied once.
#[derive(Debug, Default)]
pub struct FrameReader {
    inbox: Inbox,
}

/// Why there is no frame.
#[derive(Debug, PartialEq, Eq)]
pub enum ReadError {
    /// The bytes can never become a frame, or are too many.
    Frame(FrameError),
    /// The system has no memory for the start of a frame.
    NoMemory,
}

impl FrameReader {
    /// Takes a frame off the front of `bytes`. If there is no whole one, all of `bytes` is taken
    /// and kept for the next call. After an error nothing more can be read.
    ///
    /// # Errors
    /// The framing's, and where a frame is larger than `frame_bytes_max`.
    #[inline]
    pub fn read(
        &mut self,
        framing: &impl Framing,
        bytes: &mut Lease,
        frame_bytes_max: usize,
    ) -> Result<Option<Frame>, ReadError> {
        let begun = self.inbox.has_partial();
        let none = FramingState::new(());
        let found = match begun {
            _ if bytes.is_empty() => return Ok(None),
            true => self.inbox.finish(framing, &none, bytes, frame_bytes_max),
            false => cut(framing, &none, bytes, frame_bytes_max),
        };
        match found {
            Found::Frame(frame) => return Ok(Some(frame)),
            Found::Bad(error) => return Err(ReadError::Frame(error)),
            Found::NoMemory => return Err(ReadError::NoMemory),
            Found::More(missing) if !begun => {
                // Nothing here is timed.
                self.inbox.begin(bytes, missing, Stamp::default()).map_err(|NoMemory| ReadError::NoMemory)?;
                *bytes = Lease::empty();
            }
            // A framing without a state has no pieces.
            Found::More(_) | Found::Piece(_) => {}
        }
        Ok(None)
    }

    /// Bytes of a frame that began and did not end.
    pub fn unfinished_bytes(&self) -> usize {
        self.inbox.partial_bytes()
    }

    /// Bytes of memory held for it.
    pub fn held_bytes(&self) -> usize {
        self.inbox.held_bytes()
    }
}
