//! Everything the fuzzer once found interesting, and everything it once broke, on any toolchain.

use std::fs;
use std::path::Path;

/// Runs every file of a target's corpus.
fn replay(target: &str, run: fn(&[u8])) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    let mut files: Vec<_> = fs::read_dir(&corpus).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", corpus.display());
    for path in files {
        // Shown only if the test fails, which then is the last one.
        println!("{}", path.display());
        run(&fs::read(&path).unwrap());
    }
}

#[test]
fn framing_corpus() {
    replay("framing", ringserve_fuzz::framing::run);
}

#[test]
fn shard_corpus() {
    replay("shard", ringserve_fuzz::shard::run);
}
