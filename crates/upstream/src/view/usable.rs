//! The backends that may be asked, until something changes.

use std::cell::{Cell, OnceCell};
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;

use super::{Member, UNKNOWN};
use crate::backend::Standing;
use crate::policy::SECOND;
use crate::policy::alias::Alias;
use crate::policy::maglev::{Maglev, hash};
use crate::policy::{levels, slow_start, subset};

/// Backends that are looked at for a key, until it has any.
const KEY_ATTEMPTS: u32 = 32;

/// The backends that may be asked, as indices, until `version` changes or the time is over.
#[derive(Default)]
pub(super) struct Usable {
    pub(super) version: u64,
    pub(super) fresh_until: u64,
    pub(super) indices: Vec<usize>,
    /// Those that are asked by key, whatever shard asks.
    pub(super) by_key: Vec<usize>,
    /// Those that may be asked where none of these is left: of a later level, or of other shards.
    pub(super) reserve: Vec<usize>,
    /// Ejected ones of which one request may try whether they work.
    pub(super) on_trial: Vec<usize>,
    /// By place among `indices`, where the weights differ.
    pub(super) table: Option<Alias>,
    /// By index among all; of a mean of 1.
    weights: Vec<f64>,
    pub(super) is_panicking: bool,
    /// Those that would be asked without a panic.
    pub(super) sound: usize,
    /// Which backend a key belongs to; made when there is one.
    ring: OnceCell<Option<Maglev>>,
    /// The median of the averages, and until when it is taken.
    median: Cell<(f64, u64)>,
}

/// The levels of the backends, by priority and zone, and the part of the requests that each gets.
/// Without any there is one.
#[derive(Default)]
struct Levels {
    /// By index of the backend.
    of: Vec<usize>,
    parts: Vec<f64>,
    is_enough: bool,
}

impl Levels {
    fn of<P>(members: &[Rc<Member<P>>], all: &[usize], usable: &[usize], zone: Option<&str>) -> Levels {
        let key = |index: usize| {
            let state = &members[index].state;
            let is_elsewhere = zone.is_some_and(|zone| state.backend.given_zone() != Some(zone));
            (state.priority.load(Relaxed), is_elsewhere)
        };
        let mut keys: Vec<_> = all.iter().map(|index| key(*index)).collect();
        keys.sort_unstable();
        keys.dedup();
        if keys.len() < 2 {
            return Levels::default();
        }
        let level = |index: usize| keys.binary_search(&key(index)).unwrap_or(keys.len());
        let of: Vec<usize> = (0..members.len()).map(level).collect();
        let count = |among: &[usize], level| among.iter().filter(|index| of[**index] == level).count();
        let counts: Vec<_> = (0..keys.len()).map(|level| (count(usable, level), count(all, level))).collect();
        Levels { parts: levels::parts(&counts), is_enough: levels::are_enough(&counts), of }
    }

    fn level(&self, index: usize) -> usize {
        self.of.get(index).copied().unwrap_or(0)
    }

    fn part(&self, index: usize) -> f64 {
        if self.parts.is_empty() { 1.0 } else { self.parts.get(self.level(index)).copied().unwrap_or(0.0) }
    }

    /// Makes weights such that each level has its part.
    fn share(&self, indices: &[usize], weights: &mut [f64]) {
        if self.parts.is_empty() {
            return;
        }
        let mut sums = vec![0.0; self.parts.len() + 1];
        indices.iter().for_each(|index| sums[self.level(*index)] += weights[*index]);
        for index in indices {
            weights[*index] *= self.part(*index) / sums[self.level(*index)].max(f64::MIN_POSITIVE);
        }
    }
}

/// Which backends are in the window of this shard, by index. Shards and processes have other
/// windows.
fn near<P>(members: &[Rc<Member<P>>], (shard, shards, seed): (usize, usize, u64)) -> Vec<bool> {
    let window = subset::window(members.len(), shard, shards);
    let hashed = |member: &Rc<Member<P>>| hash(member.state.backend.name().as_bytes()) ^ seed;
    let mut order: Vec<usize> = (0..members.len()).collect();
    order.sort_by_cached_key(|index| hash(&hashed(&members[*index]).to_be_bytes()));
    let mut near = vec![false; members.len()];
    for (place, index) in order.into_iter().enumerate() {
        near[index] = subset::holds(window, place, members.len());
    }
    near
}

/// The rules by which some of the backends are asked before the others.
pub(super) struct Rules<'a> {
    pub(super) panic_below: u32,
    /// The zone of this process.
    pub(super) zone: Option<&'a str>,
    /// The shard, how many there are, and a number that is the process's own: where each shard asks
    /// its part of many backends.
    pub(super) subset: Option<(usize, usize, u64)>,
}

impl Usable {
    pub(super) fn of<P>(members: &[Rc<Member<P>>], version: u64, now: u64, rules: &Rules<'_>) -> Usable {
        let mut usable = Usable { version, fresh_until: u64::MAX, ..Usable::default() };
        let mut asked_in_panic = Vec::new();
        for (index, member) in members.iter().enumerate() {
            match member.state.standing(now) {
                Standing::Usable => usable.indices.push(index),
                Standing::OnTrial => usable.on_trial.push(index),
                Standing::Ejected(until) => usable.fresh_until = usable.fresh_until.min(until),
                Standing::Down => {}
                Standing::Drained => continue,
            }
            asked_in_panic.push(index);
        }
        usable.sound = usable.indices.len();
        let mut levels = Levels::of(members, &asked_in_panic, &usable.indices, rules.zone);
        if usable.sound * 100 < asked_in_panic.len() * rules.panic_below as usize
            && (levels.parts.len() < 2 || !levels.is_enough)
        {
            usable.is_panicking = true;
            usable.indices = asked_in_panic;
            levels = Levels::default();
        }
        usable.choose(members, &levels, rules);
        usable.weigh(members, now, &levels);
        usable
    }

    /// Leaves those that get no requests to the reserve.
    fn choose<P>(&mut self, members: &[Rc<Member<P>>], levels: &Levels, rules: &Rules<'_>) {
        let all = std::mem::take(&mut self.indices);
        let near = rules.subset.map(|subset| near(members, subset));
        let is_asked = |index: &usize| levels.part(*index) > 0.0;
        let is_near = |index: &usize| near.as_ref().is_none_or(|near| near[*index]);
        // A level of which this shard has no backend is asked as a whole.
        let has_near = |of: usize| all.iter().any(|index| levels.level(*index) == of && is_near(index));
        let is_in = |index: &usize| is_asked(index) && (is_near(index) || !has_near(levels.level(*index)));
        self.by_key = all.iter().copied().filter(is_asked).collect();
        (self.indices, self.reserve) = all.iter().copied().partition(is_in);
    }

    /// Backends that came back have a part of their weight, unless these are most.
    fn weigh<P>(&mut self, members: &[Rc<Member<P>>], now: u64, levels: &Levels) {
        let part = |index: &usize| match members[*index].state.returned_at.load(Relaxed) {
            0 => None,
            at => slow_start::part(now.saturating_sub(at)),
        };
        let starting = self.indices.iter().filter_map(part).count();
        let starts_slowly = starting > 0 && starting * 2 <= self.indices.len();
        self.weights = members.iter().map(|member| f64::from(member.state.weight.load(Relaxed))).collect();
        for index in &self.indices {
            if starts_slowly && let Some((share, changes_in)) = part(index) {
                self.weights[*index] *= share;
                self.fresh_until = self.fresh_until.min(now + changes_in);
            }
        }
        levels.share(&self.indices, &mut self.weights);
        let of_usable: Vec<f64> = self.indices.iter().map(|index| self.weights[*index]).collect();
        let mean = of_usable.iter().sum::<f64>() / of_usable.len().max(1) as f64;
        self.weights.iter_mut().for_each(|weight| *weight /= mean.max(f64::MIN_POSITIVE));
        let differ = of_usable.iter().any(|weight| *weight != of_usable[0]);
        self.table = differ.then(|| Alias::new(&of_usable));
    }

    /// The weight of a backend, where the mean is 1.
    pub(super) fn relative_weight(&self, index: usize) -> f64 {
        self.weights.get(index).copied().unwrap_or(1.0)
    }

    /// The backend whose turn it is, among indices, by weight.
    pub(super) fn in_turn(&self, among: &[usize], turn: usize) -> usize {
        let sum: f64 = among.iter().map(|index| self.relative_weight(*index)).sum();
        // Steps of the golden ratio: near turns are far apart, and each backend has its share in
        // the long run.
        let unit = (turn as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 11;
        let mut left = unit as f64 / (1u64 << 53) as f64 * sum;
        for index in among {
            left -= self.relative_weight(*index);
            if left < 0.0 {
                return *index;
            }
        }
        among[among.len() - 1]
    }

    /// The backends of a key, the first one first. Those that are ejected or down have their keys,
    /// so that no others move; the caller passes them over.
    pub(super) fn of_key<P>(&self, members: &[Rc<Member<P>>], key: u64) -> impl Iterator<Item = usize> {
        let ring = self.ring.get_or_init(|| {
            let members = members.iter().map(|member| &member.state).enumerate();
            let members = members.filter(|(_, state)| !state.is_drained.load(Relaxed));
            let named = members.map(|(index, state)| {
                let weight = f64::from(state.weight.load(Relaxed));
                (index as u32, hash(state.backend.name().as_bytes()), weight)
            });
            Maglev::new(&named.collect::<Vec<_>>())
        });
        let attempts = if ring.is_some() { KEY_ATTEMPTS } else { 0 };
        (0..attempts).filter_map(move |attempt| ring.as_ref().map(|ring| ring.at(key, attempt)))
    }

    /// The average of a backend that has none: as quick as half of the others. Found once a second.
    pub(super) fn median<P>(&self, members: &[Rc<Member<P>>], now: u64) -> f64 {
        let (median, until) = self.median.get();
        if now < until {
            return median;
        }
        let mut known: Vec<f64> =
            self.indices.iter().filter_map(|index| members[*index].ewma.get().read(now)).collect();
        known.sort_unstable_by(f64::total_cmp);
        let median = known.get(known.len() / 2).copied().unwrap_or(UNKNOWN);
        self.median.set((median, now + SECOND));
        median
    }
}
