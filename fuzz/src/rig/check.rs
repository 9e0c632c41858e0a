//! Conditions at the end of a connection and after every turn.

use ringserve_core::{CloseReason, ConnId, EndedConn, Wait};

use super::driver::Listening;
use super::user::session_of;
use super::{Core, LATE_MAX, Model, PUT_OFF_MAX, QUOTA};
use crate::framings::Start;

impl Model {
    pub(super) fn check_end(&mut self, ended: EndedConn) {
        let EndedConn { id, lane, shared, reason, opened, call } = ended;
        let shared = session_of(&shared);
        assert_eq!(lane == self.lane, self.upstreams.contains_key(&id), "{id} ended on another lane");
        let was_there = self.live.remove(&id).is_some();
        assert!(was_there || self.upstreams.contains_key(&id), "{id} ended twice");
        assert!(shared.is_gone());
        let (kind, limits) = (self.plan.kind, &self.plan.limits);
        let mut left = call;
        while let Some(index) = left {
            let task = self.tasks[index as usize].take().expect("a call that waits");
            assert!(task.shared == shared, "another connection's call");
            left = task.parked.next;
        }
        assert!(self.calls(&shared).next().is_none(), "{id} ended, and a call of it goes on");
        let talk = &mut self.talks[shared.body().peer];
        talk.ended = Some(self.now);
        assert!(shared.body().gate.borrow().as_ref().is_none_or(|gate| gate.is_gone()));
        assert_eq!(opened, talk.opened);
        let rest = talk.received.len() - talk.cut;
        use CloseReason::*;
        let all_sent = match reason {
            PeerClosed if talk.input_end_notified => true,
            PeerClosed => {
                assert!(rest == 0 && call.is_none(), "frames are left, or a call waits");
                true
            }
            PeerClosedMidFrame => {
                assert!(rest > 0 && talk.next(kind, limits.frame_bytes_max) == Start::Part);
                assert!(call.is_none(), "a call waits");
                true
            }
            // An upstream closes when every accepted connection has closed, whatever is asked of
            // it.
            Shutdown => {
                let accepted =
                    self.wires.iter().filter(|wire| !self.upstreams.contains_key(&wire.id)).count();
                assert!(if lane == self.lane { accepted == 0 } else { call.is_none() }, "a call waits");
                true
            }
            ReadTooSlow => {
                assert!(limits.read_bytes_per_second_min > 0 && rest > 0);
                true
            }
            HeartbeatLost => {
                let silence = limits.heartbeat_interval.unwrap() * limits.heartbeats_missed_max.into();
                assert!(self.now >= talk.heard + silence, "a peer that spoke is given up");
                true
            }
            HandlerTimeout => {
                assert!(limits.handler_timeout.is_some());
                true
            }
            BadFrame(_) => {
                assert!(talk.bad);
                true
            }
            FirstFrameTimeout => {
                assert!(limits.first_frame_timeout.is_some() && talk.cut == 0, "there was a frame");
                true
            }
            IdleTimeout => {
                assert!(limits.idle_timeout.is_some());
                true
            }
            WriteStallTimeout => {
                assert!(limits.write_stall_timeout.is_some());
                false
            }
            WriteTooSlow => {
                assert!(limits.write_bytes_per_second_min > 0);
                false
            }
            Closed | Refused | HandlerError | ReplyNotFramed => true,
            _ => false,
        };
        assert!(!all_sent || talk.taken == talk.owed.len(), "ended as {reason}, and a reply is left");
        shared.body().kept.borrow_mut().clear();
        self.ends.push((shared.body().peer, reason));
        if self.old.len() < 4 {
            self.old.push(shared);
        }
    }

    /// Checks the conditions after every turn. The driver may keep the end of `unawaited` sends to
    /// itself until another event.
    pub(super) fn check(&self, shard: &Core, unawaited: &[ConnId]) {
        shard.check();
        self.pool.invariants();
        self.check_closing();
        if shard.wait() == Wait::No {
            return;
        }
        let draining = shard.all_share().is_draining();
        self.check_upstreams_go(shard);
        assert!(unawaited.is_empty() || !draining, "a drain waits for every send");
        let max = if self.plan.others { QUOTA } else { usize::MAX };
        let accepted = self.wires.iter().filter(|wire| !self.upstreams.contains_key(&wire.id)).count();
        let full = accepted >= self.plan.connections_max.min(max);
        assert!(self.sockets.is_empty() || full || draining, "a socket waits although there is room");
        let limits = &self.plan.limits;
        for (id, shared) in &self.live {
            let talk = &self.talks[shared.body().peer];
            let wire = self.wires.iter().find(|wire| wire.id == *id).expect("a live connection is adopted");
            // The end of the send will wake the shard.
            let send = wire.send.armed && !unawaited.contains(id);
            let in_flight = wire.batch.as_ref().map_or(0, |batch| batch.len());
            let queued = talk.owed.len() - talk.taken - in_flight;
            assert!(queued == 0 || send, "{id}: replies wait, and nothing is sent");
            assert!(send || !shared.is_gone(), "{id}: it is finished, and waits for nothing");
            let half_closed = shared.body().writing_ended.get() && !wire.send.armed;
            assert!(!half_closed || wire.shut, "{id}: everything left, and no FIN follows");
            let mut calls = 0;
            for task in self.calls(shared) {
                calls += 1;
                let room = task.room.as_ref().is_none_or(|flag| flag.is_set());
                assert!(send || room, "{id}: a handler waits for room that is there");
            }
            // Until the driver stopped a send that stalls, no other limit counts; and of several
            // that are over, one counts in each step.
            let limited = calls > 0 && !shared.is_gone() && !wire.send.stopping;
            if let Some(limit) = limits.handler_timeout.filter(|_| limited) {
                let late = self.now > talk.waits_since + limit + LATE_MAX;
                let wakes = matches!(shard.wait(), Wait::For(pause) if pause < PUT_OFF_MAX);
                assert!(!late || wakes, "{id}: a call waits for longer than it may");
            }
            if let Some(gate) = &*shared.body().gate.borrow() {
                let room = !shared.is_full();
                assert_eq!((gate.is_gone(), gate.announce(0)), (shared.is_gone(), room));
                assert!(send || room, "{id}: other threads wait for room, and nothing makes it");
            }
            let frame = talk.opened && matches!(talk.next(self.plan.kind, usize::MAX), Start::Frame(..));
            let held = shard.calls_are_full(*id) || send || talk.bad;
            assert!(held || !frame, "{id}: a frame waits for nothing");
            let receives = wire.receive.armed || wire.read_over || !talk.opened;
            assert!(held || receives, "{id}: the peer is not listened to");
        }
    }

    /// Checks that in a drain upstreams close as soon as no accepted connection is left and none
    /// can come.
    fn check_upstreams_go(&self, shard: &Core) {
        let listens = self.listening.iter().any(|listening| *listening != Listening::Closed);
        let accepted = self.wires.iter().any(|wire| !self.upstreams.contains_key(&wire.id));
        if !shard.has_stopped() || listens || accepted || !self.sockets.is_empty() {
            return;
        }
        let stays =
            self.upstreams.keys().find(|id| shard.shared(**id).is_some_and(|shared| !shared.is_gone()));
        assert!(
            stays.is_none(),
            "{stays:?} is an upstream, and stays although no accepted connection is left"
        );
    }

    /// Checks that ended connections do not stay.
    fn check_closing(&self) {
        for wire in &self.wires {
            let Some(ended) = self.talks[wire.peer].ended else { continue };
            let over = self.now > ended + self.plan.limits.linger_timeout + LATE_MAX;
            assert!(!over || wire.is_ending(), "a connection that is over stays: {wire:?}");
        }
    }
}
