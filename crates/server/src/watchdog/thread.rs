//! The watchdog's thread: it looks at the shards, has that judged, and says what follows.

use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ringserve_base::cpu::{this_thread, time_of};
use ringserve_base::lines::{info, warn};
use ringserve_base::log_thread::hand_over;
use ringserve_core::Time;
use ringserve_drivers::guarded;

use super::facts::{ThreadFacts, ThreadFiles};
use super::judge::{Judge, Seen, StallStage, Verdict};
use super::lines::{END_TOLD_FROM, Lines};
use super::loads::Loads;
use crate::overload::Overload;
use crate::shard::remote::control::ServerControl;
use crate::shard::wakes::inbox::ShardRemote;
use crate::snapshot::working::Working;
use crate::stats::{Stall, StalledWork};
use crate::watch::alarm::Alarm;
use crate::watch::options::StallOptions;
use crate::watch::state::State;
use crate::watch::times::OVER;

/// For the thread's own frames, and those of the program's log.
const STACK_BYTES: usize = 256 << 10;

/// The watchdog of a server. Its drop ends the thread: that of a server whose shards ended before.
pub(crate) struct Watchdog {
    control: ServerControl,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Watches the shards of a server, which run. `None` if the options turn it off, or there is no
    /// thread for it.
    pub(crate) fn start(
        stalls: StallOptions,
        overload: Overload,
        control: &ServerControl,
    ) -> Option<Watchdog> {
        let over = stalls.threshold()?;
        let looks = Looks::new(control.clone(), over, overload);
        let alarm = Alarm::new(over);
        let spawned = alarm.and_then(|alarm| {
            control.watch().begin(control.remotes().len(), alarm);
            let thread = thread::Builder::new().name("ringserve-watch".to_owned()).stack_size(STACK_BYTES);
            thread.spawn(move || looks.run())
        });
        match spawned {
            Ok(thread) => Some(Watchdog { control: control.clone(), thread: Some(thread) }),
            Err(error) => {
                guarded(
                    || warn!(%error, "no thread or timer for the watchdog: stalls of shards are not reported"),
                );
                None
            }
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.control.watch().end(self.control.now());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A shard, as the watchdog looks at it.
struct Looked {
    files: ThreadFiles,
    lines: Lines,
    /// Packets that its queues had lost when its turn was last seen to be none of a stall.
    lost_before: Option<u64>,
}

impl Looked {
    /// The state of a shard that waits inside a runtime: for that, or for a task that blocks the
    /// thread.
    fn between_turns(&self, last: Time) -> (State, Option<ThreadFacts>) {
        let facts = self.files.facts();
        let is_blocked = |facts: &ThreadFacts| facts.sleeps.as_ref().is_some_and(|sleeps| !sleeps.polls);
        match facts.filter(is_blocked) {
            Some(facts) => (State::Called(last), Some(facts)),
            None => (State::Waits(last), None),
        }
    }
}

/// The demand of a look at a shard for the next one, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Pace {
    /// None is needed until the shard leaves its wait.
    Rest,
    Seldom,
    /// The shard may be stalled, or is one that does not say when it leaves its wait.
    Close,
}

struct Looks {
    control: ServerControl,
    every: Duration,
    seldom: Duration,
    judge: Judge,
    shards: Vec<Looked>,
    loads: Loads,
    /// The number of the watchdog's thread, and how long that waited for a CPU so far.
    own: u32,
    waited: Duration,
}

impl Looks {
    fn new(control: ServerControl, over: Duration, overload: Overload) -> Looks {
        let looked = |remote: &Arc<ShardRemote>| Looked {
            files: ThreadFiles::open(remote.thread().unwrap_or_default()),
            lines: Lines::default(),
            lost_before: None,
        };
        let remotes = control.remotes();
        Looks {
            every: StallOptions::looks_every(over),
            seldom: StallOptions::looks_seldom(over),
            judge: Judge::new(remotes.len(), over),
            shards: remotes.iter().map(looked).collect(),
            loads: Loads::new(overload, &control),
            own: 0,
            waited: Duration::ZERO,
            control,
        }
    }

    fn run(mut self) {
        let watch = self.control.watch().clone();
        let Some(alarm) = watch.alarm() else { return };
        self.control.remotes().iter().for_each(|remote| remote.set_watch(&watch));
        // What blocks the log must not keep it from its looks.
        let _handing = hand_over(None);
        self.own = this_thread();
        self.waited = time_of(self.own).unwrap_or_default().waited;
        loop {
            let now = self.control.now();
            self.check_own(now, alarm.due());
            let mut pace = Pace::Rest;
            for shard in 0..self.shards.len() {
                pace = pace.max(self.look(shard, now));
            }
            let files = &self.shards;
            watch.keep_times(now, files.iter().map(|shard| shard.files.times()));
            let is_calm = self.loads.look(now, &self.control, |shard| files[shard].files.times());
            let may_rest = pace == Pace::Rest && is_calm;
            if may_rest {
                alarm.rest();
            }
            // In this order: a shard that leaves its wait behind the first one finds the mark.
            let rests = may_rest && self.control.remotes().iter().all(|remote| remote.lets_watchdog_rest());
            match pace {
                _ if rests => {}
                Pace::Close => alarm.look_in(now, self.every),
                _ if self.loads.may_wait() => alarm.look_late(now),
                _ => alarm.look_in(now, self.seldom),
            }
            // Behind all that sets the timer: an end later than this sets it again.
            if watch.is_over() {
                return;
            }
            alarm.wait();
            if rests && self.control.now() - now >= OVER {
                watch.forget_times();
            }
        }
    }

    /// Finds out whether the process was stopped since the last look: the watchdog itself did not
    /// wake in time, though no other thread had its CPU.
    fn check_own(&mut self, now: Time, due: Time) {
        let late = now - due;
        if late < self.every {
            return;
        }
        let waited = time_of(self.own).map_or(self.waited, |times| times.waited);
        let starved = waited.saturating_sub(std::mem::replace(&mut self.waited, waited));
        if starved < late / 2 {
            self.judge.stopped(now, late);
        }
    }

    fn look(&mut self, shard: usize, now: Time) -> Pace {
        let remote = &self.control.remotes()[shard];
        let looked = &mut self.shards[shard];
        let (state, mut thread) = match remote.state() {
            State::Waits(last) if remote.is_hosted() => looked.between_turns(last),
            state => (state, None),
        };
        let rests = self.judge.rests(shard, state);
        let Some(snapshot) = remote.snapshot() else { return Pace::Rest };
        let working = snapshot.work.read();
        let asks = self.judge.asks(shard, now, state);
        let pace = match state {
            State::Waits(_) if rests => Pace::Rest,
            _ if asks || remote.is_hosted() => Pace::Close,
            _ => Pace::Seldom,
        };
        if asks && thread.is_none() {
            thread = looked.files.facts();
        }
        let seen = Seen { state, work: working.mark, thread };
        let verdict = self.judge.look(shard, now, seen);
        let is_under_way = verdict.as_ref().is_some_and(|verdict| verdict.stage != StallStage::Ended);
        if !is_under_way {
            looked.lost_before = if asks { queues(&self.control, shard).1 } else { None };
        }
        if let Some(verdict) = verdict {
            self.tell(shard, now, verdict, working);
        }
        pace
    }

    fn tell(&mut self, shard: usize, now: Time, verdict: Verdict, working: Working) {
        let Verdict { stage, since, lasted, cause, waits_in, several, is_loud } = verdict;
        let watch = self.control.watch();
        let lost_before = self.shards[shard].lost_before;
        let told = match stage {
            StallStage::Begins => {
                let is_hosted = self.control.remotes()[shard].is_hosted();
                let (waiting, lost) = queues(&self.control, shard);
                let stall = Stall {
                    shard,
                    ago: lasted,
                    lasted,
                    ongoing: true,
                    work: match working.work {
                        StalledWork::Framework if is_hosted => StalledWork::Runtime,
                        work => work,
                    },
                    peer: working.peer,
                    connection: working.connection,
                    frame_bytes: working.frame_bytes,
                    several,
                    cause,
                    waits_in,
                    queue_waiting: waiting,
                    queue_lost: lost.map(|lost| lost.saturating_sub(lost_before.unwrap_or(lost))),
                };
                watch.begins(since, stall.clone());
                Some(stall)
            }
            StallStage::Lasts => {
                let (waiting, lost) = queues(&self.control, shard);
                watch.change(shard, |kept| {
                    kept.since = since;
                    let stall = &mut kept.stall;
                    (stall.lasted, stall.cause, stall.waits_in, stall.several) =
                        (lasted, cause, waits_in, several);
                    if let Some(waiting) = waiting {
                        stall.queue_waiting = stall.queue_waiting.max(Some(waiting));
                        stall.queue_lost = lost.map(|lost| lost.saturating_sub(lost_before.unwrap_or(lost)));
                    }
                })
            }
            StallStage::Ended => watch.change(shard, |kept| {
                (kept.stall.lasted, kept.stall.cause, kept.stall.ongoing) = (lasted, cause, false);
            }),
        };
        let Some(stall) = told else { return };
        if stage == StallStage::Ended {
            if lasted >= END_TOLD_FROM {
                guarded(|| info!("{stall}"));
            }
        } else if is_loud && let Some(left_out) = self.shards[shard].lines.allow(now) {
            guarded(|| match left_out {
                0 => warn!("{stall}"),
                _ => warn!("{stall}; {left_out} lines like this were left out"),
            });
        }
    }
}

/// The connections that wait in the accept queues of a shard, and the losses of those since the
/// start. `None` without such a queue.
fn queues(control: &ServerControl, shard: usize) -> (Option<u32>, Option<u64>) {
    let (mut waiting, mut lost) = (None, None);
    for queue in control.queues().read_those_of(shard) {
        *waiting.get_or_insert(0) += u32::try_from(queue.waiting).unwrap_or(u32::MAX);
        if let Some(count) = queue.lost {
            *lost.get_or_insert(0) += count;
        }
    }
    (waiting, lost)
}
