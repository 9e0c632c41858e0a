//! HTTP/2 connections and their streams.

use super::*;

#[test]
fn no_more_streams_than_allowed_are_served_at_once() {
    let rig = Rig::start(HttpOptions::default().streams_max(3));
    rig.with_http2(async |mut sender| {
        // The limit is known from here on.
        ask(&mut sender, "/").await;
        let mut answers = tokio::task::JoinSet::new();
        for _ in 0..10 {
            let mut sender = sender.clone();
            answers.spawn(async move { ask(&mut sender, "/gate").await });
        }
        for n in 0..10 {
            while rig.handlers.inside.load(SeqCst) < 3.min(10 - n) {
                tokio::task::yield_now().await;
            }
            rig.gate.add_permits(1);
            assert_eq!(answers.join_next().await.unwrap().unwrap(), "HTTP/2.0");
        }
    });
    assert_eq!(rig.handlers.most.load(SeqCst), 3);
    ringserve_tests::finish(rig.running);
}

#[test]
fn requests_of_http_2_are_dropped_with_their_connection() {
    let rig = Rig::start(HttpOptions::default());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(rig.running.local_addrs()[0]).await.unwrap();
        let builder = hyper::client::conn::http2::Builder::new(hyper_util::rt::TokioExecutor::new());
        let io = hyper_util::rt::TokioIo::new(stream);
        let (mut sender, connection) = builder.handshake::<_, Bodies>(io).await.unwrap();
        let connection = tokio::spawn(connection);
        let _answers: Vec<_> = (0..5).map(|_| tokio::spawn(sender.send_request(get("/never")))).collect();
        while rig.handlers.inside.load(SeqCst) < 5 {
            tokio::task::yield_now().await;
        }
        connection.abort();
    });
    drop(runtime);
    rig.waits_inside(0);
    assert_eq!(rig.handlers.dropped.load(SeqCst), 5);
    watch::holds(&rig.running, 0);
    ringserve_tests::finish(rig.running);
}

#[test]
fn a_silent_peer_of_http_2_is_pinged_and_closed() {
    let options = HttpOptions::default().ping_interval(BRIEF).ping_timeout(BRIEF);
    let rig = Rig::start(options);
    let mut silent = rig.client();
    silent.write(&[frames::PREFACE, b"\0\0\0\x04\0\0\0\0\0"].concat());
    let (frames, end) = silent.read_to_end();
    let is_ping = |head: &[u8]| head == b"\0\0\x08\x06\0\0\0\0\0";
    assert!(frames.windows(9).any(is_ping), "{frames:?}");
    assert_eq!(end, End::Fin);
    // A client that answers stays, and is pinged again and again.
    let mut answers = rig.client();
    answers.write(&[frames::PREFACE, b"\0\0\0\x04\0\0\0\0\0"].concat());
    let mut pings = 0;
    while pings < 5 {
        let head = answers.read(9);
        let len = usize::from(head[1]) << 8 | usize::from(head[2]);
        let payload = answers.read(len);
        if is_ping(&head) {
            pings += 1;
            answers.write(&[b"\0\0\x08\x06\x01\0\0\0\0", &payload[..]].concat());
        }
    }
    drop((silent, answers));
    ringserve_tests::finish(rig.running);
}

#[test]
fn stream_with_a_closed_window_is_reset() {
    let rig = Rig::start(brief_window());
    let mut client = rig.client();
    client.write(&[frames::PREFACE, frames::CLOSED, &frames::request(1, true, "/pieces")].concat());
    assert_eq!(reset_stream(&mut client), 1);
    // The others are served.
    client.write(&[frames::SETTINGS, &frames::request(3, true, "/never")[..]].concat());
    rig.waits_inside(1);
    drop(client);
    ringserve_tests::finish(rig.running);
}

#[test]
fn connection_whose_streams_hyper_cannot_reset_is_closed() {
    let rig = Rig::start(brief_window());
    let mut client = rig.client();
    // With a window of 1 byte hyper takes the whole body, and no task is left that could reset the
    // stream.
    client.write(&[frames::PREFACE, frames::ONE_BYTE, &frames::request(1, true, "/large")].concat());
    assert_eq!(client.end_after_all(), End::Reset);
    watch::closed_for(&rig.running, CloseReason::WriteTooSlow, 1);
    drop(client);
    ringserve_tests::finish(rig.running);
}

#[test]
fn pings_do_not_keep_a_connection_without_requests() {
    let rig = Rig::start(brief_window().http2_idle_timeout(BRIEF));
    let mut client = rig.client();
    client.write(&[frames::PREFACE, frames::SETTINGS, &frames::request(1, true, "/gate")].concat());
    rig.waits_inside(1);
    // Neither ends while a request runs: another connection's end shows that the time passed.
    for (attack, kept) in [(frames::PING, false), (frames::SETTINGS, false), (frames::SETTINGS_ACK, true)] {
        let mut idle = rig.client();
        idle.write(&[frames::PREFACE, frames::SETTINGS].concat());
        // An unexpected acknowledgement is an error, so that client sends nothing at all.
        let (bytes, _) = if kept { idle.read_to_end() } else { drip(&mut idle, attack, BRIEF / 10) };
        let goaway = frames::split(&bytes).iter().any(|frame| frame.0 == 7);
        assert!(goaway, "it is told to end");
    }
    rig.gate.add_permits(1);
    assert_eq!(answered_stream(&mut client), 1);
    drop(client);
    ringserve_tests::finish(rig.running);
}

#[test]
fn rapid_resets_and_continuations_end_their_connection() {
    let rig = Rig::start(HttpOptions::default().pending_resets_max(5));
    let mut neighbour = rig.client();
    let mut resets = [frames::PREFACE, frames::SETTINGS].concat();
    for stream in (1..2001).step_by(2) {
        resets.extend(frames::request(stream, true, "/never"));
        resets.extend(frames::frame(3, 0, stream, &8u32.to_be_bytes()));
    }
    // No END_HEADERS, and then pieces of a head without end.
    let mut endless = [frames::PREFACE, frames::SETTINGS, &frames::frame(1, 0, 1, b"\x82\x86")].concat();
    for _ in 0..1000 {
        endless.extend(frames::frame(9, 0, 1, b"\x82"));
    }
    for (n, attack) in [resets, endless].iter().enumerate() {
        let mut client = rig.client();
        // The server may be gone before all is written.
        _ = std::io::Write::write_all(&mut client.stream, attack);
        client.end_after_all();
        watch::closed_for(&rig.running, BAD, n as u64 + 1);
        neighbour.write(GET);
        assert_eq!(read_answer(&mut neighbour).1, b"HTTP/1.1");
    }
    rig.waits_inside(0);
    drop(neighbour);
    ringserve_tests::finish(rig.running);
}

#[test]
fn stream_that_is_reset_waits_for_no_memory() {
    // No tick of a connection comes within the test, and three quarters of 512 KiB are for answers.
    let hour = Duration::from_secs(3600);
    let options = HttpOptions::default().rate_window(hour).response_timeout(None).http2_idle_timeout(None);
    let limits = no_time_limits().frame_bytes_max(64 << 10).inbox_bytes_high(64 << 10);
    let limits = limits.outbox_bytes_high(64 << 10).outbox_bytes_low(16 << 10).outbox_bytes_max(256 << 10);
    let rig = Rig::start_with(limits.held_bytes_max(512 << 10), options);
    let held = || rig.running.stats_now().shards[0].held_bytes;
    let small = || Client::with_small_window(rig.running.local_addrs()[0]);
    let mut deaf: Vec<Client> = (0..20).map(|_| small()).collect();
    deaf.iter_mut().for_each(|client| client.write(b"GET /pieces HTTP/1.1\r\nhost: x\r\n\r\n"));
    eventually("memory is used up", SOON, || held() > (384 - 64) << 10);
    let mut client = rig.client();
    client.write(&[frames::PREFACE, frames::SETTINGS, &frames::request(1, true, "/pieces")].concat());
    while frames::next(&mut client).0 != 0 {}
    // It waits for its second piece.
    client.write(&[&frames::frame(3, 0, 1, &8u32.to_be_bytes()), frames::PING].concat());
    while frames::next(&mut client).0 != 6 {}
    drop(deaf);
    watch::holds(&rig.running, 1);
    eventually("nothing is reserved", SOON, || held() < 64 << 10);
    drop(client);
    ringserve_tests::finish(rig.running);
}

/// Answers `count` uploads before they are complete, waits for a reset or not, and ends them with
/// trailers. True if the connection still serves.
fn takes_trailers(rig: &Rig, count: u32, waits: bool) -> bool {
    let streams = || (0..count).map(|n| 2 * n + 1);
    let mut client = rig.client();
    let heads: Vec<u8> = streams().flat_map(|stream| frames::request(stream, false, "/")).collect();
    client.write(&[frames::PREFACE, frames::SETTINGS, &heads].concat());
    for _ in streams() {
        answered_stream(&mut client);
    }
    if waits {
        reset_stream(&mut client);
    }
    for stream in streams() {
        // The field has a number from then on, to which the others refer.
        let field = if stream == 1 { &b"\x40\x01a\x01b"[..] } else { b"\xbf" };
        client.write(&[frames::frame(1, 1, stream, b""), frames::frame(9, 4, stream, field)].concat());
    }
    let last = 2 * count + 1;
    client.write(&frames::request(last, true, "/"));
    loop {
        match frames::next(&mut client) {
            (7, ..) => return false,
            (1, _, stream, _) if stream == last => return true,
            _ => {}
        }
    }
}

#[test]
fn trailers_behind_an_early_answer_end_no_connection() {
    let rig = Rig::start(HttpOptions::default());
    // hyper forgets all but 50 at once, and those after a second: so a machine that stalls may make
    // it fail.
    for (count, waits) in [(1, true), (70, false)] {
        assert!((0..10).any(|_| takes_trailers(&rig, count, waits)), "{count}");
    }
    ringserve_tests::finish(rig.running);
}

#[test]
fn streams_of_a_connection_share_what_is_kept_for_sending() {
    const STREAMS: u32 = 20;
    let rig = Rig::start(HttpOptions::default().connection_send_bytes_max(64 << 10));
    let mut client = Client::with_small_window(rig.running.local_addrs()[0]);
    // Windows without a limit, and a peer that reads nothing.
    let open = [&[0, 4][..], &i32::MAX.to_be_bytes()].concat();
    let settings = frames::frame(4, 0, 0, &open);
    let update = frames::frame(8, 0, 0, &(i32::MAX as u32 - 65_535).to_be_bytes());
    client.write(&[frames::PREFACE, &settings, &update].concat());
    for stream in 0..STREAMS {
        client.write(&frames::request(2 * stream + 1, true, "/counted"));
    }
    let mut made = 0;
    eventually("no more is made", SOON, || {
        std::thread::park_timeout(BRIEF);
        let now = MADE.load(SeqCst);
        now > 0 && std::mem::replace(&mut made, now) == now
    });
    // 64 KiB, the outbox, what the kernels take, and a piece or two for each stream; 400 KiB for
    // each would be 500 pieces.
    assert!(made < 300, "{made} pieces of 16 KiB");
    // No piece is left when the peer reads.
    let (mut ended, mut bytes) = (0, 0);
    while ended < STREAMS {
        let (kind, flags, _, payload) = frames::next(&mut client);
        if kind == 0 {
            bytes += payload.len();
            ended += u32::from(flags & 1);
        }
    }
    assert_eq!(bytes, COUNTED * STREAMS as usize);
    drop(client);
    ringserve_tests::finish(rig.running);
}
