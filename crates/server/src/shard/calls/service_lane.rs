//! The lane of one service: its new connections, frames, woken calls and ends.

use std::rc::Rc;

use ringserve_base::guard::{Panicked, guard};
use ringserve_base::lines::LineLimit;
use ringserve_base::peer::Peer;
use ringserve_core::framing::{AsFramingState, FrameError, TypedFraming};
use ringserve_core::{
    CloseReason, ConnId, ConnShared, EndedConn, Frame, Frames, Next, RefusedBy, Socket, Whole,
};
use ringserve_drivers::guarded;
use tracing::field::display;
use tracing::{debug, info};

use super::opens::{Answer, OPENING, OpenEnd, OpenOutcome, Opens};
use super::running_calls::{Job, Resumed, Tasks, WokenCall};
use crate::log::LogObserver;
use crate::overload::Shed;
use crate::shard::Core;
use crate::shard::admit::{self, Entrance};
use crate::shard::face::closed::{CloseCx, Failure};
use crate::shard::face::cx::Cx;
use crate::shard::face::handle::Shard;
use crate::shard::face::service::Service;
use crate::shard::state::many::TaskNumbers;
use crate::shard::state::services::Services;
use crate::shard::state::shard_loop::{Admit, Common, named};
use crate::stats::StalledWork;

/// Which hook it is, for the log.
const HEARTBEAT: &str = "heartbeat";

/// One service and its calls. `Make` makes the future that calls it, and `Fut` is that future.
pub(crate) struct ServiceLane<S: Service<F::Head>, F: TypedFraming, Make, Fut> {
    service: Rc<S>,
    framing: Rc<F>,
    tasks: Tasks<S, F::Head, Make, Fut>,
    opens: Opens<S, F::Head>,
    admit: Option<Admit>,
    handler_errors: LineLimit,
    /// The number of the service.
    number: usize,
}

impl<S, F, Make, Fut> ServiceLane<S, F, Make, Fut>
where
    S: Service<F::Head, Session: AsFramingState<F::State>>,
    F: TypedFraming,
    Make: Fn(Rc<S>, Rc<Job<S, F::Head>>) -> Fut,
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
        let opens = Opens::new(service.clone(), shard.clone(), numbers);
        ServiceLane {
            service,
            framing,
            tasks,
            opens,
            admit,
            handler_errors: LineLimit::default(),
            number: numbers.service(),
        }
    }

    /// Calls the service for a connection's frames, one after the other.
    ///
    /// Whether some are shed does not change within a turn. Where none is, no frame is asked for
    /// it: a reference to it would keep it in memory.
    #[inline(always)]
    fn call_for_each_frame<const SHEDS: bool>(
        &mut self,
        common: &mut Common,
        frames: &mut Frames<'_, LogObserver>,
    ) {
        let Some(shared) = frames.shared().downcast_ref::<S::Session>() else { return };
        common.meter.snapshot.work.on_connection(StalledWork::Call, frames.id(), shared.peer_words());
        loop {
            let Some((task, slot)) = self.tasks.idle() else { return frames.abort(CloseReason::MemoryLimit) };
            // The slot is free for the next call as long as none waits.
            let failed = loop {
                let frame = match frames.next_whole(&*self.framing, shared.body().framing_state()) {
                    Whole::Frame(frame) => frame,
                    Whole::Nothing => return,
                    Whole::Other(rest) => {
                        match frames.next_behind(rest, &*self.framing, shared.body().framing_state()) {
                            Next::Frame(frame) => frame,
                            Next::Nothing => return,
                            Next::Bad(error) => return self.malformed(common, frames, shared, error),
                        }
                    }
                };
                if SHEDS && sheds(&*self.service, common, shared, &frame) {
                    continue;
                }
                match slot.call(shared, frame) {
                    Some(Ok(())) => {}
                    Some(Err(error)) => break Some(error),
                    None => break None,
                }
            };
            let id = frames.id();
            if let Some(error) = failed {
                return self.failed(common, frames.shard(), id, error);
            }
            self.tasks.waits(task, id, common.now);
            common.meter.snapshot.durations.call_waits(self.number);
            let parked = frames.park(task, self.tasks.call_bytes());
            self.tasks.list(task, parked);
        }
    }

    /// The same where some of the frames are shed.
    #[cold]
    #[inline(never)]
    fn call_and_shed(
        &mut self,
        common: &mut Common,
        frames: &mut Frames<'_, LogObserver>,
    ) -> Result<(), Panicked> {
        guard(|| self.call_for_each_frame::<true>(common, frames))
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
        place: &'static str,
        hook: impl FnOnce(&S, &Cx<'_, S::Session>),
    ) {
        let Some(shared) = self.shared(core, id) else { return };
        let work = if place == HEARTBEAT { StalledWork::Heartbeat } else { StalledWork::Hook };
        common.works_for(core, work, id);
        if let Err(panicked) = guard(|| hook(&self.service, &Cx::new(&shared, &common.shard))) {
            common.report_panic(place, named(core, id), &panicked);
            core.abort(id, CloseReason::HandlerPanicked);
        }
    }

    /// An `open` is done.
    fn answered(
        &mut self,
        common: &mut Common,
        core: &mut Core,
        id: ConnId,
        answer: Result<Answer<S, F::Head>, Panicked>,
    ) {
        let Some(head) = core.shared(id) else {
            let _ = guard(move || drop(answer));
            return;
        };
        let peer = Peer::of(head);
        match answer {
            Ok(Ok(session)) => match head.fill(session) {
                Ok(_) => core.opened(id),
                Err(session) => _ = guard(move || drop(session)),
            },
            Ok(Err(refusal)) => {
                let (shard, service) = (common.shard.index(), common.names.at(peer.listener_id()));
                guarded(|| debug!(shard, service, %id, %peer, %refusal, "connection refused by open"));
                core.refused(id, RefusedBy::Open);
            }
            Err(panicked) => {
                common.report_panic("open", Some((id, peer)), &panicked);
                core.abort(id, CloseReason::HandlerPanicked);
            }
        }
    }

    /// Begins a connection that was admitted: with the handshake of its transport, if it has one.
    fn begin(&mut self, common: &mut Common, core: &mut Core, id: ConnId) {
        common.works_for(core, StalledWork::Transport, id);
        // Nothing has changed where the transport panics.
        match guard(|| core.begin_handshake(id)) {
            Ok(true) => {}
            Ok(false) => self.open(common, core, id),
            Err(panicked) => {
                common.report_panic("transport", named(core, id), &panicked);
                core.abort(id, CloseReason::HandlerPanicked);
            }
        }
    }

    /// Opens a connection whose peer is known.
    fn open(&mut self, common: &mut Common, core: &mut Core, id: ConnId) {
        let Some(head) = core.shared(id) else { return };
        common.works_for(core, StalledWork::Open, id);
        match self.opens.begin(head.clone()) {
            OpenOutcome::Done(answer) => self.answered(common, core, id, answer),
            OpenOutcome::Waits(task, bytes) => self.opens.counted(task, core.open_parked(id, task, bytes)),
            OpenOutcome::NoMemory => core.abort(id, CloseReason::MemoryLimit),
        }
    }

    /// Polls an `open` that was woken. Returns its connection, if it is done.
    #[cold]
    fn resume_open(&mut self, common: &mut Common, core: &mut Core, task: u32) -> Option<ConnId> {
        if let Some(id) = self.opens.connection(task) {
            common.works_for(core, StalledWork::Open, id);
        }
        let OpenEnd { id, answer, bytes } = self.opens.resume(task)?;
        core.open_done(id, task, bytes);
        self.answered(common, core, id, answer);
        Some(id)
    }

    /// Tells the service of the first failure of a connection.
    #[cold]
    fn report_failure(
        &mut self,
        common: &mut Common,
        core: &mut Core,
        id: ConnId,
        failure: &Failure<'_, S::Error>,
    ) {
        if core.shared(id).is_some_and(|shared| !shared.is_gone()) {
            self.notify(common, core, id, "failed", |service, cx| service.failed(cx, failure));
        }
    }

    #[cold]
    fn failed(&mut self, common: &mut Common, core: &mut Core, id: ConnId, error: S::Error) {
        common.meter.snapshot.durations.call_failed(self.number);
        let shard = common.shard.index();
        let peer = core.shared(id).map(|shared| Peer::of(shared));
        let service = peer.as_ref().and_then(|peer| common.names.at(peer.listener_id()));
        // Of several calls that fail the first one ends the connection.
        let first = core.shared(id).is_some_and(|shared| !shared.is_gone());
        let told = first.then(|| self.handler_errors.sample(common.now)).flatten();
        // Writing the error and dropping it is user code too.
        let logged = guard(|| {
            let peer = peer.map(display);
            match told {
                // What the peer sent may be the cause, so it is no warning.
                Some(left_out) => {
                    info!(shard, service, %id, peer, %error, left_out, "handler failed, connection closed");
                }
                None => debug!(shard, service, %id, peer, %error, "handler failed"),
            }
        });
        self.report_failure(common, core, id, &Failure::Error(&error));
        let dropped = guard(move || drop(error));
        if let Err(panicked) = logged.and(dropped) {
            common.report_panic("error", named(core, id), &panicked);
        }
        core.finish(id, CloseReason::HandlerError);
    }

    #[cold]
    fn panicked(&mut self, common: &mut Common, core: &mut Core, id: ConnId, panicked: &Panicked) {
        common.meter.snapshot.durations.call_panicked(self.number);
        common.report_panic("call", named(core, id), panicked);
        let queued = |core: &Core| core.shared(id).map_or(0, |shared| shared.outbox_bytes());
        let before = queued(core);
        self.report_failure(common, core, id, &Failure::Panicked(panicked.message()));
        match queued(core) > before {
            true => core.finish(id, CloseReason::HandlerPanicked),
            false => core.abort(id, CloseReason::HandlerPanicked),
        }
    }
}

/// True if a frame was shed: it is one of the share, and the service answered it.
#[cold]
fn sheds<S: Service<H>, H>(
    service: &S,
    common: &Common,
    shared: &ConnShared<S::Session>,
    frame: &Frame<H>,
) -> bool {
    // One without a byte is the end of the input.
    if frame.wire().is_empty() || !common.shard.draws(common.load) {
        return false;
    }
    match service.shed(&Cx::new(shared, &common.shard), frame, common.load.load()) {
        Shed::Serve => false,
        Shed::Answered => {
            shared.count_shed();
            common.shard.note_shed();
            true
        }
    }
}

impl<S, F, Make, Fut> Services for ServiceLane<S, F, Make, Fut>
where
    S: Service<F::Head, Session: AsFramingState<F::State>>,
    F: TypedFraming,
    Make: Fn(Rc<S>, Rc<Job<S, F::Head>>) -> Fut + 'static,
    Fut: Future<Output = ()> + 'static,
{
    fn keeps_accounts(&self) -> bool {
        S::ACCOUNTS
    }

    fn accepted(&mut self, common: &mut Common, core: &mut Core, socket: Socket, peer: Peer) {
        let peer = peer.as_proxy(common.proxies.at(peer.listener_id()).is_some());
        let entrance = Entrance {
            admit: self.admit.as_ref(),
            keeps_accounts: S::ACCOUNTS,
            insert: Core::admit::<S::Session>,
        };
        if let Some(id) = admit::accepted(common, core, socket, &peer, &entrance) {
            self.begin(common, core, id);
        }
    }

    fn proxied(&mut self, common: &mut Common, core: &mut Core, id: ConnId) {
        if admit::proxied(common, core, id, self.admit.as_ref()) {
            self.begin(common, core, id);
        }
    }

    fn secured(&mut self, common: &mut Common, core: &mut Core, id: ConnId) {
        self.open(common, core, id);
    }

    #[inline(always)]
    fn frames(&mut self, common: &mut Common, frames: &mut Frames<'_, LogObserver>) {
        let called = match common.load.sheds() {
            false => guard(|| self.call_for_each_frame::<false>(common, frames)),
            true => self.call_and_shed(common, frames),
        };
        if let Err(panicked) = called {
            self.tasks.recover();
            let id = frames.id();
            self.panicked(common, frames.shard(), id, &panicked);
        }
    }

    fn timed_out(&mut self, common: &mut Common, core: &mut Core, id: ConnId) {
        self.report_failure(common, core, id, &Failure::TimedOut);
        core.finish(id, CloseReason::HandlerTimeout);
    }

    fn draining(&mut self, common: &mut Common, core: &mut Core, id: ConnId) {
        self.notify(common, core, id, "draining", |service, cx| service.draining(cx));
    }

    fn heartbeat(&mut self, common: &mut Common, core: &mut Core, id: ConnId) {
        self.notify(common, core, id, HEARTBEAT, |service, cx| service.heartbeat(cx));
    }

    fn input_ended(&mut self, common: &mut Common, core: &mut Core, id: ConnId) {
        self.notify(common, core, id, "input_ended", |service, cx| service.input_ended(cx));
    }

    fn ended(&mut self, common: &mut Common, ended: EndedConn) {
        let EndedConn { id, shared, reason, opened, call, .. } = ended;
        common.meter.snapshot.work.on_connection(StalledWork::Close, id, shared.peer_words());
        match call {
            Some(task) if opened => {
                let dropped = self.tasks.cancel(task);
                common.meter.snapshot.durations.calls_dropped(self.number, dropped);
            }
            Some(task) => self.opens.cancel(task),
            None => {}
        }
        common.shard.tasks().end_of(id);
        if let Some(admission) = &mut common.admission {
            admission.ended(id, shared.listener(), common.now);
        }
        // Apart, since a panic in the drop would meet one of the hook.
        let closed = guard(|| {
            if opened && let Some(shared) = shared.downcast_ref() {
                let account = shared.account(common.now);
                self.service.close(&CloseCx::new(shared.body(), shared, reason, account));
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
        if task & OPENING != 0 {
            return self.resume_open(common, core, task & !OPENING);
        }
        if let Some(id) = self.tasks.connection(task) {
            common.works_for(core, StalledWork::Call, id);
        }
        let end = self.tasks.resume(task)?;
        common.meter.snapshot.durations.call_ended(self.number, common.now, end.start);
        let WokenCall { id, result, parked, before, .. } = end;
        core.call_done(id, task, parked, before);
        match result {
            Resumed::Done(Ok(())) => return Some(id),
            Resumed::Done(Err(error)) => self.failed(common, core, id, error),
            Resumed::Panicked(panicked) => self.panicked(common, core, id, &panicked),
        }
        None
    }

    fn give_back(&mut self) {
        self.tasks.give_back();
        self.opens.give_back();
    }
}
