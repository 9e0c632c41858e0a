//! Messages, as they come and as they leave.

use std::fmt;
use std::ops::Deref;

use bytes::{BufMut, Bytes, BytesMut};
use ringserve_core::{Frame, Outlet, Payload};
use ringserve_websocket::Kind;

/// A message that came. It shows the bytes where they were received, and pins them there while it
/// lives.
#[derive(Clone, Debug)]
pub enum Message {
    /// Of text.
    Text(Text),
    /// Of bytes.
    Binary(Frame),
}

impl Message {
    pub(crate) fn new(frame: Frame<Kind>) -> Message {
        match frame.into_parts() {
            (frame, Kind::Text) => Message::Text(Text(frame)),
            (frame, Kind::Binary) => Message::Binary(frame),
        }
    }

    /// The kind of its content.
    pub fn kind(&self) -> Kind {
        match self {
            Message::Text(_) => Kind::Text,
            Message::Binary(_) => Kind::Binary,
        }
    }

    /// Its bytes, whatever its kind.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Message::Text(Text(frame)) | Message::Binary(frame) => frame,
        }
    }

    /// Its text, if it is of text. See [`Text::as_str`] for what it costs.
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Message::Text(text) => Some(text.as_str()),
            Message::Binary(_) => None,
        }
    }
}

/// A message of text that came.
#[derive(Clone)]
pub struct Text(Frame);

impl Text {
    /// The text. It was checked when it came, and is again for each call: what reads it more than
    /// once keeps the result.
    pub fn as_str(&self) -> &str {
        ringserve_websocket::utf8::as_text(&self.0)
    }

    /// Its bytes, for a reader that checks them itself, as one of JSON. Costs nothing.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The frame in which it lies.
    pub fn into_frame(self) -> Frame {
        self.0
    }
}

impl Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        self.as_str()
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.as_str();
        // As much as of a frame.
        let end = (0..=text.len().min(64)).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        f.debug_tuple("Text").field(&&text[..end]).finish()
    }
}

/// A message that leaves. Text is made from `&str` and `String`, bytes from `&[u8]`, `Vec<u8>` and
/// [`Bytes`]; what came may leave again as it is. From 32 KiB on owned bytes are kept until they
/// are sent, and from 4 KiB on what came is lent: not copied.
#[derive(Debug)]
pub struct Outgoing<'a> {
    kind: Kind,
    payload: Payload<'a>,
}

impl<'a> Outgoing<'a> {
    /// A message of bytes.
    pub fn binary(payload: impl Into<Payload<'a>>) -> Outgoing<'a> {
        Outgoing { kind: Kind::Binary, payload: payload.into() }
    }

    /// A message of text that is known to be UTF-8, as what a writer of JSON has written. Nothing
    /// checks it: a client ends the connection where it is none.
    pub fn text_unchecked(payload: impl Into<Payload<'a>>) -> Outgoing<'a> {
        Outgoing { kind: Kind::Text, payload: payload.into() }
    }

    /// Its kind and its payload.
    #[cfg(feature = "http")]
    pub(crate) fn into_parts(self) -> (Kind, Payload<'a>) {
        (self.kind, self.payload)
    }

    /// Queues it for a connection.
    pub(super) fn write(self, outlet: &Outlet) {
        outlet.write_headed(&self.kind.header(self.payload.len()), self.payload);
    }

    /// As it is on the wire.
    pub(super) fn into_wire(self) -> Bytes {
        let (header, payload) = (self.kind.header(self.payload.len()), self.payload.bytes());
        let mut wire = BytesMut::with_capacity(header.len() + payload.len());
        wire.put_slice(&header);
        wire.put_slice(payload);
        wire.freeze()
    }
}

impl From<Message> for Outgoing<'_> {
    fn from(message: Message) -> Self {
        match message {
            Message::Text(text) => text.into(),
            Message::Binary(frame) => Outgoing { kind: Kind::Binary, payload: Payload::Frame(frame) },
        }
    }
}

impl From<Text> for Outgoing<'_> {
    fn from(text: Text) -> Self {
        Outgoing { kind: Kind::Text, payload: Payload::Frame(text.0) }
    }
}

macro_rules! outgoing_from {
    ($($kind:ident: $from:ty),*) => {
        $(impl<'a> From<$from> for Outgoing<'a> {
            fn from(payload: $from) -> Self {
                Outgoing { kind: Kind::$kind, payload: payload.into() }
            }
        })*
    };
}
outgoing_from!(Text: &'a str, Text: &'a String, Text: String);
outgoing_from!(Binary: &'a [u8], Binary: &'a Vec<u8>, Binary: Vec<u8>, Binary: Bytes, Binary: Frame);
