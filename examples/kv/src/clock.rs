//! The clocks of a shard.

use std::time::Duration;
#[cfg(not(test))]
use std::time::{SystemTime, UNIX_EPOCH};

use ringserve::Shard;
use ringserve::time::Time;

/// What a shard reads the time from. Keys end by the clock of its server, which a test may simulate.
pub enum Clock {
    /// That of the shard, which began at this time.
    Of(Shard, Time),
    /// That of a test without a shard: it stands at the start.
    #[cfg(test)]
    Stopped,
}

/// The Unix time, in milliseconds, at which shards of tests began.
#[cfg(test)]
pub const UNIX_START: i64 = 1_000_000_000_000;

impl Clock {
    /// The clock of a shard that begins now.
    pub fn of(shard: &Shard) -> Clock {
        Clock::Of(shard.clone(), shard.now())
    }

    /// The time since the shard began.
    pub fn elapsed(&self) -> Duration {
        match self {
            Clock::Of(shard, started) => shard.now() - *started,
            #[cfg(test)]
            Clock::Stopped => Duration::ZERO,
        }
    }

    /// Milliseconds since 1970, `elapsed` milliseconds after the shard began; 0 if the system's clock stands before 1970.
    #[cfg(not(test))]
    pub fn unix_millis(&self, _elapsed: u64) -> i64 {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as i64)
    }

    /// Of a test: no clock of the system is simulated.
    #[cfg(test)]
    pub fn unix_millis(&self, elapsed: u64) -> i64 {
        UNIX_START + elapsed as i64
    }
}
