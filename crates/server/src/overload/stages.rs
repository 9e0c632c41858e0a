//! The stages of a shard's load, as a function of its signals and the time.

use std::fmt;
use std::time::Duration;

use ringserve_core::Time;

use super::share::{NEGLIGIBLE, Share};
use super::{Load, LoadReport, Overload};

/// The interval at which the share of frames is set.
const SHARE_EACH: Duration = Duration::from_millis(100);

/// The time for which a shard goes on without a wait before it counts as busy.
const BUSY_AFTER: Duration = Duration::from_millis(100);

/// The time for which turns are long before they count.
const LATE_AFTER: Duration = Duration::from_millis(100);

/// From this part of what connections may hold on requests are shed.
const HELD_SHED: f64 = 0.8;

/// Refusing new connections ends at this part of the thresholds at which it begins.
const REFUSES_TO: f64 = 0.95;

/// A stage is left at this part of the thresholds at which it is entered.
const LEAVES_AT: f64 = 0.8;

/// Turns that are paced take this part of the length from which on they are long: by chance some
/// are half as long again.
const PACED_AT: f64 = 0.75;

/// A table that is as full as this keeps the stage of a paused accept: a slot that is free for a
/// moment ends no pause.
pub(crate) const TABLE_FULL: f64 = 0.98;

/// The state of a shard at a moment. Shares are parts of one.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Signals {
    /// The time for which it has not waited.
    pub saturated: Duration,
    /// The time for which each of its turns has been long.
    pub late: Duration,
    /// The part of the last 100 ms in which it was on a CPU.
    pub busy: f64,
    /// The part of the frames of that time for which a service was asked to shed.
    pub shed: f64,
    /// The part of its accept queue that is in use: of the fullest of its listeners.
    pub queue: f64,
    /// True if its queues lost some since the last look, and many within a second.
    pub lost: bool,
    /// The part of the memory limit that its connections hold.
    pub held: f64,
    /// The part of its table that is in use.
    pub table: f64,
    /// True if accepting is paused, or was since the last look.
    pub paused: bool,
    pub excuse: Option<Excuse>,
}

/// Why the signals of a shard are none of overload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Excuse {
    /// It ends its connections.
    Drains,
    /// It is stalled: no request that it sheds would help, and it would not notice the order.
    Stalled,
    /// Other threads have its CPU.
    Starved,
}

/// Why a stage was entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The signals fell.
    Calm,
    Saturated,
    Late,
    Queue,
    Lost,
    Memory,
    Table,
    Paused,
}

impl Cause {
    pub(crate) const ALL: [Cause; 8] = [
        Cause::Calm,
        Cause::Saturated,
        Cause::Late,
        Cause::Queue,
        Cause::Lost,
        Cause::Memory,
        Cause::Table,
        Cause::Paused,
    ];

    /// The name in metrics.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Cause::Calm => "calm",
            Cause::Saturated => "saturated",
            Cause::Late => "late",
            Cause::Queue => "accept_queue",
            Cause::Lost => "lost",
            Cause::Memory => "memory",
            Cause::Table => "table",
            Cause::Paused => "accept_paused",
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Cause::Calm => "it keeps up again",
            Cause::Saturated => "it has not waited for more work for a while",
            Cause::Late => "it has not waited for a while, and its turns are long",
            Cause::Queue => "its accept queue fills",
            Cause::Lost => "its accept queue lost connections",
            Cause::Memory => "its connections hold much of `held_bytes_max`",
            Cause::Table => "its table of connections is nearly full",
            Cause::Paused => "it accepts no more",
        })
    }
}

/// A change of the stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    pub to: Load,
    pub cause: Cause,
}

/// The stage of one shard.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stages {
    load: Load,
    cause: Option<Cause>,
    /// For what connections hold.
    share: Share,
    share_set: Time,
    /// The part for which services were asked lately, for whatever reason.
    shed: f64,
    /// Frames are shed that make turns long.
    paces: bool,
    /// New connections are refused.
    refuses: bool,
    /// Since when the signals have been below the thresholds at which the stage is left.
    below_since: Option<Time>,
}

impl Stages {
    pub(crate) fn load(&self) -> Load {
        self.load
    }

    /// Why the shard is at its stage; `None` while it was never above calm.
    pub(crate) fn cause(&self) -> Option<Cause> {
        self.cause
    }

    /// The part of the frames for which services are asked to shed.
    pub(crate) fn share(&self) -> f64 {
        self.share.get().max(self.shed)
    }

    /// The orders to the shard in addition to its stage.
    pub(crate) fn told(&self, limits: &Overload) -> LoadReport {
        let turn = self.paces.then(|| limits.turn_max.mul_f64(PACED_AT));
        LoadReport { share: self.share.get(), turn, refuses: self.refuses() }
    }

    /// True while what leads to [`Load::Refusing`] holds, and not for as long as the stage lasts:
    /// refusing takes its cause away at once, and a server that refuses all for two seconds would
    /// then let all in.
    fn refuses(&self) -> bool {
        self.refuses
    }

    /// Takes what is known at `now`. A stage is entered at once, and left for the one below after
    /// [`Overload::calm_after`].
    pub(crate) fn step(&mut self, now: Time, signals: &Signals, limits: &Overload) -> Option<Change> {
        let (wanted, cause) = wanted(signals, limits, 1.0);
        let before = self.load;
        if wanted > self.load {
            (self.load, self.cause, self.below_since) = (wanted, Some(cause), None);
        } else if self.stays(signals, limits) {
            self.below_since = None;
        } else {
            let since = *self.below_since.get_or_insert(now);
            if now - since >= limits.calm_after {
                (self.load, self.below_since) = (self.load.below(), None);
                self.cause = Some(if self.load == Load::Calm { Cause::Calm } else { cause });
            }
        }
        let part = if self.refuses { REFUSES_TO } else { 1.0 };
        self.refuses = self::wanted(signals, limits, part).0 >= Load::Refusing;
        self.set_share(now, signals);
        (self.load != before).then(|| Change { to: self.load, cause: self.cause.unwrap_or(cause) })
    }

    fn stays(&self, signals: &Signals, limits: &Overload) -> bool {
        // A table that is neither full nor empty keeps no other stage than that which it led to.
        let table = if self.load < Load::Refusing { 0.0 } else { signals.table };
        let signals = &Signals { table, ..*signals };
        self.load == Load::Calm
            || wanted(signals, limits, LEAVES_AT).0 >= self.load
            || self.load == Load::Full
                && signals.table >= TABLE_FULL
                && signals.excuse != Some(Excuse::Drains)
            || self.load == Load::Shedding && signals.excuse.is_none() && self.share() > NEGLIGIBLE
    }

    fn set_share(&mut self, now: Time, signals: &Signals) {
        if self.load < Load::Shedding || signals.excuse == Some(Excuse::Drains) {
            (self.paces, self.shed) = (false, 0.0);
            return self.share.end();
        }
        // A shard that is kept from its work for a moment is asked for no less behind it.
        if signals.excuse.is_some() {
            return;
        }
        self.shed = signals.shed;
        self.paces = !signals.late.is_zero() || self.paces && self.shed > NEGLIGIBLE;
        if self.share_set == Time::ZERO || now - self.share_set >= SHARE_EACH {
            self.share_set = now;
            self.share.step(signals.held >= HELD_SHED, signals.busy);
        }
    }
}

/// The stage that the signals ask for at this part of all thresholds.
fn wanted(signals: &Signals, limits: &Overload, part: f64) -> (Load, Cause) {
    let Signals { saturated, late, queue, lost, held, table, paused, excuse, .. } = *signals;
    let over = |value: f64, threshold: f64| value >= threshold * part;
    let lasts = |time: Duration, threshold: Duration| time >= threshold.mul_f64(part);
    if excuse == Some(Excuse::Drains) {
        return (Load::Calm, Cause::Calm);
    }
    let is_blocked = excuse.is_some();
    if paused {
        (Load::Full, Cause::Paused)
    } else if over(held, 0.9) {
        (Load::Refusing, Cause::Memory)
    } else if over(table, TABLE_FULL) {
        (Load::Refusing, Cause::Table)
    } else if lost {
        (Load::Refusing, Cause::Lost)
    } else if over(queue, 0.8) {
        (Load::Refusing, Cause::Queue)
    } else if over(held, HELD_SHED) {
        (Load::Shedding, Cause::Memory)
    } else if lasts(saturated, limits.shed_after) && lasts(late, LATE_AFTER) && !is_blocked {
        (Load::Shedding, Cause::Late)
    } else if over(held, 0.7) {
        (Load::Busy, Cause::Memory)
    } else if over(queue, 0.5) {
        (Load::Busy, Cause::Queue)
    } else if lasts(saturated, BUSY_AFTER) && !is_blocked {
        (Load::Busy, Cause::Saturated)
    } else {
        (Load::Calm, Cause::Calm)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::overload::pace::{Law, Orders, Turn};

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn at(ms: u64) -> Time {
        Time::from_nanos((ms + 1) * 1_000_000)
    }

    const CALM: Signals = Signals {
        saturated: Duration::ZERO,
        late: Duration::ZERO,
        busy: 0.1,
        shed: 0.0,
        queue: 0.0,
        lost: false,
        held: 0.0,
        table: 0.1,
        paused: false,
        excuse: None,
    };

    #[test]
    fn each_signal_leads_to_its_stage() {
        let late = Signals { saturated: ms(500), late: ms(100), ..CALM };
        let excused = |excuse| Signals { excuse: Some(excuse), ..late };
        for (signals, load, cause) in [
            (CALM, Load::Calm, Cause::Calm),
            (Signals { saturated: ms(99), ..CALM }, Load::Calm, Cause::Calm),
            (Signals { saturated: ms(100), ..CALM }, Load::Busy, Cause::Saturated),
            // Clients that wait for their answers keep a shard busy all the time, at short turns.
            (Signals { saturated: ms(60_000), late: ms(99), ..CALM }, Load::Busy, Cause::Saturated),
            (Signals { saturated: ms(499), late: ms(400), ..CALM }, Load::Busy, Cause::Saturated),
            (late, Load::Shedding, Cause::Late),
            (excused(Excuse::Stalled), Load::Calm, Cause::Calm),
            (excused(Excuse::Starved), Load::Calm, Cause::Calm),
            (excused(Excuse::Drains), Load::Calm, Cause::Calm),
            (Signals { queue: 0.49, ..CALM }, Load::Calm, Cause::Calm),
            (Signals { queue: 0.5, ..CALM }, Load::Busy, Cause::Queue),
            (Signals { queue: 0.8, ..late }, Load::Refusing, Cause::Queue),
            (Signals { queue: 0.8, excuse: Some(Excuse::Stalled), ..CALM }, Load::Refusing, Cause::Queue),
            (Signals { queue: 0.8, excuse: Some(Excuse::Drains), ..CALM }, Load::Calm, Cause::Calm),
            (Signals { lost: true, ..CALM }, Load::Refusing, Cause::Lost),
            (Signals { held: 0.7, ..CALM }, Load::Busy, Cause::Memory),
            (Signals { held: 0.8, ..CALM }, Load::Shedding, Cause::Memory),
            (Signals { held: 0.9, ..CALM }, Load::Refusing, Cause::Memory),
            (Signals { table: 0.97, ..CALM }, Load::Calm, Cause::Calm),
            (Signals { table: 0.98, ..CALM }, Load::Refusing, Cause::Table),
            (Signals { table: 1.0, paused: true, ..CALM }, Load::Full, Cause::Paused),
        ] {
            let mut stages = Stages::default();
            let change = stages.step(at(0), &signals, &Overload::default());
            let expected = (load != Load::Calm).then_some(Change { to: load, cause });
            assert_eq!((stages.load(), change), (load, expected), "{signals:?}");
        }
    }

    #[test]
    fn stage_is_left_one_by_one_after_two_seconds_below() {
        let (mut stages, limits) = (Stages::default(), Overload::default());
        stages.step(at(0), &Signals { paused: true, ..CALM }, &limits);
        let mut changes = Vec::new();
        for ms in (0..20_000).step_by(25) {
            if let Some(change) = stages.step(at(ms), &CALM, &limits) {
                changes.push((ms, change.to));
            }
        }
        let left = [Load::Refusing, Load::Shedding, Load::Busy, Load::Calm];
        assert_eq!(changes.iter().map(|(_, to)| *to).collect::<Vec<_>>(), left);
        assert!(changes.windows(2).all(|pair| pair[1].0 - pair[0].0 >= 2000), "{changes:?}");
        assert!(changes[3].0 <= 8500, "{changes:?}");
    }

    #[test]
    fn half_full_table_keeps_no_stage_that_it_did_not_lead_to() {
        let limits = Overload::default();
        let idle = Signals { table: 0.9, ..CALM };
        let busy = Signals { saturated: ms(60_000), late: ms(1000), busy: 1.0, ..idle };
        let mut stages = Stages::default();
        for ms in (0..2000).step_by(25) {
            stages.step(at(ms), &busy, &limits);
        }
        assert_eq!(stages.load(), Load::Shedding);
        for ms in (2000..10_000).step_by(25) {
            stages.step(at(ms), &idle, &limits);
        }
        assert_eq!(stages.load(), Load::Calm);
        stages.step(at(10_000), &Signals { table: 0.98, ..CALM }, &limits);
        for ms in (10_000..20_000).step_by(25) {
            stages.step(at(ms), &idle, &limits);
        }
        assert_eq!(stages.load(), Load::Refusing, "above 80 % of its threshold");
    }

    #[test]
    fn full_table_keeps_its_stage_while_single_slots_come_and_go() {
        let limits = Overload::default();
        let mut stages = Stages::default();
        let mut changes = Vec::new();
        // A slot is freed and taken again each second: accepting pauses for a moment each time.
        for ms in (0..30_000).step_by(25) {
            let paused = ms % 3000 < 50;
            let signals = Signals { table: if paused { 1.0 } else { 0.99 }, paused, ..CALM };
            changes.extend(stages.step(at(ms), &signals, &limits));
        }
        assert_eq!(changes, [Change { to: Load::Full, cause: Cause::Paused }]);
        // No table, as where descriptors are missing: it holds for as long as the pause, and two
        // seconds.
        let mut stages = Stages::default();
        for ms in (0..10_000).step_by(25) {
            stages.step(at(ms), &Signals { paused: true, ..CALM }, &limits);
            assert_eq!(stages.load(), Load::Full);
        }
        let left = (10_000..20_000).step_by(25).find(|ms| stages.step(at(*ms), &CALM, &limits).is_some());
        assert!(left.is_some_and(|ms| (12_000..12_100).contains(&ms)), "{left:?}");
        // A drain ends all of them.
        let mut stages = Stages::default();
        stages.step(at(0), &Signals { table: 1.0, paused: true, ..CALM }, &limits);
        let drains = Signals { table: 1.0, paused: true, excuse: Some(Excuse::Drains), ..CALM };
        (0..9000).step_by(25).for_each(|ms| _ = stages.step(at(ms), &drains, &limits));
        assert_eq!(stages.load(), Load::Calm);
    }

    #[test]
    fn newcomers_are_refused_while_the_cause_holds() {
        let (mut stages, limits) = (Stages::default(), Overload::default());
        let mut at_ms = 0;
        let mut refuses = |signals: Signals| {
            at_ms += 25;
            stages.step(at(at_ms), &signals, &limits);
            (stages.refuses(), stages.load())
        };
        for (table, expected) in [(0.97, false), (0.98, true), (0.94, true), (0.93, false), (0.97, false)] {
            assert_eq!(refuses(Signals { table, ..CALM }).0, expected, "{table}");
        }
        // The stage lasts, and its new connections are let in.
        assert_eq!(refuses(Signals { lost: true, ..CALM }), (true, Load::Refusing));
        assert_eq!(refuses(CALM), (false, Load::Refusing));
        assert!(refuses(Signals { queue: 0.8, ..CALM }).0 && refuses(Signals { queue: 0.77, ..CALM }).0);
        assert!(!refuses(Signals { queue: 0.75, ..CALM }).0);
        let drains = Some(Excuse::Drains);
        assert!(!refuses(Signals { table: 1.0, held: 1.0, excuse: drains, ..CALM }).0);
    }

    #[test]
    fn memory_that_fills_has_requests_shed() {
        let (mut stages, limits) = (Stages::default(), Overload::default());
        for ms in (0..1000).step_by(25) {
            stages.step(at(ms), &Signals { held: 0.85, ..CALM }, &limits);
        }
        assert!(stages.share() > 0.3, "{}", stages.share());
    }

    #[test]
    fn signal_between_both_thresholds_keeps_the_stage() {
        let (mut stages, limits) = (Stages::default(), Overload::default());
        stages.step(at(0), &Signals { queue: 0.5, ..CALM }, &limits);
        for ms in (0..20_000).step_by(25) {
            assert_eq!(stages.step(at(ms), &Signals { queue: 0.41, ..CALM }, &limits), None);
        }
        // A moment above the threshold begins the two seconds once more.
        for ms in (20_000..21_900).step_by(25) {
            stages.step(at(ms), &CALM, &limits);
        }
        stages.step(at(21_925), &Signals { queue: 0.41, ..CALM }, &limits);
        for ms in (21_950..23_900).step_by(25) {
            assert_eq!(stages.step(at(ms), &CALM, &limits), None);
        }
        assert_eq!(stages.load(), Load::Busy);
    }

    #[test]
    fn moment_without_a_cpu_does_not_end_the_shedding() {
        let limits = Overload::default();
        let late = Signals { saturated: ms(60_000), late: ms(1000), busy: 1.0, ..CALM };
        let shedding = Signals { late: Duration::ZERO, shed: 0.8, ..late };
        for (excuse, goes_on) in [(Excuse::Starved, true), (Excuse::Stalled, true), (Excuse::Drains, false)] {
            let mut stages = Stages::default();
            stages.step(at(0), &late, &limits);
            stages.step(at(25), &shedding, &limits);
            stages.step(at(50), &Signals { shed: 0.0, excuse: Some(excuse), ..CALM }, &limits);
            let told = stages.told(&limits);
            assert_eq!((told.turn.is_some(), stages.share() > 0.5), (goes_on, goes_on), "{excuse:?}");
        }
        // Nothing was shed for a while, and turns are short.
        let mut stages = Stages::default();
        stages.step(at(0), &late, &limits);
        assert_eq!(stages.told(&limits).turn, Some(ms(3)));
        stages.step(at(25), &Signals { shed: 0.01, ..CALM }, &limits);
        assert_eq!((stages.told(&limits).turn, stages.load()), (None, Load::Shedding));
    }

    /// A shard that can serve 5000 requests a second and takes what came in each turn, as far as it
    /// is not shed. What is shed takes a fiftieth of the time.
    struct Model {
        stages: Stages,
        law: Law,
        turn: Turn,
        now: f64,
        queued: f64,
        saturated_since: f64,
        late_since: Option<f64>,
        served: f64,
        /// The time that the served frames of each turn waited until its end, where they came in
        /// the middle of the one before, and their number.
        waits: Vec<(f64, f64)>,
        changes: Vec<(f64, Load)>,
    }

    impl Model {
        const CALL: f64 = 0.000_2;

        fn new() -> Model {
            Model {
                stages: Stages::default(),
                law: Law::default(),
                turn: Turn::default(),
                now: 0.0,
                queued: 0.0,
                saturated_since: 0.0,
                late_since: None,
                served: 0.0,
                waits: Vec::new(),
                changes: Vec::new(),
            }
        }

        /// The longest wait of a served frame, without the longest hundredth of them.
        fn p99(&mut self) -> f64 {
            self.waits.sort_by(|a, b| b.0.total_cmp(&a.0));
            let mut left = self.waits.iter().map(|(_, served)| served).sum::<f64>() / 100.0;
            let beyond = |(_, served): &&(f64, f64)| {
                left -= served;
                left < 0.0
            };
            self.waits.iter().find(beyond).map_or(0.0, |(wait, _)| *wait)
        }

        fn run(&mut self, until: f64, rate: f64) {
            let (mut looked, mut spans) = (self.now, VecDeque::new());
            while self.now < until {
                let told = self.stages.told(&Overload::default());
                let orders = match told.turn {
                    Some(aim) => self.law.step(aim, self.turn),
                    None => {
                        self.law = Law::default();
                        Orders { share: told.share, serves_max: f64::INFINITY }
                    }
                };
                let frames = self.queued.min(4096.0);
                self.queued -= frames;
                let shed = (frames * orders.share).max(frames - orders.serves_max);
                let served = frames - shed;
                let turn = (served * Self::CALL + shed * Self::CALL / 50.0).max(0.000_01);
                let counted = |frames: f64| frames.round() as u32;
                let (took, asked) = (Duration::from_secs_f64(turn), counted(frames));
                self.turn = Turn { took, wall: took, asked, drawn: counted(shed), shed: counted(shed) };
                self.served += served;
                self.waits.push((turn * (1.5 + self.queued / frames.max(1.0)), served));
                let late = turn > Overload::default().turn_max.as_secs_f64();
                self.late_since = if late { self.late_since.or(Some(self.now)) } else { None };
                let idle = if self.queued + turn * rate < 1.0 { 1.0 / rate.max(1.0) } else { 0.0 };
                if idle > 0.0 {
                    self.saturated_since = self.now + turn + idle;
                }
                self.now += turn + idle;
                self.turn.wall = Duration::from_secs_f64(turn + idle);
                spans.push_back((self.now, turn, turn + idle, frames, shed));
                // A peer that gets no answer sends no more than its connection takes.
                self.queued = (self.queued + (turn + idle) * rate).min(20_000.0);
                if self.now - looked >= 0.025 {
                    looked = self.now;
                    spans.retain(|(at, ..)| self.now - at < 0.1);
                    let since = |from: f64| Duration::from_secs_f64((self.now - from).max(0.0));
                    let signals = Signals {
                        saturated: since(self.saturated_since),
                        late: self.late_since.map_or(Duration::ZERO, since),
                        busy: spans.iter().map(|span| span.1).sum::<f64>()
                            / spans.iter().map(|span| span.2).sum::<f64>(),
                        shed: spans.iter().map(|span| span.4).sum::<f64>()
                            / spans.iter().map(|span| span.3).sum::<f64>().max(1.0),
                        ..CALM
                    };
                    let now = Time::from_nanos((self.now * 1e9) as u64 + 1);
                    if let Some(change) = self.stages.step(now, &signals, &Overload::default()) {
                        self.changes.push((self.now, change.to));
                    }
                }
            }
        }
    }

    #[test]
    fn four_times_too_much_is_served_at_nine_tenths_of_capacity() {
        let mut model = Model::new();
        model.run(5.0, 1000.0);
        assert_eq!(model.changes, [], "at a fifth of what it can do");
        model.run(10.0, 20_000.0);
        let (before, changes) = (model.served, model.changes.len());
        model.waits.clear();
        model.run(30.0, 20_000.0);
        let goodput = (model.served - before) / 20.0;
        assert!(goodput >= 4500.0, "{goodput} a second");
        let p99 = model.p99();
        assert!(p99 <= 0.006, "{p99} s");
        assert_eq!(model.changes.len(), changes, "{:?}", model.changes);
        assert_eq!(model.stages.load(), Load::Shedding);
        // After the storm.
        model.run(45.0, 1000.0);
        assert_eq!((model.stages.load(), model.stages.share()), (Load::Calm, 0.0));
        assert!(model.changes.last().unwrap().0 <= 37.0, "{:?}", model.changes);
    }

    #[test]
    fn storm_is_balanced_within_half_a_second_of_its_stage() {
        for times in [1.5, 4.0, 8.0] {
            let mut model = Model::new();
            model.run(1.0, 1000.0);
            let rate = times * 5000.0;
            while model.stages.load() < Load::Shedding {
                model.run(model.now + 0.005, rate);
            }
            assert!(model.now < 2.5, "{times}: shedding from {} s on", model.now);
            model.run(model.now + 0.5, rate);
            let (before, from) = (model.served, model.now);
            model.waits.clear();
            model.run(from + 1.0, rate);
            let goodput = (model.served - before) / (model.now - from);
            let p99 = model.p99();
            assert!(goodput >= 4200.0 && p99 <= 0.008, "{times}: {goodput} a second, {p99} s");
        }
    }

    proptest::proptest! {
        /// No stage is without a way out, and none is entered without a signal.
        #[test]
        fn any_signals_end_calm_after_the_storm(storm in proptest::collection::vec(
            (0u64..2000, 0u64..500, 0.0f64..1.0, 0.0f64..1.2, proptest::bool::weighted(0.05), 0.0f64..1.0,
             0.0f64..1.0, proptest::bool::weighted(0.05)), 1..400)) {
            let (mut stages, limits) = (Stages::default(), Overload::default());
            let mut now = 0;
            for (saturated, late, busy, queue, lost, held, table, paused) in storm {
                let excuse = None;
                let (saturated, late) = (ms(saturated), ms(late));
                let shed = busy;
                let signals = Signals { saturated, late, busy, shed, queue, lost, held, table, paused, excuse };
                stages.step(at(now), &signals, &limits);
                let (wanted, _) = wanted(&signals, &limits, 1.0);
                proptest::prop_assert!(stages.load() >= wanted);
                proptest::prop_assert!((0.0..=1.0).contains(&stages.share()));
                now += 25;
            }
            // The share for memory halves each 100 ms, and each of four stages takes 2 s.
            for _ in 0..(8000 + 1000) / 25 {
                stages.step(at(now), &CALM, &limits);
                now += 25;
            }
            proptest::prop_assert_eq!((stages.load(), stages.share()), (Load::Calm, 0.0));
        }
    }
}
