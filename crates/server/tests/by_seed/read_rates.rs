//! Peers that send faster than they may, by seed: against a model of all that their service got,
//! and when.

use std::cell::RefCell;
use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;

use ringserve_server::framing::LengthPrefix;
use ringserve_server::limits::{ConnLimits, ReadRateAction};
use ringserve_server::stats::ConnStats;
use ringserve_server::testing::{Faults, Sim, SimServer};
use ringserve_server::{CloseCx, CloseReason, Cx, Frame, Limits, Server, Service, Shard};

/// Bytes on the wire before the payload of a frame.
const HEAD: usize = 4;

/// Frames of one connection at the service: the nanosecond of the turn, and the bytes on the wire.
type Got = Vec<(u64, usize)>;

/// Notes what comes, and says it again. `m` in front sets limits of the connection's own: of
/// frames, in the next two bytes.
struct Paced {
    shard: Shard,
    got: Rc<RefCell<Vec<(String, Got)>>>,
    ends: Rc<RefCell<Vec<CloseReason>>>,
}

impl Service for Paced {
    type Session = ();
    type Error = Infallible;

    fn close(&self, closed: &CloseCx<'_, ()>) {
        self.ends.borrow_mut().push(closed.reason());
    }

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        let now = self.shard.now().as_nanos();
        let who = format!("{:?}", cx.peer());
        let mut got = self.got.borrow_mut();
        match got.iter_mut().find(|(of, _)| *of == who) {
            Some((_, got)) => got.push((now, HEAD + frame.len())),
            None => got.push((who, vec![(now, HEAD + frame.len())])),
        }
        if frame.first() == Some(&b'm') {
            let frames = u16::from_be_bytes([frame[1], frame[2]]).into();
            cx.set_limits(&ConnLimits::default().read_frames_per_second_max(frames)).expect("limits");
        }
        cx.reply(frame);
        Ok(())
    }
}

#[derive(Clone, Default)]
struct Seen {
    got: Rc<RefCell<Vec<(String, Got)>>>,
    ends: Rc<RefCell<Vec<CloseReason>>>,
}

fn start(sim: &Sim, limits: Limits, seen: &Seen) -> SimServer {
    let server = Server::bind("10.0.0.1:7000").framing(LengthPrefix::default()).limits(limits).shards(1);
    let Seen { got, ends } = seen.clone();
    sim.start(server, move |shard| Paced { shard: shard.clone(), got: got.clone(), ends: ends.clone() })
        .expect("it starts")
}

fn frame(first: u8, len: usize) -> Vec<u8> {
    let mut frame = (len as u32).to_be_bytes().to_vec();
    frame.resize(HEAD + len, first);
    frame
}

/// Panics if in any time of `t` seconds more than `frames × (1 + t)` frames reached the service, or
/// more than `bytes × (1 + t)` bytes of all but the last of them.
fn check(got: &Got, frames: u32, bytes: usize) {
    for (from, (began, _)) in got.iter().enumerate() {
        let mut sum = 0;
        for (n, (at, len)) in got[from..].iter().enumerate() {
            let seconds = 1.0 + (at - began) as f64 / 1e9;
            if frames > 0 {
                let most = f64::from(frames) * seconds + 1e-6;
                assert!((n + 1) as f64 <= most, "{} frames in {seconds} s, {most} are allowed", n + 1);
            }
            if bytes > 0 {
                let most = bytes as f64 * seconds;
                assert!(f64::from(sum) < most, "{sum} bytes and a frame in {seconds} s, {most} are allowed");
            }
            sum += *len as u32;
        }
    }
}

/// The least time for `lens`, if they come at once: each waits until a whole frame, and any byte,
/// are left of the allowance, of which a second's worth is kept.
fn ideal(lens: &[usize], frames: u32, bytes: usize) -> Duration {
    let (mut now, mut frames_left, mut bytes_left) = (0.0, f64::from(frames), bytes as f64);
    for len in lens {
        let missing = |left: f64, wanted: f64, rate: f64| {
            if rate > 0.0 { ((wanted - left) / rate).max(0.0) } else { 0.0 }
        };
        let wait = missing(frames_left, 1.0, frames.into()).max(missing(bytes_left, 0.0, bytes as f64));
        now += wait;
        frames_left = (frames_left + wait * f64::from(frames)).min(frames.into()) - 1.0;
        bytes_left = (bytes_left + wait * bytes as f64).min(bytes as f64) - (HEAD + len) as f64;
    }
    Duration::from_secs_f64(now)
}

fn counters(server: &SimServer) -> ConnStats {
    server.stats().counters
}

#[test]
fn frames_beyond_a_rate_wait_and_none_is_lost() {
    let seeds = if cfg!(debug_assertions) { 75 } else { 2000 };
    Sim::seeds(seeds).faults(Faults::none()).run(|sim| {
        let draw = |below: u64| sim.random() % below;
        let frames = [0, 1, 5, 40, 300][draw(5) as usize];
        let bytes = if frames == 0 || draw(2) == 0 { [300, 2000, 50_000][draw(3) as usize] } else { 0 };
        let limits = Limits::default()
            .read_frames_per_second_max(frames)
            .read_bytes_per_second_max(bytes)
            .inbox_bytes_high(500 << draw(8))
            .idle_timeout(Duration::from_secs(2))
            .calls_in_flight_max(1 + draw(3) as u16);
        let seen = Seen::default();
        let server = start(sim, limits, &seen);
        let addr = server.addr();
        for n in 0..3 {
            sim.client(format!("c{n}"), async move |net| {
                let draw = |below: u64| net.random() % below;
                let mut me = net.connect(addr).await?;
                let most = if frames > 0 { 4 * frames } else { 60 };
                let lens: Vec<usize> = (0..1 + draw(most.min(900).into()))
                    .map(|_| [0, 7, 100, 3000][draw(4) as usize])
                    .collect();
                let all: Vec<u8> = lens.iter().flat_map(|len| frame(b'x', *len)).collect();
                let began = net.now();
                me.send(&all).await?;
                if draw(2) == 0 {
                    me.finish()?;
                }
                assert!(me.exactly(all.len()).await? == all, "the frames come back in their order");
                let (took, ideal) = (net.now() - began, ideal(&lens, frames, bytes));
                // A frame is up to three steps late, and that is given back by the next one only
                // where a second's worth is kept.
                let late = Duration::from_millis(100 + if frames == 1 { 60 * lens.len() as u64 } else { 0 });
                assert!(took + Duration::from_millis(1) >= ideal, "{took:?}, at least {ideal:?}");
                assert!(took <= ideal + late, "{took:?}, and it may be {ideal:?}: {lens:?}");
                Ok(())
            });
        }
        sim.run_until_done();
        sim.finish();
        for (_, got) in seen.got.borrow().iter() {
            check(got, frames, bytes);
        }
        let held = counters(&server).reads_held;
        assert_eq!(
            held > 0,
            seen.got.borrow().iter().any(|(_, got)| got[0].0 + 100_000_000 < got[got.len() - 1].0)
        );
    });
}

#[test]
fn no_fault_lets_more_frames_through() {
    let seeds = if cfg!(debug_assertions) { 50 } else { 1000 };
    Sim::seeds(seeds).faults(Faults::all()).run(|sim| {
        let limits = Limits::default()
            .read_frames_per_second_max(20)
            .read_bytes_per_second_max(4000)
            .first_frame_timeout(None)
            .inbox_bytes_high(2048);
        let seen = Seen::default();
        let server = start(sim, limits, &seen);
        let addr = server.addr();
        sim.expect_losses();
        for n in 0..4 {
            sim.client(format!("c{n}"), async move |net| {
                let Ok(mut me) = net.connect(addr).await else { return Ok(()) };
                for _ in 0..net.random() % 30 {
                    let burst: Vec<u8> = (0..net.random() % 12)
                        .flat_map(|_| frame(b'x', (net.random() % 900) as usize))
                        .collect();
                    let cut = (net.random() % (burst.len() as u64 + 1)) as usize;
                    for part in [&burst[..cut], &burst[cut..]] {
                        if me.send(part).await.is_err() {
                            return Ok(());
                        }
                        net.sleep(Duration::from_millis(net.random() % 700)).await;
                    }
                }
                Ok(())
            });
        }
        sim.run_for(Duration::from_secs(120));
        sim.finish();
        for (_, got) in seen.got.borrow().iter() {
            check(got, 20, 4000);
        }
    });
}

#[test]
fn peer_that_sends_too_fast_is_closed_where_that_is_asked() {
    Sim::seeds(40).faults(Faults::none()).run(|sim| {
        let limits =
            Limits::default().read_frames_per_second_max(10).when_read_too_fast(ReadRateAction::Close);
        let seen = Seen::default();
        let server = start(sim, limits, &seen);
        let addr = server.addr();
        sim.client("fast", async move |net| {
            let mut me = net.connect(addr).await?;
            me.send((0..40).flat_map(|_| frame(b'x', 5)).collect::<Vec<u8>>()).await?;
            // The replies to what it might send come first.
            assert_eq!(me.closed().await?.len(), 10 * (HEAD + 5));
            Ok(())
        });
        sim.client("slow", async move |net| {
            let mut me = net.connect(addr).await?;
            for _ in 0..30 {
                me.send(frame(b'y', 5)).await?;
                me.exactly(HEAD + 5).await?;
                net.sleep(Duration::from_millis(100)).await;
            }
            Ok(())
        });
        sim.run_until_done();
        sim.finish();
        let mut ends = seen.ends.borrow().clone();
        ends.sort_by_key(|end| end.name());
        assert_eq!(ends, [CloseReason::PeerClosed, CloseReason::ReadTooFast]);
        assert_eq!(counters(&server).reads_held, 0);
    });
}

#[test]
fn connection_has_a_rate_of_its_own_and_gives_it_back() {
    Sim::seeds(40).faults(Faults::none()).run(|sim| {
        let seen = Seen::default();
        let server = start(sim, Limits::default(), &seen);
        let addr = server.addr();
        sim.client("me", async move |net| {
            let mut me = net.connect(addr).await?;
            let timed = async |me: &mut ringserve_server::testing::ClientStream, bytes: Vec<u8>| {
                let began = net.now();
                me.send(&bytes).await.expect("it takes them");
                me.exactly(bytes.len()).await.expect("they come back");
                net.now() - began
            };
            let many: Vec<u8> = (0..30).flat_map(|_| frame(b'x', 3)).collect();
            let limit = |frames: u16| {
                let mut set = frame(b'm', 3);
                set[HEAD + 1..].copy_from_slice(&frames.to_be_bytes());
                set
            };
            assert!(timed(&mut me, many.clone()).await < Duration::from_millis(200), "without a limit");
            timed(&mut me, limit(10)).await;
            let took = timed(&mut me, many.clone()).await;
            assert!((2000..2400).contains(&took.as_millis()), "{took:?}");
            // One more waits for its turn, and lifts the limit.
            timed(&mut me, limit(0)).await;
            assert!(timed(&mut me, many.clone()).await < Duration::from_millis(200), "without one again");
            Ok(())
        });
        sim.run_until_done();
        sim.finish();
        assert!(counters(&server).reads_held > 0);
    });
}

#[test]
fn drain_lets_what_waits_for_its_rate_go() {
    Sim::seeds(40).faults(Faults::none()).run(|sim| {
        let limits = Limits::default().read_frames_per_second_max(1);
        let seen = Seen::default();
        let server = start(sim, limits, &seen);
        let addr = server.addr();
        sim.client("me", async move |net| {
            let mut me = net.connect(addr).await?;
            me.send((0..100).flat_map(|_| frame(b'x', 3)).collect::<Vec<u8>>()).await?;
            me.exactly(3 * (HEAD + 3)).await?;
            let rest = me.closed().await?;
            assert_eq!(rest.len(), 97 * (HEAD + 3), "every frame that was received is answered");
            assert!(net.now() < Duration::from_secs(8), "{:?}", net.now());
            Ok(())
        });
        sim.run_for(Duration::from_millis(4500));
        server.drain();
        sim.run_until_done();
        sim.finish();
        assert_eq!(*seen.ends.borrow(), [CloseReason::Shutdown]);
    });
}
