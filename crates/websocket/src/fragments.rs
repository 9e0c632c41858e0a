//! The rules of messages, wherever their bytes lie: which frame may follow another, how long a
//! message may be, and which bytes are text.
//!
//! ```text
//!   header ── PartialMessage::next ──▶ FramePayload ── take: each piece ──▶ PartialMessage::check
//! ```
//!
//! [`channel`](crate::WebSocketTransport) unmasks the bytes in the buffers that received them, and
//! passes most of them on without a copy; a [`Reader`](crate::reader::Reader) puts each message
//! together in its own memory.

use core::fmt;

use crate::close;
use crate::extension::{Extension, TOO_LARGE, compressed_max};
use crate::frame::{Header, Opcode, Violation};
use crate::mask;
use crate::messages::Kind;
use crate::utf8::{self, Utf8};

/// The reason why reading ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ReadError {
    /// The peer broke the rules.
    Violation(Violation),
    /// The system has no memory for a message.
    NoMemory,
}

impl From<Violation> for ReadError {
    fn from(violation: Violation) -> ReadError {
        ReadError::Violation(violation)
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReadError::Violation(violation) => violation.fmt(f),
            ReadError::NoMemory => f.write_str("the system has no memory for a message"),
        }
    }
}

ringserve_buf::debug_is_display!(ReadError);

impl std::error::Error for ReadError {}

/// The violation of a text that is not UTF-8.
pub(crate) const NO_TEXT: Violation =
    Violation { code: close::INVALID_DATA, what: "a text that is no UTF-8" };

/// A message that began and has not ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartialMessage {
    pub(crate) kind: Kind,
    pub(crate) is_compressed: bool,
    /// The message consists of one frame.
    pub(crate) is_single: bool,
    /// Bytes of its frames, including the last one.
    bytes: u64,
    text: Utf8,
}

impl PartialMessage {
    /// The message to which a frame of data belongs, where `unfinished` began before.
    #[inline]
    pub(crate) fn next(
        unfinished: Option<PartialMessage>,
        header: &Header,
        bytes_max: usize,
    ) -> Result<PartialMessage, Violation> {
        let is_first = header.opcode != Opcode::Continuation;
        let mut message = match (unfinished, is_first) {
            (Some(message), false) => message,
            (Some(_), true) => return Err(Violation::protocol("a message in the middle of another")),
            (None, false) => return Err(Violation::protocol("the continuation of no message")),
            (None, true) => PartialMessage {
                kind: kind_of(header.opcode),
                is_compressed: header.rsv != 0,
                is_single: header.fin,
                bytes: 0,
                text: Utf8::default(),
            },
        };
        message.bytes = message.bytes.saturating_add(header.len);
        let most = if message.is_compressed { compressed_max(bytes_max) } else { bytes_max };
        if message.bytes > most as u64 {
            return Err(TOO_LARGE);
        }
        Ok(message)
    }

    /// Checks the next bytes of its payload, unmasked, the last ones of it if it `is_over`.
    #[inline]
    pub(crate) fn check(&mut self, payload: &[u8], is_over: bool) -> Result<(), Violation> {
        let is_text = self.kind == Kind::Text && !self.is_compressed;
        if is_text && (!self.text.takes(payload) || (is_over && !self.text.is_whole())) {
            return Err(NO_TEXT);
        }
        Ok(())
    }

    /// Inflates the message, if it is compressed, after `room` bytes that are left free.
    pub(crate) fn inflate(
        &self,
        payload: &[u8],
        bytes_max: usize,
        room: usize,
        extension: Option<&mut dyn Extension>,
    ) -> Result<Vec<u8>, ReadError> {
        let Some(extension) = extension else {
            return Err(Violation::protocol("a bit of an extension that was not negotiated").into());
        };
        let mut inflated = Vec::new();
        inflated.try_reserve(room).map_err(|_| ReadError::NoMemory)?;
        inflated.resize(room, 0);
        if let Err(error) = extension.inflate(payload, bytes_max, &mut inflated) {
            return Err(error.violation().map_or(ReadError::NoMemory, ReadError::Violation));
        }
        if self.kind == Kind::Text && !utf8::is_text(&inflated[room..]) {
            return Err(NO_TEXT.into());
        }
        Ok(inflated)
    }
}

#[inline]
pub(crate) fn kind_of(opcode: Opcode) -> Kind {
    if opcode == Opcode::Text { Kind::Text } else { Kind::Binary }
}

/// The payload of a frame that has not completely arrived.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FramePayload {
    /// Bytes that have not arrived.
    pub(crate) left: u64,
    /// The mask of the next byte and those after it.
    mask: [u8; 4],
    /// The frame is the last one of its message.
    fin: bool,
}

impl FramePayload {
    /// Creates the payload of a frame of which nothing has arrived.
    #[inline]
    pub(crate) fn new(header: &Header, mask: [u8; 4]) -> FramePayload {
        FramePayload { left: header.len, mask, fin: header.fin }
    }

    /// The number of `available` bytes that belong to the frame.
    #[inline]
    pub(crate) fn part_of(&self, available: usize) -> usize {
        // At most `available`.
        self.left.min(available as u64) as usize
    }

    /// Unmasks the next bytes, which are the frame's part of the received ones, in place.
    #[inline]
    pub(crate) fn take(&mut self, payload: &mut [u8]) {
        self.left -= payload.len() as u64;
        // A server's payload is not masked.
        if self.mask != [0; 4] {
            mask::apply(payload, self.mask);
            self.mask = mask::from(self.mask, payload.len());
        }
    }

    /// True if this frame, once it is over, ends its message.
    #[inline]
    pub(crate) fn ends_message(&self) -> bool {
        self.left == 0 && self.fin
    }
}
