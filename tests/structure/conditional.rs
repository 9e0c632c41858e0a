//! Features decide which items there are, not what the body of a function does. A condition inside
//! a body splits it into one program for each set of features, of which a reader sees all at once
//! and a build checks one.

use std::collections::BTreeMap;
use std::fmt::Write;

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, Block, ImplItemFn, ItemFn, ItemMod};

use super::tree::Sources;
use super::{collect, workspace};

/// Conditions on a feature inside bodies, by file. The list may only shrink.
const INSIDE_BODIES: [(&str, usize); 5] = [
    ("crates/base/src/clock.rs", 4),
    ("crates/nats/src/connection.rs", 1),
    ("crates/nats/src/options.rs", 2),
    ("crates/server/src/error.rs", 2),
    ("crates/tls/src/provider.rs", 3),
];

const ADVICE: &str = "Put the condition on an item: a type whose twin without the feature has the same methods, which do nothing, \
     or a separate function.";

/// The conditions on a feature inside the bodies of a file.
#[derive(Default)]
struct Conditions {
    /// Bodies that surround what is read.
    depth: usize,
    count: usize,
}

impl Conditions {
    fn of(text: &str) -> usize {
        let mut conditions = Self::default();
        conditions.visit_file(&syn::parse_file(text).expect("a source"));
        conditions.count
    }

    /// Counts the conditions in what a macro is given.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut is_condition = false;
        for token in tokens {
            match token {
                TokenTree::Ident(name) => is_condition = name == "cfg",
                TokenTree::Punct(punct) if punct.as_char() == '!' => {}
                TokenTree::Group(group) if is_condition => {
                    self.count += usize::from(names_feature(&group.stream()));
                    is_condition = false;
                }
                TokenTree::Group(group) => self.tokens(group.stream()),
                _ => is_condition = false,
            }
        }
    }
}

impl<'ast> Visit<'ast> for Conditions {
    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        if !is_for_tests(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        if !is_for_tests(&item.attrs) {
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast ImplItemFn) {
        if !is_for_tests(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_block(&mut self, block: &'ast Block) {
        self.depth += 1;
        visit::visit_block(self, block);
        self.depth -= 1;
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        let is_condition = attribute.path().is_ident("cfg") || attribute.path().is_ident("cfg_attr");
        if self.depth > 0
            && is_condition
            && let syn::Meta::List(list) = &attribute.meta
        {
            self.count += usize::from(names_feature(&list.tokens));
        }
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        if self.depth == 0 {
            return;
        }
        if call.path.is_ident("cfg") {
            self.count += usize::from(names_feature(&call.tokens));
        } else {
            self.tokens(call.tokens.clone());
        }
    }
}

/// True if a condition is on a feature, also inside `any`, `all` and `not`.
fn names_feature(tokens: &TokenStream) -> bool {
    tokens.clone().into_iter().any(|token| match token {
        TokenTree::Ident(name) => name == "feature",
        TokenTree::Group(group) => names_feature(&group.stream()),
        _ => false,
    })
}

fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else { return false };
        list.path.is_ident("cfg") && list.tokens.to_string() == "test"
    })
}

#[test]
fn features_decide_which_items_there_are() {
    let root = workspace();
    let mut sources = Sources::new();
    collect(&root.join("crates"), &mut sources);
    collect(&root.join("src"), &mut sources);
    let mut counts = BTreeMap::new();
    for (path, text) in sources {
        let place = path.strip_prefix(root).expect("it is below").display().to_string();
        let is_test =
            place.contains("/tests/") || place.ends_with("/tests.rs") || place.contains("/benches/");
        let count = if is_test || !text.contains("feature") { 0 } else { Conditions::of(&text) };
        if count > 0 {
            counts.insert(place, count);
        }
    }
    let listed: BTreeMap<String, usize> =
        INSIDE_BODIES.iter().map(|(file, count)| ((*file).to_owned(), *count)).collect();
    let mut found = String::new();
    for (file, count) in counts.iter().filter(|(file, count)| listed.get(*file) != Some(count)) {
        let _ = writeln!(found, "  (\"{file}\", {count}),");
    }
    for file in listed.keys().filter(|file| !counts.contains_key(*file)) {
        let _ = writeln!(found, "  {file}: none is left");
    }
    assert!(
        found.is_empty(),
        "conditions on features inside bodies differ from the list:\n{found}total {}\n{ADVICE}",
        counts.values().sum::<usize>()
    );
}

#[test]
fn planted_conditions_in_bodies_are_counted() {
    let count = Conditions::of(
        r#"#[cfg(feature = "item")] fn item() {}
           struct Fields { #[cfg(feature = "field")] field: u8 }
           fn body() -> Fields {
               #[cfg(feature = "one")] let one = 1;
               if cfg!(any(feature = "two", test)) { report(one); }
               #[cfg(target_os = "linux")] let other = 2;
               text!("{}", cfg!(feature = "three"), { #[cfg(not(feature = "four"))] four() });
               Fields { #[cfg(feature = "five")] field: 5 }
           }
           #[cfg(test)] mod tests { fn body() { #[cfg(feature = "six")] let six = 6; } }"#,
    );
    assert_eq!(count, 5);
}
