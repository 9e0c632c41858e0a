//! Arguments of MAIL and RCPT: a path between `<` and `>`, and parameters, as RFC 5321, 4.1.2,
//! writes them.

use std::net::{Ipv4Addr, Ipv6Addr};

/// Bytes of the part of a mailbox before its `@`, of its domain, and of a path at most: RFC 5321,
/// 4.5.3.1, wants no less.
const LOCAL_BYTES_MAX: usize = 64;
const DOMAIN_BYTES_MAX: usize = 255;
const PATH_BYTES_MAX: usize = 256;

/// A path and the parameters behind it.
#[derive(Debug, PartialEq, Eq)]
pub struct Addressed<'a> {
    /// A mailbox as it was written, without a route before it; empty in `<>`.
    pub mailbox: &'a str,
    /// Each with its value. Names are in any case.
    pub params: Vec<(&'a str, Option<&'a str>)>,
}

impl<'a> Addressed<'a> {
    /// Reads what follows the verb: `name`, in any case, a path, and parameters. Spaces before `<`
    /// are accepted: many clients put one there.
    pub fn read(name: &str, text: &'a str) -> Option<Addressed<'a>> {
        let (found, rest) = text.split_at_checked(name.len())?;
        let whole = rest.trim_start().strip_prefix('<').filter(|_| found.eq_ignore_ascii_case(name))?;
        let mailbox_and_rest = without_route(whole)?;
        // A route leads to a mailbox.
        let len = if whole.starts_with('>') { 0 } else { mailbox_len(mailbox_and_rest)? };
        let (mailbox, rest) = mailbox_and_rest.split_at(len);
        let rest = rest.strip_prefix('>')?;
        let path_bytes = whole.len() - rest.len() + 1;
        let params = rest.split_terminator(' ').skip(1).map(param).collect::<Option<_>>()?;
        let is_apart = rest.is_empty() || rest.starts_with(' ');
        (is_apart && path_bytes <= PATH_BYTES_MAX).then_some(Addressed { mailbox, params })
    }
}

/// A route (`@one,@two:`) is read, and no use is made of it.
fn without_route(path: &str) -> Option<&str> {
    let mut rest = path;
    while let Some(host) = rest.strip_prefix('@') {
        rest = &host[domain_len(host)?..];
        match rest.split_at_checked(1)? {
            (",", next) if next.starts_with('@') => rest = next,
            (":", mailbox) => return Some(mailbox),
            _ => return None,
        }
    }
    Some(rest)
}

/// Bytes of the mailbox that a text begins with. `Postmaster` alone is one.
fn mailbox_len(text: &str) -> Option<usize> {
    let local = if text.starts_with('"') { quoted_len(text)? } else { dotted_len(text, is_atom)? };
    match text[local..].strip_prefix('@') {
        _ if local > LOCAL_BYTES_MAX => None,
        Some(domain) => Some(local + 1 + domain_len(domain)?),
        None => text[..local].eq_ignore_ascii_case("postmaster").then_some(local),
    }
}

/// Bytes of the text in quotes that a text begins with. A backslash stands before any character,
/// and has to before two.
fn quoted_len(text: &str) -> Option<usize> {
    let mut bytes = text.bytes().enumerate().skip(1);
    while let Some((at, byte)) = bytes.next() {
        match byte {
            b'"' => return Some(at + 1),
            b'\\' => {
                bytes.next()?;
            }
            _ => {}
        }
    }
    None
}

/// Bytes of the words between dots that a text begins with.
fn dotted_len(text: &str, is_of_word: impl Fn(u8) -> bool) -> Option<usize> {
    let len = text.bytes().position(|byte| byte != b'.' && !is_of_word(byte)).unwrap_or(text.len());
    text[..len].split('.').all(|word| !word.is_empty()).then_some(len)
}

fn is_atom(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-/=?^_`{|}~".contains(&byte)
}

/// Bytes of the domain that a text begins with: names between dots, or an address in brackets.
fn domain_len(text: &str) -> Option<usize> {
    let len = match text.strip_prefix('[') {
        Some(literal) => {
            let literal = &literal[..literal.find(']')?];
            let six = literal.split_at_checked(5).filter(|(tag, _)| tag.eq_ignore_ascii_case("IPv6:"));
            let is_address = match six {
                Some((_, address)) => address.parse::<Ipv6Addr>().is_ok(),
                None => literal.parse::<Ipv4Addr>().is_ok(),
            };
            is_address.then_some(literal.len() + 2)?
        }
        None => {
            let len = dotted_len(text, |byte| byte.is_ascii_alphanumeric() || byte == b'-')?;
            let are_names = text[..len].split('.').all(|name| !name.starts_with('-') && !name.ends_with('-'));
            are_names.then_some(len)?
        }
    };
    (len <= DOMAIN_BYTES_MAX).then_some(len)
}

/// A parameter: a keyword, and a value behind `=` if there is one.
fn param(text: &str) -> Option<(&str, Option<&str>)> {
    let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
    let is_name = !name.is_empty()
        && !name.starts_with('-')
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    let is_value = value.is_none_or(|value| !value.is_empty() && !value.contains('='));
    (is_name && is_value).then_some((name, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mailbox(path: &str) -> Option<&str> {
        Addressed::read("TO:", path).map(|read| read.mailbox)
    }

    #[test]
    fn mailbox_is_read_as_the_standard_writes_it() {
        let long = format!("{}@{}", "l".repeat(64), "d".repeat(63));
        for (path, found) in [
            ("To:<b@y.example>", "b@y.example"),
            ("to: <b@y>", "b@y"),
            ("TO:<>", ""),
            // Quotes may hold what ends a path otherwise, and are no part of what is compared, but
            // of what is kept.
            (r#"TO:<"a>b"@y>"#, r#""a>b"@y"#),
            (r#"TO:<"a \"b\\"@y>"#, r#""a \"b\\"@y"#),
            (r#"TO:<""@y>"#, r#"""@y"#),
            (r#"TO:<"a@b"@y>"#, r#""a@b"@y"#),
            ("TO:<a.b+c!#$%&'*-/=?^_`{|}~@y>", "a.b+c!#$%&'*-/=?^_`{|}~@y"),
            ("TO:<b@[192.0.2.1]>", "b@[192.0.2.1]"),
            ("TO:<b@[IPv6:2001:db8::1]>", "b@[IPv6:2001:db8::1]"),
            ("TO:<@one.example,@[192.0.2.1]:b@y>", "b@y"),
            ("TO:<Postmaster>", "Postmaster"),
            ("TO:<POSTMASTER>", "POSTMASTER"),
            (&format!("TO:<{long}>"), &long),
        ] {
            assert_eq!(mailbox(path), Some(found), "{path}");
        }
        let [long_local, long_path] =
            [format!("{}@y", "l".repeat(65)), format!("b@{}", "d.".repeat(130) + "e")];
        for path in [
            "",
            "TO",
            "TO:",
            "TO:b@y",
            "TO:<b@y",
            "TO:<b>",
            "TO:<b@>",
            "TO:<@y>",
            "TO:<.b@y>",
            "TO:<b.@y>",
            "TO:<a..b@y>",
            "TO:<a b@y>",
            "TO:<a@b@y>",
            "TO:<b@y>x",
            "TO:<b@-y>",
            "TO:<b@y->",
            "TO:<b@y..z>",
            "TO:<b@y.>",
            "TO:<b@y_z>",
            r#"TO:<"a@y>"#,
            r#"TO:<"a"b@y>"#,
            r#"TO:<"a\"@y>"#,
            "TO:<b@[y]>",
            "TO:<b@[192.0.2]>",
            "TO:<b@[IPv6:192.0.2.1]>",
            "TO:<b@[192.0.2.1>",
            "TO:<@one b@y>",
            "TO:<@one,b@y>",
            "TO:<@one:>",
            "TO:<a<b@y>",
            "FROM:<b@y>",
            &format!("TO:<{long_local}>"),
            &format!("TO:<{long_path}>"),
        ] {
            assert_eq!(mailbox(path), None, "{path}");
        }
    }

    #[test]
    fn parameters_are_words_with_values() {
        fn read(text: &str) -> Option<Vec<(&str, Option<&str>)>> {
            Addressed::read("FROM:", text).map(|read| read.params)
        }
        assert_eq!(read("FROM:<>"), Some(vec![]));
        assert_eq!(
            read("FROM:<a@x> SIZE=9 BODY=8BITMIME x-Y"),
            Some(vec![("SIZE", Some("9")), ("BODY", Some("8BITMIME")), ("x-Y", None),])
        );
        for text in ["=9", "SIZE=", "SIZE=1=2", "-A", "A_B", " SIZE=9", "SIZE =9", "SIZE=9  A"] {
            assert_eq!(read(&format!("FROM:<a@x> {text}")), None, "{text}");
        }
    }
}
