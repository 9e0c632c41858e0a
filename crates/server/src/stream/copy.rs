//! Bytes both ways between two streams.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::task::{Context, Poll, ready};

use super::byte_stream::Stream;

/// Copies what each of two streams receives to the other, until both have ended. The end of one direction is passed on as
/// FIN, and the other direction goes on. An end that reads slowly slows the other one down.
///
/// Bytes are copied into the outbox, or lent to the send where 4 KiB or more arrived together; there is no buffer in
/// between. Returns the bytes that went from `first` to `second`, and back.
///
/// # Errors
/// If either connection broke, and which.
pub async fn copy_bidirectional(first: &mut Stream, second: &mut Stream) -> Result<(u64, u64), CopyError> {
    let (mut there, mut back) = (Direction::default(), Direction::default());
    poll_fn(|task| {
        let there = there.poll(task, first, second).map_err(|(from_reader, error)| CopyError {
            side: if from_reader { CopySide::First } else { CopySide::Second },
            error,
        })?;
        let back = back.poll(task, second, first).map_err(|(from_reader, error)| CopyError {
            side: if from_reader { CopySide::Second } else { CopySide::First },
            error,
        })?;
        match (there, back) {
            (Poll::Ready(there), Poll::Ready(back)) => Poll::Ready(Ok((there, back))),
            _ => Poll::Pending,
        }
    })
    .await
}

/// Which of the two streams of [`copy_bidirectional`] broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopySide {
    /// The first argument.
    First,
    /// The second argument.
    Second,
}

/// Why [`copy_bidirectional`] ended before both streams had.
#[derive(Debug)]
#[non_exhaustive]
pub struct CopyError {
    /// Which of the two broke.
    pub side: CopySide,
    /// How.
    pub error: io::Error,
}

impl fmt::Display for CopyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = match self.side {
            CopySide::First => "first",
            CopySide::Second => "second",
        };
        write!(f, "the {side} connection broke: {}", self.error)
    }
}

impl std::error::Error for CopyError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

#[derive(Default)]
struct Direction {
    bytes: u64,
    ended: bool,
}

impl Direction {
    /// The bytes copied, once it has ended. An error says whether it came from the reading end.
    fn poll(
        &mut self,
        task: &mut Context<'_>,
        from: &mut Stream,
        to: &Stream,
    ) -> Poll<Result<u64, (bool, io::Error)>> {
        while !self.ended {
            // What there is no room for stays where it is, where it holds the sender back.
            ready!(to.poll_room(task)).map_err(|error| (false, error))?;
            match ready!(from.poll_read_frame(task)).map_err(|error| (true, error))? {
                Some(frame) => {
                    self.bytes += frame.len() as u64;
                    to.queue(frame);
                }
                None => {
                    to.end_writing();
                    self.ended = true;
                }
            }
        }
        Poll::Ready(Ok(self.bytes))
    }
}
