//! Each path, and its answer.

use std::sync::{Arc, Mutex};

use ringserve::CloseReason;
use ringserve::admin::Admin;
use ringserve::admin::report::{Connections, Finding, Phase, Report, StageName, Stall, State};
use ringserve::admission::Admission;
use ringserve::framing::LengthPrefix;
use ringserve_tests::openmetrics;
use ringserve_tests::{Client, Lab, On, SOON, eventually, no_time_limits, order, watch};

use super::{Answer, LOCAL, ask, endpoint, get, lab, post};

const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";

#[test]
fn each_path_answers_with_its_type() {
    let lab = lab(LOCAL);
    let addr = endpoint(&lab.running);
    for (path, kind) in [
        ("/", "text/html; charset=utf-8"),
        ("/report.json", JSON),
        ("/metrics", "application/openmetrics-text; version=1.0.0; charset=utf-8"),
        ("/connections", JSON),
        ("/connections?by=age&limit=3", JSON),
        ("/stalls", JSON),
        ("/admission", JSON),
        ("/doctor", JSON),
        ("/healthz", TEXT),
        ("/readyz", TEXT),
    ] {
        let answer = get(addr, path);
        assert_eq!((answer.status, answer.header("content-type")), (200, Some(kind)), "{path}");
        assert_eq!(answer.header("cache-control"), Some("no-store"), "{path}");
        assert_eq!(answer.header("x-content-type-options"), Some("nosniff"), "{path}");
        assert_eq!(answer.header("content-length"), Some(&*answer.body.len().to_string()), "{path}");
        let head = ask(addr, "HEAD", path, &[], "");
        assert_eq!(
            (head.status, head.header("content-type"), head.body.len()),
            (200, Some(kind), 0),
            "{path}"
        );
    }
    assert!(
        get(addr, "/")
            .header("content-security-policy")
            .is_some_and(|policy| policy.contains("default-src 'none'"))
    );
    let _: Vec<Finding> = serde_json::from_slice(&get(addr, "/doctor").body).unwrap();
    let _: Vec<Stall> = serde_json::from_slice(&get(addr, "/stalls").body).unwrap();
    openmetrics::parse(get(addr, "/metrics").text()).unwrap();
    lab.finish();
}

#[test]
fn other_paths_and_methods_are_refused_with_what_there_is() {
    let lab = lab(LOCAL);
    let addr = endpoint(&lab.running);
    let none = get(addr, "/index.html");
    assert_eq!(none.status, 404);
    for path in ["/report.json", "/metrics", "/drain", "/connections/ID/close"] {
        assert!(none.text().contains(path), "{path} is not in {}", none.text());
    }
    for (method, path, allowed) in [
        ("POST", "/metrics", "GET, HEAD"),
        ("DELETE", "/report.json", "GET, HEAD"),
        ("OPTIONS", "/drain", "POST"),
        ("GET", "/drain", "POST"),
        ("GET", "/admission/deny?network=10.0.0.1&seconds=5", "POST"),
        ("POST", "/admission", "GET, HEAD"),
        ("PUT", "/log-level", "POST"),
        ("HEAD", "/connections/0.0.0/close", "POST"),
    ] {
        let answer = ask(addr, method, path, &["x-ringserve: 1"], "");
        assert_eq!((answer.status, answer.header("allow")), (405, Some(allowed)), "{method} {path}");
    }
    for path in
        ["/connections?by=size", "/connections?limit=0", "/connections?limit=1001", "/connections?order=up"]
    {
        assert_eq!(get(addr, path).status, 400, "{path}");
    }
    assert!(!lab.running.control().is_draining(), "no GET drains");
    lab.finish();
}

#[test]
fn report_says_what_happened() {
    let lab = lab(LOCAL);
    let addr = endpoint(&lab.running);
    let mut clients: Vec<Client> = (0..5).map(|_| lab.client()).collect();
    clients.iter_mut().for_each(|client| client.echoes("x"));
    clients.truncate(3);
    let mut waits = lab.client();
    waits.send(order::gate("later"));
    lab.holds(4);
    // A shard answers an inspection at once and publishes its counters at intervals, so a
    // report may list the call before it counts the call's frame.
    eventually("it is reported", SOON, || {
        let report = get(addr, "/report.json").report();
        let frames: u64 = report.shards.iter().filter_map(|shard| shard.frames).sum();
        report.waiting_calls.len() == 1 && report.server.connections == 4 && frames == 6
    });
    let report = get(addr, "/report.json").report();
    let server = &report.server;
    assert_eq!((server.pid, server.phase, server.connections), (std::process::id(), Phase::Serving, 4));
    assert!(["io_uring", "epoll"].contains(&&*server.driver) && server.version == env!("CARGO_PKG_VERSION"));
    assert!(server.uptime_seconds > 0.0 && server.memory_bytes.is_some_and(|bytes| bytes > 1 << 20));
    assert_eq!(report.shards.len(), 2);
    assert_eq!(report.shards.iter().filter_map(|shard| shard.connections).sum::<u64>(), 4);
    assert_eq!((report.services.len(), report.services[0].frames), (1, 6));
    assert_eq!(report.accept_queues.len(), 2);
    assert_eq!(
        (report.closes.len(), &*report.closes[0].reason, report.closes[0].total),
        (1, "peer_closed", 2)
    );
    assert_eq!(report.funnel.iter().map(|stage| stage.name).collect::<Vec<_>>(), StageName::ALL);
    let call = &report.waiting_calls[0];
    assert_eq!(call.peer, waits.local_addr().to_string());
    assert!(call.oldest_call_seconds.is_some() && call.calls == 1);
    assert_eq!(report.times.first_frame.count, 6);
    lab.shared.gate.open();
    waits.recv();
    drop((clients, waits));
    lab.finish();
}

#[test]
fn events_come_one_after_the_other_until_the_end() {
    let lab = lab(LOCAL);
    let addr = endpoint(&lab.running);
    let mut listener = Client::connect(addr);
    listener.write(b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n");
    let mut text = String::new();
    let mut events = Vec::new();
    while events.len() < 3 {
        text.push(listener.read(1)[0] as char);
        if let Some(data) = text.strip_suffix("\n\n").and_then(|text| text.rsplit_once("data: ")) {
            events.push(serde_json::from_str::<Report>(data.1).unwrap());
            text.clear();
        }
    }
    let times: Vec<f64> = events.iter().map(|report| report.server.uptime_seconds).collect();
    assert!(times[1] > times[0] && times[2] - times[1] > 0.5, "{times:?}");
    // It ends after the server, whose end is waited for here.
    lab.finish();
    let (rest, _) = listener.read_to_end();
    assert!(String::from_utf8_lossy(&rest).ends_with("0\r\n\r\n"), "the stream ends in order");
}

#[test]
fn connection_is_closed_by_the_name_that_the_list_has() {
    let lab = lab(LOCAL);
    let addr = endpoint(&lab.running);
    let mut clients: Vec<Client> = (0..3).map(|_| lab.client()).collect();
    clients.iter_mut().for_each(|client| client.echoes("x"));
    let list: Connections = serde_json::from_slice(&get(addr, "/connections?by=age").body).unwrap();
    assert_eq!((list.connections.len(), list.silent_shards.len(), &*list.note), (3, 0, ""));
    let its = clients[1].local_addr().to_string();
    let found = list.connections.iter().find(|conn| conn.peer == its).expect("it is in the list");
    assert_eq!((&*found.state, found.calls), ("open", 0));
    assert_eq!(post(addr, &format!("/connections/{}/close", found.id), "").status, 202);
    assert!(clients[1].is_ended());
    watch::closed_for(&lab.running, CloseReason::Closed, 1);
    clients[0].echoes("the others stay");
    assert_eq!(post(addr, "/connections/7.0.0/close", "").status, 404, "there are two shards");
    assert_eq!(post(addr, "/connections/0.0/close", "").status, 404);
    drop(clients);
    lab.finish();
}

#[test]
fn drain_by_request_is_one_as_any_other() {
    let lab = lab(LOCAL);
    let addr = endpoint(&lab.running);
    let mut client = lab.client();
    client.send(order::gate("late"));
    lab.parked(1);
    assert_eq!(get(addr, "/readyz").status, 200);
    assert_eq!(post(addr, "/drain", "").status, 202);
    // The call delays the drain, and the endpoint answers meanwhile.
    assert_eq!(get(addr, "/readyz").status, 503);
    assert_eq!(get(addr, "/healthz").status, 200);
    assert_eq!(get(addr, "/report.json").report().server.phase, Phase::Draining);
    assert_eq!(get(addr, "/metrics").status, 200);
    lab.shared.gate.open();
    assert_eq!(client.recv(), order::gate("late"));
    watch::ended(lab.running);
    assert!(std::net::TcpStream::connect(addr).is_err(), "the endpoint ended with the server");
}

#[test]
fn log_level_is_set_by_the_program() {
    let told = Arc::new(Mutex::new(Vec::new()));
    let to = told.clone();
    let admin = Admin::new(LOCAL).log_level(move |filter| match filter {
        "nonsense" => Err("nonsense is no filter"),
        filter => {
            to.lock().unwrap().push(filter.to_owned());
            Ok(())
        }
    });
    let lab = lab(admin);
    let addr = endpoint(&lab.running);
    assert_eq!(post(addr, "/log-level", "info,ringserve=debug\n").status, 200);
    let wrong = post(addr, "/log-level", "nonsense");
    assert_eq!((wrong.status, wrong.text()), (400, "nonsense is no filter\n"));
    for body in ["", " \n", "a\nb", &"x".repeat(1025)] {
        assert_eq!(post(addr, "/log-level", body).status, 400, "{} bytes", body.len());
    }
    assert_eq!(*told.lock().unwrap(), ["info,ringserve=debug"]);
    lab.finish();
}

#[test]
fn log_level_without_a_function_is_not_implemented() {
    let lab = lab(LOCAL);
    let answer: Answer = post(endpoint(&lab.running), "/log-level", "debug");
    assert_eq!(answer.status, 501);
    assert!(answer.text().contains("Admin::log_level"));
    lab.finish();
}

#[test]
fn funnel_counts_what_lists_leave_out() {
    let lab = lab(LOCAL);
    let addr = endpoint(&lab.running);
    // A list has twenty.
    let mut callers: Vec<Client> = (0..30).map(|_| lab.client()).collect();
    callers.iter_mut().for_each(|client| client.send(order::gate("text")));
    lab.parked(30);
    let mut last = Report::default();
    eventually("the report has all calls", SOON, || {
        last = get(addr, "/report.json").report();
        last.funnel.iter().any(|stage| stage.name == StageName::Handler && stage.now == 30)
    });
    assert_eq!(last.waiting_calls.len(), 20, "{last:?}");
    lab.shared.gate.open();
    callers.iter_mut().for_each(|client| assert_eq!(client.recv(), order::gate("text")));
    drop(callers);
    lab.finish();
}

#[test]
fn calm_server_has_a_calm_funnel() {
    let lab = lab(LOCAL);
    let addr = endpoint(&lab.running);
    let mut client = lab.client();
    client.echoes("x");
    let report = get(addr, "/report.json").report();
    // Other tests run at the same time, and may have this one's CPUs.
    for stage in report
        .funnel
        .iter()
        .filter(|stage| stage.name < StageName::Handler && stage.name > StageName::SynQueue)
    {
        assert_eq!((stage.state, &*stage.why), (State::Calm, ""), "{}", stage.name);
    }
    drop(client);
    lab.finish();
}

#[test]
fn admission_is_changed_and_the_changes_are_reported() {
    let on = On::default().server(no_time_limits()).shards(2).admin(LOCAL);
    let lab = Lab::of(on.admission(Admission::default().adjustable()).framing(LengthPrefix::default()));
    let addr = endpoint(&lab.running);
    let order = |path: &str| {
        let answer = post(addr, path, "");
        (answer.status, answer.text().to_owned())
    };
    let mut client = lab.client();
    client.echoes("x");
    for (path, words) in [
        ("/admission/limit?per_address=1", "per_address is 1\n"),
        ("/admission/limit?address_rate=5/20", "address_rate is 5/20\n"),
        ("/admission/limit?connections_max=9&listener=0", "connections_max is 9\n"),
        ("/admission/deny?network=192.0.2.0/24,2001:db8::/32&seconds=600", "is denied for 600s"),
        ("/admission/allow?network=192.0.2.7&seconds=60", "192.0.2.7 is allowed for 60s"),
        ("/admission/forget?network=192.0.2.0%2F24", "1 of them"),
        ("/admission/limit?address_rate=off", "address_rate is off\n"),
    ] {
        let (status, text) = order(path);
        assert!(status == 200 && text.contains(words), "{path}: {status} {text}");
    }
    assert_eq!(lab.running.control().admission().settings()[0].per_address, Some(1));
    let mut second = Client::connect(lab.addr());
    assert_eq!(second.read_to_end().0, b"", "the second one of its address");
    client.echoes("the first one stays");
    for (path, words) in [
        ("/admission/deny", "the network is missing"),
        ("/admission/deny?network=10.0.0.1", "the time is missing"),
        ("/admission/deny?network=10.0.0.1&seconds=0", "it must be 1 s to 30 days"),
        ("/admission/deny?network=10.0.0.1&seconds=-1", "it must be a whole number"),
        ("/admission/deny?network=10.0.0.1&seconds=99999999999", "it must be 1 s to 30 days"),
        ("/admission/deny?network=10.0.0.0/33&seconds=5", "is neither an address nor a network"),
        ("/admission/deny?network=::/0&seconds=5", "denies every peer"),
        ("/admission/deny?network=10.0.0.1&seconds=5&listener=9", "listener is 9; there are 127.0.0.1:"),
        ("/admission/forget?network=10.0.0.1&seconds=5", "takes no seconds"),
        ("/admission/limit", "give one of per_address"),
        ("/admission/limit?per_address=1&connections_max=2", "give one of per_address"),
        ("/admission/limit?per_address=0", "which lets no peer in"),
        ("/admission/limit?per_address=many", "it must be a number of connections"),
        ("/admission/limit?address_rate=5", "it must be RATE/BURST"),
        ("/admission/limit?address_rate=5/0", "the burst of address_rate is 0"),
        ("/admission/limit?accept_rate=5/5", "the server has no accept_rate"),
        ("/admission/limit?accept_rate=5/5&listener=0", "accept_rate holds for all listeners together"),
        ("/admission/limit?frames=5", "is no parameter"),
    ] {
        let (status, text) = order(path);
        assert!(status == 400 && text.contains(words), "{path}: {status} {text}");
    }
    let report = get(addr, "/report.json").report();
    let admission = report.admission.expect("it is reported");
    assert_eq!(admission.changes.len(), 7, "those that were refused are none: {:?}", admission.changes);
    assert_eq!(admission.changes[3].what, "192.0.2.0/24, 2001:db8::/32 denied for 600s");
    let limits = &admission.limits[0];
    assert_eq!((limits.per_address, limits.address_rate, limits.connections_max), (Some(1), None, Some(9)));
    assert_eq!((limits.connections, limits.networks.len()), (Some(1), 2));
    drop(client);
    lab.finish();
}
