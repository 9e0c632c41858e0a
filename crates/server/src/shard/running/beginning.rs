//! A shard whose services are not all there yet, or those of others: its loop goes round, with
//! timers, tasks, messages and upstreams, and accepts nothing.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::thread;

use ringserve_base::peer::Peer;
use ringserve_core::{Completion, ConnId, Driver, EndedConn, Frames, RefusedBy, Socket, Wait};

use super::starting::ShardStart;
use crate::error::Error;
use crate::log::LogObserver;
use crate::shard::Core;
use crate::shard::face::service::FactoryOutput;
use crate::shard::state::services::Services;
use crate::shard::state::shard_loop::{Common, ShardLoop};
use crate::shard::tasks::spawned::TaskId;
use crate::shard::wakes::inbox::Command;
use crate::stats::ShardStats;

/// A shard until it serves.
pub(crate) struct StartingShard<D: Driver, V> {
    pub(crate) shard: ShardLoop<D, NoServices>,
    /// `None` until they are there.
    services: Rc<RefCell<Option<V>>>,
    /// The waker of the shard.
    task: Option<TaskId>,
    start: ShardStart,
}

/// Ends the start if what makes the services panics: the task that waits for them would only be
/// gone.
struct FailsInPanic(ShardStart);

impl Drop for FailsInPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.panicked();
        }
    }
}

/// The end of a shard: its counts, or its driver's `errno`.
pub(crate) type End = Result<ShardStats, i32>;

impl<D: Driver<Descriptor = OwnedFd>, V: Services> StartingShard<D, V> {
    pub(crate) fn new(mut shard: ShardLoop<D, ()>, made: FactoryOutput<V, Error>, start: ShardStart) -> Self {
        shard.core.withhold_accepting();
        let services = Rc::new(RefCell::new(None));
        let task = match made {
            FactoryOutput::Now(made) => {
                services.replace(Some(made));
                None
            }
            FactoryOutput::Later(making) => {
                let (services, start) = (services.clone(), start.clone());
                Some(shard.lane.common.shard.tasks().spawn(Box::pin(async move {
                    let start = FailsInPanic(start);
                    match making.await {
                        Ok(made) => {
                            services.replace(Some(made));
                            start.0.succeeded();
                        }
                        Err(error) => start.0.failed(error),
                    }
                })))
            }
        };
        let (shard, ()) = shard.with(NoServices::default());
        StartingShard { shard, services, task, start }
    }

    /// Serves once all services of all shards are there, until the end of the shard.
    ///
    /// # Errors
    /// The `errno` of a driver that broke.
    pub(crate) fn run(mut self) -> End {
        let mut completions = Vec::new();
        while !self.serves() {
            if let Some(end) = self.round(&mut completions) {
                return end;
            }
        }
        match self.serve() {
            Some(shard) => shard.run_on(completions),
            None => Ok(ShardStats::default()),
        }
    }

    /// One round of the loop.
    pub(crate) fn round(&mut self, completions: &mut Vec<Completion>) -> Option<End> {
        let shard = &mut self.shard;
        shard.lane.common.now = shard.lane.common.shard.timers().now();
        shard.turn(completions);
        self.apply_command();
        if self.shard.is_done() {
            return Some(Ok(self.shard.ended()));
        }
        // Asked after the turn, which may have taken the call that says so, and before the shard
        // falls asleep.
        let wait = if self.serves() { Wait::No } else { self.shard.wait() };
        self.shard.drive(wait, completions).err().map(Err)
    }

    /// The order to stop ends the start, and what is waited for.
    pub(crate) fn apply_command(&mut self) {
        if self.shard.lane.parts.command != Command::Serve {
            // It had no calls.
            self.shard.core.await_others(false);
        }
        if self.shard.lane.parts.command != Command::Serve && !self.serves() {
            if let Some(task) = self.task.take() {
                self.shard.lane.common.shard.tasks().abort(task);
            }
            self.start.failed(Error::Interrupted);
        }
    }

    /// True once all services of all shards are there.
    pub(crate) fn serves(&self) -> bool {
        self.start.is_over()
    }

    /// The shard with its services, which are there.
    pub(crate) fn serve(self) -> Option<ShardLoop<D, V>> {
        let services = self.services.take()?;
        let (shard, NoServices { passed_on }) = self.shard.with(services);
        let mut shard = shard.starts();
        shard.core.begin_accepting();
        for (socket, peer) in passed_on {
            shard.lane.services.accepted(&mut shard.lane.common, &mut shard.core, socket, peer);
        }
        Some(shard)
    }
}

/// In the place of services that are not there.
#[derive(Default)]
pub(crate) struct NoServices {
    /// By a shard that serves already.
    passed_on: Vec<(Socket, Peer)>,
}

impl Services for NoServices {
    fn keeps_accounts(&self) -> bool {
        false
    }

    fn accepted(&mut self, common: &mut Common, core: &mut Core, socket: Socket, peer: Peer) {
        // What is queued at a listener that closes comes too.
        match common.shard.is_draining() {
            true => core.refuse(socket, peer.listener_id(), RefusedBy::Stopping),
            false => self.passed_on.push((socket, peer)),
        }
    }

    // No connection is there that any of this could be about.

    fn proxied(&mut self, _: &mut Common, _: &mut Core, _: ConnId) {}

    fn secured(&mut self, _: &mut Common, _: &mut Core, _: ConnId) {}

    fn frames(&mut self, _: &mut Common, _: &mut Frames<'_, LogObserver>) {}

    fn timed_out(&mut self, _: &mut Common, _: &mut Core, _: ConnId) {}

    fn draining(&mut self, _: &mut Common, _: &mut Core, _: ConnId) {}

    fn heartbeat(&mut self, _: &mut Common, _: &mut Core, _: ConnId) {}

    fn input_ended(&mut self, _: &mut Common, _: &mut Core, _: ConnId) {}

    fn ended(&mut self, _: &mut Common, _: EndedConn) {}

    fn resume(&mut self, _: &mut Common, _: &mut Core, _: u32) -> Option<ConnId> {
        None
    }

    fn give_back(&mut self) {}
}
