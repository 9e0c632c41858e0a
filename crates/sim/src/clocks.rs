//! What the time limits of a connection are judged by: when its peer was heard, how many heartbeats went
//! unanswered, and how long half a frame has been the peer's affair alone.
//!
//! The shard carries out time limits at the start of a turn, before what the turn brought. So a turn goes like this:
//! limits are judged by what earlier turns left here, then bytes are noted, and at its end the connection is looked at.

use std::collections::VecDeque;

use ringserve_core::Limits;

use crate::pace::Pace;

/// How coarse the shard's clock for time limits is, in nanoseconds.
pub const STEP: u64 = 1 << 24;

/// Nanoseconds over which a half received frame's rate is measured, and that at which a peer takes what is sent.
pub const READ_WINDOW: u64 = 10_000_000_000;

/// How much later than it says a limit may be carried out: stamps are rounded down by a step and times up by one,
/// and the wheel fires up to one late.
pub const LATE_MAX: u64 = 3 * STEP;

/// A shard that comes to its timers later than this, in nanoseconds, after less rounding, puts limits off.
pub const LATE: u64 = 2 * STEP;

/// How long it does so, in nanoseconds: until it has caught up, at most for a second, and by four steps at a time.
pub const CATCH_UP_MAX: u64 = 1_000_000_000 + 4 * STEP;

/// A shard that slept for longer than this takes itself to have been away, and has caught up as long after it.
pub const SLEPT_LONG: u64 = 1_000_000_000;

/// Steps beyond that, with a turn in each: where several limits are over at once, as after a long stop of the process, one
/// is carried out in each step. There are not more of them.
const LATE_STEPS: u32 = 6;

/// What there is to see of a connection at the start or the end of a turn.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// Its outbox is over its high mark, or nothing is received, or FIN was sent: heartbeats are left out.
    pub left_out: bool,
    /// Bytes of it wait in the kernel and are not received.
    pub unread: bool,
    /// As many of its calls wait as may.
    pub calls_full: bool,
    /// Its frames wait for their rate.
    pub paced: bool,
    /// Half a frame was received, and the number of frames before it.
    pub half: Option<usize>,
    /// Whether that frame waits for its peer alone.
    pub free: bool,
    /// The shard puts limits off: the time of that frame begins again.
    pub put_off: bool,
}

/// When each time limit of a connection is due.
#[derive(Debug, Default)]
pub struct Clocks {
    /// When bytes reached the core last.
    heard_at: u64,
    /// The same for the last heartbeat that was asked for.
    beat_at: u64,
    /// The same for one that may have been left out.
    quiet_at: u64,
    /// Heartbeats since.
    missed_heartbeats: u32,
    /// One of them may have been left out.
    left_out: bool,
    /// Since when bytes have been waiting that are not received.
    unread_since: Option<u64>,
    /// Bytes came while its outbox was full, which has not fallen below its low mark since: no frame is looked for.
    held_back: bool,
    /// When that, or calls, held the connection back last.
    held_back_at: u64,
    /// Since when a frame has been half received and waiting for nothing else, and its number.
    half: Option<(u64, usize)>,
    /// Bytes that came while it waited for something else, and that count in its first window; and when that began.
    held_bytes: usize,
    freed: (u64, usize),
    /// Bytes that reached the core, with the time, newest last.
    arrivals: VecDeque<(u64, usize)>,
    /// When a send was last being stopped, which puts off all limits.
    pub stopping_at: u64,
    /// What was the case when the shard decided that it ends.
    pub sealed: Option<Sealed>,
    /// Steps in which a limit was seen to be overdue, and the last of them.
    late: (u32, u64),
}

/// A connection takes no frames and no replies any more; what is queued may still leave.
#[derive(Clone, Copy, Debug)]
pub struct Sealed {
    /// Since when.
    pub at: u64,
    /// Calls that waited.
    pub waiting: usize,
    /// Since when the first of them did, or another was done.
    pub waiting_since: u64,
    /// When something last kept it from being idle.
    pub used_at: u64,
    /// A whole frame was received that the service had not seen.
    pub unseen: bool,
    /// The kernel had not taken every reply.
    pub owed: bool,
    /// Half a frame was received.
    pub half: bool,
    /// The peer had sent FIN, and the core had heard of it.
    pub ended: bool,
    /// How fast its frames were.
    pub pace: Pace,
}

impl Clocks {
    /// The connection is accepted.
    pub fn start(&mut self, now: u64) {
        (self.heard_at, self.beat_at, self.quiet_at) = (now, now, now);
    }

    /// Bytes reach the core, and are not looked at if `held_back`.
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

    /// The outbox fell below its low mark.
    pub fn release(&mut self, now: u64) {
        if std::mem::take(&mut self.held_back) {
            self.held_back_at = now;
        }
    }

    /// A call of the connection is done: the peer has its time for the half frame from now on.
    pub fn call_done(&mut self, now: u64, calls_full: bool) {
        self.half = None;
        if calls_full {
            self.held_back_at = now;
        }
    }

    /// The shard asks for a heartbeat. Panics if it should not.
    pub fn beat(&mut self, limits: &Limits, now: u64) {
        let heartbeat = limits.heartbeat_interval.expect("a heartbeat, and there are none").as_nanos() as u64;
        assert!(now + STEP >= self.beat_at + heartbeat, "a heartbeat too early: {self:?}");
        self.missed_heartbeats += 1;
        // One that was due while the server read nothing is not held against the peer: it has all its time again.
        assert!(
            self.left_out || self.missed_heartbeats <= limits.heartbeats_missed_max.into(),
            "more heartbeats than may stay without an answer: {self:?}"
        );
        (self.beat_at, self.quiet_at) = (now, now);
    }

    /// True if the peer has not answered as many heartbeats as it may leave unanswered. Those left out since its outbox was
    /// full count, and so do those whose answer may lie unread since the shard holds the connection back.
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

    /// True if too few bytes of half a frame came in the time over which that is measured, and nothing but the peer
    /// was in the way.
    pub fn read_is_too_slow(&self, limits: &Limits, now: u64) -> bool {
        let now = self.judged_at(now);
        let since = now.saturating_sub(READ_WINDOW);
        let starved = self.unread_since.is_some_and(|unread| unread <= since);
        !starved
            && now >= READ_WINDOW
            && self.arrived_since(since) < Clocks::wanted(limits)
            && self.held_back_at <= since + STEP
    }

    /// Bytes that must come within [`READ_WINDOW`].
    fn wanted(limits: &Limits) -> usize {
        limits.read_bytes_per_second_min * (READ_WINDOW / 1_000_000_000) as usize
    }

    fn arrived_since(&self, time: u64) -> usize {
        self.arrivals.iter().rev().take_while(|(at, _)| *at > time).map(|(_, bytes)| bytes).sum()
    }

    /// When the shard decided that the connection ends.
    fn judged_at(&self, now: u64) -> u64 {
        self.sealed.map_or(now, |sealed| sealed.at)
    }

    /// A look at the connection at `now`.
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

    /// Panics if a limit of connection `tag` is `overdue` for longer than it may be.
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

    /// The limit that should have ended the connection by now, or made its service ask for a heartbeat. A window may be over
    /// by `late`.
    pub fn overdue(&self, limits: &Limits, now: u64, late: u64) -> Option<&'static str> {
        let heartbeat = limits.heartbeat_interval.map(|time| time.as_nanos() as u64);
        if heartbeat.is_some_and(|heartbeat| now > self.quiet_at + heartbeat + LATE_MAX) {
            return Some("heartbeat");
        }
        let (since, _) = self.half.filter(|_| limits.read_bytes_per_second_min > 0)?;
        // From `from` on nothing but the peer was in the way, so a window that began at most its length before that
        // is over by now.
        let from = now.checked_sub(READ_WINDOW + late).filter(|from| since <= *from)?;
        let span = from.saturating_sub(READ_WINDOW + late);
        let (freed_at, freed) = self.freed;
        let came = self.arrived_since(span) + if freed_at > span { freed } else { 0 };
        (came < Clocks::wanted(limits)).then_some("read_bytes_per_second_min")
    }
}

/// How fast a peer takes what the core sends: the core looks again and again at how much of a send it took, and sends
/// the rest on.
#[derive(Debug, Default)]
pub struct WriteRate {
    /// When the send in flight began, or the last look that found bytes taken, and the bytes taken until then.
    since: Option<(u64, usize)>,
    /// The bytes that will have been taken when all of it is.
    end: usize,
    /// At the last look the peer had taken too little, if the shard was there all the time.
    excused: bool,
}

impl WriteRate {
    /// The core sends `bytes` of a connection whose peer took `taken` so far. Panics if it goes on with a send of which the
    /// peer took too little, at `least` bytes a second, of which a shard that came late knows nothing until `late`, and one that
    /// slept for long may not until `slept`: where that is why it goes on, the next look judges all of the time.
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

    /// True if the peer took too little, at `least` bytes a second, since the send began or it was last seen to take
    /// enough.
    pub fn is_too_slow(&self, limits: &Limits, taken: usize, now: u64) -> bool {
        let Some((since, before)) = self.since else { return false };
        let stalled = limits.write_stall_timeout.map(|time| time.as_nanos() as u64);
        let time = now + STEP - since;
        let looked = time >= stalled.unwrap_or(READ_WINDOW).min(READ_WINDOW / 2);
        let wanted = limits.write_bytes_per_second_min as u128 * u128::from(time);
        let slow = (taken - before) as u128 * 1_000_000_000 < wanted;
        looked && slow && (taken > before || stalled.is_none())
    }

    /// Since when the peer took nothing.
    pub fn untaken_since(&self, taken: usize) -> Option<u64> {
        self.since.filter(|(_, before)| *before == taken).map(|(since, _)| since)
    }
}
