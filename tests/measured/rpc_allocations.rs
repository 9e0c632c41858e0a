//! Requests with ids, in flight together, allocate only for their own values.
//!
//! The allocator counts for the whole process, so there is one test in this file, and its client
//! allocates nothing while it is counted either.

#[path = "../../benches/support/requests.rs"]
mod requests;

use std::io::{Read, Write};

use ringserve::framing::LengthPrefix;
use ringserve::{Cx, Frame, Service};
use ringserve_tests::{Client, On, alone, no_time_limits, watch};
use serde_json::{Value, json};
use stats_alloc::Region;

use self::requests::{Requests, json_request, plain_request};

const WARM_UP: usize = 100;
const ROUNDS: usize = 500;

/// Requests that come together.
const TOGETHER: usize = 16;

#[test]
fn request_allocates_what_its_own_values_do() {
    if !alone(request_allocates_what_its_own_values_do) {
        return;
    }
    counts("an id and bytes", || Requests::Plain, &plain_request(), 0);
    counts("JSON into a struct that borrows", || Requests::Json, &json_request(), 0);
    let request = json_request();
    let region = Region::new(crate::ALLOCATOR);
    drop(std::hint::black_box(answer(&request[4..])));
    let own = region.change();
    println!("{} allocations of a request and its reply as values of serde_json", own.allocations);
    assert!(own.allocations > 0);
    counts("JSON as values", || Values, &request, own.allocations + own.reallocations);
}

/// The service of the example `rpc`.
struct Values;

impl Service for Values {
    type Session = ();
    type Error = String;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), String> {
        cx.reply(answer(&frame));
        Ok(())
    }
}

fn answer(request: &[u8]) -> String {
    let request: Value = serde_json::from_slice(request).expect("a request is JSON");
    json!({ "id": request["id"], "result": request["key"] }).to_string()
}

fn counts<S: Service>(
    what: &str,
    service: impl Fn() -> S + Send + Sync + 'static,
    request: &[u8],
    each: usize,
) {
    let limits = no_time_limits().calls_in_flight_max(64);
    let server = On::default().server(limits.unwatched()).framing(LengthPrefix::default());
    let running = server.start(move |_| service()).expect("the server starts");
    let mut client = Client::connect(running.local_addrs()[0]);
    let requests = request.repeat(TOGETHER);
    // Replies need not be as long as requests.
    let mut back = vec![0; 4 << 10];
    let mut ask = |rounds: usize| {
        for _ in 0..rounds {
            client.stream.write_all(&requests).unwrap();
            for _ in 0..TOGETHER {
                client.stream.read_exact(&mut back[..4]).unwrap();
                let len = u32::from_be_bytes(back[..4].try_into().expect("four bytes")) as usize;
                client.stream.read_exact(&mut back[..len]).unwrap();
            }
        }
    };
    ask(WARM_UP);
    let requests = ROUNDS * TOGETHER;
    let what = format!("{what}: allocations in {requests} requests, where their values make {each}");
    crate::a_pass_fits(
        &what,
        |&made| made == each * requests,
        || {
            let region = Region::new(crate::ALLOCATOR);
            ask(ROUNDS);
            let change = region.change();
            change.allocations + change.reallocations
        },
    );
    drop(client);
    watch::holds(&running, 0);
    ringserve_tests::finish(running);
}
