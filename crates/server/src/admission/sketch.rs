//! Counts of prefixes for which a table has no room: four rows of cells that many prefixes share.
//!
//! A prefix has a cell in each row, and what is known of it is the least of the four. Others may have raised each of them, and
//! none lowers them below what is true, so it errs upwards only: a prefix may be refused early, and is never let in beyond its
//! limit.

use super::rates::{Over, PrefixLimits};

/// Four rows: that all four cells of a prefix are shared becomes seldom, and each costs a cache miss.
const ROWS: usize = 4;

/// Bits of a column's number. 64 stripes with 1024 columns have 65 536 cells in each row, and 4 MiB in all.
const COLUMN_BITS: u32 = 10;
const COLUMNS: usize = 1 << COLUMN_BITS;

#[derive(Clone, Copy, Default)]
struct Cell {
    /// The bucket of the rate.
    bucket: u64,
    /// Connections.
    count: u32,
}

/// The cells of one stripe.
pub(super) struct Sketch {
    cells: Box<[Cell]>,
    /// Connections that are counted here.
    live: u32,
    /// The latest bucket.
    latest: u64,
}

impl Sketch {
    /// `None` if the system has no memory for it.
    pub(super) fn new() -> Option<Sketch> {
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

    /// Connections of a prefix and the bucket of its rate, or more.
    pub(super) fn known_of(&self, hash: u64) -> (u32, u64) {
        let cells = Sketch::places(hash).map(|place| self.cells[place]);
        let least = |known: (u32, u64), cell: &Cell| (known.0.min(cell.count), known.1.min(cell.bucket));
        cells.iter().fold((u32::MAX, u64::MAX), least)
    }

    /// Counts a connection.
    ///
    /// # Errors
    /// If the prefix may have no more.
    pub(super) fn charge(&mut self, hash: u64, limits: &PrefixLimits, now: u64) -> Result<(), Over> {
        let (mut count, mut bucket) = self.known_of(hash);
        limits.charge(&mut count, &mut bucket, 0, now)?;
        for place in Sketch::places(hash) {
            let cell = &mut self.cells[place];
            cell.count += 1;
            cell.bucket = cell.bucket.max(bucket);
        }
        self.live += 1;
        self.latest = self.latest.max(bucket);
        Ok(())
    }

    /// Takes a connection back that was counted here.
    pub(super) fn release(&mut self, hash: u64) {
        debug_assert!(self.live > 0, "a connection is taken back that was not counted");
        for place in Sketch::places(hash) {
            let cell = &mut self.cells[place];
            cell.count = cell.count.saturating_sub(1);
        }
        self.live = self.live.saturating_sub(1);
    }

    /// Every bucket is full from now on.
    pub(super) fn forgive(&mut self) {
        self.cells.iter_mut().for_each(|cell| cell.bucket = 0);
        self.latest = 0;
    }

    /// True if it knows nothing any more.
    pub(super) fn is_empty(&self, now: u64) -> bool {
        self.live == 0 && self.latest <= now
    }

    /// Connections that are counted here.
    pub(super) fn live(&self) -> u32 {
        self.live
    }
}

#[cfg(test)]
mod tests {
    use ringserve_core::internals::Gcra;

    use super::*;
    use crate::shard::random::Random;

    #[test]
    fn sketch_errs_upwards_only_and_forgets_what_is_taken_back() {
        let random = Random::of_shard(1, 0);
        let mut sketch = Sketch::new().unwrap();
        let limits = PrefixLimits { at_once: u32::MAX, rate: None };
        let hashes: Vec<u64> = (0..3000).map(|_| random.next()).collect();
        for (n, hash) in hashes.iter().enumerate() {
            for _ in 0..n % 4 {
                sketch.charge(*hash, &limits, 0).unwrap();
            }
        }
        let mut exact = 0;
        for (n, hash) in hashes.iter().enumerate() {
            let (count, _) = sketch.known_of(*hash);
            assert!(count as usize >= n % 4, "{count} of {} are known", n % 4);
            exact += usize::from(count as usize == n % 4);
        }
        // 3000 prefixes in rows of 1024: about three in each cell.
        println!("{exact} of 3000 are exact");
        for (n, hash) in hashes.iter().enumerate() {
            (0..n % 4).for_each(|_| sketch.release(*hash));
        }
        assert!(sketch.is_empty(0) && sketch.cells.iter().all(|cell| cell.count == 0));
    }

    #[test]
    fn prefix_beside_others_keeps_its_rate() {
        let mut sketch = Sketch::new().unwrap();
        let limits = PrefixLimits { at_once: u32::MAX, rate: Some(Gcra::new(10, 5)) };
        let charged = (0..100).filter(|_| sketch.charge(7, &limits, 1000).is_ok()).count();
        assert_eq!(charged, 5);
        // Other cells in each row.
        assert!(sketch.charge(!7, &limits, 1000).is_ok());
        assert!(!sketch.is_empty(1000) && sketch.live() == 6);
        let later = 1000 + 100_000_000;
        assert!(sketch.charge(7, &limits, later).is_ok() && sketch.charge(7, &limits, later).is_err());
    }
}
