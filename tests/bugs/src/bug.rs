//! A bug: what it breaks, the check that must fail, and the change with its function.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::iter;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::items::Sources;

/// A planted bug, as written in its file.
#[derive(Debug)]
pub struct Bug {
    /// Folder and file, without the extension.
    pub name: String,
    /// The consequence of the bug, one sentence.
    pub breaks: String,
    pub check: Check,
    /// The simulator finds it within a few thousand seeds.
    pub is_fast: bool,
    pub edits: Vec<Edit>,
}

/// The check that must fail.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Check {
    /// Seeds of one simulated shard, or else the tests of the crate.
    Seeds,
    /// Seeds of whole simulated servers.
    Servers,
    /// `cargo test` with these arguments.
    Test(String),
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Check::Seeds => f.write_str("seeds"),
            Check::Servers => f.write_str("servers"),
            Check::Test(args) => write!(f, "cargo test {args}"),
        }
    }
}

/// One change: `old` occurs once within the items with this name, and `new` replaces it.
#[derive(Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Edit {
    pub file: PathBuf,
    /// `function`, `Type::function`, or the name of another item; the whole file without one.
    pub item: Option<String>,
    pub old: String,
    pub new: String,
}

impl Bug {
    /// # Panics
    /// If the file is not a bug.
    pub fn read(file: &Path) -> Bug {
        let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let folder = file.parent().and_then(Path::file_name).expect("a bug lies in a folder of its subject");
        let name = format!("{}/{}", folder.display(), file.file_stem().expect("a bug has a name").display());
        Bug::parse(name, &text).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
    }

    fn parse(name: String, text: &str) -> Result<Bug, String> {
        let mut bug =
            Bug { name, breaks: String::new(), check: Check::Seeds, is_fast: false, edits: Vec::new() };
        for line in text.lines() {
            bug.line(line).map_err(|error| format!("{error}: {line}"))?;
        }
        match (bug.breaks.is_empty(), bug.edits.iter().any(|edit| edit.old.trim().is_empty())) {
            (true, _) => Err("no line says what breaks".to_owned()),
            (_, true) => Err("a change has no old lines".to_owned()),
            _ if bug.edits.is_empty() => Err("nothing is changed".to_owned()),
            _ => Ok(bug),
        }
    }

    fn line(&mut self, line: &str) -> Result<(), &'static str> {
        if let Some(place) = line.strip_prefix("in ") {
            let (file, item) =
                place.split_once(": ").map_or((place, None), |(file, item)| (file, Some(item)));
            self.edits.push(Edit { file: file.into(), item: item.map(str::to_owned), ..Edit::default() });
            return Ok(());
        }
        let Some(edit) = self.edits.last_mut() else {
            return self.head(line);
        };
        let (sign, code) = line.split_at(line.len().min(1));
        let (is_old, is_new) = match sign {
            "-" => (true, false),
            "+" => (false, true),
            " " | "" => (true, true),
            _ => return Err("neither -, nor +, nor a space, nor `in FILE`"),
        };
        for text in [(is_old, &mut edit.old), (is_new, &mut edit.new)].into_iter().filter(|(is, _)| *is) {
            text.1.push_str(code);
            text.1.push('\n');
        }
        Ok(())
    }

    fn head(&mut self, line: &str) -> Result<(), &'static str> {
        match (line.split_once(": "), line) {
            (_, "") => {}
            (_, "fast") => self.is_fast = true,
            (Some(("breaks", what)), _) => self.breaks = what.to_owned(),
            (Some(("check", "seeds")), _) => self.check = Check::Seeds,
            (Some(("check", "servers")), _) => self.check = Check::Servers,
            (Some(("check", check)), _) if let Some(args) = check.strip_prefix("cargo test ") => {
                self.check = Check::Test(args.to_owned());
            }
            // A further line of the text on what it breaks.
            (_, _) if line.starts_with("  ") => {
                self.breaks.push(' ');
                self.breaks.push_str(line.trim());
            }
            _ => return Err("neither `breaks: ..`, nor `check: seeds|servers|cargo test ..`, nor `fast`"),
        }
        Ok(())
    }

    /// The changed files with the bug planted.
    ///
    /// # Errors
    /// If a change does not fit.
    pub fn planted(&self, sources: &Sources) -> Result<BTreeMap<PathBuf, String>, String> {
        let mut changes: BTreeMap<&Path, Vec<(Range<usize>, &str)>> = BTreeMap::new();
        let fails = |file: &Path, error: &str| format!("{}: {}: {error}", self.name, file.display());
        for edit in &self.edits {
            let place = edit.place(sources).map_err(|error| fails(&edit.file, &error))?;
            changes.entry(&edit.file).or_default().push((place, edit.new.trim_end()));
        }
        let mut planted = BTreeMap::new();
        for (file, mut changes) in changes {
            changes.sort_by_key(|(place, _)| place.start);
            if changes.windows(2).any(|pair| pair[1].0.start < pair[0].0.end) {
                return Err(fails(file, "two changes overlap"));
            }
            let mut text = sources.get(file)?.text.clone();
            changes.into_iter().rev().for_each(|(place, new)| text.replace_range(place, new));
            planted.insert(file.to_owned(), text);
        }
        Ok(planted)
    }
}

impl Edit {
    /// The place of the change in its file.
    fn place(&self, sources: &Sources) -> Result<Range<usize>, String> {
        let source = sources.get(&self.file)?;
        let (item, within) = match &self.item {
            None => ("the file", iter::once(0..source.text.len()).collect()),
            Some(name) => (&**name, source.named(name)),
        };
        if within.is_empty() {
            return Err(format!("no item is named {item}"));
        }
        let places = within.into_iter().flat_map(|within| find(&source.text, within, &self.old));
        let places: Vec<_> = places.collect();
        match &*places {
            [place] => Ok(place.clone()),
            [] => Err(format!("{item} does not have: {}", self.old.trim())),
            _ => Err(format!("{item} has {} times: {}", places.len(), self.old.trim())),
        }
    }
}

/// The places where `old` occurs, however lines are broken: blanks do not count.
fn find(text: &str, within: Range<usize>, old: &str) -> Vec<Range<usize>> {
    let bytes = |text: &str, from: usize| -> Vec<(usize, u8)> {
        let all = text.bytes().enumerate().map(|(at, byte)| (from + at, byte));
        all.filter(|(_, byte)| !byte.is_ascii_whitespace()).collect()
    };
    let (wanted, there) = (bytes(old, 0), bytes(&text[within.clone()], within.start));
    let is_word =
        |at: usize| text.as_bytes().get(at).is_some_and(|byte| byte.is_ascii_alphanumeric() || *byte == b'_');
    let mut found = Vec::new();
    for window in there.windows(wanted.len().max(1)) {
        let (first, last) = (window[0].0, window[window.len() - 1].0);
        let is_same = window.iter().zip(&wanted).all(|(one, other)| one.1 == other.1);
        let cuts = |before: usize| is_word(before) && is_word(before + 1);
        if is_same && !(first > 0 && cuts(first - 1)) && !cuts(last) {
            found.push(first..last + 1);
        }
    }
    found
}
