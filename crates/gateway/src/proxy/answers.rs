//! Answers of the gateway itself.

use hyper::header::{
    ACCEPT, ALLOW, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, LOCATION, RETRY_AFTER, WWW_AUTHENTICATE,
};
use hyper::{Response, StatusCode};
use ringserve_upstream::UpstreamError;

use super::body::GatewayBody;
use crate::client::exchange::ClientError;
use crate::fields::names::{GRPC_MESSAGE, GRPC_STATUS};

/// Why the gateway answers in an upstream's place.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The path means different things to different servers. 400.
    Path,
    /// The request is for no host, or for two. 400.
    Authority,
    /// The fields of the request contradict each other. 400.
    Fields,
    /// The body is coded in a way that the gateway does not undo. 501.
    Coding,
    /// The method is not one that a gateway passes on: TRACE is answered with 405, CONNECT with
    /// 501.
    Method(StatusCode),
    /// No route takes the request. 404.
    NoRoute,
    /// The client's address may not use the route. 403.
    Address,
    /// The client has not shown who it is. 401.
    Unknown,
    /// The client has sent too many requests; it may come again after these seconds. 429.
    Rate(u32),
    /// The body is longer than it may be. 413.
    TooLong,
    /// The body came too slowly. 408.
    TooSlow,
    /// The client's body broke, so no client reads this. 400.
    Body,
    /// As many requests as may be wait, or no backend may be asked. 503.
    Busy,
    /// The backend could not be connected to, or the request was lost. 502.
    Lost,
    /// The bytes of the backend are no answer. 502.
    Malformed,
    /// The backend switched to another protocol, which the request did not ask for. 502.
    Switched,
    /// The backend was too late. 504.
    TimedOut,
}

impl Refusal {
    /// The status of the answer.
    pub fn status(self) -> StatusCode {
        match self {
            Refusal::Path | Refusal::Authority | Refusal::Fields | Refusal::Body => StatusCode::BAD_REQUEST,
            Refusal::Coding => StatusCode::NOT_IMPLEMENTED,
            Refusal::Method(status) => status,
            Refusal::NoRoute => StatusCode::NOT_FOUND,
            Refusal::Address => StatusCode::FORBIDDEN,
            Refusal::Unknown => StatusCode::UNAUTHORIZED,
            Refusal::Rate(_) => StatusCode::TOO_MANY_REQUESTS,
            Refusal::TooLong => StatusCode::PAYLOAD_TOO_LARGE,
            Refusal::TooSlow => StatusCode::REQUEST_TIMEOUT,
            Refusal::Busy => StatusCode::SERVICE_UNAVAILABLE,
            Refusal::Lost | Refusal::Malformed | Refusal::Switched => StatusCode::BAD_GATEWAY,
            Refusal::TimedOut => StatusCode::GATEWAY_TIMEOUT,
        }
    }

    /// A line for people.
    pub fn text(self) -> &'static str {
        match self {
            Refusal::Path => "the path of the request is ambiguous",
            Refusal::Authority => "the request is not for one host",
            Refusal::Fields => "the fields of the request contradict each other",
            Refusal::Coding => "the body of the request has a transfer coding other than chunked",
            Refusal::Method(_) => "the method is not passed on",
            Refusal::NoRoute => "there is nothing here",
            Refusal::Address => "this address may not",
            Refusal::Unknown => "a name and a password are needed",
            Refusal::Rate(_) => "too many requests",
            Refusal::TooLong => "the body of the request is too long",
            Refusal::TooSlow => "the body of the request came too slowly",
            Refusal::Body => "the body of the request ended too early",
            Refusal::Busy => "no server is free",
            Refusal::Lost => "the server ended the connection before its answer",
            Refusal::Malformed => "the server's answer is none",
            Refusal::Switched => "the server switched protocols, which was not asked for",
            Refusal::TimedOut => "the server was too late",
        }
    }

    /// The code of gRPC.
    fn grpc(self) -> &'static str {
        match self {
            Refusal::Rate(_) | Refusal::TooLong => "8",
            Refusal::TimedOut | Refusal::TooSlow => "4",
            Refusal::Unknown => "16",
            Refusal::Address => "7",
            Refusal::NoRoute | Refusal::Coding | Refusal::Method(_) => "12",
            Refusal::Path | Refusal::Authority | Refusal::Fields | Refusal::Body => "13",
            Refusal::Busy | Refusal::Lost | Refusal::Malformed | Refusal::Switched => "14",
        }
    }
}

impl From<&ClientError> for Refusal {
    fn from(error: &ClientError) -> Refusal {
        match error {
            ClientError::Body => Refusal::Body,
            ClientError::BodyTooLong => Refusal::TooLong,
            ClientError::BodyTooSlow => Refusal::TooSlow,
            ClientError::Answer(_) => Refusal::Malformed,
            ClientError::Upstream(UpstreamError::Full | UpstreamError::NoBackend) => Refusal::Busy,
            ClientError::Upstream(UpstreamError::TimedOut) => Refusal::TimedOut,
            ClientError::Upstream(UpstreamError::Failed(error)) => match error.get_ref() {
                Some(error) if error.is::<hyper::Error>() => Refusal::Malformed,
                _ => Refusal::Lost,
            },
            ClientError::Upstream(_) => Refusal::Lost,
        }
    }
}

/// The form of an answer of the gateway.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Form {
    is_grpc: bool,
    is_json: bool,
}

impl Form {
    pub(super) fn of(fields: &HeaderMap) -> Form {
        let begins = |name: &HeaderName, text: &[u8]| {
            fields.get(name).is_some_and(|value| value.as_bytes().to_ascii_lowercase().starts_with(text))
        };
        let is_json = fields.get(ACCEPT).is_some_and(|value| {
            let value = value.as_bytes().to_ascii_lowercase();
            let find = |word: &[u8]| value.windows(word.len()).position(|found| found == word);
            // What is named first is wanted most, as browsers and programs write it.
            find(b"json").is_some_and(|json| find(b"text/").is_none_or(|text| json < text))
        });
        Form { is_grpc: begins(&CONTENT_TYPE, b"application/grpc"), is_json }
    }
}

/// The answer for a refusal, in the form that the client takes.
pub(super) fn refusal(why: Refusal, form: Form, realm: Option<&str>) -> Response<GatewayBody> {
    let mut answer = if form.is_grpc { grpc(why) } else { text(why, form.is_json) };
    let fields = answer.headers_mut();
    match why {
        Refusal::Rate(seconds) => _ = fields.insert(RETRY_AFTER, seconds.into()),
        Refusal::Busy => _ = fields.insert(RETRY_AFTER, HeaderValue::from_static("1")),
        Refusal::Method(StatusCode::METHOD_NOT_ALLOWED) => {
            fields.insert(ALLOW, HeaderValue::from_static("GET, HEAD, POST, PUT, DELETE, OPTIONS, PATCH"));
        }
        _ => {}
    }
    if let Some(challenge) = realm.and_then(challenge) {
        fields.insert(WWW_AUTHENTICATE, challenge);
    }
    answer
}

fn challenge(realm: &str) -> Option<HeaderValue> {
    let realm: String = realm.chars().filter(|byte| !matches!(byte, '"' | '\\')).collect();
    HeaderValue::from_str(&format!("Basic realm=\"{realm}\", charset=\"UTF-8\"")).ok()
}

fn text(why: Refusal, is_json: bool) -> Response<GatewayBody> {
    let (status, text) = (why.status(), why.text());
    let (kind, body) = if is_json {
        ("application/json", format!("{{\"status\":{},\"error\":\"{text}\"}}\n", status.as_u16()))
    } else {
        ("text/plain; charset=utf-8", format!("{} {text}\n", status.as_u16()))
    };
    whole(status, HeaderValue::from_static(kind), body)
}

/// An answer of trailers alone, which clients of gRPC take for a status.
fn grpc(why: Refusal) -> Response<GatewayBody> {
    let mut answer = whole(StatusCode::OK, HeaderValue::from_static("application/grpc"), "");
    let fields = answer.headers_mut();
    fields.insert(GRPC_STATUS, HeaderValue::from_static(why.grpc()));
    fields.insert(GRPC_MESSAGE, HeaderValue::from_static(why.text()));
    answer
}

pub(super) fn whole(
    status: StatusCode,
    content_type: HeaderValue,
    body: impl Into<bytes::Bytes>,
) -> Response<GatewayBody> {
    let mut answer = Response::new(GatewayBody::whole(body));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, content_type);
    answer
}

pub(super) fn redirect(status: StatusCode, to: HeaderValue) -> Response<GatewayBody> {
    let mut answer = Response::new(GatewayBody::whole(""));
    *answer.status_mut() = status;
    answer.headers_mut().insert(LOCATION, to);
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(name: HeaderName, value: &'static str) -> Form {
        Form::of(&HeaderMap::from_iter([(name, HeaderValue::from_static(value))]))
    }

    #[test]
    fn form_of_a_refusal_is_what_the_client_takes() {
        let kind = |form: Form| {
            let answer = refusal(Refusal::Lost, form, None);
            (answer.status().as_u16(), answer.headers()[CONTENT_TYPE].to_str().expect("text").to_owned())
        };
        assert_eq!(kind(Form::default()), (502, "text/plain; charset=utf-8".into()));
        assert_eq!(kind(form(ACCEPT, "application/json")), (502, "application/json".into()));
        assert_eq!(
            kind(form(ACCEPT, "application/vnd.api+JSON, text/html")),
            (502, "application/json".into())
        );
        assert_eq!(kind(form(ACCEPT, "text/html, application/json")).1, "text/plain; charset=utf-8");
        assert_eq!(kind(form(CONTENT_TYPE, "application/grpc+proto")), (200, "application/grpc".into()));
        let answer = refusal(Refusal::TimedOut, form(CONTENT_TYPE, "application/grpc"), None);
        assert_eq!(answer.headers()[GRPC_STATUS], "4");
    }

    #[test]
    fn refusal_says_when_to_come_again_and_what_to_show() {
        let answer = refusal(Refusal::Rate(7), Form::default(), None);
        assert_eq!((answer.status().as_u16(), &answer.headers()[RETRY_AFTER]), (429, &HeaderValue::from(7)));
        let answer = refusal(Refusal::Unknown, Form::default(), Some("a\"b"));
        assert_eq!(answer.headers()[WWW_AUTHENTICATE], "Basic realm=\"ab\", charset=\"UTF-8\"");
    }
}
