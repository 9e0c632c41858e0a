//! The path of a request, in the one form in which it is matched and sent.
//!
//! Servers differ in what they make of `/a/../b`, `/a/%2e%2e/b`, `//b` or `/a%2fb`. A rule for
//! `/admin/*` is worth nothing if the gateway and the upstream take one path for two, so only a
//! form is passed on that means the same to both.

use std::borrow::Cow;

/// A path as it is matched.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PathForm<'p> {
    /// The form that is matched, and sent.
    Normal(Cow<'p, str>),
    /// A path of which servers make different things; for routes that take paths as they are, and
    /// no others.
    Ambiguous,
}

/// Brings a path into the form in which it is matched: `.` and `..` are resolved, also where they
/// are written as `%2e`, and characters that need no escape have none.
pub(crate) fn normalize(path: &str) -> PathForm<'_> {
    if !path.starts_with('/') {
        return PathForm::Ambiguous;
    }
    let bytes = path.as_bytes();
    // Most paths are in that form: one look, and no copy.
    let is_plain = bytes
        .windows(2)
        .all(|pair| is_plain_byte(pair[0]) && !(pair[0] == b'/' && matches!(pair[1], b'/' | b'.')));
    if is_plain && bytes.last().is_some_and(|last| is_plain_byte(*last)) {
        return PathForm::Normal(Cow::Borrowed(path));
    }
    match decoded(bytes).filter(|path| !path.split('/').any(is_dots_with_parameters)) {
        Some(decoded) => PathForm::Normal(Cow::Owned(without_dots(&decoded))),
        None => PathForm::Ambiguous,
    }
}

/// A byte that begins no escape and is no character of which servers make different things.
fn is_plain_byte(byte: u8) -> bool {
    byte.is_ascii_graphic() && !matches!(byte, b'%' | b'\\' | b'#' | b'?')
}

/// The path without needless escapes. `None` if it is ambiguous.
fn decoded(path: &[u8]) -> Option<String> {
    let mut out = String::with_capacity(path.len());
    let mut at = 0;
    while let Some(byte) = path.get(at).copied() {
        let byte = match byte {
            b'%' => {
                let hex = path.get(at + 1..at + 3)?;
                let value = hex_digit(hex[0])? << 4 | hex_digit(hex[1])?;
                at += 3;
                match value {
                    b'/' | b'\\' | 0 => return None,
                    b'-' | b'.' | b'_' | b'~' => value,
                    _ if value.is_ascii_alphanumeric() => value,
                    _ => {
                        out.push('%');
                        out.extend(hex.iter().map(|digit| char::from(digit.to_ascii_uppercase())));
                        continue;
                    }
                }
            }
            _ if is_plain_byte(byte) => {
                at += 1;
                byte
            }
            _ => return None,
        };
        if byte == b'/' && out.ends_with('/') {
            return None;
        }
        out.push(char::from(byte));
    }
    Some(out)
}

fn hex_digit(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).map(|value| value as u8)
}

/// True if a segment is `.` or `..` to some server.
pub(crate) fn has_dots(path: &str) -> bool {
    path.split('/').any(|segment| {
        let segment = segment.replace("%2e", ".").replace("%2E", ".").replace("%3b", "%3B");
        matches!(&*segment, "." | "..") || is_dots_with_parameters(&segment)
    })
}

/// True for `..;x` and its like. Some servers cut the parameters off before they resolve dots.
fn is_dots_with_parameters(segment: &str) -> bool {
    let rest = segment.strip_prefix("..").or_else(|| segment.strip_prefix('.'));
    rest.is_some_and(|rest| rest.starts_with(';') || rest.starts_with("%3B"))
}

/// Resolves `.` and `..`, by RFC 3986, 5.2.4. Nothing is above the root.
fn without_dots(path: &str) -> String {
    let mut segments: Vec<&str> = Vec::new();
    let mut is_folder = false;
    for segment in path.split('/').skip(1) {
        is_folder = matches!(segment, "." | "..");
        match segment {
            "." => {}
            ".." => _ = segments.pop(),
            _ => segments.push(segment),
        }
    }
    let mut out = String::with_capacity(path.len());
    for segment in &segments {
        out.push('/');
        out.push_str(segment);
    }
    if is_folder || out.is_empty() {
        out.push('/');
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn normal(path: &str) -> Option<String> {
        match normalize(path) {
            PathForm::Normal(path) => Some(path.into_owned()),
            PathForm::Ambiguous => None,
        }
    }

    #[test]
    fn paths_that_name_one_thing_have_one_form() {
        for (path, form) in [
            ("/", "/"),
            ("/a", "/a"),
            ("/a/", "/a/"),
            ("/a/.", "/a/"),
            ("/a/./b", "/a/b"),
            ("/a/../b", "/b"),
            ("/a/b/..", "/a/"),
            ("/..", "/"),
            ("/../../etc/passwd", "/etc/passwd"),
            ("/a/%2e%2E/b", "/b"),
            ("/a/.%2e/b", "/b"),
            ("/%2e", "/"),
            ("/%61dmin", "/admin"),
            ("/a%20b", "/a%20b"),
            ("/a%c3%a4", "/a%C3%A4"),
            ("/.well-known/x", "/.well-known/x"),
            ("/a..b/...", "/a..b/..."),
            ("/a;b=c/d", "/a;b=c/d"),
            ("/a%3fb%23c%25", "/a%3Fb%23c%25"),
        ] {
            assert_eq!(normal(path).as_deref(), Some(form), "{path}");
        }
    }

    #[test]
    fn paths_of_which_servers_make_different_things_have_none() {
        for path in [
            "",
            "a",
            "*",
            "//",
            "//a",
            "/a//b",
            "/a/%2f",
            "/a%2Fb",
            "/a%5cb",
            "/a\\b",
            "/a%00",
            "/a#b",
            "/a%",
            "/a%2",
            "/a%zz",
            "/a b",
            "/a\u{e4}",
            "/a/%2e%2e//b",
            "/a\u{7f}",
            "/a?b",
            "/a/..;/b",
            "/a/.;x=1/b",
            "/a/%2e%2e;x",
            "/a/..%3b/b",
        ] {
            assert_eq!(normalize(path), PathForm::Ambiguous, "{path}");
        }
    }

    proptest! {
        #[test]
        fn form_of_a_path_is_its_own_and_has_no_dots(path in "/([a.%2eEfF5cC0/~;]|%2e|/\\.\\.){0,24}") {
            if let Some(form) = normal(&path) {
                prop_assert_eq!(normal(&form), Some(form.clone()));
                prop_assert!(form.starts_with('/') && !form.contains("//"));
                prop_assert!(!form.split('/').any(|segment| matches!(segment, "." | "..")));
                let lower = form.to_ascii_lowercase();
                prop_assert!(!lower.contains("%2f") && !lower.contains("%2e") && !lower.contains("%5c"));
            }
        }
    }
}
