//! Receiving: one buffer at a time for each connection in the queue, going round.

use ringserve_core::{Completion, ConnId, ReceiveEnd};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use super::{Epoll, Room};

impl Epoll {
    pub(super) fn receive(&mut self, id: ConnId) {
        match self.ports.find(id) {
            Some(port) if !port.receiving => {
                port.receiving = true;
                self.stats.receives_armed += 1;
                self.ports.sync_queue(id.slot());
            }
            _ => Self::unknown(id, "receive"),
        }
    }

    /// What is in the socket stays there for the next receive.
    pub(super) fn receive_stop(&mut self, id: ConnId) {
        let Some(port) = self.ports.find(id) else { return Self::unknown(id, "stop of a receive") };
        if std::mem::replace(&mut port.receiving, false) {
            self.ports.sync_queue(id.slot());
            self.ready.push_back(Completion::ReceiveEnded { id, end: ReceiveEnd::Stopped });
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
            let Some(buffer) = self.side.lend() else {
                self.dry = true;
                self.stats.receives_parked += self.ports.park_all();
                return;
            };
            if let Some(completion) = self.read_one(buffer) {
                if let Completion::Received { lease, .. } = &completion {
                    room.bytes = room.bytes.saturating_sub(lease.len());
                }
                completions.push(completion);
            }
        }
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
        let end = match result {
            Ok(count) if count > 0 => {
                // A short receive emptied the socket: what comes later makes an edge. Not so the peer's end, if
                // its edge was seen already.
                port.readable = count == bytes || port.hung_up;
                if port.readable {
                    self.ports.rotate();
                } else {
                    self.ports.leave(id.slot());
                }
                let lease = self.side.received(buffer, count, true);
                return Some(Completion::Received { id, lease });
            }
            Ok(_) if port.failed != 0 => Some(ReceiveEnd::Error(port.failed.into())),
            Ok(_) => Some(ReceiveEnd::Eof),
            Err(Errno::INTR) => None,
            Err(Errno::AGAIN) => {
                (port.readable, port.hung_up) = (false, false);
                None
            }
            Err(errno) => Some(ReceiveEnd::Error(errno.raw_os_error())),
        };
        self.side.take_back(buffer);
        // After the end the socket stays readable: the next receive finds the end again.
        port.receiving &= end.is_none();
        self.ports.sync_queue(id.slot());
        end.map(|end| Completion::ReceiveEnded { id, end })
    }
}
