//! Facts of the client for an upstream: `x-forwarded-*`, `forwarded`, `via` and a request id.

use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};

use hyper::Version;
use hyper::header::{FORWARDED, HeaderMap, HeaderName, HeaderValue, VIA};
use ipnet::IpNet;

use super::host::port_of;
use super::names::{
    X_FORWARDED_FOR, X_FORWARDED_HOST, X_FORWARDED_PORT, X_FORWARDED_PROTO, X_REAL_IP, X_REQUEST_ID,
};

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

    /// The client's address: that of the peer, or what trusted proxies say of it in the field of
    /// these rules. `Ok(None)` on a Unix socket.
    ///
    /// # Errors
    /// A trusted proxy names its client in a way that is no address.
    pub(crate) fn client_ip(
        &self,
        fields: &HeaderMap,
        addr: Option<SocketAddr>,
    ) -> Result<Option<IpAddr>, NoAddress> {
        let Some(addr) = addr else { return Ok(None) };
        let mut ip = addr.ip().to_canonical();
        let is_rfc7239 = self.forwarded == ForwardedFields::Rfc7239;
        let name = if is_rfc7239 { FORWARDED } else { X_FORWARDED_FOR };
        let lines: Vec<&HeaderValue> = fields.get_all(name).iter().collect();
        // From the last one on: what stands before the first that is not trusted may be invented.
        for line in lines.iter().rev() {
            let text = line.to_str().map_err(|_| NoAddress)?;
            for word in text.rsplit(',') {
                if !self.trusts(Some(SocketAddr::new(ip, 0))) {
                    return Ok(Some(ip));
                }
                let named = if is_rfc7239 { client_of(word) } else { Some(word.trim()) };
                ip = named.and_then(ip_of).ok_or(NoAddress)?;
            }
        }
        Ok(Some(ip))
    }

    /// Writes the facts for an upstream. The words of the client are kept if it is trusted, and
    /// replaced else.
    pub(crate) fn tell(&self, fields: &mut HeaderMap, client: &ClientFacts<'_>) {
        let is_trusted = self.trusts(client.addr);
        if !is_trusted {
            // Servers build addresses and targets of more than the gateway writes.
            let named: Vec<HeaderName> = fields.keys().filter(|name| is_of_a_proxy(name)).cloned().collect();
            named.iter().for_each(|name| _ = fields.remove(name));
        }
        if matches!(self.forwarded, ForwardedFields::XForwarded | ForwardedFields::Both) {
            x_forwarded(fields, client);
        }
        if matches!(self.forwarded, ForwardedFields::Rfc7239 | ForwardedFields::Both) {
            rfc7239(fields, client);
        }
        if self.has_via {
            let is_http2 = client.version == Version::HTTP_2;
            appended(fields, VIA, if is_http2 { "2 ringserve" } else { "1.1 ringserve" });
        }
        if self.has_request_id
            && !(is_trusted && fields.contains_key(X_REQUEST_ID))
            && let Ok(id) = HeaderValue::from_bytes(&digits(client.random))
        {
            fields.insert(X_REQUEST_ID, id);
        }
    }
}

/// 128 bits in hexadecimal.
fn digits(numbers: [u64; 2]) -> [u8; 32] {
    let bits = u128::from(numbers[0]) << 64 | u128::from(numbers[1]);
    std::array::from_fn(|at| b"0123456789abcdef"[(bits >> (124 - 4 * at)) as usize & 15])
}

/// A client that a trusted proxy names by no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoAddress;

/// True for the fields in which proxies name their clients.
pub(crate) fn is_of_a_proxy(name: &HeaderName) -> bool {
    *name == FORWARDED || *name == X_REAL_IP || name.as_str().starts_with("x-forwarded-")
}

/// The `for` of an element of `forwarded` (RFC 7239, 4). A comma or a semicolon in a quoted value
/// makes what is read of it no address.
fn client_of(element: &str) -> Option<&str> {
    element.split(';').find_map(|pair| {
        let (name, value) = pair.split_once('=')?;
        name.trim().eq_ignore_ascii_case("for").then(|| value.trim().trim_matches('"'))
    })
}

/// An address, with or without a port and brackets.
fn ip_of(text: &str) -> Option<IpAddr> {
    let text = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
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
fn appended(fields: &mut HeaderMap, name: HeaderName, element: &str) {
    if !fields.contains_key(&name) {
        if let Ok(value) = HeaderValue::from_str(element) {
            fields.insert(name, value);
        }
        return;
    }
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

    const SAID: [(&str, &str); 8] = [
        ("x-forwarded-for", "1.1.1.1"),
        ("x-forwarded-for", "2.2.2.2"),
        ("x-forwarded-proto", "http"),
        ("x-forwarded-port", "1"),
        ("forwarded", "for=1.1.1.1"),
        ("x-request-id", "mine"),
        ("x-forwarded-prefix", "/evil"),
        ("x-real-ip", "1.1.1.1"),
    ];

    #[test]
    fn stranger_is_not_believed() {
        let fields = told(ForwardedFields::XForwarded, "192.0.2.1:5000", &SAID);
        assert_eq!(value(&fields, "x-forwarded-for"), Some("192.0.2.1"));
        assert_eq!(value(&fields, "x-forwarded-proto"), Some("https"));
        assert_eq!(value(&fields, "x-forwarded-host"), Some("a.b:8443"));
        assert_eq!(value(&fields, "x-forwarded-port"), Some("8443"));
        assert_eq!((value(&fields, "x-forwarded-prefix"), value(&fields, "x-real-ip")), (None, None));
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

    fn ip(how: ForwardedFields, addr: &str, lines: &[&'static str]) -> Result<Option<String>, NoAddress> {
        let name = if how == ForwardedFields::Rfc7239 { FORWARDED } else { X_FORWARDED_FOR };
        let lines = lines.iter().map(|line| (name.clone(), HeaderValue::from_static(line)));
        let mut fields = HeaderMap::new();
        lines.for_each(|(name, value)| _ = fields.append(name, value));
        telling(how).client_ip(&fields, addr.parse().ok()).map(|ip| ip.map(|ip| ip.to_string()))
    }

    #[test]
    fn address_of_the_client_is_the_last_that_is_not_trusted() {
        let ip = |addr: &str, lines: &[&'static str]| ip(ForwardedFields::XForwarded, addr, lines);
        let of = |text: &str| Ok(Some(text.to_owned()));
        assert_eq!(ip("192.0.2.1:1", &["1.1.1.1"]), of("192.0.2.1"));
        assert_eq!(ip("10.0.0.1:1", &["1.1.1.1, 2.2.2.2", "10.9.9.9"]), of("2.2.2.2"));
        assert_eq!(ip("10.0.0.1:1", &["what, 2.2.2.2"]), of("2.2.2.2"));
        assert_eq!(ip("10.0.0.1:1", &["[2001:db8::1]"]), of("2001:db8::1"));
        assert_eq!(ip("10.0.0.1:1", &["[2001:db8::1]:99"]), of("2001:db8::1"));
        assert_eq!(ip("10.0.0.1:1", &["10.2.2.2"]), of("10.2.2.2"));
        assert_eq!(ip("10.0.0.1:1", &[]), of("10.0.0.1"));
    }

    #[test]
    fn client_that_a_proxy_does_not_name_is_not_the_proxy() {
        for line in ["1.1.1.1, what", "unknown", "", "1.1.1.1,"] {
            assert_eq!(ip(ForwardedFields::XForwarded, "10.0.0.1:1", &[line]), Err(NoAddress), "{line:?}");
        }
        for line in ["for=unknown", "for=_hidden", "by=10.0.0.1", "1.1.1.1", "for=\"a,b\""] {
            assert_eq!(ip(ForwardedFields::Rfc7239, "10.0.0.1:1", &[line]), Err(NoAddress), "{line:?}");
        }
    }

    #[test]
    fn clients_are_named_in_the_field_of_the_rules() {
        let ip = |lines: &[&'static str]| ip(ForwardedFields::Rfc7239, "10.0.0.1:1", lines);
        let of = |text: &str| Ok(Some(text.to_owned()));
        assert_eq!(ip(&["for=1.1.1.1;proto=http, For=\"[2001:db8::1]:4\""]), of("2001:db8::1"));
        assert_eq!(ip(&["for=2.2.2.2", "by=x; for=10.1.1.1"]), of("2.2.2.2"));
    }
}
