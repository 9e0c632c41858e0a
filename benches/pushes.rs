//! A push to a connection of another shard.
//!
//! Under load: CPU time of the pushing thread, and of the shard, for each push of 64 bytes. The
//! peer reads on a third thread.
//!
//! In lock step: a frame at one shard becomes a push to a connection of another one, which sleeps;
//! CPU time of both shards for each frame, the wake-up included.

use std::convert::Infallible;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{fs, thread};

use bytes::Bytes;
use criterion::{Criterion, criterion_group, criterion_main};
use ringserve::handle::PushError;
use ringserve::service::{OpenCx, Refusal};
use ringserve::{ConnHandle, Cx, Frame, Server, Service};
use rustix::time::{ClockId, clock_gettime};

/// Hands out the handle of each connection.
struct Handles(Mutex<Sender<ConnHandle>>);

impl Service for Handles {
    type Session = ();
    type Error = Infallible;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<(), Refusal> {
        let sender = self.0.lock().expect("no thread panics");
        sender.send(opening.handle()).map_err(|_| Refusal::new("the benchmark is over"))
    }

    async fn call(&self, _cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Infallible> {
        Ok(())
    }
}

/// CPU time of this thread.
fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// CPU time of all shards' threads.
fn shards_cpu() -> Duration {
    let tasks = fs::read_dir("/proc/self/task").expect("/proc is there").flatten().map(|task| task.path());
    let is_shard = |task: &PathBuf| {
        fs::read_to_string(task.join("comm")).is_ok_and(|name| {
            name.trim().strip_prefix("ringserve-").is_some_and(|n| n.parse::<u32>().is_ok())
        })
    };
    let spent = |task: PathBuf| {
        let text = fs::read_to_string(task.join("schedstat")).expect("the shard runs");
        Duration::from_nanos(text.split(' ').next().and_then(|time| time.parse().ok()).unwrap_or(0))
    };
    tasks.filter(is_shard).map(spent).sum()
}

fn pushes(criterion: &mut Criterion) {
    let (sender, handles) = channel();
    let server = Server::bind("127.0.0.1:0").shards(1).pin(false);
    let sender = Mutex::new(sender);
    let running = server
        .start(move |_| Handles(Mutex::new(sender.lock().expect("no thread panics").clone())))
        .expect("the server starts");
    let mut peer = TcpStream::connect(running.local_addrs()[0]).expect("it listens");
    let handle = handles.recv().expect("it accepts");
    let reader = thread::spawn(move || {
        let mut bytes = vec![0; 1 << 18];
        while peer.read(&mut bytes).is_ok_and(|len| len > 0) {}
    });
    let payload = Bytes::from_static(&[b'x'; 64]);
    let (mut count, shard_before) = (0u64, shards_cpu());
    let mut group = criterion.benchmark_group("push");
    // The benchmark counts the pusher's time; the shard and the peer take several times as long.
    group
        .measurement_time(Duration::from_millis(500))
        .warm_up_time(Duration::from_millis(100))
        .sample_size(10);
    group.bench_function("from another thread", |bencher| {
        bencher.iter_custom(|times| {
            let mut spent = Duration::ZERO;
            let mut left = times;
            while left > 0 {
                let before = cpu();
                while left > 0 && handle.push(payload.clone()).is_ok() {
                    left -= 1;
                }
                spent += cpu() - before;
                // The outbox is full: the peer catches up.
                thread::yield_now();
            }
            count += times;
            spent
        });
    });
    group.finish();
    let shard = shards_cpu() - shard_before;
    println!("the shard's own time: {:?} a push, sending included", shard / count.max(1) as u32);
    handle.close();
    assert_eq!(reader.join().ok(), Some(()));
    assert_eq!(handle.push(payload), Err(PushError::Gone));
    running.abort();
}

/// Pushes each frame to the connection of the shard that did not receive it.
#[derive(Default)]
struct Relay {
    ends: Mutex<[Option<ConnHandle>; 2]>,
}

struct RelayShard(Arc<Relay>);

impl Service for RelayShard {
    type Session = ();
    type Error = PushError;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<(), Refusal> {
        let own = opening.shard().index();
        match &mut self.0.ends.lock().expect("no shard panics")[own] {
            Some(_) => Err(Refusal::new("this shard has one")),
            free => {
                *free = Some(opening.handle());
                opening.write(&[own as u8]);
                Ok(())
            }
        }
    }

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), PushError> {
        let other = self.0.ends.lock().expect("no shard panics")[1 - cx.shard().index()].clone();
        other.ok_or(PushError::Gone)?.push(Bytes::copy_from_slice(&frame))
    }
}

fn lock_step(criterion: &mut Criterion) {
    let relay = Arc::new(Relay::default());
    let server = Server::bind("127.0.0.1:0").shards(2).pin(false);
    let running = server.start(move |_| RelayShard(relay.clone())).expect("the server starts");
    let mut peers: [Option<TcpStream>; 2] = [None, None];
    while peers.iter().any(Option::is_none) {
        let mut peer = TcpStream::connect(running.local_addrs()[0]).expect("it listens");
        let mut shard = [0];
        if peer.read_exact(&mut shard).is_ok() {
            peers[usize::from(shard[0])] = Some(peer);
        }
    }
    let [Some(mut from), Some(mut to)] = peers else { unreachable!("both shards have one") };
    let mut bytes = [b'x'; 64];
    let mut group = criterion.benchmark_group("push");
    group
        .measurement_time(Duration::from_millis(500))
        .warm_up_time(Duration::from_millis(100))
        .sample_size(10);
    group.bench_function("from one shard to another that sleeps", |bencher| {
        bencher.iter_custom(|times| {
            let before = shards_cpu();
            for _ in 0..times {
                from.write_all(&bytes).expect("the server reads");
                to.read_exact(&mut bytes).expect("the push arrives");
            }
            shards_cpu() - before
        });
    });
    group.finish();
    running.abort();
}

criterion_group!(benches, pushes, lock_step);
criterion_main!(benches);
