//! The question to an upstream whether a request may go on.

use std::time::Duration;

use hyper::body::Body;
use hyper::header::{CONTENT_LENGTH, EXPECT, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Response};

use super::answers::Refusal;
use super::body::GatewayBody;
use super::state::ProxyRequest;
use crate::client::exchange::{Head, SendRules};
use crate::client::request_body::{BodyKeeper, Source};
use crate::fields::names::X_FORWARDED_HOST;
use crate::fields::strip::{Direction, strip};
use crate::table::access::ForwardAuth;

const X_FORWARDED_METHOD: HeaderName = HeaderName::from_static("x-forwarded-method");
const X_FORWARDED_URI: HeaderName = HeaderName::from_static("x-forwarded-uri");

/// The time for the answer. A request waits for it before it is sent.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Asks for a request with these fields, which name its client. `None` lets it go on, with the
/// fields of the answer; else that answer is the client's.
pub(super) async fn ask(
    of: &mut ProxyRequest,
    auth: &ForwardAuth,
    mut fields: HeaderMap,
) -> Result<Option<Response<GatewayBody>>, Refusal> {
    // What the client says of itself under these names is what it would like to be.
    for name in &auth.copied {
        of.parts.headers.remove(name);
        fields.remove(name);
    }
    describe(of, &mut fields);
    let client = of.snapshot.client(&auth.upstream).ok_or(Refusal::Busy)?.clone();
    let head = Head { method: Method::GET, target: auth.path.parse().map_err(|_| Refusal::Busy)?, fields };
    let body = BodyKeeper::new(Source::Nothing, 0, 0);
    let rules = SendRules {
        response: ANSWER_MAX,
        request: Some(ANSWER_MAX),
        is_clients_time: false,
        body_idle: ANSWER_MAX,
        is_idempotent: true,
        retry_on: &[],
        can_switch: false,
        wants_backend: false,
    };
    let exchanged = client.exchange(head, body, &rules).await.map_err(|error| Refusal::from(&error))?;
    let mut answer = exchanged.answer;
    strip(answer.headers_mut(), Direction::ToClient).map_err(|_| Refusal::Malformed)?;
    if answer.status().is_informational() {
        return Err(Refusal::Switched);
    }
    if !answer.status().is_success() {
        return Ok(Some(answer.map(GatewayBody::of_upstream)));
    }
    for name in &auth.copied {
        for value in answer.headers().get_all(name) {
            of.parts.headers.append(name.clone(), value.clone());
        }
    }
    drain(answer.into_body()).await;
    Ok(None)
}

/// Adds what the request asks for.
fn describe(of: &ProxyRequest, fields: &mut HeaderMap) {
    fields.remove(CONTENT_LENGTH);
    fields.remove(EXPECT);
    if let Ok(method) = HeaderValue::from_str(of.parts.method.as_str()) {
        fields.insert(X_FORWARDED_METHOD, method);
    }
    let query = of.parts.uri.query().map_or(String::new(), |query| format!("?{query}"));
    if let Ok(uri) = HeaderValue::from_str(&format!("{}{query}", of.path())) {
        fields.insert(X_FORWARDED_URI, uri);
    }
    // A trusted proxy knows what its client asked for.
    fields.entry(X_FORWARDED_HOST).or_insert_with(|| of.authority.clone());
}

/// Reads a short answer to its end, so that its connection can be used again; a longer one is
/// closed.
async fn drain(body: crate::client::body::UpstreamBody) {
    let mut body = std::pin::pin!(body);
    for _ in 0..4 {
        match std::future::poll_fn(|task| body.as_mut().poll_frame(task)).await {
            Some(Ok(_)) => {}
            _ => return,
        }
    }
}
