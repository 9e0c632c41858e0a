use super::*;
use std::string::ToString;

#[test]
fn the_defaults_hold_together() {
    assert_eq!(ServerLimits::default().check(), Ok(()));
    assert_eq!(ServerLimits::default().check_service(&Limits::default()), Ok(()));
}

#[test]
fn limits_fit_into_any_memory_and_contradict_each_other_in_none() {
    for shards in [0, 1, 2, 64, 1024] {
        for shift in 0..=64 {
            let bytes = 1u64.checked_shl(shift).unwrap_or(u64::MAX);
            let server = ServerLimits::default().fitted(bytes, shards);
            let limits = Limits::default().fitted(&server);
            assert_eq!(server.check(), Ok(()), "{bytes} bytes, {shards} shards");
            assert_eq!(server.check_service(&limits), Ok(()), "{bytes} bytes, {shards} shards");
            let least = (HELD_MIN + RECEIVE_BUFFERS_MIN * server.receive_buffer_bytes) * shards;
            let fits = server.memory_bytes(shards) <= bytes / 2 + least as u64;
            assert!(fits, "{bytes} bytes, {shards} shards: {server:?}");
        }
    }
    let server = ServerLimits::default();
    assert_eq!(server.clone().fitted(64 << 30, 2), server);
    assert_eq!(Limits::default().fitted(&server), Limits::default());
    let own = ServerLimits { held_bytes_max: 1 << 20, ..server };
    assert_eq!(own.fitted(64 << 30, 2).held_bytes_max, 1 << 20, "no limit is raised");
}

#[test]
fn a_server_has_room_for_what_one_connection_may_hold() {
    let little = ServerLimits { held_bytes_max: 1 << 20, ..ServerLimits::default() };
    let error = little.check_service(&Limits::default()).unwrap_err().to_string();
    assert!(
        error.starts_with("Limits::outbox_bytes_max is 67108864 and ServerLimits::held_bytes_max is 1048576"),
        "{error}"
    );
    assert_eq!(little.with_room_for(&Limits::default()).check_service(&Limits::default()), Ok(()));
}

#[test]
fn a_contradiction_names_both_limits() {
    let limits = Limits { outbox_bytes_low: 10, outbox_bytes_high: 5, ..Limits::default() };
    let text = limits.check().unwrap_err().to_string();
    assert!(text.starts_with("Limits::outbox_bytes_low is 10 and Limits::outbox_bytes_high is 5"), "{text}");
}

#[test]
fn a_value_out_of_range_is_named_with_its_range() {
    let limits = Limits { first_frame_timeout: Some(Duration::ZERO), ..Limits::default() };
    assert!(
        limits
            .check()
            .unwrap_err()
            .to_string()
            .starts_with("Limits::first_frame_timeout is 0 s; it must be 17ms to")
    );
    let limits = Limits::default().proxy_header_timeout(Duration::from_secs(2));
    assert!(
        limits
            .check()
            .unwrap_err()
            .to_string()
            .starts_with("Limits::proxy_header_timeout is 2s; it must be 3s to 365 days, or None")
    );
    let limits = Limits::default().handshake_timeout(Duration::from_secs(4));
    let text = limits.check().unwrap_err().to_string();
    assert!(
        text.starts_with("Limits::proxy_header_timeout is 5s and Limits::handshake_timeout is 4s"),
        "{text}"
    );
    let limits = ServerLimits { handshakes_max: 0, ..ServerLimits::default() };
    assert!(limits.check().is_err());
    let limits = ServerLimits { receive_bytes_max: 1, ..ServerLimits::default() };
    assert!(limits.check().is_err());
    let limits = ServerLimits { drain_delay: Duration::MAX, ..ServerLimits::default() };
    assert!(limits.check().unwrap_err().to_string().starts_with("ServerLimits::drain_delay is "));
    let limits = ServerLimits::default().drain_spread(Duration::from_secs(26));
    let text = limits.check().unwrap_err().to_string();
    assert!(
        text.starts_with("ServerLimits::drain_spread is 26s and ServerLimits::drain_timeout is 25s"),
        "{text}"
    );
    assert_eq!(ServerLimits::default().drain_spread(Duration::from_secs(25)).check(), Ok(()));
}

#[test]
fn rates_of_a_peer_are_in_range_and_not_below_what_it_owes() {
    let text = |limits: Limits| limits.check().unwrap_err().to_string();
    let limits = Limits::default;
    assert!(text(limits().read_frames_per_second_max(1_000_001)).contains("it must be 0 to 1000000"));
    assert!(
        text(limits().read_bytes_per_second_max((1 << 30) + 1))
            .starts_with("Limits::read_bytes_per_second_max is")
    );
    let slower = text(limits().read_bytes_per_second_max(239));
    assert!(
        slower.starts_with(
            "Limits::read_bytes_per_second_min is 240 and Limits::read_bytes_per_second_max is 239"
        ),
        "{slower}"
    );
    assert_eq!(limits().read_bytes_per_second_max(240).read_frames_per_second_max(1).check(), Ok(()));
    let own =
        ConnLimits::default().read_frames_per_second_max(7).over(&limits().read_bytes_per_second_max(500));
    assert_eq!((own.read_frames_per_second_max, own.read_bytes_per_second_max), (7, 500));
}
