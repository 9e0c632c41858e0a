//! What a turn brings to the service: newcomers, frames, calls that were woken, ends.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::task::Waker;

use ringserve_core::framing::{FrameError, Framing};
use ringserve_core::{CloseReason, ConnId, ConnShared, Driver, Ended, Frames, Lane, Next, Socket};
use tracing::field::display;
use tracing::{debug, warn};

use super::Core;
use super::calls::{CallEnd, Job, Resumed};
use super::inbox::Command;
use super::spawned::SPAWNED;
use super::state::{ServiceLane, named};
use super::upstreams::UPSTREAM;
use super::wake::Attention;
use crate::cx::Cx;
use crate::guard::{Panicked, guard, wake};
use crate::log::{LogObserver, guarded};
use crate::peer::Peer;
use crate::service::Service;

/// How often a turn polls those who were woken, by others of the same turn as a rule: one task hands its result to
/// another, which sends it. Four, since HTTP/2 with a task for each request needs two, and a task that wakes itself without
/// end must not keep the shard from its sockets. What others want of connections is for the next turn.
const WAKE_ROUNDS: usize = 4;

impl<S, F, D, Make, Fut> ServiceLane<S, F, D, Make, Fut>
where
    S: Service,
    F: Framing,
    D: Driver<Descriptor = OwnedFd>,
    Make: Fn(Rc<S>, Rc<Job<S>>) -> Fut,
    Fut: Future<Output = ()>,
{
    /// Has a connection's frames called for, one after the other.
    #[inline]
    fn call_for_each_frame(&mut self, frames: &mut Frames<'_, LogObserver>) {
        let Some(shared) = frames.shared().downcast_ref::<S::Session>() else { return };
        loop {
            let Some((task, slot)) = self.tasks.idle() else { return frames.abort(CloseReason::MemoryLimit) };
            // The slot is free for the next call as long as none waits.
            let failed = loop {
                match frames.next_frame(&*self.framing) {
                    Next::Frame(frame) => match slot.call(shared, frame) {
                        Some(Ok(())) => {}
                        Some(Err(error)) => break Some(error),
                        None => break None,
                    },
                    Next::Nothing => return,
                    Next::Bad(error) => return self.malformed(frames, shared, error),
                }
            };
            let id = frames.id();
            if let Some(error) = failed {
                return self.failed(frames.shard(), id, error);
            }
            self.tasks.waits(task, id);
            let parked = frames.park(task, self.tasks.call_bytes());
            self.tasks.list(task, parked);
        }
    }

    #[cold]
    fn malformed(
        &mut self,
        frames: &mut Frames<'_, LogObserver>,
        shared: &ConnShared<S::Session>,
        error: FrameError,
    ) {
        guarded(|| debug!(shard = self.shard.index(), id = %frames.id(), %error, "bad frame"));
        self.service.malformed(&Cx::new(shared, &self.shard), &error);
        frames.finish(CloseReason::BadFrame(error));
    }

    /// A connection of the service, until it ended.
    fn shared(&self, core: &Core, id: ConnId) -> Option<ConnShared<S::Session>> {
        core.shared(id)?.downcast_ref().cloned()
    }

    /// Calls a hook of the service for a connection.
    #[cold]
    fn notify(
        &mut self,
        core: &mut Core,
        id: ConnId,
        place: &str,
        hook: impl FnOnce(&S, &Cx<'_, S::Session>),
    ) {
        let Some(shared) = self.shared(core, id) else { return };
        if let Err(panicked) = guard(|| hook(&self.service, &Cx::new(&shared, &self.shard))) {
            self.report_panic(place, named(core, id), &panicked);
            core.abort(id, CloseReason::HandlerPanicked);
        }
    }

    fn accept(&mut self, core: &mut Core, socket: Socket, mut peer: Peer) {
        if self.comes_from_a_shared_queue(&peer) && self.is_ahead(core) {
            core.handed_off();
            return self.hand_off_to_another(socket, peer.addr, peer.listener);
        }
        if self.asks.local {
            peer.asked.local = self.driver.local_of(socket);
        }
        if self.asks.credentials && self.may_be_unix(&peer) {
            peer.asked.credentials = self.driver.credentials_of(socket);
        }
        let admitted = match &self.admit {
            None => Ok(true),
            Some(admit) => guard(|| admit(&peer)),
        };
        let session = match admitted {
            Ok(true) => guard(S::Session::default).map(Some),
            Ok(false) => Ok(None),
            Err(panicked) => Err(panicked),
        };
        let session = session.unwrap_or_else(|panicked| {
            self.report_panic("admit", None, &panicked);
            None
        });
        let Some(session) = session else { return core.refuse(socket) };
        let Some(id) = core.admit(socket, peer.addr, peer.listener, session) else { return };
        let Some(shared) = self.shared(core, id) else { return };
        shared.set_asked(peer.asked);
        match guard(|| self.service.open(&Cx::new(&shared, &self.shard))) {
            Ok(Ok(())) => core.opened(id),
            Ok(Err(refusal)) => {
                let shard = self.shard.index();
                guarded(|| debug!(shard, %id, %peer, %refusal, "connection refused by open"));
                core.refused(id);
            }
            Err(panicked) => {
                self.report_panic("open", Some((id, peer)), &panicked);
                core.abort(id, CloseReason::HandlerPanicked);
            }
        }
    }

    #[cold]
    fn failed(&mut self, core: &mut Core, id: ConnId, error: S::Error) {
        let shard = self.shard.index();
        let peer = core.shared(id).map(|shared| Peer::of(shared));
        // Of several calls that fail the first one ends the connection.
        let first = core.shared(id).is_some_and(|shared| !shared.is_gone());
        let warns = first && self.handler_errors.allows(self.now);
        // Writing the error and dropping it is user code too.
        let done = guard(move || {
            let peer = peer.map(display);
            if warns {
                warn!(shard, %id, peer, %error, "handler failed, connection closed");
            } else {
                debug!(shard, %id, peer, %error, "handler failed");
            }
        });
        if let Err(panicked) = done {
            self.report_panic("error", named(core, id), &panicked);
        }
        core.finish(id, CloseReason::HandlerError);
    }

    /// Polls tasks that were woken, as many as the turn has room for.
    pub(super) fn run_woken(&mut self, core: &mut Core) {
        let mut woken = std::mem::take(&mut self.delivery.tasks);
        let mut polled = 0;
        for &task in &woken {
            if !core.take_call() {
                break;
            }
            polled += 1;
            if task & SPAWNED != 0 {
                self.shard.tasks().resume(task & !SPAWNED);
                continue;
            }
            if task & UPSTREAM != 0 {
                if let Some(id) = self.upstreams.read(core, task & !UPSTREAM) {
                    core.run_frames(id, self);
                    core.dispatch(self);
                }
                continue;
            }
            let Some(CallEnd { id, result, next, bytes }) = self.tasks.resume(task) else { continue };
            core.call_done(id, task, next, bytes);
            match result {
                Resumed::Done(Ok(())) => core.run_frames(id, self),
                Resumed::Done(Err(error)) => self.failed(core, id, error),
                Resumed::Panicked(panicked) => self.panicked(core, id, &panicked),
            }
            // If that ended the connection, its other calls are dropped before one of them is polled and its slot serves another.
            core.dispatch(self);
        }
        woken.drain(..polled);
        self.delivery.tasks = woken;
        self.shard.tasks().run_new();
    }

    #[cold]
    fn panicked(&mut self, core: &mut Core, id: ConnId, panicked: &Panicked) {
        self.report_panic("call", named(core, id), panicked);
        core.abort(id, CloseReason::HandlerPanicked);
    }
}

impl<S, F, D, Make, Fut> Lane<LogObserver> for ServiceLane<S, F, D, Make, Fut>
where
    S: Service,
    F: Framing,
    D: Driver<Descriptor = OwnedFd>,
    Make: Fn(Rc<S>, Rc<Job<S>>) -> Fut,
    Fut: Future<Output = ()>,
{
    #[inline]
    fn begin(&mut self, core: &mut Core) {
        if let Err(panicked) = self.shard.timers().fire(self.now) {
            self.report_panic("waker", None, &panicked);
        }
        self.called = self.remote.begin_turn(&mut self.delivery);
        if self.called.has(Attention::COMMAND) {
            self.apply_orders(core);
        }
        if self.command != Command::Serve {
            self.notify_stopping(core);
        }
        if self.called.has(Attention::MESSAGES) {
            self.read_messages();
        }
        if !self.delivery.letters.is_empty() {
            self.read_letters(core);
        }
    }

    fn accepted(&mut self, core: &mut Core, socket: Socket, peer: Option<SocketAddr>, listener: u16) {
        self.accept(core, socket, Peer::new(peer, listener));
    }

    fn hand_off(&mut self, _: &mut Core, socket: Socket, peer: Option<SocketAddr>, listener: u16) {
        self.hand_off_to_another(socket, peer, listener);
    }

    fn connected(&mut self, core: &mut Core, id: ConnId) {
        self.upstreams.connected(core, id);
    }

    #[inline]
    fn frames(&mut self, frames: &mut Frames<'_, LogObserver>) {
        if frames.lane() == self.upstreams.lane() {
            return self.upstreams.frames(frames);
        }
        if let Err(panicked) = guard(|| self.call_for_each_frame(frames)) {
            self.tasks.recover();
            let id = frames.id();
            self.panicked(frames.shard(), id, &panicked);
        }
    }

    fn heartbeat(&mut self, core: &mut Core, id: ConnId) {
        self.notify(core, id, "heartbeat", |service, cx| service.heartbeat(cx));
    }

    fn input_ended(&mut self, core: &mut Core, id: ConnId) {
        if self.upstreams.owns(core, id) {
            return self.upstreams.input_ended(core, id);
        }
        self.notify(core, id, "input_ended", |service, cx| service.input_ended(cx));
    }

    fn wake(&mut self, core: &mut Core, id: ConnId, waker: Waker) {
        if self.upstreams.owns(core, id) {
            return self.upstreams.wake(core, id, waker);
        }
        if let Err(panicked) = wake(waker) {
            self.report_panic("waker", named(core, id), &panicked);
            core.abort(id, CloseReason::HandlerPanicked);
        }
    }

    fn ended(&mut self, core: &mut Core, ended: Ended) {
        if ended.lane == self.upstreams.lane() {
            return self.upstreams.ended(core, ended);
        }
        let Ended { id, shared, reason, opened, call, .. } = ended;
        if let Some(task) = call {
            self.tasks.cancel(task);
        }
        // Apart, since a panic in the drop would meet one of the hook.
        let closed = guard(|| {
            if opened && let Some(shared) = shared.downcast_ref() {
                self.service.close(shared.body(), reason);
            }
        });
        let peer = Peer::of(&shared);
        let dropped = guard(move || drop(shared));
        if let Err(panicked) = closed.and(dropped) {
            self.report_panic("close", Some((id, peer)), &panicked);
        }
    }

    #[inline]
    fn attend(&mut self, core: &mut Core) {
        let mut called = self.called.has(Attention::TASKS);
        for _ in 0..WAKE_ROUNDS {
            if self.delivery.tasks.is_empty() {
                called |= self.remote.take_woken(&mut self.delivery.tasks);
            }
            if self.delivery.tasks.is_empty() && !called {
                break;
            }
            called = false;
            self.run_woken(core);
            if !self.delivery.tasks.is_empty() {
                break;
            }
        }
        // Both: what is left in the word would keep the shard from sleeping.
        if self.called.has(Attention::UPSTREAMS) | self.remote.take(Attention::UPSTREAMS) {
            self.upstreams.serve(core);
        }
        let grown = core.held_bytes() >> 20;
        if self.spare.is_concerned(core.all_connections(), self.driver.pool().total(), grown) {
            self.check_spare(core);
        }
    }
}
