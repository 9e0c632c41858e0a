//! Version 1: a line of text.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::{Ends, Header, HeaderError, LINE_BEGIN, LINE_MAX, agree};
use crate::driver::canonical;

/// Reads a line.
pub(super) fn read(bytes: &[u8]) -> Result<Option<Header>, HeaderError> {
    if !agree(bytes, LINE_BEGIN) {
        return Err(HeaderError::NotProxy);
    }
    let seen = &bytes[..bytes.len().min(LINE_MAX)];
    let Some(end) = memchr::memchr(b'\n', seen) else {
        return match seen.len() {
            LINE_MAX => Err(HeaderError::too_large(LINE_MAX + 1, LINE_MAX)),
            _ => Ok(None),
        };
    };
    let line = seen[..end].strip_suffix(b"\r").and_then(|line| line.strip_prefix(LINE_BEGIN));
    let line = line.ok_or(HeaderError::Malformed(&"a PROXY line ends with CR LF"))?;
    Ok(Some(Header { len: end + 1, ends: ends(line)?, tlvs: 0..0 }))
}

fn ends(line: &[u8]) -> Result<Option<Ends>, HeaderError> {
    // The rest of the line must be ignored.
    if line == b"UNKNOWN" || line.starts_with(b"UNKNOWN ") {
        return Ok(None);
    }
    let text = core::str::from_utf8(line).map_err(|_| HeaderError::Malformed(&"a PROXY line is ASCII"))?;
    let mut words = text.split(' ');
    let ends = match words.next() {
        Some("TCP4") => both(&mut words, |word| word.parse::<Ipv4Addr>().ok()),
        Some("TCP6") => both(&mut words, |word| word.parse::<Ipv6Addr>().ok()),
        _ => return Err(HeaderError::Malformed(&"a PROXY line is of TCP4, TCP6 or UNKNOWN")),
    };
    match (ends, words.next()) {
        (Some(ends), None) => Ok(Some(ends)),
        _ => Err(HeaderError::Malformed(&"a PROXY line has two addresses and two ports")),
    }
}

/// Two addresses of a family, then two ports.
fn both<'a, A: Into<IpAddr>>(
    words: &mut impl Iterator<Item = &'a str>,
    addr: impl Fn(&str) -> Option<A>,
) -> Option<Ends> {
    let (source, destination) = (addr(words.next()?)?, addr(words.next()?)?);
    let (source_port, destination_port) = (port(words.next()?)?, port(words.next()?)?);
    Some(Ends {
        source: canonical(SocketAddr::new(source.into(), source_port)),
        destination: canonical(SocketAddr::new(destination.into(), destination_port)),
    })
}

/// A port: digits only, without a leading zero.
fn port(word: &str) -> Option<u16> {
    let plain = word.bytes().all(|byte| byte.is_ascii_digit()) && (word == "0" || !word.starts_with('0'));
    if plain { word.parse().ok() } else { None }
}
