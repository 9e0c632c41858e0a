//! The examples, talked to by the clients in `tests/clients`.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds an example like this test, and returns where it is.
fn build(name: &str) -> PathBuf {
    // This test is `<profile>/deps/examples-<hash>`.
    let own = std::env::current_exe().unwrap();
    let profile =
        own.parent().and_then(Path::parent).expect("a test is two levels below its target directory");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--example", name]).current_dir(env!("CARGO_MANIFEST_DIR"));
    if profile.ends_with("release") {
        cargo.arg("--release");
    }
    cargo.arg("--target-dir").arg(profile.parent().expect("the target directory"));
    assert!(cargo.status().expect("cargo is there").success(), "{name} is not built");
    profile.join("examples").join(name)
}

fn talk_to(name: &str) {
    let client = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients").join(name);
    let output = Command::new(client).env("BINARY", build(name)).output().expect("bash is there");
    let (said, why) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}{why}");
}

#[test]
fn line_chat_reaches_everybody_in_a_room_whatever_their_shard() {
    talk_to("line_chat");
}

#[test]
fn graceful_shutdown_cuts_nobody_off() {
    talk_to("graceful_shutdown");
}
