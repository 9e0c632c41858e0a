//! Factories that wait: in simulations, by seed.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::future::pending;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ringserve_server::framing::{Decode, EncodeError, Encoding, FrameError, Framing, Lines, Outbox, Payload};
use ringserve_server::limits::ServerLimits;
use ringserve_server::listen::tcp;
use ringserve_server::sync::{AskError, Mesh};
use ringserve_server::testing::{Faults, Sim, TestConn, frame};
use ringserve_server::{Cx, Error, Frame, IntoService, Server, ServerControl, Service, Shard, from_future};

const SECOND: Duration = Duration::from_secs(1);

const UPSTREAM: &str = "10.2.0.1:9000";

fn lines() -> Server<Lines> {
    Server::bind("10.0.0.1:7000").framing(Lines::default())
}

/// Answers with what it was made with.
#[derive(Debug)]
struct Says(String);

impl Service for Says {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Infallible> {
        cx.reply(self.0.as_str());
        Ok(())
    }
}

/// Notes that it was dropped.
struct Dropped(Arc<Mutex<Vec<usize>>>, usize);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.lock().unwrap().push(self.1);
    }
}

/// An upstream that greets each connection after `after`.
fn upstream(sim: &Sim, after: Duration) {
    sim.background("upstream", async move |net| {
        let mut listener = net.listen(UPSTREAM)?;
        loop {
            let mut stream = listener.accept().await;
            let clock = net.clone();
            net.spawn(async move {
                clock.sleep(after).await;
                let _ = stream.send("hello\n").await;
                let _ = stream.some().await;
            });
        }
    });
    // Until it listens.
    sim.run_for(SECOND);
}

async fn greeted(shard: Shard) -> std::io::Result<Says> {
    let mut stream = shard.connect(UPSTREAM).await?;
    let mut greeting = Vec::new();
    while !greeting.ends_with(b"\n") {
        greeting.extend_from_slice(&stream.read_frame().await?.expect("a greeting"));
    }
    Ok(Says(format!("{} {}", shard.index(), String::from_utf8(greeting).unwrap().trim())))
}

#[test]
fn factory_waits_for_an_upstream_and_peers_for_the_factory() {
    Sim::seeds(100).faults(Faults::harmless()).run(|sim| {
        upstream(sim, 20 * SECOND);
        sim.client("early", async |net| {
            let mut me = net.connect("10.0.0.1:7000").await?;
            me.send("x\n").await?;
            let line = me.line().await?.expect("an answer");
            assert!(line.ends_with(" hello"), "{line}");
            assert!(net.now() >= 20 * SECOND, "answered before the services were there");
            Ok(())
        });
        sim.serve(lines().shards(3), |shard| from_future(greeted(shard.clone())));
        assert!(sim.now() >= 20 * SECOND);
        sim.run_until_done();
    });
}

#[test]
fn all_shards_accept_once_the_last_service_is_there() {
    Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
        let addr = sim.serve(lines().shards(3), |shard| {
            let shard = shard.clone();
            from_future(async move {
                shard.sleep((1 + shard.index() as u32) * SECOND).await;
                Says(shard.index().to_string())
            })
        });
        assert!(sim.now() >= 3 * SECOND);
        for n in 0..6 {
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                me.send("x\n").await?;
                assert!(me.line().await?.is_some());
                Ok(())
            });
        }
        sim.run_until_done();
    });
}

/// Services that are there.
type There = Arc<AtomicUsize>;

/// The number of services that a task of each of three shards finds there when the start is over.
fn found_by_tasks<M: IntoService<Lines>>(
    sim: &Sim,
    make: impl Fn(&Shard, There) -> M + 'static,
) -> Vec<usize> {
    let (there, found) = (There::default(), Arc::new(Mutex::new(Vec::new())));
    let all = found.clone();
    sim.serve(lines().shards(3), move |shard| {
        let (task, seen, found) = (shard.clone(), there.clone(), all.clone());
        shard.spawn(async move {
            task.started().await.expect("it starts");
            found.lock().unwrap().push(seen.load(Ordering::SeqCst));
        });
        make(shard, there.clone())
    });
    sim.run_for(SECOND);
    let found = found.lock().unwrap();
    found.clone()
}

#[test]
fn task_that_waits_for_the_start_finds_all_shards_there() {
    fn says(there: &There) -> Says {
        there.fetch_add(1, Ordering::SeqCst);
        Says(String::new())
    }
    Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
        let found = found_by_tasks(sim, |shard, there| {
            let shard = shard.clone();
            from_future(async move {
                shard.sleep(3 * SECOND * shard.index() as u32).await;
                says(&there)
            })
        });
        assert_eq!(found, [3, 3, 3]);
    });
    Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
        assert_eq!(found_by_tasks(sim, |_shard, there| says(&there)), [3, 3, 3]);
    });
}

#[test]
fn task_hears_that_the_server_does_not_come_to_serve() {
    Sim::seeds(50).run(|sim| {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let told = heard.clone();
        let started = sim.start(lines().shards(3), move |shard| {
            let (task, told) = (shard.clone(), told.clone());
            shard.spawn(async move {
                let started = task.started().await;
                told.lock().unwrap().push(started.is_ok());
            });
            let shard = shard.clone();
            from_future(async move {
                shard.sleep(SECOND).await;
                match shard.index() {
                    1 => Err("no journal"),
                    _ => pending::<Result<Says, &str>>().await,
                }
            })
        });
        assert!(started.is_err());
        assert_eq!(*heard.lock().unwrap(), [false; 3]);
    });
}

#[test]
fn capture_of_a_factory_lives_until_the_last_shard_ended() {
    Sim::seeds(20).run(|sim| {
        let dropped = Arc::new(Mutex::new(Vec::new()));
        let lock = Dropped(dropped.clone(), 0);
        let server = sim.start(lines().shards(2), move |_shard| {
            let _held = &lock;
            Says(String::new())
        });
        let server = server.expect("it starts");
        sim.run_for(SECOND);
        assert!(dropped.lock().unwrap().is_empty(), "as long as it serves");
        sim.finish();
        assert!(server.is_done());
        assert_eq!(*dropped.lock().unwrap(), [0]);
    });
}

#[test]
fn services_of_a_server_wait_at_the_same_time() {
    Sim::seeds(50).run(|sim| {
        let wait = |shard: &Shard, time: Duration, says: &'static str| {
            let shard = shard.clone();
            from_future(async move {
                shard.sleep(time).await;
                Ok::<_, Infallible>(Says(says.to_owned()))
            })
        };
        let server = Server::new()
            .shards(2)
            .service(tcp("10.0.0.1:7000").framing(Lines::default()), move |shard| {
                wait(shard, 5 * SECOND, "first")
            })
            .service(tcp("10.0.0.1:7001").framing(Lines::default()), |_| Says("second".to_owned()))
            .service(tcp("10.0.0.1:7002").framing(Lines::default()), move |shard| {
                wait(shard, 6 * SECOND, "third")
            });
        let addrs = sim.serve_several(server);
        assert!(sim.now() < 7 * SECOND, "one after the other: {:?}", sim.now());
        for (addr, says) in addrs.into_iter().zip(["first", "second", "third"]) {
            sim.client(says, async move |net| {
                let mut me = net.connect(addr).await?;
                me.send("x\n").await?;
                assert_eq!(me.line().await?.as_deref(), Some(says));
                Ok(())
            });
        }
        sim.run_until_done();
    });
}

#[test]
fn error_after_a_wait_ends_the_start_and_drops_the_others() {
    Sim::seeds(50).run(|sim| {
        let dropped = Arc::new(Mutex::new(Vec::new()));
        let of_all = dropped.clone();
        let started = sim.start(lines().shards(3), move |shard| {
            let (shard, noted) = (shard.clone(), Dropped(of_all.clone(), shard.index()));
            from_future(async move {
                let _noted = noted;
                shard.sleep(SECOND).await;
                match shard.index() {
                    1 => Err("no database"),
                    _ => pending().await,
                }
                .map(|()| Says(String::new()))
            })
        });
        assert_eq!(started.unwrap_err().to_string(), "no service for shard 1: no database");
        let mut dropped = dropped.lock().unwrap().clone();
        dropped.sort_unstable();
        assert_eq!(dropped, [0, 1, 2]);
    });
}

#[test]
fn failing_service_of_several_is_named() {
    Sim::seeds(20).allow_panics(|said| said.starts_with("planted")).run(|sim| {
        for panics in [false, true] {
            let server = Server::new()
                .service(tcp("10.0.0.1:7000").framing(Lines::default()).name("chat"), |_| {
                    from_future(pending::<Says>())
                })
                .service(tcp("10.0.0.1:7001").framing(Lines::default()).name("admin"), move |shard| {
                    let shard = shard.clone();
                    from_future(async move {
                        shard.sleep(SECOND).await;
                        assert!(!panics, "planted");
                        Err::<Says, _>("no database")
                    })
                });
            let error = sim.start_several(server).unwrap_err().to_string();
            let why = if panics {
                "the factory panicked for shard 0: planted"
            } else {
                "no service for shard 0: no database"
            };
            assert_eq!(error, format!("service admin: {why}"));
        }
    });
}

#[test]
fn first_error_is_told_though_another_service_drop_panics() {
    /// A destructor that panics.
    struct Bomb;

    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("planted");
        }
    }

    Sim::seeds(20).allow_panics(|said| said.starts_with("planted")).run(|sim| {
        let server = Server::new()
            .service(tcp("10.0.0.1:7000").framing(Lines::default()).name("chat"), |shard| {
                let shard = shard.clone();
                from_future(async move {
                    shard.sleep(SECOND).await;
                    Err::<Says, _>("no database")
                })
            })
            .service(tcp("10.0.0.1:7001").framing(Lines::default()).name("admin"), |_| {
                let bomb = Bomb;
                from_future(async move {
                    let _bomb = bomb;
                    pending::<Says>().await
                })
            });
        let error = sim.start_several(server).unwrap_err();
        assert_eq!(error.to_string(), "service chat: no service for shard 0: no database");

        let server = Server::new()
            .service(tcp("10.0.0.1:7000").framing(Lines::default()).name("chat"), |_| {
                let bomb = Bomb;
                from_future(async move {
                    let _bomb = bomb;
                    pending::<Says>().await
                })
            })
            .service(tcp("10.0.0.1:7001").framing(Lines::default()).name("admin"), |_| {
                Err::<Says, _>("no database")
            });
        let error = sim.start_several(server).unwrap_err();
        assert_eq!(error.to_string(), "service admin: no service for shard 0: no database");
    });
}

/// Lines, whose destructor panics once it is armed.
#[derive(Clone)]
struct Fragile(Arc<AtomicBool>);

impl Framing for Fragile {
    fn decode(&self, bytes: &[u8], scanned: usize) -> Result<Decode, FrameError> {
        Lines::default().decode(bytes, scanned)
    }

    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        Lines::default().encode(payload, out)
    }

    // So that the shard's replies do not hold it.
    fn encoding(self: &Rc<Self>) -> Encoding {
        Encoding::of(&Lines::default())
    }
}

impl Drop for Fragile {
    fn drop(&mut self) {
        assert!(!self.0.swap(false, Ordering::Relaxed), "planted: a framing panics in its drop");
    }
}

#[test]
fn panic_beside_a_service_that_is_not_made_ends_the_start() {
    Sim::seeds(20).allow_panics(|said| said.starts_with("planted")).run(|sim| {
        let armed = Arc::new(AtomicBool::new(false));
        let framing = Fragile(armed.clone());
        let server = Server::new().shards(1).service(tcp("10.0.0.1:7000").framing(framing), move |shard| {
            let (shard, armed) = (shard.clone(), armed.clone());
            from_future(async move {
                shard.sleep(SECOND).await;
                armed.store(true, Ordering::Relaxed);
                Err::<Says, _>("planted")
            })
        });
        let error = sim.start_several(server).unwrap_err();
        assert_eq!(error.to_string(), "the factory panicked for shard 0: its message is in the log");
    });
}

#[test]
fn failed_start_leaves_its_addresses_to_the_next_server() {
    Sim::seeds(5).run(|sim| {
        let says = |_: &Shard| Says("there".to_owned());
        let started = sim.start(lines().listen_unix("/run/app.sock"), says);
        assert!(matches!(started, Err(Error::Listen { .. })), "{started:?}");
        let addr = sim.serve(lines(), says);
        sim.client("peer", async move |net| {
            let mut me = net.connect(addr).await?;
            me.send("x\n").await?;
            assert_eq!(me.line().await?.as_deref(), Some("there"));
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn start_timeout_names_the_service_that_is_waited_for() {
    Sim::seeds(20).run(|sim| {
        let limits = ServerLimits::default().start_timeout(30 * SECOND);
        let server = Server::new()
            .shards(2)
            .server_limits(limits)
            .service(tcp("10.0.0.1:7000").framing(Lines::default()).name("chat"), |shard| {
                let shard = shard.clone();
                from_future(async move {
                    if shard.index() == 1 {
                        pending::<()>().await;
                    }
                    Says(String::new())
                })
            })
            .service(tcp("10.0.0.1:7001").framing(Lines::default()).name("admin"), |_| Says(String::new()));
        let error = sim.start_several(server).unwrap_err();
        let waited = "service chat: the factory for shard 1 was not done within 30s, which is ServerLimits::start_timeout";
        let then = "raise it, or set None to wait without a limit";
        assert_eq!(error.to_string(), format!("{waited}; {then}"));
        assert!((30 * SECOND..32 * SECOND).contains(&sim.now()), "{:?}", sim.now());
    });
}

#[test]
fn order_to_stop_ends_a_start_whose_factory_hangs() {
    for aborts in [false, true] {
        Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
            let control = Rc::new(RefCell::new(None::<ServerControl>));
            let (given, dropped) = (control.clone(), Arc::new(Mutex::new(Vec::new())));
            let of_all = dropped.clone();
            sim.client("operator", async move |net| {
                net.sleep(3 * SECOND).await;
                let control = control.borrow().clone().expect("the factory was called");
                if aborts {
                    control.abort()
                } else {
                    control.shutdown()
                }
                Ok(())
            });
            let started = sim.start(lines().shards(2), move |shard| {
                given.replace(Some(shard.server().clone()));
                let noted = Dropped(of_all.clone(), shard.index());
                from_future(async move {
                    let _noted = noted;
                    pending::<Says>().await
                })
            });
            assert!(matches!(started, Err(Error::Interrupted)), "{started:?}");
            assert_eq!(dropped.lock().unwrap().len(), 2);
            assert!(sim.now() < 10 * SECOND, "{:?}", sim.now());
        });
    }
}

#[test]
fn future_finds_every_shard_that_registered_in_its_factory() {
    Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
        let (early, late) = (Mesh::<u64, u64>::new(), Mesh::<(), ()>::new());
        sim.serve(lines().shards(3), move |shard| {
            let (shard, early, late) = (shard.clone(), early.clone(), late.clone());
            early.register(&shard, |_from, number| 2 * number);
            from_future(async move {
                let answers = early.ask_all(|to| to as u64).await;
                assert_eq!(answers, [Ok(0), Ok(2), Ok(4)]);
                shard.sleep(SECOND).await;
                if shard.index() == 0 {
                    late.register(&shard, |_from, ()| ());
                    assert_eq!(late.ask(1, ()).await, Err(AskError::Gone), "it registers later");
                    shard.sleep(2 * SECOND).await;
                    assert_eq!(late.ask(1, ()).await, Ok(()));
                } else {
                    shard.sleep(SECOND).await;
                    late.register(&shard, |_from, ()| ());
                }
                Says(String::new())
            })
        });
    });
}

#[test]
fn task_of_a_shard_runs_while_its_factory_waits() {
    Sim::seeds(20).run(|sim| {
        let ticks = Rc::new(Cell::new(0));
        let counted = ticks.clone();
        sim.serve(lines(), move |shard| {
            let (shard, ticks) = (shard.clone(), counted.clone());
            let (of_task, mut seconds) = (ticks.clone(), shard.interval(SECOND));
            shard.spawn(async move {
                loop {
                    seconds.tick().await;
                    of_task.set(of_task.get() + 1);
                }
            });
            from_future(async move {
                let blocked = shard.spawn_blocking(|| 3).await.unwrap();
                shard.sleep(blocked * 10 * SECOND).await;
                Says(ticks.get().to_string())
            })
        });
        assert!(ticks.get() >= 29, "{}", ticks.get());
    });
}

#[test]
fn factory_of_a_test_connection_may_wait() {
    let mut conn = TestConn::open(|shard| {
        let shard = shard.clone();
        from_future(async move {
            shard.sleep(SECOND).await;
            Says("made".to_owned())
        })
    });
    assert_eq!(conn.call(frame("x")).replies, [b"made"]);
}
