//! Forms: the bytes that members of a protocol get for a message.

use std::fmt;
use std::str::FromStr;

use bytes::Bytes;

/// A place in a topic. A client that comes back with the one it saw last gets what it missed since
/// ([`Since::Cursor`](crate::Since::Cursor)). Its text has 33 bytes at most, of digits, letters and
/// a dash.
///
/// ```
/// use ringserve::topics::Cursor;
///
/// let cursor = Cursor { epoch: 0xfe, seq: 17 };
/// assert_eq!(cursor.to_string(), "fe-11");
/// assert_eq!("fe-11".parse(), Ok(cursor));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cursor {
    /// The life of the topic: another one where it was made again.
    pub epoch: u64,
    /// The number of the message, from 1 in each epoch.
    pub seq: u64,
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}-{:x}", self.epoch, self.seq)
    }
}

/// The error of a text that is no [`Cursor`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CursorError;

impl fmt::Display for CursorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a cursor is two hexadecimal numbers with a dash between them")
    }
}

impl std::error::Error for CursorError {}

impl FromStr for Cursor {
    type Err = CursorError;

    fn from_str(text: &str) -> Result<Cursor, CursorError> {
        let number = |text: &str| {
            let is_plain = text.bytes().all(|byte| byte.is_ascii_hexdigit());
            u64::from_str_radix(text, 16).ok().filter(|_| is_plain).ok_or(CursorError)
        };
        let (epoch, seq) = text.split_once('-').ok_or(CursorError)?;
        Ok(Cursor { epoch: number(epoch)?, seq: number(seq)? })
    }
}

/// A message of a topic, for a [`Form`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct EntryView<'a> {
    /// The name of the topic.
    pub topic: &'a str,
    /// Its place.
    pub cursor: Cursor,
    /// The key that it was published under; empty without one.
    pub key: &'a [u8],
    /// The message.
    pub payload: &'a Bytes,
}

/// Messages that a member does not get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Gap {
    /// This number of messages fell off the log before the member had room for them.
    Missed(u64),
    /// The cursor that the member came with is none of this topic's: what it missed is not known.
    Unknown,
}

/// The form in which members of a protocol get messages. It is called on the thread that delivers,
/// once in the process for each message: the result is shared. A message for which it panics is
/// skipped, for all members of this form.
pub trait Form: Send + Sync + 'static {
    /// Adds the payload of the frame for a message to `out`. Write the cursor into it, else a
    /// client cannot come back with one. If the framing of the members' service has no frame for
    /// it, since a publisher's message holds a delimiter or is too long, they do not get it, and no
    /// gap is reported.
    fn entry(&self, entry: &EntryView<'_>, out: &mut Vec<u8>);

    /// Adds the payload of the frame that reports a gap. Without a byte nothing is sent.
    fn gap(&self, topic: &str, gap: Gap, out: &mut Vec<u8>);
}

/// The message alone, without its topic and its place; gaps are not reported. For protocols in
/// which the service has put all of it into the message.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bare;

impl Form for Bare {
    fn entry(&self, entry: &EntryView<'_>, out: &mut Vec<u8>) {
        out.extend_from_slice(entry.payload);
    }

    fn gap(&self, _topic: &str, _gap: Gap, _out: &mut Vec<u8>) {}
}

/// Lines of `topic cursor message`, and `topic ! missed 3` or `topic ! gap`. A message that is a
/// line stays one. One with the end of a line in it becomes several, where the framing does not
/// refuse it ([`Delimiter`](ringserve_server::framing::Delimiter) does): check what peers publish.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lines;

impl Form for Lines {
    fn entry(&self, entry: &EntryView<'_>, out: &mut Vec<u8>) {
        out.extend_from_slice(format!("{} {} ", entry.topic, entry.cursor).as_bytes());
        out.extend_from_slice(entry.payload);
    }

    fn gap(&self, topic: &str, gap: Gap, out: &mut Vec<u8>) {
        out.extend_from_slice(
            match gap {
                Gap::Missed(count) => format!("{topic} ! missed {count}"),
                Gap::Unknown => format!("{topic} ! gap"),
            }
            .as_bytes(),
        );
    }
}

/// Server-sent events whose `id` is the cursor, so that a browser comes back with it as
/// `Last-Event-ID`. Gaps are events named `gap`, whose data is the number of messages, or nothing
/// where that is not known.
#[derive(Clone, Copy, Debug, Default)]
pub struct Events;

impl Form for Events {
    fn entry(&self, entry: &EntryView<'_>, out: &mut Vec<u8>) {
        out.extend_from_slice(format!("id: {}\n", entry.cursor).as_bytes());
        // A line of an event ends with either of these, so none may be in the middle of one.
        for line in entry.payload.split(|byte| matches!(byte, b'\n' | b'\r')) {
            out.extend_from_slice(b"data: ");
            out.extend_from_slice(line);
            out.push(b'\n');
        }
        out.push(b'\n');
    }

    fn gap(&self, _topic: &str, gap: Gap, out: &mut Vec<u8>) {
        out.extend_from_slice(
            match gap {
                Gap::Missed(count) => format!("event: gap\ndata: {count}\n\n"),
                Gap::Unknown => "event: gap\ndata:\n\n".into(),
            }
            .as_bytes(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cursors_are_read_from_their_texts_alone() {
        for cursor in [Cursor { epoch: 0, seq: 0 }, Cursor { epoch: u64::MAX, seq: u64::MAX }] {
            assert_eq!(cursor.to_string().parse(), Ok(cursor));
            assert!(cursor.to_string().len() <= 33);
        }
        for text in ["", "-", "1", "1-", "-1", "1-g", "+1-1", "1-+1", "1 -1", "1-2-3", "11111111111111111-1"]
        {
            assert_eq!(text.parse::<Cursor>(), Err(CursorError), "{text}");
        }
    }

    #[test]
    fn forms_write_the_cursor_and_keep_their_bounds() {
        let payload = Bytes::from_static(b"one\ntwo\r\nid: 9");
        let cursor = Cursor { epoch: 10, seq: 11 };
        let entry = EntryView { topic: "news", cursor, key: b"", payload: &payload };
        let made = |form: &dyn Form| {
            let (mut of_entry, mut of_gap) = (Vec::new(), Vec::new());
            form.entry(&entry, &mut of_entry);
            form.gap("news", Gap::Missed(3), &mut of_gap);
            form.gap("news", Gap::Unknown, &mut of_gap);
            [of_entry, of_gap].map(|bytes| String::from_utf8(bytes).unwrap())
        };
        assert_eq!(made(&Bare), ["one\ntwo\r\nid: 9", ""]);
        assert_eq!(made(&Lines), ["news a-b one\ntwo\r\nid: 9", "news ! missed 3news ! gap"]);
        let events = "id: a-b\ndata: one\ndata: two\ndata: \ndata: id: 9\n\n";
        assert_eq!(made(&Events), [events, "event: gap\ndata: 3\n\nevent: gap\ndata:\n\n"]);
    }
}
