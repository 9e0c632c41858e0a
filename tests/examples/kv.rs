//! The example `kv` with four shards, driven over many connections.
//!
//! `tests/clients/kv` does more, with tools of Redis that are to be installed.

use std::collections::{BTreeSet, HashSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread;

use ringserve_tests::examples::{Example, build};
use ringserve_tests::{Random, SOON, eventually};

const SHARDS: usize = 4;

/// Enough connections to reach several shards, however the kernel deals them out.
const CLIENTS: usize = 48;

fn with_shards() -> Example {
    Example::start("kv", &["--shards", &SHARDS.to_string()])
}

fn clients(server: &Example) -> Vec<Redis> {
    (0..CLIENTS).map(|_| Redis::connect(server.addr)).collect()
}

/// Tells the server to end when it is dropped.
struct Terminates<'a>(&'a Example);

impl Drop for Terminates<'_> {
    fn drop(&mut self) {
        self.0.terminate();
    }
}

/// A client of the protocol.
struct Redis(BufReader<TcpStream>);

impl Redis {
    fn connect(addr: SocketAddr) -> Redis {
        let stream = TcpStream::connect(addr).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream.set_write_timeout(Some(SOON)).unwrap();
        Redis(BufReader::new(stream))
    }

    fn send(&mut self, line: &str) {
        self.0.get_mut().write_all(format!("{line}\r\n").as_bytes()).unwrap();
    }

    /// A reply on one line; `None` at the end of the connection.
    #[track_caller]
    fn reply_or_end(&mut self) -> Option<String> {
        let mut line = String::new();
        if self.0.read_line(&mut line).expect("a reply comes") == 0 {
            return None;
        }
        let text = line.strip_suffix("\r\n").expect("a whole line").to_owned();
        Some(match text.split_at(1) {
            ("$", "-1") => "nil".into(),
            ("$", len) => {
                let mut bytes = vec![0; len.parse::<usize>().unwrap() + 2];
                self.0.read_exact(&mut bytes).expect("a whole string comes");
                assert!(bytes.ends_with(b"\r\n"));
                bytes.truncate(bytes.len() - 2);
                String::from_utf8(bytes).unwrap()
            }
            ("*", count) => {
                let elements: Vec<String> = (0..count.parse().unwrap()).map(|_| self.reply()).collect();
                elements.join(" ")
            }
            _ => text,
        })
    }

    #[track_caller]
    fn reply(&mut self) -> String {
        self.reply_or_end().expect("the connection is open")
    }

    #[track_caller]
    fn ask(&mut self, line: &str) -> String {
        self.send(line);
        self.reply()
    }

    /// A field of INFO.
    #[track_caller]
    fn info(&mut self, field: &str) -> String {
        let text = self.ask("info");
        let value = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        value.unwrap_or_else(|| panic!("{field} is not in {text}")).to_owned()
    }
}

#[test]
fn keys_are_reached_from_connections_of_all_shards() {
    let server = with_shards();
    let mut clients = clients(&server);
    let shards: HashSet<String> = clients.iter_mut().map(|client| client.info("shard")).collect();
    assert!(shards.len() > 1, "{CLIENTS} connections are all on one shard");
    assert_eq!(clients[0].info("shards"), SHARDS.to_string());
    for (n, client) in clients.iter_mut().enumerate() {
        for key in 0..10 {
            assert_eq!(client.ask(&format!("set key:{n}:{key} {}", n * key)), "+OK");
        }
    }
    let all = CLIENTS * 10;
    for n in 0..CLIENTS {
        // Of another connection than the one that set them.
        let client = &mut clients[(n + 7) % CLIENTS];
        let keys: Vec<String> = (0..10).map(|key| format!("key:{n}:{key}")).collect();
        let values: Vec<String> = (0..10).map(|key| (n * key).to_string()).collect();
        for (key, value) in keys.iter().zip(&values) {
            assert_eq!(client.ask(&format!("get {key}")), *value);
        }
        assert_eq!(client.ask(&format!("mget {} none", keys.join(" "))), format!("{} nil", values.join(" ")));
        assert_eq!(client.ask(&format!("exists {} none", keys.join(" "))), ":10");
        assert_eq!(client.ask("dbsize"), format!(":{all}"));
        assert_eq!(client.ask(&format!("expire key:{n}:0 100")), ":1");
        assert_eq!(client.ask(&format!("ttl key:{n}:0")), ":100");
    }
    for client in &mut clients[..SHARDS] {
        let keys: HashSet<String> = client.ask("keys *").split(' ').map(str::to_owned).collect();
        assert_eq!(keys.len(), all);
        let (mut cursor, mut scanned) = ("0".to_owned(), HashSet::new());
        loop {
            let reply = client.ask(&format!("scan {cursor} count 17"));
            let (next, found) = reply.split_once(' ').unwrap();
            scanned.extend(found.split(' ').filter(|key| !key.is_empty()).map(str::to_owned));
            cursor = next.to_owned();
            if cursor == "0" {
                break;
            }
        }
        assert_eq!(scanned, keys);
        assert!(client.info("db0").starts_with(&format!("keys={all},expires={CLIENTS},")));
    }
    assert_eq!(clients[1].ask("mset a 1 b 2 c 3 d 4 e 5 f 6"), "+OK");
    assert_eq!(clients[2].ask("mget f e d c b a"), "6 5 4 3 2 1");
    assert_eq!(clients[3].ask("del a b c d none"), ":4");
    assert_eq!(clients[4].ask("mset a 1 b"), "-ERR wrong number of arguments for 'mset' command");
    assert_eq!(clients[5].ask("flushall"), "+OK");
    for client in &mut clients {
        assert_eq!(client.ask("dbsize"), ":0");
        assert_eq!(client.ask("keys *"), "");
    }
    assert!(server.stop().success());
}

#[test]
fn pipelined_replies_keep_the_order_of_their_requests() {
    let server = with_shards();
    let total = AtomicU64::new(0);
    thread::scope(|scope| {
        for n in 0..CLIENTS as u64 {
            let (mut client, total) = (Redis::connect(server.addr), &total);
            scope.spawn(move || {
                let mut random = Random::new(n + 1);
                let (mut lines, mut expected) = (String::new(), Vec::new());
                // Each shard owns some of these 30 keys of this connection.
                let mut values = [0u64; 30];
                for step in 0..600 {
                    let key = random.below(30) as usize;
                    let name = format!("key:{n}:{key}");
                    let (line, reply) = match random.below(6) {
                        0 => {
                            values[key] = step;
                            (format!("set {name} {step}"), "+OK".into())
                        }
                        1 => {
                            values[key] += 1;
                            (format!("incr {name}"), format!(":{}", values[key]))
                        }
                        2 => (format!("incrby {name} 0"), format!(":{}", values[key])),
                        3 => (format!("echo {step}"), step.to_string()),
                        4 => {
                            values = [step; 30];
                            let pairs = (0..30)
                                .fold(String::new(), |line, key| format!("{line} key:{n}:{key} {step}"));
                            (format!("mset{pairs}"), "+OK".into())
                        }
                        _ => {
                            total.fetch_add(1, SeqCst);
                            ("incr shared".into(), String::new())
                        }
                    };
                    lines.push_str(&(line + "\r\n"));
                    expected.push(reply);
                }
                client.0.get_mut().write_all(lines.as_bytes()).unwrap();
                for reply in expected {
                    let got = client.reply();
                    assert!(
                        got == reply || reply.is_empty() && got.starts_with(':'),
                        "{got} in place of {reply}"
                    );
                }
            });
        }
    });
    let count = total.load(SeqCst);
    assert_eq!(Redis::connect(server.addr).ask("get shared"), count.to_string(), "each INCR counts once");
    assert!(server.stop().success());
}

#[test]
fn long_replies_of_several_shards_reach_a_slow_reader_whole() {
    let server = with_shards();
    let mut client = Redis::connect(server.addr);
    let value = |key: usize| char::from(b'a' + key as u8).to_string().repeat(300_000 + key);
    for key in 0..12 {
        assert_eq!(
            client.ask(&format!(
                "*3\r\n$3\r\nset\r\n$1\r\n{}\r\n${}\r\n{}",
                key % 10,
                300_000 + key % 10,
                value(key % 10)
            )),
            "+OK"
        );
    }
    // 60 MB, far more than sockets and outbox hold together: the server waits for the reader.
    let keys: Vec<usize> = (0..200).map(|n| n * 7 % 10).collect();
    let names: Vec<String> = keys.iter().map(usize::to_string).collect();
    client.send(&format!("mget {}", names.join(" ")));
    client.send("ping");
    // Other connections are served meanwhile.
    let mut other = Redis::connect(server.addr);
    for _ in 0..100 {
        assert_eq!(other.ask("exists 0 1 2 3 4 5 6 7 8 9"), ":10");
    }
    let mut line = String::new();
    client.0.read_line(&mut line).unwrap();
    assert_eq!(line, "*200\r\n");
    for key in keys {
        assert!(client.reply() == value(key), "the value of {key}");
    }
    assert_eq!(client.reply(), "+PONG");
    assert!(server.stop().success());
}

#[test]
fn client_list_and_info_tell_of_all_shards() {
    let server = with_shards();
    let mut clients = clients(&server);
    let ids: BTreeSet<u64> =
        clients.iter_mut().map(|client| client.ask("client id")[1..].parse().unwrap()).collect();
    assert_eq!(ids.len(), CLIENTS, "each connection has another number");
    for (n, client) in clients.iter_mut().enumerate() {
        assert_eq!(client.ask(&format!("client setname c{n}")), "+OK");
    }
    let addrs: Vec<String> =
        clients.iter().map(|client| client.0.get_ref().local_addr().unwrap().to_string()).collect();
    for asking in [0, 11, 47] {
        let list = clients[asking].ask("client list");
        let listed: Vec<u64> = list
            .lines()
            .map(|line| line["id=".len()..].split(' ').next().unwrap().parse().unwrap())
            .collect();
        assert_eq!(listed, ids.iter().copied().collect::<Vec<_>>());
        for (n, addr) in addrs.iter().enumerate() {
            let line = list.lines().find(|line| line.contains(&format!(" addr={addr} "))).expect("its line");
            assert!(line.contains(&format!(" name=c{n} age=")), "{line}");
            assert_eq!(line.contains(" cmd=client"), n == asking, "{line}");
        }
        assert_eq!(clients[asking].info("connected_clients"), CLIENTS.to_string());
    }
    assert_eq!(clients[3].ask("client list type pubsub"), "");
    assert_eq!(clients[3].ask("client list type bogus"), "-ERR Unknown client type 'bogus'");
    assert_eq!(clients[3].ask("client list id x"), "-ERR Invalid client ID");
    assert_eq!(clients[3].ask("client list bogus"), "-ERR syntax error");
    let some: Vec<String> = ids.iter().rev().step_by(10).map(u64::to_string).collect();
    assert_eq!(clients[3].ask(&format!("client list id {}", some.join(" "))).lines().count(), some.len());
    // Those that left are not told any more.
    clients.truncate(CLIENTS / 2);
    eventually("the others are gone", SOON, || clients[0].ask("client list").lines().count() == CLIENTS / 2);
    assert_eq!(clients[1].info("connected_clients"), (CLIENTS / 2).to_string());
    assert_eq!(clients[1].info("total_connections_received"), CLIENTS.to_string());
    assert!(server.stop().success());
}

#[test]
fn no_call_hangs_when_the_server_is_told_to_end() {
    let mut server = with_shards();
    let replies = AtomicU64::new(0);
    thread::scope(|scope| {
        for n in 0..CLIENTS {
            let (mut client, replies) = (Redis::connect(server.addr), &replies);
            scope.spawn(move || {
                // Until its connection ends; each read has a bound.
                for step in 0.. {
                    let lines = [
                        format!("incr key:{}", (n + step) % 50),
                        "mget key:1 key:2 key:3".into(),
                        "dbsize".into(),
                    ];
                    if client.0.get_mut().write_all((lines.join("\r\n") + "\r\n").as_bytes()).is_err() {
                        return;
                    }
                    for _ in lines {
                        let mut line = String::new();
                        match client.0.read_line(&mut line) {
                            Ok(0) => return,
                            Ok(_) if line.starts_with('*') => (0..3).for_each(|_| drop(client.reply())),
                            Ok(_) => {
                                assert!(line.starts_with(':') || line.starts_with("-ERR shard"), "{line}")
                            }
                            // The server closed with requests of this client unread.
                            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return,
                            Err(error) => panic!("a reply, or the end: {error}"),
                        }
                        replies.fetch_add(1, SeqCst);
                    }
                }
            });
        }
        // Also when this test fails, since the clients work until then.
        let _end = Terminates(&server);
        eventually("all of them work", SOON, || replies.load(SeqCst) > 5000);
    });
    assert!(server.ends().success());
}

#[test]
fn shards_are_as_many_as_cpus_unless_told_otherwise() {
    let server = Example::start("kv", &[]);
    let cpus = thread::available_parallelism().unwrap().get();
    assert_eq!(Redis::connect(server.addr).info("shards"), cpus.to_string());
    assert!(server.stop().success());
    let help = Command::new(build("kv")).arg("--help").output().unwrap();
    assert!(String::from_utf8(help.stdout).unwrap().contains("by default one for each CPU"));
}
