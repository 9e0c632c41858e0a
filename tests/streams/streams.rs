//! Connections as streams of bytes.

use std::cell::Cell;
use std::future::poll_fn;
use std::io::{self, ErrorKind, Write};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::thread;
use std::time::Duration;

use ringserve::handle::StreamHandle;
use ringserve::{CloseReason, Stream};
use ringserve_tests::client::End;
use ringserve_tests::{Client, SOON, Streams, eventually, no_time_limits, pattern};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Longer than anything takes that happens at once.
const QUIET: Duration = Duration::from_millis(300);

/// Sends back what it reads, over tokio's traits.
async fn echo(mut stream: Stream) -> io::Result<()> {
    let mut buf = [0; 8 << 10];
    loop {
        let len = stream.read(&mut buf).await?;
        if len == 0 {
            return Ok(());
        }
        AsyncWriteExt::write_all(&mut stream, &buf[..len]).await?;
        stream.flush().await?;
    }
}

/// Sends frames back without copies.
async fn echo_frames(mut stream: Stream) -> io::Result<()> {
    while let Some(frame) = stream.read_frame().await? {
        stream.queue(frame);
        stream.ready().await?;
    }
    Ok(())
}

#[track_caller]
fn echoes(client: &mut Client, bytes: &[u8]) {
    client.write(bytes);
    assert!(client.read(bytes.len()) == bytes, "{} bytes come back", bytes.len());
}

/// A way for a stream to report to its test. The sender is cloned for each shard.
fn told<T>() -> (Arc<Mutex<Sender<T>>>, Receiver<T>) {
    let (sender, receiver) = channel();
    (Arc::new(Mutex::new(sender)), receiver)
}

#[track_caller]
fn hear<T>(receiver: &Receiver<T>) -> T {
    receiver.recv_timeout(SOON).expect("the stream says so")
}

#[test]
fn every_byte_comes_in_its_place_whatever_pieces_it_comes_in() {
    let server = Streams::start(no_time_limits(), |_| {
        async |mut stream: Stream| {
            // Pieces that have nothing to do with how the bytes arrive.
            let mut piece = [0; 7];
            loop {
                match stream.read_exact(&mut piece).await {
                    Ok(_) => AsyncWriteExt::write_all(&mut stream, &piece).await?,
                    Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(()),
                    Err(error) => return Err(error),
                }
            }
        }
    });
    let bytes = pattern(7 * 300);
    let mut client = server.client();
    bytes.iter().for_each(|byte| client.write(&[*byte]));
    client.finish_writing();
    let (back, end) = client.read_to_end();
    assert!(back == bytes);
    assert_eq!(end, End::Fin);
    server.closed_for(CloseReason::PeerClosed, 1);
    let mut client = server.client();
    let large = pattern(7 * 100_000);
    thread::scope(|scope| {
        let mut writer = client.stream.try_clone().unwrap();
        scope.spawn(|| {
            writer.write_all(&large).unwrap();
            writer
        });
        assert!(client.read(large.len()) == large);
    });
    drop(client);
    server.finish();
}

#[test]
fn sixteen_mib_go_both_ways_to_a_slow_reader_and_little_is_held() {
    const LEN: usize = 16 << 20;
    let most = Arc::new(AtomicUsize::new(0));
    let seen = most.clone();
    let server = Streams::start(no_time_limits(), move |_| {
        let most = seen.clone();
        async move |mut stream: Stream| {
            let mut buf = vec![0; 50_000];
            loop {
                let len = stream.read(&mut buf).await?;
                if len == 0 {
                    return io::Result::Ok(());
                }
                AsyncWriteExt::write_all(&mut stream, &buf[..len]).await?;
                most.fetch_max(stream.outbox_bytes(), SeqCst);
            }
        }
    });
    let mut client = Client::with_small_window(server.addr());
    let bytes = pattern(LEN);
    let written = client.write_until_stuck(&bytes, QUIET);
    assert!(written < LEN, "the server took all {written} bytes of a peer that reads nothing");
    let counters = server.stats().counters;
    // The outbox, the frame at hand, the inbox, and a turn's worth of what was on the way.
    let held = counters.bytes_received - counters.bytes_sent;
    assert!(held < (256 << 10) + (16 << 10) + (64 << 10) + (1 << 20), "{held} bytes held");
    assert!(counters.receives_paused >= 1);
    let mut reader = Client::of(client.stream.try_clone().unwrap());
    thread::scope(|scope| {
        scope.spawn(|| {
            client.write(&bytes[written..]);
            client.finish_writing();
        });
        let (back, end) = reader.read_to_end();
        assert!(back == bytes, "every byte comes back in its place");
        assert_eq!(end, End::Fin);
    });
    let most = most.load(SeqCst);
    assert!((200_000..=(256 << 10) + 1).contains(&most), "{most} bytes in the outbox");
    server.closed_for(CloseReason::PeerClosed, 1);
    server.finish();
}

#[test]
fn frames_are_read_and_written_without_a_copy() {
    let (says, hears) = told();
    let server = Streams::start(no_time_limits(), move |_| {
        let says = says.lock().unwrap().clone();
        async move |mut stream: Stream| {
            while let Some(frame) = stream.read_frame().await.unwrap() {
                says.send((frame.len(), frame.pinned_bytes())).unwrap();
                stream.queue(frame);
                stream.ready().await.unwrap();
            }
        }
    });
    let mut client = server.client();
    echoes(&mut client, b"little");
    // It lies in a receive buffer, which is larger.
    assert_eq!(hear(&hears), (6, 16 << 10));
    let large = pattern(3 << 20);
    let mut reader = Client::of(client.stream.try_clone().unwrap());
    thread::scope(|scope| {
        scope.spawn(|| {
            client.write(&large);
            client.finish_writing();
        });
        assert!(reader.read_to_end() == (large.clone(), End::Fin));
    });
    let frames: Vec<_> = hears.try_iter().collect();
    assert!(frames.iter().any(|(_, pinned)| *pinned == 16 << 10), "{frames:?}");
    server.finish();
}

#[test]
fn a_peer_that_is_not_read_is_held_back_and_costs_little() {
    const BUFFERS: usize = 256;
    let server = Streams::start(no_time_limits().receive_bytes_max(BUFFERS * (16 << 10)), |_| {
        async |stream: Stream| {
            stream.draining().await;
        }
    });
    let mut clients: Vec<Client> = (0..20).map(|_| server.client()).collect();
    let bytes = pattern(16 << 20);
    // The first alone, then the others at once.
    let written = clients[0].write_until_stuck(&bytes, QUIET);
    assert!(written < bytes.len(), "the server took all {written} bytes");
    let received = server.stats().counters.bytes_received;
    assert!(received < (64 << 10) + (1 << 20) + (16 << 10), "{received} bytes held");
    thread::scope(|scope| {
        for client in &mut clients[1..] {
            scope.spawn(|| client.write_until_stuck(&bytes[..4 << 20], QUIET));
        }
    });
    eventually("each is held back", SOON, || server.stats().counters.receives_paused == 20);
    let buffers = server.stats().shards[0].buffers;
    // Of each the frame that waits, and after these no more than a quarter of all.
    assert!(buffers.leased <= BUFFERS / 4 + 20, "{buffers:?}");
    server.finish();
}

#[test]
fn a_small_rest_that_waits_for_its_reader_pins_no_buffer() {
    let (says, hears) = told();
    let server = Streams::start(no_time_limits(), move |_| {
        let says = says.lock().unwrap().clone();
        async move |mut stream: Stream| {
            let mut head = [0; 4];
            stream.read_exact(&mut head).await.unwrap();
            says.send(()).unwrap();
            stream.draining().await;
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest).await.unwrap();
            AsyncWriteExt::write_all(&mut stream, &rest).await.unwrap();
        }
    });
    let mut clients: Vec<Client> = (0..100).map(|_| server.client()).collect();
    for client in &mut clients {
        client.write(b"head and a partial line");
        hear(&hears);
    }
    assert_eq!(server.stats().shards[0].buffers.leased, 0);
    server.running.shutdown();
    for client in &mut clients {
        client.finish_writing();
        assert_eq!(client.read_to_end(), (b" and a partial line".to_vec(), End::Fin));
    }
    server.finish();
}

#[test]
fn reading_ends_with_the_peers_fin_and_writing_goes_on() {
    const LEN: usize = 4 << 20;
    let server = Streams::start(no_time_limits(), |shard| {
        let shard = shard.clone();
        async move |mut stream: Stream| {
            let mut all = Vec::new();
            stream.read_to_end(&mut all).await.unwrap();
            // The same result again.
            assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
            assert!(stream.read_frame().await.unwrap().is_none());
            shard.sleep(QUIET).await;
            AsyncWriteExt::write_all(&mut stream, &all.repeat(LEN / all.len())).await.unwrap();
        }
    });
    let mut client = server.client();
    client.write(&pattern(1024));
    client.finish_writing();
    let (bytes, end) = client.read_to_end();
    assert!(bytes == pattern(1024).repeat(LEN / 1024));
    assert_eq!(end, End::Fin);
    server.closed_for(CloseReason::PeerClosed, 1);
    // With FIN after no byte at all.
    let mut client = server.client();
    client.write(b"x");
    client.finish_writing();
    assert_eq!(client.read_to_end().0.len(), LEN);
    server.finish();
}

#[test]
fn writing_ends_with_fin_behind_all_bytes_and_reading_goes_on() {
    const LEN: usize = 2 << 20;
    let (says, hears) = told();
    let server = Streams::start(no_time_limits(), move |_| {
        let says = says.lock().unwrap().clone();
        async move |mut stream: Stream| {
            AsyncWriteExt::write_all(&mut stream, &pattern(LEN)).await.unwrap();
            stream.shutdown().await.unwrap();
            stream.queue(b"goes nowhere");
            let error = AsyncWriteExt::write_all(&mut stream, b"fails").await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::BrokenPipe);
            let mut all = Vec::new();
            stream.read_to_end(&mut all).await.unwrap();
            says.send(all).unwrap();
        }
    });
    for _ in 0..3 {
        let mut client = server.client();
        let (bytes, end) = client.read_to_end();
        assert!(bytes == pattern(LEN));
        assert_eq!(end, End::Fin);
        assert_eq!(server.stats().connections, 1, "only one half is closed");
        for piece in pattern(LEN).chunks(LEN / 16) {
            client.write(piece);
        }
        client.finish_writing();
        assert!(hear(&hears) == pattern(LEN));
        server.holds(0);
    }
    server.closed_for(CloseReason::PeerClosed, 3);
    server.finish();
}

#[test]
fn fin_comes_at_once_where_nothing_was_written() {
    let server = Streams::start(no_time_limits(), |_| {
        async |mut stream: Stream| {
            stream.end_writing();
            while stream.read_frame().await.unwrap().is_some() {}
        }
    });
    let mut client = server.client();
    assert_eq!(client.end(), End::Fin);
    client.write(b"still read");
    eventually("it is read", SOON, || server.stats().counters.bytes_received == 10);
    client.finish_writing();
    server.closed_for(CloseReason::PeerClosed, 1);
    server.finish();
}

#[test]
fn a_reset_is_an_error_to_the_reader_which_is_dropped_then() {
    struct Dropped(Sender<ErrorKind>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            let _ = self.0.send(ErrorKind::Other);
        }
    }
    let (says, hears) = told();
    let server = Streams::start(no_time_limits(), move |_| {
        let says = says.lock().unwrap().clone();
        async move |mut stream: Stream| {
            let dropped = Dropped(says.clone());
            let _ = AsyncWriteExt::write_all(&mut stream, b"hello").await;
            let error = stream.read(&mut [0]).await.unwrap_err();
            says.send(error.kind()).unwrap();
            let error = AsyncWriteExt::write_all(&mut stream, b"more").await.unwrap_err();
            says.send(error.kind()).unwrap();
            // From here on nothing wakes it.
            std::future::pending::<()>().await;
            drop(dropped);
        }
    });
    let mut client = server.client();
    assert_eq!(client.read(5), b"hello");
    client.reset();
    let heard = [hear(&hears), hear(&hears), hear(&hears)];
    assert_eq!(heard, [ErrorKind::ConnectionReset, ErrorKind::BrokenPipe, ErrorKind::Other]);
    server.closed_for(CloseReason::PeerReset, 1);
    server.finish();
}

#[test]
fn halves_that_live_in_other_tasks_hear_of_a_reset() {
    let (says, hears) = told();
    let server = Streams::start(no_time_limits(), move |shard| {
        let (shard, says) = (shard.clone(), says.lock().unwrap().clone());
        async move |stream: Stream| {
            let (mut read, mut write) = tokio::io::split(stream);
            let also_says = says.clone();
            shard.spawn(async move {
                let error = loop {
                    if let Err(error) = read.read(&mut [0; 100]).await {
                        break error;
                    }
                };
                also_says.send(error.kind()).unwrap();
            });
            let says = says.clone();
            // It writes more than the peer takes, and waits for room.
            shard.spawn(async move {
                let error = loop {
                    if let Err(error) = write.write_all(&[0; 10_000]).await {
                        break error;
                    }
                };
                says.send(error.kind()).unwrap();
            });
        }
    });
    let mut client = Client::with_small_window(server.addr());
    client.write(b"x");
    eventually("the outbox is full", SOON, || {
        let counters = server.stats().counters;
        counters.sends > 0 && counters.bytes_received == 1
    });
    client.reset();
    let mut heard = [hear(&hears), hear(&hears)];
    heard.sort_by_key(|kind| *kind == ErrorKind::BrokenPipe);
    assert_eq!(heard, [ErrorKind::ConnectionReset, ErrorKind::BrokenPipe]);
    server.closed_for(CloseReason::PeerReset, 1);
    server.finish();
}

#[test]
fn reading_goes_on_while_nothing_more_can_be_written() {
    // More than the kernel holds.
    const LEN: usize = 32 << 20;
    let server = Streams::start(no_time_limits(), |shard| {
        let shard = shard.clone();
        async move |stream: Stream| {
            let (mut read, mut write) = tokio::io::split(stream);
            let (done, all_read) = (Rc::new(Cell::new(0)), Rc::new(tokio::sync::Notify::new()));
            let (count, tell) = (done.clone(), all_read.clone());
            shard.spawn(async move {
                let mut buf = vec![0; 10_000];
                loop {
                    match read.read(&mut buf).await.unwrap() {
                        0 => break,
                        len => count.set(count.get() + len),
                    }
                }
                tell.notify_one();
            });
            // The peer reads nothing before it has written everything.
            write.write_all(&pattern(LEN)).await.unwrap();
            all_read.notified().await;
            write.write_all(done.get().to_string().as_bytes()).await.unwrap();
            write.shutdown().await.unwrap();
        }
    });
    let mut client = Client::with_small_window(server.addr());
    client.write(&pattern(LEN));
    client.finish_writing();
    let (bytes, end) = client.read_to_end();
    assert!(bytes[..LEN] == pattern(LEN));
    assert_eq!((&bytes[LEN..], end), (LEN.to_string().as_bytes(), End::Fin));
    server.finish();
}

#[test]
fn a_drain_lets_streams_finish_and_tells_those_that_wait() {
    let server = Streams::start(no_time_limits(), |_| {
        async |mut stream: Stream| {
            let mut what = [0];
            stream.read_exact(&mut what).await.unwrap();
            if what == *b"w" {
                AsyncWriteExt::write_all(&mut stream, b"waits").await.unwrap();
                stream.draining().await;
                assert!(stream.is_draining());
                AsyncWriteExt::write_all(&mut stream, b"goodbye").await.unwrap();
            } else {
                AsyncWriteExt::write_all(&mut stream, &pattern(24 << 20)).await.unwrap();
            }
        }
    });
    let mut waits = server.client();
    waits.write(b"w");
    assert_eq!(waits.read(5), b"waits");
    let mut streams = Client::with_small_window(server.addr());
    streams.write(b"s");
    assert!(streams.read(1 << 20) == pattern(24 << 20)[..1 << 20]);
    server.running.shutdown();
    assert_eq!(waits.read_to_end(), (b"goodbye".to_vec(), End::Fin));
    let (rest, end) = streams.read_to_end();
    assert!(rest == pattern(24 << 20)[1 << 20..]);
    assert_eq!(end, End::Fin);
    drop((waits, streams));
    let report = server.finish();
    assert_eq!(report.counters.closed_for(CloseReason::Closed), 2, "{:?}", report.counters);
}

#[test]
fn what_arrived_before_the_order_is_there_when_a_stream_is_told() {
    let (blocks, blocked) = told();
    let (frees, freed) = told::<()>();
    let freed = Arc::new(Mutex::new(freed));
    let server = Streams::start(no_time_limits(), move |_| {
        let (blocks, freed) = (blocks.lock().unwrap().clone(), freed.clone());
        async move |mut stream: Stream| {
            let mut draining = stream.draining();
            loop {
                let frame = poll_fn(|task| match stream.poll_read_frame(task) {
                    Poll::Pending => Pin::new(&mut draining).poll(task).map(|()| Ok(None)),
                    frame => frame,
                });
                let Some(frame) = frame.await? else { return io::Result::Ok(()) };
                if *frame == *b"block" {
                    blocks.send(()).unwrap();
                    freed.lock().unwrap().recv_timeout(SOON).unwrap();
                }
                stream.queue(frame);
            }
        }
    });
    let mut clients: Vec<Client> = (0..600).map(|_| server.client()).collect();
    clients.iter_mut().for_each(|client| echoes(client, b"hello"));
    // Its shard learns of the order before it has the last of the bytes that came ahead: a turn
    // takes 256 completions.
    let (first, rest) = clients.split_first_mut().unwrap();
    first.write(b"block");
    hear(&blocked);
    rest.iter_mut().for_each(|client| client.write(b"the last"));
    server.running.shutdown();
    frees.lock().unwrap().send(()).unwrap();
    assert_eq!(first.read_to_end(), (b"block".to_vec(), End::Fin));
    for client in rest {
        assert_eq!(client.read_to_end(), (b"the last".to_vec(), End::Fin));
    }
    server.finish();
}

#[test]
fn a_stream_that_ignores_the_drain_is_reset_at_its_end() {
    let limits = no_time_limits().drain_timeout(QUIET);
    let (says, hears) = told();
    let server = Streams::start(limits, move |_| {
        let says = says.lock().unwrap().clone();
        async move |mut stream: Stream| {
            says.send(ErrorKind::Other).unwrap();
            let error = stream.read(&mut [0]).await.unwrap_err();
            says.send(error.kind()).unwrap();
        }
    });
    let mut client = server.client();
    hear(&hears);
    server.running.shutdown();
    assert_eq!(client.end(), End::Reset);
    assert_eq!(hear(&hears), ErrorKind::TimedOut);
    let report = server.finish();
    assert_eq!(report.counters.closed_for(CloseReason::DrainTimeout), 1);
}

#[test]
fn a_panic_ends_its_connection_only() {
    let server = Streams::start(no_time_limits(), |shard| {
        let shard = shard.clone();
        async move |mut stream: Stream| {
            let mut what = [0];
            while stream.read_exact(&mut what).await.is_ok() {
                match &what {
                    b"x" => panic!("planted: with bytes behind"),
                    b"s" => {
                        shard.sleep(Duration::from_millis(1)).await;
                        panic!("planted: woken by a timer");
                    }
                    _ => AsyncWriteExt::write_all(&mut stream, &what).await.unwrap(),
                }
            }
        }
    });
    let mut canary = server.client();
    for n in 1..=10 {
        let mut client = server.client();
        client.write([&b"exbehind"[..], &b"es"[..]][n as usize % 2]);
        assert_eq!(client.end_after_all(), End::Reset);
        server.closed_for(CloseReason::HandlerPanicked, n);
        echoes(&mut canary, b"canary");
    }
    drop(canary);
    server.finish();
}

#[test]
fn a_panic_before_anything_is_read_ends_its_connection_only() {
    let server = Streams::start(no_time_limits(), |_| {
        async |stream: Stream| -> () {
            let _stream = stream;
            panic!("planted: at once");
        }
    });
    for n in 1..=3 {
        // The reset may come before this is done.
        let _ = std::net::TcpStream::connect(server.addr());
        server.closed_for(CloseReason::HandlerPanicked, n);
    }
    server.finish();
}

#[test]
fn an_error_closes_after_what_was_written() {
    let server = Streams::start(no_time_limits(), |_| {
        async |mut stream: Stream| {
            let mut what = [0];
            stream.read_exact(&mut what).await?;
            AsyncWriteExt::write_all(&mut stream, b"last words").await?;
            Err::<(), _>(io::Error::other("planted: a stream that fails"))
        }
    });
    let mut client = server.client();
    client.write(b"xy");
    assert_eq!(client.read_to_end(), (b"last words".to_vec(), End::Fin));
    drop(client);
    server.closed_for(CloseReason::HandlerError, 1);
    server.finish();
}

#[test]
fn a_stream_that_is_dropped_closes_and_one_that_aborts_resets() {
    let server = Streams::start(no_time_limits(), |shard| {
        let shard = shard.clone();
        async move |mut stream: Stream| {
            let mut what = [0];
            stream.read_exact(&mut what).await.unwrap();
            stream.queue(b"bye");
            if what == *b"a" {
                stream.abort();
            }
            // The connection's own future is done before it.
            shard.spawn(async move { drop(stream) });
        }
    });
    let mut client = server.client();
    client.write(b"d and more that is not read");
    assert_eq!(client.read_to_end(), (b"bye".to_vec(), End::Fin));
    drop(client);
    server.closed_for(CloseReason::Closed, 1);
    let mut client = server.client();
    client.write(b"a");
    assert_eq!(client.end_after_all(), End::Reset);
    server.closed_for(CloseReason::Aborted, 1);
    server.finish();
}

#[test]
fn a_thousand_streams_at_once_keep_their_bytes_apart() {
    let server = Streams::start(no_time_limits(), |_| echo);
    let mut clients: Vec<Client> = (0..1000).map(|_| server.client()).collect();
    for round in 0..5 {
        let text = |n: usize| format!("round {round} of client {n}, {}", "x".repeat(n));
        clients.iter_mut().enumerate().for_each(|(n, client)| client.write(text(n).as_bytes()));
        for (n, client) in clients.iter_mut().enumerate() {
            assert_eq!(client.read(text(n).len()), text(n).as_bytes());
        }
    }
    assert_eq!(server.stats().connections, 1000);
    drop(clients);
    server.closed_for(CloseReason::PeerClosed, 1000);
    server.finish();
}

#[test]
fn time_limits_apply_but_for_that_of_calls() {
    let limit = Some(Duration::from_millis(200));
    let limits = no_time_limits().first_frame_timeout(limit).handler_timeout(limit);
    let server = Streams::start(limits, |shard| {
        let shard = shard.clone();
        async move |mut stream: Stream| {
            let mut what = [0];
            stream.read_exact(&mut what).await.unwrap();
            shard.sleep(3 * QUIET).await;
            echo(stream).await.unwrap();
        }
    });
    let mut slow = server.client();
    slow.write(b"sread late");
    let mut silent = server.client();
    assert_eq!(silent.end(), End::Fin);
    server.closed_for(CloseReason::FirstFrameTimeout, 1);
    assert_eq!(slow.read(9), b"read late");
    drop((slow, silent));
    server.finish();

    let server = Streams::start(no_time_limits().idle_timeout(limit), |_| echo_frames);
    let mut idle = server.client();
    echoes(&mut idle, b"hello");
    assert_eq!(idle.end(), End::Fin);
    server.closed_for(CloseReason::IdleTimeout, 1);
    server.finish();

    let server = Streams::start(no_time_limits().write_stall_timeout(limit), |_| {
        async |mut stream: Stream| AsyncWriteExt::write_all(&mut stream, &[7; 64 << 20]).await
    });
    let mut deaf = Client::with_small_window(server.addr());
    server.closed_for(CloseReason::WriteStallTimeout, 1);
    assert_eq!(deaf.end_after_all(), End::Reset);
    server.finish();
}

#[test]
fn a_handle_ends_a_stream_from_another_thread() {
    let (says, hears) = told();
    let server = Streams::start(no_time_limits(), move |_| {
        let says = says.lock().unwrap().clone();
        async move |mut stream: Stream| {
            stream.queue(b"queued");
            says.send(stream.handle()).unwrap();
            while stream.read_frame().await.is_ok_and(|frame| frame.is_some()) {}
        }
    });
    let ends: [fn(&StreamHandle); 2] = [StreamHandle::close, StreamHandle::abort];
    for (ends, seen) in ends.into_iter().zip([End::Fin, End::Reset]) {
        let mut client = server.client();
        let handle = hear(&hears);
        assert_eq!(client.read(6), b"queued");
        assert!(!handle.is_gone());
        ends(&handle);
        assert!(handle.is_gone());
        assert_eq!(client.end(), seen);
    }
    server.finish();
}
