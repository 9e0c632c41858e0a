//! Sleeping and waking across threads: a shard's inbox, and the word that says what came and
//! whether the shard sleeps.
//!
//! ```text
//!              begin_turn: takes the word               fall_asleep: the word is empty
//!   CALLED ─────────────────────────────────▶ AWAKE ──────────────────────────────────▶ ASLEEP
//!     ▲                                        │ ▲                                       │ │
//!     ├────────────────────────────────────────┘ └───────────────────────────────────────┘ │
//!     │ call                                       begin_turn: its driver returned          │
//!     └──────────────────────────────────────────────────────────────────────────────────────┘
//!       call: this caller, and no other, rouses the shard
//! ```
//!
//! * AWAKE is a word without bits, ASLEEP the bit of that name alone, CALLED any word with a bit of
//!   [`Attention`].
//! * A caller writes its request, then sets its bit. The shard takes the word, then the requests.
//!   So a request made before the word was taken is seen in that turn, and a later one keeps the
//!   shard from falling asleep.
//! * A caller that finds the shard asleep wakes it before it does anything else: no wake-up waits
//!   for the end of a turn, or in a driver. A caller may block right after its call, or its shard
//!   may end, and the other shard still runs.
//! * Of several callers that find the shard asleep the first one wakes it: the others see its bit.
//! * A watchdog that goes to rest marks the word of a shard that sleeps, which changes nothing
//!   above: the turn that takes the word finds the mark, and wakes the watchdog.
//! * A shard that published its figures marks its word in the same way, so that the next turn,
//!   which makes them old, finds that without a look.
//!
//! `tests/wake.rs` of this crate checks all interleavings of this file with loom.

use super::sync::{AtomicBool, AtomicU16, Mutex, MutexGuard, Ordering, PoisonError};

/// The shard waits in its driver: a call has to reach it there.
const ASLEEP: u16 = 1 << 7;

/// A watchdog rests until the shard leaves its wait.
const WATCHED: u16 = 1 << 8;

/// The shard has published all that it did.
const PUBLISHED: u16 = 1 << 9;

/// Both leave a shard that sleeps asleep.
const MARKS: u16 = WATCHED | PUBLISHED;

/// The work of a shard's turn: a set of the constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Attention(u16);

impl Attention {
    /// Nothing came.
    pub(crate) const NONE: Attention = Attention(0);
    /// Tasks were woken or spawned.
    pub(crate) const TASKS: Attention = Attention(1);
    /// Letters came.
    pub(crate) const LETTERS: Attention = Attention(1 << 1);
    /// A mailbox has messages.
    pub(crate) const MESSAGES: Attention = Attention(1 << 2);
    /// The server's order changed.
    pub(crate) const COMMAND: Attention = Attention(1 << 3);
    /// A report is asked for.
    pub(crate) const REPORT: Attention = Attention(1 << 4);
    /// User code changed something on its shard outside of a turn.
    #[cfg(feature = "runtime-tokio")]
    pub(crate) const TOUCHED: Attention = Attention(1 << 5);
    /// User code of the shard asked for something of its upstreams.
    pub(crate) const UPSTREAMS: Attention = Attention(1 << 6);
    /// The work that a turn checks for once more at its end.
    pub(crate) const LATE: Attention = Attention(Attention::LETTERS.0 | Attention::UPSTREAMS.0);
    /// The shard leaves a wait, and a watchdog rests until then.
    pub(crate) const WATCHED: Attention = Attention(WATCHED);
    /// No turn followed the one that published figures, until this one.
    pub(crate) const PUBLISHED: Attention = Attention(PUBLISHED);
    /// Figures are to be published. Of the shard alone: it is never in the word.
    pub(crate) const PUBLICATION: Attention = Attention(1 << 10);
    /// The work of a turn's end for those who watch it.
    pub(crate) const TELLING: Attention =
        Attention(Attention::REPORT.0 | Attention::PUBLISHED.0 | Attention::PUBLICATION.0);

    /// True if one of `what` is in it.
    #[inline]
    pub(crate) fn has(self, what: Attention) -> bool {
        self.0 & what.0 != 0
    }

    pub(crate) fn add(&mut self, what: Attention) {
        self.0 |= what.0;
    }
}

/// Requests of other threads to a shard. `L` is a letter.
pub(crate) struct ShardInbox<L> {
    word: AtomicU16,
    brought: Mutex<InboxContents<L>>,
}

/// Requests since the shard's last look into its inbox.
pub(crate) struct InboxContents<L> {
    /// Tasks to poll.
    pub(crate) tasks: Vec<u32>,
    pub(crate) letters: Vec<L>,
    /// The shard ended and takes nothing more.
    closed: bool,
}

impl<L> Default for InboxContents<L> {
    fn default() -> InboxContents<L> {
        InboxContents { tasks: Vec::new(), letters: Vec::new(), closed: false }
    }
}

/// Whether the shard slept: then its caller has to rouse it, by whatever its driver waits for.
#[must_use = "a shard that is not roused sleeps on"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WakeNeed {
    /// It runs, or another caller rouses it.
    Awake,
    /// It sleeps, and this caller rouses it.
    Asleep,
}

/// The sleep of a shard, as a watchdog sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShardSleep {
    /// It does not.
    Awake,
    /// It waits in its driver.
    Asleep,
    /// It was called there, and did not leave its wait yet.
    Called,
}

impl<L> ShardInbox<L> {
    pub(crate) fn new() -> ShardInbox<L> {
        ShardInbox { word: AtomicU16::new(0), brought: Mutex::new(InboxContents::default()) }
    }

    /// Asks for attention. The caller has written before what the shard is to see.
    #[inline]
    pub(crate) fn call(&self, what: Attention) -> WakeNeed {
        match self.word.fetch_or(what.0, Ordering::AcqRel) & !MARKS {
            ASLEEP => WakeNeed::Asleep,
            _ => WakeNeed::Awake,
        }
    }

    /// Makes the shard poll a task.
    pub(crate) fn wake_task(&self, task: u32) -> WakeNeed {
        self.brought().tasks.push(task);
        self.call(Attention::TASKS)
    }

    /// Leaves a letter.
    ///
    /// # Errors
    /// The letter comes back if the shard ended.
    pub(crate) fn send(&self, letter: L) -> Result<WakeNeed, L> {
        let mut brought = self.brought();
        if brought.closed {
            return Err(letter);
        }
        brought.letters.push(letter);
        drop(brought);
        Ok(self.call(Attention::LETTERS))
    }

    /// Takes the word, on the shard as its turn begins, and adds the requests to `brought`, after
    /// those that the last turn left there.
    #[inline]
    pub(crate) fn begin_turn(&self, brought: &mut InboxContents<L>) -> Attention {
        // A turn that follows another one without sleep and without a call, as most do under load,
        // changes nothing here.
        if self.word.load(Ordering::Relaxed) == 0 {
            return Attention::NONE;
        }
        let called = Attention(self.word.swap(0, Ordering::AcqRel));
        if called.has(Attention(Attention::TASKS.0 | Attention::LETTERS.0)) {
            let mut here = self.brought();
            move_all(&mut here.tasks, &mut brought.tasks);
            move_all(&mut here.letters, &mut brought.letters);
        }
        called
    }

    /// Adds, on the shard within its turn, the tasks that were woken since to `tasks`. True if any
    /// were, or were spawned.
    #[inline]
    pub(crate) fn take_tasks(&self, tasks: &mut Vec<u32>) -> bool {
        let called = self.take(Attention::TASKS);
        if called {
            move_all(&mut self.brought().tasks, tasks);
        }
        called
    }

    /// The same for letters.
    #[inline]
    pub(crate) fn take_letters(&self, letters: &mut Vec<L>) {
        if self.take(Attention::LETTERS) {
            move_all(&mut self.brought().letters, letters);
        }
    }

    /// Reports, on the shard within its turn, whether one of `what` was asked for since the turn
    /// began. It is not taken.
    #[inline]
    pub(crate) fn has(&self, what: Attention) -> bool {
        Attention(self.word.load(Ordering::Relaxed)).has(what)
    }

    /// Takes `what`, on the shard within its turn: true if it was asked for since the turn began.
    /// The rest is left for the next turn, and keeps the shard awake until then.
    #[inline]
    pub(crate) fn take(&self, what: Attention) -> bool {
        let called = self.has(what);
        if called {
            self.word.fetch_and(!what.0, Ordering::AcqRel);
        }
        called
    }

    /// Marks the shard asleep before it waits. False if a request came since
    /// [`begin_turn`](ShardInbox::begin_turn): then the shard must not wait.
    pub(crate) fn fall_asleep(&self) -> bool {
        let change =
            |from| self.word.compare_exchange(from, from | ASLEEP, Ordering::AcqRel, Ordering::Relaxed);
        change(0).or_else(|word| if word == PUBLISHED { change(word) } else { Err(word) }).is_ok()
    }

    /// Marks, on the shard within its turn, that all that it did is published, which the next turn
    /// sees.
    pub(crate) fn published(&self) {
        self.word.fetch_or(PUBLISHED, Ordering::AcqRel);
    }

    /// On the shard's thread: true between [`fall_asleep`](ShardInbox::fall_asleep) and the next
    /// turn, as long as nothing came.
    #[cfg(feature = "runtime-tokio")]
    #[inline]
    pub(crate) fn is_asleep(&self) -> bool {
        self.word.load(Ordering::Relaxed) & !MARKS == ASLEEP
    }

    /// Marks, for a watchdog that goes to rest, that the shard wakes it when it leaves its wait.
    /// False if the shard does not wait, or was called there.
    pub(crate) fn watch(&self) -> bool {
        let marked = self.word.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |word| {
            (word & !MARKS == ASLEEP).then_some(word | WATCHED)
        });
        marked.is_ok()
    }

    /// Takes the watchdog's mark, for a caller that rouses the shard: true if a watchdog rests,
    /// which no other caller sees then.
    #[cfg(feature = "runtime-tokio")]
    pub(crate) fn take_watched(&self) -> bool {
        self.word.load(Ordering::Relaxed) & WATCHED != 0
            && self.word.fetch_and(!WATCHED, Ordering::AcqRel) & WATCHED != 0
    }

    /// The sleep of the shard, for a watchdog. The caller sees everything that the shard stored
    /// before it left its last wait.
    pub(crate) fn sleep(&self) -> ShardSleep {
        match self.word.load(Ordering::Acquire) & !MARKS {
            ASLEEP => ShardSleep::Asleep,
            word if word & ASLEEP != 0 => ShardSleep::Called,
            _ => ShardSleep::Awake,
        }
    }

    /// Refuses letters from now on, after the shard ended. Returns those that were left, which may
    /// hold user code.
    pub(crate) fn close(&self) -> Vec<L> {
        let mut brought = self.brought();
        brought.closed = true;
        std::mem::take(&mut brought.letters)
    }

    fn brought(&self) -> MutexGuard<'_, InboxContents<L>> {
        self.brought.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A swap where it can be one, so that both lists keep their room.
#[cold]
fn move_all<T>(from: &mut Vec<T>, to: &mut Vec<T>) {
    if to.is_empty() {
        std::mem::swap(from, to);
    } else {
        to.append(from);
    }
}

/// Keeps a task from being listed twice.
pub(crate) struct Queued {
    is: AtomicBool,
}

impl Queued {
    pub(crate) fn new() -> Queued {
        Queued { is: AtomicBool::new(false) }
    }

    /// True for the first caller since [`taken`](Queued::taken), which lists the task.
    #[inline]
    pub(crate) fn list(&self) -> bool {
        !self.is.swap(true, Ordering::AcqRel)
    }

    /// Counts wakes again from now on, since the task is about to be polled.
    #[inline]
    pub(crate) fn taken(&self) {
        // A swap and not a store: so the poll sees everything that a caller wrote before it found
        // the task listed.
        self.is.swap(false, Ordering::AcqRel);
    }
}
