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
fn switching_corpus() {
    replay("switching", ringserve_fuzz::switching::run);
}

#[test]
fn switching_of_drawn_streams() {
    // A generator of its own, so that the replay needs no crate.
    let mut state = 1u64;
    let mut draw = move |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
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
    // As above.
    let mut state = 7u64;
    let mut draw = move |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for _ in 0..20_000 {
        let mut bytes: Vec<u8> = vec![2 + draw(2) as u8, draw(24) as u8];
        for _ in 0..draw(12) {
            // The first byte of a frame that may be one, its length, a mask, and about as many bytes.
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
