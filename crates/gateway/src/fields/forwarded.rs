//! Facts of the client for an upstream: `x-forwarded-*`, `forwarded`, `via` and a request id.

use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};

use hyper::Version;
use hyper::header::{FORWARDED, HeaderMap, HeaderValue, VIA};
use ipnet::IpNet;

use super::host::port_of;
use super::names::{X_FORWARDED_FOR, X_FORWARDED_HOST, X_FORWARDED_PORT, X_FORWARDED_PROTO, X_REQUEST_ID};

/// The fields by which an upstream is informed of the client.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ForwardedFields {
    /// By `x-forwarded-for`, `-proto`, `-host` and `-port`.
    #[default]
    XForwarded,
    /// By `forwarded` (RFC 7239).
    Rfc7239,
    /// By both.
    Both,
    /// Not at all: what a client says of these is removed all the same.
    Off,
}

/// Facts of a request's client.
pub(crate) struct ClientFacts<'a> {
    /// `None` on a Unix socket.
    pub(crate) addr: Option<SocketAddr>,
    pub(crate) is_tls: bool,
    pub(crate) authority: &'a HeaderValue,
    pub(crate) version: Version,
    /// 128 random bits, for a request without an id.
    pub(crate) random: [u64; 2],
}

/// The rules by which upstreams are informed of clients.
#[derive(Clone, Debug)]
pub(crate) struct ForwardingRules {
    pub(crate) forwarded: ForwardedFields,
    pub(crate) trusted: Vec<IpNet>,
    pub(crate) has_via: bool,
    pub(crate) has_request_id: bool,
}

impl ForwardingRules {
    /// True if this peer is another proxy, whose word on its client is believed.
    pub(crate) fn trusts(&self, addr: Option<SocketAddr>) -> bool {
        let Some(ip) = addr.map(|addr| addr.ip().to_canonical()) else { return false };
        self.trusted.iter().any(|network| network.contains(&ip))
    }

    /// The client's address: that of the peer, or what trusted proxies say of it.
    pub(crate) fn client_ip(&self, fields: &HeaderMap, addr: Option<SocketAddr>) -> Option<IpAddr> {
        let mut ip = addr?.ip().to_canonical();
        if !self.trusts(addr) {
            return Some(ip);
        }
        // From the last one on: what stands before the first that is not trusted may be invented.
        let lines: Vec<&HeaderValue> = fields.get_all(X_FORWARDED_FOR).iter().collect();
        for line in lines.iter().rev() {
            let Ok(text) = line.to_str() else { return Some(ip) };
            for word in text.rsplit(',') {
                let Some(found) = ip_of(word.trim()) else { return Some(ip) };
                ip = found;
                if !self.trusts(Some(SocketAddr::new(ip, 0))) {
                    return Some(ip);
                }
            }
        }
        Some(ip)
    }

    /// Writes the facts for an upstream. The words of the client are kept if it is trusted, and
    /// replaced else.
    pub(crate) fn tell(&self, fields: &mut HeaderMap, client: &ClientFacts<'_>) {
        let is_trusted = self.trusts(client.addr);
        if !is_trusted {
            let named = [X_FORWARDED_FOR, X_FORWARDED_PROTO, X_FORWARDED_HOST, X_FORWARDED_PORT, FORWARDED];
            for name in named {
                fields.remove(name);
            }
        }
        if matches!(self.forwarded, ForwardedFields::XForwarded | ForwardedFields::Both) {
            x_forwarded(fields, client);
        }
        if matches!(self.forwarded, ForwardedFields::Rfc7239 | ForwardedFields::Both) {
            rfc7239(fields, client);
        }
        if self.has_via {
            let version = if client.version == Version::HTTP_2 { "2" } else { "1.1" };
            appended(fields, VIA, &format!("{version} ringserve"));
        }
        if self.has_request_id && !(is_trusted && fields.contains_key(X_REQUEST_ID)) {
            let [high, low] = client.random;
            if let Ok(id) = HeaderValue::from_str(&format!("{high:016x}{low:016x}")) {
                fields.insert(X_REQUEST_ID, id);
            }
        }
    }
}

fn ip_of(text: &str) -> Option<IpAddr> {
    let ip = text.parse().ok().or_else(|| text.parse().ok().map(|addr: SocketAddr| addr.ip()))?;
    Some(IpAddr::to_canonical(&ip))
}

fn x_forwarded(fields: &mut HeaderMap, client: &ClientFacts<'_>) {
    if let Some(addr) = client.addr {
        appended(fields, X_FORWARDED_FOR, &addr.ip().to_canonical().to_string());
    }
    let proto = if client.is_tls { "https" } else { "http" };
    // A trusted proxy knows what its client asked for; this one sees the proxy.
    fields.entry(X_FORWARDED_PROTO).or_insert(HeaderValue::from_static(proto));
    fields.entry(X_FORWARDED_HOST).or_insert_with(|| client.authority.clone());
    let port = port_of(client.authority).unwrap_or(if client.is_tls { 443 } else { 80 });
    fields.entry(X_FORWARDED_PORT).or_insert_with(|| port.into());
}

fn rfc7239(fields: &mut HeaderMap, client: &ClientFacts<'_>) {
    let mut element = String::from("for=");
    _ = match client.addr.map(|addr| addr.ip().to_canonical()) {
        Some(IpAddr::V4(ip)) => write!(element, "{ip}"),
        Some(IpAddr::V6(ip)) => write!(element, "\"[{ip}]\""),
        None => write!(element, "unknown"),
    };
    if let Ok(host) = client.authority.to_str()
        && !host.is_empty()
    {
        _ = write!(element, ";host=\"{host}\"");
    }
    element.push_str(if client.is_tls { ";proto=https" } else { ";proto=http" });
    appended(fields, FORWARDED, &element);
}

/// Adds an element to a field that is a list.
fn appended(fields: &mut HeaderMap, name: hyper::header::HeaderName, element: &str) {
    let mut list = Vec::new();
    for value in fields.get_all(&name) {
        list.extend_from_slice(value.as_bytes());
        list.extend_from_slice(b", ");
    }
    list.extend_from_slice(element.as_bytes());
    if let Ok(value) = HeaderValue::from_bytes(&list) {
        fields.insert(name, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn telling(forwarded: ForwardedFields) -> ForwardingRules {
        let trusted = vec!["10.0.0.0/8".parse().expect("a network")];
        ForwardingRules { forwarded, trusted, has_via: true, has_request_id: true }
    }

    fn told(forwarded: ForwardedFields, addr: &str, before: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut fields = HeaderMap::new();
        for (name, value) in before {
            fields.append(*name, HeaderValue::from_static(value));
        }
        let authority = HeaderValue::from_static("a.b:8443");
        let facts = ClientFacts {
            addr: addr.parse().ok(),
            is_tls: true,
            authority: &authority,
            version: Version::HTTP_11,
            random: [1, 2],
        };
        telling(forwarded).tell(&mut fields, &facts);
        fields
    }

    fn value<'a>(fields: &'a HeaderMap, name: &str) -> Option<&'a str> {
        assert!(fields.get_all(name).iter().count() < 2, "{name}");
        fields.get(name).and_then(|value| value.to_str().ok())
    }

    const SAID: [(&str, &str); 6] = [
        ("x-forwarded-for", "1.1.1.1"),
        ("x-forwarded-for", "2.2.2.2"),
        ("x-forwarded-proto", "http"),
        ("x-forwarded-port", "1"),
        ("forwarded", "for=1.1.1.1"),
        ("x-request-id", "mine"),
    ];

    #[test]
    fn stranger_is_not_believed() {
        let fields = told(ForwardedFields::XForwarded, "192.0.2.1:5000", &SAID);
        assert_eq!(value(&fields, "x-forwarded-for"), Some("192.0.2.1"));
        assert_eq!(value(&fields, "x-forwarded-proto"), Some("https"));
        assert_eq!(value(&fields, "x-forwarded-host"), Some("a.b:8443"));
        assert_eq!(value(&fields, "x-forwarded-port"), Some("8443"));
        assert_eq!(value(&fields, "forwarded"), None);
        assert_eq!(value(&fields, "x-request-id"), Some("00000000000000010000000000000002"));
        assert_eq!(value(&fields, "via"), Some("1.1 ringserve"));
    }

    #[test]
    fn trusted_proxy_is_believed_and_added_to() {
        let fields = told(ForwardedFields::Both, "[::ffff:10.1.2.3]:5000", &SAID);
        assert_eq!(value(&fields, "x-forwarded-for"), Some("1.1.1.1, 2.2.2.2, 10.1.2.3"));
        assert_eq!(value(&fields, "x-forwarded-proto"), Some("http"));
        assert_eq!(
            value(&fields, "forwarded"),
            Some("for=1.1.1.1, for=10.1.2.3;host=\"a.b:8443\";proto=https")
        );
        assert_eq!(value(&fields, "x-request-id"), Some("mine"));
    }

    #[test]
    fn stranger_is_removed_where_nothing_is_told() {
        let fields = told(ForwardedFields::Off, "192.0.2.1:5000", &SAID);
        assert_eq!(value(&fields, "x-forwarded-for"), None);
        assert_eq!(value(&fields, "forwarded"), None);
    }

    #[test]
    fn address_of_the_client_is_the_last_that_is_not_trusted() {
        let ip = |addr: &str, lines: &[&'static str]| {
            let mut fields = HeaderMap::new();
            lines.iter().for_each(|line| _ = fields.append(X_FORWARDED_FOR, HeaderValue::from_static(line)));
            telling(ForwardedFields::XForwarded)
                .client_ip(&fields, addr.parse().ok())
                .map(|ip| ip.to_string())
        };
        assert_eq!(ip("192.0.2.1:1", &["1.1.1.1"]).as_deref(), Some("192.0.2.1"));
        assert_eq!(ip("10.0.0.1:1", &["1.1.1.1, 2.2.2.2", "10.9.9.9"]).as_deref(), Some("2.2.2.2"));
        assert_eq!(ip("10.0.0.1:1", &["1.1.1.1, what"]).as_deref(), Some("10.0.0.1"));
        assert_eq!(ip("10.0.0.1:1", &["10.2.2.2"]).as_deref(), Some("10.2.2.2"));
        assert_eq!(ip("10.0.0.1:1", &[]).as_deref(), Some("10.0.0.1"));
    }
}
