//! A question of one shard to another, and its answer: CPU time of both shards for each round trip,
//! as the scheduler counts it (schedstat), wake-ups and turns included.
//!
//! * busy: the shards take turns without a break, as under load: a task on each yields again and
//!   again. The time for as many turns without questions is subtracted, so this is what questions
//!   add to turns that are taken anyway. 16 in flight, from one shard or from both.
//! * else: there is nothing to do but questions, so turns count, and shards fall asleep between
//!   them and are woken.

use std::convert::Infallible;
use std::future::poll_fn;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::task::Poll;
use std::time::Duration;
use std::{fs, io, thread};

use criterion::{Criterion, criterion_group, criterion_main};
use ringserve::sync::Mesh;
use ringserve::{Cx, Frame, Server, ServerHandle, Service, Shard};

/// No connection is made.
struct Quiet;

impl Service for Quiet {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, _cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Infallible> {
        Ok(())
    }
}

/// CPU time of all shards' threads.
fn shards_cpu() -> Duration {
    let tasks = fs::read_dir("/proc/self/task").expect("/proc is there").flatten().map(|task| task.path());
    let is_shard = |task: &PathBuf| {
        fs::read_to_string(task.join("comm")).is_ok_and(|name| {
            name.trim().strip_prefix("ringserve-").is_some_and(|n| n.parse::<u32>().is_ok())
        })
    };
    let spent = |task: PathBuf| -> io::Result<Duration> {
        let text = fs::read_to_string(task.join("schedstat"))?;
        let nanos = text.split(' ').next().and_then(|time| time.parse().ok());
        Ok(Duration::from_nanos(nanos.ok_or(io::ErrorKind::InvalidData)?))
    };
    tasks.filter(is_shard).map(|task| spent(task).expect("the shard runs")).sum()
}

/// An order for the shards: a number of questions, with a number in flight.
#[derive(Clone, Copy)]
struct Order {
    count: u64,
    in_flight: u64,
}

/// Keeps shards busy.
#[derive(Default)]
struct Busy {
    is_on: AtomicBool,
    yields: AtomicU64,
}

impl Busy {
    /// Keeps one shard busy as long as it is on.
    async fn keep(&self) {
        while self.is_on.load(Relaxed) {
            self.yields.fetch_add(1, Relaxed);
            let mut is_again = false;
            poll_fn(|task| {
                if std::mem::replace(&mut is_again, true) {
                    return Poll::Ready(());
                }
                task.waker().wake_by_ref();
                Poll::Pending
            })
            .await;
        }
    }
}

/// Wakes the benchmark when all orders are done.
#[derive(Default)]
struct Done {
    left: Mutex<u64>,
    none: Condvar,
}

impl Done {
    fn begin(&self, count: u64) {
        *self.left.lock().expect("no shard panics") = count;
    }

    fn one(&self) {
        let mut left = self.left.lock().expect("no shard panics");
        *left -= 1;
        if *left == 0 {
            self.none.notify_one();
        }
    }

    fn wait(&self) {
        let left = self.left.lock().expect("no shard panics");
        drop(self.none.wait_while(left, |left| *left > 0).expect("no shard panics"));
    }
}

struct Rig {
    orders: Mesh<Order>,
    done: Arc<Done>,
    answered: Arc<AtomicU64>,
    busy: [Arc<Busy>; 2],
    _running: ServerHandle,
}

/// The time for which the shards take turns without questions, to measure the cost of those.
const CALIBRATION: Duration = Duration::from_millis(50);

impl Rig {
    /// Two shards that double numbers for each other.
    fn start() -> Rig {
        let (orders, questions) = (Mesh::<Order>::new(), Mesh::<u64, u64>::new());
        let (done, answered) = (Arc::<Done>::default(), Arc::<AtomicU64>::default());
        let (mesh, all_done, all_answered) = (orders.clone(), done.clone(), answered.clone());
        let busy = <[Arc<Busy>; 2]>::default();
        let all_busy = busy.clone();
        let server = Server::bind("127.0.0.1:0").shards(2).pin(false);
        let running = server.start(move |shard: &Shard| {
            questions.register(shard, |_from, number| 2 * number);
            let (here, questions) = (shard.clone(), questions.clone());
            let (done, answered) = (all_done.clone(), all_answered.clone());
            let busy = all_busy[shard.index()].clone();
            mesh.register(shard, move |_from, order: Order| {
                if order.in_flight == 0 {
                    let busy = busy.clone();
                    here.spawn(async move { busy.keep().await });
                    return;
                }
                for task in 0..order.in_flight {
                    let (here, questions) = (here.clone(), questions.clone());
                    let (done, answered) = (done.clone(), answered.clone());
                    let count = (order.count + task) / order.in_flight;
                    here.clone().spawn(async move {
                        let other = 1 - here.index();
                        for number in 0..count {
                            assert_eq!(questions.ask(other, number).await, Ok(2 * number));
                        }
                        answered.fetch_add(count, SeqCst);
                        done.one();
                    });
                }
            });
            Quiet
        });
        Rig { orders, done, answered, busy, _running: running.expect("the server starts") }
    }

    /// CPU time for that many questions, of which each of the shards asks its part.
    fn run(&self, count: u64, shards: u64, in_flight: u64) -> Duration {
        self.done.begin(shards * in_flight);
        let (cpu, answered) = (shards_cpu(), self.answered.load(SeqCst));
        for shard in 0..shards {
            let order = Order { count: (count + shard) / shards, in_flight };
            self.orders.try_send(shard as usize, order).expect("the shards run");
        }
        self.done.wait();
        assert_eq!(self.answered.load(SeqCst) - answered, count);
        shards_cpu() - cpu
    }

    /// CPU time as [`run`](Self::run) measures it, in addition to turns that are taken anyway.
    fn run_busy(&self, count: u64, shards: u64, in_flight: u64) -> Duration {
        let yields = || self.busy.each_ref().map(|busy| busy.yields.load(Relaxed)).iter().sum::<u64>();
        self.busy.iter().for_each(|busy| busy.is_on.store(true, Relaxed));
        for shard in 0..2 {
            self.orders.try_send(shard, Order { count: 0, in_flight: 0 }).expect("the shards run");
        }
        thread::sleep(CALIBRATION / 10);
        let (cpu, before) = (shards_cpu(), yields());
        thread::sleep(CALIBRATION);
        let (calibrated, turns) = (shards_cpu() - cpu, yields() - before);
        let before = yields();
        let spent = self.run(count, shards, in_flight);
        let anyway = calibrated.mul_f64((yields() - before) as f64 / turns.max(1) as f64);
        self.busy.iter().for_each(|busy| busy.is_on.store(false, Relaxed));
        spent.saturating_sub(anyway)
    }
}

fn asks(criterion: &mut Criterion) {
    let rig = Rig::start();
    let mut group = criterion.benchmark_group("ask");
    group
        .measurement_time(Duration::from_millis(1000))
        .warm_up_time(Duration::from_millis(200))
        .sample_size(10);
    for (name, shards, in_flight, is_busy) in [
        ("busy, both ask, 16 in flight on each", 2, 16, true),
        ("busy, one asks, 16 in flight", 1, 16, true),
        ("both ask, 16 in flight on each", 2, 16, false),
        ("one asks, 16 in flight", 1, 16, false),
        ("one asks, lock step", 1, 1, false),
    ] {
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|times| {
                // The cost of beginning and ending is shared by many.
                let count = times.max(if is_busy { 100_000 } else { 1000 });
                let spent = match is_busy {
                    true => rig.run_busy(count, shards, in_flight),
                    false => rig.run(count, shards, in_flight),
                };
                spent.mul_f64(times as f64 / count as f64)
            });
        });
    }
    group.finish();
}

criterion_group!(benches, asks);
criterion_main!(benches);
