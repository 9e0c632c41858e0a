use alloc::rc::Rc;

use memchr::memmem;

use super::{
    AsFramingState, Cut, EncodeError, Encoding, FrameError, Framing, FramingState, Lines, Payload,
    TypedFraming,
};
use crate::bytes::Outbox;
use crate::{LimitError, Limits};

/// Lines, and texts that end at a line with nothing but a dot: commands and messages of SMTP,
/// commands and articles of NNTP.
///
/// A connection begins with lines. A call switches to a text by
/// [`Cx::set_framing_state`](../struct.Cx.html#method.set_framing_state) with [`DotState::TEXT`];
/// after the end of the text lines follow again. A text is handed out in pieces as it arrives, so a
/// large one takes no memory. Dots that the sender put before other dots at the start of a line are
/// left out without a copy, since a piece begins after each.
///
/// Only `\r\n` ends a line of a text, and only `\r\n.\r\n` ends the text (the first `\r\n` may end
/// the line before it). A server that took `\n.\n` for an end too would let a peer smuggle a second
/// message past a server that does not.
///
/// The session holds the state in a [`FramingState`], or is a pair of that and the rest of the
/// session.
///
/// A piece has at most [`Limits::frame_bytes_max`] bytes. A text may have any number; the service
/// counts them.
///
/// ```
/// use ringserve::framing::{Cut, DotPart, DotState, DotStuffed, Lines, TypedFraming};
///
/// let (smtp, mut state) = (DotStuffed::new(Lines::crlf()), DotState::TEXT);
/// let mut text = &b"a dot:\r\n..\r\n.\r\nQUIT\r\n"[..];
/// let mut next = |text: &mut &[u8]| match smtp.cut(&mut state, text, 0).unwrap() {
///     Cut::Piece { skip, len, consumed, head } | Cut::Frame { skip, len, consumed, head } => {
///         let found = text[skip..][..len].to_vec();
///         *text = &text[consumed..];
///         (found, head)
///     }
///     Cut::More(_) => panic!("all is there"),
/// };
/// assert_eq!(next(&mut text), (b"a dot:\r\n".to_vec(), DotPart::Piece));
/// assert_eq!(next(&mut text), (b".\r\n".to_vec(), DotPart::Piece));
/// assert_eq!(next(&mut text), (b"".to_vec(), DotPart::End));
/// assert_eq!(next(&mut text), (b"QUIT".to_vec(), DotPart::Line));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DotStuffed {
    lines: Lines,
}

/// The state of a [`DotStuffed`] connection: the meaning of its next bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DotState {
    /// A line.
    #[default]
    Line,
    /// The rest of a text.
    Text {
        /// True if the next bytes begin a line.
        line_begins: bool,
    },
}

impl DotState {
    /// The start of a text.
    pub const TEXT: DotState = DotState::Text { line_begins: true };
}

/// The kind of a [`DotStuffed`] frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DotPart {
    /// A line, without its end.
    #[default]
    Line,
    /// A part of a text, with the ends of its lines.
    Piece,
    /// The end of a text. It has no bytes.
    End,
}

impl DotStuffed {
    /// Makes the framing with these lines. Replies are written as `lines` writes them.
    pub const fn new(lines: Lines) -> DotStuffed {
        DotStuffed { lines }
    }
}

impl TypedFraming for DotStuffed {
    type State = DotState;
    type Head = DotPart;

    fn cut(&self, state: &mut DotState, bytes: &[u8], scanned: usize) -> Result<Cut<DotPart>, FrameError> {
        let DotState::Text { line_begins } = *state else {
            return Ok(self.lines.decode(bytes, scanned)?.with_head(DotPart::Line));
        };
        if line_begins && bytes.starts_with(b".\r\n") {
            *state = DotState::Line;
            return Ok(Cut::Frame { skip: 3, len: 0, consumed: 3, head: DotPart::End });
        } else if line_begins && b".\r\n".starts_with(bytes) {
            return Ok(Cut::More(1));
        }
        let skip = usize::from(line_begins && bytes.starts_with(b"."));
        // A piece ends before a line that begins with a dot. The possible first half of a line end
        // waits for the other half.
        let dot = memmem::find(&bytes[skip..], b"\r\n.").map(|at| skip + at + 2);
        let consumed = dot.unwrap_or(bytes.len() - usize::from(bytes.ends_with(b"\r")));
        if consumed == 0 {
            return Ok(Cut::More(1));
        }
        *state = DotState::Text { line_begins: bytes[..consumed].ends_with(b"\r\n") };
        Ok(Cut::Piece { skip, len: consumed - skip, consumed, head: DotPart::Piece })
    }

    fn write(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        self.lines.encode(payload, out)
    }

    fn check_limits(&self, limits: &Limits) -> Result<(), LimitError> {
        self.lines.check(limits)
    }

    fn reply_encoding(self: &Rc<Self>) -> Encoding {
        Encoding::of(&self.lines)
    }
}

/// A session of the state and another value.
impl<S> AsFramingState<DotState> for (FramingState<DotState>, S) {
    fn framing_state(&self) -> &FramingState<DotState> {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use alloc::borrow::ToOwned;
    use alloc::string::ToString;
    use alloc::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    const SMTP: DotStuffed = DotStuffed::new(Lines::crlf());

    /// All pieces of a text that arrives `step` bytes at a time, and the bytes that it took.
    fn received(sent: &[u8], step: usize) -> (Vec<u8>, usize) {
        let (mut state, mut text, mut at, mut end) = (DotState::TEXT, Vec::new(), 0, 0);
        while end < sent.len() {
            end = (end + step).min(sent.len());
            while at < end {
                let mut next = state;
                match SMTP.cut(&mut next, &sent[at..end], 0).unwrap() {
                    Cut::More(missing) => {
                        assert!(missing > 0);
                        break;
                    }
                    Cut::Piece { skip, len, consumed, head: DotPart::Piece } => {
                        assert!(skip + len <= consumed && consumed > 0);
                        text.extend_from_slice(&sent[at + skip..][..len]);
                        at += consumed;
                    }
                    Cut::Frame { len: 0, consumed, head: DotPart::End, .. } => {
                        assert_eq!(next, DotState::Line);
                        return (text, at + consumed);
                    }
                    other => panic!("{other:?}"),
                }
                state = next;
            }
        }
        (text, at)
    }

    #[test]
    fn text_is_the_same_however_it_is_cut() {
        for (sent, text) in [
            ("\r\n.\r\n", "\r\n"),
            (".\r\n", ""),
            ("..\r\n.\r\n", ".\r\n"),
            ("a\r\n..b\r\n...\r\n.c\r\n.\r\nQUIT\r\n", "a\r\n.b\r\n..\r\nc\r\n"),
            // None of these ends a text, though other servers take them for an end.
            ("a\n.\n.\r.\r\n\r\n.\r.\r\n.\n\r\n.\r\n", "a\n.\n.\r.\r\n\r\n\r.\r\n\n\r\n"),
            ("\r\r\n\r\r\n.\r\r\n.\r\n", "\r\r\n\r\r\n\r\r\n"),
        ] {
            for step in 1..sent.len() {
                let (found, consumed) = received(sent.as_bytes(), step);
                assert_eq!(
                    found.escape_ascii().to_string(),
                    text.escape_default().to_string(),
                    "{sent:?} by {step}"
                );
                let rest = sent.split_once("\r\n.\r\nQUIT").map_or(0, |_| "QUIT\r\n".len());
                assert_eq!(consumed, sent.len() - rest, "{sent:?} by {step}");
            }
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_as_it_was_before_it_was_stuffed(
            parts in prop::collection::vec(prop::sample::select(&[".", "x", "\r\n", "\r", "\n", "..", "\r\n."][..]), 0..30),
            step in 1..9_usize,
        ) {
            let text = parts.concat() + "\r\n";
            let stuffed = alloc::format!("\r\n{text}").replace("\r\n.", "\r\n..")[2..].to_owned() + ".\r\n";
            let (found, consumed) = received((stuffed.clone() + "NOOP\r\n").as_bytes(), step);
            prop_assert_eq!(found, text.as_bytes());
            prop_assert_eq!(consumed, stuffed.len());
        }
    }

    #[test]
    fn lines_have_their_bound_and_a_text_has_none() {
        let short = DotStuffed::new(Lines::crlf().bytes_max(10));
        assert!(short.cut(&mut DotState::Line, &[b'x'; 20], 0).is_err());
        assert!(matches!(
            short.cut(&mut DotState::TEXT.clone(), &[b'x'; 20], 0),
            Ok(Cut::Piece { len: 20, .. })
        ));
        assert_eq!(SMTP.cut(&mut DotState::TEXT.clone(), b"", 0), Ok(Cut::More(1)));
        assert!(short.check_limits(&Limits::default().frame_bytes_max(9)).is_err());
    }
}
