//! The ends of replies.

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
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct ReplyFrames;

impl Framing for ReplyFrames {
    fn decode(&self, bytes: &[u8], _scanned: usize) -> Result<Decode, FrameError> {
        if bytes.first() == Some(&b'>') {
            return Err(FrameError::Malformed("Redis sends what no command asked for"));
        }
        let mut walk = Walk { at: 0, left: [0; DEPTH_MAX], depth: 0 };
        walk.left[0] = 1;
        loop {
            // Levels that are complete end their element one level above.
            while walk.left[walk.depth] == 0 {
                if walk.depth == 0 {
                    return Ok(Decode::Frame { skip: 0, len: walk.at, consumed: walk.at });
                }
                walk.depth -= 1;
            }
            if let Some(missing) = walk.element(bytes)? {
                // The least bytes of the elements that were not begun.
                let others: usize =
                    walk.left[..=walk.depth].iter().fold(0, |sum, left| sum.saturating_add(*left));
                return Ok(Decode::More(missing.saturating_add(others.saturating_mul(ELEMENT_BYTES_MIN))));
            }
        }
    }

    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        out.payload(payload);
        Ok(())
    }
}

/// The walk through a reply: elements that are missing, of each level.
struct Walk {
    at: usize,
    left: [usize; DEPTH_MAX],
    depth: usize,
}

impl Walk {
    /// Passes an element, or the begin of one that has elements. Returns how many bytes are
    /// missing, if some are.
    fn element(&mut self, bytes: &[u8]) -> Result<Option<usize>, FrameError> {
        self.left[self.depth] -= 1;
        let Some((line, behind)) = line(&bytes[self.at..])? else { return Ok(Some(1)) };
        let Some((kind, text)) = line.split_first() else { return Err(BAD_TYPE) };
        self.at += behind;
        let elements = match kind {
            b'+' | b'-' | b':' | b'_' | b'#' | b',' | b'(' => return Ok(None),
            b'$' | b'!' | b'=' => {
                let Some(len) = length(text)? else { return Ok(None) };
                let end = self.at.saturating_add(len).saturating_add(2);
                if end > bytes.len() {
                    return Ok(Some(end - bytes.len()));
                }
                if bytes[end - 2..end] != *b"\r\n" {
                    return Err(FrameError::Malformed("a string of Redis is not as long as it says"));
                }
                self.at = end;
                return Ok(None);
            }
            b'*' | b'~' | b'>' => length(text)?.unwrap_or(0),
            b'%' => length(text)?.unwrap_or(0).saturating_mul(2),
            // Attributes, and the reply that they are about.
            b'|' => length(text)?.unwrap_or(0).saturating_mul(2).saturating_add(1),
            _ => return Err(BAD_TYPE),
        };
        if self.depth + 1 == DEPTH_MAX {
            return Err(FrameError::Malformed("arrays of Redis lie more than 32 levels deep"));
        }
        self.depth += 1;
        self.left[self.depth] = elements;
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
        let (mut found, mut unread, mut wanted) = (Vec::new(), Vec::new(), 1);
        for piece in bytes.chunks(piece.max(1)) {
            unread.extend_from_slice(piece);
            while unread.len() >= wanted {
                match ReplyFrames.decode(&unread, 0)? {
                    Decode::More(missing) => {
                        assert!(missing > 0);
                        wanted = unread.len() + missing;
                    }
                    Decode::Frame { len, consumed, .. } => {
                        found.push(unread[..len].to_vec());
                        unread.drain(..consumed);
                        wanted = 1;
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
    fn large_arrays_are_walked_a_few_times() {
        let mut bytes = b"*1000\r\n".to_vec();
        assert_eq!(ReplyFrames.decode(&bytes, 0), Ok(Decode::More(1 + 999 * ELEMENT_BYTES_MIN)));
        bytes.extend_from_slice(b"$1000000000\r\n");
        assert_eq!(ReplyFrames.decode(&bytes, 0), Ok(Decode::More(1_000_000_002 + 999 * ELEMENT_BYTES_MIN)));
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
