//! Framings with a state, with heads and in pieces, below whole servers: by seed, with bytes that
//! come in any portions.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use ringserve_server::framing::{
    AsFramingState, Cut, Decode, EncodeError, FrameError, Framing, FramingState, LengthPrefix, Lines, Outbox,
    Payload, TypedFraming,
};
use ringserve_server::limits::{LimitError, ServerLimits};
use ringserve_server::middleware::{CallEnd, ConcurrencyLimit, Observe, TimeLimit, TimeLimitError};
use ringserve_server::testing::{Faults, Sim};
use ringserve_server::{
    CloseCx, CloseReason, Cx, Error, Frame, Limits, OpenCx, Refusal, Server, Service, with_heads,
};

use crate::Echo;

/// The kind of the next bytes.
#[derive(Clone, Copy, Debug, Default)]
enum Reads {
    /// Lines.
    #[default]
    Commands,
    /// This number of bytes, in pieces.
    Upload(u64),
    /// Frames with a length of four bytes.
    Frames,
}

/// The kind of a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Part {
    #[default]
    Command,
    Piece,
    /// The end of an upload.
    Last,
    Frame,
}

/// Lines, uploads in pieces, and frames: whatever a call has switched to.
#[derive(Clone)]
struct Mixed;

impl TypedFraming for Mixed {
    type State = Reads;
    type Head = Part;

    fn cut(&self, reads: &mut Reads, bytes: &[u8], scanned: usize) -> Result<Cut<Part>, FrameError> {
        match *reads {
            Reads::Commands => {
                let found = Lines::default().decode(bytes, scanned)?;
                if let Decode::Frame { len, .. } = found
                    && let Some(byte) = bytes[..len].iter().find(|byte| !byte.is_ascii())
                {
                    return Err(FrameError::coded(u32::from(*byte), "a command is ASCII"));
                }
                Ok(found.with_head(Part::Command))
            }
            Reads::Frames => Ok(LengthPrefix::bytes(4).decode(bytes, scanned)?.with_head(Part::Frame)),
            Reads::Upload(left) => {
                let len = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                let left = left - len as u64;
                if left > 0 {
                    *reads = Reads::Upload(left);
                    return Ok(Cut::Piece { skip: 0, len, consumed: len, head: Part::Piece });
                }
                *reads = Reads::Commands;
                Ok(Cut::Frame { skip: 0, len, consumed: len, head: Part::Last })
            }
        }
    }

    fn write(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        Lines::default().encode(payload, out)
    }

    fn check_limits(&self, limits: &Limits) -> Result<(), LimitError> {
        LengthPrefix::bytes(4).check(limits)
    }
}

#[derive(Default)]
struct Session {
    reads: FramingState<Reads>,
    bytes: Cell<u64>,
    pieces: Cell<u64>,
    sum: Cell<u64>,
}

impl AsFramingState<Reads> for Session {
    fn framing_state(&self) -> &FramingState<Reads> {
        &self.reads
    }
}

type Ends = Rc<RefCell<Vec<CloseReason>>>;

/// Answers commands, and says of an upload and of each frame what it was.
#[derive(Clone, Default)]
struct Store {
    ends: Ends,
    pieces_max: Rc<Cell<usize>>,
}

fn sum_of(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |sum: u64, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)))
}

impl Service<Part> for Store {
    type Session = Session;
    type Error = &'static str;

    async fn open(&self, _: &OpenCx<'_>) -> Result<Session, Refusal> {
        Ok(Session::default())
    }

    async fn call(&self, cx: &Cx<'_, Session>, frame: Frame<Part>) -> Result<(), &'static str> {
        let session = cx.session();
        match frame.head() {
            Part::Command => {
                let text = std::str::from_utf8(&frame).map_err(|_| "not UTF-8")?;
                let mut words = text.split(' ');
                let mut word = words.next();
                if word == Some("slowly") {
                    cx.sleep(Duration::from_millis(cx.shard().random() % 30)).await;
                    word = words.next();
                }
                let number = words.next().and_then(|word| word.parse().ok());
                match (word, number) {
                    (Some("put"), Some(0)) => cx.reply("0 bytes, 0"),
                    (Some("put"), Some(bytes)) => {
                        session.sum.set(0);
                        session.bytes.set(0);
                        cx.set_framing_state(Reads::Upload(bytes));
                    }
                    (Some("frames"), _) => cx.set_framing_state(Reads::Frames),
                    _ => cx.reply(format!("{text}?")),
                }
            }
            Part::Frame if *frame == *b"lines" => cx.set_framing_state(Reads::Commands),
            Part::Frame => cx.reply(format!("a frame of {} bytes, {}", frame.len(), sum_of(&frame))),
            Part::Piece | Part::Last => {
                self.pieces_max.set(self.pieces_max.get().max(frame.wire().len()));
                session.pieces.set(session.pieces.get() + 1);
                session.bytes.set(session.bytes.get() + frame.len() as u64);
                let sum = |sum: u64, byte: &u8| sum.wrapping_mul(31).wrapping_add(u64::from(*byte));
                session.sum.set(frame.iter().fold(session.sum.get(), sum));
                if cx.shard().random() % 8 == 0 {
                    cx.sleep(Duration::from_millis(5)).await;
                }
                if *frame.head() == Part::Last {
                    cx.reply(format!("{} bytes, {}", session.bytes.get(), session.sum.get()));
                }
            }
        }
        Ok(())
    }

    fn malformed(&self, cx: &Cx<'_, Session>, error: &FrameError) {
        match error.code() {
            Some(code) => cx.reply(format!("error {code}")),
            None => cx.reply(error.name()),
        }
    }

    fn close(&self, closed: &CloseCx<'_, Session>) {
        self.ends.borrow_mut().push(closed.reason());
    }
}

fn server(limits: Limits) -> Server<Mixed> {
    Server::bind("10.0.0.1:7000").framing(Mixed).limits(limits)
}

#[test]
fn bytes_behind_a_switch_are_cut_by_the_new_rule() {
    let switches = Rc::new(Cell::new(0));
    let all = switches.clone();
    Sim::seeds(150).faults(Faults::all()).run(move |sim| {
        let store = Store::default();
        let limits = Limits::default()
            .frame_bytes_max(4096)
            .inbox_bytes_high([10, 1000, 64 << 10][sim.random() as usize % 3]);
        let addr = sim.serve(server(limits).shards(1 + sim.seed() as usize % 3), {
            let store = store.clone();
            move |_shard| with_heads(store.clone())
        });
        for n in 0..3 {
            let all = all.clone();
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                let (mut sent, mut expected) = (Vec::new(), Vec::new());
                for _ in 0..20 {
                    let slowly = if net.random() % 4 == 0 { "slowly " } else { "" };
                    // Bytes of each rule look like those of the others.
                    let body = |len: u64| -> Vec<u8> {
                        (0..len).map(|_| b"\nput 3\0\xFF"[net.random() as usize % 8]).collect()
                    };
                    match net.random() % 3 {
                        0 => {
                            sent.extend_from_slice(format!("{slowly}nothing\n").as_bytes());
                            expected.push(format!("{slowly}nothing?"));
                        }
                        1 => {
                            let body = body([0, 1, 100, 9000][net.random() as usize % 4]);
                            sent.extend_from_slice(format!("{slowly}put {}\n", body.len()).as_bytes());
                            sent.extend_from_slice(&body);
                            expected.push(format!("{} bytes, {}", body.len(), sum_of(&body)));
                        }
                        _ => {
                            sent.extend_from_slice(format!("{slowly}frames\n").as_bytes());
                            for _ in 0..net.random() % 3 {
                                let body = body([0, 1, 200, 4000][net.random() as usize % 4]);
                                sent.extend_from_slice(&(body.len() as u32).to_be_bytes());
                                sent.extend_from_slice(&body);
                                expected.push(format!("a frame of {} bytes, {}", body.len(), sum_of(&body)));
                            }
                            sent.extend_from_slice(b"\0\0\0\x05lines");
                        }
                    }
                    all.set(all.get() + 1);
                }
                me.send(&sent).await?;
                me.finish()?;
                for expected in expected {
                    assert_eq!(me.line().await?.as_deref(), Some(&*expected));
                }
                me.closed().await?;
                Ok(())
            });
        }
        sim.run_until_done();
        sim.finish();
        assert!(store.pieces_max.get() <= 4096, "a piece of {} bytes", store.pieces_max.get());
        let sound = |end: &CloseReason| matches!(end, CloseReason::PeerClosed | CloseReason::PeerReset);
        assert!(store.ends.borrow().iter().all(sound), "{:?}", store.ends);
    });
    assert!(switches.get() > 1000);
}

/// Like [`Store`], whose heartbeats, and whose calls that wait, switch to frames.
struct Late(Store);

impl Service<Part> for Late {
    type Session = Session;
    type Error = &'static str;

    async fn call(&self, cx: &Cx<'_, Session>, frame: Frame<Part>) -> Result<(), &'static str> {
        if *frame == *b"later" {
            cx.sleep(Duration::from_secs(1)).await;
            cx.set_framing_state(Reads::Frames);
            return Ok(());
        }
        self.0.call(cx, frame).await
    }

    fn heartbeat(&self, cx: &Cx<'_, Session>) {
        cx.set_framing_state(Reads::Frames);
    }

    fn malformed(&self, cx: &Cx<'_, Session>, error: &FrameError) {
        self.0.malformed(cx, error);
    }

    fn close(&self, closed: &CloseCx<'_, Session>) {
        self.0.close(closed);
    }
}

#[test]
fn half_a_frame_is_cut_again_by_the_rule_switched_to() {
    Sim::seeds(50).faults(Faults::none()).run(|sim| {
        let calls = sim.seed() as u16 % 2 + 1;
        let limits = Limits::default()
            .heartbeat_interval((calls == 1).then_some(Duration::from_secs(1)))
            .calls_in_flight_max(calls);
        let addr = sim.serve(server(limits).shards(1), |_shard| with_heads(Late(Store::default())));
        sim.client("a", async move |net| {
            let mut me = net.connect(addr).await?;
            if calls > 1 {
                me.send("later\n").await?;
            }
            // No line, and a whole frame with the start of another: no byte more comes before they
            // are looked at.
            me.send(b"\0\0\0\x05hello\0\0\0\x02").await?;
            assert_eq!(me.line().await?, Some(format!("a frame of 5 bytes, {}", sum_of(b"hello"))));
            me.send(b"ab").await?;
            assert_eq!(me.line().await?, Some(format!("a frame of 2 bytes, {}", sum_of(b"ab"))));
            Ok(())
        });
        sim.run_until_done();
        sim.finish();
    });
}

#[test]
fn switch_in_a_hook_right_before_fin_is_heeded() {
    Sim::seeds(50).faults(Faults::none()).run(|sim| {
        let store = Store::default();
        let limits = Limits::default().heartbeat_interval(Some(Duration::from_secs(1)));
        let server = sim.start(server(limits).shards(1), {
            let store = store.clone();
            move |_shard| with_heads(Late(store.clone()))
        });
        let server = server.expect("it starts");
        let addr = server.addr();
        sim.client("a", async move |net| {
            let mut me = net.connect(addr).await?;
            // No line, and a whole frame once a heartbeat has switched.
            me.send(b"\0\0\0\x05hello").await?;
            net.sleep(Duration::from_millis(1500)).await;
            me.finish()?;
            assert_eq!(me.line().await?, Some(format!("a frame of 5 bytes, {}", sum_of(b"hello"))));
            assert_eq!(me.closed().await?, b"");
            Ok(())
        });
        sim.run_for(Duration::from_millis(500));
        // The heartbeat and the end of the input come in one turn.
        server.stall(0, Duration::from_secs(2));
        sim.run_until_done();
        sim.finish();
        assert_eq!(*store.ends.borrow(), [CloseReason::PeerClosed]);
    });
}

#[test]
fn upload_that_stops_in_the_middle_is_ended() {
    for (how, reason) in [("is silent", CloseReason::ReadTooSlow), ("ends", CloseReason::PeerClosedMidFrame)]
    {
        Sim::seeds(20).run(|sim| {
            let store = Store::default();
            let limits = Limits::default()
                .frame_bytes_max(4096)
                .idle_timeout(Some(Duration::from_secs(3600)))
                .read_bytes_per_second_min(100);
            let addr = sim.serve(server(limits).shards(1), {
                let store = store.clone();
                move |_shard| with_heads(store.clone())
            });
            sim.client("a", async move |net| {
                let mut me = net.connect(addr).await?;
                // It claims 512 MB; what has come is handed out, and nothing is kept.
                me.send("put 536870912\n").await?;
                me.send(vec![7; 5000]).await?;
                if how == "ends" {
                    me.finish()?;
                }
                assert_eq!(me.closed().await?, b"", "{how}");
                assert!(net.now() < Duration::from_secs(60), "the idle limit is not what ended it");
                Ok(())
            });
            sim.run_until_done();
            sim.finish();
            assert_eq!(*store.ends.borrow(), [reason]);
        });
    }
}

#[test]
fn fast_upload_to_a_slow_service_is_held_back_and_not_closed() {
    Sim::seeds(20).run(|sim| {
        let tight = ServerLimits::default()
            .held_bytes_max(256 << 10)
            .receive_bytes_max(64 << 10)
            .receive_buffer_bytes(4096);
        let limits = Limits::default()
            .frame_bytes_max(4096)
            .inbox_bytes_high(8192)
            .outbox_bytes_max(16 << 10)
            .outbox_bytes_high(8 << 10)
            .outbox_bytes_low(1 << 10)
            .read_bytes_per_second_min(1000);
        let server = server(limits).server_limits(tight).shards(1);
        let addr = sim.serve(server, |_shard| with_heads(Store::default()));
        sim.client("a", async move |net| {
            let body = vec![b'x'; 1 << 20];
            let mut me = net.connect(addr).await?;
            me.send(format!("put {}\n", body.len())).await?;
            me.send(&body).await?;
            assert_eq!(me.line().await?, Some(format!("{} bytes, {}", body.len(), sum_of(&body))));
            Ok(())
        });
        sim.run_until_done();
        sim.finish();
    });
}

#[test]
fn heads_that_lie_and_bytes_that_are_none_have_an_answer() {
    for (bytes, answer) in [
        (&b"frames\n\xFF\xFF\xFF\xFFabc"[..], "too_large"),
        (b"frames\n\0\0\x10\0abc", "too_large"),
        (b"hell\xC3\xB6\n", "error 195"),
    ] {
        Sim::seeds(20).faults(Faults::all()).run(move |sim| {
            let addr = sim.serve(server(Limits::default().frame_bytes_max(4096)).shards(1), |_shard| {
                with_heads(Store::default())
            });
            sim.client("a", async move |net| {
                let mut me = net.connect(addr).await?;
                me.send(bytes).await?;
                assert_eq!(me.line().await?.as_deref(), Some(answer));
                me.closed().await?;
                Ok(())
            });
            sim.run_until_done();
            sim.finish();
        });
    }
}

/// Lines of at most four bytes, by a framing around one that ships.
#[derive(Clone)]
struct Short(Lines);

impl Framing for Short {
    fn decode(&self, bytes: &[u8], scanned: usize) -> Result<Decode, FrameError> {
        match self.0.decode(bytes, scanned)? {
            Decode::Frame { len: 5.., .. } => Err(FrameError::coded(5, "a long line")),
            found => Ok(found),
        }
    }

    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        self.0.encode(payload, out)
    }

    fn check(&self, limits: &Limits) -> Result<(), LimitError> {
        self.0.check(limits)
    }
}

#[test]
fn server_does_not_start_with_limits_that_its_framing_refuses() {
    Sim::seeds(1).run(|sim| {
        let start = |framing: Lines| {
            let server = Server::bind("10.0.0.1:7000").framing(Short(framing));
            sim.start(server.limits(Limits::default().frame_bytes_max(100)), |_shard| Echo)
        };
        let refused = start(Lines::lf().bytes_max(101)).map(drop).unwrap_err();
        assert!(matches!(refused, Error::Limits(LimitError::Order { .. })), "{refused}");
        assert!(start(Lines::lf().bytes_max(100)).is_ok());
        sim.finish();
    });
}

#[test]
fn layers_go_around_services_of_heads() {
    Sim::seeds(20).run(|sim| {
        let ends = Rc::new(Cell::new(0));
        let counted = ends.clone();
        let addr = sim.serve(server(Limits::default()).shards(1), move |_shard| {
            let counted = counted.clone();
            let limited = ConcurrencyLimit::new(TimeLimit::new(Store::default(), Duration::from_secs(5)), 3);
            let told = move |_: &Cx<'_, Session>, end: CallEnd<'_, TimeLimitError<&'static str>>| {
                assert!(matches!(end, CallEnd::Done), "{end}");
                counted.set(counted.get() + 1);
            };
            with_heads(Observe::new(limited, told))
        });
        sim.client("a", async move |net| {
            let mut me = net.connect(addr).await?;
            me.send("put 3\nabcframes\n\0\0\0\x01a").await?;
            assert_eq!(me.line().await?, Some(format!("3 bytes, {}", sum_of(b"abc"))));
            assert_eq!(me.line().await?, Some(format!("a frame of 1 bytes, {}", sum_of(b"a"))));
            Ok(())
        });
        sim.run_until_done();
        sim.finish();
        assert!(ends.get() >= 4);
    });
}
