//! Several lanes whose connections are accepted.

use super::*;
use crate::RefusedBy;

/// A shard for at most two connections, with one listener of its first lane and two of a second
/// one.
fn with_two_lanes(second: Limits) -> (Tested, LaneId) {
    let mut shard = Tested::new(Limits::default(), 2, 1);
    let lane = shard.add_inbound(second, 2, encoding());
    shard.begin(Time::ZERO, 0);
    (shard, lane)
}

fn come(shard: &mut Tested, listener: u16, number: u64) {
    shard.complete(Completion::Accepted { listener, socket: Socket(number), peer: None });
}

fn adopted(shard: &mut Tested) -> Vec<ConnId> {
    let adopted = |op| if let Op::Adopt { id, .. } = op { Some(id) } else { None };
    shard.ops().into_iter().filter_map(adopted).collect()
}

#[test]
fn a_connection_is_of_the_lane_of_its_listener() {
    let (mut shard, second) = with_two_lanes(Limits::default());
    come(&mut shard, 2, 0);
    come(&mut shard, 0, 1);
    let ids = adopted(&mut shard);
    assert_eq!([shard.lane_of(ids[0]), shard.lane_of(ids[1])], [Some(second), Some(LaneId::FIRST)]);
    for lane in [LaneId::FIRST, second] {
        let counters = shard.counters(lane);
        assert_eq!((counters.accepted, counters.opened, shard.connections(lane)), (1, 1, 1));
    }
}

#[test]
fn the_limit_on_connections_is_of_all_lanes_together() {
    let (mut shard, second) = with_two_lanes(Limits::default());
    come(&mut shard, 1, 0);
    come(&mut shard, 0, 1);
    let (mut ids, mut stopped) = (Vec::new(), Vec::new());
    for op in shard.ops() {
        match op {
            Op::Adopt { id, .. } => ids.push(id),
            Op::AcceptStop { listener } => stopped.push(listener),
            _ => {}
        }
    }
    assert_eq!(stopped, [0, 1, 2], "all listeners rest");
    come(&mut shard, 2, 2);
    assert_eq!((shard.slots_left(), shard.counters(second).waited, shard.newcomers()), (0, 1, 1));
    // A place that a connection of the first lane leaves is the second lane's.
    shard.heard();
    shard.abort(ids[1], CloseReason::Aborted);
    shard.complete(Completion::Closed { id: ids[1] });
    assert!(shard.heard().contains(&Heard::Accepted(Socket(2))));
    assert_eq!((shard.connections(LaneId::FIRST), shard.connections(second), shard.newcomers()), (0, 2, 0));
}

#[test]
fn socket_of_a_listener_that_another_shard_has_waits_here() {
    let mut shard = Tested::new(Limits::default(), 1, 0);
    shard.begin(Time::ZERO, 0);
    for number in [1, 2] {
        shard.take_handed_off(3, Socket(number), None);
    }
    shard.dispatch();
    let id = adopted(&mut shard)[0];
    assert_eq!((shard.heard(), shard.newcomers()), (vec![Heard::Accepted(Socket(1))], 1));
    shard.abort(id, CloseReason::Aborted);
    shard.complete(Completion::Closed { id });
    assert!(shard.heard().contains(&Heard::Accepted(Socket(2))));
    assert!(!shard.ops().iter().any(|op| matches!(op, Op::Accept { .. })));
}

#[test]
fn what_a_lane_turns_away_is_counted_there() {
    let (mut shard, second) = with_two_lanes(Limits::default());
    shard.lane.leaves_sockets = true;
    come(&mut shard, 1, 0);
    shard.refuse(Socket(0), 1, RefusedBy::Admit);
    come(&mut shard, 1, 1);
    shard.handed_off(1, None);
    shard.abort_all();
    come(&mut shard, 2, 2);
    let counters = shard.counters(second);
    assert_eq!((counters.accepted, counters.refused, counters.handed_off), (3, 2, 1));
    assert_eq!(shard.counters(LaneId::FIRST), ConnStats::default());
}

#[test]
fn time_limits_are_those_of_the_lane() {
    let (mut shard, _) = with_two_lanes(Limits::default().first_frame_timeout(Some(Duration::from_secs(2))));
    come(&mut shard, 0, 0);
    come(&mut shard, 1, 1);
    let id = adopted(&mut shard)[1];
    shard.end();
    shard.heard();
    shard.turn(at(4));
    assert_eq!(shard.heard(), [Heard::Ended { id, reason: CloseReason::FirstFrameTimeout, opened: true }]);
}

#[test]
fn a_drain_closes_the_listeners_and_connections_of_every_lane() {
    let (mut shard, _) = with_two_lanes(Limits::default());
    come(&mut shard, 0, 0);
    come(&mut shard, 2, 1);
    let ids = adopted(&mut shard);
    shard.drain();
    shard.end();
    let closed: Vec<u16> = shard
        .ops()
        .into_iter()
        .filter_map(|op| if let Op::StopListening { listener } = op { Some(listener) } else { None })
        .collect();
    assert_eq!(closed, [0, 1, 2]);
    for listener in 0..3 {
        shard.complete(Completion::AcceptEnded { listener, end: AcceptEnd::Closed });
    }
    for second in 1..5 {
        shard.turn(at(second));
    }
    for id in ids {
        assert!(shard.is_cut(id) && !shard.is_done());
        shard.complete(Completion::ReceiveEnded { id, end: crate::ReceiveEnd::Eof });
        shard.complete(Completion::ShutDown { id });
        shard.complete(Completion::Closed { id });
    }
    shard.heard();
    assert!(shard.is_done());
}
