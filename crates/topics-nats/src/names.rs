//! Subjects, keys, and what JetStream says.

use std::time::Duration;

use bytes::Bytes;
use ringserve_nats::{Headers, Message};
use ringserve_topics::bridge::NumberedMessage;
use serde::Deserialize;
use serde_json::{Value, json};

/// The header of a key.
pub(crate) const KEY: &str = "Ringserve-Key";

/// Bytes of the headers that a message of ours has, without its key.
pub(crate) const HEADER_BYTES: usize = 128;

/// The subjects and streams of a namespace.
#[derive(Clone)]
pub(crate) struct Names {
    namespace: Box<str>,
}

impl Names {
    pub(crate) fn new(namespace: &str) -> Names {
        Names { namespace: namespace.into() }
    }

    pub(crate) fn published(&self, topic: &str) -> String {
        format!("{}.t.{topic}", self.namespace)
    }

    pub(crate) fn live(&self, topic: &str) -> String {
        format!("{}.live.{topic}", self.namespace)
    }

    /// The count of a topic's members on a node, or on each with `*`.
    pub(crate) fn count(&self, topic: &str, node: &str) -> String {
        format!("{}.count.{topic}.{node}", self.namespace)
    }

    pub(crate) fn stream(&self) -> &str {
        &self.namespace
    }

    pub(crate) fn counts(&self) -> String {
        format!("{}-counts", self.namespace)
    }

    /// The configuration of the stream.
    pub(crate) fn config(&self, entries: usize, age: Option<Duration>, memory: bool, replicas: u8) -> Value {
        json!({
            "name": self.stream(),
            "subjects": [self.published(">")],
            "retention": "limits",
            "discard": "old",
            "storage": if memory { "memory" } else { "file" },
            "num_replicas": replicas,
            "max_msgs_per_subject": entries,
            "max_age": age.map_or(0, |age| u64::try_from(age.as_nanos()).unwrap_or(0)),
            "allow_direct": true,
            "republish": { "src": self.published(">"), "dest": self.live(">") },
        })
    }

    /// The configuration of the stream of counts.
    pub(crate) fn counts_config(&self) -> Value {
        json!({
            "name": self.counts(),
            "subjects": [self.count(">", "").trim_end_matches('.')],
            "retention": "limits",
            "discard": "old",
            "storage": "memory",
            "num_replicas": 1,
            "max_msgs_per_subject": 1,
            "max_age": 3_600_000_000_000_u64,
            "allow_direct": true,
            "allow_msg_ttl": true,
        })
    }
}

/// The facts that JetStream gives of a stream.
#[derive(Debug)]
pub(crate) struct StreamFacts {
    /// The life of the stream, from the time when it was made.
    pub(crate) epoch: u64,
    pub(crate) first: u64,
    /// The number of the newest message that it took.
    pub(crate) last: u64,
    /// Messages of a subject that are kept at most.
    pub(crate) entries: Option<u64>,
    pub(crate) age: Option<Duration>,
    /// It may drop messages of a topic for those of others.
    pub(crate) has_bound: bool,
}

/// The reason why a stream cannot be used.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum StreamError {
    /// There is none.
    Missing,
    Other(String),
}

#[derive(Deserialize)]
struct Answer {
    error: Option<Failure>,
    created: Option<String>,
    config: Option<Config>,
    state: Option<State>,
}

#[derive(Deserialize)]
struct Failure {
    #[serde(default)]
    code: u32,
    #[serde(default)]
    description: String,
}

#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    max_msgs_per_subject: i64,
    #[serde(default)]
    max_age: u64,
    #[serde(default)]
    max_msgs: i64,
    #[serde(default)]
    max_bytes: i64,
    #[serde(default, rename = "allow_direct")]
    has_direct: bool,
    republish: Option<Republish>,
}

#[derive(Deserialize)]
struct Republish {
    #[serde(default)]
    dest: String,
    #[serde(default, rename = "headers_only")]
    is_headers_only: bool,
}

#[derive(Deserialize)]
struct State {
    #[serde(default)]
    first_seq: u64,
    #[serde(default)]
    last_seq: u64,
}

/// Reads what JetStream says of a stream that should republish to this subject, if to one.
pub(crate) fn stream_facts(answer: &[u8], dest: Option<&str>) -> Result<StreamFacts, StreamError> {
    let other = |why: &str| StreamError::Other(why.to_owned());
    let answer: Answer =
        serde_json::from_slice(answer).map_err(|_| other("JetStream's answer is malformed"))?;
    if let Some(Failure { code, description }) = answer.error {
        return Err(match code {
            404 => StreamError::Missing,
            _ => StreamError::Other(description.chars().take(256).collect()),
        });
    }
    let (Some(created), Some(config), Some(state)) = (answer.created, answer.config, answer.state) else {
        return Err(other("JetStream's answer lacks the stream"));
    };
    if !config.has_direct {
        return Err(other("the stream has no allow_direct"));
    }
    let is_republished = config.republish.map(|of| (of.dest, of.is_headers_only));
    if dest.is_some_and(|dest| is_republished != Some((dest.to_owned(), false))) {
        return Err(other("the stream does not republish its messages to the subjects of topics"));
    }
    Ok(StreamFacts {
        epoch: hash(created.as_bytes()),
        first: state.first_seq,
        last: state.last_seq,
        entries: u64::try_from(config.max_msgs_per_subject).ok().filter(|entries| *entries > 0),
        age: Some(config.max_age).filter(|age| *age > 0).map(Duration::from_nanos),
        has_bound: config.max_msgs > 0 || config.max_bytes > 0,
    })
}

/// The epoch of a stream that lost its newest messages, and goes on behind this number: another
/// one, the same on all nodes that saw this number.
pub(crate) fn epoch_behind(epoch: u64, last: u64) -> u64 {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&epoch.to_le_bytes());
    bytes[8..].copy_from_slice(&last.to_le_bytes());
    hash(&bytes)
}

/// The same on all nodes and in all versions: FNV-1a.
fn hash(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// The bytes that [`escape`](ringserve_topics::escape) made a token of. `None` for another text.
pub(crate) fn unescape(token: &str) -> Option<Box<[u8]>> {
    let mut bytes = Vec::with_capacity(token.len());
    let mut rest = token.bytes();
    if token == "%" {
        return Some(Box::default());
    }
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let digits = [rest.next()?, rest.next()?];
                let digit = |byte: u8| char::from(byte).to_digit(16);
                (digit(digits[0])? * 16 + digit(digits[1])?) as u8
            }
            byte => byte,
        });
    }
    Some(bytes.into())
}

/// The key of a message; empty without one, or if it is malformed, as other programs may write it.
pub(crate) fn key_of(headers: Headers<'_>) -> Box<[u8]> {
    headers.get(KEY).and_then(unescape).unwrap_or_default()
}

/// The value of a field that the stream wrote: the last one. The stream writes its fields behind
/// those of the publisher, which may have the same names.
fn of_stream<'a>(headers: Headers<'a>, name: &str) -> Option<&'a str> {
    headers.iter().filter_map(|(field, value)| (field == name).then_some(value)).last()
}

/// The number of a message, and of the one before it in its topic, as the stream wrote them. `None`
/// if it is no message of this subject.
fn numbers(headers: Headers<'_>, subject: &str) -> Option<(u64, u64)> {
    let number = |name: &str| of_stream(headers, name)?.parse::<u64>().ok();
    if of_stream(headers, "Nats-Subject")? != subject {
        return None;
    }
    // There is a number behind each.
    let seq = number("Nats-Sequence").filter(|seq| (1..u64::MAX).contains(seq))?;
    Some((seq, number("Nats-Last-Sequence").unwrap_or(0)))
}

/// A message that the stream has numbered, with the number of the one before it in its topic.
pub(crate) fn numbered(message: &Message, subject: &str) -> Option<(NumberedMessage, u64)> {
    let (seq, before) = numbers(message.headers(), subject)?;
    let payload = Bytes::copy_from_slice(message.payload());
    Some((NumberedMessage { seq, key: key_of(message.headers()), payload }, before))
}

#[cfg(test)]
mod tests {
    use ringserve_topics::escape;

    use super::*;

    const INFO: &str = r#"{"created":"2026-01-01T00:00:00Z","state":{"first_seq":7,"last_seq":9},"config":{"max_age":1000000000,
        "max_msgs_per_subject":10,"max_msgs":-1,"max_bytes":-1,"allow_direct":true,"republish":{"src":"a","dest":"b"}}}"#;

    #[test]
    fn keys_come_back_as_they_were() {
        for key in [&b""[..], b"%", b"a b", b"\xff\0.", b"plain-key"] {
            assert_eq!(unescape(&escape(key)).as_deref(), Some(key));
        }
        for text in ["%g0", "%1", "a%", "%%%"] {
            assert_eq!(unescape(text), None, "{text}");
        }
    }

    #[test]
    fn facts_of_a_stream_are_read() {
        let facts = stream_facts(INFO.as_bytes(), Some("b")).unwrap();
        assert_eq!((facts.first, facts.last, facts.entries, facts.has_bound), (7, 9, Some(10), false));
        assert_eq!(facts.age, Some(Duration::from_secs(1)));
        let other = stream_facts(INFO.replace("2026", "2027").as_bytes(), Some("b")).unwrap();
        assert_ne!(facts.epoch, other.epoch, "another stream has other cursors");
    }

    #[test]
    fn streams_that_do_not_serve_are_refused() {
        let refused = |answer: String, dest| stream_facts(answer.as_bytes(), dest).unwrap_err();
        assert_eq!(
            refused(r#"{"error":{"code":404,"description":"no"}}"#.into(), None),
            StreamError::Missing
        );
        let others = [
            INFO.replace(r#""allow_direct":true"#, r#""allow_direct":false"#),
            INFO.replace(r#""dest":"b""#, r#""dest":"c""#),
            INFO.replace(r#""dest":"b""#, r#""dest":"b","headers_only":true"#),
            r#"{"error":{"code":503,"description":"JetStream not enabled"}}"#.into(),
            r#"{"created":"2026"}"#.into(),
            "[]".into(),
            "{".into(),
        ];
        for answer in others {
            assert!(matches!(refused(answer.clone(), Some("b")), StreamError::Other(_)), "{answer}");
        }
    }
}
