//! Plants bugs, one at a time, in a copy of the tree, and checks that each of them is found.
//!
//!     cargo run -p ringserve-bugs -- close/ send/rest-of-a-send-dropped
//!
//! `tests/bugs/README.md` has the format of a bug.

mod bug;
mod items;
mod plant;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use bug::Bug;
use clap::Parser;

/// Plants bugs, one at a time, in a copy of the tree, and looks whether its check finds it. Ends
/// with 1 if one is not found.
#[derive(Parser)]
struct Args {
    /// Parts of names (folder/name); without one all bugs are planted, which takes hours.
    names: Vec<String>,
    /// Builds and runs nothing: lists what would be planted, with its check.
    #[arg(long)]
    list: bool,
    /// Bugs marked `fast` alone, by the simulator alone.
    #[arg(long)]
    fast: bool,
    /// Seeds of the simulator for each bug; at most 5000 for whole servers.
    #[arg(long, default_value_t = 20_000, value_name = "N")]
    seeds: u32,
}

/// The root of the workspace.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("tests/bugs lies in the workspace")
}

/// All bugs, by their names.
fn bugs() -> Vec<Bug> {
    let mut files: Vec<PathBuf> = Vec::new();
    let folder = root().join("tests/bugs");
    let entries = |folder: &Path| std::fs::read_dir(folder).expect("a folder of bugs can be read").flatten();
    for subject in entries(&folder).map(|entry| entry.path()).filter(|path| path.is_dir()) {
        files.extend(entries(&subject).map(|entry| entry.path()));
    }
    files.retain(|file| file.extension().is_some_and(|extension| extension == "bug"));
    files.sort();
    files.iter().map(|file| Bug::read(file)).collect()
}

fn main() -> ExitCode {
    let args = Args::parse();
    let is_wanted = |bug: &Bug| {
        let is_named = args.names.is_empty() || args.names.iter().any(|name| bug.name.contains(name));
        is_named && (!args.fast || bug.is_fast)
    };
    let bugs: Vec<Bug> = bugs().into_iter().filter(is_wanted).collect();
    if bugs.is_empty() {
        eprintln!("no bug is named so; --list without a name shows all");
        return ExitCode::FAILURE;
    }
    if args.list {
        bugs.iter().for_each(|bug| println!("{}: {} [{}]", bug.name, bug.breaks, bug.check));
        return ExitCode::SUCCESS;
    }
    match plant::run(&bugs, args.seeds, args.fast) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::items::Sources;

    #[test]
    fn each_bug_fits_the_code() {
        let sources = Sources::new(root());
        let misfits: Vec<String> = bugs().iter().filter_map(|bug| bug.planted(&sources).err()).collect();
        assert!(misfits.is_empty(), "renew these in tests/bugs, or remove them:\n{}", misfits.join("\n"));
    }

    #[test]
    fn no_two_bugs_are_the_same() {
        let bugs = bugs();
        let mut all: Vec<_> = bugs.iter().map(|bug| (&bug.edits, &bug.name)).collect();
        all.sort();
        for pair in all.windows(2) {
            assert!(pair[0].0 != pair[1].0, "{} is {}", pair[0].1, pair[1].1);
        }
    }
}
