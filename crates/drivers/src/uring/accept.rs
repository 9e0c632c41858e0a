//! Accepting, turning what was accepted into connections, and the end of a listener.

use ringserve_core::internals::canonical;
use ringserve_core::{AcceptEnd, Completion, ConnId, Socket};

use std::time::Duration;

use super::kernel::{F_MORE, Kernel, RawCqe, RawOp};
use super::{Sink, Uring};
use crate::shared::accept::{Gone, QueueDrain, TAKEN_IN_A_TURN};
use crate::shared::report::log;

/// A listener's accept.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct UringListener {
    /// True exactly while an accept is with the kernel, or queued for it.
    armed: bool,
    /// True exactly while a stop was requested and the accept has not ended.
    stop: bool,
    life: Life,
    gone: Gone,
}

/// The fate of the listening socket.
#[derive(Clone, Copy, Debug, Default)]
enum Life {
    /// It listens.
    #[default]
    Open,
    /// Once no accept is in flight, the rest of its queue is taken.
    Emptying(QueueDrain),
    /// Once no accept is in flight, the queue is left to its other owners, except for one
    /// connection if an accept ended without any.
    ///
    /// The kernel wakes one of those who wait at a queue for each connection. A ring that was woken
    /// and is stopped before it enters the kernel again does not accept, and wakes no other: the
    /// connection would wait until the next one comes. An accept of one connection is woken once,
    /// so one is taken.
    Leaving(Option<QueueDrain>),
    Closed,
}

impl<K: Kernel> Uring<K> {
    pub(super) fn accept(&mut self, listener: u16) {
        let index = usize::from(listener);
        if self.listeners.len() <= index {
            self.listeners.resize(index + 1, UringListener::default());
        }
        let listening = &mut self.listeners[index];
        debug_assert!(!listening.armed, "listener {listener} accepts already");
        if !matches!(listening.life, Life::Open) {
            debug_assert!(false, "accept on listener {listener}, which is being closed");
            return;
        }
        (listening.armed, listening.stop) = (true, false);
        self.queue.push(RawOp::Accept { listener });
    }

    pub(super) fn accept_stop(&mut self, listener: u16) {
        if let Some(listening) = self.listeners.get_mut(usize::from(listener))
            && listening.armed
            && !listening.stop
        {
            listening.stop = true;
            self.queue.push(RawOp::CancelAccept { listener });
        }
    }

    /// A cancel is pointless once the accept ended, and wrong once there is a new one.
    pub(super) fn prepare_cancel_accept(&self, listener: u16) -> Option<RawOp> {
        let listening = self.listeners.get(usize::from(listener))?;
        (listening.armed && listening.stop).then_some(RawOp::CancelAccept { listener })
    }

    pub(super) fn stop_listening(&mut self, listener: u16) {
        let index = usize::from(listener);
        if self.listeners.len() <= index {
            self.listeners.resize(index + 1, UringListener::default());
        }
        if !matches!(self.listeners[index].life, Life::Open) {
            debug_assert!(false, "listener {listener} is closed twice");
            return;
        }
        self.listeners[index].life = if self.kernel.is_adopted(listener) {
            Life::Leaving(None)
        } else {
            self.stats.calls += 1;
            let late = self.kernel.turn_newcomers_away(listener);
            Life::Emptying(QueueDrain::new(self.kernel.now(), late))
        };
        self.emptying += 1;
        self.accept_stop(listener);
    }

    /// Time until a queue can be asked for the rest of its connections. A queue with an accept in
    /// flight is not asked: the end of the accept is a completion.
    #[cold]
    pub(super) fn queue_due_in(&mut self) -> Option<Duration> {
        let now = self.kernel.now();
        let emptied = self.listeners.iter().filter(|listening| !listening.armed);
        let rests = emptied.filter_map(|listening| match listening.life {
            Life::Emptying(emptying) => Some(emptying.rest(now)),
            Life::Leaving(takes_one) => Some(takes_one.map_or(Duration::ZERO, |emptying| emptying.rest(now))),
            Life::Open | Life::Closed => None,
        });
        rests.min()
    }

    /// Takes the connections left in the queues of listeners whose accept ended, within the budget,
    /// and closes those that are empty.
    #[cold]
    pub(super) fn empty_queues(&mut self, sink: &mut Sink<'_>) {
        let now = self.kernel.now();
        for index in 0..self.listeners.len() {
            let listener = index as u16;
            let mut emptying = match self.listeners[index] {
                UringListener { armed: false, life: Life::Emptying(emptying), .. } => emptying,
                UringListener { armed: false, life: Life::Leaving(takes_one), .. } if sink.has_room() => {
                    self.leave(listener, takes_one, now, sink);
                    continue;
                }
                _ => continue,
            };
            let mut over = emptying.is_out_of_time(listener, now);
            for _ in 0..TAKEN_IN_A_TURN {
                if over || !sink.has_room() || !emptying.rest(now).is_zero() {
                    break;
                }
                self.stats.calls += 1;
                match self.kernel.take_queued(listener) {
                    Ok(fd) => {
                        emptying.went_on();
                        self.accepted(listener, fd, sink);
                    }
                    Err(errno) => over = emptying.is_over(listener, errno, now),
                }
            }
            self.listeners[index].life = Life::Emptying(emptying);
            if over {
                self.close_listener(listener, sink);
            }
        }
    }

    /// Leaves a queue to its other owners, except for the connection for which this ring may have
    /// been woken in their place.
    fn leave(&mut self, listener: u16, takes_one: Option<QueueDrain>, now: Duration, sink: &mut Sink<'_>) {
        if let Some(mut emptying) = takes_one {
            if !emptying.rest(now).is_zero() {
                return;
            }
            self.stats.calls += 1;
            match self.kernel.take_queued(listener) {
                Ok(fd) => self.accepted(listener, fd, sink),
                Err(errno) if !emptying.is_over(listener, errno, now) => {
                    self.listeners[usize::from(listener)].life = Life::Leaving(Some(emptying));
                    return;
                }
                Err(_) => {}
            }
        }
        self.close_listener(listener, sink);
    }

    /// Handles an accept of an adopted queue that stopped without a connection. As for
    /// [`Life::Leaving`], the ring may have been woken for one in the place of another owner. A
    /// connection that cannot be taken for lack of a descriptor waits for the next wake-up.
    #[cold]
    fn take_one(&mut self, listener: u16, sink: &mut Sink<'_>) {
        self.stats.calls += 1;
        if let Ok(fd) = self.kernel.take_queued(listener) {
            self.accepted(listener, fd, sink);
        }
    }

    fn close_listener(&mut self, listener: u16, sink: &mut Sink<'_>) {
        self.stats.calls += 1;
        self.kernel.close_listener(listener);
        self.listeners[usize::from(listener)].life = Life::Closed;
        self.emptying -= 1;
        self.emit(Completion::AcceptEnded { listener, end: AcceptEnd::Closed }, sink);
    }

    fn accepted(&mut self, listener: u16, fd: i32, sink: &mut Sink<'_>) {
        self.stats.calls += u64::from(self.kernel.drop_filter(listener, fd));
        let peer = if self.peer_addresses {
            self.stats.calls += 1;
            self.kernel.peer_of(fd).map(canonical)
        } else {
            None
        };
        self.emit(Completion::Accepted { listener, socket: Socket(fd as u64), peer }, sink);
    }

    pub(super) fn adopt(&mut self, id: ConnId, socket: Socket) {
        assert!(id.slot() < self.connections_max, "slot {} is beyond connections_max", id.slot());
        if !self.ports.open(id) {
            // Closing it is all that can be done without mixing up two connections.
            self.queue.push(RawOp::CloseFd { fd: socket.0 as i32 });
            return Self::unknown(id, "adopt");
        }
        self.queue.push(RawOp::Install { id, fd: socket.0 as i32 });
    }

    #[cold]
    pub(super) fn on_install_failed(&mut self, cqe: RawCqe) {
        log::warn!(id = %cqe.id(), errno = -cqe.res, "a socket could not enter the ring's file table");
        self.anomalies.installs_failed += 1;
    }

    pub(super) fn on_accept(&mut self, cqe: RawCqe, sink: &mut Sink<'_>) {
        let listener = cqe.user_data as u16;
        let index = usize::from(listener);
        if !self.listeners.get(index).is_some_and(|listening| listening.armed) {
            if cqe.res >= 0 {
                self.queue.push(RawOp::CloseFd { fd: cqe.res });
            }
            return self.stale(cqe);
        }
        if cqe.res >= 0 {
            self.listeners[index].gone = Gone::default();
            self.accepted(listener, cqe.res, sink);
            if cqe.flags & F_MORE != 0 {
                return;
            }
        }
        self.anomalies.more_flag += u64::from(cqe.flags & F_MORE != 0);
        if matches!(self.listeners[index].life, Life::Leaving(_)) && cqe.res < 0 {
            let emptying = QueueDrain::new(self.kernel.now(), Duration::ZERO);
            self.listeners[index].life = Life::Leaving(Some(emptying));
        }
        if !matches!(self.listeners[index].life, Life::Open) {
            // The rest of the queue is taken from here on, and the end comes with the last
            // connection of it.
            (self.listeners[index].armed, self.listeners[index].stop) = (false, false);
            return;
        }
        let listening = &mut self.listeners[index];
        let end = match -cqe.res {
            // The accept ended by itself, or was stopped.
            _ if cqe.res >= 0 => None,
            libc::EAGAIN | libc::ECANCELED => None,
            errno => listening.gone.end_of(errno),
        };
        let end = end.or(self.listeners[index].stop.then_some(AcceptEnd::Stopped));
        match end {
            None => self.queue.push(RawOp::Accept { listener }),
            Some(end) => {
                (self.listeners[index].armed, self.listeners[index].stop) = (false, false);
                if matches!(end, AcceptEnd::Stopped) && cqe.res < 0 && self.kernel.is_adopted(listener) {
                    self.take_one(listener, sink);
                }
                self.emit(Completion::AcceptEnded { listener, end }, sink);
            }
        }
    }
}
