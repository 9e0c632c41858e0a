//! The backends that may be asked, until something changes.

use std::cell::{Cell, OnceCell};
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;

use super::{Member, UNKNOWN};
use crate::backend::Standing;
use crate::policy::SECOND;
use crate::policy::alias::Alias;
use crate::policy::maglev::{Maglev, hash};
use crate::policy::slow_start;

/// Backends that are looked at for a key, until it has any.
const KEY_ATTEMPTS: u32 = 32;

/// The backends that may be asked, as indices, until `version` changes or the time is over.
#[derive(Default)]
pub(super) struct Usable {
    pub(super) version: u64,
    pub(super) fresh_until: u64,
    pub(super) indices: Vec<usize>,
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

impl Usable {
    pub(super) fn of<P>(members: &[Rc<Member<P>>], version: u64, now: u64, panic_below: u32) -> Usable {
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
        if usable.sound * 100 < asked_in_panic.len() * panic_below as usize {
            usable.is_panicking = true;
            usable.indices = asked_in_panic;
        }
        usable.weigh(members, now);
        usable
    }

    /// Backends that came back have a part of their weight, unless these are most.
    fn weigh<P>(&mut self, members: &[Rc<Member<P>>], now: u64) {
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
