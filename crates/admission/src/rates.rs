//! Limits as a program sets them: how many at once, how many a second, and how many after a pause.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use ringserve_core::AcceptRate;
use ringserve_core::internals::{Gcra, SharedGcra};

/// The largest rate and the largest burst. A bucket counts in nanoseconds, so an interval is exact
/// to a thousandth here.
const RATE_MAX: u32 = 1_000_000;

/// The longest slope: beyond, a server would be slow for reasons that are forgotten.
const SLOW_START_MAX: Duration = Duration::from_secs(3600);

/// Connections a second, with a burst.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rate {
    pub(super) per_second: u32,
    pub(super) burst: u32,
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} a second and {} at once", self.per_second, self.burst)
    }
}

impl Rate {
    /// # Errors
    /// A number that is out of range, of the setting with this name.
    pub(super) fn check(self, name: &str) -> Result<Rate, String> {
        let Rate { per_second, burst } = self;
        for (what, value) in [("rate", per_second), ("burst", burst)] {
            if !(1..=RATE_MAX).contains(&value) {
                return Err(format!(
                    "the {what} of {name} is {value}; it must be 1 to {RATE_MAX}, or leave {name} out"
                ));
            }
        }
        Ok(self)
    }

    pub(super) fn gcra(self) -> Gcra {
        Gcra::new(self.per_second, self.burst)
    }
}

/// The rate of a server, and the time in which it rises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerRate {
    rate: Rate,
    slow_start: Duration,
}

impl ServerRate {
    /// # Errors
    /// A number that is out of range, or a rise of a rate that is not set.
    pub(super) fn check(
        rate: Option<Rate>,
        slow_start: Option<Duration>,
    ) -> Result<Option<ServerRate>, String> {
        let Some(rate) = rate else {
            return match slow_start {
                None => Ok(None),
                Some(time) => Err(format!(
                    "slow_start is {time:?}, and there is no accept_rate that could rise; set that, or leave slow_start out"
                )),
            };
        };
        let slow_start = slow_start.unwrap_or_default();
        if slow_start > SLOW_START_MAX {
            return Err(format!("slow_start is {slow_start:?}; it must be at most {SLOW_START_MAX:?}"));
        }
        Ok(Some(ServerRate { rate: rate.check("accept_rate")?, slow_start }))
    }

    /// The same for each shard of a server.
    pub fn shared(self) -> AcceptRate {
        AcceptRate::new(self.rate.per_second, self.rate.burst, self.slow_start)
    }

    pub(super) fn rate(self) -> Rate {
        self.rate
    }
}

/// A limit that a prefix reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    Count,
    Rate,
    /// The system has no memory to count it.
    Memory,
}

/// The limits of each prefix.
#[derive(Clone, Copy, Debug)]
pub struct PrefixLimits {
    /// Connections at once.
    pub at_once: u32,
    pub rate: Option<Gcra>,
}

/// The same where they may be changed while shards count.
pub(super) struct SharedLimits {
    at_once: AtomicU32,
    rate: SharedGcra,
    /// There was a rate at some time, by which entries may be idle.
    has_had_rate: AtomicBool,
}

impl SharedLimits {
    pub(super) fn new(limits: PrefixLimits) -> SharedLimits {
        let shared = SharedLimits {
            at_once: AtomicU32::new(u32::MAX),
            rate: SharedGcra::default(),
            has_had_rate: AtomicBool::new(false),
        };
        shared.set(limits);
        shared
    }

    #[inline]
    pub(super) fn get(&self) -> PrefixLimits {
        PrefixLimits { at_once: self.at_once.load(Ordering::Relaxed), rate: self.rate.get() }
    }

    pub(super) fn has_had_rate(&self) -> bool {
        self.has_had_rate.load(Ordering::Relaxed)
    }

    pub(super) fn set(&self, limits: PrefixLimits) {
        if limits.rate.is_some() {
            self.has_had_rate.store(true, Ordering::Relaxed);
        }
        self.at_once.store(limits.at_once, Ordering::Relaxed);
        self.rate.set(limits.rate);
    }
}

impl PrefixLimits {
    /// Counts a connection, if the prefix may have one more. Of `beside` nothing is known but that
    /// they are the prefix's, or may be. It came between `from` and `now`.
    #[inline]
    pub(super) fn charge(
        &self,
        count: &mut u32,
        bucket: &mut u64,
        beside: u32,
        (from, now): (u64, u64),
    ) -> Result<(), Over> {
        if count.saturating_add(beside) >= self.at_once {
            return Err(Over::Count);
        }
        if let Some(rate) = &self.rate {
            *bucket = rate.take_since(*bucket, from, now).ok_or(Over::Rate)?;
        }
        *count += 1;
        Ok(())
    }
}
