//! The examples, as programs.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds an example like this test, and returns where it is.
pub fn build(name: &str) -> PathBuf {
    // This test is `<target directory>/[<triple>/]<profile>/deps/<name>-<hash>`.
    let own = std::env::current_exe().unwrap();
    let profile = own.ancestors().nth(2).expect("a test is two levels below its target directory");
    let mut target = profile.parent().expect("the target directory");
    if let Ok(triple) = std::env::var("CARGO_BUILD_TARGET")
        && target.ends_with(triple)
    {
        target = target.parent().expect("the target directory");
    }
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--example", name]).current_dir(env!("CARGO_MANIFEST_DIR"));
    if profile.ends_with("release") {
        cargo.arg("--release");
    }
    cargo.arg("--target-dir").arg(target);
    assert!(cargo.status().expect("cargo is there").success(), "{name} is not built");
    profile.join("examples").join(name)
}

/// The script that talks to an example.
pub fn client(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients").join(name)
}
