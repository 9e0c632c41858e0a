//! Half-closed peers, and drains.

use super::*;

#[test]
fn half_closed_peer_gets_every_answer_whole() {
    let rig = Rig::start(HttpOptions::default());
    let mut client = rig.client();
    // FIN arrives long before the answers: the first request waits, and the later ones are
    // pipelined.
    let requests: [&[u8]; 3] =
        [b"GET /gate HTTP/1.1\r\nhost: x\r\n\r\n", b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n", GET];
    client.write(&requests.concat());
    client.finish_writing();
    rig.waits_inside(1);
    // Another connection's answer: the FIN was seen by then.
    let mut other = rig.client();
    other.write(GET);
    read_answer(&mut other);
    rig.gate.add_permits(1);
    assert_eq!(read_answer(&mut client).1, b"HTTP/1.1");
    assert_eq!(read_answer(&mut client).1.len(), LARGE);
    assert_eq!(read_answer(&mut client).1, b"HTTP/1.1");
    assert_eq!(client.end(), End::Fin);
    drop((client, other));
    let report = ringserve_tests::finish(rig.running);
    assert_eq!(report.counters.closed_for(CloseReason::HandlerError), 0, "{:?}", report.counters);
}

#[test]
fn half_closed_peer_that_reads_nothing_is_closed() {
    let limits = no_time_limits().write_stall_timeout(BRIEF);
    let rig = Rig::start_with(limits, HttpOptions::default());
    let mut client = Client::with_small_window(rig.running.local_addrs()[0]);
    client.write(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n");
    client.finish_writing();
    watch::closed_for(&rig.running, CloseReason::WriteStallTimeout, 1);
    drop(client);
    ringserve_tests::finish(rig.running);
}

#[test]
fn a_drain_answers_what_was_asked_and_ends_the_rest() {
    let rig = Rig::start(HttpOptions::default());
    let (mut idle, mut fresh, mut half) = (rig.client(), rig.client(), rig.client());
    idle.write(GET);
    read_answer(&mut idle);
    half.write(&frames::PREFACE[..10]);
    let mut busy = rig.client();
    busy.write(b"GET /gate HTTP/1.1\r\nhost: x\r\n\r\n");
    rig.waits_inside(1);
    watch::holds(&rig.running, 4);
    rig.running.shutdown();
    assert_eq!((idle.end(), fresh.end(), half.end()), (End::Fin, End::Fin, End::Fin));
    assert_eq!(rig.handlers.inside.load(SeqCst), 1);
    rig.gate.add_permits(1);
    let (head, body) = read_answer(&mut busy);
    assert!(head.contains("connection: close\r\n"), "{head}");
    assert_eq!((body.as_slice(), busy.end()), (&b"HTTP/1.1"[..], End::Fin));
    drop((idle, fresh, half, busy));
    let report = ringserve_tests::finish(rig.running);
    assert_eq!(report.counters.closed_for(CloseReason::HandlerError), 0, "{:?}", report.counters);
}

#[test]
fn a_drain_finishes_the_streams_of_http_2() {
    let rig = Rig::start(HttpOptions::default());
    // While it is kept the client does not end the connection: the server's GOAWAY does, which is
    // waited for.
    let kept = Cell::new(None);
    rig.with_http2(async |mut sender| {
        let answer = sender.send_request(get("/gate"));
        let answer = tokio::spawn(answer);
        while rig.handlers.inside.load(SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        rig.running.shutdown();
        rig.gate.add_permits(1);
        assert_eq!(
            answer.await.unwrap().unwrap().into_body().collect().await.unwrap().to_bytes(),
            "HTTP/2.0"
        );
        kept.set(Some(sender));
    });
    ringserve_tests::finish(rig.running);
}

/// A body that fails after its first piece, when the test orders it.
struct Fails(Arc<Semaphore>, bool);

impl Body for Fails {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if !std::mem::replace(&mut self.1, true) {
            return Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"half")))));
        }
        let gate = self.0.clone();
        std::pin::pin!(gate.acquire()).poll(task).map(|_| Some(Err(std::io::Error::other("planted"))))
    }
}

#[test]
fn answer_whose_body_fails_does_not_end_as_a_whole_one() {
    for version in ["1.0", "1.1"] {
        let running = On::default()
            .server(no_time_limits())
            .start(|_| {
                // The peer reads the first piece before the second fails.
                let gate = Arc::new(Semaphore::new(0));
                http(service_fn(move |request: Request<Incoming>| {
                    let gate = gate.clone();
                    if request.uri().path() == "/fail" {
                        gate.add_permits(1);
                    }
                    let is_cut = request.uri().path() == "/cut";
                    ready(Ok::<_, std::io::Error>(Response::new(match is_cut {
                        true => Fails(gate, false).boxed(),
                        false => Full::new(Bytes::new()).map_err(|never| match never {}).boxed(),
                    })))
                }))
            })
            .expect("the server starts");
        let mut client = Client::connect(running.local_addrs()[0]);
        client.write(format!("GET /cut HTTP/{version}\r\nhost: x\r\n\r\n").as_bytes());
        let mut came = Vec::new();
        while !came.windows(4).any(|bytes| bytes == b"half") {
            came.extend(client.read(1));
        }
        let mut other = Client::connect(running.local_addrs()[0]);
        other.write(b"GET /fail HTTP/1.1\r\nhost: x\r\n\r\n");
        read_answer(&mut other);
        assert_eq!(client.read_to_end().1, End::Reset, "HTTP/{version}");
        drop((client, other));
        ringserve_tests::finish(running);
    }
}
