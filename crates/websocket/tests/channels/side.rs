//! A channel, and a client that writes frames by hand.

use std::rc::Rc;

use ringserve_buf::LeaseMut;
use ringserve_core::{Batch, CloseReason, Transport, TransportConn, TransportError, TransportEvent};
use ringserve_websocket::frame::{DecodeOutcome, Header, Opcode, put_masked};
use ringserve_websocket::{WebSocketInfo, WebSocketOptions, WebSocketTransport};

pub const MASK: [u8; 4] = [0x12, 0x34, 0x56, 0x78];

/// A request with these further fields.
pub fn request(target: &str, fields: &str) -> Vec<u8> {
    let head = format!(
        "GET {target} HTTP/1.1\r\nHost: example.org\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n{fields}\r\n"
    );
    head.into_bytes()
}

/// A frame of the client.
pub fn frame(fin: bool, opcode: Opcode, payload: &[u8]) -> Vec<u8> {
    let mut wire = Vec::new();
    put_masked(fin, 0, opcode, payload, MASK, &mut wire);
    wire
}

/// The server's side of a connection.
pub struct Side {
    pub channel: Box<dyn TransportConn>,
    /// Unread output of the channel.
    pub out: Vec<u8>,
    /// Plaintext from the channel, of all pieces.
    pub plain: Vec<u8>,
    pub pieces: usize,
    pub is_ready: bool,
    pub is_closed: bool,
    pub speaks: usize,
    pub fault: Option<CloseReason>,
}

impl Side {
    pub fn new(transport: &WebSocketTransport) -> Side {
        let mut out = Vec::new();
        let channel = transport.begin(&mut out).unwrap();
        Side {
            channel,
            out,
            plain: Vec::new(),
            pieces: 0,
            is_ready: false,
            is_closed: false,
            speaks: 0,
            fault: None,
        }
    }

    /// Creates an open channel, whose answer was read.
    pub fn open(transport: &WebSocketTransport) -> Side {
        let mut side = Side::new(transport);
        side.takes(&request("/", ""));
        assert!(side.is_ready && side.fault.is_none());
        side.out.clear();
        side
    }

    pub fn stream() -> Side {
        Side::open(&WebSocketTransport::stream(&WebSocketOptions::new()))
    }

    pub fn messages() -> Side {
        Side::open(&WebSocketTransport::messages(&WebSocketOptions::new()))
    }

    /// Passes bytes to the channel together.
    pub fn takes(&mut self, bytes: &[u8]) {
        let mut wire = LeaseMut::try_copy_of(bytes).unwrap();
        while self.fault.is_none() && !self.is_closed {
            match self.channel.decode(&mut wire, &mut self.out) {
                TransportEvent::Plain(plain) => {
                    assert!(self.is_ready && !plain.is_empty());
                    self.plain.extend_from_slice(&plain);
                    self.pieces += 1;
                }
                TransportEvent::More => {
                    assert!(wire.is_empty());
                    break;
                }
                TransportEvent::Ready => assert!(!std::mem::replace(&mut self.is_ready, true)),
                TransportEvent::Speaks => self.speaks += 1,
                TransportEvent::Closed => self.is_closed = true,
                TransportEvent::Fault(TransportError(reason)) => self.fault = Some(reason),
                TransportEvent::Work => panic!("there is no step"),
            }
        }
    }

    /// Passes bytes to the channel one by one.
    pub fn takes_each(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.takes(&[*byte]));
    }

    /// The bytes of `plain` on the wire.
    pub fn sends(&mut self, plain: &[u8]) -> Vec<u8> {
        let mut batch = Batch::new();
        batch.put(plain);
        if self.channel.encode_in_place(&mut batch) {
            return batch.pieces().flatten().copied().collect();
        }
        let mut out = Vec::new();
        self.channel.encode(&batch, &mut out).unwrap();
        out
    }

    /// The bytes that the channel sends by itself.
    pub fn says(&mut self) -> Vec<u8> {
        let mut said = Vec::new();
        self.channel.write_control(&mut said);
        said
    }

    /// The bytes that the channel sends at the end.
    pub fn ends(&mut self, reason: CloseReason) -> Vec<u8> {
        let mut said = Vec::new();
        self.channel.on_close(reason);
        self.channel.finish(&mut said);
        said
    }

    pub fn info(&self) -> Rc<WebSocketInfo> {
        self.channel.info_on_demand().unwrap().downcast().unwrap()
    }

    /// The code of the close frame that the channel sent.
    pub fn close_code(&self) -> Option<u16> {
        close_code(&self.out)
    }

    /// The code of the violation that ended the connection.
    pub fn violation(&self) -> Option<u32> {
        match self.fault? {
            CloseReason::BadFrame(error) => error.code(),
            other => panic!("{other}"),
        }
    }
}

/// The code of the one close frame in these bytes.
pub fn close_code(bytes: &[u8]) -> Option<u16> {
    let Ok(DecodeOutcome::Header(header, size)) = Header::decode(bytes) else { return None };
    assert_eq!((header.opcode, header.fin, header.rsv, header.mask), (Opcode::Close, true, 0, None));
    assert_eq!(header.len as usize, bytes.len() - size);
    bytes[size..].first_chunk().map(|code| u16::from_be_bytes(*code))
}
