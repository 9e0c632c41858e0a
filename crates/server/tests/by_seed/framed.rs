//! Clients of frames by seed: pieces of any size, ends in all places, peers that do not read, calls
//! that are given up.

use std::cell::{Cell, RefCell};
use std::error::Error;
use std::future::{Future, poll_fn};
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use ringserve_server::framing::{EncodeError, Fixed, FrameError, Framing, LengthPrefix, Lines};
use ringserve_server::limits::ServerLimits;
use ringserve_server::net::{Framed, FramedError};
use ringserve_server::testing::{ClientResult, ClientStream, Faults, Net, Sim, SimServer};
use ringserve_server::{CloseReason, Frame, Limits, Server, Shard, Stream, stream};

const UPSTREAM: ([u8; 4], u16) = ([10, 0, 0, 2], 9000);

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// A server whose shard runs `client` once, and the number of times that it ended.
fn with_client<C, F>(sim: &Sim, limits: Limits, client: C) -> (SimServer, Rc<Cell<u32>>)
where
    C: Fn(Shard) -> F + 'static,
    F: Future<Output = ()> + 'static,
{
    let done: Rc<Cell<u32>> = Rc::default();
    let ended = done.clone();
    let server = Server::bind("10.0.0.1:7000").shards(1).limits(limits.outbox_bytes_max(2 << 20));
    let server = server.server_limits(ServerLimits::default().held_bytes_max(4 << 20));
    let server = sim.start(server, move |shard: &Shard| {
        let (client, ended) = (client(shard.clone()), ended.clone());
        shard.spawn(async move {
            client.await;
            ended.set(ended.get() + 1);
        });
        stream(async |_stream: Stream| {})
    });
    (server.expect("it starts"), done)
}

/// A peer that accepts one connection.
fn with_peer<F>(sim: &Sim, peer: impl FnOnce(Net, ClientStream) -> F + 'static)
where
    F: Future<Output = ClientResult> + 'static,
{
    sim.client("upstream", async move |net| {
        let stream = net.listen(SocketAddr::from(UPSTREAM))?.accept().await;
        peer(net, stream).await
    });
}

/// Retries until the peer listens.
async fn connect<F: Framing>(shard: &Shard, framing: F) -> Framed<F> {
    loop {
        match shard.connect(SocketAddr::from(UPSTREAM)).await {
            Ok(stream) => return stream.framed(framing),
            Err(_) => shard.sleep(millis(10)).await,
        }
    }
}

fn payload(n: u64, len: u64) -> Vec<u8> {
    vec![b'a' + (n % 26) as u8; len as usize]
}

/// Sends bytes in pieces of any size, some of them late.
async fn send_in_pieces(net: &Net, stream: &mut ClientStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let most = [1, 7, 600, 40_000][net.random() as usize % 4].min(bytes.len() as u64);
        let (piece, rest) = bytes.split_at(1 + (net.random() % most) as usize);
        stream.send(piece).await?;
        if net.random().is_multiple_of(3) {
            net.sleep(millis(net.random() % 20)).await;
        }
        bytes = rest;
    }
    Ok(())
}

/// Asks and reads at once, through both halves.
async fn converse<F: Framing>(shard: Shard, framing: F, len_of: fn(u64) -> u64) {
    let (count, salt) = (1 + shard.random() % 40, shard.random());
    let len = move |n: u64| len_of(salt.wrapping_mul(n + 1) >> 7);
    let (mut reader, writer) = connect(&shard, framing).await.split();
    let high = Limits::default().outbox_bytes_high(20_000).outbox_bytes_high;
    let sends = shard.spawn(async move {
        for n in 0..count {
            let payload = payload(n, len(n));
            writer.send(&payload).await.expect("there is room in the end");
            let queued = writer.stream().outbox_bytes();
            assert!(queued <= high + payload.len() + 10, "{queued} bytes are queued");
        }
        writer
    });
    for n in 0..count {
        // A call that is given up loses nothing.
        let frame = loop {
            match shard.timeout(millis(1 + shard.random() % 30), reader.next()).await {
                Ok(next) => break next.expect("a frame").expect("a sound one"),
                Err(_elapsed) => continue,
            }
        };
        assert!(*frame == payload(n, len(n)), "frame {n} is {frame:?}");
        if shard.random().is_multiple_of(8) {
            shard.sleep(millis(shard.random() % 300)).await;
        }
    }
    sends.await.expect("it ends").stream().end_writing();
    assert!(reader.next().await.is_none(), "the peer is done");
    assert!(reader.next().await.is_none());
}

#[test]
fn frames_come_whole_and_in_order_however_they_are_cut() {
    let limits = || {
        let limits = Limits::default().outbox_bytes_high(20_000).outbox_bytes_low(5_000);
        limits.frame_bytes_max(100_000).inbox_bytes_high(30_000)
    };
    Sim::seeds(if cfg!(debug_assertions) { 50 } else { 1000 }).faults(Faults::harmless()).run(|sim| {
        let small: fn(u64) -> u64 = |random| random % 100;
        let any: fn(u64) -> u64 =
            |random| [random % 100, random % 5000, random % 90_000][random as usize % 3];
        let (_server, done) = match sim.seed() % 4 {
            0 => with_client(sim, limits(), move |shard| converse(shard, Lines::crlf(), small)),
            1 => with_client(sim, limits(), move |shard| converse(shard, LengthPrefix::default(), any)),
            2 => with_client(sim, limits(), |shard| converse(shard, Fixed::bytes(321), |_| 321)),
            _ => with_client(sim, limits(), move |shard| converse(shard, LengthPrefix::varint(), any)),
        };
        with_peer(sim, async |net, mut stream| {
            loop {
                let bytes = stream.some().await?;
                if bytes.is_empty() {
                    return Ok(());
                }
                send_in_pieces(&net, &mut stream, &bytes).await?;
            }
        });
        sim.run_until_done();
        sim.run_for(millis(60_000));
        assert_eq!(done.get(), 1, "the client ends");
    });
}

/// The end of a peer after two whole frames, as the client sees it.
#[derive(Clone, Copy, Debug)]
enum Ending {
    Fin,
    FinInAFrame,
    ResetInAFrame,
    TooLong,
    ClaimsTooMuch,
    ShardAborts,
}

fn as_expected(ending: Ending, told: Option<&FramedError>) -> bool {
    match (ending, told) {
        (Ending::Fin, None) => true,
        (Ending::FinInAFrame, Some(FramedError::Unfinished { bytes: 6 })) => true,
        (Ending::ResetInAFrame, Some(FramedError::Connection(error))) => {
            error.kind() == ErrorKind::ConnectionReset
        }
        (Ending::TooLong, Some(FramedError::Malformed(FrameError::TooLarge { bytes, max: 50 }))) => {
            *bytes == 51
        }
        (Ending::ClaimsTooMuch, Some(FramedError::Malformed(FrameError::TooLarge { bytes, max: 50 }))) => {
            *bytes == 4 + u32::MAX as usize
        }
        (Ending::ShardAborts, Some(FramedError::Connection(error))) => {
            error.kind() == ErrorKind::ConnectionAborted
        }
        _ => false,
    }
}

#[test]
fn each_end_of_a_peer_is_told_after_the_frames_before_it() {
    let endings = [
        Ending::Fin,
        Ending::FinInAFrame,
        Ending::ResetInAFrame,
        Ending::TooLong,
        Ending::ClaimsTooMuch,
        Ending::ShardAborts,
    ];
    Sim::seeds(if cfg!(debug_assertions) { 240 } else { 1200 }).faults(Faults::harmless()).run(|sim| {
        let ending = endings[sim.seed() as usize % endings.len()];
        let (server, done) = with_client(sim, Limits::default(), move |shard| async move {
            let mut upstream = connect(&shard, LengthPrefix::default()).await.frame_bytes_max(50);
            upstream.send("begin").await.unwrap();
            assert_eq!(&*upstream.next().await.unwrap().unwrap(), b"whole");
            // As large as may be.
            assert_eq!(upstream.next().await.unwrap().unwrap().len(), 46);
            if let Ending::ShardAborts = ending {
                shard.sleep(millis(shard.random() % 50)).await;
                upstream.stream().abort();
            }
            let told = upstream.next().await.map(|end| end.expect_err("there is no third frame"));
            assert!(as_expected(ending, told.as_ref()), "{ending:?}: {told:?}");
            assert!(upstream.next().await.is_none(), "an end is told once");
        });
        with_peer(sim, async move |net, mut stream| {
            assert_eq!(stream.exactly(9).await?, b"\0\0\0\x05begin");
            let whole = [&b"\0\0\0\x05whole\0\0\0\x2e"[..], &[b'x'; 46]].concat();
            send_in_pieces(&net, &mut stream, &whole).await?;
            match ending {
                Ending::Fin => stream.finish()?,
                Ending::FinInAFrame => {
                    send_in_pieces(&net, &mut stream, b"\0\0\0\x03ab").await?;
                    stream.finish()?;
                }
                Ending::ResetInAFrame => {
                    send_in_pieces(&net, &mut stream, b"\0\0\0\x03ab").await?;
                    // So that the frames before it are read: a reset takes what waits with it.
                    net.sleep(millis(2000)).await;
                    stream.reset();
                    return Ok(());
                }
                Ending::TooLong => send_in_pieces(&net, &mut stream, b"\0\0\0\x2fxyz").await?,
                Ending::ClaimsTooMuch => send_in_pieces(&net, &mut stream, &[0xFF; 5]).await?,
                Ending::ShardAborts => send_in_pieces(&net, &mut stream, b"\0\0").await?,
            }
            let _ = stream.closed().await;
            Ok(())
        });
        sim.expect_losses();
        sim.run_until_done();
        assert!(sim.run_until(millis(60_000), || done.get() == 1), "the client ends");
        assert!(sim.run_until(millis(60_000), || server.stats().upstreams.connections == 0));
    });
}

#[test]
fn payload_without_a_frame_is_refused_without_a_close() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let (_server, done) = with_client(sim, Limits::default(), |shard| async move {
            let mut upstream = connect(&shard, LengthPrefix::bytes(1)).await;
            let too_long = EncodeError("longer than the length prefix can say");
            assert_eq!(upstream.queue(&[0; 256]), Err(too_long));
            let error = upstream.send(&[0; 256]).await.unwrap_err();
            assert!(matches!(error, FramedError::Payload(error) if error == too_long));
            assert_eq!(io::Error::from(error).kind(), ErrorKind::InvalidInput);
            upstream.send("fits").await.unwrap();
            assert_eq!(&*upstream.next().await.unwrap().unwrap(), b"yes");
            upstream.stream().end_writing();
            let error = upstream.send("late").await.unwrap_err();
            assert!(matches!(error, FramedError::Connection(error) if error.kind() == ErrorKind::BrokenPipe));
        });
        with_peer(sim, async |_net, mut stream| {
            assert_eq!(stream.exactly(5).await?, b"\x04fits");
            stream.send(b"\x03yes").await?;
            assert_eq!(stream.closed().await?, b"");
            Ok(())
        });
        sim.run_until_done();
        sim.run_for(millis(1000));
        assert_eq!(done.get(), 1);
    });
}

#[test]
fn framing_that_cannot_work_with_the_limit_says_so() {
    Sim::seeds(5).run(|sim| {
        let (_server, done) = with_client(sim, Limits::default(), |shard| async move {
            let mut upstream = connect(&shard, Fixed::bytes(51)).await.frame_bytes_max(50);
            let error = upstream.next().await.expect("an error").unwrap_err();
            assert!(matches!(error, FramedError::Limits(_)), "{error}");
            assert_eq!(
                error.to_string(),
                "Fixed::bytes is 51 and Limits::frame_bytes_max is 50; Fixed::bytes must not be larger: lower it, or \
                 raise Limits::frame_bytes_max"
            );
            assert!(upstream.next().await.is_none());
        });
        with_peer(sim, async |_net, mut stream| Ok(stream.closed().await.map(drop)?));
        sim.run_until_done();
        assert_eq!(done.get(), 1);
    });
}

/// Polls once.
async fn now<F: Future>(future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    poll_fn(|task| {
        Poll::Ready(match future.as_mut().poll(task) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        })
    })
    .await
}

#[test]
fn send_waits_for_a_slow_peer_and_leaves_nothing_when_dropped() {
    let limits = || Limits::default().outbox_bytes_high(20_000).outbox_bytes_low(5_000);
    Sim::seeds(100).faults(Faults::harmless()).run(|sim| {
        let sent: Rc<Cell<u64>> = Rc::default();
        let counted = sent.clone();
        let (_server, done) = with_client(sim, limits(), move |shard| {
            let sent = counted.clone();
            async move {
                let upstream = connect(&shard, LengthPrefix::default()).await;
                // Until the peer's window and the outbox are full.
                loop {
                    let wait = millis(1000 + shard.random() % 1000);
                    match shard.timeout(wait, upstream.send(&[b'k'; 3000])).await {
                        Ok(result) => result.unwrap(),
                        Err(_elapsed) => break,
                    }
                    sent.set(sent.get() + 1);
                    assert!(sent.get() < 1000, "`send` never waits");
                }
                let queued = upstream.stream().outbox_bytes();
                assert!((20_001..=20_000 + 3004).contains(&queued), "{queued} bytes are queued");
                assert!(now(upstream.send("dropped")).await.is_none());
                assert_eq!(upstream.stream().outbox_bytes(), queued);
                upstream.stream().shard().sleep(millis(100)).await;
                upstream.send("last").await.unwrap();
            }
        });
        with_peer(sim, async move |net, mut stream| {
            stream.hold();
            net.sleep(millis(20_000)).await;
            stream.release();
            let bytes = stream.closed().await?;
            let frame = [&3000_u32.to_be_bytes()[..], &[b'k'; 3000]].concat();
            let whole = [frame.repeat(sent.get() as usize), b"\0\0\0\x04last".to_vec()].concat();
            assert!(bytes == whole, "{} bytes instead of {}", bytes.len(), whole.len());
            Ok(())
        });
        sim.run_until_done();
        assert_eq!(done.get(), 1);
    });
}

#[test]
fn frames_of_one_receive_are_not_copied() {
    Sim::seeds(1).run(|sim| {
        let (_server, done) = with_client(sim, Limits::default(), |shard| async move {
            let mut upstream = connect(&shard, Lines::default()).await;
            let mut frames: Vec<Frame> = Vec::new();
            for _ in 0..100 {
                frames.push(upstream.next().await.unwrap().unwrap());
            }
            for two in frames.windows(2) {
                assert_eq!(two[0].as_ptr().wrapping_add(10), two[1].as_ptr(), "they lie side by side");
            }
        });
        with_peer(sim, async |_net, mut stream| {
            stream.send(b"nine byte\n".repeat(100)).await?;
            Ok(stream.closed().await.map(drop)?)
        });
        sim.run_until_done();
        assert_eq!(done.get(), 1);
    });
}

#[test]
fn starts_of_frames_count_as_held_memory() {
    let gone: Rc<Cell<u64>> = Rc::default();
    let count = gone.clone();
    Sim::seeds(20).run(move |sim| {
        let held = Rc::new(RefCell::new(Vec::new()));
        let (errors, seen) = (held.clone(), count.clone());
        // Six of 1 MB do not fit into 4 MiB.
        let (server, _) = with_client(sim, Limits::default(), move |shard| {
            for _ in 0..6 {
                let (upstream, errors) = (connect_task(shard.clone()), errors.clone());
                shard.spawn(async move {
                    let error = upstream.await;
                    errors.borrow_mut().push(error);
                });
            }
            async {}
        });
        sim.background("upstream", async |net| {
            let mut listener = net.listen(SocketAddr::from(UPSTREAM))?;
            loop {
                let mut stream = listener.accept().await;
                net.spawn(async move {
                    let _ = stream.send(1_000_000_u32.to_be_bytes()).await;
                    let _ = stream.send(vec![b'x'; 999_000]).await;
                    let _ = stream.closed().await;
                });
            }
        });
        sim.expect_losses();
        sim.run_for(millis(60_000));
        let stats = server.stats();
        let for_memory = stats.upstreams.counters.closed_for(CloseReason::MemoryLimit);
        assert!((2..=4).contains(&for_memory), "{for_memory} went");
        assert_eq!(held.borrow().len() as u64, for_memory);
        for error in &*held.borrow() {
            assert!(matches!(error, Some(FramedError::Connection(error)) if error.kind() == ErrorKind::ConnectionAborted));
        }
        seen.set(seen.get() + for_memory);
    });
    assert!(gone.get() > 0);
}

async fn connect_task(shard: Shard) -> Option<FramedError> {
    let mut upstream = connect(&shard, LengthPrefix::default()).await;
    upstream.next().await.and_then(Result::err)
}

#[test]
fn errors_say_what_happened() {
    let errors: [(FramedError, &str, ErrorKind); 2] = [
        (
            FramedError::Unfinished { bytes: 3 },
            "the peer sent FIN in the middle of a frame, after 3 bytes of it",
            ErrorKind::UnexpectedEof,
        ),
        (
            FramedError::Malformed(FrameError::OverBytesMax { max: 9 }),
            "a frame is larger than bytes_max of its framing, 9",
            ErrorKind::InvalidData,
        ),
    ];
    for (error, says, kind) in errors {
        assert!(error.source().is_none(), "its text says all of it");
        assert_eq!(error.to_string(), says);
        assert_eq!(io::Error::from(error).kind(), kind);
    }
}
