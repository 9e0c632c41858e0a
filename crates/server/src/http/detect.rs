//! Detection of the protocol that a peer speaks.

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::rt::{Read, ReadBufCursor, Write};
use ringserve_core::internals::OWNED_BYTES_MIN;

use super::leaving::Leave;
use super::rests::{Out, RESET_BYTES};
use super::runtime::PUT_OFF;
use super::watch::Watch;
use crate::stream::byte_stream::Stream;

/// The beginning of each connection of HTTP/2. No request of HTTP/1.1 begins so.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The protocol that the first bytes of a connection show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Detected {
    /// The preface of HTTP/2.
    Http2,
    /// Anything else: HTTP/1.1, or an error that it knows how to answer.
    Other,
    /// Nothing: the peer left, or the server drains.
    Nothing,
}

/// A stream from its first byte on, of which some were read. What passes is counted.
pub(super) struct Replayed {
    stream: Stream,
    watch: Rc<Watch>,
    /// Bytes that were read and not given out again. Those that are read before it is clear are the
    /// beginning of the preface.
    replay: &'static [u8],
}

/// Reads until it is clear what the peer speaks: usually not at all, since what arrived first shows
/// it.
///
/// # Errors
/// `TimedOut` if it does not become clear within `time`, those of reading else.
pub(super) async fn detect(stream: &mut Replayed, time: Option<Duration>) -> io::Result<Detected> {
    let shard = stream.stream.shard().clone();
    let mut leave = Leave::new(&shard, true);
    let mut seen = 0;
    let mut becomes_clear = pin!(poll_fn(|task| {
        loop {
            let mut detected = None;
            let polled = stream.stream.poll_peek(task, |bytes| match classify(&mut seen, bytes) {
                Some(clear) => {
                    detected = Some(clear);
                    0
                }
                None => bytes.len(),
            });
            stream.replay = &PREFACE[..seen];
            match (polled, detected) {
                (Poll::Ready(Ok(())), Some(detected)) => return Poll::Ready(Ok(detected)),
                (Poll::Ready(Ok(())), None) => {}
                (Poll::Ready(Err(error)), _) => return Poll::Ready(Err(error)),
                (Poll::Pending, _) => {
                    return leave.poll(task).map(|()| Ok(Detected::Nothing));
                }
            }
        }
    }));
    let Some(time) = time else { return becomes_clear.await };
    let mut left = time;
    loop {
        match shard.timeout(left, becomes_clear.as_mut()).await {
            Ok(detected) => return detected,
            // They may be there.
            Err(_elapsed) if shard.is_behind() => left = PUT_OFF,
            Err(_elapsed) => {
                let text = format!("the first {} bytes did not come within {time:?}", PREFACE.len());
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
        }
    }
}

/// Looks at the bytes after the first `seen` ones, which were those of the preface. `None`, and
/// they are seen, if it is not clear yet.
fn classify(seen: &mut usize, bytes: &[u8]) -> Option<Detected> {
    let rest = &PREFACE[*seen..];
    if bytes.is_empty() {
        // The end.
        return Some(if *seen == 0 { Detected::Nothing } else { Detected::Other });
    }
    if bytes.starts_with(rest) {
        return Some(Detected::Http2);
    }
    if !rest.starts_with(bytes) {
        return Some(Detected::Other);
    }
    *seen += bytes.len();
    None
}

impl Replayed {
    pub(super) fn new(stream: Stream, watch: Rc<Watch>) -> Replayed {
        Replayed { stream, watch, replay: &[] }
    }

    /// The stream, where nothing that was read is to be given out again.
    pub(super) fn into_stream(self) -> Stream {
        debug_assert!(self.replay.is_empty(), "hyper read what showed that it is HTTP/1.1");
        self.stream
    }

    /// Reads frames of HTTP/2, without those that are dropped.
    fn poll_frames(&self, task: &mut Context<'_>, buf: &mut ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        let room = buf.remaining();
        self.watch.with_rests(|rests| rests.give_held(buf));
        if buf.remaining() < room {
            return Poll::Ready(Ok(()));
        }
        let now = || self.stream.shard().timers().now();
        loop {
            let mut ended = false;
            let polled = self.stream.poll_peek(task, |bytes| {
                ended = bytes.is_empty();
                self.watch.with_rests(|rests| rests.take(bytes, buf, now))
            });
            let is_over = !matches!(polled, Poll::Ready(Ok(()))) || ended;
            if is_over || buf.remaining() < room {
                self.watch.say_rests();
                return polled;
            }
        }
    }

    /// Writes frames of HTTP/2, without resets that are kept back.
    fn poll_write_frames(
        &self,
        task: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.watch.say_rests();
        let now = || self.stream.shard().timers().now();
        let pass = match self.watch.with_rests(|rests| rests.next_out(pieces, now)) {
            Out::Keep(stream) => {
                self.watch.with_rests(|rests| rests.keep(stream, now()));
                return Poll::Ready(Ok(RESET_BYTES));
            }
            Out::Pass(bytes) => bytes,
        };
        let mut shorter;
        let mut front = pieces;
        if pass < pieces.iter().map(|piece| piece.len()).sum() {
            shorter = Vec::new();
            let mut left = pass;
            for piece in pieces {
                shorter.push(io::IoSlice::new(&piece[..piece.len().min(left)]));
                left -= shorter[shorter.len() - 1].len();
            }
            front = &shorter;
        }
        let written = self.poll_write_all(task, front);
        if let Poll::Ready(Ok(bytes)) = written {
            self.watch.with_rests(|rests| rests.went(front, bytes));
            // Nothing may follow.
            self.watch.say_rests();
        }
        written
    }

    fn poll_write_all(&self, task: &mut Context<'_>, pieces: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let watch = &self.watch;
        let share = |piece: &[u8]| if piece.len() < OWNED_BYTES_MIN { None } else { watch.shared(piece) };
        let room = || self.stream.owned_room(watch.rate_window());
        let written = self.stream.poll_put_all(task, pieces, room, share);
        if let Poll::Ready(Ok(bytes)) = written {
            watch.written(bytes);
        }
        written
    }
}

impl Read for Replayed {
    fn poll_read(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
        mut buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let room = buf.remaining();
        if !self.replay.is_empty() {
            let (bytes, rest) = self.replay.split_at(self.replay.len().min(room));
            buf.put_slice(bytes);
            self.replay = rest;
            self.watch.read(bytes.len(), false);
            if self.watch.is_http2() {
                self.watch.with_rests(|rests| rests.replayed(bytes));
            }
            return Poll::Ready(Ok(()));
        }
        let polled = if self.watch.is_http2() {
            self.poll_frames(task, &mut buf)
        } else {
            self.stream.poll_peek(task, |bytes| {
                let len = bytes.len().min(room);
                buf.put_slice(&bytes[..len]);
                len
            })
        };
        self.watch.read(room - buf.remaining(), polled.is_pending());
        polled
    }
}

impl Write for Replayed {
    fn poll_write(self: Pin<&mut Self>, task: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(task, &[io::IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        task: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.watch.is_http2() {
            true => self.poll_write_frames(task, pieces),
            false => self.poll_write_all(task, pieces),
        }
    }

    fn is_write_vectored(&self) -> bool {
        Write::is_write_vectored(&self.stream)
    }

    fn poll_flush(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<io::Result<()>> {
        Write::poll_flush(Pin::new(&mut self.stream), task)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<io::Result<()>> {
        Write::poll_shutdown(Pin::new(&mut self.stream), task)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first_look(bytes: &[u8]) -> Option<Detected> {
        classify(&mut 0, bytes)
    }

    #[test]
    fn it_is_clear_with_the_whole_preface_and_not_before() {
        assert_eq!(first_look(PREFACE), Some(Detected::Http2));
        assert_eq!(first_look(&[&PREFACE[..], b"more"].concat()), Some(Detected::Http2));
        let mut seen = 0;
        for n in 0..23 {
            assert_eq!(classify(&mut seen, &PREFACE[n..=n]), None, "{n}");
            assert_eq!(seen, n + 1);
        }
        assert_eq!(classify(&mut seen, &PREFACE[23..]), Some(Detected::Http2));
    }

    #[test]
    fn it_is_clear_with_the_first_byte_that_differs() {
        assert_eq!(first_look(b"GET / HTTP/1.1\r\n\r\n"), Some(Detected::Other));
        assert_eq!(first_look(b"PRI * HTTP/1.1\r\n\r\n"), Some(Detected::Other));
        let mut seen = 0;
        assert_eq!(classify(&mut seen, b"P"), None);
        assert_eq!(classify(&mut seen, b"UT / HTTP/1.1\r\n\r\n"), Some(Detected::Other));
        assert_eq!(seen, 1, "what was seen is read again");
    }

    #[test]
    fn it_is_clear_at_the_end() {
        assert_eq!(first_look(b""), Some(Detected::Nothing));
        assert_eq!(classify(&mut 3, b""), Some(Detected::Other));
    }
}
