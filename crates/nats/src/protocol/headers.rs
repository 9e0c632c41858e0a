//! Headers of a message: a version, for some a status, and fields.

use std::fmt;

/// The begin of a header block.
pub(crate) const VERSION: &[u8] = b"NATS/1.0";

/// The headers of a [`Message`](crate::Message), in the order in which they came. Lines that are no
/// fields, and values that are no UTF-8, are left out.
#[derive(Clone, Copy)]
pub struct Headers<'a> {
    block: &'a [u8],
}

/// The status of a message that a server made, such as 503 where no service listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status<'a> {
    /// Its number: 503 for no responders, 404 for nothing found, 204 for the end of several
    /// answers.
    pub code: u16,
    /// Words beside the number; often none.
    pub description: &'a str,
}

impl<'a> Headers<'a> {
    pub(crate) fn new(block: &'a [u8]) -> Headers<'a> {
        Headers { block }
    }

    /// True if there is no header block at all.
    pub fn is_empty(&self) -> bool {
        self.block.is_empty()
    }

    /// The first value of a field. Names are compared as they are written, as servers of NATS do.
    pub fn get(&self, name: &str) -> Option<&'a str> {
        self.iter().find_map(|(field, value)| (field == name).then_some(value))
    }

    /// The fields.
    pub fn iter(&self) -> impl Iterator<Item = (&'a str, &'a str)> + use<'a> {
        lines(self.block).skip(1).filter_map(|line| {
            let (name, value) = std::str::from_utf8(line).ok()?.split_once(':')?;
            (!name.is_empty()).then_some((name, value.trim()))
        })
    }

    /// The status, if there is one.
    pub fn status(&self) -> Option<Status<'a>> {
        let line = lines(self.block).next()?.strip_prefix(VERSION)?;
        let line = std::str::from_utf8(line).ok()?.trim();
        let (code, description) = line.split_once(' ').unwrap_or((line, ""));
        let is_code = code.len() == 3 && code.bytes().all(|byte| byte.is_ascii_digit());
        Some(Status { code: code.parse().ok().filter(|_| is_code)?, description: description.trim_start() })
    }
}

impl fmt::Debug for Headers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

fn lines(block: &[u8]) -> impl Iterator<Item = &[u8]> {
    block.split(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line))
}

/// True for a field that can be sent: a second line in it would be another field.
pub(crate) fn is_field(name: &str, value: &str) -> bool {
    let is_text = |text: &str| text.bytes().all(|byte| byte >= b' ' && byte != 0x7f);
    !name.is_empty() && !name.contains([':', ' ']) && is_text(name) && is_text(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_and_status_are_found() {
        let headers = Headers::new(
            b"NATS/1.0 404 No Messages\r\na: 1\r\nB:two words \r\na: 3\r\nnothing\r\n: x\r\n\r\n",
        );
        assert_eq!(headers.status(), Some(Status { code: 404, description: "No Messages" }));
        assert_eq!(headers.iter().collect::<Vec<_>>(), [("a", "1"), ("B", "two words"), ("a", "3")]);
        assert_eq!((headers.get("a"), headers.get("b")), (Some("1"), None));
        assert_eq!(format!("{headers:?}"), r#"{"a": "1", "B": "two words", "a": "3"}"#);
    }

    #[test]
    fn blocks_that_lie_have_no_status() {
        for block in
            ["", "NATS/1.0\r\n\r\n", "NATS/1.0 50\r\n", "NATS/1.0 +50\r\n", "HTTP/1.1 503\r\n", "\r\n\r\n"]
        {
            assert_eq!(Headers::new(block.as_bytes()).status(), None, "{block:?}");
        }
        assert_eq!(Headers::new(b"NATS/1.0\r\na: \xff\r\n\r\n").iter().count(), 0);
        assert_eq!(Headers::new(b"NATS/1.0 503\r\n\r\n").status().unwrap().code, 503);
    }

    #[test]
    fn field_with_a_second_line_is_none() {
        assert!(is_field("Nats-Msg-Id", "7") && is_field("a", "") && is_field("a", "grüße : x"));
        for (name, value) in [("", "a"), ("a:", "b"), ("a b", "c"), ("a", "b\r\nc: d"), ("a\n", "b")] {
            assert!(!is_field(name, value), "{name:?} {value:?}");
        }
    }
}
