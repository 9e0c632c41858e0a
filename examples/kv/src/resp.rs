//! Requests: where one ends, and its arguments.
//!
//! ```text
//!   *2\r\n $3\r\nGET\r\n $3\r\nkey\r\n      an array of strings, as every client library sends
//!   GET key\r\n                             a line, as typed by hand
//! ```

use ringserve::framing::{Decode, EncodeError, FrameError, Framing, Outbox, Payload};

use crate::inline;
use crate::number::{self, Digits};

/// Arguments of one request at most, as in Redis until 7.
const ARGS_MAX: i64 = 1 << 20;

/// Bytes of one argument at most, as `proto-max-bulk-len` of Redis. Usually
/// [`Limits::frame_bytes_max`](ringserve::Limits::frame_bytes_max) bounds it first.
const ARG_BYTES_MAX: i64 = 512 << 20;

/// Bytes of a line at most, as `PROTO_INLINE_MAX_SIZE` of Redis.
const LINE_BYTES_MAX: usize = 64 << 10;

/// Bytes of the shortest argument, `$0\r\n\r\n`.
const ARG_BYTES_MIN: usize = 6;

/// From this size on a request that lacks many arguments is looked at again only when it has grown by a part of
/// [`GROWTH`]. Below, walking it for each byte that comes costs little, and what is wrong with it is told at once.
const PATIENT_FROM_BYTES: usize = 1024;

/// Requests are walked from the start each time. Since a large one grows by a sixteenth at least in between, one that
/// trickles in is walked about 16 times its length, and not the square of it.
const GROWTH: usize = 16;

/// Requests of the Redis protocol. A frame is one whole request as it was sent; a reply with
/// [`Cx::reply`](ringserve::Cx::reply) is one string.
#[derive(Clone, Copy, Debug, Default)]
pub struct Resp;

impl Framing for Resp {
    #[inline]
    fn decode(&self, bytes: &[u8], scanned: usize) -> Result<Decode, FrameError> {
        match bytes.first() {
            Some(b'*') => array(bytes),
            Some(_) => line(bytes, scanned),
            None => Ok(Decode::More(1)),
        }
    }

    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        out.put(b"$");
        out.put(Digits::of(payload.len() as i64).bytes());
        out.put(b"\r\n");
        out.payload(payload);
        out.put(b"\r\n");
        Ok(())
    }
}

/// Walks over the arguments. Like Redis it takes any two bytes for the `\r\n` behind one.
#[inline]
fn array(bytes: &[u8]) -> Result<Decode, FrameError> {
    let (count, mut at) = match short_number(bytes) {
        Some((count, len)) => (count, len),
        None => match number(&bytes[1..]) {
            Number::Is(count @ ..=ARGS_MAX, len) => (count.max(0) as usize, 1 + len),
            Number::Unfinished => return Ok(Decode::More(1)),
            _ => return Err(FrameError::Malformed("invalid multibulk length")),
        },
    };
    for left in (0..count).rev() {
        let rest = bytes.get(at..).unwrap_or_default();
        let (len, header) = match short_number(rest) {
            Some(found) if rest[0] == b'$' => found,
            _ => match header(rest)? {
                Some(found) => found,
                None => return Ok(more(bytes, 1, left)),
            },
        };
        at += header + len + 2;
        if at > bytes.len() {
            return Ok(more(bytes, at - bytes.len(), left));
        }
    }
    Ok(Decode::Frame { skip: 0, len: at, consumed: at })
}

/// The length of an argument, and that of the line that tells it; `None` if the line is not whole.
#[cold]
fn header(rest: &[u8]) -> Result<Option<(usize, usize)>, FrameError> {
    match rest.split_first() {
        None => Ok(None),
        Some((b'$', line)) => match number(line) {
            Number::Is(len @ 0..=ARG_BYTES_MAX, header) => Ok(Some((len as usize, 1 + header))),
            Number::Unfinished => Ok(None),
            _ => Err(FrameError::Malformed("invalid bulk length")),
        },
        Some((other, _)) => Err(FrameError::Malformed(expected_dollar(*other))),
    }
}

/// `missing` bytes are needed to judge further, and then `left` arguments.
#[cold]
fn more(bytes: &[u8], missing: usize, left: usize) -> Decode {
    let patience = if bytes.len() < PATIENT_FROM_BYTES { 0 } else { bytes.len() / GROWTH };
    Decode::More(missing + patience.min(left * ARG_BYTES_MIN))
}

/// The number in a line of one or two digits behind its first byte, and the length of that line: nearly all that there
/// are.
#[inline(always)]
fn short_number(line: &[u8]) -> Option<(usize, usize)> {
    let digit = |byte: u8| byte.wrapping_sub(b'0');
    match line {
        [_, ones, b'\r', _, ..] if digit(*ones) < 10 => Some((usize::from(digit(*ones)), 4)),
        [_, tens, ones, b'\r', _, ..] if digit(*tens).wrapping_sub(1) < 9 && digit(*ones) < 10 => {
            Some((usize::from(digit(*tens) * 10 + digit(*ones)), 5))
        }
        _ => None,
    }
}

/// A number in a line.
enum Number {
    /// Its value, and the length of the line with its end.
    Is(i64, usize),
    /// So far it is one.
    Unfinished,
    Bad,
}

/// Reads a number and its line end. A byte that has no place in a number is refused as soon as it is seen, so nothing is
/// ever searched for.
fn number(line: &[u8]) -> Number {
    let end = line.iter().skip(1).position(|byte| !byte.is_ascii_digit()).map(|found| found + 1);
    match end {
        Some(end) if line[end] == b'\r' => match number::parse(&line[..end]) {
            Some(_) if line.len() == end + 1 => Number::Unfinished,
            Some(value) => Number::Is(value, end + 2),
            None => Number::Bad,
        },
        None if line.is_empty() || line == b"-" || number::parse(line).is_some() => Number::Unfinished,
        _ => Number::Bad,
    }
}

fn line(bytes: &[u8], scanned: usize) -> Result<Decode, FrameError> {
    let found = bytes[scanned..].iter().position(|byte| *byte == b'\n').map(|found| scanned + found);
    let end = match found {
        Some(end) if end <= LINE_BYTES_MAX => end,
        None if bytes.len() <= LINE_BYTES_MAX => return Ok(Decode::More(1)),
        _ => return Err(FrameError::Malformed("too big inline request")),
    };
    if !inline::is_balanced(&bytes[..end]) {
        return Err(FrameError::Malformed("unbalanced quotes in request"));
    }
    Ok(Decode::Frame { skip: 0, len: end, consumed: end + 1 })
}

/// `expected '$', got 'x'` for each `x`, since an error carries a text that was there before.
static EXPECTED_DOLLAR: [[u8; 21]; 128] = {
    let mut all = [*b"expected '$', got ' '"; 128];
    let mut byte = 0;
    while byte < 128 {
        // A line break would end the reply early; Redis puts a space there too.
        if byte != b'\r' as usize && byte != b'\n' as usize {
            all[byte][19] = byte as u8;
        }
        byte += 1;
    }
    all
};

fn expected_dollar(got: u8) -> &'static str {
    let text = EXPECTED_DOLLAR.get(usize::from(got)).and_then(|text| std::str::from_utf8(text).ok());
    text.unwrap_or("expected '$', got a byte above 127")
}

/// The arguments of a request in array form that [`Resp`] found whole.
#[derive(Clone, Debug)]
pub struct Args<'a> {
    rest: &'a [u8],
    left: usize,
}

impl<'a> Args<'a> {
    /// The arguments of `request`; none if it is empty.
    #[inline]
    pub fn of(request: &'a [u8]) -> Args<'a> {
        let (left, header) = match short_number(request) {
            Some(found) => found,
            None => long_count(request),
        };
        Args { rest: request.get(header..).unwrap_or_default(), left }
    }

    /// The bytes from the next argument on, as far as they are known: for those who read more than they need at once.
    #[inline]
    pub fn next_with_rest(&mut self) -> Option<(&'a [u8], &'a [u8])> {
        let (len, header) = match short_number(self.rest) {
            Some(found) => found,
            None => long_header(self.rest)?,
        };
        let rest = self.rest.get(header..)?;
        let (arg, behind) = rest.split_at_checked(len)?;
        self.rest = behind.get(2..)?;
        self.left = self.left.checked_sub(1)?;
        Some((arg, rest))
    }
}

#[cold]
fn long_count(request: &[u8]) -> (usize, usize) {
    match number(request.get(1..).unwrap_or_default()) {
        Number::Is(count @ 1.., len) => (count as usize, 1 + len),
        _ => (0, 0),
    }
}

#[cold]
fn long_header(rest: &[u8]) -> Option<(usize, usize)> {
    header(rest).ok()?
}

impl<'a> Iterator for Args<'a> {
    type Item = &'a [u8];

    #[inline]
    fn next(&mut self) -> Option<&'a [u8]> {
        self.next_with_rest().map(|(arg, _)| arg)
    }

    #[inline]
    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Args<'_> {}

/// Writes a request in array form.
pub fn request<'a>(args: impl ExactSizeIterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut out = Vec::new();
    let line = |kind: u8, number: usize, out: &mut Vec<u8>| {
        out.push(kind);
        out.extend_from_slice(Digits::of(number as i64).bytes());
        out.extend_from_slice(b"\r\n");
    };
    line(b'*', args.len(), &mut out);
    for arg in args {
        line(b'$', arg.len(), &mut out);
        out.extend_from_slice(arg);
        out.extend_from_slice(b"\r\n");
    }
    out
}

/// The request of a line in array form; one without arguments if the line is blank.
pub fn request_of_line(line: &[u8]) -> Vec<u8> {
    request(inline::words(line).iter().map(Vec::as_slice))
}

#[cfg(test)]
#[path = "resp_tests.rs"]
mod tests;
