//! Connections that begin with a PROXY header.

use super::*;
use crate::proxy::{CommandV2, Ends, HeaderError, HeaderRules, ProxyFacts, write_v1, write_v2};
use crate::{CloseReason, ReceiveEnd};

const BYTES_MAX: usize = 300;

/// The client, and the address that it connected to.
fn ends() -> Ends {
    Ends { source: ([192, 0, 2, 1], 56_324).into(), destination: ([198, 51, 100, 7], 443).into() }
}

fn proxy() -> SocketAddr {
    ([10, 0, 0, 2], 999).into()
}

fn line() -> Vec<u8> {
    let mut out = Vec::new();
    write_v1(&mut out, Some(ends()));
    out
}

fn block(command: CommandV2, fields: &[(u8, &[u8])]) -> Vec<u8> {
    let mut out = Vec::new();
    write_v2(&mut out, command, fields.iter().copied());
    out
}

/// A shard whose connections begin with a header.
fn expecting(limits: impl Into<Bounds>) -> Tested {
    let mut shard = Tested::new(limits, 8, 1);
    shard.expect_header(0, HeaderRules { bytes_max: BYTES_MAX, keeps_tlvs: true });
    shard.lane.awaits_header = true;
    shard
}

/// The same with one connection, which has sent nothing.
fn starting(limits: impl Into<Bounds>) -> (Tested, ConnId) {
    let mut shard = expecting(limits);
    shard.begin(Time::ZERO, 1);
    let id = come(&mut shard, 3);
    shard.end();
    (shard, id)
}

fn come(shard: &mut Tested, number: u64) -> ConnId {
    shard.complete(Completion::Accepted { listener: 0, socket: Socket(number), peer: Some(proxy()) });
    assert_eq!(shard.heard(), [Heard::Accepted(Socket(number))]);
    let receives = |op| if let Op::Receive { id } = op { Some(id) } else { None };
    shard.ops().into_iter().find_map(receives).expect("the header is received")
}

#[track_caller]
fn check_ended(shard: &mut Tested, id: ConnId, reason: CloseReason) {
    assert_eq!(shard.heard(), [Heard::Ended { id, reason, opened: false }]);
    assert_eq!((shard.held_bytes(), shard.counters(LaneId::FIRST).closed_for(reason)), (0, 1));
    shard.check();
}

#[test]
fn connection_behind_a_header_is_the_clients_in_any_split() {
    let header = block(CommandV2::Proxy(Some(ends())), &[(5, b"id")]);
    for header in [line(), header] {
        let bytes = [&header[..], &empty_frames(2)].concat();
        for first in 1..=bytes.len() {
            let (mut shard, id) = starting(Limits::default());
            shard.begin(at(1), 2);
            for piece in [&bytes[..first], &bytes[first..]] {
                if !piece.is_empty() {
                    shard.receive(id, piece);
                }
            }
            shard.end();
            let mut heard = shard.heard();
            heard.retain(|heard| !matches!(heard, Heard::Batch(_)));
            let proxied = Heard::Proxied(id, Some(ends().source));
            assert_eq!(heard, [proxied, Heard::Frame(id), Heard::Frame(id)], "{first} bytes first");
            let of = shard.shared(id).unwrap().proxied();
            assert_eq!(of, ProxyFacts { via: Some(proxy()), destination: Some(ends().destination) });
            assert_eq!(shard.held_bytes(), 0);
        }
    }
}

#[test]
fn header_that_comes_byte_by_byte_is_read() {
    let bytes = [&line()[..], &empty_frames(1)].concat();
    let (mut shard, id) = starting(Limits::default().inbox_bytes_high(1));
    for (turn, byte) in bytes.iter().enumerate() {
        shard.begin(Time::from_nanos(turn as u64 * 100_000_000), 1);
        shard.receive(id, &[*byte]);
        shard.end();
    }
    assert!(shard.heard().contains(&Heard::Frame(id)), "within 5 s");
    assert_eq!(shard.held_bytes(), 0);
}

#[test]
fn further_fields_are_kept_until_the_connection_ends() {
    let (mut shard, id) = starting(Limits::default());
    shard.begin(at(1), 1);
    shard.receive(id, &block(CommandV2::Proxy(Some(ends())), &[(5, b"id")]));
    shard.end();
    let shared = shard.shared(id).unwrap().clone();
    assert_eq!(shared.tlvs().unwrap().unique_id(), Some(&b"id"[..]));
    shard.abort(id, CloseReason::Aborted);
    shard.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Stopped });
    assert!(shared.tlvs().is_some(), "the service may look at them when it closes");
    shard.complete(Completion::Closed { id });
    assert_eq!((shared.tlvs(), shared.proxied()), (None, ProxyFacts::default()));
}

#[test]
fn proxy_that_speaks_for_itself_is_the_peer() {
    for header in [block(CommandV2::Local, &[]), b"PROXY UNKNOWN\r\n".to_vec()] {
        let (mut shard, id) = starting(Limits::default());
        shard.begin(at(1), 1);
        shard.receive(id, &header);
        assert_eq!(shard.heard(), [Heard::Proxied(id, Some(proxy()))]);
        assert_eq!(shard.shared(id).unwrap().proxied(), ProxyFacts::default());
    }
}

#[test]
fn frames_behind_a_header_wait_for_an_open_that_waits() {
    let (mut shard, id) = starting(Limits::default());
    shard.lane.parks_open = Some(100);
    shard.begin(at(1), 1);
    shard.receive(id, &[&line()[..], &empty_frames(1)].concat());
    shard.end();
    assert_eq!(shard.heard(), [Heard::Proxied(id, Some(ends().source))]);
    shard.begin(at(2), 0);
    shard.open_done(id, OPEN, 100);
    shard.opened(id);
    shard.shard.run_frames(id, &mut shard.lane);
    shard.end();
    assert_eq!(shard.heard(), [Heard::Batch(id), Heard::Frame(id)]);
}

#[test]
fn what_is_no_header_ends_its_connection() {
    let large = block(CommandV2::Proxy(None), &[(0xEA, &[0; BYTES_MAX])]);
    for (bytes, error) in [
        (&b"GET / HTTP/1.1\r\n"[..], HeaderError::NotProxy),
        (&large[..16], HeaderError::TooLarge { bytes: large.len() as u32, max: BYTES_MAX as u32 }),
    ] {
        let (mut shard, id) = starting(Limits::default());
        shard.begin(at(1), 2);
        shard.receive(id, &bytes[..1]);
        shard.receive(id, &bytes[1..]);
        shard.end();
        check_ended(&mut shard, id, CloseReason::ProxyBadHeader(error));
    }
}

#[test]
fn fin_before_the_first_byte_is_no_error_of_a_header() {
    for (bytes, reason) in [
        (0, CloseReason::ProxyNoHeader),
        (1, CloseReason::ProxyBadHeader(HeaderError::Unfinished)),
        (line().len() - 1, CloseReason::ProxyBadHeader(HeaderError::Unfinished)),
    ] {
        let (mut shard, id) = starting(Limits::default());
        shard.begin(at(1), 2);
        if bytes > 0 {
            shard.receive(id, &line()[..bytes]);
        }
        shard.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Eof });
        shard.end();
        check_ended(&mut shard, id, reason);
    }
}

#[test]
fn peer_that_resets_before_its_header_ends_by_that() {
    let (mut shard, id) = starting(Limits::default());
    shard.begin(at(1), 2);
    shard.receive(id, &line()[..9]);
    shard.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Error(104) });
    shard.end();
    check_ended(&mut shard, id, CloseReason::PeerReset);
}

#[test]
fn header_has_its_time_which_no_byte_prolongs() {
    let limits =
        Limits::default().idle_timeout(Duration::from_secs(1)).first_frame_timeout(Duration::from_secs(1));
    let without = limits.clone().proxy_header_timeout(None);
    for (limits, seconds) in [(limits, 5), (without, 10)] {
        let (mut shard, id) = starting(limits);
        for second in 1..seconds {
            shard.begin(at(second), 1);
            let next = second as usize - 1;
            shard.receive(id, &line()[next..=next]);
            shard.end();
        }
        assert_eq!(shard.heard(), [], "{seconds} s are not over");
        shard.turn(at(seconds + 1));
        check_ended(&mut shard, id, CloseReason::ProxyTimeout);
    }
}

#[test]
fn first_frame_has_its_time_from_the_header_on() {
    let limits = Limits::default().first_frame_timeout(Duration::from_secs(10));
    let (mut shard, id) = starting(limits);
    shard.begin(at(4), 1);
    shard.receive(id, &line());
    shard.end();
    shard.heard();
    shard.turn(at(13));
    assert_eq!(shard.heard(), []);
    shard.turn(at(15));
    assert_eq!(shard.heard(), [Heard::Ended { id, reason: CloseReason::FirstFrameTimeout, opened: true }]);
}

#[test]
fn accepting_pauses_while_as_many_begin_as_may() {
    let mut shard = expecting(ServerLimits::default().handshakes_max(2));
    shard.begin(Time::ZERO, 3);
    let (first, second) = (come(&mut shard, 1), come(&mut shard, 2));
    shard.complete(Completion::Accepted { listener: 0, socket: Socket(3), peer: Some(proxy()) });
    shard.end();
    assert_eq!(shard.heard(), [], "the third one waits");
    assert_eq!(shard.counters(LaneId::FIRST).accept_paused, 1);
    let soon = Time::ZERO + Duration::from_millis(500);
    shard.begin(soon, 1);
    shard.receive(first, &line());
    assert_eq!(shard.heard(), [Heard::Proxied(first, Some(ends().source)), Heard::Accepted(Socket(3))]);
    shard.end();
    shard.begin(soon, 1);
    shard.abort(second, CloseReason::Aborted);
    shard.complete(Completion::AcceptEnded { listener: 0, end: AcceptEnd::Stopped });
    shard.end();
    let accepts = |op: &Op| matches!(op, Op::Accept { listener: 0 });
    assert!(shard.ops().iter().any(accepts), "one of two is left");
    shard.check();
}

/// A shard with a listener that expects headers, two of which may be awaited, and a plain one. A
/// third connection came to the first.
fn crowded(silent: bool) -> (Tested, [ConnId; 2]) {
    let mut shard = Tested::new(ServerLimits::default().handshakes_max(2), 8, 2);
    shard.expect_header(0, HeaderRules { bytes_max: BYTES_MAX, keeps_tlvs: true });
    shard.lane.awaits_header = true;
    shard.begin(Time::ZERO, 3);
    let ids = [come(&mut shard, 1), come(&mut shard, 2)];
    if !silent {
        ids.into_iter().for_each(|id| shard.receive(id, &line()[..9]));
    }
    shard.complete(Completion::Accepted { listener: 0, socket: Socket(3), peer: Some(proxy()) });
    assert_eq!(shard.heard(), [], "the third one waits");
    shard.end();
    assert_eq!(shard.counters(LaneId::FIRST).accept_paused, 1);
    (shard, ids)
}

#[test]
fn listener_at_which_as_many_begin_as_may_is_paused_alone() {
    let (mut shard, _) = crowded(true);
    assert!(!shard.is_accept_paused(), "there is room for others");
    shard.lane.awaits_header = false;
    shard.begin(Time::ZERO, 1);
    shard.complete(Completion::Accepted { listener: 1, socket: Socket(4), peer: None });
    assert_eq!(shard.heard(), [Heard::Accepted(Socket(4))], "it does not wait behind the third one");
    shard.end();
    shard.check();
}

#[test]
fn silent_one_makes_room_sooner_than_one_that_spoke() {
    for (silent, seconds) in [(true, 1), (false, 3)] {
        let (mut shard, [first, _]) = crowded(silent);
        let reason = CloseReason::ProxyTimeout;
        shard.turn(at(seconds - 1) + Duration::from_millis(950));
        assert_eq!(shard.heard(), []);
        let next = shard.next_turn().expect("it is woken");
        assert!(next >= at(seconds) && next < at(seconds) + Duration::from_millis(50), "{next:?}");
        shard.turn(next);
        assert_eq!(shard.heard(), [], "what came at that moment is looked at first");
        shard.turn(next + Duration::from_millis(20));
        assert_eq!(
            shard.heard(),
            [Heard::Ended { id: first, reason, opened: false }, Heard::Accepted(Socket(3))]
        );
        assert_eq!(shard.counters(LaneId::FIRST).closed_for(reason), 1);
        assert!(!shard.ops().iter().any(|op| matches!(op, Op::Shutdown { .. })), "its place is free at once");
        shard.check();
    }
}

#[test]
fn silent_ones_do_not_keep_the_table_from_other_listeners() {
    let mut shard = Tested::new(ServerLimits::default(), 3, 2);
    shard.expect_header(0, HeaderRules { bytes_max: BYTES_MAX, keeps_tlvs: true });
    shard.lane.awaits_header = true;
    shard.begin(Time::ZERO, 4);
    let [first, second, _] = [1, 2, 3].map(|number| come(&mut shard, number));
    shard.lane.awaits_header = false;
    shard.complete(Completion::Accepted { listener: 1, socket: Socket(4), peer: None });
    shard.end();
    shard.turn(at(1));
    assert_eq!(shard.heard(), [], "the table is full");
    for turn in 0..3 {
        shard.turn(at(1) + Duration::from_millis(20 * (turn + 1)));
    }
    let ended = |id| Heard::Ended { id, reason: CloseReason::ProxyTimeout, opened: false };
    assert_eq!(shard.heard(), [ended(first)], "one for one");
    shard.begin(at(2), 2);
    shard.complete(Completion::ReceiveEnded { id: first, end: ReceiveEnd::Stopped });
    shard.complete(Completion::Closed { id: first });
    assert_eq!(shard.heard(), [Heard::Accepted(Socket(4)), ended(second)], "the next one has a place, too");
    shard.end();
    shard.check();
}

#[test]
fn silent_one_makes_room_where_the_largest_crowd_is_young() {
    let mut shard = Tested::new(ServerLimits::default(), 3, 3);
    for listener in 0..2 {
        shard.expect_header(listener, HeaderRules { bytes_max: BYTES_MAX, keeps_tlvs: true });
    }
    shard.lane.awaits_header = true;
    shard.begin(Time::ZERO, 1);
    let old = come(&mut shard, 1);
    shard.end();
    let later = at(1) + Duration::from_millis(500);
    shard.begin(later, 2);
    for number in [2, 3] {
        shard.complete(Completion::Accepted { listener: 1, socket: Socket(number), peer: Some(proxy()) });
        assert_eq!(shard.heard(), [Heard::Accepted(Socket(number))]);
    }
    shard.lane.awaits_header = false;
    shard.end();
    shard.begin(later, 1);
    shard.complete(Completion::Accepted { listener: 2, socket: Socket(4), peer: None });
    shard.end();
    for turn in 1..4 {
        shard.turn(later + Duration::from_millis(20 * turn));
    }
    let ended = Heard::Ended { id: old, reason: CloseReason::ProxyTimeout, opened: false };
    assert_eq!(shard.heard(), [ended], "the other listener's are young");
    shard.check();
}

#[test]
fn newcomers_for_which_others_go_keep_their_order() {
    let (mut shard, [first, second]) = crowded(true);
    shard.begin(Time::ZERO, 1);
    shard.complete(Completion::Accepted { listener: 0, socket: Socket(4), peer: Some(proxy()) });
    shard.end();
    shard.turn(at(2));
    shard.turn(at(2) + Duration::from_millis(20));
    let ended = |id| Heard::Ended { id, reason: CloseReason::ProxyTimeout, opened: false };
    let come = |number| Heard::Accepted(Socket(number));
    assert_eq!(shard.heard(), [ended(first), come(3), ended(second), come(4)], "one for one");
    shard.check();
}

#[test]
fn one_whose_bytes_may_wait_in_the_kernel_makes_no_room() {
    let (mut shard, [first, second]) = crowded(true);
    // The shard was away, and looks at bytes that came meanwhile.
    shard.begin_late(at(2), 2);
    shard.receive(first, &line()[..9]);
    shard.receive(second, &line()[..9]);
    shard.end();
    assert_eq!(shard.heard(), []);
    shard.turn(at(2) + Duration::from_millis(200));
    assert_eq!(shard.heard(), []);
    shard.check();
}

#[test]
fn time_of_those_that_begin_falls_where_there_are_many() {
    // With three of four it is half of the way from 6 s to 3 s.
    let limits = Limits::default().handshake_timeout(Duration::from_secs(6)).proxy_header_timeout(None);
    let mut shard = expecting((ServerLimits::default().handshakes_max(4), limits));
    shard.begin(Time::ZERO, 3);
    let [first, _, _] = [1, 2, 3].map(|number| come(&mut shard, number));
    shard.end();
    shard.turn(at(4));
    assert_eq!(shard.heard(), []);
    shard.turn(at(5));
    shard.turn(at(5) + Duration::from_millis(20));
    let reason = CloseReason::ProxyTimeout;
    assert_eq!(shard.heard(), [Heard::Ended { id: first, reason, opened: false }]);
    // Two of four have nearly the whole time again.
    shard.turn(at(5) + Duration::from_millis(800));
    assert_eq!(shard.heard(), []);
    shard.check();
}

#[test]
fn drain_closes_what_has_no_whole_header() {
    let (mut shard, id) = starting(Limits::default());
    shard.begin(at(1), 1);
    shard.receive(id, &line()[..9]);
    shard.end();
    shard.drain();
    for seconds in [2, 2, 2, 3] {
        shard.turn(at(seconds));
    }
    check_ended(&mut shard, id, CloseReason::Shutdown);
}

#[test]
fn header_that_is_there_when_a_drain_begins_is_answered() {
    let (mut shard, id) = starting(Limits::default());
    shard.begin(at(1), 0);
    shard.drain();
    shard.end();
    shard.begin(at(1), 1);
    shard.receive(id, &[&line()[..], &empty_frames(1)].concat());
    shard.end();
    let heard = shard.heard();
    assert_eq!((heard[0], shard.lane.told.len()), (Heard::Proxied(id, Some(ends().source)), 1));
    assert!(heard.contains(&Heard::Frame(id)));
}
