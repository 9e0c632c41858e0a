//! Services over codecs by seed: the end of the input, heartbeats, pushes, what is held.

use std::cell::{Cell, RefCell};
use std::fmt::Display;
use std::rc::Rc;
use std::time::Duration;

use ringserve_server::codec::{CodecCx, CodecError, CodecHandle, CodecPushError, CodecService, WithCodec};
use ringserve_server::limits::ServerLimits;
use ringserve_server::middleware::{ConcurrencyLimit, TimeLimit};
use ringserve_server::testing::{Faults, Sim};
use ringserve_server::{CloseCx, CloseReason, Limits, PushError, Server};
use tokio_util::bytes::BytesMut;
use tokio_util::codec::{LengthDelimitedCodec, LinesCodec, LinesCodecError};

const ADDR: &str = "10.0.0.1:7000";

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// The fates of connections, and handles on them.
#[derive(Clone, Default)]
struct Seen {
    ends: Rc<RefCell<Vec<CloseReason>>>,
    heartbeats: Rc<Cell<u32>>,
    handles: Rc<RefCell<Vec<CodecHandle<LinesCodec>>>>,
}

/// Answers each line after a while. `hold` keeps the connection open, and says so at the peer's
/// end.
struct Slow {
    seen: Seen,
    codec: LinesCodec,
}

impl CodecService for Slow {
    type Codec = LinesCodec;
    type Session = ();
    type Error = LinesCodecError;

    fn codec(&self) -> LinesCodec {
        self.codec.clone()
    }

    async fn call(&self, cx: &CodecCx<'_, Self>, line: String) -> Result<(), LinesCodecError> {
        if line == "hold" {
            cx.hold_open();
        }
        if line == "subscribe" {
            self.seen.handles.borrow_mut().push(cx.item_handle());
        }
        cx.sleep(millis(cx.shard().random() % 3 * 20)).await;
        cx.reply(format!("{line}!"))
    }

    fn malformed(&self, cx: &CodecCx<'_, Self>, error: &CodecError<LinesCodecError>) {
        let _ = cx.reply(error.to_string());
    }

    fn heartbeat(&self, cx: &CodecCx<'_, Self>) {
        self.seen.heartbeats.set(self.seen.heartbeats.get() + 1);
        cx.reply("alive?").expect("a line");
    }

    fn input_ended(&self, cx: &CodecCx<'_, Self>) {
        cx.reply("you ended").expect("a line");
        cx.close();
    }

    fn close(&self, closed: &CloseCx<'_, ()>) {
        self.seen.ends.borrow_mut().push(closed.reason());
    }
}

fn serve(sim: &Sim, limits: Limits, codec: &LinesCodec) -> (ringserve_server::testing::SimServer, Seen) {
    let (seen, codec) = (Seen::default(), codec.clone());
    let of_server = seen.clone();
    let server = Server::bind(ADDR).shards(1).limits(limits.outbox_bytes_max(2 << 20));
    let server = server.server_limits(ServerLimits::default().held_bytes_max(4 << 20));
    let server = sim
        .start(server, move |_shard| WithCodec::new(Slow { seen: of_server.clone(), codec: codec.clone() }));
    (server.expect("it starts"), seen)
}

#[test]
fn last_line_without_an_end_is_answered_behind_the_others() {
    Sim::seeds(if cfg!(debug_assertions) { 200 } else { 1000 }).faults(Faults::harmless()).run(|sim| {
        let calls = [1, 4][sim.seed() as usize % 2];
        let limits = Limits::default().calls_in_flight_max(calls);
        let (server, seen) = serve(sim, limits, &LinesCodec::new());
        let lines = 1 + sim.random() % 5;
        sim.client("half", async move |net| {
            let mut me = net.connect(ADDR).await?;
            let (mut sent, mut expected) = (String::new(), String::new());
            for n in 0..lines {
                sent += &format!("line {n}\n");
                expected += &format!("line {n}!\n");
            }
            for piece in (sent + "last").as_bytes().chunks(1 + net.random() as usize % 20) {
                me.send(piece).await?;
                net.sleep(millis(net.random() % 2 * 15)).await;
            }
            me.finish()?;
            let said = String::from_utf8(me.closed().await?)?;
            assert_eq!(said.lines().count() as u64, lines + 1);
            assert!(said.ends_with("last!\n"), "{said}");
            assert!(calls > 1 || said == expected + "last!\n", "{said}");
            Ok(())
        });
        sim.run_until_done();
        assert!(sim.run_until(millis(60_000), || server.stats().connections == 0));
        assert_eq!(*seen.ends.borrow(), [CloseReason::PeerClosed]);
    });
}

#[test]
fn peer_that_ends_between_items_or_says_nothing_is_only_closed() {
    Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
        let (_server, seen) = serve(sim, Limits::default(), &LinesCodec::new());
        for sent in ["", "a\n"] {
            sim.client(format!("sends {sent:?}"), async move |net| {
                let mut me = net.connect(ADDR).await?;
                me.send(sent).await?;
                me.finish()?;
                let said = me.closed().await?;
                assert_eq!(said, if sent.is_empty() { &b""[..] } else { b"a!\n" });
                Ok(())
            });
        }
        sim.run_until_done();
        sim.run_for(millis(5000));
        assert_eq!(*seen.ends.borrow(), [CloseReason::PeerClosed; 2]);
    });
}

#[test]
fn held_connection_hears_of_the_end_after_its_last_item() {
    Sim::seeds(100).faults(Faults::harmless()).run(|sim| {
        let (_server, seen) = serve(sim, Limits::default(), &LinesCodec::new());
        sim.client("half", async move |net| {
            let mut me = net.connect(ADDR).await?;
            me.send("hold\nlast").await?;
            me.finish()?;
            assert_eq!(me.closed().await?, b"hold!\nlast!\nyou ended\n");
            Ok(())
        });
        sim.run_until_done();
        sim.run_for(millis(1000));
        assert_eq!(*seen.ends.borrow(), [CloseReason::PeerClosed]);
    });
}

/// The decoder refuses a rest that is no UTF-8.
#[test]
fn rest_that_the_decoder_refuses_is_malformed_and_unfinished() {
    Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
        let (_server, seen) = serve(sim, Limits::default(), &LinesCodec::new());
        sim.client("half", async move |net| {
            let mut me = net.connect(ADDR).await?;
            me.send(b"first\n\xFF\xFE").await?;
            me.finish()?;
            let said = String::from_utf8(me.closed().await?)?;
            assert!(said.starts_with("first!\nunfinished item: "), "{said}");
            Ok(())
        });
        sim.run_until_done();
        sim.run_for(millis(1000));
        assert_eq!(seen.ends.borrow().len(), 1);
    });
}

#[test]
fn silent_peer_is_asked_by_an_item() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let limits = Limits::default().heartbeat_interval(millis(1000));
        let (_server, seen) = serve(sim, limits, &LinesCodec::new());
        sim.client("silent", async move |net| {
            let mut me = net.connect(ADDR).await?;
            me.send("a\n").await?;
            assert_eq!(me.line().await?.as_deref(), Some("a!"));
            assert_eq!(me.line().await?.as_deref(), Some("alive?"));
            Ok(())
        });
        sim.run_until_done();
        assert!(seen.heartbeats.get() >= 1);
    });
}

#[test]
fn pushes_are_encoded_until_the_peer_is_slow_or_gone() {
    Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
        let limits = Limits::default().outbox_bytes_high(20_000).outbox_bytes_low(5_000);
        let (server, seen) = serve(sim, limits, &LinesCodec::new());
        sim.client("subscriber", async |net| {
            let mut me = net.connect(ADDR).await?;
            me.send("subscribe\n").await?;
            assert_eq!(me.line().await?.as_deref(), Some("subscribe!"));
            assert_eq!(me.line().await?.as_deref(), Some("news 0"));
            me.hold();
            net.sleep(millis(20_000)).await;
            me.release();
            let mut next = 1;
            while let Some(line) = net.timeout(millis(5000), me.line()).await.ok().transpose()?.flatten() {
                assert_eq!(line.split(' ').nth(1), Some(&*next.to_string()));
                next += 1;
            }
            assert!(next > 20, "{next} came");
            Ok(())
        });
        sim.run_until(millis(5000), || !seen.handles.borrow().is_empty());
        sim.run_for(millis(500));
        let handle = seen.handles.borrow()[0].clone();
        handle.push("news 0").expect("there is room");
        sim.run_for(millis(5000));
        for n in 1.. {
            match handle.push(format!("news {n} {}", "x".repeat(1000))) {
                Ok(()) => sim.run_for(millis(1)),
                Err(error) => {
                    assert!(matches!(error, CodecPushError::Push(PushError::Full)), "{error}");
                    break;
                }
            }
            assert!(n < 2000, "it is never full");
        }
        sim.run_until_done();
        assert!(sim.run_until(millis(60_000), || server.stats().connections == 0));
        let error = handle.push("late").unwrap_err();
        assert!(matches!(error, CodecPushError::Push(PushError::Gone)), "{error}");
    });
}

#[test]
fn drain_does_not_wait_for_an_unfinished_item() {
    Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
        let (server, seen) = serve(sim, Limits::default(), &LinesCodec::new());
        sim.background("half", async |net| {
            let mut me = net.connect(ADDR).await?;
            me.send("whole\nhalf").await?;
            let _ = me.closed().await;
            Ok(())
        });
        sim.run_for(millis(5000));
        server.drain();
        assert!(sim.run_until(millis(3000), || server.is_done()), "nothing is owed");
        assert_eq!(*seen.ends.borrow(), [CloseReason::Shutdown]);
    });
}

#[test]
fn starts_of_items_count_as_held_memory() {
    Sim::seeds(10).run(|sim| {
        let (server, _seen) = serve(sim, Limits::default().first_frame_timeout(None), &LinesCodec::new());
        for n in 0..8 {
            sim.background(format!("c{n}"), async |net| {
                let mut me = net.connect(ADDR).await?;
                let _ = me.send(vec![b'x'; 900_000]).await;
                let _ = me.closed().await;
                Ok(())
            });
        }
        sim.expect_losses();
        sim.run_for(millis(20_000));
        let for_memory = server.stats().counters.closed_for(CloseReason::MemoryLimit);
        assert!((3..=6).contains(&for_memory), "{for_memory} went");
    });
}

/// Notes the order in which items begin, and answers each after a while.
struct Numbered(Rc<RefCell<Vec<u64>>>);

impl CodecService for Numbered {
    type Codec = LinesCodec;
    type Session = ();
    type Error = LinesCodecError;

    fn codec(&self) -> LinesCodec {
        LinesCodec::new()
    }

    async fn call(&self, cx: &CodecCx<'_, Self>, line: String) -> Result<(), LinesCodecError> {
        self.0.borrow_mut().push(line.trim_end_matches('x').parse().expect("a number"));
        cx.sleep(millis(cx.shard().random() % 4 * 10)).await;
        cx.reply(format!("{line}{}", "y".repeat(cx.shard().random() as usize % 2000)))
    }
}

#[test]
fn items_of_several_calls_at_once_begin_in_their_order() {
    const LINES: u64 = 60;
    Sim::seeds(if cfg!(debug_assertions) { 100 } else { 1000 }).faults(Faults::harmless()).run(|sim| {
        let begun = Rc::new(RefCell::new(Vec::new()));
        let seen = begun.clone();
        let calls = 2 + (sim.seed() % 4) as u16;
        let limits = Limits::default().calls_in_flight_max(calls);
        let limits = limits.outbox_bytes_high(4000).outbox_bytes_low(1000);
        let server = Server::bind(ADDR).shards(1).limits(limits);
        sim.start(server, move |_shard| WithCodec::new(Numbered(seen.clone()))).expect("it starts");
        sim.client("sends", async move |net| {
            let mut me = net.connect(ADDR).await?;
            let lines: String =
                (0..LINES).map(|n| format!("{n}{}\n", "x".repeat(net.random() as usize % 9))).collect();
            for piece in lines.as_bytes().chunks(1 + net.random() as usize % 40) {
                me.send(piece).await?;
                net.sleep(millis(net.random() % 2 * 7)).await;
            }
            me.finish()?;
            let said = String::from_utf8(me.closed().await?)?;
            assert_eq!(said.lines().count() as u64, LINES);
            Ok(())
        });
        sim.run_until_done();
        assert_eq!(*begun.borrow(), Vec::from_iter(0..LINES));
    });
}

#[test]
fn pieces_that_would_lose_their_order_are_refused_at_the_start() {
    let sim_of = |calls: u16, waits: bool| {
        let outcome = Rc::new(RefCell::new(None));
        let told = outcome.clone();
        Sim::seeds(1).run(move |sim| {
            let server = Server::bind(ADDR).shards(1).limits(Limits::default().calls_in_flight_max(calls));
            let service = || WithCodec::new(Numbered(Rc::default()));
            let started = match waits {
                true => sim.start(server, move |_| ConcurrencyLimit::new(service(), 8)).map(drop),
                false => sim.start(server, move |_| TimeLimit::new(service(), millis(1000))).map(drop),
            };
            *told.borrow_mut() = Some(started.map_err(|error| error.to_string()));
        });
        outcome.take().expect("it was tried")
    };
    assert_eq!((sim_of(1, true), sim_of(4, false)), (Ok(()), Ok(())));
    let error = sim_of(4, true).unwrap_err();
    assert!(error.contains("a middleware around a codec lets calls wait, is 4; it must be 1"), "{error}");
}

/// Holds each item until the test ends.
struct Keeps;

impl CodecService for Keeps {
    type Codec = LengthDelimitedCodec;
    type Session = ();
    type Error = std::io::Error;

    fn codec(&self) -> LengthDelimitedCodec {
        LengthDelimitedCodec::new()
    }

    async fn call(&self, cx: &CodecCx<'_, Self>, item: BytesMut) -> Result<(), std::io::Error> {
        cx.sleep(millis(100_000)).await;
        drop(item);
        Ok(())
    }
}

#[test]
fn bytes_behind_an_item_whose_call_waits_count() {
    const PEERS: usize = 20;
    // What is behind the item, and what a connection holds at least and at most. A small item is a
    // part of a buffer.
    for (behind, least, most) in
        [(0, 16 << 10, 20 << 10), (3000, 19 << 10, 24 << 10), (15_000, 15_000, 20 << 10)]
    {
        Sim::seeds(1).run(|sim| {
            let server = Server::bind(ADDR).shards(1);
            let server = sim.start(server, |_shard| WithCodec::new(Keeps)).expect("it starts");
            for n in 0..PEERS {
                sim.background(format!("c{n}"), async move |net| {
                    let mut me = net.connect(ADDR).await?;
                    let first = [&10u32.to_be_bytes()[..], &[b'x'; 10]].concat();
                    me.send([&first[..], &0xFFFFu32.to_be_bytes(), &vec![b'y'; behind]].concat()).await?;
                    let _ = me.closed().await;
                    Ok(())
                });
            }
            sim.expect_losses();
            sim.run_for(millis(5000));
            let held = server.stats().shards[0].held_bytes / PEERS;
            assert!((least..=most).contains(&held), "{held} bytes each with {behind} behind an item");
        });
    }
}

#[test]
fn errors_say_what_happened() {
    fn says(error: impl Display) -> String {
        error.to_string()
    }
    assert_eq!(says(CodecError::Unfinished("bytes are left")), "unfinished item: bytes are left");
    assert_eq!(says(CodecPushError::Encoder("no line")), "no line");
    assert_eq!(says(CodecPushError::<String>::Push(PushError::Gone)), "the connection ended");
}
