//! The time that a backend takes, as an average that believes a bad sample at once and a good one
//! slowly.

use super::SECOND;

/// The time constant of an average: after this time a sample has a weight of 37 %.
const TAU: f64 = 10.0 * SECOND as f64;

/// An average without a sample for this long no longer says anything about the backend.
const OLD_AFTER: u64 = 30 * SECOND;

/// A backend's time, in nanoseconds, as a peak that decays.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Ewma {
    nanos: f64,
    /// The last sample; `None` before the first one.
    at: Option<u64>,
}

impl Ewma {
    pub(crate) const NEW: Ewma = Ewma { nanos: 0.0, at: None };

    /// The average as it is at `now`, which decays by the clock: else a backend that failed once
    /// would never be asked again. `None` if it has no sample, or only old ones; the caller takes
    /// the median of the others then.
    pub(crate) fn read(&self, now: u64) -> Option<f64> {
        let age = now.saturating_sub(self.at?);
        (age < OLD_AFTER).then(|| self.nanos * kept(age))
    }

    /// Counts a sample. One above the average replaces it; one below draws it down by the time
    /// since the last one.
    pub(crate) fn sample(&mut self, now: u64, nanos: u64) {
        let sample = nanos as f64;
        self.nanos = match self.at {
            Some(at) if sample < self.nanos && now.saturating_sub(at) < OLD_AFTER => {
                let kept = kept(now.saturating_sub(at));
                self.nanos * kept + sample * (1.0 - kept)
            }
            _ => sample,
        };
        self.at = Some(now);
    }

    /// Counts a time that was not over: the average is at least that.
    pub(crate) fn at_least(&mut self, now: u64, nanos: u64) {
        if self.read(now).is_none_or(|average| average < nanos as f64) {
            self.sample(now, nanos);
        }
    }
}

/// The weight of what is this old.
fn kept(age: u64) -> f64 {
    let x = age as f64 / TAU;
    // Within one part in 20 000, for a tenth of the time of `exp`. Busy backends have a sample each
    // millisecond.
    if x < 0.01 { 1.0 - x } else { (-x).exp() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn bad_sample_counts_at_once_and_good_one_slowly() {
        let mut ewma = Ewma::NEW;
        assert_eq!(ewma.read(0), None);
        ewma.sample(0, 5 * MS);
        ewma.sample(MS, 50 * MS);
        assert_eq!(ewma.read(MS), Some(50e6));
        ewma.sample(2 * MS, MS);
        assert!(ewma.read(2 * MS).unwrap() > 49e6);
        ewma.at_least(3 * MS, 10 * MS);
        assert!(ewma.read(3 * MS).unwrap() > 49e6, "a shorter time that was not over says nothing");
        ewma.at_least(3 * MS, 60 * MS);
        assert_eq!(ewma.read(3 * MS), Some(60e6));
    }

    #[test]
    fn penalty_decays_by_the_clock_and_is_forgotten() {
        let mut ewma = Ewma::NEW;
        ewma.sample(0, 5 * SECOND);
        let after = |seconds| ewma.read(seconds * SECOND);
        assert!(after(10).unwrap() < after(9).unwrap());
        assert!((after(10).unwrap() / 5e9 - 0.3679).abs() < 0.001);
        assert_eq!(after(30), None);
        // Else a twentieth of the penalty would keep it out for as long again.
        ewma.sample(30 * SECOND, MS);
        assert_eq!(ewma.read(30 * SECOND), Some(1e6));
    }

    proptest! {
        #[test]
        fn average_is_between_its_samples(samples in prop::collection::vec((0..SECOND, 0..10 * SECOND), 1..50)) {
            let (mut ewma, mut now) = (Ewma::NEW, 0);
            for (gap, nanos) in &samples {
                now += gap;
                ewma.sample(now, *nanos);
                let average = ewma.read(now).unwrap();
                let most = samples.iter().map(|(_, nanos)| *nanos).max().unwrap() as f64;
                prop_assert!((0.0..=most + 1.0).contains(&average) && average + 1.0 >= *nanos as f64);
            }
        }
    }
}
