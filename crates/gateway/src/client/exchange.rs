//! A request and its answer, with all tries.

use std::cell::Cell;
use std::fmt;
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Incoming};
use hyper::header::{
    CONNECTION, CONTENT_LENGTH, HOST, HeaderMap, HeaderName, HeaderValue, TRANSFER_ENCODING, UPGRADE,
};
use hyper::http::request::Parts;
use hyper::http::uri::{PathAndQuery, Scheme};
use hyper::{Method, Request, Response, StatusCode, Uri, Version};
use ringserve_server::Shard;
use ringserve_server::http::ShardTimer;
use ringserve_server::time::Time;
use ringserve_upstream::{Backend, Call, Connections, Outcome, PooledConnection, UpstreamError};

use super::body::{Held, UpstreamBody};
use super::connection::SendError;
use super::http::HttpConnection;
use super::request_body::{BodyError, BodyFault, BodyKeeper, RequestBody, Source, boxed};
use crate::target::{HttpUpstream, UpstreamProtocol};

/// A client of an [`HttpUpstream`] on one shard. Clones share its connections, of which each has a
/// request at a time.
///
/// ```no_run
/// use hyper::Request;
/// use ringserve::Shard;
/// use ringserve::upstream::Upstream;
/// use ringserve_gateway::{ClientError, HttpClient, HttpUpstream};
/// # use http_body_util::{BodyExt, Empty};
/// # use hyper::body::Bytes;
///
/// async fn ask(shard: &Shard, upstream: &HttpUpstream) -> Result<Bytes, ClientError> {
///     let client = HttpClient::new(upstream, shard); // once, in the factory of a service
///     let request = Request::get("/users/1").body(Empty::<Bytes>::new()).expect("a request");
///     let answer = client.send(request).await?;
///     Ok(answer.into_body().collect().await.map_err(ClientError::from)?.to_bytes())
/// }
/// ```
#[derive(Clone)]
pub struct HttpClient {
    inner: Rc<Inner>,
}

struct Inner {
    shard: Shard,
    upstream: HttpUpstream,
    connections: Connections<HttpConnection>,
    /// Tunnels that the shard has.
    tunnels: Rc<Cell<usize>>,
}

/// Why a request has no answer.
#[non_exhaustive]
pub enum ClientError {
    /// There is no connection, the request was lost, or what came is no answer.
    Upstream(UpstreamError),
    /// The body of the request broke.
    Body,
    /// The body of the request is longer than it may be.
    BodyTooLong,
    /// The body of the request came too slowly.
    BodyTooSlow,
    /// The answer broke within its body.
    Answer(std::io::Error),
}

impl fmt::Display for ClientError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ClientError::Upstream(error) => error.fmt(f),
            ClientError::Body => f.write_str("the body of the request broke"),
            ClientError::BodyTooLong => f.write_str("the body of the request is too long"),
            ClientError::BodyTooSlow => f.write_str("the body of the request came too slowly"),
            ClientError::Answer(error) => error.fmt(f),
        }
    }
}

ringserve_buf::debug_is_display!(ClientError);

impl std::error::Error for ClientError {}

impl From<UpstreamError> for ClientError {
    fn from(error: UpstreamError) -> ClientError {
        ClientError::Upstream(error)
    }
}

impl From<std::io::Error> for ClientError {
    fn from(error: std::io::Error) -> ClientError {
        ClientError::Answer(error)
    }
}

/// The rules by which a request is sent.
pub(crate) struct SendRules<'r> {
    /// From the last byte that was taken of the request to the head of the answer, with all tries.
    pub(crate) response: Duration,
    /// From the begin to the head of the answer, with all tries.
    pub(crate) request: Option<Duration>,
    /// The client chose that time, so its end says nothing about a backend.
    pub(crate) is_clients_time: bool,
    pub(crate) body_idle: Duration,
    pub(crate) is_idempotent: bool,
    pub(crate) retry_on: &'r [StatusCode],
    /// The connection may become something else.
    pub(crate) can_switch: bool,
    pub(crate) wants_backend: bool,
}

/// An answer, and what it took.
pub(crate) struct Exchange {
    pub(crate) answer: Response<UpstreamBody>,
    pub(crate) tries: u32,
    /// Its name, if the rules asked for it.
    pub(crate) backend: Option<Box<str>>,
}

/// Longer than any server runs.
const UNBOUNDED: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

impl HttpClient {
    /// A client on `shard`, for the factory of a service: each has its own connections, and its
    /// share of the checks.
    pub fn new(upstream: &HttpUpstream, shard: &Shard) -> HttpClient {
        let (on, protocol) = (shard.clone(), upstream.spoken());
        let timer = (protocol != UpstreamProtocol::Http1).then(|| ShardTimer::new(shard));
        let connections = upstream.upstream().connections(shard, move |stream, _backend: &Backend| {
            let (on, timer) = (on.clone(), timer.clone());
            async move { HttpConnection::begin(&on, protocol, timer.as_ref(), stream).await }
        });
        let (shard, upstream, tunnels) = (shard.clone(), upstream.clone(), Rc::default());
        HttpClient { inner: Rc::new(Inner { shard, upstream, connections, tunnels }) }
    }

    /// Sends a request, and waits for the head of its answer. Its target is a path; without a
    /// `host` it has the backend's name. One that is lost is sent to another backend if its method
    /// is idempotent and its body was kept ([`HttpUpstream::replay_bytes_max`]), within the
    /// upstream's [`Retry`](ringserve_upstream::Retry).
    ///
    /// # Errors
    /// There is no answer within
    /// [`Upstream::answer_timeout`](ringserve_upstream::Upstream::answer_timeout), no backend, or
    /// no room.
    pub async fn send<B>(&self, request: Request<B>) -> Result<Response<UpstreamBody>, ClientError>
    where
        B: Body<Data = Bytes> + 'static,
        B::Error: Into<BodyError>,
    {
        let (parts, body) = request.into_parts();
        let source = Source::Other(boxed(body));
        let body = BodyKeeper::new(source, u64::MAX, self.inner.upstream.kept_bytes_max());
        let body = body.timed(&self.inner.shard, 0);
        let rules = SendRules {
            response: UNBOUNDED,
            request: None,
            is_clients_time: false,
            body_idle: Duration::from_secs(30),
            is_idempotent: is_idempotent(&parts.method),
            retry_on: &[],
            can_switch: false,
            wants_backend: false,
        };
        Ok(self.exchange(Head::from(parts), body, &rules).await?.answer)
    }

    /// The count of its tunnels.
    pub(crate) fn tunnels(&self) -> &Rc<Cell<usize>> {
        &self.inner.tunnels
    }

    pub(crate) fn upstream(&self) -> &HttpUpstream {
        &self.inner.upstream
    }

    /// Keeps as much of the body as [`HttpUpstream::replay_bytes_max`] says, if its request may be
    /// sent again.
    pub(crate) fn keep(
        &self,
        body: Incoming,
        bytes_max: u64,
        bytes_per_second_min: u32,
        is_idempotent: bool,
        guarded: Box<[HeaderName]>,
    ) -> BodyKeeper {
        let may_be_sent_again = is_idempotent || self.may_be_refused();
        let kept_max = if may_be_sent_again { self.inner.upstream.kept_bytes_max() } else { 0 };
        BodyKeeper::new(Source::Client(body), bytes_max, kept_max)
            .timed(&self.inner.shard, bytes_per_second_min)
            .without(guarded)
    }

    /// Sends a request, to other backends too if that fails and it may be sent again.
    pub(crate) async fn exchange(
        &self,
        head: Head,
        body: BodyKeeper,
        rules: &SendRules<'_>,
    ) -> Result<Exchange, ClientError> {
        let mut call = self.call(rules);
        let kept = (rules.is_idempotent || self.may_be_refused()).then(|| head.clone());
        let has_host = head.fields.contains_key(HOST);
        let mut next = Some(head);
        let mut tries = 0;
        let mut limits = TimeLimits::new(rules, call.left(), self.inner.shard.now());
        // The last answer that is worth another try.
        let mut refused: Option<Box<(Response<Incoming>, PooledConnection<HttpConnection>)>> = None;
        loop {
            let mut connection = match (call.take().await, refused.take()) {
                (Ok(connection), _) => connection,
                (Err(error), None) => return Err(error.into()),
                (Err(_), Some(last)) => {
                    let (answer, connection) = *last;
                    return Ok(self.exchanged(answer, connection, body, rules, tries));
                }
            };
            let Some(mut head) = next.take().or_else(|| kept.clone()) else {
                return Err(UpstreamError::Lost.into());
            };
            tries += 1;
            if rules.can_switch {
                connection.can_switch();
            }
            if !has_host {
                name_backend(&mut head.fields, connection.backend());
            }
            let sent = head.into_request_on(&connection, &body);
            let answered = self.answer(&mut connection, sent, &body, &mut limits).await;
            let is_repeatable = rules.is_idempotent && body.can_be_sent();
            let failed = match answered {
                TryResult::Answer(answer) => {
                    let is_refusal = is_repeatable && rules.retry_on.contains(&answer.status());
                    if is_refusal && call.retry(&mut connection, Outcome::Failed).is_ok() {
                        refused = Some(Box::new((answer, connection)));
                        continue;
                    }
                    return Ok(self.exchanged(answer, connection, body, rules, tries));
                }
                TryResult::Error(SendError::Unsent(unsent)) => {
                    tries -= 1;
                    next = Some(Head::taken_back(*unsent));
                    Outcome::Unsent
                }
                TryResult::Error(SendError::Refused) if body.can_be_sent() => {
                    // It was not looked at, so it may be asked again whatever it is.
                    call = call.idempotent();
                    next = kept.clone();
                    Outcome::Failed
                }
                TryResult::Error(error) => match end_of_try(error, &body) {
                    (lost @ (Outcome::Lost | Outcome::Aborted), _) => lost,
                    (outcome, error) => {
                        connection.finish(outcome);
                        return Err(error);
                    }
                },
                TryResult::Over(outcome, error) => {
                    connection.finish(outcome);
                    return Err(error);
                }
            };
            if next.is_none() && !is_repeatable {
                connection.finish(failed);
                return Err(UpstreamError::Lost.into());
            }
            call.retry(&mut connection, failed)?;
        }
    }

    /// True if a backend may say of any request that it was not looked at, as with HTTP/2.
    fn may_be_refused(&self) -> bool {
        self.inner.upstream.spoken() != UpstreamProtocol::Http1
    }

    /// The tries of a request, without one yet.
    fn call(&self, rules: &SendRules<'_>) -> Call<HttpConnection> {
        let call = self.inner.connections.call();
        let call = match rules.request {
            Some(time) => call.timeout(time),
            None if rules.response != UNBOUNDED => call.timeout(UNBOUNDED),
            None => call,
        };
        if rules.is_idempotent { call.idempotent() } else { call }
    }

    /// Waits for the answer on a connection.
    async fn answer(
        &self,
        connection: &mut PooledConnection<HttpConnection>,
        request: Request<RequestBody>,
        body: &BodyKeeper,
        limits: &mut TimeLimits,
    ) -> TryResult {
        let shard = &self.inner.shard;
        let mut send = pin!(connection.send(request));
        limits.begin_try(shard.now());
        loop {
            let now = shard.now();
            let until = match limits.check(now, body) {
                Ok(until) => until,
                Err((outcome, error)) => return TryResult::Over(outcome, error),
            };
            let mut sleep = pin!(shard.sleep(until - now));
            let answered = poll_fn(|task| {
                if let Poll::Ready(answered) = send.as_mut().poll(task) {
                    return Poll::Ready(Some(answered));
                }
                sleep.as_mut().poll(task).map(|()| None)
            });
            match answered.await {
                Some(Ok(answer)) => return TryResult::Answer(answer),
                // hyper says of HTTP/2 that the stream was reset, and not by whom.
                Some(Err(_)) if body.fault().is_some() => return TryResult::Error(SendError::Body),
                Some(Err(error)) => return TryResult::Error(error),
                None => {}
            }
        }
    }

    fn exchanged(
        &self,
        answer: Response<Incoming>,
        mut connection: PooledConnection<HttpConnection>,
        body: BodyKeeper,
        rules: &SendRules<'_>,
        tries: u32,
    ) -> Exchange {
        body.forget();
        connection.finish(match answer.status() {
            StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => {
                Outcome::Failed
            }
            _ => Outcome::Answered,
        });
        let backend = rules.wants_backend.then(|| connection.backend().name().into());
        let is_last = closes(answer.headers(), answer.version());
        let held = Held {
            shard: self.inner.shard.clone(),
            connection,
            request: body,
            idle_max: rules.body_idle,
            is_last,
            is_switch: answer.status() == StatusCode::SWITCHING_PROTOCOLS,
        };
        Exchange { answer: answer.map(|incoming| UpstreamBody::new(incoming, held)), tries, backend }
    }
}

impl fmt::Debug for HttpClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HttpClient").field(&self.inner.upstream).finish()
    }
}

/// The result of a try.
enum TryResult {
    Answer(Response<Incoming>),
    Error(SendError),
    /// It took too long: the end for the backend, and for the client.
    Over(Outcome, ClientError),
}

/// The times of a request, with all tries.
struct TimeLimits {
    response: Duration,
    request: Duration,
    is_clients_time: bool,
    /// When the first try began, and this one.
    begun: Option<Time>,
    try_begun: Time,
    /// When the time of the request is over.
    until: Time,
}

impl TimeLimits {
    fn new(rules: &SendRules<'_>, left: Duration, now: Time) -> TimeLimits {
        TimeLimits {
            response: rules.response,
            request: left,
            is_clients_time: rules.is_clients_time,
            begun: None,
            try_begun: now,
            until: now + left,
        }
    }

    fn begin_try(&mut self, now: Time) {
        self.begun.get_or_insert(now);
        self.try_begun = now;
    }

    /// Until when to wait before the next look.
    fn check(&self, now: Time, body: &BodyKeeper) -> Result<Time, (Outcome, ClientError)> {
        let pace = body.pace().unwrap_or_default();
        let timed_out = || ClientError::from(UpstreamError::TimedOut);
        // The time that was the backend's.
        let had = now - pace.last().map_or(self.try_begun, |last| last.max(self.try_begun));
        let blame = |time: Duration| {
            let is_to_blame = !pace.is_waiting() && had >= time / 2;
            if is_to_blame { Outcome::TimedOut } else { Outcome::Unknown }
        };
        if now >= self.until {
            return Err(match () {
                () if self.is_clients_time => (Outcome::Unknown, timed_out()),
                () if pace.is_waiting() => (Outcome::Unknown, ClientError::BodyTooSlow),
                () => (blame(self.request), timed_out()),
            });
        }
        let next = if pace.is_waiting() {
            match pace.too_slow_at() {
                Some(at) if now >= at => return Err((Outcome::Unknown, ClientError::BodyTooSlow)),
                // Its last byte may come at once.
                at => at.map_or(now + self.response, |at| at.min(now + self.response)),
            }
        } else {
            let begun = self.begun.unwrap_or(now);
            let at = pace.last().map_or(begun, |last| last.max(begun)) + self.response;
            if now >= at {
                return Err((blame(self.response), timed_out()));
            }
            if body.pace().is_some() { at.min(now + pace.rest()) } else { at }
        };
        Ok(next.min(self.until))
    }
}

/// The head of a request, of which copies are sent.
#[derive(Clone)]
pub(crate) struct Head {
    pub(crate) method: Method,
    pub(crate) target: Uri,
    pub(crate) fields: HeaderMap,
}

impl From<Parts> for Head {
    fn from(parts: Parts) -> Head {
        Head { method: parts.method, target: parts.uri, fields: parts.headers }
    }
}

impl Head {
    /// The head of a request that was not sent.
    fn taken_back(request: Request<RequestBody>) -> Head {
        let (parts, _) = request.into_parts();
        let mut head = Head::from(parts);
        let authority = head.target.authority().and_then(|name| HeaderValue::from_str(name.as_str()).ok());
        if let Some(host) = authority {
            head.fields.insert(HOST, host);
            let path = head.target.path_and_query().cloned();
            head.target = Uri::from(path.unwrap_or(PathAndQuery::from_static("/")));
        }
        head
    }

    /// A request of the version that a connection speaks.
    fn into_request_on(self, connection: &HttpConnection, body: &BodyKeeper) -> Request<RequestBody> {
        match connection.http2_scheme() {
            Some(scheme) => self.into_http2_request(scheme, body),
            None => self.into_request(body),
        }
    }

    /// A request of HTTP/2, which has no fields of a connection, and its host in the target.
    fn into_http2_request(self, scheme: Scheme, body: &BodyKeeper) -> Request<RequestBody> {
        let body = body.body();
        let mut fields = self.fields;
        for name in [CONNECTION, TRANSFER_ENCODING, UPGRADE] {
            fields.remove(name);
        }
        if !body.is_end_stream() {
            fields.remove(CONTENT_LENGTH);
        }
        let host = fields.remove(HOST);
        let mut target = self.target.into_parts();
        target.authority = host.and_then(|host| host.as_bytes().try_into().ok());
        target.scheme = target.authority.is_some().then_some(scheme);
        let mut request = Request::new(body);
        *request.method_mut() = self.method;
        *request.uri_mut() = Uri::from_parts(target).unwrap_or_default();
        *request.version_mut() = Version::HTTP_2;
        *request.headers_mut() = fields;
        request
    }

    /// A request with one framing: that of its body.
    fn into_request(self, body: &BodyKeeper) -> Request<RequestBody> {
        let body = body.body();
        let mut fields = self.fields;
        fields.remove(TRANSFER_ENCODING);
        if !body.is_end_stream() {
            fields.remove(CONTENT_LENGTH);
            // hyper would send a GET without its body where its length is not known.
            if body.size_hint().exact().is_none() {
                fields.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
            }
        }
        let mut request = Request::new(body);
        *request.method_mut() = self.method;
        *request.uri_mut() = self.target;
        *request.version_mut() = Version::HTTP_11;
        *request.headers_mut() = fields;
        request
    }
}

/// The end of a try without an answer, for the backend and for the client.
fn end_of_try(error: SendError, body: &BodyKeeper) -> (Outcome, ClientError) {
    let lost = ClientError::from(UpstreamError::Lost);
    match error {
        SendError::Unsent(_) => (Outcome::Unsent, lost),
        SendError::Lost { is_ours: true } => (Outcome::Aborted, lost),
        SendError::Refused | SendError::Lost { is_ours: false } => (Outcome::Lost, lost),
        SendError::Malformed(error) => {
            (Outcome::Failed, UpstreamError::Failed(std::io::Error::other(error)).into())
        }
        SendError::Body => (Outcome::Unknown, body_error(body)),
    }
}

/// Why a body was not sent to its end.
fn body_error(body: &BodyKeeper) -> ClientError {
    match body.fault() {
        Some(BodyFault::TooLong) => ClientError::BodyTooLong,
        _ => ClientError::Body,
    }
}

/// Puts the backend's name into a request without a host, in the place of that of a backend to
/// which it was not sent.
fn name_backend(fields: &mut HeaderMap, backend: &Backend) {
    match HeaderValue::from_str(backend.name()) {
        Ok(name) => _ = fields.insert(HOST, name),
        Err(_) => _ = fields.remove(HOST),
    }
}

/// True if the connection ends behind this answer.
fn closes(fields: &HeaderMap, version: Version) -> bool {
    let says = |word: &str| {
        fields.get_all(CONNECTION).iter().any(|value| {
            let mut words = value.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
            words.any(|found| found.eq_ignore_ascii_case(word.as_bytes()))
        })
    };
    says("close") || (version < Version::HTTP_11 && !says("keep-alive"))
}

/// True for methods of requests that may be sent twice (RFC 9110, 9.2.2).
pub(crate) fn is_idempotent(method: &Method) -> bool {
    [Method::GET, Method::HEAD, Method::PUT, Method::DELETE, Method::OPTIONS, Method::TRACE].contains(method)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_is_that_of_the_backend_that_gets_the_request() {
        let mut fields = HeaderMap::new();
        for name in ["10.0.0.11:80", "web.example.org:8080"] {
            name_backend(&mut fields, &Backend::new(name));
            assert_eq!(fields.get_all(HOST).iter().collect::<Vec<_>>(), [name]);
        }
    }
}
