//! Who may use a route: networks, names with passwords, an upstream that is asked first, and rates.

use std::net::IpAddr;

use hyper::header::{AUTHORIZATION, HeaderMap, HeaderName};
use ipnet::IpNet;
use ringserve_server::admission::KeyRates;

use crate::fields::forwarded::NoAddress;
use crate::target::HttpUpstream;

/// The key of a rate.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RateKey {
    /// The client's address, as trusted proxies say it, and of IPv6 its first 64 bits. Clients on
    /// Unix sockets, and those whose address a trusted proxy does not say, share one rate.
    Address,
    /// The values of a field, after authentication; requests without it share one rate.
    Field(HeaderName),
}

/// The rate of a route.
#[derive(Clone)]
pub(crate) struct RouteRate {
    pub(crate) key: RateKey,
    pub(crate) rates: KeyRates,
}

/// The way in which a client of a route shows who it is.
#[derive(Clone)]
pub(crate) enum Auth {
    Basic(BasicAuth),
    Forward(ForwardAuth),
}

/// Names and passwords (RFC 7617).
#[derive(Clone)]
pub(crate) struct BasicAuth {
    pub(crate) realm: Box<str>,
    /// The text behind `Basic ` in the field of each.
    credentials: Vec<Box<str>>,
}

/// A question to an upstream before each request.
#[derive(Clone)]
pub(crate) struct ForwardAuth {
    pub(crate) upstream: HttpUpstream,
    pub(crate) path: Box<str>,
    /// Fields of its answer that the request gets.
    pub(crate) copied: Vec<HeaderName>,
}

impl BasicAuth {
    pub(crate) fn new<'u>(realm: &str, users: impl IntoIterator<Item = (&'u str, &'u str)>) -> BasicAuth {
        let credentials =
            users.into_iter().map(|(name, password)| base64(&format!("{name}:{password}")).into());
        BasicAuth { realm: realm.into(), credentials: credentials.collect() }
    }

    /// True if a request shows one of these names with its password.
    pub(crate) fn admits(&self, fields: &HeaderMap) -> bool {
        let mut values = fields.get_all(AUTHORIZATION).iter();
        let (Some(value), None) = (values.next(), values.next()) else { return false };
        let Some((scheme, given)) = value.to_str().ok().and_then(|text| text.split_once(' ')) else {
            return false;
        };
        // All are compared, each to its end: the time says nothing of how much was right.
        let given = given.trim_start_matches(' ').as_bytes();
        let found =
            self.credentials.iter().fold(false, |found, known| is_same(known.as_bytes(), given) | found);
        scheme.eq_ignore_ascii_case("basic") && found
    }
}

/// Compares in a time that depends on the length of what was given alone.
fn is_same(known: &[u8], given: &[u8]) -> bool {
    let mut different = u8::from(known.len() != given.len());
    for (at, byte) in given.iter().enumerate() {
        different |= byte ^ known.get(at).copied().unwrap_or_default();
    }
    std::hint::black_box(different) == 0
}

/// By RFC 4648, 4.
fn base64(text: &str) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::new();
    for bytes in text.as_bytes().chunks(3) {
        let of = |at: usize| u32::from(bytes.get(at).copied().unwrap_or_default());
        let word = of(0) << 16 | of(1) << 8 | of(2);
        for digit in 0..4 {
            let is_there = digit <= bytes.len();
            let value = (word >> (18 - 6 * digit)) & 63;
            out.push(if is_there { char::from(DIGITS[value as usize]) } else { '=' });
        }
    }
    out
}

/// Networks that may use a route, and those that may not.
#[derive(Clone, Debug, Default)]
pub(crate) struct Networks {
    pub(crate) allowed: Vec<IpNet>,
    pub(crate) denied: Vec<IpNet>,
}

impl Networks {
    /// True if a client of this address may: it is not denied, and allowed where some are. A client
    /// on a Unix socket may where nothing is said of addresses that are allowed; one whose address
    /// is not known may where nothing is said of any.
    pub(crate) fn admit(&self, ip: Result<Option<IpAddr>, NoAddress>) -> bool {
        let Ok(ip) = ip else { return self.allowed.is_empty() && self.denied.is_empty() };
        let is_in =
            |networks: &[IpNet]| ip.is_some_and(|ip| networks.iter().any(|network| network.contains(&ip)));
        !is_in(&self.denied) && (self.allowed.is_empty() || is_in(&self.allowed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_admitted_with_their_passwords() {
        let auth = BasicAuth::new("x", [("Aladdin", "open sesame"), ("a", "b:c")]);
        let shows = |values: &[&'static str]| {
            let mut fields = HeaderMap::new();
            for value in values {
                fields.append(AUTHORIZATION, value.parse().expect("a value"));
            }
            auth.admits(&fields)
        };
        assert!(shows(&["Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ=="]));
        assert!(shows(&["basic  YTpiOmM="]));
        for wrong in
            ["Basic", "Basic ", "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ=", "Bearer YTpiOmM=", "Basic YTpiOmM=x"]
        {
            assert!(!shows(&[wrong]), "{wrong}");
        }
        assert!(!shows(&[]) && !shows(&["Basic YTpiOmM=", "Basic YTpiOmM="]));
    }

    #[test]
    fn digits_of_all_lengths_are_right() {
        for (text, digits) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(text), digits);
        }
    }

    #[test]
    fn denied_network_is_denied_within_an_allowed_one() {
        let network = |text: &str| text.parse::<IpNet>().expect("a network");
        let networks =
            Networks { allowed: vec![network("10.0.0.0/8")], denied: vec![network("10.1.0.0/16")] };
        let admits = |ip: &str| networks.admit(Ok(ip.parse().ok()));
        assert!(admits("10.2.3.4") && !admits("10.1.3.4") && !admits("192.0.2.1"));
        assert!(!networks.admit(Ok(None)) && Networks::default().admit(Ok(None)));
        let denied = Networks { denied: vec![network("10.0.0.0/8")], ..Networks::default() };
        assert!(denied.admit(Ok(None)) && !denied.admit(Err(NoAddress)));
        assert!(!networks.admit(Err(NoAddress)) && Networks::default().admit(Err(NoAddress)));
    }
}
