//! Names: types are nouns, each stands for one type in its crate, and flags read as statements.
//!
//! Names that break these rules today stand in `names.txt`, by file, and may only shrink. With
//! `RINGSERVE_WRITE=1` the test writes that list again.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use syn::visit::{self, Visit};
use syn::{Attribute, Fields, Ident, Item, ItemMod, ItemStruct, Type, Visibility};

use super::workspace;

/// Last words of types that end as participles do, and are nouns or terms of the field.
const NOUNS: &[&str] = &[
    "Binding",
    "Blocking",
    "Chunked",
    "Connecting",
    "Draining",
    "Elapsed",
    "Encoding",
    "Feed",
    "Finding",
    "Framed",
    "Framing",
    "Heading",
    "Mapping",
    "Multiplexed",
    "Padding",
    "Pending",
    "Pipelined",
    "Reading",
    "Ring",
    "Routing",
    "Seed",
    "Setting",
    "Shared",
    "Started",
    "Stuffed",
    "String",
    "Throttling",
    "Timing",
    "Uring",
    "Warning",
];

/// Words that begin the name of a flag.
const PREFIXES: &[&str] = &["is_", "has_", "can_", "was_", "wants_", "needs_", "should_"];

/// Ends of types whose flags are settings.
const SETTINGS: &[&str] = &["Options", "Limits", "Config"];

const ADVICE: &str = "A type is a noun, and one of `pub(crate)` or wider occurs once in its crate. A field that is a flag begins \
     with is_, has_, can_, was_, wants_, needs_ or should_. Rename what is new; lower or remove the rows of what is gone \
     (RINGSERVE_WRITE=1 writes the list).";

/// Rows of the list: the rule with the place, and how many names there break it.
type Rows = BTreeMap<String, usize>;

#[derive(Default)]
struct Names {
    participles: usize,
    flags: usize,
    /// Types that others of the crate see.
    visible: Vec<String>,
}

impl Names {
    fn ty(&mut self, name: &Ident, visibility: &Visibility) {
        let name = name.to_string();
        let last = name.rfind(char::is_uppercase).map_or(&*name, |at| &name[at..]);
        let is_participle = last.ends_with("ed") || last.ends_with("ing");
        self.participles += usize::from(is_participle && !NOUNS.contains(&last));
        let is_visible = match visibility {
            Visibility::Public(_) => true,
            Visibility::Restricted(within) => within.path.is_ident("crate"),
            Visibility::Inherited => false,
        };
        if is_visible {
            self.visible.push(name);
        }
    }
}

impl Visit<'_> for Names {
    fn visit_item(&mut self, item: &Item) {
        match item {
            Item::Struct(ty) if !is_for_tests(&ty.attrs) => self.ty(&ty.ident, &ty.vis),
            Item::Enum(ty) if !is_for_tests(&ty.attrs) => self.ty(&ty.ident, &ty.vis),
            Item::Trait(ty) if !is_for_tests(&ty.attrs) => self.ty(&ty.ident, &ty.vis),
            Item::Type(ty) if !is_for_tests(&ty.attrs) => self.ty(&ty.ident, &ty.vis),
            _ => {}
        }
        visit::visit_item(self, item);
    }

    fn visit_item_mod(&mut self, item: &ItemMod) {
        if !is_for_tests(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_struct(&mut self, item: &ItemStruct) {
        let name = item.ident.to_string();
        let Fields::Named(fields) = &item.fields else { return };
        if is_for_tests(&item.attrs) || SETTINGS.iter().any(|end| name.ends_with(end)) {
            return;
        }
        let flags =
            fields.named.iter().filter(|field| is_flag(&field.ty)).filter_map(|field| field.ident.as_ref());
        let names = flags.map(ToString::to_string);
        self.flags += names.filter(|name| !PREFIXES.iter().any(|prefix| name.starts_with(prefix))).count();
    }
}

fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else { return false };
        list.path.is_ident("cfg") && list.tokens.to_string() == "test"
    })
}

/// True for `bool`, for an atomic one, and for a cell of either.
fn is_flag(ty: &Type) -> bool {
    let Type::Path(path) = ty else { return false };
    let Some(last) = path.path.segments.last() else { return false };
    match &last.arguments {
        syn::PathArguments::AngleBracketed(inner) => {
            matches!(&*last.ident.to_string(), "Cell" | "Rc" | "Arc")
                && inner.args.iter().any(|arg| matches!(arg, syn::GenericArgument::Type(ty) if is_flag(ty)))
        }
        _ => last.ident == "bool" || last.ident == "AtomicBool",
    }
}

/// The names of a crate's sources that break a rule, from this folder on.
fn read(folder: &Path, root: &Path, rows: &mut Rows, visible: &mut BTreeMap<String, usize>) {
    for path in fs::read_dir(folder).expect("a folder can be read").flatten().map(|entry| entry.path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() && name != "tests" {
            read(&path, root, rows, visible);
        } else if name.ends_with(".rs") && name != "tests.rs" {
            let names = names_of(&fs::read_to_string(&path).expect("a source is text"));
            let place = path.strip_prefix(root).expect("it is below").display();
            for (rule, count) in [("participle", names.participles), ("flag", names.flags)] {
                if count > 0 {
                    rows.insert(format!("{rule} {place}"), count);
                }
            }
            names.visible.into_iter().for_each(|name| *visible.entry(name).or_default() += 1);
        }
    }
}

fn names_of(text: &str) -> Names {
    let mut names = Names::default();
    names.visit_file(&syn::parse_file(text).expect("a source"));
    names
}

fn read_all() -> Rows {
    let root = workspace();
    let mut rows = Rows::new();
    for krate in fs::read_dir(root.join("crates")).expect("a folder").flatten().map(|entry| entry.path()) {
        let src = krate.join("src");
        if src.is_dir() {
            let name = krate.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let mut visible = BTreeMap::new();
            read(&src, root, &mut rows, &mut visible);
            let twice = visible.into_iter().filter(|(_, count)| *count > 1);
            rows.extend(twice.map(|(ty, count)| (format!("twice crates/{name} {ty}"), count)));
        }
    }
    rows
}

#[test]
fn names_are_nouns_and_statements() {
    let file = workspace().join("tests/structure/names.txt");
    let rows = read_all();
    let text: String = rows.iter().map(|(row, count)| format!("{row} {count}\n")).collect();
    if std::env::var_os("RINGSERVE_WRITE").is_some() {
        fs::write(&file, &text).expect("the list can be written");
    }
    let listed = fs::read_to_string(&file).expect("the list is there");
    let mut found = String::new();
    for line in text.lines().filter(|line| !listed.lines().any(|row| row == *line)) {
        let _ = writeln!(found, "  there is: {line}");
    }
    for row in listed.lines().filter(|row| !text.lines().any(|line| line == *row)) {
        let _ = writeln!(found, "  listed is: {row}");
    }
    assert!(found.is_empty(), "names and `names.txt` differ:\n{found}{ADVICE}");
}

#[test]
fn planted_names_are_found() {
    let names = names_of(
        "pub struct Told { closed: bool, is_open: Cell<bool>, ends: Arc<AtomicBool>, count: u32 }
         struct Framing; enum Looked {} pub(crate) trait Asks {} pub(super) type Queued = u8;
         pub struct LogOptions { json: bool }
         #[cfg(test)] mod tests { struct Planted { closed: bool } }",
    );
    assert_eq!((names.participles, names.flags), (2, 2));
    assert_eq!(names.visible, ["Told", "Asks", "LogOptions"]);
}
