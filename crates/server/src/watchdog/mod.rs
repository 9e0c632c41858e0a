//! A watchdog: one thread beside the shards, which says what a shard waits for while it waits.
//!
//! ```text
//!   shard      turn, work ──▶ Snapshot                    a store for each piece of work, before user code runs
//!   watchdog   look ──▶ judge ──▶ Stall ──▶ log, stalls   35 ms after the last turn that began, 100 ms after the last look
//!                 └─ a turn that is not short: /proc/self/task/TID, and the next look 12 ms later
//!   shard      a turn begins, and no other one is long ──▶ puts the look off
//!   shard      leaves its wait, and the watchdog rests ──▶ sets the time of its look
//! ```
//!
//! * [`alarm`](crate::watch::alarm) is the timer that all of them set.
//!   [`Watch`](crate::watch::board::Watch) keeps what is found.
//! * [`judge`] is a pure function of what looks find. [`facts`] reads a thread's files and tells
//!   what it waits for. [`thread`] is the loop around both. [`loads`] steps the stages of a load.
//! * A shard that waits in its driver says so in the word of its inbox (`shard/wakes/wake.rs`), so
//!   no store marks the end of a turn. The watchdog marks that same word when it goes to rest: the
//!   shard that takes the word finds the mark, without another look.
//! * No watchdog runs in a simulation, which steps [`judge`] alone.

pub(crate) mod facts;
pub(crate) mod judge;
mod lines;
pub(crate) mod loads;
pub(crate) mod thread;
