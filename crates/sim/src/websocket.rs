//! The client half of WebSocket, for the peers of a simulation: messages in fragments of any size,
//! pings in between, and a check of each frame of the server.

use std::any::Any;
use std::rc::Rc;

use ringserve_buf::LeaseMut;
use ringserve_core::{Batch, Transport, TransportConn, TransportError, TransportEvent};
use ringserve_websocket::frame::{DecodeOutcome, Header, Opcode, put_masked};

/// The transport of one client.
#[derive(Clone, Copy, Debug)]
pub struct Client {
    seed: u64,
    /// The layer below marks the end.
    is_above: bool,
}

impl Client {
    /// Creates a client whose behaviour `seed` draws. `is_above` if another transport lies below.
    pub fn new(seed: u64, is_above: bool) -> Client {
        Client { seed, is_above }
    }
}

impl Transport for Client {
    fn begin(&self, out: &mut Vec<u8>) -> Option<Box<dyn TransportConn>> {
        out.extend_from_slice(
            b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
              Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
        );
        let Client { seed, is_above } = *self;
        Some(Box::new(ClientChannel {
            random: seed | 1,
            is_above,
            kept: Vec::new(),
            is_ready: false,
            is_closed: false,
            pings: 0,
            ponged: 0,
        }))
    }
}

struct ClientChannel {
    random: u64,
    is_above: bool,
    /// The received part of a frame, or of the answer to the request.
    kept: Vec<u8>,
    is_ready: bool,
    /// The server's close frame arrived.
    is_closed: bool,
    /// Pings that were sent, and the number of the last one that was answered.
    pings: u32,
    ponged: u32,
}

impl ClientChannel {
    fn below(&mut self, end: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random % end as u64) as usize
    }

    fn put(&mut self, fin: bool, opcode: Opcode, payload: &[u8], out: &mut Vec<u8>) {
        let mask = (self.below(1 << 32) as u32).to_be_bytes();
        put_masked(fin, 0, opcode, payload, mask, out);
    }

    /// The answer to the request, once it is whole.
    fn answer(&mut self) -> bool {
        let Some(end) = self.kept.windows(4).position(|bytes| bytes == b"\r\n\r\n") else { return false };
        let answer = String::from_utf8_lossy(&self.kept[..end]).into_owned();
        assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
        assert!(answer.ends_with("Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo="), "{answer}");
        self.kept.drain(..end + 4);
        self.is_ready = true;
        true
    }

    /// The next frame of the server, once it is whole.
    fn frame(&mut self) -> Option<(Opcode, Vec<u8>)> {
        let DecodeOutcome::Header(header, size) =
            Header::decode(&self.kept).expect("the server keeps the rules")
        else {
            return None;
        };
        assert!(header.fin && header.rsv == 0 && header.mask.is_none(), "{header:?}");
        let end = size + header.len as usize;
        if self.kept.len() < end {
            return None;
        }
        let payload = self.kept.drain(..end).skip(size).collect();
        Some((header.opcode, payload))
    }
}

impl TransportConn for ClientChannel {
    fn decode(&mut self, wire: &mut LeaseMut, out: &mut Vec<u8>) -> TransportEvent {
        self.kept.extend_from_slice(wire);
        *wire = LeaseMut::empty();
        if !self.is_ready {
            return if self.answer() { TransportEvent::Ready } else { TransportEvent::More };
        }
        while let Some((opcode, payload)) = self.frame() {
            assert!(!self.is_closed, "{opcode:?} behind the close frame");
            match opcode {
                Opcode::Binary => {
                    assert!(!payload.is_empty(), "a reply of nothing");
                    return TransportEvent::Plain(LeaseMut::try_from_vec(payload).expect("there is memory"));
                }
                Opcode::Ping => self.put(true, Opcode::Pong, &payload, out),
                Opcode::Pong => {
                    let number = u32::from_be_bytes(payload.try_into().expect("it was asked so"));
                    assert!(
                        (self.ponged + 1..=self.pings).contains(&number),
                        "ping {number} is answered again"
                    );
                    self.ponged = number;
                }
                Opcode::Close => {
                    self.is_closed = true;
                    if !self.is_above {
                        return TransportEvent::Closed;
                    }
                }
                other => panic!("the server sends {other:?}"),
            }
        }
        TransportEvent::More
    }

    fn work(&mut self, _out: &mut Vec<u8>) -> TransportEvent {
        unreachable!("it has no steps")
    }

    fn encode(&mut self, plain: &Batch, out: &mut Vec<u8>) -> Result<(), TransportError> {
        let bytes: Vec<u8> = plain.pieces().flatten().copied().collect();
        let (mut rest, mut begins) = (&bytes[..], true);
        while !rest.is_empty() {
            // A message, or a fragment of one; sometimes an empty one.
            let len = match self.below(4) {
                0 => self.below(8),
                1 => self.below(rest.len() + 1),
                _ => rest.len(),
            };
            let (fragment, more) = rest.split_at(len.min(rest.len()));
            let fin = more.is_empty() || self.below(2) == 0;
            let opcode = if begins { Opcode::Binary } else { Opcode::Continuation };
            self.put(fin, opcode, fragment, out);
            (rest, begins) = (more, fin);
            if self.below(8) == 0 {
                self.pings += 1;
                let number = self.pings.to_be_bytes();
                self.put(true, Opcode::Ping, &number, out);
            }
        }
        Ok(())
    }

    fn finish(&mut self, out: &mut Vec<u8>) {
        self.put(true, Opcode::Close, &1000u16.to_be_bytes(), out);
    }

    fn held_bytes(&self) -> usize {
        self.kept.len()
    }

    fn is_mid_record(&self) -> bool {
        !self.kept.is_empty()
    }

    fn info(&self) -> Option<Rc<dyn Any>> {
        self.is_ready.then(|| Rc::new(()) as Rc<dyn Any>)
    }
}
