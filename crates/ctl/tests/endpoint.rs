//! The program against an endpoint with canned answers.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::process::{Command, Output};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use ringserve_report::{
    Connection, Connections, Finding, Report, Severity, ShardReport, Stage, StageName, Stall, State,
};

/// Answers each request by its path, and returns the request.
fn answer(mut stream: impl Read + Write, token: Option<&str>) -> Option<String> {
    let mut head = String::new();
    let mut reader = BufReader::new(&mut stream);
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head).ok()? == 0 {
            return None;
        }
    }
    let line = head.lines().next()?.trim_end_matches(" HTTP/1.1").to_owned();
    let lower = head.to_ascii_lowercase();
    let is_known = token.is_none_or(|token| lower.contains(&format!("authorization: bearer {token}\r\n")));
    let is_meant = line.starts_with("GET") || lower.contains("x-ringserve: 1\r\n");
    let (status, body) = match (is_known, is_meant, &*line) {
        (false, ..) => ("401 Unauthorized", "this endpoint has a token\n".to_owned()),
        (_, false, _) => ("403 Forbidden", "no\n".to_owned()),
        (.., "GET /report.json") => ("200 OK", serde_json::to_string(&report()).unwrap()),
        (.., "GET /stalls") => ("200 OK", serde_json::to_string(&report().stalls).unwrap()),
        (.., "GET /doctor") => ("200 OK", serde_json::to_string(&report().findings).unwrap()),
        (.., "GET /doctor?for=connections=5") => ("200 OK", "[]".to_owned()),
        (.., "GET /connections?by=outbox&limit=20") => {
            let connections =
                Connections { connections: report().outboxes, silent_shards: vec![1], ..Default::default() };
            ("200 OK", serde_json::to_string(&connections).unwrap())
        }
        (.., "GET /connections?by=oldest_call&limit=3") => ("200 OK", "{}".to_owned()),
        (.., "POST /connections/0.17.3/close") => ("200 OK", String::new()),
        (.., "POST /connections/9.9.9/close") => {
            ("404 Not Found", "there is no connection 9.9.9\nmore\n".to_owned())
        }
        (.., "GET /admission") => {
            ("200 OK", r#"{"limits":[{"per_address":20,"networks":[]}],"changes":[]}"#.to_owned())
        }
        (.., "POST /admission/deny?network=192.0.2.0/24&seconds=600&listener=0") => {
            ("200 OK", "192.0.2.0/24 is denied\n".to_owned())
        }
        (.., "POST /admission/limit?per_address=0") => {
            ("400 Bad Request", "per_address is 0, which lets no peer in\n".to_owned())
        }
        (.., "POST /drain") => ("202 Accepted", "draining\n".to_owned()),
        _ => ("404 Not Found", String::new()),
    };
    let length = body.len();
    let _ = write!(stream, "HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n{body}");
    Some(line)
}

fn report() -> Report {
    let stage = |name| Stage { name, state: State::Calm, unit: "connections".into(), ..Stage::default() };
    let mut report = Report {
        funnel: StageName::ALL.map(stage).into(),
        shards: vec![ShardReport { busy: 1.0, stalled_seconds: Some(0.74), ..ShardReport::default() }],
        outboxes: vec![Connection {
            id: "0.17.3".into(),
            peer: "10.1.2.3:5511".into(),
            outbox_bytes: 3 << 20,
            bytes_in: Some(77),
            state: "open".into(),
            ..Connection::default()
        }],
        stalls: vec![Stall { ongoing: true, work: "call".into(), cause: "lock".into(), ..Stall::default() }],
        findings: vec![
            Finding {
                severity: Severity::Error,
                what: "RLIMIT_NOFILE".into(),
                value: "64".into(),
                ..Finding::default()
            },
            Finding { severity: Severity::Info, what: "a note".into(), ..Finding::default() },
        ],
        ..Report::default()
    };
    report.funnel[4].state = State::Lost;
    report.funnel[4].why = "a handler blocks shard 0".into();
    report.server.program = "app".into();
    report
}

/// An endpoint, for as long as the test runs. Returns its address, and the requests it received.
fn endpoint(token: Option<&'static str>) -> (String, Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = format!("http://{}", listener.local_addr().unwrap());
    let (tell, asked) = channel();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Some(line) = answer(stream.unwrap(), token) else { continue };
            if tell.send(line).is_err() {
                break;
            }
        }
    });
    (at, asked)
}

struct Said {
    code: i32,
    out: String,
    error: String,
}

fn ctl_as(arguments: &[&str], token: Option<&str>) -> Said {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringserve-ctl"));
    command.args(arguments).env_remove("RINGSERVE_ADMIN").env_remove("RINGSERVE_ADMIN_TOKEN");
    if let Some(token) = token {
        command.env("RINGSERVE_ADMIN_TOKEN", token);
    }
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Said { code: status.code().unwrap(), out: text(stdout), error: text(stderr) }
}

fn ctl(arguments: &[&str]) -> Said {
    ctl_as(arguments, None)
}

#[test]
fn top_prints_one_frame() {
    let (at, asked) = endpoint(None);
    let said = ctl(&["top", "--once", "--at", &at]);
    assert_eq!((said.code, &*said.error), (0, ""));
    for words in [
        "app 0 at http://127.0.0.1:",
        "LOST handler",
        "cause: handler: a handler blocks shard 0",
        "STALLED for 740 ms",
        "0.17.3",
    ] {
        assert!(said.out.contains(words), "{words}: {}", said.out);
    }
    assert_eq!(asked.recv().unwrap(), "GET /report.json");
    let json = ctl(&["top", "--once", "--json", "--at", &at]);
    assert_eq!(serde_json::from_str::<Report>(&json.out).unwrap(), report());
}

#[test]
fn top_without_a_terminal_says_what_to_use() {
    let (at, _asked) = endpoint(None);
    let said = ctl(&["top", "--at", &at]);
    // If the tests ran in a terminal it would show one; this one has pipes.
    assert!(said.code == 3 && said.error.contains("top --once"), "{} {}", said.code, said.error);
}

#[test]
fn connections_are_listed_with_silent_shards() {
    let (at, asked) = endpoint(None);
    let said = ctl(&["connections", "--at", &at]);
    assert_eq!(asked.recv().unwrap(), "GET /connections?by=outbox&limit=20");
    assert!(said.out.contains("0.17.3  10.1.2.3:5511") && said.out.contains("3.0M"), "{}", said.out);
    assert!(said.out.contains("shards [1] do not answer"), "{}", said.out);
    let said = ctl(&["connections", "--by", "oldest-call", "--limit", "3", "--at", &at]);
    assert_eq!((said.code, &*said.out), (0, "no such connections\n"));
}

#[test]
fn stalls_are_one_line_each() {
    let (at, _asked) = endpoint(None);
    let said = ctl(&["stalls", "--at", &at]);
    assert!(said.out.trim_start().starts_with("now  shard 0 stalled for 0: call, lock"), "{}", said.out);
    let json = ctl(&["stalls", "--json", "--at", &at]);
    assert_eq!(serde_json::from_str::<Vec<Stall>>(&json.out).unwrap().len(), 1);
}

#[test]
fn effects_are_posted_with_their_header() {
    let (at, asked) = endpoint(None);
    let said = ctl(&["close", "0.17.3", "--at", &at]);
    assert_eq!((said.code, &*said.out), (0, "0.17.3 is told to close\n"));
    assert_eq!(asked.recv().unwrap(), "POST /connections/0.17.3/close");
    let said = ctl(&["drain", "--at", &at]);
    assert_eq!((said.code, &*said.out), (0, "draining\n"));
    let said = ctl(&["close", "9.9.9", "--at", &at]);
    assert!(
        said.code == 3 && said.error.contains("404 Not Found: there is no connection 9.9.9\n"),
        "{}",
        said.error
    );
    let said = ctl(&["close", "../drain", "--at", &at]);
    assert!(said.code == 3 && said.error.contains("is no connection"), "{}", said.error);
}

#[test]
fn admission_is_shown_and_changed() {
    let (at, asked) = endpoint(None);
    let said = ctl(&["admission", "--at", &at]);
    assert!(said.out.starts_with("per_address=20 address_rate=off connections_max=off"), "{}", said.out);
    assert_eq!(asked.recv().unwrap(), "GET /admission");
    let said = ctl(&["admission", "deny", "192.0.2.0/24", "--for", "600", "--listener", "0", "--at", &at]);
    assert_eq!((said.code, &*said.out), (0, "192.0.2.0/24 is denied\n"));
    assert_eq!(asked.recv().unwrap(), "POST /admission/deny?network=192.0.2.0/24&seconds=600&listener=0");
    let said = ctl(&["admission", "limit", "per_address=0", "--at", &at]);
    assert!(said.code == 3 && said.error.contains("which lets no peer in"), "{}", said.error);
    for wrong in [
        &["admission", "deny", "10.0.0.0/8&x=y", "--for", "5"][..],
        &["admission", "deny", "10.0.0.0/8"],
        &["admission", "deny", "10.0.0.0/8", "--for", "0"],
        &["admission", "allow", "", "--for", "5"],
    ] {
        let said = ctl(&[wrong, &["--at", &at]].concat());
        assert!(said.code == 3 && said.out.is_empty(), "{wrong:?}: {}", said.out);
    }
}

#[test]
fn doctor_of_a_server_ends_by_the_worst_finding() {
    let (at, asked) = endpoint(None);
    let said = ctl(&["doctor", "--at", &at]);
    assert_eq!((said.code, asked.recv().unwrap()), (2, "GET /doctor".to_owned()));
    assert!(
        said.out.contains("error: RLIMIT_NOFILE is 64\n") && said.out.contains("1 error, 0 warnings, 1 note"),
        "{}",
        said.out
    );
    assert!(!ctl(&["doctor", "--quiet", "--at", &at]).out.contains("a note"));
    let said = ctl(&["doctor", "--for", "connections=5", "--json", "--at", &at]);
    assert_eq!((said.code, said.out.trim()), (0, "[]"));
}

#[test]
fn doctor_of_the_machine_needs_no_server() {
    let said = ctl(&["doctor", "--for", "connections=100000000,upstreams=70000", "--json"]);
    assert_eq!(said.code, 2, "{}", said.error);
    let findings: Vec<Finding> = serde_json::from_str(&said.out).unwrap();
    for check in ["descriptors", "memory", "local_ports"] {
        let found =
            findings.iter().find(|finding| finding.check == check).unwrap_or_else(|| panic!("{check}"));
        assert!(found.needed.contains('=') && !found.certainty.is_empty(), "{found:?}");
    }
}

#[test]
fn token_is_taken_from_the_environment() {
    let (at, _asked) = endpoint(Some("correct-horse-battery"));
    let said = ctl(&["stalls", "--at", &at]);
    assert!(said.code == 3 && said.error.contains("set RINGSERVE_ADMIN_TOKEN"), "{}", said.error);
    let said = ctl_as(&["stalls", "--at", &at], Some("wrong-wrong-wrong"));
    assert!(said.code == 3 && said.error.contains("another token"), "{}", said.error);
    assert_eq!(ctl_as(&["stalls", "--at", &at], Some("correct-horse-battery")).code, 0);
}

#[test]
fn unix_sockets_are_asked_by_path() {
    let path = std::env::temp_dir().join(format!("ringserve-ctl-{}.sock", std::process::id()));
    let listener = UnixListener::bind(&path).unwrap();
    thread::spawn(move || listener.incoming().for_each(|stream| drop(answer(stream.unwrap(), None))));
    let at = format!("unix:{}", path.display());
    let said = ctl(&["stalls", "--at", &at]);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(said.code, 0, "{}", said.error);
    let gone = ctl(&["stalls", "--at", &at]);
    assert!(gone.code == 3 && gone.error.contains("no admin endpoint at unix:"), "{}", gone.error);
}

#[test]
fn missing_endpoints_are_named_with_what_starts_one() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let said = ctl(&["top", "--once", "--at", &format!("http://{free}")]);
    assert_eq!(said.code, 3);
    let expected = format!("no admin endpoint at http://{free}");
    assert!(said.error.contains(&expected) && said.error.contains("Server::admin(\""), "{}", said.error);
}

#[test]
fn other_servers_are_told_apart() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        let talks = ["SSH-2.0-OpenSSH_9.9\r\n", "HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n<html>", ""];
        for (stream, talk) in listener.incoming().zip(talks) {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 1024]);
            let _ = stream.write_all(talk.as_bytes());
        }
    });
    for words in ["is no admin endpoint", "something else than a report", "is no admin endpoint"] {
        let said = ctl(&["stalls", "--at", &at]);
        assert!(said.code == 3 && said.error.contains(words), "{words}: {}", said.error);
    }
}

#[test]
fn wrong_command_lines_end_with_3_and_help_with_0() {
    assert_eq!(ctl(&["top", "--at", "https://a"]).code, 3);
    assert_eq!(ctl(&[]).code, 3);
    let help = ctl(&["--help"]);
    assert!(help.code == 0 && help.out.contains("When users say that it hangs"), "{}", help.out);
}
