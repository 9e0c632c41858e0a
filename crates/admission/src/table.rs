//! The connections and rates of prefixes: one table for all shards, since `SO_REUSEPORT` spreads
//! the connections of an address over all of them.
//!
//! ```text
//!   prefix ──hash──▶ one of 64 stripes, each with a lock ──▶ entry: prefix, connections, bucket of its rate
//!                                                   no room └──▶ sketch of the stripe
//! ```
//!
//! An entry goes when it no longer holds any state: no connection, and a bucket that is full again.
//! With a rate that is found out where room is needed, so a stripe is swept then. An entry with a
//! connection is never dropped.
//!
//! The same table holds the rates of [keys](super::KeyRates): an entry has a second bucket in the
//! place of the connections.

use std::hash::{BuildHasher, Hash};
use std::mem;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use foldhash::SharedSeed;
use foldhash::quality::SeedableRandomState;
use ringserve_base::random::Random;

use super::AdmissionStats;
use super::rates::{Over, PrefixLimits, SharedLimits};
use super::sketch::{Sketch, Tally};
use super::slots::Slots;

/// Stripes: with as many shards that accept all the time, two rarely want one lock.
const STRIPES: usize = 64;

/// Prefixes that are tracked by default.
pub(super) const TRACKED: usize = STRIPES * 14_336;

/// The time in which a stripe that is full is not swept again: a sweep looks at all its entries,
/// with the lock held.
const SWEPT_EVERY: u64 = 250_000_000;

/// Entries below which a stripe is not swept to save memory.
const SWEPT_FROM: usize = 64;

/// The upper 96 bits of addresses by which IPv6 reaches IPv4 (RFC 6052), `64:ff9b::/96`: each has
/// an IPv4 address in the others.
const NAT64: u128 = 0x0064_ff9b << 64;

/// The unit by which [`Admission`](super::Admission) counts an address, as a key for
/// [`KeyRates`](super::KeyRates): an address of IPv4, also where it is written as
/// `::ffff:192.0.2.7` or `64:ff9b::192.0.2.7`, or the first bits of one of IPv6. A peer has 2^64
/// addresses of IPv6 and more, so that a rate by the whole address limits no peer.
///
/// ```
/// # mod ringserve {
/// #     pub use ringserve_admission as admission;
/// # }
/// use ringserve::admission::AddressKey;
///
/// let key = |address: &str| AddressKey::of(address.parse().unwrap());
/// assert_eq!(key("2001:db8::1"), key("2001:db8::2"));
/// assert_ne!(key("192.0.2.7"), key("192.0.2.8"));
/// assert_eq!(key("192.0.2.7"), key("::ffff:192.0.2.7"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AddressKey(Prefix);

impl AddressKey {
    /// By the first 64 bits of an IPv6 address: what a customer of a provider has at least.
    pub fn of(address: IpAddr) -> AddressKey {
        AddressKey::with_ipv6_prefix(address, 64)
    }

    /// By the first `bits` of an IPv6 address, as
    /// [`Admission::ipv6_prefix`](super::Admission::ipv6_prefix) counts; more than 64 are 64.
    pub fn with_ipv6_prefix(address: IpAddr, bits: u8) -> AddressKey {
        AddressKey(Prefix::of_address(address, bits.min(64)))
    }
}

/// The unit by which connections are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Prefix {
    bits: u64,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    V4,
    V6,
    User,
    /// A key of the program, by its hash.
    Key,
}

impl Prefix {
    /// The address, or the first `v6_bits` bits of one of IPv6. An IPv4 address is the same one
    /// however it is written.
    #[inline]
    pub fn of_address(address: IpAddr, v6_bits: u8) -> Prefix {
        match address.to_canonical() {
            IpAddr::V4(address) => Prefix { bits: u32::from(address).into(), kind: Kind::V4 },
            IpAddr::V6(address) if u128::from(address) >> 32 == NAT64 => {
                Prefix { bits: (u128::from(address) as u32).into(), kind: Kind::V4 }
            }
            IpAddr::V6(address) => {
                let upper = (u128::from(address) >> 64) as u64;
                let mask = u64::MAX.checked_shl(64 - u32::from(v6_bits)).unwrap_or(0);
                Prefix { bits: upper & mask, kind: Kind::V6 }
            }
        }
    }

    /// The user at the other end of a Unix socket.
    pub fn of_user(uid: u32) -> Prefix {
        Prefix { bits: uid.into(), kind: Kind::User }
    }
}

/// Connections.
impl Tally for u32 {
    type Limits = SharedLimits;

    fn leaves_idle(limits: &SharedLimits) -> bool {
        limits.has_had_rate()
    }

    fn full_at(self) -> u64 {
        0
    }

    #[inline]
    fn is_idle(self, _now: u64) -> bool {
        self == 0
    }

    fn least(self, other: u32) -> u32 {
        self.min(other)
    }

    fn follow(self, before: u32, after: u32) -> u32 {
        self.saturating_add(after - before)
    }

    fn split(self) -> (u32, u32) {
        (0, self)
    }
}

/// The state of a prefix.
struct Entry<T> {
    bits: u64,
    /// The bucket of its rate.
    bucket: u64,
    tally: T,
    kind: Kind,
    /// The sketch may know of more connections.
    is_sketched: bool,
}

const _: () = assert!(size_of::<Option<Entry<u32>>>() == 24 && size_of::<Option<Entry<u64>>>() == 32);

impl<T: Tally> Entry<T> {
    #[inline]
    fn is(&self, prefix: Prefix) -> bool {
        self.bits == prefix.bits && self.kind == prefix.kind
    }

    fn prefix(&self) -> Prefix {
        Prefix { bits: self.bits, kind: self.kind }
    }

    /// It knows no more than an entry that is not there.
    #[inline]
    fn is_idle(&self, now: u64) -> bool {
        self.tally.is_idle(now) && self.bucket <= now
    }
}

/// A connection that is counted, to be taken back once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a connection that is not taken back counts for ever"]
pub struct Charge {
    bits: u64,
    kind: Kind,
    place: Place,
}

const _: () = assert!(size_of::<Option<Charge>>() == 16);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Table,
    Sketch,
    /// No prefix has a limit.
    Nowhere,
}

impl Charge {
    /// Of a connection that counts for no prefix.
    pub(super) const NOWHERE: Charge = Charge { bits: 0, kind: Kind::V4, place: Place::Nowhere };
}

/// The system has no memory for one more.
pub(super) struct NoMemory;

impl From<NoMemory> for Over {
    fn from(NoMemory: NoMemory) -> Over {
        Over::Memory
    }
}

/// All prefixes of a server.
pub struct Table<T: Tally = u32> {
    stripes: Box<[Stripe<T>]>,
    hasher: SeedableRandomState,
    limits: T::Limits,
    /// Entries of a stripe at most.
    stripe_max: usize,
}

/// On separate lines: a lock that is taken moves no neighbour's.
#[repr(align(128))]
struct Stripe<T>(Mutex<Prefixes<T>>);

/// One stripe's part.
struct Prefixes<T> {
    entries: Slots<Entry<T>>,
    sketch: Option<Box<Sketch<T>>>,
    /// Connections that entries count.
    live: u32,
    /// The last sweep of the full stripe; `None` before the first.
    swept_at: Option<u64>,
}

/// The hash function's constants, drawn once: with its seed they keep a peer from choosing
/// addresses that collide.
static SHARED_SEED: OnceLock<SharedSeed> = OnceLock::new();

impl<T> Default for Prefixes<T> {
    fn default() -> Prefixes<T> {
        Prefixes { entries: Slots::default(), sketch: None, live: 0, swept_at: None }
    }
}

impl<T: Tally> Table<T> {
    /// A table of `tracked_max` prefixes. A `simulated` one hashes by its seed alone.
    pub(super) fn with_limits(limits: T::Limits, tracked_max: usize, seed: u64, simulated: bool) -> Table<T> {
        let shared = match simulated {
            true => SharedSeed::global_fixed(),
            false => SHARED_SEED.get_or_init(|| SharedSeed::from_u64(Random::system_seed())),
        };
        let stripe = |_| Stripe(Mutex::default());
        Table {
            stripes: (0..STRIPES).map(stripe).collect(),
            hasher: SeedableRandomState::with_seed(seed, shared),
            limits,
            stripe_max: (tracked_max / STRIPES).max(1),
        }
    }

    /// The prefix that stands for a key: one of as many as 64 bits can tell apart.
    #[inline]
    pub(super) fn prefix_of_key(&self, key: &(impl Hash + ?Sized)) -> Prefix {
        Prefix { bits: self.hasher.hash_one(key), kind: Kind::Key }
    }

    #[inline]
    fn hash(&self, prefix: Prefix) -> u64 {
        self.hasher.hash_one((prefix.bits, prefix.kind as u8))
    }

    /// The part of a hash, by bits that neither the slots of a stripe nor its sketch looks at
    /// first.
    #[inline]
    fn stripe(&self, hash: u64) -> MutexGuard<'_, Prefixes<T>> {
        let Stripe(stripe) = &self.stripes[(hash >> 48) as usize % STRIPES];
        stripe.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn limits(&self) -> &T::Limits {
        &self.limits
    }

    /// Changes what is known of a prefix: its bucket and its tally, beside which the sketch may
    /// know of more. Returns true if the table had no room for it.
    ///
    /// # Errors
    /// Those of `change`, after which nothing is known that was not.
    pub(super) fn change<E: From<NoMemory>>(
        &self,
        prefix: Prefix,
        now: u64,
        change: impl FnOnce(&mut u64, &mut T, T) -> Result<(), E>,
    ) -> Result<bool, E> {
        let hash = self.hash(prefix);
        let place = self.change_in(&mut self.stripe(hash), hash, prefix, now, change)?;
        Ok(place == Place::Sketch)
    }

    #[inline]
    fn change_in<E: From<NoMemory>>(
        &self,
        stripe: &mut Prefixes<T>,
        hash: u64,
        prefix: Prefix,
        now: u64,
        change: impl FnOnce(&mut u64, &mut T, T) -> Result<(), E>,
    ) -> Result<Place, E> {
        let found = stripe.entries.find(hash, |entry| entry.is(prefix));
        let Some(Entry { tally, bucket, is_sketched, .. }) = found.and_then(|place| stripe.entries.at(place))
        else {
            return self.change_new(stripe, hash, prefix, now, change);
        };
        let sketch = stripe.sketch.as_ref().filter(|_| *is_sketched);
        let beside = sketch.map_or(T::default(), |sketch| sketch.known_of(hash).1);
        change(bucket, tally, beside)?;
        Ok(Place::Table)
    }

    /// The same for a prefix that has no entry.
    fn change_new<E: From<NoMemory>>(
        &self,
        stripe: &mut Prefixes<T>,
        hash: u64,
        prefix: Prefix,
        now: u64,
        change: impl FnOnce(&mut u64, &mut T, T) -> Result<(), E>,
    ) -> Result<Place, E> {
        if stripe.sketch.as_ref().is_some_and(|sketch| sketch.is_empty(now)) {
            stripe.sketch = None;
        }
        if !self.has_room(stripe, now) {
            let sketch = match &mut stripe.sketch {
                Some(sketch) => sketch,
                none => none.insert(Box::new(Sketch::new().ok_or(NoMemory)?)),
            };
            sketch.change(hash, |bucket, tally| change(bucket, tally, T::default()))?;
            return Ok(Place::Sketch);
        }
        // Connections that came while there was no room are still its own.
        let known = stripe.sketch.as_ref().map(|sketch| sketch.known_of(hash));
        let (mut bucket, tally) = known.unwrap_or_default();
        let (mut tally, beside) = tally.split();
        change(&mut bucket, &mut tally, beside)?;
        let (Prefix { bits, kind }, is_sketched) = (prefix, beside != T::default());
        stripe.entries.insert(hash, Entry { bits, bucket, tally, kind, is_sketched });
        Ok(Place::Table)
    }

    /// True if one more entry has room.
    fn has_room(&self, stripe: &mut Prefixes<T>, now: u64) -> bool {
        let len = stripe.entries.len();
        if len < self.stripe_max && len < stripe.entries.capacity() {
            return true;
        }
        self.make_room(stripe, now)
    }

    #[cold]
    fn make_room(&self, stripe: &mut Prefixes<T>, now: u64) -> bool {
        let hash = |entry: &Entry<T>| self.hash(entry.prefix());
        let is_full = stripe.entries.len() >= self.stripe_max;
        // Without a rate no entry is idle. One that grows is swept before it does.
        let rests = stripe.swept_at.is_some_and(|at| is_full && now.saturating_sub(at) < SWEPT_EVERY);
        if T::leaves_idle(&self.limits) && !rests && (is_full || stripe.entries.len() >= SWEPT_FROM) {
            stripe.swept_at = Some(now);
            stripe.entries.retain(hash, |entry| !entry.is_idle(now));
            let (len, capacity) = (stripe.entries.len(), stripe.entries.capacity());
            if len < capacity / 4 {
                // After a crowd that is gone.
                stripe.entries.shrink_to(2 * len, hash);
            }
        }
        stripe.entries.len() < self.stripe_max && stripe.entries.grow(self.stripe_max, hash)
    }

    /// Its statistics.
    pub fn stats(&self) -> AdmissionStats {
        let mut stats = AdmissionStats::default();
        for Stripe(stripe) in &self.stripes {
            let stripe = stripe.lock().unwrap_or_else(PoisonError::into_inner);
            let sketched = stripe.sketch.as_ref().map_or(0, |sketch| sketch.live() as usize);
            stats.prefixes += stripe.entries.len();
            stats.connections += stripe.live as usize + sketched;
            stats.sketched += sketched;
        }
        stats
    }

    /// Bytes that entries and sketches take.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        let bytes = |Stripe(stripe): &Stripe<T>| {
            let stripe = stripe.lock().unwrap();
            stripe.entries.bytes() + stripe.sketch.as_ref().map_or(0, |_| 64 << 10)
        };
        self.stripes.iter().map(bytes).sum()
    }
}

impl Table {
    /// The same for connections.
    pub fn new(limits: PrefixLimits, tracked_max: usize, seed: u64, simulated: bool) -> Table {
        Table::with_limits(SharedLimits::new(limits), tracked_max, seed, simulated)
    }

    /// Counts a connection of a prefix that begins now.
    ///
    /// # Errors
    /// If the prefix may have no more.
    #[cfg(test)]
    pub fn charge(&self, prefix: Prefix, now: u64) -> Result<Charge, Over> {
        self.charge_since(prefix, now, now)
    }

    /// Counts a connection of a prefix that came between `from` and `now`; they differ where the
    /// shard was away.
    ///
    /// # Errors
    /// If the prefix may have no more.
    pub fn charge_since(&self, prefix: Prefix, from: u64, now: u64) -> Result<Charge, Over> {
        let hash = self.hash(prefix);
        let stripe = &mut *self.stripe(hash);
        let place = self.change_in(stripe, hash, prefix, now, |bucket, count, beside| {
            self.limits.get().charge(count, bucket, beside, (from, now))
        })?;
        match (place, &mut stripe.sketch) {
            (Place::Sketch, Some(sketch)) => sketch.count(),
            _ => stripe.live += 1,
        }
        Ok(Charge { bits: prefix.bits, kind: prefix.kind, place })
    }

    /// True if there is a rate of each prefix now.
    pub(super) fn has_rate(&self) -> bool {
        self.limits.get().rate.is_some()
    }

    /// Takes a connection back.
    pub fn release(&self, charge: Charge, now: u64) {
        if charge.place == Place::Nowhere {
            return;
        }
        let prefix = Prefix { bits: charge.bits, kind: charge.kind };
        let hash = self.hash(prefix);
        let stripe = &mut *self.stripe(hash);
        if charge.place == Place::Sketch {
            return stripe.release_sketched(hash, now);
        }
        let place = stripe.entries.find(hash, |entry| entry.is(prefix));
        let Some((place, known)) = place.and_then(|place| Some((place, stripe.entries.at(place)?))) else {
            debug_assert!(false, "{charge:?} is taken back, and its entry is gone");
            return;
        };
        known.tally -= 1;
        stripe.live -= 1;
        if known.is_idle(now) {
            stripe.entries.remove(place, |entry| self.hash(entry.prefix()));
        }
    }

    /// Sets other limits. Connections that are there stay, and count; every prefix has its whole
    /// burst.
    pub fn set_limits(&self, limits: PrefixLimits) {
        self.limits.set(limits);
        for Stripe(stripe) in &self.stripes {
            let stripe = &mut *stripe.lock().unwrap_or_else(PoisonError::into_inner);
            let hash = |entry: &Entry<u32>| self.hash(entry.prefix());
            stripe.entries.retain(hash, |entry| {
                entry.bucket = 0;
                entry.tally > 0
            });
            if let Some(sketch) = &mut stripe.sketch {
                sketch.forgive();
            }
        }
    }
}

impl Prefixes<u32> {
    #[cold]
    fn release_sketched(&mut self, hash: u64, now: u64) {
        let Some(sketch) = &mut self.sketch else {
            debug_assert!(false, "a connection of a sketch is taken back, and the sketch is gone");
            return;
        };
        sketch.release(hash);
        if sketch.is_empty(now) {
            drop(mem::take(&mut self.sketch));
        }
    }
}

#[cfg(test)]
mod tests;
