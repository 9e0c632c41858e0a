//! The rate at which a peer may send: a bucket of frames and one of bytes for each connection that
//! has such limits.
//!
//! ```text
//!   frame ─▶ is there a frame, and is the last one paid for in bytes? ─▶ it is handed out, and both buckets pay
//!                                  │ no
//!                                  ▼
//!             HoldBack: wait until both are      Close: CloseReason::ReadTooFast
//! ```
//!
//! A bucket holds what a second gives. A frame is paid for in bytes once its length is known, so a
//! large one may leave a debt. The time is that of the turn: no frame reads a clock.

use core::time::Duration;

use crate::tables::Chunked;
use crate::time::{Gcra, SECOND, time_of};
use crate::{Limits, ReadRateAction, Time};

/// The longest wait before a connection that is held back is looked at again: its debt may be an
/// hour.
const LOOKS_EVERY: Duration = Duration::from_secs(1);

/// The rates at which a connection's peer may send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReadRates {
    frames: Option<Gcra>,
    /// Bytes in a second; 0 is off.
    bytes: u64,
    pub(crate) when_too_fast: ReadRateAction,
}

impl ReadRates {
    /// `None` if neither is limited.
    pub(crate) fn new(limits: &Limits) -> Option<ReadRates> {
        let (frames, bytes) = (limits.read_frames_per_second_max, limits.read_bytes_per_second_max as u64);
        let when_too_fast = limits.when_read_too_fast;
        let gcra = (frames > 0).then(|| Gcra::new(frames, frames));
        (frames > 0 || bytes > 0).then_some(ReadRates { frames: gcra, bytes, when_too_fast })
    }
}

/// The rates of one connection's peer, and the state of its buckets.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    pub(crate) rates: ReadRates,
    /// The time when the bucket of frames is full again; for bytes, when it is paid for.
    frames: u64,
    bytes: u64,
}

impl Meter {
    /// A meter whose buckets are full.
    pub(crate) fn new(rates: ReadRates) -> Meter {
        Meter { rates, frames: 0, bytes: 0 }
    }

    /// The time that the next frame has to wait. `None` if it need not.
    pub(crate) fn wait(&self, now: Time) -> Option<Duration> {
        let now = now.as_nanos();
        let frames = self.rates.frames.map_or(0, |gcra| gcra.has(self.frames, 1));
        // As soon as the debt is below a whole second's worth, at least one byte is available.
        let bytes = self.bytes.saturating_sub(SECOND - 1);
        let wait = frames.max(bytes).saturating_sub(now);
        (wait > 0).then(|| Duration::from_nanos(wait).min(LOOKS_EVERY))
    }

    /// Pays for a frame of `bytes` bytes that goes to the service.
    pub(crate) fn pay(&mut self, bytes: usize, now: Time) {
        let now = now.as_nanos();
        if let Some(gcra) = self.rates.frames {
            self.frames = gcra.pay(self.frames, now);
        }
        if self.rates.bytes > 0 {
            self.bytes = self.bytes.max(now) + time_of(bytes as u64, self.rates.bytes);
        }
    }
}

/// The meters of connections that have one, by slot. Holds no memory until there is one.
pub(crate) type Meters = Chunked<Meter>;

#[cfg(test)]
mod tests {
    use super::*;

    fn meter(frames: u32, bytes: usize) -> Meter {
        let limits = Limits::default().read_frames_per_second_max(frames).read_bytes_per_second_max(bytes);
        Meter::new(ReadRates::new(&limits).unwrap_or_default())
    }

    /// Sends frames of `bytes` bytes as fast as it may for ten seconds, and counts those of each
    /// second.
    fn frames_by_second(meter: &mut Meter, bytes: usize) -> [usize; 10] {
        let mut by_second = [0; 10];
        for millis in 0..10_000u64 {
            let now = Time::from_nanos((3_600_000 + millis) * 1_000_000);
            while meter.wait(now).is_none() {
                meter.pay(bytes, now);
                by_second[millis as usize / 1000] += 1;
                assert!(by_second[millis as usize / 1000] < 1_000_000, "no limit holds");
            }
        }
        by_second
    }

    #[test]
    fn limits_that_are_off_have_no_rates() {
        assert!(ReadRates::new(&Limits::default()).is_none());
        let unlimited = Meter::default();
        assert_eq!(unlimited.wait(Time::ZERO), None);
        assert_eq!(size_of::<Meter>(), 56, "as the docs of the limits say");
    }

    #[test]
    fn frames_come_at_once_for_a_second_and_then_at_their_rate() {
        let by_second = frames_by_second(&mut meter(100, 0), 7);
        // Those of the first second, and the rate's share of that second.
        assert_eq!((by_second[0], by_second[1], by_second[9]), (199, 100, 100));
    }

    #[test]
    fn bytes_are_paid_behind_the_frame_that_brought_them() {
        let by_second = frames_by_second(&mut meter(0, 1000), 100);
        assert!(
            (19..=20).contains(&by_second[0]) && by_second[1..].iter().all(|n| *n == 10),
            "{by_second:?}"
        );
        // A frame larger than a second's worth is handed out, and holds up the next ones.
        let mut large = meter(0, 1000);
        large.pay(5000, Time::ZERO);
        assert_eq!(large.wait(Time::ZERO), Some(LOOKS_EVERY));
        assert_eq!(large.wait(Time::from_nanos(4 * SECOND)), Some(Duration::from_nanos(1)));
        assert_eq!(large.wait(Time::from_nanos(4 * SECOND + 1)), None);
    }

    #[test]
    fn slower_one_of_two_limits_holds() {
        assert_eq!(frames_by_second(&mut meter(5, 1_000_000), 10)[9], 5);
        assert_eq!(frames_by_second(&mut meter(1000, 50), 10)[9], 5);
    }

    #[test]
    fn fastest_rate_counts_the_largest_frame() {
        let mut meter = meter(1_000_000, 1 << 30);
        let now = Time::from_nanos(u64::MAX / 4);
        meter.pay(1 << 30, now);
        meter.pay(1 << 30, now);
        assert_eq!(meter.bytes - now.as_nanos(), 2 * SECOND);
    }
}
