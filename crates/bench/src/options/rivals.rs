//! The rivals: servers on other libraries, in a separate workspace.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::refused;
use crate::load::Target;
use crate::wire::Layer;

/// The script that builds them.
const SCRIPT: &str = "scripts/rivals";

/// Its programs that echo bytes and lines.
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

/// The rivals that echo below TLS.
const TLS_RIVALS: [&str; 1] = ["go-net"];

/// The rivals that echo WebSocket messages.
const WEBSOCKET_RIVALS: [&str; 4] =
    ["fastwebsockets", "fastwebsockets-batched", "tungstenite", "tungstenite-batched"];

/// Builds all rivals that can be built here.
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

/// The rivals that echo bytes and lines and are built, by name. Prints the missing ones.
pub(super) fn built(place: &Path) -> impl Iterator<Item = (String, PathBuf)> {
    there(place, &RIVALS).into_iter()
}

/// The rivals that speak the layer and are built. Prints the missing ones.
pub(super) fn targets(place: &Path, layer: Layer, lines: bool) -> Vec<Target> {
    let (names, mode): (&[&str], _) = match layer {
        Layer::Plain if lines => (&RIVALS, "lines"),
        Layer::Plain | Layer::Exchange(_) => (&RIVALS, "raw"),
        Layer::Tls(_) => (&TLS_RIVALS, "tls"),
        Layer::WebSocket => (&WEBSOCKET_RIVALS, "websocket"),
    };
    // One form of ringline frames no lines, and one of tokio echoes bytes like the other.
    let left_out = if lines { "ringline-direct" } else { "tokio-batched" };
    let names: Vec<&str> = names.iter().copied().filter(|name| *name != left_out).collect();
    let program = |(name, path)| Target::Program { name, path, mode };
    there(place, &names).into_iter().map(program).collect()
}

fn there(place: &Path, names: &[&str]) -> Vec<(String, PathBuf)> {
    let all = names.iter().map(|name| ((*name).to_owned(), place.join(name)));
    let (there, missing): (Vec<_>, Vec<_>) = all.partition(|(_, path)| path.is_file());
    if !missing.is_empty() {
        let names: Vec<String> = missing.into_iter().map(|(name, _)| name).collect();
        eprintln!(
            "left out, since they are not in {}: {}; {SCRIPT} builds them",
            place.display(),
            names.join(", ")
        );
    }
    there
}
