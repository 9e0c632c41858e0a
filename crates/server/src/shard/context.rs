use std::fmt;

use super::LocalTasks;

/// A shard as its factory sees it, on the shard's own thread.
pub struct Shard {
    index: usize,
    count: usize,
    tasks: LocalTasks,
}

impl Shard {
    pub(crate) fn new(index: usize, count: usize, tasks: LocalTasks) -> Shard {
        Shard { index, count, tasks }
    }

    /// Which shard this is, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// How many shards the server has.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Runs a future on this shard until it is done or the shard ends. It need not be `Send`, and can share
    /// `Rc`s with the service. A panic in it ends it alone.
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        self.tasks.spawn(Box::pin(future));
    }
}

impl fmt::Debug for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shard").field("index", &self.index).field("count", &self.count).finish()
    }
}
