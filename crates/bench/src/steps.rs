//! The lock-step generator: sends on all connections, then waits for all replies.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::wire::{Handshakes, Wire};

/// How long a reply may take. A step takes milliseconds; a server that is silent this long is stuck.
pub(crate) const REPLY_MAX: Duration = Duration::from_secs(10);

/// Connections opened before one is used, well below the backlog of 4096, since generator and
/// server share a CPU and the server may not have run meanwhile.
const CONNECT_BATCH: usize = 256;

/// What one connection sends in a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Bytes of a message, a line's `\n` included.
    pub(crate) bytes: usize,
    /// Messages that leave together.
    pub(crate) pipeline: usize,
    /// Whether messages are lines.
    pub(crate) lines: bool,
    /// Whether they leave below TLS.
    pub(crate) tls: Option<Handshakes>,
}

impl Shape {
    /// Bytes that one connection sends in a step.
    pub(crate) fn step_bytes(self) -> usize {
        self.bytes * self.pipeline
    }

    /// The messages of one step: printable, no two neighbours alike, `\n` only where a line ends.
    pub(crate) fn messages(self) -> Vec<u8> {
        let mut messages: Vec<u8> = (0..self.step_bytes()).map(|at| b'a' + (at % 23) as u8).collect();
        if self.lines {
            for message in messages.chunks_mut(self.bytes) {
                if let Some(last) = message.last_mut() {
                    *last = b'\n';
                }
            }
        }
        messages
    }

    /// Writes the connection's number into the first message, so that bytes which reach the wrong
    /// connection are noticed.
    pub(crate) fn sign(self, messages: &mut [u8], mut number: usize) {
        // Eight digits number more connections than there can be; the end of a line stays.
        for byte in messages[..self.bytes - usize::from(self.lines)].iter_mut().take(8) {
            *byte = b'0' + (number % 10) as u8;
            number /= 10;
        }
    }
}

/// Open connections to one server, and what they send.
pub(crate) struct Load {
    streams: Vec<Wire<TcpStream>>,
    shape: Shape,
    messages: Vec<u8>,
    reply: Vec<u8>,
}

impl Load {
    /// Opens `connections` connections, each of which the server has accepted on return.
    pub(crate) fn connect(address: SocketAddr, connections: usize, shape: Shape) -> io::Result<Self> {
        let messages = shape.messages();
        let reply = vec![0; messages.len()];
        let mut load = Self { streams: Vec::new(), shape, messages, reply };
        load.open(address, connections)?;
        Ok(load)
    }

    /// Uses one connection of each batch for one step, so that the server cannot fall behind with accepting.
    fn open(&mut self, address: SocketAddr, connections: usize) -> io::Result<()> {
        while self.streams.len() < connections {
            let stream = TcpStream::connect(address)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(REPLY_MAX))?;
            stream.set_write_timeout(Some(REPLY_MAX))?;
            let mut stream = Wire::new(stream, self.shape.tls)?;
            stream.shake_hands()?;
            self.streams.push(stream);
            let count = self.streams.len();
            if count.is_multiple_of(CONNECT_BATCH) || count == connections {
                self.send(count - 1)?;
                self.receive(count - 1)?;
            }
        }
        Ok(())
    }

    /// One step.
    pub(crate) fn step(&mut self) -> io::Result<()> {
        for number in 0..self.streams.len() {
            self.send(number)?;
        }
        for number in 0..self.streams.len() {
            self.receive(number)?;
        }
        Ok(())
    }

    /// Messages of one step on all connections.
    pub(crate) fn step_requests(&self) -> usize {
        self.streams.len() * self.shape.pipeline
    }

    fn send(&mut self, number: usize) -> io::Result<()> {
        self.shape.sign(&mut self.messages, number);
        self.streams[number].write_all(&self.messages)
    }

    fn receive(&mut self, number: usize) -> io::Result<()> {
        self.shape.sign(&mut self.messages, number);
        expect_reply(&mut self.streams[number], &self.messages, &mut self.reply)
    }
}

/// Checks that the server echoes: whole steps, messages that come in two parts and, if it takes raw
/// bytes, single bytes and more than a receive buffer holds.
pub(crate) fn check_echo(address: SocketAddr, shape: Shape) -> io::Result<()> {
    let mut load = Load::connect(address, 3, shape)?;
    for _ in 0..3 {
        load.step()?;
    }
    let messages = shape.messages();
    let mut reply = Vec::new();
    let stream = &mut load.streams[0];
    let (first, rest) = messages.split_at(messages.len() / 2);
    stream.write_all(first)?;
    // Not needed for the two parts to be sent apart, since there is no delay; it lets the first be
    // received alone.
    std::thread::yield_now();
    stream.write_all(rest)?;
    expect_reply(stream, &messages, &mut reply)?;
    if !shape.lines {
        for bytes in [1, 16 * 1024 + 1, 60_000] {
            let message: Vec<u8> = (0..bytes).map(|at: usize| (at % 251) as u8).collect();
            stream.write_all(&message)?;
            expect_reply(stream, &message, &mut reply)?;
        }
    }
    Ok(())
}

/// Reads a reply and compares it with what was sent. `reply` is space to read into.
pub(crate) fn expect_reply(stream: &mut impl Read, sent: &[u8], reply: &mut Vec<u8>) -> io::Result<()> {
    reply.resize(sent.len(), 0);
    stream.read_exact(reply).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => {
            io::Error::other(format!("no whole reply of {} bytes within {REPLY_MAX:?}", sent.len()))
        }
        io::ErrorKind::UnexpectedEof => {
            io::Error::other(format!("closed before the whole reply of {} bytes", sent.len()))
        }
        _ => error,
    })?;
    match sent.iter().zip(reply.iter()).position(|(sent, got)| sent != got) {
        None => Ok(()),
        Some(at) => Err(io::Error::other(format!(
            "byte {at} of a reply of {} is {:#04x}, sent was {:#04x}",
            sent.len(),
            reply[at],
            sent[at]
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::Shape;

    #[test]
    fn lines_end_where_messages_end_and_nowhere_else() {
        let shape = Shape { bytes: 5, pipeline: 3, lines: true, tls: None };
        let mut messages = shape.messages();
        shape.sign(&mut messages, 1234);
        assert_eq!(messages.len(), shape.step_bytes());
        let ends: Vec<usize> = (0..messages.len()).filter(|&at| messages[at] == b'\n').collect();
        assert_eq!(ends, [4, 9, 14]);
    }

    #[test]
    fn connections_sign_differently() {
        let shape = Shape { bytes: 64, pipeline: 1, lines: false, tls: None };
        let (mut one, mut other) = (shape.messages(), shape.messages());
        shape.sign(&mut one, 999);
        shape.sign(&mut other, 1000);
        assert_ne!(one, other);
    }
}
