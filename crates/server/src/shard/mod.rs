//! One shard at work: driver, state machine and user code, going round.

mod context;
mod draining;
#[cfg(feature = "host-tokio")]
mod hosted;
mod local_tasks;
mod run_on;
mod spare;

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use ringserve_core::framing::Framing;
use ringserve_core::{
    Budget, CloseReason, Completion, ConnId, Driver, Event, Limits, Link, Next, Payload, Socket, Time, Wait,
};
use ringserve_drivers::trim_heap;
use tracing::field::display;
use tracing::{debug, error, warn};

use crate::cx::{Cx, Peer};
use crate::guard::{Panicked, guard, wake};
use crate::log::{self, LineLimit, LogObserver, guarded};
use crate::remote::{Mail, Order, Post, Remote};
use crate::running::ShardReport;
use crate::service::Service;
use crate::stream::{UPSTREAM, Upstreams};
use crate::tasks::{Ended, Job, Resumed, Tasks};
use crate::wake::Attention;

pub use context::Shard;
pub use draining::DrainBegins;
pub(crate) use draining::Draining;
use spare::{InUse, Spare, Step};

pub(crate) use local_tasks::{LocalTasks, SPAWNED, TaskId};
pub use run_on::run_on;

/// Decides at accept, before anything is kept for a connection.
pub(crate) type Admit = Arc<dyn Fn(&Peer) -> bool + Send + Sync>;

/// Chunks that are given back in one turn: half a millisecond.
const TRIMMED_MAX: usize = 8;

/// How often a turn polls those who were woken, by others of the same turn as a rule: one task hands its result to
/// another, which sends it. Four, since HTTP/2 with a task for each request needs two, and a task that wakes itself without
/// end must not keep the shard from its sockets. What others want of connections is for the next turn.
const WAKE_ROUNDS: usize = 4;

/// What other threads want of connections is carried out for at most so many orders in a turn: 1 ms of short pushes.
const LETTERS_IN_A_TURN: usize = 4096;

/// A shard with so many connections more than another one gives away what it accepts from a Unix socket. Without it a burst
/// stayed with whoever was awake: 100 connections at once came to 64, 25, 11 and 0. Fewer are not worth the way.
const AHEAD: usize = 8;

/// What a shard needs to start.
pub(crate) struct Parts<S: Service, F: Framing, D: Driver> {
    pub shard: Shard,
    pub core: ringserve_core::Shard<S::Session, F, LogObserver>,
    pub driver: D,
    pub service: S,
    pub admit: Option<Admit>,
    pub others: Option<Others<D>>,
    /// The limits, and the number of the first slot that is an upstream's.
    pub limits: Limits,
    pub first_upstream: u32,
}

/// The shards of the server, for one that passes connections on.
pub(crate) struct Others<D> {
    /// All of them, this one too.
    pub remotes: Arc<[Arc<Remote>]>,
    /// Takes an accepted socket from the driver.
    pub hand_over: fn(&mut D, Socket) -> Option<OwnedFd>,
    /// Gives one to it.
    pub take_over: fn(&mut D, OwnedFd) -> Socket,
}

/// See the module. `Make` makes the future that calls the service, and `Fut` is that future.
pub(crate) struct Running<S: Service, F: Framing, D: Driver, Make, Fut> {
    shard: Shard,
    core: ringserve_core::Shard<S::Session, F, LogObserver>,
    driver: D,
    service: Rc<S>,
    tasks: Tasks<S, Make, Fut>,
    remote: Arc<Remote>,
    admit: Option<Admit>,
    others: Option<Others<D>>,
    limits: Limits,
    first_upstream: u32,
    /// Connections that the server made, once it made one.
    upstreams: Option<Box<Upstreams>>,
    /// Wakes the shard, if it is hosted.
    outside: Option<Waker>,
    order: Order,
    post: Post,
    now: Time,
    spare: Spare,
    handler_errors: LineLimit,
    panics: LineLimit,
}

impl<S: Service, F: Framing, D: Driver, Make, Fut> Drop for Running<S, F, D, Make, Fut> {
    fn drop(&mut self) {
        self.remote.close();
        self.shard.end();
    }
}

impl<S, F, D, Make, Fut> Running<S, F, D, Make, Fut>
where
    S: Service,
    F: Framing,
    D: Driver,
    Make: Fn(Rc<S>, Rc<Job<S>>) -> Fut,
    Fut: Future<Output = ()>,
{
    pub(crate) fn new(mut parts: Parts<S, F, D>, make: Make) -> Self {
        if !parts.driver.may_lend_beyond_turn() {
            parts.core.copy_frames();
        }
        let service = Rc::new(parts.service);
        Running {
            core: parts.core,
            driver: parts.driver,
            tasks: Tasks::new(service.clone(), make, parts.shard.clone()),
            service,
            remote: parts.shard.remote().clone(),
            shard: parts.shard,
            admit: parts.admit,
            others: parts.others,
            limits: parts.limits,
            first_upstream: parts.first_upstream,
            upstreams: None,
            outside: None,
            order: Order::Serve,
            post: Post::default(),
            now: Time::ZERO,
            spare: Spare::new(),
            handler_errors: LineLimit::default(),
            panics: LineLimit::default(),
        }
    }

    /// Serves until it is told to stop and every connection is gone.
    ///
    /// # Errors
    /// The `errno` of a driver that broke.
    pub(crate) fn run(mut self) -> Result<ShardReport, i32> {
        let mut completions = Vec::new();
        loop {
            self.now = self.shard.timers().now();
            self.turn(&mut completions);
            if self.is_done() {
                break;
            }
            let wait = self.wait();
            if let Err(errno) = self.driver.turn(wait, Budget::default(), &mut completions) {
                self.broken();
                return Err(errno);
            }
        }
        Ok(self.ended())
    }

    /// The driver broke: no completion comes any more. The service hears of the end of each connection.
    fn broken(&mut self) {
        self.core.force();
        self.work_off();
        if let Some(upstreams) = &mut self.upstreams {
            upstreams.force();
        }
        let mut report = self.report();
        (report.connections, report.upstreams.connections) = (0, 0);
        self.remote.last_report(report);
    }

    /// The last report.
    fn ended(&self) -> ShardReport {
        guarded(|| debug!(shard = self.shard.index(), stats = ?self.driver.stats(), "shard done"));
        let upstreams = self.upstreams.as_ref().map_or(0, |upstreams| upstreams.left_behind());
        let left = self.core.left_behind() + upstreams;
        if left > 0 {
            let shard = self.shard.index();
            guarded(|| {
                error!(
                    shard,
                    left,
                    "connections or listeners that the kernel did not end within 5 s of being reset are left \
                     behind; their memory is not given back"
                );
            });
        }
        let report = self.report();
        self.remote.last_report(report.clone());
        report
    }

    /// True once every connection is gone, with those to upstreams as the last. They have no more time than the others: at the
    /// drain limit, and by force, all are reset.
    fn is_done(&mut self) -> bool {
        let done = self.core.is_done();
        let Some(upstreams) = &mut self.upstreams else { return done };
        if (done || self.core.has_aborted()) && !upstreams.is_closing() {
            upstreams.close_all(self.core.drain_deadline().unwrap_or(self.now));
        }
        done && upstreams.is_done()
    }

    /// How long the driver may wait. From here on a wake-up reaches it there.
    fn wait(&self) -> Wait {
        let mut wait = self.core.wait();
        let left_over = !self.post.tasks.is_empty() || !self.post.letters.is_empty();
        let asked_for = self.shard.tasks().has_new() || !self.shard.upstream_requests().is_empty();
        if wait == Wait::No || left_over || asked_for {
            return Wait::No;
        }
        if let Some(upstreams) = &self.upstreams {
            wait = match (wait, upstreams.wait()) {
                (_, Wait::No) => return Wait::No,
                (Wait::For(one), Wait::For(other)) => Wait::For(one.min(other)),
                (Wait::Forever, other) => other,
                (one, _) => one,
            };
        }
        let mut next = self.shard.timers().next();
        if self.spare.is_active() {
            if self.spare.has_to_do() {
                return Wait::No;
            }
            next = next.into_iter().chain(self.spare.next()).min();
        }
        if let Some(next) = next {
            let sleep = next - self.now;
            wait = match wait {
                Wait::For(time) => Wait::For(time.min(sleep)),
                _ => Wait::For(sleep),
            };
        }
        if wait == Wait::For(Duration::ZERO) || !self.remote.fall_asleep() { Wait::No } else { wait }
    }

    fn report(&self) -> ShardReport {
        ShardReport {
            counters: self.core.counters().clone(),
            connections: self.core.connections(),
            upstreams: self.upstreams.as_ref().map(|upstreams| upstreams.report()).unwrap_or_default(),
            driver: self.driver.stats(),
            buffers: self.driver.pool().counts(),
            stale: false,
        }
    }

    /// Works off what the driver brought and hands it what is to do next.
    fn turn(&mut self, completions: &mut Vec<Completion>) {
        if let Err(panicked) = self.shard.timers().fire(self.now) {
            self.report_panic("waker", None, &panicked);
        }
        let called = self.remote.begin_turn(&mut self.post);
        self.core.begin_turn(self.now, completions.len());
        if let Some(upstreams) = &mut self.upstreams {
            upstreams.begin_turn(self.now, completions.len());
        }
        if called.has(Attention::ORDER) {
            self.obey();
        }
        if self.order != Order::Serve {
            self.tell_stopping();
        }
        if called.has(Attention::MESSAGES) {
            self.read_messages();
        }
        if !self.post.letters.is_empty() {
            self.read_mail();
        }
        self.work_off();
        for completion in completions.drain(..) {
            if let Some(upstreams) = &mut self.upstreams
                && completion.id().is_some_and(|id| upstreams.owns(id))
            {
                upstreams.complete(completion);
                continue;
            }
            self.core.complete(completion);
            if let Some(id) = self.core.take_frames() {
                self.run_frames(id);
            }
            self.work_off();
        }
        for _ in 0..WAKE_ROUNDS {
            if self.post.tasks.is_empty() {
                self.remote.take_woken(&mut self.post.tasks);
            }
            if self.post.tasks.is_empty() && !self.shard.tasks().has_new() {
                break;
            }
            self.run_woken();
            if !self.post.tasks.is_empty() {
                break;
            }
        }
        let grown = self.core.held_bytes() >> 20;
        if self.spare.is_concerned(self.core.connections(), self.driver.pool().total(), grown) {
            self.look_at_spare();
        }
        self.core.end_turn();
        self.work_off();
        let mut awaited = self.core.take_send_awaited();
        for op in self.core.take_ops() {
            self.driver.submit(op);
        }
        if self.upstreams.is_some() || !self.shard.upstream_requests().is_empty() {
            awaited |= self.end_turn_of_upstreams();
        }
        if !awaited {
            self.driver.defer_sent();
        }
        if called.has(Attention::REPORT) {
            self.remote.report(self.report());
        }
        self.meet_others();
    }

    /// What is needed now, and the bytes that were moved since the start.
    #[cold]
    fn in_use(&self) -> (InUse, u64) {
        let (pool, counters) = (self.driver.pool().counts(), self.core.counters());
        let needs = InUse {
            connections: self.core.connections(),
            held_bytes: self.core.held_bytes(),
            buffers: pool.total,
            idle_buffers: pool.total - pool.leased,
        };
        (needs, counters.bytes_received + counters.bytes_sent)
    }

    /// Takes note of what is needed, and gives memory back, step by step.
    #[cold]
    fn look_at_spare(&mut self) {
        let (needs, moved) = self.in_use();
        self.spare.note(self.now, needs, moved);
        match self.spare.step() {
            Step::None if self.order != Order::Serve || !self.spare.is_due(self.now) => {}
            Step::None if !self.spare.begins(self.now, needs, moved) => {}
            // Receives that are stopped in this turn are found so in the next.
            Step::None => {
                self.tasks.give_back();
                self.core.give_back();
                if let Some(upstreams) = &mut self.upstreams {
                    upstreams.give_back();
                }
            }
            Step::Ring => self.spare.ring(self.driver.give_back()),
            Step::Chunks if self.driver.pool().trim(1, TRIMMED_MAX) > 0 => {}
            Step::Chunks => {
                trim_heap();
                let (needs, moved) = self.in_use();
                self.spare.done(self.now, needs, moved);
            }
        }
    }

    /// True if something waits for one of their sends.
    fn end_turn_of_upstreams(&mut self) -> bool {
        let upstreams = self.upstreams.get_or_insert_with(|| {
            let pool = self.driver.pool().clone();
            let mut new = Upstreams::new(&self.limits, self.first_upstream, pool, &self.shard);
            if !self.driver.may_lend_beyond_turn() {
                new.copy_frames();
            }
            if let Some(outside) = &self.outside {
                new.wake_when_dirty(outside.clone());
            }
            new.begin_turn(self.now, 0);
            if self.order == Order::Force {
                new.force();
            }
            Box::new(new)
        });
        upstreams.end_turn(&mut self.driver)
    }

    fn obey(&mut self) {
        let order = self.remote.ordered();
        if order == self.order {
            return;
        }
        self.order = order;
        match order {
            Order::Serve => {}
            Order::Drain => self.core.drain(),
            Order::Force => {
                self.core.force();
                if let Some(upstreams) = &mut self.upstreams {
                    upstreams.force();
                }
            }
        }
        if order != Order::Serve
            && let Err(panicked) = self.shard.set_draining()
        {
            self.report_panic("waker", None, &panicked);
        }
    }

    /// Tells those who wait for it that the drain delay is over.
    #[cold]
    fn tell_stopping(&mut self) {
        if self.core.has_stopped()
            && !self.shard.is_stopping()
            && let Err(panicked) = self.shard.set_stopping()
        {
            self.report_panic("waker", None, &panicked);
        }
    }

    /// What services of other shards and other threads said.
    fn read_messages(&mut self) {
        let left = self.shard.read_mailboxes().unwrap_or_else(|panicked| {
            self.report_panic("message", None, &panicked);
            true
        });
        if left {
            self.remote.announce_messages();
        }
    }

    /// What other threads want of connections, as much as a turn has room for.
    fn read_mail(&mut self) {
        let mut mails = std::mem::take(&mut self.post.letters);
        for mail in mails.drain(..LETTERS_IN_A_TURN.min(mails.len())) {
            match mail {
                Mail::Push { id, reach, payload } => {
                    let bytes = Mail::bytes_of(&payload);
                    // The framing encodes it, and the owner of the bytes drops them: user code. A connection that missed a
                    // frame for that is reset at the end of the turn.
                    let pushed = guard(|| {
                        if let Some(link) = self.link(id) {
                            link.reply(Payload::Bytes(&payload));
                        }
                        drop(payload);
                    });
                    reach.arrived(bytes);
                    if let Err(panicked) = pushed {
                        let peer = self.link(id).map(Peer::of);
                        self.report_panic("push", peer.map(|peer| (id, peer)), &panicked);
                    }
                }
                Mail::Close { id } => {
                    if let Some(link) = self.link(id) {
                        link.close();
                    }
                }
                Mail::Abort { id } => {
                    if let Some(link) = self.link(id) {
                        link.abort();
                    }
                }
                Mail::Socket { socket, peer, listener } => {
                    if let Some(others) = &self.others {
                        let socket = (others.take_over)(&mut self.driver, socket);
                        self.core.accepted_elsewhere(listener, socket, peer);
                    }
                }
            }
        }
        self.post.letters = mails;
    }

    /// A connection of either kind, as pushes reach it.
    fn link(&self, id: ConnId) -> Option<&Link> {
        match &self.upstreams {
            Some(upstreams) if upstreams.owns(id) => upstreams.link(id),
            _ => self.core.block(id).map(|block| &block.link),
        }
    }

    /// Tells the other shards how much room there is here, and looks for room there if there is none.
    fn meet_others(&mut self) {
        let Some(others) = &self.others else { return };
        let room = if self.core.has_stopped() { 0 } else { self.core.slots_left() };
        self.remote.set_room(room);
        self.core.set_room_elsewhere(room == 0 && others.remotes.iter().any(|remote| remote.room() > 0));
    }

    /// Passes a connection on to the shard with the most room.
    #[cold]
    fn pass_on(&mut self, socket: Socket, peer: Option<SocketAddr>, listener: u16) {
        let Some(others) = &self.others else { return };
        let Some(socket) = (others.hand_over)(&mut self.driver, socket) else { return };
        let mut mail = Mail::Socket { socket, peer, listener };
        let mut remotes: Vec<_> = others.remotes.iter().collect();
        remotes.sort_by_key(|remote| std::cmp::Reverse(remote.room()));
        for remote in remotes {
            remote.take_room();
            match remote.send(mail) {
                Ok(()) => return,
                Err(back) => mail = back,
            }
        }
    }

    #[inline]
    fn work_off(&mut self) {
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

    /// True if another shard has far fewer connections. All tables have the same size.
    fn is_ahead(&self) -> bool {
        let Some(others) = &self.others else { return false };
        let room = self.core.slots_left() + AHEAD;
        others.remotes.iter().any(|remote| remote.room() > room)
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
    fn run_frames(&mut self, id: ConnId) {
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
    fn run_woken(&mut self) {
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

    fn report_panic(&mut self, place: &str, connection: Option<(ConnId, Peer)>, panicked: &Panicked) {
        if self.panics.allows(self.now) {
            log::panicked(self.shard.index(), place, connection, panicked);
        }
    }

    /// A connection as the log names it, until it ended.
    fn named(&self, id: ConnId) -> Option<(ConnId, Peer)> {
        self.core.block(id).map(|block| (id, Peer::of(&block.link)))
    }
}
