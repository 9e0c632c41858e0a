//! Counts of prefixes for which a table has no room: four rows of cells that many prefixes share.
//!
//! A prefix has a cell in each row, and what is known of it is the least of the four. Others may
//! have raised each of them, and none lowers them below what is true, so it errs upwards only: a
//! prefix may be refused early, and is never let in beyond its limit.

/// Four rows: all four cells of a prefix are rarely shared then, and each row costs a cache miss.
const ROWS: usize = 4;

/// Bits of a column's number. 64 stripes with 1024 columns have 65 536 cells in each row, and 4 MiB
/// in all.
const COLUMN_BITS: u32 = 10;
const COLUMNS: usize = 1 << COLUMN_BITS;

#[derive(Clone, Copy, Default)]
struct Cell<T> {
    /// The bucket of the rate.
    bucket: u64,
    /// Connections, or another bucket.
    tally: T,
}

/// The state of a prefix in addition to the bucket of its rate: its connections, or one more
/// bucket.
pub(super) trait Tally: Copy + Default + PartialEq {
    /// The limits that hold for each prefix.
    type Limits;

    /// True if there may be entries that no longer hold any state.
    fn leaves_idle(limits: &Self::Limits) -> bool;

    /// When a bucket is full again; 0 for what is none.
    fn full_at(self) -> u64;

    /// True if it says no more than one that is not there.
    fn is_idle(self, now: u64) -> bool;

    /// The lesser one of what two cells of a sketch know.
    fn least(self, other: Self) -> Self;

    /// The state of a cell of a sketch after that of one of its prefixes went from `before` to
    /// `after`.
    fn follow(self, before: Self, after: Self) -> Self;

    /// The part that an entry takes over from the sketch, and the part that stays there.
    fn split(self) -> (Self, Self);
}

/// The cells of one stripe.
pub(super) struct Sketch<T> {
    cells: Box<[Cell<T>]>,
    /// Connections that are counted here.
    live: u32,
    /// The latest bucket.
    latest: u64,
}

impl<T: Tally> Sketch<T> {
    /// `None` if the system has no memory for it.
    pub(super) fn new() -> Option<Sketch<T>> {
        let mut cells = Vec::new();
        cells.try_reserve_exact(ROWS * COLUMNS).ok()?;
        cells.resize(ROWS * COLUMNS, Cell::default());
        Some(Sketch { cells: cells.into(), live: 0, latest: 0 })
    }

    /// The cells of a prefix. The stripe is chosen by other bits of its hash.
    fn places(hash: u64) -> [usize; ROWS] {
        std::array::from_fn(|row| {
            let column = (hash >> (row as u32 * COLUMN_BITS)) as usize & (COLUMNS - 1);
            row * COLUMNS + column
        })
    }

    /// The bucket of a prefix and its tally, or more.
    pub(super) fn known_of(&self, hash: u64) -> (u64, T) {
        let [first, rest @ ..] = Sketch::<T>::places(hash).map(|place| self.cells[place]);
        let least =
            |(bucket, tally): (u64, T), cell: Cell<T>| (bucket.min(cell.bucket), tally.least(cell.tally));
        rest.into_iter().fold((first.bucket, first.tally), least)
    }

    /// Changes what is known of a prefix.
    ///
    /// # Errors
    /// Those of `change`, after which nothing is changed.
    pub(super) fn change<E>(
        &mut self,
        hash: u64,
        change: impl FnOnce(&mut u64, &mut T) -> Result<(), E>,
    ) -> Result<(), E> {
        let (mut bucket, before) = self.known_of(hash);
        let mut after = before;
        change(&mut bucket, &mut after)?;
        for place in Sketch::<T>::places(hash) {
            let cell = &mut self.cells[place];
            cell.tally = cell.tally.follow(before, after);
            cell.bucket = cell.bucket.max(bucket);
        }
        self.latest = self.latest.max(bucket).max(after.full_at());
        Ok(())
    }

    /// True if it no longer holds any state.
    pub(super) fn is_empty(&self, now: u64) -> bool {
        self.live == 0 && self.latest <= now
    }

    /// Connections that are counted here.
    pub(super) fn live(&self) -> u32 {
        self.live
    }
}

impl Sketch<u32> {
    /// One more connection is counted here.
    pub(super) fn count(&mut self) {
        self.live += 1;
    }

    /// Takes a connection back that was counted here.
    pub(super) fn release(&mut self, hash: u64) {
        debug_assert!(self.live > 0, "a connection is taken back that was not counted");
        for place in Sketch::<u32>::places(hash) {
            let cell = &mut self.cells[place];
            cell.tally = cell.tally.saturating_sub(1);
        }
        self.live = self.live.saturating_sub(1);
    }

    /// Every bucket is full from now on.
    pub(super) fn forgive(&mut self) {
        self.cells.iter_mut().for_each(|cell| cell.bucket = 0);
        self.latest = 0;
    }
}

#[cfg(test)]
mod tests {
    use ringserve_base::random::Random;
    use ringserve_core::internals::Gcra;

    use super::super::rates::{Over, PrefixLimits};
    use super::*;

    fn charge(sketch: &mut Sketch<u32>, hash: u64, limits: &PrefixLimits, now: u64) -> Result<(), Over> {
        sketch.change(hash, |bucket, count| limits.charge(count, bucket, 0, (now, now)))?;
        sketch.count();
        Ok(())
    }

    #[test]
    fn sketch_errs_upwards_only_and_forgets_what_is_taken_back() {
        let random = Random::of_shard(1, 0);
        let mut sketch = Sketch::new().unwrap();
        let limits = PrefixLimits { at_once: u32::MAX, rate: None };
        let hashes: Vec<u64> = (0..3000).map(|_| random.next()).collect();
        for (n, hash) in hashes.iter().enumerate() {
            for _ in 0..n % 4 {
                charge(&mut sketch, *hash, &limits, 0).unwrap();
            }
        }
        let mut exact = 0;
        for (n, hash) in hashes.iter().enumerate() {
            let (_, count) = sketch.known_of(*hash);
            assert!(count as usize >= n % 4, "{count} of {} are known", n % 4);
            exact += usize::from(count as usize == n % 4);
        }
        // 3000 prefixes in rows of 1024: about three in each cell.
        println!("{exact} of 3000 are exact");
        for (n, hash) in hashes.iter().enumerate() {
            (0..n % 4).for_each(|_| sketch.release(*hash));
        }
        assert!(sketch.is_empty(0) && sketch.cells.iter().all(|cell| cell.tally == 0));
    }

    #[test]
    fn prefix_beside_others_keeps_its_rate() {
        let mut sketch = Sketch::new().unwrap();
        let limits = PrefixLimits { at_once: u32::MAX, rate: Some(Gcra::new(10, 5)) };
        let charged = (0..100).filter(|_| charge(&mut sketch, 7, &limits, 1000).is_ok()).count();
        assert_eq!(charged, 5);
        // Other cells in each row.
        assert!(charge(&mut sketch, !7, &limits, 1000).is_ok());
        assert!(!sketch.is_empty(1000) && sketch.live() == 6);
        let later = 1000 + 100_000_000;
        assert!(
            charge(&mut sketch, 7, &limits, later).is_ok() && charge(&mut sketch, 7, &limits, later).is_err()
        );
    }
}
