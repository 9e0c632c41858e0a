//! The handshake: an HTTP/1.1 request for WebSocket, and its answer.

use std::any::Any;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use httparse::{EMPTY_HEADER, Status};

/// The most bytes of a request's head. A longer one is answered with 431: a browser with many
/// cookies stays below it.
pub const HEAD_BYTES_MAX: usize = 16 * 1024;

/// The most header fields of a request. More are answered with 431.
pub(crate) const HEADERS_MAX: usize = 100;

/// The start of each request, so that other bytes are refused at once.
const BEGINS: &[u8] = b"GET ";

/// Empty lines before a request that are skipped. Arbitrary: clients that send any send one.
const EMPTY_LINES_MAX: usize = 8;

const LINE_END: &[u8] = b"\r\n";
const END: &[u8] = b"\r\n\r\n";

/// The text appended to a client's key before it is hashed (RFC 6455, 1.3).
const GUID: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// Finds the end of a request's head in `bytes`, of which the first `scanned` were searched before.
/// A few empty lines may precede it, as some clients send one after the previous request (RFC 9112,
/// 2.2), and count towards its length.
///
/// # Errors
/// The answer to bytes that cannot be a request: 400, or 431 beyond 16 KiB.
pub fn find_end(bytes: &[u8], scanned: usize) -> Result<Option<usize>, Reject> {
    let lines = bytes.chunks(LINE_END.len()).take(EMPTY_LINES_MAX);
    let first = lines.take_while(|line| *line == LINE_END).count() * LINE_END.len();
    let begin = &bytes[first..];
    let is_line_end = begin == &LINE_END[..1];
    if !is_line_end && !begin.starts_with(&BEGINS[..begin.len().min(BEGINS.len())]) {
        return Err(Reject::new(400).text("a request of WebSocket begins with GET"));
    }
    let from = scanned.saturating_sub(END.len() - 1).clamp(first, bytes.len());
    let end = bytes[from..].windows(END.len()).position(|bytes| bytes == END).map(|at| from + at + END.len());
    if end.unwrap_or(bytes.len()) > HEAD_BYTES_MAX {
        return Err(Reject::new(431));
    }
    Ok(end)
}

/// A client's request for WebSocket.
///
/// Any page that a browser shows may connect, in the name of the user who is logged in elsewhere: a
/// service that identifies its users by cookies has to check the [origin](Upgrade::origin).
#[derive(Clone, Copy)]
pub struct Upgrade<'a> {
    pub(crate) target: &'a str,
    pub(crate) headers: &'a [httparse::Header<'a>],
}

impl<'a> Upgrade<'a> {
    /// The path, as it was sent: `/chat` of `/chat?room=1`.
    pub fn path(&self) -> &'a str {
        self.target.split_once('?').map_or(self.target, |(path, _)| path)
    }

    /// The part after the `?`, as it was sent.
    pub fn query(&self) -> Option<&'a str> {
        self.target.split_once('?').map(|(_, query)| query)
    }

    /// Path and query.
    pub fn target(&self) -> &'a str {
        self.target
    }

    /// The first value of a header field, whatever the case of its name. `None` if there is none,
    /// or it is not text.
    pub fn header(&self, name: &str) -> Option<&'a str> {
        self.headers(name).next()
    }

    /// All values of a header field that are text.
    pub fn headers(&self, name: &str) -> impl Iterator<Item = &'a str> {
        self.values(name).filter_map(|value| std::str::from_utf8(value).ok())
    }

    fn values(&self, name: &str) -> impl Iterator<Item = &'a [u8]> {
        let is_it = move |field: &&httparse::Header<'_>| field.name.eq_ignore_ascii_case(name);
        self.headers.iter().filter(is_it).map(|field| field.value)
    }

    /// The items of a header field that is a list, over all of its values.
    fn items(&self, name: &str) -> impl Iterator<Item = &'a str> {
        let items = |value: &'a str| value.split(',').map(str::trim).filter(|item| !item.is_empty());
        self.headers(name).flat_map(items)
    }

    pub(crate) fn has_item(&self, name: &str, item: &str) -> bool {
        self.items(name).any(|found| found.eq_ignore_ascii_case(item))
    }

    /// The page from which a browser connects, such as `https://example.org`. Other clients may
    /// send nothing, or anything.
    pub fn origin(&self) -> Option<&'a str> {
        self.header("origin")
    }

    /// The requested host name, with its port if that is unusual.
    pub fn host(&self) -> Option<&'a str> {
        self.header("host")
    }

    /// The protocols that the client speaks above WebSocket, the preferred one first.
    pub fn protocols(&self) -> impl Iterator<Item = &'a str> {
        self.items("sec-websocket-protocol")
    }

    /// True if the client speaks `protocol`.
    pub fn offers(&self, protocol: &str) -> bool {
        self.protocols().any(|offered| offered == protocol)
    }

    /// The value of a cookie.
    pub fn cookie(&self, name: &str) -> Option<&'a str> {
        let pairs = self.headers("cookie").flat_map(|value| value.split(';'));
        pairs
            .filter_map(|pair| pair.trim().split_once('='))
            .find(|(of, _)| *of == name)
            .map(|(_, value)| value)
    }

    /// The key, which is returned hashed.
    pub(crate) fn key(&self) -> Result<&'a [u8], Reject> {
        let refused = || Reject::new(400).text("no Sec-WebSocket-Key of 16 bytes in base64");
        let mut keys = self.values("sec-websocket-key");
        let (Some(key), None) = (keys.next(), keys.next()) else { return Err(refused()) };
        let is_base64 = |byte: &u8| byte.is_ascii_alphanumeric() || b"+/".contains(byte);
        let is_key = key.len() == 24 && key.ends_with(b"==") && key[..22].iter().all(is_base64);
        if is_key { Ok(key) } else { Err(refused()) }
    }

    /// Refuses a request for anything but WebSocket, or for another version.
    pub(crate) fn check(&self) -> Result<(), Reject> {
        if !self.has_item("upgrade", "websocket") || !self.has_item("connection", "upgrade") {
            let reject = Reject::new(426).text("only WebSocket is spoken here");
            return Err(reject.header("Upgrade", "websocket"));
        }
        let mut versions = self.headers("sec-websocket-version");
        if (versions.next(), versions.next()) != (Some("13"), None) {
            let reject = Reject::new(426).text("version 13 of WebSocket is spoken here");
            return Err(reject.header("Upgrade", "websocket").header("Sec-WebSocket-Version", "13"));
        }
        let bad = |what| Err(Reject::new(400).text(what));
        if self.values("host").count() != 1 {
            return bad("not one header of the host");
        }
        let has_body = self.values("transfer-encoding").next().is_some()
            || self.values("content-length").any(|len| len != b"0");
        if has_body {
            return bad("a request of WebSocket has no body");
        }
        Ok(())
    }
}

impl fmt::Debug for Upgrade<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upgrade").field("target", &self.target).finish_non_exhaustive()
    }
}

/// Calls `then` with the request whose head is `head`, up to its empty line, if it asks for
/// WebSocket, and with the value of `Sec-WebSocket-Accept` for it.
///
/// # Errors
/// The answer to any other request: 400, 426 or 431; and the refusal of `then`.
pub fn read<T>(head: &[u8], then: impl FnOnce(&Upgrade<'_>, &str) -> Result<T, Reject>) -> Result<T, Reject> {
    let mut headers = [EMPTY_HEADER; HEADERS_MAX];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(head) {
        Ok(Status::Complete(size)) if size == head.len() => {}
        Err(httparse::Error::TooManyHeaders) => return Err(Reject::new(431)),
        // An empty line before the end would be the end of another request.
        Ok(_) | Err(_) => return Err(Reject::new(400).text("no request of HTTP")),
    }
    let (Some("GET"), Some(target), Some(1)) = (request.method, request.path, request.version) else {
        return Err(Reject::new(400).text("no GET of HTTP/1.1"));
    };
    let upgrade = Upgrade { target, headers: request.headers };
    upgrade.check()?;
    let accept = accept_key(upgrade.key()?);
    then(&upgrade, std::str::from_utf8(&accept).unwrap_or_default())
}

/// The answer to a client's key: its hash, in base64.
pub fn accept_key(key: &[u8]) -> [u8; 28] {
    let mut hash = sha1_smol::Sha1::new();
    hash.update(key);
    hash.update(GUID);
    base64(&hash.digest().bytes())
}

/// Four characters for three bytes, padded at the end. `TO` is their number.
pub(crate) fn base64<const TO: usize>(bytes: &[u8]) -> [u8; TO] {
    const CHARACTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    debug_assert_eq!(TO, 4 * bytes.len().div_ceil(3));
    let mut text = [b'='; TO];
    for (three, four) in bytes.chunks(3).zip(text.chunks_mut(4)) {
        let mut bits = 0u32;
        for at in 0..3 {
            bits = bits << 8 | u32::from(three.get(at).copied().unwrap_or(0));
        }
        for (at, character) in four.iter_mut().take(three.len() + 1).enumerate() {
            *character = CHARACTERS[(bits >> (18 - 6 * at) & 63) as usize];
        }
    }
    text
}

/// Admits a client: the decision on a WebSocket request.
#[derive(Clone, Default)]
pub struct Accept {
    pub(crate) protocol: Option<Arc<str>>,
    pub(crate) data: Option<Rc<dyn Any>>,
    pub(crate) headers: String,
}

impl Accept {
    /// Admits without a protocol.
    pub fn new() -> Accept {
        Accept::default()
    }

    /// Chooses the protocol spoken above WebSocket. One that the client does not
    /// [offer](Upgrade::offers) is not sent to it, since it would have to end the connection.
    #[must_use]
    pub fn protocol(self, protocol: impl Into<Arc<str>>) -> Accept {
        Accept { protocol: Some(protocol.into()), ..self }
    }

    /// Keeps a value for the service, which gets it from `WebSocketInfo::data`: facts found in the
    /// request that are needed later. It lives as long as the connection.
    #[must_use]
    pub fn data<T: 'static>(self, value: T) -> Accept {
        Accept { data: Some(Rc::new(value)), ..self }
    }

    /// Adds a header field to the response, such as `Set-Cookie`.
    ///
    /// # Panics
    /// If the name is no token, or the value has a control character, which could end the field.
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Accept {
        put_field(name, value, &mut self.headers);
        self
    }

    /// Appends the response to `out`.
    pub(crate) fn write(&self, accept: &str, extension: Option<&str>, out: &mut Vec<u8>) {
        let mut put = |text: &str| out.extend_from_slice(text.as_bytes());
        put("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n");
        let fields = [
            ("Sec-WebSocket-Accept: ", Some(accept)),
            ("Sec-WebSocket-Protocol: ", self.protocol.as_deref()),
            ("Sec-WebSocket-Extensions: ", extension),
        ];
        for (name, value) in fields {
            if let Some(value) = value {
                [name, value, "\r\n"].into_iter().for_each(&mut put);
            }
        }
        put(&self.headers);
        put("\r\n");
    }
}

impl fmt::Debug for Accept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Accept").field("protocol", &self.protocol).finish_non_exhaustive()
    }
}

/// Refuses a WebSocket request, with an HTTP answer. The connection ends after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reject {
    status: u16,
    pub(crate) headers: String,
    text: String,
}

impl Reject {
    /// Refuses with an HTTP status: 401, 403, 404, 503.
    pub fn new(status: u16) -> Reject {
        Reject { status, headers: String::new(), text: String::new() }
    }

    /// Sets a text for the reader of the answer.
    #[must_use]
    pub fn text(self, text: impl Into<String>) -> Reject {
        Reject { text: text.into(), ..self }
    }

    /// Adds a header field, such as `Location` or `WWW-Authenticate`.
    ///
    /// # Panics
    /// Those of [`Accept::header`].
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Reject {
        put_field(name, value, &mut self.headers);
        self
    }

    /// The status.
    pub fn status(&self) -> u16 {
        self.status
    }

    /// Appends the answer to `out`.
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        let Reject { status, headers, text } = self;
        let (phrase, len) = (phrase(*status), text.len());
        let answer = format!(
            "HTTP/1.1 {status} {phrase}\r\nConnection: close\r\nContent-Type: text/plain; charset=utf-8\r\n\
             Content-Length: {len}\r\n{headers}\r\n{text}"
        );
        out.extend_from_slice(answer.as_bytes());
    }
}

/// The phrase after a status. Clients ignore it.
fn phrase(status: u16) -> &'static str {
    match status {
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        426 => "Upgrade Required",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        503 => "Service Unavailable",
        _ => "Refused",
    }
}

pub(crate) fn put_field(name: &str, value: &str, fields: &mut String) {
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    assert!(!name.is_empty() && name.bytes().all(is_token), "{name:?} is the name of no header field");
    let is_value = |c: char| c == '\t' || !c.is_control();
    assert!(value.chars().all(is_value), "the header field {name} has a control character");
    for part in [name, ": ", value, "\r\n"] {
        fields.push_str(part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "GET /chat?room=1 HTTP/1.1\r\nHost: example.org\r\nUpgrade: WebSocket\r\n\
        Connection: keep-alive, Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\
        Sec-WebSocket-Version: 13\r\nOrigin: https://example.org\r\nCookie: a=1; token=xyz\r\n\
        Sec-WebSocket-Protocol: mqtt, chat\r\nSec-WebSocket-Protocol: echo\r\n\r\n";

    fn status(head: &str) -> Option<u16> {
        let end = match find_end(head.as_bytes(), 0) {
            Ok(end) => end.expect("a whole head"),
            Err(reject) => return Some(reject.status()),
        };
        assert_eq!(end, head.len());
        read(head.as_bytes(), |_, _| Ok(())).err().map(|reject| reject.status())
    }

    #[test]
    fn a_request_is_read_and_its_key_answered() {
        let accept = read(GOOD.as_bytes(), |upgrade, accept| {
            assert_eq!((upgrade.path(), upgrade.query()), ("/chat", Some("room=1")));
            assert_eq!(
                (upgrade.origin(), upgrade.host()),
                (Some("https://example.org"), Some("example.org"))
            );
            assert_eq!((upgrade.cookie("token"), upgrade.cookie("b")), (Some("xyz"), None));
            assert_eq!(upgrade.protocols().collect::<Vec<_>>(), ["mqtt", "chat", "echo"]);
            assert!(upgrade.offers("echo") && !upgrade.offers("Echo"));
            Ok(accept.to_owned())
        });
        // The example of RFC 6455.
        assert_eq!(accept.as_deref(), Ok("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
    }

    #[test]
    fn the_end_of_a_head_is_found_however_it_comes() {
        let head = GOOD.as_bytes();
        for len in 0..head.len() {
            assert_eq!(find_end(&head[..len], len.saturating_sub(1)), Ok(None));
        }
        let more = [head, b"more"].concat();
        for scanned in 0..head.len() {
            assert_eq!(find_end(&more, scanned), Ok(Some(head.len())), "{scanned}");
        }
        assert_eq!(find_end(b"\x16\x03\x01", 0).unwrap_err().status(), 400);
        for lines in [1, 2, EMPTY_LINES_MAX] {
            let late = [LINE_END.repeat(lines), more.clone()].concat();
            let end = late.len() - 4;
            for len in 0..end {
                assert_eq!(find_end(&late[..len], len.saturating_sub(1)), Ok(None), "{lines} {len}");
            }
            assert_eq!(find_end(&late, end - 1), Ok(Some(end)));
            assert!(read(&late[..end], |_, _| Ok(())).is_ok());
        }
        let lines = LINE_END.repeat(EMPTY_LINES_MAX + 1);
        assert_eq!(find_end(&lines, 0).unwrap_err().status(), 400);
        let mut long = GOOD.as_bytes()[..GOOD.len() - 2].to_vec();
        long.resize(HEAD_BYTES_MAX, b'x');
        assert_eq!(find_end(&long, 0), Ok(None));
        long.push(b'x');
        assert_eq!(find_end(&long, 0).unwrap_err().status(), 431);
    }

    #[test]
    fn what_asks_for_something_else_is_told_so() {
        assert_eq!(status(GOOD), None);
        let with = |from: &str, to: &str| {
            assert!(GOOD.contains(from), "{from}");
            status(&GOOD.replace(from, to))
        };
        for (from, to, told) in [
            ("Upgrade: WebSocket\r\n", "", 426),
            ("Connection: keep-alive, Upgrade", "Connection: close", 426),
            ("Version: 13", "Version: 8", 426),
            ("Version: 13\r\n", "Version: 13\r\nSec-WebSocket-Version: 13\r\n", 426),
            ("GET", "POST", 400),
            ("HTTP/1.1", "HTTP/1.0", 400),
            ("Host: example.org\r\n", "", 400),
            ("Host: example.org\r\n", "Host: a\r\nHost: b\r\n", 400),
            ("dGhlIHNhbXBsZSBub25jZQ==", "dGhlIHNhbXBsZSBub25jZQ", 400),
            ("dGhlIHNhbXBsZSBub25jZQ==", "dGhlIHNhbXBsZSBub25jZ-==", 400),
            ("Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n", "", 400),
            ("Origin: ", "Content-Length: 5\r\nOrigin: ", 400),
            ("Origin: ", "Transfer-Encoding: chunked\r\nOrigin: ", 400),
            ("Origin: ", "Ori\0gin: ", 400),
        ] {
            assert_eq!(with(from, to), Some(told), "{from} as {to}");
        }
        assert_eq!(with("Origin: ", "Content-Length: 0\r\nOrigin: "), None);
        let many: String = (0..HEADERS_MAX).map(|n| format!("x{n}: 1\r\n")).collect();
        assert_eq!(with("Origin: ", &format!("{many}Origin: ")), Some(431));
    }

    #[test]
    fn answers_are_those_of_http() {
        let mut out = Vec::new();
        Accept::new().protocol("mqtt").header("Set-Cookie", "a=1").write(
            "KEY=",
            Some("permessage-deflate"),
            &mut out,
        );
        let answer = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
            Sec-WebSocket-Accept: KEY=\r\nSec-WebSocket-Protocol: mqtt\r\n\
            Sec-WebSocket-Extensions: permessage-deflate\r\nSet-Cookie: a=1\r\n\r\n";
        assert_eq!(out, answer.as_bytes());
        out.clear();
        Reject::new(401).header("WWW-Authenticate", "Basic").text("who?").write(&mut out);
        let answer = "HTTP/1.1 401 Unauthorized\r\nConnection: close\r\nContent-Type: text/plain; charset=utf-8\r\n\
            Content-Length: 4\r\nWWW-Authenticate: Basic\r\n\r\nwho?";
        assert_eq!(out, answer.as_bytes());
    }

    #[test]
    #[should_panic = "control character"]
    fn a_header_field_cannot_be_ended_by_its_value() {
        let _ = Reject::new(302).header("Location", "/\r\nSet-Cookie: a=1");
    }
}
