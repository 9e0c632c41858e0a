//! What a turn brings to the service: newcomers, frames, calls that were woken, ends.

use std::rc::Rc;

use ringserve_core::framing::Framing;
use ringserve_core::{CloseReason, ConnId, Driver, Event, Next, Socket};
use tracing::field::display;
use tracing::{debug, warn};

use super::calls::{Ended, Job, Resumed};
use super::spawned::SPAWNED;
use super::state::Running;
use super::upstreams::UPSTREAM;
use crate::cx::Cx;
use crate::guard::{Panicked, guard, wake};
use crate::log::guarded;
use crate::peer::Peer;
use crate::service::Service;

impl<S, F, D, Make, Fut> Running<S, F, D, Make, Fut>
where
    S: Service,
    F: Framing,
    D: Driver,
    Make: Fn(Rc<S>, Rc<Job<S>>) -> Fut,
    Fut: Future<Output = ()>,
{
    #[inline]
    pub(super) fn work_off(&mut self) {
        if self.core.has_events() {
            self.work_off_all();
        }
    }

    fn work_off_all(&mut self) {
        while let Some(event) = self.core.next_event() {
            match event {
                Event::Frames(id) => self.run_frames(id),
                Event::Accepted { socket, peer, listener } => {
                    let peer = Peer { addr: peer, listener };
                    self.accept(socket, peer);
                }
                // This half makes none.
                Event::Connected(_) => {}
                Event::Wake(id, waker) => {
                    if let Err(panicked) = wake(waker) {
                        self.report_panic("waker", self.named(id), &panicked);
                        self.core.abort(id, CloseReason::HandlerPanicked);
                    }
                }
                Event::Heartbeat(id) => self.tell(id, "heartbeat", |service, cx| service.heartbeat(cx)),
                Event::InputEnded(id) => self.tell(id, "input_ended", |service, cx| service.input_ended(cx)),
                Event::Elsewhere { socket, peer, listener } => self.pass_on(socket, peer, listener),
                Event::Ended { id, block, reason, opened, handler } => {
                    if let Some(task) = handler {
                        self.tasks.cancel(task);
                    }
                    // Apart, since a panic in the drop would meet one of the hook.
                    let closed = guard(|| {
                        if opened {
                            self.service.close(&block.session, reason);
                        }
                    });
                    let peer = Peer::of(&block.link);
                    let dropped = guard(move || drop(block));
                    if let Err(panicked) = closed.and(dropped) {
                        self.report_panic("close", Some((id, peer)), &panicked);
                    }
                }
            }
        }
    }

    /// Calls a hook of the service for a connection.
    #[cold]
    fn tell(&mut self, id: ConnId, place: &str, hook: impl FnOnce(&S, &Cx<'_, S::Session>)) {
        let Some(block) = self.core.block(id).cloned() else { return };
        if let Err(panicked) = guard(|| hook(&self.service, &Cx::new(&block, &self.shard))) {
            self.report_panic(place, self.named(id), &panicked);
            self.core.abort(id, CloseReason::HandlerPanicked);
        }
    }

    fn accept(&mut self, socket: Socket, peer: Peer) {
        // From a Unix socket, which all shards accept from, or of a peer that is gone, which does no harm.
        if peer.addr.is_none() && self.is_ahead() {
            self.core.given_away();
            return self.pass_on(socket, None, peer.listener);
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
        let Some(session) = session else { return self.core.refuse(socket) };
        let Some(id) = self.core.admit(socket, peer.addr, peer.listener, session) else { return };
        let Some(block) = self.core.block(id).cloned() else { return };
        match guard(|| self.service.open(&Cx::new(&block, &self.shard))) {
            Ok(Ok(())) => self.core.opened(id),
            Ok(Err(refusal)) => {
                let shard = self.shard.index();
                guarded(|| debug!(shard, %id, %peer, %refusal, "connection refused by open"));
                self.core.refused(id);
            }
            Err(panicked) => {
                self.report_panic("open", Some((id, peer)), &panicked);
                self.core.abort(id, CloseReason::HandlerPanicked);
            }
        }
    }

    /// Hands frames of one connection to the service, until there is none or a call waits.
    #[inline]
    pub(super) fn run_frames(&mut self, id: ConnId) {
        if let Err(panicked) = guard(|| self.call_for_each_frame(id)) {
            self.tasks.recover();
            self.panicked(id, &panicked);
        }
    }

    #[inline]
    fn call_for_each_frame(&mut self, id: ConnId) {
        loop {
            match self.core.next_frame(id) {
                Next::Frame(frame, block) => match self.tasks.start(id, block, frame) {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => return self.failed(id, error),
                    Err(None) => return self.core.abort(id, CloseReason::MemoryLimit),
                    Err(Some(task)) => {
                        let parked = self.core.handler_parked(id, task, self.tasks.call_bytes());
                        self.tasks.list(task, parked);
                    }
                },
                Next::Nothing => return,
                Next::Bad(error, block) => {
                    guarded(|| debug!(shard = self.shard.index(), %id, %error, "bad frame"));
                    self.service.malformed(&Cx::new(&block, &self.shard), &error);
                    return self.core.finish(id, CloseReason::BadFrame(error));
                }
            }
        }
    }

    #[cold]
    fn failed(&mut self, id: ConnId, error: S::Error) {
        let shard = self.shard.index();
        let peer = self.core.block(id).map(|block| Peer::of(&block.link));
        // Of several calls that fail the first one ends the connection.
        let first = self.core.block(id).is_some_and(|block| !block.link.is_gone());
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
            self.report_panic("error", self.named(id), &panicked);
        }
        self.core.finish(id, CloseReason::HandlerError);
    }

    /// Polls tasks that were woken, as many as the turn has room for.
    pub(super) fn run_woken(&mut self) {
        let mut woken = std::mem::take(&mut self.post.tasks);
        let mut polled = 0;
        for &task in &woken {
            if !self.core.take_call() {
                break;
            }
            polled += 1;
            if task & SPAWNED != 0 {
                self.shard.tasks().resume(task & !SPAWNED);
                continue;
            }
            if task & UPSTREAM != 0 {
                if let Some(upstreams) = &mut self.upstreams {
                    upstreams.resume(task & !UPSTREAM);
                }
                continue;
            }
            let Some(Ended { id, result, next, bytes }) = self.tasks.resume(task) else { continue };
            self.core.handler_done(id, task, next, bytes);
            match result {
                Resumed::Done(Ok(())) => self.run_frames(id),
                Resumed::Done(Err(error)) => self.failed(id, error),
                Resumed::Panicked(panicked) => self.panicked(id, &panicked),
            }
            // If that ended the connection, its other calls are dropped before one of them is polled and its slot serves another.
            self.work_off();
        }
        woken.drain(..polled);
        self.post.tasks = woken;
        self.shard.tasks().run_new();
    }

    #[cold]
    fn panicked(&mut self, id: ConnId, panicked: &Panicked) {
        self.report_panic("call", self.named(id), panicked);
        self.core.abort(id, CloseReason::HandlerPanicked);
    }
}
