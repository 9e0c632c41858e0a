//! Sleeping, deadlines, and tasks of a shard.

use std::cell::Cell;
use std::convert::Infallible;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use ringserve::framing::{LengthPrefix, Lines};
use ringserve::{CloseReason, Cx, Frame, ServerHandle, Service};
use ringserve_tests::client::{End, frame};
use ringserve_tests::{Client, Lab, On, SOON, eventually, finish, no_time_limits, order};

#[test]
fn a_sleep_is_never_early_and_others_go_on_meanwhile() {
    let lab = Lab::start(no_time_limits());
    let (mut sleeps, mut other) = (lab.client(), lab.client());
    let started = Instant::now();
    sleeps.send(order::sleep(300));
    let mut asked = 0;
    while sleeps.is_silent() {
        other.echoes("");
        asked += 1;
    }
    assert!(started.elapsed() >= Duration::from_millis(300), "it woke up after {:?}", started.elapsed());
    assert_eq!(sleeps.recv(), order::sleep(300));
    assert!(asked > 1, "no other peer was served");
    lab.finish();
}

/// Measures each sleep where it happens.
struct Sleeper(Arc<Slept>);

#[derive(Default)]
struct Slept {
    sleeps: AtomicU64,
    early: AtomicU64,
}

impl Service for Sleeper {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        let micros = std::str::from_utf8(&line).unwrap().parse().unwrap();
        let (time, started) = (Duration::from_micros(micros), Instant::now());
        cx.sleep(time).await;
        self.0.sleeps.fetch_add(1, SeqCst);
        self.0.early.fetch_add(u64::from(started.elapsed() < time), SeqCst);
        cx.reply(line);
        Ok(())
    }
}

#[test]
fn many_sleep_at_once_for_different_times_and_none_wakes_early() {
    let slept = Arc::new(Slept::default());
    let for_shard = slept.clone();
    let server = On::default().server(no_time_limits()).framing(Lines::default());
    let running = server.start(move |_| Sleeper(for_shard.clone())).unwrap();
    let mut clients: Vec<Client> = (0..200).map(|_| Client::connect(running.local_addrs()[0])).collect();
    for round in 0..5 {
        // From zero over parts of a step to a few levels of the wheel.
        let time = |n: u64| (n * n * 9 + round * 777) % 400_000;
        clients.iter_mut().zip(0..).for_each(|(client, n)| client.write(format!("{}\n", time(n)).as_bytes()));
        for (client, n) in clients.iter_mut().zip(0..) {
            let line = format!("{}\n", time(n));
            assert_eq!(client.read(line.len()), line.as_bytes());
        }
    }
    assert_eq!((slept.sleeps.load(SeqCst), slept.early.load(SeqCst)), (1000, 0));
    finish(running);
}

#[test]
fn a_sleep_keeps_the_shard_asleep() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.client();
    let before = lab.stats().shards[0].driver.turns;
    client.gets_back(order::sleep(1000));
    let turns = lab.stats().shards[0].driver.turns - before;
    // Frame, levels of the wheel, waking up, the reply, the two reports.
    assert!(turns <= 12, "{turns} turns in a second of sleep");
    lab.finish();
}

#[test]
fn frames_behind_a_sleep_keep_their_order() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.client();
    let texts: Vec<String> = (0..60).map(|n| format!("{}{},", ["e", "S", "t"][n % 3], n % 7)).collect();
    client.write(&texts.iter().flat_map(|text| frame(text.as_bytes())).collect::<Vec<u8>>());
    texts.iter().for_each(|text| assert_eq!(client.recv(), text.as_bytes()));
    lab.finish();
}

#[test]
fn peer_that_ends_while_its_call_sleeps_leaves_nothing() {
    let lab = Lab::start(no_time_limits());
    let handles: Vec<_> = (0..50)
        .map(|n: u32| {
            let mut client = lab.reached(&n.to_string());
            client.send(order::sleep(3_600_000));
            lab.holds(n as usize + 1);
            (client, lab.shared.handle(&n.to_string()))
        })
        .collect();
    for (n, (client, handle)) in handles.into_iter().enumerate() {
        if n % 2 == 0 { client.reset() } else { handle.abort() }
    }
    lab.holds(0);
    lab.client().gets_back(order::sleep(1));
    lab.finish();
}

#[test]
fn a_deadline_that_is_over_drops_what_it_was_for() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.client();
    for n in 1..=5 {
        let started = Instant::now();
        assert_eq!(client.ask(order::time_out(50)), b"elapsed");
        assert!(started.elapsed() >= Duration::from_millis(50));
        assert_eq!(lab.shared.dropped.load(SeqCst), n, "what was waited for is dropped before the answer");
    }
    lab.finish();
}

#[test]
fn a_deadline_that_is_not_over_gives_back_what_came() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.client();
    (0..1000).for_each(|_| client.gets_back(order::in_time("at once")));
    assert_eq!(lab.finish().counters.closed_for(CloseReason::Shutdown), 1);
}

/// Events of its tasks.
#[derive(Default)]
struct Tasks {
    done: AtomicU64,
    dropped: AtomicU64,
    clock: AtomicU64,
}

/// Spawns the tasks that a line names, and answers it.
struct Spawner {
    tasks: Arc<Tasks>,
    /// Shared with tasks: they run on this thread.
    running: Rc<Cell<u32>>,
}

struct Dropped(Arc<Tasks>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.dropped.fetch_add(1, SeqCst);
    }
}

impl Service for Spawner {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        let (shard, tasks, running) = (cx.shard().clone(), self.tasks.clone(), self.running.clone());
        let _detached = match &line[..] {
            b"sleeps" => cx.spawn(async move {
                running.set(running.get() + 1);
                shard.sleep(Duration::from_millis(100)).await;
                running.set(running.get() - 1);
                tasks.done.fetch_add(1, SeqCst);
            }),
            b"spawns" => cx.spawn(async move {
                let inner = tasks.clone();
                shard.spawn(async move {
                    inner.done.fetch_add(1, SeqCst);
                });
                tasks.done.fetch_add(1, SeqCst);
            }),
            b"panics" => cx.spawn(async move {
                shard.sleep(Duration::from_millis(1)).await;
                panic!("planted: a task panics");
            }),
            b"for ever" => cx.spawn(async move {
                let _dropped = Dropped(tasks);
                std::future::pending().await
            }),
            b"late" => cx.spawn(async move {
                let kept = shard.timeout(Duration::from_millis(20), std::future::pending::<()>()).await;
                assert!(kept.is_err());
                tasks.done.fetch_add(1, SeqCst);
            }),
            b"running" => return self.answer(cx, self.running.get()),
            other => panic!("{other:?} is nothing to spawn"),
        };
        cx.reply(line);
        Ok(())
    }
}

impl Spawner {
    fn answer(&self, cx: &Cx<'_, ()>, number: u32) -> Result<(), Infallible> {
        cx.reply(number.to_string().as_bytes());
        Ok(())
    }
}

fn spawner() -> (ServerHandle, Arc<Tasks>, Client) {
    let tasks = Arc::new(Tasks::default());
    let for_shard = tasks.clone();
    let server = On::default().server(no_time_limits()).framing(LengthPrefix::default());
    let start = move |shard: &ringserve::Shard| {
        // A task of the factory that never ends by itself.
        let (clock, ticks) = (for_shard.clone(), shard.clone());
        shard.spawn(async move {
            let _dropped = Dropped(clock.clone());
            loop {
                ticks.sleep(Duration::from_millis(10)).await;
                clock.clock.fetch_add(1, SeqCst);
            }
        });
        Spawner { tasks: for_shard.clone(), running: Rc::default() }
    };
    let running = server.start(start).unwrap();
    let client = Client::connect(running.local_addrs()[0]);
    (running, tasks, client)
}

#[test]
fn a_task_outlives_the_connection_that_spawned_it() {
    let (running, tasks, mut client) = spawner();
    (0..100).for_each(|_| assert_eq!(client.ask("sleeps"), b"sleeps"));
    drop(client);
    eventually("all are done", SOON, || tasks.done.load(SeqCst) == 100);
    let mut next = Client::connect(running.local_addrs()[0]);
    assert_eq!(next.ask("running"), b"0");
    drop(next);
    finish(running);
}

#[test]
fn a_task_may_spawn_and_keep_a_deadline() {
    let (running, tasks, mut client) = spawner();
    (0..10).for_each(|_| assert_eq!(client.ask("spawns"), b"spawns"));
    (0..10).for_each(|_| assert_eq!(client.ask("late"), b"late"));
    eventually("all are done", SOON, || tasks.done.load(SeqCst) == 30);
    drop(client);
    finish(running);
}

#[test]
fn a_task_that_panics_ends_alone() {
    let (running, tasks, mut client) = spawner();
    assert_eq!(client.ask("sleeps"), b"sleeps");
    (0..10).for_each(|_| assert_eq!(client.ask("panics"), b"panics"));
    eventually("the other one is done", SOON, || tasks.done.load(SeqCst) == 1);
    let ticks = tasks.clock.load(SeqCst);
    eventually("the factory's task goes on", SOON, || tasks.clock.load(SeqCst) > ticks + 2);
    assert_eq!(client.ask("running"), b"0");
    drop(client);
    let report = finish(running);
    assert_eq!(report.counters.closed_for(CloseReason::HandlerPanicked), 0);
}

#[test]
fn tasks_end_with_their_shard_and_hold_up_no_shutdown() {
    let (running, tasks, mut client) = spawner();
    (0..10).for_each(|_| assert_eq!(client.ask("for ever"), b"for ever"));
    running.shutdown();
    assert_eq!(client.end(), End::Fin);
    drop(client);
    finish(running);
    assert_eq!(tasks.dropped.load(SeqCst), 11, "with that of the factory");
}
