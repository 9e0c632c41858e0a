//! Services of whole messages.

use std::fmt;
use std::future::{Future, ready};
use std::ops::Deref;

use ringserve_core::{Frame, Limits};
use ringserve_websocket::{Kind, MARK_BYTES, Messages, WebSocketInfo};

use crate::message::{Message, Outgoing};
use crate::overload::{Load, Shed};
use crate::shard::face::closed::CloseCx;
use crate::shard::face::conn_handle::{ConnHandle, LocalHandle, PushError};
use crate::shard::face::cx::Cx;
use crate::shard::face::handle::Shard;
use crate::shard::face::opening::{OpenCx, Refusal, Session, by_default};
use crate::shard::face::service::{FactoryError, FactoryOutput, IntoService, Service};

/// A handler of WebSocket messages: a [`Service`](crate::Service) whose frames are messages. [`ws`]
/// serves it.
///
/// ```
/// use ringserve::websocket::{Message, WebSocket, WsCx, close};
///
/// struct Adder;
///
/// impl WebSocket for Adder {
///     type Session = ();
///     type Error = std::num::ParseIntError;
///
///     async fn message(&self, cx: &WsCx<'_, ()>, message: Message) -> Result<(), Self::Error> {
///         let Some(text) = message.as_text() else {
///             cx.close_with(close::UNSUPPORTED, "only text");
///             return Ok(());
///         };
///         let sum = text.split('+').map(|number| number.trim().parse::<u64>()).sum::<Result<u64, _>>()?;
///         cx.send(sum.to_string());
///         Ok(())
///     }
/// }
/// ```
pub trait WebSocket: Sized + 'static {
    /// As [`Service::Session`].
    type Session: Session;

    /// As [`Service::Error`]. Its connection is closed with the code 1011.
    type Error: fmt::Display;

    /// As [`Service::open`]. What the request said is in [`OpenCx::websocket`]. One that is refused
    /// here was let in before, and is closed with the code 1008:
    /// [`WebSocketOptions::upgrade`](super::WebSocketOptions::upgrade) refuses with an answer of
    /// HTTP.
    ///
    /// # Errors
    /// A [`Refusal`] closes the connection after what was queued; [`close`](WebSocket::close) is
    /// not called then.
    fn open(&self, opening: &OpenCx<'_>) -> impl Future<Output = Result<Self::Session, Refusal>> {
        const {
            assert!(
                Self::Session::DEFAULT.is_some(),
                "a session without `Default` is made by `WebSocket::open`: write that method"
            );
        }
        let _ = opening;
        ready(by_default())
    }

    /// A message came. The next one of the same connection is handed over when this future is done,
    /// as with [`Service::call`].
    ///
    /// # Errors
    /// Closes the connection after its queued replies, with the code 1011.
    fn message(
        &self,
        cx: &WsCx<'_, Self::Session>,
        message: Message,
    ) -> impl Future<Output = Result<(), Self::Error>>;

    /// The shard is asked for more than it can do, and this message is one of the share to shed, as
    /// with [`Service::shed`]: answer it here at little cost, or have it [served](Shed::Serve) all
    /// the same. By default each message is served.
    fn shed(&self, cx: &WsCx<'_, Self::Session>, message: &Message, load: Load) -> Shed {
        let _ = (cx, message, load);
        Shed::Serve
    }

    /// As [`Service::draining`]. A connection that is cut then is closed with the code 1001.
    fn draining(&self, cx: &WsCx<'_, Self::Session>) {
        let _ = cx;
    }

    /// As [`Service::close`].
    fn close(&self, closed: &CloseCx<'_, Self::Session>) {
        let _ = closed;
    }
}

/// Serves a [`WebSocket`]: what a factory returns, of a server with the framing [`Messages`].
///
/// A message may be as long as [`Limits::frame_bytes_max`](crate::Limits::frame_bytes_max) and
/// [`WebSocketOptions::message_bytes_max`](super::WebSocketOptions::message_bytes_max) say, the
/// smaller of the two.
pub fn ws<W: WebSocket>(service: W) -> WsService<W> {
    WsService(service)
}

/// The service that [`ws`] returns.
#[derive(Clone, Debug)]
pub struct WsService<W>(W);

impl<W: WebSocket> IntoService<Messages> for WsService<W> {
    type Service = Ws<W>;

    fn into_service(self, _shard: &Shard) -> Result<FactoryOutput<Ws<W>>, FactoryError> {
        Ok(FactoryOutput::Now(Ws(self.0)))
    }

    fn adjust(limits: &mut Limits) {
        // Of the mark before a message the program need not know.
        limits.frame_bytes_max = limits.frame_bytes_max.saturating_add(MARK_BYTES).min(1 << 30);
    }
}

/// A [`WebSocket`] as a service of frames.
#[derive(Clone, Debug)]
pub struct Ws<W>(W);

impl<W: WebSocket> Service<Kind> for Ws<W> {
    type Session = W::Session;
    type Error = W::Error;

    fn open(&self, opening: &OpenCx<'_>) -> impl Future<Output = Result<W::Session, Refusal>> {
        self.0.open(opening)
    }

    async fn call(&self, cx: &Cx<'_, W::Session>, frame: Frame<Kind>) -> Result<(), W::Error> {
        self.0.message(&WsCx(cx), Message::new(frame)).await
    }

    fn shed(&self, cx: &Cx<'_, W::Session>, frame: &Frame<Kind>, load: Load) -> Shed {
        // Shares the bytes, and lets go of them before a call.
        self.0.shed(&WsCx(cx), &Message::new(frame.clone()), load)
    }

    fn draining(&self, cx: &Cx<'_, W::Session>) {
        self.0.draining(&WsCx(cx));
    }

    fn close(&self, closed: &CloseCx<'_, W::Session>) {
        self.0.close(closed);
    }
}

/// The connection of WebSocket that a call is for: a [`Cx`], with what messages need.
pub struct WsCx<'a, S>(&'a Cx<'a, S>);

impl<'a, S: 'static> WsCx<'a, S> {
    /// Queues one message. Those of a turn leave together.
    pub fn send<'p>(&self, message: impl Into<Outgoing<'p>>) {
        message.into().write(self.0.head());
    }

    /// Closes the connection after what is queued, with a code and a reason. [`Cx::close`] does so
    /// with 1000.
    ///
    /// # Panics
    /// If no close frame may carry the code, as 1005 and 1006, or the reason is longer than 123
    /// bytes.
    pub fn close_with(&self, code: u16, reason: &str) {
        if let Some(info) = self.0.transport_info::<WebSocketInfo>() {
            info.end_with(code, reason);
        }
        self.0.close();
    }

    /// Sends messages from any thread.
    pub fn ws_handle(&self) -> WsHandle {
        WsHandle(self.0.handle())
    }

    /// Sends messages from elsewhere on this shard. Costs nothing to make.
    pub fn ws_local_handle(&self) -> WsLocalHandle {
        WsLocalHandle(self.0.local_handle())
    }
}

impl<'a, S> Deref for WsCx<'a, S> {
    type Target = Cx<'a, S>;

    fn deref(&self) -> &Cx<'a, S> {
        self.0
    }
}

impl<S> fmt::Debug for WsCx<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl OpenCx<'_> {
    /// As [`WsCx::ws_handle`].
    pub fn ws_handle(&self) -> WsHandle {
        WsHandle(self.handle())
    }

    /// As [`WsCx::ws_local_handle`].
    pub fn ws_local_handle(&self) -> WsLocalHandle {
        WsLocalHandle(self.local_handle())
    }
}

/// Sends messages to a connection from any thread, as long as it lives: a [`ConnHandle`], with what
/// messages need.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct WsHandle(ConnHandle);

impl WsHandle {
    /// Queues one message. It is copied behind its header.
    ///
    /// # Errors
    /// As [`ConnHandle::push`].
    pub fn send<'p>(&self, message: impl Into<Outgoing<'p>>) -> Result<(), PushError> {
        self.0.push_raw(message.into().into_wire())
    }
}

impl Deref for WsHandle {
    type Target = ConnHandle;

    fn deref(&self) -> &ConnHandle {
        &self.0
    }
}

impl fmt::Debug for WsHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WsHandle({})", self.id())
    }
}

/// Sends messages to a connection from elsewhere on its shard: a [`LocalHandle`], with what
/// messages need.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct WsLocalHandle(LocalHandle);

impl WsLocalHandle {
    /// Queues one message.
    ///
    /// # Errors
    /// As [`LocalHandle::push`].
    pub fn send<'p>(&self, message: impl Into<Outgoing<'p>>) -> Result<(), PushError> {
        let head = self.0.room()?;
        message.into().write(&head);
        Ok(())
    }

    /// As [`WsCx::close_with`], if the connection is there.
    ///
    /// # Panics
    /// As [`WsCx::close_with`].
    pub fn close_with(&self, code: u16, reason: &str) {
        if let Some(info) = self.0.transport_info::<WebSocketInfo>() {
            info.end_with(code, reason);
        }
        self.0.close();
    }
}

impl Deref for WsLocalHandle {
    type Target = LocalHandle;

    fn deref(&self) -> &LocalHandle {
        &self.0
    }
}

impl fmt::Debug for WsLocalHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WsLocalHandle({})", self.id())
    }
}
