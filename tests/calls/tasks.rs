//! Handles on tasks, and tasks that end with their connection.

use std::convert::Infallible;
use std::future::pending;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ringserve::framing::LengthPrefix;
use ringserve::server::Runtime;
use ringserve::service::CloseCx;
use ringserve::task::{JoinError, SpawnError};
use ringserve::{CloseReason, Cx, Frame, ServerHandle, Service};
use ringserve_tests::client::End;
use ringserve_tests::{Client, On, SOON, eventually, finish, no_time_limits, watch};

/// Events of tasks.
#[derive(Default)]
struct Seen {
    dropped: AtomicU64,
    /// Tasks that were dropped when each connection was closed.
    at_close: Mutex<Vec<u64>>,
    /// The ends of tasks whose handles were awaited by others.
    ends: Mutex<Vec<JoinError>>,
}

struct Dropped(Arc<Seen>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.dropped.fetch_add(1, SeqCst);
    }
}

async fn for_ever(dropped: Dropped) {
    let _dropped = dropped;
    pending().await
}

/// Spawns the tasks that a frame names, and answers it.
struct Spawner(Arc<Seen>);

impl Service for Spawner {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        match &frame[..] {
            b"value" => {
                let shard = cx.shard().clone();
                let outer = cx.spawn(async move {
                    let inner = shard.clone();
                    let half = shard.spawn(async move {
                        inner.sleep(Duration::from_millis(5)).await;
                        20
                    });
                    half.await.map(|half| half + 1)
                });
                assert_eq!(outer.await, Ok(Ok(21)));
            }
            b"abort" => {
                let task = cx.spawn(for_ever(Dropped(self.0.clone())));
                cx.sleep(Duration::from_millis(1)).await;
                task.abort();
                assert_eq!(task.await, Err(JoinError::Aborted));
            }
            b"panic" => {
                let task = cx.spawn_named::<()>("rotten", async { panic!("planted: a named task panics") });
                let end = task.await;
                assert_eq!(end, Err(JoinError::Panicked("planted: a named task panics".to_owned())));
            }
            b"own" => match cx.spawn_on_connection(for_ever(Dropped(self.0.clone()))) {
                Ok(task) => {
                    let seen = self.0.clone();
                    cx.spawn(async move {
                        let end = task.await.expect_err("it never ends");
                        seen.ends.lock().unwrap().push(end);
                    });
                }
                Err(error) => {
                    assert_eq!(error, SpawnError::Full);
                    cx.reply(b"full");
                    return Ok(());
                }
            },
            b"own panic" => {
                cx.spawn_on_connection(async { panic!("planted: a connection's task panics") }).unwrap();
                return pending().await;
            }
            other => panic!("{other:?} is nothing to spawn"),
        }
        cx.reply(frame);
        Ok(())
    }

    fn close(&self, _closed: &CloseCx<'_, ()>) {
        self.0.at_close.lock().unwrap().push(self.0.dropped.load(SeqCst));
    }
}

/// Also in a runtime, where a shard that sleeps must be informed of its tasks.
#[track_caller]
fn on_each(test: impl Fn(ServerHandle, Client, Arc<Seen>)) {
    for runtime in [Runtime::Own, Runtime::Tokio] {
        let seen = Arc::new(Seen::default());
        let for_shard = seen.clone();
        let limits = no_time_limits().connection_tasks_max(8);
        let server = On::default().server(limits).runtime(runtime).framing(LengthPrefix::default());
        let running = server.start(move |_| Spawner(for_shard.clone())).unwrap();
        let client = Client::connect(running.local_addrs()[0]);
        test(running, client, seen);
    }
}

#[test]
fn call_awaits_values_aborts_and_panics_of_tasks() {
    on_each(|running, mut client, seen| {
        for order in ["value", "abort", "panic"].repeat(20) {
            assert_eq!(client.ask(order), order.as_bytes());
        }
        assert_eq!(seen.dropped.load(SeqCst), 20);
        drop(client);
        let report = finish(running);
        assert_eq!(report.counters.closed_for(CloseReason::HandlerPanicked), 0);
    });
}

#[test]
fn connection_tasks_are_bounded_and_dropped_before_its_close() {
    on_each(|running, mut client, seen| {
        let mut other = Client::connect(running.local_addrs()[0]);
        assert_eq!(other.ask("own"), b"own");
        (0..8).for_each(|_| assert_eq!(client.ask("own"), b"own"));
        assert_eq!((client.ask("own"), seen.dropped.load(SeqCst)), (b"full".to_vec(), 1));
        client.reset();
        watch::closed_for(&running, CloseReason::PeerReset, 1);
        eventually("the ends are seen", SOON, || seen.ends.lock().unwrap().len() == 8);
        assert_eq!(*seen.at_close.lock().unwrap(), [9]);
        assert!(seen.ends.lock().unwrap().iter().all(|end| *end == JoinError::ConnectionEnded));
        assert_eq!(other.ask("own"), b"own", "those of another one go on");
        // A drain does not wait for them.
        running.shutdown();
        assert_eq!(other.end(), End::Fin);
        drop(other);
        finish(running);
        assert_eq!(*seen.at_close.lock().unwrap(), [9, 11]);
    });
}

#[test]
fn panic_of_a_connections_task_resets_that_connection_alone() {
    on_each(|running, mut client, _seen| {
        let mut other = Client::connect(running.local_addrs()[0]);
        assert_eq!(other.ask("value"), b"value");
        client.send("own panic");
        assert_eq!(client.end(), End::Reset);
        watch::closed_for(&running, CloseReason::HandlerPanicked, 1);
        assert_eq!(other.ask("value"), b"value");
        drop(other);
        finish(running);
    });
}
