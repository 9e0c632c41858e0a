//! Questions and orders of a program to its server, from any thread.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ringserve_admission::{AdmissionControl, AdmissionStats, KeyRatesStats};
use ringserve_base::clock::Deadline;
use ringserve_base::doctor::{Finding, Lived, Workload};
use ringserve_core::Address;

use crate::overload::{Load, ShardLoad};
use crate::shard::remote::control::ServerControl;
use crate::shard::wakes::inbox::{Command, ShardRemote};
use crate::stats::{AcceptQueueStats, ServerStats, ShardStats, ShardTimes, Stall};
use crate::watch::state::State;

/// The time for which [`ServerControl::stats_now`] waits for blocked shards: a shard answers at the
/// end of its turn, which takes milliseconds, and a test may wait a moment for a slow one.
const REPORT_WITHIN: Duration = Duration::from_millis(250);

impl ServerControl {
    /// Changes the limits on who is let in while the server runs, of all listeners together:
    /// networks that are denied or allowed for a time, counts and rates. See [`AdmissionControl`].
    pub fn admission(&self) -> AdmissionControl {
        AdmissionControl::new(
            self.limiters(),
            self.rate().cloned(),
            self.journal().clone(),
            self.clock().clone(),
        )
    }

    /// The same of one listener, by its place in [`listeners`](ServerControl::listeners), and of
    /// those that share its limits: all of the service, unless it has [its
    /// own](crate::listen::Endpoint::listener_admission).
    pub fn admission_at(&self, listener: usize) -> AdmissionControl {
        self.admission().at(self.limiters(), listener)
    }

    /// The contents of the limits on addresses ([`Admission`](crate::admission::Admission)).
    /// Reading them takes the 64 locks of each table, one after the other.
    pub fn admission_stats(&self) -> AdmissionStats {
        self.limiters().stats()
    }

    /// The contents of the [rates by key](crate::admission::KeyRates) that shards were asked for,
    /// by their [name](crate::admission::KeyLimits::name). Reading them takes the 64 locks of each
    /// table, one after the other.
    pub fn key_rates_stats(&self) -> BTreeMap<&'static str, KeyRatesStats> {
        self.key_rates().stats()
    }

    /// The connections that wait to be accepted at each TCP address on each shard, and the losses
    /// there, listener by listener and in each of them by shard; one value for an adopted socket,
    /// from whose one queue all shards accept. It takes two system calls for each listener and asks
    /// no shard, so it reports on a blocked shard too.
    ///
    /// A listener that is closed, as in a shutdown, is no longer in it. Unix sockets never are: the
    /// kernel reports nothing of their queues, and nothing is lost there, since a peer that finds
    /// one full waits in `connect`, or gets `EAGAIN` if it does not want to wait.
    ///
    /// ```
    /// # use ringserve::ServerControl;
    /// fn print_queues(server: &ServerControl) {
    ///     for queue in server.accept_queues() {
    ///         let addr = &server.listeners()[queue.listener];
    ///         println!("{addr}, shard {:?}: {} of {} wait, {:?} lost", queue.shard, queue.waiting, queue.capacity, queue.lost);
    ///     }
    /// }
    /// ```
    pub fn accept_queues(&self) -> Vec<AcceptQueueStats> {
        self.queues().read().collect()
    }

    /// The stalls of the server's shards: the last 64, and those that last, the oldest first. A
    /// shard is stalled if it is in one turn of its loop for longer than
    /// [`StallOptions`](crate::limits::StallOptions) allows. None in a simulation, and with
    /// `StallOptions::off`.
    ///
    /// No shard is asked or waited for.
    ///
    /// ```
    /// # use ringserve::ServerControl;
    /// fn print_stalls(server: &ServerControl) {
    ///     server.stalls().iter().filter(|stall| stall.ongoing).for_each(|stall| println!("{stall}"));
    /// }
    /// ```
    pub fn stalls(&self) -> Vec<Stall> {
        self.watch().stalls(self.now())
    }

    /// The time that the threads of the shards spent running and waiting for a CPU, shard by shard.
    /// A file of `/proc` is read for each, which stays open from then on; no shard is asked or
    /// waited for. All zeros for a shard that ended, in a simulation, and where the kernel does not
    /// count (`CONFIG_SCHED_INFO`).
    pub fn shard_times(&self) -> Vec<ShardTimes> {
        let times: Vec<_> = self.remotes().iter().map(|remote| remote.times()).collect();
        self.watch().shares(self.now(), &times)
    }

    /// The demand on the server in relation to its capacity: that of its busiest shard.
    pub fn load(&self) -> Load {
        self.remotes().iter().map(|remote| remote.load.get().load()).max().unwrap_or_default()
    }

    /// The load of each shard, with its cause and the share of frames that are shed.
    pub fn shard_loads(&self) -> Vec<ShardLoad> {
        let of = |(shard, remote): (usize, &Arc<ShardRemote>)| {
            let (cause, shed_share) = self.watch().loads.of(shard);
            ShardLoad { shard, load: remote.load.get().load(), cause, shed_share }
        };
        self.remotes().iter().enumerate().map(of).collect()
    }

    /// Counters since the start and present figures, as each shard published them: a shard stores
    /// its figures at the end of a turn, if it did not within the last 100 ms, and before it sleeps
    /// for longer. No shard is asked or waited for, and every shard is in it, with its last figures
    /// also after its end. Counters never fall.
    ///
    /// A shard that a handler has blocked for more than 250 ms is [marked as
    /// stale](crate::stats::ShardStats::stale): its figures are those from before.
    /// [`stats_now`](ServerControl::stats_now) has figures that are exact.
    pub fn stats(&self) -> ServerStats {
        let now = self.now();
        let is_blocked = |remote: &ShardRemote| matches!(remote.state(), State::Turn(began) if now - began > REPORT_WITHIN);
        let mut report = ServerStats::default();
        for remote in self.remotes().iter() {
            let stale = is_blocked(remote);
            let shard = remote.published();
            report.add(ShardStats { stale: shard.stale || stale, ..shard });
        }
        report.blocking = self.blocking().stats();
        report
    }

    /// The same figures as of now: each shard is asked to answer at the end of its turn. For tests,
    /// which count what they just did; it wakes shards that sleep. A shard that does not answer
    /// within 250 ms, because a handler blocks it, is in it with its last published figures,
    /// [marked as stale](crate::stats::ShardStats::stale).
    ///
    /// On a shard's own thread, in a handler or a task, it does not wait: every shard is asked, and
    /// the figures are those of the last answers. Called again a moment later it returns the
    /// answers to this call.
    pub fn stats_now(&self) -> ServerStats {
        let deadline = Deadline::within(REPORT_WITHIN);
        let mut report = ServerStats::default();
        let asked: Vec<u64> = self.remotes().iter().map(|remote| remote.ask_report()).collect();
        for (remote, number) in self.remotes().iter().zip(asked) {
            report.add(remote.latest_report(number, deadline));
        }
        report.blocking = self.blocking().stats();
        report
    }

    /// Findings about the server, the worst first: settings of the machine, limits of the process,
    /// what was lost since the start, and which totals of the machine grew since an earlier call, a
    /// minute ago or more. It reads files of `/proc` and `/sys` and the figures that shards
    /// published, within milliseconds, and asks no shard. A server on drivers of the caller, as in
    /// a simulation, has no findings. See [`doctor`](crate::doctor).
    ///
    /// ```
    /// # use ringserve::ServerControl;
    /// fn print_findings(server: &ServerControl) {
    ///     for finding in server.doctor() {
    ///         println!("{}: {finding}", finding.severity);
    ///     }
    /// }
    /// ```
    pub fn doctor(&self) -> Vec<Finding> {
        self.doctor_for(&Workload::default())
    }

    /// The findings, also with respect to the expected workload.
    pub fn doctor_for(&self, expected: &Workload) -> Vec<Finding> {
        self.record().map_or_else(Vec::new, |record| record.examine(expected, self.lived(), self.now()))
    }

    fn lived(&self) -> Lived {
        let stats = self.stats();
        let lost = |queue: &AcceptQueueStats| queue.lost.unwrap_or(0);
        let queues = self.accept_queues();
        let worst = queues.iter().max_by_key(|queue| lost(queue)).map(|queue| {
            let addr = self.listeners().get(queue.listener).map(Address::to_string).unwrap_or_default();
            let shard = queue.shard.map(|shard| format!(" of shard {shard}")).unwrap_or_default();
            format!("most at {addr}{shard}")
        });
        Lived {
            connections: stats.connections as u64,
            queue_lost: queues.iter().map(lost).sum(),
            queue_worst: worst.unwrap_or_default(),
            longest_stall: self.stalls().iter().map(|stall| stall.lasted).max(),
            skew: stats.skew(),
            opened: stats.counters.opened,
        }
    }

    /// Begins to shut down, as [`ServerHandle::shutdown`](crate::ServerHandle::shutdown).
    pub fn shutdown(&self) {
        self.remotes().iter().for_each(|remote| remote.command(Command::Drain));
        self.ending().drains();
    }

    /// Stops at once, as [`ServerHandle::abort`](crate::ServerHandle::abort).
    pub fn abort(&self) {
        self.remotes().iter().for_each(|remote| remote.command(Command::Abort));
        self.ending().aborts();
    }
}
