//! The drain of a shard.
//!
//! ```text
//!   the order ──▶ Delayed ──▶ Looking ────────────▶ Finishing ──▶ Aborted ──▶ given up
//!                 as before   listeners close,      one after     resets      what the driver
//!                             what arrived is       the other               never ended
//!                             taken in              is cut
//! ```
//!
//! * Each connection gets `draining` at the start, some in each turn ([`NOTIFIED_IN_A_TURN`]), and
//!   none is cut before all had it.
//! * *Delayed*, for [`ServerLimits::drain_delay`](crate::ServerLimits::drain_delay): only
//!   [`ShardShared::is_draining`](crate::ShardShared::is_draining) changes.
//! * *Looking*: the listeners are closed, and bytes that had arrived are received. It is over when
//!   a turn brings nothing, or after [`LOOKS_MIN`] turns and one more for every
//!   [`CONNECTIONS_A_LOOK`] connections: the driver brings earlier completions first, 256 in a
//!   turn.
//! * *Finishing*: every connection is cut, one after the other, in random order, over
//!   [`ServerLimits::drain_spread`](crate::ServerLimits::drain_spread). Until its moment it is
//!   served as before. Then later bytes are dropped, so that no call begins for them, and none of
//!   them waits in the kernel, where it would turn the close into a reset. Frames that were
//!   received whole are answered, pending calls are awaited, queued replies are sent; then FIN. A
//!   connection that its service holds open is left alone.
//! * A connection without a frame yet has its moment [`FIRST_FRAME`] later: its first request may
//!   be on its way. So has one in a handshake that brought a byte, or was accepted less than that
//!   ago; another one whose PROXY header is not complete, or whose handshake is not done, is closed
//!   at once.
//! * A connection from the queue of a listener comes later than the others, and is cut
//!   [`FIRST_FRAME`] after the turn that admitted it.
//! * A lane may wait for another one ([`Shard::drain_lane_later`]): its listeners close with the
//!   others, and its connections are served as before. Once they are let go ([`Shard::drain_lane`])
//!   they have a separate wave, *Looking* and *Finishing* once more, within the same time.
//! * Connections to upstreams stay until the last accepted one is gone, which may need them. Then
//!   their queued bytes are sent, and they are closed. "The last" includes those of other shards,
//!   as long as a shard [awaits](Shard::await_others) them.
//! * *Aborted*, after [`ServerLimits::drain_timeout`](crate::ServerLimits::drain_timeout) or at the
//!   order: every connection is reset.
//! * Connections that remain after [`GIVE_UP`] and [`LAST_LOOKS`] are left behind: a completion of
//!   the driver did not come.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::time::Duration;

use super::Shard;
use super::lanes::{LaneState, Wave};
use super::turn::Event;
use crate::connection::{Conn, Intake, OpenState};
use crate::{CloseReason, ConnId, LaneId, Observer, Time};

/// Turns that bring bytes until connections are cut: the few that the first of 256 completions may
/// need while others come in between. A client that sends its next request with each answer gets
/// one more answer for each of them.
const LOOKS_MIN: u32 = 16;

/// Connections for each of which one more look is granted: a turn takes 256 completions, and a
/// connection may have had several.
const CONNECTIONS_A_LOOK: u32 = 8;

/// Time that a connection has for its first request, and a handshake that began for its end: two
/// round trips of a slow network and the turns in which its socket is adopted by the driver. Half
/// of the drain's time at most.
const FIRST_FRAME: Duration = Duration::from_millis(500);

/// Time before the end of the drain in which no connection is cut for its spread. Half of the
/// drain's time at most.
const LAST_LEAVERS: Duration = Duration::from_secs(1);

/// Time that the driver has to end aborted connections, and more time once the shard has looked at
/// completions of that time: a machine that slept finds all of them there. Together the rest of the
/// 30 s after which Kubernetes kills, with the default of `ServerLimits::drain_timeout`. A kernel
/// that ends nothing in that time does not do so later.
const GIVE_UP: Duration = Duration::from_secs(4);
const LAST_LOOKS: Duration = Duration::from_secs(1);

/// Connections that get `draining` in a turn, so that a crowd of them keeps none waiting for long:
/// at a microsecond each half a millisecond.
const NOTIFIED_IN_A_TURN: u32 = 512;

/// All connections had `draining`.
const ALL_NOTIFIED: u32 = u32::MAX;

/// The drain of the shard.
pub(super) struct Drain {
    stage: Stage,
    /// The slot whose connection gets `draining` next, [`ALL_NOTIFIED`] after the last. A
    /// connection before it that opens gets it then.
    notified: u32,
    /// Connections admitted since the start of the drain or right before, with the time at which
    /// they are cut: `None` until the turn after the one that admitted them begins.
    newcomers: VecDeque<(Option<Time>, ConnId)>,
    /// Connections that had a frame, and those that may still bring their first one, of each wave.
    leavers: Vec<Leavers>,
    /// Some lanes were let go whose wave has not begun.
    has_next: bool,
    /// The time over which they are closed.
    spread: Duration,
    /// Connections to upstreams are being closed, and no new one is made.
    outbound_closed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Delayed {
        until: Time,
    },
    Looking {
        /// The time at which remaining connections are aborted.
        deadline: Time,
        turns_left: u32,
        /// True until the first turn that began after it has brought everything it could.
        first_turn: bool,
    },
    Finishing {
        deadline: Time,
    },
    Aborted {
        /// The time at which remaining connections are left behind.
        until: Time,
        /// The driver had its time, and brings completions of that time.
        last_looks: bool,
    },
    GivenUp,
}

impl Drain {
    fn new(stage: Stage) -> Drain {
        Drain {
            stage,
            notified: 0,
            newcomers: VecDeque::new(),
            leavers: Vec::new(),
            has_next: false,
            spread: Duration::ZERO,
            outbound_closed: false,
        }
    }

    /// True if turns follow each other without a wait.
    pub(super) fn looks(&self) -> bool {
        matches!(self.stage, Stage::Looking { .. })
    }

    /// The time at which the drain has something to do.
    pub(super) fn next(&self) -> Option<Time> {
        let stage = match self.stage {
            Stage::Delayed { until } | Stage::Aborted { until, .. } => Some(until),
            Stage::Looking { deadline, .. } | Stage::Finishing { deadline } => Some(deadline),
            Stage::GivenUp => None,
        };
        if self.notified != ALL_NOTIFIED || self.may_go_on() {
            return Some(Time::ZERO);
        }
        // A connection without a time needs a turn at once. The last ones are those without.
        let untimed = self.newcomers.back().is_some_and(|(at, _)| at.is_none());
        let newcomer =
            if untimed { Some(Time::ZERO) } else { self.newcomers.front().and_then(|(at, _)| *at) };
        let leavers = self.leavers.iter().filter_map(Leavers::next);
        stage.into_iter().chain(newcomer).chain(leavers).min()
    }

    /// True if the next wave may begin.
    fn may_go_on(&self) -> bool {
        self.has_next && matches!(self.stage, Stage::Finishing { .. }) && self.notified == ALL_NOTIFIED
    }

    /// Takes a connection that is to be cut now.
    fn take_due(&mut self, now: Time) -> Option<ConnId> {
        if let Some(&(Some(at), id)) = self.newcomers.front()
            && at <= now
        {
            self.newcomers.pop_front();
            return Some(id);
        }
        self.leavers.iter_mut().find_map(|leavers| leavers.take_due(now))
    }

    /// True once listeners are closed and no new connection to an upstream is made.
    fn has_stopped(&self) -> bool {
        !matches!(self.stage, Stage::Delayed { .. })
    }
}

/// Connections that are cut one after the other, at equal distances.
#[derive(Default)]
struct Leavers {
    /// The ids in reverse order: the last one is the next.
    ids: Vec<ConnId>,
    at: Time,
    distance: Duration,
}

impl Leavers {
    /// Spreads all of them between `from` and `spread` later, in an order that `seed` decides.
    fn new(mut ids: Vec<ConnId>, from: Time, spread: Duration, seed: u64) -> Leavers {
        let mut state = seed;
        for left in (2..=ids.len()).rev() {
            // SplitMix64.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            ids.swap(left - 1, ((mixed ^ mixed >> 31) % left as u64) as usize);
        }
        let distance = spread / (ids.len() as u32).max(1);
        Leavers { ids, at: from, distance }
    }

    /// The time at which the next one is cut.
    fn next(&self) -> Option<Time> {
        (!self.ids.is_empty()).then_some(self.at)
    }

    /// Takes the next one, if its time has come.
    fn take_due(&mut self, now: Time) -> Option<ConnId> {
        let due = if self.at <= now { self.ids.pop() } else { None };
        if due.is_some() {
            self.at = self.at + self.distance;
        }
        due
    }
}

impl<O: Observer> Shard<O> {
    /// Begins to shut down, at once or after
    /// [`ServerLimits::drain_delay`](crate::ServerLimits::drain_delay): listeners are closed,
    /// received frames are answered, and connections are closed when they owe nothing, one after
    /// the other over [`ServerLimits::drain_spread`](crate::ServerLimits::drain_spread); after
    /// [`ServerLimits::drain_timeout`](crate::ServerLimits::drain_timeout) the rest is aborted.
    pub fn drain(&mut self) {
        if self.drain.is_some() {
            return;
        }
        self.shared.set_draining();
        self.lanes.next_wave(Wave::Next, Wave::Begins);
        if self.limits.drain_delay.is_zero() {
            return self.stop();
        }
        let stage = Stage::Delayed { until: self.now + self.limits.drain_delay };
        self.drain = Some(Drain::new(stage));
        self.begins_aside = true;
    }

    /// Aborts every connection, and accepts no more.
    pub fn abort_all(&mut self) {
        self.drain();
        self.stop();
        self.abort_each(CloseReason::ServerAborted);
    }

    /// Closes connections to upstreams after their queued bytes, at the end of a turn, once no
    /// accepted connection is left.
    #[cold]
    #[inline(never)]
    pub(super) fn close_outbound(&mut self) {
        let is_over = self.lanes.inbound() == 0 && self.has_stopped() && self.accepting.is_stopped();
        let is_due = is_over && !self.outlasts();
        let Some(drain) = self.drain.as_mut().filter(|drain| is_due && !drain.outbound_closed) else {
            return;
        };
        drain.outbound_closed = true;
        for slot in 0..self.conns.used() {
            if let Some(id) = self.conns.id_at(slot) {
                self.finish(id, CloseReason::Shutdown);
            }
        }
    }

    /// Sets whether other shards have connections, whose calls may need this one or an upstream of
    /// it: until they have none, a shard without connections is not [done](Shard::is_done) before
    /// its drain is aborted. True if that is new; a turn is due once they have none.
    pub fn await_others(&mut self, awaits: bool) -> bool {
        core::mem::replace(&mut self.awaits_others, awaits) != awaits
    }

    /// True while it awaits them.
    fn outlasts(&self) -> bool {
        self.awaits_others && self.takes_newcomers()
    }

    /// True once connections to upstreams are being closed.
    pub(super) fn has_closed_outbound(&self) -> bool {
        self.drain.as_ref().is_some_and(|drain| drain.outbound_closed)
    }

    /// The first stage of a wave.
    fn looking(&self, deadline: Time) -> Stage {
        let turns_left = LOOKS_MIN + self.conns.len() as u32 / CONNECTIONS_A_LOOK;
        Stage::Looking { deadline, turns_left, first_turn: true }
    }

    /// Makes the shard serve the connections of a lane as before in a drain, until
    /// [`drain_lane`](Shard::drain_lane) or its end. Before the first turn.
    pub fn drain_lane_later(&mut self, lane: LaneId) {
        self.lanes[lane].wave = Wave::Waits;
    }

    /// Drains the connections of a lane that waited.
    pub fn drain_lane(&mut self, lane: LaneId) {
        if self.lanes[lane].wave == Wave::Waits {
            self.lanes[lane].wave = Wave::Next;
            if let Some(drain) = &mut self.drain {
                drain.has_next = true;
            }
        }
    }

    /// True once the shard has stopped, the lane does not wait, and none of its connections is
    /// left. From then on none is added: another shard may have one on its way here, which is
    /// refused.
    pub fn is_lane_over(&mut self, lane: LaneId) -> bool {
        let LaneState { wave, connections, .. } = self.lanes[lane];
        let is_left = || connections > 0 || self.accepting.is_open(lane);
        if !self.has_stopped() || wave == Wave::Waits || is_left() {
            return wave == Wave::Over;
        }
        self.lanes[lane].wave = Wave::Over;
        true
    }

    /// True once the connections of a lane have their moments, or had them: for those that their
    /// service holds open, which end by themselves.
    pub fn is_lane_leaving(&self, lane: LaneId) -> bool {
        self.has_stopped() && matches!(self.lanes[lane].wave, Wave::Begun | Wave::Over)
    }

    /// True once the shard has stopped, for a connection whose lane does not wait for another one.
    pub(super) fn has_stopped_for(&self, id: ConnId) -> bool {
        let waits = |conn: &Conn| matches!(self.lanes[conn.lane].wave, Wave::Waits | Wave::Next);
        self.has_stopped() && !self.conns.get(id).is_some_and(waits)
    }

    /// Begins the wave of the lanes that were let go.
    #[cold]
    fn begin_next_wave(&mut self) {
        let Some(Stage::Finishing { deadline }) = self.drain.as_ref().map(|drain| drain.stage) else {
            return;
        };
        self.lanes.next_wave(Wave::Next, Wave::Begins);
        let stage = self.looking(deadline);
        if let Some(drain) = &mut self.drain {
            (drain.stage, drain.notified, drain.has_next) = (stage, 0, false);
        }
    }

    /// Ends the delay: nothing new is accepted from here on.
    fn stop(&mut self) {
        if self.has_stopped() {
            return;
        }
        let stage = self.looking(self.now + self.limits.drain_timeout);
        let (notified, has_next) =
            self.drain.as_ref().map_or((0, false), |drain| (drain.notified, drain.has_next));
        self.drain = Some(Drain { notified, has_next, ..Drain::new(stage) });
        self.begins_aside = true;
        self.stop_listening();
        self.retry_accepts();
    }

    /// True once the shard drains and its [`drain_delay`](crate::ServerLimits::drain_delay) is
    /// over: its listeners are closed, or being closed.
    pub fn has_stopped(&self) -> bool {
        self.drain.as_ref().is_some_and(Drain::has_stopped)
    }

    /// Time over which connections are closed from the moment at which those of their lane
    /// [leave](Shard::is_lane_leaving).
    pub fn drain_spread(&self) -> Duration {
        self.drain.as_ref().map_or(Duration::ZERO, |drain| drain.spread)
    }

    /// Time for a request that is on its way at that moment.
    pub fn first_frame_time(&self) -> Duration {
        FIRST_FRAME.min(self.limits.drain_timeout / 2)
    }

    /// True if a new socket may still become a connection.
    pub(super) fn takes_newcomers(&self) -> bool {
        let stage = self.drain.as_ref().map(|drain| drain.stage);
        !matches!(stage, Some(Stage::Aborted { .. } | Stage::GivenUp))
    }

    /// Notes a new connection, which is cut a little later than the others.
    pub(super) fn note_newcomer(&mut self, id: ConnId) {
        let waits = !self.has_stopped_for(id);
        let Some(drain) = self.drain.as_mut().filter(|_| !waits) else { return };
        drain.newcomers.push_back((None, id));
        if let Some(conn) = self.conns.get_mut(id) {
            conn.intake = Intake::Brief;
        }
    }

    /// Sends `draining` to some connections that did not have it.
    fn notify_draining(&mut self) {
        let Some(drain) = self.drain.as_mut().filter(|drain| drain.notified != ALL_NOTIFIED) else { return };
        let used = self.conns.used();
        let slots = drain.notified..used.min(drain.notified + NOTIFIED_IN_A_TURN);
        drain.notified = if slots.end < used { slots.end } else { ALL_NOTIFIED };
        for slot in slots {
            let Some(id) = self.conns.id_at(slot) else { continue };
            let is_served = |conn: &&Conn| {
                let lane = &self.lanes[conn.lane];
                conn.is_open() && !lane.is_outbound && lane.wave == Wave::Begins
            };
            if self.conns.get(id).filter(is_served).is_some_and(|conn| conn.opened == OpenState::Yes) {
                self.events.push_back(Event::Draining(id));
            }
        }
    }

    /// Notes an opened connection. One that opens in a drain, after the others, gets `draining`
    /// too.
    pub(super) fn notify_opened(&mut self, id: ConnId) {
        let Some(drain) = &self.drain else { return };
        let is_told = self.lane_of(id).map(|lane| &self.lanes[lane]).is_some_and(|lane| match lane.wave {
            Wave::Begins => !lane.is_outbound && id.slot() < drain.notified,
            Wave::Begun | Wave::Over => !lane.is_outbound,
            Wave::Waits | Wave::Next => false,
        });
        if is_told {
            self.events.push_back(Event::Draining(id));
        }
    }

    /// Advances the drain, in a turn that brings `completions` completions.
    #[cold]
    #[inline(never)]
    pub(super) fn step_drain(&mut self, completions: usize) {
        if self.drain.as_ref().is_some_and(Drain::may_go_on) {
            self.begin_next_wave();
        }
        // Connections informed now receive the event after this point.
        let all_told = self.drain.as_ref().is_some_and(|drain| drain.notified == ALL_NOTIFIED);
        self.notify_draining();
        let Some(drain) = &mut self.drain else { return };
        let now = self.now;
        match &mut drain.stage {
            Stage::Delayed { until } if now >= *until => return self.stop(),
            Stage::Delayed { .. } | Stage::GivenUp => return,
            Stage::Looking { deadline, .. } | Stage::Finishing { deadline } if now >= *deadline => {
                return self.abort_each(CloseReason::DrainTimeout);
            }
            Stage::Aborted { until, last_looks } => {
                if now >= *until {
                    match completions > 0 || !*last_looks {
                        true => (*until, *last_looks) = (now + LAST_LOOKS, true),
                        false => drain.stage = Stage::GivenUp,
                    }
                }
                return;
            }
            Stage::Finishing { .. } => {}
            Stage::Looking { deadline, turns_left, first_turn } => {
                let arrives = core::mem::take(&mut self.has_received) || core::mem::take(first_turn);
                *turns_left = if arrives { turns_left.saturating_sub(1) } else { 0 };
                if *turns_left == 0 && all_told {
                    let left = *deadline - now;
                    drain.stage = Stage::Finishing { deadline: *deadline };
                    self.begin_to_cut(left);
                }
            }
        }
        self.cut_due();
    }

    /// Gives each connection the moment at which it is cut, within the `left` time of the drain.
    fn begin_to_cut(&mut self, left: Duration) {
        let first_frame = self.first_frame_time();
        let (mut served, mut young) = (Vec::new(), Vec::new());
        for index in 0..self.conns.used() {
            let Some(id) = self.conns.id_at(index) else { continue };
            let is_on = |conn: &&Conn| {
                let lane = &self.lanes[conn.lane];
                conn.intake == Intake::On && !lane.is_outbound && lane.wave == Wave::Begins
            };
            let Some(conn) = self.conns.get(id).filter(is_on) else { continue };
            let is_silent_start = self.is_silent_start(id) && conn.since.age(self.stamp) >= first_frame;
            match (is_silent_start, conn.frame_seen) {
                (true, _) => self.cut(id),
                (false, true) => served.push(id),
                (false, false) => young.push(id),
            }
        }
        self.lanes.next_wave(Wave::Begins, Wave::Begun);
        let (now, seed, spread) =
            (self.now, self.now.as_nanos(), self.spread(served.len() + young.len(), left));
        let Some(drain) = &mut self.drain else { return };
        drain.spread = spread;
        let later = spread.min(left.saturating_sub(first_frame));
        drain.leavers.retain(|leavers| leavers.next().is_some());
        drain.leavers.extend([
            Leavers::new(served, now, spread, seed),
            Leavers::new(young, now + first_frame, later, !seed),
        ]);
    }

    /// The time over which the connections of a wave are closed, `connections` of which are here,
    /// within the `left` time of the drain.
    fn spread(&self, connections: usize, left: Duration) -> Duration {
        // The last ones need time to answer what came, and to announce that they close.
        let latest = left.saturating_sub(LAST_LEAVERS.min(left / 2));
        let by_number = || {
            let here = self.conns.len().max(1);
            let all = self.accepting.used_by_all().unwrap_or(here);
            // Those of all shards, on the assumption that the service has the same part of each.
            let wave = (all * connections).div_ceil(here);
            Duration::from_millis(wave as u64).min(left.saturating_sub(self.first_frame_time()) / 2)
        };
        self.limits.drain_spread.unwrap_or_else(by_number).min(latest)
    }

    /// Cuts connections whose moment has come.
    fn cut_due(&mut self) {
        let (now, first_frame) = (self.now, self.first_frame_time());
        if let Some(drain) = &mut self.drain {
            let untimed = drain.newcomers.iter_mut().rev().take_while(|(at, _)| at.is_none());
            // Their time begins here, since the turn that admitted them may have lasted longer.
            untimed.for_each(|(at, _)| *at = Some(now + first_frame));
        }
        while let Some(drain) = &mut self.drain
            && let Some(id) = drain.take_due(now)
        {
            self.cut(id);
        }
    }

    /// Drops later bytes from now on, together with the start of an unfinished frame.
    fn cut(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        conn.intake = Intake::Cut;
        // Rates do not apply from here on.
        self.resume_reads(id);
        let Some(conn) = self.conns.get_mut(id) else { return };
        if conn.is_starting() {
            // A peer whose header or handshake is not done did not ask for anything.
            return self.finish(id, CloseReason::Shutdown);
        }
        if !conn.is_open() || !conn.is_cut() {
            return;
        }
        if conn.paused {
            conn.paused = false;
            self.observer.paused(self.now, id, false);
            self.sync_receive(id);
        }
        self.drop_partial(id);
        self.close_if_quiet(id);
    }

    fn abort_each(&mut self, reason: CloseReason) {
        for index in 0..self.conns.used() {
            if let Some(id) = self.conns.id_at(index) {
                self.abort(id, reason);
            }
        }
        if let Some(drain) = &mut self.drain
            && !matches!(drain.stage, Stage::Aborted { .. } | Stage::GivenUp)
        {
            // Once is enough: the rest is up to the driver.
            drain.stage = Stage::Aborted { until: self.now + GIVE_UP, last_looks: false };
            drain.newcomers.clear();
            drain.leavers.clear();
            (drain.notified, drain.has_next) = (ALL_NOTIFIED, false);
            drain.outbound_closed = true;
            [Wave::Waits, Wave::Next, Wave::Begins]
                .into_iter()
                .for_each(|wave| self.lanes.next_wave(wave, Wave::Begun));
        }
        self.refuse_waiting();
    }

    /// Closes a connection that owes nothing, while the shard drains.
    #[inline(always)]
    pub(super) fn close_if_quiet(&mut self, id: ConnId) {
        if self.drain.is_some() {
            self.close_if_cut_and_quiet(id);
        }
    }

    #[cold]
    fn close_if_cut_and_quiet(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get(id) else { return };
        if conn.intake == Intake::Cut && conn.is_open() && conn.is_quiet() {
            self.finish(id, CloseReason::Shutdown);
        }
    }

    /// True once the shard drained: no connection is left, [here or
    /// elsewhere](Shard::await_others), and none is accepted; or the driver did not end those that
    /// are [left behind](Shard::left_behind).
    pub fn is_done(&self) -> bool {
        let Some(drain) = self.drain.as_ref().filter(|drain| drain.has_stopped()) else { return false };
        let over = self.conns.is_empty() && self.accepting.is_stopped() && !self.outlasts();
        (over || drain.stage == Stage::GivenUp) && self.events.is_empty()
    }

    /// Connections and listeners that the driver did not end although they were aborted, once the
    /// shard no longer waits for them. The kernel may still use their memory.
    pub fn left_behind(&self) -> usize {
        let given_up = self.drain.as_ref().is_some_and(|drain| drain.stage == Stage::GivenUp);
        if given_up { self.conns.len() + self.accepting.listeners_left() } else { 0 }
    }

    /// True if bytes for a connection are dropped because the shard drains.
    pub fn is_cut(&self, id: ConnId) -> bool {
        self.conns.get(id).is_some_and(|conn| conn.is_cut())
    }
}
