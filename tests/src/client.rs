//! A peer: a blocking socket with bounds, and frames of a 4-byte length.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::net::{ClientStream, Net};
use crate::{SOON, order};

pub struct Client {
    pub stream: ClientStream,
}

/// The end of a connection from its peer's side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Fin,
    Reset,
}

impl Client {
    #[track_caller]
    pub fn connect(addr: SocketAddr) -> Client {
        Client::of(Net::Local.connect(addr).expect("the server accepts"))
    }

    #[track_caller]
    pub fn connect_unix(path: impl AsRef<Path>) -> Client {
        Client::of(UnixStream::connect(path).expect("the server accepts"))
    }

    /// Creates a client whose kernel holds few unread bytes.
    #[track_caller]
    pub fn with_small_window(addr: SocketAddr) -> Client {
        Client::of(Net::Local.connect_with_small_window(addr).expect("the server accepts"))
    }

    pub fn of(stream: impl Into<ClientStream>) -> Client {
        let stream = stream.into();
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream.set_write_timeout(Some(SOON)).unwrap();
        stream.set_nodelay(true).unwrap();
        Client { stream }
    }

    pub fn local_addr(&self) -> SocketAddr {
        self.stream.local_addr().unwrap()
    }

    #[track_caller]
    pub fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("the server reads");
    }

    /// Writes until the server's and the own kernel accept no more. Returns how many bytes they
    /// took.
    pub fn write_until_stuck(&mut self, bytes: &[u8], quiet: Duration) -> usize {
        self.stream.set_write_timeout(Some(quiet)).unwrap();
        let mut written = 0;
        while written < bytes.len() {
            match self.stream.write(&bytes[written..]) {
                Ok(n) => written += n,
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => break,
                Err(error) => panic!("write: {error}"),
            }
        }
        self.stream.set_write_timeout(Some(SOON)).unwrap();
        written
    }

    #[track_caller]
    pub fn read(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).expect("the server answers");
        bytes
    }

    /// Sends one frame.
    #[track_caller]
    pub fn send(&mut self, payload: impl AsRef<[u8]>) {
        self.write(&frame(payload));
    }

    /// Receives one frame.
    #[track_caller]
    pub fn recv(&mut self) -> Vec<u8> {
        let len: [u8; 4] = self.read(4).try_into().unwrap();
        self.read(u32::from_be_bytes(len) as usize)
    }

    /// Sends a frame and receives one.
    #[track_caller]
    pub fn ask(&mut self, payload: impl AsRef<[u8]>) -> Vec<u8> {
        self.send(payload);
        self.recv()
    }

    /// Does [`ask`](Client::ask) as text.
    #[track_caller]
    pub fn ask_text(&mut self, payload: impl AsRef<[u8]>) -> String {
        String::from_utf8(self.ask(payload)).unwrap()
    }

    /// Asks a puppet for an echo, and checks that it comes.
    #[track_caller]
    pub fn echoes(&mut self, text: impl AsRef<[u8]>) {
        self.gets_back(order::echo(text));
    }

    /// Sends a frame, and checks that it comes back.
    #[track_caller]
    pub fn gets_back(&mut self, payload: impl AsRef<[u8]>) {
        assert_eq!(self.ask(&payload), payload.as_ref());
    }

    pub fn finish_writing(&self) {
        self.stream.shutdown(Shutdown::Write).unwrap();
    }

    /// Everything until the end, and the kind of the end.
    #[track_caller]
    pub fn read_to_end(&mut self) -> (Vec<u8>, End) {
        let (mut bytes, mut piece) = (Vec::new(), vec![0; 64 << 10]);
        loop {
            match self.stream.read(&mut piece) {
                Ok(0) => return (bytes, End::Fin),
                Ok(n) => bytes.extend_from_slice(&piece[..n]),
                Err(error) => return (bytes, end_of(&error)),
            }
        }
    }

    /// Waits for a byte, which is not consumed, or for the server's FIN. True if it is the latter.
    #[track_caller]
    pub fn is_ended(&self) -> bool {
        self.stream.peek(&mut [0]).expect("a byte, or the end") == 0
    }

    /// The end, with nothing before it.
    #[track_caller]
    pub fn end(&mut self) -> End {
        let (bytes, end) = self.read_to_end();
        assert!(bytes.is_empty(), "{} bytes before the end", bytes.len());
        end
    }

    /// The end, whatever comes before it.
    #[track_caller]
    pub fn end_after_all(&mut self) -> End {
        self.read_to_end().1
    }

    /// Fills `bytes`. `None` if there is an end instead of them, which must be FIN and not within
    /// them.
    #[track_caller]
    pub fn read_whole_or_fin<'a>(&mut self, bytes: &'a mut [u8]) -> Option<&'a [u8]> {
        let mut filled = 0;
        while filled < bytes.len() {
            match self.stream.read(&mut bytes[filled..]) {
                Ok(0) if filled == 0 => return None,
                Ok(0) => panic!("a reply of {} bytes is cut off after {filled}", bytes.len()),
                Ok(n) => filled += n,
                Err(error) => panic!("an end by {error}"),
            }
        }
        Some(bytes)
    }

    /// True if nothing can be read now, and nothing ended.
    pub fn is_silent(&self) -> bool {
        self.stream.set_nonblocking(true).unwrap();
        let peeked = self.stream.peek(&mut [0]);
        self.stream.set_nonblocking(false).unwrap();
        matches!(peeked, Err(error) if error.kind() == ErrorKind::WouldBlock)
    }

    /// Waits for bytes that must not come, without sending any: the server has nothing to do for
    /// the connection.
    #[track_caller]
    pub fn hears_nothing_for(&mut self, time: Duration) {
        self.stream.set_read_timeout(Some(time)).unwrap();
        let heard = self.stream.read(&mut [0]);
        let is_late = |error: &io::Error| matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
        assert!(heard.as_ref().is_err_and(is_late), "{heard:?}");
        self.stream.set_read_timeout(Some(SOON)).unwrap();
    }

    /// Ends the connection with a reset.
    pub fn reset(self) {
        self.stream.reset_on_close().unwrap();
    }
}

#[track_caller]
fn end_of(error: &io::Error) -> End {
    match error.kind() {
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => End::Reset,
        _ => panic!("neither bytes nor an end: {error}"),
    }
}

/// One frame on the wire.
pub fn frame(payload: impl AsRef<[u8]>) -> Vec<u8> {
    let payload = payload.as_ref();
    let mut wire = (payload.len() as u32).to_be_bytes().to_vec();
    wire.extend_from_slice(payload);
    wire
}

/// The payloads of whole frames, and panics if there is a part of one at the end.
#[track_caller]
pub fn frames(mut wire: &[u8]) -> Vec<Vec<u8>> {
    let mut payloads = Vec::new();
    while !wire.is_empty() {
        assert!(wire.len() >= 4, "a reply is cut off in its length");
        let len = u32::from_be_bytes(wire[..4].try_into().unwrap()) as usize;
        assert!(wire.len() >= 4 + len, "a reply of {len} bytes is cut off after {}", wire.len() - 4);
        payloads.push(wire[4..4 + len].to_vec());
        wire = &wire[4 + len..];
    }
    payloads
}
