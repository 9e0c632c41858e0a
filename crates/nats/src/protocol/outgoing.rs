//! Operations that a client sends.

use bytes::BufMut;

use super::headers::{VERSION, is_field};
use super::subject::is_subject;
use crate::error::NatsError;

/// A message to be published, with what a plain [`publish`](crate::Nats::publish) does not have.
///
/// ```
/// use ringserve_nats::Outgoing;
///
/// let message = Outgoing::new("orders.new", b"7").header("Nats-Msg-Id", "order-7").reply("orders.heard");
/// # let _ = message;
/// ```
#[derive(Clone, Debug)]
pub struct Outgoing<'a> {
    subject: &'a str,
    payload: &'a [u8],
    reply: Option<&'a str>,
    headers: Vec<(&'a str, &'a str)>,
}

impl<'a> Outgoing<'a> {
    /// A message with this payload to a subject.
    pub fn new<P: AsRef<[u8]> + ?Sized>(subject: &'a str, payload: &'a P) -> Outgoing<'a> {
        Outgoing { subject, payload: payload.as_ref(), reply: None, headers: Vec::new() }
    }

    /// Adds a field to the headers.
    pub fn header(mut self, name: &'a str, value: &'a str) -> Outgoing<'a> {
        self.headers.push((name, value));
        self
    }

    /// Sets the subject for answers. A request has its own, and ignores this one.
    pub fn reply(self, subject: &'a str) -> Outgoing<'a> {
        Outgoing { reply: Some(subject), ..self }
    }

    pub(crate) fn has_headers(&self) -> bool {
        !self.headers.is_empty()
    }

    /// Checks all of it but its size.
    pub(crate) fn check(&self) -> Result<(), NatsError> {
        if !is_subject(self.subject) || self.reply.is_some_and(|reply| !is_subject(reply)) {
            return Err(NatsError::BadSubject);
        }
        match self.headers.iter().all(|(name, value)| is_field(name, value)) {
            true => Ok(()),
            false => Err(NatsError::BadHeader),
        }
    }

    /// Bytes that count for `max_payload`: headers and payload.
    pub(crate) fn payload_bytes(&self) -> usize {
        self.header_bytes() + self.payload.len()
    }

    /// Bytes of the whole operation, at most.
    pub(crate) fn bytes_max(&self) -> usize {
        // The inbox of requests is shorter than 64 bytes, as is what stands between the words.
        self.subject.len() + self.reply.map_or(64, str::len) + self.payload_bytes() + 64
    }

    fn header_bytes(&self) -> usize {
        if self.headers.is_empty() {
            return 0;
        }
        let fields = self.headers.iter().map(|(name, value)| name.len() + value.len() + 4);
        VERSION.len() + 2 + fields.sum::<usize>() + 2
    }

    /// Writes the operation. A request has `inbox`, the subject of all answers and its number.
    pub(crate) fn write(&self, inbox: Option<(&str, u64)>, out: &mut impl BufMut) {
        let mut numbers = itoa::Buffer::new();
        out.put_slice(if self.headers.is_empty() { b"PUB " } else { b"HPUB " });
        out.put_slice(self.subject.as_bytes());
        out.put_u8(b' ');
        if let Some((inbox, number)) = inbox {
            out.put_slice(inbox.as_bytes());
            out.put_u8(b'.');
            out.put_slice(numbers.format(number).as_bytes());
            out.put_u8(b' ');
        } else if let Some(reply) = self.reply {
            out.put_slice(reply.as_bytes());
            out.put_u8(b' ');
        }
        if !self.headers.is_empty() {
            out.put_slice(numbers.format(self.header_bytes()).as_bytes());
            out.put_u8(b' ');
        }
        out.put_slice(numbers.format(self.payload_bytes()).as_bytes());
        out.put_slice(b"\r\n");
        self.write_headers(out);
        out.put_slice(self.payload);
        out.put_slice(b"\r\n");
    }

    fn write_headers(&self, out: &mut impl BufMut) {
        if self.headers.is_empty() {
            return;
        }
        out.put_slice(VERSION);
        out.put_slice(b"\r\n");
        for (name, value) in &self.headers {
            out.put_slice(name.as_bytes());
            out.put_slice(b": ");
            out.put_slice(value.as_bytes());
            out.put_slice(b"\r\n");
        }
        out.put_slice(b"\r\n");
    }
}

/// Writes a subscription.
pub(crate) fn write_sub(pattern: &str, queue: Option<&str>, sid: u64, out: &mut impl BufMut) {
    out.put_slice(b"SUB ");
    out.put_slice(pattern.as_bytes());
    out.put_u8(b' ');
    if let Some(queue) = queue {
        out.put_slice(queue.as_bytes());
        out.put_u8(b' ');
    }
    out.put_slice(itoa::Buffer::new().format(sid).as_bytes());
    out.put_slice(b"\r\n");
}

/// Writes the end of a subscription: at once, or after that many messages more.
pub(crate) fn write_unsub(sid: u64, after: Option<u64>, out: &mut impl BufMut) {
    let mut numbers = itoa::Buffer::new();
    out.put_slice(b"UNSUB ");
    out.put_slice(numbers.format(sid).as_bytes());
    if let Some(after) = after {
        out.put_u8(b' ');
        out.put_slice(numbers.format(after).as_bytes());
    }
    out.put_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(message: &Outgoing<'_>, inbox: Option<(&str, u64)>) -> String {
        let mut out = Vec::new();
        message.write(inbox, &mut out);
        assert!(out.len() <= message.bytes_max());
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn messages_are_written_as_the_protocol_says() {
        let plain = Outgoing::new("a.b", "hello");
        assert_eq!(written(&plain, None), "PUB a.b 5\r\nhello\r\n");
        assert_eq!(written(&plain, Some(("_INBOX.x", 7))), "PUB a.b _INBOX.x.7 5\r\nhello\r\n");
        assert_eq!(written(&plain.clone().reply("c"), None), "PUB a.b c 5\r\nhello\r\n");
        let headed = plain.header("d", "e").header("f", "");
        assert_eq!(written(&headed, None), "HPUB a.b 23 28\r\nNATS/1.0\r\nd: e\r\nf: \r\n\r\nhello\r\n");
    }

    #[test]
    fn messages_that_would_be_others_are_refused() {
        for (message, fits) in [
            (Outgoing::new("a", "b"), true),
            (Outgoing::new("a b", "b"), false),
            (Outgoing::new("a.*", "b"), false),
            (Outgoing::new("a", "b").reply("a.>"), false),
            (Outgoing::new("a", "b").header("a", "b\r\nc: d"), false),
            (Outgoing::new("a", "b").header("a b", "c"), false),
        ] {
            assert_eq!(message.check().is_ok(), fits, "{message:?}");
        }
    }

    #[test]
    fn subscriptions_are_written_as_the_protocol_says() {
        let mut out = Vec::new();
        write_sub("a.>", None, 0, &mut out);
        write_sub("a", Some("q"), 12, &mut out);
        write_unsub(12, None, &mut out);
        write_unsub(12, Some(3), &mut out);
        assert_eq!(out, b"SUB a.> 0\r\nSUB a q 12\r\nUNSUB 12\r\nUNSUB 12 3\r\n");
    }
}
