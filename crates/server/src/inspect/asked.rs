//! An inspection that was asked for, and what came of it.

use std::cmp::Reverse;
use std::fmt;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use ringserve_base::clock::Deadline;
use ringserve_base::guard::{discard, wake};

use super::query::{ConnInfo, Inspection, InspectionSums, Query};

/// An inspection under way: see [`ServerControl::inspecting`](crate::ServerControl::inspecting).
/// Shards that have not answered when it is dropped look no further.
pub struct Inspecting {
    asked: Arc<Asked>,
    query: Query,
}

/// The answers that the shards leave for the caller that asked.
pub(crate) struct Asked {
    answers: Mutex<Answers>,
    /// Notified once no answer is awaited.
    complete: Condvar,
    /// The caller is gone, and nothing takes the answers.
    abandoned: AtomicBool,
}

struct Answers {
    /// By shard.
    came: Vec<Option<Found>>,
    /// Shards that have neither answered nor ended.
    awaited: usize,
    waker: Option<Waker>,
}

/// The answer of a shard.
#[derive(Clone)]
pub(super) struct Found {
    pub(super) connections: Vec<ConnInfo>,
    pub(super) sums: InspectionSums,
}

impl Inspecting {
    pub(crate) fn new(query: Query, shards: usize) -> Inspecting {
        let answers = Answers { came: vec![None; shards], awaited: shards, waker: None };
        let asked = Asked {
            answers: Mutex::new(answers),
            complete: Condvar::new(),
            abandoned: AtomicBool::new(false),
        };
        Inspecting { asked: Arc::new(asked), query }
    }

    /// The place where the shards leave their answers.
    pub(crate) fn asked(&self) -> Arc<Asked> {
        self.asked.clone()
    }

    /// Waits until every shard answered or ended. Any executor may await it, one task at a time. A
    /// shard that is blocked answers when it goes on, so the caller limits the time.
    pub async fn done(&self) {
        poll_fn(|task| {
            // Cloning and dropping a waker is user code: outside of the lock.
            let mut waker = Some(task.waker().clone());
            let mut answers = self.asked.answers();
            let is_done = answers.awaited == 0;
            if !is_done {
                std::mem::swap(&mut answers.waker, &mut waker);
            }
            drop(answers);
            discard(waker);
            if is_done { Poll::Ready(()) } else { Poll::Pending }
        })
        .await
    }

    /// Blocks until every shard answered or ended, or the deadline is over.
    pub(crate) fn wait(&self, deadline: Deadline) {
        let answers = self.asked.answers();
        drop(deadline.wait_while(&self.asked.complete, answers, |answers| answers.awaited > 0));
    }

    /// The answers that came so far. Shards that have not answered are
    /// [silent](Inspection::silent_shards).
    pub fn answer(self) -> Inspection {
        let came = std::mem::take(&mut self.asked.answers().came);
        let mut inspection = Inspection::default();
        for (shard, came) in came.into_iter().enumerate() {
            match came {
                Some(found) => {
                    inspection.connections.extend(found.connections);
                    inspection.sums.add(found.sums);
                }
                None => inspection.silent_shards.push(shard),
            }
        }
        let Query { by, limit, .. } = self.query;
        inspection.connections.sort_by_key(|conn| (Reverse(by.of(conn)), conn.shard, conn.id.slot()));
        inspection.connections.truncate(limit);
        inspection
    }
}

impl Drop for Inspecting {
    fn drop(&mut self) {
        self.asked.abandoned.store(true, Ordering::Relaxed);
        let waker = self.asked.answers().waker.take();
        discard(waker);
    }
}

impl fmt::Debug for Inspecting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inspecting").field("query", &self.query).finish_non_exhaustive()
    }
}

impl Asked {
    fn answers(&self) -> MutexGuard<'_, Answers> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if the caller is gone, and nothing takes the answers.
    pub(super) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Relaxed)
    }

    /// A shard answered.
    pub(super) fn came(&self, shard: usize, found: Found) {
        if let Some(place) = self.answers().came.get_mut(shard) {
            *place = Some(found);
        }
    }

    /// A shard will say no more, whether it answered or not.
    pub(super) fn left(&self) {
        let mut answers = self.answers();
        answers.awaited -= 1;
        if answers.awaited > 0 {
            return;
        }
        let waker = answers.waker.take();
        drop(answers);
        self.complete.notify_all();
        if let Some(waker) = waker {
            // If it panics, the task that waits is not woken.
            let _ = wake(waker);
        }
    }
}
