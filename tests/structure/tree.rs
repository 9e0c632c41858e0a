//! The modules of a crate: which file each one is in, what it defines, what it imports, and what it
//! names.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, Item, UseTree, Visibility};

/// The text of files.
pub type Sources = BTreeMap<PathBuf, String>;

/// A path as written: `crate`, `super`, `self` or a name, and names.
pub type Names = Vec<String>;

#[derive(Default)]
pub struct Module {
    pub file: PathBuf,
    /// Names of items, but for modules.
    pub defines: BTreeSet<String>,
    /// The path that each imported name stands for.
    pub imports: HashMap<String, Names>,
    /// Paths that all names are imported from.
    pub globs: Vec<Names>,
    /// Every path of two names and more that is used, imports among them.
    pub uses: BTreeSet<Names>,
    /// Paths of `pub use`.
    pub passes_on: BTreeSet<Names>,
    /// True within a `pub use`, which passes on what the module itself may not use.
    is_passing_on: bool,
}

/// Modules by their path from the root, which is empty.
pub type Modules = HashMap<Names, Module>;

/// Reads a crate from its root file on. What is compiled for tests alone is left out.
pub fn read(sources: &Sources, root: &Path) -> Modules {
    let mut modules = Modules::new();
    let folder = root.parent().expect("a file is in a folder").to_owned();
    Reader { sources, modules: &mut modules }.file(root, &folder, Vec::new());
    modules
}

struct Reader<'a> {
    sources: &'a Sources,
    modules: &'a mut Modules,
}

impl Reader<'_> {
    /// `folder` is where the files of its modules are.
    fn file(&mut self, file: &Path, folder: &Path, path: Names) {
        let text = &self.sources[file];
        let parsed = syn::parse_file(text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        self.module(&parsed.items, file, folder, path);
    }

    fn module(&mut self, items: &[Item], file: &Path, folder: &Path, path: Names) {
        let mut module = Module { file: file.to_owned(), ..Module::default() };
        for item in items {
            let Item::Mod(inner) = item else {
                module.visit_item(item);
                continue;
            };
            if is_for_tests(&inner.attrs) {
                continue;
            }
            let name = inner.ident.to_string();
            let (folder, path) = (folder.join(&name), [path.clone(), vec![name.clone()]].concat());
            match &inner.content {
                Some((_, items)) => self.module(items, file, &folder, path),
                None => {
                    let places = [folder.with_extension("rs"), folder.join("mod.rs")];
                    let found = places.iter().find(|place| self.sources.contains_key(*place));
                    let found = found.unwrap_or_else(|| panic!("{}: no file of mod {name}", file.display()));
                    self.file(found, &folder, path);
                }
            }
        }
        self.modules.insert(path, module);
    }
}

impl Module {
    fn import(&mut self, tree: &UseTree, mut path: Names) {
        match tree {
            UseTree::Path(tree) => {
                path.push(tree.ident.to_string());
                self.import(&tree.tree, path);
            }
            UseTree::Name(tree) => self.import_as(tree.ident.to_string(), tree.ident.to_string(), path),
            UseTree::Rename(tree) => self.import_as(tree.ident.to_string(), tree.rename.to_string(), path),
            UseTree::Glob(_) => {
                self.use_or_pass_on(&path);
                self.globs.push(path);
            }
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.import(tree, path.clone())),
        }
    }

    fn import_as(&mut self, name: String, known_as: String, mut path: Names) {
        let known_as = match (name.as_str(), path.last()) {
            ("self", Some(module)) if known_as == "self" => module.clone(),
            _ => known_as,
        };
        if name != "self" {
            path.push(name);
        }
        self.use_or_pass_on(&path);
        self.imports.insert(known_as, path);
    }

    fn use_or_pass_on(&mut self, path: &Names) {
        let paths = if self.is_passing_on { &mut self.passes_on } else { &mut self.uses };
        paths.insert(path.clone());
    }

    /// The paths in what a macro is given.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path = Names::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(name) => {
                    if colons != 2 {
                        self.uses.insert(std::mem::take(&mut path));
                    }
                    path.push(name.to_string());
                    colons = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                other => {
                    self.uses.insert(std::mem::take(&mut path));
                    colons = 0;
                    if let TokenTree::Group(group) = other {
                        self.tokens(group.stream());
                    }
                }
            }
        }
        self.uses.insert(path);
    }

    fn define(&mut self, item: &Item) {
        let name = match item {
            Item::Const(item) => &item.ident,
            Item::Enum(item) => &item.ident,
            Item::Fn(item) => &item.sig.ident,
            Item::Static(item) => &item.ident,
            Item::Struct(item) => &item.ident,
            Item::Trait(item) => &item.ident,
            Item::Type(item) => &item.ident,
            Item::Union(item) => &item.ident,
            Item::Macro(syn::ItemMacro { ident: Some(ident), .. }) => ident,
            _ => return,
        };
        self.defines.insert(name.to_string());
    }
}

impl<'ast> Visit<'ast> for Module {
    fn visit_item(&mut self, item: &'ast Item) {
        if is_for_tests(attributes(item)) {
            return;
        }
        self.define(item);
        if let Item::Use(item) = item {
            self.is_passing_on = !matches!(item.vis, Visibility::Inherited);
            self.import(&item.tree, Names::new());
        }
        visit::visit_item(self, item);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.uses.insert(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.tokens(call.tokens.clone());
        visit::visit_macro(self, call);
    }

    fn visit_vis_restricted(&mut self, _: &'ast syn::VisRestricted) {
        // `pub(in path)` names a module and needs nothing of it.
    }
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// True for `#[cfg(test)]` and `#[cfg(all(test, ..))]`.
fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().filter(|attribute| attribute.path().is_ident("cfg")).any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else { return false };
        let text = list.tokens.to_string();
        text == "test" || text.starts_with("all") && text.contains("test") && !text.contains("not")
    })
}
