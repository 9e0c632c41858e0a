//! No byte ever reaches another connection: each one sends only its own tag, and nothing else comes
//! back.

use std::cell::Cell;
use std::convert::Infallible;
use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::task::Poll;
use std::thread;
use std::time::Duration;

use ringserve::{Cx, Frame, Service};
use ringserve_tests::{Client, On, Random, SOON, eventually, finish, no_time_limits};

const THREADS: u64 = 4;
const CONNECTIONS: u64 = 1500;

/// Errors on the server's side.
#[derive(Default)]
struct Seen {
    strangers: AtomicU64,
}

/// Echoes; every few frames it waits for another thread first.
struct Tagged(Arc<Seen>);

#[derive(Default)]
struct Tag {
    tag: Cell<Option<u64>>,
    frames: Cell<u64>,
}

impl Service for Tagged {
    type Session = Tag;
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, Tag>, frame: Frame) -> Result<(), Infallible> {
        let session = cx.session();
        session.frames.set(session.frames.get() + 1);
        if session.frames.get().is_multiple_of(5) {
            let (done, mut started) = (Arc::new(AtomicBool::new(false)), false);
            std::future::poll_fn(|task| {
                if done.load(SeqCst) {
                    return Poll::Ready(());
                }
                if !std::mem::replace(&mut started, true) {
                    let (done, waker) = (done.clone(), task.waker().clone());
                    thread::spawn(move || {
                        done.store(true, SeqCst);
                        waker.wake_by_ref();
                        // One wake-up too many, which may find the next call in its place.
                        waker.wake();
                    });
                }
                Poll::Pending
            })
            .await;
        }
        let (tags, _rest) = frame.as_chunks::<8>();
        for tag in tags {
            let tag = u64::from_be_bytes(*tag);
            let own = session.tag.get().unwrap_or(tag);
            session.tag.set(Some(own));
            self.0.strangers.fetch_add(u64::from(tag != own), SeqCst);
        }
        cx.reply(frame);
        Ok(())
    }
}

#[test]
fn connections_that_come_and_go_see_their_own_bytes_only() {
    let seen = Arc::new(Seen::default());
    let for_shard = seen.clone();
    // Few slots and small buffers, so that both are reused at once.
    let limits = no_time_limits()
        .connections_max(24)
        .receive_buffer_bytes(512)
        .receive_bytes_max(64 * 512)
        // A reset may go unreported for a while: such a connection is idle.
        .idle_timeout(Duration::from_millis(200));
    let server = On::default().server(limits).framing(ringserve::framing::LengthPrefix::default());
    let running = server.start(move |_| Tagged(for_shard.clone())).unwrap();
    let addr = running.local_addrs()[0];
    let bytes = AtomicU64::new(0);
    thread::scope(|scope| {
        for part in 0..THREADS {
            let bytes = &bytes;
            scope.spawn(move || {
                let mut random = Random::new(part + 1);
                for n in 0..CONNECTIONS {
                    bytes.fetch_add(one_connection(addr, part << 32 | n, &mut random), SeqCst);
                }
            });
        }
    });
    assert_eq!(seen.strangers.load(SeqCst), 0);
    assert!(bytes.load(SeqCst) > 1 << 20, "{bytes:?} bytes came back");
    // The last ones may still be queued in the kernel, and a server that shuts down accepts no
    // more.
    let all = THREADS * CONNECTIONS;
    eventually("all are accepted", SOON, || running.stats_now().counters.accepted == all);
    finish(running);
}

/// Sends frames of its tag, and ends in the middle, in one way or the other. Returns the number of
/// bytes that came back.
fn one_connection(addr: SocketAddr, tag: u64, random: &mut Random) -> u64 {
    let mut client = Client::connect(addr);
    // Below the limits of a kernel socket, so that it need not read while it writes.
    let mut wire = Vec::new();
    for _ in 0..1 + random.below(12) {
        wire.extend_from_slice(&ringserve_tests::client::frame(
            tag.to_be_bytes().repeat(random.below(300) as usize),
        ));
    }
    if random.below(8) == 0 {
        wire.truncate(random.below(wire.len() as u64 + 1) as usize);
    }
    client.stream.write_all(&wire).unwrap();
    let wanted = match random.below(3) {
        0 => wire.len(),
        _ => random.below(wire.len() as u64 + 1) as usize,
    };
    if random.below(3) == 0 {
        client.finish_writing();
    }
    let mut back = vec![0; wanted];
    let mut read = 0;
    // A frame cut off has no reply: the end comes, or a look later would wait for ever.
    client.stream.set_nonblocking(random.below(4) == 0).unwrap();
    let whole = whole_frames(&wire);
    while read < wanted.min(whole) {
        match client.stream.read(&mut back[read..wanted.min(whole)]) {
            Ok(0) => break,
            Ok(n) => read += n,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(back[..read] == wire[..read], "a byte of another connection in {tag:x}");
    if random.below(2) == 0 {
        client.reset();
    }
    read as u64
}

/// Bytes of whole frames at the start.
fn whole_frames(wire: &[u8]) -> usize {
    let mut end = 0;
    while let Some(len) = wire.get(end..end + 4) {
        let next = end + 4 + u32::from_be_bytes(len.try_into().unwrap()) as usize;
        if next > wire.len() {
            break;
        }
        end = next;
    }
    end
}
