//! The shard's reports of events, lane by lane, and its counters that must agree with them.

use std::cell::RefCell;
use std::mem::discriminant;

use ringserve_core::{CloseReason, Completion, ConnId, LaneId, Observer, Outlet, Time};

use super::{Above, Core};

/// Notes the shard's reports.
#[derive(Default)]
pub struct Watched {
    /// Connections that end because the shard holds too much, with the bytes of each and of the
    /// shard.
    pub relieved: RefCell<Vec<(ConnId, usize, usize)>>,
    /// By slot: the lane of its current or last connection.
    lanes: Vec<Option<LaneId>>,
    said: Vec<(LaneId, Said)>,
}

/// Reports about a lane's connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Said {
    frames: u64,
    sends: u64,
    pauses: u64,
}

impl Watched {
    fn of(&mut self, id: ConnId) -> &mut Said {
        let lane = self.lanes.get(id.slot() as usize).copied().flatten();
        let lane = lane.expect("what happens to a connection comes after its start");
        let place = self.said.iter().position(|(known, _)| *known == lane).unwrap_or_else(|| {
            self.said.push((lane, Said::default()));
            self.said.len() - 1
        });
        &mut self.said[place].1
    }

    fn said_of(&self, lane: LaneId) -> Said {
        self.said.iter().find(|(known, _)| *known == lane).map_or(Said::default(), |(_, said)| *said)
    }
}

impl Observer for Watched {
    fn opened(&mut self, _: Time, lane: LaneId, id: ConnId, _: Option<std::net::SocketAddr>) {
        let slot = id.slot() as usize;
        self.lanes.resize(self.lanes.len().max(slot + 1), None);
        self.lanes[slot] = Some(lane);
    }

    fn frame(&mut self, _: Time, outlet: &Outlet, _: usize) {
        self.of(outlet.id()).frames += 1;
    }

    fn sending(&mut self, _: Time, id: ConnId, _: usize) {
        self.of(id).sends += 1;
    }

    fn paused(&mut self, _: Time, id: ConnId, paused: bool) {
        self.of(id).pauses += u64::from(paused);
    }

    fn over_held_bytes_max(&mut self, _: Time, _: LaneId, id: ConnId, bytes: usize, held: usize) {
        self.relieved.get_mut().push((id, bytes, held));
    }
}

/// Events of a lane's connections, as the world saw them.
#[derive(Default)]
pub(super) struct Tally {
    pub opened: u64,
    closed: u64,
    received: u64,
    ended: Vec<CloseReason>,
}

impl Above {
    /// The events of accepted connections, or of upstreams, as the world saw them.
    pub(super) fn tally(&mut self, lane: LaneId) -> &mut Tally {
        &mut self.tallies[usize::from(lane == self.lane)]
    }

    /// Counts a completion.
    pub(super) fn tally_completion(&mut self, core: &Core, completion: &Completion) {
        let (Completion::Received { id, .. } | Completion::Filled { id, .. } | Completion::Closed { id }) =
            completion
        else {
            return;
        };
        let Some(lane) = core.lane_of(*id) else { return };
        match completion {
            Completion::Received { lease, .. } => self.tally(lane).received += lease.len() as u64,
            Completion::Filled { bytes, .. } => self.tally(lane).received += *bytes as u64,
            _ => self.tally(lane).closed += 1,
        }
    }

    /// Checks after a turn that each lane has its connections, and room for the others that may
    /// come.
    pub(super) fn check_connections(&self, core: &Core) {
        let left = self.tallies.each_ref().map(|tally| (tally.opened - tally.closed) as usize);
        let are = [LaneId::FIRST, self.lane].map(|lane| core.connections(lane));
        assert_eq!(are, left, "accepted connections and upstreams");
        let plan = &self.state.borrow().plan;
        let room = [plan.connections_max - left[0], plan.upstreams_max() - left[1]];
        assert_eq!([core.slots_left(), core.connections_left(self.lane)], room, "room for more of them");
    }

    /// Notes that a connection ended.
    pub(super) fn tally_ended(&mut self, lane: LaneId, reason: CloseReason) {
        self.tally(lane).ended.push(reason);
    }

    /// Checks at the end that the shard's counters of a lane agree with the events of its
    /// connections, and of no others.
    pub(super) fn check_counters(&mut self, core: &Core, lane: LaneId) {
        let counters = core.counters(lane);
        let said = core.observer().said_of(lane);
        let counted =
            Said { frames: counters.frames, sends: counters.sends, pauses: counters.receives_paused };
        assert_eq!(counted, said, "{lane:?}: counted, and said");
        let is_upstream = lane == self.lane;
        let tally = self.tally(lane);
        let (opened, closed) = (tally.opened, tally.ended.len() as u64);
        let counted = (counters.opened, counters.closed, counters.bytes_received);
        assert_eq!(counted, (opened, closed, tally.received), "{lane:?}: opened, closed and received");
        for reason in &tally.ended {
            let equal =
                tally.ended.iter().filter(|other| discriminant(*other) == discriminant(reason)).count();
            assert_eq!(counters.closed_for(*reason), equal as u64, "{lane:?}: ended as {reason}");
        }
        let socks = &self.state.borrow().socks;
        let taken: usize =
            socks.iter().filter(|sock| sock.upstream == is_upstream).map(|sock| sock.taken).sum();
        assert!(counters.bytes_sent <= taken as u64, "{lane:?}: more was sent than its peers were");
    }

    /// Checks that, once no accepted connection is left in a drain, and none can come, the
    /// upstreams close at once: a turn later each one is closed after its queued bytes.
    pub(super) fn check_upstreams_go(&mut self, core: &Core) {
        let none_left = core.connections(LaneId::FIRST) == 0
            && core.slots_left() == self.state.borrow().plan.connections_max;
        let listens = self.listeners_closed < self.state.borrow().plan.listeners;
        if self.stopped_turn == u64::MAX || !none_left || listens || self.protocol.has_waiting() {
            return;
        }
        let stays = |(id, shared): &&(ConnId, _)| {
            let shared: &ringserve_core::ConnShared<crate::service::Session> = shared;
            core.lane_of(*id) == Some(self.lane) && !shared.is_gone()
        };
        if let Some((id, _)) = self.live.iter().find(stays) {
            panic!("{id} is an upstream, and stays although no accepted connection is left in a drain");
        }
        let tries =
            self.connecting.iter().find(|id| core.shared(**id).is_some_and(|shared| !shared.is_gone()));
        assert!(
            tries.is_none(),
            "{tries:?} is still being connected to, and no connection is left in a drain"
        );
    }
}
