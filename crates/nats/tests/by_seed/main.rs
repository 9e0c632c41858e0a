//! A client of NATS on whole servers by seed, in virtual time, before servers that split, drop,
//! lie, end and come back.

mod ends;
mod peer;
mod requests;
mod subscriptions;

use std::cell::Cell;
use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;

use peer::Peer;
use ringserve::framing::Lines;
use ringserve::testing::{Sim, SimServer};
use ringserve::{Cx, Frame, Server, Service, Shard};
use ringserve_nats::{Nats, NatsOptions};

const SECOND: Duration = Duration::from_secs(1);
const MILLI: Duration = Duration::from_millis(1);
const ADDRS: [&str; 2] = ["10.0.0.21:4222", "10.0.0.22:4222"];

struct Idle;

impl Service for Idle {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, _cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Infallible> {
        Ok(())
    }
}

/// Runs code with a client on a shard, until it is done.
fn run<C>(sim: &Sim, options: NatsOptions, code: C) -> SimServer
where
    C: AsyncFn(Shard, Nats) + 'static,
{
    let (code, is_done) = (Rc::new(code), Rc::new(Cell::new(false)));
    let done = is_done.clone();
    let server = Server::bind("10.0.0.1:7000").framing(Lines::default());
    let server = sim.start(server, move |shard| {
        let nats = Nats::connect(shard, options.clone());
        let (code, done, on) = (code.clone(), done.clone(), shard.clone());
        shard.spawn(async move {
            code(on, nats).await;
            done.set(true);
        });
        Idle
    });
    assert!(sim.run_until(3600 * SECOND, || is_done.get()), "the code of the test does not end");
    server.unwrap()
}

fn options() -> NatsOptions {
    NatsOptions::new(ADDRS[0])
}
