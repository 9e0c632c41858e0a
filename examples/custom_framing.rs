//! Your own framing: frames with the 9-byte header of HTTP/2 (RFC 9113, section 4.1).
//!
//!     cargo run --release --example custom_framing
//!     printf '\0\0\10\6\0\0\0\0\0pingpong' | nc -N 127.0.0.1 7000 | od -c
//!
//! A PING is acknowledged, every other frame is printed and sent back. The connection preface and
//! everything above frames are left out. `docs/guide/framing.md` goes through this file.

use std::convert::Infallible;
use std::fmt;
use std::io::{Write as _, stdout};
use std::net::SocketAddr;

use clap::Parser;
use ringserve::framing::{Decode, EncodeError, FrameError, Framing, Outbox, Payload};
use ringserve::log::LogOptions;
use ringserve::server::Driver;
use ringserve::{Cx, Frame, Server, Service};

/// Bytes of each header.
pub const HEADER_BYTES: usize = 9;

/// The largest payload that a peer may send without negotiation: the initial
/// SETTINGS_MAX_FRAME_SIZE.
pub const PAYLOAD_BYTES_MAX: usize = 1 << 14;

/// The type of a frame that is answered.
pub const PING: u8 = 6;

/// The flag of the answer.
pub const ACK: u8 = 1;

/// A server that speaks frames with the header of HTTP/2.
#[derive(Parser)]
struct Args {
    /// Address and port to listen on; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:7000", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// Shards; by default one for each CPU.
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// auto, io_uring or epoll.
    #[arg(long, default_value_t, value_name = "NAME")]
    driver: Driver,
}

/// ```text
///   0        24     32      40                          72 bits
///   ├────────┼──────┼───────┼─┬─────────────────────────┼─────────
///   length   type   flags   R  stream                   payload, of which length counts the bytes
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Bytes of payload.
    pub length: usize,
    /// The type.
    pub kind: u8,
    /// Flags, whose meaning depends on the type.
    pub flags: u8,
    /// 31 bits.
    pub stream: u32,
}

impl Header {
    /// The header that `bytes` begin with, if they are enough. The reserved bit is ignored.
    pub fn read(bytes: &[u8]) -> Option<Header> {
        let &[l0, l1, l2, kind, flags, s0, s1, s2, s3] = bytes.first_chunk::<HEADER_BYTES>()?;
        let length = u32::from_be_bytes([0, l0, l1, l2]) as usize;
        Some(Header { length, kind, flags, stream: u32::from_be_bytes([s0 & 0x7F, s1, s2, s3]) })
    }

    /// The header as it is sent, with the reserved bit unset.
    pub fn bytes(self) -> [u8; HEADER_BYTES] {
        let [_, l0, l1, l2] = (self.length as u32).to_be_bytes();
        let [s0, s1, s2, s3] = (self.stream & 0x7FFF_FFFF).to_be_bytes();
        [l0, l1, l2, self.kind, self.flags, s0, s1, s2, s3]
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Header { length, kind, flags, stream } = self;
        write!(f, "type {kind}, flags {flags:#04x}, stream {stream}, {length} bytes")
    }
}

/// The framing. A frame's payload is all of it, header included, since the service needs the
/// header.
#[derive(Clone, Copy, Debug)]
pub struct Http2Frames;

impl Framing for Http2Frames {
    fn decode(&self, bytes: &[u8], _scanned: usize) -> Result<Decode, FrameError> {
        let Some(header) = Header::read(bytes) else { return Ok(Decode::More(HEADER_BYTES - bytes.len())) };
        if header.length > PAYLOAD_BYTES_MAX {
            return Err(FrameError::Malformed("FRAME_SIZE_ERROR: the payload is larger than 16384 bytes"));
        }
        let consumed = HEADER_BYTES + header.length;
        if bytes.len() < consumed {
            return Ok(Decode::More(consumed - bytes.len()));
        }
        Ok(Decode::Frame { skip: 0, len: consumed, consumed })
    }

    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        // A reply is a whole frame too. A wrong length would shift every later one.
        let says = Header::read(payload.bytes()).map(|header| HEADER_BYTES + header.length);
        if says != Some(payload.len()) {
            return Err(EncodeError("not a header and as many bytes as it says"));
        }
        out.payload(payload);
        Ok(())
    }
}

/// Acknowledges PINGs and sends all other frames back.
pub struct Frames;

impl Service for Frames {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        // The framing ensures that there is a header.
        let Some(header) = Header::read(&frame) else { return Ok(()) };
        if header.kind != PING {
            // Not `println!`, which panics if nothing reads.
            let _ = writeln!(stdout(), "{header}");
            cx.reply(frame);
        } else if header.flags & ACK == 0 {
            let answer = Header { flags: ACK, ..header };
            cx.reply([&answer.bytes()[..], &frame[HEADER_BYTES..]].concat());
        }
        Ok(())
    }

    fn malformed(&self, cx: &Cx<'_, ()>, error: &FrameError) {
        let _ = writeln!(stdout(), "{}: {error}", cx.peer());
    }
}

fn main() -> Result<(), ringserve::Error> {
    ringserve::log::init(LogOptions::default())?;
    let args = Args::parse();
    let mut server = Server::bind(args.listen).driver(args.driver).framing(Http2Frames);
    if let Some(shards) = args.shards {
        server = server.shards(shards);
    }
    server.serve(|_shard| Frames)
}

#[cfg(test)]
mod tests {
    use ringserve::testing::{Faults, Sim};

    use super::*;

    #[test]
    fn pings_are_acknowledged_and_other_frames_come_back() {
        Sim::seeds(100).faults(Faults::all()).run(|sim| {
            let server = Server::bind("10.0.0.1:7000").framing(Http2Frames);
            let addr = sim.serve(server.shards(1 + sim.seed() as usize % 4), |_shard| Frames);
            for n in 0..4 {
                sim.client(format!("c{n}"), async move |net| {
                    let mut me = net.connect(addr).await?;
                    let (mut sent, mut expected) = (Vec::new(), Vec::new());
                    for _ in 0..10 {
                        let length = [0, 8, 700, PAYLOAD_BYTES_MAX][net.random() as usize % 4];
                        let kind = 5 + (net.random() % 2) as u8;
                        let header = Header { length, kind, flags: (net.random() % 4) as u8, stream: n };
                        let payload = vec![net.random() as u8; length];
                        sent.extend([&header.bytes()[..], &payload].concat());
                        let flags = if kind == PING { ACK } else { header.flags };
                        // An acknowledgement is not acknowledged.
                        if kind != PING || header.flags & ACK == 0 {
                            expected.extend([&Header { flags, ..header }.bytes()[..], &payload].concat());
                        }
                    }
                    me.send(sent).await?;
                    assert!(me.exactly(expected.len()).await? == expected);
                    // A payload that is too long ends the connection.
                    let header = Header { length: PAYLOAD_BYTES_MAX + 1, kind: 0, flags: 0, stream: n };
                    me.send(header.bytes()).await?;
                    assert_eq!(me.closed().await?, b"");
                    Ok(())
                });
            }
            sim.run_until_done();
        });
    }
}
