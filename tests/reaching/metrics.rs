//! The counters of a server as text: it is valid OpenMetrics, and its figures are right.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use ringserve::admission::{KeyLimits, KeyRates};
use ringserve::framing::Lines;
use ringserve::metrics::Metrics;
use ringserve::metrics::prometheus_client::encoding::text::encode;
use ringserve::metrics::prometheus_client::metrics::gauge::Gauge;
use ringserve::metrics::prometheus_client::registry::Registry;
use ringserve::{Cx, Frame, Server, ServerHandle, Service};
use ringserve_tests::openmetrics::{Family, Kind, parse};
use ringserve_tests::{Client, Lab, SOON, eventually, no_time_limits, order};

/// A bound for a scrape while a shard is blocked, which lasts until the test ends it.
const SCRAPE: Duration = SOON;

#[track_caller]
fn scrape(lab: &Lab) -> BTreeMap<String, Family> {
    let (mut text, started) = (String::new(), Instant::now());
    lab.running.metrics().write_prometheus(&mut text);
    assert!(started.elapsed() < SCRAPE, "it took {:?}", started.elapsed());
    parse(&text).unwrap_or_else(|error| panic!("{error} in:\n{text}"))
}

/// Takes each line as a key of all of them, until one refuses.
struct Keys([KeyRates; 3]);

impl Service for Keys {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        let taken = self.0.iter().all(|rates| rates.take(cx.shard(), &*line, 1, 0).is_ok());
        cx.reply(if taken { "ok" } else { "early" });
        Ok(())
    }
}

#[test]
fn rates_by_key_are_counted_by_their_name() {
    let rates = |name| KeyRates::new(KeyLimits::default().frames(1, 1).name(name)).unwrap();
    let wide = KeyRates::new(KeyLimits::default().frames(1_000_000, 1_000_000)).unwrap();
    let all = [wide, rates("tenants"), rates("tenants")];
    let server = Server::bind("127.0.0.1:0").shards(1).framing(Lines::default());
    let running = server.start(move |_shard| Keys(all.clone())).unwrap();
    let text = || {
        let mut text = String::new();
        running.metrics().write_prometheus(&mut text);
        text
    };
    assert!(!text().contains("rates=\""), "no shard was asked");
    let mut peer = BufReader::new(TcpStream::connect(running.local_addrs()[0]).unwrap());
    for (key, answer) in [("a", "ok\n"), ("b", "ok\n"), ("a", "early\n"), ("c", "ok\n")] {
        writeln!(peer.get_mut(), "{key}").unwrap();
        let mut line = String::new();
        peer.read_line(&mut line).unwrap();
        assert_eq!(line, answer, "{key}");
    }
    let families = parse(&text()).unwrap();
    let of = |name: &str, rates: &str| {
        value(&families, &format!("ringserve_key_rates_{name}{{rates=\"{rates}\"}}"))
    };
    assert_eq!(of("keys", "tenants"), Some(6.0), "three of each");
    assert_eq!((of("refused_total", "tenants"), of("refused_total", "keys")), (Some(1.0), Some(0.0)));
    assert_eq!(of("sketched_total", "tenants"), Some(0.0));
    drop(peer);
    running.shutdown();
    running.wait().unwrap();
}

#[test]
fn rates_by_key_are_in_the_metrics_of_each_server_that_asks() {
    let rates = KeyRates::new(KeyLimits::default().frames(1, 1)).unwrap();
    let keys = |server: &ServerHandle| {
        let mut text = String::new();
        server.metrics().write_prometheus(&mut text);
        value(&parse(&text).unwrap(), "ringserve_key_rates_keys{rates=\"keys\"}")
    };
    let start = || {
        let all = [(); 3].map(|()| rates.clone());
        let server = Server::bind("127.0.0.1:0").shards(1).framing(Lines::default());
        server.start(move |_shard| Keys(all.clone())).unwrap()
    };
    let ask = |server: &ServerHandle| {
        let mut peer = BufReader::new(TcpStream::connect(server.local_addrs()[0]).unwrap());
        writeln!(peer.get_mut(), "key").unwrap();
        peer.read_line(&mut String::new()).unwrap();
    };
    let (first, second) = (start(), start());
    ask(&first);
    assert_eq!((keys(&first), keys(&second)), (Some(1.0), None));
    for server in [&second, &first, &second] {
        ask(server);
        assert_eq!((keys(&first), keys(&second)), (Some(1.0), Some(1.0)), "once each");
    }
    for server in [first, second] {
        server.shutdown();
        server.wait().unwrap();
    }
}

fn value(families: &BTreeMap<String, Family>, sample: &str) -> Option<f64> {
    families.values().find_map(|family| family.samples.get(sample).copied())
}

#[test]
fn scrape_says_what_happened_and_only_once() {
    let lab = Lab::on_shards(2, no_time_limits());
    let mut clients: Vec<Client> = (0..6).map(|_| lab.client()).collect();
    clients.iter_mut().for_each(|client| client.echoes("x"));
    let mut waits = lab.client();
    waits.gets_back(order::sleep(40));
    drop(clients);
    lab.holds(1);
    eventually("it is published", SOON, || lab.running.stats().connections == 1);
    let families = scrape(&lab);
    let of = |sample: &str| value(&families, sample).unwrap_or_else(|| panic!("{sample} is there"));
    let both = |name: &str| of(&format!("{name}{{shard=\"0\"}}")) + of(&format!("{name}{{shard=\"1\"}}"));
    assert_eq!((both("ringserve_connections"), both("ringserve_connections_opened_total")), (1.0, 7.0));
    assert_eq!(both("ringserve_frames_total"), 7.0);
    assert_eq!(of("ringserve_connections_closed_total{closed_by=\"peer\",reason=\"peer_closed\"}"), 6.0);
    assert_eq!(of("ringserve_connections_closed_total{closed_by=\"server\",reason=\"idle_timeout\"}"), 0.0);
    let service = lab.addr().to_string();
    assert_eq!(of(&format!("ringserve_service_frames_total{{service=\"{service}\"}}")), 7.0);
    for shard in 0..2 {
        let queue = |name: &str| {
            of(&format!("ringserve_accept_queue_{name}{{listener=\"{service}\",shard=\"{shard}\"}}"))
        };
        assert_eq!((queue("waiting"), queue("lost_total")), (0.0, 0.0));
        assert!(queue("capacity") > 0.0);
        let cpu = |name: &str| of(&format!("ringserve_shard_{name}_seconds_total{{shard=\"{shard}\"}}"));
        assert!(cpu("cpu") > 0.0 && cpu("cpu") < 60.0 && cpu("cpu_wait") >= 0.0);
    }
    // The call slept for 40 ms, and each connection had one first frame.
    assert_eq!(of("ringserve_call_seconds_count"), 1.0);
    let slept = of("ringserve_call_seconds_sum");
    assert!((0.04..10.0).contains(&slept), "{slept} s");
    assert_eq!(of("ringserve_first_frame_seconds_count"), 7.0);
    let skew = of("ringserve_shard_skew_ratio");
    assert!((1.0..=2.0).contains(&skew), "{skew}");
    drop(waits);
    lab.finish();
}

/// Each call of a service is in its histogram, whether it waited or not, and each error is counted.
#[test]
fn calls_of_a_service_are_counted_with_their_times_and_errors() {
    let lab = Lab::on_shards(2, no_time_limits());
    let service = lab.addr().to_string();
    let of = |families: &BTreeMap<String, Family>, name: &str| {
        value(families, &format!("ringserve_service_{name}")).unwrap_or_else(|| panic!("{name} is there"))
    };
    let mut clients: Vec<Client> = (0..4).map(|_| lab.client()).collect();
    clients.iter_mut().for_each(|client| (0..5).for_each(|_| client.echoes("x")));
    let mut waits = lab.client();
    waits.gets_back(order::sleep(40));
    waits.send(order::gate("later"));
    // One ends with its connection, and others stay.
    let mut goes = lab.client();
    goes.send(order::gate("never"));
    let mut late: Vec<Client> = [order::fail_late(), order::panic_late()]
        .into_iter()
        .map(|wrong| {
            let mut client = lab.client();
            client.send(wrong);
            client
        })
        .collect();
    lab.parked(4);
    goes.reset();
    for wrong in [order::fail(), order::panics()] {
        let mut client = lab.client();
        client.send(wrong);
        client.read_to_end();
    }
    lab.holds(7);
    let labels = format!("service=\"{service}\"");
    eventually("it is published", SOON, || lab.running.stats().counters.frames == 27);
    let families = scrape(&lab);
    // 20 echoes, one that slept, and two that failed: neither those that wait nor the one that was
    // dropped.
    assert_eq!(of(&families, &format!("call_seconds_count{{{labels}}}")), 23.0);
    assert_eq!(of(&families, &format!("calls_in_flight{{{labels}}}")), 3.0);
    let calls = &families["ringserve_service_call_seconds"].samples;
    let buckets = calls.iter().filter(|(sample, _)| sample.contains("_bucket{"));
    let first = buckets.map(|(_, count)| *count).reduce(f64::min).unwrap();
    assert_eq!(first, 22.0, "those that ended at once");
    let slept = of(&families, &format!("call_seconds_sum{{{labels}}}"));
    assert!((0.04..10.0).contains(&slept), "{slept} s");
    lab.shared.gate.open();
    waits.recv();
    late.iter_mut().for_each(|client| drop(client.read_to_end()));
    lab.holds(5);
    let families = scrape(&lab);
    assert_eq!(of(&families, &format!("calls_in_flight{{{labels}}}")), 0.0);
    assert_eq!(of(&families, &format!("call_seconds_count{{{labels}}}")), 26.0);
    let errors = |kind: &str| of(&families, &format!("call_errors_total{{kind=\"{kind}\",{labels}}}"));
    assert_eq!((errors("error"), errors("panic")), (2.0, 2.0));
    drop((clients, waits, late));
    lab.finish();
}

#[test]
fn server_and_process_tell_what_they_are() {
    let lab = Lab::start(no_time_limits());
    let families = scrape(&lab);
    let of = |sample: &str| value(&families, sample).unwrap_or_else(|| panic!("{sample} is there"));
    let driver = if ringserve_tests::on_epoll() { "epoll" } else { "io_uring" };
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(of(&format!("ringserve_build_info{{driver=\"{driver}\",version=\"{version}\"}}")), 1.0);
    let (started, process) = (of("ringserve_start_time_seconds"), of("process_start_time_seconds"));
    assert!(started >= process - 1.0 && process > 1.5e9, "{started} and {process}");
    assert!(of("ringserve_connections_max") >= 1.0 && of("ringserve_held_max_bytes") >= 1e6);
    assert!(of("process_open_fds") >= 3.0 && of("process_max_fds") >= of("process_open_fds"));
    assert!(of("process_resident_memory_bytes") > 1e6 && of("process_cpu_seconds_total") >= 0.0);
    assert!(of("process_virtual_memory_bytes") > of("process_resident_memory_bytes"));
    lab.finish();
}

#[test]
fn each_turn_is_in_the_histogram_as_often_as_it_counts() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.client();
    (0..2000).for_each(|_| client.echoes("x"));
    let families = scrape(&lab);
    let of = |sample: &str| value(&families, sample).expect("it is there");
    let turns = lab.stats().shards[0].driver.turns as f64;
    let timed = of("ringserve_turn_seconds_count");
    assert!((turns - 200.0..=turns + 64.0).contains(&timed), "{timed} of {turns} turns");
    let mean = of("ringserve_turn_seconds_sum") / timed;
    assert!(mean > 0.0 && mean < 0.1, "a turn takes {mean} s");
    drop(client);
    lab.finish();
}

#[test]
fn scrape_waits_for_no_blocked_shard_and_counters_never_fall() {
    let lab = Lab::on_shards(2, no_time_limits());
    let mut busy = lab.client();
    let blocked = busy.ask_text(order::shard());
    busy.send(order::block());
    eventually("the shard is blocked", SOON, || lab.shared.block.came() == 1);
    let mut last = scrape(&lab);
    eventually("the shard is marked", SOON, || {
        let now = scrape(&lab);
        for (name, family) in &now {
            for (sample, value) in &family.samples {
                let before = last[name].samples.get(sample);
                let falls = family.kind == Kind::Counter && before.is_some_and(|before| value < before);
                assert!(!falls, "{sample} was {before:?} and is {value}");
            }
        }
        last = now;
        value(&last, &format!("ringserve_shard_stale{{shard=\"{blocked}\"}}")) == Some(1.0)
    });
    lab.shared.block.end();
    busy.recv();
    drop(busy);
    lab.finish();
}

#[test]
fn collector_stands_in_a_registry_beside_other_metrics() {
    let lab = Lab::start(no_time_limits());
    let mut registry = Registry::default();
    let rooms: Gauge = Gauge::default();
    rooms.set(3);
    registry.register("chat_rooms", "Rooms with a member", rooms);
    registry.register_collector(Box::new(lab.running.collector()));
    let mut text = String::new();
    encode(&mut text, &registry).unwrap();
    let families = parse(&text).unwrap();
    assert_eq!(value(&families, "chat_rooms"), Some(3.0));
    assert_eq!(value(&families, "ringserve_connections{shard=\"0\"}"), Some(0.0));
    assert!(Metrics::CONTENT_TYPE.starts_with("application/openmetrics-text; version=1.0.0"));
    lab.finish();
}

/// Text that the parser of these tests accepts.
const GOOD: &str = "# HELP a What.\n# TYPE a counter\na_total{c=\"d\\\"\",b=\"e\"} 3\n# TYPE f_seconds histogram\n\
    # UNIT f_seconds seconds\nf_seconds_sum 1.5\nf_seconds_count 2\nf_seconds_bucket{le=\"0.5\"} 1\n\
    f_seconds_bucket{le=\"+Inf\"} 2\n# EOF\n";

#[test]
fn good_text_is_read() {
    let families = parse(GOOD).unwrap();
    assert_eq!(families["a"].samples["a_total{b=\"e\",c=\"d\\\"\"}"], 3.0);
    assert_eq!((families["f_seconds"].kind, families.len()), (Kind::Histogram, 2));
}

#[test]
fn each_broken_rule_is_found() {
    for (right, wrong) in [
        ("# EOF\n", ""),
        ("a_total{", "a{"),
        ("b=\"e\"", "c=\"e\""),
        ("b=\"e\"}", "b=\"e\",}"),
        (" 3\n", " -3\n"),
        ("# UNIT f_seconds seconds", "# UNIT f_seconds bytes"),
        ("{le=\"+Inf\"} 2", "{le=\"+Inf\"} 3"),
        ("{le=\"+Inf\"} 2", "{le=\"0.7\"} 2"),
        ("f_seconds_count 2\n", ""),
        ("{le=\"0.5\"} 1", "{le=\"0.5\"} 9"),
        ("# TYPE a counter\n", ""),
        ("# TYPE f_seconds", "# HELP a Again.\n# TYPE f_seconds"),
    ] {
        assert!(GOOD.contains(right), "{right}");
        assert!(parse(&GOOD.replacen(right, wrong, 1)).is_err(), "{right} as {wrong}");
    }
}
