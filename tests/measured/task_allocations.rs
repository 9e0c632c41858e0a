//! A task allocates its future and nothing else, with a handle or without.
//!
//! The allocator counts for the whole process, so there is one test in this file, and its client
//! allocates nothing while it is counted either.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io::{Read, Write};
use std::task::Poll;

use ringserve::framing::Lines;
use ringserve::{Cx, Frame, Service};
use ringserve_tests::{Client, On, alone, no_time_limits, watch};
use stats_alloc::Region;

const WARM_UP: usize = 1_000;
const ROUNDS: usize = 5_000;

/// Spawns a task for each frame, as its first byte orders, and answers once the task is done.
struct Spawner;

/// Waits once.
async fn yields(value: u64) -> u64 {
    let mut waited = false;
    poll_fn(|task| {
        if std::mem::replace(&mut waited, true) {
            return Poll::Ready(value);
        }
        task.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}

impl Service for Spawner {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        match line[0] {
            b'n' => {}
            b'd' => drop(cx.spawn(yields(1))),
            b'j' => assert_eq!(cx.spawn(yields(7)).await, Ok(7)),
            b'c' => assert_eq!(cx.spawn_on_connection(yields(7)).expect("there is room").await, Ok(7)),
            b'a' => cx.spawn(std::future::pending::<u64>()).abort(),
            other => panic!("{other} is nothing to spawn"),
        }
        cx.reply(line);
        Ok(())
    }
}

#[test]
fn a_task_allocates_its_future_alone() {
    if !alone(a_task_allocates_its_future_alone) {
        return;
    }
    let server = On::default().server(no_time_limits().unwatched()).framing(Lines::default());
    let running = server.start(|_shard| Spawner).expect("the server starts");
    let mut client = Client::connect(running.local_addrs()[0]);
    let mut echo = |line: &[u8; 2], rounds: usize| {
        let mut back = [0; 2];
        for _ in 0..rounds {
            client.stream.write_all(line).unwrap();
            client.stream.read_exact(&mut back).unwrap();
        }
        assert_eq!(&back, line);
    };
    // The list of a connection's tasks is created with the first one.
    for (line, what, each) in [
        (b"n\n", "none", 0),
        (b"d\n", "detached", 1),
        (b"j\n", "awaited", 1),
        (b"a\n", "aborted", 1),
        (b"c\n", "of a connection", 2),
    ] {
        echo(line, WARM_UP);
        let region = Region::new(crate::ALLOCATOR);
        echo(line, ROUNDS);
        let change = region.change();
        let made = (change.allocations, change.reallocations);
        println!("{what}: {made:?} in {ROUNDS} tasks");
        // A few in addition: a list of the driver's or the shard's may grow once.
        let beside = made.0.checked_sub(each * ROUNDS).expect("each task allocates");
        assert!(beside + made.1 < 8, "{what}: {made:?} allocations and reallocations in {ROUNDS} tasks");
    }
    drop(client);
    watch::holds(&running, 0);
    ringserve_tests::finish(running);
}
