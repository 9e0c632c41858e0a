//! The drill names the ten causes that it plants in servers of this build, on the driver of
//! `RINGSERVE_DRIVER`.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use ringserve_tests::{SOON, eventually};
use serde::Deserialize;

/// Drills are causes for each other, so only one runs at a time.
fn in_turn() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn drill(arguments: &[&str]) -> (i32, String) {
    let done =
        Command::new(env!("CARGO_BIN_EXE_ringserve-ctl")).arg("drill").args(arguments).output().unwrap();
    (done.status.code().unwrap(), String::from_utf8(done.stdout).unwrap())
}

/// The drill's report of a case.
#[derive(Debug, Deserialize)]
struct Outcome {
    cause: String,
    expected: String,
    found: Option<String>,
    left_out: Option<String>,
}

/// Causes that wait, and causes for which a CPU works: two of the latter at once would be a cause
/// for each other.
const LANES: [&[&str]; 3] = [
    &["table", "descriptors", "lock", "slow"],
    &["reader"],
    &["backlog", "memory", "conntrack", "cpu", "quota"],
];

#[test]
fn ten_planted_causes_are_named_at_their_stages() {
    let _turn = in_turn();
    // Named within two seconds if nothing else runs.
    let lane = |causes: &[&str]| {
        let only = causes.iter().flat_map(|cause| ["--only", cause]);
        drill(&["--json", "--within", "60"].into_iter().chain(only).collect::<Vec<_>>())
    };
    let lanes = thread::scope(|scope| {
        let lanes = LANES.map(|causes| scope.spawn(move || lane(causes)));
        lanes.map(|lane| lane.join().unwrap())
    });
    let mut planted = 0;
    for ((code, json), causes) in lanes.iter().zip(LANES) {
        let outcomes: Vec<Outcome> =
            serde_json::from_str(json).unwrap_or_else(|error| panic!("{error}: {json}"));
        assert_eq!(outcomes.iter().map(|outcome| &*outcome.cause).collect::<Vec<_>>(), causes);
        for Outcome { cause, expected, found, left_out } in outcomes {
            match left_out {
                // Causes that a user may not plant.
                Some(why) => assert!(["conntrack", "quota"].contains(&&*cause), "{cause}: {why}"),
                None => {
                    planted += 1;
                    assert_eq!(found, Some(expected), "{cause} in {json}");
                }
            }
        }
        assert_eq!(*code, 0, "{json}");
    }
    assert!(planted >= 8, "{lanes:?}");
}

/// A drill that holds its cause, in a folder that is removed together with the remains of a killed
/// process.
struct Held {
    drill: Child,
    folder: PathBuf,
}

impl Held {
    fn start(cause: &str) -> Held {
        let folder = std::env::temp_dir().join(format!("ringserve-held-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringserve-ctl"));
        command.args(["drill", "--only", cause, "--within", "60", "--hold", "3600"]).env("TMPDIR", &folder);
        let drill = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        Held { drill, folder }
    }

    /// The printed address of its page.
    fn url(&mut self) -> String {
        let lines = BufReader::new(self.drill.stderr.take().unwrap()).lines();
        let urls = lines.map_while(Result::ok).filter_map(|line| {
            let (url, _) = line.strip_prefix("its page: ")?.split_once(',')?;
            Some(url.to_owned())
        });
        { urls }.next().expect("an address")
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.drill.kill().unwrap();
        self.drill.wait().unwrap();
        fs::remove_dir_all(&self.folder).unwrap();
    }
}

#[test]
fn held_cause_is_on_the_page_at_the_address_that_is_told() {
    let _turn = in_turn();
    let mut held = Held::start("table");
    let url = held.url();
    let addr = url.strip_prefix("http://").unwrap();
    let ask = |path: &str| {
        let mut stream = TcpStream::connect(addr)?;
        write!(stream, "GET {path} HTTP/1.1\r\nhost: {addr}\r\nconnection: close\r\n\r\n")?;
        std::io::read_to_string(stream)
    };
    // Its server starts meanwhile, and the cause has to take effect. It stays red, so a late
    // request finds it too.
    eventually("the page shows the cause", 3 * SOON, || {
        ask("/report.json").is_ok_and(|report| report.contains(r#"{"name":"table","state":"lost""#))
    });
    assert!(held.drill.try_wait().unwrap().is_none(), "it is held");
    assert!(ask("/").unwrap().contains("<!doctype html>"));
}

#[test]
fn signal_removes_all_that_the_drill_has_on_the_machine() {
    let _turn = in_turn();
    // A handler that computes has a control group where one can be created, and conntrack a
    // network.
    for (cause, signal, code) in [("cpu", "INT", 130), ("conntrack", "TERM", 143), ("table", "HUP", 129)] {
        if cause == "conntrack" && Command::new("iptables").arg("--version").output().is_err() {
            println!("skipped: {cause}, which the drill leaves out without iptables");
            continue;
        }
        let mut held = Held::start(cause);
        held.url();
        let number = held.drill.id().to_string();
        let groups =
            ["/sys/fs/cgroup", "/sys/fs/cgroup/cpu"].map(|root| format!("{root}/ringserve-drill-{number}"));
        let children = format!("/proc/{number}/task/{number}/children");
        eventually("the cause has a server", SOON, || !fs::read_to_string(&children).unwrap().is_empty());
        assert!(fs::read_dir(&held.folder).unwrap().count() == 1, "{cause} has a folder");
        let sent = Command::new("kill").args(["-s", signal, &number]).status().unwrap();
        assert!(sent.success());
        let status = held.drill.wait().unwrap();
        assert_eq!(status.code(), Some(code), "{cause}, {signal}");
        assert_eq!(fs::read_dir(&held.folder).unwrap().count(), 0, "{cause}, {signal}");
        assert!(groups.iter().all(|group| !fs::exists(group).unwrap()), "{cause}, {signal}: {groups:?}");
    }
}

#[test]
fn cause_that_is_not_named_in_time_is_wrong() {
    let _turn = in_turn();
    // A call that waits is red after two seconds.
    let (code, json) = drill(&["--json", "--only", "slow", "--within", "0.1"]);
    assert_eq!(code, 1, "{json}");
    assert!(json.contains("\"expected\": \"handler\"") && json.contains("no stage is red"), "{json}");
}

#[test]
fn missed_bar_of_overload_is_told_by_code_and_json() {
    let _turn = in_turn();
    // A server that is sent a tenth of its capacity serves a tenth.
    let arguments = "overload --only goodput --driver epoll --times 0.1 --settle 0.5 --seconds 0.5 --json";
    let (code, json) = drill(&arguments.split(' ').collect::<Vec<_>>());
    assert_eq!(code, 1, "{json}");
    let rows: Vec<serde_json::Value> = serde_json::from_str(&json).unwrap();
    let told = |row: &serde_json::Value| (row["server"].clone(), row["held"].clone(), row["beside"].clone());
    assert_eq!(told(&rows[0]), ("epoll".into(), false.into(), false.into()), "{json}");
    assert_eq!(told(&rows[1]), ("sheds nothing".into(), false.into(), true.into()), "{json}");
    let goodput = rows[0]["bars"][0]["value"].as_f64().unwrap();
    assert!((0.02..0.5).contains(&goodput), "{json}");
}

#[test]
fn server_that_is_there_already_is_flooded() {
    let _turn = in_turn();
    let arguments = "overload-server --row prefix --driver epoll --micros 200 --sheds";
    let mut server = Command::new(env!("CARGO_BIN_EXE_ringserve-ctl"))
        .args(arguments.split(' '))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let said = BufReader::new(server.stdout.take().unwrap()).lines().next().unwrap().unwrap();
    let addr = said.strip_prefix("listening ").unwrap();
    let (code, json) = drill(&["overload", "--target", addr, "--seconds", "1", "--json"]);
    // It serves until its input ends.
    drop(server.stdin.take());
    assert!(server.wait().unwrap().success());
    let rows: Vec<serde_json::Value> = serde_json::from_str(&json).unwrap();
    assert!(rows.len() == 1 && rows[0]["row"] == "prefix" && rows[0]["server"] == addr, "{json}");
    let bars = rows[0]["bars"].as_array().unwrap();
    // Whether each of them is in time depends on the machine.
    assert!(bars[1]["of"] == "canaries served" && bars[1]["value"].as_f64().unwrap() > 0.0, "{json}");
    assert_eq!(code, i32::from(rows[0]["held"] == false), "{json}");
}

#[test]
fn innocent_peers_stay_where_heavy_ones_fill_the_memory() {
    let _turn = in_turn();
    let arguments = ["overload", "--only", "memory", "--seconds", "2", "--json"];
    let (code, json) = drill(&arguments);
    let rows: Vec<serde_json::Value> = serde_json::from_str(&json).unwrap();
    assert!(rows.len() == 2 && rows.iter().all(|row| row["row"] == "memory"), "{json}");
    for row in rows.iter().filter(|row| !row["left_out"].is_string()) {
        let bars = row["bars"].as_array().unwrap();
        // Which of the heavy ones are closed depends on time as well, and the machine may be busy.
        assert!(bars[0]["of"] == "innocent closed" && bars[0]["held"] == true, "{json}");
        assert!(bars[1]["of"] == "readers of nothing closed" && bars[1]["held"] == true, "{json}");
    }
    let missed = rows.iter().any(|row| row["held"] == false && row["left_out"].is_null());
    assert_eq!(code, i32::from(missed), "{json}");
}
