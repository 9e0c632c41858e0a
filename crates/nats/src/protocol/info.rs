//! INFO of a server about itself, and CONNECT of a client.

use serde::{Deserialize, Serialize};

/// The largest payload until a server says otherwise: the default of servers.
pub(crate) const MAX_PAYLOAD: usize = 1 << 20;

/// INFO. What this client does not use is left out.
#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct Info {
    pub(crate) server_name: String,
    pub(crate) version: String,
    pub(crate) max_payload: Option<usize>,
    pub(crate) headers: bool,
    pub(crate) nonce: Option<String>,
    /// Addresses of all servers of the cluster.
    pub(crate) connect_urls: Vec<String>,
    /// The server is about to end, and wants its clients elsewhere.
    pub(crate) ldm: bool,
    pub(crate) tls_required: bool,
}

impl Info {
    /// Reads a frame. `None` if it is no INFO.
    pub(crate) fn parse(frame: &[u8]) -> Option<Info> {
        serde_json::from_slice(frame.strip_prefix(b"INFO ")?).ok()
    }
}

/// CONNECT.
#[derive(Default, Serialize)]
pub(crate) struct Connect<'a> {
    pub(crate) verbose: bool,
    pub(crate) pedantic: bool,
    pub(crate) tls_required: bool,
    pub(crate) lang: &'a str,
    pub(crate) version: &'a str,
    /// 1: the server may send INFO again.
    pub(crate) protocol: u8,
    pub(crate) echo: bool,
    pub(crate) headers: bool,
    pub(crate) no_responders: bool,
    pub(crate) name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) user: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pass: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) auth_token: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) nkey: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) jwt: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) sig: Option<String>,
}

impl Connect<'_> {
    /// The operation, with its line end.
    pub(crate) fn line(&self) -> String {
        // Strings and numbers have a text in any case.
        format!("CONNECT {}\r\n", serde_json::to_string(self).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn info_is_read_whatever_else_is_in_it() {
        let info = Info::parse(
            br#"INFO {"server_id":"X","max_payload":1048576,"headers":true,"proto":1,"nonce":"ab","connect_urls":["10.0.0.2:4222"],"xkey":{"a":[1]}}"#,
        );
        let expected = Info {
            max_payload: Some(1 << 20),
            headers: true,
            nonce: Some("ab".to_owned()),
            connect_urls: vec!["10.0.0.2:4222".to_owned()],
            ..Info::default()
        };
        assert_eq!(info, Some(expected));
        for none in ["PING", "INFO", "INFO x", "INFO 7", "INFO {\"max_payload\":-1}", "INFO {\"ldm\":7}"] {
            assert_eq!(Info::parse(none.as_bytes()), None, "{none}");
        }
        // Deeper than the reader goes.
        assert_eq!(Info::parse(format!("INFO {{\"a\":{}", "[".repeat(60_000)).as_bytes()), None);
    }

    #[test]
    fn connect_escapes_what_a_program_says() {
        let line = Connect { name: "a\"\r\nPUB b 0", user: Some("ann"), ..Connect::default() }.line();
        assert!(line.contains(r#""name":"a\"\r\nPUB b 0","user":"ann"}"#), "{line}");
        assert_eq!(line.matches("\r\n").count(), 1);
    }
}
