//! The client's side of the handshake: the HTTP/1.1 request for WebSocket, and the check of its
//! answer.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use httparse::{EMPTY_HEADER, Status};

use crate::info::WebSocketInfo;
use crate::options::MESSAGE_BYTES_MAX;
use crate::upgrade::{Accept, HEAD_BYTES_MAX, HEADERS_MAX, Upgrade, accept_key, base64, put_field};

const END: &[u8] = b"\r\n\r\n";

/// Time for the answer, and silence after which the server is pinged.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A client's request for WebSocket to a server, and its limits on the connection.
///
/// ```
/// use ringserve_websocket::ClientRequest;
///
/// let request = ClientRequest::new("example.org", "/chat?room=1")
///     .protocols(["chat.v2", "chat.v1"])
///     .header("Authorization", "Bearer abc")
///     .message_bytes_max(64 << 10);
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct ClientRequest {
    host: String,
    target: String,
    protocols: Vec<String>,
    headers: String,
    message_bytes_max: usize,
    timeout: Duration,
    ping_interval: Option<Duration>,
}

impl ClientRequest {
    /// Creates a request for a target such as `/chat?room=1` of a host such as `example.org`, with
    /// its port if that is unusual. No protocol, messages of at most 1 MiB.
    pub fn new(host: impl Into<String>, target: impl Into<String>) -> ClientRequest {
        ClientRequest {
            host: host.into(),
            target: target.into(),
            protocols: Vec::new(),
            headers: String::new(),
            message_bytes_max: MESSAGE_BYTES_MAX,
            timeout: TIMEOUT,
            ping_interval: Some(TIMEOUT),
        }
    }

    /// Sets the protocols spoken above WebSocket, the preferred one first. The server chooses one
    /// of them, or none: `WebSocketInfo::protocol` returns it.
    #[must_use]
    pub fn protocols<P: Into<String>>(self, protocols: impl IntoIterator<Item = P>) -> ClientRequest {
        ClientRequest { protocols: protocols.into_iter().map(Into::into).collect(), ..self }
    }

    /// Adds a header field, such as `Authorization`, `Cookie` or `Origin`.
    ///
    /// # Panics
    /// If the name is no token, or the value has a control character, which could end the field.
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> ClientRequest {
        put_field(name, value, &mut self.headers);
        self
    }

    /// Sets the length in bytes of the longest message accepted, up to 1 GiB. A longer one ends the
    /// connection with the code 1009. Default 1 MiB.
    #[must_use]
    pub fn message_bytes_max(self, bytes: usize) -> ClientRequest {
        ClientRequest { message_bytes_max: bytes, ..self }
    }

    /// Sets the time for the answer to the request. Default 30 s.
    #[must_use]
    pub fn timeout(self, time: Duration) -> ClientRequest {
        ClientRequest { timeout: time, ..self }
    }

    /// Sets the silence of the server after which it is pinged; after another such time it is
    /// considered gone. Off with `None`. Default 30 s.
    #[must_use]
    pub fn ping_interval(self, time: impl Into<Option<Duration>>) -> ClientRequest {
        ClientRequest { ping_interval: time.into(), ..self }
    }

    /// [`message_bytes_max`](ClientRequest::message_bytes_max), [`timeout`](ClientRequest::timeout)
    /// and [`ping_interval`](ClientRequest::ping_interval).
    pub fn bounds(&self) -> (usize, Duration, Option<Duration>) {
        (self.message_bytes_max, self.timeout, self.ping_interval)
    }

    /// Appends the request to `out`, with a key that no server can foresee. Returns the reader of
    /// its answer.
    ///
    /// # Errors
    /// If the host, the target or a protocol cannot be written in a request.
    pub fn write(&self, key: [u8; 16], out: &mut Vec<u8>) -> Result<ExpectedAnswer, HandshakeError> {
        let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
        let is_visible = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic());
        if self.host.is_empty() || !is_visible(&self.host) {
            return Err(HandshakeError::Request("the host is no name with a port"));
        }
        if !self.target.starts_with('/') || !is_visible(&self.target) || self.target.contains('#') {
            return Err(HandshakeError::Request("the target is no path with a query"));
        }
        if !self.protocols.iter().all(|name| !name.is_empty() && name.bytes().all(is_token)) {
            return Err(HandshakeError::Request("a protocol is no token"));
        }
        let key: [u8; 24] = base64(&key);
        let mut put = |text: &str| out.extend_from_slice(text.as_bytes());
        for part in ["GET ", &self.target, " HTTP/1.1\r\nHost: ", &self.host, "\r\nUpgrade: websocket\r\n"] {
            put(part);
        }
        put("Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: ");
        put(std::str::from_utf8(&key).unwrap_or_default());
        put("\r\n");
        if !self.protocols.is_empty() {
            for part in ["Sec-WebSocket-Protocol: ", &self.protocols.join(", "), "\r\n"] {
                put(part);
            }
        }
        put(&self.headers);
        put("\r\n");
        let (target, protocols) = (self.target.clone(), self.protocols.clone());
        Ok(ExpectedAnswer { accept: accept_key(&key), target, protocols, scanned: 0 })
    }
}

impl fmt::Debug for ClientRequest {
    /// Leaves out the header fields, which may contain secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientRequest")
            .field("host", &self.host)
            .field("target", &self.target)
            .field("protocols", &self.protocols)
            .field("message_bytes_max", &self.message_bytes_max)
            .finish_non_exhaustive()
    }
}

/// The answer that a request expects.
#[derive(Debug)]
pub struct ExpectedAnswer {
    accept: [u8; 28],
    target: String,
    protocols: Vec<String>,
    /// Bytes in which no head ends.
    scanned: usize,
}

impl ExpectedAnswer {
    /// Reads all received bytes. Once the head is whole, it is taken from their front, and the rest
    /// belongs to WebSocket.
    ///
    /// # Errors
    /// If the server refuses, or its answer is not a WebSocket answer.
    pub fn read(&mut self, bytes: &mut Vec<u8>) -> Result<Option<WebSocketInfo>, HandshakeError> {
        loop {
            let from = self.scanned.saturating_sub(END.len() - 1);
            let end = bytes[from..].windows(END.len()).position(|bytes| bytes == END);
            let end = end.map(|at| from + at + END.len());
            if end.unwrap_or(bytes.len()) > HEAD_BYTES_MAX {
                return Err(HandshakeError::Answer("a head of more than 16 KiB"));
            }
            self.scanned = bytes.len();
            let Some(end) = end else { return Ok(None) };
            let info = self.check(&bytes[..end])?;
            bytes.drain(..end);
            self.scanned = 0;
            if info.is_some() {
                return Ok(info);
            }
        }
    }

    /// Checks a whole head; `None` for one after which the answer is still to follow.
    fn check(&self, head: &[u8]) -> Result<Option<WebSocketInfo>, HandshakeError> {
        let mut headers = [EMPTY_HEADER; HEADERS_MAX];
        let mut response = httparse::Response::new(&mut headers);
        let status = match response.parse(head) {
            Ok(Status::Complete(size)) if size == head.len() => response.code,
            Ok(_) | Err(_) => return Err(HandshakeError::Answer("no answer of HTTP/1.1")),
        };
        match status {
            Some(101) if response.version == Some(1) => {}
            Some(100..=199) if status != Some(101) => return Ok(None),
            Some(status) => return Err(HandshakeError::Refused(status)),
            None => return Err(HandshakeError::Answer("no answer of HTTP/1.1")),
        }
        let answer = Upgrade { target: &self.target, headers: response.headers };
        if !answer.has_item("upgrade", "websocket") || !answer.has_item("connection", "upgrade") {
            return Err(HandshakeError::Answer("it switches to a protocol other than WebSocket"));
        }
        let mut accepts = answer.headers("sec-websocket-accept");
        let is_ours = accepts.next().is_some_and(|accept| accept.trim().as_bytes() == self.accept);
        if !is_ours || accepts.next().is_some() {
            return Err(HandshakeError::Answer("its Sec-WebSocket-Accept is not that of the key"));
        }
        if answer.headers("sec-websocket-extensions").any(|value| !value.trim().is_empty()) {
            return Err(HandshakeError::Answer("it uses an extension that was not offered"));
        }
        let mut accept = Accept::new();
        let mut chosen = answer.headers("sec-websocket-protocol").map(str::trim);
        if let Some(protocol) = chosen.next() {
            if chosen.next().is_some() || !self.protocols.iter().any(|offered| offered == protocol) {
                return Err(HandshakeError::Answer("it chose a protocol that was not offered"));
            }
            accept = accept.protocol(Arc::<str>::from(protocol));
        }
        Ok(Some(WebSocketInfo::new(&answer, &accept)))
    }
}

/// The reason why a client's handshake failed.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The request cannot be written.
    Request(&'static str),
    /// The server refused it, with this HTTP status.
    Refused(u16),
    /// The answer is not a WebSocket answer.
    Answer(&'static str),
}

impl fmt::Display for HandshakeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HandshakeError::Request(what) => write!(f, "the WebSocket request cannot be written: {what}"),
            HandshakeError::Refused(status) => write!(f, "the server refuses WebSocket with {status}"),
            HandshakeError::Answer(what) => write!(f, "not a WebSocket answer: {what}"),
        }
    }
}

ringserve_buf::debug_is_display!(HandshakeError);

impl std::error::Error for HandshakeError {}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of RFC 6455.
    const KEY: [u8; 16] = *b"the sample nonce";
    const ACCEPT: &str = "Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n";
    const SWITCHES: &str =
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: WebSocket\r\nConnection: keep-alive, upgrade\r\n";

    fn expected(request: &ClientRequest) -> ExpectedAnswer {
        request.write(KEY, &mut Vec::new()).expect("it can be written")
    }

    fn reads(answer: &str) -> Result<Option<WebSocketInfo>, HandshakeError> {
        let request = ClientRequest::new("example.org", "/chat?room=1").protocols(["a", "b"]);
        expected(&request).read(&mut answer.to_owned().into_bytes())
    }

    #[test]
    fn request_is_that_of_the_standard_and_a_server_takes_it() {
        let request = ClientRequest::new("example.org:80", "/chat?room=1").protocols(["chat", "superchat"]);
        let mut out = b"before".to_vec();
        let wanted = "GET /chat?room=1 HTTP/1.1\r\nHost: example.org:80\r\nUpgrade: websocket\r\n\
            Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\
            Sec-WebSocket-Protocol: chat, superchat\r\nOrigin: https://a\r\n\r\n";
        request.header("Origin", "https://a").write(KEY, &mut out).expect("it can be written");
        assert_eq!(std::str::from_utf8(&out).unwrap(), format!("before{wanted}"));
        let taken = crate::upgrade::read(wanted.as_bytes(), |upgrade, accept| {
            assert_eq!(upgrade.protocols().collect::<Vec<_>>(), ["chat", "superchat"]);
            Ok(accept.to_owned())
        });
        assert_eq!(taken.as_deref(), Ok("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
    }

    #[test]
    fn answer_is_read_however_it_comes() {
        let request = ClientRequest::new("example.org", "/chat?room=1").protocols(["chat"]);
        let head = format!(
            "HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n{SWITCHES}{ACCEPT}Sec-WebSocket-Protocol: chat\r\n\r\n"
        );
        let all = format!("{head}more").into_bytes();
        for step in 1..all.len() {
            let (mut expected, mut came, mut info) = (expected(&request), Vec::new(), None);
            let mut chunks = all.chunks(step);
            while info.is_none() {
                came.extend(chunks.next().expect("the answer is whole"));
                info = expected.read(&mut came).unwrap();
            }
            came.extend(chunks.flatten());
            assert_eq!(came, b"more", "{step}");
            let info = info.unwrap();
            assert_eq!((info.target(), info.protocol()), ("/chat?room=1", Some("chat")));
        }
    }

    #[test]
    fn answers_that_are_none_of_websocket_are_refused() {
        let ends = |fields: &str| {
            reads(&format!("{SWITCHES}{fields}\r\n")).map(|info| info.unwrap().protocol().map(str::to_owned))
        };
        assert_eq!(ends(ACCEPT), Ok(None));
        assert_eq!(ends(&format!("{ACCEPT}Sec-WebSocket-Protocol: b\r\n")), Ok(Some("b".into())));
        for (fields, what) in [
            (String::new(), "not that of the key"),
            (ACCEPT.replace("s3", "S3"), "not that of the key"),
            (ACCEPT.repeat(2), "not that of the key"),
            (format!("{ACCEPT}Sec-WebSocket-Protocol: c\r\n"), "chose a protocol"),
            (format!("{ACCEPT}Sec-WebSocket-Protocol: a, b\r\n"), "chose a protocol"),
            (
                format!("{ACCEPT}Sec-WebSocket-Protocol: a\r\nSec-WebSocket-Protocol: b\r\n"),
                "chose a protocol",
            ),
            (format!("{ACCEPT}Sec-WebSocket-Extensions: permessage-deflate\r\n"), "an extension"),
        ] {
            let error = ends(&fields).unwrap_err();
            assert!(
                matches!(error, HandshakeError::Answer(said) if said.contains(what)),
                "{fields}: {error}"
            );
        }
        for (answer, error) in [
            ("HTTP/1.1 403 Forbidden\r\n\r\n".to_owned(), HandshakeError::Refused(403)),
            ("HTTP/1.1 200 OK\r\n\r\n".to_owned(), HandshakeError::Refused(200)),
            (format!("{SWITCHES}{ACCEPT}\r\n").replace("/1.1", "/1.0"), HandshakeError::Refused(101)),
        ] {
            assert_eq!(reads(&answer).unwrap_err(), error);
        }
        for answer in [
            "SSH-2.0-x\r\n\r\n".to_owned(),
            format!("{SWITCHES}{ACCEPT}\r\n").replace("WebSocket\r", "h2c\r"),
            "x".repeat(HEAD_BYTES_MAX + 1),
        ] {
            assert!(matches!(reads(&answer), Err(HandshakeError::Answer(_))), "{answer}");
        }
        assert!(matches!(reads(SWITCHES), Ok(None)));
    }

    #[test]
    fn what_cannot_stand_in_a_request_is_refused() {
        for request in [
            ClientRequest::new("", "/"),
            ClientRequest::new("a\r\nb: c", "/"),
            ClientRequest::new("a", "chat"),
            ClientRequest::new("a", "/a b"),
            ClientRequest::new("a", "/a#b"),
            ClientRequest::new("a", "/").protocols(["a b"]),
            ClientRequest::new("a", "/").protocols([""]),
        ] {
            let written = request.write(KEY, &mut Vec::new());
            assert!(matches!(written, Err(HandshakeError::Request(_))), "{request:?}");
        }
    }
}
