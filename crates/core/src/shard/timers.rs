//! Time limits: one timer for each connection, set to its next limit.
//!
//! Activity only moves a step number in the connection. The timer stays where it is, and when it
//! goes off the limit is worked out again: so a frame costs no move on the wheel.
//!
//! A shard that was away, in a call that blocked or because its process was stopped, has not looked
//! at what its peers sent and took meanwhile: that waits in the kernel. Limits are put off until it
//! has, however long that takes: see [`Lateness`].

use core::time::Duration;

use super::Shard;
use super::turn::Event;
use crate::connection::{Conn, Due, NoMemory, Own, QueueFlags};
use crate::limits::RATE_WINDOW;
use crate::time::{STEP, Timer, step_at};
use crate::{CloseReason, ConnId, Observer, Op, Time};

/// Steps for which a limit is put off that a late shard cannot judge.
const PUT_OFF: i64 = 3;

/// A shard was away if it comes to its timers by more than this after they were due. Rounding adds
/// up to two steps.
const LATE: Duration = STEP.saturating_mul(4);

/// Limits are put off for at most this long, and longer only for connections that were not looked
/// at. They are judged for as long before they are put off again.
const CATCH_UP_MAX: Duration = Duration::from_secs(1);

/// The most completions of one connection that may come before the first of another one: a receive
/// that goes on brings 32, and a send ends.
const OF_EACH: u64 = 33;

/// A turn that brings fewer completions than this leaves none in the kernel: `io_uring_enter` works
/// off 20 at once (`IO_LOCAL_TW_DEFAULT_MAX` of Linux 6.18).
pub(super) const FEW: usize = 16;

/// The time within which a peer is judged again if time in which the shard may have been away was
/// left out of its rate. Until then the shard [wakes](WAKES) repeatedly, as it does after a new
/// connection that counts for a rate.
const WATCHED: Duration = RATE_WINDOW.saturating_add(Duration::from_secs(1));

/// A shard that sleeps for so short a time was not away unless it was late.
const WAKES: Duration = Duration::from_millis(500);

/// Whether a shard was away, and has not caught up.
///
/// A shard that slept for long and was woken by a completion may as well have been stopped: it
/// assumes that it was away. If its only news came from others and rarely, a peer whose rate is not
/// judged for that reason would never be judged. So from then on the shard wakes twice a second for
/// a while, which separates the two cases. Connections count as those of a time in which the shard
/// was away only if that is proved: by a timer or such a wake-up that came late.
///
/// ```text
///                was away                   the driver has no more, or each connection had its completions
///   InTime ───────────────────▶ Behind ──────────────────────────────────────────────────────┬──▶ InTime
///     ▲                           ▲                                                           │
///     └──────────── Judging ──────┘ away for longer than a second                             │
///                      ▲                                                                      │
///                      └────────────────── after a second or more, where it never has no more ┘
/// ```
#[derive(Debug, Default)]
pub(super) struct Lateness {
    stage: Stage,
    /// A turn brought few completions, which that turn looks at.
    ends: bool,
    /// The last turn in which limits were put off.
    last: Option<Time>,
    /// The time until which the shard wakes twice a second.
    watches_until: Option<Time>,
    /// The latest time at which the shard should have woken before limits were put off, if it woke
    /// later than that: what comes now may have come since.
    from: Option<Time>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    InTime,
    /// Limits are put off since then, and `taken` completions came after that turn.
    Behind { since: Time, taken: u64 },
    /// They are judged until then, although the driver always has more.
    Judging { until: Time },
}

/// A turn that begins, for [`Lateness::step`].
#[derive(Clone, Copy, Debug)]
pub(super) struct TurnStart {
    pub(super) now: Time,
    /// The time since the turn before began.
    pub(super) gap: Duration,
    pub(super) completions: usize,
    /// The turn before received as much as one may.
    pub(super) more: bool,
    /// The delay after the first timer that is due, if one is.
    pub(super) late: Option<Duration>,
    pub(super) connections: usize,
}

impl Lateness {
    /// True if the shard was away a while ago, or just now if its last turn began that long ago, so
    /// that [`step`](Lateness::step) must be called.
    #[inline]
    pub(super) fn is_asked(&self, gap_nanos: u64) -> bool {
        gap_nanos > LATE.as_nanos() as u64 || self.stage != Stage::InTime
    }

    #[cold]
    #[inline(never)]
    pub(super) fn step(&mut self, turn: &TurnStart) {
        let TurnStart { now, gap, completions, more, .. } = *turn;
        let before = Time::from_nanos(now.as_nanos().saturating_sub(gap.as_nanos() as u64));
        let wake_late = self.wakes_at(before).map(|at| now - at);
        self.watches_until = self.watches_until.filter(|until| now < *until);
        let late = turn.late.max(wake_late).filter(|late| *late > LATE);
        let is_late = late.is_some();
        // Unless it slept until a timer, and nothing else happened.
        let was_away = gap > CATCH_UP_MAX && (is_late || turn.late.is_none() || completions > 0);
        let begins = match self.stage {
            Stage::InTime => is_late || was_away,
            Stage::Behind { .. } => was_away,
            Stage::Judging { until } => was_away || is_late && now >= until,
        };
        match self.stage {
            _ if begins => {
                // If one absence follows another, the start of the first one counts.
                let first = self.from.filter(|_| self.is_behind());
                let since =
                    late.map(|late| Time::from_nanos(now.as_nanos().saturating_sub(late.as_nanos() as u64)));
                self.from = first.or(since);
                (self.stage, self.ends) = (Stage::Behind { since: now, taken: 0 }, false);
            }
            Stage::Judging { until } if now >= until => self.stage = Stage::InTime,
            Stage::Behind { since, taken } => {
                let taken = taken + completions as u64;
                // Everything that came by now is looked at in this turn; the next one can judge.
                let brings_all = completions < FEW && !more && !is_late;
                let had_all = core::mem::replace(&mut self.ends, brings_all) && !more;
                let of_each = OF_EACH * turn.connections as u64;
                if had_all || completions == 0 && !more {
                    self.stage = Stage::InTime;
                } else if now - since >= CATCH_UP_MAX && taken >= of_each {
                    self.stage = Stage::Judging { until: now + (now - since) };
                } else {
                    self.stage = Stage::Behind { since, taken };
                }
            }
            Stage::InTime | Stage::Judging { .. } => {}
        }
        if self.is_behind() {
            self.last = Some(now);
        }
    }

    /// True if limits are put off.
    pub(super) fn is_behind(&self) -> bool {
        matches!(self.stage, Stage::Behind { .. })
    }

    /// Notes that a rate was not judged for all of its time, or that new connections are let in by
    /// one.
    pub(super) fn watch(&mut self, now: Time) {
        self.watches_until = Some(now + WATCHED);
    }

    /// True if the shard [wakes](Lateness::wakes_at) without other news.
    #[inline]
    pub(super) fn watches(&self) -> bool {
        self.watches_until.is_some()
    }

    /// The time of its next wake-up.
    pub(super) fn wakes_at(&self, now: Time) -> Option<Time> {
        self.watches_until.filter(|until| now < *until).map(|_| now + WAKES)
    }

    /// The time since which what comes now may have waited, if it is proved that the shard was
    /// away.
    pub(super) fn behind_from(&self) -> Option<Time> {
        self.from.filter(|_| self.is_behind())
    }

    /// The time for which limits have been judged at `now`.
    pub(super) fn judged_for(&self, now: Time) -> Duration {
        if self.is_behind() { Duration::ZERO } else { self.last.map_or(Duration::MAX, |last| now - last) }
    }
}

impl<O: Observer> Shard<O> {
    /// Sets the connection's timer to its next limit, unless it goes off earlier anyway.
    pub(super) fn arm(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        let now = self.stamp;
        let (left, _) = conn.next_limit(id.slot(), &self.lanes[conn.lane].times, now);
        if left < conn.timer.left(now) {
            let left = left.max(1);
            self.set_timer(id, left);
        }
    }

    /// Sets the connection's timer to `left` steps from now. The caller knows that it is not set to
    /// go off earlier.
    fn set_timer(&mut self, id: ConnId, left: i64) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        conn.timer = Timer::ahead(self.stamp, left);
        if !self.wheel.set_earlier(id.slot(), step_at(self.now) + left as u64) {
            self.abort(id, CloseReason::MemoryLimit);
        }
    }

    /// Notes that a connection has its own limits, which may be nearer than those before.
    #[cold]
    pub(super) fn limits_set(&mut self, id: ConnId) {
        if let Some(conn) = self.conns.get_mut(id) {
            conn.own.note(Own::LIMITS, true);
        }
        self.meter_by_own_limits(id);
        self.arm(id);
    }

    /// Takes in the deadlines that user code set or took away.
    #[cold]
    #[inline(never)]
    pub(super) fn take_deadlines(&mut self) {
        for (id, steps) in self.shared.deadlines().take_changes() {
            let is_open = |conn: &&mut Conn| conn.is_open();
            let Some(conn) = self.conns.get_mut(id).filter(is_open) else { continue };
            match self.shared.deadlines().keep(id, steps, self.stamp) {
                Ok(has_one) => {
                    conn.own.note(Own::DEADLINE, has_one);
                    if has_one {
                        self.arm(id);
                    }
                }
                Err(NoMemory) => self.abort(id, CloseReason::MemoryLimit),
            }
        }
    }

    /// Finds out whether limits are put off in a turn that begins with `completions`, `gap` after
    /// the last one. `more` is true if that one received as much as it may.
    #[cold]
    #[inline(never)]
    pub(super) fn step_lateness(&mut self, gap: Duration, completions: usize, more: bool) {
        let (now, due) = (self.now, self.wheel.next_or_never());
        self.lateness.step(&TurnStart {
            now,
            gap,
            completions,
            more,
            late: self.wheel.is_due(now).then(|| now - due),
            connections: self.conns.len(),
        });
        self.shared.set_behind(self.lateness.is_behind());
    }

    /// True if bytes that peers sent and took while the shard was away may wait in the kernel: no
    /// time limit is judged meanwhile.
    pub fn is_behind(&self) -> bool {
        self.lateness.is_behind()
    }

    /// The time since which connections and bytes that the shard sees now may have waited in the
    /// kernel, while it [is behind](Shard::is_behind) and came late to its wake-up time. A shard
    /// without such a time may as well have slept.
    pub fn behind_from(&self) -> Option<Time> {
        self.lateness.behind_from()
    }

    /// Wakes the shard twice a second for a while, so that it can distinguish a time in which it
    /// was away from one in which it slept. For new connections that a rate lets in: more of them
    /// may come.
    pub fn watch_itself(&mut self) {
        self.lateness.watch(self.now);
    }

    #[inline(never)]
    pub(super) fn fire_timers(&mut self) {
        let mut fired = core::mem::take(&mut self.fired);
        let starved = self.is_starved();
        let is_behind = self.lateness.is_behind();
        self.wheel.advance(self.now, &mut fired);
        for index in fired.drain(..) {
            let Some(id) = self.conns.id_at(index) else { continue };
            let Some(conn) = self.conns.get_mut(id) else { continue };
            conn.timer = Timer::UNSET;
            let (left, due) = conn.next_limit(id.slot(), &self.lanes[conn.lane].times, self.stamp);
            if left > 0 {
                self.arm(id);
                continue;
            }
            if conn.queued.is_in(QueueFlags::RUNNABLE | QueueFlags::WORKING) && due.is_the_peers() {
                // The peer's bytes wait for the shard. It is looked at again once the connection
                // had its batch.
                self.arm(id);
                continue;
            }
            let missed_max = self.lanes[conn.lane].limits.heartbeats_missed_max;
            if is_behind && due.may_be_undone(conn.missed_heartbeats >= missed_max) {
                self.judge_later(id, due);
                continue;
            }
            self.carry_out(id, due, starved);
        }
        self.fired = fired;
    }

    /// Carries out the consequence of a limit that is over. While receive memory is short
    /// (`starved`) it may not be the fault of the peer.
    fn carry_out(&mut self, id: ConnId, due: Due, starved: bool) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        let missed_max = self.lanes[conn.lane].limits.heartbeats_missed_max;
        match due {
            Due::Linger => {
                conn.lingering = false;
                self.join(id);
            }
            // Only the completion shows whether the peer took nothing at all.
            Due::Write => {
                if conn.send.stop() {
                    self.ops.push(Op::SendStop { id });
                }
            }
            Due::Probe => {
                conn.receive_used = false;
                self.ops.push(Op::Probe { id });
                self.arm(id);
            }
            Due::Resume => self.resume_reads(id),
            Due::ReadRate => {
                // While receive memory is short it is not the peer's fault.
                let wanted =
                    self.lanes[conn.lane].limits.read_bytes_per_second_min * RATE_WINDOW.as_secs() as usize;
                let came = conn.inbox.as_mut().map(|inbox| inbox.begin_window(self.stamp));
                if !starved && came.is_some_and(|came| came < wanted) {
                    self.finish(id, CloseReason::ReadTooSlow);
                }
                self.arm(id);
            }
            // Its answers may wait unread by the server.
            Due::Heartbeat if conn.paused || starved => {
                (conn.heard_at, conn.missed_heartbeats) = (self.stamp, 0);
                self.arm(id);
            }
            Due::Heartbeat if conn.missed_heartbeats >= missed_max => {
                self.finish(id, CloseReason::HeartbeatLost);
                self.arm(id);
            }
            Due::Heartbeat => {
                conn.missed_heartbeats += 1;
                // The peer has its whole time from now on, even if this heartbeat came late:
                // otherwise a process that was stopped for long would ask again and again at once,
                // and close before the peer could answer.
                conn.heard_at = self.stamp;
                // A peer that does not read would not see it, and has a separate limit.
                let sees = conn.outlet().is_some_and(|outlet| !outlet.is_full());
                if sees && !(conn.has_channel() && self.channel_asks(id)) {
                    self.events.push_back(Event::Heartbeat(id));
                }
                self.arm(id);
            }
            // Its bytes may wait where the server does not look at them.
            Due::Close(CloseReason::IdleTimeout)
                if !conn.times(&self.lanes[conn.lane].times).idle_counts_sent
                    && (conn.paused
                        || starved
                        || (conn.is_held_back() && (conn.waiting_bytes() > 0 || !conn.receive.is_on()))) =>
            {
                conn.active_at = self.stamp;
                self.arm(id);
            }
            Due::Close(CloseReason::HandlerTimeout) => self.events.push_back(Event::TimedOut(id)),
            Due::Close(reason) => {
                self.finish(id, reason);
                // Its last replies may still be on their way, and must not be for ever.
                self.arm(id);
            }
        }
    }

    /// Leaves a limit for later, because bytes that wait in the kernel may satisfy it.
    #[cold]
    #[inline(never)]
    fn judge_later(&mut self, id: ConnId, due: Due) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        // It is not known how much was taken, or came, while the shard was there: the time of a
        // rate begins again.
        match due {
            Due::Write => conn.send_at = self.stamp,
            Due::ReadRate => {
                if let Some(inbox) = &mut conn.inbox {
                    inbox.begin_window(self.stamp);
                }
            }
            _ => return self.set_timer(id, PUT_OFF),
        }
        self.lateness.watch(self.now);
        self.arm(id);
    }

    /// True if nothing can be received: every available buffer is kept.
    fn is_starved(&self) -> bool {
        self.pool.available() == 0 && self.pool.counts().with_kernel == 0
    }
}
