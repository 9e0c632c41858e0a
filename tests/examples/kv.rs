//! The example `kv` as a process with four shards, driven over many connections. What it answers is
//! tested beside it, by seed.
//!
//! `tests/clients/kv` does more, with tools of Redis that are to be installed.

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
