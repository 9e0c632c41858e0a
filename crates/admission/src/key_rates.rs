//! Rates of what several connections have in common: a user, an API key, a tenant.
//!
//! ```text
//!   key ──hash──▶ the table of admission ──▶ entry: bucket of frames, bucket of bytes
//! ```

use std::error::Error;
use std::fmt;
use std::hash::Hash;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ringserve_core::internals::UnitRate;

use super::key_stats::{KeepsRates, KeyRatesStats};
use super::rates::Rate;
use super::sketch::Tally;
use super::table::{NoMemory, TRACKED, Table};
use super::{AdmissionError, TRACKED_RANGE, wrong};

/// The largest rate and the largest burst of bytes: 1 TiB.
const BYTES_MAX: u64 = 1 << 40;

/// When to ask again where the system has no memory for one more key.
const WITHOUT_MEMORY: u64 = 1_000_000_000;

/// Rates for the connections of a key together, for [`KeyRates::new`].
#[derive(Clone, Copy, Debug, Default)]
#[must_use = "it does nothing before `KeyRates::new` has it"]
pub struct KeyLimits {
    frames: Option<Rate>,
    bytes: Option<(u64, u64)>,
    tracked_max: Option<usize>,
    name: Option<&'static str>,
}

impl KeyLimits {
    /// Sets how many frames a key may send in a second, and how many at once after a pause; each 1
    /// to 1 000 000.
    pub fn frames(self, per_second: u32, burst: u32) -> KeyLimits {
        KeyLimits { frames: Some(Rate { per_second, burst }), ..self }
    }

    /// Sets how many bytes a key may send in a second, and how many at once after a pause; each 1
    /// to 2^40. A frame that is larger than what is left is let through while any is left, and the
    /// next one waits until it is paid off.
    pub fn bytes(self, per_second: u64, burst: u64) -> KeyLimits {
        KeyLimits { bytes: Some((per_second, burst)), ..self }
    }

    /// Sets how many keys are tracked exactly, 1024 to 67 108 864. Default 917 504, of at most 40
    /// MB. New keys beyond are counted in cells that several share, 4 MiB in all: such a key never
    /// has more than its rate, and may have less.
    pub fn tracked_max(self, keys: usize) -> KeyLimits {
        KeyLimits { tracked_max: Some(keys), ..self }
    }

    /// Sets what the keys are, such as `"tenants"`, for the label `rates` of the server's metrics.
    /// Default `"keys"`. Rates of one name are added up there.
    pub fn name(self, name: &'static str) -> KeyLimits {
        KeyLimits { name: Some(name), ..self }
    }

    fn check(self) -> Result<KeyLimits, AdmissionError> {
        if self.frames.is_none() && self.bytes.is_none() {
            return wrong(
                "the rates of keys have no limit; set KeyLimits::frames, KeyLimits::bytes or both".to_owned(),
            );
        }
        self.frames.map(|rate| rate.check("frames")).transpose().map_err(AdmissionError)?;
        if let Some((per_second, burst)) = self.bytes {
            for (what, value) in [("rate", per_second), ("burst", burst)] {
                if !(1..=BYTES_MAX).contains(&value) {
                    return wrong(format!(
                        "the {what} of bytes is {value}; it must be 1 to {BYTES_MAX}, or leave bytes out"
                    ));
                }
            }
        }
        let (min, max) = TRACKED_RANGE;
        match self.tracked_max {
            Some(keys) if !(min..=max).contains(&keys) => {
                wrong(format!("tracked_max is {keys}; it must be {min} to {max} keys"))
            }
            _ => Ok(self),
        }
    }
}

/// The rates of keys: of what the program names for several connections, such as a user, an API key
/// or a tenant. Clones count together, on all shards of one server.
///
/// A service asks itself, and answers in the words of its protocol; `RateLimit` asks for each
/// frame.
///
/// ```
/// # mod ringserve {
/// #     pub use ringserve_admission as admission;
/// # }
/// use ringserve::admission::{KeyLimits, KeyRates, TakesKeys};
///
/// /// In a call of a service this is `cx.shard()`.
/// fn answer(shard: &impl TakesKeys, rates: &KeyRates, user: &str, frame: &[u8]) -> String {
///     match rates.take(shard, user, 1, frame.len()) {
///         Ok(()) => "+OK".to_owned(),
///         Err(early) => format!("-RATE again in {} ms", early.time().as_millis()),
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let rates = KeyRates::new(KeyLimits::default().frames(100, 200).bytes(1 << 20, 4 << 20))?;
/// # let _ = rates;
/// # Ok(())
/// # }
/// ```
///
/// A key costs 43 to 64 bytes until its buckets are full again, whatever its own length:
/// [`tracked_max`](KeyLimits::tracked_max) bounds them, and nothing is held before the first one. A
/// key is known by 64 bits of a hash that each process draws: of a million keys two share their
/// rate once in 37 million runs. A take reads the clock, and locks one of 64 parts of the table.
#[derive(Clone)]
pub struct KeyRates {
    inner: Arc<Inner>,
}

struct Inner {
    /// Made by the first take: only a shard knows by which seed.
    table: OnceLock<Table<Bucket>>,
    limits: Buckets,
    tracked_max: usize,
    name: &'static str,
    /// The number of the server that knows of it since last.
    server: AtomicU64,
    refused: AtomicU64,
    sketched: AtomicU64,
}

/// The rates of each key.
#[derive(Clone, Copy)]
pub(super) struct Buckets {
    frames: Option<UnitRate>,
    bytes: Option<UnitRate>,
}

/// The bucket of a key's bytes, in addition to that of its frames.
#[derive(Clone, Copy, Default, PartialEq)]
pub(super) struct Bucket(u64);

impl Tally for Bucket {
    type Limits = Buckets;

    fn leaves_idle(_limits: &Buckets) -> bool {
        true
    }

    fn full_at(self) -> u64 {
        self.0
    }

    fn is_idle(self, now: u64) -> bool {
        self.0 <= now
    }

    fn least(self, other: Bucket) -> Bucket {
        Bucket(self.0.min(other.0))
    }

    fn follow(self, _before: Bucket, after: Bucket) -> Bucket {
        Bucket(self.0.max(after.0))
    }

    fn split(self) -> (Bucket, Bucket) {
        (self, Bucket(0))
    }
}

impl Buckets {
    /// Takes frames and bytes that are there within `wait_max`, and returns how long they have to
    /// wait, all in nanoseconds.
    ///
    /// # Errors
    /// The wait, if it is longer than that: nothing is taken then.
    fn take(
        &self,
        (frames, bytes): (&mut u64, &mut u64),
        (frames_taken, bytes_taken): (u64, u64),
        wait_max: u64,
        now: u64,
    ) -> Result<u64, Early> {
        let frame_rate = self.frames.filter(|_| frames_taken > 0);
        let byte_rate = self.bytes.filter(|_| bytes_taken > 0);
        let wait = frame_rate.map_or(0, |rate| rate.wait(*frames, now));
        let wait = byte_rate.map_or(wait, |rate| rate.wait(*bytes, now).max(wait));
        if wait > wait_max {
            return Err(Early(wait));
        }
        // Paid when it is due: what waits for one bucket is not to fill the other one meanwhile.
        let due = now.saturating_add(wait);
        if let Some(rate) = frame_rate {
            *frames = rate.pay(*frames, frames_taken, due);
        }
        if let Some(rate) = byte_rate {
            *bytes = rate.pay(*bytes, bytes_taken, due);
        }
        Ok(wait)
    }
}

/// The nanoseconds until a take is no longer too early.
struct Early(u64);

impl From<NoMemory> for Early {
    fn from(NoMemory: NoMemory) -> Early {
        Early(WITHOUT_MEMORY)
    }
}

/// The source of time and seed for a rate by key: a `Shard`.
pub trait TakesKeys: sealed::KeyTaker {}

impl<T: sealed::KeyTaker> TakesKeys for T {}

#[doc(hidden)]
pub mod sealed {
    use ringserve_core::Time;

    use super::super::key_stats::UsedKeyRates;

    /// The questions of [`TakesKeys`](super::TakesKeys) to a shard.
    pub trait KeyTaker {
        /// The time on the shard's clock.
        fn now(&self) -> Time;

        /// True if that clock is a simulation's.
        fn is_simulated(&self) -> bool;

        /// A random number of the shard.
        fn random_seed(&self) -> u64;

        /// The rates of which the server knows.
        fn used_rates(&self) -> &UsedKeyRates;
    }
}

impl KeyRates {
    /// Rates of keys with these limits.
    ///
    /// # Errors
    /// No limit is set, or a number is out of range.
    pub fn new(limits: KeyLimits) -> Result<KeyRates, AdmissionError> {
        let KeyLimits { frames, bytes, tracked_max, name } = limits.check()?;
        let frames = frames.map(|rate| UnitRate::new(rate.per_second.into(), rate.burst.into()));
        let bytes = bytes.map(|(per_second, burst)| UnitRate::new(per_second, burst));
        let inner = Inner {
            table: OnceLock::new(),
            limits: Buckets { frames, bytes },
            tracked_max: tracked_max.unwrap_or(TRACKED),
            name: name.unwrap_or("keys"),
            server: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            sketched: AtomicU64::new(0),
        };
        Ok(KeyRates { inner: Arc::new(inner) })
    }

    /// Takes what a key sent, on the shard that received it: `frames` of them, or requests of
    /// whatever kind, and `bytes`.
    ///
    /// # Errors
    /// The key has sent too much. Nothing is taken then; [`RetryAfter`] says when there will be
    /// some.
    pub fn take(
        &self,
        on: &impl TakesKeys,
        key: &(impl Hash + ?Sized),
        frames: u32,
        bytes: usize,
    ) -> Result<(), RetryAfter> {
        self.reserve(on, key, (frames, bytes), Duration::ZERO).map(drop)
    }

    /// Takes what is there within `wait_max`, and returns how long that has to wait: others that
    /// come meanwhile wait for longer.
    ///
    /// # Errors
    /// It would be more. Nothing is taken then.
    #[doc(hidden)]
    pub fn reserve(
        &self,
        on: &impl TakesKeys,
        key: &(impl Hash + ?Sized),
        (frames, bytes): (u32, usize),
        wait_max: Duration,
    ) -> Result<Duration, RetryAfter> {
        let Inner { table, limits, tracked_max, server, refused, sketched, .. } = &*self.inner;
        if server.load(Ordering::Relaxed) != on.used_rates().number() {
            self.tell(on);
        }
        let table = table
            .get_or_init(|| Table::with_limits(*limits, *tracked_max, on.random_seed(), on.is_simulated()));
        let now = on.now().as_nanos();
        let wait_max = u64::try_from(wait_max.as_nanos()).unwrap_or(u64::MAX);
        let mut wait = 0;
        let taken = table.change(table.prefix_of_key(key), now, |in_frames, Bucket(in_bytes), _| {
            wait =
                table.limits().take((in_frames, in_bytes), (frames.into(), bytes as u64), wait_max, now)?;
            Ok::<_, Early>(())
        });
        match taken {
            Ok(is_sketched) => {
                if is_sketched {
                    sketched.fetch_add(1, Ordering::Relaxed);
                }
                Ok(Duration::from_nanos(wait))
            }
            Err(Early(wait)) => {
                refused.fetch_add(1, Ordering::Relaxed);
                Err(RetryAfter(Duration::from_nanos(wait)))
            }
        }
    }

    /// Adds them to those that the shard's server knows, usually once.
    #[cold]
    fn tell(&self, on: &impl TakesKeys) {
        let used = on.used_rates();
        let rates: Arc<dyn KeepsRates> = self.inner.clone();
        used.add(Arc::downgrade(&rates));
        self.inner.server.store(used.number(), Ordering::Relaxed);
    }

    /// The number of keys that are tracked, and of takes that were refused. Locks each of the 64
    /// parts of the table for a moment.
    pub fn stats(&self) -> KeyRatesStats {
        self.inner.stats()
    }
}

impl KeepsRates for Inner {
    fn name(&self) -> &'static str {
        self.name
    }

    fn stats(&self) -> KeyRatesStats {
        let Inner { table, refused, sketched, .. } = self;
        KeyRatesStats {
            keys: table.get().map_or(0, |table| table.stats().prefixes),
            refused: refused.load(Ordering::Relaxed),
            sketched: sketched.load(Ordering::Relaxed),
        }
    }
}

impl fmt::Debug for KeyRates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyRates").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

/// The time until a key may send again. Other takes of the key may come first.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RetryAfter(Duration);

impl RetryAfter {
    /// The time.
    pub fn time(&self) -> Duration {
        self.0
    }
}

impl fmt::Display for RetryAfter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "too much was sent for this key; there is room in {:?}", self.0)
    }
}

ringserve_buf::debug_is_display!(RetryAfter);

impl Error for RetryAfter {}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn refused(limits: KeyLimits) -> String {
        KeyRates::new(limits).unwrap_err().to_string()
    }

    fn table(frames: Option<(u64, u64)>, bytes: Option<(u64, u64)>, tracked_max: usize) -> Table<Bucket> {
        let rate = |(per_second, burst)| UnitRate::new(per_second, burst);
        let limits = Buckets { frames: frames.map(rate), bytes: bytes.map(rate) };
        Table::with_limits(limits, tracked_max, 7, true)
    }

    fn take(table: &Table<Bucket>, key: u32, units: (u64, u64), now: u64) -> Result<bool, u64> {
        let taken = table.change(table.prefix_of_key(&key), now, |frames, Bucket(bytes), _| {
            table.limits().take((frames, bytes), units, 0, now).map(drop)
        });
        taken.map_err(|Early(wait)| wait)
    }

    #[test]
    fn wrong_limits_name_value_and_fix() {
        for (limits, expected) in [
            (KeyLimits::default(), "the rates of keys have no limit"),
            (KeyLimits::default().frames(0, 5), "the rate of frames is 0; it must be 1 to 1000000"),
            (KeyLimits::default().bytes(5, 0), "the burst of bytes is 0; it must be 1 to 1099511627776"),
            (KeyLimits::default().frames(1, 1).tracked_max(10), "tracked_max is 10; it must be 1024 to"),
        ] {
            let error = refused(limits);
            assert!(error.starts_with(expected), "{error}");
        }
        assert!(KeyRates::new(KeyLimits::default().bytes(1, 1 << 40)).is_ok());
    }

    #[test]
    fn refusal_for_one_bucket_takes_nothing_of_the_other() {
        let table = table(Some((1, 2)), Some((100, 1000)), TRACKED);
        assert_eq!(take(&table, 1, (1, 1500), 0), Ok(false), "a frame may leave a debt");
        for _ in 0..50 {
            assert_eq!(take(&table, 1, (1, 1), 0), Err(5 * SECOND + SECOND / 100), "501 bytes are missing");
        }
        assert_eq!(take(&table, 1, (1, 0), 0), Ok(false), "its second frame was not taken");
        assert_eq!(take(&table, 1, (1, 0), 0), Err(SECOND));
        assert_eq!(take(&table, 1, (0, 0), 0), Ok(false), "nothing waits for nothing");
        assert_eq!(take(&table, 2, (1, 1), 0), Ok(false), "another key has its own");
    }

    #[test]
    fn key_beyond_the_table_never_has_more_than_its_rate() {
        let table = table(Some((10, 5)), Some((1000, 100)), 64);
        let mut sketched = 0;
        let mut by_key = vec![0u64; 2000];
        for tick in 0..20 {
            let now = SECOND + tick * SECOND / 10;
            for key in 0..2000 {
                while let Ok(is_sketched) = take(&table, key, (1, 10), now) {
                    by_key[key as usize] += 1;
                    sketched += u64::from(is_sketched);
                }
            }
        }
        assert!(sketched > 0 && table.stats().prefixes <= 64);
        // 1.9 seconds, of 10 and a burst of 5.
        assert!(by_key.iter().all(|taken| *taken <= 5 + 19), "{:?}", by_key.iter().max());
        assert!(
            by_key.iter().filter(|taken| **taken == 24).count() >= 64,
            "those of the table have all of it"
        );
    }

    #[test]
    fn crowd_of_keys_takes_the_memory_that_is_said() {
        let table = table(Some((1, 1)), None, TRACKED);
        for key in 0..TRACKED as u32 {
            assert_eq!(take(&table, key, (1, 1), 0).map(drop), Ok(()));
        }
        let (keys, bytes) = (table.stats().prefixes, table.bytes());
        assert!(keys > TRACKED * 98 / 100, "{keys}");
        println!("{} bytes for {keys} keys", bytes);
        assert!((bytes - 64 * (64 << 10)) / keys <= 64 && bytes < 40_000_000 + (4 << 20), "{bytes}");
        // They are forgotten once their buckets are full.
        for key in 0..300_000 {
            let now = 3600 * SECOND + u64::from(key) * SECOND / 100;
            assert_eq!(take(&table, 1 << 30 | key, (1, 1), now).map(drop), Ok(()));
        }
        assert!(table.stats().prefixes < 64 * 8192, "{:?}", table.stats());
    }
}
