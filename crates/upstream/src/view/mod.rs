//! The state of an upstream as a shard knows it, and its choice of a backend.

mod choice;
mod usable;

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use ringserve_server::Shard;
use ringserve_server::net::is_local_failure;

pub(crate) use choice::Choice;
use usable::{Rules, Usable};

use crate::backend::{BackendState, Counts, Standing};
use crate::locked;
use crate::policy::ewma::Ewma;
use crate::policy::hedge::Times;
use crate::policy::{p2c, part_of};
use crate::settings::Balance;
use crate::upstream::Upstream;

/// Nanoseconds between two times that a shard tells what it has in flight, and looks at what the
/// others have. Of totals this old balancing gets what it gets of exact ones.
const TOLD_EACH: u64 = 1_000_000;

/// The time after which a call looks again whether the first answer of a source is there.
const UNRESOLVED_LOOKS_EACH: Duration = Duration::from_millis(5);

/// A failure counts as an answer that took this long.
pub(crate) const PENALTY: u64 = 5_000_000_000;

/// The average of a backend where no other one is known: that of a quick one, so that it is asked.
const UNKNOWN: f64 = 1_000_000.0;

/// The state that a client keeps for each backend.
pub(crate) trait Part: 'static {
    /// The backend left, and gets no further request.
    fn leaves(&self);

    /// Connections that it has, and those of them that are idle.
    fn connections(&self) -> (u64, u64) {
        (0, 0)
    }
}

impl Part for () {
    fn leaves(&self) {}
}

/// A backend as a shard knows it. `P` is what the client keeps for each, such as connections.
pub(crate) struct Member<P> {
    pub(crate) state: Arc<BackendState>,
    pub(crate) part: P,
    ewma: Cell<Ewma>,
    in_flight: Cell<u32>,
    /// As it was reported to the other shards, and as they reported theirs.
    told: Cell<u32>,
    others: Cell<u32>,
    /// Counts since the last report.
    requests: Cell<u32>,
    successes: Cell<u32>,
    /// Nanoseconds of the successes.
    answer_time: Cell<u64>,
    /// Connections, and idle ones, as they were reported.
    connections: Cell<(u64, u64)>,
    returns: Cell<u32>,
}

impl<P> Member<P> {
    fn new(state: Arc<BackendState>, part: P) -> Member<P> {
        Member {
            returns: Cell::new(state.returns.load(Relaxed)),
            state,
            part,
            ewma: Cell::new(Ewma::NEW),
            in_flight: Cell::new(0),
            told: Cell::new(0),
            others: Cell::new(0),
            requests: Cell::new(0),
            successes: Cell::new(0),
            answer_time: Cell::new(0),
            connections: Cell::new((0, 0)),
        }
    }

    fn sample(&self, now: u64, nanos: u64) {
        let mut ewma = self.ewma.get();
        ewma.sample(now, nanos);
        self.ewma.set(ewma);
    }

    /// Tells which connections this shard has.
    fn tell_connections(&self, (open, idle): (u64, u64)) {
        let (told_open, told_idle) = self.connections.replace((open, idle));
        self.state.connections.fetch_add(open.wrapping_sub(told_open), Relaxed);
        self.state.idle.fetch_add(idle.wrapping_sub(told_idle), Relaxed);
    }

    /// Tells what this shard has in flight, and what happened. Learns what the others have.
    fn tell(&self, now: u64) {
        let (state, in_flight) = (&self.state, self.in_flight.get());
        let delta = u64::from(in_flight).wrapping_sub(u64::from(self.told.replace(in_flight)));
        let total = match delta {
            0 => state.in_flight.load(Relaxed),
            _ => state.in_flight.fetch_add(delta, Relaxed).wrapping_add(delta),
        };
        self.others.set(u32::try_from(total.saturating_sub(u64::from(in_flight))).unwrap_or(u32::MAX));
        if let requests @ 1.. = self.requests.take() {
            Counts::add(&state.counts.requests, u64::from(requests));
        }
        if let successes @ 1.. = self.successes.take() {
            locked(&state.window).add(now, successes, 0);
            Counts::add(&state.counts.answers, u64::from(successes));
            Counts::add(&state.counts.answer_time, self.answer_time.take());
        }
    }
}

impl<P> Drop for Member<P> {
    fn drop(&mut self) {
        self.tell_connections((0, 0));
        self.state.in_flight.fetch_sub(u64::from(self.told.get()), Relaxed);
    }
}

/// An upstream as a client of a shard sees it.
pub(crate) struct View<P: Part> {
    pub(crate) upstream: Upstream,
    pub(crate) shard: Shard,
    make_part: Box<dyn Fn() -> P>,
    members: RefCell<Vec<Rc<Member<P>>>>,
    usable: RefCell<Usable>,
    told_at: Cell<u64>,
    requests: Cell<u64>,
    turn: Cell<usize>,
    /// Of the last answers, for a client that asks second backends.
    times: RefCell<Times>,
}

impl<P: Part> View<P> {
    pub(crate) fn new(upstream: &Upstream, shard: &Shard, make_part: impl Fn() -> P + 'static) -> View<P> {
        upstream.state().is_viewed(shard.now().as_nanos());
        let random = shard.random();
        // The first one draws it for the process, so that processes do not agree.
        let _ = upstream.state().seed.compare_exchange(0, random | 1, Relaxed, Relaxed);
        View {
            upstream: upstream.clone(),
            shard: shard.clone(),
            make_part: Box::new(make_part),
            members: RefCell::default(),
            usable: RefCell::default(),
            told_at: Cell::new(0),
            requests: Cell::new(0),
            // Shards do not begin with the same one.
            turn: Cell::new(random as usize >> 16),
            times: RefCell::default(),
        }
    }

    pub(crate) fn now(&self) -> u64 {
        self.shard.now().as_nanos()
    }

    /// The backends, also those that may not be asked.
    pub(crate) fn members(&self) -> Vec<Rc<Member<P>>> {
        self.members.borrow().clone()
    }

    /// The backend with the least of something.
    pub(crate) fn least_by(&self, of: impl Fn(&Member<P>) -> u64) -> Option<Rc<Member<P>>> {
        self.members.borrow().iter().min_by_key(|member| of(member)).cloned()
    }

    /// True if the backend may be asked.
    pub(crate) fn is_usable(&self, member: &Member<P>) -> bool {
        member.state.standing(self.now()) == Standing::Usable
    }

    /// Nanoseconds after which a question that may be asked twice is asked of a second backend.
    /// `None` if it is not.
    pub(crate) fn hedge_delay(&self) -> Option<u64> {
        self.upstream.settings().hedge.as_ref()?;
        self.times.borrow().delay()
    }

    /// Counts a request for the budget of retries.
    pub(crate) fn count_request(&self) {
        self.requests.set(self.requests.get() + 1);
    }

    /// Tells the other shards what this one has, and learns what they have.
    pub(crate) fn tell(&self, now: u64) {
        self.told_at.set(now);
        self.upstream.state().newest.store(now, Relaxed);
        if let requests @ 1.. = self.requests.take() {
            self.upstream.state().add_requests(now, requests);
        }
        self.members.borrow().iter().for_each(|member| member.tell(now));
    }

    /// Tells which connections this shard has, once a second: nothing is decided by it.
    pub(crate) fn tell_connections(&self) {
        self.members.borrow().iter().for_each(|member| member.tell_connections(member.part.connections()));
    }

    /// Looks whether others may be asked than before.
    pub(crate) fn look(&self, now: u64) {
        let version = self.upstream.state().version();
        let is_known = {
            let usable = self.usable.borrow();
            usable.version == version && now < usable.fresh_until
        };
        if is_known {
            return;
        }
        let backends = self.upstream.state().backends();
        let mut members = self.members.borrow_mut();
        let old = std::mem::take(&mut *members);
        let find = |state: &Arc<BackendState>| old.iter().find(|member| Arc::ptr_eq(&member.state, state));
        let make = |state: &Arc<BackendState>| Rc::new(Member::new(state.clone(), (self.make_part)()));
        members.extend(backends.iter().map(|state| find(state).cloned().unwrap_or_else(|| make(state))));
        for member in members.iter() {
            let returns = member.state.returns.load(Relaxed);
            // What was known of one that is back is what it was before it failed.
            if member.returns.replace(returns) != returns {
                member.ewma.set(Ewma::NEW);
            }
        }
        *self.usable.borrow_mut() = Usable::of(&members, version, now, &self.rules());
        drop(members);
        // Connections of backends that left end here, also where a call still holds one of them.
        // Their drop may look at the view.
        old.iter()
            .filter(|member| member.state.is_gone.load(Relaxed))
            .for_each(|member| member.part.leaves());
        drop(old);
    }

    fn rules(&self) -> Rules<'_> {
        let settings = self.upstream.settings();
        // What lasts is counted exactly, and over all backends.
        let is_subset = settings.has_subset && !self.is_exact();
        let seed = self.upstream.state().seed.load(Relaxed);
        Rules {
            panic_below: settings.panic_below,
            zone: settings.zone.as_deref(),
            subset: is_subset.then(|| (self.shard.index(), self.shard.count(), seed)),
        }
    }

    /// Waits until the source of the backends answered for the first time, or failed, or as long as
    /// a call may wait for a connection.
    pub(crate) async fn is_resolved(&self, until: u64) {
        if !self.upstream.is_unresolved() {
            return;
        }
        let wait_max = u64::try_from(self.upstream.settings().pool.wait_max.as_nanos()).unwrap_or(u64::MAX);
        let until = until.min(self.now().saturating_add(wait_max));
        while self.upstream.is_unresolved() && self.now() < until {
            self.shard.sleep(UNRESOLVED_LOOKS_EACH).await;
        }
    }

    /// A connection failed for which no call waits.
    pub(crate) fn blame(&self, member: &Member<P>, error: &io::Error) {
        if is_local_failure(error) {
            return;
        }
        let now = self.now();
        member.sample(now, PENALTY);
        if self.upstream.settings().ejection {
            self.upstream.state().failed(&member.state, now, self.shard.random());
        }
    }

    /// Chooses a backend that is not among those `tried`, and for which `is_for` is true.
    pub(crate) fn choose(
        self: &Rc<View<P>>,
        tried: &[Rc<Member<P>>],
        is_for: Option<&dyn Fn(&BackendState) -> bool>,
    ) -> Option<Choice<P>> {
        self.choose_at(self.now(), tried, is_for)
    }

    /// The same for one who has read the clock.
    pub(crate) fn choose_at(
        self: &Rc<View<P>>,
        now: u64,
        tried: &[Rc<Member<P>>],
        is_for: Option<&dyn Fn(&BackendState) -> bool>,
    ) -> Option<Choice<P>> {
        self.look(now);
        if now.saturating_sub(self.told_at.get()) >= TOLD_EACH {
            self.tell(now);
        }
        let may = |member: &Rc<Member<P>>| {
            !tried.iter().any(|other| Rc::ptr_eq(other, member))
                && is_for.is_none_or(|is_for| is_for(&member.state))
        };
        let members = self.members.borrow();
        let usable = self.usable.borrow();
        if usable.is_panicking {
            self.upstream.state().panics(now, usable.sound, usable.indices.len());
        }
        let on_trial = usable
            .on_trial
            .iter()
            .map(|index| &members[*index])
            .find(|member| may(member) && take_trial(member));
        if let Some(member) = on_trial {
            return Some(Choice::new(self, member, now, true, self.is_exact()));
        }
        let is_open = tried.is_empty() && is_for.is_none();
        let some: Vec<usize>;
        let among = if is_open {
            &usable.indices
        } else {
            let may_be = |indices: &[usize]| -> Vec<usize> {
                indices.iter().copied().filter(|index| may(&members[*index])).collect()
            };
            let first = may_be(&usable.indices);
            some = if first.is_empty() { may_be(&usable.reserve) } else { first };
            &some
        };
        if among.is_empty() {
            return if tried.is_empty() { self.last_resort(&members, may, now) } else { None };
        }
        let member = match self.upstream.settings().balance {
            Balance::Least => return Some(self.least(&members, &usable, among, now)),
            Balance::RoundRobin => self.next(&members, &usable, among),
            Balance::PeakEwma => self.quickest(&members, &usable, among, now, is_open),
        };
        Some(Choice::new(self, member, now, false, false))
    }

    /// Chooses the backend of a key, or where that may not be asked the next one of the key, so
    /// that equal keys meet.
    pub(crate) fn choose_by_key(
        self: &Rc<View<P>>,
        now: u64,
        key: u64,
        tried: &[Rc<Member<P>>],
        is_for: Option<&dyn Fn(&BackendState) -> bool>,
    ) -> Option<Choice<P>> {
        self.look(now);
        let chosen = {
            let (members, usable) = (self.members.borrow(), self.usable.borrow());
            let may = |index: &usize| {
                let member = &members[*index];
                !tried.iter().any(|other| Rc::ptr_eq(other, member))
                    && is_for.is_none_or(|is_for| is_for(&member.state))
            };
            let mut of_key = usable.of_key(&members, key).filter(may);
            of_key.find_map(|index| {
                if usable.by_key.contains(&index) {
                    return Some((members[index].clone(), false));
                }
                let is_trial = usable.on_trial.contains(&index) && take_trial(&members[index]);
                is_trial.then(|| (members[index].clone(), true))
            })
        };
        let Some((member, is_trial)) = chosen else { return self.choose_at(now, tried, is_for) };
        if now.saturating_sub(self.told_at.get()) >= TOLD_EACH {
            self.tell(now);
        }
        Some(if is_trial {
            Choice::new(self, &member, now, true, self.is_exact())
        } else {
            self.place(&member, now)
        })
    }

    /// A choice for which no place was taken yet.
    fn place(self: &Rc<View<P>>, member: &Rc<Member<P>>, now: u64) -> Choice<P> {
        if self.is_exact() {
            member.state.in_flight.fetch_add(1, Relaxed);
            member.told.set(member.told.get() + 1);
        }
        Choice::new(self, member, now, false, self.is_exact())
    }

    /// A backend that is ejected, where no other one may be asked: what fails now and then is
    /// better than none.
    fn last_resort(
        self: &Rc<View<P>>,
        members: &[Rc<Member<P>>],
        may: impl Fn(&Rc<Member<P>>) -> bool,
        now: u64,
    ) -> Option<Choice<P>> {
        let is_ejected = |member: &&Rc<Member<P>>| member.state.is_askable() && may(member);
        let ejected: Vec<_> = members.iter().filter(is_ejected).collect();
        let member = *ejected.get(self.shard.random() as usize % ejected.len().max(1))?;
        Some(self.place(member, now))
    }

    /// True if requests in flight are reported at once.
    fn is_exact(&self) -> bool {
        self.upstream.settings().balance == Balance::Least
    }

    fn quickest<'m>(
        &self,
        members: &'m [Rc<Member<P>>],
        usable: &Usable,
        among: &[usize],
        now: u64,
        is_open: bool,
    ) -> &'m Rc<Member<P>> {
        let load = |place: usize| {
            let member = &members[among[place]];
            let average = member.ewma.get().read(now).unwrap_or_else(|| usable.median(members, now));
            let in_flight = member.in_flight.get().saturating_add(member.others.get());
            let weight = if usable.table.is_some() { usable.relative_weight(among[place]) } else { 1.0 };
            p2c::load(average, in_flight, weight)
        };
        let place = match &usable.table {
            Some(table) if is_open => p2c::by_weight(table, among.len(), || self.shard.random(), load),
            _ => p2c::lower_of_two(among.len(), self.shard.random(), load),
        };
        &members[among[place]]
    }

    fn next<'m>(&self, members: &'m [Rc<Member<P>>], usable: &Usable, among: &[usize]) -> &'m Rc<Member<P>> {
        let turn = self.turn.replace(self.turn.get().wrapping_add(1));
        &members[usable.in_turn(among, turn)]
    }

    /// Takes a place at the backend with the fewest in flight for its weight. Among equals chance
    /// decides, by weight: with short connections all counts are usually 0.
    fn least(
        self: &Rc<View<P>>,
        members: &[Rc<Member<P>>],
        usable: &Usable,
        among: &[usize],
        now: u64,
    ) -> Choice<P> {
        loop {
            let load = |index: usize| {
                let count = members[index].state.in_flight.load(Relaxed);
                (count, count as f64 / usable.relative_weight(index))
            };
            let least = among.iter().map(|index| load(*index).1).fold(f64::INFINITY, f64::min);
            // Each further one takes over with its part of the weight so far.
            let (mut chosen, mut sum) = ((among[0], 0), 0.0);
            for index in among {
                let (count, load) = load(*index);
                if load > least {
                    continue;
                }
                let weight = usable.relative_weight(*index);
                sum += weight;
                if part_of(1 << 53, self.shard.random()) as f64 * sum < weight * (1u64 << 53) as f64 {
                    chosen = (*index, count);
                }
            }
            let (member, count) = (&members[chosen.0], chosen.1);
            // Where another shard was quicker the count is another one: this one looks again.
            if sum > 0.0
                && member.state.in_flight.compare_exchange_weak(count, count + 1, Relaxed, Relaxed).is_ok()
            {
                member.told.set(member.told.get() + 1);
                return Choice::new(self, member, now, false, true);
            }
        }
    }
}

impl<P: Part> Drop for View<P> {
    fn drop(&mut self) {
        self.upstream.state().is_left();
    }
}

/// Takes the one place of a backend on trial.
fn take_trial<P>(member: &Rc<Member<P>>) -> bool {
    member.state.is_tried.compare_exchange(false, true, Relaxed, Relaxed).is_ok()
}
