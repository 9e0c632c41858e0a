//! No rooms name each other in a circle. A room is a module at the top of its crate, with all that
//! is below it, and may have rooms inside. No folder has more files than a reader takes in.
//!
//! At the top room `a` names room `b` where a path begins with `crate::b`, however it is written:
//! in a `use`, a `pub use`, inline, or in what a macro is given. Inside a room a name leads to the
//! file that defines it, also where another module passes it on.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::Path;

use super::tree::{Modules, Names};
use super::{Imports, imports};

/// Rooms that are still tied, by crate. The list stays empty.
const TIED: [(&str, usize); 0] = [];

/// Rooms inside rooms that are still tied, by folder. The list may only shrink.
const TIED_INSIDE: [(&str, usize); 1] = [("crates/ctl/src/drill", 2)];

/// Files that a folder may have.
const FILES_MAX: usize = 15;

/// Folders with more, and how many they may have. The list may only shrink.
const CROWDED: [(&str, usize); 12] = [
    ("crates/server/src", 23),
    ("crates/server/src/admin", 19),
    ("crates/admission/src", 18),
    ("crates/server/src/http", 19),
    ("crates/server/src/server", 17),
    ("crates/sim/src", 28),
    ("crates/sim/src/kernel", 24),
    ("crates/sim/src/servers", 26),
    ("crates/sim/src/world", 18),
    ("crates/tls/src", 17),
    ("crates/websocket/src", 18),
    ("tests/src", 17),
];

/// Crates in which each room says at its head what it may use.
const WITH_HEADS: [&str; 1] = ["crates/core/src"];

const ADVICE: &str = "What two rooms share belongs into a room below both, or is handed over as an argument.";

/// For each room, which others it names, and with which paths.
type Arrows = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

#[test]
fn rooms_name_each_other_in_no_circle() {
    let root = super::workspace();
    let mut found = String::new();
    super::each_crate(|folder, modules| {
        let arrows = arrows(modules);
        let knots = knots(&arrows);
        let folder = folder.strip_prefix(root).expect("a crate is in the workspace").display().to_string();
        let tied = TIED.iter().find(|(of, _)| *of == folder).map_or(0, |(_, rooms)| *rooms);
        let rooms: usize = knots.iter().map(BTreeSet::len).sum();
        if rooms != tied {
            let _ = writeln!(found, "{folder}: {rooms} rooms are tied, where {tied} are said to be");
            knots.iter().for_each(|knot| found.push_str(&drawn(&arrows, knot)));
        }
    });
    assert!(found.is_empty(), "rooms name each other in a circle:\n{found}\n{ADVICE}");
}

#[test]
fn rooms_inside_rooms_name_each_other_in_no_circle() {
    let root = super::workspace();
    let mut found = String::new();
    let mut tied = BTreeSet::new();
    super::each_crate(|folder, modules| {
        let has_heads = has_heads(folder);
        for (parent, arrows) in levels(modules) {
            if parent.is_empty() && !has_heads {
                continue;
            }
            let folder = folder.join(parent.join("/"));
            let folder =
                folder.strip_prefix(root).expect("a crate is in the workspace").display().to_string();
            let known = TIED_INSIDE.iter().find(|(of, _)| *of == folder);
            let knots = knots(&arrows);
            let rooms: usize = knots.iter().map(BTreeSet::len).sum();
            if rooms != known.map_or(0, |(_, rooms)| *rooms) {
                let _ = writeln!(found, "{folder}: {rooms} rooms are tied");
                knots.iter().for_each(|knot| found.push_str(&drawn(&arrows, knot)));
            }
            tied.extend(known.map(|(of, _)| *of));
        }
    });
    for (folder, _) in TIED_INSIDE.iter().filter(|(folder, _)| !tied.contains(folder)) {
        let _ = writeln!(found, "{folder}: there are no rooms any more");
    }
    assert!(found.is_empty(), "rooms inside a room name each other in a circle:\n{found}\n{ADVICE}");
}

/// True for a crate whose rooms have heads.
fn has_heads(folder: &Path) -> bool {
    let folder = folder.strip_prefix(super::workspace()).expect("a crate is in the workspace");
    WITH_HEADS.iter().any(|of| folder == Path::new(of))
}

#[test]
fn rooms_use_what_their_heads_say() {
    let mut found = String::new();
    super::each_crate(|folder, modules| {
        if !has_heads(folder) {
            return;
        }
        let levels = levels(modules);
        for (path, module) in
            modules.iter().filter(|(path, module)| !path.is_empty() && module.file.ends_with("mod.rs"))
        {
            let text = fs::read_to_string(&module.file).expect("a source is text");
            let (parent, name) = path.split_at(path.len() - 1);
            let used = levels.get(parent).and_then(|arrows| arrows.get(&name[0]));
            let used = used.map(|others| others.keys().cloned().collect()).unwrap_or_default();
            found.push_str(&beyond_head(&path.join("/"), &text, &used));
        }
    });
    assert!(found.is_empty(), "rooms and their heads differ:\n{found}");
}

/// Names that a room uses beyond the head of its file, and names in the head that it does not use.
fn beyond_head(room: &str, text: &str, used: &BTreeSet<String>) -> String {
    let line = |begin: &str| text.lines().find_map(|line| line.strip_prefix(begin));
    let Some(may) = line("// May use: ") else {
        return format!("  {room}: it does not say what it may use\n");
    };
    let mut lines = String::new();
    if line("// Begin with: ").is_none() {
        let _ = writeln!(lines, "  {room}: it does not say where to begin");
    }
    let named: BTreeSet<String> = match may.trim_end_matches('.') {
        "all other rooms" => return lines,
        "no other room" => BTreeSet::new(),
        rooms => rooms.split(", ").map(str::to_owned).collect(),
    };
    if *used != named {
        let (used, named) = (used.iter(), named.iter());
        let [used, named] =
            [used.cloned().collect(), named.cloned().collect()].map(|rooms: Vec<String>| rooms.join(", "));
        let _ = writeln!(lines, "  {room}: its head names {named}; it uses {used}");
    }
    lines
}

#[test]
fn folders_have_few_files() {
    let root = super::workspace();
    let mut files: BTreeMap<String, usize> = BTreeMap::new();
    super::each_crate(|folder, _| count(folder, root, &mut files));
    let mut found = String::new();
    for (folder, count) in &files {
        let most = CROWDED.iter().find(|(of, _)| of == folder).map_or(FILES_MAX, |(_, most)| *most);
        if *count > most {
            let _ = writeln!(found, "  {folder}: {count}, where {most} may be");
        } else if *count <= FILES_MAX && most > FILES_MAX {
            let _ = writeln!(found, "  {folder}: {count}, so it needs no place in the list");
        }
    }
    for (folder, _) in CROWDED.iter().filter(|(folder, _)| !files.contains_key(*folder)) {
        let _ = writeln!(found, "  {folder}: it is gone");
    }
    assert!(
        found.is_empty(),
        "folders and their files:\n{found}\nGive a folder of more than {FILES_MAX} files rooms."
    );
}

/// The number of sources in each folder from `folder` on, those of tests aside.
fn count(folder: &Path, root: &Path, files: &mut BTreeMap<String, usize>) {
    let entries = fs::read_dir(folder).expect("a folder can be read").flatten().map(|entry| entry.path());
    for path in entries {
        if path.is_dir() {
            count(&path, root, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let folder =
                folder.strip_prefix(root).expect("a crate is in the workspace").display().to_string();
            *files.entry(folder).or_default() += 1;
        }
    }
}

/// For each module that has some inside, which of these name which others; that of the root of the
/// crate among them.
fn levels(modules: &Modules) -> BTreeMap<Names, Arrows> {
    let mut paths: BTreeMap<&Path, &Names> = BTreeMap::new();
    for (path, module) in modules {
        let of_file = paths.entry(&module.file).or_insert(path);
        if path.len() < of_file.len() {
            *of_file = path;
        }
    }
    let mut levels: BTreeMap<Names, Arrows> = BTreeMap::new();
    let all: Imports = imports(modules);
    for (from, others) in &all {
        for (to, names) in others {
            let (from, to) = (paths[from.as_path()], paths[to.as_path()]);
            let same = from.iter().zip(to).take_while(|(from, to)| from == to).count();
            let (Some(room), Some(other)) = (from.get(same), to.get(same)) else { continue };
            let arrows = levels.entry(from[..same].to_vec()).or_default();
            let named = arrows.entry(room.clone()).or_default().entry(other.clone()).or_default();
            named.extend(names.iter().cloned());
        }
    }
    levels
}

fn arrows(modules: &Modules) -> Arrows {
    let mut arrows = Arrows::new();
    for (path, module) in modules {
        let Some(room) = path.first() else { continue };
        for names in module.uses.iter().chain(&module.passes_on) {
            let Some(named) = absolute(path, names) else { continue };
            let Some(other) = named.first().filter(|other| *other != room) else { continue };
            if modules.contains_key(&named[..1]) {
                let others = arrows.entry(room.clone()).or_default();
                others.entry(other.clone()).or_default().insert(named.join("::"));
            }
        }
    }
    arrows
}

/// A path from the root of the crate on; `None` for one that begins with a name of its module or of
/// another crate.
fn absolute(module: &Names, names: &[String]) -> Option<Names> {
    let (first, rest) = names.split_first()?;
    let (mut base, mut rest) = match first.as_str() {
        "crate" => (Names::new(), rest),
        "self" => (module.clone(), rest),
        "super" => (module.split_last()?.1.to_vec(), rest),
        _ => return None,
    };
    while let Some(("super", more)) = rest.split_first().map(|(first, more)| (first.as_str(), more)) {
        base.pop()?;
        rest = more;
    }
    Some([base, rest.to_vec()].concat())
}

/// Sets of rooms each of which leads to all others of its set.
fn knots(arrows: &Arrows) -> Vec<BTreeSet<String>> {
    let reached = |from: &String| {
        let mut reached = BTreeSet::new();
        let mut left = vec![from];
        while let Some(room) = left.pop() {
            left.extend(
                arrows
                    .get(room)
                    .into_iter()
                    .flat_map(BTreeMap::keys)
                    .filter(|room| reached.insert((*room).clone())),
            );
        }
        reached
    };
    let reached: BTreeMap<&String, BTreeSet<String>> =
        arrows.keys().map(|room| (room, reached(room))).collect();
    let mut knots: Vec<BTreeSet<String>> = Vec::new();
    for (room, others) in &reached {
        if others.contains(*room) && !knots.iter().any(|knot| knot.contains(*room)) {
            let is_tied = |other: &&String| reached.get(*other).is_some_and(|back| back.contains(*room));
            knots.push(others.iter().filter(is_tied).cloned().collect());
        }
    }
    knots
}

/// The arrows of a knot.
fn drawn(arrows: &Arrows, knot: &BTreeSet<String>) -> String {
    let mut lines = String::new();
    for from in knot {
        for (to, paths) in arrows.get(from).into_iter().flatten().filter(|(to, _)| knot.contains(*to)) {
            let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
            let _ = writeln!(lines, "  {from} → {to}: {}", paths.join(", "));
        }
    }
    lines
}

#[test]
fn planted_knot_is_found() {
    let files = [
        ("src/lib.rs", "mod a; mod b; mod c;"),
        ("src/a.rs", "mod part; pub use crate::b::B;"),
        ("src/a/part.rs", "fn f() { m!(super::super::c::g()) }"),
        ("src/b.rs", "pub struct B; #[cfg(test)] use crate::a;"),
        ("src/c.rs", "pub fn g() { crate::a::part::f() }"),
    ];
    let sources = files.iter().map(|(file, text)| (file.into(), (*text).to_owned())).collect();
    let arrows = arrows(&super::tree::read(&sources, std::path::Path::new("src/lib.rs")));
    let knots = knots(&arrows);
    assert_eq!(knots, [["a".to_owned(), "c".to_owned()].into()]);
    assert_eq!(drawn(&arrows, &knots[0]), "  a → c: c::g\n  c → a: a::part::f\n");
}

#[test]
fn planted_knot_inside_a_room_is_found() {
    let files = [
        ("src/lib.rs", "mod a; pub use a::A;"),
        ("src/a/mod.rs", "mod one; mod two; mod three; pub use one::A; pub use two::B;"),
        ("src/a/one/mod.rs", "mod part; use super::B; pub struct A(B);"),
        ("src/a/one/part.rs", "use crate::a::three::C; pub struct Part(C);"),
        ("src/a/two.rs", "pub struct B; fn f(_: crate::A) {}"),
        ("src/a/three.rs", "pub struct C;"),
    ];
    let sources = files.iter().map(|(file, text)| (file.into(), (*text).to_owned())).collect();
    let levels = levels(&super::tree::read(&sources, Path::new("src/lib.rs")));
    assert_eq!(levels.keys().collect::<Vec<_>>(), [&["a".to_owned()]]);
    let arrows = &levels[&["a".to_owned()][..]];
    let knots = knots(arrows);
    assert_eq!(knots, [["one".to_owned(), "two".to_owned()].into()]);
    assert_eq!(drawn(arrows, &knots[0]), "  one → two: B\n  two → one: A\n");
    assert_eq!(arrows["one"].len(), 2, "what a part of a room names the room names: {arrows:?}");
}

#[test]
fn head_and_use_of_a_room_are_compared() {
    let used = ["b".to_owned()].into();
    let text = "//! A room.\n// May use: b.\n// Begin with: `c.rs`.\n";
    assert_eq!(beyond_head("a", text, &used), "");
    assert_eq!(
        beyond_head("a", &text.replace(" b.", " b, d."), &used),
        "  a: its head names b, d; it uses b\n"
    );
    assert_eq!(beyond_head("a", &text.replace(" b.", " all other rooms."), &used), "");
    assert_eq!(
        beyond_head("a", &text.replace(" b.", " no other room."), &used),
        "  a: its head names ; it uses b\n"
    );
    assert_eq!(beyond_head("a", "//! A room.\n", &used), "  a: it does not say what it may use\n");
}
