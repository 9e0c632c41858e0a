//! Handles of a shard's tasks.

use std::fmt;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll};

use super::records::Outcome;
use super::spawned::{LocalTasks, Recorded};

/// A task of a shard. Awaiting it returns the task's output, or the reason why there is none.
///
/// Its drop detaches the task, which goes on. A handle stays on the shard's thread, as the task
/// does. If it is dropped before the task ends, it costs no allocation; an output that is not
/// fetched stays in the task's memory until the handle is dropped.
///
/// ```
/// # use ringserve::{Cx, task::JoinError};
/// async fn sum(cx: &Cx<'_, ()>) -> Result<u64, JoinError> {
///     let half = cx.spawn(async { (1..=50).sum::<u64>() });
///     let other = cx.spawn(async { (51..=100).sum::<u64>() });
///     Ok(half.await? + other.await?)
/// }
/// ```
///
/// # Panics
/// If it is polled again after its result. A task that awaits its own handle waits until it is
/// aborted.
pub struct JoinHandle<T> {
    tasks: LocalTasks,
    recorded: Recorded,
    output: PhantomData<fn() -> T>,
}

impl<T> JoinHandle<T> {
    pub(crate) fn new(tasks: LocalTasks, recorded: Recorded) -> JoinHandle<T> {
        JoinHandle { tasks, recorded, output: PhantomData }
    }

    /// Drops the task's future: now, or, if it is being polled, right after that. The handle then
    /// returns [`JoinError::Aborted`]. A task that ended keeps its result.
    pub fn abort(&self) {
        self.tasks.abort(self.recorded.task);
    }

    /// True once the task ended, in any way.
    pub fn is_finished(&self) -> bool {
        self.tasks.has_ended(self.recorded.record)
    }
}

impl<T: 'static> Future for JoinHandle<T> {
    type Output = Result<T, JoinError>;

    fn poll(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Self::Output> {
        self.tasks.poll_outcome(self.recorded.record, task.waker()).map(|outcome| match outcome {
            Outcome::Done(mut done) => {
                let mut output = None::<T>;
                done.as_mut().take(&mut output);
                Ok(output.expect("a task that is done has an output of its handle's type"))
            }
            Outcome::Panicked(said) => Err(JoinError::Panicked(said.into())),
            Outcome::Aborted => Err(JoinError::Aborted),
            Outcome::ConnectionEnded => Err(JoinError::ConnectionEnded),
            Outcome::ShardEnded => Err(JoinError::ShardEnded),
            Outcome::Taken => panic!("a JoinHandle is polled after it gave its result"),
        })
    }
}

impl<T> Drop for JoinHandle<T> {
    fn drop(&mut self) {
        self.tasks.detach(self.recorded);
    }
}

impl<T> fmt::Debug for JoinHandle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinHandle").field("is_finished", &self.is_finished()).finish_non_exhaustive()
    }
}

/// The reason why a task has no output.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum JoinError {
    /// [`JoinHandle::abort`] was called.
    Aborted,
    /// The task panicked, with this message.
    Panicked(String),
    /// The task belonged to a connection, which ended first.
    ConnectionEnded,
    /// The shard of the task ended first.
    ShardEnded,
}

impl fmt::Display for JoinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            JoinError::Aborted => f.write_str("the task was aborted"),
            JoinError::Panicked(said) => write!(f, "the task panicked: {said}"),
            JoinError::ConnectionEnded => f.write_str("the task's connection ended"),
            JoinError::ShardEnded => f.write_str("the task's shard ended"),
        }
    }
}

ringserve_buf::debug_is_display!(JoinError);

impl std::error::Error for JoinError {}

/// The reason why a connection takes no further task.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SpawnError {
    /// The connection has [`Limits::connection_tasks_max`](crate::Limits::connection_tasks_max)
    /// tasks already.
    Full,
    /// The connection ended, or ends after its queued replies.
    Gone,
}

impl fmt::Display for SpawnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SpawnError::Full => "the connection has as many tasks as connection_tasks_max allows",
            SpawnError::Gone => "the connection ended",
        })
    }
}

ringserve_buf::debug_is_display!(SpawnError);

impl std::error::Error for SpawnError {}
