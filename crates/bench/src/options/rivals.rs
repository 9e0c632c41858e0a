//! The rivals: servers on other libraries, in a separate workspace.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::refused;

/// What builds them.
const SCRIPT: &str = "scripts/rivals";

/// What it builds.
const RIVALS: [&str; 14] = [
    "compio",
    "compio-managed",
    "glommio",
    "gnet",
    "go-net",
    "monoio",
    "ntex",
    "ntex-uring",
    "ringline",
    "ringline-direct",
    "tokio",
    "tokio-batched",
    "tokio-multi",
    "tokio-uring",
];

/// Builds all that can be built here.
pub(super) fn build(to: &Path) -> io::Result<()> {
    let status = Command::new(SCRIPT).arg("--out").arg(to).status().map_err(|error| {
        refused(format!(
            "--build: {SCRIPT} cannot be run ({error}); start this from the root of the repository"
        ))
    })?;
    if !status.success() {
        return Err(io::Error::other(format!("{SCRIPT} failed; without --build what is there is compared")));
    }
    Ok(())
}

/// Those that are there, by name. Says which are not.
pub(super) fn built(place: &Path) -> impl Iterator<Item = (String, PathBuf)> {
    let all = RIVALS.map(|name| (name.to_owned(), place.join(name))).into_iter();
    let (there, missing): (Vec<_>, Vec<_>) = all.partition(|(_, path)| path.is_file());
    if !missing.is_empty() {
        let names: Vec<String> = missing.into_iter().map(|(name, _)| name).collect();
        eprintln!(
            "left out, since they are not in {}: {}; {SCRIPT} builds them",
            place.display(),
            names.join(", ")
        );
    }
    there.into_iter()
}
