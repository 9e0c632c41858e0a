//! `load` measures servers in both loops, and reports what it cannot do.

use std::net::TcpListener;
use std::process::{Command, Output};

fn load(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringserve-bench"));
    command.args(["load", "--seconds", "0.3", "--warm-up", "0.1", "--rounds", "1"]).args(arguments);
    command.output().unwrap()
}

/// The results, as JSON.
fn measured(arguments: &[&str]) -> Vec<serde_json::Value> {
    let file = std::env::temp_dir().join(format!(
        "ringserve-load-{}-{}.json",
        std::process::id(),
        arguments.join("")
    ));
    let output = load(&[arguments, &["--json", file.to_str().unwrap()]].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let json = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    std::fs::remove_file(file).unwrap();
    json
}

#[test]
fn a_closed_loop_measures_each_server_in_each_round() {
    for connections in ["1", "20"] {
        let all = measured(&["--servers", "ringserve,tokio", "--connections", connections]);
        let servers: Vec<_> = all.iter().map(|one| one["server"].as_str().unwrap()).collect();
        assert_eq!(servers, ["ringserve", "tokio"]);
        for one in all {
            assert!(one["requests_per_second"].as_f64().unwrap() > 0.0, "{one}");
            assert!(one["cpu_us"].as_f64().unwrap() > 0.0, "{one}");
            let at = |name: &str| one[name].as_f64().unwrap();
            assert!(at("p50_us") <= at("p99_us") && at("p99_us") <= at("p999_us"), "{one}");
            assert!(at("p999_us") <= at("max_us") * 1.01, "{one}");
        }
    }
}

#[test]
fn pipelined_lines_and_large_messages_come_back() {
    let all = measured(&["--servers", "ringserve-lines", "--lines", "--pipeline", "16"]);
    assert!(all[0]["requests_per_second"].as_f64().unwrap() > 0.0);
    let all = measured(&["--servers", "ringserve", "--bytes", "1048576", "--connections", "2"]);
    assert!(all[0]["requests_per_second"].as_f64().unwrap() > 0.0);
}

#[test]
fn messages_of_websocket_come_back() {
    for arguments in
        ["--pipeline 16 --connections 20 --firehose", "--bytes 1048576 --connections 2", "--rate 2000"]
    {
        let arguments: Vec<_> =
            ["--websocket", "--servers", "ringserve-ws"].into_iter().chain(arguments.split(' ')).collect();
        let all = measured(&arguments);
        assert!(all[0]["requests_per_second"].as_f64().unwrap() > 0.0, "{arguments:?}");
    }
}

#[test]
fn an_open_loop_sends_as_many_as_it_was_told() {
    let all = measured(&["--servers", "ringserve", "--rate", "2000", "--connections", "10"]);
    let rate = all[0]["requests_per_second"].as_f64().unwrap();
    // A busy machine may be late, or catch up; a closed loop would be far above.
    assert!((100.0..10_000.0).contains(&rate), "{rate} a second");
}

#[test]
fn a_server_that_answers_nothing_is_named() {
    for (layer, why) in [(&[][..], ""), (&["--websocket"], "that asked for WebSocket")] {
        // It accepts, and closes at once.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let accepting = std::thread::spawn(move || drop(listener.accept()));
        let output = load(&[&["--target", &address, "--connections", "1"], layer].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(&address), "{said}");
        assert!(said.contains(why) || said.contains("reset"), "{said}");
        accepting.join().unwrap();
    }
}

#[test]
fn options_that_make_no_sense_are_refused() {
    for (arguments, expected) in [
        (["--bytes", "0"], "--bytes 0: 1 to"),
        (["--connections", "0"], "1 and more"),
        (["--connections", "100000000"], "open files"),
        (["--cpus", "0"], "is the server's"),
        (["--rate", "0.5"], "--rate: 1 to"),
        (["--pipeline", "100000"], "sent together"),
        (["--websocket", "--bytes=1048577"], "at most 1048576 with --websocket"),
        (["--websocket", "--tls"], "cannot be used with"),
    ] {
        let output = load(&arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(expected), "{arguments:?}: {said}");
    }
}

#[test]
fn churn_makes_a_connection_for_each_round_trip() {
    for (arguments, servers) in [
        (&["--servers", "ringserve,tokio", "--rounds", "2"][..], ["ringserve", "tokio"]),
        (&["--websocket", "--rounds", "1"], ["ringserve-ws", "ringserve-epoll-ws"]),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringserve-bench"));
        command.args(["churn", "--seconds", "0.3", "--at-once", "10"]).args(arguments);
        let output = command.output().unwrap();
        let (said, table) =
            (String::from_utf8_lossy(&output.stderr), String::from_utf8_lossy(&output.stdout));
        assert!(output.status.success(), "{said}");
        let rows: Vec<_> = table.lines().skip(1).filter_map(|row| row.split_whitespace().next()).collect();
        assert_eq!(rows, servers, "{table}");
    }
}

#[test]
fn fanout_delivers_to_every_listener() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringserve-bench"));
    command.args(["fanout", "--seconds", "0.3", "--rounds", "1", "--listeners", "100"]);
    let output = command.output().unwrap();
    let (said, table) = (String::from_utf8_lossy(&output.stderr), String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{said}");
    let rows: Vec<_> = table.lines().skip(1).filter_map(|row| row.split_whitespace().next()).collect();
    assert_eq!(rows, ["ringserve-fanout", "ringserve-epoll-fanout", "tokio-fanout"], "{table}");
}
