//! The limit on descriptors, in a process whose limit is low.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::Mutex;

use ringserve::admin::report::{Report, StageName};
use ringserve::framing::LengthPrefix;
use ringserve_tests::child::{Process, is_child};
use ringserve_tests::client::frame;
use ringserve_tests::{Client, Lab, On, SOON, eventually, no_time_limits, order};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const LIMIT: u64 = 256;

/// The child: lowers its limits, serves, and follows its input, one word per line.
#[test]
#[ignore = "the child process of the other tests here, which start it; alone: echo report | RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test processes descriptor_limit::child_serves -- --exact --ignored --nocapture"]
fn child_serves() {
    if !is_child() {
        return;
    }
    let words = std::io::stdin().lines();
    setrlimit(Resource::Nofile, Rlimit { current: Some(LIMIT), maximum: Some(LIMIT) }).unwrap();
    let on = On::default().server(no_time_limits()).admin("127.0.0.1:0");
    let lab = Lab::of(on.framing(LengthPrefix::default()));
    println!("\nendpoint {}", lab.running.admin_address().unwrap());
    println!("\naddress {}", lab.addr());
    let eaten = Mutex::new(Vec::new());
    for word in words {
        match word.unwrap().as_str() {
            "eat" => {
                let mut eaten = eaten.lock().unwrap();
                while let Ok(file) = File::open("/dev/null") {
                    eaten.push(file);
                }
            }
            "free" => eaten.lock().unwrap().clear(),
            "report" => {}
            _ => break,
        }
        let report = lab.stats();
        println!(
            "\nreport {} {} {} {}",
            report.connections,
            report.counters.accepted,
            report.counters.accept_paused,
            report.shards[0].driver.turns
        );
    }
    lab.finish();
    println!("\nended");
}

struct Child(Process);

/// Connections, accepted, pauses of accepting, turns.
type Told = [u64; 4];

impl Child {
    #[track_caller]
    fn told(&mut self, word: &str) -> Told {
        self.0.say(word);
        let line = self.0.line_after("report ");
        let numbers: Vec<u64> = line.split(' ').map(|number| number.parse().unwrap()).collect();
        numbers.try_into().unwrap()
    }

    #[track_caller]
    fn waits_for(&mut self, what: &str, mut is: impl FnMut(Told) -> bool) -> Told {
        let started = std::time::Instant::now();
        loop {
            let told = self.told("report");
            if is(told) {
                return told;
            }
            assert!(started.elapsed() < SOON, "{what} did not come: {told:?}");
            std::thread::yield_now();
        }
    }
}

#[test]
fn accepting_pauses_at_the_descriptor_limit_and_loses_no_peer() {
    let hard = getrlimit(Resource::Nofile).maximum;
    assert!(hard.is_none_or(|hard| hard > LIMIT));
    let mut process = Process::start(child_serves);
    let addr = process.line_after("address ").parse().unwrap();
    let mut child = Child(process);
    let mut served: Vec<Client> = (0..20).map(|_| Client::connect(addr)).collect();
    served.iter_mut().for_each(|client| client.echoes(""));
    assert_eq!(child.told("eat")[0], 20);
    let mut waiting: Vec<Client> = (0..40).map(|_| Client::connect(addr)).collect();
    waiting.iter_mut().for_each(|client| client.write(&frame(order::echo("waited"))));
    let paused = child.waits_for("a pause", |[_, _, paused, _]| paused >= 1);
    assert!(waiting.iter().filter(|client| client.is_silent()).count() >= 38, "{paused:?}");
    // Existing connections continue, and accepting is retried at intervals, not all the time.
    let before = std::time::Instant::now();
    for _ in 0..100 {
        served.iter_mut().for_each(|client| client.echoes(""));
    }
    let [_, _, again, _] = child.told("report");
    let allowed = 2 + before.elapsed().as_millis() as u64 / 10;
    assert!(again - paused[2] <= allowed, "{} attempts, {allowed} allowed", again - paused[2]);
    child.told("free");
    waiting.iter_mut().for_each(|client| assert_eq!(client.recv(), order::echo("waited")));
    let [connections, accepted, ..] = child.told("report");
    assert_eq!((connections, accepted), (60, 60));
    drop((served, waiting));
    child.waits_for("the end of all", |[connections, ..]| connections == 0);
    child.0.say("end");
    child.0.line_after("ended");
}

#[test]
fn more_peers_than_the_server_may_hold_are_served_in_turn() {
    let mut process = Process::start(child_serves);
    let addr = process.line_after("address ").parse().unwrap();
    let mut child = Child(process);
    let mut clients: Vec<Client> = (0..400).map(|_| Client::connect(addr)).collect();
    clients.iter_mut().for_each(|client| client.write(&frame(order::close())));
    clients.iter_mut().for_each(|client| assert_eq!(client.recv(), b"bye"));
    drop(clients);
    let [_, accepted, ..] = child.waits_for("the end of all", |[connections, ..]| connections == 0);
    assert_eq!(accepted, 400);
    child.0.say("end");
    child.0.line_after("ended");
}

/// A report over a connection that is kept.
#[track_caller]
fn report(endpoint: &mut BufReader<TcpStream>) -> Report {
    endpoint.get_mut().write_all(b"GET /report.json HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
    let mut length = 0;
    loop {
        let mut line = String::new();
        endpoint.read_line(&mut line).unwrap();
        if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        if line == "\r\n" {
            break;
        }
    }
    let mut body = vec![0; length];
    endpoint.read_exact(&mut body).unwrap();
    serde_json::from_slice(&body).unwrap()
}

#[test]
fn report_has_the_machine_though_no_file_can_be_opened() {
    let mut process = Process::start(child_serves);
    let endpoint = TcpStream::connect(process.line_after("endpoint ")).unwrap();
    endpoint.set_read_timeout(Some(SOON)).unwrap();
    let mut endpoint = BufReader::new(endpoint);
    let machine = |report: &Report| report.funnel.iter().find(|of| of.name == StageName::Machine).cloned();
    let before = machine(&report(&mut endpoint)).unwrap();
    assert!(before.now < LIMIT && before.capacity == Some(LIMIT), "{before:?}");
    let mut child = Child(process);
    child.told("eat");
    // Reports are made five times a second.
    let mut last = Report::default();
    eventually("the report tells of the descriptors", SOON, || {
        last = report(&mut endpoint);
        machine(&last).is_some_and(|of| of.now >= LIMIT)
    });
    assert_eq!(machine(&last).unwrap().capacity, Some(LIMIT));
    assert!(last.server.memory_bytes.is_some(), "{last:?}");
    child.0.say("end");
    child.0.line_after("ended");
}
