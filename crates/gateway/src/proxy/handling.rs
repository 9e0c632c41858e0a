//! The steps of a request: which route takes it, whether it may, and what the upstream answers.

use std::rc::Rc;
use std::sync::Arc;

use hyper::body::{Body, Incoming};
use hyper::header::{CONTENT_LENGTH, HeaderValue, MAX_FORWARDS, UPGRADE};
use hyper::http::request::Parts;
use hyper::{Method, Request, Response, StatusCode, Uri, Version};
use ringserve_server::http::ClientInfo;
use ringserve_server::http::upgrade::{Switch, switch};
use ringserve_server::time::Time;

use super::answers::{self, Form, Refusal, refusal};
use super::body::{GatewayBody, Place};
use super::outgoing;
use super::questions;
use super::state::{Fallback, Inner, ProxyRequest};
use super::tunnel;
use crate::client::exchange::{Exchange, Head, HttpClient, SendRules, is_idempotent};
use crate::client::request_body::BodyError;
use crate::fields::host::{authority, name_of};
use crate::fields::names::IDEMPOTENCY_KEY;
use crate::fields::strip::{ConnectionFacts, Direction, StripError, strip};
use crate::table::access::{Auth, RateKey, RouteRate};
use crate::table::path::{PathForm, has_dots, normalize};
use crate::table::route::{Action, Redirect, Route};
use crate::target::HttpUpstream;

/// Facts of an answer for its line in the log.
#[derive(Default)]
struct Line {
    route: Option<Arc<str>>,
    upstream: Option<HttpUpstream>,
    backend: Option<Box<str>>,
    tries: u32,
}

/// Answers a request, and writes its line.
pub(super) async fn handle(
    gateway: Rc<Inner>,
    request: Request<Incoming>,
) -> Result<Response<GatewayBody>, BodyError> {
    let logged = gateway.options.has_access_log.then(|| {
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        (method, path, gateway.shard.now())
    });
    let mut line = Line::default();
    let answer = routed(&gateway, request, &mut line).await?;
    if let Some((method, path, began)) = logged {
        line.write(&gateway, &method, &path, &answer, began);
    }
    Ok(answer)
}

/// Answers a request by its route, or by the fallback.
async fn routed(
    gateway: &Rc<Inner>,
    request: Request<Incoming>,
    line: &mut Line,
) -> Result<Response<GatewayBody>, BodyError> {
    let form = Form::of(request.headers());
    let (mut parts, body) = request.into_parts();
    let client = parts.extensions.get::<ClientInfo>().cloned();
    let (authority, form_of_path) = match host_and_path(&mut parts) {
        Ok(found) => found,
        Err(why) => return Ok(refusal(why, form, None)),
    };
    let snapshot = gateway.routes.current(&gateway.shard);
    let path = match &form_of_path {
        PathOf::Same | PathOf::Ambiguous => parts.uri.path(),
        PathOf::Other(path) => path,
    };
    let table = snapshot.table.clone();
    let found = table.find(&name_of(&authority), path, &parts.method, &parts.headers);
    let is_raw = found.as_ref().is_some_and(|found| found.route.has_raw_paths);
    let path = match form_of_path {
        PathOf::Same => None,
        PathOf::Other(path) if !is_raw => Some(path),
        // What stands in for another path would be resolved by the upstream, past other routes.
        PathOf::Other(_) | PathOf::Ambiguous if is_raw && !has_dots(parts.uri.path()) => None,
        PathOf::Other(_) | PathOf::Ambiguous => return Ok(refusal(Refusal::Path, form, None)),
    };
    let fallback = gateway.options.fallback.as_ref();
    let Some(found) = found else {
        return match (fallback, with_path(&mut parts, path)) {
            (None, _) => Ok(refusal(Refusal::NoRoute, form, None)),
            (_, Err(why)) => Ok(refusal(why, form, None)),
            (Some(fallback), Ok(())) => fallback(Request::from_parts(parts, body)).await,
        };
    };
    let route = found.route;
    if gateway.options.has_access_log {
        line.route = Some(found.name.clone());
    }
    let handling = ProxyRequest { gateway: gateway.clone(), snapshot, parts, client, authority, path };
    if let Some(fallback) = fallback.filter(|_| matches!(route.action, Action::Fallback)) {
        // In a box, as all that few requests wait for: what is not is memory of each.
        return Box::pin(handling.fall_back(route, found.number, body, fallback, form)).await;
    }
    match handling.run(route, found.number, body, line).await {
        Ok(answer) => Ok(answer),
        Err(why) => Ok(refusal_of(why, form, route)),
    }
}

/// Gives a request the path by which it was matched.
fn with_path(parts: &mut Parts, path: Option<String>) -> Result<(), Refusal> {
    let Some(path) = path else { return Ok(()) };
    let target = match parts.uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path,
    };
    let mut uri = parts.uri.clone().into_parts();
    uri.path_and_query = Some(target.parse().map_err(|_| Refusal::Path)?);
    parts.uri = Uri::from_parts(uri).map_err(|_| Refusal::Path)?;
    Ok(())
}

/// A refusal, with the realm where a name and a password would help.
fn refusal_of(why: Refusal, form: Form, route: &Route) -> Response<GatewayBody> {
    let realm = match &route.auth {
        Some(Auth::Basic(basic)) if why == Refusal::Unknown => Some(&*basic.realm),
        _ => None,
    };
    refusal(why, form, realm)
}

/// The wish of a client to go on with another protocol.
struct SwitchRequest {
    protocol: HeaderValue,
    switch: Switch,
    /// Its place among the tunnels to the upstream.
    place: Place,
}

/// The path of a request as it is matched.
enum PathOf {
    /// As it came.
    Same,
    Other(String),
    Ambiguous,
}

/// For which host and what a request is.
fn host_and_path(parts: &mut Parts) -> Result<(HeaderValue, PathOf), Refusal> {
    match parts.method {
        Method::CONNECT => return Err(Refusal::Method(StatusCode::NOT_IMPLEMENTED)),
        Method::TRACE => return Err(Refusal::Method(StatusCode::METHOD_NOT_ALLOWED)),
        _ => {}
    }
    let authority = authority(parts).ok_or(Refusal::Authority)?;
    let path = match normalize(parts.uri.path()) {
        PathForm::Normal(std::borrow::Cow::Borrowed(_)) => PathOf::Same,
        PathForm::Normal(std::borrow::Cow::Owned(path)) => PathOf::Other(path),
        PathForm::Ambiguous => PathOf::Ambiguous,
    };
    Ok((authority, path))
}

impl ProxyRequest {
    async fn run(
        mut self,
        route: &Route,
        number: usize,
        body: Incoming,
        line: &mut Line,
    ) -> Result<Response<GatewayBody>, Refusal> {
        let has_underscores = self.gateway.options.has_underscores;
        let stripped = strip(&mut self.parts.headers, Direction::ToUpstream { has_underscores })?;
        self.admit(route)?;
        if let Some(answer) = self.last_hop()? {
            return Ok(answer);
        }
        if let Some(Auth::Forward(auth)) = &route.auth {
            let mut fields = self.parts.headers.clone();
            outgoing::name_client(&self, &mut fields);
            if let Some(mut answer) = Box::pin(questions::ask(&mut self, auth, fields)).await? {
                route.response_fields.apply(answer.headers_mut());
                return Ok(answer);
            }
        }
        let mut place = self.take_place(route, number)?;
        let mut answer = match &route.action {
            Action::Respond(fixed) => {
                answers::whole(fixed.status, fixed.content_type.clone(), fixed.body.clone())
            }
            Action::Redirect(status, Redirect::To(to)) => answers::redirect(*status, to.clone()),
            Action::Redirect(status, Redirect::Https) => {
                answers::redirect(*status, self.https().ok_or(Refusal::Authority)?)
            }
            Action::Fallback => return Err(Refusal::NoRoute),
            Action::Proxy(upstream) => {
                self.proxy(route, upstream, (body, &stripped), &mut place, line).await?
            }
            Action::Split(shares) => {
                let upstream = drawn(shares, self.gateway.shard.random());
                self.proxy(route, upstream, (body, &stripped), &mut place, line).await?
            }
        };
        route.response_fields.apply(answer.headers_mut());
        Ok(answer.map(|body| body.keep(place)))
    }

    /// Hands a request to the fallback once the route lets it: as it came, but for a path that has
    /// another form.
    async fn fall_back(
        mut self,
        route: &Route,
        number: usize,
        body: Incoming,
        fallback: &Fallback,
        form: Form,
    ) -> Result<Response<GatewayBody>, BodyError> {
        match self.admit_to_fallback(route).await {
            Ok(None) => {}
            Ok(Some(answer)) => return Ok(answer),
            Err(why) => return Ok(refusal_of(why, form, route)),
        }
        let path = self.path.take();
        let place = with_path(&mut self.parts, path).and_then(|()| self.take_place(route, number));
        let place = match place {
            Ok(place) => place,
            Err(why) => return Ok(refusal_of(why, form, route)),
        };
        let answer = fallback(Request::from_parts(self.parts, body)).await?;
        Ok(answer.map(|body| body.keep(place)))
    }

    /// Whether the client may, with the question to an upstream: its answer if it may not.
    async fn admit_to_fallback(&mut self, route: &Route) -> Result<Option<Response<GatewayBody>>, Refusal> {
        self.admit(route)?;
        let Some(Auth::Forward(auth)) = &route.auth else { return Ok(None) };
        let mut fields = self.parts.headers.clone();
        let has_underscores = self.gateway.options.has_underscores;
        strip(&mut fields, Direction::ToUpstream { has_underscores })?;
        outgoing::name_client(self, &mut fields);
        questions::ask(self, auth, fields).await
    }

    /// Whether the client may, in the order of what it costs to find out.
    fn admit(&self, route: &Route) -> Result<(), Refusal> {
        let networks = &route.networks;
        let has_networks = !networks.allowed.is_empty() || !networks.denied.is_empty();
        if has_networks && !networks.admit(self.ip()) {
            return Err(Refusal::Address);
        }
        if let Some(rate) = route.rate.as_ref().filter(|rate| rate.key == RateKey::Address) {
            self.take_rate(rate)?;
        }
        match &route.auth {
            Some(Auth::Basic(basic)) if !basic.admits(&self.parts.headers) => Err(Refusal::Unknown),
            _ => Ok(()),
        }
    }

    fn take_rate(&self, rate: &RouteRate) -> Result<(), Refusal> {
        outgoing::take_rate(&self.gateway.shard, rate, &self.parts.headers, || self.ip().ok().flatten())
    }

    /// The place of a client who may. Its fields are those that authentication left.
    fn take_place(&self, route: &Route, number: usize) -> Result<Option<Place>, Refusal> {
        if let Some(rate) = route.rate.as_ref().filter(|rate| rate.key != RateKey::Address) {
            self.take_rate(rate)?;
        }
        if route.requests_max == usize::MAX {
            return Ok(None);
        }
        let count = self.snapshot.in_flight.get(number).ok_or(Refusal::NoRoute)?;
        Place::take(count, route.requests_max).map(Some).ok_or(Refusal::Busy)
    }

    /// The answer to a question about the way that ends here (RFC 9110, 7.6.2).
    fn last_hop(&mut self) -> Result<Option<Response<GatewayBody>>, Refusal> {
        if self.parts.method != Method::OPTIONS {
            return Ok(None);
        }
        let Some(left) = self.parts.headers.get(MAX_FORWARDS) else { return Ok(None) };
        let left: u32 = left.to_str().ok().and_then(|text| text.parse().ok()).ok_or(Refusal::Fields)?;
        let Some(left) = left.checked_sub(1) else {
            return Ok(Some(Response::new(GatewayBody::whole(""))));
        };
        self.parts.headers.insert(MAX_FORWARDS, left.into());
        Ok(None)
    }

    /// The same target by TLS.
    fn https(&self) -> Option<HeaderValue> {
        let host = name_of(&self.authority);
        let query = self.parts.uri.query().map_or(String::new(), |query| format!("?{query}"));
        let target = format!("https://{host}{}{query}", self.path());
        (!host.is_empty()).then(|| HeaderValue::from_str(&target).ok())?
    }

    async fn proxy(
        mut self,
        route: &Route,
        upstream: &HttpUpstream,
        (body, stripped): (Incoming, &ConnectionFacts),
        place: &mut Option<Place>,
        line: &mut Line,
    ) -> Result<Response<GatewayBody>, Refusal> {
        if self.gateway.options.has_access_log {
            line.upstream = Some(upstream.clone());
        }
        if body.size_hint().lower() > route.body_bytes_max {
            return Err(Refusal::TooLong);
        }
        let is_empty = body.is_end_stream();
        // The length is that of the body as it comes.
        self.parts.headers.remove(CONTENT_LENGTH);
        if is_empty && [Method::POST, Method::PUT, Method::PATCH].contains(&self.parts.method) {
            self.parts.headers.insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
        }
        let client = self.snapshot.client(upstream).ok_or(Refusal::Busy)?.clone();
        let switching = self.switching(route, stripped, is_empty, &client)?;
        let is_idempotent = is_idempotent(&self.parts.method)
            || (route.has_idempotency_keys && self.parts.headers.contains_key(IDEMPOTENCY_KEY));
        let (request, is_clients_time) = outgoing::deadline(&self.parts.headers, route.timeouts.request);
        let mut fields = std::mem::take(&mut self.parts.headers);
        outgoing::name_client(&self, &mut fields);
        self.parts.headers = fields;
        let head =
            outgoing::head(&mut self, route, stripped, switching.as_ref().map(|asked| &asked.protocol));
        let rules = SendRules {
            response: route.timeouts.response,
            request,
            is_clients_time,
            body_idle: route.timeouts.body_idle,
            is_idempotent,
            retry_on: &route.retry_on,
            can_switch: switching.is_some(),
            wants_backend: self.gateway.options.has_access_log,
        };
        let guarded = if is_empty { Box::default() } else { route.guarded_fields() };
        let body =
            client.keep(body, route.body_bytes_max, route.body_bytes_per_second_min, is_idempotent, guarded);
        let exchanged = exchange(&client, head.ok_or(Refusal::Path)?, body, &rules).await?;
        line.tries = exchanged.tries;
        line.backend = exchanged.backend;
        ProxyRequest::answer(exchanged.answer, switching, place)
    }

    /// The protocol with which the client wants to go on, and the connection, where the route
    /// allows it.
    fn switching(
        &mut self,
        route: &Route,
        stripped: &ConnectionFacts,
        is_empty: bool,
        client: &HttpClient,
    ) -> Result<Option<SwitchRequest>, Refusal> {
        let Some(protocol) = stripped.upgrade.clone() else { return Ok(None) };
        let is_asked = |allowed: &str| protocol.as_bytes().eq_ignore_ascii_case(allowed.as_bytes());
        let is_allowed = route.upgrades.iter().any(|allowed| is_asked(allowed));
        if !is_allowed || !is_empty || self.parts.version != Version::HTTP_11 {
            return Ok(None);
        }
        let Some(switch) = switch(&mut self.parts.extensions) else { return Ok(None) };
        let place = Place::take(client.tunnels(), client.upstream().most_tunnels()).ok_or(Refusal::Busy)?;
        Ok(Some(SwitchRequest { protocol, switch, place }))
    }

    /// Passes an answer on.
    fn answer(
        mut answer: Response<crate::client::body::UpstreamBody>,
        switching: Option<SwitchRequest>,
        place: &mut Option<Place>,
    ) -> Result<Response<GatewayBody>, Refusal> {
        let status = answer.status();
        let stripped = strip(answer.headers_mut(), Direction::ToClient).map_err(|_| Refusal::Malformed)?;
        *answer.version_mut() = Version::HTTP_11;
        if status != StatusCode::SWITCHING_PROTOCOLS {
            return Ok(answer.map(GatewayBody::of_upstream));
        }
        let Some(SwitchRequest { protocol: asked, switch, place: of_tunnel }) = switching else {
            return Err(Refusal::Switched);
        };
        let is_same = |given: &HeaderValue| given.as_bytes().eq_ignore_ascii_case(asked.as_bytes());
        if !stripped.upgrade.as_ref().is_some_and(is_same) {
            return Err(Refusal::Switched);
        }
        let (mut head, body) = answer.into_parts();
        let connection = body.into_connection().ok_or(Refusal::Malformed)?;
        tunnel::begin(switch, connection, (place.take(), of_tunnel));
        head.headers.insert(UPGRADE, asked);
        head.headers.insert(hyper::header::CONNECTION, HeaderValue::from_static("upgrade"));
        Ok(Response::from_parts(head, GatewayBody::whole("")))
    }
}

async fn exchange(
    client: &HttpClient,
    head: Head,
    body: crate::client::request_body::BodyKeeper,
    rules: &SendRules<'_>,
) -> Result<Exchange, Refusal> {
    client.exchange(head, body, rules).await.map_err(|error| {
        tracing::debug!(upstream = client.upstream().name(), %error, "a request was not answered");
        Refusal::from(&error)
    })
}

impl From<StripError> for Refusal {
    fn from(why: StripError) -> Refusal {
        match why {
            StripError::Coding => Refusal::Coding,
            StripError::Invalid => Refusal::Fields,
        }
    }
}

/// One of several, by weight.
fn drawn(shares: &[(HttpUpstream, u32)], random: u64) -> &HttpUpstream {
    let sum: u64 = shares.iter().map(|(_, weight)| u64::from(*weight)).sum();
    let mut at = ((u128::from(random) * u128::from(sum)) >> 64) as u64;
    let mut found = &shares[0].0;
    for (upstream, weight) in shares {
        found = upstream;
        let weight = u64::from(*weight);
        if at < weight {
            break;
        }
        at -= weight;
    }
    found
}

impl Line {
    fn write(
        &self,
        gateway: &Inner,
        method: &Method,
        path: &str,
        answer: &Response<GatewayBody>,
        began: Time,
    ) {
        tracing::info!(
            target: "ringserve::access::gateway",
            shard = gateway.shard.index(),
            method = method.as_str(),
            path,
            route = self.route.as_deref(),
            upstream = self.upstream.as_ref().map(HttpUpstream::name),
            backend = self.backend.as_deref(),
            tries = self.tries,
            status = answer.status().as_u16(),
            seconds = (gateway.shard.now() - began).as_secs_f64(),
            "began to answer"
        );
    }
}

#[cfg(test)]
mod tests {
    use ringserve_upstream::Upstream;

    use super::*;

    #[test]
    fn shares_of_a_split_are_those_of_the_weights() {
        let upstream = |name: &str| HttpUpstream::new(Upstream::new(name, ["10.0.0.1:80"]));
        let shares = [(upstream("a"), 0), (upstream("b"), 1), (upstream("c"), 3), (upstream("d"), 0)];
        let count = |wanted: &str| {
            let at = |part: u64| drawn(&shares, part * (u64::MAX / 400) + 1000).name() == wanted;
            (0..400).filter(|part| at(*part)).count()
        };
        assert_eq!(["a", "b", "c", "d"].map(count), [0, 100, 300, 0]);
        assert_eq!(drawn(&shares, u64::MAX).name(), "c");
    }
}
