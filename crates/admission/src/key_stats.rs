//! Statistics of a server's rates by key, by their name.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Statistics of [`KeyRates`](super::KeyRates).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyRatesStats {
    /// Keys that are tracked exactly: whose buckets were not full when they were looked at last.
    pub keys: usize,
    /// Takes that were refused. A `RateLimit` may have let the call wait then.
    pub refused: u64,
    /// Takes of keys for which there was no room: raise
    /// [`KeyLimits::tracked_max`](super::KeyLimits::tracked_max) if it grows.
    pub sketched: u64,
}

/// Rates by key of which a server's shards were asked.
pub trait KeepsRates: Send + Sync {
    /// The name for the kind of the keys.
    fn name(&self) -> &'static str;

    fn stats(&self) -> KeyRatesStats;
}

/// All of them, as long as a service has them.
#[derive(Clone, Default)]
pub struct UsedKeyRates(Arc<Used>);

struct Used {
    /// Tells it from those of other servers of the process. Not 0.
    number: u64,
    rates: Mutex<Vec<Weak<dyn KeepsRates>>>,
}

impl Default for Used {
    fn default() -> Used {
        static LAST: AtomicU64 = AtomicU64::new(0);
        Used { number: LAST.fetch_add(1, Ordering::Relaxed) + 1, rates: Mutex::default() }
    }
}

impl UsedKeyRates {
    /// A number that no other server of the process has.
    #[inline]
    pub fn number(&self) -> u64 {
        self.0.number
    }

    /// Adds these, unless they are there.
    pub fn add(&self, rates: Weak<dyn KeepsRates>) {
        let mut used = self.0.rates.lock().unwrap_or_else(PoisonError::into_inner);
        used.retain(|known| known.strong_count() > 0 && !known.ptr_eq(&rates));
        used.push(rates);
    }

    /// Their statistics, by name.
    pub fn stats(&self) -> BTreeMap<&'static str, KeyRatesStats> {
        let used: Vec<_> = {
            let used = self.0.rates.lock().unwrap_or_else(PoisonError::into_inner);
            used.iter().filter_map(Weak::upgrade).collect()
        };
        let mut by_name = BTreeMap::<_, KeyRatesStats>::new();
        for rates in used {
            let KeyRatesStats { keys, refused, sketched } = by_name.entry(rates.name()).or_default();
            let of = rates.stats();
            *keys += of.keys;
            *refused += of.refused;
            *sketched += of.sketched;
        }
        by_name
    }
}
