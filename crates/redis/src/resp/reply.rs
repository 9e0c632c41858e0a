//! Replies, in both versions of the protocol.

use std::borrow::Cow;
use std::fmt::Write as _;

use bytes::BufMut;
use ringserve_server::ReplyWriter;

use super::number;
use crate::OwnedField;
use crate::scatter::Merge;

/// The version of the protocol that a client speaks: 2 until it says `HELLO 3`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Version {
    /// Strings, numbers, errors, arrays.
    #[default]
    Two,
    /// Types for everything that a reply can be, and for messages that no request asked for.
    Three,
}

/// The result of a command: a reply was written, or the text of an error that [`Writer::reply`] has
/// to write. No other method of [`Writer`] returns an error; each returns this type so that it can
/// be the last expression of a command.
///
/// ```
/// use ringserve::framing::FrameFields;
/// use ringserve::resp::{ReplyResult, Version, Writer, number};
///
/// fn double(args: FrameFields<'_>, out: &mut Writer<'_, '_>) -> ReplyResult {
///     out.integer(2 * number(args.get(1)).ok_or("ERR value is not an integer")?)
/// }
///
/// let mut text = Vec::new();
/// let mut out = Writer::to_vec(&mut text, Version::Two);
/// for args in [FrameFields::new(b"DOUBLE 21", &[(0, 6), (7, 9)]), FrameFields::new(b"DOUBLE it", &[(0, 6), (7, 9)])] {
///     out.reply(|out| double(args, out));
/// }
/// assert_eq!(text, b":42\r\n-ERR value is not an integer\r\n");
/// ```
pub type ReplyResult = Result<(), Cow<'static, str>>;

/// The target of a reply.
enum To<'a, 'b> {
    Peer(&'a mut ReplyWriter<'b>),
    Vec(&'a mut Vec<u8>),
}

/// Writes replies, in the version that the client speaks. An array, a map or a push is written as
/// its length, followed by its elements one after the other.
///
/// ```
/// use ringserve::resp::{Version, Writer};
///
/// let written = |version| {
///     let mut text = Vec::new();
///     let mut out = Writer::to_vec(&mut text, version);
///     out.map(2).and_then(|()| out.simple("hits")).and_then(|()| out.integer(7)).unwrap();
///     out.simple("last").and_then(|()| out.null()).unwrap();
///     String::from_utf8(text).unwrap()
/// };
/// assert_eq!(written(Version::Three), "%2\r\n+hits\r\n:7\r\n+last\r\n_\r\n");
/// assert_eq!(written(Version::Two), "*4\r\n+hits\r\n:7\r\n+last\r\n$-1\r\n");
/// ```
pub struct Writer<'a, 'b> {
    to: To<'a, 'b>,
    version: Version,
}

impl<'a, 'b> Writer<'a, 'b> {
    /// Writes in place, to a client of this shard:
    /// [`Cx::write_with`](ringserve_server::Cx::write_with) has the `ReplyWriter`.
    #[inline]
    pub fn new(to: &'a mut ReplyWriter<'b>, version: Version) -> Writer<'a, 'b> {
        Writer { to: To::Peer(to), version }
    }

    /// Appends to bytes that go to another shard, or to several clients.
    #[inline]
    pub fn to_vec(to: &'a mut Vec<u8>, version: Version) -> Writer<'a, 'b> {
        Writer { to: To::Vec(to), version }
    }

    /// The version that the client speaks.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Sets the version of everything that follows: for the reply to HELLO.
    pub fn set_version(&mut self, version: Version) {
        self.version = version;
    }

    #[inline]
    fn put(&mut self, bytes: &[u8]) {
        match &mut self.to {
            To::Peer(to) => to.put_slice(bytes),
            To::Vec(to) => to.extend_from_slice(bytes),
        }
    }

    #[inline]
    fn line(&mut self, kind: &[u8], text: &[u8]) -> ReplyResult {
        self.put(kind);
        self.put(text);
        self.put(b"\r\n");
        Ok(())
    }

    #[inline]
    fn count(&mut self, kind: u8, count: usize) -> ReplyResult {
        let mut digits = itoa::Buffer::new();
        let digits = digits.format(count).as_bytes();
        // In one piece: it stands before every string.
        let mut line = [0; 24];
        line[0] = kind;
        line[1..=digits.len()].copy_from_slice(digits);
        line[1 + digits.len()..][..2].copy_from_slice(b"\r\n");
        self.put(&line[..digits.len() + 3]);
        Ok(())
    }

    /// Writes a type of version 3, or the one that stands for it in version 2.
    #[inline]
    fn typed(&mut self, three: &[u8], two: &[u8], text: &[u8]) -> ReplyResult {
        self.line(if self.version == Version::Three { three } else { two }, text)
    }

    /// Writes the reply to a command: the bytes that it writes, or its error. A command has to
    /// return an error before it writes.
    #[inline]
    pub fn reply(&mut self, command: impl FnOnce(&mut Self) -> ReplyResult) {
        if let Err(error) = command(self) {
            let _ = self.error(&error);
        }
    }

    /// Writes `OK`.
    #[inline]
    pub fn ok(&mut self) -> ReplyResult {
        self.put(b"+OK\r\n");
        Ok(())
    }

    /// Writes a simple string of the server's words, without a line end.
    #[inline]
    pub fn simple(&mut self, text: &str) -> ReplyResult {
        debug_assert!(!text.contains(['\r', '\n']), "{text:?} is more than a line");
        self.line(b"+", text.as_bytes())
    }

    /// Writes an error, whose first word is its kind: `ERR`, `WRONGTYPE`. It stays one line,
    /// whatever the client sent.
    pub fn error(&mut self, text: &str) -> ReplyResult {
        self.line(b"-", text.replace(['\r', '\n'], " ").as_bytes())
    }

    /// Writes a number; true is 1.
    #[inline]
    pub fn integer(&mut self, value: impl Into<i64>) -> ReplyResult {
        self.line(b":", itoa::Buffer::new().format(value.into()).as_bytes())
    }

    /// Writes a string of any bytes.
    #[inline]
    pub fn bulk(&mut self, bytes: impl AsRef<[u8]>) -> ReplyResult {
        let bytes = bytes.as_ref();
        self.count(b'$', bytes.len())?;
        self.put(bytes);
        self.put(b"\r\n");
        Ok(())
    }

    /// Writes a string, or [nothing](Writer::null).
    #[inline]
    pub fn bulk_or_null(&mut self, bytes: Option<impl AsRef<[u8]>>) -> ReplyResult {
        match bytes {
            Some(bytes) => self.bulk(bytes),
            None => self.null(),
        }
    }

    /// Writes a number as a string.
    pub fn bulk_integer(&mut self, value: i64) -> ReplyResult {
        self.bulk(itoa::Buffer::new().format(value))
    }

    /// Writes a string that was kept. If it lies in a block, it leaves without a copy to a client
    /// of this shard.
    #[inline]
    pub fn bulk_kept(&mut self, kept: &OwnedField) -> ReplyResult {
        match (&mut self.to, kept.block()) {
            (To::Peer(_), Some(block)) => {
                self.count(b'$', block.len())?;
                if let To::Peer(to) = &mut self.to {
                    to.lend(block.clone().into_lease());
                }
                self.put(b"\r\n");
                Ok(())
            }
            _ => self.bulk(kept),
        }
    }

    /// Writes nothing: no such key, no such element.
    #[inline]
    pub fn null(&mut self) -> ReplyResult {
        if self.version == Version::Three { self.line(b"_", b"") } else { self.line(b"$", b"-1") }
    }

    /// Writes nothing in place of an array, as after a time limit.
    pub fn null_array(&mut self) -> ReplyResult {
        if self.version == Version::Three { self.line(b"_", b"") } else { self.line(b"*", b"-1") }
    }

    /// Writes true or false. In version 2 the number 1 or 0.
    pub fn boolean(&mut self, value: bool) -> ReplyResult {
        match self.version {
            Version::Two => self.integer(value),
            Version::Three => self.line(b"#", if value { b"t" } else { b"f" }),
        }
    }

    /// Writes a number with a fraction, in as many digits as it takes to read it back. In version 2
    /// a string.
    pub fn double(&mut self, value: f64) -> ReplyResult {
        let mut text = String::new();
        let _ = match value {
            _ if value.is_nan() => write!(text, "nan"),
            // Plain digits, as long as they are few.
            _ if value == 0.0 || (1e-5..1e17).contains(&value.abs()) => write!(text, "{value}"),
            _ => write!(text, "{value:e}"),
        };
        if self.version == Version::Three { self.line(b",", text.as_bytes()) } else { self.bulk(text) }
    }

    /// Writes a text with its format, three letters such as `txt` or `mkd`. In version 2 a string.
    ///
    /// # Panics
    /// If the format has another length.
    pub fn verbatim(&mut self, format: &str, text: impl AsRef<[u8]>) -> ReplyResult {
        assert_eq!(format.len(), 3, "the format of a verbatim string has three letters: {format:?}");
        if self.version == Version::Two {
            return self.bulk(text);
        }
        let text = text.as_ref();
        self.count(b'=', text.len() + 4)?;
        self.put(format.as_bytes());
        self.line(b":", text)
    }

    /// Writes the start of an array of this many elements.
    #[inline]
    pub fn array(&mut self, len: usize) -> ReplyResult {
        self.count(b'*', len)
    }

    /// Writes the start of a map of this many pairs. In version 2 an array of twice as many
    /// elements.
    pub fn map(&mut self, len: usize) -> ReplyResult {
        if self.version == Version::Three { self.count(b'%', len) } else { self.array(2 * len) }
    }

    /// Writes the start of a set of this many elements that differ. In version 2 an array.
    pub fn set(&mut self, len: usize) -> ReplyResult {
        self.typed(b"~", b"*", itoa::Buffer::new().format(len).as_bytes())
    }

    /// Writes the start of a message of this many elements that no request asked for. In version 2
    /// an array.
    pub fn push(&mut self, len: usize) -> ReplyResult {
        self.typed(b">", b"*", itoa::Buffer::new().format(len).as_bytes())
    }

    /// Writes an array of strings.
    pub fn bulks(
        &mut self,
        all: impl IntoIterator<Item = impl AsRef<[u8]>, IntoIter: ExactSizeIterator>,
    ) -> ReplyResult {
        let mut all = all.into_iter();
        self.array(all.len())?;
        all.try_for_each(|bytes| self.bulk(bytes))
    }
}

/// Merges the replies of several shards into one: the sum of numbers, an array of all elements, the
/// last `OK` or other string, or the first error. A null in place of an array adds no element, and
/// is the reply if no shard has an array. If replies differ in kind, the last kind counts.
///
/// ```
/// use ringserve::resp::MergedReply;
/// use ringserve::scatter::Merge;
///
/// let (mut merged, mut text) = (MergedReply::default(), Vec::new());
/// [b"*1\r\n+a\r\n".as_slice(), b"*0\r\n", b"*2\r\n+b\r\n+c\r\n"].into_iter().for_each(|reply| merged.add(reply));
/// merged.write(&mut text);
/// assert_eq!(text, b"*3\r\n+a\r\n+b\r\n+c\r\n");
/// ```
#[derive(Debug, Default)]
pub struct MergedReply {
    kind: u8,
    sum: i64,
    text: Vec<u8>,
}

impl Merge for MergedReply {
    fn add(&mut self, reply: &[u8]) {
        let end = reply.iter().position(|byte| *byte == b'\r').unwrap_or(reply.len());
        let value = reply.get(1..end).and_then(number).unwrap_or_default();
        let kind = match reply.first() {
            Some(b'*') if value < 0 => b'_',
            kind => kind.copied().unwrap_or_default(),
        };
        match kind {
            _ if self.kind == b'-' => {}
            b'_' if self.kind == b'*' => {}
            b':' | b'*' => {
                if self.kind != kind {
                    *self = MergedReply { kind, ..MergedReply::default() };
                }
                self.sum = self.sum.saturating_add(value);
                self.text.extend_from_slice(reply.get(end + 2..).unwrap_or_default());
            }
            _ => {
                self.kind = kind;
                self.text.clear();
                self.text.extend_from_slice(reply);
            }
        }
    }

    fn write(&mut self, to: &mut Vec<u8>) {
        let mut out = Writer::to_vec(to, Version::Two);
        out.reply(|out| match self.kind {
            b':' => out.integer(self.sum),
            b'*' => out.array(self.sum as usize),
            _ => Ok(()),
        });
        to.extend_from_slice(&self.text);
    }
}
