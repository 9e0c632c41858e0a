//! A call that is done at once allocates nothing on its way through services that wrap services.
//!
//! The allocator counts for the whole process, so there is one test in this file, and its client
//! allocates nothing while it is counted either.

#[path = "../../benches/support/echo.rs"]
mod echo;

use std::convert::Infallible;
use std::future::ready;
use std::io::{Read, Write};
use std::time::Duration;

use self::echo::Echo;
use ringserve::framing::Lines;
use ringserve::middleware::{CallEnd, Calls, ConcurrencyLimit, Observe, TimeLimit};
use ringserve::service::IntoService;
use ringserve::tower::{Request, Tower};
use ringserve::{Cx, Frame, Shard};
use ringserve_tests::{Client, On, alone, no_time_limits, watch};
use stats_alloc::Region;
use tower::{ServiceBuilder, service_fn};

const WARM_UP: usize = 1_000;
const ROUNDS: usize = 5_000;
const TIME: Duration = Duration::from_secs(60);

#[test]
fn a_call_that_does_not_wait_allocates_nothing() {
    if !alone(a_call_that_does_not_wait_allocates_nothing) {
        return;
    }
    counts("timeout", |_| TimeLimit::new(Echo, TIME));
    counts("concurrency limit", |_| ConcurrencyLimit::new(Echo, 1));
    let calls = Calls::default().slower_than(TIME).time_one_in(100);
    counts("observe", move |_| Observe::new(Echo, calls.on_shard()));
    counts("a closure", |_| Observe::new(Echo, |_: &Cx<'_, ()>, _: CallEnd<'_, Infallible>| {}));
    let calls = Calls::default();
    counts("a stack", move |_| {
        Observe::new(TimeLimit::new(ConcurrencyLimit::new(Echo, 100), TIME), calls.on_shard())
    });
    let echo = |request: Request| ready(Ok::<_, Infallible>(request.frame));
    counts("tower", move |_| Tower::new(service_fn(echo)));
    counts("layers of tower", move |_| {
        let service = ServiceBuilder::new().load_shed().map_response(|frame: Frame| frame);
        Tower::new(service.service(service_fn(echo)))
    });
}

fn counts<M: IntoService<Lines>>(what: &str, factory: impl Fn(&Shard) -> M + Send + Sync + 'static) {
    let server = On::default().server(no_time_limits().unwatched()).framing(Lines::default());
    let running = server.start(factory).expect("the server starts");
    let mut client = Client::connect(running.local_addrs()[0]);
    let line = [&[b'e'; 60][..], b"\n"].concat();
    let mut back = vec![0; line.len()];
    let mut echo = |rounds: usize| {
        for _ in 0..rounds {
            client.stream.write_all(&line).unwrap();
            client.stream.read_exact(&mut back).unwrap();
        }
    };
    echo(WARM_UP);
    let region = Region::new(crate::ALLOCATOR);
    echo(ROUNDS);
    let change = region.change();
    let (made, grown) = (change.allocations, change.reallocations);
    assert_eq!((made, grown), (0, 0), "{what}: allocations and reallocations in {ROUNDS} frames");
    assert_eq!(back, line);
    drop(client);
    watch::holds(&running, 0);
    ringserve_tests::finish(running);
}
