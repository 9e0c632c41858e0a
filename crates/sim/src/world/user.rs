//! Events outside calls: user code that uses handles and names, messages of other threads and
//! shards.

use ringserve_core::{CloseReason, ConnId, LaneId, Page};

use super::events::session_of;
use super::{Above, Core};
use crate::faults::Fault;
use crate::kernel::address_of;
use crate::service::{self, Session};
use crate::sock::excuse;

/// Of how many turns a source of work comes to have some in one.
const PAGES_ASKED: u64 = 200;

/// Steps of the pages of a turn, at most.
const PAGE_STEPS_MAX: u32 = 128;

/// Turns for which a source waits, at most, unless memory holds it off: each turn has a step for
/// one of the other three.
const PAGE_TURNS_MAX: u64 = 4;

/// A source of work that is done a page at a time.
pub(super) struct Source {
    pub(super) number: u32,
    /// Steps that it wants.
    wants: u32,
    /// The turns in which it asked, or had a page, and in which it had one.
    asked_turn: u64,
    page_turn: u64,
}

impl Source {
    pub(super) fn new(number: u32) -> Source {
        Source { number, wants: 0, asked_turn: 0, page_turn: 0 }
    }
}

impl Above {
    /// Reads the messages that other threads and shards left for this one.
    pub(super) fn read_letters(&mut self, core: &mut Core) {
        let state = &mut *self.state.borrow_mut();
        let now = self.now.as_nanos();
        self.moved |= self.pushes.deliver(state, &self.live, now);
        let Some(other) = &mut self.other_shard else { return };
        for (socket, listener) in other.returned(state, now) {
            self.moved = true;
            let tag = state.descriptor(socket.0 as i32);
            self.protocol.passed_back(socket);
            core.take_handed_off(listener, socket, Some(address_of(tag)));
        }
    }

    /// Takes a turn of the other shard, and exchanges their messages.
    pub(super) fn other_shard(&mut self, core: &mut Core) {
        let state = &mut *self.state.borrow_mut();
        state.has_room = core.slots_left() > 0;
        let Some(other) = &mut self.other_shard else { return };
        other.turn(state, self.now, self.ahead);
        other.check(core.connections(LaneId::FIRST));
        other.offer_room(state, core);
        if state.has_room && !other.quota_left() {
            state.cover.fault(Fault::QuotaUsedUp);
        }
        // Sockets that wait here because there was no room anywhere are not passed on later, and
        // hold up the backlog.
        state.has_room |= other.is_known_to_have_room() && !self.protocol.has_waiting();
        state.has_room &= other.quota_left();
    }

    /// Actions of the service's tasks outside calls: return frames, push, use old names.
    pub(super) fn user_code(&mut self, core: &mut Core) {
        let now = self.now.as_nanos();
        for (_, shared) in &self.live {
            let mut kept = shared.body().kept.borrow_mut();
            if !kept.is_empty() {
                kept.retain(|(until, _)| *until > now);
            }
        }
        self.pushes.act(&mut self.state.borrow_mut(), &self.live);
        self.ask_pages(core);
        self.connect(core);
        let state = &mut *self.state.borrow_mut();
        if state.plan.unusual == 0 || !state.rng.one_in(32) {
            return;
        }
        if let Some(last) = self.live.len().checked_sub(1) {
            let (_, shared) = &self.live[state.rng.range(0, last as u64) as usize];
            if !shared.is_full() && state.socks[shared.body().tag].opened {
                state.cover.fault(Fault::PushElsewhere);
                service::say(state, shared, 9.min(state.plan.payload_max));
                self.moved = true;
            }
        }
        if !self.old.is_empty() {
            state.cover.fault(Fault::OldName);
            let id = state.rng.pick(&self.old);
            assert!(core.shared(id).is_none(), "{id} is gone, and is found");
            core.finish(id, CloseReason::Closed);
            let parked = core.call_parked(id, 7, 1000);
            assert_eq!((parked.next, parked.bytes), (None, 0), "{id} is gone, and has a handler");
            core.call_done(id, 7, parked, None);
            self.gone = Some(id);
        }
    }

    /// Sources of work come to have some.
    fn ask_pages(&mut self, core: &Core) {
        let state = &mut *self.state.borrow_mut();
        for source in &mut self.sources {
            if !state.rng.one_in(PAGES_ASKED) {
                continue;
            }
            if source.wants == 0 {
                source.asked_turn = self.turn;
            }
            source.wants += state.rng.spread(1, 400) as u32;
            core.all_share().ask_page(source.number);
        }
    }

    /// A page of a source: what it pushes, and what must hold of the turn.
    pub(super) fn push_page(&mut self, source: u32, page: &mut Page) -> bool {
        let state = &mut *self.state.borrow_mut();
        let place = self.sources.iter().position(|known| known.number == source);
        let source = &mut self.sources[place.expect("a source that was added has a page")];
        assert!(source.wants > 0, "a source has a page, and did not ask");
        assert!(source.page_turn < self.turn, "a source has two pages in a turn");
        (source.page_turn, source.asked_turn, self.moved) = (self.turn, self.turn, true);
        while source.wants > 0 && page.take(0) {
            source.wants -= 1;
            self.page_steps += 1;
            let Some(last) = self.live.len().checked_sub(1) else { continue };
            let (_, shared) = &self.live[state.rng.range(0, last as u64) as usize];
            if !shared.is_full() && state.socks[shared.body().tag].opened {
                state.cover.fault(Fault::PagePushes);
                service::say(state, shared, 9.min(state.plan.payload_max));
            }
        }
        if source.wants > 0 {
            state.cover.fault(Fault::PageFull);
        }
        source.wants > 0
    }

    /// Panics if pages took more of a turn than they may, or a source waits for too long.
    pub(super) fn check_pages(&mut self) {
        let steps = std::mem::take(&mut self.page_steps);
        assert!(steps <= PAGE_STEPS_MAX, "{steps} steps of pages in a turn");
        // A shard does not sleep while memory holds its pages off.
        self.held_off |= self.sources.iter().any(|source| source.wants > 0 && source.page_turn < self.turn);
        let is_held_off = self.state.borrow().plan.tight_memory;
        for source in self.sources.iter().filter(|source| source.wants > 0 && !is_held_off) {
            let waited = self.turn - source.asked_turn;
            assert!(waited <= PAGE_TURNS_MAX, "a source waits for a page for {waited} turns");
        }
    }

    /// Makes the service connect to an upstream, or give up one that does not answer.
    fn connect(&mut self, core: &mut Core) {
        let state = &mut *self.state.borrow_mut();
        self.connecting.retain(|id| {
            core.shared(*id).is_some_and(|shared| !state.socks[session_of(shared).body().tag].opened)
        });
        if !self.connecting.is_empty() && state.plan.unusual > 0 && state.rng.one_in(16) {
            let id = state.rng.pick(&self.connecting);
            if let Some(shared) = core.shared(id).map(session_of) {
                state.cover.fault(Fault::UpstreamGivenUp);
                state.socks[shared.body().tag].excuses |= excuse::ABORTED;
                core.abort(id, CloseReason::Aborted);
                self.moved = true;
            }
        }
        if self.upstreams.is_empty() || !state.rng.one_in(4) {
            return;
        }
        let Some(tag) = self.upstreams.pop() else { return };
        let session = Session { tag, ..Session::default() };
        self.moved = true;
        match core.connect(self.lane, address_of(tag).into(), session) {
            Some(id) => {
                state.socks[tag].opened_at = self.now.as_nanos();
                self.connecting.push(id);
                self.tallies[1].opened += 1;
            }
            None => {
                let full = core.connections_left(self.lane) == 0;
                assert!(full || self.drained_at.is_some(), "there is room for an upstream");
                state.cover.fault(Fault::UpstreamFull);
            }
        }
    }

    /// Makes the service close connections that it held open, when it is time.
    pub(super) fn close_held(&mut self, core: &Core) {
        let now = self.now.as_nanos();
        let (due, later) = std::mem::take(&mut self.closings).into_iter().partition(|(at, _)| *at <= now);
        self.closings = later;
        let due: Vec<(u64, ConnId)> = due;
        for (_, id) in due {
            if let Some(shared) = core.shared(id).map(session_of) {
                self.moved = true;
                service::close_held(&mut self.state.borrow_mut(), &shared);
            }
        }
    }
}
