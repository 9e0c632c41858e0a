//! `idle` holds connections from several processes, and reports what it cannot do.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Output, Stdio};
use std::thread;

fn idle(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringserve-bench"));
    command.args(["idle", "--seconds", "1", "--bytes", "1000"]).args(arguments).output().unwrap()
}

#[test]
fn connections_of_several_processes_are_held_by_several_shards() {
    let output = idle(&[
        "--connections",
        "1500",
        "--per-process",
        "400",
        "--shards",
        "2",
        "--servers",
        "ringserve,tokio",
    ]);
    let (said, table) = (String::from_utf8_lossy(&output.stderr), String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{said}");
    let rows: Vec<Vec<_>> = table.lines().skip(1).map(|row| row.split_whitespace().collect()).collect();
    let shards: Vec<_> = rows.iter().map(|row| &row[..3]).collect();
    assert_eq!(shards, [["ringserve", "2", "1500"], ["tokio", "1", "1500"]], "{table}");
    for row in &rows {
        let [user, kernel, seconds, rate, idle_cpu] = row[3..] else { panic!("{table}") };
        for number in [user, kernel, seconds, rate, idle_cpu] {
            assert!(number.parse::<f64>().unwrap() >= 0.0, "{table}");
        }
        assert!(rate.parse::<f64>().unwrap() > 0.0, "{table}");
        let answered = format!("{}: all 1500 connections answered again", row[0]);
        assert!(said.contains(&answered), "{said}");
    }
    // tokio keeps a buffer for each: no growth is seen if the wrong process was measured.
    assert!(rows[1][3].parse::<f64>().unwrap() > 0.0, "{table}");
}

#[test]
fn count_that_cannot_be_held_is_refused_with_advice() {
    for (arguments, expected) in [
        (
            "--connections 6000 --servers tokio",
            "tokio holds no more than the limit of open files allows, which is 5000",
        ),
        ("--connections 6000 --servers ringserve --shards 1", "add --shards"),
        ("--connections 2000 --servers ringserve --shards 100", "counting starts at 5000"),
        ("--connections 2000 --per-process 5000", "the hard limit of open files is 5000"),
    ] {
        let command = format!("ulimit -n 5000 && exec \"$0\" idle {arguments}");
        let output =
            Command::new("sh").args(["-c", &command, env!("CARGO_BIN_EXE_ringserve-bench")]).output();
        let output = output.unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(expected), "{arguments}: {said}");
    }
}

/// Output of a process that holds connections to a server which does `serve` on each.
fn held_by(layer: &[&str], serve: impl Fn(&mut TcpStream) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let serving = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        serve(&mut stream);
    });
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringserve-bench"));
    command.args(["hold", "--server", &address, "--first-source", "127.9.0.1", "--connections-each", "10"]);
    command.args(["--bytes", "10", "--first", "70"]).args(layer).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut holder = command.spawn().unwrap();
    holder.stdin.take().unwrap().write_all(b"hold 1\ncheck\n").unwrap();
    let output = holder.wait_with_output().unwrap();
    serving.join().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

fn echo_a_line(stream: &mut TcpStream) {
    let mut line = [0; 10];
    stream.read_exact(&mut line).unwrap();
    stream.write_all(&line).unwrap();
}

#[test]
fn a_connection_that_ends_or_answers_wrongly_is_named() {
    let said = held_by(&[], |stream| (0..2).for_each(|_| echo_a_line(stream)));
    assert_eq!(said, "0\n1\n1\n");
    // Closed after its first line, and a wrong answer to the second one.
    let said = held_by(&[], echo_a_line);
    assert!(said.starts_with("0\n1\nfailed connection 70, 127.9.0.1:"), "{said}");
    let said = held_by(&[], |stream| {
        echo_a_line(stream);
        stream.write_all(b"something\n").unwrap();
        stream.read_exact(&mut [0; 10]).unwrap();
    });
    assert!(said.contains("failed connection 70, 127.9.0.1:") && said.contains("sent was"), "{said}");
}

#[test]
fn connection_of_websocket_is_held_and_its_frames_compared() {
    // The head of a frame as it is sent, followed by the mask and ten bytes, and as it has to
    // return.
    const SENT: [u8; 2] = [0x82, 0x80 | 10];
    const WHOLE: [u8; 2] = [0x82, 10];
    let held = |head: [u8; 2]| {
        held_by(&["--websocket"], move |stream| {
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                request.push(byte[0]);
            }
            let answer = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
                Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";
            stream.write_all(answer.as_bytes()).unwrap();
            for head in [WHOLE, head] {
                let mut frame = [0; 16];
                stream.read_exact(&mut frame).unwrap();
                assert_eq!(frame[..2], SENT);
                let unmasked: Vec<u8> = (6..16).map(|at| frame[at] ^ frame[2 + (at - 6) % 4]).collect();
                assert!(unmasked.starts_with(b"07") && unmasked.ends_with(b"\n"), "{unmasked:?}");
                stream.write_all(&[&head[..], &unmasked].concat()).unwrap();
            }
        })
    };
    assert_eq!(held(WHOLE), "0\n1\n1\n");
    // A fragment of a message, and text.
    for head in [[0x02, 10], [0x81, 10]] {
        let said = held(head);
        assert!(said.contains("failed connection 70, 127.9.0.1:") && said.contains("byte 0"), "{said}");
    }
}
