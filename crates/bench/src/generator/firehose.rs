//! A connection that keeps the server busy in addition to the measured ones.

use std::io;

use mio::{Interest, Poll, Token};

use super::connection::Connection;
use super::{Plan, connect, shaken};
use crate::steps::{Messages, Shape};

/// Bytes of its messages.
const BYTES: usize = 16 << 10;

/// Messages that are always in flight.
const PIPELINE: usize = 8;

/// A token that no other connection has.
pub(super) const TOKEN: Token = Token(usize::MAX);

pub(super) struct Firehose {
    connection: Connection,
    shape: Shape,
    messages: Messages,
    scratch: Vec<u8>,
}

impl Firehose {
    /// Opens it and sends its first messages.
    pub(super) fn connect(plan: &Plan, poll: &Poll) -> io::Result<Firehose> {
        let mut stream = mio::net::TcpStream::from_std(connect(plan.address, plan.connections)?);
        poll.registry().register(&mut stream, TOKEN, Interest::READABLE | Interest::WRITABLE)?;
        let shape = Shape { bytes: BYTES, pipeline: PIPELINE, lines: false, layer: plan.shape.layer };
        let mut firehose = Firehose {
            connection: Connection::new(shaken(stream, shape.layer)?),
            shape,
            messages: shape.messages(),
            scratch: vec![0; 64 << 10],
        };
        firehose.send(PIPELINE as u32)?;
        Ok(firehose)
    }

    /// Reads available bytes, and sends a message for each that came back.
    pub(super) fn go_on(&mut self) -> io::Result<()> {
        self.connection.receive(&self.messages, &mut self.scratch)?;
        let back = self.connection.answer(self.shape.reply_bytes(), |_, _| {});
        self.send(back as u32)
    }

    fn send(&mut self, count: u32) -> io::Result<()> {
        if count > 0 {
            self.connection.queue(count, 0, self.shape.sent_bytes());
        }
        self.connection.write(&self.messages)
    }
}
