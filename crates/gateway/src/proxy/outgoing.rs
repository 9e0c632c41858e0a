//! The head of a request as an upstream gets it.

use std::hash::{Hash, Hasher};
use std::net::IpAddr;
use std::time::Duration;

use hyper::Uri;
use hyper::header::{CONNECTION, HOST, HeaderMap, HeaderName, HeaderValue, TE, UPGRADE};
use ringserve_server::Shard;
use ringserve_server::admission::AddressKey;

use super::answers::Refusal;
use super::state::ProxyRequest;
use crate::client::exchange::Head;
use crate::fields::forwarded::ClientFacts;
use crate::fields::names::GRPC_TIMEOUT;
use crate::fields::strip::{ConnectionFacts, join_cookies};
use crate::table::access::{RateKey, RouteRate};
use crate::table::route::Route;

/// Writes the facts of the client into the fields of its request, in place of what it says of
/// itself.
pub(super) fn name_client(of: &ProxyRequest, fields: &mut HeaderMap) {
    join_cookies(fields);
    let (shard, telling) = (&of.gateway.shard, &of.gateway.options.telling);
    let facts = ClientFacts {
        addr: of.addr(),
        is_tls: is_tls(of),
        authority: &of.authority,
        version: of.parts.version,
        random: if telling.has_request_id { [shard.random(), shard.random()] } else { [0; 2] },
    };
    telling.tell(fields, &facts);
}

/// The head of a request, whose fields were stripped and name its client. What is of this
/// connection is added last. `None` if the target would be none.
pub(super) fn head(
    of: &mut ProxyRequest,
    route: &Route,
    stripped: &ConnectionFacts,
    switches_to: Option<&HeaderValue>,
) -> Option<Head> {
    let target = target(of, route)?;
    let mut fields = std::mem::take(&mut of.parts.headers);
    if stripped.wants_trailers {
        fields.insert(TE, HeaderValue::from_static("trailers"));
        fields.insert(CONNECTION, HeaderValue::from_static("te"));
    }
    if let Some(name) = switches_to {
        fields.insert(UPGRADE, name.clone());
        fields.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    }
    if let Some(host) = &route.host {
        fields.insert(HOST, host.clone());
    }
    route.request_fields.apply(&mut fields);
    Some(Head { method: of.parts.method.clone(), target, fields })
}

/// A path and a query, as the route rewrites them.
fn target(of: &ProxyRequest, route: &Route) -> Option<Uri> {
    let uri = &of.parts.uri;
    let is_same = of.path.is_none() && route.strip_prefix.is_none() && route.add_prefix.is_none();
    if is_same && uri.authority().is_none() {
        return Some(uri.clone());
    }
    let path = rewritten(of.path(), route.strip_prefix.as_deref(), route.add_prefix.as_deref());
    match uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path,
    }
    .parse()
    .ok()
}

fn rewritten(path: &str, strip: Option<&str>, add: Option<&str>) -> String {
    let rest = match strip.and_then(|prefix| path.strip_prefix(prefix)) {
        Some("") => "/",
        Some(rest) if rest.starts_with('/') => rest,
        _ => path,
    };
    format!("{}{rest}", add.unwrap_or_default())
}

#[cfg(feature = "tls")]
fn is_tls(of: &ProxyRequest) -> bool {
    of.client.as_ref().is_some_and(|client| client.tls().is_some())
}

#[cfg(not(feature = "tls"))]
fn is_tls(_of: &ProxyRequest) -> bool {
    false
}

/// The time of a request: the route's, or what a client of gRPC gives it. True if that is the
/// client's.
pub(super) fn deadline(fields: &HeaderMap, of_route: Option<Duration>) -> (Option<Duration>, bool) {
    let asked = fields.get(GRPC_TIMEOUT).and_then(|value| grpc_timeout(value.to_str().ok()?));
    match (of_route, asked) {
        (Some(own), Some(asked)) if own <= asked => (Some(own), false),
        (_, Some(asked)) => (Some(asked), true),
        (own, None) => (own, false),
    }
}

/// Up to eight digits and a unit.
fn grpc_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let is_number = (1..=8).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit());
    let count: u64 = digits.parse().ok().filter(|_| is_number)?;
    match unit {
        "H" => Some(Duration::from_secs(count * 3600)),
        "M" => Some(Duration::from_secs(count * 60)),
        "S" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_millis(count)),
        "u" => Some(Duration::from_micros(count)),
        "n" => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

/// Takes a request from the rate of its key.
pub(super) fn take_rate(
    shard: &Shard,
    rate: &RouteRate,
    fields: &HeaderMap,
    ip: impl Fn() -> Option<IpAddr>,
) -> Result<(), Refusal> {
    let taken = match &rate.key {
        // A customer of a provider has 2^64 addresses of IPv6 at least.
        RateKey::Address => rate.rates.take(shard, &ip().map(AddressKey::of), 1, 0),
        RateKey::Field(name) => rate.rates.take(shard, &Lines(fields, name), 1, 0),
    };
    taken.map_err(|later| {
        let seconds = later.time().as_secs_f64().ceil().clamp(1.0, 3600.0);
        Refusal::Rate(seconds as u32)
    })
}

/// All lines of a field: which one counts differs by server.
struct Lines<'f>(&'f HeaderMap, &'f HeaderName);

impl Hash for Lines<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.get_all(self.1).iter().for_each(|value| value.as_bytes().hash(state));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_rewritten_by_whole_segments() {
        for (path, strip, add, sent) in [
            ("/v1/a", Some("/v1"), None, "/a"),
            ("/v1", Some("/v1"), None, "/"),
            ("/v1/", Some("/v1"), None, "/"),
            ("/v10/a", Some("/v1"), None, "/v10/a"),
            ("/a", None, Some("/api"), "/api/a"),
            ("/v1/a", Some("/v1"), Some("/api/v2"), "/api/v2/a"),
            ("/", None, Some("/api"), "/api/"),
        ] {
            assert_eq!(rewritten(path, strip, add), sent, "{path}");
        }
    }

    #[test]
    fn time_of_a_call_is_the_shorter_one() {
        let of = |value: &'static str, route: Option<u64>| {
            let fields = HeaderMap::from_iter([(GRPC_TIMEOUT, HeaderValue::from_static(value))]);
            let (time, is_clients) = deadline(&fields, route.map(Duration::from_millis));
            (time.map_or(0, |time| time.as_micros()), is_clients)
        };
        assert_eq!(of("2S", None), (2_000_000, true));
        assert_eq!(of("250m", Some(1000)), (250_000, true));
        assert_eq!(of("99999999H", Some(5)), (5_000, false));
        for wrong in ["", "S", "1", "123456789S", "1x", "-1S", "1.5S", "\u{e4}"] {
            assert_eq!(grpc_timeout(wrong), None, "{wrong}");
        }
    }
}
