//! Uploads that are answered before they are complete, in simulations by seed.

use std::cell::Cell;
use std::convert::Infallible;
use std::future::ready;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use ringserve::testing::{ClientStream, Faults, Net, Sim};
use ringserve::{CloseReason, Server, http};
use ringserve_tests::http::frames::{PREFACE, SETTINGS, frame, request};

const ADDR: &str = "10.0.0.1:80";
const DATA: u8 = 0;
const RST_STREAM: u8 = 3;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;
const PIECE: usize = 15_000;

/// An HTTP/2 client, frame by frame.
struct Peer {
    me: ClientStream,
    window: usize,
    resets: usize,
}

impl Peer {
    async fn connect(net: &Net) -> io::Result<Peer> {
        let mut me = net.connect(ADDR).await?;
        me.send([PREFACE, SETTINGS].concat()).await?;
        Ok(Peer { me, window: 65_535, resets: 0 })
    }

    /// The next frame: kind, flags, stream.
    async fn next(&mut self) -> io::Result<(u8, u8, u32)> {
        let head = self.me.exactly(9).await?;
        let number = |bytes: &[u8]| bytes.iter().fold(0, |number, byte| number << 8 | u32::from(*byte));
        let payload = self.me.exactly(number(&head[..3]) as usize).await?;
        let (kind, stream) = (head[3], number(&head[5..]));
        match kind {
            GOAWAY => panic!("the connection ends for uploads: {payload:?}"),
            WINDOW_UPDATE if stream == 0 => self.window += number(&payload) as usize,
            RST_STREAM => {
                assert_eq!(number(&payload), 0, "for no error");
                self.resets += 1;
            }
            _ => {}
        }
        Ok((kind, head[4], stream))
    }

    async fn answered(&mut self, stream: u32) -> io::Result<()> {
        loop {
            let (kind, flags, of) = self.next().await?;
            if kind <= 1 && flags & END_STREAM != 0 && of == stream {
                return Ok(());
            }
        }
    }

    async fn reset(&mut self) -> io::Result<u32> {
        loop {
            if let (RST_STREAM, _, stream) = self.next().await? {
                return Ok(stream);
            }
        }
    }

    /// Sends a piece of a body, cut at a random place.
    async fn send(&mut self, net: &Net, stream: u32, ends: bool) -> io::Result<()> {
        while self.window < PIECE {
            self.next().await?;
        }
        self.window -= PIECE;
        let bytes = frame(DATA, u8::from(ends), stream, &[b'.'; PIECE]);
        let (head, tail) = bytes.split_at(net.random() as usize % 20);
        self.me.send(head).await?;
        if net.random().is_multiple_of(8) {
            net.sleep(Duration::from_millis(1)).await;
        }
        self.me.send(tail).await
    }
}

/// Runs a server that reads no body except of `/read`; its client does as ordered, and is still
/// served then.
fn uploads(seeds: u64, client: impl AsyncFn(&Net, &mut Peer) -> io::Result<()> + Copy + 'static) {
    Sim::seeds(seeds).faults(Faults::none()).run(|sim| {
        let served = Rc::new(Cell::new(0u32));
        let counts = served.clone();
        let running = sim.start(Server::bind(ADDR).shards(1), move |_shard| {
            let served = counts.clone();
            http(service_fn(move |mut request: Request<Incoming>| {
                served.set(served.get() + 1);
                async move {
                    if request.uri().path() == "/read" {
                        while request.body_mut().frame().await.is_some() {}
                    }
                    let mut response = Response::new("no".to_owned());
                    *response.status_mut() = StatusCode::UNAUTHORIZED;
                    Ok::<_, Infallible>(response)
                }
            }))
        });
        let running = running.expect("the server starts");
        sim.client("one", async move |net| {
            let mut peer = Peer::connect(&net).await?;
            client(&net, &mut peer).await?;
            peer.me.send(request(9_999, true, "/")).await?;
            peer.answered(9_999).await?;
            Ok(())
        });
        sim.run_until_done();
        sim.finish();
        assert!(served.get() > 1);
        assert_eq!(running.stats().counters.closed_for(CloseReason::HandlerError), 0);
    });
}

#[test]
fn small_uploads_that_are_answered_early_are_read_to_their_end() {
    uploads(3, async |net, peer| {
        for stream in (1..1_200).step_by(2) {
            peer.me.send(request(stream, false, "/")).await?;
            peer.answered(stream).await?;
            for piece in 0..4 {
                peer.send(net, stream, piece == 3).await?;
            }
        }
        assert_eq!(peer.resets, 0, "nothing of them was left");
        Ok(())
    });
}

/// The last header may lie on both sides of the end of hyper's buffer, wherever that is.
#[test]
fn upload_beside_one_that_was_answered_is_read_to_its_end() {
    uploads(3, async |net, peer| {
        for stream in (1..4_000).step_by(4) {
            peer.me.send(request(stream, false, "/")).await?;
            peer.answered(stream).await?;
            let body = vec![b'.'; net.random() as usize % PIECE];
            while peer.window < body.len() {
                peer.next().await?;
            }
            peer.window -= body.len();
            let frames = [request(stream + 2, false, "/read"), frame(DATA, 0, stream + 2, &body)];
            peer.me.send([frames.concat(), frame(DATA, END_STREAM, stream + 2, &[])].concat()).await?;
            peer.answered(stream + 2).await?;
        }
        Ok(())
    });
}

#[test]
fn rest_of_a_long_upload_is_no_error() {
    uploads(3, async |net, peer| {
        for stream in (1..200).step_by(2) {
            peer.me.send(request(stream, false, "/")).await?;
            peer.answered(stream).await?;
            // Bytes in flight when the reset came.
            for _ in 0..20 {
                peer.send(net, stream, false).await?;
            }
            while peer.resets <= stream as usize / 2 {
                assert_eq!(peer.reset().await?, stream);
            }
        }
        Ok(())
    });
}

#[test]
fn upload_that_does_not_come_is_reset_after_half_a_second() {
    uploads(5, async |net, peer| {
        peer.me.send(request(1, false, "/")).await?;
        peer.answered(1).await?;
        let from = net.now();
        assert_eq!(peer.reset().await?, 1);
        let after = net.now() - from;
        assert!((450..700).contains(&after.as_millis()), "{after:?}");
        Ok(())
    });
}

const HEADS: [&str; 2] = ["content-length: 300000", "transfer-encoding: chunked"];
/// Bytes of the body that a head announces.
const BODY: usize = 300_000;

/// Runs an HTTP/1.1 server that answers first and then reads. Its client sends a head with each way
/// to declare the length, and continues as ordered, so that one body of each kind is read
/// completely.
fn answered_first(client: impl AsyncFn(&Net, &mut ClientStream, bool) -> io::Result<()> + Copy + 'static) {
    Sim::seeds(2).faults(Faults::none()).run(move |sim| {
        let whole = Rc::new(Cell::new(0));
        let counts = whole.clone();
        let running = sim.start(Server::bind(ADDR).shards(1), move |shard| {
            let (shard, counts) = (shard.clone(), counts.clone());
            http(service_fn(move |request: Request<Incoming>| {
                let counts = counts.clone();
                shard.spawn(async move {
                    let (mut body, mut bytes) = (request.into_body(), 0);
                    // hyper reports the end after a length with the next head.
                    while let Some(Ok(frame)) = body.frame().await {
                        bytes += frame.into_data().map_or(0, |data| data.len());
                        counts.set(counts.get() + usize::from(bytes == BODY));
                    }
                });
                ready(Ok::<_, Infallible>(Response::new("yes".to_owned())))
            }))
        });
        let running = running.expect("the server starts");
        sim.client("one", async move |net| {
            for head in HEADS {
                let mut me = net.connect(ADDR).await?;
                me.send(format!("POST / HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n")).await?;
                answer(&mut me).await?;
                client(&net, &mut me, head == HEADS[1]).await?;
            }
            Ok(())
        });
        sim.run_until_done();
        sim.finish();
        drop(running);
        assert_eq!(whole.get(), HEADS.len(), "bodies that were read whole");
    });
}

async fn answer(me: &mut ClientStream) -> io::Result<()> {
    while !me.line().await?.expect("an answer").is_empty() {}
    assert_eq!(me.exactly(3).await?, b"yes");
    Ok(())
}

/// A part of a body.
async fn send_part(me: &mut ClientStream, bytes: usize, in_chunks: bool) -> io::Result<()> {
    let part = ".".repeat(bytes);
    me.send(if in_chunks { format!("{bytes:x}\r\n{part}\r\n") } else { part }).await
}

/// Seconds until the server has ended the connection, while `each` is sent in each of them.
async fn ends_after(net: &Net, me: &mut ClientStream, each: &str) -> io::Result<u64> {
    let from = net.now();
    while (net.now() - from).as_secs() < 120 {
        if net.timeout(Duration::from_secs(1), me.closed()).await.is_ok() || me.send(each).await.is_err() {
            return Ok((net.now() - from).as_secs());
        }
    }
    panic!("it stays");
}

#[test]
fn upload_goes_on_behind_its_answer_and_another_request_follows() {
    answered_first(async |net, me, in_chunks| {
        for _ in 0..100 {
            net.sleep(Duration::from_secs(3)).await;
            send_part(me, BODY / 100, in_chunks).await?;
        }
        me.send(if in_chunks { "0\r\n\r\n" } else { "" }).await?;
        // Within the time for a head, but not within that of the last part.
        net.sleep(Duration::from_secs(25)).await;
        me.send("GET / HTTP/1.1\r\nhost: x\r\n\r\n").await?;
        answer(me).await?;
        let after = ends_after(net, me, "").await?;
        assert!((29..=32).contains(&after), "{after} s");
        Ok(())
    });
}

#[test]
fn upload_that_stops_behind_its_answer_ends() {
    answered_first(async |net, me, in_chunks| {
        send_part(me, BODY / 2, in_chunks).await?;
        let part = if in_chunks { "1\r\n.\r\n" } else { "." };
        let after = ends_after(net, me, part).await?;
        assert!((29..=62).contains(&after), "{after} s");
        let mut me = net.connect(ADDR).await?;
        me.send(format!("POST / HTTP/1.1\r\nhost: x\r\n{}\r\n\r\n", HEADS[usize::from(in_chunks)])).await?;
        answer(&mut me).await?;
        send_part(&mut me, BODY, in_chunks).await?;
        me.send(if in_chunks { "0\r\n\r\n" } else { "" }).await?;
        let after = ends_after(net, &mut me, "G").await?;
        assert!((29..=62).contains(&after), "{after} s");
        Ok(())
    });
}
