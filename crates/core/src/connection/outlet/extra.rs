//! Fields that few connections need in addition to their outbox: tasks that wait for room, a gate
//! for other threads, limits and an account.

use alloc::boxed::Box;
use alloc::rc::Rc;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::any::Any;
use core::net::SocketAddr;
use core::task::Waker;

use super::{ABORT, ACCOUNTED, AWAITED, CLOSE, GATED, LIMITED, NOT_FRAMED, Outlet};
use crate::limits::{ReadRates, Times, ordered};
use crate::proxy::{Ends, ProxyFacts, Tlvs};
use crate::time::Stamp;
use crate::{Account, CloseReason, ConnLimits, LimitError, PeerCredentials, RemoteGate, Time};

/// Fields that few connections need.
#[derive(Default)]
pub(super) struct Extra {
    /// Woken when the outbox falls below its low mark.
    ready: Option<Waker>,
    /// Wakers of the connection's other calls, woken at the same time.
    more_ready: Vec<Waker>,
    pub(super) gate: Option<Arc<RemoteGate>>,
    /// Bytes that the service holds for it, and those that are reserved for an answer.
    service_bytes: usize,
    reserved_bytes: usize,
    /// The reason for which user code closes or aborts it, if it gave a specific one.
    pub(super) reason: Option<CloseReason>,
    asked: Option<Box<SocketFacts>>,
    /// The answer that its channel would give if it still existed.
    last_facts: Option<Rc<dyn Any>>,
    limits: Option<Box<OwnLimits>>,
}

/// Facts that the kernel was asked for when the connection was accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketFacts {
    /// The address that the peer connected to.
    pub local: Option<SocketAddr>,
    /// The process at the other end of a Unix socket.
    pub credentials: Option<PeerCredentials>,
}

/// The limits of a connection that has its own, instead of its lane's.
#[derive(Clone, Copy)]
pub(crate) struct OwnLimits {
    pub frame_bytes_max: usize,
    pub times: Times,
    pub read_rates: Option<ReadRates>,
}

impl Outlet {
    /// Further facts that the kernel was asked for.
    pub fn asked(&self) -> SocketFacts {
        let extra = self.extra.take();
        let asked = extra.as_ref().and_then(|extra| extra.asked.as_deref().copied());
        self.extra.set(extra);
        asked.unwrap_or_default()
    }

    /// Keeps the kernel's answers, if there were any.
    pub fn set_asked(&self, asked: SocketFacts) {
        if asked != SocketFacts::default() {
            self.with_extra(|extra| extra.asked = Some(Box::new(asked)));
        }
    }

    /// Facts from its PROXY header in addition to the client's address. They stay until the
    /// connection's slot is reused.
    pub fn proxied(&self) -> ProxyFacts {
        self.lane.headers().of(self.id)
    }

    /// The further fields of its PROXY header, if they were kept.
    pub fn tlvs(&self) -> Option<Tlvs> {
        self.lane.headers().tlvs_of(self.id)
    }

    /// Keeps the facts of a PROXY header. False if the system has no memory for them.
    pub(crate) fn keep_header(&self, ends: Option<Ends>, tlvs: Option<Tlvs>) -> bool {
        if ends.is_none() && tlvs.is_none() {
            return true;
        }
        let proxied =
            ProxyFacts { via: ends.and(self.peer()), destination: ends.map(|ends| ends.destination) };
        if let Some(ends) = ends {
            self.peer.set(Some(ends.source).into());
        }
        self.lane.headers().keep(self.id, proxied, tlvs)
    }

    /// Facts from the handshake of its transport. They stay at least until the connection's slot is
    /// reused.
    #[doc(alias = "facts")]
    pub fn transport_info(&self) -> Option<Rc<dyn Any>> {
        let on_demand = || {
            let channels = self.lane.shard().channels();
            channels.ask(self.id, |channel| channel.info_on_demand()).flatten()
        };
        self.lane.facts().of(self.id).or_else(on_demand).or_else(|| {
            let extra = self.extra.take();
            let facts = extra.as_ref().and_then(|extra| extra.last_facts.clone());
            self.extra.set(extra);
            facts
        })
    }

    /// Keeps the answer of its channel, which is about to be dropped.
    pub(crate) fn keep_last_facts(&self, facts: Rc<dyn Any>) {
        self.with_extra(|extra| extra.last_facts = Some(facts));
    }

    /// Keeps facts from a handshake. False if the system has no memory for them.
    pub(crate) fn keep_facts(&self, facts: Rc<dyn Any>) -> bool {
        self.lane.facts().keep(self.id, facts)
    }

    /// Wakes `waker` when the outbox falls below its low mark, once.
    pub fn wake_when_ready(&self, waker: &Waker) {
        // Cloning and dropping a waker may run others' code, so both happen outside the closure.
        let new = waker.clone();
        let unused = self.with_extra(|extra| {
            let known = extra.ready.iter().chain(&extra.more_ready).any(|old| old.will_wake(&new));
            if known {
                return Some(new);
            }
            if extra.ready.is_none() {
                extra.ready = Some(new);
            } else {
                extra.more_ready.push(new);
            }
            None
        });
        drop(unused);
        self.set(AWAITED);
        // A send that was started in this turn, when nothing waited for its end, must be waited
        // for.
        self.mark_dirty();
    }

    /// Gives out the wakers of the tasks that wait for room. The caller wakes them: wakers are user
    /// code, which may panic, and must not do so in the middle of the state machine.
    pub(crate) fn take_ready(&self, mut take: impl FnMut(Waker)) {
        if !self.has(AWAITED) {
            return;
        }
        self.clear(AWAITED);
        let all = |extra: &mut Extra| (extra.ready.take(), core::mem::take(&mut extra.more_ready));
        let (first, more) = self.with_extra(all);
        first.into_iter().chain(more).for_each(&mut take);
    }

    /// Allocates at the first call.
    pub(super) fn with_extra<T>(&self, change: impl FnOnce(&mut Extra) -> T) -> T {
        let mut extra = self.extra.take().unwrap_or_default();
        let result = change(&mut extra);
        self.extra.set(Some(extra));
        result
    }

    /// The state of this connection for other threads. The first call allocates.
    pub fn gate(&self) -> Arc<RemoteGate> {
        let make =
            || Arc::new(RemoteGate::new(self.outbox_bytes(), self.lane.outbox_bytes_high(), self.is_gone()));
        let gate = self.with_extra(|extra| extra.gate.get_or_insert_with(make).clone());
        self.set(GATED);
        self.update_gate();
        // As in `wake_when_ready`: a thread that is refused now waits for a send that was started
        // in this turn.
        self.mark_dirty();
        gate
    }

    #[inline]
    pub(super) fn update_gate(&self) {
        if !self.has(GATED) {
            return;
        }
        self.with_extra(|extra| {
            let Some(gate) = &extra.gate else { return };
            gate.set_outbox_bytes(self.outbox_bytes());
            if self.has(CLOSE | NOT_FRAMED) {
                gate.ask_close();
            }
            if self.has(ABORT) {
                gate.ask_abort();
            }
            if self.is_gone() {
                gate.set_gone();
            }
        });
    }

    /// Sets how many bytes the service now holds for the connection in addition to what the shard
    /// sees, as in the buffers of a library. They count in
    /// [`ServerLimits::held_bytes_max`](crate::limits::ServerLimits::held_bytes_max) until the
    /// connection ends; beyond it the connections that hold most are closed. The first call
    /// allocates.
    pub fn set_service_bytes(&self, bytes: usize) {
        if self.is_gone() {
            return;
        }
        let before = self.with_extra(|extra| core::mem::replace(&mut extra.service_bytes, bytes));
        self.lane.shard().set_service_bytes(before, bytes);
        if bytes > before {
            // The state machine checks whether that is too much.
            self.mark_dirty();
        }
    }

    /// Reserves bytes for an answer, which count as held by the service.
    pub(crate) fn reserve(&self, bytes: usize) {
        self.with_extra(|extra| extra.reserved_bytes += bytes);
        self.lane.shard().set_service_bytes(0, bytes);
        self.mark_dirty();
    }

    /// Gives back bytes that were reserved, unless the connection's end did.
    pub(crate) fn unreserve(&self, bytes: usize) {
        let Some(mut extra) = self.extra.take() else { return };
        let bytes = bytes.min(extra.reserved_bytes);
        extra.reserved_bytes -= bytes;
        self.extra.set(Some(extra));
        self.lane.shard().release(bytes);
    }

    /// The bytes last passed to [`set_service_bytes`](Outlet::set_service_bytes), and those that
    /// are reserved.
    pub(crate) fn service_bytes(&self) -> usize {
        let extra = self.extra.take();
        let bytes = extra.as_ref().map_or(0, |extra| extra.service_bytes + extra.reserved_bytes);
        self.extra.set(extra);
        bytes
    }

    /// Bounds the connection by other limits than those of its service, from now on. Limits that an
    /// earlier call set and this one does not are the service's again, except a deadline.
    /// Allocates; a connection without its own limits holds no memory for them, and one that has
    /// only a deadline holds memory only for that.
    ///
    /// # Errors
    /// As [`Limits::check`](crate::Limits::check), for these limits together with the service's,
    /// and if a frame may be larger than all that the shard may hold; nothing is changed then.
    pub fn set_limits(&self, limits: &ConnLimits) -> Result<(), LimitError> {
        limits.check_deadline()?;
        let (deadline, own) = (limits.deadline, limits.names_others() || self.is_limited());
        let limits = limits.over(self.lane.limits());
        limits.check()?;
        ordered(
            "Limits::frame_bytes_max",
            limits.frame_bytes_max,
            "ServerLimits::held_bytes_max",
            self.lane.shard().held_bytes_max(),
        )?;
        if deadline.is_some_and(|time| !self.lane.shard().change_deadline(self.id, time)) {
            self.refuse();
        }
        if own {
            let own = OwnLimits {
                frame_bytes_max: limits.frame_bytes_max,
                times: Times::new(&limits, None),
                read_rates: ReadRates::new(&limits),
            };
            self.with_extra(|extra| extra.limits = Some(Box::new(own)));
            self.set(LIMITED);
        }
        // The state machine checks when they are due.
        self.mark_dirty();
        Ok(())
    }

    /// Steps from `now` until its deadline is over, negative if that was earlier.
    #[cold]
    pub(crate) fn deadline_left(&self, now: Stamp) -> i64 {
        self.lane.shard().deadlines().left(self.id, now)
    }

    #[inline]
    pub(crate) fn is_limited(&self) -> bool {
        self.has(LIMITED)
    }

    /// The limits that were set, if any were.
    #[cold]
    pub(crate) fn own_limits(&self) -> Option<OwnLimits> {
        let extra = self.extra.take();
        let limits = extra.as_ref().and_then(|extra| extra.limits.as_deref().copied());
        self.extra.set(extra);
        limits
    }

    /// Starts to count what the connection sends and receives. False if the system has no memory
    /// for that.
    pub fn open_account(&self, now: Time) -> bool {
        let is_open = self.lane.accounts().open(self.id.slot(), now);
        if is_open {
            self.set(ACCOUNTED);
        }
        is_open
    }

    /// The counts, if they were asked for.
    pub fn account(&self, now: Time) -> Option<Account> {
        if self.has(ACCOUNTED) { self.lane.accounts().at(self.id.slot(), now) } else { None }
    }

    /// Counts a frame that goes to the service.
    pub fn count_frame(&self) {
        self.count(|account| account.frames_received += 1);
    }

    /// Counts received bytes.
    pub fn count_received(&self, bytes: usize) {
        self.count(|account| account.bytes_received += bytes as u64);
    }

    /// Counts a send that is over, and of which `left_over` bytes were not sent.
    pub fn count_sent(&self, left_over: usize) {
        self.count(|account| account.bytes_sent += self.sent_but(left_over) as u64);
    }

    #[cold]
    pub(super) fn count(&self, change: impl FnOnce(&mut Account)) {
        if self.has(ACCOUNTED) {
            self.lane.accounts().change(self.id.slot(), change);
        }
    }
}
