//! The judgement: from what looks find of shards to stalls. Without a clock, a thread or a file.

use std::time::Duration;

use ringserve_core::Time;

use super::facts::ThreadFacts;
use super::stall::StallCause;

/// What a thread runs is counted at ticks of the scheduler, of which the slowest kernels have one each 10 ms.
const TICK: Duration = Duration::from_millis(10);

/// What a shard is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// It waits in its driver since its turn of then; or it has not begun, or has ended.
    Waits(Time),
    /// It is in the turn that began then, or on its way to the next one.
    Turn(Time),
    /// It was called and has not left its wait, which it began after the turn of then. Only for shards inside a runtime, whose tasks
    /// may keep it from running.
    Called(Time),
}

/// What a look found of a shard.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) state: State,
    /// Differs if the shard works on something else.
    pub(crate) work: u64,
    /// Only of a shard that [is asked about](Judge::asks), if the kernel tells.
    pub(crate) thread: Option<ThreadFacts>,
}

/// Where a stall is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Begins,
    Lasts,
    Ended,
}

/// A stall, as a look leaves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub(crate) stage: Stage,
    pub(crate) since: Time,
    pub(crate) lasted: Duration,
    pub(crate) cause: StallCause,
    pub(crate) waits_in: Option<String>,
    pub(crate) several: bool,
    /// It is to be told: it began, or is twice as long as when it was told last.
    pub(crate) is_loud: bool,
}

/// Judges the shards of a server.
pub(crate) struct Judge {
    over: Duration,
    shards: Vec<Watched>,
}

/// What is known of a shard's present turn.
struct Watched {
    state: State,
    /// From when its time counts.
    since: Time,
    work: u64,
    several: bool,
    /// When its thread was looked at last, and what that did.
    known: Option<(Time, ThreadFacts)>,
    spent: [Duration; StallCause::ALL.len()],
    waits_in: Option<String>,
    /// A stall that began is told again from this length on.
    told_from: Option<Duration>,
}

impl Watched {
    fn new(state: State, since: Time, work: u64) -> Watched {
        Watched {
            state,
            since,
            work,
            several: false,
            known: None,
            spent: Default::default(),
            waits_in: None,
            told_from: None,
        }
    }

    /// Takes in what the thread does, and did since the last look.
    fn spend(&mut self, now: Time, facts: ThreadFacts) {
        if let Some((at, before)) = &self.known {
            let wall = now - *at;
            let ran = facts.times.ran.saturating_sub(before.times.ran).min(wall);
            let waited = facts.times.waited.saturating_sub(before.times.waited).min(wall - ran);
            let rest = wall - ran - waited;
            let slept = facts.sleeps.as_ref().or(before.sleeps.as_ref());
            let rest_with = match slept {
                Some(sleeps) => sleeps.cause,
                // It runs or waits for a CPU, which is counted later.
                None if rest > TICK || waited > ran => StallCause::Starved,
                None => StallCause::Cpu,
            };
            for (cause, time) in [(StallCause::Cpu, ran), (StallCause::Starved, waited), (rest_with, rest)] {
                self.spent[cause.index()] += time;
            }
        }
        if let Some(sleeps) = &facts.sleeps {
            self.waits_in.clone_from(&sleeps.place);
        }
        self.known = Some((now, facts));
    }

    /// What most of the time went by with. `None` if that is not known yet.
    fn cause(&self) -> Option<StallCause> {
        let most = StallCause::ALL.into_iter().max_by_key(|cause| self.spent[cause.index()]);
        let spent = most.filter(|cause| !self.spent[cause.index()].is_zero());
        let sleeps = || self.known.as_ref()?.1.sleeps.as_ref().map(|sleeps| sleeps.cause);
        spent.or_else(sleeps)
    }

    fn verdict(&self, stage: Stage, until: Time, is_loud: bool) -> Verdict {
        let cause = self.cause().unwrap_or(StallCause::Other);
        let is_asleep = !matches!(cause, StallCause::Cpu | StallCause::Starved);
        Verdict {
            stage,
            since: self.since,
            lasted: until - self.since,
            cause,
            waits_in: self.waits_in.clone().filter(|_| is_asleep),
            several: self.several,
            is_loud,
        }
    }
}

impl Judge {
    /// For `shards` of them; a turn is a stall from `over` on.
    pub(crate) fn new(shards: usize, over: Duration) -> Judge {
        let none = || Watched::new(State::Waits(Time::ZERO), Time::ZERO, 0);
        Judge { over, shards: (0..shards).map(|_| none()).collect() }
    }

    /// True if a look needs to know what the thread does: the shard is where it was at the look before.
    pub(crate) fn asks(&self, shard: usize, state: State) -> bool {
        !matches!(state, State::Waits(_)) && self.shards[shard].state == state
    }

    /// True if the shard waits, and did not leave its wait since the look before.
    pub(crate) fn rests(&self, shard: usize, state: State) -> bool {
        matches!(state, State::Waits(_)) && self.shards[shard].state == state
    }

    /// Takes in what a look found. Returns the stall that begins, lasts or ended.
    pub(crate) fn look(&mut self, shard: usize, now: Time, seen: Seen) -> Option<Verdict> {
        let watched = &mut self.shards[shard];
        if watched.state != seen.state {
            let since = match seen.state {
                State::Turn(began) => began.min(now),
                State::Waits(_) | State::Called(_) => now,
            };
            let before = std::mem::replace(watched, Watched::new(seen.state, since, seen.work));
            before.told_from?;
            return Some(before.verdict(Stage::Ended, since.max(before.since), false));
        }
        if matches!(seen.state, State::Waits(_)) {
            return None;
        }
        watched.several |= watched.work != seen.work;
        watched.work = seen.work;
        let tells = seen.thread.is_some();
        if let Some(facts) = seen.thread {
            watched.spend(now, facts);
        }
        let lasted = now - watched.since;
        let (stage, from) = match watched.told_from {
            Some(from) => (Stage::Lasts, from),
            None if lasted < self.over => return None,
            // The next look knows what the thread did between both.
            None if tells && watched.cause().is_none() => return None,
            None => (Stage::Begins, self.over),
        };
        let is_loud = lasted >= from;
        let mut next = from;
        while next <= lasted {
            next *= 2;
        }
        watched.told_from = Some(next);
        Some(watched.verdict(stage, now, is_loud))
    }

    /// The whole process was stopped for `time` until now: that was no handler's fault. What had begun counts from here; a stall that
    /// was told goes on without that time.
    pub(crate) fn stopped(&mut self, now: Time, time: Duration) {
        for watched in &mut self.shards {
            watched.since = match watched.told_from {
                Some(_) => now.min(watched.since + time),
                None => now,
            };
            watched.known = None;
        }
    }
}
