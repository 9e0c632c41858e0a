//! Durations, counted by one thread and read by any.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Each doubling of a time is divided into this many equal steps: a value is known to an eighth of
/// it.
const STEPS: usize = 8;

/// From 2^10 ns to 2^36 ns: a microsecond to a minute.
const LEAST_BITS: u32 = 10;
const MOST_BITS: u32 = 36;

const OCTAVES: usize = (MOST_BITS - LEAST_BITS) as usize;

/// One for all that is shorter, and one for all that is longer.
const CELLS: usize = 1 + OCTAVES * STEPS + 1;

/// The bits of a nanosecond count below the steps of the first octave.
const SHIFT: u32 = LEAST_BITS - STEPS.ilog2();

/// Counts of durations: 1.7 KB. Adding one is no locked instruction, since one thread adds.
pub(crate) struct Histogram {
    cells: [AtomicU64; CELLS],
    nanos: AtomicU64,
}

impl Histogram {
    pub(crate) fn new() -> Histogram {
        Histogram { cells: [const { AtomicU64::new(0) }; CELLS], nanos: AtomicU64::new(0) }
    }

    /// On its thread: adds a time in nanoseconds, as often as it stands for.
    #[inline]
    pub(crate) fn add(&self, nanos: u64, times: u64) {
        add(&self.cells[cell_of(nanos)], times);
        add(&self.nanos, nanos.wrapping_mul(times));
    }

    /// Adds what was counted so far to `sum`.
    pub(crate) fn add_to(&self, sum: &mut HistogramSum) {
        sum.nanos = sum.nanos.wrapping_add(self.nanos.load(Ordering::Relaxed));
        for (sum, cell) in sum.cells.iter_mut().zip(&self.cells) {
            *sum += cell.load(Ordering::Relaxed);
        }
    }
}

/// A load and a store, which cost less than an atomic addition: no other thread writes.
#[inline]
pub(crate) fn add(cell: &AtomicU64, n: u64) {
    cell.store(cell.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

#[inline]
fn cell_of(nanos: u64) -> usize {
    let steps = nanos >> SHIFT;
    if steps < STEPS as u64 {
        return 0;
    }
    let octave = steps.ilog2() - STEPS.ilog2();
    let cell = 1 + octave as usize * STEPS + ((steps >> octave) as usize - STEPS);
    cell.min(CELLS - 1)
}

/// The end of a cell's range, in nanoseconds.
#[cfg(feature = "admin")]
fn end_of(cell: usize) -> u64 {
    match cell.min(CELLS - 2) {
        0 => 1 << LEAST_BITS,
        cell => {
            let (octave, step) = ((cell - 1) / STEPS, (cell - 1) % STEPS);
            ((STEPS + step + 1) as u64) << (octave as u32 + SHIFT)
        }
    }
}

/// The sum of several histograms.
#[derive(Clone, Debug)]
pub(crate) struct HistogramSum {
    cells: [u64; CELLS],
    nanos: u64,
}

impl HistogramSum {
    pub(crate) fn new() -> HistogramSum {
        HistogramSum { cells: [0; CELLS], nanos: 0 }
    }

    pub(crate) fn count(&self) -> u64 {
        self.cells.iter().sum()
    }

    /// The sum of all times, in seconds.
    pub(crate) fn seconds(&self) -> f64 {
        self.nanos as f64 / 1e9
    }

    /// The least time that this share of all times does not exceed, rounded up to the end of its
    /// step. Times that are longer than a minute count as a minute.
    #[cfg(feature = "admin")]
    pub(crate) fn quantile(&self, share: f64) -> Duration {
        let least = (self.count() as f64 * share).ceil().max(1.0) as u64;
        let mut below = 0;
        let mut reaches = |cell: &&u64| {
            below += **cell;
            below >= least
        };
        let cell = self.cells.iter().take_while(|cell| !reaches(cell)).count();
        if self.count() == 0 { Duration::ZERO } else { Duration::from_nanos(end_of(cell)) }
    }

    /// Adds times that were shorter than the first step, for which nothing is in the sum.
    pub(crate) fn add_shortest(&mut self, times: u64) {
        self.cells[0] += times;
    }

    /// The same as [`buckets`](HistogramSum::buckets) from nothing on, one an octave.
    pub(crate) fn octaves(&self) -> Vec<(f64, u64)> {
        let halves = self.buckets(Duration::ZERO);
        // The first one is alone, and so is the one without an end.
        let (first, last) = (halves[0], halves[halves.len() - 1]);
        let pairs = halves[1..halves.len() - 1].chunks(2);
        let octaves = pairs.map(|pair| (pair[pair.len() - 1].0, pair.iter().map(|(_, count)| count).sum()));
        [first].into_iter().chain(octaves).chain([last]).collect()
    }

    /// Two buckets an octave: each one's end in seconds, and how many times lie between that and
    /// the end of the one before. What is shorter than `from` is in the first, and what is longer
    /// than a minute in the last, which has no end.
    pub(crate) fn buckets(&self, from: Duration) -> Vec<(f64, u64)> {
        let (mut buckets, mut begun) = (Vec::new(), self.cells[0]);
        if from <= Duration::from_nanos(1 << LEAST_BITS) {
            buckets.push((seconds(1 << LEAST_BITS), std::mem::take(&mut begun)));
        }
        for (half, cells) in self.cells[1..CELLS - 1].chunks(STEPS / 2).enumerate() {
            begun += cells.iter().sum::<u64>();
            // An octave ends at twice its beginning, and its first half at one and a half times
            // that.
            let halves = if half.is_multiple_of(2) { 3 } else { 4 };
            let end = halves << (LEAST_BITS as usize - 1 + half / 2);
            if Duration::from_nanos(end) >= from {
                buckets.push((seconds(end), std::mem::take(&mut begun)));
            }
        }
        buckets.push((f64::INFINITY, begun + self.cells[CELLS - 1]));
        buckets
    }
}

fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(times: &[Duration]) -> HistogramSum {
        let (histogram, mut sum) = (Histogram::new(), HistogramSum::new());
        times.iter().for_each(|time| histogram.add(time.as_nanos() as u64, 1));
        histogram.add_to(&mut sum);
        sum
    }

    #[test]
    fn each_time_is_in_the_bucket_that_holds_it() {
        let mut nanos = 1.0f64;
        while nanos < 5e11 {
            let time = Duration::from_nanos(nanos as u64);
            let mut from = 0.0;
            let sum = counted(&[time]);
            let (mut before, mut at) = (0, None);
            for (end, count) in sum.buckets(Duration::ZERO) {
                if count == 1 {
                    at = Some((from, end));
                }
                before += count;
                from = end;
            }
            let (from, end) = at.expect("it is counted");
            assert!(
                from <= time.as_secs_f64() && time.as_secs_f64() <= end,
                "{time:?} is not between {from} and {end}"
            );
            assert_eq!((before, sum.count()), (1, 1));
            nanos *= 1.07;
        }
    }

    #[cfg(feature = "admin")]
    #[test]
    fn quantiles_are_known_to_an_eighth() {
        let times: Vec<Duration> = (1..=1000).map(|n| Duration::from_micros(10 * n)).collect();
        let sum = counted(&times);
        for (share, micros) in [(0.5, 5000.0), (0.9, 9000.0), (0.99, 9900.0), (1.0, 10_000.0), (0.001, 10.0)]
        {
            let found = sum.quantile(share).as_secs_f64() * 1e6;
            assert!((micros..micros * 1.126).contains(&found), "{share}: {found} µs");
        }
        assert_eq!(counted(&[]).quantile(0.5), Duration::ZERO);
        assert_eq!(counted(&[Duration::from_nanos(1)]).quantile(0.5), Duration::from_nanos(1024));
        let long = counted(&[Duration::from_secs(1000)]).quantile(0.5);
        assert!((68..=69).contains(&long.as_secs()), "{long:?}");
    }

    #[test]
    fn buckets_are_half_octaves_without_a_gap() {
        let buckets = counted(&[]).buckets(Duration::ZERO);
        assert_eq!(buckets.len(), 1 + 2 * OCTAVES + 1);
        assert_eq!(
            buckets[..4].iter().map(|(end, _)| *end * 1e9).collect::<Vec<_>>(),
            [1024.0, 1536.0, 2048.0, 3072.0]
        );
        let ends: Vec<f64> = buckets.iter().map(|(end, _)| *end).collect();
        assert!(ends.is_sorted() && ends[ends.len() - 2] > 68.0 && ends[ends.len() - 1].is_infinite());
    }

    #[test]
    fn octaves_hold_what_their_halves_hold() {
        let mut sum =
            counted(&[Duration::from_micros(3), Duration::from_micros(4), Duration::from_secs(100)]);
        sum.add_shortest(5);
        let octaves = sum.octaves();
        assert_eq!(octaves.len(), 1 + OCTAVES + 1);
        let found: Vec<(u64, u64)> =
            octaves[..4].iter().map(|(end, count)| ((end * 1e9).round() as u64, *count)).collect();
        assert_eq!(found, [(1024, 5), (2048, 0), (4096, 2), (8192, 0)]);
        assert_eq!((octaves[octaves.len() - 1].1, sum.count()), (1, 8));
    }

    #[test]
    fn what_is_too_short_or_too_long_is_counted_too() {
        let sum =
            counted(&[Duration::ZERO, Duration::from_millis(1), Duration::from_secs(100), Duration::MAX]);
        let buckets = sum.buckets(Duration::from_millis(16));
        assert_eq!((buckets[0].1, buckets[buckets.len() - 1].1, sum.count()), (2, 2, 4));
        assert!((0.016..0.025).contains(&buckets[0].0), "{}", buckets[0].0);
    }

    #[test]
    fn time_may_stand_for_several() {
        let (histogram, mut sum) = (Histogram::new(), HistogramSum::new());
        histogram.add(3_000_000, 16);
        histogram.add(2_000_000, 1);
        histogram.add_to(&mut sum);
        histogram.add_to(&mut sum);
        assert_eq!(sum.count(), 34);
        assert!((sum.seconds() - 0.1).abs() < 1e-9, "{}", sum.seconds());
    }
}
