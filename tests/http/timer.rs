//! hyper's timers on a shard.

use std::pin::Pin;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use hyper::rt::{Sleep, Timer};
use ringserve::http::ShardTimer;
use ringserve::{Shard, stream};
use ringserve_tests::{On, SOON, no_time_limits};

const BRIEF: Duration = Duration::from_millis(20);
const LONG: Duration = Duration::from_secs(3600);

/// Runs `body` as a task of a shard, together with a long sleep, and waits until it is done.
fn on_a_shard<F: Future<Output = ()> + 'static>(
    body: impl Fn(Shard, ShardTimer) -> F + Send + Sync + 'static,
) {
    let (done, is_done) = mpsc::channel();
    let server = On::default().server(no_time_limits());
    let running = server.start(move |shard| {
        let timer = ShardTimer::new(shard);
        let (body, done) = (body(shard.clone(), timer.clone()), done.clone());
        shard.spawn(timer.sleep(LONG));
        let own = shard.clone();
        shard.spawn(async move {
            // The long one is in progress, and the shard's task sleeps until then.
            own.sleep(Duration::from_millis(5)).await;
            body.await;
            done.send(()).unwrap();
        });
        stream(async |_stream| {})
    });
    let running = running.expect("the server starts");
    is_done.recv_timeout(SOON).expect("the timers go off");
    ringserve_tests::finish(running);
}

fn took(from: Instant, time: Duration) {
    assert!(from.elapsed() >= time, "{:?} and not {time:?}", from.elapsed());
}

#[test]
fn a_sleep_is_over_in_time_although_a_later_one_is_waited_for() {
    on_a_shard(async |_, timer| {
        for _ in 0..3 {
            let from = Instant::now();
            timer.sleep(BRIEF).await;
            took(from, BRIEF);
        }
        // A time in the past is over at once.
        timer.sleep_until(Instant::now()).await;
        timer.sleep(Duration::ZERO).await;
    });
}

#[test]
fn a_sleep_that_is_reset_keeps_the_new_time() {
    on_a_shard(async |_, timer| {
        let from = Instant::now();
        let mut sleep = timer.sleep(LONG);
        assert!(poll_once(&mut sleep).await.is_none());
        timer.reset(&mut sleep, from + BRIEF);
        assert!(poll_once(&mut sleep).await.is_none());
        timer.reset(&mut sleep, from + 3 * BRIEF);
        sleep.await;
        took(from, 3 * BRIEF);
        let mut sleep = timer.sleep(LONG);
        assert!(poll_once(&mut sleep).await.is_none());
        timer.reset(&mut sleep, Instant::now() + BRIEF);
        sleep.await;
    });
}

#[test]
fn a_sleep_that_is_dropped_leaves_the_others_alone() {
    on_a_shard(async |_, timer| {
        let from = Instant::now();
        let mut sleeps: Vec<_> = (0..100).map(|_| timer.sleep(BRIEF)).collect();
        for sleep in &mut sleeps {
            assert!(poll_once(sleep).await.is_none());
        }
        sleeps.truncate(50);
        let mut later = timer.sleep(3 * BRIEF);
        assert!(poll_once(&mut later).await.is_none());
        for sleep in sleeps {
            sleep.await;
        }
        took(from, BRIEF);
        later.await;
        took(from, 3 * BRIEF);
    });
}

#[test]
fn a_sleep_may_be_carried_to_another_thread() {
    on_a_shard(async |shard, timer| {
        let (done, mut is_done) = tokio::sync::oneshot::channel();
        let from = Instant::now();
        let sleep = timer.sleep(BRIEF);
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(sleep);
            let _ = done.send(());
        });
        shard.timeout(SOON, &mut is_done).await.expect("it is over").unwrap();
        took(from, BRIEF);
    });
}

async fn poll_once(sleep: &mut Pin<Box<dyn Sleep>>) -> Option<()> {
    std::future::poll_fn(|task| {
        std::task::Poll::Ready(match sleep.as_mut().poll(task) {
            std::task::Poll::Ready(()) => Some(()),
            std::task::Poll::Pending => None,
        })
    })
    .await
}
