//! Every server echoes: large transfers, half-closed and slow peers, many short connections; and
//! `lockstep` prints a row for each.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

/// The servers that echo raw bytes.
const SERVERS: [&str; 3] = ["limit-uring", "limit-epoll", "tokio"];

/// Longer than any answer takes, so that a failure is not a hang.
const PATIENCE: Duration = Duration::from_secs(20);

/// A server process that ends with the test.
struct Server {
    process: Child,
    address: SocketAddr,
}

impl Server {
    fn start(name: &str) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_ringserve-bench"))
            .args(["serve", name, "--listen", "127.0.0.1:0"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening ").and_then(|text| text.parse().ok());
        let Some(address) = address else {
            process.kill().unwrap();
            panic!("{name} said {line:?}");
        };
        Self { process, address }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Bytes of which no two stretches are alike within 251 × 4096.
fn pattern(count: usize) -> Vec<u8> {
    (0..count).map(|at| (at % 251) as u8 ^ (at / 4096) as u8).collect()
}

fn expect_echo(stream: &mut TcpStream, bytes: &[u8]) {
    stream.write_all(bytes).unwrap();
    let mut reply = vec![0; bytes.len()];
    stream.read_exact(&mut reply).unwrap();
    assert!(reply == bytes, "the reply differs");
}

#[test]
fn a_mebibyte_comes_back_whole_and_then_the_end() {
    for name in SERVERS {
        let server = Server::start(name);
        let sent = pattern(1 << 20);
        let mut stream = server.connect();
        let mut writer = stream.try_clone().unwrap();
        let bytes = sent.clone();
        let writing = thread::spawn(move || {
            writer.write_all(&bytes).unwrap();
            writer.shutdown(Shutdown::Write).unwrap();
        });
        let mut reply = Vec::new();
        stream.read_to_end(&mut reply).unwrap();
        writing.join().unwrap();
        assert!(reply == sent, "{name}: {} bytes came back, or other ones", reply.len());
    }
}

#[test]
fn slow_reader_holds_back_no_other_and_gets_everything() {
    for name in SERVERS {
        let server = Server::start(name);
        let mut slow = server.connect();
        // Until the server takes no more, which is when a write makes no progress for a while.
        slow.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
        let chunk = pattern(64 * 1024);
        let mut sent = Vec::new();
        loop {
            assert!(sent.len() < 256 << 20, "{name} takes bytes without end");
            match slow.write(&chunk) {
                Ok(count) => sent.extend_from_slice(&chunk[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => panic!("{name}: {error}"),
            }
        }
        let mut quick = server.connect();
        for _ in 0..100 {
            expect_echo(&mut quick, b"not held back");
        }
        slow.shutdown(Shutdown::Write).unwrap();
        let mut reply = Vec::new();
        slow.read_to_end(&mut reply).unwrap();
        assert!(reply == sent, "{name}: {} of {} bytes, or other ones", reply.len(), sent.len());
        expect_echo(&mut quick, b"still there");
    }
}

#[test]
fn slots_are_used_again_after_every_kind_of_end() {
    for name in SERVERS {
        let server = Server::start(name);
        for round in 0..20_usize {
            let mut streams: Vec<TcpStream> = (0..50).map(|_| server.connect()).collect();
            for (number, stream) in streams.iter_mut().enumerate() {
                expect_echo(stream, format!("round {round}, connection {number}").as_bytes());
            }
            for (number, mut stream) in streams.into_iter().enumerate() {
                match number % 3 {
                    // Closed with the reply unread: the server's socket is reset.
                    0 => stream.write_all(&pattern(5000)).unwrap(),
                    1 => {
                        stream.shutdown(Shutdown::Write).unwrap();
                        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "{name}");
                    }
                    _ => {}
                }
            }
        }
    }
}

#[test]
fn lockstep_measures_servers_of_websocket_and_no_others() {
    let lockstep = |arguments: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringserve-bench"));
        command.args(["lockstep", "--rounds", "2", "--steps", "20", "--connections", "3"]);
        command.args(arguments.split(' ')).output().unwrap()
    };
    let output = lockstep("--websocket --pipeline 16");
    let (said, table) = (String::from_utf8_lossy(&output.stderr), String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{said}");
    let rows: Vec<_> = table.lines().skip(1).filter_map(|row| row.split_whitespace().nth(1)).collect();
    assert_eq!(rows, ["ringserve-ws", "ringserve-epoll-ws"], "{table}");
    for (arguments, expected) in [
        ("--servers ringserve-ws", "ringserve-ws speaks WebSocket: add --websocket"),
        ("--servers tokio --websocket", "tokio speaks no WebSocket: leave --websocket out"),
        ("--servers ringserve-tls --websocket", "ringserve-tls speaks TLS: add --tls"),
        ("--websocket --bytes 1 --pipeline 20000", "one step of a connection is 1 to"),
    ] {
        let output = lockstep(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(expected), "{arguments}: {said}");
    }
}

#[test]
fn lockstep_prints_a_row_for_each_server() {
    for framing in [&[][..], &["--lines"][..]] {
        let output = Command::new(env!("CARGO_BIN_EXE_ringserve-bench"))
            .args(["lockstep", "--connections", "1,3", "--rounds", "2", "--steps", "20"])
            .args(["--pipeline", "4"])
            .args(framing)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        for name in SERVERS {
            let rows =
                text.lines().skip(1).filter(|line| line.split_whitespace().any(|word| word == name)).count();
            assert_eq!(rows, 2, "{name} in\n{text}");
        }
    }
}
