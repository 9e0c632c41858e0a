//! The rate limit of a peer, counted in another way than in the core: the excess over the rate,
//! which time reduces.

use ringserve_core::{Limits, ReadRateAction};

/// Nanoseconds of a second.
const SECOND: u128 = 1_000_000_000;

/// Excess of one connection over its rates. Levels are in billionths, of a frame and of a byte.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    at: u64,
    frames: u128,
    bytes: u128,
}

impl Pace {
    /// True if these limits include a rate.
    pub fn limits(limits: &Limits) -> bool {
        limits.read_frames_per_second_max > 0 || limits.read_bytes_per_second_max > 0
    }

    /// True if they do, and frames wait for it.
    pub fn holds_back(limits: &Limits) -> bool {
        Pace::limits(limits) && limits.when_read_too_fast == ReadRateAction::HoldBack
    }

    /// Charges a frame of `bytes` bytes at `now`.
    pub fn pay(&mut self, limits: &Limits, bytes: usize, now: u64) {
        *self = self.at(limits, now);
        self.frames += SECOND;
        self.bytes += bytes as u128 * SECOND;
    }

    /// True if the next frame comes too early at `now`.
    pub fn is_early(&self, limits: &Limits, now: u64) -> bool {
        let (frames, bytes) = rates(limits);
        let then = self.at(limits, now);
        (frames > 0 && then.frames + SECOND > frames * SECOND) || (bytes > 0 && then.bytes >= bytes * SECOND)
    }

    /// The levels at `now`.
    fn at(&self, limits: &Limits, now: u64) -> Pace {
        let time = u128::from(now.saturating_sub(self.at));
        let (frames, bytes) = rates(limits);
        Pace {
            at: now.max(self.at),
            frames: self.frames.saturating_sub(frames * time),
            bytes: self.bytes.saturating_sub(bytes * time),
        }
    }
}

/// Frames and bytes of a second.
fn rates(limits: &Limits) -> (u128, u128) {
    (u128::from(limits.read_frames_per_second_max), limits.read_bytes_per_second_max as u128)
}
