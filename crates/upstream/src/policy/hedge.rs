//! The time after which a question that has no answer yet is asked of another backend too.

/// Times that are remembered.
const REMEMBERED: usize = 1000;

/// Fewer times than this say nothing.
const LEAST: usize = 100;

/// New times until the delay is found again.
const FOUND_EACH: usize = 50;

/// The times of the last answers, and the one that most of them do not exceed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Times {
    /// In microseconds.
    times: Vec<u32>,
    next: usize,
    news: usize,
    /// In nanoseconds.
    delay: Option<u64>,
}

impl Times {
    /// Notes how long an answer took. `percent` of all are to be quicker than the delay.
    pub(crate) fn add(&mut self, nanos: u64, percent: u32) {
        let micros = u32::try_from(nanos / 1000).unwrap_or(u32::MAX);
        match self.times.get_mut(self.next) {
            Some(time) => *time = micros,
            None => self.times.push(micros),
        }
        self.next = (self.next + 1) % REMEMBERED;
        self.news += 1;
        if self.times.len() < LEAST || self.news < FOUND_EACH {
            return;
        }
        self.news = 0;
        let mut sorted = self.times.clone();
        let place = (sorted.len() * percent as usize / 100).min(sorted.len() - 1);
        let (_, time, _) = sorted.select_nth_unstable(place);
        self.delay = Some(u64::from(*time).saturating_mul(1000));
    }

    /// Nanoseconds after which another backend is asked too. `None` while too little is known.
    pub(crate) fn delay(&self) -> Option<u64> {
        self.delay
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delay_is_that_of_the_last_thousand() {
        let mut times = Times::default();
        (1..100).for_each(|n| times.add(n * 1000, 95));
        assert_eq!(times.delay(), None);
        (100..=1000).for_each(|n| times.add(n * 1000, 95));
        assert_eq!(times.delay(), Some(951_000));
        (0..1000).for_each(|_| times.add(7000, 95));
        assert_eq!(times.delay(), Some(7000));
    }
}
