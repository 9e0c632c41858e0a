//! The content of a reply.

use super::replies::{DEPTH_MAX, length, line};

/// The content of a reply, in its bytes. Attributes are left out.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Value<'a> {
    /// Nothing: no such key, no such element.
    Null,
    /// A number.
    Integer(i64),
    /// A number with a point; version 3 alone.
    Double(f64),
    /// True or false; version 3 alone.
    Boolean(bool),
    /// The digits of a number of any size; version 3 alone.
    BigNumber(&'a [u8]),
    /// A string, or a status such as `OK`.
    Bytes(&'a [u8]),
    /// An error that is an element of another reply. One that is all of the reply is a
    /// [`RedisError`](crate::client::RedisError).
    Error(&'a [u8]),
    /// Elements in order, or those of a set.
    Array(Vec<Value<'a>>),
    /// Keys with values; version 3 alone. In version 2 it is an array of both in turn.
    Map(Vec<(Value<'a>, Value<'a>)>),
}

impl<'a> Value<'a> {
    /// The bytes of a string, or of a number's digits where the server sent a string.
    pub fn bytes(&self) -> Option<&'a [u8]> {
        match self {
            Value::Bytes(bytes) | Value::BigNumber(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// The number, also if it is in a string.
    pub fn integer(&self) -> Option<i64> {
        match self {
            Value::Integer(number) => Some(*number),
            Value::Bytes(bytes) => crate::resp::number(bytes),
            _ => None,
        }
    }

    /// Reads a whole reply. `None` for bytes that are none.
    pub(super) fn read(bytes: &'a [u8]) -> Option<Value<'a>> {
        let mut rest = bytes;
        read(&mut rest, 0)
    }
}

fn read<'a>(rest: &mut &'a [u8], depth: usize) -> Option<Value<'a>> {
    if depth == DEPTH_MAX {
        return None;
    }
    let (text, behind) = line(rest).ok()??;
    let (kind, text) = text.split_first()?;
    *rest = &rest[behind..];
    Some(match kind {
        b'+' => Value::Bytes(text),
        b'-' => Value::Error(text),
        b':' => Value::Integer(crate::resp::number(text)?),
        b'_' => Value::Null,
        b'#' => Value::Boolean(text == b"t"),
        b',' => Value::Double(std::str::from_utf8(text).ok()?.parse().ok()?),
        b'(' => Value::BigNumber(text),
        b'$' => string(rest, text)?.map_or(Value::Null, Value::Bytes),
        b'!' => Value::Error(string(rest, text)??),
        // Three letters and a colon say what kind of text it is.
        b'=' => Value::Bytes(string(rest, text)??.get(4..)?),
        b'*' | b'~' | b'>' => match length(text).ok()? {
            None => Value::Null,
            Some(count) => Value::Array(elements(rest, count, depth)?),
        },
        b'%' => {
            let flat = elements(rest, length(text).ok()??.checked_mul(2)?, depth)?;
            let mut pairs = flat.into_iter();
            Value::Map(std::iter::from_fn(|| Some((pairs.next()?, pairs.next()?))).collect())
        }
        b'|' => {
            elements(rest, length(text).ok()??.checked_mul(2)?, depth)?;
            read(rest, depth + 1)?
        }
        _ => return None,
    })
}

fn elements<'a>(rest: &mut &'a [u8], count: usize, depth: usize) -> Option<Vec<Value<'a>>> {
    // A count that lies takes no memory: each element has a byte.
    let mut values = Vec::with_capacity(count.min(rest.len()));
    for _ in 0..count {
        values.push(read(rest, depth + 1)?);
    }
    Some(values)
}

fn string<'a>(rest: &mut &'a [u8], text: &[u8]) -> Option<Option<&'a [u8]>> {
    let Some(len) = length(text).ok()? else { return Some(None) };
    let bytes = rest.get(..len)?;
    *rest = rest.get(len + 2..)?;
    Some(Some(bytes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn replies_of_both_versions_are_read() {
        for (bytes, expected) in [
            ("+OK\r\n", Value::Bytes(b"OK")),
            ("$2\r\nhi\r\n", Value::Bytes(b"hi")),
            ("$-1\r\n", Value::Null),
            ("_\r\n", Value::Null),
            ("*-1\r\n", Value::Null),
            (":-7\r\n", Value::Integer(-7)),
            (",1.5\r\n", Value::Double(1.5)),
            ("#f\r\n", Value::Boolean(false)),
            ("(12\r\n", Value::BigNumber(b"12")),
            ("=7\r\ntxt:abc\r\n", Value::Bytes(b"abc")),
            ("*2\r\n:1\r\n-no\r\n", Value::Array(vec![Value::Integer(1), Value::Error(b"no")])),
            ("%1\r\n+a\r\n:1\r\n", Value::Map(vec![(Value::Bytes(b"a"), Value::Integer(1))])),
            ("|1\r\n+ttl\r\n:3\r\n$2\r\nhi\r\n", Value::Bytes(b"hi")),
        ] {
            assert_eq!(Value::read(bytes.as_bytes()), Some(expected), "{bytes:?}");
        }
        assert_eq!(Value::Bytes(b"12").integer(), Some(12));
        assert!(Value::read(b",inf\r\n").is_some() && Value::read(b"*9999999999\r\n").is_none());
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_value_or_none(bytes in "[*$%~|=!+:_#,0-9\r\n-]{0,80}") {
            let _ = Value::read(bytes.as_bytes());
        }
    }
}
