//! Links of the pages that people read lead somewhere, their text is 100 columns wide, and the
//! guide has all of its pages.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

/// A link as it is written, `to.md#part`, in text or in the definition of a name.
fn links(page: &str) -> BTreeSet<&str> {
    let mut links = BTreeSet::new();
    let mut is_code = false;
    for line in page.lines() {
        is_code ^= line.starts_with("```");
        if is_code {
            continue;
        }
        let named = line.starts_with('[').then(|| line.split_once("]: ")).flatten();
        links.extend(named.map(|(_, link)| link));
        links.extend(line.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(link, _)| link));
    }
    // The module `guide` has links to items too, which rustdoc looks after.
    links.retain(|link| !link.contains("://") && !link.starts_with("crate::"));
    links
}

/// The part of a page that a heading begins, as links name it.
fn parts(page: &str) -> BTreeSet<String> {
    let headings = page.lines().filter_map(|line| line.strip_prefix('#'));
    let name = |heading: &str| {
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
    };
    headings.map(|heading| name(heading.trim_start_matches('#').trim())).collect()
}

/// A line for each link of a page that leads nowhere.
fn broken(file: &Path, page: &str) -> String {
    let mut lines = String::new();
    for link in links(page) {
        let (to, part) = link.split_once('#').unwrap_or((link, ""));
        let to = file.with_file_name(to);
        let its_page = if link.starts_with('#') { Ok(page.to_owned()) } else { fs::read_to_string(&to) };
        let has_part = part.is_empty() || its_page.is_ok_and(|page| parts(&page).contains(part));
        let leads = has_part && (link.starts_with('#') || to.exists());
        if !leads {
            let _ = writeln!(lines, "  {}: {link}", file.display());
        }
    }
    lines
}

/// Columns of text, as in the pages that people read next to code.
pub(super) const COLUMNS: usize = 100;

/// A line for each line of text that is too wide and could be broken. Tables and code are as wide
/// as they have to be.
fn wide(file: &Path, page: &str) -> String {
    let mut lines = String::new();
    let mut is_code = false;
    for (n, line) in (1..).zip(page.lines()) {
        is_code ^= line.trim_start().starts_with("```");
        let is_text = !is_code && !line.trim_start().starts_with(['|', '#']);
        if is_text && line.chars().count() > COLUMNS && line.trim().contains(' ') {
            let _ = writeln!(lines, "  {}:{n}", file.display());
        }
    }
    lines
}

/// A line for each path that a page names as code and no file or folder has. A path may begin
/// anywhere below the root.
fn gone(file: &Path, page: &str, all: &BTreeSet<String>) -> String {
    let mut lines = String::new();
    let is_path = |text: &str| {
        let is_plain = text.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '/'));
        let is_file =
            [".rs", ".md", ".toml", ".py", ".html", ".txt"].iter().any(|ending| text.ends_with(ending));
        is_plain && !text.contains("..") && (is_file || (text.ends_with('/') && !text.starts_with('/')))
    };
    for (n, line) in (1..).zip(page.lines()) {
        for path in line.split('`').skip(1).step_by(2).filter(|text| is_path(text)) {
            let path = path.trim_end_matches('/');
            if !all.iter().any(|one| one.strip_suffix(path).is_some_and(|rest| rest.ends_with('/'))) {
                let _ = writeln!(lines, "  {}:{n}: {path}", file.display());
            }
        }
    }
    lines
}

/// Each file and folder of the tree, after a slash.
fn tree() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut folders = vec![root().to_owned()];
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).expect("a folder can be read").flatten().map(|entry| entry.path()) {
            let below = path.strip_prefix(root()).expect("it is below").to_string_lossy().into_owned();
            if below.ends_with("target") || below == ".git" {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            }
            found.insert(format!("/{below}"));
        }
    }
    found
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this package is in the workspace")
}

fn pages(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder can be read").flatten().map(|entry| entry.path());
    entries.filter(|path| path.extension().is_some_and(|extension| extension == "md")).collect()
}

const WRITTEN: [&str; 13] = [
    ".",
    "docs",
    "docs/experiments",
    "docs/guide",
    "docs/internals",
    "examples",
    "examples/kv",
    "examples/mqtt",
    "examples/smtp",
    "crates/bench/rivals",
    "crates/core/src/proxy",
    "tests/bugs",
    "tests/http",
];

/// Findings of `find` in all pages of these folders.
fn in_pages_of<'a>(folders: impl Iterator<Item = &'a &'a str>, find: fn(&Path, &str) -> String) -> String {
    let pages: Vec<PathBuf> = folders.flat_map(|folder| pages(&root().join(folder))).collect();
    assert!(pages.len() > 15, "the pages are there");
    pages.iter().map(|file| find(file, &fs::read_to_string(file).expect("text"))).collect()
}

#[test]
fn links_of_all_pages_lead_somewhere() {
    let found = in_pages_of(WRITTEN.iter(), broken);
    assert!(found.is_empty(), "links that lead nowhere:\n{found}");
}

#[test]
fn text_of_all_pages_is_100_columns_wide() {
    let found = in_pages_of(WRITTEN.iter(), wide);
    assert!(found.is_empty(), "lines of text with more than {COLUMNS} columns:\n{found}");
}

#[test]
fn paths_in_pages_for_contributors_exist() {
    let all = tree();
    let mut files = pages(&root().join("docs/internals"));
    files
        .extend(["docs/ARCHITECTURE.md", "docs/TESTING.md", "CONTRIBUTING.md"].map(|page| root().join(page)));
    files.retain(|file| !file.ends_with("renamed.md"));
    let found: String =
        files.iter().map(|file| gone(file, &fs::read_to_string(file).expect("text"), &all)).collect();
    assert!(found.is_empty(), "paths that are not there:\n{found}");
}

#[test]
fn planted_paths_that_are_gone_are_found() {
    let page =
        "`core/src/gone.rs` `pages.rs` `structure/pages.rs` `tests/gone/` `tests/structure/` `shape.rs`\n";
    let found = gone(Path::new("a.md"), page, &tree());
    assert_eq!(found, "  a.md:1: core/src/gone.rs\n  a.md:1: tests/gone\n  a.md:1: shape.rs\n");
}

#[test]
fn planted_wide_lines_are_found() {
    let (word, text) = ("x".repeat(120), "x ".repeat(60));
    let page = format!("{text}\n* {text}\n{word}\n| {text} |\n```\n{text}\n```\n");
    let found = wide(Path::new("a.md"), &page);
    assert_eq!(found, "  a.md:1\n  a.md:2\n");
}

#[test]
fn guide_lists_each_of_its_pages() {
    let guide = root().join("docs/guide");
    let lists = [guide.join("SUMMARY.md"), guide.join("README.md"), root().join("src/guide/mod.rs")];
    let lists = lists.map(|list| fs::read_to_string(list).expect("text"));
    for page in pages(&guide) {
        let name = page.file_name().expect("a file").to_string_lossy();
        if !matches!(&*name, "SUMMARY.md" | "README.md") {
            assert!(lists.iter().all(|list| list.contains(&*name)), "{name} is not in every list");
        }
    }
}

#[test]
fn folders_of_pages_list_each_of_them() {
    for folder in ["docs/experiments", "docs/internals"].map(|folder| root().join(folder)) {
        let list = fs::read_to_string(folder.join("README.md")).expect("a page");
        for page in pages(&folder) {
            let name = page.file_name().expect("a file").to_string_lossy();
            assert!(name == "README.md" || list.contains(&format!("({name})")), "{name} is not in the list");
        }
    }
}

/// Bytes of a picture: the README has to come fast.
const PICTURE_BYTES_MAX: u64 = 200_000;

/// The first column of the table of a page below this head.
fn first_column<'a>(page: &'a str, head: &str) -> Vec<&'a str> {
    let rows = page.lines().skip_while(|line| !line.starts_with(head)).skip(2);
    rows.map_while(|line| line.strip_prefix("| ")?.split(" | ").next()).collect()
}

/// The names of the steps of a list in `shard/admit.rs`.
fn steps<'a>(source: &'a str, list: &str) -> Vec<&'a str> {
    let (_, list) = source.split_once(&format!("const {list}:")).expect("the list is there");
    let (list, _) = list.split_once("];\n").expect("it ends");
    list.split('"').skip(1).step_by(2).collect()
}

#[test]
fn order_of_admission_is_that_of_the_guide() {
    let read = |file: &str| fs::read_to_string(root().join(file)).expect("it is text");
    let (page, source) = (read("docs/guide/under_attack.md"), read("crates/server/src/shard/admit.rs"));
    let told = first_column(&page, "| step | of whom |");
    // The kernel's and the state machine's come before, and the service's after.
    let mut asked = vec!["filter in the kernel", "accept rate"];
    asked.extend(steps(&source, "ON_ACCEPT"));
    asked.push("`Service::open`");
    assert_eq!(told, asked);
    // A client behind a proxy meets the same, but for what its proxy met.
    let of_client = steps(&source, "ON_HEADER");
    let in_order: Vec<_> = told.into_iter().filter(|step| of_client.contains(step)).collect();
    assert_eq!(in_order, of_client);
}

#[test]
fn planted_disorder_of_admission_is_found() {
    let source = "const ON_ACCEPT: [Step; 2] = [\n    (&[\"b\"], b),\n    (&[\"a\", \"c\"], a),\n];\n\"d\"";
    let page = "| step | of whom |\n|---|---|\n| a | all |\n| b | all |\n\n| x |";
    assert_eq!(steps(source, "ON_ACCEPT"), ["b", "a", "c"]);
    assert_eq!(first_column(page, "| step | of whom |"), ["a", "b"]);
}

#[test]
fn pictures_are_small() {
    let mut count = 0;
    for folder in ["docs/performance", "docs/pictures"] {
        for picture in fs::read_dir(root().join(folder)).expect("a folder").flatten() {
            let size = picture.metadata().expect("a file").len();
            assert!(size <= PICTURE_BYTES_MAX, "{} has {size} bytes", picture.path().display());
            count += 1;
        }
    }
    assert!(count > 10, "{count} pictures are there");
}

#[test]
fn planted_broken_links_are_found() {
    let file = root().join("docs/guide/planted.md");
    let page = "# A part, here\n[a](state.md) [b](#a-part-here)\n```\n[c](none.md)\n```\n[d](https://none)\n\n[e]: ../none.md\n[f](#none)\n";
    let found = broken(&file, page);
    let wrong: Vec<&str> = found.lines().map(|line| line.rsplit(' ').next().unwrap_or("")).collect();
    assert_eq!(wrong, ["#none", "../none.md"]);
}

/// Each figure of a text for the bytes of an idle connection of a service.
fn idle_figures(text: &str) -> Vec<u64> {
    let words: Vec<&str> =
        text.split(|c: char| c.is_whitespace() || c == '*').filter(|word| !word.is_empty()).collect();
    let mut figures = Vec::new();
    for (at, _) in words.iter().enumerate().filter(|(_, word)| **word == "idle") {
        let (mut rest, mut next) = (words[at + 1..].iter().filter(|word| **word != "about"), Vec::new());
        next.extend(rest.by_ref().take(4));
        if let [&"connection", &("costs" | "takes"), number, unit] = next[..]
            && unit.starts_with("bytes")
        {
            figures.extend(number.parse::<u64>());
        }
    }
    figures
}

#[test]
fn idle_connection_has_one_figure() {
    let of_doctor = fs::read_to_string(root().join("crates/base/src/doctor/capacity.rs")).expect("a source");
    let figure = of_doctor.split("CONNECTION_BYTES: u64 = ").nth(1).and_then(|rest| rest.split(';').next());
    let figure: u64 = figure.and_then(|figure| figure.parse().ok()).expect("a number");
    let measured = fs::read_to_string(root().join("docs/PERFORMANCE.md")).expect("a page");
    assert!(measured.contains(&format!("| ringserve | 1 | 19 000 | {figure} |")), "not measured: {figure}");
    let mut pages = pages(&root().join("docs/guide"));
    pages.extend(["README.md", "docs/OPERATIONS.md", "docs/ARCHITECTURE.md"].map(|page| root().join(page)));
    let mut count = 0;
    for page in pages {
        for found in idle_figures(&fs::read_to_string(&page).expect("a page")) {
            assert_eq!(found, figure, "{}", page.display());
            count += 1;
        }
    }
    assert!(count >= 3, "{count} pages have it");
    assert_eq!(
        idle_figures("**An idle connection costs 256\nbytes** or takes: idle connection takes about 3 KB"),
        [256]
    );
}
