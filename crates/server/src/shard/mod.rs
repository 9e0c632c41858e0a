//! One shard at work: driver, state machine and user code, going round.

mod context;
mod local_tasks;
mod run_on;

use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use ringserve_core::framing::Framing;
use ringserve_core::{Budget, CloseReason, Completion, ConnId, Driver, Event, Next, Time, Wait};
use tracing::{debug, error, warn};

use crate::cx::{Cx, Peer};
use crate::guard::guard;
use crate::log::{LineLimit, LogObserver};
use crate::remote::{Order, Remote};
use crate::running::{ShardEnd, ShardReport};
use crate::service::Service;
use crate::tasks::{Job, Resumed, Tasks};

pub use context::Shard;
pub(crate) use local_tasks::{LocalTasks, SPAWNED};
pub use run_on::run_on;

/// Decides at accept, before anything is kept for a connection.
pub(crate) type Admit = Arc<dyn Fn(&Peer) -> bool + Send + Sync>;

/// Free receive buffers beyond these are given back to the system when the shard has nothing to do.
const SPARE_BUFFERS: usize = 4 * ringserve_buf::CHUNK_BUFFERS;

/// What a shard needs to start.
pub(crate) struct Parts<S: Service, F: Framing, D: Driver> {
    pub index: usize,
    pub core: ringserve_core::Shard<S::Session, F, LogObserver>,
    pub driver: D,
    pub service: S,
    pub remote: Arc<Remote>,
    pub admit: Option<Admit>,
    pub local_tasks: LocalTasks,
}

/// See the module. `Make` makes the future that calls the service, and `Fut` is that future.
pub(crate) struct Running<S: Service, F: Framing, D: Driver, Make, Fut> {
    index: usize,
    core: ringserve_core::Shard<S::Session, F, LogObserver>,
    driver: D,
    service: Rc<S>,
    tasks: Tasks<S, Make, Fut>,
    local_tasks: LocalTasks,
    remote: Arc<Remote>,
    admit: Option<Admit>,
    order: Order,
    woken: Vec<u32>,
    now: Time,
    handler_errors: LineLimit,
    panics: LineLimit,
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
            index: parts.index,
            core: parts.core,
            driver: parts.driver,
            tasks: Tasks::new(service.clone(), make, parts.remote.clone()),
            service,
            local_tasks: parts.local_tasks,
            remote: parts.remote,
            admit: parts.admit,
            order: Order::Serve,
            woken: Vec::new(),
            now: Time::ZERO,
            handler_errors: LineLimit::default(),
            panics: LineLimit::default(),
        }
    }

    /// Serves until it is told to stop and every connection is gone.
    ///
    /// # Errors
    /// The `errno` of a driver that broke.
    pub(crate) fn run(mut self) -> ShardEnd {
        let started = Instant::now();
        let mut completions = Vec::new();
        loop {
            self.now = Time::from_nanos(started.elapsed().as_nanos() as u64);
            self.turn(&mut completions);
            if self.core.is_done() {
                break;
            }
            let mut wait = self.core.wait();
            if wait != Wait::No && (self.local_tasks.has_new() || !self.remote.fall_asleep()) {
                wait = Wait::No;
            }
            self.driver.turn(wait, Budget::default(), &mut completions)?;
        }
        debug!(shard = self.index, stats = ?self.driver.stats(), "shard done");
        let report = self.report();
        // For those who still wait, and for those who will ask.
        self.remote.report(u64::MAX, report.clone());
        Ok(report)
    }

    fn report(&self) -> ShardReport {
        ShardReport {
            counters: self.core.counters().clone(),
            connections: self.core.connections(),
            driver: self.driver.stats(),
            buffers: self.driver.pool().counts(),
        }
    }

    /// Works off what the driver brought and hands it what is to do next.
    fn turn(&mut self, completions: &mut Vec<Completion>) {
        self.remote.wake_up(&mut self.woken);
        self.core.begin_turn(self.now);
        self.obey();
        self.work_off();
        for completion in completions.drain(..) {
            self.core.complete(completion);
            if let Some(id) = self.core.take_frames() {
                self.run_frames(id);
            }
            if self.core.has_events() {
                self.work_off();
            }
        }
        self.run_woken();
        self.core.end_turn();
        self.work_off();
        if !self.core.take_send_awaited() {
            self.driver.defer_sent();
        }
        for op in self.core.take_ops() {
            self.driver.submit(op);
        }
        if let Some(number) = self.remote.report_wanted() {
            self.remote.report(number, self.report());
        }
        let counts = self.driver.pool().counts();
        if counts.free > SPARE_BUFFERS && counts.leased == 0 {
            self.driver.pool().trim(1);
        }
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
            Order::Force => self.core.force(),
        }
    }

    fn work_off(&mut self) {
        while let Some(event) = self.core.next_event() {
            match event {
                Event::Frames(id) => self.run_frames(id),
                Event::Accepted { socket, peer, listener } => {
                    let peer = Peer { addr: peer, listener };
                    self.accept(socket, peer);
                }
                Event::Ended { block, reason, opened, handler, .. } => {
                    if let Some(task) = handler {
                        self.tasks.cancel(task);
                    }
                    let service = &self.service;
                    let done = guard(move || {
                        if opened {
                            service.close(&block.session, reason);
                        }
                        drop(block);
                    });
                    if done.is_none() {
                        self.report_panic("close");
                    }
                }
            }
        }
    }

    fn accept(&mut self, socket: ringserve_core::Socket, peer: Peer) {
        let admitted = match &self.admit {
            None => Some(true),
            Some(admit) => guard(|| admit(&peer)),
        };
        if admitted.is_none() {
            self.report_panic("admit");
        }
        let session = if admitted == Some(true) { guard(S::Session::default) } else { None };
        let Some(session) = session else { return self.core.refuse(socket) };
        let Some(id) = self.core.admit(socket, peer.addr, peer.listener, session) else { return };
        let Some(block) = self.core.block(id).cloned() else { return };
        match guard(|| self.service.open(&Cx::new(&block))) {
            Some(Ok(())) => self.core.opened(id),
            Some(Err(refusal)) => {
                debug!(shard = self.index, %id, %peer, %refusal, "connection refused by open");
                self.core.refused(id);
            }
            None => {
                self.report_panic("open");
                self.core.abort(id, CloseReason::HandlerPanicked);
            }
        }
    }

    /// Hands frames of one connection to the service, until there is none or a call waits.
    #[inline]
    fn run_frames(&mut self, id: ConnId) {
        if guard(|| self.call_for_each_frame(id)).is_none() {
            self.tasks.recover();
            self.panicked(id);
        }
    }

    #[inline]
    fn call_for_each_frame(&mut self, id: ConnId) {
        loop {
            match self.core.next_frame(id) {
                Next::Frame(frame, block) => match self.tasks.start(id, block, frame) {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => return self.failed(id, error),
                    Err(task) => self.core.handler_parked(id, task),
                },
                Next::Nothing => return,
                Next::Bad(error, block) => {
                    debug!(shard = self.index, %id, %error, "bad frame");
                    self.service.malformed(&Cx::new(&block), &error);
                    return self.core.finish(id, CloseReason::BadFrame(error));
                }
            }
        }
    }

    #[cold]
    fn failed(&mut self, id: ConnId, error: S::Error) {
        let (shard, logs) = (self.index, self.handler_errors.allows(self.now));
        // Writing the error and dropping it is user code too.
        let done = guard(move || {
            if logs {
                warn!(shard, %id, %error, "handler failed, connection closed");
            }
        });
        if done.is_none() {
            self.report_panic("error");
        }
        self.core.finish(id, CloseReason::HandlerError);
    }

    fn run_woken(&mut self) {
        let mut woken = std::mem::take(&mut self.woken);
        for task in woken.drain(..) {
            if task & SPAWNED != 0 {
                self.local_tasks.resume(task & !SPAWNED);
                continue;
            }
            let Some((id, resumed)) = self.tasks.resume(task) else { continue };
            self.core.handler_done(id);
            match resumed {
                Resumed::Done(Ok(())) => {
                    self.run_frames(id);
                    self.work_off();
                }
                Resumed::Done(Err(error)) => self.failed(id, error),
                Resumed::Panicked => self.panicked(id),
            }
        }
        self.woken = woken;
        self.local_tasks.run_new();
    }

    #[cold]
    fn panicked(&mut self, id: ConnId) {
        self.report_panic("call");
        self.core.abort(id, CloseReason::HandlerPanicked);
    }

    fn report_panic(&mut self, place: &str) {
        if self.panics.allows(self.now) {
            error!(shard = self.index, place, "user code panicked; its connection is closed");
        }
    }
}
