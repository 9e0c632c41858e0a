//! The lane of one service: its newcomers, frames, woken calls and ends.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ringserve_core::framing::{FrameError, HoldsState, TypedFraming};
use ringserve_core::{
    CloseReason, ConnId, ConnShared, Ended, Frame, Frames, Next, RefusedBy, Socket, Time, Whole,
};
use ringserve_drivers::guarded;
use tracing::field::display;
use tracing::{debug, info};

use super::opens::{Answer, Begun, OPENING, OpenEnd, Opens};
use super::running_calls::{CallEnd, Job, Resumed, Tasks};
use crate::admission::{Charge, ShardAdmission};
use crate::base::lines::LineLimit;
use crate::guard::{Panicked, guard};
use crate::log::LogObserver;
use crate::overload::Shed;
use crate::peer::Peer;
use crate::shard::Core;
use crate::shard::face::closed::{Closed, Failure};
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
    #[cfg(feature = "metrics")]
    number: usize,
}

impl<S, F, Make, Fut> ServiceLane<S, F, Make, Fut>
where
    S: Service<F::Head, Session: HoldsState<F::State>>,
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
            #[cfg(feature = "metrics")]
            number: numbers.service(),
        }
    }

    /// Has a connection's frames called for, one after the other.
    ///
    /// Whether some are shed does not change within a turn. Where none is, no frame is asked for it: a reference to it would keep
    /// it in memory.
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
            #[cfg(feature = "metrics")]
            common.meter.call_waits(self.number);
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
                let (shard, service) = (common.shard.index(), common.names.at(peer.listener));
                guarded(|| debug!(shard, service, %id, %peer, %refusal, "connection refused by open"));
                core.refused(id, RefusedBy::Open);
            }
            Err(panicked) => {
                common.report_panic("open", Some((id, peer)), &panicked);
                core.abort(id, CloseReason::HandlerPanicked);
            }
        }
    }

    /// Asks the program whether it wants a connection.
    fn admits(&self, common: &mut Common, peer: &Peer) -> bool {
        let admitted = match &self.admit {
            None => Ok(true),
            Some(admit) => {
                common.meter.snapshot.work.on_peer(StalledWork::Admit, peer.addr.into());
                guard(|| admit(peer))
            }
        };
        admitted.unwrap_or_else(|panicked| {
            common.report_panic("admit", None, &panicked);
            false
        })
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
            Begun::Done(answer) => self.answered(common, core, id, answer),
            Begun::Waits(task, bytes) => self.opens.counted(task, core.open_parked(id, task, bytes)),
            Begun::NoMemory => core.abort(id, CloseReason::MemoryLimit),
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
        #[cfg(feature = "metrics")]
        common.meter.call_failed(self.number);
        let shard = common.shard.index();
        let peer = core.shared(id).map(|shared| Peer::of(shared));
        let service = peer.as_ref().and_then(|peer| common.names.at(peer.listener));
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
        #[cfg(feature = "metrics")]
        common.meter.call_panicked(self.number);
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

/// Time before now at most in which connections may have come that a shard sees late. Those that waited for longer are few: their peers
/// gave up.
const LATE_MAX: Duration = Duration::from_secs(10);

/// Between when and when a connection came that a shard sees now: as many may come in that time as their rate allows, and none is
/// refused since the shard was away meanwhile. That must be known: one that only slept saw each of them as it came.
#[inline]
fn arrival(common: &Common, core: &Core) -> (Time, Time) {
    let now = common.now;
    match core.behind_from() {
        None => (now, now),
        Some(from) if now - from <= LATE_MAX => (from, now),
        Some(_) => (Time::from_nanos(now.as_nanos() - LATE_MAX.as_nanos() as u64), now),
    }
}

/// Asks whether the server lets a connection in that was accepted.
#[inline]
fn let_in(common: &Common, core: &mut Core, peer: &Peer) -> Result<Option<Charge>, RefusedBy> {
    let Some(admission) = &common.admission else { return Ok(None) };
    let let_in = admission.let_in(peer, arrival(common, core));
    watch_rates(admission, core, peer);
    let_in.inspect_err(|by| report_refused(common, admission, peer, *by))
}

/// The same for a client behind a proxy.
fn let_client_in(common: &Common, core: &mut Core, peer: &Peer) -> Result<Option<Charge>, RefusedBy> {
    let Some(admission) = &common.admission else { return Ok(None) };
    let let_in = admission.let_client_in(peer, arrival(common, core));
    watch_rates(admission, core, peer);
    let_in.inspect_err(|by| report_refused(common, admission, peer, *by))
}

/// While newcomers come to a listener that has a rate, the shard has to know when it was away. One to which none has come for a
/// while sleeps, and those that come to it then are few.
#[inline]
fn watch_rates(admission: &ShardAdmission, core: &mut Core, peer: &Peer) {
    if admission.has_rate(peer.listener()) {
        core.watch_itself();
    }
}

#[cold]
fn report_refused(common: &Common, admission: &ShardAdmission, peer: &Peer, by: RefusedBy) {
    admission.report(common.shard.index(), common.names.at(peer.listener), peer, by, common.now);
}

/// How long newcomers wait that no word is said to now: in that time a tenth of the words of a burst may be said again.
const POSTPONED: Duration = Duration::from_millis(10);

/// What a connection hears that is refused for its address.
#[cold]
fn words_for(common: &Common, peer: &Peer, by: RefusedBy) -> Option<Arc<[u8]>> {
    common.admission.as_ref()?.words_for(peer.listener(), by)
}

/// The same for the load; `None` where there are no words for that, and it is let in.
#[cold]
fn words_for_load(common: &Common, peer: &Peer) -> Option<Arc<[u8]>> {
    common.admission.as_ref()?.words_for_load(peer, common.now)
}

/// True if one more connection may be refused behind last words now.
fn has_words(common: &Common, core: &Core) -> bool {
    core.may_part() && common.admission.as_ref().is_some_and(|admission| admission.has_words(common.now))
}

/// The same, and it is.
fn takes_words(common: &mut Common, core: &Core) -> bool {
    let now = common.now;
    core.may_part() && common.admission.as_mut().is_some_and(|admission| admission.takes_words(now))
}

/// Refuses a connection for its address, behind what the program says to it.
#[cold]
fn refuse(common: &mut Common, core: &mut Core, socket: Socket, peer: &Peer, by: RefusedBy) {
    match words_for(common, peer, by) {
        Some(words) if takes_words(common, core) => {
            core.refuse_with(socket, peer.addr, peer.listener, by, &words);
        }
        _ => core.refuse(socket, peer.listener, by),
    }
}

/// Refuses a connection since there are too many.
#[cold]
fn refuse_for_load(common: &mut Common, core: &mut Core, socket: Socket, peer: &Peer, words: &[u8]) {
    match takes_words(common, core) {
        true => core.refuse_with(socket, peer.addr, peer.listener, RefusedBy::Load, words),
        false => core.refuse(socket, peer.listener, RefusedBy::Load),
    }
}

/// Keeps what a connection was counted for. False if there is no memory for that.
#[inline]
fn keep(common: &mut Common, peer: &Peer, id: ConnId, charge: Option<Charge>) -> bool {
    let Some(admission) = &mut common.admission else { return true };
    let kept = admission.keep(id, charge);
    let is_kept = kept.is_ok();
    if let Err(charge) = kept {
        admission.take_back(peer.listener, Some(charge), common.now);
    }
    is_kept
}

/// What was counted becomes no connection.
#[cold]
fn take_back(common: &Common, peer: &Peer, charge: Option<Charge>) {
    if let Some(admission) = &common.admission {
        admission.take_back(peer.listener, charge, common.now);
    }
}

impl<S, F, Make, Fut> Services for ServiceLane<S, F, Make, Fut>
where
    S: Service<F::Head, Session: HoldsState<F::State>>,
    F: TypedFraming,
    Make: Fn(Rc<S>, Rc<Job<S, F::Head>>) -> Fut + 'static,
    Fut: Future<Output = ()> + 'static,
{
    fn keeps_accounts(&self) -> bool {
        S::ACCOUNTS
    }

    fn accepted(&mut self, common: &mut Common, core: &mut Core, socket: Socket, mut peer: Peer) {
        peer.is_proxy = common.proxies.at(peer.listener).is_some();
        let words = match common.load.refuses() {
            true => words_for_load(common, &peer),
            false => None,
        };
        // It comes here again, so it is asked for nothing that would count twice.
        if words.is_some() && !has_words(common, core) {
            return core.postpone(socket, peer.addr, peer.listener, common.now + POSTPONED);
        }
        let charge = match let_in(common, core, &peer) {
            Ok(charge) => charge,
            Err(by) => return refuse(common, core, socket, &peer, by),
        };
        if !self.admits(common, &peer) {
            take_back(common, &peer, charge);
            return core.refuse(socket, peer.listener, RefusedBy::Admit);
        }
        // Behind all that refuses for what the peer is, and before anything is kept.
        if let Some(words) = words {
            take_back(common, &peer, charge);
            return refuse_for_load(common, core, socket, &peer, &words);
        }
        let Some(id) = core.admit::<S::Session>(socket, peer.addr, peer.listener) else {
            return take_back(common, &peer, charge);
        };
        if !keep(common, &peer, id, charge) {
            return core.abort(id, CloseReason::MemoryLimit);
        }
        let Some(head) = core.shared(id) else { return };
        head.set_asked(peer.asked);
        let accounted = S::ACCOUNTS || common.accounted.has(core.lane_of_listener(peer.listener));
        if accounted && !head.open_account(common.now) {
            return core.abort(id, CloseReason::MemoryLimit);
        }
        match common.proxies.at(peer.listener) {
            None => self.begin(common, core, id),
            Some(trust) if trust.includes(peer.addr) => core.await_header(id),
            // It was reset before it could be asked for its address, as some health checks are.
            Some(_) if peer.addr.is_none() => core.abort(id, CloseReason::PeerReset),
            Some(_) => {
                common.report_untrusted(&peer);
                core.abort(id, CloseReason::ProxyUntrusted);
            }
        }
    }

    fn proxied(&mut self, common: &mut Common, core: &mut Core, id: ConnId) {
        let Some(peer) = core.shared(id).map(|head| Peer::of(head)) else { return };
        match let_client_in(common, core, &peer) {
            Ok(charge) if keep(common, &peer, id, charge) => {}
            Ok(_) => return core.abort(id, CloseReason::MemoryLimit),
            Err(by) => {
                return match words_for(common, &peer, by) {
                    Some(words) if takes_words(common, core) => core.refused_with(id, by, &words),
                    _ => core.refused(id, by),
                };
            }
        }
        match self.admits(common, &peer) {
            true => self.begin(common, core, id),
            false => core.refused(id, RefusedBy::Admit),
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

    fn ended(&mut self, common: &mut Common, ended: Ended) {
        let Ended { id, shared, reason, opened, call, .. } = ended;
        common.meter.snapshot.work.on_connection(StalledWork::Close, id, shared.peer_words());
        match call {
            Some(task) if opened => {
                let dropped = self.tasks.cancel(task);
                #[cfg(feature = "metrics")]
                common.meter.calls_dropped(self.number, dropped);
                #[cfg(not(feature = "metrics"))]
                let _ = dropped;
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
                self.service.close(&Closed::new(shared.body(), shared, reason, account));
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
        #[cfg(feature = "metrics")]
        common.meter.call_ended(self.number, common.now, end.began);
        let CallEnd { id, result, parked, before, .. } = end;
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
