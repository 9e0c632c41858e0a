//! TLS below a service. With the feature `tls`, which is off by default.
//!
//! ```no_run
//! use ringserve::tls::{Pem, Tls};
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
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let tls = Tls::server().certificate(Pem::file("cert.pem")?, Pem::file("key.pem")?);
//! Server::bind("0.0.0.0:7000").tls(tls).framing(Lines::default()).serve(|_shard| Echo)?;
//! # Ok(())
//! # }
//! ```
//!
//! The service does not change: frames, streams, codecs and HTTP lie above TLS, [`Service::open`](crate::Service::open) is called once
//! the handshake is through, and all limits hold. [`Cx::tls`](crate::Cx::tls), [`Opening::tls`](crate::Opening::tls) and
//! [`Stream::tls`](crate::Stream::tls) say what it found out. [A page](https://docs.rs/ringserve/latest/ringserve/guide/tls/index.html)
//! of the guide has the rest.
//!
//! The feature `tls` brings no cryptography: that is one of `tls-ring`, `tls-graviola` and `tls-aws-lc-rs`, or a provider of rustls'
//! that the program gives ([`Tls::provider`]).

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

pub use ringserve_tls::{
    Clients, Identity, Pem, Tickets, Tls, TlsClient, TlsClientTransport, TlsError, TlsInfo, TlsListener,
    rustls,
};

use crate::cx::Cx;
use crate::opening::Opening;
use crate::stream::byte_stream::Stream;

/// The TLS of a running server ([`ServerControl::tls`](crate::ServerControl::tls)).
#[derive(Clone, Default)]
pub struct ServerTls {
    listeners: Arc<[TlsListener]>,
}

impl ServerTls {
    pub(crate) fn new(listeners: Vec<TlsListener>) -> ServerTls {
        ServerTls { listeners: listeners.into() }
    }

    /// New connections have `tls` from now on, at every address that has TLS. Those that are there keep what they have. Where
    /// addresses have different ones, keep a [`TlsListener`] of each instead.
    ///
    /// # Errors
    /// If it cannot be used: then the old one stays.
    pub fn replace(&self, tls: Tls) -> Result<(), TlsError> {
        self.listeners.iter().try_for_each(|listener| listener.replace(tls.clone()))
    }

    /// Reads the files of certificates, keys and authorities again, of every address that has TLS.
    ///
    /// # Errors
    /// Of the first whose files cannot be used: its old one stays, as those of the addresses behind it.
    pub fn reload(&self) -> Result<(), TlsError> {
        self.listeners.iter().try_for_each(TlsListener::reload)
    }
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ServerTls").field(&self.listeners).finish()
    }
}

impl<S: 'static> Cx<'_, S> {
    /// What the handshake of the connection found out; `None` without TLS.
    pub fn tls(&self) -> Option<Rc<TlsInfo>> {
        self.facts()
    }
}

impl Opening<'_> {
    /// What the handshake of the connection found out; `None` without TLS.
    ///
    /// ```
    /// use ringserve::{Cx, Frame, Opening, Refusal, Service};
    ///
    /// struct Billing;
    ///
    /// impl Service for Billing {
    ///     type Session = String;
    ///     type Error = std::convert::Infallible;
    ///
    ///     async fn open(&self, opening: &Opening<'_>) -> Result<String, Refusal> {
    ///         let tls = opening.tls().ok_or(Refusal::new("not encrypted"))?;
    ///         let name = tls.identity().and_then(|identity| identity.dns_names().next());
    ///         Ok(name.ok_or(Refusal::new("no certificate with a name"))?.to_owned())
    ///     }
    ///
    ///     async fn call(&self, cx: &Cx<'_, String>, frame: Frame) -> Result<(), Self::Error> {
    ///         cx.reply(cx.session().as_bytes());
    ///         Ok(())
    ///     }
    /// }
    /// ```
    pub fn tls(&self) -> Option<Rc<TlsInfo>> {
        self.facts()
    }
}

impl Stream {
    /// What the handshake of the connection found out; `None` without TLS.
    pub fn tls(&self) -> Option<Rc<TlsInfo>> {
        self.facts()
    }
}
