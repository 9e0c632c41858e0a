//! Listeners with TLS.

use ringserve_core::framing::TypedFraming;
use ringserve_tls::TlsListener;
use tracing::{info, warn};

use super::addr::Bind;
use super::endpoint::Endpoint;
use super::transport::MakeTransport;
use crate::guard::guard;
use crate::server::builder::Server;
use crate::server::error::Error;
use crate::tls::{ServerTls, TlsError};

impl<F: TypedFraming + Clone + Send> Server<F> {
    /// All connections have TLS: a [`Tls`](crate::tls::Tls), or a [`TlsListener`] of which the program keeps a clone, to replace it. A
    /// server that is also reached without it is one of [several endpoints](Server::new), of which some [have it](Endpoint::tls).
    pub fn tls(self, tls: impl Into<TlsListener>) -> Server<F> {
        self.with_binds(|binds| binds.tls(tls.into()))
    }
}

impl Endpoint {
    /// Its connections have TLS: a [`Tls`](crate::tls::Tls), or a [`TlsListener`] of which the program keeps a clone, to replace it.
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

/// Looks at the TLS of a service's listeners, for a service that speaks `protocols`.
pub(crate) fn prepare(binds: &mut [Bind], protocols: &'static [&'static str]) -> Result<(), Error> {
    for bind in binds {
        if let Some(tls) = bind.tls.clone() {
            tls.prepare(protocols).map_err(Error::Tls)?;
            bind.transport = Some(MakeTransport::new(move || tls.transport()));
        }
    }
    Ok(())
}

/// What is replaced while the server runs.
pub(crate) fn all<'a>(binds: impl Iterator<Item = &'a Bind>) -> ServerTls {
    ServerTls::new(binds.filter_map(|bind| bind.tls.clone()).collect())
}

/// Begins to watch the files of all, and says what is dangerous.
pub(crate) fn begin<'a>(binds: impl Iterator<Item = &'a Bind>) -> Result<(), Error> {
    for bind in binds {
        let Some(tls) = &bind.tls else { continue };
        if let Some(file) = tls.key_log_file() {
            warn!(
                "the secrets of connections to {} are logged in {}: whoever reads it reads them",
                bind.addr,
                file.display()
            );
        }
        tls.watch(report).map_err(Error::Thread)?;
    }
    Ok(())
}

/// The program's logger may panic, and the thread that watches goes on.
fn report(reloaded: Result<(), TlsError>) {
    let _ = guard(|| match reloaded {
        Ok(()) => info!("TLS: certificates were read again"),
        Err(error) => warn!("TLS: the old certificates stay: {error}"),
    });
}
