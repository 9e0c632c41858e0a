//! Receiving: one buffer at a time for each connection in the queue, going round; several behind a receive that filled one, since
//! more is likely to wait; or straight into the block of a large frame.

use std::io::IoSliceMut;

use ringserve_buf::Block;
use ringserve_core::{Completion, ConnId, ReceiveEnd};
use rustix::io::{Errno, readv};
use rustix::net::{RecvFlags, recv};

use super::{Epoll, Room};

/// Buffers of one receive, at most: 256 KiB, a quarter of what a turn brings. Fewer where others wait for their share of that.
const SEVERAL: usize = 16;

/// Where a receive goes, and how many bytes of it at most.
pub(super) struct Filling {
    block: Box<Block>,
    most: usize,
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
        self.blocks.insert(id, Filling { block, most });
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
                Some(Filling { block, .. }) => Completion::Filled { id, block, bytes, end },
                None => Completion::ReceiveEnded { id, end },
            },
        }
    }

    /// True if the pool has a buffer. Asks by lending one: the system may refuse memory below the pool's limit.
    pub(super) fn can_lend(&mut self) -> bool {
        let buffer = self.side.lend();
        if let Some(buffer) = buffer {
            self.side.take_back(buffer);
        }
        buffer.is_some()
    }

    /// Receives from the connections in the queue, one buffer each and going round, within the budget.
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

    /// Ends the receive that was for once and has just brought bytes.
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
        let Some(Filling { block, most }) = self.blocks.get_mut(&id) else { return false };
        let result = match &port.socket {
            Some(socket) if port.unregistered == 0 => {
                self.stats.calls += 1;
                recv(socket, block.spare(*most), RecvFlags::empty()).map(|(count, _)| count)
            }
            _ => Err(Errno::from_raw_os_error(port.unregistered.into())),
        };
        let (bytes, end) = match result {
            Ok(count) if count > 0 => {
                block.advance(count);
                port.readable = count == *most || port.hung_up;
                (count, ReceiveEnd::Stopped)
            }
            Ok(_) if port.failed != 0 => (0, ReceiveEnd::Error(port.failed.into())),
            Ok(_) => (0, ReceiveEnd::Eof),
            Err(Errno::INTR) => return true,
            Err(Errno::AGAIN) => {
                (port.readable, port.hung_up) = (false, false);
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
        let result = match &port.socket {
            Some(socket) if port.unregistered == 0 => {
                self.stats.calls += 1;
                recv(socket, spare, RecvFlags::empty()).map(|(count, _)| count)
            }
            _ => Err(Errno::from_raw_os_error(port.unregistered.into())),
        };
        match result {
            Ok(count) if count > 0 => {
                // A short receive emptied the socket: what comes later makes an edge. Not so the peer's end, if
                // its edge was seen already.
                port.full = count == bytes;
                port.readable = port.full || port.hung_up;
                if port.once {
                    (port.receiving, port.once) = (false, false);
                    self.once_over = Some(id);
                }
                if port.readable && port.receiving {
                    self.ports.rotate();
                } else {
                    self.ports.leave(id.slot());
                }
                let lease = self.side.received(buffer, count, true);
                Some(Completion::Received { id, lease })
            }
            result => {
                self.side.take_back(buffer);
                self.found_nothing(id, result)
            }
        }
    }

    /// Receives from the head of the queue into several buffers, for a completion each. False if one is all it gets, now or for
    /// good: then nothing was received.
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
            let result = match &port.socket {
                Some(socket) if port.unregistered == 0 => {
                    self.stats.calls += 1;
                    readv(socket, &mut slices[..count])
                }
                _ => Err(Errno::from_raw_os_error(port.unregistered.into())),
            };
            (count, result)
        };
        // A filter of system calls that knows the others alone.
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
        port.readable = bytes == count * each || port.hung_up;
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
            let lease = self.side.received(*buffer, left.min(each), true);
            left -= lease.len();
            completions.push(Completion::Received { id, lease });
        }
        room.bytes = room.bytes.saturating_sub(bytes);
        true
    }

    /// The head of the queue had no byte: its end, if it is one.
    fn found_nothing(&mut self, id: ConnId, result: Result<usize, Errno>) -> Option<Completion> {
        let port = self.ports.find(id)?;
        let end = match result {
            Ok(_) if port.failed != 0 => Some(ReceiveEnd::Error(port.failed.into())),
            Ok(_) => Some(ReceiveEnd::Eof),
            Err(Errno::INTR) => None,
            Err(Errno::AGAIN) => {
                (port.readable, port.hung_up) = (false, false);
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
