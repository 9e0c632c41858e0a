//! A route: where its requests go, and by which rules.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use hyper::header::{HeaderName, HeaderValue};
use hyper::{Method, StatusCode};
use ipnet::IpNet;
use ringserve_server::admission::{AdmissionError, KeyLimits, KeyRates};

use super::access::{Auth, BasicAuth, ForwardAuth, Networks, RateKey, RouteRate};
use super::pattern::PatternError;
use crate::fields::edit::FieldEdits;
use crate::target::HttpUpstream;

/// The times of the phases of a request. Those of a connection to an upstream, and of the wait for
/// one, are the [`Upstream`](ringserve_upstream::Upstream)'s:
/// [`connect_timeout`](ringserve_upstream::Upstream::connect_timeout) and
/// [`PoolLimits::wait_max`](ringserve_upstream::PoolLimits::wait_max).
#[derive(Clone, Debug)]
pub struct RouteTimeouts {
    pub(crate) response: Duration,
    pub(crate) body_idle: Duration,
    pub(crate) request: Option<Duration>,
}

impl Default for RouteTimeouts {
    fn default() -> RouteTimeouts {
        RouteTimeouts { response: Duration::from_secs(60), body_idle: Duration::from_secs(30), request: None }
    }
}

impl RouteTimeouts {
    /// Sets the time from the first try, or from the last byte that was taken of the body if that
    /// is later, to the head of the answer, with all tries. 60 s by default; then the client is
    /// answered with 504. It stands while the upstream waits for more of the body.
    pub fn response(self, time: Duration) -> RouteTimeouts {
        RouteTimeouts { response: time, ..self }
    }

    /// Sets how long an upstream may pause within the body of an answer. 30 s by default; then the
    /// client's connection is reset. What a client may pause within its body is
    /// [`Route::body_bytes_per_second_min`]'s.
    pub fn body_idle(self, time: Duration) -> RouteTimeouts {
        RouteTimeouts { body_idle: time, ..self }
    }

    /// Sets the time from the head of a request to the head of its answer, with all tries; then the
    /// client is answered with 504, or with 408 if its body is not there. Off by default. A shorter
    /// `grpc-timeout` of the client counts instead, and its end is no failure of the backend.
    pub fn request(self, time: Option<Duration>) -> RouteTimeouts {
        RouteTimeouts { request: time, ..self }
    }
}

/// A condition on a field of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FieldCondition {
    pub(crate) name: HeaderName,
    /// `None` is any value.
    pub(crate) value: Option<HeaderValue>,
}

/// The action for the requests of a route.
#[derive(Clone)]
pub(crate) enum Action {
    Proxy(HttpUpstream),
    /// By weight, drawn for each request.
    Split(Vec<(HttpUpstream, u32)>),
    Respond(Response),
    Redirect(StatusCode, Redirect),
    Fallback,
}

/// An answer that is always the same.
#[derive(Clone)]
pub(crate) struct Response {
    pub(crate) status: StatusCode,
    pub(crate) body: Bytes,
    pub(crate) content_type: HeaderValue,
}

/// The target to which a client is sent.
#[derive(Clone)]
pub(crate) enum Redirect {
    To(HeaderValue),
    /// The same target, by TLS.
    Https,
}

/// The target of requests and their rules: of [`RouteTable::route`](crate::RouteTable::route).
///
/// ```
/// use std::time::Duration;
/// use ringserve::upstream::Upstream;
/// use ringserve_gateway::{HttpUpstream, Route, RouteTimeouts};
///
/// let api = HttpUpstream::new(Upstream::new("api", ["10.0.0.11:80"]));
/// let route = Route::to(&api)
///     .body_bytes_max(10 << 20)
///     .timeouts(RouteTimeouts::default().response(Duration::from_secs(30)))
///     .retry_on([503]);
/// # let _ = route;
/// ```
#[derive(Clone)]
pub struct Route {
    pub(crate) action: Action,
    pub(crate) methods: Vec<Method>,
    pub(crate) conditions: Vec<FieldCondition>,
    pub(crate) strip_prefix: Option<Box<str>>,
    pub(crate) add_prefix: Option<Box<str>>,
    pub(crate) host: Option<HeaderValue>,
    pub(crate) request_fields: FieldEdits,
    pub(crate) response_fields: FieldEdits,
    pub(crate) timeouts: RouteTimeouts,
    pub(crate) retry_on: Vec<StatusCode>,
    pub(crate) body_bytes_max: u64,
    pub(crate) body_bytes_per_second_min: u32,
    pub(crate) upgrades: Vec<Box<str>>,
    pub(crate) has_raw_paths: bool,
    pub(crate) has_idempotency_keys: bool,
    pub(crate) networks: Networks,
    pub(crate) auth: Option<Auth>,
    pub(crate) rate: Option<RouteRate>,
    pub(crate) requests_max: usize,
}

impl Route {
    fn new(action: Action) -> Route {
        Route {
            action,
            methods: Vec::new(),
            conditions: Vec::new(),
            strip_prefix: None,
            add_prefix: None,
            host: None,
            request_fields: FieldEdits::default(),
            response_fields: FieldEdits::default(),
            timeouts: RouteTimeouts::default(),
            retry_on: Vec::new(),
            body_bytes_max: u64::MAX,
            body_bytes_per_second_min: 240,
            upgrades: Vec::new(),
            has_raw_paths: false,
            has_idempotency_keys: false,
            networks: Networks::default(),
            auth: None,
            rate: None,
            requests_max: usize::MAX,
        }
    }

    /// Requests go to this upstream.
    pub fn to(upstream: &HttpUpstream) -> Route {
        Route::new(Action::Proxy(upstream.clone()))
    }

    /// Requests go to one of these upstreams, which is drawn for each by weight.
    ///
    /// # Errors
    /// The weights are all 0, or their sum is above 2^32 - 1.
    pub fn split<'u>(
        shares: impl IntoIterator<Item = (&'u HttpUpstream, u32)>,
    ) -> Result<Route, PatternError> {
        let shares: Vec<_> = shares.into_iter().map(|(to, weight)| (to.clone(), weight)).collect();
        let sum = shares.iter().try_fold(0u32, |sum, (_, weight)| sum.checked_add(*weight));
        match sum {
            Some(1..) => Ok(Route::new(Action::Split(shares))),
            _ => Err(PatternError("the weights of a split have a sum of 1 to 2^32 - 1".into())),
        }
    }

    /// Requests get this answer.
    pub fn respond(status: StatusCode, content_type: HeaderValue, body: impl Into<Bytes>) -> Route {
        Route::new(Action::Respond(Response { status, body: body.into(), content_type }))
    }

    /// Clients are sent elsewhere, with a status such as 308.
    pub fn redirect(status: StatusCode, to: HeaderValue) -> Route {
        Route::new(Action::Redirect(status, Redirect::To(to)))
    }

    /// Clients are sent to the same target by TLS, with 308.
    pub fn redirect_to_https() -> Route {
        Route::new(Action::Redirect(StatusCode::PERMANENT_REDIRECT, Redirect::Https))
    }

    /// Requests that the rules of the route let in go to the [fallback](crate::Gateway::fallback).
    pub fn fallback() -> Route {
        Route::new(Action::Fallback)
    }

    /// Takes requests of these methods alone.
    pub fn methods(self, methods: impl IntoIterator<Item = Method>) -> Route {
        Route { methods: methods.into_iter().collect(), ..self }
    }

    /// Takes requests that have this field alone, with this value unless it is `None`.
    pub fn field(mut self, name: HeaderName, value: Option<HeaderValue>) -> Route {
        self.conditions.push(FieldCondition { name, value });
        self
    }

    /// Removes the front of each path before it is sent: `/v1` makes `/a` of `/v1/a`. A path that
    /// does not begin so is sent as it is.
    pub fn strip_prefix(self, prefix: &str) -> Route {
        Route { strip_prefix: Some(prefix.trim_end_matches('/').into()), ..self }
    }

    /// Puts this in front of each path before it is sent, behind
    /// [`strip_prefix`](Route::strip_prefix).
    pub fn add_prefix(self, prefix: &str) -> Route {
        Route { add_prefix: Some(prefix.trim_end_matches('/').into()), ..self }
    }

    /// Sends this `host` instead of the client's.
    pub fn host(self, host: HeaderValue) -> Route {
        Route { host: Some(host), ..self }
    }

    /// Changes the fields of requests, after the gateway's own are there.
    pub fn request_fields(self, edits: FieldEdits) -> Route {
        Route { request_fields: edits, ..self }
    }

    /// Changes the fields of answers.
    pub fn response_fields(self, edits: FieldEdits) -> Route {
        Route { response_fields: edits, ..self }
    }

    /// The fields of a request that are this gateway's word, and so no trailers.
    pub(crate) fn guarded_fields(&self) -> Box<[HeaderName]> {
        let copied = match &self.auth {
            Some(Auth::Forward(auth)) => &auth.copied[..],
            _ => &[],
        };
        copied.iter().chain(self.request_fields.names()).cloned().collect()
    }

    /// Sets how long each phase may take.
    pub fn timeouts(self, timeouts: RouteTimeouts) -> Route {
        Route { timeouts, ..self }
    }

    /// Asks another backend where one answers with a status of these, for requests that may be
    /// asked twice, within the upstream's [`Retry`](ringserve_upstream::Retry). Numbers that are no
    /// status are left out.
    pub fn retry_on(self, statuses: impl IntoIterator<Item = u16>) -> Route {
        let statuses = statuses.into_iter().filter_map(|status| StatusCode::from_u16(status).ok());
        Route { retry_on: statuses.collect(), ..self }
    }

    /// Sets how many bytes the body of a request may have; one that is longer is answered with 413.
    /// Without a bound by default.
    pub fn body_bytes_max(self, bytes: u64) -> Route {
        Route { body_bytes_max: bytes, ..self }
    }

    /// Sets how many bytes a second a client has to send of a body until the answer begins, over 30
    /// s in which the upstream could have taken them; one that is slower is answered with 408. 240
    /// by default; 0 is no bound, for calls of gRPC that send now and then. It holds whatever
    /// [`HttpOptions::body_bytes_per_second_min`](ringserve_server::http::HttpOptions::body_bytes_per_second_min)
    /// says of HTTP/1.1, and for each body of HTTP/2.
    pub fn body_bytes_per_second_min(self, bytes: u32) -> Route {
        Route { body_bytes_per_second_min: bytes, ..self }
    }

    /// Lets connections become tunnels for these protocols, such as `websocket`: after the
    /// upstream's 101 bytes pass both ways. `h2c` is never one of them. None by default. A tunnel
    /// has the time limits of its connection, such as
    /// [`Limits::idle_timeout`](ringserve_server::Limits::idle_timeout).
    pub fn upgrades<'p>(self, protocols: impl IntoIterator<Item = &'p str>) -> Route {
        let protocols = protocols.into_iter().map(str::to_ascii_lowercase).filter(|name| name != "h2c");
        Route { upgrades: protocols.map(Into::into).collect(), ..self }
    }

    /// Takes a request with an `idempotency-key` for one that may be asked twice, whatever its
    /// method. The upstream has to keep its promise for that field, or a lost POST may be done
    /// twice. Off by default.
    pub fn idempotency_keys(self) -> Route {
        Route { has_idempotency_keys: true, ..self }
    }

    /// Takes paths as they come, also those that are refused else: with `%2f`, `//`, a backslash.
    /// They are sent so: what stands behind decides alone what they mean, and may take `%2fadmin`
    /// for a path that another route guards. Those with `.` and `..` are refused.
    pub fn raw_paths(self) -> Route {
        Route { has_raw_paths: true, ..self }
    }

    /// Lets clients of these networks in alone; the others get 403.
    pub fn allow(mut self, networks: impl IntoIterator<Item = IpNet>) -> Route {
        self.networks.allowed.extend(networks);
        self
    }

    /// Refuses clients of these networks with 403, also where they are allowed.
    pub fn deny(mut self, networks: impl IntoIterator<Item = IpNet>) -> Route {
        self.networks.denied.extend(networks);
        self
    }

    /// Asks clients for one of these names and its password (RFC 7617). Without TLS each network on
    /// the way reads both.
    pub fn basic_auth<'u>(self, realm: &str, users: impl IntoIterator<Item = (&'u str, &'u str)>) -> Route {
        Route { auth: Some(Auth::Basic(BasicAuth::new(realm, users))), ..self }
    }

    /// Asks an upstream before each request: `GET path` with the request's fields, and its method,
    /// target and host as `x-forwarded-method`, `-uri` and `-host`. An answer of 2xx lets the
    /// request go on, with these fields of that answer; fields of these names that the client sent
    /// are removed. Any other answer is the client's.
    pub fn forward_auth(
        self,
        upstream: &HttpUpstream,
        path: &str,
        copied: impl IntoIterator<Item = HeaderName>,
    ) -> Route {
        let auth = ForwardAuth {
            upstream: upstream.clone(),
            path: path.into(),
            copied: copied.into_iter().collect(),
        };
        Route { auth: Some(Auth::Forward(auth)), ..self }
    }

    /// Bounds the requests a second of each key, over all shards; beyond it a request gets 429 with
    /// `retry-after`.
    ///
    /// # Errors
    /// A number is not from 1 to 1 000 000.
    pub fn rate(self, key: RateKey, per_second: u32, burst: u32) -> Result<Route, AdmissionError> {
        let rates = KeyRates::new(KeyLimits::default().frames(per_second, burst).name("routes"))?;
        Ok(Route { rate: Some(RouteRate { key, rates }), ..self })
    }

    /// Bounds the requests of this route that a shard has at once; one beyond gets 503. Without a
    /// bound by default.
    pub fn requests_max(self, requests: usize) -> Route {
        Route { requests_max: requests, ..self }
    }

    /// All upstreams that it asks.
    pub(crate) fn upstreams(&self) -> impl Iterator<Item = &HttpUpstream> {
        let (one, several): (Option<&HttpUpstream>, &[_]) = match &self.action {
            Action::Proxy(upstream) => (Some(upstream), &[]),
            Action::Split(shares) => (None, shares),
            _ => (None, &[]),
        };
        let asked = match &self.auth {
            Some(Auth::Forward(auth)) => Some(&auth.upstream),
            _ => None,
        };
        one.into_iter().chain(several.iter().map(|(upstream, _)| upstream)).chain(asked)
    }
}

impl fmt::Debug for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let to = match &self.action {
            Action::Proxy(upstream) => upstream.name(),
            Action::Split(_) => "split",
            Action::Respond(_) => "respond",
            Action::Redirect(..) => "redirect",
            Action::Fallback => "fallback",
        };
        f.debug_tuple("Route").field(&to).finish()
    }
}
