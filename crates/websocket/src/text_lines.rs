//! Messages of text as the lines of a service that is not aware of messages.

use std::borrow::Cow;

use ringserve_core::Outbox;
use ringserve_core::framing::{
    Cut, Decode, EncodeError, FrameError, Framing, InPlace, Payload, TypedFraming,
};

use crate::close;
use crate::messages::{Kind, Messages};
use crate::utf8;

/// A framing in which each message of text is a line, without its end, and each line of a reply is
/// a message of text: for a service of lines that has WebSocket clients in addition to those of
/// [`Lines`](ringserve_core::framing::Lines). Only for listeners that speak WebSocket.
///
/// * One line end at the end of a message is removed, as from a line. A message with one inside
///   would become several lines where it is repeated, so its connection is closed with the code
///   1008; a message of bytes with 1003. A message is at most as long as
///   [`Limits::frame_bytes_max`](ringserve_core::Limits::frame_bytes_max), less five bytes.
/// * A reply with line ends inside is several messages, as it is several lines elsewhere. Bytes
///   that are not UTF-8 are replaced by U+FFFD, since a WebSocket client would end its connection
///   for them. Bytes that a service writes past its framing (`Cx::write`) are no message.
///
/// ```
/// use ringserve_core::framing::encode_to_vec;
/// use ringserve_websocket::TextLines;
///
/// assert_eq!(encode_to_vec(&TextLines, b"hi"), Ok(b"\x81\x02hi".to_vec()));
/// assert_eq!(encode_to_vec(&TextLines, b"one\ntwo"), Ok(b"\x81\x03one\x81\x03two".to_vec()));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TextLines;

/// The line without its end.
fn without_end(line: &[u8]) -> &[u8] {
    let Some(line) = line.strip_suffix(b"\n") else { return line };
    line.strip_suffix(b"\r").unwrap_or(line)
}

/// True if the bytes are one message as they are.
fn is_a_message(bytes: &[u8]) -> bool {
    !bytes.contains(&b'\n') && utf8::is_text(bytes)
}

/// The lines of a reply, as messages of text.
#[cold]
fn put_lines(reply: &[u8], out: &mut Outbox<'_>) {
    let mut lines = reply.split(|byte| *byte == b'\n').peekable();
    while let Some(line) = lines.next() {
        // The last line has the end that the framing of lines would give it.
        let line = if lines.peek().is_some() { line.strip_suffix(b"\r").unwrap_or(line) } else { line };
        let text: Cow<'_, str> = String::from_utf8_lossy(line);
        out.put(&Kind::Text.header(text.len()));
        out.put(text.as_bytes());
    }
}

impl Framing for TextLines {
    #[inline]
    fn decode(&self, bytes: &[u8], _scanned: usize) -> Result<Decode, FrameError> {
        match Messages::text().cut(&mut (), bytes, 0)? {
            Cut::Frame { head: Kind::Binary, .. } => {
                Err(FrameError::coded(close::UNSUPPORTED.into(), "a message of bytes"))
            }
            Cut::Frame { skip, len, consumed, head: Kind::Text } => {
                let line = without_end(&bytes[skip..skip + len]);
                if line.contains(&b'\n') {
                    return Err(FrameError::coded(close::POLICY.into(), "a message of several lines"));
                }
                Ok(Decode::Frame { skip, len: line.len(), consumed })
            }
            Cut::More(missing) => Ok(Decode::More(missing)),
            _ => Err(FrameError::Malformed("an invalid mark")),
        }
    }

    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        match is_a_message(payload.bytes()) {
            true => {
                out.put(&Kind::Text.header(payload.len()));
                out.payload(payload);
            }
            false => put_lines(payload.bytes(), out),
        }
        Ok(())
    }

    fn header_room(&self) -> usize {
        Messages::text().room_before()
    }

    fn encode_written(&self, written: &mut InPlace<'_>) -> Result<(), EncodeError> {
        if is_a_message(&written.payload()) {
            written.set_header(&Kind::Text.header(written.payload_len()));
            return Ok(());
        }
        let (reply, mut out) = written.take();
        put_lines(&reply, &mut out);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use ringserve_core::framing::encode_to_vec;

    use super::*;
    use crate::messages::{MARK_BYTES, mark};

    fn decoded(kind: Kind, message: &[u8]) -> Result<Decode, FrameError> {
        TextLines.decode(&[&mark(kind, message.len())[..], message].concat(), 0)
    }

    fn frame(len: usize, of: usize) -> Result<Decode, FrameError> {
        Ok(Decode::Frame { skip: MARK_BYTES, len, consumed: MARK_BYTES + of })
    }

    #[test]
    fn message_of_text_is_a_line_without_its_end() {
        assert_eq!(decoded(Kind::Text, b"hello"), frame(5, 5));
        assert_eq!(decoded(Kind::Text, b"hello\n"), frame(5, 6));
        assert_eq!(decoded(Kind::Text, b"hello\r\n"), frame(5, 7));
        // A line also keeps a `\r` that no `\n` follows.
        assert_eq!(decoded(Kind::Text, b"hello\r"), frame(6, 6));
        assert_eq!(decoded(Kind::Text, b"hello\r\r\n"), frame(6, 8));
        assert_eq!(decoded(Kind::Text, b""), frame(0, 0));
        assert_eq!(TextLines.decode(&mark(Kind::Text, 3), 0), Ok(Decode::More(3)));
    }

    #[test]
    fn message_that_is_not_one_line_is_none() {
        let code = |kind, message: &[u8]| decoded(kind, message).unwrap_err().code();
        assert_eq!(code(Kind::Text, b"hello\nworld"), Some(1008));
        assert_eq!(code(Kind::Text, b"hello\n\n"), Some(1008));
        assert_eq!(code(Kind::Binary, b"hello"), Some(1003));
    }

    #[test]
    fn each_line_of_a_reply_is_a_message_of_text() {
        let encoded = |reply: &[u8]| encode_to_vec(&TextLines, reply).unwrap();
        assert_eq!(encoded(b""), b"\x81\x00");
        assert_eq!(encoded(b"one\r\ntwo"), b"\x81\x03one\x81\x03two");
        assert_eq!(encoded(b"one\n"), b"\x81\x03one\x81\x00");
        assert_eq!(encoded(b"o\xffe"), b"\x81\x05o\xef\xbf\xbde");
    }
}
