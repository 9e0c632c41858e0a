//! Words that pages, comments and names do without: each had a plainer or more exact one.

use std::fmt::Write;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Phrases that no text has, with the reason or what to write instead.
const PHRASES: &[(&str, &str)] = &[
    ("nobody", "name the subject: the peer, the client, the service"),
    ("whoever", "name the subject"),
    ("whomever", "name the subject"),
    ("somebody", "name the subject"),
    ("someone", "name the subject"),
    ("anybody", "name the subject"),
    ("anyone", "name the subject"),
    ("everybody", "name the subjects"),
    ("everyone", "name the subjects"),
    ("no one", "name the subject: no peer, no shard"),
    ("anew", "again"),
    ("besides", "also, too; beside is a place"),
    ("so many", "name the parameter, in backticks"),
    ("so long", "name the parameter, in backticks"),
    ("inside of", "inside"),
    ("of its own", "its own, or separate"),
    ("of their own", "their own, or separate"),
    ("of one's own", "your own"),
    ("work off", "dispatch"),
    ("seam", "kernel interface"),
];

/// Names that were replaced, with their successors.
const NAMES: &[(&str, &str)] = &[
    ("Actor", "ClosedBy"),
    ("AHEAD", "HAND_OFF_LEAD"),
    ("BufferCounts", "BufferStats"),
    ("CallCounts", "CallStats"),
    ("DeadlineElapsed", "Elapsed"),
    ("DrainBegins", "Draining"),
    ("Elsewhere", "OtherShard, Peers"),
    ("Host", "Runtime: a host is a machine"),
    ("ListenAddr", "Address"),
    ("OptionError", "SocketOptionError"),
    ("OptionWarning", "SocketOptionWarning"),
    ("Stopper", "ShutdownHandle, ServerControl"),
    ("drain_begins", "draining"),
    ("given_away", "handed_off"),
    ("meet_others", "Peers"),
    ("obey", "apply_orders"),
    ("pass_on", "hand_off"),
    ("room_made", "slot_freed"),
    ("serve_http", "serve, of http(..)"),
    ("serve_stream", "serve, of stream(..)"),
    ("serve_waiting", "retry_accepts"),
    ("start_http", "start, of http(..)"),
    ("start_stream", "start, of stream(..)"),
    ("wishes", "close_requested"),
    ("work_off", "dispatch"),
];

/// Characters of a function's name: those of tests are sentences.
const NAME_CHARS_MAX: usize = 60;

/// Endings of the names of texts. Scripts are texts too.
const ENDINGS: &[&str] = &[
    ".rs", ".md", ".toml", ".yaml", ".patch", ".service", ".socket", ".sh", ".py", ".go", ".mjs", ".html",
    ".java",
];

/// A line for each place of a text where a refused word is.
fn refused(file: &Path, text: &str) -> String {
    let mut found = String::new();
    let is_source = file.extension().is_some_and(|extension| extension == "rs");
    // Most texts have none of them, and are searched once for each.
    let in_text = text.to_ascii_lowercase();
    let phrases: Vec<_> = PHRASES.iter().filter(|(phrase, _)| has_word(&in_text, phrase)).collect();
    let names: Vec<_> = NAMES.iter().filter(|(name, _)| is_source && has_word(text, name)).collect();
    for (number, line) in (1..).zip(text.lines()) {
        let mut complain = |word: &str, instead: &str| {
            let _ = writeln!(found, "  {}:{number}: {word}: {instead}", file.display());
        };
        let lower = line.to_ascii_lowercase();
        for (phrase, instead) in phrases.iter().filter(|(phrase, _)| has_word(&lower, phrase)) {
            complain(phrase, instead);
        }
        let trimmed = line.trim_start();
        for begin in ["/// ...", "//! ...", "/// See there", "/// See the module"] {
            if trimmed.starts_with(begin) {
                complain(begin, "a line of documentation stands alone");
            }
        }
        if trimmed.starts_with("//") {
            continue;
        }
        for (name, instead) in names.iter().filter(|(name, _)| has_word(line, name)) {
            complain(name, instead);
        }
        if let Some(name) = function(trimmed).filter(|name| is_source && name.len() > NAME_CHARS_MAX) {
            complain(name, "a name of at most 60 characters, the subject first");
        }
    }
    found
}

/// The name of the function that a line begins.
fn function(line: &str) -> Option<&str> {
    let (name, _) = line.split_once("fn ")?.1.split_once(['(', '<'])?;
    name.chars().all(|c| c.is_alphanumeric() || c == '_').then_some(name)
}

/// True if `text` has `word`, and no letter, digit or underscore next to it. A `Host` followed by a
/// colon and a space, or by a quotation mark, is an HTTP header.
pub(super) fn has_word(text: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word).any(|(at, _)| {
        let (before, behind) = (&text[..at], &text[at + word.len()..]);
        let is_header = word == "Host" && (behind.starts_with(": ") || behind.starts_with('"'));
        !before.chars().next_back().is_some_and(is_part)
            && !behind.chars().next().is_some_and(is_part)
            && !is_header
    })
}

pub(super) fn collect(folder: &Path, texts: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder can be read").flatten() {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if path.is_dir() && !matches!(&*name, "target" | "corpus" | ".git" | "artifacts" | "node_modules") {
            collect(&path, texts);
        } else if ENDINGS.iter().any(|ending| name.ends_with(ending)) || is_script(&path) {
            texts.push(path);
        }
    }
}

/// True for a script, whatever its name.
fn is_script(path: &Path) -> bool {
    let mut begin = [0; 2];
    path.is_file()
        && fs::File::open(path).and_then(|mut file| file.read_exact(&mut begin)).is_ok()
        && begin == *b"#!"
}

#[test]
fn refused_words_do_not_occur() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this package is in the workspace");
    let mut texts = Vec::new();
    collect(root, &mut texts);
    assert!(texts.len() > 300, "the texts are there");
    assert!(texts.iter().any(|text| text.ends_with("scripts/fuzz")), "scripts are among them");
    let mut found = String::new();
    for file in texts.iter().filter(|file| !file.ends_with("tests/structure/words.rs")) {
        let text = fs::read_to_string(file).expect("text");
        found += &refused(file.strip_prefix(root).expect("it is below"), &text);
    }
    assert!(found.is_empty(), "words that say less than others, each with what to write:\n{found}");
}

#[test]
fn planted_refused_words_are_found() {
    let text = "// Nobody reads this.\nfn f() { pass_on(hosts) }\n/// ... and goes on\n// seamless, Hosts\n/// See there.";
    let text = format!("{text}\nfn {}() {{}}\nfn {}() {{}}", "long_".repeat(12), "longer_".repeat(9));
    let found = refused(Path::new("a.rs"), &text);
    let places: Vec<&str> = found.lines().map(|line| line.split(": ").next().unwrap_or("").trim()).collect();
    assert_eq!(places, ["a.rs:1", "a.rs:2", "a.rs:3", "a.rs:5", "a.rs:7"]);
    assert_eq!(refused(Path::new("a.md"), "pass_on is not looked for in pages"), "");
}
