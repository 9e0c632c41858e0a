//! The ends of replies.

use std::cell::RefCell;

use ringserve_server::framing::{Decode, EncodeError, FrameError, Framing, Outbox, Payload};

/// The most levels of arrays in arrays. Redis's own replies have three levels, modules some more.
pub(super) const DEPTH_MAX: usize = 32;

/// The longest line of a reply: a number, an error, a status.
const LINE_BYTES_MAX: usize = 64 << 10;

/// Bytes of the shortest element, `_\r\n`.
const ELEMENT_BYTES_MIN: usize = 3;

/// ReplyFrames of Redis as frames, in both versions of the protocol: each with all its elements, 32
/// levels deep at most. The largest one is that of the connection's
/// [`frame_bytes_max`](ringserve_server::net::Framed::frame_bytes_max).
///
/// Messages that no command asked for (`>`) are none: they end a connection whose replies are
/// matched by their order.
///
/// A payload is one command. A command to which Redis has no reply, an array of nothing or a blank
/// line, has no frame: the reply to the next command would be taken for its own.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct ReplyFrames;

impl Framing for ReplyFrames {
    fn decode(&self, bytes: &[u8], _scanned: usize) -> Result<Decode, FrameError> {
        Walk::new().go_on(bytes)
    }

    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        if !has_reply(payload.bytes()) {
            return Err(EncodeError("Redis has no reply to it: it has no word"));
        }
        out.payload(payload);
        Ok(())
    }
}

/// [`ReplyFrames`] of one connection. An element is walked once, in however many pieces its reply
/// comes: a reply of a million elements comes in hundreds.
pub(super) struct ConnectionReplies {
    walk: RefCell<Walk>,
}

impl Default for ConnectionReplies {
    fn default() -> ConnectionReplies {
        ConnectionReplies { walk: RefCell::new(Walk::new()) }
    }
}

/// A clone is for another connection.
impl Clone for ConnectionReplies {
    fn clone(&self) -> ConnectionReplies {
        ConnectionReplies::default()
    }
}

impl Framing for ConnectionReplies {
    fn decode(&self, bytes: &[u8], scanned: usize) -> Result<Decode, FrameError> {
        let mut walk = self.walk.borrow_mut();
        if scanned == 0 {
            *walk = Walk::new();
        }
        walk.go_on(bytes)
    }

    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        ReplyFrames.encode(payload, out)
    }
}

/// True if Redis replies to these bytes. It passes over a blank line and an array of nothing.
pub(super) fn has_reply(command: &[u8]) -> bool {
    let end = memchr::memchr(b'\n', command).unwrap_or(command.len());
    match command[..end].trim_ascii().split_first() {
        Some((b'*', count)) => crate::resp::number(count).is_none_or(|count| count > 0),
        first => first.is_some(),
    }
}

/// The walk through a reply: elements that are missing, of each level.
struct Walk {
    at: usize,
    left: [usize; DEPTH_MAX],
    depth: usize,
}

impl Walk {
    fn new() -> Walk {
        let mut left = [0; DEPTH_MAX];
        left[0] = 1;
        Walk { at: 0, left, depth: 0 }
    }

    /// Goes on where the bytes that were seen before ended, up to the end of the reply or of the
    /// bytes.
    fn go_on(&mut self, bytes: &[u8]) -> Result<Decode, FrameError> {
        if bytes.first() == Some(&b'>') {
            return Err(FrameError::Malformed("Redis sends what no command asked for"));
        }
        loop {
            // Levels that are complete end their element one level above.
            while self.left[self.depth] == 0 {
                if self.depth == 0 {
                    return Ok(Decode::Frame { skip: 0, len: self.at, consumed: self.at });
                }
                self.depth -= 1;
            }
            if let Some(missing) = self.element(bytes)? {
                // The least bytes of the elements that were not begun.
                let left = self.left[..=self.depth].iter();
                let others = left.fold(0, |sum: usize, left| sum.saturating_add(*left)) - 1;
                return Ok(Decode::More(missing.saturating_add(others.saturating_mul(ELEMENT_BYTES_MIN))));
            }
        }
    }

    /// Passes an element, or the begin of one that has elements. Returns how many bytes are
    /// missing, if some are: then it passed nothing.
    fn element(&mut self, bytes: &[u8]) -> Result<Option<usize>, FrameError> {
        let Some((line, behind)) = line(&bytes[self.at..])? else { return Ok(Some(1)) };
        let Some((kind, text)) = line.split_first() else { return Err(BAD_TYPE) };
        let begin = self.at + behind;
        let (end, elements) = match kind {
            b'+' | b'-' | b':' | b'_' | b'#' | b',' | b'(' => (begin, None),
            b'$' | b'!' | b'=' => match length(text)? {
                None => (begin, None),
                Some(len) => {
                    let end = begin.saturating_add(len).saturating_add(2);
                    if end > bytes.len() {
                        return Ok(Some(end - bytes.len()));
                    }
                    if bytes[end - 2..end] != *b"\r\n" {
                        return Err(FrameError::Malformed("a string of Redis is not as long as it says"));
                    }
                    (end, None)
                }
            },
            b'*' | b'~' | b'>' => (begin, Some(length(text)?.unwrap_or(0))),
            b'%' => (begin, Some(length(text)?.unwrap_or(0).saturating_mul(2))),
            // Attributes, and the reply that they are about.
            b'|' => (begin, Some(length(text)?.unwrap_or(0).saturating_mul(2).saturating_add(1))),
            _ => return Err(BAD_TYPE),
        };
        if elements.is_some() && self.depth + 1 == DEPTH_MAX {
            return Err(FrameError::Malformed("arrays of Redis lie more than 32 levels deep"));
        }
        self.at = end;
        self.left[self.depth] -= 1;
        if let Some(elements) = elements {
            self.depth += 1;
            self.left[self.depth] = elements;
        }
        Ok(None)
    }
}

const BAD_TYPE: FrameError = FrameError::Malformed("no reply of Redis begins so");

/// A line without its end, and where the next one begins.
pub(super) fn line(bytes: &[u8]) -> Result<Option<(&[u8], usize)>, FrameError> {
    let searched = &bytes[..bytes.len().min(LINE_BYTES_MAX)];
    match memchr::memchr(b'\n', searched) {
        Some(end) => match bytes[..end].strip_suffix(b"\r") {
            Some(line) => Ok(Some((line, end + 1))),
            None => Err(FrameError::Malformed("a line of Redis ends without a carriage return")),
        },
        None if bytes.len() >= LINE_BYTES_MAX => Err(FrameError::Malformed("a line of Redis has no end")),
        None => Ok(None),
    }
}

/// A length; none where it says that there is nothing.
pub(super) fn length(text: &[u8]) -> Result<Option<usize>, FrameError> {
    match crate::resp::number(text) {
        Some(-1) => Ok(None),
        Some(length) => usize::try_from(length).map(Some).map_err(|_| BAD_LENGTH),
        None => Err(BAD_LENGTH),
    }
}

const BAD_LENGTH: FrameError = FrameError::Malformed("a reply of Redis has no length");

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TALK: &[u8] = b"+OK\r\n-ERR no\r\n:-7\r\n$5\r\nhe\r\no\r\n$-1\r\n*-1\r\n*0\r\n*3\r\n:1\r\n*1\r\n$0\r\n\r\n_\r\n\
        %2\r\n+a\r\n#t\r\n+b\r\n,1.5\r\n~1\r\n(123\r\n|1\r\n+ttl\r\n:3\r\n$2\r\nhi\r\n=7\r\ntxt:abc\r\n!3\r\nbad\r\n";

    /// All replies of these bytes, as they come in pieces.
    fn cut(bytes: &[u8], piece: usize) -> Result<Vec<Vec<u8>>, FrameError> {
        let whole = cut_by(&ReplyFrames, bytes, piece);
        assert_eq!(cut_by(&ConnectionReplies::default(), bytes, piece), whole, "pieces of {piece}");
        whole
    }

    fn cut_by(framing: &impl Framing, bytes: &[u8], piece: usize) -> Result<Vec<Vec<u8>>, FrameError> {
        let (mut found, mut unread, mut wanted, mut scanned) = (Vec::new(), Vec::new(), 1, 0);
        for piece in bytes.chunks(piece.max(1)) {
            unread.extend_from_slice(piece);
            while unread.len() >= wanted {
                match framing.decode(&unread, scanned)? {
                    Decode::More(missing) => {
                        assert!(missing > 0);
                        wanted = unread.len() + missing;
                        scanned = unread.len();
                    }
                    Decode::Frame { len, consumed, .. } => {
                        found.push(unread[..len].to_vec());
                        unread.drain(..consumed);
                        (wanted, scanned) = (1, 0);
                    }
                }
            }
        }
        Ok(found)
    }

    #[test]
    fn replies_are_cut_at_each_split() {
        let whole = cut(TALK, TALK.len()).unwrap();
        assert_eq!(
            whole.len(),
            13,
            "{:?}",
            whole.iter().map(|one| String::from_utf8_lossy(one)).collect::<Vec<_>>()
        );
        assert_eq!(whole[7], b"*3\r\n:1\r\n*1\r\n$0\r\n\r\n_\r\n");
        assert_eq!(whole[10], b"|1\r\n+ttl\r\n:3\r\n$2\r\nhi\r\n");
        for piece in 1..TALK.len() {
            assert_eq!(cut(TALK, piece).unwrap(), whole, "pieces of {piece}");
        }
    }

    #[test]
    fn bytes_that_are_no_reply_are_refused() {
        for bytes in [
            "GET a\r\n",
            "\r\n",
            "$5\r\nhello!!\r\n",
            "$x\r\n",
            "$-2\r\n",
            "*1.5\r\n",
            "$?\r\n",
            "*?\r\n",
            "+OK\n",
            ">1\r\n+a\r\n",
            "$99999999999999999999\r\n",
        ] {
            assert!(cut(bytes.as_bytes(), 100).is_err(), "{bytes:?}");
        }
        assert!(cut("*1\r\n".repeat(DEPTH_MAX).as_bytes(), 1000).is_err());
        assert!(cut("*1\r\n".repeat(DEPTH_MAX - 1).as_bytes(), 1000).is_ok());
        assert!(cut(&[b'+'; LINE_BYTES_MAX], 1000).is_err());
    }

    #[test]
    fn commands_without_a_word_have_no_reply() {
        for command in ["", "\r\n", " \t\r\n", "*0\r\n", "*-1\r\n", "*0", "\r\nPING\r\n"] {
            assert!(!has_reply(command.as_bytes()), "{command:?}");
        }
        for command in ["PING\r\n", "*1\r\n$4\r\nPING\r\n", "*1\r\n$0\r\n\r\n", "*x\r\n", "*10\r\n"] {
            assert!(has_reply(command.as_bytes()), "{command:?}");
        }
    }

    #[test]
    fn large_arrays_are_walked_a_few_times() {
        let mut bytes = b"*1000\r\n".to_vec();
        assert_eq!(ReplyFrames.decode(&bytes, 0), Ok(Decode::More(1 + 999 * ELEMENT_BYTES_MIN)));
        bytes.extend_from_slice(b"$1000000000\r\n");
        assert_eq!(ReplyFrames.decode(&bytes, 0), Ok(Decode::More(1_000_000_002 + 999 * ELEMENT_BYTES_MIN)));
    }

    #[test]
    fn elements_of_a_connection_are_walked_once() {
        let (framing, element) = (ConnectionReplies::default(), b"$3\r\nabc\r\n");
        let mut bytes = b"*100\r\n".to_vec();
        for n in 0..100 {
            assert_eq!(framing.walk.borrow().left[1], if n == 0 { 0 } else { 101 - n });
            let scanned = if n == 0 { 0 } else { bytes.len() - element.len() };
            let missing = framing.decode(&bytes, scanned).unwrap();
            assert_eq!(missing, Decode::More(1 + (99 - n) * ELEMENT_BYTES_MIN));
            bytes.extend_from_slice(element);
        }
        // What was walked is not looked at again.
        let scanned = bytes.len() - element.len();
        bytes[..scanned].fill(b'x');
        let len = bytes.len();
        let whole = framing.decode(&bytes, scanned);
        assert_eq!(whole, Ok(Decode::Frame { skip: 0, len, consumed: len }));
    }

    proptest! {
        #[test]
        fn any_bytes_are_replies_or_refused(bytes in "[*$%~|+:_0-9\r\n-]{0,80}", piece in 1usize..20) {
            let (pieces, whole) = (cut(bytes.as_bytes(), piece), cut(bytes.as_bytes(), 100));
            // An error may be seen earlier or later, the replies before it are the same.
            if let (Ok(pieces), Ok(whole)) = (pieces, whole) {
                prop_assert_eq!(pieces, whole);
            }
        }
    }
}
