//! Sending: tried at once; the rest is sent when the socket has room again.

use std::io::IoSlice;

use ringserve_core::{Batch, Completion, ConnId, SendEnd};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, send, sendmsg};
use socket2::Socket;

use super::Epoll;

/// Pieces passed to one call: 1 KiB of stack. A batch has at most 129, so three calls take the
/// largest.
const PIECES: usize = 64;

/// Progress of a send.
enum Progress {
    Done,
    /// The socket is full; an edge will report that it has room.
    Full,
    Failed(i32),
}

impl Epoll {
    pub(super) fn send(&mut self, id: ConnId, batch: Box<Batch>) {
        match self.ports.find(id) {
            Some(port) if port.batch.is_none() && batch.is_empty() => {
                self.ready.push_back(Completion::Sent { id, batch, end: SendEnd::Done });
            }
            Some(port) if port.batch.is_none() => {
                port.batch = Some(batch);
                if port.writable {
                    self.go_on(id.slot(), true);
                } else {
                    self.stats.sends_short += 1;
                }
            }
            _ => {
                self.ready.push_back(Completion::Sent { id, batch, end: SendEnd::Error(libc::EBADF) });
                Self::unknown(id, "send");
            }
        }
    }

    pub(super) fn send_stop(&mut self, id: ConnId) {
        let Some(port) = self.ports.find(id) else { return Self::unknown(id, "stop of a send") };
        if let Some(batch) = port.batch.take() {
            // The kernel reports room only once a third of the socket's buffer is free, and a slow
            // peer may free less than that within its time limit. So the next send tries the
            // socket.
            port.writable = true;
            self.ready.push_back(Completion::Sent { id, batch, end: SendEnd::Stopped });
        }
    }

    /// The socket of a send in flight has room again.
    #[cold]
    pub(super) fn send_rest(&mut self, slot: u32) {
        self.go_on(slot, false);
    }

    /// Sends as much as fits of the send in flight.
    #[inline]
    fn go_on(&mut self, slot: u32, first: bool) {
        let Some(port) = self.ports.at(slot) else { return };
        let id = port.id();
        let (Some(socket), Some(mut batch)) = (&port.socket, port.batch.take()) else { return };
        let progress = match port.unregistered {
            0 => progress(socket, &mut batch, &mut self.stats.calls),
            errno => Progress::Failed(errno.into()),
        };
        let end = match progress {
            Progress::Done => SendEnd::Done,
            Progress::Failed(errno) => {
                port.failed = errno as u16;
                SendEnd::Error(errno)
            }
            Progress::Full => {
                port.writable = false;
                port.batch = Some(batch);
                self.stats.sends_short += u64::from(first);
                return;
            }
        };
        self.sent_at_once += usize::from(first && end == SendEnd::Done);
        self.ready.push_back(Completion::Sent { id, batch, end });
    }
}

#[inline]
fn progress(socket: &Socket, batch: &mut Batch, calls: &mut u64) -> Progress {
    loop {
        *calls += 1;
        let (asked, sent) = send_pieces(socket, batch);
        match sent {
            Ok(sent) => {
                batch.advance(sent);
                if batch.is_empty() {
                    return Progress::Done;
                }
                // As with receives: a short send filled the socket, so a further one would only
                // fail.
                if sent < asked {
                    return Progress::Full;
                }
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Progress::Full,
            Err(errno) => return Progress::Failed(errno.raw_os_error()),
        }
    }
}

/// Makes one call. Returns how many bytes it was given, and how many it took. A peer that is gone
/// raises no signal.
#[inline]
fn send_pieces(socket: &Socket, batch: &Batch) -> (usize, Result<usize, Errno>) {
    if let Some(piece) = batch.single() {
        return (piece.len(), send(socket, piece, SendFlags::NOSIGNAL));
    }
    let mut slices = [IoSlice::new(&[]); PIECES];
    let (mut count, mut asked) = (0, 0);
    for (slice, piece) in slices.iter_mut().zip(batch.pieces()) {
        *slice = IoSlice::new(piece);
        count += 1;
        asked += piece.len();
    }
    (asked, sendmsg(socket, &slices[..count], &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL))
}
