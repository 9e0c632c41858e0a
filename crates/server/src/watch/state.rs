//! The state of a shard, as other threads see it.

use ringserve_core::Time;

/// The state of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// It waits in its driver since its turn of then; or it has not begun, or has ended.
    Waits(Time),
    /// It is in the turn that began then, or on its way to the next one.
    Turn(Time),
    /// It waits since its turn of then, and a task of the runtime around it keeps it there: it was
    /// called and did not leave its wait, or its thread is blocked elsewhere.
    Called(Time),
}
