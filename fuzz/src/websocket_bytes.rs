//! Target `websocket_bytes`: any bytes of a WebSocket client.
//!
//! ```text
//!   options (1 byte: marks, whether the request was answered before)  size of pieces (1 byte)  stream
//! ```
//!
//! However they are cut, the messages, the answers and the end of the connection are the same,
//! except for the start of a message that ends it; kept bytes are bounded, and a mark describes the
//! bytes after it.

use ringserve_buf::LeaseMut;
use ringserve_core::framing::{Cut, TypedFraming};
use ringserve_core::{CloseReason, Transport, TransportConn, TransportError, TransportEvent};
use ringserve_websocket::frame::{DecodeOutcome, Header, Opcode};
use ringserve_websocket::{Kind, Messages, WebSocketOptions, WebSocketTransport};

/// The most bytes of a message. The buffer of one that is put together doubles.
const MESSAGE_BYTES_MAX: usize = 4096;

/// The head of a request is kept up to 16 KiB, in a buffer that doubles.
const KEPT_MAX: usize = 2 * 16 * 1024 + 256;

const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
    Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n";

/// The results of a stream.
#[derive(Debug, Default, PartialEq, Eq)]
struct Heard {
    plain: Vec<u8>,
    said: Vec<u8>,
    is_ready: bool,
    is_closed: bool,
    fault: Option<CloseReason>,
    pong: Vec<u8>,
}

/// Runs one input.
pub fn run(input: &[u8]) {
    let [options, size, stream @ ..] = input else { return };
    let (marks, answered) = (options & 1 != 0, options & 2 != 0);
    let whole = hear(marks, answered, stream, stream.len().max(1));
    let mut pieces = hear(marks, answered, stream, usize::from(*size).max(1));
    if whole.fault.is_some() && pieces.plain.starts_with(&whole.plain) {
        // The start of a text is passed on before its end shows that it is not UTF-8.
        pieces.plain.truncate(whole.plain.len());
    }
    assert_eq!(pieces, whole, "the stream means something else in pieces");
    if marks {
        check_messages(&whole);
    }
    if whole.is_closed || whole.fault.is_some() {
        assert!(!whole.said.is_empty() || whole.is_closed, "the peer is not told why it ends");
    }
}

/// Makes a channel take the stream in pieces of `size` bytes.
fn hear(marks: bool, answered: bool, stream: &[u8], size: usize) -> Heard {
    let options = WebSocketOptions::new().message_bytes_max(MESSAGE_BYTES_MAX);
    let transport = match marks {
        true => WebSocketTransport::messages(&options),
        false => WebSocketTransport::stream(&options),
    };
    let mut channel = transport.begin(&mut Vec::new()).expect("memory");
    let mut heard = Heard::default();
    if answered {
        feed(&mut *channel, REQUEST, &mut heard);
        assert!(heard.is_ready && heard.fault.is_none(), "a request that is in order");
        heard.said.clear();
    }
    for piece in stream.chunks(size) {
        let goes_on = feed(&mut *channel, piece, &mut heard);
        assert!(channel.held_bytes() <= KEPT_MAX, "{} bytes are kept", channel.held_bytes());
        if !goes_on {
            assert_eq!(channel.held_bytes(), 0, "of a connection that is over");
            break;
        }
    }
    channel.write_control(&mut heard.pong);
    if heard.is_ready && heard.fault.is_none() {
        let mut said = Vec::new();
        channel.on_close(CloseReason::Closed);
        channel.finish(&mut said);
        let Ok(DecodeOutcome::Header(header, size)) = Header::decode(&said) else {
            panic!("{said:x?} is no frame")
        };
        assert_eq!((header.opcode, size + header.len as usize), (Opcode::Close, said.len()));
    }
    heard
}

/// Passes bytes to the channel. False once it has reported its end.
fn feed(channel: &mut dyn TransportConn, bytes: &[u8], heard: &mut Heard) -> bool {
    let mut wire = LeaseMut::try_copy_of(bytes).expect("memory");
    loop {
        match channel.decode(&mut wire, &mut heard.said) {
            TransportEvent::Plain(plain) => {
                assert!(heard.is_ready && !plain.is_empty(), "{} bytes", plain.len());
                heard.plain.extend_from_slice(&plain);
            }
            TransportEvent::Ready => assert!(!std::mem::replace(&mut heard.is_ready, true), "ready twice"),
            TransportEvent::Speaks => {}
            TransportEvent::More if wire.is_empty() => return true,
            TransportEvent::More => panic!("bytes are left, and more is wanted"),
            TransportEvent::Work => panic!("there are no steps"),
            TransportEvent::Closed => {
                heard.is_closed = true;
                return false;
            }
            TransportEvent::Fault(TransportError(reason)) => {
                heard.fault = Some(reason);
                return false;
            }
        }
    }
}

/// Checks that each mark describes the bytes after it, except the last one of a connection that
/// ended.
fn check_messages(heard: &Heard) {
    let mut rest = &heard.plain[..];
    while !rest.is_empty() {
        match Messages::default().cut(&mut (), rest, 0).expect("each mark is one") {
            Cut::Frame { skip, len, consumed, head } => {
                assert!(len <= MESSAGE_BYTES_MAX, "a message of {len} bytes");
                let payload = &rest[skip..skip + len];
                assert!(head == Kind::Binary || std::str::from_utf8(payload).is_ok(), "a text that is none");
                rest = &rest[consumed..];
            }
            Cut::More(missing) => {
                assert!(rest.len() + missing <= MESSAGE_BYTES_MAX + 5);
                break;
            }
            Cut::Piece { .. } => panic!("messages come whole"),
        }
    }
}
