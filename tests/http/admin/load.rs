//! Independence of the shards from readers of the endpoint: from scrapers, from slow ones, and with
//! a shard that is blocked.

use std::collections::BTreeMap;
use std::time::Duration;

use ringserve::admin::report::{Connections, StageName, Stall, State};
use ringserve_tests::openmetrics::{Family, Kind, parse};
use ringserve_tests::{Client, Lab, SOON, eventually, order};

use super::{LOCAL, endpoint, get, lab};

fn scrape(addr: std::net::SocketAddr) -> BTreeMap<String, Family> {
    let answer = get(addr, "/metrics");
    assert_eq!(answer.status, 200);
    parse(answer.text()).unwrap_or_else(|error| panic!("{error} in:\n{}", answer.text()))
}

/// Turns of all shards so far, without asking them.
fn turns(lab: &Lab) -> u64 {
    lab.running.stats().shards.iter().map(|shard| shard.driver.turns).sum()
}

/// Waits until the shards sleep. Returns their turns.
fn at_rest(lab: &Lab) -> u64 {
    let mut last = turns(lab);
    let mut same = 0;
    eventually("the shards rest", SOON, || {
        std::thread::park_timeout(Duration::from_millis(20));
        let now = turns(lab);
        same = if now == last { same + 1 } else { 0 };
        last = now;
        // Longer than a publication takes.
        same > 15
    });
    last
}

#[test]
fn scrapes_cost_the_shards_no_turn() {
    let lab = lab(LOCAL);
    let addr = endpoint(&lab.running);
    let mut client = lab.client();
    client.echoes("x");
    let before = at_rest(&lab);
    for _ in 0..100 {
        scrape(addr);
        assert_eq!((get(addr, "/healthz").status, get(addr, "/stalls").status), (200, 200));
        assert_eq!((get(addr, "/readyz").status, get(addr, "/").status), (200, 200));
    }
    assert_eq!(turns(&lab), before);
    drop(client);
    lab.finish();
}

#[test]
fn reports_cost_the_shards_a_few_turns_each() {
    let lab = lab(LOCAL);
    let addr = endpoint(&lab.running);
    let mut client = lab.client();
    client.echoes("x");
    get(addr, "/report.json");
    let before = at_rest(&lab);
    const ASKED: u64 = 30;
    for _ in 0..ASKED {
        assert_eq!(get(addr, "/report.json").status, 200);
    }
    let cost = turns(&lab) - before;
    // Two lists, two shards, and the turns in which they publish and sleep again; most lists are
    // younger than that.
    assert!(cost <= ASKED * 16, "{ASKED} reports cost {cost} turns");
    drop(client);
    lab.finish();
}

#[test]
fn thousand_scrapes_beside_load_see_no_counter_fall() {
    let lab = lab(LOCAL);
    let addr = endpoint(&lab.running);
    let mut clients: Vec<Client> = (0..4).map(|_| lab.client()).collect();
    let mut last = scrape(addr);
    let mut frames = 0;
    for round in 0..1000 {
        let client = &mut clients[round % 4];
        client.echoes("x");
        frames += 1;
        if round % 50 == 0 {
            clients[round % 4] = lab.client();
        }
        let now = scrape(addr);
        for (name, family) in now.iter().filter(|(_, family)| family.kind != Kind::Gauge) {
            let Some(before) = last.get(name) else { continue };
            for (sample, value) in &family.samples {
                let was = before.samples.get(sample).copied().unwrap_or(0.0);
                assert!(*value >= was, "{sample} was {was} and is {value}");
            }
        }
        last = now;
    }
    eventually("all frames are counted", SOON, || {
        let family = &scrape(addr)["ringserve_frames"];
        family.samples.values().sum::<f64>() >= f64::from(frames)
    });
    drop(clients);
    lab.finish();
}

#[test]
fn blocked_shard_is_in_each_answer_and_holds_up_none() {
    let lab = lab(LOCAL);
    let addr = endpoint(&lab.running);
    let mut busy = lab.client();
    let blocked: usize = busy.ask_text(order::shard()).parse().unwrap();
    let mut other = lab.client();
    while other.ask_text(order::shard()).parse() == Ok(blocked) {
        other = lab.client();
    }
    busy.send(order::block());
    eventually("the shard is blocked", SOON, || lab.shared.block.came() == 1);
    eventually("the stall is seen", SOON, || {
        let stalls: Vec<Stall> = serde_json::from_slice(&get(addr, "/stalls").body).unwrap();
        stalls.iter().any(|stall| stall.ongoing && stall.shard == blocked && stall.lasted_seconds > 0.3)
    });
    let families = scrape(addr);
    let samples = |name: &str| families[name].samples.len();
    assert_eq!(
        (samples("ringserve_connections"), samples("ringserve_turns")),
        (2, 2),
        "both shards are in it"
    );
    let list: Connections = serde_json::from_slice(&get(addr, "/connections?by=age").body).unwrap();
    assert_eq!(
        (&list.silent_shards[..], &*list.note),
        (&[blocked][..], &*format!("shard {blocked} does not answer"))
    );
    let its = other.local_addr().to_string();
    assert!(list.connections.iter().any(|conn| conn.peer == its), "the other shard's are there");
    let report = get(addr, "/report.json").report();
    assert_eq!(report.silent_shards, [blocked]);
    assert!(report.shards[blocked].stalled_seconds.is_some_and(|time| time > 0.3));
    let cause = report.cause().expect("something is wrong");
    assert_eq!((cause.name, cause.state), (StageName::Handler, State::Lost), "{}", cause.why);
    assert!(
        cause.why.contains(&format!("shard {blocked} is blocked by a call for {}", busy.local_addr())),
        "{}",
        cause.why
    );
    assert_eq!(get(addr, "/healthz").status, 200, "it has not been ten seconds");
    other.echoes("the other shard goes on");
    lab.shared.block.end();
    busy.recv();
    drop((busy, other));
    lab.finish();
}

#[test]
fn slow_scrapers_and_one_that_stops_reading_are_no_load() {
    let lab = lab(LOCAL);
    let addr = endpoint(&lab.running);
    let mut client = lab.client();
    client.echoes("x");
    let before = at_rest(&lab);
    // As many as it accepts at once: most trickle a request and read nothing, one requests events
    // and reads none.
    let mut slow: Vec<Client> = (0..32).map(|_| Client::with_small_window(addr)).collect();
    let request = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n";
    slow[0].write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nx: ");
    for (n, scraper) in slow.iter_mut().enumerate().skip(1) {
        if n % 2 == 0 { scraper.write(request) } else { scraper.write(&request[..n]) }
    }
    let mut next = Client::connect(addr);
    next.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    // It waits until one of the slow ones is given up.
    let (answer, _) = next.read_to_end();
    assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
    let meanwhile = turns(&lab) - before;
    // An idle shard turns now and then, for its own timers.
    assert!(meanwhile <= 2 * 60, "{meanwhile} turns");
    const ROUNDS: u64 = 200;
    let before = turns(&lab);
    (0..ROUNDS).for_each(|_| client.echoes("x"));
    let cost = turns(&lab) - before;
    assert!(cost <= 4 * ROUNDS, "{cost} turns for {ROUNDS} frames");
    drop((slow, client));
    lab.finish();
}

#[test]
fn listener_that_stops_reading_holds_up_no_other() {
    let lab = lab(LOCAL);
    let addr = endpoint(&lab.running);
    let mut stuck = Client::with_small_window(addr);
    stuck.write(b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n");
    let mut reads = Client::connect(addr);
    reads.write(b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n");
    // The one that reads still gets its events.
    let mut text = Vec::new();
    while text.windows(6).filter(|six| six == b"data: ").count() < 3 {
        text.extend(reads.read(64));
    }
    drop(reads);
    drop(stuck);
    lab.finish();
}
