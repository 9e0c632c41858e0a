//! Time limits, with any start of the clock.

use alloc::string::ToString;

use super::super::timers::{Lateness, TurnStart};
use super::*;
use crate::{CloseReason, ConnLimits, IdleActivity};

/// Sends a reply of 100 bytes, after which the peer is held back in the middle of a frame.
fn hold_back(shard: &mut Tested, id: ConnId) -> Box<Batch> {
    shard.begin(at(1), 0);
    shard.receive_part(id, &[0, 0, 0, 9, b'h']);
    shard.shared(id).unwrap().reply(Payload::Bytes(&[b'r'; 100]));
    shard.end();
    let sent = |op| if let Op::Send { batch, .. } = op { Some(batch) } else { None };
    let send = shard.ops().into_iter().find_map(sent);
    shard.begin(at(2), 0);
    shard.receive_part(id, b"a");
    shard.end();
    shard.heard();
    send.expect("the reply is sent")
}

#[test]
fn handler_that_waits_for_room_hears_of_a_stopped_send() {
    let (mut shard, id) = with_connection(Limits {
        outbox_bytes_high: 10,
        outbox_bytes_low: 5,
        write_bytes_per_second_min: 0,
        ..Limits::default()
    });
    let mut batch = hold_back(&mut shard, id);
    shard.begin(at(3), 0);
    batch.advance(batch.len() - 3);
    shard.complete(Completion::Sent { id, batch, end: SendEnd::Stopped });
    assert_eq!(shard.heard(), [Heard::Batch(id)]);
    shard.end();
    assert!(shard.take_ops().any(|op| matches!(op, Op::Send { batch, .. } if batch.len() == 3)));
}

#[test]
fn half_frame_is_watched_again_once_its_peer_may_send() {
    let (mut shard, id) = with_connection(Limits {
        outbox_bytes_high: 10,
        outbox_bytes_low: 5,
        first_frame_timeout: Some(Duration::from_secs(3600)),
        idle_timeout: None,
        write_stall_timeout: None,
        write_bytes_per_second_min: 0,
        handler_timeout: None,
        ..Limits::default()
    });
    let mut batch = hold_back(&mut shard, id);
    // The limits of the half frame, and of a peer that is silent, go off and find that it is held
    // back.
    for seconds in 3..40 {
        shard.turn(at(seconds));
    }
    shard.begin(at(40), 0);
    batch.advance(batch.len());
    shard.complete(Completion::Sent { id, batch, end: SendEnd::Done });
    assert_eq!(shard.heard(), [Heard::Batch(id)]);
    shard.end();
    let window = Duration::from_secs(10)..Duration::from_secs(11);
    let mut waited = Duration::ZERO;
    // The wheel may wake the shard on the way.
    while let Wait::For(time) = shard.wait()
        && shard.shared(id).is_some()
        && waited < window.end
    {
        waited += time;
        shard.turn(at(40) + waited);
    }
    assert!(window.contains(&waited) && shard.shared(id).is_none(), "closed after {waited:?}");
    assert_eq!(shard.counters(LaneId::FIRST).closed_for(crate::CloseReason::ReadTooSlow), 1);
}

/// The number of turns and the time until the one connection is closed, on a shard whose first turn
/// is at `start` and whose connection comes `quiet` later.
fn lives_for(limits: Limits, start: Time, quiet: Duration) -> (u32, Duration) {
    let mut shard = Tested::new(limits, 1, 1);
    shard.turn(start);
    let opened = start + quiet;
    shard.begin(opened, 0);
    let id = accept(&mut shard, 3);
    let (mut now, mut turns) = (opened, 0);
    loop {
        shard.end();
        let ops = shard.ops();
        if shard.shared(id).is_none() {
            return (turns, now - opened);
        }
        if ops.iter().any(|op| matches!(op, Op::ReceiveStop { .. } | Op::ShutdownInput { .. })) {
            shard.complete(Completion::ReceiveEnded { id, end: crate::ReceiveEnd::Stopped });
            continue;
        }
        let Wait::For(time) = shard.wait() else { panic!("it waits for a limit, not {:?}", shard.wait()) };
        (now, turns) = (now + time, turns + 1);
        shard.begin(now, 0);
    }
}

#[test]
fn limits_are_kept_from_any_clock_after_any_quiet_time() {
    let none = Limits { first_frame_timeout: None, idle_timeout: None, ..Limits::default() };
    let minutes = |count: u64| Duration::from_secs(60 * count);
    let year = Duration::from_secs(365 * 24 * 3600);
    let cases = [
        (Limits { idle_timeout: Some(minutes(5)), ..none.clone() }, minutes(5)),
        (Limits { idle_timeout: Some(year), ..none.clone() }, year),
        (Limits { heartbeat_interval: Some(minutes(1)), ..none.clone() }, minutes(4)),
        (Limits { heartbeat_interval: Some(year), heartbeats_missed_max: 9, ..none.clone() }, year * 10),
        // A value that `Limits::check` would not allow.
        (
            Limits { idle_timeout: Some(Duration::MAX), ..none.clone() },
            Duration::from_nanos((1 << 55) - (1 << 24)),
        ),
    ];
    let starts = [0, 1 << 52, 1 << 55, 1 << 56, 5 << 56].map(|wrap: u64| wrap.saturating_sub(1_000_000_000));
    for start in starts.map(Time::from_nanos) {
        for days in [0, 30, 53, 835, 20_000] {
            for (limits, time) in &cases {
                let (turns, lived) = lives_for(limits.clone(), start, Duration::from_secs(days * 24 * 3600));
                let late = lived.checked_sub(*time).unwrap_or_else(|| panic!("{lived:?} is before {time:?}"));
                // Each heartbeat may be two steps late.
                assert!(late < Duration::from_millis(400), "{late:?} late, start {start:?}, {days} days");
                // A look at its receive, the heartbeats, and the wheel may wake the shard once for
                // each.
                assert!(turns <= 40, "{turns} turns, start {start:?}, {days} days, {time:?}");
            }
        }
    }
}

#[test]
fn connection_whose_bytes_wait_for_the_shard_is_not_idle() {
    const FRAMES: usize = 400;
    let limits = Limits { idle_timeout: Some(Duration::from_millis(100)), ..Limits::default() };
    let (mut shard, ids) = with_connections(1, limits);
    // With the news of that many others it has a small batch in each turn, and no turn is late.
    let turn = Duration::from_millis(60);
    let mut now = at(0) + turn;
    shard.begin(now, 500);
    shard.receive(ids[0], &empty_frames(FRAMES));
    shard.end();
    let mut handed = shard.handed().len();
    let mut turns = 1;
    while handed < FRAMES {
        assert!(turns < 2 * FRAMES, "{handed} frames");
        now = now + turn;
        shard.begin_late(now, 500);
        let frames = shard.handed();
        assert!(!frames.is_empty(), "it has another batch");
        handed += frames.len();
        shard.end();
        turns += 1;
        assert_eq!(shard.counters(LaneId::FIRST).closed_for(CloseReason::IdleTimeout), 0);
    }
    assert!(turns > 5, "no limit ran out in {turns} turns");
    shard.begin(at(61), 0);
    assert_eq!(shard.counters(LaneId::FIRST).closed_for(CloseReason::IdleTimeout), 1);
}

#[test]
fn held_back_peer_is_idle_once_nothing_that_it_sent_is_unread() {
    for (unread, stays) in [(&[][..], false), (&[0, 0, 0, 1][..], true)] {
        let (mut shard, id) = with_connection(Limits {
            outbox_bytes_high: 10,
            outbox_bytes_low: 5,
            idle_timeout: Some(Duration::from_secs(10)),
            idle_counts: IdleActivity::Received,
            write_stall_timeout: None,
            write_bytes_per_second_min: 0,
            read_bytes_per_second_min: 0,
            ..Limits::default()
        });
        shard.lane.replies = 100;
        shard.begin(at(1), 0);
        shard.receive(id, &empty_frames(1));
        shard.end();
        shard.begin(at(2), 0);
        if !unread.is_empty() {
            shard.receive_part(id, unread);
        }
        shard.end();
        // The first of them looks at its receive.
        for seconds in [14, 15] {
            shard.turn(at(seconds));
        }
        // A send keeps its connection's place.
        assert_eq!(shard.shard.conns.get(id).unwrap().is_open(), stays, "{unread:?}");
    }
}

#[test]
fn talker_is_idle_where_what_it_takes_alone_counts() {
    let idle = Limits { idle_timeout: Some(Duration::from_secs(10)), ..Limits::default() };
    for (counts, closed) in [(IdleActivity::Either, 0), (IdleActivity::Received, 0), (IdleActivity::Sent, 1)]
    {
        let (mut shard, ids) = with_connections(1, Limits { idle_counts: counts, ..idle.clone() });
        // Frames that bring it nothing.
        for seconds in [4, 8] {
            shard.begin(at(seconds), 0);
            shard.receive(ids[0], &empty_frames(1));
            shard.handed();
            shard.end();
        }
        shard.begin(at(12), 0);
        assert_eq!(shard.counters(LaneId::FIRST).closed_for(CloseReason::IdleTimeout), closed, "{counts:?}");
    }
}

/// The turns of a shard with probes, as steps of its clock, and the number in each: for that many
/// connections, all silent since the first turn, after these bytes.
fn probes(connections: u32, bytes: &[u8]) -> Vec<(u64, usize)> {
    let limits = Limits {
        first_frame_timeout: None,
        idle_timeout: None,
        read_bytes_per_second_min: 0,
        ..Limits::default()
    };
    let mut shard = Tested::new(limits, connections as usize, 1);
    shard.begin(Time::ZERO, connections as usize);
    for number in 0..connections {
        let id = accept(&mut shard, number.into());
        shard.receive(id, bytes);
        shard.heard();
    }
    shard.end();
    shard.ops();
    let mut now = Time::ZERO;
    let mut turns = Vec::new();
    while turns.iter().map(|(_, count)| count).sum::<usize>() < connections as usize {
        shard.turn(now);
        let count = shard.take_ops().inspect(|op| assert!(matches!(op, Op::Probe { .. }), "{op:?}")).count();
        if count > 0 {
            turns.push((now.as_nanos() >> 24, count));
        }
        let Wait::For(time) = shard.wait() else { break };
        now = now + time;
    }
    turns
}

#[test]
fn probes_of_connections_silent_together_are_spread() {
    // Half a frame, and a whole one.
    for (bytes, per_turn, span) in [(&[0, 0][..], 40, 60..70), (&[0, 0, 0, 0][..], 3, 1000..1100)] {
        let turns = probes(2500, bytes);
        assert_eq!(turns.iter().map(|(_, count)| count).sum::<usize>(), 2500, "each is looked at once");
        assert!(turns.iter().all(|(_, count)| *count <= per_turn), "{turns:?}");
        let took = turns.last().unwrap().0 - turns[0].0;
        assert!(span.contains(&took), "{took} steps");
    }
}

#[test]
fn each_of_several_calls_has_its_time() {
    let limits = Limits::default()
        .calls_in_flight_max(8)
        .handler_timeout(Duration::from_secs(10))
        .first_frame_timeout(None)
        .idle_timeout(None);
    let (mut shard, id) = with_connection(limits);
    shard.lane.parks = Some(0);
    shard.begin(at(1), 1);
    shard.receive(id, &empty_frames(1));
    shard.end();
    // Others come and go, each within a second.
    for seconds in 2..=10 {
        shard.begin(at(seconds), 1);
        shard.receive(id, &empty_frames(1));
        shard.call_done();
        shard.end();
    }
    assert_eq!(shard.counters(LaneId::FIRST).closed, 0);
    shard.turn(at(12));
    assert_eq!(shard.counters(LaneId::FIRST).closed_for(crate::CloseReason::HandlerTimeout), 1);
}

#[test]
fn oldest_call_that_is_done_leaves_the_next_one_its_time() {
    let limits = Limits::default().calls_in_flight_max(8).handler_timeout(Duration::from_secs(10));
    let (mut shard, id) = with_connection(limits);
    shard.lane.parks = Some(0);
    for seconds in [1, 5] {
        shard.begin(at(seconds), 1);
        shard.receive(id, &empty_frames(1));
        shard.end();
    }
    shard.begin(at(9), 0);
    // The one after the newest, which has waited since the fifth second.
    let oldest = shard.lane.calls.remove(0);
    let newest = shard.lane.calls[0].parked.since;
    shard.shard.call_done(id, 0, oldest.parked, Some(newest));
    shard.end();
    shard.turn(at(14));
    assert_eq!(shard.counters(LaneId::FIRST).closed, 0);
    shard.turn(at(16));
    assert_eq!(shard.counters(LaneId::FIRST).closed_for(crate::CloseReason::HandlerTimeout), 1);
}

#[test]
fn limits_of_one_connection_are_no_others() {
    let limits = Limits::default().first_frame_timeout(None).idle_timeout(Duration::from_secs(100));
    let (mut shard, ids) = with_connections(3, limits);
    let set = |shard: &Tested, id, seconds| {
        let own = ConnLimits::default().idle_timeout(seconds);
        shard.shared(id).unwrap().set_limits(&own).unwrap();
    };
    shard.begin(at(1), 0);
    set(&shard, ids[0], Some(Duration::from_secs(10)));
    set(&shard, ids[1], None);
    shard.end();
    shard.turn(at(9));
    assert_eq!(shard.heard(), []);
    shard.turn(at(11));
    let ended = |id| Heard::Ended { id, reason: CloseReason::IdleTimeout, opened: true };
    assert_eq!(shard.heard(), [ended(ids[0])]);
    shard.turn(at(101));
    assert_eq!(shard.heard(), [ended(ids[2])]);
    // The limit that was off is on again.
    shard.begin(at(500), 0);
    shard.shared(ids[1]).unwrap().set_limits(&ConnLimits::default()).unwrap();
    shard.end();
    shard.turn(at(501));
    assert_eq!(shard.heard(), [ended(ids[1])]);
}

#[test]
fn deadline_counts_from_when_it_is_set_whatever_comes() {
    let limits = Limits::default().first_frame_timeout(None).idle_timeout(None);
    let (mut shard, ids) = with_connections(4, limits);
    let set = |shard: &Tested, id, limits: &ConnLimits| shard.shared(id).unwrap().set_limits(limits).unwrap();
    let ten = ConnLimits::default().deadline(Duration::from_secs(10));
    let closed = |shard: &Tested| shard.counters(LaneId::FIRST).closed_for(CloseReason::DeadlinePassed);
    shard.begin(at(1), 0);
    ids.iter().for_each(|id| set(&shard, *id, &ten));
    shard.end();
    shard.begin(at(8), 1);
    shard.receive(ids[0], &empty_frames(1));
    // It is not named here, then taken away, then restarted.
    set(&shard, ids[1], &ConnLimits::default().frame_bytes_max(100));
    set(&shard, ids[2], &ConnLimits::default().deadline(None));
    set(&shard, ids[3], &ten);
    shard.end();
    shard.turn(at(10));
    assert_eq!(closed(&shard), 0);
    shard.turn(at(12));
    assert_eq!(closed(&shard), 2);
    shard.turn(at(17));
    assert_eq!(closed(&shard), 2);
    shard.turn(at(19));
    assert_eq!(closed(&shard), 3);
    shard.turn(at(3600));
    let left = shard.shared(ids[2]).expect("it stays");
    assert!(!left.is_limited(), "frames of one that has a deadline alone take the short ways");
    assert_eq!(left.lane().shard().deadlines().len(), 0, "nothing is kept for one that has none");
}

#[test]
fn deadline_ends_a_call_that_waits() {
    let (mut shard, id) = with_connection(Limits::default().handler_timeout(None));
    shard.lane.parks = Some(0);
    shard.begin(at(1), 1);
    shard.receive(id, &empty_frames(1));
    let own = ConnLimits::default().deadline(Duration::from_secs(5));
    shard.shared(id).unwrap().set_limits(&own).unwrap();
    shard.end();
    shard.turn(at(5));
    assert_eq!(shard.counters(LaneId::FIRST).closed, 0);
    shard.turn(at(7));
    assert_eq!(shard.counters(LaneId::FIRST).closed_for(CloseReason::DeadlinePassed), 1);
}

#[test]
fn deadline_out_of_its_range_changes_nothing() {
    let (mut shard, id) = with_connection(Limits::default());
    shard.begin(at(1), 0);
    let shared = shard.shared(id).unwrap();
    let own = ConnLimits::default().deadline(Duration::ZERO).frame_bytes_max(100);
    let text = shared.set_limits(&own).unwrap_err().to_string();
    assert!(text.starts_with("ConnLimits::deadline is 0 s; it must be "), "{text}");
    assert!(!shared.is_limited());
}

#[test]
fn own_idle_time_counts_from_the_end_of_a_send() {
    let limits = Limits::default().write_stall_timeout(Duration::from_secs(60)).write_bytes_per_second_min(0);
    let (mut shard, id) =
        with_connection(limits.idle_timeout(Duration::from_secs(1000)).first_frame_timeout(None));
    shard.begin(at(1), 0);
    let own = ConnLimits::default().idle_timeout(Duration::from_secs(5));
    shard.shared(id).unwrap().set_limits(&own).unwrap();
    shard.shared(id).unwrap().reply(Payload::Bytes(b"reply"));
    shard.end();
    let sent = |op| if let Op::Send { batch, .. } = op { Some(batch) } else { None };
    let mut batch = shard.ops().into_iter().find_map(sent).expect("the reply is sent");
    shard.turn(at(8));
    shard.begin(at(20), 1);
    batch.advance(batch.len());
    shard.complete(Completion::Sent { id, batch, end: SendEnd::Done });
    shard.end();
    shard.turn(at(24));
    assert_eq!(shard.heard(), []);
    shard.turn(at(26));
    assert_eq!(shard.heard(), [Heard::Ended { id, reason: CloseReason::IdleTimeout, opened: true }]);
}

#[test]
fn own_limit_holds_for_a_call_that_waits() {
    let (mut shard, id) = with_connection(Limits::default().handler_timeout(Duration::from_secs(10)));
    shard.lane.parks = Some(0);
    shard.begin(at(1), 1);
    shard.receive(id, &empty_frames(1));
    shard.shared(id).unwrap().set_limits(&ConnLimits::default().handler_timeout(None)).unwrap();
    shard.end();
    shard.turn(at(3600));
    assert_eq!(shard.counters(LaneId::FIRST).closed, 0);
    shard.begin(at(3601), 0);
    let own = ConnLimits::default().handler_timeout(Duration::from_secs(3610));
    shard.shared(id).unwrap().set_limits(&own).unwrap();
    shard.end();
    shard.turn(at(3612));
    assert_eq!(shard.counters(LaneId::FIRST).closed_for(CloseReason::HandlerTimeout), 1);
}

#[test]
fn own_limit_that_contradicts_another_changes_nothing() {
    let server = ServerLimits { held_bytes_max: 64 << 20, ..ServerLimits::default() };
    let (mut shard, id) = with_connection((server, Limits::default().idle_timeout(Duration::from_secs(30))));
    shard.begin(at(1), 0);
    let shared = shard.shared(id).unwrap();
    let text = shared.set_limits(&ConnLimits::default().frame_bytes_max(65 << 20)).unwrap_err().to_string();
    assert!(
        text.contains("frame_bytes_max is 68157440 and ServerLimits::held_bytes_max is 67108864"),
        "{text}"
    );
    let beyond = ConnLimits::default().heartbeat_interval(Duration::from_secs(31));
    let text = shared.set_limits(&beyond).unwrap_err().to_string();
    assert!(text.contains("heartbeat_interval is 31s and Limits::idle_timeout is 30s"), "{text}");
    assert!(shared.set_limits(&ConnLimits::default().frame_bytes_max(0)).is_err());
    assert!(shared.set_limits(&ConnLimits::default().idle_timeout(Duration::ZERO)).is_err());
    assert!(!shared.is_limited());
}

/// The time from a turn at 60 s, after 50 s without one, until the one connection is closed. Each
/// turn brings `completions`.
fn outlives_its_limit(limits: Limits, completions: usize) -> Duration {
    let (mut shard, id) = with_connection(limits);
    shard.begin(at(1), 0);
    shard.receive_part(id, &[0, 0, 0, 9, b'h']);
    shard.end();
    shard.turn(at(10));
    let mut waited = Duration::ZERO;
    while shard.shared(id).is_some() {
        assert!(waited < Duration::from_secs(12), "it stays");
        shard.begin_late(at(60) + waited, completions);
        shard.end();
        waited += Duration::from_millis(17);
    }
    waited
}

#[test]
fn late_shard_puts_limits_off_until_it_has_caught_up() {
    let none = Limits { first_frame_timeout: None, idle_timeout: None, ..Limits::default() };
    let cases = [
        Limits { first_frame_timeout: Some(Duration::from_secs(12)), ..none.clone() },
        Limits { idle_timeout: Some(Duration::from_secs(12)), ..none.clone() },
    ];
    for limits in cases {
        // After one turn for what was there, and one for what that brought.
        let (calm, crowded) = (outlives_its_limit(limits.clone(), 3), outlives_its_limit(limits, 300));
        assert!((50..400).contains(&calm.as_millis()), "{calm:?}");
        assert!((1000..1200).contains(&crowded.as_millis()), "{crowded:?}");
    }
    // It has its whole time again.
    let slow = outlives_its_limit(Limits { read_bytes_per_second_min: 100, ..none }, 3);
    assert!((9_900..10_300).contains(&slow.as_millis()), "{slow:?}");
}

#[test]
fn peer_whose_bytes_waited_for_a_late_shard_stays() {
    let (mut shard, id) =
        with_connection(Limits { idle_timeout: Some(Duration::from_secs(12)), ..Limits::default() });
    shard.begin(at(1), 0);
    shard.receive(id, &empty_frames(1));
    shard.end();
    shard.begin_late(at(60), 1);
    shard.receive(id, &empty_frames(1));
    shard.end();
    shard.turn(at(71));
    assert!(shard.shared(id).is_some(), "its 12 s began at 60 s");
    shard.turn(at(73));
    assert_eq!(shard.counters(LaneId::FIRST).closed_for(CloseReason::IdleTimeout), 1);
}

/// A turn `gap` after the one before, of a shard that never sleeps, with a crowd's completions.
fn crowded(now: Time, gap: Duration) -> TurnStart {
    TurnStart { now, gap, completions: 300, more: false, late: Some(gap), connections: 0 }
}

#[test]
fn shard_that_is_always_late_judges_each_other_second() {
    let mut lateness = Lateness::default();
    let mut judged = Vec::new();
    for tenth in 0..60_u64 {
        let now = Time::from_nanos(1_000_000_000 + tenth * 100_000_000);
        lateness.step(&crowded(now, Duration::from_millis(100)));
        if !lateness.is_behind() {
            judged.push(tenth / 10);
        }
    }
    judged.dedup();
    assert_eq!(judged, [1, 3, 5]);
}

#[test]
fn shard_that_is_away_again_has_no_time_to_catch_up() {
    let mut lateness = Lateness::default();
    let mut is_behind = |now, millis| {
        lateness.step(&crowded(now, Duration::from_millis(millis)));
        lateness.is_behind()
    };
    assert!(is_behind(at(7), 6000));
    assert!(is_behind(at(7) + Duration::from_millis(1500), 1500));
    assert!(is_behind(at(9), 500), "its second is not over");
    assert!(!is_behind(at(9) + Duration::from_millis(600), 600));
}

/// After a stop all of them have news: more than a second is needed for that.
#[test]
fn shard_that_was_away_judges_once_it_looked_at_each() {
    let mut lateness = Lateness::default();
    let mut turn = |turns: u64, gap| {
        let now = at(60) + Duration::from_millis(10 * turns);
        lateness.step(&TurnStart { connections: 5000, ..crowded(now, gap) });
        lateness.is_behind()
    };
    assert!(turn(0, Duration::from_secs(30)));
    let turns = (1..).find(|turns| !turn(*turns, Duration::from_millis(10))).unwrap();
    assert_eq!(turns, 5000 * 33 / 300);
}

#[test]
fn shard_has_caught_up_once_its_driver_brings_little() {
    // Completions of each turn, those that received as much as a turn may, and the turn that
    // judges.
    for (completions, large, judges) in
        [(&[0, 0][..], 0, 1), (&[0, 3, 3], 0, 2), (&[300, 300, 3, 3], 0, 3), (&[3, 3, 3, 3, 3, 3], 3, 5)]
    {
        let mut lateness = Lateness::default();
        let behind = completions.iter().enumerate().map(|(turn, completions)| {
            let gap = Duration::from_millis(if turn == 0 { 30_000 } else { 1 });
            let now = at(60) + Duration::from_millis(turn as u64);
            let more = (1..=large).contains(&turn);
            lateness.step(&TurnStart {
                completions: *completions,
                more,
                connections: 9,
                ..crowded(now, gap)
            });
            lateness.is_behind()
        });
        let behind = behind.collect::<Vec<_>>();
        assert_eq!(
            behind.iter().position(|is_behind| !is_behind),
            Some(judges),
            "{completions:?}: {behind:?}"
        );
    }
}

#[test]
fn shard_that_slept_until_a_timer_is_not_late() {
    let (long, short) = (Duration::from_secs(8), Duration::from_millis(60));
    let slept = TurnStart { completions: 0, late: Some(short), ..crowded(at(9), long) };
    for (turn, is_behind) in [
        (slept, false),
        (TurnStart { completions: 1, ..slept }, true),
        (TurnStart { late: None, ..slept }, true),
        (TurnStart { gap: Duration::from_millis(900), late: None, ..slept }, false),
        (crowded(at(9), short), false),
    ] {
        let mut lateness = Lateness::default();
        if lateness.is_asked(turn.gap.as_nanos() as u64) {
            lateness.step(&turn);
        }
        assert_eq!(lateness.is_behind(), is_behind, "{turn:?}");
    }
}

/// Connections are let in as those of a time in which the shard was away, so that must be sure.
#[test]
fn absence_is_proved_by_what_the_shard_was_to_wake_for() {
    let long = Duration::from_secs(8);
    let news = TurnStart { completions: 9, late: None, ..crowded(at(9), long) };
    let half = Duration::from_millis(500);
    for (turn, watches, since) in [
        (news, false, None),
        (TurnStart { late: Some(Duration::from_millis(50)), ..news }, false, None),
        (TurnStart { late: Some(Duration::from_secs(3)), ..news }, false, Some(at(6))),
        (news, true, Some(at(1) + half)),
        (TurnStart { late: Some(Duration::from_secs(3)), ..news }, true, Some(at(1) + half)),
        (TurnStart { gap: half, ..news }, true, None),
        (
            TurnStart { gap: Duration::from_millis(600), ..news },
            true,
            Some(at(8) + Duration::from_millis(900)),
        ),
    ] {
        let mut lateness = Lateness::default();
        if watches {
            lateness.watch(Time::from_nanos((at(9) - Time::ZERO - turn.gap).as_nanos() as u64));
        }
        lateness.step(&turn);
        assert_eq!(lateness.behind_from(), since, "{turn:?}, {watches}");
    }
    // An absence after which nothing was looked at counts from the first one.
    let mut lateness = Lateness::default();
    lateness.step(&TurnStart { late: Some(Duration::from_secs(3)), ..news });
    lateness.step(&TurnStart { now: at(17), ..news });
    assert_eq!(lateness.behind_from(), Some(at(6)));
}

#[test]
fn newcomers_keep_a_shard_awake_for_a_while() {
    let mut shard = Tested::new(Limits::default(), 1, 1);
    shard.turn(at(1));
    shard.watch_itself();
    let mut wakes = 0;
    while let Some(next) = shard.next_turn() {
        shard.turn(next);
        wakes += 1;
        assert!(wakes < 30 && !shard.is_behind());
    }
    assert!((20..24).contains(&wakes), "{wakes}");
}

/// The limit runs out right after the stop, while the driver brings what came meanwhile.
#[test]
fn limit_that_runs_out_behind_a_stop_waits_for_what_came_in_it() {
    let (mut shard, ids) = with_connections(
        2,
        Limits {
            first_frame_timeout: None,
            idle_timeout: Some(Duration::from_secs(30)),
            ..Limits::default()
        },
    );
    shard.begin(at(1), 0);
    ids.iter().for_each(|id| shard.receive(*id, &empty_frames(1)));
    shard.end();
    // Stopped until just before the limit, so that no timer is late.
    shard.turn(at(29));
    let mut now = at(30) + Duration::from_millis(950);
    shard.begin_late(now, 256);
    shard.end();
    for _ in 0..60 {
        now = now + Duration::from_millis(4);
        shard.begin_late(now, 256);
        shard.end();
    }
    assert!(ids.iter().all(|id| shard.shared(*id).is_some()), "what came is not read yet");
    shard.begin_late(now, 1);
    shard.receive(ids[0], &empty_frames(1));
    shard.end();
    shard.turn(at(35));
    assert!(shard.shared(ids[0]).is_some() && shard.shared(ids[1]).is_none());
}

#[test]
fn peer_whose_end_came_in_a_stop_is_closed_in_order() {
    let (mut shard, id) =
        with_connection(Limits { linger_timeout: Duration::from_secs(1), ..Limits::default() });
    shard.begin(at(1), 0);
    shard.finish(id, CloseReason::Closed);
    shard.complete(Completion::ShutDown { id });
    shard.end();
    shard.ops();
    shard.begin_late(at(31), 2);
    shard.receive(id, b"late");
    shard.complete(Completion::ReceiveEnded { id, end: crate::ReceiveEnd::Eof });
    shard.end();
    let ops = shard.ops();
    assert!(matches!(&ops[..], [Op::Close { how: CloseHow::Orderly, .. }]), "{ops:?}");
}
