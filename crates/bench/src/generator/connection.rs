//! One connection of the generator: the bytes that it still has to send, and the replies for which
//! it waits.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};

use mio::net::TcpStream;

use crate::steps::{Messages, first_difference};
use crate::wire::Wire;

/// Bytes wait in two places: `unsent` here, the rest with the server until they come back.
pub(super) struct Connection {
    stream: Wire<TcpStream>,
    /// Bytes sent and received since the start. The stream repeats the messages of one step.
    sent: u64,
    received: u64,
    unsent: u64,
    /// Messages without a whole reply, and the times at which they were sent or due, the oldest
    /// first.
    pending: VecDeque<(u64, u32)>,
    /// Received bytes that are not a whole reply.
    partial: u64,
}

impl Connection {
    pub(super) fn new(stream: Wire<TcpStream>) -> Connection {
        Connection { stream, sent: 0, received: 0, unsent: 0, pending: VecDeque::new(), partial: 0 }
    }

    /// Adds this many messages to be sent, each of `bytes` bytes on the wire.
    pub(super) fn queue(&mut self, count: u32, at: u64, bytes: usize) {
        self.unsent += u64::from(count) * bytes as u64;
        self.pending.push_back((at, count));
    }

    pub(super) fn has_unsent(&self) -> bool {
        self.unsent > 0
    }

    /// True if every reply has arrived.
    pub(super) fn is_idle(&self) -> bool {
        self.pending.is_empty()
    }

    /// The time at which the oldest message without a reply was sent or due.
    pub(super) fn waits_since(&self) -> Option<u64> {
        self.pending.front().map(|(at, _)| *at)
    }

    /// Sends as many bytes as the socket takes.
    pub(super) fn write(&mut self, messages: &Messages) -> io::Result<()> {
        let messages = messages.sent();
        while self.unsent > 0 {
            let rest = &messages[(self.sent % messages.len() as u64) as usize..];
            let piece = &rest[..rest.len().min(usize::try_from(self.unsent).unwrap_or(usize::MAX))];
            match self.stream.write(piece) {
                Ok(count) => {
                    self.sent += count as u64;
                    self.unsent -= count as u64;
                    if count < piece.len() {
                        return Ok(());
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads available bytes and compares them with the expected ones. Returns how many they were.
    pub(super) fn receive(&mut self, messages: &Messages, scratch: &mut [u8]) -> io::Result<usize> {
        let mut all = 0;
        loop {
            match self.stream.read(scratch) {
                Ok(0) => return Err(io::Error::other("the server closed a connection")),
                Ok(count) => {
                    self.compare(messages, &scratch[..count])?;
                    all += count;
                    // There is no more: later bytes are another event.
                    if count < scratch.len() {
                        return Ok(all);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(all),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn compare(&mut self, messages: &Messages, mut got: &[u8]) -> io::Result<()> {
        if self.received + got.len() as u64 > messages.replies_to(self.sent) {
            return Err(io::Error::other("the server sent more than it got"));
        }
        let messages = messages.replies();
        while !got.is_empty() {
            let rest = &messages[(self.received % messages.len() as u64) as usize..];
            let (piece, more) = got.split_at(got.len().min(rest.len()));
            if first_difference(&rest[..piece.len()], piece).is_some() {
                return Err(io::Error::other("a reply is not what was sent"));
            }
            self.received += piece.len() as u64;
            self.partial += piece.len() as u64;
            got = more;
        }
        Ok(())
    }

    /// Removes the messages whose replies are whole, each of `bytes` bytes, and reports when they
    /// were sent or due. Returns how many.
    pub(super) fn answer(&mut self, bytes: usize, mut each: impl FnMut(u64, u32)) -> u64 {
        let whole = self.partial / bytes as u64;
        self.partial -= whole * bytes as u64;
        let mut left = whole;
        while left > 0
            && let Some((at, count)) = self.pending.front_mut()
        {
            let now = u64::from(*count).min(left) as u32;
            each(*at, now);
            *count -= now;
            left -= u64::from(now);
            if *count == 0 {
                self.pending.pop_front();
            }
        }
        whole
    }
}
