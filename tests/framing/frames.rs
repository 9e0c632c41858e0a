//! Frames of every size and shape, and bytes that are no frame.

use std::sync::atomic::Ordering::SeqCst;
use std::thread;

use ringserve::CloseReason;
use ringserve::framing::{FrameError, LengthPrefix, Lines};
use ringserve_tests::client::{End, frame, frames};
use ringserve_tests::{Client, Lab, On, SOON, eventually, no_time_limits, order, pattern};

const TOO_LARGE: CloseReason = CloseReason::BadFrame(FrameError::TooLarge { bytes: 0, max: 0 });

/// A connection that stays all the time and must not be affected by others.
struct Canary(Client);

impl Canary {
    fn of(lab: &Lab) -> Canary {
        let mut canary = Canary(lab.client());
        canary.sings();
        canary
    }

    #[track_caller]
    fn sings(&mut self) {
        self.0.echoes("canary");
    }
}

#[test]
fn frames_in_segments_of_one_byte_are_put_together() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.client();
    let wire: Vec<u8> = (0..20).flat_map(|n| frame(order::echo(pattern(n * 3)))).collect();
    for byte in &wire {
        client.write(&[*byte]);
    }
    let replies = client.read(wire.len());
    assert_eq!(replies, wire);
    assert_eq!(lab.finish().counters.frames, 20);
}

#[test]
fn a_frame_larger_than_a_buffer_arrives_whole() {
    let limits = no_time_limits().receive_buffer_bytes(1024).receive_bytes_max(1 << 20);
    let lab = Lab::start(limits);
    let mut client = lab.client();
    for len in [1023, 1024, 1025, 10 * 1024, 500_000] {
        let payload = order::echo(pattern(len));
        assert_eq!(client.ask(&payload), payload, "{len} bytes");
    }
    lab.finish();
}

#[test]
fn a_frame_may_be_as_large_as_the_limit_and_not_a_byte_larger() {
    let lab = Lab::start(no_time_limits().frame_bytes_max(5000));
    let mut canary = Canary::of(&lab);
    let mut client = lab.client();
    let largest = order::echo(pattern(4995));
    assert_eq!(client.ask(&largest), largest);
    client.write(&frame(pattern(4997))[..4]);
    assert_eq!(client.recv(), b"malformed", "the service may say last words");
    client.finish_writing();
    assert_eq!(client.end(), End::Fin);
    canary.sings();
    lab.closed_for(TOO_LARGE, 1);
    assert_eq!(lab.shared.malformed.load(SeqCst), 1);
    lab.finish();
}

#[test]
fn a_length_beyond_all_bounds_closes_at_once() {
    for (width, claim) in [(4, u64::from(u32::MAX)), (8, u64::MAX), (8, 1 << 63), (4, (1 << 31) - 1)] {
        let framing = LengthPrefix::bytes(width);
        let lab = Lab::of(On::default().server(no_time_limits()).framing(framing));
        let mut client = lab.client();
        client.write(&claim.to_be_bytes()[8 - usize::from(width)..]);
        let (last_words, end) = client.read_to_end();
        assert!(last_words.ends_with(b"malformed"));
        assert_eq!(end, End::Fin);
        drop(client);
        lab.closed_for(TOO_LARGE, 1);
        lab.finish();
    }
}

#[test]
fn an_endless_line_is_closed_at_the_limit() {
    let limits = no_time_limits().frame_bytes_max(64 << 10);
    let lab = Lab::of(On::default().server(limits).framing(Lines::default()));
    let mut canary = lab.client();
    let mut client = lab.client();
    canary.write(&order::line(order::echo("hello")));
    assert_eq!(canary.read(7), order::line(order::echo("hello")));
    // The server may close in the middle of this: it stops reading at the limit.
    let _ = std::io::Write::write_all(&mut client.stream, &[b'x'; 1 << 20]);
    lab.closed_for(TOO_LARGE, 1);
    canary.write(&order::line(order::echo("hello")));
    assert_eq!(canary.read(7), order::line(order::echo("hello")));
    lab.finish();
}

#[test]
fn garbage_closes_its_connection_and_no_other() {
    let lab = Lab::start(no_time_limits().frame_bytes_max(1000));
    let mut canary = Canary::of(&lab);
    for seed in 0..50 {
        let mut random = ringserve_tests::Random::new(seed);
        // A first byte above 0 makes a length beyond the limit.
        let garbage: Vec<u8> = (0..200).map(|_| random.draw() as u8 | 1).collect();
        let mut client = lab.client();
        client.write(&garbage);
        client.finish_writing();
        let (last_words, end) = client.read_to_end();
        assert_eq!(frames(&last_words), [b"malformed"]);
        assert_eq!(end, End::Fin);
        canary.sings();
    }
    lab.closed_for(TOO_LARGE, 50);
    lab.finish();
}

#[test]
fn pipelined_frames_are_answered_in_order_whatever_their_size() {
    let lab = Lab::start(no_time_limits().receive_buffer_bytes(4096));
    let client = lab.client();
    let payloads: Vec<Vec<u8>> =
        (0..2000).map(|n: usize| [format!("e{n}:").as_bytes(), &pattern(n * n % 9001)].concat()).collect();
    let mut reader = Client::of(client.stream.try_clone().unwrap());
    thread::scope(|scope| {
        let payloads = &payloads;
        scope.spawn(move || {
            let mut client = client;
            payloads.iter().for_each(|payload| client.send(payload));
            client.finish_writing();
        });
        for payload in payloads {
            assert_eq!(&reader.recv(), payload);
        }
        assert_eq!(reader.end(), End::Fin);
    });
    lab.finish();
}

#[test]
fn many_small_frames_in_one_write_are_all_answered() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.client();
    // More than are handed out in a row.
    let wire = frame(b"").repeat(20_000);
    let mut writer = client.stream.try_clone().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| std::io::Write::write_all(&mut writer, &wire).unwrap());
        assert_eq!(client.read(wire.len()), wire);
    });
    assert_eq!(lab.finish().counters.frames, 20_000);
}

#[test]
fn a_reply_that_cannot_be_framed_closes_the_connection() {
    let lab = Lab::of(On::default().server(no_time_limits()).framing(LengthPrefix::bytes(1)));
    let mut client = lab.client();
    client.write(b"\x02e1\x04b256");
    assert_eq!(client.read(3), b"\x02e1", "what was queued before still leaves");
    client.finish_writing();
    assert_eq!(client.end(), End::Fin);
    lab.closed_for(CloseReason::ReplyNotFramed, 1);
    lab.finish();
}

#[test]
fn eight_small_buffers_serve_200_busy_connections() {
    const ROUNDS: usize = 20;
    let limits = no_time_limits().receive_buffer_bytes(256).receive_bytes_max(8 * 256);
    let lab = Lab::start(limits);
    let mut clients: Vec<Client> = (0..200).map(|_| lab.client()).collect();
    thread::scope(|scope| {
        for (tag, half) in clients.chunks_mut(100).enumerate() {
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let payload = |n: usize| {
                        [format!("e{tag}/{n}/{round}:").as_bytes(), &pattern(n * 17 % 3000)].concat()
                    };
                    half.iter_mut().enumerate().for_each(|(n, client)| client.send(payload(n)));
                    for (n, client) in half.iter_mut().enumerate() {
                        assert_eq!(client.recv(), payload(n));
                    }
                }
            });
        }
    });
    drop(clients);
    let report = lab.stats();
    assert!(report.shards[0].buffers.total <= 8, "{:?}", report.shards[0].buffers);
    assert_eq!(report.counters.frames, 200 * ROUNDS as u64);
    lab.closed_for(CloseReason::PeerClosed, 200);
    lab.finish();
}

#[test]
fn a_silent_connection_holds_no_buffer_while_others_work() {
    let lab = Lab::start(no_time_limits());
    let silent: Vec<Client> = (0..100).map(|_| lab.client()).collect();
    lab.holds(100);
    Canary::of(&lab).sings();
    eventually("no buffer is leased", SOON, || lab.stats().shards[0].buffers.leased == 0);
    drop(silent);
    lab.closed_for(CloseReason::PeerClosed, 101);
    lab.finish();
}
