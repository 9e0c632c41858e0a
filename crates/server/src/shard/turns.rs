//! The loop of a shard: its turns, the waits between them, and its end.

use std::rc::Rc;
use std::time::Duration;

use ringserve_core::framing::Framing;
use ringserve_core::{Budget, Completion, Driver, Limits, Wait};
use tracing::{debug, error};

use super::calls::{Job, calls};
use super::handle::Shard;
use super::inbox::{Order, Remote};
use super::state::{Parts, Running};
use super::upstreams::Upstreams;
use super::wake::Attention;
use crate::log::{LogObserver, guarded};
use crate::service::Service;
use crate::stats::ShardReport;

/// How often a turn polls those who were woken, by others of the same turn as a rule: one task hands its result to
/// another, which sends it. Four, since HTTP/2 with a task for each request needs two, and a task that wakes itself without
/// end must not keep the shard from its sockets. What others want of connections is for the next turn.
const WAKE_ROUNDS: usize = 4;

impl<S, F, D, Make, Fut> Running<S, F, D, Make, Fut>
where
    S: Service,
    F: Framing,
    D: Driver,
    Make: Fn(Rc<S>, Rc<Job<S>>) -> Fut,
    Fut: Future<Output = ()>,
{
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
    pub(super) fn broken(&mut self) {
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
    pub(super) fn ended(&self) -> ShardReport {
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
    pub(super) fn is_done(&mut self) -> bool {
        let done = self.core.is_done();
        let Some(upstreams) = &mut self.upstreams else { return done };
        if (done || self.core.has_aborted()) && !upstreams.is_closing() {
            upstreams.close_all(self.core.drain_deadline().unwrap_or(self.now));
        }
        done && upstreams.is_done()
    }

    /// How long the driver may wait. From here on a wake-up reaches it there.
    pub(super) fn wait(&self) -> Wait {
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

    pub(super) fn report(&self) -> ShardReport {
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
    pub(super) fn turn(&mut self, completions: &mut Vec<Completion>) {
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
}

/// Runs one shard with one listener on this thread, over any driver, until the driver breaks.
///
/// # Errors
/// The driver's.
pub fn run_on<S: Service, F: Framing, D: Driver>(
    driver: D,
    service: S,
    framing: F,
    limits: Limits,
) -> Result<ShardReport, i32> {
    let remote = Remote::new();
    let connections_max = driver.connections_max();
    let core = ringserve_core::Shard::new(
        limits.clone(),
        connections_max,
        1,
        framing,
        driver.pool().clone(),
        LogObserver::new(0),
    );
    let shard = Shard::new(0, 1, remote);
    // The driver has no slots beside those of accepted connections.
    let limits = Limits { upstreams_max: 0, ..limits };
    let first_upstream = connections_max as u32;
    let (admit, others) = (None, None);
    let parts = Parts { shard, core, driver, service, admit, others, limits, first_upstream };
    Running::new(parts, calls::<S>).run()
}
