//! Comments are 100 columns wide, as the pages that people read next to code.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use super::pages::COLUMNS;
use super::words::collect;
use super::workspace;

/// Files with wider comments, below the root of the workspace. They may only become fewer.
const WIDE: [&str; 0] = [];

/// A line for each line of a comment that is too wide and could be broken. Comments behind code
/// belong to its line. Tables, code, diagrams and the addresses of links are as wide as they have
/// to be.
fn wide(file: &Path, text: &str) -> String {
    let mut lines = String::new();
    let mut is_code = false;
    for (n, line) in (1..).zip(text.lines()) {
        let Some(comment) = text_of(line) else {
            is_code = false;
            continue;
        };
        is_code ^= comment.trim_start().starts_with("```");
        // Four blanks after the one that follows the slashes begin code.
        let is_text =
            !is_code && !comment.starts_with("     ") && !comment.trim_start().starts_with(['|', '#']);
        if is_text && line.chars().count() > COLUMNS && comment.trim().contains(' ') && !is_link(comment) {
            let _ = writeln!(lines, "  {}:{n}", file.display());
        }
    }
    lines
}

/// The text of a line that is a comment, behind its slashes.
fn text_of(line: &str) -> Option<&str> {
    let behind = line.trim_start().strip_prefix("//")?;
    Some(behind.strip_prefix(['/', '!']).unwrap_or(behind))
}

/// True for the definition of a link, `[name]: address`.
fn is_link(comment: &str) -> bool {
    let definition = comment.trim().strip_prefix('[').and_then(|rest| rest.split_once("]: "));
    definition.is_some_and(|(_, address)| !address.contains(' '))
}

#[test]
fn comments_are_100_columns_wide() {
    let root = workspace();
    let mut files: Vec<PathBuf> = Vec::new();
    collect(root, &mut files);
    files.retain(|file| file.extension().is_some_and(|extension| extension == "rs"));
    assert!(files.len() > 300, "the sources are there");
    let (mut found, mut wrapped) = (String::new(), Vec::from(WIDE));
    for file in files.iter().map(|file| file.strip_prefix(root).expect("it is below")) {
        let lines = wide(file, &fs::read_to_string(root.join(file)).expect("text"));
        match wrapped.iter().position(|known| file == Path::new(known)) {
            None => found.push_str(&lines),
            Some(_) if lines.is_empty() => {}
            Some(place) => {
                wrapped.remove(place);
            }
        }
    }
    assert!(found.is_empty(), "comments with more than {COLUMNS} columns:\n{found}");
    assert!(wrapped.is_empty(), "these are {COLUMNS} columns wide now, take them from the list: {wrapped:?}");
}

#[test]
fn planted_wide_comments_are_found() {
    let (word, text) = ("x".repeat(120), "x ".repeat(60));
    let source = format!(
        "## {text}\n    ##/ {text}\n##! {word}\n##! | {text} |\n##! [a]: {word}\n##/     {text}\n\
         ##/ ```\n##/ {text}\n##/ ```\n##/ * {text}\nlet a = \"{text}\"; ## {text}\n##/ ```text\nfn a() {{}}\n## {text}\n"
    );
    let found = wide(Path::new("a.rs"), &source.replace("##", "//"));
    assert_eq!(found, "  a.rs:1\n  a.rs:2\n  a.rs:10\n  a.rs:14\n");
}
