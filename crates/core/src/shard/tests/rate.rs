//! Peers that take sent bytes slowly, or not at all.

use super::*;

/// The batch that is sent to a connection.
fn sent_to(shard: &mut Tested, id: ConnId) -> Option<Box<Batch>> {
    shard.end();
    shard.ops().into_iter().fold(None, |found, op| match op {
        Op::Send { id: to, batch } if to == id => Some(batch),
        _ => found,
    })
}

/// Sends much to a peer that takes `takes` bytes in each interval in which the shard looks. Returns
/// the seconds after which it looked, and the reason and time of the connection's end, within five
/// minutes.
fn trickle(limits: Limits, mut takes: impl FnMut(usize) -> usize) -> (Vec<u64>, Option<(CloseReason, u64)>) {
    let (mut shard, id) = with_connection(limits);
    shard.shared(id).unwrap().write(&[b'r'; 1 << 20]);
    let mut batch = sent_to(&mut shard, id);
    let mut looks = Vec::new();
    for tenths in 1..3000 {
        let now = Time::ZERO + Duration::from_millis(100 * tenths);
        shard.turn(now);
        if !shard.take_ops().any(|op| matches!(op, Op::SendStop { .. })) {
            continue;
        }
        let mut stopped = batch.take().expect("a send is in flight");
        stopped.advance(takes(looks.len()));
        looks.push(tenths / 10);
        shard.complete(Completion::Sent { id, batch: stopped, end: SendEnd::Stopped });
        for heard in shard.heard() {
            if let Heard::Ended { reason, .. } = heard {
                return (looks, Some((reason, tenths / 10)));
            }
        }
        batch = sent_to(&mut shard, id);
    }
    (looks, None)
}

/// Limits under which only those of writing count.
fn write_limits(write_stalled: Option<u64>, write_bytes_per_second_min: usize) -> Limits {
    let write_stalled = write_stalled.map(Duration::from_secs);
    Limits {
        first_frame_timeout: None,
        idle_timeout: None,
        write_stall_timeout: write_stalled,
        write_bytes_per_second_min,
        ..Limits::default()
    }
}

#[test]
fn a_peer_that_takes_a_little_now_and_then_is_too_slow() {
    let limits = write_limits(Some(30), 240);
    // Each time just before it would be stalled.
    let (_, end) = trickle(limits.clone(), |look| if look % 3 == 2 { 1000 } else { 0 });
    assert_eq!(end, Some((CloseReason::WriteTooSlow, 30)));
    let (_, end) = trickle(limits.clone(), |_| 2300);
    assert_eq!(end, Some((CloseReason::WriteTooSlow, 10)));
    // Bytes that it took at first are no credit.
    let (_, end) = trickle(limits, |look| if look == 0 { 500_000 } else { 1 });
    assert_eq!(end, Some((CloseReason::WriteTooSlow, 20)));
}

#[test]
fn a_peer_that_takes_enough_stays_however_it_comes() {
    let (_, end) = trickle(write_limits(Some(30), 240), |_| 2500);
    assert_eq!(end, None);
    // A window that opens every 20 s.
    let (_, end) = trickle(write_limits(Some(30), 240), |look| if look % 2 == 1 { 5100 } else { 0 });
    assert_eq!(end, None);
    let (looks, end) = trickle(write_limits(Some(30), 0), |_| 1);
    assert_eq!((looks[0], end), (30, None), "without a rate a byte is enough");
}

#[test]
fn a_peer_that_takes_nothing_has_its_whole_time() {
    for stalled in [1, 7, 10, 11, 25, 30, 100] {
        let (looks, end) = trickle(write_limits(Some(stalled), 240), |_| 0);
        assert_eq!(looks.len() as u64, stalled.div_ceil(10), "looks of {stalled} s");
        let (reason, seconds) = end.expect("it ends");
        assert_eq!(reason, CloseReason::WriteStallTimeout);
        assert!((stalled..=stalled + 1).contains(&seconds), "{stalled} s took {seconds} s");
    }
    let (_, end) = trickle(write_limits(None, 240), |_| 0);
    assert_eq!(end, Some((CloseReason::WriteTooSlow, 10)));
    assert_eq!(trickle(write_limits(None, 0), |_| 0), (Vec::new(), None));
}

/// A shard with two connections that send much, the second one since 5 s after the first, whose
/// peer took 5000 bytes in 12 s. Returns the rest of the first one's send.
fn in_the_middle_of_two_sends(limits: Limits) -> (Tested, ConnId, Box<Batch>) {
    let (mut shard, ids) = with_connections(2, limits);
    shard.shared(ids[0]).unwrap().write(&[b'r'; 1 << 20]);
    let batch = sent_to(&mut shard, ids[0]).expect("it is sent");
    shard.turn(at(5));
    shard.shared(ids[1]).unwrap().write(&[b'r'; 1 << 20]);
    sent_to(&mut shard, ids[1]).expect("it is sent");
    shard.turn(at(12));
    assert!(is_stopped(&mut shard, ids[0]));
    let batch = looked(&mut shard, ids[0], batch, 5000).expect("it goes on");
    (shard, ids[0], batch)
}

fn is_stopped(shard: &mut Tested, of: ConnId) -> bool {
    shard.take_ops().any(|op| matches!(op, Op::SendStop { id } if id == of))
}

/// The rest of a send that was stopped, of which `bytes` were taken, if it goes on.
fn looked(shard: &mut Tested, id: ConnId, mut batch: Box<Batch>, bytes: usize) -> Option<Box<Batch>> {
    batch.advance(bytes);
    shard.complete(Completion::Sent { id, batch, end: SendEnd::Stopped });
    sent_to(shard, id)
}

#[test]
fn rate_of_a_send_begins_again_where_its_shard_was_away() {
    for (bytes, stays) in [(2500, true), (2000, false)] {
        let (mut shard, id, batch) = in_the_middle_of_two_sends(write_limits(Some(30), 240));
        shard.begin_late(at(72), 1);
        shard.end();
        assert!(!is_stopped(&mut shard, id), "it is looked at later");
        let mut tenths = 0;
        while !is_stopped(&mut shard, id) {
            tenths += 1;
            shard.turn(at(72) + Duration::from_millis(100 * tenths));
        }
        assert!((100..110).contains(&tenths), "{tenths}");
        assert_eq!(looked(&mut shard, id, batch, bytes).is_some(), stays, "of {bytes} bytes in 10 s");
    }
}

#[test]
fn look_that_a_late_shard_asked_for_at_a_send_costs_nothing() {
    let cases = [(0, Some(30)), (1, Some(30)), (1, None)];
    for ((bytes, stall_timeout), is_asked) in cases.into_iter().flat_map(|case| [(case, false), (case, true)])
    {
        let (mut shard, id, batch) = in_the_middle_of_two_sends(write_limits(stall_timeout, 240));
        if is_asked {
            shard.turn(at(23));
            assert!(is_stopped(&mut shard, id), "it is looked at before its shard is away");
        }
        shard.begin_late(at(72), 1);
        assert!(looked(&mut shard, id, batch, bytes).is_some(), "{bytes} bytes, limit {stall_timeout:?}");
    }
}

/// The time and reason of the end of a connection that `begins` sets up, within two minutes, on a
/// shard whose only news comes from another one: whenever it has slept for `gap`, and else together
/// with a timer, if not within a second. Its peer takes 10 bytes a second.
fn ends_beside_seldom_news(
    gap: Duration,
    begins: impl FnOnce(&mut Tested, ConnId),
) -> Option<(CloseReason, Duration)> {
    let limits = Limits { read_bytes_per_second_min: 240, ..write_limits(Some(30), 240) };
    let (mut shard, ids) = with_connections(2, limits);
    shard.begin_late(Time::ZERO, 0);
    begins(&mut shard, ids[0]);
    let mut batch = sent_to(&mut shard, ids[0]);
    let mut now = Time::ZERO;
    for _ in 0..1000 {
        let Wait::For(wait) = shard.wait() else { panic!("no limit is to come: {:?}", shard.wait()) };
        let has_news = wait > Duration::from_secs(1);
        now = now + if has_news { wait.min(gap) } else { wait };
        shard.begin_late(now, usize::from(has_news));
        if has_news {
            shard.receive(ids[1], &empty_frames(1));
        }
        shard.end();
        if is_stopped(&mut shard, ids[0]) {
            batch = looked(&mut shard, ids[0], batch.expect("a send is in flight"), 100);
        }
        for heard in shard.heard() {
            if let Heard::Ended { reason, .. } = heard {
                return Some((reason, now - Time::ZERO));
            }
        }
        if now > at(120) {
            return None;
        }
    }
    panic!("the shard never sleeps");
}

#[test]
fn slow_peers_are_closed_though_the_only_news_come_seldom() {
    for gap in [Duration::from_millis(1100), Duration::from_secs(3), Duration::MAX] {
        let writes = |shard: &mut Tested, id| shard.shared(id).unwrap().write(&[b'r'; 1 << 20]);
        let half_frame = |shard: &mut Tested, id| shard.receive_part(id, &[0, 0, 0, 9, b'h']);
        let ends = [
            (ends_beside_seldom_news(gap, writes), CloseReason::WriteTooSlow),
            (ends_beside_seldom_news(gap, half_frame), CloseReason::ReadTooSlow),
        ];
        for (end, why) in ends {
            let (reason, after) = end.unwrap_or_else(|| panic!("it stays, {why:?}, news after {gap:?}"));
            // A second window is judged, whatever the first one left open.
            assert!(reason == why && after < Duration::from_secs(22), "{reason:?} after {after:?}, {gap:?}");
        }
    }
}
