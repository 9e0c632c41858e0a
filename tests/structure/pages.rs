//! Links of the pages that people read lead somewhere, and the guide has all of its pages.

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

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this package is in the workspace")
}

fn pages(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder can be read").flatten().map(|entry| entry.path());
    entries.filter(|path| path.extension().is_some_and(|extension| extension == "md")).collect()
}

#[test]
fn links_of_all_pages_lead_somewhere() {
    let folders = [".", "docs", "docs/guide", "docs/performance", "examples", "crates/bench/rivals"];
    let pages: Vec<PathBuf> = folders.into_iter().flat_map(|folder| pages(&root().join(folder))).collect();
    assert!(pages.len() > 15, "the pages are there");
    let found: String =
        pages.iter().map(|file| broken(file, &fs::read_to_string(file).expect("text"))).collect();
    assert!(found.is_empty(), "links that lead nowhere:\n{found}");
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
fn planted_broken_links_are_found() {
    let file = root().join("docs/guide/planted.md");
    let page = "# A part, here\n[a](state.md) [b](#a-part-here)\n```\n[c](none.md)\n```\n[d](https://none)\n\n[e]: ../none.md\n[f](#none)\n";
    let found = broken(&file, page);
    let wrong: Vec<&str> = found.lines().map(|line| line.rsplit(' ').next().unwrap_or("")).collect();
    assert_eq!(wrong, ["#none", "../none.md"]);
}
