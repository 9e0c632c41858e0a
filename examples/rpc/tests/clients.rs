//! The server on a real socket, with a database in a file, and both clients.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::{env, fs, process};

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    /// Starts a server, and finds out where it listens.
    fn start(server: &mut Command) -> (Running, String) {
        let mut server = server.env("NO_COLOR", "1").stdout(Stdio::piped()).spawn().expect("it was built");
        let mut log = BufReader::new(server.stdout.take().expect("it is piped")).lines();
        let running = Running(server);
        loop {
            let line = log.next().expect("it says where it listens").expect("it logs text");
            if let Some((_, rest)) = line.split_once("listening on ") {
                return (running, rest.split(' ').next().expect("an address").to_owned());
            }
        }
    }
}

/// Runs a client with some calls, and returns whether it succeeded and the lines that it printed.
fn calls(client: &mut Command, addr: &str, token: &str, calls: &[&str]) -> (bool, Vec<String>) {
    let output = client.args(["--connect", addr, "--token", token]).args(calls).output();
    let output = output.expect("the client is there");
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).lines().map(str::to_owned).collect())
}

#[test]
fn clients_in_rust_and_python_share_a_database() {
    let file = env::temp_dir().join(format!("ringserve-rpc-{}.sqlite", process::id()));
    let _ = fs::remove_file(&file);
    let mut server = Command::new(env!("CARGO_BIN_EXE_example-rpc"));
    server.args(["--listen", "127.0.0.1:0", "--user", "ann:secret", "--database"]).arg(&file);
    let (_running, addr) = Running::start(&mut server);
    let python = || {
        let mut python = Command::new("python3");
        python.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("client.py"));
        python
    };
    let rust = || Command::new(env!("CARGO_BIN_EXE_example-rpc-client"));
    let wait = r#"{"method": "wait", "millis": 100}"#;
    let put = r#"{"method": "put", "key": "greeting", "value": "hello"}"#;
    let get = r#"{"method": "get", "key": "greeting"}"#;

    // In the order of the calls.
    let (good, said) = calls(&mut python(), &addr, "secret", &[wait, put, get]);
    assert!(good && said == ["100", "true", "\"hello\""], "{said:?}");
    // In the order of the replies.
    let (good, said) = calls(&mut rust(), &addr, "secret", &[wait, get]);
    let replies = [r#"{"id":0,"result":"ann"}"#, r#"{"id":2,"result":"hello"}"#, r#"{"id":1,"result":100}"#];
    assert!(good && said == replies, "{said:?}");

    let (good, said) = calls(&mut python(), &addr, "secret", &[r#"{"method": "get"}"#]);
    assert!(!good && said == ["error: missing field `key`"], "{said:?}");
    let (good, said) = calls(&mut python(), &addr, "guess", &[get]);
    assert!(!good && said == ["no login: no such token"], "{said:?}");
    let (good, said) = calls(&mut rust(), &addr, "guess", &[get]);
    assert!(!good && said[0] == r#"{"error":"no such token","id":0}"#, "{said:?}");

    // Over a front, whose calls share connections; one of two servers is away.
    let mut front = Command::new(env!("CARGO_BIN_EXE_example-rpc-front"));
    front.args([
        "--listen",
        "127.0.0.1:0",
        "--token",
        "secret",
        "--server",
        &addr,
        "--server",
        "127.0.0.1:1",
    ]);
    let (_front, front) = Running::start(&mut front);
    let mut client = TcpStream::connect(&front).expect("the front listens");
    let lines = [wait, get, "rubbish", r#"{"method": "get"}"#].join("\n");
    client.write_all(format!("{lines}\n").as_bytes()).expect("the front reads");
    let mut answers = BufReader::new(client).lines();
    let mut next = || answers.next().expect("the front answers").expect("in text");
    assert_eq!((next(), next()), (r#"{"result":100}"#.to_owned(), r#"{"result":"hello"}"#.to_owned()));
    assert!(next().starts_with(r#"{"error":"expected value"#));
    assert_eq!(next(), r#"{"error":"missing field `key`"}"#);
    fs::remove_file(&file).expect("the database is in the file");
}
