//! Codecs of `tokio_util` on a server.

use std::cell::Cell;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::thread;

use bytes_of::{Bytes, BytesMut};
use ringserve::codec::{CodecCx, CodecError, CodecOpenCx, CodecService, Decoder, Encoder, WithCodec};
use ringserve::framing::Raw;
use ringserve::service::CloseCx;
use ringserve::{CloseReason, ServerHandle};
use tokio_util::bytes as bytes_of;
use tokio_util::codec::{LengthDelimitedCodec, LinesCodec, LinesCodecError};

use ringserve_tests::Bounds;
use ringserve_tests::client::{End, frame};
use ringserve_tests::puppet::Gate;
use ringserve_tests::{self, Client, SOON, eventually, no_time_limits, pattern};

/// State shared by test and service.
#[derive(Default)]
struct Shared {
    gate: Gate,
    reasons: Mutex<Vec<CloseReason>>,
    malformed: Mutex<Vec<String>>,
    items: AtomicUsize,
    outbox_most: AtomicUsize,
}

/// Follows the orders in lines, and counts them for each connection.
struct Talk {
    shared: Arc<Shared>,
    line_bytes_max: usize,
}

impl CodecService for Talk {
    type Codec = LinesCodec;
    type Session = Cell<usize>;
    type Error = LinesCodecError;

    fn codec(&self) -> LinesCodec {
        LinesCodec::new_with_max_length(self.line_bytes_max)
    }

    async fn call(&self, cx: &CodecCx<'_, Self>, line: String) -> Result<(), LinesCodecError> {
        cx.session().set(cx.session().get() + 1);
        self.shared.items.fetch_add(1, SeqCst);
        match line.as_str() {
            "bye" => {
                cx.reply("bye")?;
                cx.close();
            }
            "abort" => cx.abort(),
            "fail" => return Err(LinesCodecError::MaxLineLengthExceeded),
            "wait" => {
                self.shared.gate.pass().await;
                cx.reply("waited")?;
            }
            "by handle" => {
                cx.handle().close();
                self.shared.gate.pass().await;
            }
            "much" => {
                cx.reply("x".repeat(9_999))?;
                self.shared.outbox_most.fetch_max(cx.outbox_bytes(), SeqCst);
            }
            "longer" => cx.with_codec(|codec| *codec = LinesCodec::new_with_max_length(1000)),
            "count" => cx.reply(cx.session().get().to_string())?,
            _ => cx.reply(line)?,
        }
        Ok(())
    }

    fn malformed(&self, cx: &CodecCx<'_, Self>, error: &CodecError<LinesCodecError>) {
        self.shared.malformed.lock().unwrap().push(error.to_string());
        let _ = cx.reply("what?");
    }

    fn close(&self, closed: &CloseCx<'_, Cell<usize>>) {
        self.shared.reasons.lock().unwrap().push(closed.reason());
    }
}

struct Lab {
    running: ServerHandle,
    shared: Arc<Shared>,
}

impl Lab {
    #[track_caller]
    fn with(limits: Bounds, line_bytes_max: usize, bytes_max: usize) -> Lab {
        let shared = Arc::new(Shared::default());
        let for_service = shared.clone();
        let running = super::start(Default::default(), Raw, limits, move || {
            WithCodec::new(Talk { shared: for_service.clone(), line_bytes_max }).bytes_max(bytes_max)
        });
        Lab { running, shared }
    }

    #[track_caller]
    fn start() -> Lab {
        Lab::with(no_time_limits(), usize::MAX, 1 << 20)
    }

    #[track_caller]
    fn client(&self) -> Client {
        Client::connect(self.running.local_addrs()[0])
    }

    /// Checks that the only connection of the test ended for this reason, as the service was
    /// informed.
    #[track_caller]
    fn finish(self, told: CloseReason, counted: CloseReason) -> Arc<Shared> {
        let report = ringserve_tests::finish(self.running);
        assert_eq!(*self.shared.reasons.lock().unwrap(), [told]);
        assert_eq!(report.counters.closed_for(counted), 1, "{:?}", report.counters);
        self.shared
    }
}

#[test]
fn lines_come_back_however_they_are_cut() {
    let lab = Lab::start();
    let mut client = lab.client();
    let lines: Vec<u8> =
        (0..300).flat_map(|n| [vec![b'a' + (n % 26) as u8; n], b"\n".to_vec()].concat()).collect();
    for piece in lines.chunks(7) {
        client.write(piece);
    }
    assert_eq!(client.read(lines.len()), lines);
    client.write(&lines);
    assert_eq!(client.read(lines.len()), lines, "and in one piece");
    client.write(b"count\r\n");
    assert_eq!(client.read(4), b"601\n");
    client.finish_writing();
    assert_eq!(client.end(), End::Fin);
    lab.finish(CloseReason::PeerClosed, CloseReason::PeerClosed);
}

#[test]
fn connections_have_codecs_of_their_own() {
    let lab = Lab::start();
    let (mut one, mut other) = (lab.client(), lab.client());
    one.write(b"he");
    other.write(b"good");
    eventually("both halves arrive", SOON, || lab.running.stats_now().counters.bytes_received == 6);
    other.write(b"bye!\n");
    assert_eq!(other.read(9), b"goodbye!\n");
    one.write(b"llo\nlonger\n");
    assert_eq!(one.read(6), b"hello\n");
    drop((one, other));
    ringserve_tests::finish(lab.running);
}

#[test]
fn refusal_of_the_decoder_closes_after_last_words() {
    let lab = Lab::with(no_time_limits(), 10, 1 << 20);
    let mut client = lab.client();
    client.write(b"short\n0123456789a\nnever answered\n");
    assert_eq!(client.read_to_end(), (b"short\nwhat?\n".to_vec(), End::Fin));
    drop(client);
    let shared = lab.finish(CloseReason::HandlerError, CloseReason::HandlerError);
    assert_eq!(*shared.malformed.lock().unwrap(), ["malformed item: max line length exceeded"]);
}

#[test]
fn a_service_may_change_its_codec() {
    let lab = Lab::with(no_time_limits(), 10, 1 << 20);
    let mut client = lab.client();
    client.write(b"longer\n0123456789a\n");
    assert_eq!(client.read(12), b"0123456789a\n");
    drop(client);
    lab.finish(CloseReason::PeerClosed, CloseReason::PeerClosed);
}

#[test]
fn an_endless_item_is_bounded() {
    let lab = Lab::with(no_time_limits(), usize::MAX, 100_000);
    let mut client = lab.client();
    let longest = [vec![b'x'; 100_000], b"\n".to_vec()].concat();
    client.write(&longest);
    assert!(client.read(longest.len()) == longest);
    // The server may close in the middle of this: it stops reading at the limit.
    let _ = std::io::Write::write_all(&mut client.stream, &[b'x'; 1 << 20]);
    let _ = client.read_to_end();
    drop(client);
    let shared = lab.finish(CloseReason::HandlerError, CloseReason::HandlerError);
    let said = shared.malformed.lock().unwrap();
    assert!(said.len() == 1 && said[0].ends_with("bytes_max of the service is 100000"), "{said:?}");
}

#[test]
fn last_line_without_its_end_is_an_item() {
    let lab = Lab::start();
    let mut client = lab.client();
    client.write(b"whole\nlast");
    client.finish_writing();
    assert_eq!(client.read_to_end(), (b"whole\nlast\n".to_vec(), End::Fin));
    lab.finish(CloseReason::PeerClosed, CloseReason::PeerClosed);
}

#[test]
fn items_behind_a_close_are_not_handed_over() {
    for (last, reply, reason) in
        [("bye", &b"one\nbye\n"[..], CloseReason::Closed), ("fail", b"one\n", CloseReason::HandlerError)]
    {
        let lab = Lab::start();
        let mut client = lab.client();
        client.write(format!("one\n{last}\ntwo\nthree\n").as_bytes());
        assert_eq!(client.read_to_end(), (reply.to_vec(), End::Fin));
        drop(client);
        lab.finish(reason, reason);
    }
    let lab = Lab::start();
    let mut client = lab.client();
    client.write(b"abort\nwait\n");
    assert_eq!(client.end_after_all(), End::Reset);
    assert_eq!(lab.shared.gate.came(), 0, "the item after the abort was handed over");
    lab.finish(CloseReason::Aborted, CloseReason::Aborted);
}

/// The call that closed it waits, and goes on while replies are still to be read.
#[test]
fn items_behind_a_close_through_a_handle_are_not_handed_over() {
    let limits = no_time_limits().outbox_bytes_high(60 << 20);
    let lab = Lab::with(limits, usize::MAX, 1 << 20);
    let mut client = Client::with_small_window(lab.running.local_addrs()[0]);
    client.write(&[&b"much\n".repeat(2000)[..], b"by handle\nlast\n"].concat());
    eventually("the call waits", SOON, || lab.shared.gate.came() == 1);
    // The shard notices a close by its handle one turn later, and until then received frames are
    // handed over.
    ringserve_tests::a_turn_passes(&lab.running);
    assert_eq!(lab.shared.items.load(SeqCst), 2001);
    lab.shared.gate.open();
    let (replies, end) = client.read_to_end();
    assert_eq!((replies.len(), end), (20_000_000, End::Fin));
    drop(client);
    let shared = lab.finish(CloseReason::Closed, CloseReason::Closed);
    assert_eq!(shared.items.load(SeqCst), 2001);
}

#[test]
fn items_wait_for_the_one_before_and_keep_their_order() {
    let lab = Lab::start();
    let (mut client, mut other) = (lab.client(), lab.client());
    client.write(b"one\nwait\ntwo\n");
    assert_eq!(client.read(4), b"one\n");
    eventually("the call waits", SOON, || lab.shared.gate.came() == 1);
    eventually("and pins no buffer", SOON, || lab.running.stats_now().shards[0].buffers.leased == 0);
    client.write(b"three\n");
    other.write(b"hello\n");
    assert_eq!(other.read(6), b"hello\n", "others go on");
    assert!(client.is_silent());
    lab.shared.gate.open();
    assert_eq!(client.read(17), b"waited\ntwo\nthree\n");
    drop((client, other));
    ringserve_tests::finish(lab.running);
}

/// One piece of input asks for 10 MB, of which the client reads nothing at first.
#[test]
fn replies_to_one_piece_of_input_are_bounded() {
    let limits = no_time_limits().outbox_bytes_max(1 << 20);
    let high = limits.service.outbox_bytes_high;
    let lab = Lab::with(limits, usize::MAX, 1 << 20);
    let mut client = Client::with_small_window(lab.running.local_addrs()[0]);
    client.write(&b"much\n".repeat(1000));
    client.finish_writing();
    eventually("the outbox fills", SOON, || lab.shared.outbox_most.load(SeqCst) > high);
    let (replies, end) = client.read_to_end();
    assert_eq!((replies.len(), end), (10_000_000, End::Fin));
    let most = lab.shared.outbox_most.load(SeqCst);
    assert!(most <= high + 10_000, "{most} bytes in an outbox where {high} is high");
    lab.finish(CloseReason::PeerClosed, CloseReason::PeerClosed);
}

/// Sends each frame back, whose received bytes it gets without a copy.
struct Echo;

impl CodecService for Echo {
    type Codec = LengthDelimitedCodec;
    type Session = ();
    type Error = std::io::Error;

    fn codec(&self) -> LengthDelimitedCodec {
        LengthDelimitedCodec::builder().max_frame_length(600_000).new_codec()
    }

    async fn open(&self, opening: &CodecOpenCx<'_, Self>) -> Result<(), ringserve::service::Refusal> {
        let greeted = opening.reply(Bytes::from_static(b"hello"));
        greeted.map_err(|error| ringserve::service::Refusal::new(error.to_string()))
    }

    async fn call(&self, cx: &CodecCx<'_, Self>, frame: BytesMut) -> Result<(), std::io::Error> {
        cx.reply(frame.freeze())
    }
}

#[test]
fn length_delimited_frames_come_back() {
    for driver in super::drivers() {
        let running = super::start(driver, Raw, no_time_limits(), || WithCodec::new(Echo));
        let mut client = Client::connect(running.local_addrs()[0]);
        assert_eq!(client.recv(), b"hello");
        for byte in &frame(b"byte by byte") {
            client.write(&[*byte]);
        }
        assert_eq!(client.recv(), b"byte by byte");
        let sizes = [0, 1, 1000, 16_380, 16_384, 500_000, 7];
        let mut writer = Client::of(client.stream.try_clone().unwrap());
        thread::scope(|scope| {
            scope.spawn(move || sizes.iter().for_each(|size| writer.send(pattern(*size))));
            sizes
                .iter()
                .for_each(|size| assert!(client.recv() == pattern(*size), "{size} bytes on {driver}"));
        });
        drop(client);
        ringserve_tests::finish(running);
    }
}

#[test]
fn a_length_beyond_the_codecs_limit_closes() {
    let running = super::start(Default::default(), Raw, no_time_limits(), || WithCodec::new(Echo));
    let mut client = Client::connect(running.local_addrs()[0]);
    assert_eq!(client.recv(), b"hello");
    client.write(&600_001u32.to_be_bytes());
    assert_eq!(client.end(), End::Fin);
    drop(client);
    assert_eq!(ringserve_tests::finish(running).counters.closed_for(CloseReason::HandlerError), 1);
}

/// Letters one by one; it fails to write an `x`, and notices too late.
#[derive(Default)]
struct Letters;

#[derive(Debug)]
struct Fussy;

impl std::fmt::Display for Fussy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("not this letter")
    }
}

impl From<std::io::Error> for Fussy {
    fn from(_: std::io::Error) -> Fussy {
        Fussy
    }
}

impl Decoder for Letters {
    type Item = u8;
    type Error = Fussy;

    fn decode(&mut self, bytes: &mut BytesMut) -> Result<Option<u8>, Fussy> {
        Ok((!bytes.is_empty()).then(|| bytes.split_to(1)[0]))
    }
}

impl Encoder<u8> for Letters {
    type Error = Fussy;

    fn encode(&mut self, letter: u8, bytes: &mut BytesMut) -> Result<(), Fussy> {
        bytes.extend_from_slice(&[b'<', letter, b'>']);
        if letter == b'x' { Err(Fussy) } else { Ok(()) }
    }
}

struct Spell;

impl CodecService for Spell {
    type Codec = Letters;
    type Session = ();
    type Error = Fussy;

    fn codec(&self) -> Letters {
        Letters
    }

    async fn call(&self, cx: &CodecCx<'_, Self>, letter: u8) -> Result<(), Fussy> {
        // It does not matter here that the letter cannot be written.
        let _ = cx.reply(letter);
        Ok(())
    }
}

#[test]
fn a_reply_that_cannot_be_encoded_leaves_nothing() {
    let running = super::start(Default::default(), Raw, no_time_limits(), || WithCodec::new(Spell));
    let mut client = Client::connect(running.local_addrs()[0]);
    client.write(b"axb");
    client.finish_writing();
    assert_eq!(client.read_to_end(), (b"<a><b>".to_vec(), End::Fin));
    drop(client);
    ringserve_tests::finish(running);
}
