//! Bytes in, the same bytes out, however they are cut.

use std::thread;

use ringserve::CloseReason;
use ringserve::framing::{FrameError, LengthPrefix, Lines, Raw};

use ringserve_tests::Bounds;
use ringserve_tests::client::{End, frame};
use ringserve_tests::{Client, Lab, On, no_time_limits, order, pattern};

const TOO_LARGE: CloseReason = CloseReason::BadFrame(FrameError::TooLarge { bytes: 0, max: 0 });

fn small_buffers() -> Bounds {
    no_time_limits().receive_buffer_bytes(64).receive_bytes_max(64 * 1024)
}

fn echo(bytes: usize) -> Vec<u8> {
    order::echo(pattern(bytes))
}

pub fn every_size_around_small_buffers(on: On) {
    let lab = Lab::on(on, small_buffers());
    let mut client = lab.client();
    for bytes in 0..=200 {
        assert_eq!(client.ask(echo(bytes)), echo(bytes), "{bytes} bytes");
    }
    lab.finish();
}

pub fn every_size_around_small_buffers_unframed(on: On) {
    let lab = Lab::of(on.site(small_buffers()).framing(Raw));
    let mut client = lab.client();
    for bytes in 1..=200 {
        client.write(&vec![b'e'; bytes]);
        assert_eq!(client.read(bytes), vec![b'e'; bytes], "{bytes} bytes");
    }
    client.finish_writing();
    assert_eq!(client.end(), End::Fin, "and not a byte more");
    lab.finish();
}

pub fn sizes_around_large_buffers(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    // With the length and the command a frame is 5 bytes longer.
    for bytes in [16_383, 16_384, 16_385, 3 * 16_384 + 1] {
        for bytes in bytes - 6..=bytes {
            assert_eq!(client.ask(echo(bytes)), echo(bytes), "{bytes} bytes");
        }
    }
    lab.finish();
}

pub fn a_megabyte_at_once(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    let payload = echo((1 << 20) - 5);
    for _ in 0..5 {
        assert!(client.ask(&payload) == payload);
    }
    lab.finish();
}

pub fn one_byte_at_a_time(on: On) {
    let lab = Lab::on(on, small_buffers());
    let mut client = lab.client();
    let wire: Vec<u8> = (0..10).flat_map(|n| frame(echo(n * 9))).collect();
    wire.iter().for_each(|byte| client.write(&[*byte]));
    assert_eq!(client.read(wire.len()), wire);
    lab.finish();
}

pub fn empty_frames(on: On) {
    let lab = Lab::on(on, small_buffers());
    let mut client = lab.client();
    client.write(&frame(b"").repeat(1000));
    (0..1000).for_each(|_| assert_eq!(client.recv(), b""));
    assert_eq!(lab.finish().counters.frames, 1000);
}

pub fn pipelined_in_one_write(on: On) {
    let lab = Lab::on(on, small_buffers());
    let mut client = lab.client();
    let wire: Vec<u8> = (0..500).flat_map(|n| frame(echo(n % 150))).collect();
    // Many times, since whether replies queue behind others is a matter of time.
    for _ in 0..20 {
        client.write(&wire);
        assert_eq!(client.read(wire.len()), wire);
    }
    lab.finish();
}

pub fn pipelined_both_ways_at_once(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    let mut writer = Client::of(client.stream.try_clone().unwrap());
    let wire: Vec<u8> = (0..1000).flat_map(|n| frame(echo(n * 37 % 20_000))).collect();
    thread::scope(|scope| {
        scope.spawn(|| {
            writer.write(&wire);
            writer.finish_writing();
        });
        let (replies, end) = client.read_to_end();
        assert!(replies == wire);
        assert_eq!(end, End::Fin);
    });
    lab.closed_for(CloseReason::PeerClosed, 1);
    lab.finish();
}

pub fn lines_cut_anywhere(on: On) {
    let lab = Lab::of(on.site(small_buffers()).framing(Lines::default()));
    let mut client = lab.client();
    let text =
        b"e\nefirst\r\nesecond\ne\r\r\nethe third one is longer than a buffer of 64 bytes, as this one is\n";
    let back =
        b"e\nefirst\nesecond\ne\r\nethe third one is longer than a buffer of 64 bytes, as this one is\n";
    for cut in 0..text.len() {
        client.write(&text[..cut]);
        client.write(&text[cut..]);
        assert_eq!(client.read(back.len()), back, "cut at {cut}");
    }
    lab.finish();
}

pub fn a_frame_at_the_limit_and_one_above(on: On) {
    let lab = Lab::on(on, small_buffers().frame_bytes_max(1000));
    let mut client = lab.client();
    assert_eq!(client.ask(echo(995)), echo(995));
    client.send(echo(996));
    assert_eq!((client.recv(), client.end()), (b"malformed".to_vec(), End::Fin));
    drop(client);
    lab.closed_for(TOO_LARGE, 1);
    lab.finish();
}

pub fn an_endless_line(on: On) {
    let limits = small_buffers().frame_bytes_max(1000);
    let lab = Lab::of(on.site(limits).framing(Lines::default()));
    let mut client = lab.client();
    client.write(&[b'x'; 1001]);
    client.finish_writing();
    assert_eq!(client.read_to_end(), (b"malformed\n".to_vec(), End::Fin));
    lab.closed_for(TOO_LARGE, 1);
    lab.finish();
}

pub fn two_connections_in_turns(on: On) {
    let lab = Lab::of(on.site(small_buffers()).framing(LengthPrefix::default()));
    let (mut one, mut other) = (lab.client(), lab.client());
    let wire = frame(echo(300));
    for (byte, n) in wire.iter().zip(0..) {
        one.write(&[*byte]);
        let text = order::echo(n.to_string());
        other.gets_back(text);
    }
    assert_eq!(one.recv(), echo(300));
    lab.finish();
}
