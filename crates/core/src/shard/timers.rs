//! Time limits: one timer for each connection, set to its next limit.
//!
//! Activity only moves a step number in the connection. The timer stays where it is, and when it goes off the
//! limit is worked out again: so a frame costs no move on the wheel.

use super::Shard;
use super::turn::Event;
use crate::conn::{Due, Queued};
use crate::stamp::Timer;
use crate::times::RATE_WINDOW;
use crate::wheel::step_at;
use crate::{CloseReason, ConnId, Observer, Op};

impl<O: Observer> Shard<O> {
    /// Sets the connection's timer to its next limit, unless it goes off earlier anyway.
    pub(super) fn arm(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        let now = self.stamp;
        let (left, _) = conn.next_limit(id.slot(), &self.lanes[conn.lane].times, now);
        if left < conn.timer.left(now) {
            let left = left.max(1);
            conn.timer = Timer::ahead(now, left);
            if !self.wheel.set_earlier(id.slot(), step_at(self.now) + left as u64) {
                self.abort(id, CloseReason::MemoryLimit);
            }
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
    pub(super) fn fire_timers(&mut self) {
        let mut fired = core::mem::take(&mut self.fired);
        let starved = self.is_starved();
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
                Due::Heartbeat
                    if conn.missed_heartbeats >= self.lanes[conn.lane].limits.heartbeats_missed_max =>
                {
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
                    if conn.is_too_fast()
                        || !conn.times(&self.lanes[conn.lane].times).idle_counts_sent
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

    /// True if nothing can be received: every buffer there may be is kept.
    fn is_starved(&self) -> bool {
        self.pool.available() == 0 && self.pool.counts().with_kernel == 0
    }
}
