//! Target `dot_stuffed`: any bytes of an SMTP client, lines and texts.
//!
//! ```text
//!   options (1 byte: begins with a text, bytes_max of a line)  count (1 byte)  cuts (2 bytes each) ...  stream
//! ```
//!
//! A line that begins with `D` switches to a text, as DATA does. However the stream is cut, the
//! lines and texts must equal those of a naive reading of the whole. An unfinished text is passed
//! on, except bytes that may begin its end, or the end of a line.

use ringserve_core::framing::{Cut, DotPart, DotState, DotStuffed, FrameError, Lines, TypedFraming};

use crate::input::Input;

/// A decoded line or text.
#[derive(Debug, PartialEq, Eq)]
enum Said {
    Line(Vec<u8>),
    Text(Vec<u8>),
}

/// The decoded part of a stream.
#[derive(Debug, Default, PartialEq, Eq)]
struct Heard {
    said: Vec<Said>,
    /// A text without its end.
    unfinished: Option<Vec<u8>>,
    /// A line was too long.
    is_refused: bool,
}

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let options = input.byte();
    let begin = if options & 1 == 0 { DotState::Line } else { DotState::TEXT };
    let line_max = [16, 64, 512, usize::MAX][usize::from(options >> 1 & 3)];
    let cuts: Vec<usize> = (0..input.byte() % 32).map(|_| input.wide()).collect();
    let stream = input.rest();
    for cuts in [&[], &cuts[..], &Vec::from_iter(0..stream.len())] {
        let (heard, state, left) = cut_all(begin, stream, line_max, cuts);
        let taken = read_all(begin, &stream[..stream.len() - left.len()], line_max);
        assert_eq!(heard.said, taken.said, "lines and texts");
        assert_eq!(heard.unfinished, taken.unfinished, "the text without its end");
        match state {
            _ if heard.is_refused => assert!(read_all(begin, stream, line_max).is_refused),
            DotState::Line => assert!(!left.contains(&b'\n') && left.len() < line_max, "a line is left"),
            DotState::Text { line_begins: true } => {
                assert!(left.len() < 3 && (b".\r\n".starts_with(left) || left == b"\r"), "{left:x?} is left");
            }
            DotState::Text { line_begins: false } => {
                assert!(left.is_empty() || left == b"\r", "{left:x?} is left")
            }
        }
    }
}

/// Decodes a stream that arrives piece by piece, as a connection does. Returns the state and the
/// remaining bytes too.
fn cut_all<'a>(
    begin: DotState,
    stream: &'a [u8],
    line_max: usize,
    cuts: &[usize],
) -> (Heard, DotState, &'a [u8]) {
    let smtp = DotStuffed::new(Lines::crlf().bytes_max(line_max));
    let (mut heard, mut state) = (Heard::default(), begin);
    if begin == DotState::TEXT {
        heard.unfinished = Some(Vec::new());
    }
    let (mut start, mut scanned, mut wanted) = (0, 0, 1);
    let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (stream.len() + 1)).collect();
    ends.push(stream.len());
    ends.sort_unstable();
    for end in ends {
        while end >= wanted {
            let mut next = state;
            let bytes = &stream[start..end];
            let (skip, len, consumed, part) = match smtp.cut(&mut next, bytes, scanned) {
                Ok(Cut::More(missing)) => {
                    assert!(missing > 0 && next == state, "what waits changes nothing");
                    (scanned, wanted) = (bytes.len(), end + missing);
                    continue;
                }
                Err(error) => {
                    assert_eq!(error, FrameError::OverBytesMax { max: line_max });
                    heard.is_refused = true;
                    return (heard, state, &stream[start..]);
                }
                Ok(Cut::Piece { skip, len, consumed, head }) => {
                    assert_eq!(head, DotPart::Piece);
                    (skip, len, consumed, head)
                }
                Ok(Cut::Frame { skip, len, consumed, head }) => {
                    assert_ne!(head, DotPart::Piece);
                    (skip, len, consumed, head)
                }
            };
            assert!(skip + len <= consumed && (1..=bytes.len()).contains(&consumed));
            let payload = &bytes[skip..][..len];
            state = next;
            match part {
                DotPart::Line => {
                    heard.said.push(Said::Line(payload.to_vec()));
                    if payload.starts_with(b"D") {
                        (state, heard.unfinished) = (DotState::TEXT, Some(Vec::new()));
                    }
                }
                DotPart::Piece => heard.unfinished.as_mut().expect("a text").extend_from_slice(payload),
                DotPart::End => {
                    assert_eq!((len, state), (0, DotState::Line));
                    heard.said.push(Said::Text(heard.unfinished.take().expect("a text")));
                }
            }
            start += consumed;
            (scanned, wanted) = (0, start + 1);
        }
    }
    (heard, state, &stream[start..])
}

/// Reads a stream as a whole.
fn read_all(begin: DotState, mut stream: &[u8], line_max: usize) -> Heard {
    let (mut heard, mut is_text) = (Heard::default(), begin == DotState::TEXT);
    loop {
        if is_text {
            let mut text = Vec::new();
            loop {
                let len = stream.windows(2).position(|end| end == b"\r\n").map_or(stream.len(), |at| at + 2);
                let (line, rest) = stream.split_at(len);
                stream = rest;
                if line == b".\r\n" {
                    break;
                }
                text.extend_from_slice(line.strip_prefix(b".").unwrap_or(line));
                if rest.is_empty() {
                    heard.unfinished = Some(text);
                    return heard;
                }
            }
            heard.said.push(Said::Text(text));
            is_text = false;
            continue;
        }
        let end = stream.iter().position(|byte| *byte == b'\n');
        if end.unwrap_or(stream.len()) >= line_max {
            heard.is_refused = true;
            return heard;
        }
        let Some(end) = end else { return heard };
        let line = &stream[..end];
        heard.said.push(Said::Line(line.strip_suffix(b"\r").unwrap_or(line).to_vec()));
        is_text = line.starts_with(b"D");
        stream = &stream[end + 1..];
    }
}
