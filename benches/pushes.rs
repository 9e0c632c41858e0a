//! A push to a connection of another shard, under load: CPU time of the pushing thread, and of the shard, for each push
//! of 64 bytes. The peer reads on a third thread.

use std::convert::Infallible;
use std::io::Read;
use std::net::TcpStream;
use std::sync::Mutex;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;
use std::{fs, thread};

use criterion::{Criterion, criterion_group, criterion_main};
use ringserve::{ConnHandle, Cx, Frame, PushError, Refusal, Server, Service};
use rustix::time::{ClockId, clock_gettime};

/// Hands out the handle of whoever connects.
struct Handles(Mutex<Sender<ConnHandle>>);

impl Service for Handles {
    type Session = ();
    type Error = Infallible;

    fn open(&self, cx: &Cx<'_, ()>) -> Result<(), Refusal> {
        let sender = self.0.lock().expect("nobody panics");
        sender.send(cx.handle()).map_err(|_| Refusal::new("the benchmark is over"))
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

/// CPU time of the shard's thread.
fn shard_cpu() -> Duration {
    let tasks = fs::read_dir("/proc/self/task").expect("/proc is there").flatten();
    let shard = tasks
        .map(|task| task.path())
        .find(|task| fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == "ringserve-0"));
    let text = fs::read_to_string(shard.expect("a shard runs").join("schedstat")).expect("it still does");
    Duration::from_nanos(text.split(' ').next().and_then(|time| time.parse().ok()).unwrap_or(0))
}

fn pushes(criterion: &mut Criterion) {
    let (sender, handles) = channel();
    let server = Server::bind("127.0.0.1:0").shards(1).pin(false);
    let sender = Mutex::new(sender);
    let running = server
        .start(move |_| Handles(Mutex::new(sender.lock().expect("nobody panics").clone())))
        .expect("the server starts");
    let mut peer = TcpStream::connect(running.local_addrs()[0]).expect("it listens");
    let handle = handles.recv().expect("it accepts");
    let reader = thread::spawn(move || {
        let mut bytes = vec![0; 1 << 18];
        while peer.read(&mut bytes).is_ok_and(|len| len > 0) {}
    });
    let payload = bytes::Bytes::from_static(&[b'x'; 64]);
    let (mut count, shard_before) = (0u64, shard_cpu());
    let mut group = criterion.benchmark_group("push");
    // In the pusher's time; the shard and the peer take several times as long.
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
                // Full: the peer catches up.
                thread::yield_now();
            }
            count += times;
            spent
        });
    });
    group.finish();
    let shard = shard_cpu() - shard_before;
    println!("the shard's own time: {:?} a push, sending included", shard / count.max(1) as u32);
    handle.close();
    assert_eq!(reader.join().ok(), Some(()));
    assert_eq!(handle.push(payload), Err(PushError::Gone));
    running.force();
}

criterion_group!(benches, pushes);
criterion_main!(benches);
