//! The end of a shard, and of a connection that lingers.

use super::*;
use crate::ReadRateAction;
use crate::proxy::HeaderRules;

#[test]
fn operation_that_never_ends_is_left_behind_in_time() {
    let (mut shard, id) = with_connection(Limits::default());
    shard.begin(at(1), 0);
    shard.abort_all();
    shard.end();
    assert_eq!(shard.heard(), [Heard::Ended { id, reason: CloseReason::ServerAborted, opened: true }]);
    let mut now = at(1);
    // The receive never ends, nor does the listener.
    for _ in 0..8 {
        assert!(!shard.is_done() && shard.left_behind() == 0);
        let Wait::For(time) = shard.wait() else { break };
        now = now + time;
        shard.turn(now);
        if shard.is_done() {
            break;
        }
    }
    assert!(shard.is_done() && (at(6)..at(7)).contains(&now), "{now:?}");
    assert_eq!(shard.left_behind(), 2);
}

#[test]
fn shard_that_stood_still_takes_what_its_driver_ended_meanwhile() {
    let (mut shard, id) = with_connection(Limits::default());
    shard.begin(at(1), 0);
    shard.abort_all();
    shard.end();
    // The machine slept, and everything awaited came meanwhile.
    let ends = [
        Completion::ReceiveEnded { id, end: crate::ReceiveEnd::Stopped },
        Completion::AcceptEnded { listener: 0, end: crate::AcceptEnd::Closed },
        Completion::Closed { id },
    ];
    let mut now = at(600);
    for completion in ends {
        assert!(!shard.is_done(), "given up, and {completion:?} was there");
        shard.begin(now, 1);
        shard.complete(completion);
        shard.end();
        now = now + Duration::from_millis(10);
    }
    assert!(shard.is_done());
    assert_eq!(shard.left_behind(), 0);
}

#[test]
fn delayed_drain_accepts_until_its_time_or_an_abort() {
    for aborted in [false, true] {
        let (mut shard, id) =
            with_connection(ServerLimits { drain_delay: Duration::from_secs(10), ..ServerLimits::default() });
        shard.begin(at(1), 0);
        shard.drain();
        shard.end();
        assert!(shard.all_share().is_draining() && !shard.has_stopped());
        assert_eq!(shard.take_ops().filter(|op| matches!(op, Op::StopListening { .. })).count(), 0);
        shard.begin(at(if aborted { 5 } else { 11 }), 0);
        if aborted {
            shard.abort_all();
        }
        assert!(shard.has_stopped() && shard.shared(id).is_none() == aborted);
        shard.end();
        assert_eq!(shard.take_ops().filter(|op| matches!(op, Op::StopListening { .. })).count(), 1);
    }
}

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Orders the shard to drain at the second `seconds`, and takes the turns that look for what had
/// arrived.
fn drain_at(shard: &mut Tested, seconds: u64) {
    shard.begin(at(seconds), 0);
    shard.drain();
    shard.end();
    while shard.wait() == Wait::No {
        shard.turn(at(seconds));
    }
}

/// The times at which connections end until the time `until`, in milliseconds since a drain at the
/// second `seconds`. The shard has a turn every 10 ms at most.
fn ends(shard: &mut Tested, seconds: u64, until: Duration) -> Vec<u128> {
    let (mut ends, mut now) = (Vec::new(), at(seconds));
    loop {
        let ended = shard.heard().iter().filter(|heard| matches!(heard, Heard::Ended { .. })).count();
        ends.extend(core::iter::repeat_n((now - at(seconds)).as_millis(), ended));
        match shard.wait() {
            Wait::No => {}
            Wait::For(time) if now + time <= at(seconds) + until => now = now + time.max(millis(10)),
            Wait::For(_) | Wait::Forever => return ends,
        }
        shard.turn(now);
    }
}

/// A shard with connections that all had a frame.
fn with_served_connections(count: usize, limits: impl Into<Bounds>) -> (Tested, Vec<ConnId>) {
    let (mut shard, ids) = with_connections(count, limits);
    shard.begin(Time::ZERO, count);
    ids.iter().for_each(|id| shard.receive(*id, &empty_frames(1)));
    shard.end();
    shard.heard();
    (shard, ids)
}

#[test]
fn ten_thousand_quiet_connections_leave_over_ten_seconds() {
    for (served, first) in [(true, 0), (false, 500)] {
        let limits = Limits::default();
        let (mut shard, _) =
            if served { with_served_connections(10_000, limits) } else { with_connections(10_000, limits) };
        drain_at(&mut shard, 5);
        let ends = ends(&mut shard, 5, millis(11_000));
        assert_eq!(ends.len(), 10_000);
        assert!((first..first + 20).contains(&ends[0]) && ends[9999] > first + 9900, "{ends:?}");
        for window in (0..11_000).step_by(100) {
            let gone = ends.iter().filter(|end| (window..window + 100).contains(*end)).count();
            assert!(gone <= 300, "{gone} connections end {window} ms after the order or up to 100 ms later");
        }
    }
}

#[test]
fn connections_leave_in_no_order_of_theirs() {
    let (mut shard, ids) = with_served_connections(100, Limits::default());
    drain_at(&mut shard, 5);
    let mut order = Vec::new();
    while order.len() < ids.len() {
        let Wait::For(time) = shard.wait() else { break };
        let now = shard.shard.now + time;
        shard.turn(now);
        order.extend(shard.heard().into_iter().filter_map(|heard| match heard {
            Heard::Ended { id, .. } => Some(id.slot()),
            _ => None,
        }));
    }
    let rising = order.windows(2).filter(|pair| pair[0] < pair[1]).count();
    assert!((25..75).contains(&rising), "{order:?}");
}

#[test]
fn few_connections_leave_at_once_and_all_do_without_a_spread() {
    for (count, spread, most) in
        [(5, None, 10), (1000, Some(Duration::ZERO), 0), (2, Some(millis(3000)), 1500)]
    {
        let server = ServerLimits::default().drain_spread(spread);
        let (mut shard, ids) = with_served_connections(count, server);
        drain_at(&mut shard, 5);
        let ends = ends(&mut shard, 5, millis(20_000));
        assert_eq!(ends.len(), ids.len());
        assert_eq!(*ends.last().unwrap(), most, "{count}, {spread:?}: {ends:?}");
    }
}

/// A call that came at the last moment has a second.
#[test]
fn last_connections_leave_before_the_drain_is_over() {
    for (seconds, most) in [(1, 500), (10, 9000)] {
        let time = Duration::from_secs(seconds);
        let (mut shard, ids) =
            with_served_connections(1000, ServerLimits::default().drain_timeout(time).drain_spread(time));
        drain_at(&mut shard, 5);
        let ends = ends(&mut shard, 5, time);
        assert_eq!(ends.len(), ids.len());
        assert!((most - 20..=most + 10).contains(ends.last().unwrap()), "{:?}", ends.last());
    }
}

/// Half a second, and then over at most half of the time of the drain.
#[test]
fn every_connection_leaves_within_the_time_of_the_drain() {
    for seconds in [1, 4] {
        let server = ServerLimits::default().drain_timeout(Duration::from_secs(seconds));
        let (mut shard, _) = with_connections(20_000, server);
        drain_at(&mut shard, 5);
        let ends = ends(&mut shard, 5, millis(seconds * 1000));
        assert_eq!(ends.len(), 20_000);
        assert!(*ends.last().unwrap() <= u128::from(500 + seconds * 500), "{:?}", ends.last());
        assert_eq!(shard.counters(LaneId::FIRST).closed_for(CloseReason::DrainTimeout), 0);
    }
}

#[test]
fn connections_of_other_shards_lengthen_the_spread() {
    let mut shard = Tested::new(Limits::default(), 3, 1);
    let quota = Arc::new(Quota::new(100));
    shard.share_quota(quota.clone());
    let mut other = Tested::new(Limits::default(), 3, 1);
    other.share_quota(quota);
    other.begin(Time::ZERO, 3);
    (0..3).for_each(|number| _ = accept(&mut other, number));
    shard.begin(Time::ZERO, 1);
    accept(&mut shard, 0);
    shard.end();
    drain_at(&mut shard, 5);
    assert_eq!(shard.drain_spread(), millis(4));
}

#[test]
fn service_that_waits_for_another_leaves_over_its_own_time() {
    let mut shard = Tested::new(Limits::default(), 2000, 1);
    let last = shard.add_inbound(Limits::default(), 1, encoding());
    shard.drain_lane_later(last);
    shard.begin(Time::ZERO, 1010);
    for number in 0..1010 {
        let listener = u16::from(number >= 10);
        shard.complete(Completion::Accepted { listener, socket: Socket(number), peer: None });
    }
    shard.end();
    drain_at(&mut shard, 5);
    assert_eq!(shard.drain_spread(), millis(10));
    shard.drain_lane(last);
    drain_at(&mut shard, 6);
    assert_eq!(shard.drain_spread(), millis(1000));
}

/// Its request comes before its moment, or with it.
#[test]
fn connection_is_served_until_its_moment_in_a_drain() {
    let server = ServerLimits::default().drain_spread(millis(2000));
    let (mut shard, ids) = with_served_connections(2, server);
    drain_at(&mut shard, 5);
    let stays = ids[usize::from(shard.shared(ids[0]).is_none())];
    shard.heard();
    shard.begin(at(5) + millis(900), 1);
    shard.receive(stays, &empty_frames(1));
    shard.end();
    assert_eq!(shard.handed(), [stays]);
    shard.begin(at(6), 1);
    shard.receive(stays, &empty_frames(1));
    shard.end();
    assert_eq!(shard.heard(), [Heard::Ended { id: stays, reason: CloseReason::Shutdown, opened: true }]);
}

/// Four frames more come than it may send, in the drain and before its moment.
#[test]
fn rate_of_a_peer_holds_until_its_moment_in_a_drain() {
    for (when_too_fast, handed) in [(ReadRateAction::HoldBack, 6), (ReadRateAction::Close, 2)] {
        let limits = Limits::default().read_frames_per_second_max(2).when_read_too_fast(when_too_fast);
        let server = ServerLimits::default().drain_spread(millis(400));
        let (mut shard, ids) = with_served_connections(2, (server, limits));
        drain_at(&mut shard, 5);
        let stays = ids[usize::from(shard.shared(ids[0]).is_none())];
        shard.heard();
        shard.begin(at(5) + millis(100), 1);
        shard.receive(stays, &empty_frames(6));
        shard.end();
        let frames = |shard: &mut Tested| {
            shard.heard().iter().filter(|heard| matches!(heard, Heard::Frame(_))).count()
        };
        let at_once = frames(&mut shard);
        let too_fast = shard.counters(LaneId::FIRST).closed_for(CloseReason::ReadTooFast);
        assert_eq!((at_once, too_fast), (2, u64::from(when_too_fast == ReadRateAction::Close)));
        for turn in 0..20 {
            shard.turn(at(5) + millis(200 + turn));
        }
        assert_eq!(at_once + frames(&mut shard), handed, "what came whole is answered");
    }
}

/// However long ago it was accepted: its first request may be on its way.
#[test]
fn connection_without_a_frame_has_half_a_second_to_ask() {
    for (after, is_answered) in [(0, true), (499, true), (501, false)] {
        let (mut shard, id) = with_connection(Limits::default());
        drain_at(&mut shard, 5);
        shard.begin(at(5) + millis(after), 1);
        shard.receive(id, &empty_frames(1));
        shard.end();
        assert_eq!(shard.heard().contains(&Heard::Frame(id)), is_answered, "{after} ms after the order");
        shard.turn(at(5) + millis(501));
        assert!(shard.shared(id).is_none());
    }
}

/// A header counts as a handshake.
#[test]
fn start_that_brought_a_byte_has_half_a_second_in_a_drain() {
    // Bytes at the start, whether the receive ended after them, seconds until the order, and
    // whether it may go on then.
    for (bytes, again, seconds, goes_on) in [
        (&b""[..], false, 2, false),
        (b"", false, 0, true),
        (b"PROXY TCP4 ", false, 2, true),
        (b"PROXY TCP4 ", true, 2, true),
    ] {
        let limits = Limits::default().proxy_header_timeout(None).handshake_timeout(None);
        let mut shard = Tested::new(limits, 1, 1);
        shard.lane.awaits_header = true;
        shard.expect_header(0, HeaderRules { bytes_max: 1000, keeps_tlvs: false });
        shard.begin(Time::ZERO, 1);
        let id = accept(&mut shard, 1);
        if !bytes.is_empty() {
            shard.receive_part(id, bytes);
        }
        if again {
            shard.complete(Completion::ReceiveEnded { id, end: crate::ReceiveEnd::Stopped });
        }
        shard.end();
        drain_at(&mut shard, seconds);
        shard.turn(at(seconds) + millis(499));
        assert_eq!(shard.shared(id).is_some(), goes_on, "{bytes:?}, accepted {seconds} s before");
        shard.turn(at(seconds) + millis(501));
        assert!(shard.shared(id).is_none());
    }
}

#[test]
fn peer_that_still_sends_when_its_time_is_over_is_reset() {
    for (still_sends, how) in [(false, CloseHow::Orderly), (true, CloseHow::Abort)] {
        let linger = Duration::from_secs(1);
        let (mut shard, id) = with_connection(Limits { linger_timeout: linger, ..Limits::default() });
        let turn = |shard: &mut Tested, seconds, completion: Option<Completion>| {
            shard.begin(at(seconds), 0);
            completion.into_iter().for_each(|completion| shard.complete(completion));
            shard.end();
            shard.ops()
        };
        shard.finish(id, CloseReason::Closed);
        assert!(matches!(turn(&mut shard, 1, None)[..], [Op::Shutdown { .. }]));
        turn(&mut shard, 1, Some(Completion::ShutDown { id }));
        // Within its time the peer may send what it likes.
        turn(
            &mut shard,
            1,
            Some(Completion::Received { id, lease: LeaseMut::try_copy_of(b"late").unwrap() }),
        );
        assert!(matches!(turn(&mut shard, 3, None)[..], [Op::ShutdownInput { .. }]));
        if still_sends {
            turn(
                &mut shard,
                3,
                Some(Completion::Received { id, lease: LeaseMut::try_copy_of(b"too late").unwrap() }),
            );
        }
        let ended = Completion::ReceiveEnded { id, end: crate::ReceiveEnd::Eof };
        let ops = turn(&mut shard, 3, Some(ended));
        assert!(matches!(&ops[..], [Op::Close { how: close, .. }] if *close == how), "{ops:?}");
    }
}

#[test]
fn every_connection_is_told_once_before_any_is_cut() {
    let (mut shard, ids) = with_connections(1100, Limits::default());
    // Long after they were accepted.
    shard.begin(at(5), 0);
    shard.drain();
    shard.end();
    let mut turns = 0;
    while shard.lane.told.len() < ids.len() {
        assert_eq!(shard.heard(), [], "cut before all were told");
        shard.turn(at(5));
        turns += 1;
        assert!(shard.lane.told.len() <= 512 * turns, "too many at once");
    }
    assert_eq!((turns, &shard.lane.told), (3, &ids));
    assert_eq!(ends(&mut shard, 5, millis(2000)).len(), ids.len());
    assert_eq!(shard.lane.told.len(), ids.len());
}

#[test]
fn connection_that_opens_in_a_drain_is_told_then() {
    let server = ServerLimits::default().drain_delay(Duration::from_secs(10));
    let mut shard = Tested::new(server, 3, 1);
    shard.begin(Time::ZERO, 2);
    let early = accept(&mut shard, 1);
    shard.lane.parks_open = Some(100);
    let waits = accept(&mut shard, 2);
    shard.drain();
    shard.end();
    shard.turn(at(1));
    assert_eq!(shard.lane.told, [early]);
    shard.begin(at(2), 1);
    shard.lane.parks_open = None;
    let late = accept(&mut shard, 3);
    shard.open_done(waits, OPEN, 100);
    shard.opened(waits);
    shard.end();
    assert_eq!(shard.lane.told, [early, late, waits]);
    shard.turn(at(3));
    assert_eq!(shard.lane.told.len(), 3);
}
