//! Servers that have run for months: sleeps, time limits and HTTP work when a counter of steps
//! would end.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::service::service_fn;
use hyper::{Request, Response};
use ringserve::http::HttpOptions;
use ringserve::{CloseReason, http};
use ringserve_server::internals::age_new_shards;
use ringserve_tests::client::End;
use ringserve_tests::http::read_answer;
use ringserve_tests::{Client, Lab, On, alone, no_time_limits, order};

const BRIEF: Duration = Duration::from_millis(30);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// The age is one of the whole process.
struct Age(#[allow(dead_code)] MutexGuard<'static, ()>);

impl Age {
    fn set(age: Duration) -> Age {
        static ONE: Mutex<()> = Mutex::new(());
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        age_new_shards(age);
        Age(one)
    }
}

impl Drop for Age {
    fn drop(&mut self) {
        age_new_shards(Duration::ZERO);
    }
}

/// Shortly before each counter of steps of 2^20 or 2^24 ns ends or takes one more bit; and some
/// ages that are over.
fn ages() -> impl Iterator<Item = Duration> {
    let wraps = [51, 52, 55, 56].map(|bits| Duration::from_nanos(1 << bits) - Duration::from_millis(100));
    wraps.into_iter().chain([30, 53, 835, 2000].map(|days| DAY * days))
}

#[test]
fn sleeps_and_deadlines_end_in_time_on_shards_of_every_age() {
    if !alone(sleeps_and_deadlines_end_in_time_on_shards_of_every_age) {
        return;
    }
    for age in ages() {
        let _age = Age::set(age);
        let lab = Lab::start(no_time_limits());
        let mut client = lab.client();
        for _ in 0..6 {
            let started = Instant::now();
            client.gets_back(order::sleep(30));
            assert!(started.elapsed() >= BRIEF, "{age:?}: too early");
        }
        let turns = lab.stats().shards[0].driver.turns;
        assert!(turns < 200, "{age:?}: the shard spins, {turns} turns");
        lab.finish();
    }
}

#[test]
fn time_limits_end_connections_on_shards_of_every_age() {
    if !alone(time_limits_end_connections_on_shards_of_every_age) {
        return;
    }
    for age in ages() {
        let _age = Age::set(age);
        let lab = Lab::start(no_time_limits().idle_timeout(Duration::from_millis(60)));
        for count in 1..=3 {
            let mut client = lab.client();
            client.echoes("");
            assert_eq!(client.end(), End::Fin);
            drop(client);
            lab.closed_for(CloseReason::IdleTimeout, count);
        }
        let turns = lab.stats().shards[0].driver.turns;
        assert!(turns < 200, "{age:?}: the shard spins, {turns} turns");
        lab.finish();
    }
}

#[test]
fn http_server_of_every_age_answers_limits_and_shuts_down() {
    if !alone(http_server_of_every_age_answers_limits_and_shuts_down) {
        return;
    }
    for age in ages() {
        let _age = Age::set(age);
        let options = HttpOptions::default().header_timeout(BRIEF * 2);
        let running = On::default().server(no_time_limits()).start(move |_| {
            http(service_fn(async |_: Request<_>| {
                Ok::<_, std::convert::Infallible>(Response::new(Full::new(Bytes::from("hello"))))
            }))
            .options(options.clone())
        });
        let running = running.unwrap();
        for _ in 0..3 {
            let mut client = Client::connect(running.local_addrs()[0]);
            client.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n");
            assert_eq!(read_answer(&mut client).1, b"hello");
            // Half a head is not waited for.
            let mut slow = Client::connect(running.local_addrs()[0]);
            slow.write(b"GET / HTTP/1.1\r\nho");
            slow.end_after_all();
        }
        ringserve_tests::finish(running);
    }
}
