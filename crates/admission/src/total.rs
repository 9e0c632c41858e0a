//! The limits on all peers of a service or a listener together: connections at once, and their
//! rate. All shards count in the same two words, so what is not asked for costs a branch and
//! nothing else.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use ringserve_core::internals::{Gcra, SharedGcra};

use super::RefusedBy;

/// Connections of all peers, where there is a limit, or may come to be one.
pub(super) struct Total {
    /// Connections are counted. It stays as it is, so that each is taken back as it was counted.
    counts: bool,
    at_once: AtomicU32,
    live: AtomicU32,
    rate: SharedGcra,
    bucket: AtomicU64,
}

impl Total {
    /// It counts if there is a limit, or if there may be one later.
    pub(super) fn new(at_once: Option<u32>, rate: Option<Gcra>, adjustable: bool) -> Total {
        Total {
            counts: adjustable || at_once.is_some() || rate.is_some(),
            at_once: AtomicU32::new(at_once.unwrap_or(u32::MAX)),
            live: AtomicU32::new(0),
            rate: SharedGcra::new(rate),
            bucket: AtomicU64::new(0),
        }
    }

    #[inline]
    pub(super) fn counts(&self) -> bool {
        self.counts
    }

    pub(super) fn has_rate(&self) -> bool {
        self.rate.get().is_some()
    }

    /// Checks that there is room, before a peer is charged for what may be refused.
    ///
    /// # Errors
    /// The reason for which it would be refused.
    #[cold]
    pub(super) fn check(&self, now: u64) -> Result<(), RefusedBy> {
        if self.live.load(Ordering::Relaxed) >= self.at_once.load(Ordering::Relaxed) {
            return Err(RefusedBy::ConnectionCount);
        }
        let is_out = |rate: Gcra| rate.take(self.bucket.load(Ordering::Relaxed), now).is_none();
        match self.rate.get().is_some_and(is_out) {
            true => Err(RefusedBy::ConnectionRate),
            false => Ok(()),
        }
    }

    /// Counts a connection that came between `from` and `now`.
    ///
    /// # Errors
    /// The reason for which it is refused: another shard may have taken the last place since the
    /// check.
    #[cold]
    pub(super) fn take(&self, from: u64, now: u64) -> Result<(), RefusedBy> {
        let at_once = self.at_once.load(Ordering::Relaxed);
        let more = |live: u32| (live < at_once).then(|| live + 1);
        if self.live.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_err() {
            return Err(RefusedBy::ConnectionCount);
        }
        if let Some(rate) = self.rate.get()
            && self
                .bucket
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |bucket| {
                    rate.take_since(bucket, from, now)
                })
                .is_err()
        {
            self.live.fetch_sub(1, Ordering::Relaxed);
            return Err(RefusedBy::ConnectionRate);
        }
        Ok(())
    }

    /// A connection that was counted ended.
    #[inline]
    pub(super) fn release(&self) {
        if self.counts {
            let before = self.live.fetch_sub(1, Ordering::Relaxed);
            debug_assert!(before > 0, "a connection is taken back that was not counted");
        }
    }

    pub(super) fn live(&self) -> u32 {
        self.live.load(Ordering::Relaxed)
    }

    /// Sets how many there may be at once. Those that are there stay.
    pub(super) fn set_at_once(&self, at_once: Option<u32>) {
        self.at_once.store(at_once.unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    /// Sets the rate, with a full bucket.
    pub(super) fn set_rate(&self, rate: Option<Gcra>) {
        self.rate.set(rate);
        self.bucket.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn shards_take_no_place_beyond_the_last() {
        let total = Total::new(Some(1000), None, false);
        let taken: usize = thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| (0..500).filter(|_| total.take(0, 0).is_ok()).count()))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!((taken, total.live()), (1000, 1000));
        assert_eq!(total.check(0), Err(RefusedBy::ConnectionCount));
        total.release();
        assert_eq!((total.check(0), total.take(0, 0)), (Ok(()), Ok(())));
    }

    #[test]
    fn refusal_for_the_rate_takes_no_place() {
        let total = Total::new(Some(10), Some(Gcra::new(1, 2)), false);
        assert_eq!((total.take(0, 0), total.take(0, 0)), (Ok(()), Ok(())));
        assert_eq!(
            (total.check(0), total.take(0, 0)),
            (Err(RefusedBy::ConnectionRate), Err(RefusedBy::ConnectionRate))
        );
        assert_eq!(total.live(), 2);
        assert_eq!(total.take(1_000_000_000, 1_000_000_000), Ok(()));
        // A new rate begins with all of its burst.
        total.set_rate(Some(Gcra::new(1, 1)));
        assert_eq!(total.take(1_000_000_000, 1_000_000_000), Ok(()));
        total.set_rate(None);
        (0..6).for_each(|_| assert_eq!(total.take(1_000_000_000, 1_000_000_000), Ok(())));
        assert_eq!(total.check(0), Err(RefusedBy::ConnectionCount));
        total.set_at_once(None);
        assert_eq!(total.check(0), Ok(()));
    }
}
