//! Code that may block, on threads beside the endpoint's: a bounded number at once, and for a bounded time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::shard::blocking::BlockingError;
use crate::shard::handle::Shard;

/// Routes of the program at once.
pub(super) const ROUTES_AT_ONCE: usize = 8;

/// Scrapes at once that ask collectors of the program: two scrapers, and those that come again while a collector hangs.
pub(super) const SCRAPES_AT_ONCE: usize = 4;

/// Writes of the file of orders: one that writes, and one that waits for it and writes what came meanwhile.
pub(super) const WRITES_AT_ONCE: usize = 2;

/// Threads for all of them, and two for the doctor. None is started before it is needed.
pub(super) const THREADS: usize = ROUTES_AT_ONCE + SCRAPES_AT_ONCE + WRITES_AT_ONCE + 2;

/// An answer that takes longer is given up: below the time in which the endpoint answers each request, so that it can say so.
pub(super) const WITHIN: Duration = Duration::from_secs(8);

/// Room for a number of calls at once, which is taken until a call ends, whether a request waits for it or not.
pub(super) struct Aside {
    taken: Arc<AtomicUsize>,
    max: usize,
}

/// Why there is no result.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NotDone {
    /// As many are running as may.
    Full,
    /// It runs still.
    Late,
    /// It panicked, with this message.
    Panicked(String),
    /// It did not begin.
    NotBegun(String),
}

/// A place that is taken.
struct Taken(Arc<AtomicUsize>);

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Aside {
    pub(super) fn new(max: usize) -> Aside {
        Aside { taken: Arc::default(), max }
    }

    /// Only the endpoint's thread takes places, so none is taken between the look and the count.
    fn take(&self) -> Option<Taken> {
        let is_free = self.taken.load(Ordering::Relaxed) < self.max;
        is_free.then(|| {
            self.taken.fetch_add(1, Ordering::Relaxed);
            Taken(self.taken.clone())
        })
    }

    /// Runs a function on another thread.
    ///
    /// # Errors
    /// [`NotDone`]; it may run on then.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        shard: &Shard,
        function: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NotDone> {
        let taken = self.take().ok_or(NotDone::Full)?;
        let running = shard.spawn_blocking(move || {
            let _taken = taken;
            function()
        });
        match shard.timeout(WITHIN, running).await {
            Ok(Ok(result)) => Ok(result),
            Ok(Err(BlockingError::Panicked(message))) => Err(NotDone::Panicked(message)),
            Ok(Err(error)) => Err(NotDone::NotBegun(error.to_string())),
            Err(_) => Err(NotDone::Late),
        }
    }
}
