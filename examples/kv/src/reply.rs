//! Replies, in both versions of the protocol.

use ringserve::Cx;

use crate::number::Digits;

/// Strings up to this length are put together on the stack and written at once.
const SMALL_BYTES: usize = 96;

/// What a client understands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// What every client starts with.
    #[default]
    Resp2,
    /// Asked for with HELLO 3: it has maps, sets and a null.
    Resp3,
}

/// Where a reply goes.
pub trait Out {
    /// Appends bytes.
    fn write(&mut self, bytes: &[u8]);

    /// True if so much waits there that more had better wait.
    fn is_full(&self) -> bool;
}

/// To a client of this shard.
impl<S: 'static> Out for &Cx<'_, S> {
    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        Cx::write(self, bytes);
    }

    #[inline]
    fn is_full(&self) -> bool {
        self.outbox_bytes() > OUTBOX_BYTES_HIGH
    }
}

/// Long replies wait for the peer at this point; `outbox_bytes_high` of the server.
pub const OUTBOX_BYTES_HIGH: usize = 256 << 10;

/// To another shard.
impl Out for Vec<u8> {
    fn write(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }

    fn is_full(&self) -> bool {
        self.len() > ANSWER_BYTES_MAX
    }
}

/// Values of MGET that one shard sends another at once, beyond which at most one more goes with them. The rest is asked for
/// when these are written, so this is what a connection of a slow reader keeps in memory for each shard. As much as its
/// outbox: a round trip for less would cost more than it saves.
pub const ANSWER_BYTES_MAX: usize = OUTBOX_BYTES_HIGH;

/// Writes one reply.
pub struct Reply<O> {
    out: O,
    protocol: Protocol,
}

impl<O: Out> Reply<O> {
    /// A reply that goes to `out`.
    #[inline]
    pub fn new(out: O, protocol: Protocol) -> Reply<O> {
        Reply { out, protocol }
    }

    /// Where it goes.
    pub fn into_inner(self) -> O {
        self.out
    }

    /// The version it is written in.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// See [`Out::is_full`].
    #[inline]
    pub fn is_full(&self) -> bool {
        self.out.is_full()
    }

    /// Bytes that are a reply already, or a part of one.
    pub fn raw(&mut self, bytes: &[u8]) {
        self.out.write(bytes);
    }

    /// `OK`.
    #[inline]
    pub fn ok(&mut self) {
        self.out.write(b"+OK\r\n");
    }

    /// A word.
    #[inline]
    pub fn simple(&mut self, word: &str) {
        self.line(b'+', word.as_bytes());
    }

    /// A number.
    #[inline]
    pub fn integer(&mut self, value: i64) {
        self.number(&Digits::of(value));
    }

    /// A number whose digits are known.
    #[inline]
    pub fn number(&mut self, digits: &Digits) {
        self.line(b':', digits.bytes());
    }

    /// True or false, as 1 or 0.
    #[inline]
    pub fn flag(&mut self, value: bool) {
        self.out.write(if value { b":1\r\n" } else { b":0\r\n" });
    }

    /// No value.
    #[inline]
    pub fn null(&mut self) {
        self.out.write(match self.protocol {
            Protocol::Resp2 => b"$-1\r\n",
            Protocol::Resp3 => b"_\r\n",
        });
    }

    /// No list of values.
    pub fn null_array(&mut self) {
        self.out.write(match self.protocol {
            Protocol::Resp2 => b"*-1\r\n",
            Protocol::Resp3 => b"_\r\n",
        });
    }

    /// A string of any bytes.
    #[inline]
    pub fn string(&mut self, bytes: &[u8]) {
        if bytes.len() > SMALL_BYTES {
            return self.long_string(bytes);
        }
        // "$96\r\n", the string, "\r\n".
        let mut whole = [0; SMALL_BYTES + 7];
        let len = bytes.len() as u8;
        whole[0] = b'$';
        let start = if len < 10 {
            whole[1..4].copy_from_slice(&[b'0' + len, b'\r', b'\n']);
            4
        } else {
            whole[1..5].copy_from_slice(&[b'0' + len / 10, b'0' + len % 10, b'\r', b'\n']);
            5
        };
        let end = start + bytes.len();
        whole[start..end].copy_from_slice(bytes);
        whole[end..end + 2].copy_from_slice(b"\r\n");
        self.out.write(&whole[..end + 2]);
    }

    fn long_string(&mut self, bytes: &[u8]) {
        self.line(b'$', Digits::of(bytes.len() as i64).bytes());
        self.out.write(bytes);
        self.out.write(b"\r\n");
    }

    /// Text to be shown as it is.
    pub fn text(&mut self, text: &str) {
        match self.protocol {
            Protocol::Resp2 => self.string(text.as_bytes()),
            Protocol::Resp3 => {
                self.line(b'=', Digits::of(text.len() as i64 + 4).bytes());
                self.out.write(b"txt:");
                self.out.write(text.as_bytes());
                self.out.write(b"\r\n");
            }
        }
    }

    /// The start of `len` elements in order.
    #[inline]
    pub fn array(&mut self, len: usize) {
        self.line(b'*', Digits::of(len as i64).bytes());
    }

    /// The start of `len` elements without an order.
    pub fn set(&mut self, len: usize) {
        match self.protocol {
            Protocol::Resp2 => self.array(len),
            Protocol::Resp3 => self.line(b'~', Digits::of(len as i64).bytes()),
        }
    }

    /// The start of `len` pairs.
    pub fn map(&mut self, len: usize) {
        match self.protocol {
            Protocol::Resp2 => self.array(2 * len),
            Protocol::Resp3 => self.line(b'%', Digits::of(len as i64).bytes()),
        }
    }

    /// An error: a word in capitals, then what went wrong. Bytes of the client's may be part of it.
    #[cold]
    pub fn error(&mut self, text: impl AsRef<[u8]>) {
        let mut text = text.as_ref().to_vec();
        for byte in &mut text {
            // A line break would end the reply.
            if matches!(byte, b'\r' | b'\n') {
                *byte = b' ';
            }
        }
        self.out.write(b"-");
        self.out.write(&text);
        self.out.write(b"\r\n");
    }

    /// A short line.
    #[inline]
    fn line(&mut self, kind: u8, text: &[u8]) {
        let mut whole = [0; 32];
        let Some(middle) = whole.get_mut(1..1 + text.len()) else { return self.long_line(kind, text) };
        middle.copy_from_slice(text);
        whole[0] = kind;
        match whole.get_mut(1 + text.len()..3 + text.len()) {
            Some(end) => end.copy_from_slice(b"\r\n"),
            None => return self.long_line(kind, text),
        }
        self.out.write(&whole[..text.len() + 3]);
    }

    #[cold]
    fn long_line(&mut self, kind: u8, text: &[u8]) {
        self.out.write(&[kind]);
        self.out.write(text);
        self.out.write(b"\r\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(protocol: Protocol, write: impl FnOnce(&mut Reply<Vec<u8>>)) -> String {
        let mut reply = Reply::new(Vec::new(), protocol);
        write(&mut reply);
        String::from_utf8(reply.into_inner()).unwrap()
    }

    fn both(write: impl Fn(&mut Reply<Vec<u8>>)) -> [String; 2] {
        [written(Protocol::Resp2, &write), written(Protocol::Resp3, &write)]
    }

    #[test]
    fn strings_of_every_length_are_whole() {
        for len in (0..300).chain([4095, 70_000]) {
            let bytes = vec![b'x'; len];
            let expected = format!("${len}\r\n{}\r\n", "x".repeat(len));
            assert_eq!(both(|reply| reply.string(&bytes)), [expected.clone(), expected]);
        }
    }

    #[test]
    fn lines_of_every_length_are_whole() {
        for len in 0..60 {
            let word = "x".repeat(len);
            assert_eq!(written(Protocol::Resp2, |reply| reply.simple(&word)), format!("+{word}\r\n"));
        }
        assert_eq!(written(Protocol::Resp2, |reply| reply.integer(i64::MIN)), format!(":{}\r\n", i64::MIN));
    }

    #[test]
    fn the_third_version_has_types_of_its_own() {
        assert_eq!(both(|reply| reply.null()), ["$-1\r\n", "_\r\n"]);
        assert_eq!(both(|reply| reply.map(2)), ["*4\r\n", "%2\r\n"]);
        assert_eq!(both(|reply| reply.set(2)), ["*2\r\n", "~2\r\n"]);
        assert_eq!(both(|reply| reply.text("ab")), ["$2\r\nab\r\n", "=6\r\ntxt:ab\r\n"]);
        assert_eq!(both(|reply| reply.array(2)), ["*2\r\n", "*2\r\n"]);
    }

    #[test]
    fn an_error_is_one_line_whatever_the_client_sent() {
        assert_eq!(written(Protocol::Resp2, |reply| reply.error("ERR a\r\n+OK")), "-ERR a  +OK\r\n");
    }
}
