//! The loop of a shard: its turns, the waits between them, and its end.

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ringserve_admission::internals::Proxies;
use ringserve_base::clock::Clock;
use ringserve_base::lines::{debug, error};
use ringserve_base::random::Random;
use ringserve_core::framing::Framing;
use ringserve_core::{Budget, Completion, Driver, Limits, ServerLimits, Time, Wait};
use ringserve_drivers::guarded;

use crate::blocking::threads::Threads;
use crate::log::LogObserver;
use crate::shard::calls::running_calls::calls;
use crate::shard::calls::service_lane::ServiceLane;
use crate::shard::face::guarded_transport::reports_panics;
use crate::shard::face::handle::Shard;
use crate::shard::face::service::Service;
use crate::shard::remote::control::ServerControl;
use crate::shard::state::many::TaskNumbers;
use crate::shard::state::services::Services;
use crate::shard::state::shard_loop::{Common, LaneParts, ShardLane, ShardLoop};
use crate::shard::state::upstreams::add_upstreams;
use crate::shard::tasks::ends::ServiceEnds;
use crate::shard::wakes::inbox::{Command, ShardRemote};
use crate::shard::wakes::wake::Attention;
use crate::snapshot::WatchedFigures;
use crate::socket_options::asks::SocketQueries;
use crate::stats::{ServiceNames, ServiceStats, ShardStats, UpstreamStats};
use crate::telling::{LaneSet, Observers};

/// The interval at which a shard without a watchdog checks whether there is one.
const UNWATCHED: Duration = Duration::from_secs(1);

impl<D: Driver> ShardLoop<D, ()> {
    /// The shard with its services, once those of all shards exist.
    pub(crate) fn serving<V: Services>(self, services: V) -> ShardLoop<D, V> {
        self.with(services).0.starts()
    }
}

impl<D: Driver, V> ShardLoop<D, V> {
    /// Wakes the tasks that wait for the end of the start.
    pub(crate) fn starts(mut self) -> Self {
        if let Err(panicked) = self.lane.common.shard.end_start(true) {
            self.lane.common.report_panic("waker", None, &panicked);
        }
        self
    }

    /// The same shard with other services, and those that it had.
    pub(crate) fn with<W: Services>(self, services: W) -> (ShardLoop<D, W>, V) {
        let ShardLoop { core, lane: ShardLane { parts, common, services: had } } = self;
        let shard = ShardLoop { core, lane: ShardLane { parts, common, services } };
        (shard.keeping_accounts(), had)
    }
}

impl<D: Driver, V: Services> ShardLoop<D, V> {
    /// Counts what connections move, if a service or the server keeps accounts of them.
    fn keeping_accounts(mut self) -> Self {
        let common = &mut self.lane.common;
        common.keeps_accounts = self.lane.services.keeps_accounts() || !common.accounted.is_empty();
        if common.keeps_accounts {
            self.core.observer_mut().count_frames();
        }
        self
    }
}

impl<D: Driver<Descriptor = OwnedFd>, V: Services> ShardLoop<D, V> {
    /// Serves until the order to stop was given and every connection is gone.
    ///
    /// # Errors
    /// The `errno` of a driver that broke.
    pub(crate) fn run(self) -> Result<ShardStats, i32> {
        self.run_on(Vec::new())
    }

    /// The same, with completions that the driver brought already.
    pub(crate) fn run_on(mut self, mut completions: Vec<Completion>) -> Result<ShardStats, i32> {
        loop {
            if let Some(end) = self.round(&mut completions) {
                return end;
            }
        }
    }

    /// One round of the loop: a turn, then the driver's turn, which waits for completions for the
    /// next one.
    #[inline]
    pub(crate) fn round(&mut self, completions: &mut Vec<Completion>) -> Option<Result<ShardStats, i32>> {
        self.lane.common.now = self.lane.common.shard.timers().now();
        self.turn(completions);
        if self.is_done() {
            return Some(Ok(self.ended()));
        }
        let wait = self.wait();
        let driven = self.drive(wait, completions);
        if self.lane.parts.way.is_given {
            self.give_way(completions.is_empty());
        }
        driven.err().map(Err)
    }

    #[inline]
    pub(crate) fn drive(&mut self, wait: Wait, completions: &mut Vec<Completion>) -> Result<(), i32> {
        let turned = self.lane.parts.driver.turn(wait, Budget::default(), completions);
        if turned.is_err() {
            self.broken();
        }
        turned
    }

    /// Ends every connection after the driver broke, and informs its service: no completion comes
    /// after that.
    pub(crate) fn broken(&mut self) {
        self.core.abort_all();
        self.core.dispatch(&mut self.lane);
        self.lane.common.meter.snapshot.end();
        let mut report = self.report();
        (report.connections, report.upstreams.connections) = (0, 0);
        report.services.iter_mut().for_each(|service| service.connections = 0);
        self.lane.parts.remote.last_report(report);
    }

    /// The last report.
    pub(crate) fn ended(&self) -> ShardStats {
        self.lane.common.meter.snapshot.end();
        guarded(
            || debug!(shard = self.lane.common.shard.index(), stats = ?self.lane.parts.driver.stats(), "shard done"),
        );
        let left = self.core.left_behind();
        if left > 0 {
            let shard = self.lane.common.shard.index();
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
        self.lane.parts.remote.last_report(report.clone());
        report
    }

    /// True once every connection is gone, or given up.
    pub(crate) fn is_done(&self) -> bool {
        self.core.is_done()
    }

    /// The time for which the driver may wait. From this call on a wake-up interrupts that wait.
    #[inline]
    pub(crate) fn wait(&mut self) -> Wait {
        let ShardLoop { core, lane } = self;
        let mut next = core.next_turn_or_never().min(lane.common.shard.timers().next());
        if lane.parts.spare.is_active() {
            let at =
                if lane.parts.spare.has_to_do() { Some(lane.common.now) } else { lane.parts.spare.next() };
            next = next.min(at.unwrap_or(Time::NEVER));
        }
        let left_over = !lane.parts.delivery.tasks.is_empty() || !lane.parts.delivery.letters.is_empty();
        let is_due = next <= lane.common.now;
        let talks = lane.parts.remote.has_asked() | lane.parts.called.has(Attention::MESSAGES);
        if is_due || left_over || (talks && gives_way(lane)) || !lane.parts.remote.fall_asleep() {
            match lane.parts.way.is_given {
                true => lane.common.meter.waits(lane.common.shard.timers()),
                false => lane.common.meter.goes_on(),
            }
            return Wait::No;
        }
        lane.common.meter.waits(lane.common.shard.timers());
        if next == Time::NEVER { Wait::Forever } else { Wait::For(next - lane.common.now) }
    }

    /// Yields the CPU once if nothing came: the shard exchanges messages with others, and all of
    /// its own have left. A shard on the same CPU may answer or ask meanwhile, and then neither has
    /// to be woken.
    #[cold]
    #[inline(never)]
    fn give_way(&mut self, nothing_came: bool) {
        self.lane.parts.way.is_given = false;
        if nothing_came {
            let timers = self.lane.common.shard.timers();
            let began = timers.now();
            std::thread::yield_now();
            self.lane.parts.way.took(began, timers.now());
        }
    }

    pub(crate) fn report(&self) -> ShardStats {
        let mut report = ShardStats {
            upstreams: self.lane.parts.upstreams.report(&self.core),
            driver: self.lane.parts.driver.stats(),
            buffers: self.lane.parts.driver.pool().counts(),
            held_bytes: self.core.held_bytes(),
            accepted_waiting: self.core.newcomers(),
            accepted_waiting_by: self.core.newcomers_by_reason(),
            ..ShardStats::default()
        };
        for (lane, name) in self.lane.common.names.lanes() {
            report.add(ServiceStats {
                name: name.clone(),
                counters: self.core.counters(lane),
                connections: self.core.connections(lane),
            });
        }
        report
    }

    /// Takes in the driver's completions and hands it the next operations.
    pub(crate) fn turn(&mut self, completions: &mut Vec<Completion>) {
        let ShardLoop { core, lane } = self;
        lane.common.load = lane.parts.remote.load.get();
        if lane.common.load.sheds() || lane.common.has_shed {
            lane.pace_turn(completions.len() < Budget::default().completions && !core.cuts_turns());
        }
        lane.common.meter.begin_turn(lane.common.now, core.turn_part());
        if lane.common.now >= lane.common.meter.put_off_at() {
            lane.puts_look_off();
        }
        core.turn(lane.common.now, completions, lane);
        if lane.parts.command != Command::Serve {
            lane.step_ends(core);
        }
        let mut ops = core.take_ops();
        for op in ops.by_ref() {
            lane.parts.driver.submit(op);
        }
        // As in `Shard::turn`.
        std::mem::forget(ops);
        if !core.take_send_awaited() {
            lane.parts.driver.defer_sent();
        }
        self.lane.share_room(&mut self.core);
        self.lane.common.meter.end_turn();
        if self.lane.parts.called.has(Attention::TELLING) {
            self.tell();
        }
    }

    /// Publishes figures if they are due, and a report if one was requested. Otherwise figures that
    /// this turn changed are published later.
    #[cold]
    #[inline(never)]
    fn tell(&mut self) {
        let Common { shard, meter, now, .. } = &self.lane.common;
        let is_asked = self.lane.parts.called.has(Attention::REPORT);
        match is_asked || *now >= meter.publish_at() {
            true => self.publish(),
            false => shard.timers().set_publication(meter.publish_at()),
        }
        if is_asked {
            self.lane.parts.remote.report(self.report());
        }
    }

    /// Stores the figures where other threads read them.
    #[cold]
    fn publish(&mut self) {
        let ShardLoop { core, lane } = self;
        let mut watched = WatchedFigures {
            held_bytes: core.held_bytes(),
            accept_paused: core.accept_pauses(),
            is_paused: core.is_accept_paused(),
            ..WatchedFigures::default()
        };
        for (service, _) in lane.common.names.lanes() {
            watched.connections += core.connections(service);
        }
        lane.common.meter.snapshot.show(watched);
        let mut publishing = lane.common.meter.snapshot.publish();
        for (service, _) in lane.common.names.lanes() {
            publishing.connections(core.counters(service), core.connections(service));
        }
        let UpstreamStats { counters, connections } = lane.parts.upstreams.report(core);
        publishing.connections(counters, connections);
        publishing.driver(lane.parts.driver.stats());
        publishing.buffers(lane.parts.driver.pool().counts());
        publishing.sizes(core.held_bytes(), core.newcomers_by_reason());
        drop(publishing);
        let Common { shard, meter, losses, now, .. } = &mut lane.common;
        meter.published(*now);
        // Until the next turn there is nothing more to publish.
        shard.timers().set_publication(Time::NEVER);
        lane.parts.remote.all_published();
        let server = shard.server();
        losses.look(shard.index(), server.queues(), server.listeners(), *now);
    }
}

impl<D: Driver, V> ShardLane<D, V> {
    /// Postpones the watchdog's next check, which looks for shards that stand still.
    #[cold]
    #[inline(never)]
    fn puts_look_off(&mut self) {
        let now = self.common.now;
        let remotes = self.common.shard.server().remotes();
        let next = self.parts.remote.alarm().map(|alarm| {
            alarm.put_off(now, |late| remotes.iter().any(|remote| remote.is_in_turn_for(late, now)))
        });
        self.common.meter.put_off(next.unwrap_or(now + UNWATCHED));
    }

    /// Decides what a turn sheds, by the turn before. `brings_all` is false if the next turn goes
    /// on with what this one has no room for.
    #[cold]
    fn pace_turn(&mut self, brings_all: bool) {
        let Common { shard, meter, load, has_shed, now, .. } = &mut self.common;
        let since = meter.since_turn(*now);
        shard.pace().begin_turn(self.parts.remote.load.turn(), brings_all, since, || shard.timers().ran());
        meter.snapshot.show_shedding(shard.pace().counts());
        *has_shed = load.sheds();
    }
}

/// Runs one shard with one listener on this thread, over any driver, until the driver breaks.
///
/// # Errors
/// The driver's.
pub fn run_on<S: Service, F: Framing, D: Driver<Descriptor = OwnedFd>>(
    driver: D,
    service: S,
    framing: F,
    limits: Limits,
) -> Result<ShardStats, i32> {
    let remote = ShardRemote::new();
    let connections_max = driver.connections_max();
    let framing = Rc::new(framing);
    let names = ServiceNames::new([("service".into(), 1)]);
    let random = Random::of_shard(Random::system_seed(), 0);
    let blocking = Arc::new(Threads::new(&ServerLimits::default()));
    let clock = Clock::start();
    let server = ServerControl::new([remote.clone()].into(), Arc::default(), blocking, clock.clone());
    let ends = ServiceEnds::new(names.clone(), Box::default());
    let shard = Shard::new(0, remote.clone(), server, clock, random, ends);
    let mut core = ringserve_core::Shard::new(
        ServerLimits::default(),
        limits.clone(),
        connections_max,
        1,
        framing.encoding(),
        driver.pool().clone(),
        LogObserver::new(
            0,
            names.clone(),
            remote.publishes(&names).clone(),
            &Observers::default(),
            reports_panics(&shard),
        ),
    );
    // The driver has slots for accepted connections alone.
    let upstreams = add_upstreams(&mut core, &limits, 0);
    let services = ServiceLane::new(&shard, service, framing, None, calls::<S, ()>, TaskNumbers::ALONE);
    let common = Common::new(shard, names, Proxies::default(), LaneSet::default());
    let parts = LaneParts::new(&common.shard, driver, upstreams, Box::default(), SocketQueries::default());
    ShardLoop::new(core, common, parts).serving(services).run()
}

/// True if a shard that asked others something, or read messages, takes one more turn before it
/// sleeps. False for a single shard, and inside a runtime, whose tasks would wait too.
#[cold]
#[inline(never)]
fn gives_way<D: Driver, V>(lane: &mut ShardLane<D, V>) -> bool {
    lane.parts.remote.forget_questions();
    let has_others = lane.common.shard.count() > 1 && !lane.parts.remote.is_hosted();
    has_others && lane.parts.way.gives(lane.common.now)
}
