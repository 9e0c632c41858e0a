use core::fmt;

/// The reason why bytes are not a frame. The connection is closed with
/// [`CloseReason::BadFrame`](crate::CloseReason::BadFrame), which carries it.
///
/// | framing | refuses, in addition to [`TooLarge`](FrameError::TooLarge) |
/// |---|---|
/// | [`Raw`](super::Raw), [`Fixed`](super::Fixed), [`LengthPrefix`](super::LengthPrefix) | nothing |
/// | [`Lines`](super::Lines), [`Delimiter`](super::Delimiter) | [`OverBytesMax`](FrameError::OverBytesMax) |
/// | [`LengthField`](super::LengthField) | [`NegativeLength`](FrameError::NegativeLength) |
/// | [`LengthField::varint`](super::LengthField::varint) | also [`VarintOverflow`](FrameError::VarintOverflow) and [`VarintOverlong`](FrameError::VarintOverlong) |
/// | your own | [`Malformed`](FrameError::Malformed), [`Coded`](FrameError::Coded) |
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FrameError {
    /// The frame is, or claims to be, larger than
    /// [`Limits::frame_bytes_max`](crate::Limits::frame_bytes_max).
    TooLarge {
        /// Bytes of the frame so far, or the number that it claims.
        bytes: usize,
        /// The limit.
        max: usize,
    },
    /// The frame is larger than the `bytes_max` of its framing.
    OverBytesMax {
        /// The limit.
        max: usize,
    },
    /// A length is below 0 after [`LengthPrefix::adjust`](super::LengthField::adjust).
    NegativeLength {
        /// The length as it was received.
        length: u64,
        /// The number that the framing adds to it.
        adjust: i64,
    },
    /// A varint goes on after the bytes that it may have, 10 by default, or says 2^64 or more.
    VarintOverflow,
    /// A varint has more bytes than its value needs. Each value has only one form, so that no two
    /// readers take the same bytes for different values.
    VarintOverlong {
        /// Bytes it has.
        bytes: usize,
        /// Bytes that suffice.
        needed: usize,
    },
    /// The bytes break the framing's rules, as this text says.
    Malformed(&'static str),
    /// The bytes break the framing's rules. The code is a number of the protocol for the error, or
    /// the byte that is wrong.
    Coded {
        /// The number.
        code: u32,
        /// The broken rule.
        what: &'static str,
    },
}

impl FrameError {
    /// Bytes that break the framing's rules, with a number for the answer of
    /// [`Service::malformed`](../trait.Service.html#method.malformed).
    pub const fn coded(code: u32, what: &'static str) -> FrameError {
        FrameError::Coded { code, what }
    }

    /// The number of the error, if the framing gave one.
    pub const fn code(self) -> Option<u32> {
        match self {
            FrameError::Coded { code, .. } => Some(code),
            _ => None,
        }
    }

    /// A short name, for counters and logs.
    pub fn name(self) -> &'static str {
        match self {
            FrameError::TooLarge { .. } => "too_large",
            FrameError::OverBytesMax { .. } => "over_bytes_max",
            FrameError::NegativeLength { .. } => "negative_length",
            FrameError::VarintOverflow => "varint_overflow",
            FrameError::VarintOverlong { .. } => "varint_overlong",
            FrameError::Malformed(_) | FrameError::Coded { .. } => "malformed",
        }
    }
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FrameError::TooLarge { bytes, max } => {
                write!(f, "a frame of at least {bytes} bytes is larger than frame_bytes_max, {max}")
            }
            FrameError::OverBytesMax { max } => {
                write!(f, "a frame is larger than bytes_max of its framing, {max}")
            }
            FrameError::NegativeLength { length, adjust } => {
                write!(f, "a length of {length}, to which {adjust} is added, is negative")
            }
            FrameError::VarintOverflow => {
                f.write_str("a varint length has more bytes than it may (10 bytes, or fewer by varint_max), or is above 18446744073709551615")
            }
            FrameError::VarintOverlong { bytes, needed } => {
                write!(f, "a varint length has {bytes} bytes where {needed} suffice")
            }
            FrameError::Malformed(what) => write!(f, "malformed frame: {what}"),
            FrameError::Coded { code, what } => write!(f, "malformed frame: {what} (code {code})"),
        }
    }
}

ringserve_buf::debug_is_display!(FrameError);

impl core::error::Error for FrameError {}

/// The reason why a payload cannot be written as a frame. It closes the connection: leaving a reply
/// out would shift every later one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct EncodeError(
    /// The fault of the payload.
    pub &'static str,
);

impl fmt::Display for EncodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "payload cannot be framed: {}", self.0)
    }
}

ringserve_buf::debug_is_display!(EncodeError);

impl core::error::Error for EncodeError {}
