//! Which frames a shard sheds while its turns are long: decided by the shard itself, once a turn.
//!
//! The frames that came in during one turn are the work of the next one. So a turn that took twice
//! as long as it should is followed by one that serves half of the part that keeps the balance, and
//! the queue is gone with that turn, whatever it was.

use std::cell::Cell;
use std::time::Duration;

use super::LoadNow;

/// Figures of the turns since the shard sheds: sums, of which each turn takes the same part.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Law {
    took: f64,
    wall: f64,
    asked: f64,
    served: f64,
    drawn: f64,
    shed: f64,
}

/// A turn that is over.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Turn {
    /// The time that the shard was on a CPU from the turn's beginning to that of the next one.
    pub took: Duration,
    /// The wall-clock time between the two.
    pub wall: Duration,
    /// The frames that might have been shed, those for which the service was asked, and those that
    /// it shed.
    pub asked: u32,
    pub drawn: u32,
    pub shed: u32,
}

/// The limits of the next turn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Orders {
    /// The service is asked for this part of the frames.
    pub share: f64,
    /// It is asked for each frame after this number of served ones.
    pub serves_max: f64,
}

/// The factor by which the figures fade each turn, an eighth: at the length that turns are to have,
/// half of them is of the last 20 ms, and of some 100 served frames of 200 µs.
const FADES: f64 = 7.0 / 8.0;

/// A part of frames that is served, and one that is shed of those for which a service is asked, is
/// taken as no smaller than this: from there a share is found within a few turns. Both are zero
/// where the service serves, or sheds, all.
const PART_MIN: f64 = 1.0 / 64.0;

/// A turn serves at most this many times what it is to serve: twice is more than chance makes of
/// it.
const TIMES_MAX: f64 = 2.0;

/// Turns are no shorter than a microsecond.
const TOOK_MIN: f64 = 1e-6;

impl Law {
    /// Takes in a turn, and tells what the next one does so that it takes `aim`.
    pub(crate) fn step(&mut self, aim: Duration, turn: Turn) -> Orders {
        let (aim, took) = (aim.as_secs_f64(), turn.took.as_secs_f64().max(TOOK_MIN));
        let fade = |sum: &mut f64, now: f64| *sum = *sum * FADES + now;
        fade(&mut self.took, took);
        fade(&mut self.wall, turn.wall.as_secs_f64().max(took));
        fade(&mut self.asked, turn.asked.into());
        fade(&mut self.served, turn.asked.saturating_sub(turn.shed).into());
        fade(&mut self.drawn, turn.drawn.into());
        fade(&mut self.shed, turn.shed.into());
        let part = |of: f64, all: f64| if all < PART_MIN { 1.0 } else { (of / all).max(PART_MIN) };
        // The part that it served in all of the time is what it can do, if turns take what they are
        // to take.
        let can = (part(self.served, self.asked) * self.wall / self.took).min(1.0);
        let serves = (can * aim / took).min(1.0);
        // A service that is asked for all, and serves some of them, sheds more of the others.
        let share = ((1.0 - serves) / part(self.shed, self.drawn)).min(1.0);
        let serves_max = match self.asked < PART_MIN {
            true => f64::INFINITY,
            false => (TIMES_MAX * aim * self.served / self.took).max(1.0),
        };
        Orders { share, serves_max }
    }
}

/// The same on a shard, whose streams and services count here what they ask.
#[derive(Debug)]
pub(crate) struct Pace {
    law: Cell<Law>,
    /// The time that the shard had been on a CPU when the turn began; `None` while it is not paced.
    began: Cell<Option<Duration>>,
    /// The wall-clock time from then to the beginning of the last turn.
    wall: Cell<Duration>,
    /// Of 2^24.
    share: Cell<u32>,
    serves_max: Cell<u32>,
    /// Of the turn.
    turn: Cell<Turn>,
    /// Nothing waits after what the turn brought.
    brings_all: Cell<bool>,
    /// Since the start: frames that might have been shed, and those for which a service was asked.
    asked: Cell<u64>,
    drawn: Cell<u64>,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace {
            law: Cell::default(),
            began: Cell::new(None),
            wall: Cell::default(),
            share: Cell::new(0),
            serves_max: Cell::new(u32::MAX),
            turn: Cell::default(),
            brings_all: Cell::new(true),
            asked: Cell::new(0),
            drawn: Cell::new(0),
        }
    }
}

impl Pace {
    /// A turn begins, `since` the one before it began, as the shard was on a CPU for `ran` in
    /// total. Turns are to take `aim`; `None` leaves their length alone. `brings_all` is false if
    /// more waits that the turn has no room for: the next one goes on with it, and counts as a part
    /// of this one.
    pub(crate) fn begin_turn(
        &self,
        aim: Option<Duration>,
        brings_all: bool,
        since: Duration,
        ran: impl FnOnce() -> Duration,
    ) {
        let goes_on = !self.brings_all.replace(brings_all);
        let Some(aim) = aim else {
            self.count(self.turn.take());
            return self.end();
        };
        let ran = ran();
        self.wall.set(self.wall.get() + since);
        // A shard whose turns begin to be of interest has not waited for a while.
        let took = self.began.get().map_or(since, |began| ran.saturating_sub(began));
        if goes_on && self.began.get().is_some() && took < aim.mul_f64(TIMES_MAX) {
            return;
        }
        self.began.set(Some(ran));
        let turn = self.turn.take();
        self.count(turn);
        let mut law = self.law.get();
        let orders = law.step(aim, Turn { took, wall: self.wall.take(), ..turn });
        self.law.set(law);
        self.share.set(LoadNow::share_of(orders.share));
        self.serves_max.set(orders.serves_max as u32);
    }

    fn count(&self, turn: Turn) {
        self.asked.set(self.asked.get() + u64::from(turn.asked));
        self.drawn.set(self.drawn.get() + u64::from(turn.drawn));
    }

    fn end(&self) {
        self.law.take();
        self.began.take();
        self.wall.take();
        self.share.set(0);
        self.serves_max.set(u32::MAX);
    }

    /// True if the service is asked to shed a frame, for the share of all random numbers.
    pub(crate) fn draws(&self, load: LoadNow, random: u64) -> bool {
        let mut turn = self.turn.get();
        let is_full = turn.asked - turn.shed >= self.serves_max.get();
        let drawn = is_full || load.takes(random, self.share.get());
        (turn.asked, turn.drawn) = (turn.asked + 1, turn.drawn + u32::from(drawn));
        self.turn.set(turn);
        drawn
    }

    /// The service did.
    pub(crate) fn note_shed(&self) {
        let turn = self.turn.get();
        self.turn.set(Turn { shed: (turn.shed + 1).min(turn.asked), ..turn });
    }

    /// Since the start: frames that might have been shed, and those for which a service was asked.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.asked.get(), self.drawn.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AIM: Duration = Duration::from_millis(4);

    /// The time of a call, and that of the message with which a frame is shed, in seconds.
    const CALL: f64 = 200e-6;
    const WORD: f64 = 4e-6;

    /// A shard that is asked for frames at a rate, of which a part is served in any case.
    struct Asked {
        law: Law,
        rate: f64,
        marked: f64,
        /// Parts of frames that were not counted yet: asked, drawn, shed.
        rest: [f64; 3],
    }

    impl Asked {
        fn new(rate: f64, marked: f64) -> Asked {
            Asked { law: Law::default(), rate, marked, rest: [0.0; 3] }
        }

        /// The turn after one: frames that came during that.
        fn next(&mut self, before: Turn) -> (Turn, Orders) {
            let orders = self.law.step(AIM, before);
            let frames = self.rate * before.took.as_secs_f64();
            let wanted = frames * orders.share * (1.0 - self.marked);
            // Behind the last one that it may serve all are asked for.
            let shed = wanted.max((frames - orders.serves_max).min(frames * (1.0 - self.marked)));
            let drawn = shed / (1.0 - self.marked);
            let took = (frames - shed) * CALL + shed * WORD + 20e-6;
            let took = Duration::from_secs_f64(took);
            let mut counted = [frames, drawn, shed];
            for (number, rest) in counted.iter_mut().zip(&mut self.rest) {
                let all = *number + *rest;
                (*number, *rest) = (all.floor(), all.fract());
            }
            let [asked, drawn, shed] = counted.map(|number| number as u32);
            (Turn { took, wall: took, asked, drawn, shed: shed.min(asked) }, orders)
        }
    }

    #[test]
    fn turns_are_as_long_as_they_should_be_within_200_ms() {
        for rate in [5500.0, 10_000.0, 20_000.0, 40_000.0] {
            // Of four times as many the marked ones alone, and the words to all others, are nearly
            // all that it can do.
            for marked in [0.0, 0.05, 0.1].into_iter().filter(|marked| rate * marked <= 2000.0) {
                for began in [1, 4, 20, 400, 800].map(Duration::from_millis) {
                    let mut asked = Asked::new(rate, marked);
                    let mut turn = Turn { took: began, ..Turn::default() };
                    let mut passed = Duration::ZERO;
                    while passed < Duration::from_millis(200) {
                        turn = asked.next(turn).0;
                        // What had gathered before is the work of one long turn.
                        passed += turn.took.min(AIM * 5);
                    }
                    for n in 0..100 {
                        turn = asked.next(turn).0;
                        let part = turn.took.as_secs_f64() / AIM.as_secs_f64();
                        assert!(
                            (0.5..1.5).contains(&part),
                            "{rate}/s, {marked}, {began:?}: {part} in turn {n}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn shard_that_can_do_what_it_is_asked_for_sheds_nothing() {
        for rate in [100.0, 2000.0, 4500.0] {
            let mut asked = Asked::new(rate, 0.0);
            let mut turn = Turn { took: AIM * 10, ..Turn::default() };
            for _ in 0..200 {
                turn = asked.next(turn).0;
            }
            assert_eq!(asked.next(turn).1.share, 0.0, "{rate}/s");
        }
    }

    #[test]
    fn share_is_found_again_after_the_rate_changed() {
        let mut asked = Asked::new(20_000.0, 0.1);
        let mut turn = Turn { took: AIM, ..Turn::default() };
        // Of the first one nothing is known.
        for _ in 0..8 {
            turn = asked.next(turn).0;
        }
        for rate in [20_000.0, 6000.0, 40_000.0, 10_000.0] {
            asked.rate = rate;
            for n in 0..40 {
                turn = asked.next(turn).0;
                assert!(turn.took <= AIM * 3, "{rate}/s: {:?} in turn {n}", turn.took);
            }
            assert!((AIM * 7 / 10..AIM * 14 / 10).contains(&turn.took), "{rate}/s: {:?}", turn.took);
        }
    }

    #[test]
    fn shard_that_had_time_left_can_do_more() {
        let orders = |wall: Duration| {
            let mut law = Law::default();
            let turn = Turn { took: AIM, wall, asked: 100, drawn: 90, shed: 90 };
            (0..20).map(|_| law.step(AIM, turn).share).last()
        };
        let near = |share: Option<f64>, of: f64| share.is_some_and(|share| (share - of).abs() < 1e-6);
        assert!(near(orders(AIM), 0.9) && near(orders(AIM * 4), 0.6) && near(orders(AIM * 20), 0.0));
    }

    #[test]
    fn service_that_serves_or_sheds_all_gets_a_share_all_the_same() {
        for shed in [0, 100] {
            let mut law = Law::default();
            for _ in 0..100 {
                let orders =
                    law.step(AIM, Turn { took: AIM * 2, wall: AIM * 2, asked: 100, drawn: 100, shed });
                assert!((0.0..=1.0).contains(&orders.share) && orders.serves_max >= 1.0, "{orders:?}");
            }
            // As soon as it has time.
            let orders =
                (0..40).map(|_| law.step(AIM, Turn { took: AIM / 200, asked: 1, ..Turn::default() }));
            assert_eq!(orders.last().map(|orders| orders.share), Some(0.0));
        }
    }

    fn paced(shares: f64) -> LoadNow {
        let shared = crate::overload::SharedLoad::default();
        let told = crate::overload::LoadReport { share: shares, turn: Some(AIM), refuses: false };
        shared.set(crate::overload::Load::Shedding, told);
        shared.get()
    }

    /// A turn of a shard that has this number of frames, and sheds all for which it is asked. The
    /// number that it served.
    fn serve(pace: &Pace, load: LoadNow, frames: u64) -> u64 {
        let served = (0..frames).filter(|n| {
            let drawn = pace.draws(load, n.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20);
            if drawn {
                pace.note_shed();
            }
            !drawn
        });
        served.count() as u64
    }

    #[test]
    fn turn_of_ten_times_as_many_frames_as_foreseen_is_bounded() {
        let (pace, load) = (Pace::default(), paced(0.0));
        let mut ran = Duration::ZERO;
        for _ in 0..100 {
            pace.begin_turn(Some(AIM), true, AIM, || ran);
            ran += Duration::from_secs_f64(serve(&pace, load, 80) as f64 * CALL);
        }
        pace.begin_turn(Some(AIM), true, AIM, || ran);
        let served = serve(&pace, load, 800);
        assert!((20..=41).contains(&served), "{served} of 200 us each");
    }

    #[test]
    fn turn_that_brings_no_more_than_it_has_room_for_goes_on() {
        let (pace, load) = (Pace::default(), paced(0.0));
        let ms = Duration::from_millis;
        pace.begin_turn(Some(AIM), false, AIM, || ms(0));
        serve(&pace, load, 100);
        // It is as long as both are, and the next one gets that time.
        pace.begin_turn(Some(AIM), true, AIM, || ms(3));
        assert_eq!(pace.counts(), (0, 0));
        serve(&pace, load, 60);
        pace.begin_turn(Some(AIM), true, AIM, || ms(6));
        assert_eq!((pace.counts().0, pace.share.get()), (160, LoadNow::share_of(1.0 / 3.0)));
        // No longer than twice what a turn is to take, as where it never ends.
        for n in 0..8 {
            pace.begin_turn(Some(AIM), false, AIM, || ms(6 + 4 * n));
            serve(&pace, load, 10);
        }
        assert!(pace.counts().0 >= 190 && pace.share.get() > LoadNow::share_of(0.5), "{:?}", pace);
    }

    #[test]
    fn shard_that_is_paced_no_more_forgets_what_it_knew() {
        let (pace, load) = (Pace::default(), paced(0.25));
        pace.begin_turn(Some(AIM), true, AIM * 100, || Duration::ZERO);
        assert!(serve(&pace, load, 1000) <= 20);
        pace.begin_turn(None, true, AIM, || unreachable!("nothing is timed"));
        let served = serve(&pace, load, 1000);
        assert!((700..800).contains(&served), "{served}: the least share holds without it");
        assert_eq!(pace.law.get(), Law::default());
    }
}
