//! Time limits: each is applied, neither early nor late.

use std::time::Duration;

use ringserve_core::{IdleActivity, Limits};

use super::{STALL_MAX, State};
use crate::bytes::AnyFraming;
use crate::clocks::{LATE_MAX, Look, READ_WINDOW, SLEPT_LONG, STEP};
use crate::faults::Fault;
use crate::pace::Pace;
use crate::rng::Rng;
use crate::sock::excuse;

/// The longest time for which a connection may stay that was reset together with its last bytes.
const RESET_HEARD: Duration = Duration::from_secs(60);

/// The same while it has waiting calls.
const RESET_HEARD_BUSY: Duration = Duration::from_secs(1);

/// The most by which a connect that takes too long may be given up late: the shard's clock, a turn
/// that takes long, and as many turns as a cancel may need.
const CONNECT_LATE: u64 = 3 * STEP + 2 * STALL_MAX;

/// The longest time that a send is in flight before the core checks how much of it was taken.
fn look_after(limits: &Limits) -> Option<Duration> {
    let window = (limits.write_bytes_per_second_min > 0).then_some(Duration::from_nanos(READ_WINDOW));
    limits.write_stall_timeout.into_iter().chain(window).min()
}

/// The shortest such time: a limit longer than that is checked in equal parts.
fn look_before(limits: &Limits) -> Option<Duration> {
    let window = (limits.write_bytes_per_second_min > 0).then_some(Duration::from_nanos(READ_WINDOW / 2));
    match limits.write_stall_timeout {
        Some(stalled) => Some(window.map_or(stalled, |window| window.min(stalled))),
        None => window.map(|window| 2 * window),
    }
}

impl State {
    /// Checks that a shard without a timer has no connection with a time limit.
    pub(super) fn check_timed(&self, tag: usize) {
        let (sock, limits) = (&self.socks[tag], self.plan.limits_of(self.socks[tag].upstream));
        let connecting = self.ring.connects.iter().any(|connect| connect.file == tag);
        assert!(
            !connecting || self.plan.server_limits.connect_timeout.is_none() || sock.ended.is_some(),
            "connection {tag}: the shard sleeps for ever, and the limit of its connect never comes"
        );
        if !sock.opened {
            return;
        }
        let busy = sock.untold || self.is_sending(tag);
        let what = match sock.ended {
            Some(_) if !sock.fin_read && !sock.reset && !self.is_stopping(tag) => Some("linger"),
            Some(_) => None,
            None if busy && self.is_stopping(tag) => None,
            None if sock.deadline.is_some() && sock.clocks.sealed.is_none() => Some("deadline"),
            None if busy => look_after(limits).map(|_| "write_stall_timeout"),
            None if self.is_deaf(tag) && !self.is_stopping(tag) => Some("the reset"),
            None if limits.heartbeat_interval.is_some() && !sock.fin_read && !sock.fin_asked => {
                Some("heartbeat")
            }
            None if !sock.waiting.is_empty() => limits.handler_timeout.map(|_| "handler"),
            None if sock.handed == 0 && limits.first_frame_timeout.is_some() => Some("first_frame"),
            None => limits.idle_timeout.map(|_| "idle"),
        };
        if let Some(what) = what {
            panic!("connection {tag}: the shard sleeps for ever, and {what} never comes");
        }
    }

    /// Notes at the start of a turn the time since the last one began, and whether there is a
    /// buffer to receive into.
    pub fn begin_turn(&mut self) {
        if self.now - std::mem::replace(&mut self.turn_began, self.now) > SLEPT_LONG {
            self.slept_until = self.now + SLEPT_LONG;
        }
        if self.pool.available() == 0 && self.pool.counts().with_kernel == 0 {
            self.starved_at = self.now;
        }
    }

    /// Checks that each limit is kept, within the resolution of the shard's clock; called after a
    /// turn at `now`.
    pub fn check_limits(&mut self, now: u64) {
        self.check_connects(now, CONNECT_LATE);
        let slots = self.plan.slots() as u64;
        for slot in 0..slots as u32 {
            let Some((_, tag)) = self.ring.files.at(slot) else { continue };
            let busy = self.socks[tag].untold || self.is_sending(tag);
            let (stopping, deaf) = (self.is_stopping(tag), self.is_deaf(tag));
            // Bytes may wait for a full outbox, or in the kernel.
            let held_back = busy && self.socks[tag].has_unseen_bytes();
            let reads = self.is_receiving(tag) && !held_back;
            let (starved_at, late) = (self.starved_at, self.catches_up_until);
            let paced = self.is_paced(tag, now);
            let sock = &mut self.socks[tag];
            let limits = self.plan.limits_of(sock.upstream);
            if paced {
                sock.paced_at = now;
            }
            let used_at = sock.used_at.max(sock.paced_at);
            if !reads {
                sock.unread_at = now;
            }
            // It may be idle although bytes are sent to it.
            let listens = limits.idle_counts == IdleActivity::Received && sock.clocks.sealed.is_none();
            let over = |from: u64, limit: Option<std::time::Duration>| {
                limit.is_some_and(|limit| now > (from + limit.as_nanos() as u64).max(late) + 3 * STEP)
            };
            let sent_at = sock.sent_at.max(late);
            let untaken_since = sock.rate.untaken_since(sock.taken).unwrap_or(u64::MAX / 2);
            let overdue = match sock.ended {
                _ if stopping => false,
                Some((at, _)) => over(at, Some(limits.linger_timeout)),
                None if !sock.opened => false,
                None if listens && sock.waiting.is_empty() => {
                    over(used_at.max(sock.unread_at).max(starved_at), limits.idle_timeout)
                        || (busy && over(sent_at, look_after(limits)))
                        || (busy && over(untaken_since, limits.write_stall_timeout))
                }
                None if busy => {
                    over(sent_at, look_after(limits)) || over(untaken_since, limits.write_stall_timeout)
                }
                None if deaf => over(sock.active_at + slots * STEP, Some(RESET_HEARD)),
                None if !sock.waiting.is_empty() => false,
                None => {
                    (sock.handed == 0 && over(sock.opened_at, limits.first_frame_timeout))
                        || over(used_at, limits.idle_timeout)
                }
            };
            // The kernel may take a few turns to end operations in flight, and turns whose enter
            // was cut short end nothing.
            sock.overdue = if overdue { sock.overdue + u32::from(!self.cut_short) } else { 0 };
            assert!(
                sock.overdue < 400,
                "connection {tag} outlives its limits: {:?}, busy {busy}, active at {}, opened at {}",
                sock.ended,
                sock.active_at,
                sock.opened_at
            );
        }
    }

    /// Time at which the `open` of a connection is done, if it waits: in some seeds a part of them
    /// do, some of these without end. Drawn from a copy, so that other draws of a seed stay the
    /// same.
    pub fn open_waits_until(&mut self, tag: usize) -> Option<u64> {
        let mut rng = Rng::new(self.rng.clone().below(1 << 32) ^ tag as u64);
        if self.socks[tag].upstream || self.plan.open_waits == 0 || !rng.one_in(self.plan.open_waits) {
            return None;
        }
        let for_ever = self.plan.limits.open_timeout.is_some() && rng.one_in(4);
        Some(if for_ever { u64::MAX } else { self.now + rng.spread(1, 400_000_000) })
    }

    /// Time at which calls that have been waiting since then have waited too long.
    pub(super) fn handler_ends(&self, since: u64) -> u64 {
        let limit = self.plan.limits.handler_timeout.map_or(u64::MAX, |limit| limit.as_nanos() as u64);
        since.saturating_add(limit)
    }

    /// True if frames of a connection may wait for their rate at `now`, or did so a moment ago. In
    /// a drain they continue at the check that was due anyway.
    pub(super) fn is_paced(&self, tag: usize, now: u64) -> bool {
        let sock = &self.socks[tag];
        let limits = self.plan.limits_of(sock.upstream);
        let late = LATE_MAX + if self.plan.rates.of(Fault::Stall) > 0 { STALL_MAX } else { 0 };
        Pace::holds_back(limits)
            && sock.has_unseen_bytes()
            && sock.pace.is_early(limits, now.saturating_sub(late))
    }

    /// Checks an open connection at the start or the end of a turn at `now`, whose outbox holds
    /// `outbox` bytes and accepts more unless `gone`. The limits on which the service depends are
    /// kept to the turn.
    pub fn look(&mut self, tag: usize, outbox: usize, gone: bool, now: u64) {
        let limits = &self.plan.limits;
        let sock = &self.socks[tag];
        if !sock.opened || sock.clocks.sealed.is_some() {
            return;
        }
        let framed = !matches!(self.plan.framing, AnyFraming::Raw);
        let half = framed && sock.has_unseen_bytes() && !self.has_frame(sock);
        if gone {
            self.socks[tag].clocks.sealed = Some(sock.sealed(now, half));
            return;
        }
        let calls_full = self.calls_are_full(sock);
        let starved = self.pool.available() == 0 && self.pool.counts().with_kernel == 0;
        let put_off = now <= self.catches_up_until;
        let paced = self.is_paced(tag, now);
        let look = Look {
            left_out: paced
                || outbox > limits.outbox_bytes_high
                || starved
                || !self.is_receiving(tag)
                || self.is_cancelled(tag)
                || sock.fin_asked,
            unread: sock.unread() > 0 && !self.is_receiving(tag) && !sock.may(excuse::SILENT),
            calls_full,
            paced,
            half: (half && !sock.cut).then_some(sock.seen),
            free: !calls_full && !paced && outbox <= limits.outbox_bytes_low && self.pool.available() > 0,
            put_off,
        };
        let handler =
            !sock.waiting.is_empty() && now > self.handler_ends(sock.waiting_since).saturating_add(LATE_MAX);
        let unsought =
            self.is_unsought(tag) && !self.is_sending(tag) && !sock.untold && !self.is_stopping(tag);
        let heard_in = if sock.waiting.is_empty() { RESET_HEARD } else { RESET_HEARD_BUSY };
        // Each slot is checked a step after its neighbour.
        let spread = self.plan.slots() as u64 * STEP;
        let deaf =
            unsought && !paced && now > sock.active_at + heard_in.as_nanos() as u64 + spread + LATE_MAX;
        // Nothing is limited while a send is being stopped: its end decides.
        let stalled = look_before(limits).map_or(u64::MAX, |limit| sock.sent_at + limit.as_nanos() as u64);
        let stopping = sock.untold && now >= stalled;
        let limits = limits.clone();
        // A window ends at the next check, and the following one begins then.
        let late = LATE_MAX + if self.plan.rates.of(Fault::Stall) > 0 { STALL_MAX } else { 0 };
        // A window after a long sleep may be left open, and no more than one.
        let slept = self.slept_until > 0 && self.slept_until + 2 * READ_WINDOW > now;
        let late = late + if slept { READ_WINDOW } else { 0 };
        let sock = &mut self.socks[tag];
        if stopping {
            sock.clocks.stopping_at = now;
        }
        sock.clocks.look(look, now);
        let overdue = match () {
            () if stopping || put_off => None,
            () if sock.deadline.is_some_and(|at| now > at + LATE_MAX) => Some("deadline"),
            () if handler => Some("handler"),
            () if deaf => Some("the reset"),
            () if sock.fin_read => None,
            () => sock.clocks.overdue(&limits, now, late),
        };
        sock.clocks.check(overdue, tag, now);
    }
}
