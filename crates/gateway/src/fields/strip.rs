//! Fields that are of one connection alone (RFC 9110, 7.6.1), and those that would be read in two
//! ways.

use hyper::header::{
    CONNECTION, CONTENT_LENGTH, COOKIE, EXPECT, HeaderMap, HeaderName, HeaderValue, PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE,
};

use super::names::{HTTP2_SETTINGS, KEEP_ALIVE, PROXY_CONNECTION};

/// Facts that were found among the fields of a message.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ConnectionFacts {
    /// The protocols that it asks to go on with, or says to go on with.
    pub(crate) upgrade: Option<HeaderValue>,
    /// Its sender takes trailers.
    pub(crate) wants_trailers: bool,
}

/// The reason why a message is not passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StripError {
    /// Its body is coded in a way that this gateway does not undo.
    Coding,
    /// Its fields contradict each other.
    Invalid,
}

/// Which way a message goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    ToUpstream { has_underscores: bool },
    ToClient,
}

/// Removes from a message what concerns its connection alone, what the sender names as such, and
/// where it goes to an upstream what that may take for another field.
///
/// # Errors
/// The message is coded in a way in which two readers may see two lengths.
pub(crate) fn strip(fields: &mut HeaderMap, direction: Direction) -> Result<ConnectionFacts, StripError> {
    let mut stripped = ConnectionFacts::default();
    // Most messages have none of these: a look at each name, and no other.
    let mut found = [const { None::<HeaderName> }; KINDS];
    let mut underscored = Vec::new();
    let mut is_coded = false;
    for name in fields.keys() {
        match kind_of(name) {
            Kind::Other => {}
            Kind::Coding => is_coded = true,
            Kind::Connection(at) => found[at] = Some(name.clone()),
            Kind::Underscored => {
                if direction == (Direction::ToUpstream { has_underscores: false }) {
                    underscored.push(name.clone());
                }
            }
        }
    }
    if is_coded {
        only_chunked(fields)?;
        fields.remove(TRANSFER_ENCODING);
        // hyper has taken the body as chunked, and would send this length with it.
        fields.remove(CONTENT_LENGTH);
    }
    underscored.iter().for_each(|name| _ = fields.remove(name));
    let is_upgrade = found[CONNECTION_AT].is_some() && strip_named(fields, direction)?;
    for (at, name) in found.iter().enumerate() {
        let Some(name) = name else { continue };
        match at {
            // Without the word it is of another connection, before that of the sender (RFC 9110,
            // 7.8).
            UPGRADE_AT if !is_upgrade => {}
            UPGRADE_AT => stripped.upgrade = one_value(fields, &UPGRADE)?,
            TE_AT => {
                let mut values = fields.get_all(TE).iter().flat_map(|value| words(value.as_bytes()));
                stripped.wants_trailers = values.any(|word| word.eq_ignore_ascii_case(b"trailers"));
            }
            _ => {}
        }
        fields.remove(name);
    }
    Ok(stripped)
}

const KINDS: usize = 10;
const CONNECTION_AT: usize = 0;
const UPGRADE_AT: usize = 1;
const TE_AT: usize = 2;

enum Kind {
    Other,
    Coding,
    Connection(usize),
    Underscored,
}

fn kind_of(name: &HeaderName) -> Kind {
    let text = name.as_str();
    // The length tells nearly all names apart.
    let (constant, at) = match text.len() {
        2 => (TE, TE_AT),
        6 => (EXPECT, 8),
        7 => (UPGRADE, UPGRADE_AT),
        10 if text.starts_with('c') => (CONNECTION, CONNECTION_AT),
        10 => (KEEP_ALIVE, 3),
        14 => (HTTP2_SETTINGS, 4),
        16 => (PROXY_CONNECTION, 5),
        17 => (TRANSFER_ENCODING, KINDS),
        18 => (PROXY_AUTHENTICATE, 6),
        19 => (PROXY_AUTHORIZATION, 7),
        _ => (CONNECTION, 9),
    };
    if *name == constant {
        return if at == KINDS { Kind::Coding } else { Kind::Connection(at) };
    }
    if text.bytes().any(|byte| byte == b'_') { Kind::Underscored } else { Kind::Other }
}

/// Removes the fields that `connection` names. True if `upgrade` is one of them.
fn strip_named(fields: &mut HeaderMap, direction: Direction) -> Result<bool, StripError> {
    let mut is_upgrade = false;
    let values: Vec<HeaderValue> = fields.get_all(CONNECTION).iter().cloned().collect();
    for word in values.iter().flat_map(|value| words(value.as_bytes())) {
        let is_kept = [&b"close"[..], b"keep-alive", b"upgrade", b"te"];
        if is_kept.iter().any(|kept| word.eq_ignore_ascii_case(kept)) {
            is_upgrade |= word.eq_ignore_ascii_case(b"upgrade");
            continue;
        }
        let Ok(name) = HeaderName::from_bytes(word) else { return Err(StripError::Invalid) };
        // Without these the message would be another one. A client has no reason to name them.
        let is_of_the_message =
            [hyper::header::HOST, CONTENT_LENGTH, TRANSFER_ENCODING, COOKIE].contains(&name);
        if is_of_the_message && matches!(direction, Direction::ToUpstream { .. }) {
            return Err(StripError::Invalid);
        }
        if name != CONTENT_LENGTH {
            fields.remove(&name);
        }
    }
    Ok(is_upgrade)
}

/// The one value of a field that is no list of several lines.
fn one_value(fields: &HeaderMap, name: &HeaderName) -> Result<Option<HeaderValue>, StripError> {
    let mut values = fields.get_all(name).iter();
    let first = values.next().cloned();
    if values.next().is_some() { Err(StripError::Invalid) } else { Ok(first) }
}

fn only_chunked(fields: &HeaderMap) -> Result<(), StripError> {
    let mut values = fields.get_all(TRANSFER_ENCODING).iter();
    let is_chunked = values.next().is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"chunked"));
    if is_chunked && values.next().is_none() { Ok(()) } else { Err(StripError::Coding) }
}

/// The words of a list with commas.
pub(crate) fn words(list: &[u8]) -> impl Iterator<Item = &[u8]> {
    list.split(|byte| *byte == b',').map(<[u8]>::trim_ascii).filter(|word| !word.is_empty())
}

/// Makes one field of several `cookie` fields, as they come with HTTP/2 (RFC 9113, 8.2.3).
pub(crate) fn join_cookies(fields: &mut HeaderMap) {
    let mut values = fields.get_all(COOKIE).iter();
    let (Some(first), Some(second)) = (values.next(), values.next()) else { return };
    let mut all = [first.as_bytes(), second.as_bytes()].join(&b"; "[..]);
    for value in values {
        all.extend_from_slice(b"; ");
        all.extend_from_slice(value.as_bytes());
    }
    if let Ok(all) = HeaderValue::from_bytes(&all) {
        fields.insert(COOKIE, all);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TO_UPSTREAM: Direction = Direction::ToUpstream { has_underscores: false };

    fn fields(lines: &[(&str, &str)]) -> HeaderMap {
        let mut fields = HeaderMap::new();
        for (name, value) in lines {
            let name: HeaderName = name.parse().expect("a name");
            fields.append(name, value.parse().expect("a value"));
        }
        fields
    }

    fn left(lines: &[(&str, &str)]) -> Vec<String> {
        let mut fields = fields(lines);
        strip(&mut fields, TO_UPSTREAM).expect("it is passed on");
        let mut left: Vec<String> = fields.keys().map(|name| name.to_string()).collect();
        left.sort();
        left
    }

    #[test]
    fn fields_of_a_connection_are_removed() {
        let lines = [
            ("host", "a"),
            ("connection", "close, X-Mine"),
            ("x-mine", "1"),
            ("x-other", "1"),
            ("keep-alive", "timeout=5"),
            ("proxy-connection", "keep-alive"),
            ("proxy-authorization", "Basic x"),
            ("proxy-authenticate", "Basic"),
            ("te", "gzip"),
            ("transfer-encoding", "chunked"),
            ("content-length", "5"),
            ("upgrade", "h2c"),
            ("http2-settings", "x"),
            ("expect", "100-continue"),
            ("trailer", "x-sum"),
        ];
        assert_eq!(left(&lines), ["host", "trailer", "x-other"]);
    }

    #[test]
    fn nothing_else_is_removed() {
        let lines =
            [("host", "a"), ("accept", "*"), ("cookie", "a=b"), ("content-length", "0"), ("via", "x")];
        assert_eq!(left(&lines), ["accept", "content-length", "cookie", "host", "via"]);
    }

    #[test]
    fn all_lines_of_connection_count() {
        let lines =
            [("connection", "a"), ("connection", "b,c"), ("a", "1"), ("b", "1"), ("c", "1"), ("d", "1")];
        assert_eq!(left(&lines), ["d"]);
    }

    #[test]
    fn client_cannot_have_the_message_changed() {
        for name in ["host", "content-length", "transfer-encoding", "cookie", "a b"] {
            let mut fields = fields(&[("connection", name)]);
            assert_eq!(strip(&mut fields, TO_UPSTREAM), Err(StripError::Invalid), "{name}");
        }
    }

    #[test]
    fn other_codings_are_refused() {
        for value in ["gzip, chunked", "identity", "xchunked", "chunked, chunked", ""] {
            let mut of_one = fields(&[("transfer-encoding", value)]);
            assert_eq!(strip(&mut of_one, TO_UPSTREAM), Err(StripError::Coding), "{value}");
        }
        let mut twice = fields(&[("transfer-encoding", "chunked"), ("transfer-encoding", "chunked")]);
        assert_eq!(strip(&mut twice, TO_UPSTREAM), Err(StripError::Coding));
    }

    #[test]
    fn names_with_underscores_are_dropped_towards_upstreams_alone() {
        let lines = [("x_forwarded_for", "evil"), ("x-a", "1")];
        assert_eq!(left(&lines), ["x-a"]);
        let mut kept = fields(&lines);
        strip(&mut kept, Direction::ToUpstream { has_underscores: true }).expect("it is passed on");
        assert_eq!(kept.len(), 2);
        let mut answer = fields(&lines);
        strip(&mut answer, Direction::ToClient).expect("it is passed on");
        assert_eq!(answer.len(), 2);
    }

    #[test]
    fn what_is_asked_of_the_connection_is_told() {
        let mut asking =
            fields(&[("connection", "upgrade, te"), ("upgrade", "websocket"), ("te", "Trailers")]);
        let stripped = strip(&mut asking, TO_UPSTREAM).expect("it is passed on");
        assert_eq!(stripped.upgrade.as_ref().map(|value| value.as_bytes()), Some(&b"websocket"[..]));
        assert!(stripped.wants_trailers && asking.is_empty());
        let mut of_another = fields(&[("upgrade", "websocket"), ("connection", "close")]);
        let stripped = strip(&mut of_another, TO_UPSTREAM).expect("it is passed on");
        assert!(stripped.upgrade.is_none() && of_another.is_empty());
        let mut twice = fields(&[("connection", "upgrade"), ("upgrade", "websocket"), ("upgrade", "h2c")]);
        assert_eq!(strip(&mut twice, TO_UPSTREAM), Err(StripError::Invalid));
    }

    #[test]
    fn cookies_of_several_fields_are_one() {
        let mut several = fields(&[("cookie", "a=1"), ("cookie", "b=2"), ("cookie", "c=3")]);
        join_cookies(&mut several);
        assert_eq!(several.get_all(COOKIE).iter().collect::<Vec<_>>(), ["a=1; b=2; c=3"]);
    }
}
