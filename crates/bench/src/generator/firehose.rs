//! A connection that keeps the server busy beside those that are measured.

use std::io;

use mio::{Interest, Poll, Token};

use super::connection::Connection;
use super::{Plan, connect, shaken};
use crate::steps::Shape;

/// Its messages, of which this many are always under way.
const SHAPE: Shape = Shape { bytes: 16 << 10, pipeline: 8, lines: false, tls: None };

/// No other connection's.
pub(super) const TOKEN: Token = Token(usize::MAX);

pub(super) struct Firehose {
    connection: Connection,
    messages: Vec<u8>,
    scratch: Vec<u8>,
}

impl Firehose {
    /// Opens it and sends its first messages.
    pub(super) fn connect(plan: &Plan, poll: &Poll) -> io::Result<Firehose> {
        let mut stream = mio::net::TcpStream::from_std(connect(plan.address, plan.connections)?);
        poll.registry().register(&mut stream, TOKEN, Interest::READABLE | Interest::WRITABLE)?;
        let messages = SHAPE.messages();
        let mut firehose = Firehose {
            connection: Connection::new(shaken(stream, plan.shape.tls)?),
            messages,
            scratch: vec![0; 64 << 10],
        };
        firehose.send(SHAPE.pipeline as u32)?;
        Ok(firehose)
    }

    /// Reads what is there, and sends a message for each that came back.
    pub(super) fn go_on(&mut self) -> io::Result<()> {
        self.connection.receive(&self.messages, &mut self.scratch)?;
        let back = self.connection.answer(SHAPE.bytes, |_, _| {});
        self.send(back as u32)
    }

    fn send(&mut self, count: u32) -> io::Result<()> {
        if count > 0 {
            self.connection.queue(count, 0, SHAPE.bytes);
        }
        self.connection.write(&self.messages)
    }
}
