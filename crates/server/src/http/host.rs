//! The `host` of a request of HTTP/1.1 (RFC 9112, 3.2).

use std::net::Ipv6Addr;

use hyper::header::HOST;
use hyper::{Request, Version};

/// True if a request has the host that its version asks for: one of HTTP/1.1 a single one, one of
/// HTTP/1.0 at most one. Of HTTP/2 hyper looks at the authority.
#[inline]
pub(super) fn has_valid_host<B>(request: &Request<B>) -> bool {
    if request.version() == Version::HTTP_2 {
        return true;
    }
    let fields = request.headers();
    // Where each field stands once, as is usual, this one does.
    let is_single = || fields.len() == fields.keys_len() || fields.get_all(HOST).iter().count() == 1;
    match fields.get(HOST) {
        None => request.version() < Version::HTTP_11,
        Some(host) => is_host(host.as_bytes()) && is_single(),
    }
}

/// `uri-host [ ":" port ]` of RFC 9110, 7.2. A name may be empty, and a port too.
fn is_host(host: &[u8]) -> bool {
    let port = match host.strip_prefix(b"[") {
        None => {
            let Some(name) = name_bytes(host) else { return false };
            &host[name..]
        }
        Some(rest) => {
            let Some(end) = rest.iter().position(|byte| *byte == b']') else { return false };
            if !is_literal(&rest[..end]) {
                return false;
            }
            &rest[end + 1..]
        }
    };
    match port.split_first() {
        None => true,
        Some((b':', digits)) => digits.iter().all(u8::is_ascii_digit),
        Some(_) => false,
    }
}

/// Bytes of the name at the front, which ends before what may stand in none. `None` where a `%`
/// begins no byte in hex.
fn name_bytes(host: &[u8]) -> Option<usize> {
    let mut at = 0;
    while let Some(byte) = host.get(at) {
        match byte {
            b'%' => {
                let hex = host.get(at + 1..at + 3)?;
                if !hex.iter().all(u8::is_ascii_hexdigit) {
                    return None;
                }
                at += 3;
            }
            byte if IN_NAMES[usize::from(*byte)] => at += 1,
            _ => break,
        }
    }
    Some(at)
}

/// The text between brackets: an address of IPv6, or one of a later version.
fn is_literal(literal: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(literal) else { return false };
    let Some(of_a_version) = text.strip_prefix(['v', 'V']) else { return text.parse::<Ipv6Addr>().is_ok() };
    let Some((version, address)) = of_a_version.split_once('.') else { return false };
    let is_version = !version.is_empty() && version.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_version
        && !address.is_empty()
        && address.bytes().all(|byte| byte == b':' || IN_NAMES[usize::from(byte)])
}

/// Bytes that stand in a name as they are: `unreserved` and `sub-delims` of RFC 3986.
static IN_NAMES: [bool; 256] = {
    let mut bytes = [false; 256];
    let mut byte = 0;
    while byte < 256 {
        bytes[byte] = (byte as u8).is_ascii_alphanumeric();
        byte += 1;
    }
    let mut others = b"-._~!$&'()*+,;=".as_slice();
    while let [other, rest @ ..] = others {
        bytes[*other as usize] = true;
        others = rest;
    }
    bytes
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_those_of_the_grammar() {
        for host in [
            "",
            "x",
            "example.org",
            "example.org:8080",
            "example.org:",
            ":80",
            "192.0.2.1:1",
            "[::1]",
            "[::1]:443",
            "[2001:db8::192.0.2.1]:",
            "[v1.a:b]",
            "a%2Db",
            "a_b~c!$&'()*+,;=d",
            "999.1.2.3",
        ] {
            assert!(is_host(host.as_bytes()), "{host:?}");
        }
        for host in [
            "a b",
            "a/b",
            "user@a",
            "a:b",
            "a:80:80",
            "a:-1",
            "a,b:1x",
            "[::1",
            "::1",
            "[::1]x",
            "[::1]:x",
            "[1.2.3.4]",
            "[::1%25eth0]",
            "[v.a]",
            "[v1.]",
            "[vg.a]",
            "a%2",
            "a%zz",
            "a\\b",
            "a#b",
            "a?b",
            "gr\u{fc}n",
            "\"a\"",
            "a\tb",
        ] {
            assert!(!is_host(host.as_bytes()), "{host:?}");
        }
        assert!(!is_host(b"a\xff"));
    }

    #[test]
    fn version_says_how_many_there_are() {
        let request = |version, hosts: &[&str]| {
            let mut request = Request::builder().version(version);
            for host in hosts {
                request = request.header(HOST, *host);
            }
            request.body(()).unwrap()
        };
        for (version, hosts, is_valid) in [
            (Version::HTTP_11, &[][..], false),
            (Version::HTTP_11, &["a"], true),
            (Version::HTTP_11, &["a", "a"], false),
            (Version::HTTP_10, &[], true),
            (Version::HTTP_10, &["a"], true),
            (Version::HTTP_10, &["a/b"], false),
            (Version::HTTP_10, &["a", "a"], false),
            (Version::HTTP_2, &[], true),
        ] {
            assert_eq!(has_valid_host(&request(version, hosts)), is_valid, "{version:?} {hosts:?}");
        }
    }
}
