//! A received message.

use std::fmt;

use ringserve_server::Frame;

use super::frames::number;
use super::headers::Headers;

/// A received message. Its parts lie in the frame that was received: nothing is copied.
///
/// It pins a receive buffer, as each [`Frame`] does: 64 bytes can hold 16 KiB. Copy what is kept
/// for long.
pub struct Message {
    frame: Frame,
    subject: Span,
    /// Empty without one.
    reply: Span,
    /// The place where the headers begin, and the one where they end and the payload begins.
    headers: u32,
    payload: u32,
}

#[derive(Clone, Copy, Default)]
struct Span {
    from: u32,
    to: u32,
}

impl Message {
    /// The subject to which it was published. Empty if it is no UTF-8, which NATS does not check.
    pub fn subject(&self) -> &str {
        std::str::from_utf8(self.subject_bytes()).unwrap_or("")
    }

    /// The bytes of the subject.
    pub fn subject_bytes(&self) -> &[u8] {
        self.bytes(self.subject)
    }

    /// The subject for an answer, if the sender waits for one.
    /// [`Nats::respond`](crate::Nats::respond) answers.
    pub fn reply(&self) -> Option<&str> {
        std::str::from_utf8(self.bytes(self.reply)).ok().filter(|reply| !reply.is_empty())
    }

    /// The payload.
    pub fn payload(&self) -> &[u8] {
        &self.frame[self.payload as usize..]
    }

    /// The headers.
    pub fn headers(&self) -> Headers<'_> {
        Headers::new(&self.frame[self.headers as usize..self.payload as usize])
    }

    /// True for the answer of a server that no service listens to what was asked.
    pub(crate) fn is_no_responders(&self) -> bool {
        self.payload().is_empty() && self.headers().status().is_some_and(|status| status.code == 503)
    }

    fn bytes(&self, span: Span) -> &[u8] {
        &self.frame[span.from as usize..span.to as usize]
    }

    /// The number of the subscription, and the message. `None` for a line that is none.
    pub(crate) fn parse(frame: Frame) -> Option<(u64, Message)> {
        let line_end = memchr::memchr(b'\n', &frame)?;
        let has_headers = frame.starts_with(b"H");
        let (words, count) = words(&frame[..line_end - 1], if has_headers { 5 } else { 4 })?;
        let word = |at: usize| &frame[words[at].from as usize..words[at].to as usize];
        let fixed = if has_headers { 4 } else { 3 };
        let reply = match count.checked_sub(fixed)? {
            0 => Span::default(),
            1 => words[2],
            _ => return None,
        };
        let sid = number(word(1))?;
        let headers = u32::try_from(line_end + 1).ok()?;
        let header_bytes = match has_headers {
            true => u32::try_from(number(word(count - 2))?).ok()?,
            false => 0,
        };
        let payload = headers.checked_add(header_bytes)?;
        if payload as usize > frame.len() {
            return None;
        }
        Some((sid, Message { frame, subject: words[0], reply, headers, payload }))
    }
}

/// The words of a line behind its operation, at most five.
fn words(line: &[u8], behind: usize) -> Option<([Span; 5], usize)> {
    let (mut words, mut count) = ([Span::default(); 5], 0);
    let mut from = behind;
    let mut word = |from: usize, to: usize| {
        if to > from {
            *words.get_mut(count)? = Span { from: u32::try_from(from).ok()?, to: u32::try_from(to).ok()? };
            count += 1;
        }
        Some(())
    };
    for (at, byte) in line.iter().enumerate().skip(behind) {
        if *byte == b' ' {
            word(from, at)?;
            from = at + 1;
        }
    }
    word(from, line.len())?;
    Some((words, count))
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("subject", &self.subject())
            .field("reply", &self.reply())
            .field("headers", &self.headers())
            .field("payload_bytes", &self.payload().len())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ringserve::testing::frame;

    use super::*;

    fn parsed(bytes: &[u8]) -> Option<(u64, Message)> {
        Message::parse(frame(bytes))
    }

    #[test]
    fn parts_of_a_message_are_found() {
        let (sid, message) = parsed(b"MSG a.b 12 5\r\nhe\r\no").unwrap();
        assert_eq!((sid, message.subject(), message.reply()), (12, "a.b", None));
        assert_eq!(message.payload(), b"he\r\no");
        assert!(message.headers().is_empty());
        let (sid, message) = parsed(b"HMSG a  3 _INBOX.1 18 23\r\nNATS/1.0\r\nb: c\r\n\r\nhello").unwrap();
        assert_eq!((sid, message.subject(), message.reply()), (3, "a", Some("_INBOX.1")));
        assert_eq!((message.payload(), message.headers().get("b")), (&b"hello"[..], Some("c")));
        let (_, none) = parsed(b"HMSG a 0 16 16\r\nNATS/1.0 503\r\n\r\n").unwrap();
        assert!(none.is_no_responders());
        assert!(!parsed(b"HMSG a 0 16 17\r\nNATS/1.0 503\r\n\r\nx").unwrap().1.is_no_responders());
    }

    #[test]
    fn lines_that_are_no_message_are_refused() {
        for line in [
            "MSG a 5",
            "MSG a x 5",
            "MSG a 1 b c 5",
            "MSG a 1 2 3 4 5 5",
            "HMSG a 1 5",
            "HMSG a 1 9 5",
            "MSG  5",
        ] {
            assert!(parsed(format!("{line}\r\nhello").as_bytes()).is_none(), "{line}");
        }
        let (_, message) = parsed(b"MSG \xff 1 \xfe 0\r\n").unwrap();
        assert_eq!((message.subject(), message.reply(), message.subject_bytes()), ("", None, &b"\xff"[..]));
    }

    proptest! {
        #[test]
        fn any_line_is_a_message_or_none(line in "[HM]?MSG [ a0-9*.]{0,40}", rest in prop::collection::vec(any::<u8>(), 0..40)) {
            let mut bytes = line.into_bytes();
            bytes.extend_from_slice(b"\r\n");
            bytes.extend_from_slice(&rest);
            if let Some((_, message)) = parsed(&bytes) {
                let _ = (message.subject(), message.reply(), message.payload(), message.headers().iter().count());
            }
        }
    }
}
