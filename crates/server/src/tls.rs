//! TLS below a service; with the feature `tls`, which is off by default.
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
//! The service does not change: frames, streams, codecs and HTTP lie above TLS,
//! [`Service::open`](crate::Service::open) is called after the handshake, and all limits hold.
//! [`Cx::tls`](crate::Cx::tls), [`OpenCx::tls`](crate::OpenCx::tls) and
//! [`Stream::tls`](crate::Stream::tls) return the facts of the handshake. [A
//! page](https://docs.rs/ringserve/latest/ringserve/guide/tls/index.html) of the guide has the
//! rest.
//!
//! The feature `tls` brings no cryptography. Choose one of `tls-ring`, `tls-graviola` and
//! `tls-aws-lc-rs`, or give a provider of rustls ([`Tls::provider`]).

use std::rc::Rc;

use ringserve_core::framing::TypedFraming;

pub use ringserve_tls::{
    CertificateExpiry, Clients, Identity, Pem, ServerTls, Tickets, Tls, TlsClient, TlsClientTransport,
    TlsError, TlsInfo, TlsListener, rustls,
};

use crate::server::builder::Server;
use crate::server::endpoint::Endpoint;
use crate::shard::face::cx::Cx;
use crate::shard::face::opening::OpenCx;
use crate::stream::byte_stream::Stream;

impl<F: TypedFraming + Clone + Send> Server<F> {
    /// Puts TLS below all connections. `tls` is a [`Tls`], or a [`TlsListener`] of which the
    /// program keeps a clone to replace its certificates. For a server with plain listeners beside
    /// it, use [several endpoints](Server::new), of which some [have TLS](Endpoint::tls).
    pub fn tls(self, tls: impl Into<TlsListener>) -> Server<F> {
        self.with_binds(|binds| binds.tls(tls.into()))
    }
}

impl Endpoint {
    /// Puts TLS below the connections of this endpoint. `tls` is a [`Tls`], or a [`TlsListener`] of
    /// which the program keeps a clone to replace its certificates.
    ///
    /// ```no_run
    /// use ringserve::listen::{endpoints, tcp};
    /// use ringserve::tls::{Pem, Tls};
    /// # use ringserve::{Cx, Frame, Server, Service, framing::Lines};
    /// # struct Echo;
    /// # impl Service for Echo {
    /// #     type Session = ();
    /// #     type Error = std::convert::Infallible;
    /// #     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
    /// #         cx.reply(frame);
    /// #         Ok(())
    /// #     }
    /// # }
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let tls = Tls::server().certificate(Pem::file("cert.pem")?, Pem::file("key.pem")?);
    /// let both = endpoints((tcp("0.0.0.0:7000"), tcp("0.0.0.0:7443").tls(tls)));
    /// Server::new().service(both.framing(Lines::default()), |_shard| Echo).serve()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn tls(self, tls: impl Into<TlsListener>) -> Endpoint {
        Endpoint(self.0.tls(tls.into()))
    }
}

impl<S: 'static> Cx<'_, S> {
    /// The facts of the connection's handshake; `None` without TLS.
    pub fn tls(&self) -> Option<Rc<TlsInfo>> {
        self.transport_info()
    }
}

impl OpenCx<'_> {
    /// The facts of the connection's handshake; `None` without TLS.
    ///
    /// ```
    /// use ringserve::{Cx, Frame, Service, service::{OpenCx, Refusal}};
    ///
    /// struct Billing;
    ///
    /// impl Service for Billing {
    ///     type Session = String;
    ///     type Error = std::convert::Infallible;
    ///
    ///     async fn open(&self, opening: &OpenCx<'_>) -> Result<String, Refusal> {
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
        self.transport_info()
    }
}

impl Stream {
    /// The facts of the connection's handshake; `None` without TLS.
    pub fn tls(&self) -> Option<Rc<TlsInfo>> {
        self.transport_info()
    }
}
