//! A bound on retries, so that an outage is not multiplied by those who ask again.

/// A second in parts, so that what was not used is forgotten little by little.
const SLOTS: usize = 4;

/// Nanoseconds of a part.
const SLOT: u64 = super::SECOND / SLOTS as u64;

/// Units of a token.
const TOKEN: u64 = 1000;

/// Retries that may be made: a share of the requests and some a second, and what was not used
/// within a second is gone.
///
/// A cap of ten seconds, as is common, lets two retries for each request through in the first
/// second of an outage.
#[derive(Clone, Debug)]
pub(crate) struct Budget {
    /// Units for each request, and for each part of a second.
    request: u64,
    slot: u64,
    /// The units left of each part of the last second.
    units: [u64; SLOTS],
    /// The newest part.
    newest: u64,
}

impl Budget {
    /// A budget of `percent` of the requests, and of `per_second` more each second.
    pub(crate) fn new(percent: u32, per_second: u32) -> Budget {
        Budget {
            request: u64::from(percent) * TOKEN / 100,
            slot: u64::from(per_second) * TOKEN / SLOTS as u64,
            units: [0; SLOTS],
            newest: 0,
        }
    }

    /// Counts requests.
    pub(crate) fn add(&mut self, now: u64, requests: u64) {
        self.advance(now);
        self.units[self.newest as usize % SLOTS] += requests * self.request;
    }

    /// Takes a token for a retry. False if there is none.
    pub(crate) fn take(&mut self, now: u64) -> bool {
        self.advance(now);
        if self.units.iter().sum::<u64>() < TOKEN {
            return false;
        }
        let mut owed = TOKEN;
        // The oldest first: they are gone soon.
        for behind in (0..SLOTS as u64).rev() {
            let units = &mut self.units[(self.newest + SLOTS as u64 - behind) as usize % SLOTS];
            let taken = owed.min(*units);
            *units -= taken;
            owed -= taken;
        }
        true
    }

    /// Begins again, with a clock that may begin earlier.
    pub(crate) fn forgets_times(&mut self) {
        (self.units, self.newest) = ([0; SLOTS], 0);
    }

    fn advance(&mut self, now: u64) {
        let slot = now / SLOT;
        if slot <= self.newest {
            return;
        }
        for gone in (self.newest + 1).max(slot.saturating_sub(SLOTS as u64 - 1))..=slot {
            self.units[gone as usize % SLOTS] = self.slot;
        }
        self.newest = slot;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::SECOND;
    use super::*;

    #[test]
    fn quiet_hour_saves_no_more_than_a_second() {
        let mut budget = Budget::new(20, 10);
        budget.add(0, 1_000_000);
        let now = 3600 * SECOND;
        let taken = (0..1000).filter(|_| budget.take(now)).count();
        assert_eq!(taken, 10);
    }

    #[test]
    fn few_requests_may_be_tried_again_too() {
        let mut budget = Budget::new(20, 10);
        let mut taken = 0;
        for n in 0..100 {
            // Ten a second.
            let now = 100 * SECOND + n * SECOND / 10;
            budget.add(now, 1);
            taken += u32::from(budget.take(now));
        }
        assert_eq!(taken, 100);
    }

    proptest! {
        #[test]
        fn retries_are_within_the_budget_in_any_window(
            steps in prop::collection::vec((0u64..SECOND / 5, 0u64..50, 0u32..100), 1..60),
        ) {
            let (mut budget, mut now) = (Budget::new(20, 10), 50 * SECOND);
            let mut log = Vec::new();
            for (gap, requests, tries) in steps {
                now += gap;
                budget.add(now, requests);
                let retries = (0..tries).filter(|_| budget.take(now)).count() as f64;
                log.push((now, requests as f64, retries));
            }
            for (index, (from, ..)) in log.iter().enumerate() {
                for (until, ..) in &log[index..] {
                    let within = || log.iter().filter(|(at, ..)| (from..=until).contains(&at));
                    let before = log.iter().filter(|(at, ..)| at < from && at + SECOND >= *from);
                    let requests: f64 = within().chain(before).map(|(_, requests, _)| requests).sum();
                    let retries: f64 = within().map(|(.., retries)| retries).sum();
                    let seconds = (until - from) as f64 / SECOND as f64;
                    prop_assert!(retries <= 0.2 * requests + 10.0 * (seconds + 1.25), "{retries}");
                }
            }
        }
    }
}
