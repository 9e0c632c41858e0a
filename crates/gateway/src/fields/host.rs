//! For which host a request is.

use hyper::header::{HOST, HeaderValue};
use hyper::http::request::Parts;
use hyper::http::uri::Authority;

/// The authority of a request: what it asks for by its target, or else by its `host`. `None` if
/// that is missing, given twice, or no authority.
///
/// hyper's server gives a request of HTTP/2 its authority in the target, and `host` only where the
/// client sent both.
pub(crate) fn authority(parts: &mut Parts) -> Option<HeaderValue> {
    let mut hosts = parts.headers.get_all(HOST).iter();
    let (host, is_single) = (hosts.next(), hosts.next().is_none());
    if !is_single {
        return None;
    }
    let Some(target) = parts.uri.authority() else {
        let host = host?;
        let is_whole = host.is_empty() || is_authority(host.to_str().ok()?);
        return is_whole.then(|| host.clone());
    };
    if !is_authority(target.as_str()) {
        return None;
    }
    // Of HTTP/1.1 the target is what counts (RFC 9112, 3.2.2), and two that differ are an attempt
    // to have it both ways.
    if host.is_some_and(|host| !host.as_bytes().eq_ignore_ascii_case(target.as_str().as_bytes())) {
        return None;
    }
    let value = HeaderValue::from_str(target.as_str()).ok()?;
    parts.headers.insert(HOST, value.clone());
    Some(value)
}

/// True for a host and a port, without a user before them.
fn is_authority(text: &str) -> bool {
    let (host, port) = text.split_once(':').unwrap_or((text, "0"));
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-');
    if !host.is_empty() && host.bytes().all(is_plain) && matches!(port.len(), 1..=4) {
        return port.bytes().all(|byte| byte.is_ascii_digit());
    }
    !text.contains('@') && text.parse::<Authority>().is_ok_and(|authority| !authority.host().is_empty())
}

/// The host of an authority as routes know it: in lower case, without a port and a dot at its end.
pub(crate) fn name_of(authority: &HeaderValue) -> String {
    let text = authority.to_str().unwrap_or_default();
    let host = match text.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) && !host.ends_with(':') => host,
        _ => text,
    };
    host.trim_end_matches('.').to_ascii_lowercase()
}

/// The port of an authority.
pub(crate) fn port_of(authority: &HeaderValue) -> Option<u16> {
    let text = authority.to_str().ok()?;
    let (host, port) = text.rsplit_once(':')?;
    if host.starts_with('[') != host.ends_with(']') { None } else { port.parse().ok() }
}

#[cfg(test)]
mod tests {
    use hyper::Request;

    use super::*;

    fn of(target: &str, hosts: &[&str]) -> Option<String> {
        let mut request = Request::builder().uri(target);
        for host in hosts {
            request = request.header(HOST, *host);
        }
        let (mut parts, ()) = request.body(()).expect("a request").into_parts();
        let found = authority(&mut parts)?;
        assert_eq!(parts.headers.get_all(HOST).iter().count(), 1);
        Some(found.to_str().expect("text").to_owned())
    }

    #[test]
    fn request_is_for_one_host() {
        assert_eq!(of("/", &["a.b"]).as_deref(), Some("a.b"));
        assert_eq!(of("/", &["a.b:80"]).as_deref(), Some("a.b:80"));
        assert_eq!(of("/", &[""]).as_deref(), Some(""));
        assert_eq!(of("http://a.b/", &[]).as_deref(), Some("a.b"));
        assert_eq!(of("http://a.b/", &["A.b"]).as_deref(), Some("a.b"));
    }

    #[test]
    fn request_for_no_host_or_for_two_has_none() {
        assert_eq!(of("/", &[]), None);
        assert_eq!(of("/", &["a", "a"]), None);
        assert_eq!(of("/", &["a b"]), None);
        assert_eq!(of("/", &["a@b"]), None);
        assert_eq!(of("/", &["a/b"]), None);
        assert_eq!(of("http://a.b/", &["c.d"]), None);
        assert_eq!(of("http://a.b/", &["a.b:81"]), None);
        assert_eq!(of("http://me@a.b/", &["a.b"]), None);
    }

    #[test]
    fn name_and_port_are_told_apart() {
        for (text, name, port) in [
            ("A.b", "a.b", None),
            ("a.b:80", "a.b", Some(80)),
            ("a.b.", "a.b", None),
            ("a.b.:80", "a.b", Some(80)),
            ("[::1]", "[::1]", None),
            ("[::1]:8080", "[::1]", Some(8080)),
            ("", "", None),
        ] {
            let value = HeaderValue::from_static(text);
            assert_eq!((name_of(&value).as_str(), port_of(&value)), (name, port), "{text}");
        }
    }
}
