//! Every interleaving of sleeping and waking across threads: `src/shard/wakes/wake.rs` itself,
//! built on loom's types.
//!
//! A shard here goes round as the real one does, and waits at an eventfd that counts. What a caller
//! brought must be seen without any other wake-up: a lost one shows as a deadlock, which loom
//! reports.

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU16, Ordering};
    pub(crate) use loom::sync::{Mutex, MutexGuard};
    pub(crate) use std::sync::PoisonError;
}

// What only the crate itself uses of it.
#[allow(dead_code)]
#[path = "../src/shard/wakes/wake.rs"]
mod wake;

use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use wake::{Attention, InboxContents, Queued, ShardInbox, ShardSleep, WakeNeed};

/// All interleavings in which a thread is interrupted up to three times where it need not be:
/// beyond that none is known to find more, and the time grows without bound.
fn model(body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(body);
}

/// The counter for which a driver waits.
#[derive(Default)]
struct Eventfd {
    count: Mutex<u32>,
    written: Condvar,
}

impl Eventfd {
    fn write(&self) {
        *self.count.lock().unwrap() += 1;
        self.written.notify_one();
    }

    fn read(&self) {
        let mut count = self.count.lock().unwrap();
        while *count == 0 {
            count = self.written.wait(count).unwrap();
        }
        *count = 0;
    }
}

/// A shard as its callers see it.
struct Shard {
    inbox: ShardInbox<u32>,
    task: Queued,
    eventfd: Eventfd,
    /// Written before [`Attention::COMMAND`], as an order is.
    order: AtomicU32,
    roused: AtomicU32,
}

impl Shard {
    fn new() -> Arc<Shard> {
        Arc::new(Shard {
            inbox: ShardInbox::new(),
            task: Queued::new(),
            eventfd: Eventfd::default(),
            order: AtomicU32::new(0),
            roused: AtomicU32::new(0),
        })
    }

    fn rouse(&self, called: WakeNeed) {
        if called == WakeNeed::Asleep {
            self.roused.fetch_add(1, Ordering::Relaxed);
            self.eventfd.write();
        }
    }

    fn send(&self, letter: u32) {
        let called = self.inbox.send(letter).expect("the shard runs");
        self.rouse(called);
    }

    fn order(&self) {
        self.order.store(1, Ordering::Relaxed);
        self.rouse(self.inbox.call(Attention::COMMAND));
    }

    fn wake_task(&self) {
        if self.task.list() {
            self.rouse(self.inbox.wake_task(7));
        }
    }

    /// Takes turns until `done`, and sleeps between them.
    fn run(&self, mut done: impl FnMut(Attention, &mut InboxContents<u32>) -> bool) {
        let mut brought = InboxContents::default();
        let mut asleep = 0;
        loop {
            let called = self.inbox.begin_turn(&mut brought);
            let done = done(called, &mut brought);
            brought.letters.clear();
            brought.tasks.clear();
            self.inbox.take_tasks(&mut brought.tasks);
            if done {
                break;
            }
            if brought.tasks.is_empty() && self.inbox.fall_asleep() {
                asleep += 1;
                self.eventfd.read();
            }
        }
        assert!(self.roused.load(Ordering::Relaxed) <= asleep, "one rouse for each sleep at most");
    }
}

#[test]
fn letters_of_two_callers_reach_a_shard_that_sleeps() {
    model(|| {
        let shard = Shard::new();
        let callers: Vec<_> = (1..=2)
            .map(|letter| {
                let shard = shard.clone();
                thread::spawn(move || shard.send(letter))
            })
            .collect();
        let mut sum = 0;
        shard.run(|called, brought| {
            assert!(brought.letters.is_empty() || called.has(Attention::LETTERS));
            sum += brought.letters.iter().sum::<u32>();
            sum == 3
        });
        callers.into_iter().for_each(|caller| caller.join().unwrap());
    });
}

#[test]
fn letters_that_come_within_a_turn_are_seen_at_its_end_or_later() {
    model(|| {
        let shard = Shard::new();
        let callers: Vec<_> = (1..=2)
            .map(|letter| {
                let shard = shard.clone();
                thread::spawn(move || shard.send(letter))
            })
            .collect();
        let mut sum = 0;
        shard.run(|_called, brought| {
            if shard.inbox.has(Attention::LATE) {
                shard.inbox.take_letters(&mut brought.letters);
            }
            sum += brought.letters.iter().sum::<u32>();
            sum == 3
        });
        callers.into_iter().for_each(|caller| caller.join().unwrap());
    });
}

#[test]
fn an_order_beside_a_letter_is_seen_and_its_value_too() {
    model(|| {
        let shard = Shard::new();
        let (one, other) = (shard.clone(), shard.clone());
        let callers = [thread::spawn(move || one.order()), thread::spawn(move || other.send(1))];
        let (mut ordered, mut letters) = (false, 0);
        shard.run(|called, brought| {
            if called.has(Attention::COMMAND) {
                assert_eq!(shard.order.load(Ordering::Relaxed), 1, "the order was written before the call");
                ordered = true;
            }
            letters += brought.letters.len();
            ordered && letters == 1
        });
        callers.into_iter().for_each(|caller| caller.join().unwrap());
    });
}

#[test]
fn a_task_is_polled_after_each_change_that_woke_it() {
    model(|| {
        let shard = Shard::new();
        let changes = Arc::new(AtomicU32::new(0));
        let callers: Vec<_> = (0..2)
            .map(|_| {
                let (shard, changes) = (shard.clone(), changes.clone());
                thread::spawn(move || {
                    changes.fetch_add(1, Ordering::Relaxed);
                    shard.wake_task();
                })
            })
            .collect();
        // The poll that sees the last change is never left out, or the shard sleeps on.
        let mut left_over = Vec::new();
        let mut seen = 0;
        let mut brought = InboxContents::default();
        while seen < 2 {
            shard.inbox.begin_turn(&mut brought);
            brought.tasks.append(&mut left_over);
            for task in brought.tasks.drain(..) {
                assert_eq!(task, 7);
                shard.task.taken();
                seen = changes.load(Ordering::Relaxed);
            }
            shard.inbox.take_tasks(&mut left_over);
            if seen < 2 && left_over.is_empty() && shard.inbox.fall_asleep() {
                shard.eventfd.read();
            }
        }
        callers.into_iter().for_each(|caller| caller.join().unwrap());
    });
}

/// Two shards that wait for each other's letter: each caller rouses before it waits.
#[test]
fn a_caller_that_blocks_after_its_call_is_answered() {
    model(|| {
        let (asks, answers) = (Shard::new(), Shard::new());
        let (to, back) = (answers.clone(), asks.clone());
        let other = thread::spawn(move || {
            to.run(|_, brought| match brought.letters.pop() {
                Some(letter) => {
                    back.send(letter + 1);
                    true
                }
                None => false,
            });
        });
        answers.send(1);
        let mut answer = None;
        asks.run(|_, brought| {
            answer = brought.letters.pop();
            answer.is_some()
        });
        assert_eq!(answer, Some(2));
        other.join().unwrap();
    });
}

#[test]
fn a_letter_to_a_shard_that_ends_comes_back_or_is_left_there() {
    model(|| {
        let shard = Shard::new();
        let caller = {
            let shard = shard.clone();
            thread::spawn(move || shard.inbox.send(1).is_err())
        };
        let left = shard.inbox.close().len();
        let came_back = caller.join().unwrap();
        assert_eq!(left + usize::from(came_back), 1);
    });
}

#[test]
fn a_look_within_a_turn_lets_the_shard_fall_asleep() {
    model(|| {
        let inbox: ShardInbox<u32> = ShardInbox::new();
        assert_eq!(inbox.call(Attention::TASKS), WakeNeed::Awake);
        assert!(inbox.take(Attention::TASKS));
        assert!(inbox.fall_asleep(), "what was looked at is no reason for another turn");
    });
}

/// A shard that published sleeps with that mark, and any call is seen as without it; the next turn
/// learns of it, and no other.
#[test]
fn shard_that_published_is_roused_and_told_in_its_next_turn() {
    model(|| {
        let shard = Shard::new();
        let caller = {
            let shard = shard.clone();
            thread::spawn(move || shard.send(1))
        };
        let (mut turns, mut letters) = (0, 0);
        shard.run(|called, brought| {
            assert_eq!(called.has(Attention::PUBLISHED), turns == 1, "in turn {turns}");
            turns += 1;
            if turns == 1 {
                shard.inbox.published();
            }
            letters += brought.letters.len();
            letters == 1
        });
        caller.join().unwrap();
    });
}

#[test]
fn marks_of_the_watchdog_and_of_figures_lie_side_by_side() {
    model(|| {
        let inbox: ShardInbox<u32> = ShardInbox::new();
        inbox.published();
        assert_eq!(inbox.sleep(), ShardSleep::Awake);
        assert!(inbox.fall_asleep());
        assert!(inbox.watch(), "it sleeps");
        assert_eq!(inbox.sleep(), ShardSleep::Asleep);
        assert_eq!(inbox.call(Attention::LETTERS), WakeNeed::Asleep);
        assert_eq!(inbox.call(Attention::LETTERS), WakeNeed::Awake, "the first caller rouses it");
        let called = inbox.begin_turn(&mut InboxContents::default());
        assert!(called.has(Attention::WATCHED) && called.has(Attention::PUBLISHED));
        assert_eq!(inbox.begin_turn(&mut InboxContents::default()), Attention::NONE);
    });
}

/// A watchdog rests while the shard sleeps: the mark hides no call, and is found by the turn that
/// leaves the wait.
#[test]
fn watchdog_that_rests_is_woken_by_the_turn_that_a_call_begins() {
    model(|| {
        let (shard, watchdog) = (Shard::new(), Arc::new(Eventfd::default()));
        let caller = {
            let shard = shard.clone();
            thread::spawn(move || shard.send(1))
        };
        let rests = {
            let (shard, watchdog) = (shard.clone(), watchdog.clone());
            thread::spawn(move || {
                let rests = shard.inbox.watch();
                if rests {
                    watchdog.read();
                    assert_ne!(
                        shard.inbox.sleep(),
                        ShardSleep::Called,
                        "it left the wait in which it was called"
                    );
                }
                rests
            })
        };
        let mut marks = 0;
        let mut letters = 0;
        shard.run(|called, brought| {
            if called.has(Attention::WATCHED) {
                marks += 1;
                watchdog.write();
            }
            letters += brought.letters.len();
            letters == 1
        });
        caller.join().unwrap();
        if rests_after_the_end(&shard.inbox, &watchdog) {
            marks += 1;
        }
        assert_eq!(u32::from(rests.join().unwrap()), marks);
    });
}

/// The shard does not sleep after its last turn, so no mark is set there.
fn rests_after_the_end(inbox: &ShardInbox<u32>, watchdog: &Eventfd) -> bool {
    let marked = inbox.begin_turn(&mut InboxContents::default()).has(Attention::WATCHED);
    if marked {
        watchdog.write();
    }
    marked
}
