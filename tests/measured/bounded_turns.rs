//! Bounds of a turn's work: the rest comes in later turns, and completely.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::future::poll_fn;
use std::io::{ErrorKind, Write};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::task::{Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use ringserve::framing::Lines;
use ringserve::sync::Mesh;
use ringserve::{Cx, Frame, Server, Service};
use ringserve_tests::Bounded;
use ringserve_tests::{Client, EndOf, SOON, alone, eventually, no_time_limits};

/// Connections that send empty lines without end.
const FLOODERS: usize = 500;

/// Waits until it is polled again, which must be at once.
async fn yield_now() {
    let mut yielded = false;
    poll_fn(|cx| match std::mem::replace(&mut yielded, true) {
        true => Poll::Ready(()),
        false => {
            cx.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await;
}

/// Counts lines, and answers those that are not empty with the number of lines before; "wait" only
/// after it waited.
struct Count(Arc<AtomicU64>);

impl Service for Count {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        let mut lines = self.0.fetch_add(1, SeqCst);
        if *line == *b"wait" {
            // More often than tasks are polled in one turn.
            for _ in 0..10 {
                yield_now().await;
            }
            lines = self.0.load(SeqCst);
        }
        if !line.is_empty() {
            cx.reply(lines.to_string().as_bytes());
        }
        Ok(())
    }
}

fn line(client: &mut Client) -> u64 {
    let mut text = Vec::new();
    while text.last() != Some(&b'\n') {
        text.extend(client.read(1));
    }
    String::from_utf8(text).unwrap().trim().parse().unwrap()
}

/// Runs `ask` while each of the flooders has filled its buffers, and passes it the number of lines
/// handled so far.
fn while_others_flood<S>(make: fn(Arc<AtomicU64>) -> S, ask: impl FnOnce(&mut Client, &AtomicU64))
where
    S: Service<Session = ()>,
{
    let lines = Arc::new(AtomicU64::new(0));
    let counted = lines.clone();
    let server = Server::bind("127.0.0.1:0").shards(1).pin(false).bounded(no_time_limits());
    let running = server.framing(Lines::default()).start(move |_| make(counted.clone())).unwrap();
    let addr = running.local_addrs()[0];
    let mut flooders: Vec<Client> = (0..FLOODERS).map(|_| Client::connect(addr)).collect();
    let mut pinger = Client::connect(addr);
    let (over, full) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let _over = EndOf(&over);
        let (over, full, flooders) = (&over, &full, &mut flooders);
        scope.spawn(move || {
            let empty = [b'\n'; 64 << 10];
            flooders.iter().for_each(|flooder| flooder.stream.set_nonblocking(true).unwrap());
            let mut turned_away = vec![false; FLOODERS];
            while !over.load(SeqCst) {
                for (flooder, turned_away) in flooders.iter_mut().zip(&mut turned_away) {
                    match flooder.stream.write(&empty) {
                        Ok(_) => {}
                        Err(error) if error.kind() == ErrorKind::WouldBlock => *turned_away = true,
                        Err(error) => panic!("{error}"),
                    }
                }
                full.store(turned_away.iter().all(|turned_away| *turned_away), SeqCst);
            }
        });
        eventually("each flooder has filled its buffers", 4 * SOON, || full.load(SeqCst));
        ask(&mut pinger, &lines);
    });
    // Waiting for their bytes is not worth the time.
    flooders.into_iter().for_each(Client::reset);
    drop(pinger);
    ringserve_tests::finish(running);
}

/// The most lines of the flooders that were handled before a line of the pinger was answered.
fn most_lines_before_an_answer_to(asked: &[u8]) -> u64 {
    let mut most = 0;
    while_others_flood(Count, |pinger, lines| {
        for _ in 0..20 {
            let before = lines.load(SeqCst);
            pinger.write(asked);
            most = most.max(line(pinger) - before);
        }
    });
    eprintln!("{:?} was answered after {most} lines at most", String::from_utf8_lossy(asked));
    most
}

#[test]
fn a_ping_waits_for_one_batch_of_each_flooder() {
    if !alone(a_ping_waits_for_one_batch_of_each_flooder) {
        return;
    }
    let most = most_lines_before_an_answer_to(b"ping\n");
    // A round of batches of 16 is 8000; then the turns in which the ping was in flight. Without
    // bounds it is millions.
    assert!(most < 4 * 16 * FLOODERS as u64, "{most} lines before a ping");
}

#[test]
fn a_call_that_waited_goes_on_while_others_flood() {
    if !alone(a_call_that_waited_goes_on_while_others_flood) {
        return;
    }
    let most = most_lines_before_an_answer_to(b"wait\n");
    // The same as for a ping, and the turns until it is polled.
    assert!(most < 8 * 16 * FLOODERS as u64, "{most} lines before a call went on");
}

/// [`Count`], with calls that take 5 µs each.
struct Busy(Arc<AtomicU64>);

impl Service for Busy {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        let began = Instant::now();
        while began.elapsed() < Duration::from_micros(5) {}
        Count(self.0.clone()).call(cx, line).await
    }
}

/// Only the peer's own frames count, so that lines for which its client was late do not: they come
/// together.
#[test]
fn fewer_frames_of_others_go_before_where_calls_take_long() {
    if !alone(fewer_frames_of_others_go_before_where_calls_take_long) {
        return;
    }
    const PINGS: usize = 400;
    let mut most = 0;
    while_others_flood(Busy, |pinger, _| {
        pinger.write(&b"ping\n".repeat(PINGS));
        let lines: Vec<u64> = (0..PINGS).map(|_| line(pinger)).collect();
        most = lines.windows(2).map(|two| two[1] - two[0]).max().unwrap();
    });
    eprintln!("{most} lines at most");
    assert!(most <= 6000, "{most} lines between two pings");
}

/// Tasks that wait until a line comes, and then count themselves.
#[derive(Clone, Default)]
struct Crowd {
    open: Rc<Cell<bool>>,
    wakers: Rc<RefCell<Vec<Waker>>>,
    through: Rc<Cell<u64>>,
}

impl Service for Crowd {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        if line.is_empty() {
            self.open.set(true);
            self.wakers.take().into_iter().for_each(Waker::wake);
        }
        cx.reply(self.through.get().to_string().as_bytes());
        Ok(())
    }
}

#[test]
fn tasks_beyond_the_bound_of_a_turn_are_all_polled() {
    if !alone(tasks_beyond_the_bound_of_a_turn_are_all_polled) {
        return;
    }
    const TASKS: u64 = 20_000;
    let server = Server::bind("127.0.0.1:0").shards(1).pin(false).bounded(no_time_limits());
    let running = server.framing(Lines::default()).start(|shard| {
        let crowd = Crowd::default();
        for _ in 0..TASKS {
            let crowd = crowd.clone();
            shard.spawn(async move {
                poll_fn(|cx| match crowd.open.get() {
                    true => Poll::Ready(()),
                    false => {
                        crowd.wakers.borrow_mut().push(cx.waker().clone());
                        Poll::Pending
                    }
                })
                .await;
                // Wakes itself while others of the turn are left.
                yield_now().await;
                crowd.through.set(crowd.through.get() + 1);
            });
        }
        crowd
    });
    let running = running.unwrap();
    let mut client = Client::connect(running.local_addrs()[0]);
    client.write(b"\n");
    line(&mut client);
    let mut last = 0;
    eventually("every task is through", SOON, || {
        client.write(b"how many?\n");
        last = line(&mut client);
        last == TASKS
    });
    drop(client);
    ringserve_tests::finish(running);
}

#[test]
fn messages_beyond_the_bound_of_a_turn_arrive_in_order() {
    if !alone(messages_beyond_the_bound_of_a_turn_arrive_in_order) {
        return;
    }
    const MESSAGES: u64 = 20_000;
    let shards = Mesh::new();
    let server = Server::bind("127.0.0.1:0").shards(1).pin(false).bounded(no_time_limits());
    let handled = Arc::new(AtomicU64::new(0));
    let (joined, in_shard) = (shards.clone(), handled.clone());
    let running = server.framing(Lines::default()).start(move |shard| {
        let next = in_shard.clone();
        joined.register(shard, move |_from, number: u64| {
            assert_eq!(next.load(SeqCst), number);
            next.store(number + 1, SeqCst);
        });
        Count(Arc::default())
    });
    let running = running.unwrap();
    (0..MESSAGES).for_each(|number| shards.try_send(0, number).unwrap());
    eventually("every message is handled", SOON, || handled.load(SeqCst) == MESSAGES);
    ringserve_tests::finish(running);
}
