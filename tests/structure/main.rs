//! Imports, texts and names of the tree: no files of a crate import each other in a circle, and no
//! rooms (cargo checks crates), public types can grow, the links of pages lead somewhere, texts and
//! names do without refused words, comments use plain words and are 100 columns wide, and lines of
//! the log are guarded.
//!
//! An import leads to the file that defines the imported item, whichever modules pass it on with
//! `pub use`. A module and its parts are one subject, so a part may name the module that it is a
//! part of. A parent's `mod x;` imports nothing, and neither does code that is compiled for tests
//! alone.

mod comments;
mod conditional;
mod errors;
mod evolving;
mod log_lines;
mod names;
mod pages;
mod plain_words;
mod rooms;
mod standards;
mod tree;
mod words;

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use tree::{Modules, Sources};

const ADVICE: &str = "Each file must be understandable from those it imports. Move what two of them share into a file below \
     both, hand it over as an argument, or join the two if they are one subject.";

/// Modules and imports that a name leads through at most.
const HOPS_MAX: u8 = 20;

/// For each file, which others it imports from, and what.
type Imports = BTreeMap<PathBuf, BTreeMap<PathBuf, BTreeSet<String>>>;

#[test]
fn files_import_each_other_in_no_circle() {
    let mut found = String::new();
    each_crate(|_, modules| found.push_str(&circles(modules)));
    let found = found.replace(&format!("{}/", workspace().display()), "");
    assert!(found.is_empty(), "files import each other in a circle:\n{found}\n{ADVICE}");
}

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this package is in the workspace")
}

/// Goes through each crate, with the folder of its sources.
fn each_crate(mut then: impl FnMut(&Path, &Modules)) {
    static CRATES: OnceLock<Vec<(PathBuf, Modules)>> = OnceLock::new();
    CRATES.get_or_init(read_all).iter().for_each(|(folder, modules)| then(folder, modules));
}

fn read_all() -> Vec<(PathBuf, Modules)> {
    let root = workspace();
    let packages = ["crates", "examples"].map(|folder| fs::read_dir(root.join(folder)).expect("a folder"));
    let mut folders: Vec<PathBuf> =
        packages.into_iter().flatten().flatten().map(|entry| entry.path().join("src")).collect();
    folders.extend(["src", "tests/src", "tests/bugs/src", "fuzz/src"].map(|folder| root.join(folder)));
    folders.retain(|src| src.is_dir());
    folders.sort();
    let mut crates = Vec::new();
    for folder in folders {
        let mut sources = Sources::new();
        collect(&folder, &mut sources);
        let roots = ["lib.rs", "main.rs"].map(|name| folder.join(name));
        let roots = roots.into_iter().filter(|file| sources.contains_key(file));
        crates.extend(roots.map(|root| (folder.clone(), tree::read(&sources, &root))));
    }
    crates
}

fn collect(folder: &Path, sources: &mut Sources) {
    for entry in fs::read_dir(folder).expect("a folder can be read").flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).expect("a source is text");
            sources.insert(path, text);
        }
    }
}

/// A line for each import of a circle, for the shortest circle of each knot of files.
fn circles(modules: &Modules) -> String {
    let imports = imports(modules);
    let mut lines = String::new();
    let mut reported = HashSet::new();
    for file in imports.keys() {
        let Some(circle) = shortest_circle(&imports, file) else { continue };
        if circle.iter().any(|file| reported.contains(file)) {
            continue;
        }
        for (from, to) in circle.iter().zip(circle.iter().cycle().skip(1)) {
            let names: Vec<&str> = imports[from][to].iter().map(String::as_str).collect();
            let _ = writeln!(lines, "  {} → {}: {}", from.display(), to.display(), names.join(", "));
        }
        lines.push('\n');
        reported.extend(circle);
    }
    lines
}

fn shortest_circle(imports: &Imports, start: &Path) -> Option<Vec<PathBuf>> {
    let mut from: BTreeMap<&Path, &Path> = BTreeMap::new();
    let mut queue = VecDeque::from([start]);
    while let Some(file) = queue.pop_front() {
        for next in imports.get(file).into_iter().flat_map(BTreeMap::keys) {
            if next == start {
                let back = std::iter::successors(Some(file), |file| from.get(file).copied());
                let mut circle: Vec<PathBuf> = back.map(Path::to_owned).collect();
                circle.reverse();
                return Some(circle);
            }
            if !from.contains_key(next.as_path()) {
                from.insert(next, file);
                queue.push_back(next);
            }
        }
    }
    None
}

fn imports(modules: &Modules) -> Imports {
    let mut imports = Imports::new();
    for (path, module) in modules {
        for names in &module.uses {
            if names.len() < 2 && !module.imports.contains_key(names.first().map_or("", String::as_str)) {
                continue;
            }
            if let Some((file, name)) = resolve(modules, path, names, HOPS_MAX)
                && *file != module.file
                && !is_above(modules, path, file)
            {
                let to = imports.entry(module.file.clone()).or_default();
                to.entry(file.clone()).or_default().insert(name);
            }
        }
    }
    imports
}

/// True if the module at `path` is a part of one in this file.
fn is_above(modules: &Modules, path: &[String], file: &Path) -> bool {
    (0..path.len()).any(|len| modules[&path[..len]].file == file)
}

/// The file that defines what is named in the module at `path`, and its name; `None` if that is
/// another crate's.
fn resolve<'a>(
    modules: &'a Modules,
    path: &[String],
    names: &[String],
    hops: u8,
) -> Option<(&'a PathBuf, String)> {
    // Names that are passed on to each other lead nowhere.
    let hops = hops.checked_sub(1)?;
    let module = &modules[path];
    let Some((first, rest)) = names.split_first() else {
        return Some((&module.file, path.last().cloned().unwrap_or_else(|| "crate".to_owned())));
    };
    let inner = [path, &names[..1]].concat();
    let named = match first.as_str() {
        "crate" => Some(&[][..]),
        "self" => Some(path),
        "super" => Some(path.split_last()?.1),
        _ => modules.contains_key(&inner).then_some(&inner[..]),
    };
    if let Some(named) = named {
        // What is found nowhere was made by a macro there.
        let there = || rest.first().map(|name| (&modules[named].file, name.clone()));
        return resolve(modules, named, rest, hops).or_else(there);
    }
    if module.defines.contains(first) {
        return Some((&module.file, first.clone()));
    }
    // `use memchr::memchr` names another crate.
    if let Some(target) = module.imports.get(first).filter(|target| target[0] != *first) {
        return resolve(modules, path, &[target, rest].concat(), hops);
    }
    let mut globs = module.globs.iter().filter(|target| target[0] != *first);
    globs.find_map(|target| resolve(modules, path, &[target, names].concat(), hops))
}

/// The circles of a crate whose files have these texts; the first is its root.
fn circles_of(files: &[(&str, &str)]) -> String {
    let sources = files.iter().map(|(file, text)| (file.into(), (*text).to_owned())).collect();
    circles(&tree::read(&sources, Path::new(files[0].0)))
}

#[test]
fn planted_circle_is_found_and_printed() {
    let found = circles_of(&[
        ("src/lib.rs", "mod a; mod b; mod c;"),
        ("src/a.rs", "use crate::b::B; pub struct A(B);"),
        ("src/b.rs", "pub struct B; pub fn b() { super::c::c() }"),
        ("src/c.rs", "use super::a; pub fn c() { let _: Option<a::A> = None; }"),
    ]);
    assert_eq!(found, "  src/a.rs → src/b.rs: B\n  src/b.rs → src/c.rs: c\n  src/c.rs → src/a.rs: A, a\n\n");
}

#[test]
fn reexport_leads_to_the_file_that_defines() {
    let inner = ("src/room/inner.rs", "use crate::user::User; pub struct Inner(User);");
    let lib = ("src/lib.rs", "mod room; mod user; pub use room::*;");
    let room = ("src/room/mod.rs", "mod inner; pub(crate) use inner::Inner as Known;");
    let user = |uses| ("src/user.rs", uses);
    let circle = "  src/room/inner.rs → src/user.rs: User\n  src/user.rs → src/room/inner.rs: Inner\n\n";
    assert_eq!(circles_of(&[lib, room, inner, user("use crate::room::Known; pub struct User;")]), circle);
    assert_eq!(circles_of(&[lib, room, inner, user("use crate::Known; pub struct User;")]), circle);
    assert_eq!(
        circles_of(&[lib, room, inner, user("pub struct User; fn f() { m!(crate::Known::new()) }")]),
        circle
    );
    assert_eq!(circles_of(&[lib, room, inner, user("pub struct User;")]), "");
}

#[test]
fn tests_and_parents_close_no_circle() {
    let found = circles_of(&[
        ("src/main.rs", "mod a; mod b;"),
        ("src/a.rs", "mod part; #[cfg(test)] mod tests { use crate::b::B; } pub struct A;"),
        ("src/a/part.rs", "use super::A; impl A {}"),
        ("src/b.rs", "use crate::a::A; #[cfg(test)] use crate::missing; pub struct B(A);"),
    ]);
    assert_eq!(found, "");
}
