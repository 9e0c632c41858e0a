//! How hyper spawns.

use hyper::rt::Executor;

use crate::shard::handle::Shard;

/// Runs hyper's futures on a shard. They need not be `Send`, and end with the shard.
#[derive(Clone, Debug)]
pub struct ShardExecutor {
    shard: Shard,
}

impl ShardExecutor {
    /// An executor on `shard`.
    pub fn new(shard: &Shard) -> ShardExecutor {
        ShardExecutor { shard: shard.clone() }
    }
}

impl<F: Future<Output = ()> + 'static> Executor<F> for ShardExecutor {
    fn execute(&self, future: F) {
        self.shard.spawn(future);
    }
}
