//! The wire, which no other module knows: requests in, replies out, numbers as text.
//!
//! ```text
//!   *2\r\n $3\r\nGET\r\n $3\r\nkey\r\n      an array of strings, as every client library sends
//!   GET key\r\n                             a line, as typed by hand
//! ```

use std::borrow::Cow;
use std::rc::Rc;

use bytes::BufMut;
use ringserve::framing::{
    Cut, EncodeError, Encoding, FrameError, Framing, Outbox, Payload, Raw, TypedFraming,
};
use ringserve::{Frame, ReplyWriter};
use smallvec::SmallVec;

use crate::store::Value;

/// Arguments of one request at most, as in Redis until 7.
const ARGS_MAX: i64 = 1 << 20;
/// Bytes of one argument at most, as `proto-max-bulk-len` of Redis. Usually `Limits::frame_bytes_max` bounds it first.
const ARG_BYTES_MAX: i64 = 512 << 20;
/// Bytes of a line at most, as `PROTO_INLINE_MAX_SIZE` of Redis.
const LINE_BYTES_MAX: usize = 64 << 10;
/// Bytes of the shortest argument, `$0\r\n\r\n`.
const ARG_BYTES_MIN: usize = 6;
/// From this size on a request that lacks many arguments is walked again only when it has grown by a part of [`GROWTH`]: so one
/// that trickles in is walked about 16 times its length, and not the square of it.
const PATIENT_FROM_BYTES: usize = 1024;
const GROWTH: usize = 16;

const BAD_COUNT: &str = "invalid multibulk length";
const BAD_LENGTH: &str = "invalid bulk length";

/// Where an argument begins and ends.
pub type Span = (u32, u32);

/// Requests of the Redis protocol, and where their arguments lie. Replies are written as they leave.
#[derive(Clone, Copy, Debug)]
pub struct Resp {
    pub request_bytes_max: usize,
}

/// Where the arguments of a request lie: in its frame, or in a copy of its words where it is a line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Head {
    spans: SmallVec<[Span; 4]>,
    words: Option<Box<[u8]>>,
    /// What follows is no request, for this reason. It is told behind the replies to those before.
    pub bad: Option<Cow<'static, str>>,
}

impl Head {
    #[inline]
    pub fn args<'a>(&'a self, frame: &'a Frame) -> Args<'a> {
        match &self.words {
            None => Args { bytes: frame, spans: &self.spans, frame: Some(frame) },
            Some(words) => Args { bytes: words, spans: &self.spans, frame: None },
        }
    }
}

/// The arguments of a request, its name among them.
#[derive(Clone, Copy)]
pub struct Args<'a> {
    pub bytes: &'a [u8],
    pub spans: &'a [Span],
    /// The frame whose bytes these are.
    pub frame: Option<&'a Frame>,
}

impl<'a> Args<'a> {
    /// One of them, empty if it is not there.
    #[inline]
    pub fn get(&self, n: usize) -> &'a [u8] {
        let (from, to) = self.spans.get(n).copied().unwrap_or_default();
        &self.bytes[from as usize..to as usize]
    }

    /// Those from one on.
    pub fn from(&self, n: usize) -> impl ExactSizeIterator<Item = &'a [u8]> + use<'a> {
        let bytes = self.bytes;
        self.spans[n.min(self.spans.len())..]
            .iter()
            .map(move |(from, to)| &bytes[*from as usize..*to as usize])
    }
}

impl TypedFraming for Resp {
    type State = ();
    type Head = Head;

    #[inline]
    fn cut(&self, _: &mut (), bytes: &[u8], scanned: usize) -> Result<Cut<Head>, FrameError> {
        let found = match bytes.first() {
            Some(b'*') => array(bytes, self.request_bytes_max),
            Some(_) => line(bytes, scanned),
            None => Ok(Cut::More(1)),
        };
        Ok(found.unwrap_or_else(|bad| {
            let head = Head { bad: Some(bad), ..Head::default() };
            Cut::Frame { skip: 0, len: 0, consumed: bytes.len(), head }
        }))
    }

    fn write(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        Raw.encode(payload, out)
    }

    fn reply_encoding(self: &Rc<Self>) -> Encoding {
        Encoding::of(&Raw)
    }
}

/// Walks over the arguments. Like Redis it takes any two bytes for the `\r\n` behind one.
#[inline]
fn array(bytes: &[u8], max: usize) -> Result<Cut<Head>, Cow<'static, str>> {
    let (count, mut at) = match short(bytes) {
        Some(found) => found,
        None => match length(&bytes[1..], BAD_COUNT)? {
            Some((count @ ..=ARGS_MAX, len)) => (count.max(0) as usize, 1 + len),
            Some(_) => return Err(BAD_COUNT.into()),
            None => return Ok(Cut::More(1)),
        },
    };
    let mut spans = SmallVec::new();
    for left in (0..count).rev() {
        let rest = bytes.get(at..).unwrap_or_default();
        let (len, header) = match short(rest) {
            Some(found) if rest[0] == b'$' => found,
            _ => match header(rest)? {
                Some(found) => found,
                None => return Ok(more(bytes, 1, left)),
            },
        };
        spans.push(((at + header) as u32, (at + header + len) as u32));
        at += header + len + 2;
        if at > max {
            return Err(BAD_LENGTH.into());
        }
        if at > bytes.len() {
            return Ok(more(bytes, at - bytes.len(), left));
        }
    }
    Ok(Cut::Frame { skip: 0, len: at, consumed: at, head: Head { spans, ..Head::default() } })
}

/// The length of an argument, and that of the line that tells it; `None` if the line is not whole.
#[cold]
fn header(rest: &[u8]) -> Result<Option<(usize, usize)>, Cow<'static, str>> {
    match rest.split_first() {
        Some((b'$', line)) => match length(line, BAD_LENGTH)? {
            Some((len @ 0..=ARG_BYTES_MAX, header)) => Ok(Some((len as usize, 1 + header))),
            Some(_) => Err(BAD_LENGTH.into()),
            None => Ok(None),
        },
        Some((other, _)) => Err(format!("expected '$', got '{}'", char::from(*other)).into()),
        None => Ok(None),
    }
}

/// `missing` bytes are needed to judge further, and then `left` arguments.
#[cold]
fn more(bytes: &[u8], missing: usize, left: usize) -> Cut<Head> {
    let patience = if bytes.len() < PATIENT_FROM_BYTES { 0 } else { bytes.len() / GROWTH };
    Cut::More(missing + patience.min(left * ARG_BYTES_MIN))
}

/// The number in a line of one or two digits behind its first byte, and the length of that line: nearly all that there are.
#[inline(always)]
fn short(line: &[u8]) -> Option<(usize, usize)> {
    let digit = |byte: u8| byte.wrapping_sub(b'0');
    match line {
        [_, ones, b'\r', _, ..] if digit(*ones) < 10 => Some((usize::from(digit(*ones)), 4)),
        [_, tens, ones, b'\r', _, ..] if digit(*tens).wrapping_sub(1) < 9 && digit(*ones) < 10 => {
            Some((usize::from(digit(*tens) * 10 + digit(*ones)), 5))
        }
        _ => None,
    }
}

/// The number in a line, and the length of that with its end; `None` if it may still become one. A byte that has no place in a number
/// is refused as soon as it is seen.
fn length(line: &[u8], refused: &'static str) -> Result<Option<(i64, usize)>, Cow<'static, str>> {
    match line.iter().skip(1).position(|byte| !byte.is_ascii_digit()).map(|found| found + 1) {
        Some(end) if line[end] == b'\r' => match number(&line[..end]) {
            Some(value) => Ok((line.len() > end + 1).then_some((value, end + 2))),
            None => Err(refused.into()),
        },
        None if line.is_empty() || line == b"-" || number(line).is_some() => Ok(None),
        _ => Err(refused.into()),
    }
}

fn line(bytes: &[u8], scanned: usize) -> Result<Cut<Head>, Cow<'static, str>> {
    match bytes[scanned..].iter().position(|byte| *byte == b'\n').map(|found| scanned + found) {
        Some(end) if end <= LINE_BYTES_MAX => {
            let head = words(&bytes[..end]).ok_or("unbalanced quotes in request")?;
            Ok(Cut::Frame { skip: 0, len: end, consumed: end + 1, head })
        }
        None if bytes.len() <= LINE_BYTES_MAX => Ok(Cut::More(1)),
        _ => Err("too big inline request".into()),
    }
}

/// The words of a line, with quotes as in a shell. `None` if a quote is not closed, or a word goes on right behind it.
fn words(mut line: &[u8]) -> Option<Head> {
    let (mut words, mut spans) = (Vec::new(), SmallVec::new());
    while let [_, ..] = line.trim_ascii_start() {
        line = line.trim_ascii_start();
        let start = words.len() as u32;
        while let Some((byte, rest)) = line.split_first().filter(|(byte, _)| !byte.is_ascii_whitespace()) {
            line = rest;
            if let b'"' | b'\'' = byte {
                line = quoted(rest, *byte, &mut words)?;
                if line.first().is_some_and(|byte| !byte.is_ascii_whitespace()) {
                    return None;
                }
            } else {
                words.push(*byte);
            }
        }
        spans.push((start, words.len() as u32));
    }
    Some(Head { spans, words: Some(words.into()), bad: None })
}

/// What is behind the quote that closes this one.
fn quoted<'a>(mut line: &'a [u8], quote: u8, word: &mut Vec<u8>) -> Option<&'a [u8]> {
    let hex = |digit: &u8| (*digit as char).to_digit(16);
    loop {
        let (byte, rest) = match line {
            [b'\\', b'x', high, low, rest @ ..]
                if quote == b'"' && hex(high).is_some() && hex(low).is_some() =>
            {
                ((hex(high)? << 4 | hex(low)?) as u8, rest)
            }
            [b'\\', escaped, rest @ ..] if quote == b'"' => {
                let special = b"nrtba".iter().position(|special| special == escaped);
                (special.map_or(*escaped, |n| b"\n\r\t\x08\x07"[n]), rest)
            }
            [b'\\', b'\'', rest @ ..] if quote == b'\'' => (b'\'', rest),
            [byte, rest @ ..] if *byte == quote => return Some(rest),
            [byte, rest @ ..] => (*byte, rest),
            [] => return None,
        };
        word.push(byte);
        line = rest;
    }
}

/// Reads a number the way Redis does: only as it would be written.
pub fn number(text: &[u8]) -> Option<i64> {
    let value = std::str::from_utf8(text).ok()?.parse().ok()?;
    (digits(value).as_slice() == text).then_some(value)
}

/// A number as text.
pub fn digits(value: i64) -> SmallVec<[u8; 24]> {
    itoa::Buffer::new().format(value).as_bytes().into()
}

/// A number with a fraction as text: as short as tells it from others, and without an exponent.
pub fn decimal(value: f64) -> String {
    // There is no negative zero.
    (value + 0.0).to_string()
}

/// Reads one, which may be infinite.
pub fn float(text: &[u8]) -> Option<f64> {
    std::str::from_utf8(text).ok()?.parse().ok().filter(|value: &f64| !value.is_nan())
}

/// A reply, or a part of one.
pub enum Part<'a> {
    Ok,
    Null,
    NullArray,
    Int(i64),
    Bytes(&'a [u8]),
    Text(String),
    /// What a key holds, or held.
    Value(&'a Value),
    Old(Value),
    Word(&'static str),
    Error(String),
    /// The start of that many elements in order, without an order, of pairs, and of a message that no request asked for.
    Array(usize),
    Set(usize),
    Push(usize),
    /// Elements, with their start.
    List(Vec<Part<'a>>),
    Pairs(Vec<(&'static str, Part<'a>)>),
}

/// Where a reply goes: to a client of this shard, or to another shard.
pub trait Out: BufMut {
    fn put_frame(&mut self, frame: &Frame);

    /// Writes it, in the third version of the protocol or the second one.
    #[inline]
    fn part(&mut self, part: Part<'_>, resp3: bool)
    where
        Self: Sized,
    {
        match part {
            Part::Ok => self.put_slice(b"+OK\r\n"),
            Part::Null => self.put_slice(if resp3 { b"_\r\n" } else { b"$-1\r\n" }),
            Part::Int(value) => line_of(self, b':', value),
            Part::Bytes(bytes) => string(self, bytes),
            Part::Value(Value::Own(bytes)) => string(self, bytes),
            other => rare(self, other, resp3),
        }
    }
}

fn line_of(out: &mut impl Out, kind: u8, number: i64) {
    out.put_u8(kind);
    out.put_slice(itoa::Buffer::new().format(number).as_bytes());
    out.put_slice(b"\r\n");
}

fn string(out: &mut impl Out, bytes: &[u8]) {
    line_of(out, b'$', bytes.len() as i64);
    out.put_slice(bytes);
    out.put_slice(b"\r\n");
}

fn rare(out: &mut impl Out, part: Part<'_>, resp3: bool) {
    let mut start = |three, two, len: usize| line_of(out, if resp3 { three } else { two }, len as i64);
    match part {
        Part::Array(len) => start(b'*', b'*', len),
        Part::Set(len) => start(b'~', b'*', len),
        Part::Push(len) => start(b'>', b'*', len),
        Part::List(parts) => {
            start(b'*', b'*', parts.len());
            parts.into_iter().for_each(|part| out.part(part, resp3));
        }
        Part::Pairs(pairs) => {
            start(b'%', b'*', if resp3 { pairs.len() } else { 2 * pairs.len() });
            for (name, part) in pairs {
                string(out, name.as_bytes());
                out.part(part, resp3);
            }
        }
        Part::NullArray => out.put_slice(if resp3 { b"_\r\n" } else { b"*-1\r\n" }),
        Part::Value(Value::Kept(frame)) => {
            line_of(out, b'$', frame.len() as i64);
            out.put_frame(frame);
            out.put_slice(b"\r\n");
        }
        Part::Old(value) => out.part(Part::Value(&value), resp3),
        Part::Text(text) if resp3 => {
            line_of(out, b'=', text.len() as i64 + 4);
            out.put_slice(b"txt:");
            out.put_slice(text.as_bytes());
            out.put_slice(b"\r\n");
        }
        Part::Text(text) => string(out, text.as_bytes()),
        Part::Word(word) => {
            [b"+", word.as_bytes(), b"\r\n"].into_iter().for_each(|piece| out.put_slice(piece))
        }
        // It stays one line, whatever the client sent.
        Part::Error(text) => {
            out.put_slice(b"-");
            out.put_slice(text.replace(['\r', '\n'], " ").as_bytes());
            out.put_slice(b"\r\n");
        }
        common => out.part(common, resp3),
    }
}

/// Without a copy of what is kept.
impl Out for ReplyWriter<'_> {
    fn put_frame(&mut self, frame: &Frame) {
        self.lend(frame.clone().into_lease());
    }
}

impl Out for Vec<u8> {
    fn put_frame(&mut self, frame: &Frame) {
        self.extend_from_slice(frame);
    }
}

#[cfg(test)]
#[path = "tests/resp.rs"]
mod tests;
