//! The lane of one service: what a turn brings to it, newcomers, frames, calls that were woken, ends.

use std::rc::Rc;

use ringserve_core::framing::{FrameError, Framing};
use ringserve_core::{CloseReason, ConnId, ConnShared, Ended, Frames, Next, Socket};
use tracing::field::display;
use tracing::{debug, warn};

use super::Core;
use super::calls::{CallEnd, Job, Resumed, Tasks};
use super::handle::Shard;
use super::many::TaskNumbers;
use super::services::Services;
use super::state::{Admit, Common, named};
use crate::cx::Cx;
use crate::guard::{Panicked, guard};
use crate::log::{LineLimit, LogObserver, guarded};
use crate::peer::Peer;
use crate::service::Service;

/// One service and its calls. `Make` makes the future that calls it, and `Fut` is that future.
pub(crate) struct ServiceLane<S: Service, F, Make, Fut> {
    service: Rc<S>,
    framing: Rc<F>,
    tasks: Tasks<S, Make, Fut>,
    admit: Option<Admit>,
    handler_errors: LineLimit,
}

impl<S, F, Make, Fut> ServiceLane<S, F, Make, Fut>
where
    S: Service,
    F: Framing,
    Make: Fn(Rc<S>, Rc<Job<S>>) -> Fut,
    Fut: Future<Output = ()>,
{
    pub(crate) fn new(
        shard: &Shard,
        service: S,
        framing: Rc<F>,
        admit: Option<Admit>,
        make: Make,
        numbers: TaskNumbers,
    ) -> Self {
        let service = Rc::new(service);
        let tasks = Tasks::new(service.clone(), make, shard.clone(), numbers);
        ServiceLane { service, framing, tasks, admit, handler_errors: LineLimit::default() }
    }

    /// Has a connection's frames called for, one after the other.
    #[inline]
    fn call_for_each_frame(&mut self, common: &mut Common, frames: &mut Frames<'_, LogObserver>) {
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
                    Next::Bad(error) => return self.malformed(common, frames, shared, error),
                }
            };
            let id = frames.id();
            if let Some(error) = failed {
                return self.failed(common, frames.shard(), id, error);
            }
            self.tasks.waits(task, id);
            let parked = frames.park(task, self.tasks.call_bytes());
            self.tasks.list(task, parked);
        }
    }

    #[cold]
    fn malformed(
        &mut self,
        common: &Common,
        frames: &mut Frames<'_, LogObserver>,
        shared: &ConnShared<S::Session>,
        error: FrameError,
    ) {
        let service = common.names.at(shared.listener());
        guarded(|| debug!(shard = common.shard.index(), service, id = %frames.id(), %error, "bad frame"));
        self.service.malformed(&Cx::new(shared, &common.shard), &error);
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
        common: &mut Common,
        core: &mut Core,
        id: ConnId,
        place: &str,
        hook: impl FnOnce(&S, &Cx<'_, S::Session>),
    ) {
        let Some(shared) = self.shared(core, id) else { return };
        if let Err(panicked) = guard(|| hook(&self.service, &Cx::new(&shared, &common.shard))) {
            common.report_panic(place, named(core, id), &panicked);
            core.abort(id, CloseReason::HandlerPanicked);
        }
    }

    #[cold]
    fn failed(&mut self, common: &mut Common, core: &mut Core, id: ConnId, error: S::Error) {
        let shard = common.shard.index();
        let peer = core.shared(id).map(|shared| Peer::of(shared));
        let service = peer.as_ref().and_then(|peer| common.names.at(peer.listener));
        // Of several calls that fail the first one ends the connection.
        let first = core.shared(id).is_some_and(|shared| !shared.is_gone());
        let warns = first && self.handler_errors.allows(common.now);
        // Writing the error and dropping it is user code too.
        let done = guard(move || {
            let peer = peer.map(display);
            if warns {
                warn!(shard, service, %id, peer, %error, "handler failed, connection closed");
            } else {
                debug!(shard, service, %id, peer, %error, "handler failed");
            }
        });
        if let Err(panicked) = done {
            common.report_panic("error", named(core, id), &panicked);
        }
        core.finish(id, CloseReason::HandlerError);
    }

    #[cold]
    fn panicked(&mut self, common: &mut Common, core: &mut Core, id: ConnId, panicked: &Panicked) {
        common.report_panic("call", named(core, id), panicked);
        core.abort(id, CloseReason::HandlerPanicked);
    }
}

impl<S, F, Make, Fut> Services for ServiceLane<S, F, Make, Fut>
where
    S: Service,
    F: Framing,
    Make: Fn(Rc<S>, Rc<Job<S>>) -> Fut + 'static,
    Fut: Future<Output = ()> + 'static,
{
    fn accepted(&mut self, common: &mut Common, core: &mut Core, socket: Socket, peer: Peer) {
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
            common.report_panic("admit", None, &panicked);
            None
        });
        let Some(session) = session else { return core.refuse(socket, peer.listener) };
        let Some(id) = core.admit(socket, peer.addr, peer.listener, session) else { return };
        let Some(shared) = self.shared(core, id) else { return };
        shared.set_asked(peer.asked);
        match guard(|| self.service.open(&Cx::new(&shared, &common.shard))) {
            Ok(Ok(())) => core.opened(id),
            Ok(Err(refusal)) => {
                let (shard, service) = (common.shard.index(), common.names.at(peer.listener));
                guarded(|| debug!(shard, service, %id, %peer, %refusal, "connection refused by open"));
                core.refused(id);
            }
            Err(panicked) => {
                common.report_panic("open", Some((id, peer)), &panicked);
                core.abort(id, CloseReason::HandlerPanicked);
            }
        }
    }

    #[inline]
    fn frames(&mut self, common: &mut Common, frames: &mut Frames<'_, LogObserver>) {
        if let Err(panicked) = guard(|| self.call_for_each_frame(common, frames)) {
            self.tasks.recover();
            let id = frames.id();
            self.panicked(common, frames.shard(), id, &panicked);
        }
    }

    fn heartbeat(&mut self, common: &mut Common, core: &mut Core, id: ConnId) {
        self.notify(common, core, id, "heartbeat", |service, cx| service.heartbeat(cx));
    }

    fn input_ended(&mut self, common: &mut Common, core: &mut Core, id: ConnId) {
        self.notify(common, core, id, "input_ended", |service, cx| service.input_ended(cx));
    }

    fn ended(&mut self, common: &mut Common, ended: Ended) {
        let Ended { id, shared, reason, opened, call, .. } = ended;
        if let Some(task) = call {
            self.tasks.cancel(task);
        }
        common.shard.tasks().end_of(id);
        // Apart, since a panic in the drop would meet one of the hook.
        let closed = guard(|| {
            if opened && let Some(shared) = shared.downcast_ref() {
                self.service.close(shared.body(), reason);
            }
        });
        let peer = Peer::of(&shared);
        let dropped = guard(move || drop(shared));
        if let Err(panicked) = closed.and(dropped) {
            common.report_panic("close", Some((id, peer)), &panicked);
        }
    }

    #[inline]
    fn resume(&mut self, common: &mut Common, core: &mut Core, task: u32) -> Option<ConnId> {
        let CallEnd { id, result, next, bytes } = self.tasks.resume(task)?;
        core.call_done(id, task, next, bytes);
        match result {
            Resumed::Done(Ok(())) => return Some(id),
            Resumed::Done(Err(error)) => self.failed(common, core, id, error),
            Resumed::Panicked(panicked) => self.panicked(common, core, id, &panicked),
        }
        None
    }

    fn give_back(&mut self) {
        self.tasks.give_back();
    }
}
