//! The judgement: from what looks find of shards to stalls. Without a clock, a thread or a file.

use std::time::Duration;

use ringserve_core::Time;

use super::facts::{KernelFunction, ThreadFacts};
use crate::stats::StallCause;
use crate::watch::options::StallOptions;
use crate::watch::state::State;

/// The longest tick of a scheduler: a thread's time is counted at ticks, and the slowest kernels
/// have one each 10 ms.
const TICK: Duration = Duration::from_millis(10);

/// The result of a look at a shard.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) state: State,
    /// Differs if the shard works on something else.
    pub(crate) work: u64,
    /// Only of a shard that [is asked about](Judge::asks), if the kernel tells.
    pub(crate) thread: Option<ThreadFacts>,
}

/// The stage of a stall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StallStage {
    Begins,
    Lasts,
    Ended,
}

/// A stall, as a look leaves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub(crate) stage: StallStage,
    pub(crate) since: Time,
    pub(crate) lasted: Duration,
    pub(crate) cause: StallCause,
    pub(crate) waits_in: Option<String>,
    pub(crate) several: bool,
    /// It is to be reported: it began, or is twice as long as in the last report.
    pub(crate) is_loud: bool,
}

/// Judges the shards of a server.
pub(crate) struct Judge {
    over: Duration,
    /// The process was stopped until then: what began before counts from there.
    went_on: Time,
    shards: Vec<Watched>,
}

/// The present turn of a shard, as far as it is known.
struct Watched {
    state: State,
    /// From when its time counts.
    since: Time,
    work: u64,
    several: bool,
    /// When its thread was looked at last, and what that did.
    known: Option<(Time, ThreadFacts)>,
    spent: [Duration; StallCause::ALL.len()],
    waits_in: Option<KernelFunction>,
    /// A stall that began is reported again from this length on.
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
            self.waits_in = sleeps.place;
        }
        self.known = Some((now, facts));
    }

    /// True if the look that finds this state has to know what the thread does.
    fn asks(&self, now: Time, state: State, late: Duration) -> bool {
        match state {
            State::Waits(_) => false,
            _ if self.state == state => true,
            State::Turn(began) => now - began >= late,
            State::Called(_) => false,
        }
    }

    /// The cause that took most of the time. `None` if that is not known yet.
    fn cause(&self) -> Option<StallCause> {
        let most = StallCause::ALL.into_iter().max_by_key(|cause| self.spent[cause.index()]);
        let spent = most.filter(|cause| !self.spent[cause.index()].is_zero());
        let sleeps = || self.known.as_ref()?.1.sleeps.as_ref().map(|sleeps| sleeps.cause);
        spent.or_else(sleeps)
    }

    fn verdict(&self, stage: StallStage, until: Time, is_loud: bool) -> Verdict {
        let cause = self.cause().unwrap_or(StallCause::Other);
        let is_asleep = !matches!(cause, StallCause::Cpu | StallCause::Starved);
        Verdict {
            stage,
            since: self.since,
            lasted: until - self.since,
            cause,
            waits_in: self.waits_in.filter(|_| is_asleep).map(|place| place.as_str().to_owned()),
            several: self.several,
            is_loud,
        }
    }
}

impl Judge {
    /// For `shards` of them; a turn is a stall from `over` on.
    pub(crate) fn new(shards: usize, over: Duration) -> Judge {
        let none = || Watched::new(State::Waits(Time::ZERO), Time::ZERO, 0);
        Judge { over, went_on: Time::ZERO, shards: (0..shards).map(|_| none()).collect() }
    }

    /// True if a look needs to know what the thread does: the shard is where it was at the look
    /// before, or in a turn that is not short.
    pub(crate) fn asks(&self, shard: usize, now: Time, state: State) -> bool {
        self.shards[shard].asks(now, state, StallOptions::late(self.over))
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
                State::Turn(began) => began.max(self.went_on).min(now),
                State::Waits(_) | State::Called(_) => now,
            };
            let before = std::mem::replace(watched, Watched::new(seen.state, since, seen.work));
            if before.told_from.is_some() {
                watched.known = seen.thread.map(|facts| (now, facts));
                return Some(before.verdict(StallStage::Ended, since.max(before.since), false));
            }
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
            Some(from) => (StallStage::Lasts, from),
            None if lasted < self.over => return None,
            // The next look knows what the thread did between both.
            None if tells && watched.cause().is_none() => return None,
            None => (StallStage::Begins, self.over),
        };
        let is_loud = lasted >= from;
        let mut next = from;
        while next <= lasted {
            next *= 2;
        }
        watched.told_from = Some(next);
        Some(watched.verdict(stage, now, is_loud))
    }

    /// The whole process was stopped for `time` until now: that was no handler's fault. What had
    /// begun counts from here; a stall that was reported goes on without that time.
    pub(crate) fn stopped(&mut self, now: Time, time: Duration) {
        self.went_on = now;
        for watched in &mut self.shards {
            watched.since = match watched.told_from {
                Some(_) => now.min(watched.since + time),
                None => now,
            };
            watched.known = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ringserve_base::thread_times::ThreadTimes;

    use super::super::facts::Sleeps;
    use super::*;

    const OVER: Duration = Duration::from_millis(25);

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// A moment, in milliseconds.
    fn at(millis: u64) -> Time {
        Time::from_nanos(millis * 1_000_000)
    }

    /// A thread that ran and waited for this many milliseconds, and computes.
    fn computes(ran: u64, waited: u64) -> ThreadFacts {
        ThreadFacts { times: ThreadTimes { ran: ms(ran), waited: ms(waited) }, sleeps: None }
    }

    fn sleeps(ran: u64, cause: StallCause, place: &str) -> ThreadFacts {
        ThreadFacts {
            sleeps: Some(Sleeps { cause, place: Some(KernelFunction::new(place)), polls: false }),
            ..computes(ran, 0)
        }
    }

    fn seen(state: State, thread: ThreadFacts) -> Seen {
        Seen { state, work: 7, thread: Some(thread) }
    }

    /// Looks of a shard that is in the turn of 100 ms, at these moments with these facts. The last
    /// verdict.
    fn judged(looks: &[(u64, ThreadFacts)]) -> Option<Verdict> {
        let (mut judge, turn) = (Judge::new(1, OVER), State::Turn(at(100)));
        let mut last = None;
        for (now, facts) in looks {
            let thread = judge.asks(0, at(*now), turn).then(|| facts.clone());
            last = judge.look(0, at(*now), Seen { thread, ..seen(turn, facts.clone()) });
        }
        last
    }

    #[test]
    fn cause_is_what_most_of_the_time_went_by_with() {
        use StallCause::{Cpu, Lock, Read, Sleep, Starved};
        let asleep = |cause, place| sleeps(3, cause, place);
        for (what, looks, cause, place) in [
            ("it computes", vec![(112, computes(3, 0)), (125, computes(15, 0))], Cpu, None),
            ("ticks are counted late", vec![(112, computes(3, 0)), (125, computes(7, 0))], Cpu, None),
            ("nothing is counted yet", vec![(116, computes(3, 0)), (125, computes(3, 0))], Cpu, None),
            ("others have its CPU", vec![(112, computes(3, 0)), (125, computes(5, 9))], Starved, None),
            (
                "it waits for a CPU for long",
                vec![(112, computes(3, 0)), (140, computes(3, 0))],
                Starved,
                None,
            ),
            (
                "it computed a little",
                vec![(112, computes(3, 0)), (125, sleeps(5, Lock, "futex"))],
                Lock,
                Some("futex"),
            ),
            (
                "it waits",
                vec![(112, asleep(Lock, "futex")), (125, asleep(Lock, "futex"))],
                Lock,
                Some("futex"),
            ),
            ("it reads", vec![(112, asleep(Read, "pipe")), (125, asleep(Read, "pipe"))], Read, Some("pipe")),
            (
                "it sleeps",
                vec![(112, asleep(Sleep, "nano")), (125, asleep(Sleep, "nano"))],
                Sleep,
                Some("nano"),
            ),
            (
                "one look is enough",
                vec![(112, computes(3, 0)), (112, asleep(Sleep, "nano")), (160, asleep(Read, "pipe"))],
                Read,
                Some("pipe"),
            ),
            ("it just woke", vec![(112, asleep(Sleep, "nano")), (125, computes(3, 0))], Sleep, Some("nano")),
        ] {
            // The first look finds the turn, and knows nothing of the thread.
            let looks: Vec<_> = [(101, computes(0, 0))].into_iter().chain(looks).collect();
            let verdict = judged(&looks).unwrap_or_else(|| panic!("{what}: a stall"));
            assert_eq!((verdict.stage, verdict.cause), (StallStage::Begins, cause), "{what}");
            assert_eq!((verdict.waits_in.as_deref(), verdict.since), (place, at(100)), "{what}");
        }
    }

    #[test]
    fn turn_below_the_threshold_is_no_stall() {
        assert_eq!(judged(&[(101, computes(0, 0)), (113, computes(12, 0)), (124, computes(23, 0))]), None);
        // Seen late, and not known yet to compute: the next look tells.
        assert_eq!(judged(&[(101, computes(0, 0)), (130, computes(12, 0))]), None);
        let verdict =
            judged(&[(101, computes(0, 0)), (130, computes(12, 0)), (142, computes(24, 0))]).unwrap();
        assert_eq!((verdict.lasted, verdict.cause), (ms(42), StallCause::Cpu));
    }

    #[test]
    fn turn_that_is_found_late_is_told_by_the_next_look() {
        let (mut judge, turn) = (Judge::new(1, OVER), State::Turn(at(100)));
        assert!(!judge.asks(0, at(102), turn), "most turns are as short");
        assert!(judge.asks(0, at(103), turn));
        assert!(!judge.asks(0, at(103), State::Waits(at(100))));
        assert_eq!(judge.look(0, at(131), seen(turn, computes(30, 0))), None);
        let verdict = judge.look(0, at(143), seen(turn, computes(42, 0))).expect("a stall");
        assert_eq!((verdict.since, verdict.lasted, verdict.cause), (at(100), ms(43), StallCause::Cpu));
        // Of a thread that sleeps one look finds the cause, but the end of the stall before is
        // reported first.
        let next = |began| seen(State::Turn(at(began)), sleeps(42, StallCause::Lock, "futex"));
        let ended = judge.look(0, at(180), next(150)).expect("the first stall is over");
        assert_eq!((ended.stage, ended.since), (StallStage::Ended, at(100)));
        let second = judge.look(0, at(192), next(150)).expect("the second stall");
        assert_eq!((second.stage, second.lasted), (StallStage::Begins, ms(42)));
        assert_eq!(judge.look(0, at(200), next(198)).expect("it is over").stage, StallStage::Ended);
        let at_once = judge.look(0, at(240), next(210)).expect("a stall");
        assert_eq!((at_once.since, at_once.lasted, at_once.cause), (at(210), ms(30), StallCause::Lock));
    }

    #[test]
    fn stall_is_told_where_the_kernel_shows_nothing() {
        let mut judge = Judge::new(1, OVER);
        let dark = || Seen { state: State::Turn(at(100)), work: 7, thread: None };
        assert_eq!(judge.look(0, at(101), dark()), None);
        let verdict = judge.look(0, at(126), dark()).expect("a stall");
        assert_eq!(
            (verdict.stage, verdict.cause, verdict.is_loud),
            (StallStage::Begins, StallCause::Other, true)
        );
    }

    #[test]
    fn stall_is_told_again_when_it_is_twice_as_long() {
        let (mut judge, turn) = (Judge::new(1, OVER), State::Turn(at(0)));
        let loud = (0..100).map(|look| look * 12).filter(|now| {
            let verdict = judge.look(0, at(*now), seen(turn, sleeps(0, StallCause::Lock, "futex")));
            verdict.is_some_and(|verdict| verdict.is_loud)
        });
        assert_eq!(loud.collect::<Vec<_>>(), [36, 60, 108, 204, 408, 804]);
    }

    #[test]
    fn stall_ends_with_its_turn_and_counts_once() {
        let (mut judge, asleep) = (Judge::new(2, OVER), || sleeps(0, StallCause::Read, "pipe"));
        let mut stages = Vec::new();
        let looks = [(State::Turn(at(10)), 12), (State::Turn(at(10)), 24), (State::Turn(at(10)), 36)]
            .into_iter()
            .chain([
                (State::Turn(at(10)), 48),
                (State::Turn(at(55)), 60),
                (State::Waits(at(55)), 72),
                (State::Waits(at(55)), 84),
            ]);
        for (state, now) in looks {
            let verdict = judge.look(0, at(now), seen(state, asleep()));
            stages.extend(verdict.map(|verdict| (verdict.stage, verdict.lasted)));
            assert_eq!(judge.look(1, at(now), seen(State::Waits(at(3)), asleep())), None, "the other shard");
        }
        assert_eq!(
            stages,
            [(StallStage::Begins, ms(26)), (StallStage::Lasts, ms(38)), (StallStage::Ended, ms(45))]
        );
    }

    #[test]
    fn shard_that_is_called_counts_from_the_look_that_saw_it() {
        let (mut judge, called) = (Judge::new(1, OVER), State::Called(at(3)));
        let asleep = || seen(called, sleeps(0, StallCause::Sleep, "nano"));
        assert!(!judge.asks(0, at(5000), called));
        assert_eq!(judge.look(0, at(5000), asleep()), None, "it waits since long");
        assert!(judge.asks(0, at(5012), called));
        assert_eq!(judge.look(0, at(5012), asleep()), None);
        let verdict = judge.look(0, at(5025), asleep()).expect("a stall");
        assert_eq!((verdict.since, verdict.lasted), (at(5000), ms(25)));
    }

    #[test]
    fn process_that_was_stopped_has_no_stall() {
        let (mut judge, turn) = (Judge::new(1, OVER), State::Turn(at(100)));
        let look = |judge: &mut Judge, now| judge.look(0, at(now), seen(turn, computes(now, 0)));
        assert_eq!(look(&mut judge, 110), None);
        judge.stopped(at(9000), ms(8878));
        assert_eq!(look(&mut judge, 9000), None);
        assert_eq!(look(&mut judge, 9012), None);
        let verdict = look(&mut judge, 9025).expect("it goes on for long after that, too");
        assert_eq!((verdict.lasted, verdict.cause), (ms(25), StallCause::Cpu));
        judge.stopped(at(20_000), ms(10_000));
        let verdict = look(&mut judge, 20_012).expect("it goes on");
        assert_eq!(
            (verdict.stage, verdict.lasted),
            (StallStage::Lasts, ms(1012)),
            "without the time of the stop"
        );
        // A turn that no look saw before the stop.
        let mut judge = Judge::new(1, OVER);
        judge.stopped(at(9000), ms(8880));
        let asleep = || seen(turn, sleeps(9000, StallCause::Sleep, "nano"));
        assert_eq!((judge.look(0, at(9000), asleep()), judge.look(0, at(9012), asleep())), (None, None));
        assert_eq!(judge.look(0, at(9025), asleep()).expect("a stall").lasted, ms(25));
    }

    #[test]
    fn much_work_in_one_turn_is_said() {
        let mut judge = Judge::new(1, OVER);
        let several: Vec<_> = [(1, 1), (13, 1), (26, 1), (38, 2)]
            .map(|(now, work)| {
                judge.look(0, at(now), Seen { work, ..seen(State::Turn(at(0)), computes(now, 0)) })
            })
            .into_iter()
            .flatten()
            .map(|verdict| verdict.several)
            .collect();
        assert_eq!(several, [false, true]);
    }

    /// The life of a shard: turns that last, and waits after them, in milliseconds.
    fn life() -> impl Strategy<Value = Vec<(u64, u64)>> {
        let turn = prop_oneof![4 => 0..20u64, 1 => 20..40u64, 1 => 40..500u64];
        prop::collection::vec((turn, prop_oneof![Just(0), 1..60u64]), 1..40)
    }

    proptest! {
        /// Each turn that is long enough is reported once, in time, with its beginning and its end;
        /// and no other one is. Looks lie as far apart as the second of two intervals says, and as
        /// the first one after a look that asks what the thread does.
        #[test]
        fn long_turns_are_told_and_no_others(
            (first, life, every, seldom) in (1..50u64, life(), 6..13u64, 6..32u64),
        ) {
            let mut look_at = 0;
            let within = every + every.max(seldom);
            let mut turns = Vec::new();
            let mut time = first;
            for (length, wait) in life {
                turns.push((time, time + length));
                time += length + wait + 1;
            }
            let mut judge = Judge::new(1, OVER);
            let (mut told, mut open) = (Vec::new(), None);
            while look_at < time + 1000 {
                let now = look_at;
                let last = turns.iter().rev().find(|(begin, _)| *begin <= now);
                let state = match last {
                    None => State::Waits(Time::ZERO),
                    Some((begin, end)) if now <= *end => State::Turn(at(*begin)),
                    Some((begin, _)) => State::Waits(at(*begin)),
                };
                let thread = judge.asks(0, at(now), state).then(|| computes(now, 0));
                look_at += if thread.is_some() { every } else { seldom };
                let Some(verdict) = judge.look(0, at(now), Seen { state, work: 1, thread }) else { continue };
                let (begin, end) = *turns.iter().find(|(begin, _)| at(*begin) == verdict.since).expect("a turn");
                match verdict.stage {
                    StallStage::Begins => {
                        prop_assert_eq!(open.replace(begin), None);
                        prop_assert!(now <= end && now - begin >= 25);
                        prop_assert!(now - begin < 25 + 3 + within, "{} after it began", now - begin);
                        told.push(begin);
                    }
                    StallStage::Lasts => prop_assert_eq!(open, Some(begin)),
                    StallStage::Ended => {
                        prop_assert_eq!(open.take(), Some(begin));
                        let real = ms(end - begin);
                        prop_assert!(verdict.lasted >= real && verdict.lasted <= real + ms(60 + seldom));
                    }
                }
            }
            prop_assert_eq!(open, None);
            // From the first look that finds it late, which is 3 ms or more, one more is enough.
            let sure = turns.iter().filter(|(begin, end)| end - begin >= 25.max(3 + seldom) + every);
            let sure = sure.map(|(begin, _)| *begin);
            for begin in sure {
                prop_assert!(told.contains(&begin), "the turn of {} is told", begin);
            }
        }
    }
}
