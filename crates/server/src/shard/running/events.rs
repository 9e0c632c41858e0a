//! Events of a turn, and the part of a shard that handles each: a service, or the upstreams.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::task::Waker;

use ringserve_base::guard::wake;
use ringserve_base::peer::Peer;
use ringserve_core::{CloseReason, Completion, ConnId, Driver, EndedConn, Frames, Lane, Page, Socket};

use crate::log::LogObserver;
use crate::shard::Core;
use crate::shard::calls::opens::OPENING;
use crate::shard::messages::commands::Part;
use crate::shard::state::services::Services;
use crate::shard::state::shard_loop::{ShardLane, named};
use crate::shard::state::upstreams::UPSTREAM;
use crate::shard::tasks::spawned::SPAWNED;
use crate::shard::wakes::inbox::Command;
use crate::shard::wakes::wake::Attention;
use crate::stats::StalledWork;

/// The number of times that a turn polls tasks that others of the same turn woke: one task hands
/// its result to another, which sends it. Four, since HTTP/2 with a task for each request needs
/// two, and a task that wakes itself without end must not keep the shard from its sockets.
const WAKE_ROUNDS: usize = 4;

impl<D: Driver<Descriptor = OwnedFd>, V: Services> ShardLane<D, V> {
    /// Polls tasks that were woken, as many as the turn has room for.
    pub(crate) fn run_woken(&mut self, core: &mut Core) {
        let mut woken = std::mem::take(&mut self.parts.delivery.tasks);
        let mut polled = 0;
        for &task in &woken {
            if !core.take_call() {
                break;
            }
            polled += 1;
            if task & SPAWNED != 0 {
                self.common.works(StalledWork::Task);
                self.common.shard.tasks().resume(task & !SPAWNED);
                continue;
            }
            let goes_on = match task & UPSTREAM {
                0 => self.services.resume(&mut self.common, core, task),
                _ => {
                    self.common.works(StalledWork::Task);
                    self.parts.upstreams.read(core, task & !UPSTREAM)
                }
            };
            if let Some(id) = goes_on {
                if task & OPENING != 0 {
                    // The goodbye of a drain comes before the first frame, which may be the last
                    // that is answered.
                    core.dispatch(self);
                }
                core.run_frames(id, self);
            }
            // If that ended the connection, its other calls are dropped before one of them is
            // polled and its slot serves another.
            core.dispatch(self);
        }
        woken.drain(..polled);
        self.parts.delivery.tasks = woken;
        self.common.works(StalledWork::Task);
        self.common.shard.tasks().run_new();
    }

    /// Carries out requests made since the turn began, by the shard's own code as a rule: so pushes
    /// leave with the replies of their turn, and cause no other turn. Requests made meanwhile are
    /// left for the next turn.
    #[cold]
    #[inline(never)]
    fn attend_late(&mut self, core: &mut Core) {
        // After those that the turn had no room for at its beginning.
        self.parts.remote.take_letters(&mut self.parts.delivery.letters);
        if !self.parts.delivery.letters.is_empty() {
            self.read_letters(core, Part::End);
        }
        // Both: what is left in the word would keep the shard from sleeping.
        if self.parts.called.has(Attention::UPSTREAMS) | self.parts.remote.take(Attention::UPSTREAMS) {
            self.parts.upstreams.serve(core);
        }
    }
}

/// Counts bytes that came for a connection, if that has an account.
#[cold]
fn count_received(core: &Core, id: ConnId, bytes: usize) {
    if let Some(outlet) = core.shared(id) {
        outlet.count_received(bytes);
    }
}

/// The same of bytes that the kernel took: all but `left` of what was in flight.
#[cold]
fn count_sent(core: &Core, id: ConnId, left: usize) {
    if let Some(outlet) = core.shared(id) {
        outlet.count_sent(left);
    }
}

impl<D: Driver<Descriptor = OwnedFd>, V: Services> Lane<LogObserver> for ShardLane<D, V> {
    #[inline]
    fn on_completion(&mut self, core: &mut Core, completion: &Completion) {
        if !self.common.keeps_accounts {
            return;
        }
        // Not handed on as it is: what leaves by a call must lie in memory, and is copied for each
        // completion.
        match completion {
            Completion::Received { id, lease } => count_received(core, *id, lease.len()),
            Completion::Filled { id, bytes, .. } => count_received(core, *id, *bytes),
            Completion::Sent { id, batch, .. } => count_sent(core, *id, batch.len()),
            _ => {}
        }
    }

    #[inline]
    fn begin(&mut self, core: &mut Core) {
        // First: from here on a watchdog sees that the shard no longer waits.
        self.parts.called = self.parts.remote.begin_turn(&mut self.parts.delivery);
        if self.parts.called.has(Attention::WATCHED)
            && let Some(alarm) = self.parts.remote.alarm()
        {
            alarm.begins(self.common.now);
        }
        if self.common.shard.timers().is_due(self.common.now) {
            let due = self.common.fire_timers();
            self.parts.called.add(due);
        }
        if self.parts.called.has(Attention::COMMAND) {
            self.apply_orders(core);
        }
        if self.parts.command != Command::Serve {
            self.notify_leaving(core);
        }
        if self.parts.called.has(Attention::MESSAGES) {
            self.read_messages();
        }
        if !self.parts.delivery.letters.is_empty() {
            self.read_letters(core, Part::Begin);
        }
    }

    fn accepted(&mut self, core: &mut Core, socket: Socket, peer: Option<SocketAddr>, listener: u16) {
        let mut peer = Peer::new(peer, listener);
        if self.comes_from_a_shared_queue(&peer) && self.is_ahead(core) {
            core.handed_off(listener, peer.addr());
            return self.hand_off_to_another(socket, peer.addr(), peer.listener_id());
        }
        if self.parts.asks.local {
            peer.asked_mut().local = self.parts.driver.local_of(socket);
        }
        if self.parts.asks.credentials && self.may_be_unix(&peer) {
            peer.asked_mut().credentials = self.parts.driver.credentials_of(socket);
        }
        self.services.accepted(&mut self.common, core, socket, peer);
    }

    fn hand_off(&mut self, _: &mut Core, socket: Socket, peer: Option<SocketAddr>, listener: u16) {
        self.hand_off_to_another(socket, peer, listener);
    }

    fn proxied(&mut self, core: &mut Core, id: ConnId) {
        self.services.proxied(&mut self.common, core, id);
    }

    fn secured(&mut self, core: &mut Core, id: ConnId) {
        if self.parts.upstreams.owns(core, id) {
            self.common.works_for(core, StalledWork::Waker, id);
            return self.parts.upstreams.secured(core, id);
        }
        self.services.secured(&mut self.common, core, id);
    }

    fn connected(&mut self, core: &mut Core, id: ConnId) {
        self.common.works_for(core, StalledWork::Waker, id);
        self.parts.upstreams.connected(core, id);
    }

    #[inline(always)]
    fn frames(&mut self, frames: &mut Frames<'_, LogObserver>) {
        if frames.lane() == self.parts.upstreams.lane() {
            let (id, peer) = (frames.id(), frames.shared().peer_words());
            self.common.meter.snapshot.work.on_connection(StalledWork::Task, id, peer);
            return self.parts.upstreams.frames(frames);
        }
        self.services.frames(&mut self.common, frames);
    }

    fn timed_out(&mut self, core: &mut Core, id: ConnId) {
        self.services.timed_out(&mut self.common, core, id);
    }

    fn draining(&mut self, core: &mut Core, id: ConnId) {
        self.services.draining(&mut self.common, core, id);
    }

    fn heartbeat(&mut self, core: &mut Core, id: ConnId) {
        self.services.heartbeat(&mut self.common, core, id);
    }

    fn input_ended(&mut self, core: &mut Core, id: ConnId) {
        if self.parts.upstreams.owns(core, id) {
            self.common.works_for(core, StalledWork::Task, id);
            return self.parts.upstreams.input_ended(core, id);
        }
        self.services.input_ended(&mut self.common, core, id);
    }

    fn wake(&mut self, core: &mut Core, id: ConnId, waker: Waker) {
        self.common.works_for(core, StalledWork::Waker, id);
        if self.parts.upstreams.owns(core, id) {
            return self.parts.upstreams.wake(core, id, waker);
        }
        if let Err(panicked) = wake(waker) {
            self.common.report_panic("waker", named(core, id), &panicked);
            core.abort(id, CloseReason::HandlerPanicked);
        }
    }

    fn ended(&mut self, core: &mut Core, ended: EndedConn) {
        let id = ended.id;
        if ended.lane == self.parts.upstreams.lane() {
            self.common.meter.snapshot.work.on_connection(StalledWork::Task, id, ended.shared.peer_words());
            self.parts.upstreams.ended(core, ended);
        } else {
            self.services.ended(&mut self.common, ended);
        }
        self.common.shard.awaited().ended(id);
    }

    fn page(&mut self, _: &mut Core, source: u32, page: &mut Page) -> bool {
        self.common.works(StalledWork::Task);
        self.common.shard.page_sources().run(source, page).unwrap_or_else(|panicked| {
            self.common.report_panic("page", None, &panicked);
            false
        })
    }

    #[inline]
    fn attend(&mut self, core: &mut Core) {
        let mut called = self.parts.called.has(Attention::TASKS);
        for _ in 0..WAKE_ROUNDS {
            if self.parts.delivery.tasks.is_empty() {
                called |= self.parts.remote.take_woken(&mut self.parts.delivery.tasks);
            }
            if self.parts.delivery.tasks.is_empty() && !called {
                break;
            }
            called = false;
            self.run_woken(core);
            if !self.parts.delivery.tasks.is_empty() {
                break;
            }
        }
        let left_over = !self.parts.delivery.letters.is_empty();
        if self.parts.called.has(Attention::UPSTREAMS) | left_over | self.parts.remote.has(Attention::LATE) {
            self.attend_late(core);
        }
        let grown = core.held_bytes() >> 20;
        if self.parts.spare.is_concerned(core.all_connections(), self.parts.driver.pool().total(), grown) {
            self.check_spare(core);
        }
    }
}
