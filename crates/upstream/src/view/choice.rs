//! A backend that was chosen for a request, until the outcome is known.

use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::{Member, PENALTY, Part, View};
use crate::backend::BackendState;

/// A backend with a request in flight. Its drop says that the request was given up.
pub(crate) struct Choice<P: Part> {
    view: Rc<View<P>>,
    member: Rc<Member<P>>,
    begun: u64,
    is_trial: bool,
    /// Changes of requests in flight are reported at once.
    is_exact: bool,
    is_settled: bool,
    settled_at: u64,
}

impl<P: Part> Choice<P> {
    /// Of an exact one that is no trial the place is taken already.
    pub(super) fn new(
        view: &Rc<View<P>>,
        member: &Rc<Member<P>>,
        now: u64,
        is_trial: bool,
        is_exact: bool,
    ) -> Choice<P> {
        member.in_flight.set(member.in_flight.get() + 1);
        member.requests.set(member.requests.get() + 1);
        if is_exact {
            if is_trial {
                member.state.in_flight.fetch_add(1, Relaxed);
                member.told.set(member.told.get() + 1);
            }
            member.tell(now);
        }
        Choice {
            view: view.clone(),
            member: member.clone(),
            begun: now,
            is_trial,
            is_exact,
            is_settled: false,
            settled_at: 0,
        }
    }

    pub(crate) fn member(&self) -> &Rc<Member<P>> {
        &self.member
    }

    /// When it was made, in nanoseconds.
    pub(crate) fn begun(&self) -> u64 {
        self.begun
    }

    pub(crate) fn state(&self) -> &BackendState {
        &self.member.state
    }

    /// It answered.
    pub(crate) fn succeeded(&mut self) {
        let now = self.settle();
        self.member.sample(now, now - self.begun);
        if let Some(hedge) = &self.view.upstream.settings().hedge {
            self.view.times.borrow_mut().add(now - self.begun, hedge.percentile);
        }
        self.member.successes.set(self.member.successes.get() + 1);
        self.member.answer_time.set(self.member.answer_time.get() + (now - self.begun));
        if self.state().in_a_row.load(Relaxed) != 0 {
            self.state().in_a_row.store(0, Relaxed);
        }
        self.end_trial(Some(true), now);
    }

    /// It did not do what it should.
    pub(crate) fn failed(&mut self) {
        let now = self.settle();
        self.member.sample(now, PENALTY.max(now - self.begun));
        let (upstream, random) = (&self.view.upstream, self.view.shard.random());
        if self.is_trial {
            self.end_trial(Some(false), now);
        } else if upstream.settings().ejection {
            upstream.state().failed(self.state(), now, random);
        }
    }

    /// Notes an end that says nothing about the backend.
    pub(crate) fn says_nothing(&mut self) {
        let now = self.settle();
        self.end_trial(None, now);
    }

    pub(crate) fn is_trial(&self) -> bool {
        self.is_trial
    }

    /// Time limit of a trial.
    pub(crate) fn trial_time(&self) -> Duration {
        self.view.upstream.settings().connect_timeout
    }

    /// Gives the trial up: its end decides nothing, and another request may try the backend.
    pub(crate) fn gives_up_trial(&mut self) {
        let now = self.view.now();
        self.end_trial(None, now);
    }

    pub(crate) fn is_settled(&self) -> bool {
        self.is_settled
    }

    /// When its outcome was noted, in nanoseconds; now, if it was not.
    pub(crate) fn settled_at(&self) -> u64 {
        if self.is_settled { self.settled_at } else { self.view.now() }
    }

    fn settle(&mut self) -> u64 {
        self.is_settled = true;
        self.settled_at = self.view.now();
        self.settled_at
    }

    fn end_trial(&mut self, works: Option<bool>, now: u64) {
        if std::mem::take(&mut self.is_trial) {
            self.view.upstream.state().tried(self.state(), works, now, self.view.shard.random());
        }
    }
}

impl<P: Part> Drop for Choice<P> {
    fn drop(&mut self) {
        if !self.is_settled {
            let now = self.settle();
            let mut ewma = self.member.ewma.get();
            ewma.at_least(now, now - self.begun);
            self.member.ewma.set(ewma);
            self.end_trial(None, now);
        }
        self.member.in_flight.set(self.member.in_flight.get() - 1);
        if self.is_exact {
            self.member.tell(self.view.now());
        }
    }
}
