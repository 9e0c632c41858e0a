//! Assembly of a peer's frames to messages in their own memory: for connections that are not a
//! listener's, such as those inside HTTP and those of a client.

use crate::close;
use crate::extension::Extension;
pub use crate::fragments::ReadError;
use crate::fragments::{FramePayload, PartialMessage};
use crate::frame::{DecodeOutcome, HEADER_BYTES_MAX, Header, Opcode, Violation};
use crate::messages::Kind;

/// A message or control frame that a peer sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReceivedEvent {
    /// A message. Text was checked.
    Message(Kind, Vec<u8>),
    /// Asks for a pong with the same payload.
    Ping(Vec<u8>),
    /// Answers a ping.
    Pong,
    /// The peer closes: the code and the reason, if it names them.
    Close(Option<(u16, String)>),
}

/// Reads the frames of a peer. Holds a message of at most `message_bytes_max`, as far as it
/// arrived, and nothing between messages. The compressed form of a message may be longer by a
/// seventh, and is held in addition to the message while that is inflated.
#[derive(Debug)]
pub struct Reader {
    bytes_max: usize,
    compresses: bool,
    /// Whether the peer is a server.
    of_server: bool,
    /// The start of a header.
    header: [u8; HEADER_BYTES_MAX],
    have: usize,
    /// The frame whose payload is arriving.
    frame: Option<Frame>,
    /// The message whose first frame began.
    message: Option<PartialMessage>,
    /// The received part of the message.
    payload: Vec<u8>,
    control: Vec<u8>,
    /// Bytes inflated since the last [`take_inflated`](Reader::take_inflated).
    inflated: usize,
}

#[derive(Debug)]
struct Frame {
    opcode: Opcode,
    payload: FramePayload,
}

impl Reader {
    /// Creates a reader of a client whose messages have at most `message_bytes_max` bytes, and may
    /// be compressed if it `compresses`.
    pub fn new(message_bytes_max: usize, compresses: bool) -> Reader {
        Reader {
            bytes_max: message_bytes_max,
            compresses,
            of_server: false,
            header: [0; HEADER_BYTES_MAX],
            have: 0,
            frame: None,
            message: None,
            payload: Vec::new(),
            control: Vec::new(),
            inflated: 0,
        }
    }

    /// Creates a reader of a server whose messages have at most `message_bytes_max` bytes, and are
    /// not compressed.
    pub fn of_server(message_bytes_max: usize) -> Reader {
        Reader { of_server: true, ..Reader::new(message_bytes_max, false) }
    }

    /// Bytes of messages that arrived compressed, since the last call: they cost the server time,
    /// and their client little.
    pub fn take_inflated(&mut self) -> usize {
        std::mem::take(&mut self.inflated)
    }

    /// Bytes of memory that an unfinished message takes.
    pub fn held_bytes(&self) -> usize {
        self.payload.capacity()
    }

    /// Takes bytes from the front, up to the end of the returned item, or all of them. `extension`
    /// is that of the shard, if the connection compresses.
    ///
    /// # Errors
    /// If the peer broke the rules, or memory is lacking. Then nothing more may be read.
    pub fn take(
        &mut self,
        bytes: &mut &[u8],
        mut extension: Option<&mut dyn Extension>,
    ) -> Result<Option<ReceivedEvent>, ReadError> {
        loop {
            if self.frame.is_none() {
                let Some(header) = self.take_header(bytes)? else { return Ok(None) };
                self.begin(header)?;
            }
            let Some(frame) = &mut self.frame else { return Ok(None) };
            let (payload, rest) = bytes.split_at(frame.payload.part_of(bytes.len()));
            *bytes = rest;
            let is_control = frame.opcode.is_control();
            let into = if is_control { &mut self.control } else { &mut self.payload };
            let at = into.len();
            into.try_reserve(payload.len()).map_err(|_| ReadError::NoMemory)?;
            into.extend_from_slice(payload);
            frame.payload.take(&mut into[at..]);
            let is_over = frame.payload.ends_message();
            if !is_control && let Some(message) = &mut self.message {
                message.check(&into[at..], is_over)?;
            }
            if frame.payload.left > 0 {
                return Ok(None);
            }
            let opcode = frame.opcode;
            self.frame = None;
            if is_control {
                return self.control(opcode).map(Some);
            }
            if is_over && let Some(message) = self.message.take() {
                let mut payload = std::mem::take(&mut self.payload);
                if message.is_compressed {
                    payload = message.inflate(&payload, self.bytes_max, 0, extension.take())?;
                    self.inflated += payload.len();
                }
                return Ok(Some(ReceivedEvent::Message(message.kind, payload)));
            }
        }
    }

    fn take_header(&mut self, bytes: &mut &[u8]) -> Result<Option<Header>, Violation> {
        loop {
            match Header::decode(&self.header[..self.have])? {
                DecodeOutcome::Header(header, _) => {
                    self.have = 0;
                    return Ok(Some(header));
                }
                DecodeOutcome::Needs(all) => {
                    let (taken, rest) = bytes.split_at((all - self.have).min(bytes.len()));
                    if taken.is_empty() {
                        return Ok(None);
                    }
                    self.header[self.have..self.have + taken.len()].copy_from_slice(taken);
                    self.have += taken.len();
                    *bytes = rest;
                }
            }
        }
    }

    fn begin(&mut self, header: Header) -> Result<(), Violation> {
        let mask = match self.of_server {
            true => header.check_server().map(|()| [0; 4])?,
            false => header.check_client(self.compresses)?,
        };
        if !header.opcode.is_control() {
            self.message = Some(PartialMessage::next(self.message, &header, self.bytes_max)?);
        }
        self.frame = Some(Frame { opcode: header.opcode, payload: FramePayload::new(&header, mask) });
        Ok(())
    }

    fn control(&mut self, opcode: Opcode) -> Result<ReceivedEvent, ReadError> {
        let payload = std::mem::take(&mut self.control);
        Ok(match opcode {
            Opcode::Ping => ReceivedEvent::Ping(payload),
            Opcode::Close => {
                ReceivedEvent::Close(close::parse(&payload)?.map(|(code, reason)| (code, reason.to_owned())))
            }
            _ => ReceivedEvent::Pong,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extension::TOO_LARGE;
    use crate::frame::put_masked;
    use proptest::prelude::*;

    /// Everything read from `bytes`, which arrive in pieces of `step`.
    fn read(reader: &mut Reader, bytes: &[u8], step: usize) -> Result<Vec<ReceivedEvent>, ReadError> {
        let mut all = Vec::new();
        for mut piece in bytes.chunks(step) {
            while let Some(received) = reader.take(&mut piece, None)? {
                all.push(received);
            }
            assert!(piece.is_empty());
        }
        Ok(all)
    }

    type Sent<'a> = &'a [(bool, Opcode, &'a [u8])];

    fn frames(frames: Sent<'_>) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (fin, opcode, payload) in frames {
            put_masked(*fin, 0, *opcode, payload, [1, 2, 3, 0xf4], &mut bytes);
        }
        bytes
    }

    #[test]
    fn messages_are_the_same_in_any_pieces() {
        let long = "grüße".repeat(20_000);
        let (head, tail) = "grüße".as_bytes().split_at(3);
        let bytes = frames(&[
            (true, Opcode::Text, b""),
            (false, Opcode::Text, head),
            (true, Opcode::Ping, b"there?"),
            (false, Opcode::Continuation, b""),
            (true, Opcode::Pong, b""),
            (true, Opcode::Continuation, tail),
            (true, Opcode::Binary, long.as_bytes()),
            (true, Opcode::Close, b"\x03\xe8bye"),
        ]);
        let expected = [
            ReceivedEvent::Message(Kind::Text, Vec::new()),
            ReceivedEvent::Ping(b"there?".to_vec()),
            ReceivedEvent::Pong,
            ReceivedEvent::Message(Kind::Text, "grüße".into()),
            ReceivedEvent::Message(Kind::Binary, long.clone().into_bytes()),
            ReceivedEvent::Close(Some((1000, "bye".into()))),
        ];
        for step in [1, 2, 3, 7, 1000, bytes.len()] {
            let mut reader = Reader::new(long.len(), false);
            assert!(read(&mut reader, &bytes, step).unwrap() == expected, "{step}");
            assert_eq!(reader.held_bytes(), 0);
        }
    }

    #[test]
    fn what_breaks_the_rules_ends_with_its_code() {
        let violations: [(Sent<'_>, u16); 8] = [
            (&[(true, Opcode::Continuation, b"x")], 1002),
            (&[(false, Opcode::Text, b"x"), (true, Opcode::Text, b"y")], 1002),
            (&[(true, Opcode::Text, b"\xff")], 1007),
            (&[(false, Opcode::Text, b"\xc3"), (true, Opcode::Continuation, b"")], 1007),
            (&[(true, Opcode::Binary, b"12345678901")], 1009),
            (&[(false, Opcode::Binary, b"123456"), (true, Opcode::Continuation, b"78901")], 1009),
            (&[(true, Opcode::Close, b"\x03")], 1002),
            (&[(true, Opcode::Close, b"\x03\xe8\xff")], 1007),
        ];
        for (sent, code) in violations {
            for step in [1, 1000] {
                match read(&mut Reader::new(10, false), &frames(sent), step) {
                    Err(ReadError::Violation(violation)) => assert_eq!(violation.code, code, "{sent:?}"),
                    other => panic!("{sent:?}: {other:?}"),
                }
            }
        }
    }

    #[test]
    fn bad_text_is_found_in_its_fragment() {
        let bytes = frames(&[(false, Opcode::Text, b"\xed\xa0")]);
        assert!(read(&mut Reader::new(10, false), &bytes, bytes.len()).is_err());
    }

    #[test]
    fn control_frames_between_fragments_take_nothing_of_the_message() {
        let mut reader = Reader::new(10, false);
        let mut bytes = &frames(&[(false, Opcode::Binary, b"12345"), (true, Opcode::Ping, &[0; 125])])[..];
        assert_eq!(reader.take(&mut bytes, None), Ok(Some(ReceivedEvent::Ping(vec![0; 125]))));
        let mut bytes = &frames(&[(true, Opcode::Continuation, b"67890")])[..];
        let whole = ReceivedEvent::Message(Kind::Binary, b"1234567890".to_vec());
        assert_eq!(reader.take(&mut bytes, None), Ok(Some(whole)));
    }

    #[cfg(feature = "deflate")]
    #[test]
    fn compressed_messages_are_inflated_up_to_the_limit() {
        use crate::deflate::{Deflate, PerMessageDeflate};
        let mut shard = PerMessageDeflate::new(Deflate::default());
        let message = "grüße ".repeat(1000);
        let compressed = shard.compress(message.as_bytes()).unwrap().to_vec();
        let (head, tail) = compressed.split_at(10);
        let mut bytes = Vec::new();
        put_masked(false, 4, Opcode::Text, head, [9; 4], &mut bytes);
        put_masked(true, 0, Opcode::Continuation, tail, [7; 4], &mut bytes);
        for (limit, whole) in [(message.len(), true), (message.len() - 1, false)] {
            let mut reader = Reader::new(limit, true);
            let received = reader.take(&mut &bytes[..], Some(&mut shard));
            match received {
                Ok(received) => {
                    assert!(whole);
                    assert!(
                        received == Some(ReceivedEvent::Message(Kind::Text, message.clone().into_bytes()))
                    );
                }
                Err(error) => assert_eq!((error, whole), (ReadError::Violation(TOO_LARGE), false)),
            }
        }
        assert!(Reader::new(10_000, false).take(&mut &bytes[..], None).is_err());
    }

    #[cfg(feature = "deflate")]
    #[test]
    fn message_that_does_not_compress_is_taken_up_to_the_limit() {
        use crate::deflate::{Deflate, PerMessageDeflate};
        let mut shard = PerMessageDeflate::new(Deflate::default());
        let message: Vec<u8> = (0..1000u32).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 11) as u8).collect();
        // A stored block, and the start of the one that ends it.
        let len = message.len() as u16;
        let block = [&[0][..], &len.to_le_bytes(), &(!len).to_le_bytes(), &message, &[0]].concat();
        let mut bytes = Vec::new();
        put_masked(true, 4, Opcode::Binary, &block, [9; 4], &mut bytes);
        let mut reader = Reader::new(message.len(), true);
        let received = reader.take(&mut &bytes[..], Some(&mut shard));
        assert!(received == Ok(Some(ReceivedEvent::Message(Kind::Binary, message.clone()))));
        let long = vec![0; message.len() + message.len() / 4];
        bytes.clear();
        put_masked(true, 4, Opcode::Binary, &long, [9; 4], &mut bytes);
        let refused = Reader::new(message.len(), true).take(&mut &bytes[..20], Some(&mut shard));
        assert_eq!(refused, Err(ReadError::Violation(TOO_LARGE)), "before it is here");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), step in 1usize..50) {
            let mut reader = Reader::new(100, false);
            let _ = read(&mut reader, &bytes, step);
            prop_assert!(reader.held_bytes() <= 200);
        }
    }
}
