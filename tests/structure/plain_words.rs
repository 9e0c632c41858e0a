//! Words of comments that have a plainer term, and doc lines that begin neither with a noun phrase
//! nor with a verb. `plain_words.txt` has a row for each file with such lines, and their number,
//! which may only shrink.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use super::words::{collect, has_word};
use super::workspace;

/// Words that no comment needs, each with its replacement.
const WORDS: &[(&str, &str)] = &[
    ("told", "reported, informed or ordered"),
    ("hears", "receives"),
    ("seldom", "rarely"),
    ("mostly", "usually, in most cases"),
    ("any more", "no longer"),
    ("newcomers", "new connections"),
];

/// Words with which no paragraph of documentation begins.
const BEGINNINGS: &[&str] = &["What", "That", "Where", "How", "Has the"];

/// The list of files with such lines, below the root of the workspace.
const LIST: &str = "tests/structure/plain_words.txt";

const ADVICE: &str = "Write these lines in plain words. If a file has fewer such lines than its row says, or was moved, run\n  \
     RINGSERVE_WRITE=1 cargo test -p ringserve-tests --test structure plain_words";

/// For each file, a text for each line that is not plain.
type Found = BTreeMap<String, Vec<String>>;

/// For each file, how many such lines it may have.
type Rows = BTreeMap<String, usize>;

/// The lines of a text that are not plain: the number of each, and the reason.
fn unplain(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut before = "";
    for (number, line) in (1..).zip(text.lines()) {
        let beginning = beginning(before, line.trim_start());
        let word = comment(line).and_then(|text| WORDS.iter().find(|(word, _)| has_word(text, word)));
        if let Some(beginning) = beginning {
            found.push((number, format!("{beginning} ..: begin with a noun phrase or a verb")));
        } else if let Some((word, instead)) = word {
            found.push((number, format!("{word}: {instead}")));
        }
        before = line.trim_start();
    }
    found
}

/// The comment of a line, with its slashes. Slashes within a word, as in an address, begin none.
fn comment(line: &str) -> Option<&str> {
    let begins = |at: &usize| line[..*at].chars().next_back().is_none_or(char::is_whitespace);
    line.match_indices("//").map(|(at, _)| at).find(begins).map(|at| &line[at..])
}

/// The refused words with which a line begins a paragraph of documentation.
fn beginning(before: &str, line: &str) -> Option<&'static str> {
    let text = ["/// ", "//! "].iter().find_map(|slashes| line.strip_prefix(slashes))?;
    let continues = before.strip_prefix(&line[..4]).is_some_and(|before| {
        !before.trim().is_empty() && !before.starts_with("# ") && !before.starts_with("```")
    });
    let begins = |words: &&&str| {
        text.strip_prefix(**words).is_some_and(|rest| !rest.starts_with(char::is_alphanumeric))
    };
    (!continues).then(|| BEGINNINGS.iter().find(begins).copied()).flatten()
}

/// The lines of all sources that are not plain.
fn all_found(root: &Path) -> Found {
    let mut files: Vec<PathBuf> = Vec::new();
    collect(root, &mut files);
    let sources = files.iter().filter(|file| file.extension().is_some_and(|extension| extension == "rs"));
    let of_file = |file: &PathBuf| {
        let path = file.strip_prefix(root).expect("it is below").display().to_string();
        let lines = unplain(&fs::read_to_string(file).expect("a source is text"));
        let lines = lines.into_iter().map(|(number, why)| format!("  {path}:{number}: {why}"));
        (path.clone(), lines.collect::<Vec<_>>())
    };
    sources.map(of_file).filter(|(_, lines)| !lines.is_empty()).collect()
}

/// Parses rows of a path and a count.
fn rows(text: &str) -> Rows {
    let row = |line: &str| {
        let (path, count) = line.rsplit_once(' ').expect("a path and a count");
        (path.to_owned(), count.parse().expect("a count"))
    };
    text.lines().map(row).collect()
}

/// A text for each file whose lines are more or fewer than its row says.
fn differences(rows: &Rows, found: &Found) -> String {
    let mut differences = String::new();
    for path in rows.keys().chain(found.keys()).collect::<BTreeSet<_>>() {
        let known = rows.get(path).copied().unwrap_or(0);
        let lines = found.get(path).map_or(&[][..], Vec::as_slice);
        if lines.len() > known {
            let _ =
                writeln!(differences, "{path}: {} lines, {known} may be:\n{}", lines.len(), lines.join("\n"));
        } else if lines.len() < known {
            let _ = writeln!(differences, "{path}: {} lines, its row says {known}", lines.len());
        }
    }
    differences
}

#[test]
fn comments_use_plain_words() {
    let root = workspace();
    let found = all_found(root);
    let list = root.join(LIST);
    let known = fs::read_to_string(&list).map(|text| rows(&text));
    if std::env::var_os("RINGSERVE_WRITE").is_some() {
        let total: usize = found.values().map(Vec::len).sum();
        let allowed = known.as_ref().map_or(usize::MAX, |rows| rows.values().sum());
        let known = known.unwrap_or_default();
        assert!(total <= allowed, "{total} lines, {allowed} may be:\n{}", differences(&known, &found));
        let text: String = found.iter().map(|(path, lines)| format!("{path} {}\n", lines.len())).collect();
        fs::write(&list, text).expect("the list can be written");
        return;
    }
    let differences = differences(&known.expect("the list can be read"), &found);
    assert!(differences.is_empty(), "comments that a reader has to read twice:\n{differences}\n{ADVICE}");
}

#[test]
fn planted_comments_are_found_and_counted() {
    let text = "##/ What it is.\n##/ How a paragraph goes on.\n##/\n##/ How another one begins.\n\
                let a = 1; ## It is told.\nlet b = \"http:##told\";\n##/ # Errors\n##/ That of the system.\n\
                ## Where it may begin so.\n##/ Whatever it is.\n";
    let found = unplain(&text.replace("##", "//"));
    assert_eq!(found.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [1, 4, 5, 8], "{found:?}");

    let found = |count| Found::from([("a.rs".to_owned(), vec!["  a.rs:1: told".to_owned(); count])]);
    assert_eq!(differences(&rows("a.rs 2\n"), &found(2)), "");
    assert_eq!(differences(&rows(""), &found(1)), "a.rs: 1 lines, 0 may be:\n  a.rs:1: told\n");
    assert_eq!(differences(&rows("a.rs 3\n"), &found(2)), "a.rs: 2 lines, its row says 3\n");
    assert_eq!(differences(&rows("b.rs 1\n"), &Found::new()), "b.rs: 0 lines, its row says 1\n");
}
