//! No rooms of a crate name each other in a circle. A room is a module at the top of its crate, with all that is below it.
//!
//! Room `a` names room `b` where a path begins with `crate::b`, however it is written: in a `use`, a `pub use`, inline, or in
//! what a macro is given.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use super::tree::{Modules, Names};

/// Rooms that are still tied, by crate. The list stays empty.
const TIED: [(&str, usize); 0] = [];

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

/// A path from the root of the crate on; `None` for one that begins with a name of its module or of another crate.
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
