//! Time limits, from whenever the clock started.

use super::*;

/// Sends a reply of 100 bytes, behind which the peer is held back in the middle of a frame.
fn hold_back(shard: &mut Tested, id: ConnId) -> Box<Batch> {
    shard.begin_turn(at(1), 0);
    receive(shard, id, &[0, 0, 0, 9, b'h']);
    shard.block(id).unwrap().link.reply(Payload::Bytes(&[b'r'; 100]));
    shard.end_turn();
    let send =
        shard.take_ops().find_map(|op| if let Op::Send { batch, .. } = op { Some(batch) } else { None });
    shard.begin_turn(at(2), 0);
    receive(shard, id, b"a");
    shard.end_turn();
    send.expect("the reply is sent")
}

#[test]
fn who_waits_for_the_outbox_hears_of_a_send_that_was_stopped_and_goes_on() {
    let (mut shard, id) = with_connection(Limits {
        outbox_bytes_high: 10,
        outbox_bytes_low: 5,
        write_bytes_per_second_min: 0,
        ..Limits::default()
    });
    let mut batch = hold_back(&mut shard, id);
    shard.begin_turn(at(3), 0);
    batch.advance(batch.len() - 3);
    shard.complete(Completion::Sent { id, batch, end: SendEnd::Stopped });
    assert!(matches!(shard.next_event(), Some(Event::Frames(of)) if of == id));
    assert!(matches!(shard.next_frame(id), Next::Nothing));
    shard.end_turn();
    assert!(shard.take_ops().any(|op| matches!(op, Op::Send { batch, .. } if batch.len() == 3)));
}

#[test]
fn half_a_frame_is_watched_again_when_its_peer_is_no_longer_held_back() {
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
    // The limits of the half frame, and of a peer that is silent, go off and find that it is held back.
    for seconds in 3..40 {
        shard.begin_turn(at(seconds), 0);
        shard.end_turn();
    }
    shard.begin_turn(at(40), 0);
    batch.advance(batch.len());
    shard.complete(Completion::Sent { id, batch, end: SendEnd::Done });
    while let Some(event) = shard.next_event() {
        assert!(matches!(event, Event::Frames(of) if of == id));
        assert!(matches!(shard.next_frame(id), Next::Nothing));
    }
    shard.end_turn();
    let window = Duration::from_secs(10)..Duration::from_secs(11);
    let mut waited = Duration::ZERO;
    // The wheel may wake the shard on the way.
    while let Wait::For(time) = shard.wait()
        && shard.block(id).is_some()
        && waited < window.end
    {
        waited += time;
        shard.begin_turn(at(40) + waited, 0);
        shard.end_turn();
    }
    assert!(window.contains(&waited) && shard.block(id).is_none(), "closed after {waited:?}");
    assert_eq!(shard.counters().closed_for(crate::CloseReason::ReadTooSlow), 1);
}

/// Turns and time until the one connection is closed, on a shard whose first turn is at `start` and whose connection comes
/// `quiet` later.
fn lives_for(limits: Limits, start: Time, quiet: Duration) -> (u32, Duration) {
    let (pool, _side) = Pool::new(PoolConfig::default()).unwrap();
    let mut shard: Tested = Shard::new(limits, 1, 1, LengthPrefix::default(), pool, ());
    shard.begin_turn(start, 0);
    shard.end_turn();
    let opened = start + quiet;
    shard.begin_turn(opened, 0);
    shard.complete(Completion::Accepted { listener: 0, socket: Socket(3), peer: None });
    let Some(Event::Accepted { socket, .. }) = shard.next_event() else { panic!("a connection") };
    let id = shard.admit(socket, None, 0, ()).unwrap();
    shard.opened(id);
    let (mut now, mut turns) = (opened, 0);
    loop {
        shard.end_turn();
        let ops: Vec<Op> = shard.take_ops().collect();
        if shard.block(id).is_none() {
            return (turns, now - opened);
        }
        if ops.iter().any(|op| matches!(op, Op::ReceiveStop { .. } | Op::ShutdownInput { .. })) {
            shard.complete(Completion::ReceiveEnded { id, end: crate::ReceiveEnd::Stopped });
            continue;
        }
        let Wait::For(time) = shard.wait() else { panic!("it waits for a limit, not {:?}", shard.wait()) };
        (now, turns) = (now + time, turns + 1);
        shard.begin_turn(now, 0);
        while shard.next_event().is_some() {}
    }
}

#[test]
fn limits_are_kept_whenever_the_clock_started_and_however_long_it_was_quiet() {
    let none = Limits { first_frame_timeout: None, idle_timeout: None, ..Limits::default() };
    let minutes = |count: u64| Duration::from_secs(60 * count);
    let year = Duration::from_secs(365 * 24 * 3600);
    let cases = [
        (Limits { idle_timeout: Some(minutes(5)), ..none.clone() }, minutes(5)),
        (Limits { idle_timeout: Some(year), ..none.clone() }, year),
        (Limits { heartbeat_interval: Some(minutes(1)), ..none.clone() }, minutes(4)),
        (Limits { heartbeat_interval: Some(year), heartbeats_missed_max: 9, ..none.clone() }, year * 10),
        // As `Limits::check` would not let it be.
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
                // A look at its receive, the heartbeats, and the wheel may wake the shard once for each.
                assert!(turns <= 40, "{turns} turns, start {start:?}, {days} days, {time:?}");
            }
        }
    }
}

#[test]
fn connection_whose_bytes_wait_for_the_shard_is_not_idle() {
    let limits = Limits { idle_timeout: Some(Duration::from_secs(10)), ..Limits::default() };
    let (mut shard, ids) = with_connections(1, limits);
    let mut handed = Vec::new();
    // Beside the news of so many others it has a small batch.
    shard.begin_turn(at(1), 500);
    receive_later(&mut shard, ids[0], &empty_frames(40));
    assert_eq!(shard.take_frames(), Some(ids[0]));
    frames_of(&mut shard, ids[0], &mut handed);
    shard.end_turn();
    // The first of them looks at its receive.
    for seconds in [20, 60] {
        assert!(handed.len() < 40, "nothing waits");
        shard.begin_turn(at(seconds), 500);
        assert!(matches!(shard.next_event(), Some(Event::Frames(of)) if of == ids[0]));
        frames_of(&mut shard, ids[0], &mut handed);
        shard.end_turn();
        assert_eq!(shard.counters().closed_for(CloseReason::IdleTimeout), 0);
    }
    assert_eq!(handed.len(), 40);
    shard.begin_turn(at(61), 0);
    assert_eq!(shard.counters().closed_for(CloseReason::IdleTimeout), 1);
}

/// The turns of a shard with probes, as steps of its clock, and how many: for that many connections, all silent since the
/// first turn, behind these bytes.
fn probes(connections: u32, bytes: &[u8]) -> Vec<(u64, usize)> {
    let limits = Limits {
        first_frame_timeout: None,
        idle_timeout: None,
        read_bytes_per_second_min: 0,
        ..Limits::default()
    };
    let (pool, _side) = Pool::new(PoolConfig::default()).unwrap();
    let mut shard: Tested = Shard::new(limits, connections as usize, 1, LengthPrefix::default(), pool, ());
    shard.begin_turn(Time::ZERO, connections as usize);
    for number in 0..connections {
        shard.complete(Completion::Accepted { listener: 0, socket: Socket(number.into()), peer: None });
        let Some(Event::Accepted { socket, .. }) = shard.next_event() else { panic!("a connection") };
        let id = shard.admit(socket, None, 0, ()).unwrap();
        shard.opened(id);
        shard.complete(Completion::Received { id, lease: Lease::copy_of(bytes) });
        shard.take_frames();
        while let Next::Frame(..) = shard.next_frame(id) {}
    }
    shard.end_turn();
    shard.take_ops().for_each(drop);
    let mut now = Time::ZERO;
    let mut turns = Vec::new();
    while turns.iter().map(|(_, count)| count).sum::<usize>() < connections as usize {
        shard.begin_turn(now, 0);
        shard.end_turn();
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
