//! Frames that a service sheds, in simulations by seed.

use std::cell::Cell;
use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;

use ringserve_server::codec::{CodecCx, CodecService, WithCodec};
use ringserve_server::framing::Lines;
use ringserve_server::middleware::{CallEnd, ConcurrencyLimit, Observe, TimeLimit, TimeLimitError};
use ringserve_server::overload::{Load, Shed};
use ringserve_server::testing::SimServer;
use ringserve_server::testing::{Faults, Sim};
use ringserve_server::{Cx, Frame, Server, Service, Shard, Stream, stream};
use tokio_util::codec::{LinesCodec, LinesCodecError};

/// Says each line again, some after a while, or that it is busy. Lines that begin with "!" are
/// always served.
#[derive(Clone, Default)]
struct Echo {
    shed: Rc<Cell<u64>>,
    called: Rc<Cell<u64>>,
}

impl Service for Echo {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        self.called.set(self.called.get() + 1);
        if cx.shard().random().is_multiple_of(4) {
            cx.sleep(Duration::from_millis(cx.shard().random() % 50)).await;
        }
        cx.reply(line);
        Ok(())
    }

    fn shed(&self, cx: &Cx<'_, ()>, line: &Frame, load: Load) -> Shed {
        assert!(load >= Load::Shedding && cx.load() == load);
        if line.starts_with(b"!") {
            return Shed::Serve;
        }
        self.shed.set(self.shed.get() + 1);
        cx.reply_parts([&b"busy "[..], &line[..]]);
        Shed::Answered
    }
}

/// The same over a codec: each line is an item.
impl CodecService for Echo {
    type Codec = LinesCodec;
    type Session = ();
    type Error = LinesCodecError;

    fn codec(&self) -> LinesCodec {
        LinesCodec::new_with_max_length(100)
    }

    async fn call(&self, cx: &CodecCx<'_, Self>, line: String) -> Result<(), LinesCodecError> {
        self.called.set(self.called.get() + 1);
        if cx.shard().random().is_multiple_of(4) {
            cx.sleep(Duration::from_millis(cx.shard().random() % 50)).await;
        }
        cx.reply(line)
    }

    fn shed(&self, cx: &CodecCx<'_, Self>, line: &String, load: Load) -> Shed {
        assert!(load >= Load::Shedding && cx.load() == load);
        if line.starts_with('!') {
            return Shed::Serve;
        }
        self.shed.set(self.shed.get() + 1);
        cx.reply(format!("busy {line}")).expect("a line");
        Shed::Answered
    }
}

/// The same as a stream.
async fn echo_lines(echo: Echo, shard: Shard, mut stream: Stream) -> std::io::Result<()> {
    let mut kept = Vec::new();
    while let Some(bytes) = stream.read_frame().await? {
        kept.extend_from_slice(&bytes);
        while let Some(end) = kept.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = kept.drain(..=end).collect();
            if !line.starts_with(b"!") && stream.sheds() {
                assert!(stream.load() >= Load::Shedding);
                echo.shed.set(echo.shed.get() + 1);
                stream.queue("busy ");
            } else {
                echo.called.set(echo.called.get() + 1);
                if shard.random().is_multiple_of(4) {
                    shard.sleep(Duration::from_millis(shard.random() % 50)).await;
                }
            }
            stream.queue(line);
        }
    }
    Ok(())
}

/// Clients that send 40 lines each and hear of each line once, in its order, while the load goes up
/// and down. Returns what all of them heard.
fn ask_under_load(sim: &Sim, running: &SimServer) -> u64 {
    let (addr, all) = (running.addr(), Rc::new(Cell::new(0)));
    for n in 0..5 {
        let all = all.clone();
        sim.client(format!("c{n}"), async move |net| {
            let Ok(mut me) = net.connect(addr).await else { return Ok(()) };
            for line in 0..40 {
                let urgent = if line % 10 == 0 { "!" } else { "" };
                let line = format!("{urgent}{n}.{line}");
                me.send(format!("{line}\n")).await?;
            }
            for line in 0..40 {
                let urgent = line % 10 == 0;
                let Some(answer) = me.line().await? else { return Ok(()) };
                let served = format!("{}{n}.{line}", if urgent { "!" } else { "" });
                assert!(answer == served || !urgent && answer == format!("busy {served}"), "{answer}");
                all.set(all.get() + 1);
            }
            Ok(())
        });
    }
    for (load, share) in [(Load::Shedding, 0.5), (Load::Busy, 1.0), (Load::Refusing, 1.0), (Load::Full, 0.3)]
    {
        running.set_load(load, share);
        sim.run_for(Duration::from_millis(sim.random() % 60));
    }
    running.set_load(Load::Calm, 0.0);
    sim.run_until_done();
    sim.finish();
    all.get()
}

#[test]
fn each_frame_is_served_or_shed_once_and_in_its_order() {
    let shed = Cell::new(0);
    Sim::seeds(60).faults(Faults::all()).run(|sim| {
        let echo = Echo::default();
        let made = echo.clone();
        let server = Server::bind("10.0.0.1:7000").framing(Lines::default()).shards(2);
        let running = sim
            .start(server, move |_shard| {
                // The layers hand the question on.
                let limited = ConcurrencyLimit::new(made.clone(), 100);
                Observe::new(
                    TimeLimit::new(limited, Duration::from_secs(60)),
                    |_: &Cx<'_, ()>, _: CallEnd<'_, TimeLimitError<Infallible>>| {},
                )
            })
            .expect("the server starts");
        let heard = ask_under_load(sim, &running);
        let stats = running.stats();
        assert_eq!(stats.counters.frames_shed, echo.shed.get());
        assert_eq!(stats.counters.frames, echo.shed.get() + echo.called.get());
        assert!(stats.counters.frames >= heard);
        shed.set(shed.get() + echo.shed.get());
    });
    assert!(shed.get() > 100, "{}", shed.get());
}

#[test]
fn each_item_is_served_or_shed_once_and_in_its_order() {
    let shed = Cell::new(0);
    Sim::seeds(60).faults(Faults::all()).run(|sim| {
        let echo = Echo::default();
        let made = echo.clone();
        let server = Server::bind("10.0.0.1:7000").shards(2);
        let running =
            sim.start(server, move |_shard| WithCodec::new(made.clone())).expect("the server starts");
        let heard = ask_under_load(sim, &running);
        assert_eq!(running.stats().counters.frames_shed, echo.shed.get());
        assert!(echo.shed.get() + echo.called.get() >= heard);
        shed.set(shed.get() + echo.shed.get());
    });
    assert!(shed.get() > 100, "{}", shed.get());
}

#[test]
fn each_request_of_a_stream_is_served_or_shed_once() {
    let shed = Cell::new(0);
    Sim::seeds(60).faults(Faults::all()).run(|sim| {
        let echo = Echo::default();
        let made = echo.clone();
        let server = Server::bind("10.0.0.1:7000").shards(2);
        let running = sim
            .start(server, move |shard| {
                let (echo, shard) = (made.clone(), shard.clone());
                stream(async move |stream: Stream| echo_lines(echo.clone(), shard.clone(), stream).await)
            })
            .expect("the server starts");
        let heard = ask_under_load(sim, &running);
        assert_eq!(running.stats().counters.frames_shed, echo.shed.get());
        assert!(echo.shed.get() + echo.called.get() >= heard);
        shed.set(shed.get() + echo.shed.get());
    });
    assert!(shed.get() > 100, "{}", shed.get());
}
