//! Connections from the accept to the service's open.

use super::*;
use crate::proxy::{Ends, HeaderRules, write_v1};

#[test]
fn service_is_asked_behind_the_handshake_and_frames_follow() {
    for step in [1, 3, 1000] {
        let (mut shard, id) = starting(Limits::default(), TOY);
        let mut peer = Peer::default();
        // Application data in the segment of the last flight.
        let bytes = [peer.flights(), peer.frame(b"early"), peer.frame(b"too")].concat();
        shard.begin(at(1), 9);
        for piece in bytes.chunks(step) {
            shard.receive(id, piece);
        }
        shard.end();
        assert_eq!((shard.heard(), taken(&mut shard).len()), (vec![], 0), "the step waits");
        assert_eq!((stats(&shard).handshakes_waiting, shard.wait()), (1, Wait::No));
        shard.turn(at(1));
        assert_eq!(shard.lane.heard[0], Heard::Secured(id));
        assert_eq!(taken(&mut shard), [&b"early"[..], b"too"]);
        let shared = shard.shared(id).unwrap().clone();
        assert_eq!(shared.transport_info().unwrap().downcast_ref(), Some(&"toy"));
        let of = stats(&shard);
        assert_eq!((of.handshakes_started, of.handshakes_done, of.handshakes_waiting), (1, 1, 0));
        assert_eq!(leave(&mut shard, id, &mut peer).0, [Said::Other(HELLO), Said::Other(FINISHED)]);
        assert_eq!(shard.held_bytes(), 0);
        shard.abort(id, CloseReason::Aborted);
        shard.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Stopped });
        assert!(shared.transport_info().is_some(), "the service may look at them when it closes");
        shard.complete(Completion::Closed { id });
        assert!(shared.transport_info().is_none());
    }
}

#[test]
fn facts_on_demand_are_made_when_they_are_asked_for() {
    let (mut shard, early) = starting(Limits::default(), Toy { makes_facts: true, ..TOY });
    let stranger = shard.shared(early).unwrap().clone();
    assert!(stranger.transport_info().is_none(), "its handshake is not done");
    shard.abort(early, CloseReason::Aborted);
    shard.complete(Completion::ReceiveEnded { id: early, end: ReceiveEnd::Stopped });
    shard.complete(Completion::Closed { id: early });
    shard.heard();
    shard.begin(at(1), 1);
    let id = accept(&mut shard, 4);
    shard.receive(id, &Peer::default().flights());
    shard.end();
    shard.turn(at(1));
    let made =
        |outlet: &crate::Outlet| outlet.transport_info().map(|facts| *facts.downcast_ref::<u32>().unwrap());
    let shared = shard.shared(id).unwrap().clone();
    // The first facts asked for are the service's.
    assert_eq!((made(&shared), made(&shared)), (Some(1), Some(2)));
    assert_eq!((id.slot(), made(&stranger)), (early.slot(), None), "they are of another connection");
    shard.abort(id, CloseReason::Aborted);
    assert_eq!((made(&shared), made(&shared)), (Some(3), Some(3)), "the last of a channel that is gone");
    assert_eq!(shard.shard.shared.channels().count(), 0);
}

#[test]
fn what_a_handshake_keeps_counts_as_held_until_the_end() {
    let limits = (ServerLimits { held_bytes_max: 100_000, ..ServerLimits::default() }, Limits::default());
    let mut shard = secured(limits, Toy { kept_bytes: 30_000, ..TOY });
    let (mut ids, mut over) = (Vec::new(), Vec::new());
    for n in 1..=4_u64 {
        shard.begin(at(n), 1);
        let id = accept(&mut shard, n);
        shard.receive(id, &Peer::default().flights());
        shard.end();
        shard.turn(at(n));
        // The replies of the handshake are sent.
        leave(&mut shard, id, &mut Peer::default());
        shard.check();
        ids.push(id);
        over.extend(shard.heard().into_iter().filter_map(|heard| match heard {
            Heard::Ended { id, reason, .. } => Some((id, reason)),
            _ => None,
        }));
    }
    assert_eq!(over, [(ids[0], CloseReason::MemoryLimit)], "it held as much for longest");
    assert_eq!((shard.held_bytes(), shard.held_bytes_of(ids[1], 0)), (90_000, 30_000));
    for id in &ids[1..] {
        shard.begin(at(5), 0);
        shard.abort(*id, CloseReason::Aborted);
        shard.end();
        shard.check();
    }
    assert_eq!(shard.held_bytes(), 0);
}

#[test]
fn frames_wait_for_an_open_that_waits() {
    let (mut shard, id) = starting(Limits::default(), TOY);
    let mut peer = Peer::default();
    shard.lane.parks_open = Some(100);
    shard.begin(at(1), 1);
    shard.receive(id, &[peer.flights(), peer.frame(b"early")].concat());
    shard.end();
    shard.turn(at(1));
    assert_eq!((shard.heard(), taken(&mut shard).len()), (vec![Heard::Secured(id)], 0));
    shard.begin(at(2), 0);
    shard.open_done(id, OPEN, 100);
    shard.opened(id);
    shard.shard.run_frames(id, &mut shard.lane);
    shard.end();
    assert_eq!(taken(&mut shard), [b"early"]);
}

#[test]
fn server_that_speaks_first_does() {
    let (mut shard, id) = starting(Limits::default(), Toy { greets: true, ..TOY });
    assert_eq!(leave(&mut shard, id, &mut Peer::default()).0, [Said::Other(HELLO)]);
}

#[test]
fn handshake_follows_a_header_in_its_segment() {
    let ends = Ends { source: ([192, 0, 2, 1], 1).into(), destination: ([198, 51, 100, 7], 443).into() };
    let mut header = Vec::new();
    write_v1(&mut header, Some(ends));
    let mut shard = secured(Limits::default(), TOY);
    shard.expect_header(0, HeaderRules { bytes_max: 300, keeps_tlvs: false });
    shard.lane.awaits_header = true;
    shard.begin(Time::ZERO, 1);
    shard.complete(Completion::Accepted { listener: 0, socket: Socket(1), peer: None });
    let receives = |op| if let Op::Receive { id } = op { Some(id) } else { None };
    let id = shard.ops().into_iter().find_map(receives).unwrap();
    shard.end();
    shard.heard();
    let mut peer = Peer::default();
    shard.begin(at(4), 1);
    shard.receive(id, &[header, peer.flights(), peer.frame(b"early")].concat());
    shard.end();
    assert_eq!(shard.heard(), [Heard::Proxied(id, Some(ends.source))]);
    shard.turn(at(4));
    assert_eq!((shard.heard()[0], taken(&mut shard)), (Heard::Secured(id), vec![b"early".to_vec()]));
}

/// The header is no part of the handshake, whose peer may answer only now.
#[test]
fn handshake_behind_a_header_is_as_old_as_itself() {
    let mut header = Vec::new();
    write_v1(&mut header, None);
    let mut shard = secured(ServerLimits::default().handshakes_max(2), TOY);
    shard.expect_header(0, HeaderRules { bytes_max: 300, keeps_tlvs: false });
    shard.lane.awaits_header = true;
    let tenths = |tenths: u64| Time::ZERO + Duration::from_millis(100 * tenths);
    let ids = [0, 7].map(|tenth| {
        shard.begin(tenths(tenth), 1);
        shard.complete(Completion::Accepted { listener: 0, socket: Socket(tenth), peer: None });
        let receives = |op| if let Op::Receive { id } = op { Some(id) } else { None };
        let id = shard.ops().into_iter().find_map(receives).unwrap();
        shard.end();
        id
    });
    shard.begin(tenths(8), 1);
    shard.receive(ids[0], &header);
    shard.end();
    shard.begin(tenths(9), 2);
    for socket in [20, 21] {
        shard.complete(Completion::Accepted { listener: 0, socket: Socket(socket), peer: None });
    }
    shard.end();
    shard.heard();
    for tenth in 10..17 {
        shard.turn(tenths(tenth));
        assert_eq!(shard.heard(), [], "after {tenth} tenths of a second");
    }
    (17..21).for_each(|tenth| shard.turn(tenths(tenth)));
    let ended = |heard: &Heard| if let Heard::Ended { id, .. } = heard { Some(*id) } else { None };
    let order: Vec<_> = shard.heard().iter().filter_map(ended).collect();
    assert_eq!(order, [ids[1], ids[0]], "the header that was awaited later is older");
    shard.check();
}

#[test]
fn handshake_has_its_time_from_being_accepted() {
    let limits =
        Limits::default().idle_timeout(Duration::from_secs(1)).first_frame_timeout(Duration::from_secs(1));
    let (mut shard, id) = starting(limits, TOY);
    let hello = Peer::default().record(HELLO, b"hello and more");
    for second in 1..10 {
        shard.begin(at(second), 1);
        shard.receive(id, &hello[second as usize..][..1]);
        shard.end();
    }
    assert_eq!(shard.heard(), [], "no byte ends it, none prolongs it");
    shard.turn(at(11));
    let reason = CloseReason::HandshakeTimeout;
    assert_eq!(shard.heard(), [Heard::Ended { id, reason, opened: false }]);
    assert_eq!((stats(&shard).handshakes_timed_out, shard.held_bytes()), (1, 0));
}

#[test]
fn first_frame_has_its_time_from_the_handshake_on() {
    let limits = Limits::default().first_frame_timeout(Duration::from_secs(10));
    let (mut shard, id) = starting(limits, TOY);
    shard.begin(at(8), 1);
    shard.receive(id, &Peer::default().flights());
    shard.end();
    shard.turn(at(8));
    leave(&mut shard, id, &mut Peer::default());
    shard.turn(at(17));
    assert_eq!(shard.heard(), [Heard::Secured(id)]);
    shard.turn(at(19));
    leave(&mut shard, id, &mut Peer::default());
    shard.dispatch();
    let reason = CloseReason::FirstFrameTimeout;
    assert_eq!(shard.heard(), [Heard::Ended { id, reason, opened: true }]);
}

#[test]
fn peer_that_sends_too_much_during_its_handshake_is_closed() {
    let (mut shard, id) = starting(Limits::default(), TOY);
    let mut peer = Peer::default();
    shard.begin(at(1), 4);
    for _ in 0..3 {
        shard.receive(id, &peer.record(PADDING, &[7; 19_000]));
    }
    assert_eq!(shard.heard(), []);
    shard.receive(id, &peer.record(PADDING, &[7; 19_000]));
    shard.end();
    let error = crate::framing::FrameError::TooLarge { bytes: 76_020, max: 65_536 };
    let reason = CloseReason::BadFrame(error);
    assert_eq!(shard.heard(), [Heard::Ended { id, reason, opened: false }]);
    assert_eq!((stats(&shard).handshakes_failed, shard.held_bytes()), (1, 0));
}

#[test]
fn peer_that_speaks_behind_its_last_flight_is_only_paused() {
    let (mut shard, id) = starting(Limits::default(), TOY);
    let mut peer = Peer::default();
    shard.begin(at(1), 5);
    shard.receive(id, &peer.flights());
    for _ in 0..4 {
        shard.receive(id, &peer.frame(&[7; 19_000]));
    }
    shard.end();
    assert_eq!((shard.heard(), taken(&mut shard).len(), stats(&shard).receives_paused), (vec![], 0, 1));
    shard.turn(at(1));
    assert_eq!(taken(&mut shard), vec![[7; 19_000]; 4]);
    shard.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Stopped });
    let (_, ops) = leave(&mut shard, id, &mut peer);
    assert!(matches!(ops[..], [.., Op::Receive { .. }]), "{ops:?}");
}

#[test]
fn step_of_a_connection_that_ended_does_not_wait() {
    let (mut shard, id) = starting(Limits::default(), TOY);
    shard.begin(at(1), 1);
    shard.receive(id, &Peer::default().flights());
    shard.abort(id, CloseReason::Aborted);
    shard.end();
    assert_eq!((stats(&shard).handshakes_failed, stats(&shard).handshakes_waiting), (1, 0));
    shard.turn(at(1));
    shard.check();
}

#[test]
fn busy_turn_makes_one_step_and_a_free_one_eight() {
    let mut shard = secured(Limits::default(), TOY);
    shard.begin(Time::ZERO, 40);
    let ids: Vec<ConnId> = (0..20).map(|number| accept(&mut shard, number)).collect();
    for id in &ids {
        shard.receive(*id, &Peer::default().flights());
    }
    shard.end();
    assert_eq!((shard.heard(), stats(&shard).handshakes_waiting), (vec![], 20));
    let secured = |shard: &mut Tested| -> Vec<Heard> { shard.heard() };
    for id in &ids[..2] {
        // A completion of another connection.
        shard.begin(at(1), 1);
        shard.end();
        assert_eq!(secured(&mut shard), [Heard::Secured(*id)], "first in, first out");
    }
    // The place of one that ended goes to the next.
    shard.abort(ids[3], CloseReason::Aborted);
    shard.dispatch();
    shard.heard();
    shard.turn(at(2));
    let next: Vec<Heard> =
        ids[2..11].iter().filter(|id| **id != ids[3]).map(|id| Heard::Secured(*id)).collect();
    assert_eq!(secured(&mut shard), next);
    assert_eq!((stats(&shard).handshakes_waiting, shard.wait()), (9, Wait::No));
    shard.bound_handshakes(3, 4);
    shard.turn(at(2));
    assert_eq!(secured(&mut shard).len(), 4);
    shard.turn(at(2));
    shard.begin(at(2), 1);
    shard.end();
    assert_eq!((secured(&mut shard).len(), stats(&shard).handshakes_waiting), (5, 0));
    assert_eq!(stats(&shard).handshakes_done, 19);
    assert!(shard.wait() != Wait::No);
    shard.check();
}

#[test]
fn accepting_pauses_while_as_many_handshakes_go_on_as_may() {
    let mut shard = secured(ServerLimits::default().handshakes_max(2), TOY);
    shard.begin(Time::ZERO, 3);
    let (first, _second) = (accept(&mut shard, 1), accept(&mut shard, 2));
    shard.complete(Completion::Accepted { listener: 0, socket: Socket(3), peer: None });
    shard.receive(first, &Peer::default().flights());
    shard.end();
    assert_eq!((shard.heard(), stats(&shard).accept_paused), (vec![], 1), "the third one waits");
    shard.turn(Time::ZERO);
    assert_eq!(shard.heard(), [Heard::Secured(first), Heard::Accepted(Socket(3))]);
    shard.check();
}

#[test]
fn handshake_whose_step_waits_for_the_shard_makes_no_room() {
    let mut shard = secured(ServerLimits::default().handshakes_max(5), TOY);
    shard.begin(Time::ZERO, 4);
    let ids = [1, 2, 3, 4].map(|number| accept(&mut shard, number));
    shard.end();
    shard.begin(at(4), 4);
    ids.into_iter().for_each(|id| shard.receive(id, &Peer::default().flights()));
    shard.end();
    // One step in each of two turns, while two new connections come in each.
    for (tenth, newcomers) in [(1, [5, 6]), (2, [7, 8])] {
        shard.begin(at(4) + Duration::from_millis(100 * tenth), 2);
        for number in newcomers {
            shard.complete(Completion::Accepted { listener: 0, socket: Socket(number), peer: None });
        }
        shard.end();
    }
    let heard = shard.heard();
    assert!(!heard.iter().any(|heard| matches!(heard, Heard::Ended { .. })), "{heard:?}");
    assert_eq!((stats(&shard).handshakes_done, shard.newcomers()), (2, 1), "the last one waits");
    shard.check();
}

#[test]
fn what_is_no_handshake_is_told_so_before_the_close() {
    let (mut shard, id) = starting(Limits::default(), TOY);
    let mut peer = Peer::default();
    shard.begin(at(1), 1);
    shard.receive(id, &peer.record(DATA, b"GET / HTTP/1.1"));
    shard.end();
    let (said, ops) = leave(&mut shard, id, &mut peer);
    assert_eq!(said, [Said::Other(ALERT)]);
    assert!(matches!(ops[..], [Op::Shutdown { .. }]), "no reset, which eats the alert: {ops:?}");
    let reason = CloseReason::TlsHandshakeFailed(40);
    assert_eq!(shard.heard(), [Heard::Ended { id, reason, opened: false }]);
    assert_eq!((stats(&shard).handshakes_failed, shard.held_bytes()), (1, 0));
}

#[test]
fn fin_in_a_handshake_ends_it_by_what_came_before() {
    let flights = Peer::default().flights();
    for (bytes, reason) in [(0, CloseReason::PeerClosed), (7, CloseReason::PeerClosedMidFrame)] {
        let (mut shard, id) = starting(Limits::default(), TOY);
        shard.begin(at(1), 2);
        if bytes > 0 {
            shard.receive(id, &flights[..bytes]);
        }
        shard.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Eof });
        shard.end();
        assert_eq!(shard.heard(), [Heard::Ended { id, reason, opened: false }]);
        assert_eq!(stats(&shard).handshakes_failed, 1);
        shard.check();
    }
}

#[test]
fn peer_that_says_all_at_once_is_answered() {
    let (mut shard, id) = starting(Limits::default(), TOY);
    let mut peer = Peer::default();
    shard.lane.parks = Some(0);
    shard.begin(at(1), 2);
    let all = [peer.flights(), peer.frame(b"request"), peer.record(CLOSE, b"")];
    shard.receive(id, &all.concat());
    shard.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Eof });
    shard.end();
    assert_eq!(shard.heard(), []);
    shard.turn(at(1));
    assert_eq!(taken(&mut shard), [b"request"]);
    assert_eq!(shard.heard(), [Heard::Secured(id)]);
    shard.shared(id).unwrap().reply(b"reply"[..].into());
    shard.call_done();
    shard.turn(at(1));
    let (said, _) = leave(&mut shard, id, &mut peer);
    assert_eq!(said[2..], [Said::Data(wire(b"reply")), Said::Other(CLOSE)]);
    shard.dispatch();
    let reason = CloseReason::PeerClosed;
    assert_eq!(shard.heard().last(), Some(&Heard::Ended { id, reason, opened: true }));
}

#[test]
fn drain_closes_what_is_in_its_handshake() {
    let (mut shard, id, mut peer) = ready(Limits::default());
    shard.begin(at(1), 1);
    let second = accept(&mut shard, 9);
    shard.receive(second, &Peer::default().flights()[..9]);
    shard.end();
    shard.drain();
    for turn in 0..60 {
        shard.turn(at(2) + Duration::from_millis(turn * 10));
        leave(&mut shard, id, &mut peer);
    }
    let ended = shard.heard();
    let reason = CloseReason::Shutdown;
    assert!(ended.contains(&Heard::Ended { id: second, reason, opened: false }), "{ended:?}");
    assert!(ended.contains(&Heard::Ended { id, reason, opened: true }), "{ended:?}");
    shard.check();
}

#[test]
fn work_behind_the_handshake_keeps_the_order_of_records() {
    let (mut shard, id, mut peer) = ready(Limits::default());
    shard.begin(at(2), 1);
    shard.receive(id, &[peer.frame(b"before"), peer.record(THINK, b""), peer.frame(b"behind")].concat());
    shard.receive(id, &peer.frame(b"later"));
    shard.end();
    assert_eq!(taken(&mut shard), [b"before"]);
    shard.turn(at(2));
    assert_eq!(taken(&mut shard), [&b"behind"[..], b"later"]);
    assert_eq!(leave(&mut shard, id, &mut peer).0, [Said::Other(THINK)]);
    assert_eq!(shard.held_bytes(), 0);
    // And FIN does not overtake it.
    shard.begin(at(2), 2);
    shard.receive(id, &[peer.record(THINK, b""), peer.frame(b"last")].concat());
    shard.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Eof });
    shard.end();
    assert_eq!((taken(&mut shard).len(), shard.heard()), (0, vec![]));
    shard.turn(at(2));
    assert_eq!(taken(&mut shard), [b"last"]);
    leave(&mut shard, id, &mut peer);
    let reason = CloseReason::PeerClosed;
    assert_eq!(shard.heard(), [Heard::Ended { id, reason, opened: true }]);
}
