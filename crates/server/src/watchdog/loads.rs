//! The watchdog's part: it reads the signals of each shard, steps its stage, and tells the shard,
//! and other threads that ask.

use std::collections::VecDeque;
use std::time::Duration;

use ringserve_base::lines::{info, warn};
use ringserve_base::thread_times::ThreadTimes;
use ringserve_core::{Shard, Time};
use ringserve_drivers::guarded;

use super::lines::Lines;
use crate::overload::stages::{Change, Excuse, Signals, Stages, TABLE_FULL};
use crate::overload::{Load, Overload};
use crate::shard::remote::control::ServerControl;
use crate::watch::state::State;

/// Signals are read this often at most.
const READ_EVERY: Duration = Duration::from_millis(20);

/// The time over which the figures of a shard are taken.
const OVER: Duration = Duration::from_millis(100);

/// A shard at ease that waits is read this often at least, if there is a look.
const SELDOM: Duration = Duration::from_millis(180);

/// Samples of this time at most: no more are kept, and nothing is allocated for them.
const SAMPLES: usize = 16;

/// A longer gap between two looks: the watchdog rested, or the process was stopped.
const GAP: Duration = Duration::from_millis(400);

/// The interval at which the namespace's count of overflowing queues is noted, so that an overflow
/// explains no later drop.
const OVERFLOWS_EVERY: Duration = Duration::from_secs(1);

/// Packets that a shard's queues lose within a second before new connections are refused: single
/// ones are repeated a second later, and are no reason to send others away.
const LOST_MANY: u64 = 8;

/// A shard that is busy for this part of the time does not wait. The kernel counts the time of a
/// thread that runs at ticks.
const SATURATED: f64 = 0.9;

/// From this part of the time on that others had its CPU a shard is starved.
const STARVED: f64 = 0.25;

/// A turn of one piece of work that takes this long is no sign of many.
const STALLED_FROM: Duration = Duration::from_millis(100);

/// A shard, over the last looks.
#[derive(Default)]
struct Followed {
    stages: Stages,
    /// When it was read last.
    looked: Time,
    /// Of then, without the table, which is that of all.
    signals: Signals,
    samples: VecDeque<Sample>,
    saturated_since: Option<Time>,
    late_since: Option<Time>,
    /// The publication that was read last.
    publication: u64,
    queue: f64,
    held: f64,
    connections: usize,
    losses: Losses,
    paused: Option<u64>,
    is_paused: bool,
    lines: Lines,
}

/// The losses of a shard's queues.
#[derive(Default)]
struct Losses {
    /// Since the start.
    total: u64,
    /// Those since the beginning of the present second.
    of_second: u64,
    began: Time,
}

impl Losses {
    /// Takes in the losses until now. True if there were some since the last time, and many within
    /// a second.
    fn take(&mut self, now: Time, total: u64) -> bool {
        let more = total.saturating_sub(self.total);
        // A queue that was closed takes its count along.
        self.total = total;
        if more == 0 {
            return false;
        }
        if now - self.began >= Duration::from_secs(1) {
            (self.began, self.of_second) = (now, 0);
        }
        self.of_second += more;
        self.of_second >= LOST_MANY
    }
}

#[derive(Clone, Copy)]
struct Sample {
    at: Time,
    times: ThreadTimes,
    /// In parts of whole ones.
    turns: u64,
    /// Frames that might have been shed, and those for which a service was asked.
    shedding: (u64, u64),
}

/// The state of the whole server: whether it had no room, and not a shard alone, beside which new
/// connections find another one.
#[derive(Default)]
struct Whole {
    was_full: bool,
}

impl Whole {
    /// Takes in how many of its shards are full, and how full the table is that they share. True
    /// once there was no room anywhere.
    fn take(&mut self, full: usize, shards: usize, table: f64) -> bool {
        self.was_full |= full > 0 && (full == shards || table >= TABLE_FULL);
        self.was_full
    }
}

/// The loads of a server's shards.
pub(crate) struct Loads {
    limits: Overload,
    shards: Vec<Followed>,
    looked: Time,
    whole: Whole,
    /// When overflows of the namespace were noted last.
    noted: Time,
}

impl Loads {
    pub(crate) fn new(limits: Overload, control: &ServerControl) -> Loads {
        let shards = control.remotes().len();
        control.watch().loads.begin(shards);
        let followed = || Followed { samples: VecDeque::with_capacity(SAMPLES), ..Followed::default() };
        Loads {
            limits,
            shards: (0..shards).map(|_| followed()).collect(),
            looked: Time::ZERO,
            whole: Whole::default(),
            noted: Time::ZERO,
        }
    }

    /// Looks at all shards, whose threads' times `times` reads. True if all are calm, and all that
    /// they published was read.
    pub(crate) fn look(
        &mut self,
        now: Time,
        control: &ServerControl,
        times: impl Fn(usize) -> Option<ThreadTimes>,
    ) -> bool {
        if now - self.looked < READ_EVERY {
            return self.are_calm(control);
        }
        self.looked = now;
        if now - self.noted >= OVERFLOWS_EVERY {
            self.noted = now;
            control.queues().note_overflows();
        }
        for (shard, followed) in self.shards.iter_mut().enumerate() {
            if followed.is_to_be_read(now, control.remotes()[shard].state()) {
                followed.looked = now;
                followed.signals = followed.read(now, shard, control, &self.limits, || times(shard));
            }
        }
        // Of all shards, and of this look: the next one may be far away.
        let connections: usize = self.shards.iter().map(|followed| followed.connections).sum();
        let table = connections as f64 / control.connections_max().max(1) as f64;
        let mut left_full = false;
        for shard in 0..self.shards.len() {
            let followed = &mut self.shards[shard];
            if followed.looked != now {
                continue;
            }
            let signals = Signals { table, ..followed.signals };
            let was_full = followed.stages.load() == Load::Full;
            let change = followed.stages.step(now, &signals, &self.limits);
            left_full |= was_full && followed.stages.load() < Load::Full;
            let stages = &followed.stages;
            control.remotes()[shard].load.set(stages.load(), stages.told(&self.limits));
            control.watch().loads.post(shard, &followed.stages);
            if let Some(change) = change {
                control.watch().loads.count(change);
                tell(shard, now, change, &mut followed.lines);
            }
        }
        let full = self.shards.iter().filter(|followed| followed.stages.load() == Load::Full).count();
        if self.whole.take(full, self.shards.len(), table) && left_full {
            self.whole = Whole::default();
            control.starts_slowly(now);
        }
        self.are_calm(control)
    }

    /// True if the next look may be as late as shards that go on let it be: all are calm, and none
    /// is about to be anything else.
    pub(crate) fn may_wait(&self) -> bool {
        self.shards.iter().all(|followed| followed.is_at_ease())
    }

    /// True if nothing is left to be done until a shard works again.
    fn are_calm(&self, control: &ServerControl) -> bool {
        self.shards.iter().zip(control.remotes().iter()).all(|(followed, remote)| {
            let publication = remote.snapshot().map_or(0, |snapshot| snapshot.publication());
            followed.stages.load() == Load::Calm && followed.publication == publication
        })
    }
}

fn tell(shard: usize, now: Time, change: Change, lines: &mut Lines) {
    let Some(left_out) = lines.allow(now) else { return };
    let Change { to, cause } = change;
    guarded(|| match to {
        Load::Calm => info!(shard, left_out, "load is calm: {cause}"),
        _ => warn!(shard, left_out, "load is {to}: {cause}"),
    });
}

impl Followed {
    fn read(
        &mut self,
        now: Time,
        shard: usize,
        control: &ServerControl,
        limits: &Overload,
        times: impl FnOnce() -> Option<ThreadTimes>,
    ) -> Signals {
        let remote = &control.remotes()[shard];
        let turns = remote.snapshot().map_or(0, |snapshot| snapshot.turn_parts());
        let shedding = remote.snapshot().map_or((0, 0), |snapshot| snapshot.shedding());
        let mut signals = Signals::default();
        if self.needs_times(now, remote.state()) {
            match times() {
                Some(times) => self.keep(Sample { at: now, times, turns, shedding }),
                // The thread ended: what it did before is over.
                None => self.samples.clear(),
            }
        }
        if let Some(over) = self.over() {
            (signals.busy, signals.shed) = (over.busy, over.shed);
            let late = over.busy >= SATURATED && over.turn > limits.turn_max;
            let lasts = |since: &mut Option<Time>, holds: bool| match holds {
                true => OVER + (now - *since.get_or_insert(now)),
                false => {
                    *since = None;
                    Duration::ZERO
                }
            };
            signals.saturated = lasts(&mut self.saturated_since, over.busy >= SATURATED);
            signals.late = lasts(&mut self.late_since, late);
            if over.starved >= STARVED {
                signals.excuse = Some(Excuse::Starved);
            }
        }
        if control.watch().is_stalled(shard, STALLED_FROM, now) {
            signals.excuse = Some(Excuse::Stalled);
        }
        if control.is_draining() {
            signals.excuse = Some(Excuse::Drains);
        }
        let has_time = has_time(&signals);
        // A shard publishes before it sleeps, so that what it did last is read before the watchdog
        // rests.
        let publication = remote.snapshot().map_or(0, |snapshot| snapshot.publication());
        if !has_time || publication != self.publication {
            self.publication = publication;
            (signals.lost, signals.paused) = self.read_queues(now, shard, control);
        }
        (signals.queue, signals.held) = (self.queue, self.held);
        signals.paused |= self.is_paused;
        signals
    }

    /// True if it is calm, and nothing says that it will be anything else soon.
    fn is_at_ease(&self) -> bool {
        self.stages.load() == Load::Calm && has_time(&self.signals)
    }

    /// True if the shard is to be read at this look. One at ease that waits is left alone at every
    /// other late look: a read is some system calls, which take as long as the wake-up.
    fn is_to_be_read(&self, now: Time, state: State) -> bool {
        !(matches!(state, State::Waits(_)) && self.is_at_ease() && now - self.looked < SELDOM)
    }

    /// True if the thread's times are to be read. A shard that was found in its wait is not
    /// saturated: it is enough to know now and then how busy it is.
    fn needs_times(&self, now: Time, state: State) -> bool {
        let is_known = self.samples.back().is_some_and(|last| now - last.at < OVER);
        !is_known
            || matches!(state, State::Turn(_))
            || self.signals.busy >= SATURATED
            || self.stages.load() != Load::Calm
    }

    /// Reads what the kernel and the shard tell. True for each of two things that happened since
    /// the last time: queues lost many, and accepting was paused.
    fn read_queues(&mut self, now: Time, shard: usize, control: &ServerControl) -> (bool, bool) {
        let (mut lost, mut queue) = (0, 0.0f64);
        for of in control.queues().read_those_of(shard) {
            queue = queue.max(of.waiting as f64 / of.capacity.max(1) as f64);
            lost += of.lost.unwrap_or(0);
        }
        let watched =
            control.remotes()[shard].snapshot().map(|snapshot| snapshot.watched()).unwrap_or_default();
        let paused = Some(watched.accept_paused);
        self.queue = queue;
        self.connections = watched.connections;
        self.is_paused = watched.is_paused;
        self.held = watched.held_bytes as f64 / control.held_bytes_max().max(1) as f64;
        let was_paused = self.paused.zip(paused).is_some_and(|(before, now)| now > before);
        self.paused = paused;
        (self.losses.take(now, lost), was_paused)
    }

    fn keep(&mut self, sample: Sample) {
        if self.samples.back().is_some_and(|last| sample.at - last.at > GAP) {
            self.samples.clear();
        }
        self.samples.push_back(sample);
        while self.samples.get(1).is_some_and(|second| sample.at - second.at >= OVER) {
            self.samples.pop_front();
        }
    }

    /// The activity of the shard over the last 100 ms; `None` if that is not known.
    fn over(&self) -> Option<Did> {
        let (first, last) = (self.samples.front()?, self.samples.back()?);
        let wall = last.at - first.at;
        if wall < OVER {
            return None;
        }
        let ran = last.times.ran.saturating_sub(first.times.ran);
        let waited = last.times.waited.saturating_sub(first.times.waited);
        let part = |time: Duration| time.as_secs_f64() / wall.as_secs_f64();
        let turns = (last.turns - first.turns) as f64 / f64::from(<Shard>::WHOLE_TURN);
        // The two are stored one after the other, so one may be of a turn before.
        let asked = last.shedding.0.saturating_sub(first.shedding.0).max(1) as f64;
        let shed = (last.shedding.1.saturating_sub(first.shedding.1) as f64 / asked).min(1.0);
        Some(Did { busy: part(ran), starved: part(waited), turn: ran.div_f64(turns.max(1.0)), shed })
    }
}

/// True if a shard that shows this waits for its peers now and then.
fn has_time(signals: &Signals) -> bool {
    signals.busy < SATURATED && signals.excuse.is_none()
}

/// The activity of a shard over some time.
struct Did {
    /// The part of it that it was on a CPU, and the part that it waited for one.
    busy: f64,
    starved: f64,
    /// The mean time for which a whole turn was on a CPU.
    turn: Duration,
    /// The part of the frames for which a service was asked to shed.
    shed: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Time {
        Time::from_nanos(ms * 1_000_000)
    }

    fn sample(ms: u64, ran: u64, waited: u64, turns: u64) -> Sample {
        let times = ThreadTimes { ran: Duration::from_millis(ran), waited: Duration::from_millis(waited) };
        let parts = turns * u64::from(<Shard>::WHOLE_TURN);
        Sample { at: at(ms), times, turns: parts, shedding: (turns * 8, turns * 6) }
    }

    #[test]
    fn busy_time_and_turns_are_those_of_the_last_100_ms() {
        let mut followed = Followed::default();
        followed.keep(sample(1000, 0, 0, 0));
        assert!(followed.over().is_none());
        for n in 1..=20 {
            followed.keep(sample(1000 + n * 25, n * 20, n * 5, n * 10));
        }
        let did = followed.over().unwrap();
        assert!((did.busy - 0.8).abs() < 1e-9 && (did.starved - 0.2).abs() < 1e-9);
        assert_eq!((did.turn, did.shed), (Duration::from_millis(2), 0.75));
        assert_eq!(followed.samples.len(), 5);
        followed.keep(sample(9000, 400, 100, 200));
        assert!(followed.over().is_none(), "the watchdog rested");
    }

    #[test]
    fn server_is_full_where_no_shard_has_room() {
        let full = |shards, table| Whole::default().take(shards, 2, table);
        assert!(!full(0, 1.0) && !full(1, 0.97), "the other one accepts");
        assert!(full(2, 0.1), "descriptors are missing");
        assert!(full(1, 0.98), "no newcomer came to the other one yet");
        let mut whole = Whole::default();
        assert!(whole.take(2, 2, 1.0) && whole.take(1, 2, 0.5), "until a shard leaves");
    }

    #[test]
    fn single_packets_that_are_lost_refuse_nobody() {
        let mut losses = Losses::default();
        let mut total = 0;
        // Two a second, for a minute; and seven at once.
        for ms in (1000..60_000).step_by(500) {
            total += 1;
            assert!(!losses.take(at(ms), total) && !losses.take(at(ms + 100), total), "{ms}");
        }
        assert!(!losses.take(at(61_000), total + 7));
        assert!(losses.take(at(61_900), total + 8), "eight within a second");
        assert!(!losses.take(at(61_950), total + 8), "no more since");
        assert!(!losses.take(at(70_000), 0), "a drain closed the listeners");
    }

    #[test]
    fn times_of_a_shard_that_waits_are_read_seldom() {
        let mut followed = Followed::default();
        let (waits, works) = (State::Waits(at(1)), State::Turn(at(1)));
        assert!(followed.needs_times(at(1000), waits), "nothing is known yet");
        followed.keep(sample(1000, 0, 0, 0));
        assert!(!followed.needs_times(at(1099), waits));
        assert!(followed.needs_times(at(1100), waits) && followed.needs_times(at(1010), works));
        followed.signals.busy = 0.95;
        assert!(
            followed.needs_times(at(1010), waits),
            "it was saturated, and the look has to tell that it is no more"
        );
    }

    #[test]
    fn shard_at_ease_that_waits_is_read_at_every_other_late_look() {
        let (waits, works) = (State::Waits(at(1)), State::Turn(at(1)));
        let mut followed = Followed { looked: at(1000), ..Followed::default() };
        assert!(!followed.is_to_be_read(at(1100), waits) && followed.is_to_be_read(at(1200), waits));
        assert!(followed.is_to_be_read(at(1020), works));
        followed.signals.busy = 0.95;
        assert!(followed.is_to_be_read(at(1020), waits), "it was saturated");
        followed.signals = Signals { excuse: Some(Excuse::Starved), ..Signals::default() };
        assert!(followed.is_to_be_read(at(1020), waits), "others have its CPU");
    }

    #[test]
    fn shard_that_is_in_one_turn_has_a_long_one() {
        let mut followed = Followed::default();
        for n in 0..=4 {
            followed.keep(sample(1000 + n * 25, n * 25, 0, 7));
        }
        assert_eq!(followed.over().unwrap().turn, Duration::from_millis(100));
    }
}
