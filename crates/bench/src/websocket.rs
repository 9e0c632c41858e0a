//! WebSocket of the generator: it requests it once, then sends messages of bytes in frames that
//! were masked when they were prepared, and compares whole frames with the returned ones. So its
//! end costs as much as plain bytes.
//!
//! The heads of both are implemented here again, and not taken from the product: the measurement
//! has to notice wrong framing.

use std::io::{self, ErrorKind, Read, Write};

/// The most bytes of a message: the limit of the servers.
pub(crate) const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// The request for WebSocket, with the example key of RFC 6455.
const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
    Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n";

/// The answer to that key.
const ACCEPTED: &[u8] = b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=";

/// The most bytes of the answer; those of the servers are below 200.
const ANSWER_BYTES_MAX: usize = 4096;

/// The most fields of the answer.
const FIELDS_MAX: usize = 32;

/// The mask of every frame. No byte is zero, so that a byte which was not unmasked is noticed.
const MASK: [u8; 4] = [0x37, 0xfa, 0x21, 0x3d];

/// The first byte of a whole message of bytes, which is also its last frame.
const BINARY: u8 = 0x82;

/// The flag in the second byte of a masked payload.
const MASKED: u8 = 0x80;

/// The sender of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sender {
    /// The generator, whose frames are masked.
    Client,
    Server,
}

/// Bytes before the payload of a message of `len` bytes.
pub(crate) fn head_bytes(len: usize, sender: Sender) -> usize {
    let length = match len {
        0..126 => 2,
        126..0x1_0000 => 4,
        _ => 10,
    };
    length + if sender == Sender::Client { MASK.len() } else { 0 }
}

/// Appends a message of bytes to `frames`.
pub(crate) fn put(frames: &mut Vec<u8>, payload: &[u8], sender: Sender) {
    let masked = if sender == Sender::Client { MASKED } else { 0 };
    frames.push(BINARY);
    match payload.len() {
        len @ 0..126 => frames.push(masked | len as u8),
        len @ 126..0x1_0000 => {
            frames.push(masked | 126);
            frames.extend_from_slice(&(len as u16).to_be_bytes());
        }
        len => {
            frames.push(masked | 127);
            frames.extend_from_slice(&(len as u64).to_be_bytes());
        }
    }
    match sender {
        Sender::Server => frames.extend_from_slice(payload),
        Sender::Client => {
            frames.extend_from_slice(&MASK);
            frames.extend(payload.iter().enumerate().map(|(at, byte)| masked_byte(at, *byte)));
        }
    }
}

/// Byte `at` of a payload as the generator sends it.
pub(crate) fn masked_byte(at: usize, byte: u8) -> u8 {
    byte ^ MASK[at % MASK.len()]
}

/// The part of a connection before its first message.
#[derive(Default)]
pub(crate) struct Upgrade {
    sent: usize,
    answer: Vec<u8>,
}

impl Upgrade {
    /// Sends the request and reads the answer, to the end if the socket blocks, else as far as
    /// possible.
    pub(crate) fn go_on(&mut self, socket: &mut (impl Read + Write)) -> io::Result<()> {
        while self.sent < REQUEST.len() {
            match socket.write(&REQUEST[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        let mut space = [0; 512];
        loop {
            match socket.read(&mut space) {
                Ok(0) => {
                    return Err(io::Error::other("the server closed a connection that asked for WebSocket"));
                }
                Ok(count) => self.answer.extend_from_slice(&space[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if is_accepted(&self.answer)? {
                return Ok(());
            }
        }
    }
}

/// True if `answer` is a complete acceptance; an error if it is, or becomes, another answer.
fn is_accepted(answer: &[u8]) -> io::Result<bool> {
    let refused = |why: &str| {
        let line = answer.split(|byte| *byte == b'\r').next().unwrap_or_default();
        let line = String::from_utf8_lossy(&line[..line.len().min(80)]).into_owned();
        Err(io::Error::other(format!("the server does not speak WebSocket: {why}: {line:?}")))
    };
    let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
    let mut head = httparse::Response::new(&mut fields);
    let len = match head.parse(answer) {
        Ok(httparse::Status::Complete(len)) => len,
        Ok(httparse::Status::Partial) if answer.len() < ANSWER_BYTES_MAX => return Ok(false),
        Ok(httparse::Status::Partial) => return refused("its answer is too long"),
        Err(error) => return refused(&error.to_string()),
    };
    if head.code != Some(101) {
        return refused("its answer is not 101");
    }
    let accepts = |field: &httparse::Header<'_>| {
        field.name.eq_ignore_ascii_case("sec-websocket-accept") && field.value == ACCEPTED
    };
    if !head.headers.iter().any(accepts) {
        return refused("Sec-WebSocket-Accept is not that of the key");
    }
    if len < answer.len() { refused("it sent more than the answer") } else { Ok(true) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_have_the_shortest_head_and_unmask_to_what_was_put() {
        for (len, head) in [(0, 2), (125, 2), (126, 4), (65_535, 4), (65_536, 10)] {
            let payload: Vec<u8> = (0..len).map(|at: usize| (at % 251) as u8).collect();
            let (mut sent, mut reply) = (Vec::new(), Vec::new());
            put(&mut sent, &payload, Sender::Client);
            put(&mut reply, &payload, Sender::Server);
            assert_eq!((head_bytes(len, Sender::Server), head_bytes(len, Sender::Client)), (head, head + 4));
            assert_eq!((reply.len(), sent.len()), (head + len, head + 4 + len));
            assert_eq!((reply[0], sent[0]), (0x82, 0x82));
            assert_eq!(reply[1] | 0x80, sent[1]);
            assert_eq!(&reply[head..], payload);
            let mask = &sent[head..head + 4];
            let unmasked = sent[head + 4..].iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask);
            assert!(unmasked.eq(payload), "{len}");
        }
    }

    #[test]
    fn another_answer_than_the_right_one_is_refused() {
        let answer = |code: &str, key: &str| {
            format!(
                "HTTP/1.1 {code} Words\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nsec-websocket-accept: {key}\r\n\r\n"
            )
        };
        let right = answer("101", "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
        assert!(is_accepted(right.as_bytes()).unwrap());
        for end in 0..right.len() {
            assert!(!is_accepted(&right.as_bytes()[..end]).unwrap(), "{end}");
        }
        for (wrong, why) in [
            (answer("400", "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="), "not 101: \"HTTP/1.1 400 Words\""),
            (answer("101", "s3pPLMBiTxaQ9kYGzzhZRbK+xOO="), "Sec-WebSocket-Accept"),
            (format!("{right}x"), "more than the answer"),
            ("hello\r\n".to_owned(), "does not speak WebSocket"),
            (format!("HTTP/1.1 101 Words\r\nx: {}", "x".repeat(ANSWER_BYTES_MAX)), "too long"),
        ] {
            let said = is_accepted(wrong.as_bytes()).unwrap_err().to_string();
            assert!(said.contains(why), "{said}");
        }
    }
}
