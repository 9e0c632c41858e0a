//! Ends of the operations of a server: a line, and after MSG and HMSG a payload.

use std::cell::Cell;
use std::rc::Rc;

use ringserve_server::framing::{Decode, EncodeError, FrameError, Framing, Outbox, Payload};

/// The longest line of a message. A subject, a reply and a queue share the 4096 bytes of a client's
/// line, and a server adds numbers.
const MESSAGE_LINE_BYTES_MAX: usize = 8 << 10;

/// The longest other line. INFO names all servers of a cluster: 64 KiB are some 2000 of them.
const LINE_BYTES_MAX: usize = 64 << 10;

/// The largest payload that a server can be configured to take.
pub(crate) const PAYLOAD_BYTES_MAX: usize = 64 << 20;

/// The largest frame with any payload.
pub(crate) const FRAME_BYTES_MAX: usize = PAYLOAD_BYTES_MAX + LINE_BYTES_MAX;

/// Frames of the NATS protocol as a client receives them: an operation with its payload, without
/// the last line end.
///
/// ```text
///   INFO {..}\r\n      MSG subject sid [reply] size\r\npayload\r\n
///   PING\r\n           HMSG subject sid [reply] headers size\r\nheaders and payload\r\n
///   PONG\r\n  +OK\r\n  -ERR 'why'\r\n
/// ```
#[derive(Clone, Debug)]
pub(crate) struct NatsFrames {
    /// The largest payload, headers included: `max_payload` of the last INFO. A larger one is
    /// refused before memory is taken for it.
    payload_bytes_max: Rc<Cell<usize>>,
}

impl NatsFrames {
    pub(crate) fn new(payload_bytes_max: Rc<Cell<usize>>) -> NatsFrames {
        NatsFrames { payload_bytes_max }
    }
}

impl Framing for NatsFrames {
    fn decode(&self, bytes: &[u8], scanned: usize) -> Result<Decode, FrameError> {
        let is_message = match bytes.first() {
            Some(b'M' | b'H') => true,
            Some(b'I' | b'P' | b'+' | b'-') => false,
            Some(_) => return Err(FrameError::Malformed("no operation of NATS begins so")),
            None => return Ok(Decode::More(1)),
        };
        // Behind the line of a message lies its payload, which is not searched.
        let (from, line_max) =
            if is_message { (0, MESSAGE_LINE_BYTES_MAX) } else { (scanned.min(bytes.len()), LINE_BYTES_MAX) };
        let searched = bytes.len().min(line_max);
        let Some(end) = memchr::memchr(b'\n', bytes.get(from..searched).unwrap_or(&[])) else {
            return match bytes.len() < line_max {
                true => Ok(Decode::More(1)),
                false => Err(FrameError::Malformed("a line of NATS has no end")),
            };
        };
        let end = from + end;
        let Some(line) = bytes[..end].strip_suffix(b"\r") else {
            return Err(FrameError::Malformed("a line of NATS ends without a carriage return"));
        };
        if !is_message {
            return Ok(Decode::Frame { skip: 0, len: line.len(), consumed: end + 1 });
        }
        let size = payload_bytes(line)?;
        if size > self.payload_bytes_max.get() {
            return Err(FrameError::Malformed("a message is larger than max_payload"));
        }
        let payload_end = end + 1 + size;
        match (payload_end + 2).checked_sub(bytes.len()) {
            None | Some(0) if bytes[payload_end..].starts_with(b"\r\n") => {
                Ok(Decode::Frame { skip: 0, len: payload_end, consumed: payload_end + 2 })
            }
            None | Some(0) => Err(FrameError::Malformed("a message is not as long as it says")),
            Some(missing) => Ok(Decode::More(missing)),
        }
    }

    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        out.payload(payload);
        Ok(())
    }
}

/// The size at the end of the line of a message.
fn payload_bytes(line: &[u8]) -> Result<usize, FrameError> {
    if !line.starts_with(b"MSG ") && !line.starts_with(b"HMSG ") {
        return Err(FrameError::Malformed("no operation of NATS begins so"));
    }
    let size = line.iter().rposition(|byte| *byte == b' ').map_or(line, |space| &line[space + 1..]);
    number(size)
        .and_then(|size| usize::try_from(size).ok())
        .ok_or(FrameError::Malformed("a message has no size"))
}

/// A number in decimal digits.
pub(crate) fn number(digits: &[u8]) -> Option<u64> {
    // 19 digits fit, whatever they are.
    if digits.is_empty() || digits.len() > 19 {
        return None;
    }
    digits.iter().try_fold(0, |number, digit| match digit {
        b'0'..=b'9' => Some(number * 10 + u64::from(digit - b'0')),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frames() -> NatsFrames {
        NatsFrames::new(Rc::new(Cell::new(1 << 20)))
    }

    /// All frames of these bytes, as they come in pieces.
    fn cut(bytes: &[u8], pieces: &[usize]) -> Result<Vec<Vec<u8>>, FrameError> {
        let (framing, mut found) = (frames(), Vec::new());
        let (mut unread, mut scanned, mut wanted) = (Vec::new(), 0, 1);
        let mut rest = bytes;
        let mut pieces = pieces.iter().cycle();
        while !rest.is_empty() {
            let (piece, behind) = rest.split_at((*pieces.next().unwrap()).clamp(1, rest.len()));
            rest = behind;
            unread.extend_from_slice(piece);
            while unread.len() >= scanned + wanted {
                match framing.decode(&unread, scanned)? {
                    Decode::More(missing) => {
                        assert!(missing > 0);
                        (scanned, wanted) = (unread.len(), missing);
                    }
                    Decode::Frame { skip, len, consumed } => {
                        assert!(skip + len <= consumed && consumed <= unread.len());
                        found.push(unread[skip..skip + len].to_vec());
                        unread.drain(..consumed);
                        (scanned, wanted) = (0, 1);
                    }
                }
            }
        }
        Ok(found)
    }

    const TALK: &[u8] =
        b"INFO {\"a\":\"b\"}\r\nPING\r\nMSG a.b 12 5\r\nhe\r\no\r\nMSG a 1 _INBOX.1 0\r\n\r\n+OK\r\n\
        HMSG a 3 12 17\r\nNATS/1.0\r\n\r\nhello\r\n-ERR 'no'\r\nPONG\r\n";

    #[test]
    fn operations_are_cut_at_each_split() {
        let whole = cut(TALK, &[TALK.len()]).unwrap();
        assert_eq!(whole.len(), 8);
        assert_eq!(whole[2], b"MSG a.b 12 5\r\nhe\r\no");
        assert_eq!(whole[5], b"HMSG a 3 12 17\r\nNATS/1.0\r\n\r\nhello");
        for at in 1..TALK.len() {
            assert_eq!(cut(TALK, &[at, TALK.len()]).unwrap(), whole, "split at {at}");
            assert_eq!(cut(TALK, &[at]).unwrap(), whole, "pieces of {at}");
        }
    }

    #[test]
    fn bytes_that_are_no_operation_are_refused() {
        for bytes in [
            "GET / HTTP/1.1\r\n",
            "MSG a\r\n",
            "MSG a 1 x\r\n",
            "MSG a 1 5\r\nhello!\r\n",
            "MSG a 1 5\nhello\r\n",
            "MOB a 1 5\r\nhello\r\n",
            "MSG a 1 99999999999999999999\r\n",
            "MSG a 1 -1\r\n",
            "PING\n",
            " ",
            "\r\n",
        ] {
            assert!(cut(bytes.as_bytes(), &[bytes.len()]).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn message_above_max_payload_takes_no_memory() {
        let line = format!("MSG a 1 {}\r\n", (1 << 20) + 1);
        assert!(frames().decode(line.as_bytes(), 0).is_err());
        let line = format!("MSG a 1 {}\r\n", 1 << 20);
        assert_eq!(frames().decode(line.as_bytes(), 0), Ok(Decode::More((1 << 20) + 2)));
    }

    #[test]
    fn line_without_an_end_is_refused() {
        for (begin, most) in [("MSG ", MESSAGE_LINE_BYTES_MAX), ("INFO ", LINE_BYTES_MAX)] {
            let mut line = begin.as_bytes().to_vec();
            line.resize(most - 1, b'a');
            assert_eq!(frames().decode(&line, 0), Ok(Decode::More(1)));
            assert_eq!(frames().decode(&line, line.len()), Ok(Decode::More(1)));
            line.push(b'a');
            assert!(frames().decode(&line, most - 1).is_err(), "{begin}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_frames_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200), piece in 1usize..50) {
            let _ = cut(&bytes, &[piece]);
        }

        #[test]
        fn pieces_of_a_talk_that_lies_are_as_the_whole(
            at in 0..TALK.len(), byte in any::<u8>(), pieces in prop::collection::vec(1usize..40, 1..10)
        ) {
            let mut talk = TALK.to_vec();
            talk[at] = byte;
            prop_assert_eq!(cut(&talk, &pieces).ok(), cut(&talk, &[talk.len()]).ok());
        }
    }
}
