//! Progress of long work, on standard error.

use std::time::{Duration, Instant};

/// Interval of reports. Shorter work prints none.
const SAID_EVERY: Duration = Duration::from_secs(2);

/// Work on counted things, from `from` to `all`.
pub(super) struct Progress<'a> {
    name: &'a str,
    what: &'static str,
    from: usize,
    all: usize,
    began: Instant,
    said: Instant,
}

impl<'a> Progress<'a> {
    /// Creates the progress of work that begins now.
    pub(super) fn new(name: &'a str, what: &'static str, from: usize, all: usize) -> Progress<'a> {
        let began = Instant::now();
        Progress { name, what, from, all, began, said: began }
    }

    /// Prints the progress, unless that was done a moment ago.
    pub(super) fn at(&mut self, done: usize) {
        if self.said.elapsed() < SAID_EVERY {
            return;
        }
        self.said = Instant::now();
        eprintln!("{}: {}", self.name, self.line(done, self.began.elapsed()));
    }

    /// Time since it began.
    pub(super) fn took(&self) -> Duration {
        self.began.elapsed()
    }

    fn line(&self, done: usize, elapsed: Duration) -> String {
        let rate = done.saturating_sub(self.from) as f64 / elapsed.as_secs_f64();
        let said = format!("{done} of {} {}, {rate:.0}/s", self.all, self.what);
        if rate < 1.0 {
            return said;
        }
        format!("{said}, {:.0} s left", self.all.saturating_sub(done) as f64 / rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_counts_from_where_it_began() {
        let progress = Progress::new("x", "open", 1000, 11_000);
        let line = progress.line(6000, Duration::from_secs(5));
        assert_eq!(line, "6000 of 11000 open, 1000/s, 5 s left");
    }

    #[test]
    fn nothing_done_has_no_end_in_sight() {
        let progress = Progress::new("x", "open", 1000, 11_000);
        assert_eq!(progress.line(1000, Duration::from_secs(5)), "1000 of 11000 open, 0/s");
    }
}
