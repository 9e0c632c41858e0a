//! Backends by DNS, from a name server that follows a script, on the real kernel.

use std::convert::Infallible;
use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use ringserve::framing::Lines;
use ringserve::upstream::{Dns, Exclusive, Upstream};
use ringserve::{Cx, Frame, Server, Service};
use ringserve_tests::{SOON, eventually};

/// A record of the zone: its name, its type, its TTL and its data.
#[derive(Clone)]
struct Record(&'static str, u16, u32, Vec<u8>);

const A: u16 = 1;
const AAAA: u16 = 28;
const SRV: u16 = 33;
/// No type of DNS: questions of the type in the data are answered with SERVFAIL.
const FAILS: u16 = 0xff00;

fn a(name: &'static str, ttl: u32, last: u8) -> Record {
    Record(name, A, ttl, vec![127, 0, 0, last])
}

fn srv(ttl: u32, [priority, weight, port]: [u16; 3], target: &str) -> Record {
    let mut data: Vec<u8> = [priority, weight, port].iter().flat_map(|part| part.to_be_bytes()).collect();
    data.extend(encoded(target));
    Record("_api._tcp.test", SRV, ttl, data)
}

fn encoded(name: &str) -> Vec<u8> {
    let labels = name.split('.').filter(|label| !label.is_empty());
    let mut bytes: Vec<u8> =
        labels.flat_map(|label| [&[label.len() as u8], label.as_bytes()].concat()).collect();
    bytes.push(0);
    bytes
}

/// A name server, until the end of the test.
struct NameServer {
    addr: SocketAddr,
    zone: Arc<Mutex<Vec<Record>>>,
    asked: Arc<Mutex<u32>>,
}

impl NameServer {
    fn start(zone: Vec<Record>) -> NameServer {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let (addr, zone, asked) = (socket.local_addr().unwrap(), Arc::new(Mutex::new(zone)), Arc::default());
        let server = NameServer { addr, zone, asked };
        let (zone, asked) = (server.zone.clone(), server.asked.clone());
        thread::spawn(move || {
            let mut question = [0; 1500];
            while let Ok((len, from)) = socket.recv_from(&mut question) {
                *asked.lock().unwrap() += 1;
                let answer = answer(&question[..len], &zone.lock().unwrap());
                let _ = socket.send_to(&answer, from);
            }
        });
        server
    }

    fn set(&self, zone: Vec<Record>) {
        *self.zone.lock().unwrap() = zone;
    }

    fn asked(&self) -> u32 {
        *self.asked.lock().unwrap()
    }
}

/// The answer to a question of one name: its records, or that there is no such name.
fn answer(question: &[u8], zone: &[Record]) -> Vec<u8> {
    let mut end = 12;
    while question[end] != 0 {
        end += 1 + question[end] as usize;
    }
    let name = question[12..=end].to_ascii_lowercase();
    let kind = u16::from_be_bytes([question[end + 1], question[end + 2]]);
    let has = |record: &&Record| encoded(record.0) == name;
    let found: Vec<_> = zone.iter().filter(has).filter(|record| record.1 == kind).collect();
    let fails = |record: &Record| record.1 == FAILS && record.3 == kind.to_be_bytes();
    let code = match zone.iter().filter(has).collect::<Vec<_>>()[..] {
        [] => 0x83,
        ref all if all.iter().any(|record| fails(record)) => 0x82,
        _ => 0x80,
    };
    let mut answer = question[..2].to_vec();
    answer.extend([0x85, code, 0, 1, 0, found.len() as u8, 0, 0, 0, 0]);
    answer.extend(&question[12..end + 5]);
    for Record(_, kind, ttl, data) in found {
        answer.extend([0xC0, 12]);
        answer.extend(kind.to_be_bytes());
        answer.extend([0, 1]);
        answer.extend(ttl.to_be_bytes());
        answer.extend((data.len() as u16).to_be_bytes());
        answer.extend(data);
    }
    answer
}

struct Front(#[expect(dead_code, reason = "its upstream looks names up while it is there")] Exclusive<Lines>);

impl Service for Front {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, _cx: &Cx<'_, ()>, _line: Frame) -> Result<(), Infallible> {
        Ok(())
    }
}

/// Runs a server with a client of the upstream while the test looks at that.
fn with(upstream: &Upstream, test: impl FnOnce()) {
    let of_shards = upstream.clone();
    let server = Server::bind("127.0.0.1:0").framing(Lines::default()).shards(2);
    let server = server.start(move |shard| Front(of_shards.exclusive(shard, Lines::default()))).unwrap();
    test();
    server.abort();
    server.wait().unwrap();
}

/// The backends, each as its address, its weight and its priority.
fn backends(upstream: &Upstream) -> Vec<(String, u32, u16)> {
    let of = |backend: &ringserve::upstream::BackendStats| {
        (backend.name.clone(), backend.weight, backend.priority)
    };
    let mut all: Vec<_> = upstream.stats().backends.iter().map(of).collect();
    all.sort();
    all
}

fn at(addr: &str) -> (String, u32, u16) {
    (addr.to_owned(), 1, 0)
}

#[test]
fn half_an_answer_takes_no_backend_away() {
    let ipv6 = Record("db.test", AAAA, 0, Ipv6Addr::LOCALHOST.octets().to_vec());
    let names = NameServer::start(vec![a("db.test", 0, 1), ipv6.clone()]);
    let often = Duration::from_millis(50);
    let dns = Dns::addresses("db.test:5432").server(names.addr).ttl_between(often, 2 * often);
    let upstream = Upstream::discover("db", dns);
    with(&upstream, || {
        let has_ipv4 = || backends(&upstream).contains(&at("127.0.0.1:5432"));
        eventually("it is found", SOON, has_ipv4);
        names.set(vec![Record("db.test", FAILS, 0, A.to_be_bytes().to_vec()), ipv6]);
        eventually("look-ups fail", SOON, || upstream.stats().lookups_failed >= 2);
        assert!(has_ipv4(), "{:?}", backends(&upstream));
    });
}

#[test]
fn addresses_are_followed_when_their_ttl_is_over() {
    let names = NameServer::start(vec![a("db.test", 0, 1), a("db.test", 9, 2)]);
    let often = Duration::from_millis(100);
    let dns = Dns::addresses("db.test:5432").server(names.addr).ttl_between(often, 2 * often);
    let upstream = Upstream::discover("db", dns);
    with(&upstream, || {
        eventually("it is found", SOON, || {
            backends(&upstream) == [at("127.0.0.1:5432"), at("127.0.0.2:5432")]
        });
        names.set(vec![a("db.test", 0, 2), a("db.test", 0, 3)]);
        eventually("it is found again", SOON, || {
            backends(&upstream) == [at("127.0.0.2:5432"), at("127.0.0.3:5432")]
        });
        // A name that is gone changes nothing.
        names.set(Vec::new());
        eventually("it is lost", SOON, || upstream.stats().lookups_failed > 0);
        assert_eq!(backends(&upstream).len(), 2);
    });
}

#[test]
fn name_is_not_looked_up_within_its_ttl() {
    let names = NameServer::start(vec![a("db.test", 300, 1)]);
    let upstream = Upstream::discover("db", Dns::addresses("db.test:5432").server(names.addr));
    with(&upstream, || {
        eventually("it is found", SOON, || !backends(&upstream).is_empty());
        let other = NameServer::start(vec![a("other.test", 0, 1)]);
        let often = Dns::addresses("other.test:1").server(other.addr);
        let often = often.ttl_between(Duration::from_millis(100), Duration::from_millis(100));
        let often = Upstream::discover("other", often);
        with(&often, || eventually("it is looked up again", SOON, || often.stats().lookups > 3));
    });
    assert_eq!((names.asked(), upstream.stats().lookups), (2, 1), "A and AAAA, once");
}

#[test]
fn services_have_their_ports_weights_and_priorities() {
    let names = NameServer::start(vec![
        srv(60, [0, 9, 81], "one.test"),
        srv(60, [0, 0, 82], "two.test"),
        srv(60, [5, 1, 83], "backup.test"),
        srv(60, [0, 1, 84], "nowhere.test"),
        a("one.test", 60, 1),
        a("one.test", 60, 2),
        a("two.test", 60, 3),
        a("backup.test", 60, 4),
    ]);
    let upstream = Upstream::discover("api", Dns::services("_api._tcp.test").server(names.addr));
    with(&upstream, || {
        eventually("it is found", SOON, || !backends(&upstream).is_empty());
        let is = |addr: &str, weight, priority| (addr.to_owned(), weight, priority);
        assert_eq!(
            backends(&upstream),
            [
                is("127.0.0.1:81", 9, 0),
                is("127.0.0.2:81", 9, 0),
                is("127.0.0.3:82", 1, 0),
                is("127.0.0.4:83", 1, 5),
            ]
        );
    });
}

#[test]
fn service_that_is_not_offered_has_no_backend() {
    let names = NameServer::start(vec![srv(60, [0, 0, 0], ".")]);
    let upstream = Upstream::discover("api", Dns::services("_api._tcp.test").server(names.addr));
    with(&upstream, || {
        eventually("it is looked up", SOON, || upstream.stats().lookups_failed > 0);
        assert_eq!((backends(&upstream).len(), upstream.stats().lookups), (0, 0));
    });
}

#[test]
fn configuration_that_is_refused_leaves_names_to_the_system() {
    let path = std::env::temp_dir().join(format!("ringserve-resolv-{}", std::process::id()));
    fs::write(&path, "search internal\n").unwrap();
    let names = Upstream::discover("db", Dns::addresses("localhost:80").resolv_conf(&path));
    with(&names, || {
        eventually("the system knows it", SOON, || !backends(&names).is_empty());
    });
    let services = Upstream::discover("api", Dns::services("_api._tcp.test").resolv_conf(&path));
    with(&services, || {
        eventually("it is refused", SOON, || services.stats().lookups_failed > 0);
        assert!(backends(&services).is_empty());
    });
    fs::remove_file(&path).unwrap();
}

#[test]
fn answers_of_rubbish_are_no_backends() {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let addr = socket.local_addr().unwrap();
    thread::spawn(move || {
        let mut question = [0; 1500];
        while let Ok((len, from)) = socket.recv_from(&mut question) {
            // Its id, an answer of a kind, and then nothing as it says.
            let mut rubbish = question[..len].to_vec();
            rubbish[2] |= 0x80;
            rubbish[6..12].fill(0xFF);
            let _ = socket.send_to(&rubbish, from);
        }
    });
    let good = NameServer::start(vec![a("db.test", 0, 1)]);
    let dns = Dns::addresses("db.test:5432").server(addr).server(good.addr);
    let upstream = Upstream::discover("db", dns);
    with(&upstream, || {
        eventually("the other server answers", SOON, || backends(&upstream) == [at("127.0.0.1:5432")]);
    });
}
