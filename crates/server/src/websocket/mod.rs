//! WebSocket below a service, and services of whole messages. With the feature `websocket`, which
//! is off by default.
//!
//! Any service is reached by browsers when its listener speaks WebSocket. The payloads of all
//! messages are its stream of bytes, however a client cuts them, and the replies of a turn leave as
//! one message of bytes:
//!
//! ```no_run
//! use ringserve::listen::{endpoints, tcp};
//! use ringserve::{Cx, Frame, Server, Service, framing::Lines};
//! # struct Echo;
//! # impl Service for Echo {
//! #     type Session = ();
//! #     type Error = std::convert::Infallible;
//! #     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
//! #         cx.reply(frame);
//! #         Ok(())
//! #     }
//! # }
//!
//! # fn main() -> Result<(), ringserve::Error> {
//! let both = endpoints((tcp("0.0.0.0:7000"), tcp("0.0.0.0:7080").websocket()));
//! Server::new().service(both.framing(Lines::default()), |_shard| Echo).serve()
//! # }
//! ```
//!
//! A service of lines takes each message of text as a line, and answers with such messages, above
//! the framing [`TextLines`]: one vocabulary for programs that send lines and for browsers. The two
//! services below share what a shard keeps:
//!
//! ```no_run
//! use std::cell::Cell;
//! use std::rc::Rc;
//!
//! use ringserve::listen::tcp;
//! use ringserve::websocket::TextLines;
//! use ringserve::{Cx, Frame, Server, Service, Shard, framing::Lines};
//!
//! struct Counter(Rc<Cell<u64>>);
//!
//! impl Service for Counter {
//!     type Session = ();
//!     type Error = std::convert::Infallible;
//!
//!     async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Self::Error> {
//!         match &line[..] {
//!             b"add" => self.0.set(self.0.get() + 1),
//!             b"show" => cx.reply(self.0.get().to_string()),
//!             _ => cx.reply("add or show"),
//!         }
//!         Ok(())
//!     }
//! }
//!
//! # fn main() -> Result<(), ringserve::Error> {
//! let counter = |shard: &Shard| Counter(shard.shared(Cell::default));
//! Server::new()
//!     .service(tcp("0.0.0.0:7000").framing(Lines::default()), counter)
//!     .service(tcp("0.0.0.0:7080").websocket().framing(TextLines), counter)
//!     .serve()
//! # }
//! ```
//!
//! A service that is made for WebSocket receives [messages](Message), each of text or of bytes, and
//! answers with such: a [`WebSocket`], served by [`ws`] above the framing [`Messages`].
//!
//! ```no_run
//! use std::convert::Infallible;
//!
//! use ringserve::websocket::{Message, Messages, WebSocket, WsCx};
//! use ringserve::{Server, ws};
//!
//! struct Echo;
//!
//! impl WebSocket for Echo {
//!     type Session = ();
//!     type Error = Infallible;
//!
//!     async fn message(&self, cx: &WsCx<'_, ()>, message: Message) -> Result<(), Infallible> {
//!         cx.send(message);
//!         Ok(())
//!     }
//! }
//!
//! # fn main() -> Result<(), ringserve::Error> {
//! Server::bind("0.0.0.0:7080").websocket().framing(Messages::text()).serve(|_shard| ws(Echo))
//! # }
//! ```
//!
//! TLS lies below where both are asked for, in either order: `tcp(..).tls(tls).websocket()` is
//! reached by `wss://`.
//!
//! # What it takes care of
//!
//! * The request is answered before [`Service::open`](crate::Service::open) is called, within
//!   [`Limits::handshake_timeout`](crate::Limits::handshake_timeout): heads of 16 KiB at most, 400,
//!   426 or 431 for what is no request of WebSocket. [`WebSocketOptions`] say which pages may ask,
//!   which protocols are spoken, and look at each request.
//! * What breaks the rules closes its connection with the code that RFC 6455 has for it. Text is
//!   checked, piece by piece.
//! * Pings are answered, the latest of those that came while the peer took nothing.
//!   [`Limits::heartbeat_interval`](crate::Limits::heartbeat_interval) asks silent peers for a sign
//!   of life by a ping, in the place of [`Service::heartbeat`](crate::Service::heartbeat).
//! * When the server shuts down, the code is 1001; when a call fails 1011; where the peer breaks a
//!   limit 1008.
//!
//! [A page](https://docs.rs/ringserve/latest/ringserve/guide/websocket/index.html) of the guide has
//! the rest.

mod service;

use std::rc::Rc;

use ringserve_core::framing::TypedFraming;
pub use ringserve_websocket::{
    Accept, Extension, InflateError, Kind, Messages, Reject, TextLines, Upgrade, WebSocketInfo,
    WebSocketOptions, close,
};
#[cfg(feature = "http")]
pub use ringserve_websocket::{ClientRequest, HandshakeError};
#[cfg(feature = "websocket-deflate")]
pub use ringserve_websocket::{Deflate, PerMessageDeflate};
pub use service::{WebSocket, Ws, WsCx, WsHandle, WsLocalHandle, WsService, ws};

pub use crate::message::{Message, Outgoing, Text};

#[cfg(feature = "http")]
pub use crate::http::connect::{ConnectError, connect};
#[cfg(feature = "http")]
pub use crate::http::socket::{Socket, SocketError};
#[cfg(feature = "http")]
pub use crate::http::websocket::{Upgrades, upgrade};
use crate::server::builder::Server;
use crate::server::endpoint::Endpoint;
use crate::shard::face::cx::Cx;
use crate::shard::face::opening::OpenCx;
use crate::stream::byte_stream::Stream;

impl<F: TypedFraming + Clone + Send> Server<F> {
    /// All connections speak WebSocket, every page may ask for one. A server that is also reached
    /// without it is one of [several endpoints](Server::new), of which some [speak
    /// it](Endpoint::websocket).
    pub fn websocket(self) -> Server<F> {
        self.websocket_with(WebSocketOptions::new())
    }

    /// The same with options.
    pub fn websocket_with(self, options: WebSocketOptions) -> Server<F> {
        self.with_binds(|binds| binds.websocket(options))
    }
}

impl Endpoint {
    /// Its connections speak WebSocket, every page may ask for one.
    pub fn websocket(self) -> Endpoint {
        self.websocket_with(WebSocketOptions::new())
    }

    /// The same with options.
    pub fn websocket_with(self, options: WebSocketOptions) -> Endpoint {
        Endpoint(self.0.websocket(options))
    }
}

impl<S: 'static> Cx<'_, S> {
    /// The facts of the connection's request; `None` without WebSocket.
    pub fn websocket(&self) -> Option<Rc<WebSocketInfo>> {
        self.transport_info()
    }
}

impl OpenCx<'_> {
    /// The facts of the connection's request; `None` without WebSocket.
    pub fn websocket(&self) -> Option<Rc<WebSocketInfo>> {
        self.transport_info()
    }

    /// Queues one message, for a service of whole messages ([`ws`]): a greeting, or a last message.
    /// As [`WsCx::send`].
    pub fn send<'p>(&self, message: impl Into<Outgoing<'p>>) {
        message.into().write(self.head());
    }
}

impl Stream {
    /// The facts of the connection's request; `None` without WebSocket.
    pub fn websocket(&self) -> Option<Rc<WebSocketInfo>> {
        self.transport_info()
    }
}
