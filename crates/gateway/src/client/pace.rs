//! The pace at which a client sends the body of a request.

use std::time::Duration;

use ringserve_server::time::Time;

/// The time over which a rate is measured. Only time in which the client is waited for counts.
const WINDOW: Duration = Duration::from_secs(30);

/// When a client sent, and how long it was waited for.
#[derive(Clone, Copy, Default)]
pub(crate) struct Pace {
    /// Bytes that it has to send in a window; 0 is no bound.
    bytes_min: u64,
    /// Since when the client is waited for, if it is.
    waits_since: Option<Time>,
    /// When the last piece came, or the end.
    last: Option<Time>,
    /// Time in which the client was waited for, and its bytes, within the present window.
    waited: Duration,
    bytes: u64,
}

impl Pace {
    pub(super) fn new(bytes_per_second_min: u32) -> Pace {
        Pace { bytes_min: u64::from(bytes_per_second_min) * WINDOW.as_secs(), ..Pace::default() }
    }

    pub(super) fn begins_to_wait(&mut self, now: Time) {
        self.waits_since = Some(now);
    }

    pub(super) fn has_come(&mut self, now: Time, bytes: usize) {
        if let Some(since) = self.waits_since.take() {
            self.waited += now - since;
        }
        if self.waited >= WINDOW && self.bytes >= self.bytes_min {
            (self.waited, self.bytes) = (self.waited - WINDOW, 0);
        }
        self.last = Some(now);
        self.bytes += bytes as u64;
    }

    /// True while the next byte is the client's to send.
    pub(crate) fn is_waiting(&self) -> bool {
        self.waits_since.is_some()
    }

    /// When the last piece came.
    pub(crate) fn last(&self) -> Option<Time> {
        self.last
    }

    /// A time within which no client that is not yet waited for is too slow, or little more.
    pub(crate) fn rest(&self) -> Duration {
        WINDOW.saturating_sub(self.waited).max(Duration::from_secs(1))
    }

    /// When a client that is waited for will have been too slow, if no byte comes. `None` without a
    /// bound, and if it is not waited for.
    pub(crate) fn too_slow_at(&self) -> Option<Time> {
        let since = self.waits_since.filter(|_| self.bytes_min > 0)?;
        let rest = WINDOW.saturating_sub(self.waited);
        // One that has sent enough has the next window too.
        let more = if self.bytes >= self.bytes_min { WINDOW } else { Duration::ZERO };
        Some(since + rest + more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// When a client is too slow that sends `bytes` each `seconds`.
    fn too_slow_after(bytes: usize, seconds: u64, waits: bool) -> Option<u64> {
        let mut pace = Pace::new(240);
        let mut now = Time::default();
        for _ in 0..1000 {
            if waits {
                pace.begins_to_wait(now);
            }
            let next = now + Duration::from_secs(seconds);
            if let Some(at) = pace.too_slow_at().filter(|at| *at < next) {
                return Some((at - Time::default()).as_secs());
            }
            pace.has_come(next, bytes);
            now = next;
        }
        None
    }

    #[test]
    fn client_below_the_rate_is_too_slow_after_a_window() {
        assert_eq!(too_slow_after(1, 50, true), Some(30));
        assert_eq!(too_slow_after(1, 7, true), Some(30));
        assert_eq!(too_slow_after(239 * 7, 7, true), Some(30));
        assert_eq!(too_slow_after(260 * 7, 7, true), None);
        assert_eq!(too_slow_after(8000, 29, true), None);
        // What it sent before it stopped is enough for one window.
        assert_eq!(too_slow_after(1 << 30, 100, true), Some(30));
        // While the backend takes nothing, the client owes nothing.
        assert_eq!(too_slow_after(1, 50, false), None);
    }
}
