//! Requests: their ends, and the places of their arguments.

use std::borrow::Cow;
use std::rc::Rc;

use ringserve_server::framing::{
    Cut, EncodeError, Encoding, FrameError, Framing, Outbox, Payload, Raw, TypedFraming,
};
use ringserve_server::limits::LimitError;
use ringserve_server::{Frame, Limits};
use smallvec::SmallVec;

use crate::{FrameFields, Span};

/// The most arguments of one request, as in Redis until 7.
const ARGS_MAX: usize = 1 << 20;
/// The most bytes of a line, as `PROTO_INLINE_MAX_SIZE` of Redis.
const LINE_BYTES_MAX: usize = 64 << 10;
/// Bytes of the shortest argument, `$0\r\n\r\n`.
const ARG_BYTES_MIN: usize = 6;
/// From this size on a request that lacks many arguments is walked again only when it has grown by
/// a part of [`GROWTH`]: a request that trickles in is walked about 16 times its length, and not
/// the square of it.
const PATIENT_FROM_BYTES: usize = 1024;
const GROWTH: usize = 16;

const BAD_COUNT: &str = "invalid multibulk length";
const BAD_LENGTH: &str = "invalid bulk length";

/// The reason why bytes are no request.
type Bad = Cow<'static, str>;

/// The framing of requests: arrays of strings, and lines of words with quotes as in a shell. Each
/// comes with a [`Request`]. Replies leave as they are written, so a service writes them with a
/// [`Writer`](super::Writer).
///
/// Bytes that are no request are handed over too, as a request with an [`error`](Request::error):
/// Redis answers all earlier requests, says the reason, and closes.
///
/// A request has at most 1 048 576 arguments, a line at most 64 KiB. In addition to its bytes, a
/// request of more than four arguments takes 8 bytes an argument; a line takes its bytes twice.
/// Both are freed at the end of its call.
#[derive(Clone, Copy, Debug)]
pub struct Resp {
    request_bytes_max: usize,
}

impl Resp {
    /// Makes the framing with at most `request_bytes_max` bytes in a request, 1 KiB to 4 GiB - 1
    /// and not above [`Limits::frame_bytes_max`]. A request that announces more is none.
    pub fn new(request_bytes_max: usize) -> Resp {
        Resp { request_bytes_max }
    }
}

/// The places of a request's arguments: in its frame, or in a copy of its words if it is a line. An
/// empty request, to which Redis does not reply, has no argument.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    spans: SmallVec<[Span; 4]>,
    /// One word, since a request is moved a few times on its way to the service.
    rare: Option<Box<Rare>>,
}

/// Parts that few requests have.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Rare {
    /// A copy of the words of a line.
    Words(Box<[u8]>),
    Error(Bad),
}

impl Request {
    /// The arguments, the name of the command first. `frame` is the frame of this request.
    #[inline]
    pub fn args<'a>(&'a self, frame: &'a Frame) -> FrameFields<'a> {
        match self.rare.as_deref() {
            Some(Rare::Words(words)) => FrameFields::new(words, &self.spans),
            _ => FrameFields::of_frame(frame, &self.spans),
        }
    }

    /// The reason why the bytes are no request, in the words of Redis. Nothing behind them can be
    /// read: reply, and close.
    #[inline]
    pub fn error(&self) -> Option<&str> {
        match self.rare.as_deref() {
            Some(Rare::Error(error)) => Some(error),
            _ => None,
        }
    }
}

impl TypedFraming for Resp {
    type State = ();
    type Head = Request;

    #[inline]
    fn cut(&self, _: &mut (), bytes: &[u8], scanned: usize) -> Result<Cut<Request>, FrameError> {
        let mut spans = SmallVec::new();
        let end = match bytes.first() {
            Some(b'*') => array(bytes, self.request_bytes_max, &mut spans),
            Some(_) => return Ok(line(bytes, scanned).unwrap_or_else(|bad| refused(bytes, bad))),
            None => Ok(End::Missing(1)),
        };
        Ok(match end {
            Ok(End::At(at)) => {
                Cut::Frame { skip: 0, len: at, consumed: at, head: Request { spans, rare: None } }
            }
            Ok(End::Missing(bytes)) => Cut::More(bytes),
            Err(bad) => refused(bytes, bad),
        })
    }

    fn write(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        Raw.encode(payload, out)
    }

    fn check_limits(&self, limits: &Limits) -> Result<(), LimitError> {
        let (name, value, max) =
            ("Resp::request_bytes_max", self.request_bytes_max as u64, limits.frame_bytes_max as u64);
        if !(1024..=u64::from(u32::MAX)).contains(&value) {
            return Err(LimitError::Range { name, value, min: 1024, max: u64::from(u32::MAX) });
        }
        if value > max {
            let (small, small_value, large, large_value) = (name, value, "Limits::frame_bytes_max", max);
            return Err(LimitError::Order { small, small_value, large, large_value });
        }
        Ok(())
    }

    fn reply_encoding(self: &Rc<Self>) -> Encoding {
        Encoding::of(&Raw)
    }
}

/// The end of a request.
enum End {
    At(usize),
    /// At least as many bytes are missing.
    Missing(usize),
}

/// All of it is handed over as a request that is none.
#[cold]
fn refused(bytes: &[u8], bad: Bad) -> Cut<Request> {
    let rare = Some(Box::new(Rare::Error(bad)));
    Cut::Frame { skip: 0, len: 0, consumed: bytes.len(), head: Request { rare, ..Request::default() } }
}

/// Walks over the arguments, and notes their places. Like Redis it takes any two bytes for the
/// `\r\n` behind an argument, and a negative count for none.
#[inline]
fn array(bytes: &[u8], max: usize, spans: &mut SmallVec<[Span; 4]>) -> Result<End, Bad> {
    // The bytes that are missing to judge further, and the number of arguments that follow.
    let more = |missing, left: usize| {
        let patience = if bytes.len() < PATIENT_FROM_BYTES { 0 } else { bytes.len() / GROWTH };
        Ok(End::Missing(missing + patience.min(left * ARG_BYTES_MIN)))
    };
    let sign = usize::from(bytes.get(1) == Some(&b'-'));
    let Some((count, header)) = length(&bytes[sign..], ARGS_MAX, BAD_COUNT)? else { return more(1, 0) };
    let mut at = sign + header;
    for left in (0..if sign == 0 { count } else { 0 }).rev() {
        let rest = bytes.get(at..).unwrap_or_default();
        let found = match rest.first() {
            Some(b'$') => length(rest, max, BAD_LENGTH)?,
            Some(other) => return Err(format!("expected '$', got '{}'", char::from(*other)).into()),
            None => None,
        };
        let Some((len, header)) = found else { return more(1, left) };
        spans.push(((at + header) as u32, (at + header + len) as u32));
        at += header + len + 2;
        if at > max {
            return Err(BAD_LENGTH.into());
        }
        if at > bytes.len() {
            return more(at - bytes.len(), left);
        }
    }
    Ok(End::At(at))
}

/// The number in a line behind its first byte, and the length of that line; `None` if it is not
/// whole. A byte that has no place in a number is refused as soon as it is seen.
#[inline]
pub(super) fn length(line: &[u8], max: usize, refused: &'static str) -> Result<Option<(usize, usize)>, Bad> {
    let digit = |byte: u8| usize::from(byte - b'0');
    // As most are: one digit or two.
    match *line {
        [_, one @ b'0'..=b'9', b'\r', _, ..] if digit(one) <= max => Ok(Some((digit(one), 4))),
        [_, ten @ b'1'..=b'9', one @ b'0'..=b'9', b'\r', _, ..] if 10 * digit(ten) + digit(one) <= max => {
            Ok(Some((10 * digit(ten) + digit(one), 5)))
        }
        _ => long_length(line, max, refused),
    }
}

/// The same for any number.
#[inline(never)]
pub(super) fn long_length(
    line: &[u8],
    max: usize,
    refused: &'static str,
) -> Result<Option<(usize, usize)>, Bad> {
    let mut value = 0;
    for (at, byte) in line.iter().enumerate().skip(1) {
        match byte {
            b'0'..=b'9' if value > 0 || at == 1 => value = 10 * value + usize::from(byte - b'0'),
            b'\r' if at > 1 => return Ok((at + 1 < line.len()).then_some((value, at + 2))),
            _ => return Err(refused.into()),
        }
        if value > max {
            return Err(refused.into());
        }
    }
    Ok(None)
}

fn line(bytes: &[u8], scanned: usize) -> Result<Cut<Request>, Bad> {
    match bytes[scanned..].iter().position(|byte| *byte == b'\n').map(|found| scanned + found) {
        Some(end) if end <= LINE_BYTES_MAX => {
            let head = words(&bytes[..end]).ok_or("unbalanced quotes in request")?;
            Ok(Cut::Frame { skip: 0, len: end, consumed: end + 1, head })
        }
        None if bytes.len() <= LINE_BYTES_MAX => Ok(Cut::More(1)),
        _ => Err("too big inline request".into()),
    }
}

/// The words of a line, with quotes as in a shell. `None` if a quote is not closed, or a word goes
/// on right behind it.
pub(super) fn words(line: &[u8]) -> Option<Request> {
    let (mut words, mut spans, mut bytes) = (Vec::new(), SmallVec::new(), line.iter().copied().peekable());
    loop {
        while bytes.next_if(u8::is_ascii_whitespace).is_some() {}
        if bytes.peek().is_none() {
            return Some(Request { spans, rare: Some(Box::new(Rare::Words(words.into()))) });
        }
        let start = words.len() as u32;
        while let Some(quote) = bytes.next_if(|byte| !byte.is_ascii_whitespace()) {
            if quote != b'"' && quote != b'\'' {
                words.push(quote);
                continue;
            }
            loop {
                match bytes.next()? {
                    byte if byte == quote => break,
                    b'\\' if quote == b'"' => words.push(escaped(&mut bytes)?),
                    b'\\' if bytes.next_if_eq(&quote).is_some() => words.push(quote),
                    byte => words.push(byte),
                }
            }
            if bytes.peek().is_some_and(|byte| !byte.is_ascii_whitespace()) {
                return None;
            }
        }
        spans.push((start, words.len() as u32));
    }
}

/// The byte behind a backslash: `\x41` is an A, `\n` a line feed, and most bytes are themselves.
fn escaped(bytes: &mut (impl Iterator<Item = u8> + Clone)) -> Option<u8> {
    let escape = bytes.next()?;
    let mut ahead = bytes.clone();
    let mut hex = || ahead.next().and_then(|digit| char::from(digit).to_digit(16));
    if let (b'x', Some(high), Some(low)) = (escape, hex(), hex()) {
        *bytes = ahead;
        return Some((high << 4 | low) as u8);
    }
    let special = b"nrtba".iter().position(|special| *special == escape);
    Some(special.map_or(escape, |n| b"\n\r\t\x08\x07"[n]))
}
