//! An error that `main` returns is printed by `Debug`, and so is one on which `unwrap` is called:
//! that is the text of `Display`. And a method that needs a feature says so where the feature is
//! off.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::collect;
use crate::tree::Sources;

/// Crates with errors that users meet.
const CRATES: [&str; 8] = ["buf", "core", "drivers", "gateway", "server", "tls", "upstream", "websocket"];

/// Types in a source that are errors, and those whose `Debug` is `Display`.
fn errors(text: &str) -> (BTreeSet<&str>, BTreeSet<&str>) {
    fn head(text: &str) -> &str {
        text.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default()
    }
    let is_impl = |line: &&str| line.starts_with("impl") && line.contains("Error for ");
    let all = text.lines().filter(is_impl).filter_map(|line| line.split("Error for ").nth(1)).map(head);
    let shown = text.lines().filter_map(|line| line.split("debug_is_display!(").nth(1)).map(head);
    (all.collect(), shown.collect())
}

#[test]
fn errors_that_leave_main_read_as_sentences() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut sources = Sources::new();
    CRATES.iter().for_each(|name| collect(&root.join("crates").join(name).join("src"), &mut sources));
    let mut count = 0;
    let mut found = Vec::new();
    for (file, text) in &sources {
        let (all, shown) = errors(text);
        count += all.len();
        found.extend(all.difference(&shown).map(|name| format!("{}: {name}", file.display())));
    }
    assert!(count > 30, "{count} errors");
    assert!(found.is_empty(), "their `Debug` by ringserve_buf::debug_is_display!: {found:#?}");
}

#[test]
fn planted_error_with_a_debug_of_its_own_is_found() {
    let text = "#[derive(Debug)]\npub struct Bad;\nimpl<E: Display> std::error::Error for Bad<E> {}\n";
    let (all, shown) = errors(text);
    assert_eq!((all.into_iter().collect::<Vec<_>>(), shown.len()), (vec!["Bad"], 0));
    let good = "ringserve_buf::debug_is_display!(Good<E>, [E]);\nimpl core::error::Error for Good {}";
    let (all, shown) = errors(good);
    assert_eq!(all, shown);
}

/// Methods that a feature adds to types that are there without it, and where.
const FEATURES: [(&str, &str); 4] = [
    ("admin", "admin/mod.rs"),
    ("metrics", "metrics.rs"),
    ("tls", "tls.rs"),
    ("websocket", "websocket/mod.rs"),
];

/// The methods of others' types in a source, as `Type::method`.
fn methods(text: &str) -> BTreeSet<String> {
    let others = ["Server", "Endpoint", "ServerControl", "ServerHandle", "Cx", "Opening", "Stream"];
    let mut found = BTreeSet::new();
    for item in syn::parse_file(text).expect("a source").items {
        let syn::Item::Impl(block) = item else { continue };
        let (None, syn::Type::Path(of)) = (&block.trait_, &*block.self_ty) else { continue };
        let Some(of) = of.path.segments.last().map(|last| last.ident.to_string()) else { continue };
        if !others.contains(&&*of) {
            continue;
        }
        for item in block.items {
            if let syn::ImplItem::Fn(method) = item
                && matches!(method.vis, syn::Visibility::Public(_))
            {
                found.insert(format!("{of}::{}", method.sig.ident));
            }
        }
    }
    found
}

/// The methods for a feature that is off, by the part of `off.rs` about it.
fn stubs(text: &str, feature: &str) -> BTreeSet<String> {
    let begin = format!("#[cfg(not(feature = \"{feature}\"))]\noff! {{");
    let part = text.split(&begin).nth(1).and_then(|rest| rest.split("\n}").next()).unwrap_or_default();
    let mut found = BTreeSet::new();
    for line in part.lines().filter_map(|line| line.trim().strip_prefix("impl [")) {
        let of = line.split("] ").nth(1).unwrap_or_default();
        let name = of.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
        let named = line.split('(').filter_map(|before| before.rsplit([' ', '{']).next());
        let names = named.filter(|word| !word.is_empty() && !word.contains([')', ';', '<']));
        found.extend(names.map(|method| format!("{name}::{method}")));
    }
    found
}

#[test]
fn method_of_a_feature_that_is_off_names_the_feature() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let src = root.join("crates/server/src");
    let read = |file: &str| fs::read_to_string(src.join(file)).expect("a source");
    let off = read("off.rs");
    let manifest = fs::read_to_string(root.join("Cargo.toml")).expect("a manifest");
    for (feature, file) in FEATURES {
        let (there, named) = (methods(&read(file)), stubs(&off, feature));
        assert!(!there.is_empty(), "{file}");
        let missing: Vec<_> = there.difference(&named).collect();
        assert!(missing.is_empty(), "without the feature {feature} nothing in off.rs tells of {missing:?}");
    }
    let named = off.split("--features ").skip(1).filter_map(|rest| rest.split('`').next());
    for feature in named {
        assert!(manifest.contains(&format!("\n{feature} = [")), "off.rs names {feature}, and there is none");
    }
}
