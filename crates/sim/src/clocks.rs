//! The basis for judging the time limits of a connection: when its peer last sent bytes, how many
//! heartbeats went unanswered, and how long half a frame has waited for the peer alone.
//!
//! The shard applies time limits at the start of a turn, before the completions of the turn. So a
//! turn has these steps: limits are judged by the state that earlier turns left here, then bytes
//! are noted, and at its end the connection is checked.

use std::collections::VecDeque;

use ringserve_core::Limits;

use crate::pace::Pace;

/// Resolution of the shard's clock for time limits, in nanoseconds.
pub const STEP: u64 = 1 << 24;

/// Nanoseconds over which the rate of a half received frame is measured, and the rate at which a
/// peer takes sent bytes.
pub const READ_WINDOW: u64 = 10_000_000_000;

/// The most by which a limit may be applied late: stamps are rounded down by a step and times up by
/// one, and the wheel fires up to one late.
pub const LATE_MAX: u64 = 3 * STEP;

/// A shard that reaches its timers later than this, in nanoseconds, less rounding, postpones
/// limits.
pub const LATE: u64 = 2 * STEP;

/// Time for which it does so, in nanoseconds: until it has caught up, at most for a second, and by
/// four steps at a time.
pub const CATCH_UP_MAX: u64 = 1_000_000_000 + 4 * STEP;

/// A shard that slept for longer than this assumes that it was away, and has caught up after the
/// same time again.
pub const SLEPT_LONG: u64 = 1_000_000_000;

/// Steps beyond that, with a turn in each: if several limits are over at once, as after a long stop
/// of the process, one is applied in each step. There are not more of them.
const LATE_STEPS: u32 = 6;

/// Observations of a connection at the start or the end of a turn.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// Its outbox is over its high mark, or nothing is received, or FIN was sent: heartbeats are
    /// skipped.
    pub left_out: bool,
    /// Bytes of it wait in the kernel and are not received.
    pub unread: bool,
    /// As many of its calls wait as are allowed.
    pub calls_full: bool,
    /// Its frames wait because of their rate.
    pub paced: bool,
    /// Half a frame was received, and the number of frames before it.
    pub half: Option<usize>,
    /// Whether that frame waits for its peer alone.
    pub free: bool,
    /// The shard postpones limits: the time of that frame starts again.
    pub put_off: bool,
}

/// The due times of a connection's time limits.
#[derive(Debug, Default)]
pub struct Clocks {
    /// Time at which bytes last reached the core.
    heard_at: u64,
    /// Time of the last requested heartbeat.
    beat_at: u64,
    /// Time of the last heartbeat that may have been skipped.
    quiet_at: u64,
    /// Heartbeats since the last bytes.
    missed_heartbeats: u32,
    /// One of them may have been skipped.
    left_out: bool,
    /// Time since which bytes have been waiting unreceived.
    unread_since: Option<u64>,
    /// Bytes arrived while its outbox was full, which has not fallen below its low mark since: no
    /// frame is decoded.
    held_back: bool,
    /// Time at which that, or calls, last held the connection back.
    held_back_at: u64,
    /// Time since which a frame has been half received and waiting for nothing else, and its
    /// number.
    half: Option<(u64, usize)>,
    /// Bytes that arrived while it waited for something else, and that count in its first window;
    /// and when that began.
    held_bytes: usize,
    freed: (u64, usize),
    /// Bytes that reached the core, with the time, newest last.
    arrivals: VecDeque<(u64, usize)>,
    /// Time at which a send was last being stopped, which postpones all limits.
    pub stopping_at: u64,
    /// The state when the shard decided to end it.
    pub sealed: Option<Sealed>,
    /// Steps in which a limit was overdue, and the last of them.
    late: (u32, u64),
}

/// The state of a connection that accepts no more frames and replies; queued bytes may still be
/// sent.
#[derive(Clone, Copy, Debug)]
pub struct Sealed {
    /// Time since which it is so.
    pub at: u64,
    /// Calls that waited.
    pub waiting: usize,
    /// Time since which the first of them waited, or at which another one ended.
    pub waiting_since: u64,
    /// Time at which something last kept it from being idle.
    pub used_at: u64,
    /// A whole frame was received that the service had not seen.
    pub unseen: bool,
    /// The kernel had not taken every reply.
    pub owed: bool,
    /// Half a frame was received.
    pub half: bool,
    /// The peer had sent FIN, and the core had received it.
    pub ended: bool,
    /// The rate of its frames.
    pub pace: Pace,
}

impl Clocks {
    /// Starts all times: the connection is accepted.
    pub fn start(&mut self, now: u64) {
        (self.heard_at, self.beat_at, self.quiet_at) = (now, now, now);
    }

    /// Notes that bytes reach the core, which are not decoded if `held_back`.
    pub fn hear(&mut self, now: u64, bytes: usize, held_back: bool) {
        if self.sealed.is_some() {
            return;
        }
        self.held_back |= held_back;
        self.start(now);
        (self.missed_heartbeats, self.left_out) = (0, false);
        if self.half.is_none() {
            self.held_bytes += bytes;
        }
        self.arrivals.push_back((now, bytes));
        while self.arrivals.front().is_some_and(|(at, _)| at + 5 * READ_WINDOW < now) {
            self.arrivals.pop_front();
        }
    }

    /// Notes that the outbox fell below its low mark.
    pub fn release(&mut self, now: u64) {
        if std::mem::take(&mut self.held_back) {
            self.held_back_at = now;
        }
    }

    /// Notes that a call of the connection ended: the peer's time for the half frame starts now.
    pub fn call_done(&mut self, now: u64, calls_full: bool) {
        self.half = None;
        if calls_full {
            self.held_back_at = now;
        }
    }

    /// Notes that the shard asks for a heartbeat. Panics if it should not.
    pub fn beat(&mut self, limits: &Limits, now: u64) {
        let heartbeat = limits.heartbeat_interval.expect("a heartbeat, and there are none").as_nanos() as u64;
        assert!(now + STEP >= self.beat_at + heartbeat, "a heartbeat too early: {self:?}");
        self.missed_heartbeats += 1;
        // A heartbeat that was due while the server read nothing does not count against the peer:
        // its time starts again.
        assert!(
            self.left_out || self.missed_heartbeats <= limits.heartbeats_missed_max.into(),
            "more heartbeats than may stay without an answer: {self:?}"
        );
        (self.beat_at, self.quiet_at) = (now, now);
    }

    /// True if the peer has not answered as many heartbeats as it may leave unanswered. Those
    /// skipped because its outbox was full count, and so do those whose answer may be unread
    /// because the shard holds the connection back.
    pub fn heartbeat_is_lost(&self, limits: &Limits, now: u64) -> bool {
        let now = self.judged_at(now);
        let Some(heartbeat) = limits.heartbeat_interval.map(|time| time.as_nanos() as u64) else {
            return false;
        };
        let missed = u64::from(limits.heartbeats_missed_max);
        (self.left_out || u64::from(self.missed_heartbeats) == missed)
            && now + STEP >= self.beat_at + heartbeat
            && now + STEP >= self.heard_at + heartbeat * (missed + 1)
    }

    /// True if too few bytes of half a frame arrived in the time over which that is measured, and
    /// only the peer was the cause.
    pub fn read_is_too_slow(&self, limits: &Limits, now: u64) -> bool {
        let now = self.judged_at(now);
        let since = now.saturating_sub(READ_WINDOW);
        let starved = self.unread_since.is_some_and(|unread| unread <= since);
        !starved
            && now >= READ_WINDOW
            && self.arrived_since(since) < Clocks::wanted(limits)
            && self.held_back_at <= since + STEP
    }

    /// Bytes that must arrive within [`READ_WINDOW`].
    fn wanted(limits: &Limits) -> usize {
        limits.read_bytes_per_second_min * (READ_WINDOW / 1_000_000_000) as usize
    }

    fn arrived_since(&self, time: u64) -> usize {
        self.arrivals.iter().rev().take_while(|(at, _)| *at > time).map(|(_, bytes)| bytes).sum()
    }

    /// Time at which the shard decided to end the connection.
    fn judged_at(&self, now: u64) -> u64 {
        self.sealed.map_or(now, |sealed| sealed.at)
    }

    /// Checks the connection at `now`.
    pub fn look(&mut self, look: Look, now: u64) {
        if look.left_out {
            (self.left_out, self.quiet_at) = (true, now);
        }
        self.unread_since = look.unread.then(|| self.unread_since.unwrap_or(now));
        if look.calls_full || look.paced || self.held_back {
            self.held_back_at = now;
        }
        if self.half.is_none() && look.half.is_some() && look.free {
            self.freed = (now, std::mem::take(&mut self.held_bytes));
        }
        self.half = match (look.half.filter(|_| look.free), self.half.filter(|_| !look.put_off)) {
            (Some(number), Some((since, before))) if number == before => Some((since, number)),
            (Some(number), _) => Some((now, number)),
            (None, _) => None,
        };
    }

    /// Panics if a limit of connection `tag` is `overdue` for longer than allowed.
    pub fn check(&mut self, overdue: Option<&'static str>, tag: usize, now: u64) {
        let Some(limit) = overdue else {
            self.late = (0, 0);
            return;
        };
        if now >= self.late.1 + STEP {
            self.late = (self.late.0 + 1, now);
        }
        assert!(self.late.0 <= LATE_STEPS, "connection {tag} outlives its limit, {limit}: {self:?}");
    }

    /// The limit that should have ended the connection by now, or made its service ask for a
    /// heartbeat. A window may be over by `late`.
    pub fn overdue(&self, limits: &Limits, now: u64, late: u64) -> Option<&'static str> {
        let heartbeat = limits.heartbeat_interval.map(|time| time.as_nanos() as u64);
        if heartbeat.is_some_and(|heartbeat| now > self.quiet_at + heartbeat + LATE_MAX) {
            return Some("heartbeat");
        }
        let (since, _) = self.half.filter(|_| limits.read_bytes_per_second_min > 0)?;
        // From `from` on only the peer was the cause, so a window that began at most its length
        // before that is over by now.
        let from = now.checked_sub(READ_WINDOW + late).filter(|from| since <= *from)?;
        let span = from.saturating_sub(READ_WINDOW + late);
        let (freed_at, freed) = self.freed;
        let came = self.arrived_since(span) + if freed_at > span { freed } else { 0 };
        (came < Clocks::wanted(limits)).then_some("read_bytes_per_second_min")
    }
}

/// The rate at which a peer takes sent bytes: the core checks again and again how much of a send it
/// took, and sends the rest.
#[derive(Debug, Default)]
pub struct WriteRate {
    /// Start of the send in flight, or of the last check that found bytes taken, and the bytes
    /// taken until then.
    since: Option<(u64, usize)>,
    /// The bytes that will have been taken at the end of the send.
    end: usize,
    /// At the last check the peer had taken too little, if the shard was there all the time.
    excused: bool,
}

impl WriteRate {
    /// Notes that the core sends `bytes` of a connection whose peer took `taken` so far. Panics if
    /// it continues a send of which the peer took too little, at `least` bytes per second, unless
    /// the shard came late and knows nothing until `late`, or slept for long and may know nothing
    /// until `slept`: if it continues for that reason, the next check judges the whole time.
    pub fn sent(&mut self, bytes: usize, taken: usize, least: usize, (late, slept): (u64, u64), now: u64) {
        let rest = taken < self.end;
        if let Some((since, before)) = self.since
            && rest
            && taken > before
        {
            let enough = |from: u64| {
                let time = now.saturating_sub(since.max(from)).saturating_sub(2 * STEP);
                (taken - before) as u128 * 1_000_000_000 >= least as u128 * u128::from(time)
            };
            let was_excused = std::mem::replace(&mut self.excused, !enough(late));
            assert!(
                !self.excused || (!was_excused && enough(late.max(slept))),
                "a peer took {} bytes in {} ns, and stays{}",
                taken - before,
                now - since,
                if was_excused { " again" } else { "" }
            );
        }
        if !rest {
            self.excused = false;
        }
        if !rest || self.since.is_none_or(|(_, before)| taken > before) {
            self.since = Some((now, taken));
        }
        self.end = taken + bytes;
    }

    /// True if the peer took too little, at `least` bytes per second, since the send began or the
    /// last check at which it took enough.
    pub fn is_too_slow(&self, limits: &Limits, taken: usize, now: u64) -> bool {
        let Some((since, before)) = self.since else { return false };
        let stalled = limits.write_stall_timeout.map(|time| time.as_nanos() as u64);
        let time = now + STEP - since;
        let looked = time >= stalled.unwrap_or(READ_WINDOW).min(READ_WINDOW / 2);
        let wanted = limits.write_bytes_per_second_min as u128 * u128::from(time);
        let slow = (taken - before) as u128 * 1_000_000_000 < wanted;
        looked && slow && (taken > before || stalled.is_none())
    }

    /// Time since which the peer took nothing.
    pub fn untaken_since(&self, taken: usize) -> Option<u64> {
        self.since.filter(|(_, before)| *before == taken).map(|(since, _)| since)
    }
}
