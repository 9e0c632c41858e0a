//! Accepting, turning what was accepted into connections, and the end of a listener.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use ringserve_core::internals::{Slots, canonical};
use ringserve_core::{AcceptEnd, Completion, ConnId, Socket as Name};
use rustix::event::epoll::{self, EventData, EventFlags};
use socket2::{Domain, Socket};

use super::{Epoll, LISTENERS, READABLE, Room};
use crate::shared::accept::{self, FilterState, Gone, Listener, ListeningSocket, QueueDrain, accept};
use crate::shared::report::log;
use crate::shared::wait;

/// The most sockets that are accepted and neither adopted nor refused yet. Each is a descriptor,
/// and keeps it while there is no room for the connection. A crowd at a full server must not take
/// the descriptors of an admin endpoint or of files: a server sets 32 aside for each shard.
const ACCEPTED_MAX: usize = 24;

/// Sockets of this kind that a listener may always have: one that waits for its own limit must not
/// hold up the others.
const OWN_MIN: usize = 2;

/// The listener of a socket that another driver accepted.
const TAKEN_OVER: u16 = u16::MAX;

/// A listener.
pub(super) struct EpollListener {
    /// `None` once it is closed.
    socket: Option<Arc<ListeningSocket>>,
    /// An accept is in flight. The listener is registered exactly then, so that no shard is woken
    /// by connections that are not wanted; registering again reports connections that were queued
    /// meanwhile.
    armed: bool,
    /// There may be connections to accept.
    ready: bool,
    /// Other drivers accept from the same queue. A connection wakes all of them, so each takes one
    /// per turn: otherwise the first shard awake would get all.
    is_shared: bool,
    /// The socket has other owners, to whom its queue is left.
    is_adopted: bool,
    /// Set while the queue is emptied, after which the listener is closed.
    emptying: Option<QueueDrain>,
    filter: Arc<FilterState>,
    gone: Gone,
}

impl EpollListener {
    pub(super) fn new(listener: Listener) -> io::Result<EpollListener> {
        let (is_shared, is_adopted) = (listener.is_shared(), listener.is_adopted());
        let (socket, filter) = listener.into_parts();
        socket.set_nonblocking(true)?;
        let socket = Some(socket);
        Ok(EpollListener {
            socket,
            armed: false,
            ready: false,
            is_shared,
            is_adopted,
            emptying: None,
            filter,
            gone: Gone::default(),
        })
    }
}

/// Sockets that were accepted and not adopted or refused yet. A name that was already answered
/// refers to none.
#[derive(Default)]
pub(super) struct AcceptedSockets {
    /// Each socket with its listener, and with whether it is a Unix socket.
    sockets: Slots<(Socket, u16, bool)>,
}

impl AcceptedSockets {
    fn put(&mut self, socket: Socket, listener: u16, is_unix: bool) -> Name {
        let accepted = |_| (socket, listener, is_unix);
        let id = self.sockets.insert_with(accepted).expect("memory for some sockets");
        Name(id.bits())
    }

    pub(super) fn take_over(&mut self, socket: Socket) -> Name {
        let is_unix = socket.domain().is_ok_and(|domain| domain == Domain::UNIX);
        self.put(socket, TAKEN_OVER, is_unix)
    }

    /// True if another one may be accepted at a listener.
    fn has_room(&self, listener: u16) -> bool {
        self.sockets.len() < ACCEPTED_MAX || self.count_of(listener) < OWN_MIN
    }

    #[cold]
    fn count_of(&self, listener: u16) -> usize {
        let all = (0..self.sockets.used()).filter_map(|slot| self.sockets.get(self.sockets.id_at(slot)?));
        all.filter(|(_, of, _)| *of == listener).count()
    }

    pub(super) fn find(&self, name: Name) -> Option<&Socket> {
        self.sockets.get(ConnId::from_bits(name.0)).map(|(socket, ..)| socket)
    }

    pub(super) fn take(&mut self, name: Name) -> Option<(Socket, bool)> {
        self.sockets.remove(ConnId::from_bits(name.0)).map(|(socket, _, is_unix)| (socket, is_unix))
    }
}

impl Epoll {
    pub(super) fn accept(&mut self, listener: u16) {
        let index = usize::from(listener);
        let idle = |listening: &&mut EpollListener| !listening.armed && listening.emptying.is_none();
        let Some(listening) = self.listeners.get_mut(index).filter(idle) else {
            log::error!(listener, "accept on a listener that is not there or accepts already");
            debug_assert!(false, "accept on listener {listener}");
            return;
        };
        let Some(socket) = &listening.socket else { return };
        self.stats.calls += 1;
        match epoll::add(&self.instance, socket, EventData::new_u64(LISTENERS + index as u64), READABLE) {
            Ok(()) => listening.armed = true,
            Err(errno) => {
                let end = AcceptEnd::Error(errno.raw_os_error());
                self.ready.push_back(Completion::AcceptEnded { listener, end });
            }
        }
    }

    pub(super) fn accept_stop(&mut self, listener: u16) {
        let index = usize::from(listener);
        if self.listeners.get(index).is_some_and(|listening| listening.armed) {
            self.disarm(index);
            self.ready.push_back(Completion::AcceptEnded { listener, end: AcceptEnd::Stopped });
        }
    }

    pub(super) fn stop_listening(&mut self, listener: u16) {
        let index = usize::from(listener);
        let listening = self.listeners.get(index).filter(|listening| listening.emptying.is_none());
        let Some(EpollListener { socket: Some(socket), armed, is_adopted, filter, .. }) = listening else {
            log::error!(listener, "close of a listener that is not there or is closed already");
            debug_assert!(false, "end of listener {listener}");
            return;
        };
        if *is_adopted {
            if *armed {
                // The other owners keep the socket, so that a close alone would leave it in the
                // epoll.
                self.disarm(index);
            }
            let end = self.close_listener(index);
            return self.ready.push_back(end);
        }
        self.stats.calls += 1;
        // It is non-blocking already, so nothing that fails here matters.
        let late = accept::turn_newcomers_away(socket, filter).unwrap_or_default();
        if *armed {
            self.disarm(index);
        }
        let listening = &mut self.listeners[index];
        (listening.emptying, listening.ready) = (Some(QueueDrain::new(wait::now(), late)), true);
        self.emptying += 1;
    }

    /// Time until a queue can be asked for the rest of its connections. Queues that can be asked
    /// now become `ready`.
    #[inline]
    pub(super) fn emptied_in(&mut self) -> Option<Duration> {
        if self.emptying == 0 {
            return None;
        }
        let now = wait::now();
        let mut due = None;
        for listening in self.listeners.iter_mut().filter(|listening| listening.socket.is_some()) {
            if let Some(emptying) = &listening.emptying {
                let rest = emptying.rest(now);
                listening.ready |= rest.is_zero();
                due = Some(due.map_or(rest, |due: Duration| due.min(rest)));
            }
        }
        due
    }

    /// Handles an accept that found nothing in the queue of a listener that is being closed.
    fn on_refused(&mut self, index: usize, errno: i32) -> Option<Completion> {
        let (listener, now) = (index as u16, wait::now());
        let listening = &mut self.listeners[index];
        let emptying = listening.emptying.as_mut()?;
        if !emptying.is_over(listener, errno, now) {
            listening.ready = emptying.rest(now).is_zero();
            return None;
        }
        self.emptying -= 1;
        Some(self.close_listener(index))
    }

    fn close_listener(&mut self, index: usize) -> Completion {
        let listening = &mut self.listeners[index];
        (listening.ready, listening.socket) = (false, None);
        self.stats.calls += 1;
        Completion::AcceptEnded { listener: index as u16, end: AcceptEnd::Closed }
    }

    fn disarm(&mut self, index: usize) {
        let listening = &mut self.listeners[index];
        (listening.armed, listening.ready) = (false, false);
        let Some(socket) = &listening.socket else { return };
        self.stats.calls += 1;
        if let Err(error) = epoll::delete(&self.instance, socket) {
            log::debug!(listener = index, %error, "a listener could not be taken out of the epoll");
        }
    }

    pub(super) fn on_queued(&mut self, index: usize) {
        if let Some(listening) = self.listeners.get_mut(index) {
            listening.ready |= listening.armed;
        }
    }

    pub(super) fn can_accept(&self) -> bool {
        (0..self.listeners.len()).any(|index| self.takes(index))
    }

    /// True if the listener is asked for a connection now. The queue of one that is being closed is
    /// emptied in any case.
    fn takes(&self, index: usize) -> bool {
        let listening = &self.listeners[index];
        listening.ready && (listening.emptying.is_some() || self.accepted.has_room(index as u16))
    }

    /// Accepts on each listener that has connections queued, within the budget.
    pub(super) fn take_connections(&mut self, room: &Room, completions: &mut Vec<Completion>) {
        if !self.can_accept() {
            return;
        }
        let count = self.listeners.len();
        let first = self.next_listener;
        self.next_listener = (first + 1) % count;
        for n in 0..count {
            let index = (first + n) % count;
            while self.takes(index) && room.is_left(completions) {
                completions.extend(self.accept_one(index));
                if self.listeners[index].is_shared {
                    break;
                }
            }
        }
    }

    fn accept_one(&mut self, index: usize) -> Option<Completion> {
        let listener = index as u16;
        self.stats.calls += 1;
        let listening = &mut self.listeners[index];
        let Some(listening_socket) = &listening.socket else {
            listening.ready = false;
            return None;
        };
        if listening.emptying.is_some_and(|emptying| emptying.is_out_of_time(listener, wait::now())) {
            self.emptying -= 1;
            return Some(self.close_listener(index));
        }
        let error = match accept(listening_socket, true) {
            Ok((socket, peer)) => {
                listening.gone = Gone::default();
                if let Some(emptying) = &mut listening.emptying {
                    emptying.went_on();
                }
                if listening.filter.is_inherited() {
                    // The socket has no filter if it was accepted before the first one was set, or
                    // after the last one was removed.
                    self.stats.calls += 1;
                    let _ = socket.detach_filter();
                }
                let socket = self.accepted.put(socket, listener, peer.is_unix());
                return Some(Completion::Accepted {
                    listener,
                    socket,
                    peer: peer.as_socket().filter(|_| self.peer_addresses).map(canonical),
                });
            }
            Err(error) => error.raw_os_error().unwrap_or(libc::EIO),
        };
        if listening.emptying.is_some() {
            return self.on_refused(index, error);
        }
        let end = match error {
            libc::EAGAIN => {
                self.listeners[index].ready = false;
                return None;
            }
            errno => self.listeners[index].gone.end_of(errno)?,
        };
        self.disarm(index);
        Some(Completion::AcceptEnded { listener, end })
    }

    pub(super) fn adopt(&mut self, id: ConnId, name: Name) {
        assert!(id.slot() < self.connections_max, "slot {} is beyond connections_max", id.slot());
        let Some((socket, is_unix)) = self.accepted.take(name) else { return Self::unknown(id, "adopt") };
        if self.ports.open(id, Some(socket), is_unix).is_none() {
            // Closing the socket is all that can be done without mixing up two connections.
            return Self::unknown(id, "adopt");
        }
        self.register(id);
    }

    /// Registers the socket of a connection.
    pub(super) fn register(&mut self, id: ConnId) {
        let Some(port) = self.ports.find(id) else { return };
        let Some(socket) = &port.socket else { return };
        self.stats.calls += 1;
        let name = EventData::new_u64(id.slot().into());
        let events = READABLE | EventFlags::OUT | EventFlags::PRI;
        if let Err(errno) = epoll::add(&self.instance, socket, name, events) {
            log::warn!(%id, error = %errno, "a connection could not enter the epoll");
            port.unregistered = errno.raw_os_error() as u16;
            // The next receive finds the error.
            port.readable = true;
        }
    }

    pub(super) fn refuse(&mut self, name: Name) {
        self.stats.calls += 1;
        let known = self.accepted.take(name).is_some();
        debug_assert!(known, "{name:?} was not accepted, or is answered already");
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn sockets_of_one_listener_that_wait_leave_room_for_another() {
        let mut accepted = AcceptedSockets::default();
        let mut come = |listener: u16| {
            let has_room = accepted.has_room(listener);
            let (socket, _) = UnixStream::pair().unwrap();
            let name = has_room.then(|| accepted.put(Socket::from(OwnedFd::from(socket)), listener, true));
            (name, has_room)
        };
        let first = come(0).0.unwrap();
        for _ in 1..ACCEPTED_MAX {
            assert!(come(0).1);
        }
        assert_eq!([0, 1, 1, 1, 2].map(|listener| come(listener).1), [false, true, true, false, true]);
        assert!(accepted.take(first).is_some() && !accepted.has_room(0), "the others have their own");
    }
}
