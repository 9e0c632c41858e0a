//! Answers: whole ones, and the one without an end.

use std::convert::Infallible;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use hyper::body::{Body, Bytes, Frame, SizeHint};
use hyper::header::{
    ALLOW, CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE,
};
use hyper::{Response, StatusCode};

use super::gate::GateError;
use super::guests::Asking;
use super::press::{Listener, Press};
use super::routes;
use crate::shard::tasks::draining::Draining;

pub(super) const TEXT: &str = "text/plain; charset=utf-8";
pub(super) const JSON: &str = "application/json";
const HTML: &str = "text/html; charset=utf-8";
const EVENTS: &str = "text/event-stream";

/// The page: one file, without parts from elsewhere.
const PAGE: &str = include_str!("page.html");

/// The permissions of the page: its own script and style, and requests to its own origin.
const PAGE_POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
     connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The body of an answer.
pub(super) struct Answer {
    content: Content,
    /// The request counts for its address for as long as hyper has not taken all of it.
    _asking: Option<Asking>,
}

enum Content {
    /// `None` once it was taken.
    Whole(Option<Bytes>),
    Events(Box<Events>),
}

impl Answer {
    /// The same for a request of a connection.
    pub(super) fn of(self, mut asking: Asking) -> Answer {
        // Who reads a whole answer slowly makes room for others.
        if matches!(self.content, Content::Whole(_)) {
            asking.is_answered();
        }
        Answer { _asking: Some(asking), ..self }
    }
}

/// Reports, one after the other, until the endpoint ends.
pub(super) struct Events {
    press: Rc<Press>,
    /// The least number of the next one.
    next: u64,
    draining: Draining,
    _listener: Listener,
}

impl Events {
    /// `None` if there are as many listeners as there may be.
    pub(super) fn new(press: &Rc<Press>, draining: Draining) -> Option<Events> {
        let _listener = press.listen()?;
        // The first one is for this listener, and comes at once.
        let next = press.ask();
        Some(Events { press: press.clone(), next, draining, _listener })
    }

    fn poll_next(&mut self, task: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if Pin::new(&mut self.draining).poll(task).is_ready() {
            return Poll::Ready(None);
        }
        self.press.poll_issue(self.next, task).map(|issue| {
            self.next = issue.number + 1;
            Some(issue.event)
        })
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let next = match &mut self.content {
            Content::Whole(bytes) => Poll::Ready(bytes.take().filter(|bytes| !bytes.is_empty())),
            Content::Events(events) => events.poll_next(task),
        };
        next.map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Whole(bytes) => bytes.as_ref().is_none_or(Bytes::is_empty),
            Content::Events(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Content::Events(_) => SizeHint::default(),
        }
    }
}

/// An answer of any type. None may be kept, none is guessed to be of another type, and no other
/// origin may embed it.
fn response(status: StatusCode, kind: &'static str, content: Content) -> Response<Answer> {
    typed(status, HeaderValue::from_static(kind), content)
}

fn typed(status: StatusCode, kind: HeaderValue, content: Content) -> Response<Answer> {
    let mut response = Response::new(Answer { content, _asking: None });
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, kind);
    for (name, value) in [
        (CACHE_CONTROL, "no-store"),
        (HeaderName::from_static("x-content-type-options"), "nosniff"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

pub(super) fn whole(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Response<Answer> {
    response(status, kind, Content::Whole(Some(body.into())))
}

/// An answer of the program's, of any type.
pub(super) fn of_program(status: StatusCode, kind: HeaderValue, body: Bytes) -> Response<Answer> {
    typed(status, kind, Content::Whole(Some(body)))
}

/// A sentence, with a line feed after it.
pub(super) fn sentence(status: StatusCode, text: impl Into<String>) -> Response<Answer> {
    let mut text = text.into();
    text.push('\n');
    whole(status, TEXT, text)
}

pub(super) fn json(text: serde_json::Result<Vec<u8>>) -> Response<Answer> {
    match text {
        Ok(text) => whole(StatusCode::OK, JSON, text),
        Err(error) => sentence(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}

pub(super) fn page() -> Response<Answer> {
    let mut response = whole(StatusCode::OK, HTML, PAGE);
    for (name, value) in [("content-security-policy", PAGE_POLICY), ("referrer-policy", "no-referrer")] {
        response.headers_mut().insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    response
}

pub(super) fn events(events: Events) -> Response<Answer> {
    response(StatusCode::OK, EVENTS, Content::Events(Box::new(events)))
}

/// There are as many requests of this kind as there may be: a later one may be answered. The
/// connection makes room for others.
pub(super) fn too_many(text: impl Into<String>) -> Response<Answer> {
    let mut response = sentence(StatusCode::SERVICE_UNAVAILABLE, text);
    response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("5"));
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

/// There is no such path at the listener for probes.
pub(super) fn no_probe() -> Response<Answer> {
    sentence(StatusCode::NOT_FOUND, "this listener is for probes: it answers /healthz and /readyz")
}

/// There is no such path. `of_program` has the lines of its paths.
pub(super) fn no_path(of_program: &str) -> Response<Answer> {
    let list = routes::list() + of_program;
    sentence(StatusCode::NOT_FOUND, format!("there is no such path; there are\n\n{}", list.trim_end()))
}

/// The path has other methods.
pub(super) fn other_method(allowed: &'static str) -> Response<Answer> {
    let mut response = sentence(StatusCode::METHOD_NOT_ALLOWED, format!("this path allows {allowed}"));
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
    response
}

pub(super) fn refused(why: &GateError) -> Response<Answer> {
    match why {
        GateError::Name(name) => sentence(
            StatusCode::FORBIDDEN,
            format!(
                "the request calls this endpoint {name:?}, which is no name of it: ask for localhost or its \
                 address, or have the program add the name by Admin::host_name"
            ),
        ),
        GateError::Token => {
            let text = "this endpoint has a token: send it as Authorization: Bearer TOKEN";
            let mut response = sentence(StatusCode::UNAUTHORIZED, text);
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            response
        }
        GateError::ReadsOnly => sentence(StatusCode::FORBIDDEN, "this token may read, and gives no orders"),
        GateError::Header => sentence(
            StatusCode::FORBIDDEN,
            "a request with an effect needs the header X-Ringserve: 1, which no page of another site can send",
        ),
        GateError::Origin => {
            sentence(StatusCode::FORBIDDEN, "the Origin of the request is not the address that was asked")
        }
    }
}
