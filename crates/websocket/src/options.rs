//! Options of a listener's connections.

use std::fmt;
use std::sync::Arc;

use crate::close;
use crate::extension::Extension;
use crate::frame::Violation;
use crate::messages::Kind;
use crate::upgrade::{Accept, Reject, Upgrade};

/// Bytes of a message by default.
pub(crate) const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// The most bytes of a message.
const MESSAGE_BYTES_LIMIT: usize = 1 << 30;

type Decide = dyn Fn(&Upgrade<'_>) -> Result<Accept, Reject> + Send + Sync;
type MakeExtension = dyn Fn() -> Box<dyn Extension> + Send + Sync;

/// Options of the WebSocket connections of a listener. A clone costs a few reference counts.
///
/// ```
/// use ringserve_websocket::{Accept, Reject, WebSocketOptions};
///
/// let options = WebSocketOptions::new()
///     .origins(["https://example.org"])
///     .protocols(["chat.v2", "chat.v1"])
///     .message_bytes_max(64 << 10)
///     .upgrade(|upgrade| match (upgrade.path(), upgrade.cookie("session")) {
///         ("/chat", Some(session)) => Ok(Accept::new().data(session.to_owned())),
///         ("/chat", None) => Err(Reject::new(401)),
///         _ => Err(Reject::new(404)),
///     });
/// ```
#[derive(Clone)]
pub struct WebSocketOptions {
    pub(crate) message_bytes_max: usize,
    pub(crate) text: bool,
    pub(crate) binary_only: bool,
    protocols: Arc<[Arc<str>]>,
    origins: Option<Arc<[String]>>,
    decide: Option<Arc<Decide>>,
    extension: Option<Arc<MakeExtension>>,
}

impl WebSocketOptions {
    /// Allows messages of at most 1 MiB, every origin, no protocol.
    pub fn new() -> WebSocketOptions {
        WebSocketOptions {
            message_bytes_max: MESSAGE_BYTES_MAX,
            text: false,
            binary_only: false,
            protocols: Arc::new([]),
            origins: None,
            decide: None,
            extension: None,
        }
    }

    /// Sets the bytes of a message that a peer may send, up to 1 GiB. A larger one ends its
    /// connection with the code 1009, as soon as its length is known. A fragmented message is put
    /// together and held up to this size; for others the framing holds what it needs. A compressed
    /// message is held in that form too, which may be longer by a seventh and 64 bytes: if a
    /// compressor finds no repetition, it enlarges the message. Default 1 MiB.
    ///
    /// # Panics
    /// If it is 0, or above 1 GiB.
    #[must_use]
    pub fn message_bytes_max(self, bytes: usize) -> WebSocketOptions {
        let is_sound = (1..=MESSAGE_BYTES_LIMIT).contains(&bytes);
        assert!(is_sound, "message_bytes_max is {bytes}, and has to be from 1 to {MESSAGE_BYTES_LIMIT}");
        WebSocketOptions { message_bytes_max: bytes, ..self }
    }

    /// Sends replies as messages of text, which they have to be: this is not checked here, and a
    /// client ends the connection if one is not. By default they are sent as messages of bytes. A
    /// service of whole messages decides for each one itself.
    #[must_use]
    pub fn text(self) -> WebSocketOptions {
        WebSocketOptions { text: true, ..self }
    }

    /// Refuses messages of text: one ends its connection with the code 1003, as soon as its header
    /// arrives. For protocols of bytes that ask for it, such as MQTT. By default both kinds are
    /// accepted, even if the bytes of all messages are a stream. Sockets inside HTTP accept both:
    /// their messages name their kind.
    #[must_use]
    pub fn binary_only(self) -> WebSocketOptions {
        WebSocketOptions { binary_only: true, ..self }
    }

    /// Sets the protocols that may be spoken above WebSocket: the first of these that a client
    /// offers is chosen. A client that offers none of them is admitted without one.
    #[must_use]
    pub fn protocols<P: Into<Arc<str>>>(self, protocols: impl IntoIterator<Item = P>) -> WebSocketOptions {
        WebSocketOptions { protocols: protocols.into_iter().map(Into::into).collect(), ..self }
    }

    /// Sets the pages that may connect, such as `https://example.org`: a browser that shows another
    /// one is answered with 403. Clients that send no origin are admitted, since they are not
    /// browsers. By default all are, which is safe only if nothing that a browser sends by itself,
    /// such as a cookie, identifies the user.
    #[must_use]
    pub fn origins<O: Into<String>>(self, origins: impl IntoIterator<Item = O>) -> WebSocketOptions {
        WebSocketOptions { origins: Some(origins.into_iter().map(Into::into).collect()), ..self }
    }

    /// Calls `decide` with each request: it admits the client, or refuses it with an HTTP answer.
    /// Called after the check of the [origin](WebSocketOptions::origins). It must not wait; look
    /// things up in the service's `open`.
    #[must_use]
    pub fn upgrade(
        self,
        decide: impl Fn(&Upgrade<'_>) -> Result<Accept, Reject> + Send + Sync + 'static,
    ) -> WebSocketOptions {
        WebSocketOptions { decide: Some(Arc::new(decide)), ..self }
    }

    /// Compresses messages by one value of `make` on each shard, for clients that offer it.
    #[must_use]
    pub fn extension<E: Extension>(self, make: impl Fn() -> E + Send + Sync + 'static) -> WebSocketOptions {
        WebSocketOptions { extension: Some(Arc::new(move || Box::new(make()))), ..self }
    }

    /// Creates the extension of a shard.
    pub fn make_extension(&self) -> Option<Box<dyn Extension>> {
        self.extension.as_ref().map(|make| make())
    }

    /// The limit of a message.
    pub fn largest_message(&self) -> usize {
        self.message_bytes_max
    }

    /// Refuses a kind of message that is not accepted.
    ///
    /// # Errors
    /// A text where only [bytes](WebSocketOptions::binary_only) are accepted.
    pub(crate) fn check_kind(&self, kind: Kind) -> Result<(), Violation> {
        let what = "a message of text where bytes alone are taken";
        let is_taken = kind == Kind::Binary || !self.binary_only;
        if is_taken { Ok(()) } else { Err(Violation { code: close::UNSUPPORTED, what }) }
    }

    /// Decides on a request.
    pub(crate) fn decide(&self, upgrade: &Upgrade<'_>) -> Result<Accept, Reject> {
        if let (Some(origins), Some(origin)) = (&self.origins, upgrade.origin())
            && !origins.iter().any(|allowed| allowed.eq_ignore_ascii_case(origin))
        {
            return Err(Reject::new(403).text("pages of this origin may not ask"));
        }
        let mut accept = self.decide.as_ref().map_or_else(|| Ok(Accept::new()), |decide| decide(upgrade))?;
        match &accept.protocol {
            Some(chosen) if !upgrade.offers(chosen) => accept.protocol = None,
            Some(_) => {}
            None => {
                accept.protocol = self.protocols.iter().find(|protocol| upgrade.offers(protocol)).cloned();
            }
        }
        Ok(accept)
    }
}

impl Default for WebSocketOptions {
    fn default() -> WebSocketOptions {
        WebSocketOptions::new()
    }
}

impl fmt::Debug for WebSocketOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WebSocketOptions")
            .field("message_bytes_max", &self.message_bytes_max)
            .field("text", &self.text)
            .field("binary_only", &self.binary_only)
            .field("protocols", &self.protocols)
            .field("origins", &self.origins)
            .finish_non_exhaustive()
    }
}
