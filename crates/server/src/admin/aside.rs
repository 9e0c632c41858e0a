//! Code that may block, on threads beside the endpoint's: a bounded number at once, and for a
//! bounded time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::blocking::BlockingError;
use crate::shard::face::handle::Shard;

/// Routes of the program at once.
pub(super) const ROUTES_AT_ONCE: usize = 8;

/// Those among them that need no token, so that they leave room for who has one.
pub(super) const OPEN_ROUTES_AT_ONCE: usize = 4;

/// Scrapes at once that ask collectors of the program: two scrapers, and those that come again
/// while a collector hangs.
pub(super) const SCRAPES_AT_ONCE: usize = 4;

/// Writes of the file of orders: one that writes, and one that waits for it and writes what came
/// meanwhile.
pub(super) const WRITES_AT_ONCE: usize = 2;

/// Looks of the doctor at once: one for reports, and one for those who ask.
pub(super) const DOCTORS_AT_ONCE: usize = 2;

/// Threads for all of them. None is started before it is needed.
pub(super) const THREADS: usize = ROUTES_AT_ONCE + SCRAPES_AT_ONCE + WRITES_AT_ONCE + DOCTORS_AT_ONCE;

/// An answer that takes longer is given up: below the time in which the endpoint answers each
/// request, so that it can say so.
pub(super) const WITHIN: Duration = Duration::from_secs(8);

/// Room for a number of calls at once, which is taken until a call ends, whether a request waits
/// for it or not.
pub(super) struct Aside {
    room: Room,
    /// The room of which it is a part.
    whole: Option<Room>,
}

#[derive(Clone)]
struct Room {
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
pub(super) struct Place {
    _taken: WorkerSlot,
    _of_whole: Option<WorkerSlot>,
}

struct WorkerSlot(Arc<AtomicUsize>);

impl Drop for WorkerSlot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Room {
    fn new(max: usize) -> Room {
        Room { taken: Arc::default(), max }
    }

    fn take(&self) -> Option<WorkerSlot> {
        let is_free = self.taken.load(Ordering::Relaxed) < self.max;
        is_free.then(|| {
            self.taken.fetch_add(1, Ordering::Relaxed);
            WorkerSlot(self.taken.clone())
        })
    }
}

impl Aside {
    pub(super) fn new(max: usize) -> Aside {
        Aside { room: Room::new(max), whole: None }
    }

    /// Room for some of the calls of this one, which count among those.
    pub(super) fn part(&self, max: usize) -> Aside {
        Aside { room: Room::new(max), whole: Some(self.room.clone()) }
    }

    /// Only the endpoint's thread takes places, so none is taken between the look and the count.
    fn take(&self) -> Option<Place> {
        let of_whole = match &self.whole {
            Some(whole) => Some(whole.take()?),
            None => None,
        };
        Some(Place { _taken: self.room.take()?, _of_whole: of_whole })
    }

    /// The number of calls that may run at once.
    pub(super) fn max(&self) -> usize {
        self.room.max
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
        let in_its_place = move |place: Place| {
            let _place = place;
            function()
        };
        self.run_in_place(shard, in_its_place).await
    }

    /// The same of a function that gives its place back when it likes.
    ///
    /// # Errors
    /// As of [`run`](Aside::run).
    pub(super) async fn run_in_place<T: Send + 'static>(
        &self,
        shard: &Shard,
        function: impl FnOnce(Place) -> T + Send + 'static,
    ) -> Result<T, NotDone> {
        let place = self.take().ok_or(NotDone::Full)?;
        let running = shard.spawn_blocking(move || function(place));
        match shard.timeout(WITHIN, running).await {
            Ok(Ok(result)) => Ok(result),
            Ok(Err(BlockingError::Panicked(message))) => Err(NotDone::Panicked(message)),
            Ok(Err(error)) => Err(NotDone::NotBegun(error.to_string())),
            Err(_) => Err(NotDone::Late),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_leaves_room_for_the_rest_of_the_whole() {
        let whole = Aside::new(3);
        let part = whole.part(2);
        let both: Vec<Place> = (0..2).map(|_| part.take().expect("there is room")).collect();
        assert!(part.take().is_none(), "the part is full");
        let third = whole.take().expect("the part leaves one");
        assert!(whole.take().is_none(), "the whole is full");
        drop(both);
        let all = (whole.take(), part.take());
        assert!(
            all.0.is_some() && all.1.is_some() && part.take().is_none(),
            "the part is not, and the whole is"
        );
        drop((all, third));
        let fourth: Vec<Place> = std::iter::from_fn(|| whole.take()).collect();
        assert_eq!(fourth.len(), 3, "what found no room in one of both took none in the other");
    }
}
