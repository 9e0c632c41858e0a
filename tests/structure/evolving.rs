//! Public types can grow without breaking users: another variant, field or close reason is no new
//! major version.
//!
//! Read from the sources, since no stable compiler reports the exports of a crate: a type is public
//! here if a `pub use` of the server crate, or of a module that it exports whole, has its name, or
//! if it is defined in one of the crate's public modules.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use syn::visit::{self, Visit};
use syn::{Attribute, Fields, Item, UseTree, Visibility};

/// Enums of which a caller has to know every variant, and why there will be no other one.
const COMPLETE: &[(&str, &str)] = &[
    ("ByteOrder", "bytes have two orders"),
    ("CopySide", "two streams are copied"),
    ("Cursor", "a place is these two numbers, and clients bring them back"),
    ("Cut", "a framing makes it, and makes all of it"),
    ("Decode", "a framing makes it, and makes all of it"),
    ("DotPart", "a service takes them apart, and there is nothing else in the stream"),
    ("DotState", "the stream has lines and texts, and nothing else"),
    ("FileRefusal", "hidden: the doctor makes it"),
    ("Kind", "a message of WebSocket is a text or binary"),
    ("Lived", "hidden: the server makes it for the doctor"),
    ("Message", "a message of WebSocket is a text or binary"),
    ("Payload", "callers make it"),
    ("PeerCredentials", "the kernel tells these three"),
    (
        "PushError",
        "what was not pushed is full, gone or unframed, and the caller does something else for each",
    ),
    ("Rings", "hidden: the server makes it for the doctor"),
    ("SendError", "the same, with the message"),
    ("SendProgress", "that of a simulated ring, which simulated kernels take apart"),
    ("Setup", "hidden: the server makes it for the doctor, with each field"),
    ("TransportEvent", "a channel makes it, and one that stands upon another takes all of it apart"),
    ("Version", "the protocol of Redis has these two, and a service may count with their numbers"),
];

/// The public items of a crate, by its sources.
#[derive(Default)]
struct Surface {
    /// The way in which each type breaks its users.
    types: BTreeMap<String, &'static str>,
    /// Names that are exported.
    names: BTreeSet<String>,
    /// Items of public modules need no `pub use`.
    is_in_public_module: bool,
    broken: Vec<String>,
}

fn is_pub(vis: &Visibility) -> bool {
    matches!(vis, Visibility::Public(_))
}

fn has(attributes: &[Attribute], name: &str) -> bool {
    attributes.iter().any(|attribute| attribute.path().is_ident(name))
}

impl Surface {
    fn export(&mut self, tree: &UseTree) {
        match tree {
            UseTree::Path(tree) => self.export(&tree.tree),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.export(tree)),
            UseTree::Name(tree) => drop(self.names.insert(tree.ident.to_string())),
            UseTree::Rename(tree) => drop(self.names.insert(tree.rename.to_string())),
            UseTree::Glob(_) => {}
        }
    }

    fn define(&mut self, name: &syn::Ident, breaks: Option<&'static str>) {
        if self.is_in_public_module {
            self.names.insert(name.to_string());
        }
        if let Some(breaks) = breaks {
            self.types.insert(name.to_string(), breaks);
        }
    }

    fn read(&mut self, text: &str, is_in_public_module: bool) {
        self.is_in_public_module = is_in_public_module;
        self.visit_file(&syn::parse_file(text).expect("a source"));
    }

    /// A line for each type that could not grow.
    fn complaints(&self) -> String {
        let is_known = |name: &str| COMPLETE.iter().any(|(known, _)| *known == name);
        let types = self.types.iter().filter(|(name, _)| self.names.contains(*name) && !is_known(name));
        let types = types.map(|(name, breaks)| format!("  {name}: {breaks}\n"));
        types.chain(self.broken.iter().map(|what| format!("  {what}\n"))).collect()
    }
}

impl<'ast> Visit<'ast> for Surface {
    fn visit_item(&mut self, item: &'ast Item) {
        match item {
            Item::Use(item) if is_pub(&item.vis) => self.export(&item.tree),
            Item::Enum(item) if is_pub(&item.vis) => {
                let grows = has(&item.attrs, "non_exhaustive");
                self.define(&item.ident, (!grows).then_some("a variant more breaks those who match it"));
            }
            Item::Struct(item) if is_pub(&item.vis) => {
                let grows = has(&item.attrs, "non_exhaustive") || matches!(item.fields, Fields::Unnamed(_));
                let is_open =
                    !grows && !item.fields.is_empty() && item.fields.iter().all(|field| is_pub(&field.vis));
                self.define(
                    &item.ident,
                    is_open.then_some("a field more breaks those who make it or take it apart"),
                );
            }
            _ => {}
        }
        visit::visit_item(self, item);
    }

    fn visit_impl_item_const(&mut self, item: &'ast syn::ImplItemConst) {
        if is_pub(&item.vis) && item.ident == "COUNT" {
            self.broken.push(
                "COUNT: a public number of variants changes with each of them; offer an iterator".to_owned(),
            );
        }
    }
}

#[test]
fn public_types_can_grow() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this package is in the workspace");
    let mut surface = Surface::default();
    for folder in [
        "admission",
        "base",
        "buf",
        "core",
        "drivers",
        "gateway",
        "redis",
        "server",
        "simkernel",
        "topics",
        "upstream",
    ] {
        let mut sources = super::tree::Sources::new();
        let src = root.join("crates").join(folder).join("src");
        super::collect(&src, &mut sources);
        for (file, text) in &sources {
            let exports = ["admission", "base", "gateway", "redis", "server", "topics", "upstream"]
                .contains(&folder)
                || file.ends_with("framing/mod.rs");
            let names = (!exports).then(|| surface.names.clone());
            let public =
                ["codec/mod.rs", "stats.rs", "tower.rs"].iter().any(|public| *file == src.join(public));
            surface.read(text, folder == "server" && public);
            if let Some(names) = names {
                surface.names = names;
            }
        }
    }
    let found = surface.complaints();
    assert!(
        found.is_empty(),
        "public types that cannot grow (#[non_exhaustive], or a reason in COMPLETE):\n{found}"
    );
    for (name, _) in COMPLETE {
        assert!(surface.types.contains_key(*name), "{name} is no public type that is complete");
    }
}

#[test]
fn planted_type_that_cannot_grow_is_found() {
    let mut surface = Surface::default();
    surface.read(
        "pub use a::{Open, Grows, Options, Hidden}; pub enum Open { A } #[non_exhaustive] pub enum Grows { A }
         pub struct Options { pub a: u8 } pub struct Hidden { pub a: u8, b: u8 } pub enum Inner { A }
         impl Open { pub const COUNT: usize = 1; }",
        false,
    );
    let found = surface.complaints();
    let names: Vec<&str> = found.lines().map(|line| line.trim().split(':').next().expect("a name")).collect();
    assert_eq!(names, ["Open", "Options", "COUNT"]);
}
