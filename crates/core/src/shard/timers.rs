//! Time limits: one timer for each connection, set to its next limit.
//!
//! Activity only moves a step number in the connection. The timer stays where it is, and when it goes off the
//! limit is worked out again: so a frame costs no move on the wheel.
//!
//! A shard that was away, in a call that blocked or since its process was stopped, comes late to its timers, and what its
//! peers sent meanwhile waits in the kernel. Their limits are put off until it has caught up.

use core::time::Duration;

use super::Shard;
use super::turn::Event;
use crate::conn::{Due, Queued};
use crate::stamp::Timer;
use crate::times::RATE_WINDOW;
use crate::wheel::{STEP, step_at};
use crate::{CloseReason, ConnId, Observer, Op, Time};

/// Steps for which a limit is put off that a late shard cannot judge.
const PUT_OFF: i64 = 4;

/// A shard that comes to its timers by more than this after they were due is late. Rounding makes two steps of it.
const LATE: Duration = STEP.saturating_mul(4);

/// Limits are put off for this long at most, and judged for as long before they are put off again.
const CATCH_UP_MAX: Duration = Duration::from_secs(1);

/// A turn that brings fewer completions than this leaves none in the kernel: `io_uring_enter` works off 20 at once
/// (`IO_LOCAL_TW_DEFAULT_MAX` of Linux 6.18).
pub(super) const FEW: usize = 16;

/// Whether a shard came late to its timers, and has not caught up.
#[derive(Debug, Default)]
pub(super) struct Lateness {
    since: Option<Time>,
    /// A turn brought few completions, which that turn looks at.
    ends: bool,
    /// The last turn in which limits were put off.
    last: Option<Time>,
}

impl Lateness {
    /// True if limits are put off in a turn that begins at `now` with `completions`, when the first timer was due at `due`.
    pub(super) fn judge(&mut self, due: Time, now: Time, completions: usize) -> bool {
        let is_late = is_later(due, now, LATE);
        match self.began(due, now) {
            None => (self.since, self.ends) = (is_late.then_some(now), false),
            Some(since) if now - since >= CATCH_UP_MAX => return false,
            Some(_) => {
                if core::mem::replace(&mut self.ends, !is_late && completions < FEW) && !is_late {
                    self.since = None;
                }
            }
        }
        if self.since.is_some() {
            self.last = Some(now);
        }
        self.since.is_some()
    }

    /// When limits began to be put off, if that counts at `now`. A shard that was away for longer than they may be had no time
    /// to catch up in.
    fn began(&self, due: Time, now: Time) -> Option<Time> {
        self.since.filter(|since| now - *since < 2 * CATCH_UP_MAX && !is_later(due, now, CATCH_UP_MAX))
    }

    /// For how long limits have been judged at `now`, before the timers of that turn are looked at.
    pub(super) fn judged_for(&self, due: Time, now: Time) -> Duration {
        let is_behind = match self.began(due, now) {
            None => is_later(due, now, LATE),
            Some(since) => now - since < CATCH_UP_MAX,
        };
        if is_behind { Duration::ZERO } else { self.last.map_or(Duration::MAX, |last| now - last) }
    }
}

/// True if `now` is later than `due` by more than `by`.
fn is_later(due: Time, now: Time, by: Duration) -> bool {
    due < now && now - due > by
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

    /// Sets the connection's timer to `left` steps from now. It is not set to go off earlier.
    fn set_timer(&mut self, id: ConnId, left: i64) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        conn.timer = Timer::ahead(self.stamp, left);
        if !self.wheel.set_earlier(id.slot(), step_at(self.now) + left as u64) {
            self.abort(id, CloseReason::MemoryLimit);
        }
    }

    /// A connection has its own limits, which may be nearer than those before.
    #[cold]
    pub(super) fn limits_set(&mut self, id: ConnId) {
        if let Some(conn) = self.conns.get_mut(id) {
            conn.limited = true;
        }
        self.meter_by_own_limits(id);
        self.arm(id);
    }

    #[inline(never)]
    pub(super) fn fire_timers(&mut self, completions: usize) {
        let mut fired = core::mem::take(&mut self.fired);
        let starved = self.is_starved();
        let is_behind = self.lateness.judge(self.wheel.next_or_never(), self.now, completions);
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
            if conn.queued.is_in(Queued::RUNNABLE | Queued::WORKING) && due.is_the_peers() {
                // What the peer sent waits for the shard. It is looked at again once the connection had its batch.
                self.arm(id);
                continue;
            }
            let missed_max = self.lanes[conn.lane].limits.heartbeats_missed_max;
            if is_behind && due.may_be_undone(conn.missed_heartbeats >= missed_max) {
                self.judge_later(id, due);
                continue;
            }
            match due {
                Due::Linger => {
                    conn.lingering = false;
                    self.join(id);
                }
                // Only the completion tells whether the peer took nothing at all.
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
                    let wanted = self.lanes[conn.lane].limits.read_bytes_per_second_min
                        * RATE_WINDOW.as_secs() as usize;
                    let came = conn.inbox.as_mut().map(|inbox| inbox.begin_window(self.stamp));
                    if !starved && came.is_some_and(|came| came < wanted) {
                        self.finish(id, CloseReason::ReadTooSlow);
                    }
                    self.arm(id);
                }
                // Its answers may wait where the server does not read them.
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
                    // The peer has its whole time from now on, also where this one came late: a process that was stopped
                    // for long would otherwise ask again and again at once, and close before the peer could answer.
                    conn.heard_at = self.stamp;
                    // One that does not read would not see it, and has a separate limit.
                    let sees = conn.outlet().is_some_and(|outlet| !outlet.is_full());
                    if sees && !(conn.has_channel() && self.channel_asks(id)) {
                        self.events.push_back(Event::Heartbeat(id));
                    }
                    self.arm(id);
                }
                // What it sent may wait where the server does not look at it.
                Due::Close(CloseReason::IdleTimeout)
                    if !conn.times(&self.lanes[conn.lane].times).idle_counts_sent
                        && (conn.paused
                            || starved
                            || (conn.is_held_back()
                                && (conn.waiting_bytes() > 0 || !conn.receive.is_on()))) =>
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
        self.fired = fired;
    }

    /// Leaves a limit for later, since what waits in the kernel may keep it.
    #[cold]
    #[inline(never)]
    fn judge_later(&mut self, id: ConnId, due: Due) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        // How much was taken, or came, while the shard was there is not known: the time of a rate begins again.
        match due {
            Due::Write => conn.send_at = self.stamp,
            Due::ReadRate => {
                if let Some(inbox) = &mut conn.inbox {
                    inbox.begin_window(self.stamp);
                }
            }
            _ => return self.set_timer(id, PUT_OFF),
        }
        self.arm(id);
    }

    /// True if nothing can be received: every buffer there may be is kept.
    fn is_starved(&self) -> bool {
        self.pool.available() == 0 && self.pool.counts().with_kernel == 0
    }
}
