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

/// Arguments of one request at most, as in Redis until 7.
const ARGS_MAX: usize = 1 << 20;
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

/// What a client is told of a request that fails.
pub type Bad = Cow<'static, str>;

/// A reply was written, or the error that is one is to be.
pub type Done = Result<(), Bad>;

/// Requests of the Redis protocol, and where their arguments lie.
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
    pub bad: Option<Bad>,
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
    pub fn len(&self) -> usize {
        self.spans.len()
    }

    /// One of them, empty if it is not there.
    #[inline]
    pub fn get(&self, n: usize) -> &'a [u8] {
        let (from, to) = self.spans.get(n).copied().unwrap_or_default();
        &self.bytes[from as usize..to as usize]
    }

    /// Those from one on.
    pub fn from(self, n: usize) -> impl ExactSizeIterator<Item = &'a [u8]> {
        (n.min(self.len())..self.len()).map(move |n| self.get(n))
    }

    /// One of them in small letters, to be told or compared.
    pub fn word(&self, n: usize) -> String {
        String::from_utf8_lossy(self.get(n)).to_ascii_lowercase()
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

/// Walks over the arguments. Like Redis it takes any two bytes for the `\r\n` behind one, and a negative count for none.
#[inline]
fn array(bytes: &[u8], max: usize) -> Result<Cut<Head>, Bad> {
    // What is missing to judge further, and how many arguments come then.
    let more = |missing, left: usize| {
        let patience = if bytes.len() < PATIENT_FROM_BYTES { 0 } else { bytes.len() / GROWTH };
        Ok(Cut::More(missing + patience.min(left * ARG_BYTES_MIN)))
    };
    let sign = usize::from(bytes.get(1) == Some(&b'-'));
    let Some((count, header)) = length(&bytes[sign..], ARGS_MAX, BAD_COUNT)? else { return more(1, 0) };
    let (mut at, mut spans) = (sign + header, SmallVec::new());
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
    Ok(Cut::Frame { skip: 0, len: at, consumed: at, head: Head { spans, ..Head::default() } })
}

/// The number in a line behind its first byte, and the bytes of that line; `None` if it is not whole. A byte that has no place in a
/// number is refused as soon as it is seen.
#[inline]
fn length(line: &[u8], max: usize, refused: &'static str) -> Result<Option<(usize, usize)>, Bad> {
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

fn line(bytes: &[u8], scanned: usize) -> Result<Cut<Head>, Bad> {
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
fn words(line: &[u8]) -> Option<Head> {
    let (mut words, mut spans, mut bytes) = (Vec::new(), SmallVec::new(), line.iter().copied().peekable());
    loop {
        while bytes.next_if(u8::is_ascii_whitespace).is_some() {}
        if bytes.peek().is_none() {
            return Some(Head { spans, words: Some(words.into()), bad: None });
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

/// What stands behind a backslash: `\x41` is an A, `\n` a line feed, and most bytes are themselves.
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

/// Reads a number the way Redis does: only as it would be written.
pub fn number(text: &[u8]) -> Option<i64> {
    let value = std::str::from_utf8(text).ok()?.parse().ok()?;
    (itoa::Buffer::new().format(value).as_bytes() == text).then_some(value)
}

/// Where a reply goes.
pub enum To<'a, 'b> {
    /// To a client of this shard.
    Peer(&'a mut ReplyWriter<'b>),
    /// To another shard, or to several clients.
    Text(&'a mut Vec<u8>),
}

/// Writes a reply, in the second version of the protocol or the third one.
pub struct Out<'a, 'b> {
    pub to: To<'a, 'b>,
    pub resp3: bool,
}

impl<'a, 'b> Out<'a, 'b> {
    pub fn text(to: &'a mut Vec<u8>, resp3: bool) -> Out<'a, 'b> {
        Out { to: To::Text(to), resp3 }
    }

    #[inline]
    fn put(&mut self, bytes: &[u8]) {
        match &mut self.to {
            To::Peer(to) => to.put_slice(bytes),
            To::Text(to) => to.extend_from_slice(bytes),
        }
    }

    #[inline]
    fn line(&mut self, kind: &[u8], text: &[u8]) -> Done {
        [kind, text, b"\r\n"].into_iter().for_each(|piece| self.put(piece));
        Ok(())
    }

    #[inline]
    fn count(&mut self, kind: &[u8], count: usize) -> Done {
        self.line(kind, itoa::Buffer::new().format(count).as_bytes())
    }

    pub fn ok(&mut self) -> Done {
        self.word("OK")
    }

    pub fn word(&mut self, word: &str) -> Done {
        self.line(b"+", word.as_bytes())
    }

    /// It stays one line, whatever the client sent.
    pub fn error(&mut self, text: &str) -> Done {
        self.line(b"-", text.replace(['\r', '\n'], " ").as_bytes())
    }

    pub fn int(&mut self, value: i64) -> Done {
        self.line(b":", itoa::Buffer::new().format(value).as_bytes())
    }

    pub fn null(&mut self) -> Done {
        if self.resp3 { self.line(b"_", b"") } else { self.line(b"$", b"-1") }
    }

    #[inline]
    pub fn bytes(&mut self, bytes: &[u8]) -> Done {
        self.count(b"$", bytes.len())?;
        self.line(bytes, b"")
    }

    /// A number as a string.
    pub fn digits(&mut self, value: usize) -> Done {
        self.bytes(itoa::Buffer::new().format(value).as_bytes())
    }

    /// As [`bytes`](Out::bytes), without a copy if it goes to a client.
    pub fn frame(&mut self, frame: &Frame) -> Done {
        self.count(b"$", frame.len())?;
        match &mut self.to {
            To::Peer(to) => to.lend(frame.clone().into_lease()),
            To::Text(to) => to.extend_from_slice(frame),
        }
        self.line(b"", b"")
    }

    /// The start of that many elements.
    pub fn array(&mut self, len: usize) -> Done {
        self.count(b"*", len)
    }

    /// The start of that many pairs.
    pub fn map(&mut self, len: usize) -> Done {
        if self.resp3 { self.count(b"%", len) } else { self.count(b"*", 2 * len) }
    }

    /// The start of a message of that many elements which no request asked for.
    pub fn push(&mut self, len: usize) -> Done {
        self.count(if self.resp3 { b">" } else { b"*" }, len)
    }
}

/// One reply made of several: the sum of numbers, an array of all elements, `OK`, or the first error.
#[derive(Default)]
pub struct Merged {
    kind: u8,
    sum: i64,
    text: Vec<u8>,
}

impl Merged {
    pub fn add(&mut self, reply: &[u8]) {
        let end = reply.iter().position(|byte| *byte == b'\r').unwrap_or(reply.len());
        match reply.first() {
            _ if self.kind == b'-' => {}
            Some(kind @ (b':' | b'*')) => {
                self.kind = *kind;
                self.sum += number(&reply[1..end]).unwrap_or_default();
                self.text.extend_from_slice(&reply[end + 2..]);
            }
            kind => (self.kind, self.text) = (kind.copied().unwrap_or_default(), reply.to_vec()),
        }
    }

    pub fn write(&self, to: &mut Vec<u8>) -> Done {
        match self.kind {
            b':' => Out::text(to, false).int(self.sum)?,
            b'*' => Out::text(to, false).array(self.sum as usize)?,
            _ => {}
        }
        to.extend_from_slice(&self.text);
        Ok(())
    }
}

#[cfg(test)]
#[path = "tests/resp.rs"]
mod tests;
