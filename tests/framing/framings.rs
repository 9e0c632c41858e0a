//! Framings on a server: bytes that are no frame are named, frames that lie in one buffer are not
//! copied, and codecs and framings of users work as they are documented to.

mod codecs;
#[allow(dead_code)]
#[path = "../../examples/custom_framing.rs"]
mod custom_framing;
mod example;

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use self::custom_framing::Http2Frames;
use ringserve::framing::{ByteOrder, Delimiter, Fixed, FrameError, Framing, LengthPrefix, Lines, Raw};
use ringserve::server::Driver;
use ringserve::service::CloseCx;
use ringserve::{CloseReason, Cx, Frame, Server, ServerHandle, Service};
use ringserve_tests::client::End;
use ringserve_tests::{Bounded, Bounds};
use ringserve_tests::{Client, SOON, eventually, no_time_limits, on_epoll};

const LAST_WORDS: &[u8] = b"these are no frames";

/// The drivers available here.
fn drivers() -> impl Iterator<Item = Driver> {
    [Driver::IoUring, Driver::Epoll].into_iter().filter(|driver| *driver == Driver::Epoll || !on_epoll())
}

/// A server of one shard, on a driver.
#[track_caller]
fn start<F: Framing + Clone + Send, S: Service>(
    driver: Driver,
    framing: F,
    limits: Bounds,
    service: impl Fn() -> S + Send + Sync + 'static,
) -> ServerHandle {
    let server = Server::bind("127.0.0.1:0").shards(1).pin(false).driver(driver).bounded(limits);
    server.framing(framing).start(move |_| service()).expect("the server starts")
}

/// Events of a connection.
#[derive(Default)]
struct Seen {
    malformed: Mutex<Vec<FrameError>>,
    reasons: Mutex<Vec<CloseReason>>,
}

/// Reports of each frame how long it is and how much memory it pins.
struct Witness(Arc<Seen>);

impl Service for Witness {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        cx.write(format!("{} {}\n", frame.wire().len(), frame.pinned_bytes()).as_bytes());
        Ok(())
    }

    fn malformed(&self, cx: &Cx<'_, ()>, error: &FrameError) {
        self.0.malformed.lock().unwrap().push(*error);
        cx.write(LAST_WORDS);
    }

    fn close(&self, closed: &CloseCx<'_, ()>) {
        self.0.reasons.lock().unwrap().push(closed.reason());
    }
}

/// Bytes of a frame and of memory, as the witness reports them.
#[track_caller]
fn told(client: &mut Client) -> (usize, usize) {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        line.extend(client.read(1));
    }
    let line = String::from_utf8(line).unwrap();
    let (len, pinned) = line.trim_end().split_once(' ').expect("two numbers");
    (len.parse().unwrap(), pinned.parse().unwrap())
}

/// Sends the bad bytes after a good frame, at once or one by one. They must be refused by that
/// name, and in no other way.
#[track_caller]
fn refuses(framing: impl Framing + Clone + Send, good: &[u8], bad: &[u8], error: FrameError) {
    let limits = no_time_limits().frame_bytes_max(1000);
    for (driver, one_by_one) in drivers().flat_map(|driver| [(driver, false), (driver, true)]) {
        let seen = Arc::new(Seen::default());
        let witness = seen.clone();
        let running = start(driver, framing.clone(), limits.clone(), move || Witness(witness.clone()));
        let mut client = Client::connect(running.local_addrs()[0]);
        client.write(good);
        assert_eq!(told(&mut client).0, good.len());
        if one_by_one {
            // The server may have received enough before the last one.
            let _ = bad.iter().try_for_each(|byte| std::io::Write::write_all(&mut client.stream, &[*byte]));
        } else {
            client.write(bad);
        }
        let (last_words, end) = client.read_to_end();
        assert_eq!((&last_words[..], end), (LAST_WORDS, End::Fin), "{error} on {driver}");
        drop(client);
        let report = ringserve_tests::finish(running);
        let reason = CloseReason::BadFrame(error);
        assert_eq!(*seen.malformed.lock().unwrap(), [error]);
        assert_eq!(*seen.reasons.lock().unwrap(), [reason]);
        assert_eq!(report.counters.closed_for(reason), 1);
        assert_eq!(reason.to_string(), format!("bad_frame ({error})"));
    }
}

#[test]
fn frame_above_frame_bytes_max_is_too_large() {
    let too_large = |bytes| FrameError::TooLarge { bytes, max: 1000 };
    refuses(Lines::default(), b"hello\n", &[b'x'; 1001], too_large(1001));
    refuses(Delimiter::new(b"--"), b"hello--", &[b'-', b'x'].repeat(501), too_large(1001));
    refuses(LengthPrefix::bytes(2), b"\0\x02hi", &[0x03, 0xE7], too_large(1001));
    refuses(LengthPrefix::bytes(3), b"\0\0\x02hi", &[0xFF, 0, 0], too_large(0xFF0003));
    let little = LengthPrefix::bytes(8).order(ByteOrder::Little);
    refuses(little, b"\x02\0\0\0\0\0\0\0hi", &[0, 0, 0, 0, 0, 0, 0, 0x80], too_large((1 << 63) + 8));
    refuses(LengthPrefix::varint(), b"\x02hi", &[0xE7, 0x07], too_large(1001));
    refuses(LengthPrefix::bytes(1).offset(1).adjust(900), &[0; 902], &[0, 99], too_large(1001));
}

#[test]
fn frame_above_bytes_max_of_its_framing_is_over_it() {
    let over = FrameError::OverBytesMax { max: 16 };
    refuses(Lines::default().bytes_max(16), b"0123456789abcde\n", b"0123456789abcdef\n", over);
    refuses(Lines::crlf().bytes_max(16), b"0123456789abcd\r\n", b"0123456789abcdefghi", over);
    refuses(Delimiter::new(b"--").bytes_max(16), b"0123456789abcd--", b"0123456789abcde--", over);
}

#[test]
fn a_length_that_becomes_negative_is_named() {
    let negative = FrameError::NegativeLength { length: 1, adjust: -2 };
    refuses(LengthPrefix::bytes(2).adjust(-2), b"\0\x04hi", &[0, 1], negative);
    refuses(LengthPrefix::bytes(2).adjust(-2).keep_header(true), b"\0\x04hi", &[0, 1], negative);
}

#[test]
fn varints_that_are_none_are_named() {
    let overlong = FrameError::VarintOverlong { bytes: 2, needed: 1 };
    refuses(LengthPrefix::varint(), b"\x02hi", &[0x82, 0x00], overlong);
    refuses(LengthPrefix::varint(), b"\x02hi", &[0xFF; 10], FrameError::VarintOverflow);
}

#[test]
fn refusal_of_a_custom_framing_is_named_as_it_says() {
    let error = FrameError::Malformed("FRAME_SIZE_ERROR: the payload is larger than 16384 bytes");
    refuses(Http2Frames, b"\0\0\x02\0\0\0\0\0\0hi", b"\0\x40\x01\0\0\0\0\0\0", error);
}

/// Two frames in one piece, then one whose second half is sent when the first has arrived.
#[track_caller]
fn copies_only_what_spans_buffers(framing: impl Framing + Clone + Send, frame: &[u8]) {
    let half = frame.len() / 2;
    for driver in drivers() {
        let limits = no_time_limits();
        let buffer = limits.server.receive_buffer_bytes;
        let seen = Arc::new(Seen::default());
        let running = start(driver, framing.clone(), limits, move || Witness(seen.clone()));
        let mut client = Client::connect(running.local_addrs()[0]);
        client.write(&frame.repeat(2));
        for _ in 0..2 {
            assert_eq!(told(&mut client), (frame.len(), buffer), "it lies in the receive buffer on {driver}");
        }
        client.write(&frame[..half]);
        eventually("the first half arrives", SOON, || {
            running.stats_now().counters.bytes_received == (2 * frame.len() + half) as u64
        });
        client.write(&frame[half..]);
        let (len, pinned) = told(&mut client);
        assert_eq!(len, frame.len());
        assert!((len..buffer).contains(&pinned), "{pinned} bytes pinned where {len} were copied on {driver}");
        drop(client);
        let report = ringserve_tests::finish(running);
        assert_eq!(report.counters.frames_copied, 0, "receive memory was not short");
    }
}

#[test]
fn a_frame_is_copied_only_if_it_spans_buffers() {
    copies_only_what_spans_buffers(Lines::default(), &[&[b'x'; 1999][..], b"\n"].concat());
    copies_only_what_spans_buffers(Delimiter::new(b"\r\n.\r\n"), &[&[b'x'; 1995][..], b"\r\n.\r\n"].concat());
    copies_only_what_spans_buffers(Fixed::bytes(2000), &[7; 2000]);
    copies_only_what_spans_buffers(LengthPrefix::bytes(3), &[&[0, 0x07, 0xD0][..], &[7; 2000]].concat());
    copies_only_what_spans_buffers(LengthPrefix::varint(), &[&[0xD0, 0x0F][..], &[7; 2000]].concat());
    let kept = LengthPrefix::bytes(2).offset(1).adjust(-3);
    copies_only_what_spans_buffers(kept, &[&[9, 0x07, 0xD3][..], &[7; 2000]].concat());
    copies_only_what_spans_buffers(
        Http2Frames,
        &[&[0, 0x07, 0xD0, 0, 0, 0, 0, 0, 0][..], &[7; 2000]].concat(),
    );
}

#[test]
fn raw_bytes_are_never_copied() {
    for driver in drivers() {
        let seen = Arc::new(Seen::default());
        let running = start(driver, Raw, no_time_limits(), move || Witness(seen.clone()));
        let mut client = Client::connect(running.local_addrs()[0]);
        for len in [1, 100, 1000] {
            client.write(&vec![7; len]);
            assert_eq!(told(&mut client), (len, no_time_limits().server.receive_buffer_bytes));
        }
        drop(client);
        ringserve_tests::finish(running);
    }
}

/// Sends a frame back; for frames that the framing cannot express, see `EncodeError`.
#[derive(Clone, Copy)]
struct Echo;

impl Service for Echo {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        match &frame[..] {
            b"twice" => cx.reply([&frame[..], b"--", &frame].concat()),
            _ => cx.reply(frame),
        }
        Ok(())
    }
}

/// Checks that frames of many sizes come back as they were sent, pipelined, however the network
/// splits them.
#[track_caller]
fn echoes(framing: impl Framing + Clone + Send, frames: impl Fn(usize) -> Vec<u8>) {
    let limits = no_time_limits().receive_buffer_bytes(1024).receive_bytes_max(1 << 20);
    let stream: Vec<u8> =
        [0, 1, 2, 127, 128, 1000, 1023, 1024, 1025, 70_000, 3].into_iter().flat_map(frames).collect();
    for driver in drivers() {
        let running = start(driver, framing.clone(), limits.clone(), || Echo);
        let mut client = Client::connect(running.local_addrs()[0]);
        let mut writer = client.stream.try_clone().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| std::io::Write::write_all(&mut writer, &stream).unwrap());
            assert!(client.read(stream.len()) == stream, "{driver}");
        });
        drop((client, writer));
        ringserve_tests::finish(running);
    }
}

#[test]
fn frames_of_every_framing_come_back_as_they_were() {
    let body =
        |len| ringserve_tests::pattern(len).into_iter().map(|byte| b'a' + byte % 26).collect::<Vec<u8>>();
    echoes(Lines::default(), |len| [&body(len), &b"\n"[..]].concat());
    echoes(Lines::crlf().bytes_max(100_000), |len| [&body(len), &b"\r\n"[..]].concat());
    echoes(Delimiter::new(b"\r\n.\r\n"), |len| [&body(len), &b"\r\n.\r\n"[..]].concat());
    echoes(Fixed::bytes(700), |len| [body(len), vec![b'_'; 700]].concat()[..700].to_vec());
    let length = |len: usize| (len as u32).to_be_bytes();
    echoes(LengthPrefix::bytes(3), |len| [&length(len)[1..], &body(len)].concat());
    echoes(LengthPrefix::bytes(3).order(ByteOrder::Little), |len| {
        [&(len as u32).to_le_bytes()[..3], &body(len)].concat()
    });
    echoes(LengthPrefix::bytes(4).adjust(-4), |len| [&length(len + 4)[..], &body(len)].concat());
    echoes(LengthPrefix::bytes(4).offset(2).adjust(1), |len| {
        [b"HD", &length(len)[..], b"!", &body(len)].concat()
    });
    echoes(LengthPrefix::varint(), |len| {
        let (low, middle, high) = (len as u8 | 0x80, (len >> 7) as u8 | 0x80, (len >> 14) as u8);
        let varint: &[u8] = match len {
            0..128 => &[len as u8],
            128..16384 => &[low, (len >> 7) as u8],
            _ => &[low, middle, high],
        };
        [varint, &body(len)].concat()
    });
}

#[test]
fn a_reply_that_holds_the_delimiter_closes_the_connection() {
    let running = start(Driver::default(), Delimiter::new(b"--"), no_time_limits(), || Echo);
    let mut client = Client::connect(running.local_addrs()[0]);
    client.write(b"once--twice--");
    assert_eq!(client.read_to_end(), (b"once--".to_vec(), End::Fin));
    drop(client);
    assert_eq!(ringserve_tests::finish(running).counters.closed_for(CloseReason::ReplyNotFramed), 1);
}
