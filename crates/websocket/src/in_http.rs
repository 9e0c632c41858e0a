//! WebSocket requests that an HTTP server has read: of HTTP/1.1, or of HTTP/2 according to RFC
//! 8441.

use crate::extension::Extension;
use crate::info::WebSocketInfo;
use crate::options::WebSocketOptions;
use crate::upgrade::{Reject, Upgrade, accept_key};

/// The answer to a request.
#[derive(Debug)]
pub struct Answer {
    /// 101 or 200 if the connection speaks WebSocket from then on.
    pub status: u16,
    /// Its header fields.
    pub fields: Vec<(String, String)>,
    /// The facts of the connection, if the client is admitted.
    pub info: Option<WebSocketInfo>,
    /// Whether its messages may be compressed.
    pub compresses: bool,
}

/// Decides on a request for `target` with these header fields; an HTTP/2 request has its authority
/// as `host`. `extension` is that of the shard.
pub fn answer(
    options: &WebSocketOptions,
    extension: Option<&dyn Extension>,
    target: &str,
    fields: &[(&str, &[u8])],
    is_http2: bool,
) -> Answer {
    let headers: Vec<_> = fields.iter().map(|&(name, value)| httparse::Header { name, value }).collect();
    let upgrade = Upgrade { target, headers: &headers };
    let accepted = if is_http2 { check_http2(&upgrade).map(|()| None) } else { check(&upgrade).map(Some) };
    let decided = accepted.and_then(|key| Ok((key, options.decide(&upgrade)?)));
    let (key, accept) = match decided {
        Ok(decided) => decided,
        Err(reject) => {
            let (status, fields) = (reject.status(), split(&reject.headers));
            return Answer { status, fields, info: None, compresses: false };
        }
    };
    let offers: Vec<&str> = upgrade.headers("sec-websocket-extensions").collect();
    // No extension is agreed on that was not offered.
    let extension = extension.filter(|_| !offers.is_empty());
    let compression = extension.and_then(|extension| extension.negotiate(&offers.join(", ")));
    let mut fields = split(&accept.headers);
    let mut put = |name: &str, value: &str| fields.push((name.to_owned(), value.to_owned()));
    if let Some(key) = &key {
        put("upgrade", "websocket");
        put("connection", "upgrade");
        put("sec-websocket-accept", key);
    }
    if let Some(protocol) = &accept.protocol {
        put("sec-websocket-protocol", protocol);
    }
    if let Some(compression) = &compression {
        put("sec-websocket-extensions", compression);
    }
    Answer {
        status: if is_http2 { 200 } else { 101 },
        fields,
        info: Some(WebSocketInfo::new(&upgrade, &accept)),
        compresses: compression.is_some(),
    }
}

/// Header fields, one per line.
fn split(fields: &str) -> Vec<(String, String)> {
    let field = |line: &str| line.split_once(": ").map(|(name, value)| (name.to_owned(), value.to_owned()));
    fields.split("\r\n").filter_map(field).collect()
}

/// The value of `sec-websocket-accept` for a request of HTTP/1.1 that asks for WebSocket.
fn check(upgrade: &Upgrade<'_>) -> Result<String, Reject> {
    upgrade.check()?;
    let accept = accept_key(upgrade.key()?);
    Ok(String::from_utf8_lossy(&accept).into_owned())
}

/// Checks an HTTP/2 request, which its method and protocol mark as one for WebSocket, and which has
/// no key.
fn check_http2(upgrade: &Upgrade<'_>) -> Result<(), Reject> {
    let mut versions = upgrade.headers("sec-websocket-version");
    if (versions.next(), versions.next()) == (Some("13"), None) {
        return Ok(());
    }
    // 426 has no place in HTTP/2.
    Err(Reject::new(400).header("sec-websocket-version", "13"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extension::InflateError;

    const KEY: &[u8] = b"dGhlIHNhbXBsZSBub25jZQ==";

    fn asked(options: &WebSocketOptions, fields: &[(&str, &[u8])], is_http2: bool) -> Answer {
        answer(options, None, "/chat?room=1", fields, is_http2)
    }

    fn field<'a>(answer: &'a Answer, name: &str) -> Option<&'a str> {
        let mut fields = answer.fields.iter().filter(|(of, _)| of.eq_ignore_ascii_case(name));
        fields.next().map(|(_, value)| &**value)
    }

    #[test]
    fn requests_of_both_versions_are_let_in() {
        let options = WebSocketOptions::new().protocols(["chat"]);
        let http1 = [
            ("host", &b"example.org"[..]),
            ("upgrade", b"websocket"),
            ("connection", b"Upgrade"),
            ("sec-websocket-key", KEY),
            ("sec-websocket-version", b"13"),
            ("sec-websocket-protocol", b"chat"),
        ];
        let answer = asked(&options, &http1, false);
        assert_eq!((answer.status, answer.compresses), (101, false));
        assert_eq!(field(&answer, "sec-websocket-accept"), Some("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
        assert_eq!(field(&answer, "sec-websocket-protocol"), Some("chat"));
        let info = answer.info.unwrap();
        assert_eq!((info.path(), info.query(), info.protocol()), ("/chat", Some("room=1"), Some("chat")));

        let answer = asked(&options, &[("sec-websocket-version", b"13")], true);
        assert_eq!((answer.status, answer.fields.len()), (200, 0));
        assert!(answer.info.is_some());
    }

    /// Agrees to all offers, and would even without any.
    struct Agrees;

    impl Extension for Agrees {
        fn negotiate(&self, offers: &str) -> Option<String> {
            Some(format!("x-all; of=\"{offers}\""))
        }

        fn inflate(&mut self, _: &[u8], _: usize, _: &mut Vec<u8>) -> Result<(), InflateError> {
            Err(InflateError::Malformed)
        }

        fn compress(&mut self, _: &[u8]) -> Option<&[u8]> {
            None
        }
    }

    #[test]
    fn nothing_is_agreed_on_that_was_not_offered() {
        let version = ("sec-websocket-version", &b"13"[..]);
        for (fields, compresses) in
            [(&[version][..], false), (&[version, ("sec-websocket-extensions", b"x-all")], true)]
        {
            let answer = answer(&WebSocketOptions::new(), Some(&Agrees), "/", fields, true);
            assert_eq!(answer.compresses, compresses);
            assert_eq!(field(&answer, "sec-websocket-extensions").is_some(), compresses);
        }
    }

    #[test]
    fn others_are_told_what_they_lack() {
        let options = WebSocketOptions::new().origins(["https://example.org"]);
        let answer = asked(&options, &[("host", b"example.org")], false);
        assert_eq!((answer.status, field(&answer, "upgrade")), (426, Some("websocket")));
        let answer = asked(&options, &[("sec-websocket-version", b"12")], true);
        assert_eq!((answer.status, field(&answer, "sec-websocket-version")), (400, Some("13")));
        let foreign: [(&str, &[u8]); 2] =
            [("sec-websocket-version", b"13"), ("origin", b"https://elsewhere.example")];
        let answer = asked(&options, &foreign, true);
        assert_eq!((answer.status, answer.info.is_some()), (403, false));
    }
}
