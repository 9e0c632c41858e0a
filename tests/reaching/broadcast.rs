//! One reply to all connections at once: more sends in one turn than the submission queue has
//! entries.

use std::cell::RefCell;
use std::convert::Infallible;

use ringserve::framing::LengthPrefix;
use ringserve::handle::LocalHandle;
use ringserve::service::{OpenCx, Refusal};
use ringserve::{Cx, Frame, Service};
use ringserve_tests::{Client, On, SOON, eventually, finish, no_time_limits, on_epoll};

/// The size of a shard's submission queue.
const ENTRIES: usize = 512;

const MEMBERS: usize = 1000;
const TEXTS: usize = 20;

/// Sends every frame to all connections that exist.
#[derive(Default)]
struct Broadcast(RefCell<Vec<LocalHandle>>);

impl Service for Broadcast {
    type Session = ();
    type Error = Infallible;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<(), Refusal> {
        self.0.borrow_mut().push(opening.local_handle());
        Ok(())
    }

    async fn call(&self, _cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        for member in self.0.borrow().iter() {
            member.push(&frame).expect("they live and read");
        }
        Ok(())
    }
}

#[test]
fn broadcast_beyond_the_submission_queue_reaches_all_in_order() {
    let server = On::default().server(no_time_limits()).framing(LengthPrefix::default());
    let running = server.start(|_| Broadcast::default()).unwrap();
    let addr = running.local_addrs()[0];
    let mut members: Vec<Client> = (0..MEMBERS).map(|_| Client::connect(addr)).collect();
    eventually("all are there", SOON, || running.stats_now().connections == MEMBERS);
    let before = running.stats_now().shards[0].driver;
    let text = |n: usize| format!("text {n}").into_bytes();
    for n in 0..TEXTS {
        members[n * MEMBERS / TEXTS].send(text(n));
        members.iter_mut().for_each(|member| assert_eq!(member.recv(), text(n)));
    }
    let report = running.stats_now();
    assert!(members.iter().all(Client::is_silent), "a member got one more");
    assert_eq!(report.counters.frames, TEXTS as u64);
    assert_eq!(report.counters.sends, (TEXTS * MEMBERS) as u64);
    // At least those of the first one: later ones may find sends in flight, and leave a few at a
    // time.
    let delayed = report.shards[0].driver.submissions_delayed - before.submissions_delayed;
    assert!(on_epoll() || delayed >= (MEMBERS - ENTRIES) as u64, "{delayed} operations had to wait");
    drop(members);
    finish(running);
}
