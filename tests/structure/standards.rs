//! The tables that hold programs to their standards: each statement is kept, refused or left out,
//! and names a test that exists.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use crate::collect;
use crate::tree::Sources;

/// Beside the tests of what they are about.
const TABLES: &[&str] = &[
    "crates/core/src/proxy/STANDARD.md",
    "examples/kv/STANDARD.md",
    "examples/mqtt/STANDARD.md",
    "examples/smtp/STANDARD.md",
    "tests/http/STANDARD.md",
];

/// The names of all functions after `#[test]`, `proptest!` ones too.
fn tests_in(sources: &Sources) -> BTreeSet<&str> {
    let texts = sources.values().flat_map(|text| text.split("#[test]").skip(1));
    let names = texts.filter_map(|rest| rest.split_once("fn ")?.1.split_once('('));
    names.map(|(name, _)| name).collect()
}

/// A line for each row that does not say what it has to.
fn wrong(table: &str, tests: &BTreeSet<&str>) -> String {
    let mut lines = String::new();
    let rows = table.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| section |"));
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let names = cells.last().into_iter().flat_map(|cell| cell.split('`').skip(1).step_by(2));
        let unknown: Vec<&str> = names.clone().filter(|name| !tests.contains(name)).collect();
        let is_sound = match cells[..] {
            [_, _, "left out", why] => !why.is_empty(),
            [_, _, verdict, _] => {
                let is_known = verdict == "kept" || verdict.starts_with("refused, ");
                is_known && names.count() > 0 && unknown.is_empty()
            }
            _ => false,
        };
        if !is_sound {
            let _ = writeln!(lines, "  {row} {unknown:?}");
        }
    }
    lines
}

#[test]
fn each_row_of_a_standard_has_a_test_or_a_reason() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this package is in the workspace");
    let mut sources = Sources::new();
    ["crates", "examples", "tests"].iter().for_each(|folder| collect(&root.join(folder), &mut sources));
    let tests = tests_in(&sources);
    assert!(tests.len() > 1000, "the tests are found");
    for table in TABLES {
        let text = fs::read_to_string(root.join(table)).expect("a table is there");
        assert!(text.lines().count() > 20, "{table} has rows");
        let found = wrong(&text, &tests);
        assert!(found.is_empty(), "{table}: rows without a verdict, a test or a reason:\n{found}");
    }
}

#[test]
fn planted_rows_are_found() {
    let sources = Sources::from([("a.rs".into(), "#[test]\nfn it_is() {}\nfn helper() {}".to_owned())]);
    let good = "| section | a |\n|---|\n| 1 | a | kept | `it_is` |\n| 2 | b | refused, 5 | `it_is` |\n| 3 | c | left out | d |\n";
    assert_eq!(wrong(good, &tests_in(&sources)), "");
    for row in [
        "| 1 | a | kept | |",
        "| 1 | a | kept | `helper` |",
        "| 1 | a | perhaps | `it_is` |",
        "| 1 | a | kept |",
    ] {
        assert!(!wrong(row, &tests_in(&sources)).is_empty(), "{row}");
    }
}
