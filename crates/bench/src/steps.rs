//! The lock-step generator: sends on all connections, then waits for all replies.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::websocket::{self, Sender};
use crate::wire::{Layer, Wire};

/// Time limit of a reply. A step takes milliseconds; a server that is silent this long is stuck.
pub(crate) const REPLY_MAX: Duration = Duration::from_secs(10);

/// Connections opened before one is used, well below the backlog of 4096, since generator and
/// server share a CPU and the server may not have run meanwhile.
const CONNECT_BATCH: usize = 256;

/// The messages of one connection in a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Bytes of a message, including a line's `\n`, excluding a frame's head.
    pub(crate) bytes: usize,
    /// Messages that are sent together.
    pub(crate) pipeline: usize,
    /// Whether messages are lines.
    pub(crate) lines: bool,
    /// Their layer.
    pub(crate) layer: Layer,
}

impl Shape {
    /// Bytes that one connection sends in a step, before they are encrypted.
    pub(crate) fn step_bytes(self) -> usize {
        self.sent_bytes().saturating_mul(self.pipeline)
    }

    /// Bytes of a message on the wire.
    pub(crate) fn sent_bytes(self) -> usize {
        match self.layer {
            Layer::Exchange(exchange) => exchange.request.len(),
            _ => self.bytes.saturating_add(self.head_bytes(Sender::Client)),
        }
    }

    /// Bytes of a message as it returns.
    pub(crate) fn reply_bytes(self) -> usize {
        match self.layer {
            Layer::Exchange(exchange) => exchange.reply.len(),
            _ => self.bytes.saturating_add(self.head_bytes(Sender::Server)),
        }
    }

    fn head_bytes(self, sender: Sender) -> usize {
        if self.layer == Layer::WebSocket { websocket::head_bytes(self.bytes, sender) } else { 0 }
    }

    /// The messages of one step: printable, no two neighbours alike, `\n` only where a line ends.
    pub(crate) fn messages(self) -> Messages {
        let mut payloads: Vec<u8> =
            (0..self.bytes * self.pipeline).map(|at| b'a' + (at % 23) as u8).collect();
        if self.lines {
            for message in payloads.chunks_mut(self.bytes) {
                if let Some(last) = message.last_mut() {
                    *last = b'\n';
                }
            }
        }
        Messages::new(self, payloads)
    }
}

/// Messages as they are sent, and as they have to return.
pub(crate) struct Messages {
    shape: Shape,
    sent: Vec<u8>,
    /// The replies, if they differ from the sent bytes.
    replies: Option<Vec<u8>>,
}

impl Messages {
    /// Creates the messages from `payloads` of that shape.
    fn new(shape: Shape, payloads: Vec<u8>) -> Messages {
        if let Layer::Exchange(exchange) = shape.layer {
            let (sent, replies) = (exchange.request, exchange.reply);
            return Messages {
                shape,
                sent: sent.repeat(shape.pipeline),
                replies: Some(replies.repeat(shape.pipeline)),
            };
        }
        if shape.layer != Layer::WebSocket {
            return Messages { shape, sent: payloads, replies: None };
        }
        let framed = |sender| {
            let mut frames = Vec::new();
            payloads.chunks(shape.bytes).for_each(|payload| websocket::put(&mut frames, payload, sender));
            frames
        };
        Messages { shape, sent: framed(Sender::Client), replies: Some(framed(Sender::Server)) }
    }

    /// The bytes as they are sent.
    pub(crate) fn sent(&self) -> &[u8] {
        &self.sent
    }

    /// The bytes as they return.
    pub(crate) fn replies(&self) -> &[u8] {
        self.replies.as_ref().unwrap_or(&self.sent)
    }

    /// Bytes that may have returned for the first `sent` of a stream that repeats these messages:
    /// bytes as they arrive, and frames when they are whole.
    pub(crate) fn replies_to(&self, sent: u64) -> u64 {
        match self.replies {
            None => sent,
            Some(_) => sent / self.shape.sent_bytes() as u64 * self.shape.reply_bytes() as u64,
        }
    }

    /// Writes the connection's number into the first message, so that bytes which reach the wrong
    /// connection are noticed.
    pub(crate) fn sign(&mut self, mut number: usize) {
        if let Layer::Exchange(exchange) = self.shape.layer {
            for at in exchange.number_at.map_or(0..0, |first| first..first + 8).rev() {
                self.sent[at] = b'0' + (number % 10) as u8;
                number /= 10;
            }
            return;
        }
        // Eight digits are enough for all connections; the end of a line stays.
        let digits = (self.shape.bytes - usize::from(self.shape.lines)).min(8);
        for at in 0..digits {
            let digit = b'0' + (number % 10) as u8;
            number /= 10;
            match &mut self.replies {
                None => self.sent[at] = digit,
                Some(replies) => {
                    self.sent[self.shape.head_bytes(Sender::Client) + at] = websocket::masked_byte(at, digit);
                    replies[self.shape.head_bytes(Sender::Server) + at] = digit;
                }
            }
        }
    }
}

/// The first position at which `got` differs from `expected`, in which a zero byte matches any
/// byte.
pub(crate) fn first_difference(expected: &[u8], got: &[u8]) -> Option<usize> {
    if expected == got {
        return None;
    }
    expected.iter().zip(got).position(|(expected, got)| expected != got && *expected != 0)
}

/// Open connections to one server, and their messages.
pub(crate) struct Load {
    streams: Vec<Wire<TcpStream>>,
    shape: Shape,
    messages: Messages,
    reply: Vec<u8>,
}

impl Load {
    /// Opens `connections` connections, each of which the server has accepted on return.
    pub(crate) fn connect(address: SocketAddr, connections: usize, shape: Shape) -> io::Result<Self> {
        let messages = shape.messages();
        let reply = vec![0; messages.replies().len()];
        let mut load = Self { streams: Vec::new(), shape, messages, reply };
        load.open(address, connections)?;
        Ok(load)
    }

    /// Uses one connection of each batch for one step, so that the server cannot fall behind with
    /// accepting.
    fn open(&mut self, address: SocketAddr, connections: usize) -> io::Result<()> {
        while self.streams.len() < connections {
            let stream = TcpStream::connect(address)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(REPLY_MAX))?;
            stream.set_write_timeout(Some(REPLY_MAX))?;
            let mut stream = Wire::new(stream, self.shape.layer)?;
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

    /// Takes one step.
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
        self.messages.sign(number);
        self.streams[number].write_all(self.messages.sent())
    }

    fn receive(&mut self, number: usize) -> io::Result<()> {
        self.messages.sign(number);
        expect_reply(&mut self.streams[number], self.messages.replies(), &mut self.reply)
    }
}

/// Checks that the server echoes: whole steps, messages that arrive in two parts and, if it takes
/// raw bytes, single bytes and more than a receive buffer holds.
pub(crate) fn check_echo(address: SocketAddr, shape: Shape) -> io::Result<()> {
    let mut load = Load::connect(address, 3, shape)?;
    for _ in 0..3 {
        load.step()?;
    }
    if matches!(shape.layer, Layer::Exchange(_)) {
        return Ok(());
    }
    let messages = shape.messages();
    let mut reply = Vec::new();
    let stream = &mut load.streams[0];
    let (first, rest) = messages.sent().split_at(messages.sent().len() / 2);
    stream.write_all(first)?;
    // Not needed for the two parts to be sent apart, since there is no delay; it lets the first be
    // received alone.
    std::thread::yield_now();
    stream.write_all(rest)?;
    expect_reply(stream, messages.replies(), &mut reply)?;
    if !shape.lines {
        for bytes in [1, 16 * 1024 + 1, 60_000] {
            let payload = (0..bytes).map(|at: usize| (at % 251) as u8).collect();
            let message = Messages::new(Shape { bytes, pipeline: 1, ..shape }, payload);
            stream.write_all(message.sent())?;
            expect_reply(stream, message.replies(), &mut reply)?;
        }
    }
    Ok(())
}

/// Reads a reply and compares it with `expected`. `reply` is space to read into.
pub(crate) fn expect_reply(stream: &mut impl Read, expected: &[u8], reply: &mut Vec<u8>) -> io::Result<()> {
    reply.resize(expected.len(), 0);
    stream.read_exact(reply).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => {
            io::Error::other(format!("no whole reply of {} bytes within {REPLY_MAX:?}", expected.len()))
        }
        io::ErrorKind::UnexpectedEof => {
            io::Error::other(format!("closed before the whole reply of {} bytes", expected.len()))
        }
        _ => error,
    })?;
    match first_difference(expected, reply) {
        None => Ok(()),
        Some(at) => Err(io::Error::other(format!(
            "byte {at} of a reply of {} is {:#04x}, sent was {:#04x}",
            expected.len(),
            reply[at],
            expected[at]
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::{Layer, Messages, Sender, Shape, websocket};

    fn shape(bytes: usize, pipeline: usize, lines: bool, layer: Layer) -> Shape {
        Shape { bytes, pipeline, lines, layer }
    }

    fn signed(shape: Shape, number: usize) -> Messages {
        let mut messages = shape.messages();
        messages.sign(number);
        messages
    }

    #[test]
    fn lines_end_where_messages_end_and_nowhere_else() {
        let shape = shape(5, 3, true, Layer::Plain);
        let messages = signed(shape, 1234);
        let sent = messages.sent();
        assert_eq!(sent.len(), shape.step_bytes());
        let ends: Vec<usize> = (0..sent.len()).filter(|&at| sent[at] == b'\n').collect();
        assert_eq!(ends, [4, 9, 14]);
    }

    #[test]
    fn connections_sign_differently() {
        for layer in [Layer::Plain, Layer::WebSocket] {
            let shape = shape(64, 1, false, layer);
            assert_ne!(signed(shape, 999).sent(), signed(shape, 1000).sent());
            assert_ne!(signed(shape, 999).replies(), signed(shape, 1000).replies());
        }
    }

    #[test]
    fn frames_carry_what_is_sent_without_them() {
        for (bytes, number) in [(1, 7), (5, 1234), (64, 99_999_999), (300, 5), (70_000, 5)] {
            let (plain, layer) = (shape(bytes, 2, bytes > 1, Layer::Plain), Layer::WebSocket);
            let framed = signed(Shape { layer, ..plain }, number);
            let (mut sent, mut replies) = (Vec::new(), Vec::new());
            for payload in signed(plain, number).sent().chunks(bytes) {
                websocket::put(&mut sent, payload, Sender::Client);
                websocket::put(&mut replies, payload, Sender::Server);
            }
            assert!(framed.sent() == sent && framed.replies() == replies, "{bytes} bytes");
            assert_eq!(sent.len(), framed.shape.step_bytes());
            assert_eq!(framed.replies_to(sent.len() as u64), replies.len() as u64);
            assert_eq!(framed.replies_to(sent.len() as u64 - 1), framed.shape.reply_bytes() as u64);
        }
    }
}
