//! Lines of the log: a subscriber may panic, so each line of a server is written by a macro that
//! catches it.

use std::path::Path;

use crate::collect;
use crate::tree::Sources;

/// Files that write lines otherwise, with the reason.
const OTHERWISE: &[(&str, &str)] = &[
    ("access_log.rs", "guards its one line"),
    ("log.rs", "guards each of its lines"),
    ("log_thread.rs", "runs lines within a guard"),
    ("service_lane.rs", "tells of a panic of the error that it writes"),
    ("traces.rs", "guards what it does with spans"),
];

const LEVELS: [&str; 5] = ["error", "warn", "info", "debug", "trace"];

/// The import of a macro that is not guarded, if there is one.
fn unguarded(text: &str) -> Option<&str> {
    text.lines().find(|line| {
        let imported = line.strip_prefix("use tracing::").unwrap_or_default();
        let mut names = imported.split(|c: char| !c.is_alphanumeric() && c != '_');
        names.any(|name| LEVELS.contains(&name))
    })
}

#[test]
fn lines_of_the_server_are_guarded() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("crates");
    let mut sources = Sources::new();
    for name in ["admission", "base", "server"] {
        collect(&crates.join(name).join("src"), &mut sources);
    }
    let src = crates.join("server/src");
    // The log's own subscriber does not panic.
    sources.retain(|file, _| !file.starts_with(src.join("subscriber")));
    sources.retain(|file, _| !OTHERWISE.iter().any(|(name, _)| file.ends_with(name)));
    let found: Vec<_> = sources.iter().filter_map(|(file, text)| Some((file, unguarded(text)?))).collect();
    assert!(
        found.is_empty(),
        "lines by macros of ringserve_base::lines, so that a dead stdout ends nothing: {found:#?}"
    );
}

#[test]
fn planted_line_without_a_guard_is_found() {
    assert!(unguarded("use std::fmt;\nuse tracing::{Level, info, info_span};\n").is_some());
    assert!(unguarded("use tracing::warn;").is_some());
    assert_eq!(unguarded("use ringserve_base::lines::warn;\nuse tracing::{Level, enabled};"), None);
}
