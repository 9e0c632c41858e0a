//! Peers and services that take too long.

use super::*;

#[test]
fn a_peer_that_does_not_say_what_it_speaks_is_closed() {
    let rig = Rig::start(HttpOptions::default().header_timeout(BRIEF));
    let mut silent = rig.client();
    let mut half = rig.client();
    half.write(&frames::PREFACE[..20]);
    assert_eq!((silent.end(), half.end()), (End::Fin, End::Fin));
    drop((silent, half));
    let report = ringserve_tests::finish(rig.running);
    assert_eq!(report.counters.closed_for(CloseReason::HandlerError), 0, "{:?}", report.counters);
}

#[test]
fn the_head_of_a_request_has_to_come_in_time() {
    let rig = Rig::start(HttpOptions::default().header_timeout(BRIEF));
    let mut client = rig.client();
    for _ in 0..3 {
        client.write(GET);
        assert_eq!(read_answer(&mut client).1, b"HTTP/1.1");
    }
    // Kept alive, and not used.
    assert_eq!(client.end(), End::Fin);
    let mut client = rig.client();
    client.write(&GET[..GET.len() - 1]);
    assert_eq!(client.end_after_all(), End::Fin);
    // A handler may take longer.
    let mut client = rig.client();
    client.write(b"GET /gate HTTP/1.1\r\nhost: x\r\n\r\n");
    rig.waits_inside(1);
    let mut other = rig.client();
    assert_eq!(other.end(), End::Fin);
    rig.gate.add_permits(1);
    assert_eq!(read_answer(&mut client).1, b"HTTP/1.1");
    drop((client, other));
    let report = ringserve_tests::finish(rig.running);
    assert_eq!(report.counters.closed_for(CloseReason::HandlerError), 0, "{:?}", report.counters);
}

const POST: &str = "HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n";

#[test]
fn dripping_request_body_is_answered_with_408() {
    let rig = Rig::start(brief_window());
    let mut neighbour = rig.client();
    let mut client = rig.client();
    client.write(format!("POST /read {POST}").as_bytes());
    let (answer, _) = drip(&mut client, b"x", BRIEF / 3);
    assert!(answer.starts_with(b"HTTP/1.1 408 "), "{}", String::from_utf8_lossy(&answer));
    watch::closed_for(&rig.running, CloseReason::ReadTooSlow, 1);
    assert_eq!(rig.handlers.inside.load(SeqCst), 0, "the service is dropped");
    neighbour.write(GET);
    assert_eq!(read_answer(&mut neighbour).1, b"HTTP/1.1");
    drop((client, neighbour));
    ringserve_tests::finish(rig.running);
}

#[test]
fn dripping_body_that_is_echoed_ends_its_connection() {
    let rig = Rig::start(brief_window());
    let mut client = rig.client();
    client.write(format!("POST /echo {POST}").as_bytes());
    // By a reset, or by FIN if the last byte was read before.
    let (answer, _) = drip(&mut client, b"x", BRIEF / 3);
    assert!(answer.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&answer));
    watch::closed_for(&rig.running, CloseReason::ReadTooSlow, 1);
    drop(client);
    ringserve_tests::finish(rig.running);
}

#[test]
fn slow_service_is_no_slow_body() {
    let rig = Rig::start(brief_window());
    let mut client = rig.client();
    let mut other = rig.client();
    // The body is there as a whole, and the service takes its time; on another connection it reads
    // nothing.
    client.write(b"POST /read HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello");
    other.write(b"POST /gate HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhell");
    rig.waits_inside(2);
    // Another peer's end shows that windows passed.
    let mut slow = rig.client();
    slow.write(format!("POST /read {POST}").as_bytes());
    assert!(slow.read_to_end().0.starts_with(b"HTTP/1.1 408 "));
    rig.gate.add_permits(2);
    assert_eq!(read_answer(&mut client).1, b"HTTP/1.1");
    assert_eq!(read_answer(&mut other).1, b"HTTP/1.1");
    drop((client, other, slow));
    ringserve_tests::finish(rig.running);
}

#[test]
fn response_that_is_taken_byte_by_byte_ends() {
    let rig = Rig::start(brief_window().body_bytes_per_second_min(64 << 20));
    let mut client = Client::with_small_window(rig.running.local_addrs()[0]);
    client.write(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n");
    // A little at a time, below the rate but never without a byte.
    let mut ended = false;
    for _ in 0..10_000 {
        let mut some = [0; 4096];
        match std::io::Read::read(&mut client.stream, &mut some) {
            Ok(0) | Err(_) => {
                ended = true;
                break;
            }
            Ok(_) => std::thread::park_timeout(Duration::from_millis(1)),
        }
    }
    assert!(ended, "it was sent whole");
    watch::closed_for(&rig.running, CloseReason::WriteTooSlow, 1);
    drop(client);
    ringserve_tests::finish(rig.running);
}

#[test]
fn late_service_is_answered_with_503() {
    let rig = Rig::start(HttpOptions::default().response_timeout(BRIEF));
    let mut client = rig.client();
    client.write(b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n");
    let (head, _) = read_answer(&mut client);
    assert!(head.starts_with("HTTP/1.1 503 ") && head.contains("connection: close\r\n"), "{head}");
    assert_eq!(client.end(), End::Fin);
    watch::closed_for(&rig.running, CloseReason::HandlerTimeout, 1);
    // A client that left with a FIN, which could be a half close.
    let mut client = rig.client();
    client.write(b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n");
    drop(client);
    watch::holds(&rig.running, 0);
    assert_eq!(rig.handlers.inside.load(SeqCst), 0);
    rig.with_http2(async |mut sender| {
        assert_eq!(sender.send_request(get("/never")).await.unwrap().status(), 503);
        assert_eq!(ask(&mut sender, "/").await, "HTTP/2.0");
    });
    // An HTTP/2 body that never comes.
    let mut client = rig.client();
    client.write(&[frames::PREFACE, frames::SETTINGS, &frames::request(1, false, "/read")].concat());
    rig.waits_inside(1);
    rig.waits_inside(0);
    drop(client);
    ringserve_tests::finish(rig.running);
}

#[test]
fn request_ends_in_time_whatever_it_waits_for() {
    let rig = Rig::start(HttpOptions::default().request_timeout(BRIEF));
    let mut client = rig.client();
    client.write(b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n");
    assert!(read_answer(&mut client).0.starts_with("HTTP/1.1 503 "));
    // The response began.
    let mut client = rig.client();
    client.write(format!("POST /echo {POST}hello").as_bytes());
    assert_eq!(client.end_after_all(), End::Reset);
    // With HTTP/2 only that stream ends.
    let mut client = rig.client();
    let data = frames::frame(0, 0, 1, b"hello");
    client.write(&[frames::PREFACE, frames::SETTINGS, &frames::request(1, false, "/echo"), &data].concat());
    assert_eq!(reset_stream(&mut client), 1);
    client.write(&frames::request(3, true, "/"));
    assert_eq!(answered_stream(&mut client), 3);
    drop(client);
    ringserve_tests::finish(rig.running);
}
