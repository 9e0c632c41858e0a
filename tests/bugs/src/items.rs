//! The places of a source's items, by their names.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};

/// A name, as `function` or `Type::function`, and its place.
type Named = (String, Range<usize>);

#[derive(Default)]
struct Reader {
    /// The type or the trait that is being searched.
    owner: Option<String>,
    items: Vec<Named>,
}

/// A file of the tree.
pub struct Source {
    pub text: String,
    items: Vec<Named>,
}

impl Source {
    /// # Errors
    /// If it cannot be read, or is not Rust.
    fn read(file: &Path) -> Result<Source, String> {
        let text = fs::read_to_string(file).map_err(|error| error.to_string())?;
        let parsed = syn::parse_file(&text).map_err(|error| error.to_string())?;
        let mut reader = Reader::default();
        reader.visit_file(&parsed);
        Ok(Source { text, items: reader.items })
    }

    /// Places of the items of that name: several where a type has several traits with such a
    /// function.
    pub fn named(&self, name: &str) -> Vec<Range<usize>> {
        let mut places: Vec<_> =
            self.items.iter().filter(|item| item.0 == name).map(|item| item.1.clone()).collect();
        // Items inside another one are found there.
        let all = places.clone();
        let holds = |one: &Range<usize>, other: &Range<usize>| {
            one != other && one.start <= other.start && other.end <= one.end
        };
        places.retain(|place| !all.iter().any(|other| holds(other, place)));
        places
    }
}

/// The files of a tree, each of which is read once.
pub struct Sources {
    root: PathBuf,
    read: RefCell<HashMap<PathBuf, Rc<Source>>>,
}

impl Sources {
    pub fn new(root: &Path) -> Sources {
        Sources { root: root.to_owned(), read: RefCell::default() }
    }

    /// # Errors
    /// If it cannot be read, or is not Rust.
    pub fn get(&self, file: &Path) -> Result<Rc<Source>, String> {
        if let Some(source) = self.read.borrow().get(file) {
            return Ok(source.clone());
        }
        let source = Rc::new(Source::read(&self.root.join(file))?);
        self.read.borrow_mut().insert(file.to_owned(), source.clone());
        Ok(source)
    }
}

impl Reader {
    fn add(&mut self, name: &syn::Ident, item: &impl Spanned) {
        let name = match &self.owner {
            Some(owner) => format!("{owner}::{name}"),
            None => name.to_string(),
        };
        self.items.push((name, item.span().byte_range()));
    }

    fn within(&mut self, owner: Option<String>, visit: impl FnOnce(&mut Reader)) {
        let before = std::mem::replace(&mut self.owner, owner);
        visit(self);
        self.owner = before;
    }
}

impl<'a> Visit<'a> for Reader {
    fn visit_item_impl(&mut self, item: &'a syn::ItemImpl) {
        let owner = match &*item.self_ty {
            syn::Type::Path(path) => path.path.segments.last().map(|segment| segment.ident.to_string()),
            _ => None,
        };
        self.within(owner, |reader| visit::visit_item_impl(reader, item));
    }

    fn visit_item_trait(&mut self, item: &'a syn::ItemTrait) {
        self.add(&item.ident, item);
        self.within(Some(item.ident.to_string()), |reader| visit::visit_item_trait(reader, item));
    }

    fn visit_item_fn(&mut self, item: &'a syn::ItemFn) {
        self.within(None, |reader| {
            reader.add(&item.sig.ident, item);
            visit::visit_item_fn(reader, item);
        });
    }

    fn visit_impl_item_fn(&mut self, item: &'a syn::ImplItemFn) {
        self.add(&item.sig.ident, item);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'a syn::TraitItemFn) {
        self.add(&item.sig.ident, item);
        visit::visit_trait_item_fn(self, item);
    }

    fn visit_impl_item_const(&mut self, item: &'a syn::ImplItemConst) {
        self.add(&item.ident, item);
    }

    fn visit_item_const(&mut self, item: &'a syn::ItemConst) {
        self.add(&item.ident, item);
    }

    fn visit_item_static(&mut self, item: &'a syn::ItemStatic) {
        self.add(&item.ident, item);
    }

    fn visit_item_struct(&mut self, item: &'a syn::ItemStruct) {
        self.add(&item.ident, item);
    }

    fn visit_item_enum(&mut self, item: &'a syn::ItemEnum) {
        self.add(&item.ident, item);
    }

    fn visit_item_macro(&mut self, item: &'a syn::ItemMacro) {
        if let Some(name) = item.ident.as_ref().or(item.mac.path.get_ident()) {
            self.add(name, item);
        }
    }
}
