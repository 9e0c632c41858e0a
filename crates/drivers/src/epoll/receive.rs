//! Receiving: round robin over the queued connections, with one buffer each, with several after a
//! receive that filled one (more is likely to wait), or straight into the block of a large frame.
//!
//! A receive that ends short of its buffers found the socket empty, so the next one waits for an
//! edge. Where the kernel ends it for another reason, the driver receives until the socket is
//! empty:
//!
//! * The peer's end or an error: an edge reports it.
//! * Urgent data, of TCP and of Unix sockets. A receive ends before the mark, and bytes wait after
//!   it. An edge reports each mark that is in the socket (`EPOLLPRI`). Where a signal is pending,
//!   the receive at a mark of TCP returns `EAGAIN` though bytes wait, so it is tried twice.
//! * Unix sockets with descriptors or credentials (`SO_PASSCRED`): a receive takes one message with
//!   them, and its flags show that they were cut off (`MSG_CTRUNC`).

use std::io::IoSliceMut;

use ringserve_buf::Block;
use ringserve_core::{Completion, ConnId, ReceiveEnd};
use rustix::io::{Errno, readv};
use rustix::net::{RecvAncillaryBuffer, RecvFlags, ReturnFlags, recv, recvmsg};

use super::table::Port;
use super::{Epoll, Room};

/// The most buffers of one receive: 256 KiB, a quarter of what a turn brings. Fewer where other
/// connections wait for their share.
const SEVERAL: usize = 16;

/// The block that a receive fills, and how many bytes of it at most.
pub(super) struct ReceiveTarget {
    block: Box<Block>,
    most: usize,
}

impl Port {
    /// Receives into one buffer.
    #[inline]
    fn receive(&mut self, calls: &mut u64, spare: &mut [u8]) -> Result<usize, Errno> {
        match &self.socket {
            Some(_) if self.is_unix => self.receive_several(calls, &mut [IoSliceMut::new(spare)]),
            Some(socket) if self.unregistered == 0 => {
                *calls += 1;
                recv(socket, spare, RecvFlags::empty()).map(|(count, _)| count)
            }
            _ => Err(Errno::from_raw_os_error(self.unregistered.into())),
        }
    }

    /// Receives into these buffers, one after the other.
    #[inline(never)]
    fn receive_several(&mut self, calls: &mut u64, spare: &mut [IoSliceMut<'_>]) -> Result<usize, Errno> {
        let Some(socket) = self.socket.as_ref().filter(|_| self.unregistered == 0) else {
            return Err(Errno::from_raw_os_error(self.unregistered.into()));
        };
        *calls += 1;
        if !self.is_unix {
            return readv(socket, spare);
        }
        // Descriptors are not taken: the kernel closes them.
        let received = recvmsg(socket, spare, &mut RecvAncillaryBuffer::default(), RecvFlags::empty())?;
        self.goes_on |= received.flags.contains(ReturnFlags::CTRUNC);
        Ok(received.bytes)
    }

    /// True if more waits, or may wait, after a receive that has brought bytes: it `filled` its
    /// buffers, or ended for a reason other than an empty socket.
    #[inline]
    fn has_more(&self, filled: bool) -> bool {
        filled || self.goes_on || self.marked
    }

    /// Notes that a receive found the socket empty.
    fn is_empty(&mut self) {
        self.goes_on = false;
        // At a mark the socket may not be empty: it is tried once more.
        self.readable = std::mem::take(&mut self.marked);
    }
}

impl Epoll {
    pub(super) fn receive(&mut self, id: ConnId) {
        self.begin_receive(id, false, true);
    }

    pub(super) fn receive_once(&mut self, id: ConnId, several: bool) {
        self.begin_receive(id, true, several);
    }

    pub(super) fn receive_into(&mut self, id: ConnId, block: Box<Block>, most: usize) {
        debug_assert!((1..=block.room()).contains(&most), "{most} bytes into {block:?}");
        self.blocks.insert(id, ReceiveTarget { block, most });
        self.begin_receive(id, true, false);
    }

    fn begin_receive(&mut self, id: ConnId, once: bool, several: bool) {
        match self.ports.find(id) {
            Some(port) if !port.receiving => {
                (port.receiving, port.once, port.several) = (true, once, several);
                self.stats.receives_armed += 1;
                self.ports.sync_queue(id.slot());
            }
            _ => Self::unknown(id, "receive"),
        }
    }

    /// Bytes in the socket stay there for the next receive.
    pub(super) fn receive_stop(&mut self, id: ConnId) {
        let Some(port) = self.ports.find(id) else { return Self::unknown(id, "stop of a receive") };
        if std::mem::replace(&mut port.receiving, false) {
            self.ports.sync_queue(id.slot());
            let end = self.end_of(id, 0, ReceiveEnd::Stopped);
            self.ready.push_back(end);
        }
    }

    /// The last completion of a receive, which brought `bytes` if it was one into a block.
    fn end_of(&mut self, id: ConnId, bytes: usize, end: ReceiveEnd) -> Completion {
        match self.blocks.is_empty() {
            true => Completion::ReceiveEnded { id, end },
            false => match self.blocks.remove(&id) {
                Some(ReceiveTarget { block, .. }) => Completion::Filled { id, block, bytes, end },
                None => Completion::ReceiveEnded { id, end },
            },
        }
    }

    /// True if the pool has a buffer. Asks by lending one: the system may refuse memory below the
    /// pool's limit.
    pub(super) fn can_lend(&mut self) -> bool {
        let buffer = self.side.lend();
        if let Some(buffer) = buffer {
            self.side.take_back(buffer);
        }
        buffer.is_some()
    }

    /// Receives from the connections in the queue, one buffer each and going round, within the
    /// budget.
    pub(super) fn read(&mut self, room: &mut Room, completions: &mut Vec<Completion>) {
        while room.is_left(completions) && self.ports.has_queued() {
            if !self.blocks.is_empty() && self.read_into(room, completions) {
                continue;
            }
            if !self.refuses_several
                && self.ports.front().is_some_and(|port| port.full && port.several)
                && self.read_several(room, completions)
            {
                self.end_once(room, completions);
                continue;
            }
            let Some(buffer) = self.side.lend() else {
                self.pool_empty = true;
                self.stats.receives_parked += self.ports.park_all();
                return;
            };
            if let Some(completion) = self.read_one(buffer) {
                if let Completion::Received { lease, .. } = &completion {
                    room.bytes = room.bytes.saturating_sub(lease.len());
                }
                completions.push(completion);
                self.end_once(room, completions);
            }
        }
    }

    /// Ends the one-shot receive that has just brought bytes.
    #[inline]
    fn end_once(&mut self, room: &Room, completions: &mut Vec<Completion>) {
        if let Some(id) = self.once_over.take() {
            let end = Completion::ReceiveEnded { id, end: ReceiveEnd::Stopped };
            if room.is_left(completions) { completions.push(end) } else { self.ready.push_back(end) }
        }
    }

    /// Receives from the head of the queue into its block. False if it has none.
    #[cold]
    fn read_into(&mut self, room: &mut Room, completions: &mut Vec<Completion>) -> bool {
        let Some(port) = self.ports.front() else { return false };
        let id = port.id();
        let Some(ReceiveTarget { block, most }) = self.blocks.get_mut(&id) else { return false };
        let result = port.receive(&mut self.stats.calls, block.spare(*most));
        let (bytes, end) = match result {
            Ok(count) if count > 0 => {
                block.advance(count);
                port.readable = port.has_more(count == *most);
                (count, ReceiveEnd::Stopped)
            }
            Ok(_) if port.failed != 0 => (0, ReceiveEnd::Error(port.failed.into())),
            Ok(_) => (0, ReceiveEnd::Eof),
            Err(Errno::INTR) => return true,
            Err(Errno::AGAIN) => {
                port.is_empty();
                self.ports.sync_queue(id.slot());
                return true;
            }
            Err(errno) => (0, ReceiveEnd::Error(errno.raw_os_error())),
        };
        (port.receiving, port.once) = (false, false);
        self.ports.sync_queue(id.slot());
        room.bytes = room.bytes.saturating_sub(bytes);
        completions.push(self.end_of(id, bytes, end));
        true
    }

    /// Receives from the head of the queue, which goes to its tail or leaves it.
    #[inline]
    fn read_one(&mut self, buffer: u16) -> Option<Completion> {
        let port = self.ports.front()?;
        let id = port.id();
        let spare = self.side.spare(buffer);
        let bytes = spare.len();
        match port.receive(&mut self.stats.calls, spare) {
            Ok(count) if count > 0 => {
                // A short receive emptied the socket: later bytes cause an edge.
                port.full = count == bytes;
                port.readable = port.has_more(port.full);
                if port.once {
                    (port.receiving, port.once) = (false, false);
                    self.once_over = Some(id);
                }
                if port.readable && port.receiving {
                    self.ports.rotate();
                } else {
                    self.ports.leave(id.slot());
                }
                let lease = self.side.received(buffer, count);
                Some(Completion::Received { id, lease })
            }
            result => {
                self.side.take_back(buffer);
                self.found_nothing(id, result)
            }
        }
    }

    /// Receives from the head of the queue into several buffers, for a completion each. False if
    /// the connection gets only one, now or permanently: then nothing was received.
    #[inline(never)]
    fn read_several(&mut self, room: &mut Room, completions: &mut Vec<Completion>) -> bool {
        let each = self.pool.buffer_bytes();
        let left = (room.bytes / each).min(room.end - completions.len()).min(self.pool.counts().free);
        if room.share == 0 {
            let sharing = self.ports.queued_up_to(left / 2 + 1).max(1);
            room.share = (left / sharing).max(1);
        }
        let Some(port) = self.ports.front() else { return false };
        let id = port.id();
        let most = left.min(room.share).min(SEVERAL);
        if most < 2 {
            return false;
        }
        let mut buffers = [0; SEVERAL];
        let (count, result) = {
            let mut slices: [IoSliceMut<'_>; SEVERAL] = std::array::from_fn(|_| IoSliceMut::new(&mut []));
            let mut places = buffers.iter_mut().zip(&mut slices);
            let count = self.side.lend_several(most, |buffer, spare| {
                if let Some((place, slice)) = places.next() {
                    (*place, *slice) = (buffer, IoSliceMut::new(spare));
                }
            });
            (count, port.receive_several(&mut self.stats.calls, &mut slices[..count]))
        };
        // A filter of system calls that allows only the others.
        self.refuses_several = matches!(result, Err(Errno::PERM | Errno::NOSYS | Errno::ACCESS));
        let bytes = result.unwrap_or_default();
        let used = bytes.div_ceil(each);
        // The last one first, so that they are lent in the same order again.
        for buffer in buffers[used..count].iter().rev() {
            self.side.take_back(*buffer);
        }
        if bytes == 0 {
            if !self.refuses_several {
                completions.extend(self.found_nothing(id, result));
            }
            return !self.refuses_several;
        }
        port.full = bytes >= each;
        port.readable = port.has_more(bytes == count * each);
        if port.once {
            (port.receiving, port.once) = (false, false);
            self.once_over = Some(id);
        }
        if port.readable && port.receiving {
            self.ports.rotate();
        } else {
            self.ports.leave(id.slot());
        }
        let mut left = bytes;
        for buffer in &buffers[..used] {
            let lease = self.side.received(*buffer, left.min(each));
            left -= lease.len();
            completions.push(Completion::Received { id, lease });
        }
        room.bytes = room.bytes.saturating_sub(bytes);
        true
    }

    /// Handles a receive from the head of the queue that brought no byte, which may be its end.
    fn found_nothing(&mut self, id: ConnId, result: Result<usize, Errno>) -> Option<Completion> {
        let port = self.ports.find(id)?;
        let end = match result {
            Ok(_) if port.failed != 0 => Some(ReceiveEnd::Error(port.failed.into())),
            Ok(_) => Some(ReceiveEnd::Eof),
            Err(Errno::INTR) => None,
            Err(Errno::AGAIN) => {
                port.is_empty();
                None
            }
            Err(errno) => Some(ReceiveEnd::Error(errno.raw_os_error())),
        };
        // After the end the socket stays readable: the next receive finds the end again.
        port.receiving &= end.is_none();
        self.ports.sync_queue(id.slot());
        end.map(|end| Completion::ReceiveEnded { id, end })
    }
}
