//! Tasks, their handles and their connections, intervals, handles on connections, channels: in
//! simulations, by seed.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::future::{pending, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use ringserve_server::framing::Lines;
use ringserve_server::sync::{Mesh, Mutex, Notify, Semaphore, broadcast, mpsc, oneshot, watch};
use ringserve_server::task::{JoinError, SpawnError};
use ringserve_server::testing::{Faults, Sim, TestConn};
use ringserve_server::{
    CloseCx, CloseReason, ConnHandle, Cx, Frame, Limits, LocalHandle, OpenCx, PushError, Refusal, Server,
    Service, Shard,
};

const SECOND: Duration = Duration::from_secs(1);

fn lines() -> Server<Lines> {
    Server::bind("10.0.0.1:7000").framing(Lines::default())
}

/// A service of a shard whose only use is its factory.
struct Mute;

impl Service for Mute {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, _cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Infallible> {
        Ok(())
    }
}

/// Runs `code` as a task of a shard, to its end, for some seeds.
fn on_a_shard<Fut: Future<Output = ()> + 'static>(code: impl Fn(Shard) -> Fut + Clone + 'static) {
    Sim::seeds(20).run(move |sim| {
        let done = Rc::new(Cell::new(false));
        let (code, for_task) = (code.clone(), done.clone());
        sim.serve(lines().shards(1), move |shard| {
            let (future, done) = (code(shard.clone()), for_task.clone());
            shard.spawn(async move {
                future.await;
                done.set(true);
            });
            Mute
        });
        sim.background("nothing", async |_net| Ok(()));
        assert!(sim.run_until(Duration::from_secs(48 * 3600), || done.get()), "the task is not done");
        sim.client("good end", async |_net| Ok(()));
        sim.run_until_done();
    });
}

#[test]
fn handle_gives_the_value_of_a_task_that_awaits_tasks() {
    on_a_shard(async |shard: Shard| {
        let inner = shard.clone();
        let sum = shard.spawn(async move {
            let parts: Vec<_> = (1..=10)
                .map(|n: u64| {
                    let own = inner.clone();
                    inner.spawn(async move {
                        own.sleep(SECOND * (own.random() % 5) as u32).await;
                        n
                    })
                })
                .collect();
            let mut sum = 0;
            for part in parts {
                sum += part.await.unwrap();
            }
            sum
        });
        assert!(!sum.is_finished());
        assert_eq!(sum.await, Ok(55));
    });
}

#[test]
fn handle_of_an_aborted_task_says_so_and_a_dropped_one_detaches() {
    on_a_shard(async |shard: Shard| {
        let counted = Rc::new(());
        let held = counted.clone();
        let waits = shard.spawn(async move {
            let _held = held;
            pending::<u8>().await
        });
        shard.sleep(SECOND).await;
        waits.abort();
        assert_eq!((Rc::strong_count(&counted), waits.is_finished()), (1, true), "dropped at once");
        assert_eq!(waits.await, Err(JoinError::Aborted));
        let (own, done) = (shard.clone(), Rc::new(Cell::new(false)));
        let for_task = done.clone();
        drop(shard.spawn(async move {
            own.sleep(SECOND).await;
            for_task.set(true);
        }));
        shard.sleep(2 * SECOND).await;
        assert!(done.get(), "a task without a handle goes on");
        let ready = shard.spawn(async { "early" });
        shard.sleep(SECOND).await;
        ready.abort();
        assert_eq!(ready.await, Ok("early"), "an abort does not take back what is done");
    });
}

#[test]
fn handle_of_a_task_that_panics_has_its_message() {
    let found = Rc::new(RefCell::new(Vec::new()));
    let for_run = found.clone();
    Sim::seeds(1).allow_panics(|said| said.starts_with("planted")).run(move |sim| {
        let found = for_run.clone();
        sim.serve(lines().shards(1), move |shard| {
            let (own, found) = (shard.clone(), found.clone());
            shard.spawn(async move {
                let bad = own.spawn_named::<()>("bad", async { panic!("planted: a task panics") });
                let error = bad.await.unwrap_err();
                found.borrow_mut().push(error);
            });
            Mute
        });
        sim.client("waits", async |net| {
            net.sleep(SECOND).await;
            Ok(())
        });
        sim.run_until_done();
    });
    let expected = JoinError::Panicked("planted: a task panics".to_owned());
    assert!(!found.borrow().is_empty() && found.borrow().iter().all(|error| *error == expected));
}

#[test]
fn interval_ticks_at_whole_periods_and_skips_those_it_missed() {
    on_a_shard(async |shard: Shard| {
        let (start, minute) = (shard.now(), 60 * SECOND);
        let mut minutes = shard.interval(minute);
        assert_eq!(minutes.tick().await, start, "the first tick comes at once");
        for n in 1..=24 * 60 {
            let due = minutes.tick().await;
            assert_eq!(due, start + minute * n, "tick {n}");
            assert!(shard.now() - due < Duration::from_millis(3), "tick {n} is late");
        }
        let last = start + minute * (24 * 60);
        shard.sleep(minute * 5 + SECOND).await;
        assert_eq!(minutes.tick().await, last + minute, "the first one that was missed");
        assert_eq!(minutes.tick().await, last + minute * 6, "those after it are skipped");
        // A tick that is given up is not lost.
        assert!(shard.timeout(SECOND, minutes.tick()).await.is_err());
        assert_eq!(minutes.tick().await, last + minute * 7);
        let mut fast = shard.interval(Duration::ZERO);
        let (first, second) = (fast.tick().await, fast.tick().await);
        assert_eq!(second - first, Duration::from_millis(1), "no finer than timers");
    });
}

#[test]
fn tick_that_is_late_leaves_a_turn_to_others_first() {
    on_a_shard(async |shard: Shard| {
        let mut ticks = shard.interval(Duration::from_millis(1));
        ticks.tick().await;
        for _ in 0..10 {
            shard.sleep(Duration::from_millis(10)).await;
            let before = shard.now();
            let mut tick = pin!(ticks.tick());
            let first = poll_fn(|task| Poll::Ready(tick.as_mut().poll(task))).await;
            assert!(first.is_pending(), "work that takes longer than a period would keep the shard");
            tick.await;
            assert!(shard.now() - before < Duration::from_millis(1), "it is woken at once");
        }
    });
}

#[test]
fn sleep_is_what_its_shard_waits_for() {
    on_a_shard(async |shard: Shard| {
        for millis in 1..200 {
            let (time, before) = (Duration::from_millis(millis), shard.now());
            shard.sleep(time).await;
            let slept = shard.now() - before;
            assert!(
                slept >= time && slept < time + Duration::from_millis(3),
                "{slept:?} instead of {time:?}"
            );
        }
    });
}

/// Counts what lives.
struct Alive(Rc<Cell<u32>>);

impl Alive {
    fn new(count: &Rc<Cell<u32>>) -> Alive {
        count.set(count.get() + 1);
        Alive(count.clone())
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// A connection's tasks, counted.
#[derive(Default)]
struct Owner {
    alive: Rc<Cell<u32>>,
    handle: RefCell<Option<LocalHandle>>,
}

/// Has tasks for its connections, and others beside them.
struct Tasks {
    closed: Rc<Cell<u32>>,
    outlived: Rc<Cell<u32>>,
    pushed: Rc<Cell<u32>>,
}

impl Service for Tasks {
    type Session = Owner;
    type Error = Infallible;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<Owner, Refusal> {
        let owner = Owner::default();
        let (shard, alive) = (opening.shard().clone(), Alive::new(&owner.alive));
        let (handle, pushed) = (opening.local_handle(), self.pushed.clone());
        let ticks = opening.spawn_on_connection(async move {
            let _alive = alive;
            let mut ticks = shard.interval(SECOND);
            loop {
                ticks.tick().await;
                pushed.set(pushed.get() + u32::from(handle.push("tick").is_ok()));
            }
        });
        ticks.unwrap();
        // It goes on when the connection ended, and finds that out.
        let (handle, shard, outlived) = (opening.handle(), opening.shard().clone(), self.outlived.clone());
        let closed = self.closed.clone();
        owner.handle.replace(Some(opening.local_handle()));
        opening.shard().spawn(async move {
            handle.closed().await;
            assert!(closed.get() > 0, "the service heard of the end before");
            assert!(handle.is_gone() && handle.push("late") == Err(PushError::Gone));
            handle.ready().await;
            handle.closed().await;
            shard.sleep(SECOND).await;
            outlived.set(outlived.get() + 1);
        });
        Ok(owner)
    }

    async fn call(&self, cx: &Cx<'_, Owner>, line: Frame) -> Result<(), Infallible> {
        let (alive, shard) = (Alive::new(&cx.session().alive), cx.shard().clone());
        let time = SECOND * (shard.random() % 4) as u32;
        let spawned = cx.spawn_on_connection(async move {
            let _alive = alive;
            shard.sleep(time).await;
            time
        });
        match spawned {
            Ok(handle) if line.starts_with(b"wait") => assert_eq!(handle.await, Ok(time)),
            Ok(_detached) => {}
            Err(error) => assert_eq!(error, SpawnError::Full),
        }
        cx.reply(line);
        Ok(())
    }

    fn close(&self, closed: &CloseCx<'_, Owner>) {
        let session = closed.session();
        assert_eq!(session.alive.get(), 0, "tasks of a connection are dropped before its close");
        assert!(session.handle.borrow().as_ref().is_some_and(LocalHandle::is_gone));
        self.closed.set(self.closed.get() + 1);
    }
}

#[test]
fn tasks_of_a_connection_end_before_its_close_others_do_not() {
    let pushed_in_all = Rc::new(Cell::new(0));
    let total = pushed_in_all.clone();
    Sim::seeds(60).faults(Faults::all()).run(move |sim| {
        let counts: [Rc<Cell<u32>>; 3] = Default::default();
        let [closed, outlived, pushed] = counts.clone();
        let limits = Limits::default().connection_tasks_max(4);
        let server = lines().shards(1).limits(limits);
        let addr = sim.serve(server, move |_shard| {
            let (closed, outlived, pushed) = (closed.clone(), outlived.clone(), pushed.clone());
            Tasks { closed, outlived, pushed }
        });
        for n in 0..4 {
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                for round in 0..net.random() % 12 {
                    let verb = if net.random().is_multiple_of(2) { "wait" } else { "go" };
                    me.send(format!("{verb} {round}\n")).await?;
                    while me.line().await?.ok_or("the end")? == "tick" {}
                }
                match net.random() % 3 {
                    0 => me.reset(),
                    1 => me.finish()?,
                    _ => net.sleep(3 * SECOND).await,
                }
                Ok(())
            });
        }
        sim.run_until_done();
        let [closed, outlived, pushed] = counts;
        assert!(
            sim.run_until(Duration::from_secs(7200), || closed.get() > 0 && outlived.get() == closed.get()),
            "{} tasks saw {} ends",
            outlived.get(),
            closed.get()
        );
        total.set(total.get() + pushed.get());
    });
    assert!(pushed_in_all.get() > 100, "{} pushes", pushed_in_all.get());
}

type Ends = Rc<RefCell<Vec<Result<(), JoinError>>>>;

/// Spawns on its connection what a line says, and notes how that ends.
struct Spawner(Ends);

impl Service for Spawner {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        let panics = line.starts_with(b"panic");
        let spawned = cx.spawn_on_connection(async move {
            assert!(!panics, "planted: a connection's task panics");
            pending().await
        });
        match spawned {
            Ok(handle) => {
                let ends = self.0.clone();
                cx.spawn(async move {
                    let end = handle.await;
                    ends.borrow_mut().push(end);
                });
                cx.reply("spawned");
            }
            Err(error) => cx.reply(error.to_string().as_str()),
        }
        if line.starts_with(b"close") {
            cx.close();
        }
        Ok(())
    }
}

#[test]
fn connection_takes_no_more_tasks_than_its_limit() {
    let ends = Ends::default();
    let for_shard = ends.clone();
    let mut conn = TestConn::open(move |_shard| Spawner(for_shard.clone()));
    for _ in 0..Limits::default().connection_tasks_max {
        assert_eq!(conn.call("waits").replies, [b"spawned"]);
    }
    let full = SpawnError::Full.to_string();
    assert_eq!(conn.call("waits").replies, [full.as_bytes()]);
    assert!(ends.borrow().is_empty());
    assert_eq!(conn.call("close").replies, [full.as_bytes()]);
    conn.pass(SECOND);
    assert_eq!(conn.close_reason(), Some(CloseReason::Closed));
    assert_eq!(*ends.borrow(), vec![Err(JoinError::ConnectionEnded); 64]);
}

#[test]
fn panic_in_a_connections_task_resets_the_connection() {
    let ends = Ends::default();
    let for_run = ends.clone();
    Sim::seeds(1).allow_panics(|said| said.starts_with("planted")).run(move |sim| {
        let ends = for_run.clone();
        let server = sim.start(lines().shards(1), move |_shard| Spawner(ends.clone())).unwrap();
        let addr = server.addr();
        sim.client("me", async move |net| {
            let mut me = net.connect(addr).await?;
            me.send("waits\n").await?;
            assert_eq!(me.line().await?.as_deref(), Some("spawned"));
            me.send("panics\n").await?;
            assert!(me.closed().await.is_err(), "a reset");
            Ok(())
        });
        sim.run_until_done();
        assert_eq!(server.stats().counters.closed_for(CloseReason::HandlerPanicked), 1);
    });
    let panicked = JoinError::Panicked("planted: a connection's task panics".to_owned());
    assert!(
        ends.borrow().contains(&Err(panicked)) && ends.borrow().contains(&Err(JoinError::ConnectionEnded))
    );
}

/// A message to another shard about a connection of this one.
type Given = Mesh<ConnHandle>;

/// Bytes of a push.
const PUSH: usize = 1500;
const PUSHES: usize = 40;

/// Gives each connection to the next shard, which pushes as much as the connection takes.
struct Gives {
    given: Given,
}

impl Gives {
    fn new(shard: &Shard, given: &Given) -> Gives {
        let own = shard.clone();
        given.register(shard, move |_from, handle: ConnHandle| {
            assert_ne!(handle.shard(), own.index(), "it came from another shard");
            own.spawn(async move {
                for n in 0..PUSHES {
                    let text = format!("{n:0PUSH$}");
                    let push = || match n % 2 {
                        0 => handle.push(text.clone()),
                        _ => handle.push_raw(format!("{text}\n")),
                    };
                    while push() == Err(PushError::Full) {
                        handle.ready().await;
                    }
                }
                handle.close();
                handle.closed().await;
                assert!(handle.is_gone());
            });
        });
        Gives { given: given.clone() }
    }
}

impl Service for Gives {
    type Session = ();
    type Error = Infallible;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<(), Refusal> {
        let shard = opening.shard();
        let to = (shard.index() + 1) % shard.count();
        self.given.try_send(to, opening.handle()).map_err(|_| Refusal::new("the mesh is full"))
    }

    async fn call(&self, _cx: &Cx<'_, ()>, _line: Frame) -> Result<(), Infallible> {
        Ok(())
    }
}

#[test]
fn waiting_pushes_reach_a_slow_reader_whole_and_in_order() {
    let limits = Limits::default().outbox_bytes_low(1 << 10).outbox_bytes_high(4 << 10);
    Sim::seeds(50).faults(Faults::harmless()).run(move |sim| {
        let given = Given::new();
        let server = lines().shards(2).limits(limits.clone().first_frame_timeout(None));
        let addr = sim.serve(server, move |shard| Gives::new(shard, &given));
        for n in 0..3 {
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                for n in 0..PUSHES {
                    net.sleep(Duration::from_micros(net.random() % 50_000)).await;
                    assert_eq!(me.line().await?, Some(format!("{n:0PUSH$}")));
                }
                assert_eq!(me.closed().await?, b"");
                Ok(())
            });
        }
        sim.run_until_done();
    });
}

#[test]
fn channels_and_locks_work_between_tasks_of_a_shard() {
    on_a_shard(async |shard: Shard| {
        let (jobs, mut waiting) = mpsc::channel::<(u64, oneshot::Sender<u64>)>(2);
        let (state, mut changes) = watch::channel(0);
        let (said, mut heard) = broadcast::channel(64);
        let (permits, busy) = (Rc::new(Semaphore::new(3)), Rc::new(Cell::new(0)));
        let (log, over) = (Rc::new(Mutex::new(Vec::new())), Rc::new(Notify::new()));
        let worker = shard.spawn(async move {
            while let Some((n, answer)) = waiting.recv().await {
                state.send_replace(n);
                said.send(n).unwrap();
                answer.send(n * n).unwrap();
            }
        });
        let askers: Vec<_> = (1..=20)
            .map(|n: u64| {
                let (shard, jobs, permits) = (shard.clone(), jobs.clone(), permits.clone());
                let (busy, log, over) = (busy.clone(), log.clone(), over.clone());
                shard.clone().spawn(async move {
                    let _permit = permits.acquire().await.unwrap();
                    busy.set(busy.get() + 1);
                    assert!(busy.get() <= 3, "{} permits", busy.get());
                    shard.sleep(SECOND * (shard.random() % 3) as u32).await;
                    let (answer, answered) = oneshot::channel();
                    jobs.send((n, answer)).await.unwrap();
                    assert_eq!(answered.await, Ok(n * n));
                    let mut log = log.lock().await;
                    shard.sleep(Duration::from_millis(shard.random() % 5)).await;
                    log.push(n);
                    busy.set(busy.get() - 1);
                    over.notify_one();
                })
            })
            .collect();
        drop(jobs);
        while log.lock().await.len() < 20 {
            over.notified().await;
        }
        for asker in askers {
            asker.await.unwrap();
        }
        worker.await.unwrap();
        assert!(changes.has_changed().is_err() || *changes.borrow_and_update() > 0);
        let mut sum = 0;
        while let Ok(n) = heard.recv().await {
            sum += n;
        }
        assert_eq!((sum, log.lock().await.iter().sum::<u64>()), (210, 210));
    });
}
