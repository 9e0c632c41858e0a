//! Everything the fuzzer once found interesting, and everything it once broke, on any toolchain.

use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

/// A file takes milliseconds. One that takes this long never ends.
const FILE_TAKES_MAX: Duration = Duration::from_secs(60);

/// Runs every file of a target's corpus, and names those that fail.
fn replay(target: &str, run: fn(&[u8])) {
    let files = corpus(target);
    let (done, results) = channel();
    let to_run = files.clone();
    thread::spawn(move || {
        for path in to_run {
            let bytes = fs::read(&path).unwrap();
            let passed = catch_unwind(|| run(&bytes)).is_ok();
            if !passed {
                // Below what the panic said.
                println!("... in {}", path.display());
            }
            if done.send(passed).is_err() {
                return;
            }
        }
    });
    let mut failed = Vec::new();
    for path in &files {
        match results.recv_timeout(FILE_TAKES_MAX) {
            Ok(true) => {}
            Ok(false) => failed.push(path.display().to_string()),
            Err(error) => panic!("{}: {error}", path.display()),
        }
    }
    assert!(failed.is_empty(), "{} of {} files fail:\n{}", failed.len(), files.len(), failed.join("\n"));
}

/// The files of a target's corpus; there must be some.
fn corpus(target: &str) -> Vec<PathBuf> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    let entries = fs::read_dir(&corpus).unwrap_or_else(|error| panic!("{}: {error}", corpus.display()));
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", corpus.display());
    files
}

/// Draws numbers below another one. A separate generator, so that the replay needs no crate.
fn drawing(mut state: u64) -> impl FnMut(u64) -> u64 {
    move |below| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    }
}

/// Runs a target on streams of these parts, with a head that has options, cuts, and where they cut.
fn draw_streams(seed: u64, parts: &[&[u8]], run: fn(&[u8])) {
    let mut draw = drawing(seed);
    for _ in 0..10_000 {
        let mut bytes: Vec<u8> = vec![draw(8) as u8, draw(6) as u8];
        for _ in 0..bytes[1] * 2 {
            bytes.push(draw(256) as u8);
        }
        for _ in 0..draw(30) {
            bytes.extend_from_slice(parts[draw(parts.len() as u64) as usize]);
        }
        run(&bytes);
    }
}

#[test]
fn dot_stuffed_of_drawn_streams() {
    let parts: [&[u8]; 12] = [
        b"DATA\r\n",
        b"D\n",
        b"RSET\r\n",
        b".\r\n",
        b"\r\n",
        b"\n",
        b"\r",
        b".",
        b"..",
        b"a",
        b"a long line",
        b"\r\n.",
    ];
    draw_streams(3, &parts, ringserve_fuzz::dot_stuffed::run);
}

#[test]
fn resp_of_drawn_streams() {
    let parts: [&[u8]; 24] = [
        b"*1\r\n$4\r\nPING\r\n",
        b"*2\r\n$3\r\na*b\r\n$4\r\naxxb\r\n",
        b"*0\r\n",
        b"*-1\r\n",
        b"*2\r\n",
        b"*12",
        b"*01\r\n",
        b"$5\r\n[a-c]\r\n",
        b"$1\r\nb\r\n",
        b"$0\r\n\r\n",
        b"$-1\r\n",
        b"$900\r\n",
        b"GET a\r\n",
        b"h?[^e]*\\* hallo\n",
        b"\"\\x41\\n\" 'it\\'s' x\"y z\"\r\n",
        b"\"",
        b"'",
        b"\\",
        b" ",
        b"\t",
        b"\r\n",
        b"\n",
        b"7 -12 +1\n",
        b"x",
    ];
    draw_streams(5, &parts, ringserve_fuzz::resp::run);
}

#[test]
fn framing_corpus() {
    replay("framing", ringserve_fuzz::framing::run);
}

#[test]
fn shard_corpus() {
    replay("shard", ringserve_fuzz::shard::run);
}

#[test]
fn proxy_corpus() {
    replay("proxy", ringserve_fuzz::proxy::run);
}

#[test]
fn dot_stuffed_corpus() {
    replay("dot_stuffed", ringserve_fuzz::dot_stuffed::run);
}

#[test]
fn resp_corpus() {
    replay("resp", ringserve_fuzz::resp::run);
}

#[test]
fn switching_corpus() {
    replay("switching", ringserve_fuzz::switching::run);
}

#[test]
fn switching_of_drawn_streams() {
    let mut draw = drawing(1);
    for _ in 0..20_000 {
        let mut bytes: Vec<u8> = vec![draw(5) as u8, draw(16) as u8, draw(6) as u8];
        for _ in 0..bytes[2] * 2 {
            bytes.push(draw(256) as u8);
        }
        for _ in 0..draw(60) {
            bytes.extend_from_slice(
                [
                    &b"a\n"[..],
                    b"n\n",
                    b"l\n",
                    b"\0\x01l",
                    b"\0\0",
                    b"u\0\x09\n",
                    b"\0\x03u\0\x04",
                    b"xyz",
                    b"\n",
                    b"n",
                ][draw(10) as usize],
            );
        }
        ringserve_fuzz::switching::run(&bytes);
    }
}

#[test]
fn tls_bytes_corpus() {
    replay("tls_bytes", ringserve_fuzz::tls_bytes::run);
}

#[test]
fn websocket_bytes_corpus() {
    replay("websocket_bytes", ringserve_fuzz::websocket_bytes::run);
}

#[test]
fn websocket_bytes_of_drawn_streams() {
    let mut draw = drawing(7);
    for _ in 0..20_000 {
        let mut bytes: Vec<u8> = vec![2 + draw(2) as u8, draw(24) as u8];
        for _ in 0..draw(12) {
            // The first byte of a frame that may be one, its length, a mask, and about as many
            // bytes.
            let first = [0x81, 0x82, 0x01, 0x02, 0x00, 0x80, 0x89, 0x8a, 0x88, 0xc1, 0x83][draw(11) as usize];
            let len = [0, 1, 2, 5, 20, 125][draw(6) as usize];
            bytes.extend([first, 0x80 | len as u8, 0, 0, 0, draw(3) as u8]);
            bytes.extend((0..len).map(|at| [b'a', 0xc3, 0xbc, 0x03, 0xe8][(draw(5) * (at % 2)) as usize]));
            if draw(20) == 0 {
                bytes.truncate(bytes.len() - 1);
            }
        }
        ringserve_fuzz::websocket_bytes::run(&bytes);
    }
}
